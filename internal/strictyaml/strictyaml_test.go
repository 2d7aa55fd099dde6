package strictyaml

import (
	"errors"
	"fmt"
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
	return errors.New(`want "yes"`)
}

type outer struct {
	Name     string           `yaml:"name"`
	Schedule inner            `yaml:"schedule"`
	Sources  []inner          `yaml:"sources"`
	ByName   map[string]inner `yaml:"by_name"`
	Word     word             `yaml:"word"`
	On       *bool            `yaml:"on"`
	Small    int8             `yaml:"small"`
	Length   *int64           `yaml:"length" count:"suffix"`
	Files    []string         `yaml:"files"`
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
	v, err := decode("# comment\nname: x\nschedule: {rate: 0.5}\n" +
		"sources:\n  - rate: 2\n    warmup_steps: 7\nword: yes\n")
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
		"schedule:\n  name: x\n":                           `f.yaml:2: unknown field "name"; it belongs at the top level of the file`,
		"schedule:\n  zzzzzzzzzzz: 3\n":                    `f.yaml:2: unknown field "zzzzzzzzzzz"; known are rate, warmup_steps`,
		"name: x\nschedule:\n  rate: fast\n":               `f.yaml:3: schedule.rate is "fast"; it must be a number`,
		"schedule: {warmup_steps: 1.5}\n":                  `f.yaml:1: schedule.warmup_steps is 1.5; it must be a whole number`,
		"sources: [{warmup_steps: 15e-1}]\n":               `f.yaml:1: sources[0].warmup_steps is "15e-1"; it must be a whole number`,
		"width: -3\n":                                      `f.yaml:1: width is -3; it must be between 0 and 18446744073709551615`,
		"schedule: {warmup_steps: 99999999999999999999}\n": `f.yaml:1: schedule.warmup_steps is 99999999999999999999; it must be between -9223372036854775808 and 9223372036854775807`,
		"\ufeffnane: x\n":                                  `f.yaml:1: unknown field "nane"; did you mean "name"?`,
		"name: \xff\n":                                     `f.yaml: not UTF-8 text`,
		"name: x\nsources: " + strings.Repeat("[", 10000):  `f.yaml:2: brackets are nested more than 100 deep`,
		"name: x\non: 7\n":                                 `f.yaml:2: on is 7; it must be true or false`,
		"name: x\n\nword: no\n":                            `f.yaml:3: word: want "yes"`,
		"name: x\n---\nname: y\n":                          `f.yaml:2: second YAML document; only one is allowed`,
		"name: [unclosed\n":                                `f.yaml:1: `,
		"name: a\nname: b\n":                               `f.yaml:2: `,
		"just text\n":                                      `f.yaml:1: the file is "just text"; it must be a mapping`,
		"name: x\nsources: sh/crlf\n":                      `f.yaml:2: sources is "sh/crlf"; it must be a list: - {rate: …, warmup_steps: …}`,
		"name: x\nsources:\n  web: {rate: 1}\n":            `f.yaml:3: sources is a mapping; it must be a list: - {rate: …, warmup_steps: …}`,
		"sources: {web: 1}\n":                              `f.yaml:1: sources is a mapping; it must be a list: `,
		"sources: |\n  web\n":                              `f.yaml:1: sources is a text of several lines; it must be a list: `,
		"sources:\n  - [rate]\n":                           `f.yaml:2: sources[0] is a list; it must be a mapping`,
		"sources:\n  - rate\n":                             `f.yaml:2: sources[0] is "rate"; it must be a mapping, such as - {rate: rate}`,
		"schedule: fast\n":                                 `f.yaml:1: schedule is "fast"; it must be a mapping, such as schedule: {rate: fast}`,
		"schedule:\n  rate: [1]\n":                         `f.yaml:2: schedule.rate is a list; it must be a number`,
		"schedule:\n  rate:\n    a: 1\n":                   `f.yaml:3: schedule.rate is a mapping; it must be a number`,
		"by_name: 3\n":                                     `f.yaml:1: by_name is 3; it must be a mapping: {NAME: …}`,
		"name: [x]\n":                                      `f.yaml:1: name is a list; it must be a text`,
		"name: !!str x\n":                                  `f.yaml:1: the tag !!str is not supported`,
		// A number is a text if YAML has no other way to write it.
		"name: 010\n":  `f.yaml:1: name is 010: it is not a text in YAML; write "010" in quotation marks`,
		"name: 1.0\n":  `f.yaml:1: name is 1.0: it is not a text in YAML; write "1.0" in quotation marks`,
		"name: True\n": `f.yaml:1: name is True: it is not a text in YAML`,
		"name: .inf\n": `f.yaml:1: name is .inf: it is not a text in YAML`,
		// Numbers are decimal and within their range.
		"width: 010\n":                         `f.yaml:1: width: 010 starts with 0, which may mean an octal number; write 10`,
		"width: 0o10\n":                        `f.yaml:1: width: 0o10 is not written in decimal; write 8`,
		"width: 0x10\n":                        `f.yaml:1: width: 0x10 is not written in decimal; write 16`,
		"width: 0b10\n":                        `f.yaml:1: width: 0b10 is not written in decimal; write 2`,
		"width: 1_0\n":                         `f.yaml:1: width: 1_0 has underscores; write 10`,
		"width: 18446744073709551616\n":        `f.yaml:1: width is 18446744073709551616; it must be between 0 and 18446744073709551615`,
		"width: 1.8446744073709551616e19\n":    `f.yaml:1: width is 1.8446744073709551616e19; it must be between 0 and 18446744073709551615`,
		"width: 1e9999999999\n":                `f.yaml:1: width: 1e9999999999 is out of range`,
		"width: -.inf\n":                       `f.yaml:1: width is -.inf; it must be a finite number`,
		"width: true\n":                        `f.yaml:1: width is true; it must be a whole number of 0 or more`,
		"small: 256\n":                         `f.yaml:1: small is 256; it must be between -128 and 127`,
		"schedule: {rate: .inf}\n":             `f.yaml:1: schedule.rate is .inf; it must be a finite number`,
		"schedule: {rate: .nan}\n":             `f.yaml:1: schedule.rate is .nan; it must be a finite number`,
		"schedule: {rate: 1e399}\n":            `f.yaml:1: schedule.rate is 1e399, which is out of range`,
		"schedule: {rate: 1e-399}\n":           `f.yaml:1: schedule.rate is 1e-399, which is out of range`,
		"schedule: {rate: 0x1p3}\n":            `f.yaml:1: schedule.rate is "0x1p3"; it must be a number`,
		"schedule: {rate: 0.0_1}\n":            `f.yaml:1: schedule.rate: 0.0_1 has underscores; write 0.01`,
		"length: 20x\n":                        `f.yaml:1: length is "20x"; it must be a whole number, which may end with k, M, G, B or T`,
		"length: 10000000T\n":                  `f.yaml:1: length: 10000000T is out of range`,
		"schedule: {warmup_steps: 20k}\n":      `f.yaml:1: schedule.warmup_steps is "20k"; it must be a whole number`,
		"schedule: {warmup_steps: 1, rate: }a": `f.yaml:1: `,
		// A problem behind an alias is at the alias.
		"schedule: &a {rate: 1}\nby_name:\n  x: *a\n\nsources: *a\n": `f.yaml:5: sources is a mapping; it must be a list: - {rate: …, warmup_steps: …} (through the alias *a)`,
		"schedule: &a {rate: 1}\nby_name: *a\n":                      `f.yaml:2: by_name.rate is 1; it must be a mapping, such as rate: {rate: 1} (through the alias *a)`,
		"name: *a\nschedule: &a {rate: 1}\n":                         `f.yaml:1: the alias *a has no anchor &a before it`,
		"by_name: &a\n  x: *a\n":                                     `f.yaml:2: the alias *a is within its own anchor`,
		"schedule:\n  <<: 3\n":                                       `f.yaml:2: << merges mappings, but the value is 3`,
		"schedule:\n  <<: *a\n":                                      `f.yaml:2: the alias *a has no anchor &a before it`,
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
	for path, want := range map[string]bool{"$.name": true, "$.sources[0].rate": true, "$.sources[1]": false,
		"$.word": false, "$.on": false} {
		if f.Has(path) != want || none.Has(path) {
			t.Errorf("%s: %v, without a file %v", path, f.Has(path), none.Has(path))
		}
	}
}

