// Package cli implements the mula command: flags, progress, tables and exit codes. Other packages
// do the work.
//
// Flags may be before or after operands. The exit code is 0 for success, 1 for a failure and 2 for
// wrong usage. Results are written to standard output, as tables or, with --json, as JSON. Progress
// and messages are written to standard error.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"unicode"
	"unicode/utf8"

	"github.com/urfave/cli/v2"

	"mula/internal/blockcache"
	"mula/internal/filesystem"
	"mula/internal/quantity"
	"mula/internal/suggest"
	"mula/internal/version"
)

// Exit codes.
const (
	exitDone   = 0
	exitFailed = 1
	exitUsage  = 2
)

// usageError is wrong usage. The process exits with 2.
type usageError struct{ text string }

func (e *usageError) Error() string { return e.text }

// exitCode makes the process exit with this code, without a message.
type exitCode int

func (e exitCode) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

func usagef(format string, args ...any) error {
	return &usageError{fmt.Sprintf(format, args...)}
}

// Main runs the command line args (args[0] is the program's name) and returns the exit code.
func Main(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	return run(nil, args, stdin, stdout, stderr)
}

// filesystemKey is the key of [cli.App.Metadata] for the file system of outputs.
const filesystemKey = "filesystem"

// fileSystem returns the file system of a command's outputs; nil is the machine's.
func fileSystem(c *cli.Context) filesystem.FS {
	fsys, _ := c.App.Metadata[filesystemKey].(filesystem.FS)
	return fsys
}

// run is [Main] with outputs on another file system, which tests pass; nil is the machine's.
func run(fsys filesystem.FS, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	out := &output{w: stdout}
	stderr = newMessages(stderr)
	app := newApp(stdin, out, stderr)
	app.Metadata = map[string]any{filesystemKey: fsys}
	if len(args) > 2 && args[1] == completeWord {
		if complete(app, args[2:], out) != nil {
			return exitFailed
		}
		return exitDone
	}
	ctx, stop := notifyContext(context.Background(), stopSignals...)
	defer stop()
	current, warnings, err := renames.apply(app.Commands, args)
	printWarnings(stderr, warnings)
	var ordered []string
	if err == nil {
		ordered, err = flagsFirst(app.Commands, current)
	}
	if err == nil {
		err = app.RunContext(ctx, ordered)
	}
	if failure := blockcache.Failure(); failure != nil {
		printWarnings(stderr, []string{failure.Error()})
	}
	if err == nil && out.err != nil {
		err = fmt.Errorf("writing to standard output: %w", out.err)
	}
	var usage *usageError
	var code exitCode
	switch {
	case err == nil, errors.Is(err, syscall.EPIPE) && out.err != nil: // the reader has closed the pipe
		return exitDone
	case errors.As(err, &code):
		return int(code)
	case errors.As(err, &usage):
		fmt.Fprintf(stderr, "mula: %s\n", printable(err.Error()))
		return exitUsage
	case errors.Is(err, context.Canceled) && ctx.Err() != nil:
		fmt.Fprintln(stderr, "mula: interrupted; no partial output files were left")
		return exitFailed
	default:
		fmt.Fprintf(stderr, "mula: %s\n", printable(err.Error()))
		return exitFailed
	}
}

// A signalError is the cause of the end of a command's context.
type signalError struct{ signal os.Signal }

func (e signalError) Error() string { return fmt.Sprintf("signal %v", e.signal) }

// notifyContext is signal.NotifyContext with a [signalError] as the cause. The error has the
// signal.
func notifyContext(parent context.Context, signals ...os.Signal) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(parent)
	c := make(chan os.Signal, 1)
	signal.Notify(c, signals...)
	go func() {
		select {
		case s := <-c:
			cancel(signalError{s})
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		signal.Stop(c)
		cancel(nil)
	}
}

// output is standard output. It keeps the first error, so that a lost table is a failure.
type output struct {
	w   io.Writer
	err error
}

func (o *output) Write(p []byte) (int, error) {
	n, err := o.w.Write(p)
	if o.err == nil {
		o.err = err
	}
	return n, err
}

// printable escapes text for a terminal. Control characters, which could move the cursor or change
// colours, and invalid UTF-8 are written as in Go strings. Line breaks and tabs do not change.
func printable(text string) string {
	var b strings.Builder
	for i, r := range text {
		switch {
		case r == '\n' || r == '\t' || unicode.IsPrint(r) && r != utf8.RuneError:
			b.WriteRune(r)
		case r == utf8.RuneError && !strings.HasPrefix(text[i:], "\ufffd"):
			fmt.Fprintf(&b, `\x%02x`, text[i])
		case r == utf8.RuneError:
			b.WriteRune(r)
		default:
			b.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
		}
	}
	return b.String()
}

