package onednn

import (
	"runtime"
	"unsafe"

	"mula/xpu"
	"mula/xpu/cpu"
)

const (
	// tileRows, tileColumns and blockK limit the tiles passed to the library. blockK, and termStep,
	// to whose multiples the last terms are padded, determine the bits of every product and must
	// never change.
	tileRows, tileColumns, blockK, termStep = 256, 256, 256, 32
	// leastRows is the smallest number of rows of a tile that is divided to give all threads work.
	leastRows = 32
	// smallWork is the number of multiply-adds below which waking a thread costs more than it
	// saves.
	smallWork = 1 << 19
)

// product executes one call of a method: independent matrix products, in rounds that have space for
// the copies of their operands. It is reused with its memory.
type product struct {
	dev      *Device
	problems []problem
	tiles    []operand // tiles of the problems of a round
	copies   []int     // indices of the tiles that are copied
	pieces   []piece
	space    []float32
	// copies[i]; stored here, like compute, because a method value for each call would be an
	// allocation
	copyTile func(int)
	compute  func(int) // pieces[i]
}

// problem is C = op(A)·op(B), or with add C += op(A)·op(B).
type problem struct {
	m, n, k        int
	a, b, c        []float32
	lda, ldb, ldc  int
	transA, transB bool
	add            bool

	rows       int // rows of its tiles
	atA, atB   int // start in product.tiles of its tiles of op(A), row by row, and of op(B), column by column
	kb, mb, nb int // number of blocks of terms, rows and columns
}

// operand is a tile of op(A) or op(B) as stored, either in its place or copied to product.space and
// padded with zeros.
type operand struct {
	src           []float32
	ld            int
	lines, length int // as stored
	padded        int // length of a copied line; 0 if the tile is used in its place
	paddedLines   int
	offset        int // offset in product.space, in bytes
}

// piece is some tiles of one row of tiles of a problem's C.
type piece struct{ problem, row, first, count int }

// MatMul computes dst = a·b, or dst += a·b; see [xpu.Products].
func (d *Device) MatMul(dst, a, b xpu.Tensor, o xpu.MatMulOptions) {
	xpu.CheckMatMul(dst, a, b)
	lda, transA, _ := a.Stored()
	ldb, transB, _ := b.Stored()
	ldc, _, _ := dst.Stored()
	p := d.product()
	p.add(problem{m: dst.Dim(0), n: dst.Dim(1), k: a.Dim(1), a: a.Floats(), b: b.Floats(), c: dst.Floats(), lda: lda,
		ldb: ldb, ldc: ldc, transA: transA, transB: transB, add: o.Accumulate})
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
			p.add(problem{m: m, n: n, k: k, a: a.Floats()[row*k:], b: b.Floats()[g*k*n:], c: dst.Floats()[row*n:],
				lda: k, ldb: ldb, ldc: n, transB: transB, add: o.Accumulate})
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
			p.add(problem{m: m, n: n, k: k, a: a.Floats()[row*m:], b: b.Floats()[row*n:], c: dst.Floats()[g*m*n:],
				lda: m, ldb: n, ldc: n, transA: true, add: o.Accumulate})
		}
		row += k
	}
	p.run()
}

func (d *Device) product() *product {
	p := d.products.Get()
	if p.dev == nil {
		p.dev, p.copyTile, p.compute = d, p.copyOne, p.computeOne
	}
	return p
}

// add adds a problem, divided into several if the copies of its operands are too large for a round.
func (p *product) add(q problem) {
	if q.m == 0 || q.n == 0 {
		return
	}
	if q.k == 0 {
		for i := 0; i < q.m && !q.add; i++ {
			clear(q.c[i*q.ldc:][:q.n])
		}
		return
	}
	line := 4 * pad(q.k, termStep)
	rows := max(1, p.dev.space/3/line/tileRows) * tileRows
	columns := max(1, p.dev.space/3/line/tileColumns) * tileColumns
	for i := 0; i < q.m; i += rows {
		for j := 0; j < q.n; j += columns {
			s := q
			s.m, s.n = min(rows, q.m-i), min(columns, q.n-j)
			s.a, s.b, s.c = s.a[place(q.transA, i, 0, q.lda):], s.b[place(q.transB, 0, j, q.ldb):], s.c[i*q.ldc+j:]
			p.problems = append(p.problems, s)
		}
	}
}

// place returns the index in x of element (i, j) of op(x).
func place(trans bool, i, j, ld int) int {
	if trans {
		i, j = j, i
	}
	return i*ld + j
}

// pad returns the next multiple of step.
func pad(n, step int) int { return (n + step - 1) / step * step }

