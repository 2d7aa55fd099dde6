// Package evaluate computes the loss of a model on the validation split of a plan, with confidence
// intervals.
package evaluate

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"mula/blend"
	"mula/moe"
	"mula/train/collective"
	"mula/train/pipeline"
	"mula/train/record"
	"mula/train/samples"
	"mula/xpu/comm"
)

// Options are the options of [Model].
type Options struct {
	Samples   int               // validation windows of each source, evenly spaced over its split; 0 = all
	BatchSize int               // windows computed at once; 0 = 8
	Attention samples.Attention // "" = the plan's default
	Progress  func(done, total int64)
}

// Model computes the mean loss of a model on the validation windows of a plan, over the unmasked
// targets. It skips a source that has no validation windows, or none with an unmasked target. It
// returns an error if no source remains.
//
// The margins belong to 95 % confidence intervals for the mean loss over all validation windows of
// a source. Let n of the source's V windows be read, and let s be the standard deviation of their
// mean losses, with n−1 in its denominator. The standard error is s/√n · √(1−n/V), where the second
// factor is the finite population correction. The margin is t(0.975; n−1) standard errors. If
// windows differ in the number c of unmasked targets, s weights the deviation of each window's loss
// from the mean of all by c over the mean of c: the standard error of a ratio of two means
// (Cochran, Sampling Techniques, third edition, chapter 6).
//
// The formula assumes independent draws. The windows are evenly spaced over the split, so the
// interval is too wide rather than too narrow if neighbours are similar. The margin is 0 if all
// windows are read: the loss is exact for the split, even if the split differs from the text that
// it represents. The margin of a weighted sum of sources is the root of the sum of the squares of
// weight · margin.
func Model(ctx context.Context, m *moe.Model, data *blend.Data, o Options) (record.Evaluation, error) {
	mesh := comm.NewSingleMesh()
	p, err := pipeline.New(mesh, nil, nil, m, data.SequenceLength)
	if err != nil {
		return record.Evaluation{}, err
	}
	return Shared(ctx, mesh, p, data, o)
}

// Shared is [Model] with a model that the ranks of a mesh share. All ranks call it.
func Shared(ctx context.Context, mesh *comm.Mesh, p *pipeline.Pipeline, data *blend.Data,
	o Options) (record.Evaluation, error) {
	if o.Samples < 0 || o.BatchSize < 0 {
		return record.Evaluation{}, fmt.Errorf("evaluation of %d samples in batches of %d: both numbers "+
			"must be 0 or more", o.Samples, o.BatchSize)
	}
	if o.BatchSize == 0 {
		o.BatchSize = 8
	}
	if v := p.Model.Config().VocabSize; data.Tokenizer != nil && data.Tokenizer.Vocabulary > v {
		return record.Evaluation{}, collective.OfAll(mesh.World(),
			fmt.Errorf("the model has a vocabulary of %d, but the plan's tokenizer has %d ids; evaluate on a plan "+
				"with the model's tokenizer",
				v, data.Tokenizer.Vocabulary))
	}
	counts := make([]int64, len(data.Sources)) // windows to evaluate of each source
	var done, total int64
	for i, s := range data.Sources {
		counts[i] = s.Validation
		if o.Samples > 0 {
			counts[i] = min(counts[i], int64(o.Samples))
		}
		total += counts[i]
	}
	if total == 0 {
		return record.Evaluation{}, collective.OfAll(mesh.World(),
			errors.New("the plan has no validation split; set validation in "+
				"blend.yaml and build the plan again"))
	}
	o.BatchSize = int(min(int64(o.BatchSize), total))
	e := record.Evaluation{SourceLoss: map[string]float64{}, SourceTargets: map[string]int64{},
		SourceMargin: map[string]float64{}}
	var loss float64
	var targets int64
	windows := evaluator{data: data, mesh: mesh, pipeline: p, batch: o.BatchSize,
		read: samples.NewRows(data.SequenceLength, data.Traits().Padded, o.Attention), done: func(n int) {
			if done += int64(n); o.Progress != nil {
				o.Progress(done, total)
			}
		}}
	for i, s := range data.Sources {
		if counts[i] == 0 {
			continue
		}
		losses, each, err := windows.losses(ctx, i, counts[i])
		if err != nil {
			return record.Evaluation{}, err
		}
		var sourceLoss float64
		var n int64
		for j, l := range losses {
			sourceLoss += l
			n += each[j]
		}
		if n == 0 {
			continue
		}
		var spread spreadOfLosses
		for j, l := range losses {
			if windows.read.Counted {
				spread.addWeighted(l, float64(each[j]), sourceLoss/float64(n), float64(n)/float64(len(losses)))
			} else {
				spread.add(l / float64(data.SequenceLength))
			}
		}
		if math.IsNaN(sourceLoss) || math.IsInf(sourceLoss, 0) {
			return record.Evaluation{}, collective.OfAll(mesh.World(),
				fmt.Errorf("%w: validation loss of source %q is %v", moe.ErrNotFinite, s.Name, sourceLoss))
		}
		e.SourceLoss[s.Name], e.SourceTargets[s.Name] = sourceLoss/float64(n), n
		if margin, ok := spread.margin(s.Validation); ok {
			e.SourceMargin[s.Name] = margin
		}
		loss += sourceLoss
		targets += n
	}
	if targets == 0 {
		return record.Evaluation{}, collective.OfAll(mesh.World(),
			errors.New("all targets of the validation split are masked: each "+
				"is the first token of a document, or padding"))
	}
	e.Loss = loss / float64(targets)
	weigh(&e, data.Plan)
	return e, nil
}

