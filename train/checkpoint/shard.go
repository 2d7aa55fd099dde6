package checkpoint

import (
	"cmp"
	"container/heap"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"mula/moe"
	"mula/moe/safetensors"
	"mula/train/collective"
	"mula/train/optimizer"
	"mula/xpu"
	"mula/xpu/comm"
)

// A Shard is the part of the weights and of the optimizer's state that one rank saves in a
// checkpoint and loads from it. Names and ranges refer to the whole model, so that a checkpoint
// does not depend on the layout.
type Shard struct {
	config  moe.Config
	tensors []safetensors.Tensor // of the whole model, in its order, with the type of the weights
	// for each tensor, the names of its state tensors, which have the same shape
	states      [][]string
	device      xpu.Memory        // of the weights and the state
	held        []heldTensor      // tensors whose weights this rank has, in ascending order
	metadata    map[string]string // the optimizer's scalars, equal on all ranks
	setMetadata func(map[string]string) error
	// number of elements that Load reads before it sends them; 0 means 4 million
	window int

	// Slices of tensors that this rank has. They are not in held, because a checkpoint has complete
	// tensors: see slices.go.
	slices []heldSlice
	tensor *comm.Comm // the ranks that have the other slices
	alike  *comm.Comm // the ranks that have the same slices
}

// A heldTensor is a tensor whose weights a rank has.
type heldTensor struct {
	index  int // in Shard.tensors
	weight xpu.Tensor
	// ranges of the optimizer's state that this rank writes; over all ranks, every element of every
	// tensor exactly once
	write []stretch
	read  []stretch // ranges that this rank loads
	// another rank has the weights of the complete tensor; this rank has ranges only
	onlyRanges bool
}

// A stretch is the elements from begin on, as many as values, of a tensor of the optimizer's state,
// or of the weights.
type stretch struct {
	name   string // of the tensor, without the parameter's name and the dot; "" for the weights
	begin  int
	values xpu.Tensor // of one dimension
}

// NewShard returns the shard of a rank with this model and optimizer. Before a save, the optimizer
// must be averaged.
func NewShard(m *moe.Model, o *optimizer.Optimizer) Shard {
	dtype := safetensors.F32
	if m.Device().Precision().Weights() == xpu.BFloat16 {
		dtype = safetensors.BF16
	}
	s := shardOf(o, m.Device(), m.Config(), m.Config().StoredTensors(dtype))
	for _, p := range m.Biases() {
		s.held = append(s.held, heldTensor{index: p.Index, weight: p.Weight,
			read: []stretch{{"", 0, p.Weight.Flat()}}})
	}
	s.tensor, s.alike = m.Tensor()
	slices.SortFunc(s.held, func(a, b heldTensor) int { return cmp.Compare(a.index, b.index) })
	return s
}

// shardOf returns the shard of a rank whose optimizer updates some of the given tensors.
func shardOf(o *optimizer.Optimizer, device xpu.Memory, config moe.Config, tensors []safetensors.Tensor) Shard {
	s := Shard{config: config, tensors: tensors, device: device, metadata: o.Metadata(), setMetadata: o.SetMetadata}
	for _, t := range s.tensors {
		var states []string
		if moe.Trained(t.Name) {
			states = o.StateNames(t.Name, t.Shape)
		}
		s.states = append(s.states, states)
	}
	for i, p := range o.Parameters() {
		h := heldTensor{index: p.Index, weight: p.Weight}
		begin, _, writer := o.Owned(i)
		first := len(s.slices)
		if p.Slice.Ranks > 0 {
			s.slices = append(s.slices, heldSlice{Slice: p.Slice})
		}
		weights := stretch{"", 0, p.Weight.Flat()}
		for _, t := range o.Saved(i) {
			own := stretch{t.Name, begin, t.Values}
			if writer {
				h.write = append(h.write, own)
			}
			if t.Name == optimizer.TrainedWeights && p.Weight.DType() == xpu.Float32 {
				weights.name = t.Name // every rank with the parameter needs all elements
				continue
			}
			h.read = append(h.read, own)
		}
		h.read = append(h.read, weights)
		if len(s.slices) > first {
			s.slices[first].heldTensor = h
			continue
		}
		s.held = append(s.held, h)
	}
	return s
}

