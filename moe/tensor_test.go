package moe

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"

	"mula/internal/filesystem"
	"mula/xpu"
	"mula/xpu/comm"
	"mula/xpu/cpu"
	"mula/xpu/discrete"
)

// newTensorRanks makes the models of a mesh in which cp consecutive ranks of [comm.Slices] share
// sequences, besides the ranks of [comm.TP].
func newTensorRanks(t testing.TB, device func() xpu.Device, c Config, shape comm.Shape, cp int) rankGroup {
	t.Helper()
	meshes := newMeshes(t, shape, nil)
	g := rankGroup{models: make([]*Model, len(meshes)), comms: make([]*comm.Comm, len(meshes))}
	errs := make([]error, len(meshes))
	var ranks sync.WaitGroup
	for r, mesh := range meshes {
		dev := device()
		t.Cleanup(dev.Close)
		ranks.Go(func() {
			heads, err := mesh.Consecutive(t.Context(), comm.Slices, cp)
			if err == nil {
				g.comms[r], err = mesh.Consecutive(t.Context(), comm.Data, cp*mesh.Size(comm.TP))
			}
			if err == nil {
				g.models[r], err = NewParallel(c, dev, Parallel{Mesh: mesh, Sequence: g.comms[r], Heads: heads})
			}
			errs[r] = err
		})
	}
	ranks.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return g
}

// A complete tensor consists of its slices.
func TestSlices(t *testing.T) {
	whole := []int{4, 6}
	tensor := make([]float32, 24)
	for i := range tensor {
		tensor[i] = float32(i)
	}
	for _, test := range []struct {
		Slice
		first []float32 // elements of the first two rows
	}{
		{Slice{Axis: 0, Rank: 1, Ranks: 2}, []float32{12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23}},
		{Slice{Axis: 1, Rank: 2, Ranks: 3}, []float32{4, 5, 10, 11}},
	} {
		joined := make([]float32, len(tensor))
		for rank := range test.Ranks {
			s := Slice{test.Axis, rank, test.Ranks}
			slice := make([]float32, len(tensor)/test.Ranks)
			s.Take(slice, tensor, 0, whole)
			if rank == test.Rank && !slices.Equal(slice[:len(test.first)], test.first) {
				t.Errorf("%+v: %v, want %v first", s, slice, test.first)
			}
			s.Put(joined, slice, whole)
			if shape := s.Shape(whole); !slices.Equal(s.Whole(shape), whole) {
				t.Errorf("%+v: the slice of %v has the shape %v", s, whole, shape)
			}
		}
		if !slices.Equal(joined, tensor) {
			t.Errorf("%+v: the slices join to %v", test.Slice, joined)
		}
	}
}

// sliceOf returns the part of a complete tensor's values that a parameter has.
func sliceOf(p *Parameter, values []float32) []float32 {
	if p.Slice.Ranks == 0 {
		return values
	}
	slice := make([]float32, p.Weight.Elements())
	p.Slice.Take(slice, values, 0, p.Slice.Whole(p.Shape))
	return slice
}

