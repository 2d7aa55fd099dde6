package cli

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"mula/index/blendcorpus"
	"mula/index/cache"
	"mula/index/megatron"
	"mula/index/olmo"
	"mula/index/rebuild"
	"mula/internal/filesystem/objectfs"
	"mula/internal/locks"
	"mula/internal/objects"
	"mula/internal/quantity"
)

// These errors make `mula index verify` exit with 1 after it has printed the differences, or the
// parts that it could not compute.
var (
	errIndexDiffers = errors.New("the cache differs from its descriptions")
	errIndexUnknown = errors.New("parts of the cache could not be verified, for the reasons above")
)

func indexVerifyCommand() *cli.Command {
	return &cli.Command{
		Name:      "verify",
		Usage:     "recompute the index files in a folder, and report the first byte that differs",
		ArgsUsage: "DIR",
		Description: "Shows the releases of the framework that could have written each file, and the settings that " +
			"are not in its name.\n" +
			"Writes nothing. Exits with 1 if anything differs. DIR may be a URL of an object store.\n\n" +
			"Example: mula index verify /data/cache --root /data\n" +
			"         mula index verify s3://corpus/index --root s3://corpus/tokens",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "root",
				Usage: "resolve relative prefixes from `DIR`; may be a URL of an object store"},
			&cli.StringFlag{Name: "plan",
				Usage: "compare OLMo-core's orders with the order of the plan in `FILE`"},
			&cli.Int64Flag{Name: "global-batch-size", Usage: "with --plan: the same value as for mula index",
				DefaultText: "none"},
			&cli.IntFlag{Name: "threads", Usage: "compute on `N` cores; 0: all"},
			jsonFlag,
		},
		Action: runIndexVerify,
	}
}

// findingsError returns the error that sets the exit code.
func findingsError(verdicts []rebuild.Verdict) error {
	switch {
	case allEqual(verdicts):
		return nil
	case slices.ContainsFunc(verdicts, func(v rebuild.Verdict) bool { return v.Differs }):
		return errIndexDiffers
	}
	return errIndexUnknown
}

func allEqual(verdicts []rebuild.Verdict) bool {
	return !slices.ContainsFunc(verdicts, func(v rebuild.Verdict) bool { return !v.Equal })
}

func runIndexVerify(c *cli.Context) error {
	if c.NArg() != 1 {
		return usagef("one folder of index files is required: see `%s --help`", c.Command.HelpName)
	}
	if err := atMost(c, maxThreads, "threads"); err != nil {
		return err
	}
	dir := c.Args().First()
	fsys := objectfs.New(c.Context, nil, "") // which is only read
	names, err := fsys.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("verifying index files: %w", err)
	}
	var found rebuild.Report
	state, _ := fsys.ReadDir(objects.Join(dir, cache.StateDir)) // only for a note
	if slices.ContainsFunc(state, func(e fs.DirEntry) bool { return strings.HasSuffix(e.Name(), locks.Suffix) }) {
		found.Notes = append(found.Notes, "there are locks in "+cache.StateDir+": a build seems to be running, "+
			"and its unfinished files differ")
	}
	kinds := map[string]bool{}
	for _, e := range names {
		switch name := e.Name(); {
		case strings.HasPrefix(name, "."):
		case strings.HasSuffix(name, "-description.txt"), strings.HasSuffix(name, "-document_index.npy"):
			kinds[forMegatron] = true
		case strings.HasSuffix(name, ".dsc"):
			kinds[forBlendCorpus] = true
		case olmo.IsName(name):
			kinds[forOLMo] = true
		}
	}
	if len(kinds) == 0 {
		return fmt.Errorf("%s holds no index files of Megatron-LM (*-description.txt), BlendCorpus (*.dsc) or "+
			"OLMo-core (global_indices_*.npy)", dir)
	}
	p := newProgress(c.App.ErrWriter)
	defer p.end()
	options := rebuild.VerifyOptions{Root: c.String("root"), Threads: threads(c), FS: fsys,
		Progress: func(_, _ int, description string) { p.update(description, 0, 0) }}
	for _, kind := range []struct {
		name   string
		verify func() (rebuild.Report, error)
	}{
		{forMegatron, func() (rebuild.Report, error) {
			o := options
			o.Progress = func(finished, all int, description string) {
				p.update(fmt.Sprintf("%d of %d sets, %s", finished, all, description), float64(finished), float64(all))
			}
			return megatron.Verify(c.Context, dir, o)
		}},
		{forBlendCorpus, func() (rebuild.Report, error) { return blendcorpus.Verify(c.Context, dir, options) }},
		{forOLMo, func() (rebuild.Report, error) { return verifyOLMo(c, dir, options) }},
	} {
		if !kinds[kind.name] {
			continue
		}
		r, err := kind.verify()
		if err != nil {
			return err
		}
		found.Verdicts = append(found.Verdicts, r.Verdicts...)
		found.Notes = append(found.Notes, r.Notes...)
		found.Writers = append(found.Writers, r.Writers...)
	}
	p.end()
	w := c.App.Writer
	if c.Bool("json") {
		if err := printJSON(w, map[string]any{"folder": dir, "equal": allEqual(found.Verdicts), "sets": found.Verdicts,
			"notes": found.Notes, "writers": found.Writers}); err != nil {
			return err
		}
	} else {
		printFindings(w, &found)
	}
	return findingsError(found.Verdicts)
}

// verdictRows is the maximum number of equal sets in the table. All differing sets are shown.
const verdictRows = 40

func printFindings(w io.Writer, found *rebuild.Report) {
	t := newTable("verdict", "kind", "split", "of", "settings", "description")
	shown, equal := 0, 0
	for _, v := range found.Verdicts {
		word := "UNKNOWN"
		if v.Equal {
			word = "equal"
			equal++
		} else if v.Differs {
			word = "DIFFERS"
		}
		if v.Equal && shown >= verdictRows {
			continue
		}
		shown++
		of := quantity.Plural(int64(len(v.Prefixes)), "token file")
		if len(v.Prefixes) == 1 {
			of = v.Prefixes[0]
		}
		t.row(word, v.Kind, v.Split, printable(of), v.Settings, printable(v.Description))
	}
	t.write(w)
	if n := len(found.Verdicts) - shown; n > 0 {
		fmt.Fprintf(w, "… and %s that are equal (--json lists all)\n", quantity.Plural(int64(n), "set"))
	}
	for _, v := range found.Verdicts {
		if v.Problem != "" {
			fmt.Fprintf(w, "%s: %s\n", printable(v.Description), printable(v.Problem))
		}
	}
	for _, note := range found.Notes {
		fmt.Fprintf(w, "note: %s\n", printable(note))
	}
	fmt.Fprintf(w, "\n%d of %s equal, byte for byte", equal, quantity.Plural(int64(len(found.Verdicts)), "set"))
	if len(found.Writers) > 0 {
		fmt.Fprintf(w, "; written by %s", strings.Join(found.Writers, ", or "))
	}
	fmt.Fprintln(w)
}
