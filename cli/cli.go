// Package cli is the mula command: flags, progress, tables and exit codes. The packages below it do
// the work.
//
// Flags may come before or after operands. The exit code is 0 for success, 1 for a failure and 2 for
// a wrong call. Results go to standard output, as tables or, with --json, as JSON. Progress and
// messages go to standard error.
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

// usageError is a wrong call; it makes the process exit with 2.
type usageError struct{ text string }

func (e *usageError) Error() string { return e.text }

// exitCode makes the process exit with a code of its own. What there is to say has been said.
type exitCode int

func (e exitCode) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

func usagef(format string, args ...any) error {
	return &usageError{fmt.Sprintf(format, args...)}
}

// Main runs the command line args (args[0] is the program's name) and returns the exit code.
func Main(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	out := &output{w: stdout}
	stderr = newMessages(stderr)
	app := newApp(stdin, out, stderr)
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
	if err == nil && out.err != nil {
		err = fmt.Errorf("writing to standard output: %w", out.err)
	}
	var usage *usageError
	var code exitCode
	switch {
	case err == nil, errors.Is(err, syscall.EPIPE) && out.err != nil: // who reads the output has had enough of it
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

// notifyContext is signal.NotifyContext with a [signalError] as the cause, which says which signal
// ended the context.
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

// output is standard output. It keeps the first error, so that a table that went nowhere does not
// count as done.
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

// printable makes text that may come from a file fit for a terminal: control characters, which
// could move the cursor or change colours, and bytes that are not UTF-8 are written as in Go
// strings. Line breaks and tabs stay.
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

// plural is n and the noun, in the number that fits.
func plural(n int64, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return quantity.Grouped(n) + " " + noun + "s"
}

// atMost refuses flags that are negative or beyond any use.
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
	maxNumber  = math.MaxInt64 // of flags that need only not be negative
)

func newApp(stdin io.Reader, stdout, stderr io.Writer) *cli.App {
	app := &cli.App{
		Name:  "mula",
		Usage: "blend token corpora into one exact order of samples, and train mixture-of-experts models on it",
		Description: "The usual way: tokenize documents into shards, blend shards into a plan, train on the plan.\n" +
			"`mula COMMAND --help` shows a command's flags and an example.",
		Version:         version.String(),
		HideHelpCommand: true,
		// the library adds it only to a program without a command of this name
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
				// the library adds it too late for a help text with categories
				c.Flags = append(c.Flags, quietFlag, cli.HelpFlag)
			}
			if len(c.Subcommands) > 0 {
				finish(c.Subcommands)
				own := c.Action // of a command that does something by itself, as `mula index`
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

// unreadable is what the flag package says of a value that it cannot read, before the reason.
var unreadable = regexp.MustCompile(`^invalid (?:boolean )?value (".*") for (?:flag )?-+([a-zA-Z-]+): `)

// badValue says what the value of a flag must be, where err is that it cannot be read; otherwise it
// gives err.
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

// longFlags writes the flags named in a message of the flag package with the two dashes they are
// documented with.
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
// x -- part.jsonl`. What follows a `--` is an operand.
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

// decimalFlag refuses a number that is not written in decimal: the library would take 010 for 8 and
// 1_0 for 10. Text that is no number is left to the library.
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
	return false // help, or unknown: the flag package says which
}

// jsonFlag is the flag of every command that prints a table for people.
var jsonFlag = &cli.BoolFlag{Name: "json", Usage: "print machine-readable JSON instead of tables"}

func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// needFlags refuses a call without one of these flags. The library's own check would print the
// whole help first.
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
