package report

import (
	"bufio"
	"bytes"
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
)

const (
	metricsFile = "metrics.jsonl"
	configFile  = "train.yaml"
	// A line of a model of 64 layers with 256 experts each has about 130 kB.
	maxLine = 16 << 20
	// loadWindow is the number of steps, counted from the end, over which Run.ExpertLoad sums.
	loadWindow = 100
)

// A Run is what the metrics of one training run say.
type Run struct {
	Name        string // base name of the run directory
	Info        Info
	Steps       []Step // in order; each step once
	Evaluations []Evaluation
	Resumes     []Resume
	Rollbacks   []Rollback
	// ExpertLoad is, for each layer and expert, the number of tokens that the router sent there in
	// the last LoadSteps steps that had any. It is empty for a dense model and for a run without
	// steps.
	ExpertLoad [][]int64
	LoadSteps  int
	// Config has the fields of the run's train.yaml by full name, as text; nil if the directory has
	// none.
	Config map[string]string
	// Torn says where the last line breaks off, which is so while the run is writing it, or when
	// the run was killed then. It is empty when the last line is whole.
	Torn string
}

// Info is the first line of the metrics: what the run set out to do.
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

// A Step is the record of one optimizer update, or of one that was not made.
type Step struct {
	Step            int64
	Samples, Tokens int64 // tokens that were trained on
	// mean cross entropy in nats per target; NaN for a step without samples, or if it was not
	// finite
	Loss            float64
	AuxLoss, ZLoss  float64
	GradNorm        float64
	LearningRate    float64
	Seconds         float64
	TokensPerSecond float64
	MFU             float64            // a share of 1; 0 in runs of older versions
	SourceLoss      []float64          // in the order of Info.Sources; NaN for a source that the step did not draw
	SourceSamples   []int64            // in the order of Info.Sources, those trained on
	Balance         []Balance          // one for each layer with experts
	RouterEntropy   []float64          // of each layer, nats; empty where it is not recorded
	UpdateRatio     map[string]float64 // by group of tensors; nil where it was not measured
	Skipped         *Spike             // why the update was not made; nil if it was
}

// A Spike is a loss or gradient norm far beyond those before it.
type Spike struct {
	What      string  `json:"what"` // "loss", "aux_loss" or "grad_norm"
	NotFinite bool    `json:"not_finite"`
	Value     float64 `json:"value"`
	Limit     float64 `json:"limit"`
}

// String is the spike in words.
func (s Spike) String() string {
	what := strings.ReplaceAll(strings.ReplaceAll(s.What, "grad_norm", "gradient norm"), "aux_loss", "auxiliary loss")
	if s.NotFinite {
		return what + " not finite"
	}
	return what + " " + exact(s.Value, 4) + " beyond " + exact(s.Limit, 4)
}

// A Rollback is a return of the run to a time before a spike. The steps that were undone are not on
// record.
type Rollback struct {
	Step     int64 // the first whose data was left out
	Spiked   int64 // the last, which spiked
	Spike    Spike
	From, To int64 // positions left out
}

// Balance says how evenly the router of one layer spread the tokens of one step over its experts.
// Both numbers are NaN when it routed no token.
type Balance struct {
	MaxOverMean float64 // load of the busiest expert ÷ mean load: 1 is even, the number of experts is the worst
	Entropy     float64 // −Σ p·ln p ÷ ln E of the shares p of the E experts: 1 is even, 0 is the worst
}

// An Evaluation is the loss on the validation windows.
type Evaluation struct {
	Step          int64 // steps done before it
	Loss          float64
	SourceLoss    []float64 // in the order of Info.Sources; NaN for a source that was not evaluated
	SourceTargets []int64   // in the order of Info.Sources
}

// A Resume is a point at which the run went on from a checkpoint.
type Resume struct {
	Step       int64 // the first step after it
	Checkpoint string
	Time       time.Time
	Refused    []string // newer checkpoints that were damaged
	OldPlan    string   // fingerprint of the plan before it, if the run went on with another one
}

// Finished reports whether all steps are done.
func (r *Run) Finished() bool {
	return len(r.Steps) > 0 && r.Steps[len(r.Steps)-1].Step+1 >= r.planned()
}

