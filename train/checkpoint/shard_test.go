package checkpoint

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"pgregory.net/rapid"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/longtest"
	"mula/moe"
	"mula/moe/safetensors"
	"mula/shards"
	"mula/train/checkpoint/checkpointtest"
	"mula/train/collective"
	"mula/train/optimizer"
	"mula/xpu"
	"mula/xpu/comm"
	"mula/xpu/comm/local"
	"mula/xpu/cpu"
)

func readJSON(path string, value any) error {
	text, err := readSmall(filesystem.OS{}, path)
	if err != nil {
		return err
	}
	return decode(path, text, value)
}

func writeJSON(path string, value any) error {
	data, err := jsonText(value)
	return errors.Join(err, os.WriteFile(path, data, 0o644))
}

// onRanks runs f as every rank of a world and returns what each has returned.
func onRanks(size int, f func(world *comm.Comm) error) []error {
	if size == 1 {
		return []error{f(comm.NewSingle())}
	}
	errs := make([]error, size)
	var ranks sync.WaitGroup
	for r, link := range local.New(size) {
		ranks.Go(func() {
			world := comm.New(link)
			defer world.Close()
			if errs[r] = f(world); errs[r] == nil {
				errs[r] = world.Barrier(context.Background())
			}
		})
	}
	ranks.Wait()
	return errs
}

// listed returns the checkpoint in dir with a manifest that lists the files as they are.
func listed(t *testing.T, dir string) *Checkpoint {
	t.Helper()
	c := &Checkpoint{Dir: dir, fsys: filesystem.OS{}, manifest: manifest{Files: map[string]shards.FileInfo{}}}
	for _, name := range checkpointtest.Names(t, dir) {
		hash, size, err := shards.HashFile(t.Context(), filepath.Join(dir, name), nil)
		if err != nil {
			t.Fatal(err)
		}
		c.manifest.Files[name] = shards.FileInfo{Bytes: size, SHA256: hash}
	}
	return c
}

// resume loads the newest checkpoint that is not damaged into a shard.
func resume(world *comm.Comm, fsys filesystem.FS, dir string, s Shard) (found *Checkpoint, refused []Refused,
	err error) {
	for {
		found, refused, err = Candidate(context.Background(), world, fsys, dir, refused)
		if err != nil || found == nil {
			return found, refused, err
		}
		if err = s.Load(context.Background(), world, found); !IsDamage(err) {
			return found, refused, err
		}
		refused = append(refused, Refused{found.Name(), err.Error()})
	}
}

// testShard is the shard of a rank that is alone and has an optimizer of hand-made parameters.
func testShard(t testing.TB, d xpu.Memory, o *optimizer.Optimizer) Shard {
	t.Helper()
	var tensors []safetensors.Tensor
	for i, p := range o.Parameters() {
		p.Index = i
		tensors = append(tensors, safetensors.Tensor{Name: p.Name, DType: safetensors.F32, Shape: p.Shape})
	}
	return shardOf(o, d, testModel(t), tensors)
}

// testModel is the config.json in checkpoints of hand-made tensors.
func testModel(t testing.TB) moe.Config {
	t.Helper()
	config, err := moe.Preset("mula-nano")
	if err != nil {
		t.Fatal(err)
	}
	return config
}

// A madeModel is a model made by hand: tensors, and some of them are experts.
type madeModel struct {
	config  moe.Config
	device  xpu.Memory
	tensors []safetensors.Tensor
	states  [][]string
	expert  []int // of each tensor, -1 for a tensor of every rank
	experts int
}

// has reports whether a rank of a layout has a tensor.
func (m madeModel) has(tensor, rank, ep int) bool {
	return m.expert[tensor] < 0 || m.expert[tensor]/(m.experts/ep) == rank%ep
}

// value returns an element: of the weight if state is -1, of the optimizer's state otherwise. It
// identifies the element and the step.
func (m madeModel) value(step int64, tensor, state, element int) float32 {
	return float32(int(step)<<20+tensor<<14+(state+1)<<12+element) / 4
}

func (m madeModel) fill(values []float32, step int64, tensor, state, begin int) {
	for i := range values {
		values[i] = m.value(step, tensor, state, begin+i)
	}
}

// shard returns the shard of one rank. owner returns the rank that owns an element, and therefore
// writes and reads it.
func (m madeModel) shard(rank, ep int, step int64, owner func(tensor, state, element int) int) Shard {
	s := Shard{config: m.config, tensors: m.tensors, states: m.states, device: m.device,
		metadata:    map[string]string{"weight_sum": fmt.Sprint(step)},
		setMetadata: func(map[string]string) error { return nil }}
	for i, t := range m.tensors {
		if !m.has(i, rank, ep) {
			continue
		}
		n := int(t.Elements())
		h := heldTensor{index: i, weight: xpu.Of(make([]float32, n), n)}
		m.fill(h.weight.Floats(), step, i, weightsState, 0)
		h.read = append(h.read, stretch{"", 0, h.weight})
		for j, name := range m.states[i] {
			for begin := 0; begin < n; {
				end := begin + 1
				for end < n && (owner(i, j, end) == rank) == (owner(i, j, begin) == rank) {
					end++
				}
				if owner(i, j, begin) == rank {
					own := stretch{name, begin, xpu.Of(make([]float32, end-begin), end-begin)}
					m.fill(own.values.Floats(), step, i, j, begin)
					h.write, h.read = append(h.write, own), append(h.read, own)
				}
				begin = end
			}
		}
		s.held = append(s.held, h)
	}
	return s
}

// check compares the read values with the values of a step.
func (m madeModel) check(s Shard, step int64) error {
	for _, h := range s.held {
		for _, r := range h.read {
			j := slices.Index(m.states[h.index], r.name) // weightsState for the weights
			for i, v := range r.values.Floats() {
				if want := m.value(step, h.index, j, r.begin+i); v != want {
					return fmt.Errorf("%s of %s at %d: %v, want %v", r.name, m.tensors[h.index].Name, r.begin+i, v,
						want)
				}
			}
		}
	}
	return nil
}

// evenly gives every tensor's state to its holders in equal parts.
func (m madeModel) evenly(size, ep int) func(tensor, state, element int) int {
	return func(tensor, _, element int) int {
		var holders []int
		for r := range size {
			if m.has(tensor, r, ep) {
				holders = append(holders, r)
			}
		}
		return holders[element*len(holders)/int(m.tensors[tensor].Elements())]
	}
}

