package moe

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/internal/filesystem"
	"mula/moe/safetensors"
)

// Every tensor of the list has its own weights, as many as its shape says, and no weight is left
// over.
func TestTensorsAreParameters(t *testing.T) {
	configs := gradientCases(t)
	for _, name := range []string{"mula-nano", "mula-tiny"} {
		configs[name] = mustPreset(t, name)
	}
	for name, c := range configs {
		m := newModel(t, c, 1)
		list := c.TrainedTensors()
		if len(list) != len(m.Parameters()) {
			t.Fatalf("%s: %d tensors, %d parameters", name, len(list), len(m.Parameters()))
		}
		for i, p := range m.Parameters() {
			if n := int(list[i].Elements()); p.Weight.Elements() != n || p.Grad.Elements() != n {
				t.Errorf("%s: %s %v has %d weights and %d gradients", name, p.Name, p.Shape, p.Weight.Elements(),
					p.Grad.Elements())
			}
			for j := range p.Weight.Floats() {
				p.Weight.Floats()[j]++
				p.Grad.Floats()[j]++
			}
		}
		for i, b := range m.Buckets() {
			for j := range b.Weight.Floats() {
				if b.Weight.Floats()[j] != 1 || b.Grad.Floats()[j] != 1 {
					t.Fatalf("%s, bucket %d: weight %d of %d belongs to %v parameters, its gradient to %v", name, i, j,
						b.Weight.Elements(), b.Weight.Floats()[j], b.Grad.Floats()[j])
				}
			}
		}
	}
}

// A model that is copied from file to file without being in memory has the bytes that Open and Save
// would have written.
func TestStoredSave(t *testing.T) {
	for name, wantType := range map[string]safetensors.DType{"hf-single": safetensors.F32,
		"hf-granitemoe": safetensors.F32,
		"hf-sharded":    safetensors.F32, "hf-fused": safetensors.F32, "hf-mixtral-fused": safetensors.F32,
		"hf-olmo-bf16": safetensors.BF16, "hf-v4-bf16": safetensors.BF16, "hf-olmo-tied-fp16": safetensors.F16} {
		for _, opts := range []SaveOptions{{}, {DType: safetensors.BF16, ShardSize: 4000}, {DType: safetensors.F16}} {
			t.Run(fmt.Sprint(name, opts), func(t *testing.T) {
				from := filepath.Join("testdata", name)
				m, err := Open(from, newModel(t, mustPreset(t, "mula-nano"), 1).dev)
				if err != nil {
					t.Fatal(err)
				}
				want, got := t.TempDir(), t.TempDir()
				if err := m.Save(t.Context(), want, opts); err != nil {
					t.Fatal(err)
				}
				s, err := OpenStored(filesystem.OS{}, from)
				if err != nil {
					t.Fatal(err)
				}
				defer s.Close()
				fused := strings.HasSuffix(name, "-fused") || name == "hf-granitemoe"
				if s.Fused() != fused || s.Config() != m.Config() {
					t.Errorf("fused %v, %+v", s.Fused(), s.Config())
				}
				if !slices.Equal(s.Types(), []safetensors.DType{wantType}) {
					t.Errorf("element types %v", s.Types())
				}
				var seen, weights []float32
				for _, p := range m.Parameters() { // their order, which is not that in memory
					weights = append(weights, p.Weight.Floats()...)
				}
				see := func(_ string, piece []float32) error { seen = append(seen, piece...); return nil }
				if err := s.Save(context.Background(), got, opts, see); err != nil {
					t.Fatal(err)
				}
				if name == "hf-granitemoe" { // its files have the down projections of experts last
					slices.Sort(seen)
					ordered := slices.Sorted(slices.Values(weights))
					if !slices.Equal(seen, ordered) {
						t.Error("the pieces seen are not the weights")
					}
				} else if !slices.Equal(seen, weights) {
					t.Error("the pieces seen are not the weights")
				}
				if a, b := hashFiles(t, want), hashFiles(t, got); !maps.Equal(a, b) {
					t.Errorf("files %v, want %v", b, a)
				}
				seen = nil
				if err := s.Each(context.Background(), see); err != nil || !slices.Equal(seen, weights) {
					t.Errorf("Each: other weights, or %v", err)
				}
				ctx, cancel := context.WithCancel(context.Background())
				cancel()
				if err := s.Each(ctx, see); !errors.Is(err, context.Canceled) {
					t.Errorf("after cancelling: %v", err)
				}
			})
		}
	}
}

