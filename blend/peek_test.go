package blend

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mula/shards"
)

// Peek covers every token of a window with parts of the right documents, and where finds exactly
// the positions at which Peek shows the document: the two are each other's inverse, over all
// documents and positions of a plan with stages, epochs, skips and validation.
func TestWhereInvertsPeek(t *testing.T) {
	c, text := mixed(t)
	d := c.open(text)
	type place struct {
		position int64
		from, to int
	}
	want := map[string][]place{} // by document id
	for position := range d.Length() {
		s, parts, err := d.Peek(t.Context(), position)
		if err != nil {
			t.Fatal(err)
		}
		shard := shardOf(t, d, s.Source, s.Shard)
		at := 0
		for _, p := range parts {
			if p.From != at || p.To <= p.From {
				t.Fatalf("position %d: a part [%d, %d) after token %d", position, p.From, p.To, at)
			}
			at = p.To
			for _, token := range []int64{s.Token + int64(p.From), s.Token + int64(p.To) - 1} {
				if at, err := shard.DocumentAt(token); at != p.Number || err != nil {
					t.Fatalf("position %d: token %d is of document %d, %v, not %d", position, token, at, err, p.Number)
				}
			}
			name, _ := filepath.Rel(c.dir, shard.Prefix())
			if p.ID != fmt.Sprintf("%s/%d", name, p.Number) || p.File != name+".jsonl" || p.Line != p.Number+1 ||
				p.Source != s.Source || p.Shard != s.Shard {
				t.Fatalf("position %d: %+v", position, p)
			}
			want[p.ID] = append(want[p.ID], place{position, p.From, p.To})
		}
		if at != d.SequenceLength+1 {
			t.Fatalf("position %d: the parts end at token %d", position, at)
		}
	}
	uses := map[Use]int{}
	for i := range d.Sources {
		for k := range d.Sources[i].Shards {
			shard := shardOf(t, d, i, k)
			name, _ := filepath.Rel(c.dir, shard.Prefix())
			for number := range shard.Documents() {
				id := fmt.Sprintf("%s/%d", name, number)
				got := map[place]bool{}
				n := 0
				for o, err := range d.Where(context.Background(), id) {
					if err != nil {
						t.Fatal(err)
					}
					n++
					uses[o.Use]++
					if o.Source != i || o.Shard != k || o.Number != number || o.ID != id {
						t.Fatalf("%s: found %+v", id, o)
					}
					drawn := o.Use == Drawn || o.Use == SkippedOver
					if drawn != (o.Sample.Position >= 0) || (o.Use == SkippedOver) != o.Sample.Skipped {
						t.Fatalf("%s: %v at %+v", id, o.Use, o.Sample)
					}
					if drawn {
						if s, err := d.Locate(o.Sample.Position); err != nil || s != o.Sample {
							t.Fatalf("%s: %+v, but there is %+v", id, o.Sample, s)
						}
						got[place{o.Sample.Position, o.From, o.To}] = true
					}
					if o.Use == HeldOut && o.Sample.Window < d.Sources[i].Training() {
						t.Fatalf("%s: window %d is not held out", id, o.Sample.Window)
					}
					if o.Use == NoWindow && documentStart(t, shard, number+1) > documentStart(t, shard, number) &&
						documentStart(t, shard, number) <= d.Sources[i].windows.ShardCount(k)*int64(d.SequenceLength) &&
						d.Sources[i].windows.ShardCount(k) > 0 {
						t.Fatalf("%s is in a window", id)
					}
				}
				if n == 0 {
					t.Fatalf("%s was not found", id)
				}
				if len(got) != len(want[id]) {
					t.Fatalf("%s: where gives %v, peek %v", id, got, want[id])
				}
				for _, p := range want[id] {
					if !got[p] {
						t.Fatalf("%s: where does not give %v", id, p)
					}
				}
			}
		}
	}
	for _, use := range []Use{Drawn, SkippedOver, HeldOut, NoWindow} {
		if uses[use] == 0 {
			t.Errorf("no window is %v: the test does not show it", use)
		}
	}
	for range d.Where(context.Background(), "nobody") {
		t.Error("an unknown document was found")
	}
}

// A window that the plan ends before is said to be out of reach, and an iteration can be stopped.
func TestWhereNotReached(t *testing.T) {
	c := newCorpus(t)
	c.shard("a", shards.UInt16, 1000)
	d := c.open("sequence_length: 16\nsamples: 5\nsources:\n  - {name: a, shards: [a]}\n")
	uses := map[Use]int{}
	for o, err := range d.Where(context.Background(), "a/0") {
		if err != nil {
			t.Fatal(err)
		}
		uses[o.Use]++
	}
	if uses[Drawn] != 5 || uses[NotReached] != 62-5 {
		t.Errorf("%v", uses)
	}
	for range d.Where(context.Background(), "a/0") {
		break
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for _, err := range d.Where(ctx, "a/0") {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("after cancelling: %v", err)
		}
	}
}

// Documents that several shards have under the same id are all found; shards that do not know their
// documents are not passed over in silence.
func TestWhereOverShards(t *testing.T) {
	c := newCorpus(t)
	c.shard("a", shards.UInt16, 100)
	c.shard("b", shards.UInt16, 100)
	for _, ending := range []string{".docs.arrow", ".json"} {
		if err := os.Remove(filepath.Join(c.dir, "b"+ending)); err != nil {
			t.Fatal(err)
		}
	}
	d := c.open("sequence_length: 16\nsources:\n  - {name: a, shards: [a]}\n  - {name: b, shards: [b]}\n")
	n := 0
	for o, err := range d.Where(context.Background(), "a/0") {
		if err != nil || o.Source != 0 {
			t.Fatal(o, err)
		}
		n++
	}
	if n != 6 {
		t.Errorf("found %d windows, want 6", n)
	}
	n = 0
	for _, err := range d.Where(context.Background(), "b/0") {
		n++
		if err == nil || !strings.Contains(err.Error(), filepath.Join(c.dir, "b")) ||
			!strings.Contains(err.Error(), "docs.arrow") {
			t.Errorf("got %v", err)
		}
	}
	if n != 1 {
		t.Errorf("%d errors", n)
	}
	for position := range d.Length() {
		s, parts, err := d.Peek(t.Context(), position)
		if err != nil || len(parts) != 1 {
			t.Fatal(err, parts)
		}
		if p := parts[0]; s.Source == 1 && (p.ID != "" || p.File != "" || p.Line != 0 || p.Tokens != 100) {
			t.Errorf("%+v", p)
		}
	}
}
