package devicetest

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"mula/xpu"
)

// halvesFamily checks tensors of bf16, if the device allocates them.
func halvesFamily(t *testing.T, d xpu.Device, _ float64) {
	x, err := d.New(xpu.BFloat16, 3)
	if err != nil {
		t.Skip(err)
	}
	d.Release(x)
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
	t.Run("updates", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) { halfUpdates(t, d) })
	})
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

// halfOperands runs each command that accepts an operand of bf16, and the same command with the
// same numbers in float32. Both must compute the same bits.
func halfOperands(t *rapid.T, d xpu.Device) {
	size := func(name string, most int) int { return rapid.IntRange(1, most).Draw(t, name) }
	r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
	// both returns the same numbers in either type
	both := func(shape ...int) [2]xpu.Tensor {
		n, _ := xpu.Elements(shape)
		half := uploadHalves(t, d, halfBits(r, n), shape...)
		return [2]xpu.Tensor{upload(t, d, read(t, d, half), shape...), half}
	}
	// same runs a command with either type and compares the results.
	same := func(name string, shape []int, run func(dst xpu.Tensor, kind int)) {
		n, _ := xpu.Elements(shape)
		x := random(r, n)
		var results [2][]float32
		for kind := range results {
			dst := upload(t, d, x, shape...)
			run(dst, kind)
			results[kind] = read(t, d, dst)
		}
		if !equalBits(results[0], results[1]) {
			t.Errorf("%s: float32 %v, bf16 %v", name, results[0], results[1])
		}
	}
	floats := func(shape ...int) xpu.Tensor {
		n, _ := xpu.Elements(shape)
		return upload(t, d, random(r, n), shape...)
	}

	m, n, k := size("m", 200), size("n", 70), size("k", 600)
	o := xpu.MatMulOptions{Accumulate: rapid.Bool().Draw(t, "accumulate")}
	a, b, transposed := floats(m, k), both(k, n), both(n, k)
	same("MatMul", []int{m, n}, func(dst xpu.Tensor, kind int) { d.MatMul(dst, a, b[kind], o) })
	same("MatMul, b transposed", []int{m, n}, func(dst xpu.Tensor, kind int) {
		d.MatMul(dst, a, transposed[kind].T(), o)
	})

	groups := both(3, k, n)
	counts := uploadInts(t, d, []int32{int32(m / 3), 0, int32(m - m/3)})
	columns := both(3, n, k)
	same("GroupedMatMul", []int{m, n}, func(dst xpu.Tensor, kind int) {
		d.GroupedMatMul(dst, a, groups[kind], counts, o)
	})
	same("GroupedMatMul, b transposed", []int{m, n}, func(dst xpu.Tensor, kind int) {
		d.GroupedMatMul(dst, a, columns[kind].T(), counts, o)
	})

	table := both(5, n)
	ids := make([]int32, m)
	for i := range ids {
		ids[i] = int32(r.IntN(5))
	}
	numbers := uploadInts(t, d, ids)
	same("Embed", []int{m, n}, func(dst xpu.Tensor, kind int) { d.Embed(dst, table[kind], numbers) })

	weight, x := both(n), floats(m, n)
	norm := xpu.Norm{Epsilon: 1e-5, RStd: floats(m)}
	withWeight := func(kind int) xpu.Norm {
		n := norm
		n.Weight = weight[kind]
		return n
	}
	same("Normalize", []int{m, n}, func(dst xpu.Tensor, kind int) { d.Normalize(dst, x, withWeight(kind), false) })
	dy, dw := random(r, m*n), random(r, n)
	var dweights [2][]float32
	same("NormGrad", []int{m, n}, func(dst xpu.Tensor, kind int) {
		dweight := upload(t, d, dw)
		d.NormGrad(dst, upload(t, d, dy, m, n), x, withWeight(kind), dweight)
		dweights[kind] = read(t, d, dweight)
	})
	if !equalBits(dweights[0], dweights[1]) {
		t.Errorf("NormGrad: dweight in float32 %v, in bf16 %v", dweights[0], dweights[1])
	}

	tokens, half := min(m, 9), size("half of a head", 9)
	width := 3 * 2 * half
	q, kv := both(width/3), both(width/3)
	p := xpu.Projections{QKV: floats(tokens, width), Epsilon: 1e-5, RQ: floats(tokens), RK: floats(tokens),
		Cos: floats(tokens, half), Sin: floats(tokens, half), K: floats(1, 1, tokens, 2*half),
		V: floats(1, 1, tokens, 2*half)}
	withWeights := func(kind int) xpu.Projections {
		p := p
		p.QWeight, p.KWeight = q[kind], kv[kind]
		return p
	}
	var keys [2][]float32
	same("SplitHeads", []int{1, 1, tokens, 2 * half}, func(dst xpu.Tensor, kind int) {
		p := withWeights(kind)
		p.Q = dst
		d.SplitHeads(p)
		keys[kind] = read(t, d, p.K)
	})
	if !equalBits(keys[0], keys[1]) {
		t.Errorf("SplitHeads: keys in float32 %v, in bf16 %v", keys[0], keys[1])
	}
	p.Q = floats(1, 1, tokens, 2*half)
	dk, dv, dq := floats(1, 1, tokens, 2*half), floats(1, 1, tokens, 2*half), random(r, 2*width/3)
	var gradients [2][]float32
	same("JoinHeads", []int{tokens, width}, func(dst xpu.Tensor, kind int) {
		weights := upload(t, d, dq, 2, width/3)
		d.JoinHeads(withWeights(kind), dst, dk, dv, weights.Index(0), weights.Index(1))
		gradients[kind] = read(t, d, weights)
	})
	if !equalBits(gradients[0], gradients[1]) {
		t.Errorf("JoinHeads: gradients of weights in float32 %v, in bf16 %v", gradients[0], gradients[1])
	}
}

