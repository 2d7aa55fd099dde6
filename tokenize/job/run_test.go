package job

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"mula/internal/filesystem/faultfs"
	"mula/internal/testwait"
	"mula/shards"
	"mula/shards/datatrove"
	"mula/shards/dolma"
	"mula/shards/fms"
	"mula/shards/mds"
	"mula/tokenize"
	"mula/tokenize/documents"
)

// bytesTokenizer has a token for each byte except leftOut, with the byte as its id, and
// <|endoftext|> as 256. Tests therefore know the ids without it.
func bytesTokenizer(t testing.TB, leftOut string) *tokenize.Tokenizer {
	t.Helper()
	return bytesTokenizerAround(t, leftOut, nil, nil)
}

// bytesTokenizerAround is bytesTokenizer with a normalizer and a post-processor.
func bytesTokenizerAround(t testing.TB, leftOut string, normalizer, postProcessor any) *tokenize.Tokenizer {
	t.Helper()
	vocab := map[string]int{"<|endoftext|>": 256}
	next := rune(256)
	for b := range 256 {
		r := rune(b) // as GPT-2 spells bytes: printable Latin-1 as itself, the others from U+0100 on
		if !(b >= '!' && b <= '~' || b >= 0xa1 && b <= 0xac || b >= 0xae) {
			r = next
			next++
		}
		if !strings.Contains(leftOut, string(byte(b))) {
			vocab[string(r)] = b
		}
	}
	data, err := json.Marshal(map[string]any{
		"version":      "1.0",
		"added_tokens": []any{map[string]any{"id": 256, "content": "<|endoftext|>", "special": true}},
		"normalizer":   normalizer,
		"pre_tokenizer": map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
			"use_regex": true},
		"decoder": map[string]any{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
			"use_regex": true},
		"post_processor": postProcessor,
		"model":          map[string]any{"type": "BPE", "vocab": vocab, "merges": []string{}},
	})
	if err != nil {
		t.Fatal(err)
	}
	tok, err := tokenize.Parse(data, "bytes")
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// What the post-processor adds is there if asked for, and the end of a document once.
func TestAddSpecialTokens(t *testing.T) {
	piece := func(kind, id string) any { return map[string]any{kind: map[string]any{"id": id, "type_id": 0}} }
	end := piece("SpecialToken", "<|endoftext|>")
	template := map[string]any{
		"type": "TemplateProcessing", "single": []any{end, piece("Sequence", "A"), end}, "pair": []any{piece("Sequence",
			"A"), piece("Sequence", "B")},
		"special_tokens": map[string]any{"<|endoftext|>": map[string]any{"id": "<|endoftext|>", "ids": []int{256},
			"tokens": []string{"<|endoftext|>"}}},
	}
	input := put(t, "a.jsonl", `{"text":"A"}`+"\n"+`{"text":"<|endoftext|>"}`+"\n")
	for _, c := range []struct {
		add, eod bool
		first    []uint32
	}{
		{false, false, []uint32{'A'}},
		{false, true, []uint32{'A', 256}},
		{true, false, []uint32{256, 'A', 256}},
		{true, true, []uint32{256, 'A', 256}},
	} {
		output := filepath.Join(t.TempDir(), "x")
		_, err := Run(t.Context(), Options{Tokenizer: bytesTokenizerAround(t, "", nil, template),
			Specials: tokenize.SpecialsAsTokens, AddSpecialTokens: c.add,
			AppendEOD: c.eod, EOD: 256, Inputs: []string{input}, Output: output})
		if err != nil {
			t.Fatal(err)
		}
		s, err := shards.Open(output)
		if err != nil {
			t.Fatal(err)
		}
		all := make([]uint32, s.Tokens())
		if err := s.Read(all, 0); err != nil || len(all) < len(c.first) || !slices.Equal(all[:len(c.first)], c.first) {
			t.Errorf("add %v, eod %v: %v, %v; want %v first", c.add, c.eod, all, err, c.first)
		}
		// The second document is the token itself: one more ends it, unless the post-processor's
		// does.
		want := 1
		if c.add {
			want = 3
		} else if c.eod {
			want = 2
		}
		if got := len(all) - len(c.first); got != want {
			t.Errorf("add %v, eod %v: the second document has %d ids, want %d", c.add, c.eod, got, want)
		}
		if got := s.Manifest().Tokenizer.AddSpecialTokens; got != c.add {
			t.Errorf("the manifest says %v", got)
		}
		s.Close()
	}
}

