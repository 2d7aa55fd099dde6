// Package quantity formats and parses numbers for people.
package quantity

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
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

// Bytes formats a number of bytes to three digits with a decimal prefix: "812 B", "34.4 GB".
func Bytes(n int64) string { return Prefixed(n, "kMGTPE") + "B" }

// Tokens formats a number of tokens to three digits with a usual prefix: "6.29 M", "4.07 T".
func Tokens(n int64) string { return strings.TrimSpace(Prefixed(n, "kMBTPE")) }

// Prefixed formats n to three digits with the decimal prefix that fits, and a space before the
// unit.
func Prefixed(n int64, prefixes string) string {
	if n < 1000 {
		return fmt.Sprintf("%d ", n)
	}
	f, i := float64(n)/1000, 0
	for f >= 999.5 && i < len(prefixes)-1 {
		f, i = f/1000, i+1
	}
	digits := 2
	for limit := 9.995; f >= limit && digits > 0; limit *= 10 {
		digits--
	}
	return fmt.Sprintf("%.*f %c", digits, f, prefixes[i])
}

// Duration formats a duration in its two largest units: "3 s", "1 min 02 s", "2 d 03 h".
func Duration(d time.Duration) string {
	switch s := int64(d.Round(time.Second) / time.Second); {
	case s < 60:
		return fmt.Sprintf("%d s", s)
	case s < 3600:
		return fmt.Sprintf("%d min %02d s", s/60, s%60)
	case s < 48*3600:
		return fmt.Sprintf("%d h %02d min", s/3600, s/60%60)
	default:
		return fmt.Sprintf("%d d %02d h", s/86400, s/3600%24)
	}
}

// Seconds formats a measured time in seconds to three digits: "1.94 ms", "2.5 h".
func Seconds(s float64) string {
	switch {
	case s == 0:
		return "0 s"
	case s < 1e-3:
		return fmt.Sprintf("%.3g µs", s*1e6)
	case s < 1:
		return fmt.Sprintf("%.3g ms", s*1e3)
	case s < 120:
		return fmt.Sprintf("%.3g s", s)
	case s < 7200:
		return fmt.Sprintf("%.3g min", s/60)
	}
	return fmt.Sprintf("%.3g h", s/3600)
}

// FixedPercent formats a fraction as a percentage with a number of decimals: "48.20 %".
func FixedPercent(share float64, decimals int) string {
	return strconv.FormatFloat(100*share, 'f', decimals, 64) + " %"
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
