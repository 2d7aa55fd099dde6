package train

import (
	"fmt"
	"maps"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"mula/blend"
	"mula/moe"
	"mula/train/optimizer"
	"mula/xpu"
)

// docSection returns what docs/formats/config.md says about train.yaml: the text, and the rows,
// header first, of the tables whose first column has the given name.
func docSection(t *testing.T, column string) (text string, rows [][]string) {
	t.Helper()
	page, err := os.ReadFile("../docs/formats/config.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, ok := strings.Cut(string(page), "\n## train.yaml\n")
	if !ok {
		t.Fatal("the page has no section train.yaml")
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
		case cells[0] == column:
			inTable = true
			if rows == nil {
				rows = append(rows, cells)
			} else if !slices.Equal(rows[0], cells) {
				t.Fatalf("two tables with different columns: %v and %v", rows[0], cells)
			}
		case inTable && !strings.HasPrefix(cells[0], "---"):
			if len(cells) != len(rows[0]) {
				t.Fatalf("a row of %d cells: %s", len(cells), line)
			}
			rows = append(rows, cells)
		}
	}
	if rows == nil {
		t.Fatalf("the page has no table with the column %q", column)
	}
	return text, rows
}

// A docField is a row of a table of fields.
type docField struct {
	typ, byDefault, resume string
}

func docFields(t *testing.T) map[string]docField {
	t.Helper()
	_, rows := docSection(t, "field")
	if want := []string{"field", "type", "default", "allowed", "resume", "meaning"}; !slices.Equal(rows[0], want) {
		t.Fatalf("columns %v, want %v", rows[0], want)
	}
	fields := map[string]docField{}
	for _, cells := range rows[1:] {
		name := strings.Trim(cells[0], "`")
		if _, ok := fields[name]; ok {
			t.Errorf("the page has %s twice", name)
		}
		fields[name] = docField{cells[1], cells[2], cells[4]}
	}
	return fields
}

// docValues are the fields of a configuration by their names in YAML; a pointer that is nil is a
// field without a value.
func docValues(v reflect.Value, prefix string, into map[string]reflect.Value) map[string]reflect.Value {
	for i := range v.NumField() {
		tag, options, _ := strings.Cut(v.Type().Field(i).Tag.Get("yaml"), ",")
		f := v.Field(i)
		switch {
		case options == "inline":
			docValues(f, prefix, into)
		case tag == "":
		case f.Kind() == reflect.Struct:
			docValues(f, prefix+tag+".", into)
		default:
			into[prefix+tag] = f
		}
	}
	return into
}

func valuesOf(c Config) map[string]reflect.Value {
	return docValues(reflect.ValueOf(c), "", map[string]reflect.Value{})
}

// The page has the fields of Config, with their types, and says rightly which may change when a run
// is resumed.
func TestConfigDocFields(t *testing.T) {
	fields, values := docFields(t), valuesOf(defaultConfig())
	if diff := cmp.Diff(slices.Sorted(maps.Keys(values)), slices.Sorted(maps.Keys(fields))); diff != "" {
		t.Fatalf("fields (-code +page):\n%s", diff)
	}
	for name, f := range fields {
		typ := values[name].Type()
		if typ.Kind() == reflect.Pointer {
			typ = typ.Elem()
		}
		var words []string
		switch kind := typ.Kind(); {
		case kind == reflect.String:
			words = []string{"word", "path"}
		case kind >= reflect.Int && kind <= reflect.Uint64:
			words = []string{"whole number"}
		case kind == reflect.Float64:
			words = []string{"number"}
		case kind == reflect.Bool:
			words = []string{"true or false"}
		case kind == reflect.Slice:
			words = []string{"list"}
		}
		if !slices.ContainsFunc(words, func(w string) bool { return strings.HasPrefix(f.typ, w) }) {
			t.Errorf("the type of %s is %q on the page, %v in the code", name, f.typ, typ)
		}
		want := "fixed"
		if slices.Contains(free, name) {
			want = "may change"
		}
		if f.resume != want && !strings.HasPrefix(f.resume, want+", ") {
			t.Errorf("on resume %s is %q on the page, %q in the code", name, f.resume, want)
		}
	}
}

