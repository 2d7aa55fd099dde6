package simulate

import (
	"fmt"
	"math"
	"strings"

	"mula/internal/quantity"
)

// bytesText formats a number of bytes with a decimal prefix.
func bytesText(n int64) string { return scaled(float64(n)) + "B" }

// perSecond formats a bandwidth.
func perSecond(v float64) string { return scaled(v) + "B/s" }

// scaled formats a number with three digits, a space, and a decimal prefix.
func scaled(v float64) string {
	prefixes := []string{"", "k", "M", "G", "T", "P", "E"}
	i := 0
	for ; v >= 999.5 && i < len(prefixes)-1; i++ {
		v /= 1000
	}
	return fmt.Sprintf("%.3g %s", v, prefixes[i])
}

// seconds formats a duration with three digits.
func seconds(s float64) string {
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

// share formats a fraction in per cent.
func share(v float64) string {
	switch {
	case math.Abs(v) >= 0.1 || v == 0:
		return fmt.Sprintf("%.1f %%", 100*v)
	case math.Abs(v) >= 0.001:
		return fmt.Sprintf("%.2f %%", 100*v)
	}
	return quantity.Percent(v, 2)
}

// expectation formats an expected count.
func (c Count) expectation() string {
	if c.Expected < 0 {
		return "-"
	}
	if c.Expected >= 1000 {
		return quantity.Grouped(int64(c.Expected + 0.5))
	}
	return fmt.Sprintf("%.3g", c.Expected)
}

// scaledShort formats a number on an axis with a decimal prefix, short without a prefix, and
// perCent as a percentage.
func scaledShort(v float64) string { return strings.ReplaceAll(scaled(v), " ", "") }

func short(v float64) string { return fmt.Sprintf("%.3g", v) }

func perCent(v float64) string { return quantity.Percent(v, 3) }
