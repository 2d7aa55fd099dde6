// Package objectstest has the tests that every store of package objects passes, and a proxy that
// disturbs requests.
package objectstest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"mula/internal/longtest"
	"mula/internal/objects"
)

// A Place is an empty folder of a store, for the tests.
type Place struct {
	URL   string // ends with a slash
	Proxy *Proxy // between the tests and the server
	// Put writes an object of a store that package objects only reads; nil for other stores.
	Put func(name string, data []byte)
	// List is true if the store has lists.
	List bool
	// Keeps is true if earlier versions of objects can be read.
	Keeps bool
	// Except are the requests that random faults and lost responses spare; nil: none.
	Except func(*http.Request) bool
	// Secrets must not be in errors.
	Secrets []string
}

// patience is how long an operation is repeated without progress.
const patience = 6 * time.Second

// Run tests the store.
func Run(t *testing.T, p Place) {
	ctx := objects.WithPatience(t.Context(), patience)
	s := &suite{p, ctx}
	for _, test := range []struct {
		name  string
		run   func(*testing.T)
		needs bool
	}{
		{"Missing", s.missing, true},
		{"Read", s.read, true},
		{"Changed", s.changed, true},
		{"Resume", s.resume, true},
		{"Refused", s.refused, true},
		{"Faults", s.faults, true},
		{"List", s.list, p.List},
		{"ReadOnly", s.readOnly, p.Put != nil},
		{"Names", s.names, p.Put == nil},
		{"Write", s.write, p.Put == nil},
		{"Conditions", s.conditions, p.Put == nil},
		{"LostResponses", s.lostResponses, p.Put == nil},
		{"FailedUpload", s.failedUpload, p.Put == nil},
	} {
		if test.needs {
			t.Run(test.name, func(t *testing.T) {
				defer p.Proxy.Disturb(nil)
				test.run(t)
			})
		}
	}
}

type suite struct {
	Place
	ctx context.Context
}

// content returns n bytes that depend on the seed.
func content(seed uint64, n int) []byte {
	data := make([]byte, n)
	chacha := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)})
	chacha.Read(data)
	return data
}

// put writes an object and returns its URL.
func (s *suite) put(t *testing.T, name string, data []byte) string {
	t.Helper()
	if s.Put != nil {
		s.Put(name, data)
	} else if err := objects.WriteFile(s.ctx, s.URL+name, data); err != nil {
		t.Fatal(err)
	}
	return s.URL + name
}

// is checks that an error wraps kind, and names the object and no secret.
func (s *suite) is(t *testing.T, err, kind error, address string) {
	t.Helper()
	if !errors.Is(err, kind) || !strings.Contains(err.Error(), address) {
		t.Errorf("error %q, want %q with the name %s", err, kind, address)
	}
	s.noSecret(t, err)
}

func (s *suite) noSecret(t *testing.T, err error) {
	t.Helper()
	for _, secret := range s.Secrets {
		if err != nil && strings.Contains(err.Error(), secret) {
			t.Errorf("the error has a secret: %v", err)
		}
	}
}

func (s *suite) same(t *testing.T, address string, want []byte) {
	t.Helper()
	got, info, err := objects.ReadFile(s.ctx, address, int64(len(want)))
	if err != nil || !bytes.Equal(got, want) || info.Size != int64(len(want)) {
		t.Errorf("%s: %d bytes, %+v, %v; want %d bytes", address, len(got), info, err, len(want))
	}
}

func (s *suite) missing(t *testing.T) {
	at := s.URL + "missing/x"
	_, err := objects.Stat(s.ctx, at)
	s.is(t, err, fs.ErrNotExist, at)
	_, err = objects.Open(s.ctx, at)
	s.is(t, err, fs.ErrNotExist, at)
	_, _, err = objects.ReadFile(s.ctx, at, 10)
	s.is(t, err, fs.ErrNotExist, at)
	o, err := objects.OpenVersion(s.ctx, at, objects.Info{Size: 10})
	if err != nil {
		t.Fatal(err)
	}
	s.is(t, o.ReadAt(s.ctx, make([]byte, 1), 0), fs.ErrNotExist, at)
}

