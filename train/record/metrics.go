// Package record has the records of a run: the lines of metrics.jsonl and failures.jsonl, files
// of JSON lines that a resumed run continues, the heartbeat file, and the metrics that Prometheus
// reads. docs/formats/run.md describes the files.
package record

import (
	"encoding/json"
	"math"
	"strconv"

	"mula/train/spikes"
)

// Run is the first line of metrics.jsonl, under the key "run".
type Run struct {
	Format           int                `json:"format"` // 1
	Mula             string             `json:"mula"`   // version of the program
	Model            json.RawMessage    `json:"model"`  // config.json of the model
	Parameters       int64              `json:"parameters"`
	ActiveParameters int64              `json:"active_parameters"`
	Plan             string             `json:"plan"` // fingerprint
	Sources          []string           `json:"sources"`
	Weights          map[string]float64 `json:"weights"` // fraction of each source in the stage of the first step
	SequenceLength   int                `json:"sequence_length"`
	BatchSize        int                `json:"batch_size"`
	Steps            int64              `json:"steps"`
	Device           string             `json:"device"`
	// forward and backward; see [moe.Config.FLOPsPerToken]
	FLOPsPerToken float64 `json:"flops_per_token"`
	// peak of the products of all ranks' devices, in FLOP/s, measured on rank 0 at the start
	PeakFLOPS float64 `json:"peak_flops"`
	// numbers of the layers with experts, if others have none; lists by layer have these layers
	ExpertLayers []int  `json:"expert_layers,omitempty"`
	Layout       string `json:"layout,omitempty"` // for several ranks; see [mula/train.LayoutConfig.String]
	Started      string `json:"started"`          // RFC 3339
}

// StepMetrics is the line of one step in metrics.jsonl. Losses are means over unmasked targets, in
// nats. All fields except those about time are bit-identical, however often the run was stopped and
// resumed.
//
// MFU is the model FLOPs utilization of Chowdhery et al. (arXiv 2204.02311, appendix B): tokens per
// second times [Run.FLOPsPerToken], over the peak of the machine. Recomputed work is not
// counted. The peak is measured, not from a data sheet.
type StepMetrics struct {
	Step    int64 `json:"step"`    // from 0
	First   int64 `json:"first"`   // first position of the step
	Samples int   `json:"samples"` // fewer than the batch size if positions were skipped
	Tokens  int64 `json:"tokens"`  // tokens read: samples times sequence length
	// unmasked targets; absent if all targets are unmasked, one per token
	Targets *int64  `json:"targets,omitempty"`
	Loss    float64 `json:"loss"` // cross entropy only
	AuxLoss float64 `json:"aux_loss"`
	ZLoss   float64 `json:"z_loss"`
	// of each layer of multi-token prediction, the mean over its targets; absent without them
	PredictionLoss  []float64          `json:"prediction_loss,omitempty"`
	GradNorm        float64            `json:"grad_norm"` // before clipping
	LearningRate    float64            `json:"learning_rate"`
	Seconds         float64            `json:"seconds"`
	TokensPerSecond float64            `json:"tokens_per_second"`
	MFU             float64            `json:"mfu"`
	Time            string             `json:"time"` // RFC 3339
	SourceLoss      map[string]float64 `json:"source_loss"`
	SourceSamples   map[string]int     `json:"source_samples"`
	// [layer with experts][expert]; absent for dense models. The file has it in some steps, see
	// [StepMetrics.Summarise].
	ExpertTokens [][]int64   `json:"expert_tokens,omitempty"`
	ExpertLoad   *ExpertLoad `json:"expert_load,omitempty"` // in the file; absent for dense models
	// [layer with experts], nats: mean over tokens of −Σ p ln p of the router's distribution
	RouterEntropy []float64 `json:"router_entropy,omitempty"`
	// of the same layers, with model.expert_capacity_factor: the experts' dropped choices, as a
	// fraction of the choices of all tokens
	DroppedChoices []float64 `json:"dropped_choices,omitempty"`
	// by group of tensors, in steps that measure it: ‖change of the weights‖ / ‖weights before‖
	UpdateRatio map[string]float64 `json:"update_ratio,omitempty"`
	// why the update was not made; the samples are read, but not trained on
	Skipped *spikes.Spike `json:"skipped,omitempty"`

	RankSeconds  *RankSeconds `json:"rank_seconds,omitempty"`  // sums over all ranks
	SlowRanks    int          `json:"slow_ranks,omitempty"`    // number of ranks with SlowRank.Slow
	SlowestRanks []SlowRank   `json:"slowest_ranks,omitempty"` // ranks with Slow, and then the slowest first
}

// Snapshot describes a snapshot of the run in the memory of its hosts.
type Snapshot struct {
	Bytes   int64   `json:"bytes"`   // of the files of all ranks, without their copies
	Seconds Seconds `json:"seconds"` // during which the next step waited
}

// RankSeconds is the time that a rank spent in its activities, from its vote of the previous step
// to its vote of this step. Waiting for other ranks counts in Waiting only.
type RankSeconds struct {
	Reading Seconds `json:"reading"` // waiting for the samples of the step
	Compute Seconds `json:"compute"` // losses and gradients
	Waiting Seconds `json:"waiting"` // in exchanges with other ranks
	Update  Seconds `json:"update"`  // of the weights, in the previous step
	Saving  Seconds `json:"saving"`  // checkpoints
}

// Own is the time in which the rank worked on a step.
func (s RankSeconds) Own() Seconds { return s.Reading + s.Compute + s.Update }

