package moe

import (
	"context"
	"fmt"
	"testing"

	"mula/internal/testwait"
	"mula/xpu"
	"mula/xpu/comm"
	"mula/xpu/cpu"
)

// sortDevice calls sorts before the first command that writes the numbers of rows of experts.
type sortDevice struct {
	xpu.Device
	experts int // of a rank
	sorts   func()
}

func (d *sortDevice) WriteInts(t xpu.Tensor, src []int32) {
	if t.Rank() == 1 && t.Dim(0) == d.experts && d.sorts != nil {
		d.sorts()
		d.sorts = nil
	}
	d.Device.WriteInts(t, src)
}

// deliverLink calls delivers before the exchange that sends the tokens of the first layer.
type deliverLink struct {
	comm.Transport
	exchanges int
	delivers  func() error
}

func (l *deliverLink) AllToAll(ctx context.Context, send, recv [][]byte) error {
	const tokens = 3 // after the counts and the choices
	if l.exchanges++; l.exchanges == tokens {
		if err := l.delivers(); err != nil {
			return err
		}
	}
	return l.Transport.AllToAll(ctx, send, recv)
}

func (l *deliverLink) Split(ctx context.Context, color, key int) (comm.Transport, error) {
	part, err := l.Transport.Split(ctx, color, key)
	if part == nil || err != nil {
		return part, err
	}
	return &deliverLink{part, 0, l.delivers}, nil
}

// A rank orders tokens by expert while it sends tokens: each waits for the other.
func TestSortDuringDelivery(t *testing.T) {
	cfg := mustPreset(t, "mula-nano")
	batches := share(randomBatch(cfg, 5, 9, 2), []int{3, 2})
	ctx := testwait.Context(t)
	var sorts, delivers [2]chan struct{}
	meet := func(own, other chan struct{}, what string) error {
		close(own)
		select {
		case <-other:
			return nil
		case <-ctx.Done():
			return fmt.Errorf("not before the deadline of the test: %s", what)
		}
	}
	links := 0
	g := newRanksOn(t, func(r int) xpu.Device {
		return &sortDevice{cpu.New(1, xpu.FP32), cfg.Experts / 2, func() {
			if err := meet(sorts[r], delivers[r], "tokens are sent while they are ordered"); err != nil {
				t.Error(err)
			}
		}}
	}, cfg, 2, Parallel{}, func(link comm.Transport) comm.Transport {
		r := links
		links++
		sorts[r], delivers[r] = make(chan struct{}), make(chan struct{})
		return &deliverLink{link, 0, func() error {
			return meet(delivers[r], sorts[r], "tokens are ordered while they are sent")
		}}
	})
	for r, err := range g.each(func(r int, m *Model) error {
		randomize(m, 1)
		_, err := m.Forward(ctx, batches[r])
		return err
	}) {
		if err != nil {
			t.Errorf("rank %d: %v", r, err)
		}
	}
}
