package report

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"mula/internal/quantity"
	"mula/train/record"
)

const (
	metricsFile = "metrics.jsonl"
	configFile  = "train.yaml"
	// A line of a model of 64 layers with 256 experts each has about 130 kB.
	maxLine = 16 << 20
	// loadWindow is the number of steps, counted from the end, over which Run.ExpertLoad sums.
	loadWindow = 100
)

// A Run is the metrics of one training run.
type Run struct {
	Name        string // base name of the run directory
	Info        Info
	Steps       []Step // in order; each step once
	Evaluations []Evaluation
	Resumes     []Resume
	Rollbacks   []Rollback
	// ExpertLoad is the number of tokens that the router sent to each expert of each layer in the
	// last LoadSteps steps with tokens. It is empty for a dense model and for a run without steps.
	ExpertLoad [][]int64
	LoadSteps  int
	// RankSeconds has sums over all steps and ranks.
	RankSeconds record.RankSeconds
	// Slowest has the ranks that were the slowest of a step or were slow, in descending order of
	// Slow and then of Steps.
	Slowest []SlowRank
	// Config has the fields of the run's train.yaml by full name, as text; nil if the directory has
	// none.
	Config map[string]string
	// Torn is the position at which the last line is cut off, because the run is still writing the
	// line or was killed while writing it. Torn is empty if the last line is complete.
	Torn string
}

// Info is the first line of the metrics: the settings of the run.
type Info struct {
	Format           int                `json:"format"`
	Mula             string             `json:"mula"`
	Model            map[string]any     `json:"model"`
	Parameters       int64              `json:"parameters"`
	ActiveParameters int64              `json:"active_parameters"`
	Plan             string             `json:"plan"` // fingerprint
	Sources          []string           `json:"sources"`
	Weights          map[string]float64 `json:"weights"` // planned shares of the drawn samples, in the stage of step 0
	SequenceLength   int64              `json:"sequence_length"`
	BatchSize        int64              `json:"batch_size"`
	Steps            int64              `json:"steps"`
	Device           string             `json:"device"`
	PeakFLOPS        float64            `json:"peak_flops"` // measured, FLOP/s; 0 in runs of older versions
	Started          time.Time          `json:"started"`
}

// A Step is the record of one optimizer update, or of a skipped update.
type Step struct {
	Step            int64
	Samples, Tokens int64 // tokens of the update
	// mean cross entropy in nats per target; NaN for a step without samples, or if not finite
	Loss            float64
	AuxLoss, ZLoss  float64
	GradNorm        float64
	LearningRate    float64
	Seconds         float64
	TokensPerSecond float64
	MFU             float64            // from 0 to 1; 0 in runs of older versions
	SourceLoss      []float64          // in the order of Info.Sources; NaN for a source that the step did not draw
	SourceSamples   []int64            // samples of the update, in the order of Info.Sources
	Balance         []Balance          // one for each layer with experts
	RouterEntropy   []float64          // of each layer, nats; empty if not recorded
	UpdateRatio     map[string]float64 // by group of tensors; nil if not measured
	Skipped         *Spike             // why the update was skipped; nil if it was made
}

// A Spike is a loss or gradient norm far above the earlier values.
type Spike struct {
	What      string  `json:"what"` // "loss", "aux_loss" or "grad_norm"
	NotFinite bool    `json:"not_finite"`
	Value     float64 `json:"value"`
	Limit     float64 `json:"limit"`
}

// String describes the spike.
func (s Spike) String() string {
	what := strings.ReplaceAll(strings.ReplaceAll(s.What, "grad_norm", "gradient norm"), "aux_loss", "auxiliary loss")
	if s.NotFinite {
		return what + " not finite"
	}
	return what + " " + quantity.Exact(s.Value, 4) + " beyond " + quantity.Exact(s.Limit, 4)
}

// A Rollback is a return of the run to a checkpoint before a spike. The metrics do not contain the
// steps that were undone.
type Rollback struct {
	Step     int64 // the first step whose data was skipped
	Spiked   int64 // the last step whose data was skipped, which had the spike
	Spike    Spike
	From, To int64 // skipped positions
}

// Balance measures how evenly the router of one layer distributed the tokens of one step over its
// experts. Both numbers are NaN if the router had no token.
type Balance struct {
	MaxOverMean float64 // load of the busiest expert ÷ mean load: 1 is even, the number of experts is the worst
	Entropy     float64 // −Σ p·ln p ÷ ln E of the shares p of the E experts: 1 is even, 0 is the worst
}

