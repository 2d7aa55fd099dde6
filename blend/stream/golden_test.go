package stream

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"testing"

	"github.com/apache/arrow-go/v18/arrow/ipc"

	"mula/blend/fingerprint"
)

// With -update, the files that this package writes are rewritten. Then make the files of the other
// programs from them, with the commands in testdata/README.md.
var update = flag.Bool("update", false, "write the golden files of this package again")

// The current stream equals the values that pyarrow read from testdata/stream.arrow. The fifteen
// lines of Python in the format page computed the fingerprints that this package computes.
func TestStreamAsPyarrowReadsIt(t *testing.T) {
	c, text := mixed(t)
	d := c.open(text)
	const batch = 48
	if *update {
		var b bytes.Buffer
		if err := WriteIPC(t.Context(), &b, d, Options{BatchSize: batch}); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile("testdata/stream.arrow", b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want := expected(t, d, 0, d.Length())

	f, err := os.Open("testdata/stream.arrow")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r, err := ipc.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Release()
	var stored []row
	for r.Next() {
		stored = append(stored, rowsOf(t, r.RecordBatch())...)
	}
	if err := r.Err(); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	if fmt.Sprint(stored) != fmt.Sprint(want) {
		t.Error("testdata/stream.arrow is not what the stream holds today")
	}

	var golden struct {
		Schema   []string
		Metadata map[string]string
		Records  []int
		Rows     []struct {
			Position, Epoch, Window int64
			Source                  string
			Tokens                  []uint32
			Starts                  []int32 `json:"document_starts"`
		}
		Log []json.RawMessage
	}
	data, err := os.ReadFile("testdata/stream.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &golden); err != nil {
		t.Fatal(err)
	}
	var got []row
	for _, g := range golden.Rows {
		source := -1
		for i, s := range d.Sources {
			if s.Name == g.Source {
				source = i
			}
		}
		got = append(got, row{g.Position, g.Epoch, g.Window, source, g.Source, g.Tokens, g.Starts})
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Error("pyarrow read other rows than the stream holds")
	}
	if fmt.Sprint(golden.Schema) != "[position: int64 source: dictionary<values=string, indices=int32, ordered=0> "+
		"epoch: int32 window: int64 "+
		"tokens: fixed_size_list<item: uint16 not null>[17] document_starts: list<item: int32 not null>]" {
		t.Errorf("pyarrow's schema: %s", golden.Schema)
	}
	if golden.Metadata["mula.plan"] != d.Fingerprint() || golden.Metadata["mula.sequence_length"] != "16" ||
		golden.Metadata["mula.batch_size"] != "48" {
		t.Errorf("pyarrow's metadata: %v", golden.Metadata)
	}

	var log bytes.Buffer
	w, err := fingerprint.NewWriter(&log, fingerprint.Header{Plan: d.Fingerprint(), SequenceLength: 16,
		BatchSize: batch})
	if err != nil {
		t.Fatal(err)
	}
	if err := Hash(t.Context(), d, HashOptions{BatchSize: batch, Prefetch: 1}, w.Write); err != nil {
		t.Fatal(err)
	}
	var python bytes.Buffer
	for _, line := range golden.Log {
		json.Compact(&python, line)
		python.WriteByte('\n')
	}
	if log.String() != python.String() || len(golden.Log) != 14 {
		t.Errorf("our log:\n%s\nPython's:\n%s", &log, &python)
	}
}
