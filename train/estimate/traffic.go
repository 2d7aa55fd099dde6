package estimate

import (
	"math"
	"math/bits"

	"mula/blend/fingerprint"
	"mula/moe"
	"mula/train/collective"
	"mula/xpu"
	"mula/xpu/comm"
)

// Purpose is the purpose of an exchange.
type Purpose string

// The purposes.
const (
	ForDispatch  Purpose = "dispatch"  // tokens to their experts and back, forward and backward
	ForSequences Purpose = "sequences" // operands of the attention, between ranks that share sequences
	ForTensor    Purpose = "tensor"    // tokens before and after products whose matrices ranks share
	ForPipeline  Purpose = "pipeline"  // hidden states and their gradients between stages
	// embeddings and their gradients between the first and the last stage, for multi-token
	// prediction
	ForEmbeddings Purpose = "embeddings"
	ForGradients  Purpose = "gradients" // sums over ranks
	ForUpdate     Purpose = "update"    // slices of matrices for their update; see [SliceUpdate]
	ForWeights    Purpose = "weights"   // from their owners to the other ranks that have them
	ForVotes      Purpose = "votes"     // state of all ranks before an update; see [WorldVotes]
)

// An Exchange is the traffic of a group per step, by one operation for one purpose.
type Exchange struct {
	Purpose   Purpose        `json:"purpose"`
	Operation comm.Operation `json:"-"`
	Name      string         `json:"operation"`
	Group     comm.Axes      `json:"group"`
	Ranks     int            `json:"ranks"` // of the group
	Calls     int            `json:"calls"` // of the operation, per rank
	// of a sequence of messages, one after the other; 0: as many as the operation has
	Messages int `json:"messages,omitempty"`

	// Total is the number of bytes that all ranks of the group send: z·(n-1) for a reduce-scatter
	// or an all-gather of z bytes over n ranks, and 2·z·(n-1) for an all-reduce. It equals the sum
	// of [comm.Comm.Traffic] over the ranks, also for shards of unequal size. For an all-to-all it
	// is the mean over routings that use all experts equally.
	Total int64 `json:"total_bytes"`

	most int64 // bytes that one rank sends or receives, the most; 0: PerRank
}

// PerRank is the mean number of bytes that a rank of the group sends.
func (e Exchange) PerRank() float64 { return float64(e.Total) / float64(e.Ranks) }

func exchange(purpose Purpose, o comm.Operation, g comm.Axes, ranks, calls int, total int64) Exchange {
	return Exchange{Purpose: purpose, Operation: o, Name: o.String(), Group: g, Ranks: ranks, Calls: calls,
		Total: total}
}

// OptimizerTraffic returns the exchanges of gradients and weights of a stage per step. Each entry
// describes the rank's own group. [WorldVotes] has the norm of the gradients.
func OptimizerTraffic(s Stage, l Layout, t Trainer) []Exchange {
	var out []Exchange
	replicated, divided := s.Replicated, s.Divided
	add := func(purpose Purpose, o comm.Operation, g comm.Axes, elements int64) {
		n := int64(l.Size(g))
		total := elements * (n - 1)
		switch {
		case o == comm.OpAllReduce:
			total *= 2 * int64(t.Gradients)
		case purpose == ForGradients:
			total *= int64(t.Gradients)
		default:
			total *= int64(t.Weights)
		}
		if total > 0 {
			out = append(out, exchange(purpose, o, g, int(n), 1, total))
		}
	}
	switch l.Optimizer {
	case Unsharded:
		add(ForGradients, comm.OpAllReduce, comm.Data, replicated)
		add(ForGradients, comm.OpAllReduce, comm.Replicas, divided)
		add(ForGradients, comm.OpAllReduce, comm.Slices, s.Sliced)
	case SO:
		within, across := l.nested()
		add(ForGradients, comm.OpAllReduce, within, replicated)
		add(ForGradients, comm.OpAllReduce, comm.EP, s.Sliced)
		both := func(purpose Purpose, o comm.Operation) {
			if across == comm.Replicas {
				add(purpose, o, across, replicated+divided)
				return
			}
			add(purpose, o, across, replicated+s.Sliced)
			add(purpose, o, comm.Replicas, divided)
		}
		both(ForGradients, comm.OpReduceScatter)
		both(ForWeights, comm.OpAllGather)
	case EPSO:
		add(ForGradients, comm.OpReduceScatter, comm.Data, replicated)
		add(ForGradients, comm.OpReduceScatter, comm.Replicas, divided)
		add(ForGradients, comm.OpReduceScatter, comm.Slices, s.Sliced)
		add(ForWeights, comm.OpAllGather, comm.Data, replicated)
		add(ForWeights, comm.OpAllGather, comm.Replicas, divided)
		add(ForWeights, comm.OpAllGather, comm.Slices, s.Sliced)
	}
	return out
}

