//go:build !linux

package gpt

import "math"

// cpuSeconds is not known here.
func cpuSeconds() float64 { return math.NaN() }