// An Evaluation is the loss on the validation windows.
type Evaluation struct {
	Step          int64 // steps done before the evaluation
	Loss          float64
	SourceLoss    []float64 // in the order of Info.Sources; NaN for a source that was not evaluated
	SourceTargets []int64   // in the order of Info.Sources
}

// A SlowRank is a rank that was the first one in the list of the slowest ranks in some steps, or
// that was slow.
type SlowRank struct {
	Rank   int
	Host   string  // in the last of these steps
	Steps  int     // number of steps in which the rank was the first
	Excess float64 // its own work relative to the median of its stage, mean over these steps
	Slow   int     // number of steps in which the rank was slow, as far as they are recorded
}

// A Resume is a point at which the run resumed from a checkpoint.
type Resume struct {
	Step       int64 // the first step after the resume
	Checkpoint string
	Time       time.Time
	Refused    []string // newer checkpoints that were damaged
	OldPlan    string   // fingerprint of the earlier plan, if the run continued with another plan
}

// Finished reports whether all steps are done.
func (r *Run) Finished() bool {
	return len(r.Steps) > 0 && r.Steps[len(r.Steps)-1].Step+1 >= r.planned()
}

// planned returns the number of steps of the whole run: the current setting, or the setting at the
// start of the run.
func (r *Run) planned() int64 {
	if n, err := strconv.ParseInt(r.Config["steps"], 10, 64); err == nil && n > 0 {
		return n
	}
	return r.Info.Steps
}

// Read reads the metrics of the run in a directory, and its configuration.
//
// For a damaged file, Read returns an error with the file and the line. Only the last line may be
// incomplete, because the run may still be writing it. Read skips such a line and sets [Run.Torn].
func Read(runDir string) (*Run, error) {
	dir, err := filepath.Abs(runDir)
	if err != nil {
		return nil, fmt.Errorf("reading run %s: %w", runDir, err)
	}
	path := filepath.Join(runDir, metricsFile)
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return nil, fmt.Errorf("%s is not a run directory: %w; name the directory that `mula train` wrote", runDir, err)
	}
	if err != nil {
		return nil, fmt.Errorf("reading run %s: %w", runDir, err)
	}
	defer f.Close()
	run, err := parse(f, path)
	if err != nil {
		return nil, err
	}
	run.Name = filepath.Base(dir)
	run.Config, err = readConfig(filepath.Join(runDir, configFile))
	return run, err
}

// line is a line of the file. One of the pointers is set, which is its kind.
type line struct {
	Run *Info `json:"run"`

	Step            *int64             `json:"step"`
	Samples         *int64             `json:"samples"`
	Tokens          int64              `json:"tokens"`
	Targets         *int64             `json:"targets"`
	Loss            *float64           `json:"loss"`
	AuxLoss         float64            `json:"aux_loss"`
	ZLoss           float64            `json:"z_loss"`
	GradNorm        float64            `json:"grad_norm"`
	LearningRate    float64            `json:"learning_rate"`
	Seconds         float64            `json:"seconds"`
	TokensPerSecond float64            `json:"tokens_per_second"`
	MFU             float64            `json:"mfu"`
	RouterEntropy   []float64          `json:"router_entropy"`
	UpdateRatio     map[string]float64 `json:"update_ratio"`
	Skipped         *Spike             `json:"skipped"`
	SourceLoss      map[string]float64 `json:"source_loss"`
	SourceSamples   map[string]int64   `json:"source_samples"`
	ExpertTokens    [][]int64          `json:"expert_tokens"`

	RankSeconds  *record.RankSeconds `json:"rank_seconds"`
	SlowestRanks []record.SlowRank   `json:"slowest_ranks"`

	Eval *struct {
		Loss          *float64           `json:"loss"`
		SourceLoss    map[string]float64 `json:"source_loss"`
		SourceTargets map[string]int64   `json:"source_targets"`
	} `json:"eval"`

	Resumed *struct {
		Checkpoint string    `json:"checkpoint"`
		Time       time.Time `json:"time"`
		Refused    []struct {
			Checkpoint string `json:"checkpoint"`
		} `json:"refused"`
		OldPlan string `json:"old_plan"`
	} `json:"resumed"`

	Rollback *struct {
		Step    int64 `json:"step"`
		Spike   Spike `json:"spike"`
		LeftOut struct {
			From int64 `json:"from"`
			To   int64 `json:"to"`
		} `json:"left_out"`
	} `json:"rollback"`
}