// Ranks that share matrices compute the losses and the gradients of one rank, up to the order of
// sums. Devices with memory of their own compute the same bits.
func TestTensorEqualsWhole(t *testing.T) {
	const tolerance = 1e-5
	cases := gradientCases(t)
	plain := cases["deepseek_v3"] // latent attention without a latent of queries
	plain.QueryRank = 0
	cases["plain queries"] = plain
	dense := cases["qwen3_moe"]
	dense.DenseLayers, dense.DenseSize = "1", 40
	cases["dense layers"] = dense
	wide := cases["gpt_oss"]
	wide.KVHeads = wide.Heads
	cases["gpt_oss wide"] = wide
	for _, test := range []struct {
		name             string
		expertDP, ep, tp int
		cp, rows, s      int
		documents        []int
		recompute        Recompute
	}{
		{name: "dense", expertDP: 1, ep: 1, tp: 2, cp: 1, rows: 1, s: 12},
		{name: "dense", expertDP: 1, ep: 1, tp: 4, cp: 1, rows: 2, s: 8, recompute: RecomputeLayers},
		{name: "llama", expertDP: 2, ep: 1, tp: 2, cp: 1, rows: 2, s: 70, documents: []int{3, 66, 2}},
		{name: "qwen2", expertDP: 1, ep: 1, tp: 2, cp: 1, rows: 3, s: 6, recompute: RecomputeExperts},
		{name: "dense", expertDP: 2, ep: 1, tp: 2, cp: 2, rows: 2, s: 8, documents: []int{5, 1, 3}},
		{name: "qwen3_moe", expertDP: 1, ep: 2, tp: 2, cp: 1, rows: 2, s: 6, recompute: RecomputeLayers},
		{name: "qwen3_moe", expertDP: 2, ep: 2, tp: 2, cp: 1, rows: 1, s: 10, documents: []int{1, 7, 3}},
		{name: "deepseek_v3", expertDP: 1, ep: 2, tp: 2, cp: 1, rows: 2, s: 6},
		{name: "plain queries", expertDP: 2, ep: 1, tp: 2, cp: 2, rows: 2, s: 8, documents: []int{5, 1, 3},
			recompute: RecomputeExperts},
		{name: "dense layer", expertDP: 1, ep: 2, tp: 2, cp: 1, rows: 2, s: 6},
		{name: "dense layer", expertDP: 2, ep: 1, tp: 2, cp: 1, rows: 1, s: 8, documents: []int{5, 1, 3},
			recompute: RecomputeLayers},
		{name: "ernie4_5_moe", expertDP: 1, ep: 2, tp: 2, cp: 1, rows: 2, s: 6},
		{name: "granitemoe", expertDP: 1, ep: 2, tp: 2, cp: 1, rows: 2, s: 6, recompute: RecomputeLayers},
		{name: "granitemoe", expertDP: 2, ep: 1, tp: 2, cp: 1, rows: 1, s: 8, documents: []int{5, 1, 3}},
		{name: "gpt_oss", expertDP: 1, ep: 2, tp: 2, cp: 1, rows: 2, s: 6},
		{name: "gpt_oss wide", expertDP: 2, ep: 1, tp: 2, cp: 2, rows: 2, s: 8, documents: []int{5, 1, 3},
			recompute: RecomputeLayers},
		{name: "dense layers", expertDP: 1, ep: 2, tp: 2, cp: 1, rows: 2, s: 6, recompute: RecomputeExperts},
		{name: "nano", expertDP: 1, ep: 2, tp: 2, cp: 1, rows: 2, s: 6},
		{name: "gqa", expertDP: 2, ep: 1, tp: 2, cp: 1, rows: 2, s: 8, documents: []int{5, 1, 3}},
		{name: "flex_olmo", expertDP: 2, ep: 1, tp: 2, cp: 1, rows: 1, s: 6, recompute: RecomputeLayers},

		// More ranks than key and value heads.
		{name: "dense", expertDP: 4, ep: 1, tp: 2, cp: 4, rows: 2, s: 16, documents: []int{5, 1, 11}},
		{name: "gpt_oss", expertDP: 2, ep: 1, tp: 2, cp: 2, rows: 2, s: 8, documents: []int{5, 1, 3},
			recompute: RecomputeLayers},
	} {
		t.Run(fmt.Sprintf("%s, expert_dp %d, ep %d, tp %d, cp %d, %s", test.name, test.expertDP, test.ep, test.tp,
			test.cp, test.recompute), func(t *testing.T) {
			c := cases[test.name]
			whole := newModel(t, c, 1)
			randomize(whole, 1)
			n := test.tp * test.cp
			shape := comm.NewShape(map[comm.Axes]int{comm.ExpertDP: test.expertDP, comm.EP: test.ep, comm.TP: test.tp})
			sequences := shape.Ranks() / n
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
			rows := share(batch, slices.Repeat([]int{test.rows}, sequences))
			var batches []Batch
			for r := range shape.Ranks() {
				batches = append(batches, rows[r/n])
			}
			var bits []string
			for _, device := range []func() xpu.Device{
				func() xpu.Device { return cpu.New(1, xpu.FP32) },
				func() xpu.Device { return discrete.New(cpu.New(1, xpu.FP32)) },
			} {
				g := newTensorRanks(t, device, c, shape, test.cp)
				for _, m := range g.models {
					for _, p := range m.params {
						m.dev.Write(p.Weight, sliceOf(p, byName(whole, p.Name).Weight.Floats()))
					}
					m.SetRecompute(test.recompute)
				}
				stats := g.backward(t, batches, opts)
				bits = append(bits, g.bits(t, stats))
				if len(bits) > 1 {
					break
				}
				loss, aux, tokens := 0.0, 0.0, 0
				rowLoss := make([]float64, batch.Rows)
				for r, s := range stats {
					aux += s.Aux * float64(s.Tokens) / float64(opts.Tokens)
					loss, tokens = loss+s.Loss, tokens+s.Tokens
					for i, l := range s.RowLoss {
						rowLoss[r/n*test.rows+i] += l
					}
				}
				if tokens != want.Tokens || math.Abs(loss/want.Loss-1) > 1e-6 ||
					math.Abs(aux-want.Aux) > 1e-6*want.Aux {
					t.Errorf("%d tokens, loss %v, load-balancing loss %v; want %d, %v, %v", tokens, loss, aux,
						want.Tokens, want.Loss, want.Aux)
				}
				for i, l := range rowLoss {
					if math.Abs(l-want.RowLoss[i]) > 1e-6*want.RowLoss[i] {
						t.Errorf("row %d: loss %v, want %v", i, l, want.RowLoss[i])
					}
				}
				compareSlices(t, g, whole, tolerance)
			}
			if bits[0] != bits[1] {
				t.Error("a device with memory of its own computes other bits")
			}
		})
	}
}

