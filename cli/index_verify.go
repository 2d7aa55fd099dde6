package cli

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"mula/index/blendcorpus"
	"mula/index/cache"
	"mula/index/megatron"
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
			"Writes nothing. Exits with 1 if anything differs.\n\n" +
			"Example: mula index verify /data/cache --root /data",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "root", Usage: "resolve relative prefixes from `DIR`"},
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

// A verdict is the result of `mula index verify` for one description.
type verdict struct {
	Description string   `json:"description"`
	Kind        string   `json:"kind"`
	Split       string   `json:"split,omitempty"`
	Prefixes    []string `json:"prefixes"`
	Equal       bool     `json:"equal"`
	Differs     bool     `json:"differs"`            // if neither Equal nor Differs, it could not be computed
	Settings    string   `json:"settings,omitempty"` // settings that are not in the name
	Problem     string   `json:"problem,omitempty"`  // error or difference
}

// A findings is the result of `mula index verify` for a folder.
type findings struct {
	Verdicts []verdict `json:"sets"`
	Notes    []string  `json:"notes"`
	Writers  []string  `json:"writers"` // programs that could have written the equal files
}

func (f *findings) equal() bool {
	return !slices.ContainsFunc(f.Verdicts, func(v verdict) bool { return !v.Equal })
}

func (f *findings) err() error {
	switch {
	case f.equal():
		return nil
	case slices.ContainsFunc(f.Verdicts, func(v verdict) bool { return v.Differs }):
		return errIndexDiffers
	}
	return errIndexUnknown
}

func runIndexVerify(c *cli.Context) error {
	if c.NArg() != 1 {
		return usagef("one folder of index files is required: see `%s --help`", c.Command.HelpName)
	}
	if err := atMost(c, maxThreads, "threads"); err != nil {
		return err
	}
	dir := c.Args().First()
	names, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("verifying index files: %w", err)
	}
	var found findings
	kinds := map[string]bool{}
	for _, e := range names {
		switch name := e.Name(); {
		case name == cache.StateDir:
			state, _ := os.ReadDir(filepath.Join(dir, name)) // only for a note
			if slices.ContainsFunc(state, func(e fs.DirEntry) bool { return strings.HasSuffix(e.Name(), ".lock") }) {
				found.Notes = append(found.Notes,
					"there are locks in "+cache.StateDir+": a build seems to be running, "+
						"and its unfinished files differ")
			}
		case strings.HasPrefix(name, "."):
		case strings.HasSuffix(name, "-description.txt"), strings.HasSuffix(name, "-document_index.npy"):
			kinds[forMegatron] = true
		case strings.HasSuffix(name, ".dsc"):
			kinds[forBlendCorpus] = true
		case isGlobalIndices(name):
			kinds[forOLMo] = true
		}
	}
	if len(kinds) == 0 {
		return fmt.Errorf("%s holds no index files of Megatron-LM (*-description.txt), BlendCorpus (*.dsc) or "+
			"OLMo-core (global_indices_*.npy)", dir)
	}
	p := newProgress(c.App.ErrWriter)
	defer p.end()
	for _, kind := range []struct {
		name   string
		verify func(*cli.Context, string, *progress, *findings) error
	}{{forMegatron, verifyMegatron}, {forBlendCorpus, verifyBlendCorpus}, {forOLMo, verifyOLMo}} {
		if kinds[kind.name] {
			if err := kind.verify(c, dir, p, &found); err != nil {
				return err
			}
		}
	}
	p.end()
	w := c.App.Writer
	if c.Bool("json") {
		if err := printJSON(w, map[string]any{"folder": dir, "equal": found.equal(), "sets": found.Verdicts,
			"notes": found.Notes, "writers": found.Writers}); err != nil {
			return err
		}
	} else {
		printFindings(w, &found)
	}
	return found.err()
}

// verdictRows is the maximum number of equal sets in the table. All differing sets are shown.
const verdictRows = 40

