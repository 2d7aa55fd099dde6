package blend

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"mula/shards"
	"mula/shards/audit"
	"mula/shards/shardtest"
)

const packedBlend = "packing: best_fit" + livingBlend

func openPlan(t *testing.T, p *Plan) *Data {
	t.Helper()
	d, err := Open(t.Context(), p, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// A packed plan that is amended twice, once in another folder, keeps the steps before each
// amendment. Each amendment packs only the new shards. Every document of all parts is found.
func TestAmendPackedPlan(t *testing.T) {
	c := living(t)
	p := c.seal(packedBlend)
	indexes := func(dir string) []string {
		t.Helper()
		list, err := filepath.Glob(filepath.Join(dir, "*.packing"))
		if err != nil {
			t.Fatal(err)
		}
		return list
	}
	if n := len(indexes(c.dir)); n != 2 {
		t.Fatalf("%d index files of 2 sources", n)
	}
	q := c.amend(p, 200, `
samples: 640
sources:
  - {name: web, shards: ["part-[34]"], max_epochs: 60}
  - {name: code, shards: [part-5]}
weights: {web: 0.5, code: 1/4, wiki: 0.25}
`)
	if n := len(indexes(c.dir)); n != 4 {
		t.Errorf("%d index files after the amendment, want 4", n)
	}
	if q.OrderVersion() != PackedAmendedOrder || len(q.Sources[0].Packed) != 2 || len(q.Sources[2].Packed) != 1 ||
		q.Sources[0].Packed[0] != p.Sources[0].Packed[0] {
		t.Errorf("order %s, sources %+v", q.OrderVersion(), q.Sources)
	}
	other := t.TempDir()
	a, err := ParseAmendment([]byte("sources: [{name: web, shards: [part-6]}, {name: wiki, shards: [part-7]}]"),
		"amend.yaml", c.dir)
	if err != nil {
		t.Fatal(err)
	}
	a.At, a.Skips = 320, []Range{{400, 410}}
	survey, err := SurveyAmendment(t.Context(), q, a)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(indexes(other)); n != 0 {
		t.Errorf("a survey wrote %d index files", n)
	}
	r, err := Amend(t.Context(), q, a, SealOptions{Packings: other})
	if err != nil {
		t.Fatal(err)
	}
	if n := len(indexes(other)); n != 2 {
		t.Errorf("%d index files in the other folder, want 2", n)
	}
	if err := r.Write(filepath.Join(other, "plan.json")); err != nil {
		t.Fatal(err)
	}
	fingerprint := r.Fingerprint()
	if r, err = ReadPlan(filepath.Join(other, "plan.json")); err != nil || r.Fingerprint() != fingerprint {
		t.Fatalf("plan %s, read again %v: %v", fingerprint, r, err)
	}
	if got := r.Summary(); !reflect.DeepEqual(got, survey) {
		t.Errorf("the plan is %+v, the survey %+v", got, survey)
	}
	first, second, third := openPlan(t, p), openPlan(t, q), openPlan(t, r)
	a1, a2, a3 := stepsOf(t, first, 8), stepsOf(t, second, 8), stepsOf(t, third, 8)
	if !reflect.DeepEqual(a1[:25], a2[:25]) || !reflect.DeepEqual(a2[:40], a3[:40]) {
		t.Error("a step before an amendment has other samples")
	}
	if reflect.DeepEqual(a1[25:40], a2[25:40]) || reflect.DeepEqual(a2[40:], a3[40:]) {
		t.Error("no step after an amendment has other samples")
	}
	checkLiving(t, r, plain(t, r))
	checkEveryToken(t, third)
	checkWhere(t, c, third)
	report, err := third.Check(t.Context(), CheckOptions{})
	if err != nil || slices.ContainsFunc(report.Findings, func(f audit.Finding) bool { return f.Kind == "hash" }) {
		t.Errorf("%+v, %v", report, err)
	}

	var changes []string
	for _, change := range Diff(q, r).Changes {
		changes = append(changes, fmt.Sprintf("%d %s", change.From, change.Text))
	}
	if len(changes) != 3 || !strings.Contains(changes[0]+changes[1], "source web has 1 shard of") ||
		!strings.Contains(changes[0]+changes[1], "source wiki has 1 shard of") {
		t.Errorf("differences: %q", changes)
	}
}

// A missing or damaged index file of a growth is reported with its source.
func TestDamagedPackingOfGrowth(t *testing.T) {
	c := living(t)
	p := c.amend(c.seal(packedBlend), 200, "sources: [{name: wiki, shards: [part-6]}]")
	path := p.Sources[1].Packed[1].path()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for what, bad := range map[string][]byte{"truncated": data[:len(data)-1], "another packing": nil} {
		if bad == nil {
			if bad, err = os.ReadFile(p.Sources[1].Packed[0].path()); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(path, bad, 0o644); err != nil {
			t.Fatal(err)
		}
		_, err := Open(t.Context(), p, OpenOptions{})
		if err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), `"wiki"`) {
			t.Errorf("%s: %v", what, err)
		}
		a := &Amendment{At: 300, Skips: []Range{{300, 301}}}
		if _, err := Amend(t.Context(), p, a, SealOptions{}); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s, amended: %v", what, err)
		}
	}
}

