package blend

import (
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/google/go-cmp/cmp"
)

// A docField is a row of a table of fields in docs/formats/config.md.
type docField struct {
	name, typ, byDefault string
}

// docSection returns what docs/formats/config.md says under "## title": the text, and the rows of
// the tables whose first column is "field".
func docSection(t *testing.T, title string) (text string, fields []docField) {
	t.Helper()
	page, err := os.ReadFile("../docs/formats/config.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, ok := strings.Cut(string(page), "\n## "+title+"\n")
	if !ok {
		t.Fatalf("the page has no section %q", title)
	}
	text, _, _ = strings.Cut(text, "\n## ")
	inTable := false
	for line := range strings.Lines(text) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		switch {
		case !strings.HasPrefix(line, "|"):
			inTable = false
		case cells[0] == "field":
			inTable = true
		case inTable && !strings.HasPrefix(cells[0], "---"):
			if len(cells) != 6 {
				t.Fatalf("a row of %d cells: %s", len(cells), line)
			}
			fields = append(fields, docField{strings.Trim(cells[0], "`"), cells[1], cells[2]})
		}
	}
	return text, fields
}

// docTypes lists the fields of a struct by their names in YAML, in order, with the words for their
// types.
func docTypes(of reflect.Type, prefix string) (names, types []string) {
	for i := range of.NumField() {
		f := of.Field(i)
		tag, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		if tag == "" {
			continue
		}
		typ := f.Type
		if typ.Kind() == reflect.Pointer {
			typ = typ.Elem()
		}
		var word string
		var inner reflect.Type
		switch {
		case typ == reflect.TypeFor[Number]():
			word = "exact number"
		case typ == reflect.TypeFor[StageLength](), typ.Kind() >= reflect.Int && typ.Kind() <= reflect.Uint64:
			word = "whole number"
		case typ.Kind() == reflect.Map:
			word = "map"
		case typ.Kind() == reflect.Struct:
			word = "map"
			n, w := docTypes(typ, prefix+tag+".")
			names, types = append(append(names, prefix+tag), n...), append(append(types, word), w...)
			continue
		case typ.Kind() == reflect.String:
			word = "text"
		case typ.Kind() == reflect.Slice:
			word = "list"
			if typ.Elem().Kind() == reflect.Struct {
				inner = typ.Elem()
			}
		}
		names, types = append(names, prefix+tag), append(types, word)
		if inner != nil {
			n, w := docTypes(inner, prefix+tag+"[].")
			names, types = append(names, n...), append(types, w...)
		}
	}
	return names, types
}

// The page has the fields of Config, each once and in their order, with their types.
func TestConfigDocFields(t *testing.T) {
	_, fields := docSection(t, "blend.yaml")
	var onPage []string
	for _, f := range fields {
		onPage = append(onPage, f.name)
	}
	names, types := docTypes(reflect.TypeFor[Config](), "")
	if diff := cmp.Diff(names, onPage); diff != "" {
		t.Fatalf("fields (-code +page):\n%s", diff)
	}
	for i, f := range fields {
		if types[i] == "" || !strings.HasPrefix(f.typ, types[i]) {
			t.Errorf("the type of %s is %q on the page, %q in the code", f.name, f.typ, types[i])
		}
	}
}

// A file that leaves a field out is refused if the page calls the field required, and else
// accepted.
func TestConfigDocRequired(t *testing.T) {
	const native = `
order: native
sequence_length: 16
seed: 1
validation: 0.1
samples: 9
sources: [{name: a, shards: [a], weight: 1, max_epochs: 3}]
stages: [{samples: 9, weights: {a: 1}}]
skips: [{from: 0, to: 2}]
`
	const read = `
order: megatron
megatron: {cache: cache, name: a, split: train, validation: b, root: .}
`
	_, fields := docSection(t, "blend.yaml")
	for _, f := range fields {
		full := native
		if strings.HasPrefix(f.name, "megatron") {
			full = read
		}
		switch f.name {
		case "tokens":
			full = strings.Replace(full, "samples: 9\n", "tokens: 144\n", 1)
		case "stages[].tokens":
			full = strings.Replace(full, "{samples: 9", "{tokens: 144", 1)
		case "shuffle", "shuffle.block", "shuffle.group":
			full += "shuffle: {block: 3, group: 2}\n"
		case "packing":
			full += "packing: best_fit\n"
		case "pad":
			full += "packing: best_fit\npad: 3\n"
		}
		var config map[string]any
		if err := yaml.Unmarshal([]byte(full), &config); err != nil {
			t.Fatal(err)
		}
		in, name := config, f.name
		if list, inner, ok := strings.Cut(name, "[]."); ok {
			in, name = config[list].([]any)[0].(map[string]any), inner
		} else if outer, inner, ok := strings.Cut(name, "."); ok {
			in, name = config[outer].(map[string]any), inner
		}
		if _, ok := in[name]; !ok {
			t.Errorf("the test's configuration has no %s", f.name)
		}
		delete(in, name)
		text, err := yaml.Marshal(config)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := ParseConfig(text, "blend.yaml", "."); (err != nil) != strings.HasPrefix(f.byDefault, "required") {
			t.Errorf("without %s, whose default is %q on the page: %v", f.name, f.byDefault, err)
		}
	}
}

var docYAML = regexp.MustCompile("(?s)```yaml\n(.*?)```")

func TestConfigDocExample(t *testing.T) {
	text, _ := docSection(t, "blend.yaml")
	examples := docYAML.FindAllStringSubmatch(text, -1)
	if len(examples) != 2 {
		t.Fatalf("%d examples", len(examples))
	}
	if c, err := ParseConfig([]byte(examples[1][1]), "example", "."); err != nil || c.Order != "megatron" ||
		c.Megatron.Split != "train" {
		t.Errorf("%+v, %v", c, err)
	}
	c, err := ParseConfig([]byte(examples[0][1]), "example", ".")
	if err != nil {
		t.Fatal(err)
	}
	if c.SequenceLength != 4096 || len(c.Sources) != 2 || len(c.Stages) != 2 ||
		!slices.Equal(c.Sources[1].Shards, []string{"wiki/part-*.idx"}) {
		t.Errorf("%+v", c)
	}
}
