package batches

import (
	"io"
	"os"
	"sync"

	"mula/internal/freelist"
	"mula/internal/mapping"
	"mula/tokenize"
)

// Texts and ids of a chunk of this size stay in the processor's cache.
const (
	chunkBytes = 64 << 10
	chunkTexts = 8 << 10
)

// keptBytes limits a buffer that is kept for reuse.
const keptBytes = 4 << 20

// A chunk is consecutive texts of a part that a worker encodes together.
type chunk struct {
	batch  *batch
	part   *part
	number int     // in the batch, from 0
	first  int64   // index in the batch of the first text
	texts  []byte  // in the slot
	ends   []int64 // of the texts, in bytes of the part; after encode, of their ids
	from   int64   // start of the texts, in bytes of the part
	start  int64   // number of ids before the chunk

	ids    []uint32
	buffer *[]uint32 // of ids, from unused
	err    error
	bad    int64 // index in the batch of the text that err is about, or -1
}

// unused has buffers of ids. A chunk has one only while it is encoded and written, so that few
// buffers are in use and stay in the cache.
var unused freelist.List[[]uint32]

// A part is the texts of one slot.
type part struct {
	end  int64 // index in the batch of the text after the last
	left int   // chunks that are not in the result file
}

// A batch assigns places in the result file to chunks, in their order.
type batch struct {
	answers io.Writer
	result  *os.File
	total   int64 // texts
	chunks  int   // chunks of the parts that have arrived

	mu    sync.Mutex
	texts int64          // texts of the parts that have arrived
	next  int            // number of the next chunk with a place
	ahead map[int]*chunk // encoded before chunks with lower numbers
	ids   int64          // ids of all chunks with a place
	parts []*part        // without an answer
	err   error          // of the text with the lowest index
	bad   int64          // index of this text
}

func newBatch(answers io.Writer, result *os.File, total int64) *batch {
	return &batch{answers: answers, result: result, total: total, ahead: make(map[int]*chunk)}
}

// idle reports whether all parts have an answer.
func (b *batch) idle() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.parts) == 0
}

// idsAt returns the position of the ids in the result file.
func (b *batch) idsAt() int64 { return (8*(b.total+1) + 63) / 64 * 64 }

// divide returns the chunks of a part with these texts. The chunks keep and change offsets.
func (b *batch) divide(texts []byte, offsets []int64) []*chunk {
	p := &part{}
	var out []*chunk
	for i := 0; i < len(offsets)-1; {
		from := i
		for i++; i < len(offsets)-1 && i-from < chunkTexts && offsets[i+1]-offsets[from] <= chunkBytes; i++ {
		}
		out = append(out, &chunk{batch: b, part: p, number: b.chunks, first: b.texts + int64(from),
			texts: texts[offsets[from]:offsets[i]], ends: offsets[from+1 : i+1], from: offsets[from]})
		b.chunks++
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.texts += int64(len(offsets) - 1)
	p.end, p.left = b.texts, len(out)
	b.parts = append(b.parts, p)
	return out
}

// encode encodes the texts. It stops at the first text that fails.
func (c *chunk) encode(e *tokenize.Encoder) {
	if c.batch.failedBefore(c.first) {
		return
	}
	c.buffer = unused.Get()
	c.ids = (*c.buffer)[:0]
	c.err = mapping.Guard(func() (err error) {
		from := int64(0)
		for i, end := range c.ends {
			c.bad = c.first + int64(i)
			if c.ids, err = e.Append(c.ids, c.texts[from:end-c.from]); err != nil {
				return err
			}
			from, c.ends[i] = end-c.from, int64(len(c.ids))
		}
		return nil
	})
}

// failedBefore reports whether a text before this one has failed.
func (b *batch) failedBefore(text int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.err != nil && b.bad < text
}

// finish writes the chunks whose place is known after c was encoded, and sends the answers of
// complete parts.
func (b *batch) finish(c *chunk) error {
	var ready []*chunk
	b.mu.Lock()
	if b.ahead[c.number] = c; c.err != nil {
		b.fail(c.err, c.bad)
	}
	for c := b.ahead[b.next]; c != nil; c = b.ahead[b.next] {
		delete(b.ahead, b.next)
		c.start = b.ids
		b.ids += int64(len(c.ids))
		b.next++
		ready = append(ready, c)
	}
	failed := b.err != nil
	b.mu.Unlock()
	for _, c := range ready {
		if !failed {
			c.err = c.write()
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range ready {
		if c.part.left--; c.err != nil {
			b.fail(c.err, c.bad)
		}
		if c.buffer != nil && 4*cap(c.ids) <= keptBytes {
			*c.buffer = c.ids
			unused.Put(c.buffer)
		}
	}
	for len(b.parts) > 0 && b.parts[0].left == 0 {
		end := b.parts[0].end
		if b.parts = b.parts[1:]; len(b.parts) == 0 && (b.texts == b.total || b.err != nil) {
			b.result.Close() // the memory of a result that the client drops is then free
		}
		var err error
		if b.err != nil && b.bad < end {
			err = answer(b.answers, 1, b.bad, []byte(b.err.Error()))
		} else {
			err = answer(b.answers, 0, b.ids, nil)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// fail keeps the error of the text with the lowest index.
func (b *batch) fail(err error, bad int64) {
	if b.err == nil || bad < b.bad {
		b.err, b.bad = err, bad
	}
}

// write writes the offsets and the ids of the chunk to its place in the result file.
func (c *chunk) write() error {
	c.bad = -1
	for i := range c.ends {
		c.ends[i] += c.start
	}
	ends, at := c.ends, 8*(c.first+1)
	if c.first == 0 {
		ends, at = append([]int64{0}, ends...), 0
	}
	if _, err := c.batch.result.WriteAt(bytesOf(ends), at); err != nil {
		return err
	}
	_, err := c.batch.result.WriteAt(bytesOf(c.ids), c.batch.idsAt()+4*c.start)
	return err
}
