package onednn

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"unsafe"

	"mula/internal/freelist"
	"mula/internal/sharedlib"
)

// A shape is a product of the library, C = op(A)·op(B), or with add C += op(A)·op(B), of matrices
// stored as for [xpu.Device.MatMul].
type shape struct {
	dataType       int // of A and B; C is float32
	transA, transB bool
	m, n, k        int
	lda, ldb, ldc  int
	add            bool
}

// A primitive is what the library made of a shape. Its scratchpad belongs to the caller, because
// the library's own is one for all primitives of the thread that made them.
type primitive struct {
	handle     uintptr
	matrices   [3]descriptor
	scratchpad uintptr // descriptor
	bytes      int     // of the scratchpad
	name       string
	free       freelist.List[execution]
}

// A descriptor describes a matrix to the library.
type descriptor struct {
	address uintptr
	memory  []uint64 // of version 2, what stands at the address
}

// An execution is what one call of a primitive needs: memory objects, which say where its matrices
// are.
type execution struct {
	places    [4]uintptr // of the matrices of the last call
	arguments [4]struct {
		kind   int32
		memory uintptr
	}
}

// A worker is what a thread needs to call primitives, one after the other.
type worker struct {
	stream     uintptr
	scratchpad []uint64
	tile       []float32 // of C, where the place of the result is too narrow
	a, b       []float32 // operands of a whole tile
	call       [4]uintptr
}