// size returns the number of rows or columns of the tile that holds n. It has few different values,
// so that the library makes few kernels, and no very small ones, for which the library has kernels
// that add in another order.
func size(n int) int {
	if n <= 8 {
		return 8
	}
	return pad(n, 16)
}

// run solves the problems and returns p for reuse.
func (p *product) run() {
	for next := 0; next < len(p.problems); {
		first := next
		p.tiles, p.copies = p.tiles[:0], p.copies[:0]
		used, work := 0, 0
		for next < len(p.problems) && (next == first || used < p.dev.space/3) {
			work += p.problems[next].m * p.problems[next].n * p.problems[next].k
			used = p.lay(&p.problems[next], used)
			next++
		}
		if used > 4*(len(p.space)-16) {
			p.space = make([]float32, used/4+16)
		}
		p.cut(first, next, work)
		p.dev.Parallel(len(p.copies), p.copyTile)
		p.dev.Parallel(len(p.pieces), p.compute)
	}
	clear(p.problems) // release the caller's memory
	clear(p.tiles)
	p.problems = p.problems[:0]
	p.dev.products.Put(p)
}

// lay lists the tiles of a problem's operands. Copies follow the first used bytes of p.space; it
// returns where they end.
func (p *product) lay(q *problem, used int) int {
	q.rows = tileRows
	for q.rows > leastRows && (q.m+q.rows-1)/q.rows*((q.n+tileColumns-1)/tileColumns) < 2*p.dev.Threads() &&
		q.m*q.n*q.k > smallWork {
		q.rows /= 2
	}
	q.kb, q.mb, q.nb = (q.k+blockK-1)/blockK, (q.m+q.rows-1)/q.rows, (q.n+tileColumns-1)/tileColumns
	q.atA = len(p.tiles)
	for i := 0; i < q.m; i += q.rows {
		for k := 0; k < q.k; k += blockK {
			used = p.layTile(q.a[place(q.transA, i, k, q.lda):], q.lda, q.transA, min(q.rows, q.m-i),
				min(blockK, q.k-k), used)
		}
	}
	q.atB = len(p.tiles)
	for j := 0; j < q.n; j += tileColumns {
		for k := 0; k < q.k; k += blockK {
			used = p.layTile(q.b[place(q.transB, k, j, q.ldb):], q.ldb, !q.transB, min(tileColumns, q.n-j),
				min(blockK, q.k-k), used)
		}
	}
	return used
}

// layTile adds a tile of n rows of op(A), or columns of op(B), and the given number of terms. trans
// means that each stored line belongs to one term.
func (p *product) layTile(src []float32, ld int, trans bool, n, terms, used int) int {
	t := operand{src: src, ld: ld, lines: n, length: terms, paddedLines: size(n), padded: pad(terms, termStep)}
	if trans {
		t.lines, t.length, t.paddedLines, t.padded = t.length, t.lines, t.padded, t.paddedLines
	}
	if p.dev.precision == xpu.FP32 && t.lines == t.paddedLines && t.length == t.padded {
		t.padded = 0
	} else {
		t.offset = used
		used += pad(t.paddedLines*t.padded*p.dev.elementBytes(), 64)
		p.copies = append(p.copies, len(p.tiles))
	}
	p.tiles = append(p.tiles, t)
	return used
}

func (d *Device) elementBytes() int {
	if d.dataType == typeBF16 {
		return 2
	}
	return 4
}

// cut divides problems into pieces, several for each thread.
func (p *product) cut(first, end, work int) {
	tiles := 0
	for _, q := range p.problems[first:end] {
		tiles += q.mb * q.nb
	}
	most := tiles // maximum number in a piece
	if threads := p.dev.Threads(); threads > 1 && work >= smallWork {
		most = max(1, tiles/(4*threads))
	}
	p.pieces = p.pieces[:0]
	for i := first; i < end; i++ {
		q := &p.problems[i]
		for row := range q.mb {
			for j := 0; j < q.nb; j += most {
				p.pieces = append(p.pieces, piece{i, row, j, min(most, q.nb-j)})
			}
		}
	}
}

// address returns the address of an offset in p.space.
func (p *product) address(offset int) unsafe.Pointer {
	base := unsafe.Pointer(&p.space[0])
	return unsafe.Add(base, int(-uintptr(base)&63)+offset)
}

// copyOne copies a tile to p.space, rounded if the precision requires it, and pads it with zeros.
func (p *product) copyOne(i int) {
	t := &p.tiles[p.copies[i]]
	if p.dev.dataType == typeBF16 {
		dst := unsafe.Slice((*uint16)(p.address(t.offset)), t.paddedLines*t.padded)
		for line := range t.lines {
			d := dst[line*t.padded:][:t.padded]
			cpu.BF16(d[:t.length], t.src[line*t.ld:][:t.length])
			clear(d[t.length:])
		}
		clear(dst[t.lines*t.padded:])
		return
	}
	dst := unsafe.Slice((*float32)(p.address(t.offset)), t.paddedLines*t.padded)
	for line := range t.lines {
		d := dst[line*t.padded:][:t.padded]
		clear(d[copy(d[:t.length], t.src[line*t.ld:]):])
		if p.dev.precision == xpu.BF16 {
			cpu.RoundBF16(d)
		}
	}
	clear(dst[t.lines*t.padded:])
}

