package moe

import (
	"math"
	"slices"
	"testing"

	"mula/internal/longtest"
	"mula/xpu"
	"mula/xpu/comm"
	"mula/xpu/cpu"
	"mula/xpu/discrete"
)

// Activations of bfloat16 need the bytes that Memory returns. The gradients are near the gradients
// of float32 activations. They do not depend on recomputation, threads, and the place of memory.
func TestActivationsInBFloat16(t *testing.T) {
	for name, cfg := range gradientCases(t) {
		t.Run(name, func(t *testing.T) {
			cfg.Layers = 2
			const rows, length = 2, queryBlock + 7
			run := func(dev xpu.Device, dtype xpu.DType, recompute Recompute) (gradients []float32, bytes int64) {
				defer dev.Close()
				m := newModelOn(t, dev, cfg)
				defer m.Close()
				m.Init(1)
				m.SetRecompute(recompute)
				m.SetActivations(dtype)
				for part := range uint64(2) {
					batch := randomBatch(cfg, rows, length, part)
					stats, err := m.Backward(t.Context(), batch, BackwardOptions{Loss: fullLoss(cfg)})
					if err != nil {
						t.Fatal(err)
					}
					if loss, err := m.Forward(t.Context(), batch); err != nil || loss.Loss != stats.Loss {
						t.Errorf("the loss is %v without a backward pass, and %v with it; %v", loss.Loss, stats.Loss,
							err)
					}
				}
				return all(t, m, func(b Bucket) []float32 { return slices.Clone(numbers(t, m, b.Grad)) }), arenaBytes(m)
			}
			floats, _ := run(cpu.New(2, xpu.BF16Mixed), xpu.Float32, RecomputeNone)
			var want []float32
			for i, recompute := range append(levels, RecomputeExperts) {
				dev := xpu.Device(cpu.New(1+i%3, xpu.BF16Mixed))
				if i >= len(levels) {
					dev = discrete.New(dev)
				}
				got, bytes := run(dev, xpu.BFloat16, recompute)
				if want == nil {
					want = got
				}
				if !slices.Equal(got, want) {
					t.Errorf("run %d, recompute %s: other bits", i, recompute)
				}
				pass := Pass{Rows: rows, SequenceLength: length, Recompute: recompute}
				more := cfg.Memory(pass).Buffers
				pass.Activations = xpu.BFloat16
				if less := cfg.Memory(pass).Buffers; bytes != less || less >= more {
					t.Errorf("recompute %s: %d bytes; by Memory %d, and %d in float32", recompute, bytes, less, more)
				}
			}
			var difference, scale float64
			for i, x := range floats {
				difference += math.Pow(float64(x-want[i]), 2)
				scale += math.Pow(float64(x), 2)
			}
			if off := math.Sqrt(difference / scale); off == 0 || !(off < 0.03) {
				t.Errorf("the gradient differs by %.3g of its norm", off)
			}
		})
	}
}

// So do they where ranks share the experts, with the same bits for every dispatch.
func TestParallelActivationsInBFloat16(t *testing.T) {
	longtest.SkipIfShort(t)
	cfg := mustPreset(t, "mula-nano")
	cfg.Layers, cfg.ExpertsPerToken = 3, 5 // as in TestParallelBuffersArePlanned
	var want string
	for _, dispatch := range dispatches {
		for _, recompute := range levels {
			device := func(int) xpu.Device { return cpu.New(1, xpu.BF16Mixed) }
			g := newRanksOn(t, device, cfg, 2, Parallel{Dispatch: dispatch, UniformRouting: true}, nil)
			for _, m := range g.models {
				m.SetRecompute(recompute)
				m.SetActivations(xpu.BFloat16)
				m.Init(1)
			}
			got := g.bits(t, g.backward(t, share(randomBatch(cfg, 8, 128, 1), []int{4, 4}),
				BackwardOptions{Targets: 1024}))
			if want == "" {
				want = got
			}
			if got != want {
				t.Errorf("%s, recompute %s: other bits", dispatch, recompute)
			}
			pass := Pass{Rows: 4, SequenceLength: 128, Recompute: recompute, Activations: xpu.BFloat16,
				Shape: g.models[0].parallel.Mesh.Shape, Dispatch: dispatch}
			size := cfg.Memory(pass).Buffers
			for _, m := range g.models {
				bytes := arenaBytes(m) + dispatchBytes(m)
				if dispatch == AllGather {
					bytes += comm.SumMemory(2, 512*(cfg.HiddenSize+cfg.ExpertsPerToken), 4)
				}
				if bytes != size {
					t.Errorf("%s, recompute %s: %d bytes, by Memory %d", dispatch, recompute, bytes, size)
				}
			}
		}
	}
}
