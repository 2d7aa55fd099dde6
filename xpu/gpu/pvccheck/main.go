// Pvccheck compiles all kernels of package gpu for Intel's Data Center GPU Max (Ponte Vecchio) with
// Intel's offline compiler, ocloc, and inspects the machine code. It fails if a kernel does not
// compile, or if a matrix kernel has no dpas, spills registers, or has too small a share of dpas
// among the instructions of its inner loop. If the compiler has loads and stores of 2D blocks, it
// also fails if products have no prefetch or barrier in this loop, or no such stores. It does not
// need such a GPU.
//
//	go run ./xpu/gpu/pvccheck [-table FILE] [-ocloc PROGRAM]
//
// With -table it replaces the part of the file between two marks with a table of all kernels.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
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
	log.SetPrefix("pvccheck: ")
	table := flag.String("table", "", "replace the table in `FILE`")
	ocloc := flag.String("ocloc", "ocloc", "run `PROGRAM` as Intel's offline compiler (Debian package "+
		"intel-opencl-icd)")
	flag.Parse()
	if flag.NArg() > 0 {
		log.Fatalf("unexpected argument %q", flag.Arg(0))
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	kernels, err := compileAll(ctx, *ocloc)
	blocks := hasBlocks(ctx, *ocloc)
	if err == nil {
		err = verdict(kernels, blocks)
	}
	for _, k := range kernels {
		fmt.Println(k)
	}
	if err == nil && *table != "" {
		err = atomicfile.ReplaceBetween(*table, tableBegin, tableEnd, tableOf(kernels))
	}
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%d kernels; %d of them multiply with dpas\n", len(kernels), len(matrixKernels))
	if !blocks {
		fmt.Println("prefetches, barriers and block stores of products: not checked, because the compiler has no " +
			"cl_intel_subgroup_2d_block_io")
	}
}

// pvc describes the device as its driver does, as far as kernels depend on it.
var pvc = &opencl.Device{
	Name: "Ponte Vecchio", Type: opencl.GPU, MaxWorkGroup: 512, LocalMemory: 128 << 10,
	Extensions: []string{"cl_khr_fp16", "cl_khr_fp64", "cl_intel_subgroups", "cl_intel_subgroups_short",
		"cl_intel_required_subgroup_size", "cl_intel_subgroup_matrix_multiply_accumulate",
		"cl_intel_subgroup_2d_block_io"},
}

