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

func lossFamily(t *testing.T, d xpu.Device, tolerance float64) {
	for i, c := range []lossCase{
		{rows: 1, width: 1, spread: 1, scale: 1}, {rows: 3, width: 2, spread: 5, scale: 0.5}, {rows: 40, width: 257,
			spread: 10, scale: 1e-3},
		{rows: 5, width: 5003, spread: 3, scale: 0.1}, {rows: 7, width: 1024, spread: 20}, {rows: 2, width: 50304,
			spread: 6, scale: 1}, {rows: 0, width: 9, scale: 1},
	} {
		for _, c.sample = range []bool{false, true} {
			for _, c.left = range []bool{false, true} {
				t.Run(c.String(), func(t *testing.T) {
					crossEntropy(t, d, c, rand.New(rand.NewPCG(31, uint64(i))),
						tolerance)
				})
			}
		}
	}
	t.Run("any", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) {
			c := lossCase{
				rows: rapid.IntRange(0, 20).Draw(t, "rows"), width: rapid.IntRange(1, 700).Draw(t,
					"width"), spread: rapid.Float32Range(0, 60).Draw(t, "spread"),
				scale: rapid.SampledFrom([]float64{0, 1, 1e-3}).Draw(t, "scale"), sample: rapid.Bool().Draw(t,
					"sample"),
				left: rapid.Bool().Draw(t, "negative targets"),
			}
			crossEntropy(t, d, c, rand.New(rand.NewPCG(32, rapid.Uint64().Draw(t, "seed"))), tolerance)
		})
	})
	t.Run("drawn one by one", func(t *testing.T) { drawn(t, d) })
	t.Run("not a number", func(t *testing.T) { lossNaN(t, d) })
}

type lossCase struct {
	rows, width int
	spread      float32 // spread of the logits
	scale       float64
	sample      bool
	left        bool // every third target is negative
}

func (c lossCase) String() string {
	return fmt.Sprintf("%d rows of %d, spread %g, scale %g, sampled %v, negative targets %v", c.rows, c.width, c.spread,
		c.scale, c.sample, c.left)
}

func crossEntropy(t tester, d xpu.Device, c lossCase, source *rand.Rand, tolerance float64) {
	logits, targets, losses := random(source, c.rows*c.width), make([]int32, c.rows), slices.Repeat([]float64{-7},
		c.rows)
	for i := range logits {
		logits[i] *= c.spread
	}
	for i := range targets {
		if targets[i] = int32(source.IntN(c.width)); c.left && i%3 == 1 {
			targets[i] = -int32(i)
		}
	}
	x := xpu.CrossEntropy{
		Targets: uploadInts(t, d, targets), Loss: losses, Scale: c.scale,
		Sample: c.sample,
		Seed:   source.Uint64(), First: uint64(source.IntN(1000)),
	}
	if c.rows > 0 && !c.sample {
		// the first target's logit is by far the largest: the loss is nearly zero
		logits[targets[0]] = 90
	}
	x.Logits = upload(t, d, logits, c.rows, c.width)
	d.CrossEntropy(x)
	gotLogits, gotTargets := read(t, d, x.Logits), readInts(t, d, x.Targets)
	if !c.sample && !slices.Equal(gotTargets, targets) {
		t.Fatalf("targets are %v, not %v any more", gotTargets, targets)
	}
	got, want, size := make([]float32, c.rows), make([]float64, c.rows), make([]float64, c.rows)
	gradient, gradientSize := make([]float64, len(logits)), make([]float64, len(logits))
	for i := range c.rows {
		z, target := logits[i*c.width:][:c.width], int(gotTargets[i])
		if targets[i] < 0 { // it must have no loss
			if got[i], size[i] = float32(losses[i]), 1; losses[i] != 0 || target != int(targets[i]) {
				t.Fatalf("row %d: loss %v of target %d, which was %d", i, losses[i], target, targets[i])
			}
			if at := slices.IndexFunc(gotLogits[i*c.width:][:c.width],
				func(v float32) bool { return v != 0 }); c.scale != 0 && at >= 0 {
				t.Fatalf("row %d has a negative target, but its gradient is %v at %d", i, gotLogits[i*c.width+at], at)
			}
			for j := range z {
				gradientSize[i*c.width+j] = 1
			}
			continue
		}
		if target < 0 || target >= c.width {
			t.Fatalf("row %d: target %d of %d", i, target, c.width)
		}
		top, sum, below := float64(slices.Max(z)), 0.0, 0.0
		for j, v := range z {
			if sum += math.Exp(float64(v) - top); j == target-1 {
				below = sum
			}
		}
		if c.sample {
			share, p := draw(x.Seed, x.First+uint64(i)), math.Exp(float64(z[target])-top)
			if slack := tolerance * sum; below > share*sum+slack || below+p < share*sum-slack || p < 1e-30 {
				t.Fatalf("row %d: share %v drew target %d, which has shares %v to %v", i, share, target, below/sum,
					(below+p)/sum)
			}
		}
		got[i], want[i] = float32(losses[i]), math.Log(sum)+top-float64(z[target])
		size[i] = math.Log(sum) + top - float64(z[target]) + math.Log1p(float64(c.width)) + 1
		for j, v := range z {
			p := math.Exp(float64(v)-top) / sum
			at := i*c.width + j
			// denormal numbers may be 0
			gradient[at], gradientSize[at] = c.scale*p, c.scale*p*(1+top-float64(v))+2*0x1p-126/tolerance
			if j == target {
				gradient[at], gradientSize[at] = gradient[at]-c.scale, gradientSize[at]+c.scale
			}
		}
	}
	compare(t, "the losses", got, want, size, tolerance)
	if c.scale != 0 {
		compare(t, "the gradient", gotLogits, gradient, gradientSize, tolerance)
	}
}

