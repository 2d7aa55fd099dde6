package report

import (
	"math"

	"mula/train/record"
)

// mostSpans is the number of spans at which neighbours are merged, so that the memory of a report
// does not grow with the run. It is far above the number of points of a curve.
const mostSpans = 8192

// A Span has consecutive steps of a run: its first step, and means over all of its steps. A short
// run has a span for each step. In longer runs, a span has 2, 4, 8, … steps.
type Span struct {
	Step  // the first one; only its numbers, if there are several
	Count int

	curves        [curveCount]track
	sourceLoss    []mean // weighted by samples
	samples       []int64
	predictions   []mean // losses of the layers of multi-token prediction, without skipped steps
	maxOverMean   []mean // of each layer
	balance       [balanceCount]mean
	routerEntropy []mean // of each layer
	dropped       []mean // choices of experts of each layer, a fraction of all; empty without a capacity
	ratios        []mean // of the updates, in the order of updateGroups
}

// The curves that a report shows with every spike.
const (
	lossCurve = iota // without skipped steps
	speedCurve
	mfuCurve
	normCurve
	rateCurve
	auxCurve
	zCurve
	curveCount
)

// The measures of the balance of experts.
const (
	meanLoad = iota // mean of the layers
	worstLoad
	meanEntropy
	worstEntropy
	balanceCount
)

// A mean is a weighted mean.
type mean struct{ value, weight float64 }

// add adds a value. It ignores NaN, and values without weight.
func (m *mean) add(value, weight float64) {
	if math.IsNaN(value) || !(weight > 0) {
		return
	}
	m.weight += weight
	m.value += (value - m.value) * (weight / m.weight)
}

// get returns the mean, or NaN if no value was added.
func (m mean) get() float64 {
	if m.weight == 0 {
		return math.NaN()
	}
	return m.value
}

// addMeans adds means to others, which it extends if necessary.
func addMeans(to *[]mean, others []mean) {
	for i, other := range others {
		if i == len(*to) {
			*to = append(*to, mean{})
		}
		(*to)[i].add(other.value, other.weight)
	}
}

// A track has the values of a curve in a span.
type track struct {
	mean      mean
	logs      mean  // of the logarithms, if all values are positive
	low, high point // extremes
}

func (t *track) add(other track) {
	if other.mean.weight == 0 {
		return
	}
	if t.mean.weight == 0 || other.low.y < t.low.y {
		t.low = other.low
	}
	if t.mean.weight == 0 || other.high.y > t.high.y {
		t.high = other.high
	}
	t.mean.add(other.mean.value, other.mean.weight)
	t.logs.add(other.logs.value, other.logs.weight)
}

// newSpan returns the span of one step.
func newSpan(s Step) Span {
	span := Span{Step: s, Count: 1, samples: append([]int64(nil), s.SourceSamples...)}
	loss := s.Loss
	if s.Skipped != nil {
		loss = math.NaN()
	}
	trained := func(value float64) float64 { // a gap without samples
		if s.Samples == 0 {
			return math.NaN()
		}
		return value
	}
	for i, y := range [curveCount]float64{lossCurve: loss, speedCurve: trained(s.TokensPerSecond),
		mfuCurve: trained(s.MFU), normCurve: trained(s.GradNorm), rateCurve: s.LearningRate,
		auxCurve: trained(s.AuxLoss), zCurve: trained(s.ZLoss)} {
		t := &span.curves[i]
		t.low = point{float64(s.Step), y}
		t.high = t.low
		t.mean.add(y, 1)
		if y > 0 {
			t.logs.add(math.Log(y), 1)
		}
	}
	for i, y := range s.SourceLoss {
		var m mean
		m.add(y, float64(s.SourceSamples[i]))
		span.sourceLoss = append(span.sourceLoss, m)
	}
	for _, y := range s.PredictionLoss {
		var m mean
		if s.Skipped == nil && y != 0 {
			m.add(y, 1)
		}
		span.predictions = append(span.predictions, m)
	}
	span.addBalance(s.Balance)
	span.routerEntropy, span.dropped = layerMeans(s.RouterEntropy), layerMeans(s.DroppedChoices)
	if len(s.UpdateRatio) > 0 {
		span.ratios = make([]mean, len(updateGroups))
		for i, group := range updateGroups {
			if ratio, ok := s.UpdateRatio[group]; ok {
				span.ratios[i].add(ratio, 1)
			}
		}
	}
	return span
}

// layerMeans returns the means of one step.
func layerMeans(values []float64) (list []mean) {
	for _, y := range values {
		var m mean
		m.add(y, 1)
		list = append(list, m)
	}
	return list
}

