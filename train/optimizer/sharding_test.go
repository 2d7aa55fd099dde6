package optimizer

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"mula/moe"
	"mula/train/estimate"
	"mula/train/optimizer/optimizertest"
	"mula/xpu"
	"mula/xpu/comm"
)

func gradientNorm(t testing.TB, o *Optimizer) float64 {
	t.Helper()
	norm, err := o.GradientNorm(context.Background())
	if err != nil {
		t.Error(err)
	}
	return norm
}

// reducedNorm is gradientNorm with ReducesSums.
func reducedNorm(t testing.TB, o *Optimizer) float64 {
	o.sharding.ReducesSums = true
	defer func() { o.sharding.ReducesSums = false }()
	return gradientNorm(t, o)
}

func update(t testing.TB, o *Optimizer, learningRate, gradScale float64) {
	t.Helper()
	if err := o.Step(context.Background(), learningRate, gradScale); err != nil {
		t.Error(err)
	}
}

func average(t testing.TB, o *Optimizer, on bool) {
	t.Helper()
	if err := o.Average(context.Background(), on); err != nil {
		t.Error(err)
	}
}

// layouts are the numbers of ranks on the axes dp and ep.
var layouts = []struct{ DP, EP int }{{4, 1}, {2, 2}, {1, 4}}

var schemes = []estimate.Scheme{estimate.Unsharded, estimate.SO, estimate.EPSO}

// groupsOf returns the mesh of a layout, and again the group of its ranks on axis ep.
func groupsOf(ctx context.Context, world *comm.Comm, dp, ep int) (mesh *comm.Mesh, nested comm.Nested, err error) {
	if mesh, err = comm.NewMesh(ctx, world, comm.NewShape(map[comm.Axes]int{comm.ExpertDP: dp, comm.PP: 1,
		comm.EP: ep})); err != nil {
		return nil, comm.Nested{}, err
	}
	within, err := mesh.Split(ctx, comm.EP)
	if err != nil {
		mesh.Close()
	}
	return mesh, comm.Nested{Within: within, WithinTensor: within, Across: mesh.Group(comm.Replicas)}, err
}

// A handModel has tensors as a model of one layer with 4 experts has them, in memory as a model has
// them: two tensors are of several blocks, and no bucket is easy to divide. Its tensors have the
// names by which optimizers tell them apart.
var handTensors = []struct {
	name    string
	shape   []int
	bucket  int
	divided bool
}{
	{"model.embed_tokens.weight", []int{530, 257}, 2, false}, // 3 blocks, the last short
	{"model.layers.0.input_layernorm.weight", []int{33}, 1, false},
	{"model.layers.0.self_attn.q_proj.weight", []int{33, 33}, 1, false},
	{"model.layers.0.mlp.gate.weight", []int{4, 33}, 1, false},
	{"model.layers.0.mlp.experts.0.gate_proj.weight", []int{401, 170}, 0, true}, // 2 blocks
	{"model.layers.0.mlp.experts.0.down_proj.weight", []int{33, 19}, 0, true},
	{"model.layers.0.mlp.experts.1.gate_proj.weight", []int{401, 170}, 0, true},
	{"model.layers.0.mlp.experts.1.down_proj.weight", []int{33, 19}, 0, true},
	{"model.layers.0.mlp.experts.2.gate_proj.weight", []int{401, 170}, 0, true},
	{"model.layers.0.mlp.experts.2.down_proj.weight", []int{33, 19}, 0, true},
	{"model.layers.0.mlp.experts.3.gate_proj.weight", []int{401, 170}, 0, true},
	{"model.layers.0.mlp.experts.3.down_proj.weight", []int{33, 19}, 0, true},
	{"model.norm.weight", []int{33}, 3, false},
}

const handExperts = 4

func handSizes() []int {
	var sizes []int
	for _, tensor := range handTensors {
		n := 1
		for _, d := range tensor.shape {
			n *= d
		}
		sizes = append(sizes, n)
	}
	return sizes
}

