package main

import (
	"os/exec"
	"slices"
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
		all = append(all, kernel{Name: m.name, file: m.option, Lanes: 16, Registers: 256,
			code: code{Instructions: 1000, DPAS: m.dpas, LoopInstructions: 2 * m.dpas, LoopDPAS: m.dpas,
				LoopPrefetches: m.prefetches, LoopSignals: m.signals, BlockStores: m.stores}})
	}
	return all
}

func TestVerdict(t *testing.T) {
	if err := verdict(good(), true); err != nil {
		t.Error(err)
	}
	for _, test := range []struct {
		name   string
		change func(k *kernel)
		want   string
	}{
		{"no prefetch", func(k *kernel) { k.LoopPrefetches = 0 }, "0 prefetches and 1 barriers"},
		{"no barrier", func(k *kernel) { k.LoopSignals = 0 }, "1 prefetches and 0 barriers"},
		{"stores of numbers", func(k *kernel) { k.BlockStores = 31 }, "31 stores of 2D blocks"},
		{"another name", func(k *kernel) { k.Name = "other" }, "kernel not found"},
		{"32 lanes", func(k *kernel) { k.Lanes = 32 }, "32 lanes"},
		{"scratch", func(k *kernel) { k.Scratch = 64 }, "64 bytes of scratch"},
		{"no dpas", func(k *kernel) { k.code = code{Instructions: 1000} }, "0 dpas in its inner loop, of 0 in all"},
		{"dpas outside of the loop", func(k *kernel) { k.LoopDPAS = 1 }, "1 dpas in its inner loop, of 32"},
		{"a long loop", func(k *kernel) { k.LoopInstructions = 320 },
			"32 dpas among 320 instructions of the inner loop, 0.100"},
	} {
		kernels := good()
		i := slices.IndexFunc(kernels, func(k kernel) bool { return k.Name == "pvc_forward" })
		test.change(&kernels[i])
		if err := verdict(kernels, true); err == nil || !strings.Contains(err.Error(), test.want) ||
			!strings.HasPrefix(err.Error(), "pvc_forward") {
			t.Errorf("%s: %v; want %q", test.name, err, test.want)
		}
	}
	old := good()
	for i := range old {
		old[i].LoopPrefetches, old[i].LoopSignals, old[i].BlockStores = 0, 0, 0
	}
	if err := verdict(old, false); err != nil {
		t.Errorf("a compiler without 2D blocks: %v", err)
	}
}

func TestTable(t *testing.T) {
	text := tableOf(good())
	for _, want := range []string{"| pvc_product |", "| 32 of 64, 0.50 | 0.0469 | 0.0117 |",
		"| pvc_forward | -DHIGH=8 |", "| 32 of 64, 0.50 | 0.0469 | 0.0078 |",
		"| pvc_attend | -DDEPTH=128 |", "| 128 of 256, 0.50 | 0.0703 | 0.0078 |"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing in %s", want, text)
		}
	}
	if strings.Count(text, "| pvc_product |") != 1 {
		t.Errorf("%s", text)
	}
}

// The compiler's own word is not enough: with half of the registers it spills, and must be refused.
func TestSpillsAreRefused(t *testing.T) {
	longtest.SkipIfShort(t)
	ocloc, err := exec.LookPath("ocloc")
	if err != nil {
		t.Skipf("Intel's offline compiler is not installed (Debian: intel-opencl-icd): %v", err)
	}
	for _, s := range gpu.Sources(pvc, xpu.BF16) {
		if s.Name != "pvc.cl" {
			continue
		}
		for options, want := range map[string]string{s.Options: "",
			strings.Replace(s.Options, "-cl-intel-256-GRF-per-thread", "", 1): "bytes of scratch memory"} {
			s.Options = options
			binary, err := compile(t.Context(), ocloc, s)
			if err != nil {
				t.Fatal(err)
			}
			kernels, err := inspect(binary)
			if err != nil {
				t.Fatal(err)
			}
			all := kernels
			for i := range all {
				all[i].file = s.Name
			}
			for _, k := range good() { // the kernels of other files
				if !slices.ContainsFunc(kernels, func(own kernel) bool { return own.Name == k.Name }) {
					all = append(all, k)
				}
			}
			if err := verdict(all, false); err == nil != (want == "") || err != nil && !strings.Contains(err.Error(),
				want) {
				t.Errorf("options %q: %v; want %q", options, err, want)
			}
		}
		return
	}
	t.Error("there is no pvc.cl among the sources")
}
