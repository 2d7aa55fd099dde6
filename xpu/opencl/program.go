package opencl

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"unsafe"
)

// A Source is the text of a program in OpenCL C.
type Source struct {
	Name    string // for messages, such as probe.cl
	Text    string
	Options string // compiler options, such as "-cl-std=CL2.0 -DROWS=8"
}

// argumentInfo is an option of all builds: it preserves the types of kernel arguments.
const argumentInfo = "-cl-kernel-arg-info"

// A Program is a compiled source.
type Program struct {
	object
	context  *Context
	name     string
	log      string
	cached   bool
	cacheErr error
}

// A buildError reports a source that does not compile.
type buildError struct {
	Source string // name of the source
	Device string
	Log    string // compiler output
	Err    error
}

func (e *buildError) Error() string {
	text := fmt.Sprintf("opencl: %s does not compile for %s: %v", e.Source, e.Device, e.Err)
	if e.Log == "" {
		return text + "; the compiler reports no reason"
	}
	return text + "\n" + e.Log
}

func (e *buildError) Unwrap() error { return e.Err }

// Build compiles a source, or loads the result of an earlier build from cache, unless cache is nil.
// If the driver rejects a cached result, the source is compiled again. A result that cannot be
// cached is not an error; see [Program.CacheError].
func (c *Context) Build(ctx context.Context, s Source, cache *Cache) (*Program, error) {
	if err := ctx.Err(); err != nil {
		return nil, c.fail(err, "compiling %s", s.Name)
	}
	if strings.ContainsRune(s.Text, 0) || strings.ContainsRune(s.Options, 0) {
		return nil, fmt.Errorf("opencl: %s: source and options must not have zero bytes", s.Name)
	}
	parent, err := c.hold()
	if err != nil {
		return nil, c.fail(err, "compiling %s in this context", s.Name)
	}
	type result struct {
		program *Program
		err     error
	}
	done := make(chan result, 1)
	go func() {
		p, err := c.build(ctx, parent, s, cache)
		handlers().Restore()
		c.drop()
		done <- result{p, err}
	}()
	if r, ok := await(ctx, done); ok {
		return r.program, r.err
	}
	go func() { // a compilation cannot be cancelled
		if r := <-done; r.program != nil {
			r.program.Release()
		}
	}()
	return nil, c.fail(ctx.Err(), "compiling %s", s.Name)
}

type compilingKey struct{}

// WithCompiling returns a context with which [Context.Build] calls f before it compiles a source,
// which may take a minute. A cached program is not compiled. Several goroutines may call f at a
// time, and a Build that its context has ended may still call f.
func WithCompiling(ctx context.Context, f func(d *Device)) context.Context {
	return context.WithValue(ctx, compilingKey{}, f)
}

func (c *Context) build(ctx context.Context, parent uintptr, s Source, cache *Cache) (*Program, error) {
	s.Options = strings.TrimSpace(argumentInfo + " " + s.Options)
	var key cacheKey
	if cache != nil {
		key = c.device.cacheKey(s)
		if data := cache.load(key); data != nil {
			if p, err := c.compile(s, func(code *int32) (string, uintptr) {
				return "clCreateProgramWithBinary", c.withBinary(parent, data, code)
			}); err == nil {
				p.cached = true
				return p, nil
			}
		}
	}
	if compiling, ok := ctx.Value(compilingKey{}).(func(d *Device)); ok {
		compiling(c.device)
	}
	p, err := c.compile(s, func(code *int32) (string, uintptr) {
		text := []byte(s.Text + "\x00") // some drivers reject an empty source
		return "clCreateProgramWithSource", withPinned(text, func(inner **byte) uintptr {
			length := uintptr(len(text) - 1)
			return c.device.library.CreateProgramWithSource(parent, 1, inner, &length, code)
		})
	})
	if err != nil || cache == nil {
		return p, err
	}
	data, err := p.binary()
	if err == nil {
		err = cache.store(key, data)
	}
	p.cacheErr = err
	return p, nil
}

