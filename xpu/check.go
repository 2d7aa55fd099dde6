package xpu

import "fmt"

// The functions below are for implementations of [Device]. They panic if the caller of a method
// made a mistake, with a message that names the method and the operand.

// CheckMatMul panics unless the arguments of [Products.MatMul] are valid.
func CheckMatMul(dst, a, b Tensor) {
	const name = "MatMul"
	checkMatrix(name, "a", a)
	checkMatrix(name, "b", b)
	checkMatrix(name, "dst", dst)
	CheckShape(name, "b", b, Float32, a.shape[1], b.shape[1])
	CheckShape(name, "dst", dst, Float32, a.shape[0], b.shape[1])
	if _, transposed, _ := dst.Stored(); transposed {
		panic("xpu: MatMul: dst is transposed")
	}
}

// CheckGroupedMatMul panics unless the arguments of [Products.GroupedMatMul] are valid. It does not
// check the contents of counts.
func CheckGroupedMatMul(dst, a, b, counts Tensor) {
	const name = "GroupedMatMul"
	stack := b
	if b.rank == 3 {
		if _, transposed, _ := b.Stored(); transposed {
			stack = b.T()
		}
	}
	groups := checkGroups(name, counts)
	checkDense(name, "a", a, 2)
	checkDense(name, "b", stack, 3)
	checkDense(name, "dst", dst, 2)
	CheckShape(name, "b", b, Float32, groups, a.shape[1], b.shape[2])
	CheckShape(name, "dst", dst, Float32, a.shape[0], b.shape[2])
}

// CheckGroupedWeightGrad panics unless the arguments of [Products.GroupedWeightGrad] are valid. It
// does not check the contents of counts.
func CheckGroupedWeightGrad(dst, a, b, counts Tensor) {
	const name = "GroupedWeightGrad"
	groups := checkGroups(name, counts)
	checkDense(name, "a", a, 2)
	checkDense(name, "b", b, 2)
	checkDense(name, "dst", dst, 3)
	CheckShape(name, "b", b, Float32, a.shape[0], b.shape[1])
	CheckShape(name, "dst", dst, Float32, groups, a.shape[1], b.shape[1])
}

// CheckShape panics unless an operand has the given type and shape.
func CheckShape(name, operand string, t Tensor, dtype DType, shape ...int) {
	ok := t.dtype == dtype && int(t.rank) == len(shape)
	for i := 0; ok && i < len(shape); i++ {
		ok = t.shape[i] == shape[i]
	}
	if !ok {
		panic(fmt.Sprintf("xpu: %s: %s is %s of shape %v; want %s of shape %v", name, operand, t.dtype, t.Shape(),
			dtype,
			append([]int(nil), shape...)))
	}
}

// checkMatrix panics unless t is a matrix of numbers with contiguous rows or columns.
func checkMatrix(name, operand string, t Tensor) {
	ok := t.rank == 2 && t.dtype == Float32
	if ok {
		_, _, ok = t.Stored()
	}
	if !ok {
		panic(fmt.Sprintf("xpu: %s: %s is %s of shape %v; want a matrix of fp32", name, operand, t.dtype, t.Shape()))
	}
}

// checkDense panics unless t is a contiguous tensor of numbers with the given rank.
func checkDense(name, operand string, t Tensor, rank int) {
	if int(t.rank) != rank || t.dtype != Float32 || !t.Contiguous() {
		panic(fmt.Sprintf("xpu: %s: %s is %s of shape %v; want %d dimensions of fp32 without gaps", name, operand,
			t.dtype, t.Shape(), rank))
	}
}

