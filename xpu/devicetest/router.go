package devicetest

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"mula/xpu"
)

// A routingCase is a number of tokens and the options of their routing.
type routingCase struct {
	tokens, experts, perToken int
	uniform                   bool
	levels                    int     // number of different logits, so that some probabilities are equal; 0 for any
	spread                    float32 // spread of the logits
	renormalize               bool
	sigmoid                   bool
	bias                      float32 // spread of biases; 0 for none
	groups, topGroups         int
	sumOfTwo                  bool
	scale                     float32
	leastSum                  float32
}

func (c routingCase) String() string {
	text := fmt.Sprintf("%d tokens, %d of %d experts, uniform %v, %d levels, spread %g, renormalize %v", c.tokens,
		c.perToken, c.experts, c.uniform, c.levels, c.spread, c.renormalize)
	if c.groups > 0 {
		text += fmt.Sprintf(", %d of %d groups, sum of two %v", c.topGroups, c.groups, c.sumOfTwo)
	}
	return text + fmt.Sprintf(", sigmoid %v, bias %g, scale %g, least sum %g", c.sigmoid, c.bias, c.scale,
		c.leastSum)
}

func (c routingCase) logits(source *rand.Rand) []float32 {
	z := make([]float32, c.tokens*c.experts)
	for i := range z {
		if z[i] = c.spread * (2*source.Float32() - 1); c.levels > 0 {
			z[i] = c.spread * float32(source.IntN(c.levels)) / float32(c.levels)
		}
	}
	return z
}

// biases returns the biases of the experts; nil for none. With levels, some are equal.
func (c routingCase) biases(source *rand.Rand) []float32 {
	if c.bias == 0 {
		return nil
	}
	return routingCase{tokens: 1, experts: c.experts, spread: c.bias, levels: c.levels}.logits(source)
}

// routing allocates device memory for the case, filled with wrong values.
func (c routingCase) routing(t tester, d xpu.Device, bias []float32) xpu.Routing {
	floats := func(n int, shape ...int) xpu.Tensor {
		return upload(t, d, slices.Repeat([]float32{-7}, n), shape...)
	}
	ints := func(n int, shape ...int) xpu.Tensor { return uploadInts(t, d, slices.Repeat([]int32{-7}, n), shape...) }
	rows := c.tokens * c.perToken
	return xpu.Routing{
		Probs: floats(c.tokens*c.experts, c.tokens, c.experts), LSE: floats(c.tokens),
		Chosen: ints(rows, c.tokens, c.perToken), Counts: ints(c.experts),
		RowOf: ints(rows, c.tokens, c.perToken), TokenOf: ints(rows), Weight: floats(rows),
		RouterKind: c.kind(t, d, bias),
	}
}

func (c routingCase) kind(t tester, d xpu.Device, bias []float32) xpu.RouterKind {
	k := xpu.RouterKind{Sigmoid: c.sigmoid, Groups: c.groups, TopGroups: c.topGroups, SumOfTwo: c.sumOfTwo,
		Renormalize: c.renormalize, Scale: c.scale, LeastSum: c.leastSum}
	if bias != nil {
		k.Bias = upload(t, d, bias)
	}
	return k
}

