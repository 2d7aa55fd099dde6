package train

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"time"

	"mula/blend/fingerprint"
	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/moe"
	"mula/moe/safetensors"
	"mula/train/checkpoint"
	"mula/train/record"
	"mula/train/rundir"
	"mula/train/spikes"
	"mula/train/tensorboard"
)

// resumeRecord names the checkpoint that a run resumed from.
type resumeRecord struct {
	Checkpoint string               `json:"checkpoint"`
	Time       string               `json:"time"`
	PeakFLOPS  float64              `json:"peak_flops"`        // as in [record.Run], measured again
	Refused    []checkpoint.Refused `json:"refused,omitempty"` // damaged newer checkpoints
	// fingerprint of the checkpoint's plan, if it differs and plan_change is accept
	OldPlan string `json:"old_plan,omitempty"`
	Plan    string `json:"plan,omitempty"` // fingerprint of the new plan
}

// metricsLine is a line of metrics.jsonl that is not a step.
type metricsLine struct {
	Run      *record.Run        `json:"run,omitempty"`
	Step     *int64             `json:"step,omitempty"`
	Eval     *record.Evaluation `json:"eval,omitempty"`
	Resumed  *resumeRecord      `json:"resumed,omitempty"`
	Rollback *spikes.Rollback   `json:"rollback,omitempty"` // before the first step whose data it skips
	Snapshot *record.Snapshot   `json:"snapshot,omitempty"`
}

// records writes metrics.jsonl, fingerprints.jsonl, skips.yaml and the event files of TensorBoard.
type records struct {
	run          *run
	metrics      *record.File
	fingerprints *record.File
	log          *fingerprint.Writer // writes to fingerprints
	board        *tensorboard.Writer
}

// restored removes records after the checkpoint, or starts new records. back reports whether this
// run wrote the records and makes a rollback.
func (o *records) restored(saved *checkpoint.Checkpoint, back bool) (err error) {
	r := o.run
	o.close()
	now := time.Now()
	plan := r.data.Plan.Fingerprint()
	oldPlan := r.state.Cursor.Plan
	r.takePlan()
	if saved == nil && !back {
		names, err := r.olderLogs()
		if err != nil {
			return err
		}
		for _, name := range append(names, rundir.MetricsFile, fingerprint.LogFile, rundir.TensorBoardDir) {
			if _, err := r.dir.FS.Stat(r.dir.Join(name)); err == nil {
				r.warn("%s is from a run without a checkpoint; replacing it", r.dir.Join(name))
			}
			if err := filesystem.RemoveAll(r.dir.FS, r.dir.Join(name)); err != nil {
				return err
			}
		}
	}
	header, last, err := record.Cut(r.dir.FS, r.dir.Join(rundir.MetricsFile), r.state.Step)
	if err != nil {
		return err
	}
	if last != r.state.Step-1 {
		r.warn("%s ends with step %d, but the checkpoint is of step %d; the steps in between are not recorded",
			r.dir.Join(rundir.MetricsFile), last, r.state.Step-1)
	}
	if o.metrics, err = record.Open(r.dir.FS, r.dir.Join(rundir.MetricsFile)); err != nil {
		return err
	}
	if !header {
		line, err := r.runRecord(now)
		if err != nil {
			return err
		}
		if err := o.metrics.Append(metricsLine{Run: line}); err != nil {
			return err
		}
	}

	// The log of the checkpoint's plan ends at the checkpoint. A process that was killed before its
	// first checkpoint with the new plan may have renamed this log already. The log of the new plan
	// then has its name.
	if header, last, err = o.openLog(oldPlan); err != nil {
		return err
	}
	if last != r.state.Step-1 {
		r.warn("%s ends with step %d, but the checkpoint is of step %d; the steps in between are not recorded",
			r.dir.Join(fingerprint.LogFile), last, r.state.Step-1)
	}
	if oldPlan != plan {
		if header, _, err = o.openLog(plan); err != nil {
			return err
		}
	}
	if o.fingerprints, err = record.Open(r.dir.FS, r.dir.Join(fingerprint.LogFile)); err != nil {
		return err
	}
	o.log = fingerprint.ResumeWriter(o.fingerprints)
	if !header {
		o.log, err = fingerprint.NewWriter(o.fingerprints,
			fingerprint.Header{Plan: plan, SequenceLength: r.data.SequenceLength, BatchSize: r.config.BatchSize})
		if err != nil {
			return err
		}
	}

	if err := r.writeSkips(); err != nil {
		return err
	}
	if o.board, err = tensorboard.Create(r.dir.FS, r.dir.Join(rundir.TensorBoardDir), r.state.Step, now); err != nil {
		return err
	}
	if err := atomicfile.On(r.dir.FS).SyncDir(r.dir.Path); err != nil { // the files themselves must be on disk, too
		return err
	}
	if saved == nil || back && oldPlan == plan {
		return nil
	}
	if !back {
		r.history.resumed = saved.Name()
	}
	resumed := &resumeRecord{Checkpoint: saved.Name(), Time: record.Timestamp(now), PeakFLOPS: r.start.peak,
		Refused: r.history.refused}
	if oldPlan != plan {
		resumed.OldPlan, resumed.Plan = oldPlan, plan
	}
	if oldPlan != plan && !back {
		r.warn("the plan has changed from %.16s… to %.16s…; resuming at position %d of the new plan", oldPlan,
			plan, r.state.Cursor.Position)
	}
	return o.metrics.Append(metricsLine{Step: &r.state.Step, Resumed: resumed})
}

