package optimizer

import (
	"context"
	"math"
	"math/big"
	"math/bits"

	"mula/xpu/comm"
)

// An exactSum is the exact sum of squares of float32 numbers and of sums of such squares in
// float64: multiples of 2^-298, below 2^310. Each limb counts multiples of 2^32 times the unit of
// the limb before, so up to 2^31 numbers are added without a carry, in any order and by any
// reduction.
type exactSum [exactLimbs]int64

const (
	exactUnit  = 298 // the lowest limb counts 2^-exactUnit
	exactWords = 19
	exactLimbs = exactWords + 1 // and the number of summands that are not finite
)

// add adds x, which is not negative.
func (s *exactSum) add(x float64) {
	if !isFinite(x) {
		s[exactWords]++
		return
	}
	fraction, exponent := math.Frexp(x)
	mantissa, shift := uint64(math.Ldexp(fraction, 53)), exponent-53+exactUnit
	if shift < 0 { // the lowest bits are 0
		mantissa, shift = mantissa>>-shift, 0
	}
	high, low := bits.Mul64(mantissa, 1<<(shift%32))
	limb := shift / 32
	for _, word := range [3]uint64{low & math.MaxUint32, low >> 32, high} {
		if word != 0 {
			s[limb] += int64(word)
		}
		limb++
	}
}

// value returns the sum, rounded once, or NaN if a summand is not finite.
func (s *exactSum) value() float64 {
	if s[exactWords] != 0 {
		return math.NaN()
	}
	var sum, limb big.Int
	for i := exactWords - 1; i >= 0; i-- {
		sum.Lsh(&sum, 32)
		sum.Add(&sum, limb.SetInt64(s[i]))
	}
	rounded := new(big.Float).SetInt(&sum)
	x, _ := rounded.SetMantExp(rounded, -exactUnit).Float64()
	return x
}

// reduceSums returns the exact sums, over the blocks of the whole model, of numbers of this rank's
// blocks: for each list, and for each of the groups that groupOf divides the parameters into.
func (s *Sharding) reduceSums(ctx context.Context, blocks []block, groups int, groupOf func(parameter int) int,
	lists ...[]float64) ([]float64, error) {
	sums := make([]exactSum, groups*len(lists))
	for i, b := range blocks {
		if s.owned[b.tensor].writer {
			for k, list := range lists {
				sums[k*groups+groupOf(b.tensor)].add(list[i])
			}
		}
	}
	limbs := make([]int64, 0, len(sums)*exactLimbs)
	for i := range sums {
		limbs = append(limbs, sums[i][:]...)
	}
	if err := comm.AllReduce(ctx, s.mesh.World(), limbs); err != nil {
		return nil, err
	}
	values := make([]float64, len(sums))
	for i := range values {
		values[i] = (*exactSum)(limbs[i*exactLimbs:]).value()
	}
	return values, nil
}