// updateTraffic returns the exchanges of a stage per step for the update of slices, the mean over
// the groups of ranks that share matrices.
func updateTraffic(c moe.Config, i int, l Layout, t Trainer) []Exchange {
	n, total, tensors := l.Size(comm.TP), int64(0), 0
	if n == 1 || t.SliceUpdate.Bytes == nil {
		return nil
	}
	for _, tensor := range c.StageTensors(i, l.Size(comm.PP), l.VirtualStages) {
		if c.Sliced(tensor.Name) < 0 {
			continue
		}
		if bytes := t.SliceUpdate.Bytes(tensor.Name, tensor.Shape, n); bytes > 0 {
			total, tensors = total+bytes, tensors+1
		}
	}
	owners := 1
	switch l.Optimizer {
	case SO:
		owners = l.Size(comm.ExpertDP)
	case EPSO:
		owners = l.Size(comm.Slices)
	}
	calls := 1
	if t.SliceUpdate.Operation == comm.OpAllToAll { // there and back, n tensors at a time
		calls = 2 * int(over(over(int64(tensors), int64(owners)), int64(n)))
	}
	return []Exchange{exchange(ForUpdate, t.SliceUpdate.Operation, comm.TP, n, calls, total/int64(owners))}
}

// nested returns the groups of [SO] for replicated weights: it sums gradients over the first one,
// and divides them among the second one.
func (l Layout) nested() (within, across comm.Axes) {
	if l.Size(comm.TP) > 1 {
		return comm.EP | comm.TP, comm.ExpertDP
	}
	return comm.EP, comm.Replicas
}

