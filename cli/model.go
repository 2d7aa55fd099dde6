package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/urfave/cli/v2"

	"mula/internal/quantity"
	"mula/moe"
	"mula/tokenize"
	"mula/train/checkpoint"
	"mula/train/devices"
	"mula/xpu"
	"mula/xpu/opencl"
)

var (
	modelFlag = &cli.StringFlag{Name: "model", Aliases: []string{"m"},
		Usage: "read the model in `DIR`: a run's folder (its newest complete checkpoint), a checkpoint, or a " +
			"Hugging Face model; may be a URL of an object store (required)"}
	threadsFlag = &cli.IntFlag{Name: "threads",
		Usage: "threads to compute with (0: all cores); the result does not depend on the number"}
	deviceFlag = &cli.StringFlag{Name: "device",
		Usage: "compute device: cpu, onednn if that library is installed, opencl, opencl:NAME or opencl:NAME#2 (see " +
			"mula devices), or auto (a GPU if there is one)", Value: devices.CPU}
	precisionFlag = &cli.StringFlag{Name: "precision", Usage: "operands of matrix products: " + anyOf(xpu.Precisions()),
		Value: string(xpu.FP32)}
)

// findModel finds and names the model of --model.
func findModel(c *cli.Context) (checkpoint.ModelDir, error) {
	dir := c.String("model")
	m, refused, err := checkpoint.FindModel(c.Context, dir)
	warnRefused(c, refused)
	if err != nil {
		return m, err
	}
	if m.Checkpoint != nil {
		fmt.Fprintf(c.App.ErrWriter, "model %s, after %s\n", filepath.ToSlash(m.Dir),
			quantity.Plural(m.Checkpoint.State.Step,
				"step"))
	}
	return m, nil
}

// warnRefused warns about damaged checkpoints.
func warnRefused(c *cli.Context, refused []checkpoint.Refused) {
	for _, r := range refused {
		fmt.Fprintf(c.App.ErrWriter, "warning: %s is damaged: %s\n", r.Checkpoint, r.Error)
	}
}

// openModel reads a model into the memory of the device of --device with the precision of
// --precision.
func openModel(c *cli.Context, dir checkpoint.ModelDir) (*moe.Model, xpu.Device, error) {
	p := newProgress(c.App.ErrWriter)
	device, why, err := devices.New(sayCompiling(c.Context, p), c.String("device"),
		devices.Options{Threads: c.Int("threads"), Precision: xpu.Precision(c.String("precision"))})
	if err != nil {
		return nil, nil, err
	}
	if why != "" {
		fmt.Fprintf(c.App.ErrWriter, "device %s (%s)\n", printable(device.Name()), printable(why))
	}
	m, err := dir.Model(device)
	if err != nil {
		device.Close()
		return nil, nil, err
	}
	return m, device, nil
}

// sayCompiling returns a context that makes p print a line when kernels of an OpenCL device are
// compiled, once for each kind of device. Compiling may take a minute without other output.
func sayCompiling(ctx context.Context, p *progress) context.Context {
	var said sync.Map
	return opencl.WithCompiling(ctx, func(d *opencl.Device) {
		if _, before := said.LoadOrStore(d.Name, true); !before {
			p.line("compiling kernels for %s; this may take a minute, and later runs reuse them",
				printable(d.Name))
		}
	})
}

// checkComputing checks --device and --threads.
func checkComputing(c *cli.Context) error {
	if err := devices.Check(c.String("device")); err != nil {
		return usagef("--%v", err)
	}
	return atMost(c, maxThreads, "threads")
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// loadTokenizer loads the tokenizer of --tokenizer, or else the model's own.
func loadTokenizer(c *cli.Context, dir checkpoint.ModelDir) (*tokenize.Tokenizer, error) {
	options := tokenize.LoadOptions{IgnoreTruncationAndPadding: true}
	if path := c.String("tokenizer"); path != "" {
		return tokenize.LoadWith(path, options)
	}
	t, err := dir.Tokenizer(options)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s has no tokenizer.json; name one with --tokenizer", c.String("model"))
	}
	return t, err
}
