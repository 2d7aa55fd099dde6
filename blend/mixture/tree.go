// Package mixture distributes positions among sources in proportion to integer weights.
package mixture

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"
)

// A Tree distributes positions among sources in proportion to integer weights. After any number of
// positions, the count of each source deviates from its share by at most [Tree.Bound]. A Tree maps
// a position to a source and back with integer arithmetic, without a table of positions.
//
// It is a Huffman tree over the weights. Of the first y positions that reach a node of weight s
// whose left child has weight a, floor(y·a/s) go left and the others right. Position y therefore
// goes left if floor((y+1)·a/s) is more than floor(y·a/s). It is then number floor(y·a/s) of the
// left child, else number y − floor(y·a/s) of the right child. A leaf is a source. A Tree is
// immutable.
//
// The tree is part of order version 1. Among nodes of equal weight, leaves come first, in the order
// of their sources, then inner nodes, in the order of their creation. Of two nodes that are joined,
// the node that was removed first is the right child.
type Tree struct {
	nodes   []node
	steps   []step // for At, by node
	root    int32
	parents []int32 // by source: the node above it; none if the weight is 0 or the source is the only one
	sources []uint64
}

// A node's children are nodes, or sources encoded as ^source.
type node struct {
	left, sum           uint64 // weights: of the left child, of the node, in lowest terms
	leftNode, rightNode int32
	parent              int32
}

// A step is the precomputed form of a node for At. It multiplies where the definition divides: with
// m = ceil(2^64·a/s), the product y·m exceeds 2^64·y·a/s by at most y. Its upper half is therefore
// floor(y·a/s) if the lower half is at least y, or if y·s ≤ 2^64: then a fraction, which is at most
// 1 − 1/s, cannot be lifted to 1 (Granlund and Montgomery, "Division by invariant integers using
// multiplication", PLDI 1994).
type step struct {
	factor      uint64 // m
	exact       uint64 // for y below it, the quotients of y and y+1 are always right
	left, right int32
}

func newStep(n *node) step {
	m, rest := bits.Div64(n.left, 0, n.sum)
	if rest > 0 {
		m++
	}
	return step{m, math.MaxUint64 / n.sum, n.leftNode, n.rightNode}
}

const none = -1

// MaxSum is the maximum sum of the weights of a tree. A product with a position then fits 128 bits,
// and a sum of two weights 64.
const MaxSum = 1 << 62

// NewTree builds the tree of sources with these weights. Sources with weight 0 get no position. The
// sum may be at most 2^62.
func NewTree(weights []uint64) (*Tree, error) {
	type item struct {
		weight uint64
		id     int32
	}
	t := &Tree{parents: make([]int32, len(weights)), sources: slices.Clone(weights)}
	var leaves, inner []item // both stay sorted by weight, because weights of joined nodes only grow
	var sum uint64
	for i, w := range weights {
		t.parents[i] = none
		if w == 0 {
			continue
		}
		if w > MaxSum || sum+w > MaxSum {
			return nil, fmt.Errorf("the weights add up to more than 2^62; use smaller weights")
		}
		sum += w
		leaves = append(leaves, item{w, ^int32(i)})
	}
	if len(leaves) == 0 {
		return nil, errors.New("no source has a weight")
	}
	slices.SortStableFunc(leaves, func(a, b item) int {
		if a.weight < b.weight {
			return -1
		}
		if a.weight > b.weight {
			return 1
		}
		return 0
	})
	take := func() (x item) {
		if len(inner) == 0 || len(leaves) > 0 && leaves[0].weight <= inner[0].weight {
			x, leaves = leaves[0], leaves[1:]
		} else {
			x, inner = inner[0], inner[1:]
		}
		return x
	}
	t.nodes = make([]node, 0, len(leaves)-1)
	for len(leaves)+len(inner) > 1 {
		right, left := take(), take()
		id := int32(len(t.nodes))
		weight := left.weight + right.weight
		common := gcd(left.weight, weight)
		t.nodes = append(t.nodes, node{left.weight / common, weight / common, left.id, right.id, none})
		for _, child := range []int32{left.id, right.id} {
			if child < 0 {
				t.parents[^child] = id
			} else {
				t.nodes[child].parent = id
			}
		}
		inner = append(inner, item{weight, id})
	}
	t.steps = make([]step, len(t.nodes))
	for i := range t.nodes {
		t.steps[i] = newStep(&t.nodes[i])
	}
	t.root = take().id
	return t, nil
}

