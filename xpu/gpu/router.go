package gpu

import (
	"math"

	"mula/xpu"
)

// routeBlock is the number of tokens whose choices one group of work-items counts and sorts; TOKENS
// in router.cl.
const routeBlock = 64

// routeBlocks returns the number of blocks, at least 1, because sums over no tokens must be set to
// zero.
func routeBlocks(tokens int) int { return max(1, over(tokens, routeBlock)) }

// Route computes the router's distribution and chooses experts; see [xpu.Layers].
func (d *Device) Route(r xpu.Routing, logits xpu.Tensor, uniform bool, stats *xpu.RouterStats) {
	xpu.CheckRoute(r, logits, stats)
	tokens, experts, perToken := logits.Dim(0), logits.Dim(1), r.Chosen.Dim(1)
	blocks := routeBlocks(tokens)
	c := d.begin()
	defer c.end()
	probs, lse, chosen := c.writes(r.Probs), c.writes(r.LSE), c.writes(r.Chosen)
	entropy, sums, counts := c.take(max(1, tokens)), c.take(blocks*(experts+2)), c.take(blocks*experts)
	groups, topGroups := max(1, r.Groups), r.TopGroups
	if groups == 1 {
		topGroups = 1
	}
	c.launch("route", c.rows(tokens), probs, lse, chosen, entropy, c.reads(logits), c.reads(r.Bias), integer(experts),
		integer(perToken), flag(r.Sigmoid), integer(groups), integer(topGroups), flag(r.SumOfTwo), flag(uniform),
		local(experts+groups))
	c.launch("count_choices", c.rows(blocks), counts, chosen, integer(tokens), integer(perToken), integer(experts),
		local(experts))
	c.launch("route_sums", c.rows(blocks), sums, probs, lse, entropy, integer(tokens), integer(experts),
		flag(r.Sigmoid))
	totals := c.result(2*experts+2, func(words []uint32) {
		for e := range experts {
			stats.Probs[e] = float64(math.Float32frombits(words[e]))
			stats.Counts[e] = int64(words[experts+2+e])
		}
		stats.LSE2 = float64(math.Float32frombits(words[experts]))
		stats.Entropy = float64(math.Float32frombits(words[experts+1]))
	})
	c.launch("route_totals", c.rows(experts+2), totals, c.writes(r.Counts), sums, counts, integer(blocks),
		integer(experts))
}

// SortRows orders the choices by expert and, within an expert, by token; see [xpu.Layers].
func (d *Device) SortRows(r xpu.Routing) {
	xpu.CheckSortRows(r)
	tokens, experts, perToken := r.Probs.Dim(0), r.Probs.Dim(1), r.Chosen.Dim(1)
	if tokens == 0 {
		return
	}
	blocks := routeBlocks(tokens)
	c := d.begin()
	defer c.end()
	chosen, first := c.reads(r.Chosen), c.take(blocks*experts)
	c.launch("count_choices", c.rows(blocks), first, chosen, integer(tokens), integer(perToken), integer(experts),
		local(experts))
	c.launch("first_rows", c.rows(experts), first, c.reads(r.Counts), integer(blocks), integer(experts))
	c.launch("sort_rows", c.rows(blocks), c.writes(r.RowOf), c.writes(r.TokenOf), c.writes(r.Weight), chosen,
		c.reads(r.Probs), first,
		integer(tokens), integer(perToken), integer(experts), flag(r.Renormalize), divisorEpsilon(r.RouterKind),
		number(float64(r.LeastSum)), number(float64(r.Factor())), local(experts*routeBlock/32))
}

// divisorEpsilon returns the number that is added to the sum of a token's scores; see
// [xpu.RouterKind].
func divisorEpsilon(k xpu.RouterKind) argument {
	if k.Sigmoid {
		return number(1e-20)
	}
	return number(0)
}

// RouteGrad computes the gradient of the router's logits; see [xpu.Layers]. The softmax precedes
// the choice, so its gradient reaches all experts.
func (d *Device) RouteGrad(r xpu.Routing, dlogits, slope, dweight xpu.Tensor, zFactor float64) {
	xpu.CheckRouteGrad(r, dlogits, slope, dweight, zFactor)
	tokens, experts, perToken := r.Probs.Dim(0), r.Probs.Dim(1), r.Chosen.Dim(1)
	slopeTokens := dlogits.Elements() / slope.Elements() // with the same slopes
	c := d.begin()
	defer c.end()
	c.launch("route_grad", c.rows(tokens), c.writes(dlogits), c.reads(r.Probs), c.reads(r.LSE), c.reads(r.Chosen),
		c.reads(r.RowOf), c.reads(slope), c.reads(dweight), integer(experts), integer(perToken), integer(slopeTokens),
		number(zFactor), flag(r.Renormalize), divisorEpsilon(r.RouterKind), number(float64(r.LeastSum)),
		number(float64(r.Factor())), flag(r.Sigmoid), local(experts))
}
