package moe

import (
	"context"
	"fmt"
	"math"

	"mula/xpu"
	"mula/xpu/comm"
	"mula/xpu/cpu"
)

// A dispatch computes the experts of a layer if ranks share them. Each rank has its own tokens and
// a part of the experts, and receives the tokens of all ranks that chose those experts. N is the
// number of tokens that the rank received, R the number of their choices among its experts.
//
// The rows of the expert products are ordered by expert, then by the token's rank, then by token. A
// rank returns one row for each token that it received: the sum over the token's experts on this
// rank, in the order of the token's choices. The token's own rank adds these rows in ascending
// order of the ranks. Both couriers keep this order, so they produce the same bits.
//
// In the backward pass, the gradients of the layer's output are sent like the tokens, and the
// gradients of the expert inputs like the results, each row followed by the gradients of the
// token's routing weights. Experts are chosen once, in the forward pass.
//
// Ranks exchange host memory. If the device has its own memory, the inputs and outputs of the
// experts are copied to the host before a courier reads them, and to the device after a courier has
// written them.
type dispatch struct {
	c       Config
	dev     xpu.Device
	comm    *comm.Comm
	courier courier
	experts int // number of experts on this rank, from expert first on
	first   int

	memory layerMemory // if experts are recomputed: shared by all layers and flights

	// [N, 2K] on the host: experts of the tokens that this rank received, then their weights as
	// bits of a float32
	choices []int32
	back    stock // [N, H+K] rows to return; in the backward pass also rows received

	// The workspace's buffers whose size depends on the number of expert rows.
	gathered, expert, act, dact, dweight stock

	tokenWeights stock // [T, K] gradients of the routing weights of this rank's tokens

	// Memory on the host; for float32 only if the device has its own memory.
	host struct {
		x, received, rows, probs, weights []float32
		ints, counts                      []int32
	}
}

// layerMemory holds the largest buffers that a layer's forward pass keeps for its backward pass.
type layerMemory struct {
	x      stock // [N, H] normalised inputs of the experts
	gateUp stock // [R, 2I]
}

func (l *layerMemory) free(dev xpu.Memory) {
	l.x.free(dev)
	l.gateUp.free(dev)
}

// ways describe how the tokens of one layer travel, and the expert rows that result.
type ways struct {
	received []int   // [n+1] received tokens received[r] to received[r+1] belong to rank r
	sent     []int   // [n+1] of AllToAll: sent rows sent[r] to sent[r+1] are for rank r
	place    []int32 // [T, n] of AllToAll: index among the sent rows of a token's row for a rank, or -1
	// [N, K] rows of a received token, in the order of its choices; -1 for experts of other ranks
	rowOf []int32

	// gateUp and routing of the rows of this rank's experts, as far as the expert products need
	// them; their tokens are the received tokens.
	own                     saved
	counts, tokenOf, weight stock
}

func (way *ways) free(dev xpu.Memory) {
	way.counts.free(dev)
	way.tokenOf.free(dev)
	way.weight.free(dev)
}

// tokens returns the number of tokens that this rank received.
func (way *ways) tokens() int { return way.received[len(way.received)-1] }

// A courier moves rows from the ranks of their tokens to the ranks of their experts, and back, all
// in host memory.
type courier interface {
	// begin tells the other ranks how many tokens this rank has in a pass.
	begin(ctx context.Context, tokens int) error

	// address computes the ways of a layer's tokens from the router's choices, and sends the
	// choices to the ranks of the experts.
	address(ctx context.Context, c choices, way *ways, sent *[]int32) error

	// deliver sends the rows of x [T, H] to the ranks of the experts, as rows of received [N, H].
	deliver(ctx context.Context, m *Model, way *ways, received, x []float32) error

	// giveBack returns one row of the given width for each received token to the token's rank. It
	// may overwrite the rows. It uses only the group, and nothing of the model that another
	// goroutine may be using.
	giveBack(ctx context.Context, way *ways, rows []float32, width int) error

	// add sets dst [T, H] to the sum over ranks of the first H columns of the rows that giveBack
	// received, and more [T, width-H] to the sum of the other columns.
	add(m *Model, way *ways, rows []float32, width int, dst, more []float32)
}

func newDispatch(c Config, dev xpu.Device, p Parallel) *dispatch {
	group := p.Mesh.Group(comm.EP)
	d := &dispatch{c: c, dev: dev, comm: group, experts: c.Experts / group.Size()}
	d.first = group.Rank() * d.experts
	if p.Dispatch == AllGather {
		d.courier = newGatherCourier(group)
	} else {
		d.courier = newDirectCourier(group, d.experts)
	}
	return d
}