// parser is the state of reading.
type parser struct {
	run     *Run
	source  map[string]int // position in Info.Sources
	newPlan bool           // the run has changed its plan; sources may be new
	shape   []int          // experts of each layer, from the first step with samples; nil before
	recent  [][][]int64    // expert counts of the last loadWindow steps with counts, as a ring
	loads   int            // number of steps with expert counts
	slowest map[int]*SlowRank
}

func parse(r io.Reader, path string) (*Run, error) {
	in := bufio.NewReaderSize(r, 1<<20)
	p := &parser{run: &Run{}, slowest: map[int]*SlowRank{}}
	for number := 1; ; number++ {
		text, whole, err := readLine(in)
		if err != nil {
			return nil, fmt.Errorf("%s:%d: %w", path, number, err)
		}
		if len(text) == 0 && !whole { // the end of the file
			if number == 1 {
				return nil, fmt.Errorf("%s is empty: the run has not written its first line yet", path)
			}
			return p.finish(), nil
		}
		var l line
		if err := json.Unmarshal(text, &l); err != nil {
			var syntax *json.SyntaxError
			if !whole && number > 1 && errors.As(err, &syntax) {
				p.run.Torn = fmt.Sprintf("%s:%d is cut off after %d bytes", path, number, len(text))
				return p.finish(), nil
			}
			if !whole && number == 1 && errors.As(err, &syntax) {
				return nil, fmt.Errorf("%s:1 is cut off after %d bytes: the run has not written its first line yet",
					path, len(text))
			}
			return nil, fmt.Errorf("%s:%d: not a line of metrics: %w; restore the file, or delete the damaged "+
				"line", path, number, err)
		}
		if err := p.add(&l, number == 1); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", path, number, err)
		}
	}
}

// readLine returns the next line without its newline, and whether it had a newline. At the end of
// the file it returns an empty line without a newline.
func readLine(in *bufio.Reader) (text []byte, whole bool, err error) {
	for {
		part, err := in.ReadSlice('\n')
		if len(text)+len(part) > maxLine {
			return nil, false, fmt.Errorf("the line has more than %d MiB; this is not a metrics file", maxLine>>20)
		}
		text = append(text, part...)
		switch {
		case err == nil:
			return bytes.TrimSuffix(text, []byte("\n")), true, nil
		case err == io.EOF:
			return text, false, nil
		case err != bufio.ErrBufferFull:
			return nil, false, err
		}
	}
}

func (p *parser) add(l *line, first bool) error {
	if first != (l.Run != nil) {
		if first {
			return errors.New(`the first line must have "run": {…}; this is not a metrics file of mula, or its first lines are lost`)
		}
		return errors.New("a second run starts in the same file: one of two runs overwrote the other's directory")
	}
	if first {
		return p.addInfo(l.Run)
	}
	if l.Step == nil || *l.Step < 0 {
		return errors.New(`the line has no "step", or a negative step`)
	}
	switch {
	case l.Eval != nil:
		return p.addEvaluation(l)
	case l.Resumed != nil:
		p.addResume(l)
		return nil
	case l.Rollback != nil:
		b := l.Rollback
		p.run.Rollbacks = append(p.run.Rollbacks, Rollback{Step: *l.Step, Spiked: b.Step, Spike: b.Spike,
			From: b.LeftOut.From, To: b.LeftOut.To})
		return nil
	case l.Samples != nil:
		return p.addStep(l)
	}
	return errors.New(`the line is neither a step ("samples"), nor an evaluation ("eval"), nor a resume ("resumed"), nor a rollback ("rollback")`)
}

func (p *parser) addInfo(info *Info) error {
	if info.Format != 1 {
		return fmt.Errorf("metrics format %d; this mula reads format 1: use the version that wrote the run",
			info.Format)
	}
	p.source = make(map[string]int, len(info.Sources))
	for i, name := range info.Sources {
		if _, twice := p.source[name]; twice {
			return fmt.Errorf("source %q is listed twice", name)
		}
		p.source[name] = i
	}
	for name := range info.Weights {
		if _, known := p.source[name]; !known {
			return fmt.Errorf("the weights name %q, which is not a source of the run", name)
		}
	}
	p.run.Info = *info
	return nil
}

