package cli

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"mula/train/devices"
	"mula/xpu/opencl"
)

// listDevices runs mula devices.
func listDevices(t *testing.T, args ...string) string {
	t.Helper()
	folder := t.TempDir() // what is compiled is the test's own
	t.Setenv("XDG_CACHE_HOME", folder)
	t.Setenv("POCL_CACHE_DIR", folder)
	var stdout, stderr bytes.Buffer
	if code := Main(append([]string{"mula", "devices"}, args...), nil, &stdout, &stderr); code != exitDone {
		t.Fatalf("exit code %d: %s", code, stderr.String())
	}
	return stdout.String()
}

// Without libraries there is the processor, and a sentence for each of them.
func TestDevicesWithoutLibraries(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing.so")
	t.Setenv(opencl.LibraryVariable, missing)
	t.Setenv("MULA_ONEDNN_LIB", missing)
	out := listDevices(t, "--no-probe", "--threads", "3")
	for _, want := range []string{"cpu ", "3 threads  yes", "opencl: no OpenCL loader: ", "onednn: no oneDNN library",
		"Choose a device with `device:` in train.yaml, or with --device: cpu, onednn, opencl, "} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in:\n%s", want, out)
		}
	}
	if strings.Contains(out, "GFLOP/s") {
		t.Errorf("rates that were not measured:\n%s", out)
	}
	var report devicesReport
	if err := json.Unmarshal([]byte(listDevices(t, "--threads", "1", "--json")), &report); err != nil {
		t.Fatal(err)
	}
	if len(report.Devices) != 1 || len(report.Missing) != 2 {
		t.Fatalf("%+v", report)
	}
	if d := report.Devices[0]; d.Kind != "cpu" || !d.Trains || d.FP32 <= 0 || d.BF16 <= 0 || d.Copy <= 0 ||
		d.OpenCL != nil {
		t.Errorf("%+v", d)
	}
}

func TestDevicesOfOpenCL(t *testing.T) {
	if found, err := opencl.Devices(); len(found) == 0 {
		t.Skip(err)
	}
	var report devicesReport
	if err := json.Unmarshal([]byte(listDevices(t, "--json", "--threads", "1")), &report); err != nil {
		t.Fatal(err)
	}
	d := report.Devices[len(report.Devices)-1]
	if d.Kind != devices.OpenCL || !d.Trains || d.OpenCL == nil {
		t.Fatalf("%+v", report)
	}
	if d.Name == "" || d.Failed != "" || d.FP32 <= 0 || d.Copy <= 0 || d.OpenCL.Memory <= 0 || d.OpenCL.Driver == "" ||
		d.OpenCL.Kernel == "" {
		t.Errorf("%+v of %+v", d.OpenCL, d)
	}
	if alive := opencl.Live(); alive != (opencl.Counts{}) {
		t.Errorf("left behind: %+v", alive)
	}
}

// What a compiler is given is told once, however many programs there are; what the cache has is
// not.
func TestSayCompiling(t *testing.T) {
	found, err := opencl.Devices()
	if len(found) == 0 {
		t.Skip(err)
	}
	t.Setenv("POCL_CACHE_DIR", t.TempDir())
	c, err := opencl.NewContext(found[0])
	if err != nil {
		t.Fatal(err)
	}
	defer c.Release()
	cache := opencl.NewCache(t.TempDir())
	for i, want := range []int{1, 0} {
		var stderr bytes.Buffer
		ctx := sayCompiling(t.Context(), newProgress(&stderr))
		for _, value := range []string{"1", "2"} {
			p, err := c.Build(ctx,
				opencl.Source{Name: "f.cl", Text: "kernel void f(global int *x)\n{\n\tx[get_global_id(0)] = " + value +
					";\n}\n"}, cache)
			if err != nil {
				t.Fatal(err)
			}
			p.Release()
		}
		if text := stderr.String(); strings.Count(text, "\n") != want ||
			strings.Count(text, "compiling kernels for "+found[0].Name) != want {
			t.Errorf("time %d: %q; want %d lines", i, text, want)
		}
	}
}

func TestDevicesTable(t *testing.T) {
	report := devicesReport{
		Devices: []deviceEntry{
			{Kind: "cpu", Name: "cpu avx2, 2 threads", Trains: true, FP32: 1.5e11, BF16: 2e11, Copy: 3e10},
			{Kind: devices.OpenCL, Name: "Max\x1b 1550", Trains: true, FP32: 1e13, Copy: 1.25e12,
				OpenCL: &openclEntry{Type: opencl.GPU, Platform: "Intel", Driver: "23", Version: "OpenCL 3.0",
					ComputeUnits: 512, Clock: 1600,
					Memory: 64e9, MaxBuffer: 32e9, LocalMemory: 128e3, MaxWorkGroup: 1024, SubGroups: true,
					SubGroupSizes: []int{16, 32}, MatrixInstructions: true, FP16: true, BF16: true,
					Kernel: "product_shared"}},
			{Kind: devices.OpenCL, Name: "Broken", Failed: "measuring Broken: no answer",
				OpenCL: &openclEntry{Type: opencl.CPU}},
		},
		Missing: []deviceLack{{"onednn", "onednn: not there"}},
	}
	var out bytes.Buffer
	report.write(&out, true)
	for _, want := range []string{
		"cpu     cpu avx2, 2 threads  yes              150           200    30\n",
		`opencl  Max\x1b 1550 (gpu)   yes            1e+04             -  1250`,
		"driver 23 of Intel; OpenCL 3.0\n  512 compute units at 1,600 MHz; memory 64.0 GB, at most 32.0 GB per " +
			"buffer, local 128 kB; work-groups of at most 1,024 work-items\n",
		"sub-groups: yes of 16, 32; matrix instructions: yes; fp16: yes; bf16: yes\n  measured with the kernels " +
			"copy and product_shared",
		"  not measured: measuring Broken: no answer\n",
		"\nonednn: not there\nChoose a device with `device:` in train.yaml, or with --device: cpu, onednn, opencl, ",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in:\n%s", want, out.String())
		}
	}
}

// A device that there is not is refused before anything is read.
func TestDeviceFlag(t *testing.T) {
	for _, command := range []string{"eval", "generate"} {
		var stdout, stderr bytes.Buffer
		code := Main([]string{"mula", command, "--model", "none", "--device", "gpu"}, nil, &stdout, &stderr)
		if want := `--device is "gpu"; allowed: cpu, onednn, opencl, opencl:NAME, opencl:NAME#2, auto`; code != exitUsage || !strings.Contains(stderr.String(), want) {
			t.Errorf("%s: exit code %d: %s", command, code, stderr.String())
		}
	}
}
