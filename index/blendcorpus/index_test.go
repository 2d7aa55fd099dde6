package blendcorpus

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"
	"pgregory.net/rapid"

	"mula/fixtures/vectors"
	"mula/index/gpt"
	"mula/index/numpy"
	"mula/index/rebuild"
	"mula/internal/longtest"
)

// Random configurations against testdata/reference.json, which reference.py made with numpy and
// plain Python.
func TestReference(t *testing.T) {
	longtest.SkipIfShort(t)
	data, err := os.ReadFile("testdata/reference.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden struct {
		Configurations []struct {
			Profile, Split string
			Files          []struct {
				Weight            float64
				Prefix, Corpus    string
				Number, Documents int
			}
			Samples        [3]int64
			Seq            int64
			Seed           uint32
			Blend, Shuffle bool
			Lenient        bool
			Epochs         int64
			Manifest       string
			Count          int
		}
	}
	if err := json.Unmarshal(data, &golden); err != nil {
		t.Fatal(err)
	}
	built, lenient, refused := 0, 0, 0
	var group errgroup.Group
	group.SetLimit(8) // most of the time they wait for the disk
	for i, g := range golden.Configurations {
		profile, err := ProfileNamed(g.Profile)
		if err != nil {
			t.Fatal(err)
		}
		c := NewConfig(profile)
		c.Split, c.Samples, c.SequenceLength, c.Seed = g.Split, g.Samples, g.Seq, g.Seed
		c.BlendSampleInCorpus, c.ShuffleSampleInCorpus, c.ExactEpochs = g.Blend, g.Shuffle, g.Epochs
		c.AllowUnreadable = g.Lenient
		c.Root, c.Cache = t.TempDir(), t.TempDir()
		for _, f := range g.Files {
			c.Files = append(c.Files, File{f.Weight, f.Prefix, f.Corpus})
			writeIndex(t, filepath.Join(c.Root, f.Prefix), vectors.Lengths(f.Number, f.Documents))
		}
		group.Go(func() error {
			x, err := New(context.Background(), c)
			if err == nil {
				_, err = x.Build(context.Background(), rebuild.BuildOptions{Threads: 1})
				x.Close()
			}
			switch {
			case g.Manifest == "" && err == nil:
				t.Errorf("configuration %d is built, although the original or training would stop: %+v", i, c)
			case g.Manifest != "" && err != nil:
				t.Errorf("configuration %d: %v: %+v", i, err, c)
			case g.Manifest != "":
				if got, n := manifest(t, c.Cache); got != g.Manifest || n != g.Count {
					t.Errorf("configuration %d: %d files with the manifest %s, want %d with %s: %+v", i, n, got,
						g.Count, g.Manifest, c)
				}
			}
			return nil
		})
		switch {
		case g.Manifest == "":
			refused++
		case g.Lenient:
			lenient++
		default:
			built++
		}
	}
	group.Wait()
	if built < 20 || lenient < 3 || refused < 5 {
		t.Errorf("%d configurations were built, %d besides although they cannot be read, and %d refused: too few to "+
			"say anything", built, lenient, refused)
	}
}

// memory is a file in memory that wants its pieces as blend files are written.
type memory struct {
	data []byte
	want int64
	t    *testing.T
}

func (m *memory) WriteAt(p []byte, off int64) (int, error) {
	const piece = 4 << 20
	if off%piece != 0 || off+int64(len(p)) > m.want || len(p) != piece && off+int64(len(p)) != m.want {
		m.t.Errorf("a piece of %d bytes at %d of a file of %d", len(p), off, m.want)
	}
	m.data = append(m.data, make([]byte, max(0, int(off)+len(p)-len(m.data)))...)
	return copy(m.data[off:], p), nil
}

func (m *memory) numbers() []int64 {
	var out []int64
	for at := numpy.HeaderSize; at < len(m.data); at += 8 {
		out = append(out, int64(binary.LittleEndian.Uint64(m.data[at:])))
	}
	return out
}

