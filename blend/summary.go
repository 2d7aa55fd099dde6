package blend

// A Summary describes a plan for people: the size of each source, and the samples that the plan
// draws from it.
type Summary struct {
	Length         int64           `json:"length"`  // positions
	Skipped        int64           `json:"skipped"` // positions that yield no sample
	SequenceLength int             `json:"sequence_length"`
	Stages         []StageSummary  `json:"stages"`
	Sources        []SourceSummary `json:"sources"`
}

// A StageSummary describes one stage.
type StageSummary struct {
	First   int64   `json:"first"` // position
	Samples int64   `json:"samples"`
	Bound   float64 `json:"bound"` // see [Tree.Bound]
}

// A SourceSummary describes one source.
type SourceSummary struct {
	Name       string `json:"name"`
	Shards     int    `json:"shards"`
	Empty      int    `json:"shards_without_windows"` // shards too short for a single window
	Documents  int64  `json:"documents"`
	Tokens     int64  `json:"tokens"`
	Windows    int64  `json:"windows"`
	Validation int64  `json:"validation_windows"`
	MaxEpochs  string `json:"max_epochs,omitempty"`
	// in the whole plan, including skipped positions; the sum over all sources is the plan's Length
	Samples int64 `json:"samples"`
	// Samples per training window; with order megatron, target tokens per token of the shard
	Epochs float64 `json:"epochs"`
	// samples whose window an earlier position of the plan has drawn; with order megatron, each
	// window is drawn once. Estimated if the source has grown in an incomplete epoch
	Repeats int64         `json:"repeats"`
	Stages  []SourceStage `json:"stages"`

	Packing *PackingSummary `json:"packing,omitempty"` // of a packed plan
}

// A PackingSummary describes the packing of one source. Its samples are the source's windows.
type PackingSummary struct {
	Documents int64   `json:"documents"`     // non-empty documents
	Cut       int64   `json:"cut_documents"` // documents longer than a sample
	Pieces    int64   `json:"pieces"`
	Padding   int64   `json:"padding"`       // padding tokens in all samples
	Share     float64 `json:"padding_share"` // padding tokens per token of all samples
}

// A SourceStage describes the samples that one stage draws from one source.
type SourceStage struct {
	Weight  string  `json:"weight"` // as written; "" if the stage does not draw from the source
	Share   float64 `json:"share"`  // the source's weight / all weights
	Samples int64   `json:"samples"`
	Epochs  float64 `json:"epochs"`  // Samples per training window
	Repeats int64   `json:"repeats"` // samples whose window an earlier position of the plan has drawn
}

// shardWindows returns the number of windows of one of the source's shards.
func (s *Source) shardWindows(shard int) int64 {
	if s.windows == nil { // packed or Megatron
		return s.Windows()
	}
	return s.windows.ShardCount(shard)
}

// Summary describes the plan.
func (p *Plan) Summary() *Summary {
	r := &Summary{Length: p.length, SequenceLength: p.SequenceLength}
	for _, skip := range p.Skips {
		r.Skipped += skip.To - skip.From
	}
	scheduled := p.Traits().Scheduled
	sums := make([]uint64, len(p.Stages))
	for j, st := range p.Stages {
		r.Stages = append(r.Stages, StageSummary{p.schedule[j].start, st.Samples, p.schedule[j].tree.Bound()})
		for _, w := range st.Weights {
			sums[j] += w
		}
	}
	for i := range p.Sources {
		s := &p.Sources[i]
		training := s.Training()
		// Megatron draws samples of a file over any number of epochs, so its epochs are counted in
		// tokens.
		epochs := func(n int64) float64 {
			if !scheduled {
				return float64(n) * float64(p.SequenceLength) / float64(max(1, s.Shards[0].Tokens))
			}
			return float64(n) / float64(training)
		}
		// Of a source's first n samples, all samples after the first epoch are repeats.
		repeats := func(n int64) int64 { return max(0, n-training) }
		if s.parts != nil {
			epochs, repeats = s.epochs, func(n int64) int64 { return n - s.distinct(n) }
		}
		out := SourceSummary{Name: s.Name, Shards: len(s.Shards), Windows: s.Windows(), Validation: s.Validation,
			MaxEpochs: s.MaxEpochs,
			Samples:   p.totals[i], Epochs: epochs(p.totals[i]), Repeats: repeats(p.totals[i])}
		for k, sh := range s.Shards {
			out.Tokens += sh.Tokens
			out.Documents += sh.Documents
			if s.shardWindows(k) == 0 {
				out.Empty++
			}
		}
		for j, st := range p.Stages {
			from, to := p.schedule[j].base[i], p.totals[i]
			if j+1 < len(p.Stages) {
				to = p.schedule[j+1].base[i]
			}
			stage := SourceStage{Share: float64(st.Weights[i]) / float64(sums[j]), Samples: to - from,
				Epochs: epochs(to) - epochs(from), Repeats: repeats(to) - repeats(from)}
			if st.Written != nil {
				stage.Weight = st.Written[i]
			}
			out.Stages = append(out.Stages, stage)
		}
		if s.Packed != nil {
			k := s.packed()
			padding := k.Padding(p.SampleTokens())
			out.Packing = &PackingSummary{k.Documents, k.Cut, k.Pieces, padding,
				float64(padding) / float64(k.Tokens+padding)}
		}
		r.Sources = append(r.Sources, out)
	}
	return r
}
