package cli

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"mula/blend/fingerprint"
	"mula/blend/stream"
	"mula/internal/atomicfile"
	"mula/internal/quantity"
)

func hashCommand() *cli.Command {
	return &cli.Command{
		Name:  "hash",
		Usage: "write the batch fingerprints of a plan",
		Description: "Writes JSON lines: a header, then the order hash and the set hash of each step. A run's " +
			"fingerprints.jsonl has the same format.\n\n" +
			"Example: mula hash --plan plan.json --batch-size 32 --steps 0:1000 --output expected.jsonl",
		Flags: []cli.Flag{
			planFlag, shardsFlag, stepSizeFlag, rankFlag, worldFlag,
			&cli.StringFlag{Name: "steps",
				Usage: "hash steps [A, B), given as `A:B`; either may be omitted", Value: ":"},
			&cli.StringFlag{Name: "output", Aliases: []string{"o"},
				Usage: "write the log to `FILE` instead of standard output"},
		},
		Action: runHash,
	}
}

// stepRange reads "A:B".
func stepRange(text string) (from, to int64, err error) {
	a, b, ok := strings.Cut(text, ":")
	if ok && a != "" {
		from, err = strconv.ParseInt(a, 10, 64)
		ok = err == nil && from >= 0
	}
	if ok && b != "" {
		to, err = strconv.ParseInt(b, 10, 64)
		ok = err == nil && to > from
	}
	if !ok {
		return 0, 0, usagef("--steps is %q; it must be A:B with 0 <= A < B, such as 0:1000", text)
	}
	return from, to, nil
}

func runHash(c *cli.Context) error {
	if err := noOperands(c); err != nil {
		return err
	}
	batchSize, rank, world, err := ranks(c)
	if err != nil {
		return err
	}
	from, to, err := stepRange(c.String("steps"))
	if err != nil {
		return err
	}
	output := c.String("output")
	if err := notInput(output, c.String("plan")); err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(output), "metrics.jsonl")); output != "" && err == nil &&
		strings.HasPrefix(filepath.Base(output), "fingerprints") {
		return usagef("%s is the log of a run; write the plan's fingerprints to another file", output)
	}
	data, err := openPlan(c)
	if err != nil {
		return err
	}
	defer data.Close()
	if err := notInput(output, data.Files()...); err != nil {
		return err
	}
	if err := oneFile(output, logKind); err != nil {
		return err
	}
	all := data.Steps(batchSize)
	if to > all || from >= all {
		return fmt.Errorf("--steps is out of range: the plan has %s steps at batch size %d, got %s",
			quantity.Grouped(all),
			batchSize, c.String("steps"))
	}
	if to == 0 {
		to = all
	}

	var out io.Writer = c.App.Writer
	var file *atomicfile.File
	if path := c.String("output"); path != "" {
		if file, err = atomicfile.On(fileSystem(c)).Create(path); err != nil {
			return err
		}
		defer file.Abort()
		out = file
	}
	buffered := bufio.NewWriterSize(out, 1<<16)
	header := fingerprint.Header{Plan: data.Fingerprint(), SequenceLength: data.SequenceLength, BatchSize: batchSize}
	if world > 1 {
		header.Rank, header.World = rank, world
	}
	log, err := fingerprint.NewWriter(buffered, header)
	if err != nil {
		return err
	}
	p := newProgress(c.App.ErrWriter)
	defer p.end()
	options := stream.HashOptions{From: from, To: to, BatchSize: batchSize, Rank: rank, World: world, Prefetch: 4}
	err = stream.Hash(c.Context, data, options, func(s fingerprint.StepHash) error {
		p.update(fmt.Sprintf("step %s of %s", quantity.Grouped(s.Step), quantity.Grouped(to)), float64(s.Step-from+1),
			float64(to-from))
		return log.Write(s)
	})
	if err != nil {
		return fmt.Errorf("hashing steps: %w", err)
	}
	if err := buffered.Flush(); err != nil {
		return err
	}
	if file != nil {
		return file.Publish()
	}
	return nil
}