// oneModel has a tensor of one element, some whose sizes nothing divides, and four experts.
func oneModel(t testing.TB) madeModel {
	m := madeModel{config: testModel(t), device: checkpointtest.Device(t, 1), experts: 4}
	add := func(name string, expert int, shape ...int) {
		m.tensors = append(m.tensors, safetensors.Tensor{Name: name, DType: safetensors.F32, Shape: shape})
		m.states, m.expert = append(m.states, []string{"exp_avg", "exp_avg_sq"}), append(m.expert, expert)
	}
	add("embed", -1, 17, 9)
	add("scale", -1, 1)
	for e := range 4 {
		add(fmt.Sprintf("experts.%d.up", e), e, 5, 7)
		add(fmt.Sprintf("experts.%d.down", e), e, 7, 5)
	}
	add("norm", -1, 31)
	return m
}

// save saves a step with a layout, and fails the test if it cannot.
func (m madeModel) save(t testing.TB, dir string, step int64, dp, ep int) {
	t.Helper()
	for r, err := range m.trySave(dir, step, dp, ep) {
		if err != nil {
			t.Fatalf("rank %d: %v", r, err)
		}
	}
}

// trySave returns what each rank says.
func (m madeModel) trySave(dir string, step int64, dp, ep int) []error {
	return onRanks(dp*ep, func(world *comm.Comm) error {
		s := m.shard(world.Rank(), ep, step, m.evenly(dp*ep, ep))
		return Save(context.Background(), world, dir, &State{Step: step}, s, Options{})
	})
}

// The ranks of any layout, and one rank, load the state that the ranks of another layout saved,
// whatever part of the state each owns. The hash of the weights does not depend on the layout.
func TestReshard(t *testing.T) {
	t.Parallel()
	config, memory := testModel(t), checkpointtest.Device(t, 1)
	root := t.TempDir()
	runs := 0
	rapid.Check(t, func(t *rapid.T) {
		m := madeModel{config: config, device: memory, experts: rapid.SampledFrom([]int{4, 6, 12}).Draw(t, "experts")}
		for i := range rapid.IntRange(1, 12).Draw(t, "tensors") {
			shape := rapid.SliceOfN(rapid.IntRange(1, 9), 0, 3).Draw(t, "shape")
			names := rapid.SampledFrom([][]string{{"exp_avg", "exp_avg_sq"}, {"momentum_buffer"},
				{"y", "z", "exp_avg_sq"}}).Draw(t, "states")
			m.tensors = append(m.tensors, safetensors.Tensor{Name: fmt.Sprint("layers.", i, ".weight"),
				DType: safetensors.F32, Shape: shape})
			m.states, m.expert = append(m.states, names), append(m.expert, rapid.IntRange(-1, m.experts-1).Draw(t,
				"expert"))
		}
		layout := rapid.Custom(func(t *rapid.T) [2]int {
			ep := rapid.SampledFrom([]int{1, 2, m.experts / 2}).Draw(t, "ep")
			return [2]int{rapid.IntRange(1, max(1, 5/ep)).Draw(t, "dp"), ep}
		})
		ownership := func(dp, ep int) func(tensor, state, element int) int {
			if rapid.Bool().Draw(t, "evenly") {
				return m.evenly(dp*ep, ep)
			}
			owners := map[[3]int]int{} // every element alone
			random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "owners"), 1))
			for i, tensor := range m.tensors {
				var holders []int
				for r := range dp * ep {
					if m.has(i, r, ep) {
						holders = append(holders, r)
					}
				}
				for j := range m.states[i] {
					for e := range int(tensor.Elements()) {
						owners[[3]int{i, j, e}] = holders[random.IntN(len(holders))]
					}
				}
			}
			return func(tensor, state, element int) int { return owners[[3]int{tensor, state, element}] }
		}
		runs++
		dir := filepath.Join(root, fmt.Sprint(runs))
		const step = 7
		from := layout.Draw(t, "from")
		owner := ownership(from[0], from[1])
		states := make([]State, from[0]*from[1])
		for r, err := range onRanks(len(states), func(world *comm.Comm) error {
			r := world.Rank()
			states[r].Step = step
			return Save(context.Background(), world, dir, &states[r], m.shard(r, from[1], step, owner), Options{})
		}) {
			if err != nil {
				t.Fatalf("saving at %v, rank %d: %v", from, r, err)
			}
		}
		var whole []*moe.Parameter
		for _, h := range m.shard(0, 1, step, func(int, int, int) int { return 0 }).held {
			whole = append(whole, &moe.Parameter{Name: m.tensors[h.index].Name, Shape: m.tensors[h.index].Shape,
				Weight: h.weight})
		}
		for r, s := range states {
			if s.Weights != checkpointtest.WeightsHash(whole) || s.Format != format {
				t.Fatalf("rank %d: format %d, weights %s, want %s", r, s.Format, s.Weights,
					checkpointtest.WeightsHash(whole))
			}
		}

		to := layout.Draw(t, "to")
		window := rapid.SampledFrom([]int{0, 1, 2, 7, 100}).Draw(t, "window")
		owner = ownership(to[0], to[1])
		for r, err := range onRanks(to[0]*to[1], func(world *comm.Comm) error {
			r := world.Rank()
			found, refused, err := Newest(context.Background(), world, nil, dir)
			if err != nil || found == nil || refused != nil {
				return fmt.Errorf("found %v, refused %v, %w", found, refused, err)
			}
			s := m.shard(r, to[1], 0, owner) // other values
			s.window = window
			var metadata map[string]string
			s.setMetadata = func(text map[string]string) error { metadata = text; return nil }
			if err := s.Load(context.Background(), world, found); err != nil {
				return err
			}
			if metadata["weight_sum"] != fmt.Sprint(step) {
				return fmt.Errorf("metadata %v", metadata)
			}
			hash, err := m.shard(r, to[1], step, owner).WeightsHash(context.Background(), world)
			if err != nil || hash != found.State.Weights {
				return fmt.Errorf("weights %s, want %s; %w", hash, found.State.Weights, err)
			}
			return m.check(s, step)
		}) {
			if err != nil {
				t.Fatalf("saved at %v, loading at %v, rank %d: %v", from, to, r, err)
			}
		}
		m.checkModel(t, filepath.Join(dir, Name(step)), step)
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
	})
}

