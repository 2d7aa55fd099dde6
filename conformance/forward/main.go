// Forward computes a model's results for one sequence, for conformance/huggingface.py:
//
//	forward -model DIR -ids 3,1,4,1,5 -output FILE [-generate N]
//
// DIR is a Hugging Face directory. FILE is a safetensors file with "logits" [n−1, V] for all of the
// n ids but the last, "loss" [1], the mean cross entropy of the next ids in nats, "generated" [N],
// the ids of a greedy continuation, and the gradient of the loss by every weight, under the
// weight's name.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"

	"mula/moe"
	"mula/moe/safetensors"
	"mula/xpu"
	"mula/xpu/cpu"
)

func main() {
	model := flag.String("model", "", "the model's directory")
	ids := flag.String("ids", "", "comma-separated ids of the sequence")
	output := flag.String("output", "", "the file to write")
	generate := flag.Int("generate", 0, "number of ids to generate after the sequence")
	flag.Parse()
	if err := run(*model, *ids, *output, *generate); err != nil {
		fmt.Fprintf(os.Stderr, "forward: %v\n", err)
		os.Exit(1)
	}
}

func run(dir, ids, output string, generate int) (err error) {
	var tokens []uint32
	for _, field := range strings.Split(ids, ",") {
		id, err := strconv.ParseUint(field, 10, 32)
		if err != nil {
			return fmt.Errorf("-ids: %w", err)
		}
		tokens = append(tokens, uint32(id))
	}
	device := cpu.New(1, xpu.FP32)
	defer device.Close()
	m, err := moe.Open(dir, device)
	if err != nil {
		return err
	}
	n := len(tokens) - 1
	logits, err := m.Logits(context.Background(), tokens[:max(0, n)])
	if err != nil {
		return err
	}
	var generated []float32
	if err := m.Generate(context.Background(), tokens, moe.GenerateOptions{MaxTokens: generate}, func(id uint32) bool {
		generated = append(generated, float32(id))
		return true
	}); err != nil {
		return err
	}
	stats, err := m.Backward(context.Background(), moe.Batch{Tokens: tokens, Rows: 1, SequenceLength: n},
		moe.BackwardOptions{First: true})
	if err != nil {
		return err
	}
	loss := []float32{float32(stats.Loss / float64(n))}
	tensors := []safetensors.Tensor{
		{Name: "logits", DType: safetensors.F32, Shape: []int{n, m.Config().VocabSize}},
		{Name: "loss", DType: safetensors.F32, Shape: []int{1}},
		{Name: "generated", DType: safetensors.F32, Shape: []int{len(generated)}},
	}
	data := [][]float32{logits, loss, generated}
	for _, p := range m.Parameters() {
		var buffer []float32 // of its own, because it is written later
		grad, err := xpu.Numbers(context.Background(), device, p.Grad, &buffer)
		if err != nil {
			return err
		}
		tensors = append(tensors, safetensors.Tensor{Name: p.Name, DType: safetensors.F32, Shape: p.Shape})
		data = append(data, grad)
	}
	file, err := os.Create(output)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	w, err := safetensors.NewWriter(file, tensors, nil)
	if err != nil {
		return err
	}
	for i, t := range tensors {
		if err := w.Float32(t.Name, data[i]); err != nil {
			return err
		}
	}
	return w.Close()
}
