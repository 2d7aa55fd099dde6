package devicetest

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"mula/xpu"
)

// halvesFamily checks tensors of bf16.
func halvesFamily(t *testing.T, d xpu.Device, _ float64) {
	t.Run("numbers", func(t *testing.T) { halfNumbers(t, d) })
	t.Run("elements", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) { halfElements(t, d) })
	})
	t.Run("operands", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) { halfOperands(t, d) })
	})
	t.Run("gradients", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) { halfGradients(t, d) })
	})
	t.Run("products", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) { halfProducts(t, d) })
	})
	t.Run("transfers", func(t *testing.T) { halfTransfers(t, d) })
	t.Run("updates", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) { halfUpdates(t, d) })
	})
}

// halfProductsFamily checks products with tensors of bf16, at sizes around the sizes of tiles.
func halfProductsFamily(t *testing.T, d xpu.Device, _ float64) {
	for i, x := range []struct {
		m, n, k    int
		accumulate bool
	}{{33, 65, 40, false}, {33, 65, 40, true}, {129, 70, 20, true}, {3, 5, 2100, false}, {3, 5, 2100, true}} {
		c := halfCase{t, d, rand.New(rand.NewPCG(uint64(i), 0))}
		c.products(x.m, x.n, x.k, xpu.MatMulOptions{Accumulate: x.accumulate})
	}
}

// halfNumbers rounds every kind of number, to nearest even, by Write and by Copy.
func halfNumbers(t *testing.T, d xpu.Device) {
	var x []float32
	for high := range 1 << 16 {
		for _, low := range []uint32{0, 1, 0x7fff, 0x8000, 0x8001, 0xffff} {
			x = append(x, math.Float32frombits(uint32(high)<<16|low))
		}
	}
	want := make([]float32, len(x))
	for i, v := range x {
		want[i] = roundBF16(v)
	}
	floats, written, copied := upload(t, d, x), uploadHalves(t, d, make([]uint16, len(x))),
		uploadHalves(t, d, make([]uint16, len(x)))
	d.Write(written, x)
	d.Copy(copied, floats)
	for name, half := range map[string]xpu.Tensor{"Write": written, "Copy": copied} {
		for i, v := range read(t, d, half) {
			if w := want[i]; math.Float32bits(v) != math.Float32bits(w) && (v == v || w == w) {
				t.Fatalf("%s: %x becomes %x, want %x", name, math.Float32bits(x[i]), math.Float32bits(v),
					math.Float32bits(w))
			}
		}
	}
	bits := readHalves(t, d, written)
	moved, wide := uploadHalves(t, d, make([]uint16, len(x))), upload(t, d, make([]float32, len(x)))
	d.Copy(moved, written)
	d.Copy(wide, moved)
	if !slices.Equal(readHalves(t, d, moved), bits) {
		t.Error("a copy from bf16 to bf16 changes bits")
	}
	for i, v := range read(t, d, wide) {
		if math.Float32bits(v) != uint32(bits[i])<<16 && v == v {
			t.Fatalf("%x becomes %x in float32", bits[i], math.Float32bits(v))
		}
	}
}

// halfTransfers copies bf16 beside other commands.
func halfTransfers(t *testing.T, d xpu.Device) {
	x, y := uploadHalves(t, d, []uint16{0x3f80, 0x4000, 0x4040}), upload(t, d, make([]float32, 3))
	copies := d.Transfers()
	bits, floats := make([]uint16, 2), make([]float32, 3)
	if err := copies.ReadHalves(t.Context(), bits, x.Rows(1, 3)); err != nil ||
		!slices.Equal(bits, []uint16{0x4000, 0x4040}) {
		t.Errorf("read %x, %v", bits, err)
	}
	copies.WriteHalves(x.Rows(0, 1), []uint16{0x40a0})
	copies.Write(x.Rows(1, 2), []float32{math.Nextafter32(7, 8)})
	if err := copies.Read(t.Context(), floats, x); err != nil || !slices.Equal(floats, []float32{5, 7, 3}) {
		t.Errorf("read %v, %v", floats, err)
	}
	copies.Copy(y, x)
	copies.Join()
	if got := read(t, d, y); !slices.Equal(got, floats) {
		t.Errorf("copied %v, want %v", got, floats)
	}
}

