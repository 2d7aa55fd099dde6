package megatron

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"

	"golang.org/x/sync/errgroup"

	"mula/internal/mapping"
)

// Check reads the whole cache once, on all processors. If the cache contradicts itself or the .idx
// files of its datasets, Check returns an error that wraps [ErrCorrupt] and names file and row. The
// following must hold:
//
//   - Each row of a sample index is one sequence length of tokens after the previous row,
//     according to the document index and the lengths of the sequences. At the end of a
//     validation set there may be a partial sample, and rows that repeat the last row.
//   - A document index holds existing documents, and its sum equals the sum of whole epochs of
//     all documents from its least to its greatest.
//   - A shuffle index holds sample numbers, and its sum equals the sum of all numbers.
//   - A blend draws the samples of each dataset in ascending order, without gaps.
//
// This finds any single damaged entry, except an entry in the last draws of a blend that is valid
// by chance. It does not find documents or samples that were exchanged, and does not check the
// shuffles against the seed. [Verify] does both.
func (c *Cache) Check(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.GOMAXPROCS(0))
	begin := func(read func() error) { g.Go(func() error { return mapping.Guard(read) }) }
	if c.blendFile != "" {
		begin(func() error { return c.checkBlend(ctx) })
	}
	seen := map[*readDataset]bool{}
	for _, d := range c.datasets {
		if seen[d] { // listed several times
			continue
		}
		seen[d] = true
		begin(func() error { return d.checkDocuments(ctx) })
		begin(func() error { return d.checkShuffle(ctx) })
		const rows = 1 << 16 // for one goroutine at a time
		for first := int64(0); first < d.rows.n/2 && ctx.Err() == nil; first += rows {
			begin(func() error {
				if ctx.Err() != nil {
					return context.Cause(ctx)
				}
				return d.checkRows(first, min(first+rows, d.rows.n/2-1), c.sequenceLength, c.extra)
			})
		}
	}
	err := g.Wait()
	if errors.Is(err, ErrCorrupt) {
		return fmt.Errorf("%w; run `mula index verify %s` to find the damaged files, and rebuild them",
			err, filepath.Dir(c.datasets[0].base))
	}
	return err
}

// checkInterval is how many entries are read between checks of the context.
const checkInterval = 1 << 20

// checkBlend reads the files of a blend.
func (c *Cache) checkBlend(ctx context.Context) error {
	drawn := make([]int64, len(c.datasets))
	for k := range c.length {
		if k%checkInterval == 0 && ctx.Err() != nil {
			return context.Cause(ctx)
		}
		dataset, sample, err := c.Sample(k)
		if err != nil {
			return err
		}
		if sample != drawn[dataset] {
			return fmt.Errorf("%s*: entry %d is sample %d of dataset %d, but its next sample is %d: %w",
				c.blendFile, k, sample, dataset, drawn[dataset], ErrCorrupt)
		}
		drawn[dataset]++
	}
	return nil
}

// checkDocuments reads the document index.
func (d *readDataset) checkDocuments(ctx context.Context) error {
	path := d.base + gptEnds[0]
	low, high, sum, outside, err := d.documents.tally(ctx, d.file.Sequences())
	if err != nil {
		return err
	}
	n := d.documents.n
	switch {
	case outside:
		return fmt.Errorf("%s: entry %d is document %d, but %s has %d: %w", path, low, high, d.file.Path(),
			d.file.Sequences(), ErrCorrupt)
	case n > 0 && (n%(high-low+1) != 0 || 2*sum != uint64(n)*uint64(low+high)): // both sides modulo 2^64
		return fmt.Errorf("%s: its %d entries, rows 0 to %d, are not whole epochs of the documents %d to %d, which "+
			"are the least and the greatest entry: %w",
			path, n, n-1, low, high, ErrCorrupt)
	}
	return nil
}

