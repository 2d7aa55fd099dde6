package xpu

import "fmt"

// The functions below are for implementations of [Device]. They panic if the caller of a method
// made a mistake, with a message that names the method and the operand. They compare types and
// shapes; the contents of memory are not checked.

// CheckMatMul panics unless the arguments of [Products.MatMul] are valid.
func CheckMatMul(dst, a, b Tensor) {
	const name = "MatMul"
	checkMatrix(name, "a", a, number(a))
	checkMatrix(name, "b", b, number(b))
	checkMatrix(name, "dst", dst, number(dst))
	checkShape(name, "b", b, number(b), a.shape[1], b.shape[1])
	checkShape(name, "dst", dst, number(dst), a.shape[0], b.shape[1])
	if _, transposed, _ := dst.Stored(); transposed {
		panic("xpu: MatMul: dst is transposed")
	}
}

// checkMatrix panics unless t is a matrix of numbers with contiguous rows or columns.
func checkMatrix(name, operand string, t Tensor, dtype DType) {
	checkRank(name, operand, t, dtype, 2)
	if _, _, ok := t.Stored(); !ok {
		panic(fmt.Sprintf("xpu: %s: neither rows nor columns of %s are contiguous", name, operand))
	}
}

// CheckGroupedMatMul panics unless the arguments of [Products.GroupedMatMul] are valid.
func CheckGroupedMatMul(dst, a, b, counts Tensor) {
	const name = "GroupedMatMul"
	checkRank(name, "counts", counts, Int32, 1)
	checkRank(name, "a", a, number(a), 2)
	checkRank(name, "b", b, number(b), 3)
	groups, terms, columns := counts.shape[0], a.shape[1], b.shape[2]
	if _, transposed, _ := b.Stored(); transposed {
		check(name, "b transposed", b.T(), number(b), groups, columns, terms)
	} else {
		check(name, "b", b, number(b), groups, terms, columns)
	}
	check(name, "a", a, number(a), a.shape[0], terms)
	check(name, "dst", dst, number(dst), a.shape[0], columns)
}

// CheckGroupedWeightGrad panics unless the arguments of [Products.GroupedWeightGrad] are valid.
func CheckGroupedWeightGrad(dst, a, b, counts Tensor) {
	const name = "GroupedWeightGrad"
	checkRank(name, "counts", counts, Int32, 1)
	checkRank(name, "a", a, number(a), 2)
	checkRank(name, "b", b, Float32, 2)
	check(name, "a", a, number(a), a.shape[0], a.shape[1])
	check(name, "b", b, Float32, a.shape[0], b.shape[1])
	check(name, "dst", dst, number(dst), counts.shape[0], a.shape[1], b.shape[1])
}

// CheckCounts panics if a count is negative or the counts do not add up to rows.
func CheckCounts(name string, counts []int32, rows int) {
	sum := 0
	for g, c := range counts {
		if sum += int(c); c < 0 {
			panic(fmt.Sprintf("xpu: %s: group %d has %d rows", name, g, c))
		}
	}
	if sum != rows {
		panic(fmt.Sprintf("xpu: %s: the counts add up to %d, but there are %d rows", name, sum, rows))
	}
}

// CheckCopied panics unless the arguments of [Layers.Copy] are valid.
func CheckCopied(dst, x Tensor) {
	check("Copy", "dst", dst, number(dst), dst.shape[:dst.rank]...)
	check("Copy", "x", x, number(x), dst.shape[:dst.rank]...)
}

// CheckZeroed panics unless the argument of [Layers.Zero] is valid.
func CheckZeroed(x Tensor) { check("Zero", "x", x, number(x), x.shape[:x.rank]...) }

// CheckAdded panics unless the arguments of [Layers.Add] are valid.
func CheckAdded(dst, x, y Tensor) {
	check("Add", "dst", dst, Float32, dst.shape[:dst.rank]...)
	check("Add", "x", x, Float32, dst.shape[:dst.rank]...)
	check("Add", "y", y, Float32, dst.shape[:dst.rank]...)
}