// checkModel reads the weights of a checkpoint as any program does that knows Hugging Face's files.
func (m madeModel) checkModel(t interface{ Fatalf(string, ...any) }, dir string, step int64) {
	d, err := safetensors.OpenDirectory(filesystem.OS{}, dir)
	if err != nil {
		t.Fatalf("%v", err)
	}
	defer d.Close()
	if n := len(d.Tensors()); n != len(m.tensors) {
		t.Fatalf("%d tensors, want %d", n, len(m.tensors))
	}
	for i, tensor := range m.tensors {
		got, want := make([]float32, tensor.Elements()), make([]float32, tensor.Elements())
		m.fill(want, step, i, -1, 0)
		if err := d.Float32(got, tensor.Name, 0); err != nil || !slices.Equal(got, want) {
			t.Fatalf("%s: %v, or other values", tensor.Name, err)
		}
	}
}

// The files of a checkpoint of many ranks: whole tensors spread evenly, every range of the state
// under its name, everything in the manifest; one rank writes one file of each.
func TestSharedFiles(t *testing.T) {
	t.Parallel()
	m := oneModel(t)
	dir := t.TempDir()
	m.save(t, dir, 1, 2, 2)
	path := filepath.Join(dir, Name(1))
	entries, err := os.ReadDir(path)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	want := []string{"config.json", "generation_config.json", "manifest.json",
		"model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors", "model-00003-of-00004.safetensors",
		"model-00004-of-00004.safetensors",
		"model.safetensors.index.json",
		"optimizer-00001-of-00004.safetensors", "optimizer-00002-of-00004.safetensors",
		"optimizer-00003-of-00004.safetensors", "optimizer-00004-of-00004.safetensors",
		"optimizer.safetensors.index.json", "state.json"}
	if !slices.Equal(got, want) {
		t.Errorf("files %q, want %q", got, want)
	}
	var manifest manifest
	if err := readJSON(filepath.Join(path, manifestFile), &manifest); err != nil {
		t.Fatal(err)
	}
	if manifest.Format != 2 || manifest.Step != 1 || len(manifest.Files) != len(want)-1 {
		t.Errorf("manifest %+v", manifest)
	}
	for name, info := range manifest.Files {
		hash, size, err := shards.HashFile(context.Background(), filepath.Join(path, name), nil)
		if err != nil || info != (shards.FileInfo{Bytes: size, SHA256: hash}) {
			t.Errorf("%s: %+v in the manifest, %d and %s on disk, %v", name, info, size, hash, err)
		}
	}
	var index stateIndex
	if err := readJSON(filepath.Join(path, optimizerIndexFile), &index); err != nil {
		t.Fatal(err)
	}
	for name, file := range map[string]string{
		"embed.exp_avg[0:39]":         "optimizer-00001-of-00004.safetensors",
		"embed.exp_avg_sq[115:153]":   "optimizer-00004-of-00004.safetensors",
		"scale.exp_avg":               "optimizer-00001-of-00004.safetensors",
		"experts.3.up.exp_avg[18:35]": "optimizer-00004-of-00004.safetensors",
	} {
		if index.WeightMap[name] != file {
			t.Errorf("%s is in %q, want %q; there are %q", name, index.WeightMap[name], file,
				slices.Sorted(maps.Keys(index.WeightMap)))
		}
	}
	// 264+187 bytes are split as evenly as possible: 153 of the embedding alone, and the others
	// around it.
	var least, most int64 = 1 << 60, 0
	for name, info := range manifest.Files {
		if strings.HasPrefix(name, "model-") {
			least, most = min(least, info.Bytes), max(most, info.Bytes)
		}
	}
	if most > 153*4+600 || least < 70*4 {
		t.Errorf("files of %d to %d bytes", least, most)
	}

	single := t.TempDir()
	m.save(t, single, 1, 1, 1)
	for _, name := range []string{modelFile, optimizerFile, modelConfig, generationFile, stateFile, manifestFile} {
		if _, err := os.Stat(filepath.Join(single, Name(1), name)); err != nil {
			t.Error(err)
		}
	}
	if entries, _ := os.ReadDir(filepath.Join(single, Name(1))); len(entries) != 6 {
		t.Errorf("one rank writes %v", entries)
	}
}

// The hash of weights is the hash of a text with a simple format.
func TestWeightsHash(t *testing.T) {
	t.Parallel()
	// printf 'a [2,1] %s\nmodel.norm.weight [1] %s\n' $(printf '\0\0\x80\x3f\0\0\0\xc0' | sha256sum
	// | cut -d' ' -f1) \
	//	$(printf '\0\0\0\x3f' | sha256sum | cut -d' ' -f1) | sha256sum
	const want = "cfc5db57488a7eb3ff1529cf3fde99af0b2a611b94207213da315bebaeee308e"
	parameters := []*moe.Parameter{
		{Name: "a", Shape: []int{2, 1}, Weight: xpu.Of([]float32{1, -2}, 2, 1)}, // 0000803f 000000c0
		{Name: "model.norm.weight", Shape: []int{1}, Weight: xpu.Of([]float32{0.5}, 1)},
	}
	hash := func() string {
		w := newWeightsHasher()
		for _, p := range parameters {
			w.add(p.Name, p.Shape, sha256.Sum256(bytesOf(p.Weight.Floats())))
		}
		return w.sum()
	}
	if got, test := hash(), checkpointtest.WeightsHash(parameters); got != want || test != want {
		t.Errorf("%s, and %s for tests, want %s", got, test, want)
	}
	parameters[0].Shape = []int{2}
	if hash() == want {
		t.Error("another shape has the same hash")
	}
}