// primitive returns what computes a shape, or nil where that does not agree with the reference.
func (l *library) primitive(s shape, w *worker) *primitive {
	l.mu.RLock()
	p, known := l.primitives[s]
	l.mu.RUnlock()
	if known {
		return p
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if p, known = l.primitives[s]; known {
		return p
	}
	p, err := l.make(s)
	if err != nil || strings.HasPrefix(p.name, "ref") || l.agree(s, p, w) != nil {
		// "ref": plain loops, a hundred times slower
		p = nil
	}
	l.primitives[s] = p
	return p
}

// make makes the primitive of a shape.
func (l *library) make(s shape) (_ *primitive, err error) {
	p := &primitive{}
	for i, x := range [3]struct {
		trans             bool
		rows, columns, ld int
		dataType          int
	}{{s.transA, s.m, s.k, s.lda, s.dataType}, {s.transB, s.k, s.n, s.ldb, s.dataType}, {false, s.m, s.n, s.ldc, typeF32}} {
		if p.matrices[i], err = l.describe(x.trans, x.rows, x.columns, x.ld, x.dataType); err != nil {
			return nil, err
		}
	}
	attributes, err := l.attributes(s.add)
	if err != nil {
		return nil, err
	}
	defer l.call("dnnl_primitive_attr_destroy", attributes)
	var description uintptr // is kept: that of the scratchpad is a part of it
	a, b, c := p.matrices[0].address, p.matrices[1].address, p.matrices[2].address
	if l.major == 2 {
		operation := make([]uint64, descriptorBytes/8)
		if err := l.call("dnnl_matmul_desc_init", uintptr(unsafe.Pointer(&operation[0])), a, b, 0, c); err != nil {
			return nil, err
		}
		err = l.call("dnnl_primitive_desc_create", uintptr(unsafe.Pointer(&description)),
			uintptr(unsafe.Pointer(&operation[0])), attributes, l.engine, 0)
	} else {
		err = l.call("dnnl_matmul_primitive_desc_create", uintptr(unsafe.Pointer(&description)), l.engine, a, b, 0, c,
			attributes)
	}
	if err != nil {
		return nil, err
	}
	var name uintptr
	if err := l.call("dnnl_primitive_desc_query", description, queryName, 0,
		uintptr(unsafe.Pointer(&name))); err != nil {
		return nil, err
	}
	p.name = text(name)
	if err := l.call("dnnl_primitive_create", uintptr(unsafe.Pointer(&p.handle)), description); err != nil {
		return nil, err
	}
	if p.scratchpad, _, _ = sharedlib.Call(l.symbols["dnnl_primitive_desc_query_md"], description, queryScratchpad,
		0); p.scratchpad != 0 {
		bytes, _, _ := sharedlib.Call(l.symbols["dnnl_memory_desc_get_size"], p.scratchpad)
		p.bytes = int(bytes)
	}
	return p, nil
}

// describe describes a matrix, or the transpose of a stored one.
func (l *library) describe(trans bool, rows, columns, ld, dataType int) (d descriptor, err error) {
	sizes, strides := [2]int64{int64(rows), int64(columns)}, [2]int64{int64(ld), 1}
	if trans {
		strides = [2]int64{1, int64(ld)}
	}
	if l.major == 2 {
		d.memory = make([]uint64, descriptorBytes/8)
		d.address = uintptr(unsafe.Pointer(&d.memory[0])) // Go's heap does not move
		return d, l.call("dnnl_memory_desc_init_by_strides", d.address, 2, uintptr(unsafe.Pointer(&sizes[0])),
			uintptr(dataType), uintptr(unsafe.Pointer(&strides[0])))
	}
	return d, l.call("dnnl_memory_desc_create_with_strides", uintptr(unsafe.Pointer(&d.address)), 2,
		uintptr(unsafe.Pointer(&sizes[0])), uintptr(dataType),
		uintptr(unsafe.Pointer(&strides[0])))
}

// attributes says that the scratchpad is the caller's, and with add that the result is added to
// what stands in its place.
func (l *library) attributes(add bool) (attributes uintptr, err error) {
	if err := l.call("dnnl_primitive_attr_create", uintptr(unsafe.Pointer(&attributes))); err != nil {
		return 0, err
	}
	if err := l.call("dnnl_primitive_attr_set_scratchpad_mode", attributes, scratchpadUser); err != nil || !add {
		return attributes, err
	}
	var after uintptr
	if err := l.call("dnnl_post_ops_create", uintptr(unsafe.Pointer(&after))); err != nil {
		return attributes, err
	}
	defer l.call("dnnl_post_ops_destroy", after)
	if status := l.sum(after, 1, 0, typeF32); status != 0 {
		return attributes, &statusError{"dnnl_post_ops_append_sum", status}
	}
	return attributes, l.call("dnnl_primitive_attr_set_post_ops", attributes, after)
}

// run computes the product of matrices at these addresses. What stands there must be alive until it
// returns.
func (l *library) run(p *primitive, w *worker, a, b, c uintptr) {
	if err := l.tryRun(p, w, a, b, c); err != nil {
		// all arguments were right when the primitive was checked: no memory is left
		panic(fmt.Sprintf("onednn: %v", err))
	}
}

func (l *library) tryRun(p *primitive, w *worker, a, b, c uintptr) error {
	if w.stream == 0 {
		if err := l.call("dnnl_stream_create", uintptr(unsafe.Pointer(&w.stream)), l.engine,
			streamDefault); err != nil {
			return err
		}
	}
	x := p.free.Get()
	defer p.free.Put(x)
	count := 3
	if p.bytes > 0 {
		count = 4
		if size := p.bytes/8 + 16; len(w.scratchpad) < size {
			w.scratchpad = make([]uint64, size)
		}
	}
	if x.arguments[0].memory == 0 {
		for i, kind := range []int32{argSource, argWeights, argDestination, argPad}[:count] {
			description := p.scratchpad
			if i < 3 {
				description = p.matrices[i].address
			}
			x.arguments[i].kind = kind
			if err := l.call("dnnl_memory_create", uintptr(unsafe.Pointer(&x.arguments[i].memory)), description,
				l.engine, 0); err != nil {
				return err
			}
		}
	}
	places := [4]uintptr{a, b, c}
	if count == 4 {
		places[3] = aligned(w.scratchpad)
	}
	for i, place := range places[:count] {
		if place == x.places[i] {
			continue
		}
		x.places[i] = place
		w.call[0], w.call[1] = x.arguments[i].memory, place
		if status, _, _ := sharedlib.Call(l.handle, w.call[:2]...); int32(status) != 0 {
			return &statusError{"dnnl_memory_set_data_handle", int32(status)}
		}
	}
	// arguments in a slice are no allocation
	w.call = [4]uintptr{p.handle, w.stream, uintptr(count), uintptr(unsafe.Pointer(&x.arguments[0]))}
	status, _, _ := sharedlib.Call(l.execute, w.call[:]...)
	runtime.KeepAlive(w.scratchpad)
	if int32(status) != 0 {
		return &statusError{"dnnl_primitive_execute", int32(status)}
	}
	return nil
}

// aligned is the first address in memory that is a multiple of 64 bytes.
func aligned[T any](memory []T) uintptr {
	return (uintptr(unsafe.Pointer(&memory[0])) + 63) &^ 63
}

// probes is the number of different rows of A and columns of B with which a primitive is tried.
const probes = 7

// reference names the numbers that all primitives of a data type must give for the probes of so
// many terms.
type reference struct{ dataType, k int }

// errPlace says that an element's bits depend on its place.
var errPlace = errors.New("the bits of an element depend on its place in the product")

// full is the shape of a whole tile of so many terms, which gives the reference.
func full(dataType, k int) shape {
	return shape{dataType: dataType, m: tileRows, n: tileColumns, k: k, lda: k, ldb: tileColumns, ldc: tileColumns}
}

// start is what stands in C before a primitive is tried.
func start(i, j int) float32 { return 1000 * (float32(i%probes) - float32(j%probes)/3) }

// agree multiplies matrices of a few different rows and columns, again and again in all places, and
// compares every element with the reference: so it finds a kernel that adds up in another order in
// some places, or another kernel than that of other shapes.
func (l *library) agree(s shape, p *primitive, w *worker) error {
	var rows, columns [probes][blockK]float32
	random := rand.New(rand.NewPCG(uint64(s.k), 1))
	for k := range s.k {
		for i := range probes {
			// Numbers of many sizes, so that nearly every addition rounds and another order shows,
			// in bfloat16 too.
			rows[i][k] = float32(math.Ldexp(random.Float64()-.5, random.IntN(12)))
			columns[i][k] = float32(math.Ldexp(random.Float64()-.5, random.IntN(12)))
		}
	}
	memory := func(size int) []float32 { // in bfloat16 half of it is used
		x := make([]float32, size+16)
		return x[(aligned(x)-uintptr(unsafe.Pointer(&x[0])))/4:]
	}
	c := memory(s.m * s.ldc)
	// Where a tile has fewer rows than there are probes, each has its turn in each place, and so
	// with columns.
	for first := 0; first < probes; first += max(1, s.m) {
		a := memory(operandSize(s.transA, s.m, s.k, s.lda))
		fill(a, &rows, first, s.transA, s.m, s.k, s.lda, s.dataType)
		for second := 0; second < probes; second += max(1, s.n) {
			b := memory(operandSize(!s.transB, s.n, s.k, s.ldb))
			fill(b, &columns, second, !s.transB, s.n, s.k, s.ldb, s.dataType)
			for i := range s.m {
				for j := range s.n {
					c[i*s.ldc+j] = start(first+i, second+j)
				}
			}
			if err := l.tryRun(p, w, uintptr(unsafe.Pointer(&a[0])), uintptr(unsafe.Pointer(&b[0])),
				uintptr(unsafe.Pointer(&c[0]))); err != nil {
				return err
			}
			runtime.KeepAlive(a)
			runtime.KeepAlive(b)
			if err := l.compare(s, c, first, second); err != nil {
				return err
			}
		}
	}
	return nil
}

// operandSize is the number of elements that n rows or columns of so many terms take.
func operandSize(trans bool, n, terms, ld int) int {
	if trans {
		return terms * ld
	}
	return n * ld
}

// fill writes the probes from the given one on to n rows or columns of an operand; trans says that
// a line of it as stored is of one term.
func fill(x []float32, values *[probes][blockK]float32, first int, trans bool, n, terms, ld, dataType int) {
	bits := unsafe.Slice((*uint16)(unsafe.Pointer(&x[0])), 2*len(x))
	for i := range n {
		for k, v := range values[(first+i)%probes][:terms] {
			if at := place(trans, i, k, ld); dataType == typeF32 {
				x[at] = v
			} else {
				bits[at] = uint16(math.Float32bits(v) >> 16) // any bfloat16 will do
			}
		}
	}
}

// compare compares the elements of c with the reference, which is the result of the first shape of
// so many terms.
func (l *library) compare(s shape, c []float32, first, second int) error {
	r := reference{s.dataType, s.k}
	want, known := l.references[r]
	if !known {
		for i := range want {
			copy(want[i][:], c[i*s.ldc:])
		}
		l.references[r] = want
	}
	for i := range s.m {
		for j := range s.n {
			v := want[(first+i)%probes][(second+j)%probes]
			if s.add {
				v += start(first+i, second+j)
			}
			if c[i*s.ldc+j] != v {
				return errPlace
			}
		}
	}
	return nil
}

// prepare makes the references of a data type: whole tiles of all numbers of terms. It says what
// implements them.
func (l *library) prepare(dataType int) (name string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var w worker
	for k := termStep; k <= blockK; k += termStep {
		s := full(dataType, k)
		p := l.primitives[s]
		if p == nil {
			if p, err = l.make(s); err != nil {
				return "", err
			}
			if err := l.agree(s, p, &w); err != nil {
				return "", fmt.Errorf("%s, %d terms: %w", p.name, k, err)
			}
			l.primitives[s] = p
		}
		name = p.name
	}
	return name, nil
}

// text is a string of C.
func text(address uintptr) string {
	bytes := unsafe.Slice(*(**byte)(unsafe.Pointer(&address)), 256)
	end := slices.Index(bytes, 0)
	return string(bytes[:max(0, end)])
}
