package moe

import (
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/internal/filesystem"
	"mula/internal/longtest"
	"mula/moe/safetensors"
	"mula/xpu"
	"mula/xpu/comm"
	"mula/xpu/cpu"
	"mula/xpu/discrete"
)

// predicting returns a model with two layers of multi-token prediction.
func predicting(t testing.TB) Config {
	c := gradientCases(t)["deepseek_v3"]
	c.PredictionLayers = 2
	return c
}

// predictingLoss has all losses that such a model has.
var predictingLoss = LossOptions{Aux: AuxSequence, AuxCoefficient: 0.5, PredictionCoefficient: 0.3}

// The losses, and the gradients of every tensor along the gradient and in random directions, are
// the reference's, whose formulas are written token by token.
func TestPredictionsAgainstReference(t *testing.T) {
	const step = 1e-6
	tied := gradientCases(t)["gqa"]
	tied.Architecture, tied.ClipQKV, tied.QKNorm, tied.RotaryPart = GLM4MoE, 0, false, 0
	tied.Groups, tied.TopGroups, tied.RoutingScale, tied.SharedSize = 2, 1, 1.5, 32
	tied.RouterAuxLossCoef, tied.TieEmbeddings, tied.PredictionLayers = 0, true, 1
	batch := randomBatch(predicting(t), 1, 7, 4)
	for name, test := range map[string]struct {
		cfg   Config
		batch Batch
		loss  LossOptions
	}{
		"two layers":            {predicting(t), batch, LossOptions{PredictionCoefficient: 3}},
		"documents":             {predicting(t), inDocuments(batch, 4, 1, 2, 1), LossOptions{PredictionCoefficient: 3}},
		"balance":               {predicting(t), batch, LossOptions{Aux: AuxMegaBlocks, AuxCoefficient: 1, PredictionCoefficient: 1}},
		"tied":                  {tied, batch, LossOptions{PredictionCoefficient: 2}},
		"without a coefficient": {predicting(t), batch, LossOptions{}},
	} {
		t.Run(name, func(t *testing.T) {
			if name != "documents" && name != "tied" {
				longtest.SkipIfShort(t)
			}
			t.Parallel()
			m := newModel(t, test.cfg, 1)
			randomize(m, 3)
			for i := range test.batch.Tokens {
				if int(test.batch.Tokens[i]) == test.cfg.PadTokenID {
					test.batch.Tokens[i]++
				}
			}
			stats, err := m.Backward(t.Context(), test.batch, BackwardOptions{Loss: test.loss})
			if err != nil {
				t.Fatal(err)
			}
			ref := newReference(m)
			d, targets := float64(test.cfg.PredictionLayers), float64(stats.Targets)
			loss := func(l losses) float64 {
				sum := l.ce + test.loss.AuxCoefficient*l.megablocks
				for _, p := range l.predictions {
					sum += test.loss.PredictionCoefficient / d * p / targets
				}
				return sum
			}
			base := ref.losses(test.batch)
			for k, want := range base.predictions {
				if got := stats.PredictionLoss[k]; want <= 0 || math.Abs(got-want) > 1e-6*want {
					t.Errorf("layer %d: loss %v, want %v", k, got, want)
				}
			}
			if got, want := stats.Loss/targets, base.ce; math.Abs(got-want) > 1e-6*want {
				t.Errorf("loss %v, want %v", got, want)
			}
			// Tensors of multi-token prediction and outside of the layers one by one, and the
			// others of each layer together.
			groups := map[string][]*Parameter{}
			for _, p := range m.Parameters() {
				name := p.Name
				if rest, ok := strings.CutPrefix(name, "model.layers."); ok && len(strings.Split(rest, ".")) > 3 {
					name = rest[:1]
				}
				groups[name] = append(groups[name], p)
			}
			for name, group := range groups {
				norm := 0.0
				for _, p := range group {
					for _, v := range p.Grad.Floats() {
						norm += float64(v) * float64(v)
					}
				}
				norm = math.Sqrt(norm)
				for i := range 2 { // along the gradient, and along ±1
					want := 0.0
					move := func(by float64) losses {
						want = 0
						for _, p := range group {
							w := ref.weights[p.Name]
							for j, g := range p.Grad.Floats() {
								u := float64(g) / max(norm, 1e-30)
								if i > 0 {
									u = float64(1 - 2*((j*j+j/3)%2))
								}
								w[j] = float64(p.Weight.Floats()[j]) + by*u
								want += u * float64(g)
							}
						}
						return ref.losses(test.batch)
					}
					up, down := move(step), move(-step)
					move(0)
					if !slices.Equal(up.chosen, base.chosen) || !slices.Equal(down.chosen, base.chosen) {
						t.Fatalf("%s: the step changes the routing; choose another seed", name)
					}
					got := (loss(up) - loss(down)) / (2 * step)
					if math.Abs(got-want) > 1e-4*norm+1e-8 {
						t.Errorf("%s, direction %d: the derivative is %v, and the gradient gives %v (norm %v)", name, i,
							got, want, norm)
					}
				}
			}
		})
	}
}

