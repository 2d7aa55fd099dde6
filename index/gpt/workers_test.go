package gpt

import (
	"context"
	"io"
	"testing"
)

// A builder that is given back keeps the memory of small datasets and none of a large one.
func TestWorkersGiveMemoryBack(t *testing.T) {
	w := NewWorkers(1)
	small := &Dataset{Lengths: lengthBytes(3, 5, 4), End: 3, SequenceLength: 4, ExtraToken: true, Samples: 10, Seed: 1}
	large := &Dataset{Lengths: lengthBytes(make([]int32, 3000)...), End: 3000, SequenceLength: 4, ExtraToken: true,
		Samples: 5, Seed: 1}
	large.Lengths[0] = 100
	build := func(d *Dataset) {
		t.Helper()
		l, err := d.Layout()
		if err != nil {
			t.Fatal(err)
		}
		if over := l.Memory() > w.keep; over != (d == large) {
			t.Fatalf("%d bytes, where a builder keeps %d", l.Memory(), w.keep)
		}
		files := []io.WriterAt{newFile(l.DocumentBytes, chunkBytes), newFile(l.SampleBytes, chunkBytes),
			newFile(l.ShuffleBytes, chunkBytes)}
		if err := w.Build(context.Background(), d, l, files); err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			f.(*file).result(t)
		}
	}
	holding := func() (n int) {
		for range w.Places() {
			b := <-w.builders
			if b.memory != nil || b.chunks.release != nil {
				n++
			}
			w.builders <- b
		}
		return n
	}
	if each := w.keep * int64(w.Places()); each > workersMemory {
		t.Errorf("the builders may keep %d bytes together", each)
	}
	w.keep = 10_000
	for range w.Places() {
		build(small)
	}
	if n := holding(); n != w.Places() {
		t.Errorf("after small datasets %d of %d builders hold memory", n, w.Places())
	}
	for range w.Places() {
		build(large)
	}
	if n := holding(); n != 0 {
		t.Errorf("after large datasets %d builders hold memory", n)
	}
	build(small) // and they can be used again
}
