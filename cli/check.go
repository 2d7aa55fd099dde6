package cli

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"path/filepath"

	"github.com/urfave/cli/v2"

	"mula/blend"
	"mula/internal/atomicfile"
	"mula/internal/quantity"
	"mula/shards"
	"mula/shards/audit"
)

func checkCommand() *cli.Command {
	return &cli.Command{
		Name:      "check",
		Usage:     "verify every byte of shards against hashes, find suspicious data, and measure documents",
		ArgsUsage: "[SHARD or FOLDER ...]",
		Description: "Without operands, compares the shards of a plan with the hashes in the plan. Operands are " +
			"shards of any layout: prefixes, files,\n" +
			"MDS folders, or folders that are searched for shards. Exits with 1 on errors: bytes that differ from " +
			"the manifest or the plan,\n" +
			"ids beyond the vocabulary or of another type, or documents without any end-of-document token.\n\n" +
			"Example: mula check --plan plan.json\n" +
			"          mula check --sequence-length 4096 --report check.html shards/\n" +
			"          mula check --eod 50279 --vocab-size 50280 tokens/part-00-00000.npy",
		Flags: []cli.Flag{
			planFlag, shardsFlag,
			&cli.Int64Flag{Name: "eod", Usage: "expect token `ID` at the end of every document; -1: none",
				DefaultText: "from the manifest"},
			&cli.Int64Flag{Name: "vocab-size", Usage: "require ids below `N`", DefaultText: "from the manifest"},
			&cli.IntFlag{Name: "sequence-length", Aliases: []string{"L"},
				Usage: "count the tokens outside all windows of `L`+1 tokens", DefaultText: "not counted"},
			&cli.StringFlag{Name: "dtype", Usage: "read files without a type as `TYPE`: " + anyOf(shards.IDTypes()),
				DefaultText: "by --vocab-size"},
			&cli.Int64Flag{Name: "huge", Usage: "report documents of `N` tokens or more", Value: audit.HugeDocument},
			&cli.StringFlag{Name: "report",
				Usage: "write an HTML page with the findings and document lengths to `FILE`"},
			&cli.IntFlag{Name: "workers", Usage: "read `N` shards at once; 0: one per core"},
			jsonFlag,
		},
		Action: runCheck,
	}
}

func runCheck(c *cli.Context) error {
	if err := atMost(c, maxThreads, "workers"); err != nil {
		return err
	}
	if c.Int64("huge") < 1 {
		return usagef("--huge is %d; it must be at least 1", c.Int64("huge"))
	}
	if err := atMost(c, 1<<32, "vocab-size"); err != nil {
		return err
	}
	if err := atMost(c, math.MaxInt32, "sequence-length"); err != nil {
		return err
	}
	if id := c.Int64("eod"); id < -1 || id > math.MaxUint32 {
		return usagef("--eod is %d; it must be an id, or -1 for none", id)
	}
	ofPlan := c.NArg() == 0
	title, check := "Check of shards", checkOperands
	if ofPlan {
		title, check = "Check of "+c.String("plan"), checkPlan
		for _, name := range []string{"eod", "vocab-size", "sequence-length", "dtype"} {
			if c.IsSet(name) {
				return usagef("--%s is for shards given as operands; a plan has its own value", name)
			}
		}
	} else if c.IsSet("plan") || c.IsSet("shards") {
		return usagef("--plan and --shards cannot be combined with shards as operands")
	}
	if err := oneFile(c.String("report"), pageKind); err != nil {
		return err
	}
	p := newProgress(c.App.ErrWriter)
	defer p.end()
	report, err := check(c, func(path string, done, total int64) {
		p.update(fmt.Sprintf("%s of %s, %s", quantity.Bytes(done), quantity.Bytes(total), path), float64(done),
			float64(total))
	})
	if err != nil {
		return err
	}
	p.end()
	w := c.App.Writer
	if path := c.String("report"); path != "" {
		var page bytes.Buffer
		if err := report.WritePage(&page, title); err != nil {
			return err
		}
		if err := atomicfile.WriteFile(path, page.Bytes()); err != nil {
			return err
		}
	}
	if c.Bool("json") {
		if err := printJSON(w, report); err != nil {
			return err
		}
	} else {
		printCheck(w, report)
	}
	if report.Failed() {
		if ofPlan {
			return errors.New("the shards do not match the plan; restore them, or build a new " +
				"plan with `mula blend`")
		}
		return errors.New("the shards have the errors listed above")
	}
	if !c.Bool("json") {
		n := quantity.Plural(int64(len(report.Shards)), "shard")
		if ofPlan {
			sampled := int64(0)
			for _, s := range report.Shards {
				if !s.Compared {
					sampled++
				}
			}
			if sampled > 0 {
				fmt.Fprintf(w, "%s: no difference from the plan, which is provisional: only the sampled blocks of %s "+
					"could be compared\n", n, quantity.Plural(sampled, "shard"))
			} else {
				fmt.Fprintf(w, "%s: all bytes match the plan\n", n)
			}
		} else {
			fmt.Fprintf(w, "%s: no errors\n", n)
		}
	}
	return nil
}

