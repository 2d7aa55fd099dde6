package blend

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
)

// amendedVectors reads testdata/amended.json, which plan_v2.py made. It is frozen with order
// version 2.
func amendedVectors(t testing.TB) map[string]struct {
	File json.RawMessage
	Rows string
} {
	t.Helper()
	data, err := os.ReadFile("testdata/amended.json")
	if err != nil {
		t.Fatal(err)
	}
	var v struct {
		Plans map[string]struct {
			File json.RawMessage
			Rows string
		}
	}
	if err := json.Unmarshal(data, &v); err != nil {
		t.Fatal(err)
	}
	if len(v.Plans) != 3 {
		t.Fatalf("%d plans", len(v.Plans))
	}
	return v.Plans
}

// Plans that the Python implementation of the format page made: fingerprint, check values and order
// are ours, one by one, in stretches, and back.
func TestAmendedPlansOfOtherImplementation(t *testing.T) {
	for name, v := range amendedVectors(t) {
		p, err := parsePlan(v.File)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		rows := strings.Split(v.Rows, "\n")
		if len(rows) < 500 {
			t.Errorf("%s: %d rows", name, len(rows))
		}
		for _, row := range rows {
			var want [4]int64
			if _, err := fmt.Sscan(row, &want[0], &want[1], &want[2], &want[3]); err != nil {
				t.Fatal(err)
			}
			s, err := p.Locate(want[0])
			if err != nil {
				t.Fatal(err)
			}
			if got := [4]int64{s.Position, int64(s.Source), s.Epoch, s.Window}; got != want {
				t.Fatalf("%s: position, source, epoch, window: %v, want %v", name, got, want)
			}
			if back, ok := p.Position(s.Source, s.Epoch, s.Window); !ok || back != want[0] {
				t.Fatalf("%s: %v: back at %d, %v", name, want, back, ok)
			}
			for b, err := range p.Positions(t.Context(), want[0], want[0]+1) {
				if err != nil || int64(b.Sources[0]) != want[1] || b.Windows[0] != want[3] {
					t.Fatalf("%s: %v in a stretch is window %d of source %d (%v)", name, want, b.Windows[0],
						b.Sources[0], err)
				}
			}
		}
	}
}

// What cannot be is refused, and nothing else happens.
func TestReadAmendedPlanRefuses(t *testing.T) {
	good := amendedVectors(t)["several growths"].File
	for name, v := range map[string]struct{ old, new, message string }{
		"no parent":       {`"at": 0`, `"at": -1`, "parent 1"},
		"a parent's hash": {`"fingerprint": "abab`, `"fingerprint": "xyab`, "parent 1"},
		"reason":          {`größere Quelle`, `gr\"ere`, "reason"},
		"long reason":     {`größere Quelle`, strings.Repeat("x", 1001), "1001 bytes"},
		"sample":          {`"sample": 60`, `"sample": 39`, "growth 2"},
		"early sample":    {`"sample": 40`, `"sample": -1`, "growth 1"},
		"shards":          {`"shards": 2`, `"shards": 0`, "growth 2"},
		"all shards":      {`"shards": 2`, `"shards": 6`, "growth 2"},
		"held out":        {`"validation_windows": 7`, `"validation_windows": 2`, "validation windows"},
		"more held out":   {`"validation_windows": 7`, `"validation_windows": 99`, "validation windows"},
		"changed":         {`"sample": 60`, `"sample": 61`, "changed after it was built"},
		"no growth":       {`"order": 2`, `"order": 1`, "unknown field"},
		"a later version": {`"order": 2`, `"order": 3`, "order version 3"},
	} {
		bad := bytes.Replace(good, []byte(v.old), []byte(v.new), 1)
		if bytes.Equal(bad, good) {
			t.Errorf("%s: the plan does not have %s", name, v.old)
			continue
		}
		if _, err := parsePlan(bad); err == nil || !strings.Contains(err.Error(), v.message) {
			t.Errorf("%s: %v; want %q", name, err, v.message)
		}
	}
}
