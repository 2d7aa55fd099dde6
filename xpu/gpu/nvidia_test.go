package gpu

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"mula/xpu"
)

// A product of many terms on emulated tensor cores is the sum of its chains, with the same bits
// however many are computed at the same time.
func testTensorChains(t *testing.T, d *Device) {
	const m, n = 3, 20
	many := d.shape.chains
	defer func() { d.shape.chains = many }()
	r := rand.New(rand.NewPCG(1, 0))
	for _, k := range []int{tensorTerms, 2*tensorTerms + 7} {
		a, b := normal(r, m*k), normal(r, k*n)
		roundA, roundB := rounded(a), rounded(b)
		var first []float32
		for _, d.shape.chains = range []int{many, 1} {
			product := upload(t, d, make([]float32, m*n), m, n)
			d.MatMul(product, upload(t, d, a, k, m).T(), upload(t, d, b, k, n), xpu.MatMulOptions{})
			got := numbersOf(t, d, product)
			if first != nil && !slices.Equal(got, first) {
				t.Errorf("%d terms: other bits with at most %d elements of chains", k, d.shape.chains)
			}
			first = got
			for i := range m {
				for j := range n {
					var want sum
					for l := range k {
						want.add(roundA[l*m+i], roundB[l*n+j])
					}
					want.near(t, fmt.Sprintf("%d terms: element %d,%d", k, i, j), got[i*n+j], 0)
				}
			}
		}
	}
}

// Attention on emulated tensor cores equals the portable kernels, which round the same numbers:
// with heads of two sizes of packed rows, shared heads of keys, documents, and rows beyond the last
// tile.
func testTensorAttention(t *testing.T, d *Device) {
	defer func() { d.shape.emulated = nvidiaFile }()
	for _, test := range []struct {
		h        xpu.Heads
		document int
	}{
		{xpu.Heads{Rows: 2, Length: 70, Heads: 2, KVHeads: 1, Size: 6}, 0},
		{xpu.Heads{Rows: 1, Length: 130, Heads: 1, KVHeads: 1, Size: 34}, 40},
	} {
		h := test.h
		r := rand.New(rand.NewPCG(uint64(h.Size), 0))
		tokens, width := h.Rows*h.Length, h.Heads*h.Size
		keyNumbers := tokens * h.KVHeads * h.Size
		q, k, v, down := normal(r, tokens*width), normal(r, keyNumbers), normal(r, keyNumbers), normal(r, tokens*width)
		for i := range q {
			q[i] /= float32(math.Sqrt(float64(h.Size)))
		}
		var results [2][][]float32
		for i, file := range []string{"", nvidiaFile} {
			d.shape.emulated = file
			keys := []int{h.Rows, h.KVHeads, h.Length, h.Size}
			a := xpu.Attention{Q: upload(t, d, q, h.Rows, h.Heads, h.Length, h.Size), K: upload(t, d, k, keys...),
				V: upload(t, d, v, keys...), Context: upload(t, d, make([]float32, tokens*width), tokens, width),
				LSE: upload(t, d, make([]float32, tokens*h.Heads), h.Rows, h.Heads, h.Length)}
			if (d.attendPieces(a) > 0) != (file == nvidiaFile) {
				t.Fatalf("%v: %d pieces", h, d.attendPieces(a))
			}
			if test.document > 0 {
				begin := make([]int32, tokens)
				for i := range begin {
					begin[i] = int32(i % h.Length / test.document * test.document)
				}
				a.Begin = uploadInts(t, d, begin).Reshape(h.Rows, h.Length)
			}
			all := (h.Heads + 2*h.KVHeads) * h.Size
			zeros := func(shape ...int) xpu.Tensor {
				n := 1
				for _, size := range shape {
					n *= size
				}
				return upload(t, d, make([]float32, n), shape...)
			}
			dqkv, dk, dv := zeros(tokens, all), zeros(keys...), zeros(keys...)
			d.Attend(a)
			d.AttendGrad(a, upload(t, d, down, tokens, width), dqkv, dk, dv)
			for _, x := range []xpu.Tensor{a.Context, a.LSE, dqkv, dk, dv} {
				results[i] = append(results[i], numbersOf(t, d, x))
			}
		}
		for i, what := range []string{"context", "logsumexp", "gradient of queries", "of keys", "of values"} {
			want, got := results[0][i], results[1][i]
			size := 0.0
			for _, x := range want {
				size = max(size, math.Abs(float64(x)))
			}
			for j, x := range want {
				if d := math.Abs(float64(got[j] - x)); !(d <= 4e-3*size) || size == 0 {
					t.Fatalf("%v: %s: number %d is %v, the portable kernels give %v", h, what, j, got[j], x)
				}
			}
		}
	}
}
