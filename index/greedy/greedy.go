// Package greedy computes Megatron-LM's blends: for each sample of a blend, its dataset and its
// number in the dataset.
//
// The rule (megatron/core/datasets/helpers.cpp, build_blending_indices) is one line: step t takes
// the dataset with the largest error w·max(t,1) − c, or the lowest-numbered of several, where c is
// the number of its samples taken before. The loop is O(datasets × samples) and its result depends
// on the last bit of every product, so it can neither be simplified nor reordered freely. This
// package computes the same bits in far fewer operations:
//
//   - Only datasets that can win within the next few steps take part in the search. See lane for
//     why the others cannot win.
//   - A chunk of the blend starts from a guess of its counts, before the previous chunk is done.
//     Afterwards the true and the guessed blend both run until their counts agree, which proves
//     the rest of the guessed blend (see join). So chunks run on several threads, and several run
//     in one thread, which hides the latency of each.
//   - Many datasets of bitwise equal weight alternate, and compete as a group (see groups).
//   - Blends of at most eight datasets compute eight chunks at once, one in each element of a
//     vector (see vertical).
//
// Two arithmetics exist, because compilers contract w·x − c to one fused operation on some
// machines: see [Rule].
package greedy

import (
	"context"
	"errors"
	"fmt"
	"math"

	"golang.org/x/sync/semaphore"
)

// MaxDatasets is the largest number of datasets of a blend: their numbers are stored as int16.
const MaxDatasets = math.MaxInt16

// maxSteps bounds a blend, so that steps and counts are exact as float64.
const maxSteps = 1 << 50

// A Rule holds the weights and the arithmetic of a weighted blend.
type Rule struct {
	// Weights holds one weight per dataset, finite and not negative. Megatron-LM passes weights
	// with sum 1. Other sums are computed exactly too, but slowly. A dataset of weight 0 may still
	// be chosen if no error is above 0.
	Weights []float64

	// Fused computes errors as fma(w, x, −c), rounded once, as g++ 12 compiles the helper on
	// aarch64 or with -march=x86-64-v3. The product and difference of dataset 0 are not fused: they
	// are in different basic blocks there, because max(t, 1) branches. (In the exhaustive loop, all
	// are fused.) Without Fused, every product and difference is rounded, as in the helper built
	// for plain x86-64.
	Fused bool
}

// An Emit receives one piece of a blend: step first+k takes sample[k] of dataset[k]. Pieces are in
// order and without gaps. The slices are valid only during the call. If Emit returns an error, the
// blend stops and returns the error.
type Emit func(first int64, dataset []int16, sample []int64) error

// Weighted runs the first n steps of a weighted blend and returns the number of samples taken from
// each dataset.
//
// It computes on up to threads goroutines while another piece is in emit. Every goroutine holds one
// slot of pool, which may be nil, while it computes a piece or compares it with the previous piece,
// but never while emit runs. Pieces have up to 2^20 samples. At most threads+2 pieces are held,
// with 10 bytes a sample: 32 MB for one thread, 42 MB for two, independent of n. In addition, each
// goroutine uses about 300 bytes a dataset. The context is checked once per piece.
func Weighted(ctx context.Context, rule Rule, n int64, pool *semaphore.Weighted, threads int, emit Emit) ([]int64,
	error) {
	if n < 0 || n > maxSteps {
		return nil, fmt.Errorf("invalid blend size %d; use a number from 0 to %d", n, int64(maxSteps))
	}
	if err := checkCount(len(rule.Weights)); err != nil {
		return nil, err
	}
	if len(rule.Weights) == 0 && n > 0 {
		return nil, fmt.Errorf("a blend of %d samples has no datasets; give at least one", n)
	}
	for d, w := range rule.Weights {
		if !(w >= 0) || math.IsInf(w, 0) {
			return nil, fmt.Errorf("dataset %d of the blend has weight %v; weights must be finite and not negative", d,
				w)
		}
	}
	p := newProblem(rule.Weights, nil, rule.Fused)
	return p.run(ctx, n, pool, threads, emit)
}

// Exhaustive computes the blend that takes every sample of every dataset once
// (build_exhaustive_blending_indices). The weight of dataset d is sizes[d] divided by the sum of
// sizes, and d leaves the blend when its sizes[d] samples are taken. Everything else is as in
// [Weighted].
//
// A size of 0 is an error: Megatron-LM never removes such a dataset and writes past the end of its
// arrays.
func Exhaustive(ctx context.Context, sizes []int64, fused bool, pool *semaphore.Weighted, threads int,
	emit Emit) error {
	if err := checkCount(len(sizes)); err != nil {
		return err
	}
	var total int64
	for d, size := range sizes {
		switch {
		case size < 0:
			return fmt.Errorf("dataset %d of the blend has %d samples; sizes must be positive", d, size)
		case size == 0:
			return fmt.Errorf("dataset %d of the blend has no samples, and Megatron-LM crashes on such a blend; "+
				"remove the dataset, or give weights and a size", d)
		case size > maxSteps-total:
			return fmt.Errorf("the blend has more than %d samples; use fewer datasets", int64(maxSteps))
		}
		total += size
	}
	weights := make([]float64, len(sizes))
	for d, size := range sizes {
		weights[d] = float64(size) / float64(total)
	}
	p := newProblem(weights, sizes, fused)
	_, err := p.run(ctx, total, pool, threads, emit)
	return err
}

func checkCount(datasets int) error {
	if datasets > MaxDatasets {
		return fmt.Errorf("the blend has %d datasets, but Megatron-LM numbers them with 16 bits, so at most %d are "+
			"possible; merge some of them", datasets, MaxDatasets)
	}
	return nil
}

var errNoEmit = errors.New("greedy: emit is nil")
