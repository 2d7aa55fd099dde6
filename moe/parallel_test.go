package moe

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"mula/internal/filesystem"
	"mula/internal/longtest"
	"mula/xpu"
	"mula/xpu/comm"
	"mula/xpu/comm/local"
	"mula/xpu/cpu"
)

// A rankGroup is the models of the ranks that share the experts of one model, each a goroutine's.
type rankGroup struct {
	models []*Model
	comms  []*comm.Comm
}

// newRanks makes a group of n with links from local, which wrap may change.
func newRanks(t testing.TB, cfg Config, n, threads int, p Parallel,
	wrap func(comm.Transport) comm.Transport) rankGroup {
	t.Helper()
	return newRanksOn(t, func(int) xpu.Device { return cpu.New(threads, xpu.FP32) }, cfg, n, p, wrap)
}

// newMeshes makes a mesh with links from local, which wrap may change. It returns the mesh of each
// rank.
func newMeshes(t testing.TB, shape comm.Shape, wrap func(comm.Transport) comm.Transport) []*comm.Mesh {
	t.Helper()
	meshes, errs := make([]*comm.Mesh, shape.Ranks()), make([]error, shape.Ranks())
	var ranks sync.WaitGroup
	for r, link := range local.New(shape.Ranks()) {
		if wrap != nil {
			link = wrap(link)
		}
		world := comm.New(link)
		t.Cleanup(func() { world.Close() })
		ranks.Go(func() { meshes[r], errs[r] = comm.NewMesh(t.Context(), world, shape) })
	}
	ranks.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return meshes
}

// newRanksOn makes a group. Rank r computes on device(r).
func newRanksOn(t testing.TB, device func(r int) xpu.Device, cfg Config, n int, p Parallel,
	wrap func(comm.Transport) comm.Transport) rankGroup {
	t.Helper()
	meshes := newMeshes(t, comm.NewShape(map[comm.Axes]int{comm.EP: n}), wrap)
	return newGroupOn(t, device, cfg, meshes, p)
}

// newGroupOn makes a group of the ranks of meshes. Rank r computes on device(r).
func newGroupOn(t testing.TB, device func(r int) xpu.Device, cfg Config, meshes []*comm.Mesh, p Parallel) rankGroup {
	t.Helper()
	var g rankGroup
	for r, mesh := range meshes {
		dev := device(r)
		t.Cleanup(dev.Close)
		p.Mesh = mesh
		m, err := NewParallel(cfg, dev, p)
		if err != nil {
			t.Fatal(err)
		}
		g.models, g.comms = append(g.models, m), append(g.comms, mesh.Group(comm.EP))
	}
	return g
}

// each calls f for every rank at once. A rank that fails leaves the group.
func (g rankGroup) each(f func(r int, m *Model) error) []error {
	errs := make([]error, len(g.models))
	var ranks sync.WaitGroup
	for r, m := range g.models {
		ranks.Go(func() {
			if errs[r] = f(r, m); errs[r] != nil {
				g.comms[r].Close()
			}
		})
	}
	ranks.Wait()
	return errs
}

// backward runs a pass on every rank and returns copies of its statistics.
func (g rankGroup) backward(t testing.TB, batches []Batch, opts BackwardOptions) []Stats {
	t.Helper()
	all := make([]Stats, len(g.models))
	for r, err := range g.each(func(r int, m *Model) error {
		stats, err := m.Backward(t.Context(), batches[r], opts)
		all[r] = copyStats(stats)
		return err
	}) {
		if err != nil {
			t.Fatalf("rank %d: %v", r, err)
		}
	}
	return all
}

func copyStats(s Stats) Stats {
	s.RowLoss, s.RouterEntropy, s.ExpertCounts = slices.Clone(s.RowLoss), slices.Clone(s.RouterEntropy),
		slices.Clone(s.ExpertCounts)
	s.Dropped = slices.Clone(s.Dropped)
	s.PredictionLoss, s.PredictionTargets = slices.Clone(s.PredictionLoss), slices.Clone(s.PredictionTargets)
	for l := range s.ExpertCounts {
		s.ExpertCounts[l] = slices.Clone(s.ExpertCounts[l])
	}
	return s
}

// gradients returns the gradients of the complete model, by name. Gradients of experts come from
// the rank that has the expert; the others are summed over the ranks.
func (g rankGroup) gradients(t testing.TB) map[string][]float32 {
	t.Helper()
	sum := map[string][]float32{}
	for _, m := range g.models {
		for _, p := range m.Parameters() {
			switch {
			case sum[p.Name] == nil:
				sum[p.Name] = slices.Clone(p.Grad.Floats())
			case p.Divided:
				t.Fatalf("two ranks hold %s", p.Name)
			default:
				cpu.Axpy(sum[p.Name], 1, p.Grad.Floats())
			}
		}
	}
	return sum
}

