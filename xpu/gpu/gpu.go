// Package gpu implements [xpu.Device] on any OpenCL device, with device memory and kernels for all
// operations of a training step.
//
// # Kernels
//
// The kernels are OpenCL C 1.2, in *.cl files named like the Go files. Each file is a separate
// program, preceded by base.cl. Programs are compiled when a device is created, or loaded from a
// cache. All devices use the same text, in one of two shapes: on a GPU the work-items of a group
// share a row or a tile, on a CPU (PoCL) one work-item computes it alone. The results differ only
// in the order of sums.
//
// # Commands
//
// Methods of [xpu.Products] and [xpu.Layers] enqueue commands in one queue, which the device
// executes in order, and return before they are done. The copies of [Device.Transfers] have a
// second queue. Events order the two queues. After a driver error nothing more is enqueued; Wait
// and Read return the error.
//
// Numbers from and to the host are copied through pinned memory, 8 MiB for each queue. Write
// returns when the numbers are in that memory.
//
// # Bits
//
// The order of sums depends on sizes alone; there are no atomic additions. The same device with the
// same driver therefore computes the same bits. [Device.Arithmetic] names both.
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
	Precision xpu.Precision // precision of the operands of products; empty for FP32
	Threads   int           // host threads of Parallel, including the caller; 0 for runtime.GOMAXPROCS(0)
	Cache     *opencl.Cache // cache of compiled programs; nil for none
	Profile   bool          // record the times of kernels; see Device.Profile
}

// A Device computes on an OpenCL device. It is safe for use by several goroutines at once.
type Device struct {
	hostCopies // in queue

	device    *opencl.Device
	context   *opencl.Context
	queue     *opencl.Queue // of all commands but transfers
	first     stage         // of that queue
	second    stage         // of the queue of transfers
	cache     *opencl.Cache
	kernels   map[string]*opencl.Kernel
	variants  map[variant]*opencl.Kernel // guarded by mu
	nothing   *opencl.Buffer             // passed in place of omitted memory arguments
	threads   *cpu.Device                // for Parallel
	precision xpu.Precision
	shape     shape
	profile   bool
	memory    memory
	results   results

	mu      sync.Mutex // one command at a time
	command command
	err     error // the first error
	closed  bool
	packed  packedOperands
	tables  map[string]*opencl.Buffer // of stretches, by their contents
	// Transfers that have started. The second queue does not wait for their start yet.
	transfers map[*transfers]bool
	events    []event
	times     map[string]*KernelTime
}

var _ xpu.Device = (*Device)(nil)

// A shape is the shape of the kernels' code.
type shape struct {
	processor bool   // one work-item does the work of a group on a GPU
	group     int    // number of work-items that share a row, GROUP in kernels; a power of two
	chains    int    // limits the elements of the chains of a product that are computed at the same time
	options   string // for tests: compiler options
	tile      tensorTile
	direct    bool   // the device has the loads of pvc_direct.cl
	tall      int    // rows of a group from which its products have work-groups of tallSide sub-groups
	emulated  string // for tests: the file whose matrix instructions are emulated on any device
	emulate   string // for tests: definitions for that
}

var (
	processorShape = shape{processor: true, group: 1}
	gpuShape       = shape{group: 128, chains: 16 << 20, tile: largeTile, tall: tallRows}
)

// New creates the device. It fails if it cannot create a queue, or if the driver's compiler
// rejects a kernel.
func New(ctx context.Context, device *opencl.Device, options Options) (*Device, error) {
	return newDevice(ctx, device, options, shapeOf(device))
}

// shapeOf returns the shape of the kernels for a device.
func shapeOf(device *opencl.Device) shape {
	if device.Type == opencl.CPU {
		return processorShape
	}
	s := gpuShape
	s.direct = device.Has(blocks2D)
	return s
}

