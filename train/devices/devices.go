// Package devices opens the devices that a configuration can name, chooses among several, and
// measures them.
package devices

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

// The devices that [New] accepts.
const (
	CPU    = "cpu"    // [mula/xpu/cpu]
	OneDNN = "onednn" // [mula/xpu/onednn]

	// OpenCL is [mula/xpu/gpu] on an OpenCL device: a GPU if there is one, and the fastest of
	// several kinds in a short test. "opencl:NAME" selects a device whose name or driver's name
	// contains NAME, in any case. "opencl:NAME#2" selects the second device of that name.
	OpenCL = "opencl"

	// Auto is the fastest OpenCL GPU, or the processor if there is no GPU.
	Auto = "auto"
)

// Names lists the names of devices. The name of an OpenCL device may follow [OpenCL] and a
// colon.
func Names() []string { return []string{CPU, OneDNN, OpenCL, Auto} }

// Check returns an error if name is not the name of a device.
func Check(name string) error {
	if _, _, ok := parseOpenCL(name); ok || slices.Contains(Names(), name) {
		return nil
	}
	return &strictyaml.FieldError{Field: "device",
		Message: fmt.Sprintf(" is %q; allowed: %s, %s, %s, %s:NAME, %s:NAME#2, %s",
			name, CPU, OneDNN, OpenCL, OpenCL, OpenCL, Auto)}
}

// parseOpenCL splits the name of an OpenCL device into a part of the device's own name, "" for any,
// and its number among devices of the same name, from 1, 0 for any.
func parseOpenCL(name string) (part string, number int, ok bool) {
	if name == OpenCL {
		return "", 0, true
	}
	part, ok = strings.CutPrefix(name, OpenCL+":")
	if i := strings.LastIndexByte(part, '#'); i >= 0 {
		if n, err := strconv.Atoi(part[i+1:]); err == nil {
			part, number, ok = part[:i], n, ok && n > 0
		}
	}
	return part, number, ok && strings.TrimSpace(part) != ""
}

// Options are the options of [New].
type Options struct {
	Threads   int           // threads of the host; 0 for all cores
	Precision xpu.Precision // precision of the operands of products

	// of several ranks on this host, which use equal OpenCL devices in rotation: the number of this
	// rank, and the number of ranks
	Number, Ranks int
}

// New opens the device with the given name. It fails if the name is unknown or if the device
// needs something that is missing. If the name leaves a choice, why describes the chosen device and
// the reason.
func New(ctx context.Context, name string, o Options) (d xpu.Device, why string, err error) {
	name, why, err = Choose(ctx, name)
	if err != nil {
		return nil, "", err
	}
	d, _, err = Open(ctx, name, o)
	return d, why, err
}

// Open opens a chosen device. sharing is the number of ranks that use the same device.
func Open(ctx context.Context, name string, o Options) (d xpu.Device, sharing int, err error) {
	if err := Check(name); err != nil {
		return nil, 0, err
	}
	o.Ranks = max(1, o.Ranks)
	switch name {
	case CPU:
		return cpu.New(o.Threads, o.Precision), o.Ranks, nil
	case OneDNN:
		d, err := onednn.New(o.Threads, o.Precision)
		if err != nil {
			return nil, 0, err
		}
		return d, o.Ranks, nil
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
		return nil, 0, fmt.Errorf("%w; device: %s uses the processor instead", err, CPU)
	}
	return g, sharing, nil
}

// ScratchBytes returns the bytes that a device may allocate in addition to requested memory: for
// products, attention scores, sums over tokens, and gradients of bfloat16. The documentation of the
// processor's devices has these sizes. For an OpenCL device the result is 0, which means unknown.
func ScratchBytes(name string, device xpu.Device, model moe.Config, sequenceLength int) int64 {
	product, thread := 0, 0
	switch name {
	case CPU:
		product, thread = 16<<20, 864<<10
	case OneDNN:
		product, thread = 32<<20, 2<<20
	default:
		return 0
	}
	if device.Precision().Gradients() == xpu.BFloat16 {
		width := max(model.HiddenSize, model.QueryWidth(), model.IntermediateSize, model.DenseSize)
		thread += 672*width + 4*xpu.BlockSize
	}
	return int64(product+256*model.HiddenSize) + int64(device.Threads())*int64(thread+512*sequenceLength)
}

// takeOpenCL returns the OpenCL device of this rank, and the number of ranks that share the device.
func (o Options) takeOpenCL(name string, devices []*opencl.Device) (d *opencl.Device, sharing int, err error) {
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
		return equal[number-1], o.Ranks, nil
	default:
		return equal[o.Number%n], (o.Ranks-o.Number%n-1)/n + 1, nil
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

// Choose resolves a name on this machine: to the full name of one kind of OpenCL devices, or
// to another device. why is the reason if there was a choice.
func Choose(ctx context.Context, name string) (chosen, why string, err error) {
	if _, _, ok := parseOpenCL(name); !ok && name != Auto {
		return name, "", Check(name)
	}
	devices, err := opencl.Devices()
	return chooseOpenCL(ctx, name, devices, err, measureOpenCL)
}

// chooseOpenCL is Choose for the given OpenCL devices. missing is the reason why there are no
// others. measure returns the speed of a device.
func chooseOpenCL(ctx context.Context, name string, devices []*opencl.Device, missing error,
	measure func(context.Context, *opencl.Device) (float64, error)) (chosen, why string, err error) {
	part, number, _ := parseOpenCL(name)
	if name == Auto {
		part, number = "", 0
		devices = slices.DeleteFunc(slices.Clone(devices), func(d *opencl.Device) bool { return d.Type != opencl.GPU })
		if len(devices) == 0 && missing != nil {
			return CPU, fmt.Sprintf("%s: no GPU: %v", Auto, missing), nil
		} else if len(devices) == 0 {
			return CPU, fmt.Sprintf("%s: no OpenCL device is a GPU", Auto), nil
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
		chosen := OpenCL + ":" + kind[0].Name
		if number > 0 {
			chosen += fmt.Sprintf("#%d", number)
		}
		return chosen
	}
	if len(kinds) == 1 {
		if name == Auto {
			why = fmt.Sprintf("%s: the only kind of GPU", Auto)
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