func routerFamily(t *testing.T, d xpu.Device, tolerance float64) {
	cases := []routingCase{
		{tokens: 1, experts: 1, perToken: 1, spread: 1},
		{tokens: 1, experts: 7, perToken: 7, spread: 1},
		{tokens: 3, experts: 5, perToken: 1, spread: 4},
		{tokens: 40, experts: 64, perToken: 8, spread: 8},
		{tokens: 33, experts: 60, perToken: 60, spread: 3},
		{tokens: 130, experts: 200, perToken: 4, spread: 20},
		{tokens: 1030, experts: 5, perToken: 2, spread: 2},
		{tokens: 700, experts: 64, perToken: 8, uniform: true, spread: 2},
		{tokens: 9, experts: 2, perToken: 2, uniform: true, spread: 2},
		{tokens: 100, experts: 16, perToken: 3, levels: 2, spread: 1},
		{tokens: 65, experts: 130, perToken: 10, levels: 1, spread: 1},
		{tokens: 3, experts: 2000, perToken: 6, levels: 30, spread: 3},
		{tokens: 0, experts: 4, perToken: 2, spread: 1},
		{tokens: 40, experts: 64, perToken: 8, spread: 8, renormalize: true},
		{tokens: 130, experts: 5, perToken: 5, spread: 3, renormalize: true},
		{tokens: 9, experts: 7, perToken: 1, spread: 3, renormalize: true},
		{tokens: 40, experts: 64, perToken: 8, spread: 8, sigmoid: true},
		{tokens: 130, experts: 64, perToken: 8, spread: 4, sigmoid: true, bias: 0.5, groups: 8, topGroups: 4,
			sumOfTwo: true, renormalize: true, scale: 2.5}, // as in DeepSeek-V3
		{tokens: 70, experts: 160, perToken: 6, spread: 3, groups: 8, topGroups: 3, scale: 16}, // as in DeepSeek-V2
		{tokens: 33, experts: 12, perToken: 3, spread: 3, levels: 3, sigmoid: true, bias: 1, groups: 4, topGroups: 2,
			sumOfTwo: true},
		{tokens: 33, experts: 12, perToken: 4, spread: 3, levels: 2, groups: 3, topGroups: 1},
		{tokens: 20, experts: 9, perToken: 2, spread: 3, bias: 0.2, renormalize: true},
		{tokens: 90, experts: 64, perToken: 4, spread: 6, bias: 0.2, renormalize: true, leastSum: 0.05},
		{tokens: 20, experts: 9, perToken: 2, spread: 60, sigmoid: true, uniform: true, scale: 3},
	}
	for i, c := range cases {
		t.Run(c.String(), func(t *testing.T) { route(t, d, c, rand.New(rand.NewPCG(1, uint64(i))), tolerance) })
	}
	t.Run("any", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) {
			experts := rapid.IntRange(1, 40).Draw(t, "experts")
			c := routingCase{
				tokens: rapid.IntRange(0, 300).Draw(t, "tokens"), experts: experts,
				perToken: rapid.IntRange(1, experts).Draw(t, "perToken"), uniform: rapid.Bool().Draw(t, "uniform"),
				levels: rapid.IntRange(0, 4).Draw(t, "levels"), spread: rapid.Float32Range(0, 30).Draw(t, "spread"),
				renormalize: rapid.Bool().Draw(t, "renormalize"), sigmoid: rapid.Bool().Draw(t, "sigmoid"),
				bias:  rapid.SampledFrom([]float32{0, 0.5}).Draw(t, "bias"),
				scale: rapid.SampledFrom([]float32{0, 2.5}).Draw(t, "scale"),
			}
			if rapid.Bool().Draw(t, "grouped") {
				size := rapid.IntRange(2, 6).Draw(t, "size of a group")
				c.groups = rapid.IntRange(2, 6).Draw(t, "groups")
				c.experts, c.topGroups = size*c.groups, rapid.IntRange(1, c.groups).Draw(t, "chosen groups")
				c.perToken = rapid.IntRange(1, size*c.topGroups).Draw(t, "perToken of groups")
				c.sumOfTwo = rapid.Bool().Draw(t, "sum of two")
			}
			route(t, d, c, rand.New(rand.NewPCG(2, rapid.Uint64().Draw(t, "seed"))), tolerance)
		})
	})
	t.Run("not a number", func(t *testing.T) {
		c := routingCase{tokens: 5, experts: 70, perToken: 6, spread: 3}
		routeNaN(t, d, c)
		c.sigmoid, c.groups, c.topGroups, c.sumOfTwo = true, 7, 2, true
		routeNaN(t, d, c)
	})
}

