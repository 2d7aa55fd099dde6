package estimate

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"

	"mula/internal/strictyaml"
	"mula/internal/suggest"
	"mula/moe"
)

// Kind is the origin of a figure.
type Kind string

// The kinds of figures.
const (
	Published Kind = "published" // the source states the figure
	Derived   Kind = "derived"   // computed from figures of the source
	Measured  Kind = "measured"  // measured on this machine
	Assumed   Kind = "assumed"   // without a source; see [Sensitivities]
)

// A Figure is a property of a machine, with its origin.
type Figure struct {
	Value  float64 `yaml:"value" json:"value"`
	Kind   Kind    `yaml:"kind" json:"kind"`
	Source string  `yaml:"source" json:"source" url:"ok"`
}

// A Machine describes the nodes and the network of a run. docs/reference/estimate.md describes the
// fields and the file format.
type Machine struct {
	Name string `yaml:"name" json:"name"`
	file *strictyaml.File

	RanksPerNode Figure `yaml:"ranks_per_node" json:"ranks_per_node"`
	Memory       Figure `yaml:"memory" json:"memory"` // bytes per rank

	// FLOP/s per rank, for products of bf16 numbers
	PeakBF16 Figure `yaml:"peak_bf16" json:"peak_bf16"`
	// FLOP/s per rank, for products of float32 numbers
	PeakFP32 Figure `yaml:"peak_fp32" json:"peak_fp32"`
	// fraction of the peak that forward and backward passes reach
	ComputeEfficiency Figure `yaml:"compute_efficiency" json:"compute_efficiency"`
	MemoryBandwidth   Figure `yaml:"memory_bandwidth" json:"memory_bandwidth"` // bytes/s per rank

	// bytes/s that a rank can send to other ranks of its node
	NodeLink       Figure `yaml:"node_link" json:"node_link"`
	NodeEfficiency Figure `yaml:"node_efficiency" json:"node_efficiency"` // fraction that collectives reach
	// bytes/s that a node can send to other nodes
	Network           Figure `yaml:"network" json:"network"`
	NetworkEfficiency Figure `yaml:"network_efficiency" json:"network_efficiency"` // fraction that collectives reach
	// nodes between which the full rate of Network is available
	NodesPerGroup Figure `yaml:"nodes_per_group" json:"nodes_per_group"`
	// bytes/s that a node can send to other groups
	GlobalNetwork Figure `yaml:"global_network" json:"global_network"`
	// seconds per message, in addition to the transfer of its bytes
	Latency Figure `yaml:"latency" json:"latency"`
	// rows of a product that keep a rank's device busy, which determine blocks of logits: see
	// [moe.LogitsTokens]
	ProductRows Figure `yaml:"product_rows" json:"product_rows"`
	// standard deviation of the time that a rank computes in a step, as a fraction of its mean. The
	// times of ranks and steps are independent and normally distributed.
	Variation Figure `yaml:"variation" json:"variation"`
	// bytes/s of the shared file system, for all nodes together
	FileSystem Figure `yaml:"file_system" json:"file_system"`
}

// Aurora is the machine at Argonne that trained the Mula models. A rank is a tile of a GPU.
var Aurora = Machine{
	Name: "aurora",
	RanksPerNode: Figure{12, Published,
		"6 GPUs of 2 tiles a node: https://docs.alcf.anl.gov/aurora/hardware-overview/machine-overview/"},
	Memory: Figure{64e9, Published, "64 GB a tile: https://arxiv.org/abs/2604.00785, section 1"},
	PeakBF16: Figure{419.5e12, Derived,
		"half of the 839 TFLOP/s of a GPU of two tiles (Intel at Hot Chips 34, 2022); Aurora's parts may have fewer " +
			"active engines and run at lower clocks"},
	PeakFP32: Figure{26e12, Derived, "half of the 52 TFLOP/s of a GPU of two tiles (Intel at Hot Chips 34, 2022)"},
	ComputeEfficiency: Figure{0.2, Assumed,
		"no measurement is published; fitted: with it the full step of Mula-20B-A2B gains from EPSO and expert " +
			"kernels what is " +
			"published (1.35)"},
	MemoryBandwidth: Figure{1e12, Published,
		"triad on one tile: https://docs.alcf.anl.gov/aurora/node-performance-overview/node-performance-overview/"},
	NodeLink: Figure{140e9, Derived,
		"GPUs are connected all to all by Xe-Links of 28 GB/s (a summary of https://arxiv.org/abs/2512.04291): one " +
			"from a tile to each of the " +
			"5 other GPUs"},
	NodeEfficiency: Figure{0.3, Assumed,
		"no measurement of collectives is published; rings use one of the five links at a time (0.2), direct " +
			"exchanges all; " +
			"chosen with the published ratios in sight"},
	Network: Figure{200e9, Published,
		"8 NICs of 200 Gbit/s a node: https://www.alcf.anl.gov/support-center/aurora/interconnect"},
	NetworkEfficiency: Figure{0.5, Assumed,
		"no measurement of collectives between buffers of GPUs is published; " +
			"chosen with the published ratios in sight"},
	NodesPerGroup: Figure{64, Derived,
		"512 endpoints of a dragonfly group, 8 a node: a summary of https://arxiv.org/abs/2512.04291"},
	GlobalNetwork: Figure{130e9, Derived,
		"1.38 PB/s between the 166 groups (a summary of https://arxiv.org/abs/2512.04291), divided by 10,624 nodes"},
	Latency: Figure{10e-6, Assumed, "a message between buffers of two GPUs, with the library's own work"},
	ProductRows: Figure{2048, Derived,
		"a product of 2,048 columns has two of mula's tiles of 128 × 256 for each of a tile's 64 Xe-cores (Intel at " +
			"Hot Chips 34, 2022)"},
	Variation: Figure{0.01, Assumed, "no measurement is published"},
	FileSystem: Figure{1e12, Assumed,
		"DAOS wrote checkpoints of MLPerf Storage 2.0 at nearly 1 TB/s (a summary of ALCF's results, which had " +
			"another number of nodes)"},
}