// A target of layer k is in the document of the token, k+2 tokens later, and counts only if the
// targets before it count, too.
func TestPredictedTargets(t *testing.T) {
	of := []int{0, 0, 0, 0, 1, 2, 2, 2, 3, 3} // documents; the last is padding
	batch := Batch{Tokens: []uint32{10, 11, 12, 13, 14, 15, 16, 17, 18, 19}, Rows: 1, SequenceLength: 9}
	documents := inDocuments(batch, 4, 1, 3, 2)
	for k := range 4 {
		for i := range 9 {
			input, target := documents.predicted(0, i, k)
			want := int32(-1)
			if last := i + k + 2; last < 8 && of[i] == of[last] {
				want = int32(10 + last)
			}
			if input != uint32(10+min(i+k+1, 9)) || target != want {
				t.Errorf("layer %d, token %d: reads %d and predicts %d; want %d", k, i, input, target, want)
			}
			if want = int32(12 + i + k); want > 19 {
				want = -1
			}
			if _, target := batch.predicted(0, i, k); target != want {
				t.Errorf("layer %d, token %d: predicts %d without documents", k, i, target)
			}
		}
	}
}

// Levels of recomputation, numbers of threads, other contents of buffers and a device with memory
// of its own do not change a bit. Micro-batches add up, and a bucket is complete when Done is
// called.
func TestPredictionsHaveTheSameBits(t *testing.T) {
	cfg := predicting(t)
	batch := inDocuments(randomBatch(cfg, 3, 20, 2), 9, 1, 7, 4)
	opts := BackwardOptions{Loss: predictingLoss, First: true}
	var want []float32
	var wantStats string
	for i, dev := range []xpu.Device{cpu.New(1, xpu.FP32), cpu.New(3, xpu.FP32), discrete.New(cpu.New(2, xpu.FP32))} {
		t.Cleanup(dev.Close)
		m := newModelOn(t, dev, cfg)
		randomize(m, 1)
		for _, level := range levels {
			m.SetRecompute(level)
			if _, err := m.Forward(t.Context(), randomBatch(cfg, 2, 11, 5)); err != nil {
				t.Fatal(err)
			}
			for _, b := range m.Buckets() {
				garbage := make([]float32, b.Grad.Elements())
				for i := range garbage {
					garbage[i] = float32(math.NaN())
				}
				dev.Write(b.Grad, garbage)
			}
			done := make([][]float32, len(m.Buckets()))
			opts.Done = func(bucket int) {
				done[bucket] = slices.Clone(numbers(t, m, m.Buckets()[bucket].Grad))
			}
			stats, err := m.Backward(t.Context(), batch, opts)
			if err != nil {
				t.Fatal(err)
			}
			text := fmt.Sprint(stats.Loss, stats.Aux, stats.PredictionLoss, stats.PredictionTargets, stats.ExpertCounts)
			var all []float32
			for i, b := range m.Buckets() {
				grad := numbers(t, m, b.Grad)
				if !slices.Equal(done[i], grad) {
					t.Errorf("device %d, %s: bucket %d was not complete", i, level, i)
				}
				all = append(all, grad...)
			}
			if want == nil {
				want, wantStats = all, text
				if len(stats.ExpertCounts) != len(cfg.ExpertLayers(0, cfg.AllLayers())) ||
					len(stats.PredictionTargets) != 2 || stats.PredictionTargets[0] <= stats.PredictionTargets[1] {
					t.Errorf("statistics %s", text)
				}
			}
			if !slices.Equal(all, want) || text != wantStats {
				t.Errorf("device %d, %s: other bits, or %s instead of %s", i, level, text, wantStats)
			}
		}
	}

	m := newModel(t, cfg, 1)
	randomize(m, 1)
	losses := make([]float64, 2)
	for i, micro := range share(batch, []int{2, 1}) {
		stats, err := m.Backward(t.Context(), micro, BackwardOptions{Loss: predictingLoss, First: i == 0,
			Targets: int64(batch.targets()), Tokens: int64(batch.Rows * batch.SequenceLength)})
		if err != nil {
			t.Fatal(err)
		}
		for k, loss := range stats.PredictionLoss {
			losses[k] += loss
		}
	}
	for _, b := range m.Buckets() {
		grad := numbers(t, m, b.Grad)
		if e := relative(grad, want[:len(grad)]); e > 1e-5 {
			t.Errorf("the gradient of micro-batches differs by %g", e)
		}
		want = want[len(grad):]
	}
}

