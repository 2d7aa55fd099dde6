// Package gpu is the [xpu.Device] on any OpenCL device: memory of its own, and kernels for all that
// a step of training needs.
//
// # Kernels
//
// The kernels are OpenCL C 1.2, in the files *.cl beside the Go files of the same name. Each file
// is a program of its own, with base.cl before it; programs are compiled when a device is made, or
// taken from a cache. There is one text for all devices, and two shapes of code in it: on a GPU the
// work-items of a group share a row or a tile, on a processor (PoCL) one work-item has it alone.
// What is computed is the same but for the order of sums.
//
// # Commands
//
// Methods of [xpu.Products] and [xpu.Layers] give commands to one queue, in whose order the device
// carries them out. They return before that. After an error of the driver nothing is given to the
// queue any more; Wait and ToHost return that error.
//
// # Bits
//
// Sums are taken in an order that follows from sizes alone; nothing is added atomically. So the
// same device with the same driver gives the same bits. [Device.Arithmetic] names both.
package gpu

import (
	"bytes"
	"context"
	"embed"
	"errors"
	"fmt"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"mula/xpu"
	"mula/xpu/cpu"
	"mula/xpu/opencl"
)

// Options of a device. The zero value is fp32 with as many threads as GOMAXPROCS, without a cache.
type Options struct {
	Precision xpu.Precision // of the operands of products; empty for FP32
	Threads   int           // of Parallel, on the host, the caller's included; 0 for runtime.GOMAXPROCS(0)
	Cache     *opencl.Cache // of compiled programs; nil for none
	Profile   bool          // keep the times of kernels; see Device.Profile
}

// A Device computes on an OpenCL device. It is safe for use by several goroutines at once.
type Device struct {
	device    *opencl.Device
	context   *opencl.Context
	queue     *opencl.Queue
	cache     *opencl.Cache
	kernels   map[string]*opencl.Kernel
	variants  map[variant]*opencl.Kernel // under mu
	nothing   *opencl.Buffer             // stands for memory that is not given
	threads   *cpu.Device                // for Parallel
	precision xpu.Precision
	shape     shape
	profile   bool
	memory    memory
	results   results

	mu      sync.Mutex // one command at a time
	command command
	err     error // the first
	closed  bool
	packed  packedOperands
	events  []event
	times   map[string]*KernelTime
}

var _ xpu.Device = (*Device)(nil)

// A shape is that of the kernels' code.
type shape struct {
	processor bool   // a work-item does alone what is shared by a group on a GPU
	group     int    // work-items that share a row, GROUP in kernels; a power of two
	options   string // for tests: of the compiler
	emulate   string // for tests: definitions of pvc.cl that take the path of matrix instructions on any device
}

var (
	processorShape = shape{processor: true, group: 1}
	gpuShape       = shape{group: 128}
)

// New makes the device. The error says what is missing: memory for a queue, or a kernel that the
// driver's compiler does not take.
func New(ctx context.Context, device *opencl.Device, options Options) (*Device, error) {
	return newDevice(ctx, device, options, shapeOf(device))
}

// shapeOf is the shape of the kernels for a device.
func shapeOf(device *opencl.Device) shape {
	if device.Type == opencl.CPU {
		return processorShape
	}
	return gpuShape
}

func newDevice(ctx context.Context, device *opencl.Device, options Options, s shape) (_ *Device, err error) {
	if options.Precision == "" {
		options.Precision = xpu.FP32
	}
	if options.Precision != xpu.FP32 && options.Precision != xpu.BF16 {
		return nil, fmt.Errorf("gpu: precision %q; there are %s and %s", options.Precision, xpu.FP32, xpu.BF16)
	}
	if options.Threads < 0 {
		return nil, fmt.Errorf("gpu: %d threads", options.Threads)
	}
	largest := s.group
	if !s.processor {
		largest = max(largest, attendItems)
	}
	if largest > device.MaxWorkGroup {
		return nil, fmt.Errorf("gpu: %s: groups of %d work-items; the kernels need %d", device, device.MaxWorkGroup,
			largest)
	}
	d := &Device{device: device, precision: options.Precision, shape: s, profile: options.Profile, cache: options.Cache,
		times: map[string]*KernelTime{}}
	d.command.d, d.results.turn = d, make(chan struct{}, 1)
	d.memory.table.Store(&[]*allocation{})
	defer func() {
		if err != nil {
			d.release()
			err = fmt.Errorf("gpu: %w", err)
		}
	}()
	if d.context, err = opencl.NewContext(device); err != nil {
		return nil, err
	}
	if d.queue, err = d.context.NewQueue(options.Profile); err != nil {
		return nil, err
	}
	if d.nothing, err = d.context.NewBuffer(64); err != nil {
		return nil, err
	}
	if d.kernels, err = d.build(ctx, d.programs()...); err != nil {
		return nil, err
	}
	d.threads = cpu.New(options.Threads, xpu.FP32)
	return d, nil
}

//go:embed *.cl
var texts embed.FS

// baseFile stands before all other files of kernels.
const baseFile = "base.cl"

// A program is a file of kernels.
type program struct {
	source  opencl.Source
	kernels []string
}

var kernelName = regexp.MustCompile(`\bkernel\b[^{};]*?\bvoid\s+(\w+)\s*\(`)

// programs are the sources for a device of that shape.
func (d *Device) programs() []program {
	entries, err := texts.ReadDir(".")
	if err != nil {
		panic(err) // they are in the binary
	}
	var all []program
	for _, e := range entries {
		if name := e.Name(); name != baseFile && !strings.HasPrefix(name, matrixPrefix) {
			all = append(all, d.program(name, ""))
		}
	}
	if d.matrixLanes() > 0 {
		all = append(all, d.matrixProgram())
	}
	return all
}

