package opencl

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"mula/internal/atomicfile"
	"mula/internal/filesystem/faultfs"
	"mula/internal/longtest"
)

func (c *Cache) files(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(c.folder, "*"))
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// builder builds sources in one context, and says whether they came from the cache.
func builder(t *testing.T) func(s Source, cache *Cache) (cached bool, cacheErr error) {
	c, err := NewContext(someDevice(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Release)
	return func(s Source, cache *Cache) (bool, error) {
		t.Helper()
		compiled := 0
		p, err := c.Build(WithCompiling(t.Context(), func(*Device) { compiled++ }), s, cache)
		if err != nil {
			t.Fatal(err)
		}
		defer p.Release()
		if want := map[bool]int{false: 1}[p.Cached()]; compiled != want {
			t.Errorf("cached %v, and said to be compiled %d times", p.Cached(), compiled)
		}
		k, err := p.Kernel("f")
		if err != nil {
			t.Fatal(err)
		}
		defer k.Release()
		if len(k.parameters) != 1 || p.Cached() && !k.parameters[0].known {
			t.Logf("parameters, cached %v: %v", p.Cached(), k.parameters)
		}
		return p.Cached(), p.CacheError()
	}
}

const smallText = "kernel void f(global int *x)\n{\n\tx[get_global_id(0)] = VALUE;\n}\n"

func TestCache(t *testing.T) {
	build := builder(t)
	cache := NewCache(filepath.Join(t.TempDir(), "a", "b"))
	one, two := Source{"f.cl", smallText, "-DVALUE=1"}, Source{"f.cl", smallText, "-DVALUE=2"}
	for i, test := range []struct {
		source Source
		cached bool
		files  int
	}{{one, false, 1}, {one, true, 1}, {two, false, 2}, {two, true, 2}, {one, true, 2},
		{Source{"g.cl", smallText, "-DVALUE=1"}, true, 2}, {Source{"f.cl", smallText + "\n", "-DVALUE=1"}, false, 3}} {
		cached, err := build(test.source, cache)
		if files := cache.files(t); err != nil || cached != test.cached || len(files) != test.files {
			t.Errorf("build %d: cached %v, %d files, %v; want %v, %d", i, cached, len(files), err, test.cached,
				test.files)
		}
	}
}

// A key names all that a program depends on, and no two take each other's place.
func TestCacheKeys(t *testing.T) {
	seen := map[cacheKey]string{}
	note := func(what string, d Device, s Source) {
		key := d.cacheKey(s)
		if other, ok := seen[key]; ok {
			t.Errorf("%s has the key of %s", what, other)
		}
		seen[key] = what
	}
	d, s := Device{Name: "n", Vendor: "v", Version: "1", DriverVersion: "2", Platform: "p", platformVersion: "3"},
		Source{"f.cl", "text", "options"}
	note("this", d, s)
	for name, change := range map[string]func(d *Device, s *Source){
		"name":             func(d *Device, s *Source) { d.Name = "m" },
		"vendor":           func(d *Device, s *Source) { d.Vendor = "w" },
		"version":          func(d *Device, s *Source) { d.Version = "2" },
		"driver":           func(d *Device, s *Source) { d.DriverVersion = "3" },
		"platform":         func(d *Device, s *Source) { d.Platform = "q" },
		"platform version": func(d *Device, s *Source) { d.platformVersion = "4" },
		"text":             func(d *Device, s *Source) { s.Text = "test" },
		"options":          func(d *Device, s *Source) { s.Options = "" },
		"moved":            func(d *Device, s *Source) { s.Options, s.Text = "optionst", "ext" },
		"moved back":       func(d *Device, s *Source) { s.Options, s.Text = "option", "stext" },
	} {
		d, s := d, s
		change(&d, &s)
		note(name, d, s)
	}
	d.ComputeUnits, s.Name = 5, "g.cl" // what does not matter
	if _, ok := seen[d.cacheKey(s)]; !ok {
		t.Error("the number of compute units is in the key")
	}
}

// A file that is not what was kept is as good as none.
func TestCacheDamage(t *testing.T) {
	cache := NewCache(t.TempDir())
	rapid.Check(t, func(t *rapid.T) {
		key, other := cacheKey{1}, cacheKey{2}
		content := rapid.SliceOfN(rapid.Byte(), 1, 200).Draw(t, "content")
		if err := cache.store(key, content); err != nil {
			t.Fatal(err)
		}
		if got := cache.load(key); !slices.Equal(got, content) {
			t.Fatalf("kept %v, got %v", content, got)
		}
		if cache.load(other) != nil {
			t.Fatal("a program that was never kept")
		}
		data, err := os.ReadFile(cache.path(key))
		if err != nil {
			t.Fatal(err)
		}
		damaged := slices.Clone(data)
		switch rapid.IntRange(0, 2).Draw(t, "damage") {
		case 0:
			damaged[rapid.IntRange(0, len(data)-1).Draw(t, "byte")] ^= 1 << rapid.IntRange(0, 7).Draw(t, "bit")
		case 1:
			damaged = damaged[:rapid.IntRange(0, len(data)-1).Draw(t, "length")]
		case 2:
			damaged = append(damaged, rapid.SliceOfN(rapid.Byte(), 1, 9).Draw(t, "more")...)
		}
		if err := os.WriteFile(cache.path(key), damaged, 0o666); err != nil {
			t.Fatal(err)
		}
		if got := cache.load(key); got != nil {
			t.Fatalf("damaged, and yet there: %v", got)
		}
		if err := os.Rename(cache.path(key), cache.path(other)); err != nil {
			t.Fatal(err)
		}
		if cache.load(other) != nil {
			t.Fatal("another's program")
		}
		os.Remove(cache.path(other))
	})
}

// An entry that is damaged, or from another driver, is rebuilt and replaced.
func TestCacheRepair(t *testing.T) {
	d := someDevice(t)
	build := builder(t)
	cache, source := NewCache(t.TempDir()), Source{"f.cl", smallText, "-DVALUE=1"}
	if cached, err := build(source, cache); cached || err != nil {
		t.Fatal(cached, err)
	}
	path := cache.files(t)[0]
	key := d.cacheKey(Source{Text: source.Text, Options: argumentInfo + " " + source.Options})
	if path != cache.path(key) {
		t.Fatalf("the file is %s, want %s", path, cache.path(key))
	}
	for name, spoil := range map[string]func() error{
		"cut":     func() error { return os.Truncate(path, 100) },
		"empty":   func() error { return os.Truncate(path, 0) },
		"foreign": func() error { return cache.store(key, []byte("no program of this driver")) },
		"a link to nothing": func() error {
			return errors.Join(os.Remove(path), os.Symlink(filepath.Join(t.TempDir(), "nothing"), path))
		},
	} {
		if err := spoil(); err != nil {
			t.Fatal(err)
		}
		if cached, err := build(source, cache); cached || err != nil {
			t.Errorf("%s: cached %v, %v", name, cached, err)
		}
		if cached, err := build(source, cache); !cached || err != nil {
			t.Errorf("%s, the second time: cached %v, %v", name, cached, err)
		}
	}
}

// Whatever goes wrong with the file, the program is there, and no half of a file is.
func TestCacheFaults(t *testing.T) {
	build := builder(t)
	broken := errors.New("broken disk")
	source := Source{"f.cl", smallText, "-DVALUE=1"}
	for _, op := range []faultfs.Op{faultfs.Create, faultfs.Write, faultfs.Sync, faultfs.Rename,
		faultfs.SyncDir} {
		cache := NewCache(t.TempDir())
		cache.disk = atomicfile.On(faultfs.FailOn(op, "", broken))
		cached, err := build(source, cache)
		if cached || !errors.Is(err, broken) || !strings.Contains(err.Error(), "cannot cache") {
			t.Errorf("%s: cached %v, %v", op, cached, err)
		}
		cache.disk = atomicfile.Files{}
		published := op == faultfs.SyncDir // the file is there, and whole
		if files := cache.files(t); len(files) > 0 != published {
			t.Errorf("%s: %q is there", op, files)
		}
		if cached, err = build(source, cache); cached != published || err != nil {
			t.Errorf("%s, then: cached %v, %v", op, cached, err)
		}
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	if cached, err := build(source, NewCache(file)); cached || err == nil {
		t.Errorf("a file where the folder should be: cached %v, %v", cached, err)
	}
}

// Processes that start with the same empty cache all get their program. They leave a cache that the
// next process uses.
func TestCacheProcesses(t *testing.T) {
	longtest.SkipIfShort(t)
	someDevice(t)
	folder := filepath.Join(t.TempDir(), "cache")
	var waits []func() string
	for range 2 {
		waits = append(waits, start(t, "build", folder))
	}
	for _, wait := range waits {
		wait()
	}
	if out := start(t, "build", folder)(); !strings.Contains(out, "cached true") {
		t.Errorf("the next process: %s", out)
	}
	if files := NewCache(folder).files(t); len(files) != 1 {
		t.Errorf("the cache has %q", files)
	}
}

// buildInProcess builds and runs a program, and returns an exit code.
func buildInProcess(folder string) int {
	devices, _ := Devices()
	d, err := Choose(devices, Choice{})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	c, err := NewContext(d)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	defer c.Release()
	p, err := c.Build(context.Background(), Source{"f.cl", smallText, "-DVALUE=7"}, NewCache(folder))
	if err != nil {
		fmt.Println(err)
		return 1
	}
	defer p.Release()
	fmt.Println("cached", p.Cached())
	if p.CacheError() != nil {
		fmt.Println(p.CacheError())
		return 1
	}
	q, err1 := c.NewQueue(true)
	k, err2 := p.Kernel("f")
	b, err3 := c.NewBuffer(16)
	if err := errors.Join(err1, err2, err3); err != nil {
		fmt.Println(err)
		return 1
	}
	got := make([]int32, 4)
	if err := errors.Join(q.Launch(k, []int{4}, []int{4}, Global(b)), Read(context.Background(), q, b, 0,
		got)); err != nil || !slices.Equal(got, []int32{7, 7, 7, 7}) {
		fmt.Println(got, err)
		return 1
	}
	return 0
}
