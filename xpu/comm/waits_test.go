package comm_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"mula/xpu/comm"
)

// Waits has the time in exchanges and in Wait, but not the time of operations in the background.
// The clock is virtual.
func TestWaits(t *testing.T) {
	for name, f := range map[string]func(ctx context.Context, c *comm.Comm) error{
		"barrier":   func(ctx context.Context, c *comm.Comm) error { return c.Barrier(ctx) },
		"broadcast": func(ctx context.Context, c *comm.Comm) error { return comm.Broadcast(ctx, c, 1, []byte{1}) },
		"all-reduce": func(ctx context.Context, c *comm.Comm) error {
			return comm.AllReduce(ctx, c, []float32{1, 2, 3})
		},
		"reduce-scatter": func(ctx context.Context, c *comm.Comm) error {
			return comm.ReduceScatter(ctx, c, []float32{1, 2}, []int{0, 1, 2})
		},
		"all-gather": func(ctx context.Context, c *comm.Comm) error {
			return comm.AllGather(ctx, c, []byte{1, 2}, []int{0, 1, 2})
		},
		"all-to-all": func(ctx context.Context, c *comm.Comm) error {
			return comm.AllToAll(ctx, c, []byte{1, 2}, []int{0, 1, 2}, []byte{1, 2}, []int{0, 1, 2})
		},
		"message": func(ctx context.Context, c *comm.Comm) error {
			if c.Rank() == 1 {
				return comm.Send(ctx, c, 0, []byte{1})
			}
			return comm.Recv(ctx, c, 1, []byte{1})
		},
		"background": func(ctx context.Context, c *comm.Comm) error {
			p := c.Start(ctx, func(ctx context.Context) error { return c.Barrier(ctx) })
			time.Sleep(time.Second) // rank 0 waits in the background
			return p.Wait()
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			together(t, 2, func(ctx context.Context, c *comm.Comm) error {
				ctx, waits := comm.CountWaits(ctx)
				want := time.Duration(0)
				if c.Rank() == 1 {
					time.Sleep(5 * time.Second)
				} else if want = 5 * time.Second; name == "background" {
					want = 4 * time.Second
				}
				if err := f(ctx, c); err != nil {
					return err
				}
				if got := waits.Total(); got != want {
					return fmt.Errorf("%s: waited for %s, want %s", name, got, want)
				}
				return nil
			})
		})
	}
}
