package moe

import "mula/xpu"

// A stock is device memory that grows to the largest size requested.
type stock struct{ whole xpu.Tensor }

// take returns a tensor of the first elements. Their contents are lost if the stock has to grow.
func (s *stock) take(dev xpu.Memory, dtype xpu.DType, shape ...int) (t xpu.Tensor, err error) {
	n := elements(shape)
	if !s.whole.Present() || n > s.whole.Elements() || s.whole.DType() != dtype {
		s.free(dev) // before the allocation, to lower the peak
		if s.whole, err = dev.New(dtype, n); err != nil {
			return xpu.Tensor{}, err
		}
	}
	return s.whole.Rows(0, n).Reshape(shape...), nil
}

func (s *stock) free(dev xpu.Memory) {
	dev.Release(s.whole)
	s.whole = xpu.Tensor{}
}

// elements returns the number of elements of a shape.
func elements(shape []int) int {
	n := 1
	for _, size := range shape {
		n *= size
	}
	return n
}

// blockElements is the maximum size of an arena's memory blocks, 1 GiB; a larger buffer gets its
// own block. Drivers limit the size of one allocation, often to a quarter of the device's memory or
// 4 GiB. Tests set another value.
var blockElements = 1 << 28

// An arena allocates buffers from blocks that it keeps: float32, bfloat16 and int32 on the device,
// float64 on the host. An arena without memory only counts the requests.
type arena struct {
	floats   blocks
	halves   blocks
	int32s   blocks
	doubles  []float64
	nDoubles int
}

func (a *arena) reset() {
	a.floats.used, a.halves.used, a.int32s.used, a.nDoubles = a.floats.used[:0], a.halves.used[:0],
		a.int32s.used[:0], 0
}

// grow gives a at least the memory that need has counted. The old contents are lost.
func (a *arena) grow(dev xpu.Memory, need *arena) error {
	if need.nDoubles > len(a.doubles) {
		a.doubles = make([]float64, need.nDoubles)
	}
	if err := a.floats.grow(dev, xpu.Float32, need.floats.used); err != nil {
		return err
	}
	if err := a.halves.grow(dev, xpu.BFloat16, need.halves.used); err != nil {
		return err
	}
	return a.int32s.grow(dev, xpu.Int32, need.int32s.used)
}

func (a *arena) free(dev xpu.Memory) {
	a.floats.free(dev)
	a.halves.free(dev)
	a.int32s.free(dev)
}

// bytes returns the total size of the buffers allocated from the arena.
func (a *arena) bytes() int64 {
	return 4*(a.floats.elements()+a.int32s.elements()) + 2*a.halves.elements() + 8*int64(a.nDoubles)
}

func (a *arena) f32(shape ...int) xpu.Tensor { return a.floats.cut(xpu.Float32, shape) }
func (a *arena) i32(shape ...int) xpu.Tensor { return a.int32s.cut(xpu.Int32, shape) }

// of allocates numbers of Float32 or BFloat16.
func (a *arena) of(dtype xpu.DType, shape ...int) xpu.Tensor {
	if dtype == xpu.BFloat16 {
		return a.halves.cut(dtype, shape)
	}
	return a.f32(shape...)
}

// either allocates memory for the larger of two shapes, and returns a tensor of each at its start.
func (a *arena) either(dtype xpu.DType, shapes [2][2]int) (views [2]xpu.Tensor) {
	most := 0
	for _, shape := range shapes {
		most = max(most, shape[0]*shape[1])
	}
	whole := a.of(dtype, most)
	for i, shape := range shapes {
		if whole.Present() {
			views[i] = whole.Rows(0, shape[0]*shape[1]).Reshape(shape[0], shape[1])
		}
	}
	return views
}

func (a *arena) f64(n int) []float64 {
	lo := advance(&a.nDoubles, n, 16)
	if a.doubles == nil {
		return nil
	}
	return a.doubles[lo : lo+n : lo+n]
}

// blocks are an arena's memory of one element type.
type blocks struct {
	memory []stock
	used   []int // elements used of each
}

// cut takes the next elements from the last block, or from a new block if they would exceed the
// bound. This depends on the requested sizes alone, so that buffers are where they were counted.
func (b *blocks) cut(dtype xpu.DType, shape []int) xpu.Tensor {
	n, last := elements(shape), len(b.used)-1
	if last < 0 || b.used[last] > 0 && b.used[last]+n > blockElements {
		b.used = append(b.used, 0)
		last++
	}
	lo := advance(&b.used[last], n, 64/dtype.Bytes())
	if last >= len(b.memory) || !b.memory[last].whole.Present() {
		return xpu.Tensor{}
	}
	return b.memory[last].whole.Rows(lo, lo+n).Reshape(shape...)
}

func (b *blocks) grow(dev xpu.Memory, dtype xpu.DType, used []int) error {
	for i, n := range used {
		if i == len(b.memory) {
			b.memory = append(b.memory, stock{})
		}
		if _, err := b.memory[i].take(dev, dtype, n); err != nil {
			return err
		}
	}
	return nil
}

func (b *blocks) free(dev xpu.Memory) {
	for i := range b.memory {
		b.memory[i].free(dev)
	}
}

func (b *blocks) elements() (n int64) {
	for _, used := range b.used {
		n += int64(used)
	}
	return n
}

// advance adds n elements to used, and more up to a multiple of line, a power of two. It returns
// where they start. If memory starts on a cache line, so do they, so that two buffers never share a
// cache line.
func advance(used *int, n, line int) (start int) {
	start = *used
	*used += (n + line - 1) &^ (line - 1)
	return start
}
