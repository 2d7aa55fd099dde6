package moe

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"mula/xpu"
)

// reference is a plain float64 forward pass, written from the formulas one token at a time; it
// shares nothing with the model but the names and sizes of its weights.
type reference struct {
	c           Config
	weights     map[string][]float64
	predictions int // layers of multi-token prediction that losses computes
}

func newReference(m *Model) *reference {
	r := &reference{m.cfg, map[string][]float64{}, m.cfg.PredictionLayers}
	for _, p := range m.params {
		w := make([]float64, p.Weight.Elements())
		for i, v := range p.Weight.Floats() {
			w[i] = float64(v)
		}
		r.weights[p.Name] = w
	}
	return r
}

// losses are the terms of a training loss, and the routing that they rest on.
type losses struct {
	ce, hf, megablocks, sequence, z float64
	chosen                          []int
	entropy                         []float64 // of each layer
	dropped                         []float64 // of each layer, as a fraction of the choices of experts
	predictions                     []float64 // sum of the cross entropies of each layer of multi-token prediction
}

// times is W·x for the weight of that name, stored [out, in].
func (r *reference) times(name string, x []float64) []float64 {
	w, ok := r.weights[name]
	if !ok {
		panic("no weight " + name)
	}
	y := make([]float64, len(w)/len(x))
	for o := range y {
		row, a, b := w[o*len(x):][:len(x)], 0.0, 0.0
		for i := 0; i+1 < len(row); i += 2 {
			a += row[i] * x[i]
			b += row[i+1] * x[i+1]
		}
		y[o] = a + b // all widths are even
	}
	return y
}

func (r *reference) norm(name string, x []float64) []float64 {
	return r.normOf(name, x, r.c.NormEps)
}

func (r *reference) normOf(name string, x []float64, epsilon float64) []float64 {
	n := float64(len(x))
	mean, square := 0.0, 0.0
	for _, v := range x {
		mean += v / n
		square += v * v / n
	}
	y := make([]float64, len(x))
	for i, v := range x {
		if r.c.Architecture == OLMo {
			y[i] = (v - mean) / math.Sqrt(square-mean*mean+1e-5)
		} else {
			y[i] = r.weights[name][i] * v / math.Sqrt(square+epsilon)
		}
	}
	return y
}

// projection is q, k or v of one token: projection, bias, norm, clipping, as far as the model has
// them.
func (r *reference) projection(prefix, which string, h []float64) []float64 {
	y := r.times(prefix+which+"_proj.weight", h)
	if bias, ok := r.weights[prefix+which+"_proj.bias"]; ok {
		addTo(y, bias, 1)
	}
	if (r.c.Architecture == OLMoE || r.c.Architecture == FlexOLMo) && which != "v" {
		y = r.norm(prefix+which+"_norm.weight", y)
	}
	if r.c.Architecture == Qwen3MoE && which != "v" {
		for head := 0; head < len(y); head += r.c.HeadDim() {
			copy(y[head:], r.norm(prefix+which+"_norm.weight", y[head:head+r.c.HeadDim()]))
		}
	}
	if c := r.c.ClipQKV; c > 0 {
		for i := range y {
			y[i] = math.Max(-c, math.Min(c, y[i]))
		}
	}
	return y
}

func (r *reference) turn(x []float64, position int) {
	d := r.c.HeadDim()
	for j := range d / 2 {
		sin, cos := math.Sincos(float64(position) * math.Pow(r.c.RopeTheta, -2*float64(j)/float64(d)))
		first, second := j, j+d/2
		if r.c.Architecture == Ernie45MoE {
			first, second = 2*j, 2*j+1
		}
		for head := 0; head < len(x); head += d {
			a, b := x[head+first], x[head+second]
			x[head+first] = a*cos - b*sin
			x[head+second] = b*cos + a*sin
		}
	}
}

