package moe

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"mula/xpu"
)

// Logits returns the model's logits [len(tokens), V] after each token of a sequence.
func (m *Model) Logits(ctx context.Context, tokens []uint32) ([]float32, error) {
	d, err := m.newDecoder(len(tokens), len(tokens))
	if err != nil {
		return nil, err
	}
	defer d.close()
	if err := d.append(ctx, tokens); err != nil {
		return nil, err
	}
	logits, err := d.logits(ctx, len(tokens))
	return slices.Clone(logits), err
}

// GenerateOptions are the options of [Model.Generate].
type GenerateOptions struct {
	MaxTokens   int      // maximum number of tokens
	Temperature float64  // divides the logits; 0 always takes the most likely token
	TopK        int      // sample only among the TopK most likely tokens; 0 = all
	TopP        float64  // sample among the fewest tokens whose probabilities reach this sum; 0 = all
	Seed        uint64   // seed of the random choices
	Vocabulary  int      // only ids below this are chosen; 0 = VocabSize
	Stop        []uint32 // tokens that end the text; yield gets them too
}

// Validate returns an error if an option is out of range.
func (o GenerateOptions) Validate() error {
	switch {
	case o.MaxTokens < 0:
		return fmt.Errorf("number of tokens %d is negative", o.MaxTokens)
	case !(o.Temperature >= 0):
		return fmt.Errorf("temperature %g must not be negative", o.Temperature)
	case o.TopK < 0:
		return fmt.Errorf("top-k %d must not be negative", o.TopK)
	case !(o.TopP >= 0 && o.TopP <= 1):
		return fmt.Errorf("top-p %g must be between 0 and 1", o.TopP)
	case o.Vocabulary < 0:
		return fmt.Errorf("vocabulary %d is negative", o.Vocabulary)
	}
	return nil
}

// Generate continues a prompt of at least one token and passes each new token to yield. It stops
// after MaxTokens tokens, after a stop token, when yield returns false or when ctx ends. Prompt and
// new tokens together must not exceed max_position_embeddings.
func (m *Model) Generate(ctx context.Context, prompt []uint32, o GenerateOptions, yield func(token uint32) bool) error {
	if err := o.Validate(); err != nil {
		return err
	}
	if o.MaxTokens > m.cfg.MaxPositions-len(prompt) {
		return fmt.Errorf("%d tokens after a prompt of %d are beyond the model's max_position_embeddings %d",
			o.MaxTokens, len(prompt), m.cfg.MaxPositions)
	}
	d, err := m.newDecoder(len(prompt)+o.MaxTokens, 1)
	if err != nil {
		return err
	}
	defer d.close()
	if o.Vocabulary == 0 || o.Vocabulary > m.cfg.VocabSize {
		o.Vocabulary = m.cfg.VocabSize
	}
	choose := newSampler(o)
	next := prompt
	for range o.MaxTokens {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := d.append(ctx, next); err != nil {
			return err
		}
		logits, err := d.logits(ctx, 1)
		if err != nil {
			return err
		}
		token, err := choose.token(logits[:o.Vocabulary])
		if err != nil {
			return err
		}
		if !yield(token) || slices.Contains(o.Stop, token) {
			return nil
		}
		next = []uint32{token}
	}
	return nil
}

// A decoder reads one sequence, first the prompt and then token by token, and keeps the keys and
// values of the tokens read. See [layerCache].
type decoder struct {
	m        *Model
	capacity int
	length   int
	layers   []layerCache
	space    generateSpace
	last     xpu.Tensor // [rows, V] buffer for logits
	host     []float32  // for logits, if the device has its own memory
}

// newDecoder makes a decoder for a sequence of at most capacity tokens that returns the logits of
// at most rows tokens at a time.
func (m *Model) newDecoder(capacity, rows int) (*decoder, error) {
	if err := m.whole("running the model"); err != nil {
		return nil, err
	}
	c := &m.cfg
	if capacity > c.MaxPositions {
		return nil, fmt.Errorf("a sequence of %d tokens is beyond the model's max_position_embeddings %d", capacity,
			c.MaxPositions)
	}
	d := &decoder{m: m, capacity: capacity, layers: make([]layerCache, c.Layers)}
	err := d.newCache()
	if err == nil {
		d.last, err = m.dev.New(xpu.Float32, rows, c.VocabSize)
	}
	if err != nil {
		d.close()
		return nil, fmt.Errorf("keys, values and logits of a sequence of %d tokens: %w", capacity, err)
	}
	return d, nil
}

// close releases the decoder's memory.
func (d *decoder) close() {
	d.freeCache()
	d.m.dev.Release(d.last)
}