// An indexRun is the numbers [first, second).
type indexRun [2]int

// runs returns the numbers of the tensors that this rank has, as runs.
func (s Shard) runs() []indexRun {
	var runs []indexRun
	for _, h := range s.held {
		if h.onlyRanges {
			continue
		}
		runs = appendIndex(runs, h.index)
	}
	return runs
}

// appendIndex adds a number above all others to runs.
func appendIndex(runs []indexRun, i int) []indexRun {
	if last := len(runs) - 1; last >= 0 && runs[last][1] == i {
		runs[last][1]++
		return runs
	}
	return append(runs, indexRun{i, i + 1})
}

// contains reports whether a number is in one of the runs, which are in order.
func contains(runs []indexRun, i int) bool {
	_, found := slices.BinarySearchFunc(runs, i, func(r indexRun, i int) int {
		switch {
		case r[1] <= i:
			return -1
		case r[0] > i:
			return 1
		}
		return 0
	})
	return found
}

// assign chooses the rank that writes, or hashes, each tensor among the ranks that have it. It
// assigns the largest tensors first, each to the rank with the least bytes so far, so that bytes
// are as even as complete tensors allow. Tensors that the fewest ranks have are assigned before
// others. assign fails if no rank has a tensor. The same arguments give the same result on all
// ranks.
func assign(tensors []safetensors.Tensor, runs [][]indexRun) ([]int, error) {
	// Between two cuts, the same ranks have all tensors.
	cuts := []int{0, len(tensors)}
	for _, list := range runs {
		for _, r := range list {
			cuts = append(cuts, r[0], r[1])
		}
	}
	slices.Sort(cuts)
	cuts = slices.Compact(cuts)
	holders := make([][]int, len(cuts)-1)
	for rank, list := range runs {
		for _, r := range list {
			for i, _ := slices.BinarySearch(cuts, r[0]); cuts[i] < r[1]; i++ {
				holders[i] = append(holders[i], rank)
			}
		}
	}
	order := make([]int, len(holders))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return len(holders[a]) - len(holders[b]) })
	loads := make([]int64, len(runs))
	owner := make([]int, len(tensors))
	for _, i := range order {
		if len(holders[i]) == 0 {
			return nil, fmt.Errorf("no rank has %s", tensors[cuts[i]].Name)
		}
		sizes := make([]int64, 0, cuts[i+1]-cuts[i])
		for _, t := range tensors[cuts[i]:cuts[i+1]] {
			sizes = append(sizes, t.Elements())
		}
		copy(owner[cuts[i]:], distribute(sizes, holders[i], loads))
	}
	return owner, nil
}

// distribute assigns items of the given sizes to ranks, the largest first, each to the rank with
// the least load, and adds the sizes to loads.
func distribute(sizes []int64, ranks []int, loads []int64) []int {
	order := make([]int, len(sizes))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(sizes[b], sizes[a]) })
	queue := &leastLoaded{slices.Clone(ranks), loads}
	heap.Init(queue)
	owner := make([]int, len(sizes))
	for _, i := range order {
		owner[i] = queue.ranks[0]
		loads[owner[i]] += sizes[i]
		heap.Fix(queue, 0)
	}
	return owner
}

// leastLoaded is a heap of ranks.
type leastLoaded struct {
	ranks []int
	loads []int64
}

func (q *leastLoaded) Len() int { return len(q.ranks) }
func (q *leastLoaded) Less(i, j int) bool {
	a, b := q.ranks[i], q.ranks[j]
	return q.loads[a] < q.loads[b] || q.loads[a] == q.loads[b] && a < b
}
func (q *leastLoaded) Swap(i, j int) { q.ranks[i], q.ranks[j] = q.ranks[j], q.ranks[i] }
func (q *leastLoaded) Push(any)      {}
func (q *leastLoaded) Pop() any      { return nil }