func (s *suite) read(t *testing.T) {
	for i, size := range []int{0, 1, 256 << 10, 256<<10 + 1, 9<<20 + 5} {
		want := content(uint64(i), size)
		at := s.put(t, fmt.Sprintf("read/%d.bin", size), want)
		s.same(t, at, want)
		if size > 0 {
			if _, _, err := objects.ReadFile(s.ctx, at, int64(size)-1); err == nil ||
				!strings.Contains(err.Error(), "limit") {
				t.Errorf("%d bytes above the limit: %v", size, err)
			}
		}
		o, err := objects.Open(s.ctx, at)
		if err != nil {
			t.Fatal(err)
		}
		if info := o.Info(); info.Size != int64(size) || info.Version == "" {
			t.Errorf("%s: %+v", at, info)
		}
		r := o.Reader(s.ctx)
		got, err := io.ReadAll(r)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: the reader returned %d bytes, %v", at, len(got), err)
		}
		r.Close()
		for range 20 {
			from := rand.IntN(size + 1)
			part := make([]byte, rand.IntN(min(size-from, 100000)+1))
			if err := o.ReadAt(s.ctx, part, int64(from)); err != nil || !bytes.Equal(part, want[from:from+len(part)]) {
				t.Errorf("%s: bytes from %d: %v", at, from, err)
			}
		}
		from, to := size/3, size-size/4
		r = o.Range(s.ctx, int64(from), int64(to))
		got, err = io.ReadAll(r)
		if err != nil || !bytes.Equal(got, want[from:to]) {
			t.Errorf("%s: the range has %d bytes, %v", at, len(got), err)
		}
		r.Close()
		if err := o.ReadAt(s.ctx, make([]byte, 2), int64(size)-1); err == nil {
			t.Errorf("%s: reading beyond the end succeeded", at)
		}
		r = o.Reader(s.ctx) // closed before its end
		r.Read(make([]byte, 1))
		r.Close()
	}
}

func (s *suite) changed(t *testing.T) {
	first, second := content(1, 5<<20), content(2, 5<<20)
	at := s.put(t, "changed", first)
	o, err := objects.Open(s.ctx, at)
	if err != nil {
		t.Fatal(err)
	}
	r := o.Reader(s.ctx)
	defer r.Close()
	if _, err := io.ReadFull(r, make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	s.put(t, "changed", second)
	check := func(got, want []byte, err error) {
		t.Helper()
		if err != nil || !s.Keeps {
			s.is(t, err, objects.ErrChanged, at)
		} else if !bytes.Equal(got, want) {
			t.Error("the bytes are not from the version that was opened")
		}
	}
	got := make([]byte, 10)
	check(got, first[1<<20:][:10], o.ReadAt(s.ctx, got, 1<<20))
	r2 := o.Reader(s.ctx)
	got, err = io.ReadAll(r2)
	check(got, first, err)
	r2.Close()
	s.put(t, "changed", second[:100])
	got = make([]byte, 10)
	check(got, first[4<<20:][:10], o.ReadAt(s.ctx, got, 4<<20))
	s.same(t, at, second[:100])
}

// A response that breaks is resumed: no byte is sent twice.
func (s *suite) resume(t *testing.T) {
	want := content(3, 3<<20)
	at := s.put(t, "resume", want)
	o, err := objects.Open(s.ctx, at)
	if err != nil {
		t.Fatal(err)
	}
	const cut = 100_000
	s.Proxy.Disturb(func(*http.Request) Fault { return Fault{Cut: cut} })
	before := objects.Count()
	got := make([]byte, len(want))
	if err := o.ReadAt(s.ctx, got, 0); err != nil || !bytes.Equal(got, want) {
		t.Errorf("reading broken responses: %v", err)
	}
	after := objects.Count()
	if n := after.BytesRead - before.BytesRead; n != int64(len(want)) {
		t.Errorf("%d bytes were read, want %d", n, len(want))
	}
	if n := after.Retries - before.Retries; n != int64(len(want)/cut) {
		t.Errorf("%d retries, want %d", n, len(want)/cut)
	}
	r := o.Reader(s.ctx)
	defer r.Close()
	if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the reader of broken responses returned %d bytes, %v", len(got), err)
	}
	// A server that stops to send.
	var once atomic.Bool
	s.Proxy.Disturb(func(*http.Request) Fault { return Fault{Cut: cut, Stall: once.CompareAndSwap(false, true)} })
	if err := o.ReadAt(s.ctx, got[:200_000], 0); err != nil || !bytes.Equal(got, want) {
		t.Errorf("reading a response that stalls: %v", err)
	}
}

