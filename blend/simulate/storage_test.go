package simulate

import (
	"context"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"mula/blend"
	"mula/internal/strictyaml"
	"mula/shards"
)

// discrete lets k readers fetch n requests of size bytes one by one, event after event: each waits
// for the latency, then for the link, which brings one request after the other, and takes the next
// request when it has its own. It gives the time of the last byte.
func discrete(n, k int, latency, size, bandwidth float64) float64 {
	free := make([]float64, k) // when each reader has what it asked for
	link := 0.0
	for range n {
		slices.Sort(free) // the first that is free asks
		link = max(link, free[0]+latency) + size/bandwidth
		free[0] = link
	}
	return slices.Max(free)
}

// The model's time equals the time of a discrete simulation, except for the parts that the model
// ignores: the readers' first waits and the last transfers.
func TestSeconds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n, k := rapid.IntRange(1, 400).Draw(t, "requests"), rapid.IntRange(1, 64).Draw(t, "readers")
		s := Storage{Latency: math.Pow(10, rapid.Float64Range(-5, 0).Draw(t, "latency"))}
		size, bandwidth := float64(rapid.IntRange(512, 1<<22).Draw(t, "size")), math.Pow(10,
			rapid.Float64Range(6, 11).Draw(t, "bandwidth"))
		model := s.seconds(float64(n), size*float64(n), k, bandwidth)
		real := discrete(n, k, s.Latency, size, bandwidth)
		if slack := float64(min(n, k)) * size / bandwidth; model > real*(1+1e-9) || real > model*(1+1e-9)+slack {
			t.Fatalf("model %g, simulated %g, slack %g", model, real, slack)
		}
	})
}

// The readers' waits equal the waits in a simulation step by step: a reader with a bounded number
// of waiting steps, and a trainer.
func TestWaits(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		reads := rapid.SliceOfN(rapid.IntRange(0, 20), 1, 60).Draw(t, "reads") // in ticks
		compute, ahead := rapid.IntRange(1, 12).Draw(t, "compute"), rapid.IntRange(1, 5).Draw(t, "ahead")
		// Tick by tick. taken counts the steps that the trainer has started, and ready counts the
		// steps that have been read.
		taken, ready, left, busy, waited := 0, 0, reads[0], 0, 0
		for taken < len(reads) {
			for { // all that happens at this moment
				moved := false
				if ready < len(reads) && left == 0 && ready-taken < ahead {
					if ready++; ready < len(reads) {
						left = reads[ready]
					}
					moved = true
				}
				if busy == 0 && taken < ready {
					taken, busy, moved = taken+1, compute, true
				}
				if !moved {
					break
				}
			}
			if taken == len(reads) {
				break
			}
			if busy == 0 && taken > 0 {
				waited++
			}
			busy = max(0, busy-1)
			if ready < len(reads) && ready-taken < ahead {
				left = max(0, left-1)
			}
		}
		seconds := make([]float64, len(reads))
		for i, r := range reads {
			seconds[i] = float64(r)
		}
		if got := waits(seconds, float64(compute), ahead); got != float64(waited) {
			t.Fatalf("waits of %d ticks, followed %d", int(got), waited)
		}
	})
}

// The number of nodes that storage keeps up with is the greatest for which a step's reading takes
// no longer than the step.
func TestNodesKept(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := Storage{Latency: rapid.SampledFrom([]float64{0, 1e-4, 1e-2, 1}).Draw(t, "latency"),
			NodeBandwidth:  rapid.Float64Range(1e5, 1e9).Draw(t, "node"),
			TotalBandwidth: rapid.Float64Range(1e6, 1e9).Draw(t, "total")}
		n, k := float64(rapid.IntRange(1, 300).Draw(t, "requests")), rapid.IntRange(1, 32).Draw(t, "readers")
		bytes, step := n*float64(rapid.IntRange(512, 1<<20).Draw(t, "size")), rapid.Float64Range(0.01, 5).Draw(t,
			"step")
		kept := s.nodesKept(n, bytes, k, step)
		fits := func(nodes int64) bool { return s.seconds(n, bytes, k, s.bandwidth(int(nodes))) <= step*(1+1e-9) }
		if kept < 0 || kept > 0 && !fits(kept) {
			t.Fatalf("%d nodes are said to be kept up with", kept)
		}
		if s.seconds(n, bytes, k, s.bandwidth(int(kept+1))) < step*(1-1e-9) {
			t.Fatalf("%d nodes are kept up with, too", kept+1)
		}
		s.TotalBandwidth = 0
		if got := s.nodesKept(n, bytes, k, step); (got == -1) != (kept > 0 ||
			s.seconds(n, bytes, k, s.NodeBandwidth) <= step) {
			t.Fatalf("without a limit of all nodes: %d", got)
		}
	})
}

