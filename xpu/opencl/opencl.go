// Package opencl is a binding of OpenCL: devices, and programs, memory and queues on them.
// [mula/xpu/gpu] implements a [mula/xpu.Device] with it. The loader, libOpenCL.so.1, is opened at
// run time, when needed; the environment variable MULA_OPENCL_LIB names another file. The package
// calls only functions of OpenCL 1.2.
//
// # Lifetimes
//
// The creator of a [Context], [Queue], [Buffer], [Program], [Kernel] or [Event] must call Release
// when it is no longer needed. The order does not matter: an object that a call or a running
// command uses is released when that has ended. Release may be called again. A method of a released
// object returns [ErrReleased]. The garbage collector releases nothing; [Live] counts the existing
// objects.
//
// # Memory
//
// Go memory that the library reads or writes is pinned until the command has ended, even if no call
// waits for it any more.
//
// # Goroutines
//
// All methods may be called by several goroutines at once. The arguments of a kernel belong to a
// launch, not to the kernel.
//
// # Waiting
//
// Methods that wait have a context. When it is done, the call returns its error immediately; the
// command, which OpenCL cannot cancel, continues.
package opencl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unsafe"
)

// Type is the kind of a device.
type Type string

// The types, the best first.
const (
	GPU         Type = "gpu"
	Accelerator Type = "accelerator"
	CPU         Type = "cpu"
	Other       Type = "other"
)

var typeOrder = []Type{GPU, Accelerator, CPU, Other}

// A Device is a device of an OpenCL driver, as it describes itself. Sizes are in bytes.
type Device struct {
	Name, Vendor  string
	Type          Type
	Version       string // OpenCL version, as in "OpenCL 3.0 NEO"
	DriverVersion string
	Platform      string // the driver's name
	Extensions    []string

	ComputeUnits  int
	Clock         int // MHz; 0 if the driver does not report it
	Memory        int64
	MaxAllocation int64 // maximum size of one buffer
	LocalMemory   int64
	MaxWorkGroup  int   // number of work-items
	SubGroupSizes []int // empty if a kernel cannot choose; see SubGroups

	ComputeCapability int // of NVIDIA's devices, times ten: 90 is 9.0; else 0

	library         *library
	id              uintptr
	platformVersion string
	maxSubGroups    int
}

// Has reports whether the device has an extension, such as cl_khr_fp16.
func (d *Device) Has(extension string) bool { return slices.Contains(d.Extensions, extension) }

// SubGroups reports whether work-items of a sub-group can exchange values.
func (d *Device) SubGroups() bool {
	return d.maxSubGroups > 0 || d.Has("cl_khr_subgroups") || d.Has("cl_intel_subgroups")
}

// MatrixInstructions reports whether sub-groups have instructions to multiply bfloat16 matrices
// (cl_intel_subgroup_matrix_multiply_accumulate).
func (d *Device) MatrixInstructions() bool {
	return d.Has("cl_intel_subgroup_matrix_multiply_accumulate")
}

// TensorCores reports whether warps have NVIDIA's instructions to multiply bfloat16 matrices.
func (d *Device) TensorCores() bool { return d.ComputeCapability >= 80 }

// FP16 reports whether kernels can compute in half precision (cl_khr_fp16).
func (d *Device) FP16() bool { return d.Has("cl_khr_fp16") }

// BF16 reports whether the device has instructions that convert to and from bfloat16, or multiply
// it.
func (d *Device) BF16() bool {
	return d.Has("cl_intel_bfloat16_conversions") || d.MatrixInstructions() || d.TensorCores()
}

// String returns for example "Intel(R) Data Center GPU Max 1550 (gpu, Intel(R) OpenCL Graphics)".
func (d *Device) String() string { return fmt.Sprintf("%s (%s, %s)", d.Name, d.Type, d.Platform) }

// Devices lists the devices of all drivers. A GPU of several tiles, each with its own memory, is
// listed as its tiles. If a loader, a driver or a device is missing, the error names the remedy. A
// driver or a device that fails is not listed; the error then names it and is returned together
// with the list.
func Devices() ([]*Device, error) {
	l, err := open()
	if err != nil {
		return nil, err
	}
	defer handlers().Restore()
	asking.Lock()
	defer asking.Unlock()
	return l.devices()
}

// asking prevents concurrent queries for devices: PoCL 3.1 crashes if the first two queries run
// while it initializes.
var asking sync.Mutex

