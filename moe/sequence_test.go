package moe

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"

	"mula/xpu"
	"mula/xpu/comm"
	"mula/xpu/cpu"
	"mula/xpu/discrete"
)

// newSequenceRanks makes the models of a mesh whose consecutive n data ranks share sequences.
func newSequenceRanks(t testing.TB, device func() xpu.Device, c Config, shape comm.Shape, n int) rankGroup {
	t.Helper()
	meshes := newMeshes(t, shape, nil)
	g := rankGroup{models: make([]*Model, len(meshes)), comms: make([]*comm.Comm, len(meshes))}
	errs := make([]error, len(meshes))
	var ranks sync.WaitGroup
	for r, mesh := range meshes {
		dev := device()
		t.Cleanup(dev.Close)
		ranks.Go(func() {
			if g.comms[r], errs[r] = mesh.Consecutive(t.Context(), comm.Data, n); errs[r] == nil {
				g.models[r], errs[r] = NewParallel(c, dev, Parallel{Mesh: mesh, Sequence: g.comms[r]})
			}
		})
	}
	ranks.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return g
}

// Ranks that share sequences compute the results of one rank: the losses of each token with the
// same bits if the ranks do not share experts, and the gradients up to the order of their sums.
// Devices with memory of their own compute the same bits.
func TestSequenceEqualsWhole(t *testing.T) {
	const tolerance = 1e-5
	cases := gradientCases(t)
	for _, test := range []struct {
		name         string
		expertDP, ep int
		n, rows, s   int
		documents    []int
		recompute    Recompute
	}{
		{name: "nano", expertDP: 2, ep: 1, n: 2, rows: 2, s: 12},
		{name: "nano", expertDP: 1, ep: 4, n: 4, rows: 3, s: 8, recompute: RecomputeExperts},
		{name: "nano", expertDP: 2, ep: 2, n: 2, rows: 2, s: 6, documents: []int{4, 1, 2}},
		{name: "gqa", expertDP: 1, ep: 2, n: 2, rows: 2, s: 10, recompute: RecomputeLayers, documents: []int{1, 7, 3}},
		{name: "dense", expertDP: 4, ep: 1, n: 4, rows: 1, s: 16, recompute: RecomputeLayers},
		{name: "dense layer", expertDP: 1, ep: 2, n: 2, rows: 2, s: 6, recompute: RecomputeExperts},
		{name: "qwen2", expertDP: 2, ep: 1, n: 2, rows: 2, s: 4},
		{name: "deepseek_v3", expertDP: 1, ep: 2, n: 2, rows: 2, s: 6, documents: []int{4, 1, 2}},
		{name: "gpt_oss", expertDP: 1, ep: 2, n: 2, rows: 2, s: 6, documents: []int{4, 1, 2}},
		{name: "llama", expertDP: 2, ep: 1, n: 2, rows: 1, s: 70, documents: []int{3, 66, 2}},

		// More ranks than key and value heads.
		{name: "dense tied", expertDP: 2, ep: 1, n: 2, rows: 2, s: 6},
		{name: "dense tied", expertDP: 8, ep: 1, n: 8, rows: 2, s: 32, documents: []int{5, 20, 1, 8}},
		{name: "llama", expertDP: 3, ep: 1, n: 3, rows: 1, s: 9, recompute: RecomputeLayers},
		{name: "llama", expertDP: 4, ep: 1, n: 4, rows: 2, s: 280, documents: []int{3, 66, 150, 62}},
		{name: "nano", expertDP: 6, ep: 1, n: 6, rows: 2, s: 12, documents: []int{7, 1, 5}},
		{name: "gqa", expertDP: 4, ep: 2, n: 4, rows: 1, s: 8, recompute: RecomputeExperts},
		{name: "qwen2", expertDP: 4, ep: 1, n: 4, rows: 2, s: 12, documents: []int{4, 1, 8}},
		{name: "gpt_oss", expertDP: 2, ep: 2, n: 4, rows: 2, s: 12, documents: []int{4, 1, 8}},
		{name: "deepseek_v3", expertDP: 4, ep: 2, n: 8, rows: 1, s: 16, documents: []int{9, 8}},
	} {
		t.Run(fmt.Sprintf("%s, expert_dp %d, ep %d, %d ranks a sequence, %s", test.name, test.expertDP, test.ep,
			test.n, test.recompute), func(t *testing.T) {
			c := cases[test.name]
			whole := newModel(t, c, 1)
			randomize(whole, 1)
			sequences := test.expertDP * test.ep / test.n
			batch := randomBatch(c, sequences*test.rows, test.s, 2)
			if test.documents != nil {
				batch = inDocuments(batch, test.documents...)
			}
			opts := BackwardOptions{Targets: int64(batch.targets()), Tokens: int64(batch.Rows * batch.SequenceLength)}
			if c.moe() {
				opts.Loss = LossOptions{Aux: AuxSequence, AuxCoefficient: 0.5}
			}
			want, err := whole.Backward(t.Context(), batch, opts)
			if err != nil {
				t.Fatal(err)
			}
			want = copyStats(want)
			losses := slices.Clone(whole.ws.ce)

			shape := comm.NewShape(map[comm.Axes]int{comm.ExpertDP: test.expertDP, comm.EP: test.ep})
			rows := share(batch, slices.Repeat([]int{test.rows}, sequences))
			var batches []Batch
			for r := range shape.Ranks() {
				batches = append(batches, rows[r/test.n])
			}
			var bits []string
			for _, device := range []func() xpu.Device{
				func() xpu.Device { return cpu.New(1, xpu.FP32) },
				func() xpu.Device { return discrete.New(cpu.New(1, xpu.FP32)) },
			} {
				g := newSequenceRanks(t, device, c, shape, test.n)
				for _, m := range g.models {
					randomizeLike(m, whole)
					m.SetRecompute(test.recompute)
				}
				stats := g.backward(t, batches, opts)
				bits = append(bits, g.bits(t, stats))
				if len(bits) > 1 {
					break
				}
				far := 1e-12 // of sums of equal numbers
				if test.ep > 1 {
					far = 1e-7 // ranks that share experts add their outputs in another order
				} else {
					g.compareLosses(t, losses, batches, test.n)
				}
				loss, rowLoss, tokens, targets := 0.0, make([]float64, batch.Rows), 0, 0
				aux := 0.0
				for r, s := range stats {
					aux += s.Aux * float64(s.Tokens) / float64(opts.Tokens)
					loss, tokens, targets = loss+s.Loss, tokens+s.Tokens, targets+s.Targets
					for i, l := range s.RowLoss {
						rowLoss[r/test.n*test.rows+i] += l
					}
				}
				if math.Abs(aux-want.Aux) > 1e-6*want.Aux {
					t.Errorf("load-balancing loss %v, want %v", aux, want.Aux)
				}
				if tokens != want.Tokens || targets != want.Targets || math.Abs(loss/want.Loss-1) > far {
					t.Errorf("%d tokens, %d targets, loss %v; want %d, %d, %v", tokens, targets, loss, want.Tokens,
						want.Targets, want.Loss)
				}
				for i, l := range rowLoss {
					if math.Abs(l-want.RowLoss[i]) > far*want.RowLoss[i] {
						t.Errorf("row %d: loss %v, want %v", i, l, want.RowLoss[i])
					}
				}
				compareGradients(t, g.sumGradients(t), whole, tolerance)
			}
			if bits[0] != bits[1] {
				t.Error("a device with memory of its own computes other bits")
			}
		})
	}
}

