package train

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"mula/internal/strictyaml"
	"mula/moe"
	"mula/xpu"
	"mula/xpu/cpu"
	"mula/xpu/gpu"
	"mula/xpu/onednn"
	"mula/xpu/opencl"
)

// The devices that [NewDevice] accepts.
const (
	DeviceCPU    = "cpu"    // [mula/xpu/cpu]
	DeviceOneDNN = "onednn" // [mula/xpu/onednn]

	// DeviceOpenCL is [mula/xpu/gpu] on an OpenCL device: a GPU if there is one, and the fastest of
	// several kinds in a short test. "opencl:NAME" selects a device whose name or driver's name
	// contains NAME, in any case. "opencl:NAME#2" selects the second device of that name.
	DeviceOpenCL = "opencl"

	// DeviceAuto is the fastest OpenCL GPU, or the processor if there is no GPU.
	DeviceAuto = "auto"
)

// Devices lists the names of devices. The name of an OpenCL device may follow [DeviceOpenCL] and a
// colon.
func Devices() []string { return []string{DeviceCPU, DeviceOneDNN, DeviceOpenCL, DeviceAuto} }

// CheckDevice returns an error if name is not the name of a device.
func CheckDevice(name string) error {
	if _, _, ok := parseOpenCL(name); ok || slices.Contains(Devices(), name) {
		return nil
	}
	return &strictyaml.FieldError{Field: "device",
		Message: fmt.Sprintf(" is %q; allowed: %s, %s, %s, %s:NAME, %s:NAME#2, %s",
			name, DeviceCPU, DeviceOneDNN, DeviceOpenCL, DeviceOpenCL, DeviceOpenCL, DeviceAuto)}
}

// parseOpenCL splits the name of an OpenCL device into a part of the device's own name, "" for any,
// and its number among devices of the same name, from 1, 0 for any.
func parseOpenCL(name string) (part string, number int, ok bool) {
	if name == DeviceOpenCL {
		return "", 0, true
	}
	part, ok = strings.CutPrefix(name, DeviceOpenCL+":")
	if i := strings.LastIndexByte(part, '#'); i >= 0 {
		if n, err := strconv.Atoi(part[i+1:]); err == nil {
			part, number, ok = part[:i], n, ok && n > 0
		}
	}
	return part, number, ok && strings.TrimSpace(part) != ""
}

// DeviceOptions are the options of [NewDevice].
type DeviceOptions struct {
	Threads   int           // threads of the host; 0 for all cores
	Precision xpu.Precision // precision of the operands of products

	// of several ranks on this host, which use equal OpenCL devices in rotation: the number of this
	// rank, and the number of ranks
	number, ranks int
}

// NewDevice opens the device with the given name. It fails if the name is unknown or if the device
// needs something that is missing. If the name leaves a choice, why describes the chosen device and
// the reason.
func NewDevice(ctx context.Context, name string, o DeviceOptions) (d xpu.Device, why string, err error) {
	name, why, err = chooseDevice(ctx, name)
	if err != nil {
		return nil, "", err
	}
	d, _, err = openDevice(ctx, name, o)
	return d, why, err
}

// openDevice opens a chosen device. sharing is the number of ranks that use the same device.
func openDevice(ctx context.Context, name string, o DeviceOptions) (d xpu.Device, sharing int, err error) {
	if err := CheckDevice(name); err != nil {
		return nil, 0, err
	}
	o.ranks = max(1, o.ranks)
	switch name {
	case DeviceCPU:
		return cpu.New(o.Threads, o.Precision), o.ranks, nil
	case DeviceOneDNN:
		d, err := onednn.New(o.Threads, o.Precision)
		if err != nil {
			return nil, 0, err
		}
		return d, o.ranks, nil
	}
	devices, err := opencl.Devices()
	if len(devices) == 0 {
		return nil, 0, err
	}
	own, sharing, err := o.takeOpenCL(name, devices)
	if err != nil {
		return nil, 0, err
	}
	cache, _ := opencl.UserCache() // without a cache, programs are compiled again
	g, err := gpu.New(ctx, own, gpu.Options{Precision: o.Precision, Threads: o.Threads, Cache: cache})
	if err != nil {
		return nil, 0, fmt.Errorf("%w; device: %s uses the processor instead", err, DeviceCPU)
	}
	return g, sharing, nil
}

// scratchBytes returns the bytes that a device may allocate in addition to requested memory: for
// products, attention scores, and sums over tokens. The documentation of the processor's devices
// has these sizes. For an OpenCL device the result is 0, which means unknown.
func scratchBytes(name string, threads int, model moe.Config, sequenceLength int) int64 {
	product, thread := 0, 0
	switch name {
	case DeviceCPU:
		product, thread = 16<<20, 800<<10
	case DeviceOneDNN:
		product, thread = 32<<20, 2<<20
	default:
		return 0
	}
	return int64(product+256*model.HiddenSize) + int64(threads)*int64(thread+512*sequenceLength)
}