// Ranks that share experts, sequences or matrices compute the losses and the gradients of one rank,
// up to the order of sums.
func TestPredictionsOfRanks(t *testing.T) {
	for _, test := range []struct {
		expertDP, ep, tp, cp int
		recompute            Recompute
		documents            []int
	}{
		{expertDP: 1, ep: 2, tp: 1, cp: 1, recompute: RecomputeExperts},
		{expertDP: 2, ep: 2, tp: 1, cp: 2, documents: []int{3, 2, 7, 1}},
		{expertDP: 1, ep: 2, tp: 2, cp: 1, documents: []int{5, 1, 7}},
		{expertDP: 2, ep: 1, tp: 2, cp: 2, recompute: RecomputeLayers},
	} {
		name := fmt.Sprintf("expert_dp %d, ep %d, tp %d, cp %d", test.expertDP, test.ep, test.tp, test.cp)
		t.Run(name, func(t *testing.T) {
			c := predicting(t)
			whole := newModel(t, c, 1)
			randomize(whole, 1)
			shape := comm.NewShape(map[comm.Axes]int{comm.ExpertDP: test.expertDP, comm.EP: test.ep, comm.TP: test.tp})
			n := test.tp * test.cp
			sequences := shape.Ranks() / n
			batch := randomBatch(c, 2*sequences, 12, 2)
			if test.documents != nil {
				batch = inDocuments(batch, test.documents...)
			}
			opts := BackwardOptions{Targets: int64(batch.targets()), Tokens: int64(batch.Rows * batch.SequenceLength),
				Loss: predictingLoss}
			want, err := whole.Backward(t.Context(), batch, opts)
			if err != nil {
				t.Fatal(err)
			}
			rows := share(batch, slices.Repeat([]int{2}, sequences))
			var batches []Batch
			for r := range shape.Ranks() {
				batches = append(batches, rows[r/n])
			}
			g := newTensorRanks(t, func() xpu.Device { return cpu.New(1, xpu.FP32) }, c, shape, test.cp)
			for _, m := range g.models {
				for _, p := range m.params {
					m.dev.Write(p.Weight, sliceOf(p, byName(whole, p.Name).Weight.Floats()))
				}
				m.SetRecompute(test.recompute)
			}
			losses, targets := make([]float64, 2), make([]int64, 2)
			for _, s := range g.backward(t, batches, opts) {
				for k := range losses {
					losses[k] += s.PredictionLoss[k]
					targets[k] += s.PredictionTargets[k]
				}
			}
			for k, loss := range losses {
				if math.Abs(loss-want.PredictionLoss[k]) > 1e-6*loss || targets[k] != want.PredictionTargets[k] {
					t.Errorf("layer %d: loss %v of %d targets, want %v of %d", k, loss, targets[k],
						want.PredictionLoss[k], want.PredictionTargets[k])
				}
			}
			compareSlices(t, g, whole, 1e-5)
		})
	}
}