func printFindings(w io.Writer, found *findings) {
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
		of := plural(int64(len(v.Prefixes)), "token file")
		if len(v.Prefixes) == 1 {
			of = v.Prefixes[0]
		}
		t.row(word, v.Kind, v.Split, printable(of), v.Settings, printable(v.Description))
	}
	t.write(w)
	if n := len(found.Verdicts) - shown; n > 0 {
		fmt.Fprintf(w, "… and %s that are equal (--json lists all)\n", plural(int64(n), "set"))
	}
	for _, v := range found.Verdicts {
		if v.Problem != "" {
			fmt.Fprintf(w, "%s: %s\n", printable(v.Description), printable(v.Problem))
		}
	}
	for _, note := range found.Notes {
		fmt.Fprintf(w, "note: %s\n", printable(note))
	}
	fmt.Fprintf(w, "\n%d of %s equal, byte for byte", equal, plural(int64(len(found.Verdicts)), "set"))
	if len(found.Writers) > 0 {
		fmt.Fprintf(w, "; written by %s", strings.Join(found.Writers, ", or "))
	}
	fmt.Fprintln(w)
}

func verifyMegatron(c *cli.Context, dir string, p *progress, found *findings) error {
	report, err := megatron.Verify(c.Context, dir, megatron.VerifyOptions{Root: c.String("root"), Threads: threads(c),
		Progress: func(finished, all int, u megatron.UnitReport) {
			p.update(fmt.Sprintf("%d of %d sets, %s", finished, all, u.Description), float64(finished), float64(all))
		}})
	if err != nil {
		return err
	}
	equal := 0
	for _, u := range report.Units {
		v := verdict{Description: u.Description, Kind: u.Class, Split: u.Split.String(), Prefixes: u.Prefixes,
			Equal: u.OK && len(u.Absent) == 0}
		switch {
		case u.Problem != nil:
			v.Problem = u.Problem.Error()
		case !u.OK:
			v.Differs, v.Problem = true, differences(u.Files)
		case len(u.Absent) > 0:
			v.Differs, v.Problem = true, fmt.Sprintf("datasets of the blend are missing: %s, the first is %s",
				plural(int64(len(u.Absent)), "description"), u.Absent[0])
		}
		if u.OK {
			equal++
			var settings []string
			if u.Class == "GPTDataset" {
				if u.EitherToken {
					settings = append(settings, "extra token or not")
				} else if !u.ExtraToken {
					settings = append(settings, "no extra token")
				}
				if u.KeepPartial {
					settings = append(settings, "partial sample kept")
				}
			} else {
				settings = append(settings, u.Arithmetic.String())
			}
			v.Settings = strings.Join(settings, ", ")
		}
		found.Verdicts = append(found.Verdicts, v)
	}
	for _, name := range report.Orphans {
		found.Notes = append(found.Notes, name+" has no description: Megatron-LM does not use it")
	}
	if equal > 0 {
		for _, profile := range report.Profiles() {
			found.Writers = append(found.Writers, "Megatron core "+profile.Releases())
		}
	}
	return nil
}

// differences describes the first difference of each file.
func differences(files []megatron.FileReport) string {
	var out []string
	for _, f := range files {
		switch {
		case f.Missing:
			out = append(out, f.Name+" is missing")
		case !f.OK():
			out = append(out, fmt.Sprintf("%s differs first at byte %s: %s", filepath.Base(f.Name),
				quantity.Grouped(f.Byte), f.Meaning))
		}
	}
	return strings.Join(out, "; ")
}

func verifyBlendCorpus(c *cli.Context, dir string, p *progress, found *findings) error {
	report, err := blendcorpus.Verify(c.Context, dir, blendcorpus.VerifyOptions{Root: c.String("root"),
		Threads:  threads(c),
		Progress: func(v blendcorpus.Verified) { p.update(v.Description, 0, 0) }})
	if err != nil {
		return err
	}
	for _, v := range report.Descriptions {
		one := verdict{Description: v.Description, Kind: v.Class, Prefixes: []string{v.What}, Equal: v.How != "",
			Settings: v.How, Problem: v.Problem}
		if v.Difference != nil {
			one.Differs, one.Problem = true, fmt.Sprintf("%s differs first at byte %s", v.Difference.File,
				quantity.Grouped(v.Difference.Offset))
		}
		found.Verdicts = append(found.Verdicts, one)
	}
	if report.OK() {
		found.Writers = append(found.Writers, "BlendCorpus or Megatron-DeepSpeed")
	}
	return nil
}
