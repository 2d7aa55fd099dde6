package moe

import (
	"maps"
	"math"
	"slices"
	"strings"
	"testing"

	"mula/internal/alloctest"
	"mula/internal/longtest"
	"mula/xpu"
	"mula/xpu/cpu"
)

func fullLoss(c Config) LossOptions {
	o := LossOptions{Aux: AuxHF, AuxCoefficient: 0.01, ZCoefficient: 0.001}
	if c.HasSigmoidRouter() {
		o.ZCoefficient = 0
	}
	return o
}

// Losses and gradients are the same bits with any number of threads, and from call to call.
func TestBitsDoNotDependOnThreads(t *testing.T) {
	for name, cfg := range gradientCases(t) {
		var want []float32
		var wantLoss float64
		for _, threads := range []int{1, 2, 5} {
			m := newModel(t, cfg, threads)
			randomize(m, 1)
			for call := range 2 {
				m.ZeroGradients()
				// A batch of another shape in between leaves its numbers in the buffers.
				if _, err := m.Forward(t.Context(), randomBatch(cfg, 3, 11, uint64(call))); err != nil {
					t.Fatal(err)
				}
				stats, err := m.Backward(t.Context(), randomBatch(cfg, 2, queryBlock+7, 2),
					BackwardOptions{Loss: fullLoss(cfg)})
				if err != nil {
					t.Fatal(err)
				}
				if want == nil {
					want, wantLoss = grads(t, m), stats.Loss
				}
				if !slices.Equal(grads(t, m), want) || stats.Loss != wantLoss {
					t.Errorf("%s: %d threads, call %d: other bits", name, threads, call)
				}
			}
		}
	}
}

// With First, gradients replace whatever was in their memory: they are the gradients that are added
// to zeros. This includes ranks and experts without tokens, and a step whose first batch has no
// rows.
func TestFirst(t *testing.T) {
	for name, cfg := range gradientCases(t) {
		for _, precision := range []xpu.Precision{xpu.FP32, xpu.BF16Compact} {
			for _, n := range []int{1, 2} {
				if n > 1 && cfg.Dense() || raceDetector && precision != xpu.FP32 {
					continue
				}
				g := newRanksOn(t, func(int) xpu.Device { return cpu.New(1, precision) }, cfg, n, Parallel{}, nil)
				for _, m := range g.models {
					randomize(m, 1)
				}
				none := Batch{SequenceLength: 3}
				for _, batches := range [][]Batch{
					{randomBatch(cfg, 1, 3, 1), randomBatch(cfg, 2, 9, 2)},
					{none, randomBatch(cfg, 1, 3, 1)},
				} {
					if n == 1 && batches[0].Rows == 0 {
						continue // only a rank that shares experts may have no rows
					}
					pass := func(batch Batch, first bool) {
						all := make([]Batch, n)
						for r := range all {
							all[r] = none
						}
						all[n-1] = batch
						g.backward(t, all, BackwardOptions{Targets: 100, Loss: fullLoss(cfg), First: first})
					}
					for _, m := range g.models {
						m.ZeroGradients()
					}
					for _, batch := range batches {
						pass(batch, false)
					}
					var want [][]float32
					for _, m := range g.models {
						want = append(want, slices.Clone(grads(t, m)))
						for _, b := range m.Buckets() {
							garbage := make([]float32, b.Grad.Elements())
							for i := range garbage {
								garbage[i] = float32(math.NaN())
							}
							m.dev.Write(b.Grad, garbage)
						}
					}
					for i, batch := range batches {
						pass(batch, i == 0)
					}
					for r, m := range g.models {
						if !slices.Equal(grads(t, m), want[r]) {
							t.Errorf("%s, %s, rank %d of %d, %d rows first: other gradients", name, precision, r, n,
								batches[0].Rows)
						}
					}
				}
			}
		}
	}
}

