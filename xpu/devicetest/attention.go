package devicetest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"mula/xpu"
)

// An attentionShape is a case of attention.
type attentionShape struct {
	xpu.Heads
	first    int
	spread   float64 // spread of the scores; 0 means 1
	document int     // mean length of documents, to which attention is restricted; 0: no restriction
	window   int     // number of keys that a query attends to; 0: no restriction
}

func (s attentionShape) String() string {
	return fmt.Sprintf("%d rows of %d, %d and %d heads of %d, from position %d, room for %d, "+
		"spread %g, documents of %d, windows of %d",
		s.Rows, s.Length, s.Heads.Heads, s.KVHeads, s.Size, s.first, s.Capacity, s.spread, s.document, s.window)
}

var attentionShapes = []attentionShape{
	{xpu.Heads{Rows: 1, Length: 1, Heads: 1, KVHeads: 1, Size: 2, Capacity: 1}, 0, 0, 0, 0},
	{xpu.Heads{Rows: 2, Length: 5, Heads: 2, KVHeads: 2, Size: 4, Capacity: 5}, 0, 0, 0, 0},
	{xpu.Heads{Rows: 1, Length: 63, Heads: 3, KVHeads: 1, Size: 10, Capacity: 63}, 0, 0, 0, 0},
	{xpu.Heads{Rows: 2, Length: 64, Heads: 4, KVHeads: 2, Size: 16, Capacity: 64}, 0, 0, 0, 0},
	{xpu.Heads{Rows: 1, Length: 65, Heads: 2, KVHeads: 1, Size: 34, Capacity: 65}, 0, 0, 0, 0},
	{xpu.Heads{Rows: 1, Length: 200, Heads: 2, KVHeads: 1, Size: 64, Capacity: 200}, 0, 0, 0, 0},
	{xpu.Heads{Rows: 1, Length: 129, Heads: 2, KVHeads: 2, Size: 80, Capacity: 129}, 0, 0, 0, 0},
	{xpu.Heads{Rows: 1, Length: 70, Heads: 1, KVHeads: 1, Size: 128, Capacity: 70}, 0, 0, 0, 0},
	{xpu.Heads{Rows: 1, Length: 40, Heads: 1, KVHeads: 1, Size: 130, Capacity: 40}, 0, 0, 0, 0},
	{xpu.Heads{Rows: 1, Length: 33, Heads: 1, KVHeads: 1, Size: 258, Capacity: 33}, 0, 0, 0, 0},
	{xpu.Heads{Rows: 2, Length: 90, Heads: 2, KVHeads: 1, Size: 8, Capacity: 90}, 0, 100, 0, 0},
	{xpu.Heads{Rows: 2, Length: 1, Heads: 4, KVHeads: 2, Size: 16, Capacity: 9}, 0, 0, 0, 0},
	{xpu.Heads{Rows: 2, Length: 1, Heads: 4, KVHeads: 2, Size: 16, Capacity: 140}, 131, 0, 0, 0},
	{xpu.Heads{Rows: 3, Length: 7, Heads: 2, KVHeads: 1, Size: 6, Capacity: 80}, 60, 0, 0, 0},
	{xpu.Heads{Rows: 2, Length: 70, Heads: 2, KVHeads: 1, Size: 20, Capacity: 200}, 64, 0, 0, 0},
	{xpu.Heads{Rows: 2, Length: 5, Heads: 2, KVHeads: 2, Size: 4, Capacity: 5}, 0, 0, 1, 0},
	{xpu.Heads{Rows: 3, Length: 100, Heads: 4, KVHeads: 2, Size: 16, Capacity: 100}, 0, 0, 7, 0},
	{xpu.Heads{Rows: 2, Length: 300, Heads: 2, KVHeads: 1, Size: 34, Capacity: 300}, 0, 0, 100, 0},
	{xpu.Heads{Rows: 1, Length: 260, Heads: 1, KVHeads: 1, Size: 130, Capacity: 260}, 0, 0, 90, 0},
	{xpu.Heads{Rows: 2, Length: 90, Heads: 2, KVHeads: 1, Size: 8, Capacity: 90}, 0, 100, 40, 0},
	{xpu.Heads{Rows: 2, Length: 70, Heads: 2, KVHeads: 1, Size: 20, Capacity: 200}, 64, 0, 50, 0},
	{xpu.Heads{Rows: 2, Length: 150, Heads: 2, KVHeads: 1, Size: 16, Capacity: 150}, 0, 0, 0, 40},
	{xpu.Heads{Rows: 1, Length: 70, Heads: 2, KVHeads: 1, Size: 20, Capacity: 200}, 64, 0, 0, 50},
	{xpu.Heads{Rows: 1, Length: 100, Heads: 2, KVHeads: 2, Size: 64, Capacity: 100}, 0, 0, 30, 33},
	// latents of DeepSeek-V3
	{xpu.Heads{Rows: 1, Length: 1, Heads: 3, KVHeads: 1, Size: 576, Capacity: 80}, 71, 0, 0, 0},
}

