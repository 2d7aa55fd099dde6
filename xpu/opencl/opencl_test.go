package opencl

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"pgregory.net/rapid"

	"mula/internal/longtest"
	"mula/internal/testwait"
)

// The test binary starts itself for tests that need a process of their own. roleVariable selects
// the test.
const roleVariable, folderVariable = "MULA_TEST_OPENCL_ROLE", "MULA_TEST_OPENCL_FOLDER"

func TestMain(m *testing.M) {
	// PoCL keeps files of its own.
	folder, err := os.MkdirTemp("", "opencl")
	if err != nil {
		panic(err)
	}
	os.Setenv("POCL_CACHE_DIR", folder)
	code := 0
	switch role := os.Getenv(roleVariable); role {
	case "":
		code = m.Run()
	case "devices":
		_, err := Devices()
		fmt.Println(err)
	case "build":
		code = buildInProcess(os.Getenv(folderVariable))
	}
	os.RemoveAll(folder)
	os.Exit(code)
}

// start starts the test binary in a role.
func start(t *testing.T, role, folder string, environment ...string) func() string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(append(os.Environ(), roleVariable+"="+role, folderVariable+"="+folder), environment...)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return func() string {
		defer cancel()
		if err := cmd.Wait(); err != nil {
			t.Errorf("role %s: %v: %s", role, err, out.String())
		}
		return out.String()
	}
}

// someDevice is the device that is tested. A test that has ended must have left nothing behind.
func someDevice(t *testing.T) *Device {
	t.Helper()
	devices, err := Devices()
	if len(devices) == 0 {
		t.Skipf("no OpenCL device: %v", err)
	}
	d, err := Choose(devices, Choice{})
	if err != nil {
		t.Fatal(err)
	}
	before := Live()
	t.Cleanup(func() {
		// Commands that the test did not wait for may still run.
		testwait.Until(t, "all OpenCL objects are released", func() bool { return Live() == before })
	})
	return d
}

// changed is the device with functions of the library replaced.
func changed(d *Device, change func(c *calls)) *Device {
	other, l := *d, *d.library
	change(&l.calls)
	other.library = &l
	return &other
}

const axpyText = `
kernel void axpy(global float *y, const global float *x, const float a, const int n)
{
	const int i = get_global_id(0);
	if (i < n)
		y[i] += a * x[i];
}
`

const testText = axpyText + `
kernel void sums(global float *out, const global float *x, local float *part)
{
	const int i = get_local_id(0);
	part[i] = x[get_global_id(0)];
	for (int n = get_local_size(0) / 2; n > 0; n /= 2) {
		barrier(CLK_LOCAL_MEM_FENCE);
		if (i < n)
			part[i] += part[i + n];
	}
	if (i == 0)
		out[get_group_id(0)] = part[0];
}
`

// bench is a context with a queue and the kernels of testText.
type bench struct {
	*Context
	queue      *Queue
	axpy, sums *Kernel
}

func newBench(t *testing.T, d *Device) *bench {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	c, err := NewContext(d)
	must(err)
	t.Cleanup(c.Release)
	b := &bench{Context: c}
	b.queue, err = c.NewQueue(true)
	must(err)
	t.Cleanup(b.queue.Release)
	p, err := c.Build(t.Context(), Source{Name: "test.cl", Text: testText}, nil)
	must(err)
	defer p.Release()
	b.axpy, err = p.Kernel("axpy")
	must(err)
	t.Cleanup(b.axpy.Release)
	b.sums, err = p.Kernel("sums")
	must(err)
	t.Cleanup(b.sums.Release)
	return b
}

// buffer makes a buffer of numbers.
func (b *bench) buffer(t *testing.T, x []float32) *Buffer {
	t.Helper()
	buffer, err := b.NewBuffer(4 * int64(len(x)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(buffer.Release)
	if err := Write(t.Context(), b.queue, buffer, 0, x); err != nil {
		t.Fatal(err)
	}
	return buffer
}

func wants(t *testing.T, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want one with %q", parts)
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("the error is %q, want %q in it", err, part)
		}
	}
}

func TestNoLoader(t *testing.T) {
	if runtime.GOOS != "linux" || runtime.GOARCH != "amd64" && runtime.GOARCH != "arm64" {
		_, err := Devices()
		wants(t, err, "only on Linux")
		return
	}
	folder := t.TempDir()
	text := filepath.Join(folder, "text.so")
	if err := os.WriteFile(text, []byte("no library"), 0o666); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name string
		want []string
	}{
		{filepath.Join(folder, "missing.so"), []string{"no OpenCL loader", "missing.so",
			LibraryVariable + " is set to it"}},
		{text, []string{"no OpenCL loader", "text.so"}},
		{folder, []string{"no OpenCL loader"}},
		{"libc.so.6", []string{"libc.so.6 has no symbol clGetPlatformIDs", "install an OpenCL loader of version 1.2"}},
	} {
		t.Setenv(LibraryVariable, test.name)
		devices, err := Devices()
		if devices != nil {
			t.Errorf("%s: %d devices", test.name, len(devices))
		}
		wants(t, err, test.want...)
	}
}

