package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"mula/blend"
	"mula/internal/quantity"
)

// runAmend is `mula blend --amend`.
func runAmend(c *cli.Context) error {
	if c.String("amend") == "" {
		return usagef("--amend is empty; name the plan to amend")
	}
	writes := !c.Bool("dry-run") || c.IsSet("output")
	if writes && (c.String("output") == "" || !c.IsSet("output")) {
		// an amended plan must not replace a plan that a run is using
		return usagef("--output is required with --amend: see `%s --help`", c.Command.HelpName)
	}
	inputs := []string{c.String("amend")}
	if c.IsSet("config") {
		inputs = append(inputs, c.String("config"))
	}
	if writes {
		if err := notInput(c.String("output"), inputs...); err != nil {
			return err
		}
	}
	if c.IsSet("batch-size") && c.Int("batch-size") < 1 {
		return usagef("--batch-size must be at least 1")
	}
	if err := atMost(c, maxNumber, "at"); err != nil {
		return err
	}
	var skips []blend.Range
	for _, text := range c.StringSlice("skip") {
		r, err := parseSkip(text)
		if err != nil {
			return err
		}
		skips = append(skips, r)
	}
	a := &blend.Amendment{}
	switch {
	case c.IsSet("config"):
		if !c.IsSet("at") {
			return usagef("--at is required with --config: the first position that may change")
		}
		var err error
		if a, err = blend.LoadAmendment(c.String("config")); err != nil {
			return err
		}
		warnAbout(c, a)
	case len(skips) == 0:
		return usagef("nothing to amend; name an amend.yaml with --config, or skip positions with --skip")
	}
	a.Skips, a.Reason = skips, c.String("reason")
	if a.At = c.Int64("at"); !c.IsSet("at") {
		a.At = skips[0].From
		for _, r := range skips {
			a.At = min(a.At, r.From)
		}
	}
	parent, err := blend.ReadPlan(c.String("amend"))
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w; --amend must name the plan to amend", err)
	}
	if err != nil {
		return err
	}
	if writes {
		if err := notInput(c.String("output"), parent.Files()...); err != nil {
			return err
		}
		if err := oneFile(c.String("output"), planKind); err != nil {
			return err
		}
	}
	p := newProgress(c.App.ErrWriter)
	defer p.end()
	if batch := int64(c.Int("batch-size")); batch > 0 && a.At%batch != 0 && c.IsSet("at") {
		before := a.At - a.At%batch
		p.line("note: position %d is not a multiple of the batch size %d; the step at position %d mixes samples of "+
			"both plans. The nearest steps start at %d and %d",
			a.At, batch, before, before, before+batch)
	}
	if c.Bool("dry-run") {
		summary, err := blend.SurveyAmendment(c.Context, parent, a)
		if err != nil {
			return err
		}
		return printSurvey(c, summary)
	}
	options := sealOptions(c, p)
	options.Packings = filepath.Dir(c.String("output")) // index files of a packed plan are written before the plan
	plan, err := blend.Amend(c.Context, parent, a, options)
	if err != nil {
		return err
	}
	if err := writePlan(c, p, plan); err != nil {
		return err
	}
	if !c.Bool("json") {
		same := fmt.Sprintf("samples before position %s are the same", quantity.Grouped(a.At))
		if a.At == 0 {
			same = "all positions may differ"
		}
		fmt.Fprintf(c.App.Writer, "Amends %s, plan %.16s…: %s.\n", printable(c.String("amend")),
			parent.Fingerprint(), same)
	}
	return nil
}

// parseSkip reads FROM:TO.
func parseSkip(text string) (blend.Range, error) {
	from, to, ok := strings.Cut(text, ":")
	a, err := strconv.ParseInt(from, 10, 64)
	b, err2 := strconv.ParseInt(to, 10, 64)
	if !ok || err != nil || err2 != nil || a < 0 || b <= a {
		return blend.Range{}, usagef("--skip is %q; it must be FROM:TO, the first skipped position and the "+
			"first position after the range, such as 961:977", text)
	}
	return blend.Range{From: a, To: b}, nil
}
