package blend

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"pgregory.net/rapid"

	"mula/index"
	"mula/internal/filesystem/faultfs"
	"mula/shards"
	"mula/shards/shardtest"
)

// Every position has one (source, epoch, window), every source's windows come epoch by epoch, each
// once an epoch, over the stages' borders; and Position leads back from each.
func TestOrderOfPlan(t *testing.T) {
	for _, shuffle := range []string{"", "shuffle: {block: 4}\n", "shuffle: {block: 1000, group: 1}\n"} {
		c, text := mixed(t)
		checkOrder(t, c.seal(text+shuffle))
	}
}

func checkOrder(t *testing.T, p *Plan) {
	t.Helper()
	if p.Length() != 600 {
		t.Fatalf("%d positions, want 600", p.Length())
	}
	type place struct {
		source        int
		epoch, window int64
	}
	seen := map[place]int64{}
	drawn := make([]int64, len(p.Sources))
	for position := range p.Length() {
		s, err := p.Locate(position)
		if err != nil {
			t.Fatal(err)
		}
		at := place{s.Source, s.Epoch, s.Window}
		if before, ok := seen[at]; ok {
			t.Fatalf("%+v stands at positions %d and %d", at, before, position)
		}
		seen[at] = position
		training := p.Sources[s.Source].Training()
		if s.Epoch != drawn[s.Source]/training || s.Window >= training {
			t.Fatalf("position %d: sample %d of %d windows is %+v", position, drawn[s.Source], training, s)
		}
		drawn[s.Source]++
		if back, ok := p.Position(s.Source, s.Epoch, s.Window); !ok || back != position {
			t.Fatalf("position %d: the inverse is %d, %v", position, back, ok)
		}
		if want := position >= 37 && position < 41 || position >= 310 && position < 330; s.Skipped != want {
			t.Fatalf("position %d: skipped is %v", position, s.Skipped)
		}
		if inStage2 := position >= 200 && position < 300; inStage2 && s.Source == 2 {
			t.Fatalf("position %d is of a source that rests", position)
		}
	}
	for i, n := range drawn {
		if n != p.totals[i] || n == 0 {
			t.Errorf("source %d was drawn %d times, the plan says %d", i, n, p.totals[i])
		}
		// What comes after the end of the plan is nowhere.
		s := &p.Sources[i]
		epoch, window := s.order.At(n)
		if at, ok := p.Position(i, epoch, window); ok {
			t.Errorf("source %d: its sample %d, beyond the plan, is at %d", i, n, at)
		}
		if s.Validation == 0 {
			t.Errorf("source %d has nothing held out", i)
		}
		w := s.Training()
		for held := range p.Validation(i) {
			if held.Window != w || held.Position != -1 {
				t.Errorf("source %d: held-out window %+v, want window %d", i, held, w)
			}
			if at, ok := p.Position(i, 0, w); ok {
				t.Errorf("source %d: held-out window %d is drawn at %d", i, w, at)
			}
			w++
		}
		if w != s.Windows() {
			t.Errorf("source %d: held-out windows end at %d of %d", i, w, s.Windows())
		}
	}
	for _, position := range []int64{-1, 600, 1 << 62} {
		if _, err := p.Locate(position); err == nil {
			t.Errorf("position %d was located", position)
		}
	}
}

// plan makes a plan of sources with these numbers of windows, without files.
func planOf(t interface {
	Helper()
	Fatal(...any)
}, windows []int64, stages []Stage) *Plan {
	t.Helper()
	p := &Plan{Seed: 1, SequenceLength: 8, Stages: stages}
	p.order = newWindowOrder(p, index.Locality{})
	for i, n := range windows {
		p.Sources = append(p.Sources, Source{Name: string(rune('a'+i%26)) + string(rune('a'+i/26%26)) +
			string(rune('a'+i/676)),
			Shards: []Shard{{DType: "uint16", Tokens: n*8 + 1, Bin: unhashed, Index: unhashed}}})
	}
	if err := p.compile(); err != nil {
		t.Fatal(err)
	}
	return p
}

