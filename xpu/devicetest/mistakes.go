package devicetest

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"mula/xpu"
)

// mistakesFamily runs each command with valid operands, and then with one operand too short by one
// element: the command must panic and write nothing.
func mistakesFamily(t *testing.T, d xpu.Device, _ float64) {
	const rows, length, heads, kv, size, experts, perToken, inner, vocabulary, capacity, first = 2, 3, 2, 1, 4, 3, 2, 5,
		7, 9, 4
	const tokens, width, pairs, keys, own = rows * length, heads * size, rows * length * perToken,
		rows * kv * capacity * size, rows * kv * length * size
	const projections = (heads + 2*kv) * size
	h := xpu.Heads{Rows: rows, Length: length, Heads: heads, KVHeads: kv, Size: size}
	type operands struct {
		x    [][]float32
		ints [][]int32
		host [][]float64
	}
	norm := func(x [][]float32) xpu.Norm { return xpu.Norm{Width: width, Epsilon: 1e-5, RStd: x[0], Weight: x[1]} }
	layerNorm := func(x [][]float32) xpu.Norm { return xpu.Norm{Width: width, Epsilon: 1e-5, RStd: x[0], Mean: x[1]} }
	split := func(x [][]float32, first, capacity int) xpu.Projections {
		return xpu.Projections{Heads: h, QKV: x[0], QWeight: x[1], KWeight: x[2], RQ: x[3], RK: x[4], Cos: x[5],
			Sin: x[6], Q: x[7], K: x[8], V: x[9], First: first, Capacity: capacity}
	}
	attention := func(x [][]float32, first, capacity int) xpu.Attention {
		return xpu.Attention{Heads: h, Q: x[0], K: x[1], V: x[2], Context: x[3], LSE: x[4], First: first,
			Capacity: capacity}
	}
	zeros := func(n int) []int32 { return make([]int32, n) }
	for _, c := range []struct {
		name              string
		floats            []int
		ints              [][]int32
		host              []int
		run               func(o operands)
		fixed, fixedWhole int  // number of leading operands that determine the sizes: they may be shorter
		wrong             bool // the operands are long enough, but the sizes are invalid
	}{
		{name: "Copy", floats: []int{5, 5}, run: func(o operands) { d.Copy(o.x[0], o.x[1]) }},
		{name: "Add", floats: []int{5, 5, 5}, run: func(o operands) { d.Add(o.x[0], o.x[1], o.x[2]) }},
		{name: "Embed", floats: []int{vocabulary * width, tokens * width}, ints: [][]int32{zeros(tokens)}, fixed: 1,
			fixedWhole: 1, run: func(o operands) { d.Embed(o.x[1], o.x[0], o.ints[0], width) }},
		{name: "EmbedGrad", floats: []int{vocabulary * width, tokens * width}, ints: [][]int32{zeros(tokens)}, fixed: 1,
			fixedWhole: 1, run: func(o operands) {
				d.EmbedGrad(o.x[0], o.x[1], o.ints[0], width, -1)
			}},
		{name: "GatherRows", floats: []int{vocabulary * width, pairs * width}, ints: [][]int32{zeros(pairs)}, fixed: 1,
			fixedWhole: 1, run: func(o operands) { d.GatherRows(o.x[1], o.x[0], o.ints[0], width) }},
		{name: "Normalize", floats: []int{tokens, width, tokens * width, tokens * width},
			run: func(o operands) { d.Normalize(o.x[2], o.x[3], norm(o.x), false) }},
		{name: "Normalize", floats: []int{tokens, tokens, tokens * width, tokens * width},
			run: func(o operands) { d.Normalize(o.x[2], o.x[3], layerNorm(o.x), true) }},
		{name: "NormGrad", floats: []int{tokens, width, tokens * width, tokens * width, tokens * width, width},
			run: func(o operands) {
				d.NormGrad(o.x[2], o.x[3], o.x[4], norm(o.x), o.x[5])
			}},
		{name: "SplitHeads", run: func(o operands) { d.SplitHeads(split(o.x, first, capacity)) },
			floats: []int{tokens * projections, width, kv * size, tokens, tokens, (first + length) * size / 2,
				(first + length) * size / 2, tokens * width, keys, keys}},
		{name: "SplitHeads", run: func(o operands) { d.SplitHeads(split(o.x, capacity-length+1, capacity)) },
			wrong: true,
			floats: []int{tokens * projections, width, kv * size, tokens, tokens, capacity * size, capacity * size,
				tokens * width, keys, keys}},
		{name: "JoinHeads", run: func(o operands) {
			p := split(append(o.x[:7:7], nil, nil, nil), 0, length)
			d.JoinHeads(p, o.x[7], o.x[8], o.x[9], o.x[10], o.x[11])
		}, floats: []int{tokens * projections, width, kv * size, tokens, tokens, length * size / 2, length * size / 2,
			tokens * projections, own, own, width, kv * size}},
		{name: "Attend", run: func(o operands) { d.Attend(attention(o.x, first, capacity)) },
			floats: []int{tokens * width, keys, keys, tokens * width, tokens * heads}},
		{name: "AttendGrad", run: func(o operands) {
			d.AttendGrad(attention(o.x, 0, length), o.x[5], o.x[6], o.x[7],
				o.x[8])
		},
			floats: []int{tokens * width, own, own, tokens * width, tokens * heads, tokens * width,
				tokens * projections, own, own}},
		{name: "Attend", run: func(o operands) {
			a := attention(o.x, first, capacity)
			a.Begin = o.ints[0]
			d.Attend(a)
		}, floats: []int{tokens * width, keys, keys, tokens * width, tokens * heads}, ints: [][]int32{zeros(tokens)}},
		{name: "AttendGrad", run: func(o operands) {
			a := attention(o.x, 0, length)
			a.Begin = o.ints[0]
			d.AttendGrad(a, o.x[5], o.x[6], o.x[7], o.x[8])
		}, floats: []int{tokens * width, own, own, tokens * width, tokens * heads, tokens * width,
			tokens * projections, own, own}, ints: [][]int32{zeros(tokens)}},
		{name: "AttendGrad", run: func(o operands) {
			d.AttendGrad(attention(o.x, 0, length+1), o.x[5], o.x[6], o.x[7],
				o.x[8])
		}, wrong: true,
			floats: []int{tokens * width, keys, keys, tokens * width, tokens * heads, tokens * width,
				tokens * projections, own, own}},
		{name: "Route", floats: []int{tokens, tokens * experts, tokens * experts}, ints: [][]int32{zeros(pairs),
			zeros(experts)}, host: []int{experts}, fixed: 1, run: func(o operands) {
			d.Route(xpu.Routing{Experts: experts, PerToken: perToken, LSE: o.x[0], Probs: o.x[1], Chosen: o.ints[0],
				Counts: o.ints[1]}, o.x[2], true,
				&xpu.RouterStats{Probs: o.host[0], Counts: make([]int64, experts)})
		}},
		{name: "SortRows", floats: []int{tokens * experts, pairs}, ints: [][]int32{zeros(pairs), zeros(experts),
			zeros(pairs), zeros(pairs)}, fixedWhole: 1, run: func(o operands) {
			d.SortRows(xpu.Routing{Experts: experts, PerToken: perToken, Probs: o.x[0], Weight: o.x[1],
				Chosen: o.ints[0], Counts: o.ints[1], RowOf: o.ints[2], TokenOf: o.ints[3]})
		}},
		{name: "RouteGrad", floats: []int{tokens, tokens * experts, tokens * experts, experts, pairs},
			ints: [][]int32{zeros(pairs), zeros(pairs)}, fixed: 1, run: func(o operands) {
				d.RouteGrad(xpu.Routing{Experts: experts, PerToken: perToken, LSE: o.x[0], Probs: o.x[1],
					Chosen: o.ints[0],
					RowOf:  o.ints[1]}, o.x[2], o.x[3], o.x[4], 1)
			}},
		{name: "SumRows", floats: []int{pairs * width, tokens * width, tokens * width}, ints: [][]int32{zeros(pairs)},
			fixed: 1, run: func(o operands) {
				d.SumRows(o.x[1], o.x[2], o.x[0], o.ints[0], perToken, width)
			}},
		{name: "SwiGLU", floats: []int{pairs * inner, pairs * 2 * inner, pairs},
			run: func(o operands) { d.SwiGLU(o.x[0], o.x[1], o.x[2], inner) }},
		{name: "SwiGLUGrad", floats: []int{pairs * inner, pairs * 2 * inner, pairs, pairs * inner, pairs},
			run: func(o operands) {
				d.SwiGLUGrad(o.x[1], o.x[0], o.x[3], o.x[2], o.x[4], inner)
			}},
		{name: "CrossEntropy", floats: []int{tokens * vocabulary}, ints: [][]int32{zeros(tokens)}, host: []int{tokens},
			fixedWhole: 1, run: func(o operands) {
				d.CrossEntropy(xpu.CrossEntropy{Width: vocabulary, Logits: o.x[0], Targets: o.ints[0], Loss: o.host[0],
					Scale: 1})
			}},
		{name: "SumSquares", floats: []int{4, 4}, host: []int{2}, fixed: 2,
			run: func(o operands) { d.SumSquares(o.x, o.host[0]) }},
		{name: "Checksums", floats: []int{4, 4}, fixed: 2, wrong: true,
			run: func(o operands) { d.Checksums(o.x, make([]uint64, 1)) }},
		{name: "Update", floats: []int{4, 4, 4, 4, 4, 4, 4, 4}, host: []int{2, 2}, run: func(o operands) {
			d.Update(xpu.AdamW{Step: 1}.Update(), []xpu.Moments{{Weight: o.x[0], Grad: o.x[1], M: o.x[2], V: o.x[3]},
				{Weight: o.x[4], Grad: o.x[5], M: o.x[6], V: o.x[7]}}, o.host[0], o.host[1])
		}},
	} {
		for short := -1; short < len(c.floats)+len(c.ints)+len(c.host); short++ {
			if short >= 0 && (short < c.fixed || c.wrong) || short >= len(c.floats) &&
				short < len(c.floats)+c.fixedWhole {
				continue
			}
			name := c.name
			if short >= 0 {
				name = fmt.Sprintf("%s, operand %d", name, short)
			}
			t.Run(name, func(t *testing.T) {
				var o operands
				number := 0
				length := func(n int) int {
					if number++; number-1 == short {
						return n - 1
					}
					return n
				}
				for _, n := range c.floats {
					o.x = append(o.x, upload(t, d, slices.Repeat([]float32{7}, length(n))))
				}
				for _, x := range c.ints {
					o.ints = append(o.ints, uploadInts(t, d, x[:length(len(x))]))
				}
				for _, n := range c.host {
					o.host = append(o.host, make([]float64, length(n)))
				}
				refused := func() (message string) {
					defer func() {
						if r := recover(); r != nil {
							message = fmt.Sprint(r)
						}
					}()
					c.run(o)
					return ""
				}()
				if short < 0 && !c.wrong {
					if refused != "" {
						t.Errorf("right operands are refused: %s", refused)
					}
					return
				}
				if !strings.HasPrefix(refused, "xpu: "+c.name+":") {
					t.Errorf("panicked with %q", refused)
				}
				download(t, d, o.x...)
				downloadInts(t, d, o.ints...)
				for i, x := range o.x {
					if slices.ContainsFunc(x, func(v float32) bool { return v != 7 }) {
						t.Errorf("operand %d was written: %v", i, x)
					}
				}
				for i, x := range o.ints {
					if !slices.Equal(x, c.ints[i][:len(x)]) {
						t.Errorf("whole numbers %d were written: %v", i, x)
					}
				}
				for i, x := range o.host {
					if slices.ContainsFunc(x, func(v float64) bool { return v != 0 }) {
						t.Errorf("host results %d were written: %v", i, x)
					}
				}
			})
		}
	}
}
