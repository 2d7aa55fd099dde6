package checkpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/testwait"
	"mula/moe"
	"mula/moe/safetensors"
	"mula/train/checkpoint/checkpointtest"
)

// The hash of a model's weights is the same before and after a conversion, also if files have the
// experts of a layer as one tensor, or in MXFP4.
func TestHashOfFusedExperts(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"hf-granitemoe", "hf-gpt-oss-mxfp4"} {
		testHashOfFusedExperts(t, name)
	}
}

func testHashOfFusedExperts(t *testing.T, name string) {
	from, output := ModelDir{Dir: filepath.Join("../../moe/testdata", name)}, filepath.Join(t.TempDir(), "model")
	before, err := from.Inspect(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	converted, err := from.Convert(t.Context(), output, ConvertOptions{})
	if err != nil {
		t.Fatal(err)
	}
	after, err := ModelDir{Dir: output}.Inspect(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if !before.Fused || !after.Fused || converted.Weights != before.Weights || after.Weights != before.Weights {
		t.Errorf("before %+v\nconverted %+v\nafter %+v", before, converted, after)
	}
	const note = "the experts are in MXFP4"
	has := func(i Inspection) bool {
		return slices.ContainsFunc(i.Notes, func(n string) bool { return strings.HasPrefix(n, note) })
	}
	if want := strings.HasSuffix(name, "mxfp4"); has(before) != want || has(converted) != want || has(after) {
		t.Errorf("%s: notes before %q, converted %q, after %q", name, before.Notes, converted.Notes, after.Notes)
	}
}

// Layers of multi-token prediction are copied and noted, and do not change the hash of the weights.
// They are checked with and without a copy.
func TestPredictionLayersAreCopied(t *testing.T) {
	t.Parallel()
	dir, _ := checkpointtest.Model(t, func(c *moe.Config) {
		c.Architecture, c.NormTopK, c.ClipQKV = moe.Ernie45MoE, true, 0
	}, nil)
	from := ModelDir{Dir: dir}
	before, err := from.Inspect(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	files, err := safetensors.OpenDirectory(filesystem.OS{}, dir)
	if err != nil {
		t.Fatal(err)
	}
	defer files.Close()
	const name = "model.mtp_linear_proj.0.weight"
	tensors := append(slices.Clone(files.Tensors()), safetensors.Tensor{Name: name, DType: safetensors.F32,
		Shape: []int{3, 2}})
	for _, bad := range []bool{false, true} {
		var content bytes.Buffer
		w, err := safetensors.NewWriter(&content, tensors, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, tensor := range tensors {
			numbers := make([]float32, tensor.Elements())
			if tensor.Name != name {
				if err := files.Float32(numbers, tensor.Name, 0); err != nil {
					t.Fatal(err)
				}
			} else if bad {
				numbers[4] = float32(math.Inf(1))
			}
			if err := w.Float32(tensor.Name, numbers); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		more := ModelDir{Dir: filepath.Join(t.TempDir(), "more")}
		if err := os.CopyFS(more.Dir, os.DirFS(dir)); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(more.Dir, safetensors.SingleName), content.Bytes(), 0o666); err != nil {
			t.Fatal(err)
		}
		output := ModelDir{Dir: filepath.Join(t.TempDir(), "model")}
		found, inspecting := more.Inspect(t.Context(), nil)
		copied, converting := more.Convert(t.Context(), output.Dir, ConvertOptions{})
		if bad {
			for _, err := range []error{inspecting, converting} {
				if err == nil || !strings.Contains(err.Error(), name) {
					t.Errorf("a number that is not finite: %v", err)
				}
			}
			continue
		}
		again, rereading := output.Inspect(t.Context(), nil)
		if err := errors.Join(inspecting, converting, rereading); err != nil {
			t.Fatal(err)
		}
		for _, i := range []Inspection{found, copied, again} {
			if i.Weights != before.Weights || len(i.Notes) != 2 || !strings.HasPrefix(i.Notes[0],
				"the files have 1 layer of multi-token prediction") {
				t.Errorf("%+v", i)
			}
		}
	}
}

// A converted model has the weights, rounded to the requested type, and all other files that
// transformers reads.
func TestConvert(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	dir, m := checkpointtest.Model(t, nil,
		map[string]string{"tokenizer.json": checkpointtest.Tokenizer(t), "README.md": "not copied"})
	output := filepath.Join(t.TempDir(), "new", "model")
	var done, total int64
	found, err := ModelDir{Dir: dir}.Convert(ctx, output, ConvertOptions{DType: safetensors.BF16,
		Progress: func(d, n int64) { done, total = d, n }})
	if err != nil {
		t.Fatal(err)
	}
	if n := m.Config().TotalParameters(); done != n || total != n || found.Parameters != n {
		t.Errorf("progress %d of %d, %d parameters, want %d", done, total, found.Parameters, n)
	}
	if found.Weights != checkpointtest.WeightsHash(m.Parameters()) || found.Tokens != 258 || found.Notes != nil ||
		found.Fused ||
		!slices.Equal(found.DTypes, []safetensors.DType{safetensors.F32}) {
		t.Errorf("found %+v", found)
	}
	if want := []string{"config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
		"tokenizer_config.json"}; !slices.Equal(checkpointtest.Names(t, output), want) {
		t.Errorf("files %v, want %v", checkpointtest.Names(t, output), want)
	}
	if names := checkpointtest.Names(t, filepath.Dir(output)); !slices.Equal(names, []string{"model"}) {
		t.Errorf("beside it: %v", names)
	}
	var tokens map[string]any
	if err := readJSON(filepath.Join(output, tokenizerConfigFile), &tokens); err != nil {
		t.Fatal(err)
	}
	if want := map[string]any{"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": false,
		"model_max_length": 4096.0, "eos_token": "<|endoftext|>"}; !maps.Equal(tokens, want) {
		t.Errorf("tokenizer_config.json %v, want %v", tokens, want)
	}
	back, err := moe.Open(output, checkpointtest.Device(t, 1))
	if err != nil {
		t.Fatal(err)
	}
	for i, p := range back.Parameters() {
		for j, v := range m.Parameters()[i].Weight.Floats() {
			if math.Abs(float64(p.Weight.Floats()[j]-v)) > math.Abs(float64(v))/256 ||
				math.Float32bits(p.Weight.Floats()[j])&0xffff != 0 {
				t.Fatalf("%s[%d] is %v, was %v", p.Name, j, p.Weight.Floats()[j], v)
			}
		}
	}

	// Files that are there already are kept as they are, and a type that is not asked for is that
	// of the weights.
	const own = `{"tokenizer_class": "GPTNeoXTokenizerFast"}`
	if err := os.WriteFile(filepath.Join(output, tokenizerConfigFile), []byte(own), 0o644); err != nil {
		t.Fatal(err)
	}
	again := filepath.Join(t.TempDir(), "again")
	found, err = ModelDir{Dir: output}.Convert(ctx, again, ConvertOptions{ShardSize: 50_000})
	if err != nil || found.Weights != checkpointtest.WeightsHash(back.Parameters()) {
		t.Fatalf("%+v, %v", found, err)
	}
	if text, err := os.ReadFile(filepath.Join(again, tokenizerConfigFile)); err != nil || string(text) != own {
		t.Errorf("tokenizer_config.json %s, %v", text, err)
	}
	inspected, err := ModelDir{Dir: again}.Inspect(ctx, nil)
	if err != nil || inspected.Weights != found.Weights ||
		!slices.Equal(inspected.DTypes, []safetensors.DType{safetensors.BF16}) {
		t.Errorf("%+v, %v", inspected, err)
	}
	if want := `{preset: mula-nano, eos_token_id: 0}`; inspected.TrainModel != want {
		t.Errorf("model for train.yaml: %s, want %s", inspected.TrainModel, want)
	}
}

func TestModelYAML(t *testing.T) {
	c, err := moe.Preset("auroragpt-7b")
	if err != nil {
		t.Fatal(err)
	}
	c.TieEmbeddings, c.RopeScaling = true, moe.RopeScaling{Type: "linear", Factor: 2.5}
	want := `{preset: auroragpt-7b, rope_scaling: {factor: 2.5, rope_type: "linear"}, tie_word_embeddings: true}`
	if got := modelYAML(c); got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	plain := c
	plain.RopeScaling = moe.RopeScaling{}
	for there, here := range map[moe.Config]moe.Config{c: plain, plain: c} {
		got := differentFields(there, here)
		if len(got) != 2 || !strings.Contains(got[0], "model.rope_scaling.factor is ") {
			t.Errorf("a scaled rotary embedding and another: %q", got)
		}
	}
}

// Whatever is wrong is named, and nothing is left behind.
func TestConvertRefuses(t *testing.T) {
	ctx := context.Background()
	good, _ := checkpointtest.Model(t, nil, nil)
	few, _ := checkpointtest.Model(t, func(c *moe.Config) { c.VocabSize = 200 },
		map[string]string{"tokenizer.json": checkpointtest.Tokenizer(t)})
	strange, _ := checkpointtest.Model(t, nil, map[string]string{"tokenizer.json": `{"version": "1.0"}`})
	diverged, m := checkpointtest.Model(t, nil, nil)
	weight := m.Parameters()[3]
	weight.Weight.Floats()[5] = float32(math.Inf(-1))
	for _, name := range checkpointtest.Names(t, diverged) {
		if err := os.Remove(filepath.Join(diverged, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.Save(t.Context(), diverged, moe.SaveOptions{}); err != nil {
		t.Fatal(err)
	}
	parent := t.TempDir()
	taken, file := filepath.Join(parent, "taken"), filepath.Join(parent, "file")
	if err := os.Mkdir(taken, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	before := checkpointtest.Names(t, parent)
	for _, test := range []struct{ from, output, want string }{
		{good, "taken", "taken: the output exists already"},
		{good, "file", "file: the output exists already"},
		{t.TempDir(), "new", "config.json"},
		{few, "new", "tokenizer.json has 258 ids, but the model has a vocabulary of 200"},
		{diverged, "new", "NaN or Inf: element 5 of " + weight.Name + " is -Inf"},
	} {
		_, err := ModelDir{Dir: test.from}.Convert(ctx, filepath.Join(parent, test.output), ConvertOptions{})
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("error %v, want %q", err, test.want)
		}
	}
	if _, err := (ModelDir{Dir: diverged}).Inspect(ctx, nil); !errors.Is(err, moe.ErrNotFinite) {
		t.Errorf("inspecting: %v", err)
	}
	if after := checkpointtest.Names(t, parent); !slices.Equal(before, after) {
		t.Errorf("left behind: %v, before: %v", after, before)
	}
	if found, err := (ModelDir{Dir: strange}).Inspect(ctx, nil); err != nil || len(found.Notes) != 1 ||
		!strings.Contains(found.Notes[0], "mula cannot read this tokenizer") {
		t.Errorf("a tokenizer that is not read: %+v, %v", found, err)
	}
	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := (ModelDir{Dir: good}).Convert(cancelled, filepath.Join(parent, "new"),
		ConvertOptions{}); !errors.Is(err, context.Canceled) {
		t.Errorf("after cancelling: %v", err)
	}
	if _, _, err := FindModel(ctx, parent); !errors.Is(err, ErrNone) ||
		!strings.Contains(err.Error(), "no config.json of a Hugging Face model") {
		t.Errorf("no model: %v", err)
	}
}

// Whichever file operation fails, the output is not there, nothing else is left, and the next
// attempt succeeds.
func TestConvertFaults(t *testing.T) {
	defer func() { atomicfile.Fault = nil }()
	dir, _ := checkpointtest.Model(t, nil, map[string]string{"tokenizer.json": checkpointtest.Tokenizer(t)})
	parent := t.TempDir()
	output := filepath.Join(parent, "model")
	for k := 1; ; k++ {
		n := 0 // file operations
		atomicfile.Fault = func(atomicfile.Op, string) error {
			if n++; n == k {
				return syscall.ENOSPC
			}
			return nil
		}
		_, err := ModelDir{Dir: dir}.Convert(context.Background(), output, ConvertOptions{ShardSize: 500_000})
		atomicfile.Fault = nil
		if n < k {
			if err != nil || k < 20 {
				t.Fatalf("%d operations, %v", n, err)
			}
			return
		}
		if !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("operation %d: error %v does not wrap ENOSPC", k, err)
		}
		// After the rename only the sync of the parent can fail; then the model is there and whole.
		names := checkpointtest.Names(t, parent)
		if slices.Equal(names, []string{"model"}) {
			if _, err := (ModelDir{Dir: output}).Inspect(context.Background(), nil); err != nil {
				t.Errorf("operation %d failed: %v", k, err)
			}
			if err := os.RemoveAll(output); err != nil {
				t.Fatal(err)
			}
		} else if len(names) != 0 {
			t.Fatalf("operation %d failed and left %v", k, names)
		}
	}
}

// convertEnv, when set, makes the test binary a process that converts a model, and that is killed
// before the operation of the given number on files; or, if that is 0, reads a byte from its input
// before each. Its value is the number, the model and the output, a line each.
const convertEnv = "MULA_CHECKPOINT_CONVERT_CHILD"

func TestMain(m *testing.M) {
	atomicfile.SkipSync = true
	if os.Getenv(convertEnv) != "" {
		os.Exit(convertChild())
	}
	os.Exit(m.Run())
}

func convertChild() int {
	lines := strings.Split(os.Getenv(convertEnv), "\n")
	k, err := strconv.Atoi(lines[0])
	n := 0
	atomicfile.Fault = func(op atomicfile.Op, path string) error {
		if n++; k == 0 {
			_, err := os.Stdin.Read(make([]byte, 1))
			return err
		} else if n == k {
			fmt.Println(op, path)
			self, _ := os.FindProcess(os.Getpid())
			self.Kill()
			select {}
		}
		return nil
	}
	if err == nil {
		_, err = ModelDir{Dir: lines[1]}.Convert(context.Background(), lines[2], ConvertOptions{ShardSize: 500_000})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// A process that is killed at any operation on files leaves no model, or a whole one; the next one
// that writes to that name succeeds, and leaves nothing else.
func TestConvertKilled(t *testing.T) {
	t.Parallel()
	executable, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir, _ := checkpointtest.Model(t, nil, map[string]string{"tokenizer.json": checkpointtest.Tokenizer(t)})
	whole, err := (ModelDir{Dir: dir}).Inspect(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	parent := t.TempDir()
	output := filepath.Join(parent, "model")
	left := 0 // of processes that left a partial file
	for k := 1; ; k += 1 + k/3 {
		child := exec.Command(executable)
		child.Env = append(os.Environ(), fmt.Sprintf("%s=%d\n%s\n%s", convertEnv, k, dir, output))
		text, err := child.CombinedOutput()
		if err == nil {
			if k < 20 || left < 5 {
				t.Errorf("%d operations only; %d left something behind", k, left)
			}
			return
		}
		if status, ok := child.ProcessState.Sys().(syscall.WaitStatus); !ok || !status.Signaled() {
			t.Fatalf("operation %d: %v: %s", k, err, text)
		}
		if _, err := os.Stat(output); err == nil {
			if found, err := (ModelDir{Dir: output}).Inspect(t.Context(), nil); err != nil ||
				found.Weights != whole.Weights {
				t.Errorf("killed before %s: left %+v, %v", text, found, err)
			}
			if err := os.RemoveAll(output); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := os.Stat(filepath.Join(parent, ".model"+atomicfile.TempSuffix)); err == nil {
			left++
		}
		if _, err := (ModelDir{Dir: dir}).Convert(t.Context(), output, ConvertOptions{}); err != nil {
			t.Fatalf("after a process killed before %s: %v", text, err)
		}
		if names := checkpointtest.Names(t, parent); !slices.Equal(names, []string{"model"}) {
			t.Fatalf("after a process killed before %s: %v", text, names)
		}
		if err := os.RemoveAll(output); err != nil {
			t.Fatal(err)
		}
	}
}

// What a process is writing is not taken for what a killed one has left.
func TestConvertTwice(t *testing.T) {
	t.Parallel()
	executable, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir, _ := checkpointtest.Model(t, nil, nil)
	output := filepath.Join(t.TempDir(), "model")
	child := exec.Command(executable)
	child.Env = append(os.Environ(), fmt.Sprintf("%s=0\n%s\n%s", convertEnv, dir, output))
	in, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	// Some operations are made; a byte is taken when the one before is done.
	if _, err := in.Write(make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	temp := filepath.Join(filepath.Dir(output), ".model"+atomicfile.TempSuffix)
	testwait.Until(t, "the process writes", func() bool {
		names, _ := os.ReadDir(temp)
		return len(names) > 0
	})
	if _, err := (ModelDir{Dir: dir}).Convert(t.Context(), output, ConvertOptions{}); err == nil ||
		!strings.Contains(err.Error(), "another process is writing this directory") {
		t.Errorf("beside another process: %v", err)
	}
	if _, err := in.Write(make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	if err := child.Wait(); err != nil {
		t.Fatal(err)
	}
	if _, err := (ModelDir{Dir: output}).Inspect(t.Context(), nil); err != nil {
		t.Error(err)
	}
	if names := checkpointtest.Names(t, filepath.Dir(output)); !slices.Equal(names, []string{"model"}) {
		t.Errorf("left behind: %v", names)
	}
}
