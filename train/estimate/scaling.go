package estimate

import (
	"fmt"

	"mula/xpu/comm"
)

// A Point is the estimate of a run at one number of ranks.
type Point struct {
	Ranks           int     `json:"ranks"`
	DP              int     `json:"dp"`
	BatchSize       int     `json:"batch_size"`
	Time            Time    `json:"seconds"`
	StepTime        float64 `json:"step_seconds"`
	TokensPerSecond float64 `json:"tokens_per_second"`
	MFU             float64 `json:"mfu"`

	// Efficiency is the number of tokens per second and rank, relative to the first point.
	Efficiency float64 `json:"efficiency"`
}

// Scaling estimates runs of from, 2·from, 4·from, … and to ranks, with the layout's ep, pp and tp.
// With strong, all runs have the layout's batch size (strong scaling). Otherwise every data rank
// keeps its number of sequences (weak scaling), as in the Mula runs.
func Scaling(in Input, from, to int, strong bool) ([]Point, error) {
	if err := in.Layout.check(in.Config); err != nil {
		return nil, err
	}
	slice := in.Layout.Size(comm.World &^ comm.ExpertDP)
	axes := "ep·pp"
	if in.Layout.Size(comm.TP) > 1 {
		axes += "·tp"
	}
	if from < 1 || to < from || from%slice != 0 || to%slice != 0 {
		return nil, fmt.Errorf("ranks from %d to %d: both must be multiples of %s = %d, and the second must not be "+
			"below the first", from, to, axes, slice)
	}
	sequences := in.Layout.Sequences()
	var points []Point
	for ranks := from; ; ranks = min(2*ranks, to) {
		l := in.Layout
		l.Shape = l.With(comm.ExpertDP, ranks/slice)
		if !strong {
			l.BatchSize = sequences * l.readers()
		}
		next := in
		next.Layout = l
		r, err := computeSteps(next)
		if err != nil {
			return nil, fmt.Errorf("%d ranks: %w", ranks, err)
		}
		p := Point{Ranks: ranks, DP: ranks / slice, BatchSize: l.BatchSize, Time: r.Time, StepTime: r.StepTime,
			TokensPerSecond: r.TokensPerSecond, MFU: r.MFU, Efficiency: 1}
		if len(points) > 0 {
			first := points[0]
			p.Efficiency = p.TokensPerSecond / float64(ranks) / (first.TokensPerSecond / float64(first.Ranks))
		}
		points = append(points, p)
		if ranks == to {
			return points, nil
		}
	}
}