// The sizes of caches that would have a block equal the results of caches that keep the most
// recently used blocks.
func TestStack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		uses := rapid.SliceOfN(rapid.Int64Range(0, 20), 1, 200).Draw(t, "uses")
		sizes := rapid.SliceOfN(rapid.Int64Range(1, 9), 21, 21).Draw(t, "sizes")
		s := newStack()
		var hits [120]int64
		var total int64
		var recent []int64 // the last used first
		for i, b := range uses {
			need := s.use(blockKey{0, b}, sizes[b])
			at := slices.Index(recent, b)
			want := int64(never)
			if at >= 0 {
				want = 0
				for _, other := range recent[:at+1] {
					want += sizes[other]
				}
				recent = slices.Delete(recent, at, at+1)
			} else {
				total += sizes[b]
			}
			recent = slices.Insert(recent, 0, b)
			if need != want {
				t.Fatalf("use %d, of %d: %d bytes, want %d", i, b, need, want)
			}
			for c := range hits {
				if want <= int64(c) {
					hits[c]++
				}
			}
		}
		curve := s.curve()
		if last := curve[len(curve)-1]; len(curve) != cachePoints+1 || last.Size != total || curve[0].Hits != 0 {
			t.Fatalf("curve to %+v of %d", last, total)
		}
		for _, p := range curve {
			if p.Size < int64(len(hits)) && math.Abs(p.Hits*float64(len(uses))-float64(hits[p.Size])) > 1e-6 {
				t.Fatalf("a cache of %d bytes: %g of %d, want %d", p.Size, p.Hits, len(uses), hits[p.Size])
			}
		}
	})
}

// The blocks of a range are the blocks that its bytes touch, marked one by one.
func TestBlocks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tokens := rapid.Int64Range(1, 40_000).Draw(t, "tokens")
		dtype := rapid.SampledFrom([]shards.DType{shards.UInt16, shards.Int32}).Draw(t, "type")
		request := rapid.SampledFrom([]int64{512, 1000, 4096, 16384, 20_000, 1 << 20}).Draw(t, "request")
		p := &blend.Plan{Sources: []blend.Source{{Shards: []blend.Shard{{DType: "uint16", Tokens: 5}}},
			{Shards: []blend.Shard{{DType: "int32"}, {DType: dtype, Tokens: tokens}}}}}
		l := newLayout(p, request)
		from := rapid.Int64Range(0, tokens-1).Draw(t, "from")
		count := rapid.Int64Range(1, tokens-from).Draw(t, "count")
		width := int64(dtype.Size())
		size := tokens * width
		read := make(map[int64]bool) // bytes that are compared with sums
		for b := from * width; b < (from+count)*width; b += width {
			for at := b / (16 << 10) * (16 << 10); at < min(size, (b/(16<<10)+1)*(16<<10)) && !read[at]; at++ {
				read[at] = true
			}
		}
		want := make(map[int64]int64)
		for b := range read {
			want[b/request] = min(request, size-b/request*request)
		}
		file, first, end := l.blocks(stretch{1, 1, from, count})
		if file != 2 || end-first != int64(len(want)) {
			t.Fatalf("file %d, blocks [%d, %d), want %d", file, first, end, len(want))
		}
		for b := first; b < end; b++ {
			if l.bytes(blockKey{file, b}) != want[b] {
				t.Fatalf("block %d has %d bytes, want %d", b, l.bytes(blockKey{file, b}), want[b])
			}
		}
	})
}

