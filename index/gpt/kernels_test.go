package gpt

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"mula/index/numpy"
)

// What the machine's kernels do, the Go code does too, and neither touches memory outside its
// slices.

func TestLengthKernels(t *testing.T) {
	if !haveAVX512 {
		t.Skip("there is only one implementation here")
	}
	random := rand.New(rand.NewPCG(3, 4))
	memory, release := numpy.Aligned(1 << 20)
	defer release()
	for n := range 100 {
		lengths := make([]byte, 3+4*n)[3:]
		for i := range n {
			binary.LittleEndian.PutUint32(lengths[4*i:], random.Uint32()>>1)
		}
		check := func(past bool) {
			t.Helper()
			sum, negative := sumLengths(lengths)
			if wantSum, wantNegative := sumLengthsGo(lengths); sum != wantSum || negative != wantNegative {
				t.Fatalf("%d lengths: sum %d, %v, want %d, %v", n, sum, negative, wantSum, wantNegative)
			}
			const canary = 1<<63 + 12345
			got, want := uint64s(memory[:8*(n+8)]), slices.Repeat([]uint64{canary}, n+8)
			copy(got, want)
			sum, negative = fillPairs(got[:n], lengths, 1<<31-100, past)
			if wantSum, wantNegative := fillPairsGo(want[:n], lengths, 1<<31-100); sum != wantSum ||
				negative != wantNegative || !slices.Equal(got, want) {
				t.Fatalf("%d pairs: sum %d, %v, want %d, %v; %x, want %x", n, sum, negative, wantSum, wantNegative, got,
					want)
			}
			ids, wantIDs := make([]uint32, n+8), make([]uint32, n+8)
			narrow(ids[:n], got[:n])
			narrowGo(wantIDs[:n], got[:n])
			if !slices.Equal(ids, wantIDs) {
				t.Fatalf("%d ids: %x, want %x", n, ids, wantIDs)
			}
		}
		check(false)
		check(true)
		for i := range n {
			lengths[4*i+3] |= 0x80
			check(i%2 == 0)
			lengths[4*i+3] &^= 0x80
		}
	}
}

func TestRowKernels(t *testing.T) {
	if !haveAVX512 {
		t.Skip("there is only one implementation here")
	}
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 200).Draw(t, "documents")
		top := rapid.SampledFrom([]int64{0, 1, 5, 100, 3000, 1 << 20, maxInt32}).Draw(t, "longest")
		random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "lengths"), 1))
		documents := make([]uint64, n)
		var tokens int64
		for i := range documents {
			length := random.Int64N(top + 1)
			if random.IntN(4) == 0 {
				length = 0
			}
			tokens += length
			documents[i] = uint64(random.Uint32()>>1) | uint64(length)<<32
		}
		extra := int64(rapid.IntRange(0, 1).Draw(t, "extra"))
		sequence := min(maxInt32-1,
			max(rapid.SampledFrom([]int64{1, 2, 7, 64, 1000, 4096, 1 << 20, maxInt32 - 1}).Draw(t, "sequence length"),
				tokens/2000+1))
		// The documents follow others, of up to 2⁵¹ tokens.
		before := int64(rapid.Uint64Range(0, 1<<51).Draw(t, "tokens before") >> rapid.IntRange(0, 51).Draw(t, "shift"))
		if rapid.Bool().Draw(t, "multiples") { // bounds at, just below and just above multiples of S
			before = before/sequence*sequence + int64(rapid.IntRange(0, 2).Draw(t, "more"))
			tokens = 0
			for i, v := range documents {
				length := int64(v>>32) / sequence * sequence
				tokens += length
				documents[i] = uint64(uint32(v)) | uint64(length)<<32
			}
		}
		if before+tokens-extra < 0 {
			t.Skip("no tokens")
		}
		start := newRows(sequence, extra)
		start.position = int64(rapid.SampledFrom([]int{200, 1 << 20, maxInt32}).Draw(t, "position"))
		start.bound = before + tokens - extra
		start.row = start.bound/sequence - int64(rapid.SampledFrom([]int{0, 0, 0, 1, 5}).Draw(t, "rows too few"))
		start.row = max(start.row, 0)
		start.target = start.row * sequence
		// Row `low` and the rows above it are in memory. It may be above or below the documents.
		lowest := max(before-extra, 0) / sequence
		low := max(1, rapid.Int64Range(min(lowest-3, start.row), start.row+1).Draw(t, "low"))
		if start.row < low {
			t.Skip("no rows")
		}

		const canary = 1<<63 + 12345
		space := int(start.row-low) + 1
		got, want := slices.Repeat([]uint64{canary}, space+16), slices.Repeat([]uint64{canary}, space+16)
		state, wantState := start, start
		left, wantLeft := state.fill32(got[8:8+space], low, documents), wantState.fill32Go(want[8:8+space], low,
			documents)
		// At row 0 all rows are done; the Go code then stops where token 0 is, the kernels need
		// not.
		done := state.row == 0 && wantState.row == 0
		if !done && (left != wantLeft || state != wantState) || !slices.Equal(got, want) {
			t.Fatalf("int32: %d left, %+v, want %d left, %+v\n%x\n%x", left, state, wantLeft, wantState, got, want)
		}
		pair := [2]int64{canary >> 1, 7}
		got64, want64 := slices.Repeat([][2]int64{pair}, space+16), slices.Repeat([][2]int64{pair}, space+16)
		start.position += int64(rapid.SampledFrom([]int{0, 1 << 40}).Draw(t, "more positions"))
		state, wantState = start, start
		left, wantLeft = state.fill64(got64[8:8+space], low, documents), wantState.fill64Go(want64[8:8+space], low,
			documents)
		if !done && (left != wantLeft || state != wantState) || !slices.Equal(got64, want64) {
			t.Fatalf("int64: %d left, %+v, want %d left, %+v\n%x\n%x", left, state, wantLeft, wantState, got64, want64)
		}
	})
}