// halfElements copies parts of any length, and compares checksums.
func halfElements(t *rapid.T, d xpu.Device) {
	n := rapid.IntRange(0, 300).Draw(t, "n")
	at := rapid.IntRange(0, n).Draw(t, "at")
	r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
	bits := halfBits(r, n)
	half, floats := uploadHalves(t, d, bits), upload(t, d, random(r, n))
	d.Copy(floats.Rows(at, n), half.Rows(at, n))
	d.Copy(half.Rows(0, at), floats.Rows(0, at))
	got := readHalves(t, d, half)
	if !slices.Equal(got[at:], bits[at:]) {
		t.Errorf("elements from %d of %d on have changed", at, n)
	}
	var sums [1]uint64
	d.Checksums([]xpu.Tensor{half}, sums[:])
	if err := d.Wait(t.Context()); err != nil || n > 0 && sums[0] != xpu.Checksum(got) {
		t.Errorf("checksum %x of %d elements, want %x; %v", sums[0], n, xpu.Checksum(got), err)
	}
}

// halfBits returns n numbers in ±1 as bfloat16.
func halfBits(r *rand.Rand, n int) []uint16 {
	bits := make([]uint16, n)
	for i, v := range random(r, n) {
		bits[i] = uint16(math.Float32bits(v) >> 16)
	}
	return bits
}

// A halfCase makes the operands of a case from random numbers.
type halfCase struct {
	tester
	d xpu.Device
	r *rand.Rand
}

func newHalfCase(t *rapid.T, d xpu.Device) halfCase {
	return halfCase{t, d, rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))}
}

// drawSize draws a size from 1 to most.
func drawSize(t *rapid.T, name string, most int) int {
	return rapid.IntRange(1, max(1, most)).Draw(t, name)
}

func (c halfCase) floats(shape ...int) xpu.Tensor {
	n, _ := xpu.Elements(shape)
	return upload(c, c.d, random(c.r, n), shape...)
}

// both returns the same numbers in either type.
func (c halfCase) both(shape ...int) [2]xpu.Tensor {
	n, _ := xpu.Elements(shape)
	half := uploadHalves(c, c.d, halfBits(c.r, n), shape...)
	return [2]xpu.Tensor{upload(c, c.d, read(c, c.d, half), shape...), half}
}

// same runs a command with either type and compares the results.
func (c halfCase) same(name string, shape []int, run func(dst xpu.Tensor, kind int)) {
	n, _ := xpu.Elements(shape)
	x := random(c.r, n)
	var results [2][]float32
	for kind := range results {
		dst := upload(c, c.d, x, shape...)
		run(dst, kind)
		results[kind] = read(c, c.d, dst)
	}
	if !equalBits(results[0], results[1]) {
		c.Errorf("%s: float32 %v, bf16 %v", name, results[0], results[1])
	}
}

// adds compares the results of run, which adds to a gradient of the given shape if add is set, and
// otherwise sets it. The result is the rounded sum of the gradient and of the result in float32,
// from zero.
func (c halfCase) adds(name string, add bool, shape []int, run func(dst xpu.Tensor)) {
	n, _ := xpu.Elements(shape)
	before := halfBits(c.r, n)
	wide, half := upload(c, c.d, make([]float32, n), shape...), uploadHalves(c, c.d, before, shape...)
	run(wide)
	run(half)
	got, product := readHalves(c, c.d, half), read(c, c.d, wide)
	for i, x := range product {
		if add {
			x += math.Float32frombits(uint32(before[i]) << 16)
		}
		if want := uint16(math.Float32bits(roundBF16(x)) >> 16); got[i] != want {
			c.Fatalf("%s: element %d of %v is %x, want %x: %x and %v", name, i, shape, got[i], want, before[i],
				product[i])
		}
	}
}

