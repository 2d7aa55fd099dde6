package deepspeed

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/internal/pickle"
	"mula/moe/safetensors"
	"mula/moe/torchfile"
	"mula/train/foreign"
)

// vector returns a tensor of the given numbers.
func vector(numbers ...float32) *torchfile.Contents {
	return &torchfile.Contents{DType: safetensors.F32, Shape: []int{len(numbers)},
		Each: func(put func([]float32) error) error { return put(numbers) }}
}

// write writes a file of torch.save.
func write(t *testing.T, path string, root pickle.Value) {
	t.Helper()
	err := os.MkdirAll(filepath.Dir(path), 0o755)
	if err == nil {
		err = torchfile.WriteFile(path, root)
	}
	if err != nil {
		t.Fatal(err)
	}
}

var dictOf = pickle.DictOf

// set adds an entry to a dict. It counts, even if the dict has the key.
func set(d *pickle.Dict, key string, value pickle.Value) {
	d.Pairs = append(d.Pairs, pickle.Pair{Key: key, Value: value})
}

func listOf(items ...pickle.Value) *pickle.List { return &pickle.List{Items: items} }

// shapes is param_shapes: a of shape [2, 3], and b of [3] in one group, c of [1] in another.
func shapes() *pickle.List {
	size := func(dims ...pickle.Value) pickle.Value {
		return &pickle.Object{Class: "torch.Size", Args: pickle.Tuple{pickle.Tuple(dims)}}
	}
	return listOf(dictOf("a", size(int64(2), int64(3)), "module.b", size(int64(3))), dictOf("c", size(int64(1))))
}

// adam is the state of two groups: the moments are 100 and 200 more than the weights.
func adam(groups [][]float32) *pickle.Dict {
	states := dictOf()
	for i, g := range groups {
		var first, second []float32
		for _, x := range g {
			first, second = append(first, x+100), append(second, x+200)
		}
		states.Pairs = append(states.Pairs, pickle.Pair{Key: int64(i), Value: dictOf("step", int64(5), "exp_avg",
			vector(first...), "exp_avg_sq", vector(second...))})
	}
	return dictOf("state", states, "param_groups", listOf(dictOf("betas", pickle.Tuple{0.9, 0.95}, "lr", 0.001),
		dictOf("betas", pickle.Tuple{0.9, 0.95}, "lr", 0.002)))
}

func modelStates() *pickle.Dict {
	return dictOf("global_steps", int64(6), "global_samples", int64(48), "param_shapes", shapes(),
		"frozen_param_shapes", nil)
}

// zero12 writes a checkpoint of stage 2 whose weights are a: 1…6, b: 7…9, c: 10. a is followed by
// one element of padding, and the groups by two and one.
func zero12(t *testing.T, dir string) {
	write(t, filepath.Join(dir, "mp_rank_00_model_states.pt"), modelStates())
	for rank, groups := range [][][]float32{{{1, 2, 3, 4, 5, 6}, {10}}, {{-1, 7, 8, 9, -1, -1}, {-1}}} {
		flat := listOf()
		for _, g := range groups {
			flat.Items = append(flat.Items, vector(g...))
		}
		stage := &pickle.Object{Class: "deepspeed.runtime.zero.config.ZeroStageEnum", Args: pickle.Tuple{int64(2)}}
		write(t, filepath.Join(dir, fmt.Sprintf("bf16_zero_pp_rank_%d_mp_rank_00_optim_states.pt", rank)),
			dictOf("optimizer_state_dict", dictOf("zero_stage", stage, "partition_count", listOf(int64(2), int64(2)),
				"param_alignment_paddings", listOf(listOf(int64(1), int64(0)), listOf(int64(0))),
				"single_partition_of_fp32_groups", flat, "base_optimizer_state", adam(groups))))
	}
}

// zero3 writes the same weights as stage 3. A rank has half of each parameter, in two vectors.
func zero3(t *testing.T, dir string) {
	for rank, groups := range [][][]float32{{{1, 2, 3, 7}, {8, 10}}, {{4, 5, 6, 9}, {-1, -1}}} {
		write(t, filepath.Join(dir, fmt.Sprintf("zero_pp_rank_%d_mp_rank_00_model_states.pt", rank)), modelStates())
		write(t, filepath.Join(dir, fmt.Sprintf("zero_pp_rank_%d_mp_rank_00_optim_states.pt", rank)),
			dictOf("optimizer_state_dict", dictOf("zero_stage", int64(3), "partition_count", int64(2),
				"fp32_flat_groups", listOf(vector(groups[0]...), vector(groups[1]...)),
				"optimizer_state_dict", adam(groups))))
	}
}

// universal writes the same weights as a universal checkpoint.
func universal(t *testing.T, dir string) {
	write(t, filepath.Join(dir, "mp_rank_00_model_states.pt"), modelStates())
	for name, numbers := range map[string][]float32{"a": {1, 2, 3, 4, 5, 6}, "b": {7, 8, 9}, "c": {10}} {
		for file, more := range map[string]float32{"fp32": 0, "exp_avg": 100, "exp_avg_sq": 200} {
			x := slices.Clone(numbers)
			for i := range x {
				x[i] += more
			}
			v := vector(x...)
			if name == "a" {
				v.Shape = []int{2, 3}
			}
			write(t, filepath.Join(dir, "zero", name, file+".pt"), dictOf("param", v, "cat_dim", int64(0)))
		}
		write(t, filepath.Join(dir, "zero", name, "step.pt"), int64(5))
	}
}

