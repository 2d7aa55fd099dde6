package documents

import "io"

// The memory in which [ahead] reads ahead. The decoders give 32 to 128 KiB at a time.
const (
	aheadBlocks = 8
	aheadBytes  = 128 << 10
)

// ahead decompresses a file in a goroutine of its own while the lines before are looked at, which takes about as long. One serves one file
// after the other.
type ahead struct {
	report func(bytes int64) // see counted
	full   chan aheadBlock   // what was read, in order, the error last; nil when nothing is being read. Closed when the goroutine has ended
	free   chan []byte       // memory to read into; nil until it is needed
	quit   chan struct{}

	block []byte // the memory that rest lies in
	rest  []byte // not yet handed on
	err   error
}

type aheadBlock struct {
	memory []byte
	n      int   // bytes of it that were read
	input  int64 // bytes of the input that this took
	err    error // after them
}

func newAhead() *ahead {
	a := &ahead{free: make(chan []byte, aheadBlocks)}
	for range aheadBlocks {
		a.free <- nil
	}
	return a
}

// start begins to read from decoder, which reads from input. Until stop nobody else may use them. From then on input is reported as Read
// hands on what came of it, so that the goroutine that iterates reports it.
func (a *ahead) start(decoder io.Reader, input *counted) {
	a.report, a.err = input.report, nil
	var read int64
	input.report = func(n int64) { read += n }
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
				n, err := decoder.Read(memory)
				full <- aheadBlock{memory, n, read, err} // has room for as many as there are
				if read = 0; err != nil {
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
		if a.report != nil && b.input > 0 {
			a.report(b.input)
		}
	}
	n := copy(p, a.rest)
	a.rest = a.rest[n:]
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
	a.full = nil
}