// A tensorRange is the elements [begin, end) of state tensor number state of parameter number
// tensor of a shard, or of the parameter's weights if state is weightsState.
type tensorRange struct{ tensor, state, begin, end int }

const weightsState = -1

// and returns the elements that are in both ranges, if there are some.
func (r tensorRange) and(other tensorRange) (both tensorRange, some bool) {
	both = tensorRange{r.tensor, r.state, max(r.begin, other.begin), min(r.end, other.end)}
	return both, r.tensor == other.tensor && r.state == other.state && both.begin < both.end
}

// rangeName returns the name of a range in a file: PARAMETER.STATE for a complete tensor,
// PARAMETER.STATE[begin:end] for a part, PARAMETER for the weights.
func (s Shard) rangeName(r tensorRange) string {
	name := s.tensors[r.tensor].Name
	if r.state != weightsState {
		name += "." + s.states[r.tensor][r.state]
	}
	if r.begin == 0 && int64(r.end) == s.tensors[r.tensor].Elements() {
		return name
	}
	return fmt.Sprintf("%s[%d:%d]", name, r.begin, r.end)
}

// rangeEntry returns a range as a tensor of a file.
func (s Shard) rangeEntry(r tensorRange) safetensors.Tensor {
	t := safetensors.Tensor{Name: s.rangeName(r), DType: safetensors.F32, Shape: []int{r.end - r.begin}}
	if r.begin == 0 && int64(r.end) == s.tensors[r.tensor].Elements() {
		t.Shape = s.tensors[r.tensor].Shape
	}
	return t
}

// written returns the ranges that this rank writes, and their values.
func (s Shard) written() (ranges []tensorRange, values []xpu.Tensor, err error) {
	for _, h := range s.held {
		for _, w := range h.write {
			state := slices.Index(s.states[h.index], w.name)
			if state < 0 {
				return nil, nil, fmt.Errorf("%s has no %s", s.tensors[h.index].Name, w.name)
			}
			if n := w.values.Elements(); n > 0 {
				ranges = append(ranges, tensorRange{h.index, state, w.begin, w.begin + n})
				values = append(values, w.values)
			}
		}
	}
	return ranges, values, nil
}

// A placedRange is a range and its file.
type placedRange struct {
	tensorRange
	file string
}

// check returns an error that names ranges that are missing, overlap, exceed their tensor, or
// belong to no tensor of this model and optimizer.
func (s Shard) check(ranges []placedRange) error {
	m := make([][][]placedRange, len(s.tensors)) // of each state tensor of each parameter
	for i := range m {
		m[i] = make([][]placedRange, len(s.states[i]))
	}
	var wrong []string
	for _, r := range ranges {
		if n := s.tensors[r.tensor].Elements(); r.begin < 0 || r.begin >= r.end || int64(r.end) > n {
			wrong = append(wrong, fmt.Sprintf("%s in %s is not a range of a tensor of %d elements",
				s.rangeName(r.tensorRange), r.file, n))
			continue
		}
		m[r.tensor][r.state] = append(m[r.tensor][r.state], r)
	}
	for i, states := range m {
		n := int(s.tensors[i].Elements())
		for j, list := range states {
			slices.SortFunc(list, func(a, b placedRange) int {
				return cmp.Or(a.begin-b.begin, a.end-b.end, strings.Compare(a.file, b.file))
			})
			var missing []tensorRange
			at, before := 0, 0 // end of the ranges so far, and the range that ends there
			for k, r := range list {
				if r.begin < at {
					wrong = append(wrong, fmt.Sprintf("%s in %s and %s in %s overlap",
						s.rangeName(list[before].tensorRange), list[before].file, s.rangeName(r.tensorRange), r.file))
				} else if r.begin > at {
					missing = append(missing, tensorRange{i, j, at, r.begin})
				}
				if r.end > at {
					at, before = r.end, k
				}
			}
			if at < n {
				missing = append(missing, tensorRange{i, j, at, n})
			}
			for _, r := range missing {
				wrong = append(wrong, s.rangeName(r)+" is missing")
			}
		}
	}
	return someWrong(wrong)
}

