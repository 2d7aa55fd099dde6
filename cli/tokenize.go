package cli

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"

	"github.com/urfave/cli/v2"

	"mula/tokenize"
	"mula/tokenize/documents"
	"mula/tokenize/job"
)

func tokenizeCommand() *cli.Command {
	return &cli.Command{
		Name:      "tokenize",
		Usage:     "turn documents into a shard of token ids",
		ArgsUsage: "INPUT...",
		Description: "Inputs are files of documents (.jsonl or .json: one object a line with \"id\" and \"text\"; plain, .gz or .zst), folders of them, or - for\n" +
			"standard input. Writes PREFIX.bin, PREFIX.idx (Megatron-LM's format), PREFIX.docs.arrow (where every document came from) and\n" +
			"PREFIX.json (hashes). The bytes depend on inputs, tokenizer and flags alone, not on the number of workers.\n\n" +
			"Example: mula tokenize --tokenizer tokenizer.json --output shards/wiki corpus/wiki",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "tokenizer", Usage: "use the Hugging Face tokenizer.json in `FILE` (needed)"},
			&cli.StringFlag{Name: "output", Aliases: []string{"o"}, Usage: "write the shard's files under the `PREFIX` (needed)"},
			&cli.StringFlag{Name: "eod", Usage: "the `TOKEN` that ends every document", Value: defaultEOD},
			&cli.BoolFlag{Name: "no-eod", Usage: "end documents without a token"},
			&cli.StringFlag{Name: "specials", Usage: "special tokens that stand literally in a text become text (text) or the special id (tokens), which is Hugging Face's default", Value: "text"},
			&cli.StringFlag{Name: "on-error", Usage: "at a document that cannot be used: fail, or skip and count it", Value: "fail"},
			&cli.StringFlag{Name: "rejects", Usage: "with --on-error skip, write what was skipped and why to `FILE` (default PREFIX.rejects.jsonl)"},
			workersFlag, jsonFlag,
		},
		Action: runTokenize,
	}
}

func runTokenize(c *cli.Context) error {
	if err := needFlags(c, "tokenizer", "output"); err != nil {
		return err
	}
	inputs, err := expandInputs(c)
	if err != nil {
		return err
	}
	if err := atMost(c, maxThreads, "workers"); err != nil {
		return err
	}
	if c.Bool("no-eod") && c.IsSet("eod") {
		return usagef("--eod and --no-eod contradict each other")
	}
	t, err := tokenize.Load(c.String("tokenizer"))
	if err != nil {
		return err
	}
	p := newProgress(c.App.ErrWriter)
	defer p.end()
	options := job.Options{Tokenizer: t, Inputs: inputs, Output: c.String("output"), Workers: c.Int("workers"), AppendEOD: !c.Bool("no-eod"),
		Read: documents.ReadOptions{Stdin: c.App.Reader},
		Progress: func(s job.Progress) {
			p.update(fmt.Sprintf("%s documents, %s tokens, %s of input read", count(s.Documents), tokensText(s.Tokens), bytesText(s.InputRead)),
				float64(s.InputRead), float64(s.InputSize))
		}}
	if options.AppendEOD {
		id, ok := t.ID(c.String("eod"))
		if !ok {
			return fmt.Errorf("%s has no token %q; name the end-of-document token with --eod, or use --no-eod", c.String("tokenizer"), c.String("eod"))
		}
		options.EOD = id
	}
	switch c.String("specials") {
	case "text":
		options.Specials = tokenize.SpecialsAsText
	case "tokens":
		options.Specials = tokenize.SpecialsAsTokens
	default:
		return usagef("--specials is %q; allowed: text, tokens", c.String("specials"))
	}
	switch c.String("on-error") {
	case "fail":
		if c.IsSet("rejects") {
			return usagef("--rejects goes with --on-error skip")
		}
	case "skip":
		options.OnError = job.Skip
		if options.Rejects = c.String("rejects"); options.Rejects == "" {
			options.Rejects = options.Output + ".rejects.jsonl"
		}
	default:
		return usagef("--on-error is %q; allowed: fail, skip", c.String("on-error"))
	}
	if err := makeParent(options.Output); err != nil {
		return err
	}
	s, err := job.Run(c.Context, options)
	if bad := (*documents.DocumentError)(nil); errors.As(err, &bad) && bad.Kind != documents.BadStream && options.OnError == job.Fail {
		return fmt.Errorf("%w; repair the document, or leave such documents out with --on-error skip", err)
	}
	if err != nil {
		return err
	}
	p.end()
	if c.Bool("json") {
		return printJSON(c.App.Writer, s)
	}
	w := c.App.Writer
	fmt.Fprintf(w, "%s: %s, %s, %s of text, in %.1f s (%.1f MB/s)\n", filepath.ToSlash(options.Output),
		plural(s.Documents, "document"), plural(s.Tokens, "token"), bytesText(s.TextBytes), s.Seconds, float64(s.TextBytes)/1e6/s.Seconds)
	if len(s.Skipped) > 0 {
		var total int64
		for _, kind := range slices.Sorted(maps.Keys(s.Skipped)) {
			total += s.Skipped[kind]
			fmt.Fprintf(w, "  skipped %s: %s\n", kind, count(s.Skipped[kind]))
		}
		fmt.Fprintf(w, "  %s skipped in all; %s says which and why\n", plural(total, "document"), options.Rejects)
	}
	return nil
}