// atMost returns an error if a flag is negative or above limit.
func atMost(c *cli.Context, limit int64, names ...string) error {
	for _, name := range names {
		var n int64
		switch v := c.Value(name).(type) {
		case int:
			n = int64(v)
		case int64:
			n = v
		}
		if n < 0 || n > limit {
			return usagef("--%s is %d; it must be from 0 to %s", name, n, quantity.Grouped(limit))
		}
	}
	return nil
}

const (
	maxThreads = 4096
	maxNumber  = math.MaxInt64 // for flags without an upper limit
)

func newApp(stdin io.Reader, stdout, stderr io.Writer) *cli.App {
	app := &cli.App{
		Name:  "mula",
		Usage: "blend token corpora into one exact order of samples, and train mixture-of-experts models on it",
		Description: "A typical workflow: tokenize documents into shards, blend shards into a plan, train on the " +
			"plan.\n" +
			"`mula COMMAND --help` shows a command's flags and an example.",
		Version:         version.String(),
		HideHelpCommand: true,
		// the library adds the flag only if no command is called help
		Flags:          []cli.Flag{quietFlag, cli.HelpFlag},
		Reader:         stdin,
		Writer:         stdout,
		ErrWriter:      stderr,
		ExitErrHandler: func(*cli.Context, error) {}, // Main decides on the exit code
		Action: func(c *cli.Context) error {
			if c.Args().Present() {
				return unknownCommand(c.App.Commands, "mula", c.Args().First())
			}
			return cli.ShowAppHelp(c)
		},
		Commands: []*cli.Command{
			tokenizerCommand(),
			tokenizeCommand(),
			convertCommand(),
			blendCommand(),
			planCommand(),
			indexCommand(),
			peekCommand(),
			whereCommand(),
			hashCommand(),
			verifyCommand(),
			streamCommand(),
			serveCommand(),
			simulateCommand(),
			checkCommand(),
			trainCommand(),
			launchCommand(),
			evalCommand(),
			generateCommand(),
			exportCommand(),
			importCommand(),
			reportCommand(),
			estimateCommand(),
			devicesCommand(),
			doctorCommand(),
			helpCommand(),
			versionCommand(),
			completionCommand(),
		},
	}
	onUsageError := func(c *cli.Context, err error, _ bool) error {
		name, flags := "mula", c.App.Flags
		if c.Command != nil && c.Command.Name != "" {
			name, flags = c.Command.HelpName, c.Command.Flags
			err = badValue(c.Command, err)
		}
		if near := nearFlag(flags, err); near != "" {
			return usagef("%s; did you mean --%s? See `%s --help`", longFlags(err.Error()), near, name)
		}
		return usagef("%s: see `%s --help`", longFlags(err.Error()), name)
	}
	app.OnUsageError = onUsageError
	var finish func(commands []*cli.Command)
	finish = func(commands []*cli.Command) {
		for _, c := range commands {
			c.OnUsageError = onUsageError
			c.HideHelpCommand = true
			if len(c.Subcommands) == 0 || len(c.Flags) > 0 {
				// the library adds the flags too late for a help text with categories
				c.Flags = append(c.Flags, quietFlag, cli.HelpFlag)
			}
			if len(c.Subcommands) > 0 {
				finish(c.Subcommands)
				own := c.Action // of a command that also works without a subcommand, such as `mula index`
				c.Action = func(ctx *cli.Context) error {
					if ctx.Args().Present() {
						return unknownCommand(ctx.Command.Subcommands, ctx.Command.HelpName, ctx.Args().First())
					}
					if own != nil && ctx.NumFlags() > 0 {
						return own(ctx)
					}
					return cli.ShowSubcommandHelp(ctx)
				}
			}
		}
	}
	finish(app.Commands)
	checkValues(app.Commands)
	refuseURLs(app.Commands)
	obeyQuiet(app.Commands)
	return app
}

// unreadable matches the flag package's message about an invalid value, before the reason.
var unreadable = regexp.MustCompile(`^invalid (?:boolean )?value (".*") for (?:flag )?-+([a-zA-Z-]+): `)

// badValue returns an error with the required form of a flag's value if err is about an invalid
// value. Otherwise it returns err.
func badValue(command *cli.Command, err error) error {
	m := unreadable.FindStringSubmatch(err.Error())
	if m == nil {
		return err
	}
	for _, f := range command.Flags {
		if !slices.Contains(f.Names(), m[2]) {
			continue
		}
		want := ""
		switch f.(type) {
		case *cli.Uint64Flag:
			want = "a whole number from 0 to 2^64-1"
		case *cli.IntFlag, *cli.Int64Flag:
			want = "a whole number"
		case *cli.Float64Flag:
			want = "a number"
		case *cli.BoolFlag:
			want = "true or false"
		case *cli.DurationFlag:
			want = "a duration such as 10s, 5m or 1h30m"
		default:
			return err
		}
		return usagef("--%s is %s; it must be %s", m[2], m[1], want)
	}
	return err
}

