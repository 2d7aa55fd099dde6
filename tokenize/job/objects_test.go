package job

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"mula/internal/objects"
	"mula/internal/objects/objectstest"
)

// Several processes that read a store with faults write the ids of the local files, and a process
// that is interrupted resumes. A changed object ends the job, unless the read content is equal.
func TestObjects(t *testing.T) {
	c := makeCorpus(t, 21, 6, 60, false)
	local := t.TempDir()
	o := Options{Tokenizer: bytesTokenizer(t, ""), AppendEOD: true, EOD: 256, Inputs: c.inputs,
		Output: filepath.Join(local, "x"), PieceBytes: 1500, Shuffle: true, ShuffleSeed: 3, tuning: quick}
	if _, err := Run(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	store := objectstest.S3(t)
	put := func(input string, change func([]byte) []byte) {
		t.Helper()
		data, err := os.ReadFile(c.inputs[0][:len(c.inputs[0])-len(filepath.Base(c.inputs[0]))] + filepath.Base(input))
		if err != nil {
			t.Fatal(err)
		}
		if err := objects.WriteFile(t.Context(), input, change(data)); err != nil {
			t.Fatal(err)
		}
	}
	unchanged := func(data []byte) []byte { return data }
	o.Inputs = nil
	for _, input := range c.inputs {
		o.Inputs = append(o.Inputs, store.URL+"corpus/"+filepath.Base(input))
		put(o.Inputs[len(o.Inputs)-1], unchanged)
	}
	same := func(dir string) {
		t.Helper()
		got, want := outputs(t, dir), outputs(t, local)
		for _, name := range []string{"x.bin", "x.idx"} {
			if got[name] != want[name] || got[name] == "" {
				t.Errorf("%s has other bytes than from local files", name)
			}
		}
	}

	dir := t.TempDir()
	o.Output = filepath.Join(dir, "x")
	var count atomic.Int64
	store.Proxy.Disturb(func(r *http.Request) objectstest.Fault {
		switch n := count.Add(1); {
		case n%7 == 0:
			return objectstest.Fault{Status: 503}
		case n%5 == 0 && r.Method == http.MethodGet:
			return objectstest.Fault{Cut: 700}
		}
		return objectstest.Fault{}
	})
	var group sync.WaitGroup
	for range 2 {
		group.Go(func() {
			if _, err := Run(t.Context(), o); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	store.Proxy.Disturb(nil)
	same(dir)

	dir = t.TempDir()
	o.Output = filepath.Join(dir, "x")
	interrupted(t, o)
	put(o.Inputs[0], unchanged)
	put(o.Inputs[1], func(data []byte) []byte { return append(data, ' ') })
	if _, err := Run(t.Context(), o); err == nil ||
		!strings.Contains(err.Error(), o.Inputs[1]+" changed after the job") {
		t.Errorf("a changed object: %v", err)
	}
	put(o.Inputs[1], unchanged)
	if _, err := Run(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	same(dir)
	if s, err := Run(t.Context(), o); err != nil || !s.Before {
		t.Errorf("a complete job: %+v, %v", s, err)
	}
	o.Inputs = append(o.Inputs, o.Inputs[0])
	if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), "listed twice") {
		t.Errorf("an object that is listed twice: %v", err)
	}
}
