package gpt

import "io"

// descending is a file that is filled from its end to its beginning, chunk by chunk. It may be
// filled in two parts, the lower part first. The chunk that both parts share stays in memory
// between them.
type descending struct {
	out    *output
	file   io.WriterAt
	header [headerBytes]byte
	size   int64

	top   int64  // the current part ends here; the second part ends at the end of the file
	base  int64  // offset of the current chunk, a multiple of the chunk size
	chunk []byte // its memory

	held     []byte
	heldBase int64
}

// begin starts the part whose last byte is at top-1.
func (f *descending) begin(top int64) error {
	f.top = top
	return f.open((top - 1) / int64(f.out.memory.size) * int64(f.out.memory.size))
}

func (f *descending) open(base int64) error {
	f.base = base
	if f.held != nil && f.heldBase == base {
		f.chunk, f.held = f.held, nil
		return nil
	}
	chunk, err := f.out.take()
	if err != nil {
		return err
	}
	f.chunk = chunk
	if base == 0 {
		copy(chunk, f.header[:])
	}
	return nil
}

// next moves to the chunk below. The current chunk has been filled down to its base.
func (f *descending) next() error {
	f.end()
	return f.open(f.base - int64(f.out.memory.size))
}

// end finishes the current chunk, which has been filled down to its base or to the start of the
// part.
func (f *descending) end() {
	end := min(f.base+int64(f.out.memory.size), f.size)
	if end > f.top {
		f.held, f.heldBase = f.chunk, f.base
	} else {
		f.out.write(job{f.file, f.base, f.chunk[:end-f.base], f.chunk})
	}
	f.chunk = nil
}

// low is the first element, of the given size, that starts in the current chunk or above.
func (f *descending) low(size int64) int64 {
	// every chunk but the first starts with a whole element
	return max(0, f.base-headerBytes) / size
}

// at returns the memory of the current chunk from element i on.
func (f *descending) at(i, size int64) []byte {
	return f.chunk[headerBytes+i*size-f.base:]
}