func TestNoDriver(t *testing.T) {
	if _, err := open(); err != nil {
		t.Skip(err)
	}
	out := start(t, "devices", "", "OCL_ICD_VENDORS="+t.TempDir())()
	if !strings.Contains(out, "found no driver") || !strings.Contains(out, "/etc/OpenCL/vendors") {
		t.Errorf("without a driver: %s", out)
	}
}

// What drivers answer that have no devices, or cannot be asked.
func TestDevicesOfBrokenDrivers(t *testing.T) {
	text := func(s string, size uintptr, value unsafe.Pointer, bytes *uintptr) int32 {
		if bytes != nil {
			*bytes = uintptr(len(s) + 1)
		}
		if value != nil {
			copy(unsafe.Slice((*byte)(value), size), s+"\x00")
		}
		return 0
	}
	for _, test := range []struct {
		name      string
		platforms int32 // or the code
		devices   int32
		platform  int32 // code of clGetPlatformInfo
		device    int32 // code of clGetDeviceInfo
		want      string
	}{
		{"no platform", codePlatformNotFound, 0, 0, 0, "found no driver"},
		{"zero platforms", 0, 0, 0, 0, "found no driver"},
		{"platforms fail", -6, 0, 0, 0, "clGetPlatformIDs: CL_OUT_OF_HOST_MEMORY (-6)"},
		{"no devices", 1, codeDeviceNotFound, 0, 0, `no device in the drivers "Broken"`},
		{"zero devices", 2, 0, 0, 0, `no device in the drivers "Broken" and "Broken"`},
		{"devices fail", 1, -32, 0, 0, `driver "Broken": clGetDeviceIDs: CL_INVALID_PLATFORM (-32)`},
		{"too many devices", 1, 1 << 20, 0, 0, "clGetDeviceIDs: invalid number of objects 1048576"},
		{"platform fails", 1, 1, -30, 0, "clGetPlatformInfo: CL_INVALID_VALUE (-30)"},
		{"device fails", 1, 1, 0, -2, `a device of driver "Broken": clGetDeviceInfo: CL_DEVICE_NOT_AVAILABLE (-2)`},
		{"device is not there", 1, 1, 0, 0, "it has no compiler|it is not available|big-endian"},
	} {
		list := func(n int32, out *uintptr, count *uint32) int32 {
			if n < 0 {
				return n
			}
			if count != nil {
				*count = uint32(n)
			}
			if out != nil {
				*out = 1
			}
			return 0
		}
		l := &library{name: "fake", calls: calls{
			GetPlatformIDs: func(_ uint32, out *uintptr, count *uint32) int32 {
				return list(test.platforms, out,
					count)
			},
			GetDeviceIDs: func(_ uintptr, _ uint64, _ uint32, out *uintptr, count *uint32) int32 {
				return list(test.devices, out, count)
			},
			GetPlatformInfo: func(_ uintptr, _ uint32, size uintptr, value unsafe.Pointer, bytes *uintptr) int32 {
				if test.platform != 0 {
					return test.platform
				}
				return text("Broken", size, value, bytes)
			},
			GetDeviceInfo: func(_ uintptr, _ uint32, size uintptr, value unsafe.Pointer, bytes *uintptr) int32 {
				if test.device != 0 {
					return test.device
				}
				return text("", min(size, 1), value, bytes) // all numbers are 0
			},
		}}
		devices, err := l.devices()
		if len(devices) > 0 || err == nil || !slices.ContainsFunc(strings.Split(test.want, "|"),
			func(w string) bool { return strings.Contains(err.Error(), w) }) {
			t.Errorf("%s: %d devices, error %v; want %s", test.name, len(devices), err, test.want)
		}
	}
}

func TestChoose(t *testing.T) {
	const matrices = "cl_intel_subgroup_matrix_multiply_accumulate"
	devices := []*Device{
		{Name: "EPYC", Platform: "PoCL", Type: CPU, Extensions: []string{"cl_khr_fp64"}},
		{Name: "FPGA", Platform: "Maker", Type: Accelerator},
		{Name: "Arc", Platform: "Intel", Type: GPU, Extensions: []string{"cl_khr_fp16"}},
		{Name: "Max 1550", Platform: "Intel", Type: GPU, Extensions: []string{"cl_khr_fp16", matrices}},
	}
	for _, test := range []struct {
		want Choice
		is   string // or a part of the error
	}{
		{Choice{}, "Arc"},
		{Choice{Type: CPU}, "EPYC"},
		{Choice{Type: Accelerator}, "FPGA"},
		{Choice{Name: "max"}, "Max 1550"},
		{Choice{Name: "pocl"}, "EPYC"},
		{Choice{Extensions: []string{"cl_khr_fp16", matrices}}, "Max 1550"},
		{Choice{Name: "epyc", Type: GPU},
			`no device whose name has "epyc" of type gpu; available: EPYC (cpu, PoCL): another type; FPGA`},
		{Choice{Name: "arc", Extensions: []string{matrices}}, "Arc (gpu, Intel): no " + matrices},
		{Choice{Name: "h100"},
			`no device whose name has "h100"; available: EPYC (cpu, PoCL); FPGA (accelerator, Maker); Arc (gpu, Intel); Max 1550 (gpu, Intel)`},
	} {
		d, err := Choose(devices, test.want)
		if err == nil && d.Name != test.is || err != nil && !strings.Contains(err.Error(), test.is) {
			t.Errorf("%+v: %v, %v; want %s", test.want, d, err, test.is)
		}
	}
	_, err := Choose(nil, Choice{})
	wants(t, err, "this machine has no OpenCL devices")

	// Devices with equal names are distinguished by number.
	devices = append(devices, &Device{Name: "Max 1550", Platform: "Intel", Type: GPU, Version: "second"},
		&Device{Name: "Max 1550", Platform: "Emulator", Type: CPU},
		&Device{Name: "Odd#x", Type: Other}, &Device{Name: "Max 1550", Platform: "Intel", Type: GPU, Version: "third"})
	for _, test := range []struct{ name, version string }{{"max", ""}, {"max#1", ""}, {"Max 1550#2", "second"},
		{"max#3", "third"}, {"intel#1", ""}, {"odd#x", ""}, {"#1", ""}} {
		d, err := Choose(devices, Choice{Name: test.name})
		if err != nil || d.Version != test.version {
			t.Errorf("%s: %+v, %v; want version %q", test.name, d, err, test.version)
		}
	}
	_, err = Choose(devices, Choice{Name: "max#4"})
	wants(t, err, `no device "max#4": the last number of Max 1550 (gpu, Intel) is 3`)
	_, err = Choose(devices, Choice{Name: "max#0"})
	wants(t, err, `no device whose name has "max#0"`)
}

