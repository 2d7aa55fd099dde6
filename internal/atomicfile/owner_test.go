package atomicfile

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"mula/internal/testwait"
)

// ended returns an ended process that was waited for, and an ended process that was not.
func ended(t *testing.T) (reaped, zombie Owner) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(exe, "-test.list", "^$")
	if err := c.Run(); err != nil {
		t.Fatal(err)
	}
	reaped = Self()
	reaped.PID, reaped.Started = c.Process.Pid, 0

	z := exec.Command(exe, "-test.list", "^$")
	out, err := z.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := z.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { z.Wait() })
	for buf := make([]byte, 512); err == nil; { // its output ends when it does
		_, err = out.Read(buf)
	}
	zombie = Self()
	zombie.PID, zombie.Started = z.Process.Pid, 0
	return reaped, zombie
}

func TestGone(t *testing.T) {
	reaped, zombie := ended(t)
	self := Self()
	parent := self
	parent.PID, parent.Started = os.Getppid(), 0
	elsewhere := reaped
	elsewhere.Machine = "0000000000000000"
	for name, test := range map[string]struct {
		o    Owner
		want bool
	}{
		"self": {self, false}, "parent": {parent, false}, "ended": {reaped, true}, "elsewhere": {elsewhere,
			false}, "nobody": {Owner{}, false},
	} {
		if got := test.o.Gone(); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
	if self.Started == 0 {
		return // this system does not tell when a process started
	}
	testwait.Until(t, "a process that has ended but was not waited for is gone", zombie.Gone)
	for _, pid := range []int{self.PID, parent.PID} {
		o := self
		o.PID, o.Started = pid, 1
		if !o.Gone() {
			t.Errorf("process %d: the id is in use again, its first owner counts as running", pid)
		}
	}
}

// The identifiers of machines, boots and containers are wide enough: with 32 bits, some of these
// would be equal.
func TestMachines(t *testing.T) {
	seen := make(map[string]string)
	for k := range 300_000 {
		host, realm := fmt.Sprintf("node%d", k/300), fmt.Sprintf("boot pid:[%d]", 4026531836+k%300)
		id := machine(host, realm)
		if len(id) != machineDigits {
			t.Fatalf("%q", id)
		}
		if other, ok := seen[id]; ok {
			t.Fatalf("%s, %s and %s are %s", host, realm, other, id)
		}
		seen[id] = host + ", " + realm
	}
}

func TestTempName(t *testing.T) {
	for _, base := range []string{"x.bin", "a-b.c", "." + strings.Repeat("long", 62), strings.Repeat("é", 120)} {
		name := TempName(filepath.Join("d", base))
		if filepath.Dir(name) != "d" || len(filepath.Base(name)) > 255 || name == TempName(filepath.Join("d", base)) {
			t.Errorf("%q", name)
		}
		o, ok := tempOwner(filepath.Base(name))
		self := Self()
		self.Host = ""
		if !ok || o != self {
			t.Errorf("%s: %+v, %v; want %+v", name, o, ok, self)
		}
	}
	for _, name := range []string{"", ".", ".tmp", ".x.tmp", ".x.123.tmp", "x.0011aabb2233ccdd-1-0-0.tmp",
		".x.0011aabb2233ccdd-1-0-0.bak", ".x.0011aabb2233ccdd-0-0-0.tmp", ".x.0011aabb-1-0-0.tmp",
		".x.0011aabb2233ccdg-1-0-0.tmp", ".x.0011aabb2233ccdd-1-0.tmp", ".x.0011aabb2233ccdd-1--1-0.tmp"} {
		if o, ok := tempOwner(name); ok {
			t.Errorf("%q is taken for one of ours: %+v", name, o)
		}
	}
}

// Clean removes files that no process will finish, and nothing else.
func TestClean(t *testing.T) {
	reaped, _ := ended(t)
	self := Self()
	elsewhere := reaped
	elsewhere.Machine = "0000000000000000"
	name := func(o Owner, k int) string {
		return fmt.Sprintf(".x.%s-%d-%s-%d%s", o.Machine, o.PID, "0", k, TempSuffix)
	}
	own := filepath.Base(TempName("x"))
	old := time.Now().Add(-AbandonedAfter - time.Hour)
	dir := t.TempDir()
	for _, test := range []struct {
		name string
		old  bool
		keep bool
	}{
		{name(reaped, 1), false, false},
		{name(reaped, 2), true, false},
		{name(elsewhere, 3), false, true},
		{name(elsewhere, 4), true, false},
		{own, false, true},
		{strings.Replace(own, ".x.", ".y.", 1), true, true},
		{"x", true, true},
		{".x.tmp", true, true},
		{".x.123.tmp", true, true},
	} {
		path := filepath.Join(dir, test.name)
		if err := os.WriteFile(path, nil, 0o666); err != nil {
			t.Fatal(err)
		}
		if test.old {
			if err := os.Chtimes(path, old, old); err != nil {
				t.Fatal(err)
			}
		}
		defer func() {
			if _, err := os.Stat(path); (err == nil) != test.keep {
				t.Errorf("%+v: %v", test, err)
			}
		}()
	}
	if err := os.Mkdir(filepath.Join(dir, name(reaped, 9)), 0o777); err != nil {
		t.Fatal(err)
	}
	if n, err := Clean(dir); n != 3 || err != nil {
		t.Errorf("%d removed, %v; want 3", n, err)
	}
	if self != Self() {
		t.Error("a process that changes")
	}
}

func FuzzTempOwner(f *testing.F) {
	f.Add(filepath.Base(TempName("x")))
	f.Add(".x.0011aabb2233ccdd-1-0-0.tmp")
	f.Fuzz(func(t *testing.T, name string) {
		if o, ok := tempOwner(name); ok && (o.PID <= 0 || o.Started < 0 || len(o.Machine) != 16) {
			t.Errorf("%q: %+v", name, o)
		}
	})
}
