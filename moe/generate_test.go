package moe

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"mula/xpu"
	"mula/xpu/cpu"
	"mula/xpu/discrete"
)

// Reading a prompt and then token by token with a cache gives the logits of reading the sequence at
// once. The cache needs the bytes that CacheMemory returns.
func TestIncrementalLogits(t *testing.T) {
	cases := gradientCases(t)
	for _, name := range []string{"olmo3", "qwen3_moe, long window", "deepseek_v2"} {
		cases[name] = map[string]Config{"olmo3": olmo3Case(t), "qwen3_moe, long window": longWindow(t),
			"deepseek_v2": oddLatent(t)}[name]
	}
	for name, cfg := range cases {
		m := newModelOn(t, discrete.New(cpu.New(2, xpu.FP32)), cfg)
		randomize(m, 1)
		tokens := randomBatch(cfg, 1, queryBlock+19, 2).Tokens
		v := cfg.VocabSize
		want, err := m.Logits(t.Context(), tokens)
		if err != nil {
			t.Fatal(err)
		}
		worst := 0.0
		for _, prompt := range []int{1, 3, queryBlock + 7} { // fewer tokens than a window, and more
			d, err := m.newDecoder(len(tokens)+5, 1)
			if err != nil {
				t.Fatal(err)
			}
			for first := 0; first < prompt+13; {
				n := 1
				if first == 0 {
					n = prompt
				}
				if err := d.append(t.Context(), tokens[first:first+n]); err != nil {
					t.Fatal(err)
				}
				first += n
				logits, err := d.logits(t.Context(), 1)
				if err != nil {
					t.Fatal(err)
				}
				worst = max(worst, maxDiff(t, logits, want[(first-1)*v:first*v]))
			}
			bytes := int64(0)
			for _, l := range d.layers {
				for _, kept := range []xpu.Tensor{l.k, l.v, l.latents} {
					if kept.Present() {
						bytes += 4 * int64(kept.Elements())
					}
				}
			}
			if by := cfg.CacheMemory(len(tokens) + 5); bytes != by {
				t.Errorf("%s: the cache has %d bytes, by CacheMemory %d", name, bytes, by)
			}
			d.close()
		}
		t.Logf("%s: largest difference %.2g", name, worst)
		if !(worst < 1e-5) {
			t.Errorf("%s: logits differ by %g", name, worst)
		}
	}
}

// olmo3Case is a model with windows in three of four layers, which are longer than some prompts.
func olmo3Case(t *testing.T) Config {
	cfg := gradientCases(t)["llama"]
	cfg.Architecture, cfg.Layers, cfg.SlidingWindow = OLMo3, 5, 6
	return cfg
}

// longWindow is a model whose window is longer than the sequence of the test.
func longWindow(t *testing.T) Config {
	cfg := gradientCases(t)["qwen3_moe"]
	cfg.SlidingWindow = 1000
	return cfg
}

// oddLatent is a model without latents of queries, with an odd rank of the others, and with values
// that are larger than keys.
func oddLatent(t *testing.T) Config {
	cfg := gradientCases(t)["deepseek_v3"]
	cfg.Architecture, cfg.QueryRank, cfg.KVRank, cfg.ValueSize = DeepSeekV2, 0, 23, 13
	cfg.NormTopK = false
	return cfg
}

// The caches of published models have the sizes that the documentation states.
func TestCacheMemory(t *testing.T) {
	deepSeek := gradientCases(t)["deepseek_v3"]
	deepSeek.Layers, deepSeek.KVRank, deepSeek.RotatedSize = 61, 512, 64
	if got, want := deepSeek.CacheMemory(1000), int64(61*1000*(512+64)*4); got != want {
		t.Errorf("DeepSeek-V3: %d bytes, want %d", got, want)
	}
	gptOSS := gradientCases(t)["gpt_oss"]
	gptOSS.Layers, gptOSS.KVHeads, gptOSS.HeadSize, gptOSS.SlidingWindow = 24, 8, 64, 128
	if got, want := gptOSS.CacheMemory(1000), int64(12*(1000+128)*2*8*64*4); got != want {
		t.Errorf("gpt-oss-20b: %d bytes, want %d", got, want)
	}
	if got, want := gptOSS.CacheMemory(100), int64(24*100*2*8*64*4); got != want {
		t.Errorf("gpt-oss-20b, a short text: %d bytes, want %d", got, want)
	}
}

