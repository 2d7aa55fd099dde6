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

// A latentCase is a case of the projections and heads of latent attention.
type latentCase struct {
	xpu.LatentSizes
	first       int
	interleaved bool
}

func (c latentCase) String() string {
	return fmt.Sprintf("%d rows of %d, %d heads of %d with %d plain and %d rotated elements, values of %d, "+
		"from position %d, room for %d, interleaved %v", c.Rows, c.Length, c.Heads.Heads, c.Size, c.Plain, c.Turned,
		c.Values, c.first, c.Capacity, c.interleaved)
}

func latentSizes(rows, length, heads, size, capacity, plain, turned, values int) xpu.LatentSizes {
	return xpu.LatentSizes{Heads: xpu.Heads{Rows: rows, Length: length, Heads: heads, KVHeads: heads, Size: size,
		Capacity: capacity}, Plain: plain, Turned: turned, Values: values}
}

func latentFamily(t *testing.T, d xpu.Device, tolerance float64) {
	for i, c := range []latentCase{
		{latentSizes(1, 1, 1, 2, 1, 0, 2, 1), 0, true},
		{latentSizes(2, 5, 3, 6, 5, 4, 2, 4), 0, false},
		{latentSizes(2, 5, 3, 6, 5, 4, 2, 4), 0, true},
		{latentSizes(1, 70, 2, 192, 70, 128, 64, 128), 0, true}, // as in DeepSeek-V3
		{latentSizes(2, 3, 2, 40, 9, 6, 8, 40), 5, true},
		{latentSizes(0, 3, 2, 8, 3, 4, 4, 8), 0, true},
	} {
		t.Run(c.String(), func(t *testing.T) { c.check(t, d, min(tolerance, 1e-5), uint64(i)) })
	}
	t.Run("any", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) {
			c := latentCase{interleaved: rapid.Bool().Draw(t, "interleaved"), first: rapid.SampledFrom([]int{0, 0,
				3}).Draw(t, "first")}
			plain, turned, values := rapid.IntRange(0, 20).Draw(t, "plain"), 2*rapid.IntRange(1, 20).Draw(t,
				"half of the rotated elements"), rapid.IntRange(1, 50).Draw(t, "values")
			length := rapid.IntRange(1, 30).Draw(t, "length")
			size := (max(plain+turned, values) + 1) / 2 * 2
			c.LatentSizes = latentSizes(rapid.IntRange(1, 3).Draw(t, "rows"), length, rapid.IntRange(1, 4).Draw(t,
				"heads"), size, c.first+length, plain, turned, values)
			c.check(t, d, min(tolerance, 1e-5), rapid.Uint64().Draw(t, "seed"))
		})
	})
}

// pair returns the elements of a projection that become elements j and j + Turned/2 of the rotated
// elements of a head.
func (c latentCase) pair(j int) (int, int) {
	if c.interleaved {
		return 2 * j, 2*j + 1
	}
	return j, j + c.Turned/2
}

