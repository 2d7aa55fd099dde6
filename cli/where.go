package cli

import (
	"fmt"

	"github.com/urfave/cli/v2"

	"mula/blend"
	"mula/internal/quantity"
)

func whereCommand() *cli.Command {
	return &cli.Command{
		Name:  "where",
		Usage: "list every position of a plan that reads a document",
		Description: "With --batch-size the steps are listed too.\n\n" +
			"Example: mula where --plan plan.json --document go/src/net/http/server.go --batch-size 32",
		Flags: []cli.Flag{
			planFlag, shardsFlag,
			&cli.StringFlag{Name: "document", Aliases: []string{"id"}, Usage: "find the document with this `ID` " +
				"(required)"},
			batchSizeFlag,
			&cli.Int64Flag{Name: "limit", Usage: "list at most `N` occurrences; 0: all", Value: 1000},
			jsonFlag,
		},
		Action: runWhere,
	}
}

// place is one occurrence as `mula where --json` prints it.
type place struct {
	Source   string `json:"source"`
	Shard    string `json:"shard"`
	Document int64  `json:"document"`
	File     string `json:"file"`
	Line     int64  `json:"line"`
	Window   *int64 `json:"window"` // null for a document outside all windows
	From     int    `json:"from"`   // tokens [from, to) of the window
	To       int    `json:"to"`
	Use      string `json:"use"`
	Epoch    *int64 `json:"epoch"`    // null unless the plan draws the window
	Position *int64 `json:"position"` // likewise
	Step     *int64 `json:"step"`     // likewise, and without --batch-size
}

func runWhere(c *cli.Context) error {
	if err := noOperands(c); err != nil {
		return err
	}
	if err := needFlags(c, "document"); err != nil {
		return err
	}
	if err := atMost(c, maxNumber, "limit"); err != nil {
		return err
	}
	if c.IsSet("batch-size") && c.Int("batch-size") < 1 {
		return usagef("--batch-size must be at least 1")
	}
	data, err := openPlan(c)
	if err != nil {
		return err
	}
	defer data.Close()
	id, limit := c.String("document"), c.Int64("limit")
	places, drawn, found := []place{}, int64(0), int64(0)
	for o, err := range data.Where(c.Context, id) {
		if err != nil {
			return err
		}
		if found++; limit > 0 && found > limit {
			break
		}
		p := place{Source: data.Sources[o.Source].Name, Shard: data.ShardPath(o.Source, o.Shard), Document: o.Number,
			File: o.File, Line: o.Line, From: o.From, To: o.To, Use: o.Use.String()}
		if o.Use != blend.NoWindow {
			p.Window = &o.Sample.Window
		}
		if o.Use == blend.Drawn || o.Use == blend.SkippedOver {
			if p.Position = &o.Sample.Position; o.Sample.Epoch >= 0 {
				p.Epoch = &o.Sample.Epoch
			}
			if c.IsSet("batch-size") {
				step := o.Sample.Position / int64(c.Int("batch-size"))
				p.Step = &step
			}
		}
		if o.Use == blend.Drawn {
			drawn++
		}
		places = append(places, p)
	}
	if found == 0 {
		return fmt.Errorf("no shard of the plan has a document with the id %q; ids are compared exactly, `mula "+
			"peek` shows some", id)
	}
	if c.Bool("json") {
		return printJSON(c.App.Writer, places)
	}
	number := func(n *int64) string {
		if n == nil {
			return "-"
		}
		return quantity.Grouped(*n)
	}
	t := newTable("source", "shard", "document", "from", "window", "tokens", "use", "epoch", "position", "step")
	for _, p := range places {
		t.row(p.Source, p.Shard, p.Document, fmt.Sprintf("%s:%d", oneLine(p.File), p.Line), number(p.Window),
			p.To-p.From, p.Use,
			number(p.Epoch), number(p.Position), number(p.Step))
	}
	t.write(c.App.Writer)
	if limit > 0 && found > limit {
		fmt.Fprintf(c.App.Writer, "\nthe list has the first %s occurrences; --limit changes the maximum\n",
			quantity.Grouped(limit))
		return nil
	}
	fmt.Fprintf(c.App.Writer, "\npositions that read the document: %s\n", quantity.Grouped(drawn))
	return nil
}