// route checks Route, SortRows and RouteGrad, each with the results of the preceding ones.
func route(t tester, d xpu.Device, c routingCase, source *rand.Rand, tolerance float64) {
	tokens, experts, k := c.tokens, c.experts, c.perToken
	z, bias := c.logits(source), c.biases(source)
	r := c.routing(t, d, bias)
	stats := xpu.RouterStats{Probs: slices.Repeat([]float64{-7}, experts), Counts: slices.Repeat([]int64{-7}, experts),
		LSE2: -7, Entropy: -7}
	d.Route(r, upload(t, d, z, tokens, experts), c.uniform, &stats)
	gotProbs, allChosen := read(t, d, r.Probs), readInts(t, d, r.Chosen)

	// the distribution, and its sums
	probs, lse := make([]float64, tokens*experts), make([]float64, tokens)
	size, sumSize := make([]float64, tokens*experts), make([]float64, tokens)
	sums, lse2, entropy, entropySize := make([]float64, experts), 0.0, 0.0, 0.0
	for i := range tokens {
		row, p := z[i*experts:][:experts], probs[i*experts:][:experts]
		if c.sigmoid {
			for j, v := range row {
				p[j] = 1 / (1 + math.Exp(-float64(v)))
				size[i*experts+j] = p[j] * (1 + math.Abs(float64(v)))
				lse[i] += p[j]
			}
			sumSize[i] = lse[i] * (1 + float64(c.spread))
			for j, v := range p {
				sums[j] += v / lse[i]
				entropy -= v / lse[i] * math.Log(max(v/lse[i], math.SmallestNonzeroFloat64))
				entropySize += (1 + v/lse[i]) * (1 + math.Abs(float64(row[j])))
			}
			continue
		}
		top, sum := float64(slices.Max(row)), 0.0
		for j, v := range row {
			p[j] = math.Exp(float64(v) - top)
			sum += p[j]
		}
		lse[i] = top + math.Log(sum)
		sumSize[i] = 1 + math.Abs(lse[i])
		for j, v := range row {
			p[j] /= sum
			size[i*experts+j] = p[j] * (1 + math.Abs(float64(v)-top))
			sums[j] += p[j]
			if p[j] > 0 {
				entropy -= p[j] * math.Log(p[j])
			}
			entropySize += p[j] * math.Abs(float64(v))
		}
		lse2 += lse[i] * lse[i]
		entropySize += sumSize[i]
	}
	compare(t, "Probs", gotProbs, probs, size, tolerance)
	compare(t, "LSE", read(t, d, r.LSE), lse, sumSize, tolerance)
	for e, want := range sums {
		if got := stats.Probs[e]; !(math.Abs(got-want) <= tolerance*want*(1+2*float64(c.spread))) {
			t.Fatalf("sum of the probabilities of expert %d: %v, want %v", e, got, want)
		}
	}
	lse2Size := 0.0
	for i, v := range lse {
		if c.sigmoid {
			break
		}
		lse2Size += 2 * math.Abs(v) * sumSize[i]
	}
	if !(math.Abs(stats.LSE2-lse2) <= tolerance*lse2Size) {
		t.Fatalf("sum of squared logsumexps: %v, want %v", stats.LSE2, lse2)
	}
	if !(math.Abs(stats.Entropy-entropy) <= tolerance*entropySize) {
		t.Fatalf("entropy: %v, want %v", stats.Entropy, entropy)
	}

	// the choice, by the device's scores: scores of equal logits are equal
	counts := make([]int32, experts)
	for i := range tokens {
		row, p, chosen := z[i*experts:][:experts], gotProbs[i*experts:][:experts], allChosen[i*k:][:k]
		want := make([]int32, experts)
		for j := range want {
			want[j] = int32(j)
		}
		if c.uniform {
			for j := range k {
				want[j] = int32((i*k + j) % experts)
			}
		} else {
			want = c.best(p, bias)
		}
		if !slices.Equal(chosen, want[:k]) {
			t.Fatalf("token %d chose %v of %v, want %v", i, chosen, p, want[:k])
		}
		for j, v := range row {
			if first := slices.Index(row, v); p[j] != p[first] {
				t.Fatalf("token %d: probabilities %v and %v of equal logits", i, p[first], p[j])
			}
		}
		for _, e := range chosen {
			counts[e]++
		}
	}
	if got := readInts(t, d, r.Counts); !slices.Equal(got, counts) {
		t.Fatalf("counts %v, want %v", got, counts)
	}
	for e, n := range counts {
		if stats.Counts[e] != int64(n) {
			t.Fatalf("counts on the host %v, want %v", stats.Counts, counts)
		}
	}

	d.SortRows(r)
	weight, rowOf, tokenOf := read(t, d, r.Weight), readInts(t, d, r.RowOf), readInts(t, d, r.TokenOf)
	row := int32(0)
	for e := range experts {
		for pair, chosen := range allChosen {
			if int(chosen) != e {
				continue
			}
			token := pair / k
			want := gotProbs[token*experts+e]
			if c.renormalize {
				sum := float32(0)
				for _, other := range allChosen[token*k:][:k] {
					sum += gotProbs[token*experts+int(other)]
				}
				want /= max(sum, c.leastSum)
			}
			if c.scale != 0 {
				want *= c.scale
			}
			if c.renormalize && math.Abs(float64(weight[row]-want)) < 1e-6*float64(want) {
				want = weight[row] // devices may divide with another last bit
			}
			if rowOf[pair] != row || tokenOf[row] != int32(token) || weight[row] != want {
				t.Fatalf("choice %d of token %d, expert %d: row %d, of token %d with weight %v; want row %d and "+
					"weight %v",
					pair%k, token, e, rowOf[pair], tokenOf[row], weight[row], row, want)
			}
			row++
		}
	}
	routeGrad(t, d, c, r, source, tolerance)
}