// The cross-entropy's gradients and losses of micro-batches add up to the gradients and losses of
// the batch.
func TestMicroBatchesAddUp(t *testing.T) {
	for name, cfg := range gradientCases(t) {
		whole, pieces := newModel(t, cfg, 2), newModel(t, cfg, 2)
		randomize(whole, 1)
		randomize(pieces, 1)
		batch := randomBatch(cfg, 4, 9, 2)
		want, err := whole.Backward(t.Context(), batch, BackwardOptions{})
		if err != nil {
			t.Fatal(err)
		}
		loss := 0.0
		var rows []float64
		for first := 0; first < batch.Rows; first += 2 {
			micro := Batch{Tokens: batch.Tokens[first*10 : (first+2)*10], Rows: 2, SequenceLength: 9}
			stats, err := pieces.Backward(t.Context(), micro, BackwardOptions{Targets: int64(want.Targets)})
			if err != nil {
				t.Fatal(err)
			}
			loss += stats.Loss
			rows = append(rows, stats.RowLoss...)
		}
		if math.Abs(loss-want.Loss) > 1e-9*loss || !slices.Equal(rows, want.RowLoss) {
			t.Errorf("%s: losses %v %v, want %v %v", name, loss, rows, want.Loss, want.RowLoss)
		}
		for i, p := range whole.Parameters() {
			if e := relative(pieces.Parameters()[i].Grad.Floats(), p.Grad.Floats()); e > 1e-5 {
				t.Errorf("%s: gradient of %s differs by %g", name, p.Name, e)
			}
		}
	}
}

// The auxiliary losses of a micro-batch weigh as much as its share of the targets: a batch given
// twice, as two halves of a step, has the gradient of the batch given once.
func TestAuxiliaryLossesAreWeightedByShare(t *testing.T) {
	cfg := mustPreset(t, "mula-nano")
	once, twice := newModel(t, cfg, 2), newModel(t, cfg, 2)
	randomize(once, 1)
	randomize(twice, 1)
	batch := randomBatch(cfg, 2, 16, 3)
	opts := BackwardOptions{Loss: LossOptions{Aux: AuxMegaBlocks, AuxCoefficient: 1, ZCoefficient: 1}}
	stats, err := once.Backward(t.Context(), batch, opts)
	if err != nil {
		t.Fatal(err)
	}
	opts.Targets = 2 * int64(stats.Targets)
	for range 2 {
		if _, err := twice.Backward(t.Context(), batch, opts); err != nil {
			t.Fatal(err)
		}
	}
	for i, p := range once.Parameters() {
		if e := relative(twice.Parameters()[i].Grad.Floats(), p.Grad.Floats()); e > 1e-6 {
			t.Errorf("gradient of %s differs by %g", p.Name, e)
		}
	}
}

// relative is |got - want| / |want|, 0 if both vanish.
func relative(got, want []float32) float64 {
	var d, n float64
	for i, w := range want {
		d += (float64(got[i]) - float64(w)) * (float64(got[i]) - float64(w))
		n += float64(w) * float64(w)
	}
	if n == 0 {
		return d
	}
	return math.Sqrt(d / n)
}

// Forward and Backward see the same loss.
func TestForwardEqualsBackward(t *testing.T) {
	for name, cfg := range gradientCases(t) {
		m := newModel(t, cfg, 2)
		randomize(m, 1)
		batch := randomBatch(cfg, 3, 20, 2)
		forward, err := m.Forward(t.Context(), batch)
		if err != nil {
			t.Fatal(err)
		}
		if slices.ContainsFunc(grads(t, m), func(g float32) bool { return g != 0 }) {
			t.Errorf("%s: Forward touched the gradients", name)
		}
		backward, err := m.Backward(t.Context(), batch, BackwardOptions{Loss: LossOptions{Aux: AuxHF}})
		if err != nil {
			t.Fatal(err)
		}
		if forward.Loss != backward.Loss || forward.Aux != backward.Aux || forward.Z != backward.Z ||
			!slices.Equal(forward.RowLoss, backward.RowLoss) {
			t.Errorf("%s: Forward %+v, Backward %+v", name, forward, backward)
		}
		routed := int64(0)
		for l, counts := range forward.ExpertCounts {
			if !slices.Equal(counts, backward.ExpertCounts[l]) {
				t.Errorf("%s: expert counts of layer %d: %v and %v", name, l, counts, backward.ExpertCounts[l])
			}
			for _, n := range counts {
				routed += n
			}
		}
		if want := int64(len(cfg.ExpertLayers(0, cfg.Layers)) * 60 * cfg.ExpertsPerToken); routed != want && cfg.moe() {
			t.Errorf("%s: %d rows went to experts, want %d: none may be dropped", name, routed, want)
		}
	}
}

