package blend

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"mula/index/megatron"
	"mula/index/packing"
	"mula/shards"
	"mula/shards/shardtest"
	"mula/shards/verifier"
)

// packed is the corpus of mixed, with documents of all kinds, in a blend that packs.
func packed(t testing.TB) (corpus, string) {
	c := newCorpus(t)
	c.shard("web/part-0", shards.UInt16, shardtest.Lengths(40, 12)...)
	c.shard("web/part-1", shards.UInt16, append(shardtest.Lengths(60, 30), 0, 0)...)
	c.shard("web/part-2", shards.UInt16, 3)
	c.shard("wiki/a", shards.UInt16, shardtest.Lengths(45, 50)...)
	c.shard("code/x", shards.Int32, 17, 34, 1, 16, 0, 100, 18, 5)
	return c, "packing: best_fit\n" + mixedBlend(t)
}

// sampleOf is the sample of a source with a number.
func sampleOf(t testing.TB, d *Data, source int, window int64) Sample {
	t.Helper()
	s := Sample{Position: -1, Source: source, Epoch: -1, Window: window}
	if err := d.order.(*openPackedOrder).begin(&s); err != nil {
		t.Fatal(err)
	}
	return s
}

// Every token of every document is in exactly one sample of its source, and there stands what the
// shard has; documents are whole unless they are longer than a sample; what is held out are the
// last documents, and no sample mixes them with others.
func TestPackedSamplesHaveEveryToken(t *testing.T) {
	c, text := packed(t)
	checkEveryToken(t, c.open(text))
}

// checkEveryToken checks every sample of a packed plan with samples of 17 tokens.
func checkEveryToken(t *testing.T, d *Data) {
	t.Helper()
	const capacity = 17
	for i := range d.Sources {
		src := &d.Sources[i]
		seen := make([][]int, len(src.Shards))
		for k, sh := range src.Shards {
			seen[k] = make([]int, sh.Tokens)
		}
		held := int64(0)
		firstHeld, lastTrained := make([]int64, len(src.Packed)), make([]int64, len(src.Packed)) // by part
		for part := range firstHeld {
			firstHeld[part] = math.MaxInt64
		}
		var cut, pieces, padding int64
		for w := range src.Windows() {
			s := sampleOf(t, d, i, w)
			tokens := make([]uint32, capacity)
			if err := d.Tokens(tokens, s); err != nil {
				t.Fatal(err)
			}
			parts, err := d.Parts(t.Context(), s)
			if err != nil {
				t.Fatal(err)
			}
			end := 0
			for n, p := range parts {
				if p.From != end {
					t.Fatalf("source %d, sample %d: part %d begins at %d, not %d", i, w, n, p.From, end)
				}
				end = p.To
				first := p.First // of the piece; whole, but for documents that are longer than a sample
				if p.Tokens > capacity {
					if len(parts) == 1 && p.To == capacity {
						for first+capacity <= p.First+p.Tokens && seen[p.Shard][first] > 0 {
							first += capacity
						}
					} else {
						first += p.Tokens - p.Tokens%capacity
						cut++
					}
				} else if int64(p.To-p.From) != p.Tokens {
					t.Fatalf("source %d, sample %d: %d tokens of document %d, which has %d", i, w, p.To-p.From,
						p.Number, p.Tokens)
				}
				raw := make([]uint32, p.To-p.From)
				if err := shardOf(t, d, i, p.Shard).Read(raw, first); err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(raw, tokens[p.From:p.To]) {
					t.Fatalf("source %d, sample %d: part %d is %v, the shard has %v", i, w, n, tokens[p.From:p.To], raw)
				}
				for at := range int64(len(raw)) {
					seen[p.Shard][first+at]++
				}
				if n == 0 && (s.Shard != p.Shard || s.Token != first) {
					t.Fatalf("source %d, sample %d begins at token %d of shard %d, its first part at %d of %d", i, w,
						s.Token, s.Shard, first, p.Shard)
				}
				global := src.firsts[p.Shard] + first
				part, _ := src.partOf(w)
				if first, end := src.partShards(part); p.Shard < first || p.Shard >= end {
					t.Fatalf("source %d, sample %d of part %d has a document of shard %d", i, w, part, p.Shard)
				}
				if isTraining(src, w) {
					lastTrained[part] = max(lastTrained[part], global)
				} else {
					held += int64(len(raw))
					firstHeld[part] = min(firstHeld[part], global)
				}
				pieces++
			}
			for _, id := range tokens[end:] {
				padding++
				if id != shardtest.EOD {
					t.Fatalf("source %d, sample %d: padding is %d", i, w, id)
				}
			}
		}
		for k := range seen {
			for token, n := range seen[k] {
				if n != 1 {
					t.Fatalf("source %d: token %d of shard %d is in %d samples", i, token, k, n)
				}
			}
		}
		for part := range firstHeld {
			if firstHeld[part] <= lastTrained[part] || held == 0 {
				t.Errorf("source %d, part %d: tokens from %d on are held out, %d is not", i, part, firstHeld[part],
					lastTrained[part])
			}
		}
		if got := d.Summary().Sources[i].Packing; got.Pieces != pieces || got.Padding != padding || got.Cut < cut ||
			cut == 0 && i > 0 {
			t.Errorf("source %d: %+v; there are %d pieces, %d last pieces of cut documents, %d tokens of padding", i,
				got, pieces, cut, padding)
		}
	}
}