// compareSlices compares the gradients of the ranks, summed over the ranks that hold a weight, with
// the complete model's.
func compareSlices(t testing.TB, g rankGroup, whole *Model, tolerance float64) {
	t.Helper()
	type key struct {
		name  string
		slice Slice
	}
	sums := map[key][]float32{}
	for _, m := range g.models {
		for _, p := range m.Parameters() {
			k := key{p.Name, p.Slice}
			if grad := numbers(t, m, p.Grad); sums[k] == nil {
				sums[k] = slices.Clone(grad)
			} else {
				cpu.Axpy(sums[k], 1, grad)
			}
		}
	}
	for _, m := range g.models {
		for _, p := range m.Parameters() {
			got, want := sums[key{p.Name, p.Slice}], sliceOf(p, byName(whole, p.Name).Grad.Floats())
			var difference, norm float64
			for i, v := range want {
				d := float64(got[i]) - float64(v)
				difference, norm = difference+d*d, norm+float64(v)*float64(v)
			}
			if !(math.Sqrt(difference) <= tolerance*math.Sqrt(norm)) {
				t.Errorf("rank %d: %s %v: gradients differ by %g of their norm", m.parallel.Mesh.Rank(), p.Name,
					p.Slice, math.Sqrt(difference/norm))
			}
		}
	}
}