// latent is the heads of queries, keys and values of one token at a position, with latent attention
// and interleaved rotated elements.
func (r *reference) latent(prefix string, h []float64, position int) (q, k, v []float64) {
	c := r.c
	plain, turned, values := c.PlainSize, c.RotatedSize, c.ValueSize
	turn := func(x []float64) []float64 {
		y := slices.Clone(x)
		for j := range turned / 2 {
			sin, cos := math.Sincos(float64(position) * math.Pow(c.RopeTheta, -2*float64(j)/float64(turned)))
			y[2*j], y[2*j+1] = x[2*j]*cos-x[2*j+1]*sin, x[2*j+1]*cos+x[2*j]*sin
		}
		return y
	}
	all := r.times(prefix+"q_b_proj.weight", r.normOf(prefix+"q_a_layernorm.weight",
		r.times(prefix+"q_a_proj.weight", h), 1e-6))
	compressed := r.times(prefix+"kv_a_proj_with_mqa.weight", h)
	shared := turn(compressed[c.KVRank:])
	kv := r.times(prefix+"kv_b_proj.weight", r.normOf(prefix+"kv_a_layernorm.weight", compressed[:c.KVRank], 1e-6))
	for a := range c.Heads {
		head, both := all[a*(plain+turned):][:plain+turned], kv[a*(plain+values):][:plain+values]
		q = append(append(q, head[:plain]...), turn(head[plain:])...)
		k = append(append(k, both[:plain]...), shared...)
		v = append(v, both[plain:]...)
	}
	return q, k, v
}

// choose returns the experts of a token, their weights and its distribution, for the logits of a
// router with sigmoids.
func (r *reference) choose(prefix string, z []float64) (chosen []int, weights, p []float64) {
	c := r.c
	keys, total := make([]float64, len(z)), 0.0
	for e, v := range z {
		p = append(p, 1/(1+math.Exp(-v)))
		keys[e] = p[e] + r.weights[prefix+"gate.e_score_correction_bias"][e]
		total += p[e]
	}
	size := c.Experts / c.Groups
	value := func(g int) float64 {
		own := slices.Sorted(slices.Values(keys[g*size:][:size]))
		return own[size-1] + own[size-2]
	}
	var groups []int
	for g := range c.Groups {
		groups = append(groups, g)
	}
	slices.SortStableFunc(groups, func(a, b int) int { return -cmpFloat(value(a), value(b)) })
	for _, g := range groups[:c.TopGroups] {
		for e := range size {
			chosen = append(chosen, g*size+e)
		}
	}
	slices.SortFunc(chosen, func(a, b int) int { return -cmpFloat(keys[a], keys[b]) })
	chosen = chosen[:c.ExpertsPerToken]
	sum := 1.0
	if c.NormTopK {
		sum = 0
		for _, e := range chosen {
			sum += p[e]
		}
	}
	for _, e := range chosen {
		weights = append(weights, p[e]/sum*c.RoutingScale)
	}
	for e := range p {
		p[e] /= total
	}
	return chosen, weights, p
}

func (r *reference) mlp(prefix string, x []float64) []float64 {
	a, b := r.times(prefix+"gate_proj.weight", x), r.times(prefix+"up_proj.weight", x)
	if r.c.Architecture == GPTOSS {
		addTo(a, r.weights[prefix+"gate_proj.bias"], 1)
		addTo(b, r.weights[prefix+"up_proj.bias"], 1)
		for i, gate := range a {
			gate = min(gate, 7)
			a[i] = gate / (1 + math.Exp(-1.702*gate)) * (1 + max(-7, min(7, b[i])))
		}
		y := r.times(prefix+"down_proj.weight", a)
		addTo(y, r.weights[prefix+"down_proj.bias"], 1)
		return y
	}
	for i := range a {
		a[i] = a[i] / (1 + math.Exp(-a[i])) * b[i]
	}
	return r.times(prefix+"down_proj.weight", a)
}

func softmax64(x []float64) (p []float64, lse float64) {
	top := slices.Max(x)
	sum := 0.0
	for _, v := range x {
		sum += math.Exp(v - top)
	}
	lse = top + math.Log(sum)
	for _, v := range x {
		p = append(p, math.Exp(v-lse))
	}
	return p, lse
}

func addTo(x, y []float64, f float64) {
	for i := range x {
		x[i] += f * y[i]
	}
}

