package cli

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/urfave/cli/v2"

	"mula/internal/atomicfile"
	"mula/internal/quantity"
	"mula/tokenize"
	"mula/tokenize/documents"
)

func tokenizerCommand() *cli.Command {
	return &cli.Command{
		Name:  "tokenizer",
		Usage: "train tokenizers, and encode for Python programs",
		Subcommands: []*cli.Command{{
			Name:      "train",
			Usage:     "train a byte-level BPE tokenizer and write a Hugging Face tokenizer.json",
			ArgsUsage: "INPUT...",
			Description: "Inputs are the same as for `mula tokenize`: files of documents (JSON lines, JSON, " +
				"Parquet, Arrow, plain text; plain, gzip or zstd), folders of\n" +
				"them, or - for standard input. The result depends only on inputs and flags, not on the number of " +
				"workers.\n\n" +
				"Example: mula tokenizer train --vocab-size 4096 --output tokenizer.json corpus/go corpus/books",
			Flags: slices.Concat([]cli.Flag{
				&cli.StringFlag{Name: "output", Aliases: []string{"o"}, Usage: "write the tokenizer to `FILE`",
					Value: "tokenizer.json"},
				&cli.IntFlag{Name: "vocab-size", Usage: "train `N` ids, including special tokens and the 256 bytes",
					Value: 50304},
				&cli.StringSliceFlag{Name: "special",
					Usage: "reserve an id for the special `TOKEN`, from 0; may be repeated",
					Value: cli.NewStringSlice(defaultEOD, "<|padding|>")},
				&cli.StringFlag{Name: "pattern", Usage: "split text into words by the rule `NAME`: " +
					anyOf(patterns.names()),
					Value: "gpt2"},
				&cli.IntFlag{Name: "min-frequency", Usage: "merge only pairs that occur at least `N` times", Value: 2},
				&cli.Int64Flag{Name: "max-bytes", Usage: "read at most `N` bytes of text; 0: all"},
			}, readFlags(), []cli.Flag{workersFlag, jsonFlag}),
			Action: tokenizerTrain,
		}, tokenizerServeCommand()},
	}
}

const defaultEOD = "<|endoftext|>"

var patterns = choices[tokenize.Pattern]{{"gpt2", tokenize.GPT2}, {"cl100k", tokenize.CL100K}}

var workersFlag = &cli.IntFlag{Name: "workers",
	Usage: "use `N` parallel workers; 0: all cores. The output does not depend on the number"}

func tokenizerTrain(c *cli.Context) error {
	read, err := readOptions(c)
	if err != nil {
		return err
	}
	found, err := findInputs(c, read.Format)
	if err != nil {
		return err
	}
	inputs := found.Inputs
	if err := needFlags(c, "output"); err != nil {
		return err
	}
	if err := atMost(c, maxThreads, "workers"); err != nil {
		return err
	}
	if err := atMost(c, maxNumber, "max-bytes", "min-frequency"); err != nil {
		return err
	}
	if err := notInput(c.String("output"), inputs...); err != nil {
		return err
	}
	if err := oneFile(c.String("output"), tokenizerKind); err != nil {
		return err
	}
	if c.Int("vocab-size") < 1 {
		return usagef("--vocab-size is %d; it must be at least the 256 bytes and the special tokens",
			c.Int("vocab-size"))
	}
	start := time.Now()
	p := newProgress(c.App.ErrWriter)
	defer p.end()
	var last tokenize.TrainProgress
	data, err := tokenize.Train(c.Context, documents.ReadDocuments(c.Context, inputs, read), tokenize.TrainOptions{
		VocabSize:     c.Int("vocab-size"),
		SpecialTokens: c.StringSlice("special"),
		Pattern:       patterns.value(c.String("pattern")),
		MinFrequency:  c.Int("min-frequency"),
		Workers:       c.Int("workers"),
		MaxBytes:      c.Int64("max-bytes"),
		Progress: func(t tokenize.TrainProgress) {
			last = t
			if t.Merges == 0 {
				p.update(fmt.Sprintf("counting words: %s documents, %s", quantity.Grouped(t.Documents),
					quantity.Bytes(t.Bytes)), 0, 0)
			} else {
				p.update(fmt.Sprintf("merging: %s of %s", quantity.Grouped(int64(t.Merges)),
					quantity.Grouped(int64(t.TotalMerges))), 0, 0)
			}
		},
	})
	if bad := (*documents.DocumentError)(nil); errors.As(err, &bad) && bad.Kind != documents.BadStream {
		return fmt.Errorf("%w; %s", err, bad.Kind.Remedy())
	}
	if err != nil {
		return err
	}
	t, err := tokenize.Parse(data, c.String("output"))
	if err != nil {
		return fmt.Errorf("training a tokenizer: %w", err)
	}
	if err := atomicfile.On(fileSystem(c)).WriteFile(c.String("output"), data); err != nil {
		return err
	}
	p.end()
	seconds := time.Since(start).Seconds()
	if c.Bool("json") {
		return printJSON(c.App.Writer, map[string]any{
			"tokenizer": c.String("output"), "vocabulary": t.VocabSize(), "sha256": t.SHA256(),
			"documents": last.Documents, "text_bytes": last.Bytes, "seconds": seconds, "unread": found.Unread,
		})
	}
	fmt.Fprintf(c.App.Writer, "%s: %s from %s of text in %s, in %.1f s\n", filepath.ToSlash(c.String("output")),
		quantity.Plural(int64(t.VocabSize()), "id"), quantity.Bytes(last.Bytes), quantity.Plural(last.Documents,
			"document"), seconds)
	if t.VocabSize() < c.Int("vocab-size") {
		fmt.Fprintf(c.App.ErrWriter, "note: the text has pairs for only %s ids, fewer than --vocab-size %s\n",
			quantity.Grouped(int64(t.VocabSize())), quantity.Grouped(int64(c.Int("vocab-size"))))
	}
	return nil
}
