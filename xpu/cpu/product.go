package cpu

import (
	"cmp"
	"slices"

	"mula/xpu"
)

const (
	// blockK and blockKBF16 are the numbers of terms that are summed in registers before they are
	// added to C. They determine the bits of every product: they are the same for all kernel sets
	// of a precision and must never change.
	blockK, blockKBF16 = 256, 512
	// blockPanels is the number of panels of op(A) that a worker packs at once, each with depth
	// blocks of terms, which are all added to a tile of C before the next tile: at most 12·14 rows,
	// 336 KiB, which fit its second-level cache (twice that if bf16 is rounded in float32).
	blockPanels, depth = 12, 2
	// packPanels is the number of panels of op(B) that are packed at once: long pieces of lines are
	// read from memory faster.
	packPanels = 4
	// packedElements limits the shared copy of op(B), in elements (16 MiB), unless a single panel
	// is larger.
	packedElements = 4 << 20
	// smallWork is the number of multiply-adds below which waking a worker costs more than it
	// saves.
	smallWork = 1 << 19
)

// product executes one call of a method: independent matrix products, divided into spans of
// columns, and those into pieces that each run on one worker. A product is reused with its memory.
type product struct {
	dev      *Device
	problems []problem
	spans    []span
	packs    []packing
	pieces   []piece
	packed   []float32
	// packs[i]; stored here, like compute, because a method value for each call would be an
	// allocation
	pack    func(int)
	compute func(int) // pieces[i]
}

// problem is C = op(A)·op(B), or with add C += op(A)·op(B).
type problem struct {
	m, n, k        int
	a, b, c        []float32
	halvesA        []uint16 // op(A) of BFloat16, instead of a
	halves         []uint16 // op(B) of BFloat16, instead of b
	rounded        []uint16 // C of BFloat16, instead of c
	lda, ldb, ldc  int
	transA, transB bool
	add            bool
}

// span is a range of panels, from first on, of op(B) of one problem. If more than one block of rows
// needs the panels, they are packed in advance at offset in product.packed: for each block of K,
// panel after panel. Otherwise offset is -1, and each piece packs the panels that it needs.
type span struct {
	problem       int
	first, panels int
	offset        int
}

// packing is a range of panels of a span over one block of K that starts at term k0.
type packing struct{ span, first, panels, k0 int }

// piece is rows × panels of a span's C.
type piece struct{ span, row, rows, first, panels int }

// scratch is the memory that one worker needs for a piece.
type scratch struct {
	a    [blockPanels * maxMR * depth * blockKBF16]float32
	b    [maxNR * blockKBF16]float32
	edge [maxNR * blockKBF16]float32
	wide [maxNR * blockKBF16]float32 // a panel of an operand of BFloat16, as float32
	tile [maxMR * maxNR]float32
	sums []float32 // for C of BFloat16: the product
}

// MatMul computes dst = a·b, or dst += a·b; see [xpu.Products].
func (d *Device) MatMul(dst, a, b xpu.Tensor, o xpu.MatMulOptions) {
	xpu.CheckMatMul(dst, a, b)
	lda, transA, _ := a.Stored()
	ldb, transB, _ := b.Stored()
	ldc, _, _ := dst.Stored()
	p := d.product()
	q := problem{m: dst.Dim(0), n: dst.Dim(1), k: a.Dim(1), lda: lda, ldb: ldb, ldc: ldc,
		transA: transA, transB: transB, add: o.Accumulate}
	q.setA(a, 0)
	q.setB(b, 0)
	q.setC(dst, 0)
	p.problems = append(p.problems, q)
	p.run()
}

