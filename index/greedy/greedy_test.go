package greedy

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"mula/internal/longtest"
)

// weightsOf returns n weights of a named kind, normalized.
func weightsOf(kind string, n int, rng *rand.Rand) []float64 {
	w := make([]float64, n)
	var sum float64
	for i := range w {
		switch kind {
		case "equal":
			w[i] = 1
		case "near":
			w[i] = 1 + 1e-9*rng.Float64()
		case "ulp":
			w[i] = 1
			if rng.IntN(2) == 0 {
				w[i] = math.Nextafter(1, 2)
			}
		case "powers":
			w[i] = math.Pow(10, -float64(i%300))
		case "dirichlet":
			w[i] = rng.ExpFloat64()
		case "lognormal":
			w[i] = math.Exp(1.3 * rng.NormFloat64())
		case "harmonic":
			w[i] = 1 / float64(i+1)
		case "zeros":
			if rng.IntN(3) > 0 || i == 0 {
				w[i] = rng.Float64()
			}
		case "duplicates":
			w[i] = float64(1 + rng.IntN(5))
		case "integers":
			w[i] = float64(1 + rng.IntN(100))
		case "files":
			shares := []float64{60, 15, 10, 6, 5, 3, 1}
			w[i] = shares[rng.IntN(7)] * math.Exp(0.3*rng.NormFloat64())
		case "sources":
			w[i] = []float64{.6, .15, .1, .06, .05, .03, .01}[i*7/n]
		case "one":
			w[i] = 1e-4 / float64(n)
			if i == n/2 {
				w[i] = 0.9999
			}
		case "tiny":
			w[i] = math.Pow(2, -float64(rng.IntN(1074)))
		default:
			panic(kind)
		}
		sum += w[i]
	}
	for i := range w {
		w[i] /= sum
	}
	return w
}

var kinds = []string{"equal", "near", "ulp", "powers", "dirichlet", "lognormal", "harmonic", "zeros", "duplicates",
	"integers", "files", "sources", "one", "tiny"}