// Blends of many pieces, in both arithmetics, against the plain rule.
func TestBlendsOfManyPieces(t *testing.T) {
	const n = 1_200_000 // three pieces
	for _, b := range []blend{
		{name: "separate", weights: []float64{.1, .2, .7}},
		{name: "fused", weights: []float64{.1, .2, .7}, fused: true},
		{name: "concatenated", concat: true},
	} {
		b.size, b.lenient = n, true
		for _, k := range []int64{500_000, 0, 700_000} {
			b.parts = append(b.parts, part{asked: k})
		}
		index, sample := &memory{want: b.sizes()[0], t: t}, &memory{want: b.sizes()[1], t: t}
		if err := b.write(context.Background(), []io.WriterAt{index, sample}, nil, 2); err != nil {
			t.Fatal(err)
		}
		header := numpy.Header("<i8", n)
		if !bytes.HasPrefix(index.data, header[:]) || !bytes.HasPrefix(sample.data, header[:]) {
			t.Errorf("%s: the header is %q", b.name, index.data[:numpy.HeaderSize])
		}
		gotIndex, gotSample := index.numbers(), sample.numbers()
		if len(gotIndex) != n || len(gotSample) != n {
			t.Fatalf("%s: %d and %d numbers", b.name, len(gotIndex), len(gotSample))
		}
		count := make([]int64, 3)
		for step := range gotIndex {
			want := 0
			if b.concat {
				for count[want] == b.parts[want].asked {
					want++
				}
			} else {
				best := math.Inf(-1)
				for i, w := range b.weights {
					x := max(float64(step), 1)
					e := float64(w*x) - float64(count[i])
					if b.fused {
						e = math.FMA(w, x, -float64(count[i]))
					}
					if e > best {
						best, want = e, i
					}
				}
			}
			if gotIndex[step] != int64(want) || gotSample[step] != count[want] {
				t.Fatalf("%s, step %d: sample %d of %d, want %d of %d", b.name, step, gotSample[step], gotIndex[step],
					count[want], want)
			}
			count[want]++
		}
		// One file alone is the same.
		again := &memory{want: b.sizes()[1], t: t}
		if err := b.write(context.Background(), []io.WriterAt{nil, again}, nil, 1); err != nil ||
			!bytes.Equal(again.data, sample.data) {
			t.Errorf("%s: the sample index alone differs, %v", b.name, err)
		}
	}
}

// The order of corpora and of their members; the words of the originals' descriptions.
func TestDescribe(t *testing.T) {
	c := vectorConfig(t)
	c.Profile = MegatronDeepSpeed
	var corpora []string
	for _, e := range open(t, c).Describe() {
		if e.Dir != c.Cache || e.Description != e.Hash+".dsc" || e.Hash != hash(e.Text) ||
			len(e.Files) != len(e.Sizes) {
			t.Errorf("%+v", e)
		}
		if e.Class == classCorpus {
			corpora = append(corpora, e.Text)
		}
	}
	slices.Sort(corpora)
	if want := []string{"web\n 14", "web\n 273", "wiki\n 3", "wiki\n 50"}; !slices.Equal(corpora, want) {
		t.Errorf("%q, want %q", corpora, want)
	}
	// The description matches the built files.
	build(t, c)
	for _, e := range open(t, c).Describe() {
		for i, name := range e.Files {
			if info, err := os.Stat(filepath.Join(c.Cache, name)); err != nil || info.Size() != e.Sizes[i] {
				t.Errorf("%s: %v, want %d bytes", name, err, e.Sizes[i])
			}
		}
		if b, err := os.ReadFile(filepath.Join(c.Cache, e.Description)); err != nil || string(b) != e.Text {
			t.Errorf("%s: %v", e.Description, err)
		}
	}
}

// Without a cache directory the indices are written next to the token files. With a cache
// directory, the user is warned of files next to the token files.
func TestDirectories(t *testing.T) {
	c := vectorConfig(t)
	cacheDir := c.Cache
	c.Cache = ""
	if s := build(t, c); s.Built != 9 {
		t.Errorf("%+v; want the 9 datasets and no blends", s)
	}
	for _, e := range open(t, c).Describe() {
		if dir := filepath.Join(c.Root, "index-cache"); e.Class == classDataset && e.Dir != dir ||
			e.Class != classDataset && e.Dir != "" || e.Shadow != "" {
			t.Errorf("%s: directory %q, want %q for datasets and none for blends; shadow %q", e.Name, e.Dir, dir,
				e.Shadow)
		}
	}
	c.Cache = cacheDir
	for _, e := range open(t, c).Describe() {
		if (e.Shadow != "") != (e.Class == classDataset) || e.Dir != cacheDir {
			t.Errorf("%s: shadow %q, directory %q", e.Name, e.Shadow, e.Dir)
		}
	}
	build(t, c)
	if _, n := manifest(t, cacheDir); n != 54 {
		t.Errorf("%d files, want 54", n)
	}
	// One of four files is not enough.
	entries := open(t, c).Describe()
	last := entries[len(entries)-1]
	if err := os.Remove(filepath.Join(last.Shadow, last.Files[1])); err != nil {
		t.Fatal(err)
	}
	entries = open(t, c).Describe()
	if got := entries[len(entries)-1].Shadow; got != "" {
		t.Errorf("three files of four beside the token file are taken for a hit: %s", got)
	}
}

