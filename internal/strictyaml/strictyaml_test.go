package strictyaml

import (
	"errors"
	"strings"
	"testing"

	"github.com/goccy/go-yaml/ast"
)

type inner struct {
	Rate  float64 `yaml:"rate"`
	Steps int64   `yaml:"warmup_steps"`
}

type Shared struct {
	Width uint `yaml:"width"`
}

type word string

func (w *word) UnmarshalYAML(n ast.Node) error {
	if s, ok := n.(*ast.StringNode); ok && s.Value == "yes" {
		*w = "yes"
		return nil
	}
	return At(n, errors.New(`want "yes"`))
}

type outer struct {
	Name     string           `yaml:"name"`
	Schedule inner            `yaml:"schedule"`
	Sources  []inner          `yaml:"sources"`
	ByName   map[string]inner `yaml:"by_name"`
	Word     word             `yaml:"word"`
	On       *bool            `yaml:"on"`
	Shared   `yaml:",inline"`
}

func decode(text string) (outer, error) {
	var v outer
	f, err := Parse([]byte(text), "f.yaml")
	if err != nil {
		return v, err
	}
	return v, f.Decode(&v)
}

func TestDecode(t *testing.T) {
	v, err := decode("# comment\nname: x\nschedule: {rate: 0.5}\nsources:\n  - rate: 2\n    warmup_steps: 7\nword: yes\n")
	if err != nil || v.Name != "x" || v.Schedule.Rate != 0.5 || v.Sources[0].Steps != 7 || v.Word != "yes" {
		t.Errorf("%+v, %v", v, err)
	}
	for _, empty := range []string{"", "# nothing\n", "---\n"} {
		if v, err := decode(empty); err != nil || v.Name != "" {
			t.Errorf("%q: %+v, %v", empty, v, err)
		}
	}
}

func TestMessages(t *testing.T) {
	for text, want := range map[string]string{
		"name: x\nnane: y\n":                               `f.yaml:2: unknown field "nane"; did you mean "name"?`,
		"schedule:\n  rte: 1\n":                            `f.yaml:2: unknown field "rte"; did you mean "rate"?`,
		"sources:\n  - rate: 1\n    ratee: 1\n":            `f.yaml:3: unknown field "ratee"; did you mean "rate"?`,
		"by_name:\n  a: {rats: 1}\n":                       `f.yaml:2: unknown field "rats"; did you mean "rate"?`,
		"warmup_steps: 3\n":                                `f.yaml:1: unknown field "warmup_steps"; did you mean "schedule.warmup_steps"?`,
		"schedule:\n  zzzzzzzzzzz: 3\n":                    `f.yaml:2: unknown field "zzzzzzzzzzz"; known are rate, warmup_steps`,
		"name: x\nschedule:\n  rate: fast\n":               `f.yaml:3: "fast" is not a number`,
		"schedule: {warmup_steps: 1.5}\n":                  `f.yaml:1: "1.5" is not a whole number`,
		"sources: [{warmup_steps: 15e-1}]\n":               `f.yaml:1: "15e-1" is not a whole number`,
		"width: -3\n":                                      `f.yaml:1: -3 is beyond what the field can hold: a whole number of 0 or more`,
		"schedule: {warmup_steps: 99999999999999999999}\n": `f.yaml:1: 99999999999999999999 is beyond what the field can hold: a whole number`,
		"\ufeffnane: x\n":                                  `f.yaml:1: unknown field "nane"; did you mean "name"?`,
		"name: \xff\n":                                     `f.yaml: not UTF-8 text`,
		"name: x\nsources: " + strings.Repeat("[", 10000):  `f.yaml:2: brackets are nested more than 100 deep`,
		"name: x\non: 7\n":                                 `f.yaml:2: "7" is not true or false`,
		"name: x\n\nword: no\n":                            `f.yaml:3: want "yes"`,
		"name: x\n---\nname: y\n":                          `f.yaml:2: a second YAML document begins; want one`,
		"name: [unclosed\n":                                `f.yaml:1: `,
		"name: a\nname: b\n":                               `f.yaml:2: `,
		"just text\n":                                      `f.yaml:1: `,
		"name: x\nsources: sh/crlf\n":                      `f.yaml:2: "sh/crlf" is not a list`,
		"name: x\nsources:\n  web: {rate: 1}\n":            `f.yaml:3: a mapping (name: value) is not a list`,
		"sources: {web: 1}\n":                              `f.yaml:1: a mapping (name: value) is not a list`,
		"sources: |\n  web\n":                              `f.yaml:1: a text of several lines is not a list`,
		"sources:\n  - [rate]\n":                           `f.yaml:2: a list is not a list of named fields`,
		"sources:\n  - - rate\n":                           `f.yaml:2: a list is not a list of named fields`,
		"schedule:\n  rate: [1]\n":                         `f.yaml:2: a list is not a number`,
		"schedule:\n  rate:\n    a: 1\n":                   `f.yaml:3: a mapping (name: value) is not a number`,
	} {
		_, err := decode(text)
		if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%q: %v\nwant %s", text, err, want)
		}
	}
}

func TestErrorf(t *testing.T) {
	f, err := Parse([]byte("name: x\nsources:\n  - rate: 1\n  - rate: -2\n"), "f.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		"$.sources[1].rate": "f.yaml:4: bad 7",
		"$.sources[1]":      "f.yaml:4: bad 7",
		"$.schedule.rate":   "f.yaml: bad 7",
	} {
		if got := f.Errorf(path, "bad %d", 7).Error(); got != want {
			t.Errorf("%s: %s, want %s", path, got, want)
		}
	}
	var none *File
	if got := none.Errorf("$.name", "bad %d", 7).Error(); got != "bad 7" {
		t.Errorf("without a file: %s", got)
	}
}

func TestHas(t *testing.T) {
	f, err := Parse([]byte("name: x\nsources:\n  - rate: 0\nword: \n"), "f.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var none *File
	for path, want := range map[string]bool{"$.name": true, "$.sources[0].rate": true, "$.sources[1]": false, "$.word": false, "$.on": false} {
		if f.Has(path) != want || none.Has(path) {
			t.Errorf("%s: %v, without a file %v", path, f.Has(path), none.Has(path))
		}
	}
}

func TestDecodeLoosely(t *testing.T) {
	f, err := Parse([]byte("name: x\nother: 3\n"), "f.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var v struct {
		Name string `yaml:"name"`
	}
	if err := f.DecodeLoosely(&v); err != nil || v.Name != "x" {
		t.Errorf("%+v, %v", v, err)
	}
}

// Whatever the bytes, there is an answer, not a panic.
func FuzzDecode(f *testing.F) {
	for _, s := range []string{"name: x\n", "sources:\n  - {rate: 1}\n", "a: &b [*b]\n", "? {x: y}\n: z\n", "---\n...\n", "by_name: {a: {b: 1}}"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if _, err := decode(text); err != nil && !strings.HasPrefix(err.Error(), "f.yaml") {
			t.Errorf("%q: message without the file: %v", text, err)
		}
	})
}