// collect runs a problem and returns everything that it emits.
func collect(t testing.TB, p *problem, n int64, threads int) (dataset []int16, sample []int64, counts []int64) {
	t.Helper()
	counts, err := p.run(context.Background(), n, nil, threads, func(first int64, d []int16, s []int64) error {
		if first != int64(len(dataset)) || len(d) != len(s) || len(d) == 0 {
			return fmt.Errorf("piece at %d of %d and %d after %d samples", first, len(d), len(s), len(dataset))
		}
		dataset, sample = append(dataset, d...), append(sample, s...)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return dataset, sample, counts
}

func comparePlain(t testing.TB, p *problem, n int64, threads int) {
	t.Helper()
	dataset, sample, counts := collect(t, p, n, threads)
	want := make([]float64, len(p.weights))
	wantDataset, wantSample := make([]int16, n), make([]int64, n)
	p.plain(want, 0, wantDataset, wantSample)
	for i := range wantDataset {
		if i >= len(dataset) || dataset[i] != wantDataset[i] || sample[i] != wantSample[i] {
			t.Fatalf("step %d of %d: %v %v, want %d %d", i, n, dataset[i:min(i+4, len(dataset))],
				sample[i:min(i+4, len(sample))], wantDataset[i], wantSample[i])
		}
	}
	if int64(len(dataset)) != n || !slices.Equal(counts, p.counts(want)) {
		t.Fatalf("%d steps, counts %v, want %v", len(dataset), counts, p.counts(want))
	}
}

func TestWeightedIsPlain(t *testing.T) {
	longtest.SkipIfShort(t)
	every := longtest.Rounds(2, 1) // usually half of the combinations
	for i, kind := range kinds {
		for j, datasets := range []int{1, 2, 3, 7, 8, 20, 100, 300, 1000, 3000} {
			for k, fused := range []bool{false, true} {
				if (i+j+k)%every != 0 {
					continue
				}
				name := fmt.Sprintf("%s/%d/fused=%v", kind, datasets, fused)
				t.Run(name, func(t *testing.T) {
					rng := rand.New(rand.NewPCG(uint64(datasets), 7))
					p := newProblem(weightsOf(kind, datasets, rng), nil, fused)
					p.steps = 1000
					comparePlain(t, p, min(16000, 12_000_000/int64(datasets)), 2)
				})
			}
		}
	}
}

// sizesOf returns n sizes of a named kind, of at most the given size.
func sizesOf(kind string, n int, most int64, rng *rand.Rand) []int64 {
	sizes := make([]int64, n)
	for i := range sizes {
		sizes[i] = 1 + rng.Int64N(most)
		switch kind {
		case "random":
		case "ones":
			sizes[i] = 1
		case "equal":
			sizes[i] = most
		case "large and tiny":
			if i%3 > 0 {
				sizes[i] = 1 + rng.Int64N(3)
			}
		case "tiny and one":
			sizes[i] = 1 + rng.Int64N(5)
			if i == n/2 {
				sizes[i] = most
			}
		case "one tiny":
			sizes[i] = most/2 + rng.Int64N(most/2+1) + 1
			if i == n/2 {
				sizes[i] = 1
			}
		case "some equal":
			if i%10 == 9 {
				sizes[i] = sizes[i-5]
			}
		case "few":
			sizes[i] = 1 + most*rng.Int64N(4)/4
		default:
			panic(kind)
		}
	}
	return sizes
}

func TestExhaustiveIsPlain(t *testing.T) {
	longtest.SkipIfShort(t)
	every := longtest.Rounds(2, 1) // usually half of the combinations
	for i, kind := range []string{"random", "ones", "equal", "large and tiny", "tiny and one", "one tiny", "some equal",
		"few"} {
		for j, datasets := range []int{1, 2, 7, 8, 9, 30, 300, 1000} {
			for k, fused := range []bool{false, true} {
				if (i+j+k)%every != 0 {
					continue
				}
				t.Run(fmt.Sprintf("%s/%d/fused=%v", kind, datasets, fused), func(t *testing.T) {
					rng := rand.New(rand.NewPCG(uint64(datasets), 5))
					sizes := sizesOf(kind, datasets, max(30_000/int64(datasets), 12), rng)
					var total int64
					for _, size := range sizes {
						total += size
					}
					weights := make([]float64, datasets)
					for i, size := range sizes {
						weights[i] = float64(size) / float64(total)
					}
					p := newProblem(weights, sizes, fused)
					wantDataset, wantSample := make([]int16, total), make([]int64, total)
					p.plain(make([]float64, datasets), 0, wantDataset, wantSample)

					var dataset []int16
					var sample []int64
					err := Exhaustive(context.Background(), sizes, fused, nil, 2,
						func(_ int64, d []int16, s []int64) error {
							dataset, sample = append(dataset, d...), append(sample, s...)
							return nil
						})
					if err != nil {
						t.Fatal(err)
					}
					if !slices.Equal(dataset, wantDataset) || !slices.Equal(sample, wantSample) {
						t.Fatal("another blend than the plain loop's")
					}
					for _, steps := range []int64{max(total/200, 17), 512, 8192} {
						p.steps = steps
						dataset, sample, counts := collect(t, p, total, 3)
						if !slices.Equal(dataset, wantDataset) || !slices.Equal(sample, wantSample) ||
							!slices.Equal(counts, sizes) {
							t.Fatalf("in chunks of %d steps: another blend than the plain loop's", steps)
						}
					}
				})
			}
		}
	}
}

// TestLeaving removes datasets that would win again. In blends of Exhaustive, a dataset without
// remaining samples has a negative error, and another dataset has a positive error. So the removal
// matters only where rounding hides this. Here limits are independent of weights.
func TestLeaving(t *testing.T) {
	for _, kind := range []string{"lognormal", "powers", "duplicates", "ulp"} {
		for _, datasets := range []int{2, 8, 30, 1000} {
			for _, fused := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/%d/fused=%v", kind, datasets, fused), func(t *testing.T) {
					rng := rand.New(rand.NewPCG(uint64(datasets), 6))
					limits := sizesOf("few", datasets, max(10_000/int64(datasets), 8), rng)
					var n int64
					for i := range limits {
						if i%4 == 0 {
							limits[i] += rng.Int64N(20)
						}
						n += limits[i]
					}
					p := newProblem(weightsOf(kind, datasets, rng), limits, fused)
					for _, steps := range []int64{max(n/100, 100), 2000, n} {
						p.steps = steps
						comparePlain(t, p, n, 2)
					}
				})
			}
		}
	}
}

