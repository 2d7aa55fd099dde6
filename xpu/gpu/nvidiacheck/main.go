// Nvidiacheck compiles all kernels of package gpu for NVIDIA's GPUs, by clang to PTX, as NVIDIA's
// driver does, and by NVIDIA's ptxas to machine code, and inspects that. It fails if a kernel does
// not compile, or if a kernel for tensor cores spills registers, needs more of them than two
// work-groups of a multiprocessor have, or has too few matrix instructions in its inner loop. It
// does not need such a GPU.
//
//	go run ./xpu/gpu/nvidiacheck [-table FILE] [-arch sm_90] [-clang PROGRAM] [-builtins FILE]
//		[-ptxas PROGRAM] [-nvdisasm PROGRAM]
//
// With -table it replaces the part of the file between two marks with a table of all kernels.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"mula/internal/atomicfile"
	"mula/xpu"
	"mula/xpu/gpu"
	"mula/xpu/opencl"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("nvidiacheck: ")
	table := flag.String("table", "", "replace the table in `FILE`")
	var t tools
	flag.StringVar(&t.arch, "arch", "sm_90", "compile for this architecture")
	flag.StringVar(&t.clang, "clang", "clang", "run `PROGRAM` as clang (Debian package clang)")
	flag.StringVar(&t.builtins, "builtins", defaultBuiltins, "link `FILE`, the functions of "+
		"OpenCL C (Debian package libclc-15 or later)")
	flag.StringVar(&t.ptxas, "ptxas", "ptxas", "run `PROGRAM` as NVIDIA's assembler (PyPI: nvidia-cuda-nvcc)")
	flag.StringVar(&t.nvdisasm, "nvdisasm", "nvdisasm", "run `PROGRAM` as NVIDIA's disassembler (PyPI: "+
		"nvidia-cuda-nvdisasm)")
	flag.Parse()
	if flag.NArg() > 0 {
		log.Fatalf("unexpected argument %q", flag.Arg(0))
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	kernels, err := t.compileAll(ctx)
	if err == nil {
		err = verdict(kernels)
	}
	for _, k := range kernels {
		fmt.Println(k)
	}
	if err == nil && *table != "" {
		err = atomicfile.ReplaceBetween(*table, "<!-- make nvidia writes this table -->\n", "<!-- up to here -->\n",
			tableOf(kernels))
	}
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%d kernels; %d of them multiply with tensor cores\n", len(kernels), len(matrixKernels))
}

// defaultBuiltins is where Debian installs the functions of OpenCL C for NVIDIA's GPUs.
const defaultBuiltins = "/usr/lib/clc/nvptx64--nvidiacl.bc"

// tools are the programs and files of a compilation.
type tools struct{ arch, clang, builtins, ptxas, nvdisasm string }

// h100 describes a device as its driver does, as far as kernels depend on it.
var h100 = &opencl.Device{
	Name: "H100", Type: opencl.GPU, MaxWorkGroup: 1024, LocalMemory: 48 << 10, ComputeCapability: 90,
	Extensions: []string{"cl_khr_fp64"},
}

// compileAll compiles the programs in both precisions. A kernel whose code is the same in both is
// listed once.
func (t tools) compileAll(ctx context.Context) ([]kernel, error) {
	var all []kernel
	var failed []error
	for _, precision := range []xpu.Precision{xpu.FP32, xpu.BF16} {
		for _, s := range gpu.Sources(h100, precision) {
			kernels, err := t.compile(ctx, s)
			if err != nil {
				failed = append(failed, fmt.Errorf("%s, %s: %w", s.Name, precision, err))
				continue
			}
			for _, k := range kernels {
				k.file = s.Name
				if i := slices.IndexFunc(all,
					func(other kernel) bool { k.precision = other.precision; return k == other }); i >= 0 {
					all[i].precision += ", " + string(precision)
					continue
				}
				k.precision = string(precision)
				all = append(all, k)
			}
		}
	}
	return all, errors.Join(failed...)
}