// An evaluator computes the losses of validation windows, which are divided among ranks.
type evaluator struct {
	data     *blend.Data
	mesh     *comm.Mesh
	pipeline *pipeline.Pipeline
	batch    int // windows at once
	done     func(windows int)

	read   samples.Rows
	starts []int32 // of the documents of a sample
	passes int     // of this rank, for the current source
}

// losses returns on all ranks the sums of the cross entropies of n windows of a source, in order,
// and the number of unmasked targets of each window. The windows are evenly spaced over the split.
func (e *evaluator) losses(ctx context.Context, source int, n int64) ([]float64, []int64, error) {
	ranks := e.pipeline.Model.Sequence().Size() // with the same windows
	readers := e.mesh.Size(comm.Data) / ranks
	shares, most := make([]int, readers+1), 0 // passes of the rank with the most passes
	for reader := range readers {
		shares[reader+1] = int(n/int64(readers)*int64(reader+1) + n%int64(readers)*int64(reader+1)/int64(readers))
		most = max(most, (shares[reader+1]-shares[reader]+e.batch-1)/e.batch)
	}
	all, targets := make([]float64, n), make([]int64, n)
	own := e.mesh.OwnIndex(comm.Data) / ranks
	from, to := shares[own], shares[own+1]
	e.passes = 0
	err := e.compute(ctx, source, n, from, all[from:to], targets[from:to])
	// A rank without windows, or with a read error, still computes with its experts and takes part
	// in its pipeline.
	switch {
	case e.mesh.Size(comm.EP) > 1:
	case e.mesh.Size(comm.PP) > 1, ranks > 1:
		most = (to - from + e.batch - 1) / e.batch
	default:
		most = 0
	}
	e.read.Clear()
	for e.passes < most {
		if _, lost := e.pass(ctx, min(e.batch, max(0, to-from-e.passes*e.batch))); lost != nil {
			return nil, nil, errors.Join(err, lost)
		}
	}
	if err := collective.Agree(ctx, e.mesh.World(), err); err != nil {
		return nil, nil, err
	}
	bounds := make([]int, e.mesh.Ranks()+1) // of the ranks with losses
	for rank := range e.mesh.Ranks() {
		bounds[rank+1] = bounds[rank]
		reader := e.mesh.Index(rank, comm.Data)
		if e.mesh.Index(rank, comm.PP) == e.mesh.Size(comm.PP)-1 && reader%ranks == 0 {
			bounds[rank+1] = shares[reader/ranks+1]
		}
	}
	err = comm.AllGather(ctx, e.mesh.World(), all, bounds)
	switch {
	case err == nil && e.read.Counted:
		err = comm.AllGather(ctx, e.mesh.World(), targets, bounds)
	case err == nil:
		for i := range targets {
			targets[i] = int64(e.data.SequenceLength)
		}
	}
	return all, targets, err
}

// compute sets losses and targets for the windows [from, from+len(losses)) of n.
func (e *evaluator) compute(ctx context.Context, source int, n int64, from int, losses []float64,
	targets []int64) error {
	// Window ⌊j·V/n⌋ is the j-th of n windows that are evenly spaced over V.
	e.read.Clear()
	all, end := e.data.Sources[source].Validation, int64(from+len(losses))
	var window, j int64
	for sample := range e.data.Validation(source) {
		if j == end {
			break
		}
		if window == spread(j, all, n) {
			if j++; j > int64(from) {
				if err := e.take(sample); err != nil {
					return err
				}
			}
			if rows := e.read.Len(); rows == e.batch || rows > 0 && j == end {
				copy(targets, e.read.Targets)
				if err := e.forward(ctx, losses[:rows]); err != nil {
					return err
				}
				losses, targets = losses[rows:], targets[rows:]
			}
		}
		window++
	}
	return nil
}