// Evaluation, the counts of experts without a backward pass, and memory.
func TestPredictionsOutsideOfTraining(t *testing.T) {
	cfg := predicting(t)
	plain := cfg
	plain.PredictionLayers = 0
	m, without := newModel(t, cfg, 2), newModel(t, plain, 2)
	randomize(m, 1)
	for _, p := range without.params {
		copy(p.Weight.Floats(), byName(m, p.Name).Weight.Floats())
	}
	batch := randomBatch(cfg, 2, 16, 3)
	trained, err := m.Backward(t.Context(), batch, BackwardOptions{Loss: predictingLoss})
	if err != nil {
		t.Fatal(err)
	}
	counts := fmt.Sprint(trained.ExpertCounts)
	counted, err := m.StageCounts(t.Context(), batch, nil, nil)
	if err != nil || fmt.Sprint(counted) != counts {
		t.Errorf("counts %v, want %s; %v", counted, counts, err)
	}
	got, err := m.Forward(t.Context(), batch)
	if err != nil {
		t.Fatal(err)
	}
	want, err := without.Forward(t.Context(), batch)
	if err != nil {
		t.Fatal(err)
	}
	if got.Loss != want.Loss || got.Aux != want.Aux || got.PredictionLoss != nil {
		t.Errorf("evaluated loss %v, load balancing %v, predictions %v; want %v, %v, none", got.Loss, got.Aux,
			got.PredictionLoss, want.Loss, want.Aux)
	}
	if n := arenaBytes(m); n != cfg.Memory(Pass{Rows: 2, SequenceLength: 16}).Buffers {
		t.Errorf("buffers of %d bytes, Memory says %+v", n, cfg.Memory(Pass{Rows: 2, SequenceLength: 16}))
	}
	total := int64(0)
	for _, p := range m.Parameters() {
		total += int64(p.Weight.Elements())
	}
	if total != cfg.TotalParameters() {
		t.Errorf("%d weights, the configuration counts %d", total, cfg.TotalParameters())
	}
}

// A saved model keeps the layers under the published names, a model without them ignores them, and
// a repeated tensor must be equal.
func TestPredictionsAreSaved(t *testing.T) {
	cfg := predicting(t)
	m := newModel(t, cfg, 2)
	randomize(m, 1)
	dir := t.TempDir()
	if err := m.Save(t.Context(), dir, SaveOptions{}); err != nil {
		t.Fatal(err)
	}
	back := newModel(t, cfg, 1)
	if err := back.Load(filesystem.OS{}, dir); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(weights(t, back), weights(t, m)) {
		t.Error("the weights differ after saving and loading")
	}
	stored, err := OpenStored(filesystem.OS{}, dir)
	if err != nil {
		t.Fatal(err)
	}
	defer stored.Close()
	if n := stored.PredictionLayers(); n != 2 || stored.Config().PredictionLayers != 0 {
		t.Errorf("%d layers in the files, %d in the model", n, stored.Config().PredictionLayers)
	}
	one, err := OpenStoredWith(filesystem.OS{}, dir, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer one.Close()
	added := countOf(one.tensors, "layers.2.")
	if n := one.PredictionLayers(); n != 2 || len(one.tensors) != len(stored.tensors)+added {
		t.Errorf("%d layers in the files; the model has %d tensors", n, len(one.tensors))
	}
	if _, err := OpenStoredWith(filesystem.OS{}, dir, 3); err == nil ||
		!strings.Contains(err.Error(), "model.layers.4.") {
		t.Errorf("a layer that is missing: %v", err)
	}
	if err := newModel(t, func() Config { c := cfg; c.PredictionLayers = 1; return c }(), 1).Load(filesystem.OS{},
		filepath.Join(dir, "none")); err == nil {
		t.Error("a missing folder was loaded")
	}
}

// countOf returns the number of tensors with a part of a name.
func countOf(tensors []safetensors.Tensor, part string) (n int) {
	for _, t := range tensors {
		if strings.Contains(t.Name, part) {
			n++
		}
	}
	return n
}

// What mula cannot train is refused by name.
func TestPredictionsRefuse(t *testing.T) {
	cfg := predicting(t)
	for field, change := range map[string]func(c *Config){
		"between 0 and 16":  func(c *Config) { c.PredictionLayers = -1 },
		"another form":      func(c *Config) { *c = gradientCases(t)["ernie4_5_moe"]; c.PredictionLayers = 1 },
		"qwen3_moe model":   func(c *Config) { *c = gradientCases(t)["qwen3_moe"]; c.PredictionLayers = 1 },
		"must be between 0": func(c *Config) { c.PredictionLayers = 17 },
	} {
		c := cfg
		change(&c)
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), field) ||
			!strings.Contains(err.Error(), "num_nextn_predict_layers") {
			t.Errorf("error %v, want one with %q", err, field)
		}
	}
	m := newModel(t, cfg, 1)
	batch := randomBatch(cfg, 1, 4, 1)
	negative := BackwardOptions{Loss: LossOptions{PredictionCoefficient: -1}}
	if _, err := m.Backward(t.Context(), batch, negative); err == nil ||
		!strings.Contains(err.Error(), "multi-token prediction") {
		t.Errorf("error %v of a negative coefficient", err)
	}
	cfg.Layers = 2
	pipe := newPipeline(t, cfg, 2, 1, Parallel{})
	first, last := pipe.models[0][0], pipe.models[1][0]
	relay, err := first.NewRelay(1, 4)
	if err != nil {
		t.Fatal(err)
	}
	relay.Embeddings = relay.Embeddings.Rows(0, 4)
	const want = "needs 8 embeddings of 48 numbers for the layers of multi-token prediction, and has 192 numbers"
	for _, err := range []error{first.StageForward(t.Context(), 0, batch, nil, relay),
		last.StageForward(t.Context(), 0, batch, relay, nil)} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %s", err, want)
		}
	}
	if _, err := first.StageLoss(t.Context(), batch, nil, relay); err != nil {
		t.Errorf("a loss needs embeddings: %v", err)
	}
}

