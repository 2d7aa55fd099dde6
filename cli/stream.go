package cli

import (
	"bufio"
	"fmt"

	"github.com/urfave/cli/v2"

	"mula/blend"
)

func streamCommand() *cli.Command {
	return &cli.Command{
		Name:  "stream",
		Usage: "write the samples of a plan to standard output as an Arrow IPC stream, a record batch for each step",
		Description: "Any Arrow library reads it; in Python: pyarrow.ipc.open_stream(sys.stdin.buffer).\n\n" +
			"Example: mula stream --plan plan.json --batch-size 32 --from 6400 --rank 1 --world 4 | python train.py",
		Flags: []cli.Flag{
			planFlag, shardsFlag, batchSizeFlag, rankFlag, worldFlag,
			&cli.Int64Flag{Name: "from", Usage: "first position; the start of a step"},
			&cli.Int64Flag{Name: "to", Usage: "position after the last (0: the end of the plan)"},
			verifyFlag,
			&cli.IntFlag{Name: "prefetch", Usage: "record batches read ahead", Value: 4},
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
	if from := c.Int64("from"); from < 0 || from%int64(batchSize) != 0 {
		return usagef("--from is %d; it must be the start of a step, a multiple of the batch size %d", from, batchSize)
	}
	if isTerminal(c.App.Writer) {
		return usagef("standard output is a terminal; send the stream to a file or a program, as in `mula stream ... | python train.py`")
	}
	verify, err := blend.ParseVerify(c.String("verify"))
	if err != nil {
		return usagef("--verify: %v", err)
	}
	if verify != nil {
		verify.Rank, verify.World = rank, world
	}
	data, err := openPlanWith(c, blend.OpenOptions{Verify: verify})
	if err != nil {
		return err
	}
	defer data.Close()
	w := bufio.NewWriterSize(c.App.Writer, 1<<20)
	err = data.WriteIPC(c.Context, w, blend.StreamOptions{From: c.Int64("from"), To: c.Int64("to"), BatchSize: batchSize,
		Rank: rank, World: world, Prefetch: c.Int("prefetch")})
	if err == nil {
		err = w.Flush()
	}
	if err != nil {
		return fmt.Errorf("streaming: %w", err)
	}
	return nil
}
