package cli

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"mula/internal/longtest"
	"mula/internal/version"
	"mula/xpu"
	"mula/xpu/cpu"
)

func TestVersionCommand(t *testing.T) {
	code, stdout, stderr := call(t, "version")
	for _, want := range []string{"mula      " + version.String(), "\ncommit    ", "\ndate      ",
		"\ngo        " + runtime.Version(), "\nplatform  " + runtime.GOOS + "/" + runtime.GOARCH,
		"\nkernels   products: fp32 " + cpu.Kernels(xpu.FP32), "\nsettings  "} {
		if code != exitDone || stderr != "" || !strings.Contains(stdout, want) {
			t.Errorf("exit %d, no %q in %s%s", code, want, stdout, stderr)
		}
	}
	code, stdout, stderr = call(t, "version", "--json")
	var got versionReport
	if err := json.Unmarshal([]byte(stdout), &got); code != exitDone || stderr != "" || err != nil {
		t.Fatalf("exit %d, %s%s: %v", code, stdout, stderr, err)
	}
	if got.Version != version.String() || got.Kernels != kernelsInUse() || got.Go != runtime.Version() {
		t.Errorf("%+v", got)
	}
}

// A program that was built with `git describe` says that version, the commit and the settings.
func TestVersionOfABuild(t *testing.T) {
	longtest.SkipIfShort(t)
	program := filepath.Join(t.TempDir(), "mula")
	// With the settings of this test, so that packages are only linked, not compiled again.
	build := exec.Command("go", "build", "-buildvcs=false", "-ldflags",
		"-X mula/internal/version.number=7.8.9-1-gabcdef", "-o", program, "./mula")
	if out, err := build.CombinedOutput(); err != nil {
		t.Skipf("the program cannot be built here: %v\n%s", err, out)
	}
	out, err := exec.Command(program, "version").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"mula      7.8.9-1-gabcdef\n", "commit    unknown\n", "-buildmode=exe",
		"CGO_ENABLED="} {
		if !strings.Contains(string(out), want) {
			t.Errorf("no %q in %s", want, out)
		}
	}
}