// dispatchTraffic returns the exchanges of tokens per step, for a rank of stage i, if the router
// uses all experts equally. For mula it counts everything that [moe.Config.DispatchBytes] counts,
// and for other trainers only hidden states. With recomputation, the inputs of experts are sent
// again; other trainers also send the outputs again.
func dispatchTraffic(c moe.Config, i int, l Layout, t Trainer) []Exchange {
	numbers := c.StageLayers(i, l.Size(comm.PP), l.VirtualStages)
	layers := len(c.StageExpertLayers(i, l.Size(comm.PP), l.VirtualStages))
	if l.Size(comm.EP) == 1 || layers == 0 {
		return nil
	}
	micro, n := int64(l.MicroBatches()), int64(l.Size(comm.EP))
	tokens := float64(l.tokens())
	// hidden states that a rank sends per layer
	copies := int64(math.Round(tokens * c.ExpectedCopies(l.Dispatch, l.Size(comm.EP))))
	h, k, depth, again := int64(c.HiddenSize), int64(c.ExpertsPerToken), int64(layers), int64(0)
	if l.Recompute != moe.RecomputeNone {
		again = depth
	}
	// numbers of t.Activations bytes that a rank sends; numbers of 4 bytes; operations
	var there, back, counts, callsThere, callsBack int64
	if t.Own {
		if l.keepsLast(micro) && c.HasExperts(numbers[len(numbers)-1]) {
			again = max(0, again-1) // the last layer is not recomputed
		}
		there = copies * (depth*(2*h+2*k) + again*h)
		back = copies * depth * (2*h + k)
		callsThere, callsBack, counts = micro*(3*depth+again), micro*2*depth, micro*(n-1)
		if l.Dispatch == moe.AllGather { // in the forward pass of a group of layers
			callsThere += micro * int64(l.virtualStages())
			counts *= int64(l.virtualStages())
		} else {
			counts *= depth
			callsThere += micro * depth
		}
		if l.countsFirst(t) { // another forward pass
			there += copies * depth * (h + 2*k)
			back += copies * depth * h
			callsThere += micro * (2*depth + counts/(micro*(n-1)))
			callsBack += micro * depth
			counts *= 2
		}
	} else {
		there = copies * (2*depth + again) * h
		back = there
		callsThere = micro * (2*depth + again)
		callsBack = callsThere
	}
	number := int64(t.Activations)
	if l.Dispatch == moe.AllGather {
		return []Exchange{
			exchange(ForDispatch, comm.OpAllGather, comm.EP, l.Size(comm.EP), int(callsThere),
				n*(there*number+4*counts)),
			exchange(ForDispatch, comm.OpReduceScatter, comm.EP, l.Size(comm.EP), int(callsBack), n*back*number),
		}
	}
	return []Exchange{exchange(ForDispatch, comm.OpAllToAll, comm.EP, l.Size(comm.EP), int(callsThere+callsBack),
		n*((there+back)*number+4*counts))}
}

// keepsLast reports whether the buffers that layers share still hold the values of the last layer's
// forward pass in its backward pass. With several groups of layers, mula does not use them.
func (l Layout) keepsLast(microBatches int64) bool {
	return l.Size(comm.PP) == 1 || microBatches == 1 && l.virtualStages() == 1
}

// sequenceTraffic returns the exchanges per step between ranks that share sequences, for a rank of
// stage i: in each layer and pass the operands of the attention and its result, with a capacity of
// experts the number of tokens of each expert and sequence, and once the losses of the sequences, 8
// bytes each. With a load-balancing loss of each sequence, each group of layers with experts adds
// the number of tokens of each expert and sequence, too. A layer whose buffers no other layer has
// used since its forward pass does not exchange its queries, keys and values again. For other
// trainers it returns nil.
//
// Of n ranks that share a sequence, h divide the heads, and c = n/h parts of the queries are on
// different ranks; see [moe.Config.HeadRanks]. Of the queries of its tokens, a rank sends (h-1)/h
// to other ranks, and the same of results and gradients. Of keys and values, it sends an h-th to
// each other rank of its part and of the parts after it. There are h²·c·(c+1)/2 pairs of ranks of
// these parts, including n pairs of a rank with itself. Gradients are sent the other way.
func sequenceTraffic(c moe.Config, i int, s Stage, l Layout, t Trainer) []Exchange {
	n, all := int64(l.sequenceRanks()), int64(l.rowRanks())
	if all == 1 || !t.Own {
		return nil
	}
	var out []Exchange
	if n > 1 {
		micro, depth := int64(l.MicroBatches()), int64(s.Layers)
		again := depth
		if l.keepsLast(micro) {
			again-- // the last layer
		}
		h := int64(c.HeadRanks(int(n), l.Size(comm.TP)))
		parts, layers := n/h, 2*depth // forward and backward
		if l.countsFirst(t) {
			layers += depth
		}
		passes := layers + again // with keys and values, or with their gradients
		queries, calls := passes+layers, passes
		if l.Recompute == moe.RecomputeLayers {
			queries += again
		}
		if h > 1 {
			calls = queries
		}
		queries *= int64(c.QueryWidth())
		keys := passes * int64(2*c.KVWidth())
		group := comm.Data
		if all > n {
			group = comm.Slices
		}
		bytes := l.tokens() * int64(t.Activations)
		e := exchange(ForSequences, comm.OpAllToAll, group, int(n), int(micro*calls),
			bytes*(queries*parts*(h-1)+keys*(n*(parts+1)/2-parts)))
		if parts > 1 { // the ranks of the first part send keys and values to all, the ranks of the last get all
			e.most = bytes * (queries*(h-1) + keys*(n-1)) / h
		}
		out = append(out, e)
	}
	if layers := int64(s.ExpertLayers); c.ExpertCapacity > 0 && layers > 0 {
		if l.countsFirst(t) {
			layers *= 2
		}
		calls := int64(l.MicroBatches()) * layers
		out = append(out, exchange(ForSequences, comm.OpAllGather, comm.Data, int(all), int(calls),
			calls*all*8*int64(l.microBatch()*c.Experts)*(all-1)))
	}
	added, sums := int64(0), 0 // numbers of each sequence, and all-reduces
	if s.Head {
		added, sums = 1, 1
	}
	if l.SequenceBalance {
		added += int64(s.ExpertLayers * c.Experts)
		for _, g := range c.StageGroups(i, l.Size(comm.PP), l.VirtualStages) {
			if len(c.ExpertLayers(g.From, g.To)) > 0 {
				sums += l.MicroBatches()
			}
		}
	}
	if sums > 0 {
		out = append(out, exchange(ForSequences, comm.OpAllReduce, comm.Data, int(all), sums,
			2*8*added*int64(l.Sequences())*(all-1)))
	}
	return out
}