// fields returns the figures of a machine and their names in the file.
func (m *Machine) fields() (names []string, figures []*Figure) {
	v := reflect.ValueOf(m).Elem()
	for i := range v.NumField() {
		if !v.Type().Field(i).IsExported() {
			continue
		}
		if f, ok := v.Field(i).Addr().Interface().(*Figure); ok {
			names = append(names, v.Type().Field(i).Tag.Get("yaml"))
			figures = append(figures, f)
		}
	}
	return names, figures
}

// optional lists the figures that a file may omit. Without groups, the full network rate is
// available between all nodes. Without product_rows, a rank's device is a GPU. Without variation,
// all ranks are equally fast. Without file_system, the times of checkpoints are not estimated.
var optional = []string{"nodes_per_group", "global_network", "product_rows", "variation", "file_system"}

// gpuRows is product_rows of a GPU.
const gpuRows = 2048

// logitsTokens returns the number of tokens in a block of logits.
func (m *Machine) logitsTokens(vocabulary int) int {
	rows := int(m.ProductRows.Value)
	if rows == 0 {
		rows = gpuRows
	}
	return moe.LogitsTokens(vocabulary, rows, int64(m.Memory.Value))
}

// LoadMachine reads a machine from the YAML file at path. A figure without a kind is assumed.
// Errors name file and line.
func LoadMachine(path string) (Machine, error) {
	file, err := strictyaml.Read(path)
	if err != nil {
		return Machine{}, err
	}
	return parseMachine(file)
}

// Warnings returns remarks about the file, such as old names of fields, with file and line.
func (m Machine) Warnings() []string { return m.file.Warnings() }

func parseMachine(file *strictyaml.File) (Machine, error) {
	m := Machine{file: file}
	if err := file.Decode(&m); err != nil {
		return Machine{}, err
	}
	if m.Name == "" {
		return Machine{}, file.Errorf("$.name", "name is empty; write the name of the machine")
	}
	names, figures := m.fields()
	for i, f := range figures {
		at := "$." + names[i]
		if !file.Has(at) && slices.Contains(optional, names[i]) {
			continue
		}
		if !file.Has(at + ".value") {
			return Machine{}, file.Errorf(at,
				"%s is missing; write %s: {value: …, kind: assumed, source: …} "+
					"(docs/reference/estimate.md has the units)",
				names[i], names[i])
		}
		if f.Kind == "" {
			f.Kind = Assumed
		}
		if !slices.Contains([]Kind{Published, Derived, Measured, Assumed}, f.Kind) {
			return Machine{}, file.Errorf(at+".kind", "%s.kind is %q; allowed: %s, %s, %s, %s", names[i], f.Kind,
				Published, Derived, Measured, Assumed)
		}
	}
	if name, err := m.check(); err != nil {
		return Machine{}, file.Errorf("$."+name, "%w", err)
	}
	return m, nil
}

// check returns the name of the first figure out of bounds, and the error.
func (m *Machine) check() (name string, err error) {
	names, figures := m.fields()
	for i, f := range figures {
		low, high, open := 0.0, math.MaxFloat64/1e100, true
		switch {
		case slices.Contains(optional, names[i]), names[i] == "latency":
			open = false
		case strings.HasSuffix(names[i], "_efficiency"):
			high = 1
		case names[i] == "ranks_per_node":
			low, high, open = 1, 1<<20, false
		}
		switch names[i] {
		case "product_rows":
			high = 1 << 20
		case "variation":
			high = 1
		}
		if !(f.Value >= low && f.Value <= high) || open && f.Value == low {
			if !open {
				return names[i], fmt.Errorf("%s is %g; it must be from %g to %g", names[i], f.Value, low, high)
			}
			return names[i], fmt.Errorf("%s is %g; it must be above %g and at most %g", names[i], f.Value, low, high)
		}
	}
	if r := m.RanksPerNode.Value; r != math.Trunc(r) {
		return "ranks_per_node", fmt.Errorf("ranks_per_node is %g; it must be a whole number", r)
	}
	if r := m.ProductRows.Value; r != math.Trunc(r) {
		return "product_rows", fmt.Errorf("product_rows is %g; it must be a whole number", r)
	}
	if m.NodesPerGroup.Value > 0 && m.GlobalNetwork.Value == 0 {
		return "nodes_per_group", fmt.Errorf("nodes_per_group is %g, but global_network is missing; set both or "+
			"neither", m.NodesPerGroup.Value)
	}
	return "", nil
}

// Machines lists the names of machines that need no file.
func Machines() []string { return []string{Aurora.Name, LocalName} }

// MachineByName returns the built-in machine with the name.
func MachineByName(name string) (Machine, error) {
	if name == Aurora.Name {
		return Aurora, nil
	}
	if near := suggest.Nearest(name, []string{Aurora.Name}); near != "" {
		return Machine{}, fmt.Errorf("unknown machine %q; did you mean %q?", name, near)
	}
	return Machine{}, fmt.Errorf("unknown machine %q; allowed: \"%s\", or a file whose name "+
		"ends in .yaml", name, strings.Join(Machines(), `", "`))
}

// peak is the peak FLOP/s of a rank for products of bf16 or float32 numbers.
func (m *Machine) peak(bf16 bool) float64 {
	if bf16 {
		return m.PeakBF16.Value
	}
	return m.PeakFP32.Value
}