// A Granite model is saved with the tensors that transformers has written. The same model with a
// tensor for each matrix, as in checkpoints, is read, too.
func TestSavedFusedExperts(t *testing.T) {
	from, tensors := "testdata/hf-granitemoe", func(dir string) map[string][]float32 {
		t.Helper()
		files, err := safetensors.OpenDirectory(filesystem.OS{}, dir)
		if err != nil {
			t.Fatal(err)
		}
		defer files.Close()
		all := map[string][]float32{}
		for _, tensor := range files.Tensors() {
			name := fmt.Sprint(tensor.Name, tensor.Shape)
			all[name] = make([]float32, tensor.Elements())
			if err := files.Float32(all[name], tensor.Name, 0); err != nil {
				t.Fatal(err)
			}
		}
		return all
	}
	s, err := OpenStored(filesystem.OS{}, from)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	single, fused := t.TempDir(), t.TempDir()
	values := map[string][]float32{}
	see := func(name string, piece []float32) error { values[name] = append(values[name], piece...); return nil }
	if err := s.Each(t.Context(), see); err != nil {
		t.Fatal(err)
	}
	writeTensors(t, filepath.Join(single, safetensors.SingleName), s.Config().Tensors(),
		func(name string, i int) float32 { return values[name][i] })
	var config strings.Builder
	if err := WriteConfigJSON(&config, s.Config(), safetensors.F32); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(single, configName), []byte(config.String()), 0o666); err != nil {
		t.Fatal(err)
	}
	checkpoint, err := OpenStored(filesystem.OS{}, single)
	if err != nil {
		t.Fatal(err)
	}
	defer checkpoint.Close()
	if checkpoint.Fused() || !s.Fused() {
		t.Error("the wrong model has fused experts")
	}
	if err := checkpoint.Save(t.Context(), fused, SaveOptions{}, see); err != nil {
		t.Fatal(err)
	}
	want, got := tensors(from), tensors(fused)
	if !maps.EqualFunc(want, got, slices.Equal) {
		t.Errorf("tensors %v, want %v", slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(want)))
	}
}

// writeTensors writes a file of tensors that value fills.
func writeTensors(t *testing.T, path string, tensors []safetensors.Tensor, value func(name string, i int) float32) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	w, err := safetensors.NewWriter(f, tensors, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, tensor := range tensors {
		data := make([]float32, tensor.Elements())
		for i := range data {
			data[i] = value(tensor.Name, i)
		}
		if err := w.Float32(tensor.Name, data); err != nil {
			t.Fatal(err)
		}
	}
}

// Files of bfloat16 have correction biases as float32, and in ernie4_5_moe routers, too. These do
// not count as another type of the model.
func TestStoredFloat32(t *testing.T) {
	for name, wide := range map[string][]string{
		"deepseek_v3":  {".mlp.gate.e_score_correction_bias"},
		"ernie4_5_moe": {".mlp.gate.weight", ".mlp.moe_statics.e_score_correction_bias"},
	} {
		c := gradientCases(t)[name]
		m := newModel(t, c, 1)
		randomize(m, 3)
		dir := t.TempDir()
		if err := m.Save(t.Context(), dir, SaveOptions{DType: safetensors.BF16}); err != nil {
			t.Fatal(err)
		}
		found := 0
		for _, tensor := range c.StoredTensors(safetensors.BF16) {
			want := safetensors.BF16
			if slices.ContainsFunc(wide, func(end string) bool { return strings.HasSuffix(tensor.Name, end) }) {
				want, found = safetensors.F32, found+1
			}
			if tensor.DType != want {
				t.Errorf("%s: %s is %s, want %s", name, tensor.Name, tensor.DType, want)
			}
		}
		if layers := len(c.ExpertLayers(0, c.Layers)); found != layers*len(wide) {
			t.Errorf("%s: %d tensors are float32, want %d for each of %d layers", name, found, len(wide), layers)
		}
		stored, err := OpenStored(filesystem.OS{}, dir)
		if err != nil {
			t.Fatal(err)
		}
		defer stored.Close()
		if !slices.Equal(stored.Types(), []safetensors.DType{safetensors.BF16}) {
			t.Errorf("%s: element types %v", name, stored.Types())
		}
		loaded := newModel(t, c, 1)
		if err := loaded.Load(filesystem.OS{}, dir); err != nil {
			t.Fatal(err)
		}
		for i, p := range loaded.params {
			exact := slices.ContainsFunc(wide, func(end string) bool { return strings.HasSuffix(p.Name, end) })
			if exact && !slices.Equal(p.Weight.Floats(), m.params[i].Weight.Floats()) {
				t.Errorf("%s: %s was rounded", name, p.Name)
			}
		}
	}
}

