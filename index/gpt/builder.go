package gpt

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"

	"mula/index/numpy"
	"mula/internal/machine"
	"mula/internal/quantity"
)

// Files are the writers of the three files of a dataset. Each file starts at byte 0 with its
// header. A nil writer is skipped, because its file is already complete.
//
// Each byte is written once, in any order. Files are written in chunks of 8 MiB. The last chunk may
// be shorter. The offset of a chunk is a multiple of 8 MiB, and its memory address is a
// multiple of 4096. Calls do not overlap, and are made on another goroutine than Build's.
type Files struct{ Documents, Samples, Shuffle io.WriterAt }

// Builder builds the indexes of datasets, one after the other. It keeps its memory between them:
// [Layout.Memory] of the largest dataset, and up to 64 MiB of chunks that wait to be written.
//
// The zero value is ready to use. A Builder is not safe for concurrent use; several Builders may
// share a pool.
type Builder struct {
	shuffler numpy.Shuffler
	chunks   chunkPool
	memory   []byte // the array that is being shuffled
	release  func()
	reserved int64 // Memory of the largest dataset so far

	chunkBytes int   // 0: the constant of that name
	large      int64 // 0: the constant of that name
}

// pastCaches is the number of pairs from which they are written with non-temporal stores.
const pastCaches = 12 << 20

// large is the number of entries from which a dataset uses several threads.
const large = 20 << 20

// Release frees the builder's memory. The builder can be used again.
func (b *Builder) Release() {
	b.shuffler.Release()
	b.chunks.drop()
	if b.release != nil {
		b.release()
	}
	b.memory, b.release, b.reserved = nil, nil, 0
}

// Build writes the index of d, whose layout is l, to f. While it computes, it holds one slot of
// pool (which may be nil), or several for a large dataset if they are free. While it waits for
// writes, it holds none.
//
// Build fails if a write fails, if ctx is done, if the lengths have changed since l was computed,
// if the machine has too little memory, or if a kept partial sample starts before its document
// (Megatron-LM crashes there). After an error, the files must not be used.
func (b *Builder) Build(ctx context.Context, d *Dataset, l Layout, f Files, pool *semaphore.Weighted) error {
	if err := d.check(); err != nil {
		return err
	}
	if expected, err := d.layout(l.TokensPerEpoch); err != nil || expected != l {
		return errors.New("the layout belongs to another dataset")
	}
	if f.Documents == nil && f.Samples == nil && f.Shuffle == nil {
		return nil
	}
	if err := b.room(l); err != nil {
		return err
	}
	if size := b.chunkSize(l); size > b.chunks.size {
		b.chunks.drop()
		b.chunks = chunkPool{size: size, free: make(chan []byte, chunkMemory)}
	}
	share := &lease{pool: pool}
	out := startOutput(ctx, share, &b.chunks)
	share.begin(out.ctx)
	err := b.compute(out, d, l, f)
	share.end()
	if err = out.finish(err); err != nil {
		b.chunks.drop() // the files of the failed build still use some of them
	}
	return err
}

func (b *Builder) compute(out *output, d *Dataset, l Layout, f Files) error {
	random := numpy.NewRandomState(d.Seed)
	e := newEmission(out, d, l, f)
	for _, p := range e.parts {
		if f.Documents == nil && f.Samples == nil {
			random.Skip(p.end - p.first)
		} else if err := b.documents(e, p, d, l, random); err != nil {
			return err
		}
	}
	if f.Shuffle == nil {
		return nil
	}
	image, err := b.shuffle(out, l, random)
	if err != nil {
		return err
	}
	out.writeImage(f.Shuffle, image)
	return nil
}

// chunkSize returns the size of the chunks for files of layout l. Short files are one chunk each.
func (b *Builder) chunkSize(l Layout) int {
	longest := max(l.DocumentBytes, l.SampleBytes, l.ShuffleBytes)
	return int(min(int64(cmp.Or(b.chunkBytes, chunkBytes)), (longest+chunkAlign-1)&^(chunkAlign-1)))
}

// threads returns the number of threads to shuffle the given number of elements, and acquires that
// many of the free pool slots. done releases them.
func (b *Builder) threads(out *output, elements int64) (threads int, done func()) {
	threshold := int64(large)
	if b.large > 0 {
		threshold = b.large
	}
	if elements < threshold {
		return 1, func() {}
	}
	extra := out.lease.more(runtime.GOMAXPROCS(0) - 1)
	return 1 + extra, func() { out.lease.less(extra) }
}