// handModel makes what rank ep of the ep ranks that share the experts holds. Weights follow from
// the tensor, gradients of a step from the tensor, the step and the data rank.
func handModel(rank, ranks int) (parameters []*moe.Parameter, buckets []moe.Bucket) {
	sizes := handSizes()
	members := map[int][]int{}
	expert := -1
	for i, tensor := range handTensors {
		if tensor.divided {
			if expert < 0 || i%2 == 0 && handTensors[i-1].divided {
				expert++
			}
			if expert*ranks/handExperts != rank {
				continue
			}
		}
		members[tensor.bucket] = append(members[tensor.bucket], i)
		parameters = append(parameters, &moe.Parameter{Name: tensor.name, Shape: tensor.shape, Index: i,
			Divided: tensor.divided})
	}
	for b := range len(members) {
		var bucket moe.Bucket
		total := 0
		for _, i := range members[b] {
			total += sizes[i]
		}
		bucket.Weight, bucket.Grad = tensor(make([]float32, total)), tensor(make([]float32, total))
		at := 0
		order := slices.Clone(members[b])
		slices.Reverse(order) // memory has another order than the list, as the experts of a model have
		for _, i := range order {
			p := parameters[slices.IndexFunc(parameters, func(p *moe.Parameter) bool { return p.Index == i })]
			p.Weight, p.Grad = bucket.Weight.Rows(at, at+sizes[i]), bucket.Grad.Rows(at, at+sizes[i])
			bucket.Parameters, bucket.Divided = append(bucket.Parameters, p), p.Divided
			at += sizes[i]
			rng := rand.New(rand.NewPCG(1, uint64(i)))
			for j := range p.Weight.Floats() {
				p.Weight.Floats()[j] = rng.Float32() - 0.5
			}
		}
		buckets = append(buckets, bucket)
	}
	return parameters, buckets
}

// handGradient draws numbers of many sizes, so that their sums depend on the order.
func handGradient(dst []float32, tensor, step, rank int) {
	rng := rand.NewPCG(uint64(step)*100+uint64(rank)+2, uint64(tensor))
	for j := range dst {
		u := rng.Uint64()
		dst[j] = math.Float32frombits(uint32(u)&(1<<31|1<<23-1) | uint32(110+u>>32%16)<<23)
	}
}

