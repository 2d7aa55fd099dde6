package cli

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v2"

	"mula/internal/quantity"
	"mula/shards"
	"mula/shards/formats"
)

func convertCommand() *cli.Command {
	return &cli.Command{
		Name:      "convert",
		Usage:     "write shards anew for another framework: Megatron-LM, OLMo, nanotron, MosaicML Streaming, fms-fsdp",
		ArgsUsage: "SHARD...",
		Description: "Reads shards of any layout (a prefix, one of the files, or a folder of MDS) and writes their documents, in order, in the layout LAYOUT:\n\n" +
			"  megatron   PREFIX.bin, PREFIX.idx                             Megatron-LM, NeMo; what mula blends\n" +
			"  dolma      PREFIX.npy, PREFIX.csv.gz                          dolma, OLMo, OLMo-core\n" +
			"  datatrove  PREFIX.ds, PREFIX.ds.index, PREFIX.ds.metadata     datatrove, nanotron\n" +
			"  mds        PREFIX/index.json, PREFIX/shard.00000.mds, …       MosaicML Streaming, llm-foundry\n" +
			"  fms        PREFIX.arrow, and a line in ../meta/*counts*.csv   fms-fsdp\n\n" +
			"Beside them are PREFIX.json, a manifest with hashes, PREFIX.sums with checksums of the ids, by which damage is found when they are read, and\n" +
			"PREFIX.docs.arrow with the origins of documents (mds: mula.json, mula.sums and mula.docs.arrow in the folder; fms: PREFIX.docs.feather; dolma:\n" +
			"in PREFIX.csv.gz). Boundaries and origins of documents are kept, and what is known of the tokenizer. Where an input has such checksums, damage\n" +
			"in it ends the conversion and the documents it hits are named. A conversion that was killed is run again, with --overwrite if it has made\n" +
			"shards; it gives the same bytes.\n\n" +
			"Example: mula convert --to dolma --output olmo/wiki shards/wiki-*.idx",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "to", Usage: "write the layout `LAYOUT`: " + strings.Join(formats.Names(), ", ") +
				" (needed)"},
			&cli.StringFlag{Name: "output", Aliases: []string{"o"},
				Usage: "write the shard's files under the `PREFIX`, for mds into the folder (needed)"},
			&cli.StringFlag{Name: "shard-tokens",
				Usage: "write shards PREFIX-00000, PREFIX-00001, … of at most `N` tokens each (2G, 500M); documents are not divided", DefaultText: "one shard, PREFIX"},
			&cli.BoolFlag{Name: "overwrite",
				Usage: "replace shards that are there already, such as those that a conversion has left that was killed"},
			&cli.BoolFlag{Name: "drop-empty",
				Usage: "leave documents without tokens out; datatrove and mds cannot hold them"},
			&cli.Int64Flag{Name: "eod",
				Usage: "the `ID` that ends each document, for inputs that do not say where documents end", Value: -1,
				DefaultText: "none"},
			&cli.StringFlag{Name: "dtype",
				Usage:       "the element `TYPE` of ids, as numpy calls it, for inputs that do not say it",
				DefaultText: "by --vocab-size"},
			&cli.IntFlag{Name: "vocab-size",
				Usage: "all ids are below `N`, for inputs without a manifest; decides the element type of a bare array that is read, and the one that is written", DefaultText: "not known"},
			&cli.StringFlag{Name: "tokenizer-name",
				Usage: "datatrove: the `NAME` of the tokenizer for PREFIX.ds.metadata, by which nanotron loads it"},
			&cli.StringFlag{Name: "mds-size-limit", Usage: "mds: begin a new file at `BYTES`", Value: "64Mi"},
			&cli.StringFlag{Name: "mds-compression", Usage: "mds: compress files with `NAME`: zstd",
				DefaultText: "not compressed"},
			jsonFlag,
		},
		Action: runConvert,
	}
}