// Tensors go to ranks that have them, as evenly as whole tensors allow.
func TestAssign(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		m := madeModel{experts: 12}
		var largest int64
		for i := range rapid.IntRange(1, 200).Draw(t, "tensors") {
			n := rapid.IntRange(1, 1000).Draw(t, "size")
			largest = max(largest, int64(n))
			m.tensors = append(m.tensors, safetensors.Tensor{Name: fmt.Sprint(i), Shape: []int{n}})
			m.expert = append(m.expert, rapid.IntRange(-1, 11).Draw(t, "expert"))
		}
		ep := rapid.SampledFrom([]int{1, 2, 3, 12}).Draw(t, "ep")
		size := ep * rapid.IntRange(1, 6).Draw(t, "dp")
		runs := make([][]indexRun, size)
		for r := range runs {
			var s Shard
			for i := range m.tensors {
				if m.has(i, r, ep) {
					s.held = append(s.held, heldTensor{index: i})
				}
			}
			runs[r] = s.runs()
		}
		owner, err := assign(m.tensors, runs)
		if err != nil {
			t.Fatal(err)
		}
		loads := make([]int64, size)
		var replicated int64
		for i, r := range owner {
			if !m.has(i, r, ep) {
				t.Fatalf("tensor %d goes to rank %d, which does not have it", i, r)
			}
			loads[r] += m.tensors[i].Elements()
			if m.expert[i] < 0 {
				replicated += m.tensors[i].Elements()
			}
		}
		// The ranks that have the same experts are even among themselves.
		for r, load := range loads {
			if other := loads[r%ep]; load-other > largest || other-load > largest {
				t.Fatalf("loads %v with tensors of at most %d elements", loads, largest)
			}
		}
	})
	tensors := []safetensors.Tensor{{Name: "a", Shape: []int{2}}, {Name: "experts.1", Shape: []int{2}}}
	if _, err := assign(tensors, [][]indexRun{{{0, 1}}, {{0, 1}}}); err == nil ||
		!strings.Contains(err.Error(), "no rank has experts.1") {
		t.Errorf("a tensor that nobody has: %v", err)
	}
}

// A state that does not cover every tensor exactly once is refused, and so is one of another model
// or optimizer; the error names the tensor.
func TestStateRefused(t *testing.T) {
	t.Parallel()
	s := oneModel(t).shard(0, 1, 1, func(int, int, int) int { return 0 })
	whole := map[string]string{}
	ranges, _, err := s.written()
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range ranges {
		whole[s.rangeName(r)] = "a"
	}
	type entries = map[string]string
	for _, test := range []struct {
		name   string
		remove []string
		add    entries
		want   string // "" if it is right
	}{
		{"whole", nil, nil, ""},
		{"in parts", []string{"norm.exp_avg"}, entries{"norm.exp_avg[0:1]": "a", "norm.exp_avg[1:30]": "b",
			"norm.exp_avg[30:31]": "a"}, ""},
		{"missing", []string{"experts.2.up.exp_avg"}, nil, "experts.2.up.exp_avg is missing"},
		{"an expert missing", []string{"experts.3.up.exp_avg", "experts.3.up.exp_avg_sq", "experts.3.down.exp_avg",
			"experts.3.down.exp_avg_sq"}, nil,
			"experts.3.up.exp_avg is missing; experts.3.up.exp_avg_sq is missing; experts.3.down.exp_avg is missing"},
		{"beginning missing", []string{"norm.exp_avg"}, entries{"norm.exp_avg[4:31]": "a"},
			"norm.exp_avg[0:4] is missing"},
		{"middle missing", []string{"norm.exp_avg"}, entries{"norm.exp_avg[0:4]": "a", "norm.exp_avg[5:31]": "a"},
			"norm.exp_avg[4:5] is missing"},
		{"end missing", []string{"norm.exp_avg"}, entries{"norm.exp_avg[0:4]": "a"}, "norm.exp_avg[4:31] is missing"},
		{"doubled", nil, entries{"norm.exp_avg[0:4]": "b"}, "norm.exp_avg[0:4] in b and norm.exp_avg in a overlap"},
		{"overlap", []string{"norm.exp_avg"}, entries{"norm.exp_avg[0:5]": "a", "norm.exp_avg[4:31]": "b"},
			"norm.exp_avg[0:5] in a and norm.exp_avg[4:31] in b overlap"},
		{"beyond", []string{"norm.exp_avg"}, entries{"norm.exp_avg[0:32]": "a"},
			"norm.exp_avg[0:32] in a is not a range of a tensor of 31 elements"},
		{"empty range", nil, entries{"norm.exp_avg[3:3]": "a"}, "norm.exp_avg[3:3] in a is not a range of a tensor"},
		{"backwards", nil, entries{"norm.exp_avg[3:1]": "a"}, "norm.exp_avg[3:1] in a is not a range of a tensor"},
		{"negative", nil, entries{"norm.exp_avg[-1:1]": "a"}, "norm.exp_avg[-1:1] in a is not a range of a tensor"},
		{"whole written as a range", nil, entries{"norm.exp_avg[0:31]": "a"},
			"norm.exp_avg[0:31] is not the name of a range"},
		{"no number", nil, entries{"norm.exp_avg[0:x]": "a"}, "norm.exp_avg[0:x] is not the name of a range"},
		{"not closed", nil, entries{"norm.exp_avg[0:3": "a"}, "norm.exp_avg[0:3 is not the name of a range"},
		{"leading zero", nil, entries{"norm.exp_avg[00:3]": "a"}, "norm.exp_avg[00:3] is not the name of a range"},
		{"another optimizer", nil, entries{"norm.momentum_buffer": "a"},
			"norm.momentum_buffer does not belong to this model and optimizer"},
		{"another model", nil, entries{"experts.4.up.exp_avg": "a"},
			"experts.4.up.exp_avg does not belong to this model and optimizer"},
	} {
		index := stateIndex{WeightMap: maps.Clone(whole)}
		for _, name := range test.remove {
			delete(index.WeightMap, name)
		}
		maps.Copy(index.WeightMap, test.add)
		ranges, err := s.parse(index)
		if err == nil {
			err = s.check(ranges)
		}
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v, want %q", test.name, err, test.want)
		}
	}
}