// A look-up of the padding token gives no gradient, as with padding_idx; as a target it counts like
// any other.
func TestPaddingTokenHasNoGradient(t *testing.T) {
	cfg := gradientCases(t)["gqa"]
	m := newModel(t, cfg, 2)
	randomize(m, 1)
	batch := randomBatch(cfg, 2, 8, 2)
	for i := range batch.Tokens {
		if i%3 == 0 {
			batch.Tokens[i] = uint32(cfg.PadTokenID)
		}
	}
	if _, err := m.Backward(t.Context(), batch, BackwardOptions{}); err != nil {
		t.Fatal(err)
	}
	row := func(p *Parameter) []float32 { return p.Grad.Floats()[cfg.PadTokenID*cfg.HiddenSize:][:cfg.HiddenSize] }
	if relative(row(byName(m, "model.embed_tokens.weight")), make([]float32, cfg.HiddenSize)) != 0 {
		t.Error("the padding token's embedding has a gradient")
	}
	if relative(row(byName(m, "lm_head.weight")), make([]float32, cfg.HiddenSize)) == 0 {
		t.Error("the padding token's row of the head has no gradient")
	}
}

// At the start of a training routing is nearly balanced, so the load-balancing loss is about K in
// the pooled form and 1 in the other.
func TestAuxiliaryLossAtInit(t *testing.T) {
	cfg := mustPreset(t, "mula-tiny")
	cfg.Layers = 2
	m := newModel(t, cfg, 2)
	m.Init(1)
	stats, err := m.Forward(t.Context(), randomBatch(cfg, 4, 256, 2))
	if err != nil {
		t.Fatal(err)
	}
	for form, want := range map[AuxForm]float64{AuxHF: float64(cfg.ExpertsPerToken), AuxMegaBlocks: 1, AuxNone: 0} {
		got := m.auxLoss(form)
		t.Logf("%s: %v", form, got)
		if !(got >= want*0.999 && got <= want*1.05) {
			t.Errorf("%s: %v at random weights, want about %v", form, got, want)
		}
	}
	if perToken := stats.Loss / float64(stats.Targets); math.Abs(perToken-math.Log(float64(cfg.VocabSize))) > 0.1 {
		t.Errorf("loss %v at random weights, want about ln V = %v", perToken, math.Log(float64(cfg.VocabSize)))
	}
}

// A training of some steps of gradient descent on one batch learns it.
func TestLossFalls(t *testing.T) {
	for name, cfg := range gradientCases(t) {
		m := newModel(t, cfg, 2)
		m.Init(1)
		batch := randomBatch(cfg, 2, 16, 2)
		var first, last float64
		for step := range 30 {
			m.ZeroGradients()
			stats, err := m.Backward(t.Context(), batch, BackwardOptions{Loss: fullLoss(cfg)})
			if err != nil {
				t.Fatal(err)
			}
			if last = stats.Loss / float64(stats.Targets); step == 0 {
				first = last
			}
			norm := 0.0
			for _, g := range grads(t, m) {
				norm += float64(g) * float64(g)
			}
			for _, p := range m.Parameters() {
				for i, g := range p.Grad.Floats() {
					p.Weight.Floats()[i] -= float32(1/math.Sqrt(norm)) * g
				}
			}
		}
		if !(last < first-1) {
			t.Errorf("%s: loss went from %v to %v", name, first, last)
		}
	}
}

