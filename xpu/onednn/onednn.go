// Package onednn is the [xpu.Device] whose products of matrices are those of the library oneDNN,
// which is opened when a device is made and needed for nothing else. All that is not a product is
// package [mula/xpu/cpu]'s.
//
// # The library
//
// Versions 2 and 3 will do, built for OpenMP or for one thread. The environment variable
// MULA_ONEDNN_LIB names the file; without it the usual names are tried. The library computes on the
// thread that calls it (OMP_NUM_THREADS is set to 1 before it is loaded); the threads are the
// device's.
//
// # Bits
//
// oneDNN promises nothing about the order of its sums, and chooses its kernels by the sizes of a
// product. So it is given only tiles of at most 256 × 256 elements of C and 256 terms, whose number
// is filled up with zeros to a multiple of 32. Before a shape of tile is used for the first time,
// it multiplies matrices whose rows and columns are repeated in all places; every element must have
// the bits of the same product in a whole tile. A shape that does not is never used: its products
// are copied into a whole tile. [New] fails if the whole tiles of the library do not keep to one
// order. Products of more than 256 terms are added block by block, in ascending order.
package onednn

import (
	"errors"
	"fmt"

	"mula/internal/freelist"
	"mula/xpu"
	"mula/xpu/cpu"
)

// Device computes products by oneDNN on a pool of threads that live until [Device.Close]. It is
// safe for use by several goroutines at once. Its scratch memory is some 2 MiB for each thread,
// what the library takes, up to 32 MiB for each product under way at the same time, and that of its
// [cpu.Host].
type Device struct {
	*cpu.Host
	library   *library
	dataType  int    // of the operands that the library is given
	name      string // of the library's implementation
	precision xpu.Precision
	products  freelist.List[product]
	workers   freelist.List[worker]

	space int // bound on the copies of one round, in bytes
}

var _ xpu.Device = (*Device)(nil)

// New opens the library and returns a device of that many threads, the caller's own included; 0
// stands for runtime.GOMAXPROCS(0). With [xpu.BF16] the library multiplies in bfloat16 if it can on
// this processor, and otherwise rounded operands in float32. The error says what was looked for, or
// why the library that was found cannot be used.
func New(threads int, precision xpu.Precision) (*Device, error) {
	if threads < 0 || precision != xpu.FP32 && precision != xpu.BF16 {
		panic(fmt.Sprintf("onednn: New: %d threads, precision %q", threads, precision))
	}
	l, err := open()
	if err != nil {
		return nil, err
	}
	d := &Device{library: l, dataType: typeF32, precision: precision, space: 32 << 20}
	if precision == xpu.BF16 {
		d.dataType = typeBF16
	}
	d.name, err = l.prepare(d.dataType)
	if status := new(statusError); errors.As(err, &status) && status.status == statusUnimplemented &&
		d.dataType == typeBF16 {
		d.dataType = typeF32
		d.name, err = l.prepare(d.dataType)
	}
	if err != nil {
		return nil, fmt.Errorf("onednn: version %s cannot be used: %w. The device cpu needs no library", l.version, err)
	}
	d.Host = cpu.NewHost(threads, d)
	return d, nil
}

// Name is for instance "onednn 3.2.0 brg:avx512_core, 2 threads": the library's version and its
// name for what multiplies. Of [xpu.BF16] it has "bf16" before the threads.
func (d *Device) Name() string {
	name := fmt.Sprintf("onednn %s %s", d.library.version, d.name)
	if d.precision != xpu.FP32 {
		name += ", " + string(d.precision)
	}
	if d.Threads() == 1 {
		return name + ", 1 thread"
	}
	return fmt.Sprintf("%s, %d threads", name, d.Threads())
}

// Arithmetic is for instance "onednn 3.2.0 brg:avx512_core isa 0xe7", with the library's number of
// the instruction set that it uses: another version, or another instruction set, may add up in
// another order. Of [xpu.BF16] " bf16" follows.
func (d *Device) Arithmetic() string {
	name := fmt.Sprintf("onednn %s %s isa %#x", d.library.version, d.name, d.library.isa)
	if d.precision != xpu.FP32 {
		name += " " + string(d.precision)
	}
	return name
}

// Precision is that given to [New].
func (d *Device) Precision() xpu.Precision { return d.precision }
