package report

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"mula/internal/page"
	"mula/internal/quantity"
	"mula/train/record"
)

// The widths and heights of drawings: over the full page, and in two columns.
const (
	wide, wideHeight = 1120, 380
	half, halfHeight = 640, 310
)

// Numbers of points or columns to which curves and areas are thinned.
const (
	curvePoints  = 400
	shareColumns = 160
	heatColumns  = 120
	mostDots     = 60 // more dots would touch
)

// marksOf returns marks for the resumes and rollbacks of a run.
func marksOf(r *Run) []mark {
	var marks []mark
	for _, m := range r.Resumes {
		marks = append(marks, mark{float64(m.Step), fmt.Sprintf("resumed before step %d from %s", m.Step, m.Checkpoint),
			resumed})
	}
	for _, b := range r.Rollbacks {
		marks = append(marks, mark{float64(b.Step), fmt.Sprintf("the data of steps %d to %d is skipped: %s at step %d",
			b.Step, b.Spiked, b.Spike, b.Spiked), rolledBack})
	}
	return marks
}

// skipsOf returns the steps of a run whose update was skipped: marks, and the loss of each step.
func skipsOf(r *Run) (marks []mark, losses []point) {
	for _, s := range r.Skips {
		at := float64(s.Step)
		marks = append(marks, mark{at, fmt.Sprintf("step %d skipped: %s", s.Step, s.Spike), skipped})
		losses = append(losses, point{at, s.Loss}, point{at, math.NaN()}) // a gap after each point
	}
	return marks, losses
}

// rawAndSmooth returns the two lines that show a noisy curve. A short run has only the second line.
// With logIfWide, values that lineChart draws on a logarithmic axis are averaged as logarithms.
// Otherwise a spike of 1,000 would hide the next hundred steps.
func rawAndSmooth(r *Run, name string, colour, curve int, logIfWide bool) []curveSeries {
	raw := extremes(r, curve)
	if r.smoothSpan() <= 1 {
		return []curveSeries{{name: name, colour: colour, points: means(raw, curvePoints)}}
	}
	lo, hi := math.Inf(1), math.Inf(-1)
	for _, p := range raw {
		if finite(p.y) {
			lo, hi = min(lo, p.y), max(hi, p.y)
		}
	}
	var strong []point
	if logIfWide && wideSpread(lo, hi) {
		strong = means(smoothed(r, func(s *Span) mean { return s.curves[curve].logs }), curvePoints)
		for i := range strong {
			strong[i].y = math.Exp(strong[i].y)
		}
	} else {
		strong = means(smoothed(r, func(s *Span) mean { return s.curves[curve].mean }), curvePoints)
	}
	return []curveSeries{
		{colour: colour, faint: true, points: envelope(raw, curvePoints)},
		{name: name, colour: colour, points: strong},
	}
}

func smoothText(n int) string {
	if span := smoothSpan(n); span > 1 {
		return fmt.Sprintf(" Pale: each step; strong: smoothed over about %.0f steps.", span)
	}
	return ""
}