func TestFields(t *testing.T) {
	f, err := Parse([]byte("name: x\nother: {a: 3}\n"), "f.yaml")
	if err != nil {
		t.Fatal(err)
	}
	fields, err := f.Fields()
	if inner, ok := fields["other"].(map[string]any); err != nil || fields["name"] != "x" || !ok ||
		inner["a"] != uint64(3) {
		t.Errorf("%+v, %v", fields, err)
	}
	if f.Text("$.name") != "x" || f.Text("$.other") != "" || f.Text("$.none") != "" {
		t.Errorf("%q, %q, %q", f.Text("$.name"), f.Text("$.other"), f.Text("$.none"))
	}
}

func TestDecodeValues(t *testing.T) {
	v, err := decode("name: 12\nschedule: &a {rate: 5e-05, warmup_steps: 1e3}\nsources: [*a, {<<: *a, rate: " +
		"-0.5}]\nwidth: 18446744073709551615\n" +
		"length: 1.5M\nfiles: one\non: false\nby_name: {\"a b\": *a}\nsmall: -128\n")
	if err != nil {
		t.Fatal(err)
	}
	if v.Name != "12" || v.Schedule != (inner{5e-5, 1000}) || len(v.Sources) != 2 || v.Sources[0] != v.Schedule ||
		v.Sources[1] != (inner{-0.5, 1000}) ||
		v.Width != 1<<64-1 || *v.Length != 1_500_000 || len(v.Files) != 1 || v.Files[0] != "one" || *v.On ||
		v.ByName["a b"] != v.Schedule || v.Small != -128 {
		t.Errorf("%+v", v)
	}
	if v, err = decode("length: 1500000\nfiles: [a, b]\nname: null\non: ~\n"); err != nil || *v.Length != 1_500_000 ||
		len(v.Files) != 2 || v.On != nil {
		t.Errorf("%+v, %v", v, err)
	}
}

