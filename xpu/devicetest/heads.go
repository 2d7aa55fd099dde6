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

// A headsCase is a case of projections and their heads.
type headsCase struct {
	headsShape
	factor float64 // of queries; 0: Size^(-1/2)
}

// A headsShape is a case without the factor of queries.
type headsShape struct {
	xpu.Heads
	first         int
	normed, known bool
	each          bool // a norm for each head, with the same weights
	clip          float64
	plain         int // elements of a head that are not rotated
	interleaved   bool
}

func (c headsCase) String() string {
	return fmt.Sprintf("%d rows of %d, %d and %d heads of %d, from position %d, room for %d, normed %v, "+
		"each head %v, known %v, clip %g, %d elements not rotated, interleaved %v, factor %g",
		c.Rows, c.Length, c.Heads.Heads, c.KVHeads, c.Size, c.first, c.Capacity, c.normed, c.each, c.known,
		c.clip, c.plain, c.interleaved, c.factor)
}

func headsFamily(t *testing.T, d xpu.Device, tolerance float64) {
	tolerance = min(tolerance, 1e-5) // no product whose operands would be rounded
	for i, shape := range []headsShape{
		{xpu.Heads{Rows: 1, Length: 1, Heads: 1, KVHeads: 1, Size: 2, Capacity: 1}, 0, true, false, false, 0, 0, false},
		{xpu.Heads{Rows: 2, Length: 5, Heads: 4, KVHeads: 2, Size: 6, Capacity: 5}, 0, true, false, false, 0.8, 0,
			false},
		{xpu.Heads{Rows: 2, Length: 5, Heads: 4, KVHeads: 2, Size: 6, Capacity: 5}, 0, true, true, false, 0, 0, false},
		{xpu.Heads{Rows: 2, Length: 5, Heads: 4, KVHeads: 1, Size: 32, Capacity: 5}, 0, false, false, false, 0.5, 0,
			false},
		{xpu.Heads{Rows: 3, Length: 4, Heads: 3, KVHeads: 3, Size: 34, Capacity: 4}, 0, true, false, false, 1.2, 0,
			false},
		{xpu.Heads{Rows: 1, Length: 70, Heads: 5, KVHeads: 5, Size: 66, Capacity: 70}, 0, true, true, false, 0.4, 0,
			false},
		{xpu.Heads{Rows: 2, Length: 3, Heads: 2, KVHeads: 1, Size: 128, Capacity: 3}, 0, false, false, false, 0, 0,
			false},
		{xpu.Heads{Rows: 1, Length: 1100, Heads: 2, KVHeads: 1, Size: 4, Capacity: 1100}, 0, true, false, false, 0.9,
			0, false},
		{xpu.Heads{Rows: 2, Length: 3, Heads: 2, KVHeads: 1, Size: 10, Capacity: 20}, 7, true, false, false, 1, 0,
			false},
		{xpu.Heads{Rows: 2, Length: 1, Heads: 2, KVHeads: 2, Size: 16, Capacity: 10}, 9, false, false, false, 0, 0,
			false},
		{xpu.Heads{Rows: 0, Length: 3, Heads: 2, KVHeads: 2, Size: 16, Capacity: 3}, 0, true, false, false, 0, 0,
			false},
		{xpu.Heads{Rows: 1, Length: 1, Heads: 1, KVHeads: 1, Size: 2, Capacity: 1}, 0, true, false, true, 0, 0, false},
		{xpu.Heads{Rows: 2, Length: 5, Heads: 4, KVHeads: 2, Size: 6, Capacity: 5}, 0, true, false, true, 0.8, 0,
			false},
		{xpu.Heads{Rows: 1, Length: 70, Heads: 6, KVHeads: 3, Size: 66, Capacity: 70}, 0, true, true, true, 0.4, 0,
			false},
		{xpu.Heads{Rows: 2, Length: 3, Heads: 2, KVHeads: 1, Size: 128, Capacity: 3}, 0, true, false, true, 0, 0,
			false},
		{xpu.Heads{Rows: 2, Length: 3, Heads: 4, KVHeads: 2, Size: 10, Capacity: 20}, 7, true, false, true, 0, 0,
			false},
		{xpu.Heads{Rows: 2, Length: 5, Heads: 4, KVHeads: 2, Size: 12, Capacity: 5}, 0, true, false, true, 0.8, 6,
			false},
		{xpu.Heads{Rows: 1, Length: 7, Heads: 4, KVHeads: 2, Size: 128, Capacity: 7}, 0, false, false, false, 0, 64,
			false},
		{xpu.Heads{Rows: 2, Length: 3, Heads: 2, KVHeads: 1, Size: 70, Capacity: 9}, 5, true, true, false, 0.5, 34,
			false},
		{xpu.Heads{Rows: 2, Length: 5, Heads: 4, KVHeads: 2, Size: 12, Capacity: 5}, 0, true, false, true, 0.8, 6,
			true},
		{xpu.Heads{Rows: 2, Length: 7, Heads: 4, KVHeads: 2, Size: 128, Capacity: 7}, 0, false, false, false, 0, 0,
			true},
		{xpu.Heads{Rows: 2, Length: 3, Heads: 2, KVHeads: 1, Size: 70, Capacity: 9}, 5, true, true, false, 0.5, 34,
			true},
		{xpu.Heads{Rows: 1, Length: 9, Heads: 4, KVHeads: 2, Size: 34, Capacity: 9}, 0, true, false, false, 0.9, 0,
			true},
	} {
		c := headsCase{shape, []float64{0, 0, 0.35}[i%3]}
		t.Run(c.String(), func(t *testing.T) { c.check(t, d, tolerance, uint64(i)) })
	}
	t.Run("random shapes", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) {
			c := headsCase{headsShape: headsShape{Heads: xpu.Heads{Rows: rapid.IntRange(1, 3).Draw(t, "rows"),
				KVHeads: rapid.IntRange(1, 3).Draw(t, "heads of keys"),
				Length:  rapid.IntRange(1, 40).Draw(t, "length"), Size: 2 * rapid.IntRange(1, 40).Draw(t,
					"half a head")}}}
			c.Heads.Heads = c.KVHeads * rapid.IntRange(1, 3).Draw(t, "share")
			c.first = rapid.SampledFrom([]int{0, 0, 5}).Draw(t, "first")
			c.Capacity = c.first + c.Length
			if c.first > 0 {
				c.Capacity += rapid.IntRange(0, 9).Draw(t, "room")
			}
			c.normed, c.known = rapid.Bool().Draw(t, "normed"), rapid.Bool().Draw(t, "known")
			c.each = rapid.Bool().Draw(t, "a norm for each head")
			c.clip = rapid.SampledFrom([]float64{0, 0.3, 1}).Draw(t, "clip")
			c.plain = 2 * rapid.SampledFrom([]int{0, 0, 1, c.Size / 4, c.Size/2 - 1}).Draw(t, "not rotated")
			c.plain, c.interleaved = min(c.plain, c.Size-2), rapid.Bool().Draw(t, "interleaved")
			c.factor = rapid.SampledFrom([]float64{0, 0.02, 1}).Draw(t, "factor of queries")
			c.check(t, d, tolerance, rapid.Uint64().Draw(t, "seed"))
		})
	})
}