// At returns the source of position y, and the number of earlier positions with the same source. y
// must be below 2^63.
func (t *Tree) At(y int64) (source int, k int64) {
	n, v := t.root, uint64(y)
	for n >= 0 {
		e := &t.steps[n]
		q, low := bits.Mul64(v, e.factor)
		next, left := bits.Add64(low, e.factor, 0) // floor((v+1)·a/s) is q+1 if the product with v+1 carries
		if v >= e.exact && (low < v || next <= v) {
			q, left = t.nodes[n].divide(v)
		}
		// The direction cannot be predicted, so there is no branch on it.
		n = e.right ^ (e.right^e.left)&-int32(left)
		v = q&-left | (v-q)&(left-1)
	}
	return int(^n), int64(v)
}

// divide returns floor(v·a/s), and 1 if floor((v+1)·a/s) is more, else 0.
func (e *node) divide(v uint64) (q, left uint64) {
	hi, lo := bits.Mul64(v, e.left)
	q, rest := bits.Div64(hi, lo, e.sum) // hi < sum because v < 2^64
	if rest+e.left >= e.sum {
		left = 1
	}
	return q, left
}

// Inverse is the inverse of At: it returns the position of a source's sample number k. ok is false
// if the source has weight 0, or if that position is beyond 2^62.
func (t *Tree) Inverse(source int, k int64) (y int64, ok bool) {
	if t.sources[source] == 0 || k < 0 || k >= MaxSum {
		return 0, false
	}
	v := uint64(k)
	for child, n := ^int32(source), t.parents[source]; n != none; child, n = n, t.nodes[n].parent {
		e := &t.nodes[n]
		var hi, lo, by uint64
		if child == e.leftNode { // the first y with floor((y+1)·a/s) = v+1: ceil((v+1)·s/a) − 1
			by = e.left
			hi, lo = bits.Mul64(v+1, e.sum)
			var borrow uint64
			lo, borrow = bits.Sub64(lo, 1, 0) // ceil(x/a) − 1 = floor((x−1)/a)
			hi -= borrow
		} else { // the first y with y+1 − floor((y+1)·a/s) = v+1: floor(v·s/b), b = s − a
			by = e.sum - e.left
			hi, lo = bits.Mul64(v, e.sum)
		}
		if hi >= by {
			return 0, false
		}
		if v, _ = bits.Div64(hi, lo, by); v >= MaxSum {
			return 0, false
		}
	}
	return int64(v), true
}

// Counts returns the number of the first n positions that each source has. It takes time
// proportional to the number of sources. n must be below 2^63.
func (t *Tree) Counts(n int64) []int64 {
	counts := make([]int64, len(t.sources))
	if t.root < 0 {
		counts[^t.root] = n
		return counts
	}
	at := make([]uint64, len(t.nodes))
	at[t.root] = uint64(n)
	set := func(child int32, c uint64) {
		if child < 0 {
			counts[^child] = int64(c)
		} else {
			at[child] = c
		}
	}
	for i := len(t.nodes) - 1; i >= 0; i-- { // a node is made after its children
		e := &t.nodes[i]
		hi, lo := bits.Mul64(at[i], e.left)
		left, _ := bits.Div64(hi, lo, e.sum)
		set(e.leftNode, left)
		set(e.rightNode, at[i]-left)
	}
	return counts
}

// Bound returns an upper bound of this tree's deviation: after any number n of positions, the count
// of a source differs from n·weight/sum by at most Bound. It is below 3.36 for every tree.
//
// A node passes its own deviation to its children in proportion, and adds less than one by
// rounding: downwards to the left, upwards to the right. In a Huffman tree, a child with a large
// part of its parent's weight is below a node with a small part of its own, so the sum stays small.
func (t *Tree) Bound() float64 {
	if t.root < 0 {
		return 0
	}
	type interval struct{ low, high float64 } // of the deviation of a node: low ≤ 0 ≤ high
	at := make([]interval, len(t.nodes))
	bound := 0.0
	for i := len(t.nodes) - 1; i >= 0; i-- {
		e := &t.nodes[i]
		p := float64(e.left) / float64(e.sum)
		// floor(y·a/s) cuts off a multiple of 1/s below 1.
		most := 1 - 1/float64(e.sum)
		left := interval{float64(at[i].low*p) - most, at[i].high * p}
		right := interval{at[i].low * (1 - p), float64(at[i].high*(1-p)) + most}
		for _, c := range []struct {
			id int32
			interval
		}{{e.leftNode, left}, {e.rightNode, right}} {
			if c.id < 0 {
				bound = max(bound, -c.low, c.high)
			} else {
				at[c.id] = c.interval
			}
		}
	}
	return bound * (1 + 1e-12) // allows for the rounding errors of at most 100 levels
}

func gcd(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