// planned is the number of steps of the whole run: as it is set now, or as it was when the run
// began.
func (r *Run) planned() int64 {
	if n, err := strconv.ParseInt(r.Config["steps"], 10, 64); err == nil && n > 0 {
		return n
	}
	return r.Info.Steps
}

// Read reads the metrics of the run in a directory, and its configuration.
//
// A file that is damaged is refused with the name of the file and the line. Only the last line may
// be incomplete, as it is while the run goes on: it is left out, and [Run.Torn] says so.
func Read(runDir string) (*Run, error) {
	dir, err := filepath.Abs(runDir)
	if err != nil {
		return nil, fmt.Errorf("reading run %s: %w", runDir, err)
	}
	path := filepath.Join(runDir, metricsFile)
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return nil, fmt.Errorf("%s is no run directory: %w; name the directory that `mula train` wrote", runDir, err)
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

// line is any line of the file; which of the pointers is set tells its kind.
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

// parser holds what the lines read so far have established.
type parser struct {
	run     *Run
	source  map[string]int // position in Info.Sources
	newPlan bool           // the run has changed its plan, so that sources may come that the first line does not name
	shape   []int          // experts of each layer, fixed by the first step that has samples; nil before
	recent  [][][]int64    // expert counts of the last loadWindow steps that have them, a ring
	loads   int            // number of steps that have them
}

func parse(r io.Reader, path string) (*Run, error) {
	in := bufio.NewReaderSize(r, 1<<20)
	p := &parser{run: &Run{}}
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
				p.run.Torn = fmt.Sprintf("%s:%d breaks off after %d bytes", path, number, len(text))
				return p.finish(), nil
			}
			if !whole && number == 1 && errors.As(err, &syntax) {
				return nil, fmt.Errorf("%s:1 breaks off after %d bytes: the run has not written its first line yet",
					path, len(text))
			}
			return nil, fmt.Errorf("%s:%d: no line of metrics: %w; restore the file, or delete the damaged line", path,
				number, err)
		}
		if err := p.add(&l, number == 1); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", path, number, err)
		}
	}
}

// readLine returns the next line without its end, and whether it had one. The end of the file is an
// empty line without an end.
func readLine(in *bufio.Reader) (text []byte, whole bool, err error) {
	for {
		part, err := in.ReadSlice('\n')
		if len(text)+len(part) > maxLine {
			return nil, false, fmt.Errorf("the line has more than %d MiB: this is no metrics file", maxLine>>20)
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
			return errors.New(`the first line must be the run's ("run": {…}): this is no metrics file of mula, or its head is lost`)
		}
		return errors.New("a second run starts in the same file: one of two runs overwrote the other's directory")
	}
	if first {
		return p.addInfo(l.Run)
	}
	if l.Step == nil || *l.Step < 0 {
		return errors.New(`the line has no "step" of at least 0`)
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
		return fmt.Errorf("step %d follows step %d: lines are missing or doubled", s.Step, run.Steps[n-1].Step)
	}
	if s.Samples < 0 || s.Tokens < 0 {
		return fmt.Errorf("step %d: negative number of samples or tokens", s.Step)
	}
	if s.Samples > 0 {
		if l.Loss == nil {
			return fmt.Errorf("step %d has samples and no loss", s.Step)
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
		return fmt.Errorf("step %d: the sources' samples add up to %d, the step has %d", s.Step, sum, s.Samples)
	}
	lost := s.Skipped != nil && s.Skipped.NotFinite // what the step computed has no value
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
	return nil
}

// addLoad checks one step's counts against the shape of the first step's, keeps them for the sum
// over the last steps and returns their balance.
func (p *parser) addLoad(counts [][]int64) ([]Balance, error) {
	if p.shape == nil {
		p.shape = make([]int, len(counts))
		for layer, row := range counts {
			p.shape[layer] = len(row)
		}
	}
	if len(counts) != len(p.shape) {
		return nil, fmt.Errorf("%d layers, the first step has %d", len(counts), len(p.shape))
	}
	balance := make([]Balance, len(counts))
	for layer, row := range counts {
		if len(row) != p.shape[layer] {
			return nil, fmt.Errorf("layer %d has %d experts, in the first step it has %d", layer, len(row),
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

// finish brings the records to the final number of sources and sums the expert load over the last
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

// bySource lays values out in the order of the sources; absent ones get the value given.
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
