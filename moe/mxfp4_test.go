package moe

import (
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/internal/filesystem"
	"mula/moe/safetensors"
)

// All codes have, with each scale, the bits that transformers computes; see testdata/mxfp4.py. The
// scale 255 is refused.
func TestMXFP4Values(t *testing.T) {
	f, err := safetensors.Open("testdata/mxfp4.safetensors")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const rows = 255
	blocks, scales := make([]byte, 16*rows), make([]byte, rows)
	want, got := make([]float32, 32*rows), make([]float32, 32*rows)
	if err := errors.Join(f.Bytes(blocks, "blocks", 0), f.Bytes(scales, "scales", 0),
		f.Float32(want, "values", 0)); err != nil {
		t.Fatal(err)
	}
	if bad := decodeMXFP4(got, blocks, scales); bad != -1 {
		t.Fatalf("scale %d is refused", bad)
	}
	for r := range rows {
		for c := range 32 {
			a, b := got[32*r+c], want[rows*c+r]
			if math.Float32bits(a) != math.Float32bits(b) {
				t.Fatalf("scale %d, code %d: %v, want %v", scales[r], c%16, a, b)
			}
		}
	}
	scales[7] = 255
	if bad := decodeMXFP4(got, blocks, scales); bad != 7 {
		t.Errorf("a scale of 255 at 7: the index is %d", bad)
	}
}

const mxfp4Model = "testdata/hf-gpt-oss-mxfp4"

// A model with experts in MXFP4 is saved as bfloat16 with the bits that transformers computes, and
// without quantization_config. The saved model has the same weights.
func TestMXFP4Model(t *testing.T) {
	s, err := OpenStored(filesystem.OS{}, mxfp4Model)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if !s.MXFP4() || !s.Fused() || !slices.Equal(s.Types(), []safetensors.DType{safetensors.BF16}) {
		t.Errorf("MXFP4 %v, fused %v, types %v", s.MXFP4(), s.Fused(), s.Types())
	}
	var weights, again []float32
	see := func(_ string, piece []float32) error { weights = append(weights, piece...); return nil }
	if err := s.Each(t.Context(), see); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := s.Save(t.Context(), dir, SaveOptions{DType: safetensors.BF16},
		func(string, []float32) error { return nil }); err != nil {
		t.Fatal(err)
	}
	files, err := safetensors.Open(filepath.Join(dir, safetensors.SingleName))
	if err != nil {
		t.Fatal(err)
	}
	defer files.Close()
	expected := openGolden(t, "hf-gpt-oss-mxfp4/expected.safetensors")
	compared := 0
	for _, tensor := range files.Tensors() {
		if !strings.HasSuffix(tensor.Name, "_proj") { // of experts
			continue
		}
		got, want := make([]float32, tensor.Elements()), make([]float32, tensor.Elements())
		if err := errors.Join(files.Float32(got, tensor.Name, 0),
			expected.f.Float32(want, tensor.Name, 0)); err != nil {
			t.Fatal(err)
		}
		for i := range got {
			if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
				t.Fatalf("%s: element %d is %v, want %v", tensor.Name, i, got[i], want[i])
			}
		}
		compared++
	}
	if want := 2 * s.Config().Layers; compared != want {
		t.Errorf("%d tensors of experts, want %d", compared, want)
	}
	saved, err := OpenStored(filesystem.OS{}, dir)
	if err != nil {
		t.Fatal(err)
	}
	defer saved.Close()
	if saved.MXFP4() || saved.Config() != s.Config() {
		t.Errorf("saved with MXFP4 %v as %+v", saved.MXFP4(), saved.Config())
	}
	if err := saved.Each(t.Context(), func(_ string, piece []float32) error {
		again = append(again, piece...)
		return nil
	}); err != nil || !slices.Equal(again, weights) {
		t.Errorf("other weights after saving, or %v", err)
	}
}

// Chunks of any size have the same weights as the complete tensor.
func TestMXFP4Chunks(t *testing.T) {
	s, err := OpenStored(filesystem.OS{}, mxfp4Model)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for i, tensor := range s.tensors {
		if !s.sources[i].mxfp4 {
			continue
		}
		whole := make([]float32, tensor.Elements())
		if err := s.each(i, whole, func([]float32) error { return nil }); err != nil {
			t.Fatal(err)
		}
		for _, size := range []int{1, 7, tensor.Shape[1], 100, len(whole) + 1} {
			var got []float32
			if err := s.each(i, make([]float32, size), func(piece []float32) error {
				got = append(got, piece...)
				return nil
			}); err != nil || !slices.Equal(got, whole) {
				t.Errorf("%s: other weights in chunks of %d, or %v", tensor.Name, size, err)
			}
		}
	}
}

// mxfp4Files reads a model as a [safetensors.Directory] does, after changes of its tensors.
type mxfp4Files struct {
	*safetensors.Directory
	tensors []safetensors.Tensor
	scale   byte // all scales, if it is not zero
}

func (f mxfp4Files) Tensors() []safetensors.Tensor { return f.tensors }

func (f mxfp4Files) Bytes(dst []byte, name string, first int64) error {
	if f.scale != 0 && strings.HasSuffix(name, "_scales") {
		for i := range dst {
			dst[i] = f.scale
		}
		return nil
	}
	return f.Directory.Bytes(dst, name, first)
}