// addBalance sets the measures of the balance of the layers of a step.
func (s *Span) addBalance(layers []record.Balance) {
	if len(layers) == 0 {
		return
	}
	var load, entropy float64
	worst := layers[0]
	for _, b := range layers {
		var m mean
		m.add(b.MaxOverMean, 1)
		s.maxOverMean = append(s.maxOverMean, m)
		load += b.MaxOverMean
		entropy += b.Entropy
		worst.MaxOverMean = math.Max(worst.MaxOverMean, b.MaxOverMean)
		worst.Entropy = math.Min(worst.Entropy, b.Entropy)
	}
	n := float64(len(layers))
	for i, y := range [balanceCount]float64{meanLoad: load / n, worstLoad: worst.MaxOverMean, meanEntropy: entropy / n,
		worstEntropy: worst.Entropy} {
		s.balance[i].add(y, 1)
	}
}

// merge adds the steps of the next span.
func (s *Span) merge(next *Span) {
	s.Count += next.Count
	s.SourceLoss, s.SourceSamples, s.Balance, s.RouterEntropy, s.UpdateRatio = nil, nil, nil, nil, nil
	s.DroppedChoices, s.PredictionLoss = nil, nil
	for i := range s.curves {
		s.curves[i].add(next.curves[i])
	}
	for i, n := range next.samples {
		if i == len(s.samples) {
			s.samples = append(s.samples, 0)
		}
		s.samples[i] += n
	}
	addMeans(&s.sourceLoss, next.sourceLoss)
	addMeans(&s.predictions, next.predictions)
	addMeans(&s.maxOverMean, next.maxOverMean)
	addMeans(&s.routerEntropy, next.routerEntropy)
	addMeans(&s.dropped, next.dropped)
	addMeans(&s.ratios, next.ratios)
	for i, m := range next.balance {
		s.balance[i].add(m.value, m.weight)
	}
}

// middle returns the mean number of the steps.
func (s *Span) middle() float64 { return float64(s.Step.Step) + float64(s.Count-1)/2 }

// add adds a step to the spans and to the sums of a run.
func (r *Run) add(s Step) {
	if n := len(r.Spans); n > 0 && r.Spans[n-1].Count < r.perSpan {
		next := newSpan(s)
		r.Spans[n-1].merge(&next)
	} else {
		r.Spans = append(r.Spans, newSpan(s))
	}
	if len(r.Spans) > mostSpans { // the last span has a single step
		r.perSpan *= 2
		kept := 0
		for i := 0; i < len(r.Spans); i += 2 {
			span := r.Spans[i]
			if i+1 < len(r.Spans) {
				span.merge(&r.Spans[i+1])
			}
			r.Spans[kept] = span
			kept++
		}
		clear(r.Spans[kept:])
		r.Spans = r.Spans[:kept]
	}
	r.Done++
	r.Next = s.Step + 1
	r.tokens += float64(s.Tokens)
	r.seconds += s.Seconds
	if s.Skipped != nil {
		r.Skips = append(r.Skips, Skip{s.Step, *s.Skipped, s.Loss})
	}
	if !math.IsNaN(s.Loss) {
		if r.losses == 0 {
			r.firstLoss = s.Loss
		}
		if r.losses++; len(r.lastLosses) == lastLosses {
			r.lastLosses = append(r.lastLosses[:0], r.lastLosses[1:]...)
		}
		r.lastLosses = append(r.lastLosses, s.Loss)
	}
	for i, y := range s.SourceLoss {
		if i == len(r.firstSourceLoss) {
			r.firstSourceLoss = append(r.firstSourceLoss, math.NaN())
		}
		if !finite(r.firstSourceLoss[i]) {
			r.firstSourceLoss[i] = y
		}
	}
}

// stepAt returns the first step of the span with index i, or the step after the last one.
func (r *Run) stepAt(i int) float64 {
	if i < len(r.Spans) {
		return float64(r.Spans[i].Step.Step)
	}
	return float64(r.Next)
}

// smoothSpan returns the number of steps over which curves of the run are smoothed.
func (r *Run) smoothSpan() float64 { return smoothSpan(r.Done) }

// curveOf returns one mean of every span, and the weights of the means.
func curveOf(r *Run, value func(*Span) mean) (curve []point, weights []float64) {
	curve, weights = make([]point, len(r.Spans)), make([]float64, len(r.Spans))
	for i := range r.Spans {
		m := value(&r.Spans[i])
		curve[i], weights[i] = point{r.Spans[i].middle(), m.get()}, m.weight
	}
	return curve, weights
}

// smoothed returns the smoothed curve of a mean of every span.
func smoothed(r *Run, value func(*Span) mean) []point {
	curve, weights := curveOf(r, value)
	return smooth(curve, weights, max(1, r.smoothSpan()/float64(r.perSpan)))
}

// extremes returns the lowest and the highest point of a curve in every span.
func extremes(r *Run, curve int) []point {
	var points []point
	for i := range r.Spans {
		t := &r.Spans[i].curves[curve]
		switch {
		case t.mean.weight == 0:
			points = append(points, point{r.Spans[i].middle(), math.NaN()})
		case t.low == t.high:
			points = append(points, t.low)
		case t.low.x < t.high.x:
			points = append(points, t.low, t.high)
		default:
			points = append(points, t.high, t.low)
		}
	}
	return points
}