// Data that is written in parts arrives, and no other bytes change.
func TestTransfers(t *testing.T) {
	b := newBench(t, someDevice(t))
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 300).Draw(t, "n")
		buffer, err := b.NewBuffer(2 * int64(n))
		if err != nil {
			t.Fatal(err)
		}
		defer buffer.Release()
		model := make([]uint16, n)
		if err := Write(context.Background(), b.queue, buffer, 0, model); err != nil {
			t.Fatal(err)
		}
		for range rapid.IntRange(1, 5).Draw(t, "writes") {
			first := rapid.IntRange(-1, n+1).Draw(t, "first")
			data := rapid.SliceOfN(rapid.Uint16(), 0, n).Draw(t, "data")
			err := Write(context.Background(), b.queue, buffer, int64(first), data)
			if fits := first >= 0 && first+len(data) <= n; fits != (err == nil) {
				t.Fatalf("write of %d from %d on to a buffer of %d: %v", len(data), first, n, err)
			}
			if err == nil {
				copy(model[first:], data)
			}
		}
		got := make([]uint16, n)
		if err := Read(context.Background(), b.queue, buffer, 0, got); err != nil || !slices.Equal(got, model) {
			t.Fatalf("%v, %v; want %v", got, err, model)
		}
	})
	for _, bytes := range []int64{-1, 0, b.Device().MaxAllocation + 1} {
		_, err := b.NewBuffer(bytes)
		wants(t, err, fmt.Sprintf("invalid buffer size of %d bytes; it must be from 1 to", bytes))
	}
}

// A queue executes its commands while another queue is held, and waits for the other queue's
// commands before a marker, not for later ones.
func TestQueues(t *testing.T) {
	b := newBench(t, someDevice(t))
	other, err := b.NewQueue(false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(other.Release)
	var pinned [2]*Pinned
	for i := range pinned {
		if pinned[i], err = other.NewPinned(16); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(pinned[i].Release)
	}
	must := func(e *Event, err error) *Event {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Release)
		return e
	}
	buffer := b.buffer(t, []float32{1, 2, 3, 4})
	complete := must(b.queue.Marker())
	proceed, err := b.queue.Hold()
	if err != nil {
		t.Fatal(err)
	}
	if err := b.queue.Zero(buffer, 0, 16); err != nil {
		t.Fatal(err)
	}
	zero := must(b.queue.Marker())
	if err := b.queue.Flush(); err != nil {
		t.Fatal(err)
	}
	// The other queue waits for the commands before the marker, and not for the held ones.
	if err := other.After(complete); err != nil {
		t.Fatal(err)
	}
	if err := must(other.Download(pinned[0], 4, buffer, 4, 12)).Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, want := pinned[0].Bytes()[4:], bytesOf([]float32{2, 3, 4}); !slices.Equal(got, want) {
		t.Errorf("read % x before the held command, want % x", got, want)
	}
	if err := other.After(zero); err != nil {
		t.Fatal(err)
	}
	after := must(other.Download(pinned[1], 0, buffer, 0, 16))
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := after.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a command after a held one: %v", err)
	}
	if err := proceed(); err != nil {
		t.Fatal(err)
	}
	if err := after.Wait(t.Context()); err != nil || !slices.Equal(pinned[1].Bytes(), make([]byte, 16)) {
		t.Errorf("read % x after the held command, %v", pinned[1].Bytes(), err)
	}
	foreign := newBench(t, b.device).buffer(t, []float32{1})
	for name, f := range map[string]func() error{
		"no bytes": func() error { _, err := other.Upload(buffer, 0, pinned[0], 0, 0); return err },
		"beyond p": func() error { _, err := other.Upload(buffer, 0, pinned[0], 9, 8); return err },
		"beyond b": func() error { _, err := other.Download(pinned[0], 0, buffer, 9, 8); return err },
		"below":    func() error { _, err := other.Download(pinned[0], 0, buffer, -4, 8); return err },
		"foreign":  func() error { _, err := other.Upload(foreign, 0, pinned[0], 0, 4); return err },
		"nothing":  func() error { _, err := other.NewPinned(0); return err },
	} {
		if err := f(); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func bytesOf(x []float32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(&x[0])), 4*len(x))
}