// A file whose tensors differ from the index is refused, whichever rank needs them.
func TestStateFilesRefused(t *testing.T) {
	t.Parallel()
	m := oneModel(t)
	original := t.TempDir()
	m.save(t, original, 1, 3, 1)
	index := func(dir string, change func(*stateIndex)) error {
		var i stateIndex
		path := filepath.Join(dir, optimizerIndexFile)
		if err := readJSON(path, &i); err != nil {
			return err
		}
		change(&i)
		return writeJSON(path, i)
	}
	rewrite := func(dir string, change func(t *safetensors.Tensor)) error {
		path := filepath.Join(dir, "optimizer-00002-of-00003.safetensors")
		f, err := safetensors.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		tensors := f.Tensors()
		for i := range tensors {
			change(&tensors[i])
		}
		var out strings.Builder
		w, err := safetensors.NewWriter(&out, tensors, nil)
		for _, t := range tensors {
			if err == nil {
				err = w.Float32(t.Name, make([]float32, t.Elements()))
			}
		}
		return errors.Join(err, os.WriteFile(path, []byte(out.String()), 0o644))
	}
	for what, test := range map[string]struct {
		damage func(dir string) error
		want   string
	}{
		"another shape": {func(dir string) error {
			return rewrite(dir, func(t *safetensors.Tensor) { t.Shape = append([]int{1}, t.Shape...) })
		}, "optimizer-00002-of-00003.safetensors: embed.exp_avg[51:102] has shape [1 51]"},
		"another type": {func(dir string) error {
			return rewrite(dir, func(t *safetensors.Tensor) { t.DType = safetensors.BF16 })
		}, "optimizer-00002-of-00003.safetensors: embed.exp_avg[51:102] has shape [51] and element type BF16"},
		"another name": {func(dir string) error {
			return rewrite(dir, func(t *safetensors.Tensor) { t.Name = strings.Replace(t.Name, "norm.", "norm2.", 1) })
		}, "is missing"},
		"more than the index says": {func(dir string) error {
			return index(dir,
				func(i *stateIndex) { i.WeightMap["norm.exp_avg[11:21]"] = "optimizer-00001-of-00003.safetensors" })
		}, "norm.exp_avg[11:21]"},
		"a file elsewhere": {func(dir string) error {
			return index(dir,
				func(i *stateIndex) { i.WeightMap["norm.exp_avg[11:21]"] = "../optimizer-00001-of-00003.safetensors" })
		}, `"../optimizer-00001-of-00003.safetensors" is in an index, but not in manifest.json`},
		"no index": {func(dir string) error { return os.Remove(filepath.Join(dir, optimizerIndexFile)) },
			optimizerIndexFile},
	} {
		dir := t.TempDir()
		if err := os.CopyFS(dir, os.DirFS(filepath.Join(original, Name(1)))); err != nil {
			t.Fatal(err)
		}
		if err := test.damage(dir); err != nil {
			t.Fatal(err)
		}
		from := listed(t, dir)
		for _, size := range []int{1, 2, 5} {
			for r, err := range onRanks(size, func(world *comm.Comm) error {
				// Rank 0 alone needs anything, and all find it out.
				return m.shard(world.Rank(), 1, 0, func(int, int, int) int { return 0 }).Load(context.Background(),
					world, from)
			}) {
				if err == nil || !strings.Contains(err.Error(), test.want) {
					t.Errorf("%s, rank %d of %d: error %v, want %q", what, r, size, err, test.want)
				}
			}
		}
	}
}

// What ranks say of themselves that does not fit together is refused before anything is written, on
// all of them, and nothing stays behind.
func TestSaveRefused(t *testing.T) {
	t.Parallel()
	m := oneModel(t)
	all := m.evenly(2, 1)
	for what, test := range map[string]struct {
		change func(rank int, s *Shard, dir *string)
		want   []string
	}{
		"a directory that is not shared": {func(rank int, _ *Shard, dir *string) {
			if rank == 1 {
				*dir = filepath.Join(*dir, "elsewhere")
			}
		}, []string{"rank 1 on " + collective.Hostname(), "cannot see ", "a file system that all ranks share"}},
		"no rank writes a range": {func(rank int, s *Shard, _ *string) {
			if rank == 1 {
				s.held[0].write = nil
			}
		}, []string{"embed.exp_avg[77:153] is missing"}},
		"two ranks write a range": {func(_ int, s *Shard, _ *string) {
			s.held[1].write = []stretch{{"exp_avg", 0, xpu.Of([]float32{0}, 1)},
				{"exp_avg_sq", 0, xpu.Of([]float32{0}, 1)}}
		}, []string{"scale.exp_avg in optimizer-00001-of-00002.safetensors and scale.exp_avg in " +
			"optimizer-00002-of-00002.safetensors overlap"}},
		"an unknown state": {func(rank int, s *Shard, _ *string) {
			if rank == 1 {
				s.held[0].write[0].name = "hessian"
			}
		}, []string{"rank 1 on", "embed has no hessian"}},
		"no rank has a tensor": {func(_ int, s *Shard, _ *string) { s.held = s.held[:len(s.held)-1] },
			[]string{"no rank has norm"}},
		"other numbers": {func(rank int, s *Shard,
			_ *string) {
			s.metadata = map[string]string{"lr_max": fmt.Sprint(rank)}
		},
			[]string{"map[lr_max:0] on rank 0, but map[lr_max:1] on rank 1"}},
	} {
		dir := t.TempDir()
		m.save(t, dir, 1, 1, 1)
		for r, err := range onRanks(2, func(world *comm.Comm) error {
			s, own := m.shard(world.Rank(), 1, 2, all), dir
			test.change(world.Rank(), &s, &own)
			return Save(context.Background(), world, own, &State{Step: 2}, s, Options{})
		}) {
			for _, want := range append(test.want, Name(2)) {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("%s, rank %d: error %v, want %q", what, r, err, want)
				}
			}
		}
		if names := checkpointtest.Names(t, dir); !slices.Equal(names, []string{Name(1)}) {
			t.Errorf("%s: left %q", what, names)
		}
	}
}

