package audit

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"mula/shards"
	"mula/shards/datatrove"
	"mula/shards/dolma"
	"mula/shards/formats"
	"mula/shards/layout"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	vocabulary = 50280
	eod        = 50279
)

// write makes a shard of a layout, the documents as they are given.
func write(t testing.TB, l *layout.Layout, prefix string, info shards.TokenizerInfo, documents ...[]uint32) {
	t.Helper()
	w, err := formats.Create(l, prefix, info, formats.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Abort()
	for d, tokens := range documents {
		if err := w.Append(tokens, shards.DocumentOrigin{ID: fmt.Sprintf("doc-%d", d), File: "in.jsonl",
			Line: int64(d) + 1}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
}

var info = shards.TokenizerInfo{SHA256: strings.Repeat("ab", 32), VocabSize: vocabulary, EOD: eod,
	ClassTable: "unicode 16.0.0", Specials: "text"}

// text is a document of n tokens that end with last.
func text(seed uint32, n int, last uint32) []uint32 {
	ids := make([]uint32, n)
	for i := range ids {
		seed = seed*1664525 + 1013904223
		ids[i] = 1000 + seed>>8%40000
	}
	if n > 0 {
		ids[n-1] = last
	}
	return ids
}

// findings returns the findings of Run as "level kind name document: message", paths cut to names.
func findings(r *Report, dir string) (out []string) {
	for _, f := range r.Findings {
		name := filepath.Base(f.Path)
		if f.Path == "" {
			name = filepath.Base(f.Source)
		}
		doc := ""
		if f.Document >= 0 {
			doc = fmt.Sprintf(" document %d", f.Document)
		}
		if f.Byte >= 0 {
			doc += fmt.Sprintf(" byte %d", f.Byte)
		}
		out = append(out, fmt.Sprintf("%s %s %s%s: %s", f.Level, f.Kind, name, doc, strings.ReplaceAll(f.Message,
			dir+"/", "")))
	}
	return out
}

func check(t *testing.T, dir string, o Options, want []string, names ...string) *Report {
	t.Helper()
	var inputs []Input
	for _, name := range names {
		path := filepath.Join(dir, name)
		inputs = append(inputs, Input{Source: sourceOf(path), Path: path})
	}
	r, err := Run(t.Context(), inputs, o)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, findings(r, dir)); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	failed := slices.ContainsFunc(want, func(f string) bool { return strings.HasPrefix(f, "error") })
	if r.Failed() != failed {
		t.Errorf("failed: %v", r.Failed())
	}
	return r
}

func pointer(n int64) *int64 { return &n }

// Every kind of fault gives its findings and no others.
func TestFindings(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	good := func(seed uint32) [][]uint32 {
		return [][]uint32{text(seed, 300, eod), text(seed+1, 40, eod), text(seed+2, 700, eod), text(seed+3, 12, eod)}
	}
	foreign := func(name string) { // the files of Megatron alone
		for _, ending := range []string{".json", ".docs.arrow", ".sums"} {
			if err := os.Remove(at(name) + ending); err != nil {
				t.Fatal(err)
			}
		}
	}
	flip := func(name string, offset int64) {
		t.Helper()
		data, err := os.ReadFile(at(name))
		if err != nil {
			t.Fatal(err)
		}
		data[offset] ^= 1
		if err := os.WriteFile(at(name), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	noManifest := func(name string) string {
		return "note hash " + name +
			": no manifest; its tokenizer and the origins of its documents are unknown"
	}

	write(t, &formats.Megatron, at("good"), info, good(1)...)
	check(t, dir, Options{SequenceLength: 50}, nil, "good")

	write(t, &formats.Megatron, at("foreign"), info, good(11)...)
	foreign("foreign")
	check(t, dir, Options{}, []string{
		noManifest("foreign.bin"),
		"note separator foreign.bin: unknown end-of-document id; id 50279 ends 4 of them and occurs " +
			"inside 0 times: it is probably the separator",
	}, "foreign.bin")
	check(t, dir, Options{EOD: pointer(eod), Vocabulary: vocabulary}, []string{noManifest("foreign.idx")},
		"foreign.idx")
	check(t, dir, Options{EOD: pointer(0)}, []string{
		noManifest("foreign"),
		"error separator foreign: end-of-document id 0 ends none of 4 documents; id 50279 ends 4 of them " +
			"and occurs inside 0 times: that id is the separator of this data, configure it as such",
	}, "foreign")
	check(t, dir, Options{EOD: pointer(0)}, []string{ // of one with a manifest
		"warning separator good: the end-of-document id is 50279 in its manifest (-1: none), but 0 was given",
		"error separator good: end-of-document id 0 ends none of 4 documents; id 50279 ends 4 of them and " +
			"occurs inside 0 times: that id is the separator of this data, configure it as such",
	}, "good")

	docs := good(21)
	docs[1] = text(5, 40, 17)
	docs[2][100], docs[2][101], docs[3][0] = eod, eod, eod
	write(t, &formats.Megatron, at("separators"), info, docs...)
	r := check(t, dir, Options{}, []string{
		"warning separator separators document 1: 1 of 4 documents do not end with id 50279, first " +
			"document 1: packing joins them to the next document",
		"warning separator separators document 2: end-of-document id 50279 occurs 3 times inside 2 documents, " +
			"first in document 2: readers that split at this id cut them there",
	}, "separators")
	if diff := cmp.Diff(Separator{ID: eod, Documents: 4, Endings: 3, FirstWithout: 1, Inside: 3, InsideDocuments: 2,
		FirstInside: 2, LikelyID: -1}, r.Shards[0].Separator); diff != "" {
		t.Error(diff)
	}

	none := info
	none.EOD, none.VocabSize = -1, 0
	write(t, &formats.Megatron, at("mixed"), none, text(1, 30, 5), text(2, 30, 6), text(3, 30, 7))
	check(t, dir, Options{Vocabulary: 100, EOD: pointer(5)}, []string{
		"warning separator mixed: the end-of-document id is -1 in its manifest (-1: none), but 5 was given",
		fmt.Sprintf("error vocabulary mixed document 0 byte 0: token 0 (byte 0) has id %d, but the tokenizer has "+
			"ids below 100: the shard is damaged, or was made with another tokenizer", text(1, 30, 5)[0]),
		"note dtype mixed: its ids have four bytes, but two are enough (the largest is " +
			fmt.Sprint(slices.Max(slices.Concat(text(1, 30, 5), text(2, 30, 6), text(3, 30, 7)))) + ")",
		"warning separator mixed document 1: 2 of 3 documents do not end with id 5, first document 1: " +
			"packing joins them to the next document",
		fmt.Sprintf("error vocabulary mixed: 87 tokens have ids outside the vocabulary of 100 (the largest is "+
			"%d): the shard is damaged, or was made with another tokenizer",
			slices.Max(slices.Concat(text(1, 30, 5), text(2, 30, 6), text(3, 30, 7)))),
	}, "mixed")

	write(t, &formats.Megatron, at("sizes"), info, nil, text(1, 1, eod), text(2, 5000, eod), text(3, 20, eod),
		text(4, 1000, eod))
	r = check(t, dir, Options{Huge: 1000, SequenceLength: 10000}, []string{
		"note documents sizes: 2 of 5 documents are empty",
		"note documents sizes document 2: 2 documents have 1,000 tokens or more; the longest is document 2 with 5,000",
		"note tail sizes: its 6,021 tokens are too few for a window of 10,001: the shard is never read",
		"note tail sizes: 100 % of its tokens, at the ends of shards, are in no window; use fewer and longer " +
			"shards",
	}, "sizes")
	if s := r.Shards[0]; s.Tail != 6021 || s.Windows != 0 || s.EmptyDocuments != 2 || s.LongDocuments != 2 ||
		s.Longest != 5000 || s.LongestNumber != 2 || s.Documents != 5 {
		t.Errorf("%+v", s)
	}

	docs = good(31)
	docs[0] = slices.Concat(text(1, 50, 1), slices.Repeat([]uint32{4, 5, 6}, 40), text(2, 50, eod))
	docs[2] = slices.Concat(slices.Repeat([]uint32{9}, 31), text(2, 50, eod)) // once too few
	write(t, &formats.Megatron, at("repeats"), info, docs...)
	r = check(t, dir, Options{}, []string{
		"note repeats repeats document 0: 1 of 4 documents, with 62 % of the tokens, repeat 13 tokens or fewer 32 " +
			"times or more; the longest repetition is in document 0: period 3 for 120 tokens from token 50. " +
			"OLMoE's filter removes such documents",
	}, "repeats")
	if got := r.Shards[0].Repeats; got != (Repeats{Documents: 1, Tokens: 220, ByPeriod: [13]int64{2: 1},
		Worst: Repeat{0, 50, 120, 3}}) {
		t.Errorf("%+v", got)
	}

	// An int32 file with the header of uint16: as many documents, each of twice the ids.
	write(t, &formats.Megatron, at("wide"), none, text(1, 100, eod), text(2, 60, eod))
	foreign("wide")
	halved := binary.LittleEndian
	idx, err := os.ReadFile(at("wide.idx"))
	if err != nil {
		t.Fatal(err)
	}
	idx[17] = shards.UInt16.Code()
	halved.PutUint32(idx[34:], 200)
	halved.PutUint32(idx[38:], 120)
	if err := os.WriteFile(at("wide.idx"), idx, 0o644); err != nil {
		t.Fatal(err)
	}
	check(t, dir, Options{EOD: pointer(eod)}, []string{
		noManifest("wide"),
		fmt.Sprintf("error dtype wide: every second id is at most 0, and the other ids reach %d: "+
			"ids of four bytes were read as two; give the type with which they were written",
			slices.Max(slices.Concat(text(1, 100, eod), text(2, 60, eod)))),
		"warning separator wide: end-of-document id 50279 ends none of 2 documents, and no other id ends " +
			"most of them: they were written without a separator, or their boundaries are wrong",
	}, "wide")

	// The other way round.
	write(t, &formats.Megatron, at("narrow"), info, text(1, 100, eod), text(2, 60, eod))
	foreign("narrow")
	if idx, err = os.ReadFile(at("narrow.idx")); err != nil {
		t.Fatal(err)
	}
	idx[17] = shards.Int32.Code()
	halved.PutUint32(idx[34:], 50)
	halved.PutUint32(idx[38:], 30)
	if err := os.WriteFile(at("narrow.idx"), idx, 0o644); err != nil {
		t.Fatal(err)
	}
	r, err = Run(t.Context(), []Input{{Path: at("narrow")}}, Options{})
	if err != nil || !slices.ContainsFunc(findings(r, dir), func(f string) bool {
		return strings.HasPrefix(f, "error dtype narrow: 80 of 80 ids are 2097152 or more, which no tokenizer has: "+
			"ids of two bytes were read as four")
	}) {
		t.Errorf("%q, %v", findings(r, dir), err)
	}

	// Damage, by the sums and without them.
	write(t, &formats.Megatron, at("damaged"), info, slices.Repeat(good(41), 20)...)
	flip("damaged.bin", 20001)
	r, err = Run(t.Context(), []Input{{Path: at("damaged")}}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if f := r.Findings[0]; f.Kind != "hash" || f.Level != Error || f.Byte != 16384 || f.Document != 30 ||
		r.Shards[0].Verified ||
		!strings.Contains(f.Message,
			`bytes 16384 to 32767 are damaged, in documents 30 ("doc-30", in.jsonl:31)`) {
		t.Errorf("%+v", f)
	}
	write(t, &formats.Megatron, at("index"), info, good(51)...)
	foreign("index")
	flip("index.idx", 34+4*1) // a length
	check(t, dir, Options{EOD: pointer(eod)}, []string{
		noManifest("index"),
		"error structure index: index.idx: sequence 2 starts at byte 680, but by the lengths before it at byte 682: " +
			"corrupt shard",
		"error structure index: index.idx: document 1 has the tokens 300 to 340, but the lengths of its sequences " +
			"add up to 41: corrupt shard",
	}, "index")
	flip("index.idx", 34+4*1)
	flip("index.idx", 34+4*4+8*2) // a start
	check(t, dir, Options{EOD: pointer(eod)}, []string{
		noManifest("index"),
		"error structure index: index.idx: sequence 2 starts at byte 681, but by the lengths before it at byte 680: " +
			"corrupt shard",
		"error structure index: index.idx: sequence 2 starts at byte 681 of 2104: corrupt shard",
	}, "index")

	// The same twice.
	write(t, &formats.Megatron, at("copy"), info, good(1)...)
	write(t, &dolma.Layout, at("third"), info, good(1)...)
	twice := fmt.Sprintf("note copy good document 0: 67 %% of the documents, with 67 %% of the tokens, are "+
		"copies of others; document 0 of this shard, with %d tokens, occurs 3 times", 300)
	check(t, dir, Options{}, []string{
		"warning copy good.idx: it is listed twice, first as good: its data is read twice",
		"warning copy copy: its tokens equal those in good: the data is duplicated",
		"warning copy third.npy: its tokens equal those in good: the data is duplicated",
		twice,
	}, "good", "good.idx", "copy", "third.npy")

	var looked []string
	for _, l := range formats.All() {
		looked = append(looked, "nothing"+l.Marker)
	}
	check(t, dir, Options{},
		[]string{"error structure nothing: no shard at nothing: looked for " + strings.Join(looked, ", ")}, "nothing")
}

// A shard of any layout gives the same counts, and its files are compared with its manifest.
func TestLayouts(t *testing.T) {
	dir := t.TempDir()
	docs := [][]uint32{text(1, 300, eod), text(2, 40, eod), text(2, 40, eod), text(3, 700, eod),
		slices.Repeat([]uint32{3}, 64)}
	var first *Shard
	for _, name := range formats.Names() {
		l, err := formats.Named(name)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, name)
		write(t, l, path, info, docs...)
		r, err := Run(t.Context(), []Input{{Path: path}}, Options{SequenceLength: 100})
		if err != nil {
			t.Fatal(err)
		}
		s := r.Shards[0]
		if s.Layout != name || !s.Verified || len(s.Manifest) != 64 || s.Tokens != 1144 || s.Documents != 5 ||
			s.Windows != 11 || s.Tail != 43 || r.Copies.Copies != 1 || s.Repeats.Documents != 1 {
			t.Errorf("%s: %+v\n%q", name, s, findings(r, dir))
		}
		for _, f := range r.Findings {
			if f.Level == Error || f.Kind == "dtype" { // the ids of fms have four bytes always
				t.Errorf("%s: %+v", name, f)
			}
		}
		s.Path, s.Layout, s.DType, s.Manifest = "", "", "", ""
		if first == nil {
			first = &s
		} else if diff := cmp.Diff(*first, s, cmp.AllowUnexported(Shard{}, Lengths{}, counter{})); diff != "" {
			t.Errorf("%s (-megatron +this)\n%s", name, diff)
		}
		// One flipped bit anywhere in the largest of its files.
		largest, size := "", int64(0)
		filepath.WalkDir(dir, func(p string, e os.DirEntry, err error) error {
			if info, err := e.Info(); err == nil && !e.IsDir() && strings.HasPrefix(p, path) && info.Size() > size &&
				(strings.HasSuffix(p, l.IDs) || l.Folder && strings.HasSuffix(p, l.PartSuffix)) &&
				!strings.HasSuffix(p, ".docs.arrow") {
				largest, size = p, info.Size()
			}
			return nil
		})
		data, err := os.ReadFile(largest)
		if err != nil {
			t.Fatal(err)
		}
		data[len(data)/2] ^= 1
		if err := os.WriteFile(largest, data, 0o644); err != nil {
			t.Fatal(err)
		}
		if r, err = Run(t.Context(), []Input{{Path: path}}, Options{}); err != nil || !r.Failed() ||
			r.Shards[0].Verified {
			t.Errorf("%s: a flipped bit was not found: %v", name, err)
		}
		if !slices.ContainsFunc(r.Findings, func(f Finding) bool {
			return f.Kind == "hash" && f.Document == 0 && f.Byte == 0 && strings.Contains(f.Message, largest+": ") &&
				strings.Contains(f.Message, "are damaged, in documents 0 (") &&
				strings.Contains(f.Message, ", 4 (")
		}) {
			t.Errorf("%s: the documents were not named: %q", name, findings(r, dir))
		}
	}
}

// The counts do not depend on the position of documents in the parts in which a shard is read.
func TestPartsOfAnySize(t *testing.T) {
	dir := t.TempDir()
	lengths := []int{0, 1, 5, 1 << 16, 1<<16 - 1, 1<<16 + 1, 65530, 140_000}
	for seed := range uint64(25) {
		r := rand.New(rand.NewPCG(seed, 1))
		var docs [][]uint32
		for d := range 1 + r.IntN(5) {
			ids := text(uint32(d), lengths[r.IntN(len(lengths))], eod)
			if len(ids) > 70000 { // a stretch that may lie over the border of two parts
				from, p := r.IntN(len(ids)-6000), 1+r.IntN(13)
				for i := from + p; i < from+5000; i++ {
					ids[i] = ids[i-p]
				}
			}
			docs = append(docs, ids)
		}
		prefix := filepath.Join(dir, "x")
		write(t, &formats.Megatron, prefix, info, docs...)
		report, err := Run(t.Context(), []Input{{Path: prefix}}, Options{})
		if err != nil {
			t.Fatal(err)
		}
		var want Shard
		whole := newScan(&want, 0, vocabulary, eod, HugeDocument, 2, newSample(maxSampled),
			func(f Finding) { t.Errorf("%+v", f) })
		for _, d := range docs {
			whole.part(d, 0)
			whole.end()
		}
		got := report.Shards[0]
		want.Repeats.Worst, want.MaxID = whole.worst, max(whole.evens.most, whole.odds.most)
		if got.Repeats != want.Repeats || got.content != want.content || got.MaxID != want.MaxID ||
			got.Separator.Inside != want.Separator.Inside ||
			got.Separator.Endings != want.Separator.Endings || got.Lengths.Tokens != want.Lengths.Tokens ||
			got.Lengths.Documents != int64(len(docs)) || got.EmptyDocuments != want.EmptyDocuments {
			t.Fatalf("seed %d: %+v, want %+v", seed, got, want)
		}
	}
}

func TestInputs(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a/wiki-0000.idx", "a/wiki-0000.bin", "a/wiki-0000.docs.arrow", "a/wiki-0001.idx",
		"a/deep/part-00-00001.npy", "a/deep/x.ds", "a/deep/x.ds.index",
		"a/mds/index.json", "a/mds/shard.00000.mds", "a/.hidden/y.idx", "a/0001.arrow", "a/notes.json",
		"empty/index.json"} {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte("x"),
			0o644)); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
	inputs, err := Inputs([]string{"a", "a/wiki-0001", "b/none"})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, in := range inputs {
		got = append(got, in.Path+" of "+in.Source)
	}
	want := []string{"a/0001.arrow of a/0001", "a/deep/part-00-00001.npy of a/deep/part", "a/deep/x.ds of a/deep/x",
		"a/mds of a/mds", "a/wiki-0000 of a/wiki", "a/wiki-0001 of a/wiki",
		"a/wiki-0001 of a/wiki", "b/none of b/none"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if _, err := Inputs([]string{"empty"}); err == nil || !strings.Contains(err.Error(), "no shard is in this folder") {
		t.Error(err)
	}
}

func TestRunRefusesAndEnds(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "x")
	write(t, &formats.Megatron, path, info, text(1, 300_000, eod))
	for _, o := range []Options{{Workers: -1}, {Workers: 4097}, {Vocabulary: -1}, {EOD: pointer(-2)},
		{SequenceLength: -1}, {Huge: -1}} {
		if _, err := Run(t.Context(), []Input{{Path: path}}, o); err == nil {
			t.Errorf("%+v was accepted", o)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	if _, err := Run(ctx, []Input{{Path: path}}, Options{Progress: func(p Progress) {
		if p.Total != 600_000 || p.Bytes <= 0 {
			t.Errorf("%+v", p)
		}
		cancel()
	}}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	last := int64(0)
	if _, err := Run(t.Context(), []Input{{Path: path}},
		Options{Progress: func(p Progress) { last = p.Bytes }}); err != nil || last != 600_000 {
		t.Errorf("%d bytes, %v", last, err)
	}
}

func BenchmarkScan(b *testing.B) {
	path := filepath.Join(b.TempDir(), "x")
	var docs [][]uint32
	for d := range 10_000 {
		docs = append(docs, text(uint32(d), 1000, eod))
	}
	write(b, &formats.Megatron, path, info, docs...)
	b.SetBytes(10_000_000) // tokens: MB/s are million tokens a second
	for b.Loop() {
		if r, err := Run(b.Context(), []Input{{Path: path}}, Options{}); err != nil || r.Failed() {
			b.Fatal(err)
		}
	}
}

func BenchmarkRepeats(b *testing.B) {
	ids := text(1, 1<<20, eod)
	r := repeats{found: func(Repeat) {}}
	b.SetBytes(1 << 20)
	for b.Loop() {
		r.part(ids, 0)
		r.finish()
	}
}

// Damage that both the comparison with the manifest and the reader find is told once.
func TestDamagedOriginsAreToldOnce(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "x")
	write(t, &datatrove.Layout, path, info, text(1, 300, eod), text(2, 40, eod))
	data, err := os.ReadFile(path + ".docs.arrow")
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)/2] ^= 1
	if err := os.WriteFile(path+".docs.arrow", data, 0o644); err != nil {
		t.Fatal(err)
	}
	r, err := Run(t.Context(), []Input{{Path: path}}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	var told []string
	for _, f := range r.Findings {
		if f.Level == Error {
			told = append(told, f.Message)
		}
	}
	if len(told) != 1 || !strings.Contains(told[0], "x.docs.arrow: expected") {
		t.Errorf("%q", told)
	}
}
