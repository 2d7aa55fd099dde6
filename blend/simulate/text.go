package simulate

import (
	"fmt"
	"math"
	"strings"

	"mula/internal/quantity"
)

// perSecond formats a bandwidth.
func perSecond(v float64) string { return quantity.Bytes(int64(v)) + "/s" }

// scaled formats a number with three digits, a space, and a decimal prefix.
func scaled(v float64) string {
	prefixes := []string{"", "k", "M", "G", "T", "P", "E"}
	i := 0
	for ; v >= 999.5 && i < len(prefixes)-1; i++ {
		v /= 1000
	}
	return fmt.Sprintf("%.3g %s", v, prefixes[i])
}

// share formats a fraction in per cent.
func share(v float64) string {
	switch {
	case math.Abs(v) >= 0.1 || v == 0:
		return quantity.FixedPercent(v, 1)
	case math.Abs(v) >= 0.001:
		return quantity.FixedPercent(v, 2)
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
