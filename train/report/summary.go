package report

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"

	"mula/internal/quantity"
	"mula/train/record"
)

// A summary is the table at the top, with a row for each property and a column for each run.
type summary struct {
	Names []string
	Rows  []summaryRow
}

type summaryRow struct {
	Name  string
	Cells []cell
}

type cell struct {
	Text string
	Full string // shown as a tooltip when Text is cut
}

// summarise fills the table. It skips rows without a value.
func summarise(names []string, runs []*Run) summary {
	s := summary{Names: names}
	add := func(name string, value func(*Run) cell) {
		row := summaryRow{Name: name}
		empty := true
		for _, run := range runs {
			c := value(run)
			empty = empty && c.Text == ""
			row.Cells = append(row.Cells, c)
		}
		if !empty {
			s.Rows = append(s.Rows, row)
		}
	}
	text := func(f func(*Run) string) func(*Run) cell { return func(r *Run) cell { return cell{Text: f(r)} } }
	add("model", text(modelName))
	add("parameters", text(func(r *Run) string {
		if r.Info.Parameters == 0 {
			return ""
		}
		t := quantity.Grouped(r.Info.Parameters)
		if active := r.Info.ActiveParameters; active > 0 && active != r.Info.Parameters {
			t += " (" + quantity.Grouped(active) + " active per token)"
		}
		return t
	}))
	add("plan", func(r *Run) cell {
		if len(r.Info.Plan) <= 16 {
			return cell{Text: r.Info.Plan}
		}
		return cell{r.Info.Plan[:16] + "…", r.Info.Plan}
	})
	add("steps", text(func(r *Run) string {
		if n := int64(r.Done); n < r.planned() {
			return quantity.Grouped(n) + " of " + quantity.Grouped(r.planned())
		}
		return quantity.Grouped(int64(r.Done))
	}))
	add("batch", text(func(r *Run) string {
		if r.Info.BatchSize == 0 {
			return ""
		}
		return quantity.Grouped(r.Info.BatchSize) + " samples of " + quantity.Grouped(r.Info.SequenceLength) + " tokens"
	}))
	add("tokens seen", text(func(r *Run) string { return quantity.Grouped(int64(r.tokens)) }))
	add("loss, first → last", text(lossSpan))
	add("evaluation loss", text(func(r *Run) string {
		switch n := len(r.Evaluations); n {
		case 0:
			return ""
		case 1:
			return quantity.Exact(r.Evaluations[0].Loss, 4)
		default:
			return quantity.Exact(r.Evaluations[0].Loss, 4) + " → " + quantity.Exact(r.Evaluations[n-1].Loss, 4)
		}
	}))
	add("tokens/s, median", text(func(r *Run) string {
		var speeds []float64
		for _, s := range r.Spans { // a sample of the steps, if there are many
			if s.Samples > 0 {
				speeds = append(speeds, s.TokensPerSecond)
			}
		}
		if len(speeds) == 0 {
			return ""
		}
		if m := median(speeds); m < 1000 || m >= 1e15 {
			return quantity.Exact(m, 4)
		} else {
			return quantity.Grouped(int64(math.Round(m)))
		}
	}))
	add("MFU, median", text(func(r *Run) string {
		var shares []float64
		for _, s := range r.Spans {
			if s.MFU > 0 {
				shares = append(shares, s.MFU)
			}
		}
		if len(shares) == 0 {
			return ""
		}
		t := percent(median(shares), nil)
		if r.Info.PeakFLOPS > 0 {
			t += " of " + quantity.Short(r.Info.PeakFLOPS/1e9, 4) + " GFLOP/s"
		}
		return t
	}))
	add("time in steps", text(func(r *Run) string { return duration(r.seconds) }))
	add("time of ranks", text(rankTimes))
	add("slowest ranks", text(slowestRanks))
	add("resumes", text(func(r *Run) string {
		if len(r.Resumes) == 0 {
			return "none"
		}
		var at []string
		for i, m := range r.Resumes {
			if i == 6 {
				at = append(at, "…")
				break
			}
			at = append(at, quantity.Grouped(m.Step))
		}
		return fmt.Sprintf("%d (before step %s)", len(r.Resumes), strings.Join(at, ", "))
	}))
	add("steps skipped", text(func(r *Run) string {
		if len(r.Skips) == 0 {
			return ""
		}
		return quantity.Grouped(int64(len(r.Skips)))
	}))
	add("rollbacks", text(func(r *Run) string {
		if len(r.Rollbacks) == 0 {
			return ""
		}
		var out, until int64 // skipped positions, each counted once; the rollbacks are in order
		for _, b := range r.Rollbacks {
			out += max(0, b.To-max(b.From, until))
			until = max(until, b.To)
		}
		return fmt.Sprintf("%d (%s samples skipped)", len(r.Rollbacks), quantity.Grouped(out))
	}))
	add("started", text(func(r *Run) string {
		if r.Info.Started.IsZero() {
			return ""
		}
		return r.Info.Started.Format("2006-01-02 15:04:05 -07:00")
	}))
	add("device", text(func(r *Run) string { return r.Info.Device }))
	add("mula", text(func(r *Run) string { return r.Info.Mula }))
	return s
}