// take reads a window.
func (e *evaluator) take(sample blend.Sample) (err error) {
	at, width, filled := len(e.read.Tokens), e.data.SampleTokens(), e.data.SampleTokens()
	e.read.Tokens = slices.Grow(e.read.Tokens, width)[:at+width]
	if err := e.data.Tokens(e.read.Tokens[at:], sample); err != nil {
		return err
	}
	if e.read.Counted {
		if e.starts, filled, err = e.data.DocumentStarts(e.starts[:0], sample); err != nil {
			return err
		}
	}
	e.read.End(e.starts, filled)
	return nil
}

// forward computes the losses of the windows that were read.
func (e *evaluator) forward(ctx context.Context, losses []float64) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	stats, err := e.pass(ctx, len(losses))
	if err != nil {
		return err
	}
	copy(losses, stats.RowLoss)
	e.read.Clear()
	e.done(len(losses))
	return nil
}

// pass runs a batch of rows rows through the model. All rows were read, or none.
func (e *evaluator) pass(ctx context.Context, rows int) (moe.Stats, error) {
	batch := e.read.Batch(0, e.read.Len())
	e.passes++ // also after an error, because the other ranks have counted the pass
	return e.pipeline.Loss(ctx, batch, rows)
}

// weigh sets the loss of the mix, and the margins of weighted sums.
func weigh(e *record.Evaluation, p *blend.Plan) {
	var samples, targets int64
	var margin, mixMargin float64 // squared
	sources := p.Summary().Sources
	for _, s := range sources {
		if n := e.SourceTargets[s.Name]; n > 0 {
			samples += s.Samples
			targets += n
		}
	}
	for _, s := range sources {
		n := e.SourceTargets[s.Name]
		if n == 0 {
			continue
		}
		m := e.SourceMargin[s.Name]
		if samples > 0 {
			share := float64(s.Samples) / float64(samples)
			e.MixLoss += share * e.SourceLoss[s.Name]
			mixMargin += share * share * m * m
		}
		share := float64(n) / float64(targets)
		margin += share * share * m * m
	}
	if len(e.SourceMargin) < len(e.SourceLoss) { // a single source has no margin
		return
	}
	margin, mixMargin = math.Sqrt(margin), math.Sqrt(mixMargin)
	e.Margin = &margin
	if samples > 0 {
		e.MixMargin = &mixMargin
	}
}

// spreadOfLosses accumulates the mean and variance of the windows' losses with Welford's
// recurrence.
type spreadOfLosses struct {
	n             int64
	mean, squares float64 // squares: sum of the squared distances from the mean
}

func (s *spreadOfLosses) add(x float64) {
	s.n++
	d := x - s.mean
	s.mean += d / float64(s.n)
	s.squares += d * (x - s.mean)
}

// addWeighted adds a window whose loss is the sum over count targets. mean is the mean loss of the
// targets of all windows, and targets the mean number of targets in a window. All windows must be
// added with addWeighted, or none.
func (s *spreadOfLosses) addWeighted(loss, count, mean, targets float64) {
	s.n++
	d := (loss - mean*count) / targets
	s.squares += d * d
}

// margin returns half the width of the 95 % confidence interval of the mean over all windows. It is
// unknown if s has one of several windows.
func (s *spreadOfLosses) margin(windows int64) (margin float64, ok bool) {
	if s.n >= windows {
		return 0, true
	}
	if s.n < 2 {
		return 0, false
	}
	n := float64(s.n)
	standardError := math.Sqrt(s.squares / (n - 1) / n * (1 - n/float64(windows)))
	return studentT(s.n-1) * standardError, true
}

// studentT returns the 97.5 % quantile of Student's t distribution. It uses exact values for one
// and two degrees of freedom. For more it uses the expansion of Cornish and Fisher (Abramowitz and
// Stegun 26.7.5), whose error is below 0.2 %.
func studentT(degrees int64) float64 {
	switch degrees {
	case 1:
		return 12.706204736
	case 2:
		return 4.302652730
	}
	const z = 1.959963985 // of the normal distribution
	const z3, z5, z7, z9 = z * z * z, z * z * z * z * z, z * z * z * z * z * z * z, z * z * z * z * z * z * z * z * z
	v := float64(degrees)
	return z + (z3+z)/(4*v) + (5*z5+16*z3+3*z)/(96*v*v) + (3*z7+19*z5+17*z3-15*z)/(384*v*v*v) +
		(79*z9+776*z7+1482*z5-1920*z3-945*z)/(92160*v*v*v*v)
}

// spread returns ⌊j·n/count⌋ without overflow, for j < count ≤ n.
func spread(j, n, count int64) int64 { return j*(n/count) + j*(n%count)/count }
