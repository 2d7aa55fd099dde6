package gpt

import (
	"context"
	"encoding/binary"
	"errors"
	"unsafe"

	"mula/index/numpy"
)

// part is a range of documents that is shuffled as a whole, with its rows of the sample index.
type part struct {
	first, end      int64 // entries of the document index
	tokens          int64 // up to the part's end
	lowRow, highRow int64 // rows with a token in the part (and row 0); none if lowRow > highRow
	surplus         int64 // rows after those, which repeat the end of the last document
}

// empty reports whether the part has no rows.
func (p *part) empty() bool { return p.lowRow > p.highRow+p.surplus }

// parts divides d into ranges that are shuffled as a whole: one part, or two with a separate final
// epoch.
func (d *Dataset) parts(l Layout) []part {
	epochs, documents := l.Epochs, l.DocumentEntries
	if l.Separate {
		epochs--
		documents -= d.End - d.First
	}
	countable := (l.Epochs*l.TokensPerEpoch - d.extra()) / d.SequenceLength // rows with a token, without row 0
	high := min(l.Samples, countable)
	split := min(high, (epochs*l.TokensPerEpoch-d.extra())/d.SequenceLength)
	parts := []part{{end: documents, tokens: epochs * l.TokensPerEpoch, highRow: split}}
	if l.Separate {
		parts = append(parts, part{first: documents, end: l.DocumentEntries, tokens: l.Epochs * l.TokensPerEpoch,
			lowRow: split + 1, highRow: high})
	}
	parts[len(parts)-1].surplus = l.Samples - high
	return parts
}

// emission writes the document and sample index of shuffled documents, from the last document to
// the first.
type emission struct {
	out                *output
	parts              []part
	wide               bool        // rows of int64
	checked            bool        // rows are not negative
	documents, samples *descending // nil if not wanted
	part               part
	rows               rows
	started            bool // the rows: the last document has been seen
}

func newEmission(out *output, d *Dataset, l Layout, f Files) *emission {
	e := &emission{out: out, parts: d.parts(l), wide: l.SampleDescr == "<i8", rows: newRows(d.SequenceLength,
		d.extra())}
	e.checked = d.CheckOffsets && !e.wide // upstream's assertion is about int32 only
	if f.Documents != nil {
		e.documents = &descending{out: out, file: f.Documents, size: l.DocumentBytes,
			header: numpy.Header("<i4", l.DocumentEntries)}
	}
	if f.Samples != nil {
		e.samples = &descending{out: out, file: f.Samples, size: l.SampleBytes, header: numpy.Header(l.SampleDescr,
			l.Samples+1, 2)}
	}
	return e
}

func (e *emission) width() int64 {
	if e.wide {
		return 16
	}
	return 8
}

func (e *emission) begin(p part) error {
	e.part, e.started = p, false
	e.rows.position = p.end - 1
	e.rows.bound = p.tokens - e.rows.extra
	e.rows.row = p.highRow
	e.rows.target = p.highRow * e.rows.sequence
	if e.documents != nil {
		if err := e.documents.begin(headerBytes + 4*p.end); err != nil {
			return err
		}
	}
	if e.samples != nil && !p.empty() {
		return e.samples.begin(headerBytes + e.width()*(p.highRow+p.surplus+1))
	}
	return nil
}

// batch is how many documents pass through both indexes at a time, so that they stay in the cache.
const batch = 4096

// block processes the documents part.first+first, …
func (e *emission) block(first int, pairs []uint64) error {
	if err := context.Cause(e.out.ctx); err != nil {
		return err
	}
	for len(pairs) > 0 {
		n := max(0, len(pairs)-batch)
		if e.documents != nil {
			if err := e.ids(e.part.first+int64(first+n), pairs[n:]); err != nil {
				return err
			}
		}
		if e.samples != nil {
			if err := e.sampleRows(pairs[n:]); err != nil {
				return err
			}
		}
		pairs = pairs[:n]
	}
	return nil
}

func (e *emission) ids(first int64, pairs []uint64) error {
	f := e.documents
	for len(pairs) > 0 {
		low := f.low(4)
		if end := first + int64(len(pairs)); end <= low {
			if err := f.next(); err != nil {
				return err
			}
			continue
		}
		cut := max(0, low-first)
		narrow(uint32s(f.at(first+cut, 4)), pairs[cut:])
		pairs = pairs[:cut]
	}
	return nil
}

func (e *emission) sampleRows(pairs []uint64) error {
	if !e.started {
		e.started = true
		if err := e.surplus(int64(pairs[len(pairs)-1] >> 32)); err != nil {
			return err
		}
	}
	f, r := e.samples, &e.rows
	lowest := max(1, e.part.lowRow)
	for len(pairs) > 0 && r.row >= lowest {
		low := max(lowest, f.low(e.width()))
		if r.row < low {
			if err := f.next(); err != nil {
				return err
			}
			continue
		}
		var left int
		if room := f.at(low, e.width()); e.wide {
			left = r.fill64(int64Pairs(room), low, pairs)
		} else {
			left = r.fill32(uint64s(room), low, pairs)
		}
		pairs = pairs[:left]
	}
	return nil
}

// surplus writes the rows without a token: the end of the part's last document, which has the given
// length. If the length is 0 and there is an extra token, the offset is -1, as in Megatron-LM.
func (e *emission) surplus(length int64) error {
	f, p := e.samples, e.part
	if p.surplus == 0 {
		return nil
	}
	offset := length - e.rows.extra
	if offset < 0 && e.checked {
		return errors.New("the last partial sample of the valid split would end one token before its last document, " +
			"which is empty (Megatron-LM core 0.10 and later fail an assertion); choose another seed, or drop the " +
			"partial sample")
	}
	for row := p.highRow + p.surplus; row > p.highRow; row-- {
		if row < f.low(e.width()) {
			if err := f.next(); err != nil {
				return err
			}
		}
		e.put(row, p.end-1, offset)
	}
	return nil
}

func (e *emission) put(row, position, offset int64) {
	at := e.samples.at(row, e.width())
	if e.wide {
		binary.LittleEndian.PutUint64(at, uint64(position))
		binary.LittleEndian.PutUint64(at[8:], uint64(offset))
	} else {
		binary.LittleEndian.PutUint32(at, uint32(position))
		binary.LittleEndian.PutUint32(at[4:], uint32(offset))
	}
}

// end finishes the part after its last document.
func (e *emission) end() {
	if e.documents != nil {
		e.documents.end()
	}
	if e.samples == nil || e.part.empty() {
		return
	}
	if e.part.lowRow == 0 {
		e.put(0, 0, 0) // in the current chunk, since row 1 is in the first chunk too
	}
	e.samples.end()
}

// The memory of files as numbers. It is aligned to their size, and the machine is little-endian.

func uint32s(b []byte) []uint32 {
	return unsafe.Slice((*uint32)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/4)
}
func uint64s(b []byte) []uint64 {
	return unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/8)
}
func int64Pairs(b []byte) [][2]int64 {
	return unsafe.Slice((*[2]int64)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/16)
}
