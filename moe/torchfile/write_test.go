package torchfile

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/internal/pickle"
	"mula/moe/safetensors"
)

// contents returns a tensor whose elements come in two chunks.
func contents(d safetensors.DType, shape []int, numbers ...float32) *Contents {
	return &Contents{DType: d, Shape: shape, Each: func(put func([]float32) error) error {
		return errors.Join(put(numbers[:1]), put(numbers[1:]))
	}}
}

// Files that are written are read again. conformance/frameworks.py and mcore.py read them with
// torch.
func TestWriteFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.pt")
	err := WriteFile(path, pickle.DictOf("a", contents(safetensors.F32, []int{2, 3}, 1, 2, 3, 4, 5, 0.1),
		"b", contents(safetensors.BF16, []int{2}, 1.5, 3.00001), "step", Scalar(7)))
	if err != nil {
		t.Fatal(err)
	}
	f, err := Open(path, nil)
	if err != nil {
		t.Fatal(err)
	}
	root := f.Root.(*pickle.Dict)
	for name, want := range map[string][]float32{"a": {1, 2, 3, 4, 5, 0.1}, "b": {1.5, 3}, "step": {7}} {
		v, _ := root.Get(name)
		tensor := v.(*Tensor)
		got := make([]float32, tensor.Elements())
		if err := tensor.Float32(got, 0); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %v %v, %v; want %v", name, tensor.Shape, got, err, want)
		}
	}
}

// A tensor with too few or too many elements, or of another type, is an error, and leaves no file.
func TestWriteFileRefuses(t *testing.T) {
	for want, v := range map[string]pickle.Value{
		"1 elements too few":   contents(safetensors.F32, []int{3}, 1, 2),
		"too many elements":    contents(safetensors.F32, []int{1}, 1, 2),
		`type "I64"`:           contents("I64", []int{2}, 1, 2),
		"a pickle of a func()": func() {},
	} {
		path := filepath.Join(t.TempDir(), "x.pt")
		if err := WriteFile(path, v); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
		if files, err := filepath.Glob(filepath.Join(filepath.Dir(path), "*")); err != nil || len(files) > 0 {
			t.Errorf("left %v, %v", files, err)
		}
	}
}
