package train

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"mula/internal/atomicfile"
	"mula/internal/longtest"
)

// Environment variables of make simulate-cluster.
const (
	clusterSeedVariable  = "MULA_CLUSTER_SEED"  // one seed, whose events are printed
	clusterSeedsVariable = "MULA_CLUSTER_SEEDS" // the number of seeds to search
	clusterFirstVariable = "MULA_CLUSTER_FIRST" // the first of them
	clusterPlantVariable = "MULA_CLUSTER_PLANT" // the name of a planted bug
)

// syncFiles makes atomicfile sync files until the test ends: a host of the cluster loses the rest.
func syncFiles(t *testing.T) {
	skip := atomicfile.SkipSync
	atomicfile.SkipSync = false
	t.Cleanup(func() { atomicfile.SkipSync = skip })
}

// runCluster simulates a schedule in a bubble of its own.
func runCluster(t *testing.T, references [2]clusterReference, seed uint64, settings clusterSettings,
	events []clusterEvent, plant clusterPlant, trace func(text string)) (problems []string, took time.Duration) {
	synctest.Test(t, func(t *testing.T) {
		problems, took = simulateCluster(t.Context(), references, seed, settings, events, plant, trace)
	})
	return problems, took
}

// shrinkCluster removes events from the schedule of a failing seed as long as it still fails. It
// describes the result.
func shrinkCluster(t *testing.T, references [2]clusterReference, seed uint64, plant clusterPlant) string {
	settings, events := clusterSchedule(seed)
	problems, _ := runCluster(t, references, seed, settings, events, plant, nil)
	for i := 0; i < len(events); {
		fewer := slices.Delete(slices.Clone(events), i, i+1)
		if p, _ := runCluster(t, references, seed, settings, fewer, plant, nil); len(p) > 0 {
			events, problems = fewer, p
		} else {
			i++
		}
	}
	return describeCluster(seed, settings, events) + strings.Join(problems, "\n")
}

// describeCluster describes a schedule.
func describeCluster(seed uint64, settings clusterSettings, events []clusterEvent) string {
	text := fmt.Sprintf("seed %d: background checkpoints %t, snapshots %t, shared experts %t, attributes stale for up "+
		"to %s\n", seed, settings.Background, settings.Snapshots, settings.Split, settings.Stale)
	for _, e := range events {
		text += e.String() + "\n"
	}
	return text
}

// searchCluster simulates seeds on all cores, until one fails or all are done. It returns the
// number of seeds, the virtual time of their runs, and the failing seed.
func searchCluster(t *testing.T, references [2]clusterReference, first, count uint64, plant clusterPlant) (
	done uint64, virtual time.Duration, failed *uint64) {
	var next, total, ended atomic.Int64
	var found atomic.Pointer[uint64]
	t.Run("seeds", func(t *testing.T) {
		for range runtime.GOMAXPROCS(0) {
			t.Run("", func(t *testing.T) {
				t.Parallel()
				for found.Load() == nil {
					i := uint64(next.Add(1) - 1)
					if i >= count {
						return
					}
					seed := first + i
					settings, events := clusterSchedule(seed)
					problems, took := runCluster(t, references, seed, settings, events, plant, nil)
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

// TestSimulateCluster simulates a few seeds. make simulate-cluster simulates one and prints its
// events, or many.
func TestSimulateCluster(t *testing.T) {
	plant, err := clusterPlantNamed(os.Getenv(clusterPlantVariable))
	if err != nil {
		t.Fatal(err)
	}
	references := clusterReferences(t)
	syncFiles(t)
	number := func(name string, usual uint64) uint64 {
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
	if os.Getenv(clusterSeedVariable) != "" {
		seed := number(clusterSeedVariable, 0)
		settings, events := clusterSchedule(seed)
		t.Log(describeCluster(seed, settings, events))
		problems, took := runCluster(t, references, seed, settings, events, plant, func(text string) { t.Log(text) })
		if len(problems) > 0 {
			t.Error(strings.Join(problems, "\n"))
		}
		t.Logf("virtual time %s", took)
		return
	}
	usual := 3
	if testing.Short() {
		usual = 1
	}
	count := number(clusterSeedsVariable, uint64(longtest.Rounds(usual, 500)))
	begin := time.Now()
	done, virtual, failed := searchCluster(t, references, number(clusterFirstVariable, 1), count, plant)
	t.Logf("%d seeds; %.1f virtual hours in %s", done, virtual.Hours(), time.Since(begin).Round(time.Second))
	if failed != nil {
		t.Errorf("%s\nmake simulate-cluster SEED=%d prints the run with all events",
			shrinkCluster(t, references, *failed, plant), *failed)
	}
	if plant != noPlant || os.Getenv(clusterSeedsVariable) != "" {
		return
	}
	if done, _, failed := searchCluster(t, references, 1, 20, manifestFirst); failed == nil {
		t.Errorf("planted bug %s: not found by %d seeds", manifestFirst, done)
	}
}

// The simulation finds each planted bug.
func TestSimulateClusterPlants(t *testing.T) {
	if longtest.Rounds(0, 1) == 0 {
		t.Skip("a long test; run make test-long")
	}
	references := clusterReferences(t)
	syncFiles(t)
	for plant := range clusterPlants {
		if plant != noPlant {
			done, _, failed := searchCluster(t, references, 1, 2000, plant)
			if failed == nil {
				t.Errorf("planted bug %s: not found by %d seeds", plant, done)
				continue
			}
			t.Logf("planted bug %s, found after %d seeds:\n%s", plant, done,
				shrinkCluster(t, references, *failed, plant))
		}
	}
}

// clusterPlantNamed returns the planted bug with a name; "" is none.
func clusterPlantNamed(name string) (clusterPlant, error) {
	var names []string
	for plant := range clusterPlants {
		if name == plant.String() || name == "" {
			return plant, nil
		}
		names = append(names, plant.String())
	}
	return 0, fmt.Errorf("%s: %q is not one of %s", clusterPlantVariable, name, strings.Join(names, ", "))
}
