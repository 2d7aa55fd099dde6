package cli

import (
	"context"
	"fmt"
	"io"
	"runtime"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"mula/internal/quantity"
	"mula/train/devices"
	"mula/train/estimate"
	"mula/xpu"
	"mula/xpu/cpu"
	"mula/xpu/onednn"
	"mula/xpu/opencl"
)

// deviceTime is the approximate time of measuring an OpenCL device. deviceLimit is the time limit,
// because a compiler may take seconds.
const (
	deviceTime  = 400 * time.Millisecond
	deviceLimit = time.Minute
)

func devicesCommand() *cli.Command {
	return &cli.Command{
		Name:  "devices",
		Usage: "list compute devices and their measured throughput",
		Description: "The devices are the processor with mula's own kernels, oneDNN if that library is installed, " +
			"and all\n" +
			"OpenCL devices. OpenCL devices are measured with simple kernels, which do not reach their peak. Other\n" +
			"work on the machine lowers the measured figures.\n\n" +
			"Example: mula devices --json",
		Flags: []cli.Flag{
			&cli.IntFlag{Name: "threads", Usage: "measure the processor with `N` threads (0: all cores)"},
			&cli.BoolFlag{Name: "no-probe", Usage: "list the devices without measuring them"},
			jsonFlag,
		},
		Action: runDevices,
	}
}

// devicesReport is the output of mula devices.
type devicesReport struct {
	Devices []deviceEntry `json:"devices"`
	Missing []deviceLack  `json:"missing,omitempty"`
}

// A deviceEntry is a device. Rates are 0 if not measured.
type deviceEntry struct {
	Kind   string       `json:"kind"` // as in train.yaml
	Name   string       `json:"name"`
	Trains bool         `json:"trains"`                          // mula can train on it
	FP32   float64      `json:"fp32_flops,omitempty"`            // of matrix products, per second
	BF16   float64      `json:"bf16_flops,omitempty"`            // with operands in bfloat16
	Copy   float64      `json:"copy_bytes_per_second,omitempty"` // read and written, per second
	Failed string       `json:"not_measured,omitempty"`          // reason
	OpenCL *openclEntry `json:"opencl,omitempty"`
}

// An openclEntry has the properties of an OpenCL device. Sizes are in bytes.
type openclEntry struct {
	Type               opencl.Type `json:"type"`
	Platform           string      `json:"platform"`
	Driver             string      `json:"driver"`
	Version            string      `json:"version"`
	ComputeUnits       int         `json:"compute_units"`
	Clock              int         `json:"clock_mhz"`
	Memory             int64       `json:"memory"`
	MaxBuffer          int64       `json:"max_buffer"`
	LocalMemory        int64       `json:"local_memory"`
	MaxWorkGroup       int         `json:"max_work_group"`
	SubGroups          bool        `json:"sub_groups"`
	SubGroupSizes      []int       `json:"sub_group_sizes,omitempty"`
	MatrixInstructions bool        `json:"matrix_instructions"`
	FP16               bool        `json:"fp16"`
	BF16               bool        `json:"bf16"`
	Kernel             string      `json:"kernel,omitempty"` // the faster kernel
}

// A deviceLack is a missing kind of device.
type deviceLack struct {
	Kind string `json:"kind"`
	Why  string `json:"why"`
}

func runDevices(c *cli.Context) error {
	if err := noOperands(c); err != nil {
		return err
	}
	if err := atMost(c, maxThreads, "threads"); err != nil {
		return err
	}
	threads := c.Int("threads")
	if threads == 0 {
		threads = runtime.GOMAXPROCS(0)
	}
	probe := !c.Bool("no-probe")
	var report devicesReport
	entry, err := productDevice(c.Context, devices.CPU, probe, func(p xpu.Precision) (xpu.Device,
		error) {
		return cpu.New(threads, p), nil
	})
	if err != nil {
		return err
	}
	if probe {
		if entry.Copy, err = estimate.ProbeCopies(c.Context, threads); err != nil {
			return err
		}
	}
	report.Devices = append(report.Devices, entry)
	if entry, err = productDevice(c.Context, devices.OneDNN, probe, func(p xpu.Precision) (xpu.Device,
		error) {
		return onednn.New(threads, p)
	}); err == nil {
		report.Devices = append(report.Devices, entry)
	} else if c.Context.Err() != nil {
		return err
	} else {
		report.Missing = append(report.Missing, deviceLack{devices.OneDNN, err.Error()})
	}
	found, err := opencl.Devices()
	if err != nil { // also if there are other devices
		report.Missing = append(report.Missing, deviceLack{devices.OpenCL, err.Error()})
	}
	var cache *opencl.Cache
	if probe && len(found) > 0 {
		if cache, err = opencl.UserCache(); err != nil {
			fmt.Fprintf(c.App.ErrWriter, "warning: %s; kernels are compiled again in every process\n", err)
		}
	}
	for _, d := range found {
		entry := describeOpenCL(d)
		if probe {
			fmt.Fprintf(c.App.ErrWriter, "measuring %s\n", printable(d.String()))
			if err := probeOpenCL(c.Context, d, cache, &entry); err != nil {
				return err
			}
		}
		report.Devices = append(report.Devices, entry)
	}
	if c.Bool("json") {
		return printJSON(c.App.Writer, report)
	}
	report.write(c.App.Writer, probe)
	return nil
}

