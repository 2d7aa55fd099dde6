package gpt

import (
	"bytes"
	"context"
	"crypto/md5"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"go.uber.org/goleak"
	"golang.org/x/sync/semaphore"
	"pgregory.net/rapid"

	"mula/index/numpy"
	"mula/internal/machine"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// file is a file in memory that checks the promises of [Files].
type file struct {
	mu      sync.Mutex
	bytes   []byte
	written []bool // by chunk
	chunk   int64
	faults  []string
}

func newFile(size, chunk int64) *file {
	return &file{bytes: make([]byte, size), written: make([]bool, (size+chunk-1)/chunk), chunk: chunk}
}

func (f *file) WriteAt(p []byte, off int64) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	size := int64(len(f.bytes))
	if off%f.chunk != 0 || off < 0 || off+int64(len(p)) > size || int64(len(p)) != min(f.chunk, size-off) {
		f.faults = append(f.faults, fmt.Sprintf("%d bytes at %d of %d", len(p), off, size))
		return 0, errors.New("refused")
	}
	if uintptr(unsafe.Pointer(&p[0]))%chunkAlign != 0 {
		f.faults = append(f.faults, fmt.Sprintf("memory of the piece at %d is not aligned", off))
	}
	if f.written[off/f.chunk] {
		f.faults = append(f.faults, fmt.Sprintf("the piece at %d is written again", off))
	}
	f.written[off/f.chunk] = true
	return copy(f.bytes[off:], p), nil
}

// result is the file's bytes, after the test that all were written once.
func (f *file) result(t interface{ Fatalf(string, ...any) }) []byte {
	if len(f.faults) > 0 {
		t.Fatalf("bad writes: %v", f.faults)
	}
	if i := slices.Index(f.written, false); i >= 0 {
		t.Fatalf("the piece at %d of %d was not written", int64(i)*f.chunk, len(f.bytes))
	}
	return f.bytes
}

func lengthBytes(lengths ...int32) []byte {
	b := make([]byte, 1, 1+4*len(lengths)) // one byte in front: they are not aligned in an .idx file either
	for _, v := range lengths {
		b = binary.LittleEndian.AppendUint32(b, uint32(v))
	}
	return b[1:]
}

// construct builds d with b and checks sizes and writes.
func construct(t interface{ Fatalf(string, ...any) }, b *Builder, d *Dataset) reference {
	l, err := d.Layout()
	if err != nil {
		t.Fatalf("%v", err)
	}
	chunk := int64(chunkBytes)
	if b.chunkBytes > 0 {
		chunk = int64(b.chunkBytes)
	}
	documents, samples, shuffle := newFile(l.DocumentBytes, chunk), newFile(l.SampleBytes,
		chunk), newFile(l.ShuffleBytes, chunk)
	if err := b.Build(context.Background(), d, l, Files{documents, samples, shuffle}, nil); err != nil {
		t.Fatalf("%v (%v %v %v)", err, documents.faults, samples.faults, shuffle.faults)
	}
	return reference{documents.result(t), samples.result(t), shuffle.result(t)}
}

func compare(t interface{ Fatalf(string, ...any) }, got, want reference) {
	for _, f := range []struct {
		name      string
		got, want []byte
	}{{"document index", got.documents, want.documents}, {"sample index", got.samples, want.samples},
		{"shuffle index", got.shuffle, want.shuffle}} {
		if bytes.Equal(f.got, f.want) {
			continue
		}
		for i := range min(len(f.got), len(f.want)) {
			if f.got[i] != f.want[i] {
				t.Fatalf("%s: byte %d differs (of %d, want %d)", f.name, i, len(f.got), len(f.want))
			}
		}
		t.Fatalf("%s: %d bytes, want %d", f.name, len(f.got), len(f.want))
	}
}

