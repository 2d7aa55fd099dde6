package cpu

import "mula/xpu"

// parts is the maximum number of chunks of a loop over tokens, and of partial sums over tokens. It
// does not depend on the number of workers, because the bits of sums depend on it.
const parts = 64

// A task is a running command: its operands, its current loop, and scratch memory. Tasks are
// reused, and the bodies of loops are functions that capture nothing: a closure for each loop would
// be an allocation, and a training step has hundreds of loops.
type task struct {
	host *Host
	operands
	n, pieces int
	body      func(t *task, part, lo, hi int)
	run       func(piece int)

	partial []float32 // partial sums, one part after the other
	total   []float32 // their sum
	order   []int32   // of EmbedGrad
	widened [2][]float32
	sums    []float64 // partial sums in float64
	starts  []int32
	blocks  []block
	scores  scoreStack
	ranges  []moments // operands of commands over stretches
}

// operands are the operands of a command's loops; each command sets the fields that it uses.
type operands struct {
	dst, x, y, z, w []float32
	dstHalves       []uint16 // a result, and an operand, of BFloat16
	halves          []uint16
	ids             []int32
	width, perToken int
	skip            int32
	factor          float64
	factors         [3]float32 // of Combine
	known           bool       // of Normalize
	uniform         bool       // of Route
	clamp           xpu.Clamp  // of ClampedSwiGLU
	parts           int        // of Attend: parts of a group of heads
	results         []float64
	checksums       []uint64
	change          []float64
	norm            norm
	projections     projections
	latent          latent
	columns         columns // of CopyColumns
	jitter          xpu.Jitter
	attention       attention
	routing         routing
	crossEntropy    crossEntropy
	update          xpu.Update
}

// begin returns a task for a command.
func (h *Host) begin(o operands) *task {
	t := h.tasks.Get()
	if t.host == nil {
		t.host, t.run = h, t.runPiece
	}
	t.operands = o
	return t
}

// end releases the task.
func (t *task) end() {
	t.operands, t.body = operands{}, nil // release the caller's memory
	clear(t.ranges)
	t.ranges = t.ranges[:0]
	t.host.tasks.Put(t)
}

// weights returns the numbers of the i-th operand that may be of BFloat16.
func (t *task) weights(i int, x xpu.Tensor) []float32 {
	if x.DType() != xpu.BFloat16 {
		return x.Floats()
	}
	halves := x.Halves()
	Widen(room(&t.widened[i], len(halves)), halves)
	return t.widened[i]
}

// numbers returns the elements of an operand that may be of BFloat16, as one of its types.
func numbers(x xpu.Tensor) (floats []float32, halves []uint16) {
	if x.DType() == xpu.BFloat16 {
		return nil, x.Halves()
	}
	return x.Floats(), nil
}

// row returns row i of an operand of [numbers]. If it is of BFloat16, it is converted into *buffer.
func row(floats []float32, halves []uint16, i, width int, buffer *[]float32) []float32 {
	if halves == nil {
		return floats[i*width:][:width]
	}
	Widen(room(buffer, width), halves[i*width:][:width])
	return *buffer
}

// split calls body for the chunks [lo, hi) of n items, in parallel on the workers. part is the
// chunk's index; there are min(n, parts) chunks, for every number of workers.
func (t *task) split(n int, body func(t *task, part, lo, hi int)) {
	t.cut(n, min(n, parts), body)
}

func (t *task) cut(n, pieces int, body func(t *task, part, lo, hi int)) {
	t.n, t.pieces, t.body = n, pieces, body
	t.host.pool.run(pieces, t.run)
}

func (t *task) runPiece(i int) { t.body(t, i, t.n*i/t.pieces, t.n*(i+1)/t.pieces) }

// split runs a command that is one loop.
func (h *Host) split(n int, o operands, body func(t *task, part, lo, hi int)) {
	t := h.begin(o)
	t.split(n, body)
	t.end()
}

// room sets the length of *memory to n and returns it. Its contents are undefined.
func room[E any](memory *[]E, n int) []E {
	if n > cap(*memory) {
		*memory = nil // so that it can be collected before the new allocation
		*memory = make([]E, n)
	}
	*memory = (*memory)[:n]
	return *memory
}

// addPartials adds to the vector dst the columns from first on of the partial sums of a split over
// n items, whose rows have the given width.
func (t *task) addPartials(dst xpu.Tensor, width, first, n int) {
	var sum []float32
	half := dst.DType() == xpu.BFloat16
	if half {
		sum = room(&t.total, dst.Dim(0))
		clear(sum)
	} else {
		sum = dst.Floats()
	}
	for part := range min(n, parts) {
		Axpy(sum, 1, t.partial[part*width+first:][:len(sum)])
	}
	if half {
		addHalves(dst.Halves(), sum)
	}
}