// lossFigures overlays the losses of all runs and their evaluations: over all steps, and over the
// second half if the first steps would make the second half look flat.
func lossFigures(names []string, runs []*Run) []page.Figure {
	chart := lineChart{label: "loss over steps", width: wide, height: wideHeight, yLabel: "loss (nats per token)"}
	evaluated, left, longest := false, false, 0
	text := "Mean cross entropy of each step."
	for i, run := range runs {
		name := names[i]
		if len(runs) == 1 {
			name = "training"
			text += smoothText(run.Done)
		}
		longest = max(longest, run.Done)
		chart.series = append(chart.series, rawAndSmooth(run, name, i, lossCurve, false)...)
		skips, losses := skipsOf(run)
		for _, m := range append(marksOf(run), skips...) {
			if len(runs) > 1 {
				m.label = name + ": " + m.label
			}
			chart.marks = append(chart.marks, m)
		}
		if len(losses) > 0 {
			left = true
			chart.series = append(chart.series, curveSeries{name: names[i] + ", skipped", quiet: true, colour: i,
				dots: true, points: losses})
		}
		chart.until = max(chart.until, float64(run.Next))
		if len(run.Evaluations) == 0 {
			continue
		}
		evaluated = true
		s := curveSeries{name: names[i] + ", evaluation", quiet: true, colour: i,
			dots: len(run.Evaluations) <= mostDots}
		if len(runs) == 1 {
			s.name, s.quiet, s.colour = "evaluation", false, 1
		}
		for _, e := range run.Evaluations {
			s.points = append(s.points, point{float64(e.Step), e.Loss})
		}
		s.points = means(s.points, curvePoints)
		chart.series = append(chart.series, s)
	}
	if len(runs) > 1 {
		text += " Pale: each step; strong: smoothed."
	}
	if evaluated && len(runs) > 1 {
		text += " With dots: evaluation on validation windows."
	}
	if left {
		text += " Single dots: steps that were skipped."
	}
	figures := []page.Figure{{Title: "Loss", Text: text, Chart: chart.svg()}}
	if longest >= 100 {
		chart.label, chart.from = "loss over the second half of the steps", math.Floor(chart.until/2)
		figures = append(figures, page.Figure{Title: "Loss, second half", Text: "The same losses, on a larger scale.",
			Chart: chart.svg()})
	}
	return figures
}

func sectionOf(name string, r *Run) section {
	s := section{Name: name, Sources: sourceRows(r), Config: configRows(r)}
	if r.Torn != "" {
		s.Notes = append(s.Notes,
			"The last line of the metrics is incomplete and was skipped: "+r.Torn+". The run is writing the line, "+
				"or was stopped while writing it.")
	}
	for _, m := range r.Resumes {
		if m.OldPlan != "" {
			s.Notes = append(s.Notes, fmt.Sprintf("Before step %d the run changed its plan; until then it used "+
				"plan %s. Planned shares are from the first plan.", m.Step, m.OldPlan))
		}
		if len(m.Refused) > 0 {
			s.Notes = append(s.Notes, fmt.Sprintf("Before step %d the run resumed from %s, because newer checkpoints "+
				"were damaged: %s.", m.Step, m.Checkpoint, strings.Join(m.Refused, ", ")))
		}
	}
	if r.Done == 0 {
		s.Notes = append(s.Notes, "The run has done no step yet.")
	}
	add := func(title string, figures ...page.Figure) {
		g := group{Title: title}
		for _, f := range figures {
			if f.Chart != "" {
				g.Figures = append(g.Figures, f)
			}
		}
		if len(g.Figures) > 0 {
			s.Figures = append(s.Figures, g)
		}
	}
	add("Loss by source", sourceLossFigure(r), evaluationFigure(r))
	add("Multi-token prediction", predictionFigure(r))
	add("Mixture", drawnFigure(r), cumulativeFigure(r))
	speed := []page.Figure{
		stepFigure(r, "Tokens per second", "Training speed of each step.", "tokens/s", true, false, speedCurve),
		mfuFigure(r), stepFigure(r, "Gradient norm", "Before clipping.", "norm", false, true, normCurve),
		rateFigure(r), updateRatioFigure(r),
	}
	for _, f := range []struct {
		curve              int
		title, text, label string
		logIfWide          bool
	}{
		{auxCurve, "Auxiliary loss", "Load balancing loss of the router, without its coefficient. Lower means a more " +
			"even load.", "auxiliary loss", false},
		{zCurve, "Router z-loss", "Mean squared log-sum-exp of the router's logits, without its coefficient.", "z-loss",
			true},
	} {
		if used(r, f.curve) {
			speed = append(speed, stepFigure(r, f.title, f.text, f.label, false, f.logIfWide, f.curve))
		}
	}
	add("Speed and optimizer", speed...)
	experts := []page.Figure{loadFigure(r), imbalanceFigure(r), balanceFigure(r), entropyFigure(r),
		routerEntropyFigure(r)}
	if slices.ContainsFunc(r.Spans, func(s Span) bool { return len(s.dropped) > 0 }) {
		experts = append(experts, droppedFigure(r))
	}
	add("Experts", experts...)
	return s
}