func TestRefusedBatches(t *testing.T) {
	cfg := mustPreset(t, "mula-nano")
	cfg.MaxPositions = 16
	m := newModel(t, cfg, 1)
	good := randomBatch(cfg, 2, 16, 1)
	for _, test := range []struct {
		change func(b *Batch)
		want   string
	}{
		{func(b *Batch) { b.Tokens[20] = 512 }, "row 1, token 3: id 512 is beyond the model's vocabulary of 512"},
		{func(b *Batch) { b.Tokens[33] = math.MaxUint32 }, "row 1, token 16"}, // a target
		{func(b *Batch) { b.Rows = 0 }, "0 rows"},
		{func(b *Batch) { b.Rows = -1 }, "-1 rows"},
		{func(b *Batch) { b.SequenceLength = 0 }, "must be positive"},
		{func(b *Batch) { b.SequenceLength = math.MaxInt }, "max_position_embeddings 16"},
		{func(b *Batch) { *b = randomBatch(cfg, 2, 17, 1) },
			"sequence length 17 is beyond the model's max_position_embeddings 16"},
		{func(b *Batch) { b.Tokens = b.Tokens[1:] }, "holds 33 tokens, want 17 a row"},
		{func(b *Batch) { b.Rows = math.MaxInt/17 + 3 }, "want 17 a row"},
		{func(b *Batch) { b.Begin = make([]int32, 31) }, "has 31 document starts"},
		{func(b *Batch) { b.Counted = make([]bool, 33) }, "has 33 Counted values"},
		{func(b *Batch) { b.Begin = slices.Repeat([]int32{1}, 32) },
			"row 0, token 0: document start 1; it must be between 0,"},
		{func(b *Batch) { *b = inDocuments(*b, 9, 8); b.Begin[30] = 8 },
			"row 1, token 14: document start 8; it must be between 9,"},
		{func(b *Batch) { b.Begin = slices.Repeat([]int32{-1}, 32) }, "document start -1"},
	} {
		b := good
		b.Tokens = slices.Clone(good.Tokens)
		test.change(&b)
		_, forward := m.Forward(t.Context(), b)
		_, backward := m.Backward(t.Context(), b, BackwardOptions{})
		for _, err := range []error{forward, backward} {
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want one with %q", err, test.want)
			}
		}
	}
	for _, opts := range []BackwardOptions{
		{Targets: 31}, {Targets: -1}, {Targets: 32, Tokens: 31}, {Loss: LossOptions{Aux: "paper"}},
		{Loss: LossOptions{AuxCoefficient: -1}}, {Loss: LossOptions{ZCoefficient: math.NaN()}},
	} {
		if _, err := m.Backward(t.Context(), good, opts); err == nil {
			t.Errorf("%+v is accepted", opts)
		}
	}
	m.SetRecompute("all")
	if _, err := m.Backward(t.Context(), good, BackwardOptions{}); err == nil ||
		!strings.Contains(err.Error(), `unknown recompute level "all"; the choices are "none", "experts" and "layers"`) {
		t.Errorf("recompute all: %v", err)
	}
	if slices.ContainsFunc(grads(t, m), func(g float32) bool { return g != 0 }) {
		t.Error("a refused batch touched the gradients")
	}
}