// An error that does not end is returned within the time, and names the object.
func (s *suite) refused(t *testing.T) {
	at := s.put(t, "refused", []byte("x"))
	ctx := objects.WithPatience(s.ctx, 500*time.Millisecond)
	for status, kind := range map[int]error{503: nil, 429: nil, 403: fs.ErrPermission} {
		s.Proxy.Disturb(func(*http.Request) Fault { return Fault{Status: status} })
		start := time.Now()
		before := objects.Count()
		_, err := objects.Stat(ctx, at)
		took := time.Since(start)
		if err == nil || !strings.Contains(err.Error(), at) || !strings.Contains(err.Error(), fmt.Sprint(status)) ||
			kind != nil && !errors.Is(err, kind) || took > 10*time.Second {
			t.Errorf("status %d: error %v after %v", status, err, took)
		}
		if n := objects.Count().Retries - before.Retries; (n > 0) != (kind == nil) {
			t.Errorf("status %d: %d retries", status, n)
		}
		s.noSecret(t, err)
	}
	s.Proxy.Disturb(func(*http.Request) Fault { return Fault{Drop: true} })
	if _, err := objects.Stat(ctx, at); err == nil || !strings.Contains(err.Error(), at) {
		t.Errorf("closed connections: %v", err)
	}
	s.Proxy.Disturb(func(*http.Request) Fault { return Fault{Range: true} })
	o, err := objects.OpenVersion(ctx, at, objects.Info{Size: 1})
	if err != nil {
		t.Fatal(err)
	}
	if err := o.ReadAt(ctx, make([]byte, 1), 0); err == nil || !strings.Contains(err.Error(), "range") {
		t.Errorf("a wrong range: %v", err)
	}
	cancelled, cancel := context.WithCancel(s.ctx)
	s.Proxy.Disturb(func(*http.Request) Fault {
		cancel()
		return Fault{Delay: time.Minute}
	})
	start := time.Now()
	if _, err := objects.Stat(cancelled, at); !errors.Is(err, context.Canceled) || time.Since(start) > 10*time.Second {
		t.Errorf("cancelled: %v", err)
	}
}

// random returns faults of all kinds for a third of the requests.
func random(seed uint64) func(*http.Request) Fault {
	var mutex sync.Mutex
	r := rand.New(rand.NewPCG(seed, 0))
	return func(*http.Request) Fault {
		mutex.Lock()
		defer mutex.Unlock()
		switch r.IntN(24) {
		case 0:
			return Fault{Status: 503}
		case 1:
			return Fault{Status: 500}
		case 2:
			return Fault{Status: 429}
		case 3:
			return Fault{Drop: true}
		case 4:
			return Fault{Lose: true}
		case 5:
			return Fault{Cut: 1 + r.IntN(100_000)}
		case 6:
			return Fault{Range: true}
		case 7:
			return Fault{Delay: 50 * time.Millisecond}
		}
		return Fault{}
	}
}

// sparing returns fault, but no fault for the excepted requests.
func (s *suite) sparing(fault func(*http.Request) Fault) func(*http.Request) Fault {
	return func(r *http.Request) Fault {
		if s.Except != nil && s.Except(r) {
			return Fault{}
		}
		return fault(r)
	}
}

// With faults of all kinds every operation has the result that it has without faults.
func (s *suite) faults(t *testing.T) {
	for seed := range uint64(longtest.Rounds(1, 20)) {
		small, large := content(10+seed, 1000), content(20+seed, 4<<20)
		a, b := s.put(t, "faults/small", small), s.put(t, "faults/large", large)
		s.Proxy.Disturb(s.sparing(random(seed)))
		for range 5 {
			s.same(t, a, small)
		}
		o, err := objects.Open(s.ctx, b)
		if err != nil {
			t.Fatal(err)
		}
		r := o.Reader(s.ctx)
		if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, large) {
			t.Errorf("seed %d: the reader returned %d bytes, %v", seed, len(got), err)
		}
		r.Close()
		var group sync.WaitGroup
		for range 4 {
			group.Go(func() {
				for range 10 {
					from := rand.IntN(len(large))
					part := make([]byte, min(200_000, len(large)-from))
					if err := o.ReadAt(s.ctx, part, int64(from)); err != nil ||
						!bytes.Equal(part, large[from:from+len(part)]) {
						t.Errorf("seed %d: bytes from %d: %v", seed, from, err)
					}
				}
			})
		}
		group.Wait()
		if s.Put == nil {
			s.writeWithFaults(t, seed)
		}
		if s.List {
			var names []string
			for e, err := range objects.List(s.ctx, s.URL+"faults/") {
				if err != nil {
					t.Fatal(err)
				}
				names = append(names, strings.TrimPrefix(e.URL, s.URL+"faults/"))
			}
			if want := []string{"large", "small"}; !slices.Equal(names, want) {
				t.Errorf("seed %d: list %q, want %q", seed, names, want)
			}
		}
		s.Proxy.Disturb(nil)
	}
}

