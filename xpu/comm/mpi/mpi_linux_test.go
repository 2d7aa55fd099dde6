//go:build amd64 || arm64

package mpi

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"mula/internal/launchers"
	"mula/internal/longtest"
	"mula/xpu/comm"
	"mula/xpu/comm/transporttest"
)

// The test binary starts itself under each mpiexec; roleVariable selects the test.
const (
	roleVariable   = "MULA_TEST_MPI_ROLE"
	folderVariable = "MULA_TEST_MPI_FOLDER"
)

func TestMain(m *testing.M) {
	role := os.Getenv(roleVariable)
	if role == "" {
		os.Exit(m.Run())
	}
	os.Exit(play(role))
}

// play is a rank. It prints what is wrong.
func play(role string) int {
	transport, err := Init(context.Background())
	if err != nil {
		fmt.Println("Init:", err)
		return 1
	}
	code := 0
	report := func(what string, err error) {
		fmt.Printf("%s, %d ranks: %s: rank %d: %v\n", transport.Name(), transport.Size(), what, transport.Rank(), err)
		code = 1
	}
	switch role {
	case "checks":
		if _, err := Init(context.Background()); err == nil {
			report("Init again", errors.New("no error"))
		}
		if err := recovers(); err != nil {
			report("a nil pointer", err)
		}
		transporttest.Each(transport, os.Getenv(folderVariable), report)
	case "measure", "measure fast":
		for _, size := range transporttest.Sizes {
			took, err := transporttest.Measure(context.Background(), transport, size, role == "measure fast")
			if err != nil {
				report("measure", err)
				return code
			}
			if transport.Rank() == 0 {
				fmt.Printf("%d %d\n", size, took)
			}
		}
		if err := transport.Close(); err != nil {
			report("close", err)
		}
	case "death":
		// A rank that waits for a dead rank ends: by an error, or because mpiexec ends everything.
		if transport.Rank() == 1 {
			os.Exit(7)
		}
		if err := transport.Barrier(context.Background()); err == nil {
			report("barrier", errors.New("no error"))
		}
		code = 1
	}
	fmt.Printf("%s: done\n", transport.Name())
	return code
}

// recovers checks that a nil pointer is still a panic, and not the library's business.
func recovers() (err error) {
	defer func() {
		if recover() == nil {
			err = errors.New("no panic")
		}
	}()
	var transport *transport
	return fmt.Errorf("rank %d", transport.Rank())
}

// mpiexecs are the starters that are tried, by the MPI library that goes with them.
var mpiexecs = []struct {
	name string
	args []string
	is   string // in the transport's name
}{
	{"mpiexec.openmpi", []string{"--allow-run-as-root", "--oversubscribe"}, "Open MPI"},
	{"mpiexec.mpich", nil, "MPICH"},
}

// launch runs ranks under an mpiexec, and returns what they print.
func launch(t testing.TB, mpiexec string, args []string, ranks int, role string) (string, error) {
	t.Helper()
	path, err := exec.LookPath(mpiexec)
	if err != nil {
		t.Skipf("no %s on this machine: apt-get install mpich openmpi-bin", mpiexec)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, append(args, "-n", fmt.Sprint(ranks), os.Args[0])...)
	cmd.Env = append(os.Environ(), roleVariable+"="+role, folderVariable+"="+t.TempDir())
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		t.Fatalf("%s: ranks hang:\n%s", mpiexec, out)
	}
	return string(out), err
}

func TestLinks(t *testing.T) {
	longtest.SkipIfShort(t)
	for _, m := range mpiexecs {
		for _, ranks := range []int{1, 2, 4} {
			t.Run(fmt.Sprintf("%s/%d", m.name, ranks), func(t *testing.T) {
				out, err := launch(t, m.name, m.args, ranks, "checks")
				if err != nil {
					t.Fatalf("%v:\n%s", err, out)
				}
				if n := strings.Count(out, ": done"); n != ranks || strings.Count(out, "mpi, "+m.is) != ranks {
					t.Errorf("%d of %d ranks are done, with %s:\n%s", n, ranks, m.is, out)
				}
			})
		}
	}
}

func TestDeath(t *testing.T) {
	longtest.SkipIfShort(t)
	for _, m := range mpiexecs {
		t.Run(m.name, func(t *testing.T) {
			if out, err := launch(t, m.name, m.args, 2, "death"); err == nil {
				t.Errorf("no error although a rank has died:\n%s", out)
			}
		})
	}
}

func TestMissingLibrary(t *testing.T) {
	t.Setenv(LibraryVariable, "/nowhere/libmpi.so")
	_, err := open()
	if err == nil || !strings.Contains(err.Error(), "/nowhere/libmpi.so") ||
		!strings.Contains(err.Error(), LibraryVariable) {
		t.Errorf("error %v", err)
	}
	t.Setenv(LibraryVariable, "libc.so.6")
	if _, err := open(); err == nil || !strings.Contains(err.Error(), "libc.so.6") {
		t.Errorf("another library gives %v", err)
	}
}

func TestLaunched(t *testing.T) {
	for _, l := range launchers.All {
		t.Setenv(l.Rank, "")
	}
	if Launched() {
		t.Error("launched without a launcher")
	}
	for _, l := range launchers.All {
		t.Run(l.Rank, func(t *testing.T) {
			t.Setenv(l.Rank, "0")
			if Launched() != l.MPI {
				t.Errorf("launched is %t, want %t", Launched(), l.MPI)
			}
		})
	}
}

var _ comm.Summer = (*transport)(nil)

// BenchmarkAllReduce shows the median of nine rounds, in ns, for each mpiexec, in the fixed order
// of sums and by MPI's own all-reduce.
func BenchmarkAllReduce(b *testing.B) {
	for _, m := range mpiexecs {
		for _, ranks := range []int{2, 4} {
			for _, role := range []string{"measure", "measure fast"} {
				b.Run(fmt.Sprintf("%s/%d/%s", m.name, ranks, role), func(b *testing.B) {
					for b.Loop() {
						out, err := launch(b, m.name, m.args, ranks, role)
						if err != nil {
							b.Fatalf("%v:\n%s", err, out)
						}
						for line := range strings.Lines(out) {
							var size, took int
							if n, _ := fmt.Sscan(line, &size, &took); n == 2 {
								b.ReportMetric(float64(took), "ns/"+transporttest.SizeName(size))
							}
						}
					}
				})
			}
		}
	}
}
