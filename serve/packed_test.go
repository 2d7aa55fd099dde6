package serve

import (
	"encoding/json"
	"slices"
	"strconv"
	"testing"

	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"

	"mula/blend/plantest"
	"mula/shards"
)

// The rows of a packed plan are served with the lengths, the padding and the version of their
// order. The shard of each document is served, too.
func TestPackedPlanIsServed(t *testing.T) {
	dir := t.TempDir()
	makePlan(t, dir, shards.UInt16, 1500)
	plan := plantest.Seal(t, dir, "plan.json",
		"sequence_length: 64\npacking: best_fit\npad: 9\nsources:\n- {name: web, shards: [web-0, web-1]}\n")
	s := serveData(t, plantest.Open(t, plan), Options{})
	response, err := s.client.Get("http://mula/v1/stream?batch_size=8&columns=tokens,lengths,document_starts,shard")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	r, err := ipc.NewReader(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Release()
	for key, want := range map[string]string{"mula.padding": "9", "mula.order_version": "packed 1"} {
		if got, _ := r.Schema().Metadata().GetValue(key); got != want {
			t.Errorf("%s is %q, want %q", key, got, want)
		}
	}
	position, padded := int64(0), 0
	for r.Next() {
		record := r.RecordBatch()
		lengths := record.Column(record.Schema().FieldIndices("lengths")[0]).(*array.Int32).Values()
		rows := record.Column(record.Schema().FieldIndices("tokens")[0]).(*array.FixedSizeList)
		tokens := rows.ListValues().(*array.Uint16).Values()
		for row, n := range lengths {
			sample, err := s.data.Locate(position)
			if err != nil {
				t.Fatal(err)
			}
			want := make([]uint32, 65)
			if err := s.data.Tokens(want, sample); err != nil {
				t.Fatal(err)
			}
			for i, id := range want {
				if uint32(tokens[row*65+i]) != id || i >= int(n) && id != 9 {
					t.Fatalf("position %d: token %d of %d is %d, want %d", position, i, n, tokens[row*65+i], id)
				}
			}
			padded += 65 - int(n)
			position++
		}
	}
	if err := r.Err(); err != nil || position != s.data.Length() || padded == 0 {
		t.Errorf("%d of %d rows with %d tokens of padding: %v", position, s.data.Length(), padded, err)
	}
	var seen []int
	for position := range s.data.Length() {
		_, parts, err := s.data.Peek(t.Context(), position)
		if err != nil {
			t.Fatal(err)
		}
		if parts[0].Shard == parts[len(parts)-1].Shard {
			continue // all in one
		}
		response, err := s.client.Get("http://mula/v1/peek?position=" + strconv.FormatInt(position, 10))
		if err != nil {
			t.Fatal(err)
		}
		var at place
		err = json.NewDecoder(response.Body).Decode(&at)
		response.Body.Close()
		if err != nil || len(at.Documents) != len(parts) {
			t.Fatalf("position %d: %+v, %v", position, at, err)
		}
		for i, d := range at.Documents {
			if d.Shard != parts[i].Shard || d.ID != parts[i].ID {
				t.Errorf("position %d: %+v, want %+v", position, d, parts[i])
			}
			if !slices.Contains(seen, d.Shard) {
				seen = append(seen, d.Shard)
			}
		}
	}
	if len(seen) != 2 {
		t.Errorf("no sample has documents of both shards")
	}
}