// Whichever file operation of whichever rank fails, all ranks give up the checkpoint with an error
// that names rank, host and file; what is there then is the step before or, if the failure came
// after the last moment, the step itself, and never a mixture.
func TestEveryFaultOfEveryRank(t *testing.T) {
	m := oneModel(t)
	type operation struct {
		op   atomicfile.Op
		path string // in the directory of checkpoints
	}
	// within is a path without what is new in each try.
	var dir string
	temporary := regexp.MustCompile(`^/\.step-00000002\.[^/]*\.tmp`)
	within := func(path string) string {
		return temporary.ReplaceAllString(strings.TrimPrefix(filepath.ToSlash(path), filepath.ToSlash(dir)),
			"/"+Name(2)+"~")
	}
	root := t.TempDir()
	dir = filepath.Join(root, "unharmed")
	m.save(t, dir, 1, 3, 1)
	defer func() { atomicfile.Fault = nil }()
	var mu sync.Mutex
	count := map[operation]int{}
	atomicfile.Fault = func(op atomicfile.Op, path string) error {
		mu.Lock()
		defer mu.Unlock()
		count[operation{op, within(path)}]++
		return nil
	}
	m.save(t, dir, 2, 2, 2)
	atomicfile.Fault = nil
	files := 0
	dir = filepath.Join(root, "harmed")
	m.save(t, dir, 1, 3, 1)
	for o, times := range count {
		if o.op == atomicfile.OpRename {
			files++
		}
		for n := 1; n <= times; n++ {
			if o.op == atomicfile.OpWrite && n < times { // of many writes the last is enough
				continue
			}
			seen := 0
			atomicfile.Fault = func(op atomicfile.Op, path string) error {
				if (operation{op, within(path)}) != o {
					return nil
				}
				mu.Lock()
				defer mu.Unlock()
				if seen++; seen == n {
					return syscall.ENOSPC
				}
				return nil
			}
			errs := m.trySave(dir, 2, 2, 2)
			atomicfile.Fault = nil
			what := fmt.Sprintf("%s of %s, time %d", o.op, o.path, n)
			own := 0
			for r, err := range errs {
				if err == nil || !strings.Contains(err.Error(), "rank ") ||
					!strings.Contains(err.Error(), collective.Hostname()) ||
					!strings.Contains(err.Error(), strings.TrimSuffix(path.Base(o.path), "~")) &&
						o.op != atomicfile.OpSyncDir || !strings.Contains(err.Error(), syscall.ENOSPC.Error()) {
					t.Fatalf("%s: rank %d says %v", what, r, err)
				}
				if errors.Is(err, syscall.ENOSPC) {
					own++
				}
			}
			if own != 1 {
				t.Errorf("%s: %d ranks know the cause itself, want 1", what, own)
			}
			for _, size := range []int{1, 2} {
				for r, err := range onRanks(size, func(world *comm.Comm) error {
					found, refused, err := Newest(context.Background(), world, nil, dir)
					if err != nil || found == nil || refused != nil {
						return fmt.Errorf("found %v, refused %v, %w", found, refused, err)
					}
					if last := o.op == atomicfile.OpSyncDir && o.path == ""; found.State.Step == 2 != last {
						return fmt.Errorf("found step %d", found.State.Step)
					}
					s := m.shard(world.Rank(), 1, 0, m.evenly(size, 1))
					if err := s.Load(context.Background(), world, found); err != nil {
						return err
					}
					return m.check(s, found.State.Step)
				}) {
					if err != nil {
						t.Fatalf("%s: rank %d of %d: %v", what, r, size, err)
					}
				}
			}
			for _, name := range checkpointtest.Names(t, dir) {
				if strings.HasPrefix(name, ".") {
					t.Errorf("%s: left %s", what, name)
				}
			}
			if t.Failed() {
				return
			}
			if err := os.RemoveAll(filepath.Join(dir, Name(2))); err != nil {
				t.Fatal(err)
			}
		}
	}
	if files < 14 { // 4 of weights, 4 of the state, 2 indexes, config.json, state.json, manifest.json, the directory
		t.Errorf("only %d renames in %v", files, count)
	}
}

// The manifest comes when the files of all ranks have their names on disk, and the directory gets
// its name when the manifest has.
func TestManifestLast(t *testing.T) {
	m := oneModel(t)
	dir := t.TempDir()
	var mu sync.Mutex
	var trace []string
	defer func() { atomicfile.Fault = nil }()
	atomicfile.Fault = func(op atomicfile.Op, path string) error {
		mu.Lock()
		defer mu.Unlock()
		name := filepath.Base(path)
		switch {
		case path == dir:
			name = "all"
		case strings.HasSuffix(name, atomicfile.TempSuffix):
			name = "temporary"
		}
		trace = append(trace, fmt.Sprint(op, " ", name))
		return nil
	}
	m.save(t, dir, 1, 2, 2)
	atomicfile.Fault = nil
	manifest := slices.Index(trace, "create manifest.json")
	if manifest < 0 {
		t.Fatalf("no manifest in %q", trace)
	}
	named, synced := 0, 0
	for _, o := range trace[:manifest] {
		if strings.HasPrefix(o, "rename model-") || strings.HasPrefix(o, "rename optimizer-") {
			named++
		}
		if o == "sync directory temporary" {
			synced++
		}
	}
	if named != 8 || synced != 4 {
		t.Errorf("before the manifest %d files had their names and the directory was brought to disk %d times, want "+
			"8 and 4, in %q", named, synced, trace)
	}
	want := []string{"create manifest.json", "write manifest.json", "sync manifest.json", "rename manifest.json",
		"sync directory temporary",
		"rename " + Name(1), "sync directory all"}
	if !slices.Equal(trace[manifest:], want) {
		t.Errorf("the end is %q, want %q", trace[manifest:], want)
	}
}

// A file system that does not show rank 0 what another rank has written ends the save, even if all
// see the directory.
func TestUnseenFile(t *testing.T) {
	m := oneModel(t)
	dir := t.TempDir()
	m.save(t, dir, 1, 1, 1)
	defer func() { atomicfile.Fault = nil }()
	const lost = "optimizer-00003-of-00004.safetensors"
	atomicfile.Fault = func(op atomicfile.Op, path string) error {
		if op == atomicfile.OpCreate && filepath.Base(path) == stateFile { // all have said that their files are on disk
			return os.Truncate(filepath.Join(filepath.Dir(path), lost), 100)
		}
		return nil
	}
	for r, err := range m.trySave(dir, 2, 2, 2) {
		for _, want := range []string{"rank 0 on", lost, "written by rank 2", needShared} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("rank %d: error %v, want %q", r, err, want)
			}
		}
	}
	if names := checkpointtest.Names(t, dir); !slices.Equal(names, []string{Name(1)}) {
		t.Errorf("left %q", names)
	}
}