func TestCacheIsFile(t *testing.T) {
	c := vectorConfig(t)
	if err := os.WriteFile(c.Cache, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	for _, resume := range []bool{false, true} {
		if _, err := open(t, c).Build(context.Background(), rebuild.BuildOptions{Threads: 1,
			Resume: resume}); err == nil ||
			!strings.Contains(err.Error(), c.Cache+" is a file") {
			t.Errorf("resume %v: %v", resume, err)
		}
	}
}

// Two builds whose corpora have the same names and sizes, and other members.
func TestCorpusCollision(t *testing.T) {
	c := vectorConfig(t)
	build(t, c)
	before, _ := manifest(t, c.Cache)

	other := c
	other.Files = slices.Clone(c.Files)
	other.Files[0].Weight, other.Files[2].Weight = 3.5, 2
	s := build(t, other)
	want, alone := "", other
	alone.Cache = t.TempDir()
	build(t, alone)
	for _, e := range open(t, alone).Describe() {
		for _, name := range e.Files {
			a, err := os.ReadFile(filepath.Join(alone.Cache, name))
			if err != nil {
				t.Fatal(err)
			}
			if b, err := os.ReadFile(filepath.Join(other.Cache, name)); err != nil || !bytes.Equal(a, b) {
				want = name
			}
		}
	}
	if want != "" || s.Built == 0 {
		t.Errorf("%s is not that of the second blend; %+v", want, s)
	}
	// And back.
	build(t, c)
	for _, e := range open(t, alone).Describe() {
		for _, name := range append(e.Files, e.Description) {
			if e.Class == classDataset || !slices.ContainsFunc(open(t, c).Describe(),
				func(o rebuild.Entry) bool { return o.Hash == e.Hash }) {
				os.Remove(filepath.Join(c.Cache, name))
			}
		}
	}
	build(t, c)
	if after, n := manifest(t, c.Cache); after != before {
		t.Errorf("going back gives %d files with the manifest %s, want %s", n, after, before)
	}
}

// Blends that another program left are taken only if they are right.
func TestForeignBlends(t *testing.T) {
	c := vectorConfig(t)
	build(t, c)
	before, _ := manifest(t, c.Cache)
	state := filepath.Join(c.Cache, ".mula")
	if err := os.RemoveAll(state); err != nil {
		t.Fatal(err)
	}
	if s := build(t, c); s.Foreign != 15 || s.Built != 0 {
		t.Errorf("right files of another program: %+v", s)
	}

	// The corpus of another blend: its files in another order.
	name := filepath.Join(c.Cache, "291792a9e9659cf9c397331daa3861ae_index.npy")
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	for at := numpy.HeaderSize; at < len(data); at += 8 {
		data[at] ^= 1
	}
	if err := os.WriteFile(name, data, 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(state); err != nil {
		t.Fatal(err)
	}
	_, err = open(t, c).Build(context.Background(), rebuild.BuildOptions{Threads: 1, Resume: true})
	if err == nil || !strings.Contains(err.Error(), "291792a9e9659cf9c397331daa3861ae_index.npy") ||
		!strings.Contains(err.Error(), "byte 128") {
		t.Errorf("a corpus of another blend: %v", err)
	}
	// A file that is cut off, or that the caller wants rebuilt, is rebuilt.
	if err := os.WriteFile(name, data[:len(data)-1], 0o666); err != nil {
		t.Fatal(err)
	}
	if s := build(t, c); s.Foreign != 14 || s.Built != 1 {
		t.Errorf("a corpus cut off: %+v", s)
	}
	if after, _ := manifest(t, c.Cache); after != before {
		t.Error("the corpus is not as before")
	}
}

// Refused configurations, with their errors.
func TestRefused(t *testing.T) {
	base := vectorConfig(t)
	writeIndex(t, filepath.Join(base.Root, "tiny"), []int32{5, 5, 5})
	writeIndex(t, filepath.Join(base.Root, "blank"), make([]int32, 50))
	for _, test := range []struct {
		name   string
		change func(*Config)
		want   string
	}{
		{"no files", func(c *Config) { c.Files = nil }, "empty"},
		{"profile", func(c *Config) { c.Profile = 9 }, "profile(9)"},
		{"sequence length", func(c *Config) { c.SequenceLength = 0 }, "--seq-length"},
		{"samples", func(c *Config) { c.Samples[1] = -1 }, "valid: -1 samples"},
		{"too many samples", func(c *Config) { c.Samples[0] = 1 << 62 }, "train"},
		{"epochs", func(c *Config) { c.ExactEpochs = -1 }, "number of exact epochs -1"},
		{"too many epochs", func(c *Config) { c.ExactEpochs = 50 }, "epochs"},
		{"weights", func(c *Config) { c.Files = []File{{0, "f0", "a"}} }, "sum to 0.0"},
		{"nan", func(c *Config) { c.Files = []File{{math.NaN(), "f0", "a"}} }, "nan"},
		{"mixed", func(c *Config) { c.Files = append(slices.Clone(c.Files), File{1, "f0", ""}) }, "token file 4"},
		{"split of two", func(c *Config) { c.Split = "70, 30" }, "has 2 parts"},
		{"split of fractions", func(c *Config) { c.Split = "0.7,0.2,0.1" }, "not an integer"},
		{"split of words", func(c *Config) { c.Split = "a,b,c" }, "invalid number"},
		{"split of lines", func(c *Config) { c.Split = "1,\n1,1" }, "write it like"},
		{"split of nothing", func(c *Config) { c.Split = "0,0,0" }, "no split has samples"},
		{"no token file", func(c *Config) { c.Files = []File{{1, "none", "a"}} }, "none"},
		{"empty split", func(c *Config) { c.Files = append(slices.Clone(c.Files), File{1, "tiny", "web"}) },
			"are in split"},
		{"no tokens", func(c *Config) { c.Files = append(slices.Clone(c.Files), File{1, "blank", "web"}) },
			"no tokens"},
		{"flat, empty split", func(c *Config) { c.Files = []File{{1, "f0", ""}, {1, "tiny", ""}} },
			"fewer data sets than weights"},
		{"flat, no samples", func(c *Config) { c.Files = []File{{1, "f0", ""}}; c.Samples[1] = 0 },
			"valid: no samples"},
		{"plain with two files", func(c *Config) { c.Files, c.Plain = []File{{1, "f0", ""}, {1, "f1", ""}}, true },
			"without weights"},
		{"division by train", func(c *Config) { c.Profile, c.Samples[0] = MegatronDeepSpeed, 0 },
			"number of train samples"},
	} {
		c := base
		test.change(&c)
		x, err := New(context.Background(), c)
		if err == nil {
			x.Close()
			t.Errorf("%s: it is not refused", test.name)
		} else if !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", test.name, err, test.want)
		}
	}
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := New(ended, base); !errors.Is(err, context.Canceled) {
		t.Errorf("a context that is done: %v", err)
	}
}

// A corpus of weight 0 is drawn from all the same. Training would stop there, so it is refused
// before anything can be seen, unless the caller wants what the original writes.
func TestUnreadable(t *testing.T) {
	c := vectorConfig(t)
	c.Files = []File{{0, "f0", "aside"}, {1, "f1", "wiki"}}
	_, err := open(t, c).Build(context.Background(), rebuild.BuildOptions{Threads: 1})
	if err == nil || !strings.Contains(err.Error(), "the blend takes 1 samples of corpus aside, which has 0") {
		t.Errorf("a corpus of weight 0: %v", err)
	}
	for _, e := range open(t, c).Describe() {
		for _, name := range append(e.Files, e.Description) {
			if _, err := os.Stat(filepath.Join(c.Cache, name)); e.Class == classBlend &&
				slices.Contains(e.Splits, rebuild.Train) && !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s of the refused blend: %v", name, err)
			}
		}
	}
	c.AllowUnreadable = true
	build(t, c)

	// A file without a document in a split has no index, and its corpus is as if it had.
	writeIndex(t, filepath.Join(c.Root, "tiny"), []int32{50, 50, 50})
	c.Files = []File{{1, "tiny", "wiki"}, {1, "f0", "wiki"}}
	c.Split, c.Cache = "90, 5, 5", t.TempDir()
	x := open(t, c)
	var of []string
	for _, e := range x.Describe() {
		if e.Class == classDataset {
			of = append(of, e.Name)
		}
	}
	slices.Sort(of)
	if want := []string{"test f0 for 9 samples", "train f0 for 161 samples", "train tiny for 161 samples",
		"valid f0 for 9 samples"}; !slices.Equal(of, want) {
		t.Errorf("datasets %q, want %q", of, want)
	}
	build(t, c)
}