// tensorTraffic returns the exchanges per step between ranks that share matrices, for a rank of a
// stage. A rank sends its tokens' hidden states, in all-gathers, and its products for the tokens of
// the others, in reduce-scatters. In each layer, the attention and a feed-forward network that all
// tokens use ([moe.Config.HasNetwork]) do this once in the forward pass. In the backward pass they
// gather the gradients of their outputs, and their inputs again, if another block has gathered
// since. Recomputation of a layer repeats the attention of the forward pass. Norms over all heads
// add two numbers of 4 bytes for each token of all ranks, in the forward and in the backward pass.
// The scores of a gate of shared experts are gathered in both passes, and their gradients are
// added. For other trainers it returns nil.
func tensorTraffic(c moe.Config, i int, l Layout, t Trainer) []Exchange {
	n := int64(l.Size(comm.TP))
	if n == 1 || !t.Own {
		return nil
	}
	micro, layers := int64(l.MicroBatches()), c.StageLayers(i, l.Size(comm.PP), l.VirtualStages)
	var gathers, sums, norms, gates int64
	for k, layer := range layers {
		again := int64(1)
		if l.keepsLast(micro) && k == len(layers)-1 {
			again = 0
		}
		gathers, sums, norms = gathers+2+again, sums+2, norms+2
		if c.HasNetwork(layer) {
			gathers, sums = gathers+3, sums+2
		}
		if c.HasSharedGate(layer) {
			gates++
		}
		if l.countsFirst(t) {
			forward := int64(1)
			if c.HasNetwork(layer) {
				forward++
			}
			gathers, sums, norms = gathers+forward, sums+forward, norms+1
		}
		if l.Recompute == moe.RecomputeLayers {
			sums, norms = sums+again, norms+again
			if c.HasNetwork(layer) { // otherwise the backward pass of the attention does not gather its inputs
				gathers += again
			}
		}
	}
	// of all ranks in one exchange in each micro-batch: each has l.tokens
	scores := n * l.tokens() * int64(t.Activations) * (n - 1)
	hidden := scores * int64(c.HiddenSize)
	gathered := 2 * gates
	if l.countsFirst(t) {
		gathered += gates
	}
	out := []Exchange{exchange(ForTensor, comm.OpAllGather, comm.TP, int(n), int(micro*(gathers+gathered)),
		gathers*hidden+gathered*scores),
		exchange(ForTensor, comm.OpReduceScatter, comm.TP, int(n), int(micro*(sums+gates)), sums*hidden+gates*scores)}
	if c.HasWideNorms() {
		out = append(out, exchange(ForTensor, comm.OpAllReduce, comm.TP, int(n), int(micro*norms),
			2*norms*2*4*n*l.tokens()*(n-1)))
	}
	return out
}

