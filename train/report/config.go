package report

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"strings"

	"mula/internal/strictyaml"
	"mula/shards/verifier"
)

// readConfig reads the fields of a train.yaml as text, by full name, such as
// "schedule.learning_rate": "0.0004". It replaces old names of fields and of the values of verify
// by the current names. Without the file it returns nil.
func readConfig(path string) (map[string]string, error) {
	file, err := strictyaml.Read(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	fields, err := file.Fields()
	if err != nil {
		return nil, err
	}
	config := map[string]string{}
	flatten(fields, "", config)
	return config, nil
}

// renamed has the current full names of fields by their old names. A run directory of an older
// version of mula has the old names. Package train, which has them as tags, imports this package in
// its tests.
var renamed = map[string]string{"layout.dp": "layout.expert_dp", "layout.links": "layout.transport",
	"spikes.leave_out": "spikes.skip_steps"}

func flatten(fields map[string]any, prefix string, into map[string]string) {
	for name, v := range fields {
		if inner, ok := v.(map[string]any); ok {
			flatten(inner, prefix+name+".", into)
		} else {
			full := prefix + name
			if current, ok := renamed[full]; ok {
				full = current
			}
			into[full] = valueText(v)
			if full == "verify" {
				into[full] = verifier.CurrentName(into[full])
			}
		}
	}
}

// valueText writes a value as in YAML. Numbers are rounded to 15 digits, which float64 always
// keeps, so a tenth of 0.003 is 0.0003.
func valueText(v any) string {
	switch v := v.(type) {
	case float64:
		return strconv.FormatFloat(v, 'g', 15, 64)
	case []any:
		var values []string
		for _, value := range v {
			values = append(values, valueText(value))
		}
		return "[" + strings.Join(values, ", ") + "]"
	case map[string]any:
		var fields []string
		for _, name := range slices.Sorted(maps.Keys(v)) {
			fields = append(fields, name+": "+valueText(v[name]))
		}
		return "{" + strings.Join(fields, ", ") + "}"
	}
	return fmt.Sprint(v)
}

// differences returns the table of the fields of train.yaml in which runs differ, except for the
// run directory. It returns nil unless two runs have a configuration.
func differences(names []string, runs []*Run) *summary {
	all := map[string]bool{}
	known := 0
	for _, r := range runs {
		if r.Config != nil {
			known++
		}
		for name := range r.Config {
			all[name] = true
		}
	}
	if known < 2 {
		return nil
	}
	delete(all, "output")
	table := &summary{Names: names}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		row := summaryRow{Name: name}
		values := map[string]bool{}
		for _, r := range runs {
			c := cell{Text: "–"}
			if r.Config != nil {
				value, ok := r.Config[name]
				values[fmt.Sprint(ok, value)] = true
				if ok {
					c.Text = value
				}
			}
			row.Cells = append(row.Cells, c)
		}
		if len(values) > 1 {
			table.Rows = append(table.Rows, row)
		}
	}
	return table
}
