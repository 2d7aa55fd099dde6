package moe

// parts is the maximum number of chunks of a loop over tokens.
const parts = 64

// A loop is the current loop of a dispatch over tokens, on the host. The model keeps it with its
// operands, and loop bodies are functions that capture nothing, because a closure for each loop
// would be an allocation.
type loop struct {
	operands
	n, pieces int
	body      func(m *Model, o *operands, part, lo, hi int)
	run       func(piece int)
}

// operands are the operands of a loop body; each loop sets the fields that it uses.
type operands struct {
	dst, x, y []float32
	ways      *ways
	width     int
}

// split calls body for the chunks [lo, hi) of n items, in parallel on the device's workers. part is
// the chunk's index; there are min(n, parts) chunks, for every number of workers. Loops do not
// nest.
func (m *Model) split(n int, o operands, body func(m *Model, o *operands, part, lo, hi int)) {
	m.loop.operands, m.loop.n, m.loop.pieces, m.loop.body = o, n, min(n, parts), body
	m.dev.Parallel(m.loop.pieces, m.loop.run)
	m.loop.operands, m.loop.body = operands{}, nil // release the caller's memory
}

func (m *Model) runPiece(i int) {
	l := &m.loop
	l.body(m, &l.operands, i, l.n*i/l.pieces, l.n*(i+1)/l.pieces)
}