// The files equal files that Megatron-LM itself wrote.
func TestMegatronVectors(t *testing.T) {
	vectors := []struct {
		file                        int64
		sequences, documents        int64 // documents: 70 % of the sequences
		samples                     int64
		documentMD5, sampleMD5, md5 string
	}{
		{0, 40, 28, 151, "b03c739533e202f9e037a58d7e4cf7e9", "9cb564b7dc6a3353b559cc849d450f46",
			"d47194f6177051f7b04bb6cb8af57692"},
		{1, 25, 18, 61, "e1847ccc81a590530aeae10f4efc3d2e", "f9e356ce48ccce1963bdb4df82f505b0",
			"a17dddf6f11d0a6d16d3b85a05a1c208"},
		{2, 60, 42, 91, "48706ce1eb3635fcf11624f4d4af5d02", "f6b52841b8e0722740b2b69f51a5a566",
			"b5a1926c6b0e695764f740e808fda9c7"},
	}
	b := &Builder{}
	defer b.Release()
	for _, v := range vectors {
		lengths := make([]int32, v.sequences)
		for i := range lengths {
			if lengths[i] = int32(7919 * (int64(i) + 1) * (v.file + 3) % 997 / 4); i%7 == 3 {
				lengths[i] = 0
			}
		}
		d := &Dataset{Lengths: lengthBytes(lengths...), End: v.documents, SequenceLength: 64, ExtraToken: true,
			Samples: v.samples, Seed: 1234}
		got := construct(t, b, d)
		for i, f := range [][]byte{got.documents, got.samples, got.shuffle} {
			if sum, want := fmt.Sprintf("%x", md5.Sum(f)), []string{v.documentMD5, v.sampleMD5, v.md5}[i]; sum != want {
				t.Errorf("f%d: file %d has the MD5 %s, want %s", v.file, i, sum, want)
			}
		}
	}
}

func TestRandomDatasets(t *testing.T) { rapid.Check(t, checkDataset) }

func FuzzDatasets(f *testing.F) { f.Fuzz(rapid.MakeFuzz(checkDataset)) }

// checkDataset compares a random dataset with the reference, in many small chunks, to have every
// way to divide a file into them.
func checkDataset(t *rapid.T) {
	b := &Builder{chunkBytes: 4096, large: int64(rapid.SampledFrom([]int{0, 1}).Draw(t, "large"))}
	defer b.Release()
	d := drawDataset(t)
	if tokens, _ := d.tokens(); tokens == 0 {
		t.Skip("no tokens")
	}
	want, fails := func() (r reference, fails bool) {
		defer func() {
			if cause := recover(); cause != nil {
				if cause != upstreamFails {
					panic(cause)
				}
				fails = true
			}
		}()
		return build(d), false
	}()
	if !fails {
		compare(t, construct(t, b, d), want)
		return
	}
	l, err := d.Layout()
	if err == nil {
		err = b.Build(context.Background(), d, l, Files{discard{}, discard{}, discard{}}, nil)
	}
	if err == nil {
		t.Fatalf("built what Megatron-LM cannot build")
	}
}

type discard struct{}

func (discard) WriteAt(p []byte, off int64) (int, error) { return len(p), nil }

func drawDataset(t *rapid.T) *Dataset {
	n := rapid.OneOf(rapid.IntRange(1, 12), rapid.IntRange(1, 3000)).Draw(t, "sequences")
	top := rapid.SampledFrom([]int32{0, 1, 2, 7, 60, 2000, 40000}).Draw(t, "top")
	zeros := rapid.IntRange(0, 3).Draw(t, "zeros")
	random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "lengths"), 1))
	lengths := make([]int32, n)
	total := int64(0)
	for i := range lengths {
		if random.IntN(4) >= zeros {
			lengths[i] = random.Int32N(top + 1)
		}
		total += int64(lengths[i])
	}
	d := &Dataset{Lengths: lengthBytes(lengths...), Samples: -1}
	d.First = int64(rapid.IntRange(0, n-1).Draw(t, "first"))
	d.End = int64(rapid.IntRange(int(d.First)+1, n).Draw(t, "end"))
	if rapid.Bool().Draw(t, "whole") {
		d.First, d.End = 0, int64(n)
	}
	d.SequenceLength = max(rapid.SampledFrom([]int64{1, 2, 3, 16, 64, 100, 4096, 1 << 20, maxInt32 - 1}).Draw(t,
		"sequence length"), total/4000)
	d.ExtraToken = rapid.Bool().Draw(t, "extra")
	d.KeepPartial = rapid.Bool().Draw(t, "partial")
	d.Seed = rapid.Uint32().Draw(t, "seed")
	d.SampleType = SampleType(rapid.IntRange(0, 2).Draw(t, "type"))
	d.CheckOffsets = rapid.Bool().Draw(t, "check")
	if !rapid.Bool().Draw(t, "one epoch") {
		tokens, _ := d.tokens()
		d.Samples = int64(rapid.Float64Range(0, 5).Draw(t,
			"epochs asked") * float64(tokens) / float64(d.SequenceLength))
		if rapid.IntRange(0, 9).Draw(t, "force") == 0 {
			d.Epochs = int64(rapid.IntRange(1, 5).Draw(t, "epochs"))
		}
	}
	return d
}

