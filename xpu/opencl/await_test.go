package opencl

import (
	"context"
	"testing"
)

// A result that is there is returned, even if the context has ended, too.
func TestAwait(t *testing.T) {
	done, cancel := context.WithCancel(t.Context())
	cancel()
	for range 100 { // a choice between the two by chance would show
		c := make(chan int, 1)
		c <- 7
		if v, ok := await(done, c); v != 7 || !ok {
			t.Fatalf("%d, %v with a result and a context that has ended", v, ok)
		}
	}
	if _, ok := await(done, make(chan int)); ok {
		t.Error("a result out of nothing")
	}
}