func (r *reference) losses(b Batch) losses {
	c := r.c
	h, d, values := c.HiddenSize, c.HeadDim(), c.HeadDim() // d and values: elements of a head
	if c.latent() {
		d, values = c.queryElements(), c.ValueSize
	}
	head := "lm_head.weight"
	if c.TieEmbeddings {
		head = "model.embed_tokens.weight"
	}
	embeddings, scoring, blocks, divisor := 1.0, 1/math.Sqrt(float64(d)), 1.0, 1.0
	if c.Architecture == GraniteMoE {
		embeddings, scoring = c.EmbeddingMultiplier, c.AttentionMultiplier
		blocks, divisor = c.ResidualMultiplier, c.LogitsScaling
	}
	tokens := float64(b.Rows * b.SequenceLength)
	layers := c.Layers + r.predictions
	sparse := len(c.ExpertLayers(0, layers))
	n := tokens * float64(sparse)
	targets := 0.0
	for t := range b.Rows * b.SequenceLength {
		if b.Counted == nil || b.Counted[t] {
			targets++
		}
	}
	var out losses
	counts, probs := make([][]float64, layers), make([][]float64, layers)
	for l := range layers {
		counts[l], probs[l] = make([]float64, c.Experts), make([]float64, c.Experts)
	}
	out.entropy, out.predictions = make([]float64, layers), make([]float64, r.predictions)
	out.dropped = make([]float64, layers)
	// before is the norm of a block's input, and behind the norm of its output; a model has one.
	after := c.Architecture == FlexOLMo
	before := func(name string, x []float64) []float64 {
		if after {
			return x
		}
		return r.norm(name, x)
	}
	behind := func(name string, y []float64) []float64 {
		if after {
			return r.norm(name, y)
		}
		return y
	}
	for row := range b.Rows {
		ids := b.Tokens[row*(b.SequenceLength+1):][:b.SequenceLength+1]
		rowCounts, rowProbs := make([][]float64, layers), make([][]float64, layers)
		for l := range layers {
			rowCounts[l], rowProbs[l] = make([]float64, c.Experts), make([]float64, c.Experts)
		}
		x := make([][]float64, b.SequenceLength)
		for t := range x {
			x[t] = make([]float64, h)
			addTo(x[t], r.weights["model.embed_tokens.weight"][int(ids[t])*h:][:h], embeddings)
		}
		decode := func(l int, x [][]float64) {
			layer := fmt.Sprintf("model.layers.%d.", l)
			q, k, v := make([][]float64, len(x)), make([][]float64, len(x)), make([][]float64, len(x))
			for t := range x {
				in := before(layer+"input_layernorm.weight", x[t])
				if c.latent() {
					q[t], k[t], v[t] = r.latent(layer+"self_attn.", in, t)
					continue
				}
				q[t], k[t], v[t] = r.projection(layer+"self_attn.", "q", in), r.projection(layer+"self_attn.", "k",
					in), r.projection(layer+"self_attn.", "v", in)
				r.turn(q[t], t)
				r.turn(k[t], t)
			}
			for t := range x {
				context := make([]float64, c.Heads*values)
				for a := range c.Heads {
					g := a / (c.Heads / c.KVHeads)
					begin := 0
					if b.Begin != nil {
						begin = int(b.Begin[row*b.SequenceLength+t])
					}
					if c.SlidingWindow > 0 && l >= c.MaxWindowLayers && (c.Architecture != GPTOSS || l%2 == 0) {
						begin = max(begin, t-c.SlidingWindow+1)
					}
					scores := make([]float64, t+1-begin)
					for s := range scores {
						for j := range d {
							scores[s] += q[t][a*d+j] * k[begin+s][g*d+j] * scoring
						}
					}
					p := scores
					if c.Architecture == GPTOSS {
						p = append(p, r.weights[layer+"self_attn.sinks"][a])
					}
					p, _ = softmax64(p)
					for s := range scores {
						addTo(context[a*values:(a+1)*values], v[begin+s][g*values:(g+1)*values], p[s])
					}
				}
				y := r.times(layer+"self_attn.o_proj.weight", context)
				if bias, ok := r.weights[layer+"self_attn.o_proj.bias"]; ok {
					addTo(y, bias, 1)
				}
				addTo(x[t], behind(layer+"post_attention_layernorm.weight", y), blocks)
			}
			for t := range x {
				in := before(layer+"post_attention_layernorm.weight", x[t])
				if b.Jitter.On && c.HasExperts(l) {
					j := xpu.Jitter{Epsilon: float32(c.RouterJitter), Seed: xpu.Mix64(b.Jitter.Seed + uint64(l))}
					in = slices.Clone(in)
					for i := range in {
						in[i] *= float64(j.Factor(int32(b.Jitter.First)+int32(row*b.SequenceLength+t), i))
					}
				}
				if c.Dense() || c.DenseLayers.Has(l) {
					addTo(x[t], behind(layer+"post_feedforward_layernorm.weight", r.mlp(layer+"mlp.", in)), 1)
					continue
				}
				names := c.family().blockNames()
				router := layer + names.block + "." + names.router
				place := layer + names.block
				y, logits := make([]float64, h), r.times(router+".weight", in)
				if c.Architecture == GPTOSS {
					addTo(logits, r.weights[router+".bias"], 1)
				}
				p, lse := softmax64(logits)
				var chosen []int
				var weights []float64
				if c.HasSigmoidRouter() {
					chosen, weights, p = r.choose(layer+"mlp.", logits)
					lse = 0 // without a z-loss
					addTo(y, r.mlp(layer+"mlp.shared_experts.", in), 1)
				}
				addTo(rowProbs[l], p, 1)
				out.z += lse * lse / (n * float64(c.ExpertsPerToken))
				addTo(probs[l], p, 1)
				for _, v := range p {
					out.entropy[l] -= v * math.Log(v) / tokens
				}
				if c.Architecture == Qwen2MoE {
					gate := r.times(layer+"mlp.shared_expert_gate.weight", in)[0]
					addTo(y, r.mlp(layer+"mlp.shared_expert.", in), 1/(1+math.Exp(-gate)))
				}
				switch {
				case c.Architecture == Ernie45MoE:
					keys, total := slices.Clone(p), 0.0
					addTo(keys, r.weights[layer+"mlp.moe_statics.e_score_correction_bias"], 1)
					chosen, _ = largestOf(keys, c.ExpertsPerToken, false)
					for _, e := range chosen {
						total += p[e]
					}
					for _, e := range chosen {
						weights = append(weights, p[e]/total)
					}
					addTo(y, r.mlp(layer+"mlp.shared_experts.", in), 1)
				case !c.HasSigmoidRouter():
					chosen, weights = largestOf(p, c.ExpertsPerToken, c.NormTopK)
				}
				for i, e := range chosen {
					out.chosen = append(out.chosen, e)
					counts[l][e]++
					rowCounts[l][e]++
					most := float64(b.SequenceLength*c.ExpertsPerToken) / float64(c.Experts) * c.ExpertCapacity
					if b.Drop && c.ExpertCapacity > 0 && rowCounts[l][e] > math.Ceil(most) {
						out.dropped[l] += 1 / (tokens * float64(c.ExpertsPerToken))
						continue
					}
					addTo(y, r.mlp(fmt.Sprintf("%s.experts.%d.", place, e), in), weights[i])
				}
				addTo(x[t], behind(layer+"post_feedforward_layernorm.weight", y), blocks)
			}
		}
		for l := range c.Layers {
			decode(l, x)
		}
		normed := make([][]float64, len(x)) // the input of the head
		for t := range x {
			normed[t] = r.norm("model.norm.weight", x[t])
		}
		// loss returns the cross entropy of an input of the head.
		loss := func(x []float64, target uint32) float64 {
			logits := r.times(head, x)
			for i := range logits {
				logits[i] /= divisor
			}
			p, _ := softmax64(logits)
			return -math.Log(p[target])
		}
		inputs := normed
		for k := range r.predictions {
			layer := fmt.Sprintf("model.layers.%d.", c.Layers+k)
			x := make([][]float64, b.SequenceLength)
			for t := range x {
				next := ids[min(t+k+1, b.SequenceLength)]
				embedding := r.weights["model.embed_tokens.weight"][int(next)*h:][:h]
				pair := append(r.norm(layer+"enorm.weight", embedding), r.norm(layer+"hnorm.weight", inputs[t])...)
				x[t] = r.times(layer+"eh_proj.weight", pair)
			}
			decode(c.Layers+k, x)
			inputs = make([][]float64, len(x))
			for t := range x {
				inputs[t] = r.norm(layer+"shared_head.norm.weight", x[t])
				counts := t+k+2 <= b.SequenceLength
				for i := t; counts && i <= t+k+1; i++ {
					at := row*b.SequenceLength + i
					counts = (b.Counted == nil || b.Counted[at]) && (b.Begin == nil || b.Begin[at] == b.Begin[at-i+t])
				}
				if counts {
					out.predictions[k] += loss(inputs[t], ids[t+k+2])
				}
			}
		}
		for l := range layers {
			for e := range c.Experts {
				share := rowCounts[l][e] / (float64(b.SequenceLength) * float64(c.ExpertsPerToken))
				mean := rowProbs[l][e] / float64(b.SequenceLength)
				out.sequence += float64(c.Experts) * share * mean / float64(sparse*b.Rows)
			}
		}
		for t := range x {
			if b.Counted != nil && !b.Counted[row*b.SequenceLength+t] {
				continue
			}
			out.ce += loss(normed[t], ids[t+1]) / targets
		}
	}
	for e := range c.Experts {
		var selected, p float64
		for l := range layers {
			selected += counts[l][e]
			p += probs[l][e]
			out.megablocks += float64(c.Experts) / (n * float64(c.ExpertsPerToken)) * counts[l][e] * probs[l][e] /
				tokens
		}
		out.hf += float64(c.Experts) * selected / n * p / n
	}
	return out
}