// I2, I4, I7: in every scheme the optimizers give, to the bit, the weights, norms and sizes of
// updates that one rank computes from the gradients that a plain loop has added up in the order of
// the definition: over ep and then over dp.
func TestI4SchemesAgree(t *testing.T) {
	const steps = 2
	sizes := handSizes()
	type outcome struct {
		weights [][]float32 // by tensor
		norms   []float64
		reduced []float64 // norms with ReducesSums
		ratios  []ratio
	}
	config := func(name Name, grouped bool) Config {
		c := defaultOptimizer(name)
		if grouped { // ranges of buckets then have weights of several groups
			c.Groups = []ParameterGroup{
				{Match: []string{"norms", "embedding"}, WeightDecay: new(0.0)}, {Match: []string{"router",
					"model.layers.*.experts.[13].*"}, LearningRateScale: new(0.3)},
				{Match: []string{"*.down_proj.weight"}, WeightDecay: new(0.5), LearningRateScale: new(2.0)},
			}
		}
		return c
	}
	alone := func(name Name, grouped bool, l struct{ DP, EP int }) outcome {
		parameters, _ := handModel(0, 1)
		o := mustOptimizer(t, config(name, grouped), 100, device(t, 1), parameters)
		o.Measure(true)
		var result outcome
		sum := func(step int) {
			for _, p := range parameters {
				g, inner := make([]float32, p.Grad.Elements()), make([]float32, p.Grad.Elements())
				for dp := range l.DP {
					for ep := range l.EP {
						handGradient(g, p.Index, step, dp*l.EP+ep)
						if p.Divided { // one rank of each dp has gradients of an expert
							if ep == 0 {
								copy(inner, g)
							}
							continue
						}
						for j := range g {
							if ep == 0 {
								inner[j] = g[j]
							} else {
								inner[j] += g[j]
							}
						}
					}
					for j := range g {
						if dp == 0 {
							p.Grad.Floats()[j] = inner[j]
						} else {
							p.Grad.Floats()[j] += inner[j]
						}
					}
				}
			}
		}
		for step := range steps {
			sum(step)
			norm := gradientNorm(t, o)
			result.norms, result.reduced = append(result.norms, norm), append(result.reduced, reducedNorm(t, o))
			update(t, o, 1e-2, ClipFactor(norm, 1))
		}
		if name == SophiaG {
			sum(steps)
			o.UpdateCurvature(0.5, 90)
			sum(steps + 1)
			update(t, o, 1e-2, 1)
		}
		average(t, o, true)
		for i, p := range parameters {
			result.weights = append(result.weights, slices.Clone(p.Weight.Floats()))
			u, w := o.Ratio(i)
			result.ratios = append(result.ratios, ratio{u, w})
		}
		return result
	}
	for _, l := range layouts {
		for name := range specs {
			if name != AdamW && l.EP != 2 {
				continue
			}
			wants := map[bool]outcome{false: alone(name, false, l)}
			if l.EP == 2 {
				wants[true] = alone(name, true, l)
				if slices.EqualFunc(wants[true].weights, wants[false].weights, slices.Equal) {
					t.Errorf("%s: groups change nothing", name)
				}
			}
			for i := range 2 * len(schemes) {
				scheme, grouped := schemes[i/2], i%2 > 0
				if grouped && l.EP != 2 {
					continue
				}
				want := wants[grouped]
				t.Run(fmt.Sprintf("%s/%d,%d/%s/groups %v", name, l.DP, l.EP, scheme, grouped), func(t *testing.T) {
					owners := make([][]int, len(sizes)) // of each element, how many write it
					for i, n := range sizes {
						owners[i] = make([]int, n)
					}
					var mu sync.Mutex
					optimizertest.Together(t, l.DP*l.EP, func(world *comm.Comm) error {
						ctx := context.Background()
						groups, nested, err := groupsOf(ctx, world, l.DP, l.EP)
						if err != nil {
							return err
						}
						defer groups.Close()
						ep := world.Rank() % l.EP
						parameters, buckets := handModel(ep, l.EP)
						s := NewSharding(groups, nested, scheme, name.NeedsWholeTensors(), xpu.Float32, device(t, 1),
							parameters, buckets)
						o, err := NewSharded(ctx, config(name, grouped), 100, device(t, 1), parameters, sizes,
							s)
						if err != nil {
							return err
						}
						o.Measure(true)
						sum := func(step int) error {
							for _, p := range parameters {
								rank := world.Rank()
								if p.Divided {
									rank -= ep // all gradient of an expert is here, as alone takes it
								}
								handGradient(p.Grad.Floats(), p.Index, step, rank)
							}
							for b := range buckets {
								if err := s.Reduce(ctx, b, s.device.Transfers()); err != nil {
									return err
								}
							}
							return nil
						}
						for step := range steps {
							if err := sum(step); err != nil {
								return err
							}
							norm, err := o.GradientNorm(ctx)
							if err != nil {
								return err
							}
							if norm != want.norms[step] {
								return fmt.Errorf("norm of step %d is %v, alone %v", step, norm, want.norms[step])
							}
							reduced := reducedNorm(t, o)
							if reduced != want.reduced[step] || math.Abs(reduced/norm-1) > 1e-14 {
								return fmt.Errorf("reduced norm of step %d is %v, alone %v; in order %v", step, reduced,
									want.reduced[step], norm)
							}
							if err := o.Step(ctx, 1e-2, ClipFactor(norm, 1)); err != nil {
								return err
							}
						}
						if name == SophiaG {
							if err := sum(steps); err != nil {
								return err
							}
							o.UpdateCurvature(0.5, 90)
							if err := sum(steps + 1); err != nil {
								return err
							}
							if err := o.Step(ctx, 1e-2, 1); err != nil {
								return err
							}
						}
						trained := make([][]float32, len(parameters))
						for i, p := range parameters {
							trained[i] = slices.Clone(p.Weight.Floats())
						}
						if err := o.Average(ctx, true); err != nil {
							return err
						}
						for i, p := range parameters {
							if !slices.Equal(p.Weight.Floats(), want.weights[p.Index]) {
								return fmt.Errorf("weights of %s differ", p.Name)
							}
							begin, end, writer := o.Owned(i)
							for _, state := range o.Saved(i) {
								if state.Values.Elements() != end-begin {
									return fmt.Errorf("%s of %s has %d elements of [%d, %d)", state.Name, p.Name,
										state.Values.Elements(), begin, end)
								}
							}
							mu.Lock()
							for j := begin; j < end && writer; j++ {
								owners[p.Index][j]++
							}
							mu.Unlock()
						}
						for i := range sizes {
							if u, w := o.Ratio(i); u != want.ratios[i].update || w != want.ratios[i].weight {
								return fmt.Errorf("sizes %v and %v of the update of %s, alone %v", u, w,
									handTensors[i].name, want.ratios[i])
							}
						}
						if err := o.Average(ctx, false); err != nil {
							return err
						}
						for i, p := range parameters {
							if !slices.Equal(p.Weight.Floats(), trained[i]) {
								return fmt.Errorf("weights to train on of %s are not put back", p.Name)
							}
						}
						return nil
					})
					for i, counts := range owners {
						for j, n := range counts {
							if n != 1 {
								t.Fatalf("element %d of %s is written by %d ranks", j, handTensors[i].name, n)
							}
						}
					}
				})
			}
		}
	}
}