// used reports whether a curve has a value other than 0. Otherwise the run does not use it.
func used(r *Run, curve int) bool {
	return slices.ContainsFunc(r.Spans, func(s Span) bool {
		t := s.curves[curve]
		return t.mean.weight > 0 && (t.low.y != 0 || t.high.y != 0)
	})
}

// stepFigure shows one noisy value of every step.
func stepFigure(r *Run, title, text, yLabel string, fromZero, logIfWide bool, curve int) page.Figure {
	chart := lineChart{
		label: title + " over steps", width: half, height: halfHeight, yLabel: yLabel, fromZero: fromZero,
		logIfWide: logIfWide,
		series:    rawAndSmooth(r, "last", 0, curve, logIfWide), marks: marksOf(r), until: float64(r.Next),
	}
	return page.Figure{Title: title, Text: text + smoothText(r.Done), Chart: chart.svg()}
}

// rateFigure shows the learning rate.
func rateFigure(r *Run) page.Figure {
	chart := lineChart{
		label: "Learning rate over steps", width: half, height: halfHeight, yLabel: "learning rate", fromZero: true,
		series: []curveSeries{{name: "last", points: envelope(extremes(r, rateCurve), curvePoints/2)}},
		marks:  marksOf(r), until: float64(r.Next),
	}
	return page.Figure{Title: "Learning rate", Text: "As set by the schedule.", Chart: chart.svg()}
}

func sourceLossFigure(r *Run) page.Figure {
	chart := lineChart{label: "loss of each source over steps", width: half, height: halfHeight,
		yLabel: "loss (nats per token)", marks: marksOf(r), until: float64(r.Next)}
	span := r.smoothSpan()
	for i, name := range r.Info.Sources {
		curve := smoothed(r, sourceLoss(i))
		chart.series = append(chart.series, curveSeries{name: name, colour: i, points: means(curve, curvePoints)})
	}
	text := "Mean cross entropy of the samples of each source."
	if span > 1 {
		text += fmt.Sprintf(" Smoothed over about %.0f steps, weighted by samples.", span)
	}
	return page.Figure{Title: "Training", Text: text, Chart: chart.svg()}
}

// predictionFigure shows the losses of the layers of multi-token prediction, if the run has them.
func predictionFigure(r *Run) page.Figure {
	layers := 0
	for i := range r.Spans {
		layers = max(layers, len(r.Spans[i].predictions))
	}
	if layers == 0 {
		return page.Figure{}
	}
	chart := lineChart{label: "loss of each layer of multi-token prediction over steps", width: half,
		height: halfHeight, yLabel: "loss (nats per token)", marks: marksOf(r), until: float64(r.Next)}
	for layer := range layers {
		curve := smoothed(r, func(s *Span) mean {
			if layer >= len(s.predictions) {
				return mean{}
			}
			return s.predictions[layer]
		})
		chart.series = append(chart.series, curveSeries{name: fmt.Sprintf("%d tokens ahead", layer+2), colour: layer,
			points: means(curve, curvePoints)})
	}
	text := "Mean cross entropy of the tokens that each layer of multi-token prediction predicts. The model itself " +
		"predicts the next token."
	if span := r.smoothSpan(); span > 1 {
		text += fmt.Sprintf(" Smoothed over about %.0f steps.", span)
	}
	return page.Figure{Title: "Loss of multi-token prediction", Text: text, Chart: chart.svg()}
}

// sourceLoss returns the function that returns the loss of a source in a span.
func sourceLoss(source int) func(*Span) mean {
	return func(s *Span) mean {
		if source >= len(s.sourceLoss) { // before a change of the plan
			return mean{}
		}
		return s.sourceLoss[source]
	}
}

func evaluationFigure(r *Run) page.Figure {
	chart := lineChart{label: "evaluation loss of each source over steps", width: half, height: halfHeight,
		yLabel: "loss (nats per token)", xLabel: "steps done", marks: marksOf(r), until: float64(r.Next)}
	for i, name := range r.Info.Sources {
		s := curveSeries{name: name, colour: i, dots: len(r.Evaluations) <= mostDots}
		for _, e := range r.Evaluations {
			s.points = append(s.points, point{float64(e.Step), e.SourceLoss[i]})
		}
		s.points = means(s.points, curvePoints)
		chart.series = append(chart.series, s)
	}
	return page.Figure{Title: "Evaluation", Text: "On validation windows of each source.", Chart: chart.svg()}
}