// CheckCombined panics unless the arguments of [Layers.Combine] are valid.
func CheckCombined(dst, x, y Tensor, c float32) {
	const name = "Combine"
	checkRank(name, "dst", dst, Float32, 2)
	check(name, "dst", dst, Float32, dst.shape[:2]...)
	check(name, "x", x, Float32, dst.shape[:2]...)
	if y.Present() {
		check(name, "y", y, Float32, dst.shape[:2]...)
	}
	if c != 0 && dst.shape[0] != dst.shape[1] {
		panic(fmt.Sprintf("xpu: %s: a matrix of shape %v has no diagonal", name, dst.Shape()))
	}
}

// CheckEmbed panics unless the arguments of [Layers.Embed] are valid.
func CheckEmbed(dst, table, ids Tensor) {
	checkRows("Embed", dst, number(dst), table, number(table), ids)
}

// CheckEmbedGrad panics unless the arguments of [Layers.EmbedGrad] are valid.
func CheckEmbedGrad(dtable, dx, ids Tensor) {
	checkRows("EmbedGrad", dx, Float32, dtable, number(dtable), ids)
}

// CheckGatherRows panics unless the arguments of [Layers.GatherRows] are valid.
func CheckGatherRows(dst, x, ids Tensor) { checkRows("GatherRows", dst, Float32, x, Float32, ids) }

// checkRows checks rows, a matrix with a row for each id, and a table that the ids index.
func checkRows(name string, rows Tensor, rowType DType, table Tensor, tableType DType, ids Tensor) {
	checkRank(name, "the ids", ids, Int32, 1)
	checkRank(name, "the table", table, tableType, 2)
	check(name, "the table", table, tableType, table.shape[0], table.shape[1])
	check(name, "the matrix with a row for each id", rows, rowType, ids.shape[0], table.shape[1])
}

// CheckNormalize panics unless the arguments of [Layers.Normalize] are valid.
func CheckNormalize(h, x Tensor, n Norm) {
	n.check("Normalize", x)
	check("Normalize", "h", h, Float32, x.shape[0], x.shape[1])
}

// CheckNormGrad panics unless the arguments of [Layers.NormGrad] are valid.
func CheckNormGrad(dx, dh, x Tensor, n Norm, dweight Tensor) {
	const name = "NormGrad"
	n.check(name, x)
	check(name, "dx", dx, Float32, x.shape[0], x.shape[1])
	check(name, "dh", dh, Float32, x.shape[0], x.shape[1])
	if n.Weight.Present() {
		check(name, "dweight", dweight, number(dweight), x.shape[1])
	}
}

func (n Norm) check(name string, x Tensor) {
	checkRank(name, "x", x, Float32, 2)
	check(name, "x", x, Float32, x.shape[0], x.shape[1])
	check(name, "RStd", n.RStd, Float32, x.shape[0])
	if n.Weight.Present() {
		check(name, "Weight", n.Weight, number(n.Weight), x.shape[1])
	} else {
		check(name, "Mean", n.Mean, Float32, x.shape[0])
	}
}

// check panics unless queries, keys and values have the shape of heads, for queries from position
// first on.
func (h Heads) check(name string, q, k, v Tensor, first int) {
	checkRank(name, "Q", q, Float32, 4)
	checkRank(name, "K", k, Float32, 4)
	if h.Heads < 1 || h.KVHeads < 1 || h.Size < 2 || h.Heads%h.KVHeads != 0 || h.Size%2 != 0 {
		panic(fmt.Sprintf("xpu: %s: %d heads of queries and %d of keys and values, of size %d", name, h.Heads,
			h.KVHeads,
			h.Size))
	}
	if first < 0 || first > h.Capacity-h.Length {
		panic(fmt.Sprintf("xpu: %s: %d positions from %d on exceed the capacity of %d", name, h.Length, first,
			h.Capacity))
	}
	check(name, "Q", q, Float32, h.Rows, h.Heads, h.Length, h.Size)
	check(name, "K", k, Float32, h.Rows, h.KVHeads, h.Capacity, h.Size)
	check(name, "V", v, Float32, h.Rows, h.KVHeads, h.Capacity, h.Size)
}

