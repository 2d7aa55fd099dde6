package train

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"mula/internal/strictyaml"
	"mula/train/collective"
	"mula/xpu/comm"
	"mula/xpu/comm/local"
)

// mostLocal is the largest number of ranks that are goroutines of one process.
const mostLocal = 256

// runLocal is Run with ranks that are goroutines of this process. Rank 0 is the caller's goroutine.
func runLocal(ctx context.Context, config Config, options Options) (Result, error) {
	n := config.Layout.Ranks()
	if n > mostLocal {
		return Result{}, &strictyaml.FieldError{Field: "layout",
			Message: fmt.Sprintf(" has %d ranks, but one process can have "+
				"at most %d; start the run with mula launch or mpiexec", n, mostLocal)}
	}
	results, errs := make([]Result, n), make([]error, n)
	run := func(rank int, link comm.Transport) {
		o := options // only the first rank calls its functions
		o.World, o.ranksHere, o.Kept = comm.New(link), n, nil
		results[rank], errs[rank] = Run(ctx, config, o)
		if errs[rank] == nil {
			errs[rank] = o.World.Barrier(ctx)
		}
		o.World.Close()
	}
	links := local.New(n)
	var others sync.WaitGroup
	for rank := 1; rank < n; rank++ {
		others.Go(func() { run(rank, links[rank]) })
	}
	run(0, links[0])
	others.Wait()
	return results[0], firstCause(errs)
}

// firstCause returns the error of the rank that caused the end of the run.
func firstCause(errs []error) error {
	var lost error
	for _, err := range errs {
		var shared *collective.GroupError
		switch {
		case err == nil:
		case errors.As(err, &shared):
			for rank, f := range shared.Failures {
				if f.Error != "" && rank < len(errs) && errs[rank] != nil {
					return errs[rank] // the error itself, for errors.Is
				}
			}
			return err
		case !errors.Is(err, comm.ErrPeerLost):
			return err
		case lost == nil:
			lost = err
		}
	}
	return lost
}

// fitsWorld returns an error if the layout is not for ranks ranks. The error names possible
// layouts.
func (c Config) fitsWorld(ranks int) error {
	shape := c.Layout.shape()
	if shape.Ranks() == ranks {
		return nil
	}
	axes, stages := comm.Data, ""
	readers, pp := ranks, shape.Size(comm.PP)
	tensor := ""
	if tp := shape.Size(comm.TP); tp > 1 && readers%tp == 0 {
		readers, tensor = readers/tp, fmt.Sprintf(", tp: %d", tp)
	}
	if pp > 1 {
		axes = comm.World
		stages = "pp: 1, "
		if readers%pp == 0 {
			readers, stages = readers/pp, fmt.Sprintf("pp: %d, ", pp)
		}
	}
	var possible []string
	for ep := 1; ep <= readers; ep++ {
		if readers%ep == 0 && (ep == 1 || c.Model.Experts > 0 && c.Model.Experts%ep == 0) {
			possible = append(possible, fmt.Sprintf("{expert_dp: %d, %sep: %d%s}", readers/ep, stages, ep, tensor))
		}
	}
	text := "possible: " + strings.Join(possible, ", ")
	if c.BatchSize%readers != 0 {
		text = fmt.Sprintf("start %d, or make batch_size (now %d) a multiple of %d and set layout to one of %s",
			shape.Ranks(), c.BatchSize, readers, strings.Join(possible, ", "))
	}
	return &strictyaml.FieldError{Field: "layout",
		Message: fmt.Sprintf(" is %s ranks, but %d were started; %s", shape.Product(axes, ""), ranks, text)}
}
