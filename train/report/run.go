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
	// loadWindow is the number of steps, counted from the last step with counts, over which
	// Run.ExpertLoad sums.
	loadWindow = 100
)

// A Run is the metrics of one training run.
type Run struct {
	Name        string // base name of the run directory
	Info        Info
	Spans       []Span // of all steps, in order; each step once
	Done        int    // number of steps
	Next        int64  // the step after the last one
	Skips       []Skip // in order
	Evaluations []Evaluation
	Resumes     []Resume
	Rollbacks   []Rollback
	Layers      int // with experts
	// ExpertLoad is the number of tokens that the router sent to each expert of each layer in
	// LoadSteps steps up to LoadLast. It is empty without steps that have counts.
	ExpertLoad [][]int64
	LoadSteps  int
	LoadLast   int64
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

	perSpan         int // steps of every span but the last one
	tokens, seconds float64
	losses          int // number of steps with a loss
	firstLoss       float64
	lastLosses      []float64 // of the last steps with a loss, at most lastLosses
	firstSourceLoss []float64 // NaN without a loss
}

// layer returns the number of a layer of a list by layer.
func (r *Run) layer(i int) int {
	if i < len(r.Info.ExpertLayers) {
		return r.Info.ExpertLayers[i]
	}
	return i
}

// lastLosses is the largest number of steps over which the last loss is averaged.
const lastLosses = 50

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
	ExpertLayers     []int              `json:"expert_layers"` // of lists by layer; nil: all layers
	PeakFLOPS        float64            `json:"peak_flops"`    // measured, FLOP/s; 0 in runs of older versions
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
	PredictionLoss  []float64          // of each layer of multi-token prediction; 0 without predicted tokens
	Balance         []record.Balance   // one for each layer with experts
	RouterEntropy   []float64          // of each layer, nats; empty if not recorded
	DroppedChoices  []float64          // of each layer, a fraction of all; empty without a capacity
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

// A Skip is a step whose update was skipped.
type Skip struct {
	Step  int64
	Spike Spike
	Loss  float64
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
func (r *Run) Finished() bool { return r.Done > 0 && r.Next >= r.planned() }

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
	PredictionLoss  []float64          `json:"prediction_loss"`
	GradNorm        float64            `json:"grad_norm"`
	LearningRate    float64            `json:"learning_rate"`
	Seconds         float64            `json:"seconds"`
	TokensPerSecond float64            `json:"tokens_per_second"`
	MFU             float64            `json:"mfu"`
	RouterEntropy   []float64          `json:"router_entropy"`
	DroppedChoices  []float64          `json:"dropped_choices"`
	UpdateRatio     map[string]float64 `json:"update_ratio"`
	Skipped         *Spike             `json:"skipped"`
	SourceLoss      map[string]float64 `json:"source_loss"`
	SourceSamples   map[string]int64   `json:"source_samples"`
	ExpertTokens    [][]int64          `json:"expert_tokens"`
	ExpertLoad      *record.ExpertLoad `json:"expert_load"`

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

	Snapshot *record.Snapshot `json:"snapshot"`
}

// parser is the state of reading.
type parser struct {
	run     *Run
	source  map[string]int // position in Info.Sources
	newPlan bool           // the run has changed its plan; sources may be new
	layers  int            // with experts, from the first step with samples; -1 before
	shape   []int          // experts of each layer, from the first step with counts; nil before
	recent  []stepLoad     // in order, of the last loadWindow steps up to the last one with counts
	slowest map[int]*SlowRank
}

// A stepLoad has the number of tokens of each expert of each layer in a step.
type stepLoad struct {
	step   int64
	counts [][]int64
}

func parse(r io.Reader, path string) (*Run, error) {
	in := bufio.NewReaderSize(r, 1<<20)
	p := &parser{run: &Run{perSpan: 1}, layers: -1, slowest: map[int]*SlowRank{}}
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
	case l.Snapshot != nil:
		return nil
	case l.Samples != nil:
		return p.addStep(l)
	}
	return errors.New(`the line is neither a step ("samples"), nor an evaluation ("eval"), nor a resume ("resumed"), nor a rollback ("rollback"), nor a snapshot ("snapshot")`)
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
		MFU: l.MFU, RouterEntropy: l.RouterEntropy, DroppedChoices: l.DroppedChoices, UpdateRatio: l.UpdateRatio,
		Skipped: l.Skipped, PredictionLoss: l.PredictionLoss,
	}
	if run.Done > 0 && s.Step != run.Next {
		return fmt.Errorf("step %d follows step %d; lines are missing or repeated", s.Step, run.Next-1)
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
	switch {
	case l.ExpertTokens == nil && l.ExpertLoad != nil:
		if s.Balance, err = p.addSummary(l.ExpertLoad); err != nil {
			return fmt.Errorf("step %d: expert_load: %w", s.Step, err)
		}
	case s.Samples > 0 && !lost || l.ExpertTokens != nil:
		if s.Balance, err = p.addLoad(s.Step, l.ExpertTokens); err != nil {
			return fmt.Errorf("step %d: expert_tokens: %w", s.Step, err)
		}
	}
	run.add(s)
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

// checkLayers checks that a step has as many layers with experts as the first step.
func (p *parser) checkLayers(n int) error {
	if p.layers < 0 {
		p.layers = n
	}
	if n != p.layers {
		return fmt.Errorf("%d layers, but the first step has %d", n, p.layers)
	}
	if named := p.run.Info.ExpertLayers; named != nil && n > len(named) {
		return fmt.Errorf("%d layers, but expert_layers in the first line has %d", n, len(named))
	}
	return nil
}

// addSummary returns the balance of a step that has no counts.
func (p *parser) addSummary(load *record.ExpertLoad) ([]record.Balance, error) {
	if err := p.checkLayers(len(load.MaxOverMean)); err != nil {
		return nil, err
	}
	if len(load.Entropy) != len(load.MaxOverMean) {
		return nil, fmt.Errorf("%d layers have a load, and %d an entropy", len(load.MaxOverMean), len(load.Entropy))
	}
	balance := make([]record.Balance, len(load.Entropy))
	for layer := range balance {
		balance[layer] = record.Balance{MaxOverMean: float64(load.MaxOverMean[layer]),
			Entropy: float64(load.Entropy[layer])}
	}
	return balance, nil
}

// addLoad checks that one step's counts have the shape of the first counts, keeps them for the sum
// over the last steps, and returns their balance.
func (p *parser) addLoad(step int64, counts [][]int64) ([]record.Balance, error) {
	if err := p.checkLayers(len(counts)); err != nil {
		return nil, err
	}
	if p.shape == nil {
		p.shape = make([]int, len(counts))
		for layer, row := range counts {
			p.shape[layer] = len(row)
		}
	}
	balance := make([]record.Balance, len(counts))
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
		balance[layer] = record.BalanceOf(row)
	}
	p.recent = slices.DeleteFunc(p.recent, func(l stepLoad) bool { return l.step <= step-loadWindow })
	p.recent = append(p.recent, stepLoad{step, counts})
	return balance, nil
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

// finish extends the evaluations to the final number of sources and sums the expert load over the
// last steps.
func (p *parser) finish() *Run {
	run := p.run
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
	run.Layers = max(p.layers, 0)
	if len(p.shape) == 0 {
		return run
	}
	run.LoadSteps, run.LoadLast = len(p.recent), p.recent[len(p.recent)-1].step
	run.ExpertLoad = make([][]int64, len(p.shape))
	for layer, experts := range p.shape {
		run.ExpertLoad[layer] = make([]int64, experts)
		for _, load := range p.recent {
			for expert, n := range load.counts[layer] {
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