// TestLeavingLate has errors near the end of a blend so large that they are rounded to multiples of
// 1/16: there it shows that the small datasets have left.
func TestLeavingLate(t *testing.T) {
	const n = 2000
	for _, others := range []int{1, 6, 40, 400} {
		for _, fused := range []bool{false, true} {
			sizes := []int64{1 << 49}
			total := sizes[0]
			for i := range others {
				sizes = append(sizes, 1+int64(i%5))
				total += sizes[i+1]
			}
			weights := make([]float64, len(sizes))
			for i, size := range sizes {
				weights[i] = float64(size) / float64(total)
			}
			p := newProblem(weights, sizes, fused)
			g := p.group()
			first, now := g.newState(), g.newState()
			g.guess(first, total-n)
			run := func(p *problem) ([]int16, []int64) {
				dataset, sample := make([]int16, n), make([]int64, n)
				c := make([]float64, len(sizes))
				for i, v := range g.counts(first) {
					if c[i] = float64(v); p.limits != nil && v == sizes[i] {
						c[i] = gone
					}
				}
				p.plain(c, total-n, dataset, sample)
				return dataset, sample
			}
			wantDataset, wantSample := run(p)
			if dataset, _ := run(&problem{weights: weights, fused: fused}); fused && others > 1 &&
				slices.Equal(dataset, wantDataset) {
				t.Errorf("%d small datasets, fused=%v: nothing changes if they do not leave", others, fused)
			}
			e := newEngine(g)
			now.copyFrom(first)
			dataset, sample := make([]int16, n), make([]int64, n)
			e.alone(now, total-n, dataset, sample)
			if !slices.Equal(dataset, wantDataset) || !slices.Equal(sample, wantSample) {
				t.Errorf("%d small datasets, fused=%v: another end than the plain loop's", others, fused)
			}
			c := &chunk{t: total - n, dataset: make([]int16, n), sample: make([]int64, n), first: g.newState(),
				last: g.newState()}
			e.compute(c)
			e.join(first, c.first, c.last, c.t, c.dataset, c.sample)
			if !slices.Equal(c.dataset, wantDataset) || !slices.Equal(c.sample, wantSample) {
				t.Errorf("%d small datasets, fused=%v: a chunk ends otherwise than the plain loop", others, fused)
			}
		}
	}
}

// TestVectors holds the vectors of megatron-core's helper that fit on a line.
func TestVectors(t *testing.T) {
	for _, c := range []struct {
		weights []float64
		fused   bool
		want    []int16
	}{
		{[]float64{.1, .2, .7}, false, []int16{2, 1, 2, 0, 2, 2, 1, 2, 2, 2, 0, 2, 1, 2, 2, 2, 1, 2, 2, 2, 0, 2, 1, 2}},
		{[]float64{.1, .2, .7}, true, []int16{2, 1, 2, 0, 2, 2, 1, 2, 2, 2, 1, 2, 2, 0, 2, 2, 1, 2, 2, 2, 1, 2, 2, 0}},
		{[]float64{0, 1}, false, []int16{1, 0, 1, 1, 1, 1}},
		{[]float64{math.Copysign(0, -1), 1}, false, []int16{1, 0, 1, 1, 1, 1}},
		{[]float64{0, .4, .6}, false, []int16{2, 1, 2, 1, 2, 0, 2, 1}},
	} {
		dataset, _, counts := collect(t, newProblem(c.weights, nil, c.fused), int64(len(c.want)), 1)
		if !slices.Equal(dataset, c.want) {
			t.Errorf("%v fused=%v: %v, want %v", c.weights, c.fused, dataset, c.want)
		}
		for d := range c.weights {
			n := int64(0)
			for _, v := range c.want {
				if int(v) == d {
					n++
				}
			}
			if counts[d] != n {
				t.Errorf("%v fused=%v: dataset %d gives %d samples, want %d", c.weights, c.fused, d, counts[d], n)
			}
		}
	}
	var got []int16
	err := Exhaustive(context.Background(), []int64{5, 1, 3}, false, nil, 1, func(_ int64, dataset []int16,
		_ []int64) error {
		got = append(got, dataset...)
		return nil
	})
	if want := []int16{0, 2, 1, 0, 2, 0, 0, 2, 0}; err != nil || !slices.Equal(got, want) {
		t.Errorf("sizes 5, 1, 3: %v, %v, want %v", got, err, want)
	}
}