// bits is everything that the ranks have computed.
func (g rankGroup) bits(t testing.TB, stats []Stats) string {
	t.Helper()
	var b strings.Builder
	for r, m := range g.models {
		s := stats[r]
		fmt.Fprintf(&b, "rank %d: %x %x %x %x %v %x\n", r, s.Loss, s.Aux, s.Z, s.RowLoss, s.ExpertCounts,
			s.RouterEntropy)
		for _, p := range m.Parameters() {
			h := fnv.New64a()
			binary.Write(h, binary.LittleEndian, numbers(t, m, p.Grad))
			fmt.Fprintf(&b, "%s %x\n", p.Name, h.Sum64())
		}
	}
	return b.String()
}

// share divides the rows of a batch.
func share(b Batch, rows []int) []Batch {
	var parts []Batch
	first, width := 0, b.SequenceLength+1
	for _, n := range rows {
		part := Batch{Tokens: b.Tokens[first*width : (first+n)*width], Rows: n, SequenceLength: b.SequenceLength}
		if b.Begin != nil {
			part.Begin, part.Counted = b.Begin[first*(width-1):(first+n)*(width-1)],
				b.Counted[first*(width-1):(first+n)*(width-1)]
		}
		parts = append(parts, part)
		first += n
	}
	return parts
}

// raggedRows lists numbers of rows by the number of ranks; from three ranks on, some ranks have
// none.
var raggedRows = map[int][]int{1: {5}, 2: {3, 2}, 4: {2, 0, 3, 0}}

// parallelCases are models whose experts can be shared by 2 and 4 ranks.
func parallelCases(t testing.TB) map[string]Config {
	cases := gradientCases(t)
	few, all := cases["nano"], cases["nano"]
	few.Experts, few.ExpertsPerToken = 64, 1 // most have no tokens
	all.Experts, all.ExpertsPerToken = 4, 4  // every rank gets every token
	all.Architecture, all.NormTopK = Mixtral, true
	return map[string]Config{"nano": cases["nano"], "gqa": cases["gqa"], "idle experts": few, "every expert": all,
		"dense layer": cases["dense layer"], "deepseek_v3": cases["deepseek_v3"]}
}

var dispatches = []Dispatch{AllToAll, AllGather}

// Ranks that share experts compute the results of one rank for all their batches: losses, logits,
// and the gradients of all parameters, of the experts without a factor.
func TestParallelEqualsWhole(t *testing.T) {
	const tolerance = 1e-5
	for name, cfg := range parallelCases(t) {
		for _, n := range []int{1, 2, 4} {
			whole := newModel(t, cfg, 2)
			randomize(whole, 1)
			batch := randomBatch(cfg, 5, 21, 2)
			for _, loss := range []LossOptions{{}, fullLoss(cfg), {Aux: AuxMegaBlocks, AuxCoefficient: 0.1},
				{Aux: AuxSequence, AuxCoefficient: 0.1}} {
				if raceDetector && loss.Aux != AuxHF { // the ranks do the same with all of them
					continue
				}
				// The load-balancing loss is each rank's own, so the whole model takes their
				// batches one by one. Without it the batches are one.
				batches := share(batch, raggedRows[n])
				opts := BackwardOptions{Targets: int64(batch.Rows * batch.SequenceLength), Loss: loss}
				inTurn := batches
				if loss == (LossOptions{}) {
					inTurn = []Batch{batch}
				}
				whole.ZeroGradients()
				var want []Stats
				var logits []float32
				for _, b := range inTurn {
					if b.Rows == 0 {
						want = append(want, Stats{})
						continue
					}
					stats, err := whole.Backward(t.Context(), b, opts)
					if err != nil {
						t.Fatal(err)
					}
					want = append(want, copyStats(stats))
					logits = append(logits, finalLogits(t, whole, b)...)
				}
				for _, dispatch := range dispatches {
					what := fmt.Sprintf("%s, %d ranks, %s, %+v", name, n, dispatch, loss)
					g := newRanks(t, cfg, n, 1, Parallel{Dispatch: dispatch}, nil)
					for _, m := range g.models {
						randomize(m, 1)
					}
					got := g.backward(t, batches, opts)
					if len(want) < n {
						got = []Stats{joined(got)}
					}
					for i, s := range got {
						compareStats(t, what, s, want[i], tolerance)
					}
					grads := g.gradients(t)
					if len(grads) != len(whole.Parameters()) {
						t.Errorf("%s: %d parameters, want %d", what, len(grads), len(whole.Parameters()))
					}
					for _, p := range whole.Parameters() {
						if e := relative(grads[p.Name], p.Grad.Floats()); !(e <= tolerance) {
							t.Errorf("%s: gradient of %s differs by %g", what, p.Name, e)
						}
					}
					pieces := make([][]float32, n)
					for _, err := range g.each(func(r int, m *Model) error {
						_, err := m.Forward(t.Context(), batches[r])
						pieces[r] = headProduct(m)
						return err
					}) {
						if err != nil {
							t.Fatal(err)
						}
					}
					if e := relative(slices.Concat(pieces...), logits); !(e <= tolerance) {
						t.Errorf("%s: logits differ by %g", what, e)
					}
				}
			}
		}
	}
}

