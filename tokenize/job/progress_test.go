package job

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A line that reaches over several units counts as read when the unit is complete in which it
// begins, although the others have nothing to do.
func TestProgressOfLongLine(t *testing.T) {
	t.Parallel()
	text := `{"text":"first"}` + "\n" + `{"text":"` + strings.Repeat("long ", 20_000) + `"}` + "\n" +
		`{"text":"last"}` + "\n"
	o := Options{Tokenizer: bytesTokenizer(t, ""), AppendEOD: true, EOD: 256, Inputs: []string{put(t, "x.jsonl", text)},
		Output:     filepath.Join(t.TempDir(), "x"),
		PieceBytes: 10_000, tuning: quick}
	interrupted(t, o)
	read := func() int64 {
		t.Helper()
		if err := o.check(); err != nil {
			t.Fatal(err)
		}
		f, done, err := openWorkDir(t.Context(), &o)
		if err != nil || done != nil {
			t.Fatal(done, err)
		}
		defer f.close(t.Context())
		if len(f.d.Units) != 10 {
			t.Fatalf("%d units", len(f.d.Units))
		}
		p := newProcess(f, time.Now())
		if err := p.unitQueue.findComplete(); err != nil {
			t.Fatal(err)
		}
		return p.reckon().InputRead
	}
	if got := read(); got != int64(len(text)) {
		t.Errorf("of complete units %d bytes are read, want %d", got, len(text))
	}
	// Without the unit in which the line starts, only the last unit remains, in which another line
	// starts.
	if err := os.Remove(filepath.Join(o.Output+FolderSuffix, "unit-00000.json")); err != nil {
		t.Fatal(err)
	}
	if got, want := read(), int64(len(text)/10); got > want+1 {
		t.Errorf("without the first unit %d bytes are read, want about %d", got, want)
	}
}

// Documents that take long to encode are told of while they are.
func TestLargeDocuments(t *testing.T) {
	var l live
	if l.begins(largeDocument-1) || !l.begins(largeDocument) || !l.begins(2*largeDocument) {
		t.Error("the wrong documents are large")
	}
	if l.large.Load() != 2 || l.largeBytes.Load() != 3*largeDocument {
		t.Errorf("%d large documents of %d bytes", l.large.Load(), l.largeBytes.Load())
	}
	l.ends(largeDocument)
	if l.large.Load() != 1 || l.largeBytes.Load() != 2*largeDocument {
		t.Errorf("%d large documents of %d bytes", l.large.Load(), l.largeBytes.Load())
	}
}