// A checkpoint with one changed file is refused, with the name of the file, and the previous
// checkpoint is used: by one rank and by many.
func TestDamagedSharedCheckpoint(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	m := oneModel(t)
	original := t.TempDir()
	m.save(t, original, 1, 2, 2)
	m.save(t, original, 2, 2, 2)
	file := func(kind string, k int) string { return fmt.Sprintf("%s-%05d-of-00004.safetensors", kind, k) }
	edit := func(name string, change func([]byte) []byte) func(dir string) error {
		return func(dir string) error {
			data, err := os.ReadFile(filepath.Join(dir, name))
			if err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(dir, name), change(data), 0o644)
		}
	}
	type damage struct {
		do   func(dir string) error
		want string
	}
	damages := map[string]damage{
		"two ranks' files swapped": {func(dir string) error {
			a, b, c := filepath.Join(dir, file("optimizer", 1)), filepath.Join(dir, file("optimizer", 2)),
				filepath.Join(dir, "c")
			return errors.Join(os.Rename(a, c), os.Rename(b, a), os.Rename(c, b))
		}, "optimizer-0000"},
		"a file of another step": {func(dir string) error {
			data, err := os.ReadFile(filepath.Join(dir, "..", Name(1), file("optimizer", 3)))
			return errors.Join(err, os.WriteFile(filepath.Join(dir, file("optimizer", 3)), data, 0o644))
		}, file("optimizer", 3)},
		"weights of one file beside those of many": {func(dir string) error {
			return os.WriteFile(filepath.Join(dir, modelFile), []byte("x"), 0o644)
		}, modelFile},
		"manifest without an index": {func(dir string) error {
			var m manifest
			err := readJSON(filepath.Join(dir, manifestFile), &m)
			delete(m.Files, optimizerIndexFile)
			return errors.Join(err, writeJSON(filepath.Join(dir, manifestFile), m))
		}, optimizerIndexFile},
	}
	for _, name := range []string{file("model", 1), file("model", 4), modelIndexFile, file("optimizer", 1),
		file("optimizer", 4), optimizerIndexFile, stateFile, modelConfig} {
		damages["bit flipped: "+name] = damage{edit(name, func(b []byte) []byte { b[len(b)*3/4] ^= 1; return b }), name}
		damages["truncated: "+name] = damage{edit(name, func(b []byte) []byte { return b[:len(b)-1] }), name}
		damages["deleted: "+name] = damage{func(dir string) error { return os.Remove(filepath.Join(dir, name)) }, name}
	}
	for what, d := range damages {
		dir := t.TempDir()
		if err := os.CopyFS(dir, os.DirFS(original)); err != nil {
			t.Fatal(err)
		}
		if err := d.do(filepath.Join(dir, Name(2))); err != nil {
			t.Fatal(err)
		}
		for _, size := range []int{1, 3} {
			for r, err := range onRanks(size, func(world *comm.Comm) error {
				found, refused, err := Newest(context.Background(), world, nil, dir)
				s := m.shard(world.Rank(), 1, 0, m.evenly(size, 1))
				for range 2 {
					if err != nil || found == nil || found.State.Step != 1 || len(refused) != 1 ||
						refused[0].Checkpoint != Name(2) || !strings.Contains(refused[0].Error, d.want) {
						return fmt.Errorf("found %v, refused %v, %w", found, refused, err)
					}
					found, refused, err = resume(world, nil, dir, s)
				}
				return m.check(s, 1)
			}) {
				if err != nil {
					t.Errorf("%s: rank %d of %d: %v", what, r, size, err)
				}
			}
		}
	}
	// No rank treats a checkpoint that cannot be read as damaged.
	for what, test := range map[string]struct {
		do   func(dir string) error
		want string
	}{
		"a newer version": {func(dir string) error {
			return os.WriteFile(filepath.Join(dir, manifestFile), []byte(`{"format": 3, "step": 2}`), 0o644)
		}, "a newer version of mula"},
		"a file that the system does not give": {func(dir string) error {
			path := filepath.Join(dir, file("optimizer", 2))
			return errors.Join(os.Remove(path), os.Symlink(path, path))
		}, file("optimizer", 2)},
	} {
		dir := t.TempDir()
		if err := os.CopyFS(dir, os.DirFS(original)); err != nil {
			t.Fatal(err)
		}
		if err := test.do(filepath.Join(dir, Name(2))); err != nil {
			t.Fatal(err)
		}
		for _, size := range []int{1, 3} {
			for r, err := range onRanks(size, func(world *comm.Comm) error {
				_, _, err := Newest(context.Background(), world, nil, dir)
				if err == nil || !strings.Contains(err.Error(), "may be complete") {
					return fmt.Errorf("error %w", err)
				}
				_, refused, err := resume(world, nil, dir, m.shard(world.Rank(), 1, 0, m.evenly(size, 1)))
				if refused != nil || err == nil || !strings.Contains(err.Error(), test.want) {
					return fmt.Errorf("refused %v, error %w", refused, err)
				}
				return nil
			}) {
				if err != nil {
					t.Errorf("%s: rank %d of %d: %v", what, r, size, err)
				}
			}
		}
	}
	// A rank that does not see the file system of rank 0 reports it; the checkpoint is complete.
	for r, err := range onRanks(3, func(world *comm.Comm) error {
		dir := original
		if world.Rank() == 2 {
			dir = t.TempDir()
		}
		_, _, err := Newest(context.Background(), world, nil, dir)
		_, refused, loadErr := resume(world, nil, dir, m.shard(world.Rank(), 1, 0, m.evenly(3, 1)))
		for _, err := range []error{err, loadErr} {
			for _, want := range []string{"rank 2 on", "a file system that all ranks share"} {
				if refused != nil || err == nil || !strings.Contains(err.Error(), want) {
					return fmt.Errorf("refused %v, error %w, want %q", refused, err, want)
				}
			}
		}
		return nil
	}) {
		if err != nil {
			t.Errorf("a directory that is not shared, rank %d: %v", r, err)
		}
	}
}