// TestOddWeights holds weights that no blend has, but that must be exact.
func TestOddWeights(t *testing.T) {
	for _, weights := range [][]float64{
		{1}, {0}, {0, 0, 0}, {.5}, {2}, {.25, .25}, {1, 1, 1}, {1e300, 1e300}, {math.MaxFloat64, 1,
			0}, {math.SmallestNonzeroFloat64, 1},
		{math.SmallestNonzeroFloat64, math.SmallestNonzeroFloat64}, {.9999, .0001}, {.9999, 5e-5, 5e-5}, {.5005,
			.5}, {.4995, .5}, {1e-320, .5, .5, 1e-320},
	} {
		for _, fused := range []bool{false, true} {
			p := newProblem(weights, nil, fused)
			p.steps = 256
			comparePlain(t, p, 5000, 2)
		}
	}
	many := make([]float64, 1000) // weight 0, and a sum a little off 1: errors drift
	rng := rand.New(rand.NewPCG(1, 1))
	for _, sum := range []float64{1 - 9e-4, 1, 1 + 9e-4} {
		var total float64
		for i := range many[:900] {
			many[i] = rng.Float64()
			total += many[i]
		}
		for i := range many {
			many[i] *= sum / total
		}
		p := newProblem(many, nil, false)
		p.steps = 10000
		comparePlain(t, p, 100_000, 2)
	}
}

func TestRefusals(t *testing.T) {
	emit := func(int64, []int16, []int64) error { return errors.New("emitted") }
	weighted := func(n int64, weights ...float64) error {
		_, err := Weighted(context.Background(), Rule{Weights: weights}, n, nil, 1, emit)
		return err
	}
	exhaustive := func(sizes ...int64) error { return Exhaustive(context.Background(), sizes, false, nil, 1, emit) }
	for _, c := range []struct {
		err  error
		want string
	}{
		{weighted(-1, 1), "blend size -1"},
		{weighted(1<<51, 1), "blend size"},
		{weighted(1), "no datasets"},
		{weighted(1, 1, math.NaN()), "dataset 1 "},
		{weighted(1, math.Inf(1)), "dataset 0 "},
		{weighted(1, .5, .5, -1e-9), "dataset 2 "},
		{weighted(1, make([]float64, MaxDatasets+1)...), "32767"},
		{exhaustive(1, 0, 2), "dataset 1 of the blend has no samples"},
		{exhaustive(1, -5), "dataset 1 "},
		{exhaustive(1<<50, 1), "more than"},
		{exhaustive(math.MaxInt64, math.MaxInt64), "more than"},
		{exhaustive(make([]int64, MaxDatasets+1)...), "32767"},
	} {
		if c.err == nil || !strings.Contains(c.err.Error(), c.want) {
			t.Errorf("error %v, want one with %q", c.err, c.want)
		}
	}
	if _, err := Weighted(context.Background(), Rule{Weights: []float64{1}}, 1, nil, 1, nil); err == nil {
		t.Error("no error for a nil emit")
	}
	for _, weights := range [][]float64{nil, {}, {.3, .7}} {
		if counts, err := Weighted(context.Background(), Rule{Weights: weights}, 0, nil, 2, emit); err != nil ||
			len(counts) != len(weights) {
			t.Errorf("no samples of %v: %v, %v", weights, counts, err)
		}
	}
	if err := exhaustive(); err != nil {
		t.Errorf("no datasets: %v", err)
	}
}

// TestEnds has a blend end early: by an error of emit, or by its context, while computing, waiting
// for the pool, and in emit.
func TestEnds(t *testing.T) {
	defer goleak.VerifyNone(t)
	rule := Rule{Weights: weightsOf("lognormal", 300, rand.New(rand.NewPCG(3, 4)))}
	stop := errors.New("stop")
	for _, threads := range []int{1, 2, 5} {
		pieces := 0
		_, err := Weighted(context.Background(), rule, 10*chunkSteps, nil, threads,
			func(int64, []int16, []int64) error {
				if pieces++; pieces == 2 {
					return stop
				}
				return nil
			})
		if !errors.Is(err, stop) || pieces != 2 {
			t.Errorf("%d threads: %v after %d pieces", threads, err, pieces)
		}
		ctx, cancel := context.WithCancelCause(context.Background())
		_, err = Weighted(ctx, rule, 10*chunkSteps, nil, threads, func(int64, []int16, []int64) error {
			cancel(stop)
			return nil
		})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%d threads: %v after cancelling", threads, err)
		}
		pool := semaphore.NewWeighted(1)
		if !pool.TryAcquire(1) {
			t.Fatal("a new pool is taken")
		}
		ctx, cancelPool := context.WithTimeout(context.Background(), 10*time.Millisecond)
		if _, err := Weighted(ctx, rule, 1000, pool, threads,
			func(int64, []int16, []int64) error { return nil }); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%d threads: %v with a pool that is taken", threads, err)
		}
		cancelPool()
	}
}