// New shards without training documents are refused.
func TestAmendPackedPlanRefuses(t *testing.T) {
	c := living(t)
	c.shard("none", "uint16", 0, 0)
	c.shard("one", "uint16", 5)
	p := c.seal(packedBlend)
	for shard, want := range map[string]string{"none": "no new shard has a token",
		"one": "all documents of the new shards are validation documents"} {
		a := &Amendment{dir: c.dir, At: 300, Sources: []SourceConfig{{Name: "web", Shards: []string{shard}}}}
		if _, err := Amend(t.Context(), p, a, SealOptions{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", shard, err)
		}
	}
}

// An amended plan keeps its padding id. If new shards have no such id, the message does not advise
// to set another one.
func TestLargePadding(t *testing.T) {
	for _, parents := range [][]Parent{nil, {{At: 10}}} {
		list := []Shard{{DType: shards.Int32}, {DType: shards.UInt16}}
		p := &Plan{Parents: parents, Sources: []Source{{Shards: list}}}
		err := (&packedOrder{scheduled{p}, 65536}).checkPadding()
		if err == nil || strings.Contains(err.Error(), "--pad") != (parents == nil) {
			t.Errorf("%d parents: %v", len(parents), err)
		}
		if err := (&packedOrder{scheduled{p}, 65535}).checkPadding(); err != nil {
			t.Error(err)
		}
	}
}

// frozenPackedAmended is the amended plan of testdata/packed_amended.json.
func frozenPackedAmended(t *testing.T) (corpus, *Plan) {
	c, text := packed(t)
	c.shard("web/more", "uint16", shardtest.Lengths(50, 20)...)
	c.shard("news/a", "uint16", shardtest.Lengths(30, 25)...)
	p := c.amend(c.seal(text), 250, `
samples: 800
sources:
  - {name: web, shards: [web/more]}
  - {name: news, shards: [news/a]}
weights: {web: 2, news: 1, wiki: 0.1}
`)
	return c, p
}

// The order of an amended packed plan is frozen, and equals the result of the Python implementation
// for the plan.
func TestFrozenPackedAmendedPlan(t *testing.T) {
	c, p := frozenPackedAmended(t)
	compareFrozen(t, p, filepath.Join(c.dir, "amended.json"), "packed_amended")
}

// A plan.json with an invalid member is refused with a message about the member.
func TestReadPackedAmendedPlanRefuses(t *testing.T) {
	good, err := os.ReadFile("testdata/packed_amended.json")
	if err != nil {
		t.Fatal(err)
	}
	for name, v := range map[string]struct{ old, new, message string }{
		"shards":          {`"shards": 1,`, `"shards": 9,`, "growth 1 has 9 shards"},
		"sample":          {`"sample": 1`, `"sample": -1`, "growth 1"},
		"changed":         {`"sample": 1`, `"sample": 2`, "changed after it was built"},
		"directories":     {`"packings": [`, `"packings": [".", `, "directories"},
		"parent":          {`"at": 250`, `"at": -1`, "parent 1"},
		"order":           {`"packed 2"`, `"packed 1"`, "unknown field"},
		"a later version": {`"packed 2"`, `"packed 3"`, "order version"},
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
	if _, err := parsePlan(good); err != nil {
		t.Error(err)
	}
}