// productDevice describes and measures a device on which mula can train.
func productDevice(ctx context.Context, kind string, probe bool, open func(xpu.Precision) (xpu.Device,
	error)) (deviceEntry, error) {
	entry := deviceEntry{Kind: kind, Trains: true}
	for _, p := range []struct {
		precision xpu.Precision
		rate      *float64
	}{{xpu.FP32, &entry.FP32}, {xpu.BF16, &entry.BF16}} {
		d, err := open(p.precision)
		if err != nil {
			return entry, err
		}
		if p.precision == xpu.FP32 {
			entry.Name = d.Name()
		}
		if probe {
			*p.rate, err = estimate.ProbeProducts(ctx, d)
		}
		d.Close()
		if err != nil {
			return entry, err
		}
	}
	return entry, nil
}

func describeOpenCL(d *opencl.Device) deviceEntry {
	return deviceEntry{Kind: devices.OpenCL, Name: d.Name, Trains: true, OpenCL: &openclEntry{
		Type: d.Type, Platform: d.Platform, Driver: d.DriverVersion, Version: d.Version, ComputeUnits: d.ComputeUnits,
		Clock: d.Clock, Memory: d.Memory,
		MaxBuffer: d.MaxAllocation, LocalMemory: d.LocalMemory, MaxWorkGroup: d.MaxWorkGroup, SubGroups: d.SubGroups(),
		SubGroupSizes:      d.SubGroupSizes,
		MatrixInstructions: d.MatrixInstructions() || d.TensorCores(), FP16: d.FP16(), BF16: d.BF16(),
	}}
}

// probeOpenCL measures a device. The report contains errors of the measurement.
func probeOpenCL(ctx context.Context, d *opencl.Device, cache *opencl.Cache, entry *deviceEntry) error {
	bounded, cancel := context.WithTimeoutCause(ctx, deviceLimit, fmt.Errorf("no answer within %v", deviceLimit))
	defer cancel()
	rates, err := d.Probe(bounded, deviceTime, cache)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		entry.Failed, entry.Trains = err.Error(), false
		if bounded.Err() != nil {
			entry.Failed += ": " + context.Cause(bounded).Error()
		}
		return nil
	}
	entry.FP32, entry.Copy, entry.OpenCL.Kernel = rates.Product, rates.Copy, rates.Kernel
	return nil
}

func (r *devicesReport) write(w io.Writer, probe bool) {
	heading := []string{"device", "name", "trains"}
	if probe {
		heading = append(heading, "fp32 GFLOP/s", "bf16 GFLOP/s", "GB/s")
	}
	t := newTable(heading...)
	for _, d := range r.Devices {
		name, trains := d.Name, "no"
		if d.Trains {
			trains = "yes"
		}
		if d.OpenCL != nil {
			name = fmt.Sprintf("%s (%s)", name, d.OpenCL.Type)
		}
		row := []any{d.Kind, printable(name), trains}
		for _, rate := range []float64{d.FP32, d.BF16, d.Copy}[:len(heading)-len(row)] {
			if rate == 0 {
				row = append(row, "-")
			} else {
				row = append(row, fmt.Sprintf("%.4g", rate/1e9))
			}
		}
		t.row(row...)
	}
	t.write(w)
	if probe {
		fmt.Fprintln(w, "GFLOP/s: matrix products. GB/s: bytes read and written by copies. Each figure is the best "+
			"of a short measurement with kernels of mula or oneDNN.")
	}
	word := map[bool]string{true: "yes", false: "no"}
	for _, d := range r.Devices {
		o := d.OpenCL
		if o == nil {
			continue
		}
		groups := word[o.SubGroups]
		if len(o.SubGroupSizes) > 0 {
			groups += " of " + strings.Trim(strings.ReplaceAll(fmt.Sprint(o.SubGroupSizes), " ", ", "), "[]")
		}
		clock := ""
		if o.Clock > 0 {
			clock = fmt.Sprintf(" at %s MHz", quantity.Grouped(int64(o.Clock)))
		}
		text := fmt.Sprintf("\n%s\n  driver %s of %s; %s\n  %s%s; memory %s, at most %s per buffer, local %s; "+
			"work-groups of at most %s\n  sub-groups: %s; matrix instructions: %s; fp16: %s; bf16: %s\n",
			d.Name, o.Driver, o.Platform, o.Version, quantity.Plural(int64(o.ComputeUnits), "compute unit"), clock,
			quantity.Bytes(o.Memory), quantity.Bytes(o.MaxBuffer), quantity.Bytes(o.LocalMemory),
			quantity.Plural(int64(o.MaxWorkGroup), "work-item"), groups, word[o.MatrixInstructions], word[o.FP16],
			word[o.BF16])
		if o.Kernel != "" {
			text += fmt.Sprintf("  measured with the kernels copy and %s, by the device's clock\n", o.Kernel)
		}
		if d.Failed != "" {
			text += "  not measured: " + d.Failed + "\n"
		}
		fmt.Fprint(w, printable(text))
	}
	fmt.Fprintln(w)
	for _, lack := range r.Missing {
		fmt.Fprintln(w, printable(lack.Why))
	}
	fmt.Fprintln(w, "Choose a device with `device:` in train.yaml, or with --device: cpu, onednn, opencl, "+
		"opencl:NAME, opencl:NAME#2 (the second device of that name) or auto.")
}
