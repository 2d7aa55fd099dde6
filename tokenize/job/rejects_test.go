package job

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"mula/internal/filesystem/faultfs"
)

// lines writes a file with all documents and returns its path. The first bad documents are invalid.
func lines(t *testing.T, bad, all int) string {
	t.Helper()
	var text strings.Builder
	for i := range all {
		if i < bad {
			text.WriteString("nonsense\n")
		} else {
			fmt.Fprintf(&text, `{"id":"%d","text":"document %d"}`+"\n", i, i)
		}
	}
	return put(t, fmt.Sprintf("of-%d.jsonl", all), text.String())
}

// A job fails if it skips more documents than are allowed: before a shard is written, with the list
// of the skipped documents, and every time it is started. With a higher limit it resumes.
func TestMaxRejects(t *testing.T) {
	inputs := []string{lines(t, 0, 400), lines(t, 3, 599), lines(t, 0, 1)} // 3 of 1,000
	for _, test := range []struct {
		limit *RejectLimit
		max   int64 // documents
		fails string
	}{
		{nil, 0, ""},
		{&RejectLimit{Documents: 3}, 0, ""},
		{&RejectLimit{Share: 0.003}, 0, ""},
		{&RejectLimit{Share: 1}, 0, ""},
		{&RejectLimit{Documents: 2}, 0, "3 of 1,000 documents (0.3 %) were skipped, and at most 2 may be"},
		{&RejectLimit{Share: 0.0029}, 0, "3 of 1,000 documents (0.3 %) were skipped, and at most 0.29 % may be"},
		{&RejectLimit{}, 0, "at most 0 may be"},
		{&RejectLimit{}, 400, ""}, // the bad ones come after the last that is wanted
		{&RejectLimit{}, 401, "3 of 404 documents"},
		{&RejectLimit{Documents: 3}, 401, ""},
	} {
		dir := t.TempDir()
		o := Options{Tokenizer: bytesTokenizer(t, ""), AppendEOD: true, EOD: 256, Inputs: inputs,
			Output: filepath.Join(dir, "x"), OnError: Skip,
			Rejects: filepath.Join(dir, "rejects"), MaxDocuments: test.max, MaxRejects: test.limit, PieceBytes: 1500,
			tuning: quick}
		// Several processes, and after them a process that resumes.
		errs := make([]error, 3)
		var group sync.WaitGroup
		for i := range errs {
			group.Go(func() { _, errs[i] = Run(t.Context(), o) })
		}
		group.Wait()
		_, again := Run(t.Context(), o)
		for _, err := range append(errs, again) {
			if test.fails == "" && err != nil || test.fails != "" &&
				(err == nil || !strings.Contains(err.Error(), test.fails) ||
					!strings.Contains(err.Error(), o.Rejects)) {
				t.Errorf("%+v, %d documents: %v, want %q", test.limit, test.max, err, test.fails)
			}
		}
		if test.fails == "" {
			continue
		}
		_, missing := os.Stat(o.Output + ".idx")
		list, err := os.ReadFile(o.Rejects)
		if !errors.Is(missing, os.ErrNotExist) || err != nil || strings.Count(string(list), "\n") != 3 {
			t.Errorf("%+v: a shard is there (%v), or the list is not: %q, %v", test.limit, missing, list, err)
		}
		o.MaxRejects = &RejectLimit{Documents: 3}
		want := int64(997)
		if test.max > 0 {
			want = test.max
		}
		if s, err := Run(t.Context(), o); err != nil || s.Documents != want {
			t.Errorf("%+v: with a higher limit %+v, %v", test.limit, s, err)
		}
		o.MaxRejects = test.limit
		if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), test.fails) {
			t.Errorf("%+v: when all is done %v", test.limit, err)
		}
	}
}

// The fraction is relative to the documents that were read; a sample keeps some of them.
func TestMaxRejectsOfSample(t *testing.T) {
	o := Options{Tokenizer: bytesTokenizer(t, ""), AppendEOD: true, EOD: 256, Inputs: []string{lines(t, 100, 10_000)},
		OnError: Skip, Sample: 0.1, tuning: quick}
	for share, fails := range map[float64]bool{0.02: false, 0.005: true} {
		o.Output, o.MaxRejects = filepath.Join(t.TempDir(), "x"), &RejectLimit{Share: share}
		if _, err := Run(t.Context(), o); (err != nil) != fails {
			t.Errorf("share %v: %v", share, err)
		}
	}
}

// A resumed job fails or succeeds like an uninterrupted job.
func TestMaxRejectsResumed(t *testing.T) {
	t.Parallel()
	for limit, fails := range map[int64]bool{2: true, 3: false} {
		o := Options{Tokenizer: bytesTokenizer(t, ""), AppendEOD: true, EOD: 256, Inputs: []string{lines(t, 3, 400),
			lines(t, 0, 300)}, Output: filepath.Join(t.TempDir(), "x"),
			OnError: Skip, MaxRejects: &RejectLimit{Documents: limit}, PieceBytes: 2000, tuning: quick}
		o.FS = faultfs.FailOn(faultfs.Rename, "unit-00003.json", syscall.EIO)
		if _, err := Run(context.WithoutCancel(t.Context()), o); !errors.Is(err, syscall.EIO) {
			t.Fatal(err)
		}
		o.FS = nil
		if _, err := Run(t.Context(), o); (err != nil) != fails ||
			fails && !strings.Contains(err.Error(), "3 of 700 documents") {
			t.Errorf("limit %d: %v", limit, err)
		}
	}
}
