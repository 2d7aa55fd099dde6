package gpu

import "mula/xpu"

// The kernels' tiles of C; see products.cl.
const (
	registerRows, panelColumns = 8, 32 // ROWS, PANEL
	stripTerms                 = 16    // STRIP
	tileSide                   = 64    // SIDE
)

// Groups of rows with at most groupTerms terms are multiplied by a panel in local memory, groupBand
// rows at a time.
const groupTerms, groupBand = 2048, 2048

// sumTerms is the number of terms of a chain: on a GPU, the terms of a product without groups are
// divided into chains, whose sums are added in ascending order.
const sumTerms = 1024

// packedElements limits the copy of op(B) of one launch, on a CPU.
const packedElements = 16 << 20

// A product is one of the three products: of complete matrices, by groups of rows of C, or by
// groups of terms. Element (i, j) of op(A) is a[i·aRows + j·aColumns].
type product struct {
	m, n, k             int
	a, b, c             xpu.Tensor
	aRows, aColumns     int
	bRows, bColumns     int
	stack               int // distance in elements between the matrices B of groups of rows
	ldc                 int
	accumulate          bool
	counts              xpu.Tensor // absent without groups
	groupRows, groupSum bool       // groups of rows; groups of terms with one matrix C each
}

// strides returns the distances between the rows and the columns of a matrix.
func strides(t xpu.Tensor) (rows, columns int) {
	if stride, transposed, _ := t.Stored(); !transposed {
		return stride, 1
	} else {
		return 1, stride
	}
}

// MatMul computes a product; see [mula/xpu.Products].
func (d *Device) MatMul(dst, a, b xpu.Tensor, o xpu.MatMulOptions) {
	xpu.CheckMatMul(dst, a, b)
	p := product{m: dst.Dim(0), n: dst.Dim(1), k: a.Dim(1), a: a, b: b, c: dst,
		accumulate: o.Accumulate}
	p.aRows, p.aColumns = strides(a)
	p.bRows, p.bColumns = strides(b)
	p.ldc, _ = strides(dst)
	d.multiply(p)
}

// GroupedMatMul multiplies each group of rows by its own matrix.
func (d *Device) GroupedMatMul(dst, a, b, counts xpu.Tensor, o xpu.MatMulOptions) {
	xpu.CheckGroupedMatMul(dst, a, b, counts)
	n, k := dst.Dim(1), a.Dim(1)
	p := product{m: a.Dim(0), n: n, k: k, a: a, b: b, c: dst, aRows: k, aColumns: 1, stack: k * n,
		ldc: n, accumulate: o.Accumulate, counts: counts, groupRows: true}
	p.bRows, p.bColumns = strides(b)
	d.multiply(p)
}

// GroupedWeightGrad computes the gradients of the matrices of groups.
func (d *Device) GroupedWeightGrad(dst, a, b, counts xpu.Tensor, o xpu.MatMulOptions) {
	xpu.CheckGroupedWeightGrad(dst, a, b, counts)
	m, n := a.Dim(1), b.Dim(1)
	d.multiply(product{m: m, n: n, k: a.Dim(0), a: a, b: b, c: dst, aRows: 1, aColumns: m,
		bRows: n, bColumns: 1, ldc: n, accumulate: o.Accumulate, counts: counts, groupSum: true})
}

func (d *Device) multiply(p product) {
	c := d.begin()
	defer c.end()
	parts := 1
	if p.groupRows || p.groupSum {
		parts = p.counts.Elements()
	}
	if p.m == 0 || p.n == 0 || parts == 0 || p.k == 0 && p.accumulate {
		return
	}
	switch d.matrixFile() {
	case pvcFile:
		c.multiplyMatrix(p)
		return
	case nvidiaFile:
		c.multiplyTensors(p)
		return
	}
	to := c.writes(p.c)
	a, b, aRows, aColumns := c.wide(p.a), typed(c.reads(p.b)), p.aRows, p.aColumns
	height := tileSide
	if d.shape.processor {
		height = registerRows
		if p.k > 0 && (aColumns != 1 || d.rounds()) {
			a, aRows = c.straight(p)
			aColumns = 1
		}
	}
	accumulate := flag(p.accumulate)
	panel := panelColumns * (p.k + stripTerms) // rounded up to complete strips
	// The device computes the tiles, or where the groups start: the host does not know the counts.
	tiles, starts := c.absent(), c.absent()
	down, matrices := over(p.m, height), 1
	switch {
	case p.groupRows && d.shape.processor && p.k <= groupTerms && 4*int64(panel) <= d.device.LocalMemory:
		// Bands are the first dimension: bands beyond a group's rows have no work, and PoCL assigns
		// each thread a range of work-groups.
		c.launch("multiply_groups", groups(1, over(p.m, groupBand), over(p.n, panelColumns), parts), typed(to), a, b,
			c.starts(p), integer(groupBand),
			integer(p.n), integer(p.k), long(aRows), long(p.bRows), long(p.bColumns), long(p.stack), long(p.ldc),
			accumulate, local(panel))
		return
	case p.groupRows:
		down += parts
		tiles = c.take(4 * down)
		c.launch("tiles_of_groups", items(1), tiles, c.reads(p.counts), integer(parts), integer(height),
			integer(p.m), integer(down))
	case p.groupSum:
		matrices = parts
		starts = c.starts(p)
	}
	if !d.shape.processor {
		c.multiplyShared(p, to, a, b, tiles, starts, down, matrices)
		return
	}
	stack, packed := 1, c.absent()
	if p.groupRows {
		stack, packed = parts, c.reads(p.counts)
	}
	all := over(p.n, panelColumns)
	each := max(1, min(all, packedElements/max(1, stack*p.k*panelColumns)))
	panels := c.take(stack * each * p.k * panelColumns)
	for first := 0; first < all; first += each {
		across, column := min(each, all-first), integer(first*panelColumns)
		c.launch("pack_panels", groups(1, over(p.k, stripTerms), across, stack), panels, b, packed, column,
			integer(p.n), integer(p.k),
			long(p.bRows), long(p.bColumns), long(p.stack))
		order := groups(1, down, across, matrices)
		if p.groupRows {
			order = groups(1, across, down, 1)
		}
		c.launch("multiply_registers", order, typed(to), a, panels, tiles, starts,
			column, integer(p.m), integer(p.n), integer(p.k), long(aRows), long(aColumns), long(p.ldc), accumulate)
	}
}