// Over any stages, large and small, positions and samples lead to each other.
func TestPositionInvertsLocate(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		windows := rapid.SliceOfN(rapid.OneOf(rapid.Int64Range(1, 50), rapid.Int64Range(60_000, 1<<40)), 1, 8).Draw(rt,
			"windows")
		stages := make([]Stage, rapid.IntRange(1, 5).Draw(rt, "stages"))
		for j := range stages {
			stages[j].Samples = rapid.OneOf(rapid.Int64Range(1, 20), rapid.Int64Range(1, 1<<57)).Draw(rt, "samples")
			stages[j].Weights = rapid.SliceOfN(rapid.Uint64Range(0, 1<<40), len(windows), len(windows)).Draw(rt,
				"weights")
			stages[j].Weights[rapid.IntRange(0, len(windows)-1).Draw(rt, "one")]++
		}
		p := planOf(t, windows, stages)
		if rapid.Bool().Draw(rt, "local") {
			p.order = newWindowOrder(p, index.Locality{Block: rapid.Int64Range(1, 1<<24).Draw(rt, "block"),
				Group: rapid.Int64Range(1, 1<<24).Draw(rt, "group")})
			if err := p.compile(); err != nil {
				rt.Fatal(err)
			}
		}
		position := rapid.Int64Range(0, p.Length()-1).Draw(rt, "position")
		s, err := p.Locate(position)
		if err != nil {
			rt.Fatal(err)
		}
		if back, ok := p.Position(s.Source, s.Epoch, s.Window); !ok || back != position {
			rt.Fatalf("position %d is %+v, which is at %d %v", position, s, back, ok)
		}
	})
}

// A change of later stages does not change earlier samples. A stage that only repeats the weights
// does not change the sources' own order: no window is drawn twice in an epoch.
func TestPrefixStability(t *testing.T) {
	windows := []int64{100, 7, 70_000}
	short := planOf(t, windows, []Stage{{Samples: 1000, Weights: []uint64{3, 1, 6}}})
	long := planOf(t, windows, []Stage{{Samples: 1000, Weights: []uint64{3, 1, 6}},
		{Samples: 500, Weights: []uint64{0, 1, 1}}})
	for position := range short.Length() {
		a, _ := short.Locate(position)
		b, _ := long.Locate(position)
		if a != b {
			t.Fatalf("position %d: %+v, and %+v with another stage behind", position, a, b)
		}
	}
}

func TestCheckPositions(t *testing.T) {
	for length, want := range map[int64][]int64{
		1:   {0},
		5:   {0, 1, 2, 3, 4},
		16:  {0, 1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 15},
		160: {0, 1, 2, 3, 4, 5, 6, 7, 10, 30, 50, 70, 90, 110, 130, 150},
	} {
		got := checkPositions(length)
		if len(got) != len(want) {
			t.Errorf("length %d: %v, want %v", length, got, want)
			continue
		}
		for i := range got {
			if got[i] != want[i] {
				t.Errorf("length %d: %v, want %v", length, got, want)
				break
			}
		}
	}
	if got := checkPositions(maxLength); len(got) != 16 || got[15] != maxLength/16*15 {
		t.Errorf("the longest plan is checked at %v", got)
	}
}