// check compares heads with the formulas, and the gradients if the heads start at position 0.
func (c latentCase) check(t tester, d xpu.Device, tolerance float64, seed uint64) {
	t.Helper()
	const scale, untouched = 0.7, 7
	source := rand.New(rand.NewPCG(seed, 5))
	tokens, heads, keys, size := c.Rows*c.Length, c.Heads.Heads, c.Plain+c.Turned, c.Size
	queries, kv, rotated := random(source, tokens*heads*keys), random(source, tokens*heads*(c.Plain+c.Values)),
		random(source, tokens*c.Turned)
	angles := make([]float64, (c.first+c.Length)*c.Turned/2)
	cos, sin := make([]float32, len(angles)), make([]float32, len(angles))
	for i := range angles {
		s, c := math.Sincos(2 * math.Pi * source.Float64())
		cos[i], sin[i] = float32(c), float32(s)
	}
	// one adds the elements of a head of queries or keys from position `to` on, times factor.
	one := func(want sums, to int, plain, turned []float32, position int, factor float64) {
		for i := range size {
			want.sum[to+i], want.scale[to+i] = 0, 0
		}
		for i, v := range plain {
			want.add(to+i, factor*float64(v), float64(v))
		}
		for j := range c.Turned / 2 {
			first, second := c.pair(j)
			u, v, at := float64(turned[first]), float64(turned[second]), position*c.Turned/2+j
			co, si := float64(cos[at]), float64(sin[at])
			want.add(to+c.Plain+j, factor*(u*co-v*si), math.Abs(u)+math.Abs(v))
			want.add(to+c.Plain+c.Turned/2+j, factor*(v*co+u*si), math.Abs(u)+math.Abs(v))
		}
	}
	place := func(token, head, length, first int) int {
		return (((token/c.Length)*heads+head)*length + first + token%c.Length) * size
	}
	wantQ, wantK, wantV := newSums(tokens*heads*size), newSums(c.Rows*heads*c.Capacity*size),
		newSums(c.Rows*heads*c.Capacity*size)
	for i := range wantK.sum {
		wantK.sum[i], wantV.sum[i] = untouched, untouched
	}
	for token := range tokens {
		position := c.first + token%c.Length
		for a := range heads {
			q, x := queries[(token*heads+a)*keys:][:keys], kv[(token*heads+a)*(c.Plain+c.Values):][:c.Plain+c.Values]
			one(wantQ, place(token, a, c.Length, 0), q[:c.Plain], q[c.Plain:], position, scale)
			to := place(token, a, c.Capacity, c.first)
			one(wantK, to, x[:c.Plain], rotated[token*c.Turned:][:c.Turned], position, 1)
			for i := range size {
				wantV.sum[to+i] = 0
				if i < c.Values {
					wantV.sum[to+i], wantV.scale[to+i] = float64(x[c.Plain+i]), math.Abs(float64(x[c.Plain+i]))
				}
			}
		}
	}
	filled := func(positions int) xpu.Tensor {
		return upload(t, d, slices.Repeat([]float32{untouched}, c.Rows*heads*positions*size), c.Rows, heads, positions,
			size)
	}
	l := xpu.LatentHeads{Queries: upload(t, d, queries, tokens, heads*keys),
		KeysValues:  upload(t, d, kv, tokens, heads*(c.Plain+c.Values)),
		Rotated:     upload(t, d, rotated, tokens, c.Turned),
		Interleaved: c.interleaved, Cos: upload(t, d, cos, c.first+c.Length, c.Turned/2),
		Sin: upload(t, d, sin, c.first+c.Length, c.Turned/2), Scale: scale, First: c.first, Q: filled(c.Length),
		K: filled(c.Capacity), V: filled(c.Capacity)}
	d.SplitLatent(l)
	compare(t, "queries", read(t, d, l.Q), wantQ.sum, wantQ.scale, tolerance)
	compare(t, "keys", read(t, d, l.K), wantK.sum, wantK.scale, tolerance)
	compare(t, "values", read(t, d, l.V), wantV.sum, wantV.scale, tolerance)
	if c.first > 0 || c.Capacity != c.Length {
		return
	}

	// The gradients. The elements of heads that are zero have no effect on them.
	dq, dk, dv := random(source, tokens*heads*size), random(source, tokens*heads*size), random(source,
		tokens*heads*size)
	wantQ, wantKV, wantRotated := newSums(len(queries)), newSums(len(kv)), newSums(len(rotated))
	back := func(want sums, to int, dy []float32, position int, factor float64) {
		for j := range c.Turned / 2 {
			first, second := c.pair(j)
			u, v, at := float64(dy[j]), float64(dy[j+c.Turned/2]), position*c.Turned/2+j
			co, si := float64(cos[at]), float64(sin[at])
			want.add(to+first, factor*(u*co+v*si), math.Abs(u)+math.Abs(v))
			want.add(to+second, factor*(v*co-u*si), math.Abs(u)+math.Abs(v))
		}
	}
	for token := range tokens {
		for a := range heads {
			n, position := token*heads+a, token%c.Length
			for i, v := range dq[n*size:][:c.Plain] {
				wantQ.add(n*keys+i, scale*float64(v), float64(v))
			}
			back(wantQ, n*keys+c.Plain, dq[n*size+c.Plain:], position, scale)
			from := place(token, a, c.Length, 0)
			for i, v := range dk[from:][:c.Plain] {
				wantKV.add(n*(c.Plain+c.Values)+i, float64(v), float64(v))
			}
			back(wantRotated, token*c.Turned, dk[from+c.Plain:], position, 1)
			for i, v := range dv[from:][:c.Values] {
				wantKV.add(n*(c.Plain+c.Values)+c.Plain+i, float64(v), float64(v))
			}
		}
	}
	l.Queries, l.KeysValues = upload(t, d, poison(len(queries)), tokens, heads*keys), upload(t, d, poison(len(kv)),
		tokens, heads*(c.Plain+c.Values))
	l.Rotated = upload(t, d, poison(len(rotated)), tokens, c.Turned)
	ofHeads := func(x []float32) xpu.Tensor { return upload(t, d, x, c.Rows, heads, c.Length, size) }
	d.JoinLatent(l, upload(t, d, dq, tokens, heads*size), ofHeads(dk), ofHeads(dv))
	compare(t, "gradient of queries", read(t, d, l.Queries), wantQ.sum, wantQ.scale, tolerance)
	compare(t, "gradient of keys and values", read(t, d, l.KeysValues), wantKV.sum, wantKV.scale, tolerance)
	compare(t, "gradient of rotated keys", read(t, d, l.Rotated), wantRotated.sum, wantRotated.scale, tolerance)

	// Values without the zeros, and with them, alone and between other columns.
	for _, width := range []int{c.Values, size} {
		for _, before := range []int{0, 3} {
			other := size + c.Values - width
			all, allOfX := before+width+before/2, before/2+other+before
			x := random(source, tokens*allOfX)
			whole := upload(t, d, slices.Repeat([]float32{untouched}, tokens*all), tokens, all)
			d.CopyColumns(whole.Slice(1, before, before+width), upload(t, d, x, tokens, allOfX).Slice(1, before/2,
				before/2+other))
			for i, got := range read(t, d, whole) {
				want, column := float32(0), i%all-before
				switch {
				case column < 0 || column >= width:
					want = untouched
				case column < other:
					want = x[i/all*allOfX+before/2+column]
				}
				if got != want {
					t.Fatalf("CopyColumns from %d to %d columns after %d: element %d is %v, want %v", other, width,
						before, i, got, want)
				}
			}
		}
	}
}
