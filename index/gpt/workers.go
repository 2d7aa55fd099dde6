package gpt

import (
	"context"
	"io"

	"golang.org/x/sync/semaphore"
)

// workersMemory bounds the memory of the datasets that [Workers] build at once. A dataset that
// needs more is built alone.
const workersMemory = 4 << 30

// idleBuilders is how many builders [Workers] have in addition to their threads: while one waits
// for the disk, another computes.
const idleBuilders = 6

// Workers build several datasets at once, within limits of processor and memory use.
type Workers struct {
	// Pool has one slot per computing thread. Other computations that run next to the datasets use
	// it too.
	Pool *semaphore.Weighted

	threads int
	memory  *semaphore.Weighted // in bytes
	// bytes that a builder may keep between datasets; all builders together may keep as much as
	// memory
	keep     int64
	builders chan *Builder // free builders, each with the memory that it keeps
}

// NewWorkers returns workers that compute on the given number of threads, at least one.
func NewWorkers(threads int) *Workers {
	threads = max(1, threads)
	w := &Workers{
		Pool: semaphore.NewWeighted(int64(threads)), threads: threads, memory: semaphore.NewWeighted(workersMemory),
		builders: make(chan *Builder, threads+idleBuilders),
	}
	w.keep = workersMemory / int64(cap(w.builders))
	for range cap(w.builders) {
		w.builders <- new(Builder)
	}
	return w
}

// Threads returns the number of computing threads.
func (w *Workers) Threads() int { return w.threads }

// Places returns how many datasets are built at once; more calls of Build wait.
func (w *Workers) Places() int { return cap(w.builders) }

// Build writes the document, sample and shuffle index of d, whose layout is l, into files, in that
// order. A nil file is skipped. Build waits for a free builder and for memory.
func (w *Workers) Build(ctx context.Context, d *Dataset, l Layout, files []io.WriterAt) error {
	need := min(l.Memory(), workersMemory)
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
			b.Release() // before another builder can acquire the memory
		}
		w.builders <- b
	}()
	return b.Build(ctx, d, l, Files{Documents: files[0], Samples: files[1], Shuffle: files[2]}, w.Pool)
}
