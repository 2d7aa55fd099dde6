package votes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"mula/blend/fingerprint"
	"mula/moe"
	"mula/train/group"
	"mula/train/optimizer/optimizertest"
	"mula/train/record"
	"mula/xpu/comm"
)

// After Gather, all ranks have the rows of the last stages in the order of their positions, and
// find the same rank at fault: the first stage with a non-finite value, or none if several hosts
// have one.
func TestExchange(t *testing.T) {
	shape := comm.NewShape(map[comm.Axes]int{comm.ExpertDP: 2, comm.PP: 2}) // ranks 0 and 1 are one pipeline
	for _, bad := range [][]int{nil, {2}, {0, 2}} {
		optimizertest.Together(t, 4, func(world *comm.Comm) error {
			g, err := group.New(context.Background(), world, shape, group.Options{})
			if err != nil {
				return err
			}
			defer g.Close()
			g.Hosts = []string{"a", "a", "b", "b"}
			v := New(g, moe.Config{}, 1, 4, 4)
			m := record.StepMetrics{Step: 2, First: 8, AuxLoss: 1}
			own := Own{Tensor: -1, NonFinite: slices.Contains(bad, g.Rank())}
			if slices.Contains(bad, g.Rank()-1) { // the last stage has the loss
				own.Tensor, m.ZLoss = 7, math.NaN()
			}
			if g.Rank()%2 == 1 { // position 10 is skipped
				at := int64(8 + g.Rank())
				v.Rows = []Row{{at, g.Rank(), 5, 0.5, [16]byte{0: 1, 15: byte(at)}}}
			}
			rows := []Row{{9, 1, 5, 0.5, [16]byte{0: 1, 15: 9}}, {11, 3, 5, 0.5, [16]byte{0: 1, 15: 11}}}
			err = v.Exchange(context.Background(), &m, own)
			if !v.Diverged() {
				t.Error("a rank is to blame before the votes are gathered")
			}
			err = errors.Join(err, v.Gather(context.Background()))
			if err != nil || m.AuxLoss != 4 || !slices.Equal(v.Rows, rows) {
				t.Errorf("rank %d: %v, %+v, %+v", g.Rank(), err, m, v.Rows)
			}
			want, tensor := -1, -1
			if bad != nil {
				want, tensor = bad[0], 7
			}
			rank, number := v.BadGradient()
			if rank != want || number != tensor || v.BadRouterLoss() != want || v.Diverged() != (len(bad) != 1) ||
				bad != nil && v.BadLoss(11) != 2 || !slices.Equal(v.RowsOf(2), rows[1:]) {
				t.Errorf("rank %d of %v: %d, tensor %d, router %d, diverged %v, rows %v", g.Rank(), bad, rank, number,
					v.BadRouterLoss(), v.Diverged(), v.RowsOf(2))
			}
			if g.Rank() == 3 {
				own.Err = errors.New("out of memory")
			}
			if err := v.Exchange(context.Background(), &m, own); err == nil {
				t.Error("the error of a rank is lost")
			}
			return nil
		})
	}
}

