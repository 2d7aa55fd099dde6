package packing

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"iter"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"mula/internal/filesystem/faultfs"
	"mula/internal/longtest"
	"mula/internal/mapping"
	"mula/shards"
)

// source is a source whose shards have documents of these lengths.
func source(capacity int, heldOut int64, list ...[]int64) *Source {
	s := &Source{Capacity: capacity, HeldOut: heldOut}
	for i, lengths := range list {
		total := int64(0)
		for _, n := range lengths {
			total += n
		}
		s.Shards = append(s.Shards, Shard{total, fmt.Sprintf("%064x", i)})
	}
	s.Documents = func(yield func(int64, error) bool) {
		for _, lengths := range list {
			for _, n := range lengths {
				if !yield(n, nil) {
					return
				}
			}
		}
	}
	return s
}

// collect packs a source in memory.
func collect(t interface {
	Helper()
	Fatal(...any)
}, s *Source) ([][]Piece, Statistics) {
	t.Helper()
	var samples [][]Piece
	stats, err := s.pack(context.Background(), func(sample int64, pieces []Piece) error {
		if sample != int64(len(samples)) {
			t.Fatal("sample", sample, "comes as number", len(samples))
		}
		samples = append(samples, slices.Clone(pieces))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return samples, stats
}

// plainly packs documents as docs/formats/packing.md has it, looking at every open sample each
// time. It keeps them in the order of their opening, and sorts nothing.
func plainly(capacity int64, documents iter.Seq[document]) (done [][]Piece) {
	type sample struct {
		room   int64
		pieces []Piece
	}
	var open []*sample
	shut := func(at int) {
		done = append(done, open[at].pieces)
		open = slices.Delete(open, at, at+1)
	}
	for d := range documents {
		for n := min(d.length, capacity); n > 0; n = min(d.length, capacity) {
			piece := Piece{d.token, int32(n)}
			d.token, d.length = d.token+n, d.length-n
			if n == capacity {
				done = append(done, []Piece{piece})
				continue
			}
			best := -1
			for i, s := range open {
				if s.room >= n && (best < 0 || s.room < open[best].room) {
					best = i
				}
			}
			if best < 0 {
				best = len(open)
				open = append(open, &sample{room: capacity})
			}
			open[best].room -= n
			open[best].pieces = append(open[best].pieces, piece)
			least, held := 0, 0
			for i, s := range open {
				held += len(s.pieces)
				if s.room < open[least].room {
					least = i
				}
			}
			if open[least].room == 0 || len(open) > 1024 || held > 262144 {
				shut(least)
			}
		}
	}
	for len(open) > 0 {
		shut(0)
	}
	return done
}

// A document is one with tokens.
type document struct{ token, length int64 }

// from returns the documents that start at the tokens [from, to).
func (s *Source) from(from, to int64) iter.Seq[document] {
	return func(yield func(document) bool) {
		at := int64(0)
		for n := range s.Documents {
			if n > 0 && at >= from && at < to && !yield(document{at, n}) {
				return
			}
			at += n
		}
	}
}

// The packing equals the packing of the plain loop, and has every token exactly once. Held-out
// documents share no sample with others. The statistics are exact.
func TestPackingIsThePlainOne(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		capacity := rapid.IntRange(2, 40).Draw(rt, "capacity")
		length := rapid.OneOf(rapid.Int64Range(0, 6), rapid.Int64Range(0, int64(capacity)),
			rapid.Int64Range(0, 4*int64(capacity)))
		list := rapid.SliceOfN(rapid.SliceOfN(length, 0, 60), 1, 4).Draw(rt, "documents")
		s := source(capacity, 0, list...)
		starts := []int64{0}
		for n := range s.Documents {
			starts = append(starts, starts[len(starts)-1]+n)
		}
		total := starts[len(starts)-1]
		s.HeldOut = rapid.SampledFrom(starts).Draw(rt, "held out from")
		got, stats := collect(rt, s)

		training := plainly(int64(capacity), s.from(0, s.HeldOut))
		held := plainly(int64(capacity), s.from(s.HeldOut, total))
		if want := append(training, held...); !reflect.DeepEqual(got, want) {
			rt.Fatalf("%v\nwant %v", got, want)
		}
		seen := make([]int, total)
		var want Statistics
		want.Samples, want.HeldOut, want.Tokens = int64(len(got)), int64(len(held)), total
		for i, pieces := range got {
			sum := int64(0)
			for _, p := range pieces {
				for k := range int64(p.Length) {
					seen[p.Token+k]++
				}
				if (p.Token >= s.HeldOut) != (i >= len(training)) {
					rt.Fatalf("sample %d of %d for training has token %d; from %d on they are held out", i,
						len(training), p.Token, s.HeldOut)
				}
				sum += int64(p.Length)
				want.Pieces++
			}
			if sum > int64(capacity) || sum == 0 {
				rt.Fatalf("sample %d has %d tokens", i, sum)
			}
		}
		for token, n := range seen {
			if n != 1 {
				rt.Fatalf("token %d is in %d places", token, n)
			}
		}
		for n := range s.Documents {
			if n > 0 {
				want.Documents++
			}
			if n > int64(capacity) {
				want.Cut++
			}
		}
		if stats != want {
			rt.Fatalf("statistics %+v, want %+v", stats, want)
		}
		if counted, err := Count(context.Background(), s); err != nil || counted != want {
			rt.Fatalf("counted %+v, %v", counted, err)
		}
	})
}