// GroupedMatMul multiplies each group of rows by its matrix; see [xpu.Products].
func (d *Device) GroupedMatMul(dst, a, b, counts xpu.Tensor, o xpu.MatMulOptions) {
	xpu.CheckGroupedMatMul(dst, a, b, counts)
	groups, n, k := counts.Ints(), dst.Dim(1), a.Dim(1)
	xpu.CheckCounts("GroupedMatMul", groups, a.Dim(0))
	ldb, transB, _ := b.Stored()
	p := d.product()
	row := 0
	for g, count := range groups {
		m := int(count)
		if m > 0 {
			q := problem{m: m, n: n, k: k, lda: k, ldb: ldb, ldc: n, transB: transB, add: o.Accumulate}
			q.setA(a, row*k)
			q.setB(b, g*k*n)
			q.setC(dst, row*n)
			p.problems = append(p.problems, q)
		}
		row += m
	}
	p.run()
}

// GroupedWeightGrad computes a_gᵀ·b_g for groups of rows; see [xpu.Products].
func (d *Device) GroupedWeightGrad(dst, a, b, counts xpu.Tensor, o xpu.MatMulOptions) {
	xpu.CheckGroupedWeightGrad(dst, a, b, counts)
	groups, m, n := counts.Ints(), a.Dim(1), b.Dim(1)
	xpu.CheckCounts("GroupedWeightGrad", groups, a.Dim(0))
	p := d.product()
	row := 0
	for g, count := range groups {
		k := int(count)
		if k > 0 || !o.Accumulate {
			q := problem{m: m, n: n, k: k, b: b.Floats()[row*n:], lda: m, ldb: n, ldc: n, transA: true,
				add: o.Accumulate}
			q.setA(a, row*m)
			q.setC(dst, g*m*n)
			p.problems = append(p.problems, q)
		}
		row += k
	}
	p.run()
}

// setA sets op(A) to the elements of a from the given one on.
func (q *problem) setA(a xpu.Tensor, from int) {
	if a.DType() == xpu.BFloat16 {
		q.halvesA = a.Halves()[from:]
	} else {
		q.a = a.Floats()[from:]
	}
}

// setB sets op(B) to the elements of b from the given one on.
func (q *problem) setB(b xpu.Tensor, from int) {
	if b.DType() == xpu.BFloat16 {
		q.halves = b.Halves()[from:]
	} else {
		q.b = b.Floats()[from:]
	}
}

// setC sets C to the elements of c from the given one on.
func (q *problem) setC(c xpu.Tensor, from int) {
	if c.DType() == xpu.BFloat16 {
		q.rounded = c.Halves()[from:]
	} else {
		q.c = c.Floats()[from:]
	}
}

func (d *Device) product() *product {
	p := d.products.Get()
	if p.dev == nil {
		p.dev, p.pack, p.compute = d, p.packOne, p.computeOne
	}
	return p
}

// run solves the problems and returns p for reuse.
func (p *product) run() {
	next, panel := 0, 0
	for next < len(p.problems) {
		next, panel = p.fill(next, panel)
		p.cut()
		p.dev.pool.run(len(p.packs), p.pack)
		p.dev.pool.run(len(p.pieces), p.compute)
	}
	clear(p.problems) // release the caller's memory
	p.problems = p.problems[:0]
	p.dev.products.Put(p)
}

// fill creates spans from the given panel of the given problem on, up to the capacity of the shared
// copy of op(B), and returns where the next ones start.
func (p *product) fill(next, panel int) (int, int) {
	mr, nr := p.dev.kernels.mr, p.dev.kernels.nr
	p.spans, p.packs = p.spans[:0], p.packs[:0]
	used := 0
	for next < len(p.problems) {
		q := &p.problems[next]
		if q.m == 0 || q.n == 0 {
			next++
			continue
		}
		s := span{problem: next, first: panel, panels: (q.n+nr-1)/nr - panel, offset: -1}
		terms := p.dev.kernels.elements(q.k)
		if q.m > blockPanels*mr && q.k > 0 {
			if s.panels = min(s.panels, (p.dev.packedElements-used)/(terms*nr)); s.panels == 0 {
				if used > 0 {
					break
				}
				s.panels = 1 // even one panel exceeds the limit
			}
			s.offset = used
			used += s.panels * terms * nr
			for k0 := 0; k0 < q.k; k0 += p.dev.kernels.blockK {
				for j := 0; j < s.panels; j += packPanels {
					p.packs = append(p.packs, packing{len(p.spans), j, min(packPanels, s.panels-j), k0})
				}
			}
		}
		p.spans = append(p.spans, s)
		if panel += s.panels; panel*nr >= q.n {
			next, panel = next+1, 0
		}
	}
	if used > len(p.packed) {
		p.packed = make([]float32, used)
	}
	return next, panel
}

