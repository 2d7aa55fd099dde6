package index

import (
	"fmt"
	"math"
	"math/bits"
	"sort"
	"sync"
)

// A Growth is an extension of a source by new training windows while samples are drawn from it.
type Growth struct {
	Sample  int64 // number of the first sample that is drawn with the new windows available
	Windows int64 // number of new training windows; their numbers follow the existing windows
}

// An era is a range of epochs of equal length. Only its first epoch can contain growths.
type era struct {
	start, epoch int64     // its first sample, and the number of its first epoch
	regular      *Order    // of all its epochs, except a first epoch with mixes
	base         *Order    // of the start of the first epoch; nil without mixes
	mixes        []*mixing // the growths within the first epoch, in order
}

// A mixing is a growth within an epoch. The sequence of the epoch, which had `before` windows, is
// extended by the new windows. Its elements from `at` on have not been drawn, and are permuted.
type mixing struct {
	at, before int64
	key        uint64
	after      int64
	once       sync.Once
	lazy       *Permutation
}

func (m *mixing) permutation() *Permutation {
	m.once.Do(func() { m.lazy = newPermutation(uint64(m.after-m.at), m.key) })
	return m.lazy
}

// growthKey returns the key of the permutation that mixes the windows of growth n of a source (from
// 0) with the undrawn windows of its epoch. It is computed like [Key], with the bytes "mula growth
// 2" and with n instead of the epoch.
func growthKey(seed uint64, source string, n int64) uint64 {
	return labelledKey("mula growth 2", seed, source, n)
}

// NewGrowingOrder returns the order, version 2, of a source that starts with the given number of
// training windows, at least 1, and grows. Samples before a growth are the same as without the
// growth. The current epoch then continues with its undrawn windows and the new windows, mixed, so
// that it still draws each window once. Epochs of all windows follow. It is an error if growths are
// not consecutive. With a locality, it is the order "blocks 2": epochs and the start of an epoch
// before a growth have the locality, the rest of this epoch has not.
func NewGrowingOrder(seed uint64, source string, windows int64, growths []Growth, l Locality) (*Order, error) {
	if len(growths) == 0 {
		return NewLocalOrder(seed, source, windows, l), nil
	}
	list := []era{{regular: NewLocalOrder(seed, source, windows, l)}}
	last := int64(0)
	for n, g := range growths {
		if g.Sample < last || g.Windows < 0 || g.Windows > math.MaxInt64-windows {
			return nil, fmt.Errorf("growth %d (%d windows, sample %d) is invalid; the previous growth is at sample "+
				"%d", n+1,
				g.Windows,
				g.Sample, last)
		}
		last = g.Sample
		e := &list[len(list)-1]
		q := (g.Sample - e.start) / windows
		if q > 0 {
			list = append(list, era{start: e.start + q*windows, epoch: e.epoch + q, regular: e.regular})
			e = &list[len(list)-1]
		}
		if e.base == nil {
			e.base = e.regular
		}
		e.mixes = append(e.mixes, &mixing{at: g.Sample - e.start, before: windows, after: windows + g.Windows,
			key: growthKey(seed, source, int64(n))})
		windows += g.Windows
		e.regular = NewLocalOrder(seed, source, windows, l)
	}
	o := NewLocalOrder(seed, source, windows, l)
	o.eras = list
	return o, nil
}

// EpochOf returns the epoch of sample k.
func (o *Order) EpochOf(k int64) int64 {
	if o.eras == nil {
		return k / o.windows
	}
	e := o.eraOf(k)
	return e.epoch + (k-e.start)/e.regular.windows
}

// Span returns the number of an epoch's first sample, and the epoch's length, which is its number
// of windows. If the epoch starts beyond the largest sample number, first is 2^63−1.
func (o *Order) Span(epoch int64) (first, length int64) {
	e := &era{regular: o}
	if o.eras != nil {
		e = &o.eras[sort.Search(len(o.eras)-1, func(j int) bool { return o.eras[j+1].epoch > epoch })]
	}
	hi, lo := bits.Mul64(uint64(epoch-e.epoch), uint64(e.regular.windows))
	if hi != 0 || lo > uint64(math.MaxInt64-e.start) {
		return math.MaxInt64, e.regular.windows
	}
	return e.start + int64(lo), e.regular.windows
}

// FirstEpoch returns the first epoch that draws a training window.
func (o *Order) FirstEpoch(window int64) int64 {
	for i := range o.eras {
		if e := &o.eras[i]; window < e.regular.windows {
			return e.epoch
		}
	}
	return 0
}

func (o *Order) eraOf(k int64) *era {
	return &o.eras[sort.Search(len(o.eras)-1, func(j int) bool { return o.eras[j+1].start > k })]
}

// grownAt is At for a source that has grown.
func (o *Order) grownAt(k int64) (epoch, window int64) {
	e := o.eraOf(k)
	i := k - e.start
	epoch = e.epoch
	if n := e.regular.windows; i >= n {
		epoch += i / n
		i %= n
	} else if e.base != nil {
		return epoch, e.mixed(i)
	}
	return epoch, e.regular.at(epoch, i)
}

// grownFill is Fill for a source that has grown.
func (o *Order) grownFill(dst []int64, k int64) {
	for len(dst) > 0 {
		e := o.eraOf(k)
		n := e.regular.windows
		q, i := (k-e.start)/n, (k-e.start)%n
		part := dst[:min(int64(len(dst)), n-i)]
		if e.base != nil && q == 0 {
			for j := range part {
				part[j] = e.mixed(i + int64(j))
			}
		} else {
			e.regular.fill(e.epoch+q, part, i)
		}
		dst, k = dst[len(part):], k+int64(len(part))
	}
}

// grownInverse is Inverse for a source that has grown.
func (o *Order) grownInverse(epoch, window int64) int64 {
	e := &o.eras[sort.Search(len(o.eras)-1, func(j int) bool { return o.eras[j+1].epoch > epoch })]
	if epoch == e.epoch && e.base != nil {
		return e.start + e.place(window)
	}
	return e.start + (epoch-e.epoch)*e.regular.windows + e.regular.inverse(epoch, window)
}

// mixed returns the window at index i of the era's first epoch, which has mixes.
func (e *era) mixed(i int64) int64 {
	for g := len(e.mixes) - 1; g >= 0; g-- {
		m := e.mixes[g]
		if i < m.at {
			continue
		}
		if i = m.at + int64(m.permutation().At(uint64(i-m.at))); i >= m.before {
			return i // the extension has the new windows in ascending order
		}
	}
	return e.base.at(e.epoch, i)
}

// place is the inverse of mixed.
func (e *era) place(window int64) int64 {
	i, g := window, 0
	if window < e.base.windows {
		i = e.base.inverse(e.epoch, window)
	} else {
		for window >= e.mixes[g].after {
			g++
		}
	}
	for _, m := range e.mixes[g:] {
		if i >= m.at {
			i = m.at + int64(m.permutation().Inverse(uint64(i-m.at)))
		}
	}
	return i
}