// finalLogits are the logits of all tokens of a batch.
func finalLogits(t testing.TB, m *Model, b Batch) []float32 {
	t.Helper()
	if _, err := m.Forward(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	return headProduct(m)
}

// headProduct are the logits of the batch of the last Forward.
func headProduct(m *Model) []float32 {
	n, v := m.ws.h.Dim(0), m.cfg.VocabSize
	logits := make([]float32, n*v)
	m.dev.MatMul(xpu.Of(logits, n, v), m.ws.h, m.head.w.T(),
		xpu.MatMulOptions{})
	return logits
}

// joined returns the statistics that one rank would have measured, without values that are not
// sums.
func joined(parts []Stats) Stats {
	sum := Stats{Aux: math.NaN(), Z: math.NaN()}
	for _, s := range parts {
		sum.Loss += s.Loss
		sum.Targets += s.Targets
		sum.RowLoss = append(sum.RowLoss, s.RowLoss...)
		if sum.ExpertCounts == nil {
			sum.ExpertCounts = s.ExpertCounts
			continue
		}
		for l := range s.ExpertCounts {
			for e, n := range s.ExpertCounts[l] {
				sum.ExpertCounts[l][e] += n
			}
		}
	}
	return sum
}

func compareStats(t *testing.T, what string, got, want Stats, tolerance float64) {
	t.Helper()
	near := func(field string, got, want []float64) {
		t.Helper()
		if len(got) != len(want) {
			t.Errorf("%s: %d values of %s, want %d", what, len(got), field, len(want))
			return
		}
		for i := range got {
			if !(math.Abs(got[i]-want[i]) <= tolerance*math.Abs(want[i])) {
				t.Errorf("%s: %s is %v, want %v", what, field, got, want)
				return
			}
		}
	}
	near("loss", []float64{got.Loss}, []float64{want.Loss})
	if got.Targets == 0 {
		if got.Loss != 0 || got.Aux != 0 || got.Z != 0 {
			t.Errorf("%s: a rank without rows has losses %v, %v and %v", what, got.Loss, got.Aux, got.Z)
		}
		return
	}
	near("loss of rows", got.RowLoss, want.RowLoss)
	for l := range want.ExpertCounts {
		if !slices.Equal(got.ExpertCounts[l], want.ExpertCounts[l]) {
			t.Errorf("%s: expert counts of layer %d are %v, want %v", what, l, got.ExpertCounts[l],
				want.ExpertCounts[l])
		}
	}
	if !math.IsNaN(got.Aux) {
		near("load-balancing loss", []float64{got.Aux}, []float64{want.Aux})
		near("z-loss", []float64{got.Z}, []float64{want.Z})
		near("router entropy", got.RouterEntropy, want.RouterEntropy)
	}
}

// Both ways of dispatch, with and without recomputation, with any number of threads, in models that
// did other things before, give the same bits.
func TestParallelBits(t *testing.T) {
	longtest.SkipIfShort(t)
	for name, cfg := range parallelCases(t) {
		cfg.Layers = 3
		for _, n := range []int{2, 4} {
			batches := share(randomBatch(cfg, 5, 30, 2), raggedRows[n])
			opts := BackwardOptions{Targets: 150, Loss: fullLoss(cfg)}
			want := ""
			for _, dispatch := range dispatches {
				for _, threads := range []int{1, 3} {
					g := newRanks(t, cfg, n, threads, Parallel{Dispatch: dispatch}, nil)
					for _, m := range g.models {
						randomize(m, 1)
					}
					for call, recompute := range []Recompute{RecomputeNone, RecomputeExperts, RecomputeLayers, ""} {
						for _, m := range g.models {
							m.SetRecompute(recompute)
						}
						// Other batches in between leave their numbers in the buffers, and the
						// ranks change places.
						g.backward(t, share(randomBatch(cfg, 5, 7+10*call, 3), backwards(raggedRows[n])),
							BackwardOptions{Targets: 1000})
						for _, m := range g.models {
							m.ZeroGradients()
						}
						got := g.bits(t, g.backward(t, batches, opts))
						if want == "" {
							want = got
						}
						if got != want {
							t.Errorf("%s, %d ranks, %s, %d threads, call %d, recompute %v: other bits", name, n,
								dispatch, threads, call, recompute)
						}
					}
				}
			}
		}
	}
}

func backwards(x []int) []int {
	x = slices.Clone(x)
	slices.Reverse(x)
	return x
}

// A group of one rank is the whole model, to the bit.
func TestGroupOfOneIsTheWholeModel(t *testing.T) {
	for name, cfg := range gradientCases(t) {
		whole := newModel(t, cfg, 1)
		g := newRanks(t, cfg, 1, 1, Parallel{Dispatch: AllGather}, nil)
		randomize(whole, 1)
		randomize(g.models[0], 1)
		batch := randomBatch(cfg, 2, 9, 2)
		if _, err := whole.Backward(t.Context(), batch, BackwardOptions{Loss: fullLoss(cfg)}); err != nil {
			t.Fatal(err)
		}
		g.backward(t, []Batch{batch}, BackwardOptions{Loss: fullLoss(cfg)})
		if !slices.Equal(grads(t, whole), grads(t, g.models[0])) {
			t.Errorf("%s: other gradients", name)
		}
		for _, traffic := range g.comms[0].Traffic() {
			if traffic.Calls != 0 {
				t.Errorf("%s: %+v", name, traffic)
			}
		}
	}
}

// Gradients of a model whose experts two ranks share agree with central differences of the
// reference, in which the losses of the step and of the router are means over the ranks' targets.
// The derivative along a tensor's own gradient is its norm.
func TestParallelGradientsAgainstCentralDifferences(t *testing.T) {
	const step, tolerance = 1e-5, 1e-4
	cfg := mustPreset(t, "mula-nano")
	cfg.VocabSize, cfg.HiddenSize, cfg.IntermediateSize, cfg.Experts, cfg.ExpertsPerToken = 32, 32, 16, 6, 2
	whole := newModel(t, cfg, 1)
	randomize(whole, 3)
	batches := share(randomBatch(cfg, 3, 5, 4), []int{2, 1})
	for _, dispatch := range dispatches {
		g := newRanks(t, cfg, 2, 1, Parallel{Dispatch: dispatch}, nil)
		for _, m := range g.models {
			randomize(m, 3)
		}
		g.backward(t, batches, BackwardOptions{Targets: 15, Loss: LossOptions{Aux: AuxHF, AuxCoefficient: 1,
			ZCoefficient: 1}})
		ref := newReference(whole)
		loss := func() float64 {
			sum := 0.0
			for _, b := range batches {
				l := ref.losses(b)
				sum += float64(b.Rows) / 3 * (l.ce + l.hf + l.z)
			}
			return sum
		}
		for name, grad := range g.gradients(t) {
			norm := 0.0
			for _, v := range grad {
				norm += float64(v) * float64(v)
			}
			if norm = math.Sqrt(norm); norm == 0 {
				t.Errorf("%s: %s has no gradient", dispatch, name)
				continue
			}
			w := ref.weights[name]
			at := slices.Clone(w)
			move := func(f float64) float64 {
				for i, v := range grad {
					w[i] = at[i] + f*float64(v)/norm
				}
				return loss()
			}
			if got := (move(step) - move(-step)) / (2 * step); !(math.Abs(got-norm) <= tolerance*norm) {
				t.Errorf("%s: the gradient of %s has norm %v, the derivative along it is %v", dispatch, name, norm, got)
			}
			copy(w, at)
		}
	}
}

// A rank sends the bytes that the formula computes from the routes of its tokens. With uniform
// routing the number is known beforehand.
func TestDispatchBytes(t *testing.T) {
	cfg := mustPreset(t, "mula-nano")
	cfg.Layers = 3
	for _, n := range []int{2, 4} {
		for _, dispatch := range dispatches {
			for _, uniform := range []bool{false, true} {
				for _, recompute := range levels {
					what := fmt.Sprintf("%d ranks, %s, uniform %v, recompute %v", n, dispatch, uniform, recompute)
					g := newRanks(t, cfg, n, 1, Parallel{Dispatch: dispatch, UniformRouting: uniform}, nil)
					for _, m := range g.models {
						randomize(m, 1)
						m.SetRecompute(recompute)
					}
					batches := share(randomBatch(cfg, 5, 21, 2), raggedRows[n])
					g.backward(t, batches, BackwardOptions{Targets: 105})
					// copies[l][from][to] tokens, counted from the choices of experts.
					copies := make([][][]int64, cfg.Layers)
					for l := range copies {
						copies[l] = make([][]int64, n)
						for from, m := range g.models {
							copies[l][from] = make([]int64, n)
							chosen := m.ws.saved[l].routing.Chosen.Ints()
							for first := 0; first < len(chosen); first += cfg.ExpertsPerToken {
								for to := range n {
									if dispatch == AllGather ||
										slices.ContainsFunc(chosen[first:first+cfg.ExpertsPerToken],
											func(e int32) bool { return int(e)*n/cfg.Experts == to }) {
										copies[l][from][to]++
									}
								}
							}
							for to := range n {
								if want := cfg.UniformCopies(dispatch, n, to, batches[from].Rows*21); uniform &&
									copies[l][from][to] != want {
									t.Errorf("%s: %d tokens from rank %d to %d, UniformCopies says %d", what,
										copies[l][from][to], from, to, want)
								}
							}
						}
					}
					for r, c := range g.comms {
						want := int64(0)
						for l := range cfg.Layers {
							sent, got := int64(0), int64(0)
							for other := range n {
								if other != r {
									sent += copies[l][r][other]
									got += copies[l][other][r]
								}
							}
							b := cfg.DispatchBytes(dispatch, n, sent, got)
							want += b.Forward + b.Backward
							if recompute != RecomputeNone && l < cfg.Layers-1 {
								want += b.Recompute
							}
							if l == 0 {
								want += b.Pass
							}
						}
						got := int64(0)
						for _, traffic := range c.Traffic() {
							got += traffic.Bytes()
							if dispatch == AllGather && traffic.Operation == comm.OpAllToAll && traffic.Calls > 0 ||
								dispatch == AllToAll && traffic.Operation != comm.OpAllToAll && traffic.Calls > 0 {
								t.Errorf("%s: %+v", what, traffic)
							}
						}
						if got != want {
							t.Errorf("%s, rank %d: %d bytes sent, the formula says %d", what, r, got, want)
						}
					}
				}
			}
		}
	}
}

// The figures of the derivation for random choices of distinct experts, and the table of all-gather
// and reduce-scatter.
func TestExpectedCopies(t *testing.T) {
	c := mustPreset(t, "mula-7b-a1b")
	for _, test := range []struct {
		experts, ranks int
		want           float64
	}{{96, 12, 5.67}, {144, 12, 5.62}, {240, 12, 5.58}, {64, 8, 4.75}, {64, 4, 2.74}, {64, 1, 0}, {8, 2, 1}} {
		c.Experts = test.experts
		if got := c.ExpectedCopies(AllToAll, test.ranks); math.Abs(got-test.want) > 0.005 {
			t.Errorf("%d experts, %d ranks: %v copies, want %v", test.experts, test.ranks, got, test.want)
		}
		if got := c.ExpectedCopies(AllGather, test.ranks); got != float64(test.ranks-1) {
			t.Errorf("all-gather among %d ranks: %v copies", test.ranks, got)
		}
	}
	const tokens = 100
	got := c.DispatchBytes(AllGather, 12, 11*tokens, 11*tokens)
	if h := int64(c.HiddenSize); got.Forward != 4*(22*tokens*h+11*tokens*16) ||
		got.Backward != 4*(22*tokens*h+11*tokens*8) || got.Recompute != 4*11*tokens*h || got.Pass != 44 {
		t.Errorf("%+v", got)
	}
}

// With uniform routing the experts get equally many tokens, each with the weight that the router
// gives it, in a whole model as well.
func TestUniformRouting(t *testing.T) {
	cfg := mustPreset(t, "mula-nano")
	whole, err := NewParallel(cfg, newModel(t, cfg, 1).dev, Parallel{Mesh: comm.NewSingleMesh(), UniformRouting: true})
	if err != nil {
		t.Fatal(err)
	}
	g := newRanks(t, cfg, 2, 1, Parallel{UniformRouting: true}, nil)
	batch := randomBatch(cfg, 4, 8, 2)
	batches := share(batch, []int{2, 2})
	opts := BackwardOptions{Targets: 32}
	for _, m := range append(g.models, whole) {
		randomize(m, 1)
	}
	stats, err := whole.Backward(t.Context(), batch, opts)
	if err != nil {
		t.Fatal(err)
	}
	for l, counts := range stats.ExpertCounts {
		for _, n := range counts {
			if n != 8 {
				t.Fatalf("layer %d: %v", l, counts)
			}
		}
		r := &whole.ws.saved[l].routing
		weight, rowOf, probs := r.Weight.Floats(), r.RowOf.Ints(), r.Probs.Floats()
		for pair, e := range r.Chosen.Ints() {
			token := pair / 2
			if int(e) != pair%8 || weight[rowOf[pair]] != probs[token*8+int(e)] {
				t.Fatalf("layer %d, token %d: expert %d with weight %v", l, token, e, weight[rowOf[pair]])
			}
		}
	}
	compareStats(t, "two ranks", joined(g.backward(t, batches, opts)), copyStats(stats), 1e-5)
	for name, grad := range g.gradients(t) {
		if e := relative(grad, byName(whole, name).Grad.Floats()); !(e < 1e-5) {
			t.Errorf("gradient of %s differs by %g", name, e)
		}
	}
}

// In every layout, a tensor starts with the same weights, is read from the same range of a file,
// and has the same number in the list.
func TestParallelWeights(t *testing.T) {
	for _, dir := range []string{"testdata/hf-single", "testdata/hf-sharded", "testdata/hf-fused",
		"testdata/hf-mixtral", "testdata/hf-granitemoe"} {
		dev := cpu.New(1, xpu.FP32)
		defer dev.Close()
		whole, err := Open(dir, dev)
		if err != nil {
			t.Fatal(err)
		}
		cfg := whole.Config()
		for what, give := range map[string]func(m *Model) error{
			"Load": func(m *Model) error { return m.Load(filesystem.OS{}, dir) },
			"Init": func(m *Model) error { m.Init(7); return nil },
		} {
			if err := give(whole); err != nil {
				t.Fatal(err)
			}
			for _, n := range []int{2, 4} {
				if cfg.Experts%n != 0 {
					t.Fatalf("%s has %d experts; the test wants a multiple of 4", dir, cfg.Experts)
				}
				g := newRanks(t, cfg, n, 1, Parallel{}, nil)
				held := map[int]int{}
				for r, m := range g.models {
					if err := give(m); err != nil {
						t.Fatal(err)
					}
					last, elements := -1, 0
					for _, p := range m.Parameters() {
						want := whole.Parameters()[p.Index]
						if p.Name != want.Name || !slices.Equal(p.Shape, want.Shape) ||
							!slices.Equal(p.Weight.Floats(), want.Weight.Floats()) || p.Divided != want.Divided {
							t.Errorf("%s of %s, rank %d of %d: %s is not %s of the whole model", what, dir, r, n,
								p.Name, want.Name)
						}
						if p.Divided != strings.Contains(p.Name, "experts") || p.Index <= last {
							t.Errorf("%s: divided %v, number %d after %d", p.Name, p.Divided, p.Index, last)
						}
						last = p.Index
						elements += p.Weight.Elements()
						held[p.Index]++
					}
					if want := cfg.Memory(Pass{Rows: 1, SequenceLength: 1,
						Shape: m.parallel.Mesh.Shape}).Weights; want != 4*int64(elements) || elements != len(weights(t,
						m)) {
						t.Errorf("rank %d of %d: %d weights in %d, Memory says %d bytes", r, n, elements,
							len(weights(t, m)), want)
					}
				}
				for i, p := range whole.Parameters() {
					want := n
					if p.Divided {
						want = 1
					}
					if held[i] != want || p.Index != i {
						t.Errorf("%d ranks: %s, number %d, is held by %d ranks", n, p.Name, p.Index, held[i])
					}
				}
			}
		}
	}
}

// Buckets cover all weights, each holds its parameters without gaps, and Done comes when nothing
// more is added to one.
func TestBuckets(t *testing.T) {
	cases := gradientCases(t)
	tied := cases["nano"]
	tied.TieEmbeddings = true
	cases["tied"] = tied
	for name, cfg := range cases {
		for _, n := range []int{1, 2} {
			if n > 1 && !cfg.moe() {
				continue
			}
			for _, recompute := range levels {
				g := newRanks(t, cfg, n, 2, Parallel{}, nil)
				batches := share(randomBatch(cfg, 4, 9, 2), [][]int{1: {4}, 2: {3, 1}}[n])
				for r, err := range g.each(func(r int, m *Model) error {
					randomize(m, 1)
					m.SetRecompute(recompute)
					buckets := m.Buckets()
					want := 2 + cfg.Layers // layers, head, embedding
					want += len(cfg.ExpertLayers(0, cfg.Layers))
					if cfg.TieEmbeddings {
						want--
					}
					if len(buckets) != want {
						t.Errorf("%s: %d buckets, want %d", name, len(buckets), want)
					}
					var complete [][]float32
					_, err := m.Backward(t.Context(), batches[r], BackwardOptions{Targets: 36, Loss: fullLoss(cfg),
						Done: func(b int) {
							if b != len(complete) {
								t.Errorf("%s: bucket %d is complete after %d others", name, b, len(complete))
							}
							complete = append(complete, slices.Clone(buckets[b].Grad.Floats()))
						}})
					if err != nil {
						return err
					}
					if len(complete) != len(buckets) {
						return fmt.Errorf("%d of %d buckets are complete", len(complete), len(buckets))
					}
					seen := map[string]bool{}
					for i, b := range buckets {
						if !slices.Equal(b.Grad.Floats(), complete[i]) {
							t.Errorf("%s, recompute %v: bucket %d of %s… changed after Done", name, recompute, i,
								b.Parameters[0].Name)
						}
						at := 0
						for _, p := range b.Parameters {
							if &p.Weight.Floats()[0] != &b.Weight.Floats()[at] ||
								&p.Grad.Floats()[0] != &b.Grad.Floats()[at] || p.Divided != b.Divided || seen[p.Name] {
								t.Errorf("%s: %s does not lie at %d of bucket %d", name, p.Name, at, i)
							}
							seen[p.Name] = true
							at += p.Weight.Elements()
						}
						if at != b.Weight.Elements() || at != b.Grad.Elements() {
							t.Errorf("%s: bucket %d has %d weights and %d gradients for parameters of %d", name, i,
								b.Weight.Elements(), b.Grad.Elements(), at)
						}
					}
					if len(seen) != len(m.Parameters()) {
						t.Errorf("%s: %d parameters in buckets, want %d", name, len(seen), len(m.Parameters()))
					}
					return nil
				}) {
					if err != nil {
						t.Errorf("%s, rank %d: %v", name, r, err)
					}
				}
			}
		}
	}
}

func TestRefusedParallel(t *testing.T) {
	nano, dense := mustPreset(t, "mula-nano"), gradientCases(t)["dense"]
	dev := newModel(t, nano, 1).dev
	for _, test := range []struct {
		cfg  Config
		n    int
		p    Parallel
		want string
	}{
		{nano, 3, Parallel{}, "ep is 3, which does not divide the 8 experts of a layer; possible: 1, 2, 4, 8"},
		{nano, 16, Parallel{}, "possible: 1, 2, 4, 8"},
		{dense, 2, Parallel{}, "ep is 2, but a dense model has no experts to divide"},
		{nano, 2, Parallel{Dispatch: "post"}, `unknown dispatch "post"; the choices are "alltoall" and "allgather"`},
	} {
		test.p.Mesh = &comm.Mesh{Shape: comm.NewShape(map[comm.Axes]int{comm.EP: test.n})}
		if _, err := NewParallel(test.cfg, dev, test.p); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("error %v, want one with %q", err, test.want)
		}
	}
	m := newRanks(t, nano, 2, 1, Parallel{}, nil).models[0]
	_, logits := m.Logits(t.Context(), []uint32{1})
	_, targets := m.Backward(t.Context(), randomBatch(nano, 1, 4, 1), BackwardOptions{})
	for _, test := range []struct {
		err  error
		want string
	}{
		{m.Save(t.Context(), t.TempDir(), SaveOptions{}), "this rank holds 1/2 of the experts"},
		{m.Generate(t.Context(), []uint32{1}, GenerateOptions{MaxTokens: 1}, func(uint32) bool { return true }),
			"this rank holds 1/2 of the experts"},
		{logits, "this rank holds 1/2 of the experts"},
		{targets, "set Targets"},
	} {
		if test.err == nil || !strings.Contains(test.err.Error(), test.want) {
			t.Errorf("error %v, want one with %q", test.err, test.want)
		}
	}
}