// halfGradients runs each command that adds to a gradient of bf16. The result is the rounded sum of
// the gradient and of the same command's result in float32, from zero.
func halfGradients(t *rapid.T, d xpu.Device) {
	size := func(name string, most int) int { return rapid.IntRange(1, most).Draw(t, name) }
	r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 2))
	floats := func(shape ...int) xpu.Tensor {
		n, _ := xpu.Elements(shape)
		return upload(t, d, random(r, n), shape...)
	}
	// adds compares the results of run, which adds to a gradient of the given shape if add is set,
	// and otherwise sets it.
	adds := func(name string, add bool, shape []int, run func(dst xpu.Tensor)) {
		n, _ := xpu.Elements(shape)
		before := halfBits(r, n)
		wide, half := upload(t, d, make([]float32, n), shape...), uploadHalves(t, d, before, shape...)
		run(wide)
		run(half)
		got, product := readHalves(t, d, half), read(t, d, wide)
		for i, x := range product {
			if add {
				x += math.Float32frombits(uint32(before[i]) << 16)
			}
			if want := uint16(math.Float32bits(roundBF16(x)) >> 16); got[i] != want {
				t.Fatalf("%s: element %d of %v is %x, want %x: %x and %v", name, i, shape, got[i], want, before[i],
					product[i])
			}
		}
	}

	m, n, k := size("m", 200), size("n", 70), size("k", 2500)
	o := xpu.MatMulOptions{Accumulate: rapid.Bool().Draw(t, "accumulate")}
	a, b := floats(k, m), floats(k, n)
	adds("MatMul", o.Accumulate, []int{m, n}, func(dst xpu.Tensor) { d.MatMul(dst, a.T(), b, o) })
	counts := uploadInts(t, d, []int32{int32(k / 3), 0, int32(k - k/3)})
	adds("GroupedWeightGrad", o.Accumulate, []int{3, m, n}, func(dst xpu.Tensor) {
		d.GroupedWeightGrad(dst, a, b, counts, o)
	})

	ids := make([]int32, k)
	for i := range ids {
		ids[i] = int32(r.IntN(5))
	}
	numbers := uploadInts(t, d, ids)
	adds("EmbedGrad", true, []int{5, n}, func(dst xpu.Tensor) { d.EmbedGrad(dst, b, numbers, 3) })

	x, dy := floats(m, n), random(r, m*n)
	norm := xpu.Norm{Epsilon: 1e-5, Weight: floats(n), RStd: floats(m)}
	adds("NormGrad", true, []int{n}, func(dst xpu.Tensor) {
		d.NormGrad(upload(t, d, make([]float32, m*n), m, n), upload(t, d, dy, m, n), x, norm, dst)
	})

	tokens, half := min(m, 9), size("half of a head", 9)
	width := 3 * 2 * half
	p := xpu.Projections{QKV: floats(tokens, width), Epsilon: 1e-5, RQ: floats(tokens), RK: floats(tokens),
		QWeight: floats(width / 3), KWeight: floats(width / 3), Cos: floats(tokens, half), Sin: floats(tokens, half),
		Q: floats(1, 1, tokens, 2*half), K: floats(1, 1, tokens, 2*half), V: floats(1, 1, tokens, 2*half)}
	dk, dv, dqkv := floats(1, 1, tokens, 2*half), floats(1, 1, tokens, 2*half), random(r, tokens*width)
	adds("JoinHeads", true, []int{2, width / 3}, func(dst xpu.Tensor) {
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