// draw returns the number in [0, 1) by which a target is drawn: output number of the generator
// SplitMix64 (Steele, Lea and Flood 2014), whose state is the finalised seed.
func draw(seed, number uint64) float64 {
	finalise := func(z uint64) uint64 {
		z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>27) * 0x94d049bb133111eb
		return z ^ z>>31
	}
	return float64(finalise(finalise(seed)+(number+1)*0x9e3779b97f4a7c15)>>11) / (1 << 53)
}

// drawn checks that a target depends only on its logits, the seed and its number, and that the
// frequencies of many draws match the probabilities.
func drawn(t tester, d xpu.Device) {
	const rows = 4000
	shares := []float64{0.5, 0, 0.25, 0.0625, 0.1875}
	var logits []float32
	for range rows {
		for _, p := range shares {
			logits = append(logits, float32(max(-200, math.Log(p))))
		}
	}
	all := xpu.CrossEntropy{Logits: upload(t, d, logits, rows, len(shares)),
		Targets: uploadInts(t, d, make([]int32, rows)), Loss: make([]float64, rows), Sample: true, Seed: 5, First: 100}
	d.CrossEntropy(all)
	allTargets := readInts(t, d, all.Targets)
	often := make([]int, len(shares))
	for _, target := range allTargets {
		often[target]++
	}
	for i, p := range shares {
		if got := float64(often[i]); math.Abs(got-rows*p) > 4*math.Sqrt(rows*p*(1-p)) {
			t.Errorf("of probability %g: drawn %g times of %d", p, got, rows)
		}
	}
	first := 1234
	one := all
	one.Logits, one.Targets, one.Loss, one.First = upload(t, d, logits[first*len(shares):][:3*len(shares)], 3,
		len(shares)),
		uploadInts(t, d, make([]int32, 3)), make([]float64, 3), 100+uint64(first)
	d.CrossEntropy(one)
	oneTargets := readInts(t, d, one.Targets)
	if !slices.Equal(oneTargets, allTargets[first:][:3]) || !slices.Equal(one.Loss, all.Loss[first:][:3]) {
		t.Errorf("drew %v, among others %v", oneTargets, allTargets[first:][:3])
	}
}

// lossNaN checks that the loss of a row that is not finite is not finite, that its target exists,
// and that no other row is affected.
func lossNaN(t tester, d xpu.Device) {
	const rows, width = 4, 300
	for _, sample := range []bool{false, true} {
		logits := random(rand.New(rand.NewPCG(33, 0)), rows*width)
		x := xpu.CrossEntropy{Targets: uploadInts(t, d, make([]int32, rows)), Loss: make([]float64, rows),
			Sample: sample, Scale: 1}
		y := x
		y.Loss, y.Logits, y.Targets = make([]float64, rows), upload(t, d, logits, rows, width),
			uploadInts(t, d, make([]int32, rows))
		d.CrossEntropy(y)
		logits[1*width+7], logits[2*width] = float32(math.NaN()), float32(math.Inf(1))
		x.Logits = upload(t, d, logits, rows, width)
		d.CrossEntropy(x)
		mine, alone := readInts(t, d, x.Targets), readInts(t, d, y.Targets)
		for i, loss := range x.Loss {
			if finite := loss-loss == 0; finite != (i == 0 || i == 3) || finite && (loss != y.Loss[i] ||
				mine[i] != alone[i]) {
				t.Errorf("row %d: loss %v, target %d; alone %v, %d", i, loss, mine[i], y.Loss[i], alone[i])
			}
			if mine[i] < 0 || mine[i] >= width {
				t.Errorf("row %d: target %d", i, mine[i])
			}
		}
	}
}