func (l *library) devices() ([]*Device, error) {
	platforms, err := identifiers("clGetPlatformIDs", l.GetPlatformIDs)
	if err != nil && !isCode(err, codePlatformNotFound) {
		return nil, fmt.Errorf("opencl: %w", err)
	}
	if len(platforms) == 0 {
		return nil,
			fmt.Errorf("opencl: the loader %s found no driver; install the driver of the device (it needs a .icd "+
				"file in /etc/OpenCL/vendors or in the folder OCL_ICD_VENDORS)", l.name)
	}
	var devices []*Device
	var failed []error
	var names []string
	for _, p := range platforms {
		text := func(what uint32) (string, error) {
			return askText("clGetPlatformInfo", func(size uintptr, value unsafe.Pointer, bytes *uintptr) int32 {
				return l.GetPlatformInfo(p, what, size, value, bytes)
			})
		}
		name, err1 := text(platformName)
		version, err2 := text(platformVersion)
		ids, err3 := identifiers("clGetDeviceIDs", func(size uint32, out *uintptr, count *uint32) int32 {
			return l.GetDeviceIDs(p, deviceTypeAll, size, out, count)
		})
		if isCode(err3, codeDeviceNotFound) {
			ids, err3 = nil, nil
		}
		if err := errors.Join(err1, err2, err3); err != nil {
			failed = append(failed, fmt.Errorf("opencl: driver %q: %w", name, err))
			continue
		}
		names = append(names, fmt.Sprintf("%q", name))
		for len(ids) > 0 {
			d := &Device{library: l, id: ids[0], Platform: name, platformVersion: version}
			ids = ids[1:]
			var tiles []uintptr
			err := d.describe()
			if err == nil {
				tiles, err = l.subDevices(d)
			}
			switch {
			case err != nil:
				failed = append(failed, fmt.Errorf("opencl: a device of driver %q: %w", name, err))
			case len(tiles) > 0:
				ids = slices.Concat(tiles, ids)
			default:
				devices = append(devices, d)
			}
		}
	}
	if len(devices) == 0 && len(failed) == 0 {
		failed = append(failed, fmt.Errorf("opencl: no device in the drivers %s; check this user's access to the "+
			"device (/dev/dri, /dev/nvidia*)", strings.Join(names, " and ")))
	}
	return devices, errors.Join(failed...)
}

// maxIdentifiers limits the number of platforms, and of devices of one platform.
const maxIdentifiers = 1 << 12

// identifiers gets a list of handles.
func identifiers(call string, get func(size uint32, out *uintptr, count *uint32) int32) ([]uintptr, error) {
	var n uint32
	if err := check(call, get(0, nil, &n)); err != nil {
		return nil, err
	}
	if n > maxIdentifiers {
		return nil, fmt.Errorf("%s: invalid number of objects %d", call, n)
	}
	if n == 0 {
		return nil, nil
	}
	out := make([]uintptr, n)
	return out, check(call, get(n, &out[0], nil))
}

func askText(call string, get func(size uintptr, value unsafe.Pointer, bytes *uintptr) int32) (string, error) {
	value, err := ask(call, get)
	text, _, _ := strings.Cut(string(value), "\x00")
	return strings.TrimSpace(text), err
}

