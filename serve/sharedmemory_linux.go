package serve

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// An area is memory of slots that another process can map by its descriptor. No process can change
// its size. This process never reads what the other process writes there.
type area struct {
	descriptor int
	memory     []byte
	size       int   // bytes of a slot; bytes beyond the usual size of a record have no memory until needed
	backed     []int // by slot: number of bytes that have memory
}

// newArea allocates an area of slots of size bytes, a multiple of the page size. It fails if the
// system does not provide such memory.
func newArea(slots, size int) (_ *area, err error) {
	a := &area{descriptor: -1, size: size, backed: make([]int, slots)}
	defer func() {
		if err != nil {
			a.close()
		}
	}()
	if a.descriptor, err = unix.MemfdCreate("mula", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING); err != nil {
		return nil, fmt.Errorf("shared memory: %w", err)
	}
	if err = unix.Ftruncate(a.descriptor, int64(slots)*int64(size)); err == nil {
		_, err = unix.FcntlInt(uintptr(a.descriptor), unix.F_ADD_SEALS,
			unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	}
	if err == nil {
		a.memory, err = unix.Mmap(a.descriptor, 0, slots*size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		return nil, fmt.Errorf("shared memory of %d slots of %d bytes: %w", slots, size, err)
	}
	return a, nil
}

// TrySharedMemory returns an error if the system does not provide the memory that the service
// shares with clients over a unix socket.
func TrySharedMemory() error {
	a, err := newArea(1, unix.Getpagesize())
	if err != nil {
		return err
	}
	defer a.close()
	return a.back(0, a.size)
}

// slot returns the memory of one slot.
func (a *area) slot(number int) []byte { return a.memory[number*a.size:][:a.size:a.size] }

// back allocates memory for the first bytes of a slot. Without it, a write could end the process.
func (a *area) back(number, bytes int) error {
	if bytes <= a.backed[number] {
		return nil
	}
	bytes = min(int(pages(int64(bytes))), a.size)
	for {
		err := unix.Fallocate(a.descriptor, 0, int64(number*a.size), int64(bytes))
		if err == nil {
			a.backed[number] = bytes
		}
		if err != unix.EINTR {
			return err
		}
	}
}

// empty releases the memory to the system. Another process that still has it mapped then reads
// zeros.
func (a *area) empty() {
	_ = unix.Fallocate(a.descriptor, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, int64(len(a.memory)))
}

// close unmaps and closes the area in this process.
func (a *area) close() {
	if a.memory != nil {
		_ = unix.Munmap(a.memory)
		a.memory = nil
	}
	if a.descriptor >= 0 {
		_ = unix.Close(a.descriptor)
		a.descriptor = -1
	}
}

// rights returns the control message that passes the area's descriptor to another process.
func (a *area) rights() []byte { return unix.UnixRights(a.descriptor) }
