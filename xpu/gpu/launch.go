package gpu

import (
	"context"
	"fmt"

	"mula/xpu"
	"mula/xpu/opencl"
)

// A command is one method of the device in progress: it enqueues all its kernels together, and owns
// scratch memory of the device until it ends. There is one command at a time.
//
//	c := d.begin()
//	defer c.end()
//	c.launch("add", c.rows(parts), c.writes(dst), c.reads(x), c.reads(y), long(len(dst)), integer(each))
type command struct {
	d       *Device
	queue   *opencl.Queue // of its kernels and copies
	scratch scratch
	given   int // number of launches since the last flush

	args          [64]opencl.Argument
	global, local [3]int
}

// begin starts a command.
func (d *Device) begin() *command {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		panic("gpu: the device was used after Close")
	}
	d.command.queue = d.queue
	return &d.command
}

// end ends a command.
func (c *command) end() {
	s := &c.scratch
	for _, b := range s.retired {
		c.d.unreserve(b)
	}
	s.retired, s.used = s.retired[:0], 0
	c.d.mu.Unlock()
}

// fail records the first error of the device.
func (c *command) fail(err error) {
	if c.d.err == nil {
		c.d.err = fmt.Errorf("gpu: %w", err)
	}
}

// A grid is the work-items of a launch: number and size of the groups in up to three dimensions.
type grid struct{ groups, size [3]int }

// itemsGroup is the size of groups of independent work-items.
const itemsGroup = 64

// items returns a grid of n work-items and up to 63 more, which the kernel must skip: if
// (get_global_id(0) >= n) return.
func items(n int) grid {
	return grid{[3]int{over(n, itemsGroup), 1, 1}, [3]int{itemsGroup, 1, 1}}
}

// rows returns a grid of n groups that each share a row: GROUP work-items on a GPU, one on a CPU.
func (c *command) rows(n int) grid { return groups(c.d.shape.group, n, 1, 1) }

// over returns the number of pieces of size by that n is divided into; the last may be smaller.
func over(n, by int) int { return (n + by - 1) / by }

// groups returns a grid of x × y × z groups of the given size.
func groups(size, x, y, z int) grid { return grid{[3]int{x, y, z}, [3]int{size, 1, 1}} }

// An argument is a kernel argument: a number, or memory, which is two arguments in OpenCL (the
// buffer, and the index of its first element; MEMORY in kernels). [typed] memory has a third
// argument, which is 1 for bfloat16 and 0 for float (TYPED in kernels).
type argument struct {
	buffer *opencl.Buffer
	at     uint64
	number opencl.Argument
	bf16   bool
	typed  bool
}

// typed is memory for a kernel that accepts both float and bfloat16.
func typed(a argument) argument {
	a.typed = true
	return a
}

// none is the index for omitted memory; NONE in kernels.
const none = ^uint64(0)

// integer, long and number are arguments of type int, long and float.
func integer(n int) argument {
	if int(int32(n)) != n {
		panic(fmt.Sprintf("gpu: %d is out of range for a kernel's int", n))
	}
	return argument{number: opencl.Scalar(int32(n))}
}
func long(n int) argument        { return argument{number: opencl.Scalar(int64(n))} }
func unsigned(n uint64) argument { return argument{number: opencl.Scalar(n)} } // ulong
func number(x float64) argument  { return argument{number: opencl.Scalar(float32(x))} }

// local is an argument of local memory for n numbers.
func local(n int) argument { return argument{number: opencl.Local(4 * n)} }

// flag is an int argument, 1 or 0.
func flag(is bool) argument {
	if is {
		return integer(1)
	}
	return integer(0)
}

// reads and writes are arguments of device memory that the kernel does not change, or changes.
// Empty memory is omitted: the kernel checks GIVEN. Memory of another device panics.
func (c *command) reads(x xpu.Tensor) argument  { return c.find(x, false) }
func (c *command) writes(x xpu.Tensor) argument { return c.find(x, true) }

// wide is reads for a kernel that needs float: numbers of bfloat16 are converted in scratch memory.
func (c *command) wide(x xpu.Tensor) argument {
	memory := c.reads(x)
	if !memory.bf16 {
		return memory
	}
	n := extent(x)
	copied := c.take(n)
	c.copyNumbers(copied, memory, n)
	return copied
}

// narrow is writes for a kernel that writes float without gaps. After the kernel, the caller calls
// the function, which rounds the numbers to x if x is of bfloat16.
func (c *command) narrow(x xpu.Tensor) (memory argument, round func()) {
	halves := c.writes(x)
	if !halves.bf16 {
		return halves, func() {}
	}
	wide, n := c.take(x.Elements()), x.Elements()
	return wide, func() { c.copyNumbers(halves, wide, n) }
}

// copyNumbers copies n numbers. At least one of the memories is of bfloat16.
func (c *command) copyNumbers(to, from argument, n int) {
	each, parts := c.stretch(n)
	c.launch("copy", c.rows(parts), typed(to), typed(from), long(n), integer(each))
}

// absent is the argument of omitted memory.
func (c *command) absent() argument { return argument{buffer: c.d.nothing, at: none} }

