package moe

import (
	"hash/fnv"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/internal/filesystem"
	"mula/moe/safetensors"
)

// predictionCase returns a model of a family, and the tensors of two layers of multi-token
// prediction. The first repeats the embedding and the head.
func predictionCase(t *testing.T, family string) (Config, []safetensors.Tensor) {
	t.Helper()
	c := gradientCases(t)["deepseek_v3"]
	h, v := c.HiddenSize, c.VocabSize
	var list tensorList
	if family == "ernie4_5_moe" {
		c = gradientCases(t)[family]
		h = c.HiddenSize
		for _, k := range []string{"0", "1"} {
			list.add("model.mtp_block."+k+".input_layernorm.weight", h)
			list.add("model.mtp_block."+k+".mlp.up_proj.weight", 3, h)
			list.add("model.mtp_emb_norm."+k+".weight", h)
			list.add("model.mtp_linear_proj."+k+".weight", h, 2*h)
		}
		return c, list
	}
	if family == "glm4_moe" {
		c = gradientCases(t)["gqa"]
		c.Architecture, c.ClipQKV, c.HeadSize, c.QKNorm, c.AttentionBias = GLM4MoE, 0, 24, true, true
		c.RotaryPart, c.RoutingScale, c.SharedSize = 0.5, 1, 2*c.IntermediateSize
		c.DenseLayers, c.DenseSize, c.RouterAuxLossCoef, c.TieEmbeddings = "0", 40, 0, true
		h, v = c.HiddenSize, c.VocabSize
	}
	for _, prefix := range []string{"model.layers.2.", "model.layers.3."} {
		list.layer(c, int(prefix[len("model.layers.")]-'0'))
		list.add(prefix+"enorm.weight", h)
		list.add(prefix+"hnorm.weight", h)
		list.add(prefix+"eh_proj.weight", h, 2*h)
		list.add(prefix+"shared_head.norm.weight", h)
	}
	list.add("model.layers.2.embed_tokens.weight", v, h)
	list.add("model.layers.2.shared_head.head.weight", v, h)
	return c, list
}

// predictedValue returns a value of a tensor in these models, which has few digits.
func predictedValue(c Config) func(name string, i int) float32 {
	return func(name string, i int) float32 {
		switch {
		case strings.HasSuffix(name, ".embed_tokens.weight"), name == headName && c.TieEmbeddings:
			name = embeddingName
		case strings.HasSuffix(name, ".shared_head.head.weight"):
			if name = headName; c.TieEmbeddings {
				name = embeddingName
			}
		}
		sum := fnv.New32a()
		sum.Write([]byte(name))
		return float32((sum.Sum32()>>8+uint32(i)*7919)%255)/128 - 1
	}
}

// writePredictions writes such a model in bfloat16, and returns its directory.
func writePredictions(t *testing.T, c Config, tensors []safetensors.Tensor,
	value func(name string, i int) float32) string {
	t.Helper()
	dir := t.TempDir()
	all := c.StoredTensors(safetensors.BF16)
	for _, tensor := range tensors {
		if tensor.DType == safetensors.F32 && !c.alwaysFloat32(tensor.Name) {
			tensor.DType = safetensors.BF16
		}
		all = append(all, tensor)
	}
	writeTensors(t, filepath.Join(dir, safetensors.SingleName), all, value)
	f, err := os.Create(filepath.Join(dir, configName))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := writeConfigJSON(f, c, safetensors.BF16, 2); err != nil {
		t.Fatal(err)
	}
	return dir
}

// readAll returns the type and the numbers of every tensor in a directory.
func readAll(t *testing.T, dir string) map[string][]float32 {
	t.Helper()
	files, err := safetensors.OpenDirectory(filesystem.OS{}, dir)
	if err != nil {
		t.Fatal(err)
	}
	defer files.Close()
	all := map[string][]float32{}
	for _, tensor := range files.Tensors() {
		numbers := make([]float32, tensor.Elements())
		if err := files.Float32(numbers, tensor.Name, 0); err != nil {
			t.Fatal(err)
		}
		all[string(tensor.DType)+" "+tensor.Name] = numbers
	}
	return all
}

