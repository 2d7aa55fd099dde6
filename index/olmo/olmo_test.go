package olmo

import (
	"context"
	"crypto/md5"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"unsafe"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"mula/index/numpy"
	"mula/shards"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// golden has the results of ai2-olmo-core, from testdata/golden.py.
type golden struct {
	Permutations []struct {
		Seed  int64
		N     int
		First []int
		MD5   string
	}
	Datasets []struct {
		DType           shards.DType
		Length, Longest int64
		Files           []struct {
			Name  string
			Bytes int64
		}
		Vocabulary struct {
			Size, Pad, EOS int64
			BOS            *int64
		}
		Seed, Epoch int64
		Shuffle     bool
		Instances   int64
		Offsets     [][2]int64
		Fingerprint string
		Version     string `json:"fingerprint_version"`
		Name, MD5   string
		First       []uint32
	}
}

func readGolden(t *testing.T) (g golden) {
	t.Helper()
	text, err := os.ReadFile("testdata/golden.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &g); err != nil {
		t.Fatal(err)
	}
	return g
}

func sum(p []byte) string {
	h := md5.Sum(p)
	return hex.EncodeToString(h[:])
}

func bytesOf(ids []uint32) []byte {
	var p []byte
	for _, id := range ids {
		p = binary.LittleEndian.AppendUint32(p, id)
	}
	return p
}

func TestPermute(t *testing.T) {
	for _, c := range readGolden(t).Permutations {
		got := Permute(c.Seed, c.N)
		ids := make([]uint32, c.N)
		for i, v := range got {
			ids[i] = uint32(v)
		}
		if !slices.Equal(got[:len(c.First)], c.First) || sum(bytesOf(ids)) != c.MD5 {
			t.Errorf("seed %d, n %d: %v…, want %v…", c.Seed, c.N, got[:len(c.First)], c.First)
		}
	}
}

// The orders, names, fingerprints and instances of whole data sets.
func TestDatasets(t *testing.T) {
	for k, c := range readGolden(t).Datasets {
		d := Dataset{DType: c.DType, SequenceLength: c.Length, MaxTargetSequenceLength: c.Longest}
		for _, f := range c.Files {
			d.Files = append(d.Files, File{"some/folder/" + f.Name, f.Bytes})
		}
		if err := d.Check(); err != nil {
			t.Fatalf("data set %d: %v", k, err)
		}
		v := Vocabulary{c.Vocabulary.Size, c.Vocabulary.Pad, c.Vocabulary.EOS, c.Vocabulary.BOS}
		if got := d.Fingerprint(v); got != c.Fingerprint || c.Version != "v2.0" {
			t.Errorf("data set %d: fingerprint %s, want %s (%s)", k, got, c.Fingerprint, c.Version)
		}
		for i, at := range c.Offsets {
			if n := d.FileInstances(i); n != at[1]-at[0] {
				t.Errorf("data set %d: file %d has %d instances, want %d", k, i, n, at[1]-at[0])
			}
		}
		o := d.Order(c.Seed, c.Epoch)
		o.Shuffle = c.Shuffle
		if o.Instances != c.Instances || o.Name() != c.Name {
			t.Errorf("data set %d: %d instances, %s; want %d, %s", k, o.Instances, o.Name(), c.Instances, c.Name)
		}
		if back, err := parseName("x/" + c.Name); err != nil || back.Name() != c.Name {
			t.Errorf("%s is parsed as %+v, %v", c.Name, back, err)
		}
		dir := t.TempDir()
		path, err := o.Write(t.Context(), nil, dir, 2)
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(path)
		if err != nil || path != filepath.Join(dir, c.Name) || sum(got) != c.MD5 {
			t.Errorf("data set %d: %s, %v: MD5 %s, want %s (%v…)", k, path, err, sum(got), c.MD5, c.First)
		}
		if err := o.Verify(t.Context(), nil, path, 1); err != nil {
			t.Error(err)
		}
	}
}

// The vectors of OLMo-core's orders, and of numpy's generator and shuffle under them.
func TestVectors(t *testing.T) {
	for _, c := range []struct {
		o     Order
		first []uint32
		md5   string
	}{
		{Order{1000, 1, true, 34521, 1}, []uint32{905, 250, 414, 554, 333, 834, 537, 775},
			"26a248a3e4d964f9ed666214fd9c27c5"},
		{Order{1000, 1, true, 34521, 2}, []uint32{586, 379, 498, 271, 249, 597, 383, 709},
			"270d3b44800f80c0caf75e8023f5d5be"},
		{Order{1000, 4, true, 7, 3}, []uint32{372, 373, 374, 375, 420, 421, 422, 423},
			"ca0256320532041e54f395b0f93d894b"},
		{Order{100003, 1, true, 6198, 0}, []uint32{27125, 8068, 8648, 62718, 32625, 99822, 96240, 52874}, ""},
	} {
		path, err := c.o.Write(t.Context(), nil, t.TempDir(), 1)
		if err != nil {
			t.Fatal(err)
		}
		p, err := os.ReadFile(path)
		if err != nil || c.md5 != "" && sum(p) != c.md5 || string(p[:len(c.first)*4]) != string(bytesOf(c.first)) {
			t.Errorf("%s: %v, MD5 %s, want %s", c.o.Name(), err, sum(p), c.md5)
		}
	}
	if got, want := numpy.SeedSequence(34522, 4), []uint64{4072936500876860428, 3860600257043854459,
		5903087393948556259, 9620833178129359323}; !slices.Equal(got, want) {
		t.Errorf("SeedSequence(34522): %v", got)
	}
	if got, want := numpy.SeedSequence(6198, 4), []uint64{18226109254346334829, 11509511256931753152,
		6908304897609655621, 406285045705944941}; !slices.Equal(got, want) {
		t.Errorf("SeedSequence(6198): %v", got)
	}
	g := numpy.NewGenerator(6198)
	for i, want := range []uint64{0xb4539f5cff6dcdf5, 0x4943c97e3b66ef81, 0x72b1c0d75cf4db48} {
		if got := g.Uint64(); got != want {
			t.Errorf("PCG64(6198), draw %d: %x, want %x", i, got, want)
		}
	}
	for seed, want := range map[int64][]uint32{
		34522: {5, 9, 8, 4, 0, 6, 1, 2, 7, 3},
		6198:  {17, 4, 14, 3, 5, 12, 6, 15, 18, 13, 10, 11, 2, 19, 0, 16, 7, 9, 8, 1},
		6199:  {19, 8, 9, 11, 4, 5, 17, 6, 15, 14, 2, 12, 16, 1, 18, 3, 10, 13, 0, 7},
		0:     {4, 19, 6, 2, 13, 16, 3, 11, 10, 8, 0, 12, 7, 5, 18, 17, 14, 9, 1, 15},
	} {
		a, release, err := Order{Instances: int64(len(want)), Chunk: 1, Shuffle: true, Seed: seed}.indices(t.Context(),
			1)
		if err != nil || !slices.Equal(a, want) {
			t.Errorf("seed %d: %v, %v, want %v", seed, a, err, want)
		}
		release()
	}
}

func TestName(t *testing.T) {
	for o, want := range map[Order]string{
		{1000, 1, true, 34521, 1}: "global_indices_dataset_size1000_epoch1_seed34521_v1.npy",
		{1000, 4, true, 7, 3}:     "global_indices_chunk4_dataset_size1000_epoch3_seed7_v1.npy",
		{Instances: 9, Chunk: 1}:  "global_indices_dataset_size9_v1.npy",
		{Instances: 9, Chunk: 3}:  "global_indices_chunk3_dataset_size9_v1.npy",
	} {
		if got := o.Name(); got != want {
			t.Errorf("%+v: %s, want %s", o, got, want)
		}
		if got, err := parseName(filepath.Join("a", want)); err != nil || got != o {
			t.Errorf("%s: %+v, %v", want, got, err)
		}
	}
	for _, name := range []string{
		"", "global_indices", "global_indices_v1.npy", "global_indices_dataset_size_v1.npy",
		"global_indices_dataset_size01_v1.npy", "global_indices_chunk1_dataset_size9_v1.npy",
		"global_indices_dataset_size9_epoch1_v1.npy", "global_indices_dataset_size9_seed1_epoch1_v1.npy",
		"global_indices_dataset_size9_v2.npy", "global_indices_dataset_size99999999999999999999_v1.npy",
		"global_indices_dataset_size4294967295_v1.npy", "global_indices_dataset_size0_v1.npy",
		"global_indices_chunk10_dataset_size9_v1.npy", "global_indices_dataset_size-9_v1.npy",
	} {
		if o, err := parseName(name); err == nil {
			t.Errorf("%q was parsed as %+v", name, o)
		}
	}
}

func FuzzParseName(f *testing.F) {
	f.Add("global_indices_chunk4_dataset_size1000_epoch3_seed7_v1.npy")
	f.Add("global_indices_dataset_size9_v1.npy")
	f.Fuzz(func(t *testing.T, name string) {
		if o, err := parseName(name); err == nil && (o.Name() != filepath.Base(name) || o.Check() != nil) {
			t.Errorf("%q: %+v", name, o)
		}
	})
}

func TestCheck(t *testing.T) {
	for _, o := range []Order{
		{}, {Instances: -1, Chunk: 1}, {Instances: 1<<32 - 1, Chunk: 1}, {Instances: 5}, {Instances: 5,
			Chunk: 6}, {Instances: 5, Chunk: -1}, {5, 1, true, -1, 1}, {5, 1, true, 1, -1}, {5, 1, true, 1<<63 - 1, 1},
	} {
		if o.Check() == nil {
			t.Errorf("%+v was accepted", o)
		}
		if _, err := o.Write(t.Context(), nil, t.TempDir(), 1); err == nil {
			t.Errorf("%+v was written", o)
		}
	}
	if err := (Order{Instances: 1<<32 - 2, Chunk: 1}).Check(); err != nil {
		t.Error(err)
	}
	for _, d := range []Dataset{
		{DType: "int32", SequenceLength: 4}, {DType: shards.UInt16}, {DType: shards.UInt16, SequenceLength: 4,
			MaxTargetSequenceLength: 6}, {DType: shards.UInt16, SequenceLength: 4, MaxTargetSequenceLength: 2},
		{DType: shards.UInt32, SequenceLength: 4, Files: []File{{"x", 6}}},
	} {
		if d.Check() == nil {
			t.Errorf("%+v was accepted", d)
		}
	}
}

// Any order of several chunks of writing, by several goroutines: every position is asked for once
// and lands in its place.
func TestWriteFunc(t *testing.T) {
	const n, entries = 1000, chunkBytes/4*2 + 777
	o := Order{Instances: n, Chunk: 1, Shuffle: true, Seed: 1, Epoch: 1}
	rule := func(k int64) uint32 { return uint32(k * k % n) }
	dir := t.TempDir()
	var asked atomic.Int64
	fill := func(_ context.Context, first int64, ids []uint32) error {
		for i := range ids {
			ids[i] = rule(first + int64(i))
		}
		return nil
	}
	counted := func(ctx context.Context, first int64, ids []uint32) error {
		asked.Add(int64(len(ids)))
		return fill(ctx, first, ids)
	}
	path, err := o.WriteFunc(t.Context(), nil, dir, 3, entries, counted)
	if err != nil || path != filepath.Join(dir, o.Name()) || asked.Load() != entries {
		t.Fatal(path, err, asked.Load())
	}
	p, err := os.ReadFile(path)
	if err != nil || len(p) != entries*4 {
		t.Fatal(len(p), err)
	}
	for k := range int64(entries) {
		if got := binary.LittleEndian.Uint32(p[k*4:]); got != rule(k) {
			t.Fatalf("position %d: %d, want %d", k, got, rule(k))
		}
	}
	if err := VerifyFunc(t.Context(), nil, path, entries, fill); err != nil {
		t.Error(err)
	}
	if err := VerifyFunc(t.Context(), nil, path, entries-1, fill); err == nil {
		t.Error("a longer file was verified")
	}
	const at = chunkBytes/4 + 5
	p[at*4] ^= 1
	if err := os.WriteFile(path, p, 0o666); err != nil {
		t.Fatal(err)
	}
	var d *difference
	if err := VerifyFunc(t.Context(), nil, path, entries, fill); !errors.As(err, &d) || d.Position != at ||
		d.Want != rule(at) || d.Got != rule(at)^1 {
		t.Errorf("changed at %d: %v", at, err)
	}

	// Nothing appears when the order is wrong, fails, or is interrupted.
	failure := errors.New("broken")
	ctx, cancel := context.WithCancel(t.Context())
	for name, fill := range map[string]func(first int64, ids []uint32) error{
		"out of range": func(first int64, ids []uint32) error { ids[5] = n; return nil },
		"error":        func(int64, []uint32) error { return failure },
		"cancelled":    func(int64, []uint32) error { cancel(); return nil },
	} {
		dir := t.TempDir()
		_, err := o.WriteFunc(ctx, nil, dir, 1, entries, func(_ context.Context, first int64, ids []uint32) error {
			clear(ids)
			return fill(first, ids)
		})
		if err == nil {
			t.Errorf("%s: no error", name)
		}
		if name == "out of range" && ctx.Err() == nil && !strings.Contains(err.Error(), "position 5 is instance 1000") {
			t.Error(err)
		}
		if left, _ := os.ReadDir(dir); len(left) != 0 {
			t.Errorf("%s: left behind %v", name, left)
		}
	}
	cancel()
	if _, err := o.WriteFunc(t.Context(), nil, t.TempDir(), 1, 0, nil); err == nil {
		t.Error("an order of nothing was written")
	}
}

// Orders that take several chunks of writing equal a plain Fisher-Yates and expansion, and Verify
// finds the one entry that differs.
func TestWriteVerify(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		o := Order{Instances: rapid.Int64Range(1, 5_000_000).Draw(rt, "n"),
			Chunk: rapid.SampledFrom([]int64{1, 1, 2, 3, 7}).Draw(rt, "chunk"), Shuffle: true,
			Seed: rapid.Int64Range(0, 1<<40).Draw(rt, "seed"), Epoch: rapid.Int64Range(1, 5).Draw(rt, "epoch")}
		o.Instances = max(o.Instances, o.Chunk)
		dir := t.TempDir()
		path, err := o.Write(t.Context(), nil, dir, 2)
		if err != nil {
			rt.Fatal(err)
		}
		defer os.Remove(path)
		p, err := os.ReadFile(path)
		if err != nil {
			rt.Fatal(err)
		}
		want := make([]uint32, o.Instances/o.Chunk)
		for i := range want {
			want[i] = uint32(i)
		}
		numpy.Shuffle(numpy.NewGenerator(uint64(o.Seed+o.Epoch)), want)
		if int64(len(p)) != o.Entries()*4 {
			rt.Fatalf("%d bytes for %d entries", len(p), o.Entries())
		}
		for k := range o.Entries() {
			if got, w := binary.LittleEndian.Uint32(p[k*4:]),
				want[k/o.Chunk]*uint32(o.Chunk)+uint32(k%o.Chunk); got != w {
				rt.Fatalf("position %d: %d, want %d", k, got, w)
			}
		}
		if err := o.Verify(t.Context(), nil, path, 1); err != nil {
			rt.Fatal(err)
		}
		at := rapid.Int64Range(0, o.Entries()-1).Draw(rt, "changed")
		p[at*4] ^= 1
		if err := os.WriteFile(path, p, 0o666); err != nil {
			rt.Fatal(err)
		}
		var d *difference
		if err := o.Verify(t.Context(), nil, path, 1); !errors.As(err, &d) || d.Position != at || d.Got != d.Want^1 ||
			d.Got != binary.LittleEndian.Uint32(p[at*4:]) {
			rt.Fatalf("changed at %d: %v", at, err)
		}
		if err := os.Truncate(path, int64(len(p)-4)); err != nil {
			rt.Fatal(err)
		}
		if err := o.Verify(t.Context(), nil, path, 1); err == nil {
			rt.Fatal("a shorter file was verified")
		}
	})
}

func TestStat(t *testing.T) {
	dir := t.TempDir()
	var paths []string
	for i := range 40 {
		paths = append(paths, filepath.Join(dir, fmt.Sprint(i)))
		if err := os.WriteFile(paths[i], make([]byte, i), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	files, err := Stat(t.Context(), paths)
	if err != nil {
		t.Fatal(err)
	}
	for i, f := range files {
		if f != (File{paths[i], int64(i)}) {
			t.Errorf("%+v", f)
		}
	}
	for _, path := range []string{dir, filepath.Join(dir, "none")} {
		if _, err := Stat(t.Context(), []string{paths[0], path}); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func BenchmarkWrite(b *testing.B) {
	for _, n := range []int64{1_000_000, 50_000_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			o := Order{Instances: n, Chunk: 1, Shuffle: true, Seed: 6198, Epoch: 1}
			b.SetBytes(n * int64(unsafe.Sizeof(uint32(0))))
			for b.Loop() {
				if _, err := o.Write(b.Context(), nil, b.TempDir(), 2); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
