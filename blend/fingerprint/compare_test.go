package fingerprint

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
)

// The logs of a run that went from one plan to another, and back, are one.
func TestJoinLogs(t *testing.T) {
	log := func(name, plan string, steps ...int64) *Reader {
		var b strings.Builder
		w, err := NewWriter(&b, Header{Plan: plan, SequenceLength: 16, BatchSize: 4})
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range steps {
			if err := w.Write(StepHash{Step: s, First: 4 * s, Samples: int64(len(plan))}); err != nil {
				t.Fatal(err)
			}
		}
		r, err := NewReader(strings.NewReader(b.String()), name)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	for name, v := range map[string]struct {
		logs []*Reader
		want string
	}{
		"forth": {[]*Reader{log("new", "pp", 3, 4), log("old", "p", 0, 1, 2)},
			"0/1 1/1 2/1 3/2 4/2 [{p {0 3}} {pp {3 5}}]"},
		"back": {[]*Reader{log("new", "pp", 0, 1, 4), log("old", "p", 2, 3)},
			"0/2 1/2 2/1 3/1 4/2 [{pp {0 2}} {p {2 4}} {pp {4 5}}]"},
		"went back": {[]*Reader{log("new", "pp", 0, 1, 2, 3), log("old", "p", 2, 3, 4, 5)},
			"0/2 1/2 2/2 3/2 [{pp {0 4}}]"},
		"begun": {[]*Reader{log("new", "pp"), log("old", "p", 0, 1), log("older", "ppp", 2)},
			"0/1 1/1 2/3 [{p {0 2}} {ppp {2 3}}]"},
		"both": {[]*Reader{log("new", "pp", 3), log("old", "p", 0, 1), log("older", "ppp", 1)},
			"0/1 old and older both have step 1"},
	} {
		run, header, err := Join(v.logs)
		if err != nil || header.Plan != "pp" {
			t.Fatalf("%s: %v, %v", name, header, err)
		}
		var got []string
		for {
			s, err := run.Next()
			if err == io.EOF {
				got = append(got, fmt.Sprint(run.Spans))
				break
			}
			if err != nil {
				got = append(got, err.Error())
				break
			}
			got = append(got, fmt.Sprintf("%d/%d", s.Step, s.Samples))
		}
		if got := strings.Join(got, " "); !strings.HasPrefix(got, v.want) {
			t.Errorf("%s: %s, want %s", name, got, v.want)
		}
	}
	other := log("other", "p")
	other.Header.BatchSize++
	if _, _, err := Join([]*Reader{log("new", "pp"), other}); err == nil {
		t.Error("logs of other batch sizes were joined")
	}

	// What only one log has is said.
	x, y := log("x", "p", 0, 1, 2, 3), log("y", "p", 2, 3, 4, 5)
	c, err := Compare(x, y, x.Header, y.Header)
	if err != nil || c.Kind != NoDifference || c.Equal != 2 || !slices.Equal(c.OnlyA, []Range{{0, 2}}) ||
		!slices.Equal(c.OnlyB, []Range{{4, 6}}) {
		t.Errorf("%+v, %v", c, err)
	}
}