// A prefix alone is not a blend, and the build has the requested samples.
func TestPlain(t *testing.T) {
	c := vectorConfig(t)
	var err error
	if c.Files, c.Plain, err = ParseDataPath([]string{"f2"}); err != nil {
		t.Fatal(err)
	}
	var texts []string
	for _, e := range open(t, c).Describe() {
		texts = append(texts, e.Text)
	}
	if len(texts) != 3 || !strings.Contains(texts[0], "\nNumber of samples 320\n") ||
		!strings.Contains(texts[2], "Dataset name test\nNumber of samples 16\n") {
		t.Errorf("%q", texts)
	}
}

// Every sequence of a file belongs to one split, whatever the rounding.
func TestBoundsDivide(t *testing.T) {
	for _, test := range []struct {
		split     string
		sequences int64
		want      [4]int64
	}{
		{"70, 20, 10", 40, [4]int64{0, 28, 36, 40}},
		{"969, 30, 1", 100, [4]int64{0, 97, 100, 100}},
		{"50,50,0", 3, [4]int64{0, 1, 3, 3}},        // 1.5 and 1.5 round to 2 and 2, one too many
		{"50,50,0", 1, [4]int64{0, 1, 1, 1}},        // 0.5 and 0.5 to 0 and 0, one too few
		{"0,50,50", 3, [4]int64{0, -1, 1, 3}},       // before the beginning, which is refused
		{"34, 33, 33", 50, [4]int64{0, 18, 34, 50}}, // 17 and twice 16.5, to 16
	} {
		f, _, err := parseSplit(test.split, false)
		if err != nil {
			t.Fatal(err)
		}
		if got := gpt.SplitEdges(f, test.sequences); got != test.want {
			t.Errorf("%s of %d: %v, want %v", test.split, test.sequences, got, test.want)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		f, _, err := parseSplit(rapid.StringMatching(`[1-9][0-9]{0,3}, [0-9]{1,4}, [0-9]{1,4}`).Draw(t, "split"), false)
		if err != nil {
			t.Fatal(err)
		}
		n := rapid.Int64Range(0, 1<<40).Draw(t, "n")
		edges := gpt.SplitEdges(f, n)
		if edges[0] != 0 || edges[3] != n {
			t.Errorf("%v of %d", edges, n)
		}
		for i, v := range f {
			if width := float64(edges[i+1] - edges[i]); math.Abs(width-v*float64(n)) > 2.6 {
				t.Errorf("split %d of %v: %v, want about %v", i, f, width, v*float64(n))
			}
		}
	})
}