// I10: each rank sends the bytes of the schemes' formulas when it sums gradients and returns
// weights, with its owned fraction instead of 1/n. Over the ranks, these bytes add up to the
// formula.
func TestI10Bytes(t *testing.T) {
	sizes := handSizes()
	for _, l := range layouts {
		for _, scheme := range schemes {
			var mu sync.Mutex
			var sums [4]int64 // over ranks: sent for gradients of replicated weights, of experts; for weights of both
			optimizertest.Together(t, l.DP*l.EP, func(world *comm.Comm) error {
				ctx := context.Background()
				groups, nested, err := groupsOf(ctx, world, l.DP, l.EP)
				if err != nil {
					return err
				}
				defer groups.Close()
				parameters, buckets := handModel(world.Rank()%l.EP, l.EP)
				s := NewSharding(groups, nested, scheme, false, xpu.Float32, device(t, 1), parameters, buckets)
				if _, err := NewSharded(ctx, defaultOptimizer(AdamW), 100, device(t, 1), parameters, sizes,
					s); err != nil {
					return err
				}
				sent := func() (bytes int64) {
					for _, group := range []*comm.Comm{groups.Group(comm.EP), groups.Group(comm.Replicas),
						groups.Group(comm.Data), nested.Within} {
						for _, operation := range group.Traffic() {
							bytes += operation.Bytes()
						}
						group.ResetTraffic()
					}
					return bytes
				}
				sent()
				own := [4]int64{}
				for b := range buckets {
					if err := s.Reduce(ctx, b, s.device.Transfers()); err != nil {
						return err
					}
					kind := 0
					if buckets[b].Divided {
						kind = 1
					}
					bytes := sent()
					own[kind] += bytes
					// Of this rank: the others' shares for a reduce-scatter, and its own to each
					// other for an all-gather.
					z := int64(len(buckets[b].Grad.Floats())) * 4
					if g := s.buckets[b].group; g != nil && !(scheme == estimate.SO && kind == 0) {
						share := int64(s.buckets[b].bounds[g.Rank()+1]-s.buckets[b].bounds[g.Rank()]) * 4
						if bytes != z-share {
							return fmt.Errorf("bucket %d: %d bytes sent, want %d", b, bytes, z-share)
						}
					}
				}
				for b := range buckets {
					only := &Sharding{scheme: s.scheme, mesh: groups, device: s.device,
						buckets: s.buckets[b : b+1]}
					if err := only.gatherWeights(ctx); err != nil {
						return err
					}
					kind := 2
					if buckets[b].Divided {
						kind = 3
					}
					own[kind] += sent()
				}
				mu.Lock()
				defer mu.Unlock()
				for i, n := range own {
					sums[i] += n
				}
				return nil
			})
			var n, x int64 // elements of replicated weights, of all experts
			for i, tensor := range handTensors {
				if tensor.divided {
					x += int64(sizes[i])
				} else {
					n += int64(sizes[i])
				}
			}
			w, dp, ep := int64(l.DP*l.EP), int64(l.DP), int64(l.EP)
			// The table of bytes in docs/reference/ranks.md, with 4 bytes a gradient and a weight.
			var want [4]int64
			switch scheme {
			case estimate.Unsharded:
				want = [4]int64{2 * 4 * n * (w - 1), 2 * 4 * (x / ep) * (dp - 1) * ep, 0, 0}
			case estimate.SO:
				want = [4]int64{2*4*n*(ep-1)*dp + 4*n*(dp-1)*ep, 4 * (x / ep) * (dp - 1) * ep, 4 * n * (dp - 1) * ep,
					4 * (x / ep) * (dp - 1) * ep}
			case estimate.EPSO:
				want = [4]int64{4 * n * (w - 1), 4 * (x / ep) * (dp - 1) * ep, 4 * n * (w - 1),
					4 * (x / ep) * (dp - 1) * ep}
			}
			if sums != want {
				t.Errorf("dp %d, ep %d, %s: %v bytes are sent, want %v", l.DP, l.EP, scheme, sums, want)
			}
		}
	}
}