// A rank that is gone ends the save of the others with an error, and what is there stays.
func TestSaveWithoutARank(t *testing.T) {
	t.Parallel()
	m := oneModel(t)
	dir := t.TempDir()
	m.save(t, dir, 1, 3, 1)
	for r, err := range onRanks(3, func(world *comm.Comm) error {
		if world.Rank() == 1 {
			return errors.New("leaves")
		}
		return Save(context.Background(), world, dir, &State{Step: 2}, m.shard(world.Rank(), 1, 2,
			m.evenly(3, 1)), Options{})
	}) {
		if r != 1 && !errors.Is(err, comm.ErrPeerLost) {
			t.Errorf("rank %d: %v", r, err)
		}
	}
	if names := checkpointtest.Names(t, dir); !slices.Equal(names, []string{Name(1)}) {
		t.Errorf("left %q", names)
	}
	// A rank that looks for checkpoints also reports it: no checkpoint is refused because of it.
	for r, err := range onRanks(3, func(world *comm.Comm) error {
		if world.Rank() == 1 {
			return errors.New("leaves")
		}
		_, refused, err := Newest(context.Background(), world, nil, dir)
		if refused != nil {
			return fmt.Errorf("refused %v", refused)
		}
		return err
	}) {
		if r != 1 && !errors.Is(err, comm.ErrPeerLost) {
			t.Errorf("rank %d: %v", r, err)
		}
	}
}

// Moments follow their expert: with a constant for each expert, every rank of any layout has the
// moments of its own experts.
func TestMomentsFollowTheirExpert(t *testing.T) {
	t.Parallel()
	m := oneModel(t)
	dir := t.TempDir()
	constant := func(s Shard) Shard {
		for _, h := range s.held {
			for _, w := range h.write {
				for i := range w.values.Floats() {
					w.values.Floats()[i] = float32(100 + m.expert[h.index])
				}
			}
		}
		return s
	}
	for r, err := range onRanks(4, func(world *comm.Comm) error {
		return Save(context.Background(), world, dir, &State{Step: 1},
			constant(m.shard(world.Rank(), 4, 1, m.evenly(4, 4))), Options{})
	}) {
		if err != nil {
			t.Fatalf("rank %d: %v", r, err)
		}
	}
	for _, layout := range [][2]int{{1, 1}, {4, 1}, {2, 2}, {1, 2}, {3, 4}} {
		size, ep := layout[0]*layout[1], layout[1]
		for r, err := range onRanks(size, func(world *comm.Comm) error {
			s := m.shard(world.Rank(), ep, 0, m.evenly(size, ep))
			if _, _, err := resume(world, nil, dir, s); err != nil {
				return err
			}
			for _, h := range s.held {
				for _, got := range h.read[1:] { // without the weights
					for _, v := range got.values.Floats() {
						if v != float32(100+m.expert[h.index]) {
							return fmt.Errorf("%s.%s has the moments of expert %v", m.tensors[h.index].Name, got.name,
								v-100)
						}
					}
				}
			}
			return nil
		}) {
			if err != nil {
				t.Errorf("%v, rank %d: %v", layout, r, err)
			}
		}
	}
}

// A checkpoint of format 1, of a version without many ranks, is found and loaded by any layout.
func TestFormat1(t *testing.T) {
	t.Parallel()
	m := oneModel(t)
	dir := t.TempDir()
	m.save(t, dir, 3, 1, 1)
	path := filepath.Join(dir, Name(3))
	var state State
	var manifest manifest
	if err := errors.Join(readJSON(filepath.Join(path, stateFile), &state), readJSON(filepath.Join(path, manifestFile),
		&manifest)); err != nil {
		t.Fatal(err)
	}
	state.Format, manifest.Format, state.Weights = 1, 1, "as it was"
	if err := writeJSON(filepath.Join(path, stateFile), state); err != nil {
		t.Fatal(err)
	}
	hash, size, err := shards.HashFile(context.Background(), filepath.Join(path, stateFile), nil)
	if err != nil {
		t.Fatal(err)
	}
	manifest.Files[stateFile] = shards.FileInfo{Bytes: size, SHA256: hash}
	if err := writeJSON(filepath.Join(path, manifestFile), manifest); err != nil {
		t.Fatal(err)
	}
	for _, layout := range [][2]int{{1, 1}, {1, 4}, {2, 2}} {
		size, ep := layout[0]*layout[1], layout[1]
		for r, err := range onRanks(size, func(world *comm.Comm) error {
			found, _, err := Newest(context.Background(), world, nil, dir)
			if err != nil {
				return err
			}
			if found.State.Format != 1 || found.State.Weights != "as it was" {
				return fmt.Errorf("state %+v", found.State)
			}
			s := m.shard(world.Rank(), ep, 0, m.evenly(size, ep))
			return errors.Join(s.Load(context.Background(), world, found), m.check(s, 3))
		}) {
			if err != nil {
				t.Errorf("%v, rank %d: %v", layout, r, err)
			}
		}
	}
	// Its manifest lists one file of each kind; an index instead is not of that format.
	delete(manifest.Files, optimizerFile)
	manifest.Files[optimizerIndexFile] = shards.FileInfo{}
	if err := writeJSON(filepath.Join(path, manifestFile), manifest); err != nil {
		t.Fatal(err)
	}
	if _, err := verify(context.Background(), comm.NewSingle(), filesystem.OS{}, path, true); err == nil ||
		!strings.Contains(err.Error(), "does not list "+optimizerFile) {
		t.Errorf("format 1 with an index: %v", err)
	}
}

// A tensor that the host cannot use as it is, is read in pieces of a limited size.
func TestPieces(t *testing.T) {
	d := cpu.New(1, xpu.BF16Mixed)
	defer d.Close()
	want := make([]float32, 2*pieceElements+7)
	for i := range want {
		want[i] = float32(i % 251)
	}
	halves, err := d.New(xpu.BFloat16, len(want))
	if err != nil {
		t.Fatal(err)
	}
	d.Write(halves, want)
	for _, x := range []xpu.Tensor{halves, xpu.Of(want, len(want))} {
		var buffer, got []float32
		err := pieces(t.Context(), d, x, &buffer, func(numbers []float32) error {
			got = append(got, numbers...)
			return nil
		})
		if err != nil || !slices.Equal(got, want) || cap(buffer) > pieceElements {
			t.Errorf("%s: %d numbers of %d, with a buffer of %d; %v", x.DType(), len(got), len(want), cap(buffer), err)
		}
		broken := errors.New("broken")
		if err := pieces(t.Context(), d, x, &buffer, func([]float32) error { return broken }); err != broken {
			t.Errorf("%s: the error is %v", x.DType(), err)
		}
	}
}