func runConvert(c *cli.Context) error {
	if err := needFlags(c, "to", "output"); err != nil {
		return err
	}
	if !c.Args().Present() {
		return usagef("no shard to convert: see `%s --help`", c.Command.HelpName)
	}
	to, err := formats.ParseLayout(c.String("to"))
	if err != nil {
		return usagef("--to: %v", err)
	}
	shardTokens, err := amount(c, "shard-tokens")
	if err != nil {
		return err
	}
	sizeLimit, err := amount(c, "mds-size-limit")
	if err != nil {
		return err
	}
	if err := atMost(c, math.MaxInt32, "vocab-size"); err != nil {
		return err
	}
	if id := c.Int64("eod"); id < -1 || id > math.MaxUint32 {
		return usagef("--eod is %d; it must be an id, or -1 for none", id)
	}
	for name, l := range map[string]shards.Layout{"tokenizer-name": shards.Datatrove, "mds-size-limit": shards.MDS,
		"mds-compression": shards.MDS} {
		if c.IsSet(name) && to != l {
			return usagef("--%s goes with --to %s", name, formats.Name(l))
		}
	}
	if output := c.String("output"); to != shards.MDS && os.IsPathSeparator(output[len(output)-1]) {
		return usagef("--output %s is a folder; add what the names of the files are to begin with, such as %stokens",
			output, output)
	}
	if err := notReplaced(c, to, shardTokens > 0); err != nil {
		return err
	}
	if err := ownFolder(to, c.String("output")); err != nil {
		return err
	}
	if err := makeParent(c.String("output")); err != nil {
		return err
	}
	p := newProgress(c.App.ErrWriter)
	defer p.end()
	conversion := formats.Conversion{
		Inputs: c.Args().Slice(), Hints: formats.Hints{DType: c.String("dtype"), VocabSize: c.Int("vocab-size"),
			EOD: c.Int64("eod")},
		Layout: to, Output: c.String("output"), ShardTokens: shardTokens, DropEmpty: c.Bool("drop-empty"),
		Options: formats.Options{SizeLimit: sizeLimit, Compression: c.String("mds-compression"),
			TokenizerName: c.String("tokenizer-name")},
		Progress: func(documents, tokens int64) {
			p.update(fmt.Sprintf("%s documents, %s tokens written", quantity.Grouped(documents), tokensText(tokens)), 0,
				0)
		},
	}
	done, err := conversion.Run(c.Context)
	if err != nil {
		return err
	}
	p.end()
	w := c.App.Writer
	if c.Bool("json") {
		return printJSON(w, done)
	}
	t := newTable("shard", "documents", "tokens", "type", "size")
	for _, s := range done.Shards {
		t.row(filepath.ToSlash(s.Prefix), s.Documents, s.Tokens, s.DType, bytesText(s.Bytes))
	}
	t.write(w)
	fmt.Fprintf(w, "%s, %s in the layout %s\n", plural(done.Documents, "document"), plural(done.Tokens, "token"),
		formats.Name(to))
	if done.Dropped > 0 {
		fmt.Fprintf(w, "  %s without tokens left out\n", plural(done.Dropped, "document"))
	}
	if done.Counts != "" {
		fmt.Fprintf(w, "  counted in %s\n", filepath.ToSlash(done.Counts))
	}
	if done.Left != "" {
		fmt.Fprintf(c.App.ErrWriter,
			"note: %s is of an earlier conversion to more shards; remove it and those after it\n",
			filepath.ToSlash(done.Left))
	}
	return nil
}

// notReplaced refuses shards that would take the place of others without --overwrite. Where these
// are inputs, or of another layout, the conversion itself says that they cannot be replaced at all.
func notReplaced(c *cli.Context, to shards.Layout, numbered bool) error {
	if c.Bool("overwrite") {
		return nil
	}
	output := filepath.Clean(c.String("output"))
	if l, _, err := formats.Detect(output); err == nil && l != to && !numbered {
		return nil
	}
	for _, input := range c.Args().Slice() {
		l, prefix, err := formats.Detect(input)
		prefix = filepath.Clean(prefix)
		if err == nil && l == to && (prefix == output && !numbered || numbered && prefix != output+"-" &&
			strings.TrimRight(prefix, "0123456789") == output+"-") {
			return nil
		}
	}
	return notShard(output, to, numbered)
}