func (p *parser) addStep(l *line) error {
	run := p.run
	s := Step{
		Step: *l.Step, Samples: *l.Samples, Tokens: l.Tokens, Loss: math.NaN(), AuxLoss: l.AuxLoss, ZLoss: l.ZLoss,
		GradNorm:     l.GradNorm,
		LearningRate: l.LearningRate, Seconds: l.Seconds, TokensPerSecond: l.TokensPerSecond,
		MFU: l.MFU, RouterEntropy: l.RouterEntropy, UpdateRatio: l.UpdateRatio, Skipped: l.Skipped,
	}
	if n := len(run.Steps); n > 0 && s.Step != run.Steps[n-1].Step+1 {
		return fmt.Errorf("step %d follows step %d; lines are missing or repeated", s.Step, run.Steps[n-1].Step)
	}
	if s.Samples < 0 || s.Tokens < 0 {
		return fmt.Errorf("step %d: negative number of samples or tokens", s.Step)
	}
	if s.Samples > 0 {
		if l.Loss == nil {
			return fmt.Errorf("step %d has samples but no loss", s.Step)
		}
		s.Loss = *l.Loss
	}
	if l.Targets != nil && *l.Targets == 0 { // packed documents of one token each
		s.Loss = math.NaN()
	}
	var err error
	if s.SourceLoss, err = bySource(p, l.SourceLoss, math.NaN()); err != nil {
		return fmt.Errorf("step %d: source_loss: %w", s.Step, err)
	}
	if s.SourceSamples, err = bySource(p, l.SourceSamples, 0); err != nil {
		return fmt.Errorf("step %d: source_samples: %w", s.Step, err)
	}
	var sum int64
	for i, n := range s.SourceSamples {
		if n < 0 || n > s.Samples {
			return fmt.Errorf("step %d: %d samples of source %q in a step of %d", s.Step, n, run.Info.Sources[i],
				s.Samples)
		}
		sum += n
	}
	if len(l.SourceSamples) > 0 && sum != s.Samples {
		return fmt.Errorf("step %d: the samples of the sources add up to %d, but the step has %d", s.Step, sum,
			s.Samples)
	}
	lost := s.Skipped != nil && s.Skipped.NotFinite // the results of the step are not finite
	if lost {
		s.GradNorm = math.NaN()
		if s.Skipped.What != "grad_norm" {
			s.Loss = math.NaN()
		}
	}
	if s.Skipped != nil {
		s.Tokens = 0
		clear(s.SourceSamples)
	}
	if s.Samples > 0 && !lost || l.ExpertTokens != nil {
		if s.Balance, err = p.addLoad(l.ExpertTokens); err != nil {
			return fmt.Errorf("step %d: expert_tokens: %w", s.Step, err)
		}
	}
	run.Steps = append(run.Steps, s)
	if l.RankSeconds != nil {
		run.RankSeconds.Add(*l.RankSeconds)
	}
	for i, r := range l.SlowestRanks {
		if i == 0 || r.Slow {
			p.addSlowest(r, i == 0)
		}
	}
	return nil
}

// addSlowest counts a step in which r was the first of the slowest ranks, or slow, or both.
func (p *parser) addSlowest(r record.SlowRank, first bool) {
	of := p.slowest[r.Rank]
	if of == nil {
		of = &SlowRank{Rank: r.Rank}
		p.slowest[r.Rank] = of
	}
	of.Host = r.Host
	if r.Slow {
		of.Slow++
	}
	if first {
		of.Steps++
		of.Excess += (r.Excess() - of.Excess) / float64(of.Steps)
	}
}