func newDevice(ctx context.Context, device *opencl.Device, options Options, s shape) (_ *Device, err error) {
	if options.Precision == "" {
		options.Precision = xpu.FP32
	}
	if !slices.Contains(xpu.Precisions(), string(options.Precision)) {
		return nil, fmt.Errorf("gpu: precision is %q; allowed: %s", options.Precision,
			strings.Join(xpu.Precisions(), ", "))
	}
	if options.Threads < 0 {
		return nil, fmt.Errorf("gpu: invalid number of threads %d", options.Threads)
	}
	largest := s.group
	if !s.processor {
		largest = max(largest, attendItems)
	}
	if largest > device.MaxWorkGroup {
		return nil, fmt.Errorf("gpu: %s: the maximum work-group size is %d, but the kernels need %d", device,
			device.MaxWorkGroup, largest)
	}
	d := &Device{device: device, precision: options.Precision, shape: s, profile: options.Profile, cache: options.Cache,
		times: map[string]*KernelTime{}, transfers: map[*transfers]bool{}}
	d.hostCopies = hostCopies{d, &d.first, d.begin, d.Wait}
	d.command.d, d.results.turn = d, make(chan struct{}, 1)
	d.memory.live = map[*allocation]bool{}
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
	if d.first, err = newStage(d.queue); err != nil {
		return nil, err
	}
	second, err := d.context.NewQueue(options.Profile)
	if err != nil {
		return nil, err
	}
	if d.second, err = newStage(second); err != nil {
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

// baseFile precedes all other kernel files.
const baseFile = "base.cl"

// A program is a file of kernels.
type program struct {
	source  opencl.Source
	kernels []string
}

var kernelName = regexp.MustCompile(`\bkernel\b[^{};]*?\bvoid\s+(\w+)\s*\(`)

// includeLine includes another kernel file.
var includeLine = regexp.MustCompile(`(?m)^#include "(\w+\.cl)"$`)

// programs returns the sources for a device of this shape.
func (d *Device) programs() []program {
	entries, err := texts.ReadDir(".")
	if err != nil {
		panic(err) // the files are embedded
	}
	var all []program
	for _, e := range entries {
		if name := e.Name(); name != baseFile && !slices.Contains(matrixFiles, name) {
			if p := d.program(name, ""); len(p.kernels) > 0 { // else a file that others include
				all = append(all, p)
			}
		}
	}
	if file := d.matrixFile(); file != "" {
		all = append(all, d.matrixProgram(file))
		if file == pvcFile && d.shape.direct {
			all = append(all, d.matrixProgram(directFile))
		}
	}
	return all
}

// program returns the program of a kernel file, with additional compiler options.
func (d *Device) program(file, options string) program {
	base, err1 := texts.ReadFile(baseFile)
	text, err2 := texts.ReadFile(file)
	if err := errors.Join(err1, err2); err != nil {
		panic(err) // the files are embedded
	}
	all := []string{"-cl-std=CL1.2", fmt.Sprintf("-DGROUP=%d", d.shape.group)}
	if d.shape.processor {
		all = append(all, "-DPROCESSOR")
	}
	included := includeLine.ReplaceAllFunc(text, func(line []byte) []byte {
		name := string(includeLine.FindSubmatch(line)[1])
		part, err := texts.ReadFile(name)
		if err != nil {
			panic(err) // the files are embedded
		}
		after := bytes.Count(text[:bytes.Index(text, line)], []byte("\n")) + 2
		return fmt.Appendf(nil, "#line 1 %q\n%s#line %d %q", name, part, after, file)
	})
	// A program that does not use these definitions is the same in all precisions.
	if d.device.Has("cl_khr_fp64") && bytes.Contains(included, []byte("FP64")) {
		all = append(all, "-DFP64")
	}
	rounds := bytes.Contains(included, []byte("BF16")) || bytes.Contains(included, []byte("operand("))
	if d.rounds() && rounds {
		all = append(all, "-DBF16")
	}
	for _, more := range []string{d.shape.options, options} {
		if more != "" {
			all = append(all, more)
		}
	}
	p := program{source: opencl.Source{Name: file, Text: fmt.Sprintf("%s#line 1 %q\n%s", base, file, included),
		Options: strings.Join(all, " ")}}
	for _, match := range kernelName.FindAllSubmatch(text, -1) {
		if name := string(match[1]); !slices.Contains(p.kernels, name) { // a kernel may appear once for each shape
			p.kernels = append(p.kernels, name)
		}
	}
	return p
}

// build compiles programs, one per processor of the host at a time, and returns their kernels by
// name.
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
				continue // a kernel for other devices, excluded by #if
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

// Name returns for example "opencl NVIDIA H100 80GB HBM3, bf16, 2 threads".
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

// Precision returns the precision in the options.
func (d *Device) Precision() xpu.Precision { return d.precision }

// rounds reports whether products round their operands to bfloat16.
func (d *Device) rounds() bool { return d.precision != xpu.FP32 }

// Arithmetic returns for example "opencl NVIDIA H100 80GB HBM3 driver 550.54": with another driver
// the compiler may choose other instructions. All precisions but [xpu.FP32] add the suffix " bf16",
// and then " tensor cores" or " dpas" for the instructions that multiply matrices.
func (d *Device) Arithmetic() string {
	name := fmt.Sprintf("opencl %s driver %s", d.device.Name, d.device.DriverVersion)
	if d.rounds() {
		name += " " + string(xpu.BF16)
	}
	switch d.matrixFile() {
	case nvidiaFile:
		name += " tensor cores"
	case pvcFile:
		name += " dpas"
	}
	return name
}

// ProductRows returns 2048 on a GPU: with 2,048 columns, a product has 128 tiles of 128 × 256 on
// Ponte Vecchio, and 64 Xe-cores compute a tile each. It returns 256 on a processor.
func (d *Device) ProductRows() int {
	if d.shape.processor {
		return 256
	}
	return 2048
}

// Threads returns the number of host threads.
func (d *Device) Threads() int { return d.threads.Threads() }

// Parallel calls f(0), …, f(n-1) on host threads; see [cpu.Device.Parallel].
func (d *Device) Parallel(n int, f func(i int)) { d.threads.Parallel(n, f) }

// Close waits for the enqueued commands and releases all memory. A method called after Close
// panics.
func (d *Device) Close() {
	d.mu.Lock()
	closed := d.closed
	d.closed = true
	d.mu.Unlock()
	if closed {
		return
	}
	// No caller can receive an error now.
	_ = d.queue.Finish(context.Background())
	_ = d.second.queue.Finish(context.Background())
	d.release()
	d.threads.Close()
}

// release releases everything that the device has allocated; it may be incomplete.
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
	for _, b := range d.tables {
		b.Release()
	}
	for t := range d.transfers {
		t.start.Release()
	}
	d.first.release()
	d.second.release()
	if d.second.queue != nil {
		d.second.queue.Release()
	}
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

// A KernelTime is the total time of a kernel's launches on the device.
type KernelTime struct {
	Kernel   string
	Launches int
	Time     time.Duration
}

// Profile returns the times of all kernels up to the last Wait or ToHost, the longest first. It is
// empty without Options.Profile.
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
