package megatron

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mula/internal/filesystem"
	"mula/moe"
	"mula/train/foreign"
)

// A golden is a checkpoint that megatron-core wrote. conformance/mcore.py made it.
type golden struct {
	Config json.RawMessage              `json:"config"`
	Sums   map[string]map[string]string `json:"sha256"` // of the values of a kind, by name of the tensor
	Files  map[string][]byte            `json:"gzip_base64"`
}

func readGolden(t testing.TB) golden {
	t.Helper()
	text, err := os.ReadFile("testdata/llama.json")
	if err != nil {
		t.Fatal(err)
	}
	var g golden
	if err := json.Unmarshal(text, &g); err != nil {
		t.Fatal(err)
	}
	for name, data := range g.Files {
		r, err := gzip.NewReader(bytes.NewReader(data))
		if err != nil {
			t.Fatal(err)
		}
		if g.Files[name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
	return g
}

// write writes the checkpoint into dir/iter_0000003, and returns its folder and configuration.
func (g golden) write(t *testing.T, dir string) (string, moe.Config) {
	t.Helper()
	checkpoint := filepath.Join(dir, "iter_0000003")
	if err := os.MkdirAll(checkpoint, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, data := range g.Files {
		if err := os.WriteFile(filepath.Join(checkpoint, name), data, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	for name, text := range map[string]string{"config.json": string(g.Config), latestFile: "3\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	c, err := moe.ReadConfig(filesystem.OS{}, dir)
	if err != nil {
		t.Fatal(err)
	}
	return checkpoint, c
}

func TestOpen(t *testing.T) {
	g, dir := readGolden(t), t.TempDir()
	_, c := g.write(t, dir)
	found, ok := Find(dir)
	if !ok {
		t.Fatal("no checkpoint found")
	}
	s, err := Open(found, c)
	if err != nil {
		t.Fatal(err)
	}
	if s.Step != 3 || s.Updates != 3 || s.Samples != 6 || s.NoMoments != nil ||
		s.Settings != "betas [0.9 0.95], eps 1e-08, weight_decay 0.1 and 0, wd_mult 1 and 0, lr 0.001" {
		t.Errorf("%+v", s)
	}
	for kind, name := range []string{"param", "exp_avg", "exp_avg_sq"} {
		checkSums(t, s, foreign.Kind(kind), g.Sums[name])
	}
}

// checkSums compares the hashes of all tensors, which are read in chunks of several sizes.
func checkSums(t *testing.T, s *foreign.State, kind foreign.Kind, want map[string]string) {
	t.Helper()
	if len(s.Parameters) != len(want) {
		t.Errorf("%d parameters, want %d", len(s.Parameters), len(want))
	}
	for _, p := range s.Parameters {
		n := int64(1)
		for _, d := range p.Shape {
			n *= int64(d)
		}
		for _, size := range []int64{n, 5} {
			hash := sha256.New()
			for first := int64(0); first < n; first += size {
				values := make([]float32, min(size, n-first))
				if err := p.Read(kind, values, first); err != nil {
					t.Fatal(err)
				}
				if err := binary.Write(hash, binary.LittleEndian, values); err != nil {
					t.Fatal(err)
				}
			}
			if got := hex.EncodeToString(hash.Sum(nil)); got != want[p.Name] {
				t.Errorf("kind %d of %s in chunks of %d: sha256 %s, want %s", kind, p.Name, size, got, want[p.Name])
			}
		}
	}
}

// system is a pickle that calls os.system.
const system = "\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R."

func TestRefused(t *testing.T) {
	cut := func(name string, n int) func(map[string][]byte) {
		return func(files map[string][]byte) { files[name] = files[name][:n] }
	}
	replace := func(name, old, new string) func(map[string][]byte) {
		return func(files map[string][]byte) {
			if !bytes.Contains(files[name], []byte(old)) || len(old) != len(new) {
				t.Errorf("%s has no %q", name, old)
			}
			files[name] = bytes.ReplaceAll(files[name], []byte(old), []byte(new))
		}
	}
	content := func(name, data string) func(map[string][]byte) {
		return func(files map[string][]byte) { files[name] = []byte(data) }
	}
	for name, test := range map[string]struct {
		files  func(map[string][]byte)
		config func(*moe.Config)
		want   string
	}{
		"hostile": {content(metadataFile, system), nil, ".metadata: pickle at byte 2: the pickle contains os.system"},
		"hostile arguments": {replace(commonFile, "argparse\nNamespace", "shutil\nrmtree....."), nil,
			"common.pt: pickle at byte "},
		"format":         {content(formatFile, `{"sharded_backend": "zarr"}`), nil, `sharded_backend is "zarr"`},
		"short file":     {cut("__0_0.distcp", 1000), nil, "__0_0.distcp is cut short: it has 1000 bytes"},
		"missing file":   {func(files map[string][]byte) { delete(files, "__0_1.distcp") }, nil, "__0_1.distcp"},
		"short metadata": {cut(metadataFile, 500), nil, ".metadata: pickle at byte"},
		"outside":        {replace(metadataFile, "__0_0.distcp", "../../passwd"), nil, `in the file "../../passwd"`},
		"no tensor": {replace(metadataFile, "decoder.final_layernorm.weight", "decoder.final_layernorm.unknow"), nil,
			"has no tensor decoder.final_layernorm.weight (model.norm.weight)"},
		"layers": {nil, func(c *moe.Config) { c.Layers = 3 }, "has shape [2 8]; config.json needs [8] of layer 2"},
		"shape": {nil, func(c *moe.Config) { c.IntermediateSize = 13 },
			"decoder.layers.mlp.linear_fc1.weight has shape [2 24 8]; config.json needs [26 8] of layer 0"},
		"unknown": {nil, func(c *moe.Config) { c.TieEmbeddings = true }, "args.untie"},
		"family":  {nil, func(c *moe.Config) { c.Architecture = moe.OLMo2 }, "model_type olmo2"},
		"epsilon": {nil, func(c *moe.Config) { c.NormEps = 1e-6 },
			"args.norm_epsilon is 1e-05, but rms_norm_eps of config.json needs 1e-06"},
	} {
		t.Run(name, func(t *testing.T) {
			g := readGolden(t)
			if test.files != nil {
				test.files(g.Files)
			}
			dir, c := g.write(t, t.TempDir())
			if test.config != nil {
				test.config(&c)
			}
			if _, err := Open(dir, c); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v, want %q", err, test.want)
			}
		})
	}
}

// Weights can be imported without moments.
func TestNoMoments(t *testing.T) {
	for old, test := range map[string]struct{ new, want string }{
		"optimizer.state.exp_avg_sq.": {"optimizer.distributed.abcde", "dp_reshardable"},
		"optimizer.state.exp_avg.":    {"optimizer.state.unknown.", "has no tensor optimizer.state.exp_avg."},
	} {
		g := readGolden(t)
		g.Files[metadataFile] = bytes.ReplaceAll(g.Files[metadataFile], []byte(old), []byte(test.new))
		dir, c := g.write(t, t.TempDir())
		s, err := Open(dir, c)
		if err != nil {
			t.Fatal(err)
		}
		if s.NoMoments == nil || !strings.Contains(s.NoMoments.Error(), test.want) {
			t.Errorf("%v, want %q", s.NoMoments, test.want)
		}
		checkSums(t, s, foreign.Weights, g.Sums["param"])
	}
}

// Another file in place of a chunk is an error that names it.
func TestOtherChunk(t *testing.T) {
	g := readGolden(t)
	for name, data := range g.Files {
		if strings.HasSuffix(name, ".distcp") {
			g.Files[name] = append(data[len(data)/2:], data...)
		}
	}
	dir, c := g.write(t, t.TempDir())
	s, err := Open(dir, c)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Parameters[0].Read(foreign.Weights, make([]float32, 8), 0); err == nil ||
		!strings.Contains(err.Error(), ".distcp, from byte ") {
		t.Errorf("%v", err)
	}
}

func FuzzMetadata(f *testing.F) {
	f.Add(readGolden(f).Files[metadataFile])
	f.Add([]byte(system))
	f.Fuzz(func(t *testing.T, data []byte) {
		tensors, err := parseMetadata(data)
		if err != nil {
			return
		}
		for _, tensor := range tensors {
			covered := 0
			for _, c := range tensor.chunks {
				if c.file == "" || c.first < 0 || c.bytes < 0 || filepath.Base(c.file) != c.file {
					t.Errorf("%s: %+v", tensor.name, c)
				}
				n := 1
				for i, size := range c.sizes {
					if n *= size; c.offsets[i] < 0 || c.offsets[i]+size > tensor.shape[i] {
						t.Errorf("%s of shape %v: %+v", tensor.name, tensor.shape, c)
					}
				}
				covered += n
			}
			for lead := range min(len(tensor.shape), 3) {
				if err := tensor.index(lead); err != nil {
					t.Log(err)
				}
			}
		}
	})
}

// Optimizers of a chain have different parameters. The same tensor twice is an error.
func TestWithoutChains(t *testing.T) {
	a, b := &tensor{name: "chained_0.state.a"}, &tensor{name: "chained_1.state.b"}
	named, err := withoutChains(map[string]*tensor{a.name: a, b.name: b})
	if err != nil || len(named) != 2 || named["state.a"] != a || named["state.b"] != b {
		t.Errorf("%v, %v", named, err)
	}
	if _, err := withoutChains(map[string]*tensor{a.name: a, "chained_1.state.a": b}); err == nil ||
		!strings.Contains(err.Error(), "chained_0.state.a and chained_1.state.a are the same tensor") {
		t.Error(err)
	}
}
