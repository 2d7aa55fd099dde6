//go:build (linux || darwin) && !static

package sharedlib

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/ebitengine/purego"
)

// libC is the name of the library of C.
func libC() string {
	if runtime.GOOS == "darwin" {
		return "libSystem.B.dylib"
	}
	return "libc.so.6"
}

const variable = "MULA_TEST_SHAREDLIB"

// The variable's file is the only candidate where it is set; otherwise names are tried in order,
// and the error has the reason of each.
func TestSearch(t *testing.T) {
	s := Search{Variable: variable, Names: []string{"libmula-none.so", libC()}}
	if l, err := s.Open(); err != nil || l.Name != libC() {
		t.Errorf("opened %+v, %v", l, err)
	}
	s.Names = []string{"libmula-none.so", "libmula-neither.so"}
	_, err := s.Open()
	if !errors.Is(err, ErrMissing) {
		t.Fatalf("the error is %v, want ErrMissing", err)
	}
	if reasons := strings.Split(err.Error(), "; "); len(reasons) != 2 || !strings.Contains(reasons[0], "mula-none") ||
		!strings.Contains(reasons[1], "mula-neither") {
		t.Errorf("the error is %v", err)
	}
	damaged := filepath.Join(t.TempDir(), "damaged.so")
	if err := os.WriteFile(damaged, []byte("no library"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := (Search{Names: []string{"libmula-none.so", damaged}}).Open(); err == nil || errors.Is(err,
		ErrMissing) {
		t.Errorf("a damaged library: %v", err)
	}
	t.Setenv(variable, libC())
	if l, err := s.Open(); err != nil || l.Name != libC() || !slices.Equal(s.Candidates(), []string{libC()}) {
		t.Errorf("opened %+v, %v", l, err)
	}
	t.Setenv(variable, "/nowhere/lib.so")
	if _, err := s.Open(); err == nil || !strings.Contains(err.Error(), "/nowhere/lib.so") ||
		strings.Contains(err.Error(), "mula") {
		t.Errorf("the error is %v", err)
	}
}

// The reason belongs to the file of the call, also if other goroutines open other files at the same
// time.
func TestReasonIsOfTheCall(t *testing.T) {
	var all sync.WaitGroup
	for g := range 8 {
		all.Go(func() {
			for i := range 200 {
				name := fmt.Sprintf("/nowhere/lib-%d-%d.so", g, i)
				if _, err := (Search{Names: []string{name}}).Open(); err == nil ||
					!strings.Contains(err.Error(), name) {
					t.Errorf("%s: %v", name, err)
					return
				}
			}
		})
	}
	all.Wait()
}

func TestSymbols(t *testing.T) {
	l, err := Search{Names: []string{libC()}}.Open()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range []*Library{l, Loaded} {
		address, err := l.Symbol("abs")
		if err != nil {
			t.Fatal(err)
		}
		if seven, _, _ := purego.SyscallN(address, ^uintptr(6)); int32(seven) != 7 {
			t.Errorf("%s: abs(-7) is %d", l.Name, int32(seven))
		}
		if address, err := l.Symbol("mula_none"); address != 0 || err == nil ||
			err.Error() != l.Name+" has no symbol mula_none" {
			t.Errorf("%#x, %v", address, err)
		}
	}
}
