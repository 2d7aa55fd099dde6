package train

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"mula/xpu"
)

// alone reports whether a world is that of a run of one rank; such a run may have none.
func alone(world *xpu.Comm) bool { return world == nil || world.Size() == 1 }

// rankIn is this rank's number in the world.
func rankIn(world *xpu.Comm) int {
	if world == nil {
		return 0
	}
	return world.Rank()
}

// sizeOf is the number of ranks of the world.
func sizeOf(world *xpu.Comm) int {
	if world == nil {
		return 1
	}
	return world.Size()
}

// gather gives every rank what each rank has brought, in the order of the ranks. Values travel as
// JSON: it is for what is small and rare.
func gather[T any](ctx context.Context, world *xpu.Comm, value T) ([]T, error) {
	if alone(world) {
		return []T{value}, nil
	}
	text, err := json.Marshal(value)
	if err != nil {
		text = nil // which the others take for what it is
	}
	n, rank := world.Size(), world.Rank()
	lengths, each := make([]int64, n), make([]int, n+1)
	for r := range each {
		each[r] = r
	}
	lengths[rank] = int64(len(text))
	if err := xpu.AllGather(ctx, world, lengths, each); err != nil {
		return nil, err
	}
	bounds := make([]int, n+1)
	for r, length := range lengths {
		bounds[r+1] = bounds[r] + int(length)
	}
	all := make([]byte, bounds[n])
	copy(all[bounds[rank]:], text)
	if err := xpu.AllGather(ctx, world, all, bounds); err != nil {
		return nil, err
	}
	values := make([]T, n)
	for r := range values {
		if e := json.Unmarshal(all[bounds[r]:bounds[r+1]], &values[r]); e != nil {
			return nil, errors.Join(err, fmt.Errorf("invalid message from rank %d: %w", r, e))
		}
	}
	return values, nil
}

// A failure is what a rank says about itself to the others.
type failure struct {
	Host  string `json:"host,omitempty"`
	Error string `json:"error,omitempty"` // "" if all is well

	Configuration bool `json:"configuration,omitempty"` // see Misconfigured
}

// failureOf is what this rank says about err, which may be nil.
func failureOf(err error) failure {
	if err == nil {
		return failure{}
	}
	return failure{hostname(), err.Error(), Misconfigured(err)}
}

// shownFailures is the number of ranks whose errors are written out; the others have mostly failed
// for the same reason.
const shownFailures = 4

// joinFailures is the error about all ranks that have failed, nil if none has. own is this rank's.
func joinFailures(failures []failure, rank int, own error) error {
	var errs []error
	failed := 0
	for r, f := range failures {
		if f.Error == "" {
			continue
		}
		failed++
		if f.Configuration && r == 0 { // the others have read the same
			if r != rank {
				own = errors.New(f.Error)
			}
			return &sharedErr{error: own, failures: failures}
		}
		switch {
		case r == rank:
			errs = append(errs, fmt.Errorf("rank %d on %s: %w", r, f.Host, own))
		case failed <= shownFailures:
			errs = append(errs, fmt.Errorf("rank %d on %s: %s", r, f.Host, f.Error))
		}
	}
	if failed == 0 {
		return nil
	}
	if own != nil && !slices.ContainsFunc(failures, func(f failure) bool { return f.Error != failures[0].Error }) {
		return &sharedErr{error: own, failures: failures} // it is about none of them
	}
	if failed > len(errs) {
		errs = append(errs, fmt.Errorf("and %d more ranks", failed-len(errs)))
	}
	return &sharedErr{error: errors.Join(errs...), failures: failures}
}

// settle is the error about all ranks that have failed, which wraps own, this rank's; for a rank
// that is alone it is own.
func settle(world *xpu.Comm, failures []failure, own error) error {
	if alone(world) {
		return own
	}
	return joinFailures(failures, world.Rank(), own)
}

// ofAll is an error to which all ranks come by themselves, from what all of them know, so that one
// of them need print it. It speaks against no rank. For a rank that is alone it is err.
func ofAll(world *xpu.Comm, err error) error {
	if alone(world) || err == nil {
		return err
	}
	return &sharedErr{error: err, recorded: true}
}

// agree returns nil on all ranks if err is nil on all of them, and otherwise on all ranks an error
// that names those that failed, with their hosts. It wraps err, this rank's own.
func agree(ctx context.Context, world *xpu.Comm, err error) error {
	if alone(world) {
		return err
	}
	failures, gatherErr := gather(ctx, world, failureOf(err))
	if gatherErr != nil {
		return errors.Join(err, gatherErr)
	}
	return settle(world, failures, err)
}
