package moe

import (
	"context"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"

	"mula/internal/filesystem"
	"mula/moe/safetensors"
)

// A mixture of experts made from a dense model computes the logits of the dense model.
func TestUpcycledLogits(t *testing.T) {
	for _, name := range []string{"llama-gqa", "llama-tied", "mistral", "olmo2", "qwen3"} {
		for _, u := range []Upcycling{
			{Experts: 1, ExpertsPerToken: 1, Granularity: 1},
			{Experts: 6, ExpertsPerToken: 2, Granularity: 1, Seed: 7},
			{Experts: 8, ExpertsPerToken: 4, Granularity: 4},
			{Experts: 16, ExpertsPerToken: 8, Granularity: 2},
		} {
			t.Run(fmt.Sprint(name, u), func(t *testing.T) {
				g := openGolden(t, name+".safetensors")
				dense, batch := g.model(1)
				m := upcycled(t, dense, u)
				if c := m.Config(); !c.moe() || c.Experts != u.Experts || c.ExpertsPerToken != u.ExpertsPerToken ||
					c.IntermediateSize*u.Granularity != dense.Config().IntermediateSize || !c.NormTopK {
					t.Fatalf("configuration %+v", c)
				}
				want := g.logits(t, dense, batch)
				if worst := maxDiff(t, g.logits(t, m, batch), want); worst > 1e-5 {
					t.Errorf("logits differ by %g", worst)
				}
				// The comparison has a meaning only if routers choose different copies.
				if u.ExpertsPerToken == u.Experts {
					return
				}
				stats, err := m.Backward(t.Context(), batch, BackwardOptions{})
				if err != nil {
					t.Fatal(err)
				}
				used := 0
				for _, n := range stats.ExpertCounts[0] {
					if n > 0 {
						used++
					}
				}
				if used <= u.ExpertsPerToken {
					t.Errorf("only %d experts are used", used)
				}
			})
		}
	}
}

