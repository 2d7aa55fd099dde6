package numpy

import (
	"context"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// measure runs f on n elements and reports the least processor time of a run, of all threads, and
// the least time, both per element.
func measure(b *testing.B, n int, f func() error) {
	spent := func() time.Duration {
		var u unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
			b.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	processor, wall := time.Hour, time.Hour
	for b.Loop() {
		start, used := time.Now(), spent()
		if err := f(); err != nil {
			b.Fatal(err)
		}
		processor, wall = min(processor, spent()-used), min(wall, time.Since(start))
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(float64(processor.Nanoseconds())/float64(n), "cpu-ns/element")
	b.ReportMetric(float64(wall.Nanoseconds())/float64(n), "ns/element")
}

func BenchmarkSkip(b *testing.B) {
	for _, n := range []int{1_500_000, 100_000_000} {
		for _, kind := range []string{"RandomState", "Generator"} {
			b.Run(fmt.Sprintf("%s/%d", kind, n), func(b *testing.B) {
				src := newSource(kind, 1)
				measure(b, n, func() error { skip(src, int64(n)); return nil })
			})
		}
	}
}

func BenchmarkShuffle(b *testing.B) {
	for _, n := range []int{1_500_000, 16_000_000, 100_000_000} {
		shuffles[uint32](b, n)
		shuffles[uint64](b, n)
	}
}

func shuffles[T element](b *testing.B, n int) {
	name := fmt.Sprintf("%T/%d/", T(0), n)
	src := NewRandomState(1)
	run := func(way string, f func(a []T) error) {
		b.Run(name+way, func(b *testing.B) {
			a := ascending[T](b, n)
			measure(b, n, func() error { return f(a) })
		})
	}
	run("plain", func(a []T) error { Shuffle(src, a); return nil })
	run("ahead", func(a []T) error { return shuffleAhead(context.Background(), src, a) })
	for _, threads := range []int{1, 2} {
		var memory scratch
		p, _ := bestPlan[T](n, threads)
		run(fmt.Sprintf("blocked/%d", threads), func(a []T) error {
			return shuffleBlocked(context.Background(), src, a, p, &memory, func(int, []T) error { return nil })
		})
		memory.free()
	}
}