func TestOpen(t *testing.T) {
	for form, make := range map[string]func(*testing.T, string){"DeepSpeed ZeRO stage 2, 2 ranks": zero12,
		"DeepSpeed ZeRO stage 3, 2 ranks": zero3, "DeepSpeed universal checkpoint": universal} {
		t.Run(form, func(t *testing.T) {
			top := t.TempDir()
			make(t, filepath.Join(top, "global_step6"))
			if err := os.WriteFile(filepath.Join(top, "latest"), []byte("global_step6"), 0o666); err != nil {
				t.Fatal(err)
			}
			dir, ok := Find(top)
			if !ok || dir != filepath.Join(top, "global_step6") {
				t.Fatalf("found %s, %v", dir, ok)
			}
			s, err := Open(dir)
			if err != nil {
				t.Fatal(err)
			}
			if s.Form != form || s.Step != 6 || s.Samples != 48 || s.Updates != 5 {
				t.Errorf("%+v", s)
			}
			if want := "betas [0.9 0.95], lr 0.001 and 0.002"; form != "DeepSpeed universal checkpoint" &&
				s.Settings != want {
				t.Errorf("settings %q, want %q", s.Settings, want)
			}
			want := map[string][]float32{"a": {1, 2, 3, 4, 5, 6}, "b": {7, 8, 9}, "c": {10}}
			if len(s.Parameters) != len(want) {
				t.Errorf("%d parameters", len(s.Parameters))
			}
			for _, p := range s.Parameters {
				for first := range want[p.Name] {
					for kind := range foreign.ExpAvgSq + 1 {
						got := append([]float32{}, want[p.Name][first:]...)
						if err := p.Read(kind, got, int64(first)); err != nil {
							t.Fatal(err)
						}
						for i := range got {
							got[i] -= 100 * float32(kind)
						}
						if !slices.Equal(got, want[p.Name][first:]) {
							t.Errorf("%s from %d, kind %d: %v", p.Name, first, kind, got)
						}
					}
				}
			}
		})
	}
}

func TestRefused(t *testing.T) {
	optimizerState := func(rank int) string {
		return fmt.Sprintf("bf16_zero_pp_rank_%d_mp_rank_00_optim_states.pt", rank)
	}
	remove := func(name string) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) {
			if err := os.Remove(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	add := func(name string, root pickle.Value) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) { write(t, filepath.Join(dir, name), root) }
	}
	model := func(key string, value pickle.Value) func(t *testing.T, dir string) {
		d := modelStates()
		set(d, key, value)
		return add("mp_rank_00_model_states.pt", d)
	}
	state := func(key string, value pickle.Value) func(t *testing.T, dir string) {
		groups := [][]float32{{1, 2, 3, 4, 5, 6}, {10}}
		o := dictOf("zero_stage", int64(2), "partition_count", int64(2), "single_partition_of_fp32_groups",
			listOf(vector(groups[0]...), vector(groups[1]...)), "base_optimizer_state", adam(groups))
		set(o, key, value)
		return add(optimizerState(0), dictOf("optimizer_state_dict", o))
	}
	for name, test := range map[string]struct {
		change func(t *testing.T, dir string)
		want   string
	}{
		"rank missing":      {remove(optimizerState(0)), "has no *_optim_states.pt of rank 0"},
		"last rank missing": {remove(optimizerState(1)), "divided among 2 ranks"},
		"tensor parallel":   {add("zero_pp_rank_0_mp_rank_01_optim_states.pt", nil), "tensor-parallel"},
		"experts":           {add("expp_rank_0_mp_rank_00_optim_states.pt", nil), "expert or pipeline parallelism"},
		"frozen":            {model("frozen_param_shapes", dictOf("x", pickle.Tuple{})), "frozen parameters"},
		"too large": {model("param_shapes", listOf(dictOf("a", pickle.Tuple{int64(99)}, "b", pickle.Tuple{int64(1)}),
			dictOf("c", pickle.Tuple{int64(1)}))), "too few for a"},
		"negative":      {model("param_shapes", listOf(dictOf("a", pickle.Tuple{int64(-1)}))), "has shape [-1]"},
		"steps":         {model("global_steps", "x"), `"global_steps" is missing or not an integer`},
		"object":        {model("x", &pickle.Object{Class: "os.system", Args: pickle.Tuple{"true"}}), "os.system"},
		"stage":         {state("zero_stage", int64(4)), `"zero_stage" is missing or not 1, 2 or 3`},
		"other stage":   {state("zero_stage", int64(1)), "rank 0 has stage 1"},
		"no Adam":       {state("base_optimizer_state", dictOf("state", dictOf())), "only the state of Adam"},
		"short moments": {state("base_optimizer_state", adam([][]float32{{1}, {2}})), "6 are expected"},
		"paddings": {state("param_alignment_paddings", listOf(int64(1))),
			"param_alignment_paddings does not belong"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			zero12(t, dir)
			test.change(t, dir)
			if _, err := Open(dir); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v, want %q", err, test.want)
			}
		})
	}
	if _, ok := Find(t.TempDir()); ok {
		t.Error("found a checkpoint in an empty directory")
	}
}