// checkComplete panics unless the tokens are complete sequences from position 0.
func (h Heads) checkComplete(name string, first int) {
	if first != 0 || h.Capacity != h.Length {
		panic(fmt.Sprintf("xpu: %s: queries start at position %d, and the capacity is %d for %d queries; gradients "+
			"need complete sequences, from position 0", name, first, h.Capacity, h.Length))
	}
}

// CheckSplitHeads panics unless the arguments of [Layers.SplitHeads] are valid.
func CheckSplitHeads(p Projections) { p.check("SplitHeads") }

func (p Projections) check(name string) {
	h := p.Heads()
	h.check(name, p.Q, p.K, p.V, p.First)
	check(name, "QKV", p.QKV, number(p.QKV), h.Tokens(), h.Width())
	q, k := p.Norms()
	if p.QWeight.Present() {
		check(name, "QWeight", p.QWeight, number(p.QWeight), h.Heads*h.Size/q)
		check(name, "RQ", p.RQ, Float32, h.Tokens()*q)
	}
	if p.KWeight.Present() {
		check(name, "KWeight", p.KWeight, number(p.KWeight), h.KVHeads*h.Size/k)
		check(name, "RK", p.RK, Float32, h.Tokens()*k)
	}
	if p.Means.Present() {
		p.checkWide(name)
		check(name, "Means", p.Means, Float32, 2, h.Tokens())
	}
	positions := max(p.First+h.Length, p.Cos.shape[0])
	half := min(p.Turned(), h.Size) / 2
	check(name, "Cos", p.Cos, Float32, positions, half)
	check(name, "Sin", p.Sin, Float32, positions, half)
}

// CheckJoinHeads panics unless the arguments of [Layers.JoinHeads] are valid.
func CheckJoinHeads(p Projections, dqkv, dk, dv, dqWeight, dkWeight Tensor) {
	const name = "JoinHeads"
	p.check(name)
	h := p.Heads()
	h.checkComplete(name, p.First)
	check(name, "dqkv", dqkv, Float32, h.Tokens(), h.Width())
	check(name, "dk", dk, Float32, h.Rows, h.KVHeads, h.Length, h.Size)
	check(name, "dv", dv, Float32, h.Rows, h.KVHeads, h.Length, h.Size)
	if p.QWeight.Present() {
		check(name, "dqWeight", dqWeight, number(dqWeight), p.QWeight.Elements())
	}
	if p.KWeight.Present() {
		check(name, "dkWeight", dkWeight, number(dkWeight), p.KWeight.Elements())
	}
}

// checkWide panics unless the projections have a norm over all queries, and over all keys, of a
// token.
func (p Projections) checkWide(name string) {
	h := p.Heads()
	check(name, "QWeight", p.QWeight, number(p.QWeight), h.Heads*h.Size)
	check(name, "KWeight", p.KWeight, number(p.KWeight), h.KVHeads*h.Size)
}

// CheckSumHeads panics unless the arguments of [Layers.SumHeads] are valid.
func CheckSumHeads(sums Tensor, p Projections, dqkv, dk Tensor) {
	const name = "SumHeads"
	p.check(name)
	p.checkWide(name)
	h := p.Heads()
	h.checkComplete(name, p.First)
	check(name, "sums", sums, Float32, 2, h.Tokens())
	if dqkv.Present() || dk.Present() {
		check(name, "dqkv", dqkv, Float32, h.Tokens(), h.Width())
		check(name, "dk", dk, Float32, h.Rows, h.KVHeads, h.Length, h.Size)
	}
}

// CheckAttend panics unless the arguments of [Layers.Attend] are valid.
func CheckAttend(a Attention) { a.check("Attend") }

func (a Attention) check(name string) {
	h := a.Heads()
	h.check(name, a.Q, a.K, a.V, a.First)
	check(name, "Context", a.Context, number(a.Context), h.Tokens(), h.Heads*h.Size)
	check(name, "LSE", a.LSE, Float32, h.Rows, h.Heads, h.Length)
	if a.Begin.Present() {
		check(name, "Begin", a.Begin, Int32, h.Rows, h.Length)
	}
}

