package moe

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/filesystem/faultfs"
	"mula/moe/safetensors"
	"mula/xpu"
	"mula/xpu/cpu"
)

// exportCases are the directories that testdata/loaded.py loads with transformers: golden cases
// with their formula weights.
var exportCases = []struct {
	name, golden string
	opts         SaveOptions
}{
	{"olmoe", "olmoe", SaveOptions{}},
	{"olmoe-gqa-sharded", "olmoe-gqa", SaveOptions{ShardSize: 200_000}},
	{"olmoe-bf16", "olmoe", SaveOptions{DType: safetensors.BF16}},
	{"olmo", "olmo", SaveOptions{}},
	{"olmo-gqa-tied", "olmo-gqa-tied", SaveOptions{}},
}

func hashFiles(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	hashes := map[string]string{}
	for _, e := range entries {
		b, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		sum := sha256.Sum256(b)
		hashes[e.Name()] = hex.EncodeToString(sum[:])
	}
	return hashes
}

// Save writes the files that transformers has loaded: testdata/loaded.json has the hashes of the
// files that testdata/loaded.py loaded with from_pretrained, and the differences of the resulting
// weights and logits.
func TestSavedDirectoryIsTheOneTransformersLoaded(t *testing.T) {
	text, err := os.ReadFile("testdata/loaded.json")
	if err != nil {
		t.Fatal(err)
	}
	var loaded struct {
		Versions map[string]string
		Cases    map[string]struct {
			Weights, Logits float64
			Files           map[string]string
		}
	}
	if err := json.Unmarshal(text, &loaded); err != nil {
		t.Fatal(err)
	}
	for _, c := range exportCases {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			if keep := os.Getenv("MULA_EXPORT"); keep != "" { // for testdata/loaded.py
				dir = filepath.Join(keep, c.name)
				if err := os.MkdirAll(dir, 0o755); err != nil {
					t.Fatal(err)
				}
			}
			m, _ := openGolden(t, c.golden+".safetensors").model(1)
			if err := m.Save(t.Context(), dir, c.opts); err != nil {
				t.Fatal(err)
			}
			record, ok := loaded.Cases[c.name]
			if !ok {
				t.Fatal("not in loaded.json")
			}
			if record.Weights != 0 || !(record.Logits < 1e-5) {
				t.Errorf("transformers' weights differed by %g, its logits by %g", record.Weights, record.Logits)
			}
			if got := hashFiles(t, dir); !maps.Equal(got, record.Files) {
				t.Errorf("files %v, want those that transformers loaded: %v; run testdata/loaded.py", got, record.Files)
			}
		})
	}
}

// Whatever a Save writes a Load reads, bit for bit after rounding to the element type; a second
// Save gives the same bytes.
func TestSaveLoad(t *testing.T) {
	for _, c := range exportCases {
		for _, dtype := range []safetensors.DType{safetensors.F32, safetensors.BF16, safetensors.F16} {
			t.Run(c.name+"/"+string(dtype), func(t *testing.T) {
				m, _ := openGolden(t, c.golden+".safetensors").model(1)
				dir, again := t.TempDir(), t.TempDir()
				opts := SaveOptions{DType: dtype, ShardSize: c.opts.ShardSize}
				if err := m.Save(t.Context(), dir, opts); err != nil {
					t.Fatal(err)
				}
				back, err := Open(dir, m.dev)
				if err != nil {
					t.Fatal(err)
				}
				if back.cfg != m.cfg {
					t.Errorf("configuration %+v, want %+v", back.cfg, m.cfg)
				}
				// Half a unit in the last place of the element type, relative; of F16's subnormal
				// numbers absolute.
				bound := map[safetensors.DType]float64{safetensors.F32: 0, safetensors.BF16: 1.0 / 256,
					safetensors.F16: 1.0 / 2048}[dtype]
				tiny := 0.0
				if dtype == safetensors.F16 {
					tiny = 1.0 / (1 << 25)
				}
				for i, p := range back.Parameters() {
					for j, v := range m.Parameters()[i].Weight.Floats() {
						d := math.Abs(float64(p.Weight.Floats()[j]) - float64(v))
						if d > max(bound*math.Abs(float64(v)), tiny) {
							t.Fatalf("%s[%d] is %v, was %v", p.Name, j, p.Weight.Floats()[j], v)
						}
					}
				}
				if err := back.Save(t.Context(), again, opts); err != nil {
					t.Fatal(err)
				}
				if a, b := hashFiles(t, dir), hashFiles(t, again); !maps.Equal(a, b) {
					t.Errorf("saved again: %v, want %v", b, a)
				}
			})
		}
	}
}

func TestSaveRefusesDirectoryInUse(t *testing.T) {
	m, _ := openGolden(t, "olmo.safetensors").model(1)
	dir := t.TempDir()
	if err := m.Save(t.Context(), dir, SaveOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := m.Save(t.Context(), dir, SaveOptions{}); err == nil ||
		!strings.Contains(err.Error(), "config.json already exists") {
		t.Errorf("second Save into the same directory: %v", err)
	}
}

// Whichever file operation fails, the error is passed on, and the directory has no config.json
// unless everything else is there.
func TestSaveFaults(t *testing.T) {
	t.Parallel()
	m, _ := openGolden(t, "olmo.safetensors").model(1)
	for k := int64(1); ; k++ {
		dir := t.TempDir()
		nth := &faultfs.Nth{K: k, Err: syscall.ENOSPC}
		files := atomicfile.On(faultfs.New(nth.Fault))
		err := m.Save(t.Context(), dir, SaveOptions{ShardSize: 100_000,
			Create: func(name string) (SavedFile, error) { return files.Create(filepath.Join(dir, name)) }})
		if nth.Failed() == "" {
			if err != nil || k < 20 {
				t.Fatalf("without a fault: %v after %d operations; want at least 19", err, k-1)
			}
			return
		}
		if !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("operation %d: error %v does not wrap ENOSPC", k, err)
		}
		if _, err := os.Stat(filepath.Join(dir, configName)); err == nil {
			if _, err := Open(dir, m.dev); err != nil {
				t.Errorf("operation %d failed: config.json is there, yet %v", k, err)
			}
		}
		for _, name := range slices.Collect(maps.Keys(hashFiles(t, dir))) {
			if strings.HasSuffix(name, atomicfile.TempSuffix) {
				t.Errorf("operation %d failed: left %s behind", k, name)
			}
		}
	}
}

