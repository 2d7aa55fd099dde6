package blend

import (
	"encoding/json"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"mula/shards"
	"mula/shards/shardtest"
)

// amend makes the amendment of a text, writes the plan and reads it again.
func (c corpus) amend(parent *Plan, at int64, text string, skips ...Range) *Plan {
	c.t.Helper()
	a := &Amendment{}
	if text != "" {
		var err error
		if a, err = ParseAmendment([]byte(text), "amend.yaml", c.dir); err != nil {
			c.t.Fatal(err)
		}
	}
	a.At, a.Skips, a.Reason = at, skips, "a reason"
	p, err := Amend(c.t.Context(), parent, a, SealOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	return c.reread(c.t, p)
}

// reread writes a plan and reads it again.
func (c corpus) reread(t interface {
	Helper()
	Fatalf(string, ...any)
}, p *Plan) *Plan {
	t.Helper()
	path := filepath.Join(c.dir, "amended.json")
	if err := p.Write(path); err != nil {
		t.Fatalf("%v", err)
	}
	read, err := ReadPlan(path)
	if err != nil {
		t.Fatalf("%v", err)
	}
	if read.Fingerprint() != p.Fingerprint() {
		t.Fatalf("the plan that was amended is %s, the one that was read %s", p.Fingerprint(), read.Fingerprint())
	}
	return read
}

// living is a corpus with shards for a blend, and for what comes later.
func living(t testing.TB) corpus {
	c := newCorpus(t)
	for i := range 8 {
		c.shard(fmt.Sprintf("part-%d", i), shards.UInt16, shardtest.Lengths(10+7*i, 50)...)
	}
	return c
}

// plain is the order of a plan as a list.
func plain(t interface{ Fatalf(string, ...any) }, p *Plan) []Sample {
	list := make([]Sample, p.Length())
	for i := range list {
		var err error
		if list[i], err = p.Locate(int64(i)); err != nil {
			t.Fatalf("%v", err)
		}
	}
	return list
}

// checkLiving checks what every plan must keep, however often it has been amended: each window once
// an epoch, epochs whole before the next begins, held-out windows never drawn, and the ways back
// and in stretches.
func checkLiving(t interface{ Fatalf(string, ...any) }, p *Plan, order []Sample) {
	type source struct {
		epoch int64
		seen  map[int64]bool
	}
	held := make([]map[int64]bool, len(p.Sources))
	state := make([]source, len(p.Sources))
	for i := range p.Sources {
		held[i], state[i] = map[int64]bool{}, source{0, map[int64]bool{}}
		for s := range p.Validation(i) {
			held[i][s.Window] = true
		}
		if int64(len(held[i])) != p.Sources[i].Validation {
			t.Fatalf("source %d: %d windows held out, want %d", i, len(held[i]), p.Sources[i].Validation)
		}
		windows := p.Sources[i].packed().Samples
		if p.Sources[i].windows != nil {
			windows = p.Sources[i].windows.Count()
		}
		if p.Sources[i].Windows() != windows {
			t.Fatalf("source %d: %d windows, want %d", i, p.Sources[i].Windows(), windows)
		}
	}
	for _, s := range order {
		st := &state[s.Source]
		if s.Epoch != st.epoch {
			if _, length := p.Sources[s.Source].order.Span(st.epoch); s.Epoch != st.epoch+1 ||
				int64(len(st.seen)) != length {
				t.Fatalf("%+v comes after %d of %d windows of epoch %d", s, len(st.seen), length, st.epoch)
			}
			*st = source{s.Epoch, map[int64]bool{}}
		}
		if st.seen[s.Window] || held[s.Source][s.Window] {
			t.Fatalf("%+v: drawn before in its epoch, or held out", s)
		}
		st.seen[s.Window] = true
		if back, ok := p.Position(s.Source, s.Epoch, s.Window); !ok || back != s.Position {
			t.Fatalf("%+v: back at %d, %v", s, back, ok)
		}
	}
	for i := range p.Sources {
		for w := range held[i] {
			if at, ok := p.Position(i, 0, w); ok {
				t.Fatalf("window %d of source %d is held out and stands at position %d", w, i, at)
			}
		}
	}
}

// drawAmendment draws a change of a plan, of any kind, that Amend must take. free are shards that
// no source has.
func drawAmendment(t *rapid.T, p *Plan, free *[]string, dir string) *Amendment {
	a := &Amendment{dir: dir, At: rapid.Int64Range(0, p.Length()).Draw(t, "at"), Reason: "größer"}
	fresh := false
	for range min(len(*free), rapid.IntRange(0, 2).Draw(t, "new shards")) {
		at := rapid.IntRange(0, len(p.Sources)+len(a.Sources)).Draw(t, "source")
		name := fmt.Sprintf("new-%d-%d", len(p.Parents), at)
		if at < len(p.Sources) {
			name = p.Sources[at].Name
		} else {
			fresh = true
		}
		shard := (*free)[0]
		*free = (*free)[1:]
		if i := slices.IndexFunc(a.Sources, func(s SourceConfig) bool { return s.Name == name }); i >= 0 {
			a.Sources[i].Shards = append(a.Sources[i].Shards, shard)
		} else {
			a.Sources = append(a.Sources, SourceConfig{Name: name, Shards: []string{shard}})
		}
	}
	if rapid.Bool().Draw(t, "samples") || a.At == p.Length() {
		n := a.At + rapid.Int64Range(50, 300).Draw(t, "more")
		a.Samples = &n
	}
	if fresh || rapid.Bool().Draw(t, "weights") && a.At < p.Length() {
		if a.Samples == nil {
			n := a.At + 200
			a.Samples = &n
		}
		a.Weights = map[string]Number{}
		for _, s := range a.Sources {
			a.Weights[s.Name] = integer(rapid.Int64Range(1, 9).Draw(t, "weight"))
		}
		for _, s := range p.Sources {
			if w := rapid.Int64Range(0, 9).Draw(t, "weight"); w > 0 {
				a.Weights[s.Name] = integer(w)
			}
		}
		if len(a.Weights) == 0 {
			a.Weights[p.Sources[0].Name] = integer(1)
		}
	}
	if end := p.Length(); a.Samples == nil && a.At+10 < end && rapid.Bool().Draw(t, "skips") || len(a.Sources) == 0 &&
		a.Weights == nil && a.Samples == nil {
		if a.At >= end-1 {
			a.At = 0
		}
		from := rapid.Int64Range(a.At, end-1).Draw(t, "from")
		a.Skips = append(a.Skips, Range{from, min(end, from+5)})
	}
	return a
}

// Random plans, random amendments of amendments: all positions before are the same to the bit, from
// every ancestor, and nothing that has been seen is seen again before its source's epoch ends.
func TestAmendKeepsThePrefix(t *testing.T) {
	c := living(t)
	rapid.Check(t, func(rt *rapid.T) {
		free := []string{"part-3", "part-4", "part-5", "part-6", "part-7"}
		held := rapid.SampledFrom([]string{"", "0.05", "1/3"}).Draw(rt, "validation")
		samples := rapid.Int64Range(30, 500).Draw(rt, "length")
		config := &Config{SequenceLength: rapid.IntRange(4, 16).Draw(rt, "L"), Seed: rapid.Uint64().Draw(rt, "seed"),
			Samples: &samples, dir: c.dir,
			Sources: []SourceConfig{{Name: "web", Shards: []string{"part-0", "part-1"}, Weight: integer(3)},
				{Name: "wiki", Shards: []string{"part-2"}, Weight: integer(2)}},
			Packing: rapid.SampledFrom([]string{"", packingBestFit}).Draw(rt, "packing")}
		if config.Packing == "" && rapid.Bool().Draw(rt, "local") {
			config.Shuffle = &ShuffleConfig{rapid.Int64Range(1, 30).Draw(rt, "block"), rapid.Int64Range(0, 5).Draw(rt,
				"group")}
		}
		if held != "" {
			config.Validation, _ = ParseNumber(held)
		}
		p, err := Seal(t.Context(), config, SealOptions{})
		if err != nil {
			if strings.Contains(err.Error(), "all documents are in the validation split") {
				rt.Skip("the last document is too long for the fraction")
			}
			rt.Fatalf("%v", err)
		}
		tokensOf := func(p *Plan) [][]uint32 {
			d, err := Open(t.Context(), p, OpenOptions{})
			if err != nil {
				rt.Fatalf("%v", err)
			}
			defer d.Close()
			list := make([][]uint32, d.Length())
			for i := range list {
				list[i] = make([]uint32, d.SampleTokens())
				s, err := d.Locate(int64(i))
				if err == nil {
					err = d.Tokens(list[i], s)
				}
				if err != nil {
					rt.Fatalf("%v", err)
				}
			}
			return list
		}
		type ancestor struct {
			plan   *Plan
			order  []Sample
			tokens [][]uint32
		}
		p = c.reread(rt, p)
		ancestors := []ancestor{{p, plain(rt, p), tokensOf(p)}}
		for range rapid.IntRange(1, 4).Draw(rt, "amendments") {
			a := drawAmendment(rt, p, &free, c.dir)
			q, err := Amend(t.Context(), p, a, SealOptions{})
			if err != nil {
				if strings.Contains(err.Error(), "already") { // all of the skips were there, or the source grows later
					continue
				}
				rt.Fatalf("amendment %+v: %v", a, err)
			}
			q = c.reread(rt, q)
			order, tokens := plain(rt, q), tokensOf(q)
			checkLiving(rt, q, order)
			for _, was := range ancestors {
				shared, ok := q.Shared(was.plan.Fingerprint())
				if !ok || was.plan == p && shared != min(a.At, q.Length()) {
					rt.Fatalf("the plan shares %d positions (%v) with plan %s, amended at %d", shared, ok,
						was.plan.Fingerprint(), a.At)
				}
				for i := range shared {
					if order[i] != was.order[i] {
						rt.Fatalf("%+v was %+v; amended at %d", order[i], was.order[i], a.At)
					}
					if !slices.Equal(tokens[i], was.tokens[i]) {
						rt.Fatalf("position %d has other tokens; amended at %d", i, a.At)
					}
				}
				for i := range was.plan.Sources { // held-out windows stay held out
					after := slices.Collect(q.Validation(i))
					before := slices.Collect(was.plan.Validation(i))
					if len(after) < len(before) || !slices.Equal(after[:len(before)], before) {
						rt.Fatalf("source %d: held out were %v, are %v", i, before, after)
					}
				}
				d := Diff(was.plan, q)
				if d.Same < shared {
					rt.Fatalf("the plan shares %d positions, but a difference is seen at %d: %+v", shared, d.Same, d)
				}
				for i := range d.Same {
					if order[i] != was.order[i] {
						rt.Fatalf("no difference is seen before %d, but %+v was %+v", d.Same, order[i], was.order[i])
					}
				}
			}
			for block, err := range q.Positions(t.Context(), 0, q.Length()) {
				if err != nil {
					rt.Fatalf("%v", err)
				}
				for i := range block.Sources {
					if s := order[block.First+int64(i)]; s.Source != int(block.Sources[i]) ||
						s.Window != block.Windows[i] {
						rt.Fatalf("in a stretch, %+v is window %d of source %d", s, block.Windows[i], block.Sources[i])
					}
				}
			}
			if _, ok := p.Shared(q.Fingerprint()); ok {
				rt.Fatalf("a plan comes from its own child")
			}
			p, ancestors = q, append(ancestors, ancestor{q, order, tokens})
		}
	})
}

const livingBlend = `
sequence_length: 16
seed: 6198
validation: 0.05
samples: 400
sources:
  - {name: web, shards: [part-0, part-1], weight: 3, max_epochs: 20}
  - {name: wiki, shards: [part-2], weight: 2}
skips:
  - {from: 37, to: 41}
`

// The plan has the stages, growth, lengths, skips, limits and parents of the amendment, and
// positions of a new document are found.
func TestAmend(t *testing.T) {
	c := living(t)
	p := c.seal(livingBlend)
	q := c.amend(p, 200, `
samples: 640
sources:
  - {name: web, shards: ["part-[34]"], max_epochs: 30}
  - {name: code, shards: [part-5]}
weights: {web: 0.5, code: 1/4, wiki: 0.25}
`, Range{300, 310})
	if len(q.Stages) != 2 || q.Stages[0].Samples != 200 || q.Stages[1].Samples != 440 ||
		!slices.Equal(q.Stages[0].Weights, []uint64{3, 2, 0}) ||
		!slices.Equal(q.Stages[1].Weights, []uint64{2, 1, 1}) ||
		!slices.Equal(q.Stages[1].Written, []string{"0.5", "0.25", "1/4"}) {
		t.Errorf("stages are %+v", q.Stages)
	}
	if len(q.Sources) != 3 || len(q.Sources[0].Shards) != 4 || q.Sources[0].MaxEpochs != "30" ||
		q.Sources[2].Name != "code" || len(q.Sources[1].Growth) > 0 {
		t.Errorf("sources are %+v", q.Sources)
	}
	if g := q.Sources[0].Growth; len(g) != 1 || g[0].Sample != 120 || g[0].Shards != 2 || g[0].Validation < 1 ||
		q.Sources[0].Validation != p.Sources[0].Validation+g[0].Validation {
		t.Errorf("web has grown by %+v, and holds %d out", g, q.Sources[0].Validation)
	}
	if !slices.Equal(q.Skips, []Range{{37, 41}, {300, 310}}) || q.OrderVersion() != "2" ||
		!slices.Equal(q.Parents, []Parent{{p.Fingerprint(), 200, "a reason"}}) {
		t.Errorf("skips %v, order version %s, parents %+v", q.Skips, q.OrderVersion(), q.Parents)
	}
	d, err := Open(t.Context(), q, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	uses := 0
	for o, err := range d.Where(t.Context(), "part-4/7") {
		if err != nil {
			t.Fatal(err)
		}
		if uses++; o.Use == Drawn && (o.Sample.Position < 200 || o.Sample.Epoch < 1) {
			t.Errorf("a document that came at position 200, in epoch 1 of its source, stands at %+v", o.Sample)
		}
		if o.Use == Drawn {
			if s, err := d.Locate(o.Sample.Position); err != nil || s.Window != o.Sample.Window || s.Shard != 3 {
				t.Errorf("%+v is said to be at %+v (%v)", o.Sample, s, err)
			}
		}
	}
	if uses == 0 {
		t.Error("a document of a new shard is nowhere")
	}
	// Twice at the same position; then a plan that only continues, and a plan that stops earlier.
	r := c.amend(c.amend(q, 300, "sources: [{name: web, shards: [part-6]}]"), 300,
		"sources: [{name: web, shards: [part-7]}]")
	if g := r.Sources[0].Growth; len(g) != 3 || g[1].Sample != g[2].Sample || r.Length() != 640 || len(r.Parents) != 3 {
		t.Errorf("grown twice at one place: %+v", g)
	}
	checkLiving(t, r, plain(t, r))
	if s := c.amend(r, 640, "samples: 700"); s.Length() != 700 || len(s.Stages) != 2 {
		t.Errorf("a longer plan has %d positions, stages %+v", s.Length(), s.Stages)
	}
	if s := c.amend(r, 205, "samples: 305"); s.Length() != 305 ||
		!slices.Equal(s.Skips, []Range{{37, 41}, {300, 305}}) {
		t.Errorf("a shorter plan has %d positions, skips %v", s.Length(), s.Skips)
	}
	if s := c.amend(p, 0, "weights: {wiki: 1}"); len(s.Stages) != 1 || s.Length() != 400 ||
		!slices.Equal(s.Stages[0].Weights, []uint64{0, 1}) {
		t.Errorf("amended from the beginning, stages are %+v", s.Stages)
	}
	s := c.amend(p, 200, "stages: [{samples: 100, weights: {wiki: 1}}, {samples: 50, weights: {wiki: 1, web: 1}}]")
	if len(s.Stages) != 3 || s.Length() != 350 {
		t.Errorf("two stages more: %+v", s.Stages)
	}
	// The order of a plan of version 2 without growth equals the order of version 1.
	whole := c.seal(livingBlend + `
stages:
  - {samples: 200}
  - {samples: 200, weights: {wiki: 1}}
`)
	if u := c.amend(p, 200, "weights: {wiki: 1}"); !slices.Equal(plain(t, u), plain(t, whole)) ||
		u.Fingerprint() == whole.Fingerprint() {
		t.Error("a stage that was appended differs from one that was planned")
	}
}

// Settings that cannot be kept are refused by name, with their file and line if they are in the
// amendment.
func TestAmendRefuses(t *testing.T) {
	c := living(t)
	c.shard("tiny", shards.UInt16, 5)
	c.shard("one", shards.UInt16, 17)
	p := c.seal(livingBlend)
	grown := c.amend(p, 300, "sources: [{name: web, shards: [part-3]}]")
	for name, v := range map[string]struct {
		plan    *Plan
		at      int64
		text    string
		skips   []Range
		message string
	}{
		"beyond":  {p, 401, "samples: 500", nil, "position 401"},
		"below":   {p, -1, "samples: 500", nil, "position -1"},
		"nothing": {p, 0, "samples: null", nil, "nothing to amend"},
		"samples": {p, 200, "samples: 199", nil, "amend.yaml:1: samples is 199"},
		"both": {p, 200, "weights: {web: 1}\nstages: [{samples: 1, weights: {web: 1}}]", nil,
			"weights and stages are both set"},
		"unknown field":     {p, 200, "sampels: 3", nil, "samples"},
		"a field of others": {p, 200, "skips: []", nil, "known are samples, tokens, sources, weights, stages"},
		"nothing in it":     {p, 200, "{}", nil, "with --skip FROM:TO"},
		"unknown weight":    {p, 200, "weights: {wbe: 1}", nil, "known are web, wiki"},
		"zero weight":       {p, 200, "weights: {web: 0}", nil, "missing or zero"},
		"no weights":        {p, 200, "weights: {}", nil, "no source has a weight"},
		"stage weights":     {p, 200, "stages: [{samples: 3}]", nil, "no source has a weight"},
		"stage samples":     {p, 200, "stages: [{weights: {web: 1}}]", nil, "has no samples"},
		"stages and length": {p, 200, "samples: 300\nstages: [{samples: 99, weights: {web: 1}}]", nil, "add up to 299"},
		"nothing left":      {p, 400, "weights: {web: 1}", nil, "no samples remain"},
		"a weight": {p, 200, "sources: [{name: web, weight: 2, shards: [part-3]}]", nil,
			"weights of all sources in `weights`"},
		"a source twice": {p, 200, "sources: [{name: web, shards: [part-3]}, {name: web, shards: [part-4]}]", nil,
			"two entries"},
		"no shards":   {p, 200, "sources: [{name: wki}]", nil, `did you mean "wiki"`},
		"nothing new": {p, 200, "sources: [{name: wiki}]", nil, "changes nothing"},
		"not drawn":   {p, 200, "sources: [{name: code, shards: [part-3]}]", nil, "in weights or stages"},
		"no weight": {p, 200, "sources: [{name: code, shards: [part-3]}]\nweights: {web: 1}", nil,
			`draws nothing from source "code"`},
		"shard of another": {p, 200, "sources: [{name: web, shards: [part-2]}]", nil,
			`is already in the plan, in source "wiki"; list only new shards`},
		"its own shard": {p, 200, "sources: [{name: web, shards: [part-0]}]", nil,
			`is already in the plan, in source "web"`},
		"a shard twice": {p, 200, "sources: [{name: web, shards: [part-3, part-3]}]", nil,
			`is listed twice in source "web"`},
		"no such shard":   {p, 200, "sources: [{name: web, shards: [part-9]}]", nil, "matches no shard"},
		"too short":       {p, 200, "sources: [{name: web, shards: [tiny]}]", nil, "no new shard has the 17 tokens"},
		"all held out":    {p, 200, "sources: [{name: web, shards: [one]}]", nil, "all 1 windows"},
		"too many epochs": {p, 200, "samples: 40000", nil, "samples would fit"},
		"epochs before": {p, 200, "sources: [{name: web, max_epochs: 0.5}]", nil,
			"no plan with these weights would fit; lower the weights of these sources, raise max_epochs, or add " +
				"data; samples drawn before position 200 cannot change"},
		"backwards": {grown, 200, "sources: [{name: web, shards: [part-4]}]", nil,
			"already grows at its sample 180"},
		"skips before": {p, 200, "", []Range{{100, 210}}, "starts before position 200"},
		"skips beyond": {p, 200, "", []Range{{300, 401}}, "beyond the plan's 400 positions"},
		"empty skip":   {p, 200, "", []Range{{300, 300}}, "not a range"},
		"known skips":  {p, 0, "", []Range{{38, 40}}, "already"},
		"all skipped":  {p, 0, "", []Range{{0, 400}}, "cover all 400"},
	} {
		a := &Amendment{}
		var err error
		if v.text != "" {
			a, err = ParseAmendment([]byte(v.text), "amend.yaml", c.dir)
		}
		if err == nil {
			a.At, a.Skips = v.at, v.skips
			_, err = Amend(t.Context(), v.plan, a, SealOptions{})
		}
		if err == nil || !strings.Contains(err.Error(), v.message) {
			t.Errorf("%s: %v; want %q", name, err, v.message)
		}
		if v.text != "" && err != nil && !strings.Contains(err.Error(), "amend.yaml") && v.at >= 0 && v.at <= 400 &&
			name != "nothing" && name != "not drawn" {
			t.Errorf("%s: %v does not name the file", name, err)
		}
	}
	for _, reason := range []string{`say "no"`, "a\nb", strings.Repeat("x", 1001), "a \u202egnp.exe", "a\u200bb",
		"a\u0085b"} {
		if _, err := Amend(t.Context(), p, &Amendment{Skips: []Range{{1, 2}}, Reason: reason},
			SealOptions{}); err == nil {
			t.Errorf("the reason %.20q was accepted", reason)
		}
	}
}

// A shard that has changed since the parent was built must not get into the amended plan
// unnoticed, with a manifest or without.
func TestAmendNoticesChanges(t *testing.T) {
	for _, manifest := range []bool{true, false} {
		c := living(t)
		if !manifest {
			c.foreign("part-1")
		}
		p := c.seal(livingBlend)
		c.amend(p, 100, "samples: 500")
		c.shard("part-1", shards.UInt16, append(shardtest.Lengths(16, 50), 40)...)
		if !manifest {
			c.foreign("part-1")
		}
		if _, err := Amend(t.Context(), p, &Amendment{Skips: []Range{{1, 2}}}, SealOptions{}); err == nil ||
			!strings.Contains(err.Error(), "has changed since the plan was built") {
			t.Errorf("manifest %v: %v", manifest, err)
		}
	}
}

// foreign takes away what only mula writes beside a shard.
func (c corpus) foreign(name string) {
	c.t.Helper()
	for _, ending := range []string{".json", ".sums"} {
		if err := os.Remove(filepath.Join(c.dir, name+ending)); err != nil {
			c.t.Fatal(err)
		}
	}
}

func TestDiff(t *testing.T) {
	c := living(t)
	p := c.seal(livingBlend)
	for name, v := range map[string]struct {
		old, new string
		same     int64
		what     string
	}{
		"nothing":    {"seed", "seed", 400, ""},
		"seed":       {"seed: 6198", "seed: 6199", 0, "seed"},
		"length":     {"length: 16", "length: 15", 0, "sequence_length sources"},
		"samples":    {"samples: 400", "samples: 500", 400, "length"},
		"fewer":      {"samples: 400", "samples: 300", 300, "length"},
		"weights":    {"weight: 3", "weight: 4", 0, "stages"},
		"skips":      {"to: 41", "to: 43", 41, "skips"},
		"less skips": {"from: 37", "from: 39", 37, "skips"},
		"shards":     {"[part-2]", "[part-3]", 0, "sources"},
		"name":       {"wiki", "wikipedia", 0, "sources stages"},
		"held out":   {"0.05", "0.2", 0, "sources"},
		"limit":      {"max_epochs: 20", "max_epochs: 21", 400, ""},
		"a stage": {"skips:", "stages: [{samples: 150}, {samples: rest, weights: {wiki: 1}}]\nskips:", 150,
			"stages"},
	} {
		q := c.seal(strings.ReplaceAll(livingBlend, v.old, v.new))
		var what []string
		d := Diff(p, q)
		for _, change := range d.Changes {
			what = append(what, change.What)
		}
		slices.Sort(what)
		if got := strings.Join(slices.Compact(what), " "); d.Same != v.same || got != v.what {
			t.Errorf("%s: the same before %d (%s), want %d (%s): %+v", name, d.Same, got, v.same, v.what, d.Changes)
		}
		if back := Diff(q, p); back.Same != d.Same || len(back.Changes) != len(d.Changes) {
			t.Errorf("%s: the other way round the same before %d, %+v", name, back.Same, back.Changes)
		}
		a, b := plain(t, p), plain(t, q)
		if !slices.Equal(a[:v.same], b[:v.same]) {
			t.Errorf("%s: differs before position %d", name, v.same)
		}
		if n := v.same + 20; v.same < 300 && slices.Equal(a[v.same:n], b[v.same:n]) && v.what != "sources stages" {
			t.Errorf("%s: does not differ from position %d on", name, v.same)
		}
	}
	q := c.amend(p, 200, "weights: {web: 1}")
	r, s := c.amend(q, 300, "samples: 500"), c.amend(q, 250, "weights: {wiki: 1}")
	if d := Diff(p, q); d.Relation != SecondAmends || len(d.Second) != 1 || d.Same != 200 ||
		d.Sources[0].First.Samples != 120 || d.Sources[0].Second != (Drawing{200, 1}) {
		t.Errorf("a plan and its child: %+v", d)
	}
	if d := Diff(r, q); d.Relation != FirstAmends || d.Same != 400 || d.Ancestor != q.Fingerprint() {
		t.Errorf("a plan and its parent: %+v", d)
	}
	if d := Diff(r, s); d.Relation != CommonAncestor || d.Same != 250 || d.Ancestor != q.Fingerprint() {
		t.Errorf("two children of a plan: %+v", d)
	}
	if d := Diff(p, p); d.Relation != SamePlan || d.Same != 400 {
		t.Errorf("a plan and itself: %+v", d)
	}
	if d := Diff(p, c.seal(strings.ReplaceAll(livingBlend, "400", "401"))); d.Relation != Unrelated {
		t.Errorf("two plans: %+v", d)
	}
}

// Every growth of a source has its line, with the first position at which the plan with the growth
// draws from the new windows. This also holds if the other plan, with other weights since, gets as
// far in the source at an earlier position.
func TestDiffOfGrowths(t *testing.T) {
	c := living(t)
	p := c.seal(livingBlend)
	q := c.amend(p, 100, "weights: {web: 1, wiki: 9}")
	q = c.amend(q, 200, "sources: [{name: web, shards: [part-3]}]")
	q = c.amend(q, 300, "sources: [{name: web, shards: [part-4, part-5]}]")
	lines := func(d *Difference) (list []string) {
		for _, change := range d.Changes {
			if change.What == "sources" {
				list = append(list, fmt.Sprintf("%d %s", change.From, change.Text))
			}
		}
		return list
	}
	var want, back []string
	windows := []int64{0, 0, 0}
	for k, at := range map[int]int64{0: 200, 1: 300} {
		g := q.Sources[0].Growth[k]
		first := int64(-1) // position of the first sample of web from there on
		for i, s := range plain(t, q) {
			if int64(i) >= at && s.Source == 0 {
				first = int64(i)
				break
			}
		}
		if first < at || g.Sample == 0 {
			t.Fatalf("growth %d at sample %d, position %d", k, g.Sample, first)
		}
		for _, shard := range [][]int{{2}, {3, 4}}[k] {
			windows[k] += q.Sources[0].shardWindows(shard)
		}
		size := fmt.Sprintf("%d shards of %d windows", g.Shards, windows[k])
		if g.Shards == 1 {
			size = fmt.Sprintf("1 shard of %d windows", windows[k])
		}
		want = append(want, fmt.Sprintf("%d source web has %s more from its sample %d on (%d for "+
			"validation)", first, size,
			g.Sample, g.Validation))
		back = append(back, fmt.Sprintf("%d source web has %s less from its sample %d on (%d for "+
			"validation)", first, size,
			g.Sample, g.Validation))
	}
	slices.Sort(want)
	slices.Sort(back)
	if d := Diff(p, q); !slices.Equal(lines(d), want) || d.Same != 100 {
		t.Errorf("the same before %d, %q, want %q", d.Same, lines(d), want)
	}
	if d := Diff(q, p); !slices.Equal(lines(d), back) || d.Same != 100 {
		t.Errorf("the other way round the same before %d, %q, want %q", d.Same, lines(d), back)
	}
	one := Diff(p, c.amend(p, 50, "", Range{60, 61}))
	if len(one.Changes) != 1 || one.Changes[0].Text != "position 60 is skipped" {
		t.Errorf("a skip of one position: %+v", one.Changes)
	}
}

func TestSubtract(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ranges := func(name string) (list []Range) {
			at := int64(0)
			for range rapid.IntRange(0, 5).Draw(t, name) {
				from := at + rapid.Int64Range(1, 5).Draw(t, "gap")
				at = from + rapid.Int64Range(1, 5).Draw(t, "length")
				list = append(list, Range{from, at})
			}
			return list
		}
		in := func(list []Range, p int64) bool {
			return slices.ContainsFunc(list, func(r Range) bool { return r.From <= p && p < r.To })
		}
		a, b := ranges("a"), ranges("b")
		left := subtract(a, b)
		for p := range int64(60) {
			if in(left, p) != (in(a, p) && !in(b, p)) {
				t.Fatalf("%v without %v is said to be %v", a, b, left)
			}
		}
	})
}