var (
	docSpan   = regexp.MustCompile("`([^`]*)`")
	docNumber = regexp.MustCompile(`-?[0-9]+(\.[0-9]+)?(e-?[0-9]+)?`)
	docYAML   = regexp.MustCompile("(?s)```yaml\n(.*?)```")
)

// A default is on the page as one `value` exactly if it is the same for all plans, presets and
// batch sizes. It then equals the value of defaultConfig. The others are described in words, and
// each number and `value` in the description is a result of resolve in some case.
func TestConfigDocDefaults(t *testing.T) {
	plan, err := blend.ReadPlan(makePlan(t, t.TempDir(), "plan.json", "samples: 2000000\n"))
	if err != nil {
		t.Fatal(err)
	}
	const pack = "samples: 2000000\npacking: best_fit\npad: 0\n"
	packed, err := blend.ReadPlan(makePlan(t, t.TempDir(), "packed.json", pack))
	if err != nil {
		t.Fatal(err)
	}
	const vocabulary, rounded = 60000, 60032
	large, bare := *plan, *plan
	large.Tokenizer, bare.Tokenizer = &blend.Tokenizer{Vocabulary: vocabulary, EOD: 7}, nil
	bare.Sources = slices.Clone(plan.Sources)
	for i := range bare.Sources {
		bare.Sources[i].Validation = 0
	}
	defaults, varies, seen := valuesOf(defaultConfig()), map[string]bool{}, map[string][]string{}
	for _, preset := range moe.Presets() {
		for _, p := range []*blend.Plan{plan, &large, &bare, packed} {
			for _, batch := range []int{3, 32} {
				for _, rule := range optimizer.Names() {
					for _, schedule := range []optimizer.ScheduleName{optimizer.Cosine, optimizer.Linear, optimizer.WSD,
						optimizer.Constant} {
						if (optimizer.Name(rule) == optimizer.ScheduleFreeAdamW) != (schedule == optimizer.Constant) {
							continue
						}
						c := defaultConfig()
						if err := c.Model.usePreset(preset); err != nil {
							t.Fatal(err)
						}
						c.BatchSize, c.Optimizer.Name, c.Schedule.Name = batch, optimizer.Name(rule), schedule
						if batch == 3 {
							c.Precision = xpu.BF16Mixed
						}
						if c, err = c.resolve(p); err != nil {
							t.Fatal(err)
						}
						// Ours, not resolve's.
						c.Model.Preset, c.BatchSize, c.Optimizer.Name, c.Schedule.Name = defaultPreset,
							defaultConfig().BatchSize, optimizer.AdamW, optimizer.Cosine
						c.Precision = defaultConfig().Precision
						for name, v := range valuesOf(c) {
							varies[name] = varies[name] || !reflect.DeepEqual(defaults[name].Interface(), v.Interface())
							if numbers, ok := v.Interface().([]float64); ok {
								for _, x := range numbers {
									seen[name] = append(seen[name], fmt.Sprint(x))
								}
							} else if s := fmt.Sprint(reflect.Indirect(v)); !slices.Contains(seen[name], s) {
								seen[name] = append(seen[name], s)
							}
						}
					}
				}
			}
		}
	}
	if !slices.Contains(seen["model.vocab_size"], fmt.Sprint(rounded)) {
		t.Errorf("vocab_size is %v, never %d", seen["model.vocab_size"], rounded)
	}
	fields := docFields(t)
	for name, f := range fields {
		if _, ok := defaults[name]; !ok {
			continue // TestConfigDocFields reports it
		}
		if name == "router_bias.update_speed" || name == "prediction_loss.coefficient" {
			continue // of a model without a preset; see TestRouterBiases and TestPredictions
		}
		span := docSpan.FindStringSubmatch(f.byDefault)
		constant := span != nil && span[0] == f.byDefault
		if constant == varies[name] {
			t.Errorf("the default of %s is %q on the page, %v in the code", name, f.byDefault, seen[name])
			continue
		}
		if constant {
			onPage := reflect.New(defaults[name].Type())
			if err := yaml.Unmarshal([]byte(span[1]), onPage.Interface()); err != nil {
				t.Errorf("the default of %s: %v", name, err)
			} else if !cmp.Equal(onPage.Elem().Interface(), defaults[name].Interface(), cmpopts.EquateEmpty()) {
				t.Errorf("the default of %s is %s on the page, %v in the code", name, f.byDefault, defaults[name])
			}
			continue
		}
		words := docNumber.FindAllString(docSpan.ReplaceAllString(f.byDefault, ""), -1)
		for _, m := range docSpan.FindAllStringSubmatch(f.byDefault, -1) {
			if _, ok := fields[m[1]]; !ok {
				words = append(words, m[1])
			}
		}
		for _, word := range words {
			if n, err := strconv.Atoi(word); err == nil && name == "model.vocab_size" &&
				(vocabulary+n-1)/n*n == rounded {
				continue // what it is rounded to
			}
			if x, err := strconv.ParseFloat(word, 64); err == nil {
				word = fmt.Sprint(x)
			}
			if !slices.Contains(seen[name], word) {
				t.Errorf("the default of %s is %q on the page, but never %s in the code: %v", name, f.byDefault, word,
					seen[name])
			}
		}
	}
}

