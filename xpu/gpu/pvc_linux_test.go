package gpu

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"mula/internal/longtest"
	"mula/xpu"
	"mula/xpu/devicetest"
	"mula/xpu/opencl"
)

// intelDriver is the file by which the loader finds Intel's driver, as Debian's package
// intel-opencl-icd installs it.
const intelDriver = "/etc/OpenCL/vendors/intel.icd"

// pretence makes Intel's driver report a Ponte Vecchio on a machine without one. The driver
// compiles, and accepts memory, arguments and launches; nothing is executed. Without
// EnableTimestampPacket=0 it waits forever for results.
var pretence = []string{
	"OCL_ICD_VENDORS=" + intelDriver, "NEOReadDebugKeys=1", "SetCommandStreamReceiver=1", "ProductFamilyOverride=pvc",
	"HardwareInfoOverride=2x8x8",
	"EnableTimestampPacket=0",
}

const pretendVariable = "MULA_TEST_PRETENDED_PVC"

// A card of two tiles, which the driver shows as one device, is listed as two devices, also at a
// second time. They have separate memory, and their queues accept commands.
func TestPretendedTiles(t *testing.T) {
	if os.Getenv(pretendVariable) != "" {
		pretendedTiles(t)
		return
	}
	if _, err := os.Stat(intelDriver); err != nil {
		t.Skipf("Intel's OpenCL driver is not installed (Debian: intel-opencl-icd): %v", err)
	}
	t.Parallel()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	memory := map[string]string{}
	for _, tiles := range []string{"1", "2"} {
		c := exec.CommandContext(t.Context(), program, "-test.run", "^TestPretendedTiles$", "-test.v")
		c.Env = append(append(os.Environ(), pretence...), pretendVariable+"="+tiles, "CreateMultipleSubDevices="+tiles)
		c.Dir = t.TempDir() // the driver writes a file of all that it would do
		out, err := c.CombinedOutput()
		if err != nil || !strings.Contains(string(out), "--- PASS: TestPretendedTiles") {
			t.Fatalf("%s tiles: %v\n%s", tiles, err, out)
		}
		_, after, _ := strings.Cut(string(out), "memory of all: ")
		memory[tiles], _, _ = strings.Cut(after, "\n")
	}
	if memory["1"] == "" || memory["1"] != memory["2"] {
		t.Errorf("the tiles have %s bytes, and the card %s", memory["2"], memory["1"])
	}
}

func pretendedTiles(t *testing.T) {
	for range 2 {
		devices, err := opencl.Devices()
		if fmt.Sprint(len(devices)) != os.Getenv(pretendVariable) || err != nil {
			t.Fatalf("the devices are %v, %v", devices, err)
		}
		var all int64
		for _, d := range devices {
			if !d.MatrixInstructions() || d.Type != opencl.GPU {
				t.Errorf("%v is no tile", d)
			}
			all += d.Memory
			c, err := opencl.NewContext(d)
			if err != nil {
				t.Fatal(err)
			}
			queue, err := c.NewQueue(false)
			if err != nil {
				t.Fatal(err)
			}
			if err := queue.Finish(t.Context()); err != nil {
				t.Fatal(err)
			}
			queue.Release()
			c.Release()
		}
		t.Logf("memory of all: %d", all)
	}
}

// The device uses its path with matrix instructions on a Ponte Vecchio, and Intel's driver accepts
// every command once: programs, arguments, sizes of groups, launches, waiting. The results are
// arbitrary.
func TestPretendedPVC(t *testing.T) {
	longtest.SkipIfShort(t)
	if os.Getenv(pretendVariable) != "" {
		pretended(t)
		return
	}
	if _, err := os.Stat(intelDriver); err != nil {
		t.Skipf("Intel's OpenCL driver is not installed (Debian: intel-opencl-icd): %v", err)
	}
	t.Parallel()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 9*time.Minute)
	defer cancel()
	// Of devicetest all commands with right operands: those subtests that are named after a command
	// alone.
	c := exec.CommandContext(ctx, program, "-test.run", "^TestPretendedPVC$/^mistakes$/^[A-Za-z]+$", "-test.v")
	c.Env = append(append(os.Environ(), pretence...), pretendVariable+"=1")
	c.Dir = t.TempDir() // the driver writes a file of all that it would do
	out, err := c.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: TestPretendedPVC") {
		t.Fatalf("%v\n%s", err, out)
	}
}