func attentionFamily(t *testing.T, d xpu.Device, tolerance float64) {
	for i, s := range attentionShapes {
		t.Run(s.String(), func(t *testing.T) { attentionCase(t, d, tolerance, s, uint64(i)) })
	}
	t.Run("random shapes", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) {
			s := attentionShape{Heads: xpu.Heads{Rows: rapid.IntRange(1, 3).Draw(t, "rows"),
				KVHeads: rapid.IntRange(1, 3).Draw(t, "heads of keys"),
				Length: rapid.OneOf(rapid.IntRange(1, 20), rapid.IntRange(30, 70)).Draw(t,
					"length"), Size: 2 * rapid.IntRange(1, 20).Draw(t, "half a head")}}
			s.Heads.Heads = s.KVHeads * rapid.IntRange(1, 3).Draw(t, "share")
			s.first = rapid.SampledFrom([]int{0, 0, 1, 70}).Draw(t, "first")
			s.Capacity = s.first + s.Length
			if s.first > 0 {
				s.Capacity += rapid.IntRange(0, 9).Draw(t, "room")
			}
			s.document = rapid.SampledFrom([]int{0, 1, 5, 40, 100}).Draw(t, "length of documents")
			s.window = rapid.SampledFrom([]int{0, 0, 1, 3, 35}).Draw(t, "window")
			attentionCase(t, d, tolerance, s, rapid.Uint64().Draw(t, "seed"))
		})
	})
	t.Run("no rows", func(t *testing.T) {
		q, kv, tokens := upload(t, d, nil, 0, 2, 4, 4), upload(t, d, nil, 0, 1, 4, 4), upload(t, d, nil, 0, 8)
		a := xpu.Attention{Q: q, K: kv, V: kv, Context: tokens, LSE: upload(t, d, nil, 0, 2, 4)}
		d.Attend(a)
		d.AttendGrad(a, tokens, upload(t, d, nil, 0, 16), kv, kv)
	})
	t.Run("no bias", func(t *testing.T) { attentionBias(t, d, tolerance) })
}

// Attention compares one attention and its gradients with the reference, in float64. Attention is
// restricted to documents of the given mean length, or not if it is 0. The capacity is the length.
func Attention(t *testing.T, d xpu.Device, tolerance float64, h xpu.Heads, document int) {
	h.Capacity = h.Length
	attentionCase(t, d, tolerance, attentionShape{Heads: h, document: document}, uint64(h.Length))
}

// attentionCase compares an attention and its gradients with the reference.
func attentionCase(t tester, d xpu.Device, tolerance float64, s attentionShape, seed uint64) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 1))
	in := newAttentionInput(r, s)
	for i := range in.q {
		in.q[i] *= float32(max(1, s.spread))
	}
	want := in.reference(s)
	width := s.Heads.Heads * s.Size
	tokens := s.Rows * s.Length

	a := in.upload(t, d, s)
	d.Attend(a)
	compare(t, "context", read(t, d, a.Context), want.context.sum, want.context.scale, tolerance)
	compare(t, "logsumexp", read(t, d, a.LSE), want.lse.sum, want.lse.scale, tolerance)

	// The gradients of queries overwrite the columns of the queries only. The gradients of keys and
	// values overwrite the positions of keys that were read only.
	dcontext := upload(t, d, in.dcontext, tokens, width)
	likeKeys := func() xpu.Tensor { return upload(t, d, poison(len(in.k)), a.K.Shape()...) }
	dqkv, dkeys, dvalues := poison(tokens*s.Width()), likeKeys(), likeKeys()
	for i := range tokens {
		for j := width; j < s.Width(); j++ {
			dqkv[i*s.Width()+j] = 7
		}
	}
	projections := upload(t, d, dqkv, tokens, s.Width())
	d.AttendGrad(a, dcontext, projections, dkeys, dvalues)
	dqkv = read(t, d, projections)
	dk, dv := s.written(t, "keys", read(t, d, dkeys)), s.written(t, "values", read(t, d, dvalues))
	dq := make([]float32, 0, tokens*width)
	for i := range tokens {
		row := dqkv[i*s.Width():][:s.Width()]
		dq = append(dq, row[:width]...)
		if at := slices.IndexFunc(row[width:], func(v float32) bool { return v != 7 }); at >= 0 {
			t.Fatalf("AttendGrad writes %g to element %d of the projections of token %d, beyond the queries",
				row[width+at], width+at, i)
		}
	}
	compare(t, "gradient of queries", dq, want.dq.sum, want.dq.scale, tolerance)
	compare(t, "gradient of keys", dk, keysOf(s, want.dk.sum), keysOf(s, want.dk.scale), tolerance)
	compare(t, "gradient of values", dv, keysOf(s, want.dv.sum), keysOf(s, want.dv.scale), tolerance)

	// The same command again computes the same bits.
	projections, dkeys, dvalues = upload(t, d, poison(len(dqkv)), tokens, s.Width()), likeKeys(), likeKeys()
	d.AttendGrad(a, dcontext, projections, dkeys, dvalues)
	again := [][]float32{read(t, d, projections), s.written(t, "keys", read(t, d, dkeys)),
		s.written(t, "values", read(t, d, dvalues))}
	for i := range tokens {
		if !slices.Equal(again[0][i*s.Width():][:width], dqkv[i*s.Width():][:width]) {
			t.Fatalf("token %d: other gradients of queries at the second time", i)
		}
	}
	if !slices.Equal(again[1], dk) || !slices.Equal(again[2], dv) {
		t.Fatalf("other gradients of keys or values at the second time")
	}
}

