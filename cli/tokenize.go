package cli

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"mula/internal/objects"
	"mula/internal/quantity"
	"mula/shards/formats"
	"mula/tokenize"
	"mula/tokenize/documents"
	"mula/tokenize/job"
)

func tokenizeCommand() *cli.Command {
	return &cli.Command{
		Name:      "tokenize",
		Usage:     "tokenize documents into shards of token ids",
		ArgsUsage: "INPUT...",
		Description: "Inputs are files of documents (JSON lines, JSON, Parquet, Arrow, plain text; plain, gzip or " +
			"zstd), folders of them, or - for standard\n" +
			"input. They may be URLs (s3://bucket/folder/*.jsonl.zst, https://host/file).\n" +
			"Writes PREFIX.bin and PREFIX.idx (Megatron-LM's format) or the files of another framework " +
			"(--to), the origin of each document, and\n" +
			"hashes. The bytes depend only on inputs, tokenizer and flags, not on workers and processes.\n\n" +
			"Progress is kept in PREFIX.job. After a kill, the same command resumes the job. Several processes, on " +
			"machines that share the folder or the store,\n" +
			"may run the same command to share the work. A finished job is not repeated.\n\n" +
			"Example: mula tokenize --tokenizer tokenizer.json --output shards/wiki --shard-tokens 2G corpus/wiki",
		Flags: slices.Concat([]cli.Flag{
			&cli.StringFlag{Name: "tokenizer", Usage: "use the Hugging Face tokenizer.json in `FILE` (required)"},
			&cli.StringFlag{Name: "output", Aliases: []string{"o"},
				Usage: "write shards to `PREFIX`.bin, .idx and so on; may be a URL of an object store (required)"},
			&cli.StringFlag{Name: "work",
				Usage: "if --output is a URL, keep files that are being written in the local folder `DIR`, " +
					"one for each process or machine"},
			&cli.StringFlag{Name: "to", Usage: "write shards in the layout `NAME`: " + anyOf(formats.Names()),
				Value: "megatron"},
			&cli.StringFlag{Name: "shard-tokens",
				Usage: "write shards PREFIX-00000, PREFIX-00001, … of at most `N` tokens (2G, 500M), except for " +
					"single larger documents", DefaultText: "one shard, PREFIX"},
			&cli.Uint64Flag{Name: "shuffle-seed", Usage: "shuffle all documents with seed `N`",
				DefaultText: "not shuffled"},
			&cli.Float64Flag{Name: "fraction",
				Usage: "keep a random `FRACTION` of the documents, above 0 and at most 1; a smaller fraction keeps " +
					"a subset of a larger one", DefaultText: "all"},
			&cli.StringFlag{Name: "max-documents", Usage: "stop after `N` documents in the order of the inputs",
				DefaultText: "all"},
		}, readFlags(), []cli.Flag{
			&cli.StringFlag{Name: "eod", Usage: "end every document with `TOKEN`", Value: defaultEOD},
			&cli.BoolFlag{Name: "no-eod", Usage: "end documents without a token"},
			&cli.StringFlag{Name: "specials",
				Usage: "encode special tokens that occur in documents as plain text (text), or as special ids " +
					"(tokens, the default of Hugging Face)", Value: "text"},
			&cli.BoolFlag{Name: "add-special-tokens",
				Usage: "add the tokens of the tokenizer's post-processor, such as a begin token; --eod still ends " +
					"each document, once"},
			&cli.BoolFlag{Name: "ignore-truncation-and-padding",
				Usage: "ignore the tokenizer's truncation and padding settings; documents are never cut or padded"},
			&cli.StringFlag{Name: "on-error", Usage: "on an unusable document, fail, or skip it and count it",
				Value: "fail"},
			&cli.StringFlag{Name: "rejects",
				Usage:       "with --on-error skip, list skipped documents and reasons in `FILE`",
				DefaultText: "PREFIX.rejects.jsonl"},
			&cli.StringFlag{Name: "max-rejects",
				Usage: "with --on-error skip, fail before a shard is written if more than `N` documents, or N% of " +
					"all, were skipped", Value: "1%"},
			&cli.BoolFlag{Name: "overwrite",
				Usage: "discard an earlier job and its shards at PREFIX"},
			&cli.StringFlag{Name: "memory",
				Usage: "keep at most `BYTES` of texts and ids in memory; shuffling a large corpus is faster with " +
					"several G",
				Value: "256M"},
			&cli.StringFlag{Name: "piece-size",
				Usage:       "claim about `BYTES` of input at a time; does not change the output",
				DefaultText: "8M to 256M, by the size of the inputs"},
			workersFlag, jsonFlag,
		}),
		Action: runTokenize,
	}
}

