package devicetest

import (
	"math"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"mula/xpu"
)

// biasFamily checks biases of groups of rows, SwiGLU with clamps, and sinks of an attention.
func biasFamily(t *testing.T, d xpu.Device, tolerance float64) {
	t.Run("biases", func(t *testing.T) {
		for _, counts := range [][]int32{{1}, {0, 3, 0}, {70, 0, 1, 200}, {0, 0}} {
			for _, weighted := range []bool{false, true} {
				groupedBias(t, d, rand.New(rand.NewPCG(21, uint64(len(counts)))), counts, 37, weighted, tolerance)
			}
		}
		rapid.Check(t, func(t *rapid.T) {
			counts := rapid.SliceOfN(rapid.Int32Range(0, 20), 1, 9).Draw(t, "counts")
			source := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 22))
			groupedBias(t, d, source, counts, rapid.IntRange(1, 300).Draw(t, "width"),
				rapid.Bool().Draw(t, "weighted"), tolerance)
		})
	})
	t.Run("clamps", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) {
			source := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 23))
			clampedSwiGLU(t, d, source, rapid.IntRange(0, 40).Draw(t, "rows"), rapid.IntRange(1, 200).Draw(t, "width"),
				rapid.Bool().Draw(t, "weighted"), tolerance)
		})
	})
	t.Run("sinks", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) {
			h := xpu.Heads{Rows: rapid.IntRange(0, 3).Draw(t, "rows"), Length: rapid.IntRange(1, 80).Draw(t, "length"),
				KVHeads: rapid.IntRange(1, 3).Draw(t, "heads of keys"),
				Size:    2 * rapid.IntRange(1, 40).Draw(t, "half a head")}
			h.Heads = h.KVHeads * rapid.IntRange(1, 3).Draw(t, "share")
			sinks(t, d, rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 24)), h, tolerance)
		})
	})
}

// groupedBias checks GroupedBias and its gradients.
func groupedBias(t tester, d xpu.Device, source *rand.Rand, counts []int32, width int, weighted bool,
	tolerance float64) {
	var groups []int // of each row
	for g, n := range counts {
		for range n {
			groups = append(groups, g)
		}
	}
	rows := len(groups)
	x, dy, bias, weight := random(source, rows*width), random(source, rows*width), random(source, len(counts)*width),
		[]float32(nil)
	dbias, dweight := random(source, len(bias)), random(source, rows)
	if weighted {
		weight = random(source, rows)
	}
	want, size := make([]float64, len(x)), make([]float64, len(x))
	wantBias, biasSize := make([]float64, len(bias)), make([]float64, len(bias))
	wantWeight, weightSize := make([]float64, rows), make([]float64, rows)
	for i, v := range dbias {
		wantBias[i], biasSize[i] = float64(v), math.Abs(float64(v))
	}
	for r, g := range groups {
		w := 1.0
		wantWeight[r], weightSize[r] = float64(dweight[r]), math.Abs(float64(dweight[r]))
		if weighted {
			w = float64(weight[r])
		}
		for j := range width {
			b, dy := float64(bias[g*width+j]), float64(dy[r*width+j])
			want[r*width+j] = float64(x[r*width+j]) + w*b
			size[r*width+j] = math.Abs(float64(x[r*width+j])) + math.Abs(w*b)
			wantBias[g*width+j] += w * dy
			biasSize[g*width+j] += math.Abs(w * dy)
			if weighted {
				wantWeight[r] += b * dy
				weightSize[r] += math.Abs(b * dy)
			}
		}
	}
	deviceX, deviceBias := upload(t, d, x, rows, width), upload(t, d, bias, len(counts), width)
	deviceCounts, grads := uploadInts(t, d, counts), upload(t, d, dbias, len(counts), width)
	deviceWeight, weightGrads := xpu.Tensor{}, upload(t, d, dweight)
	if weighted {
		deviceWeight = upload(t, d, weight)
	}
	d.GroupedBias(deviceX, deviceBias, deviceWeight, deviceCounts)
	compare(t, "rows with biases", read(t, d, deviceX), want, size, tolerance)
	d.GroupedBiasGrad(grads, upload(t, d, dy, rows, width), deviceBias, deviceWeight, weightGrads, deviceCounts)
	compare(t, "the gradient of biases", read(t, d, grads), wantBias, biasSize, tolerance)
	compare(t, "the gradient of the weights", read(t, d, weightGrads), wantWeight, weightSize, tolerance)
}

