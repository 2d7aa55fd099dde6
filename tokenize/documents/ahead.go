package documents

import (
	"hash"
	"io"
)

// The memory in which [ahead] reads ahead. The decoders give 32 to 128 KiB at a time.
const (
	aheadBlocks = 8
	aheadBytes  = 128 << 10
)

// ahead reads in a goroutine of its own while what came before is looked at. A file goes through
// one that reads and hashes it, and if it is compressed through a second one that decompresses it.
// One serves one file after the other.
type ahead struct {
	onRead func(input int64) // told, as Read hands on something, how many bytes of the file that took
	// what was read, in order, the error last; nil when nothing is being read. Closed when the
	// goroutine has ended
	full chan aheadBlock
	free chan []byte // memory to read into; nil until it is needed
	quit chan struct{}

	handed int64  // bytes that Read has handed on
	block  []byte // the memory that rest lies in
	rest   []byte // not yet handed on
	err    error
}

type aheadBlock struct {
	memory []byte
	n      int   // bytes of it that were read
	input  int64 // bytes of the file that this took
	err    error // after them
}

func newAhead() *ahead {
	a := &ahead{free: make(chan []byte, aheadBlocks)}
	for range aheadBlocks {
		a.free <- nil
	}
	return a
}

// startFile begins to read a file as it is. What lies in its first limit bytes is hashed; limit -1
// is all of it.
func (a *ahead) startFile(file io.Reader, sum hash.Hash, limit int64) {
	a.start(file, func(p []byte) int64 {
		n := int64(len(p))
		switch {
		case limit < 0:
			sum.Write(p)
		case limit > 0:
			sum.Write(p[:min(n, limit)])
			limit -= min(n, limit)
		}
		return n
	})
}

// startDecoder begins to read from decoder, which reads from file. Until stop nobody else may use
// them.
func (a *ahead) startDecoder(decoder io.Reader, file *ahead) {
	a.onRead = file.onRead
	var read int64
	file.onRead = func(n int64) { read += n }
	a.start(decoder, func([]byte) int64 {
		n := read
		read = 0
		return n
	})
}

// start begins to read from r. The goroutine tells seen what it has read, which gives how many
// bytes of the file that took.
func (a *ahead) start(r io.Reader, seen func(p []byte) int64) {
	a.err, a.handed = nil, 0
	full, quit := make(chan aheadBlock, aheadBlocks), make(chan struct{})
	a.full, a.quit = full, quit
	go func() {
		defer close(full)
		for {
			select {
			case memory := <-a.free:
				if memory == nil {
					memory = make([]byte, aheadBytes)
				}
				n, err := r.Read(memory)
				full <- aheadBlock{memory, n, seen(memory[:n]), err} // has room for as many as there are
				if err != nil {
					return
				}
			case <-quit:
				return
			}
		}
	}()
}

func (a *ahead) Read(p []byte) (int, error) {
	for len(a.rest) == 0 {
		if a.err != nil {
			return 0, a.err
		}
		a.giveBack()
		b := <-a.full
		a.block, a.rest, a.err = b.memory, b.memory[:b.n], b.err
		if b.input > 0 {
			a.onRead(b.input)
		}
	}
	n := copy(p, a.rest)
	a.rest = a.rest[n:]
	a.handed += int64(n)
	return n, nil
}

func (a *ahead) giveBack() {
	if a.block != nil {
		a.free <- a.block
		a.block, a.rest = nil, nil
	}
}

// stop ends what start has begun, once the Read of the input that may be under way returns.
func (a *ahead) stop() {
	if a.full == nil {
		return
	}
	close(a.quit)
	a.giveBack()
	for b := range a.full {
		a.free <- b.memory
	}
	a.full, a.rest, a.onRead = nil, nil, nil
}