// Add adds other to s.
func (s *RankSeconds) Add(other RankSeconds) {
	s.Reading += other.Reading
	s.Compute += other.Compute
	s.Waiting += other.Waiting
	s.Update += other.Update
	s.Saving += other.Saving
}

// Seconds is a measured time. Its JSON has four significant digits.
type Seconds float64

// MarshalJSON returns the rounded number.
func (s Seconds) MarshalJSON() ([]byte, error) { return fourDigits(float64(s)), nil }

// Ratio is a ratio of two numbers. Its JSON has four significant digits.
type Ratio float64

// MarshalJSON returns the rounded number.
func (r Ratio) MarshalJSON() ([]byte, error) { return fourDigits(float64(r)), nil }

func fourDigits(x float64) []byte { return strconv.AppendFloat(nil, x, 'g', 4, 64) }

// ExpertLoad has the [Balance] of each layer with experts.
type ExpertLoad struct {
	MaxOverMean []Ratio `json:"max_over_mean"`
	Entropy     []Ratio `json:"entropy"`
}

// Balance measures how evenly the router of one layer distributed the tokens of one step over its
// experts. Both numbers are NaN if the router had no token.
type Balance struct {
	MaxOverMean float64 // load of the busiest expert ÷ mean load: 1 is even, the number of experts is the worst
	Entropy     float64 // −Σ p·ln p ÷ ln E of the shares p of the E experts: 1 is even, 0 is the worst
}

// BalanceOf returns the balance of a layer whose experts got the given numbers of tokens.
func BalanceOf(counts []int64) Balance {
	var sum, most float64
	for _, n := range counts {
		sum += float64(n)
		most = max(most, float64(n))
	}
	if sum == 0 {
		return Balance{math.NaN(), math.NaN()}
	}
	if len(counts) == 1 {
		return Balance{1, 1}
	}
	var entropy float64
	for _, n := range counts {
		if n > 0 {
			share := float64(n) / sum
			entropy -= share * math.Log(share)
		}
	}
	experts := float64(len(counts))
	return Balance{MaxOverMean: most * experts / sum, Entropy: entropy / math.Log(experts)}
}

// Summarise sets ExpertLoad to the balance of ExpertTokens. It removes the counts unless keep is
// set, because they are most of the bytes of a line. Counts without a balance stay.
func (m *StepMetrics) Summarise(keep bool) {
	if len(m.ExpertTokens) == 0 {
		return
	}
	load := &ExpertLoad{}
	for _, counts := range m.ExpertTokens {
		b := BalanceOf(counts)
		if math.IsNaN(b.MaxOverMean) {
			return
		}
		load.MaxOverMean = append(load.MaxOverMean, Ratio(b.MaxOverMean))
		load.Entropy = append(load.Entropy, Ratio(b.Entropy))
	}
	m.ExpertLoad = load
	if !keep {
		m.ExpertTokens = nil
	}
}

// A SlowRank is a rank that takes longer for its own work than others of its stage.
type SlowRank struct {
	Rank   int     `json:"rank"`
	Host   string  `json:"host"`
	Median Seconds `json:"median"` // of [RankSeconds.Own] of the ranks of its stage
	RankSeconds
	Slow bool `json:"slow,omitempty"` // by log.slow_factor and log.slow_steps, before this step
}

// Excess is the rank's own work relative to the median, or 1 if the median is 0.
func (r SlowRank) Excess() float64 {
	if r.Median <= 0 {
		return 1
	}
	return float64(r.Own()) / float64(r.Median)
}

// Evaluation is the loss on the validation split: means over targets, in nats.
type Evaluation struct {
	Loss          float64            `json:"loss"` // mean over all evaluated targets of all sources
	SourceLoss    map[string]float64 `json:"source_loss"`
	SourceTargets map[string]int64   `json:"source_targets"`

	// Half the width of 95 % confidence intervals, as estimated by [mula/train.Evaluate]. Nil, or
	// without the source, if only one window of several was read.
	Margin       *float64           `json:"margin,omitempty"`
	SourceMargin map[string]float64 `json:"source_margin,omitempty"`

	// The same, with sources weighted by their fraction of the plan's samples. Sources without
	// validation windows are omitted.
	MixLoss   float64  `json:"mix_loss,omitempty"`
	MixMargin *float64 `json:"mix_margin,omitempty"`
}

// AddRouters adds the entropies and the dropped choices of a micro-batch. share is its share of the
// step's tokens.
func (m *StepMetrics) AddRouters(entropy, dropped []float64, share float64) {
	add := func(sums *[]float64, values []float64) {
		if *sums == nil && len(values) > 0 {
			*sums = make([]float64, len(values))
		}
		for layer, v := range values {
			(*sums)[layer] += v * share
		}
	}
	add(&m.RouterEntropy, entropy)
	add(&m.DroppedChoices, dropped)
}

// Clear removes values that are undefined, and may not be valid JSON, if what is not finite. what
// is as in [spikes.Spike].
func (m *StepMetrics) Clear(what string) {
	m.GradNorm, m.PredictionLoss = 0, nil
	if what == spikes.GradNorm {
		return
	}
	m.Loss, m.AuxLoss, m.ZLoss, m.ExpertTokens, m.RouterEntropy, m.DroppedChoices = 0, 0, 0, nil, nil, nil
	m.SourceLoss, m.SourceSamples = map[string]float64{}, map[string]int{}
}