func pretended(t *testing.T) {
	devices, err := opencl.Devices()
	if len(devices) != 1 || !devices[0].MatrixInstructions() || devices[0].Type != opencl.GPU {
		t.Fatalf("the devices are %v, with the error %v; one GPU with matrix instructions is wanted", devices, err)
	}
	options := Options{Precision: xpu.BF16, Threads: 1, Cache: opencl.NewCache(t.TempDir())}
	d, err := New(t.Context(), devices[0], options)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if file := d.matrixFile(); file != pvcFile {
		t.Fatalf("matrix products use the kernels of %q, want %q", file, pvcFile)
	}
	products(t, d)
	kernels := []string{"pvc_plan", "pvc_pack_rows", "pvc_pack_matrices", "pvc_pack_left", "pvc_pack_right",
		"pvc_product", "pvc_weight_grad"}
	// The driver does not report 2D block loads. Its compiler has them under other names. Products
	// of 25 rows or more have the larger work-groups.
	blocks, err := newDevice(t.Context(), devices[0], options, direct(gpuShape, 25))
	if err != nil {
		t.Fatal(err)
	}
	defer blocks.Close()
	products(t, blocks)
	for device, names := range map[*Device][]string{d: kernels, blocks: append(kernels, "pvc_forward", "pvc_backward",
		"pvc_gradient", "pvc_round", "pvc_round_rows")} {
		for _, name := range names {
			if device.kernels[name] == nil {
				t.Errorf("there is no kernel %s", name)
			}
		}
	}
	for _, name := range []string{"pvc_forward", "pvc_backward", "pvc_gradient"} {
		if blocks.variants[variant{directFile, blocks.directOptions(), name}] == nil {
			t.Errorf("kernel %s was not launched with the larger work-groups", name)
		}
	}
	for _, size := range matrixDepths {
		const length = 70
		heads := func(n int) xpu.Tensor { return upload(t, d, make([]float32, n*length*size), 1, n, length, size) }
		tokens := func(n int) xpu.Tensor { return heads(n).Reshape(length, n*size) }
		attention := xpu.Attention{Q: heads(2), K: heads(1), V: heads(1), Context: tokens(2),
			LSE: upload(t, d, make([]float32, 2*length), 1, 2, length)}
		d.Attend(attention)
		d.AttendGrad(attention, tokens(2), tokens(4), heads(1), heads(1))
		numbersOf(t, d, attention.Context)
	}
	devicetest.Run(t, d, 0, devicetest.Common)
	for _, depth := range matrixDepths {
		for _, name := range []string{"pvc_pack_heads_left", "pvc_pack_heads_right", "pvc_attend", "pvc_grad_queries",
			"pvc_grad_keys"} {
			if d.variants[variant{attendMatrixFile, d.attendMatrixOptions(depth), name}] == nil {
				t.Errorf("heads of %d: kernel %s was not launched", depth, name)
			}
		}
	}
}

// products gives the driver every form of a product, with operands and weights of both types, and
// the commands that write operands.
func products(t *testing.T, d *Device) {
	const rows, n, k = 40, 72, 24
	counts := uploadInts(t, d, []int32{33, 0, 7})
	a, b, c := upload(t, d, make([]float32, rows*k), rows, k), upload(t, d, make([]float32, 3*n*k), 3, k, n),
		upload(t, d, make([]float32, rows*n), rows, n)
	for _, accumulate := range []bool{false, true} {
		o := xpu.MatMulOptions{Accumulate: accumulate}
		d.MatMul(c, a, b.Index(0).Reshape(n, k).T(), o)
		d.MatMul(b.Index(0), a.T(), c, o)
		d.GroupedMatMul(c, a, b, counts, o)
		d.GroupedWeightGrad(b, a, c, counts, o)
	}
	numbersOf(t, d, b)
	numbersOf(t, d, c)
	halves, err := d.New(xpu.BFloat16, 3, k, n)
	if err != nil {
		t.Fatal(err)
	}
	d.MatMul(c, a, halves.Index(0).Reshape(n, k).T(), xpu.MatMulOptions{})
	d.GroupedMatMul(c, a, halves, counts, xpu.MatMulOptions{})
	d.MatMul(halves.Index(0), a.T(), c, xpu.MatMulOptions{Accumulate: true})
	d.GroupedWeightGrad(halves, a, c, counts, xpu.MatMulOptions{Accumulate: true})
	d.Copy(halves, b)
	d.Copy(b, halves)
	numbersOf(t, d, halves)
	ids, one := uploadInts(t, d, make([]int32, rows)), upload(t, d, make([]float32, n))
	x, y, wide := upload(t, d, make([]float32, rows*n), rows, n), upload(t, d, make([]float32, rows*n), rows, n),
		upload(t, d, make([]float32, rows*2*n), rows, 2*n)
	d.GatherRows(x.AsOperand(), y, ids)
	d.MatMul(b.Index(0), a.T(), x, xpu.MatMulOptions{})
	d.Normalize(x.AsOperand(), y, xpu.Norm{Weight: one, RStd: upload(t, d, make([]float32, rows))}, false)
	d.MatMul(a, x, b.Index(0).T(), xpu.MatMulOptions{})
	d.Add(x.AsOperand(), y, y)
	d.MatMul(a, x, b.Index(0).T(), xpu.MatMulOptions{})
	d.SwiGLU(x.AsOperand(), wide, xpu.Tensor{})
	d.SwiGLUGrad(wide.AsOperand(), x.AsOperand(), y, xpu.Tensor{}, xpu.Tensor{})
	d.MatMul(upload(t, d, make([]float32, n*2*n), n, 2*n), x.T(), wide, xpu.MatMulOptions{})
	numbersOf(t, d, a)
}
