package moe

import "mula/xpu"

// newMemory allocates n elements of device memory, and freeMemory releases them.
func newMemory[E float32 | int32](dev xpu.Memory, n int) (x []E, err error) {
	switch x := any(&x).(type) {
	case *[]float32:
		*x, err = dev.Floats(n)
	case *[]int32:
		*x, err = dev.Ints(n)
	}
	return x, err
}

func freeMemory[E float32 | int32](dev xpu.Memory, x []E) {
	if len(x) == 0 {
		return
	}
	switch x := any(x).(type) {
	case []float32:
		dev.Free(x)
	case []int32:
		dev.FreeInts(x)
	}
}

// A stock is device memory that grows to the largest size requested.
type stock[E float32 | int32] struct{ whole []E }

// take returns the first n elements. Their contents are lost if the stock has to grow.
func (s *stock[E]) take(dev xpu.Memory, n int) (x []E, err error) {
	if n > len(s.whole) {
		s.free(dev) // before the allocation, to lower the peak
		if s.whole, err = newMemory[E](dev, n); err != nil {
			return nil, err
		}
	}
	return s.whole[:n:n], nil
}

func (s *stock[E]) free(dev xpu.Memory) {
	freeMemory(dev, s.whole)
	s.whole = nil
}

// blockElements is the maximum size of an arena's memory blocks, 1 GiB; a larger buffer gets its
// own block. Drivers limit the size of one allocation, often to a quarter of the device's memory or
// 4 GiB. Tests set another value.
var blockElements = 1 << 28

// An arena allocates buffers from blocks that it keeps: float32 and int32 on the device, float64 on
// the host. An arena without memory only counts the requests.
type arena struct {
	floats   blocks[float32]
	int32s   blocks[int32]
	doubles  []float64
	nDoubles int
}

func (a *arena) reset() {
	a.floats.used, a.int32s.used, a.nDoubles = a.floats.used[:0], a.int32s.used[:0], 0
}

// grow gives a at least the memory that need has counted. The old contents are lost.
func (a *arena) grow(dev xpu.Memory, need *arena) error {
	if need.nDoubles > len(a.doubles) {
		a.doubles = make([]float64, need.nDoubles)
	}
	if err := a.floats.grow(dev, need.floats.used); err != nil {
		return err
	}
	return a.int32s.grow(dev, need.int32s.used)
}

func (a *arena) free(dev xpu.Memory) {
	a.floats.free(dev)
	a.int32s.free(dev)
}

// bytes returns the total size of the buffers allocated from the arena.
func (a *arena) bytes() int64 {
	return 4*(a.floats.elements()+a.int32s.elements()) + 8*int64(a.nDoubles)
}

func (a *arena) f32(n int) []float32 { return a.floats.cut(n) }
func (a *arena) i32(n int) []int32   { return a.int32s.cut(n) }
func (a *arena) f64(n int) []float64 { return cutFrom(a.doubles, &a.nDoubles, n) }

// blocks are an arena's memory of one element type.
type blocks[E float32 | int32] struct {
	memory []stock[E]
	used   []int // elements used of each
}

// cut takes the next n elements from the last block, or from a new block if they would exceed the
// bound. This depends on the requested sizes alone, so that buffers are where they were counted.
func (b *blocks[E]) cut(n int) []E {
	last := len(b.used) - 1
	if last < 0 || b.used[last] > 0 && b.used[last]+n > blockElements {
		b.used = append(b.used, 0)
		last++
	}
	var memory []E
	if last < len(b.memory) {
		memory = b.memory[last].whole
	}
	return cutFrom(memory, &b.used[last], n)
}

func (b *blocks[E]) grow(dev xpu.Memory, used []int) error {
	for i, n := range used {
		if i == len(b.memory) {
			b.memory = append(b.memory, stock[E]{})
		}
		if _, err := b.memory[i].take(dev, n); err != nil {
			return err
		}
	}
	return nil
}

func (b *blocks[E]) free(dev xpu.Memory) {
	for i := range b.memory {
		b.memory[i].free(dev)
	}
}

func (b *blocks[E]) elements() (n int64) {
	for _, used := range b.used {
		n += int64(used)
	}
	return n
}

// cutFrom takes the next n elements of memory. If memory starts on a cache line, so do they, so
// that two buffers never share a cache line.
func cutFrom[E any](memory []E, used *int, n int) []E {
	lo := *used
	*used += (n + 15) &^ 15
	if memory == nil {
		return nil
	}
	return memory[lo : lo+n : lo+n]
}