// The samples of an amended plan before the position have the fingerprints of the old plan.
func TestAmendKeepsFingerprints(t *testing.T) {
	c := living(t)
	p := c.seal(livingBlend)
	q := c.amend(p, 192, "samples: 500\nsources: [{name: web, shards: [part-3, part-4]}]", Range{380, 390})
	logs := make([][]string, 2) // lines of the logs
	for i, plan := range []*Plan{p, q} {
		d, err := Open(t.Context(), plan, OpenOptions{})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		for _, step := range stepsOf(t, d, 32) {
			line, err := json.Marshal(step)
			if err != nil {
				t.Fatal(err)
			}
			logs[i] = append(logs[i], string(line))
		}
	}
	if !slices.Equal(logs[0][:6], logs[1][:6]) {
		t.Error("steps before the amendment have other fingerprints")
	}
	if logs[0][6] == logs[1][6] {
		t.Error("the step after the amendment has no new windows in it")
	}
}

func FuzzParseAmendment(f *testing.F) {
	c := living(f)
	p := c.seal(livingBlend)
	f.Add([]byte("samples: 640\nsources:\n  - {name: web, shards: ['part-[34]'], max_epochs: 30}\n  - {name: code, "+
		"shards: [part-5]}\nweights: {web: 0.5, code: 1/4}\n"), int64(200))
	f.Add([]byte("stages: [{samples: 100, weights: {wiki: 1}}, {samples: rest, weights: {wiki: 1, web: 1}}]"),
		int64(399))
	f.Add([]byte("sources: &a [*a]\n"), int64(0))
	f.Fuzz(func(t *testing.T, data []byte, at int64) {
		a, err := ParseAmendment(data, "amend.yaml", c.dir)
		if err != nil {
			if !strings.HasPrefix(err.Error(), "amend.yaml") {
				t.Fatalf("the error does not name the file: %v", err)
			}
			return
		}
		a.At = at
		q, err := Amend(t.Context(), p, a, SealOptions{})
		if err != nil {
			return
		}
		for position := range min(at, q.Length()) {
			is, _ := q.Locate(position)
			if was, err := p.Locate(position); err != nil || is != was {
				t.Fatalf("amended at %d, %+v was %+v (%v)", at, is, was, err)
			}
		}
	})
}