// A side is queries, keys or values of tokens: their offset in a projection, their heads and their
// norm.
type side struct {
	at, heads int
	weight    []float32 // nil without norm
	norms     int       // of a token
	r         []float64 // [T, norms]
}

// normed returns element j of the side of a projection, before clipping.
func (s side) normed(x []float32, token, j int) float64 {
	v := float64(x[s.at+j])
	if s.weight != nil {
		v *= s.root(token, j) * float64(s.weight[j%len(s.weight)])
	}
	return v
}

// partner returns the element of a head that element j is rotated with, and the factor of its sine;
// 0 if element j is not rotated.
func (c headsCase) partner(j int) (other int, turn float64) {
	half := (c.Size - c.plain) / 2
	switch {
	case c.interleaved && j < 2*half:
		return j ^ 1, float64(j%2*2 - 1)
	case j < half:
		return j + half, -1
	case j < 2*half:
		return j - half, 1
	}
	return j, 0
}

// rotation returns the cosine and the sine of element j of a head at a position.
func (c headsCase) rotation(cos, sin []float32, position, j int) (co, si float64) {
	half := (c.Size - c.plain) / 2
	if j >= 2*half {
		return 1, 0
	}
	pair := j % half
	if c.interleaved {
		pair = j / 2
	}
	return float64(cos[position*half+pair]), float64(sin[position*half+pair])
}

