package xpu

import (
	"fmt"
	"unsafe"
)

// DType is the type of a tensor's elements in memory.
type DType uint8

// The types of elements.
const (
	Float32 DType = iota
	BFloat16
	Int32
)

// Bytes returns the size of an element.
func (d DType) Bytes() int {
	if d == BFloat16 {
		return 2
	}
	return 4
}

func (d DType) String() string {
	switch d {
	case Float32:
		return "fp32"
	case BFloat16:
		return "bf16"
	case Int32:
		return "int32"
	}
	return fmt.Sprintf("DType(%d)", uint8(d))
}

// maxRank is the largest number of dimensions of a tensor.
const maxRank = 4

// maxElements limits a tensor, so that sizes in bytes do not overflow.
const maxElements = 1 << 60

// A Tensor is a view of device memory: a buffer, the offset of the first element, a shape, and the
// distance between neighbours in each dimension. It is a small value, and making a view allocates
// nothing. The zero Tensor means that an optional operand is absent.
//
// Like a slice expression, a view panics if it is out of range.
type Tensor struct {
	host     unsafe.Pointer // first element, if the device computes in the memory of this process
	buffer   any            // otherwise the device's buffer,
	offset   int            // and the index of the first element in it
	shape    [maxRank]int
	strides  [maxRank]int // in elements
	rank     uint8
	dtype    DType
	discrete bool // the host has no view of the memory
	operand  bool // see AsOperand
}

// Of returns a tensor of the first elements of x, which is host memory.
func Of(x []float32, shape ...int) Tensor {
	return tensorOf(unsafe.Pointer(unsafe.SliceData(x)), len(x), Float32, shape)
}

// OfHalves is Of for the bits of numbers of BFloat16.
func OfHalves(x []uint16, shape ...int) Tensor {
	return tensorOf(unsafe.Pointer(unsafe.SliceData(x)), len(x), BFloat16, shape)
}

// OfInts is Of for whole numbers.
func OfInts(x []int32, shape ...int) Tensor {
	return tensorOf(unsafe.Pointer(unsafe.SliceData(x)), len(x), Int32, shape)
}

// InBuffer returns a tensor at the beginning of a buffer that only its device can read. It is for
// implementations of [Memory].
func InBuffer(buffer any, dtype DType, shape ...int) Tensor {
	t := Tensor{buffer: buffer, dtype: dtype, discrete: true}
	t.setShape(shape)
	return t
}

// Buffer returns the buffer given to [InBuffer] and the index of the first element in it.
func (t Tensor) Buffer() (buffer any, offset int) { return t.buffer, t.offset }

// Discrete returns the tensor without a view for the host. It is for implementations of [Memory].
func (t Tensor) Discrete() Tensor {
	t.discrete = true
	return t
}

// AsOperand returns the tensor, a matrix of Float32 without gaps, as the result of a command whose
// numbers are read as operands of products alone. A device that rounds operands may then store
// rounded numbers in a format of its own. Until other commands write to this memory, only products
// may read it, and GatherRows if its result is AsOperand, too. They read this matrix or some of its
// rows, by tensors with or without AsOperand. The bits of products do not change.
func (t Tensor) AsOperand() Tensor {
	t.operand = true
	return t
}

// IsOperand reports whether the tensor is a result of AsOperand. It is for implementations of
// [Memory].
func (t Tensor) IsOperand() bool { return t.operand }

// IsDiscrete reports whether the host has no view of the memory.
func (t Tensor) IsDiscrete() bool { return t.discrete }

func tensorOf(host unsafe.Pointer, n int, dtype DType, shape []int) Tensor {
	t := Tensor{host: host, dtype: dtype}
	if size := t.setShape(shape); size > n {
		panic(fmt.Sprintf("xpu: %d elements cannot hold a tensor of shape %v", n, t.Shape()))
	}
	return t
}

// setShape sets the shape and the strides of a tensor without gaps, and returns its number of
// elements.
func (t *Tensor) setShape(shape []int) (elements int) {
	if len(shape) == 0 || len(shape) > maxRank {
		panic(fmt.Sprintf("xpu: a tensor has 1 to %d dimensions, not %d", maxRank, len(shape)))
	}
	t.rank, elements = uint8(len(shape)), 1
	t.shape, t.strides = [maxRank]int{}, [maxRank]int{}
	copy(t.shape[:], shape)
	stride := 1
	for i := len(shape) - 1; i >= 0; i-- {
		n := shape[i]
		if n < 0 || n > maxElements/stride {
			panic(fmt.Sprintf("xpu: invalid shape %v", t.Shape()))
		}
		t.strides[i] = stride
		stride *= max(1, n)
		elements *= n
	}
	return elements
}

// Elements returns the number of elements of a tensor of the given shape, or an error if there is
// no such tensor.
func Elements(shape []int) (n int, err error) {
	if len(shape) == 0 || len(shape) > maxRank {
		return 0, fmt.Errorf("a tensor has 1 to %d dimensions, not %d", maxRank, len(shape))
	}
	n = 1
	for _, size := range shape {
		if size < 0 || size > maxElements/max(1, n) {
			return 0, fmt.Errorf("no tensor has the shape %v", append([]int(nil), shape...))
		}
		n *= size
	}
	return n, nil
}

// Present reports whether t is a tensor, also one without elements, and not the zero Tensor.
func (t Tensor) Present() bool { return t.rank > 0 }

// Rank returns the number of dimensions.
func (t Tensor) Rank() int { return int(t.rank) }

// Dim returns the size of dimension i, counted from 0.
func (t Tensor) Dim(i int) int { return t.shape[:t.rank][i] }

// Shape returns a copy of the shape.
func (t Tensor) Shape() []int { return append([]int(nil), t.shape[:t.rank]...) }