// PipelineTraffic returns the exchanges between stages per step: hidden states of each micro-batch
// forward, and their gradients backward, from each group of layers to the next. mula also sends, in
// a separate message, the sums over layers for the losses of the router, and their gradients: 2E+2
// numbers of 8 bytes. A forward pass that counts the choices of experts sends them again, and
// with one group of layers a byte to the stage before.
//
// With layers of multi-token prediction, the first stage sends the embeddings that each of them
// reads to the last stage, and gets their gradients; see [moe.Relay].
func PipelineTraffic(c moe.Config, l Layout, t Trainer) []Exchange {
	if l.Size(comm.PP) == 1 {
		return nil
	}
	tokens := l.tokens()
	groups := l.virtualStages()
	passes, notes := 2, int64(0)
	if l.countsFirst(t) {
		passes++
		if groups == 1 {
			notes = int64(l.MicroBatches())
		}
	}
	calls, total := passes*groups*l.MicroBatches(), tokens*int64(c.HiddenSize)*int64(t.Activations)
	if t.Own && c.Experts > 0 {
		calls *= 2
		total += int64(l.MicroBatches()) * 8 * int64(2*c.Experts+2)
	}
	out := []Exchange{exchange(ForPipeline, comm.OpSend, comm.PP, l.Size(comm.PP), calls+int(notes),
		int64(groups*l.Size(comm.PP)-1)*(int64(passes)*total+notes))}
	if d := int64(c.PredictionLayers); d > 0 {
		once := d * tokens * int64(c.HiddenSize) * int64(t.Activations)
		forward := passes - 1
		e := exchange(ForEmbeddings, comm.OpSend, comm.PP, l.Size(comm.PP), forward*l.MicroBatches(),
			int64(passes)*once)
		e.most = int64(forward) * once // of the first stage
		out = append(out, e)
	}
	return out
}

// Sizes in package train/votes, in bytes.
const (
	voteHead     = 8 * 8            // of a rank's vote, without the entropy of each of its stage's layers
	voteRow      = 4 * 8            // in a vote of the last stage, for each sequence
	tallyHead    = 4*8 + 7*4 + 3*28 // of the sums of a stage, with 3 slow ranks, without entropies
	tallySection = 4                // between sections, in addition to the sums, for each section
	tallySource  = 3 * 8            // in the sums of the last stage, for each source
	votePredict  = 2 * 8            // in both of the last stage, for each layer of multi-token prediction
	decisionSize = 4 * 8            // what rank 0 tells all ranks, and for each stage:
	decisionMore = 8
)

// exactSum is the number of bytes of an exact sum of squares (package train/optimizer).
const exactSum = 160

// StageVotes returns the exchanges of votes between the ranks of stage i in each step of mula:
//
//   - an all-reduce of the tokens of each expert of each layer, several in 8 bytes
//   - with GlobalBalance, an all-reduce of the same numbers before the backward pass, 8 bytes each
//   - messages with votes, and with sums over votes
//
// For other trainers it returns nil.
func StageVotes(c moe.Config, i int, l Layout, t Trainer) []Exchange {
	n, sections := int64(l.DataRanks()), int64(l.sections())
	if n == 1 || !t.Own {
		return nil
	}
	var out []Exchange
	vote, tally, added, _ := l.voteBytes(c, i)
	if added > 0 {
		out = append(out, exchange(ForVotes, comm.OpAllReduce, comm.Data, int(n), 1, 2*added*(n-1)))
	}
	if choices := l.choices(c, i); choices > 0 {
		out = append(out, exchange(ForVotes, comm.OpAllReduce, comm.Data, int(n), 1, 2*8*choices*(n-1)))
	}
	sent := (n - sections) * vote
	if sections > 1 {
		sent += sections * (tally + tallySection*sections)
	}
	votes := exchange(ForVotes, comm.OpSend, comm.Data, int(n), 1, sent)
	votes.Messages = l.section() - 1 + l.sections()
	return append(out, votes)
}

