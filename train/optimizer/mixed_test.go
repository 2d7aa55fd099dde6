package optimizer

import (
	"context"
	"slices"
	"testing"

	"mula/train/optimizer/optimizertest"
	"mula/xpu"
	"mula/xpu/cpu"
)

// Of bfloat16 weights, the masters get the updates that float32 weights get, to the bit, and the
// model's weights are the rounded masters. Averages for evaluation are rounded once, too.
func TestMasters(t *testing.T) {
	t.Parallel()
	eachOptimizer(t, func(t *testing.T, name Name) {
		wide, mixed := optimizertest.Parameters(1), optimizertest.Parameters(1)
		rounded := func(x []float32) []uint16 {
			halves := make([]uint16, len(x))
			cpu.BF16(halves, x)
			return halves
		}
		for i, p := range mixed {
			x := wide[i].Weight.Floats()
			cpu.RoundBF16(x)
			p.Weight = xpu.OfHalves(rounded(x), len(x))
		}
		want := mustOptimizer(t, defaultOptimizer(name), 100, device(t, 2), wide)
		got := mustOptimizer(t, defaultOptimizer(name), 100, device(t, 2), mixed)
		want.Measure(true)
		got.Measure(true)
		got.ReadWeights()
		for step := range 5 {
			runSteps(want, step, step+1)
			runSteps(got, step, step+1)
			for i, p := range wide {
				x := p.Weight.Floats()
				if !slices.Equal(got.weights[i].Floats(), x) {
					t.Fatalf("step %d: masters of %s are not the weights in float32", step, p.Name)
				}
				if !slices.Equal(mixed[i].Weight.Halves(), rounded(x)) {
					t.Fatalf("step %d: weights of %s are not the rounded masters", step, p.Name)
				}
				if slices.Equal(mixed[i].Weight.Halves(), rounded(x[1:])) {
					t.Fatalf("all weights of %s are equal", p.Name)
				}
			}
			for i := range wide {
				u, w := want.Ratio(i)
				if v, x := got.Ratio(i); v != u || x != w || w == 0 {
					t.Errorf("step %d: the change of %s is %v of %v, in float32 %v of %v", step, wide[i].Name, v, x,
						u, w)
				}
			}
		}
		trained := slices.Clone(mixed[0].Weight.Halves())
		for _, on := range []bool{true, false} {
			for _, o := range []*Optimizer{want, got} {
				if err := o.Average(context.Background(), on); err != nil {
					t.Fatal(err)
				}
			}
			for i, p := range wide {
				if !slices.Equal(mixed[i].Weight.Halves(), rounded(p.Weight.Floats())) {
					t.Errorf("averages %v: weights of %s differ", on, p.Name)
				}
				saved := got.Saved(i)[0]
				if name := saved.Name; name != Master && name != TrainedWeights ||
					!slices.Equal(saved.Values.Floats(), got.weights[i].Floats()) {
					t.Errorf("averages %v: %s of %s is saved, and not the masters", on, name, p.Name)
				}
			}
		}
		if !slices.Equal(mixed[0].Weight.Halves(), trained) {
			t.Error("averaging has changed the training weights")
		}
	})
}

// A weight of 1, whose neighbour in bfloat16 is 1/256 below, moves by many updates that are each
// far smaller.
func TestMastersMove(t *testing.T) {
	p := optimizertest.Parameters(1)[6:7]
	n := p[0].Weight.Elements()
	ones := slices.Repeat([]float32{1}, n)
	halves := make([]uint16, n)
	cpu.BF16(halves, ones)
	p[0].Weight = xpu.OfHalves(halves, n)
	c := defaultOptimizer(AdamW)
	c.WeightDecay = new(0.0)
	o := mustOptimizer(t, c, 100, device(t, 1), p)
	o.ReadWeights()
	copy(p[0].Grad.Floats(), ones)
	got := make([]float32, n)
	for step := range 100 {
		if err := o.Step(t.Context(), 1e-4, 1); err != nil {
			t.Fatal(err)
		}
		if cpu.Widen(got, p[0].Weight.Halves()); step == 0 && got[0] != 1 {
			t.Fatalf("the first update moves a weight to %v", got[0])
		}
	}
	if got[0] > 0.993 || got[0] < 0.987 { // about 0.99
		t.Errorf("after 100 updates of 1e-4 a weight is %v", got[0])
	}
}

// Without gradients, moments of bfloat16 become smaller with the largest beta that is allowed, but
// not with 0.999, which is refused.
func TestRoundedMomentsShrink(t *testing.T) {
	shrunk := func(beta float64) (m, v float32) {
		d := device(t, 1)
		one := []float32{1.75} // a unit in its last place is the smallest part of a number near 2
		tensors := [4]xpu.Tensor{}
		for i := range tensors {
			var err error
			if tensors[i], err = d.New([]xpu.DType{xpu.Float32, xpu.BFloat16}[i/2], 1); err != nil {
				t.Fatal(err)
			}
			d.Write(tensors[i], one)
		}
		d.Zero(tensors[1])
		for step := range 2000 {
			d.Update(xpu.AdamW{LearningRate: 1e-3, Beta1: beta, Beta2: beta, Epsilon: 1e-8, Step: int64(step + 1),
				GradScale: 1}.Update(), []xpu.Moments{{Weight: tensors[0], Grad: tensors[1], M: tensors[2],
				V: tensors[3]}}, nil, nil)
		}
		var got [2][1]float32
		for i := range got {
			if err := d.Read(t.Context(), got[i][:], tensors[2+i]); err != nil {
				t.Fatal(err)
			}
		}
		return got[0][0], got[1][0]
	}
	if m, v := shrunk(mostBeta); m > 1e-3 || v > 1e-3 {
		t.Errorf("with beta %v, moments of 1.75 are %v and %v after 2,000 updates", mostBeta, m, v)
	}
	if m, v := shrunk(0.999); m != 1.75 || v != 1.75 {
		t.Errorf("with beta 0.999, moments of 1.75 became %v and %v; it need not be refused", m, v)
	}
	for _, test := range []struct {
		betas   []float64
		moments string
		refused bool
	}{{[]float64{0.9, 0.999}, "fp32", false}, {[]float64{0.9, 0.999}, "bf16", true},
		{[]float64{0.9, 0.95}, "bf16", false}, {[]float64{0.995, 0.95}, "bf16", true}} {
		c := Config{Name: AdamW, Betas: test.betas, Moments: test.moments}
		if errs := c.Check(ScheduleConfig{}); (len(errs) > 0) != test.refused {
			t.Errorf("betas %v with moments in %s: %v", test.betas, test.moments, errs)
		}
	}
}
