package tokenize

import (
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"mula/internal/alloctest"
)

// golden is testdata/golden.json, which testdata/golden.py writes with Hugging Face tokenizers.
type golden struct {
	Versions  string
	Documents []string
	IDs       map[string][][]uint32
	NFC       [][2]string
	Hashes    map[string]string
}

func readGolden(t testing.TB) *golden {
	t.Helper()
	b, err := os.ReadFile("testdata/golden.json")
	if err != nil {
		t.Fatal(err)
	}
	g := &golden{}
	if err := json.Unmarshal(b, g); err != nil {
		t.Fatal(err)
	}
	return g
}

func load(t testing.TB, path string) *Tokenizer {
	t.Helper()
	tok, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func TestGoldenIDs(t *testing.T) {
	g := readGolden(t)
	for _, name := range []string{"gpt2", "cl100k", "olmo"} {
		tok := load(t, "testdata/"+name+".json")
		for _, specials := range []Specials{SpecialsAsText, SpecialsAsTokens} {
			want := g.IDs[name+"."+specials.String()]
			if len(want) != len(g.Documents) || len(want) == 0 {
				t.Fatalf("%d documents, %d golden ids", len(g.Documents), len(want))
			}
			for i := range want {
				if want[i] == nil { // as with specials as text
					want[i] = g.IDs[name+".text"][i]
				}
			}
			e := tok.NewEncoder(EncodeOptions{Specials: specials})
			for range 2 { // the second time from the cache
				for i, d := range g.Documents {
					ids, err := e.Append(nil, []byte(d))
					if err != nil || !slices.Equal(ids, want[i]) {
						t.Errorf("%s, specials as %s, %q: ids %v (%v), want %v", name, specials, d, ids, err, want[i])
					}
				}
			}
		}
	}
}

// TestCachesChangeNothing compares an encoder that has seen many words, some over and over, with
// plain merging.
func TestCachesChangeNothing(t *testing.T) {
	for _, name := range []string{"gpt2", "cl100k"} {
		tok := load(t, "testdata/"+name+".json")
		e := tok.NewEncoder(EncodeOptions{})
		r := rand.New(rand.NewPCG(7, 8))
		var got []uint32
		for range 4000 {
			text := randomText(r)
			for range r.IntN(30) {
				text = append(text, byte('a'+r.IntN(5)))
			}
			text = append(text, randomText(r)...)
			var want []uint32
			for s := text; len(s) > 0; {
				n := tok.split.first(tok.classes, s)
				want = append(want, mergePlainly(tok, s[:n])...)
				s = s[n:]
			}
			eachInstructionSet(t, func(t *testing.T) {
				var err error
				if got, err = e.Append(got[:0], text); err != nil || !slices.Equal(got, want) {
					t.Fatalf("%s: %q becomes %v (%v), want %v", name, text, got, err, want)
				}
			})
		}
	}
}

func TestSharedTokenizer(t *testing.T) {
	tok := load(t, "testdata/olmo.json")
	r := rand.New(rand.NewPCG(5, 6))
	var text []byte
	for range 500 {
		text = append(text, randomText(r)...)
	}
	want, err := tok.NewEncoder(EncodeOptions{}).Append(nil, text)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if got, err := tok.NewEncoder(EncodeOptions{}).Append(nil, text); err != nil || !slices.Equal(got, want) {
				t.Errorf("another goroutine got other ids (%v)", err)
			}
		})
	}
	wg.Wait()
}

