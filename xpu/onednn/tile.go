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
// stored as in [xpu.Device.MatMul].
type shape struct {
	dataType       int // type of A and B; C is float32
	transA, transB bool
	m, n, k        int
	lda, ldb, ldc  int
	add            bool
}

// A primitive is the library's primitive for a shape. The caller provides its scratchpad, because
// all primitives created by a thread share the library's own.
type primitive struct {
	handle     uintptr
	matrices   [3]descriptor
	scratchpad uintptr // descriptor
	bytes      int     // size of the scratchpad
	name       string
	free       freelist.List[execution]
}

// A descriptor describes a matrix to the library.
type descriptor struct {
	address uintptr
	memory  []uint64 // in version 2, the memory at the address
}

// An execution is the state for calls of a primitive: memory objects that contain the addresses of
// its matrices.
type execution struct {
	places    [4]uintptr // addresses of the matrices of the last call
	arguments [4]struct {
		kind   int32
		memory uintptr
	}
}

// A worker is the state that a thread needs to call primitives, one after the other.
type worker struct {
	stream     uintptr
	scratchpad []uint64
	tile       []float32 // tile of C, if the place of the result is too narrow
	a, b       []float32 // operands of a full tile
	call       [4]uintptr
}

// primitive returns the primitive for a shape, or nil if it does not agree with the reference.
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

// make creates the primitive of a shape.
func (l *library) make(s shape) (_ *primitive, err error) {
	p := &primitive{}
	for i, x := range [3]struct {
		trans             bool
		rows, columns, ld int
		dataType          int
	}{{s.transA, s.m, s.k, s.lda, s.dataType}, {s.transB, s.k, s.n, s.ldb, s.dataType}, {false, s.m, s.n, s.ldc,
		typeF32}} {
		if p.matrices[i], err = l.describe(x.trans, x.rows, x.columns, x.ld, x.dataType); err != nil {
			return nil, err
		}
	}
	attributes, err := l.attributes(s.add)
	if err != nil {
		return nil, err
	}
	defer l.call("dnnl_primitive_attr_destroy", attributes)
	var description uintptr // kept, because it contains the scratchpad's
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

// describe creates the descriptor of a matrix, or of the transpose of a stored one.
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

// attributes returns attributes with a scratchpad of the caller, and with add an addition of the
// result to C.
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

// run computes the product of the matrices at these addresses. The matrices must stay alive until
// it returns.
func (l *library) run(p *primitive, w *worker, a, b, c uintptr) {
	if err := l.tryRun(p, w, a, b, c); err != nil {
		// all arguments were valid when the primitive was checked: out of memory
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
	// arguments in a slice do not cause an allocation
	w.call = [4]uintptr{p.handle, w.stream, uintptr(count), uintptr(unsafe.Pointer(&x.arguments[0]))}
	status, _, _ := sharedlib.Call(l.execute, w.call[:]...)
	runtime.KeepAlive(w.scratchpad)
	if int32(status) != 0 {
		return &statusError{"dnnl_primitive_execute", int32(status)}
	}
	return nil
}

// aligned returns the first address in memory that is a multiple of 64 bytes.
func aligned[T any](memory []T) uintptr {
	return (uintptr(unsafe.Pointer(&memory[0])) + 63) &^ 63
}

// probes is the number of different rows of A and columns of B with which a primitive is checked.
const probes = 7

// reference identifies the results that all primitives of a data type must have for the probes of k
// terms.
type reference struct{ dataType, k int }

// errPlace reports that an element's bits depend on its position.
var errPlace = errors.New("the bits of an element depend on its place in the product")

// full returns the shape of a full tile of k terms, which computes the reference.
func full(dataType, k int) shape {
	return shape{dataType: dataType, m: tileRows, n: tileColumns, k: k, lda: k, ldb: tileColumns, ldc: tileColumns}
}

// start returns the contents of C before a primitive is checked.
func start(i, j int) float32 { return 1000 * (float32(i%probes) - float32(j%probes)/3) }

// agree multiplies matrices of a few different rows and columns, repeated at all positions, and
// compares every element with the reference. This finds kernels that add in another order at some
// positions, or in another order than other shapes.
func (l *library) agree(s shape, p *primitive, w *worker) error {
	var rows, columns [probes][blockK]float32
	random := rand.New(rand.NewPCG(uint64(s.k), 1))
	for k := range s.k {
		for i := range probes {
			// Numbers of many sizes, so that nearly every addition rounds and another order changes
			// bits, in bfloat16 too.
			rows[i][k] = float32(math.Ldexp(random.Float64()-.5, random.IntN(12)))
			columns[i][k] = float32(math.Ldexp(random.Float64()-.5, random.IntN(12)))
		}
	}
	memory := func(size int) []float32 { // bfloat16 uses half of this
		x := make([]float32, size+16)
		return x[(aligned(x)-uintptr(unsafe.Pointer(&x[0])))/4:]
	}
	c := memory(s.m * s.ldc)
	// If a tile has fewer rows than there are probes, each probe is used at each position; the same
	// applies to columns.
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

// operandSize returns the number of elements of n rows or columns with the given number of terms.
func operandSize(trans bool, n, terms, ld int) int {
	if trans {
		return terms * ld
	}
	return n * ld
}

// fill writes the probes, from the given one on, to n rows or columns of an operand. trans means
// that each stored line belongs to one term.
func fill(x []float32, values *[probes][blockK]float32, first int, trans bool, n, terms, ld, dataType int) {
	bits := unsafe.Slice((*uint16)(unsafe.Pointer(&x[0])), 2*len(x))
	for i := range n {
		for k, v := range values[(first+i)%probes][:terms] {
			if at := place(trans, i, k, ld); dataType == typeF32 {
				x[at] = v
			} else {
				bits[at] = uint16(math.Float32bits(v) >> 16) // any bfloat16 works
			}
		}
	}
}

// compare compares the elements of c with the reference, which is the result of the first shape
// with the same number of terms.
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

// prepare computes the references of a data type: full tiles of all numbers of terms. It returns
// the name of their implementation.
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

// text converts a C string.
func text(address uintptr) string {
	bytes := unsafe.Slice(*(**byte)(unsafe.Pointer(&address)), 256)
	end := slices.Index(bytes, 0)
	return string(bytes[:max(0, end)])
}