// cut divides the spans into pieces: blocks of rows, and ranges of panels if there are too few
// blocks to keep all threads busy to the end.
func (p *product) cut() {
	mr, nr, threads := p.dev.kernels.mr, p.dev.kernels.nr, p.dev.Threads()
	work, blocks := 0, 0
	for _, s := range p.spans {
		q := &p.problems[s.problem]
		// Packing an element costs about as much as 16 multiply-adds.
		work += s.panels * nr * q.k * (q.m + 16)
		blocks += (q.m + blockPanels*mr - 1) / (blockPanels * mr)
	}
	split := 1
	if work < smallWork || p.dev.pool.busy() { // busy: a product within a loop, as in attention
		threads = 1
	}
	if threads > 1 && blocks > 0 {
		split = (4*threads + blocks - 1) / blocks
	}
	p.pieces = p.pieces[:0]
	for i, s := range p.spans {
		q := &p.problems[s.problem]
		rowPanels := (q.m + mr - 1) / mr
		nb := (rowPanels + blockPanels - 1) / blockPanels
		if len(p.spans) == 1 && nb > 1 {
			nb = min(rowPanels, (nb+threads-1)/threads*threads) // equal shares
		}
		ns := min(split, s.panels)
		for b := range nb {
			row, end := rowPanels*b/nb*mr, min(q.m, rowPanels*(b+1)/nb*mr)
			for j := range ns {
				first := s.panels * j / ns
				p.pieces = append(p.pieces, piece{i, row, end - row, s.first + first, s.panels*(j+1)/ns - first})
			}
		}
	}
	// The largest first, so that no worker still has a large piece when the others have finished.
	if threads > 1 {
		slices.SortStableFunc(p.pieces, func(x, y piece) int { return cmp.Compare(y.rows*y.panels, x.rows*x.panels) })
	}
}

func (p *product) packOne(i int) {
	g := p.packs[i]
	s := p.spans[g.span]
	q := &p.problems[s.problem]
	kernels := p.dev.kernels
	nr := kernels.nr
	kc := min(kernels.blockK, q.k-g.k0)
	column := (s.first + g.first) * nr
	dst := p.packed[s.offset+kernels.elements(g.k0)*s.panels*nr+g.first*nr*kernels.elements(kc):]
	work := p.dev.scratch.Get()
	q.packB(kernels, dst, column, min(g.panels*nr, q.n-column), g.k0, kc, work)
	p.dev.scratch.Put(work)
}

// packA packs n rows, from row0, and kc terms, from k0, of op(A).
func (q *problem) packA(s *kernelSet, dst []float32, row0, n, k0, kc int, work *scratch) {
	if q.halvesA != nil {
		s.packHalves(false, dst, q.halvesA, q.lda, !q.transA, row0, n, k0, kc, work.edge[:], work.wide[:])
	} else {
		s.packA(dst, q.a, q.lda, q.transA, row0, n, k0, kc, work.edge[:])
	}
}

// packB packs n columns, from column0, and kc terms, from k0, of op(B).
func (q *problem) packB(s *kernelSet, dst []float32, column0, n, k0, kc int, work *scratch) {
	if q.halves != nil {
		s.packHalves(true, dst, q.halves, q.ldb, q.transB, column0, n, k0, kc, work.edge[:], work.wide[:])
	} else {
		s.packB(dst, q.b, q.ldb, q.transB, column0, n, k0, kc, work.edge[:])
	}
}

