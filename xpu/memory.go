package xpu

import "context"

// Memory is the memory that a device computes on. A device either shares memory with the host (CPU)
// or has its own (GPU). With its own memory, every slice that Floats and Ints return has a
// counterpart on the device. A part of such a slice, down to a single element, refers to the same
// part of the counterpart.
//
// # Two sides
//
// The methods of [Products] and [Layers] read and write the device's side, and accept only memory
// of their device, except for parameters documented as host memory. Go code sees the host's side.
// Data written on one side is visible on the other side only after ToDevice or ToHost: call ToHost
// before reading a slice in Go, and ToDevice after writing it. On a device that shares memory with
// the host, both do nothing.
//
// # Commands
//
// ToDevice and the methods of Products and Layers are commands: they may return before they are
// done. A device executes the commands of one goroutine in order, and the commands of different
// goroutines in the order of the calls, if one call happens before the other. If a device fails,
// such as a driver that lost its GPU, this command and all later commands do nothing; the next Wait
// or ToHost, and each later one, returns the first error. Host memory that a command writes, its
// host results, is valid after Wait or ToHost, not before.
type Memory interface {
	// Floats allocates n numbers, all zero on both sides. It fails if the device is out of memory.
	Floats(n int) ([]float32, error)

	// Ints is Floats for whole numbers.
	Ints(n int) ([]int32, error)

	// Free releases memory. The argument must be the complete slice that Floats or Ints returned;
	// Free panics on memory of another device and on memory that was freed before. Memory without
	// elements need not be freed. Close frees all remaining memory.
	Free(floats []float32)
	FreeInts(ints []int32)

	// ToDevice copies the host's side of x to the device, and returns when the host may write to x
	// again.
	ToDevice(x []float32)
	IntsToDevice(x []int32)

	// ToHost waits for all preceding commands and copies the device's side of the slices to the
	// host.
	ToHost(ctx context.Context, x ...[]float32) error
	IntsToHost(ctx context.Context, x ...[]int32) error

	// Wait waits for all preceding commands.
	Wait(ctx context.Context) error

	// Capacity returns the maximum total number of bytes of Floats and Ints; 0 for a device that
	// shares memory with the host.
	Capacity() int64
}