func (c *Context) withBinary(parent uintptr, data []byte, code *int32) uintptr {
	id, length, status := c.device.id, uintptr(len(data)), int32(0)
	return withPinned(data, func(inner **byte) uintptr {
		handle := c.device.library.CreateProgramWithBinary(parent, 1, &id, &length, inner, &status, code)
		if handle != 0 && *code == 0 && status != 0 {
			c.device.library.ReleaseProgram(handle)
			handle, *code = 0, status
		}
		return handle
	})
}

// withPinned calls f with the address of a pointer to data, and pins data during the call.
func withPinned[T any](data []byte, f func(inner **byte) T) T {
	var pin runtime.Pinner
	defer pin.Unpin()
	inner := &data[0]
	pin.Pin(inner)
	return f(&inner)
}

// compile creates a program and builds it.
func (c *Context) compile(s Source, create func(code *int32) (call string, handle uintptr)) (*Program, error) {
	l, code := c.device.library, new(int32)
	call, handle := create(code)
	if err := created(call, handle, *code); err != nil {
		return nil, &buildError{Source: s.Name, Device: c.device.Name, Err: err}
	}
	p := &Program{context: c, name: s.Name}
	p.start(handle, l.ReleaseProgram, &live.programs, &c.object)
	id, options := c.device.id, []byte(s.Options+"\x00")
	err := check("clBuildProgram", l.BuildProgram(handle, 1, &id, &options[0], 0, 0))
	log, logErr := askText("clGetProgramBuildInfo", func(size uintptr, value unsafe.Pointer, bytes *uintptr) int32 {
		return l.GetProgramBuildInfo(handle, c.device.id, programBuildLog, size, value, bytes)
	})
	if logErr != nil {
		log = ""
	}
	if err != nil {
		p.Release()
		return nil, &buildError{s.Name, c.device.Name, log, err}
	}
	p.log = log
	return p, nil
}

// Log returns the compiler output, for example warnings.
func (p *Program) Log() string { return p.log }

// Cached reports whether the program was loaded from the cache.
func (p *Program) Cached() bool { return p.cached }

// CacheError returns the error of caching the program, or nil.
func (p *Program) CacheError() error { return p.cacheErr }

// binary returns the program in the driver's binary format.
func (p *Program) binary() ([]byte, error) {
	handle, err := p.hold()
	if err != nil {
		return nil, err
	}
	defer p.drop()
	l := p.context.device.library
	info := func(what uint32) func(size uintptr, value unsafe.Pointer, bytes *uintptr) int32 {
		return func(size uintptr, value unsafe.Pointer, bytes *uintptr) int32 {
			return l.GetProgramInfo(handle, what, size, value, bytes)
		}
	}
	size, err := askNumber[uintptr]("clGetProgramInfo", info(programBinarySizes))
	if err != nil {
		return nil, err
	}
	if size == 0 || size > maxAnswer {
		return nil, fmt.Errorf("clGetProgramInfo: a binary of %d bytes", size)
	}
	data := make([]byte, size)
	code := withPinned(data, func(inner **byte) int32 {
		return info(programBinaries)(unsafe.Sizeof(*inner), unsafe.Pointer(inner), nil)
	})
	return data, check("clGetProgramInfo", code)
}

// A Kernel is a function of a program.
type Kernel struct {
	object
	context    *Context
	name       string
	parameters []parameter
	limit      int // maximum work-items of a group

	launching     sync.Mutex // arguments are state of the library's kernel
	value         uint64     // read by the library, like the sizes
	global, local [3]uintptr
}

// A parameter is a parameter of a kernel. Its strings are empty if the driver does not report them.
type parameter struct {
	space    string // global, local, or empty for a scalar
	typeName string
	known    bool
}

func (p parameter) String() string {
	if p.space != "" {
		return p.space + " " + p.typeName
	}
	return p.typeName
}