// Each rank starts with its slices of the initial weights of the complete model, also if the
// weights are read from files.
func TestTensorWeights(t *testing.T) {
	c := gradientCases(t)["qwen2"]
	c.IntermediateSize = 1500 // more than one piece of a matrix
	whole := newModel(t, c, 1)
	whole.Init(7)
	for _, axis := range []int{0, 1} {
		for _, p := range whole.Parameters() {
			if c.Sliced(p.Name) != axis {
				continue
			}
			s := Slice{Axis: axis, Rank: 1, Ranks: 2}
			got := make([]float32, p.Weight.Elements()/2)
			values := p.Weight.Floats()
			for first := 0; first < len(values); first += 1000 {
				s.Take(got, values[first:min(first+1000, len(values))], first, p.Shape)
			}
			columns := p.Weight.Elements() / p.Shape[0]
			for i, v := range got {
				at := i + len(got)
				if width := columns / 2; axis == 1 {
					at = i/width*columns + width + i%width
				}
				if v != values[at] {
					t.Fatalf("%s: element %d of a slice is not element %d", p.Name, i, at)
				}
			}
		}
	}
	shape := comm.NewShape(map[comm.Axes]int{comm.TP: 2})
	g := newTensorRanks(t, func() xpu.Device { return cpu.New(1, xpu.FP32) }, c, shape, 1)
	dir := t.TempDir()
	if err := whole.Save(t.Context(), dir, SaveOptions{}); err != nil {
		t.Fatal(err)
	}
	compare := func(how string) {
		for r, m := range g.models {
			for _, p := range m.Parameters() {
				if !slices.Equal(p.Weight.Floats(), sliceOf(p, byName(whole, p.Name).Weight.Floats())) {
					t.Errorf("rank %d, %s: %s differs from the complete tensor", r, how, p.Name)
				}
			}
		}
	}
	for _, m := range g.models {
		m.Init(7)
	}
	compare("initial")
	for _, m := range g.models {
		m.Init(8)
		if err := m.Load(filesystem.OS{}, dir); err != nil {
			t.Fatal(err)
		}
	}
	compare("loaded")
	for _, m := range g.models {
		m.Init(8)
	}
	for r, err := range g.each(func(_ int, m *Model) error {
		_, err := m.LoadTogether(t.Context(), filesystem.OS{}, dir)
		return err
	}) {
		if err != nil {
			t.Fatalf("rank %d: %v", r, err)
		}
	}
	compare("loaded together")
	if err := g.models[0].Save(t.Context(), t.TempDir(), SaveOptions{}); err == nil {
		t.Error("a rank with slices saves a model")
	}
}

// Models whose layers have parts that ranks cannot share are refused.
func TestTensorMisfits(t *testing.T) {
	cases := gradientCases(t)
	shape := comm.NewShape(map[comm.Axes]int{comm.TP: 2})
	for _, test := range []struct {
		model  string
		change func(c *Config)
		want   string // "" for models that ranks can share
	}{
		{"qwen3_moe", func(*Config) {}, ""},
		{"dense", func(*Config) {}, ""},
		{"deepseek_v3", func(*Config) {}, ""},
		{"nano", func(*Config) {}, ""},
		{"qwen3_moe", func(c *Config) { c.DenseLayers, c.DenseSize = "1", 7 },
			"does not divide dense_intermediate_size 7"},
		{"dense layer", func(*Config) {}, ""},
		{"deepseek_v3", func(c *Config) { c.SharedSize = 33 }, "does not divide shared_expert_intermediate_size 33"},
		{"llama", func(c *Config) { c.KVHeads = 1 }, "does not divide num_key_value_heads 1"},
	} {
		c := cases[test.model]
		test.change(&c)
		misfits := c.Misfits(shape)
		if len(misfits) != min(1, len(test.want)) || len(misfits) > 0 && (misfits[0].Axis != comm.TP ||
			!strings.Contains(misfits[0].Problem, test.want)) {
			t.Errorf("%s: %v, want %q", test.model, misfits, test.want)
		}
	}
}

// compareSharing compares the gradients of a complete model with the gradients of two pairs of
// ranks. A pair shares a row, first by tp and then by cp, and all ranks share the experts in pairs.
// It returns the statistics of the ranks of both cases.
func compareSharing(t *testing.T, c Config, whole *Model, rows []Batch, opts BackwardOptions) (all [][]Stats) {
	t.Helper()
	for _, cp := range []int{1, 2} {
		shape := comm.NewShape(map[comm.Axes]int{comm.EP: 2, comm.TP: 2 / cp, comm.ExpertDP: cp})
		g := newTensorRanks(t, func() xpu.Device { return cpu.New(1, xpu.FP32) }, c, shape, cp)
		var batches []Batch
		for r := range shape.Ranks() {
			batches = append(batches, rows[r/2])
		}
		for _, m := range g.models {
			for _, p := range m.params {
				m.dev.Write(p.Weight, sliceOf(p, byName(whole, p.Name).Weight.Floats()))
			}
		}
		all = append(all, g.backward(t, batches, opts))
		compareSlices(t, g, whole, 1e-5)
	}
	return all
}