// TestPool has emit take all of the pool: it must be free then, sooner or later.
func TestPool(t *testing.T) {
	pool := semaphore.NewWeighted(2)
	p := newProblem(weightsOf("files", 400, rand.New(rand.NewPCG(3, 4))), nil, false)
	p.steps = 2048
	pieces := 0
	_, err := p.run(t.Context(), 20*2048, pool, 4, func(int64, []int16, []int64) error {
		pieces++
		if err := pool.Acquire(t.Context(), 2); err != nil {
			return err
		}
		pool.Release(2)
		return nil
	})
	if err != nil || pieces != 20 {
		t.Errorf("%v after %d pieces", err, pieces)
	}
	if !pool.TryAcquire(2) {
		t.Error("something of the pool is still held")
	}
}

// TestWrongGuesses joins chunks that were begun from states that no blend reaches.
func TestWrongGuesses(t *testing.T) {
	const before, n = 5000, 40_000
	for _, datasets := range []int{3, 50, 400} {
		rng := rand.New(rand.NewPCG(uint64(datasets), 1))
		lognormal := weightsOf("lognormal", datasets, rng)
		// Two datasets that a blend of this length hardly draws: wrong counts of them stay wrong.
		tiny := slices.Clone(lognormal)
		tiny[0], tiny[datasets/2] = 1e-9, 2e-9
		sizes := make([]int64, datasets)
		for i := range sizes {
			sizes[i] = 1 + int64(lognormal[datasets-1-i]*(before+n)) // unlike the weights: many leave early
		}
		for name, p := range map[string]*problem{
			"lognormal": newProblem(lognormal, nil, false), "tiny": newProblem(tiny, nil,
				true), "equal": newProblem(weightsOf("sources", datasets, rng), nil, false),
			"exhaustive": newProblem(lognormal, sizes, false),
		} {
			g := p.group()
			e := newEngine(g)
			wantDataset, wantSample := make([]int16, before+n), make([]int64, before+n)
			end := make([]float64, datasets)
			p.plain(end, 0, wantDataset, wantSample)
			truth, guess := g.newState(), g.newState()
			for _, d := range wantDataset[:before] {
				g.take(truth, int(g.of[d]))
			}
			for _, shift := range []int{0, 1, 5, 1000, 2, 20}[:longtest.ShortRounds(4, 6)] {
				now := g.newState()
				now.copyFrom(truth)
				guess.copyFrom(truth)
				for move := range shift { // a state after the same number of steps, but of other datasets
					to, from := rng.IntN(g.n), rng.IntN(g.n)
					if move == 0 {
						to = int(g.of[0])
					}
					for to == from || guess.c[from] == 0 || guess.c[from] == gone {
						from = (from + 1) % g.n
					}
					if guess.c[to] < g.limits[to]-1 {
						guess.c[to]++
						guess.c[from]--
					}
				}
				last := g.newState()
				last.copyFrom(guess)
				dataset, sample := make([]int16, n), make([]int64, n)
				e.alone(last, before, dataset, sample)
				e.join(now, guess, last, before, dataset, sample)
				if !slices.Equal(dataset, wantDataset[before:]) || !slices.Equal(sample, wantSample[before:]) {
					t.Errorf("%s, %d datasets, %d samples elsewhere: another blend than the plain loop's", name,
						datasets, shift)
				}
				if got, want := g.counts(now), p.counts(end); !slices.Equal(got, want) {
					t.Errorf("%s, %d datasets, %d samples elsewhere: counts %v, want %v", name, datasets, shift, got,
						want)
				}
			}
		}
	}
}

// FuzzWeighted compares with the plain loop on any weights.
func FuzzWeighted(f *testing.F) {
	f.Add([]byte{1, 2, 3, 4, 5, 6, 7, 8}, uint16(100), false)
	f.Add([]byte("equal equal equal equal equal equal equal equal equal equal equal equal"), uint16(3000), true)
	f.Fuzz(func(t *testing.T, data []byte, n uint16, fused bool) {
		if len(data) == 0 || len(data) > 2000 {
			return
		}
		weights := make([]float64, len(data))
		var sum float64
		for i, b := range data {
			weights[i] = float64(b&15) * math.Pow(7, -float64(b>>4))
			sum += weights[i]
		}
		for i := range weights {
			weights[i] /= max(sum, 1e-300)
		}
		p := newProblem(weights, nil, fused)
		p.steps = 128 + int64(n)/3
		comparePlain(t, p, int64(n), 2)
	})
}