// append reads the prompt, or one more token. It leaves their final hidden states in ws.h until the
// model's next use.
func (d *decoder) append(ctx context.Context, tokens []uint32) error {
	m, c := d.m, d.m.cfg
	if len(tokens) == 0 {
		return fmt.Errorf("an empty sequence has no next token; give at least one token")
	}
	if d.length > 0 && len(tokens) > 1 {
		return fmt.Errorf("%d tokens after %d; after the prompt, a decoder reads one token at a time", len(tokens),
			d.length)
	}
	if len(tokens) > d.capacity-d.length {
		return fmt.Errorf("%d tokens after %d exceed the decoder's capacity of %d", len(tokens), d.length, d.capacity)
	}
	for i, id := range tokens {
		if int64(id) >= int64(c.VocabSize) {
			return fmt.Errorf("token %d: id %d is beyond the model's vocabulary of %d", d.length+i, id, c.VocabSize)
		}
	}
	f, err := m.flight(0)
	if err != nil {
		return err
	}
	if err := m.ws.plan(m.dev, c, f, passShape{rows: 1, s: len(tokens), ranks: 1, tensor: 1, parts: 1, layers: c.Layers,
		last: true}); err != nil {
		return err
	}
	if err := m.extendRope(d.length + len(tokens)); err != nil {
		return err
	}
	m.embedTokens(func(i int) uint32 { return tokens[i] })
	if d.length == 0 {
		d.orderPrompt(len(tokens))
	}
	if err := m.decode(ctx, m.ws.xL, d.target); err != nil {
		return err
	}
	m.normalizeLast(false)
	d.length += len(tokens)
	return nil
}

// logits returns the logits [rows, V] after the last rows tokens read. They are valid until the
// next call.
func (d *decoder) logits(ctx context.Context, rows int) ([]float32, error) {
	m, logits, h := d.m, d.last.Rows(0, rows), d.m.ws.h
	m.dev.MatMul(logits, h.Rows(h.Dim(0)-rows, h.Dim(0)), m.head.w.T(), xpu.MatMulOptions{})
	x, err := xpu.Numbers(ctx, m.dev, logits, &d.host)
	if err != nil {
		return nil, fmt.Errorf("computing logits: %w", err)
	}
	return x, nil
}

// A sampler draws tokens from logits.
type sampler struct {
	o          GenerateOptions
	random     *rand.Rand
	candidates []candidate
}

type candidate struct {
	token  uint32
	weight float64 // logit first, then probability without its normalisation
}

func newSampler(o GenerateOptions) *sampler {
	return &sampler{o: o, random: rand.New(rand.NewPCG(o.Seed, 0))}
}

// token chooses one token.
func (s *sampler) token(logits []float32) (uint32, error) {
	kept, sum, err := s.keep(logits)
	if err != nil {
		return 0, err
	}
	if len(kept) == 1 {
		return kept[0].token, nil
	}
	left := s.random.Float64() * sum
	for _, c := range kept {
		if left -= c.weight; left < 0 {
			return c.token, nil
		}
	}
	return kept[len(kept)-1].token, nil
}

// keep returns the tokens to draw from, the likeliest first, and the sum of their weights. It
// applies temperature, then top-k, then top-p, in the order of transformers. Of equal logits the
// lower id comes first; transformers keeps all tokens whose logit equals the last of top-k.
func (s *sampler) keep(logits []float32) (kept []candidate, sum float64, err error) {
	best := 0
	for i, x := range logits {
		if x-x != 0 {
			return nil, 0, fmt.Errorf("the logit of token %d is %v, not a number; the weights are damaged or "+
				"training diverged", i, x)
		}
		if x > logits[best] {
			best = i
		}
	}
	if s.o.Temperature == 0 {
		return append(s.candidates[:0], candidate{uint32(best), 1}), 1, nil
	}
	kept = s.likeliest(logits)
	for i := range kept {
		kept[i].weight = math.Exp((kept[i].weight - float64(logits[best])) / s.o.Temperature)
		sum += kept[i].weight
	}
	if s.o.TopP > 0 && s.o.TopP < 1 {
		reached := 0.0
		for i, c := range kept {
			if reached += c.weight; reached >= s.o.TopP*sum {
				return kept[:i+1], reached, nil
			}
		}
	}
	return kept, sum, nil
}

// byWeight orders the likelier candidate first.
func byWeight(a, b candidate) int {
	return cmp.Or(cmp.Compare(b.weight, a.weight), cmp.Compare(a.token, b.token))
}

// likeliest returns the top-k tokens, or all tokens without top-k, with their logits, the likeliest
// first.
func (s *sampler) likeliest(logits []float32) []candidate {
	c := s.candidates[:0]
	k := s.o.TopK
	if k == 0 || k > len(logits) {
		k = len(logits)
	}
	for i, x := range logits {
		// Collecting 2k candidates before dropping the worse half makes most tokens of a large
		// vocabulary cost one comparison.
		if len(c) >= k && float64(x) <= c[k-1].weight {
			continue
		}
		if c = append(c, candidate{uint32(i), float64(x)}); len(c) == k || len(c) == 2*k {
			slices.SortFunc(c, byWeight)
			c = c[:k]
		}
	}
	slices.SortFunc(c, byWeight)
	s.candidates = c
	return c[:k]
}
