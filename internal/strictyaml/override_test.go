package strictyaml

import (
	"reflect"
	"slices"
	"strings"
	"testing"
)

type overridden struct {
	Steps int64     `yaml:"steps"`
	Name  string    `yaml:"name"`
	Limit *float64  `yaml:"limit"`
	Betas []float64 `yaml:"betas"`
	Inner struct {
		Rate  float64 `yaml:"rate" was:"speed"`
		Deep  deep    `yaml:"deep" was:"below"`
		Words []string
	} `yaml:"inner" was:"within"`
	List []oldInner `yaml:"list"`
}

type deep struct {
	On   bool   `yaml:"on"`
	Text string `yaml:"text"`
}

// A file with settings is decoded like a file that has their values.
func TestOverride(t *testing.T) {
	for _, test := range []struct {
		file     string
		settings []string
		same     string // a file without settings
	}{
		{"steps: 1\nname: a\n", []string{"steps=2"}, "steps: 2\nname: a\n"},
		{"steps: 1\n", []string{"steps=2", "steps=3"}, "steps: 3\n"},
		{"", []string{"name=a=b"}, "name: a=b\n"},
		{"# nothing\n", []string{"inner.deep.on=true"}, "inner: {deep: {on: true}}\n"},
		{"name: x\nlimit: 2\n", []string{"name=", "limit=null"}, "steps: 7\n"},
		{"betas: [1, 2]\n", []string{"betas=[0.9, 0.95]"}, "betas: [0.9, 0.95]\n"},
		{"inner: {rate: 1, deep: {on: true, text: a}}\n", []string{"inner.deep.text=b"},
			"inner: {rate: 1, deep: {on: true, text: b}}\n"},
		{"inner: {rate: 1, deep: {on: true, text: a}}\n", []string{"inner.deep={text: b}"},
			"inner: {rate: 1, deep: {text: b}}\n"},
		{"inner: {rate: 1, deep: {on: true}}\n", []string{"inner={rate: 2}", "inner.deep.text=c"},
			"inner: {rate: 2, deep: {text: c}}\n"},
		{"inner: {rate: 1}\n", []string{"inner.deep.text=c", "inner={rate: 2}"}, "inner: {rate: 2}\n"},
		{"inner: null\n", []string{"inner.rate=2"}, "inner: {rate: 2}\n"},
		{"inner: {deep: null}\n", []string{"inner.deep={on: true}", "inner.deep.text=a"},
			"inner: {deep: {on: true, text: a}}\n"},
		{"inner: &i {rate: 1}\n", []string{"inner.rate=2"}, "inner: {rate: 2}\n"},
		{"within: {speed: 1}\n", []string{"inner.rate=2"}, "inner: {rate: 2}\n"},
		{"within: {below: {on: true}}\n", []string{"within.below.text=x"}, "inner: {deep: {on: true, text: x}}\n"},
		{"list: [{rate: 1}]\n", []string{"list=[{rate: 2}, {rate: 3}]"}, "list: [{rate: 2}, {rate: 3}]\n"},
		{"steps: wrong\n", []string{"steps=2"}, "steps: 2\n"}, // the file's value does not count
	} {
		decode := func(text string, settings []string) (v overridden) {
			v.Steps = 7
			f, err := Parse([]byte(text), "f.yaml")
			if err != nil {
				t.Fatal(err)
			}
			if err := f.Override(&v, "--set", settings); err != nil {
				t.Errorf("%q %q: %v", text, settings, err)
			}
			if f.Empty() {
				t.Errorf("%q %q is empty", text, settings)
			}
			if err := f.Decode(&v); err != nil {
				t.Errorf("%q %q: %v", text, settings, err)
			}
			return v
		}
		if got, want := decode(test.file, test.settings), decode(test.same, nil); !reflect.DeepEqual(got, want) {
			t.Errorf("%q with %q: %+v, want %+v", test.file, test.settings, got, want)
		}
	}
}