// Damaged tensors in MXFP4 are refused by name.
func TestMXFP4Refuses(t *testing.T) {
	c, err := ReadConfig(filesystem.OS{}, mxfp4Model)
	if err != nil {
		t.Fatal(err)
	}
	narrow := c
	narrow.HiddenSize = 48 // no multiple of 32
	const experts = "model.layers.1.mlp.experts."
	const blocks, scales = experts + "gate_up_proj_blocks", experts + "gate_up_proj_scales"
	is := func(name string) func(safetensors.Tensor) bool {
		return func(t safetensors.Tensor) bool { return t.Name == name }
	}
	change := func(name string, change func(*safetensors.Tensor)) func([]safetensors.Tensor) []safetensors.Tensor {
		return func(list []safetensors.Tensor) []safetensors.Tensor {
			change(&list[slices.IndexFunc(list, is(name))])
			return list
		}
	}
	for _, test := range []struct {
		name, want string
		c          Config
		change     func([]safetensors.Tensor) []safetensors.Tensor
	}{
		{"no scales", "tensors missing: " + scales, c, func(list []safetensors.Tensor) []safetensors.Tensor {
			return slices.DeleteFunc(list, is(scales))
		}},
		{"no blocks", "tensors missing: " + blocks + ", " + experts + "0.gate_proj.weight", c,
			func(list []safetensors.Tensor) []safetensors.Tensor { return slices.DeleteFunc(list, is(blocks)) }},
		{"shape of blocks", blocks + " (shape [2 64 1 32], want [2 64 2 16])", c,
			change(blocks, func(t *safetensors.Tensor) { t.Shape = []int{2, 64, 1, 32} })},
		{"shape of scales", scales + " (shape [2 64 4], want [2 64 2])", c,
			change(scales, func(t *safetensors.Tensor) { t.Shape = []int{2, 64, 4} })},
		{"type of scales", scales + " (elements of type BF16; MXFP4 has U8)", c,
			change(scales, func(t *safetensors.Tensor) { t.DType = safetensors.BF16 })},
		{"other type", "model.norm.weight (elements of type U8; only F32, F16 and BF16 are supported)", c,
			change("model.norm.weight", func(t *safetensors.Tensor) { t.DType = safetensors.U8 })},
		{"twice", "gate_proj.weight (stored in", c, func(list []safetensors.Tensor) []safetensors.Tensor {
			return append(list, safetensors.Tensor{Name: strings.TrimSuffix(blocks, "_blocks"), DType: safetensors.BF16,
				Shape: []int{2, 64, 64}})
		}},
		{"width", "tensors unexpected: model.layers.0.mlp.experts.gate_up_proj_", narrow,
			func(list []safetensors.Tensor) []safetensors.Tensor { return list }},
	} {
		files, err := safetensors.OpenDirectory(filesystem.OS{}, mxfp4Model)
		if err != nil {
			t.Fatal(err)
		}
		_, err = NewStored("dir", test.c, mxfp4Files{files, test.change(files.Tensors()), 0})
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v, want %q", test.name, err, test.want)
		}
	}

	files, err := safetensors.OpenDirectory(filesystem.OS{}, mxfp4Model)
	if err != nil {
		t.Fatal(err)
	}
	s, err := NewStored("dir", c, mxfp4Files{files, files.Tensors(), 255})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	want := "model.layers.0.mlp.experts.gate_up_proj_scales: element 0 is 255, which is NaN"
	if err := s.Each(t.Context(), func(string, []float32) error { return nil }); err == nil ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("scales of 255: %v", err)
	}
}

// noWeights is the list of tensors of a model whose weights are not read.
type noWeights []safetensors.Tensor

func (f noWeights) Tensors() []safetensors.Tensor        { return f }
func (noWeights) Float32([]float32, string, int64) error { return errors.ErrUnsupported }
func (noWeights) Bytes([]byte, string, int64) error      { return errors.ErrUnsupported }
func (noWeights) Close() error                           { return nil }

// A byte of blocks counts as two weights when the size of a model with many tensors is checked.
func TestMXFP4Size(t *testing.T) {
	c, err := ReadConfig(filesystem.OS{}, mxfp4Model)
	if err != nil {
		t.Fatal(err)
	}
	c.Experts = 1 << 11
	var files noWeights
	for _, tensor := range c.inFiles() {
		stored := safetensors.Tensor{Name: tensor.Name, DType: safetensors.BF16, Shape: tensor.Shape}
		if !strings.HasSuffix(tensor.Name, "_proj") {
			files = append(files, stored)
			continue
		}
		e, in, out := tensor.Shape[0], tensor.Shape[1], tensor.Shape[2]
		files = append(files,
			safetensors.Tensor{Name: tensor.Name + "_blocks", DType: safetensors.U8, Shape: []int{e, out, in / 32, 16}},
			safetensors.Tensor{Name: tensor.Name + "_scales", DType: safetensors.U8, Shape: []int{e, out, in / 32}})
	}
	if _, err := NewStored("dir", c, files); err != nil {
		t.Error(err)
	}
	if _, err := NewStored("dir", c, files[:len(files)/2]); err == nil ||
		!strings.Contains(err.Error(), fmt.Sprintf("describes a model of %d weights", c.TotalParameters())) {
		t.Errorf("half of the tensors: %v", err)
	}
}