// root returns the inverse root of the norm of element j.
func (s side) root(token, j int) float64 { return s.r[token*s.norms+j/len(s.weight)] }

// check compares heads with the formulas, and the gradients if the heads start at position 0 and
// use the full capacity.
func (c headsCase) check(t tester, d xpu.Device, tolerance float64, seed uint64) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 3))
	tokens, width, size := c.Rows*c.Length, c.Width(), c.Size
	queries, keys := c.Heads.Heads*size, c.KVHeads*size
	qkv := random(r, tokens*width)
	p := xpu.Projections{Epsilon: 1e-5, Known: c.known, Clip: c.clip, First: c.first, Interleaved: c.interleaved,
		Scale: c.factor}
	ofQueries := c.factor
	if ofQueries == 0 {
		ofQueries = 1 / math.Sqrt(float64(size))
	}
	sides := []side{{at: 0, heads: c.Heads.Heads}, {at: queries, heads: c.KVHeads},
		{at: queries + keys, heads: c.KVHeads}}
	roots := make([][]float32, 2)
	if c.normed {
		for i := range 2 {
			s := &sides[i]
			if s.norms = 1; c.each {
				s.norms = s.heads
			}
			s.weight = random(r, s.heads*size/s.norms)
			s.r, roots[i] = make([]float64, tokens*s.norms), poison(tokens*s.norms)
			for j := range s.r {
				if c.known {
					roots[i][j] = 1 + r.Float32()
					s.r[j] = float64(roots[i][j])
				}
			}
		}
	}
	c.settle(qkv, sides)
	half := (size - c.plain) / 2
	cos, sin := make([]float32, (c.first+c.Length)*half), make([]float32, (c.first+c.Length)*half)
	for i := range cos {
		s, c := math.Sincos(2 * math.Pi * r.Float64())
		cos[i], sin[i] = float32(c), float32(s)
	}

	// Heads: other memory is unchanged.
	const untouched = 7
	place := func(i, head, token int) int { // index of a head in the memory of that side
		row, position := token/c.Length, token%c.Length
		if i == 0 {
			return ((row*c.Heads.Heads+head)*c.Length + position) * size
		}
		return ((row*c.KVHeads+head)*c.Capacity + c.first + position) * size
	}
	want := []sums{newSums(tokens * queries), newSums(c.Rows * c.KVHeads * c.Capacity * size),
		newSums(c.Rows * c.KVHeads * c.Capacity * size)}
	for i, s := range sides {
		for j := range want[i].sum {
			want[i].sum[j] = untouched
		}
		for token := range tokens {
			x := qkv[token*width:][:width]
			clipped := func(j int) float64 {
				v := s.normed(x, token, j)
				if c.clip > 0 {
					v = max(-c.clip, min(c.clip, v))
				}
				return v
			}
			for head := range s.heads {
				for j := range size {
					to, v := place(i, head, token)+j, clipped(head*size+j)
					want[i].sum[to], want[i].scale[to] = v, math.Abs(v)
					if i == 2 {
						continue // values are not rotated
					}
					co, si := c.rotation(cos, sin, c.first+token%c.Length, j)
					at, turn := c.partner(j)
					other := clipped(head*size + at)
					want[i].sum[to], want[i].scale[to] = v*co+other*si*turn, math.Abs(v)+math.Abs(other)
					if i == 0 {
						want[i].sum[to] *= ofQueries
						want[i].scale[to] *= ofQueries
					}
				}
			}
		}
	}
	if c.normed {
		p.QWeight, p.KWeight, p.RQ, p.RK = upload(t, d, sides[0].weight), upload(t, d, sides[1].weight), upload(t, d,
			roots[0]), upload(t, d, roots[1])
	}
	p.QKV = upload(t, d, qkv, tokens, width)
	p.Cos, p.Sin = upload(t, d, cos, c.first+c.Length, half), upload(t, d, sin, c.first+c.Length, half)
	filled := func(heads, positions int) xpu.Tensor {
		return upload(t, d, slices.Repeat([]float32{untouched}, c.Rows*heads*positions*size), c.Rows, heads, positions,
			size)
	}
	p.Q, p.K, p.V = filled(c.Heads.Heads, c.Length), filled(c.KVHeads, c.Capacity), filled(c.KVHeads, c.Capacity)
	d.SplitHeads(p)
	compare(t, "queries", read(t, d, p.Q), want[0].sum, want[0].scale, tolerance)
	compare(t, "keys", read(t, d, p.K), want[1].sum, want[1].scale, tolerance)
	compare(t, "values", read(t, d, p.V), want[2].sum, want[2].scale, tolerance)
	if c.normed {
		compare(t, "inverse roots of queries", read(t, d, p.RQ), sides[0].r, sides[0].r, tolerance)
		compare(t, "inverse roots of keys", read(t, d, p.RK), sides[1].r, sides[1].r, tolerance)
	}
	if c.first > 0 || c.Capacity != c.Length {
		return
	}

	// The gradients. Gradients of keys and values have their own memory; their columns in dqkv are
	// not read.
	dqkv, dk, dv := poison(tokens*width), random(r, tokens*keys), random(r, tokens*keys)
	for token := range tokens {
		copy(dqkv[token*width:][:queries], random(r, queries))
	}
	weights := [][]float32{nil, nil, nil} // gradients of weights before
	wantWeights, back := make([]sums, 3), newSums(tokens*width)
	// Norms over more columns than these, with the given means.
	wide, squares, products, means := newSums(tokens*width), newSums(2*tokens), newSums(2*tokens), random(r, 2*tokens)
	for i, s := range sides {
		weights[i] = random(r, len(s.weight))
		wantWeights[i] = newSums(len(s.weight))
		for j, v := range weights[i] {
			wantWeights[i].add(j, float64(v), float64(v))
		}
		for token := range tokens {
			x, out := qkv[token*width:][:width], token*width+s.at
			from := func(j int) float64 { // the gradient of element j of the side
				switch head := j / size; i {
				case 0:
					return float64(dqkv[out+j]) * ofQueries
				case 1:
					return float64(dk[place(i, head, token)+j%size])
				default:
					return float64(dv[place(i, head, token)+j%size])
				}
			}
			g, bound := make([]float64, s.heads*size), make([]float64, s.heads*size)
			along, alongSize := make([]float64, s.heads), make([]float64, s.heads) // of each norm
			for j := range g {
				g[j] = from(j)
				bound[j] = math.Abs(g[j])
				if i < 2 {
					co, si := c.rotation(cos, sin, token%c.Length, j%size)
					at, turn := c.partner(j % size)
					other := from(j/size*size + at)
					g[j] = g[j]*co - other*si*turn
					bound[j] += math.Abs(other)
				}
				if c.clip > 0 && math.Abs(s.normed(x, token, j)) > c.clip {
					g[j], bound[j] = 0, 0
				}
				if s.weight != nil {
					v, k, norm := float64(x[s.at+j])*s.root(token, j), j%len(s.weight), j/len(s.weight)
					wantWeights[i].add(k, g[j]*v, bound[j]*v)
					g[j] *= float64(s.weight[k])
					bound[j] *= math.Abs(float64(s.weight[k]))
					along[norm] += g[j] * v
					alongSize[norm] += math.Abs(bound[j] * v)
				}
			}
			for j := range g {
				if s.weight == nil {
					back.add(out+j, g[j], bound[j])
					wide.add(out+j, g[j], bound[j])
					continue
				}
				r, n, norm := s.root(token, j), float64(len(s.weight)), j/len(s.weight)
				v := float64(x[s.at+j]) * r
				back.add(out+j, r*(g[j]-v*along[norm]/n), r*(bound[j]+math.Abs(v)*alongSize[norm]/n))
				mean := float64(means[i*tokens+token])
				wide.add(out+j, r*g[j]-v*r*r*mean, r*bound[j]+math.Abs(v*r*r*mean))
				squares.add(i*tokens+token, v/r*v/r, v/r*v/r)
				products.add(i*tokens+token, g[j]*v/r, math.Abs(bound[j]*v/r))
			}
		}
	}
	gradient, again := upload(t, d, dqkv, tokens, width), upload(t, d, dqkv, tokens, width)
	ofHeads := func(x []float32) xpu.Tensor { return upload(t, d, x, c.Rows, c.KVHeads, c.Length, size) }
	var dqWeight, dkWeight xpu.Tensor
	if c.normed {
		dqWeight, dkWeight = upload(t, d, weights[0]), upload(t, d, weights[1])
	}
	d.JoinHeads(p, gradient, ofHeads(dk), ofHeads(dv), dqWeight, dkWeight)
	compare(t, "gradient of projections", read(t, d, gradient), back.sum, back.scale, tolerance)
	if c.normed {
		compare(t, "gradient of the queries' weight", read(t, d, dqWeight), wantWeights[0].sum, wantWeights[0].scale,
			tolerance)
		compare(t, "gradient of the keys' weight", read(t, d, dkWeight), wantWeights[1].sum, wantWeights[1].scale,
			tolerance)
	}
	if !c.normed || sides[0].norms > 1 || sides[1].norms > 1 {
		return
	}
	found := upload(t, d, poison(2*tokens), 2, tokens)
	d.SumHeads(found, p, xpu.Tensor{}, xpu.Tensor{})
	compare(t, "sums of squares", read(t, d, found), squares.sum, squares.scale, tolerance)
	d.SumHeads(found, p, again, ofHeads(dk))
	compare(t, "sums of products", read(t, d, found), products.sum, products.scale, tolerance)
	p.Means = upload(t, d, means, 2, tokens)
	d.JoinHeads(p, again, ofHeads(dk), ofHeads(dv), dqWeight, dkWeight)
	compare(t, "gradient of projections with wider norms", read(t, d, again), wide.sum, wide.scale, tolerance)
}

// settle computes inverse roots that are not known, and moves elements away from the clipping
// bound, where the result would depend on rounding.
func (c headsCase) settle(qkv []float32, sides []side) {
	width := c.Width()
	for token := range len(qkv) / width {
		x := qkv[token*width:][:width]
		for _, s := range sides {
			for again := true; again; {
				if again = false; s.weight != nil && !c.known {
					n := len(s.weight)
					for norm := range s.norms {
						squares := 0.0
						for _, v := range x[s.at+norm*n:][:n] {
							squares += float64(v) * float64(v)
						}
						s.r[token*s.norms+norm] = 1 / math.Sqrt(squares/float64(n)+1e-5)
					}
				}
				for j := range s.heads * c.Size {
					if v := math.Abs(s.normed(x, token, j)); c.clip > 0 && math.Abs(v-c.clip) < 1e-4*c.clip {
						x[s.at+j] *= 0.99
						again = true
					}
				}
			}
		}
	}
}
