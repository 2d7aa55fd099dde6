package conformance

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mula/internal/longtest"
)

// trainingText is the corpus of training.py, a document of made-up words a line.
func trainingText(documents int) string {
	state, word := uint64(1), 0
	draw := func(n int) int {
		state = state*6364136223846793005 + 1442695040888963407
		return int(state>>33) % n
	}
	syllable := func(i int) string { return "bdfgklmnprstvz"[i%14:i%14+1] + "aeiou"[i/14%5:i/14%5+1] }
	var out strings.Builder
	for number := range documents {
		var sentences []string
		for range 20 {
			var words []string
			for range 6 + draw(8) {
				if draw(4) != 0 {
					word = (31*word + 17 + draw(3)) % 400
				} else {
					r := draw(1024)
					word = r * r * r * 400 >> 30
				}
				text := syllable(word)
				if word%3 != 0 {
					text += syllable(word/70 + 37*word)
				}
				words = append(words, text)
			}
			sentences = append(sentences, strings.Join(words, " ")+".")
		}
		fmt.Fprintf(&out, "{\"id\":\"%d\",\"text\":\"%s\"}\n", number, strings.Join(sentences, " "))
	}
	return out.String()
}

// torch.optim.AdamW had these losses at every step with transformers' models, from mula's initial
// weights and on the batches of the plan. They were written as float32. Two fp32 runs drift apart
// by rounding, mostly at tokens that are close to another choice of experts. training.py shows how
// far two runs of the reference with different kernels differ.
func TestTraining(t *testing.T) { testTraining(t, "golden/training.json", 4, "fp32", 1e-3) }

// The same with bfloat16 weights. torch's activations and gradients are bfloat16. The losses of the
// router differ by 2 % between two runs of torch.
func TestTrainingMixed(t *testing.T) {
	for _, precision := range []string{"bf16_mixed", "bf16_compact"} {
		t.Run(precision, func(t *testing.T) { testTraining(t, "golden/mixed.json", 3, precision, 3e-2) })
	}
}

// The same with parts that only some families have: a part of each head is rotated, or adjacent
// elements; latent attention; routers with sigmoids, with groups, and with renormalised softmax;
// shared experts, also with a gate; multipliers; attention sinks and a clamped SwiGLU.
func TestTrainingFamilies(t *testing.T) { testTraining(t, "golden/families.json", 6, "fp32", 1e-3) }

// The load-balancing loss over the global batch, with micro-batches of one sample, where torch has
// all samples of the step in one batch.
func TestTrainingBalance(t *testing.T) { testTraining(t, "golden/balance.json", 2, "fp32", 1e-3) }

// Layers of multi-token prediction, also with their own losses, by the formula in
// docs/reference/models.md with transformers' decoder layers.
func TestTrainingPredictions(t *testing.T) {
	testTraining(t, "golden/predictions.json", 2, "fp32", 1e-3)
}

// Noise of routers, with the same random numbers in transformers' Mixtral.
func TestTrainingNoise(t *testing.T) { testTraining(t, "golden/noise.json", 1, "fp32", 1e-3) }

