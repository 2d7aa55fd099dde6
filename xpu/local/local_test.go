package local

import (
	"context"
	"errors"
	"sync"
	"testing"

	"mula/xpu"
)

// together runs f as every rank of a group.
func together(t *testing.T, size int, f func(c *xpu.Comm) error) []error {
	t.Helper()
	errs := make([]error, size)
	var ranks sync.WaitGroup
	for r, link := range New(size) {
		ranks.Go(func() {
			c := xpu.NewComm(link)
			defer c.Close()
			errs[r] = f(c)
			if errs[r] == nil {
				errs[r] = c.Barrier(context.Background())
			}
		})
	}
	ranks.Wait()
	return errs
}

func TestAllReduce(t *testing.T) {
	for _, err := range together(t, 3, func(c *xpu.Comm) error {
		x := []float32{1, float32(c.Rank()), 10, 5}
		if err := xpu.AllReduce(context.Background(), c, x); err != nil {
			return err
		}
		for i, want := range []float32{3, 3, 30, 15} {
			if x[i] != want {
				t.Errorf("rank %d, element %d: %v", c.Rank(), i, x[i])
			}
		}
		return nil
	}) {
		if err != nil {
			t.Error(err)
		}
	}
}

// A rank that leaves is noticed by those that wait for it.
func TestLeaving(t *testing.T) {
	errs := together(t, 3, func(c *xpu.Comm) error {
		if c.Rank() == 1 {
			return errors.New("leaves")
		}
		return c.Barrier(context.Background())
	})
	for r, err := range errs {
		if r != 1 && !errors.Is(err, xpu.ErrPeerLost) {
			t.Errorf("rank %d: %v", r, err)
		}
	}
}