// addLoad checks that one step's counts have the shape of the first step's counts, keeps them for
// the sum over the last steps, and returns their balance.
func (p *parser) addLoad(counts [][]int64) ([]Balance, error) {
	if p.shape == nil {
		p.shape = make([]int, len(counts))
		for layer, row := range counts {
			p.shape[layer] = len(row)
		}
	}
	if len(counts) != len(p.shape) {
		return nil, fmt.Errorf("%d layers, but the first step has %d", len(counts), len(p.shape))
	}
	balance := make([]Balance, len(counts))
	for layer, row := range counts {
		if len(row) != p.shape[layer] {
			return nil, fmt.Errorf("layer %d has %d experts, but %d in the first step", layer, len(row),
				p.shape[layer])
		}
		for expert, n := range row {
			if n < 0 || n > 1<<53 { // larger counts would not be exact in the sums below
				return nil, fmt.Errorf("layer %d, expert %d: %d tokens", layer, expert, n)
			}
		}
		balance[layer] = balanceOf(row)
	}
	if len(p.recent) < loadWindow {
		p.recent = append(p.recent, counts)
	} else {
		p.recent[p.loads%loadWindow] = counts
	}
	p.loads++
	return balance, nil
}

func balanceOf(counts []int64) Balance {
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

func (p *parser) addEvaluation(l *line) error {
	if l.Eval.Loss == nil {
		return errors.New("the evaluation has no loss")
	}
	e := Evaluation{Step: *l.Step, Loss: *l.Eval.Loss}
	var err error
	if e.SourceLoss, err = bySource(p, l.Eval.SourceLoss, math.NaN()); err != nil {
		return fmt.Errorf("evaluation after %d steps: source_loss: %w", e.Step, err)
	}
	if e.SourceTargets, err = bySource(p, l.Eval.SourceTargets, 0); err != nil {
		return fmt.Errorf("evaluation after %d steps: source_targets: %w", e.Step, err)
	}
	p.run.Evaluations = append(p.run.Evaluations, e)
	return nil
}

func (p *parser) addResume(l *line) {
	r := Resume{Step: *l.Step, Checkpoint: l.Resumed.Checkpoint, Time: l.Resumed.Time, OldPlan: l.Resumed.OldPlan}
	for _, refused := range l.Resumed.Refused {
		r.Refused = append(r.Refused, refused.Checkpoint)
	}
	p.newPlan = p.newPlan || r.OldPlan != ""
	p.run.Resumes = append(p.run.Resumes, r)
}

// finish extends the records to the final number of sources and sums the expert load over the last
// steps.
func (p *parser) finish() *Run {
	run := p.run
	for i := range run.Steps {
		s := &run.Steps[i]
		s.SourceLoss, s.SourceSamples = p.pad(s.SourceLoss, s.SourceSamples)
		for len(s.Balance) < len(p.shape) { // the step routed nothing
			s.Balance = append(s.Balance, Balance{math.NaN(), math.NaN()})
		}
	}
	for i := range run.Evaluations {
		e := &run.Evaluations[i]
		e.SourceLoss, e.SourceTargets = p.pad(e.SourceLoss, e.SourceTargets)
	}
	for _, rank := range p.slowest {
		run.Slowest = append(run.Slowest, *rank)
	}
	slices.SortFunc(run.Slowest, func(a, b SlowRank) int {
		return cmp.Or(cmp.Compare(b.Slow, a.Slow), cmp.Compare(b.Steps, a.Steps), cmp.Compare(a.Rank, b.Rank))
	})
	if len(p.shape) == 0 {
		return run
	}
	run.LoadSteps = len(p.recent)
	run.ExpertLoad = make([][]int64, len(p.shape))
	for layer, experts := range p.shape {
		run.ExpertLoad[layer] = make([]int64, experts)
		for _, counts := range p.recent {
			for expert, n := range counts[layer] {
				run.ExpertLoad[layer][expert] += n
			}
		}
	}
	return run
}

func (p *parser) pad(losses []float64, counts []int64) ([]float64, []int64) {
	for len(losses) < len(p.source) {
		losses = append(losses, math.NaN())
	}
	for len(counts) < len(p.source) {
		counts = append(counts, 0)
	}
	return losses, counts
}

// bySource returns values in the order of the sources, with absent for missing sources.
func bySource[T int64 | float64](p *parser, values map[string]T, absent T) ([]T, error) {
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if _, known := p.source[name]; known {
			continue
		}
		if !p.newPlan {
			return nil, fmt.Errorf("%q is not a source of the run", name)
		}
		p.source[name] = len(p.source)
		p.run.Info.Sources = append(p.run.Info.Sources, name)
	}
	out := make([]T, len(p.source))
	for i := range out {
		out[i] = absent
	}
	for name, v := range values {
		out[p.source[name]] = v
	}
	return out, nil
}
