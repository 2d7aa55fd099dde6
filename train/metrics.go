package train

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"mula/internal/atomicfile"
	"mula/moe"
	"mula/moe/safetensors"
	"mula/train/spikes"
)

// RunRecord is the first line of metrics.jsonl, under the key "run".
type RunRecord struct {
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
	Layout    string  `json:"layout,omitempty"` // for several ranks; see [LayoutConfig.String]
	Started   string  `json:"started"`          // RFC 3339
}

// StepMetrics is the line of one step in metrics.jsonl. Losses are means over unmasked targets, in
// nats. All fields except the four about time are bit-identical, however often the run was stopped
// and resumed.
//
// MFU is the model FLOPs utilization of Chowdhery et al. (arXiv 2204.02311, appendix B): tokens per
// second times [RunRecord.FLOPsPerToken], over the peak of the machine. Recomputed work is not
// counted. The peak is measured, not from a data sheet.
type StepMetrics struct {
	Step    int64 `json:"step"`    // from 0
	First   int64 `json:"first"`   // first position of the step
	Samples int   `json:"samples"` // fewer than the batch size if positions were skipped
	Tokens  int64 `json:"tokens"`  // tokens read: samples times sequence length
	// unmasked targets; absent if all targets are unmasked, one per token
	Targets         *int64             `json:"targets,omitempty"`
	Loss            float64            `json:"loss"` // cross entropy only
	AuxLoss         float64            `json:"aux_loss"`
	ZLoss           float64            `json:"z_loss"`
	GradNorm        float64            `json:"grad_norm"` // before clipping
	LearningRate    float64            `json:"learning_rate"`
	Seconds         float64            `json:"seconds"`
	TokensPerSecond float64            `json:"tokens_per_second"`
	MFU             float64            `json:"mfu"`
	Time            string             `json:"time"` // RFC 3339
	SourceLoss      map[string]float64 `json:"source_loss"`
	SourceSamples   map[string]int     `json:"source_samples"`
	ExpertTokens    [][]int64          `json:"expert_tokens,omitempty"` // [layer][expert]; absent for dense models
	// [layer], nats: mean over tokens of −Σ p ln p of the router's distribution
	RouterEntropy []float64 `json:"router_entropy,omitempty"`
	// by group of tensors, in steps that measure it: ‖change of the weights‖ / ‖weights before‖
	UpdateRatio map[string]float64 `json:"update_ratio,omitempty"`
	// why the update was not made; the samples are read, but not trained on
	Skipped *spikes.Spike `json:"skipped,omitempty"`
}

// Evaluation is the loss on the validation split: means over targets, in nats.
type Evaluation struct {
	Loss          float64            `json:"loss"` // mean over all evaluated targets of all sources
	SourceLoss    map[string]float64 `json:"source_loss"`
	SourceTargets map[string]int64   `json:"source_targets"`

	// Half the width of 95 % confidence intervals, as estimated by [Evaluate]. Nil, or without the
	// source, if only one window of several was read.
	Margin       *float64           `json:"margin,omitempty"`
	SourceMargin map[string]float64 `json:"source_margin,omitempty"`

	// The same, with sources weighted by their fraction of the plan's samples. Sources without
	// validation windows are omitted.
	MixLoss   float64  `json:"mix_loss,omitempty"`
	MixMargin *float64 `json:"mix_margin,omitempty"`
}

// ResumeRecord names the checkpoint that a run resumed from.
type ResumeRecord struct {
	Checkpoint string              `json:"checkpoint"`
	Time       string              `json:"time"`
	PeakFLOPS  float64             `json:"peak_flops"`        // as in RunRecord, measured again
	Refused    []RefusedCheckpoint `json:"refused,omitempty"` // damaged newer checkpoints
	// fingerprint of the checkpoint's plan, if it differs and plan_change is accept
	OldPlan string `json:"old_plan,omitempty"`
	Plan    string `json:"plan,omitempty"` // fingerprint of the new plan
}

// metricsLine is a line of metrics.jsonl that is not a step.
type metricsLine struct {
	Run      *RunRecord       `json:"run,omitempty"`
	Step     *int64           `json:"step,omitempty"`
	Eval     *Evaluation      `json:"eval,omitempty"`
	Resumed  *ResumeRecord    `json:"resumed,omitempty"`
	Rollback *spikes.Rollback `json:"rollback,omitempty"` // before the first step whose data it skips
}

// addEntropy adds the entropies of a micro-batch. share is its share of the step's targets.
func (m *StepMetrics) addEntropy(entropy []float64, share float64) {
	if m.RouterEntropy == nil && len(entropy) > 0 {
		m.RouterEntropy = make([]float64, len(entropy))
	}
	for layer, e := range entropy {
		m.RouterEntropy[layer] += e * share
	}
}

// clear removes values that are undefined, and may not be valid JSON, if what is not finite. what
// is as in [spikes.Spike].
func (m *StepMetrics) clear(what string) {
	m.GradNorm = 0
	if what == spikes.GradNorm {
		return
	}
	m.Loss, m.AuxLoss, m.ZLoss, m.ExpertTokens, m.RouterEntropy = 0, 0, 0, nil, nil
	m.SourceLoss, m.SourceSamples = map[string]float64{}, map[string]int{}
}