func (c *command) find(x xpu.Tensor, write bool) argument {
	if x.Elements() == 0 {
		return c.absent()
	}
	a, at := c.d.memory.of(x)
	if write {
		c.wrote(a, at, x)
	} else {
		a.checkRead(at, x)
	}
	return argument{buffer: a.buffer, at: uint64(at), bf16: x.DType() == xpu.BFloat16}
}

// launch enqueues a kernel. A grid without work-items does nothing.
func (c *command) launch(kernel string, g grid, args ...argument) {
	k := c.d.kernels[kernel]
	if k == nil {
		panic("gpu: unknown kernel " + kernel)
	}
	c.give(kernel, k, g, args)
}

// A variant is a kernel of a file that is compiled with additional options.
type variant struct{ file, options, kernel string }

// launchVariant is launch for a kernel of a variant, which is compiled at its first launch.
func (c *command) launchVariant(v variant, g grid, args ...argument) {
	d := c.d
	if d.err != nil {
		return
	}
	if d.variants[v] == nil {
		kernels, err := d.build(context.Background(), d.program(v.file, v.options))
		if err != nil {
			c.fail(err)
			return
		}
		if d.variants == nil {
			d.variants = map[variant]*opencl.Kernel{}
		}
		for name, k := range kernels {
			d.variants[variant{v.file, v.options, name}] = k
		}
	}
	k := d.variants[v]
	if k == nil {
		panic("gpu: unknown kernel " + v.kernel)
	}
	c.give(v.kernel, k, g, args)
}

func (c *command) give(kernel string, k *opencl.Kernel, g grid, args []argument) {
	d := c.d
	if d.err != nil || g.groups[0] == 0 || g.groups[1] == 0 || g.groups[2] == 0 {
		return
	}
	n := 0
	for _, a := range args {
		if a.buffer == nil {
			c.args[n] = a.number
			n++
			continue
		}
		if a.bf16 && !a.typed {
			panic(fmt.Sprintf("gpu: kernel %s: an operand is bfloat16", kernel))
		}
		c.args[n], c.args[n+1] = opencl.Global(a.buffer), opencl.Scalar(a.at)
		n += 2
		if a.typed {
			c.args[n] = flag(a.bf16).number
			n++
		}
	}
	for i := range c.global {
		c.local[i], c.global[i] = g.size[i], g.size[i]*g.groups[i]
	}
	if d.profile {
		e, err := c.queue.LaunchEvent(k, c.global[:], c.local[:], c.args[:n]...)
		if err != nil {
			c.fail(err)
			return
		}
		d.events = append(d.events, event{kernel, e})
		return
	}
	if err := c.queue.Launch(k, c.global[:], c.local[:], c.args[:n]...); err != nil {
		c.fail(err)
		return
	}
	if c.given++; c.given >= flushAfter {
		c.given = 0
		if err := c.queue.Flush(); err != nil {
			c.fail(err)
		}
	}
}

// flushAfter is the number of launches after which the queue is flushed, so that the driver starts
// them.
const flushAfter = 16

// An event is a kernel launch whose time is recorded.
type event struct {
	kernel string
	event  *opencl.Event
}

// keepTimes adds up the times of completed launches. The caller has started a command.
func (d *Device) keepTimes() {
	left := d.events[:0]
	for _, e := range d.events {
		times, err := e.event.Times()
		if err != nil { // not yet
			left = append(left, e)
			continue
		}
		e.event.Release()
		t := d.times[e.kernel]
		if t == nil {
			t = &KernelTime{Kernel: e.kernel}
			d.times[e.kernel] = t
		}
		t.Launches++
		t.Time += times.Ran()
	}
	d.events = left
}

// A scratch is device memory that a command owns until it ends.
type scratch struct {
	buffer  *opencl.Buffer
	used    int64 // in elements
	retired []*opencl.Buffer
}

// take returns n elements of scratch memory with undefined contents: float or int, as the kernel
// declares.
func (c *command) take(n int) argument {
	const align = 32 // elements: 128 bytes
	s, need := &c.scratch, (int64(max(n, 1))+align-1)/align*align
	have := int64(0)
	if s.buffer != nil {
		have = s.buffer.Bytes() / 4
	}
	if s.used+need > have {
		size := max(need, min(2*have, have+16<<20), 1<<18)
		b, err := c.d.reserve(4 * size)
		if err != nil && size > need {
			b, err = c.d.reserve(4 * need)
		}
		if err != nil {
			c.fail(fmt.Errorf("scratch memory of %d numbers: %w", n, err))
			return argument{buffer: c.d.nothing, at: none}
		}
		if s.buffer != nil {
			s.retired = append(s.retired, s.buffer)
		}
		s.buffer, s.used = b, 0
	}
	at := s.used
	s.used += need
	return argument{buffer: s.buffer, at: uint64(at)}
}

// plus returns scratch memory that starts n elements later.
func (a argument) plus(n int) argument {
	a.at += uint64(n)
	return a
}

func (s *scratch) release() {
	if s.buffer != nil {
		s.buffer.Release()
	}
}
