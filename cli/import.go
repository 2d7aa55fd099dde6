package cli

import (
	"fmt"
	"path/filepath"

	"github.com/urfave/cli/v2"

	"mula/train"
)

func importCommand() *cli.Command {
	return &cli.Command{
		Name:  "import",
		Usage: "check a Hugging Face model, and write it as a folder that mula trains from",
		Description: "Every tensor must be there with its shape and finite, and everything in config.json must be what mula computes exactly; what is not is\n" +
			"named. Experts may be stored fused, weights in one file or several, as fp32, bf16 or fp16, OLMoE or dense OLMo. Without --output\n" +
			"nothing is written. With it experts are written one by one. The sha256 of the weights is that of what was read; the same check of what was\n" +
			"written shows it again, unless --dtype has rounded them.\n\n" +
			"`initialize_from: DIR` in train.yaml begins a run with the weights of either folder.\n\n" +
			"Example: mula import --from OLMoE-1B-7B-0924 --output olmoe",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "from", Usage: "the Hugging Face model `DIR` (needed)"},
			&cli.StringFlag{Name: "output", Aliases: []string{"o"},
				Usage: "write the new folder `DIR` (empty: only check)"},
			&cli.StringFlag{Name: "dtype",
				Usage: "element type of the weights: fp32, bf16 or fp16 (empty: as they are)"},
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
	dir, refused, err := train.FindModel(c.Context, c.String("from"))
	warnRefused(c, refused)
	if err != nil {
		return err
	}
	output := c.String("output")
	var found train.Inspection
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
	_, err = fmt.Fprintf(c.App.Writer, "to train   initialize_from: %s\n           model: %s\n",
		filepath.ToSlash(output), found.TrainModel)
	return err
}

// inspect reads all of a model.
func inspect(c *cli.Context, dir train.ModelDir) (train.Inspection, error) {
	p := newProgress(c.App.ErrWriter)
	defer p.end()
	return dir.Inspect(c.Context, weightsProgress(p))
}