// Kernel returns the kernel with the given name.
func (p *Program) Kernel(name string) (*Kernel, error) {
	if strings.ContainsRune(name, 0) {
		return nil, fmt.Errorf("opencl: %s: a kernel's name must not have zero bytes", p.name)
	}
	parent, err := p.hold()
	if err != nil {
		return nil, fmt.Errorf("opencl: %s: kernel %s: the program: %w", p.name, name, err)
	}
	defer p.drop()
	d, code, text := p.context.device, new(int32), []byte(name+"\x00")
	handle := d.library.CreateKernel(parent, &text[0], code)
	if err := created("clCreateKernel", handle, *code); err != nil {
		return nil, fmt.Errorf("opencl: %s: kernel %s: %w", p.name, name, err)
	}
	k := &Kernel{context: p.context, name: name}
	k.start(handle, d.library.ReleaseKernel, &live.kernels, &p.object)
	if err := k.describe(handle); err != nil {
		k.Release()
		return nil, fmt.Errorf("opencl: %s: kernel %s: %w", p.name, name, err)
	}
	return k, nil
}

func (k *Kernel) describe(handle uintptr) error {
	d := k.context.device
	l := d.library
	group, err := askNumber[uintptr]("clGetKernelWorkGroupInfo", func(size uintptr, value unsafe.Pointer,
		bytes *uintptr) int32 {
		return l.GetKernelWorkGroupInfo(handle, d.id, kernelWorkGroupSize, size, value, bytes)
	})
	if err != nil {
		return err
	}
	k.limit = int(min(group, uintptr(d.MaxWorkGroup)))
	n, err := askNumber[uint32]("clGetKernelInfo", func(size uintptr, value unsafe.Pointer, bytes *uintptr) int32 {
		return l.GetKernelInfo(handle, kernelArguments, size, value, bytes)
	})
	if err != nil {
		return err
	}
	if n > 1<<10 {
		return fmt.Errorf("clGetKernelInfo: %d arguments", n)
	}
	k.parameters = make([]parameter, n)
	for i := range k.parameters {
		info := func(what uint32) func(size uintptr, value unsafe.Pointer, bytes *uintptr) int32 {
			return func(size uintptr, value unsafe.Pointer, bytes *uintptr) int32 {
				return l.GetKernelArgInfo(handle, uint32(i), what, size, value, bytes)
			}
		}
		space, err1 := askNumber[uint32]("clGetKernelArgInfo", info(argumentAddress))
		name, err2 := askText("clGetKernelArgInfo", info(argumentTypeName))
		if err1 != nil || err2 != nil {
			continue // a driver may not report them; then it checks sizes itself
		}
		p := parameter{typeName: name, known: true}
		switch space {
		case addressGlobal, addressConstant:
			p.space = "global"
		case addressLocal:
			p.space = "local"
		}
		k.parameters[i] = p
	}
	return nil
}

// An Argument is an argument of a kernel.
type Argument struct {
	space    string // like a parameter's
	typeName string // type of a scalar
	buffer   *Buffer
	bytes    int
	bits     uint64
}

func (a Argument) String() string {
	if a.space != "" {
		return a.space + " memory"
	}
	return a.typeName
}

// Global is a buffer argument.
func Global(b *Buffer) Argument {
	return Argument{space: "global", buffer: b, bytes: int(unsafe.Sizeof(uintptr(0)))}
}

// Local is an argument of local memory: the given number of bytes for each work-group.
func Local(bytes int) Argument { return Argument{space: "local", bytes: bytes} }

// Scalar is a number argument: in OpenCL C int, uint, long, ulong or float.
func Scalar[T int32 | uint32 | int64 | uint64 | float32](v T) Argument {
	a := Argument{bytes: int(unsafe.Sizeof(v))}
	switch any(v).(type) {
	case int32:
		a.typeName = "int"
	case uint32:
		a.typeName = "uint"
	case int64:
		a.typeName = "long"
	case uint64:
		a.typeName = "ulong"
	case float32:
		a.typeName = "float"
	}
	*(*T)(unsafe.Pointer(&a.bits)) = v
	return a
}

