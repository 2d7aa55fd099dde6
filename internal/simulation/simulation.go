// Package simulation runs simulated clusters in tests: one seed, many seeds, or seeds with a bug
// that the test adds to the product. docs/reference/cluster.md describes the simulations.
package simulation

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"mula/internal/atomicfile"
)

// Environment variables of make simulate-cluster.
const (
	seedVariable  = "MULA_CLUSTER_SEED"  // one seed, whose events are printed
	seedsVariable = "MULA_CLUSTER_SEEDS" // the number of seeds to search
	firstVariable = "MULA_CLUSTER_FIRST" // the first of them
	plantVariable = "MULA_CLUSTER_PLANT" // the name of a planted bug
)

// plants are the planted bugs of all simulations.
var plants = []string{"lost-sync", "manifest-first", "trust-one-rank", "old-weights", "stale-spare", "kept-weights",
	"double-claim"}

// A Simulation is a cluster whose faults are events of type E.
type Simulation[E fmt.Stringer] struct {
	Plants []string // the bugs that Run can add to the product
	// Schedule draws the settings, as text, and the events of a seed.
	Schedule func(seed uint64) (settings string, events []E)
	// Run simulates a seed in a bubble of synctest, with the given events instead of its own. It
	// returns the problems, and the virtual time of the run. plant is "" for no bug. trace, if not
	// nil, is called with everything that happens.
	Run func(ctx context.Context, seed uint64, events []E, plant string, trace func(text string)) (
		problems []string, took time.Duration)
}

// Test simulates one seed, or as many seeds as the environment says, or usual seeds. It reports
// whether the environment asks for nothing.
func (s *Simulation[E]) Test(t *testing.T, usual int) (unasked bool) {
	t.Helper()
	plant := os.Getenv(plantVariable)
	if plant != "" && !slices.Contains(plants, plant) {
		t.Fatalf("%s: %q is not one of %s", plantVariable, plant, strings.Join(plants, ", "))
	}
	if plant != "" && !slices.Contains(s.Plants, plant) {
		t.Skipf("%s is a bug of another simulation", plant)
	}
	syncFiles(t)
	if os.Getenv(seedVariable) != "" {
		s.replay(t, number(t, seedVariable, 0), plant, func(text string) { t.Log(text) })
		return false
	}
	begin := time.Now()
	done, virtual, failed := s.search(t, number(t, firstVariable, 1), number(t, seedsVariable, uint64(usual)), plant)
	t.Logf("%d seeds; %.1f virtual hours in %s", done, virtual.Hours(), time.Since(begin).Round(time.Millisecond))
	if failed != nil {
		t.Errorf("%s\nmake simulate-cluster SEED=%d prints the run with all events", s.shrink(t, *failed, plant),
			*failed)
	}
	return plant == "" && os.Getenv(seedsVariable) == ""
}

// Replay simulates one seed, and returns the texts of everything that happens.
func (s *Simulation[E]) Replay(t *testing.T, seed uint64) (texts []string) {
	t.Helper()
	syncFiles(t)
	var mu sync.Mutex
	s.replay(t, seed, "", func(text string) {
		mu.Lock()
		defer mu.Unlock()
		texts = append(texts, text)
	})
	return texts
}

// replay simulates one seed, and calls trace with everything that happens.
func (s *Simulation[E]) replay(t *testing.T, seed uint64, plant string, trace func(text string)) {
	t.Helper()
	settings, events := s.Schedule(seed)
	t.Log(describe(seed, settings, events))
	problems, took := s.simulate(t, seed, events, plant, trace)
	if len(problems) > 0 {
		t.Error(strings.Join(problems, "\n"))
	}
	t.Logf("virtual time %s", took)
}

// Finds requires that one of the first count seeds finds a planted bug.
func (s *Simulation[E]) Finds(t *testing.T, plant string, count uint64) {
	t.Helper()
	syncFiles(t)
	done, _, failed := s.search(t, 1, count, plant)
	if failed == nil {
		t.Errorf("planted bug %s: not found by %d seeds", plant, done)
		return
	}
	t.Logf("planted bug %s, found by seed %d:\n%s", plant, *failed, s.shrink(t, *failed, plant))
}

// syncFiles makes atomicfile sync files until the test ends: a host of the cluster loses the rest.
func syncFiles(t *testing.T) {
	skip := atomicfile.SkipSync
	atomicfile.SkipSync = false
	t.Cleanup(func() { atomicfile.SkipSync = skip })
}

// number returns the number in a variable of the environment.
func number(t *testing.T, name string, usual uint64) uint64 {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return usual
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

// simulate runs a schedule in a bubble of its own.
func (s *Simulation[E]) simulate(t *testing.T, seed uint64, events []E, plant string, trace func(string)) (
	problems []string, took time.Duration) {
	synctest.Test(t, func(t *testing.T) {
		problems, took = s.Run(t.Context(), seed, events, plant, trace)
	})
	return problems, took
}

// search simulates seeds on all cores, until one fails or all are done. It returns the number of
// seeds, the virtual time of their runs, and the first seed that failed.
func (s *Simulation[E]) search(t *testing.T, first, count uint64, plant string) (done uint64, virtual time.Duration,
	failed *uint64) {
	defer debug.SetGCPercent(debug.SetGCPercent(400)) // a seed leaves much garbage, and keeps little
	var next, total, ended atomic.Int64
	var found atomic.Pointer[uint64]
	t.Run("seeds", func(t *testing.T) {
		for range min(uint64(runtime.GOMAXPROCS(0)), count) {
			t.Run("", func(t *testing.T) {
				t.Parallel()
				for found.Load() == nil {
					i := uint64(next.Add(1) - 1)
					if i >= count {
						return
					}
					seed := first + i
					_, events := s.Schedule(seed)
					problems, took := s.simulate(t, seed, events, plant, nil)
					total.Add(int64(took))
					if ended.Add(1)%1000 == 0 {
						t.Logf("%d seeds", ended.Load())
					}
					if len(problems) > 0 {
						found.CompareAndSwap(nil, &seed)
					}
				}
			})
		}
	})
	return uint64(ended.Load()), time.Duration(total.Load()), found.Load()
}

// shrink removes events from the schedule of a failing seed as long as it still fails. It describes
// the result.
func (s *Simulation[E]) shrink(t *testing.T, seed uint64, plant string) string {
	settings, events := s.Schedule(seed)
	problems, _ := s.simulate(t, seed, events, plant, nil)
	for i := 0; i < len(events); {
		fewer := slices.Delete(slices.Clone(events), i, i+1)
		if p, _ := s.simulate(t, seed, fewer, plant, nil); len(p) > 0 {
			events, problems = fewer, p
		} else {
			i++
		}
	}
	return describe(seed, settings, events) + strings.Join(problems, "\n")
}

// describe describes a schedule.
func describe[E fmt.Stringer](seed uint64, settings string, events []E) string {
	text := fmt.Sprintf("seed %d: %s\n", seed, settings)
	for _, e := range events {
		text += e.String() + "\n"
	}
	return text
}