func TestRequests(t *testing.T) {
	for _, test := range []struct {
		batch, iters, eval, times int64
		want                      [3]int64
		refused                   bool
	}{
		{8, 40, 2, 1, [3]int64{320, 16, 16}, false},
		{8, 40, 2, 5, [3]int64{320, 80, 16}, false},
		{8, 40, 0, 1, [3]int64{320, 0, 0}, false},
		{1 << 32, 1 << 32, 1, 1, [3]int64{}, true},
		{8, -1, 1, 1, [3]int64{}, true},
	} {
		got, err := Requests(test.batch, test.iters, test.eval, test.times)
		if got != test.want || (err != nil) != test.refused {
			t.Errorf("%+v: %v, %v", test, got, err)
		}
	}
}

func TestProfiles(t *testing.T) {
	for _, p := range []Profile{BlendCorpus, MegatronDeepSpeed} {
		if got, err := ProfileNamed(p.String()); got != p || err != nil {
			t.Errorf("%s: %v, %v", p, got, err)
		}
	}
	if _, err := ProfileNamed("deepspeed"); err == nil || !strings.Contains(err.Error(), "megatron-deepspeed") {
		t.Errorf("an unknown profile: %v", err)
	}
	if a, b := NewConfig(BlendCorpus), NewConfig(MegatronDeepSpeed); a.Seed != 123 || b.Seed != 1234 ||
		a.Split != "969, 30, 1" || !a.BlendSampleInCorpus {
		t.Errorf("defaults %+v and %+v", a, b)
	}
}
