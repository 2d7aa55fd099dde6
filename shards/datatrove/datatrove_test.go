package datatrove

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"mula/shards/layout"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// By humanize 4.17.0.
func TestMetric(t *testing.T) {
	for n, want := range map[int64]string{
		0: "0.00 T", 7: "7.00 T", 999: "999 T", 1000: "1.00 kT", 1234: "1.23 kT", 9999: "10.0 kT", 9994: "9.99 kT",
		9995: "9.99 kT", 12345: "12.3 kT",
		99950: "100 kT", 99949: "99.9 kT", 999499: "999 kT", 999500: "1.00 MT", 999999: "1.00 MT", 1000000: "1.00 MT",
		4432487302: "4.43 GT",
		999999999:  "1.00 GT", 123456789012345: "123 TT",
	} {
		if got := metric(n); got != want {
			t.Errorf("%d is %q, want %q", n, got, want)
		}
	}
}

// put writes the files of a shard. It skips index if it is nil, and metadata if it is "-".
func put(t testing.TB, dir string, ds, index []byte, metadata string) string {
	t.Helper()
	prefix := filepath.Join(dir, "x")
	files := map[string][]byte{dsExt: ds}
	if index != nil {
		files[indexExt] = index
	}
	if metadata != "-" {
		files[metadataExt] = []byte(metadata)
	}
	for ext, data := range files {
		if err := os.WriteFile(prefix+ext, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return prefix
}

func read(prefix string, h layout.Hints) (docs [][]uint32, err error) {
	r, err := open(prefix, h)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	for d, err := range r.All(context.Background()) {
		if err != nil {
			return docs, err
		}
		docs = append(docs, slices.Clone(d.Tokens))
	}
	if total := int64(len(slices.Concat(docs...))); total != r.Tokens() || r.Documents() >= 0 &&
		r.Documents() != int64(len(docs)) {
		return docs, fmt.Errorf("x: %d tokens were given of %d, %d documents of %d", total, r.Tokens(), len(docs),
			r.Documents())
	}
	return docs, nil
}

func ends(list ...uint64) (out []byte) {
	for _, end := range list {
		out = binary.LittleEndian.AppendUint64(out, end)
	}
	return out
}

func TestReads(t *testing.T) {
	ids := []byte{1, 0, 2, 0, 9, 0, 3, 0}
	for name, c := range map[string]struct {
		index    []byte
		metadata string
		hints    layout.Hints
		want     string
	}{
		"all":          {ends(3, 4), "name|2\n4\n4.00 T", layout.NoHints, "[[1 2 9] [3]]"},
		"doubled size": {ends(3, 4), "Unknown Tokenizer|2|2\n4\n4.00 T", layout.NoHints, "[[1 2 9] [3]]"},
		"no metadata":  {ends(1, 1, 4), "-", layout.Hints{VocabSize: 50257, EOD: -1}, "[[1] [] [2 9 3]]"},
		"four bytes":   {ends(2), "-", layout.NoHints, "[[131073 196617]]"},
		"half of them": {ends(4), "-", layout.Hints{VocabSize: 100278, EOD: -1},
			"x.ds has 8 bytes, but 4 ids of type uint32 have 16: it was cut short"},
		"undecided": {ends(4), "-", layout.NoHints,
			"x.ds has 8 bytes for 4 ids: either ids of 2 bytes, or a truncated array of wider ids; give " +
				"--vocab-size or --dtype"},
		"contradiction": {ends(4), "name|2", layout.Hints{VocabSize: 100278, EOD: -1},
			"too few for a vocabulary of 100278 ids"},
		"old metadata": {ends(3, 4), "name\n4\n4.00 T", layout.Hints{VocabSize: 50257, EOD: -1}, "[[1 2 9] [3]]"},
		"no index":     {nil, "name|2\n4", layout.Hints{EOD: 9}, "[[1 2 9] [3]]"},
		"only ids":     {nil, "-", layout.Hints{EOD: 9, DType: "uint16"}, "[[1 2 9] [3]]"},
		"no id":        {nil, "name|2\n4", layout.NoHints, "give the end-of-document id"},
		"no type":      {nil, "-", layout.Hints{EOD: 9}, "the type of its ids is unknown"},
		"another count": {ends(3, 4), "name|2\n5\n5.00 T", layout.NoHints,
			"x.ds.metadata has tokens 5, but found 4; they belong to different shards"},
		"no count": {ends(3, 4), "name|2\nfour\n4.00 T", layout.NoHints,
			`x.ds.metadata:2: invalid number of tokens "four"`},
		"odd size": {ends(3, 4), "name|3\n4", layout.NoHints, `x.ds.metadata:1: ids of "3" bytes`},
		"backwards": {ends(3, 2, 4), "-", layout.Hints{VocabSize: 50257, EOD: -1},
			"x.ds.index: document 1 (byte 8) ends at token 2, but the previous document ends at 3"},
		"beyond": {ends(3, 1<<63), "name|2", layout.NoHints, "(byte 8) ends at token 9223372036854775808, "},
		"beyond, before": {ends(1<<40, 4), "name|2", layout.NoHints,
			"document 0 (byte 0) ends at token 1099511627776"},
		"short of the end": {ends(3), "name|2", layout.NoHints, "ends at token 3, "},
		"cut index":        {ends(3, 4)[:15], "name|2", layout.NoHints, "15 bytes are not a multiple of 8"},
	} {
		docs, err := read(put(t, t.TempDir(), ids, c.index, c.metadata), c.hints)
		got := fmt.Sprint(docs)
		if err != nil {
			got = err.Error()
		}
		if got != c.want && (err == nil || !strings.Contains(got, c.want)) {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
	prefix := put(t, t.TempDir(), ids, ends(4), "name|2")
	if err := os.WriteFile(prefix+lossExt, []byte{1, 1, 0, 1}, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := read(prefix, layout.NoHints); err == nil ||
		!strings.Contains(err.Error(), "x.ds.loss is a loss mask") {
		t.Errorf("a shard with a mask: %v", err)
	}
}

func FuzzReader(f *testing.F) {
	f.Add([]byte{1, 0, 2, 0, 9, 0, 3, 0}, ends(3, 4), "name|2\n4\n4.00 T", int64(-1))
	f.Add([]byte{1, 0, 2, 0}, ends(1<<62, 2), "-", int64(2))
	f.Add([]byte{1, 0, 2, 0, 3, 0}, []byte{}, "-", int64(2))
	f.Fuzz(func(t *testing.T, ds, index []byte, metadata string, eod int64) {
		if len(index) == 0 {
			index = nil
		}
		docs, err := read(put(t, t.TempDir(), ds, index, metadata), layout.Hints{EOD: eod})
		if err == nil && index != nil && len(docs) != len(index)/8 {
			t.Errorf("%d documents of %d", len(docs), len(index)/8)
		}
	})
}