// corpus writes files of documents in all three forms and gives their names and the documents in
// order.
func corpus(t testing.TB, files, perFile int) (inputs []string, docs []documents.Document) {
	t.Helper()
	dir := t.TempDir()
	for f := range files {
		var content strings.Builder
		name := fmt.Sprintf("part-%04d.jsonl", f)
		for d := range perFile {
			n := (f*perFile + d) * 7919 % 1000
			if d == perFile/2 {
				n = 200_000 // more than a batch
			}
			text := strings.Repeat(fmt.Sprintf("«%d» it is\n", n), 1+n/10)
			line, err := json.Marshal(map[string]any{"id": fmt.Sprintf("%d-%d", f, d), "text": text,
				"metadata": map[string]int{"n": n}})
			if err != nil {
				t.Fatal(err)
			}
			docs = append(docs, documents.Document{ID: fmt.Sprintf("%d-%d", f, d), Text: []byte(text),
				Line: int64(d) + 1})
			content.Write(line)
			content.WriteByte('\n')
		}
		data := content.String()
		switch f % 3 {
		case 1:
			name, data = name+".gz", gzipped(data)
		case 2:
			name, data = name+".zst", zstded(data)
		}
		inputs = append(inputs, filepath.Join(dir, name))
		if err := os.WriteFile(inputs[f], []byte(data), 0o644); err != nil {
			t.Fatal(err)
		}
		for i := range perFile {
			docs[f*perFile+i].File = inputs[f]
		}
	}
	return inputs, docs
}