// A decoder reads a prompt once.
func TestDecoderRefusesSecondPrompt(t *testing.T) {
	m := newModel(t, mustPreset(t, "mula-nano"), 1)
	d, err := m.newDecoder(9, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer d.close()
	if err := d.append(t.Context(), []uint32{1, 2}); err != nil {
		t.Fatal(err)
	}
	err = d.append(t.Context(), []uint32{3, 4})
	if err == nil || !strings.Contains(err.Error(), "one token at a time") {
		t.Errorf("error %v", err)
	}
}

func generate(t *testing.T, m *Model, prompt []uint32, o GenerateOptions) []uint32 {
	t.Helper()
	var tokens []uint32
	if err := m.Generate(context.Background(), prompt, o, func(token uint32) bool {
		tokens = append(tokens, token)
		return true
	}); err != nil {
		t.Fatal(err)
	}
	return tokens
}

func TestGenerate(t *testing.T) {
	cfg := gradientCases(t)["gqa"]
	m := newModel(t, cfg, 2)
	randomize(m, 1)
	prompt := []uint32{3, 1, 4, 1, 5}

	// Greedy choice is the largest logit of the whole text so far.
	text := slices.Clone(prompt)
	for range 12 {
		logits, err := m.Logits(t.Context(), text)
		if err != nil {
			t.Fatal(err)
		}
		last := logits[(len(text)-1)*cfg.VocabSize:]
		text = append(text, uint32(slices.Index(last, slices.Max(last))))
	}
	greedy := generate(t, m, prompt, GenerateOptions{MaxTokens: 12})
	if !slices.Equal(greedy, text[len(prompt):]) {
		t.Errorf("greedy tokens %v, want %v", greedy, text[len(prompt):])
	}
	for _, o := range []GenerateOptions{{MaxTokens: 12, Temperature: 1, TopK: 1}, {MaxTokens: 12, Temperature: 1,
		TopP: 1e-9}, {MaxTokens: 12, Temperature: 1e-4}} {
		if got := generate(t, m, prompt, o); !slices.Equal(got, greedy) {
			t.Errorf("%+v gives %v, want the greedy %v", o, got, greedy)
		}
	}

	sampled := generate(t, m, prompt, GenerateOptions{MaxTokens: 30, Temperature: 1, Seed: 5})
	if again := generate(t, m, prompt, GenerateOptions{MaxTokens: 30, Temperature: 1, Seed: 5}); !slices.Equal(sampled,
		again) {
		t.Errorf("seed 5 gives %v, then %v", sampled, again)
	}
	if other := generate(t, m, prompt, GenerateOptions{MaxTokens: 30, Temperature: 1, Seed: 6}); slices.Equal(sampled,
		other) {
		t.Error("seeds 5 and 6 give the same tokens")
	}

	// A stop token ends the text and belongs to it.
	at := slices.Index(greedy, greedy[4])
	if got := generate(t, m, prompt, GenerateOptions{MaxTokens: 12, Stop: []uint32{greedy[4]}}); !slices.Equal(got,
		greedy[:at+1]) {
		t.Errorf("with stop token %d: %v, want %v", greedy[4], got, greedy[:at+1])
	}
	n := 0
	if err := m.Generate(context.Background(), prompt, GenerateOptions{MaxTokens: 9},
		func(uint32) bool { n++; return n < 3 }); err != nil || n != 3 {
		t.Errorf("yield was called %d times after asking for an end at 3; %v", n, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	err := m.Generate(ctx, prompt, GenerateOptions{MaxTokens: 9}, func(uint32) bool { cancel(); return true })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("after cancelling: %v", err)
	}
}

func TestGenerateRefuses(t *testing.T) {
	cfg := mustPreset(t, "mula-nano")
	cfg.MaxPositions = 16
	m := newModel(t, cfg, 1)
	m.Init(1)
	for _, test := range []struct {
		prompt []uint32
		o      GenerateOptions
		want   string
	}{
		{nil, GenerateOptions{MaxTokens: 3}, "at least one token"},
		{[]uint32{1, 512}, GenerateOptions{MaxTokens: 3}, "token 1: id 512"},
		{[]uint32{1, 2}, GenerateOptions{MaxTokens: 15}, "max_position_embeddings 16"},
		{[]uint32{1, 2}, GenerateOptions{MaxTokens: math.MaxInt}, "max_position_embeddings 16"},
		{[]uint32{1}, GenerateOptions{MaxTokens: -1}, "negative"},
		{[]uint32{1}, GenerateOptions{MaxTokens: 1, Temperature: -1}, "temperature"},
		{[]uint32{1}, GenerateOptions{MaxTokens: 1, Temperature: math.NaN()}, "temperature"},
		{[]uint32{1}, GenerateOptions{MaxTokens: 1, TopK: -1}, "top-k"},
		{[]uint32{1}, GenerateOptions{MaxTokens: 1, TopP: 1.5}, "top-p"},
	} {
		err := m.Generate(context.Background(), test.prompt, test.o,
			func(uint32) bool { t.Error("a token came"); return true })
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("prompt %v, %+v: error %v, want one with %q", test.prompt, test.o, err, test.want)
		}
	}
	if _, err := m.Logits(t.Context(), nil); err == nil {
		t.Error("logits of nothing")
	}
	if _, err := m.Logits(t.Context(), make([]uint32, 17)); err == nil {
		t.Error("logits of a sequence that is too long")
	}
	head := byName(m, "lm_head.weight").Weight.Floats()
	head[len(head)-1] = float32(math.NaN())
	if err := m.Generate(context.Background(), []uint32{1}, GenerateOptions{MaxTokens: 1},
		func(uint32) bool { return true }); err == nil || !strings.Contains(err.Error(), "not a number") {
		t.Errorf("damaged weights: %v", err)
	}
}

// Tokens are drawn as often as their probabilities say, after temperature, top-k and top-p.
func TestSamplerDistribution(t *testing.T) {
	logits := []float32{1, 3, -2, 2.5, 0, 2.5}
	for _, test := range []struct {
		o    GenerateOptions
		kept []int
	}{
		{GenerateOptions{Temperature: 1}, []int{0, 1, 2, 3, 4, 5}},
		{GenerateOptions{Temperature: 0.5}, []int{0, 1, 2, 3, 4, 5}},
		{GenerateOptions{Temperature: 2, TopK: 2}, []int{1, 3}}, // of the two equal ones the lower id
		{GenerateOptions{Temperature: 1, TopK: 100}, []int{0, 1, 2, 3, 4, 5}},
		{GenerateOptions{Temperature: 1, TopP: 0.6}, []int{1, 3}}, // 0.41, 0.25, 0.25, …
		{GenerateOptions{Temperature: 1, TopK: 4, TopP: 0.999}, []int{0, 1, 3, 5}},
	} {
		weights := make([]float64, len(logits))
		sum := 0.0
		for _, i := range test.kept {
			weights[i] = math.Exp(float64(logits[i]) / test.o.Temperature)
			sum += weights[i]
		}
		const n = 20000
		counts := make([]float64, len(logits))
		s := newSampler(test.o)
		for range n {
			token, err := s.token(logits)
			if err != nil {
				t.Fatal(err)
			}
			counts[token]++
		}
		for i, w := range weights {
			p := w / sum
			if math.Abs(counts[i]/n-p) > 5*math.Sqrt(p*(1-p)/n) {
				t.Errorf("%+v: token %d came %v times of %d, want a share of %v", test.o, i, counts[i], n, p)
			}
		}
	}
}

// Tokens and candidates equal transformers' results, which testdata/generate.py recorded.
func TestGenerateGolden(t *testing.T) {
	text, err := os.ReadFile("testdata/generate.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden struct {
		Prompt  []uint32
		Greedy  map[string][]uint32
		Logits  []float32
		Filters []struct {
			Temperature   float64
			TopK          int     `json:"top_k"`
			TopP          float64 `json:"top_p"`
			Kept          []uint32
			Probabilities []float64
		}
	}
	if err := json.Unmarshal(text, &golden); err != nil {
		t.Fatal(err)
	}
	if len(golden.Greedy) != 4 || len(golden.Filters) != 168 {
		t.Fatalf("%d models and %d filters", len(golden.Greedy), len(golden.Filters))
	}
	dev := cpu.New(2, xpu.FP32)
	defer dev.Close()
	for name, want := range golden.Greedy {
		m, err := Open(filepath.Join("testdata", name), dev)
		if err != nil {
			t.Fatal(err)
		}
		if got := generate(t, m, golden.Prompt, GenerateOptions{MaxTokens: len(want)}); !slices.Equal(got, want) {
			t.Errorf("%s: greedy tokens %v, transformers' %v", name, got, want)
		}
	}
	for _, f := range golden.Filters {
		s := newSampler(GenerateOptions{Temperature: f.Temperature, TopK: f.TopK, TopP: f.TopP})
		kept, sum, err := s.keep(golden.Logits)
		if err != nil {
			t.Fatal(err)
		}
		var tokens []uint32
		for _, c := range kept {
			tokens = append(tokens, c.token)
		}
		if !slices.Equal(tokens, f.Kept) {
			t.Errorf("temperature %v, top-k %d, top-p %v: candidates %v, transformers' %v", f.Temperature, f.TopK,
				f.TopP, tokens, f.Kept)
			continue
		}
		for i, p := range f.Probabilities {
			if got := kept[i].weight / sum; math.Abs(got-p) > 1e-6 {
				t.Errorf("temperature %v, top-k %d, top-p %v: token %d has probability %v, transformers' %v",
					f.Temperature, f.TopK, f.TopP, f.Kept[i], got, p)
			}
		}
	}
}

// The k likeliest are the first k of all, sorted, whatever the order in which they come.
func TestLikeliest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		logits := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) float32 {
			return float32(rapid.IntRange(-8, 8).Draw(t,
				"logit"))
		}), 1, 60).Draw(t, "logits")
		k := rapid.IntRange(0, 70).Draw(t, "k")
		all := make([]candidate, len(logits))
		for i, x := range logits {
			all[i] = candidate{uint32(i), float64(x)}
		}
		slices.SortFunc(all, byWeight)
		if k > 0 && k < len(all) {
			all = all[:k]
		}
		s := newSampler(GenerateOptions{TopK: k, Temperature: 1})
		for range 2 { // with a buffer in use
			if got := s.likeliest(logits); !slices.Equal(got, all) {
				t.Fatalf("%v, want %v", got, all)
			}
		}
	})
}

// Ids beyond the vocabulary asked for are never chosen.
func TestGenerateVocabulary(t *testing.T) {
	m := newModel(t, mustPreset(t, "mula-nano"), 1)
	randomize(m, 1)
	for _, id := range generate(t, m, []uint32{1}, GenerateOptions{MaxTokens: 50, Temperature: 1, Vocabulary: 10}) {
		if id >= 10 {
			t.Errorf("id %d", id)
		}
	}
}
