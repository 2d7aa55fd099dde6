package sugarme_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sugarme/tokenizer"

	"mula/clients/go/sugarme"
	"mula/tokenize"
)

// testdata has golden files that Hugging Face tokenizers wrote.
const testdata = "../../../tokenize/testdata"

func readJSON(t *testing.T, name string, to any) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(testdata, name))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, to); err != nil {
		t.Fatal(err)
	}
}

func load(t *testing.T, name string) *tokenize.Tokenizer {
	t.Helper()
	tok, err := tokenize.Load(filepath.Join(testdata, name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func sameIDs(got []int, want []uint32) bool {
	return slices.EqualFunc(got, want, func(a int, b uint32) bool { return a == int(b) })
}

// checkEncoding checks that all lists are as long as the ids, and that the offsets are the ranges
// of the tokens.
func checkEncoding(t *testing.T, e *tokenizer.Encoding, text string) {
	t.Helper()
	n := len(e.Ids)
	if len(e.Tokens) != n || len(e.TypeIds) != n || len(e.SpecialTokenMask) != n || len(e.AttentionMask) != n {
		t.Errorf("%q: %d ids, but %d tokens, %d types, masks of %d and %d", text, n, len(e.Tokens), len(e.TypeIds),
			len(e.SpecialTokenMask), len(e.AttentionMask))
	}
	if e.Offsets == nil {
		return
	}
	if len(e.Offsets) != n {
		t.Fatalf("%q: %d ids, %d offsets", text, n, len(e.Offsets))
	}
	end := 0
	for i, o := range e.Offsets {
		if e.SpecialTokenMask[i] == 1 {
			if o[0] != 0 || o[1] != 0 {
				t.Errorf("%q: added token %d has offsets %v", text, i, o)
			}
			continue
		}
		if o[0] != end || text[o[0]:o[1]] != e.Tokens[i] {
			t.Errorf("%q: token %q has offsets %v after %d", text, e.Tokens[i], o, end)
		}
		end = o[1]
	}
	if end != len(text) {
		t.Errorf("%q: the offsets end at %d", text, end)
	}
}

// The ids equal the golden ids, and sugarme's own pipeline around the model keeps them.
func TestGoldenIDs(t *testing.T) {
	var golden struct {
		Documents []string
		IDs       map[string][][]uint32
	}
	readJSON(t, "golden.json", &golden)
	for _, name := range []string{"gpt2", "cl100k", "olmo"} {
		tok := load(t, name)
		for _, specials := range []tokenize.Specials{tokenize.SpecialsAsText, tokenize.SpecialsAsTokens} {
			m := sugarme.New(tok, specials)
			theirs := m.Tokenizer()
			withOffsets := 0
			for i, text := range golden.Documents {
				want := golden.IDs[name+"."+specials.String()][i]
				if want == nil { // as with specials as text
					want = golden.IDs[name+".text"][i]
				}
				e, err := m.Encode(text, false)
				if err != nil || !sameIDs(e.Ids, want) {
					t.Fatalf("%s, specials as %s, %q: %v (%v), want %v", name, specials, text, e.Ids, err, want)
				}
				checkEncoding(t, e, text)
				pipeline, err := theirs.EncodeSingle(text)
				if e.Offsets == nil {
					if err == nil || !strings.Contains(err.Error(), "not the concatenation of its tokens") {
						t.Errorf("%s, %q: error %v, want one about offsets", name, text, err)
					}
					continue
				}
				withOffsets++
				if err != nil || !sameIDs(pipeline.Ids, want) {
					t.Errorf("%s, %q: sugarme's pipeline returns %v (%v), want %v", name, text, pipeline, err, want)
				}
				if decoded, err := m.Decode(e.Ids, false); err != nil || decoded != text {
					t.Errorf("%s: the ids of %q decode to %q (%v)", name, text, decoded, err)
				}
			}
			// NFC of olmo changes a quarter of the documents.
			if withOffsets < len(golden.Documents)*7/10 {
				t.Errorf("%s: only %d of %d documents have offsets", name, withOffsets, len(golden.Documents))
			}
		}
	}
}

// Every kind of tokenizer.json has the golden ids, with and without special tokens, and the golden
// decoded text.
func TestGoldenPipelines(t *testing.T) {
	var golden struct {
		Documents []string
		Models    map[string]json.RawMessage
		Cases     []struct {
			Name, Model   string
			AddedTokens   json.RawMessage `json:"added_tokens"`
			Normalizer    json.RawMessage
			PreTokenizer  json.RawMessage `json:"pre_tokenizer"`
			PostProcessor json.RawMessage `json:"post_processor"`
			Decoder       json.RawMessage
			Plain, Around [][]uint32 // Around null is as Plain
			Decoded       []*string  // of Around; null is the document
		}
	}
	readJSON(t, "pipelines.json", &golden)
	special := 0
	for _, c := range golden.Cases {
		file, err := json.Marshal(map[string]any{
			"version": "1.0", "truncation": nil, "padding": nil, "added_tokens": c.AddedTokens,
			"normalizer": c.Normalizer, "pre_tokenizer": c.PreTokenizer, "post_processor": c.PostProcessor,
			"decoder": c.Decoder, "model": golden.Models[c.Model],
		})
		if err != nil {
			t.Fatal(err)
		}
		tok, err := tokenize.Parse(file, c.Name)
		if err != nil {
			t.Fatal(err)
		}
		plain, around := sugarme.New(tok, tokenize.SpecialsAsText), sugarme.New(tok, tokenize.SpecialsAsTokens)
		for i, text := range golden.Documents {
			e, err := plain.Encode(text, false)
			if err != nil || !sameIDs(e.Ids, c.Plain[i]) {
				t.Fatalf("%s, %q: %v (%v), want %v", c.Name, text, e, err, c.Plain[i])
			}
			checkEncoding(t, e, text)
			want := c.Around[i]
			if want == nil {
				want = c.Plain[i]
			}
			e, err = around.Encode(text, true)
			if err != nil || !sameIDs(e.Ids, want) {
				t.Fatalf("%s, %q, with special tokens: %v (%v), want %v", c.Name, text, e, err, want)
			}
			checkEncoding(t, e, text)
			if slices.Contains(e.SpecialTokenMask, 1) {
				special++
			}
			decoded := text
			if c.Decoded[i] != nil {
				decoded = *c.Decoded[i]
			}
			if got, err := around.Decode(e.Ids, false); err != nil || got != decoded {
				t.Errorf("%s: the ids of %q decode to %q (%v), want %q", c.Name, text, got, err, decoded)
			}
			if got := around.Tokenizer().GetDecoder().Decode(e.Tokens); got != decoded {
				t.Errorf("%s: the tokens of %q decode to %q, want %q", c.Name, text, got, decoded)
			}
		}
	}
	if special == 0 {
		t.Error("no encoding has special tokens")
	}
}

// bert adds [CLS] and [SEP] to a byte-level vocabulary.
func bert(t *testing.T) *tokenize.Tokenizer {
	t.Helper()
	var file map[string]any
	readJSON(t, "gpt2.json", &file)
	size := len(file["model"].(map[string]any)["vocab"].(map[string]any))
	var added []any
	for i, content := range []string{"[CLS]", "[SEP]"} {
		added = append(added, map[string]any{"id": size + i, "content": content, "single_word": false,
			"lstrip": false, "rstrip": false, "normalized": false, "special": true})
	}
	file["added_tokens"] = added
	file["post_processor"] = map[string]any{"type": "BertProcessing", "cls": []any{"[CLS]", size},
		"sep": []any{"[SEP]", size + 1}}
	b, err := json.Marshal(file)
	if err != nil {
		t.Fatal(err)
	}
	tok, err := tokenize.Parse(b, "special.json")
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// sugarme's Tokenizer adds mula's special tokens, truncates before them, and pads.
func TestTokenizer(t *testing.T) {
	m := sugarme.New(bert(t), tokenize.SpecialsAsText)
	cls, _ := m.TokenToId("[CLS]")
	sep, _ := m.TokenToId("[SEP]")
	theirs := m.Tokenizer()
	text := "the cat sat on the mat"
	want, err := m.Encode(text, true)
	if err != nil {
		t.Fatal(err)
	}
	n := len(want.Ids)
	if want.Ids[0] != cls || want.Ids[n-1] != sep || want.SpecialTokenMask[0] != 1 || want.SpecialTokenMask[1] != 0 {
		t.Errorf("ids %v, mask %v, want %d and %d around the text", want.Ids, want.SpecialTokenMask, cls, sep)
	}
	got, err := theirs.EncodeSingle(text, true)
	if err != nil || !slices.Equal(got.Ids, want.Ids) || len(got.Offsets) != n || len(got.Words) != n {
		t.Errorf("sugarme's pipeline returns %+v (%v), want ids %v", got, err, want.Ids)
	}
	if decoded, err := m.Decode(want.Ids, true); err != nil || decoded != text {
		t.Errorf("without special tokens: %q (%v)", decoded, err)
	}
	theirs.WithTruncation(&tokenizer.TruncationParams{MaxLength: 5, Strategy: tokenizer.LongestFirst})
	got, err = theirs.EncodeSingle(text, true)
	if short := append(slices.Clone(want.Ids[:4]), sep); err != nil || !slices.Equal(got.Ids, short) {
		t.Errorf("truncated to %v (%v), want %v", got.Ids, err, short)
	}
}

// Requests that mula cannot serve are refused.
func TestRefused(t *testing.T) {
	m := sugarme.New(bert(t), tokenize.SpecialsAsText)
	if _, err := m.Encode("a\xff", false); err == nil || !strings.Contains(err.Error(), "invalid UTF-8 at byte 1") {
		t.Errorf("invalid UTF-8: error %v", err)
	}
	if _, err := m.Tokenize("a\xff"); err == nil || !strings.Contains(err.Error(), "invalid UTF-8 at byte 1") {
		t.Errorf("invalid UTF-8: error %v", err)
	}
	for _, id := range []int{-1, m.GetVocabSize()} {
		if text, err := m.Decode([]int{id}, false); err == nil {
			t.Errorf("id %d decodes to %q", id, text)
		}
		if _, ok := m.IdToToken(id); ok {
			t.Errorf("id %d has a token", id)
		}
	}
	if err := m.Save("x"); err == nil {
		t.Error("Save succeeds")
	}
	if e, err := m.Tokenizer().EncodePair("a", "b", true); e != nil {
		t.Errorf("a pair with special tokens has the encoding %v (%v)", e, err)
	}
	if e, err := m.Tokenizer().EncodePair("a", "b"); err != nil || len(e.Ids) != 2 {
		t.Errorf("a pair without special tokens: %v (%v)", e, err)
	}
	d := m.Tokenizer().GetDecoder()
	if text, chain := d.Decode([]string{"no such token"}), d.DecodeChain([]string{"no such token"}); text != "" ||
		chain != nil {
		t.Errorf("an unknown token decodes to %q, %q", text, chain)
	}
}

// The vocabulary has every token once, and the same ids as mula.
func TestVocabulary(t *testing.T) {
	for _, name := range []string{"gpt2", "cl100k", "olmo"} {
		tok := load(t, name)
		m := sugarme.New(tok, tokenize.SpecialsAsText)
		vocab := m.GetVocab()
		if m.GetVocabSize() != tok.VocabSize() || len(vocab) == 0 {
			t.Errorf("%s: size %d, %d tokens, want %d", name, m.GetVocabSize(), len(vocab), tok.VocabSize())
		}
		for token, id := range vocab {
			want, ok := tok.ID(token)
			got, found := m.TokenToId(token)
			text, exists := m.IdToToken(id)
			if !ok || !found || !exists || int(want) != id || got != id || text != token {
				t.Errorf("%s: token %q has id %d, %d and %d, and the text %q", name, token, id, got, want, text)
			}
		}
	}
}

// One model serves several goroutines.
func TestConcurrentUse(t *testing.T) {
	m := sugarme.New(load(t, "olmo"), tokenize.SpecialsAsText)
	text := strings.Repeat("the cat sat on the mat. ", 20)
	want, err := m.Encode(text, false)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 20 {
				if e, err := m.Encode(text, false); err != nil || !slices.Equal(e.Ids, want.Ids) {
					t.Errorf("another goroutine got other ids (%v)", err)
				}
			}
		})
	}
	wg.Wait()
}
