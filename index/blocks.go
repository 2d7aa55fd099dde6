package index

import (
	"fmt"
	"sync/atomic"
)

// A Locality makes an order draw windows that are stored together at about the same time, so that a
// store is read in large pieces. The zero Locality shuffles all windows of an epoch.
//
// The training windows are divided into blocks of Block consecutive windows. Each epoch permutes
// the blocks, divides them into groups of Group consecutive blocks, and permutes the windows of
// each group.
type Locality struct {
	Block int64 `json:"block"` // windows of a block, 1 to 2^24
	Group int64 `json:"group"` // blocks of a group, 1 to 2^24
}

// Check returns an error if a number is out of range.
func (l Locality) Check() error {
	const most = 1 << 24
	for _, v := range []struct {
		name  string
		value int64
	}{{"block", l.Block}, {"group", l.Group}} {
		if v.value < 1 || v.value > most {
			return fmt.Errorf("%s is %d; it must be from 1 to 2^24", v.name, v.value)
		}
	}
	return nil
}

// A blockPermutation is a permutation of [0, n) that keeps blocks of consecutive numbers in a group
// of Group blocks.
type blockPermutation struct {
	epoch    int64
	n        int64
	locality Locality
	key      func(group int64) uint64 // of the permutation of a group
	blocks   Permutation              // place → block

	// The last block has `missing` fewer numbers than the others. It is at place `short`, in group
	// `shortGroup`.
	short, shortGroup, missing int64

	recent [8]atomic.Pointer[groupPermutation] // by group modulo 8
}

type groupPermutation struct {
	group int64
	Permutation
}

// newBlockPermutation returns the permutation of an epoch of n windows in the order "blocks 1".
func newBlockPermutation(seed uint64, source string, epoch, n int64, l Locality) *blockPermutation {
	count := (n + l.Block - 1) / l.Block
	p := &blockPermutation{epoch: epoch, n: n, locality: l, missing: count*l.Block - n, key: func(group int64) uint64 {
		return labelledKey("mula group 1", seed, source, epoch, group)
	}}
	p.blocks.init(uint64(count), labelledKey("mula blocks 1", seed, source, epoch))
	p.short = int64(p.blocks.Inverse(uint64(count - 1)))
	p.shortGroup = p.short / l.Group
	return p
}

// start returns the first index of a group.
func (p *blockPermutation) start(group int64) int64 {
	i := group * p.locality.Block * p.locality.Group
	if group > p.shortGroup {
		i -= p.missing
	}
	return min(i, p.n)
}

// groupAt returns the group of an index.
func (p *blockPermutation) groupAt(i int64) int64 {
	whole := p.locality.Block * p.locality.Group
	if i >= p.start(p.shortGroup+1) {
		return (i + p.missing) / whole
	}
	return i / whole
}

// group returns the permutation of a group: from the recent ones, or computed.
func (p *blockPermutation) group(group int64) *Permutation {
	slot := &p.recent[group%int64(len(p.recent))]
	if g := slot.Load(); g != nil && g.group == group {
		return &g.Permutation
	}
	g := &groupPermutation{group: group}
	g.init(uint64(p.start(group+1)-p.start(group)), p.key(group))
	slot.Store(g)
	return &g.Permutation
}

// lacks returns the number of windows that the blocks before place q of a group lack.
func (p *blockPermutation) lacks(group, q int64) int64 {
	if group == p.shortGroup && q > p.short%p.locality.Group {
		return p.missing
	}
	return 0
}

// window returns the window with number y in a group before the group is permuted.
func (p *blockPermutation) window(group, y int64) int64 {
	b := p.locality.Block
	q := y / b
	if group == p.shortGroup && y >= (p.short%p.locality.Group+1)*b-p.missing { // after the short block
		q = (y + p.missing) / b
	}
	return int64(p.blocks.At(uint64(group*p.locality.Group+q)))*b + y - (q*b - p.lacks(group, q))
}

// at returns the image of i.
func (p *blockPermutation) at(i int64) int64 {
	group := p.groupAt(i)
	return p.window(group, int64(p.group(group).At(uint64(i-p.start(group)))))
}

// fill sets dst to the images of consecutive indices, starting with i.
func (p *blockPermutation) fill(dst []int64, i int64) {
	for len(dst) > 0 {
		group := p.groupAt(i)
		part := dst[:min(int64(len(dst)), p.start(group+1)-i)]
		p.group(group).fill(part, uint64(i-p.start(group)))
		for j, y := range part {
			part[j] = p.window(group, y)
		}
		dst, i = dst[len(part):], i+int64(len(part))
	}
}

// inverse returns the index whose image is w.
func (p *blockPermutation) inverse(w int64) int64 {
	b, g := p.locality.Block, p.locality.Group
	place := int64(p.blocks.Inverse(uint64(w / b)))
	group, q := place/g, place%g
	y := q*b - p.lacks(group, q) + w%b
	return p.start(group) + int64(p.group(group).Inverse(uint64(y)))
}
