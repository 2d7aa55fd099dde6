package train

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"mula/xpu/comm"
)

// gather returns the values of all ranks on every rank, in the order of the ranks. It sends JSON,
// so it is for small values and rare calls.
func gather[T any](ctx context.Context, world *comm.Comm, value T) ([]T, error) {
	if world.Size() == 1 {
		return []T{value}, nil
	}
	text, err := json.Marshal(value)
	if err != nil {
		text = nil // which the other ranks report as an invalid message
	}
	n, rank := world.Size(), world.Rank()
	lengths, each := make([]int64, n), make([]int, n+1)
	for r := range each {
		each[r] = r
	}
	lengths[rank] = int64(len(text))
	if err := comm.AllGather(ctx, world, lengths, each); err != nil {
		return nil, err
	}
	bounds := make([]int, n+1)
	for r, length := range lengths {
		bounds[r+1] = bounds[r] + int(length)
	}
	all := make([]byte, bounds[n])
	copy(all[bounds[rank]:], text)
	if err := comm.AllGather(ctx, world, all, bounds); err != nil {
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

// A failure is the state of a rank that it sends to the other ranks.
type failure struct {
	Host  string `json:"host,omitempty"`
	Error string `json:"error,omitempty"` // "" if the rank has not failed

	Configuration bool `json:"configuration,omitempty"` // see Misconfigured
}

// failureOf returns the failure for err, which may be nil.
func failureOf(err error) failure {
	if err == nil {
		return failure{}
	}
	return failure{hostname(), err.Error(), Misconfigured(err)}
}

// shownFailures is the number of ranks whose errors a message contains. Other ranks usually fail
// for the same reason.
const shownFailures = 4

// joinFailures returns an error about all failed ranks, or nil. own is this rank's error.
func joinFailures(failures []failure, rank int, own error) error {
	var errs []error
	failed := 0
	for r, f := range failures {
		if f.Error == "" {
			continue
		}
		failed++
		if f.Configuration && r == 0 { // all ranks have read the same configuration
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
		return &sharedErr{error: own, failures: failures} // the failure is not of a single rank
	}
	if failed > len(errs) {
		errs = append(errs, fmt.Errorf("and %d more ranks", failed-len(errs)))
	}
	return &sharedErr{error: errors.Join(errs...), failures: failures}
}

// settle returns an error about all failed ranks, which wraps own, this rank's error. In a run of
// one rank it returns own.
func settle(world *comm.Comm, failures []failure, own error) error {
	if world.Size() == 1 {
		return own
	}
	return joinFailures(failures, world.Rank(), own)
}

// ofAll returns an error that all ranks have computed from the same data, so that only one rank
// prints it. It blames no rank. In a run of one rank it returns err.
func ofAll(world *comm.Comm, err error) error {
	if world.Size() == 1 || err == nil {
		return err
	}
	return &sharedErr{error: err, recorded: true}
}

// agree returns nil on all ranks if err is nil on all ranks. Otherwise it returns on all ranks an
// error that names the failed ranks and their hosts and wraps err, this rank's error.
func agree(ctx context.Context, world *comm.Comm, err error) error {
	if world.Size() == 1 {
		return err
	}
	failures, gatherErr := gather(ctx, world, failureOf(err))
	if gatherErr != nil {
		return errors.Join(err, gatherErr)
	}
	return settle(world, failures, err)
}