// A copy of a model has its layers of multi-token prediction, to the bit. The model itself does
// not.
func TestPredictionsAreKept(t *testing.T) {
	for _, family := range []string{"deepseek_v3", "glm4_moe", "ernie4_5_moe"} {
		c, tensors := predictionCase(t, family)
		dir := writePredictions(t, c, tensors, predictedValue(c))
		want := readAll(t, dir)
		if len(want) != len(c.Tensors())+len(tensors) {
			t.Fatalf("%s: %d tensors", family, len(want))
		}
		for _, size := range []int64{0, 20_000} {
			stored, err := OpenStored(filesystem.OS{}, dir)
			if err != nil {
				t.Fatal(err)
			}
			defer stored.Close()
			if n := stored.PredictionLayers(); n != 2 || !slices.Equal(stored.Types(),
				[]safetensors.DType{safetensors.BF16}) {
				t.Errorf("%s: %d layers, types %v", family, n, stored.Types())
			}
			if err := stored.CheckPredictions(t.Context()); err != nil {
				t.Error(err)
			}
			names := map[string]bool{}
			dir = t.TempDir() // the next copy is a copy of this copy
			if err := stored.Save(t.Context(), dir, SaveOptions{DType: safetensors.BF16, ShardSize: size},
				func(name string, _ []float32) error { names[name] = true; return nil }); err != nil {
				t.Fatal(err)
			}
			if len(names) != len(c.Tensors()) {
				t.Errorf("%s: %d tensors were visited, want %d", family, len(names), len(c.Tensors()))
			}
			if got := readAll(t, dir); !maps.EqualFunc(got, want, slices.Equal[[]float32]) {
				t.Errorf("%s, files of %d bytes: the copy has other tensors", family, size)
			}
			text, err := os.ReadFile(filepath.Join(dir, configName))
			if err != nil || !strings.Contains(string(text), `"num_nextn_predict_layers": 2`) {
				t.Errorf("%s: %v, %s", family, err, text)
			}
		}
		m := newModel(t, c, 1)
		if err := m.Load(filesystem.OS{}, dir); err != nil {
			t.Fatal(err)
		}
		dir = t.TempDir()
		if err := m.Save(t.Context(), dir, SaveOptions{}); err != nil {
			t.Fatal(err)
		}
		stored, err := OpenStored(filesystem.OS{}, dir)
		if err != nil {
			t.Fatal(err)
		}
		defer stored.Close()
		if n := stored.PredictionLayers(); n != 0 {
			t.Errorf("%s: the model has %d layers of multi-token prediction", family, n)
		}
	}
}

func TestPredictionsAreChecked(t *testing.T) {
	c, tensors := predictionCase(t, "deepseek_v3")
	value := predictedValue(c)
	without := func(drop ...string) []safetensors.Tensor {
		return slices.DeleteFunc(slices.Clone(tensors),
			func(t safetensors.Tensor) bool { return slices.Contains(drop, t.Name) })
	}
	changed := func(name string, change func(*safetensors.Tensor)) []safetensors.Tensor {
		list := slices.Clone(tensors)
		change(&list[slices.IndexFunc(list, func(t safetensors.Tensor) bool { return t.Name == name })])
		return list
	}
	with := func(bad string, at int, x float32) func(string, int) float32 {
		return func(name string, i int) float32 {
			if name == bad && i == at {
				return x
			}
			return value(name, i)
		}
	}
	nan := float32(math.NaN())
	for _, test := range []struct {
		name    string
		tensors []safetensors.Tensor
		value   func(string, int) float32
		want    string
	}{
		{"nothing repeated", without("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"),
			value, ""},
		{"one layer", tensors[:len(tensors)/2-1], value, ""},
		{"a tensor missing", without("model.layers.3.mlp.experts.1.up_proj.weight"), value,
			"tensors missing: model.layers.3.mlp.experts.1.up_proj.weight"},
		{"a gap", without("model.layers.2.eh_proj.weight"), value, "tensors unexpected: model.layers.2."},
		{"another shape", changed("model.layers.2.eh_proj.weight",
			func(t *safetensors.Tensor) { t.Shape = []int{2 * c.HiddenSize, c.HiddenSize} }), value,
			"model.layers.2.eh_proj.weight (shape [96 48], want [48 96])"},
		{"another tensor", append(slices.Clone(tensors), safetensors.Tensor{Name: "model.layers.2.gnorm.weight",
			DType: safetensors.F32, Shape: []int{c.HiddenSize}}), value,
			"tensors unexpected: model.layers.2.gnorm.weight"},
		{"another embedding", tensors, with("model.layers.2.embed_tokens.weight", 77, 5),
			"model.layers.2.embed_tokens.weight differs from model.embed_tokens.weight"},
		{"another head", tensors, with("lm_head.weight", 78, 5),
			"model.layers.2.shared_head.head.weight differs from lm_head.weight"},
		{"no number", tensors, with("model.layers.3.hnorm.weight", 7, nan), "model.layers.3.hnorm.weight"},
	} {
		dir := writePredictions(t, c, test.tensors, test.value)
		stored, err := OpenStored(filesystem.OS{}, dir)
		if err == nil {
			if err = stored.CheckPredictions(t.Context()); err != nil {
				ignore := func(string, []float32) error { return nil }
				saved := stored.Save(t.Context(), t.TempDir(), SaveOptions{}, ignore)
				if saved == nil || !strings.Contains(saved.Error(), err.Error()) {
					t.Errorf("%s: saving: %v, want %v", test.name, saved, err)
				}
			}
			stored.Close()
		}
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v, want one with %q", test.name, err, test.want)
		}
	}
}