// A faultyLink lets its rank fail at its n-th exchange.
type faultyLink struct {
	comm.Transport
	left int
	fail func() error
}

func (l *faultyLink) Split(ctx context.Context, color, key int) (comm.Transport, error) {
	part, err := l.Transport.Split(ctx, color, key)
	if part == nil {
		return nil, err
	}
	return &faultyLink{part, l.left, l.fail}, err
}

func (l *faultyLink) AllToAll(ctx context.Context, send, recv [][]byte) error {
	if l.left--; l.left < 0 {
		return l.fail()
	}
	return l.Transport.AllToAll(ctx, send, recv)
}

func (l *faultyLink) AllGather(ctx context.Context, own []byte, all [][]byte) error {
	if l.left--; l.left < 0 {
		return l.fail()
	}
	return l.Transport.AllGather(ctx, own, all)
}

// Wherever a rank fails, or its context ends, every rank gets an error with the location, and no
// rank waits forever.
func TestRankFails(t *testing.T) {
	cfg := mustPreset(t, "mula-nano")
	batches := share(randomBatch(cfg, 5, 9, 2), []int{3, 2})
	mine := errors.New("the cable is out")
	for _, dispatch := range dispatches {
		for _, recompute := range levels {
			for _, cancelled := range []bool{false, true} {
				exchanges := 0
				for done := false; !done; exchanges++ {
					ctx, cancel := context.WithCancel(t.Context())
					ranks := 0
					g := newRanks(t, cfg, 2, 1, Parallel{Dispatch: dispatch}, func(link comm.Transport) comm.Transport {
						if ranks++; ranks == 1 {
							return link
						}
						return &faultyLink{link, exchanges, func() error {
							if cancelled { // rank 0 waits for this one, which does not come
								cancel()
								return mine
							}
							return mine
						}}
					})
					errs := g.each(func(r int, m *Model) error {
						m.SetRecompute(recompute)
						randomize(m, 1)
						_, err := m.Backward(ctx, batches[r], BackwardOptions{Targets: 45})
						if err != nil && cancelled && r == 1 {
							return nil // it does not leave the group either
						}
						return err
					})
					cancel()
					if done = errs[0] == nil && errs[1] == nil; done {
						break
					}
					want := comm.ErrPeerLost
					if cancelled {
						want = context.Canceled
					} else if !errors.Is(errs[1], mine) {
						t.Errorf("%s, exchange %d: error %v, want that of the link", dispatch, exchanges, errs[1])
					}
					if !errors.Is(errs[0], want) ||
						!strings.Contains(errs[0].Error(), "rank 0 of 2 that share the experts") {
						t.Errorf("%s, exchange %d: error %v, want %v", dispatch, exchanges, errs[0], want)
					}
				}
				if least := 5 * cfg.Layers; exchanges < least {
					t.Errorf("%s: a pass has %d exchanges, want at least %d", dispatch, exchanges, least)
				}
			}
		}
	}
}