// randomizeLike gives a model the weights of the complete model.
func randomizeLike(m, whole *Model) {
	for _, p := range m.params {
		m.dev.Write(p.Weight, byName(whole, p.Name).Weight.Floats())
	}
}

// compareLosses compares the cross entropy of each token with the complete model's.
func (g rankGroup) compareLosses(t testing.TB, want []float64, batches []Batch, n int) {
	t.Helper()
	first := 0
	for r, m := range g.models {
		length := batches[r].SequenceLength
		for i, ce := range m.ws.ce {
			own := length / n
			at := first + i/own*length + r%n*own + i%own
			if ce != want[at] {
				t.Errorf("rank %d, token %d: loss %v, want %v", r, i, ce, want[at])
			}
		}
		if r%n == n-1 {
			first += batches[r].Rows * length
		}
	}
}

// sumGradients returns the gradients of the complete model, by name, summed over all ranks that
// hold a parameter.
func (g rankGroup) sumGradients(t testing.TB) map[string][]float32 {
	t.Helper()
	sum := map[string][]float32{}
	for _, m := range g.models {
		for _, p := range m.Parameters() {
			grad := numbers(t, m, p.Grad)
			if sum[p.Name] == nil {
				sum[p.Name] = slices.Clone(grad)
			} else {
				cpu.Axpy(sum[p.Name], 1, grad)
			}
		}
	}
	return sum
}

func compareGradients(t testing.TB, got map[string][]float32, whole *Model, tolerance float64) {
	t.Helper()
	for _, p := range whole.Parameters() {
		var difference, norm float64
		for i, v := range p.Grad.Floats() {
			d := float64(got[p.Name][i]) - float64(v)
			difference += d * d
			norm += float64(v) * float64(v)
		}
		if !(math.Sqrt(difference) <= tolerance*math.Sqrt(norm)) {
			t.Errorf("%s: gradients differ by %g of their norm", p.Name, math.Sqrt(difference/norm))
		}
	}
}

// Ranks that share sequences refuse rows that they cannot divide.
func TestSequenceRefuses(t *testing.T) {
	c := gradientCases(t)["gqa"] // 2 KV heads
	shape := comm.NewShape(map[comm.Axes]int{comm.ExpertDP: 4})
	g := newSequenceRanks(t, func() xpu.Device { return cpu.New(1, xpu.FP32) }, c, shape, 2)
	for r, err := range g.each(func(_ int, m *Model) error {
		_, err := m.Backward(t.Context(), randomBatch(c, 1, 5, 1), BackwardOptions{})
		return err
	}) {
		if err == nil || !strings.Contains(err.Error(), "2 ranks cannot divide rows of 5 tokens equally") {
			t.Errorf("rank %d: %v", r, err)
		}
	}
}