// program is a file of kernels, with options beside those of all files.
func (d *Device) program(file, options string) program {
	base, err1 := texts.ReadFile(baseFile)
	text, err2 := texts.ReadFile(file)
	if err := errors.Join(err1, err2); err != nil {
		panic(err) // they are in the binary
	}
	all := []string{"-cl-std=CL1.2", fmt.Sprintf("-DGROUP=%d", d.shape.group)}
	if d.shape.processor {
		all = append(all, "-DPROCESSOR")
	}
	// What does not need these is one program in all precisions.
	if d.device.Has("cl_khr_fp64") && bytes.Contains(text, []byte("FP64")) {
		all = append(all, "-DFP64")
	}
	if d.precision == xpu.BF16 && (bytes.Contains(text, []byte("BF16")) || bytes.Contains(text, []byte("operand("))) {
		all = append(all, "-DBF16")
	}
	for _, more := range []string{d.shape.options, options} {
		if more != "" {
			all = append(all, more)
		}
	}
	p := program{source: opencl.Source{Name: file, Text: fmt.Sprintf("%s#line 1 %q\n%s", base, file, text),
		Options: strings.Join(all, " ")}}
	for _, match := range kernelName.FindAllSubmatch(text, -1) {
		if name := string(match[1]); !slices.Contains(p.kernels, name) { // once for each shape, perhaps
			p.kernels = append(p.kernels, name)
		}
	}
	return p
}

// matrixPrefix begins the names of files for devices with matrix instructions, which are compiled
// with options of their own.
const matrixPrefix = "pvc"

// build compiles programs, as many at a time as the host has processors, and gives their kernels,
// by name.
func (d *Device) build(ctx context.Context, all ...program) (map[string]*opencl.Kernel, error) {
	errs := make([]error, len(all))
	built := make([]*opencl.Program, len(all))
	var workers sync.WaitGroup
	places := make(chan struct{}, runtime.GOMAXPROCS(0))
	for i, p := range all {
		workers.Go(func() {
			places <- struct{}{}
			defer func() { <-places }()
			built[i], errs[i] = d.context.Build(ctx, p.source, d.cache)
		})
	}
	workers.Wait()
	kernels := map[string]*opencl.Kernel{}
	for i, p := range built {
		if p == nil {
			continue
		}
		for _, name := range all[i].kernels {
			if kernels[name] != nil {
				panic("gpu: two kernels have the name " + name)
			}
			k, err := p.Kernel(name)
			if answer := new(opencl.Error); errors.As(err, &answer) && answer.Name() == "CL_INVALID_KERNEL_NAME" {
				continue // a kernel for other devices, which #if has left out
			}
			if err != nil {
				errs[i] = err
				break
			}
			kernels[name] = k
		}
		p.Release()
	}
	err := errors.Join(errs...)
	if err != nil {
		for _, k := range kernels {
			k.Release()
		}
		return nil, err
	}
	return kernels, nil
}

// Name is for instance "opencl NVIDIA H100 80GB HBM3, bf16, 2 threads".
func (d *Device) Name() string {
	name := "opencl " + d.device.Name
	if d.precision != xpu.FP32 {
		name += ", " + string(d.precision)
	}
	if d.Threads() == 1 {
		return name + ", 1 thread"
	}
	return fmt.Sprintf("%s, %d threads", name, d.Threads())
}

// Precision is that of the options.
func (d *Device) Precision() xpu.Precision { return d.precision }

// Arithmetic is for instance "opencl NVIDIA H100 80GB HBM3 driver 550.54": with another driver the
// compiler may choose other instructions. Of [xpu.BF16] " bf16" follows.
func (d *Device) Arithmetic() string {
	name := fmt.Sprintf("opencl %s driver %s", d.device.Name, d.device.DriverVersion)
	if d.precision != xpu.FP32 {
		name += " " + string(d.precision)
	}
	return name
}

// Threads is the number of threads of the host.
func (d *Device) Threads() int { return d.threads.Threads() }

// Parallel calls f(0), …, f(n-1) on threads of the host; see [cpu.Device.Parallel].
func (d *Device) Parallel(n int, f func(i int)) { d.threads.Parallel(n, f) }

// Close waits for what was given to the queue, and gives everything back. A method called after
// Close panics.
func (d *Device) Close() {
	d.mu.Lock()
	closed := d.closed
	d.closed = true
	d.mu.Unlock()
	if closed {
		return
	}
	_ = d.queue.Finish(context.Background()) // what fails now has nobody to hear of it
	d.release()
	d.threads.Close()
}

// release gives back what a device has, or what there is of it.
func (d *Device) release() {
	for _, e := range d.events {
		e.event.Release()
	}
	for _, k := range d.kernels {
		k.Release()
	}
	for _, k := range d.variants {
		k.Release()
	}
	d.memory.release()
	d.results.release()
	d.packed.release()
	d.command.scratch.release()
	if d.nothing != nil {
		d.nothing.Release()
	}
	if d.queue != nil {
		d.queue.Release()
	}
	if d.context != nil {
		d.context.Release()
	}
}

// A KernelTime is what the launches of a kernel took on the device.
type KernelTime struct {
	Kernel   string
	Launches int
	Time     time.Duration
}

// Profile gives the times of all kernels up to the last Wait or ToHost, the longest first. It is
// empty without that option.
func (d *Device) Profile() []KernelTime {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []KernelTime
	for _, t := range d.times {
		all = append(all, *t)
	}
	slices.SortFunc(all, func(a, b KernelTime) int {
		if a.Time != b.Time {
			return int(b.Time - a.Time)
		}
		return strings.Compare(a.Kernel, b.Kernel)
	})
	return all
}
