package blend

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/apache/arrow-go/v18/arrow/ipc"

	"mula/blend/fingerprint"
)

// With -update, the files that this package writes are rewritten. The files that other programs
// make from them must follow, by the commands in testdata/README.md. The plan and the order are
// frozen: a difference there is a new order version, not an update.
var update = flag.Bool("update", false, "write the golden files of this package again")

// The plan of the mixed corpus is the one in testdata, and gives the order that the Python
// implementation of the format page computes.
func TestFrozenPlan(t *testing.T) {
	c, text := mixed(t)
	p := c.seal(text)
	if *update {
		if err := p.Write(filepath.Join(c.dir, "plan.json")); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(filepath.Join(c.dir, "plan.json"))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile("testdata/plan.json", data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	frozen, err := ReadPlan("testdata/plan.json")
	if err != nil {
		t.Fatal(err)
	}
	if frozen.Fingerprint() != p.Fingerprint() {
		t.Errorf("sealed again the plan is %s, not %s", p.Fingerprint(), frozen.Fingerprint())
	}
	compareOrder(t, frozen, "testdata/order.json")
}

// A plan that the Python implementation made, of sources far larger than fit a test: its
// fingerprint, its check values and its order are ours, and every listed sample leads back to its
// position.
func TestPlanOfOtherImplementation(t *testing.T) {
	p, err := ReadPlan("testdata/large.json")
	if err != nil {
		t.Fatal(err)
	}
	compareOrder(t, p, "testdata/large_order.json")
}

func compareOrder(t *testing.T, p *Plan, path string) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var golden struct {
		Rows [][4]int64
	}
	if err := json.Unmarshal(data, &golden); err != nil {
		t.Fatal(err)
	}
	if len(golden.Rows) < 200 {
		t.Fatalf("%s has %d rows", path, len(golden.Rows))
	}
	for _, want := range golden.Rows {
		s, err := p.Locate(want[0])
		if err != nil {
			t.Fatal(err)
		}
		if got := [4]int64{s.Position, int64(s.Source), s.Epoch, s.Window}; got != want {
			t.Fatalf("position, source, epoch, window: %v, want %v", got, want)
		}
		if back, ok := p.Position(s.Source, s.Epoch, s.Window); !ok || back != want[0] {
			t.Fatalf("%v: back at %d, %v", want, back, ok)
		}
	}
}

// The current stream equals the values that pyarrow read from testdata/stream.arrow. The fifteen
// lines of Python in the format page computed the fingerprints that this package computes.
func TestStreamAsPyarrowReadsIt(t *testing.T) {
	c, text := mixed(t)
	d := c.open(text)
	const batch = 48
	if *update {
		var b bytes.Buffer
		if err := WriteIPC(t.Context(), &b, d, StreamOptions{BatchSize: batch}); err != nil {
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
