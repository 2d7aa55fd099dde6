package tokenize

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"math/rand/v2"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"mula/internal/alloctest"
)

// pipelines is testdata/pipelines.json, which testdata/pipelines.py writes with Hugging Face
// tokenizers.
type pipelines struct {
	Documents []string
	Models    map[string]json.RawMessage
	Cases     []pipelineCase
	Scores    [][2]string // a number and what the library reads
	Charsmap  []byte
	Clusters  [][2]string // before and after the charsmap
	Lossy     [][2]string // bytes in hexadecimal, and their text
}

type pipelineCase struct {
	Name, Model   string
	AddedTokens   json.RawMessage `json:"added_tokens"`
	Normalizer    json.RawMessage
	PreTokenizer  json.RawMessage `json:"pre_tokenizer"`
	PostProcessor json.RawMessage `json:"post_processor"`
	Decoder       json.RawMessage
	Plain, Around [][]uint32 // ids; Around null is as Plain
	Decoded       []*string  // of Around; null is the document
}

func readPipelines(t testing.TB) *pipelines {
	t.Helper()
	b, err := os.ReadFile("testdata/pipelines.json")
	if err != nil {
		t.Fatal(err)
	}
	p := &pipelines{}
	if err := json.Unmarshal(b, p); err != nil {
		t.Fatal(err)
	}
	return p
}

