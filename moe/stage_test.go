package moe

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"mula/internal/filesystem"
	"mula/internal/longtest"
	"mula/xpu"
	"mula/xpu/comm"
	"mula/xpu/cpu"
)

// A pipeline is the models of all ranks of all stages: models[stage][rank].
type pipeline struct {
	models [][]*Model
	comms  [][]*comm.Comm
}

func newPipeline(t testing.TB, cfg Config, stages, ranks int, p Parallel) pipeline {
	t.Helper()
	return newPipelineOn(t, func(int) xpu.Device { return cpu.New(1, xpu.FP32) }, cfg, stages, ranks, p)
}

// newPipelineOn makes a pipeline. Rank r of each stage computes on a device(r).
func newPipelineOn(t testing.TB, device func(r int) xpu.Device, cfg Config, stages, ranks int, p Parallel) pipeline {
	t.Helper()
	var all pipeline
	meshes := newMeshes(t, comm.NewShape(map[comm.Axes]int{comm.PP: stages, comm.EP: ranks}), nil)
	for s := range stages {
		g := newGroupOn(t, device, cfg, meshes[s*ranks:(s+1)*ranks], p)
		all.models, all.comms = append(all.models, g.models), append(all.comms, g.comms)
	}
	return all
}

// run sends all batches, [micro-batch][rank], through the pipeline, one forward, one backward:
// stage s of n first runs n-s-1 forward passes, then alternates, and last runs n-s-1 backward
// passes. The first batch sets the gradients. It returns the statistics of each stage,
// [micro-batch][stage][rank].
func (p pipeline) run(t testing.TB, batches [][]Batch, opts BackwardOptions) [][][]Stats {
	t.Helper()
	stages, ranks := len(p.models), len(p.models[0])
	measured := make([][][]Stats, len(batches))
	for i := range measured {
		measured[i] = make([][]Stats, stages)
		for s := range measured[i] {
			measured[i][s] = make([]Stats, ranks)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	type boundary struct{ forward, backward chan *Relay }
	boundaries := make([][]boundary, stages+1) // [s] is before stage s
	for s := range boundaries {
		for range ranks {
			boundaries[s] = append(boundaries[s], boundary{make(chan *Relay, len(batches)),
				make(chan *Relay, len(batches))})
		}
	}
	receive := func(from chan *Relay) (*Relay, error) {
		select {
		case r := <-from:
			return r, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	var all sync.WaitGroup
	var failures sync.Map
	for s := range stages {
		for r := range ranks {
			all.Go(func() {
				m, slots := p.models[s][r], stages-s
				forward := func(i int) (err error) {
					var in, out *Relay
					b := batches[i][r]
					if s > 0 {
						if in, err = receive(boundaries[s][r].forward); err == nil {
							in, err = hand(ctx, p.models[s-1][r], m, b, in)
						}
					}
					if s < stages-1 && err == nil {
						out, err = m.NewRelay(b.Rows, b.SequenceLength)
					}
					if err != nil {
						return err
					}
					between(in, out)
					if err := m.StageForward(ctx, i%slots, b, in, out); err != nil {
						return err
					}
					boundaries[s+1][r].forward <- out
					return nil
				}
				backward := func(i int) (err error) {
					var in, out *Relay
					b := batches[i][r]
					if s < stages-1 {
						if in, err = receive(boundaries[s+1][r].backward); err == nil {
							in, err = hand(ctx, p.models[s+1][r], m, b, in)
						}
					}
					if s > 0 && err == nil {
						out, err = m.NewRelay(b.Rows, b.SequenceLength)
					}
					if err != nil {
						return err
					}
					between(in, out)
					opts, done := opts, 0
					opts.First = i == 0
					opts.Done = func(bucket int) {
						if bucket != done {
							t.Errorf("stage %d: bucket %d is complete after %d others", s, bucket, done)
						}
						done++
					}
					stats, err := m.StageBackward(ctx, i%slots, opts, in, out)
					if err == nil && done != len(m.Buckets()) {
						err = fmt.Errorf("%d of %d buckets are complete", done, len(m.Buckets()))
					}
					measured[i][s][r] = copyStats(stats)
					boundaries[s][r].backward <- out
					return err
				}
				work := func() error {
					ahead := min(slots-1, len(batches))
					for i := range ahead {
						if err := forward(i); err != nil {
							return err
						}
					}
					for i := range batches {
						if i+ahead < len(batches) {
							if err := forward(i + ahead); err != nil {
								return err
							}
						}
						if err := backward(i); err != nil {
							return err
						}
					}
					return nil
				}
				if err := work(); err != nil {
					failures.Store(fmt.Sprintf("stage %d, rank %d", s, r), err)
					cancel()
				}
			})
		}
	}
	all.Wait()
	failures.Range(func(who, err any) bool {
		t.Errorf("%v: %v", who, err)
		return true
	})
	if t.Failed() {
		t.FailNow()
	}
	return measured
}

// between passes embeddings on: a stage between the first and the last one does not read them.
func between(in, out *Relay) {
	if in != nil && out != nil {
		out.Embeddings = in.Embeddings
	}
}

// hand makes a relay of a batch between two stages one of the device of the second.
func hand(ctx context.Context, from, to *Model, b Batch, r *Relay) (*Relay, error) {
	mine, err := to.NewRelay(b.Rows, b.SequenceLength)
	if err != nil {
		return nil, err
	}
	var buffer []float32
	hidden, err := xpu.Numbers(ctx, from.dev, r.Hidden, &buffer)
	if err != nil {
		return nil, err
	}
	to.dev.Write(mine.Hidden, hidden)
	if r.Embeddings.Elements() > 0 {
		embeddings, err := xpu.Numbers(ctx, from.dev, r.Embeddings, &buffer)
		if err != nil {
			return nil, err
		}
		to.dev.Write(mine.Embeddings, embeddings)
	}
	copy(mine.Router, r.Router)
	return mine, nil
}

// microBatches returns batches of some shapes for each rank.
func microBatches(cfg Config, ranks int) [][]Batch {
	var all [][]Batch
	for i, shape := range [][2]int{{2, 13}, {2, 13}, {1, 70}, {3, 5}, {2, 13}, {2, 13}, {2, 13}} {
		var batches []Batch
		for r := range ranks {
			rows := shape[0]
			if r == 1 && i == 3 {
				rows = 0
			}
			b := randomBatch(cfg, rows, shape[1], uint64(10*i+r))
			switch i {
			case 2:
				b = inDocuments(b, 20, 45, 6)
			case 5:
				b = inDocuments(b, 5, 1, 7, 1)
			}
			batches = append(batches, b)
		}
		all = append(all, batches)
	}
	return all
}

// The stages of a pipeline, several batches of several shapes under way, compute what the whole
// model computes from one after the other, to the bit: gradients and statistics.
func TestPipelineEqualsWhole(t *testing.T) {
	longtest.SkipIfShort(t)
	for name, cfg := range parallelCases(t) {
		if raceDetector && name != "gqa" { // one goroutine a stage, whatever the case
			continue
		}
		cfg.Layers = 5
		pipelineEqualsWhole(t, name, cfg, 1, Parallel{})
	}
	for _, name := range []string{"dense", "qwen2", "qwen3_moe"} {
		if raceDetector && name != "dense" {
			continue
		}
		cfg := gradientCases(t)[name]
		cfg.Layers = 3
		pipelineEqualsWhole(t, name, cfg, 1, Parallel{})
	}
	nano := mustPreset(t, "mula-nano")
	nano.Layers = 3
	for _, dispatch := range dispatches {
		pipelineEqualsWhole(t, "two ranks share the experts, "+string(dispatch), nano, 2, Parallel{Dispatch: dispatch})
	}
}

func pipelineEqualsWhole(t *testing.T, name string, cfg Config, ranks int, p Parallel) {
	t.Helper()
	batches := microBatches(cfg, ranks)
	for _, loss := range []LossOptions{fullLoss(cfg), {Aux: AuxMegaBlocks, AuxCoefficient: 0.1}} {
		if !cfg.moe() {
			loss = LossOptions{}
		}
		opts := BackwardOptions{Targets: 1000, Loss: loss}
		whole := newRanks(t, cfg, ranks, 1, p, nil)
		for _, m := range whole.models {
			randomize(m, 1)
		}
		var want [][]Stats
		for _, b := range batches {
			want = append(want, whole.backward(t, b, opts))
		}
		for _, stages := range []int{1, 2, 3} {
			if raceDetector && stages != 3 {
				continue
			}
			for _, recompute := range levels {
				if loss.Aux == AuxMegaBlocks && recompute != RecomputeNone {
					// what is computed again does not depend on the loss
					continue
				}
				what := fmt.Sprintf("%s, %d stages, %+v, recompute %v", name, stages, loss, recompute)
				pipe := newPipeline(t, cfg, stages, ranks, p)
				for _, models := range pipe.models {
					for _, m := range models {
						randomizeStage(m, whole.models[0])
						m.SetRecompute(recompute)
					}
				}
				pipe.run(t, batches, opts) // leaves its numbers in the buffers and the gradients
				measured := pipe.run(t, batches, opts)
				for i := range batches {
					for r := range ranks {
						last, w := measured[i][stages-1][r], want[i][r]
						if last.Loss != w.Loss || last.Aux != w.Aux || last.Z != w.Z || last.Targets != w.Targets ||
							!slices.Equal(last.RowLoss, w.RowLoss) {
							t.Errorf("%s: batch %d, rank %d: %+v, want %+v", what, i, r, last, w)
						}
						var counts [][]int64
						var entropy []float64
						for s := range stages {
							counts = append(counts, measured[i][s][r].ExpertCounts...)
							entropy = append(entropy, measured[i][s][r].RouterEntropy...)
						}
						if !slices.EqualFunc(counts, w.ExpertCounts, slices.Equal) ||
							!slices.Equal(entropy, w.RouterEntropy) {
							t.Errorf("%s: batch %d, rank %d: other routing", what, i, r)
						}
					}
				}
				for r := range ranks {
					held := 0
					for s := range stages {
						for _, p := range pipe.models[s][r].Parameters() {
							held++
							if w := byName(whole.models[r], p.Name); p.Index != w.Index || p.Divided != w.Divided ||
								!slices.Equal(p.Shape, w.Shape) || !slices.Equal(p.Grad.Floats(), w.Grad.Floats()) {
								t.Errorf("%s: rank %d, stage %d: %s is not that of the whole model", what, r, s, p.Name)
							}
						}
					}
					if n := len(whole.models[r].Parameters()); held != n {
						t.Errorf("%s: %d parameters on all stages, want %d", what, held, n)
					}
				}
			}
		}
	}
}

// randomizeStage gives a part of a model the weights that randomize gives the whole; experts come
// from their own names.
func randomizeStage(m, like *Model) {
	m.cfg.InitStd = 0.1
	m.Init(1)
	for _, p := range m.params {
		if !p.Divided {
			copy(p.Weight.Floats(), byName(like, p.Name).Weight.Floats())
		}
	}
}

// Stages start with the weights of the complete model, from Init and from files. The buffers of a
// stage have the size that Memory returns.
func TestStagesHoldTheModel(t *testing.T) {
	const dir = "testdata/hf-single"
	dev := cpu.New(1, xpu.FP32)
	defer dev.Close()
	whole, err := Open(dir, dev)
	if err != nil {
		t.Fatal(err)
	}
	for what, give := range map[string]func(m *Model) error{
		"Load": func(m *Model) error { return m.Load(filesystem.OS{}, dir) },
		"Init": func(m *Model) error { m.Init(7); return nil },
	} {
		if err := give(whole); err != nil {
			t.Fatal(err)
		}
		held := 0
		for s, models := range newPipeline(t, whole.Config(), 2, 1, Parallel{}).models {
			m := models[0]
			if err := give(m); err != nil {
				t.Fatal(err)
			}
			for _, p := range m.Parameters() {
				held++
				want := whole.Parameters()[p.Index]
				if p.Name != want.Name || !slices.Equal(p.Weight.Floats(), want.Weight.Floats()) {
					t.Errorf("%s, stage %d: %s has not the weights of %s", what, s, p.Name, want.Name)
				}
			}
			if want := whole.Config().Memory(Pass{Rows: 1, SequenceLength: 1, Stage: s,
				Shape: m.parallel.Mesh.Shape}).Weights; want != int64(4*len(weights(t, m))) {
				t.Errorf("stage %d: %d weights, Memory says %d bytes", s, len(weights(t, m)), want)
			}
		}
		if held != len(whole.Parameters()) {
			t.Errorf("%s: %d parameters on all stages, want %d", what, held, len(whole.Parameters()))
		}
	}
	cfg := mustPreset(t, "mula-nano")
	cfg.Layers = 5
	for _, recompute := range levels {
		pipe := newPipeline(t, cfg, 3, 1, Parallel{})
		for _, models := range pipe.models {
			models[0].SetRecompute(recompute)
		}
		var batches [][]Batch
		for i := range uint64(5) {
			batches = append(batches, []Batch{randomBatch(cfg, 2, 32, i)})
		}
		pipe.run(t, batches, BackwardOptions{Targets: 1000, Loss: fullLoss(cfg)})
		for s, models := range pipe.models {
			want := cfg.Memory(Pass{Rows: 2, SequenceLength: 32, Recompute: recompute, Stage: s,
				Shape:    models[0].parallel.Mesh.Shape,
				InFlight: 3 - s}).Buffers
			if got := arenaBytes(models[0]); got != want {
				t.Errorf("stage %d, recompute %v: buffers take %d bytes, Memory says %d", s, recompute, got, want)
			}
		}
	}
}

// A loss without a backward pass goes through the stages as through the whole model.
func TestStageLoss(t *testing.T) {
	cfg := mustPreset(t, "mula-nano")
	whole := newModel(t, cfg, 1)
	randomize(whole, 1)
	batch := randomBatch(cfg, 2, 9, 2)
	want, err := whole.Forward(t.Context(), batch)
	if err != nil {
		t.Fatal(err)
	}
	var relay *Relay
	for s, models := range newPipeline(t, cfg, 2, 1, Parallel{}).models {
		m := models[0]
		randomizeStage(m, whole)
		in := relay
		out, err := m.NewRelay(2, 9)
		if err != nil {
			t.Fatal(err)
		}
		if s == 1 {
			out = nil
		}
		stats, err := m.StageLoss(t.Context(), batch, in, out)
		if err != nil {
			t.Fatal(err)
		}
		relay = out
		if s == 1 && (stats.Loss != want.Loss || stats.Aux != want.Aux || stats.Z != want.Z ||
			!slices.Equal(stats.RowLoss, want.RowLoss)) {
			t.Errorf("%+v, want %+v", stats, want)
		}
	}
}

func TestRefusedStages(t *testing.T) {
	nano, tied := mustPreset(t, "mula-nano"), gradientCases(t)["dense tied"]
	dev := newModel(t, nano, 1).dev
	for _, test := range []struct {
		cfg    Config
		stages int
		want   string
	}{
		{nano, 3, "pp is 3, but the model has only 2 layers"},
		{tied, 2, "tie_word_embeddings"},
	} {
		mesh := &comm.Mesh{Shape: comm.NewShape(map[comm.Axes]int{comm.PP: test.stages})}
		if _, err := NewParallel(test.cfg, dev, Parallel{Mesh: mesh}); err == nil || !strings.Contains(err.Error(),
			test.want) {
			t.Errorf("error %v, want one with %q", err, test.want)
		}
	}
	if _, err := NewParallel(nano, dev, Parallel{}); err == nil || !strings.Contains(err.Error(), "needs a mesh") {
		t.Errorf("without a mesh: %v", err)
	}
	pipe := newPipeline(t, nano, 2, 1, Parallel{})
	first, last := pipe.models[0][0], pipe.models[1][0]
	batch := randomBatch(nano, 2, 4, 1)
	relay, err := first.NewRelay(2, 4)
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	second := func(_ any, err error) error { return err }
	none := func() error {
		_, err := first.StageBackward(ctx, 1, BackwardOptions{}, relay, nil)
		return err
	}
	if err := first.StageForward(ctx, 0, batch, nil, relay); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		err  error
		want string
	}{
		{second(first.Backward(ctx, batch, BackwardOptions{})), "this is stage 0 of 2; use StageForward"},
		{second(last.Forward(ctx, batch)), "this is stage 1 of 2"},
		{first.Save(t.Context(), t.TempDir(), SaveOptions{}), "this rank holds stage 0 of 2"},
		{second(first.Logits(t.Context(), []uint32{1})), "this rank holds stage 0 of 2"},
		{none(), "slot 1 has no batch under way"},
		{second(first.StageBackward(ctx, 0, BackwardOptions{Targets: 3}, relay, nil)),
			"more than the 3 of the whole step"},
		{second(first.StageLoss(ctx, batch, nil, relay)), "slot 0 has a batch under way"},
		{first.StageForward(ctx, 0, batch, nil, relay), "slot 0 has a batch under way"},
		{first.StageForward(ctx, -1, batch, nil, relay), "slot -1 is negative"},
		{first.StageForward(ctx, 0, batch, relay, relay), "stage 0 of 2 has no stage before it"},
		{first.StageForward(ctx, 0, batch, nil, nil), "stage 0 of 2 needs a relay for the stage behind it"},
		{last.StageForward(ctx, 0, batch, nil, nil), "stage 1 of 2 needs a relay for the stage before it"},
		{last.StageForward(ctx, 0, batch, relay, relay), "stage 1 of 2 has no stage behind it"},
		{last.StageForward(ctx, 0, randomBatch(nano, 3, 4, 1), relay, nil),
			"a batch of 3 rows of 4 tokens needs 768 and 18"},
	} {
		if test.err == nil || !strings.Contains(test.err.Error(), test.want) {
			t.Errorf("error %v, want one with %q", test.err, test.want)
		}
	}
	if _, err := first.StageBackward(ctx, 0, BackwardOptions{}, relay, nil); err != nil {
		t.Errorf("the batch under way is lost: %v", err)
	}
	if err := second(first.StageBackward(ctx, 0, BackwardOptions{}, relay, nil)); err == nil {
		t.Error("a batch went back twice")
	}
	whole := newModel(t, nano, 1)
	if err := whole.StageForward(ctx, 0, batch, nil, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := whole.Logits(t.Context(), []uint32{1}); err == nil ||
		!strings.Contains(err.Error(), "slot 0 has a batch under way") {
		t.Errorf("a text is read with a batch under way: %v", err)
	}
}
