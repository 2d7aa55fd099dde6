package cli

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"mula/internal/objects"
	"mula/internal/quantity"
	"mula/moe/safetensors"
	"mula/train/checkpoint"
)

func exportCommand() *cli.Command {
	return &cli.Command{
		Name:  "export",
		Usage: "write a model as a Hugging Face folder, or a training state for DeepSpeed or Megatron core",
		Description: "The folder has config.json, generation_config.json, the weights in safetensors files (with an " +
			"index\n" +
			"if there are several), and the tokenizer with the files that AutoTokenizer needs. The folder appears\n" +
			"complete or not at all, and no existing file is overwritten. If an export is killed, the next export\n" +
			"to the same folder removes its files.\n\n" +
			"--output s3://BUCKET/PATH (also gs and az) writes to an object store. There config.json appears last:\n" +
			"without it, the export is incomplete.\n\n" +
			"Weights are rounded to nearest, ties to even. The export fails if a weight is out of range for the\n" +
			"element type. The printed sha256 is the hash of the weights before rounding.\n\n" +
			"--to deepspeed writes a universal checkpoint instead, with float32 weights, AdamW's moments and the\n" +
			"number of updates of a run's checkpoint. DeepSpeed continues from it with any number of ranks:\n" +
			"set checkpoint.load_universal in its configuration, and load the folder with load_checkpoint.\n\n" +
			"--to megatron writes the same state as a distributed checkpoint of Megatron core (torch_dist), which\n" +
			"Megatron-LM loads with --use-distributed-optimizer and any number of ranks.\n\n" +
			"Example: mula export --model runs/base --output base-hf --dtype bf16\n" +
			"         mula export --model runs/base --output base-ds --to deepspeed\n" +
			"         mula export --model runs/base --output base-megatron --to megatron",
		Flags: []cli.Flag{
			modelFlag,
			&cli.StringFlag{Name: "output", Aliases: []string{"o"},
				Usage: "write the new folder `DIR`; may be a URL of an object store (required)"},
			&cli.StringFlag{Name: "to", Usage: "write `FORM`: " + anyOf(exportForms.names()),
				Value: exportForms[0].name},
			&cli.StringFlag{Name: "dtype", Usage: "element type of the weights: " + anyOf(weightTypes.names()),
				Value: "fp32"},
			shardSizeFlag,
			&cli.BoolFlag{Name: "separate-experts", Usage: "with --to deepspeed, write parameters of experts as " +
				"transformers 4 names them (transformers 5 has one parameter for all experts of a layer)"},
			&cli.BoolFlag{Name: "expert-parallel", Usage: "with --to megatron, write the checkpoint for ranks with " +
				"different experts (expert_model_parallel_size above 1)"},
			jsonFlag,
		},
		Action: runExport,
	}
}

var shardSizeFlag = &cli.StringFlag{Name: "shard-size",
	Usage: "limit the weights in one file to `SIZE`, as in 500M or 5G (0: a single file)", Value: "5G"}

// weightTypes are the element types of weights by their names in flags.
var weightTypes = choices[safetensors.DType]{{"fp32", safetensors.F32}, {"bf16", safetensors.BF16},
	{"fp16", safetensors.F16}}

// exportForms are the forms of an export by their names in flags. The first has no training state.
var exportForms = choices[checkpoint.Framework]{{"huggingface", ""}, {"deepspeed", checkpoint.DeepSpeed},
	{"megatron", checkpoint.Megatron}}

func runExport(c *cli.Context) error {
	options, err := convertOptions(c)
	if err != nil {
		return err
	}
	if err := needFlags(c, "model", "output"); err != nil {
		return err
	}
	if c.Bool("separate-experts") && c.String("to") != string(checkpoint.DeepSpeed) {
		return usagef("--separate-experts needs --to %s", checkpoint.DeepSpeed)
	}
	if c.Bool("expert-parallel") && c.String("to") != string(checkpoint.Megatron) {
		return usagef("--expert-parallel needs --to %s", checkpoint.Megatron)
	}
	to := exportForms.value(c.String("to"))
	if to != "" {
		for _, name := range []string{"dtype", "shard-size"} {
			if c.IsSet(name) {
				return usagef("--%s and --to %s cannot be combined; the checkpoint's types and files are fixed", name,
					c.String("to"))
			}
		}
		if output := c.String("output"); objects.IsURL(output) {
			return usagef("--output: %s is in an object store; --to %s writes only local folders; copy the folder",
				output, c.String("to"))
		}
	}
	dir, err := findModel(c)
	if err != nil {
		return err
	}
	if to != "" {
		return exportState(c, dir, to)
	}
	found, err := convert(c, dir, options)
	if err != nil {
		return err
	}
	return printInspection(c, dir, found, c.String("output"))
}

