package gpu

import (
	"fmt"
	"maps"
	"strings"

	"mula/xpu"
	"mula/xpu/opencl"
)

// Products with matrix instructions, of operands of bfloat16: some kernels round and pack operands,
// and others multiply them; see pvc.cl. A packed operand is bfloat16. Packed weights, the B of
// products whose A is not transposed, are kept while there is memory, and packed again only when
// the weights have changed: once per optimizer step, for any number of passes. A device with loads
// of two-dimensional blocks packs nothing; see pvc_direct.go.

// Sizes of pvc.cl.
const (
	matrixRows, matrixColumns = 32, 64 // size of a sub-group's tile
	matrixStep                = 16     // terms of a sum at a time
	matrixSide                = 4      // a work-group is 4 × 4 sub-groups
	matrixLanes               = 16     // work-items of a sub-group
)

// Files of kernels with matrix instructions.
const pvcFile, nvidiaFile = "pvc.cl", "nvidia.cl"

var matrixFiles = []string{pvcFile, directFile, attendMatrixFile, nvidiaFile, attendTensorFile}

// matrixFile returns the file with the kernels of products, if they have matrix instructions.
func (d *Device) matrixFile() string {
	switch {
	case !d.rounds():
	case d.shape.emulate != "":
		return d.shape.emulated
	case d.device.MatrixInstructions():
		return pvcFile
	case d.device.TensorCores():
		return nvidiaFile
	}
	return ""
}

// matrixProgram returns that file with its options. On Ponte Vecchio each thread of its kernels has
// the registers of two threads.
func (d *Device) matrixProgram(file string) program {
	options := d.matrixOptions()
	if file == nvidiaFile {
		options = d.shape.emulate + " " + d.shape.tile.options()
	}
	return d.program(file, strings.TrimSpace(options))
}

// matrixOptions returns the options of the kernels for Ponte Vecchio.
func (d *Device) matrixOptions() string {
	if d.shape.emulate != "" {
		return d.shape.emulate
	}
	return "-cl-intel-256-GRF-per-thread"
}

// Sources returns the programs that a device compiles, including the programs compiled at first
// use. The device need not be present: its type and its extensions determine the programs.
func Sources(device *opencl.Device, precision xpu.Precision) []opencl.Source {
	d := &Device{device: device, precision: precision, shape: shapeOf(device)}
	all := d.programs()
	if !d.shape.processor {
		for _, size := range []int{attendSide, 2 * attendSide} {
			options := d.attendOptions(size)
			p := d.program("attention.cl", options)
			p.source.Name += " " + options
			all = append(all, p)
		}
	}
	if d.matrixFile() == pvcFile {
		if d.shape.direct {
			p := d.program(directFile, d.directOptions())
			p.source.Name += fmt.Sprintf(" -DHIGH=%d", tallSide)
			all = append(all, p)
		}
		for _, depth := range matrixDepths {
			p := d.program(attendMatrixFile, d.attendMatrixOptions(depth))
			p.source.Name += fmt.Sprintf(" -DDEPTH=%d", depth)
			all = append(all, p)
		}
	}
	if d.matrixFile() == nvidiaFile {
		for _, pieces := range tensorPieces {
			for _, grad := range []bool{false, true} {
				options := d.attendTensorOptions(pieces, grad)
				p := d.program(attendTensorFile, options)
				p.source.Name += " " + options
				all = append(all, p)
			}
		}
	}
	var sources []opencl.Source
	for _, p := range all {
		sources = append(sources, p.source)
	}
	return sources
}

// multiplyMatrix computes a product with matrix instructions.
func (c *command) multiplyMatrix(p product) {
	if c.d.shape.direct && c.multiplyDirect(p) {
		return
	}
	a, b := c.operand(p.a, p.aColumns, p.aRows, false), c.operand(p.b, p.bRows, p.bColumns, false)
	switch {
	case p.groupSum:
		c.sumRows(p, a, b)
	case p.groupRows:
		c.multiplyRows(p, p.counts.Elements(), a, b, true)
	default:
		c.multiplyRows(p, 1, a, b, p.aColumns == 1)
	}
}

// An operand is memory whose element (t, i) is at t*term + i*index, where t is the term of the sum
// and i the row of A or the column of B.
type operand struct {
	memory      argument
	term, index int
}

// plan counts panels, steps, and bands of band rows of groups. Without counts there is one group of
// all rows.
func (c *command) plan(counts xpu.Tensor, groups, rows, band int) argument {
	plan := c.take(4 * (groups + 1))
	c.launch("pvc_plan", items(groups+1), plan, c.reads(counts), integer(groups), integer(rows), integer(band))
	return plan
}

// pieces returns an upper bound of the number of pieces of the given size in the rows of all
// groups.
func pieces(groups, rows, size int) int { return min(rows, rows/size+groups) }

