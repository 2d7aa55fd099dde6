package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// write makes a module with one test file for each package named.
func write(t *testing.T, packages map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module m\n\ngo 1.24\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for name, body := range packages {
		sub := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(sub, 0o755), os.WriteFile(filepath.Join(sub, "x_test.go"),
			[]byte("package "+name+"\n\nimport \"testing\"\n\n"+body), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// run runs go test with flags on the module, and returns what the command prints of it.
func run(t *testing.T, dir string, flags ...string) string {
	t.Helper()
	c := exec.Command("go", append(append([]string{"test", "-json"}, flags...), "./...")...)
	c.Dir = dir
	c.Env = append(os.Environ(), "GOWORK=off")
	c.Stderr = os.Stderr
	in, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		t.Skipf("no go command: %v", err)
	}
	var r report
	var out strings.Builder
	if err := r.read(in, &out); err != nil {
		t.Error(err)
	}
	c.Wait() // the tests below say whether it fails
	return out.String() + r.summary()
}

func TestGoTest(t *testing.T) {
	t.Parallel()
	got := run(t, write(t, map[string]string{
		"good": "func TestA(t *testing.T) { t.Log(\"not printed\") }\nfunc TestB(t *testing.T) { t.Skip(\"another " +
			"reason\") }\n",
		"bad": "func TestA(t *testing.T) { t.Log(\"passed\") }\nfunc TestB(t *testing.T) { t.Run(\"sub\", func(t " +
			"*testing.T) { t.Error(\"wrong\") }) }\n",
		"stuck": "func TestP(t *testing.T) { panic(\"stop\") }\n",
		"none":  "var _ = 1 + \"x\"\n",
	}))
	for _, want := range []string{
		"ok  \tm/good\t", "--- FAIL: TestB (", "--- FAIL: TestB/sub (", "x_test.go:6: wrong\n", "\nFAIL\nFAIL\tm/bad\t",
		"panic: stop", "FAIL\tm/stuck\t",
		"FAIL\tm/none [build failed]\n", "x_test.go:5:",
		"skipped: no test for want of a library; 1 test for other reasons",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is missing in\n%s", want, got)
		}
	}
	for _, not := range []string{"not printed", "passed", "=== RUN", "another reason", `"Action"`} {
		if strings.Contains(got, not) {
			t.Errorf("%q is in\n%s", not, got)
		}
	}
}

// TestTimeLimit checks that the reason of a failure is printed if go test attributes it to a test
// that has passed.
func TestTimeLimit(t *testing.T) {
	t.Parallel()
	got := run(t, write(t, map[string]string{
		"stuck": "func TestA(t *testing.T) {\n\tt.Run(\"a\", func(t *testing.T) { t.Parallel(); select {} })\n" +
			"\tt.Run(\"b\", func(t *testing.T) { t.Parallel(); t.Log(\"not printed\") })\n}\n",
	}), "-timeout", "5s")
	for _, want := range []string{
		"panic: test timed out after 5s\n\trunning tests:\n\t\tTestA/a (", "FAIL\tm/stuck\t",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is missing in\n%s", want, got)
		}
	}
	if strings.Contains(got, "not printed") {
		t.Errorf("the output of a passed test is printed:\n%s", got)
	}
}

func TestSummary(t *testing.T) {
	skip := func(reason string) string {
		return `{"Action":"output","Package":"p","Test":"T","Output":"    x.go:1: ` + reason + `\n"}` + "\n" +
			`{"Action":"skip","Package":"p","Test":"T"}` + "\n"
	}
	pass := func(log string) string {
		return `{"Action":"output","Package":"p","Test":"T","Output":"    x.go:1: ` + log + `\n"}` + "\n" +
			`{"Action":"pass","Package":"p","Test":"T"}` + "\n"
	}
	for _, c := range []struct{ events, want string }{
		{"", "skipped: no test for want of a library"},
		{skip("this user may write everywhere"),
			"skipped: no test for want of a library; 1 test for other reasons, which go test -v names"},
		{skip("no OpenCL device: opencl: the loader libOpenCL.so.1 found no driver") + skip("opencl: no loader") +
			skip("onednn: no oneDNN library was found"),
			"skipped: 3 tests for want of a library; to run all (Debian, Ubuntu): apt-get install pocl-opencl-icd " +
				"ocl-icd-libopencl1 libdnnl2"},
		{skip("a long test: run make test-long, or go test without -short") + skip("OpenCL has no device"),
			"skipped: 1 test for want of a library; to run all (Debian, Ubuntu): apt-get install pocl-opencl-icd " +
				"ocl-icd-libopencl1; 1 long test, which make test-long runs"},
		{`{"Action":"output","Package":"p","Test":"TestOpenCL","Output":"=== RUN   TestOpenCL\n"}` + "\n" +
			`{"Action":"output","Package":"p","Test":"TestOpenCL","Output":"--- SKIP: TestOpenCL (0.00s)\n"}` + "\n" +
			`{"Action":"skip","Package":"p","Test":"TestOpenCL"}` + "\n",
			"skipped: no test for want of a library; 1 test for other reasons, which go test -v names"},
		{skip("Intel's OpenCL driver is not installed (Debian: intel-opencl-icd)"),
			"skipped: 1 test for want of a library; to run all (Debian, Ubuntu): apt-get install intel-opencl-icd"},
		{pass("no mpiexec.mpich on this machine (apt-get install mpich openmpi-bin)") + pass("OpenCL is there"),
			"skipped: 0 tests for want of a library, and part of 1 test; to run all (Debian, Ubuntu): apt-get " +
				"install mpich openmpi-bin"},
	} {
		var r report
		if err := r.read(strings.NewReader(c.events), new(strings.Builder)); err != nil {
			t.Error(err)
		}
		if got := r.summary(); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}
