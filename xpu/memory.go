package xpu

import "context"

// Memory is what a device computes on. A device may be one with the host, as a processor is, or
// apart from it, with memory of its own: then every slice that Floats and Ints return has a twin on
// the device. Slices of it, down to a single element, stand for the same part of the twin.
//
// # Two sides
//
// The methods of [Products] and [Layers] read and write the device's side, and take nothing but
// memory of their device, save where a parameter is said to be the host's. Go code sees the host's
// side. What one side has written the other sees after ToDevice or ToHost, and not otherwise: who
// reads a slice in Go calls ToHost before, and who has written one calls ToDevice after. On a
// device that is one with the host both do nothing.
//
// # Commands
//
// ToDevice and the methods of Products and Layers are commands: they may return before they are
// done. A device carries them out in the order in which one goroutine gives them; between
// goroutines the order is that of the calls, if one happens before the other. A command whose
// device fails, as a driver that has lost its GPU, does nothing, and neither does any after it; the
// next Wait or ToHost, and each after it, returns that first error. What a command writes to memory
// of the host, its host results, is there after Wait or ToHost, not before.
type Memory interface {
	// Floats makes memory for n numbers, all zero on both sides. It fails where the device has no
	// room.
	Floats(n int) ([]float32, error)

	// Ints is Floats for whole numbers.
	Ints(n int) ([]int32, error)

	// Free gives memory back, given whole, as Floats or Ints returned it; of memory that another
	// device made, or that was freed, it panics. Memory of no elements need not be freed. What is
	// not freed goes with Close.
	Free(floats []float32)
	FreeInts(ints []int32)

	// ToDevice gives the device what the host has written to x, and returns when the host may write
	// to it again.
	ToDevice(x []float32)
	IntsToDevice(x []int32)

	// ToHost waits for all commands given before and brings what the device has in the slices to
	// the host.
	ToHost(ctx context.Context, x ...[]float32) error
	IntsToHost(ctx context.Context, x ...[]int32) error

	// Wait waits for all commands given before.
	Wait(ctx context.Context) error

	// Capacity is the number of bytes that Floats and Ints can give at most, all together; 0 for a
	// device that is one with the host.
	Capacity() int64
}
