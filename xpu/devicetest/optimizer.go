package devicetest

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"mula/xpu"
)

func optimizerFamily(t *testing.T, d xpu.Device, tolerance float64) {
	const block = xpu.BlockSize
	for i, lengths := range [][]int{{}, {1}, {0, 5, 0}, {block}, {block + 1, 3, block - 1}, {4097, 2*block + 100}} {
		t.Run(fmt.Sprintf("lengths %d", lengths), func(t *testing.T) {
			source := rand.New(rand.NewPCG(41, uint64(i)))
			sumSquares(t, d, source, lengths, tolerance)
			checksums(t, d, source, lengths)
			for j, sums := range []bool{false, true} {
				rule := xpu.AdamW{LearningRate: 1e-2, Beta1: 0.9, Beta2: 0.95, Epsilon: 1e-8, WeightDecay: 0.1,
					Step: int64(1 + 10*j), GradScale: 1 - 0.5*float64(j), DecayAfter: 0.25 * float64(j)}
				adamW(t, d, rule, source, lengths, sums, tolerance)
			}
			for _, c := range UpdateCases {
				elementwise(t, d, c, source, lengths, tolerance)
			}
		})
	}
	t.Run("any", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) {
			lengths := rapid.SliceOfN(rapid.IntRange(0, 6000), 0, 4).Draw(t, "lengths")
			source := rand.New(rand.NewPCG(42, rapid.Uint64().Draw(t, "seed")))
			sumSquares(t, d, source, lengths, tolerance)
			checksums(t, d, source, lengths)
			adamW(t, d, xpu.AdamW{
				LearningRate: rapid.Float64Range(1e-6, 1).Draw(t, "learningRate"), Beta1: rapid.SampledFrom([]float64{0,
					0.5, 0.9, 0.99}).Draw(t, "beta1"),
				Beta2: rapid.SampledFrom([]float64{0, 0.95, 0.999}).Draw(t, "beta2"), Epsilon: 1e-8,
				WeightDecay: rapid.Float64Range(0, 1).Draw(t, "weightDecay"),
				Step:        rapid.Int64Range(1, 1e6).Draw(t, "step"), GradScale: rapid.Float64Range(1e-3, 1).Draw(t,
					"gradScale"), DecayAfter: rapid.Float64Range(0, 0.5).Draw(t, "decayAfter"),
			}, source, lengths, rapid.Bool().Draw(t, "sums"), tolerance)
		})
	})
	t.Run("far numbers", func(t *testing.T) { farNumbers(t, d, tolerance) })
}

func sumSquares(t tester, d xpu.Device, source *rand.Rand, lengths []int, tolerance float64) {
	var stretches []xpu.Tensor
	var want []float64
	for _, n := range lengths {
		x := random(source, n)
		stretches = append(stretches, upload(t, d, x))
		want = append(want, squares(x)...)
	}
	got := slices.Repeat([]float64{-7}, len(want))
	d.SumSquares(stretches, got)
	if err := d.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	compareSums(t, "the sum of squares", got, want, tolerance)
}

// squares returns the sums of squares of blocks.
func squares(x []float32) (sums []float64) {
	for block := range slices.Chunk(x, xpu.BlockSize) {
		sum := 0.0
		for _, v := range block {
			sum += float64(v) * float64(v)
		}
		sums = append(sums, sum)
	}
	return sums
}

// checksums compares a device's checksums with a direct implementation of the definition, for
// numbers with arbitrary bits.
func checksums(t tester, d xpu.Device, source *rand.Rand, lengths []int) {
	var stretches []xpu.Tensor
	var want []uint64
	for _, n := range lengths {
		x := make([]float32, n)
		for i := range x {
			// no NaN: its bits may change during the transfer to a device
			x[i] = math.Float32frombits(source.Uint32() &^ (1 << 23))
		}
		stretches = append(stretches, upload(t, d, x))
		for block := range slices.Chunk(x, xpu.BlockSize) {
			sum := new(big.Int)
			for i, four := range slices.Collect(slices.Chunk(block, 4)) {
				var words [4]uint64
				for j, v := range four {
					words[j] = uint64(math.Float32bits(v))
				}
				key := uint64(xpu.ChecksumKey)
				a := new(big.Int).SetUint64((words[0] + words[1]<<32) ^ (2*uint64(i)+1)*key)
				product := a.Mul(a, new(big.Int).SetUint64((words[2]+words[3]<<32)^(2*uint64(i)+2)*key))
				high := new(big.Int).Rsh(product, 64)
				sum.Add(sum, new(big.Int).SetUint64(high.Uint64()^product.Uint64())) // Uint64 is the lower half
			}
			want = append(want, sum.Uint64())
		}
	}
	got := slices.Repeat([]uint64{7}, len(want))
	d.Checksums(stretches, got)
	if err := d.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got, want) {
		t.Fatalf("checksums of lengths %d are %x, want %x", lengths, got, want)
	}
}

