package index

import (
	"crypto/sha256"
	"encoding/binary"
	"sync/atomic"
)

// An Order is the sequence in which training draws the windows of one source: epoch after epoch,
// each a permutation of all of them. It is safe for concurrent use.
//
// It keeps the permutations of two epochs, an even and an odd one, which is what a run that reads
// in order needs at the turn of an epoch too. That is at most 256 KiB a source (512 KiB where
// Inverse is used), and only for sources of fewer than 65,536 windows.
type Order struct {
	seed    uint64
	source  string
	windows int64
	recent  [2]atomic.Pointer[epochPermutation]
	eras    []era // of a source that has grown, else none
}

type epochPermutation struct {
	epoch int64
	Permutation
}

// NewOrder returns the order, version 1, of a source with this name and number of training windows
// under a plan's seed.
func NewOrder(seed uint64, source string, windows int64) *Order {
	return &Order{seed: seed, source: source, windows: windows}
}

// Key is the key of the permutation of one epoch in order version 1: the first 8 bytes, as a
// little-endian number, of the SHA-256 of the bytes "mula order 1", seed, length of the name, name,
// epoch, each number as 8 little-endian bytes.
func Key(seed uint64, source string, epoch int64) uint64 {
	return labelledKey("mula order 1", seed, source, epoch)
}

// labelledKey is the key for a purpose, which the label names, and a number there.
func labelledKey(label string, seed uint64, source string, number int64) uint64 {
	b := make([]byte, 0, 64+len(source))
	b = append(b, label...)
	b = binary.LittleEndian.AppendUint64(b, seed)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(source)))
	b = append(b, source...)
	b = binary.LittleEndian.AppendUint64(b, uint64(number))
	sum := sha256.Sum256(b)
	return binary.LittleEndian.Uint64(sum[:])
}

// Windows is the number of training windows: the length of an epoch, of the last ones where the
// source has grown.
func (o *Order) Windows() int64 { return o.windows }

// At gives the epoch and the window of the source's sample number k, counted from 0. The source
// must have windows.
func (o *Order) At(k int64) (epoch, window int64) {
	if o.eras != nil {
		return o.grownAt(k)
	}
	if k >= o.windows { // a division takes as long as several rounds of the permutation
		epoch = k / o.windows
	}
	return epoch, int64(o.permutation(epoch).At(uint64(k - epoch*o.windows)))
}

// Fill sets dst to the windows of consecutive samples, of which the first has number k: what At
// gives for each, several times as fast.
func (o *Order) Fill(dst []int64, k int64) {
	if o.eras != nil {
		o.grownFill(dst, k)
		return
	}
	for len(dst) > 0 {
		epoch := k / o.windows
		first := k - epoch*o.windows
		n := min(int64(len(dst)), o.windows-first)
		o.permutation(epoch).fill(dst[:n], uint64(first))
		dst, k = dst[n:], k+n
	}
}

// Inverse gives the number of the sample that is this window in this epoch. The window must be
// below the epoch's length: see [Order.Span].
func (o *Order) Inverse(epoch, window int64) (k int64) {
	if o.eras != nil {
		return o.grownInverse(epoch, window)
	}
	return epoch*o.windows + int64(o.permutation(epoch).Inverse(uint64(window)))
}

// permutation finds the permutation of an epoch among the recent ones, or makes it. Two goroutines
// that miss at the same moment both make it; they make the same.
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
