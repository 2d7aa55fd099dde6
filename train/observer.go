package train

import (
	"context"
	"fmt"

	"mula/train/checkpoint"
	"mula/train/evaluate"
	"mula/train/record"
)

// An observer follows a run: the records, the evaluation, the checkpoints, the served metrics and
// the caller's function are observers. The loop calls the observers in the order of run.observers.
type observer interface {
	// restored follows the restore of the run's state, at the start and after a rollback.
	// checkpoint is nil at step 0.
	restored(saved *checkpoint.Checkpoint, rollback bool) error
	// stepped follows a step. An observer may add its result to p, for the observers after it.
	stepped(ctx context.Context, p *Progress) error
	// evaluated follows an evaluation.
	evaluated(e *record.Evaluation) error
	// saving precedes a checkpoint.
	saving() error
	close()
}

// passive is an observer that does nothing. Others embed it.
type passive struct{}

func (passive) restored(*checkpoint.Checkpoint, bool) error { return nil }
func (passive) stepped(context.Context, *Progress) error    { return nil }
func (passive) evaluated(*record.Evaluation) error          { return nil }
func (passive) saving() error                               { return nil }
func (passive) close()                                      {}

// observe creates the observers of this rank.
func (r *run) observe(ctx context.Context) error {
	var lines *records
	if r.leads() {
		lines = &records{run: r}
		r.observers = append(r.observers, lines)
	}
	r.observers = append(r.observers, &validation{run: r}, &saves{run: r})
	if r.history.snapshots != nil {
		r.observers = append(r.observers, &snapshots{run: r, records: lines})
	}
	if r.leads() {
		var err error
		if r.history.copies, err = newCopies(r); err != nil {
			return err
		}
		if r.history.copies != nil {
			r.observers = append(r.observers, r.history.copies)
		}
	}
	if address := r.config.MetricsListen; address != "" && r.leads() {
		server, err := record.Serve(ctx, address)
		if err != nil {
			return err
		}
		r.observers = append(r.observers, &served{run: r, server: server})
	}
	if f := r.options.Progress; f != nil {
		r.observers = append(r.observers, reported{report: f})
	}
	return nil
}

// A validation evaluates the model on the validation split at the steps of the configuration.
type validation struct {
	passive
	run *run
}

func (o *validation) stepped(ctx context.Context, p *Progress) error {
	r := o.run
	if !due(r.state.Step, *r.config.Evaluate.Every, r.config.Steps) {
		return nil
	}
	r.history.heartbeat.Beat(record.SectionEvaluate, r.state.Step)
	if err := r.optimizer.Average(ctx, true); err != nil {
		return fmt.Errorf("evaluation after step %d: %w", r.state.Step-1, err)
	}
	defer r.optimizer.Average(ctx, false)
	e, err := evaluate.Shared(ctx, r.ranks.Mesh, r.pipeline, r.data,
		evaluate.Options{Samples: r.config.Evaluate.Samples,
			BatchSize: r.config.MicroBatchSize, Attention: r.config.Attention})
	if err != nil {
		return fmt.Errorf("evaluation after step %d: %w", r.state.Step-1, err)
	}
	p.Evaluation = &e
	for _, other := range r.observers {
		if err := other.evaluated(&e); err != nil {
			return err
		}
	}
	return nil
}

// saves writes checkpoints at the steps of the configuration.
type saves struct {
	passive
	run *run
}

func (o *saves) stepped(ctx context.Context, p *Progress) (err error) {
	r := o.run
	if p.Checkpoint, err = r.advanceSave(ctx, false); err != nil {
		return err
	}
	every := *r.config.Checkpoint.Every
	switch {
	case every == 0 || r.state.Step%every != 0:
	case r.saving != nil:
		r.warn("no checkpoint is written after step %d, because %s is still being written; set checkpoint.every higher",
			r.state.Step, checkpoint.Name(r.saving.State.Step))
	case r.config.Checkpoint.Background:
		_, err = r.save(ctx, true)
	default:
		p.Checkpoint, err = r.save(ctx, false)
	}
	return err
}

// served serves the metrics of the last step.
type served struct {
	passive
	run    *run
	server *record.Server
}

func (o *served) stepped(_ context.Context, p *Progress) error {
	r := o.run
	o.server.Publish(record.Status{Version: r.options.Version, Plan: r.data.Plan.Fingerprint(), Device: r.device.Name(),
		StepsDone: r.state.Step, Steps: r.config.Steps, Tokens: r.state.Tokens, PeakFLOPS: r.start.peak,
		ExpertLayers: r.expertLayers(), Spikes: r.state.Spikes}, p.StepMetrics, p.Evaluation)
	return nil
}

func (o *served) close() { o.server.Close() }

// reported passes the progress to the caller of [Run].
type reported struct {
	passive
	report func(Progress)
}

func (o reported) stepped(_ context.Context, p *Progress) error {
	o.report(*p)
	return nil
}