// FuzzExhaustive compares with the plain loop on any sizes.
func FuzzExhaustive(f *testing.F) {
	f.Add([]byte{255, 1, 2, 3, 4, 5, 6, 7, 8}, uint8(0), false)
	f.Add([]byte("equal equal equal equal equal equal equal equal equal equal equal equal"), uint8(30), true)
	f.Fuzz(func(t *testing.T, data []byte, steps uint8, fused bool) {
		if len(data) == 0 || len(data) > 1000 {
			return
		}
		sizes := make([]int64, len(data))
		var total int64
		for i, b := range data {
			sizes[i] = int64(1+b&15) << (b >> 5)
			total += sizes[i]
		}
		weights := make([]float64, len(sizes))
		for i, size := range sizes {
			weights[i] = float64(size) / float64(total)
		}
		p := newProblem(weights, sizes, fused)
		p.steps = max(16*int64(steps), total/100, 1)
		comparePlain(t, p, total, 2)
	})
}

func TestGroups(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		weights := rapid.SliceOfN(rapid.SampledFrom([]float64{0, .1, .2, .3}), 1, 30).Draw(t, "weights")
		g := newProblem(weights, nil, false).group()
		seen := make([]bool, len(weights))
		for i := range g.n {
			for k, d := range g.members[g.start[i]:g.start[i+1]] {
				if seen[d] || weights[d] != g.weights[i] || int(g.of[d]) != i ||
					k > 0 && d <= g.members[int(g.start[i])+k-1] {
					t.Fatalf("group %d has member %d", i, d)
				}
				seen[d] = true
			}
		}
		if slices.Contains(seen, false) {
			t.Fatalf("members %v", g.members)
		}
	})
}

func BenchmarkWeighted(b *testing.B) {
	for _, c := range []struct {
		kind     string
		datasets int
	}{{"lognormal", 7}, {"lognormal", 100}, {"lognormal", 1000}, {"lognormal", 2000}, {"files", 2000},
		{"sources", 2000}, {"equal", 2000}} {
		rule := Rule{Weights: weightsOf(c.kind, c.datasets, rand.New(rand.NewPCG(1, 2)))}
		const n = 20_000_000
		benchmark(b, fmt.Sprintf("%s/%d", c.kind, c.datasets), n, func(threads int) error {
			_, err := Weighted(b.Context(), rule, n, nil, threads, func(int64, []int16, []int64) error { return nil })
			return err
		})
	}
}

func BenchmarkExhaustive(b *testing.B) {
	for _, c := range []struct {
		kind     string
		datasets int
	}{{"random", 7}, {"random", 100}, {"random", 2000}, {"one tiny", 7}, {"one tiny", 2000}, {"large and tiny", 2000},
		{"few", 2000}} {
		rng := rand.New(rand.NewPCG(1, 2))
		most := int64(40_000_000 / c.datasets)
		sizes := sizesOf(c.kind, c.datasets, most, rng)
		var n int64
		for _, size := range sizes {
			n += size
		}
		benchmark(b, fmt.Sprintf("%s/%d", c.kind, c.datasets), n, func(threads int) error {
			return Exhaustive(b.Context(), sizes, false, nil, threads,
				func(int64, []int16, []int64) error { return nil })
		})
	}
}

// benchmark measures a blend of n samples with one thread and with two.
func benchmark(b *testing.B, name string, n int64, blend func(threads int) error) {
	for _, threads := range []int{1, 2} {
		b.Run(fmt.Sprintf("%s/threads=%d", name, threads), func(b *testing.B) {
			var before, after unix.Rusage
			if err := unix.Getrusage(unix.RUSAGE_SELF, &before); err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				if err := blend(threads); err != nil {
					b.Fatal(err)
				}
			}
			if err := unix.Getrusage(unix.RUSAGE_SELF, &after); err != nil {
				b.Fatal(err)
			}
			used := after.Utime.Nano() - before.Utime.Nano() + after.Stime.Nano() - before.Stime.Nano()
			b.ReportMetric(float64(used)/float64(b.N)/float64(n), "cpu-ns/sample")
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/sample")
		})
	}
}
