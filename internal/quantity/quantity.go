// Package quantity formats and parses numbers for people.
package quantity

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Grouped formats a whole number with commas between the thousands.
func Grouped[T int | int64](n T) string {
	text := strconv.FormatInt(int64(n), 10)
	for at := len(text) - 3; at > 0 && text[at-1] != '-'; at -= 3 {
		text = text[:at] + "," + text[at:]
	}
	return text
}

// Plural formats a number of things with their noun: "1 file", "1,200 files".
func Plural(n int64, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return Grouped(n) + " " + noun + "s"
}

// Bytes formats a number of bytes: "812 bytes", "34.4 GB".
func Bytes(n int64) string {
	switch {
	case n < 1e6:
		return fmt.Sprintf("%d bytes", n)
	case n < 1e9:
		return fmt.Sprintf("%.1f MB", float64(n)/1e6)
	}
	return fmt.Sprintf("%.1f GB", float64(n)/1e9)
}

// Percent formats a fraction as a percentage with at most digits significant digits and without an
// exponent: "48.2 %", "0.000052 %".
func Percent(share float64, digits int) string {
	v := 100 * share
	if math.Abs(v) < 1e-9 {
		return "0 %"
	}
	decimals := max(0, digits-1-int(math.Floor(math.Log10(math.Abs(v)))))
	text := strconv.FormatFloat(v, 'f', decimals, 64)
	if strings.Contains(text, ".") {
		text = strings.TrimSuffix(strings.TrimRight(text, "0"), ".")
	}
	return text + " %"
}