// olderLogs returns the names of the logs of other plans in the run directory.
func (r *run) olderLogs() (names []string, err error) {
	entries, err := r.dir.FS.ReadDir(r.dir.Path)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if match, err := path.Match(fingerprint.OlderLogFile("*"), e.Name()); err != nil {
			return nil, err
		} else if match {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// runRecord describes the run at its start.
func (r *run) runRecord(now time.Time) (*record.Run, error) {
	var model bytes.Buffer
	if err := moe.WriteConfigJSON(&model, r.config.Model.Config, safetensors.F32); err != nil {
		return nil, err
	}
	line := &record.Run{
		Format: 1, Mula: r.options.Version, Model: model.Bytes(),
		Parameters: r.config.Model.TotalParameters(), ActiveParameters: r.config.Model.ActiveParameters(),
		Plan: r.data.Plan.Fingerprint(), Weights: map[string]float64{},
		SequenceLength: r.data.SequenceLength, BatchSize: r.config.BatchSize, Steps: r.config.Steps,
		Device: r.device.Name(), FLOPsPerToken: r.config.Model.FLOPsPerToken(r.data.SequenceLength),
		PeakFLOPS: r.start.peak,
		Started:   record.Timestamp(now),
	}
	if r.config.Model.DenseLayers != "" {
		line.ExpertLayers = r.expertLayers()
	}
	if r.ranks.Ranks() > 1 {
		line.Layout = r.config.Layout.String() + ", " + r.ranks.World().Name()
	}
	for _, s := range r.data.Summary().Sources {
		line.Sources = append(line.Sources, s.Name)
		line.Weights[s.Name] = s.Stages[0].Share
	}
	return line, nil
}

// expertLayers returns the numbers of the model's layers with experts.
func (r *run) expertLayers() []int { return r.config.Model.ExpertLayers(0, r.config.Model.AllLayers()) }

// openLog makes fingerprints.jsonl the log of the given plan up to the current step, if such a log
// exists. A log belongs to one plan. openLog renames the log of another plan, and restores the log
// of this plan. header and last are as in [record.Cut].
func (o *records) openLog(plan string) (header bool, last int64, err error) {
	r := o.run
	path := r.dir.Join(fingerprint.LogFile)
	if now := planOfLog(r.dir.FS, path); now != plan {
		if now != "" {
			if err := r.dir.FS.Rename(path, r.dir.Join(fingerprint.OlderLogFile(now))); err != nil {
				return false, -1, err
			}
		}
		err := r.dir.FS.Rename(r.dir.Join(fingerprint.OlderLogFile(plan)), path)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return false, -1, err
		}
	}
	return record.Cut(r.dir.FS, path, r.state.Step)
}

// planOfLog returns the fingerprint of a log's plan, or "" if the log does not exist or its first
// line is incomplete.
func planOfLog(fsys filesystem.FS, path string) string {
	f, err := filesystem.Open(fsys, path)
	if err != nil {
		return ""
	}
	defer f.Close()
	log, err := fingerprint.NewReader(f, path)
	if err != nil {
		return ""
	}
	return log.Header.Plan
}

// stepped writes the lines of a step.
func (o *records) stepped(_ context.Context, p *Progress) error {
	r, m := o.run, p.StepMetrics
	if err := o.log.Write(r.batch.hasher.Step(m.Step, m.First)); err != nil {
		return err
	}
	if r.state.Spikes != nil {
		for _, back := range r.state.Spikes.Rollbacks {
			if back.LeftOut.From == m.First {
				if err := o.metrics.Append(metricsLine{Step: &m.Step, Rollback: &back}); err != nil {
					return err
				}
			}
		}
	}
	every := r.config.Log.ExpertCountsEvery
	m.Summarise(every > 0 && (m.Step < every || m.Step%every == 0)) // a short run has all counts
	if err := o.metrics.Append(m); err != nil {
		return err
	}
	if m.Samples == 0 {
		return nil
	}
	scalars := []tensorboard.Scalar{
		{Tag: "train/loss", Value: m.Loss}, {Tag: "train/aux_loss", Value: m.AuxLoss}, {Tag: "train/z_loss",
			Value: m.ZLoss},
		{Tag: "train/grad_norm", Value: m.GradNorm}, {Tag: "train/learning_rate", Value: m.LearningRate},
		{Tag: "train/tokens_per_second", Value: m.TokensPerSecond}, {Tag: "train/mfu", Value: m.MFU},
	}
	if s := m.Skipped; s != nil && s.NotFinite {
		scalars = scalars[4:] // some of the others have no value
	}
	for k, loss := range m.PredictionLoss {
		scalars = append(scalars, tensorboard.Scalar{Tag: fmt.Sprintf("train/prediction_loss_%d", k+1), Value: loss})
	}
	layers := o.run.expertLayers()
	for i, entropy := range m.RouterEntropy {
		scalars = append(scalars, tensorboard.Scalar{Tag: fmt.Sprintf("router_entropy/layer_%d", layers[i]),
			Value: entropy})
	}
	for i, dropped := range m.DroppedChoices {
		scalars = append(scalars, tensorboard.Scalar{Tag: fmt.Sprintf("dropped_choices/layer_%d", layers[i]),
			Value: dropped})
	}
	for _, name := range slices.Sorted(maps.Keys(m.UpdateRatio)) {
		scalars = append(scalars, tensorboard.Scalar{Tag: "update_ratio/" + name, Value: m.UpdateRatio[name]})
	}
	for _, name := range slices.Sorted(maps.Keys(m.SourceLoss)) {
		scalars = append(scalars, tensorboard.Scalar{Tag: "loss/" + name, Value: m.SourceLoss[name]})
	}
	return o.board.Write(m.Step, time.Now(), scalars)
}

// evaluated writes the line of an evaluation.
func (o *records) evaluated(e *record.Evaluation) error {
	step := o.run.state.Step
	if err := o.metrics.Append(metricsLine{Step: &step, Eval: e}); err != nil {
		return err
	}
	scalars := []tensorboard.Scalar{{Tag: "eval/loss", Value: e.Loss}}
	for _, name := range slices.Sorted(maps.Keys(e.SourceLoss)) {
		scalars = append(scalars, tensorboard.Scalar{Tag: "eval/" + name, Value: e.SourceLoss[name]})
	}
	// The points belong to the step before, because a resumed run hides points at its first step
	// and later.
	return o.board.Write(step-1, time.Now(), scalars)
}

// saving syncs the records, so that no checkpoint is ahead of them.
func (o *records) saving() error { return errors.Join(o.metrics.Sync(), o.fingerprints.Sync()) }

func (o *records) close() {
	for _, f := range []*record.File{o.metrics, o.fingerprints} {
		if f != nil {
			f.Close()
		}
	}
	if o.board != nil {
		o.board.Close()
	}
	*o = records{run: o.run}
}
