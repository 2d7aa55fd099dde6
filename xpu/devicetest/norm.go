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

// A normCase is a norm of some rows, an RMSNorm if rms.
type normCase struct {
	tokens, width int
	rms, known    bool
	zero          bool // all rows are zero
}

func (c normCase) String() string {
	return fmt.Sprintf("%d rows of %d, rms %v, known %v, zero %v", c.tokens, c.width, c.rms, c.known, c.zero)
}

func normFamily(t *testing.T, d xpu.Device, tolerance float64) {
	tolerance = min(tolerance, 1e-5) // no product whose operands would be rounded
	for i, size := range [][2]int{{1, 1}, {3, 2}, {65, 7}, {2, 16}, {4, 63}, {5, 64}, {3, 65}, {130, 128}, {2, 130},
		{7, 512}, {1, 2050}, {1100, 6}, {0, 8}} {
		for variant := range 4 {
			c := normCase{tokens: size[0], width: size[1], rms: variant%2 == 0, known: variant >= 2}
			t.Run(c.String(), func(t *testing.T) { c.check(t, d, tolerance, uint64(4*i+variant)) })
		}
	}
	for _, rms := range []bool{false, true} {
		c := normCase{tokens: 3, width: 40, rms: rms, zero: true}
		t.Run(c.String(), func(t *testing.T) { c.check(t, d, tolerance, 1) })
	}
	t.Run("random sizes", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) {
			c := normCase{tokens: rapid.IntRange(1, 150).Draw(t, "rows"), width: rapid.IntRange(1, 300).Draw(t,
				"width"), rms: rapid.Bool().Draw(t, "rms"),
				known: rapid.Bool().Draw(t, "known")}
			c.check(t, d, tolerance, rapid.Uint64().Draw(t, "seed"))
		})
	})
}

// check compares a norm and its gradient with the formulas.
func (c normCase) check(t tester, d xpu.Device, tolerance float64, seed uint64) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 2))
	x := random(r, c.tokens*c.width)
	for i := range x {
		x[i] = 2*x[i] + 1 // a mean far from zero
		if c.zero {
			x[i] = 0
		}
	}
	n := xpu.Norm{Epsilon: 1e-5}
	weight := []float32{}
	if c.rms {
		weight = random(r, c.width)
	}
	mean, rstd := poison(c.tokens), poison(c.tokens)
	if c.known {
		mean, rstd = random(r, c.tokens), random(r, c.tokens)
	}
	dx, dh, dweight := random(r, len(x)), random(r, len(x)), random(r, len(weight))

	// The reference. If a statistic is known, the formulas use the existing value.
	size := len(x)
	wantMean, wantRStd, wantH, wantDX, wantDWeight := newSums(c.tokens), newSums(c.tokens), newSums(size),
		newSums(size), newSums(len(weight))
	for j := range dweight {
		wantDWeight.add(j, float64(dweight[j]), float64(dweight[j]))
	}
	for row := range c.tokens {
		at := row * c.width
		m, s, spread := 0.0, 0.0, 0.0 // mean, inverse root, sum of squares
		if c.known {
			m, s = float64(mean[row]), float64(rstd[row])
		} else {
			for _, v := range x[at:][:c.width] {
				if !c.rms {
					m += float64(v) / float64(c.width)
				}
			}
			for _, v := range x[at:][:c.width] {
				spread += (float64(v) - m) * (float64(v) - m)
			}
			s = 1 / math.Sqrt(spread/float64(c.width)+1e-5)
		}
		if c.rms {
			m = 0
		}
		wantMean.add(row, m, 3)
		wantRStd.add(row, s, s*(1+9*s*s*math.Abs(m))) // a small variance with a large mean is less accurate
		y, down, along, downSize, alongSize := make([]float64, c.width), 0.0, 0.0, 0.0, 0.0
		for j := range c.width {
			v, g := (float64(x[at+j])-m)*s, float64(dh[at+j])
			y[j] = v
			if c.rms {
				wantDWeight.add(j, g*v, g*v)
				g *= float64(weight[j])
				v *= float64(weight[j])
			}
			wantH.add(at+j, v, (math.Abs(v)+math.Abs(m*s))*(1+9*s*s*math.Abs(m)))
			down, downSize = down+g/float64(c.width), downSize+math.Abs(g)/float64(c.width)
			along, alongSize = along+g*y[j]/float64(c.width),
				alongSize+math.Abs(g*(math.Abs(y[j])+math.Abs(m*s)))/float64(c.width)
		}
		if c.rms {
			down, downSize = 0, 0
		}
		for j := range c.width {
			g := float64(dh[at+j])
			if c.rms {
				g *= float64(weight[j])
			}
			bound := math.Abs(s) * (math.Abs(g) + downSize + (math.Abs(y[j])+math.Abs(m*s))*alongSize) * (1 +
				9*s*s*math.Abs(m))
			wantDX.add(at+j, float64(dx[at+j])+s*(g-down-y[j]*along), math.Abs(float64(dx[at+j]))+bound)
		}
	}

	if c.rms {
		n.Weight = upload(t, d, weight)
	} else {
		n.Mean = upload(t, d, mean)
	}
	n.RStd = upload(t, d, rstd)
	in, h := upload(t, d, x, c.tokens, c.width), upload(t, d, poison(size), c.tokens, c.width)
	d.Normalize(h, in, n, c.known)
	compare(t, "norm", read(t, d, h), wantH.sum, wantH.scale, tolerance)
	compare(t, "inverse root", read(t, d, n.RStd), wantRStd.sum, wantRStd.scale, tolerance)
	if !c.rms {
		compare(t, "mean", read(t, d, n.Mean), wantMean.sum, wantMean.scale, tolerance)
	}
	if c.known && !slices.Equal(read(t, d, n.RStd), rstd) {
		t.Fatalf("Normalize changes statistics that are known")
	}

	out, down := upload(t, d, dx, c.tokens, c.width), upload(t, d, dh, c.tokens, c.width)
	var grad xpu.Tensor
	if c.rms {
		grad = upload(t, d, dweight)
	}
	d.NormGrad(out, down, in, n, grad)
	compare(t, "gradient of the input", read(t, d, out), wantDX.sum, wantDX.scale, tolerance)
	if c.rms {
		compare(t, "gradient of the weight", read(t, d, grad), wantDWeight.sum, wantDWeight.scale, tolerance)
	}
}