// Buffers are planned where ranks share the experts, too: as many bytes as Memory says, if the
// routing is balanced.
func TestParallelBuffersArePlanned(t *testing.T) {
	cfg := mustPreset(t, "mula-nano")
	// of 8: every token has one on both ranks, so the expected number of copies is exact
	cfg.Layers, cfg.ExpertsPerToken = 5, 5
	for _, dispatch := range dispatches {
		sizes := map[Recompute]int64{}
		for _, recompute := range levels {
			g := newRanks(t, cfg, 2, 1, Parallel{Dispatch: dispatch, UniformRouting: true}, nil)
			for _, m := range g.models {
				m.SetRecompute(recompute)
				m.Init(1)
			}
			g.backward(t, share(randomBatch(cfg, 8, 128, 1), []int{4, 4}), BackwardOptions{Targets: 1024})
			want := cfg.Memory(Pass{Rows: 4, SequenceLength: 128, Recompute: recompute,
				Shape:    g.models[0].parallel.Mesh.Shape,
				Dispatch: dispatch})
			for r, m := range g.models {
				got := arenaBytes(m) + dispatchBytes(m)
				if dispatch == AllGather {
					got += comm.SumMemory(2, 512*(cfg.HiddenSize+cfg.ExpertsPerToken), 4) // of the group
				}
				if got != want.Buffers || want.Gradients != int64(4*len(grads(t, m))) {
					t.Errorf("%s, rank %d, recompute %v: buffers take %d bytes, Memory says %+v", dispatch, r,
						recompute, got, want)
				}
				sizes[recompute] = got
			}
		}
		checkSaved(t, string(dispatch), sizes)
	}
}

