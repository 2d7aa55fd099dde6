package moe

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"

	"mula/internal/longtest"
	"mula/moe/safetensors"
	"mula/xpu"
	"mula/xpu/cpu"
	"mula/xpu/discrete"
)

// A use of models on devices returns all that they have computed.
type use func(t *testing.T, device func(int) xpu.Device, cfg Config) string

// wholeModel is the training of a whole model: micro-batches of several shapes at all levels of
// recomputation, with the batch's targets and with drawn ones, and a loss in between.
func wholeModel(t *testing.T, device func(int) xpu.Device, cfg Config) string {
	var bits strings.Builder
	g := newRanksOn(t, device, cfg, 1, Parallel{}, nil)
	m := g.models[0]
	randomize(m, 1)
	for call, recompute := range []Recompute{RecomputeLayers, RecomputeNone, RecomputeExperts} {
		m.SetRecompute(recompute)
		first := true
		for i, shape := range [][2]int{{2, queryBlock + 7}, {1, 5}, {3, 11}} {
			for _, opts := range []BackwardOptions{{Loss: fullLoss(cfg)},
				{Loss: LossOptions{Aux: AuxMegaBlocks, AuxCoefficient: 0.1}, SampleTargets: true, SampleSeed: 3}} {
				opts.First, first = first, false
				stats := g.backward(t, []Batch{randomBatch(cfg, shape[0], shape[1], uint64(i))}, opts)
				bits.WriteString(g.bits(t, stats))
			}
		}
		bits.WriteString(g.bits(t, g.backward(t, []Batch{inDocuments(randomBatch(cfg, 2, queryBlock+7, 5), 30, 40, 2)},
			BackwardOptions{Loss: fullLoss(cfg)})))
		stats, err := m.Forward(t.Context(), randomBatch(cfg, 2, 9, uint64(call)))
		if err != nil {
			t.Fatal(err)
		}
		bits.WriteString(g.bits(t, []Stats{stats}))
	}
	return bits.String()
}

// sharedExperts is the training of ranks that share the experts, some without tokens, by either
// courier and at all levels of recomputation.
func sharedExperts(t *testing.T, device func(int) xpu.Device, cfg Config) string {
	var bits strings.Builder
	for _, n := range []int{2, 4} {
		for _, dispatch := range dispatches {
			g := newRanksOn(t, device, cfg, n, Parallel{Dispatch: dispatch}, nil)
			for _, m := range g.models {
				randomize(m, 1)
			}
			for call, recompute := range levels {
				for _, m := range g.models {
					m.SetRecompute(recompute)
				}
				// The ranks change places, so that memory grows at different times.
				g.backward(t, share(randomBatch(cfg, 5, 7+10*call, 3), backwards(raggedRows[n])),
					BackwardOptions{Targets: 1000, First: true})
				bits.WriteString(g.bits(t, g.backward(t, share(randomBatch(cfg, 5, 30, 2), raggedRows[n]),
					BackwardOptions{Targets: 150, Loss: fullLoss(cfg)})))
			}
			losses := make([]Stats, n)
			for r, err := range g.each(func(r int, m *Model) error {
				stats, err := m.Forward(t.Context(), share(randomBatch(cfg, 5, 13, 4), raggedRows[n])[r])
				losses[r] = stats
				return err
			}) {
				if err != nil {
					t.Fatalf("rank %d: %v", r, err)
				}
			}
			bits.WriteString(g.bits(t, losses))
		}
	}
	return bits.String()
}

// stages is the training of a pipeline with several batches under way, and with shared experts.
func stages(t *testing.T, device func(int) xpu.Device, cfg Config) string {
	var bits strings.Builder
	cfg.Layers = 3
	ranks := 1
	if cfg.moe() {
		ranks = 2
	}
	for _, recompute := range levels {
		pipe := newPipelineOn(t, device, cfg, 3, ranks, Parallel{})
		for _, models := range pipe.models {
			for _, m := range models {
				randomize(m, 1)
				m.SetRecompute(recompute)
			}
		}
		measured := pipe.run(t, microBatches(cfg, ranks), BackwardOptions{Targets: 1000, Loss: fullLoss(cfg)})
		for s, models := range pipe.models {
			g := rankGroup{models: models}
			for _, stats := range measured {
				for _, s := range stats[s] {
					fmt.Fprintf(&bits, "%x %x %x\n", s.Loss, s.ExpertCounts, s.RouterEntropy)
				}
			}
			bits.WriteString(g.bits(t, measured[0][s]))
		}
	}
	return bits.String()
}