// halfProducts draws the sizes of products with at most 2²⁰ multiplications.
func halfProducts(t *rapid.T, d xpu.Device) {
	c, k := newHalfCase(t, d), drawSize(t, "k", 2500)
	m := drawSize(t, "m", min(200, 1<<20/k))
	n := drawSize(t, "n", min(70, 1<<20/k/m))
	c.products(m, n, k, xpu.MatMulOptions{Accumulate: rapid.Bool().Draw(t, "accumulate")})
}

// products runs each product with a right operand of bf16, and with the same numbers in float32.
// Both must compute the same bits. Then it runs each product that adds to a gradient of bf16.
func (c halfCase) products(m, n, k int, o xpu.MatMulOptions) {
	d := c.d
	a, b, transposed := c.floats(m, k), c.both(k, n), c.both(n, k)
	c.same("MatMul", []int{m, n}, func(dst xpu.Tensor, kind int) { d.MatMul(dst, a, b[kind], o) })
	c.same("MatMul, b transposed", []int{m, n}, func(dst xpu.Tensor, kind int) {
		d.MatMul(dst, a, transposed[kind].T(), o)
	})
	groups, columns := c.both(3, k, n), c.both(3, n, k)
	counts := func(rows int) xpu.Tensor {
		return uploadInts(c, d, []int32{int32(rows / 3), 0, int32(rows - rows/3)})
	}
	rows := counts(m)
	c.same("GroupedMatMul", []int{m, n}, func(dst xpu.Tensor, kind int) {
		d.GroupedMatMul(dst, a, groups[kind], rows, o)
	})
	c.same("GroupedMatMul, b transposed", []int{m, n}, func(dst xpu.Tensor, kind int) {
		d.GroupedMatMul(dst, a, columns[kind].T(), rows, o)
	})
	x, y, terms := c.floats(k, m), c.floats(k, n), counts(k)
	c.adds("MatMul", o.Accumulate, []int{m, n}, func(dst xpu.Tensor) { d.MatMul(dst, x.T(), y, o) })
	c.adds("GroupedWeightGrad", o.Accumulate, []int{3, m, n}, func(dst xpu.Tensor) {
		d.GroupedWeightGrad(dst, x, y, terms, o)
	})
}

