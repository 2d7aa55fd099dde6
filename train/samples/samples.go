// Package samples has the rows of a step as input for a model: which tokens attend to each other,
// and which targets count in the loss. It also reads samples of past steps again, to detect damage.
package samples

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

// DefaultAttention returns the default for a plan, given [blend.Traits.Padded].
func DefaultAttention(padded bool) Attention {
	if padded {
		return DocumentAttention
	}
	return WindowAttention
}

// Rows are rows for a model, read in the order of a plan.
type Rows struct {
	Length  int  // L, inputs of a row
	within  bool // attention stays within documents
	Counted bool // some targets may be masked

	Tokens  []uint32 // rows × (L+1)
	begin   []int32  // [rows × L] if within; see [moe.Batch]
	counts  []bool   // [rows × L] if counted
	Targets []int64  // [rows] number of unmasked targets
}

// NewRows returns empty samples of L inputs. padded is [blend.Traits.Padded] of the plan.
func NewRows(length int, padded bool, a Attention) Rows {
	if a == "" {
		a = DefaultAttention(padded)
	}
	within := a == DocumentAttention
	return Rows{Length: length, within: within, Counted: within || padded}
}

// Clear removes all rows.
func (s *Rows) Clear() {
	s.Tokens, s.begin, s.counts, s.Targets = s.Tokens[:0], s.begin[:0], s.counts[:0], s.Targets[:0]
}

// Len returns the number of rows.
func (s *Rows) Len() int { return len(s.Targets) }

// Row returns the tokens of a row.
func (s *Rows) Row(i int) []uint32 { return s.Tokens[i*(s.Length+1):][:s.Length+1] }

// End ends a row whose tokens have been appended. Its documents start at starts, in order. Tokens
// before the first start belong to a document that starts in another window. The tokens after
// filled are padding, which counts as a document.
func (s *Rows) End(starts []int32, filled int) {
	targets := int64(s.Length)
	begin, next := int32(0), 0 // of the current document; of the next document
	for i := 0; s.Counted && i < s.Length; i++ {
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
	s.Targets = append(s.Targets, targets)
}

// Batch returns the rows [first, end).
func (s *Rows) Batch(first, end int) moe.Batch {
	b := moe.Batch{Tokens: s.Tokens[first*(s.Length+1) : end*(s.Length+1)], Rows: end - first, SequenceLength: s.Length}
	if s.within {
		b.Begin = s.begin[first*s.Length : end*s.Length]
	}
	if s.Counted {
		b.Counted = s.counts[first*s.Length : end*s.Length]
	}
	return b
}