// documents writes one part of the document index and of the sample index.
func (b *Builder) documents(e *emission, p part, d *Dataset, l Layout, random *numpy.RandomState) error {
	if err := context.Cause(e.out.ctx); err != nil {
		return err
	}
	threads, done := b.threads(e.out, p.end-p.first)
	defer done()
	b.shuffler.Threads = threads
	pairs := uint64s(b.bytes(8 * (p.end - p.first)))
	if err := d.pairs(pairs, l.TokensPerEpoch, threads); err != nil {
		return err
	}
	if err := e.begin(p); err != nil {
		return err
	}
	if err := b.shuffler.Pairs(e.out.ctx, random, pairs, e.block); err != nil {
		return err
	}
	e.end()
	return nil
}

// pairs fills dst with id | length<<32 of the split's documents, repeated for each epoch, and
// checks that they still have the given number of tokens.
func (d *Dataset) pairs(dst []uint64, tokens int64, threads int) error {
	n := d.End - d.First
	lengths := d.Lengths[4*d.First : 4*d.End]
	// A large array would be evicted from the caches before it is read.
	past := len(dst) >= pastCaches
	sums := make([]int64, threads)
	negative := make([]bool, threads)
	var group errgroup.Group
	for t := range threads {
		group.Go(func() error {
			// whole cache lines
			from, to := n*int64(t)/int64(threads)&^7, n*int64(t+1)/int64(threads)&^7
			if t == threads-1 {
				to = n
			}
			err := d.guard(func() error {
				sums[t], negative[t] = fillPairs(dst[from:to], lengths[4*from:4*to], uint32(d.First+from), past)
				return nil
			})
			for epoch := n; epoch < int64(len(dst)); epoch += n {
				copy(dst[epoch+from:epoch+to], dst[from:to])
			}
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	for t, sum := range sums {
		if tokens -= sum; negative[t] {
			tokens = -1
			break
		}
	}
	if tokens != 0 {
		return errors.New("the lengths of the sequences changed during the build; build the index again when the " +
			".idx file is complete")
	}
	return nil
}

// shuffle computes the whole shuffle index file in the builder's memory.
func (b *Builder) shuffle(out *output, l Layout, random *numpy.RandomState) ([]byte, error) {
	n := l.shuffleEntries()
	threads, done := b.threads(out, n)
	defer done()
	b.shuffler.Threads = threads
	image := b.bytes(l.ShuffleBytes)
	header := numpy.Header(l.ShuffleDescr, n)
	copy(image, header[:])
	if l.ShuffleDescr == "<i8" {
		index := uint64s(image[headerBytes:])
		for i := range index {
			index[i] = uint64(i)
		}
		if err := shuffleLong(out.ctx, random, index[:l.Shuffled]); err != nil {
			return nil, err
		}
		if err := shuffleLong(out.ctx, random, index[l.Shuffled:]); err != nil {
			return nil, err
		}
	} else {
		index := uint32s(image[headerBytes:])
		for i := range index {
			index[i] = uint32(i)
		}
		if err := b.shuffler.Uint32(out.ctx, random, index[:l.Shuffled]); err != nil {
			return nil, err
		}
		if err := b.shuffler.Uint32(out.ctx, random, index[l.Shuffled:]); err != nil {
			return nil, err
		}
	}
	return image, nil
}

// shuffleLong is numpy.Shuffle for more than 2³² elements; it stops when ctx is done.
func shuffleLong(ctx context.Context, random *numpy.RandomState, a []uint64) error {
	for i := len(a) - 1; i > 0; i-- {
		j := random.Interval(uint64(i))
		a[i], a[j] = a[j], a[i]
		if i%(1<<20) == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return nil
}

// bytes returns n bytes of the builder's memory with arbitrary contents. It replaces the previous
// array.
func (b *Builder) bytes(n int64) []byte {
	if int64(len(b.memory)) < n {
		if b.release != nil {
			b.release()
		}
		b.memory, b.release = numpy.Aligned(int(n + n/4)) // unused pages take no memory
	}
	return b.memory[:n]
}

// room returns an error if the dataset needs more memory than the machine has left.
func (b *Builder) room(l Layout) error {
	need := l.Memory()
	if need <= b.reserved {
		return nil
	}
	if available := machine.AvailableMemory(); available > 0 && need-b.reserved > available {
		return fmt.Errorf("shuffling a dataset of %d document entries and %d samples takes %s of memory, and this "+
			"machine has %s left; divide the file, use fewer epochs, build fewer datasets at once or use a "+
			"larger machine",
			l.DocumentEntries, l.Samples, quantity.Bytes(need), quantity.Bytes(available+b.reserved))
	}
	b.reserved = need
	return nil
}