// Buffers are planned: as many bytes as Memory says, made by the first call of a shape and used by
// all later ones.
func TestBuffersArePlanned(t *testing.T) {
	longtest.SkipIfShort(t)
	for name, cfg := range gradientCases(t) {
		sizes := map[Recompute]int64{}
		for _, recompute := range levels {
			cfg.Layers = 5
			m := newModel(t, cfg, 2)
			m.SetRecompute(recompute)
			m.Init(1)
			if _, err := m.Backward(t.Context(), randomBatch(cfg, 4, 128, 1),
				BackwardOptions{Loss: fullLoss(cfg)}); err != nil {
				t.Fatal(err)
			}
			want := cfg.Memory(Pass{Rows: 4, SequenceLength: 128, Recompute: recompute})
			got := arenaBytes(m)
			packed := newModel(t, cfg, 2)
			packed.SetRecompute(recompute)
			if _, err := packed.Backward(t.Context(), inDocuments(randomBatch(cfg, 4, 128, 1), 100, 29),
				BackwardOptions{Loss: fullLoss(cfg)}); err != nil {
				t.Fatal(err)
			}
			documents := cfg.Memory(Pass{Rows: 4, SequenceLength: 128, Recompute: recompute, Documents: true})
			if bytes := arenaBytes(packed); bytes != documents.Buffers || documents.Buffers <= want.Buffers {
				t.Errorf("%s, recompute %v: buffers of documents take %d bytes, Memory says %+v", name, recompute,
					bytes, documents)
			}
			if got != want.Buffers || want.Weights != int64(4*(len(weights(t, m))+elementsOf(m.Biases()))) ||
				want.Gradients != int64(4*len(grads(t, m))) {
				t.Errorf("%s, recompute %v: buffers take %d bytes, Memory says %+v", name, recompute, got, want)
			}
			sizes[recompute] = got
		}
		checkSaved(t, name, sizes)
	}
}

// Buffers that a device gives in many pieces serve as those in one: the gradients are the same
// bits, whatever the order of shapes.
func TestBlocksOfMemory(t *testing.T) {
	defer func(n int) { blockElements = n }(blockElements)
	for name, cfg := range gradientCases(t) {
		var want []float32
		for _, bound := range []int{1 << 28, 20_000, 1} {
			blockElements = bound
			m := newModel(t, cfg, 2)
			randomize(m, 1)
			largest := 0
			for _, rows := range []int{1, 3, 2} {
				if _, err := m.Backward(t.Context(), randomBatch(cfg, rows, 21, 2),
					BackwardOptions{Loss: fullLoss(cfg)}); err != nil {
					t.Fatal(err)
				}
				largest = max(largest, m.ws.logits.Elements(), m.ws.act.Elements(), m.ws.dqkv.Elements(),
					m.ws.gathered.Elements())
			}
			if want == nil {
				want = grads(t, m)
			}
			if !slices.Equal(grads(t, m), want) {
				t.Errorf("%s, blocks of %d: other bits", name, bound)
			}
			memory := m.ws.arena.floats.memory
			if many := len(memory) > 1; many != (bound < 1<<28) {
				t.Errorf("%s, blocks of %d: there are %d", name, bound, len(memory))
			}
			for i, b := range memory {
				if n := b.whole.Elements(); n > max(bound, largest+15) {
					t.Errorf("%s, blocks of %d: number %d has %d elements", name, bound, i, n)
				}
			}
		}
	}
}

// levels lists the levels of recomputation.
var levels = []Recompute{RecomputeNone, RecomputeExperts, RecomputeLayers}

// checkSaved wants the buffers of a model of five layers to become smaller from level to level.
func checkSaved(t *testing.T, what string, sizes map[Recompute]int64) {
	t.Helper()
	if none, experts, layers := sizes[RecomputeNone], sizes[RecomputeExperts],
		sizes[RecomputeLayers]; experts > none*9/10 || layers > experts*9/10 || layers > none*2/3 {
		t.Errorf("%s: buffers take %d bytes, %d if experts are recomputed, %d if layers are", what, none, experts,
			layers)
	}
}

// arenaBytes is the memory of the arenas of a model, and of its rotations.
func arenaBytes(m *Model) int64 {
	n := 4 * int64(m.rope.cos.Elements()+m.rope.sin.Elements())
	for _, a := range append([]*arena{&m.ws.arena}, flightArenas(m)...) {
		for _, s := range a.floats.memory {
			n += 4 * int64(s.whole.Elements())
		}
		for _, s := range a.int32s.memory {
			n += 4 * int64(s.whole.Elements())
		}
		for _, s := range a.halves.memory {
			n += 2 * int64(s.whole.Elements())
		}
		n += 8 * int64(len(a.doubles))
	}
	return n
}

func flightArenas(m *Model) (arenas []*arena) {
	for _, f := range m.flights {
		arenas = append(arenas, &f.arena)
	}
	return arenas
}