// Every epoch of a source draws each of its training samples once; positions lead to each other;
// the block-wise order is the same; and a plan that is not open gives the same, but for the shards.
func TestOrderOfPackedPlan(t *testing.T) {
	c, text := packed(t)
	d := c.open(text)
	closed, err := ReadPlan(filepath.Join(c.dir, "plan.json"))
	if err != nil {
		t.Fatal(err)
	}
	drawn := make([]int64, len(d.Sources))
	seen := map[[3]int64]bool{}
	for block, err := range closed.Positions(t.Context(), 0, closed.Length()) {
		if err != nil {
			t.Fatal(err)
		}
		for i := range block.Sources {
			position := block.First + int64(i)
			s, err := d.Locate(position)
			if err != nil {
				t.Fatal(err)
			}
			if int32(s.Source) != block.Sources[i] || s.Window != block.Windows[i] {
				t.Fatalf("position %d is %+v, in its block sample %d of source %d", position, s, block.Windows[i],
					block.Sources[i])
			}
			if want := sampleOf(t, d, s.Source, s.Window); s.Shard != want.Shard || s.Token != want.Token {
				t.Fatalf("position %d is %+v, its sample %+v", position, s, want)
			}
			training := d.Sources[s.Source].Training()
			key := [3]int64{int64(s.Source), s.Epoch, s.Window}
			if seen[key] || s.Window >= training || s.Epoch != drawn[s.Source]/training {
				t.Fatalf("position %d: sample %d of %d is %+v", position, drawn[s.Source], training, s)
			}
			seen[key] = true
			drawn[s.Source]++
			if back, ok := d.Position(s.Source, s.Epoch, s.Window); !ok || back != position {
				t.Fatalf("position %d: the inverse is %d, %v", position, back, ok)
			}
			s.Shard, s.Token = -1, -1
			if other, err := closed.Locate(position); err != nil || other != s {
				t.Fatalf("position %d without the index is %+v, %v; want %+v", position, other, err, s)
			}
		}
	}
	for i := range d.Sources {
		n := d.Sources[i].Training()
		for s := range d.Validation(i) {
			if want := sampleOf(t, d, i, n); s != want {
				t.Errorf("held out: %+v, want %+v", s, want)
			}
			n++
		}
		if n != d.Sources[i].Windows() || d.Sources[i].Validation == 0 {
			t.Errorf("source %d: held-out samples end at %d of %d", i, n, d.Sources[i].Windows())
		}
	}
}

// Where finds every place of every document: what a walk over all positions and held-out samples
// finds.
func TestWherePacked(t *testing.T) {
	c, text := packed(t)
	checkWhere(t, c, c.open(text))
}

func isTraining(s *Source, window int64) bool {
	_, ok := s.trainingWindow(window)
	return ok
}

