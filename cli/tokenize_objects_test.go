package cli

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"mula/internal/objects"
	"mula/internal/objects/objectstest"
)

// Documents in a store become the shard of the same files on disk, however they are named.
func TestTokenizeObjects(t *testing.T) {
	t.Chdir(t.TempDir())
	store := objectstest.S3(t)
	var local []string
	for f := range 3 {
		var text strings.Builder
		for i := range 100 {
			fmt.Fprintf(&text, `{"text":"document %d of file %d"}`+"\n", i, f)
		}
		name := fmt.Sprintf("part-%d.jsonl", f)
		local = append(local, name)
		if err := os.WriteFile(name, []byte(text.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := objects.WriteFile(t.Context(), store.URL+"corpus/"+name, []byte(text.String())); err != nil {
			t.Fatal(err)
		}
	}
	run := func(args ...string) {
		t.Helper()
		if code, _, stderr := call(t, args...); code != exitDone {
			t.Fatalf("mula %s: exit %d, %s", strings.Join(args, " "), code, stderr)
		}
	}
	run(append([]string{"tokenizer", "train", "--vocab-size", "300", "--output", "tokenizer.json"}, local...)...)
	run("tokenizer", "train", "--vocab-size", "300", "--output", "remote.json", store.URL+"corpus/")
	same := func(got, want string) {
		t.Helper()
		a, err1 := os.ReadFile(got)
		b, err2 := os.ReadFile(want)
		if err1 != nil || err2 != nil || string(a) != string(b) {
			t.Errorf("%s differs from %s: %v, %v", got, want, err1, err2)
		}
	}
	same("remote.json", "tokenizer.json")
	tokenize := func(output string, inputs ...string) {
		t.Helper()
		run(append([]string{"tokenize", "--tokenizer", "tokenizer.json", "--output", output}, inputs...)...)
		same(output+".bin", "local.bin")
		same(output+".idx", "local.idx")
	}
	tokenize("local", local...)
	tokenize("folder", store.URL+"corpus")
	tokenize("pattern", store.URL+"corpus/part-[0-9].jsonl")
	list := local[0] + "\n\n" + store.URL + "corpus/part-1.jsonl\r\n" + store.URL + "corpus/part-2.jsonl"
	if err := os.WriteFile("list", []byte(list), 0o644); err != nil {
		t.Fatal(err)
	}
	tokenize("listed", "--files-from", "list")
	run("tokenize", "--tokenizer", "tokenizer.json", "--output", store.URL+"tokens/x", "--work", "work", local[0],
		local[1], local[2])
	for _, ending := range []string{".bin", ".idx", ".json", ".sums", ".docs.arrow"} {
		want, err := os.ReadFile("local" + ending)
		if err != nil {
			t.Fatal(err)
		}
		if got, _, err := objects.ReadFile(t.Context(), store.URL+"tokens/x"+ending, 1<<30); err != nil ||
			string(got) != string(want) {
			t.Errorf("%s in the store: %d bytes, want %d, %v", ending, len(got), len(want), err)
		}
	}
	for _, args := range [][]string{{"--output", store.URL + "tokens/x"}, {"--output", "y", "--work", "work"},
		{"--output", store.URL + "tokens/", "--work", "work"}} {
		args = append(append([]string{"tokenize", "--tokenizer", "tokenizer.json"}, args...), local[0])
		if code, _, stderr := call(t, args...); code != exitUsage || !strings.Contains(stderr, "--output") {
			t.Errorf("%q: exit %d, %s", args, code, stderr)
		}
	}
	if err := os.WriteFile("list", []byte("unknown://x/y\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, inputs := range [][]string{{"--files-from", "list"}, {"--files-from", "none"}, {store.URL + "none"},
		{store.URL + "corpus/*.txt"}} {
		args := append([]string{"tokenize", "--tokenizer", "tokenizer.json", "--output", "bad"}, inputs...)
		if code, _, stderr := call(t, args...); code == exitDone || !strings.Contains(stderr, inputs[len(inputs)-1]) {
			t.Errorf("%q: exit %d, %s", inputs, code, stderr)
		}
	}
	if _, err := os.Stat("bad.bin"); err == nil {
		t.Error("a refused command wrote a shard")
	}
}
