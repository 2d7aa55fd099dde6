package blend

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"testing"
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

// The same corpus with a locality.
func TestFrozenBlocksPlan(t *testing.T) {
	c, text := mixed(t)
	compareFrozen(t, c.seal(text+"shuffle: {block: 3, group: 4}\n"), filepath.Join(c.dir, "plan.json"), "blocks")
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