// exportState writes the training state of a checkpoint.
func exportState(c *cli.Context, dir checkpoint.ModelDir, to checkpoint.Framework) error {
	p := newProgress(c.App.ErrWriter)
	defer p.end()
	done, err := dir.Export(c.Context, c.String("output"), checkpoint.ExportOptions{Framework: to,
		SeparateExperts: c.Bool("separate-experts"), ExpertParallel: c.Bool("expert-parallel"),
		Progress: weightsProgress(p)})
	if err != nil {
		return err
	}
	p.end()
	if c.Bool("json") {
		return printJSON(c.App.Writer, done)
	}
	w := c.App.Writer
	fmt.Fprintf(w, "from       %s\n", filepath.ToSlash(done.Checkpoint))
	fmt.Fprintf(w, "written    %s: %s\n", filepath.ToSlash(done.Output), done.Form)
	fmt.Fprintf(w, "progress   step %s, %s of the optimizer, %s\n", quantity.Grouped(done.Step),
		quantity.Plural(done.Updates, "update"), quantity.Plural(done.Samples, "sample"))
	for _, note := range done.Notes {
		fmt.Fprintf(w, "note       %s\n", note)
	}
	return nil
}

// convertOptions reads the flags that export and import share.
func convertOptions(c *cli.Context) (o checkpoint.ConvertOptions, err error) {
	if err := noOperands(c); err != nil {
		return o, err
	}
	if output := c.String("output"); !objects.IsURL(output) {
		err = reachable(output)
	} else if err = objects.CheckWritable(output); err != nil {
		err = usagef("--output: %v", err)
	}
	if err != nil {
		return o, err
	}
	if name := c.String("dtype"); name != "" {
		o.DType = weightTypes.value(name)
	}
	o.ShardSize, err = parseSize(c.String("shard-size"))
	if err != nil {
		return o, usagef("--shard-size: %q: %v", c.String("shard-size"), err)
	}
	return o, nil
}

// parseSize reads a number of bytes in the form of transformers' max_shard_size: a [quantity.Count]
// with an optional B.
func parseSize(text string) (int64, error) {
	n, err := quantity.Count(strings.TrimSuffix(text, "B"))
	switch {
	case err != nil && !errors.Is(err, quantity.ErrForm):
		return 0, err
	case err != nil || n < 0 || n > 1<<60:
		return 0, fmt.Errorf("must be a number of bytes, such as 500M or 5GB")
	}
	return n, nil
}

// convert writes a model to --output.
func convert(c *cli.Context, dir checkpoint.ModelDir, o checkpoint.ConvertOptions) (checkpoint.Inspection, error) {
	p := newProgress(c.App.ErrWriter)
	defer p.end()
	o.Progress = weightsProgress(p)
	return dir.Convert(c.Context, c.String("output"), o)
}

func weightsProgress(p *progress) func(done, total int64) {
	start := time.Now()
	return func(done, total int64) {
		rate := float64(done) / time.Since(start).Seconds()
		text := fmt.Sprintf("%s of %s weights  %s/s", quantity.Grouped(done), quantity.Grouped(total),
			strings.TrimSpace(quantity.Prefixed(int64(rate), "kMGTPE")))
		p.update(text, float64(done), float64(total))
	}
}

// printInspection describes a model, and the folder to which it was written, if any.
func printInspection(c *cli.Context, dir checkpoint.ModelDir, i checkpoint.Inspection, output string) error {
	if c.Bool("json") {
		return printJSON(c.App.Writer, struct {
			Model  string `json:"model"`
			Output string `json:"output,omitempty"`
			checkpoint.Inspection
		}{dir.Dir, output, i})
	}
	w := c.App.Writer
	experts := ""
	if i.Config.Experts > 0 {
		experts = fmt.Sprintf(", %s active", quantity.Grouped(i.ActiveParameters))
		if i.Fused {
			experts += ", experts fused"
		}
	}
	var types []string
	for _, t := range i.DTypes {
		types = append(types, string(t))
	}
	fmt.Fprintf(w, "model      %s: %s, %s parameters%s, %s\n", filepath.ToSlash(dir.Dir), i.Config.Architecture,
		quantity.Grouped(i.Parameters), experts,
		strings.Join(types, " and "))
	fmt.Fprintf(w, "weights    sha256 %s, all finite\n", i.Weights)
	if i.Tokenizer != "" {
		ids := ""
		if i.Tokens > 0 {
			ids = fmt.Sprintf(", %s for a vocabulary of %s", quantity.Plural(int64(i.Tokens), "id"),
				quantity.Grouped(int64(i.Config.VocabSize)))
		}
		fmt.Fprintf(w, "tokenizer  sha256 %s%s\n", i.Tokenizer, ids)
	}
	for _, note := range i.Notes {
		fmt.Fprintf(w, "note       %s\n", note)
	}
	if output != "" {
		fmt.Fprintf(w, "written    %s\n", filepath.ToSlash(output))
	}
	return nil
}