// columns divides n steps into at most most ranges. Range i has the steps [edge i, edge i+1).
func columns(n, most int) []int {
	k := min(n, most)
	edges := make([]int, k+1)
	for i := range edges {
		edges[i] = i * n / max(k, 1)
	}
	return edges
}

func drawnFigure(r *Run) page.Figure {
	if r.Done == 0 || len(r.Info.Sources) == 0 {
		return page.Figure{}
	}
	edges := columns(len(r.Spans), shareColumns)
	chart := shareChart{
		label: "share of samples drawn from each source", width: half, height: halfHeight, names: r.Info.Sources,
		planned: plannedShares(r), marks: marksOf(r),
	}
	var all float64
	for i := range len(edges) - 1 {
		shares := make([]float64, len(r.Info.Sources))
		for _, s := range r.Spans[edges[i]:edges[i+1]] {
			for j, n := range s.samples {
				shares[j] += float64(n)
			}
		}
		if total := sum(shares); total > 0 {
			all += total
			for j := range shares {
				shares[j] /= total
			}
		}
		chart.shares = append(chart.shares, shares)
	}
	if all == 0 {
		return page.Figure{}
	}
	for _, e := range edges {
		chart.edges = append(chart.edges, r.stepAt(e))
	}
	text := "Samples drawn from each source"
	if per := float64(r.Done) / float64(len(edges)-1); per > 1 {
		text += fmt.Sprintf(", over ranges of about %.0f steps.", per)
	} else {
		text += ", step by step."
	}
	if chart.planned != nil {
		text += " Dashed: the borders by the plan's weights at step 0. Labels: the last range."
	}
	return page.Figure{Title: "As drawn", Text: text, Chart: chart.svg()}
}

func cumulativeFigure(r *Run) page.Figure {
	if r.Done == 0 || len(r.Info.Sources) == 0 {
		return page.Figure{}
	}
	chart := lineChart{
		label: "share of all samples drawn so far, by source", width: half, height: halfHeight, xLabel: "steps done",
		yLabel:   "share of all samples so far",
		fromZero: true, percent: true, marks: marksOf(r), until: float64(r.Next),
	}
	edges := columns(len(r.Spans), curvePoints)
	planned := plannedShares(r)
	total := make([]float64, len(edges))
	for i := range len(edges) - 1 {
		total[i+1] = total[i]
		for _, s := range r.Spans[edges[i]:edges[i+1]] {
			for _, n := range s.samples {
				total[i+1] += float64(n)
			}
		}
	}
	first, end := r.stepAt(0), float64(r.Next)
	for j, name := range r.Info.Sources {
		line := curveSeries{name: name, colour: j}
		var drawn float64
		for i := range len(edges) - 1 {
			for _, s := range r.Spans[edges[i]:edges[i+1]] {
				if j < len(s.samples) {
					drawn += float64(s.samples[j])
				}
			}
			line.points = append(line.points, point{r.stepAt(edges[i+1]), drawn / total[i+1]})
		}
		chart.series = append(chart.series, line)
		if planned != nil {
			chart.series = append(chart.series, curveSeries{name: name + ", planned", colour: j, planned: true,
				points: []point{{first, planned[j]}, {end, planned[j]}}})
		}
	}
	text := "Share of all samples so far that came from each source."
	if planned != nil {
		text += " Dashed: the plan's weights at step 0."
	}
	return page.Figure{Title: "Cumulative", Text: text, Chart: chart.svg()}
}

