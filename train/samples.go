package train

import "mula/moe"

// Attention limits the tokens that a token attends to.
type Attention string

// The kinds of attention. With documents, and for packed plans, a target is unmasked only if it is
// in the same document as its input and is not padding. Otherwise all targets are unmasked.
const (
	// all preceding tokens of the row, and itself; default for plans of windows
	WindowAttention Attention = "window"
	// preceding tokens of its own document, and itself; default for packed plans
	DocumentAttention Attention = "documents"
)

// Attentions lists the kinds of attention.
func Attentions() []string { return []string{string(WindowAttention), string(DocumentAttention)} }

// defaultAttention returns the default for a plan, given [blend.Traits.Padded].
func defaultAttention(padded bool) Attention {
	if padded {
		return DocumentAttention
	}
	return WindowAttention
}

// samples are rows for a model, read in the order of a plan.
type samples struct {
	length  int  // L, inputs of a row
	within  bool // attention stays within documents
	counted bool // some targets may be masked

	tokens  []uint32 // rows × (L+1)
	begin   []int32  // [rows × L] if within; see [moe.Batch]
	counts  []bool   // [rows × L] if counted
	targets []int64  // [rows] number of unmasked targets
}

// newSamples returns empty samples of L inputs. padded is [blend.Traits.Padded] of the plan.
func newSamples(length int, padded bool, a Attention) samples {
	if a == "" {
		a = defaultAttention(padded)
	}
	within := a == DocumentAttention
	return samples{length: length, within: within, counted: within || padded}
}

// clear removes all rows.
func (s *samples) clear() {
	s.tokens, s.begin, s.counts, s.targets = s.tokens[:0], s.begin[:0], s.counts[:0], s.targets[:0]
}

// rows returns the number of rows.
func (s *samples) rows() int { return len(s.targets) }

// row returns the tokens of a row.
func (s *samples) row(i int) []uint32 { return s.tokens[i*(s.length+1):][:s.length+1] }

// end ends a row whose tokens have been appended. Its documents start at starts, in order. Tokens
// before the first start belong to a document that starts in another window. The tokens after
// filled are padding, which counts as a document.
func (s *samples) end(starts []int32, filled int) {
	targets := int64(s.length)
	begin, next := int32(0), 0 // of the current document; of the next document
	for i := 0; s.counted && i < s.length; i++ {
		for next < len(starts) && int(starts[next]) <= i {
			begin = starts[next]
			next++
		}
		if i >= filled {
			begin = int32(filled)
		}
		if s.within {
			s.begin = append(s.begin, begin)
		}
		counts := i+1 < filled && (next == len(starts) || int(starts[next]) != i+1)
		if s.counts = append(s.counts, counts); !counts {
			targets--
		}
	}
	s.targets = append(s.targets, targets)
}

// batch returns the rows [first, end).
func (s *samples) batch(first, end int) moe.Batch {
	b := moe.Batch{Tokens: s.tokens[first*(s.length+1) : end*(s.length+1)], Rows: end - first, SequenceLength: s.length}
	if s.within {
		b.Begin = s.begin[first*s.length : end*s.length]
	}
	if s.counted {
		b.Counted = s.counts[first*s.length : end*s.length]
	}
	return b
}