// prepare allocates the ways of a flight's layers with experts.
func (d *dispatch) prepare(f *flight, layers int) {
	f.ways, f.memory = make([]ways, layers), make([]layerMemory, layers)
	n := d.comm.Size()
	for i := range f.ways {
		f.ways[i] = ways{received: make([]int, n+1), sent: make([]int, n+1)}
	}
}

// free releases the memory that does not belong to a flight.
func (d *dispatch) free() {
	d.memory.free(d.dev)
	for _, s := range []*stock{&d.back, &d.gathered, &d.expert, &d.act, &d.dact, &d.dweight, &d.tokenWeights} {
		s.free(d.dev)
	}
}

// begin starts a pass over the given number of tokens.
func (d *dispatch) begin(ctx context.Context, tokens int) error {
	if err := d.courier.begin(ctx, tokens); err != nil {
		return fmt.Errorf("rank %d of %d that share the experts: %w", d.comm.Rank(), d.comm.Size(), err)
	}
	return nil
}

// failed adds the layer, the rank and the operation to an error.
func (d *dispatch) failed(m *Model, number int, doing string, err error) error {
	return fmt.Errorf("layer %d, rank %d of %d that share the experts, %s: %w", m.stage.from+number, d.comm.Rank(),
		d.comm.Size(), doing, err)
}

// forward computes the block of a layer; see feedForwardBlock.
func (d *dispatch) forward(ctx context.Context, m *Model, l *layer, st *saved, number int, out, x xpu.Tensor) error {
	m.route(l, st)
	way, h, r := &m.ws.ways[l.sparse], d.c.HiddenSize, &st.routing
	rowOf := room(&d.host.ints, r.RowOf.Elements())
	for pair := range rowOf {
		rowOf[pair] = int32(pair) // index into ws.dweight, which will be this rank's tokenWeights
	}
	d.dev.WriteInts(r.RowOf, rowOf)
	if err := d.address(ctx, m, l, st, way); err != nil {
		return d.failed(m, number, "sending choices of experts", err)
	}
	received, err := d.kept(m, l).x.take(d.dev, xpu.Float32, way.tokens(), h)
	if err != nil {
		return d.failed(m, number, "allocating buffers", err)
	}
	sending := d.comm.Start(ctx, // the tokens are ordered by expert meanwhile
		func(ctx context.Context) error { return d.deliver(ctx, m, way, received, m.ws.h) })
	err = d.sort(way)
	if err := sending.Wait(); err != nil {
		return d.failed(m, number, "sending tokens to their experts", err)
	}
	if err != nil {
		return d.failed(m, number, "ordering tokens by expert", err)
	}
	if received, err = d.use(m, l); err != nil {
		return d.failed(m, number, "allocating buffers", err)
	}
	m.expand(l, &way.own, received)
	m.contract(l, &way.own)
	back, err := d.sumRows(ctx, m, way, h, m.ws.expert)
	if err == nil {
		err = d.courier.giveBack(ctx, way, back, h)
	}
	if err != nil {
		return d.failed(m, number, "sending outputs of experts back", err)
	}
	sums := xpu.HostBuffer(m.ws.h, &d.host.x)
	d.courier.add(m, way, back, h, sums, nil)
	d.dev.Write(m.ws.h, sums)
	if x.Present() {
		d.dev.Add(out, x, m.ws.h)
	} else {
		d.dev.Copy(out, m.ws.h)
	}
	return nil
}

// address computes the ways of a layer's tokens.
func (d *dispatch) address(ctx context.Context, m *Model, l *layer, st *saved, way *ways) error {
	r := &st.routing
	c := choices{chosen: room(&d.host.ints, r.Chosen.Elements()), experts: r.Probs.Dim(1), perToken: r.Chosen.Dim(1),
		kind: r.RouterKind}
	err := d.dev.ReadInts(ctx, c.chosen, r.Chosen)
	if err == nil {
		c.probs, err = xpu.Numbers(ctx, d.dev, r.Probs, &d.host.probs)
	}
	if err == nil {
		c.dropped, err = m.drop(ctx, c.chosen, l.sparse)
	}
	if err != nil {
		return err
	}
	return d.courier.address(ctx, c, way, &d.choices)
}

// deliver sends the rows of x [T, H] to the ranks of the experts, as rows of received [N, H].
func (d *dispatch) deliver(ctx context.Context, m *Model, way *ways, received, x xpu.Tensor) error {
	rows, err := xpu.Numbers(ctx, d.dev, x, &d.host.x)
	if err != nil {
		return err
	}
	arrived := xpu.HostBuffer(received, &d.host.received)
	if err := d.courier.deliver(ctx, m, way, arrived, rows); err != nil {
		return err
	}
	d.dev.Write(received, arrived)
	return nil
}

