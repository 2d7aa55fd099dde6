// Roofline computes the time that a training step of the Mula models takes on a tile of Ponte
// Vecchio, kernel by kernel, from the figures of the hardware:
//
//	go run ./benchmarks/roofline [-table FILE]
//
// With -table it replaces the tables between two marks in the file. It measures nothing.
package main

import (
	"flag"
	"fmt"
	"log"
	"strings"

	"mula/internal/atomicfile"
	"mula/moe"
)

const (
	tableBegin = "<!-- go run ./benchmarks/roofline writes this -->\n"
	tableEnd   = "<!-- up to here -->\n"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("roofline: ")
	table := flag.String("table", "", "replace the tables in `FILE`")
	flag.Parse()
	text, err := tables()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(text)
	if *table != "" {
		if err := atomicfile.ReplaceBetween(*table, tableBegin, tableEnd, text); err != nil {
			log.Fatal(err)
		}
	}
}

// Rates of one tile, per second; see docs/reference/roofline.md.
const (
	peak          = 419.5e12 // bf16 FLOP
	vectorPeak    = 26e12    // fp32 FLOP
	bandwidth     = 1.64e12  // bytes
	measured      = 273e12   // bf16 FLOP of large products, on Aurora
	vectorRate    = 23e12
	bandwidthRate = 1.0e12
	xeCores       = 64
)

// A step is the work of one tile: micro-batches of tokens through all layers of a model.
type step struct {
	name           string
	model          string
	tokens, passes int  // tokens of a micro-batch, and micro-batches of a step
	sequence       int  // tokens of a sequence
	expertParallel int  // tiles that share the experts of a layer
	dataParallel   int  // tiles that share the optimizer's state of a weight
	headTokens     int  // tokens of a block of logits
	portable       bool // attention without dpas
	packed         bool // the compiler has no 2D block loads, so products read packed operands
	halfWeights    bool // weights are bfloat16 in memory, as in bf16_mixed
}

// A kernel is a line of a table.
type kernel struct {
	name         string
	count        float64 // launches in a step
	flops, bytes float64 // of one launch
	// launches that do not read the result of an earlier launch, and the bytes that they save
	firsts, unread float64
	// the largest fraction of the peak, and the fraction of the Xe-cores with work; 0 means 1
	ceiling, occupancy float64
	vector             bool // float32 on vector engines
}

func (k kernel) seconds() (floor, expected float64) {
	most, rate := peak, measured
	if k.vector {
		most, rate = vectorPeak, vectorRate
	}
	if k.ceiling > 0 {
		rate = min(rate, k.ceiling*most)
	}
	if k.occupancy > 0 {
		rate *= k.occupancy
	}
	launches := func(n, bytes float64) {
		floor += n * max(k.flops/most, bytes/bandwidth)
		expected += n * max(k.flops/rate, bytes/bandwidthRate)
	}
	launches(k.count-k.firsts, k.bytes)
	launches(k.firsts, k.bytes-k.unread)
	return floor, expected
}

// totalBytes returns the bytes of all launches.
func (k kernel) totalBytes() float64 { return k.count*k.bytes - k.firsts*k.unread }

// groupRows and groupColumns are the size of a work-group's tile of a product.
const groupRows, groupColumns = 128, 256

// occupied returns the share of the Xe-cores that have a work-group of a product, if it has few.
func occupied(rows, columns float64, matrices int) float64 {
	over := func(n float64, by int) float64 { return float64((int(n) + by - 1) / by) }
	return min(1, over(rows, groupRows)*over(columns, groupColumns)*float64(matrices)/xeCores)
}

// Clocks of the engine in a turn of the loop of an attention kernel, for heads of 128 dimensions:
// of dpas, and of all other instructions of most turns (benchmarks/pvc.md). If nothing overlaps,
// dpas has this share of the time.
const (
	dpasClocks         = 8
	attendShare        = 128. * dpasClocks / (128*dpasClocks + 769)
	gradQueriesShare   = 96. * dpasClocks / (96*dpasClocks + 491)
	gradKeysShare      = 64. * dpasClocks / (64*dpasClocks + 396)
	gradQueriesProduct = 3
	gradKeysProduct    = 4
)

