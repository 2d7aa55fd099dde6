package cli

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/urfave/cli/v2"

	"mula/moe"
	"mula/tokenize"
	"mula/train"
	"mula/xpu/cpu"
)

var (
	modelFlag   = &cli.StringFlag{Name: "model", Aliases: []string{"m"}, Usage: "a run's folder (its newest complete checkpoint), a checkpoint, or a Hugging Face model `DIR` (needed)"}
	threadsFlag = &cli.IntFlag{Name: "threads", Usage: "threads to compute with (0: all cores); the result does not depend on it"}
)

// openModel opens the model that --model names on the CPU, and says where its tokenizer.json is, or "" if it has none.
func openModel(c *cli.Context) (m *moe.Model, device *cpu.Device, tokenizer string, err error) {
	dir := c.String("model")
	checkpoint, refused, err := train.LoadCheckpoint(c.Context, dir)
	for _, r := range refused {
		fmt.Fprintf(c.App.ErrWriter, "warning: %s is damaged: %s\n", r.Checkpoint, r.Error)
	}
	switch {
	case err == nil:
		dir, tokenizer = checkpoint.Dir, checkpoint.Tokenizer()
		fmt.Fprintf(c.App.ErrWriter, "model %s, after %s\n", filepath.ToSlash(dir), plural(checkpoint.State.Step, "step"))
	case errors.Is(err, train.ErrNoCheckpoint) && exists(filepath.Join(dir, "config.json")) && !exists(filepath.Join(dir, "state.json")):
		// A Hugging Face model. With a state.json it would be a checkpoint that has lost its manifest.
		if path := filepath.Join(dir, "tokenizer.json"); exists(path) {
			tokenizer = path
		}
	default:
		return nil, nil, "", err
	}
	device = cpu.New(c.Int("threads"))
	m, err = moe.Open(dir, device)
	if err != nil {
		device.Close()
		return nil, nil, "", err
	}
	return m, device, tokenizer, nil
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
