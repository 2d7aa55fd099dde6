package cli

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"mula/blend"
	"mula/internal/objects"
	"mula/internal/quantity"
)

func blendCommand() *cli.Command {
	return &cli.Command{
		Name:  "blend",
		Usage: "build a plan, which fixes the order of all samples, from a blend of shards",
		Description: "Prints sources and tokens, and the samples, epochs and repeats of each stage.\n\n" +
			"A shard without a manifest (.json) that has more than 1 MiB is sampled, not hashed. The plan is then " +
			"provisional: it can be used at\n" +
			"once. --complete reads all bytes of these shards and replaces the plan by the complete plan, with the " +
			"same order. Several processes\n" +
			"of mpiexec, srun, a job array or several shells divide the shards.\n\n" +
			"--amend changes a plan from a position: --config adds sources and shards, changes weights and adds " +
			"samples; --skip skips\n" +
			"positions. All samples before the position stay the same (docs/guides/amend.md).\n\n" +
			"Example: mula blend --config blend.yaml --output plan.json\n" +
			"         mpiexec -n 8 mula blend --complete plan.json --sums sums\n" +
			"         mula blend --amend plan.json --at 320000 --config amend.yaml --reason 'more web text' " +
			"--output plan-2.json\n" +
			"         mula blend --amend plan.json --skip 961:977 --reason 'spike at step 30' --output plan-2.json",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "config", Usage: "read the blend from `FILE`", Value: "blend.yaml"},
			&cli.StringFlag{Name: "output", Aliases: []string{"o"}, Usage: "write the plan to `FILE`",
				Value: "plan.json"},
			&cli.StringFlag{Name: "pad",
				Usage:       "with packing: fill samples with the token `ID`, or with " + padEOD + ", the end-of-document id",
				DefaultText: "pad of the configuration, else eod"},
			&cli.BoolFlag{Name: "hash-all",
				Usage: "hash all bytes of shards without a manifest before the plan is written, instead of samples"},
			&cli.StringFlag{Name: "complete", Category: "Completing",
				Usage: "complete the provisional plan in `FILE`; --output is FILE unless it is set"},
			&cli.StringFlag{Name: "sums", Category: "Completing",
				Usage:       "write manifests and block sums of shards without a manifest to `FOLDER`",
				DefaultText: "beside the shards"},
			&cli.IntFlag{Name: "threads", Category: "Completing", Usage: "read `N` shards at once; 0: one per core"},
			&cli.BoolFlag{Name: "dry-run", Usage: "print the plan's summary and write nothing"},
			&cli.StringFlag{Name: "amend", Category: "Amending",
				Usage: "amend the plan in `FILE`; --config then names an amend.yaml"},
			&cli.Int64Flag{Name: "at", Category: "Amending", Usage: "change the plan from `POSITION`",
				DefaultText: "first position of --skip"},
			&cli.StringSliceFlag{Name: "skip", Category: "Amending",
				Usage: "skip positions [FROM, TO), given as `FROM:TO`; may be repeated"},
			&cli.StringFlag{Name: "reason", Category: "Amending", Usage: "record `TEXT` in the plan as the reason"},
			&cli.IntFlag{Name: "batch-size", Category: "Amending",
				Usage: "warn if the position is not a multiple of `N`", DefaultText: "none"},
			jsonFlag,
		},
		Action: runBlend,
	}
}

