package votes

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// slowIn simulates steps of ranks whose own work has normal noise. It returns for each rank the
// step in which it became slow, or -1. work changes the work of a rank in a step.
func slowIn(seed uint64, ranks, steps int, noise float64, limit SlowLimit,
	work func(rank, step int, seconds float64) float64) []int {
	rng := rand.New(rand.NewPCG(seed, 0))
	paces, slow, seconds := make([]pace, ranks), make([]int, ranks), make([]float32, ranks)
	for rank := range slow {
		slow[rank] = -1
	}
	for step := range steps {
		for rank := range seconds {
			seconds[rank] = float32(work(rank, step, max(0.1, 1+noise*rng.NormFloat64())))
		}
		m := float64(median(slices.Clone(seconds)))
		for rank := range paces {
			paces[rank].step(limit, float64(seconds[rank]), m)
			if paces[rank].slow && slow[rank] < 0 {
				slow[rank] = step
			}
		}
	}
	return slow
}

var usualLimit = SlowLimit{Factor: 1.15, Steps: 8}

// Noise of 5 %, and single steps that take ten times as long, make no rank slow in 10,000 steps.
func TestNoFalseAlarm(t *testing.T) {
	for _, ranks := range []int{2, 3, 5, 24} {
		for rank, step := range slowIn(uint64(ranks), ranks, 10_000, 0.05, usualLimit,
			func(rank, step int, seconds float64) float64 {
				if (step+rank)%7 == 0 {
					return 10 * seconds
				}
				return seconds
			}) {
			if step >= 0 {
				t.Errorf("rank %d of %d is slow in step %d", rank, ranks, step)
			}
		}
	}
}

// A rank that takes 30 % longer is slow within 20 steps, and no other rank is.
func TestDelayedRankIsSlow(t *testing.T) {
	const from = 50
	for seed := range uint64(300) {
		ranks := 2 + int(seed)%40
		for rank, step := range slowIn(seed, ranks, from+20, 0.05, usualLimit,
			func(rank, step int, seconds float64) float64 {
				if rank == ranks/2 && step >= from {
					return 1.3 * seconds
				}
				return seconds
			}) {
			if delayed := rank == ranks/2; delayed && step < from || delayed != (step >= 0) {
				t.Errorf("seed %d: rank %d of %d is slow in step %d", seed, rank, ranks, step)
			}
		}
	}
}

// A rank is slow until the counter is 0 again, and not at all with a limit of 0 steps.
func TestPace(t *testing.T) {
	for _, limit := range []int64{0, 3} {
		var p pace
		got := ""
		for _, late := range "101110011000010111" {
			p.step(SlowLimit{Factor: 1.5, Steps: limit}, 1.25+0.5*float64(late-'0'), 1)
			if p.slow {
				got += "s"
			} else {
				got += "."
			}
		}
		want := map[int64]string{0: "..................", 3: "....sssssss......s"}[limit]
		if got != want {
			t.Errorf("%d steps: %s, want %s", limit, got, want)
		}
	}
}

// Short steps make no rank slow.
func TestPaceOfShortSteps(t *testing.T) {
	for excess, want := range map[float64]bool{0.049: false, 0.051: true} {
		var p pace
		for range 8 {
			p.step(SlowLimit{Factor: 1.15, Steps: 8}, 0.02+excess, 0.02)
		}
		if p.slow != want {
			t.Errorf("%v s more than the median of 0.02 s: slow is %t", excess, p.slow)
		}
	}
}