func TestSpecials(t *testing.T) {
	tok := load(t, "testdata/olmo.json")
	eod, ok := tok.ID("<|endoftext|>")
	if !ok || eod != 0 {
		t.Fatalf("id of <|endoftext|> is %d, %v", eod, ok)
	}
	email, _ := tok.ID("|||EMAIL_ADDRESS|||")
	start, _ := tok.ID("<|im_start|>")
	text := []byte("a<|endoftext|>|||EMAIL_ADDRESS|||<|im_start|>")
	for _, c := range []struct {
		opts  EncodeOptions
		found []bool
	}{{EncodeOptions{}, []bool{false, true, false}}, {EncodeOptions{Specials: SpecialsAsTokens},
		[]bool{true, true, true}}} {
		ids, err := tok.NewEncoder(c.opts).Append(nil, text)
		if err != nil {
			t.Fatal(err)
		}
		for i, id := range []uint32{eod, email, start} {
			if slices.Contains(ids, id) != c.found[i] {
				t.Errorf("specials as %s: %v has id %d: %v", c.opts.Specials, ids, id, !c.found[i])
			}
		}
		if back, err := tok.Decode(nil, ids); err != nil || string(back) != string(text) {
			t.Errorf("specials as %s: decoded %q (%v)", c.opts.Specials, back, err)
		}
	}
}

// TestTokenInSpecialToken has the ids that Hugging Face tokenizers 0.23.3 gives with
// encode_special_tokens set: a special token that is text hides the other tokens in it, unless
// those are matched later, in the normalized text.
func TestTokenInSpecialToken(t *testing.T) {
	for normalized, want := range map[string][]uint32{"false": {3, 3, 6}, "true": {1, 6, 0, 6}} {
		tok, err := Parse([]byte(`{"version": "1.0", "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
			"added_tokens": [{"id": 5, "content": "baba", "special": true}, {"id": 6, "content": "ab", "normalized": `+normalized+`}],
			"model": {"vocab": {"a": 0, "b": 1, "c": 2, "ba": 3, "aba": 4}, "merges": ["b a", "a ba"]}}`), "small.json")
		if err != nil {
			t.Fatal(err)
		}
		for specials, want := range map[Specials][]uint32{SpecialsAsText: want, SpecialsAsTokens: {5, 6}} {
			if ids, err := tok.NewEncoder(EncodeOptions{Specials: specials}).Append(nil,
				[]byte("babaab")); err != nil || !slices.Equal(ids, want) {
				t.Errorf("normalized %s, specials as %s: %v, want %v (%v)", normalized, specials, ids, want, err)
			}
		}
	}
}

func TestBadText(t *testing.T) {
	tok := load(t, "testdata/gpt2.json")
	e := tok.NewEncoder(EncodeOptions{})
	before := []uint32{1, 2}
	for text, want := range map[string]string{
		"\xff":                   "invalid UTF-8 at byte 0",
		"abc\xc0b":               "invalid UTF-8 at byte 3",
		"\u00e9\ufffd\xe4\xbd":   "invalid UTF-8 at byte 5",
		"ok \xed\xa0\x80 " + "x": "invalid UTF-8 at byte 3",
	} {
		ids, err := e.Append(before, []byte(text))
		if err == nil || err.Error() != want || len(ids) != 2 {
			t.Errorf("%q: %v, %v; want %s", text, ids, err, want)
		}
	}
	if ids, err := e.Append(before, nil); err != nil || len(ids) != 2 {
		t.Errorf("empty text: %v, %v", ids, err)
	}

	// A vocabulary that was trained without the alphabet of all bytes.
	poor, err := Parse([]byte(`{"version": "1.0", "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
		"model": {"vocab": {"a": 0, "b": 1, "Ã": 2, "ab": 3}, "merges": ["a b"]}}`), "poor")
	if err != nil {
		t.Fatal(err)
	}
	e = poor.NewEncoder(EncodeOptions{})
	if ids, err := e.Append(nil, []byte("abba")); err != nil || !slices.Equal(ids, []uint32{3, 1, 0}) {
		t.Errorf("abba: %v, %v", ids, err)
	}
	for _, text := range []string{"c", "abc", strings.Repeat("ab", 10) + "c", strings.Repeat("ab", 100) + "c",
		"ab\u00e9", " "} {
		for range 2 { // a word that failed must fail again
			ids, err := e.Append(before, []byte(text))
			if err == nil || !strings.Contains(err.Error(), "has no token") || len(ids) != 2 {
				t.Errorf("%q: %v, %v", text, ids, err)
			}
		}
	}
	if ids, err := e.Append(nil, []byte("ab")); err != nil || !slices.Equal(ids, []uint32{3}) {
		t.Errorf("after an error: %v, %v", ids, err)
	}
}