// expand delivers the normalised inputs in ws.h and computes the gate and up projections, if the
// results of the forward pass were not kept.
func (d *dispatch) expand(ctx context.Context, m *Model, l *layer, _ *saved, number int) error {
	way := &m.ws.ways[l.sparse]
	x, err := d.use(m, l)
	if err == nil {
		err = d.deliver(ctx, m, way, x, m.ws.h)
	}
	if err != nil {
		return d.failed(m, number, "sending tokens to their experts", err)
	}
	m.expand(l, &way.own, x)
	return nil
}

// grad computes the gradients of a layer; see feedForwardBlock. The gradients of the routing
// weights of this rank's tokens are in ws.dweight afterwards.
func (d *dispatch) grad(ctx context.Context, m *Model, l *layer, st *saved, number int, dout xpu.Tensor,
	zFactor float64) error {
	way, h, k := &m.ws.ways[l.sparse], d.c.HiddenSize, d.c.ExpertsPerToken
	x, err := d.use(m, l)
	if err != nil {
		return d.failed(m, number, "allocating buffers", err)
	}
	// first the gradients of outputs, then the rows to return
	memory, err := d.back.take(d.dev, xpu.Float32, way.tokens()*(h+k))
	if err != nil {
		return d.failed(m, number, "allocating buffers", err)
	}
	dy := memory.Rows(0, way.tokens()*h).Reshape(way.tokens(), h)
	if err := d.deliver(ctx, m, way, dy, dout); err != nil {
		return d.failed(m, number, "sending gradients of outputs to their experts", err)
	}
	m.contractGrad(l, &way.own, dy)
	back, err := d.sumRows(ctx, m, way, h+k, m.ws.gathered)
	if err != nil {
		return d.failed(m, number, "sending gradients of inputs back", err)
	}
	sending := d.comm.Start(ctx,
		func(ctx context.Context) error { return d.courier.giveBack(ctx, way, back, h+k) })
	m.expertsGrad(l, &way.own, x)
	if err := sending.Wait(); err != nil {
		return d.failed(m, number, "sending gradients of inputs back", err)
	}
	if m.ws.dweight, err = d.tokenWeights.take(d.dev, xpu.Float32, m.ws.shape.tokens()*k); err != nil {
		return d.failed(m, number, "allocating buffers", err)
	}
	dh, dweight := xpu.HostBuffer(m.ws.dh, &d.host.x), xpu.HostBuffer(m.ws.dweight, &d.host.weights)
	d.courier.add(m, way, back, h+k, dh, dweight)
	d.dev.Write(m.ws.dh, dh)
	d.dev.Write(m.ws.dweight, dweight)
	m.routeGrad(l, st, zFactor)
	return nil
}

// sort orders the choices of this rank's experts by expert and, within an expert, by token.
func (d *dispatch) sort(way *ways) (err error) {
	n, k, own := way.tokens(), d.c.ExpertsPerToken, &way.own.routing
	if own.Counts, err = way.counts.take(d.dev, xpu.Int32, d.experts); err != nil {
		return err
	}
	room(&way.rowOf, n*k)
	counts := room(&d.host.counts, d.experts)
	clear(counts)
	for t := range n {
		for j, e := range d.choices[t*2*k:][:k] {
			way.rowOf[t*k+j] = -1
			if i := int(e) - d.first; i >= 0 && i < d.experts {
				counts[i]++
			}
		}
	}
	var start [maxExperts]int32
	rows := int32(0)
	for e, n := range counts {
		start[e] = rows
		rows += n
	}
	if own.TokenOf, err = way.tokenOf.take(d.dev, xpu.Int32, int(rows)); err != nil {
		return err
	}
	if own.Weight, err = way.weight.take(d.dev, xpu.Float32, int(rows)); err != nil {
		return err
	}
	tokenOf, rowWeight := room(&d.host.ints, int(rows)), xpu.HostBuffer(own.Weight, &d.host.weights)
	for t := range n {
		experts, weights := d.choices[t*2*k:][:k], d.choices[t*2*k+k:][:k]
		for j, e := range experts {
			if i := int(e) - d.first; i >= 0 && i < d.experts {
				r := start[i]
				start[i]++
				way.rowOf[t*k+j], tokenOf[r], rowWeight[r] = r, int32(t), math.Float32frombits(uint32(weights[j]))
			}
		}
	}
	d.dev.WriteInts(own.Counts, counts)
	d.dev.WriteInts(own.TokenOf, tokenOf)
	d.dev.Write(own.Weight, rowWeight)
	return nil
}