// The same in two steps of the products that read operands as they are in memory, of a compiler
// with 2D block loads: forward (NT), to inputs (NN), to weights (TN).
const (
	forwardShare  = 32. * dpasClocks / (32*dpasClocks + 69)
	backwardShare = 32. * dpasClocks / (32*dpasClocks + 48)
	gradientShare = 32. * dpasClocks / (32*dpasClocks + 174)
	packedShare   = 32. * dpasClocks / (32*dpasClocks + 51) // of packed operands
)

// ceiling returns the largest fraction of the peak of a product, from the end of its name.
func (s step) ceiling(product string) float64 {
	switch {
	case s.packed:
		return packedShare
	case strings.HasSuffix(product, "to weights"):
		return gradientShare
	case strings.HasSuffix(product, "to inputs"):
		return backwardShare
	}
	return forwardShare
}

// kernels returns the kernels of a step.
func (s step) kernels() ([]kernel, error) {
	c, err := moe.Preset(s.model)
	if err != nil {
		return nil, err
	}
	t, h, q, kv := float64(s.tokens), float64(c.HiddenSize), float64(c.QueryWidth()), float64(c.KVWidth())
	i, experts := float64(c.IntermediateSize), float64(c.Experts)
	r := t * float64(c.ExpertsPerToken) // rows of experts: a tile receives as many as it sends
	local := c.Experts / s.expertParallel
	weights := float64(local)
	keys := float64(s.sequence)/2 + 40 // of a query, the mean, with the hidden keys of its last tile
	layers, passes := float64(c.Layers*s.passes), float64(s.passes)
	var all []kernel
	add := func(name string, bytes float64) { all = append(all, kernel{name: name, count: layers, bytes: bytes}) }
	// pack adds the packing of operands that are bfloat16 in memory.
	pack := func(name string, bytes float64) {
		if s.packed {
			add(name, bytes)
		}
	}
	// multiply adds a product m×n of k terms, of operands of bfloat16: of rows in groups, each with
	// its matrix, or of several matrices.
	multiply := func(name string, m, n, k, matrices, bytes float64, groups int) {
		rows := m
		if groups > 1 {
			rows = m / float64(groups)
		}
		all = append(all, kernel{name: name, count: layers, flops: 2 * m * n * k * matrices, bytes: bytes,
			ceiling: s.ceiling(name), occupancy: occupied(rows, n, max(groups, int(matrices)))})
	}
	// gradient adds the product of a gradient of `matrices` matrices m×n over k tokens. The first
	// micro-batch writes it, and others add to it.
	gradient := func(name string, m, n, k, matrices, operands float64) {
		multiply(name, m, n, k, matrices, operands+8*matrices*m*n, 1)
		product := &all[len(all)-1]
		product.firsts, product.unread = float64(c.Layers), 4*matrices*m*n
	}
	wide := q + 2*kv

	// Forward.
	add("norm, rounded", 6*t*h)
	pack("pack input, q, k, v", 4*t*h)
	multiply("q, k, v", t, wide, h, 1, 2*t*h+2*h*wide+4*t*wide, 1)
	add("split heads", 8*t*wide)
	if s.portable {
		all = append(all, kernel{name: "attention, fp32", count: layers, flops: 4 * t * keys * q, vector: true})
	} else {
		add("pack q, k, v", 6*t*wide)
		all = append(all, kernel{name: "attention", count: layers, flops: 4 * t * keys * q, bytes: 2*t*wide + 4*t*q,
			ceiling: attendShare})
	}
	add("copy of the residual stream", 8*t*h)
	add("round context", 6*t*q)
	multiply("output projection", t, h, q, 1, 2*t*q+2*q*h+8*t*h, 1)
	add("norm", 8*t*h)
	add("round input, router", 6*t*h)
	multiply("router", t, experts, h, 1, 2*t*h+2*experts*h+4*t*experts, 1)
	add("choose, count and sort experts", 12*t*experts+16*r)
	add("gather to expert order", 4*t*h+2*r*h)
	pack("pack, R×H", 4*r*h)
	multiply("gate/up", r, 2*i, h, 1, 2*r*h+4*weights*i*h+8*r*i, local)
	add("SwiGLU", 10*r*i)
	pack("pack, R×I", 4*r*i)
	multiply("down", r, h, i, 1, 2*r*i+2*weights*i*h+4*r*h, local)
	add("combine", 4*r*h+8*t*h)

	// Backward.
	add("gather of the gradient", 4*t*h+2*r*h)
	pack("pack, R×H", 4*r*h)
	multiply("down to inputs", r, i, h, 1, 2*r*h+2*weights*i*h+4*r*i, local)
	add("SwiGLU backward", 18*r*i)
	pack("pack, R×2I", 8*r*i)
	multiply("gate/up to inputs", r, h, 2*i, 1, 4*r*i+4*weights*i*h+4*r*h, local)
	add("combine of the gradient", 4*r*h+4*t*h)
	pack("pack, R×(H+I)", 4*r*(h+i))
	gradient("down to weights", h, i, r/weights, weights, 2*r*(h+i))
	add("gather again", 4*t*h+2*r*h)
	pack("pack, R×(2I+H)", 4*r*(2*i+h))
	gradient("gate/up to weights", 2*i, h, r/weights, weights, 2*r*(2*i+h))
	add("router's gradient, with rounding", 12*t*experts+6*t*(2*experts+h))
	multiply("router to inputs", t, h, experts, 1, 2*t*experts+2*experts*h+8*t*h, 1)
	gradient("router to weights", experts, h, t, 1, 2*t*(experts+h))
	add("norm backward, twice", 32*t*h)
	add("norm again, twice", 14*t*h)
	add("round gradient twice, context", 6*t*(2*h+q))
	multiply("output projection to inputs", t, q, h, 1, 2*t*h+2*q*h+4*t*q, 1)
	gradient("output projection to weights", h, q, t, 1, 2*t*(h+q))
	if s.portable {
		all = append(all, kernel{name: "attention backward, fp32", count: layers, flops: 14 * t * keys * q,
			vector: true})
	} else {
		add("pack q and dO 3 times, k 3 times, v 2 times", 36*t*q+30*t*kv)
		all = append(all,
			kernel{name: "attention to queries", count: layers, flops: 2 * gradQueriesProduct * t * keys * q,
				bytes: 4*t*q + 6*t*kv + 12*t*q, ceiling: gradQueriesShare},
			kernel{name: "attention to keys and values", count: layers, flops: 2 * gradKeysProduct * t * keys * q,
				bytes: 8*t*q + 4*t*kv + 8*t*kv, ceiling: gradKeysShare})
	}
	add("join heads", 12*t*wide)
	if s.packed {
		add("pack gradient twice, input", 6*2*t*wide+4*t*h)
	} else {
		add("round gradient in place", 6*t*wide)
	}
	multiply("q, k, v to inputs", t, h, wide, 1, 2*t*wide+2*h*wide+4*t*h, 1)
	gradient("q, k, v to weights", wide, h, t, 1, 2*t*(wide+h))

	// Once a micro-batch.
	vocabulary, blocks := float64(c.VocabSize), float64((s.tokens+s.headTokens-1)/s.headTokens)
	b := t / blocks
	head := func(k kernel) { k.count = blocks * passes; all = append(all, k) }
	head(kernel{name: "round hidden states, logits", bytes: 6 * b * h})
	product := func(name string, m, n, bytes float64) {
		head(kernel{name: name, flops: 2 * b * vocabulary * h, bytes: bytes, ceiling: s.ceiling(name),
			occupancy: occupied(m, n, 1)})
	}
	product("logits", b, vocabulary, 2*b*h+2*vocabulary*h+4*b*vocabulary)
	head(kernel{name: "cross entropy and its gradient", bytes: 12 * b * vocabulary})
	head(kernel{name: "round gradient of logits twice, hidden states", bytes: 6 * b * (2*vocabulary + h)})
	product("logits to inputs", b, h, 2*b*vocabulary+2*vocabulary*h+4*b*h)
	product("logits to weights", vocabulary, h, 2*b*(vocabulary+h)+8*vocabulary*h)
	last := &all[len(all)-1] // the first block of a step writes the gradient
	last.firsts, last.unread = 1, 4*vocabulary*h
	all = append(all, kernel{name: "embedding, final norm, and their gradients", count: passes, bytes: 56 * t * h})

	// Once a step.
	of := float64(c.Layers) * (h*wide + q*h + h*experts + 3*weights*h*i)
	once := func(name string, bytes float64) { all = append(all, kernel{name: name, count: 1, bytes: bytes}) }
	switch products := of + vocabulary*h; {
	case s.packed && s.halfWeights:
		once("pack weights, two layouts", 8*products)
	case s.packed:
		once("pack weights, two layouts", 12*products)
	case !s.halfWeights:
		once("round weights", 6*products)
	}
	once("zero the embedding's gradient", 4*vocabulary*h)
	once("norm of the gradients that the tile owns", 4*(of+2*vocabulary*h)/float64(s.dataParallel))
	once("AdamW of the weights that the tile owns", 28*(of+2*vocabulary*h)/float64(s.dataParallel))
	return all, nil
}