// loadFigure draws the load of every expert in the last steps.
func loadFigure(r *Run) page.Figure {
	if len(r.ExpertLoad) == 0 {
		return page.Figure{}
	}
	m := heatMap{
		label: "load of each expert in each layer", width: half, rowName: "layer", row: r.layer, xLabel: "expert",
		scaleLabel: "× the layer's mean load", noteHead: "max/mean, entropy",
	}
	for layer, counts := range r.ExpertLoad {
		if len(counts) == 0 {
			return page.Figure{}
		}
		var total float64
		busiest, least := 0, 0
		for e, n := range counts {
			total += float64(n)
			if n > counts[busiest] {
				busiest = e
			}
			if n < counts[least] {
				least = e
			}
		}
		row := make([]float64, len(counts))
		for e, n := range counts {
			row[e] = float64(n) * float64(len(counts)) / total // 0/0 is drawn blank: no token was routed
		}
		b := record.BalanceOf(counts)
		m.values = append(m.values, row)
		m.notes = append(m.notes, quantity.Exact(b.MaxOverMean, 3)+"×, "+quantity.Exact(b.Entropy, 3))
		m.titles = append(m.titles, fmt.Sprintf("layer %d: busiest expert %d with %s × the mean, least busy expert %d "+
			"with %s ×", r.layer(layer), busiest, quantity.Exact(row[busiest], 3), least,
			quantity.Exact(row[least], 3)))
	}
	over := fmt.Sprintf("%d steps up to step %d", r.LoadSteps, r.LoadLast)
	if r.LoadSteps == 1 {
		over = fmt.Sprintf("step %d", r.LoadLast)
	}
	text := fmt.Sprintf("Tokens routed to each expert in %s, relative to the mean of its layer. "+
		"At the end of each row: the busiest expert's load ÷ the mean (1 is even), and the entropy of the shares (1 "+
		"is even, 0 is a single expert).", over)
	return page.Figure{Title: "Load by layer and expert", Text: text, Chart: m.svg()}
}

// imbalanceFigure draws the load of the busiest expert in every layer, over the whole run.
func imbalanceFigure(r *Run) page.Figure {
	if r.Layers == 0 || r.Done < 2 {
		return page.Figure{}
	}
	edges := columns(len(r.Spans), heatColumns)
	m := heatMap{
		label: "load of the busiest expert of each layer over steps", width: half, rowName: "layer", row: r.layer,
		xLabel: "step", scaleLabel: "busiest ÷ mean",
		overSteps: true, xLo: r.stepAt(0), xHi: float64(r.Next),
	}
	for layer := range r.Layers {
		row := make([]float64, len(edges)-1)
		for i := range row {
			var load mean
			for _, s := range r.Spans[edges[i]:edges[i+1]] {
				if layer < len(s.maxOverMean) {
					load.add(s.maxOverMean[layer].value, s.maxOverMean[layer].weight)
				}
			}
			row[i] = load.get()
		}
		m.values = append(m.values, row)
	}
	return page.Figure{Title: "Imbalance by layer over time", Text: "Load of the busiest expert ÷ mean load in " +
		"each step, averaged over ranges of steps.", Chart: m.svg()}
}

// acrossLayers draws the mean of a measure over the layers, and its worst layer.
func acrossLayers(r *Run, title, text, yLabel string, ofMean, ofWorst int) page.Figure {
	if r.Layers == 0 {
		return page.Figure{}
	}
	chart := lineChart{label: title + " over steps", width: half, height: halfHeight, yLabel: yLabel, marks: marksOf(r),
		until: float64(r.Next)}
	curve := func(measure int) []point {
		return means(smoothed(r, func(s *Span) mean { return s.balance[measure] }), curvePoints)
	}
	chart.series = []curveSeries{
		{name: "worst layer", colour: 1, points: curve(ofWorst)},
		{name: "mean of layers", colour: 0, points: curve(ofMean)},
	}
	if span := r.smoothSpan(); span > 1 {
		text += fmt.Sprintf(" Smoothed over about %.0f steps.", span)
	}
	return page.Figure{Title: title, Text: text, Chart: chart.svg()}
}

func balanceFigure(r *Run) page.Figure {
	return acrossLayers(r, "Busiest expert ÷ mean", "In each step; 1 is even.", "max load ÷ mean load", meanLoad,
		worstLoad)
}

func entropyFigure(r *Run) page.Figure {
	return acrossLayers(r, "Entropy of the load",
		"Entropy of the experts' shares in each step, divided by ln(experts): 1 is even, 0 is a single expert.",
		"entropy ÷ ln(experts)", meanEntropy, worstEntropy)
}