// takeOpenCL returns the OpenCL device of this rank, and the number of ranks that share the device.
func (o DeviceOptions) takeOpenCL(name string, devices []*opencl.Device) (d *opencl.Device, sharing int, err error) {
	part, number, _ := parseOpenCL(name)
	kinds := deviceKinds(devices, part)
	if len(kinds) == 0 {
		return nil, 0, noneCalled(name, devices)
	}
	equal := kinds[0]
	switch n := len(equal); {
	case number > n:
		return nil, 0, fmt.Errorf("device is %q, but %s has no device number %d; the last is %d", name, equal[0],
			number, n)
	case number > 0:
		return equal[number-1], o.ranks, nil
	default:
		return equal[o.number%n], (o.ranks-o.number%n-1)/n + 1, nil
	}
}

// deviceKinds returns the OpenCL devices of the best type whose name or driver's name contains
// part, in any case. Each kind has the devices of one name and driver. If part is the full name of
// some devices, the result has only these.
func deviceKinds(devices []*opencl.Device, part string) [][]*opencl.Device {
	part = strings.ToLower(part)
	whole := func(d *opencl.Device) bool { return strings.ToLower(d.Name) == part }
	exact := slices.ContainsFunc(devices, whole)
	var kinds [][]*opencl.Device
	for _, kind := range []opencl.Type{opencl.GPU, opencl.Accelerator, opencl.CPU, opencl.Other} {
		for _, d := range devices {
			if d.Type != kind || exact && !whole(d) || !strings.Contains(strings.ToLower(d.Name), part) &&
				!strings.Contains(strings.ToLower(d.Platform), part) {
				continue
			}
			i := slices.IndexFunc(kinds, func(k []*opencl.Device) bool {
				return k[0].Name == d.Name &&
					k[0].Platform == d.Platform
			})
			if i < 0 {
				i, kinds = len(kinds), append(kinds, nil)
			}
			kinds[i] = append(kinds[i], d)
		}
		if kinds != nil {
			break
		}
	}
	return kinds
}

// noneCalled is the error for a name that is part of no device's and no driver's name.
func noneCalled(name string, devices []*opencl.Device) error {
	part, _, _ := parseOpenCL(name)
	there := make([]string, len(devices))
	for i, d := range devices {
		there[i] = d.String()
	}
	return fmt.Errorf("device is %q, but no device has %q in its name; available: %s", name, part,
		strings.Join(there, "; "))
}

// chooseDevice resolves a name on this machine: to the full name of one kind of OpenCL devices, or
// to another device. why is the reason if there was a choice.
func chooseDevice(ctx context.Context, name string) (chosen, why string, err error) {
	if _, _, ok := parseOpenCL(name); !ok && name != DeviceAuto {
		return name, "", CheckDevice(name)
	}
	devices, err := opencl.Devices()
	return chooseOpenCL(ctx, name, devices, err, measureOpenCL)
}

// chooseOpenCL is chooseDevice for the given OpenCL devices. missing is the reason why there are no
// others. measure returns the speed of a device.
func chooseOpenCL(ctx context.Context, name string, devices []*opencl.Device, missing error,
	measure func(context.Context, *opencl.Device) (float64, error)) (chosen, why string, err error) {
	part, number, _ := parseOpenCL(name)
	if name == DeviceAuto {
		part, number = "", 0
		devices = slices.DeleteFunc(slices.Clone(devices), func(d *opencl.Device) bool { return d.Type != opencl.GPU })
		if len(devices) == 0 && missing != nil {
			return DeviceCPU, fmt.Sprintf("%s: no GPU: %v", DeviceAuto, missing), nil
		} else if len(devices) == 0 {
			return DeviceCPU, fmt.Sprintf("%s: no OpenCL device is a GPU", DeviceAuto), nil
		}
	}
	if len(devices) == 0 {
		return "", "", missing
	}
	kinds := deviceKinds(devices, part)
	if len(kinds) == 0 {
		return "", "", noneCalled(name, devices)
	}
	called := func(kind []*opencl.Device) string {
		chosen := DeviceOpenCL + ":" + kind[0].Name
		if number > 0 {
			chosen += fmt.Sprintf("#%d", number)
		}
		return chosen
	}
	if len(kinds) == 1 {
		if name == DeviceAuto {
			why = fmt.Sprintf("%s: the only kind of GPU", DeviceAuto)
		}
		return called(kinds[0]), why, nil
	}
	best, fastest := -1, 0.0
	var failed []error
	for i, kind := range kinds {
		rate, err := measure(ctx, kind[0])
		if ctx.Err() != nil {
			return "", "", ctx.Err()
		}
		if err != nil {
			failed = append(failed, err)
		} else if best < 0 || rate > fastest {
			best, fastest = i, rate
		}
	}
	if best < 0 {
		return "", "", fmt.Errorf("device is %q, but none of %d kinds of devices works: %w", name, len(kinds),
			errors.Join(failed...))
	}
	why = fmt.Sprintf("%s: the fastest of %d kinds, %.4g GFLOP/s in a short test", name, len(kinds), fastest/1e9)
	if len(failed) > 0 {
		why += fmt.Sprintf("; not measured: %v", errors.Join(failed...))
	}
	return called(kinds[best]), why, nil
}

// measureOpenCL measures the speed of a device in FLOP/s in a short test.
func measureOpenCL(ctx context.Context, d *opencl.Device) (float64, error) {
	const short, limit = 200 * time.Millisecond, time.Minute
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	cache, _ := opencl.UserCache()
	rates, err := d.Probe(ctx, short, cache)
	return rates.Product, err
}
