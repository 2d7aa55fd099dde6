package cli

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v2"

	"mula/internal/objects"
	"mula/internal/quantity"
	"mula/moe"
	"mula/train"
	"mula/train/checkpoint"
)

func importCommand() *cli.Command {
	return &cli.Command{
		Name:  "import",
		Usage: "check a Hugging Face model, or a checkpoint of Megatron or DeepSpeed, and convert it for mula train",
		Description: "The command fails, and names the tensor or setting, if a weight is missing, has the wrong " +
			"shape or\n" +
			"contains NaN or Inf, or if config.json has a feature that mula does not compute exactly. The model\n" +
			"may be of any supported family, with separate or fused experts, in one weights file or several, as\n" +
			"fp32, bf16 or fp16. Experts of gpt_oss may be in MXFP4. Layers of multi-token prediction are\n" +
			"copied. model.num_nextn_predict_layers in train.yaml trains them.\n\n" +
			"Without --output nothing is written. With --output each expert is written as a separate tensor. The\n" +
			"printed sha256 is the hash of the weights as read. mula import of the new folder prints the same\n" +
			"hash, unless --dtype has rounded the weights.\n\n" +
			"`initialize_from: DIR` in train.yaml starts a run with the weights of either folder.\n\n" +
			"--upcycle makes a mixture of experts from a dense model: llama and mistral become mixtral, olmo2\n" +
			"becomes flex_olmo, qwen3 becomes qwen3_moe. Each layer gets experts/granularity copies of its\n" +
			"feed-forward network, and each copy is divided into granularity experts. The new router sends a\n" +
			"token to complete copies, so the first logits equal the dense model's. reinitialize=0.5 draws half of\n" +
			"each expert's intermediate elements again, so that experts differ from the start; then the first\n" +
			"logits differ.\n\n" +
			"--from may also be a checkpoint of DeepSpeed (ZeRO of stage 1, 2 or 3, or universal) or a distributed\n" +
			"checkpoint of Megatron core (torch_dist). --output writes the model. --config writes the first\n" +
			"checkpoint of the run of a train.yaml instead, with weights, AdamW's moments and the position in the\n" +
			"data. mula train then resumes from it. mula reads only tensors and plain data of the checkpoint's\n" +
			"pickles, and runs no code.\n\n" +
			"Example: mula import --from OLMoE-1B-7B-0924 --output olmoe\n" +
			"         mula import --from Qwen3-0.6B --output moe --upcycle experts=64,top_k=8,granularity=8\n" +
			"         mula import --from zero/global_step5000 --config train.yaml && mula train --config train.yaml\n" +
			"         mula import --from megatron/iter_0005000 --model-files Llama-3-8B --config train.yaml",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "from",
				Usage: "read the Hugging Face model in `DIR`, which may be a URL of an object store, or the " +
					"checkpoint of Megatron or DeepSpeed there (required)"},
			&cli.StringFlag{Name: "output", Aliases: []string{"o"},
				Usage: "write the new folder `DIR`; may be a URL of an object store (default: only check the model)"},
			&cli.StringFlag{Name: "dtype",
				Usage: "element type of the weights: " + anyOf(weightTypes.names()) + " (default: unchanged)"},
			shardSizeFlag,
			&cli.StringFlag{Name: "upcycle",
				Usage: "make a mixture of experts from a dense model, as `KEY=N,…` of experts, top_k, granularity " +
					"(default 1), reinitialize (0 to 1, default 0) and seed (default 0)"},
			&cli.StringFlag{Name: "config",
				Usage: "write the first checkpoint of the run of `FILE`, a train.yaml, from a checkpoint of Megatron " +
					"or DeepSpeed"},
			&cli.Int64Flag{Name: "step", Value: -1, DefaultText: "the samples of the checkpoint / batch_size",
				Usage: "with --config, count the checkpoint as step `N` of the run, at position N · batch_size of " +
					"the plan"},
			&cli.StringFlag{Name: "model-files",
				Usage: "read config.json and the tokenizer of Megatron's or DeepSpeed's model in `DIR` (default: the " +
					"checkpoint, or its parent)"},
			jsonFlag,
		},
		Action: runImport,
	}
}