// compileAll compiles the programs in both precisions. A kernel whose code is the same in both is
// listed once.
func compileAll(ctx context.Context, ocloc string) ([]kernel, error) {
	var all []kernel
	var failed []error
	for _, precision := range []xpu.Precision{xpu.FP32, xpu.BF16} {
		for _, s := range gpu.Sources(pvc, precision) {
			binary, err := compile(ctx, ocloc, s)
			if err != nil {
				failed = append(failed, fmt.Errorf("%s, %s: %w", s.Name, precision, err))
				continue
			}
			kernels, err := inspect(binary)
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

// compile returns the binary that ocloc creates from a source.
func compile(ctx context.Context, ocloc string, s opencl.Source) ([]byte, error) {
	dir, err := os.MkdirTemp("", "pvccheck")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	if err := os.WriteFile(filepath.Join(dir, "kernels.cl"), []byte(s.Text), 0o600); err != nil {
		return nil, err
	}
	// Without the internal option, the old compiler writes its own format, which is not ELF.
	c := exec.CommandContext(ctx, ocloc, "compile", "-file", "kernels.cl", "-device", "pvc", "-output", "binary",
		"-output_no_suffix", "-out_dir", "out",
		"-options", s.Options, "-internal_options", "-cl-intel-allow-zebin")
	c.Dir = dir
	if out, err := c.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%s with options %q: %w\n%s", ocloc, s.Options, err, out)
	}
	binary, err := os.ReadFile(filepath.Join(dir, "out", "binary"))
	if errors.Is(err, fs.ErrNotExist) {
		binary, err = os.ReadFile(filepath.Join(dir, "out", "binary.bin")) // the name in later versions
	}
	return binary, err
}

// hasBlocks reports whether the compiler has 2D block loads and stores.
func hasBlocks(ctx context.Context, ocloc string) bool {
	_, err := compile(ctx, ocloc, opencl.Source{Name: "probe", Text: `
#if !defined(cl_intel_subgroup_2d_block_io) || !defined(cl_intel_split_work_group_barrier)
#error
#endif
kernel void probe(global int *x) { *x = 1; }
`})
	return err == nil
}

// A matrixKernel is the requirements for a kernel that multiplies with dpas.
type matrixKernel struct {
	name   string
	option string  // end of the name of its file and its options
	dpas   int     // number in the inner loop
	ratio  float64 // minimum share of dpas among the instructions of that loop
	// With a compiler that has 2D blocks: minimum number of prefetches and of signals to a
	// barrier in that loop, and of block stores.
	prefetches, signals, stores int
	// bytes that a sub-group reads from the L1 cache, and a work-group from the L2 cache, for one
	// multiplication and addition
	near, far float64
}

// is reports whether k is this kernel.
func (m matrixKernel) is(k kernel) bool {
	return k.Name == m.name && strings.HasSuffix(k.file, m.option)
}

// Two steps of a product are 32 dpas, 24 loads of 256 bytes, and the instructions for counters and
// addresses: 91 instructions. With loads of 2 KiB, in later compilers, there are 83. The loops of
// attention also have the exponentials, the rounding of weights, and the instructions of tiles with
// hidden keys. The products of pvc_direct.cl have loads of 512 bytes here, each with its address.
// Later compilers have larger loads, and 80 to 206 instructions (benchmarks/pvc.md).
var matrixKernels = []matrixKernel{
	product("pvc_product", 0.33),
	product("pvc_weight_grad", 0.33),
	direct("pvc_forward", 0.17, 128),
	direct("pvc_backward", 0.16, 128),
	direct("pvc_gradient", 0.13, 128),
	direct("pvc_forward", 0.17, 256),
	direct("pvc_backward", 0.16, 256),
	direct("pvc_gradient", 0.13, 256),
	attention("pvc_attend", 64, 64, 0.06, tile{others: 64, left: 2, right: 1, dpas: 2, sharing: 8}),
	attention("pvc_grad_queries", 64, 48, 0.09, tile{others: 32, left: 3, right: 2, dpas: 3, sharing: 8}),
	attention("pvc_grad_keys", 64, 32, 0.05, tile{others: 32, left: 2, right: 1, dpas: 2, sharing: 4}),
	attention("pvc_attend", 128, 128, 0.1, tile{others: 64, left: 2, right: 1, dpas: 2, sharing: 8}),
	attention("pvc_grad_queries", 128, 96, 0.13, tile{others: 32, left: 3, right: 2, dpas: 3, sharing: 8}),
	attention("pvc_grad_keys", 128, 64, 0.085, tile{others: 32, left: 2, right: 1, dpas: 2, sharing: 4}),
}

// product returns the requirements for a kernel of pvc.cl: a sub-group has a tile of 32×64, a
// work-group one of 128×256.
func product(name string, ratio float64) matrixKernel {
	return matrixKernel{name: name, option: "pvc.cl", dpas: 32, ratio: ratio, prefetches: 1,
		near: bytesPerFLOP(32, 64), far: bytesPerFLOP(128, 256)}
}

// direct returns the requirements for a kernel of pvc_direct.cl whose work-groups have a tile of
// rows×256. A tile of a sub-group has 16 stores of float blocks, and 16 of bfloat16 blocks.
func direct(name string, ratio float64, rows int) matrixKernel {
	m := product(name, ratio)
	m.option, m.signals, m.stores, m.far = "pvc_direct.cl", 1, 32, bytesPerFLOP(rows, 256)
	if rows != 128 {
		m.option = fmt.Sprintf("-DHIGH=%d", rows/32)
	}
	return m
}

// A tile is the work of a sub-group of pvc_attention.cl in a turn of its loop: the number of left
// operands of `others` positions, of right operands of its own 16 positions, of products, and of
// sub-groups that share a left operand.
type tile struct{ others, left, right, dpas, sharing int }

// attention returns the requirements for a kernel of pvc_attention.cl for packed heads of a size.
// Right operands stay in the L1 cache.
func attention(name string, depth, dpas int, ratio float64, t tile) matrixKernel {
	const own, bytes = 16, 2
	flop := float64(2 * own * t.others * depth * t.dpas)
	left, right := float64(bytes*depth*t.others*t.left), float64(bytes*depth*own*t.right)
	return matrixKernel{name: name, option: fmt.Sprintf("-DDEPTH=%d", depth), dpas: dpas, ratio: ratio,
		near: (left + right) / flop, far: left / (float64(t.sharing) * flop)}
}

// bytesPerFLOP returns the bytes of bfloat16 operands that a tile of C reads per multiplication and
// addition.
func bytesPerFLOP(rows, columns int) float64 {
	return 2 * float64(rows+columns) / float64(2*rows*columns)
}

// verdict returns the problems of the matrix kernels. blocks means that the compiler has 2D blocks.
func verdict(kernels []kernel, blocks bool) error {
	var wrong []error
	for _, want := range matrixKernels {
		i := slices.IndexFunc(kernels, want.is)
		if i < 0 {
			wrong = append(wrong, fmt.Errorf("%s: kernel not found", strings.TrimSpace(want.name+" "+want.option)))
			continue
		}
		if k := kernels[i]; k.Lanes != 16 {
			wrong = append(wrong, fmt.Errorf("%s: %d lanes; dpas needs 16", k.Name, k.Lanes))
		} else if k.Scratch > 0 {
			wrong = append(wrong, fmt.Errorf("%s: %d bytes of scratch memory: registers are spilled, or an array "+
				"does not fit into registers", k.Name, k.Scratch))
		} else if k.LoopDPAS < want.dpas {
			wrong = append(wrong, fmt.Errorf("%s: %d dpas in its inner loop, of %d in all; it must have %d", k.Name,
				k.LoopDPAS, k.DPAS, want.dpas))
		} else if k.ratio() < want.ratio {
			wrong = append(wrong, fmt.Errorf("%s: %d dpas among %d instructions of the inner loop, %.3f; it must be "+
				"%.3f", k.Name, k.LoopDPAS, k.LoopInstructions, k.ratio(), want.ratio))
		} else if blocks && (k.LoopPrefetches < want.prefetches || k.LoopSignals < want.signals) {
			wrong = append(wrong, fmt.Errorf("%s: %d prefetches and %d barriers in its inner loop; it must have "+
				"%d and %d", k.Name, k.LoopPrefetches, k.LoopSignals, want.prefetches, want.signals))
		} else if blocks && k.BlockStores < want.stores {
			wrong = append(wrong, fmt.Errorf("%s: %d stores of 2D blocks; it must have %d", k.Name, k.BlockStores,
				want.stores))
		}
	}
	return errors.Join(wrong...)
}

// The marks around the table.
const tableBegin, tableEnd = "<!-- make pvc writes this table -->\n", "<!-- up to here -->\n"

// tableOf returns a table of the kernels.
func tableOf(kernels []kernel) string {
	var b strings.Builder
	b.WriteString("\n| kernel | file | precision | lanes | registers | scratch, bytes | instructions | dpas | inner " +
		"loop: dpas of instructions | bytes/FLOP from L1 | from L2 |\n")
	b.WriteString("|---|---|---|---|---|---|---|---|---|---|---|\n")
	for _, k := range kernels {
		loop, near, far := "", "", ""
		if i := slices.IndexFunc(matrixKernels, func(m matrixKernel) bool { return m.is(k) }); i >= 0 {
			m := matrixKernels[i]
			loop = fmt.Sprintf("%d of %d, %.2f", k.LoopDPAS, k.LoopInstructions, k.ratio())
			near = fmt.Sprintf("%.4f", m.near)
			far = fmt.Sprintf("%.4f", m.far)
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %d | %d | %d | %d | %d | %s | %s | %s |\n", k.Name, k.file, k.precision,
			k.Lanes, k.Registers, k.Scratch, k.Instructions, k.DPAS, loop, near, far)
	}
	b.WriteString("\n")
	return b.String()
}