// A run can switch to an amended plan while both are equal, and not later: not even if only the
// oldest amendment is before its position.
func TestCursorOfAmendedPlan(t *testing.T) {
	c := living(t)
	p := c.seal(livingBlend)
	q := c.amend(p, 200, "weights: {web: 1}")
	r := c.amend(q, 120, "", Range{120, 130})
	s := c.amend(r, 300, "samples: 310")
	for i, v := range []struct {
		plan, of *Plan
		position int64
		want     string
	}{
		{p, p, 400, ""}, {q, p, 200, ""}, {q, p, 201, "amends from position 200: the run has already " +
			"read"}, {q, p, -1, "position -1"},
		{r, p, 120, ""}, {r, p, 121, "amends from position 120: "}, {r, q, 121, "amends from position 120: "},
		{s, p, 120, ""}, {s, r, 300, ""}, {s, r, 301, "amends from position 300: "}, {s, q, 130,
			"amends from position 120: "}, {s, s, 310, ""}, {s, s, 311, "has 310"},
		{p, q, 0, "use the plan that the run started with"}, {q, s, 0, "use the plan that the run started with"},
	} {
		if err := (Cursor{v.of.Fingerprint(), v.position}).Check(v.plan); (err == nil) != (v.want == "") ||
			err != nil && !strings.Contains(err.Error(), v.want) {
			t.Errorf("case %d: %v, want %q", i+1, err, v.want)
		}
	}
}