// All problems of a file are reported, each with its line, and what could be read is there.
func TestAllProblems(t *testing.T) {
	text := "nane: x\nschedule:\n  rate: fast\n  warmup_steps: 3\nsources:\n  - {rate: 1, rte: 2}\n  - " +
		"{warmup_steps: 010}\nwidth: 1_0\n"
	v, err := decode(text)
	want := `f.yaml:1: unknown field "nane"; did you mean "name"?
f.yaml:3: schedule.rate is "fast"; it must be a number
f.yaml:6: unknown field "rte"; did you mean "rate"?
f.yaml:7: sources[1].warmup_steps: 010 starts with 0, which may mean an octal number; write 10
f.yaml:8: width: 1_0 has underscores; write 10`
	if err == nil || err.Error() != want {
		t.Errorf("%v\nwant\n%s", err, want)
	}
	if v.Schedule.Steps != 3 || v.Sources[0].Rate != 1 {
		t.Errorf("%+v", v)
	}
	if !Unread(err, "$.width") || !Unread(err, "$.sources") || !Unread(err, "$.sources[1]") ||
		Unread(err, "$.sources[2]") || Unread(nil, "$.width") {
		t.Error("Unread is wrong")
	}
	f, perr := Parse([]byte(text), "f.yaml")
	if perr != nil {
		t.Fatal(perr)
	}
	// What follows from a value that could not be read is not reported, everything else is.
	got := All([]error{err}, []error{nil, f.Errorf("$.width", "width is 0"), f.Errorf("$.schedule", "no rate"),
		f.Errorf("$.schedule.warmup_steps", "too few"), f.Errorf("$.name", "no name")})
	if want := strings.Replace(want, "f.yaml:6", "f.yaml:4: too few\nf.yaml:6", 1) + "\nf.yaml: no name"; got == nil ||
		got.Error() != want {
		t.Errorf("%v\nwant\n%s", got, want)
	}
	if All(nil, []error{nil}) != nil {
		t.Error("no problem is an error")
	}
}

// Merges of merges come to an end.
func TestMergesEnd(t *testing.T) {
	text := "by_name:\n  a0: &a0 {rate: 1}\n"
	for i := range 40 {
		text += fmt.Sprintf("  a%d: &a%d {<<: [*a%d, *a%d]}\n", i+1, i+1, i, i)
	}
	if _, err := decode(text); err == nil || !strings.Contains(err.Error(),
		"more than 10000 merged mappings; use fewer aliases") {
		t.Errorf("%v", err)
	}
}

// Whatever the bytes, there is an answer, not a panic.
func FuzzDecode(f *testing.F) {
	for _, s := range []string{"name: x\n", "sources:\n  - {rate: 1}\n", "a: &b [*b]\n", "? {x: y}\n: z\n",
		"---\n...\n", "by_name: {a: {b: 1}}"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if _, err := decode(text); err != nil && !strings.HasPrefix(err.Error(), "f.yaml") {
			t.Errorf("%q: message without the file: %v", text, err)
		}
	})
}
