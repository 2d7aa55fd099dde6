package train

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"mula/internal/longtest"
	"mula/internal/objects/objectstest"
	"mula/internal/simulation"
)

// trainerSimulation returns the simulation of trainer and launcher.
func trainerSimulation(t *testing.T) *simulation.Simulation[clusterEvent] {
	objectstest.SetMemory(t)
	references := clusterReferences(t)
	s := &simulation.Simulation[clusterEvent]{
		Schedule: func(seed uint64) (string, []clusterEvent) {
			settings, events := clusterSchedule(seed)
			return settings.String(), events
		},
		Run: func(ctx context.Context, seed uint64, events []clusterEvent, plant string, trace func(string)) (
			[]string, time.Duration) {
			settings, _ := clusterSchedule(seed)
			return simulateCluster(ctx, references, seed, settings, events, clusterPlantNamed(plant), trace)
		},
	}
	for plant := noPlant + 1; plant < clusterPlants; plant++ {
		s.Plants = append(s.Plants, plant.String())
	}
	return s
}

func (s clusterSettings) String() string {
	text := fmt.Sprintf("background checkpoints %t, snapshots %t, copies %t, shared experts %t, attributes stale for "+
		"up to %s", s.Background, s.SnapshotEvery > 0, s.Copies, s.Split, s.Stale)
	if s.HotSpares > 0 {
		text += fmt.Sprintf(", %d hot spares, snapshots every %d steps", s.HotSpares, s.SnapshotEvery)
	}
	return text
}

// clusterPlantNamed returns the planted bug with a name.
func clusterPlantNamed(name string) clusterPlant {
	for plant := range clusterPlants {
		if name == plant.String() {
			return plant
		}
	}
	return noPlant
}

// TestSimulateCluster simulates a few seeds. make simulate-cluster simulates one and prints its
// events, or many.
func TestSimulateCluster(t *testing.T) {
	s := trainerSimulation(t)
	usual := 3
	if testing.Short() {
		usual = 1
	}
	if s.Test(t, longtest.Rounds(usual, 500)) {
		s.Finds(t, trustOneRank.String(), 20)
		texts := strings.Join(s.Replay(t, hotSeed), "\n")
		if !strings.Contains(texts, "a hot spare on host-2 takes over") {
			t.Errorf("no hot spare takes over:\n%s", texts)
		}
	}
}

// hotSeed is a seed in which a hot spare takes over.
const hotSeed = 56

// The simulation finds each planted bug.
func TestSimulateClusterPlants(t *testing.T) {
	if longtest.Rounds(0, 1) == 0 {
		t.Skip("a long test; run make test-long")
	}
	s := trainerSimulation(t)
	for _, plant := range s.Plants {
		s.Finds(t, plant, 2000)
	}
}