// Filling and copying, within a buffer too, give what a model gives; what goes beyond an end is
// refused.
func TestZeroAndCopy(t *testing.T) {
	b := newBench(t, someDevice(t))
	rapid.Check(t, func(t *rapid.T) {
		var buffers [2]*Buffer
		var models [2][]int32
		for i := range buffers {
			n := rapid.IntRange(1, 100).Draw(t, "n")
			buffer, err := b.NewBuffer(4 * int64(n))
			if err != nil {
				t.Fatal(err)
			}
			defer buffer.Release()
			buffers[i], models[i] = buffer, make([]int32, n)
			for j := range models[i] {
				models[i][j] = int32(1000*i + j + 1)
			}
			if err := Write(context.Background(), b.queue, buffer, 0, models[i]); err != nil {
				t.Fatal(err)
			}
		}
		place := func(name string) (i, first, n int) {
			i = rapid.IntRange(0, 1).Draw(t, name)
			return i, rapid.IntRange(-1, len(models[i])+1).Draw(t, name+" first"), rapid.IntRange(-1,
				len(models[i])+1).Draw(t, name+" number")
		}
		fits := func(i, first, n int) bool { return first >= 0 && n >= 0 && first+n <= len(models[i]) }
		for range rapid.IntRange(1, 6).Draw(t, "commands") {
			to, toFirst, n := place("to")
			var err error
			var right bool
			if rapid.Bool().Draw(t, "zero") {
				if right = fits(to, toFirst, n); right {
					clear(models[to][toFirst : toFirst+n])
				}
				err = b.queue.Zero(buffers[to], 4*int64(toFirst), 4*int64(n))
			} else {
				from, fromFirst, _ := place("from")
				overlap := to == from && n > 0 && toFirst < fromFirst+n && fromFirst < toFirst+n
				if right = fits(to, toFirst, n) && fits(from, fromFirst, n) && !overlap; right {
					copy(models[to][toFirst:toFirst+n], models[from][fromFirst:fromFirst+n])
				}
				err = b.queue.Copy(buffers[to], 4*int64(toFirst), buffers[from], 4*int64(fromFirst), 4*int64(n))
			}
			if right != (err == nil) {
				t.Fatalf("to %d elements from %d on of %d: %v", n, toFirst, len(models[to]), err)
			}
		}
		for i, buffer := range buffers {
			got := make([]int32, len(models[i]))
			if err := Read(context.Background(), b.queue, buffer, 0, got); err != nil || !slices.Equal(got, models[i]) {
				t.Fatalf("%v, %v; want %v", got, err, models[i])
			}
		}
	})
	other := newBench(t, b.Device())
	mine, foreign := b.buffer(t, make([]float32, 8)), other.buffer(t, make([]float32, 8))
	wants(t, b.queue.Zero(foreign, 0, 4), "different contexts")
	wants(t, b.queue.Copy(mine, 0, foreign, 0, 4), "different contexts")
	wants(t, b.queue.Zero(mine, 2, 4), "4 bytes from byte 2 on")
	if err := b.queue.Flush(); err != nil {
		t.Error(err)
	}
}

func TestLaunch(t *testing.T) {
	b := newBench(t, someDevice(t))
	const n, group = 1000, 8
	x, y := make([]float32, n), make([]float32, n)
	for i := range x {
		x[i], y[i] = float32(i%17), float32(i%5)
	}
	dx, dy := b.buffer(t, x), b.buffer(t, y)
	e, err := b.queue.LaunchEvent(b.axpy, []int{1024}, []int{group}, Global(dy), Global(dx), Scalar(float32(3)),
		Scalar(int32(n-1)))
	if err != nil {
		t.Fatal(err)
	}
	defer e.Release()
	got := make([]float32, n)
	if err := Read(t.Context(), b.queue, dy, 0, got); err != nil {
		t.Fatal(err)
	}
	for i := range got {
		want := y[i] + 3*x[i]
		if i == n-1 {
			want = y[i]
		}
		if got[i] != want {
			t.Fatalf("y[%d] = %g, want %g", i, got[i], want)
		}
	}
	if err := e.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if times, err := e.Times(); err != nil || times.Ran() < 0 || times.Queued > times.Submitted ||
		times.Submitted > times.Started {
		t.Errorf("times %+v, %v", times, err)
	}
	sums := b.buffer(t, make([]float32, n/group))
	if err := b.queue.Launch(b.sums, []int{n}, []int{group}, Global(sums), Global(dx), Local(4*group)); err != nil {
		t.Fatal(err)
	}
	if err := b.queue.Finish(t.Context()); err != nil {
		t.Fatal(err)
	}
	got = make([]float32, n/group)
	if err := Read(context.Background(), b.queue, sums, 0, got); err != nil {
		t.Fatal(err)
	}
	for i := range got {
		want := float32(0)
		for _, v := range x[i*group : (i+1)*group] {
			want += v
		}
		if got[i] != want {
			t.Fatalf("sum %d is %g, want %g", i, got[i], want)
		}
	}
}