// largestOf returns the k largest of p and their weights.
func largestOf(p []float64, k int, renormalize bool) (chosen []int, weights []float64) {
	for e := range p {
		chosen = append(chosen, e)
	}
	slices.SortStableFunc(chosen, func(a, b int) int { return -cmpFloat(p[a], p[b]) })
	chosen = chosen[:k]
	sum := 1.0
	if renormalize {
		sum = 0
		for _, e := range chosen {
			sum += p[e]
		}
	}
	for _, e := range chosen {
		weights = append(weights, p[e]/sum)
	}
	return chosen, weights
}

func cmpFloat(a, b float64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// randomize makes every weight of the model generic: wider than at the start of a training, norms
// not 1.
func randomize(m *Model, seed uint64) {
	m.cfg.InitStd = 0.1
	m.Init(seed)
	r := rand.New(rand.NewPCG(seed, 1))
	for _, p := range m.params {
		if len(p.Shape) == 1 {
			var buffer []float32
			w, err := xpu.Numbers(context.Background(), m.dev, p.Weight, &buffer)
			if err != nil {
				panic(err) // in tests of memory alone
			}
			r := r
			if OfExpert(p.Name) { // ranks may have other experts
				r = namedRandom(seed, p.Name)
			}
			for i := range w {
				w[i] += 0.5 * float32(r.NormFloat64())
			}
			xpu.SetNumbers(m.dev, p.Weight, w)
		}
	}
}

func randomBatch(c Config, rows, s int, seed uint64) Batch {
	r := rand.New(rand.NewPCG(seed, 2))
	b := Batch{Rows: rows, SequenceLength: s}
	for range rows * (s + 1) {
		b.Tokens = append(b.Tokens, r.Uint32N(uint32(c.VocabSize)))
	}
	return b
}

// inDocuments returns a batch whose rows are consecutive documents of the given lengths. The last
// document is padding. Attention stays within each document, and a target counts if it is in the
// document of its input, and is not padding.
func inDocuments(b Batch, lengths ...int) Batch {
	var of []int // the document of each token of a row
	for document, n := range lengths {
		of = append(of, slices.Repeat([]int{document}, n)...)
	}
	b.Begin, b.Counted = nil, nil
	for range b.Rows {
		for i := range b.SequenceLength {
			b.Begin = append(b.Begin, int32(slices.Index(of, of[i])))
			b.Counted = append(b.Counted, of[i+1] == of[i] && of[i] != len(lengths)-1)
		}
	}
	return b
}

// gradientCases are models small enough for central differences.
func gradientCases(t testing.TB) map[string]Config {
	nano := mustPreset(t, "mula-nano")
	gqa := nano
	gqa.VocabSize, gqa.KVHeads, gqa.ClipQKV, gqa.PadTokenID, gqa.NormEps, gqa.NormTopK = 96, 2, 1.2, 5, 1e-2, true
	dense := nano
	dense.Architecture, dense.Experts, dense.ExpertsPerToken, dense.IntermediateSize, dense.RouterAuxLossCoef = OLMo, 0,
		0, 96, 0
	tied := dense
	tied.VocabSize, tied.KVHeads, tied.ClipQKV, tied.TieEmbeddings = 96, 1, 0.6, true
	llama := dense
	llama.Architecture, llama.VocabSize, llama.KVHeads, llama.NormEps = Llama, 96, 2, 1e-3
	qwen2 := llama
	qwen2.Architecture, qwen2.HeadSize, qwen2.SlidingWindow, qwen2.MaxWindowLayers = Qwen2, 24, 3, 1
	qwen3MoE := gqa
	qwen3MoE.Architecture, qwen3MoE.HeadSize, qwen3MoE.ClipQKV = Qwen3MoE, 24, 0
	flexOLMo := qwen3MoE
	flexOLMo.Architecture = FlexOLMo
	qwen3MoE.SlidingWindow = 2
	layers := gqa
	layers.Architecture, layers.ClipQKV, layers.SharedSize = Qwen2MoE, 0, 24
	layers.DenseLayers, layers.DenseSize = "1", 40
	ernie := gqa
	ernie.Architecture, ernie.HeadSize, ernie.ClipQKV, ernie.SharedSize = Ernie45MoE, 24, 0, 2*gqa.IntermediateSize
	ernie.DenseLayers, ernie.DenseSize = "0", 40
	granite := gqa
	granite.Architecture, granite.ClipQKV, granite.TieEmbeddings = GraniteMoE, 0, true
	granite.EmbeddingMultiplier, granite.AttentionMultiplier = 3, 0.2
	granite.ResidualMultiplier, granite.LogitsScaling, granite.AttentionBias = 0.4, 2.5, true
	gptOSS := gqa
	gptOSS.Architecture, gptOSS.HeadSize, gptOSS.ClipQKV, gptOSS.SlidingWindow = GPTOSS, 24, 0, 2
	deepSeek := nano
	deepSeek.Architecture, deepSeek.VocabSize, deepSeek.HiddenSize, deepSeek.KVHeads = DeepSeekV3, 96, 48, 4
	deepSeek.QueryRank, deepSeek.KVRank, deepSeek.PlainSize, deepSeek.RotatedSize = 16, 24, 6, 4
	deepSeek.ValueSize, deepSeek.RopeInterleave, deepSeek.NormEps = 8, true, 1e-3
	deepSeek.Groups, deepSeek.TopGroups, deepSeek.RoutingScale, deepSeek.NormTopK = 4, 2, 2.5, true
	deepSeek.SharedSize, deepSeek.DenseLayers, deepSeek.DenseSize = 64, "0", 40
	deepSeek.RouterAuxLossCoef = 0
	return map[string]Config{"deepseek_v3": deepSeek, "nano": nano, "gqa": gqa, "dense": dense, "dense tied": tied,
		"llama": llama,
		"qwen2": qwen2, "qwen3_moe": qwen3MoE, "flex_olmo": flexOLMo, "dense layer": layers, "ernie4_5_moe": ernie,
		"granitemoe": granite, "gpt_oss": gptOSS}
}

// Gradients of every tensor agree with central differences of the reference: along random
// directions of ±1, and for single weights. An error is relative to the norm of the tensor's
// gradient, which a direction of ±1 measures on average. The tolerance is 1e-4, for the rounding of
// the float32 pass.
func TestGradientsAgainstCentralDifferences(t *testing.T) {
	const tolerance, step = 1e-4, 1e-6
	directions, coordinates := 3, 4
	if raceDetector { // the reference is one goroutine: there is nothing to find in it
		directions, coordinates = 1, 0
	}
	type gradientCase struct {
		cfg   Config
		batch Batch
	}
	cases := map[string]gradientCase{}
	for name, cfg := range gradientCases(t) {
		cases[name] = gradientCase{cfg, randomBatch(cfg, 2, 4, 4)}
		cases[name+", documents"] = gradientCase{cfg, inDocuments(randomBatch(cfg, 2, 7, 4), 3, 1, 2, 2)}
	}
	for name, test := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg, batch := test.cfg, test.batch
			m := newModel(t, cfg, 1)
			randomize(m, 3)
			for i := range batch.Tokens {
				// the padding token must not occur: its embedding has a derivative, by definition
				// not a gradient
				if int(batch.Tokens[i]) == cfg.PadTokenID {
					batch.Tokens[i]++
				}
			}
			// The gradient of each term alone: the gradient of the sum with the cross-entropy,
			// minus the gradient of the cross-entropy, would lose digits.
			const coefficient = 1
			forms := []struct {
				name string
				opts LossOptions
				loss func(l losses) float64
			}{
				{"none", LossOptions{}, func(l losses) float64 { return l.ce }},
				{"hf", LossOptions{Aux: AuxHF, AuxCoefficient: coefficient},
					func(l losses) float64 { return l.ce + coefficient*l.hf }},
				{"megablocks", LossOptions{Aux: AuxMegaBlocks, AuxCoefficient: coefficient},
					func(l losses) float64 { return l.ce + coefficient*l.megablocks }},
				{"sequence", LossOptions{Aux: AuxSequence, AuxCoefficient: coefficient},
					func(l losses) float64 { return l.ce + coefficient*l.sequence }},
				{"z", LossOptions{ZCoefficient: coefficient}, func(l losses) float64 { return l.ce + coefficient*l.z }},
			}
			if !cfg.moe() {
				forms = forms[:1]
			}
			if cfg.HasSigmoidRouter() {
				forms = forms[:4]
			}
			ref := newReference(m)
			base := ref.losses(batch)
			grads := map[string][][]float32{}
			for _, form := range forms {
				m.ZeroGradients()
				stats, err := m.Backward(t.Context(), batch, BackwardOptions{Loss: form.opts})
				if err != nil {
					t.Fatal(err)
				}
				got := stats.Loss/float64(stats.Targets) + form.opts.AuxCoefficient*stats.Aux +
					form.opts.ZCoefficient*stats.Z
				if want := form.loss(base); math.Abs(got-want) > 1e-6*want {
					t.Fatalf("%s: loss %v, want %v", form.name, got, want)
				}
				for _, p := range m.Parameters() {
					grads[p.Name] = append(grads[p.Name], slices.Clone(p.Grad.Floats()))
				}
			}
			random := rand.New(rand.NewPCG(5, 6))
			worst := 0.0
			// check moves the weights w along u and compares.
			check := func(p *Parameter, what string, u []float64) {
				w := ref.weights[p.Name]
				at := slices.Clone(w)
				addTo(w, u, step)
				up := ref.losses(batch)
				copy(w, at)
				addTo(w, u, -step)
				down := ref.losses(batch)
				copy(w, at)
				if !slices.Equal(up.chosen, base.chosen) || !slices.Equal(down.chosen, base.chosen) {
					t.Fatalf("%s, %s: the step changes the routing; choose another seed", p.Name, what)
				}
				for i, form := range forms {
					want := (form.loss(up) - form.loss(down)) / (2 * step)
					got, norm := 0.0, 0.0
					for j, g := range grads[p.Name][i] {
						got += float64(g) * u[j]
						norm += float64(g) * float64(g)
					}
					norm = math.Sqrt(norm)
					if norm == 0 { // an expert that no token chose
						if math.Abs(want) > 1e-8 {
							t.Errorf("%s: gradient of %s is zero, derivative along %s is %g", form.name, p.Name, what,
								want)
						}
						continue
					}
					e := math.Abs(got-want) / norm
					worst = max(worst, e)
					if !(e <= tolerance) {
						t.Errorf("%s: gradient of %s along %s is %g, want %g (norm %g, relative error %g)", form.name,
							p.Name, what, got, want, norm, e)
					}
				}
			}
			for _, p := range m.Parameters() {
				for i := range directions {
					u := make([]float64, p.Weight.Elements())
					for j := range u {
						u[j] = float64(2*random.IntN(2) - 1)
					}
					check(p, fmt.Sprintf("direction %d", i), u)
				}
				for range coordinates {
					u := make([]float64, p.Weight.Elements())
					j := random.IntN(len(u))
					u[j] = 1
					check(p, fmt.Sprintf("element %d", j), u)
				}
			}
			t.Logf("%d tensors, largest relative error %.2g", len(m.Parameters()), worst)
		})
	}
}