// checkGroups panics unless counts is a list of counts, and returns their number.
func checkGroups(name string, counts Tensor) (groups int) {
	if counts.rank != 1 || counts.dtype != Int32 || !counts.Contiguous() {
		panic(fmt.Sprintf("xpu: %s: counts is %s of shape %v; want one dimension of int32", name, counts.dtype,
			counts.Shape()))
	}
	return counts.shape[0]
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

// CheckRows panics unless the arguments of [Layers.Embed], [Layers.EmbedGrad] or
// [Layers.GatherRows] are valid. rows is the method's dst or dx, with one row for each id. It does
// not check the ids.
func CheckRows(name string, rows []float32, ids []int32, width int) {
	positive(name, "width", width)
	need(name, "the matrix with a row for each id", len(rows), len(ids)*width)
}

// CheckNormalize panics unless the arguments of [Layers.Normalize] are valid, and returns the
// number of tokens.
func CheckNormalize(h, x []float32, n Norm) (tokens int) {
	tokens = n.check("Normalize", x)
	need("Normalize", "h", len(h), len(x))
	return tokens
}

// CheckNormGrad panics unless the arguments of [Layers.NormGrad] are valid, and returns the number
// of tokens.
func CheckNormGrad(dx, dh, x []float32, n Norm, dweight []float32) (tokens int) {
	tokens = n.check("NormGrad", x)
	need("NormGrad", "dx", len(dx), len(x))
	need("NormGrad", "dh", len(dh), len(x))
	if len(n.Weight) > 0 {
		need("NormGrad", "dweight", len(dweight), n.Width)
	}
	return tokens
}

// check panics unless n fits the rows of x, and returns their number.
func (n Norm) check(name string, x []float32) (tokens int) {
	positive(name, "Width", n.Width)
	if tokens = len(x) / n.Width; len(x)%n.Width != 0 {
		panic(fmt.Sprintf("xpu: %s: %d elements are not rows of %d", name, len(x), n.Width))
	}
	need(name, "RStd", len(n.RStd), tokens)
	if len(n.Weight) > 0 {
		need(name, "Weight", len(n.Weight), n.Width)
	} else {
		need(name, "Mean", len(n.Mean), tokens)
	}
	return tokens
}

// check panics unless h is a valid shape of an attention over the keys up to position first +
// Length, with capacity for that many positions.
func (h Heads) check(name string, first, capacity int) {
	if h.Rows < 0 || h.Length < 0 || h.Heads < 1 || h.KVHeads < 1 || h.Size < 2 || h.Heads%h.KVHeads != 0 ||
		h.Size%2 != 0 {
		panic(fmt.Sprintf("xpu: %s: %d rows of %d tokens with %d heads of queries and %d of keys and values, of "+
			"size %d", name, h.Rows, h.Length, h.Heads, h.KVHeads, h.Size))
	}
	if first < 0 || first > capacity-h.Length {
		panic(fmt.Sprintf("xpu: %s: %d positions from %d on exceed the capacity of %d", name, h.Length, first,
			capacity))
	}
}

// CheckSplitHeads panics unless the arguments of [Layers.SplitHeads] are valid.
func CheckSplitHeads(p Projections) {
	p.check("SplitHeads", p.First, p.Capacity)
	tokens := p.Rows * p.Length
	p.checkProjections("SplitHeads")
	need("SplitHeads", "Q", len(p.Q), tokens*p.Heads.Heads*p.Size)
	need("SplitHeads", "K", len(p.K), p.Rows*p.KVHeads*p.Capacity*p.Size)
	need("SplitHeads", "V", len(p.V), p.Rows*p.KVHeads*p.Capacity*p.Size)
}

func (p Projections) checkProjections(name string) {
	tokens := p.Rows * p.Length
	need(name, "QKV", len(p.QKV), tokens*p.Width())
	if len(p.QWeight) > 0 {
		need(name, "QWeight", len(p.QWeight), p.Heads.Heads*p.Size)
		need(name, "RQ", len(p.RQ), tokens)
	}
	if len(p.KWeight) > 0 {
		need(name, "KWeight", len(p.KWeight), p.KVHeads*p.Size)
		need(name, "RK", len(p.RK), tokens)
	}
	if tokens > 0 {
		need(name, "Cos", len(p.Cos), (p.First+p.Length)*p.Size/2)
		need(name, "Sin", len(p.Sin), (p.First+p.Length)*p.Size/2)
	}
}

// CheckJoinHeads panics unless the arguments of [Layers.JoinHeads] are valid.
func CheckJoinHeads(p Projections, dqkv, dk, dv, dqWeight, dkWeight []float32) {
	p.check("JoinHeads", p.First, p.First+p.Length)
	if p.First != 0 {
		panic(fmt.Sprintf("xpu: JoinHeads: queries start at position %d; gradients need complete sequences, from "+
			"position 0",
			p.First))
	}
	tokens := p.Rows * p.Length
	p.checkProjections("JoinHeads")
	need("JoinHeads", "dqkv", len(dqkv), tokens*p.Width())
	need("JoinHeads", "dk", len(dk), tokens*p.KVHeads*p.Size)
	need("JoinHeads", "dv", len(dv), tokens*p.KVHeads*p.Size)
	if len(p.QWeight) > 0 {
		need("JoinHeads", "dqWeight", len(dqWeight), p.Heads.Heads*p.Size)
	}
	if len(p.KWeight) > 0 {
		need("JoinHeads", "dkWeight", len(dkWeight), p.KVHeads*p.Size)
	}
}

// CheckAttend panics unless the arguments of [Layers.Attend] are valid.
func CheckAttend(a Attention) { a.checkAttention("Attend") }

func (a Attention) checkAttention(name string) {
	a.check(name, a.First, a.Capacity)
	queries := a.Rows * a.Length * a.Heads.Heads
	need(name, "Q", len(a.Q), queries*a.Size)
	need(name, "K", len(a.K), a.Rows*a.KVHeads*a.Capacity*a.Size)
	need(name, "V", len(a.V), a.Rows*a.KVHeads*a.Capacity*a.Size)
	need(name, "Context", len(a.Context), queries*a.Size)
	need(name, "LSE", len(a.LSE), queries)
	if len(a.Begin) > 0 {
		need(name, "Begin", len(a.Begin), a.Rows*a.Length)
	}
}

// CheckAttendGrad panics unless the arguments of [Layers.AttendGrad] are valid.
func CheckAttendGrad(a Attention, dcontext, dqkv, dk, dv []float32) {
	a.checkAttention("AttendGrad")
	if a.First != 0 || a.Capacity != a.Length {
		panic(fmt.Sprintf("xpu: AttendGrad: queries start at position %d, and the capacity is %d for %d queries; "+
			"gradients need complete sequences, from position 0",
			a.First, a.Capacity, a.Length))
	}
	tokens := a.Rows * a.Length
	need("AttendGrad", "dcontext", len(dcontext), tokens*a.Heads.Heads*a.Size)
	need("AttendGrad", "dqkv", len(dqkv), tokens*a.Width())
	need("AttendGrad", "dk", len(dk), tokens*a.KVHeads*a.Size)
	need("AttendGrad", "dv", len(dv), tokens*a.KVHeads*a.Size)
}

// check panics unless r can hold the choices of the given number of tokens.
func (r Routing) check(name string, tokens int) {
	if r.Experts < 1 || r.PerToken < 1 || r.PerToken > r.Experts {
		panic(fmt.Sprintf("xpu: %s: %d of %d experts for each token", name, r.PerToken, r.Experts))
	}
	need(name, "Probs", len(r.Probs), tokens*r.Experts)
	need(name, "Chosen", len(r.Chosen), tokens*r.PerToken)
}

// CheckRoute panics unless the arguments of [Layers.Route] are valid, and returns the number of
// tokens.
func CheckRoute(r Routing, logits []float32, stats *RouterStats) (tokens int) {
	tokens = len(r.LSE)
	r.check("Route", tokens)
	need("Route", "logits", len(logits), tokens*r.Experts)
	need("Route", "Counts", len(r.Counts), r.Experts)
	need("Route", "the statistics' Probs", len(stats.Probs), r.Experts)
	need("Route", "the statistics' Counts", len(stats.Counts), r.Experts)
	return tokens
}

// CheckSortRows panics unless the arguments of [Layers.SortRows] are valid, and returns the number
// of tokens.
func CheckSortRows(r Routing) (tokens int) {
	positive("SortRows", "the number of experts of a token", r.PerToken)
	rows := len(r.Chosen)
	tokens = rows / r.PerToken
	r.check("SortRows", tokens)
	need("SortRows", "Counts", len(r.Counts), r.Experts)
	need("SortRows", "RowOf", len(r.RowOf), rows)
	need("SortRows", "TokenOf", len(r.TokenOf), rows)
	need("SortRows", "Weight", len(r.Weight), rows)
	return tokens
}

// CheckRouteGrad panics unless the arguments of [Layers.RouteGrad] are valid, and returns the
// number of tokens. It does not check the contents of RowOf.
func CheckRouteGrad(r Routing, dlogits, slope, dweight []float32) (tokens int) {
	tokens = len(r.LSE)
	r.check("RouteGrad", tokens)
	need("RouteGrad", "RowOf", len(r.RowOf), tokens*r.PerToken)
	need("RouteGrad", "dlogits", len(dlogits), tokens*r.Experts)
	need("RouteGrad", "slope", len(slope), r.Experts)
	need("RouteGrad", "dweight", len(dweight), tokens*r.PerToken)
	return tokens
}

// CheckSumRows panics unless the arguments of [Layers.SumRows] are valid, and returns the number of
// tokens. It does not check the contents of rowOf.
func CheckSumRows(dst, x []float32, rowOf []int32, perToken, width int) (tokens int) {
	positive("SumRows", "the number of rows of a token", perToken)
	positive("SumRows", "width", width)
	if tokens = len(rowOf) / perToken; len(rowOf)%perToken != 0 {
		panic(fmt.Sprintf("xpu: SumRows: %d rows are not a multiple of %d rows per token", len(rowOf), perToken))
	}
	need("SumRows", "dst", len(dst), tokens*width)
	if len(x) > 0 {
		need("SumRows", "x", len(x), tokens*width)
	}
	return tokens
}

// CheckSwiGLU panics unless the arguments of [Layers.SwiGLU] are valid, and returns the number of
// rows.
func CheckSwiGLU(act, gateUp, weight []float32, width int) (rows int) {
	return checkSwiGLU("SwiGLU", act, gateUp, weight, width)
}

func checkSwiGLU(name string, act, gateUp, weight []float32, width int) (rows int) {
	positive(name, "width", width)
	if rows = len(act) / width; len(act)%width != 0 {
		panic(fmt.Sprintf("xpu: %s: %d elements are not rows of %d", name, len(act), width))
	}
	need(name, "gateUp", len(gateUp), 2*len(act))
	if len(weight) > 0 {
		need(name, "weight", len(weight), rows)
	}
	return rows
}

// CheckSwiGLUGrad panics unless the arguments of [Layers.SwiGLUGrad] are valid, and returns the
// number of rows.
func CheckSwiGLUGrad(gateUp, act, dact, weight, dweight []float32, width int) (rows int) {
	rows = checkSwiGLU("SwiGLUGrad", act, gateUp, weight, width)
	need("SwiGLUGrad", "dact", len(dact), len(act))
	if len(weight) > 0 {
		need("SwiGLUGrad", "dweight", len(dweight), rows)
	}
	return rows
}

// CheckCrossEntropy panics unless the argument of [Layers.CrossEntropy] is valid, and returns the
// number of targets. It does not check the contents of Targets.
func CheckCrossEntropy(c CrossEntropy) (targets int) {
	positive("CrossEntropy", "width", c.Width)
	targets = len(c.Targets)
	need("CrossEntropy", "Logits", len(c.Logits), targets*c.Width)
	need("CrossEntropy", "Loss", len(c.Loss), targets)
	return targets
}

// CheckSumSquares panics unless the arguments of [Layers.SumSquares] are valid, and returns the
// number of blocks.
func CheckSumSquares(stretches [][]float32, sums []float64) (blocks int) {
	blocks = Blocks(stretches)
	need("SumSquares", "sums", len(sums), blocks)
	return blocks
}

// CheckChecksums panics unless the arguments of [Layers.Checksums] are valid, and returns the
// number of blocks.
func CheckChecksums(stretches [][]float32, sums []uint64) (blocks int) {
	blocks = Blocks(stretches)
	need("Checksums", "sums", len(sums), blocks)
	return blocks
}

// CheckUpdate panics unless the arguments of [Layers.Update] are valid, and returns the number of
// blocks.
func CheckUpdate(u Update, stretches []Moments, before, change []float64) (blocks int) {
	for i, s := range stretches {
		n := len(s.Weight)
		second := n
		if u.States == 1 {
			second = 0
		}
		if len(s.Grad) != n || len(s.M) != n || len(s.V) != second {
			panic(fmt.Sprintf("xpu: Update: stretch %d has %d weights, %d gradients, and %d and %d elements of "+
				"state, for %s",
				i, n, len(s.Grad), len(s.M), len(s.V), u.Rule))
		}
		blocks += (len(s.Weight) + BlockSize - 1) / BlockSize
	}
	if len(before) > 0 || len(change) > 0 {
		need("Update", "before", len(before), blocks)
		need("Update", "change", len(change), blocks)
	}
	return blocks
}

// CheckElements panics unless all operands of [Layers.Copy] or [Layers.Add] have the result's
// length.
func CheckElements(name string, dst []float32, operands ...[]float32) {
	for _, x := range operands {
		if len(x) != len(dst) {
			panic(fmt.Sprintf("xpu: %s: operands of %d and %d elements", name, len(dst), len(x)))
		}
	}
}

// positive panics unless a size is positive.
func positive(name, what string, size int) {
	if size < 1 {
		panic(fmt.Sprintf("xpu: %s: %s is %d", name, what, size))
	}
}

// need panics if an operand has fewer elements than the sizes require.
func need(name, operand string, have, want int) {
	if have < want {
		panic(fmt.Sprintf("xpu: %s: %s has %d elements, but the sizes require %d", name, operand, have, want))
	}
}
