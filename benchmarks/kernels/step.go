package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"mula/moe"
	"mula/xpu"
	"mula/xpu/gpu"
	"mula/xpu/opencl"
)

// stepLength is the number of tokens of a row of a step.
const stepLength = 1024

// measureStep measures the forward and backward pass of a preset on an OpenCL device, and lists its
// kernels by their time. The pass is timed without recording the kernels, because recording slows
// it down.
func measureStep(ctx context.Context, precision xpu.Precision, device *opencl.Device, preset string, rows,
	rounds int) (string, error) {
	cfg, err := moe.Preset(preset)
	if err != nil {
		return "", err
	}
	least, _, err := passes(ctx, precision, device, cfg, rows, rounds, false)
	if err != nil {
		return "", err
	}
	_, kernels, err := passes(ctx, precision, device, cfg, rows, rounds, true)
	if err != nil {
		return "", err
	}
	tokens := float64(rows * stepLength)
	var all time.Duration
	for _, k := range kernels {
		all += k.Time
	}
	var b strings.Builder
	fmt.Fprintf(&b, "\n%s: the forward and backward pass of %d × %d tokens takes %.1f ms, minimum of %d: "+
		"%.0f tokens/s, %.3g GFLOP/s. The kernels take %.1f ms of a pass.\n\n"+
		"| kernel | launches of a pass | ms | of all kernels |\n|---|---|---|---|\n",
		preset, rows, stepLength, 1e3*least.Seconds(), rounds, tokens/least.Seconds(),
		1e-9*tokens*cfg.FLOPsPerToken(stepLength)/least.Seconds(), 1e3*all.Seconds()/float64(rounds))
	for _, k := range kernels {
		fmt.Fprintf(&b, "| %s | %.4g | %.2f | %.1f %% |\n", k.Kernel, float64(k.Launches)/float64(rounds),
			1e3*k.Time.Seconds()/float64(rounds), 100*k.Time.Seconds()/all.Seconds())
	}
	return b.String(), nil
}

// passes runs passes; the first is not counted. It returns the least time of a pass and, if
// they are recorded, the kernels of all passes.
func passes(ctx context.Context, precision xpu.Precision, device *opencl.Device, cfg moe.Config, rows, rounds int,
	record bool) (least time.Duration, kernels []gpu.KernelTime, err error) {
	d, err := gpu.New(ctx, device, gpu.Options{Precision: precision, Profile: record})
	if err != nil {
		return 0, nil, err
	}
	defer d.Close()
	m, err := moe.New(cfg, d)
	if err != nil {
		return 0, nil, err
	}
	m.Init(1)
	source := rand.New(rand.NewPCG(1, 0))
	batch := moe.Batch{Rows: rows, SequenceLength: stepLength, Tokens: make([]uint32, rows*(stepLength+1))}
	for i := range batch.Tokens {
		batch.Tokens[i] = source.Uint32N(uint32(cfg.VocabSize))
	}
	options := moe.BackwardOptions{First: true, Loss: moe.LossOptions{Aux: moe.AuxHF, AuxCoefficient: 0.01}}
	before := map[string]gpu.KernelTime{}
	for round := range rounds + 1 {
		began := time.Now()
		if _, err := m.Backward(ctx, batch, options); err != nil {
			return 0, nil, err
		}
		if err := d.Wait(ctx); err != nil {
			return 0, nil, err
		}
		took := time.Since(began)
		if round == 0 {
			for _, k := range d.Profile() {
				before[k.Kernel] = k
			}
			continue
		}
		if least == 0 || took < least {
			least = took
		}
	}
	for _, k := range d.Profile() {
		k.Launches -= before[k.Kernel].Launches
		k.Time -= before[k.Kernel].Time
		kernels = append(kernels, k)
	}
	return least, kernels, nil
}