// The model and each layer draw different targets, also if all have the same distribution.
func TestPredictionsDrawTargets(t *testing.T) {
	var drawn [][]int32 // by the last layer of models with 0, 1 and 2 layers
	for d := range 3 {
		cfg := predicting(t)
		cfg.PredictionLayers = d
		m := newModel(t, cfg, 1)
		randomize(m, 1)
		clear(byName(m, headName).Weight.Floats())
		batch := randomBatch(cfg, 4, 32, 2)
		if _, err := m.Backward(t.Context(), batch, BackwardOptions{SampleTargets: true, SampleSeed: 7}); err != nil {
			t.Fatal(err)
		}
		drawn = append(drawn, drawnTargets(t, m))
		for before := range d {
			same, all := 0, 0
			for i, id := range drawn[d] {
				if id >= 0 && drawn[before][i] >= 0 {
					all++
					if id == drawn[before][i] {
						same++
					}
				}
			}
			if all < 100 || same > 10 {
				t.Errorf("layers %d and %d draw %d of %d targets alike", before, d, same, all)
			}
		}
	}
}

// With drawn targets, the mean of the square of the gradient is the curvature of the model's loss
// and λ/D times the curvature of the layers' losses, so it is linear in λ.
func TestPredictionsCurvature(t *testing.T) {
	longtest.SkipIfShort(t)
	cfg := predicting(t)
	m := newModel(t, cfg, 1)
	randomize(m, 1)
	batch := randomBatch(cfg, 8, 12, 2)
	const draws = 40
	square := func(coefficient float64) (sum float64) {
		for seed := range uint64(draws) {
			if _, err := m.Backward(t.Context(), batch, BackwardOptions{First: true, SampleTargets: true,
				SampleSeed: 1000 * seed, Loss: LossOptions{PredictionCoefficient: coefficient}}); err != nil {
				t.Fatal(err)
			}
			for _, v := range byName(m, headName).Grad.Floats() {
				sum += float64(v) * float64(v) / draws
			}
		}
		return sum
	}
	none, one, nine := square(0), square(1), square(9)
	if ratio := (nine - none) / (one - none); !(one > 1.1*none) || math.Abs(ratio-9) > 1 {
		t.Errorf("means of squares %v, %v and %v for coefficients 0, 1 and 9: ratio %v, want about 9", none, one, nine,
			ratio)
	}
}

