package devicetest

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"mula/xpu"
)

// mistakesFamily runs each command with valid operands, and then with one dimension of one operand
// larger by one, with one operand that has gaps, and with too little space for host results: the
// command must panic and write nothing.
func mistakesFamily(t *testing.T, d xpu.Device, _ float64) {
	const rows, length, heads, kv, size, experts, perToken, inner, vocabulary, capacity, first = 2, 3, 2, 1, 4, 3, 2, 5,
		7, 9, 4
	const tokens, width, pairs, projections = rows * length, heads * size, rows * length * perToken,
		(heads + 2*kv) * size
	var o xpu.MatMulOptions
	type operands struct {
		x    []xpu.Tensor
		host [][]float64
	}
	norm := func(x []xpu.Tensor) xpu.Norm { return xpu.Norm{Epsilon: 1e-5, RStd: x[0], Weight: x[1]} }
	layerNorm := func(x []xpu.Tensor) xpu.Norm { return xpu.Norm{Epsilon: 1e-5, RStd: x[0], Mean: x[1]} }
	split := func(x []xpu.Tensor, first int) xpu.Projections {
		return xpu.Projections{QKV: x[0], QWeight: x[1], KWeight: x[2], RQ: x[3], RK: x[4], Cos: x[5], Sin: x[6],
			Q: x[7],
			K: x[8], V: x[9], First: first}
	}
	latent := func(x []xpu.Tensor, first int) xpu.LatentHeads {
		return xpu.LatentHeads{Queries: x[0], KeysValues: x[1], Rotated: x[2], Cos: x[3], Sin: x[4], Q: x[5], K: x[6],
			V: x[7], Scale: 1, First: first}
	}
	attention := func(x []xpu.Tensor, first int) xpu.Attention {
		return xpu.Attention{Q: x[0], K: x[1], V: x[2], Context: x[3], LSE: x[4], Begin: x[5], First: first}
	}
	withSinks := func(x []xpu.Tensor) xpu.Attention {
		return xpu.Attention{Q: x[0], K: x[1], V: x[2], Context: x[3], LSE: x[4]}
	}
	q, keys, own := []int{rows, heads, length, size}, []int{rows, kv, -capacity, size}, []int{rows, kv, length, size}
	lse, begin := []int{rows, heads, length}, []int{rows, length}
	for _, c := range []struct {
		name   string
		floats [][]int // shapes of operands; a dimension is negative if the command accepts any
		ints   [][]int // shapes of operands after them
		host   []int
		run    func(o operands)
		wrong  bool // the sizes are invalid
	}{
		{name: "MatMul", floats: [][]int{{3, 4}, {3, 5}, {5, 4}},
			run: func(p operands) { d.MatMul(p.x[0], p.x[1], p.x[2], o) }},
		{name: "MatMul", floats: [][]int{{4, 3}, {3, 5}, {5, 4}}, wrong: true,
			run: func(p operands) { d.MatMul(p.x[0].T(), p.x[1], p.x[2], o) }},
		{name: "GroupedMatMul", floats: [][]int{{3, 4}, {3, 5}, {2, 5, 4}}, ints: [][]int{{2}},
			run: func(p operands) { d.GroupedMatMul(p.x[0], p.x[1], p.x[2], p.x[3], o) }},
		{name: "GroupedMatMul", floats: [][]int{{3, 4}, {3, 5}, {2, 4, 5}}, ints: [][]int{{2}},
			run: func(p operands) { d.GroupedMatMul(p.x[0], p.x[1], p.x[2].T(), p.x[3], o) }},
		{name: "GroupedWeightGrad", floats: [][]int{{2, 5, 4}, {3, 5}, {3, 4}}, ints: [][]int{{2}},
			run: func(p operands) { d.GroupedWeightGrad(p.x[0], p.x[1], p.x[2], p.x[3], o) }},
		{name: "GroupedWeightGrad", floats: [][]int{{2, 5, 4}, {5, 3}, {3, 4}}, ints: [][]int{{2}}, wrong: true,
			run: func(p operands) { d.GroupedWeightGrad(p.x[0], p.x[1].T(), p.x[2], p.x[3], o) }},
		{name: "Copy", floats: [][]int{{2, 3}, {2, 3}}, run: func(p operands) { d.Copy(p.x[0], p.x[1]) }},
		{name: "Copy", floats: [][]int{{2, 3}, {6}}, run: func(p operands) { d.Copy(p.x[0], p.x[1]) }, wrong: true},
		{name: "Combine", floats: [][]int{{3, 3}, {3, 3}, {3, 3}}, run: func(p operands) {
			d.Combine(p.x[0], p.x[1], p.x[2], 1, 2, 3)
		}},
		{name: "Combine", floats: [][]int{{3, 4}, {3, 4}, {3, 4}}, wrong: true, run: func(p operands) {
			d.Combine(p.x[0], p.x[1], p.x[2], 1, 2, 3)
		}},
		{name: "Add", floats: [][]int{{5}, {5}, {5}}, run: func(p operands) { d.Add(p.x[0], p.x[1], p.x[2]) }},
		{name: "Embed", floats: [][]int{{tokens, width}, {-vocabulary, width}}, ints: [][]int{{tokens}},
			run: func(p operands) { d.Embed(p.x[0], p.x[1], p.x[2]) }},
		{name: "EmbedGrad", floats: [][]int{{-vocabulary, width}, {tokens, width}}, ints: [][]int{{tokens}},
			run: func(p operands) { d.EmbedGrad(p.x[0], p.x[1], p.x[2], -1) }},
		{name: "Jitter", floats: [][]int{{tokens, -width}}, ints: [][]int{{tokens}},
			run: func(p operands) { d.Jitter(p.x[0], xpu.Jitter{Numbers: p.x[1], Epsilon: 0.1, Seed: 1}) }},
		{name: "GatherRows", floats: [][]int{{pairs, width}, {-tokens, width}}, ints: [][]int{{pairs}},
			run: func(p operands) { d.GatherRows(p.x[0], p.x[1], p.x[2]) }},
		{name: "Normalize", floats: [][]int{{tokens}, {width}, {tokens, width}, {tokens, width}},
			run: func(p operands) { d.Normalize(p.x[2], p.x[3], norm(p.x), false) }},
		{name: "Normalize", floats: [][]int{{tokens}, {tokens}, {tokens, width}, {tokens, width}},
			run: func(p operands) { d.Normalize(p.x[2], p.x[3], layerNorm(p.x), true) }},
		{name: "NormGrad", floats: [][]int{{tokens}, {width}, {tokens, width}, {tokens, width}, {tokens, width},
			{width}},
			run: func(p operands) { d.NormGrad(p.x[2], p.x[3], p.x[4], norm(p.x), p.x[5]) }},
		{name: "SplitHeads", run: func(p operands) { d.SplitHeads(split(p.x, first)) },
			floats: [][]int{{tokens, projections}, {width}, {kv * size}, {tokens}, {tokens}, {first + length, size / 2},
				{first + length, size / 2}, q, {rows, kv, capacity, size}, {rows, kv, capacity, size}}},
		{name: "SplitHeads", run: func(p operands) { d.SplitHeads(split(p.x, capacity-length+1)) }, wrong: true,
			floats: [][]int{{tokens, projections}, {width}, {kv * size}, {tokens}, {tokens}, {2 * capacity, size / 2},
				{2 * capacity, size / 2}, q, keys, keys}},
		{name: "JoinHeads", run: func(p operands) {
			d.JoinHeads(split(p.x, 0), p.x[10], p.x[11], p.x[12], p.x[13], p.x[14])
		}, floats: [][]int{{tokens, projections}, {width}, {kv * size}, {tokens}, {tokens}, {length, size / 2},
			{length, size / 2}, q, own, own, {tokens, projections}, own, own, {width}, {kv * size}}},
		{name: "JoinHeads", run: func(p operands) {
			d.JoinHeads(split(p.x, 0), p.x[10], p.x[11], p.x[12], p.x[13], p.x[14])
		}, floats: [][]int{{tokens, projections}, {width}, {kv * size}, {tokens}, {tokens}, {length, size / 2},
			{length, size / 2}, q, keys, keys, {tokens, projections}, own, own, {width}, {kv * size}}, wrong: true},
		{name: "SumHeads", run: func(p operands) { d.SumHeads(p.x[10], split(p.x, 0), p.x[11], p.x[12]) },
			floats: [][]int{{tokens, projections}, {width}, {kv * size}, {tokens}, {tokens}, {length, size / 2},
				{length, size / 2}, q, own, own, {2, tokens}, {tokens, projections}, own}},
		{name: "SumHeads", run: func(p operands) { d.SumHeads(p.x[10], split(p.x, 0), p.x[11], p.x[12]) }, wrong: true,
			floats: [][]int{{tokens, projections}, {size}, {kv * size}, {tokens * heads}, {tokens}, {length, size / 2},
				{length, size / 2}, q, own, own, {2, tokens}, {tokens, projections}, own}},
		{name: "SplitLatent", floats: [][]int{{tokens, heads * 3}, {tokens, heads * 4}, {tokens, 2},
			{first + length, 1}, {first + length, 1}, q, {rows, heads, capacity, size}, {rows, heads, capacity, size}},
			run: func(p operands) { d.SplitLatent(latent(p.x, first)) }},
		{name: "JoinLatent", floats: [][]int{{tokens, heads * 3}, {tokens, heads * 4}, {tokens, 2}, {length, 1},
			{length, 1}, q, q, q, {tokens, width}, q, q},
			run: func(p operands) { d.JoinLatent(latent(p.x, 0), p.x[8], p.x[9], p.x[10]) }},
		{name: "JoinLatent", floats: [][]int{{tokens, heads * 4}, {tokens, heads * 4}, {tokens, 4}, {length, 2},
			{length, 2}, q, q, {rows, heads, length, size - 2}, {tokens, width}, q, q}, wrong: true,
			run: func(p operands) { d.JoinLatent(latent(p.x, 0), p.x[8], p.x[9], p.x[10]) }},
		{name: "CopyColumns", floats: [][]int{{tokens, -width}, {tokens, -size}},
			run: func(p operands) { d.CopyColumns(p.x[0], p.x[1]) }},
		{name: "CopyColumns", floats: [][]int{{3, 3}, {3, 3}}, wrong: true,
			run: func(p operands) { d.CopyColumns(p.x[0], p.x[1].T()) }},
		{name: "Attend", run: func(p operands) { d.Attend(attention(p.x, first)) }, ints: [][]int{begin},
			floats: [][]int{q, {rows, kv, capacity, size}, {rows, kv, capacity, size}, {tokens, width}, lse}},
		{name: "AttendGrad", ints: [][]int{begin}, run: func(p operands) {
			d.AttendGrad(attention(append(p.x[:5:5], p.x[9]), 0), p.x[5], p.x[6], p.x[7], p.x[8])
		}, floats: [][]int{q, own, own, {tokens, width}, lse, {tokens, width}, {tokens, projections}, own, own}},
		{name: "AttendGrad", ints: [][]int{begin}, run: func(p operands) {
			d.AttendGrad(attention(append(p.x[:5:5], p.x[9]), first), p.x[5], p.x[6], p.x[7], p.x[8])
		}, floats: [][]int{q, {rows, kv, capacity, size}, {rows, kv, capacity, size}, {tokens, width}, lse,
			{tokens, width}, {tokens, width}, {rows, kv, capacity, size}, {rows, kv, capacity, size}}},
		{name: "AttendGrad", ints: [][]int{begin}, wrong: true, run: func(p operands) {
			d.AttendGrad(attention(append(p.x[:5:5], p.x[9]), 0), p.x[5], p.x[6], p.x[7], p.x[8])
		}, floats: [][]int{q, keys, keys, {tokens, width}, lse, {tokens, width}, {tokens, projections}, own, own}},
		{name: "Route", floats: [][]int{{tokens, experts}, {tokens}, {tokens, experts}},
			ints: [][]int{{tokens, -perToken},
				{experts}}, host: []int{experts}, run: func(p operands) {
				d.Route(xpu.Routing{Probs: p.x[0], LSE: p.x[1], Chosen: p.x[3], Counts: p.x[4]}, p.x[2], true,
					&xpu.RouterStats{Probs: p.host[0], Counts: make([]int64, experts)})
			}},
		{name: "Route", floats: [][]int{{tokens, 1}, {tokens}, {tokens, 1}}, ints: [][]int{{tokens, 2}, {1}},
			host: []int{1}, wrong: true, run: func(p operands) {
				d.Route(xpu.Routing{Probs: p.x[0], LSE: p.x[1], Chosen: p.x[3], Counts: p.x[4]}, p.x[2], true,
					&xpu.RouterStats{Probs: p.host[0], Counts: make([]int64, 1)})
			}},
		{name: "SortRows", floats: [][]int{{tokens, experts}, {pairs}}, ints: [][]int{{tokens, perToken}, {experts},
			{tokens, perToken}, {pairs}}, run: func(p operands) {
			d.SortRows(xpu.Routing{Probs: p.x[0], Weight: p.x[1], Chosen: p.x[2], Counts: p.x[3], RowOf: p.x[4],
				TokenOf: p.x[5]})
		}},
		{name: "RouteGrad", floats: [][]int{{tokens}, {tokens, experts}, {tokens, experts}, {experts}, {pairs}},
			ints: [][]int{{tokens, perToken}, {tokens, perToken}}, run: func(p operands) {
				d.RouteGrad(xpu.Routing{LSE: p.x[0], Probs: p.x[1], Chosen: p.x[5], RowOf: p.x[6]}, p.x[2], p.x[3],
					p.x[4],
					1)
			}},
		{name: "SumRows", floats: [][]int{{tokens, width}, {tokens, width}, {-pairs, width}},
			ints: [][]int{{tokens, -perToken}}, run: func(p operands) { d.SumRows(p.x[0], p.x[1], p.x[2], p.x[3]) }},
		{name: "SwiGLU", floats: [][]int{{pairs, inner}, {pairs, 2 * inner}, {pairs}},
			run: func(p operands) { d.SwiGLU(p.x[0], p.x[1], p.x[2]) }},
		{name: "SwiGLUGrad", floats: [][]int{{pairs, 2 * inner}, {pairs, inner}, {pairs, inner}, {pairs}, {pairs}},
			run: func(p operands) { d.SwiGLUGrad(p.x[0], p.x[1], p.x[2], p.x[3], p.x[4]) }},
		{name: "ClampedSwiGLU", floats: [][]int{{pairs, inner}, {pairs, 2 * inner}, {pairs}},
			run: func(p operands) { d.ClampedSwiGLU(p.x[0], p.x[1], p.x[2], xpu.Clamp{Limit: 7, Alpha: 1}) }},
		{name: "ClampedSwiGLUGrad",
			floats: [][]int{{pairs, 2 * inner}, {pairs, inner}, {pairs, inner}, {pairs}, {pairs}},
			run: func(p operands) {
				d.ClampedSwiGLUGrad(p.x[0], p.x[1], p.x[2], p.x[3], p.x[4], xpu.Clamp{Limit: 7, Alpha: 1})
			}},
		{name: "GroupedBias", floats: [][]int{{3, 5}, {2, 5}, {3}}, ints: [][]int{{2}},
			run: func(p operands) { d.GroupedBias(p.x[0], p.x[1], p.x[2], p.x[3]) }},
		{name: "GroupedBiasGrad", floats: [][]int{{2, 5}, {3, 5}, {2, 5}, {3}, {3}}, ints: [][]int{{2}},
			run: func(p operands) { d.GroupedBiasGrad(p.x[0], p.x[1], p.x[2], p.x[3], p.x[4], p.x[5]) }},
		{name: "AddSinks", run: func(p operands) { d.AddSinks(withSinks(p.x), p.x[5]) },
			floats: [][]int{q, own, own, {tokens, width}, lse, {heads}}},
		{name: "SinksGrad", run: func(p operands) { d.SinksGrad(withSinks(p.x), p.x[5], p.x[6], p.x[7]) },
			floats: [][]int{q, own, own, {tokens, width}, lse, {heads}, {tokens, width}, {heads}}},
		{name: "CrossEntropy", floats: [][]int{{tokens, -vocabulary}}, ints: [][]int{{tokens}}, host: []int{tokens},
			run: func(p operands) {
				d.CrossEntropy(xpu.CrossEntropy{Logits: p.x[0], Targets: p.x[1], Loss: p.host[0], Scale: 1})
			}},
		{name: "SumSquares", floats: [][]int{{-4}, {-4}}, host: []int{2},
			run: func(p operands) { d.SumSquares(p.x, p.host[0]) }},
		{name: "Checksums", floats: [][]int{{-4}, {-4}}, wrong: true,
			run: func(p operands) { d.Checksums(p.x, make([]uint64, 1)) }},
		{name: "Update", floats: [][]int{{4}, {4}, {4}, {4}, {4}, {4}, {4}, {4}}, host: []int{2, 2},
			run: func(p operands) {
				d.Update(xpu.AdamW{Step: 1}.Update(), []xpu.Moments{{Weight: p.x[0], Grad: p.x[1], M: p.x[2],
					V: p.x[3]},
					{Weight: p.x[4], Grad: p.x[5], M: p.x[6], V: p.x[7]}}, p.host[0], p.host[1])
			}},
		{name: "Read", floats: [][]int{{4}}, wrong: true,
			run: func(p operands) { d.Read(t.Context(), make([]float32, 3), p.x[0]) }},
		{name: "WriteInts", ints: [][]int{{4}}, wrong: true, run: func(p operands) {
			d.WriteInts(p.x[0],
				make([]int32, 5))
		}},
	} {
		shapes := append(slices.Clone(c.floats), c.ints...)
		// try runs the command with operand `grown` larger by one in dimension dim, or with gaps
		// between its rows if dim is its number of dimensions. shortHost is the number of a host
		// result with too little space. -1 means that no operand, or no host result, is wrong.
		try := func(what string, grown, dim, shortHost int) {
			t.Run(c.name+", "+what, func(t *testing.T) {
				var p operands
				var all []xpu.Tensor
				for i, shape := range shapes {
					shape, gaps := slices.Clone(shape), i == grown && dim == len(shape)
					for j := range shape {
						shape[j] = max(shape[j], -shape[j])
					}
					if i == grown {
						shape[min(dim, len(shape)-1)]++
					}
					n, err := xpu.Elements(shape)
					if err != nil {
						t.Fatal(err)
					}
					if i < len(c.floats) {
						all = append(all, upload(t, d, slices.Repeat([]float32{7}, n), shape...))
					} else {
						ints := make([]int32, n)
						if strings.HasPrefix(c.name, "Grouped") {
							ints[0] = 3 // all rows are in the first group
						}
						all = append(all, uploadInts(t, d, ints, shape...))
					}
					view := all[i]
					if gaps {
						view = view.Slice(len(shape)-1, 0, shape[len(shape)-1]-1)
					}
					p.x = append(p.x, view)
				}
				for i, n := range c.host {
					if i == shortHost {
						n--
					}
					p.host = append(p.host, make([]float64, n))
				}
				refused := func() (message string) {
					defer func() {
						if r := recover(); r != nil {
							message = fmt.Sprint(r)
						}
					}()
					c.run(p)
					return ""
				}()
				if grown < 0 && shortHost < 0 && !c.wrong {
					if refused != "" {
						t.Errorf("right operands are refused: %s", refused)
					}
					return
				}
				if !strings.HasPrefix(refused, "xpu: "+c.name+":") {
					t.Errorf("panicked with %q", refused)
				}
				for i, x := range all {
					if i < len(c.floats) && slices.ContainsFunc(read(t, d, x), func(v float32) bool { return v != 7 }) {
						t.Errorf("operand %d was written: %v", i, read(t, d, x))
					}
					if i >= len(c.floats) && slices.ContainsFunc(readInts(t, d, x),
						func(v int32) bool { return v != 0 && v != 3 }) {
						t.Errorf("operand %d was written: %v", i, readInts(t, d, x))
					}
				}
				for i, x := range p.host {
					if slices.ContainsFunc(x, func(v float64) bool { return v != 0 }) {
						t.Errorf("host results %d were written: %v", i, x)
					}
				}
			})
		}
		try("as it is", -1, -1, -1)
		if c.wrong {
			continue
		}
		for i, shape := range shapes {
			for dim, size := range shape {
				if size > 0 {
					try(fmt.Sprintf("operand %d, dimension %d", i, dim), i, dim, -1)
				}
			}
			if len(shape) > 1 && c.name != "MatMul" && c.name != "CopyColumns" && i < len(c.floats) {
				try(fmt.Sprintf("operand %d, gaps", i), i, len(shape), -1)
			}
		}
		for i := range c.host {
			try(fmt.Sprintf("host results %d", i), -1, -1, i)
		}
	}
}
