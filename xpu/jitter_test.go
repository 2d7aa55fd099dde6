package xpu

import (
	"math"
	"testing"
)

// Factors are uniform: mean, variance and extremes fit, and neighbours, rows and seeds are not
// correlated. Each sum has a standard deviation, and the tests allow six.
func TestJitterStatistics(t *testing.T) {
	const rows, width, epsilon = 400, 500, 0.25
	const n = rows * width
	value := func(seed uint64, row, column int) float64 { // in [-1, 1]
		return (float64(Jitter{Epsilon: epsilon, Seed: seed}.Factor(int32(row), column)) - 1) / epsilon
	}
	sums := map[string]float64{}
	least, most := 1.0, -1.0
	var deciles [10]int
	for row := range rows {
		for column := range width {
			u := value(1, row, column)
			least, most = min(least, u), max(most, u)
			deciles[min(9, int((u+1)*5))]++
			sums["mean"] += u
			sums["variance"] += u*u - 1.0/3
			sums["next element"] += u * value(1, row, column+1)
			sums["next row"] += u * value(1, row+1, column)
			sums["next seed"] += u * value(2, row, column)
		}
	}
	for name, deviation := range map[string]float64{"mean": math.Sqrt(1.0 / 3), "variance": math.Sqrt(4.0 / 45),
		"next element": 1.0 / 3, "next row": 1.0 / 3, "next seed": 1.0 / 3} {
		if z := sums[name] / (deviation * math.Sqrt(n)); !(math.Abs(z) < 6) {
			t.Errorf("%s: %v standard deviations", name, z)
		}
	}
	for i, count := range deciles {
		if z := (float64(count) - n/10) / math.Sqrt(n*0.09); !(math.Abs(z) < 6) {
			t.Errorf("decile %d has %d of %d factors", i, count, n)
		}
	}
	if least < -1 || least > -0.999 || most > 1 || most < 0.999 {
		t.Errorf("factors from %v to %v standardised", least, most)
	}
	if f := (Jitter{}).Factor(3, 4); f != 1 {
		t.Errorf("without epsilon the factor is %v", f)
	}
}
