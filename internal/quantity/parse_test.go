package quantity

import (
	"math"
	"strings"
	"testing"
)

func TestDecimal(t *testing.T) {
	for text, want := range map[string]string{
		"0": "0", "12": "12", "-3": "-3", "+4": "4", "0.5": "1/2", ".5": "1/2", "5.": "5", "1e3": "1000",
		"1E-3": "1/1000", "-0.25e1": "-5/2", "0e5": "0",
		"18446744073709551616": "18446744073709551616", "1.8446744073709551616e19": "18446744073709551616",
	} {
		got, err := Decimal(text)
		if err != nil || got.RatString() != want {
			t.Errorf("%s: %v, %v, want %s", text, got, err, want)
		}
	}
	for text, want := range map[string]string{
		"010":                    "010 starts with 0, which may mean an octal number; write 10",
		"-007":                   "write -7",
		"00":                     "write 0",
		"00.5":                   "write 0.5",
		"0x10":                   "0x10 is not written in decimal; write 16",
		"0o10":                   "0o10 is not written in decimal; write 8",
		"0b11":                   "0b11 is not written in decimal; write 3",
		"1_0":                    "1_0 has underscores; write 10",
		"1_000.5":                "1_000.5 has underscores; write 1000.5",
		"1e999999999999":         "out of range",
		"0x1p3":                  "not a decimal number",
		"inf":                    "not a decimal number",
		"NaN":                    "not a decimal number",
		"":                       "not a decimal number",
		"1 0":                    "not a decimal number",
		"1,000":                  "not a decimal number",
		"٣":                      "not a decimal number",
		strings.Repeat("9", 500): "has more than 400 characters",
	} {
		if got, err := Decimal(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.40s: %v, %v, want %s", text, got, err, want)
		}
	}
}

func TestCount(t *testing.T) {
	for text, want := range map[string]int64{
		"0": 0, "7": 7, "20k": 20_000, "20K": 20_000, "1.5M": 1_500_000, "2G": 2e9, "5B": 5e9, "0.25T": 25e10,
		"4Ki": 4096, "1.5Mi": 3 << 19, "1Gi": 1 << 30,
		"2Ti": 2 << 40, "1e3": 1000, "9223372036854775807": math.MaxInt64,
	} {
		if got, err := Count(text); err != nil || got != want {
			t.Errorf("%s: %d, %v, want %d", text, got, err, want)
		}
	}
	for text, want := range map[string]string{
		"9223372036854775808": "out of range: the largest number is 9,223,372,036,854,775,807",
		"10000000T":           "out of range",
		"0.3":                 "0.3 is not a whole number",
		"1.2345k":             "1.2345k is not a whole number",
		"010k":                "write 10",
		"1_0M":                "write 10",
		"k":                   "not a decimal number",
		"5X":                  "not a decimal number",
		"5Bi":                 "not a decimal number",
	} {
		if got, err := Count(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %d, %v, want %s", text, got, err, want)
		}
	}
}
