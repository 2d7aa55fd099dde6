package optimizer

import (
	"testing"

	"mula/moe"
)

// The class of each parameter of the models, and what patterns match.
func TestGroupOf(t *testing.T) {
	for _, preset := range []string{"mula-nano", "mula-1b", "auroragpt-7b"} {
		c, err := moe.Preset(preset)
		if err != nil {
			t.Fatal(err)
		}
		if c.Architecture == moe.Llama {
			c.Architecture = moe.Qwen2 // which has biases
		}
		for _, tensor := range c.Tensors() {
			var found []string
			for _, class := range classes {
				if matches(class, tensor.Name, tensor.Shape) && class != matricesClass {
					found = append(found, class)
				}
			}
			if len(found) != 1 {
				t.Errorf("%s: %s is of the classes %v", preset, tensor.Name, found)
			}
		}
	}
	for _, test := range []struct {
		entry, name string
		shape       []int
		want        bool
	}{
		{"norms", "model.layers.3.self_attn.q_norm.weight", []int{8}, true},
		{"biases", "model.layers.3.self_attn.q_proj.bias", []int{8}, true},
		{"matrices", "model.layers.3.self_attn.q_proj.weight", []int{8, 8}, true},
		{"matrices", "model.layers.3.mlp.gate.weight", []int{4, 8}, false},
		{"matrices", "lm_head.weight", []int{4, 8}, false},
		{"matrices", "model.layers.3.block_sparse_moe.gate.weight", []int{4, 8}, false}, // Mixtral
		{"router", "model.layers.3.block_sparse_moe.gate.weight", []int{4, 8}, true},
		{"experts", "model.layers.3.block_sparse_moe.experts.1.w2.weight", []int{4, 8}, true},
		{"experts", "model.layers.3.mlp.experts.1.gate_proj.weight", []int{4, 8}, true},
		{"matrices", "model.layers.3.mlp.shared_expert_gate.weight", []int{1, 8}, false},
		{"router", "model.layers.3.mlp.shared_expert_gate.weight", []int{1, 8}, true},
		{"*", "lm_head.weight", []int{4, 8}, true},
		{"model.layers.[0-3].*", "model.layers.3.mlp.gate.weight", []int{4, 8}, true},
		{"model.layers.?.mlp.gate.weight", "model.layers.13.mlp.gate.weight", []int{4, 8}, false},
		{"mlp.gate", "model.layers.3.mlp.gate.weight", []int{4, 8}, false}, // the whole name
	} {
		if got := matches(test.entry, test.name, test.shape); got != test.want {
			t.Errorf("%s matches %s: %v", test.entry, test.name, got)
		}
	}
	config := Config{Groups: []ParameterGroup{{Match: []string{"norms"}}, {Match: []string{"*"}}}}
	for name, want := range map[string]int{"model.norm.weight": 1, "lm_head.weight": 2} {
		if got := config.GroupOf(name, nil); got != want { // the first that matches
			t.Errorf("%s is of group %d, want %d", name, got, want)
		}
	}
}
