package cli

import (
	"fmt"
	"path/filepath"

	"github.com/urfave/cli/v2"

	"mula/internal/objects"
	"mula/train/checkpoint"
)

func importCommand() *cli.Command {
	return &cli.Command{
		Name:  "import",
		Usage: "check a Hugging Face model, and convert it to a folder that mula can train from",
		Description: "The command fails, and names the tensor or setting, if a weight is missing, has the wrong " +
			"shape or\n" +
			"contains NaN or Inf, or if config.json has a feature that mula does not compute exactly. The model\n" +
			"may be of any supported family, with separate or fused experts, in one weights file or several, as\n" +
			"fp32, bf16 or fp16.\n\n" +
			"Without --output nothing is written. With --output each expert is written as a separate tensor. The\n" +
			"printed sha256 is the hash of the weights as read. mula import of the new folder prints the same\n" +
			"hash, unless --dtype has rounded the weights.\n\n" +
			"`initialize_from: DIR` in train.yaml starts a run with the weights of either folder.\n\n" +
			"Example: mula import --from OLMoE-1B-7B-0924 --output olmoe",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "from",
				Usage: "read the Hugging Face model in `DIR`; may be a URL of an object store (required)"},
			&cli.StringFlag{Name: "output", Aliases: []string{"o"},
				Usage: "write the new folder `DIR`; may be a URL of an object store (default: only check the model)"},
			&cli.StringFlag{Name: "dtype",
				Usage: "element type of the weights: " + anyOf(weightTypes.names()) + " (default: unchanged)"},
			shardSizeFlag,
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
	dir, refused, err := checkpoint.FindModel(c.Context, c.String("from"))
	warnRefused(c, refused)
	if err != nil {
		return err
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

// inspect reads and checks a model.
func inspect(c *cli.Context, dir checkpoint.ModelDir) (checkpoint.Inspection, error) {
	p := newProgress(c.App.ErrWriter)
	defer p.end()
	return dir.Inspect(c.Context, weightsProgress(p))
}
