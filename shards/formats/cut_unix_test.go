//go:build unix

package formats

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"mula/internal/mapping"
	"mula/shards"
	"mula/shards/layout"
)

// A shard of any layout whose files, one or another, are cut short after it was opened gives all of
// its documents or an error.
func TestFilesCutWhileOpen(t *testing.T) {
	var docs []document
	for d := range 300 {
		doc := document{Tokens: make([]uint32, 100), Origin: shards.DocumentOrigin{ID: fmt.Sprint(d), File: "x",
			Line: 1}}
		for i := range doc.Tokens {
			doc.Tokens[i] = uint32(d*31+i*7)%50000 + 1
		}
		docs = append(docs, doc)
	}
	for _, l := range all {
		folder := t.TempDir()
		prefix := filepath.Join(folder, "x")
		if _, err := write(l, prefix, testInfo, Options{}, docs); err != nil {
			t.Fatal(err)
		}
		var files []string
		err := filepath.Walk(folder, func(path string, info os.FileInfo, err error) error {
			if err == nil && info.Mode().IsRegular() {
				files = append(files, path)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		failed := 0
		for _, file := range files {
			for _, part := range []int64{0, 2} { // of the file, as its inverse
				r, err := Open(prefix, layout.NoHints)
				if err != nil {
					t.Fatalf("%v: %v", l, err)
				}
				whole, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				left := int64(0)
				if part > 0 {
					left = int64(len(whole)) / part
				}
				if err := os.Truncate(file, left); err != nil {
					t.Fatal(err)
				}
				n := 0
				for d, err := range r.All(context.Background()) {
					if err != nil {
						n = -1
						break
					}
					if n == len(docs) || !same([]document{{d.Tokens, d.Origin}}, docs[n:n+1]) {
						t.Errorf("%v, %s cut: document %d is another", l, filepath.Base(file), n)
						break
					}
					n++
				}
				if n >= 0 && n != len(docs) {
					t.Errorf("%v, %s cut: %d documents and no error", l, filepath.Base(file), n)
				}
				if n < 0 {
					failed++
				}
				r.Close()
				if err := os.WriteFile(file, whole, 0o666); err != nil {
					t.Fatal(err)
				}
			}
		}
		if failed < 2 {
			t.Errorf("%v: %d errors of %d cuts", l, failed, 2*len(files))
		}
	}
}

// Sums that are cut short while ids are compared with them are an error about the sums.
func TestSumsCutWhileOpen(t *testing.T) {
	for _, test := range summed {
		prefix := filepath.Join(t.TempDir(), "x")
		// whose sums take more than a page
		big := document{Tokens: make([]uint32, 3_000_000), Origin: shards.DocumentOrigin{ID: "a", File: "x", Line: 1}}
		if _, err := write(test.layout, prefix, testInfo, test.options, []document{big}); err != nil {
			t.Fatal(err)
		}
		r, err := Open(prefix, layout.NoHints)
		if err != nil {
			t.Fatal(err)
		}
		path := prefix + test.sums
		if err := os.Truncate(path, 0); err != nil {
			t.Fatal(err)
		}
		var failed error
		for _, err := range r.All(context.Background()) {
			failed = err
		}
		cutError(t, test.name, failed, path)
		r.Close()
	}
}

func cutError(t *testing.T, what string, err error, path string) {
	t.Helper()
	var at *os.PathError
	if !errors.As(err, &at) || at.Path != path || !errors.Is(err, mapping.ErrUnreadable) {
		t.Errorf("%s: %v; it is to name %s, which was cut short", what, err, path)
	}
}