// Rank 0 gets the sums of a plain loop over all ranks and their rows, to the bit, and the other
// ranks the sums that they need: for stages with one section, with several and with a smaller last
// one, for stages of different size, and with skipped positions. Before that, each rank fails once,
// and all ranks get its error.
func TestExchangeIsOrdered(t *testing.T) {
	const sources, slots, step, tokens = 3, 2, 7, 1000
	for _, sizes := range []struct{ dp, pp, ep, virtual int }{{1, 1, 1, 1}, {2, 1, 1, 1}, {2, 3, 2, 1}, {7, 1, 1, 1},
		{3, 2, 3, 1}, {17, 1, 1, 1}, {2, 2, 1, 2}} {
		shape := comm.NewShape(map[comm.Axes]int{comm.ExpertDP: sizes.dp, comm.PP: sizes.pp, comm.EP: sizes.ep})
		for _, model := range []moe.Config{{Layers: 5}, {Architecture: moe.OLMoE, Layers: 5, Experts: 9},
			{Architecture: moe.Qwen3MoE, Layers: 5, Experts: 3, DenseLayers: "1"}} {
			withExperts := model.ExpertLayers(0, model.Layers)
			ranks, batch := shape.Ranks(), slots*shape.Size(comm.Data)
			first := int64(step * batch)
			metrics, rows := make([]record.StepMetrics, ranks), make([][]Row, ranks)
			rng := rand.New(rand.NewPCG(uint64(ranks), uint64(model.Experts)))
			random := func() float64 { return rng.NormFloat64() * math.Exp(10*rng.NormFloat64()) }
			want := record.StepMetrics{Step: step, First: first, Tokens: tokens, RankSeconds: new(record.RankSeconds)}
			seconds := make([]record.RankSeconds, ranks)
			sums := make([]SourceSums, sources)
			var hasher fingerprint.Hasher
			if model.Experts > 0 {
				want.RouterEntropy = make([]float64, len(withExperts))
				for range withExperts {
					want.ExpertTokens = append(want.ExpertTokens, make([]int64, model.Experts))
				}
			}
			for rank := range ranks {
				m := &metrics[rank]
				m.Step, m.First, m.Tokens = step, first, tokens
				// multiples of 1/8, so that sums are exact; each rank has other times
				seconds[rank] = record.RankSeconds{Reading: 1, Compute: record.Seconds(8+rank*5%ranks) / 8,
					Waiting: record.Seconds(rank), Update: 0.5, Saving: record.Seconds(2 * rank)}
				want.RankSeconds.Add(seconds[rank])
				stage := shape.Index(rank, comm.PP)
				for layer, number := range withExperts {
					if rank%4 == 2 || !slices.ContainsFunc(model.StageGroups(stage, sizes.pp, sizes.virtual),
						func(l moe.Layers) bool { return number >= l.From && number < l.To }) {
						continue // some ranks have no rows
					}
					entropy, counts := random(), make([]int64, model.Experts)
					want.RouterEntropy[layer] += entropy
					m.RouterEntropy = append(m.RouterEntropy, entropy)
					for i := range counts {
						counts[i] = rng.Int64N(tokens/int64(shape.Size(comm.Data)) + 1)
						want.ExpertTokens[layer][i] += counts[i]
					}
					m.ExpertTokens = append(m.ExpertTokens, counts)
				}
				if stage < sizes.pp-1 {
					continue
				}
				m.AuxLoss, m.ZLoss = random(), random()
				want.AuxLoss += m.AuxLoss
				want.ZLoss += m.ZLoss
				for i := range slots {
					if rng.IntN(4) == 0 { // skipped
						continue
					}
					position := first + int64(shape.Index(rank, comm.Data)*slots+i)
					row := Row{position, rng.IntN(sources), rng.Int64N(50), random(),
						fingerprint.SampleHash([]uint32{rng.Uint32()})}
					rows[rank] = append(rows[rank], row)
					hasher.AddHash(row.Hash)
					want.Loss += row.Loss
					of := &sums[row.Source]
					of.Loss, of.Targets, of.Samples = of.Loss+row.Loss, of.Targets+row.Targets, of.Samples+1
				}
			}
			hashes := hasher.Step(step, first)
			want.SlowestRanks = slowest(shape, seconds)
			optimizertest.Together(t, ranks, func(world *comm.Comm) error {
				g, err := group.New(context.Background(), world, shape, group.Options{})
				if err != nil {
					return err
				}
				defer g.Close()
				g.Hosts = slices.Repeat([]string{"host"}, ranks)
				v := New(g, model, sizes.virtual, batch, sources)
				stage, reader := g.OwnIndex(comm.PP), int64(g.OwnIndex(comm.Data))
				for failed := range ranks {
					m := record.StepMetrics{Step: step, First: first, Tokens: tokens, AuxLoss: 1, ZLoss: 1}
					for range v.layers(stage) {
						m.RouterEntropy = append(m.RouterEntropy, 1)
						m.ExpertTokens = append(m.ExpertTokens, slices.Repeat([]int64{1}, model.Experts))
					}
					v.Rows = v.Rows[:0]
					for i := int64(0); i < slots && stage == sizes.pp-1; i++ {
						v.Rows = append(v.Rows, Row{Position: first + reader*slots + i, Loss: 1})
					}
					own := Own{Tensor: -1}
					if g.Rank() == failed {
						own.Err = errors.New("no memory")
					}
					err := v.Exchange(context.Background(), &m, own)
					if err == nil || ranks > 1 && !strings.Contains(err.Error(), fmt.Sprintf("rank %d on ", failed)) {
						t.Errorf("%s: rank %d failed, rank %d has the error %v", shape, failed, g.Rank(), err)
					}
				}
				v.Rows = append(v.Rows[:0], rows[g.Rank()]...)
				m := metrics[g.Rank()]
				own := Own{Tensor: -1, Seconds: seconds[g.Rank()]}
				if err := v.Exchange(context.Background(), &m, own); err != nil {
					return err
				}
				if g.Rank() > 0 {
					if m.Loss != want.Loss || m.AuxLoss != want.AuxLoss || m.ZLoss != want.ZLoss {
						t.Errorf("%s: rank %d has %+v, want %+v", shape, g.Rank(), m, want)
					}
					return nil
				}
				got := v.Hasher.Step(step, first)
				if diff := gocmp.Diff(want, m); diff != "" || !slices.Equal(v.Sources, sums) ||
					*got.Order != *hashes.Order || got.Set != hashes.Set || got.Samples != hashes.Samples {
					t.Errorf("%s: sources %v, want %v; %v, want %v; %s", shape, v.Sources, sums, got, hashes, diff)
				}
				return nil
			})
		}
	}
}