// upcycled saves a dense model, upcycles it, and opens the result on the same device.
func upcycled(t testing.TB, dense *Model, u Upcycling) *Model {
	t.Helper()
	from, to := t.TempDir(), t.TempDir()
	if err := dense.Save(t.Context(), from, SaveOptions{}); err != nil {
		t.Fatal(err)
	}
	stored, err := OpenStored(filesystem.OS{}, from)
	if err != nil {
		t.Fatal(err)
	}
	defer stored.Close()
	visited := map[string]int{}
	if err := stored.SaveUpcycled(t.Context(), u, to, SaveOptions{}, func(tensor string, piece []float32) error {
		visited[tensor] += len(piece)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	m, err := Open(to, dense.dev)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range m.Parameters() {
		if n := p.Weight.Elements(); visited[p.Name] != n {
			t.Errorf("%d of %d weights of %s were visited", visited[p.Name], n, p.Name)
		}
	}
	return m
}

// readsFS counts the reads of its files by ReadAt.
type readsFS struct {
	filesystem.OS
	reads *int
}

func (f readsFS) OpenFile(name string, flag int, perm fs.FileMode) (filesystem.File, error) {
	file, err := f.OS.OpenFile(name, flag, perm)
	return readsFile{file, f.reads}, err
}

type readsFile struct {
	filesystem.File
	reads *int
}

func (f readsFile) ReadAt(p []byte, off int64) (int, error) {
	*f.reads++
	return f.File.ReadAt(p, off)
}

// Each tensor of the dense model is read by one request to an object store, and gate and up
// projections by one for each expert.
func TestUpcycledReads(t *testing.T) {
	g := openGolden(t, "qwen3.safetensors")
	dense, _ := g.model(1)
	from, reads := t.TempDir(), 0
	if err := dense.Save(t.Context(), from, SaveOptions{}); err != nil {
		t.Fatal(err)
	}
	stored, err := OpenStored(readsFS{reads: &reads}, from)
	if err != nil {
		t.Fatal(err)
	}
	defer stored.Close()
	reads = 0
	u := Upcycling{Experts: 8, ExpertsPerToken: 4, Granularity: 4}
	if err := stored.SaveUpcycled(t.Context(), u, t.TempDir(), SaveOptions{},
		func(string, []float32) error { return nil }); err != nil {
		t.Fatal(err)
	}
	c := dense.Config()
	if want := len(c.Tensors()) + c.Layers*2*(u.Experts-1); reads != want {
		t.Errorf("%d reads, want %d", reads, want)
	}
}

// Reinitialised weights have the mean and the deviation of the weights that they replace, belong to
// the same intermediate elements in all matrices of an expert, and depend on the seed. Other
// weights are the dense model's.
func TestUpcycledReinitialized(t *testing.T) {
	c := mustPreset(t, "mula-nano")
	c.Architecture, c.Experts, c.ExpertsPerToken, c.IntermediateSize, c.RouterAuxLossCoef = Llama, 0, 0, 256, 0
	dense := newModel(t, c, 1)
	fillByFormula(dense)
	u := Upcycling{Experts: 6, ExpertsPerToken: 2, Granularity: 2, Reinitialize: 0.3, Seed: 1}
	m := upcycled(t, dense, u)
	const layer = "model.layers.1."
	weights := func(m *Model, name string) []float32 { return byName(m, name).Weight.Floats() }
	width, h := 128, c.HiddenSize
	chosen := map[string]bool{}
	for e := range u.Experts {
		var redrawn []int // elements, by the first matrix
		for k, matrix := range []struct{ from, to string }{{"gate_proj", "w1"}, {"up_proj", "w3"},
			{"down_proj", "w2"}} {
			old := weights(dense, layer+"mlp."+matrix.from+".weight")
			now := weights(m, fmt.Sprintf("%sblock_sparse_moe.experts.%d.%s.weight", layer, e, matrix.to))
			var elements []int
			var before, after []float64
			for i := range width {
				changed := 0
				var was, is []float64
				for j := range h {
					o, n := old[(e%2*width+i)*h+j], now[i*h+j]
					if matrix.from == "down_proj" {
						o, n = 2*old[j*2*width+e%2*width+i], now[j*width+i]
					}
					was, is = append(was, float64(o)), append(is, float64(n))
					if o != n {
						changed++
					}
				}
				switch changed {
				case 0:
				case h:
					elements, before, after = append(elements, i), append(before, was...), append(after, is...)
				default:
					t.Fatalf("expert %d, %s: %d of %d weights of element %d changed", e, matrix.from, changed, h, i)
				}
			}
			if len(elements) != 38 { // 0.3 · 128
				t.Errorf("expert %d, %s: %d elements changed", e, matrix.from, len(elements))
			}
			if k > 0 && !slices.Equal(elements, redrawn) {
				t.Errorf("expert %d: other elements changed in %s", e, matrix.from)
			}
			redrawn = elements
			m1, d1 := moments(before)
			m2, d2 := moments(after)
			// 5 standard errors of 38·64 numbers
			if n := math.Sqrt(float64(len(before))); math.Abs(m1-m2) > 5*d1/n || math.Abs(d1-d2) > 5*d1/n/math.Sqrt2 {
				t.Errorf("expert %d, %s: mean %g, deviation %g; were %g, %g", e, matrix.from, m2, d2, m1, d1)
			}
		}
		chosen[fmt.Sprint(redrawn)] = true
	}
	if len(chosen) != u.Experts {
		t.Errorf("only %d of %d experts have elements of their own", len(chosen), u.Experts)
	}
	router := weights(m, layer+"block_sparse_moe.gate.weight")
	for e := range u.Experts {
		for other := range e {
			if same := slices.Equal(router[e*h:][:h], router[other*h:][:h]); same != (e/2 == other/2) {
				t.Errorf("rows %d and %d of the router are equal: %t", other, e, same)
			}
		}
	}
	again := upcycled(t, dense, u)
	u.Seed = 2
	seeded := upcycled(t, dense, u)
	for i, p := range m.Parameters() {
		if !slices.Equal(p.Weight.Floats(), again.Parameters()[i].Weight.Floats()) {
			t.Errorf("%s differs in a second upcycling", p.Name)
		}
		same := slices.Equal(p.Weight.Floats(), seeded.Parameters()[i].Weight.Floats())
		if of := strings.Contains(p.Name, "block_sparse_moe"); same == of {
			t.Errorf("%s is equal with another seed: %t", p.Name, same)
		}
	}
}

// moments returns the mean and the standard deviation.
func moments(v []float64) (mean, deviation float64) {
	for _, x := range v {
		mean += x / float64(len(v))
	}
	for _, x := range v {
		deviation += (x - mean) * (x - mean) / float64(len(v))
	}
	return mean, math.Sqrt(deviation)
}

func TestUpcycledRefuses(t *testing.T) {
	dense := mustPreset(t, "mula-nano")
	dense.Architecture, dense.Experts, dense.ExpertsPerToken, dense.RouterAuxLossCoef = Llama, 0, 0, 0
	dense.IntermediateSize = 96
	olmo, experts := dense, mustPreset(t, "mula-nano")
	olmo.Architecture = OLMo
	good := Upcycling{Experts: 8, ExpertsPerToken: 2, Granularity: 2}
	for want, test := range map[string]struct {
		c Config
		u Upcycling
	}{
		"the model is olmoe, which has experts":    {experts, good},
		"only llama, mistral, olmo2, qwen3 can":    {olmo, good},
		"granularity is 0":                         {dense, Upcycling{Experts: 8, ExpertsPerToken: 2}},
		"granularity is 3; it must be a power":     {dense, Upcycling{Experts: 9, ExpertsPerToken: 3, Granularity: 3}},
		"divides intermediate_size 96":             {dense, Upcycling{Experts: 64, ExpertsPerToken: 64, Granularity: 64}},
		"experts is 9; it must be a multiple":      {dense, Upcycling{Experts: 9, ExpertsPerToken: 2, Granularity: 2}},
		"experts is 0":                             {dense, Upcycling{ExpertsPerToken: 2, Granularity: 2}},
		"experts is 1152921504606846976":           {dense, Upcycling{Experts: 1 << 60, ExpertsPerToken: 2, Granularity: 2}},
		"top_k is 3; it must be a multiple":        {dense, Upcycling{Experts: 8, ExpertsPerToken: 3, Granularity: 2}},
		"top_k is 10":                              {dense, Upcycling{Experts: 8, ExpertsPerToken: 10, Granularity: 2}},
		"reinitialize is 1.5":                      {dense, Upcycling{8, 2, 2, 1.5, 0}},
		"reinitialize is NaN; it must be between ": {dense, Upcycling{8, 2, 2, math.NaN(), 0}},
	} {
		if _, err := test.c.Upcycled(test.u); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", test.u, err, want)
		}
	}
	if _, err := dense.Upcycled(good); err != nil {
		t.Error(err)
	}
}

// A cancelled upcycling ends.
func TestUpcycledCancelled(t *testing.T) {
	stored, err := OpenStored(filesystem.OS{}, saveGolden(t, "llama-gqa"))
	if err != nil {
		t.Fatal(err)
	}
	defer stored.Close()
	ctx, cancel := context.WithCancel(t.Context())
	seen := map[string]bool{}
	err = stored.SaveUpcycled(ctx, Upcycling{Experts: 4, ExpertsPerToken: 1, Granularity: 1}, t.TempDir(),
		SaveOptions{}, func(tensor string, _ []float32) error {
			seen[tensor] = true
			cancel()
			return nil
		})
	if err == nil || len(seen) != 1 {
		t.Errorf("%v after %v", err, slices.Collect(maps.Keys(seen)))
	}
}

// saveGolden writes the model of a golden file.
func saveGolden(t testing.TB, name string) (dir string) {
	t.Helper()
	m, _ := openGolden(t, name+".safetensors").model(1)
	dir = t.TempDir()
	if err := m.Save(t.Context(), dir, SaveOptions{DType: safetensors.F32}); err != nil {
		t.Fatal(err)
	}
	return dir
}
