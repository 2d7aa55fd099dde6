package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"mula/internal/objects/objectstest"
	"mula/tokenize"
)

// A text that is generated is valid UTF-8, with one U+FFFD for each cut-off character as Hugging
// Face tokenizers decodes it, and not one for each byte. Ids beyond the tokenizer's are never
// generated, which a note says.
func TestGenerateText(t *testing.T) {
	dir := prepared(t)
	mustRun(t, dir, "blend")
	if err := os.WriteFile(filepath.Join(dir, "train.yaml"),
		[]byte("output: run\ntokenizer: tokenizer.json\nmodel: {preset: mula-nano}\nbatch_size: 4\nsteps: 1\n"),
		0o644); err != nil {
		t.Fatal(err)
	}
	mustRun(t, dir, "train")
	args := []string{"generate", "--model", filepath.Join(dir, "run"), "--temperature", "1", "--top-k", "0",
		"--max-tokens", "400", "--seed", "2", "a"}
	code, plain, notes := call(t, args...)
	if code != exitDone ||
		!strings.Contains(notes,
			"note: the tokenizer has 400 ids and the model 512; ids from 400 are never generated\n") ||
		!strings.Contains(notes, " tokens/s; 411 kB of keys and values\n") { // 401 tokens, 2 layers, 2·64 numbers
		t.Errorf("exit code %d, %s", code, notes)
	}
	code, output, _ := call(t, append(args, "--json")...)
	var result struct {
		Samples []struct {
			Text   string
			Tokens []uint32
		}
	}
	if err := json.Unmarshal([]byte(output), &result); err != nil || code != exitDone || len(result.Samples) != 1 {
		t.Fatalf("exit code %d, %v: %s", code, err, output)
	}
	tokenizer, err := tokenize.Load(filepath.Join(dir, "tokenizer.json"))
	if err != nil {
		t.Fatal(err)
	}
	sample := result.Samples[0]
	spelled, err := tokenizer.Decode(nil, sample.Tokens)
	if err != nil {
		t.Fatal(err)
	}
	want := strings.TrimSuffix(string(tokenize.AppendText(nil, spelled)), "<|endoftext|>") // at which the text ends
	if each := strings.ToValidUTF8(string(spelled), "\ufffd"); each == want ||
		len([]rune(string(spelled))) == len([]rune(want)) {
		t.Fatal("the sample has no cut-off characters of several bytes, so this test shows nothing; change its seed")
	}
	if sample.Text != want || !utf8.ValidString(plain) || plain != "a"+want+"\n" {
		t.Errorf("text %q, printed %q, want %q", sample.Text, plain, want)
	}

	// The same text comes from the exported model, also in a store.
	store := objectstest.S3(t)
	url := store.URL + "model"
	for _, command := range [][]string{{"export", "--model", filepath.Join(dir, "run"), "--output", url},
		{"import", "--from", url, "--output", filepath.Join(dir, "back")},
		{"import", "--from", filepath.Join(dir, "back"), "--output", url + "2"},
		{"eval", "--model", url + "2", "--plan", filepath.Join(dir, "plan.json"), "--samples", "2"}} {
		if code, _, stderr := call(t, command...); code != exitDone {
			t.Fatalf("mula %s: exit %d, %s", strings.Join(command, " "), code, stderr)
		}
	}
	args[2] = url + "2"
	if code, text, stderr := call(t, args...); code != exitDone || text != plain {
		t.Errorf("exit code %d, text %q, want %q; %s", code, text, plain, stderr)
	}
	for output, says := range map[string]string{url: "the output exists already", "https://host/x": "only reads"} {
		if code, _, stderr := call(t, "export", "--model", url, "--output", output); code == exitDone ||
			!strings.Contains(stderr, says) {
			t.Errorf("an export to %s: exit %d, %s", output, code, stderr)
		}
	}
}