// Rows of the sample index, counted by hand: documents in order, S = 4.
func TestSampleRows(t *testing.T) {
	tests := []struct {
		lengths []int32
		extra   bool
		want    [][2]int64
		partial [2]int64
	}{
		{[]int32{5, 0, 3, 10, 1, 7}, true, [][2]int64{{0, 0}, {0, 4}, {3, 0}, {3, 4}, {3, 8}, {5, 1}, {5, 5}},
			[2]int64{5, 6}},
		{[]int32{5, 0, 3, 10, 1, 7}, false, [][2]int64{{0, 0}, {0, 4}, {2, 3}, {3, 4}, {3, 8}, {5, 1}, {5, 5}},
			[2]int64{5, 7}},
		{[]int32{0, 4, 4, 3}, true, [][2]int64{{0, 0}, {2, 0}, {3, 0}}, [2]int64{3, 2}},
		{[]int32{0, 4, 4, 3}, false, [][2]int64{{0, 0}, {1, 4}, {2, 4}}, [2]int64{3, 3}},
	}
	for _, tt := range tests {
		for _, sampleType := range []SampleType{Int32, Int64} {
			for _, partial := range []bool{false, true} {
				d := &Dataset{Lengths: lengthBytes(tt.lengths...), End: int64(len(tt.lengths)), SequenceLength: 4,
					ExtraToken: tt.extra, KeepPartial: partial, Samples: -1, SampleType: sampleType}
				l, err := d.Layout()
				if err != nil {
					t.Fatal(err)
				}
				pairs := make([]uint64, len(tt.lengths))
				fillPairs(pairs, d.Lengths, 0, false)
				got := newFile(l.SampleBytes, chunkBytes)
				pool := chunkPool{size: chunkBytes, free: make(chan []byte, chunkMemory)}
				out := startOutput(context.Background(), &lease{}, &pool)
				e := newEmission(out, d, l, Files{Samples: got})
				for _, p := range e.parts {
					err = errors.Join(err, e.begin(p), e.block(0, pairs))
					e.end()
				}
				if err := out.finish(err); err != nil {
					t.Fatal(err)
				}
				pool.drop()
				want := tt.want
				if partial {
					want = append(want[:len(want):len(want)], tt.partial)
				}
				var flat []int64
				for _, row := range want {
					flat = append(flat, row[0], row[1])
				}
				if !bytes.Equal(got.result(t), npy(l.SampleDescr, fmt.Sprintf("(%d, 2)", len(want)), flat)) {
					t.Errorf("%v x=%v partial=%v %s: wrong rows", tt.lengths, tt.extra, partial, l.SampleDescr)
				}
			}
		}
	}
}

// Complete files are skipped, and the others do not change.
func TestSomeFiles(t *testing.T) {
	b := &Builder{chunkBytes: 4096}
	defer b.Release()
	d := randomDataset(2000, 300)
	for _, samples := range []int64{-1, 3000, 4600} { // one epoch, a separate final epoch, two together
		d.Samples = samples
		l, err := d.Layout()
		if err != nil {
			t.Fatal(err)
		}
		if l.Separate != (samples == 3000) {
			t.Fatalf("%+v", l)
		}
		want := build(d)
		for mask := range 8 {
			var f Files
			documents, sampleIndex, shuffle := newFile(l.DocumentBytes, 4096), newFile(l.SampleBytes,
				4096), newFile(l.ShuffleBytes, 4096)
			got := want
			if mask&1 != 0 {
				f.Documents = documents
			}
			if mask&2 != 0 {
				f.Samples = sampleIndex
			}
			if mask&4 != 0 {
				f.Shuffle = shuffle
			}
			if err := b.Build(context.Background(), d, l, f, nil); err != nil {
				t.Fatal(err)
			}
			if mask&1 != 0 {
				got.documents = documents.result(t)
			}
			if mask&2 != 0 {
				got.samples = sampleIndex.result(t)
			}
			if mask&4 != 0 {
				got.shuffle = shuffle.result(t)
			}
			compare(t, got, want)
		}
	}
}

// randomDataset has n documents of up to 2·mean tokens and S = 256.
func randomDataset(n int, mean int32) *Dataset {
	random := rand.New(rand.NewPCG(uint64(n), 7))
	lengths := make([]int32, n)
	for i := range lengths {
		lengths[i] = random.Int32N(2*mean + 1)
	}
	return &Dataset{Lengths: lengthBytes(lengths...), End: int64(n), SequenceLength: 256, ExtraToken: true, Samples: -1,
		Seed: uint32(n)}
}

// failing fails at the write number `at`, from 0, and then does what it is told.
type failing struct {
	at, seen int
	then     func()
	err      error
}