// mfuFigure draws the model's FLOP/s as a share of the machine's peak.
func mfuFigure(r *Run) page.Figure {
	if !used(r, mfuCurve) {
		return page.Figure{}
	}
	chart := lineChart{
		label: "model FLOPs utilization over steps", width: half, height: halfHeight,
		yLabel: "share of the measured peak", fromZero: true, percent: true,
		series: rawAndSmooth(r, "last", 0, mfuCurve, false), marks: marksOf(r), until: float64(r.Next),
	}
	text := "Floating-point operations of the model per second, divided by the peak that was measured when the run " +
		"started. They include the forward and the backward pass and full attention, without recomputation."
	return page.Figure{Title: "Model FLOPs utilization", Text: text + smoothText(r.Done), Chart: chart.svg()}
}

// updateGroups are the groups of tensors in the order of their curves.
var updateGroups = []string{"embedding", "attention", "router", "experts", "feed_forward", "norms", "head"}

// updateRatioFigure draws the size of updates relative to the weights.
func updateRatioFigure(r *Run) page.Figure {
	chart := lineChart{label: "update-to-weight ratio over steps", width: half, height: halfHeight,
		yLabel: "‖update‖ ÷ ‖weights‖", logIfWide: true, marks: marksOf(r), until: float64(r.Next)}
	for i, group := range updateGroups {
		s := curveSeries{name: strings.ReplaceAll(group, "_", "-"), colour: i}
		for j := range r.Spans {
			if span := &r.Spans[j]; len(span.ratios) > 0 && span.ratios[i].weight > 0 {
				s.points = append(s.points, point{span.middle(), span.ratios[i].value})
			}
		}
		s.points = means(s.points, curvePoints)
		chart.series = append(chart.series, s)
	}
	return page.Figure{Title: "Update-to-weight ratio", Text: "Norm of the change of all weights of a group in one " +
		"step, divided by their norm before the step.", Chart: chart.svg()}
}

// routerEntropyFigure draws the entropy of the router of each layer.
func routerEntropyFigure(r *Run) page.Figure {
	text := "Mean over tokens of the entropy of the router's distribution over the experts"
	if len(r.ExpertLoad) > 0 {
		text += fmt.Sprintf(": at most ln %d = %s, if all experts are equally likely; 0 if a single expert is certain",
			len(r.ExpertLoad[0]), quantity.Exact(math.Log(float64(len(r.ExpertLoad[0]))), 3))
	}
	return layerFigure(r, "Entropy of the router", text+".", "router entropy", "entropy (nats)",
		func(s *Span) []mean { return s.routerEntropy })
}

// droppedFigure draws the dropped choices of experts of each layer.
func droppedFigure(r *Run) page.Figure {
	return layerFigure(r, "Dropped choices of experts", "Choices that an expert drops because it has reached its "+
		"capacity (expert_capacity_factor), as a fraction of the choices of all tokens.", "dropped choices",
		"fraction of all choices", func(s *Span) []mean { return s.dropped })
}

// layerFigure draws a value of each layer with experts.
func layerFigure(r *Run, title, text, label, yLabel string, values func(s *Span) []mean) page.Figure {
	const named = 8 // curves with a name
	layers := 0
	for i := range r.Spans {
		layers = max(layers, len(values(&r.Spans[i])))
	}
	chart := lineChart{label: label + " of each layer over steps", width: half, height: halfHeight,
		yLabel: yLabel, marks: marksOf(r), until: float64(r.Next)}
	span := r.smoothSpan()
	every := max(1, (layers+named-2)/(named-1))
	for layer := range layers {
		curve := smoothed(r, func(s *Span) mean {
			if of := values(s); layer < len(of) {
				return of[layer]
			}
			return mean{}
		})
		s := curveSeries{points: means(curve, curvePoints), colour: layer, faint: true}
		if layer%every == 0 || layer == layers-1 {
			s.name, s.faint, s.colour = fmt.Sprintf("layer %d", r.layer(layer)), false, layer/every
		}
		chart.series = append(chart.series, s)
	}
	if span > 1 {
		text += fmt.Sprintf(" Smoothed over about %.0f steps.", span)
	}
	return page.Figure{Title: title, Text: text, Chart: chart.svg()}
}