// The stages of a pipeline compute the bits of the complete model, with several batches under way.
// The last stage has the layers of multi-token prediction, and the buffers have the sizes of
// Memory.
func TestPredictionsOfStages(t *testing.T) {
	for _, test := range []struct{ stages, ranks, layers, recompute int }{
		{2, 1, 2, 0}, {3, 1, 4, 1}, {2, 2, 3, 2}, {4, 1, 4, 2}, {3, 2, 3, 0},
	}[:longtest.ShortRounds(2, 5)] {
		t.Run(fmt.Sprintf("%+v", test), func(t *testing.T) {
			c := predicting(t)
			c.Layers = test.layers
			var batches [][]Batch
			targets := int64(0)
			for i := range uint64(4) {
				var all []Batch
				for r := range test.ranks {
					b := inDocuments(randomBatch(c, 2, 12, 10*i+uint64(r)), 3, 2, 7, 1)
					all, targets = append(all, b), targets+int64(b.targets())
				}
				batches = append(batches, all)
			}
			opts := BackwardOptions{Targets: targets, Tokens: int64(4 * 24 * test.ranks), Loss: predictingLoss}
			whole := newRanks(t, c, test.ranks, 1, Parallel{}, nil)
			for _, m := range whole.models {
				randomize(m, 1)
			}
			pipe := newPipeline(t, c, test.stages, test.ranks, Parallel{})
			for s, models := range pipe.models {
				for _, m := range models {
					m.SetRecompute(levels[test.recompute])
					randomizeStage(m, whole.models[0])
					if n := len(m.predictions); n > 0 != (s == test.stages-1) {
						t.Errorf("stage %d has %d layers of multi-token prediction", s, n)
					}
				}
			}
			measured := pipe.run(t, batches, opts)
			for i, b := range batches {
				for r, want := range whole.backward(t, b, opts) {
					last := measured[i][test.stages-1][r]
					if last.Loss != want.Loss || !slices.Equal(last.PredictionLoss, want.PredictionLoss) ||
						!slices.Equal(last.PredictionTargets, want.PredictionTargets) || want.PredictionLoss[1] == 0 {
						t.Errorf("batch %d, rank %d: %+v, want %+v", i, r, last, want)
					}
					aux, counts := 0.0, [][]int64(nil)
					for _, of := range measured[i] {
						aux, counts = aux+of[r].Aux, append(counts, of[r].ExpertCounts...)
					}
					if math.Abs(aux-want.Aux) > 1e-12*aux ||
						!slices.EqualFunc(counts, want.ExpertCounts, slices.Equal) {
						t.Errorf("batch %d, rank %d: load balancing %v, want %v, or other routing", i, r, aux, want.Aux)
					}
				}
			}
			for r, of := range whole.models {
				held := 0
				for s := range test.stages {
					m := pipe.models[s][r]
					for _, p := range m.Parameters() {
						held++
						if !slices.Equal(p.Grad.Floats(), byName(of, p.Name).Grad.Floats()) {
							t.Errorf("rank %d, stage %d: other gradient of %s", r, s, p.Name)
						}
					}
					want := c.Memory(Pass{Rows: 2, SequenceLength: 12, Documents: true, Stage: s,
						Recompute: levels[test.recompute], InFlight: test.stages - s, Shape: m.parallel.Mesh.Shape})
					if got := arenaBytes(m); test.ranks == 1 && got != want.Buffers {
						t.Errorf("stage %d: buffers of %d bytes, Memory says %d", s, got, want.Buffers)
					}
				}
				if n := len(of.Parameters()); held != n {
					t.Errorf("rank %d: %d parameters of %d", r, held, n)
				}
			}
		})
	}
}

// Groups have equally many layers, but the last one has all layers of multi-token prediction, and
// each at least one other layer.
func TestGroupsOfLayers(t *testing.T) {
	for _, test := range []struct {
		layers, predictions, stages, virtual int
		want                                 string // the first layer of each group
	}{
		{8, 0, 4, 1, "0 2 4 6 8"},
		{5, 0, 2, 2, "0 1 2 3 5"},
		{8, 1, 4, 1, "0 2 4 6 9"},
		{7, 1, 4, 1, "0 2 4 6 8"}, // and not 0 1 3 5 8
		{61, 1, 2, 4, "0 7 15 23 31 38 46 54 62"},
		{4, 2, 4, 1, "0 1 2 3 6"}, // as few as possible in the last group
		{5, 4, 3, 1, "0 3 4 9"},
	} {
		c := Config{Layers: test.layers, PredictionLayers: test.predictions}
		starts := make([]int, test.stages*test.virtual+1)
		for s := range test.stages {
			for i, group := range c.StageGroups(s, test.stages, test.virtual) {
				starts[i*test.stages+s], starts[i*test.stages+s+1] = group.From, group.To
			}
		}
		if got := strings.Trim(fmt.Sprint(starts), "[]"); got != test.want {
			t.Errorf("%+v: groups start with %s", test, got)
		}
	}
}
