package opencl

import (
	"fmt"
	"unsafe"
)

// A driver may show a card of several tiles, each with its own memory, as one device, and divide
// the work of a kernel among the tiles. Then a kernel reads memory of other tiles. So each tile is
// listed as a device.

// subDevices returns the tiles of a GPU that the driver can divide by memory, or nil.
func (l *library) subDevices(d *Device) ([]uintptr, error) {
	if d.Type != GPU {
		return nil, nil
	}
	if tiles, ok := l.tiles[d.id]; ok { // a driver counts the references to each sub-device
		return tiles, nil
	}
	ask := func(what uint32) func(size uintptr, value unsafe.Pointer, bytes *uintptr) int32 {
		return func(size uintptr, value unsafe.Pointer, bytes *uintptr) int32 {
			return l.GetDeviceInfo(d.id, what, size, value, bytes)
		}
	}
	most, err1 := askNumber[uint32]("clGetDeviceInfo", ask(deviceMaxSubDevices))
	domains, err2 := askNumber[uint64]("clGetDeviceInfo", ask(deviceAffinityDomains))
	if err1 != nil || err2 != nil || most < 2 || domains&affinityNUMA == 0 {
		return nil, nil // the driver cannot divide the device
	}
	properties := [3]uintptr{partitionByAffinityDomain, affinityNUMA, 0}
	tiles, err := identifiers("clCreateSubDevices", func(size uint32, out *uintptr, count *uint32) int32 {
		return l.CreateSubDevices(d.id, &properties[0], size, out, count)
	})
	if err != nil {
		return nil, fmt.Errorf("%s: listing its tiles: %w", d.Name, err)
	}
	if l.tiles == nil {
		l.tiles = map[uintptr][]uintptr{}
	}
	l.tiles[d.id] = tiles
	return tiles, nil
}