// lengths returns the lengths of packing_v1.py.
func lengths(count, seed, most int64, shape string) (list []int64) {
	state := seed
	for range count {
		state = (state*1103515245 + 12345) % (1 << 31)
		n := state >> 8
		switch shape {
		case "uniform":
			n %= most + 1
		case "small":
			n %= 1 + n/64%(most+1)
		case "large":
			n = most - n%(most/2)
		case "ones":
			n = 1
		}
		list = append(list, n)
	}
	return list
}

// The files equal the files of the Python implementation, byte for byte.
func TestFilesOfOtherImplementation(t *testing.T) {
	data, err := os.ReadFile("testdata/vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden struct {
		Cases []struct {
			Length  int      `json:"sequence_length"`
			Held    int64    `json:"held_token"`
			Sources [][4]any `json:"sources"`
			Name    string
			Bytes   int64
			SHA256  string
			Samples int64
			First   [][][2]int64
			Last    [][][2]int64
		}
	}
	if err := json.Unmarshal(data, &golden); err != nil {
		t.Fatal(err)
	}
	if len(golden.Cases) < 6 {
		t.Fatalf("%d cases", len(golden.Cases))
	}
	for _, c := range golden.Cases {
		var list [][]int64
		for _, s := range c.Sources {
			list = append(list, lengths(int64(s[0].(float64)), int64(s[1].(float64)), int64(s[2].(float64)),
				s[3].(string)))
		}
		s := source(c.Length+1, 0, list...)
		at := int64(0)
		for n := range s.Documents { // the document that holds the token
			if at <= c.Held {
				s.HeldOut = at
			}
			at += n
		}
		if c.Held == at {
			s.HeldOut = at
		}
		dir := t.TempDir()
		f, err := Build(t.Context(), nil, dir, s)
		if err != nil {
			t.Fatal(err)
		}
		x, err := Open(filepath.Join(dir, f.Name))
		if err != nil {
			t.Fatal(err)
		}
		defer x.Close()
		compare := func(sample int64, want [][2]int64) {
			t.Helper()
			pieces, err := x.Sample(nil, sample)
			if err != nil {
				t.Fatal(err)
			}
			for i, p := range pieces[:min(8, len(pieces))] {
				if i >= len(want) || [2]int64{p.Token, int64(p.Length)} != want[i] {
					t.Fatalf("L %d: sample %d is %v, want %v", c.Length, sample, pieces, want)
				}
			}
		}
		for i, want := range c.First {
			compare(int64(i), want)
		}
		for i, want := range c.Last {
			compare(x.Samples-int64(len(c.Last)-i), want)
		}
		if f.Name != c.Name || f.Bytes != c.Bytes || f.SHA256 != c.SHA256 || f.Samples != c.Samples {
			t.Errorf("L %d: %+v, want %s of %d bytes with SHA-256 %s and %d samples", c.Length, f, c.Name, c.Bytes,
				c.SHA256, c.Samples)
		}
	}
}

