package cli

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/urfave/cli/v2"

	"mula/blend"
)

// Flags of the commands that read along a plan.
var (
	planFlag      = &cli.StringFlag{Name: "plan", Aliases: []string{"p"}, Usage: "read the plan from `FILE`", Value: "plan.json"}
	shardsFlag    = &cli.StringFlag{Name: "shards", Usage: "look for the plan's shards from `DIR` instead of from the plan's own folder"}
	batchSizeFlag = &cli.IntFlag{Name: "batch-size", Aliases: []string{"B"}, Usage: "samples of a step, over all ranks", DefaultText: "none"}
	rankFlag      = &cli.IntFlag{Name: "rank", Usage: "only this rank's share of each step"}
	verifyFlag    = &cli.StringFlag{Name: "verify", Usage: "`WAY` to find damage: reads (blocks with sums, when they are read), behind (whole files too, in the background), first (files without sums before they are used)", Value: "reads"}
	worldFlag     = &cli.IntFlag{Name: "world", Usage: "number of ranks; it must divide the batch size", Value: 1}
)

// openPlan opens the plan and the shards that the flags name. The caller closes the data.
func openPlan(c *cli.Context) (*blend.Data, error) { return openPlanWith(c, blend.OpenOptions{}) }

// openPlanWith is openPlan with options, of which the flags set the folder.
func openPlanWith(c *cli.Context, o blend.OpenOptions) (*blend.Data, error) {
	plan, err := blend.ReadPlan(c.String("plan"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w; name the plan with --plan, or make one with `mula blend`", err)
	}
	if err != nil {
		return nil, err
	}
	o.Base = c.String("shards")
	p := newProgress(c.App.ErrWriter)
	o.Waiting = func(message string) { p.line("%s", message) }
	data, err := blend.Open(c.Context, plan, o)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.String("plan"), err)
	}
	return data, nil
}

// ranks reads --batch-size, --rank and --world.
func ranks(c *cli.Context) (batchSize, rank, world int, err error) {
	batchSize, rank, world = c.Int("batch-size"), c.Int("rank"), c.Int("world")
	switch {
	case batchSize < 1:
		err = usagef("--batch-size is needed, and must be at least 1: see `%s --help`", c.Command.HelpName)
	case world < 1 || batchSize%world != 0:
		err = usagef("--world is %d; it must divide the batch size, %d", world, batchSize)
	case rank < 0 || rank >= world:
		err = usagef("--rank is %d; with --world %d it must be from 0 to %d", rank, world, world-1)
	}
	return batchSize, rank, world, err
}