// Logits of the reference, for sequences longer than a block of queries.
func TestLossAgainstReference(t *testing.T) {
	for name, cfg := range gradientCases(t) {
		t.Run(name, func(t *testing.T) {
			m := newModel(t, cfg, 2)
			randomize(m, 8)
			batch := randomBatch(cfg, 2, queryBlock+3, 9)
			stats, err := m.Forward(t.Context(), batch)
			if err != nil {
				t.Fatal(err)
			}
			want := newReference(m).losses(batch)
			for _, v := range []struct {
				what      string
				got, want float64
			}{{"loss", stats.Loss / float64(stats.Targets), want.ce}, {"hf", stats.Aux, want.hf},
				{"z", stats.Z, want.z}} {
				if math.Abs(v.got-v.want) > 1e-5*math.Abs(v.want) {
					t.Errorf("%s is %v, want %v", v.what, v.got, v.want)
				}
			}
			if (stats.RouterEntropy != nil) != cfg.moe() {
				t.Errorf("router entropy of %s: %v", cfg.Architecture, stats.RouterEntropy)
			}
			for i, l := range cfg.ExpertLayers(0, cfg.Layers) {
				if got := stats.RouterEntropy[i]; math.Abs(got-want.entropy[l]) > 1e-5*want.entropy[l] {
					t.Errorf("router entropy of layer %d is %v, want %v", l, got, want.entropy[l])
				}
			}
		})
	}
}