// TestLongRuns has inputs that make quadratic work of careless code. They take milliseconds;
// squared, they would take minutes.
func TestLongRuns(t *testing.T) {
	const n = 1 << 17
	for _, name := range []string{"gpt2", "cl100k", "olmo"} {
		e := load(t, "testdata/"+name+".json").NewEncoder(EncodeOptions{})
		for what, text := range map[string]string{
			"one word":         strings.Repeat("a", n),
			"another":          strings.Repeat("the", n/3),
			"spaces":           strings.Repeat(" ", n),
			"spaces in front":  strings.Repeat(" ", n) + "x",
			"line breaks":      strings.Repeat("\n ", n/2) + "x",
			"a break in front": "\n" + strings.Repeat(" ", n) + "x",
			"marks":            "a" + strings.Repeat("\u0323\u0301\u0345", n/6),
			"marks in order":   "a" + strings.Repeat("\u0323", n/2),
			"starts of tokens": strings.Repeat("<|endoftext", n/11),
		} {
			ids, err := e.Append(nil, []byte(text))
			if err != nil || len(ids) == 0 {
				t.Errorf("%s, %s: %d ids, %v", name, what, len(ids), err)
			}
		}
	}
}

func TestSteadyStateAllocatesNothing(t *testing.T) {
	g := readGolden(t)
	for _, name := range []string{"gpt2", "cl100k", "olmo"} {
		e := load(t, "testdata/"+name+".json").NewEncoder(EncodeOptions{})
		var ids []uint32
		var texts [][]byte
		for _, d := range g.Documents {
			texts = append(texts, []byte(d))
		}
		run := func() {
			for _, d := range texts {
				var err error
				if ids, err = e.Append(ids[:0], d); err != nil {
					t.Fatal(err)
				}
			}
		}
		run()
		if n := alloctest.Least(run); n > 0 {
			t.Errorf("%s: %v allocations for %d documents", name, n, len(texts))
		}
	}
}

// FuzzRoundTrip: without a normalizer the tokens spell the text; with NFC, the text in normal form.
func FuzzRoundTrip(f *testing.F) {
	for _, p := range pieces {
		f.Add([]byte(p))
	}
	f.Add([]byte("don't  \xff\xfe x\n\n y"))
	var encoders []*Encoder
	for _, name := range []string{"gpt2", "cl100k", "olmo"} {
		tok := load(f, "testdata/"+name+".json")
		encoders = append(encoders, tok.NewEncoder(EncodeOptions{}),
			tok.NewEncoder(EncodeOptions{Specials: SpecialsAsTokens}))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, e := range encoders {
			ids, err := e.Append(nil, b)
			if valid := utf8.Valid(b); valid != (err == nil) {
				t.Fatalf("%q: %v", b, err)
			} else if !valid {
				continue
			}
			got, err := e.t.Decode(nil, ids)
			if err != nil {
				t.Fatal(err)
			}
			want := b
			if e.normalizer != nil { // pieces between added tokens are normalized one by one
				got, want = wholeNFC(got), wholeNFC(b)
			}
			if !bytes.Equal(got, want) {
				t.Errorf("%q becomes %q", b, got)
			}
		}
	})
}

func BenchmarkEncode(b *testing.B) {
	text, err := os.ReadFile("testdata/text.txt")
	if err != nil {
		b.Fatal(err)
	}
	for _, name := range []string{"gpt2", "cl100k", "olmo"} {
		b.Run(name, func(b *testing.B) {
			e := load(b, "testdata/"+name+".json").NewEncoder(EncodeOptions{})
			var ids []uint32
			b.SetBytes(int64(len(text)))
			b.ReportAllocs()
			for b.Loop() {
				if ids, err = e.Append(ids[:0], text); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
