package devicetest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"mula/xpu"
)

func embedFamily(t *testing.T, d xpu.Device, _ float64) {
	for i, c := range []struct{ tokens, vocabulary, width int }{{1, 1, 1}, {5, 3, 7}, {100, 11, 64}, {1000, 2, 33},
		{70, 500, 300}, {20000, 3000, 1}, {3, 4, 1030}, {0, 9, 8}} {
		t.Run(fmt.Sprintf("%d tokens of %d, width %d", c.tokens, c.vocabulary, c.width), func(t *testing.T) {
			source := rand.New(rand.NewPCG(21, uint64(i)))
			embed(t, d, source, c.tokens, c.vocabulary, c.width, int32(source.IntN(c.vocabulary)))
			embed(t, d, source, c.tokens, c.vocabulary, c.width, -1)
		})
	}
	t.Run("any", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) {
			tokens, vocabulary := rapid.IntRange(0, 300).Draw(t, "tokens"), rapid.IntRange(1, 50).Draw(t, "vocabulary")
			width, skip := rapid.IntRange(1, 200).Draw(t, "width"), int32(rapid.IntRange(-1, 50).Draw(t, "skip"))
			embed(t, d, rand.New(rand.NewPCG(22, rapid.Uint64().Draw(t, "seed"))), tokens, vocabulary, width, skip)
		})
	})
}

// embed checks Embed and EmbedGrad. The order of EmbedGrad's sums is specified, so it compares
// bits.
func embed(t tester, d xpu.Device, source *rand.Rand, tokens, vocabulary, width int, skip int32) {
	table, dx, ids := random(source, vocabulary*width), random(source, tokens*width), make([]int32, tokens)
	want, dtable := []float32(nil), random(source, vocabulary*width)
	for i := range ids {
		ids[i] = int32(source.IntN(vocabulary))
		want = append(want, table[int(ids[i])*width:][:width]...)
	}
	got, gotTable := upload(t, d, make([]float32, tokens*width), tokens, width), upload(t, d, dtable, vocabulary, width)
	deviceIDs := uploadInts(t, d, ids)
	d.Embed(got, upload(t, d, table, vocabulary, width), deviceIDs)
	d.EmbedGrad(gotTable, upload(t, d, dx, tokens, width), deviceIDs, skip)
	if !slices.Equal(read(t, d, got), want) {
		t.Fatalf("%d tokens of %d, width %d: not the rows of the table", tokens, vocabulary, width)
	}
	for i, id := range ids {
		if id != skip {
			for j, v := range dx[i*width:][:width] {
				dtable[int(id)*width+j] += v
			}
		}
	}
	for i, v := range read(t, d, gotTable) {
		if v != dtable[i] {
			t.Fatalf("%d tokens of %d, width %d, all but %d: the gradient of row %d, column %d is %v, want %v", tokens,
				vocabulary, width, skip, i/width, i%width, v, dtable[i])
		}
	}
}