// someWrong returns an error with the first items of a list, or nil for an empty list.
func someWrong(list []string) error {
	const most = 5
	if len(list) == 0 {
		return nil
	}
	text := strings.Join(list[:min(most, len(list))], "; ")
	if len(list) > most {
		text += fmt.Sprintf("; and %d more", len(list)-most)
	}
	return errors.New(text)
}

// A stateIndex is optimizer.safetensors.index.json, which has the file of each range, in the form
// of model.safetensors.index.json.
type stateIndex struct {
	Metadata  map[string]string `json:"metadata"`
	WeightMap map[string]string `json:"weight_map"`
}

// parse returns the ranges of the names in an index.
func (s Shard) parse(index stateIndex) ([]placedRange, error) {
	type key struct{ tensor, state int }
	names := make(map[string]key, 2*len(s.tensors))
	for i, t := range s.tensors {
		for j, state := range s.states[i] {
			names[t.Name+"."+state] = key{i, j}
		}
	}
	var ranges []placedRange
	var wrong []string
	for _, name := range slices.Sorted(maps.Keys(index.WeightMap)) {
		base, part, cut := strings.Cut(name, "[")
		k, known := names[base]
		if !known {
			wrong = append(wrong, name+" does not belong to this model and optimizer")
			continue
		}
		r := tensorRange{k.tensor, k.state, 0, int(s.tensors[k.tensor].Elements())}
		if cut {
			first, last, ok := strings.Cut(strings.TrimSuffix(part, "]"), ":")
			var errs [2]error
			r.begin, errs[0] = strconv.Atoi(first)
			r.end, errs[1] = strconv.Atoi(last)
			if !ok || errs[0] != nil || errs[1] != nil || s.rangeName(r) != name {
				wrong = append(wrong, name+" is not the name of a range")
				continue
			}
		}
		ranges = append(ranges, placedRange{r, index.WeightMap[name]})
	}
	return ranges, someWrong(wrong)
}

// checkContent returns an error if the tensors of a file differ from the expected ranges.
func (s Shard) checkContent(file *safetensors.File, want []tensorRange) error {
	for _, r := range want {
		entry := s.rangeEntry(r)
		got, ok := file.Tensor(entry.Name)
		if !ok {
			return fmt.Errorf("%s: %s is missing", file.Name(), entry.Name)
		}
		if r.state == weightsState {
			entry.DType = got.DType // every type that can be read
		}
		if got.DType != entry.DType || !slices.Equal(got.Shape, entry.Shape) {
			return fmt.Errorf("%s: %s has shape %v and element type %s; this model needs %v and %s",
				file.Name(), entry.Name, got.Shape, got.DType, entry.Shape, entry.DType)
		}
	}
	wanted := make(map[string]bool, len(want))
	for _, r := range want {
		wanted[s.rangeName(r)] = true
	}
	for _, t := range file.Tensors() {
		if !wanted[t.Name] {
			return fmt.Errorf("%s: %s does not belong to this model and optimizer, or the index lists it for another "+
				"file", file.Name(), t.Name)
		}
	}
	return nil
}

// A weightsHasher computes the hash of a model's weights from the name, shape and hash of each
// tensor: the SHA-256, in hexadecimal, of a text with one line per tensor, in order. The line has
// the tensor's name, its shape and the SHA-256 of its weights as little-endian float32, in
// hexadecimal:
//
//	model.norm.weight [64] 01ba4719c80b6fe911b091a7c05124b64eeece964e09c058ef8f9805daca546b
//
// So ranks with different tensors can compute it together.
type weightsHasher struct{ hash hash.Hash }

func newWeightsHasher() weightsHasher { return weightsHasher{sha256.New()} }

func (w weightsHasher) add(name string, shape []int, sum [sha256.Size]byte) {
	dimensions := make([]string, len(shape))
	for i, d := range shape {
		dimensions[i] = strconv.Itoa(d)
	}
	fmt.Fprintf(w.hash, "%s [%s] %x\n", name, strings.Join(dimensions, ","), sum)
}

