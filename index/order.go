package index

import (
	"crypto/sha256"
	"encoding/binary"
	"sync/atomic"
)

// An Order is the sequence in which training draws the windows of one source: epoch after epoch,
// each a permutation of all windows. It is safe for concurrent use.
//
// It keeps the permutations of two epochs, an even and an odd epoch, so a sequential read across an
// epoch boundary recomputes nothing. The memory is at most 256 KiB per source (512 KiB if Inverse
// is used), and only for sources of fewer than 65,536 windows.
type Order struct {
	seed    uint64
	source  string
	windows int64
	recent  [2]atomic.Pointer[epochPermutation]

	locality     Locality // if not zero, recentBlocks is used instead of recent
	recentBlocks [2]atomic.Pointer[blockPermutation]

	eras []era // of a source that has grown, otherwise empty
}

type epochPermutation struct {
	epoch int64
	Permutation
}

// NewOrder returns the order, version 1, of a source with this name and number of training windows,
// for a plan's seed.
func NewOrder(seed uint64, source string, windows int64) *Order {
	return &Order{seed: seed, source: source, windows: windows}
}

// NewLocalOrder is [NewOrder] with a locality. If it is not zero, the order is "blocks 1".
func NewLocalOrder(seed uint64, source string, windows int64, l Locality) *Order {
	return &Order{seed: seed, source: source, windows: windows, locality: l}
}

// Key returns the key of the permutation of one epoch in order version 1: the first 8 bytes, as a
// little-endian number, of the SHA-256 of the bytes "mula order 1", seed, length of the name, name,
// epoch, each number as 8 little-endian bytes.
func Key(seed uint64, source string, epoch int64) uint64 {
	return labelledKey("mula order 1", seed, source, epoch)
}

// labelledKey returns the key for a label and numbers.
func labelledKey(label string, seed uint64, source string, numbers ...int64) uint64 {
	b := make([]byte, 0, 64+len(source))
	b = append(b, label...)
	b = binary.LittleEndian.AppendUint64(b, seed)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(source)))
	b = append(b, source...)
	for _, number := range numbers {
		b = binary.LittleEndian.AppendUint64(b, uint64(number))
	}
	sum := sha256.Sum256(b)
	return binary.LittleEndian.Uint64(sum[:])
}

// Windows returns the number of training windows, which is the length of an epoch. For a source
// that has grown, it is the length of the last epochs.
func (o *Order) Windows() int64 { return o.windows }

// At returns the epoch and the window of the source's sample k, counted from 0. The source must
// have windows.
func (o *Order) At(k int64) (epoch, window int64) {
	if o.eras != nil {
		return o.grownAt(k)
	}
	if k >= o.windows { // a division takes as long as several rounds of the permutation
		epoch = k / o.windows
	}
	return epoch, o.at(epoch, k-epoch*o.windows)
}

// Fill sets dst to the windows of consecutive samples, starting with sample k. The windows equal
// At's, but Fill is several times faster.
func (o *Order) Fill(dst []int64, k int64) {
	if o.eras != nil {
		o.grownFill(dst, k)
		return
	}
	for len(dst) > 0 {
		epoch := k / o.windows
		first := k - epoch*o.windows
		n := min(int64(len(dst)), o.windows-first)
		o.fill(epoch, dst[:n], first)
		dst, k = dst[n:], k+n
	}
}

// Inverse returns the number of the sample that is this window in this epoch. The window must be
// below the epoch's length: see [Order.Span].
func (o *Order) Inverse(epoch, window int64) (k int64) {
	if o.eras != nil {
		return o.grownInverse(epoch, window)
	}
	return epoch*o.windows + o.inverse(epoch, window)
}

// at returns the window at an index of an epoch of a source that has not grown.
func (o *Order) at(epoch, i int64) int64 {
	if o.locality != (Locality{}) {
		return o.blocks(epoch).at(i)
	}
	return int64(o.permutation(epoch).At(uint64(i)))
}

// fill sets dst to the windows at consecutive indices of an epoch.
func (o *Order) fill(epoch int64, dst []int64, i int64) {
	if o.locality != (Locality{}) {
		o.blocks(epoch).fill(dst, i)
		return
	}
	o.permutation(epoch).fill(dst, uint64(i))
}

// inverse is the inverse of at.
func (o *Order) inverse(epoch, window int64) int64 {
	if o.locality != (Locality{}) {
		return o.blocks(epoch).inverse(window)
	}
	return int64(o.permutation(epoch).Inverse(uint64(window)))
}

// blocks is permutation for an order with a locality.
func (o *Order) blocks(epoch int64) *blockPermutation {
	slot := &o.recentBlocks[epoch&1]
	if p := slot.Load(); p != nil && p.epoch == epoch {
		return p
	}
	p := newBlockPermutation(o.seed, o.source, epoch, o.windows, o.locality)
	slot.Store(p)
	return p
}

// permutation returns the permutation of an epoch from the recent ones, or computes it. Two
// goroutines that miss at the same moment both compute it, with the same result.
func (o *Order) permutation(epoch int64) *Permutation {
	slot := &o.recent[epoch&1]
	if e := slot.Load(); e != nil && e.epoch == epoch {
		return &e.Permutation
	}
	e := &epochPermutation{epoch: epoch}
	e.init(uint64(o.windows), Key(o.seed, o.source, epoch))
	slot.Store(e)
	return &e.Permutation
}