// checkShuffle reads the shuffle index.
func (d *readDataset) checkShuffle(ctx context.Context) error {
	path, n := d.base+gptEnds[2], d.shuffle.n
	low, high, sum, outside, err := d.shuffle.tally(ctx, n)
	if err != nil {
		return err
	}
	switch {
	case outside:
		return fmt.Errorf("%s: entry %d is sample %d of %d: %w", path, low, high, n, ErrCorrupt)
	case n > 0 && 2*sum != uint64(n)*uint64(n-1): // both sides modulo 2^64
		return fmt.Errorf("%s: its entries, rows 0 to %d, are not a permutation of 0 to %d: %w", path, n-1, n-1,
			ErrCorrupt)
	}
	return nil
}

// tally returns the least number of a column, the greatest, and the sum modulo 2^64. All must be in
// [0, end). If a number is not, outside is true, and tally returns the index of the first such
// number, and the number.
func (c *column) tally(ctx context.Context, end int64) (low, high int64, sum uint64, outside bool, err error) {
	for i := range c.n {
		if i%checkInterval == 0 && ctx.Err() != nil {
			return 0, 0, 0, false, context.Cause(ctx)
		}
		v := c.at(i)
		if uint64(v) >= uint64(end) {
			return i, v, 0, true, nil
		}
		if i == 0 {
			low = v
		}
		low, high = min(low, v), max(high, v)
		sum += uint64(v)
	}
	return low, high, sum, false, nil
}

// checkRows compares rows first+1 to last of the sample index with the position that follows from
// the previous row and the documents.
func (d *readDataset) checkRows(first, last, sequence int64, extra bool) error {
	path := d.base + gptEnds[1]
	at, offset := d.rows.at(2*first), d.rows.at(2*first+1)
	if first == 0 && (at != 0 || offset != 0) {
		return fmt.Errorf("%s: row 0 is (%d, %d), not (0, 0): %w", path, at, offset, ErrCorrupt)
	}
	// A row is the position of its token k·sequence with the extra token, and of the previous token
	// otherwise.
	shift := int64(1)
	if extra {
		shift = 0
	}
	end := d.documents.n
	var lengths [1024]int32 // of the documents in positions [from, to)
	var from, to int64
	for k := first; k < last; k++ {
		if at < 0 || at >= end || offset < -1 || offset > 1<<31 {
			return fmt.Errorf("%s: row %d is (%d, %d), in a document index of %d entries: %w", path, k, at, offset, end,
				ErrCorrupt)
		}
		length := int64(0)
		// offset of the token that determines the row
		for offset += sequence - shift; at < end; at++ {
			if at >= to {
				from, to = at, min(at+int64(len(lengths)), end)
				if err := d.lengthsAt(lengths[:to-from], from); err != nil {
					return err
				}
			}
			if length = int64(lengths[at-from]); offset < length {
				break
			}
			offset -= length
		}
		offset += shift
		if at == end { // no such token: the end of a validation set with a partial sample
			at, offset = end-1, length-1+shift
		}
		if a, o := d.rows.at(2*k+2), d.rows.at(2*k+3); a != at || o != offset {
			return fmt.Errorf("%s: row %d is (%d, %d), but %d tokens after row %d, which is (%d, %d), it must be "+
				"(%d, %d): %w", path, k+1, a, o,
				sequence, k, d.rows.at(2*k), d.rows.at(2*k+1), at, offset, ErrCorrupt)
		}
	}
	return nil
}

// lengthsAt fills dst with the lengths of the documents at the positions from first on. They are
// scattered over memory: batched reads overlap their cache misses.
func (d *readDataset) lengthsAt(dst []int32, first int64) error {
	lengths, sequences := d.file.Lengths(), uint64(d.file.Sequences())
	documents := d.documents.data[4*first:]
	least := int32(0)
	for i := range dst {
		document := binary.LittleEndian.Uint32(documents[4*i:])
		if uint64(document) >= sequences {
			_, err := d.lengthAt(first + int64(i))
			return err
		}
		dst[i] = int32(binary.LittleEndian.Uint32(lengths[4*uint64(document):]))
		least = min(least, dst[i])
	}
	for i := range dst {
		if least < 0 && dst[i] < 0 {
			_, err := d.lengthAt(first + int64(i))
			return err
		}
	}
	return nil
}