// runRecord describes the run at its start.
func (r *run) runRecord(now time.Time) (*RunRecord, error) {
	var model bytes.Buffer
	if err := moe.WriteConfigJSON(&model, r.config.Model.Config, safetensors.F32); err != nil {
		return nil, err
	}
	record := &RunRecord{
		Format: 1, Mula: r.options.Version, Model: model.Bytes(),
		Parameters: r.config.Model.TotalParameters(), ActiveParameters: r.config.Model.ActiveParameters(),
		Plan: r.data.Plan.Fingerprint(), Weights: map[string]float64{},
		SequenceLength: r.data.SequenceLength, BatchSize: r.config.BatchSize, Steps: r.config.Steps,
		Device: r.device.Name(), FLOPsPerToken: r.config.Model.FLOPsPerToken(r.data.SequenceLength), PeakFLOPS: r.peak,
		Started: timestamp(now),
	}
	if r.ranks.Ranks() > 1 {
		record.Layout = r.config.Layout.String() + ", " + r.ranks.World().Name()
	}
	for _, s := range r.data.Summary().Sources {
		record.Sources = append(record.Sources, s.Name)
		record.Weights[s.Name] = s.Stages[0].Share
	}
	return record, nil
}

// A recordFile is a file of JSON lines that grows with the run. Every line is one write call.
type recordFile struct {
	f *os.File
}

// openRecordFile opens a file for appending and creates it if necessary.
func openRecordFile(path string) (*recordFile, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	return &recordFile{f}, nil
}

func (r *recordFile) append(value any) error {
	line, err := json.Marshal(value)
	if err != nil {
		return fmt.Errorf("writing %s: %w", r.f.Name(), err)
	}
	_, err = r.Write(append(line, '\n'))
	return err
}

// Write appends bytes unchanged.
func (r *recordFile) Write(p []byte) (int, error) {
	if err := fault(atomicfile.OpWrite, r.f.Name()); err != nil {
		return 0, err
	}
	n, err := r.f.Write(p)
	if err != nil {
		return n, fmt.Errorf("writing %s: %w", r.f.Name(), err)
	}
	return n, nil
}

// sync writes all lines to disk. A checkpoint is published after sync, so no checkpoint is ahead of
// its records.
func (r *recordFile) sync() error {
	if err := fault(atomicfile.OpSync, r.f.Name()); err != nil {
		return err
	}
	if err := r.f.Sync(); err != nil {
		return fmt.Errorf("writing %s: %w", r.f.Name(), err)
	}
	return nil
}

func (r *recordFile) close() error { return r.f.Close() }

// fault calls the fault injection of tests for an operation outside package atomicfile.
func fault(op atomicfile.Op, path string) error {
	if atomicfile.Fault == nil {
		return nil
	}
	if err := atomicfile.Fault(op, path); err != nil {
		return &fs.PathError{Op: string(op), Path: path, Err: err}
	}
	return nil
}

// recordPosition is the position in time of a line of metrics.jsonl or fingerprints.jsonl.
type recordPosition struct {
	Step     *int64          `json:"step"`
	Eval     json.RawMessage `json:"eval"`
	Resumed  json.RawMessage `json:"resumed"`
	Rollback json.RawMessage `json:"rollback"`
}

// before reports whether the line was written before the checkpoint of stepsDone steps. The line of
// an evaluation has the number of steps done, and is before the checkpoint of that number. Every
// other line has the number of its step.
func (p recordPosition) before(stepsDone int64) bool {
	switch {
	case p.Step == nil: // the first line
		return true
	case p.Eval != nil:
		return *p.Step <= stepsDone
	}
	return *p.Step < stepsDone
}

// cutRecords removes lines after the checkpoint of stepsDone steps from a file of JSON lines, and
// an incomplete last line. header reports whether the file has its first line. last is the step of
// the last remaining line, -1 if there is none. A missing file counts as empty.
func cutRecords(path string, stepsDone int64) (header bool, last int64, err error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, -1, nil
	}
	if err != nil {
		return false, -1, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return false, -1, err
	}
	last = -1
	var kept int64 // bytes; lines are in order of time, so the start of the file remains
	for r, number := bufio.NewReader(f), 1; ; number++ {
		line, err := r.ReadBytes('\n')
		if err == io.EOF {
			break // the line is incomplete or empty
		}
		if err != nil {
			return false, -1, fmt.Errorf("reading %s: %w", path, err)
		}
		var p recordPosition
		if err := json.Unmarshal(line, &p); err != nil {
			// After a crash of the machine, the file may end in zeros instead of bytes that did not
			// reach the disk.
			if rest, _ := io.ReadAll(r); len(bytes.Trim(append(line, rest...), "\x00\n")) == 0 {
				break
			}
			return false, -1, fmt.Errorf("%s:%d: not a line of JSON: %w; move the file away to resume without it", path,
				number, err)
		}
		if !p.before(stepsDone) {
			break
		}
		kept += int64(len(line))
		if p.Step == nil {
			header = true
		} else if p.Eval == nil && p.Resumed == nil && p.Rollback == nil {
			last = *p.Step
		}
	}
	if kept == info.Size() {
		return header, last, nil
	}
	out, err := atomicfile.Create(path)
	if err != nil {
		return false, -1, err
	}
	defer out.Abort()
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return false, -1, err
	}
	if _, err := io.CopyN(out, f, kept); err != nil {
		return false, -1, fmt.Errorf("truncating %s: %w", path, err)
	}
	return header, last, out.Publish()
}

func timestamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }
