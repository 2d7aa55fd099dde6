package moe

import (
	"context"
	"fmt"
	"math"

	"mula/xpu"
	"mula/xpu/cpu"
)

// A dispatch computes the experts of a layer where ranks share them. Each rank has tokens, its own, and experts, which tokens of all ranks
// have chosen; it receives those. N is the number of tokens that it has received, R that of their choices among its experts.
//
// The rows of the expert products are ordered by expert, within an expert by the rank that the token came from, and then by token. A rank
// gives back one row for each token that it has received: the sum over those of the token's experts that it holds, in the order of the token's
// choices. The token's own rank adds these up in ascending order of the ranks. Both couriers keep to that, so they give the same bits.
//
// In the backward pass the gradients of the layer's output take the way of the tokens, and those of the inputs of the experts the way of
// their results, each with the gradients of the token's routing weights behind it. The choice of experts is made once, in the forward pass.
type dispatch struct {
	c       Config
	comm    *xpu.Comm
	courier courier
	experts int // held here, from number first on
	first   int
	from    int // number of the first layer held here

	memory layerMemory // where experts are recomputed: of all layers and flights

	choices []int32   // [N, 2K] experts and, as bits of a float32, weights of the tokens that this rank has received
	back    []float32 // [N, H+K] what goes back, or comes in the backward pass

	// Those of the workspace whose size is the number of expert rows.
	gathered, expert   []float32
	act, dact, dweight []float32

	tokenWeights []float32 // [T, K] gradients of the routing weights of this rank's tokens
}

// layerMemory is what takes most of the memory of what a layer's forward pass leaves for its backward pass.
type layerMemory struct {
	x      []float32 // [N, H] normalised inputs of the experts
	gateUp []float32 // [R, 2I]
}

// ways are the ways that the tokens of one layer go, and the rows that come of it.
type ways struct {
	received []int   // [n+1] tokens received[r] to received[r+1] of those that this rank has received are rank r's
	sent     []int   // [n+1] of AllToAll: rows sent[r] to sent[r+1] of what is sent are for rank r
	place    []int32 // [T, n] of AllToAll: where in what is sent a token's row for a rank is, or -1
	own      saved   // gateUp and routing of the rows of the experts held here; their tokens are those that this rank has received
}

// tokens is the number of tokens that this rank has received.
func (way *ways) tokens() int { return way.received[len(way.received)-1] }

// A courier takes rows from the ranks of their tokens to the ranks of their experts, and back.
type courier interface {
	// begin tells the others how many tokens this rank has in a pass.
	begin(ctx context.Context, tokens int) error

	// address finds the ways of a layer's tokens from what the router has chosen, and takes their choices to the ranks of the experts.
	address(ctx context.Context, m *Model, st *saved, way *ways, choices *[]int32) error

	// deliver takes the rows of x [T, H] to the ranks of the experts, as rows of received [N, H].
	deliver(ctx context.Context, m *Model, way *ways, received, x []float32) error

	// giveBack takes rows of the given width, of all tokens received, back to the ranks of the tokens. It may spoil them. It uses the group alone,
	// and nothing of the model that another goroutine may be using meanwhile.
	giveBack(ctx context.Context, way *ways, rows []float32, width int) error

	// add sets dst [T, H] to the sum over the ranks of what giveBack has brought, and more [T, width-H] to that of what is behind.
	add(m *Model, way *ways, rows []float32, width int, dst, more []float32)
}

func newDispatch(c Config, p Parallel) *dispatch {
	n := p.ranks()
	d := &dispatch{c: c, comm: p.Experts, experts: c.Experts / n}
	d.first, d.from = p.rank()*d.experts, stageOf(c, p.Stage, p.Stages).from
	if p.Dispatch == AllGather {
		d.courier = newGatherCourier(p.Experts)
	} else {
		d.courier = newDirectCourier(p.Experts, d.experts)
	}
	return d
}

// ways makes those of a flight through so many layers.
func (d *dispatch) ways(layers int) []ways {
	all, n := make([]ways, layers), d.comm.Size()
	for i := range all {
		all[i] = ways{received: make([]int, n+1), sent: make([]int, n+1)}
		all[i].own.counts = make([]int, d.experts)
	}
	return all
}

// begin starts a pass over so many tokens.
func (d *dispatch) begin(ctx context.Context, tokens int) error {
	if err := d.courier.begin(ctx, tokens); err != nil {
		return fmt.Errorf("moe: rank %d of %d that share the experts: %w", d.comm.Rank(), d.comm.Size(), err)
	}
	return nil
}

// failed says where an exchange went wrong.
func (d *dispatch) failed(number int, doing string, err error) error {
	return fmt.Errorf("moe: layer %d, rank %d of %d that share the experts, %s: %w", d.from+number, d.comm.Rank(), d.comm.Size(), doing, err)
}

// forward is feedForward behind the router.
func (d *dispatch) forward(ctx context.Context, m *Model, l *layer, st *saved, number int, out []float32) error {
	way, h := &m.ws.ways[number], d.c.HiddenSize
	for pair := range st.rowOf {
		st.rowOf[pair] = int32(pair) // of ws.dweight, which will be this rank's tokenWeights
	}
	if err := d.courier.address(ctx, m, st, way, &d.choices); err != nil {
		return d.failed(number, "sending choices of experts", err)
	}
	d.sort(way)
	if err := d.expand(ctx, m, l, number); err != nil {
		return err
	}
	m.contract(l, &way.own)
	back := d.sumRows(m, way, h, m.ws.expert)
	if err := d.courier.giveBack(ctx, way, back, h); err != nil {
		return d.failed(number, "sending outputs of experts back", err)
	}
	d.courier.add(m, way, back, h, m.ws.h, nil)
	m.split(m.ws.shape.rows*m.ws.shape.s, operands{dst: out, x: st.x1}, func(m *Model, o *operands, _, lo, hi int) {
		h := m.cfg.HiddenSize
		cpu.AddScaled(o.dst[lo*h:hi*h], o.x[lo*h:hi*h], 1, m.ws.h[lo*h:hi*h])
	})
	return nil
}

// expand delivers the normalised inputs in ws.h and computes the gate and up projections. The backward pass calls it again if what it reads
// was not kept.
func (d *dispatch) expand(ctx context.Context, m *Model, l *layer, number int) error {
	way := &m.ws.ways[number]
	x := d.use(m, number)
	if err := d.courier.deliver(ctx, m, way, x, m.ws.h); err != nil {
		return d.failed(number, "sending tokens to their experts", err)
	}
	m.expand(l, &way.own, x)
	return nil
}

// grad takes the gradient of the layer's output in ws.dx to that of the normalised inputs, without the router's, in ws.dh, and to those of
// the routing weights of this rank's tokens in ws.dweight, and adds to the gradients of the experts held here.
func (d *dispatch) grad(ctx context.Context, m *Model, l *layer, number int) error {
	way, h, k := &m.ws.ways[number], d.c.HiddenSize, d.c.ExpertsPerToken
	x := d.use(m, number)
	dy := room(&d.back, way.tokens()*h)
	if err := d.courier.deliver(ctx, m, way, dy, m.ws.dx); err != nil {
		return d.failed(number, "sending gradients of outputs to their experts", err)
	}
	m.contractGrad(l, &way.own, dy)
	back := d.sumRows(m, way, h+k, m.ws.gathered)
	sending := d.comm.Start(func() error { return d.courier.giveBack(ctx, way, back, h+k) })
	m.expertsGrad(l, &way.own, x)
	if err := sending.Wait(); err != nil {
		return d.failed(number, "sending gradients of inputs back", err)
	}
	m.ws.dweight = room(&d.tokenWeights, m.ws.shape.rows*m.ws.shape.s*k)
	d.courier.add(m, way, back, h+k, m.ws.dh, m.ws.dweight)
	return nil
}

