package train

import (
	"fmt"

	"mula/xpu"
	"mula/xpu/cpu"
	"mula/xpu/onednn"
)

// The devices that [NewDevice] knows.
const (
	DeviceCPU    = "cpu"    // [mula/xpu/cpu]
	DeviceOneDNN = "onednn" // [mula/xpu/onednn]
)

// NewDevice makes a device of so many threads, 0 for all cores. It fails for a name that it does not know, and where what the device needs is
// not there.
func NewDevice(name string, threads int, precision xpu.Precision) (xpu.Device, error) {
	switch name {
	case DeviceCPU:
		return cpu.New(threads, precision), nil
	case DeviceOneDNN:
		d, err := onednn.New(threads, precision)
		if err != nil {
			return nil, err
		}
		return d, nil
	}
	return nil, fmt.Errorf("device %q is unknown; known are %s, %s", name, DeviceCPU, DeviceOneDNN)
}
