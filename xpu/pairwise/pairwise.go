// Package pairwise makes the exchanges of a group out of messages between two ranks, for links that
// have nothing better.
//
// A piece goes from its sender to its receiver directly, so that a rank sends no more bytes than it
// must. All messages of a call are on their way at the same time; each rank begins with its next
// neighbour, so that not all send to the same one.
package pairwise

import (
	"context"
	"encoding/binary"
	"fmt"
)

// Messages carries messages between this rank and others. The messages between two ranks arrive in
// the order in which they were sent. Errors show in Wait.
type Messages interface {
	// Begin starts a call, which Wait ends.
	Begin(ctx context.Context) error
	// Push sends data to another rank, as part of an operation.
	Push(to int, op Operation, data []byte)
	// Pull receives data from another rank, as part of an operation.
	Pull(from int, op Operation, data []byte)
	// Wait returns when what was pushed and pulled since Begin has gone and come, or never will;
	// nobody touches data any more then.
	Wait(ctx context.Context) error
}

// An Operation is what a message is part of.
type Operation uint8

// The operations.
const (
	AllToAll Operation = 1 + iota
	AllGather
	Broadcast
	Barrier
	Send
	Split
)

func (o Operation) String() string {
	names := [...]string{"no operation", "an all-to-all", "an all-gather", "a broadcast", "a barrier", "a send",
		"a split"}
	if int(o) < len(names) {
		return names[o]
	}
	return fmt.Sprintf("operation %d", uint8(o))
}

// A Group is this rank's place among those that exchange messages. Its methods are those of
// [mula/xpu.Link] of the same names.
type Group struct {
	messages   Messages
	name       string // of the link, in messages
	rank, size int
}

// NewGroup returns the group of a link of the given name.
func NewGroup(name string, rank, size int, m Messages) Group { return Group{m, name, rank, size} }

// Rank is this rank's number.
func (g *Group) Rank() int { return g.rank }

// Size is the number of ranks.
func (g *Group) Size() int { return g.size }

// AllToAll sends send[r] to each rank r and receives recv[r] from it.
func (g *Group) AllToAll(ctx context.Context, send, recv [][]byte) error {
	if len(send) != g.size || len(recv) != g.size {
		return fmt.Errorf("%s: an all-to-all of %d and %d pieces among %d ranks", g.name, len(send), len(recv), g.size)
	}
	if err := g.keep(recv[g.rank], send[g.rank]); err != nil {
		return err
	}
	if err := g.messages.Begin(ctx); err != nil {
		return err
	}
	for i := 1; i < g.size; i++ {
		if from := (g.rank + g.size - i) % g.size; len(recv[from]) > 0 {
			g.messages.Pull(from, AllToAll, recv[from])
		}
	}
	for i := 1; i < g.size; i++ {
		if to := (g.rank + i) % g.size; len(send[to]) > 0 {
			g.messages.Push(to, AllToAll, send[to])
		}
	}
	return g.messages.Wait(ctx)
}

// AllGather sends own to all ranks and receives all[r] from each rank r.
func (g *Group) AllGather(ctx context.Context, own []byte, all [][]byte) error {
	if len(all) != g.size {
		return fmt.Errorf("%s: an all-gather of %d pieces among %d ranks", g.name, len(all), g.size)
	}
	return g.gather(ctx, AllGather, own, all)
}

func (g *Group) gather(ctx context.Context, op Operation, own []byte, all [][]byte) error {
	if err := g.keep(all[g.rank], own); err != nil {
		return err
	}
	if err := g.messages.Begin(ctx); err != nil {
		return err
	}
	for i := 1; i < g.size; i++ {
		if from := (g.rank + g.size - i) % g.size; len(all[from]) > 0 {
			g.messages.Pull(from, op, all[from])
		}
	}
	for i := 1; i < g.size && len(own) > 0; i++ {
		g.messages.Push((g.rank+i)%g.size, op, own)
	}
	return g.messages.Wait(ctx)
}

// keep does what a rank sends to itself.
func (g *Group) keep(dst, src []byte) error {
	if len(dst) != len(src) {
		return fmt.Errorf("%s: rank %d sends %d bytes to itself, and expects %d", g.name, g.rank, len(src), len(dst))
	}
	copy(dst, src)
	return nil
}

// Broadcast fills data with that of the root. The ranks form a tree: each passes data on to those
// as far from it as powers of two below its own distance from the root.
func (g *Group) Broadcast(ctx context.Context, root int, data []byte) error {
	if len(data) == 0 {
		return g.nothing(ctx)
	}
	distance := (g.rank - root + g.size) % g.size
	step := 1
	for ; step < g.size && distance&step == 0; step *= 2 {
	}
	if distance > 0 {
		if err := g.messages.Begin(ctx); err != nil {
			return err
		}
		g.messages.Pull((root+distance-step)%g.size, Broadcast, data)
		if err := g.messages.Wait(ctx); err != nil {
			return err
		}
	}
	if err := g.messages.Begin(ctx); err != nil {
		return err
	}
	for step /= 2; step > 0; step /= 2 {
		if distance+step < g.size {
			g.messages.Push((root+distance+step)%g.size, Broadcast, data)
		}
	}
	return g.messages.Wait(ctx)
}

// nothing only sees whether the group still is of use.
func (g *Group) nothing(ctx context.Context) error {
	if err := g.messages.Begin(ctx); err != nil {
		return err
	}
	return g.messages.Wait(ctx)
}

// Barrier returns when all ranks have called it. In round i a rank hears from the one 2^i below it,
// which by then has heard from 2^i.
func (g *Group) Barrier(ctx context.Context) error {
	if g.size == 1 {
		return g.nothing(ctx)
	}
	for step := 1; step < g.size; step *= 2 {
		if err := g.messages.Begin(ctx); err != nil {
			return err
		}
		g.messages.Pull((g.rank+g.size-step)%g.size, Barrier, nil)
		g.messages.Push((g.rank+step)%g.size, Barrier, nil)
		if err := g.messages.Wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Recv receives data that another rank sends to this one by itself.
func (g *Group) Recv(ctx context.Context, from int, data []byte) error {
	if err := g.messages.Begin(ctx); err != nil {
		return err
	}
	g.messages.Pull(from, Send, data)
	return g.messages.Wait(ctx)
}

// Votes tells all ranks the color and key of each, as Split needs them.
func (g *Group) Votes(ctx context.Context, color, key int) (colors, keys []int, err error) {
	own := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, uint64(color)), uint64(key))
	all := make([][]byte, g.size)
	for r := range all {
		all[r] = make([]byte, len(own))
	}
	if err := g.gather(ctx, Split, own, all); err != nil {
		return nil, nil, err
	}
	for _, b := range all {
		colors = append(colors, int(int64(binary.LittleEndian.Uint64(b))))
		keys = append(keys, int(int64(binary.LittleEndian.Uint64(b[8:]))))
	}
	return colors, keys, nil
}