// kept returns the memory of a layer for the values that its backward pass needs.
func (d *dispatch) kept(m *Model, l *layer) *layerMemory {
	w := &m.ws
	switch {
	case !w.shape.train:
		return &w.memory[0]
	case !w.shape.recompute.experts():
		return &w.memory[l.sparse]
	}
	return &d.memory
}

// use points the buffers whose sizes depend on the routing to their memory, and returns the buffer
// for the expert inputs.
func (d *dispatch) use(m *Model, l *layer) (x xpu.Tensor, err error) {
	w, way, memory := &m.ws, &m.ws.ways[l.sparse], d.kept(m, l)
	h, ffn, rows := d.c.HiddenSize, d.c.IntermediateSize, way.own.routing.TokenOf.Dim(0)
	take := func(s *stock, shape ...int) (t xpu.Tensor) {
		if err == nil {
			t, err = s.take(d.dev, xpu.Float32, shape...)
		}
		return t
	}
	if way.own.gateUp, err = memory.gateUp.take(d.dev, w.shape.rounded, rows, 2*ffn); err != nil {
		return x, err
	}
	w.gathered, w.expert, w.act = take(&d.gathered, rows, h), take(&d.expert, rows, h), take(&d.act, rows, ffn)
	if w.shape.train {
		w.dact, w.dweight = take(&d.dact, rows, ffn), take(&d.dweight, rows)
	}
	x = take(&memory.x, way.tokens(), h)
	return x, err
}

// sumRows returns, for each received token, the sum of its rows of y [R, H], in the order of its
// choices. With a width of H+K, the gradients of its routing weights follow; they are zero for
// experts of other ranks. Sums start from zero. A sum is therefore never negative zero, and a rank
// without rows for a token changes no bit of the total.
func (d *dispatch) sumRows(ctx context.Context, m *Model, way *ways, width int, y xpu.Tensor) ([]float32, error) {
	n := way.tokens()
	memory, err := d.back.take(d.dev, xpu.Float32, n*width)
	if err != nil {
		return nil, err
	}
	rows, err := xpu.Numbers(ctx, d.dev, y, &d.host.rows)
	if err != nil {
		return nil, err
	}
	var dweight []float32
	if width > d.c.HiddenSize {
		if dweight, err = xpu.Numbers(ctx, d.dev, m.ws.dweight, &d.host.weights); err != nil {
			return nil, err
		}
	}
	back := xpu.HostBuffer(memory, &d.host.received)
	m.split(n, operands{dst: back, x: dweight, y: rows, ways: way, width: width},
		func(m *Model, o *operands, _, lo, hi int) {
			h, k := m.cfg.HiddenSize, m.cfg.ExpertsPerToken
			for t := lo; t < hi; t++ {
				row := o.dst[t*o.width:][:o.width]
				clear(row)
				for j, r := range o.ways.rowOf[t*k:][:k] {
					if r < 0 {
						continue
					}
					cpu.Axpy(row[:h], 1, o.y[int(r)*h:][:h])
					if o.width > h {
						row[h+j] += o.x[r]
					}
				}
			}
		})
	return back, nil
}

// room sets the length of *memory, in host memory, to n and returns it. Its contents are lost if it
// has to grow.
func room[E any](memory *[]E, n int) []E {
	if n > cap(*memory) {
		*memory = nil // so that it can be collected before the new allocation
		*memory = make([]E, n)
	}
	*memory = (*memory)[:n]
	return *memory
}

// choices are the router's scores and choices, on the host.
type choices struct {
	chosen            []int32   // [T, perToken]
	dropped           []bool    // [T, perToken] the expert does not compute the token; nil: none
	probs             []float32 // [T, experts]
	experts, perToken int
	kind              xpu.RouterKind
}

func (c choices) tokens() int { return len(c.chosen) / c.perToken }

// drops reports whether the expert of a choice does not compute the token.
func (c choices) drops(choice int) bool { return len(c.dropped) > 0 && c.dropped[choice] }

// encode writes the choices of a token in the format that is sent: K experts, -1 for a dropped
// choice, then K weights.
func (c choices) encode(dst []int32, t int) {
	k := c.perToken
	copy(dst[:k], c.chosen[t*k:])
	probs := c.probs[t*c.experts:][:c.experts]
	sum, factor := cpu.RoutingDivisor(c.kind, probs, dst[:k]), c.kind.Factor()
	for j, e := range dst[:k] {
		dst[k+j] = int32(math.Float32bits(probs[e] / sum * factor))
		if c.drops(t*k + j) {
			dst[j] = -1
		}
	}
}

// scale multiplies row bounds by the row width.
func scale(dst, bounds []int, width int) []int {
	for i, b := range bounds {
		dst[i] = b * width
	}
	return dst
}
