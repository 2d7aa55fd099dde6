// Package pairwise implements the collective operations of a transport with messages between two
// ranks, for transports without collective operations.
//
// Each piece is sent directly from its sender to its receiver, so that a rank sends the minimum
// number of bytes. All messages of a call are in transit at the same time. Each rank starts with
// its next neighbour, so that the ranks do not all send to the same rank.
package pairwise

import (
	"context"
	"encoding/binary"
	"fmt"

	"mula/xpu/comm"
)

// Messages sends and receives messages between this rank and others. Messages between two ranks
// arrive in the order in which they were sent. Wait reports errors.
type Messages interface {
	// Begin starts a call, which Wait ends.
	Begin(ctx context.Context) error
	// Push sends data to another rank, as part of an operation.
	Push(to int, op Operation, data []byte)
	// Pull receives data from another rank, as part of an operation.
	Pull(from int, op Operation, data []byte)
	// Wait returns when all messages pushed and pulled since Begin are complete, or never will be.
	// The data slices are not used after that.
	Wait(ctx context.Context) error
}

// An Operation names the operation that a message belongs to.
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

// A Group implements the methods of [mula/comm.Transport] with the same names for this rank.
type Group struct {
	messages   Messages
	name       string // name of the transport, for error messages
	rank, size int
}

// NewGroup returns the group of a transport with the given name.
func NewGroup(name string, rank, size int, m Messages) Group { return Group{m, name, rank, size} }

// Rank returns this rank's index.
func (g *Group) Rank() int { return g.rank }

// Size returns the number of ranks.
func (g *Group) Size() int { return g.size }

// AllToAll sends send[r] to each rank r and receives recv[r] from it.
func (g *Group) AllToAll(ctx context.Context, send, recv [][]byte) error {
	if len(send) != g.size || len(recv) != g.size {
		return fmt.Errorf("%s: an all-to-all of %d and %d pieces does not match %d ranks", g.name, len(send),
			len(recv), g.size)
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

// Exchange sends pieces to other ranks, in their order, and receives pieces from other ranks.
func (g *Group) Exchange(ctx context.Context, send, recv []comm.Piece) error {
	if err := g.messages.Begin(ctx); err != nil {
		return err
	}
	for _, p := range recv {
		g.messages.Pull(p.Rank, AllToAll, p.Data)
	}
	for _, p := range send {
		g.messages.Push(p.Rank, AllToAll, p.Data)
	}
	return g.messages.Wait(ctx)
}

// AllGather sends own to all ranks and receives all[r] from each rank r.
func (g *Group) AllGather(ctx context.Context, own []byte, all [][]byte) error {
	if len(all) != g.size {
		return fmt.Errorf("%s: an all-gather of %d pieces does not match %d ranks", g.name, len(all), g.size)
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

// keep copies the data that a rank sends to itself.
func (g *Group) keep(dst, src []byte) error {
	if len(dst) != len(src) {
		return fmt.Errorf("%s: rank %d sends %d bytes to itself, but expects %d", g.name, g.rank, len(src), len(dst))
	}
	copy(dst, src)
	return nil
}

// Broadcast fills data with the root's data. The ranks form a tree: each rank sends data to the
// ranks whose distance from it is a power of two below its own distance from the root.
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

// nothing only checks that the group is still usable.
func (g *Group) nothing(ctx context.Context) error {
	if err := g.messages.Begin(ctx); err != nil {
		return err
	}
	return g.messages.Wait(ctx)
}

// Barrier returns when all ranks have called it. In round i a rank hears from the rank 2^i below
// it, which has then heard from 2^i ranks.
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

// Recv receives data that another rank sends to this rank with Send.
func (g *Group) Recv(ctx context.Context, from int, data []byte) error {
	if err := g.messages.Begin(ctx); err != nil {
		return err
	}
	g.messages.Pull(from, Send, data)
	return g.messages.Wait(ctx)
}

// Votes sends the color and key of each rank to all ranks, as Split needs them.
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