func (w weightsHasher) sum() string { return hex.EncodeToString(w.hash.Sum(nil)) }

// A tensorHash is the SHA-256 of a tensor's weights, in hexadecimal.
type tensorHash struct {
	Tensor int    `json:"tensor"`
	SHA256 string `json:"sha256"`
}

// hashOf returns the hash of a tensor's weights. buffer is memory for [pieces].
func (s Shard) hashOf(ctx context.Context, h heldTensor, buffer *[]float32) (tensorHash, error) {
	sum := sha256.New()
	err := pieces(ctx, s.device, h.weight, buffer, func(weights []float32) error {
		_, err := sum.Write(bytesOf(weights))
		return err
	})
	return tensorHash{h.index, hex.EncodeToString(sum.Sum(nil))}, err
}

// pieceElements is the number of elements that are read at once from memory that the host cannot
// use as it is, so that a large tensor does not need its size again.
const pieceElements = 1 << 18

// pieces calls each with all numbers of a tensor, in order. buffer is host memory for a piece.
func pieces(ctx context.Context, m xpu.Memory, t xpu.Tensor, buffer *[]float32, each func([]float32) error) error {
	all := t.Flat()
	for begin, n := 0, all.Elements(); begin < n; begin += pieceElements {
		numbers, err := xpu.Numbers(ctx, m, all.Rows(begin, min(begin+pieceElements, n)), buffer)
		if err == nil {
			err = each(numbers)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// ownedRuns returns the numbers of the tensors that each rank owns, as runs.
func ownedRuns(owner []int, ranks int) [][]indexRun {
	runs := make([][]indexRun, ranks)
	for i, r := range owner {
		runs[r] = appendIndex(runs[r], i)
	}
	return runs
}

// combined returns, for each rank, the hash of the weights, computed from the hashes of all
// tensors. Each hash is in one of the lists.
func (s Shard) combined(all []writtenFiles) ([]string, error) {
	sums := make([][]byte, len(s.tensors))
	for _, written := range all {
		for _, t := range written.Hashes {
			if t.Tensor < 0 || t.Tensor >= len(sums) {
				return nil, fmt.Errorf("a hash of tensor %d of %d", t.Tensor, len(sums))
			}
			sum, err := hex.DecodeString(t.SHA256)
			if err != nil || len(sum) != sha256.Size {
				return nil, fmt.Errorf("%q is not a SHA-256", t.SHA256)
			}
			sums[t.Tensor] = sum
		}
	}
	w := newWeightsHasher()
	for i, t := range s.tensors {
		if sums[i] == nil {
			return nil, fmt.Errorf("no rank has hashed %s", t.Name)
		}
		w.add(t.Name, t.Shape, [sha256.Size]byte(sums[i]))
	}
	return slices.Repeat([]string{w.sum()}, len(all)), nil
}

// WeightsHash returns the hash of the weights of the whole model. Each rank hashes some tensors.
func (s Shard) WeightsHash(ctx context.Context, world *comm.Comm) (string, error) {
	s, err := s.joined(ctx, false)
	if err != nil {
		return "", err
	}
	own, err := collective.Decide(ctx, world, s.runs(), func(runs [][]indexRun) ([][]indexRun, error) {
		owner, err := assign(s.tensors, runs)
		return ownedRuns(owner, len(runs)), err
	})
	if err != nil {
		return "", err
	}
	var w writtenFiles
	var buffer []float32
	for _, h := range s.held {
		if err != nil || !contains(own, h.index) {
			continue
		}
		var hash tensorHash
		hash, err = s.hashOf(ctx, h, &buffer)
		w.Hashes = append(w.Hashes, hash)
	}
	if err := collective.Agree(ctx, world, err); err != nil {
		return "", err
	}
	return collective.Decide(ctx, world, w, s.combined)
}

// bytesOf returns the bytes of numbers in the machine's order, which is little-endian on all
// supported machines.
func bytesOf(values []float32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(values))), 4*len(values))
}
