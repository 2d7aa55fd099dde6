package devicetest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"mula/xpu"
)

func expertsFamily(t *testing.T, d xpu.Device, tolerance float64) {
	for i, c := range []struct{ tokens, perToken, width int }{{1, 1, 1}, {3, 2, 5}, {40, 8, 64}, {7, 3, 257},
		{300, 1, 12}, {2, 4, 1030}, {0, 2, 8}} {
		t.Run(fmt.Sprintf("%d tokens, %d rows each, width %d", c.tokens, c.perToken, c.width), func(t *testing.T) {
			source := rand.New(rand.NewPCG(11, uint64(i)))
			gatherRows(t, d, source, c.tokens, c.tokens*c.perToken, c.width)
			sumRows(t, d, source, c.tokens, c.perToken, c.width)
			for _, weighted := range []bool{false, true} {
				swiGLU(t, d, source, c.tokens*c.perToken, c.width, weighted, tolerance)
			}
		})
	}
	t.Run("any", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) {
			tokens, perToken := rapid.IntRange(0, 40).Draw(t, "tokens"), rapid.IntRange(1, 9).Draw(t, "perToken")
			width, source := rapid.IntRange(1, 300).Draw(t, "width"), rand.New(rand.NewPCG(12,
				rapid.Uint64().Draw(t, "seed")))
			gatherRows(t, d, source, tokens, tokens*perToken, width)
			sumRows(t, d, source, tokens, perToken, width)
			swiGLU(t, d, source, tokens*perToken, width, rapid.Bool().Draw(t, "weighted"), tolerance)
		})
	})
	t.Run("large gates", func(t *testing.T) { largeGates(t, d) })
}

func gatherRows(t tester, d xpu.Device, source *rand.Rand, tokens, rows, width int) {
	x, tokenOf := random(source, tokens*width), make([]int32, rows)
	var want []float32
	for r := range tokenOf {
		tokenOf[r] = int32(source.IntN(tokens))
		want = append(want, x[int(tokenOf[r])*width:][:width]...)
	}
	got := upload(t, d, make([]float32, rows*width), rows, width)
	d.GatherRows(got, upload(t, d, x, tokens, width), uploadInts(t, d, tokenOf))
	if !slices.Equal(read(t, d, got), want) {
		t.Fatalf("%d rows of %d tokens, width %d: not the rows of the tokens", rows, tokens, width)
	}
}

// sumRows compares bits: the order of the sums is specified.
func sumRows(t tester, d xpu.Device, source *rand.Rand, tokens, perToken, width int) {
	x, y, rowOf := random(source, tokens*width), random(source, tokens*perToken*width), make([]int32, tokens*perToken)
	for i, r := range source.Perm(len(rowOf)) {
		rowOf[i] = int32(r)
	}
	dx, got := upload(t, d, x, tokens, width), upload(t, d, make([]float32, len(x)), tokens, width)
	dy, rows := upload(t, d, y, tokens*perToken, width), uploadInts(t, d, rowOf, tokens, perToken)
	for _, test := range []struct {
		what    string
		dst, x  xpu.Tensor
		initial []float32
	}{{"without x", got, xpu.Tensor{}, nil}, {"with x", got, dx, x}, {"in place", dx, dx, x}} {
		d.SumRows(test.dst, test.x, dy, rows)
		for i, v := range read(t, d, test.dst) {
			token, column := i/width, i%width
			first := rowOf[token*perToken:][:perToken]
			var want float32
			if test.initial != nil {
				want = test.initial[i]
			} else {
				want, first = y[int(first[0])*width+column], first[1:]
			}
			for _, r := range first {
				want += y[int(r)*width+column]
			}
			if v != want {
				t.Fatalf("%s: token %d, column %d: %v, want %v", test.what, token, column, v, want)
			}
		}
	}
}

// swiGLU checks SwiGLU and its gradient.
func swiGLU(t tester, d xpu.Device, source *rand.Rand, rows, width int, weighted bool, tolerance float64) {
	gateUp, dact, weight := random(source, 2*rows*width), random(source, rows*width), []float32(nil)
	for i := range gateUp {
		gateUp[i] *= 6
	}
	if weighted {
		weight = random(source, rows)
	}
	n := rows * width
	act, dGateUp, dWeight := make([]float64, n), make([]float64, 2*n), make([]float64, len(weight))
	actSize, dGateUpSize, dWeightSize := make([]float64, n), make([]float64, 2*n), make([]float64, len(weight))
	for r := range rows {
		w := 1.0
		if weighted {
			w = float64(weight[r])
		}
		for j := range width {
			gateAt, at := 2*r*width+j, r*width+j
			g, u, da := float64(gateUp[gateAt]), float64(gateUp[gateAt+width]), float64(dact[at])
			s := 1 / (1 + math.Exp(-g))
			act[at] = g * s * u * w
			dGateUp[gateAt], dGateUp[gateAt+width] = da*w*u*s*(1+g*(1-s)), da*w*g*s
			actSize[at] = math.Abs(act[at])
			dGateUpSize[gateAt], dGateUpSize[gateAt+width] = math.Abs(da*w*u*s)*(1+math.Abs(g)*(1-s)),
				math.Abs(da*w*g*s)
			if weighted {
				dWeight[r] += g * s * u * da
				dWeightSize[r] += math.Abs(g * s * u * da)
			}
		}
	}
	deviceAct, deviceGateUp := upload(t, d, make([]float32, n), rows, width), upload(t, d, gateUp, rows, 2*width)
	var deviceWeight, deviceDWeight xpu.Tensor
	if weighted {
		deviceWeight, deviceDWeight = upload(t, d, weight), upload(t, d, make([]float32, rows))
	}
	d.SwiGLU(deviceAct, deviceGateUp, deviceWeight)
	compare(t, "SwiGLU", read(t, d, deviceAct), act, actSize, tolerance)
	d.Write(deviceAct, slices.Repeat([]float32{-7}, n))
	d.SwiGLUGrad(deviceGateUp, deviceAct, upload(t, d, dact, rows, width), deviceWeight, deviceDWeight)
	compare(t, "SwiGLU, again", read(t, d, deviceAct), act, actSize, tolerance)
	compare(t, "the gradient of gate and up", read(t, d, deviceGateUp), dGateUp, dGateUpSize, tolerance)
	if weighted {
		compare(t, "the gradient of the weights", read(t, d, deviceDWeight), dWeight, dWeightSize, tolerance)
	}
}

// largeGates checks that the limits of SwiGLU and its gradient are finite: silu is 0 at one end and
// the identity at the other.
func largeGates(t tester, d xpu.Device) {
	for _, test := range []struct{ gate, act, dGate, dUp float32 }{{-1000, 0, 0, 0}, {1000, 2000, 2, 1000},
		{0, 0, 1, 0}} {
		result, both := upload(t, d, []float32{0}, 1, 1), upload(t, d, []float32{test.gate, 2}, 1, 2)
		d.SwiGLU(result, both, xpu.Tensor{})
		d.SwiGLUGrad(both, result, upload(t, d, []float32{1}, 1, 1), xpu.Tensor{}, xpu.Tensor{})
		act, gateUp := read(t, d, result), read(t, d, both)
		if act[0] != test.act || gateUp[0] != test.dGate || gateUp[1] != test.dUp {
			t.Errorf("gate %g: %v, gradient %v; want %v", test.gate, act, gateUp, test)
		}
	}
}
