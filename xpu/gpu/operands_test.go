package gpu

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"mula/internal/longtest"
	"mula/xpu"
	"mula/xpu/opencl"
)

// The commands of a layer of experts compute the same bits whether operands are float32 and packed,
// bfloat16 and packed, or bfloat16 and read as they are: in sizes that the direct loads accept, and
// in sizes that they do not.
func TestOperandsKeepBits(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	devices := []*Device{newTest(t, xpu.BF16, emulated["blocks"], opencl.CPU),
		newTest(t, xpu.BF16, emulated["direct"], opencl.CPU)}
	for _, test := range []struct {
		hidden, width int
		weights       xpu.DType
	}{{64, 32, xpu.Float32}, {40, 96, xpu.BFloat16}, {10, 7, xpu.Float32}, {34, 5, xpu.BFloat16}} {
		t.Run(fmt.Sprintf("%d, %d, %s", test.hidden, test.width, test.weights), func(t *testing.T) {
			var want [][]float32
			for i, d := range devices {
				for _, operands := range []bool{false, true} {
					got := expertLayer(t, d, test.hidden, test.width, test.weights, operands)
					if want == nil {
						want = got
					}
					for j := range want {
						if !slices.Equal(got[j], want[j]) {
							t.Errorf("device %d, operands %v: result %d has other bits", i, operands, j)
						}
					}
				}
			}
		})
	}
}

// expertLayer runs the forward and the backward pass of four experts, and returns their results. If
// operands is set, matrices that only products read are operands.
func expertLayer(t *testing.T, d *Device, hidden, width int, weights xpu.DType, operands bool) (results [][]float32) {
	counts := []int32{5, 0, 39, 2}
	const tokens, rows = 9, 46
	as := func(x xpu.Tensor) xpu.Tensor {
		if operands {
			return x.AsOperand()
		}
		return x
	}
	r := rand.New(rand.NewPCG(7, uint64(hidden)))
	numbers := func(shape ...int) xpu.Tensor {
		n, _ := xpu.Elements(shape)
		x := upload(t, d, normal(r, n), shape...)
		t.Cleanup(func() { d.Release(x) })
		return x
	}
	matrices := func(shape ...int) xpu.Tensor {
		x, err := d.New(weights, shape...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.Release(x) })
		n, _ := xpu.Elements(shape)
		d.Write(x, normal(r, n))
		return x
	}
	order := make([]int32, rows)
	for i := range order {
		order[i] = int32(i * 5 % tokens)
	}
	tokenOf, groups := uploadInts(t, d, order), uploadInts(t, d, counts)
	x, dy, weight := numbers(tokens, hidden), numbers(tokens, hidden), numbers(rows)
	up, down := matrices(len(counts), 2*width, hidden), matrices(len(counts), hidden, width)
	dup, ddown := numbers(len(counts), 2*width, hidden), numbers(len(counts), hidden, width)
	gathered, gateUp, act := numbers(rows, hidden), numbers(rows, 2*width), numbers(rows, width)
	expert, dact, dweight := numbers(rows, hidden), numbers(rows, width), numbers(rows)
	keep := func(x xpu.Tensor) { results = append(results, numbersOf(t, d, x)) }
	none, accumulate := xpu.MatMulOptions{}, xpu.MatMulOptions{Accumulate: true}

	h, rstd := numbers(tokens, hidden), numbers(tokens)
	one := numbers(hidden)
	d.Normalize(as(h), x, xpu.Norm{Epsilon: 1e-5, Weight: one, RStd: rstd}, false)
	d.GatherRows(as(gathered), h, tokenOf)
	d.GroupedMatMul(gateUp, gathered, up.T(), groups, none)
	d.SwiGLU(as(act), gateUp, weight)
	d.GroupedMatMul(expert, act, down.T(), groups, none)
	keep(gateUp)
	keep(expert)
	d.GatherRows(as(expert), dy, tokenOf)
	d.GroupedMatMul(dact, expert, down, groups, none)
	keep(dact)
	d.SwiGLUGrad(as(gateUp), as(act), dact, weight, dweight)
	d.GroupedMatMul(gathered, gateUp, up, groups, none)
	keep(gathered)
	keep(dweight)
	d.GroupedWeightGrad(ddown, expert, act, groups, accumulate)
	d.GatherRows(as(gathered), h, tokenOf)
	d.GroupedWeightGrad(dup, gateUp, gathered, groups, accumulate)
	keep(dup)
	keep(ddown)

	// A sum, which is not rounded when it is written, is an operand of two products. One reads some
	// of its rows.
	d.Add(as(h), x, dy)
	matrix, square := matrices(width, hidden), numbers(hidden, hidden)
	d.MatMul(act.Rows(0, 4), h.Rows(3, 7), matrix.T(), none)
	d.MatMul(square, h.T(), x, none)
	keep(act.Rows(0, 4))
	keep(square)
	d.Release(tokenOf)
	d.Release(groups)
	for _, x := range results {
		for _, v := range x {
			if math.IsNaN(float64(v)) {
				t.Fatal("a result is NaN")
			}
		}
	}
	return results
}

// A matrix that was written for products alone is refused by other commands, until it is written
// again.
func TestOperandsAreRefused(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	d := newTest(t, xpu.BF16, emulated["blocks"], opencl.CPU)
	x, y := upload(t, d, make([]float32, 64), 8, 8), upload(t, d, make([]float32, 64), 8, 8)
	refused := func(what string, f func()) {
		t.Helper()
		defer func() {
			t.Helper()
			if recover() == nil {
				t.Errorf("%s was not refused", what)
			}
		}()
		f()
	}
	d.Add(x.AsOperand(), y, y)
	refused("Add", func() { d.Add(y, x, y) })
	refused("Copy", func() { d.Copy(y, x) })
	refused("Read", func() { numbersOf(t, d, x) })
	refused("a matrix of another shape", func() {
		d.MatMul(y.Rows(0, 2).Reshape(4, 4), x.Reshape(4, 16), y.Reshape(16, 4), xpu.MatMulOptions{})
	})
	d.Zero(x)
	numbersOf(t, d, x)
}