// file is the case as a tokenizer.json.
func (p *pipelines) file(t testing.TB, c pipelineCase) []byte {
	t.Helper()
	b, err := json.Marshal(map[string]any{
		"version": "1.0", "truncation": nil, "padding": nil, "added_tokens": c.AddedTokens, "normalizer": c.Normalizer,
		"pre_tokenizer":  c.PreTokenizer,
		"post_processor": c.PostProcessor, "decoder": c.Decoder, "model": p.Models[c.Model],
	})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestGoldenPipelines(t *testing.T) {
	p := readPipelines(t)
	for _, c := range p.Cases {
		t.Run(c.Name, func(t *testing.T) {
			tok, err := Parse(p.file(t, c), c.Name)
			if err != nil {
				t.Fatal(err)
			}
			plain, around := tok.NewEncoder(EncodeOptions{}), tok.NewEncoder(EncodeOptions{Specials: SpecialsAsTokens,
				AddSpecialTokens: true})
			for range 2 { // the second time from the cache
				for i, d := range p.Documents {
					want := c.Plain[i]
					ids, err := plain.Append(nil, []byte(d))
					if err != nil || !slices.Equal(ids, want) {
						t.Errorf("%q: ids %v (%v), want %v", d, ids, err, want)
					}
					if c.Around[i] != nil {
						want = c.Around[i]
					}
					if ids, err = around.Append([]uint32{7}, []byte(d)); err != nil || !slices.Equal(ids[1:], want) {
						t.Errorf("%q, with special tokens: ids %v (%v), want %v", d, ids[1:], err, want)
					}
				}
			}
			for i, d := range p.Documents {
				ids := c.Around[i]
				if ids == nil {
					ids = c.Plain[i]
				}
				got, err := tok.Decode(nil, ids)
				if tok.decode == nil {
					got = AppendText(nil, got)
				}
				want := d
				if c.Decoded[i] != nil {
					want = *c.Decoded[i]
				}
				if err != nil || string(got) != want {
					t.Errorf("ids of %q decode to %q (%v), want %q", d, got, err, want)
				}
			}
		})
	}
}

// TestScoresAreReadAsTheLibraryDoes: of the golden numbers, some are not read as the nearest float.
func TestScoresAreReadAsTheLibraryDoes(t *testing.T) {
	apart := 0
	for _, c := range readPipelines(t).Scores {
		want, err := strconv.ParseFloat(c[1], 64)
		if err != nil {
			t.Fatal(err)
		}
		got, err := parseScore(c[0])
		if err != nil || got != want {
			t.Errorf("%s is read as %v (%v), want %v", c[0], got, err, want)
		}
		if nearest, _ := strconv.ParseFloat(c[0], 64); nearest != want {
			apart++
		}
	}
	if apart == 0 {
		t.Error("all golden scores are the nearest floats")
	}
	for _, s := range []string{"1e400", "1e99999999999", "123456789e305"} {
		if f, err := parseScore(s); err == nil {
			t.Errorf("%s is read as %v", s, f)
		}
	}
}

func TestCharsmapAndGraphemeClusters(t *testing.T) {
	p := readPipelines(t)
	m, err := parseCharsmap(p.Charsmap)
	if err != nil {
		t.Fatal(err)
	}
	b := &normalizing{}
	for _, c := range p.Clusters {
		b.text, b.origin = []byte(c[0]), 0
		if m.normalize(b); string(b.text) != c[1] {
			t.Errorf("%+q becomes %+q, want %+q", c[0], b.text, c[1])
		}
	}
	// A spoiled map is refused or used, never a panic.
	r := rand.New(rand.NewPCG(3, 4))
	for range 300 {
		spoiled := bytes.Clone(p.Charsmap[:len(p.Charsmap)-r.IntN(40)])
		for range 1 + r.IntN(200) {
			spoiled[r.IntN(len(spoiled))] = byte(r.IntN(256))
		}
		spoiled[2], spoiled[3] = p.Charsmap[2], p.Charsmap[3]
		if m, err := parseCharsmap(spoiled); err == nil {
			for _, c := range p.Clusters {
				b.text, b.origin = []byte(c[0]), 1
				m.normalize(b)
			}
		}
	}
}

func TestInvalidBytesBecomeReplacementCharacters(t *testing.T) {
	for _, c := range readPipelines(t).Lossy {
		b, err := hex.DecodeString(c[0])
		if err != nil {
			t.Fatal(err)
		}
		if got := AppendText(nil, b); string(got) != c[1] {
			t.Errorf("%s becomes %+q, want %+q", c[0], got, c[1])
		}
	}
}

// TestPipelinesInLongWords has words of a size at which time that grows with the square would show.
func TestPipelinesInLongWords(t *testing.T) {
	p := readPipelines(t)
	texts := []string{strings.Repeat("a", 1<<16), strings.Repeat("ab\u00e9 ", 1<<13), strings.Repeat(" ", 1<<16),
		strings.Repeat("\u0301", 1<<15), strings.Repeat("the,<s>\u4f60", 1<<12)}
	for _, c := range p.Cases {
		t.Run(c.Name, func(t *testing.T) {
			tok, err := Parse(p.file(t, c), c.Name)
			if err != nil {
				t.Fatal(err)
			}
			e := tok.NewEncoder(EncodeOptions{Specials: SpecialsAsTokens})
			for _, text := range texts {
				if _, err := e.Append(nil, []byte(text)); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

func TestPipelinesDoNotAllocate(t *testing.T) {
	if raceEnabled {
		t.Skip("under the race detector a sync.Pool forgets at random")
	}
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // a collection empties pools
	p := readPipelines(t)
	for _, c := range p.Cases {
		tok, err := Parse(p.file(t, c), c.Name)
		if err != nil {
			t.Fatal(err)
		}
		e := tok.NewEncoder(EncodeOptions{Specials: SpecialsAsTokens, AddSpecialTokens: true})
		var ids []uint32
		var texts [][]byte
		for _, d := range p.Documents {
			texts = append(texts, []byte(d))
		}
		if n := alloctest.Least(func() {
			for _, text := range texts {
				ids, _ = e.Append(ids[:0], text)
			}
		}); n > 0 {
			t.Errorf("%s: %v allocations", c.Name, n)
		}
	}
}

// FuzzPipelines encodes a text with a golden tokenizer: nothing panics, ids are in the vocabulary,
// and what an encoder has seen before changes nothing. Where the bytes are kept, decoding gives the
// text back.
func FuzzPipelines(f *testing.F) {
	p := readPipelines(f)
	for i, d := range p.Documents {
		f.Add([]byte(d), uint(i))
	}
	var used []*Encoder
	for _, c := range p.Cases {
		tok, err := Parse(p.file(f, c), c.Name)
		if err != nil {
			f.Fatal(err)
		}
		used = append(used, tok.NewEncoder(EncodeOptions{}))
	}
	f.Fuzz(func(t *testing.T, text []byte, which uint) {
		text = bytes.ToValidUTF8(text, nil)
		e := used[which%uint(len(used))]
		ids, err := e.Append(nil, text)
		again, err2 := e.t.NewEncoder(EncodeOptions{}).Append(nil, text)
		name := p.Cases[which%uint(len(used))].Name
		if !slices.Equal(ids, again) || (err == nil) != (err2 == nil) {
			t.Errorf("%s: ids %v (%v) and %v (%v)", name, ids, err, again, err2)
		}
		if slices.ContainsFunc(ids, func(id uint32) bool { return int(id) >= e.t.VocabSize() }) {
			t.Errorf("%s: ids %v of %d", name, ids, e.t.VocabSize())
		}
		back, err := e.t.Decode(nil, ids)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if slices.Contains([]string{"llama3", "deepseek", "falcon", "starcoder"}, name) &&
			string(back) != string(text) {
			t.Errorf("%s: %q comes back as %q", name, text, back)
		}
	})
}

func TestPostProcessorPlaces(t *testing.T) {
	text := postItem{text: true}
	for _, c := range []struct {
		post []postItem
		want []uint32
	}{
		{nil, []uint32{9, 1, 2}},
		{[]postItem{{id: 5}, text}, []uint32{9, 5, 1, 2}},
		{[]postItem{text, {id: 5}}, []uint32{9, 1, 2, 5}},
		{[]postItem{{id: 5}, {id: 6}, text, {id: 7}, text}, []uint32{9, 5, 6, 1, 2, 7, 1, 2}},
		{[]postItem{{id: 5}}, []uint32{9, 5}},
	} {
		tok := &Tokenizer{post: c.post}
		if got := tok.appendPost([]uint32{9, 1, 2}, 1); !slices.Equal(got, c.want) {
			t.Errorf("%v: %v, want %v", c.post, got, c.want)
		}
	}
}

func TestStripToken(t *testing.T) {
	for _, c := range []struct {
		token       string
		start, stop int
		want        string // "" for an error
	}{
		{"eeae", 1, 0, "eae"}, {"eeae", 9, 1, "a"}, {"a", 1, 1, "a"}, {"e", 1, 1, ""}, {"ae", 0, 5, "a"}, {"e", 0, 2,
			""},
	} {
		got, err := stripToken(c.token, 'e', c.start, c.stop)
		if got != c.want || (err != nil) != (c.want == "") {
			t.Errorf("%q stripped of %d and %d is %q (%v), want %q", c.token, c.start, c.stop, got, err, c.want)
		}
	}
}

// TestDecodeSideBySide is for the race detector: goroutines share a tokenizer's decoder.
func TestDecodeSideBySide(t *testing.T) {
	tok, err := Parse([]byte(`{"version": "1.0", "decoder": {"type": "Strip", "content": "a", "start": 1, "stop": 0},
		"model": {"type": "WordLevel", "unk_token": "ab", "vocab": {"ab": 0}}}`), "strip")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if got, err := tok.Decode(nil, []uint32{0, 0}); err != nil || string(got) != "bb" {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
	wg.Wait()
}