// CheckAttendGrad panics unless the arguments of [Layers.AttendGrad] are valid.
func CheckAttendGrad(a Attention, dcontext, dqkv, dk, dv Tensor) {
	const name = "AttendGrad"
	a.check(name)
	h := a.Heads()
	check(name, "dcontext", dcontext, Float32, h.Tokens(), h.Heads*h.Size)
	if width := h.Heads * h.Size; dqkv.Rank() == 2 && dqkv.shape[1] == width {
		check(name, "dqkv", dqkv, Float32, h.Tokens(), width)
	} else {
		check(name, "dqkv", dqkv, Float32, h.Tokens(), h.Width())
	}
	check(name, "dk", dk, Float32, h.Rows, h.KVHeads, h.Capacity, h.Size)
	check(name, "dv", dv, Float32, h.Rows, h.KVHeads, h.Capacity, h.Size)
}

// CheckAddSinks panics unless the arguments of [Layers.AddSinks] are valid.
func CheckAddSinks(a Attention, sinks Tensor) {
	const name = "AddSinks"
	a.check(name)
	check(name, "sinks", sinks, number(sinks), a.Heads().Heads)
}

// CheckSinksGrad panics unless the arguments of [Layers.SinksGrad] are valid.
func CheckSinksGrad(a Attention, sinks, dcontext, dsinks Tensor) {
	const name = "SinksGrad"
	a.check(name)
	h := a.Heads()
	check(name, "sinks", sinks, number(sinks), h.Heads)
	check(name, "dcontext", dcontext, Float32, h.Tokens(), h.Heads*h.Size)
	check(name, "dsinks", dsinks, number(dsinks), h.Heads)
}

// CheckSplitLatent panics unless the arguments of [Layers.SplitLatent] are valid.
func CheckSplitLatent(l LatentHeads) { l.check("SplitLatent") }

func (l LatentHeads) check(name string) {
	s := l.Sizes()
	s.check(name, l.Q, l.K, l.V, l.First)
	if s.KVHeads != s.Heads.Heads || s.Plain < 0 || s.Values < 1 || s.Turned < 2 ||
		s.Size < max(s.Plain+s.Turned, s.Values) {
		panic(fmt.Sprintf("xpu: %s: %d and %d heads of %d with %d plain and %d rotated elements, values of %d", name,
			s.Heads.Heads, s.KVHeads, s.Size, s.Plain, s.Turned, s.Values))
	}
	check(name, "Queries", l.Queries, Float32, s.Tokens(), s.Heads.Heads*(s.Plain+s.Turned))
	check(name, "KeysValues", l.KeysValues, Float32, s.Tokens(), s.Heads.Heads*(s.Plain+s.Values))
	check(name, "Rotated", l.Rotated, Float32, s.Tokens(), s.Turned)
	positions := max(l.First+s.Length, l.Cos.shape[0])
	check(name, "Cos", l.Cos, Float32, positions, s.Turned/2)
	check(name, "Sin", l.Sin, Float32, positions, s.Turned/2)
}

// CheckJoinLatent panics unless the arguments of [Layers.JoinLatent] are valid.
func CheckJoinLatent(l LatentHeads, dq, dk, dv Tensor) {
	const name = "JoinLatent"
	l.check(name)
	h := l.Sizes().Heads
	h.checkComplete(name, l.First)
	check(name, "dq", dq, Float32, h.Tokens(), h.Heads*h.Size)
	check(name, "dk", dk, Float32, h.Rows, h.KVHeads, h.Length, h.Size)
	check(name, "dv", dv, Float32, h.Rows, h.KVHeads, h.Length, h.Size)
}

// CheckJitter panics unless the arguments of [Layers.Jitter] are valid.
func CheckJitter(x Tensor, j Jitter) {
	const name = "Jitter"
	checkRank(name, "x", x, Float32, 2)
	check(name, "x", x, Float32, x.shape[0], x.shape[1])
	check(name, "Numbers", j.Numbers, Int32, x.shape[0])
}