var (
	specials = choices[tokenize.Specials]{{"text", tokenize.SpecialsAsText}, {"tokens", tokenize.SpecialsAsTokens}}
	onErrors = choices[job.OnError]{{"fail", job.Fail}, {"skip", job.Skip}}
)

// readFlags returns the flags for reading documents, which [readOptions] reads.
func readFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "input-format",
			Usage: "read all inputs, and all files in folders, as `NAME`: " + anyOf(documents.Formats()),
			Value: "auto"},
		&cli.StringSliceFlag{Name: "glob",
			Usage: "in folders, read the files that match `PATTERN`, with any extension: *.md by name, web/**/*.md " +
				"by path in the folder; may be repeated"},
		&cli.StringFlag{Name: "files-from", Usage: "read more inputs from `FILE`, one path or URL a line"},
		&cli.StringFlag{Name: "text-field",
			Usage: "read texts from the field or column `NAME`; a dot selects a field of an object, as in doc.body",
			Value: "text"},
		&cli.StringFlag{Name: "id-field",
			Usage:       "read document ids from the field or column `NAME`; every Parquet and Arrow file must have it",
			DefaultText: "id, if it exists"},
		&cli.StringFlag{Name: "text-unit", Usage: "treat each `UNIT` of plain text as a document: " +
			anyOf(documents.Units()), Value: "file"},
	}
}

// readOptions returns the options of the flags of readFlags.
func readOptions(c *cli.Context) (o documents.Options, err error) {
	o = documents.Options{Stdin: c.App.Reader, Text: c.String("text-field")}
	if c.IsSet("id-field") { // else the field is optional
		o.ID = c.String("id-field")
	}
	if o.Format, err = documents.ParseFormat(c.String("input-format")); err != nil {
		return o, usagef("--input-format: %v", err)
	}
	if o.Unit, err = documents.ParseUnit(c.String("text-unit")); err != nil {
		return o, usagef("--text-unit: %v", err)
	}
	return o, nil
}

// amount reads a flag that is a [quantity.Count] above 0. An empty flag is 0.
func amount(c *cli.Context, flag string) (int64, error) {
	text := c.String(flag)
	if text == "" {
		return 0, nil
	}
	n, err := quantity.Count(text)
	switch {
	case err != nil && !errors.Is(err, quantity.ErrForm):
		return 0, usagef("--%s: %v", flag, err)
	case err != nil || n < 1 || n >= 1<<62:
		return 0, usagef("--%s is %q; it must be a number above 0, such as 5000, 1.5M or 2G", flag, text)
	}
	return n, nil
}

// noStrayFile returns an error if the job's shard would replace files that are not a shard, such as
// the train.bin of another program, and that the job itself did not write. The job checks complete
// shards and numbered shards.
func noStrayFile(o job.Options) error {
	if o.Overwrite || o.ShardTokens > 0 || objects.IsURL(o.Output) {
		return nil
	}
	if _, _, err := formats.Detect(o.Output); err == nil {
		return nil
	}
	found := notShard(o.Output, formats.Of(o.Layout), false)
	if found == nil {
		return nil
	}
	// The folder is checked last: another process may have started the job in between.
	if _, err := os.Stat(o.Output + job.FolderSuffix); err == nil {
		return nil
	}
	return found
}