func checkPlan(c *cli.Context, progress func(path string, done, total int64)) (*audit.Report, error) {
	data, err := openPlanWith(c, blend.OpenOptions{Unread: true})
	if err != nil {
		return nil, err
	}
	defer data.Close()
	report, err := data.Check(c.Context, blend.CheckOptions{Workers: c.Int("workers"), Huge: c.Int64("huge"),
		Progress: func(h blend.HashProgress) {
			progress(h.Path, h.Bytes, h.Total)
		}})
	if err != nil {
		return nil, fmt.Errorf("checking: %w", err)
	}
	return report, nil
}

func checkOperands(c *cli.Context, progress func(path string, done, total int64)) (*audit.Report, error) {
	inputs, err := audit.Inputs(c.Args().Slice())
	if err != nil {
		return nil, err
	}
	o := audit.Options{Vocabulary: c.Int64("vocab-size"), SequenceLength: c.Int("sequence-length"),
		Huge: c.Int64("huge"), DType: c.String("dtype"),
		Workers: c.Int("workers"), Progress: func(p audit.Progress) { progress(p.Path, p.Bytes, p.Total) }}
	if c.IsSet("eod") {
		eod := c.Int64("eod")
		o.EOD = &eod
	}
	return audit.Run(c.Context, inputs, o)
}

// printCheck prints the report as tables and lines. The tables skip shards that could not be
// opened, and sources that have only such shards.
func printCheck(w io.Writer, r *audit.Report) {
	opened := map[string]bool{} // sources
	t := newTable("source", "shard", "tokens", "windows", "tail", "documents", "empty", "huge", "longest", "largest id",
		"hashes")
	if r.SequenceLength == 0 {
		t = newTable("source", "shard", "tokens", "documents", "empty", "huge", "longest", "largest id", "hashes")
	}
	for _, s := range r.Shards {
		if s.Layout == "" {
			continue
		}
		opened[s.Source] = true
		cells := []any{s.Source, s.Path, s.Tokens, s.Windows, s.Tail, s.Documents, s.EmptyDocuments, s.LongDocuments,
			s.Longest, int64(s.MaxID), s.Hashes()}
		if r.SequenceLength == 0 {
			cells = append(cells[:3:3], cells[5:]...)
		}
		t.row(cells...)
	}
	if len(opened) > 0 {
		t.write(w)
		fmt.Fprintln(w)
		t = newTable("source", "shards", "documents", "tokens", "mean length", "median", "90 %", "99 %", "longest",
			"repetitive")
		for _, s := range r.Sources {
			if l := s.Lengths; opened[s.Name] {
				t.row(s.Name, s.Shards, l.Documents, l.Tokens, int64(l.Mean+0.5), l.Median, l.P90, l.P99, l.Longest,
					s.Repeats.Documents)
			}
		}
		t.write(w)
		if len(r.Findings) > 0 {
			fmt.Fprintln(w)
		}
	}
	for _, f := range r.Findings {
		where := f.Path
		if where == "" {
			where = filepath.ToSlash(f.Source)
		}
		fmt.Fprintf(w, "%s: %s: %s\n", statusText(string(f.Level), hasColour(w)), where, f.Message)
	}
}
