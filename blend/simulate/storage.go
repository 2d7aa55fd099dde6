package simulate

import (
	"fmt"
	"math"
	"reflect"
	"strings"

	"mula/internal/strictyaml"
	"mula/internal/suggest"
)

// A Storage is what the model knows of the place that shards are read from. Each kind that the
// package knows is an assumption about what is usual, measured nowhere; docs/reference/simulate.md
// has the file that describes another.
type Storage struct {
	Name          string  `yaml:"name" json:"name"`
	Latency       float64 `yaml:"latency" json:"latency"`               // seconds from a request to its first byte
	NodeBandwidth float64 `yaml:"node_bandwidth" json:"node_bandwidth"` // bytes/s that one node can get
	// bytes/s of all nodes together; 0: no limit, each has its own
	TotalBandwidth float64 `yaml:"total_bandwidth" json:"total_bandwidth"`
	// bytes: a request brings a whole block of a file of this size, aligned to it
	RequestSize int64 `yaml:"request_size" json:"request_size"`
	// bytes of a node's own copy of what it has read, 0 for none
	Cache int64 `yaml:"cache" json:"cache"`

	file *strictyaml.File
}

// Kinds are the kinds of storage that the package knows.
var Kinds = []Storage{
	{Name: "local-nvme", Latency: 100e-6, NodeBandwidth: 3e9, RequestSize: 16 << 10},
	{Name: "parallel-fs", Latency: 1e-3, NodeBandwidth: 2e9, TotalBandwidth: 200e9, RequestSize: 1 << 20,
		Cache: 64 << 30},
	{Name: "object-store", Latency: 30e-3, NodeBandwidth: 1e9, TotalBandwidth: 50e9, RequestSize: 1 << 20,
		Cache: 64 << 30},
}

// KindNames lists the names of [Kinds].
func KindNames() (names []string) {
	for _, k := range Kinds {
		names = append(names, k.Name)
	}
	return names
}

// StorageByName gives one of [Kinds].
func StorageByName(name string) (Storage, error) {
	for _, k := range Kinds {
		if k.Name == name {
			return k, nil
		}
	}
	names := KindNames()
	if near := suggest.Nearest(name, names); near != "" {
		return Storage{}, fmt.Errorf("unknown kind of storage %q; did you mean %q?", name, near)
	}
	return Storage{}, fmt.Errorf("unknown kind of storage %q; known are %s, and a file that ends in .yaml "+
		"describes any other storage", name, strings.Join(names, ", "))
}

// LoadStorage reads the description of a storage from a YAML file. Errors name file and line.
func LoadStorage(path string) (Storage, error) {
	file, err := strictyaml.Read(path)
	if err != nil {
		return Storage{}, err
	}
	return parseStorage(file)
}

// Warnings returns remarks about the file, such as old names of fields, with file and line.
func (s Storage) Warnings() []string { return s.file.Warnings() }

// ParseStorage reads the content of a storage's file; name stands for the file in errors.
func ParseStorage(data []byte, name string) (Storage, error) {
	file, err := strictyaml.Parse(data, name)
	if err != nil {
		return Storage{}, err
	}
	return parseStorage(file)
}

func parseStorage(file *strictyaml.File) (Storage, error) {
	s := Storage{file: file}
	if err := file.Decode(&s); err != nil {
		return Storage{}, err
	}
	for _, name := range []string{"name", "latency", "node_bandwidth", "request_size"} {
		if !file.Has("$." + name) {
			return Storage{}, file.Errorf("$."+name,
				"%s is missing; docs/reference/simulate.md describes it and its unit", name)
		}
	}
	if name, err := s.check(); err != nil {
		return Storage{}, file.Errorf("$."+name, "%w", err)
	}
	return s, nil
}

// check says which figure is out of bounds, and how.
func (s *Storage) check() (name string, err error) {
	if s.Name == "" {
		return "name", fmt.Errorf("name is empty; name the storage")
	}
	v := reflect.ValueOf(s).Elem()
	for i := range v.NumField() {
		name := v.Type().Field(i).Tag.Get("yaml")
		low, high := 0.0, 1e18
		switch name {
		case "", "name":
			continue
		case "latency":
			high = 3600
		case "node_bandwidth":
			low = 1
		case "request_size":
			low, high = 512, 1<<30
		}
		f := v.Field(i)
		value := 0.0
		if f.CanInt() {
			value = float64(f.Int())
		} else {
			value = f.Float()
		}
		if !(value >= low && value <= high) {
			return name, fmt.Errorf("%s is %g; it must be from %g to %g", name, value, low, high)
		}
	}
	if t := s.TotalBandwidth; t > 0 && t < 1 {
		return "total_bandwidth", fmt.Errorf("total_bandwidth is %g; it must be at least 1, or 0 for no limit", t)
	}
	return "", nil
}

// bandwidth is what a node gets when so many read at once.
func (s *Storage) bandwidth(nodes int) float64 {
	if s.TotalBandwidth > 0 {
		return min(s.NodeBandwidth, s.TotalBandwidth/float64(nodes))
	}
	return s.NodeBandwidth
}

// readersOfARank is how many goroutines of a stream read samples at a time: each waits for one
// request.
const readersOfARank = 4

// seconds is how long a node takes for so many requests of so many bytes together, with k of them
// under way at a time: the longer of what k readers take that wait for one request after the other,
// and of what the bytes take on the way.
//
//	max(⌈n/k⌉ · (latency + bytes/n/bandwidth), latency + bytes/bandwidth)
func (s *Storage) seconds(n, bytes float64, k int, bandwidth float64) float64 {
	if n <= 0 {
		return 0
	}
	return max(math.Ceil(n/float64(k))*(s.Latency+bytes/n/bandwidth), s.Latency+bytes/bandwidth)
}

// nodesKept is the greatest number of nodes that storage keeps up with, where each reads n requests
// of so many bytes a step: 0 for none, -1 for any number. It is seconds, solved for the bandwidth.
func (s *Storage) nodesKept(n, bytes float64, k int, stepTime float64) int64 {
	if n <= 0 {
		return -1
	}
	rounds := math.Ceil(n / float64(k))
	left, leftAlone := stepTime/rounds-s.Latency, stepTime-s.Latency
	if left <= 0 || leftAlone <= 0 {
		return 0
	}
	needed := max(bytes/n/left, bytes/leftAlone)
	if needed > s.NodeBandwidth {
		return 0
	}
	if s.TotalBandwidth == 0 {
		return -1
	}
	return int64(min(s.TotalBandwidth/needed, 1e18))
}

// waits is how long a trainer waits for its data in steps that take so many seconds to read, one
// after the other, and computes each for stepTime: reading may be so many steps ahead. The time
// until the first step's data is there does not count.
//
//	read(s) begins at max(end of read(s−1), begin of compute(s−ahead)); compute(s) begins at max(end of read(s), end of compute(s−1))
func waits(reads []float64, stepTime float64, ahead int) float64 {
	begins := make([]float64, len(reads)) // of the computing
	read, compute, waited := 0.0, 0.0, 0.0
	for s, t := range reads {
		if s >= ahead {
			read = max(read, begins[s-ahead])
		}
		read += t
		begins[s] = max(read, compute)
		if s > 0 {
			waited += begins[s] - compute
		}
		compute = begins[s] + stepTime
	}
	return waited
}