// compile returns the kernels of a source.
func (t tools) compile(ctx context.Context, s opencl.Source) ([]kernel, error) {
	dir, err := os.MkdirTemp("", "nvidiacheck")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	if err := os.WriteFile(filepath.Join(dir, "kernels.cl"), []byte(s.Text), 0o600); err != nil {
		return nil, err
	}
	run := func(program string, arguments ...string) ([]byte, error) {
		c := exec.CommandContext(ctx, program, arguments...)
		c.Dir = dir
		var out, problems bytes.Buffer
		c.Stdout, c.Stderr = &out, &problems
		if err := c.Run(); err != nil {
			return nil, fmt.Errorf("%s %s: %w\n%s%s", program, strings.Join(arguments, " "), err, out.Bytes(),
				problems.Bytes())
		}
		return append(out.Bytes(), problems.Bytes()...), nil
	}
	// The driver's compiler has the keyword asm; clang has it only as __asm__.
	arguments := []string{"-x", "cl", "-target", "nvptx64-nvidia-nvcl", "-Xclang", "-target-cpu", "-Xclang", "sm_80",
		"-Xclang", "-target-feature", "-Xclang", "+ptx75", "-O3", "-Xclang", "-finclude-default-header", "-Xclang",
		"-mlink-builtin-bitcode", "-Xclang", t.builtins, "-w", "-Dasm=__asm__", "-S", "-o", "kernels.ptx"}
	if _, err := run(t.clang, append(append(arguments, strings.Fields(s.Options)...), "kernels.cl")...); err != nil {
		return nil, err
	}
	usage, err := run(t.ptxas, "-v", "-arch", t.arch, "-o", "kernels.cubin", "kernels.ptx")
	if err != nil {
		return nil, err
	}
	kernels, err := parseUsage(string(usage))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", t.ptxas, err)
	}
	if len(kernels) == 0 {
		return nil, nil
	}
	text, err := run(t.nvdisasm, "-c", "kernels.cubin")
	if err != nil {
		return nil, err
	}
	return kernels, countAll(kernels, string(text))
}

// A matrixKernel is the requirements for a kernel that multiplies with tensor cores.
type matrixKernel struct {
	name      string
	matrix    int     // matrix instructions in the inner loop
	ratio     float64 // minimum share of them among the instructions of that loop
	registers int     // maximum
	shared    int     // maximum of local memory, in bytes
}

// A step of 32 terms of a warp's tile of 64 × 32 is 32 instructions m16n8k16, 12 loads of four
// matrices, and 4 copies to local memory. With 256 threads in a work-group, two of them fit into a
// multiprocessor's 65,536 registers. OpenCL has 48 KiB of its local memory.
var matrixKernels = []matrixKernel{
	{"nvidia_product", 32, 0.25, 128, 48 << 10},
	// of a tile: of scores and of sums
	{"nvidia_attend", 32, 0.05, 255, 48 << 10},
	{"nvidia_grad_queries", 48, 0.05, 255, 48 << 10},
	{"nvidia_grad_keys", 64, 0.05, 255, 48 << 10},
}

// verdict returns the problems of the matrix kernels.
func verdict(kernels []kernel) error {
	var wrong []error
	for _, want := range matrixKernels {
		wrong = append(wrong, want.check(kernels)...)
	}
	return errors.Join(wrong...)
}

// check checks all forms of the kernel, which are compiled with different options.
func (want matrixKernel) check(kernels []kernel) (wrong []error) {
	found := false
	for _, k := range kernels {
		if k.Name != want.name {
			continue
		}
		if found = true; k.Spilled > 0 || k.Stack > 0 {
			wrong = append(wrong, fmt.Errorf("%s: %d bytes of registers are spilled, and %d bytes are in memory of a "+
				"thread", k.Name, k.Spilled, k.Stack))
		} else if k.Registers > want.registers {
			wrong = append(wrong, fmt.Errorf("%s: %d registers, at most %d are allowed", k.Name, k.Registers,
				want.registers))
		} else if k.Shared > want.shared {
			wrong = append(wrong, fmt.Errorf("%s: %d bytes of local memory, at most %d are allowed", k.Name, k.Shared,
				want.shared))
		} else if k.LoopMatrix < want.matrix {
			wrong = append(wrong, fmt.Errorf("%s: %d matrix instructions in its inner loop, of %d in all; it must "+
				"have %d", k.Name, k.LoopMatrix, k.Matrix, want.matrix))
		} else if k.ratio() < want.ratio {
			wrong = append(wrong, fmt.Errorf("%s: %d matrix instructions among %d of the inner loop, %.3f; it must be "+
				"%.3f", k.Name, k.LoopMatrix, k.LoopInstructions, k.ratio(), want.ratio))
		}
	}
	if !found {
		wrong = append(wrong, fmt.Errorf("%s: kernel not found", want.name))
	}
	return wrong
}

// tableOf returns a table of the kernels.
func tableOf(kernels []kernel) string {
	var b strings.Builder
	b.WriteString("\n| kernel | file | precision | registers | spilled, bytes | local memory, bytes | instructions | " +
		"HMMA | inner loop: HMMA of instructions |\n|---|---|---|---|---|---|---|---|---|\n")
	for _, k := range kernels {
		loop := ""
		if k.Matrix > 0 {
			loop = fmt.Sprintf("%d of %d, %.2f", k.LoopMatrix, k.LoopInstructions, k.ratio())
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %d | %d | %d | %d | %d | %s |\n", k.Name, k.file, k.precision, k.Registers,
			k.Spilled, k.Shared, k.Instructions, k.Matrix, loop)
	}
	b.WriteString("\n")
	return b.String()
}
