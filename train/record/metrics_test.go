package record

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"mula/internal/filesystem"
)

// sevenB returns the metrics of a step of mula-7b-a1b with 4 M tokens, on ranks of many hosts. The
// values are random numbers, which have as many digits as measured ones.
func sevenB(rng *rand.Rand, step int64) StepMetrics {
	const layers, experts, perToken, tokens = 16, 64, 8, 4_194_304
	m := StepMetrics{
		Step: step, First: step * 1024, Samples: 1024, Tokens: tokens, Loss: 2 + rng.Float64(),
		AuxLoss: 1 + rng.Float64(), ZLoss: rng.Float64(),
		GradNorm: rng.Float64(), LearningRate: rng.Float64() * 4e-4, Seconds: 2 + rng.Float64(),
		TokensPerSecond: 1e6 * rng.Float64(), MFU: rng.Float64(), Time: Timestamp(time.Unix(1795_000_000+step, 0)),
		SourceLoss: map[string]float64{}, SourceSamples: map[string]int{},
		RankSeconds: &RankSeconds{Reading: Seconds(rng.Float64()), Compute: Seconds(3e4 * rng.Float64()),
			Waiting: Seconds(3e3 * rng.Float64()), Update: Seconds(9e2 * rng.Float64())},
	}
	for _, source := range []string{"dclm", "starcoder", "pes2o", "arxiv", "open-web-math", "algebraic-stack", "wiki"} {
		m.SourceLoss[source], m.SourceSamples[source] = 2+rng.Float64(), 20+rng.IntN(200)
	}
	for range layers {
		counts, left := make([]int64, experts), int64(tokens*perToken)
		for e := range counts {
			counts[e] = min(left, int64(float64(tokens*perToken/experts)*(0.4+1.2*rng.Float64())))
			left -= counts[e]
		}
		m.ExpertTokens = append(m.ExpertTokens, counts)
		m.RouterEntropy = append(m.RouterEntropy, 3+rng.Float64())
	}
	for range 3 {
		m.SlowestRanks = append(m.SlowestRanks, SlowRank{Rank: rng.IntN(12_288),
			Host:   fmt.Sprintf("x4%03dc%ds%db0n0", rng.IntN(700), rng.IntN(8), rng.IntN(8)),
			Median: Seconds(2 * rng.Float64()),
			RankSeconds: RankSeconds{Reading: Seconds(rng.Float64()), Compute: Seconds(rng.Float64()),
				Waiting: Seconds(rng.Float64()), Update: Seconds(rng.Float64())}})
	}
	if step%10 == 0 {
		m.UpdateRatio = map[string]float64{}
		for _, group := range []string{"embedding", "attention", "router", "experts", "norms", "head"} {
			m.UpdateRatio[group] = rng.Float64() * 1e-3
		}
	}
	return m
}

// The metrics of 2 T tokens, in 500,000 steps of a model with 64 experts in 16 layers, are smaller
// than 1 GB. 100 is the default of log.expert_counts_every.
func TestMetricsSize(t *testing.T) {
	const all, written, every = 500_000, 400, 100
	path := filepath.Join(t.TempDir(), "metrics.jsonl")
	f, err := Open(filesystem.OS{}, path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range int64(written) {
		m := sevenB(rng, all-written+i) // the last steps, whose numbers have the most digits
		m.Summarise(i%every == 0)
		if err := f.Append(m); err != nil {
			t.Fatal(err)
		}
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	size := info.Size() * all / written
	t.Logf("%d bytes a step, %.2f GB in all", info.Size()/written, float64(size)/1e9)
	if size >= 1e9 {
		t.Errorf("the metrics of 2 T tokens have %d bytes", size)
	}
}

func TestSummarise(t *testing.T) {
	// −Σ p·log₄ p for p = 1/16, 1/8, 1/4, 9/16: 1/8 + 3/16 + 1/4 + 9/16·(2 − log₂3)
	uneven := Ratio(0.5625 + 0.5625*(2-math.Log2(3)))
	counts := [][]int64{{4, 8, 16, 36}, {64, 0, 0, 0}, {16, 16, 16, 16}}
	want := &ExpertLoad{MaxOverMean: []Ratio{2.25, 4, 1}, Entropy: []Ratio{uneven, 0, 1}}
	for _, keep := range []bool{true, false} {
		m := StepMetrics{ExpertTokens: counts}
		m.Summarise(keep)
		if (m.ExpertTokens != nil) != keep {
			t.Errorf("keep %v: counts %v", keep, m.ExpertTokens)
		}
		for i := range want.Entropy {
			if math.Abs(float64(m.ExpertLoad.Entropy[i]-want.Entropy[i])) > 1e-12 {
				t.Errorf("entropy %v, want %v", m.ExpertLoad.Entropy, want.Entropy)
			}
		}
		if diff := cmp.Diff(want.MaxOverMean, m.ExpertLoad.MaxOverMean); diff != "" {
			t.Errorf("max over mean (-want +got):\n%s", diff)
		}
	}
	// JSON has no number for the balance of a layer without tokens.
	m := StepMetrics{ExpertTokens: [][]int64{{1, 1}, {0, 0}}}
	if m.Summarise(false); m.ExpertLoad != nil || m.ExpertTokens == nil {
		t.Errorf("a layer without tokens: %+v", m)
	}
	var dense StepMetrics
	if dense.Summarise(false); dense.ExpertLoad != nil {
		t.Errorf("a dense model: %+v", dense)
	}
}
