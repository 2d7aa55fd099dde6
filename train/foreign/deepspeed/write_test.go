package deepspeed

import (
	"archive/zip"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/internal/pickle"
)

// A tensor is a float32 tensor of a file that [write] writes.
type tensor struct {
	shape   []int
	numbers []float32
}

// write writes a file as torch.save does. root may have *tensor as values.
func write(t *testing.T, path string, root pickle.Value) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	archive := zip.NewWriter(file)
	member := func(name string, content []byte) {
		w, err := archive.CreateHeader(&zip.FileHeader{Name: "archive/" + name, Method: zip.Store})
		if err == nil {
			_, err = w.Write(content)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	p := &pickler{data: []byte{0x80, 2}}
	p.value(root)
	member("data.pkl", append(p.data, '.'))
	for i, tensor := range p.tensors {
		content, err := binary.Append(nil, binary.LittleEndian, tensor.numbers)
		if err != nil {
			t.Fatal(err)
		}
		member(fmt.Sprintf("data/%d", i), content)
	}
	if err := archive.Close(); err != nil {
		t.Fatal(err)
	}
}

// A pickler writes a pickle of protocol 2. An object is a call of its class.
type pickler struct {
	data    []byte
	tensors []*tensor
}

// A persistent is a persistent id.
type persistent struct{ id pickle.Value }

func (p *pickler) value(v pickle.Value) {
	switch v := v.(type) {
	case nil:
		p.data = append(p.data, 'N')
	case bool:
		if v {
			p.data = append(p.data, 0x88)
		} else {
			p.data = append(p.data, 0x89)
		}
	case int64:
		p.data = binary.LittleEndian.AppendUint64(append(p.data, 0x8a, 8), uint64(v))
	case float64:
		p.data = binary.BigEndian.AppendUint64(append(p.data, 'G'), math.Float64bits(v))
	case string:
		p.data = binary.LittleEndian.AppendUint32(append(p.data, 'X'), uint32(len(v)))
		p.data = append(p.data, v...)
	case pickle.Global:
		i := strings.LastIndexByte(string(v), '.')
		p.data = fmt.Appendf(p.data, "c%s\n%s\n", v[:i], v[i+1:])
	case persistent:
		p.values("", "Q", v.id)
	case pickle.Tuple:
		p.values("(", "t", v...)
	case *pickle.List:
		p.values("](", "e", v.Items...)
	case *pickle.Dict:
		p.values("}(", "")
		for _, pair := range v.Pairs {
			p.values("", "", pair.Key, pair.Value)
		}
		p.values("", "u")
	case *pickle.Object:
		p.values("", "R", v.Class, v.Args)
	case *tensor:
		id := pickle.Tuple{"storage", pickle.Global("torch.FloatStorage"), fmt.Sprint(len(p.tensors)), "cpu",
			int64(len(v.numbers))}
		p.tensors = append(p.tensors, v)
		var shape, strides pickle.Tuple
		stride := int64(1)
		for _, d := range slices.Backward(v.shape) {
			shape, strides = append(shape, int64(d)), append(strides, stride)
			stride *= int64(d)
		}
		slices.Reverse(shape)
		slices.Reverse(strides)
		hooks := &pickle.Object{Class: "collections.OrderedDict", Args: pickle.Tuple{}}
		p.value(&pickle.Object{Class: "torch._utils._rebuild_tensor_v2",
			Args: pickle.Tuple{persistent{id}, int64(0), shape, strides, false, hooks}})
	default:
		panic(fmt.Sprintf("cannot write a %T", v))
	}
}

// values writes values between opcodes.
func (p *pickler) values(before, after string, values ...pickle.Value) {
	p.data = append(p.data, before...)
	for _, v := range values {
		p.value(v)
	}
	p.data = append(p.data, after...)
}
