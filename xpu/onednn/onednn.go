// Package onednn implements [xpu.Device] with matrix products of the library oneDNN, which is
// opened when a device is created. All other operations are those in package [mula/xpu/cpu].
//
// # The library
//
// Versions 2 and 3 work, built for OpenMP or for one thread. The environment variable
// MULA_ONEDNN_LIB names the file; without it the usual names are tried. The library computes on the
// calling thread (OMP_NUM_THREADS is set to 1 before it is loaded); the device provides the
// threads.
//
// # Bits
//
// oneDNN does not guarantee the order of its sums, and chooses its kernels by the sizes of a
// product. mula therefore uses it only for tiles of at most 256 × 256 elements of C and 256 terms,
// with the number of terms padded with zeros to a multiple of 32. Before a tile shape is used for
// the first time, it multiplies matrices whose rows and columns are repeated at all positions;
// every element must have the bits of the same product in a full tile. A shape that fails this
// check is never used: its products are copied into a full tile. [New] fails if the library's full
// tiles do not have a single order. Products of more than 256 terms are added block by block, in
// ascending order.
package onednn

import (
	"errors"
	"fmt"

	"mula/internal/freelist"
	"mula/xpu"
	"mula/xpu/cpu"
)

// Device computes products with oneDNN on a pool of threads that run until [Device.Close]. It is
// safe for use by several goroutines at once. Its scratch memory is about 2 MiB for each thread,
// the memory of the library, up to 32 MiB for each concurrent product, and the scratch memory of
// its [cpu.Host].
type Device struct {
	*cpu.Host
	library   *library
	dataType  int    // type of the operands passed to the library
	name      string // name of the library's implementation
	precision xpu.Precision
	products  freelist.List[product]
	workers   freelist.List[worker]

	space int // maximum size of the copies of one round, in bytes
}

var _ xpu.Device = (*Device)(nil)

// New opens the library and returns a device with the given number of threads, including the
// caller's; 0 means runtime.GOMAXPROCS(0). With [xpu.BF16] the library multiplies in bfloat16 if
// the processor supports it, and otherwise multiplies rounded operands in float32. The error names
// the libraries that were tried, or the reason why the library cannot be used.
func New(threads int, precision xpu.Precision) (*Device, error) {
	if precision.Weights() == xpu.BFloat16 {
		return nil, fmt.Errorf("onednn: precision %s needs the device cpu or opencl", precision)
	}
	if threads < 0 || precision != xpu.FP32 && precision != xpu.BF16 {
		panic(fmt.Sprintf("onednn: New: invalid number of threads %d or precision %q", threads, precision))
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

// New allocates a tensor; see [xpu.Memory].
func (d *Device) New(dtype xpu.DType, shape ...int) (xpu.Tensor, error) {
	if dtype == xpu.BFloat16 {
		return xpu.Tensor{}, fmt.Errorf("onednn: no product computes on %s yet", dtype)
	}
	return d.Host.New(dtype, shape...)
}

// Name returns for example "onednn 3.2.0 brg:avx512_core, 2 threads": the library's version and the
// name of its implementation. With [xpu.BF16], "bf16" precedes the threads.
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

// Arithmetic returns for example "onednn 3.2.0 brg:avx512_core isa 0xe7". It ends with the
// library's number of its instruction set: another version or instruction set may add in another
// order. [xpu.BF16] adds the suffix " bf16".
func (d *Device) Arithmetic() string {
	name := fmt.Sprintf("onednn %s %s isa %#x", d.library.version, d.name, d.library.isa)
	if d.precision != xpu.FP32 {
		name += " " + string(d.precision)
	}
	return name
}

// Precision returns the precision given to [New].
func (d *Device) Precision() xpu.Precision { return d.precision }
