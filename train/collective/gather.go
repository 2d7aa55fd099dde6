// Package collective has what ranks do together besides sums: they gather small values, let rank 0
// decide, and agree on errors, so that no rank waits for a rank that has failed. Every function
// with a group is called by all ranks of the group.
package collective

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"mula/xpu/comm"
)

// Gather returns the values of all ranks on every rank, in the order of the ranks. It sends JSON,
// so it is for small values and rare calls.
func Gather[T any](ctx context.Context, world *comm.Comm, value T) ([]T, error) {
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

// Broadcast sets value to the value of rank 0. It sends JSON, as [Gather] does.
func Broadcast[T any](ctx context.Context, world *comm.Comm, value *T) error {
	if world.Size() == 1 {
		return nil
	}
	var text []byte
	var err error
	if world.Rank() == 0 {
		if text, err = json.Marshal(*value); err != nil {
			text = nil // which the other ranks report as an invalid message
		}
	}
	length := []int64{int64(len(text))}
	if lost := comm.Broadcast(ctx, world, 0, length); lost != nil {
		return errors.Join(err, lost)
	}
	if world.Rank() > 0 {
		text = make([]byte, length[0])
	}
	if lost := comm.Broadcast(ctx, world, 0, text); lost != nil || err != nil {
		return errors.Join(err, lost)
	}
	var sent T // without fields that only this rank has set
	if err := json.Unmarshal(text, &sent); err != nil {
		return fmt.Errorf("invalid message from rank 0: %w", err)
	}
	*value = sent
	return nil
}