// Losses and gradients at the limits of shapes: one row, one token, full blocks of queries, one key
// head for all, one expert, every expert for every token, and experts that no token chooses. The
// derivative along a tensor's own gradient is its norm.
func TestEdgeShapes(t *testing.T) {
	const step = 1e-5
	nano := mustPreset(t, "mula-nano")
	nano.VocabSize, nano.Layers, nano.HiddenSize, nano.IntermediateSize = 32, 1, 32, 16
	all, one, few, gqa := nano, nano, nano, nano
	all.Experts, all.ExpertsPerToken = 3, 3
	one.Experts, one.ExpertsPerToken = 1, 1
	few.Experts, few.ExpertsPerToken = 8, 1
	gqa.KVHeads = 1
	for name, cfg := range map[string]Config{"every expert": all, "one expert": one, "idle experts": few,
		"one key head": gqa} {
		for _, shape := range [][2]int{{1, 1}, {3, 1}, {1, 2}, {1, queryBlock}, {1, queryBlock + 1}} {
			m := newModel(t, cfg, 2)
			randomize(m, 3)
			batch := randomBatch(cfg, shape[0], shape[1], 4)
			stats, err := m.Backward(t.Context(), batch,
				BackwardOptions{Loss: LossOptions{Aux: AuxHF, AuxCoefficient: 1, ZCoefficient: 1}})
			if err != nil {
				t.Fatal(err)
			}
			ref := newReference(m)
			loss := func() float64 {
				l := ref.losses(batch)
				return l.ce + l.hf + l.z
			}
			if got, want := stats.Loss/float64(stats.Targets)+stats.Aux+stats.Z,
				loss(); math.Abs(got-want) > 1e-5*want {
				t.Errorf("%s, %v: loss %v, want %v", name, shape, got, want)
			}
			for _, p := range m.Parameters() {
				norm := 0.0
				for _, g := range p.Grad.Floats() {
					norm += float64(g) * float64(g)
				}
				norm = math.Sqrt(norm)
				if norm < 1e-4 { // an idle expert, or queries that have one key to read
					continue
				}
				w := ref.weights[p.Name]
				at := slices.Clone(w)
				move := func(f float64) float64 {
					for i, g := range p.Grad.Floats() {
						w[i] = at[i] + f*float64(g)/norm
					}
					return loss()
				}
				if got := (move(step) - move(-step)) / (2 * step); math.Abs(got-norm) > 1e-3*norm {
					t.Errorf("%s, %v: the gradient of %s has norm %v, the derivative along it is %v", name, shape,
						p.Name, norm, got)
				}
				copy(w, at)
			}
		}
	}
}