// The table of presets has every preset and every field in which two differ, with its values.
func TestConfigDocPresets(t *testing.T) {
	_, rows := docSection(t, "preset")
	var names []string
	for _, cells := range rows[1:] {
		names = append(names, strings.Trim(cells[0], "`"))
	}
	if diff := cmp.Diff(moe.Presets(), names); diff != "" {
		t.Fatalf("presets (-code +page):\n%s", diff)
	}
	column := map[string]int{}
	for i, cell := range rows[0] {
		for _, name := range strings.Split(cell, ", ") {
			column[name] = i
		}
	}
	delete(column, "preset")
	first := map[string]reflect.Value{}
	for i, preset := range names {
		c, err := moe.Preset(preset)
		if err != nil {
			t.Fatal(err)
		}
		values := docValues(reflect.ValueOf(c), "", map[string]reflect.Value{})
		if i == 0 {
			first = values
		}
		for name, v := range values {
			if j, ok := column[name]; !ok && !v.Equal(first[name]) {
				t.Errorf("%s of %s is %v, of %s %v, and the table has no such column", name, preset, v, names[0],
					first[name])
			} else if ok && rows[i+1][j] != fmt.Sprint(v) {
				t.Errorf("%s of %s is %s on the page, %v in the code", name, preset, rows[i+1][j], v)
			}
		}
		for name := range column {
			if _, ok := values[name]; !ok {
				t.Fatalf("the table has a column %q, which is no field of a model", name)
			}
		}
	}
}

// The example is accepted, and has every field outside model, as the page says.
func TestConfigDocExample(t *testing.T) {
	text, _ := docSection(t, "field")
	examples := docYAML.FindAllStringSubmatch(text, -1)
	if len(examples) != 1 {
		t.Fatalf("%d examples", len(examples))
	}
	c, err := ParseConfig([]byte(examples[0][1]), "example")
	if err != nil {
		t.Fatal(err)
	}
	if c.Model.Preset != "mula-tiny" || c.Model.InitCutoff != 3 || c.Steps != 20000 ||
		*c.Schedule.MinLearningRate != 1e-4 || *c.Optimizer.Epsilon != 1e-8 {
		t.Errorf("%+v", c)
	}
	var given map[string]any
	if err := yaml.Unmarshal([]byte(examples[0][1]), &given); err != nil {
		t.Fatal(err)
	}
	c.Optimizer.Resolve()
	if err := c.Schedule.Resolve(c.Steps); err != nil {
		t.Fatal(err)
	}
	values := valuesOf(c)
	for name := range docFields(t) {
		outer, inner, nested := strings.Cut(name, ".")
		if (outer == "optimizer" || outer == "schedule") && inner != "clip_after_warmup" && values[name].IsZero() {
			continue // of another optimizer or schedule
		}
		if outer == "router_bias" || outer == "prediction_loss" { // of another model
			continue
		}
		v, ok := given[outer]
		if fields, isMap := v.(map[string]any); nested && isMap {
			_, ok = fields[inner]
		}
		if !ok && outer != "model" {
			t.Errorf("the example has no %s", name)
		}
	}
}