// The memory does not grow with the source: neither with the documents, nor with the open samples.
func TestPackingIsBounded(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for name, length := range map[string]func() int64{
		"nothing fits together": func() int64 { return 600 + r.Int64N(400) },
		"many pieces":           func() int64 { return 1 + r.Int64N(3) },
		"mixed":                 func() int64 { return 1 + r.Int64N(3000) },
	} {
		for _, capacity := range []int64{1000, 1 << 22} {
			p := &packer{capacity: capacity, free: none, emit: func([]Piece) error { return nil }}
			for range 300_000 {
				if err := p.add(length()); err != nil {
					t.Fatal(err)
				}
				if len(p.open) > 1024 || p.used > 262144 {
					t.Fatalf("%s: %d samples with %d pieces are open", name, len(p.open), p.used)
				}
			}
			if len(p.nodes) > 262145 || cap(p.open) > 4096 || cap(p.pieces) > 1<<19 {
				t.Errorf("%s: room for %d nodes, %d samples, %d pieces", name, len(p.nodes), cap(p.open), cap(p.pieces))
			}
			if err := p.closeAll(); err != nil || p.used != 0 || p.Tokens == 0 {
				t.Errorf("%s: %d pieces are left: %v", name, p.used, err)
			}
		}
	}
}

// A file is built once and reused. A damaged file is rebuilt, with the same bytes.
func TestFileIsFoundAgain(t *testing.T) {
	dir := t.TempDir()
	passes := 0
	s := source(17, 300, lengths(90, 3, 40, "uniform"))
	documents := s.Documents
	s.Documents = func(yield func(int64, error) bool) { passes++; documents(yield) }
	s.HeldOut = 0
	for n := range documents {
		if s.HeldOut += n; s.HeldOut > 900 {
			break
		}
	}
	first, err := Build(t.Context(), nil, dir, s)
	if err != nil {
		t.Fatal(err)
	}
	if first.HeldOut == 0 || first.HeldOut == first.Samples {
		t.Fatalf("%d of %d samples are held out", first.HeldOut, first.Samples)
	}
	built := passes
	again, err := Build(t.Context(), nil, dir, s)
	if err != nil || !reflect.DeepEqual(again, first) {
		t.Fatalf("found %+v, %v; built %+v", again, err, first)
	}
	if passes != built {
		t.Error("the source was packed again")
	}
	path := filepath.Join(dir, first.Name)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, whole[:len(whole)-5], 0o644); err != nil {
		t.Fatal(err)
	}
	if again, err = Build(t.Context(), nil, dir, s); err != nil || !reflect.DeepEqual(again, first) {
		t.Fatalf("over a damaged file %+v, %v; want %+v", again, err, first)
	}
	// Another length, other held-out documents, another shard: each has a file of its own.
	names := []string{first.Name}
	for _, change := range []func(o *Source){
		func(o *Source) { o.Capacity++ },
		func(o *Source) { o.HeldOut = s.Shards[0].Tokens },
		func(o *Source) { o.Shards = []Shard{{s.Shards[0].Tokens, "b"}} },
	} {
		o := *s
		change(&o)
		if slices.Contains(names, o.Name()) {
			t.Errorf("two packings are called %s", o.Name())
		}
		names = append(names, o.Name())
	}
}

// A flipped bit in any byte of a file, and every cut, is found: when it is opened, or when the
// sample is read, with the file named.
func TestDamageIsFound(t *testing.T) {
	longtest.SkipIfShort(t)
	dir := t.TempDir()
	s := source(9, 0, lengths(20, 5, 20, "uniform"))
	s.HeldOut = s.Shards[0].Tokens
	f, err := Build(t.Context(), nil, dir, s)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, f.Name)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	damaged := filepath.Join(dir, "damaged")
	check := func(what string, data []byte) {
		t.Helper()
		if err := os.WriteFile(damaged, data, 0o644); err != nil {
			t.Fatal(err)
		}
		x, err := Open(damaged)
		if err == nil {
			err = x.Check(t.Context())
			x.Close()
		}
		if !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), damaged) {
			t.Fatalf("%s: %v", what, err)
		}
	}
	for i := range whole {
		data := slices.Clone(whole)
		data[i] ^= 1 << (i * 5 % 8)
		check(fmt.Sprintf("byte %d", i), data)
		check(fmt.Sprintf("cut after %d bytes", i), whole[:i])
	}
	check("a byte more", append(slices.Clone(whole), 0))
}

// A fault at any operation on the file leaves nothing that a later build takes for whole.
func TestFaultsLeaveNoHalfFile(t *testing.T) {
	t.Parallel()
	s := source(17, 0, lengths(90, 3, 40, "uniform"))
	s.HeldOut = s.Shards[0].Tokens
	want, err := Build(t.Context(), nil, t.TempDir(), s)
	if err != nil {
		t.Fatal(err)
	}
	failed := 0
	for at := int64(1); ; at++ {
		dir := t.TempDir()
		nth := &faultfs.Nth{K: at, Err: errors.New("the disk is full")}
		_, err := Build(t.Context(), faultfs.New(nth.Fault), dir, s)
		if err == nil && nth.Failed() == "" {
			break
		}
		if err != nil {
			failed++
		}
		got, err := Build(t.Context(), nil, dir, s)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("after a fault at operation %d: %+v, %v; want %+v", at, got, err, want)
		}
	}
	if failed < 3 {
		t.Errorf("only %d faults ended a build", failed)
	}
}

