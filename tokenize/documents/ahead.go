package documents

import (
	"hash"
	"io"
)

// The memory for reading ahead. The decoders return 32 to 128 KiB at a time.
const (
	aheadBlocks = 8
	aheadBytes  = 128 << 10
)

// ahead reads in its own goroutine while the caller processes earlier data. One ahead reads and
// hashes a file. If the file is compressed, a second one decompresses it. An ahead is reused for
// later files.
type ahead struct {
	onRead func(input int64) // called with the number of file bytes consumed when Read returns data
	// blocks that were read, in order, the error last; nil if nothing is being read. Closed when
	// the goroutine has ended
	full chan aheadBlock
	free chan []byte // memory to read into
	quit chan struct{}
	// between two files, the memory; nil until it is needed
	memory [aheadBlocks][]byte

	handed int64  // bytes that Read has returned
	block  []byte // the memory that contains rest
	rest   []byte // not returned yet
	err    error
}

type aheadBlock struct {
	memory []byte
	n      int   // bytes of it that were read
	input  int64 // bytes of the file that this consumed
	err    error // after them
}

// startFile starts to read a file unchanged. Its first limit bytes are hashed; limit -1 means all.
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

// startDecoder starts to read from decoder, which reads from file. Until stop, they must not be
// used otherwise.
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

// start starts to read from r. The goroutine passes the data to seen, which returns how many bytes
// of the file they consumed.
func (a *ahead) start(r io.Reader, seen func(p []byte) int64) {
	a.err, a.handed = nil, 0
	full, free, quit := make(chan aheadBlock, aheadBlocks), make(chan []byte, aheadBlocks), make(chan struct{})
	for _, memory := range a.memory {
		free <- memory
	}
	a.full, a.free, a.quit = full, free, quit
	go func() {
		defer close(full)
		for {
			select {
			case memory := <-free:
				if memory == nil {
					memory = make([]byte, aheadBytes)
				}
				n, err := r.Read(memory)
				full <- aheadBlock{memory, n, seen(memory[:n]), err} // has capacity for all blocks
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

// stop ends reading. It waits for a Read of the input in progress.
func (a *ahead) stop() {
	if a.full == nil {
		return
	}
	close(a.quit)
	a.giveBack()
	for b := range a.full {
		a.free <- b.memory
	}
	for i := range a.memory {
		a.memory[i] = <-a.free
	}
	a.full, a.free, a.rest, a.onRead = nil, nil, nil, nil
}
