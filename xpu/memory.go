package xpu

import "context"

// Memory is the memory that a device computes on. A device either shares memory with the host (CPU)
// or has its own (GPU), which the host reads and writes only by Read and Write.
//
// The methods of [Products] and [Layers] accept only tensors of their device, except for parameters
// documented as host memory.
//
// # Commands
//
// The methods that write and the methods of Products and Layers are commands: they may return
// before they are done. A device executes the commands of one goroutine in order, and the commands
// of different goroutines in the order of the calls, if one call happens before the other. If a
// device fails, such as a driver that lost its GPU, this command and all later commands do nothing;
// the next Wait or Read, and each later one, returns the first error. Host memory that a command
// writes, its host results, is valid after Wait or Read of the device, not before.
type Memory interface {
	HostCopies

	// New allocates a tensor, all zero. It fails if the device is out of memory, or if it does not
	// compute on elements of this type.
	New(dtype DType, shape ...int) (Tensor, error)

	// Release releases a tensor that New returned. It panics on a part of such a tensor, on memory
	// of another device, and on a tensor that was released before. Close releases all remaining
	// memory.
	Release(t Tensor)

	// Transfers returns a new sequence of copies that starts after all preceding commands.
	Transfers() Transfers

	// Capacity returns the maximum total number of bytes of all tensors; 0 for a device that
	// shares memory with the host.
	Capacity() int64
}

// HostCopies copies numbers between tensors and the host.
type HostCopies interface {
	// Write copies the host's src to a tensor without gaps, which has as many elements, and returns
	// when the host may write to src again. If src is the tensor's own memory, see [Tensor.Host],
	// nothing is copied. Numbers for a tensor of BFloat16 are rounded as defined by [BF16].
	// WriteHalves has their bits, which are not rounded and must not be denormal.
	Write(t Tensor, src []float32)
	WriteHalves(t Tensor, src []uint16)
	WriteInts(t Tensor, src []int32)

	// Read waits for all preceding commands and copies a tensor without gaps to the host's dst,
	// which has as many elements. ReadHalves copies the bits of a tensor of BFloat16.
	Read(ctx context.Context, dst []float32, t Tensor) error
	ReadHalves(ctx context.Context, dst []uint16, t Tensor) error
	ReadInts(ctx context.Context, dst []int32, t Tensor) error

	// Wait waits for all preceding commands.
	Wait(ctx context.Context) error
}

// Transfers is a sequence of copies that a device executes beside its other commands. It starts
// after the commands that precede [Memory.Transfers]. It waits for no later command, and no later
// command waits for it until Join:
//
//	t := m.Transfers()       // after the commands that compute x
//	m.MatMul(…)              // without x
//	err := t.Read(ctx, y, x) // does not wait for the product
//	t.Write(x, y)
//	t.Join()                 // later commands may use x
//
// Before Join, other commands must not change a tensor that the copies read, nor use a tensor that
// they write. For a copy, Read and Wait, the preceding commands are the commands before the start
// of the Transfers, and the earlier copies of all Transfers of the device. A Transfers is used by
// one goroutine at a time.
type Transfers interface {
	HostCopies

	// Copy sets dst to x, like [Layers.Copy].
	Copy(dst, x Tensor)

	// Join ends the sequence: all later commands of the device run after its copies. It must be
	// called once, and nothing may be called after it.
	Join()
}

// Numbers waits for all preceding commands and returns the elements of a tensor without gaps. If it
// is memory of the host and of Float32, Numbers returns that memory, and otherwise a copy in
// *buffer.
func Numbers(ctx context.Context, m HostCopies, t Tensor, buffer *[]float32) ([]float32, error) {
	x := HostBuffer(t, buffer)
	if !t.IsDiscrete() && t.dtype == Float32 {
		CheckCopy("Numbers", t, Float32, len(x))
		return x, m.Wait(ctx)
	}
	return x, m.Read(ctx, x, t)
}

// SetNumbers sets a tensor without gaps to x, which is the result of [HostBuffer] or [Numbers].
func SetNumbers(m HostCopies, t Tensor, x []float32) {
	if t.IsDiscrete() || t.dtype == BFloat16 {
		m.Write(t, x)
	}
}

// HostBuffer returns host memory from which [SetNumbers] can set a tensor without gaps: the
// tensor's own memory if it is memory of the host and of Float32, or else *buffer, whose contents
// are undefined.
func HostBuffer(t Tensor, buffer *[]float32) []float32 {
	if x := t.Host(); x != nil {
		return x
	}
	return room(buffer, t.Elements())
}

// HostHalves is [HostBuffer] for the bits of a tensor of BFloat16, which [Memory] reads and writes
// by ReadHalves and WriteHalves.
func HostHalves(t Tensor, buffer *[]uint16) []uint16 {
	if !t.IsDiscrete() {
		return t.Halves()
	}
	return room(buffer, t.Elements())
}

// room sets the length of *buffer to n and returns it.
func room[E any](buffer *[]E, n int) []E {
	if n > cap(*buffer) {
		*buffer = nil // so that it can be collected before the new allocation
		*buffer = make([]E, n)
	}
	*buffer = (*buffer)[:n]
	return *buffer
}
