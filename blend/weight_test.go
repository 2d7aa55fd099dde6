package blend

import (
	"math/big"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestParseNumber(t *testing.T) {
	for text, want := range map[string]string{
		"2": "2", "0": "0", "0.948": "237/250", "1/3": "1/3", "6/4": "3/2", "9.5e-4": "19/20000", "1E3": "1000",
		"1e+2": "100",
		"0.1":  "1/10", "123456789.123456789": "123456789123456789/1000000000", "007": "7",
	} {
		n, err := ParseNumber(text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if n.rat.RatString() != want || n.String() != text {
			t.Errorf("%s: %s as %q, want %s", text, n.rat.RatString(), n, want)
		}
	}
	for text, message := range map[string]string{
		"": "not a number", "-1": "negative", "-0.5": "negative", "1/0": "divides by zero", ".5": "not a number",
		"1.":  "not a number",
		"nan": "not a number", ".nan": "not a number", "inf": "not a number", "1e999": "exponent", "1e-65": "exponent",
		"1e99999999999999999999": "exponent", "0x10": "not a number", "1_000": "not a number", "1/3/4": "not a number",
		"1/-3":                  "not a number",
		strings.Repeat("9", 65): "more than 64 characters", "1 ": "not a number",
	} {
		if n, err := ParseNumber(text); err == nil || !strings.Contains(err.Error(), message) {
			t.Errorf("%q: %v, %v; want an error with %q", text, n, err, message)
		}
	}
}

func numbers(t testing.TB, texts ...string) []Number {
	t.Helper()
	list := make([]Number, len(texts))
	for i, text := range texts {
		if text == "" {
			continue
		}
		var err error
		if list[i], err = ParseNumber(text); err != nil {
			t.Fatal(err)
		}
	}
	return list
}

func TestIntegers(t *testing.T) {
	for _, v := range []struct {
		texts []string
		want  []uint64
	}{
		{[]string{"0.5", "1/2"}, []uint64{1, 1}},
		{[]string{"0.948", "0.002"}, []uint64{474, 1}},
		{[]string{"1/3", "", "1/6", "0.5"}, []uint64{2, 0, 1, 3}},
		{[]string{"1e-30", "2e-30"}, []uint64{1, 2}},
		{[]string{"1", "1e12"}, []uint64{1, 1e12}},
		{[]string{"1e18", "1e-18"}, nil},
		{[]string{"1/1000003", "1/1000033", "1/1000037", "1/1000039", "1/7"}, nil},
	} {
		got, err := integers(numbers(t, v.texts...))
		if v.want == nil {
			if err == nil || !strings.Contains(err.Error(), "fewer digits") {
				t.Errorf("%v: %v, %v; want a refusal", v.texts, got, err)
			}
		} else if err != nil || !slices.Equal(got, v.want) {
			t.Errorf("%v: %v, %v; want %v", v.texts, got, err, v.want)
		}
	}
}

// Integers have the ratios of the weights exactly, and no common divisor.
func TestIntegersAreExact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		weights := make([]Number, rapid.IntRange(1, 6).Draw(t, "n"))
		for i := range weights {
			text := rapid.StringMatching(`[1-9][0-9]{0,3}(\.[0-9]{1,5})?|[1-9][0-9]{0,2}/[1-9][0-9]?`).Draw(t, "weight")
			var err error
			if weights[i], err = ParseNumber(text); err != nil {
				t.Fatal(err)
			}
		}
		got, err := integers(weights)
		if err != nil {
			t.Skip(err)
		}
		divisor := new(big.Int)
		for i := range got {
			divisor.GCD(nil, nil, divisor, new(big.Int).SetUint64(got[i]))
			left := new(big.Rat).Mul(weights[i].rat, new(big.Rat).SetUint64(got[0]))
			right := new(big.Rat).Mul(weights[0].rat, new(big.Rat).SetUint64(got[i]))
			if left.Cmp(right) != 0 {
				t.Fatalf("%v became %v", weights, got)
			}
		}
		if !divisor.IsInt64() || divisor.Int64() != 1 {
			t.Fatalf("%v became %v, which share %d", weights, got, divisor)
		}
	})
}

func FuzzParseNumber(f *testing.F) {
	for _, s := range []string{"0.948", "1/3", "2", "1e-3", "-1", "1e9999999", "1/0", "٣"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		n, err := ParseNumber(text)
		if err != nil {
			return
		}
		if n.sign() < 0 || n.rat.Num().BitLen() > 1024 || n.rat.Denom().BitLen() > 1024 {
			t.Fatalf("%q became %s", text, n.rat)
		}
	})
}
