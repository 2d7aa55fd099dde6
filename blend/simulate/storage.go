package simulate

import (
	"fmt"
	"math"
	"reflect"
	"strings"

	"mula/internal/strictyaml"
	"mula/internal/suggest"
)

// A Storage describes the storage of shards for the model. The values of [Kinds] are assumptions
// about typical storage, not measurements. docs/reference/simulate.md describes the file format for
// other storage.
type Storage struct {
	Name          string  `yaml:"name" json:"name"`
	Latency       float64 `yaml:"latency" json:"latency"`               // seconds from a request to its first byte
	NodeBandwidth float64 `yaml:"node_bandwidth" json:"node_bandwidth"` // bytes/s that one node can get
	// bytes/s of all nodes together; 0: no common limit
	TotalBandwidth float64 `yaml:"total_bandwidth" json:"total_bandwidth"`
	// bytes: each request reads one block of this size, aligned to this size
	RequestSize int64 `yaml:"request_size" json:"request_size"`
	// bytes of a cache on each node, 0 for none
	Cache int64 `yaml:"cache" json:"cache"`

	file *strictyaml.File
}

// Kinds are the predefined kinds of storage.
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

// StorageByName returns the entry of [Kinds] with this name.
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

// Warnings returns warnings about the file, such as deprecated field names, with file and line.
func (s Storage) Warnings() []string { return s.file.Warnings() }

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

// check validates the figures. It returns the name of the first that is out of bounds.
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

// bandwidth returns the bandwidth of a node if this many nodes read at once.
func (s *Storage) bandwidth(nodes int) float64 {
	if s.TotalBandwidth > 0 {
		return min(s.NodeBandwidth, s.TotalBandwidth/float64(nodes))
	}
	return s.NodeBandwidth
}

// readersOfARank is the number of goroutines of a stream that read samples concurrently. Each waits
// for one request at a time.
const readersOfARank = 4

// seconds returns the time that a node needs for n requests of this many bytes in total, with k
// concurrent requests. It is the longer of two times: the time of k readers that make requests in
// sequence, and the transfer time of all bytes.
//
//	max(⌈n/k⌉ · (latency + bytes/n/bandwidth), latency + bytes/bandwidth)
func (s *Storage) seconds(n, bytes float64, k int, bandwidth float64) float64 {
	if n <= 0 {
		return 0
	}
	return max(math.Ceil(n/float64(k))*(s.Latency+bytes/n/bandwidth), s.Latency+bytes/bandwidth)
}

// nodesKept returns the largest number of nodes that storage keeps up with, if each makes n
// requests of this many bytes in total per step: 0 for none, -1 for any number. It solves seconds
// for the bandwidth.
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

// waits returns how long a trainer waits for its data in total. reads are the read times of the
// steps, which are read in sequence; each step computes for stepTime. Reading may be `ahead` steps
// ahead. The time to read the first step does not count.
//
//	read(s) starts at max(end of read(s−1), start of compute(s−ahead))
//	compute(s) starts at max(end of read(s), end of compute(s−1))
func waits(reads []float64, stepTime float64, ahead int) float64 {
	begins := make([]float64, len(reads)) // start of each step's computation
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
