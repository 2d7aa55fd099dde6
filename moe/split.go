package moe

// parts is the number of pieces that loops over tokens are cut into.
const parts = 64

// A loop is the loop of a dispatch over tokens that is under way, on the host. It is kept in the
// model with its operands, and its bodies are functions that capture nothing, because a closure
// made for each loop would be an allocation.
type loop struct {
	operands
	n, pieces int
	body      func(m *Model, o *operands, part, lo, hi int)
	run       func(piece int)
}

// operands are what the body of a loop works on; each loop sets those that it uses.
type operands struct {
	dst, x, y []float32
	ways      *ways
	width     int
}

// split calls body for the pieces [lo, hi) of n things, at once on the workers of the device. part
// numbers the pieces from 0; there are min(n, parts) of them, whatever the number of workers. Loops
// do not nest.
func (m *Model) split(n int, o operands, body func(m *Model, o *operands, part, lo, hi int)) {
	m.loop.operands, m.loop.n, m.loop.pieces, m.loop.body = o, n, min(n, parts), body
	m.dev.Parallel(m.loop.pieces, m.loop.run)
	m.loop.operands, m.loop.body = operands{}, nil // let go of the caller's memory
}

func (m *Model) runPiece(i int) {
	l := &m.loop
	l.body(m, &l.operands, i, l.n*i/l.pieces, l.n*(i+1)/l.pieces)
}
