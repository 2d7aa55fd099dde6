package estimate

import (
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mula/internal/strictyaml"
)

// parseMachineText reads a machine from the content of a YAML file with this name.
func parseMachineText(data []byte, name string) (Machine, error) {
	file, err := strictyaml.Parse(data, name)
	if err != nil {
		return Machine{}, err
	}
	return parseMachine(file)
}

// fileOf writes a machine as its file.
func fileOf(m Machine) string {
	var b strings.Builder
	fmt.Fprintf(&b, "name: %s\n", m.Name)
	names, figures := m.fields()
	for i, f := range figures {
		fmt.Fprintf(&b, "%s: {value: %g, kind: %s, source: %q}\n", names[i], f.Value, f.Kind, f.Source)
	}
	return b.String()
}

func TestMachineFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "machine.yaml")
	if err := os.WriteFile(path, []byte(fileOf(Aurora)), 0o666); err != nil {
		t.Fatal(err)
	}
	m, err := LoadMachine(path)
	if err != nil {
		t.Fatal(err)
	}
	if m.file = nil; m != Aurora {
		t.Errorf("read %+v\nwrote %+v", m, Aurora)
	}
	if _, err := LoadMachine(path + "x"); err == nil {
		t.Error("a file that is not there was read")
	}

	full := fileOf(Aurora)
	line := func(name, text string) string { // full, with one line replaced
		var out []string
		for l := range strings.Lines(full) {
			if strings.HasPrefix(l, name+":") {
				l = text
			}
			out = append(out, l)
		}
		return strings.Join(out, "")
	}
	for _, test := range []struct{ text, want string }{
		{line("name", ""), "m.yaml: name is empty"},
		{line("network", ""), "m.yaml: network is missing"},
		{line("network", "network: {kind: published}\n"), "m.yaml:10: network is missing"},
		{line("memory", "memory: 64e9\n"), "m.yaml:3: "},
		{line("memory", "memory: {value: 0}\n"), "m.yaml:3: memory is 0; it must be above 0"},
		{line("memory", "memory: {value: .inf}\n"), "m.yaml:3: memory.value is .inf; it must be a finite number"},
		{line("memory", "memory: {value: .nan}\n"), "m.yaml:3: memory.value is .nan; it must be a finite number"},
		{line("memory", "memory: {value: much}\n"), `memory.value is "much"; it must be a number`},
		{line("compute_efficiency", "compute_efficiency: {value: 1.5}\n"),
			"m.yaml:6: compute_efficiency is 1.5; it must be above 0 and at most 1"},
		{line("ranks_per_node", "ranks_per_node: {value: 2.5}\n"),
			"m.yaml:2: ranks_per_node is 2.5; it must be a whole number"},
		{line("latency", "latency: {value: -1}\n"), "latency is -1"},
		{line("latency", "latency: {value: 0, kind: guessed}\n"),
			`latency.kind is "guessed"; allowed: published, derived, measured, assumed`},
		{line("latency", "latencies: {value: 0}\n"), `unknown field "latencies"; did you mean "latency"?`},
		{line("variation", "variation: {value: 1.5}\n"), "variation is 1.5; it must be from 0 to 1"},
		{line("global_network", ""), "global_network is missing; set both or neither"},
	} {
		if _, err := parseMachineText([]byte(test.text), "m.yaml"); err == nil ||
			!strings.Contains(err.Error(), test.want) {
			t.Errorf("error %v, want one with %q", err, test.want)
		}
	}

	plain, err := parseMachineText([]byte(strings.ReplaceAll(line("nodes_per_group", ""), "global_network: ", "# ")),
		"m.yaml")
	if err != nil || plain.NodesPerGroup.Value != 0 ||
		plain.network(1<<20) != Aurora.Network.Value*Aurora.NetworkEfficiency.Value {
		t.Errorf("a machine without groups: %+v, %v", plain, err)
	}
	if m, err := parseMachineText([]byte(line("latency", "latency: {value: 1e-5}\n")), "m.yaml"); err != nil ||
		m.Latency.Kind != Assumed || m.Latency.Value != 1e-5 {
		t.Errorf("%+v, %v: want an assumed figure", m.Latency, err)
	}
}

// Every figure of the preset has its source. The network counts in groups only for runs that are
// larger than one group.
func TestAurora(t *testing.T) {
	m := Aurora
	names, figures := m.fields()
	for i, f := range figures {
		if f.Source == "" || (f.Kind == Published || f.Kind == Derived) != (strings.Contains(f.Source, "https://") ||
			strings.Contains(f.Source, "Intel at Hot Chips")) {
			t.Errorf("%s: %+v", names[i], f)
		}
	}
	if _, err := m.check(); err != nil {
		t.Error(err)
	}
	for _, test := range []struct {
		ranks int
		want  float64
	}{
		{12, 200e9}, {64 * 12, 200e9}, {65 * 12, 200e9}, {1024 * 12, 130e9 / (1 - 1.0/16)}, {10624 * 12,
			130e9 / (1 - 1.0/166)},
	} {
		if got := m.network(test.ranks) / m.NetworkEfficiency.Value; math.Abs(got/test.want-1) > 1e-12 {
			t.Errorf("%d ranks: %g bytes/s of a node, want %g", test.ranks, got, test.want)
		}
	}
}

// The page has every figure of the preset, with its value and kind.
func TestMachinePage(t *testing.T) {
	page, err := os.ReadFile("../../docs/reference/estimate.md")
	if err != nil {
		t.Fatal(err)
	}
	m := Aurora
	names, figures := m.fields()
	for i, f := range figures {
		begin := fmt.Sprintf("| `%s` |", names[i])
		at := strings.Index(string(page), begin)
		if at < 0 {
			t.Errorf("docs/reference/estimate.md has no line that begins with %s", begin)
			continue
		}
		row, _, _ := strings.Cut(string(page)[at:], "\n")
		if want := fmt.Sprintf("| %g | %s |", f.Value, f.Kind); !strings.Contains(row, want) {
			t.Errorf("docs/reference/estimate.md: %s\nhas not %s", row, want)
		}
	}
}

func TestLocal(t *testing.T) {
	m, err := Local(context.Background(), 2, 2)
	if err != nil {
		t.Fatal(err)
	}
	if name, err := m.check(); err != nil {
		t.Error(name, err)
	}
	if m.RanksPerNode.Value != 2 || m.PeakFP32.Kind != Measured || m.network(2) <= 0 {
		t.Errorf("%+v", m)
	}
	canceled, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Local(canceled, 2, 2); err != context.Canceled {
		t.Error(err)
	}
	if _, err := Local(context.Background(), 0, 0); err == nil {
		t.Error("no ranks")
	}
}

func FuzzParseMachine(f *testing.F) {
	f.Add([]byte(fileOf(Aurora)))
	f.Add([]byte("name: x\nmemory: {value: 1}\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := parseMachineText(data, "m.yaml")
		if err != nil {
			return
		}
		in, err := publishedInput("mula-220b-a10b", EPSO)
		if err != nil {
			t.Fatal(err)
		}
		in.Machine = m
		if r, err := Compute(in); err != nil || math.IsNaN(r.StepTime) || r.StepTime <= 0 {
			t.Fatalf("%+v, %v of a machine that was accepted", r, err)
		}
	})
}