func (s *suite) writeWithFaults(t *testing.T, seed uint64) {
	check := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Errorf("seed %d: %s: %v", seed, what, err)
		}
	}
	at, other := s.URL+"written/x", s.URL+"written/y"
	large := content(30+seed, 33<<20)
	w, err := objects.Create(s.ctx, at)
	check("create", err)
	_, err = w.Write(large)
	check("write", err)
	check("close", w.Close())
	s.same(t, at, large)
	for i := range byte(3) {
		check("remove", objects.Remove(s.ctx, other))
		info, err := objects.WriteNew(s.ctx, other, []byte{byte(seed), i})
		check("write new", err)
		_, err = objects.WriteNew(s.ctx, other, []byte{99})
		s.is(t, err, fs.ErrExist, other)
		_, err = objects.Replace(s.ctx, other, []byte{byte(seed), i, 1}, info)
		check("replace", err)
		_, err = objects.Replace(s.ctx, other, []byte{99}, info)
		s.is(t, err, objects.ErrChanged, other)
		s.same(t, other, []byte{byte(seed), i, 1})
	}
	check("remove", objects.Remove(s.ctx, other))
}

func (s *suite) list(t *testing.T) {
	names := []string{"A.bin", "a b.bin", "a+b.bin", "a-b.bin", "a.bin", "a/b.bin", "a/c/d.bin", "a0.bin", "ab.bin",
		"ä.bin"}
	for _, name := range names {
		s.put(t, "list/x/"+name, []byte(name))
	}
	s.put(t, "list/xy", nil)
	get := func(prefix string) (found []string) {
		t.Helper()
		for e, err := range objects.List(s.ctx, s.URL+prefix) {
			if err != nil {
				t.Fatal(err)
			}
			name := strings.TrimPrefix(e.URL, s.URL)
			found = append(found, name)
			if info, err := objects.Stat(s.ctx, e.URL); err != nil || info.Version != e.Version || info.Size != e.Size {
				t.Errorf("%s: %+v in the list, %+v (%v) alone", e.URL, e.Info, info, err)
			}
		}
		return found
	}
	var want []string
	for _, name := range names {
		want = append(want, "list/x/"+name)
	}
	slices.Sort(want)
	if got := get("list/x/"); !slices.Equal(got, want) {
		t.Errorf("list %q, want %q", got, want)
	}
	if got := get("list/x"); !slices.Equal(got, append(want, "list/xy")) {
		t.Errorf("list of a text %q, want also list/xy", got)
	}
	if got := get("list/x/a/"); len(got) != 2 {
		t.Errorf("list of a folder: %q", got)
	}
	if got := get("list/none/"); len(got) != 0 {
		t.Errorf("list of nothing: %q", got)
	}
	for pattern, want := range map[string]string{
		"list/x/*.bin":     "A.bin a b.bin a+b.bin a-b.bin a.bin a0.bin ab.bin ä.bin",
		"list/x/a?b.bin":   "a b.bin a+b.bin a-b.bin",
		"list/x/[A-Z].bin": "A.bin", "list/x/*/*.bin": "a/b.bin", "list/x/none*": "", "list/x/a.bin": "a.bin",
		`list/x/a\.bin`: "a.bin",
	} {
		found, err := objects.Glob(s.ctx, s.URL+pattern)
		var got []string
		for _, e := range found {
			got = append(got, strings.TrimPrefix(e.URL, s.URL+"list/x/"))
		}
		if err != nil || strings.Join(got, " ") != want {
			t.Errorf("pattern %s: %q, %v; want %q", pattern, got, err, want)
		}
	}
	if _, err := objects.Glob(s.ctx, s.URL+"list/[a"); err == nil {
		t.Error("a malformed pattern was accepted")
	}
	if testing.Short() {
		return
	}
	// More than a page.
	const many = 1005
	var group sync.WaitGroup
	for i := range 8 {
		group.Go(func() {
			for n := i; n < many; n += 8 {
				s.put(t, fmt.Sprintf("many/%04d", n), nil)
			}
		})
	}
	group.Wait()
	if got := 0; s.Put == nil {
		for e, err := range objects.List(s.ctx, s.URL+"many/") {
			if want := fmt.Sprintf("%smany/%04d", s.URL, got); err != nil || e.URL != want {
				t.Fatalf("%s, %v; want %s", e.URL, err, want)
			}
			got++
		}
		if got != many {
			t.Errorf("a list of %d objects, want %d", got, many)
		}
	}
}

