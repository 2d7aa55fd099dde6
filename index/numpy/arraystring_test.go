package numpy

import (
	"encoding/json"
	"fmt"
	"hash/crc32"
	"math"
	"os"
	"strconv"
	"testing"
)

// golden is testdata/text.json, which text.py wrote with numpy.
type golden struct {
	Sums  []string
	Texts []string
	Clear []struct {
		Runs [][2]any // bits in hexadecimal, count
		Text string
	}
	Headers []struct {
		Descr string
		Shape []int64
		Text  string // bytes as Latin-1
	}
}

func readGolden(t testing.TB) golden {
	t.Helper()
	data, err := os.ReadFile("testdata/text.json")
	if err != nil {
		t.Fatal(err)
	}
	var g golden
	if err := json.Unmarshal(data, &g); err != nil {
		t.Fatal(err)
	}
	if len(g.Sums) == 0 || len(g.Texts) == 0 || len(g.Clear) == 0 || len(g.Headers) == 0 {
		t.Fatal("the golden file is empty")
	}
	return g
}

// draws is splitmix64, as in text.py.
type draws struct{ s uint64 }

func (d *draws) u64() uint64 {
	d.s += 0x9E3779B97F4A7C15
	z := d.s
	z = (z ^ z>>30) * 0xBF58476D1CE4E5B9
	z = (z ^ z>>27) * 0x94D049BB133111EB
	return z ^ z>>31
}

func (d *draws) below(n uint64) uint64 { return d.u64() % n }

func (d *draws) unit() float64 { return float64(d.u64()>>11) / 9007199254740992 }

// power10 is the double nearest to a power of ten.
func power10(e int) float64 {
	v, err := strconv.ParseFloat(fmt.Sprintf("1e%d", e), 64)
	if err != nil {
		panic(err)
	}
	return v
}

// vector repeats text.py's.
func vector(i int) []float64 {
	odd := []float64{0, math.Copysign(0, -1), math.NaN(), math.Inf(1), math.Inf(-1), 1, 123.456, 5e-324,
		math.MaxFloat64}
	d := draws{uint64(i)}
	kind := i % 9
	n := 1 + d.below(40)
	if d.below(50) == 0 {
		n = 990 + d.below(20)
	}
	var out []float64
	for range n {
		var v float64
		switch kind {
		case 0:
			v = d.unit()
		case 1:
			v = float64(1 + d.below(1000))
		case 2:
			v = d.unit()
			v *= power10(int(d.below(25)) - 12)
		case 3:
			v = math.Float64frombits(d.u64())
			if math.IsNaN(v) || math.IsInf(v, 0) {
				v = 0.5
			}
		case 4:
			v = float64(d.below(1 << (1 + d.below(40))))
		case 5:
			v = d.unit() - 0.5
			v *= float64(d.below(3))
		case 6:
			v = float64(d.below(100000))
			v /= power10(int(d.below(10)))
		case 7:
			v = odd[d.below(9)]
		default:
			v = math.Float64frombits((1 + d.below(2046)) << 52)
		}
		out = append(out, v)
	}
	if kind == 1 {
		total := 0.0
		for _, v := range out {
			total += v
		}
		for i := range out {
			out[i] /= total
		}
	}
	return out
}

func TestArrayStringsOfNumpy(t *testing.T) {
	g := readGolden(t)
	for i, want := range g.Texts {
		text := ArrayString(vector(i))
		if got := fmt.Sprintf("%08x", crc32.ChecksumIEEE([]byte(text))); got != want {
			t.Errorf("vector %d, %v:\n%s\nhas the checksum %s; numpy's text has %s", i, vector(i), text, got, want)
		}
	}
	for _, c := range g.Clear {
		var a []float64
		for _, run := range c.Runs {
			bits, err := strconv.ParseUint(run[0].(string), 16, 64)
			if err != nil {
				t.Fatal(err)
			}
			for range int(run[1].(float64)) {
				a = append(a, math.Float64frombits(bits))
			}
		}
		if got := ArrayString(a); got != c.Text {
			t.Errorf("%d elements:\n%s\nwant\n%s", len(a), got, c.Text)
		}
	}
}

// The examples of the reference's page.
func TestArrayString(t *testing.T) {
	for _, test := range []struct {
		a    []float64
		want string
	}{
		{[]float64{1}, "[1.]"},
		{[]float64{0.25, 0.75}, "[0.25 0.75]"},
		{[]float64{1. / 3, 2. / 3}, "[0.33333333 0.66666667]"},
		{[]float64{.6, .15, .1, .06, .05, .03, .01}, "[0.6  0.15 0.1  0.06 0.05 0.03 0.01]"},
		{[]float64{5, 1e-5}, "[5.e+00 1.e-05]"},
		{[]float64{.5, 1e-5}, "[5.e-01 1.e-05]"},
		{[]float64{.999, .00099, .00001}, "[9.99e-01 9.90e-04 1.00e-05]"},
		{
			[]float64{.05, .05, .05, .05, .05, .05, .05, .05, .05, .05, .05, .05, .05, .05, .05, .05, .05, .05, .05,
				.05},
			"[0.05 0.05 0.05 0.05 0.05 0.05 0.05 0.05 0.05 0.05 0.05 0.05 0.05 0.05\n 0.05 0.05 0.05 0.05 0.05 0.05]",
		},
	} {
		if got := ArrayString(test.a); got != test.want {
			t.Errorf("%v: %q, want %q", test.a, got, test.want)
		}
	}
}