// The first node reads the bytes that a loop over its positions reads, with a cache that is a list.
func TestReading(t *testing.T) {
	d := seal(t, 6, stagesAndSkips)
	for _, c := range []struct {
		nodes   int
		cache   int64
		request int64
	}{{1, 0, 512}, {1, 1 << 30, 512}, {3, 6000, 512}, {4, 20_000, 4096}, {6, 0, 1 << 20}} {
		storage := Storage{Name: "test", Latency: 1e-3, NodeBandwidth: 1e8, TotalBandwidth: 2e8, RequestSize: c.request,
			Cache: c.cache}
		r, err := Run(context.Background(), nil, Options{BatchSize: 12, Nodes: c.nodes, RanksPerNode: 1, StepTime: 0.01,
			Storage: storage, Data: d})
		if err != nil {
			t.Fatal(err)
		}
		type block struct {
			source, shard int
			number        int64
		}
		var kept []block
		sizes := make(map[block]int64)
		var bytes, requests, wanted, time float64
		var slowest []float64
		steps := 0
		for first := int64(0); first < d.Length(); first += 12 {
			steps++
			var n, b float64
			for p := first; p < min(first+int64(12/c.nodes), d.Length()); p++ {
				s, _ := d.Locate(p)
				if s.Skipped {
					continue
				}
				width, size := int64(2), d.Sources[s.Source].Shards[s.Shard].Tokens
				if s.Source == 1 {
					width = 4
				}
				size *= width
				last := min(size, ((s.Token+sequenceLength+1)*width+16383)/16384*16384) - 1
				for k := s.Token * width / 16384 * 16384 / c.request; k <= last/c.request; k++ {
					key := block{s.Source, s.Shard, k}
					sizes[key] = min(c.request, size-k*c.request)
					wanted++
					at := slices.Index(kept, key)
					if at < 0 {
						n, b = n+1, b+float64(sizes[key])
					} else {
						kept = slices.Delete(kept, at, at+1)
					}
					kept = slices.Insert(kept, 0, key)
					held := int64(0)
					for i, k := range kept {
						if held += sizes[k]; held > c.cache {
							kept = kept[:i]
							break
						}
					}
				}
			}
			requests, bytes = requests+n, bytes+b
			slowest = append(slowest, storage.seconds(n, b, 4, min(1e8, 2e8/float64(c.nodes))))
			time += slowest[len(slowest)-1]
		}
		rd := r.Reading
		slices.Sort(slowest)
		busy := 0.0
		for _, t := range slowest[len(slowest)-steps/10:] {
			busy += t / float64(steps/10)
		}
		near := func(a, b float64) bool { return math.Abs(a-b) < 1e-9*max(1, math.Abs(b)) }
		if rd.Steps != int64(steps) || !near(rd.Requests*float64(steps), requests) ||
			!near(rd.Bytes*float64(steps), bytes) || !near(rd.Wanted*float64(steps), wanted) ||
			!near(rd.ReadTime*float64(steps), time) || !near(rd.Needed, rd.Busy.Bytes/0.01) ||
			!near(rd.Busy.ReadTime, busy) || rd.KeepsUp != (busy <= 0.01) {
			t.Errorf("%+v: %+v, want %d steps, %g requests, %g bytes, %g wanted, %g s", c, rd, steps, requests, bytes,
				wanted, time)
		}
		if !(rd.FirstWarm > 0 && rd.FirstCold >= rd.FirstWarm) || rd.DrawnBytes != rd.RepeatSize || rd.RepeatSize == 0 {
			t.Errorf("%+v: first batch %g and %g, %d drawn, %d repeated", c, rd.FirstWarm, rd.FirstCold, rd.DrawnBytes,
				rd.RepeatSize)
		}
		if c.cache == 1<<30 && math.Abs(bytes-float64(rd.DrawnBytes)) > 2*16384 { // all is read once
			t.Errorf("%g bytes read of %d", bytes, rd.DrawnBytes)
		}
	}
}

func TestStorageByName(t *testing.T) {
	for _, k := range Kinds {
		if name, err := k.check(); err != nil {
			t.Errorf("%s: %s: %v", k.Name, name, err)
		}
		if got, err := StorageByName(k.Name); err != nil || got != k {
			t.Errorf("%+v, %v", got, err)
		}
	}
	for name, want := range map[string]string{"local-nvm": `did you mean "local-nvme"`,
		"floppy": "known are local-nvme, parallel-fs, object-store, and a file"} {
		if _, err := StorageByName(name); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", name, err)
		}
	}
}

const example = "name: scratch\nlatency: 0.002\nnode_bandwidth: 4e9\ntotal_bandwidth: 650e9\nrequest_size: " +
	"4194304\ncache: 100000000000\n"

// storageOf parses the text of a storage file.
func storageOf(text string) (Storage, error) {
	file, err := strictyaml.Parse([]byte(text), "s.yaml")
	if err != nil {
		return Storage{}, err
	}
	return parseStorage(file)
}

func TestLoadStorage(t *testing.T) {
	path := filepath.Join(t.TempDir(), "scratch.yaml")
	if err := os.WriteFile(path, []byte(example), 0o644); err != nil {
		t.Fatal(err)
	}
	got, err := LoadStorage(path)
	if want := (Storage{"scratch", 0.002, 4e9, 650e9, 4 << 20, 1e11, got.file}); err != nil || got != want {
		t.Fatalf("%+v, %v", got, err)
	}
	for _, c := range []struct{ old, new, says string }{
		{"latency: 0.002\n", "", "latency is missing"},
		{"latency: 0.002", "latency: -1", "s.yaml:2: latency is -1"},
		{"latency: 0.002", "latency: .nan", "latency is .nan; it must be a finite number"},
		{"node_bandwidth: 4e9", "node_bandwidth: 0", "s.yaml:3: node_bandwidth is 0"},
		{"total_bandwidth: 650e9", "total_bandwidth: 0.5", "0 for no limit"},
		{"request_size: 4194304", "request_size: 100", "request_size is 100"},
		{"cache:", "cash:", `"cache"`},
		{"name: scratch", "name: ''", "name is empty"},
	} {
		if _, err := storageOf(strings.Replace(example, c.old, c.new, 1)); err == nil ||
			!strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v; want %q", c.new, err, c.says)
		}
	}
}

// Whatever the file, there is a storage within its bounds, or an error.
func FuzzStorage(f *testing.F) {
	f.Add(example)
	f.Add("name: [1]\nlatency: 1e999\n")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := storageOf(text)
		if err != nil {
			return
		}
		if name, err := s.check(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	})
}