// Every field of an amend.yaml has its row in docs/guides/amend.md, and every row its field.
func TestAmendmentIsDocumented(t *testing.T) {
	page, err := os.ReadFile("../docs/guides/amend.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(page), "## amend.yaml")
	text, _, _ = strings.Cut(text, "\n## ")
	var got []string
	for line := range strings.Lines(text) {
		if name, ok := strings.CutPrefix(line, "| `"); ok {
			name, _, _ = strings.Cut(name, "`")
			got = append(got, name)
		}
	}
	want := []string{}
	for _, of := range []struct {
		prefix string
		fields reflect.Type
	}{{"", reflect.TypeFor[Amendment]()}, {"sources[].", reflect.TypeFor[SourceConfig]()}} {
		for i := range of.fields.NumField() {
			if tag := of.fields.Field(i).Tag.Get("yaml"); tag != "" && tag != "-" &&
				of.prefix+tag != "sources[].weight" {
				want = append(want, of.prefix+tag)
			}
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("documented are %v, fields are %v", got, want)
	}
}

// A plan whose order is read from a cache cannot be amended. Plans of other orders differ from the
// first position on.
func TestAmendOtherOrders(t *testing.T) {
	c := living(t)
	p := c.seal(livingBlend)
	packed, read := *p, *p
	packed.order, read.order = &packedOrder{scheduled: scheduled{p}}, &megatronOrder{plan: p}
	if _, err := Amend(t.Context(), &read, &Amendment{Skips: []Range{{1, 2}}}, SealOptions{}); err == nil ||
		!strings.Contains(err.Error(), MegatronOrder) {
		t.Errorf("%s: %v", MegatronOrder, err)
	}
	for order, other := range map[string]*Plan{PackedOrder: &packed, MegatronOrder: &read} {
		if d := Diff(p, other); d.Same != 0 || d.Changes[0].What != "order" ||
			!strings.Contains(d.Changes[0].Text, order) {
			t.Errorf("%s: %+v", order, d)
		}
	}
}

// Epochs, limits and repeats of a source that has grown, against its samples one by one.
func TestEpochsOfGrownSource(t *testing.T) {
	c := living(t)
	p := c.amend(c.seal(livingBlend), 200, "samples: 800\nsources: [{name: web, shards: [part-3]}]")
	p = c.amend(p, 450, "sources: [{name: web, shards: [part-4, part-5]}]")
	s := &p.Sources[0]
	limits := []Number{}
	for _, text := range []string{"0.5", "1", "2", "7/3", "2.99", "3", "4.25"} {
		n, err := ParseNumber(text)
		if err != nil {
			t.Fatal(err)
		}
		limits = append(limits, n)
	}
	distinct, estimates := map[int64]bool{}, 0
	for n := range p.totals[0] {
		epoch, training := s.order.At(n)
		first, length := s.order.Span(epoch)
		for _, limit := range limits {
			// of the first n samples
			share := new(big.Rat).Add(new(big.Rat).SetInt64(epoch), big.NewRat(n-first, length))
			allowed, ok := s.within(limit)
			if keeps := share.Cmp(limit.rat) <= 0; !ok || keeps != (n <= allowed) {
				t.Fatalf("the first %d samples are %s epochs, and %d keep to %s", n, share.FloatString(3), allowed,
					limit)
			}
		}
		exact := int64(len(distinct))
		switch got := s.distinct(n); {
		case got != exact && (got < exact-20 || got > exact+20):
			t.Fatalf("the first %d samples have %d windows, not %d", n, exact, got)
		case got != exact:
			estimates++
			if !slices.ContainsFunc(s.Growth, func(g Growth) bool {
				return s.order.EpochOf(g.Sample) == epoch &&
					n > g.Sample
			}) {
				t.Fatalf("the first %d samples have %d windows, not %d, and the source has not grown since their "+
					"last epoch began", n, exact, got)
			}
		}
		distinct[training] = true
	}
	if estimates == 0 {
		t.Error("no epoch was cut where it is estimated")
	}
	if got := p.Summary().Sources[0]; got.Repeats != got.Samples-s.distinct(got.Samples) || got.Epochs < 2 {
		t.Errorf("the summary says %+v", got)
	}
}