// Documents that contradict their shards, and sources that change between the passes, are refused;
// a context ends the work.
func TestRefusals(t *testing.T) {
	ctx := t.Context()
	s := source(9, 0, []int64{3, 4})
	s.HeldOut = 7
	for what, change := range map[string]func(o *Source){
		"more tokens":  func(o *Source) { o.Shards = []Shard{{Tokens: 6}} },
		"fewer tokens": func(o *Source) { o.Shards = []Shard{{Tokens: 8}} },
		"capacity 1":   func(o *Source) { o.Capacity = 1 },
		"huge":         func(o *Source) { o.Capacity = maxCapacity + 1 },
		"an error": func(o *Source) {
			o.Documents = func(yield func(int64, error) bool) { yield(0, shards.ErrCorrupt) }
		},
		"negative": func(o *Source) {
			o.Documents = func(yield func(int64, error) bool) { _ = yield(-1, nil) && yield(8, nil) }
		},
	} {
		o := *s
		change(&o)
		if _, err := Count(ctx, &o); err == nil {
			t.Errorf("%s: no error", what)
		}
	}
	pass := 0
	changing := *s
	changing.Documents = func(yield func(int64, error) bool) {
		if pass++; pass == 1 {
			_ = yield(3, nil) && yield(4, nil)
		} else {
			_ = yield(3, nil) && yield(2, nil) && yield(2, nil)
		}
	}
	dir := t.TempDir()
	if _, err := Build(ctx, nil, dir, &changing); err == nil || !strings.Contains(err.Error(), "changed meanwhile") {
		t.Errorf("documents that change: %v", err)
	}
	if list, err := os.ReadDir(dir); err != nil || len(list) > 0 {
		t.Errorf("left behind: %v, %v", list, err)
	}
	ended, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := Count(ended, source(9, 1<<20, slices.Repeat([]int64{5}, 1<<18))); !errors.Is(err, context.Canceled) {
		t.Errorf("after the end of its context: %v", err)
	}
}

// Whatever a file holds, it is refused or read without harm.
func FuzzOpen(f *testing.F) {
	dir := f.TempDir()
	s := source(9, 0, lengths(12, 5, 20, "uniform"))
	s.HeldOut = s.Shards[0].Tokens
	built, err := Build(context.Background(), nil, dir, s)
	if err != nil {
		f.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(dir, built.Name))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Add(append([]byte(magic), footer(9, Statistics{}, [32]byte{})...))
	f.Add(append([]byte(magic), footer(2, Statistics{Samples: 1 << 55, Documents: 1, Pieces: 1 << 56, Tokens: 1 << 56},
		[32]byte{})...))
	f.Fuzz(func(t *testing.T, data []byte) {
		x := &Index{path: "x", file: mapping.File{Data: data}}
		if err := x.parse(); err != nil {
			// The checksum stops most; try the rest as well, as a hostile file would have a fitting
			// one.
			if len(data) < 4 {
				return
			}
			data = binary.LittleEndian.AppendUint32(slices.Clone(data[:len(data)-4]),
				crc32.Checksum(data[max(0, len(data)-footerSize):len(data)-4], castagnoli))
			x = &Index{path: "x", file: mapping.File{Data: data}}
			if err := x.parse(); err != nil {
				return
			}
		}
		for sample := range min(x.Samples, 100) {
			if _, err := x.Sample(nil, sample); err != nil && !errors.Is(err, ErrDamaged) {
				t.Fatal(err)
			}
		}
	})
}

// BenchmarkPack packs documents of the lengths of web text into samples of 4,097 tokens. One op is
// a document.
func BenchmarkPack(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 2))
	list := make([]int64, 1<<16)
	for i := range list {
		list[i] = 1 + int64(r.ExpFloat64()*r.ExpFloat64()*700)
	}
	p := &packer{capacity: 4097, free: none, emit: func([]Piece) error { return nil }}
	for i := 0; b.Loop(); i++ {
		if err := p.add(list[i%len(list)]); err != nil {
			b.Fatal(err)
		}
	}
}
