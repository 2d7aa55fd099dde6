package cli

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/urfave/cli/v2"

	"mula/moe"
	"mula/tokenize"
	"mula/train"
	"mula/xpu"
)

var (
	modelFlag     = &cli.StringFlag{Name: "model", Aliases: []string{"m"}, Usage: "a run's folder (its newest complete checkpoint), a checkpoint, or a Hugging Face model `DIR` (needed)"}
	threadsFlag   = &cli.IntFlag{Name: "threads", Usage: "threads to compute with (0: all cores); the result does not depend on it"}
	deviceFlag    = &cli.StringFlag{Name: "device", Usage: "what multiplies matrices: cpu, or onednn if that library is installed", Value: train.DeviceCPU}
	precisionFlag = &cli.StringFlag{Name: "precision", Usage: "of the operands of matrix products: fp32 or bf16", Value: string(xpu.FP32)}
)

// findModel finds the model that --model names, and says which it is.
func findModel(c *cli.Context) (train.ModelDir, error) {
	dir := c.String("model")
	m, refused, err := train.FindModel(c.Context, dir)
	warnRefused(c, refused)
	if err != nil {
		return m, err
	}
	if m.Checkpoint != nil {
		fmt.Fprintf(c.App.ErrWriter, "model %s, after %s\n", filepath.ToSlash(m.Dir), plural(m.Checkpoint.State.Step, "step"))
	}
	return m, nil
}

// warnRefused names checkpoints that were not taken.
func warnRefused(c *cli.Context, refused []train.RefusedCheckpoint) {
	for _, r := range refused {
		fmt.Fprintf(c.App.ErrWriter, "warning: %s is damaged: %s\n", r.Checkpoint, r.Error)
	}
}

// openModel reads a model into the memory of the device that --device names, which computes in the precision that --precision names.
func openModel(c *cli.Context, dir train.ModelDir) (*moe.Model, xpu.Device, error) {
	device, err := train.NewDevice(c.String("device"), c.Int("threads"), xpu.Precision(c.String("precision")))
	if err != nil {
		return nil, nil, err
	}
	m, err := moe.Open(dir.Dir, device)
	if err != nil {
		device.Close()
		return nil, nil, err
	}
	return m, device, nil
}

// checkComputing refuses values of --device, --threads and --precision.
func checkComputing(c *cli.Context) error {
	if d := c.String("device"); d != train.DeviceCPU && d != train.DeviceOneDNN {
		return usagef("--device is %q; allowed: %s, %s", d, train.DeviceCPU, train.DeviceOneDNN)
	}
	if p := xpu.Precision(c.String("precision")); p != xpu.FP32 && p != xpu.BF16 {
		return usagef("--precision is %q; allowed: %s, %s", p, xpu.FP32, xpu.BF16)
	}
	return atMost(c, maxThreads, "threads")
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// loadTokenizer loads the tokenizer that --tokenizer names, or else the one found beside the model.
func loadTokenizer(c *cli.Context, found string) (*tokenize.Tokenizer, error) {
	if path := c.String("tokenizer"); path != "" {
		found = path
	}
	if found == "" {
		return nil, fmt.Errorf("%s has no tokenizer.json; name one with --tokenizer", c.String("model"))
	}
	return tokenize.Load(found)
}
