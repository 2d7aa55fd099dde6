// Package checkpointtest has models and tokenizers on disk, and changed checkpoints, for tests.
package checkpointtest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/moe"
	"mula/shards"
	"mula/tokenize"
	"mula/tokenize/documents"
	"mula/xpu"
	"mula/xpu/cpu"
)

// Device returns a device on the processor, which is closed at the end of the test.
func Device(t testing.TB, threads int) *cpu.Device {
	d := cpu.New(threads, xpu.FP32)
	t.Cleanup(d.Close)
	return d
}

// Tokenizer returns a tokenizer.json that mula reads, with <|endoftext|>, <|padding|> and a token
// for each byte.
func Tokenizer(t testing.TB) string {
	t.Helper()
	text, err := tokenize.Train(context.Background(),
		func(yield func(documents.Document, error) bool) { yield(documents.Document{Text: []byte("a b")}, nil) },
		tokenize.TrainOptions{VocabSize: 258, SpecialTokens: []string{"<|endoftext|>", "<|padding|>"},
			Pattern: tokenize.GPT2, Workers: 1})
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// Names lists the files and directories in dir.
func Names(t testing.TB, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// Files returns the contents of the files in dir by name.
func Files(t testing.TB, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, name := range Names(t, dir) {
		content, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		all[name] = string(content)
	}
	return all
}

// SameFiles compares the files in two directories. The files in except may differ.
func SameFiles(t testing.TB, what, want, got string, except ...string) {
	t.Helper()
	a, b := Files(t, want), Files(t, got)
	for name := range b {
		if _, known := a[name]; !known {
			t.Errorf("%s: %s is only in %s", what, name, got)
		}
	}
	for name, content := range a {
		if other, known := b[name]; !known {
			t.Errorf("%s: %s is only in %s", what, name, want)
		} else if other != content && !slices.Contains(except, name) {
			t.Errorf("%s: %s differs", what, name)
		}
	}
}

// Model writes a Hugging Face model with drawn weights into a new directory, and adds the given
// files. change changes its configuration, which is mula-nano with the end of documents 0.
func Model(t testing.TB, change func(*moe.Config), files map[string]string) (dir string, m *moe.Model) {
	t.Helper()
	c, err := moe.Preset("mula-nano")
	if err != nil {
		t.Fatal(err)
	}
	c.EOSTokenID = 0
	if change != nil {
		change(&c)
	}
	if m, err = moe.New(c, Device(t, 1)); err != nil {
		t.Fatal(err)
	}
	m.Init(3)
	dir = t.TempDir()
	if err := m.Save(t.Context(), dir, moe.SaveOptions{ShardSize: 100_000}); err != nil {
		t.Fatal(err)
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir, m
}

// Rewrite changes a file of the checkpoint in dir, and its size and hash in the manifest.
func Rewrite(t testing.TB, dir, name string, change func(content []byte) []byte) {
	t.Helper()
	path, manifest := filepath.Join(dir, name), filepath.Join(dir, "manifest.json")
	old, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	content := change(bytes.Clone(old))
	if bytes.Equal(content, old) {
		t.Fatalf("%s has not changed", path)
	}
	if err := os.WriteFile(path, content, 0o644); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(manifest)
	if err != nil {
		t.Fatal(err)
	}
	var m struct {
		Format int                        `json:"format"`
		Step   int64                      `json:"step"`
		Files  map[string]shards.FileInfo `json:"files"`
	}
	if err := json.Unmarshal(text, &m); err != nil {
		t.Fatal(err)
	}
	m.Files[name] = shards.FileInfo{Bytes: int64(len(content)), SHA256: fmt.Sprintf("%x", sha256.Sum256(content))}
	if text, err = json.Marshal(m); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(manifest, text, 0o644); err != nil {
		t.Fatal(err)
	}
}

// WeightsHash computes the hash of a model's weights as docs/formats/run.md defines it. The weights
// must be memory of the host.
func WeightsHash(parameters []*moe.Parameter) string {
	text := sha256.New()
	for _, p := range parameters {
		weights := sha256.New()
		if err := binary.Write(weights, binary.LittleEndian, p.Weight.Floats()); err != nil {
			panic(err) // a hash accepts all bytes
		}
		shape := strings.ReplaceAll(strings.Trim(fmt.Sprint(p.Shape), "[]"), " ", ",")
		fmt.Fprintf(text, "%s [%s] %x\n", p.Name, shape, weights.Sum(nil))
	}
	return fmt.Sprintf("%x", text.Sum(nil))
}