// Files that do not fit the configuration are refused by the name of the tensor.
func TestLoadRefuses(t *testing.T) {
	g := openGolden(t, "olmoe.safetensors")
	m, _ := g.model(1)
	type entry struct {
		name  string
		shape []int
	}
	all := func() (entries []entry) {
		for _, p := range m.Parameters() {
			entries = append(entries, entry{p.Name, p.Shape})
		}
		return entries
	}
	for _, test := range []struct {
		name   string
		change func([]entry) []entry
		want   string
	}{
		{"missing", func(e []entry) []entry { return e[1:] }, "tensors missing: model.embed_tokens.weight"},
		{"many missing", func(e []entry) []entry { return e[:3] }, "more"},
		{"unexpected", func(e []entry) []entry { return append(e, entry{"model.extra.weight", []int{2}}) },
			"tensors unexpected: model.extra.weight"},
		{"shape", func(e []entry) []entry { e[0].shape = []int{64, 128}; return e },
			"model.embed_tokens.weight (shape [64 128], want [128 64])"},
		{"fused shape", func(e []entry) []entry {
			return append(e, entry{"model.layers.0.mlp.experts.down_proj", []int{8, 32, 64}})
		}, "model.layers.0.mlp.experts.down_proj (shape [8 32 64], want [8 64 32])"},
		{"fused and single", func(e []entry) []entry {
			return append(e, entry{"model.layers.0.mlp.experts.down_proj", []int{8, 64, 32}})
		}, "model.layers.0.mlp.experts.0.down_proj.weight (stored in"},
		{"layer beyond", func(e []entry) []entry {
			return append(e, entry{"model.layers.2.mlp.experts.down_proj", []int{8, 64, 32}})
		}, "tensors unexpected: model.layers.2.mlp.experts.down_proj"},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			f, err := os.Create(filepath.Join(dir, safetensors.SingleName))
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			var tensors []safetensors.Tensor
			for _, e := range test.change(all()) {
				tensors = append(tensors, safetensors.Tensor{Name: e.name, DType: safetensors.F16, Shape: e.shape})
			}
			w, err := safetensors.NewWriter(f, tensors, nil)
			if err != nil {
				t.Fatal(err)
			}
			for _, tensor := range tensors {
				if err := w.Float32(tensor.Name, make([]float32, tensor.Elements())); err != nil {
					t.Fatal(err)
				}
			}
			before := weights(t, m)
			if err := m.Load(filesystem.OS{}, dir); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want one with %q", err, test.want)
			}
			if !slices.Equal(before, weights(t, m)) {
				t.Error("weights were changed")
			}
		})
	}
	// A config.json that describes more than there is must not get memory for it: with these sizes
	// there is none.
	t.Run("config of another model", func(t *testing.T) {
		m, _ := openGolden(t, "olmoe.safetensors").model(1)
		dir := t.TempDir()
		if err := m.Save(t.Context(), dir, SaveOptions{}); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, configName)
		for _, layers := range []int{maxLayers, m.cfg.Layers + 1} {
			huge := m.cfg
			huge.Layers = layers
			if layers == maxLayers {
				huge.HiddenSize, huge.IntermediateSize, huge.Experts = maxWidth, maxWidth, maxExperts
			}
			f, err := os.Create(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(WriteConfigJSON(f, huge, safetensors.F32), f.Close()); err != nil {
				t.Fatal(err)
			}
			want := path + " describes a model of"
			if layers != maxLayers { // few enough to be named
				want = "tensors missing: model.layers.2.input_layernorm.weight"
			}
			if _, err := Open(dir, cpu.New(1, xpu.FP32)); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("error %v, want one with %s", err, want)
			}
		}
		huge := m.cfg
		huge.Layers, huge.HiddenSize, huge.IntermediateSize, huge.Experts = maxLayers, maxWidth, maxWidth, maxExperts
		if _, err := New(huge, m.dev); err == nil || !strings.Contains(err.Error(), "address space") {
			t.Errorf("error %v", err)
		}
	})
	// Messages name the file and the fault, whatever packages they came through.
	t.Run("damaged", func(t *testing.T) {
		dir := t.TempDir()
		path := filepath.Join(dir, safetensors.SingleName)
		if err := os.WriteFile(path, []byte("short"), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := m.Load(filesystem.OS{}, dir); err == nil ||
			!strings.HasPrefix(err.Error(), "loading weights: "+path+": corrupt") {
			t.Errorf("error %v", err)
		}
	})
	t.Run("nothing there", func(t *testing.T) {
		if _, err := Open(t.TempDir(), cpu.New(1, xpu.FP32)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("error %v, want one that wraps ErrNotExist", err)
		}
	})
}
