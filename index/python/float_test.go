package python

import (
	"crypto/md5"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"testing"
)

// golden is testdata/text.json, which text.py wrote with Python.
type golden struct {
	Numbers, Strings []string // hashes of a hundred texts each
	Floats           [][2]string
	Read             [][2]json.RawMessage
	Rounded          [][2]any
	Values, Texts    []struct{ given, want *string }
}

func readGolden(t testing.TB) golden {
	t.Helper()
	data, err := os.ReadFile("testdata/text.json")
	if err != nil {
		t.Fatal(err)
	}
	// encoding/json replaces lone surrogates, so that the pairs of strings that hold them are kept
	// raw and read by stringOf.
	var raw struct {
		Numbers, Strings    []string
		Floats              [][2]string
		Read, Values, Texts [][2]json.RawMessage
		Rounded             [][2]any
	}
	if err := json.Unmarshal(data, &raw); err != nil {
		t.Fatal(err)
	}
	g := golden{Numbers: raw.Numbers, Strings: raw.Strings, Floats: raw.Floats, Read: raw.Read, Rounded: raw.Rounded}
	pairs := func(from [][2]json.RawMessage) (out []struct{ given, want *string }) {
		for _, p := range from {
			given := stringOf(t, p[0])
			pair := struct{ given, want *string }{given: &given}
			if string(p[1]) != "null" {
				want := stringOf(t, p[1])
				pair.want = &want
			}
			out = append(out, pair)
		}
		return out
	}
	g.Values, g.Texts = pairs(raw.Values), pairs(raw.Texts)
	if len(g.Numbers) == 0 || len(g.Strings) == 0 || len(g.Floats) == 0 || len(g.Read) == 0 || len(g.Values) == 0 ||
		len(g.Texts) == 0 || len(g.Rounded) == 0 {
		t.Fatal("the golden file is empty")
	}
	return g
}

// stringOf reads a JSON string with the standard library, which suffices as the texts in the file
// are JSON texts themselves.
func stringOf(t testing.TB, raw json.RawMessage) string {
	t.Helper()
	var s string
	if err := json.Unmarshal(raw, &s); err != nil {
		t.Fatal(err)
	}
	return s
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

// power10 is the double nearest to a power of ten.
func power10(e int64) float64 {
	v, err := strconv.ParseFloat(fmt.Sprintf("1e%d", e), 64)
	if err != nil {
		panic(err)
	}
	return v
}

// number repeats text.py's.
func number(i int) float64 {
	d := draws{uint64(i)}
	u := d.u64()
	switch i % 6 {
	case 0:
		return math.Float64frombits(u)
	case 1:
		return math.Float64frombits(u % 2047 << 52)
	case 2:
		return math.Float64frombits(u % (1 << 52))
	case 3:
		return math.Float64frombits(math.Float64bits(power10(int64(u%632)-323)) + d.u64()%3 - 1)
	case 4:
		return float64(u%1000000) / power10(int64(d.u64()%23))
	default:
		return float64(u >> (d.u64() % 64))
	}
}

// block is the hash of a hundred texts.
func block(words []string) string {
	return fmt.Sprintf("%x", md5.Sum([]byte(strings.Join(words, "\n"))))[:8]
}

func TestFloatsOfPython(t *testing.T) {
	g := readGolden(t)
	for b, want := range g.Numbers {
		words := make([]string, 100)
		for i := range words {
			words[i] = Float(number(100*b + i))
		}
		if got := block(words); got != want {
			t.Errorf("numbers %d to %d: hash %s, Python's is %s; they are %v", 100*b, 100*b+99, got, want, words)
		}
	}
	for _, f := range g.Floats {
		bits, err := strconv.ParseUint(f[0], 16, 64)
		if err != nil {
			t.Fatal(err)
		}
		if got := Float(math.Float64frombits(bits)); got != f[1] {
			t.Errorf("%s: %s, Python writes %s", f[0], got, f[1])
		}
	}
}

// said is a parsed number as text.py writes it.
func said(s string) string {
	v, ok := ParseFloat(s)
	switch {
	case !ok:
		return "-"
	case math.IsNaN(v):
		return "nan"
	}
	return fmt.Sprintf("%016x", math.Float64bits(v))
}

func TestParseFloatsOfPython(t *testing.T) {
	alphabet := []string{
		"0", "1", "2", "5", "9", "0", "7", ".", "_", "e", "E", "+", "-", " ", "inf", "nan", "Infinity", "\t", "\u0663",
		"\uff11", "x", "\u00a0", "\x1c", "e-3", "1", "3",
	}
	g := readGolden(t)
	numbers := 0
	for b, want := range g.Strings {
		words, given := make([]string, 100), make([]string, 100)
		for i := range words {
			d := draws{1<<40 | uint64(100*b+i)}
			// Python draws the length first.
			for range 1 + d.u64()%7 {
				given[i] += alphabet[d.u64()%uint64(len(alphabet))]
			}
			words[i] = said(given[i])
			if words[i] != "-" {
				numbers++
			}
		}
		if got := block(words); got != want {
			t.Errorf("strings %d to %d: hash %s, Python's is %s; they are %q, read as %q", 100*b, 100*b+99, got, want,
				given, words)
		}
	}
	if numbers < 1000 {
		t.Errorf("only %d of the strings are numbers: too few to say anything", numbers)
	}
	for _, r := range g.Read {
		given, want := stringOf(t, r[0]), stringOf(t, r[1])
		if got := said(given); got != want {
			t.Errorf("%q: %s, Python reads %s", given, got, want)
		}
	}
}

func TestRoundHalfEven(t *testing.T) {
	for _, r := range readGolden(t).Rounded {
		bits, err := strconv.ParseUint(r[0].(string), 16, 64)
		if err != nil {
			t.Fatal(err)
		}
		v := math.Float64frombits(bits)
		if got := RoundHalfEven(v); got != int64(r[1].(float64)) {
			t.Errorf("%v: %d, Python has %v", v, got, r[1])
		}
	}
}

// ParseFloat against the golden table of Python's, and, for the numbers that both languages write
// alike, against strconv; Float gives every number back.
func FuzzParseFloat(f *testing.F) {
	table := make(map[string]string)
	for _, r := range readGolden(f).Read {
		given := stringOf(f, r[0])
		table[given] = stringOf(f, r[1])
		f.Add(given)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if want, ok := table[s]; ok && said(s) != want {
			t.Errorf("%q: %s, Python reads %s", s, said(s), want)
		}
		v, ok := ParseFloat(s)
		if want, err := strconv.ParseFloat(s, 64); err == nil && !strings.ContainsAny(s, "xX_") {
			if !ok || math.Float64bits(v) != math.Float64bits(want) && !math.IsNaN(want) {
				t.Errorf("%q: %v %v, strconv reads %v", s, v, ok, want)
			}
		}
		if !ok {
			return
		}
		if back, ok := ParseFloat(Float(v)); !ok || math.Float64bits(back) != math.Float64bits(v) && !math.IsNaN(v) {
			t.Errorf("%q is %v and comes back as %v", s, v, back)
		}
	})
}