// dispatchBytes is the memory that a dispatch has asked for, but for what depends on the number of
// ranks alone.
func dispatchBytes(m *Model) int64 {
	d := m.block.(*dispatch)
	n, words := cap(d.choices), 0
	for _, s := range []stock{d.back, d.gathered, d.expert, d.act, d.dact, d.dweight, d.tokenWeights} {
		n += s.whole.Elements()
	}
	memory := []layerMemory{d.memory}
	for _, f := range m.flights {
		for i := range f.ways {
			w := &f.ways[i]
			n += cap(w.place) + cap(w.rowOf) + w.counts.whole.Elements() + w.tokenOf.whole.Elements() +
				w.weight.whole.Elements()
			words += len(w.sent) + len(w.received)
		}
		memory = append(memory, f.memory...)
	}
	gateUp := int64(0)
	for _, b := range memory {
		n += b.x.whole.Elements()
		gateUp += int64(b.gateUp.whole.Elements() * b.gateUp.whole.DType().Bytes())
	}
	if c, ok := d.courier.(*directCourier); ok {
		n += cap(c.sentRows) + cap(c.sentChoices)
	}
	return 4*int64(n) + gateUp + 8*int64(words)
}

// A step of a shape and routing that has been seen allocates none of its buffers again, whatever
// the links do.
func TestParallelStepsDoNotGrow(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector allocates")
	}
	cfg := mustPreset(t, "mula-nano")
	for _, dispatch := range dispatches {
		for _, recompute := range levels {
			g := newRanks(t, cfg, 2, 1, Parallel{Dispatch: dispatch}, nil)
			for _, m := range g.models {
				m.SetRecompute(recompute)
				m.Init(1)
			}
			large, small := share(randomBatch(cfg, 8, 128, 1), []int{3, 5}), share(randomBatch(cfg, 3, 30, 1),
				[]int{3, 0})
			step := func() {
				for _, b := range [][]Batch{large, small} {
					g.backward(t, b, BackwardOptions{Targets: 1024, Loss: fullLoss(cfg)})
				}
			}
			for range 3 {
				step()
			}
			var before, after runtime.MemStats
			least := uint64(math.MaxUint64)
			for range 5 {
				runtime.ReadMemStats(&before)
				step()
				runtime.ReadMemStats(&after)
				least = min(least, after.TotalAlloc-before.TotalAlloc)
			}
			t.Logf("%s, recompute %v: %d bytes", dispatch, recompute, least)
			if most := uint64(4 * 30 * cfg.HiddenSize * 4); least > most { // a quarter of the smallest buffer of rows
				t.Errorf("%s, recompute %v: a step allocates %d bytes, want at most %d", dispatch, recompute, least,
					most)
			}
		}
	}
}

// BenchmarkParallelBackward is a pass of two ranks, a thread each, over half of the batch of
// BenchmarkBackward each.
func BenchmarkParallelBackward(b *testing.B) {
	cfg := mustPreset(b, "mula-tiny")
	for _, dispatch := range dispatches {
		b.Run(string(dispatch), func(b *testing.B) {
			g := newRanks(b, cfg, 2, 1, Parallel{Dispatch: dispatch}, nil)
			for _, m := range g.models {
				m.Init(1)
			}
			batches, opts := share(randomBatch(cfg, 8, 256, 1), []int{4, 4}), BackwardOptions{Targets: 2048,
				Loss: fullLoss(cfg)}
			g.backward(b, batches, opts)
			for b.Loop() {
				g.backward(b, batches, opts)
			}
			b.ReportMetric(float64(b.N)*8*256/b.Elapsed().Seconds(), "tokens/s")
		})
	}
}