func compareSums(t tester, what string, got, want []float64, tolerance float64) {
	t.Helper()
	for i, v := range want {
		if !(math.Abs(got[i]-v) <= tolerance*v) {
			t.Fatalf("%s of block %d of %d: %v, want %v", what, i, len(want), got[i], v)
		}
	}
}

func adamW(t tester, d xpu.Device, rule xpu.AdamW, source *rand.Rand, lengths []int, sums bool, tolerance float64) {
	var stretches, cut []xpu.Moments
	var wants, sizes [][3][]float64 // weights and moments
	var before []float64
	correction1, correction2 := 1-math.Pow(rule.Beta1, float64(rule.Step)), 1-math.Pow(rule.Beta2, float64(rule.Step))
	for _, n := range lengths {
		weight, grad, m, v := random(source, n), random(source, n), random(source, n), random(source, n)
		var want, size [3][]float64
		for k := range want {
			want[k], size[k] = make([]float64, n), make([]float64, n)
		}
		for i := range n {
			v[i] *= v[i]
			g := float64(grad[i]) * rule.GradScale
			p := float64(weight[i]) * (1 - rule.LearningRate*rule.WeightDecay)
			first, second := rule.Beta1*float64(m[i]), rule.Beta2*float64(v[i])
			a, q := first+(1-rule.Beta1)*g, second+(1-rule.Beta2)*g*g
			step := rule.LearningRate / correction1 / (math.Sqrt(q/correction2) + rule.Epsilon)
			want[0][i], want[1][i], want[2][i] = (p-step*a)*(1-rule.DecayAfter), a, q
			const smallest = 2 * 0x1p-126 // denormal numbers may be 0
			size[1][i], size[2][i] = math.Abs(first)+math.Abs((1-rule.Beta1)*g)+smallest/tolerance, q+smallest/tolerance
			size[0][i] = math.Abs(float64(weight[i])) + step*size[1][i]
		}
		wants, sizes = append(wants, want), append(sizes, size)
		before = append(before, squares(weight)...)
		s := xpu.Moments{Weight: upload(t, d, weight), Grad: upload(t, d, grad), M: upload(t, d, m), V: upload(t, d, v)}
		stretches = append(stretches, s)
		// the same, in two pieces
		s = xpu.Moments{Weight: upload(t, d, weight), Grad: upload(t, d, grad), M: upload(t, d, m), V: upload(t, d, v)}
		at := n / 3
		for _, r := range [][2]int{{0, at}, {at, n}} {
			cut = append(cut, xpu.Moments{Weight: s.Weight.Rows(r[0], r[1]), Grad: s.Grad.Rows(r[0], r[1]),
				M: s.M.Rows(r[0], r[1]), V: s.V.Rows(r[0], r[1])})
		}
	}
	old := make([][]float32, len(stretches))
	for i, s := range stretches {
		old[i] = read(t, d, s.Weight)
	}
	var gotBefore, gotChange []float64
	if sums {
		gotBefore, gotChange = slices.Repeat([]float64{-7}, len(before)), slices.Repeat([]float64{-7}, len(before))
	}
	d.Update(rule.Update(), stretches, gotBefore, gotChange)
	d.Update(rule.Update(), cut, nil, nil)
	var change []float64
	for i, s := range stretches {
		weight := read(t, d, s.Weight)
		for k, x := range [][]float32{weight, read(t, d, s.M), read(t, d, s.V)} {
			compare(t, []string{"weights", "first moments", "second moments"}[k], x, wants[i][k], sizes[i][k],
				tolerance)
		}
		for j, w := range append(read(t, d, cut[2*i].Weight), read(t, d, cut[2*i+1].Weight)...) {
			if w != weight[j] {
				t.Fatalf("stretch %d, weight %d: %v in two pieces, %v in one", i, j, w, weight[j])
			}
		}
		for j, w := range weight {
			old[i][j] = w - old[i][j]
		}
		change = append(change, squares(old[i])...)
	}
	if sums {
		compareSums(t, "the squares of the weights before", gotBefore, before, tolerance)
		compareSums(t, "the squares of the changes", gotChange, change, tolerance)
	}
}