// A total is the sum of the kernels of a step.
type total struct {
	floor, expected float64 // seconds
	model           float64 // FLOPs of the model, as [moe.Config.FLOPsPerToken] counts them
	causal          float64 // the same without keys that a query does not see
}

func (s step) total() (total, error) {
	var sum total
	c, err := moe.Preset(s.model)
	if err != nil {
		return sum, err
	}
	all, err := s.kernels()
	for _, k := range all {
		floor, expected := k.seconds()
		sum.floor += floor
		sum.expected += expected
	}
	tokens := float64(s.tokens * s.passes)
	hidden := 6 * float64(c.Layers) * float64(s.sequence) * float64(c.QueryWidth()) // half of the scores
	sum.model = c.FLOPsPerToken(s.sequence) * tokens
	sum.causal = sum.model - hidden*tokens
	return sum, err
}

var steps = []step{
	{name: "7B", model: "mula-7b-a1b", tokens: 8192, passes: 1, sequence: 2048, expertParallel: 1, dataParallel: 3072,
		headTokens: 2048},
	{name: "20B", model: "mula-20b-a2b", tokens: 4096, passes: 2, sequence: 2048, expertParallel: 12, dataParallel: 256,
		headTokens: 2048},
	{name: "220B", model: "mula-220b-a10b", tokens: 4096, passes: 2, sequence: 2048, expertParallel: 12,
		dataParallel: 32, headTokens: 2048},
}