func (f *failing) WriteAt(p []byte, off int64) (int, error) {
	f.seen++
	if f.seen-1 < f.at {
		return len(p), nil
	}
	if f.then != nil {
		f.then()
	}
	if f.err != nil {
		return 0, f.err
	}
	return len(p), nil
}

// A build that breaks off says why, gives its share of the pool back, and leaves a builder that
// works.
func TestBrokenBuilds(t *testing.T) {
	b := &Builder{chunkBytes: 4096}
	defer b.Release()
	d := randomDataset(40000, 300)
	d.Samples = 60000 // separate final epoch
	l, err := d.Layout()
	if err != nil || !l.Separate {
		t.Fatal(l, err)
	}
	want := build(d)
	diskFull := errors.New("no space left")
	for at := 0; at < 100; at = at*3/2 + 1 {
		for which := range 3 {
			for _, cancelled := range []bool{false, true} {
				ctx, cancel := context.WithCancel(context.Background())
				bad := &failing{at: at, err: diskFull}
				wantErr := diskFull
				if cancelled {
					bad, wantErr = &failing{at: at, then: cancel}, context.Canceled
				}
				f := Files{discard{}, discard{}, discard{}}
				switch which {
				case 0:
					f.Documents = bad
				case 1:
					f.Samples = bad
				case 2:
					f.Shuffle = bad
				}
				pool := semaphore.NewWeighted(2)
				err := b.Build(ctx, d, l, f, pool)
				if !errors.Is(err, wantErr) && bad.seen > at {
					t.Fatalf("write %d of file %d: %v, want %v", at, which, err, wantErr)
				}
				if !pool.TryAcquire(2) {
					t.Fatalf("the pool is not whole after %v", err)
				}
				cancel()
			}
		}
		compare(t, construct(t, b, d), want)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := b.Build(ctx, d, l, Files{discard{}, discard{}, discard{}}, semaphore.NewWeighted(1)); !errors.Is(err,
		context.Canceled) {
		t.Errorf("cancelled before the start: %v", err)
	}
}

// While a builder waits for its writes, another one computes.
func TestPoolDuringWrites(t *testing.T) {
	pool := semaphore.NewWeighted(1)
	d := randomDataset(20000, 300)
	l, err := d.Layout()
	if err != nil {
		t.Fatal(err)
	}
	reached, proceed := make(chan struct{}), make(chan struct{})
	slow := &failing{then: func() { reached <- struct{}{}; <-proceed }}
	slowDone := make(chan error)
	go func() {
		b := &Builder{chunkBytes: 4096}
		defer b.Release()
		slowDone <- b.Build(context.Background(), d, l, Files{Documents: slow}, pool)
	}()
	<-reached
	b := &Builder{}
	defer b.Release()
	if err := b.Build(context.Background(), d, l, Files{discard{}, discard{}, discard{}}, pool); err != nil {
		// would wait for ever
		t.Fatal(err)
	}
	go func() {
		for range reached {
			proceed <- struct{}{}
		}
	}()
	proceed <- struct{}{}
	if err := <-slowDone; err != nil {
		t.Fatal(err)
	}
	close(reached)
}

// Several builders with one pool of two, on datasets that are worth several threads, neither
// deadlock nor disturb each other.
func TestManyBuilders(t *testing.T) {
	pool := semaphore.NewWeighted(2)
	d := randomDataset(30000, 300)
	d.Samples = 50000
	l, err := d.Layout()
	if err != nil {
		t.Fatal(err)
	}
	want := build(d)
	var group sync.WaitGroup
	for range 6 {
		group.Go(func() {
			b := &Builder{chunkBytes: 4096, large: 1}
			defer b.Release()
			for range 4 {
				documents, samples, shuffle := newFile(l.DocumentBytes, 4096), newFile(l.SampleBytes,
					4096), newFile(l.ShuffleBytes, 4096)
				if err := b.Build(context.Background(), d, l, Files{documents, samples, shuffle}, pool); err != nil {
					t.Error(err)
					return
				}
				for _, f := range []struct{ got, want []byte }{{documents.bytes, want.documents},
					{samples.bytes, want.samples}, {shuffle.bytes, want.shuffle}} {
					if !bytes.Equal(f.got, f.want) {
						t.Error("a file differs")
					}
				}
			}
		})
	}
	group.Wait()
}

func TestBuildRefuses(t *testing.T) {
	b := &Builder{}
	defer b.Release()
	all := Files{discard{}, discard{}, discard{}}
	d := randomDataset(100, 300)
	l, err := d.Layout()
	if err != nil {
		t.Fatal(err)
	}
	other := *d
	other.SequenceLength *= 2
	if err := b.Build(context.Background(), &other, l, all, nil); err == nil ||
		!strings.Contains(err.Error(), "another dataset") {
		t.Errorf("another layout: %v", err)
	}
	d.Lengths[8]++
	if err := b.Build(context.Background(), d, l, all, nil); err == nil ||
		!strings.Contains(err.Error(), "changed during the build") {
		t.Errorf("changed lengths: %v", err)
	}
	copy(d.Lengths[8:], []byte{255, 255, 255, 255})
	if err := b.Build(context.Background(), d, l, all, nil); err == nil ||
		!strings.Contains(err.Error(), "changed during the build") {
		t.Errorf("negative length: %v", err)
	}

	d = &Dataset{Lengths: lengthBytes(1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), End: 19,
		SequenceLength: 2, ExtraToken: true, KeepPartial: true, CheckOffsets: true, Samples: -1}
	d.Lengths[0] = 2
	l, err = d.Layout()
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Build(context.Background(), d, l, all, nil); err == nil || !strings.Contains(err.Error(), "assertion") {
		// 7.3a
		t.Errorf("partial sample before an empty document: %v", err)
	}
	for _, old := range []Dataset{{SampleType: Int32}, {SampleType: Int64, CheckOffsets: true}} {
		d.SampleType, d.CheckOffsets = old.SampleType, old.CheckOffsets
		if l, err = d.Layout(); err != nil {
			t.Fatal(err)
		}
		samples := newFile(l.SampleBytes, chunkBytes)
		if err := b.Build(context.Background(), d, l, Files{Samples: samples}, nil); err != nil {
			t.Fatal(err)
		}
		last := slices.Repeat([]byte{255}, int(l.SampleBytes-headerBytes)/int(l.Samples+1)/2) // -1
		if !bytes.HasSuffix(samples.result(t), last) {
			t.Errorf("%s: the last offset is not -1", l.SampleDescr)
		}
	}

	if machine.AvailableMemory() == 0 {
		t.Skip("the machine does not say how much memory it has")
	}
	ones := make([]int32, 1<<10)
	for i := range ones {
		ones[i] = 1
	}
	d = &Dataset{Lengths: lengthBytes(ones...), End: 1 << 10, SequenceLength: 1, Samples: 1 << 50}
	l, err = d.Layout()
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Build(context.Background(), d, l, all, nil); err == nil ||
		!strings.Contains(err.Error(), "B of memory, and this machine has ") {
		t.Errorf("more than the machine has: %v", err)
	}
}

// Shuffled documents may come in any blocks.
func TestBlocks(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 6))
	for _, samples := range []int64{-1, 30000} {
		d := randomDataset(20000, 300)
		d.Samples = samples
		l, err := d.Layout()
		if err != nil || l.Separate != (samples > 0) {
			t.Fatal(l, err)
		}
		want := build(d)
		documents, sampleIndex := newFile(l.DocumentBytes, 4096), newFile(l.SampleBytes, 4096)
		pool := chunkPool{size: 4096, free: make(chan []byte, chunkMemory)}
		out := startOutput(context.Background(), &lease{}, &pool)
		e := newEmission(out, d, l, Files{Documents: documents, Samples: sampleIndex})
		for _, p := range e.parts {
			pairs := make([]uint64, p.end-p.first)
			for i := range pairs { // as upstream shuffled them
				id := binary.LittleEndian.Uint32(want.documents[headerBytes+4*(p.first+int64(i)):])
				pairs[i] = uint64(id) | uint64(lengthAt(d.Lengths, int64(id)))<<32
			}
			err = errors.Join(err, e.begin(p))
			for len(pairs) > 0 {
				first := max(0, len(pairs)-1-random.IntN(9000))
				err = errors.Join(err, e.block(first, pairs[first:]))
				pairs = pairs[:first]
			}
			e.end()
		}
		if err := out.finish(err); err != nil {
			t.Fatal(err)
		}
		pool.drop()
		compare(t, reference{documents.result(t), sampleIndex.result(t), want.shuffle}, want)
	}
}

func TestShuffleLong(t *testing.T) {
	for _, n := range []int{0, 1, 2, 3, 1000, 100000} {
		got, want := make([]uint64, n), make([]int64, n)
		for i := range n {
			got[i], want[i] = uint64(i), int64(i)
		}
		if err := shuffleLong(context.Background(), numpy.NewRandomState(9), got); err != nil {
			t.Fatal(err)
		}
		newTwister(9).shuffle(want)
		for i := range got {
			if got[i] != uint64(want[i]) {
				t.Fatalf("%d elements: number %d is %d, want %d", n, i, got[i], want[i])
			}
		}
	}
}