// An UpdateCase is an update with constants at which every term matters, and its formula in
// float64. In the formula, g is the gradient times UpdateScale. An update with one state tensor
// returns v unchanged.
type UpdateCase struct {
	Update  xpu.Update
	Formula func(p, g, m, v float64) (weight, gradient, first, second float64)
}

// UpdateScale is the gradient scale of all update cases.
const UpdateScale = 0.5

// UpdateCases has at least one case for each update.
var UpdateCases = []UpdateCase{
	{xpu.AdamW{LearningRate: 1e-2, Beta1: 0.9, Beta2: 0.99, Epsilon: 1e-6, WeightDecay: 0.1, Step: 3,
		GradScale: UpdateScale}.Update(),
		func(p, g, m, v float64) (_, _, _, _ float64) {
			m, v = 0.9*m+0.1*g, 0.99*v+0.01*g*g
			return p*(1-1e-3) - 1e-2*m/(1-0.729)/(math.Sqrt(v/(1-0.99*0.99*0.99))+1e-6), g / UpdateScale, m, v
		}},
	{xpu.Lion{LearningRate: 1e-2, Beta1: 0.9, Beta2: 0.99, WeightDecay: 0.1, GradScale: UpdateScale}.Update(),
		func(p, g, m, v float64) (_, _, _, _ float64) {
			sign := 0.0
			if u := 0.9*m + 0.1*g; u != 0 {
				sign = math.Copysign(1, u)
			}
			return p*(1-1e-3) - 1e-2*sign, g / UpdateScale, 0.99*m + 0.01*g, v
		}},
	{xpu.Sophia{LearningRate: 1e-2, Beta1: 0.965, Curvature: 3, WeightDecay: 0.1, GradScale: UpdateScale}.Update(),
		func(p, g, m, h float64) (_, _, _, _ float64) {
			m = 0.965*m + 0.035*g
			return p*(1-1e-3) - 1e-2*max(-1, min(1, m/(3*h+1e-15))), g / UpdateScale, m, h
		}},
	{xpu.ADOPT{LearningRate: 1e-2, Beta1: 0.9, Beta2: 0.99, Epsilon: 1e-6, Clip: 1.5, WeightDecay: 0.1,
		GradScale: UpdateScale}.Update(),
		func(p, g, m, v float64) (_, _, _, _ float64) {
			m = 0.9*m + 0.1*max(-1.5, min(1.5, g/max(math.Sqrt(v), 1e-6)))
			return p*(1-1e-3) - 1e-2*m, g / UpdateScale, m, 0.99*v + 0.01*g*g
		}},
	{xpu.Lamb{Beta1: 0.9, Beta2: 0.99, Epsilon: 1e-6, WeightDecay: 0.1, Step: 3, GradScale: UpdateScale}.Update(),
		func(p, g, m, v float64) (_, _, _, _ float64) {
			m, v = 0.9*m+0.1*g, 0.99*v+0.01*g*g
			return p, m/(1-0.729)/(math.Sqrt(v/(1-0.99*0.99*0.99))+1e-6) + 0.1*p, m, v
		}},
	{xpu.Muon{Momentum: 0.95, Nesterov: true, GradScale: UpdateScale}.Update(),
		func(p, g, m, v float64) (_, _, _, _ float64) {
			m = 0.95*m + 0.05*g
			return p, 0.95*m + 0.05*g, m, v
		}},
	{xpu.Muon{Momentum: 0.95, GradScale: UpdateScale}.Update(),
		func(p, g, m, v float64) (_, _, _, _ float64) {
			m = 0.95*m + 0.05*g
			return p, m, m, v
		}},
	{xpu.Move{Keep: 0.9, Scale: -0.3}.Update(),
		func(p, g, m, v float64) (_, _, _, _ float64) { return 0.9*p - 0.3*g/UpdateScale, g / UpdateScale, m, v }},
	{xpu.ScheduleFreeAdamW{LearningRate: 1e-2, Beta1: 0.9, Beta2: 0.99, Epsilon: 1e-8, WeightDecay: 0.1, Step: 3,
		Share: 0.3, GradScale: UpdateScale}.Update(),
		func(y, g, z, v float64) (_, _, _, _ float64) {
			v = 0.99*v + 0.01*g*g
			u := g/(math.Sqrt(v/(1-0.99*0.99*0.99))+1e-8) + 0.1*y
			return y + 0.3*(z-y) + 1e-2*(0.9*0.7-1)*u, g / UpdateScale, z - 1e-2*u, v
		}},
	{xpu.AverageSquares{Decay: 0.99, Rest: 0.02, GradScale: UpdateScale}.Update(),
		func(p, g, m, v float64) (_, _, _, _ float64) { return p, g / UpdateScale, m, 0.99*v + 0.02*g*g }},
}

