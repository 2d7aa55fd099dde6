package megatron

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mula/moe"
	"mula/train/foreign"
	"mula/train/optimizer"
)

// recipe is the settings of the golden checkpoint.
var recipe = Recipe{Betas: [2]float64{0.9, 0.95}, Epsilon: 1e-8, WeightDecay: 0.1, BatchSize: 2,
	Schedule: optimizer.Schedule{Name: optimizer.Constant, Peak: 1e-3}}

// A checkpoint of Megatron core that was read and written has the same values. Chunks of a few rows
// end inside heads, and there are several files.
func TestWrite(t *testing.T) {
	g := readGolden(t)
	for _, o := range []WriteOptions{{Recipe: recipe}, {Recipe: recipe, maxChunk: 40, maxFile: 1 << 14}} {
		golden, c := g.write(t, t.TempDir())
		from, err := Open(golden, c)
		if err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		var last, all int64
		o.Progress = func(done, total int64) { last, all = done, total }
		if err := Write(t.Context(), dir, from, c, o); err != nil {
			t.Fatal(err)
		}
		if want := 3 * c.TotalParameters(); last != want || all != want {
			t.Errorf("progress %d of %d, want %d", last, all, want)
		}
		files, err := filepath.Glob(filepath.Join(dir, "iter_0000003", "*.distcp"))
		if err != nil || (len(files) > 1) != (o.maxFile > 0) {
			t.Errorf("files %v, %v", files, err)
		}
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
}

// What Megatron core does not have is refused by its name, and nothing is written.
func TestWriteRefuses(t *testing.T) {
	g := readGolden(t)
	for want, test := range map[string]struct {
		config  func(*moe.Config)
		options WriteOptions
	}{
		"config.json has model_type olmoe": {config: func(c *moe.Config) { c.Architecture = moe.OLMoE }},
		"rope_scaling has rope_type yarn":  {config: func(c *moe.Config) { c.RopeScaling.Type = "yarn" }},
		"rope_scaling has low_freq_factor 2,": {config: func(c *moe.Config) {
			c.RopeScaling = scaling(2, 4, 8192)
		}},
		"original_max_position_embeddings 4096;": {config: func(c *moe.Config) {
			c.RopeScaling = scaling(1, 4, 4096)
		}},
		"max_window_layers is 1": {config: func(c *moe.Config) {
			c.SlidingWindow, c.MaxWindowLayers = 4, 1
		}},
		"the model has no experts to divide among": {options: WriteOptions{ExpertParallel: true}},
	} {
		dir, c := g.write(t, t.TempDir())
		from, err := Open(dir, c)
		if err != nil {
			t.Fatal(err)
		}
		if test.config != nil {
			test.config(&c)
		}
		test.options.Recipe = recipe
		output := t.TempDir()
		err = Write(t.Context(), output, from, c, test.options)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
		if entries, err := os.ReadDir(output); err != nil || len(entries) != 0 {
			t.Errorf("%s: wrote %v, %v", want, entries, err)
		}
	}
}

func scaling(low, high float64, positions int) moe.RopeScaling {
	return moe.RopeScaling{Type: "llama3", Factor: 8, LowFreqFactor: low, HighFreqFactor: high,
		OriginalMaxPositions: positions}
}

func TestObjectNames(t *testing.T) {
	c := moe.Config{Architecture: moe.Mixtral, Layers: 2, Experts: 3, SharedSize: 1}
	for name, dense := range map[string]moe.LayerSet{
		"decoder.final_layernorm._extra_state/shard_0_1":                           "",
		"decoder.layers.self_attention.linear_qkv._extra_state/shard_1_2":          "",
		"decoder.layers.mlp.shared_experts.linear_fc2._extra_state/shard_0_2":      "",
		"decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_1.2_2.3": "",
		"decoder.layers.0.mlp.linear_fc1._extra_state/shard_0_1":                   "0",
		"decoder.layers.1.mlp.experts.experts.linear_fc1._extra_state/shard_2_3":   "0",
	} {
		c.DenseLayers = dense
		if names := "\n" + strings.Join(objectsOf(c), "\n") + "\n"; !strings.Contains(names, "\n"+name+"\n") {
			t.Errorf("no %s in %s", name, names)
		}
	}
}
