package pipeline

import (
	"math"
	"testing"
)

// Stages that run their schedules with buffered messages never wait for each other in a circle.
// Each stage computes each pass once, messages between two stages are received in the order in
// which they are sent, and the passes of a group have the order of the micro-batches.
func TestSchedule(t *testing.T) {
	for stages := 1; stages <= 5; stages++ {
		for groups := 1; groups <= 4; groups++ {
			for batches := 1; batches <= 3*stages+1; batches++ {
				if stages == 1 && groups > 1 {
					continue
				}
				checkSchedule(t, stages, groups, batches)
			}
		}
	}
}

// A message has its sender, its direction, and the pass that receives it.
type message struct {
	from, to int
	pass
}

func checkSchedule(t *testing.T, stages, groups, batches int) {
	t.Helper()
	schedules := make([][]pass, stages)
	for stage := range schedules {
		schedules[stage] = schedule(stage, stages, groups, batches)
		if got, want := len(schedules[stage]), 2*groups*batches; got != want {
			t.Fatalf("%d stages, %d groups, %d batches: stage %d has %d passes, want %d", stages, groups, batches,
				stage, got, want)
		}
	}
	// Between the passes of a micro-batch in the first group, the first stage and the last one may
	// have sent embeddings and their gradients that wait; docs/reference/ranks.md has the bound.
	begun, bound := 0, stages
	if groups > 1 {
		bound = 2 * stages
	}
	for _, p := range schedules[0] {
		if p.group == 0 && p.backward {
			begun--
		} else if p.group == 0 {
			begun++
		}
		if begun > bound {
			t.Fatalf("%d stages, %d groups, %d batches: %d batches have begun, want at most %d", stages, groups,
				batches, begun, bound)
		}
	}
	type link struct {
		from, to int
		backward bool
	}
	sent := map[link][]message{}
	arrives := map[message]float64{}
	clocks, next, waiting := make([]float64, stages), make([]int, stages), make([]int, stages)
	latest := map[[3]int]int{} // next micro-batch of a stage, a group and a direction
	most := make([]int, stages)
	for moved := true; moved; {
		moved = false
		for stage := range stages {
			for next[stage] < len(schedules[stage]) {
				p := schedules[stage][next[stage]]
				step, duration, before, after := 1, 1.0, 0, stages*groups-1
				if p.backward {
					step, duration, before, after = -1, 2.0, after, before
				}
				number := p.group*stages + stage // of the group in the model
				if number != before {
					l := link{(stage - step + stages) % stages, stage, p.backward}
					if len(sent[l]) == 0 {
						break
					}
					m := sent[l][0]
					if want := (message{l.from, stage, p}); m != want {
						t.Fatalf("%d stages, %d groups, %d batches: stage %d receives %+v, want %+v", stages, groups,
							batches, stage, m, want)
					}
					sent[l] = sent[l][1:]
					clocks[stage] = max(clocks[stage], arrives[m])
				}
				key := [3]int{stage, p.group, step}
				if latest[key] != p.batch {
					t.Fatalf("%d stages, %d groups, %d batches: stage %d computes %+v before batch %d", stages, groups,
						batches, stage, p, latest[key])
				}
				latest[key]++
				waiting[stage] += step
				most[stage] = max(most[stage], waiting[stage])
				clocks[stage] += duration
				if number != after {
					to := (stage + step + stages) % stages
					m := message{stage, to, pass{p.backward, (number + step) / stages, p.batch}}
					l := link{stage, to, p.backward}
					sent[l] = append(sent[l], m)
					arrives[m] = clocks[stage]
				}
				next[stage]++
				moved = true
			}
		}
	}
	end := 0.0
	for stage := range stages {
		if next[stage] < len(schedules[stage]) {
			t.Fatalf("%d stages, %d groups, %d batches: stage %d waits for ever", stages, groups, batches, stage)
		}
		if got := InFlight(stage, stages, groups, batches); got != most[stage] {
			t.Errorf("%d stages, %d groups, %d batches: InFlight of stage %d is %d, want %d", stages, groups, batches,
				stage, got, most[stage])
		}
		end = max(end, clocks[stage])
	}
	idle, bubble := 1-float64(3*groups*batches)/end, Bubble(stages, groups, batches)
	if whole := groups == 1 || batches%stages == 0; idle > bubble+1e-9 || whole && math.Abs(idle-bubble) > 1e-9 {
		t.Errorf("%d stages, %d groups, %d batches: idle %v of the time, Bubble %v", stages, groups, batches,
			idle, bubble)
	}
}