// sort numbers the choices of experts held here by expert and, within an expert, by token.
func (d *dispatch) sort(way *ways) {
	n, k, own := way.tokens(), d.c.ExpertsPerToken, &way.own
	room(&own.rowOf, n*k)
	clear(own.counts)
	for t := range n {
		for j, e := range d.choices[t*2*k:][:k] {
			own.rowOf[t*k+j] = -1
			if i := int(e) - d.first; i >= 0 && i < d.experts {
				own.counts[i]++
			}
		}
	}
	var start [maxExperts]int32
	rows := int32(0)
	for e, n := range own.counts {
		start[e] = rows
		rows += int32(n)
	}
	room(&own.tokenOf, int(rows))
	room(&own.weight, int(rows))
	for t := range n {
		experts, weights := d.choices[t*2*k:][:k], d.choices[t*2*k+k:][:k]
		for j, e := range experts {
			if i := int(e) - d.first; i >= 0 && i < d.experts {
				r := start[i]
				start[i]++
				own.rowOf[t*k+j], own.tokenOf[r], own.weight[r] = r, int32(t), math.Float32frombits(uint32(weights[j]))
			}
		}
	}
}

// use points the buffers whose sizes depend on the routing to their memory, and returns the one for the inputs of the experts.
func (d *dispatch) use(m *Model, number int) (x []float32) {
	w, way, memory := &m.ws, &m.ws.ways[number], &d.memory
	switch {
	case !w.shape.train:
		memory = &w.memory[0]
	case !w.shape.recompute.experts():
		memory = &w.memory[number]
	}
	h, ffn, rows := d.c.HiddenSize, d.c.IntermediateSize, len(way.own.tokenOf)
	way.own.gateUp = room(&memory.gateUp, rows*2*ffn)
	w.gathered, w.expert, w.act = room(&d.gathered, rows*h), room(&d.expert, rows*h), room(&d.act, rows*ffn)
	if w.shape.train {
		w.dact, w.dweight = room(&d.dact, rows*ffn), room(&d.dweight, rows)
	}
	return room(&memory.x, way.tokens()*h)
}

// sumRows returns, for each token that this rank has received, the sum of its rows of y [R, H], in the order of its choices. With a width of H+K
// the gradients of its routing weights are behind: those of experts held elsewhere are zero. A sum starts from zero, so that none is the
// negative zero, and a rank that has none for a token changes no bit.
func (d *dispatch) sumRows(m *Model, way *ways, width int, y []float32) []float32 {
	n := way.tokens()
	back := room(&d.back, n*width)
	m.split(n, operands{dst: back, y: y, ways: way, width: width}, func(m *Model, o *operands, _, lo, hi int) {
		h, k, own := m.cfg.HiddenSize, m.cfg.ExpertsPerToken, &o.ways.own
		for t := lo; t < hi; t++ {
			row := o.dst[t*o.width:][:o.width]
			clear(row)
			for j, r := range own.rowOf[t*k:][:k] {
				if r < 0 {
					continue
				}
				cpu.Axpy(row[:h], 1, o.y[int(r)*h:][:h])
				if o.width > h {
					row[h+j] += m.ws.dweight[r]
				}
			}
		}
	})
	return back
}

// room makes *memory n elements long, and returns it. What it held is lost if it has to grow.
func room[E any](memory *[]E, n int) []E {
	if n > cap(*memory) {
		*memory = nil // so that the collector may take it before the new one is made
		*memory = make([]E, n)
	}
	*memory = (*memory)[:n]
	return *memory
}

// encode writes the choices of a token as the ranks of the experts get them: experts, then weights.
func encode(dst []int32, st *saved, t, k int) {
	experts := len(st.counts)
	copy(dst[:k], st.chosen[t*k:])
	for j, e := range dst[:k] {
		dst[k+j] = int32(math.Float32bits(st.probs[t*experts+int(e)]))
	}
}

// scale multiplies bounds of rows by their width.
func scale(dst, bounds []int, width int) []int {
	for i, b := range bounds {
		dst[i] = b * width
	}
	return dst
}
