package devicetest

import (
	"testing"

	"mula/xpu"
	"mula/xpu/workload"
)

// Benchmark measures every command at the sizes of mula-mini, for the given number of rows of 512
// tokens. It reports the minimum bytes read and written, in GB/s, and for products the rate in
// GFLOP/s; see [workload.Command]. After the products of experts it measures the same with one
// product for each expert ("one by one"). Close the device after the benchmark only.
func Benchmark(b *testing.B, d xpu.Device, rows int) {
	commands, err := workload.Commands(b.Context(), d, rows)
	if err != nil {
		b.Fatal(err)
	}
	for _, c := range commands {
		b.Run(c.Name, func(b *testing.B) {
			give := func() {
				c.Give()
				if err := d.Wait(b.Context()); err != nil {
					b.Fatal(err)
				}
			}
			give()
			for b.Loop() {
				give()
			}
			seconds := b.Elapsed().Seconds() / float64(b.N)
			b.ReportMetric(4e-9*float64(c.Elements)/seconds, "GB/s")
			if c.FLOPs > 0 {
				b.ReportMetric(1e-9*float64(c.FLOPs)/seconds, "GFLOP/s")
			}
		})
	}
}
