package stream

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"
	"testing"

	"mula/blend"
	"mula/blend/fingerprint"
)

func logOf(t testing.TB, d *blend.Data, o HashOptions) string {
	t.Helper()
	var b bytes.Buffer
	header := fingerprint.Header{Plan: d.Fingerprint(), SequenceLength: d.SequenceLength, BatchSize: o.BatchSize}
	if o.World > 1 {
		header.Rank, header.World = o.Rank, o.World
	}
	w, err := fingerprint.NewWriter(&b, header)
	if err != nil {
		t.Fatal(err)
	}
	if err := Hash(context.Background(), d, o, w.Write); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// The hashes of a plan equal the hashes of its samples read one by one, for all options.
func TestHash(t *testing.T) {
	c, text := mixed(t)
	d := c.open(text)
	const batch = 7
	var want []string
	rows := expected(t, d, 0, d.Length())
	for first := int64(0); first < d.Length(); first += batch {
		order := sha256.New()
		var set fingerprint.SetHash
		n := 0
		for _, r := range rows {
			if r.position >= first && r.position < first+batch {
				h := fingerprint.SampleHash(r.tokens)
				order.Write(h[:])
				set.Add(h)
				n++
			}
		}
		want = append(want, fmt.Sprintf(`{"step":%d,"first":%d,"samples":%d,"order":"%x","set":"%x"}`, first/batch,
			first, n, order.Sum(nil), set[:]))
	}
	if int64(len(want)) != d.Steps(batch) {
		t.Errorf("%d steps, want %d", d.Steps(batch), len(want))
	}
	header := fmt.Sprintf(`{"plan":"%s","sequence_length":16,"batch_size":7}`, d.Fingerprint())
	for _, prefetch := range []int{0, 3} {
		if got := logOf(t, d, HashOptions{BatchSize: batch, Prefetch: prefetch}); got != header+"\n"+strings.Join(want,
			"\n")+"\n" {
			t.Errorf("prefetch %d: got\n%s", prefetch, got)
		}
	}
	if got := logOf(t, d, HashOptions{BatchSize: batch, From: 3, To: 9}); got != header+"\n"+strings.Join(want[3:9],
		"\n")+"\n" {
		t.Errorf("steps 3 to 9: got\n%s", got)
	}
	for _, o := range []HashOptions{{}, {BatchSize: 7, From: 86}, {BatchSize: 7, To: 87}, {BatchSize: 7, From: -1},
		{BatchSize: 7, From: 3, To: 3}} {
		if err := Hash(context.Background(), d, o, func(fingerprint.StepHash) error { return nil }); err == nil {
			t.Errorf("%+v: no error", o)
		}
	}
	stop := errors.New("enough")
	if err := Hash(context.Background(), d, HashOptions{BatchSize: 7, Prefetch: 2},
		func(fingerprint.StepHash) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("stopped by %v", err)
	}
}
