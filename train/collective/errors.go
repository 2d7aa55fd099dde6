package collective

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"mula/internal/strictyaml"
	"mula/xpu/comm"
)

// A Failure is the state of a rank that it sends to the other ranks.
type Failure struct {
	Host  string `json:"host,omitempty"`
	Error string `json:"error,omitempty"` // "" if the rank has not failed

	Configuration bool `json:"configuration,omitempty"` // see Misconfigured
}

// FailureOf returns the failure for err, which may be nil.
func FailureOf(err error) Failure {
	if err == nil {
		return Failure{}
	}
	return Failure{Hostname(), err.Error(), Misconfigured(err)}
}

// Hostname returns the host name for records of this rank's failures: MULA_HOST, which mula launch
// sets, or else the name of the machine.
func Hostname() string {
	if name := os.Getenv("MULA_HOST"); name != "" {
		return name
	}
	name, err := os.Hostname()
	if err != nil {
		return "an unknown host"
	}
	return name
}

// A GroupError is an error that all ranks of a run return, so that no rank waits for another.
type GroupError struct {
	Err      error
	Failures []Failure // of each rank; empty for ranks without a failure
	Recorded bool      // the run directory has the failures already
}

func (e *GroupError) Error() string { return e.Err.Error() }

func (e *GroupError) Unwrap() error { return e.Err }

// Shared reports whether all ranks of a run return the same error, or an error that names the same
// ranks. One rank is enough to print such an error.
func Shared(err error) bool {
	var shared *GroupError
	return errors.As(err, &shared)
}

// Misconfigured reports whether an error concerns a field of the configuration, so that a retry
// cannot help.
func Misconfigured(err error) bool {
	var shared *GroupError
	if errors.As(err, &shared) {
		return slices.ContainsFunc(shared.Failures, func(f Failure) bool { return f.Configuration }) ||
			Misconfigured(shared.Err)
	}
	var field *strictyaml.FieldError
	var several strictyaml.FieldErrors
	return errors.As(err, &field) || errors.As(err, &several)
}

// OfRank returns an error of one rank that all ranks have computed from the same data.
func OfRank(hosts []string, rank int, err error) *GroupError {
	failures := make([]Failure, len(hosts))
	failures[rank] = Failure{Host: hosts[rank], Error: err.Error()}
	return &GroupError{Err: fmt.Errorf("rank %d on %s: %w", rank, hosts[rank], err), Failures: failures}
}

// OfAll returns an error that all ranks have computed from the same data, so that only one rank
// prints it. It blames no rank. In a run of one rank it returns err.
func OfAll(world *comm.Comm, err error) error {
	if world.Size() == 1 || err == nil {
		return err
	}
	return &GroupError{Err: err, Recorded: true}
}

// AnyFailed reports whether err is not nil on a rank. Ranks send only one number, so it is called
// before a [Gather] of failures. lost is an error of the exchange.
func AnyFailed(ctx context.Context, world *comm.Comm, err error) (failed bool, lost error) {
	count := []int64{0}
	if err != nil {
		count[0] = 1
	}
	lost = comm.AllReduce(ctx, world, count)
	return count[0] > 0, lost
}

// Agree returns nil on all ranks if err is nil on all ranks. Otherwise it returns on all ranks an
// error that names the failed ranks and their hosts and wraps err, this rank's error.
func Agree(ctx context.Context, world *comm.Comm, err error) error {
	if world.Size() == 1 {
		return err
	}
	failed, lost := AnyFailed(ctx, world, err)
	if lost != nil || !failed {
		return errors.Join(err, lost)
	}
	failures, lost := Gather(ctx, world, FailureOf(err))
	if lost != nil {
		return errors.Join(err, lost)
	}
	return combine(world, failures, err)
}

// combine returns an error about all failed ranks, which wraps own, this rank's error. In a run of
// one rank it returns own.
func combine(world *comm.Comm, failures []Failure, own error) error {
	if world.Size() == 1 {
		return own
	}
	return JoinFailures(failures, world.Rank(), own)
}

// shownFailures is the number of ranks whose errors a message contains. Other ranks usually fail
// for the same reason.
const shownFailures = 4

// JoinFailures returns an error about all failed ranks, or nil. own is this rank's error.
func JoinFailures(failures []Failure, rank int, own error) error {
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
			return &GroupError{Err: own, Failures: failures}
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
	if own != nil && !slices.ContainsFunc(failures, func(f Failure) bool { return f.Error != failures[0].Error }) {
		return &GroupError{Err: own, Failures: failures} // the failure is not of a single rank
	}
	if failed > len(errs) {
		errs = append(errs, fmt.Errorf("and %d more ranks", failed-len(errs)))
	}
	return &GroupError{Err: errors.Join(errs...), Failures: failures}
}

// A BrokenError means that the group of ranks is unusable. The rank returns without another
// collective call.
type BrokenError struct{ Err error }

func (e *BrokenError) Error() string { return e.Err.Error() }

func (e *BrokenError) Unwrap() error { return e.Err }

// IsBroken reports whether an error means that the group of ranks is unusable.
func IsBroken(err error) bool {
	var lost *BrokenError
	return errors.As(err, &lost)
}