// checkWhere compares Where with a walk over all samples of a packed plan.
func checkWhere(t *testing.T, c corpus, d *Data) {
	t.Helper()
	want := map[string][]string{}
	note := func(s Sample, use Use) {
		parts, err := d.Parts(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range parts {
			want[p.ID] = append(want[p.ID], fmt.Sprint(use, s, p.From, p.To))
		}
	}
	drawn := map[[2]int64]bool{}
	for position := range d.Length() {
		s, err := d.Locate(position)
		if err != nil {
			t.Fatal(err)
		}
		drawn[[2]int64{int64(s.Source), s.Window}] = true
		if s.Skipped {
			note(s, SkippedOver)
		} else {
			note(s, Drawn)
		}
	}
	for i := range d.Sources {
		for w := range d.Sources[i].Windows() {
			if s := sampleOf(t, d, i, w); !isTraining(&d.Sources[i], w) {
				note(s, HeldOut)
			} else if !drawn[[2]int64{int64(i), w}] {
				note(s, NotReached)
			}
		}
	}
	empty := 0
	for i := range d.Sources {
		for k := range d.Sources[i].Shards {
			name := strings.TrimPrefix(d.ShardPath(i, k), c.dir+string(filepath.Separator))
			for n := range d.Sources[i].Shards[k].Documents {
				id := fmt.Sprintf("%s/%d", filepath.ToSlash(name), n)
				var got []string
				for o, err := range d.Where(t.Context(), id) {
					if err != nil {
						t.Fatal(err)
					}
					if o.Use == NoWindow {
						empty++
						continue
					}
					got = append(got, fmt.Sprint(o.Use, o.Sample, o.From, o.To))
				}
				slices.Sort(got)
				slices.Sort(want[id])
				if !slices.Equal(got, want[id]) {
					t.Fatalf("%s:\n%s\nwant\n%s", id, strings.Join(got, "\n"), strings.Join(want[id], "\n"))
				}
			}
		}
	}
	if empty == 0 || len(want) < 100 {
		t.Errorf("%d empty documents, %d others", empty, len(want))
	}
}

// Sealed again, or into another folder, a packed plan is the same, its index files are found or
// built with the same bytes, and a survey says the same without writing anything. They can be
// moved.
func TestPackedPlanIsAFunctionOfItsShards(t *testing.T) {
	c, text := packed(t)
	files := func(dir string) map[string]string {
		t.Helper()
		found := map[string]string{}
		list, err := filepath.Glob(filepath.Join(dir, "*.packing"))
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range list {
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			found[filepath.Base(path)] = string(data)
		}
		return found
	}
	survey, err := Survey(t.Context(), c.config(text))
	if err != nil {
		t.Fatal(err)
	}
	if left := files(c.dir); len(left) > 0 {
		t.Errorf("a survey wrote %d files", len(left))
	}
	p := c.seal(text)
	if got := p.Summary(); !reflect.DeepEqual(got, survey) {
		t.Errorf("the plan is %+v, the survey %+v", got, survey)
	}
	first := files(c.dir)
	if len(first) != 3 {
		t.Fatalf("%d index files for 3 sources", len(first))
	}
	if p.OrderVersion() != PackedOrder {
		t.Errorf("order version %s", p.OrderVersion())
	}
	other, err := Seal(t.Context(), c.config(text), SealOptions{Packings: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	second := files(filepath.Dir(other.order.files()[0].path))
	if other.Fingerprint() != p.Fingerprint() || !reflect.DeepEqual(second, first) {
		t.Error("sealed into another folder, the plan or its index files differ")
	}
	// A damaged file is rebuilt.
	for name, data := range first {
		if err := os.WriteFile(filepath.Join(c.dir, name), []byte(data[:len(data)/2]), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if again := c.seal(text); again.Fingerprint() != p.Fingerprint() || !reflect.DeepEqual(files(c.dir), first) {
		t.Error("over damaged index files, the plan or its index files differ")
	}
	// Plan, index files and shards can be moved together, and the shards alone where --shards says
	// so.
	moved := filepath.Join(t.TempDir(), "moved")
	if err := os.Rename(c.dir, moved); err != nil {
		t.Fatal(err)
	}
	read, err := ReadPlan(filepath.Join(moved, "plan.json"))
	if err != nil {
		t.Fatal(err)
	}
	apart := filepath.Join(t.TempDir(), "apart")
	if err := os.Mkdir(apart, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"web", "wiki", "code"} {
		if err := os.Rename(filepath.Join(moved, dir), filepath.Join(apart, dir)); err != nil {
			t.Fatal(err)
		}
	}
	d, err := Open(t.Context(), read, OpenOptions{Base: apart})
	if err != nil {
		t.Fatal(err)
	}
	d.Close()
	if err := os.Rename(apart, c.dir); err != nil { // for the cleanup
		t.Fatal(err)
	}
}

// Damage of an index file is named: when the plan is opened, when a sample of it is read, by a
// check and by the verifier.
func TestDamagedPacking(t *testing.T) {
	c, text := packed(t)
	p := c.seal(text)
	path := p.order.files()[1].path
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	write := func(data []byte) {
		t.Helper()
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	named := func(what string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), `"wiki"`) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	_, err = Open(t.Context(), p, OpenOptions{})
	named("missing", err)
	for _, n := range []int{0, 10, len(whole) - 1} {
		write(whole[:n])
		_, err = Open(t.Context(), p, OpenOptions{})
		named(fmt.Sprint("cut after ", n, " bytes"), err)
	}
	// One of another packing, whole in itself.
	other, err := os.ReadFile(p.order.files()[0].path)
	if err != nil {
		t.Fatal(err)
	}
	write(other)
	_, err = Open(t.Context(), p, OpenOptions{})
	named("of another source", err)

	// A bit in a piece of a sample that is not one of the 16 samples that Open compares.
	checked := map[int64]bool{}
	for _, check := range p.Checks {
		if check.Source == 1 {
			checked[check.Window] = true
		}
	}
	write(whole)
	x, err := packing.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	bad, row := int64(0), int64(0)
	for ; ; bad++ {
		pieces, err := x.Sample(nil, bad)
		if err != nil {
			t.Fatal(err)
		}
		if !checked[bad] {
			break
		}
		row += int64(len(pieces))
	}
	x.Close()
	flipped := slices.Clone(whole)
	flipped[16+12*row] ^= 2
	write(flipped)
	d, err := Open(t.Context(), p, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Tokens(make([]uint32, 17), Sample{Source: 1, Window: bad}); !errors.Is(err, packing.ErrDamaged) {
		t.Errorf("a flipped bit: %v", err)
	} else {
		named("a flipped bit", err)
	}
	r, err := d.Check(t.Context(), CheckOptions{})
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for _, f := range r.Findings {
		found = found || f.Path == path && f.Kind == "hash"
	}
	if !found {
		t.Errorf("the check found %+v", r.Findings)
	}
	d.Close()
	shardtest.Age(t, c.dir)
	if d, err = Open(t.Context(), p, OpenOptions{Verify: &verifier.Options{First: true}}); err == nil {
		err = d.Tokens(make([]uint32, 17), sampleOf(t, d, 0, 0))
		d.Close()
	}
	if err == nil || !strings.Contains(err.Error(), filepath.Base(path)) || !strings.Contains(err.Error(), `"wiki"`) {
		t.Errorf("verified first: %v", err)
	}
}

// What cannot be is refused, by name.
func TestPackingRefusals(t *testing.T) {
	c, text := packed(t)
	c.shard("one", shards.UInt16, 5)
	c.shard("empty", shards.UInt16, 0, 0)
	c.shard("long", shards.UInt16, 500)
	simple := "sequence_length: 16\npacking: best_fit\nsources:\n  - {name: a, shards: [one]}\n"
	for what, test := range map[string][2]string{
		"another packing": {strings.Replace(text, "best_fit", "best-fit", 1), "best_fit"},
		"pad without packing": {strings.Replace(simple, "packing: best_fit", "pad: 3", 1),
			"windows are never padded"},
		"pad beyond the ids": {simple + "pad: 1000\n", "ids below 1000"},
		"negative pad":       {simple + "pad: -1\n", "token id"},
		"nothing to pack":    {strings.Replace(simple, "[one]", "[empty]", 1), "no shard has a token"},
		"all held out":       {simple + "validation: 0.01\n", "all documents are in the validation split"},
		"order megatron": {"order: megatron\npacking: best_fit\nmegatron: {cache: x}\n",
			"packing cannot be set with"},
		"nothing that is wrong": {simple + "samples: 3\n", ""},
	} {
		config, err := ParseConfig([]byte(test[0]), "blend.yaml", c.dir)
		if err == nil {
			_, err = Seal(t.Context(), config, SealOptions{})
		}
		if test[1] == "" && err != nil || test[1] != "" && (err == nil || !strings.Contains(err.Error(), test[1])) {
			t.Errorf("%s: %v", what, err)
		}
	}
	p := c.seal(text)
	if _, err := NewOLMoOrder(p); err == nil || !strings.Contains(err.Error(), "packed") {
		t.Errorf("for OLMo-core: %v", err)
	}
	if _, err := ForMegatron(t.Context(), c.config(text), megatron.Config{}); err == nil ||
		!strings.Contains(err.Error(), "pack") {
		t.Errorf("for Megatron-LM: %v", err)
	}
}

// Of a plan.json whose packing was changed, nothing is believed.
func TestPackedPlanIsCompared(t *testing.T) {
	c, text := packed(t)
	c.seal(text)
	good, err := os.ReadFile(filepath.Join(c.dir, "plan.json"))
	if err != nil {
		t.Fatal(err)
	}
	var tree map[string]any
	rapid.Check(t, func(rt *rapid.T) {
		if err := json.Unmarshal(good, &tree); err != nil {
			rt.Fatal(err)
		}
		plan := tree["plan"].(map[string]any)
		k := plan["sources"].([]any)[rapid.IntRange(0, 2).Draw(rt,
			"source")].(map[string]any)["packing"].(map[string]any)
		member := rapid.SampledFrom([]string{"file", "bytes", "sha256", "samples", "validation_samples", "documents",
			"cut_documents", "pieces", "tokens"}).Draw(rt, "member")
		switch v := k[member].(type) {
		case float64:
			k[member] = rapid.OneOf(rapid.Int64(), rapid.Int64Range(int64(v)-3,
				int64(v)+3)).Filter(func(n int64) bool { return n != int64(v) }).Draw(rt, "value")
		case string:
			k[member] = rapid.SampledFrom([]string{"", "../x", v[1:], v + "x", strings.Repeat("0", len(v))}).Draw(rt,
				"value")
		default:
			rt.Fatalf("%s is %v", member, v)
		}
		data, err := json.Marshal(tree)
		if err != nil {
			rt.Fatal(err)
		}
		if _, err := parsePlan(data); err == nil {
			rt.Fatalf("a plan whose %s is %v was accepted", member, k[member])
		}
	})
	if _, err := parsePlan(good); err != nil {
		t.Fatal(err)
	}
}

// The order of the packed corpus is frozen, and equals the result of the Python implementation for
// the plan.
func TestFrozenPackedPlan(t *testing.T) {
	c, text := packed(t)
	compareFrozen(t, c.seal(text), filepath.Join(c.dir, "plan.json"), "packed")
}

// compareFrozen compares a plan, whose file is at path, with the file testdata/NAME.json, and the
// order of that file with testdata/NAME_order.json.
func compareFrozen(t *testing.T, p *Plan, path, name string) {
	t.Helper()
	golden := filepath.Join("testdata", name+".json")
	if *update {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(golden, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	frozen, err := ReadPlan(golden)
	if err != nil {
		t.Fatal(err)
	}
	if frozen.Fingerprint() != p.Fingerprint() {
		t.Errorf("built again, the plan is %s, not %s", p.Fingerprint(), frozen.Fingerprint())
	}
	compareOrder(t, frozen, filepath.Join("testdata", name+"_order.json"))
}

// A sample of a packed plan is read in about the time of its tokens. One op is a sample of 4,097.
func BenchmarkPackedSample(b *testing.B) {
	c := newCorpus(b)
	c.shard("a", shards.UInt16, shardtest.Lengths(3000, 2500)...)
	for _, packing := range []string{"", "packing: best_fit\n"} {
		name := "windows"
		if packing != "" {
			name = "packed"
		}
		b.Run(name, func(b *testing.B) {
			d := c.open("sequence_length: 4096\n" + packing + "sources:\n  - {name: a, shards: [a]}\n")
			tokens := make([]uint16, 4097)
			for i := int64(0); b.Loop(); i++ {
				s, err := d.Locate(i % d.Length())
				if err != nil {
					b.Fatal(err)
				}
				if _, err := ReadSample(b.Context(), d, s, tokens, nil); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// Progress rises to the tokens of all sources, twice, and a file that is found is not gone through.
func TestPackingProgress(t *testing.T) {
	c := newCorpus(t)
	c.shard("a", shards.UInt16, shardtest.Lengths(70_000, 3)...)
	var seen []PackProgress
	seal := func() {
		t.Helper()
		_, err := Seal(t.Context(),
			c.config("sequence_length: 16\npacking: best_fit\nsources:\n  - {name: a, shards: [a]}\n"), SealOptions{
				Packing: func(p PackProgress) { seen = append(seen, p) },
			})
		if err != nil {
			t.Fatal(err)
		}
	}
	seal()
	if len(seen) != 2 || seen[0].Source != "a" || seen[0].Tokens < 1 || seen[1].Tokens != 2*seen[0].Tokens ||
		seen[1].Tokens > seen[1].Total {
		t.Errorf("told of %+v", seen)
	}
	seal()
	if len(seen) != 2 {
		t.Errorf("told of %+v over a file that was there", seen)
	}
}
