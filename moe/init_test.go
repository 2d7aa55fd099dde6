package moe

import (
	"math"
	"runtime"
	"slices"
	"testing"

	"mula/xpu"
	"mula/xpu/cpu"
)

func byName(m *Model, name string) *Parameter {
	i := slices.IndexFunc(m.params, func(p *Parameter) bool { return p.Name == name })
	if i < 0 {
		return nil
	}
	return m.params[i]
}

// A tensor's values depend on seed and name, not on threads or the rest of the model.
func TestInitIsIndependentOfLayout(t *testing.T) {
	c := mustPreset(t, "mula-nano")
	a, b := newModel(t, c, 1), newModel(t, c, 3)
	deeper := c
	deeper.Layers, deeper.VocabSize = 3, 300
	d := newModel(t, deeper, 2)
	for _, m := range []*Model{a, b, d} {
		m.Init(42)
	}
	if !slices.Equal(weights(t, a), weights(t, b)) {
		t.Error("weights depend on the number of threads")
	}
	equal := 0
	for _, p := range a.Parameters() {
		if q := byName(d, p.Name); q != nil && slices.Equal(p.Shape, q.Shape) {
			equal++
			if !slices.Equal(p.Weight.Floats(), q.Weight.Floats()) {
				t.Errorf("%s depends on the rest of the model", p.Name)
			}
		}
	}
	if equal != len(a.Parameters())-2 { // all but embedding and head
		t.Errorf("%d tensors compared", equal)
	}
	b.Init(43)
	if slices.Equal(byName(a, "lm_head.weight").Weight.Floats(), byName(b, "lm_head.weight").Weight.Floats()) {
		t.Error("another seed gives the same weights")
	}
	// Runs must be repeatable by later versions of the program and of Go.
	want := []float32{-0.01758971, -0.012590012, 0.014055627, -0.00027248228}
	if got := byName(a, "model.layers.0.mlp.gate.weight").Weight.Floats()[:4]; !slices.Equal(got, want) {
		t.Errorf("first weights of the router are %v, were %v", got, want)
	}
}

// Biases start at zero, although they are vectors like the weights of norms.
func TestInitOfBiases(t *testing.T) {
	c := gradientCases(t)["qwen2"]
	m := newModel(t, c, 1)
	m.Init(1)
	norm, bias := byName(m, "model.norm.weight").Weight.Floats(),
		byName(m, "model.layers.1.self_attn.k_proj.bias").Weight.Floats()
	if norm[0] != 1 || len(bias) != c.KVWidth() || slices.ContainsFunc(bias, func(x float32) bool { return x != 0 }) {
		t.Errorf("norm %v, bias %v", norm[:1], bias)
	}
}

func TestInitDistribution(t *testing.T) {
	for _, cutoff := range []float64{0, 3, 1} {
		c := mustPreset(t, "mula-nano")
		c.PadTokenID, c.InitCutoff = 7, cutoff
		m := newModel(t, c, 2)
		m.Init(1)
		var n, sum, square, beyond float64
		for _, p := range m.Parameters() {
			if len(p.Shape) == 1 {
				for _, v := range p.Weight.Floats() {
					if v != 1 {
						t.Fatalf("%s: a norm weight is %v", p.Name, v)
					}
				}
				continue
			}
			for _, v := range p.Weight.Floats() {
				x := float64(v) / c.InitStd
				n, sum, square = n+1, sum+x, square+x*x
				if math.Abs(x) > 3 {
					beyond++
				}
				if cutoff > 0 && math.Abs(x) > cutoff+1e-6 {
					t.Fatalf("%s: %v standard deviations with a cutoff at %v", p.Name, x, cutoff)
				}
			}
		}
		// Variance of a normal distribution cut at ±a: 1 - 2aφ(a)/(2Φ(a)-1).
		variance := 1.0
		if cutoff > 0 {
			density := math.Exp(-cutoff*cutoff/2) / math.Sqrt(2*math.Pi)
			variance = 1 - 2*cutoff*density/math.Erf(cutoff/math.Sqrt2)
		}
		// 198,000 draws: the mean is within 5/√n, the variance within 5·√2/√n.
		if mean := sum / n; math.Abs(mean) > 0.012 || math.Abs(square/n-variance) > 0.016 {
			t.Errorf("cutoff %v: mean %v, variance %v, want 0, %v", cutoff, mean, square/n, variance)
		}
		if cutoff == 0 && math.Abs(beyond/n-0.0027) > 0.0006 {
			t.Errorf("%v of the weights lie beyond 3 standard deviations, want 0.0027", beyond/n)
		}
		for _, v := range m.embed.w.Index(7).Floats() {
			if v != 0 {
				t.Fatalf("embedding of the padding token holds %v", v)
			}
		}
	}
}

// Initial bfloat16 weights are computed in little memory, and are the rounded float32 weights, also
// of tensors that are computed in several pieces.
func TestInitOfHalves(t *testing.T) {
	c := mustPreset(t, "mula-nano")
	c.VocabSize = 3*initElements/c.HiddenSize + 5
	c.PadTokenID = 2
	dev := cpu.New(1, xpu.BF16Mixed)
	defer dev.Close()
	m, err := New(c, dev)
	if err != nil {
		t.Fatal(err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	m.Init(42)
	runtime.ReadMemStats(&after)
	if most := 4 * uint64(byName(m, embeddingName).Weight.Elements()); after.TotalAlloc-before.TotalAlloc > most/2 {
		t.Errorf("Init has allocated %d bytes, and the embedding has %d in float32",
			after.TotalAlloc-before.TotalAlloc, most)
	}
	wide := newModel(t, c, 1)
	wide.Init(42)
	for _, p := range m.Parameters() {
		want := make([]uint16, p.Weight.Elements())
		cpu.BF16(want, byName(wide, p.Name).Weight.Floats())
		if !slices.Equal(p.Weight.Halves(), want) {
			t.Errorf("%s is not the rounded weights in float32", p.Name)
		}
	}
	rows := byName(wide, embeddingName).Weight
	if slices.ContainsFunc(rows.Index(2).Floats(), func(x float32) bool { return x != 0 }) ||
		rows.Index(1).Floats()[0] == 0 {
		t.Error("the embedding of padding is not zero, or all of it is")
	}
}
