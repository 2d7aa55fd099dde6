// Orders compares the orders in which loaders draw the windows of the same shards, by the
// statistics of mula simulate. It prints a row of a Markdown table for each order.
// benchmarks/orders.py records the orders of other loaders and runs it.
//
//	go run ./benchmarks/orders PLAN.json [NAME=FILE]...
//
// The plan has one source. FILE has the window at each position: little-endian i64, numbered
// through the shards of the source. Without files, the plan's own order is examined.
package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"iter"
	"os"
	"strings"

	"mula/blend"
	"mula/blend/simulate"
	"mula/index"
	"mula/internal/quantity"
)

// batch is the number of samples of a step.
const batch = 512

func main() {
	if err := compare(context.Background(), os.Args[1:]); err != nil {
		fmt.Fprintf(os.Stderr, "orders: %v\n", err)
		os.Exit(1)
	}
}

func compare(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("the arguments are PLAN.json [NAME=FILE]...; name a plan")
	}
	p, err := blend.ReadPlan(args[0])
	if err != nil {
		return err
	}
	data, err := blend.Open(ctx, p, blend.OpenOptions{Unread: true})
	if err != nil {
		return err
	}
	defer data.Close()
	if len(p.Sources) != 1 {
		return fmt.Errorf("%s has %d sources; use a plan with one", args[0], len(p.Sources))
	}
	if len(args) == 1 {
		return examine(ctx, "mula, order "+p.OrderVersion(), data, nil)
	}
	for _, arg := range args[1:] {
		name, file, _ := strings.Cut(arg, "=")
		order, err := read(file, p)
		if err != nil {
			return err
		}
		if err := examine(ctx, name, data, order); err != nil {
			return err
		}
	}
	return nil
}

// A recorded order has the window at each position.
type recorded struct {
	numbers []int64
	windows *index.Windows
}

func read(path string, p *blend.Plan) (*recorded, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var tokens []int64
	for _, s := range p.Sources[0].Shards {
		tokens = append(tokens, s.Tokens)
	}
	r := &recorded{}
	if r.windows, err = index.NewWindows(p.SequenceLength, tokens); err != nil {
		return nil, err
	}
	r.numbers = make([]int64, min(int64(len(raw)/8), p.Length()))
	for i := range r.numbers {
		r.numbers[i] = int64(binary.LittleEndian.Uint64(raw[8*i:]))
		if w := r.numbers[i]; w < 0 || w >= r.windows.Count() {
			return nil, fmt.Errorf("%s: position %d has window %d; the source has %d", path, i, w, r.windows.Count())
		}
	}
	return r, nil
}

// Locate implements [simulate.Order].
func (r *recorded) Locate(position int64) (blend.Sample, error) {
	w := r.numbers[position]
	shard, token := r.windows.Locate(w)
	return blend.Sample{Position: position, Window: w, Shard: shard, Token: token}, nil
}

// Positions implements [simulate.Order].
func (r *recorded) Positions(_ context.Context, from, to int64) iter.Seq2[blend.Block, error] {
	return func(yield func(blend.Block, error) bool) {
		yield(blend.Block{First: from, Sources: make([]int32, to-from), Windows: r.numbers[from:to]}, nil)
	}
}

// examine prints the statistics of an order. nil is the plan's order.
func examine(ctx context.Context, name string, data *blend.Data, order *recorded) error {
	o := simulate.Options{BatchSize: batch, Nodes: 1, Storage: simulate.Kinds[0], Data: data,
		To: data.Length() / batch * batch}
	if order != nil {
		o.Order, o.To = order, int64(len(order.numbers))/batch*batch
	}
	r, err := simulate.Run(ctx, nil, o)
	if err != nil {
		return err
	}
	s, m := r.Shuffle.Sources[0], r.Mixture.Sources[0]
	count := func(c simulate.Count) string {
		return fmt.Sprintf("%s (%.3g)", quantity.Grouped(c.Seen), c.Expected)
	}
	fmt.Printf("| %s | %s | %.4f (%+.1f) | %.4f (%+.1f) | %s | %s | %s | %s | %.2f |\n", name,
		quantity.Grouped(s.Samples), s.Distance, s.DistanceOff, s.Parity, s.ParityOff, count(s.Adjacent),
		count(s.SameShard), count(s.SameDocument), count(s.BatchDocument), m.Unevenness)
	return nil
}