// computeOne computes the tiles of a piece, each over all terms.
func (p *product) computeOne(i int) {
	t := p.pieces[i]
	q := &p.problems[t.problem]
	w := p.dev.workers.Get()
	defer p.dev.workers.Put(w)
	if w.tile == nil {
		w.tile = make([]float32, tileRows*tileColumns)
	}
	for j := t.first; j < t.first+t.count; j++ {
		for k := range q.kb {
			p.multiply(q, t.row, j, k, w)
		}
	}
	runtime.KeepAlive(p)
}

// multiply adds the terms of block k to a tile of C, or sets the tile to them.
func (p *product) multiply(q *problem, row, column, k int, w *worker) {
	l := p.dev.library
	a, b := &p.tiles[q.atA+row*q.kb+k], &p.tiles[q.atB+column*q.kb+k]
	rows, columns := min(q.rows, q.m-row*q.rows), min(tileColumns, q.n-column*tileColumns)
	s := shape{dataType: p.dev.dataType, transA: q.transA, transB: q.transB, m: size(rows), n: size(columns),
		k: pad(min(blockK, q.k-k*blockK), termStep), lda: a.leading(), ldb: b.leading(), ldc: q.ldc, add: q.add ||
			k > 0}
	c, add := q.c[row*q.rows*q.ldc+column*tileColumns:], s.add
	if s.m == rows && s.n == columns {
		if primitive := l.primitive(s, w); primitive != nil {
			l.run(primitive, w, p.start(a), p.start(b), uintptr(unsafe.Pointer(&c[0])))
			return
		}
	}
	s.ldc, s.add = s.n, false
	x, y := p.start(a), p.start(b)
	primitive := l.primitive(s, w)
	if primitive == nil {
		s, x, y = p.spread(s, a, b, w)
		primitive = l.primitive(s, w)
	}
	l.run(primitive, w, x, y, uintptr(unsafe.Pointer(&w.tile[0])))
	for i := range rows {
		d, v := c[i*q.ldc:][:columns], w.tile[i*s.ldc:][:columns]
		if !add {
			copy(d, v)
			continue
		}
		for j := range v {
			d[j] += v[j]
		}
	}
}

// leading returns the leading dimension of the tile that the library reads.
func (t *operand) leading() int {
	if t.padded > 0 {
		return t.padded
	}
	return t.ld
}

// start returns the address of the tile that the library reads.
func (p *product) start(t *operand) uintptr {
	if t.padded > 0 {
		return uintptr(p.address(t.offset))
	}
	return uintptr(unsafe.Pointer(&t.src[0]))
}

// spread copies the operands of a shape that must not be used to the operands of a full tile, and
// returns its shape and their addresses.
func (p *product) spread(s shape, a, b *operand, w *worker) (whole shape, x, y uintptr) {
	whole = full(s.dataType, s.k)
	if w.a == nil {
		w.a, w.b = make([]float32, tileRows*blockK), make([]float32, blockK*tileColumns)
	}
	p.spreadOne(w.a, whole.lda, 1, a, s.transA)
	p.spreadOne(w.b, 1, whole.ldb, b, !s.transB)
	return whole, uintptr(unsafe.Pointer(&w.a[0])), uintptr(unsafe.Pointer(&w.b[0]))
}

// spreadOne copies a tile to memory with the given distances between its rows (columns, for op(B))
// and between its terms; the rest is zero. trans means that each stored line belongs to one term.
func (p *product) spreadOne(dst []float32, row, term int, t *operand, trans bool) {
	clear(dst)
	if trans {
		row, term = term, row
	}
	if p.dev.dataType == typeBF16 {
		to, from := unsafe.Slice((*uint16)(unsafe.Pointer(&dst[0])),
			2*len(dst)), unsafe.Slice((*uint16)(p.address(t.offset)), t.paddedLines*t.padded)
		for i := range t.lines {
			for j, v := range from[i*t.padded:][:t.length] {
				to[i*row+j*term] = v
			}
		}
		return
	}
	from := t.src
	if t.padded > 0 {
		from = unsafe.Slice((*float32)(p.address(t.offset)), t.paddedLines*t.padded)
	}
	for i := range t.lines {
		for j, v := range from[i*t.leading():][:t.length] {
			dst[i*row+j*term] = v
		}
	}
}
