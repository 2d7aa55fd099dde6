package moe

import (
	"math"
	"slices"
	"testing"
)

// Documents in one row have the losses, and together the gradients, that each has alone: what
// stands before and behind it does not matter, nor where in the row it stands, but for rounding.
func TestDocumentsAloneAndTogether(t *testing.T) {
	lengths := []int{queryBlock + 9, 1, 5, queryBlock, 2, 40, 3} // the last is padding
	for name, cfg := range gradientCases(t) {
		together, alone := newModel(t, cfg, 2), newModel(t, cfg, 2)
		randomize(together, 1)
		randomize(alone, 1)
		width := 0
		for _, n := range lengths {
			width += n
		}
		row := inDocuments(randomBatch(cfg, 1, width-1, 2), lengths...)
		stats, err := together.Backward(t.Context(), row, BackwardOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if stats.RowLoss[0] != stats.Loss {
			t.Errorf("%s: the row has loss %v, the batch %v", name, stats.RowLoss[0], stats.Loss)
		}
		sum, targets, begin := 0.0, 0, 0
		for _, n := range lengths[:len(lengths)-1] {
			if n > 1 {
				document := Batch{Tokens: row.Tokens[begin : begin+n], Rows: 1, SequenceLength: n - 1}
				one, err := alone.Backward(t.Context(), document, BackwardOptions{Targets: int64(stats.Targets)})
				if err != nil {
					t.Fatal(err)
				}
				sum += one.Loss
				targets += n - 1

				// In the row, too, only this target counts now.
				among := row
				among.Counted = make([]bool, width-1)
				for i := begin; i < begin+n-1; i++ {
					among.Counted[i] = true
				}
				again, err := together.Forward(t.Context(), among)
				if err != nil {
					t.Fatal(err)
				}
				if again.Targets != n-1 || !(math.Abs(again.Loss-one.Loss) <= 1e-5*one.Loss) {
					t.Errorf("%s: a document of %d has loss %v of %d targets among others, %v alone", name, n,
						again.Loss, again.Targets, one.Loss)
				}
			}
			begin += n
		}
		if stats.Targets != targets || !(math.Abs(stats.Loss-sum) <= 1e-5*sum) {
			t.Errorf("%s: loss %v of %d targets, want %v of %d", name, stats.Loss, stats.Targets, sum, targets)
		}
		for i, p := range together.Parameters() {
			if e := relative(p.Grad.Floats(), alone.Parameters()[i].Grad.Floats()); !(e <= 1e-4) {
				t.Errorf("%s: gradient of %s differs by %g", name, p.Name, e)
			}
		}

		// Without the bounds it is another loss.
		row.Begin = nil
		if across, err := together.Forward(t.Context(), row); err != nil || math.Abs(across.Loss-sum) < 1e-4*sum {
			t.Errorf("%s: across documents the loss is %v, within them %v; %v", name, across.Loss, sum, err)
		}
	}
}

// Documents change nothing where there is one in a row, all of whose targets count: the same bits
// as without.
func TestOneDocumentIsAWindow(t *testing.T) {
	for name, cfg := range gradientCases(t) {
		windows, documents := newModel(t, cfg, 2), newModel(t, cfg, 2)
		randomize(windows, 1)
		randomize(documents, 1)
		batch := randomBatch(cfg, 2, queryBlock+7, 2)
		want, err := windows.Backward(t.Context(), batch, BackwardOptions{Loss: fullLoss(cfg)})
		if err != nil {
			t.Fatal(err)
		}
		got, err := documents.Backward(t.Context(), inDocuments(batch, queryBlock+8, 0),
			BackwardOptions{Loss: fullLoss(cfg)})
		if err != nil {
			t.Fatal(err)
		}
		if got.Loss != want.Loss || got.Targets != want.Targets ||
			!slices.Equal(grads(t, documents), grads(t, windows)) {
			t.Errorf("%s: loss %v of %d targets, want %v of %d; or other gradients", name, got.Loss, got.Targets,
				want.Loss, want.Targets)
		}
	}
}

// Losses and gradients of documents are the same bits with any number of threads, whatever is
// computed again, and shared by ranks as in micro-batches of one: the loss of the step is the mean
// over all targets that count, wherever they are.
func TestBitsOfDocuments(t *testing.T) {
	for name, cfg := range gradientCases(t) {
		batch := inDocuments(randomBatch(cfg, 3, queryBlock+7, 2), 20, 45, 4, 3)
		var want []float32
		var loss float64
		for _, threads := range []int{1, 2, 5} {
			for _, recompute := range levels {
				m := newModel(t, cfg, threads)
				randomize(m, 1)
				m.SetRecompute(recompute)
				stats, err := m.Backward(t.Context(), batch, BackwardOptions{Loss: fullLoss(cfg)})
				if err != nil {
					t.Fatal(err)
				}
				if want == nil {
					want, loss = grads(t, m), stats.Loss
				}
				if stats.Loss != loss || !slices.Equal(grads(t, m), want) {
					t.Errorf("%s: %d threads, recompute %v: other bits", name, threads, recompute)
				}
			}
		}
		if !cfg.moe() {
			continue
		}
		opts := BackwardOptions{Targets: int64(batch.targets()), Tokens: int64(batch.Rows * batch.SequenceLength),
			Loss: LossOptions{ZCoefficient: 1}}
		if cfg.HasSigmoidRouter() {
			opts.Loss = LossOptions{}
		}
		whole := newModel(t, cfg, 1)
		randomize(whole, 1)
		if _, err := whole.Backward(t.Context(), batch, opts); err != nil {
			t.Fatal(err)
		}
		for _, dispatch := range dispatches {
			g := newRanks(t, cfg, 2, 1, Parallel{Dispatch: dispatch}, nil)
			for _, m := range g.models {
				randomize(m, 1)
			}
			g.backward(t, share(batch, []int{2, 1}), opts)
			sum := g.gradients(t)
			for _, p := range whole.Parameters() {
				if e := relative(sum[p.Name], p.Grad.Floats()); !(e <= 1e-4) {
					t.Errorf("%s, %s: gradient of %s differs by %g", name, dispatch, p.Name, e)
				}
			}
		}
	}
}

// A batch without counted targets has no loss, and its gradients are only the gradients of the
// router's losses: zero without them. The same holds for drawn targets.
func TestNoTargetCounts(t *testing.T) {
	for name, cfg := range gradientCases(t) {
		m := newModel(t, cfg, 2)
		randomize(m, 1)
		batch := randomBatch(cfg, 2, 9, 2)
		batch.Counted = make([]bool, 18)
		for _, sample := range []bool{false, true} {
			stats, err := m.Backward(t.Context(), batch, BackwardOptions{SampleTargets: sample})
			if err != nil || stats.Loss != 0 || stats.Targets != 0 || stats.Tokens != 18 {
				t.Errorf("%s: %+v, %v", name, stats, err)
			}
			if slices.ContainsFunc(grads(t, m), func(g float32) bool { return g != 0 }) {
				t.Errorf("%s: there is a gradient", name)
			}
		}
	}
}