// CheckCopyColumns panics unless the arguments of [Layers.CopyColumns] are valid.
func CheckCopyColumns(dst, x Tensor) {
	const name = "CopyColumns"
	checkRank(name, "dst", dst, Float32, 2)
	checkRank(name, "x", x, Float32, 2)
	for _, o := range []struct {
		operand string
		t       Tensor
	}{{"dst", dst}, {"x", x}} {
		checkShape(name, o.operand, o.t, Float32, dst.shape[0], max(1, o.t.shape[1]))
		if o.t.strides[1] != 1 || o.t.strides[0] < o.t.shape[1] {
			panic(fmt.Sprintf("xpu: %s: the rows of %s of shape %v are not contiguous", name, o.operand, o.t.Shape()))
		}
	}
}

// check panics unless r has the distribution and the choices of tokens, and returns their numbers.
func (r Routing) check(name string) (tokens, experts, perToken int) {
	checkRank(name, "Probs", r.Probs, Float32, 2)
	checkRank(name, "Chosen", r.Chosen, Int32, 2)
	tokens, experts, perToken = r.Probs.shape[0], r.Probs.shape[1], r.Chosen.shape[1]
	if experts < 1 || perToken < 1 || perToken > experts {
		panic(fmt.Sprintf("xpu: %s: %d of %d experts for each token", name, perToken, experts))
	}
	check(name, "Probs", r.Probs, Float32, tokens, experts)
	check(name, "Chosen", r.Chosen, Int32, tokens, perToken)
	r.RouterKind.check(name, experts, perToken)
	return tokens, experts, perToken
}

func (k RouterKind) check(name string, experts, perToken int) {
	if k.Bias.Present() {
		check(name, "Bias", k.Bias, Float32, experts)
	}
	if k.Groups <= 1 {
		return
	}
	size := experts / k.Groups
	if experts%k.Groups != 0 || k.TopGroups < 1 || k.TopGroups > k.Groups || k.TopGroups*size < perToken ||
		k.SumOfTwo && size < 2 {
		panic(fmt.Sprintf("xpu: %s: %d of %d experts in %d of %d groups for each token", name, perToken, experts,
			k.TopGroups, k.Groups))
	}
}

// CheckRoute panics unless the arguments of [Layers.Route] are valid.
func CheckRoute(r Routing, logits Tensor, stats *RouterStats) {
	const name = "Route"
	tokens, experts, _ := r.check(name)
	check(name, "logits", logits, Float32, tokens, experts)
	check(name, "LSE", r.LSE, Float32, tokens)
	check(name, "Counts", r.Counts, Int32, experts)
	need(name, "the statistics' Probs", len(stats.Probs), experts)
	need(name, "the statistics' Counts", len(stats.Counts), experts)
}

// CheckSortRows panics unless the arguments of [Layers.SortRows] are valid.
func CheckSortRows(r Routing) {
	const name = "SortRows"
	tokens, experts, perToken := r.check(name)
	check(name, "Counts", r.Counts, Int32, experts)
	check(name, "RowOf", r.RowOf, Int32, tokens, perToken)
	check(name, "TokenOf", r.TokenOf, Int32, tokens*perToken)
	check(name, "Weight", r.Weight, Float32, tokens*perToken)
}

// CheckRouteGrad panics unless the arguments of [Layers.RouteGrad] are valid.
func CheckRouteGrad(r Routing, dlogits, slope, dweight Tensor, zFactor float64) {
	const name = "RouteGrad"
	tokens, experts, perToken := r.check(name)
	check(name, "LSE", r.LSE, Float32, tokens)
	check(name, "RowOf", r.RowOf, Int32, tokens, perToken)
	check(name, "dlogits", dlogits, Float32, tokens, experts)
	if slope.Rank() == 2 {
		check(name, "slope", slope, Float32, slope.shape[0], experts)
		if n := slope.shape[0]; n < 1 || tokens%n != 0 {
			panic(fmt.Sprintf("xpu: RouteGrad: slope has %d rows, which do not divide %d tokens", n, tokens))
		}
	} else {
		check(name, "slope", slope, Float32, experts)
	}
	check(name, "dweight", dweight, Float32, tokens*perToken)
	if r.Sigmoid && zFactor != 0 {
		panic(fmt.Sprintf("xpu: RouteGrad: the factor of the z-loss is %v with a sigmoid", zFactor))
	}
}