// best returns the experts that a token may choose, the largest score plus bias first.
func (c routingCase) best(p, bias []float32) []int32 {
	keys := slices.Clone(p)
	for j, b := range bias {
		keys[j] += b
	}
	first, last := make([]int32, c.experts), max(1, c.groups)
	for j := range first {
		first[j] = int32(j)
	}
	slices.SortStableFunc(first, func(a, b int32) int { return cmp.Compare(keys[b], keys[a]) })
	if last == 1 {
		return first
	}
	size, groups := c.experts/c.groups, make([]int, c.groups)
	value := make([]float32, c.groups)
	for g := range groups {
		groups[g] = g
		own := slices.Sorted(slices.Values(keys[g*size:][:size]))
		if value[g] = own[size-1]; c.sumOfTwo {
			value[g] += own[size-2]
		}
	}
	slices.SortStableFunc(groups, func(a, b int) int { return cmp.Compare(value[b], value[a]) })
	return slices.DeleteFunc(first, func(e int32) bool { return !slices.Contains(groups[:c.topGroups], int(e)/size) })
}

// slopeShape returns the shape of the slopes of ranges of tokens.
func slopeShape(ranges, experts int) []int {
	if ranges == 1 {
		return []int{experts}
	}
	return []int{ranges, experts}
}

