package main

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"mula/internal/longtest"
	"mula/xpu"
	"mula/xpu/gpu"
)

// good are matrix kernels as they must be.
func good() []kernel {
	var all []kernel
	for _, m := range matrixKernels {
		all = append(all, kernel{Name: m.name, Registers: m.registers, Shared: m.shared, code: code{Instructions: 1000,
			Matrix: m.matrix, LoopInstructions: 2 * m.matrix, LoopMatrix: m.matrix}})
	}
	return all
}

func TestVerdict(t *testing.T) {
	if err := verdict(good()); err != nil {
		t.Error(err)
	}
	for _, test := range []struct {
		name   string
		change func(k *kernel)
		want   string
	}{
		{"another name", func(k *kernel) { k.Name = "other" }, "kernel not found"},
		{"spills", func(k *kernel) { k.Spilled = 8 }, "8 bytes of registers are spilled"},
		{"stack", func(k *kernel) { k.Stack = 16 }, "16 bytes are in memory of a thread"},
		{"registers", func(k *kernel) { k.Registers = 256 }, "256 registers"},
		{"local memory", func(k *kernel) { k.Shared = 50000 }, "50000 bytes of local memory"},
		{"no matrix instruction", func(k *kernel) { k.code = code{Instructions: 1000} },
			"0 matrix instructions in its inner loop, of 0 in all"},
		{"a long loop", func(k *kernel) { k.LoopInstructions = 1000 }, "among 1000 of the inner loop, 0.032"},
	} {
		kernels := good()
		test.change(&kernels[0])
		if err := verdict(kernels); err == nil || !strings.Contains(err.Error(), test.want) ||
			!strings.HasPrefix(err.Error(), matrixKernels[0].name) {
			t.Errorf("%s: %v; want %q", test.name, err, test.want)
		}
	}
}

func TestTable(t *testing.T) {
	text := tableOf(good())
	if strings.Count(text, "| nvidia_product |") != 1 || !strings.Contains(text, "| 32 of 64, 0.50 |") {
		t.Errorf("%s", text)
	}
}

// What the programs of CUDA 13 print, shortened.
const (
	usage = `ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90'
ptxas info    : Function properties for first
    24 bytes stack frame, 28 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 24 bytes cumulative stack size, 32768 bytes smem
ptxas info    : Compiling entry function 'second' for 'sm_90'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 14 registers, used 0 barriers
`
	disassembly = `	.section	.text.first,"ax",@progbits
.text.first:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDSM.16.M88.4 R16, [R16] ;
.L_x_0:
        /*0020*/                   HMMA.16816.F32.BF16 R72, R16.reuse, R12, R72 ;
        /*0030*/                   HMMA.16816.F32.BF16 R68, R16.reuse, R14, R68 ;
        /*0040*/               @P0 BRA ` + "`(.L_x_0)" + ` ;
        /*0050*/              @!P1 BRA ` + "`(.L_x_1)" + ` ;
        /*0060*/                   HMMA.16816.F32.BF16 R68, R16.reuse, R14, R68 ;
        /*0070*/                   BRA ` + "`(.L_x_2)" + ` ;
.L_x_2:
        /*0080*/                   EXIT ;
        /*0090*/                   NOP ;
	.section	.text.second,"ax",@progbits
        /*0000*/                   EXIT ;
`
)

func TestParse(t *testing.T) {
	kernels, err := parseUsage(usage)
	if err == nil {
		err = countAll(kernels, disassembly)
	}
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []kernel{
		{Name: "first", Registers: 255, Spilled: 48, Stack: 24, Shared: 32768, code: code{Instructions: 9, Matrix: 3,
			LoopInstructions: 3, LoopMatrix: 2}},
		{Name: "second", Registers: 14, code: code{Instructions: 1}},
	} {
		if len(kernels) != 2 || kernels[i] != want {
			t.Errorf("kernel %d of %d is %+v, want %+v", i, len(kernels), kernels[i], want)
		}
	}
	if err := countAll([]kernel{{Name: "third"}}, disassembly); err == nil {
		t.Error("a kernel without instructions was accepted")
	}
	if _, err := parseUsage("ptxas info    : Compiling entry function 'first' for 'sm_90'"); err == nil {
		t.Error("a kernel without registers was accepted")
	}
}

// The kernel for tensor cores passes with NVIDIA's own assembler, if it is installed.
func TestTensorKernel(t *testing.T) {
	longtest.SkipIfShort(t)
	all := tools{arch: "sm_90", clang: "clang", builtins: defaultBuiltins, ptxas: "ptxas", nvdisasm: "nvdisasm"}
	for _, name := range []string{all.clang, all.ptxas, all.nvdisasm} {
		if _, err := exec.LookPath(name); err != nil {
			t.Skipf("%v; see make nvidia", err)
		}
	}
	if _, err := os.Stat(all.builtins); err != nil {
		t.Skipf("%v; see make nvidia", err)
	}
	for _, s := range gpu.Sources(h100, xpu.BF16) {
		if s.Name != "nvidia.cl" {
			continue
		}
		kernels, err := all.compile(t.Context(), s)
		if err == nil {
			err = errors.Join(matrixKernels[0].check(kernels)...)
		}
		if err != nil {
			t.Error(err)
		}
		return
	}
	t.Error("there is no nvidia.cl among the sources")
}