// longFlags writes flags in a message of the flag package with two dashes, as in the documentation.
func longFlags(text string) string {
	words := strings.Split(text, " ")
	for i, w := range words {
		name := strings.TrimLeft(w, "\"'")
		if rest, ok := strings.CutPrefix(name, "-"); ok && len(rest) > 1 && rest[0] != '-' && (rest[0] < '0' ||
			rest[0] > '9') {
			words[i] = w[:len(w)-len(name)] + "-" + name
		}
	}
	return strings.Join(words, " ")
}

func unknownCommand(commands []*cli.Command, prefix, name string) error {
	names := make([]string, len(commands))
	for i, c := range commands {
		names[i] = c.Name
	}
	if best := suggest.Nearest(name, names); best != "" {
		return usagef("%s has no command %q; did you mean `%s %s`?", prefix, name, prefix, best)
	}
	return usagef("%s has no command %q; `%s --help` lists them", prefix, name, prefix)
}

// flagsFirst moves the flags of a command before its operands, because the library stops reading
// flags at the first operand: `mula tokenize part.jsonl --output x` becomes `mula tokenize --output
// x -- part.jsonl`. All arguments after `--` are operands.
func flagsFirst(commands []*cli.Command, args []string) ([]string, error) {
	if len(args) == 0 {
		return []string{"mula"}, nil
	}
	head, rest := []string{"mula"}, args[1:]
	var command *cli.Command
	var flags, operands []string
	for len(rest) > 0 {
		if isQuiet(rest[0]) {
			flags, rest = append(flags, rest[0]), rest[1:]
			continue
		}
		i := slices.IndexFunc(commands, func(c *cli.Command) bool { return c.HasName(rest[0]) })
		if i < 0 {
			break
		}
		command, commands = commands[i], commands[i].Subcommands
		head, rest = append(head, rest[0]), rest[1:]
	}
	if command == nil || len(command.Subcommands) > 0 && len(command.Flags) == 0 {
		return args, nil
	}
	for i := 0; i < len(rest); i++ {
		arg := rest[i]
		if arg == "--" {
			operands = append(operands, rest[i+1:]...)
			break
		}
		if arg == "-" || !strings.HasPrefix(arg, "-") {
			operands = append(operands, arg)
			continue
		}
		flags = append(flags, arg)
		name, value, hasValue := strings.Cut(strings.TrimLeft(arg, "-"), "=")
		if hasValue {
			if err := decimalFlag(command, name, value); err != nil {
				return nil, err
			}
		}
		if hasValue || !takesValue(command, name) {
			continue
		}
		if i+1 == len(rest) {
			return nil, usagef("flag --%s needs a value: see `%s --help`", name, strings.Join(head, " "))
		}
		i++
		if err := decimalFlag(command, name, rest[i]); err != nil {
			return nil, err
		}
		flags = append(flags, rest[i])
	}
	out := append(head, flags...)
	if len(operands) > 0 {
		out = append(append(out, "--"), operands...)
	}
	return out, nil
}

// decimalFlag refuses a number that is not decimal: the library would read 010 as 8 and 1_0 as 10.
// The library refuses text that is not a number.
func decimalFlag(command *cli.Command, name, value string) error {
	for _, f := range command.Flags {
		if !slices.Contains(f.Names(), name) {
			continue
		}
		switch f.(type) {
		case *cli.IntFlag, *cli.Int64Flag, *cli.Uint64Flag, *cli.Float64Flag:
			_, err := quantity.Decimal(value)
			_, float := f.(*cli.Float64Flag)
			if _, number := strconv.ParseFloat(value, 64); float && errors.Is(err, quantity.ErrForm) && number == nil {
				// inf, nan, 0x1p3
				return usagef("--%s is %q; it must be a finite number in decimal", name, value)
			}
			if err != nil && !errors.Is(err, quantity.ErrForm) {
				return usagef("--%s: %v", name, err)
			}
		}
	}
	return nil
}

func takesValue(command *cli.Command, name string) bool {
	for _, f := range command.Flags {
		if slices.Contains(f.Names(), name) {
			d, ok := f.(cli.DocGenerationFlag)
			return ok && d.TakesValue()
		}
	}
	return false // help, or an unknown flag, which the flag package refuses
}

// jsonFlag is the flag of every command that prints a table.
var jsonFlag = &cli.BoolFlag{Name: "json", Usage: "print machine-readable JSON instead of tables"}

func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// needFlags returns an error if one of these flags is missing. The library's own check would print
// the complete help.
func needFlags(c *cli.Context, names ...string) error {
	for _, name := range names {
		if c.String(name) == "" {
			return usagef("--%s is required: see `%s --help`", name, c.Command.HelpName)
		}
	}
	return nil
}

func noOperands(c *cli.Context) error {
	if c.Args().Present() {
		return usagef("unexpected %q: see `%s --help`", c.Args().First(), c.Command.HelpName)
	}
	return nil
}