// halfOperands runs each command but products that accepts an operand of bf16, and the same command
// with the same numbers in float32. Both must compute the same bits.
func halfOperands(t *rapid.T, d xpu.Device) {
	c := newHalfCase(t, d)
	m, n := drawSize(t, "m", 200), drawSize(t, "n", 70)
	table := c.both(5, n)
	ids := make([]int32, m)
	for i := range ids {
		ids[i] = int32(c.r.IntN(5))
	}
	numbers := uploadInts(t, d, ids)
	c.same("Embed", []int{m, n}, func(dst xpu.Tensor, kind int) { d.Embed(dst, table[kind], numbers) })

	weight, x := c.both(n), c.floats(m, n)
	norm := xpu.Norm{Epsilon: 1e-5, RStd: c.floats(m)}
	withWeight := func(kind int) xpu.Norm {
		n := norm
		n.Weight = weight[kind]
		return n
	}
	c.same("Normalize", []int{m, n}, func(dst xpu.Tensor, kind int) { d.Normalize(dst, x, withWeight(kind), false) })
	dy, dw := random(c.r, m*n), random(c.r, n)
	var dweights [2][]float32
	c.same("NormGrad", []int{m, n}, func(dst xpu.Tensor, kind int) {
		dweight := upload(t, d, dw)
		d.NormGrad(dst, upload(t, d, dy, m, n), x, withWeight(kind), dweight)
		dweights[kind] = read(t, d, dweight)
	})
	if !equalBits(dweights[0], dweights[1]) {
		t.Errorf("NormGrad: dweight in float32 %v, in bf16 %v", dweights[0], dweights[1])
	}

	tokens, half := min(m, 9), drawSize(t, "half of a head", 9)
	width := 3 * 2 * half
	q, kv := c.both(width/3), c.both(width/3)
	p := c.projections(tokens, half)
	withWeights := func(kind int) xpu.Projections {
		p := p
		p.QWeight, p.KWeight = q[kind], kv[kind]
		return p
	}
	var keys [2][]float32
	c.same("SplitHeads", []int{1, 1, tokens, 2 * half}, func(dst xpu.Tensor, kind int) {
		p := withWeights(kind)
		p.Q = dst
		d.SplitHeads(p)
		keys[kind] = read(t, d, p.K)
	})
	if !equalBits(keys[0], keys[1]) {
		t.Errorf("SplitHeads: keys in float32 %v, in bf16 %v", keys[0], keys[1])
	}
	dk, dv, dq := c.floats(1, 1, tokens, 2*half), c.floats(1, 1, tokens, 2*half), random(c.r, 2*width/3)
	var gradients [2][]float32
	c.same("JoinHeads", []int{tokens, width}, func(dst xpu.Tensor, kind int) {
		weights := upload(t, d, dq, 2, width/3)
		d.JoinHeads(withWeights(kind), dst, dk, dv, weights.Index(0), weights.Index(1))
		gradients[kind] = read(t, d, weights)
	})
	if !equalBits(gradients[0], gradients[1]) {
		t.Errorf("JoinHeads: gradients of weights in float32 %v, in bf16 %v", gradients[0], gradients[1])
	}
}

// projections returns projections of tokens to one head of 2·half numbers.
func (c halfCase) projections(tokens, half int) xpu.Projections {
	head := func() xpu.Tensor { return c.floats(1, 1, tokens, 2*half) }
	return xpu.Projections{QKV: c.floats(tokens, 6*half), Epsilon: 1e-5, RQ: c.floats(tokens), RK: c.floats(tokens),
		Cos: c.floats(tokens, half), Sin: c.floats(tokens, half), Q: head(), K: head(), V: head()}
}

// halfGradients runs each command but products that adds to a gradient of bf16.
func halfGradients(t *rapid.T, d xpu.Device) {
	c := newHalfCase(t, d)
	m, n, k := drawSize(t, "m", 200), drawSize(t, "n", 70), drawSize(t, "k", 600)
	ids := make([]int32, k)
	for i := range ids {
		ids[i] = int32(c.r.IntN(5))
	}
	numbers, b := uploadInts(t, d, ids), c.floats(k, n)
	c.adds("EmbedGrad", true, []int{5, n}, func(dst xpu.Tensor) { d.EmbedGrad(dst, b, numbers, 3) })

	bias, weight, counts := c.both(2, n), c.floats(k), uploadInts(t, d, []int32{int32(k / 3), int32(k - k/3)})
	c.adds("GroupedBiasGrad", true, []int{2, n}, func(dst xpu.Tensor) {
		d.GroupedBiasGrad(dst, b, bias[0], weight, upload(t, d, make([]float32, k)), counts)
	})
	c.same("GroupedBiasGrad, bias", []int{k}, func(dst xpu.Tensor, kind int) {
		d.GroupedBiasGrad(upload(t, d, make([]float32, 2*n), 2, n), b, bias[kind], weight, dst, counts)
	})
	c.same("GroupedBias", []int{k, n}, func(dst xpu.Tensor, kind int) {
		d.GroupedBias(dst, bias[kind], weight, counts)
	})
	sinks, context, keys := c.both(n), random(c.r, k*2*n), c.floats(1, 1, k, 2)
	a := xpu.Attention{Q: c.floats(1, n, k, 2), K: keys, V: keys, LSE: c.floats(1, n, k)}
	c.same("AddSinks", []int{k, 2 * n}, func(dst xpu.Tensor, kind int) {
		a := a
		a.Context, a.LSE = dst, upload(t, d, context[:k*n], 1, n, k)
		d.AddSinks(a, sinks[kind])
	})
	a.Context = upload(t, d, context, k, 2*n)
	c.adds("SinksGrad", true, []int{n}, func(dst xpu.Tensor) { d.SinksGrad(a, sinks[0], a.Context, dst) })

	x, dy := c.floats(m, n), random(c.r, m*n)
	norm := xpu.Norm{Epsilon: 1e-5, Weight: c.floats(n), RStd: c.floats(m)}
	c.adds("NormGrad", true, []int{n}, func(dst xpu.Tensor) {
		d.NormGrad(upload(t, d, make([]float32, m*n), m, n), upload(t, d, dy, m, n), x, norm, dst)
	})

	tokens, half := min(m, 9), drawSize(t, "half of a head", 9)
	width := 3 * 2 * half
	p := c.projections(tokens, half)
	p.QWeight, p.KWeight = c.floats(width/3), c.floats(width/3)
	dk, dv, dqkv := c.floats(1, 1, tokens, 2*half), c.floats(1, 1, tokens, 2*half), random(c.r, tokens*width)
	c.adds("JoinHeads", true, []int{2, width / 3}, func(dst xpu.Tensor) {
		d.JoinHeads(p, upload(t, d, dqkv, tokens, width), dk, dv, dst.Index(0), dst.Index(1))
	})
}