// rankTimes describes how all ranks spent their time in steps and checkpoints.
func rankTimes(r *Run) string {
	s := r.RankSeconds
	total := s.Own() + s.Waiting + s.Saving
	if total <= 0 {
		return ""
	}
	var parts []string
	for _, part := range []struct {
		name    string
		seconds record.Seconds
	}{{"compute", s.Compute}, {"waiting for other ranks", s.Waiting}, {"reading", s.Reading}, {"update", s.Update},
		{"saving", s.Saving}} {
		if part.seconds > 0 {
			parts = append(parts, part.name+" "+percent(float64(part.seconds/total), nil))
		}
	}
	return strings.Join(parts, ", ")
}

// slowestRanks describes the ranks that were slow or the slowest in most steps.
func slowestRanks(r *Run) string {
	var parts []string
	for _, s := range r.Slowest[:min(3, len(r.Slowest))] {
		text := fmt.Sprintf("rank %d on %s: %s times", s.Rank, s.Host, quantity.Grouped(int64(s.Steps)))
		if s.Steps > 0 {
			text += fmt.Sprintf(", its own work %s times the median", quantity.Short(s.Excess, 3))
		}
		if s.Slow > 0 {
			text += fmt.Sprintf(", slow in %s steps", quantity.Grouped(int64(s.Slow)))
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, "; ")
}

// modelName describes the model by the main fields of its configuration.
func modelName(r *Run) string {
	get := func(name string) (int64, bool) {
		v, ok := r.Info.Model[name].(float64)
		return int64(v), ok && v == math.Trunc(v) && math.Abs(v) < 1<<53
	}
	var parts []string
	if name, ok := r.Info.Model["model_type"].(string); ok {
		parts = append(parts, name)
	}
	if n, ok := get("num_hidden_layers"); ok {
		parts = append(parts, fmt.Sprintf("%d layers", n))
	}
	if n, ok := get("hidden_size"); ok {
		parts = append(parts, fmt.Sprintf("width %d", n))
	}
	if n, ok := get("num_experts"); ok {
		experts := fmt.Sprintf("%d experts", n)
		if k, ok := get("num_experts_per_tok"); ok {
			experts += fmt.Sprintf(", %d per token", k)
		}
		parts = append(parts, experts)
	}
	return strings.Join(parts, ", ")
}

// lossSpan returns the first and the last loss. Because single steps vary, it adds the mean over
// the last steps of a longer run.
func lossSpan(r *Run) string {
	last := r.lastLosses
	switch {
	case r.losses == 0:
		return ""
	case r.losses == 1:
		return quantity.Exact(r.firstLoss, 4)
	}
	t := quantity.Exact(r.firstLoss, 4) + " → " + quantity.Exact(last[len(last)-1], 4)
	if k := min(lastLosses, r.losses/10); k > 1 {
		t += fmt.Sprintf(" (mean of the last %d steps: %s)", k, quantity.Short(sum(last[len(last)-k:])/float64(k), 4))
	}
	return t
}

func median(values []float64) float64 {
	values = slices.Clone(values)
	slices.Sort(values)
	n := len(values)
	return (values[(n-1)/2] + values[n/2]) / 2
}

func duration(seconds float64) string {
	switch {
	case seconds == 0:
		return ""
	case seconds < 60:
		return quantity.Short(seconds, 3) + " s"
	case seconds < 1e9: // a time.Duration of more seconds could overflow
		return quantity.Duration(time.Duration(seconds * float64(time.Second)))
	}
	return quantity.Short(seconds, 3) + " s"
}

// A sourceRow is a line of the table of sources.
type sourceRow struct {
	Class, Name                     string
	Planned, Drawn, Samples, Excess string
	FirstLoss, LastLoss, Evaluation string
}

// sourceRows compares the drawn samples of each source with the plan's weights at step 0.
func sourceRows(r *Run) []sourceRow {
	drawn := make([]float64, len(r.Info.Sources))
	var total float64
	for _, s := range r.Spans {
		for i, n := range s.samples {
			drawn[i] += float64(n)
			total += float64(n)
		}
	}
	planned := plannedShares(r)
	rows := make([]sourceRow, len(drawn))
	for i, name := range r.Info.Sources {
		row := sourceRow{Class: fillClass(i), Name: name, Samples: quantity.Short(drawn[i], 15)}
		if drawn[i] < 1<<53 {
			row.Samples = quantity.Grouped(int64(drawn[i]))
		}
		if total > 0 {
			row.Drawn = percent(drawn[i]/total, []float64{0, 0.0001})
		}
		if planned != nil {
			row.Planned = percent(planned[i], []float64{0, 0.0001})
			if total > 0 {
				row.Excess = strconv.FormatFloat(drawn[i]-planned[i]*total, 'f', 1, 64)
				if drawn[i] > planned[i]*total {
					row.Excess = "+" + row.Excess
				}
				row.Excess = strings.Replace(row.Excess, "-", "−", 1)
			}
		}
		row.FirstLoss, row.LastLoss = sourceLossSpan(r, i)
		for _, e := range slices.Backward(r.Evaluations) {
			if !math.IsNaN(e.SourceLoss[i]) {
				row.Evaluation = quantity.Exact(e.SourceLoss[i], 4)
				break
			}
		}
		rows[i] = row
	}
	return rows
}

// sourceLossSpan returns the loss of the first step with samples of the source, and the smoothed
// loss at the end.
func sourceLossSpan(r *Run, source int) (first, last string) {
	if source >= len(r.firstSourceLoss) || !finite(r.firstSourceLoss[source]) {
		return "", ""
	}
	first = quantity.Exact(r.firstSourceLoss[source], 4)
	for _, p := range slices.Backward(smoothed(r, sourceLoss(source))) {
		if finite(p.y) { // the last step of a short run, which is not smoothed, may have no sample of the source
			return first, quantity.Exact(p.y, 4)
		}
	}
	return first, ""
}

// plannedShares returns the weights in the order of the sources, scaled to add up to 1, or nil if
// the run has no weights.
func plannedShares(r *Run) []float64 {
	shares := make([]float64, len(r.Info.Sources))
	for i, name := range r.Info.Sources {
		shares[i] = max(r.Info.Weights[name], 0)
	}
	total := sum(shares)
	if !(total > 0) || !finite(total) {
		return nil
	}
	for i := range shares {
		shares[i] /= total
	}
	return shares
}

// A configRow is a field of the model's configuration.
type configRow struct {
	Name, Value string
}

func configRows(r *Run) []configRow {
	var rows []configRow
	for name, v := range r.Info.Model {
		// A value that was read as JSON can be written as JSON.
		value, err := json.Marshal(v)
		if err != nil {
			value = []byte(fmt.Sprint(v))
		}
		rows = append(rows, configRow{name, string(value)})
	}
	sort.Slice(rows, func(i, j int) bool { return rows[i].Name < rows[j].Name })
	return rows
}
