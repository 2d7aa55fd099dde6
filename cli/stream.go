package cli

import (
	"bufio"
	"fmt"

	"github.com/urfave/cli/v2"

	"mula/blend/stream"
	"mula/internal/launchers"
)

func streamCommand() *cli.Command {
	return &cli.Command{
		Name:  "stream",
		Usage: "write the samples of a plan to standard output as an Arrow IPC stream, a record batch for each step",
		Description: "Any Arrow library can read it. Python: pyarrow.ipc.open_stream(sys.stdin.buffer).\n\n" +
			"Example: mula stream --plan plan.json --batch-size 32 --from 6400 --rank 1 --world 4 | python train.py",
		Flags: []cli.Flag{
			planFlag, shardsFlag, stepSizeFlag, rankFlag, worldFlag,
			fromFlag, toFlag,
			verifyFlag, reverifyFlag,
			&cli.IntFlag{Name: "prefetch", Usage: "read `N` record batches ahead", Value: 4},
		},
		Action: runStream,
	}
}

func runStream(c *cli.Context) error {
	if err := noOperands(c); err != nil {
		return err
	}
	batchSize, rank, world, err := ranks(c)
	if err != nil {
		return err
	}
	if err := atMost(c, 4096, "prefetch"); err != nil {
		return err
	}
	if isTerminal(c.App.Writer) {
		return usagef("standard output is a terminal; redirect it to a file or a program, as in `mula stream " +
			"... | python train.py`")
	}
	options, err := verification(c)
	if err != nil {
		return err
	}
	if v := options.Verify; v != nil {
		v.Rank, v.World = rank, world
	}
	options.Unsurveyed = rank > 0 // the first rank looks at all shards
	data, err := openPlanWith(c, options)
	if err != nil {
		return err
	}
	defer data.Close()
	from, to, err := positions(c, data.Plan, batchSize)
	if err != nil {
		return err
	}
	w := bufio.NewWriterSize(c.App.Writer, 1<<20)
	hosts := 0 // not known
	if p, ok := launchers.Find(); ok && p.Size == world {
		hosts = (world + p.Here - 1) / p.Here
	}
	err = stream.WriteIPC(c.Context, w, data, stream.Options{From: from, To: to, BatchSize: batchSize,
		Rank: rank, World: world, Hosts: hosts, Prefetch: c.Int("prefetch")})
	if err == nil {
		err = w.Flush()
	}
	if err != nil {
		return fmt.Errorf("streaming: %w", err)
	}
	return nil
}