func runBlend(c *cli.Context) error {
	if err := noOperands(c); err != nil {
		return err
	}
	if c.IsSet("complete") {
		return runComplete(c)
	}
	if c.IsSet("threads") {
		return usagef("--threads requires --complete with the plan to complete")
	}
	if c.IsSet("amend") {
		if c.IsSet("pad") {
			return usagef("--pad cannot be set with --amend, because an amended plan keeps its padding id; " +
				"remove --pad")
		}
		return runAmend(c)
	}
	if err := needFlags(c, "config", "output"); err != nil {
		return err
	}
	for _, name := range []string{"at", "skip", "reason", "batch-size"} {
		if c.IsSet(name) {
			return usagef("--%s requires --amend with the plan to amend", name)
		}
	}
	if err := notInput(c.String("output"), c.String("config")); err != nil {
		return err
	}
	if !c.Bool("dry-run") {
		if err := oneFile(c.String("output"), planKind); err != nil {
			return err
		}
	}
	config, err := blend.LoadConfig(c.String("config"))
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w; name the blend's configuration with --config (docs/formats/config.md lists its fields)",
			err)
	}
	if err != nil {
		return err
	}
	warnAbout(c, config)
	if c.IsSet("pad") {
		if config.Pad, err = padOf(c.String("pad")); err != nil {
			return err
		}
		if config.Packing == "" {
			return usagef("--pad requires packing, because windows are never padded; add packing: best_fit "+
				"to %s", c.String("config"))
		}
	}
	if c.Bool("dry-run") {
		summary, err := blend.Survey(c.Context, config)
		if err != nil {
			return err
		}
		return printSurvey(c, summary)
	}
	p := newProgress(c.App.ErrWriter)
	defer p.end()
	options := sealOptions(c, p)
	if config.Packing != "" { // its index files are written before the plan
		if objects.IsURL(c.String("output")) {
			return usagef("the index files of packed samples are written next to the plan, in a local folder; name a " +
				"local --output, and copy it")
		}
		options.Packings = filepath.Dir(c.String("output"))
	}
	plan, err := blend.Seal(c.Context, config, options)
	if err != nil {
		return err
	}
	return writePlan(c, p, plan)
}

// printSurvey prints the summary of a plan that is not written.
func printSurvey(c *cli.Context, summary *blend.Summary) error {
	if c.Bool("json") {
		return printJSON(c.App.Writer, map[string]any{"summary": summary})
	}
	printSummary(c.App.Writer, summary)
	fmt.Fprintln(c.App.Writer, "\nNothing was written (--dry-run).")
	return nil
}

// padEOD is the value of --pad for the end-of-document id.
const padEOD = "eod"

// padOf reads --pad: an id, or eod, which is nil.
func padOf(text string) (*int64, error) {
	if text == padEOD {
		return nil, nil
	}
	id, err := strconv.ParseInt(text, 10, 32)
	if err != nil || id < 0 {
		return nil, usagef("--pad is %q; it must be a token id, or %s", text, padEOD)
	}
	return &id, nil
}

// sealOptions returns options that show the progress of building a plan.
func sealOptions(c *cli.Context, p *progress) blend.SealOptions {
	return blend.SealOptions{
		Sample: !c.Bool("hash-all"), Sums: c.String("sums"),
		Sampling: func(shards, total int) {
			p.update(fmt.Sprintf("sampling shards without a manifest: %d of %d", shards, total), float64(shards),
				float64(total))
		},
		Progress: func(h blend.HashProgress) {
			p.update(fmt.Sprintf("hashing shards without a manifest: %s of %s, %s", quantity.Bytes(h.Bytes),
				quantity.Bytes(h.Total), h.Path),
				float64(h.Bytes), float64(h.Total))
		},
		Packing: func(k blend.PackProgress) {
			p.update(fmt.Sprintf("packing documents: %s of %s tokens, source %s", quantity.Tokens(k.Tokens),
				quantity.Tokens(k.Total), printable(k.Source)),
				float64(k.Tokens), float64(k.Total))
		},
		Waiting: func(message string) { p.line("%s", message) },
	}
}