// slowest returns the slowest ranks as a plain loop finds them. The median of a stage is the median
// of the medians of its sections, repeated for each of their ranks.
func slowest(shape comm.Shape, seconds []record.RankSeconds) (all []record.SlowRank) {
	lower := func(times []record.Seconds) record.Seconds {
		slices.Sort(times)
		return times[(len(times)-1)/2]
	}
	n := shape.Size(comm.Data)
	section := int(math.Ceil(math.Sqrt(float64(n))))
	for stage := 0; stage < shape.Size(comm.PP) && n > 1; stage++ {
		var ranks []record.SlowRank
		var medians []record.Seconds
		for part := range slices.Chunk(shape.Group(shape.At(0, comm.PP, stage), comm.Data), section) {
			var own []record.Seconds
			for _, rank := range part {
				ranks = append(ranks, record.SlowRank{Rank: rank, Host: "host", RankSeconds: seconds[rank]})
				own = append(own, seconds[rank].Own())
			}
			medians = append(medians, slices.Repeat([]record.Seconds{lower(own)}, len(part))...)
		}
		for i := range ranks {
			ranks[i].Median = lower(medians)
		}
		slices.SortStableFunc(ranks, func(a, b record.SlowRank) int { return cmp.Compare(b.Own(), a.Own()) })
		all = append(all, ranks[:min(n, slowestRanks)]...)
	}
	slices.SortStableFunc(all, func(a, b record.SlowRank) int {
		return cmp.Compare(float64(b.Own())/float64(b.Median), float64(a.Own())/float64(a.Median))
	})
	return all[:min(len(all), recordedRanks)]
}

// Numbers of any width come back from their bits.
func TestPackBits(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		width := rapid.IntRange(1, 56).Draw(t, "width")
		numbers := rapid.SliceOf(rapid.Int64Range(0, 1<<width-1)).Draw(t, "numbers")
		packed, got := packBits(nil, numbers, width), make([]int64, len(numbers))
		unpackBits(got, packed, width)
		if !slices.Equal(got, numbers) || len(packed) != (len(numbers)*width+7)/8 {
			t.Fatalf("%d bytes, %v", len(packed), got)
		}
	})
}
