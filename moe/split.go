package moe

// parts is the number of pieces that loops over tokens are cut into, and of partial sums over tokens. It does not follow the number of
// threads, or the sums would.
const parts = 64

// A loop is the loop over things that is under way. It is kept in the model with its operands, and its bodies are functions that capture
// nothing, because a closure made for each loop would be an allocation, and a training step has hundreds of loops.
type loop struct {
	operands
	n, pieces int
	body      func(m *Model, o *operands, part, lo, hi int)
	run       func(piece int)
}

// operands are what the body of a loop works on; each loop sets those that it uses.
type operands struct {
	layer  *layer
	saved  *saved
	keys   kvTarget
	dst, x []float32
	y      []float32
	norm   norm
	opts   BackwardOptions
	first  int
	scale  float64
	ways   *ways
	width  int
	keep   bool
}

// split calls body for the pieces [lo, hi) of n things, at once on the workers of the device. part numbers the pieces from 0; there are
// min(n, parts) of them, whatever the number of workers. Loops do not nest.
func (m *Model) split(n int, o operands, body func(m *Model, o *operands, part, lo, hi int)) {
	m.loop.operands, m.loop.n, m.loop.pieces, m.loop.body = o, n, min(n, parts), body
	m.dev.Parallel(m.loop.pieces, m.loop.run)
	m.loop.operands, m.loop.body = operands{}, nil // let go of the caller's memory
}

func (m *Model) runPiece(i int) {
	l := &m.loop
	l.body(m, &l.operands, i, l.n*i/l.pieces, l.n*(i+1)/l.pieces)
}
