package torchfile

import (
	"archive/zip"
	"fmt"
	"io"
	"slices"

	"mula/internal/pickle"
	"mula/moe/safetensors"
)

// A NewTensor is a float32 tensor of a file that is written.
type NewTensor struct {
	Shape []int
	Fill  func(write func([]float32) error) error // writes all elements, in chunks
}

// Write writes a file as torch.save does. root may have *[NewTensor] as values, inside tuples,
// lists and dicts.
func Write(w io.Writer, root pickle.Value) error {
	t := &tensors{}
	value := t.value(root)
	text, err := pickle.Append(nil, value)
	if err != nil {
		return err
	}
	archive := zip.NewWriter(w)
	member := func(name string) (io.Writer, error) {
		return archive.CreateHeader(&zip.FileHeader{Name: "archive/" + name, Method: zip.Store})
	}
	for _, m := range []struct{ name, content string }{{"data.pkl", string(text)}, {"byteorder", "little"}} {
		out, err := member(m.name)
		if err == nil {
			_, err = io.WriteString(out, m.content)
		}
		if err != nil {
			return err
		}
	}
	for i, tensor := range t.list {
		out, err := member(fmt.Sprintf("data/%d", i))
		if err != nil {
			return err
		}
		left := tensor.elements()
		var bytes []byte
		err = tensor.Fill(func(values []float32) error {
			if left -= int64(len(values)); left < 0 {
				return fmt.Errorf("more values than a tensor of shape %v has", tensor.Shape)
			}
			bytes = slices.Grow(bytes[:0], 4*len(values))[:4*len(values)]
			safetensors.Encode(bytes, values, safetensors.F32)
			_, err := out.Write(bytes)
			return err
		})
		if err == nil && left > 0 {
			err = fmt.Errorf("%d values of a tensor of shape %v are missing", left, tensor.Shape)
		}
		if err != nil {
			return err
		}
	}
	out, err := member("version")
	if err == nil {
		_, err = io.WriteString(out, "3\n")
	}
	if err != nil {
		return err
	}
	return archive.Close()
}

func (t *NewTensor) elements() int64 { return (&Tensor{Shape: t.Shape}).Elements() }

// tensors has the tensors of a file that is written.
type tensors struct{ list []*NewTensor }

// value replaces tensors in a value by the calls that make them.
func (t *tensors) value(v pickle.Value) pickle.Value {
	all := func(items []pickle.Value) []pickle.Value {
		var list []pickle.Value
		for _, item := range items {
			list = append(list, t.value(item))
		}
		return list
	}
	switch v := v.(type) {
	case pickle.Tuple:
		return pickle.Tuple(all(v))
	case *pickle.List:
		return &pickle.List{Items: all(v.Items)}
	case *pickle.Dict:
		d := &pickle.Dict{}
		for _, pair := range v.Pairs {
			d.Pairs = append(d.Pairs, pickle.Pair{Key: pair.Key, Value: t.value(pair.Value)})
		}
		return d
	case *NewTensor:
		var shape, strides pickle.Tuple
		stride := int64(1)
		for _, d := range slices.Backward(v.Shape) {
			shape, strides = append(shape, int64(d)), append(strides, stride)
			stride *= int64(d)
		}
		slices.Reverse(shape)
		slices.Reverse(strides)
		t.list = append(t.list, v)
		id := pickle.Tuple{"storage", pickle.Global("torch.FloatStorage"), fmt.Sprint(len(t.list) - 1), "cpu",
			v.elements()}
		hooks := &pickle.Object{Class: "collections.OrderedDict", Args: pickle.Tuple{}}
		return &pickle.Object{Class: rebuildTensor,
			Args: pickle.Tuple{pickle.Persistent{ID: id}, int64(0), shape, strides, false, hooks}}
	}
	return v
}