// I6: where the gradient is zero, as for an expert without tokens, weights still decay, and moments
// and the norm stay zero.
func TestI6NoTokens(t *testing.T) {
	for _, scheme := range schemes {
		optimizertest.Together(t, 4, func(world *comm.Comm) error {
			ctx := context.Background()
			groups, nested, err := groupsOf(ctx, world, 2, 2)
			if err != nil {
				return err
			}
			defer groups.Close()
			parameters, buckets := handModel(world.Rank()%2, 2)
			before := slices.Clone(buckets[0].Weight.Floats())
			s := NewSharding(groups, nested, scheme, false, xpu.Float32, device(t, 1), parameters, buckets)
			o, err := NewSharded(ctx, defaultOptimizer(AdamW), 100, device(t, 1), parameters, handSizes(), s)
			if err != nil {
				return err
			}
			for b := range buckets {
				if err := s.Reduce(ctx, b, s.device.Transfers()); err != nil {
					return err
				}
			}
			norm, err := o.GradientNorm(ctx)
			if err != nil || norm != 0 {
				return fmt.Errorf("norm %v, %w", norm, err)
			}
			if err := o.Step(ctx, 0.5, 1); err != nil {
				return err
			}
			for i, w := range buckets[0].Weight.Floats() {
				if want := before[i] * float32(1-0.5*0.1); math.Abs(float64(w-want)) > 1e-7 {
					return fmt.Errorf("%s: weight %d is %v, was %v", scheme, i, w, before[i])
				}
			}
			return nil
		})
	}
}

// A bucket is cut at blocks, no bound further from an even cut than half a block's length.
func TestCutBucket(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var b moe.Bucket
		cuts := []int{0}
		longest := 0
		whole := rapid.Bool().Draw(t, "whole")
		for _, n := range rapid.SliceOfN(rapid.IntRange(1, 3*blockSize), 1, 6).Draw(t, "sizes") {
			p := &moe.Parameter{Weight: tensor(make([]float32, n))}
			at := b.Weight.Elements()
			b.Weight, b.Parameters = tensor(make([]float32, at+n)), append(b.Parameters, p)
			for end := min(blockSize, n); ; end = min(end+blockSize, n) {
				if !whole || end == n {
					longest = max(longest, at+end-cuts[len(cuts)-1])
					cuts = append(cuts, at+end)
				}
				if end == n {
					break
				}
			}
		}
		n := rapid.IntRange(1, 9).Draw(t, "ranks")
		bounds := cutBucket(b, n, whole)
		if len(bounds) != n+1 || bounds[0] != 0 || bounds[n] != b.Weight.Elements() || !slices.IsSorted(bounds) {
			t.Fatalf("bounds %v of %d", bounds, b.Weight.Elements())
		}
		for r, bound := range bounds {
			even := float64(b.Weight.Elements()) * float64(r) / float64(n)
			if !slices.Contains(cuts, bound) || math.Abs(float64(bound)-even) > float64(longest)/2+1 {
				t.Fatalf("bound %d of %v is %d, where blocks begin at %v", r, bounds, bound, cuts)
			}
		}
	})
}