// A plan and its shards can be moved together, and apart with a base directory; the fingerprint
// stays.
func TestPlanMoves(t *testing.T) {
	c, text := mixed(t)
	p := c.seal(text)
	moved := filepath.Join(t.TempDir(), "elsewhere")
	if err := os.Rename(c.dir, moved); err != nil {
		t.Fatal(err)
	}
	q, err := ReadPlan(filepath.Join(moved, "plan.json"))
	if err != nil {
		t.Fatal(err)
	}
	d, err := Open(context.Background(), q, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	d.Close()
	if d.Fingerprint() != p.Fingerprint() {
		t.Error("moving the directory changed the fingerprint")
	}
	alone := filepath.Join(t.TempDir(), "alone.json")
	data, err := os.ReadFile(filepath.Join(moved, "plan.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(alone, data, 0o644); err != nil {
		t.Fatal(err)
	}
	if q, err = ReadPlan(alone); err != nil {
		t.Fatal(err)
	}
	if d, err := Open(context.Background(), q, OpenOptions{}); err == nil {
		d.Close()
		t.Error("the shards were found where they are not")
	}
	if d, err = Open(context.Background(), q, OpenOptions{Base: moved}); err != nil {
		t.Fatal(err)
	}
	d.Close()
	// Written from there, the plan leads to the shards again.
	again := filepath.Join(t.TempDir(), "again.json")
	if err := d.Write(again); err != nil {
		t.Fatal(err)
	}
	if q, err = ReadPlan(again); err != nil {
		t.Fatal(err)
	}
	if d, err = Open(context.Background(), q, OpenOptions{}); err != nil {
		t.Fatal(err)
	}
	d.Close()
}

// The fingerprint is of the meaning: other spellings of the weights do not change it, anything that
// changes a batch does.
func TestFingerprint(t *testing.T) {
	c, text := mixed(t)
	p := c.seal(text)
	same := c.seal(strings.NewReplacer("0.7\n", "7e-1\n", "1/10", "0.10", "0.2\n", "1/5\n", "{wiki: 0.3, web: 0.7}",
		"{web: 7, wiki: 3}",
		"validation: 0.05", "validation: 5e-2", "max_epochs: 8", "max_epochs: 9").Replace(text))
	if p.Fingerprint() != same.Fingerprint() {
		t.Error("the spelling of weights changed the fingerprint")
	}
	for _, change := range [][2]string{{"6198", "6199"}, {"length: 16", "length: 15"}, {"samples: 600", "samples: 601"},
		{"samples: 200", "samples: 201"},
		{"0.7\n", "0.71\n"}, {"name: web", "name: net"}, {"to: 41", "to: 42"}, {"0.05", "0.2"}, {"[web/part-*.idx]",
			"['web/part-[01]']"}} {
		text := strings.ReplaceAll(text, change[0], change[1])
		text = strings.ReplaceAll(text, "web:", map[bool]string{true: "net:", false: "web:"}[change[1] == "name: net"])
		if c.seal(text).Fingerprint() == p.Fingerprint() {
			t.Errorf("%s instead of %s did not change the fingerprint", change[1], change[0])
		}
	}
}

// Whatever is changed in a plan.json by hand is noticed, and said.
func TestReadPlanRefuses(t *testing.T) {
	c, text := mixed(t)
	c.seal(text)
	good, err := os.ReadFile(filepath.Join(c.dir, "plan.json"))
	if err != nil {
		t.Fatal(err)
	}
	for name, v := range map[string]struct{ old, new, message string }{
		"seed":          {`"seed": 6198`, `"seed": 6199`, "changed after it was built"},
		"format":        {`"format": 1`, `"format": 7`, "format version 7"},
		"order":         {`"order": 1`, `"order": 2`, "order version 2"},
		"no format":     {`"format": 1,`, ``, "no format version"},
		"no order":      {`"order": 1,`, ``, "no order version"},
		"unknown field": {`"seed": 6198`, `"sed": 6198`, `bad.json: unknown field "sed"`},
		"type": {`"seed": 6198`, `"seed": "6198"`,
			"plan.seed: want a whole number of 0 or more, found string"},
		"below zero": {`"seed": 6198`, `"seed": -1`,
			"plan.seed: want a whole number of 0 or more, found number -1"},
		"version type": {`"format": 1`, `"format": true`, "format: want a whole number, found bool"},
		"name type":    {`"name": "wiki"`, `"name": {}`, "plan.sources.name: want a string, found object"},
		"list type":    {`"wiki/a"`, `["wiki/a"]`, "written.sources.paths: want a string, found array"},
		"an array":     {string(good), "[]", "byte 1: want an object, found array"},
		"a blend.yaml": {string(good), "sequence_length: 16\nsources:\n",
			"this is not a plan.json, because it is not JSON; to build a plan, run `mula blend`"},
		"other JSON":     {string(good), "{}\n", "to build a plan, run `mula blend`"},
		"no text":        {string(good), "", "byte 0: unexpected end of file"},
		"length":         {`"sequence_length": 16`, `"sequence_length": 0`, "sequence length 0"},
		"huge tokens":    {`"tokens": 3,`, `"tokens": 9223372036854775807,`, "tokens"},
		"negative":       {`"tokens": 3,`, `"tokens": -3,`, "-3 tokens"},
		"dtype":          {`"dtype": "uint16"`, `"dtype": "float64"`, "float64"},
		"skip":           {`"from": 37`, `"from": 41`, "skip 1"},
		"source":         {`"name": "wiki"`, `"name": "web"`, `two sources are called "web"`},
		"samples":        {`"samples": 200`, `"samples": -200`, "stage 1"},
		"too many":       {`"samples": 200`, `"samples": 4611686018427387904`, "stage 1"},
		"validation":     {`"validation_windows": `, `"validation_windows": 99`, "validation windows"},
		"trailing":       {"\n}\n", "\n}\n{}", "unexpected data after the JSON value"},
		"path too many":  {`"wiki/a"`, `"wiki/a", "wiki/b"`, "paths"},
		"no fingerprint": {`"fingerprint": "`, `"fingerprint": "0`, "fingerprint"},
	} {
		bad := bytes.Replace(good, []byte(v.old), []byte(v.new), 1)
		if bytes.Equal(bad, good) {
			t.Errorf("%s: the plan does not have %s", name, v.old)
			continue
		}
		path := filepath.Join(c.dir, "bad.json")
		if err := os.WriteFile(path, bad, 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadPlan(path); err == nil || !strings.Contains(err.Error(), v.message) ||
			!strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v; want the path and %q", name, err, v.message)
		}
	}
	for cut := 0; cut < len(good)-1; cut += 97 {
		if _, err := parsePlan(good[:cut]); err == nil {
			t.Fatalf("the first %d bytes of a plan were taken for a plan", cut)
		}
	}
	// A plan whose check values do not fit, although its fingerprint does: made by another
	// implementation.
	p, err := parsePlan(good)
	if err != nil {
		t.Fatal(err)
	}
	p.Checks[3].Window++
	if err := p.seal(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(c.dir, "other.json")
	if err := p.Write(path); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadPlan(path); err == nil ||
		!strings.Contains(err.Error(), "another implementation of the order") {
		t.Errorf("a plan with other check values: %v", err)
	}
}

// Opening a plan fails and names the shard that has changed since the plan was built.
func TestOpenNoticesChanges(t *testing.T) {
	for name, v := range map[string]struct {
		change  func(c corpus)
		message string
	}{
		"content": {func(c corpus) {
			c.shard("wiki/a", shards.UInt16, append(shardtest.Lengths(24, 40), 40)...)
		}, "has"},
		"same size": {func(c corpus) { c.reverse("wiki/a") }, "SHA-256"},
		"dtype":     {func(c corpus) { c.shard("wiki/a", shards.Int32, shardtest.Lengths(25, 40)...) }, "int32"},
		"no manifest": {func(c corpus) {
			c.reverse("wiki/a")
			os.Remove(filepath.Join(c.dir, "wiki/a.json"))
		}, "sample at position"},
		"documents": {func(c corpus) {
			l := shardtest.Lengths(25, 40)
			l[0], l[1] = l[0]+l[1], 0
			c.shard("wiki/a", shards.UInt16, append(l, 0)...)
		}, "documents"},
	} {
		c, text := mixed(t)
		p := c.seal(text)
		v.change(c)
		d, err := Open(context.Background(), p, OpenOptions{})
		if err == nil {
			d.Close()
			t.Errorf("%s: not noticed", name)
			continue
		}
		for _, want := range []string{filepath.Join("wiki", "a"), `"wiki"`, v.message, "build a new plan"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v; want %q in it", name, err, want)
			}
		}
	}
}

// Of several shards that cannot be opened the error names the first in the order of the plan,
// although a later one is found out sooner.
func TestOpenNamesTheFirst(t *testing.T) {
	c := newCorpus(t)
	c.shard("a/0", shards.UInt16, 100)
	c.shard("a/1", shards.UInt16, slices.Repeat([]int{1}, 400_000)...)
	for i := 2; i < 10; i++ {
		c.shard(fmt.Sprintf("a/%d", i), shards.UInt16, 100)
	}
	const text = "sequence_length: 16\nsources:\n  - name: a\n    shards: [a/*]\n"
	p := c.seal(text)
	if err := os.Truncate(filepath.Join(c.dir, "a/1.bin"), 2); err != nil {
		t.Fatal(err)
	}
	for i := 2; i < 10; i++ {
		if err := os.Truncate(filepath.Join(c.dir, fmt.Sprintf("a/%d.idx", i)), 20); err != nil {
			t.Fatal(err)
		}
	}
	for range 10 {
		_, err := Open(context.Background(), p, OpenOptions{})
		_, sealErr := Seal(context.Background(), c.config(text), SealOptions{})
		for _, err := range []error{err, sealErr} {
			if !errors.Is(err, shards.ErrCorrupt) || !strings.Contains(err.Error(), filepath.Join("a", "1.bin")) {
				t.Fatalf("the error is not about the first shard that is damaged: %v", err)
			}
		}
	}
}

// The way from a plan to shards beside its directory is found by whichever path the plan is named,
// links and all, and from a working directory that the shell has come to by a link.
func TestPlanAmongLinks(t *testing.T) {
	c := newCorpus(t)
	c.shard("deep/data/a", shards.UInt16, 200)
	c.shard("deep/project/own/a", shards.UInt16, 300)
	dir, err := filepath.EvalSymlinks(c.dir)
	if err != nil {
		t.Fatal(err)
	}
	at := func(name string) string { return filepath.Join(dir, filepath.FromSlash(name)) }
	for link, target := range map[string]string{"link": "deep/project", "deep/project/linked": "elsewhere",
		"deep/beside": "elsewhere"} {
		if err := errors.Join(os.MkdirAll(at("elsewhere"), 0o755), os.Symlink(at(target), at(link))); err != nil {
			t.Fatal(err)
		}
	}
	c.shard("elsewhere/b", shards.UInt16, 400)
	c.shard("elsewhere/c", shards.UInt16, 500)
	c.shard("elsewhere/d", shards.UInt16, 600)
	text := "sequence_length: 16\nsources:\n  - name: a\n    shards: [../data/a, own/a, linked/b, ../beside/c, " +
		at("elsewhere/d") + "]\n"
	if err := os.WriteFile(at("deep/project/blend.yaml"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	ways := []struct{ from, project string }{
		{at("link"), "."}, {at("deep/project"), "."}, {at("deep"), "project"}, {dir, "link"}, {dir, at("link")}, {dir,
			at("deep/project")},
	}
	for _, written := range ways {
		t.Chdir(written.from) // which sets $PWD, as a shell does
		cfg, err := LoadConfig(filepath.Join(written.project, "blend.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		p, err := Seal(context.Background(), cfg, SealOptions{})
		if err != nil {
			t.Errorf("%v: %v", written, err)
			continue
		}
		plan := filepath.Join(written.project, "plan.json")
		if err := p.Write(plan); err != nil {
			t.Fatal(err)
		}
		for _, read := range ways {
			t.Chdir(read.from)
			p, err := ReadPlan(filepath.Join(read.project, "plan.json"))
			if err != nil {
				t.Fatal(err)
			}
			var paths []string
			for _, s := range p.Sources[0].Shards {
				paths = append(paths, s.Path)
			}
			// Links that lead to the shards are kept.
			if want := []string{"../data/a", "own/a", "linked/b", "../beside/c",
				"../../elsewhere/d"}; !slices.Equal(paths, want) {
				t.Errorf("%v: paths %q, want %q", written, paths, want)
			}
			d, err := Open(context.Background(), p, OpenOptions{})
			if err != nil {
				t.Errorf("written by %v, read by %v: %v", written, read, err)
				continue
			}
			d.Close()
		}
	}
}

// reverse rewrites a shard with the same documents in the reverse order of tokens.
func (c corpus) reverse(name string) {
	c.t.Helper()
	prefix := filepath.Join(c.dir, name)
	s, err := shards.Open(prefix)
	if err != nil {
		c.t.Fatal(err)
	}
	tokens := make([]uint32, s.Tokens())
	if err := s.Read(tokens, 0); err != nil {
		c.t.Fatal(err)
	}
	var ends []int64
	for d := range s.Documents() {
		ends = append(ends, documentStart(c.t, s, d+1))
	}
	s.Close()
	for i, j := 0, len(tokens)-1; i < j; i, j = i+1, j-1 {
		tokens[i], tokens[j] = tokens[j], tokens[i]
	}
	w, err := shards.Create(prefix, shards.UInt16, shardtest.Tokenizer())
	if err != nil {
		c.t.Fatal(err)
	}
	defer w.Abort()
	from := int64(0)
	for i, end := range ends {
		if err := w.Append(tokens[from:end], shards.DocumentOrigin{ID: "r", File: "r",
			Line: int64(i + 1)}); err != nil {
			c.t.Fatal(err)
		}
		from = end
	}
	if err := w.Close(); err != nil {
		c.t.Fatal(err)
	}
}

// Whichever file operation fails, the old plan or the new one is there.
func TestWriteFaults(t *testing.T) {
	t.Parallel()
	c, text := mixed(t)
	old := c.seal(text)
	new, err := Seal(context.Background(), c.config(strings.Replace(text, "6198", "6199", 1)), SealOptions{})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(c.dir, "plan.json")
	for k := int64(1); ; k++ {
		if err := old.WriteOn(faultfs.New(nil), path); err != nil {
			t.Fatal(err)
		}
		nth := &faultfs.Nth{K: k, Err: syscall.ENOSPC}
		err := new.WriteOn(faultfs.New(nth.Fault), path)
		p, readErr := ReadPlan(path)
		if readErr != nil {
			t.Fatalf("fault %d: %v", k, readErr)
		}
		if f := p.Fingerprint(); f != old.Fingerprint() && f != new.Fingerprint() {
			t.Fatalf("fault %d: a third plan", k)
		}
		if nth.Failed() == "" {
			if err != nil || p.Fingerprint() != new.Fingerprint() || k < 5 {
				t.Fatalf("without a fault: %v", err)
			}
			return
		}
		if !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("fault %d: %v", k, err)
		}
	}
}

// FuzzReadPlan gives the reader plans that were tampered with. What it takes must be whole: located
// from end to end without a panic.
func FuzzReadPlan(f *testing.F) {
	c, text := mixed(f)
	c.seal(text)
	good, err := os.ReadFile(filepath.Join(c.dir, "plan.json"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(`{"format":1,"plan":{"order":1}}`))
	f.Add([]byte(`{"format":1,"plan":{"order":1,"sources":[{}],"stages":[{}]},"written":{"sources":[{}],"stages":[[]]}}`))
	f.Add([]byte(`{"format":1,"plan":{"order":"megatron 1","length":1,"cache":{"files":[{}]},"sources":[{"shards":[{}]}]},"written":{"sources":[{}],"cache":{}}}`))
	sealed, err := os.ReadFile("testdata/packed.json")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(sealed)
	f.Add([]byte(`{"format":1,"plan":{"order":"packed 2","parents":[{}],"sources":[{"packing":{},"growth":[{"packing":{}}]}],` +
		`"stages":[{}]},"written":{"sources":[{"packings":["",""]}],"stages":[[]]}}`))
	f.Add([]byte(`{"format":1,"plan":{"order":"packed 1","sources":[{"packing":{}}],"stages":[{}]},"written":{"sources":[{}],"stages":[[]],"packings":"."}}`))
	for _, name := range []string{"several growths", "later epochs"} {
		f.Add([]byte(amendedVectors(f)[name].File))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := parsePlan(data)
		if err != nil {
			// The fingerprint stops most; try the rest of the checks as well, as a hostile plan
			// would have a fitting one.
			if p, _, err = parseNative(data); err != nil {
				p, _, err = parseMegatron(data)
			}
			if err != nil {
				p, _, err = parseAmended(data)
			}
			if err != nil {
				p, _, err = parsePacked(data)
			}
			if err != nil || p.compile() != nil {
				return
			}
			if p.Traits().Scheduled {
				p.verifyPairs()
			}
			p.verifyPositions()
		}
		if !p.Traits().Scheduled {
			if _, err := p.Locate(0); err == nil {
				t.Fatal("a sample without its cache")
			}
			p.Summary()
			return
		}
		for range 50 {
			position := rand.Int64N(p.Length())
			s, err := p.Locate(position)
			if err != nil {
				t.Fatal(err)
			}
			if back, ok := p.Position(s.Source, s.Epoch, s.Window); !ok || back != position {
				t.Fatalf("position %d: %+v, back at %d", position, s, back)
			}
		}
		p.Summary()
	})
}

func TestCursor(t *testing.T) {
	p := planOf(t, []int64{10}, []Stage{{Samples: 10, Weights: []uint64{1}}})
	if err := p.seal(); err != nil {
		t.Fatal(err)
	}
	for c, want := range map[Cursor]string{
		{p.Fingerprint(), 0}:  "",
		{p.Fingerprint(), 10}: "",
		{p.Fingerprint(), 11}: "position 11",
		{p.Fingerprint(), -1}: "position -1",
		{"0123", 0}:           "use the plan that the run started with",
	} {
		if err := c.Check(p); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", c, err, want)
		}
	}
}

// manySources is a plan of 2,000 sources of a million windows each, in one stage.
func manySources(t testing.TB) *Plan {
	windows, weights := make([]int64, 2000), make([]uint64, 2000)
	for i := range windows {
		windows[i], weights[i] = 1_000_000+int64(i), uint64(i*i+1)
	}
	return planOf(t, windows, []Stage{{Samples: 1e9, Weights: weights}})
}

// sevenOfManyFiles is a plan with the shape of OLMoE-mix-0924: seven sources in 2,000 shards of
// unlike sizes, 4T tokens.
func sevenOfManyFiles(t testing.TB) *Plan {
	p := &Plan{Seed: 6198, SequenceLength: 4096}
	p.order = newWindowOrder(p, index.Locality{})
	shares := []uint64{948, 20, 21, 5, 4, 1, 1}
	x := uint64(1)
	for i, share := range shares {
		s := Source{Name: fmt.Sprint("s", i)}
		n := max(1, 2000*share/1000)
		for range n {
			x = x*6364136223846793005 + 1442695040888963407
			tokens := 4e12 * float64(share) / 1000 / float64(n) * (0.25 + 1.5*float64(x>>11)/(1<<53))
			s.Shards = append(s.Shards, Shard{DType: "uint16", Tokens: int64(tokens), Documents: int64(tokens) / 1250,
				Bin: unhashed, Index: unhashed})
		}
		p.Sources = append(p.Sources, s)
	}
	p.Stages = []Stage{{Samples: 976_000_000, Weights: shares}}
	if err := p.compile(); err != nil {
		t.Fatal(err)
	}
	return p
}

// largePlans lists the shapes of plans that are measured.
var largePlans = []struct {
	name string
	plan func(testing.TB) *Plan
}{{"2000sources", manySources}, {"7sources2000files", sevenOfManyFiles}}

var sink int64

func BenchmarkLocate(b *testing.B) {
	for _, v := range largePlans {
		b.Run(v.name, func(b *testing.B) {
			p := v.plan(b)
			x := uint64(1)
			end := cpuTime(b, "op")
			for range b.N {
				x = x*6364136223846793005 + 1442695040888963407
				position, _ := bits.Mul64(x, uint64(p.Length()))
				s, err := p.Locate(int64(position))
				if err != nil {
					b.Fatal(err)
				}
				sink += s.Token
			}
			end(int64(b.N))
		})
	}
}

func BenchmarkCompile(b *testing.B) {
	p := manySources(b)
	for range b.N {
		if err := p.compile(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkOpen(b *testing.B) {
	c, text := mixed(b)
	c.seal(text)
	path := filepath.Join(c.dir, "plan.json")
	for range b.N {
		p, err := ReadPlan(path)
		if err != nil {
			b.Fatal(err)
		}
		d, err := Open(context.Background(), p, OpenOptions{})
		if err != nil {
			b.Fatal(err)
		}
		d.Close()
	}
}