// Wrong launches are refused before the library hears of them.
func TestWrongLaunches(t *testing.T) {
	heard := 0
	d := changed(someDevice(t), func(c *calls) {
		set := c.SetKernelArg
		c.SetKernelArg = func(kernel uintptr, index uint32, size uintptr, value unsafe.Pointer) int32 {
			heard++
			return set(kernel, index, size, value)
		}
	})
	b, other := newBench(t, d), newBench(t, d)
	if !b.axpy.parameters[2].known {
		t.Errorf("%s does not tell the types of arguments", d)
	}
	y, foreign := b.buffer(t, make([]float32, 64)), other.buffer(t, make([]float32, 64))
	global, a, n := Global(y), Scalar(float32(1)), Scalar(int32(64))
	for _, test := range []struct {
		kernel        *Kernel
		sizes, groups []int
		args          []Argument
		want          string
	}{
		{b.axpy, []int{64}, []int{8}, []Argument{global, global, a}, "3 arguments; the kernel has 4"},
		{b.axpy, []int{64}, []int{8}, []Argument{global, global, n, n}, "argument 2 is int; it must be float"},
		{b.axpy, []int{64}, []int{8}, []Argument{global, global, a, Scalar(int64(64))},
			"argument 3 is long; it must be int"},
		{b.axpy, []int{64}, []int{8}, []Argument{global, global, a, Scalar(uint32(64))},
			"argument 3 is uint; it must be int"},
		{b.axpy, []int{64}, []int{8}, []Argument{a, global, a, n}, "argument 0 is float; it must be global float*"},
		{b.axpy, []int{64}, []int{8}, []Argument{global, Local(8), a, n},
			"argument 1 is local memory; it must be global float*"},
		{b.axpy, []int{64}, []int{8}, []Argument{global, {}, a, n}, "argument 1 is empty"},
		{b.axpy, []int{64}, []int{8}, []Argument{global, Global(nil), a, n}, "argument 1 is empty"},
		{b.axpy, []int{64}, []int{8}, []Argument{global, Global(foreign), a, n},
			"argument 1 is a buffer of another context"},
		{b.sums, []int{64}, []int{8}, []Argument{global, global, Local(0)}, "argument 2 is 0 bytes of local memory"},
		{b.sums, []int{64}, []int{8}, []Argument{global, global, Local(1 << 40)},
			"bytes of local memory; the limit is 1 to"},
		{b.sums, []int{64}, []int{8}, []Argument{global, global, global},
			"argument 2 is global memory; it must be local float*"},
		{b.axpy, []int{64}, []int{7}, []Argument{global, global, a, n}, "a size must be a positive multiple of its " +
			"group size"},
		{b.axpy, []int{0}, []int{8}, []Argument{global, global, a, n},
			"a size must be a positive multiple of its group size"},
		{b.axpy, []int{64, 64}, []int{8}, []Argument{global, global, a, n}, "the same 1 to 3 dimensions"},
		{b.axpy, nil, nil, []Argument{global, global, a, n}, "the same 1 to 3 dimensions"},
		{b.axpy, []int{1 << 30, 1 << 30, 1 << 30}, []int{1 << 30, 1 << 30, 1 << 30}, []Argument{global, global, a, n},
			"work-items per group"},
		{other.axpy, []int{64}, []int{8}, []Argument{global, global, a, n}, "different contexts"},
	} {
		wants(t, b.queue.Launch(test.kernel, test.sizes, test.groups, test.args...), "kernel "+test.kernel.name,
			test.want)
	}
	if heard > 0 {
		t.Errorf("the library heard of %d arguments", heard)
	}
	wants(t, Read(t.Context(), b.queue, foreign, 0, make([]float32, 1)), "different contexts")
}

