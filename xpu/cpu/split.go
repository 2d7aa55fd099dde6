package cpu

import "mula/xpu"

// parts is the number of pieces that loops over tokens are cut into, and of partial sums over
// tokens. It does not follow the number of workers, or the sums would.
const parts = 64

// A task is a command under way: its operands, the loop over things that it is at, and scratch
// memory. It is kept for reuse, and the bodies of loops are functions that capture nothing, because
// a closure made for each loop would be an allocation, and a training step has hundreds of loops.
type task struct {
	host *Host
	operands
	n, pieces int
	body      func(t *task, part, lo, hi int)
	run       func(piece int)

	partial []float32 // partial sums, those of a part after those of another
	sums    []float64 // the same
	starts  []int32
	blocks  []block
	scores  scoreStack
}

// operands are what the loops of a command work on; each command sets those that it uses.
type operands struct {
	dst, x, y, z, w []float32
	ids             []int32
	width, perToken int
	skip            int32
	factor          float64
	known           bool // of a norm
	uniform         bool // of a router
	results         []float64
	checksums       []uint64
	change          []float64
	norm            xpu.Norm
	projections     xpu.Projections
	attention       xpu.Attention
	routing         xpu.Routing
	crossEntropy    xpu.CrossEntropy
	rule            updateConstants
	keep            float32
	stretches       [][]float32
	moments         []xpu.Moments
}

// begin takes a task for a command.
func (h *Host) begin(o operands) *task {
	t := h.tasks.Get()
	if t.host == nil {
		t.host, t.run = h, t.runPiece
	}
	t.operands = o
	return t
}

// end gives the task back.
func (t *task) end() {
	t.operands, t.body = operands{}, nil // let go of the caller's memory
	t.host.tasks.Put(t)
}

// split calls body for the pieces [lo, hi) of n things, at once on the workers. part numbers the
// pieces from 0; there are min(n, parts) of them, whatever the number of workers.
func (t *task) split(n int, body func(t *task, part, lo, hi int)) {
	t.cut(n, min(n, parts), body)
}

func (t *task) cut(n, pieces int, body func(t *task, part, lo, hi int)) {
	t.n, t.pieces, t.body = n, pieces, body
	t.host.pool.run(pieces, t.run)
}

func (t *task) runPiece(i int) { t.body(t, i, t.n*i/t.pieces, t.n*(i+1)/t.pieces) }

// split is a command of one loop.
func (h *Host) split(n int, o operands, body func(t *task, part, lo, hi int)) {
	t := h.begin(o)
	t.split(n, body)
	t.end()
}

// room makes *memory n elements long, and returns it. Its contents are undefined.
func room[E any](memory *[]E, n int) []E {
	if n > cap(*memory) {
		*memory = nil // so that the collector may take it before the new one is made
		*memory = make([]E, n)
	}
	*memory = (*memory)[:n]
	return *memory
}

// addPartials adds to dst the columns [first, first+len(dst)) of the partial sums that a split over
// n things left in rows of the given width.
func (t *task) addPartials(dst []float32, width, first, n int) {
	for part := range min(n, parts) {
		Axpy(dst, 1, t.partial[part*width+first:][:len(dst)])
	}
}
