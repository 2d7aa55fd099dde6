package moe

import (
	"testing"

	"golang.org/x/sys/unix"

	"mula/xpu"
	"mula/xpu/cpu"
)

// BenchmarkRecompute measures the CPU time of a pass at each level of recomputation, alternating,
// relative to the first level, and the memory of its buffers.
func BenchmarkRecompute(b *testing.B) {
	cfg := mustPreset(b, "mula-tiny")
	for _, precision := range []xpu.Precision{xpu.FP32, xpu.BF16} {
		b.Run(string(precision), func(b *testing.B) {
			dev := cpu.New(1, precision)
			defer dev.Close()
			m, err := New(cfg, dev)
			if err != nil {
				b.Fatal(err)
			}
			m.Init(1)
			batch := randomBatch(cfg, 8, 256, 1)
			var seconds [3]float64
			for b.Loop() {
				for i, level := range levels {
					m.SetRecompute(level)
					for pass := range 2 { // the first one makes the buffers
						start := cpuSeconds(b)
						if _, err := m.Backward(b.Context(), batch, BackwardOptions{Loss: fullLoss(cfg)}); err != nil {
							b.Fatal(err)
						}
						if pass > 0 {
							seconds[i] += cpuSeconds(b) - start
						}
					}
				}
			}
			for i, level := range levels {
				b.ReportMetric(seconds[i]/float64(b.N), string(level)+"-s")
				b.ReportMetric(100*(seconds[i]/seconds[0]-1), string(level)+"-more%")
				b.ReportMetric(float64(cfg.Memory(Pass{Rows: 8, SequenceLength: 256, Recompute: level}).Buffers)/1e6,
					string(level)+"-MB")
			}
		})
	}
}

// cpuSeconds is the processor time that this process has used.
func cpuSeconds(b *testing.B) float64 {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &now); err != nil {
		b.Fatal(err)
	}
	return float64(now.Nano()) / 1e9
}