// CheckSumRows panics unless the arguments of [Layers.SumRows] are valid.
func CheckSumRows(dst, x, y, rowOf Tensor) {
	const name = "SumRows"
	checkRank(name, "rowOf", rowOf, Int32, 2)
	checkRank(name, "y", y, Float32, 2)
	if rowOf.shape[1] < 1 {
		panic("xpu: SumRows: tokens have no rows")
	}
	check(name, "rowOf", rowOf, Int32, rowOf.shape[0], rowOf.shape[1])
	check(name, "y", y, Float32, y.shape[0], y.shape[1])
	check(name, "dst", dst, Float32, rowOf.shape[0], y.shape[1])
	if x.Present() {
		check(name, "x", x, Float32, rowOf.shape[0], y.shape[1])
	}
}

// CheckSwiGLU panics unless the arguments of [Layers.SwiGLU] are valid.
func CheckSwiGLU(act, gateUp, weight Tensor) { checkSwiGLU("SwiGLU", act, gateUp, weight) }

// CheckClampedSwiGLU panics unless the tensors of [Layers.ClampedSwiGLU] are valid.
func CheckClampedSwiGLU(act, gateUp, weight Tensor) {
	checkSwiGLU("ClampedSwiGLU", act, gateUp, weight)
}

func checkSwiGLU(name string, act, gateUp, weight Tensor) {
	checkRank(name, "act", act, Float32, 2)
	rows, width := act.shape[0], act.shape[1]
	check(name, "act", act, Float32, rows, width)
	check(name, "gateUp", gateUp, number(gateUp), rows, 2*width)
	if weight.Present() {
		check(name, "weight", weight, Float32, rows)
	}
}

// CheckSwiGLUGrad panics unless the arguments of [Layers.SwiGLUGrad] are valid.
func CheckSwiGLUGrad(gateUp, act, dact, weight, dweight Tensor) {
	checkSwiGLUGrad("SwiGLUGrad", gateUp, act, dact, weight, dweight)
}

// CheckClampedSwiGLUGrad panics unless the tensors of [Layers.ClampedSwiGLUGrad] are valid.
func CheckClampedSwiGLUGrad(gateUp, act, dact, weight, dweight Tensor) {
	checkSwiGLUGrad("ClampedSwiGLUGrad", gateUp, act, dact, weight, dweight)
}

func checkSwiGLUGrad(name string, gateUp, act, dact, weight, dweight Tensor) {
	checkSwiGLU(name, act, gateUp, weight)
	check(name, "dact", dact, Float32, act.shape[0], act.shape[1])
	if weight.Present() {
		check(name, "dweight", dweight, Float32, act.shape[0])
	}
}

// CheckGroupedBias panics unless the arguments of [Layers.GroupedBias] are valid.
func CheckGroupedBias(x, bias, weight, counts Tensor) {
	const name = "GroupedBias"
	checkRank(name, "counts", counts, Int32, 1)
	checkRank(name, "x", x, number(x), 2)
	check(name, "counts", counts, Int32, counts.shape[0])
	check(name, "x", x, number(x), x.shape[0], x.shape[1])
	check(name, "bias", bias, number(bias), counts.shape[0], x.shape[1])
	if weight.Present() {
		check(name, "weight", weight, Float32, x.shape[0])
	}
}

// CheckGroupedBiasGrad panics unless the arguments of [Layers.GroupedBiasGrad] are valid.
func CheckGroupedBiasGrad(dbias, dy, bias, weight, dweight, counts Tensor) {
	const name = "GroupedBiasGrad"
	checkRank(name, "counts", counts, Int32, 1)
	checkRank(name, "dy", dy, number(dy), 2)
	check(name, "counts", counts, Int32, counts.shape[0])
	check(name, "dy", dy, number(dy), dy.shape[0], dy.shape[1])
	check(name, "dbias", dbias, number(dbias), counts.shape[0], dy.shape[1])
	if weight.Present() {
		check(name, "weight", weight, Float32, dy.shape[0])
		check(name, "dweight", dweight, Float32, dy.shape[0])
		check(name, "bias", bias, number(bias), counts.shape[0], dy.shape[1])
	}
}