// WorldVotes returns the exchanges of votes between all ranks in each step of mula before the
// update:
//
//   - all-reduces of the stop request and of the number of missing rows (8 bytes each)
//   - messages with the sums and the counts of each stage, to rank 0
//   - a broadcast of the sums that all ranks need
//   - for the norm, an all-gather of the sum of squares of each block of gradients (8 bytes each),
//     or with ReduceNorm an all-reduce of an exact sum (160 bytes)
//
// Steps that measure the sizes of updates, steps with skipped positions, `attention: documents`,
// updates of correction biases, evaluations and checkpoints send more, which is not counted. For
// other trainers it returns nil.
func WorldVotes(c moe.Config, l Layout, t Trainer) []Exchange {
	n := int64(l.Ranks())
	if n == 1 || !t.Own {
		return nil
	}
	var out []Exchange
	if stages := l.Size(comm.PP); stages > 1 {
		sent := int64(0)
		for stage := 1; stage < stages; stage++ {
			_, tally, _, counts := l.voteBytes(c, stage)
			sent += tally + counts
		}
		sums := exchange(ForVotes, comm.OpSend, comm.World, int(n), 1, sent)
		sums.Messages = stages - 1
		out = append(out, sums)
	}
	out = append(out, exchange(ForVotes, comm.OpBroadcast, comm.World, int(n), 1, l.decisions()*(n-1)))
	if l.ReduceNorm {
		return append(out, exchange(ForVotes, comm.OpAllReduce, comm.World, int(n), 3, 2*(2*8+exactSum)*(n-1)))
	}
	return append(out, exchange(ForVotes, comm.OpAllReduce, comm.World, int(n), 2, 2*2*8*(n-1)),
		exchange(ForVotes, comm.OpAllGather, comm.World, int(n), 1, 8*normBlocks(c, l)*(n-1)))
}

// votesReceived returns the bytes that a rank receives in the exchanges of [StageVotes] and
// [WorldVotes], if the ranks fill hosts of l.perHost ranks evenly. It does not count the numbers
// that are gathered for the norm without l.ReduceNorm.
func votesReceived(c moe.Config, l Layout, t Trainer, rank int) int64 {
	n := int64(l.Ranks())
	if n == 1 || !t.Own {
		return 0
	}
	number, stage := l.Index(rank, comm.Data), l.Index(rank, comm.PP)
	vote, tally, added, _ := l.voteBytes(c, stage)
	received := l.sumReceived(comm.Data, number, added/8) +
		l.sumReceived(comm.Data, number, l.choices(c, stage)) + 2*l.sumReceived(comm.World, rank, 1)
	if number%l.section() == 0 {
		received += int64(min(l.section(), l.DataRanks()-number)-1) * vote
		if l.sections() > 1 { // from the section before; the first rank gets the complete sums
			received += tally + tallySection*int64(l.sections())
		}
	}
	if rank > 0 {
		received += l.decisions()
	} else {
		for stage := 1; stage < l.Size(comm.PP); stage++ {
			_, tally, _, counts := l.voteBytes(c, stage)
			received += tally + counts
		}
	}
	if l.ReduceNorm {
		return received + l.sumReceived(comm.World, rank, exactSum/8)
	}
	return received
}

