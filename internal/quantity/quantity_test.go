package quantity

import (
	"math"
	"testing"
	"time"
)

func TestGrouped(t *testing.T) {
	for n, want := range map[int64]string{0: "0", 12: "12", 123: "123", 1234: "1,234", -123: "-123",
		-123456: "-123,456", 1234567: "1,234,567",
		math.MinInt64: "-9,223,372,036,854,775,808"} {
		if got := Grouped(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
	if got := Grouped(4096); got != "4,096" {
		t.Error(got)
	}
}

func TestBytes(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 999: "999 B", 1000: "1.00 kB", 12345: "12.3 kB", 999499: "999 kB",
		999501: "1.00 MB", 34_400_000_000: "34.4 GB", 4_070_000_000_000: "4.07 TB"} {
		if got := Bytes(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
}

func TestTokens(t *testing.T) {
	for n, want := range map[int64]string{12: "12", 6_291_456: "6.29 M", 4_070_000_000_000: "4.07 T",
		2_000_000_000: "2.00 B"} {
		if got := Tokens(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
}

func TestPlural(t *testing.T) {
	for n, want := range map[int64]string{0: "0 files", 1: "1 file", 1200: "1,200 files"} {
		if got := Plural(n, "file"); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
}

func TestDuration(t *testing.T) {
	for d, want := range map[time.Duration]string{0: "0 s", 59400 * time.Millisecond: "59 s",
		59500 * time.Millisecond: "1 min 00 s", 3599 * time.Second: "59 min 59 s", 3600 * time.Second: "1 h 00 min",
		47*time.Hour + 59*time.Minute: "47 h 59 min", 51 * time.Hour: "2 d 03 h"} {
		if got := Duration(d); got != want {
			t.Errorf("%v: %s, want %s", d, got, want)
		}
	}
}

func TestSeconds(t *testing.T) {
	for s, want := range map[float64]string{0: "0 s", 2e-6: "2 µs", 0.0123: "12.3 ms", 90: "90 s", 600: "10 min",
		7200: "2 h"} {
		if got := Seconds(s); got != want {
			t.Errorf("%g: %s, want %s", s, got, want)
		}
	}
}

func TestPercent(t *testing.T) {
	for _, c := range []struct {
		share  float64
		digits int
		want   string
	}{
		{0, 2, "0 %"}, {1, 2, "100 %"}, {0.9996, 2, "100 %"}, {0.5, 3, "50 %"}, {0.48235, 3, "48.2 %"}, {5.2e-7, 2,
			"0.000052 %"}, {-5.2e-7, 2, "-0.000052 %"},
		{1e-5, 2, "0.001 %"}, {0.0123, 3, "1.23 %"}, {12.34, 2, "1234 %"}, {1e-15, 3, "0 %"},
	} {
		if got := Percent(c.share, c.digits); got != c.want {
			t.Errorf("%g to %d digits: %s, want %s", c.share, c.digits, got, c.want)
		}
	}
}

func TestShort(t *testing.T) {
	for _, test := range []struct {
		v      float64
		digits int
		short  string
		exact  string
	}{
		{0, 3, "0", "0"}, {2.5, 3, "2.5", "2.50"}, {3.14159, 3, "3.14", "3.14"}, {2831.4, 3, "2831", "2831"}, {123456,
			3, "123k", "123k"}, {0.05, 3, "0.05", "0.0500"},
		{4e-4, 3, "4e-4", "4.00e-4"}, {-1.25e-7, 3, "-1.25e-7", "-1.25e-7"}, {1e18, 3, "1e18", "1.00e18"}, {7.5e9, 2,
			"7.5B", "7.5B"}, {-10, 3, "-10", "-10.0"},
		{math.NaN(), 3, "–", "–"},
	} {
		if got := Short(test.v, test.digits); got != test.short {
			t.Errorf("Short(%g): %s, want %s", test.v, got, test.short)
		}
		if got := Exact(test.v, test.digits); got != test.exact {
			t.Errorf("Exact(%g): %s, want %s", test.v, got, test.exact)
		}
	}
}