// elementwise compares an update with its formula.
func elementwise(t tester, d xpu.Device, c UpdateCase, source *rand.Rand, lengths []int, tolerance float64) {
	var stretches []xpu.Moments
	var wants [][4][]float64
	var before []float64
	for _, n := range lengths {
		weight, grad, m, v := random(source, n), random(source, n), random(source, n), random(source, n)
		for i := range v {
			v[i] = v[i]*v[i] + 0.1
		}
		var want [4][]float64
		for i := range n {
			w, g, first, second := c.Formula(float64(weight[i]), float64(grad[i])*UpdateScale, float64(m[i]),
				float64(v[i]))
			for k, x := range []float64{w, g, first, second} {
				want[k] = append(want[k], x)
			}
		}
		before = append(before, squares(weight)...)
		s := xpu.Moments{Weight: upload(t, d, weight), Grad: upload(t, d, grad), M: upload(t, d, m)}
		if c.Update.States == 2 {
			s.V = upload(t, d, v)
		}
		stretches, wants = append(stretches, s), append(wants, want)
	}
	gotBefore, gotChange := slices.Repeat([]float64{-7}, len(before)), slices.Repeat([]float64{-7}, len(before))
	d.Update(c.Update, stretches, gotBefore, gotChange)
	for i, s := range stretches {
		vectors := []xpu.Tensor{s.Weight, s.Grad, s.M}
		if c.Update.States == 2 {
			vectors = append(vectors, s.V)
		}
		for k, x := range vectors {
			size := make([]float64, x.Elements())
			for j := range size {
				size[j] = 1 + math.Abs(wants[i][k][j])
			}
			what := c.Update.Rule + ": " + []string{"weights", "gradients", "first state", "second state"}[k]
			compare(t, what, read(t, d, x), wants[i][k], size, tolerance)
		}
	}
	compareSums(t, c.Update.Rule+": the squares of the weights before", gotBefore, before, tolerance)
	for i, sum := range gotChange {
		if !(sum >= 0) {
			t.Fatalf("%s: the squares of the changes of block %d are %v", c.Update.Rule, i, sum)
		}
	}
}

// farNumbers checks the sums of squares of numbers whose squares are beyond the range of float32,
// and that the sums are finite exactly if the numbers are.
func farNumbers(t tester, d xpu.Device, tolerance float64) {
	for _, test := range []struct {
		numbers []float32
		want    float64
	}{
		{[]float32{1e30, 1e30}, 2e60}, {[]float32{3e-30, 4e-30}, 25e-60}, {[]float32{1e-30, 2, 1e-30},
			4}, {[]float32{0, 0}, 0},
		{[]float32{math.MaxFloat32}, math.MaxFloat32 * math.MaxFloat32}, {[]float32{1e-12, 1e-12, 1e-13}, 2.01e-24},
		{[]float32{float32(math.Inf(-1)), 1}, math.Inf(1)}, {[]float32{1e30, float32(math.NaN())}, math.NaN()},
	} {
		x := make([]float32, 5000)
		copy(x[len(x)-len(test.numbers):], test.numbers)
		x[1], x[len(x)-1] = x[len(x)-1], 0
		got := make([]float64, 1)
		d.SumSquares([]xpu.Tensor{upload(t, d, x)}, got)
		if err := d.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		if finite := test.want-test.want == 0; finite && !(math.Abs(got[0]-test.want) <= tolerance*test.want) ||
			!finite && got[0]-got[0] == 0 {
			t.Errorf("the squares of %v are %v, want %v", test.numbers, got[0], test.want)
		}
	}
	large := slices.Repeat([]float32{math.MaxFloat32}, xpu.BlockSize)
	got := make([]float64, 1)
	d.SumSquares([]xpu.Tensor{upload(t, d, large)}, got)
	if err := d.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	compareSums(t, "the squares of the largest numbers", got, squares(large), tolerance)
}
