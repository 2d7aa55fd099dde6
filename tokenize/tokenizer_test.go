package tokenize

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestLoad(t *testing.T) {
	path := "testdata/gpt2.json"
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	tok := load(t, path)
	sum := sha256.Sum256(b)
	if got, want := tok.SHA256(), hex.EncodeToString(sum[:]); got != want {
		t.Errorf("SHA256 is %s, want %s", got, want)
	}
	if got := tok.VocabSize(); got != 640 {
		t.Errorf("VocabSize is %d, want 640", got)
	}
	for token, want := range map[string]uint32{"<|endoftext|>": 0, "<|padding|>": 1, "!": 2, "a": 66, "\xff": 189,
		" ": 222} {
		if id, ok := tok.ID(token); !ok || id != want {
			t.Errorf("ID(%q) is %d, %v; want %d", token, id, ok, want)
		}
	}
	for _, token := range []string{"", "Ġ", "no such token"} {
		if id, ok := tok.ID(token); ok {
			t.Errorf("ID(%q) is %d", token, id)
		}
	}
	for id := range uint32(640) {
		text, special, ok := tok.Token(id)
		if found, _ := tok.ID(text); !ok || special != strings.HasPrefix(text, "<|") || found > id {
			t.Errorf("Token(%d) is %q, special %v, %v; ID(%q) is %d", id, text, special, ok, text, found)
		}
	}
	if text, _, ok := tok.Token(640); ok {
		t.Errorf("Token(640) is %q", text)
	}
	missing := filepath.Join(t.TempDir(), "none.json")
	if _, err := Load(missing); err == nil || !strings.Contains(err.Error(), missing) {
		t.Errorf("loading a missing file: %v", err)
	}
	// Neither a file that is too large nor one without an end is read into memory.
	large := filepath.Join(t.TempDir(), "large.json")
	if err := os.WriteFile(large, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(large, maxFile+1); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(large); err == nil || !strings.Contains(err.Error(), large+" is larger than 512 MiB, so it is "+
		"not a tokenizer.json") {
		t.Errorf("a large file: %v", err)
	}
	if _, err := os.Stat("/dev/zero"); err == nil {
		if _, err := readFile("/dev/zero", 1<<20); err == nil ||
			!strings.Contains(err.Error(), "/dev/zero is larger than 1 MiB") {
			t.Errorf("a file without end: %v", err)
		}
	}
	if got, err := readFile(path, int64(len(b))); err != nil || !bytes.Equal(got, b) {
		t.Errorf("a file of just the limit: %d bytes, %v", len(got), err)
	}
}

func TestDecode(t *testing.T) {
	tok := load(t, "testdata/olmo.json")
	ids, err := tok.NewEncoder(EncodeOptions{}).Append(nil, []byte("It's  5\u20ac"))
	if err != nil {
		t.Fatal(err)
	}
	got, err := tok.Decode([]byte("> "), ids)
	if err != nil || string(got) != "> It's  5\u20ac" {
		t.Errorf("decoded %q, %v", got, err)
	}
	for _, id := range []uint32{uint32(tok.VocabSize()), 1 << 31, noToken} {
		got, err := tok.Decode([]byte("> "), []uint32{ids[0], id})
		if err == nil || string(got) != "> " {
			t.Errorf("id %d: %q, %v", id, got, err)
		}
	}
	holes, err := Parse([]byte(`{"version": "1.0", "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
		"model": {"vocab": {"a": 0, "b": 3}, "merges": []}}`), "holes")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := holes.Decode(nil, []uint32{0, 3}); err != nil || string(got) != "ab" {
		t.Errorf("%q, %v", got, err)
	}
	if got, err := holes.Decode(nil, []uint32{1}); err == nil {
		t.Errorf("id 1 does not exist and is %q", got)
	}
}

// small is a tokenizer.json to spoil: replace one of its parts by another.
const small = `{"version": "1.0", "truncation": null, "padding": null,
"added_tokens": [{"id": 5, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
"normalizer": null,
"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
"post_processor": null,
"decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
"model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
"byte_fallback": false, "ignore_merges": false, "vocab": {"a": 0, "b": 1, "é": 2, "ab": 3, "aba": 4}, "merges": [["a", "b"], ["ab", "a"]]}}`

const (
	smallPre = `{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},` + "\n" +
		`"post`
	smallLevel = `{"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}`
)

func smallSplit(regex, behavior, invert string) string {
	quoted, _ := quote(regex)
	return `{"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": ` + string(quoted) +
		`}, "behavior": "` + behavior + `", "invert": ` + invert + `}, ` + smallLevel + `]},` + "\n" + `"post`
}

func TestParseAccepts(t *testing.T) {
	for _, c := range []struct{ old, new string }{
		{"", ""},
		{`[["a", "b"], ["ab", "a"]]`, `["#version: 0.2", "a b", "ab a"]`},
		{`[["a", "b"], ["ab", "a"]]`, `["a b", "ab a", "a b"]`},
		{`"dropout": null, `, ``},
		{`"continuing_subword_prefix": null`, `"continuing_subword_prefix": ""`},
		{`"normalizer": null`, `"normalizer": {"type": "NFC"}`},
		{`"normalizer": null`, `"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}`},
		{`"normalizer": null`, `"normalizer": {"type": "Sequence", "normalizers": []}`},
		{smallPre, smallSplit(cl100kRegex, "Removed", "true")},
		{smallPre, smallSplit(cl100kRegex, "Isolated", "false")},
		{smallPre, smallSplit(gpt2Regex, "Isolated", "false")},
		{smallPre, `{"type": "Sequence", "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": false}]}, "post`},
		{`"post_processor": null`,
			`"post_processor": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true}`},
		{`"post_processor": null`,
			`"post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {}}`},
		{`"post_processor": null`, `"post_processor": {"type": "Sequence", "processors": [{"type": "ByteLevel"}]}`},
		// not asked for
		{`"post_processor": null`, `"post_processor": {"type": "BertProcessing", "sep": ["a", 0], "cls": ["b", 1]}`},
		{`"dropout": null`, `"dropout": 0.0`},
		{`"unk_token": null`, `"unk_token": "a"`},
		{`"byte_fallback": false`, `"byte_fallback": true`},
		{`"fuse_unk": false`, `"fuse_unk": null`},
		{`"special": true}]`, `"special": true}, {"id": 5, "content": "<|end|>"}, {"id": 9, "content": ""}]`},
		{`"normalizer": null`, `"normalizer": {"type": "NFKC"}`},
		{`"normalizer": null`,
			`"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": []}, {"type": "Lowercase"}]}`},
		{smallPre, `null, "post`},
		{smallPre, `{"type": "BertPreTokenizer"}, "post`},
		{smallPre, `{"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true}, ` +
			smallLevel + `]}, "post`},
		{smallPre, smallLevel + `, "post`},
		{smallPre, smallSplit(cl100kRegex, "Isolated", "true")},
		{smallPre, smallSplit(cl100kRegex, "MergedWithNext", "false")},
		{`"decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}`,
			`"decoder": null`},
	} {
		if !strings.Contains(small, c.old) {
			t.Fatalf("%q is not in the file", c.old)
		}
		tok, err := Parse([]byte(strings.Replace(small, c.old, c.new, 1)), "small.json")
		if err != nil {
			t.Errorf("with %s: %v", c.new, err)
			continue
		}
		ids, err := tok.NewEncoder(EncodeOptions{Specials: SpecialsAsTokens}).Append(nil, []byte("abab<|end|>aba"))
		want := []uint32{3, 3, 5, 4}
		if strings.HasSuffix(c.new, `"a b"]`) { // of equal merges the later counts: "ab a" now comes first
			want = []uint32{4, 1, 5, 4}
		}
		if err != nil || !slices.Equal(ids, want) {
			t.Errorf("with %s: ids are %v (%v)", c.new, ids, err)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for _, c := range []struct{ old, new, want string }{
		{`"version": "1.0"`, `"version": "2.0"`, `unknown version "2.0"`},
		{`"truncation": null`, `"truncation": {"max_length": 512}`,
			`truncation is {"max_length":512}, which is not supported, because ids would differ from those in Hugging ` +
				`Face tokenizers; mula never cuts documents; set it to null, or use --ignore-truncation-and-padding`},
		{`"padding": null`, `"padding": {"strategy": "BatchLongest"}`,
			`mula never pads documents; set it to null, or use --ignore-truncation-and-padding`},
		{`"type": "BPE"`, `"type": "WordPiece"`, `model.unk_token is missing`},
		{`"type": "BPE"`, `"type": "GPE"`, `model.type is "GPE"; use BPE, WordPiece, WordLevel or Unigram`},
		{`"dropout": null`, `"dropout": 0.1`,
			`model.dropout is 0.1, which is not supported, because ids would differ from those in Hugging Face ` +
				`tokenizers; dropout makes ids random; set it to null`},
		{`"continuing_subword_prefix": null`, `"continuing_subword_prefix": "##"`,
			`"b" is shorter than continuing_subword_prefix`},
		{`"id": 5`, `"id": 6`, `would assign 5`},
		{`"id": 5, "content": "<|end|>"`, `"id": 2, "content": "é"`, "represents \"\\xe9\""},
		{`"merges": [["a", "b"], ["ab", "a"]]`, `"merges": null`, `model.merges is missing`},
		{`"merges": [["a", "b"], ["ab", "a"]]`, `"merges": 5`, `want an array, found number`},
		{`"merges": [["a", "b"], ["ab", "a"]]`, `"merges": [["a", "b"], null]`, `model.merges[1]: "" does not have two`},
		{`"merges": [["a", "b"], ["ab", "a"]]`, `"merges": [["a", null]]`, `"a" and "": a part or the whole is not`},
		{`"vocab": {"a": 0, "b": 1, "é": 2, "ab": 3, "aba": 4}`, `"vocab": null`, `model.vocab is missing`},
		{`"normalizer": null`, `"normalizer": {"type": "NFX"}`, `normalizer is {"type":"NFX"}`},
		{`"normalizer": null`,
			`"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Upper"}]}`,
			`normalizer.normalizers[1] is {"type":"Upper"}`},
		{`"normalizer": null`,
			`"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [{"type": "NFX", "x": 1}]}]}`, `normalizer.normalizers[0].normalizers[0] is {"type":"NFX","x":1}`},
		{`"normalizer": null`, `"normalizer": {"type": "Sequence", "normalizers": [null]}`,
			`normalizer is {"type":"Sequence","normalizers":[null]}`},
		{`"normalizer": null`, `"normalizer": {"type": "Sequence", "normalizers": 3}`,
			`(normalizers: byte 1: want an array, found number)`},
		{`"normalizer": null`, `"normalizer": {"type": "Sequence", "decoders": []}`,
			`(the field "normalizers" is missing)`},
		{`"normalizer": null`, `"normalizer": "NFC"`, `normalizer is "NFC"`},
		{`"normalizer": null`, `"normalizer": {"type": 3}`, `(byte 10: type: want a string, found number)`},
		{`"normalizer": null`, `"normalizer": {"type": "Prepend", "prepend": ""}`,
			`normalizer is {"type":"Prepend","prepend":""}`},
		{`"normalizer": null`, `"normalizer": {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "y"}`,
			`normalizer: the pattern matches the empty text`},
		{`"normalizer": null`, `"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "y"}`,
			`normalizer: the pattern matches the empty text`},
		{`"normalizer": null`, `"normalizer": {"type": "Replace", "pattern": {}, "content": "y"}`,
			`normalizer.pattern: want one of Regex and String`},
		{`"normalizer": null`, `"normalizer": {"type": "Replace", "pattern": {"Regex": "(x"}, "content": "y"}`,
			`normalizer.pattern.Regex: `},
		{`"normalizer": null`, `"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}`,
			`normalizer.precompiled_charsmap: the map is too short`},
		{`"normalizer": null`, `"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAEAAA=="}`,
			`normalizer.precompiled_charsmap: the trie has 256 bytes, but the file has 0`},
		{`"normalizer": null`, `"normalizer": {"type": "Precompiled", "precompiled_charsmap": "?"}`, `illegal base64`},
		{smallPre, `{"type": "Blanks"}, "post`, `pre_tokenizer is {"type":"Blanks"}`},
		{smallPre, `{"type": "Metaspace", "replacement": "__"}, "post`,
			`pre_tokenizer.replacement is "__": want one character`},
		{smallPre, `{"type": "Metaspace", "replacement": "_", "prepend_scheme": "last"}, "post`,
			`pre_tokenizer.prepend_scheme is "last"`},
		{smallPre, `{"type": "Metaspace", "replacement": "_", "add_prefix_space": false}, "post`,
			`add_prefix_space is false and prepend_scheme is not "never"`},
		{smallPre, `{"type": "Punctuation", "behavior": "Merged"}, "post`, `pre_tokenizer.behavior is "Merged"`},
		{smallPre, `{"type": "FixedLength", "length": 0}, "post`, `pre_tokenizer is {"type":"FixedLength","length":0}`},
		{smallPre, smallSplit(`\p{Nonsense}+|\s`, "Removed", "true"), `pre_tokenizer.pretokenizers[0].pattern.Regex: `},
		{smallPre, smallSplit(cl100kRegex, "Merged", "false"), `pre_tokenizer.pretokenizers[0].behavior is "Merged"`},
		{`"post_processor": null`,
			`"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "a", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]}`, `the template has special token "a", which is not in special_tokens`},
		{`"post_processor": null`,
			`"post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "B", "type_id": 0}}]}`,
			`sequence "B"`},
		{`"post_processor": null`, `"post_processor": {"type": "TemplateProcessing", "single": []}`,
			`post_processor is {"type":"TemplateProcessing","single":[]}`},
		{`"post_processor": null`, `"post_processor": {"type": "TemplateProcessing", "single": [{}]}`,
			`neither a Sequence nor a SpecialToken`},
		{`"post_processor": null`, `"post_processor": {"type": "BertProcessing"}`,
			`post_processor is {"type":"BertProcessing"}`},
		{`"post_processor": null`, `"post_processor": {"type": "BertProcessing", "sep": ["x", 5], "cls": ["y", 6]}`,
			`post_processor: it adds id 6, which no token has`},
		{`"post_processor": null`,
			`"post_processor": {"type": "Sequence", "processors": [{"type": "ByteLevel"}, {"type": "Bert"}]}`,
			`post_processor.processors[1] is`},
		// Hugging Face tokenizers takes these for a BertProcessing or a TemplateProcessing.
		{`"post_processor": null`,
			`"post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {}, "sep": ["x", 5], "cls": ["y", 5]}`, `(a TemplateProcessing has no field "sep")`},
		{`"post_processor": null`,
			`"post_processor": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "cls": ["x", 5], "sep": ["y", 5]}`, `(a ByteLevel has no field "sep")`},
		{`"post_processor": null`,
			`"post_processor": {"type": "Sequence", "processors": [{"type": "Sequence", "processors": [], "single": []}]}`, `post_processor.processors[0] is`},
		{`"post_processor": null`,
			`"post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}, "x": 1}]}`, `unknown field "x"`},
		{`"normalizer": null`, `"normalizer": {"type": "Replace", "pattern": {"String": "x", "y": 1}, "content": "y"}`,
			`unknown field "y"`},
		{`"decoder": {"type": "ByteLevel"`, `"decoder": {"type": "Bytes"`, `decoder is {"type":"Bytes"`},
		{`"decoder": {"type": "ByteLevel"`, `"decoder": {"type": "Metaspace"`,
			`decoder.replacement is "": want one character`},
		{`"version"`, `"extra": 1, "version"`, `unknown field "extra"`},
		{`["ab", "a"]`, `["ab", "c"]`, `model.merges[1]: "ab" and "c"`},
		{`["ab", "a"]`, `["ab", "b"]`, `model.merges[1]: "ab" and "b"`},
		{`["ab", "a"]`, `["ab"]`, `["ab"] does not have two parts`},
		{`["ab", "a"]`, `"ab"`, `"ab" does not have two parts`},
		{`["ab", "a"]`, `"a b a"`, `"a b a" does not have two parts`},
		{`["ab", "a"]`, `null`, `"" does not have two parts`},
		{`"aba": 4`, `"aba": 3`, `two tokens have id 3`},
		{`"aba": 4`, `"aba": 4194304`, `has id 4194304`},
		{`"aba": 4`, `"aba": -1`, `model.vocab: the id of "aba" is -1: want a whole number of 0 or more`},
		{`"id": 5`, `"id": "5"`, `added_tokens.id: want a whole number of 0 or more, found string`},
		{`"special": true`, `"special": 1`, `added_tokens.special: want true or false, found number`},
		{`["ab", "a"]`, `["ab", 7]`, `model.merges[1]: want a string`},
		{`["ab", "a"]`, `7`, `model.merges[1]: want a string`},
		{`"id": 5`, `"id": 4194304`, `has id 4194304`},
		{small, `{"version": "1.0"}`, `the model is missing`},
		{small, ``, `byte 0: unexpected end of file`},
		{small, small[:40], `byte 40: unexpected end of file`},
		{small, `[]`, `small.json: byte 1: want an object, found array`},
		{small, small + "{", `unexpected data after the JSON value`},
		{`"padding": null`, `"padding": nil`, `byte `},
	} {
		if !strings.Contains(small, c.old) {
			t.Fatalf("%q is not in the file", c.old)
		}
		_, err := Parse([]byte(strings.Replace(small, c.old, c.new, 1)), "small.json")
		if err == nil || !strings.HasPrefix(err.Error(), "small.json: ") || !strings.Contains(err.Error(), c.want) {
			t.Errorf("with %s:\n got %v\nwant %s", c.new, err, c.want)
		}
	}
	nothing := strings.Replace(small, `"special": true}]`,
		`"special": true}, {"id": 6, "content": " ", "normalized": true}]`, 1)
	nothing = strings.Replace(nothing, `"normalizer": null`,
		`"normalizer": {"type": "Strip", "strip_left": true, "strip_right": false}`, 1)
	if _, err := Parse([]byte(nothing), "x"); err == nil ||
		!strings.Contains(err.Error(), `" " normalizes to the empty text`) {
		t.Errorf("an added token without a normal form: %v", err)
	}
	twice := strings.Replace(small, `"special": true}]`,
		`"special": true}, {"id": 6, "content": "caf\u00e9", "normalized": true}, {"id": 7, "content": "cafe\u0301", "normalized": true}]`, 1)
	twice = strings.Replace(twice, `"normalizer": null`, `"normalizer": {"type": "NFC"}`, 1)
	if _, err := Parse([]byte(twice), "x"); err == nil ||
		!strings.Contains(err.Error(), "normalizes to the same text") {
		t.Errorf("two added tokens with one normal form: %v", err)
	}
}

// Hugging Face tokenizers ignores these fields, so the ids do not depend on them. Names are
// compared exactly: "Lowercase" is unknown, too.
func TestIgnoredFields(t *testing.T) {
	const text = "abab<|end|>aba"
	ids := func(file string) []uint32 {
		t.Helper()
		tok, err := Parse([]byte(file), "small.json")
		if err != nil {
			t.Fatal(err)
		}
		ids, err := tok.NewEncoder(EncodeOptions{Specials: SpecialsAsTokens, AddSpecialTokens: true}).Append(nil,
			[]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		return ids
	}
	const unknown = `"zzz": {"a": 1}, "sequence": [], "String": "x", "TYPE": "none", `
	for _, c := range []struct{ old, step string }{
		{`"normalizer": null`, `"normalizer": {~"type": "NFC"}`},
		{`"normalizer": null`,
			`"normalizer": {~"LOWERCASE": true, "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": false, "Clean_Text": 5}`},
		{`"normalizer": null`,
			`"normalizer": {~"prepend": "b", "normalizers": [{~"type": "Lowercase", "content": "b"}], "type": "Sequence"}`},
		{`"normalizer": null`,
			`"normalizer": {~"type": "Replace", "pattern": {"String": "x"}, "content": "a", "behavior": 3}`},
		{`"normalizer": null`,
			`"normalizer": {~"type": "Strip", "strip_left": true, "strip_right": false, "Strip_Right": true}`},
		{smallPre,
			`{~"delimiter": "a", "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true, "Use_Regex": false}, "post`},
		{smallPre,
			`{~"type": "Sequence", "pretokenizers": [{~"type": "Digits", "individual_digits": true}, {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true}]}, "post`},
		{`"post_processor": null`,
			`"post_processor": {~"add_prefix_space": true, "trim_offsets": false, "type": "TemplateProcessing", "single": [{"SpecialToken": {~"id": "<|end|>", "type_id": 0}}, {"Sequence": {~"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {"<|end|>": {~"id": "<|end|>", "ids": [5], "tokens": ["<|end|>"]}}}`},
		{`"post_processor": null`,
			`"post_processor": {~"type": "BertProcessing", "sep": ["<|end|>", 5], "cls": ["<|end|>", 5], "single": 1}`},
		{`"post_processor": null`,
			`"post_processor": {~"type": "Sequence", "processors": [{~"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false}], "add_prefix_space": true}`},
		{`"decoder": {`, `"decoder": {~"cleanup": true, `},
		{`"model": {`, `"model": {~"cache": 5, "max_input_chars_per_word": 1, "unk_id": 0, "Byte_Fallback": null, `},
		{`"id": 5`, `~"id": 5`},
	} {
		if !strings.Contains(small, c.old) {
			t.Fatalf("%q is not in the file", c.old)
		}
		with := strings.ReplaceAll(c.step, "~", unknown)
		got, want := ids(strings.Replace(small, c.old, with, 1)), ids(strings.Replace(small, c.old,
			strings.ReplaceAll(c.step, "~", ""), 1))
		if !slices.Equal(got, want) {
			t.Errorf("with %s: ids are %v, without what is ignored %v", with, got, want)
		}
	}
	replace := `"normalizer": {"type": "Replace", "pattern": {"String": "b"}, "content": "a", "CONTENT": "b"}`
	if got := ids(strings.Replace(small, `"normalizer": null`, replace, 1)); !slices.Equal(got,
		[]uint32{0, 0, 0, 0, 5, 0, 0, 0}) {
		t.Errorf("with %s: ids are %v", replace, got)
	}
}

// A file with truncation or padding is refused, unless both are ignored; the tokenizer then reports
// it.
func TestTruncationAndPadding(t *testing.T) {
	for _, set := range [][2]string{{`"truncation": null`,
		`"truncation": {"max_length": 1, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}`}, {`"padding": null`, `"padding": {"strategy": {"Fixed": 128}}`}} {
		file := strings.Replace(small, set[0], set[1], 1)
		tok, err := ParseWith([]byte(file), "small.json", LoadOptions{IgnoreTruncationAndPadding: true})
		if err != nil {
			t.Fatal(err)
		}
		ids, err := tok.NewEncoder(EncodeOptions{}).Append(nil, []byte("abab"))
		if sum := fmt.Sprintf("%x", sha256.Sum256([]byte(file))); err != nil || !slices.Equal(ids, []uint32{3, 3}) ||
			tok.SHA256() != sum || !tok.IgnoredTruncationOrPadding() {
			t.Errorf("%s: %v, %v, SHA-256 %s", set[1], ids, err, tok.SHA256())
		}
	}
	tok, err := ParseWith([]byte(small), "small.json", LoadOptions{IgnoreTruncationAndPadding: true})
	if err != nil || tok.IgnoredTruncationOrPadding() {
		t.Error(tok, err)
	}
}

// The name of a model is not a file, and the error explains that.
func TestHubName(t *testing.T) {
	t.Chdir(t.TempDir())
	for path, hub := range map[string]bool{"gpt2": true, "allenai/dolma2-tokenizer": true, "tokenizer.json": false,
		"models/tokenizer.json": false, "./gpt2": false, "/a/b": false, "a/b/c": false} {
		if _, err := Load(path); err == nil || strings.Contains(err.Error(),
			"names in the Hugging Face hub are not supported; download the tokenizer.json of "+path) != hub ||
			!errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// TestTextOfTokensIsBounded: a tree that finds tokens has a node for each of their bytes.
func TestTextOfTokensIsBounded(t *testing.T) {
	long := strings.Repeat("a", maxText-1)
	for _, c := range []struct {
		vocab map[string]uint32
		added []addedJSON
		ok    bool
	}{
		{map[string]uint32{long: 0, "b": 1}, nil, true},
		{map[string]uint32{long: 0, "bb": 1}, nil, false},
		{map[string]uint32{"bb": 0}, []addedJSON{{ID: 1, Content: long}}, false},
	} {
		err := (&Tokenizer{}).addVocabulary(&modelJSON{Type: "BPE", Vocab: vocabJSON{ids: c.vocab}}, c.added)
		if c.ok && err != nil ||
			!c.ok && (err == nil || !strings.Contains(err.Error(), "have 67108865 bytes in total; at most 64 MiB")) {
			t.Errorf("%d tokens, %d added: %v", len(c.vocab), len(c.added), err)
		}
	}
}

// try uses whatever Parse accepted.
func try(t interface{ Errorf(string, ...any) }, file []byte) {
	tok, err := Parse(file, "fuzz")
	if err != nil {
		return
	}
	var ids []uint32
	for _, s := range []Specials{SpecialsAsText, SpecialsAsTokens} {
		if ids, err = tok.NewEncoder(EncodeOptions{Specials: s,
			AddSpecialTokens: s == SpecialsAsTokens}).Append(ids[:0], []byte("abab<|end|>a e\u0301 \u00e9 <s> don "+
			"12\u200b")); err != nil {
			continue
		}
		for _, id := range ids {
			if int(id) >= tok.VocabSize() {
				t.Errorf("id %d, vocabulary of %d", id, tok.VocabSize())
			}
		}
		if _, err := tok.Decode(nil, ids); err != nil && !strings.Contains(err.Error(),
			"Hugging Face tokenizers fails on it") {
			t.Errorf("%v", err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(small))
	p := readPipelines(f)
	for _, c := range p.Cases {
		f.Add(p.file(f, c))
	}
	f.Add([]byte(strings.Replace(small, smallPre, smallSplit(cl100kRegex, "Removed", "true"), 1)))
	f.Add([]byte(strings.Replace(small, `[["a", "b"], ["ab", "a"]]`, `["a b", "ab a"]`, 1)))
	f.Fuzz(func(t *testing.T, file []byte) { try(t, file) })
}

// TestParseSpoiledFiles cuts pieces of the file out, doubles them and changes bytes: Parse may
// refuse, never panic.
func TestParseSpoiledFiles(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := []byte(small)
		for range rapid.IntRange(1, 4).Draw(t, "changes") {
			i := rapid.IntRange(0, len(b)).Draw(t, "from")
			j := min(len(b), i+rapid.IntRange(0, 40).Draw(t, "length"))
			switch rapid.IntRange(0, 2).Draw(t, "kind") {
			case 0:
				b = slices.Delete(b, i, j)
			case 1:
				b = slices.Insert(b, i, bytes.Clone(b[i:j])...)
			case 2:
				b = slices.Replace(b, i, j, rapid.SliceOfN(rapid.Byte(), 0, 3).Draw(t, "bytes")...)
			}
		}
		try(t, b)
	})
}