// fits checks the arguments and sizes of a launch, without the library.
func (k *Kernel) fits(q *Queue, global, local []int, args []Argument) error {
	if k.context != q.context {
		return fmt.Errorf("the kernel and the queue have different contexts")
	}
	if len(global) < 1 || len(global) > 3 || len(local) != len(global) {
		return fmt.Errorf("sizes %v and group sizes %v; both must have the same 1 to 3 dimensions", global, local)
	}
	items := 1
	for i, n := range local {
		if n < 1 || global[i] < 1 || global[i]%n != 0 {
			return fmt.Errorf("sizes %v and group sizes %v; a size must be a positive multiple of its group "+
				"size", global,
				local)
		}
		if n > k.limit/items {
			return fmt.Errorf("group sizes %v; the kernel supports %d work-items per group", local, k.limit)
		}
		items *= n
	}
	if len(args) != len(k.parameters) {
		return fmt.Errorf("%d arguments; the kernel has %d", len(args), len(k.parameters))
	}
	inGroup := int64(0)
	for i, a := range args {
		p := k.parameters[i]
		switch {
		case a.space == "" && a.typeName == "", a.space == "global" && a.buffer == nil:
			return fmt.Errorf("argument %d is empty", i)
		case p.known && a.space != p.space, p.known && p.space == "" && a.typeName != p.typeName:
			return fmt.Errorf("argument %d is %s; it must be %s", i, a, p)
		case a.space == "global" && a.buffer.context != q.context:
			return fmt.Errorf("argument %d is a buffer of another context", i)
		case a.space == "local":
			if inGroup += int64(a.bytes); a.bytes < 1 || inGroup > k.context.device.LocalMemory {
				return fmt.Errorf("argument %d is %d bytes of local memory; the limit is 1 to %d bytes for all "+
					"arguments together", i, a.bytes, k.context.device.LocalMemory)
			}
		}
	}
	return nil
}

// Launch enqueues a kernel with the given number of work-items and work-group size in each
// dimension. The group sizes must divide the numbers. Launch checks number, kind and type of the
// arguments. It does not wait.
func (q *Queue) Launch(k *Kernel, global, local []int, args ...Argument) error {
	return q.launch(k, global, local, args, func(enqueue func(queue uintptr, event *uintptr) int32) error {
		return q.give(launchCall, func(queue uintptr) int32 { return enqueue(queue, nil) })
	})
}

// LaunchEvent is Launch with an event, which shows when the kernel ran. The event must be released.
func (q *Queue) LaunchEvent(k *Kernel, global, local []int, args ...Argument) (e *Event, err error) {
	err = q.launch(k, global, local, args, func(enqueue func(queue uintptr, event *uintptr) int32) error {
		e, err = q.enqueue(launchCall, enqueue)
		return err
	})
	return e, err
}

const launchCall = "clEnqueueNDRangeKernel"

// launch checks and sets the arguments, and calls give to enqueue the kernel.
func (q *Queue) launch(k *Kernel, global, local []int, args []Argument,
	give func(enqueue func(queue uintptr, event *uintptr) int32) error) error {
	if err := k.fits(q, global, local, args); err != nil {
		return fmt.Errorf("opencl: kernel %s: %w", k.name, err)
	}
	kernel, err := k.hold()
	if err != nil {
		return fmt.Errorf("opencl: kernel %s: %w", k.name, err)
	}
	defer k.drop()
	held := 0
	defer func() {
		for _, a := range args[:held] {
			if a.buffer != nil {
				a.buffer.drop()
			}
		}
	}()
	k.launching.Lock()
	defer k.launching.Unlock()
	l := k.context.device.library
	for i, a := range args {
		value := unsafe.Pointer(&k.value)
		switch {
		case a.buffer != nil:
			buffer, err := a.buffer.hold()
			if err != nil {
				return fmt.Errorf("opencl: kernel %s: argument %d: %w", k.name, i, err)
			}
			k.value = uint64(buffer)
		case a.space == "local":
			value = nil
		default:
			k.value = a.bits
		}
		held = i + 1
		if err := check("clSetKernelArg", l.SetKernelArg(kernel, uint32(i), uintptr(a.bytes), value)); err != nil {
			return fmt.Errorf("opencl: kernel %s: argument %d, %s of %d bytes: %w", k.name, i, a, a.bytes, err)
		}
	}
	for i := range global {
		k.global[i], k.local[i] = uintptr(global[i]), uintptr(local[i])
	}
	err = give(func(queue uintptr, event *uintptr) int32 {
		return l.EnqueueNDRangeKernel(queue, kernel, uint32(len(global)), nil, &k.global[0], &k.local[0], 0, nil, event)
	})
	if err != nil {
		return fmt.Errorf("kernel %s: %w", k.name, err)
	}
	return nil
}
