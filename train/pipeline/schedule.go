package pipeline

// A pass is a forward or a backward pass of a micro-batch through a group of a stage's layers.
type pass struct {
	backward     bool
	group, batch int
}

// schedule returns the passes of a stage in order: one forward, one backward (1F1B), interleaved
// over its groups of layers if it has several (D. Narayanan et al., "Efficient Large-Scale Language
// Model Training on GPU Clusters Using Megatron-LM", 2021).
//
// Micro-batches are taken in sets; with n stages, a set has n micro-batches. A set passes all
// groups before the next set begins. The backward passes have the same order, from the last group
// to the first. Stage s with v groups starts with 2·(n-1-s) + (v-1)·n forward passes, or with n-1-s
// if v is 1. Then each forward pass is followed by a backward pass. The passes of a group have the
// order of the micro-batches. If the last set is incomplete, the passes of its missing
// micro-batches are skipped.
//
// Messages are buffered, so a stage waits only for passes of other stages that come before in their
// schedules.
func schedule(stage, stages, groups, batches int) []pass {
	ahead, set := stages-1-stage, 1
	if groups > 1 {
		ahead, set = 2*ahead+(groups-1)*stages, stages
	}
	total := (batches + set - 1) / set * set * groups // with the missing micro-batches
	ahead = min(ahead, total)
	var passes []pass
	add := func(k int, backward bool) {
		p := pass{backward, k / set % groups, k/(set*groups)*set + k%set}
		if backward {
			p.group = groups - 1 - p.group
		}
		if p.batch < batches {
			passes = append(passes, p)
		}
	}
	for k := range total + ahead {
		if k < total {
			add(k, false)
		}
		if k >= ahead {
			add(k-ahead, true)
		}
	}
	return passes
}

// InFlight returns the largest number of passes of a stage that wait for their backward pass, over
// all its groups of layers; 0 groups means 1.
func InFlight(stage, stages, groups, microBatches int) (most int) {
	if groups <= 1 {
		return min(stages-stage, microBatches)
	}
	n := 0 // the first two sets have the most
	for _, p := range schedule(stage, stages, groups, min(microBatches, 2*stages)) {
		if p.backward {
			n--
		} else {
			n++
		}
		most = max(most, n)
	}
	return most
}

// Bubble returns the fraction of a step in which pipeline stages are idle, because they wait for
// the first and the last micro-batches of other stages. Each stage has the given number of groups
// of layers; 0 means 1. With several groups, missing micro-batches of the last set count as idle:
// this is the largest fraction.
func Bubble(stages, groups, microBatches int) float64 {
	idle := Idle(stages, groups, microBatches)
	return idle / (float64(microBatches) + idle)
}

// Idle returns the time of [Bubble] in units of the passes of a micro-batch.
func Idle(stages, groups, microBatches int) float64 {
	missing := 0 // micro-batches
	if groups > 1 {
		missing = (stages - microBatches%stages) % stages
	}
	return float64(missing) + float64(stages-1)/float64(max(1, groups))
}