func (s *suite) readOnly(t *testing.T) {
	at := s.URL + "new"
	w, err := objects.Create(s.ctx, at)
	if err == nil {
		w.Write([]byte("x"))
		err = w.Close()
	}
	_, newErr := objects.WriteNew(s.ctx, at, nil)
	for _, err := range []error{err, newErr, objects.WriteFile(s.ctx, at, nil), objects.Remove(s.ctx, at)} {
		s.is(t, err, errors.ErrUnsupported, at)
	}
}

func (s *suite) names(t *testing.T) {
	for i, name := range []string{"a b", "a+b", "a%20b", "ü/ß", "q?x=1&y", "h#1", "c:d", "br[1]*", "e=f", "quote'\"",
		"~t", "deep/er/a.b/c"} {
		at := s.put(t, "names/"+name, []byte{byte(i)})
		s.same(t, at, []byte{byte(i)})
		if _, err := objects.Stat(s.ctx, at); err != nil {
			t.Error(err)
		}
		found := 0
		for e, err := range objects.List(s.ctx, at) {
			if err != nil || e.URL != at {
				t.Errorf("%q in the list of %q, %v", e.URL, at, err)
			}
			found++
		}
		if found != 1 {
			t.Errorf("%d objects in the list of %q", found, at)
		}
		if err := objects.Remove(s.ctx, at); err != nil {
			t.Error(err)
		}
		if _, err := objects.Stat(s.ctx, at); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s after its removal: %v", at, err)
		}
		if err := objects.Remove(s.ctx, at); err != nil {
			t.Errorf("a second removal: %v", err)
		}
	}
}

func (s *suite) write(t *testing.T) {
	at := s.URL + "write/x"
	absent := func(what string) {
		t.Helper()
		if _, err := objects.Stat(s.ctx, at); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", what, err)
		}
	}
	const part = 16 << 20
	for i, size := range []int{0, 1, part, part + 1, 3*part + 7} {
		if err := objects.Remove(s.ctx, at); err != nil {
			t.Fatal(err)
		}
		want := content(uint64(40+i), size)
		before := objects.Count().BytesWritten
		w, err := objects.Create(s.ctx, at)
		if err != nil {
			t.Fatal(err)
		}
		for rest := want; len(rest) > 0; {
			n := min(len(rest), 1+rand.IntN(3<<20))
			if n, err := w.Write(rest[:n]); err != nil {
				t.Fatalf("%d, %v", n, err)
			}
			rest = rest[n:]
		}
		absent("before Close")
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		w.Abort()
		if err := w.Close(); err == nil {
			t.Error("a second Close succeeded")
		}
		s.same(t, at, want)
		if n := objects.Count().BytesWritten - before; n != int64(size) {
			t.Errorf("%d bytes were counted, want %d", n, size)
		}
	}
	old := s.put(t, "write/x", []byte("old"))
	for _, size := range []int{10, 2*part + 1} {
		w, err := objects.Create(s.ctx, old)
		if err != nil {
			t.Fatal(err)
		}
		w.Write(make([]byte, size))
		w.Abort()
		if _, err := w.Write([]byte{1}); err == nil {
			t.Error("writing after Abort succeeded")
		}
		if err := w.Close(); err == nil {
			t.Error("Close after Abort succeeded")
		}
		s.same(t, old, []byte("old"))
		ctx, cancel := context.WithCancel(s.ctx)
		if w, err = objects.Create(ctx, old); err != nil {
			t.Fatal(err)
		}
		w.Write(make([]byte, size))
		cancel()
		if err := w.Close(); !errors.Is(err, context.Canceled) {
			t.Errorf("Close after the end of the context: %v", err)
		}
		s.same(t, old, []byte("old"))
	}
}

