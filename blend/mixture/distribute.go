package mixture

import "math/bits"

// A Distributor distributes ranges of positions among the sources of trees. It reuses its memory.
type Distributor struct {
	tree *Tree
	each func(source int, k int64, indices []uint16)
	// Indices in the range, by node of the tree. The positions of a node are a range of one of the
	// two lists; the positions of its children are the same range of the other.
	lists [2][]uint16
}

// Distribute distributes positions y to y+n-1 of a tree; n is at most 2^16. It calls each for every
// source of these positions: with the number k of the source's positions before y, as [Tree.At]
// counts them, and with the indices, from 0, of its positions in the range. It costs a fraction of
// n calls of At.
func (d *Distributor) Distribute(t *Tree, y int64, n int, each func(source int, k int64, indices []uint16)) {
	d.tree, d.each = t, each
	for i := range d.lists {
		if cap(d.lists[i]) < n {
			d.lists[i] = make([]uint16, n)
		}
		d.lists[i] = d.lists[i][:n]
	}
	for i := range d.lists[0] {
		d.lists[0][i] = uint16(i)
	}
	d.descend(t.root, uint64(y), 0, n, 0)
}

// descend distributes the indices [from, to) of lists[side] below a node. They are the node's
// positions y, y+1, ….
func (d *Distributor) descend(id int32, y uint64, from, to, side int) {
	if from == to {
		return
	}
	in, out := d.lists[side][from:to], d.lists[1-side]
	if id < 0 {
		d.each(int(^id), int64(y), in)
		return
	}
	// The remainder of y·a/s decides between left and right. Each position adds a to it.
	e := &d.tree.nodes[id]
	hi, lo := bits.Mul64(y, e.left)
	q, rest := bits.Div64(hi, lo, e.sum)
	hi, lo = bits.Mul64(y+uint64(to-from), e.left)
	end, _ := bits.Div64(hi, lo, e.sum)
	middle := from + int(end-q)
	left, right := out[from:middle], out[middle:to]
	// There is no branch on the direction of a position: each is written to both sides, and one of
	// the two is overwritten.
	need, nl, nr := e.sum-e.left, 0, 0
	for _, index := range in {
		less, borrow := bits.Sub64(rest, need, 0) // borrow is 1 for positions that go right
		rest = less + e.sum&-borrow
		if nl < len(left) {
			left[nl] = index
		}
		if nr < len(right) {
			right[nr] = index
		}
		nl += int(1 - borrow)
		nr += int(borrow)
	}
	d.descend(e.leftNode, q, from, middle, 1-side)
	d.descend(e.rightNode, y-q, middle, to, 1-side)
}