// testTraining compares losses in a precision with the losses of a golden file with this number of
// runs. router is the relative tolerance of the losses of the router.
func testTraining(t *testing.T, path string, runs int, precision string, router float64) {
	longtest.SkipIfShort(t)
	const tolerance = 1e-3 // relative
	var golden struct {
		Corpus, Plan string
		Runs         []struct {
			Name  string
			Train map[string]any
			Loss  []float64
			Aux   []float64 `json:"aux_loss"`
			Z     []float64 `json:"z_loss"`

			Predictions [][]float64 `json:"prediction_loss"` // of each step and layer
		}
	}
	readGolden(t, path, &golden)
	if len(golden.Runs) != runs {
		t.Fatalf("%d runs, want %d", len(golden.Runs), runs)
	}
	text := trainingText(300)
	if got := fmt.Sprintf("%x", sha256.Sum256([]byte(text))); got != golden.Corpus {
		t.Fatalf("the text's SHA-256 is %s, want %s: it is not that of training.py", got, golden.Corpus)
	}
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(at(name), []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	write("corpus.jsonl", text)
	write("blend.yaml", "sequence_length: 64\nseed: 7\nsources: [{name: words, shards: [words.idx]}]\nsamples: 800\n")
	for _, args := range [][]string{
		{"tokenizer", "train", "--vocab-size", "512", "--output", at("tokenizer.json"), at("corpus.jsonl")},
		{"tokenize", "--tokenizer", at("tokenizer.json"), "--output", at("words"), at("corpus.jsonl")},
		{"blend", "--config", at("blend.yaml"), "--output", at("plan.json")},
	} {
		if code, message := run(t, args...); code != 0 {
			t.Fatalf("mula %q: %s", args, message)
		}
	}
	t.Run("runs", func(t *testing.T) { // ends when all of them have, before dir is removed
		for i, g := range golden.Runs {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				name := fmt.Sprintf("run%d", i)
				g.Train["plan"], g.Train["tokenizer"], g.Train["output"] = "plan.json", "tokenizer.json", name
				g.Train["threads"], g.Train["checkpoint"] = 2, map[string]int{"every": 0}
				g.Train["precision"] = precision
				config, err := json.Marshal(g.Train) // JSON is YAML
				if err != nil {
					t.Fatal(err)
				}
				write(name+".yaml", string(config))
				if code, message := run(t, "train", "--config", at(name+".yaml")); code != 0 {
					t.Fatalf("%s: %s", g.Name, message)
				}
				metrics, err := os.ReadFile(at(name + "/metrics.jsonl"))
				if err != nil {
					t.Fatal(err)
				}
				compared := 0
				for line := range strings.Lines(string(metrics)) {
					var m struct {
						Run  *struct{ Plan string }
						Step int
						Loss *float64
						Aux  float64 `json:"aux_loss"`
						Z    float64 `json:"z_loss"`

						Predictions []float64 `json:"prediction_loss"`
					}
					if err := json.Unmarshal([]byte(line), &m); err != nil {
						t.Fatal(err)
					}
					if m.Run != nil && m.Run.Plan != golden.Plan {
						t.Fatalf("the plan is %.16s…, and was %.16s… when the golden file was made; if its batches "+
							"may differ, make the file anew", m.Run.Plan, golden.Plan)
					}
					if m.Loss == nil {
						continue
					}
					if m.Step != compared || compared == len(g.Loss) {
						t.Fatalf("%s: a line of step %d after %d steps of %d", g.Name, m.Step, compared, len(g.Loss))
					}
					compare := func(what string, got float64, want []float64, tolerance float64) {
						if want != nil && !(math.Abs(got/want[m.Step]-1) <= tolerance) {
							t.Fatalf("%s: step %d: %s is %.7g, torch's %.7g", g.Name, m.Step, what, got, want[m.Step])
						}
					}
					compare("loss", *m.Loss, g.Loss, tolerance)
					compare("load-balancing loss", m.Aux, g.Aux, router)
					compare("z-loss", m.Z, g.Z, router)
					var predictions []float64
					if g.Predictions != nil {
						predictions = g.Predictions[m.Step]
					}
					if len(m.Predictions) != len(predictions) {
						t.Fatalf("%s: step %d: losses of multi-token prediction %v", g.Name, m.Step, m.Predictions)
					}
					for k, got := range m.Predictions {
						if want := predictions[k]; !(math.Abs(got/want-1) <= tolerance) {
							t.Fatalf("%s: step %d: loss of layer %d of multi-token prediction is %.7g, torch's %.7g",
								g.Name, m.Step, k, got, want)
						}
					}
					compared++
				}
				if compared != 200 || len(g.Loss) != 200 {
					t.Errorf("%s: %d steps, and %d of torch; want 200", g.Name, compared, len(g.Loss))
				}
			})
		}
	})
}
