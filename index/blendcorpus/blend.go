package blendcorpus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"golang.org/x/sync/semaphore"

	"mula/index/greedy"
	"mula/index/numpy"
	"mula/index/rebuild"
)

// A blend mixes the token files of one corpus, or all corpora. In a flat blend, its parts are all
// files.
type blend struct {
	name    string // for people; of a corpus "corpus web", otherwise "blend"
	splits  []rebuild.Split
	parts   []part
	size    int64
	concat  bool // the parts one after the other
	text    string
	lenient bool // samples may be requested beyond the end of a part
	weights []float64
	fused   bool
}

// A part of a blend: its name, the number of samples requested from it, and the number it has.
type part struct {
	name        string
	asked, have int64
}

// hash returns the hash that names the files.
func (b *blend) hash() string { return hash(b.text) }

// files returns the names of the data files.
func (b *blend) files() []string { return named(b.hash(), blendEnds[:]) }

// sizes returns the sizes of the data files in bytes.
func (b *blend) sizes() []int64 {
	n := numpy.HeaderSize + 8*b.size
	return []int64{n, n}
}

// title returns the name of the blend in messages.
func (b *blend) title() string {
	names := make([]string, len(b.splits))
	for i, s := range b.splits {
		names[i] = s.String()
	}
	return b.name + ", " + strings.Join(names, " and ")
}

// settings returns everything that the contents depend on. The description of a corpus contains
// only a fraction of the settings.
func (b *blend) settings() (json.RawMessage, error) {
	s := blendSettings{Weights: b.weights, Concat: b.concat, Fused: b.fused && !b.concat}
	for _, p := range b.parts {
		s.Parts, s.Samples = append(s.Parts, p.name), append(s.Samples, p.asked)
	}
	if b.concat || b.size == 0 {
		s.Weights = nil // not used, and possibly NaN or infinite
	}
	return json.Marshal(s)
}

// blendSettings are the settings of a blend as the cache stores them.
type blendSettings struct {
	Parts   []string  `json:"parts"`
	Samples []int64   `json:"samples"`
	Weights []float64 `json:"weights"`
	Concat  bool      `json:"concatenated"`
	Fused   bool      `json:"fused"`
}

// corpusText returns the description of a corpus.
func corpusText(p Profile, name string, size int64, blended, shuffled bool) string {
	text := fmt.Sprintf("%s\n %d", name, size)
	if p == BlendCorpus {
		text += " + blend_sample_in_corpus: " + pythonBool(blended) + "+ shuffle_sample_in_corpus: " +
			pythonBool(shuffled)
	}
	return text
}

func pythonBool(v bool) string {
	if v {
		return "True"
	}
	return "False"
}

// corpusEntry returns the text about a corpus in the description of a blend.
func corpusEntry(prefixes []string, size, sequenceLength int64, seed uint32) string {
	var text strings.Builder
	text.WriteString("CorpusDataset:")
	for _, prefix := range prefixes {
		text.WriteString(prefix + ",")
	}
	fmt.Fprintf(&text, "-%d-%d%d", size, sequenceLength, seed)
	return text.String()
}

// blendText returns the description of a blend. Only eight digits of each weight are in it, and
// therefore hashed.
func blendText(entries []string, weights []float64, size int64) string {
	var text strings.Builder
	text.WriteString("Blendable dataset\n\nDatasets:\n")
	for _, entry := range entries {
		text.WriteString(entry + "\n\n")
	}
	fmt.Fprintf(&text, "Weights: %s\nSize: %d\n", numpy.ArrayString(weights), size)
	return text.String()
}

// write computes the blend and writes its two files. A nil file is skipped.
func (b *blend) write(ctx context.Context, files []io.WriterAt, pool *semaphore.Weighted, threads int) error {
	dataset, sample := numpy.NewWriter[int64](files[0], b.size), numpy.NewWriter[int64](files[1], b.size)
	defer dataset.Release()
	defer sample.Release()
	counts := make([]int64, len(b.parts))
	var err error
	switch {
	case b.concat:
		for i, p := range b.parts {
			counts[i] = p.asked
		}
		err = b.concatenate(ctx, dataset, sample)
	case b.size > 0: // in a corpus without samples the weights are NaN
		counts, err = greedy.Weighted(ctx, greedy.Rule{Weights: b.weights, Fused: b.fused}, b.size, pool, threads,
			func(_ int64, d []int16, s []int64) error {
				return errors.Join(appendWide(dataset, d), sample.Append(s))
			})
	}
	if err == nil {
		err = b.readable(counts)
	}
	if err != nil {
		return err
	}
	return errors.Join(dataset.Flush(), sample.Flush())
}

// appendWide appends dataset numbers to a file of int64.
func appendWide(w *numpy.Writer[int64], v []int16) error {
	var wide [2048]int64 // fits the processor's cache
	for len(v) > 0 {
		n := min(len(v), len(wide))
		for i, x := range v[:n] {
			wide[i] = int64(x)
		}
		if err := w.Append(wide[:n]); err != nil {
			return err
		}
		v = v[n:]
	}
	return nil
}

// concatenate writes all samples of the first part, then all of the second, and so on.
func (b *blend) concatenate(ctx context.Context, dataset, sample *numpy.Writer[int64]) error {
	const stride = 1 << 16
	var ids, numbers [stride]int64
	for i, p := range b.parts {
		for k := range ids {
			ids[k] = int64(i)
		}
		for first := int64(0); first < p.asked; first += stride {
			if err := ctx.Err(); err != nil {
				return err
			}
			n := min(stride, p.asked-first)
			for k := range n {
				numbers[k] = first + k
			}
			if err := errors.Join(dataset.Append(ids[:n]), sample.Append(numbers[:n])); err != nil {
				return err
			}
		}
	}
	return nil
}

// readable returns an error if the blend takes more samples of a part than the part has.
func (b *blend) readable(counts []int64) error {
	if b.lenient {
		return nil
	}
	for i, p := range b.parts {
		if counts[i] > p.have {
			return fmt.Errorf("the blend takes %d samples of %s, which has %d, and training would stop at the first "+
				"missing sample; change the weight of %s or the number of samples requested, or remove the file or "+
				"corpus from the blend", counts[i], p.name,
				p.have, p.name)
		}
	}
	return nil
}

// alike reports whether two blends have the same contents.
func (b *blend) alike(o *blend) bool {
	if len(b.parts) != len(o.parts) || b.concat != o.concat || !b.concat && b.size > 0 &&
		!slices.Equal(b.weights, o.weights) {
		return false
	}
	for i, p := range b.parts {
		if p.name != o.parts[i].name || p.asked != o.parts[i].asked {
			return false
		}
	}
	return true
}