// describe queries the properties of the device.
func (d *Device) describe() error {
	const call = "clGetDeviceInfo"
	info := func(what uint32) func(size uintptr, value unsafe.Pointer, bytes *uintptr) int32 {
		return func(size uintptr, value unsafe.Pointer, bytes *uintptr) int32 {
			return d.library.GetDeviceInfo(d.id, what, size, value, bytes)
		}
	}
	var first error
	keep := func(err error) {
		if first == nil {
			first = err
		}
	}
	text := func(what uint32) string {
		s, err := askText(call, info(what))
		keep(err)
		return s
	}
	number := func(what uint32) int {
		n, err := askNumber[uint32](call, info(what))
		keep(err)
		return int(n)
	}
	bytes := func(what uint32) int64 {
		n, err := askNumber[uint64](call, info(what))
		keep(err)
		return int64(min(n, 1<<63-1))
	}
	d.Name, d.Vendor, d.Version, d.DriverVersion = text(deviceName), text(deviceVendor), text(deviceVersion),
		text(driverVersion)
	d.Extensions = strings.Fields(text(deviceExtensions))
	switch kind := bytes(deviceType); {
	case kind&typeGPU != 0:
		d.Type = GPU
	case kind&typeAccelerator != 0:
		d.Type = Accelerator
	case kind&typeCPU != 0:
		d.Type = CPU
	default:
		d.Type = Other
	}
	d.ComputeUnits, d.Clock = number(deviceComputeUnits), number(deviceClock)
	d.Memory, d.MaxAllocation, d.LocalMemory = bytes(deviceMemory), bytes(deviceMaxAllocation), bytes(deviceLocalMemory)
	group, err := askNumber[uintptr](call, info(deviceMaxWorkGroup))
	keep(err)
	d.MaxWorkGroup = int(min(group, 1<<30))
	if first == nil {
		for what, is := range map[uint32]string{deviceAvailable: "it is not available",
			deviceCompiler: "it has no compiler", deviceLittleEndian: "its numbers are big-endian"} {
			if number(what) == 0 {
				keep(fmt.Errorf("%s: %s", d.Name, is))
			}
		}
	}
	// Properties of an extension and of later versions than OpenCL 1.2.
	if n, err := askNumber[uint32](call, info(deviceMaxSubGroups)); err == nil {
		d.maxSubGroups = int(n)
	}
	if d.Has("cl_intel_required_subgroup_size") {
		if sizes, err := ask(call, info(deviceSubGroupSizes)); err == nil {
			for ; len(sizes) >= 8; sizes = sizes[8:] {
				d.SubGroupSizes = append(d.SubGroupSizes, int(binary.NativeEndian.Uint64(sizes)))
			}
		}
	}
	if d.Has("cl_nv_device_attribute_query") {
		major, err1 := askNumber[uint32](call, info(deviceMajor))
		minor, err2 := askNumber[uint32](call, info(deviceMinor))
		if err1 == nil && err2 == nil {
			d.ComputeCapability = int(10*major + minor)
		}
	}
	return first
}

// A Choice selects a device. Empty fields match every device.
type Choice struct {
	// a part of the device's or its driver's name, in upper or lower case; the suffix "#2" selects
	// the second device of that name
	Name       string
	Type       Type
	Extensions []string // required extensions
}

// Choose returns the first device that matches: a GPU before an accelerator, then a CPU, then other
// types. If several devices have the same name, "#1" is the first and "#2" the second, in the order
// of the list. The error lists the devices and the reason why each does not match.
func Choose(devices []*Device, want Choice) (*Device, error) {
	name, number := strings.ToLower(want.Name), 1
	if before, after, found := strings.Cut(name, "#"); found {
		if n, err := strconv.Atoi(after); err == nil && n > 0 {
			name, number = before, n
		}
	}
	var best *Device
	var fit []*Device
	var there []string
	for _, d := range devices {
		var lacks []string
		named := strings.Contains(strings.ToLower(d.Name), name) || strings.Contains(strings.ToLower(d.Platform), name)
		if want.Type != "" && d.Type != want.Type {
			lacks = append(lacks, "another type")
		}
		for _, e := range want.Extensions {
			if !d.Has(e) {
				lacks = append(lacks, "no "+e)
			}
		}
		if len(lacks) > 0 {
			there = append(there, fmt.Sprintf("%s: %s", d, strings.Join(lacks, ", ")))
			continue
		}
		if !named { // its name shows the reason
			there = append(there, d.String())
			continue
		}
		fit = append(fit, d)
		if best == nil || slices.Index(typeOrder, d.Type) < slices.Index(typeOrder, best.Type) {
			best = d
		}
	}
	if best != nil {
		same := slices.DeleteFunc(fit, func(d *Device) bool { return d.Name != best.Name || d.Type != best.Type })
		if number > len(same) {
			return nil, fmt.Errorf("opencl: no device %q: the last number of %s is %d", want.Name, best, len(same))
		}
		return same[number-1], nil
	}
	wanted := "no device"
	if want.Name != "" {
		wanted += fmt.Sprintf(" whose name has %q", want.Name)
	}
	if want.Type != "" {
		wanted += " of type " + string(want.Type)
	}
	if len(want.Extensions) > 0 {
		wanted += " with " + strings.Join(want.Extensions, " and ")
	}
	if len(there) == 0 {
		return nil, fmt.Errorf("opencl: %s; this machine has no OpenCL devices", wanted)
	}
	return nil, fmt.Errorf("opencl: %s; available: %s", wanted, strings.Join(there, "; "))
}