// written returns the gradients of the keys that the queries may see. The others must still be NaN.
func (s attentionShape) written(t tester, name string, x []float32) []float32 {
	t.Helper()
	for i, v := range x {
		if key := i / s.Size % s.Capacity; key >= s.first+s.Length && !math.IsNaN(float64(v)) {
			t.Fatalf("AttendGrad writes %g to the gradients of %s, to key %d after the last query", v, name, key)
		}
	}
	return keysOf(s, x)
}

// keysOf returns the elements of the keys that the queries may see.
func keysOf[E any](s attentionShape, x []E) (seen []E) {
	for group := range s.Rows * s.KVHeads {
		seen = append(seen, x[group*s.Capacity*s.Size:][:(s.first+s.Length)*s.Size]...)
	}
	return seen
}

// attentionBias checks that the rounding errors of contexts with one sign have a mean near zero.
func attentionBias(t *testing.T, d xpu.Device, tolerance float64) {
	s := attentionShape{Heads: xpu.Heads{Rows: 2, Length: 150, Heads: 2, KVHeads: 1, Size: 32, Capacity: 150}}
	in := newAttentionInput(rand.New(rand.NewPCG(9, 9)), s)
	for i, v := range in.v {
		in.v[i] = 2 + v
	}
	want := in.reference(s).context
	a := in.upload(t, d, s)
	d.Attend(a)
	mean := 0.0
	for i, v := range read(t, d, a.Context) {
		mean += (float64(v)/want.sum[i] - 1) / float64(len(want.sum))
	}
	if !(math.Abs(mean) <= tolerance/20) {
		t.Errorf("the mean of the errors of contexts is %g of their size, beyond %g", mean, tolerance/20)
	}
}

// poison returns n NaNs, for memory that was not written.
func poison(n int) []float32 { return slices.Repeat([]float32{float32(math.NaN())}, n) }

// attentionInput is the input of an attention and its gradient. Keys and values that must not be
// read are NaN.
type attentionInput struct {
	q, k, v, dcontext []float32
	begin             []int32
}

// upload returns the attention of this input, with results that are not written yet.
func (in attentionInput) upload(t tester, d xpu.Device, s attentionShape) xpu.Attention {
	tokens, heads := s.Rows*s.Length, s.Heads.Heads
	a := xpu.Attention{
		Q:       upload(t, d, in.q, s.Rows, heads, s.Length, s.Size),
		K:       upload(t, d, in.k, s.Rows, s.KVHeads, s.Capacity, s.Size),
		V:       upload(t, d, in.v, s.Rows, s.KVHeads, s.Capacity, s.Size),
		First:   s.first,
		Context: upload(t, d, poison(tokens*heads*s.Size), tokens, heads*s.Size),
		LSE:     upload(t, d, poison(tokens*heads), s.Rows, heads, s.Length),
	}
	if len(in.begin) > 0 {
		a.Begin = uploadInts(t, d, in.begin, s.Rows, s.Length)
	}
	return a
}

