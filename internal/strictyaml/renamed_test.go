package strictyaml

import (
	"maps"
	"slices"
	"strings"
	"testing"
)

type oldInner struct {
	Rate  float64 `yaml:"rate" was:"speed,pace"`
	Steps int64   `yaml:"steps"`
}

type oldOuter struct {
	List   []oldInner `yaml:"list" was:"items"`
	Choice string     `yaml:"choice"`
}

// A file with old names of fields is read, with a warning for each place, and messages about its
// values have their lines.
func TestRenamed(t *testing.T) {
	text := "items:\n  - {rate: 1}\n  - steps: 2\n    pace: 3\nchoice: a\n"
	f, err := Parse([]byte(text), "f.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var v oldOuter
	if err := f.Decode(&v); err != nil || len(v.List) != 2 || v.List[0].Rate != 1 || v.List[1].Rate != 3 {
		t.Fatalf("%+v, %v", v, err)
	}
	f.Warnf("$.choice", "value a is now called b")
	want := []string{"f.yaml:1: field items is now called list", "f.yaml:4: field pace is now called rate",
		"f.yaml:5: value a is now called b"}
	if got := f.Warnings(); !slices.Equal(got, want) {
		t.Errorf("warnings %q, want %q", got, want)
	}
	if !f.Has("$.list[1].rate") || !f.Has("$.list[0].rate") || f.Has("$.list[0].steps") {
		t.Error("Has does not find a field under its new name")
	}
	if err := f.Errorf("$.list[1].rate", "too high"); err.Error() != "f.yaml:4: too high" {
		t.Error(err)
	}
	if (*File)(nil).Warnings() != nil {
		t.Error("warnings without a file")
	}
	(*File)(nil).Warnf("$", "nothing")
}

func TestRenamedMistakes(t *testing.T) {
	for text, want := range map[string]string{
		"list: []\nitems: []\n": "f.yaml:2: list and items are the same field: items is the old name of " +
			"list; remove it",
		"items: []\nlist: []\n": "f.yaml:2: items and list are the same field: items is the old name of " +
			"list; remove it",
		"list: [{speed: 1, pace: 2}]\n": "are the same field",
		"items: [{speed: x}]\n":         "f.yaml:1: list[0].rate is \"x\"; it must be a number",
		"item: []\n":                    `unknown field "item"; known are list, choice`,
	} {
		f, err := Parse([]byte(text), "f.yaml")
		if err != nil {
			t.Fatal(err)
		}
		var v oldOuter
		if err := f.Decode(&v); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
}

func TestOldNames(t *testing.T) {
	want := map[string]string{"within": "inner", "inner.speed": "inner.rate", "within.rate": "inner.rate",
		"within.speed": "inner.rate", "within.deep": "inner.deep", "inner.below": "inner.deep",
		"within.below":   "inner.deep",
		"within.deep.on": "inner.deep.on", "inner.below.on": "inner.deep.on", "within.below.on": "inner.deep.on",
		"within.deep.text": "inner.deep.text", "inner.below.text": "inner.deep.text",
		"within.below.text": "inner.deep.text"}
	if got := OldNames(&overridden{}); !maps.Equal(got, want) {
		t.Errorf("old names %v, want %v", got, want)
	}
}