// halfUpdates compares the norm of a gradient of bf16, and every update by it, with the results for
// the same numbers in float32. Updates that replace the gradient must panic.
func halfUpdates(t *rapid.T, d xpu.Device) {
	n := rapid.IntRange(1, xpu.BlockSize+10_000).Draw(t, "n")
	r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 3))
	half := uploadHalves(t, d, halfBits(r, n))
	wide := upload(t, d, read(t, d, half))
	d.Zero(half.Rows(0, n/2))
	d.Zero(wide.Rows(0, n/2))
	u := rapid.SampledFrom(UpdateCases).Draw(t, "update").Update
	if u.ReplacesGrad {
		m := xpu.Moments{Weight: wide, Grad: half, M: wide, V: wide}
		if !panics(func() { d.Update(u, []xpu.Moments{m}, nil, nil) }) {
			t.Errorf("%s: a gradient of bf16 was accepted, but the result is float32", u.Rule)
		}
		return
	}
	measured := rapid.Bool().Draw(t, "measured")
	start := [3][]float32{random(r, n), random(r, n), random(r, n)}
	for i, v := range start[2] {
		start[2][i] = v * v
	}
	var results [2][]float32
	var sums [2][]float64
	for kind, grad := range []xpu.Tensor{wide, half} {
		blocks := xpu.Blocks([]xpu.Tensor{grad})
		sums[kind] = make([]float64, 3*blocks)
		before, change := sums[kind][blocks:2*blocks], sums[kind][2*blocks:]
		d.SumSquares([]xpu.Tensor{grad}, sums[kind][:blocks])
		m := xpu.Moments{Weight: upload(t, d, start[0]), Grad: grad, M: upload(t, d, start[1])}
		if u.States > 1 {
			m.V = upload(t, d, start[2])
		}
		if !measured {
			before, change = nil, nil
		}
		d.Update(u, []xpu.Moments{m}, before, change)
		for _, x := range []xpu.Tensor{m.Weight, m.M, m.V} {
			if x.Present() {
				results[kind] = append(results[kind], read(t, d, x)...)
			}
		}
	}
	if !equalBits(results[0], results[1]) {
		t.Errorf("%s: another result than in float32", u.Rule)
	}
	if !slices.Equal(sums[0], sums[1]) {
		t.Errorf("%s: sums %v, in float32 %v", u.Rule, sums[1], sums[0])
	}
}
