package gpu

import (
	"fmt"

	"mula/xpu"
)

// Operands of products in memory; see [xpu.Tensor.AsOperand]. On Ponte Vecchio, kernels that write
// such a matrix store numbers rounded to bfloat16, and products read them without packing them
// first. A row has its numbers, one after the other, in the first half of its memory, so no other
// memory is needed. Other devices store float32.

// An operandRange is the memory of a matrix that a command wrote as an operand.
type operandRange struct {
	at, rows, width int  // first element, and the shape of the matrix
	halves          bool // the numbers are rounded; otherwise they are float32
}

func (r operandRange) end() int { return r.at + r.rows*r.width }

// keepsOperands reports whether the device has operands in a format of its own.
func (d *Device) keepsOperands() bool { return d.matrixFile() == pvcFile }

// overwritten forgets the operands in elements at … end-1.
func (a *allocation) overwritten(at, end int) {
	left := a.operands[:0]
	for _, r := range a.operands {
		if r.end() <= at || end <= r.at {
			left = append(left, r)
		}
	}
	a.operands = left
}

// operandsAt returns the operands that contain element at, or that elements at … end-1 overlap; nil
// if there are none.
func (a *allocation) operandsAt(at, end int) *operandRange {
	for i := range a.operands {
		if r := &a.operands[i]; at < r.end() && r.at < max(end, at+1) {
			return r
		}
	}
	return nil
}

// extent returns the number of elements from the first to the last of a tensor with elements.
func extent(x xpu.Tensor) int {
	if x.Rank() < 2 || x.Contiguous() {
		return x.Elements()
	}
	stride, transposed, _ := x.Stored()
	rows, columns := x.Dim(x.Rank()-2), x.Dim(x.Rank()-1)
	if transposed {
		rows, columns = columns, rows
	}
	return x.Elements()/(rows*columns)*stride*rows - (stride - columns)
}

// wrote records a command that writes to a tensor with elements.
func (c *command) wrote(a *allocation, at int64, x xpu.Tensor) {
	c.d.wrote(a)
	a.overwritten(int(at), int(at)+extent(x))
	if x.IsOperand() && x.DType() == xpu.Float32 && x.Rank() == 2 && x.Dim(1) > 1 && c.d.keepsOperands() {
		a.operands = append(a.operands, operandRange{at: int(at), rows: x.Dim(0), width: x.Dim(1)})
	}
}

// checkRead panics if a tensor with elements is memory of operands, which only products read.
func (a *allocation) checkRead(at int64, x xpu.Tensor) {
	if a.operandsAt(int(at), int(at)+extent(x)) != nil {
		panic(fmt.Sprintf("gpu: a command reads a tensor of shape %v that was written for products alone; see "+
			"xpu.Tensor.AsOperand", x.Shape()))
	}
}

// stores is writes for a kernel that can round the rows of x. halves is 1 if it must round them.
func (c *command) stores(x xpu.Tensor) (memory, halves argument) {
	memory = c.writes(x)
	if x.Elements() == 0 {
		return memory, flag(false)
	}
	a, at := c.d.memory.of(x)
	r := a.operandsAt(int(at), int(at))
	if r != nil {
		r.halves = true
	}
	return memory, flag(r != nil)
}

// operand returns a matrix as an operand of a product. Its element (t, i) is term·t + index·i
// elements after the first. round means that a matrix written as an operand is rounded first, if it
// is not yet.
func (c *command) operand(x xpu.Tensor, term, index int, round bool) operand {
	if x.Elements() == 0 {
		return operand{c.absent(), term, index}
	}
	a, at := c.d.memory.of(x)
	r := a.operandsAt(int(at), int(at)+extent(x))
	if r == nil {
		return operand{c.reads(x), term, index}
	}
	row, column := (int(at)-r.at)/r.width, (int(at)-r.at)%r.width
	if int(at) < r.at || int(at)+extent(x) > r.end() || column+min(extent(x), r.width) > r.width ||
		max(term, index) != r.width && extent(x) > r.width || min(term, index) != 1 {
		panic(fmt.Sprintf("gpu: a product reads a tensor of shape %v that was written as a matrix of %d×%d; see "+
			"xpu.Tensor.AsOperand", x.Shape(), r.rows, r.width))
	}
	if round && !r.halves {
		c.launch("pvc_round_rows", c.rows(r.rows), argument{buffer: a.buffer, at: uint64(r.at)}, integer(r.width))
		c.d.wrote(a)
		r.halves = true
	}
	memory := argument{buffer: a.buffer, at: uint64(at)}
	if !r.halves {
		return operand{memory, term, index}
	}
	memory.at, memory.bf16 = uint64(2*(r.at+row*r.width)+column), true
	if term == 1 {
		return operand{memory, term, 2 * index}
	}
	return operand{memory, 2 * term, index}
}