// multiplyShared computes a product on a GPU, in tiles in local memory.
func (c *command) multiplyShared(p product, to, a, b, tiles, starts argument, down, matrices int) {
	multiply := func(to argument, first, terms, matrices, chain, ldc int, accumulate bool) {
		c.launch("multiply_shared", groups(64, down, over(p.n, tileSide), matrices), typed(to),
			a.plus(first*p.aColumns), b.plus(first*p.bRows), tiles, starts, integer(p.m), integer(p.n),
			integer(terms), long(p.aRows), long(p.aColumns), long(p.bRows), long(p.bColumns), long(p.stack),
			long(ldc), flag(accumulate), integer(chain))
	}
	if p.groupRows || p.groupSum {
		multiply(to, 0, p.k, matrices, 0, p.ldc, p.accumulate)
		return
	}
	c.inChains(p, to, sumTerms, multiply)
}

// inChains computes a product without groups in chains of at most `most` terms. multiply computes
// some of them, from term `first` on, to matrices that follow each other; it is one if chain is 0.
// As many chains are computed at the same time as the shape allows, so that a small C with many
// terms keeps all cores busy: the gradients of weights, and of the logits' inputs. The bits do not
// depend on their number.
func (c *command) inChains(p product, to argument, most int, multiply func(to argument, first, terms, chains, chain,
	ldc int, accumulate bool)) {
	if p.k <= most {
		multiply(to, 0, p.k, 1, 0, p.ldc, p.accumulate)
		return
	}
	together := min(over(p.k, most), max(1, c.d.shape.chains/(p.m*p.n)))
	var sums argument
	if together > 1 {
		sums = c.take(together * p.m * p.n)
	}
	add := func(to, sums argument, chains, ldc int, accumulate bool) {
		c.launch("add_chains", items(p.m*over(p.n, 4)), typed(to), sums, integer(chains), integer(p.m),
			integer(p.n), long(ldc), flag(accumulate))
	}
	total, ldc, accumulate := to, p.ldc, p.accumulate
	last := to.bf16 && together*most < p.k // the result is rounded once, after the last chain
	if last {
		total, ldc, accumulate = c.take(p.m*p.n), p.n, false
	}
	for first := 0; first < p.k; first += together * most {
		terms := min(together*most, p.k-first)
		if chains := over(terms, most); chains == 1 {
			multiply(total, first, terms, 1, 0, ldc, accumulate)
		} else {
			multiply(sums, first, terms, chains, most, p.n, false)
			add(total, sums, chains, ldc, accumulate)
		}
		accumulate = true
	}
	if last {
		add(to, total, 1, p.ldc, p.accumulate)
	}
}

// starts computes where groups start, and where the last one ends.
func (c *command) starts(p product) argument {
	if p.groupRows {
		return c.startsOf(p.counts, p.m)
	}
	return c.startsOf(p.counts, p.k)
}

// startsOf computes the first row of each group, and the number of rows, which is at most `most`.
func (c *command) startsOf(counts xpu.Tensor, most int) argument {
	parts := counts.Elements()
	starts := c.take(parts + 1)
	c.launch("starts_of_groups", items(parts+1), starts, c.reads(counts), integer(parts), integer(most))
	return starts
}

// straight makes a rounded copy of op(A) with contiguous rows, and returns its leading dimension:
// an odd number of cache lines, so that the rows of a tile do not evict each other.
func (c *command) straight(p product) (argument, int) {
	const line = 16
	ld := line * (over(p.k, line) | 1)
	a, x := c.take(p.m*ld), c.wide(p.a)
	if p.aColumns == 1 {
		c.launch("round_operand", groups(itemsGroup, over(p.k, itemsGroup), p.m, 1), a, x, integer(p.k), long(ld),
			long(p.aRows))
	} else {
		c.launch("transpose_operand", groups(itemsGroup, over(p.m, itemsGroup), over(p.k, stripTerms), 1), a, x,
			integer(p.k), integer(p.m), long(ld), long(p.aColumns))
	}
	return a, ld
}