// tables returns a table of all kernels of all steps, and a table of the totals.
func tables() (string, error) {
	var b strings.Builder
	b.WriteString("\n| kernel |")
	var columns [][]kernel
	for _, s := range steps {
		all, err := s.kernels()
		if err != nil {
			return "", err
		}
		columns = append(columns, all)
		fmt.Fprintf(&b, " %s: TFLOP | GB | floor, ms | expected, ms |", s.name)
	}
	b.WriteString("\n|---|" + strings.Repeat("---|---|---|---|", len(steps)) + "\n")
	for i, k := range columns[0] {
		fmt.Fprintf(&b, "| %s |", k.name)
		for _, all := range columns {
			k := all[i]
			floor, expected := k.seconds()
			flops := ""
			if k.flops > 0 {
				flops = fmt.Sprintf("%.2f", k.count*k.flops/1e12)
			}
			fmt.Fprintf(&b, " %s | %.1f | %.1f | %.1f |", flops, k.totalBytes()/1e9, 1e3*floor, 1e3*expected)
		}
		b.WriteString("\n")
	}
	b.WriteString("\n| step of a tile | TFLOP of the model | floor, ms | expected, ms | share of peak at the floor " +
		"| expected share | with the FLOPs of `mula estimate` |\n|---|---|---|---|---|---|---|\n")
	for _, s := range steps {
		for _, variant := range []struct {
			name string
			step step
		}{
			{"bf16, attention without dpas", s.with(func(s *step) { s.portable = true })},
			{"bf16, without 2D block loads", s.with(func(s *step) { s.packed = true })},
			{"bf16, logits in blocks of 256 tokens", s.with(func(s *step) { s.headTokens = 256 })},
			{"bf16", s},
			{"bf16_mixed, logits in blocks of 256 tokens",
				s.with(func(s *step) { s.headTokens, s.halfWeights = 256, true })},
			{"bf16_mixed", s.with(func(s *step) { s.halfWeights = true })},
		} {
			sum, err := variant.step.total()
			if err != nil {
				return "", err
			}
			fmt.Fprintf(&b, "| %s: %s | %.1f | %.0f | %.0f | %.1f %% | %.1f %% | %.1f %% |\n", s.name, variant.name,
				sum.causal/1e12, 1e3*sum.floor, 1e3*sum.expected, 100*sum.causal/sum.floor/peak,
				100*sum.causal/sum.expected/peak, 100*sum.model/sum.expected/peak)
		}
	}
	b.WriteString("\n")
	return b.String(), nil
}

// with returns the step with a change.
func (s step) with(change func(s *step)) step {
	change(&s)
	return s
}
