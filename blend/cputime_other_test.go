//go:build !linux

package blend

import "testing"

// cpuTime is measured on Linux only.
func cpuTime(b *testing.B, _ string) func(n int64) {
	b.ResetTimer()
	return func(int64) {}
}

func processTime(*testing.B) func() { return func() {} }