// checkAgainstReference compares the loss and the gradients of a backward pass with the reference:
// of norms, routers, outputs of attention and an expert, along the gradient itself. It returns the
// losses of the reference.
func checkAgainstReference(t *testing.T, m *Model, batch Batch, stats Stats) losses {
	t.Helper()
	const step = 1e-6
	ref := newReference(m)
	base := ref.losses(batch)
	if got := stats.Loss / float64(stats.Targets); math.Abs(got-base.ce) > 1e-6*base.ce {
		t.Errorf("loss %v, want %v", got, base.ce)
	}
	for _, p := range m.Parameters() {
		if !strings.HasSuffix(p.Name, "norm.weight") && !strings.HasSuffix(p.Name, "gate.weight") &&
			!strings.HasSuffix(p.Name, "o_proj.weight") && !strings.Contains(p.Name, ".experts.1.") {
			continue
		}
		norm := 0.0
		for _, g := range p.Grad.Floats() {
			norm += float64(g) * float64(g)
		}
		norm = math.Sqrt(norm)
		if norm < 1e-6 {
			continue
		}
		move := func(by float64) losses {
			for j, g := range p.Grad.Floats() {
				ref.weights[p.Name][j] = float64(p.Weight.Floats()[j]) + by*float64(g)/norm
			}
			return ref.losses(batch)
		}
		up, down := move(step), move(-step)
		move(0)
		if !slices.Equal(up.chosen, base.chosen) || !slices.Equal(down.chosen, base.chosen) {
			t.Fatalf("%s: the step changes the routing; choose another seed", p.Name)
		}
		if got := (up.ce - down.ce) / (2 * step); math.Abs(got-norm) > 1e-4*norm {
			t.Errorf("the gradient of %s has norm %v, the derivative along it is %v", p.Name, norm, got)
		}
	}
	return base
}
