// Package greedy computes Megatron-LM's blends: which dataset each sample of a blend comes from,
// and which sample of it.
//
// The rule (megatron/core/datasets/helpers.cpp, build_blending_indices) is one line: at step t take
// the dataset whose error w·max(t,1) − c is largest, the lowest-numbered one of several, where c is
// how often it was taken before. It is a loop of O(datasets × samples) whose result depends on the
// last bit of every product, so it can neither be simplified nor reordered freely. This package
// gives the same bits in far fewer operations:
//
//   - Only datasets that can win within the next few steps take part in the search (see lane for why the others cannot).
//   - A chunk of the blend is begun before the one before it is done, from a guess of its counts; afterwards both the true and the
//     guessed blend run on until their counts agree, from where on the guessed one is proven (see join).
//     So chunks run on several threads, and several in one thread, which hides the latency of each.
//   - Datasets of bitwise equal weight take turns, and compete as one, if they are many (see groups).
//   - Blends of at most eight datasets compute eight chunks at once, one in each element of a vector (see vertical).
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

// A Rule says how a weighted blend chooses.
type Rule struct {
	// Weights holds one weight per dataset: finite, not negative. Megatron-LM passes weights of sum
	// 1; other sums are computed exactly too, only slowly. A dataset of weight 0 may be chosen
	// nevertheless, namely when no error is above 0.
	Weights []float64

	// Fused computes errors as fma(w, x, −c), rounded once, as g++ 12 has the helper do on aarch64
	// or with -march=x86-64-v3, except for dataset 0, whose product and difference it leaves apart:
	// they are in different basic blocks there, because max(t, 1) branches. (In the exhaustive loop
	// it fuses all.) Otherwise every product and difference is rounded, as the helper built for
	// plain x86-64 does.
	Fused bool
}

// An Emit takes one piece of a blend: step first+k takes sample[k] of dataset[k]. Pieces come in
// order and without gaps; the slices are valid during the call only. An error ends the blend and is
// returned by it.
type Emit func(first int64, dataset []int16, sample []int64) error

// Weighted runs n steps of a weighted blend from its beginning and returns how many samples each
// dataset gives.
//
// It computes with up to threads goroutines while another piece is in emit. Every goroutine holds 1
// of pool, which may be nil, while it computes a piece or compares it with the one before, and
// never while emit runs. Pieces have up to 2^20 samples; at most threads+2 of them are held, each
// of 10 bytes a sample: 32 MB for one thread, 42 MB for two, whatever n is; beside that, each
// goroutine has some 300 bytes a dataset. The context is checked once per piece.
func Weighted(ctx context.Context, rule Rule, n int64, pool *semaphore.Weighted, threads int, emit Emit) ([]int64,
	error) {
	if n < 0 || n > maxSteps {
		return nil, fmt.Errorf("a blend of %d samples: give a number from 0 to %d", n, int64(maxSteps))
	}
	if err := checkCount(len(rule.Weights)); err != nil {
		return nil, err
	}
	if len(rule.Weights) == 0 && n > 0 {
		return nil, fmt.Errorf("a blend of %d samples has no datasets: give at least one", n)
	}
	for d, w := range rule.Weights {
		if !(w >= 0) || math.IsInf(w, 0) {
			return nil, fmt.Errorf("dataset %d of the blend has weight %v: weights must be finite and not negative", d,
				w)
		}
	}
	p := newProblem(rule.Weights, nil, rule.Fused)
	return p.run(ctx, n, pool, threads, emit)
}

// Exhaustive computes the blend that takes every sample of every dataset once
// (build_exhaustive_blending_indices): dataset d weighs sizes[d] over the sum of sizes, and leaves
// when its sizes[d] samples are taken. Everything else is as for [Weighted].
//
// A size of 0 is refused: Megatron-LM never removes such a dataset and writes past the end of its
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
			return fmt.Errorf("dataset %d of the blend has %d samples: sizes must be positive", d, size)
		case size == 0:
			return fmt.Errorf("dataset %d of the blend has no samples: Megatron-LM crashes on such a blend; leave "+
				"the dataset out, or give weights and a size", d)
		case size > maxSteps-total:
			return fmt.Errorf("the blend has more than %d samples: give fewer datasets", int64(maxSteps))
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
		return fmt.Errorf("a blend of %d datasets: Megatron-LM numbers them with 16 bits, at most %d are possible; "+
			"merge some", datasets, MaxDatasets)
	}
	return nil
}

var errNoEmit = errors.New("greedy: emit is nil")