// A training step of a shape that has been seen allocates nothing, and neither does one of a
// smaller shape.
func TestStepsDoNotAllocate(t *testing.T) {
	longtest.SkipIfShort(t)
	if raceDetector { // its own bookkeeping allocates
		t.Skip("the race detector allocates")
	}
	cases, every := gradientCases(t), longtest.Rounds(2, 1) // usually half of the combinations
	for i, name := range slices.Sorted(maps.Keys(cases)) {
		cfg := cases[name]
		for j, recompute := range levels {
			for k, opts := range []BackwardOptions{{Loss: fullLoss(cfg)}, {SampleTargets: true}} {
				if (i+j+k)%every != 0 {
					continue
				}
				m := newModel(t, cfg, 2)
				m.SetRecompute(recompute)
				m.Init(1)
				large, small := randomBatch(cfg, 4, 128, 1), inDocuments(randomBatch(cfg, 2, 30, 1), 20, 9, 2)
				step := func() {
					m.ZeroGradients()
					for _, b := range []Batch{large, small} {
						if _, err := m.Backward(t.Context(), b, opts); err != nil {
							t.Fatal(err)
						}
					}
				}
				for range 3 { // the memory of the device depends on what its workers happen to do at the same time
					step()
				}
				if n := alloctest.Least(step); n > 0 {
					t.Errorf("%s, recompute %v, sampled targets %v: a step makes %v allocations", name, recompute,
						opts.SampleTargets, n)
				}
			}
		}
	}
}

// Recomputed activations equal the first ones: the gradients have the same bits. So do the
// gradients of a model that alternates between both.
func TestRecomputationChangesNoBit(t *testing.T) {
	for name, cfg := range gradientCases(t) {
		cfg.Layers = 3
		m := newModel(t, cfg, 2)
		randomize(m, 1)
		var want []float32
		for call, recompute := range []Recompute{RecomputeNone, RecomputeLayers, RecomputeExperts, RecomputeNone,
			RecomputeExperts, RecomputeLayers} {
			m.SetRecompute(recompute)
			m.ZeroGradients()
			for part := range uint64(2) { // the second micro-batch finds the first one's numbers in the buffers
				if _, err := m.Backward(t.Context(), randomBatch(cfg, 2, queryBlock+7, part),
					BackwardOptions{Loss: fullLoss(cfg)}); err != nil {
					t.Fatal(err)
				}
			}
			if want == nil {
				want = grads(t, m)
			}
			if !slices.Equal(grads(t, m), want) {
				t.Errorf("%s, call %d, recompute %v: other bits", name, call, recompute)
			}
		}
	}
}

// Diverged weights give a loss that is not a number, and no panic.
func TestNaNWeights(t *testing.T) {
	for name, cfg := range gradientCases(t) {
		m := newModel(t, cfg, 2)
		for _, p := range m.Parameters() {
			for i := range p.Weight.Floats() {
				p.Weight.Floats()[i] = float32(math.NaN())
			}
		}
		stats, err := m.Backward(t.Context(), randomBatch(cfg, 2, 8, 1), BackwardOptions{Loss: fullLoss(cfg)})
		if err != nil || !math.IsNaN(stats.Loss) {
			t.Errorf("%s: loss %v, %v", name, stats.Loss, err)
		}
	}
}

func BenchmarkBackward(b *testing.B) {
	cfg := mustPreset(b, "mula-tiny")
	m := newModel(b, cfg, 2)
	m.Init(1)
	batch := randomBatch(cfg, 8, 256, 1)
	run := func() {
		if _, err := m.Backward(b.Context(), batch, BackwardOptions{Loss: fullLoss(cfg)}); err != nil {
			b.Fatal(err)
		}
	}
	run()
	b.ResetTimer()
	for range b.N {
		run()
	}
	b.ReportMetric(float64(b.N)*8*256/b.Elapsed().Seconds(), "tokens/s")
}

// elementsOf returns the number of weights of parameters.
func elementsOf(list []*Parameter) (n int) {
	for _, p := range list {
		n += p.Weight.Elements()
	}
	return n
}