// Messages about overridden values name the setting, and messages about other values the line.
func TestOverrideMessages(t *testing.T) {
	for _, test := range []struct {
		setting, want string
	}{
		{"steps=x", `--set steps: steps is "x"; it must be a whole number`},
		{"steps=[1", `--set steps: `},
		{"step=1", `--set step: unknown field "step"; did you mean "steps"?`},
		{"inner.dep.on=true", `--set inner.dep.on: unknown field "inner.dep.on"; did you mean "inner.deep"?`},
		{"text=a", `--set text: unknown field "text"; did you mean "inner.deep.text"?`},
		{"steps.on=1", `--set steps.on: unknown field "steps.on"; steps is a whole number: set it as a whole, as in steps=…`},
		{"list[0].rate=1", `--set list[0].rate: unknown field "list[0].rate"; list is a list: set it as a whole, as in list=…`},
		{"list.rate=1", `--set list.rate: unknown field "list.rate"; list is a list: set it as a whole, as in list=…`},
		{"inner=3", `--set inner: inner is 3; it must be a mapping, such as inner: {rate: 3}`},
		{"inner={rate: x}", `--set inner: inner.rate is "x"; it must be a number`},
		{"inner={speed: 1, rate: 2}", `--set inner: speed and rate are the same field`},
		{"inner={rat: 1}", `--set inner: unknown field "rat"; did you mean "rate"?`},
		{"steps", `--set "steps": must be FIELD=VALUE, such as steps=100`},
		{"=1", `--set "=1": must be FIELD=VALUE, such as steps=100`},
		{"steps=*a", `--set steps: anchors and aliases cannot be used here; write the value itself`},
		{"inner={rate: &a 1}", `--set inner: anchors and aliases cannot be used here; write the value itself`},
		{"name=a\n---\nb", `--set name: second YAML document; only one is allowed`},
		{"name=s3://b/x", `--set name: `},
		{"steps=\xff", `--set steps: not UTF-8 text`},
	} {
		f, err := Parse([]byte("name: &a b\nlimit: no\n"), "f.yaml")
		if err != nil {
			t.Fatal(err)
		}
		var v overridden
		overridden := f.Override(&v, "--set", []string{test.setting})
		got := All([]error{overridden, f.Decode(&v)}).Error()
		file, rest, ok := strings.Cut(got, "\n")
		if !ok || !strings.HasPrefix(file, "f.yaml:2: limit is") || !strings.HasPrefix(rest, test.want) {
			t.Errorf("%q: %q, want %q", test.setting, got, test.want)
		}
	}
}

// Has, Text, Errorf and Warnings respect settings.
func TestOverrideQueries(t *testing.T) {
	f, err := Parse([]byte("name: a\nsteps: 4\ninner:\n  speed: 1\n"), "f.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var v overridden
	if err := f.Override(&v, "--set", []string{"name=b", "steps=null", "within.below.text=c",
		"list=[{rate: 1}, {pace: 2}]"}); err != nil {
		t.Fatal(err)
	}
	if err := f.Decode(&v); err != nil {
		t.Fatal(err)
	}
	if f.Text("$.name") != "b" || f.Text("$.inner.deep.text") != "c" {
		t.Error("Text does not read the settings")
	}
	if f.Has("$.steps") || !f.Has("$.inner.deep.text") || !f.Has("$.inner.rate") || f.Has("$.limit") ||
		!f.Has("$.list[1].rate") || f.Has("$.list[1].steps") {
		t.Error("Has does not read the settings")
	}
	for path, want := range map[string]string{"$.name": "--set name: wrong", "$.inner.rate": "f.yaml:4: wrong",
		"$.list[1].rate": "--set list: wrong", "$.inner.deep.text": "--set within.below.text: wrong",
		"$.inner.deep.on": "f.yaml:4: wrong"} {
		if got := f.Errorf(path, "wrong").Error(); got != want {
			t.Errorf("%s: %q, want %q", path, got, want)
		}
	}
	f.Warnf("$.name", "value b is now called c")
	want := []string{"f.yaml:4: field speed is now called rate", "--set name: value b is now called c",
		"--set within.below.text: field within is now called inner",
		"--set within.below.text: field below is now called deep",
		"--set list: field pace is now called rate"}
	if got := f.Warnings(); !slices.Equal(got, want) {
		t.Errorf("warnings %q, want %q", got, want)
	}
}