// DType returns the type of the elements.
func (t Tensor) DType() DType { return t.dtype }

// Elements returns the number of elements; 0 for the zero Tensor.
func (t Tensor) Elements() int {
	if t.rank == 0 {
		return 0
	}
	n := 1
	for _, size := range t.shape[:t.rank] {
		n *= size
	}
	return n
}

// Contiguous reports whether the elements follow each other in memory without gaps.
func (t Tensor) Contiguous() bool {
	n := 1
	for i := int(t.rank) - 1; i >= 0; i-- {
		if t.shape[i] != 1 && t.strides[i] != n {
			return t.Elements() == 0
		}
		n *= t.shape[i]
	}
	return true
}

// extent returns the number of elements from the first to the last, including gaps.
func (t Tensor) extent() int {
	n := 1
	for i, size := range t.shape[:t.rank] {
		if size == 0 {
			return 0
		}
		n += (size - 1) * t.strides[i]
	}
	if t.rank == 0 {
		return 0
	}
	return n
}

// Rows returns the part [from, to) of the first dimension.
func (t Tensor) Rows(from, to int) Tensor { return t.Slice(0, from, to) }

// Index returns part i of the first dimension, without that dimension.
func (t Tensor) Index(i int) Tensor {
	t = t.Rows(i, i+1)
	copy(t.shape[:], t.shape[1:])
	copy(t.strides[:], t.strides[1:])
	t.rank--
	return t
}

// Slice returns the part [from, to) of a dimension.
func (t Tensor) Slice(dim, from, to int) Tensor {
	if size := t.Dim(dim); from < 0 || from > to || to > size {
		panic(fmt.Sprintf("xpu: range [%d, %d) of dimension %d of a tensor of shape %v", from, to, dim, t.Shape()))
	}
	if from < to { // so that an empty view does not point beyond the memory
		t = t.advance(from * t.strides[dim])
	}
	t.shape[dim] = to - from
	return t
}

// Reshape returns the same elements in another shape. The tensor must be contiguous.
func (t Tensor) Reshape(shape ...int) Tensor {
	n, old := t.Elements(), t
	if contiguous := t.Contiguous(); t.setShape(shape) != n || !contiguous {
		panic(fmt.Sprintf("xpu: a tensor of shape %v (contiguous: %v) cannot get the shape %v", old.Shape(), contiguous,
			t.Shape()))
	}
	return t
}

// Flat returns the elements in one dimension.
func (t Tensor) Flat() Tensor { return t.Reshape(t.Elements()) }

// T exchanges the last two dimensions.
func (t Tensor) T() Tensor {
	i, j := int(t.rank)-2, int(t.rank)-1
	if i < 0 {
		panic(fmt.Sprintf("xpu: a tensor of shape %v has no transpose", t.Shape()))
	}
	t.shape[i], t.shape[j] = t.shape[j], t.shape[i]
	t.strides[i], t.strides[j] = t.strides[j], t.strides[i]
	return t
}

// Strided returns a matrix whose rows start stride elements apart, from the first element on. The
// tensor must be contiguous.
func (t Tensor) Strided(rows, columns, stride int) Tensor {
	v := t
	v.setShape([]int{rows, columns})
	v.strides[0] = stride
	if stride < columns || !t.Contiguous() || rows > maxElements/max(1, stride) || v.extent() > t.Elements() {
		panic(fmt.Sprintf("xpu: a tensor of shape %v cannot hold %d rows of %d, %d apart", t.Shape(), rows, columns,
			stride))
	}
	return v
}

// advance returns the tensor that starts n elements later.
func (t Tensor) advance(n int) Tensor {
	if t.host != nil {
		t.host = unsafe.Add(t.host, n*t.dtype.Bytes())
	}
	t.offset += n
	return t
}

// Host returns the memory of a tensor of Float32, from its first to its last element, without a
// copy, or nil if the device does not share it with the host. It also returns nil for a tensor of
// BFloat16, whose memory has no float32.
func (t Tensor) Host() []float32 {
	if t.discrete || t.dtype == BFloat16 {
		return nil
	}
	return t.Floats()
}

// Floats returns the memory of a tensor of Float32, from its first to its last element. It is for
// devices that compute in the memory of this process, and panics on memory of another device.
func (t Tensor) Floats() []float32 {
	t.checkHost(Float32)
	return unsafe.Slice((*float32)(t.host), t.extent())
}

// Halves is Floats for a tensor of BFloat16. An element is the upper half of a float32.
func (t Tensor) Halves() []uint16 {
	t.checkHost(BFloat16)
	return unsafe.Slice((*uint16)(t.host), t.extent())
}

// Ints is Floats for a tensor of Int32.
func (t Tensor) Ints() []int32 {
	t.checkHost(Int32)
	return unsafe.Slice((*int32)(t.host), t.extent())
}

func (t Tensor) checkHost(dtype DType) {
	if t.rank > 0 && t.dtype != dtype {
		panic(fmt.Sprintf("xpu: the elements are %s, not %s", t.dtype, dtype))
	}
	if t.host == nil && t.extent() > 0 {
		panic("xpu: a tensor is memory of another device")
	}
}

// Stored describes how a device reads the matrix in the last two dimensions of t: the distance
// between stored rows, at least their length, and whether the stored matrix is the transpose. ok is
// false if neither dimension is contiguous.
func (t Tensor) Stored() (stride int, transposed, ok bool) {
	rows, columns := int(t.rank)-2, int(t.rank)-1
	switch {
	case t.strides[columns] == 1:
		return max(t.strides[rows], t.shape[columns]), false, true
	case t.strides[rows] == 1:
		return max(t.strides[columns], t.shape[rows]), true, true
	}
	return 0, false, false
}
