package cli

import (
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"mula/blend/simulate"
	"mula/doctor"
	"mula/index/megatron"
	"mula/index/olmo"
	"mula/internal/suggest"
	"mula/moe"
	"mula/shards"
	"mula/shards/formats"
	"mula/shards/mds"
	"mula/shards/verifier"
	"mula/tokenize/documents"
	"mula/train/devices"
	"mula/train/estimate"
	"mula/train/samples"
	"mula/xpu"
)

// shortList is the largest number of values in a help text. Messages about larger sets also suggest
// the nearest name.
const shortList = 8

// A valueSet is the fixed set of values of a flag. The package that reads a value owns its names.
type valueSet struct {
	names func() []string
	// also accepted: several names with commas between them, a file, or other text such as a number
	list, file, other bool
}

// flagValues are the flags with a fixed set of values, by the flag's name, or by the command and
// the flag if the name has several meanings. Help texts, the check of values and completion use it.
var flagValues = map[string]valueSet{
	"activations": {names: func() []string {
		return []string{xpu.Float32.String(), xpu.BFloat16.String()}
	}},
	"arithmetic":            {names: megatron.Arithmetics},
	"attention":             {names: samples.Attentions},
	"collectives":           {names: func() []string { return []string{twoLevels, flat} }},
	"compare":               {names: estimate.Schemes, list: true},
	"device":                {names: devices.Names, other: true}, // opencl:NAME
	"dispatch":              {names: moe.Dispatches},
	"for":                   {names: func() []string { return frameworks }},
	"input-format":          {names: documents.Formats},
	"mds-compression":       {names: mds.Compressions},
	"mula check dtype":      {names: shards.IDTypes},
	"mula convert dtype":    {names: shards.IDTypes},
	"mula estimate machine": {names: estimate.Machines, file: true},
	"mula estimate model":   {names: moe.Presets},
	"mula export dtype":     {names: weightTypes.names},
	"mula export to":        {names: exportForms.names},
	"mula import dtype":     {names: weightTypes.names},
	"mula index dtype":      {names: olmo.DTypes},
	"on-error":              {names: onErrors.names},
	"norm":                  {names: func() []string { return []string{"gather", "reduce"} }},
	"optimizer":             {names: estimate.Schemes},
	"pad":                   {names: func() []string { return []string{padEOD} }, other: true}, // an id
	"pattern":               {names: patterns.names},
	"precision":             {names: xpu.Precisions},
	"profile":               {names: megatron.ProfileNames},
	"recompute":             {names: moe.Recomputes},
	"require":               {names: func() []string { return doctor.Libraries }, list: true},
	"specials":              {names: specials.names},
	"storage":               {names: simulate.KindNames, file: true},
	"test-samples":          {names: func() []string { return []string{noSamples} }, other: true}, // a number
	"text-unit":             {names: documents.Units},
	"to":                    {names: formats.Names},
	"train-samples":         {names: func() []string { return []string{noSamples} }, other: true},
	"trainer":               {names: estimate.Trainers},
	"valid-samples":         {names: func() []string { return []string{noSamples} }, other: true},
	"verify":                {names: verifier.Names},
	"with":                  {names: func() []string { return startWays }},
}

// valuesOf returns the values of a flag of the command with this full name. Numbers and switches
// have no set of values.
func valuesOf(command string, f cli.Flag) (set valueSet, ok bool) {
	switch f.(type) {
	case *cli.StringFlag, *cli.StringSliceFlag:
		if set, ok = flagValues[command+" "+f.Names()[0]]; !ok {
			set, ok = flagValues[f.Names()[0]]
		}
	}
	return set, ok
}

// checkValues makes every command refuse values outside a flag's fixed set before it does anything.
func checkValues(commands []*cli.Command) {
	for _, command := range commands {
		checkValues(command.Subcommands)
		if action := command.Action; action != nil {
			command.Action = func(c *cli.Context) error {
				for _, f := range c.Command.Flags {
					if err := checkValue(c, f); err != nil {
						return err
					}
				}
				return action(c)
			}
		}
	}
}

func checkValue(c *cli.Context, f cli.Flag) error {
	name := f.Names()[0]
	set, ok := valuesOf(c.Command.HelpName, f)
	if !ok || set.file || set.other || !c.IsSet(name) {
		return nil
	}
	value := c.String(name)
	if unset, ok := f.(*cli.StringFlag); ok && value == "" && unset.Value == "" {
		return nil
	}
	values, names := []string{value}, set.names()
	if set.list {
		values = splitList(value)
	}
	for _, v := range values {
		if slices.Contains(names, v) {
			continue
		}
		if best := suggest.Nearest(v, names); best != "" && len(names) > shortList {
			return usagef("--%s is %q; did you mean %q? Allowed: %s", name, v, best, strings.Join(names, ", "))
		}
		return usagef("--%s is %q; allowed: %s", name, v, strings.Join(names, ", "))
	}
	return nil
}

// splitList splits the value of a flag at commas and drops empty elements.
func splitList(text string) []string {
	var all []string
	for _, v := range strings.Split(text, ",") {
		if v = strings.TrimSpace(v); v != "" {
			all = append(all, v)
		}
	}
	return all
}

// choices are the values of a flag that this package reads, with their meanings.
type choices[T any] []struct {
	name  string
	value T
}

func (all choices[T]) names() []string {
	names := make([]string, len(all))
	for i, c := range all {
		names[i] = c.name
	}
	return names
}

// value returns the meaning of a name that [checkValue] has accepted.
func (all choices[T]) value(name string) (value T) {
	for _, c := range all {
		if c.name == name {
			value = c.value
		}
	}
	return value
}

// anyOf joins values for a help text: "a, b or c".
func anyOf(names []string) string {
	last := len(names) - 1
	if last < 1 {
		return strings.Join(names, "")
	}
	return strings.Join(names[:last], ", ") + " or " + names[last]
}