// sumReceived returns the bytes that a rank of a group receives in an all-reduce of integers of 8
// bytes. See [twoLevelBytes].
func (l Layout) sumReceived(g comm.Axes, rank int, integers int64) int64 {
	n, a := l.Size(g), l.inHost(g, l.perHost)
	bound := func(r int) int64 { return integers * int64(r) / int64(n) }
	own := bound(rank+1) - bound(rank)
	if a <= 1 || a >= n {
		return 8 * (int64(n-1)*own + integers - own)
	}
	i := rank % a // on its host; it relays for the i-th part of the group
	relayed := bound(((i+1)*n+a-1)/a) - bound((i*n+a-1)/a)
	received := int64(a-1)*relayed + int64(n/a-1)*own + integers
	if rank*a/n == i { // its own relay
		received -= own
	} else {
		received += own
	}
	return 8 * received
}

// normBlocks returns the number of blocks of gradients whose sums of squares are added.
func normBlocks(c moe.Config, l Layout) (blocks int64) {
	for _, tensor := range c.TrainedTensors() {
		slices := int64(1)
		if tp := l.Size(comm.TP); tp > 1 && c.Sliced(tensor.Name) >= 0 {
			slices = int64(tp)
		}
		blocks += slices * over(tensor.Elements()/slices, xpu.BlockSize)
	}
	return blocks
}

// choices is the number of counts of tokens that the ranks of a stage add for the load-balancing
// loss over the global batch.
func (l Layout) choices(c moe.Config, stage int) int64 {
	if !l.GlobalBalance {
		return 0
	}
	return int64(len(c.StageExpertLayers(stage, l.Size(comm.PP), l.VirtualStages)) * c.Experts)
}

// decisions is the number of bytes that rank 0 tells all ranks.
func (l Layout) decisions() int64 { return decisionSize + decisionMore*int64(l.Size(comm.PP)) }

// section is the number of ranks of a stage in a section of package train/votes.
func (l Layout) section() int { return collective.Section(l.DataRanks()) }

// sections is the number of sections of a stage.
func (l Layout) sections() int { return (l.DataRanks() + l.section() - 1) / l.section() }

// voteBytes returns the sizes of a vote of a stage, of sums over its votes, and of the tokens of
// its experts: while they are added, as integers of 8 bytes with as many counts as fit, and in a
// message to rank 0.
func (l Layout) voteBytes(c moe.Config, stage int) (vote, tally, added, counts int64) {
	layers := int64(len(c.StageExpertLayers(stage, l.Size(comm.PP), l.VirtualStages)))
	vote, tally = voteHead+8*layers, tallyHead+8*layers
	if c.ExpertCapacity > 0 { // dropped choices
		vote, tally = vote+8*layers, tally+8*layers
	}
	if stage == l.Size(comm.PP)-1 {
		vote += voteRow * int64(l.Sequences())
		tally += tallySource*int64(max(1, l.Sources)) + int64(fingerprint.HasherBytes)
		vote, tally = vote+votePredict*int64(c.PredictionLayers), tally+votePredict*int64(c.PredictionLayers)
	}
	n, width := layers*int64(c.Experts), bits.Len64(uint64(l.BatchSize)*uint64(l.SequenceLength))
	return vote, tally, 8 * over(n, int64(64/width)), over(n*int64(width), 8)
}

// Stepped returns the number of weights of a stage that a rank updates: the mean over the ranks
// that share them.
func Stepped(s Stage, l Layout) float64 {
	switch l.Optimizer {
	case SO:
		return float64(s.Replicated+s.Sliced)/float64(l.Size(comm.ExpertDP)) +
			float64(s.Divided)/float64(l.Size(comm.Replicas))
	case EPSO:
		return float64(s.Replicated)/float64(l.DataRanks()) + float64(s.Divided)/float64(l.Size(comm.Replicas)) +
			float64(s.Sliced)/float64(l.Size(comm.Slices))
	}
	return float64(s.Elements())
}