// CheckCrossEntropy panics unless the argument of [Layers.CrossEntropy] is valid.
func CheckCrossEntropy(c CrossEntropy) {
	const name = "CrossEntropy"
	checkRank(name, "Logits", c.Logits, Float32, 2)
	check(name, "Logits", c.Logits, Float32, c.Logits.shape[0], c.Logits.shape[1])
	check(name, "Targets", c.Targets, Int32, c.Logits.shape[0])
	need(name, "Loss", len(c.Loss), c.Logits.shape[0])
}

// CheckBlocks panics unless the arguments of [Layers.SumSquares] or [Layers.Checksums] are valid,
// and returns the number of blocks. results is the number of host results.
func CheckBlocks(name string, stretches []Tensor, results int) (blocks int) {
	for _, x := range stretches {
		check(name, "a stretch", x, number(x), x.shape[:x.rank]...)
	}
	blocks = Blocks(stretches)
	need(name, "sums", results, blocks)
	return blocks
}

// CheckUpdate panics unless the arguments of [Layers.Update] are valid, and returns the number of
// blocks.
func CheckUpdate(u Update, stretches []Moments, before, change []float64) (blocks int) {
	const name = "Update"
	for _, s := range stretches {
		shape := s.Weight.shape[:s.Weight.rank]
		check(name, "Weight", s.Weight, Float32, shape...)
		grad := number(s.Grad)
		if u.ReplacesGrad {
			grad = Float32
		}
		check(name, "Grad", s.Grad, grad, shape...)
		check(name, "M", s.M, number(s.M), shape...)
		if u.States > 1 {
			check(name, "V", s.V, number(s.V), shape...)
		}
		blocks += (s.Weight.Elements() + BlockSize - 1) / BlockSize
	}
	if len(before) > 0 || len(change) > 0 {
		need(name, "before", len(before), blocks)
		need(name, "change", len(change), blocks)
	}
	return blocks
}

// CheckCopy panics unless the arguments of [Memory.Write] or [Memory.Read], or of their forms for
// whole numbers, are valid. n is the number of elements on the host.
func CheckCopy(name string, t Tensor, dtype DType, n int) {
	if t.Present() || n > 0 {
		check(name, "the tensor", t, dtype, t.shape[:t.rank]...)
	}
	if t.Elements() != n {
		panic(fmt.Sprintf("xpu: %s: the tensor of shape %v has %d elements, and the host %d", name, t.Shape(),
			t.Elements(), n))
	}
}

// number returns the type of an operand that may be BFloat16, and Float32 for all other types.
func number(t Tensor) DType {
	if t.dtype == BFloat16 {
		return BFloat16
	}
	return Float32
}

// check panics unless an operand has the given type and shape, without gaps.
func check(name, operand string, t Tensor, dtype DType, shape ...int) {
	checkShape(name, operand, t, dtype, shape...)
	if !t.Contiguous() {
		panic(fmt.Sprintf("xpu: %s: %s of shape %v has gaps or is transposed", name, operand, t.Shape()))
	}
}

// checkShape panics unless an operand has the given type and shape.
func checkShape(name, operand string, t Tensor, dtype DType, shape ...int) {
	checkRank(name, operand, t, dtype, len(shape))
	for i, n := range shape {
		if t.shape[i] != n {
			panic(fmt.Sprintf("xpu: %s: %s has the shape %v; want %v", name, operand, t.Shape(),
				append([]int(nil), shape...)))
		}
	}
}

// checkRank panics unless an operand has the given type and number of dimensions.
func checkRank(name, operand string, t Tensor, dtype DType, rank int) {
	if t.dtype != dtype || int(t.rank) != rank || rank == 0 {
		panic(fmt.Sprintf("xpu: %s: %s is %s of shape %v; want %s with %d dimensions", name, operand, t.dtype,
			t.Shape(),
			dtype, rank))
	}
}

// need panics if the space is too small for all host results.
func need(name, operand string, have, want int) {
	if have < want {
		panic(fmt.Sprintf("xpu: %s: %s has space for %d results, but there are %d", name, operand, have, want))
	}
}