// routeGrad checks RouteGrad. With uniform it uses the input of ranks that share the experts: only
// rows in the order of choices.
func routeGrad(t tester, d xpu.Device, c routingCase, r xpu.Routing, source *rand.Rand, tolerance float64) {
	tokens, experts, k := c.tokens, c.experts, c.perToken
	ranges := 1 // of tokens, with slopes of their own
	for _, n := range []int{2, 3, 5, 7} {
		if tokens%n == 0 && !c.uniform {
			ranges = n
		}
	}
	slope, dweight, zFactor := random(source, ranges*experts), random(source, tokens*k), 0.3
	if c.sigmoid {
		zFactor = 0
	}
	if c.uniform {
		r.TokenOf, r.Weight, r.Counts = xpu.Tensor{}, xpu.Tensor{}, xpu.Tensor{}
		inOrder := make([]int32, tokens*k)
		for i := range inOrder {
			inOrder[i] = int32(i)
		}
		d.WriteInts(r.RowOf, inOrder)
	}
	got := upload(t, d, slices.Repeat([]float32{-7}, tokens*experts), tokens, experts)
	d.RouteGrad(r, got, upload(t, d, slope, slopeShape(ranges, experts)...), upload(t, d, dweight), zFactor)
	probs, lse, allChosen, rowOf := read(t, d, r.Probs), read(t, d, r.LSE), readInts(t, d, r.Chosen),
		readInts(t, d, r.RowOf)
	want, size, scale := make([]float64, tokens*experts), make([]float64, tokens*experts), 1.0
	if c.scale != 0 {
		scale = float64(c.scale)
	}
	for i := range tokens {
		p, g := probs[i*experts:][:experts], make([]float64, experts)
		for e, s := range slope[i*ranges/tokens*experts:][:experts] {
			g[e] = float64(s)
		}
		share := 1.0 // of the slopes: with a sigmoid they are derivatives by scores over their sum
		if c.sigmoid {
			total, mean := 0.0, 0.0
			for e, v := range p {
				total += float64(v)
				mean += float64(v) * g[e]
			}
			share = 1 / total
			for e := range g {
				g[e] = (g[e] - mean*share) * share
			}
		}
		sum, along := 1.0, 0.0 // of the choices: scores, and weights times gradients
		if c.renormalize {
			sum = 0
			for j, e := range allChosen[i*k:][:k] {
				sum += float64(p[e])
				along += float64(p[e]) * float64(dweight[rowOf[i*k+j]])
			}
			if along /= sum; sum < float64(c.leastSum) {
				sum, along = float64(c.leastSum), 0
			}
		}
		for j, e := range allChosen[i*k:][:k] {
			g[e] += (float64(dweight[rowOf[i*k+j]]) - along) / sum * scale
		}
		mean, magnitude := 0.0, 0.0
		for e, v := range p {
			mean += float64(v) * g[e]
			magnitude += float64(v) * math.Abs(g[e])
		}
		for e, v := range p {
			i := i*experts + e
			want[i] = float64(v) * (g[e] - mean + zFactor*float64(lse[i/experts]))
			size[i] = float64(v) * (2 + 2*scale/sum + magnitude + math.Abs(zFactor*float64(lse[i/experts])))
			if c.sigmoid {
				want[i], size[i] = float64(v)*(1-float64(v))*g[e], float64(v)*(2*scale/sum+4*share+math.Abs(g[e]))
			}
		}
	}
	compare(t, "the logits' gradient", read(t, d, got), want, size, tolerance)
}

// routeNaN checks that a token with NaN logits chooses different, existing experts, and that no
// other token is affected.
func routeNaN(t tester, d xpu.Device, c routingCase) {
	z := c.logits(rand.New(rand.NewPCG(3, 0)))
	alone := c.routing(t, d, nil)
	var stats, ignored xpu.RouterStats
	for _, s := range []*xpu.RouterStats{&stats, &ignored} {
		s.Probs, s.Counts = make([]float64, c.experts), make([]int64, c.experts)
	}
	d.Route(alone, upload(t, d, z, c.tokens, c.experts), false, &stats)
	z[1*c.experts+3], z[3*c.experts+69], z[3*c.experts] = float32(math.NaN()), float32(math.Inf(1)),
		float32(math.Inf(1))
	r := c.routing(t, d, nil)
	d.Route(r, upload(t, d, z, c.tokens, c.experts), false, &ignored)
	d.SortRows(r)
	aloneProbs, probs := read(t, d, alone.Probs), read(t, d, r.Probs)
	aloneChosen, allChosen, rowOf := readInts(t, d, alone.Chosen), readInts(t, d, r.Chosen), readInts(t, d, r.RowOf)
	rows := make([]bool, c.tokens*c.perToken)
	for i := range c.tokens {
		chosen := allChosen[i*c.perToken:][:c.perToken]
		if i != 1 && i != 3 {
			if p := probs[i*c.experts:][:c.experts]; !slices.Equal(chosen,
				aloneChosen[i*c.perToken:][:c.perToken]) || !slices.Equal(p, aloneProbs[i*c.experts:][:c.experts]) {
				t.Errorf("token %d chose %v beside tokens that are not numbers, and %v without them", i, chosen,
					aloneChosen[i*c.perToken:][:c.perToken])
			}
		}
		for j, e := range chosen {
			if e < 0 || int(e) >= c.experts || slices.Index(chosen, e) < j {
				t.Errorf("token %d chose %v", i, chosen)
			}
			row := rowOf[i*c.perToken+j]
			if row < 0 || int(row) >= len(rows) || rows[row] {
				t.Fatalf("token %d: rows %v", i, rowOf[i*c.perToken:][:c.perToken])
			}
			rows[row] = true
		}
	}
}
