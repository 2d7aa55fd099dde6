package gpt

import (
	"context"
	"io"

	"golang.org/x/sync/semaphore"
)

// workshopMemory bounds the memory of the datasets that a [Workshop] builds at once; one that needs
// more is built alone.
const workshopMemory = 4 << 30

// idleBuilders are as many builders as a [Workshop] has beyond its threads: while one waits for the
// disk, another computes in its place.
const idleBuilders = 6

// A Workshop builds several datasets at once, within bounds of processor and memory.
type Workshop struct {
	// Pool is of what computes, one share a thread. Whatever else computes beside the datasets
	// takes its shares from it too.
	Pool *semaphore.Weighted

	threads int
	memory  *semaphore.Weighted // in bytes
	// bytes that a builder may keep between datasets: all of them together as much as memory
	keep     int64
	builders chan *Builder // that are free, each with the memory that it has gathered
}

// NewWorkshop is a workshop that computes on so many threads, at least one.
func NewWorkshop(threads int) *Workshop {
	threads = max(1, threads)
	w := &Workshop{
		Pool: semaphore.NewWeighted(int64(threads)), threads: threads, memory: semaphore.NewWeighted(workshopMemory),
		builders: make(chan *Builder, threads+idleBuilders),
	}
	w.keep = workshopMemory / int64(cap(w.builders))
	for range cap(w.builders) {
		w.builders <- new(Builder)
	}
	return w
}

// Threads is how many threads compute.
func (w *Workshop) Threads() int { return w.threads }

// Places is how many datasets are built at once; more calls of Build wait.
func (w *Workshop) Places() int { return cap(w.builders) }

// Build writes the document, sample and shuffle index of d, whose layout is l, into files, in that
// order; one that is nil is not wanted. It waits until there is a place, and memory.
func (w *Workshop) Build(ctx context.Context, d *Dataset, l Layout, files []io.WriterAt) error {
	need := min(l.Memory(), workshopMemory)
	if err := w.memory.Acquire(ctx, need); err != nil {
		return context.Cause(ctx)
	}
	defer w.memory.Release(need)
	var b *Builder
	select {
	case b = <-w.builders:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() {
		if need > w.keep {
			b.Release() // before the memory is anybody's again
		}
		w.builders <- b
	}()
	return b.Build(ctx, d, l, Files{Documents: files[0], Samples: files[1], Shuffle: files[2]}, w.Pool)
}