// multiplyRows multiplies groups of rows of A, each by its matrix B. weights means that B is a
// matrix of weights.
func (c *command) multiplyRows(p product, groups int, a, b operand, weights bool) {
	steps, panels, across := 2*over(p.k, 2*matrixStep), pieces(groups, p.m, matrixRows), over(p.n, matrixColumns)
	plan := c.plan(p.counts, groups, p.m, matrixSide*matrixRows)
	left := c.take(panels * steps * matrixRows * matrixStep / 2)
	c.launch("pvc_pack_rows", grid{[3]int{panels, over(steps, 8), 1}, [3]int{matrixRows, 8, 1}},
		left, typed(a.memory), plan, integer(groups), long(a.index), long(a.term), integer(p.k), integer(steps))
	right, packed := c.packedWeights(weights, packedKey{term: b.term, index: b.index, groups: groups, k: p.k, n: p.n},
		p.b, groups*across*steps*matrixColumns*matrixStep/2)
	if !packed {
		c.launch("pvc_pack_matrices", grid{[3]int{across, over(steps, 4), groups}, [3]int{matrixColumns, 4, 1}},
			right, typed(b.memory), long(p.stack), long(b.term), long(b.index), integer(p.k), integer(p.n),
			integer(steps))
	}
	c.launch("pvc_product",
		c.matrixGrid(matrixSide, over(across, matrixSide), pieces(groups, p.m, matrixSide*matrixRows), 1),
		typed(c.writes(p.c)), left, right, plan, integer(groups), integer(p.ldc), integer(p.n), integer(steps),
		flag(p.accumulate))
}

// sumRows multiplies, for each group, the transpose of its rows of A by its rows of B.
func (c *command) sumRows(p product, a, b operand) {
	groups := p.counts.Elements()
	steps, down, across := 2*pieces(groups, p.k, 2*matrixStep), over(p.m, matrixRows), over(p.n, matrixColumns)
	plan := c.plan(p.counts, groups, p.k, matrixSide*matrixRows)
	left := c.take(down * steps * matrixRows * matrixStep / 2)
	c.launch("pvc_pack_left", grid{[3]int{down, over(steps, 8), 1}, [3]int{matrixRows, 8, 1}},
		left, typed(a.memory), plan, integer(groups), long(a.term), long(a.index), integer(p.m), integer(steps))
	right := c.take(across * steps * matrixColumns * matrixStep / 2)
	c.launch("pvc_pack_right", grid{[3]int{across, over(steps, 4), 1}, [3]int{matrixColumns, 4, 1}},
		right, typed(b.memory), plan, integer(groups), long(b.term), long(b.index), integer(p.n), integer(steps))
	c.launch("pvc_weight_grad", c.matrixGrid(matrixSide, over(across, matrixSide), over(down, matrixSide), groups),
		typed(c.writes(p.c)), left, right, plan, integer(groups), long(p.m*p.n), integer(p.ldc), integer(p.m),
		integer(p.n), integer(steps), flag(p.accumulate))
}

// matrixGrid returns a grid of work-groups of high × 4 sub-groups.
func (c *command) matrixGrid(high, x, y, z int) grid {
	lanes := matrixLanes
	if c.d.shape.emulate != "" {
		lanes = 1
	}
	return groups(high*matrixSide*lanes, x, y, z)
}

// packedOperands are the packed operands that are kept, guarded by Device.mu. They are dropped when
// the device needs their memory.
type packedOperands struct {
	of map[packedKey]*packedOperand
}

// A packedKey identifies what was packed, and how.
type packedKey struct {
	allocation                *allocation
	at                        int64
	term, index, groups, k, n int
}

type packedOperand struct {
	buffer  *opencl.Buffer
	version uint64 // version of the allocation when it was packed
}

// packedWeights returns memory for a packed operand, which is kept if keep is set, and reports
// whether it already holds the current operand.
func (c *command) packedWeights(keep bool, key packedKey, x xpu.Tensor, elements int) (memory argument, packed bool) {
	d := c.d
	if !keep || elements == 0 || d.err != nil {
		return c.take(elements), false
	}
	a, at := d.memory.of(x)
	key.allocation, key.at = a, at
	p := d.packed.of[key]
	if p != nil && p.version == a.version {
		return argument{buffer: p.buffer}, true
	}
	if p == nil {
		buffer, err := d.tryReserve(4 * int64(elements)) // do not drop other kept operands
		if err != nil {
			return c.take(elements), false
		}
		if d.packed.of == nil {
			d.packed.of = map[packedKey]*packedOperand{}
		}
		p = &packedOperand{buffer: buffer}
		d.packed.of[key] = p
	}
	p.version = a.version
	return argument{buffer: p.buffer}, false
}

// forget drops the packed operands of memory that is freed.
func (w *packedOperands) forget(d *Device, a *allocation) {
	maps.DeleteFunc(w.of, func(key packedKey, p *packedOperand) bool {
		if key.allocation != a {
			return false
		}
		d.unreserve(p.buffer)
		return true
	})
}

// drop frees memory of packed operands and reports whether it freed any.
func (w *packedOperands) drop(d *Device) bool {
	if len(w.of) == 0 {
		return false
	}
	for _, p := range w.of {
		d.unreserve(p.buffer)
	}
	clear(w.of)
	return true
}

// release releases the buffers.
func (w *packedOperands) release() {
	for _, p := range w.of {
		p.buffer.Release()
	}
}
