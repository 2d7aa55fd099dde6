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
	"mula/shards/datatrove"
	"mula/shards/formats"
	"mula/shards/layout"
	"mula/shards/mds"
)

func convertCommand() *cli.Command {
	return &cli.Command{
		Name: "convert",
		Usage: "convert shards to the layout of another framework: Megatron-LM, OLMo, nanotron, MosaicML " +
			"Streaming, fms-fsdp",
		ArgsUsage: "SHARD...",
		Description: "Reads shards of any layout (a prefix, one of the files, or an MDS folder) and writes their " +
			"documents, in order, in the layout LAYOUT:\n\n" +
			layoutTable() + "\n" +
			"Also writes PREFIX.json, a manifest with hashes, PREFIX.sums with checksums of the ids, which reveal " +
			"damage when ids are read, and\n" +
			"PREFIX.docs.arrow with the origins of documents (mds: mula.json, mula.sums and mula.docs.arrow in the " +
			"folder; fms: PREFIX.docs.feather; dolma:\n" +
			"in PREFIX.csv.gz). Keeps boundaries and origins of documents, and the tokenizer's description. If an " +
			"input has checksums and is damaged,\n" +
			"the conversion fails and names the damaged documents. After a kill, run the command again, with " +
			"--overwrite if it has written\n" +
			"shards; the bytes are the same.\n\n" +
			"Example: mula convert --to dolma --output olmo/wiki shards/wiki-*.idx",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "to", Usage: "write the layout `LAYOUT`: " + anyOf(formats.Names()) +
				" (required)"},
			&cli.StringFlag{Name: "output", Aliases: []string{"o"},
				Usage: "write the shard's files at `PREFIX`; mds: into the folder PREFIX (required)"},
			&cli.StringFlag{Name: "shard-tokens",
				Usage: "write shards PREFIX-00000, PREFIX-00001, … of at most `N` tokens each (2G, 500M); documents " +
					"are not split", DefaultText: "one shard, PREFIX"},
			&cli.BoolFlag{Name: "overwrite",
				Usage: "replace existing shards, such as the shards of a killed conversion"},
			&cli.BoolFlag{Name: "drop-empty",
				Usage: "skip documents without tokens, which datatrove and mds cannot store"},
			&cli.Int64Flag{Name: "eod",
				Usage: "split inputs without document boundaries after each token `ID`", Value: -1,
				DefaultText: "none"},
			&cli.StringFlag{Name: "dtype",
				Usage:       "read inputs without a type as the numpy `TYPE`: " + anyOf(shards.IDTypes()),
				DefaultText: "by --vocab-size"},
			&cli.IntFlag{Name: "vocab-size",
				Usage: "all ids are below `N`, for inputs without a manifest; determines the element type of bare " +
					"arrays and of the output", DefaultText: "unknown"},
			&cli.StringFlag{Name: "tokenizer-name",
				Usage: "datatrove: write the tokenizer `NAME` to PREFIX.ds.metadata, for nanotron"},
			&cli.StringFlag{Name: "mds-size-limit", Usage: "mds: start a new file at `BYTES`", Value: "64Mi"},
			&cli.StringFlag{Name: "mds-compression", Usage: "mds: compress files with `NAME`: " +
				anyOf(mds.Compressions()),
				DefaultText: "no compression"},
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
		return usagef("no shards to convert: see `%s --help`", c.Command.HelpName)
	}
	to, err := formats.Named(c.String("to"))
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
	for name, l := range map[string]*layout.Layout{"tokenizer-name": &datatrove.Layout, "mds-size-limit": &mds.Layout,
		"mds-compression": &mds.Layout} {
		if c.IsSet(name) && to != l {
			return usagef("--%s requires --to %s", name, l.Name)
		}
	}
	if output := c.String("output"); !to.Folder && os.IsPathSeparator(output[len(output)-1]) {
		return usagef("--output %s is a folder; add a file name prefix, such as %stokens",
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
			p.update(fmt.Sprintf("%s documents, %s tokens written", quantity.Grouped(documents),
				quantity.Tokens(tokens)), 0,
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
		t.row(filepath.ToSlash(s.Prefix), s.Documents, s.Tokens, s.DType, quantity.Bytes(s.Bytes))
	}
	t.write(w)
	fmt.Fprintf(w, "%s, %s in the layout %s\n", quantity.Plural(done.Documents, "document"),
		quantity.Plural(done.Tokens, "token"),
		to.Name)
	if done.Dropped > 0 {
		fmt.Fprintf(w, "  %s without tokens skipped\n", quantity.Plural(done.Dropped, "document"))
	}
	if done.Counts != "" {
		fmt.Fprintf(w, "  counted in %s\n", filepath.ToSlash(done.Counts))
	}
	if done.Left != "" {
		fmt.Fprintf(c.App.ErrWriter,
			"note: %s is from an earlier conversion to more shards; remove it and all later shards\n",
			filepath.ToSlash(done.Left))
	}
	return nil
}

// layoutTable lists the layouts with their files and users, a line each.
func layoutTable() string {
	var b strings.Builder
	for _, l := range formats.All() {
		fmt.Fprintf(&b, "  %-9s  %-49s  %s\n", l.Name, l.Shape, l.Users)
	}
	return b.String()
}

// notReplaced returns an error if the conversion would replace shards without --overwrite. The
// conversion itself refuses to replace inputs and shards of another layout.
func notReplaced(c *cli.Context, to *layout.Layout, numbered bool) error {
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