// text is reading and writing a text.
func text(t *testing.T, device func(int) xpu.Device, cfg Config) string {
	dev := device(0)
	defer dev.Close()
	m := newModelOn(t, dev, cfg)
	m.Init(1)
	prompt := randomBatch(cfg, 1, queryBlock+10, 1).Tokens
	logits, err := m.Logits(t.Context(), prompt)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x %v %v", logits, generate(t, m, prompt, GenerateOptions{MaxTokens: 20, Temperature: 1,
		Seed: 2}),
		generate(t, m, prompt[:3], GenerateOptions{MaxTokens: 5}))
}

// files is reading and writing the weights of a model.
func files(t *testing.T, device func(int) xpu.Device, cfg Config) string {
	dev := device(0)
	defer dev.Close()
	m := newModelOn(t, dev, cfg)
	randomize(m, 1)
	if _, err := m.Backward(t.Context(), randomBatch(cfg, 2, 9, 1), BackwardOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, b := range m.Buckets() { // new weights, on the device alone
		weight := b.Weight
		m.dev.Add(weight, weight, b.Grad)
	}
	dir := t.TempDir()
	if err := m.Save(t.Context(), dir, SaveOptions{DType: safetensors.BF16, ShardSize: 100_000}); err != nil {
		t.Fatal(err)
	}
	back, err := Open(dir, dev)
	if err != nil {
		t.Fatal(err)
	}
	stats, err := back.Forward(t.Context(), randomBatch(cfg, 2, 9, 1))
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%v %x %x", hashFiles(t, dir), weights(t, back), stats.Loss)
}

// A device whose memory is separate from the host's gives the CPU's bits, whatever it is used for.
func TestDeviceApart(t *testing.T) {
	longtest.SkipIfShort(t)
	cases := gradientCases(t)
	maps.Copy(cases, parallelCases(t))
	every := longtest.Rounds(3, 1) // usually a third of the uses of each case
	for i, kind := range []struct {
		name string
		use  use
	}{{"whole model", wholeModel}, {"shared experts", sharedExperts}, {"stages", stages}, {"text", text},
		{"files", files}} {
		for j, name := range slices.Sorted(maps.Keys(cases)) {
			cfg, kind, f := cases[name], kind.name, kind.use
			if kind == "shared experts" && !cfg.moe() || kind == "stages" && cfg.TieEmbeddings {
				continue
			}
			if raceDetector && name != "gqa" || !raceDetector && (i+j)%every != 0 {
				continue
			}
			t.Run(kind+"/"+name, func(t *testing.T) {
				want := f(t, func(int) xpu.Device { return cpu.New(2, xpu.FP32) }, cfg)
				got := f(t, func(int) xpu.Device { return discrete.New(cpu.New(2, xpu.FP32)) }, cfg)
				if got != want {
					a, b := strings.Split(got, "\n"), strings.Split(want, "\n")
					for i, line := range b {
						if i >= len(a) || a[i] != line {
							t.Fatalf("line %d of %d: other bits: %.300q, want %.300q", i, len(b),
								slices.Concat(a, []string{""})[min(i, len(a))], line)
						}
					}
				}
			})
		}
	}
}

// A model releases all memory of its device, also if the memory is too small. The error then names
// the purpose of the allocation.
func TestMemoryIsGivenBack(t *testing.T) {
	for name, cfg := range gradientCases(t) {
		dev := discrete.New(cpu.New(1, xpu.FP32))
		defer dev.Close()
		batch := randomBatch(cfg, 2, 30, 1)
		like := newModelOn(t, dev, cfg)
		if _, err := like.Backward(t.Context(), batch, BackwardOptions{}); err != nil {
			t.Fatal(err)
		}
		memory := cfg.Memory(Pass{Rows: 2, SequenceLength: 30})
		// those are on the host
		needed := memory.Total() - 8*int64(like.ws.arena.nDoubles+like.flights[0].arena.nDoubles)
		like.Close()
		for _, test := range []struct {
			capacity int64
			want     string // of the error of making a model and a pass
			smaller  bool   // a smaller pass is possible after that
		}{
			{memory.Weights - 4, "weights and gradients", false},
			{memory.Weights + memory.Gradients - 4, "weights and gradients", false},
			{memory.Weights + memory.Gradients, "2 rows of 30 tokens", false},
			{needed - 4, "rotations of 30 positions", true},
			{needed, "", true},
		} {
			dev.SetCapacity(test.capacity)
			m, err := New(cfg, dev)
			if err == nil {
				_, err = m.Backward(t.Context(), batch, BackwardOptions{Loss: fullLoss(cfg)})
				if _, err := m.Backward(t.Context(), randomBatch(cfg, 1, 3, 1),
					BackwardOptions{}); (err == nil) != test.smaller {
					t.Errorf("%s, %d bytes: a smaller pass after it: %v", name, test.capacity, err)
				}
				m.Close()
			}
			if test.want == "" && err != nil || test.want != "" &&
				(err == nil || !strings.Contains(err.Error(), test.want)) {
				t.Errorf("%s, %d bytes: error %v, want one with %q", name, test.capacity, err, test.want)
			}
			if n := dev.InUse(); n != 0 {
				t.Errorf("%s, %d bytes: %d are still in use", name, test.capacity, n)
			}
		}

		dev.SetCapacity(1 << 40)
		m := newModelOn(t, dev, cfg)
		m.Init(1)
		if _, err := m.Logits(t.Context(), []uint32{1, 2, 3}); err != nil {
			t.Fatal(err)
		}
		generate(t, m, []uint32{1, 2}, GenerateOptions{MaxTokens: 4})
		if _, err := Open(t.TempDir(), dev); err == nil {
			t.Error("an empty directory is a model")
		}
		m.Close()
		if n := dev.InUse(); n != 0 {
			t.Errorf("%s: after reading texts, %d bytes are still in use", name, n)
		}
	}
	var devices []*discrete.Device
	cfg := mustPreset(t, "mula-nano")
	for _, dispatch := range dispatches {
		g := newRanksOn(t, func(int) xpu.Device {
			devices = append(devices, discrete.New(cpu.New(1, xpu.FP32)))
			return devices[len(devices)-1]
		}, cfg, 2, Parallel{Dispatch: dispatch}, nil)
		for _, m := range g.models {
			m.Init(1)
		}
		for _, recompute := range levels {
			for _, m := range g.models {
				m.SetRecompute(recompute)
			}
			g.backward(t, share(randomBatch(cfg, 5, 30, 2), raggedRows[2]), BackwardOptions{Targets: 150})
		}
		for _, m := range g.models {
			m.Close()
		}
	}
	for _, dev := range devices {
		if n := dev.InUse(); n != 0 {
			t.Errorf("where ranks share the experts, %d bytes are still in use", n)
		}
	}
}

// When the device fails, every wait for it returns the error.
func TestDeviceFails(t *testing.T) {
	lost := errors.New("the driver has lost the device")
	cfg := mustPreset(t, "mula-nano")
	dev := discrete.New(cpu.New(1, xpu.FP32))
	defer dev.Close()
	m := newModelOn(t, dev, cfg)
	m.Init(1)
	batch := randomBatch(cfg, 2, 30, 1)
	stats, err := m.Backward(t.Context(), batch, BackwardOptions{})
	if err != nil || math.IsNaN(stats.Loss) {
		t.Fatal(stats.Loss, err)
	}
	generate(t, m, []uint32{1, 2}, GenerateOptions{MaxTokens: 4})
	dev.Fail(lost)
	second := func(_ any, err error) error { return err }
	for what, err := range map[string]error{
		"Forward":  second(m.Forward(t.Context(), batch)),
		"Backward": second(m.Backward(t.Context(), batch, BackwardOptions{})),
		"Logits":   second(m.Logits(t.Context(), []uint32{1})),
		"Generate": m.Generate(t.Context(), []uint32{1}, GenerateOptions{MaxTokens: 2},
			func(uint32) bool { t.Error("a token came"); return true }),
		"Save":     m.Save(t.Context(), t.TempDir(), SaveOptions{}),
		"NewRelay": second(m.NewRelay(2, 30)),
		"New":      second(New(cfg, dev)),
	} {
		if !errors.Is(err, lost) {
			t.Errorf("%s: error %v, want %v", what, err, lost)
		}
	}
}

// checkSameBits requires that the gradients of a batch have the same bits on all devices, with all
// numbers of threads and levels of recomputation.
func checkSameBits(t *testing.T, c Config, batch Batch) {
	t.Helper()
	var want []float32
	for i, dev := range []xpu.Device{cpu.New(1, xpu.FP32), cpu.New(3, xpu.FP32), discrete.New(cpu.New(2, xpu.FP32))} {
		t.Cleanup(dev.Close)
		m := newModelOn(t, dev, c)
		randomize(m, 1)
		for _, level := range levels {
			m.SetRecompute(level)
			m.ZeroGradients()
			if _, err := m.Backward(t.Context(), batch, BackwardOptions{Loss: fullLoss(c)}); err != nil {
				t.Fatal(err)
			}
			var all []float32
			for _, b := range m.Buckets() {
				all = append(all, numbers(t, m, b.Grad)...)
			}
			if want == nil {
				want = all
			}
			if !slices.Equal(all, want) {
				t.Errorf("device %d, %s: other bits", i, level)
			}
		}
	}
}