func runImport(c *cli.Context) error {
	options, err := convertOptions(c)
	if err != nil {
		return err
	}
	if err := needFlags(c, "from"); err != nil {
		return err
	}
	if options.Upcycle, err = parseUpcycle(c.String("upcycle")); err != nil {
		return err
	}
	if options.Upcycle != nil && c.String("output") == "" {
		return usagef("--upcycle needs --output, the folder of the mixture of experts")
	}
	if c.IsSet("config") {
		for _, name := range []string{"output", "dtype", "shard-size", "upcycle"} {
			if c.IsSet(name) {
				return usagef("--%s and --config cannot be combined; import the model and the training state "+
					"separately", name)
			}
		}
	} else if c.IsSet("step") {
		return usagef("--step needs --config, the train.yaml of the run")
	}
	if c.Int64("step") < -1 {
		return usagef("--step: must not be negative, got %d", c.Int64("step"))
	}
	dir, err := importedModel(c)
	if err != nil {
		return err
	}
	if c.IsSet("config") {
		return importState(c, dir)
	}
	output := c.String("output")
	var found checkpoint.Inspection
	if output != "" {
		found, err = convert(c, dir, options)
	} else {
		found, err = inspect(c, dir)
	}
	if err != nil {
		return err
	}
	if err := printInspection(c, dir, found, output); err != nil || c.Bool("json") {
		return err
	}
	if output == "" {
		output = dir.Dir
	}
	if objects.IsURL(output) {
		output = "a local copy of " + output
	}
	_, err = fmt.Fprintf(c.App.Writer, "to train   initialize_from: %s\n           model: %s\n",
		filepath.ToSlash(output), found.TrainModel)
	return err
}

// importedModel finds the model of --from.
func importedModel(c *cli.Context) (checkpoint.ModelDir, error) {
	from := c.String("from")
	if !objects.IsURL(from) {
		dir, ok, err := checkpoint.FindForeign(from, c.String("model-files"))
		if ok || err != nil {
			return dir, err
		}
	}
	for _, name := range []string{"config", "step", "model-files"} {
		if c.IsSet(name) {
			return checkpoint.ModelDir{}, usagef("--%s needs a checkpoint of Megatron or DeepSpeed, but %s is none; "+
				"to train from a Hugging Face model, set initialize_from in train.yaml", name, from)
		}
	}
	dir, refused, err := checkpoint.FindModel(c.Context, from)
	warnRefused(c, refused)
	return dir, err
}

// importState writes the first checkpoint of the run of --config.
func importState(c *cli.Context, dir checkpoint.ModelDir) error {
	config, err := train.LoadConfig(c.String("config"))
	if err != nil {
		return usagef("%v", err)
	}
	printWarnings(c.App.ErrWriter, config.Warnings())
	p := newProgress(c.App.ErrWriter)
	defer p.end()
	done, err := train.Import(c.Context, config, dir, train.ImportOptions{Step: c.Int64("step"),
		Progress: weightsProgress(p)})
	if err != nil {
		return err
	}
	p.end()
	if c.Bool("json") {
		return printJSON(c.App.Writer, struct {
			From string `json:"from"`
			Form string `json:"form"`
			train.Imported
		}{dir.Foreign.Dir, dir.Foreign.Form, done})
	}
	w := c.App.Writer
	fmt.Fprintf(w, "from       %s: %s\n", filepath.ToSlash(dir.Foreign.Dir), dir.Foreign.Form)
	fmt.Fprintf(w, "written    %s\n", filepath.ToSlash(done.Checkpoint))
	fmt.Fprintf(w, "progress   step %s, %s of the optimizer, position %s of the plan\n", quantity.Grouped(done.Step),
		quantity.Plural(done.Updates, "update"), quantity.Grouped(done.Position))
	fmt.Fprintf(w, "weights    sha256 %s, all finite\n", done.Weights)
	for _, note := range done.Notes {
		fmt.Fprintf(w, "note       %s\n", note)
	}
	_, err = fmt.Fprintf(w, "to train   mula train --config %s\n", c.String("config"))
	return err
}

// parseUpcycle reads a value of --upcycle such as experts=64,top_k=8. Without a value the result is
// nil.
func parseUpcycle(text string) (*moe.Upcycling, error) {
	if text == "" {
		return nil, nil
	}
	u := moe.Upcycling{Granularity: 1}
	numbers := map[string]any{"experts": &u.Experts, "top_k": &u.ExpertsPerToken, "granularity": &u.Granularity,
		"reinitialize": &u.Reinitialize, "seed": &u.Seed}
	for _, pair := range strings.Split(text, ",") {
		key, value, _ := strings.Cut(pair, "=")
		number, known := numbers[key]
		delete(numbers, key)
		if !known || value == "null" || json.Unmarshal([]byte(value), number) != nil {
			return nil, usagef("--upcycle: must be like experts=64,top_k=8,granularity=8,reinitialize=0.5,seed=1, "+
				"with each key at most once, got %q in %q", pair, text)
		}
	}
	if u.Experts == 0 || u.ExpertsPerToken == 0 {
		return nil, usagef("--upcycle: experts and top_k are required, got %q", text)
	}
	return &u, nil
}

// inspect reads and checks a model.
func inspect(c *cli.Context, dir checkpoint.ModelDir) (checkpoint.Inspection, error) {
	p := newProgress(c.App.ErrWriter)
	defer p.end()
	return dir.Inspect(c.Context, weightsProgress(p))
}