// writePlan writes a plan and prints its summary.
func writePlan(c *cli.Context, p *progress, plan *blend.Plan) error {
	output := c.String("output")
	if err := notInput(output, plan.Files()...); err != nil {
		return err
	}
	if err := plan.WriteOn(fileSystem(c), output); err != nil {
		return err
	}
	p.end()
	if plan.Provisional() {
		p.line("%s", provisionalNote(output))
	} else if n := plan.Foreign(); n > 0 {
		p.line("note: %s without a manifest (.json): hashed now, but their tokenizer is unknown; `mula check` "+
			"examines their ids", quantity.Plural(n, "shard"))
	}
	summary := plan.Summary()
	if c.Bool("json") {
		return printJSON(c.App.Writer, map[string]any{"plan": output, "fingerprint": plan.Fingerprint(),
			"provisional": plan.Provisional(), "summary": summary})
	}
	printSummary(c.App.Writer, summary)
	fmt.Fprintf(c.App.Writer, "\n%s: plan %s\n", filepath.ToSlash(output), plan.Fingerprint())
	return nil
}

func printSummary(w io.Writer, s *blend.Summary) {
	packed := len(s.Sources) > 0 && s.Sources[0].Packing != nil // all sources of a plan are packed, or none
	windows := "windows"
	if packed {
		windows = "packed"
	}
	t := newTable("source", "shards", "documents", "tokens", windows, "validation", "positions", "epochs", "repeats",
		"max epochs")
	for _, source := range s.Sources {
		limit := source.MaxEpochs
		if limit == "" {
			limit = "none"
		}
		t.row(printable(source.Name), source.Shards, source.Documents, source.Tokens, source.Windows, source.Validation,
			source.Samples, fmt.Sprintf("%.3f", source.Epochs), source.Repeats, limit)
	}
	t.write(w)
	if packed {
		fmt.Fprintf(w, "\npacked documents, in samples of %s tokens:\n", quantity.Grouped(int64(s.SequenceLength)+1))
		t := newTable("source", "non-empty", "cut", "pieces", "padding", "share")
		for _, source := range s.Sources {
			k := source.Packing
			t.row(printable(source.Name), k.Documents, k.Cut, k.Pieces, k.Padding, quantity.FixedPercent(k.Share, 3))
		}
		t.write(w)
	}
	for i, stage := range s.Stages {
		fmt.Fprintf(w, "\nstage %d: %s\n", i+1,
			numbered("position", stage.First, stage.First+stage.Samples))
		t := newTable("source", "weight", "share", "positions", "epochs", "repeats")
		for _, source := range s.Sources {
			take := source.Stages[i]
			if take.Share == 0 {
				t.row(printable(source.Name), "paused", "", "", "", "")
				continue
			}
			t.row(printable(source.Name), weightText(take.Weight), quantity.FixedPercent(take.Share, 3), take.Samples,
				fmt.Sprintf("%.3f", take.Epochs), take.Repeats)
		}
		t.write(w)
	}
	var notes []string
	for _, source := range s.Sources {
		if source.Empty > 0 {
			notes = append(notes, fmt.Sprintf("source %s has %s that are too short for a window", source.Name,
				quantity.Plural(int64(source.Empty), "shard")))
		}
	}
	if s.Skipped > 0 {
		notes = append(notes, fmt.Sprintf("%s of the %s positions are skipped",
			quantity.Grouped(s.Skipped), quantity.Grouped(s.Length)))
	}
	if len(notes) > 0 {
		fmt.Fprintf(w, "\nnote: %s\n", strings.Join(notes, "; "))
	}
	fmt.Fprintf(w, "\n%s of %s tokens, %s tokens in total\n", quantity.Plural(s.Length-s.Skipped, "sample"),
		quantity.Grouped(int64(s.SequenceLength)),
		quantity.Tokens((s.Length-s.Skipped)*int64(s.SequenceLength)))
}

// numbered describes a range: position 3, or positions 3 to 5.
func numbered(noun string, from, to int64) string {
	if to == from+1 {
		return noun + " " + quantity.Grouped(from)
	}
	return fmt.Sprintf("%ss %s to %s", noun, quantity.Grouped(from), quantity.Grouped(to-1))
}

// weightText returns a weight as it was written. Token counts get commas.
func weightText(written string) string {
	if n, err := strconv.ParseInt(written, 10, 64); err == nil {
		return quantity.Grouped(n)
	}
	return written
}