func runTokenize(c *cli.Context) error {
	if err := needFlags(c, "tokenizer", "output"); err != nil {
		return err
	}
	read, err := readOptions(c)
	if err != nil {
		return err
	}
	found, err := findInputs(c, read.Format)
	if err != nil {
		return err
	}
	if err := atMost(c, maxThreads, "workers"); err != nil {
		return err
	}
	if c.Bool("no-eod") && c.IsSet("eod") {
		return usagef("--eod and --no-eod contradict each other")
	}
	to, err := formats.Named(c.String("to"))
	if err != nil {
		return usagef("--to: %v", err)
	}
	output := c.String("output")
	switch {
	case !objects.IsURL(output):
		if c.IsSet("work") {
			return usagef("--work requires a URL as --output")
		}
	case c.String("work") == "":
		return usagef("--output is a URL; name a local folder for files that are being written with --work")
	}
	switch {
	case !os.IsPathSeparator(output[len(output)-1]):
	case to.Folder:
		return usagef("--output %s ends with a separator; remove it, because the job's files are next to the folder",
			output)
	default:
		return usagef("--output %s is a folder; add a file name prefix, such as %stokens",
			output, output)
	}
	options := job.Options{Inputs: found.Inputs, Names: found.Names, Read: read, Output: output,
		Work: c.String("work"), Layout: to.ID,
		FS:      fileSystem(c),
		Workers: c.Int("workers"), AppendEOD: !c.Bool("no-eod"), Overwrite: c.Bool("overwrite"),
		Shuffle: c.IsSet("shuffle-seed"), ShuffleSeed: c.Uint64("shuffle-seed"), Sample: c.Float64("fraction")}
	for flag, value := range map[string]*int64{
		"shard-tokens": &options.ShardTokens, "max-documents": &options.MaxDocuments, "memory": &options.Memory,
		"piece-size": &options.PieceBytes,
	} {
		if *value, err = amount(c, flag); err != nil {
			return err
		}
	}
	if n := options.PieceBytes; n > 0 && n < minPieceSize {
		return usagef("--piece-size is %s; it must be at least %d", c.String("piece-size"), minPieceSize)
	}
	if s := options.Sample; c.IsSet("fraction") && !(s > 0 && s <= 1) {
		return usagef("--fraction is %v; it must be above 0 and at most 1", s)
	}
	options.AddSpecialTokens = c.Bool("add-special-tokens")
	options.Specials = specials.value(c.String("specials"))
	switch options.OnError = onErrors.value(c.String("on-error")); options.OnError {
	case job.Fail:
		if c.IsSet("rejects") {
			return usagef("--rejects requires --on-error skip")
		}
		if c.IsSet("max-rejects") {
			return usagef("--max-rejects requires --on-error skip")
		}
	case job.Skip:
		if options.MaxRejects, err = rejectLimit(c.String("max-rejects")); err != nil {
			return err
		}
		if options.Rejects = c.String("rejects"); options.Rejects == "" {
			options.Rejects = options.Output + ".rejects.jsonl"
		}
		if err := notInput(options.Rejects, c.String("tokenizer")); err != nil {
			return err
		}
		refuse := notOther
		if filepath.Dir(options.Rejects) != filepath.Dir(options.Output) { // the job creates the folder of the shards
			refuse = oneFile
		}
		if err := refuse(options.Rejects, rejectsKind); err != nil {
			return err
		}
	}
	load := tokenize.LoadOptions{IgnoreTruncationAndPadding: c.Bool("ignore-truncation-and-padding")}
	if options.Tokenizer, err = tokenize.LoadWith(c.String("tokenizer"), load); err != nil {
		return err
	}
	if options.AppendEOD {
		id, ok := options.Tokenizer.ID(c.String("eod"))
		if !ok {
			return fmt.Errorf("%s has no token %q; name the end-of-document token with --eod%s, or use --no-eod",
				c.String("tokenizer"), c.String("eod"),
				likelyEOD(options.Tokenizer))
		}
		options.EOD = id
	}
	if err := ownFolder(to, options.Output); err != nil {
		return err
	}
	if err := noStrayFile(options); err != nil {
		return err
	}
	if err := outsideInputs(options.Output, c.Args().Slice()); err != nil {
		return err
	}
	if !objects.IsURL(options.Output) {
		if err := makeParent(options.Output); err != nil {
			return err
		}
	}
	p := newProgress(c.App.ErrWriter)
	defer p.end()
	options.Progress = func(s job.Progress) {
		text := fmt.Sprintf("%s, %s tokens, %s of input read", quantity.Plural(s.Documents, "document"),
			quantity.Tokens(s.Tokens),
			quantity.Bytes(s.InputRead))
		if s.Large > 0 {
			text += fmt.Sprintf(", encoding %s of %s", quantity.Plural(s.Large, "large document"),
				quantity.Bytes(s.LargeBytes))
		}
		if options.Shuffle && s.InputRead < s.InputSize { // the remaining time is the time of reading
			text += ", then the shards are written"
		}
		if s.Shards > 0 {
			text += ", " + quantity.Plural(int64(s.Shards), "shard") + " written"
		}
		if s.Waiting != "" {
			text += ", waiting for " + s.Waiting
		}
		done, total := float64(s.InputRead-s.InputKept), float64(s.InputSize-s.InputKept)
		// The remaining time is unknown while shards are written, and while a large part of the
		// inputs is being encoded.
		if s.InputRead >= s.InputSize || s.LargeBytes > s.InputSize/20 {
			done, total = 0, 0
		}
		p.update(text, done, total)
	}
	s, err := job.Run(c.Context, options)
	if bad := (*documents.DocumentError)(nil); errors.As(err, &bad) && bad.Kind != documents.BadStream &&
		options.OnError == job.Fail {
		return fmt.Errorf("%w; %s, or skip such documents with --on-error skip", err, bad.Kind.Remedy())
	}
	if err != nil {
		if c.Context.Err() != nil && !slices.Contains(found.Inputs, "-") {
			p.line("progress is kept in %s; the same command resumes the job", options.Output+job.FolderSuffix)
		}
		return err
	}
	p.end()
	if c.Bool("json") {
		return printJSON(c.App.Writer, struct {
			job.Summary
			Unread map[string]int `json:"unread"` // files in folders, by extension
		}{s, found.Unread})
	}
	showTokenized(c, s)
	return nil
}