func (p *product) computeOne(i int) {
	t := p.pieces[i]
	s := p.spans[t.span]
	q := &p.problems[s.problem]
	kernels := p.dev.kernels
	mr, nr := kernels.mr, kernels.nr
	if q.k == 0 {
		if !q.add {
			for r := range t.rows {
				from, to := (t.row+r)*q.ldc+t.first*nr, (t.row+r)*q.ldc+min(q.n, (t.first+t.panels)*nr)
				if q.rounded != nil {
					clear(q.rounded[from:to])
				} else {
					clear(q.c[from:to])
				}
			}
		}
		return
	}
	work := p.dev.scratch.Get()
	defer p.dev.scratch.Put(work)
	padded := (t.rows + mr - 1) / mr * mr
	if q.rounded != nil {
		room(&work.sums, t.rows*t.panels*nr)
	}
	for from, to := 0, 0; from < q.k; from = to {
		to = min(q.k, from+depth*kernels.blockK)
		for k0 := from; k0 < to; k0 += kernels.blockK {
			kc := min(kernels.blockK, to-k0)
			q.packA(kernels, work.a[padded*kernels.elements(k0-from):], t.row, t.rows, k0, kc, work)
		}
		for j := t.first; j < t.first+t.panels; j++ {
			for k0 := from; k0 < to; k0 += kernels.blockK {
				p.multiply(t, j, k0, min(kernels.blockK, to-k0), work, work.a[padded*kernels.elements(k0-from):])
			}
		}
	}
	if q.rounded != nil {
		q.round(t, nr, work.sums)
	}
}

// round sets C of a piece to the product in sums, or with add adds it to C.
func (q *problem) round(t piece, nr int, sums []float32) {
	first := t.first * nr
	columns := min(t.panels*nr, q.n-first)
	for r := range t.rows {
		dst, x := q.rounded[(t.row+r)*q.ldc+first:][:columns], sums[r*t.panels*nr:][:columns]
		if q.add {
			addHalves(dst, x)
		} else {
			BF16(dst, x)
		}
	}
}

// multiply computes kc terms, from k0, of panel j of piece t, whose panels of op(A) are a.
func (p *product) multiply(t piece, j, k0, kc int, work *scratch, a []float32) {
	s := p.spans[t.span]
	q := &p.problems[s.problem]
	kernels := p.dev.kernels
	mr, nr := kernels.mr, kernels.nr
	size, add := kernels.elements(kc), q.add && q.rounded == nil || k0 > 0
	columns := min(nr, q.n-j*nr)
	b, ldb := work.b[:], nr
	switch {
	case s.offset >= 0:
		b = p.packed[s.offset+kernels.elements(k0)*s.panels*nr+(j-s.first)*nr*size:]
	case !q.transB && q.halves == nil && columns == nr && t.rows <= mr && kernels.precision == xpu.FP32:
		b, ldb = q.b[k0*q.ldb+j*nr:], q.ldb // read once: a copy would not pay
	default:
		q.packB(kernels, b, j*nr, columns, k0, kc, work)
	}
	if q.rounded != nil {
		kernels.multiply(t.rows, size, a, b, ldb, work.sums[(j-t.first)*nr:], t.panels*nr, add)
		return
	}
	c := q.c[t.row*q.ldc+j*nr:]
	if columns == nr {
		kernels.multiply(t.rows, size, a, b, ldb, c, q.ldc, add)
		return
	}
	for r := 0; r < t.rows; r += mr {
		rows, c := min(mr, t.rows-r), c[r*q.ldc:]
		kernels.multiply(rows, size, a[r*size:], b, ldb, work.tile[:], nr, false)
		for i := range rows {
			d, x := c[i*q.ldc:][:columns], work.tile[i*nr:][:columns]
			if !add {
				copy(d, x)
				continue
			}
			for l, v := range x {
				d[l] += v
			}
		}
	}
}