func TestWrongSources(t *testing.T) {
	c, err := NewContext(someDevice(t))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Release()
	var build *buildError
	_, err = c.Build(t.Context(),
		Source{Name: "wrong.cl", Text: "kernel void f(global int *x)\n{\n\tx[0] = unheard_of;\n}\n"}, nil)
	wants(t, err, "wrong.cl does not compile for "+c.Device().Name, "unheard_of", "CL_BUILD_PROGRAM_FAILURE")
	if !errors.As(err, &build) || !strings.Contains(build.Log, "unheard_of") || !isCode(err, -11) {
		t.Errorf("the error is %#v", err)
	}
	_, err = c.Build(t.Context(), Source{Name: "wrong.cl", Text: testText, Options: "-no-such-option"}, nil)
	wants(t, err, "wrong.cl does not compile")
	_, err = c.Build(t.Context(), Source{Name: "wrong.cl", Text: "kernel\x00void"}, nil)
	wants(t, err, "zero bytes")
	p, err := c.Build(t.Context(), Source{Name: "test.cl", Text: testText}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Release()
	_, err = p.Kernel("nothing")
	wants(t, err, "test.cl: kernel nothing: clCreateKernel: CL_INVALID_KERNEL_NAME (-46)")
	_, err = p.Kernel("ax\x00py")
	wants(t, err, "zero bytes")
}

// Every method of a released object returns an error, and a second release does nothing.
func TestReleased(t *testing.T) {
	d := someDevice(t)
	b, gone := newBench(t, d), newBench(t, d)
	buffer := b.buffer(t, make([]float32, 8))
	dead, err := b.NewBuffer(32)
	if err != nil {
		t.Fatal(err)
	}
	e, err := b.queue.LaunchEvent(b.axpy, []int{8}, []int{8}, Global(buffer), Global(dead), Scalar(float32(0)),
		Scalar(int32(8)))
	if err != nil {
		t.Fatal(err)
	}
	deadQueue, err := b.NewQueue(true)
	if err != nil {
		t.Fatal(err)
	}
	p, err := b.Build(t.Context(), Source{Name: "test.cl", Text: testText}, nil)
	if err != nil {
		t.Fatal(err)
	}
	k, err := p.Kernel("axpy")
	if err != nil {
		t.Fatal(err)
	}
	pinned, err1 := b.queue.NewPinned(8)
	deadPinned, err2 := b.queue.NewPinned(8)
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	defer pinned.Release()
	// Before the command has ended, and parents before their children.
	for _, r := range []interface{ Release() }{gone.Context, gone.Context, p, p, k, dead, dead, e, e, deadQueue,
		deadQueue, deadPinned, deadPinned} {
		r.Release()
	}
	for name, f := range map[string]func() error{
		"NewBuffer": func() error { _, err := gone.NewBuffer(8); return err },
		"NewQueue":  func() error { _, err := gone.NewQueue(true); return err },
		"Build":     func() error { _, err := gone.Build(t.Context(), Source{Text: testText}, nil); return err },
		"Kernel":    func() error { _, err := p.Kernel("axpy"); return err },
		"Launch": func() error {
			return b.queue.Launch(k, []int{8}, []int{8}, Global(buffer), Global(buffer), Scalar(float32(0)),
				Scalar(int32(8)))
		},
		"Launch 2": func() error {
			return b.queue.Launch(b.axpy, []int{8}, []int{8}, Global(buffer), Global(dead), Scalar(float32(0)),
				Scalar(int32(8)))
		},
		"Launch 3": func() error {
			return deadQueue.Launch(b.axpy, []int{8}, []int{8}, Global(buffer), Global(buffer), Scalar(float32(0)),
				Scalar(int32(8)))
		},
		"Read":      func() error { return Read(t.Context(), b.queue, dead, 0, make([]byte, 8)) },
		"Write":     func() error { return Write(t.Context(), deadQueue, buffer, 0, make([]byte, 8)) },
		"Zero":      func() error { return b.queue.Zero(dead, 0, 4) },
		"Copy":      func() error { return b.queue.Copy(buffer, 0, dead, 0, 4) },
		"Copy 2":    func() error { return b.queue.Copy(dead, 0, buffer, 0, 4) },
		"Flush":     func() error { return deadQueue.Flush() },
		"Finish":    func() error { return deadQueue.Finish(t.Context()) },
		"Marker":    func() error { _, err := deadQueue.Marker(); return err },
		"After":     func() error { return b.queue.After(e) },
		"Hold":      func() error { _, err := deadQueue.Hold(); return err },
		"NewPinned": func() error { _, err := deadQueue.NewPinned(8); return err },
		"Upload":    func() error { _, err := b.queue.Upload(dead, 0, pinned, 0, 8); return err },
		"Upload 2":  func() error { _, err := b.queue.Upload(buffer, 0, deadPinned, 0, 8); return err },
		"Download":  func() error { _, err := deadQueue.Download(pinned, 0, buffer, 0, 8); return err },
		"Wait":      func() error { return e.Wait(t.Context()) },
		"Times":     func() error { _, err := e.Times(); return err },
	} {
		if err := f(); !errors.Is(err, ErrReleased) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// A context whose owner has released it still serves its remaining objects.
	if err := gone.queue.Finish(t.Context()); err != nil {
		t.Error(err)
	}
}

// work does something of everything.
func work(ctx context.Context, d *Device, cache *Cache) error {
	c, err := NewContext(d)
	if err != nil {
		return err
	}
	defer c.Release()
	q, err := c.NewQueue(true)
	if err != nil {
		return err
	}
	defer q.Release()
	p, err := c.Build(ctx, Source{Name: "test.cl", Text: axpyText}, cache)
	if err != nil {
		return err
	}
	defer p.Release()
	k, err := p.Kernel("axpy")
	if err != nil {
		return err
	}
	defer k.Release()
	b, err := c.NewBuffer(64)
	if err != nil {
		return err
	}
	defer b.Release()
	x := slices.Repeat([]float32{2}, 16)
	if err := Write(ctx, q, b, 0, x); err != nil {
		return err
	}
	if err := q.Zero(b, 32, 32); err != nil {
		return err
	}
	if err := q.Copy(b, 32, b, 0, 32); err != nil {
		return err
	}
	if err := q.Launch(k, []int{16}, []int{16}, Global(b), Global(b), Scalar(float32(0)),
		Scalar(int32(16))); err != nil {
		return err
	}
	if err := q.Flush(); err != nil {
		return err
	}
	e, err := q.LaunchEvent(k, []int{16}, []int{16}, Global(b), Global(b), Scalar(float32(3)), Scalar(int32(16)))
	if err != nil {
		return err
	}
	defer e.Release()
	if err := e.Wait(ctx); err != nil {
		return err
	}
	if _, err := e.Times(); err != nil {
		return err
	}
	if err := q.Finish(ctx); err != nil {
		return err
	}
	if err := Read(ctx, q, b, 0, x); err != nil {
		return err
	}
	if x[0] != 8 || x[15] != 8 {
		return fmt.Errorf("wrong result %v", x)
	}
	return workPinned(ctx, c, q, b)
}

// workPinned copies from pinned memory to b in q, and back in another queue.
func workPinned(ctx context.Context, c *Context, q *Queue, b *Buffer) error {
	other, err := c.NewQueue(false)
	if err != nil {
		return err
	}
	defer other.Release()
	p, err := other.NewPinned(64)
	if err != nil {
		return err
	}
	defer p.Release()
	copy(p.Bytes(), "pinned")
	e1, err := q.Upload(b, 4, p, 0, 6)
	if err != nil {
		return err
	}
	defer e1.Release()
	e2, err := q.Marker()
	if err != nil {
		return err
	}
	defer e2.Release()
	if err := errors.Join(q.Flush(), other.After(e2)); err != nil {
		return err
	}
	e3, err := other.Download(p, 3, b, 2, 8)
	if err != nil {
		return err
	}
	defer e3.Release()
	if err := e3.Wait(ctx); err != nil {
		return err
	}
	if got := string(p.Bytes()[5:11]); got != "pinned" {
		return fmt.Errorf("wrong bytes %q", got)
	}
	return nil
}

// Whichever call fails, the error names it and nothing is left behind.
func TestFailingCalls(t *testing.T) {
	longtest.SkipIfShort(t)
	d := someDevice(t)
	optional := []string{"clGetProgramBuildInfo", "clGetProgramInfo", "clGetKernelArgInfo"} // work goes on without
	for _, name := range []string{"empty cache", "filled cache"} {
		folder := t.TempDir()
		if name == "filled cache" {
			if err := work(t.Context(), d, NewCache(folder)); err != nil {
				t.Fatal(err)
			}
		}
		for nth := 1; ; nth++ {
			if name == "empty cache" {
				folder = t.TempDir()
			}
			var mu sync.Mutex
			calls, failed := 0, ""
			faulty := changed(d, func(c *callsAlias) {
				all := reflect.ValueOf(c).Elem()
				for i := range all.NumField() {
					field := all.Field(i)
					call, real := "cl"+all.Type().Field(i).Name, reflect.ValueOf(field.Interface())
					if strings.HasPrefix(call, "clRelease") || call == "clEnqueueUnmapMemObject" {
						continue // calls of Release, which has no error
					}
					field.Set(reflect.MakeFunc(field.Type(), func(args []reflect.Value) []reflect.Value {
						mu.Lock()
						calls++
						now := calls == nth
						if now {
							failed = call
						}
						mu.Unlock()
						if !now {
							return real.Call(args)
						}
						if field.Type().Out(0).Kind() == reflect.Int32 {
							return []reflect.Value{reflect.ValueOf(int32(-5))}
						}
						*args[len(args)-1].Interface().(*int32) = -5
						return []reflect.Value{reflect.Zero(field.Type().Out(0))}
					}))
				}
			})
			before := Live()
			err := work(context.Background(), faulty, NewCache(folder))
			if after := Live(); after != before {
				t.Fatalf("%s: %s fails: left behind %+v, before %+v", name, failed, after, before)
			}
			if failed == "" {
				if err != nil || nth < 20 {
					t.Errorf("%s: without a failing call, of %d: %v", name, nth-1, err)
				}
				break
			}
			// it is rebuilt
			fromCache := name == "filled cache" && (failed == "clCreateProgramWithBinary" || failed == "clBuildProgram")
			if slices.Contains(optional, failed) || fromCache {
				if err != nil {
					t.Errorf("%s: %s fails: %v", name, failed, err)
				}
			} else if err == nil || !strings.Contains(err.Error(), failed+": CL_OUT_OF_RESOURCES (-5)") {
				t.Errorf("%s: %s fails: %v", name, failed, err)
			}
		}
	}

	// The library says neither when a command ends nor whether it has.
	kept := len(lost.pins)
	b := newBench(t, changed(d, func(c *calls) {
		c.WaitForEvents = func(uint32, *uintptr) int32 { return -5 }
		c.GetEventInfo = func(uintptr, uint32, uintptr, unsafe.Pointer, *uintptr) int32 { return -5 }
	}))
	buffer, err := b.NewBuffer(4096)
	if err != nil {
		t.Fatal(err)
	}
	if err := Write(context.Background(), b.queue, buffer, 0, make([]float32, 1024)); err == nil ||
		len(lost.pins) != kept+1 {
		t.Errorf("memory of a command of whose end nothing is known was not kept; error %v", err)
	}
	buffer.Release()
}

// callsAlias names the type where a variable has the name calls.
type callsAlias = calls

// A cancelled context ends waiting at once. Commands in progress complete, and nothing is left.
func TestDoneContext(t *testing.T) {
	d := someDevice(t)
	held := make(chan struct{})
	waiting := make(chan struct{}, 8)
	b := newBench(t, changed(d, func(c *calls) {
		wait := c.WaitForEvents
		c.WaitForEvents = func(count uint32, events *uintptr) int32 {
			waiting <- struct{}{}
			<-held
			return wait(count, events)
		}
	}))
	buffer, err := b.NewBuffer(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	for name, f := range map[string]func(ctx context.Context) error{
		"Write":  func(ctx context.Context) error { return Write(ctx, b.queue, buffer, 0, make([]float32, 1<<18)) },
		"Read":   func(ctx context.Context) error { return Read(ctx, b.queue, buffer, 0, make([]float32, 1<<18)) },
		"Finish": b.queue.Finish,
	} {
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			<-waiting
			cancel()
		}()
		if err := f(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", name, err)
		}
	}
	buffer.Release()
	runtime.GC()
	if now := Live(); now.Events != 3 {
		t.Errorf("%d events are under way, want 3", now.Events)
	}
	close(held) // someDevice waits for the rest
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := b.Build(ctx, Source{Name: "test.cl", Text: testText}, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("Build: %v", err)
	}
}

// A build that no caller waits for leaves nothing.
func TestDoneContextOfBuild(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	held := make(chan struct{})
	c, err := NewContext(changed(someDevice(t), func(c *calls) {
		build := c.BuildProgram
		c.BuildProgram = func(program uintptr, count uint32, devices *uintptr, options *byte, notify,
			data uintptr) int32 {
			cancel()
			<-held
			return build(program, count, devices, options, notify, data)
		}
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Release()
	if _, err := c.Build(ctx, Source{Name: "test.cl", Text: testText}, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	close(held)
}

// A command that fails returns an error with its own code.
func TestFailingCommand(t *testing.T) {
	b := newBench(t, changed(someDevice(t), func(c *calls) {
		c.WaitForEvents = func(uint32, *uintptr) int32 { return -14 }
		c.GetEventInfo = func(_ uintptr, _ uint32, _ uintptr, value unsafe.Pointer, _ *uintptr) int32 {
			*(*int32)(value) = -5
			return 0
		}
	}))
	wants(t, b.queue.Finish(t.Context()), "waiting for clEnqueueMarkerWithWaitList", "CL_OUT_OF_RESOURCES (-5)")
}

// Goroutines share a kernel and a queue, or have their own, while stacks grow and the collector
// runs.
func TestParallel(t *testing.T) {
	b := newBench(t, someDevice(t))
	var stop, all sync.WaitGroup
	stopped := make(chan struct{})
	stop.Go(func() {
		for {
			select {
			case <-stopped:
				return
			default:
				runtime.GC()
			}
		}
	})
	for g := range 4 {
		all.Go(func() {
			queue := b.queue
			if g%2 == 1 {
				var err error
				if queue, err = b.NewQueue(true); err != nil {
					t.Error(err)
					return
				}
				defer queue.Release()
			}
			for i := range 15 {
				n := 100 + 100*g + i
				x, y := make([]float32, n), make([]float32, n)
				for j := range x {
					x[j] = float32(j % 11)
				}
				dx, err1 := b.NewBuffer(4 * int64(n))
				dy, err2 := b.NewBuffer(4 * int64(n))
				if err := errors.Join(err1, err2); err != nil {
					t.Error(err)
					return
				}
				a := float32(g*100 + i)
				err := errors.Join(Write(t.Context(), queue, dx, 0, x), Write(context.Background(), queue, dy, 0, y),
					queue.Launch(b.axpy, []int{512}, []int{16}, Global(dy), Global(dx), Scalar(a), Scalar(int32(n))),
					deep(200, func() error { return Read(t.Context(), queue, dy, 0, y) }))
				dx.Release()
				dy.Release()
				if err != nil {
					t.Error(err)
					return
				}
				for j := range y {
					if y[j] != a*x[j] {
						t.Errorf("goroutine %d, launch %d: y[%d] = %g, want %g", g, i, j, y[j], a*x[j])
						return
					}
				}
			}
		})
	}
	all.Wait()
	close(stopped)
	stop.Wait()
}

// deep calls f below n frames, so that the stack has grown.
func deep(n int, f func() error) error {
	var some [128]byte
	if n == 0 {
		return f()
	}
	err := deep(n-1, f)
	runtime.KeepAlive(&some)
	return err
}

// A nil pointer is still a panic, and not a driver's business.
func TestPanicsStay(t *testing.T) {
	newBench(t, someDevice(t))
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	var c *Context
	c.Device()
}

// BenchmarkLaunch gives the queue a small kernel of four arguments, and waits for a hundred at a
// time.
func BenchmarkLaunch(b *testing.B) {
	devices, err := Devices()
	d, chosen := Choose(devices, Choice{})
	if chosen != nil {
		b.Skip(err)
	}
	c, err1 := NewContext(d)
	if err1 != nil {
		b.Fatal(err1)
	}
	defer c.Release()
	q, err1 := c.NewQueue(true)
	p, err2 := c.Build(b.Context(), Source{Name: "test.cl", Text: axpyText}, nil)
	buffer, err3 := c.NewBuffer(64)
	if err := errors.Join(err1, err2, err3); err != nil {
		b.Fatal(err)
	}
	defer q.Release()
	defer p.Release()
	defer buffer.Release()
	k, err := p.Kernel("axpy")
	if err != nil {
		b.Fatal(err)
	}
	defer k.Release()
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		err := q.Launch(k, []int{16}, []int{16}, Global(buffer), Global(buffer), Scalar(float32(0)), Scalar(int32(16)))
		if i%100 == 99 && err == nil {
			err = q.Finish(context.Background())
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	b.StopTimer()
	if err := q.Finish(context.Background()); err != nil {
		b.Fatal(err)
	}
}