// clampedSwiGLU checks ClampedSwiGLU and its gradient.
func clampedSwiGLU(t tester, d xpu.Device, source *rand.Rand, rows, width int, weighted bool, tolerance float64) {
	c := xpu.Clamp{Limit: 3, Alpha: 1.702}
	gateUp, dact, weight := random(source, 2*rows*width), random(source, rows*width), []float32(nil)
	for i := range gateUp {
		if gateUp[i] *= 6; i%7 == 0 {
			gateUp[i] = c.Limit // the gradient at a limit is not zero
		}
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
			gateAt, at, limit, alpha := 2*r*width+j, r*width+j, float64(c.Limit), float64(c.Alpha)
			gate, up, da := float64(gateUp[gateAt]), float64(gateUp[gateAt+width]), float64(dact[at])
			g, u := min(gate, limit), max(-limit, min(up, limit))
			s := 1 / (1 + math.Exp(-alpha*g))
			act[at], actSize[at] = g*s*(u+1)*w, math.Abs(g*s*w)*(math.Abs(u)+1)
			if gate <= limit {
				dGateUp[gateAt] = da * w * (u + 1) * s * (1 + alpha*g*(1-s))
			}
			if math.Abs(up) <= limit {
				dGateUp[gateAt+width] = da * w * g * s
			}
			dGateUpSize[gateAt] = math.Abs(da*w*s) * (math.Abs(u) + 1) * (1 + math.Abs(alpha*g)*(1-s))
			dGateUpSize[gateAt+width] = math.Abs(da * w * g * s)
			if weighted {
				dWeight[r] += g * s * (u + 1) * da
				dWeightSize[r] += math.Abs(g*s*da) * (math.Abs(u) + 1)
			}
		}
	}
	deviceAct, deviceGateUp := upload(t, d, make([]float32, n), rows, width), upload(t, d, gateUp, rows, 2*width)
	var deviceWeight, deviceDWeight xpu.Tensor
	if weighted {
		deviceWeight, deviceDWeight = upload(t, d, weight), upload(t, d, make([]float32, rows))
	}
	d.ClampedSwiGLU(deviceAct, deviceGateUp, deviceWeight, c)
	compare(t, "ClampedSwiGLU", read(t, d, deviceAct), act, actSize, tolerance)
	d.Write(deviceAct, make([]float32, n))
	d.ClampedSwiGLUGrad(deviceGateUp, deviceAct, upload(t, d, dact, rows, width), deviceWeight, deviceDWeight, c)
	compare(t, "ClampedSwiGLU, again", read(t, d, deviceAct), act, actSize, tolerance)
	compare(t, "the gradient of gate and up", read(t, d, deviceGateUp), dGateUp, dGateUpSize, tolerance)
	if weighted {
		compare(t, "the gradient of the weights", read(t, d, deviceDWeight), dWeight, dWeightSize, tolerance)
	}
}

// sinks checks AddSinks and SinksGrad.
func sinks(t tester, d xpu.Device, source *rand.Rand, h xpu.Heads, tolerance float64) {
	tokens, width := h.Tokens(), h.Heads*h.Size
	context, dcontext := random(source, tokens*width), random(source, tokens*width)
	lse, sinks, dsinks := random(source, tokens*h.Heads), random(source, h.Heads), random(source, h.Heads)
	for i := range lse {
		lse[i] *= 3
	}
	sinks[0] *= 100 // one of the exponentials is 0
	q, keys := upload(t, d, make([]float32, tokens*width), h.Rows, h.Heads, h.Length, h.Size),
		upload(t, d, make([]float32, tokens*h.KVHeads*h.Size), h.Rows, h.KVHeads, h.Length, h.Size)
	a := xpu.Attention{Q: q, K: keys, V: keys, Context: upload(t, d, context, tokens, width),
		LSE: upload(t, d, lse, h.Rows, h.Heads, h.Length)}
	want, size, totals, totalSize := make([]float64, len(context)), make([]float64, len(context)),
		make([]float64, len(lse)), make([]float64, len(lse))
	for i, l := range lse {
		head := i / h.Length % h.Heads
		l, sink := float64(l), float64(sinks[head])
		totals[i] = max(l, sink) + math.Log1p(math.Exp(-math.Abs(l-sink)))
		totalSize[i] = math.Abs(l) + math.Abs(sink) + 1
		token := i/h.Length/h.Heads*h.Length + i%h.Length
		for j := range h.Size {
			at := token*width + head*h.Size + j
			size[at] = math.Abs(float64(context[at])) // the relative error of an exponential is the error of its power
			want[at] = float64(context[at]) * math.Exp(l-totals[i])
		}
	}
	deviceSinks, grads := upload(t, d, sinks), upload(t, d, dsinks)
	d.AddSinks(a, deviceSinks)
	compare(t, "logsumexp with sinks", read(t, d, a.LSE), totals, totalSize, tolerance)
	compare(t, "context with sinks", read(t, d, a.Context), want, size, 10*tolerance)

	grad, gradSize := make([]float64, h.Heads), make([]float64, h.Heads)
	for head, v := range dsinks {
		grad[head], gradSize[head] = float64(v), math.Abs(float64(v))
		for token := range tokens {
			l := totals[(token/h.Length*h.Heads+head)*h.Length+token%h.Length]
			p := math.Exp(float64(sinks[head]) - l)
			for j := range h.Size {
				at := token*width + head*h.Size + j
				grad[head] -= p * float64(dcontext[at]) * want[at]
				gradSize[head] += math.Abs(p * float64(dcontext[at]) * want[at])
			}
		}
	}
	d.SinksGrad(a, deviceSinks, upload(t, d, dcontext, tokens, width), grads)
	compare(t, "the gradient of sinks", read(t, d, grads), grad, gradSize, 10*tolerance)
}