// rejectLimit reads a number of documents, or a percentage of all documents. 100 % means no limit.
func rejectLimit(text string) (*job.RejectLimit, error) {
	if percent, ok := strings.CutSuffix(text, "%"); ok {
		if v, err := strconv.ParseFloat(strings.TrimSpace(percent), 64); err == nil && v == 100 {
			return nil, nil
		} else if err == nil && v >= 0 && v < 100 {
			return &job.RejectLimit{Share: v / 100}, nil
		}
	} else if n, err := quantity.Count(text); err == nil && n >= 0 {
		return &job.RejectLimit{Documents: n}, nil
	}
	return nil, usagef("--max-rejects is %q; it must be a number of documents, such as 500, or a share from 0%% to "+
		"100%%, such as 0.1%%", text)
}

// minPieceSize is a size below which claiming a piece takes longer than reading it.
const minPieceSize = 1000

// likelyEOD names a token of t that probably ends documents, as the end of a message about --eod.
func likelyEOD(t *tokenize.Tokenizer) string {
	for _, token := range []string{defaultEOD, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eot_id|>", "<|im_end|>",
		"[SEP]"} {
		if _, ok := t.ID(token); ok {
			return fmt.Sprintf(", such as %q", token)
		}
	}
	return ""
}

// showTokenized prints the result of a job.
func showTokenized(c *cli.Context, s job.Summary) {
	w := c.App.Writer
	fmt.Fprintf(w, "%s: %s, %s, %s of text", filepath.ToSlash(s.Output), quantity.Plural(s.Documents, "document"),
		quantity.Plural(s.Tokens, "token"), quantity.Bytes(s.TextBytes))
	if len(s.Shards) > 1 || len(s.Shards) == 1 && s.Shards[0].Prefix != s.Output {
		fmt.Fprintf(w, ", %s", quantity.Plural(int64(len(s.Shards)), "shard"))
	}
	if s.Before {
		fmt.Fprintf(w, "; already complete; nothing to do (--overwrite rebuilds it)\n")
	} else {
		fmt.Fprintf(w, ", in %.1f s (%.1f MB/s)\n", s.Seconds, float64(s.TextBytes)/1e6/s.Seconds)
	}
	if len(s.Skipped) == 0 {
		return
	}
	var total int64
	for _, kind := range slices.Sorted(maps.Keys(s.Skipped)) {
		total += s.Skipped[kind]
		fmt.Fprintf(w, "  skipped %s: %s\n", kind, quantity.Grouped(s.Skipped[kind]))
	}
	fmt.Fprintf(w, "  %s skipped in total", quantity.Plural(total, "document"))
	if s.Rejects != "" {
		fmt.Fprintf(w, "; see %s for the reasons", s.Rejects)
	}
	fmt.Fprintln(w)
}