// Files of gpt-oss have the matrices of experts transposed, and gate and up in alternate columns.
func TestTransposedExperts(t *testing.T) {
	c := gradientCases(t)["gpt_oss"]
	m := newModel(t, c, 1)
	randomize(m, 3)
	dir := t.TempDir()
	if err := m.Save(t.Context(), dir, SaveOptions{ShardSize: 20_000}); err != nil {
		t.Fatal(err)
	}
	files, err := safetensors.OpenDirectory(filesystem.OS{}, dir)
	if err != nil {
		t.Fatal(err)
	}
	defer files.Close()
	weight := func(name string) []float32 {
		for _, p := range m.params {
			if p.Name == name {
				return p.Weight.Floats()
			}
		}
		t.Fatalf("no parameter %s", name)
		return nil
	}
	h, ffn := c.HiddenSize, c.IntermediateSize
	const expert, row, column = 3, 5, 7
	place := "model.layers.1.mlp.experts."
	for _, test := range []struct {
		tensor string
		at     int
		name   string
		from   int
	}{
		{"gate_up_proj", (expert*h+column)*2*ffn + 2*row, "gate_proj.weight", row*h + column},
		{"gate_up_proj", (expert*h+column)*2*ffn + 2*row + 1, "up_proj.weight", row*h + column},
		{"gate_up_proj_bias", expert*2*ffn + 2*row, "gate_proj.bias", row},
		{"gate_up_proj_bias", expert*2*ffn + 2*row + 1, "up_proj.bias", row},
		{"down_proj", (expert*ffn+column)*h + row, "down_proj.weight", row*ffn + column},
		{"down_proj_bias", expert*h + row, "down_proj.bias", row},
	} {
		var got [1]float32
		if err := files.Float32(got[:], place+test.tensor, int64(test.at)); err != nil {
			t.Fatal(err)
		}
		if want := weight(fmt.Sprintf("%s%d.%s", place, expert, test.name))[test.from]; got[0] != want {
			t.Errorf("%s of %s is %v, want %v", test.name, test.tensor, got[0], want)
		}
	}
	loaded := newModel(t, c, 1)
	if err := loaded.Load(filesystem.OS{}, dir); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(weights(t, loaded), weights(t, m)) {
		t.Error("loaded weights differ from the saved ones")
	}
}

// A tied head that is stored all the same is read if it equals the embedding.
func TestTiedHeadStored(t *testing.T) {
	m, _ := openGolden(t, "olmo-gqa-tied.safetensors").model(1)
	for _, test := range []struct {
		name, want string
		shape      []int
		value      func(name string, i int) float32
	}{
		{"equal", "", []int{128, 64}, func(_ string, i int) float32 { return float32(i) }},
		{"different", "lm_head.weight differs from model.embed_tokens.weight", []int{128, 64},
			func(name string, i int) float32 {
				if name == headName && i == 128*64-1 {
					return -1
				}
				return float32(i)
			}},
		{"other shape", "tensors unexpected: lm_head.weight", []int{64, 128}, func(string, int) float32 { return 0 }},
	} {
		dir := t.TempDir()
		tensors := append(m.cfg.Tensors(), safetensors.Tensor{Name: headName, DType: safetensors.F32,
			Shape: test.shape})
		writeTensors(t, filepath.Join(dir, safetensors.SingleName), tensors, test.value)
		err := m.Load(filesystem.OS{}, dir)
		if test.want == "" && (err != nil || m.embed.w.Floats()[5] != 5) || test.want != "" &&
			(err == nil || !strings.Contains(err.Error(), test.want)) {
			t.Errorf("%s: error %v, want %q", test.name, err, test.want)
		}
	}
}

// Weights that are no floating-point numbers, or in a file that is not read, are refused by name.
func TestStoredRefuses(t *testing.T) {
	m, _ := openGolden(t, "olmo.safetensors").model(1)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "pytorch_model.bin"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := m.Load(filesystem.OS{}, dir); err == nil ||
		!strings.Contains(err.Error(), "pytorch_model.bin, which is not read") {
		t.Errorf("a model of PyTorch: %v", err)
	}
	if err := m.Save(t.Context(), dir, SaveOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenStored(filesystem.OS{}, dir); err != nil {
		t.Fatal(err)
	}
	m.Parameters()[0].Weight.Floats()[17] = 1e30
	if err := m.Save(t.Context(), t.TempDir(), SaveOptions{DType: safetensors.F16}); err == nil ||
		!strings.Contains(err.Error(), `"model.embed_tokens.weight": element 17 is 1e+30, beyond the range of F16`) {
		t.Errorf("a weight beyond half precision: %v", err)
	}
}