func newAttentionInput(r *rand.Rand, s attentionShape) attentionInput {
	in := attentionInput{
		q:        random(r, s.Rows*s.Heads.Heads*s.Length*s.Size),
		k:        random(r, s.Rows*s.KVHeads*s.Capacity*s.Size),
		v:        random(r, s.Rows*s.KVHeads*s.Capacity*s.Size),
		dcontext: random(r, s.Rows*s.Length*s.Heads.Heads*s.Size),
	}
	scale := float32(3 / math.Sqrt(float64(s.Size))) // a spread of scores of about 1
	for i := range in.q {
		in.q[i] *= scale
	}
	nan := float32(math.NaN())
	for group := range s.Rows * s.KVHeads {
		for i := (group*s.Capacity + s.first + s.Length) * s.Size; i < (group+1)*s.Capacity*s.Size; i++ {
			in.k[i], in.v[i] = nan, nan
		}
	}
	for range s.Rows * min(1, s.document+s.window) {
		begin := 0 // the first document starts at or before the first query
		if s.document > 0 && s.first > 0 {
			begin = r.IntN(s.first)
		}
		for i := range s.Length {
			if s.document > 0 && r.IntN(s.document) == 0 {
				begin = s.first + i
			}
			if s.window > 0 {
				begin = max(begin, s.first+i-s.window+1)
			}
			in.begin = append(in.begin, int32(begin))
		}
	}
	return in
}

// sums are sums, with the sums of the absolute values of their terms.
type sums struct{ sum, scale []float64 }

func newSums(n int) sums { return sums{make([]float64, n), make([]float64, n)} }

// add adds a term to sum i; bound limits the size of its factors.
func (s sums) add(i int, term, bound float64) {
	s.sum[i] += term
	s.scale[i] += math.Abs(bound) + 1e-30 // numbers near the smallest may be zero
}

type attentionResult struct{ context, lse, dq, dk, dv sums }

// reference computes attention by its formulas, one query at a time, with all scores of the query.
func (in attentionInput) reference(s attentionShape) attentionResult {
	heads, d, width := s.Heads.Heads, s.Size, s.Heads.Heads*s.Size
	out := attentionResult{newSums(len(in.dcontext)), newSums(s.Rows * heads * s.Length), newSums(len(in.q)),
		newSums(len(in.k)), newSums(len(in.v))}
	at := func(x []float32, i int) float64 { return float64(x[i]) }
	for row := range s.Rows {
		for head := range heads {
			group := row*s.KVHeads + head/(heads/s.KVHeads)
			for i := range s.Length {
				q := ((row*heads+head)*s.Length + i) * d
				token := (row*s.Length+i)*width + head*d // index in the context, and in the gradients of queries
				begin, keys := 0, s.first+i+1
				if len(in.begin) > 0 {
					begin = int(in.begin[row*s.Length+i])
				}
				key := func(p int) int { return (group*s.Capacity + begin + p) * d }

				score, top := make([]float64, keys-begin), math.Inf(-1)
				size := 0.0 // the largest sum of absolute terms of a score
				for p := range score {
					terms := 0.0
					for j := range d {
						v := at(in.q, q+j) * at(in.k, key(p)+j)
						score[p] += v
						terms += math.Abs(v)
					}
					top, size = max(top, score[p]), max(size, terms)
				}
				total := 0.0
				for _, v := range score {
					total += math.Exp(v - top)
				}
				lse := top + math.Log(total)
				out.lse.add((row*heads+head)*s.Length+i, lse, 1+size)
				// the error of a score, which grows with its terms, is the relative error of its
				// probability
				prob, unsure := score, 1+size/2
				for p, v := range score {
					prob[p] = math.Exp(v - lse)
				}
				for p, v := range prob {
					for j := range d {
						term := v * at(in.v, key(p)+j)
						out.context.add(token+j, term, term*unsure)
					}
				}

				// The gradient: of values, of probabilities, of scores, of queries and keys.
				through, throughSize := 0.0, 0.0 // Σ dO·O
				for j := range d {
					through += at(in.dcontext, token+j) * out.context.sum[token+j]
					throughSize += math.Abs(at(in.dcontext, token+j) * out.context.sum[token+j])
				}
				for p, v := range prob {
					dprob, dprobSize := 0.0, 0.0
					for j := range d {
						g := at(in.dcontext, token+j)
						out.dv.add(key(p)+j, v*g, v*g*unsure)
						dprob += g * at(in.v, key(p)+j)
						dprobSize += math.Abs(g * at(in.v, key(p)+j))
					}
					dscore, dscoreSize := v*(dprob-through), v*(dprobSize+throughSize)*unsure
					for j := range d {
						out.dq.add(token+j, dscore*at(in.k, key(p)+j), dscoreSize*at(in.k, key(p)+j))
						out.dk.add(key(p)+j, dscore*at(in.q, q+j), dscoreSize*at(in.q, q+j))
					}
				}
			}
		}
	}
	return out
}