// conditions: of several writers at the same time, one succeeds.
func (s *suite) conditions(t *testing.T) {
	at := s.URL + "conditions/claim"
	race := func(write func(i int) (objects.Info, error), kind error) (objects.Info, byte) {
		t.Helper()
		var group sync.WaitGroup
		infos, errs := make([]objects.Info, 8), make([]error, 8)
		for i := range errs {
			group.Go(func() { infos[i], errs[i] = write(i) })
		}
		group.Wait()
		winner := -1
		for i, err := range errs {
			switch {
			case err == nil && winner >= 0:
				t.Errorf("%d and %d both succeeded", winner, i)
			case err == nil:
				winner = i
			default:
				s.is(t, err, kind, at)
			}
		}
		if winner < 0 {
			t.Fatal("no writer succeeded")
		}
		now, err := objects.Stat(s.ctx, at)
		if got := infos[winner]; err != nil || got.Version != now.Version || got.Size != now.Size {
			t.Errorf("the writer got %+v, the object is %+v, %v", got, now, err)
		}
		return infos[winner], byte(winner)
	}
	for range 5 {
		if err := objects.Remove(s.ctx, at); err != nil {
			t.Fatal(err)
		}
		if _, err := objects.Replace(s.ctx, at, nil, objects.Info{}); err == nil {
			t.Error("an object without a version was replaced")
		}
		was, first := race(func(i int) (objects.Info, error) {
			return objects.WriteNew(s.ctx, at, []byte{byte(i)})
		}, fs.ErrExist)
		s.same(t, at, []byte{first})
		was, second := race(func(i int) (objects.Info, error) {
			return objects.Replace(s.ctx, at, []byte{byte(i), 1}, was)
		}, objects.ErrChanged)
		s.same(t, at, []byte{second, 1})
		if err := objects.Remove(s.ctx, at); err != nil {
			t.Fatal(err)
		}
		_, err := objects.Replace(s.ctx, at, []byte{9}, was)
		s.is(t, err, objects.ErrChanged, at)
	}
}

// A request that succeeded, but whose response was lost, is not taken as the request of another
// process when it is repeated. This also holds if a request that looks for the cause fails first.
func (s *suite) lostResponses(t *testing.T) {
	disturbFirst := func() {
		seen := make(map[string]bool)
		var mutex sync.Mutex
		s.Proxy.Disturb(s.sparing(func(r *http.Request) Fault {
			mutex.Lock()
			defer mutex.Unlock()
			id := r.Method + r.URL.String()
			first := !seen[id]
			seen[id] = true
			if first && (r.Method == http.MethodGet || r.Method == http.MethodHead) {
				return Fault{Status: 503} // the HTTP client itself repeats reads without a response
			}
			return Fault{Lose: first}
		}))
	}
	at := s.URL + "lost/x"
	disturbFirst()
	info, err := objects.WriteNew(s.ctx, at, []byte("mine"))
	if err != nil {
		t.Fatal(err)
	}
	disturbFirst()
	if info, err = objects.Replace(s.ctx, at, []byte("mine, too"), info); err != nil {
		t.Error(err)
	}
	if now, err := objects.Stat(s.ctx, at); err != nil || now.Version != info.Version {
		t.Errorf("the writer got the version %q, the object has %q, %v", info.Version, now.Version, err)
	}
	s.same(t, at, []byte("mine, too"))
	disturbFirst()
	want := content(50, 33<<20)
	w, err := objects.Create(s.ctx, at)
	if err != nil {
		t.Fatal(err)
	}
	w.Write(want)
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	s.same(t, at, want)
	disturbFirst()
	if err := objects.Remove(s.ctx, at); err != nil {
		t.Error(err)
	}
}

// An upload that fails leaves the earlier object, and its parts are removed.
func (s *suite) failedUpload(t *testing.T) {
	at := s.put(t, "failed/x", []byte("old"))
	ctx := objects.WithPatience(s.ctx, 500*time.Millisecond)
	for _, after := range []int64{0, 2} { // the start of the upload, a part
		var writes atomic.Int64
		s.Proxy.Disturb(func(r *http.Request) Fault {
			write := r.Method == http.MethodPut || r.Method == http.MethodPost
			if write && writes.Add(1) > after {
				return Fault{Status: 503}
			}
			return Fault{}
		})
		w, err := objects.Create(ctx, at)
		if err != nil {
			t.Fatal(err)
		}
		_, err = w.Write(make([]byte, 40<<20))
		if closing := w.Close(); err == nil {
			err = closing
		}
		if err == nil || !strings.Contains(err.Error(), "503") || !strings.Contains(err.Error(), at) {
			t.Errorf("after %d requests: %v", after, err)
		}
		s.noSecret(t, err)
		s.Proxy.Disturb(nil)
		s.same(t, at, []byte("old"))
	}
}
