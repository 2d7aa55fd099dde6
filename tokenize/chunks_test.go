package tokenize

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// chunkSnippets are characters that steps treat specially at the ends of a text or next to spaces.
var chunkSnippets = []string{
	" ", " ", " ", "  ", "\n", "\n\n", "\t", "\r", "\r\n", "\u00a0", "\u2003", "\u3000", "\u2581",
	"\u2581\u2581", "\u200b", "\u200d", "\u0301", "\u0323", "\u0600", "\u06dd", "\u0903", "\ufffd", "\x00",
	"\x1f", "\x7f", "\u00a8", "\u00b4", "\ufe0f", "a", "e", "the", "The", "\u00e9", "e\u0301", "\u0130", ",",
	".", "--", "<s>", "12", "\u4e2d", "\u4f60\u597d", "\u3042\u308a", "\uac00", "\u1100\u1161", "\u0e33",
	"\U0001f600", "\u041c\u0438\u0440", ">", "\u2581</", "unaffable", "\u0928\u092e\u0938\u094d\u0924\u0947",
	"\u1680", "\u0085", "\u2028",
}

// randomSnippets returns up to n snippets.
func randomSnippets(r *rand.Rand, n int) []byte {
	var text []byte
	for range r.IntN(n) + 1 {
		if r.IntN(12) == 0 {
			text = append(text, string(rune(r.IntN(0x3100)))...)
			continue
		}
		text = append(text, chunkSnippets[r.IntN(len(chunkSnippets))]...)
	}
	return bytes.ToValidUTF8(text, nil)
}

// chunkTokenizers returns the golden tokenizers, without added tokens, that divide texts into
// chunks. It adds the files in the folder that the environment variable MULA_TOKENIZERS names.
func chunkTokenizers(t testing.TB) map[string]*Tokenizer {
	t.Helper()
	found := map[string]*Tokenizer{}
	p := readPipelines(t)
	for _, c := range p.Cases {
		c.AddedTokens, c.PostProcessor = []byte("[]"), []byte("null")
		tok, err := Parse(p.file(t, c), c.Name)
		if err != nil {
			t.Fatal(err)
		}
		if tok.general != nil && tok.general.chunks != nil {
			found[c.Name] = tok
		}
	}
	if folder := os.Getenv("MULA_TOKENIZERS"); folder != "" {
		files, err := filepath.Glob(filepath.Join(folder, "*.json"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			tok := load(t, file)
			if tok.general != nil && tok.general.chunks != nil {
				found[filepath.Base(file)] = tok
			}
		}
	}
	return found
}

// compareChunks encodes a text in chunks and as a whole.
func compareChunks(t *testing.T, name string, e *pipelineEncoder, text []byte, first bool) {
	t.Helper()
	got, err1 := e.appendChunks(nil, text, first)
	want, err2 := e.appendWhole(nil, text, first)
	if (err1 == nil) != (err2 == nil) || err1 == nil && !slices.Equal(got, want) {
		t.Fatalf("%s, first %v, %+.300q: ids in chunks %.300s (%v), want %.300s (%v)", name, first, text,
			fmt.Sprint(got), err1, fmt.Sprint(want), err2)
	}
}

func TestChunksChangeNothing(t *testing.T) {
	all := chunkTokenizers(t)
	for _, name := range []string{"llama2", "llama2 first", "gemma", "bert uncased", "bert cased", "t5", "xlm-r"} {
		if all[name] == nil {
			t.Errorf("%s: no chunks", name)
		}
	}
	for name, tok := range all {
		t.Run(name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(1, 2))
			e := newPipelineEncoder(tok)
			for range 20_000 {
				compareChunks(t, name, e, randomSnippets(r, 12), r.IntN(2) == 0)
			}
		})
	}
}

// TestChunksInLinearTime has texts whose chunks do not open or close.
func TestChunksInLinearTime(t *testing.T) {
	if raceEnabled {
		t.Skip("one goroutine with much work, which the race detector makes ten times slower")
	}
	for name, tok := range chunkTokenizers(t) {
		t.Run(name, func(t *testing.T) {
			e := newPipelineEncoder(tok)
			for _, chunk := range []string{" \u0308", " a\u3000", "\x00 ", "\u2581 ", " >", "a\r\n", " \u4e2d\u0301",
				"\u4e2d", " \u0600"} {
				compareChunks(t, name, e, []byte(strings.Repeat(chunk, 1<<16)), true)
			}
		})
	}
}

// FuzzChunks compares the ids of a text in chunks with the ids of the text as a whole.
func FuzzChunks(f *testing.F) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 40 {
		f.Add(randomSnippets(r, 20), r.IntN(2) == 0)
	}
	encoders := map[string]*pipelineEncoder{}
	for name, tok := range chunkTokenizers(f) {
		encoders[name] = newPipelineEncoder(tok)
	}
	f.Fuzz(func(t *testing.T, text []byte, first bool) {
		text = bytes.ToValidUTF8(text, nil)
		for name, e := range encoders {
			compareChunks(t, name, e, text, first)
		}
	})
}