// Every document is in the shard, in order, followed by the end-of-document id, with its origin;
// the counts are right.
func TestRun(t *testing.T) {
	defer goleak.VerifyNone(t)
	inputs, docs := corpus(t, 4, 300)
	output := filepath.Join(t.TempDir(), "x")
	tok := bytesTokenizer(t, "")
	var last Progress
	sizes, textBytes := int64(0), int64(0)
	for _, input := range inputs {
		info, err := os.Stat(input)
		if err != nil {
			t.Fatal(err)
		}
		sizes += info.Size()
	}
	summary, err := Run(t.Context(), Options{
		Tokenizer: tok, AppendEOD: true, EOD: 256, Inputs: inputs, Output: output, Workers: 3,
		Progress: func(p Progress) {
			if p.Documents < last.Documents || p.InputRead < last.InputRead || p.InputRead > sizes ||
				p.InputSize != sizes {
				t.Errorf("progress %+v after %+v", p, last)
			}
			last = p
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	s, err := shards.Open(output)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.Verify(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if s.Documents() != int64(len(docs)) {
		t.Fatalf("%d documents, want %d", s.Documents(), len(docs))
	}
	origins, err := s.DocumentIDs(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for d, doc := range docs {
		textBytes += int64(len(doc.Text))
		span, err := s.Span(int64(d))
		if err != nil {
			t.Fatal(err)
		}
		ids := make([]uint32, span.End-span.First)
		if err := s.Read(ids, span.First); err != nil {
			t.Fatal(err)
		}
		if len(ids) != len(doc.Text)+1 || ids[len(doc.Text)] != 256 {
			t.Fatalf("document %d has %d ids for %d bytes", d, len(ids), len(doc.Text))
		}
		for i, b := range doc.Text {
			if ids[i] != uint32(b) {
				t.Fatalf("id %d of document %d is %d, want %d", i, d, ids[i], b)
			}
		}
		if o, err := origins.Origin(int64(d)); err != nil ||
			o != (shards.DocumentOrigin{ID: doc.ID, File: doc.File, Line: doc.Line}) {
			t.Fatalf("document %d comes from %v, %v", d, o, err)
		}
	}
	want := Summary{
		Output: output, Documents: int64(len(docs)), Tokens: textBytes + int64(len(docs)), TextBytes: textBytes,
		Seconds: summary.Seconds,
		Skipped: map[documents.Kind]int64{},
	}
	want.Shards = []ShardFile{{output, want.Documents, want.Tokens, textBytes, "uint16", s.Manifest().Files}}
	if fmt.Sprint(summary) != fmt.Sprint(want) || summary.Seconds <= 0 || len(summary.Shards[0].Files) < 3 {
		t.Errorf("summary %+v, want %+v", summary, want)
	}
	if last != (Progress{Documents: want.Documents, Tokens: want.Tokens, TextBytes: textBytes, InputRead: sizes,
		InputSize: sizes, Shards: 1}) {
		t.Errorf("the last progress is %+v", last)
	}
	info := s.Manifest().Tokenizer
	if info != (shards.TokenizerInfo{SHA256: tok.SHA256(), VocabSize: 257, EOD: 256, ClassTable: tokenize.ClassTable(),
		Specials: "text"}) {
		t.Errorf("the manifest's tokenizer is %+v", info)
	}
}

// badCorpus has bad lines of several kinds, the first of them on line 701 of the second file.
func badCorpus(t testing.TB) []string {
	good := strings.Repeat(`{"id":"g","text":"`+strings.Repeat("good ", 120)+`"}`+"\n", 700)
	return []string{
		put(t, "a.jsonl", good),
		put(t, "b.jsonl.zst",
			zstded(good+`{"id":"q","text":"has a Q"}`+"\n"+`{"id":"e","text":""}`+"\n"+"nonsense\n"+good+`{"text":7}`)),
		put(t, "c.jsonl", `{"id":9}`+"\n"+"\xff\n"+`{"text":"last"}`+"\n"+`{"text":""}`),
	}
}

// The first bad document in the order of the inputs ends the run, although later ones are found
// sooner, and nothing is left.
func TestRunFailsAtTheFirst(t *testing.T) {
	defer goleak.VerifyNone(t)
	inputs := badCorpus(t)
	for _, test := range []struct {
		leftOut string // this byte cannot be encoded
		want    documents.DocumentError
	}{
		{"", documents.DocumentError{Line: 702, Kind: documents.Empty, ID: "e"}},
		{"Q", documents.DocumentError{Line: 701, Kind: documents.Unencodable, ID: "q"}},
	} {
		tok := bytesTokenizer(t, test.leftOut)
		for workers := 1; workers <= 5; workers++ {
			dir := t.TempDir()
			_, err := Run(t.Context(), Options{Tokenizer: tok, AppendEOD: true, EOD: 256, Inputs: inputs,
				Output: filepath.Join(dir, "x"), Workers: workers})
			var bad *documents.DocumentError
			if !errors.As(err, &bad) || bad.File != inputs[1] || bad.Line != test.want.Line ||
				bad.Kind != test.want.Kind || bad.ID != test.want.ID {
				t.Errorf("%d workers: %v", workers, err)
			}
			leavesNothing(t, dir)
		}
	}
}

func TestRunSkips(t *testing.T) {
	defer goleak.VerifyNone(t)
	inputs := badCorpus(t)
	dir := t.TempDir()
	opts := Options{
		Tokenizer: bytesTokenizer(t, "Q"), AppendEOD: true, EOD: 256, Inputs: inputs, Output: filepath.Join(dir, "x"),
		OnError: Skip, Rejects: filepath.Join(dir, "rejects.jsonl"), Workers: 3,
	}
	summary, err := Run(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	want := map[documents.Kind]int64{documents.Unencodable: 1, documents.Empty: 2, documents.BadJSON: 1,
		documents.BadText: 1, documents.NoText: 1, documents.BadUTF8: 1}
	if fmt.Sprint(summary.Skipped) != fmt.Sprint(want) || summary.Documents != 2101 {
		t.Errorf("%d documents, skipped %v, want %v", summary.Documents, summary.Skipped, want)
	}
	type reject struct {
		File, ID, Kind, Error string
		Line, Byte            int64
	}
	var got []reject
	data, err := os.ReadFile(opts.Rejects)
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(data) {
		var r reject
		if err := json.Unmarshal(line, &r); err != nil {
			t.Fatal(err)
		}
		if r.Error == "" {
			t.Errorf("no error in %s", line)
		}
		r.Error = ""
		got = append(got, r)
	}
	bytesOfGood := int64(700 * (len(`{"id":"g","text":""}`) + 600 + 1))
	q, e := int64(len(`{"id":"q","text":"has a Q"}`)+1), int64(len(`{"id":"e","text":""}`)+1)
	if wantRejects := []reject{
		{File: inputs[1], Line: 701, Byte: bytesOfGood, ID: "q", Kind: "not encodable"},
		{File: inputs[1], Line: 702, Byte: bytesOfGood + q + 17, ID: "e", Kind: "empty document"},
		{File: inputs[1], Line: 703, Byte: bytesOfGood + q + e, Kind: "malformed JSON"},
		{File: inputs[1], Line: 1404, Byte: 2*bytesOfGood + q + e + 9 + 8, Kind: "text is not a string"},
		{File: inputs[2], Line: 1, Byte: 0, ID: "9", Kind: "no text"},
		{File: inputs[2], Line: 2, Byte: 9, Kind: "invalid UTF-8"},
		{File: inputs[2], Line: 4, Byte: 11 + 16 + 8, Kind: "empty document"},
	}; !slices.Equal(got, wantRejects) {
		t.Errorf("rejects\n%+v, want\n%+v", got, wantRejects)
	}
	data, err = json.Marshal(summary)
	if err != nil || !strings.Contains(string(data), `"empty document":2`) {
		t.Errorf("summary as JSON: %s, %v", data, err)
	}
	// The last document is whole although bad ones stand around it.
	s, err := shards.Open(opts.Output)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	ids := make([]uint32, 5)
	if err := s.Read(ids, s.Tokens()-5); err != nil || !slices.Equal(ids, []uint32{'l', 'a', 's', 't', 256}) {
		t.Errorf("the last document is %v, %v", ids, err)
	}
	// Without a name there is no rejects file.
	other := t.TempDir()
	opts.Output, opts.Rejects = filepath.Join(other, "x"), ""
	if _, err := Run(t.Context(), opts); err != nil {
		t.Fatal(err)
	}
	if entries, err := os.ReadDir(other); err != nil || len(entries) != 6 {
		t.Errorf("%v, %v", entries, err)
	}
}

// A text without tokens is a bad document where the layout cannot hold it, told before anything is
// written, and a document elsewhere.
func TestEmptyOfTokens(t *testing.T) {
	tok := bytesTokenizerAround(t, "", map[string]any{"type": "Replace", "pattern": map[string]any{"String": "~"},
		"content": ""}, nil)
	input := put(t, "a.jsonl", `{"text":"one"}`+"\n"+`{"text":"~~","id":"none"}`+"\n"+`{"text":"~two"}`+"\n")
	for l, holds := range map[shards.Layout]bool{shards.Megatron: true, dolma.Layout.ID: true, fms.Layout.ID: true,
		datatrove.Layout.ID: false, mds.Layout.ID: false} {
		dir := t.TempDir()
		o := Options{Tokenizer: tok, Inputs: []string{input}, Output: filepath.Join(dir, "x"), Layout: l, OnError: Skip}
		if done, err := Run(t.Context(), o); err != nil || holds != (done.Documents == 3) ||
			!holds != (done.Skipped[documents.Empty] == 1) || done.Tokens != 6 {
			t.Errorf("%s: %+v, %v", l, done, err)
		}
		o.OnError, o.Output = Fail, filepath.Join(dir, "y")
		_, err := Run(t.Context(), o)
		var bad *documents.DocumentError
		if holds && err != nil || !holds && (!errors.As(err, &bad) || bad.Line != 2 || bad.ID != "none" ||
			bad.Kind != documents.Empty) {
			t.Errorf("%s: %v", l, err)
		}
		o.AppendEOD, o.EOD, o.Output = true, 256, filepath.Join(dir, "z")
		if done, err := Run(t.Context(), o); err != nil || done.Documents != 3 || done.Tokens != 9 {
			t.Errorf("%s: with an id at the end %+v, %v", l, done, err)
		}
	}
}

func TestRunRefuses(t *testing.T) {
	tok := bytesTokenizer(t, "")
	good := put(t, "good.json", `{"text":"a"}`)
	prefix := strings.TrimSuffix(good, ".json")
	link := good + ".link"
	if err := os.Link(good, link); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		opts Options
		want string
	}{
		"end of document": {Options{Inputs: []string{good}, AppendEOD: true, EOD: 257},
			"end-of-document id 257 is outside the vocabulary of 257"},
		"no inputs":        {Options{}, "no inputs"},
		"absent":           {Options{Inputs: []string{good, good + "x"}}, "good.jsonx"},
		"rejects and fail": {Options{Inputs: []string{good}, Rejects: "r"}, "rejects file requires"},
		"over the input":   {Options{Inputs: []string{good}, Output: prefix}, "good.json would replace the input"},
		"over its link":    {Options{Inputs: []string{link}, Output: prefix}, "would replace the input"},
		"rejects as input": {Options{Inputs: []string{good}, OnError: Skip, Rejects: good}, "would replace the input"},
		"rejects as shard": {Options{Inputs: []string{good}, Output: "x", OnError: Skip, Rejects: "./x.json"},
			"the rejects file ./x.json has the name of a shard file"},
		"and a later one": {Options{Inputs: []string{good}, Output: "./x", OnError: Skip,
			Rejects: "x-00012.docs.arrow"}, "has the name of a shard file"},
		"no documents": {Options{Inputs: []string{put(t, "a", ""), put(t, "b", "\n\n")}},
			" has no documents, so"},
		"none sampled": {Options{Inputs: []string{good}, Sample: 1e-12},
			"the fraction 1e-12 keeps no document of "},
		"bad documents": {Options{Inputs: []string{put(t, "a.jsonl", "x\n"), put(t, "b.jsonl", `{"text":""}`)},
			OnError: Skip}, "all 2 documents were bad, so there is nothing to write; the first: "},
		"cut short": {Options{Inputs: []string{put(t, "x.zst", zstded(`{"text":"a"}` + "\n")[:12])},
			OnError: Skip}, "x.zst:1 (byte 0): the file is truncated"},
		"twice": {Options{Inputs: []string{good, put(t, "a", "x"), good}}, "good.json is listed twice"},
		"other spelling": {Options{Inputs: []string{good, filepath.Dir(good) + "/./good.json"}},
			"/./good.json are the same file"},
		"and its link": {Options{Inputs: []string{good, link}}, "good.json.link are the same file"},
		"stdin twice":  {Options{Inputs: []string{"-", good, "-"}}, `standard input, "-", is listed twice`},
		"workers": {Options{Inputs: []string{good}, Workers: 4097},
			"invalid number of workers 4097; it must be between 0, for the number of processors, and 4096"},
		"negative workers": {Options{Inputs: []string{good}, Workers: -1}, "number of workers -1"},
		"no directory":     {Options{Inputs: []string{good}, Output: "/nonexistent/x"}, "/nonexistent/x"},
		"name":             {Options{Inputs: []string{"\xff"}}, "not UTF-8"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			test.opts.Tokenizer = tok
			if test.opts.Output == "" {
				test.opts.Output = filepath.Join(dir, "x")
			}
			if test.opts.Rejects == "" && test.opts.OnError == Skip {
				test.opts.Rejects = filepath.Join(dir, "rejects")
			}
			if _, err := Run(t.Context(), test.opts); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v does not say %q", err, test.want)
			}
			leavesNothing(t, dir)
		})
	}
	if data, err := os.ReadFile(good); err != nil || string(data) != `{"text":"a"}` {
		t.Errorf("the input is now %q, %v", data, err)
	}
}

// endless gives documents for ever, each of words × 10 bytes.
type endless struct {
	words  int
	rest   string
	read   int64
	onRead func(read int64)
}

func (e *endless) Read(p []byte) (int, error) {
	if e.rest == "" {
		e.rest = `{"text":"` + strings.Repeat("on and on ", e.words) + `"}` + "\n"
	}
	n := copy(p, e.rest)
	e.rest = e.rest[n:]
	e.read += int64(n)
	if e.onRead != nil {
		e.onRead(e.read)
	}
	return n, nil
}

// Cancelling ends the run soon, wherever it is, and leaves no file.
func TestRunCancelled(t *testing.T) {
	defer goleak.VerifyNone(t)
	tok := bytesTokenizer(t, "")
	for name, after := range map[string]int64{"before": 0, "first read": 1, "working": 4 << 20} {
		dir := t.TempDir()
		ctx, cancel := context.WithCancel(t.Context())
		if after == 0 {
			cancel()
		}
		_, err := Run(ctx, Options{
			Tokenizer: tok, AppendEOD: true, EOD: 256, Inputs: []string{"-"}, Output: filepath.Join(dir,
				"x"), Workers: 2, OnError: Skip, Rejects: filepath.Join(dir, "r"),
			Read: documents.Options{Stdin: &endless{words: 50, onRead: func(read int64) {
				if read >= after {
					cancel()
				}
			}}},
		})
		cancel()
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", name, err)
		}
		leavesNothing(t, dir)
	}
	// A silent standard input.
	dir := t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	in, out := io.Pipe()
	defer out.Close()
	if _, err := Run(ctx, Options{Tokenizer: tok, Inputs: []string{"-"}, Output: filepath.Join(dir, "x"),
		Read: documents.Options{Stdin: in}}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("silent input: %v", err)
	}
	leavesNothing(t, dir)
}

// What is in flight stays within the bound whatever the inputs: with workers that never finish,
// reading stops.
func TestRunMemoryIsBounded(t *testing.T) {
	t.Parallel()
	tok := bytesTokenizer(t, "")
	const document = 1_000_000
	const limit = 3 * document * bytesInFlight
	var read atomic.Int64
	stopped := errors.New("stopped")
	fsys := faultfs.New(func(op faultfs.Op, path string) error {
		if op == faultfs.Write && strings.HasSuffix(path, ".segment") { // of ids, in the first or second document
			// While the others go as far as they can: to the bound, and then some time more in
			// which they might go on.
			testwait.Until(t, "three documents are read", func() bool { return read.Load() >= 3*document })
			time.Sleep(100 * time.Millisecond)
			return stopped
		}
		return nil
	})
	_, err := Run(t.Context(), Options{
		FS:        fsys,
		Tokenizer: tok, Inputs: []string{"-"}, Output: filepath.Join(t.TempDir(), "x"), Workers: 8, Memory: limit,
		Read: documents.Options{Stdin: &endless{words: document / 10, onRead: read.Store}},
	})
	if !errors.Is(err, stopped) {
		t.Fatal(err)
	}
	// One written document, three documents in progress, one document that waits for memory, and
	// the read buffers of the files.
	if most, read := int64(5*document+3*(1<<20)), read.Load(); read > most || read < 3*document {
		t.Errorf("%d bytes were read while nothing was written, at most %d may be", read, most)
	}
}

func leavesNothing(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 0 {
		t.Errorf("left behind %v, %v", entries, err)
	}
}

func put(t testing.TB, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}
