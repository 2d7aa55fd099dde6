package numpy

import (
	"context"
	"crypto/md5"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"math"
	"os"
	"strconv"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
)

// shuffleGolden is testdata/shuffles.json, written by numpy (testdata/shuffles.py).
type shuffleGolden struct {
	Seeds []struct {
		Entropy    string
		State, Raw []string
	}
	Intervals []struct {
		Kind       string
		Seed       uint64
		Max, Drawn []string
	}
	Shuffles []struct {
		Kind, DType, MD5  string
		Seed, First, Last int
		Then              []uint32
	}
}

func readShuffles(t *testing.T) *shuffleGolden {
	t.Helper()
	text, err := os.ReadFile("testdata/shuffles.json")
	if err != nil {
		t.Fatal(err)
	}
	g := new(shuffleGolden)
	if err := json.Unmarshal(text, g); err != nil {
		t.Fatal(err)
	}
	if len(g.Seeds) == 0 || len(g.Intervals) == 0 || len(g.Shuffles) == 0 {
		t.Fatal("testdata/shuffles.json lacks a part")
	}
	return g
}

func number(t *testing.T, s string) uint64 {
	t.Helper()
	v, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func newSource(kind string, seed uint64) Source {
	if kind == "RandomState" {
		return NewRandomState(uint32(seed))
	}
	return NewGenerator(seed)
}

func TestSeedSequenceGolden(t *testing.T) {
	for _, want := range readShuffles(t).Seeds {
		entropy := number(t, want.Entropy)
		got := SeedSequence(entropy, len(want.State))
		for i, s := range want.State {
			if got[i] != number(t, s) {
				t.Errorf("SeedSequence(%d): word %d is %d, numpy has %s", entropy, i, got[i], s)
			}
		}
		g := NewGenerator(entropy)
		for i, s := range want.Raw {
			if v := g.Uint64(); v != number(t, s) {
				t.Errorf("PCG64(%d): draw %d is %d, numpy has %s", entropy, i, v, s)
			}
		}
	}
}

func TestIntervalGolden(t *testing.T) {
	for _, want := range readShuffles(t).Intervals {
		src := newSource(want.Kind, want.Seed)
		for i, m := range want.Max {
			if v := src.Interval(number(t, m)); v != number(t, want.Drawn[i]) {
				t.Fatalf("%s(%d): draw %d, up to %s, is %d, numpy has %s", want.Kind, want.Seed, i, m, v, want.Drawn[i])
			}
		}
	}
}

// ascending is 0, 1, … in memory that the algorithms for large arrays expect.
func ascending[T element](t testing.TB, n int) []T {
	m, release := Aligned(n * int(unsafe.Sizeof(T(0))))
	t.Cleanup(release)
	a := unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(m))), n)
	for i := range a {
		a[i] = T(i)
	}
	return a
}

func rawBytes[T element](a []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(a))), len(a)*int(unsafe.Sizeof(T(0))))
}

func TestShuffleGolden(t *testing.T) {
	const largest = 20_000_000
	s := Shuffler{Threads: 2}
	defer s.Release()
	memory32, memory64, shuffled := ascending[uint32](t, largest), ascending[uint64](t, 1_000_000), make([]uint64,
		1_000_000)
	for _, want := range readShuffles(t).Shuffles {
		src, sum := newSource(want.Kind, uint64(want.Seed)), md5.New()
		for n := want.First; n <= want.Last; n++ {
			if want.DType == "<u4" {
				a := memory32[:n]
				for i := range a {
					a[i] = uint32(i)
				}
				if err := s.Uint32(context.Background(), src, a); err != nil {
					t.Fatal(err)
				}
				sum.Write(rawBytes(a))
				continue
			}
			a := memory64[:n]
			for i := range a {
				a[i] = uint64(i)
			}
			collect := func(first int, block []uint64) error {
				copy(shuffled[first:n], block)
				return nil
			}
			if err := s.Pairs(context.Background(), src, a, collect); err != nil {
				t.Fatal(err)
			}
			sum.Write(rawBytes(shuffled[:n]))
		}
		if got := hex.EncodeToString(sum.Sum(nil)); got != want.MD5 {
			t.Errorf("%s(%d), %s, arrays of %d to %d: MD5 is %s, numpy has %s", want.Kind, want.Seed, want.DType,
				want.First, want.Last, got, want.MD5)
		}
		then := []uint32{src.Uint32(), src.Uint32(), src.Uint32()}
		if diff := cmp.Diff(want.Then, then); diff != "" {
			t.Errorf("%s(%d), %s: the draws after arrays of %d to %d differ (-numpy +ours):\n%s", want.Kind, want.Seed,
				want.DType, want.First, want.Last, diff)
		}
	}
}

// TestPairsGolden: pairs of 20 million elements, in blocks, are shuffled as the numbers of testdata
// are.
func TestPairsGolden(t *testing.T) {
	for _, want := range readShuffles(t).Shuffles {
		if want.First < 10_000_000 {
			continue
		}
		a, low := ascending[uint64](t, want.First), make([]uint32, want.First)
		for i := range a {
			a[i] |= uint64(i+7) << 32
		}
		var s Shuffler
		defer s.Release()
		err := s.Pairs(context.Background(), newSource(want.Kind, uint64(want.Seed)), a,
			func(first int, block []uint64) error {
				for k, v := range block {
					if v>>32 != v&math.MaxUint32+7 {
						t.Fatalf("element %d is the pair %d, %d", first+k, v&math.MaxUint32, v>>32)
					}
					low[first+k] = uint32(v)
				}
				return nil
			})
		if err != nil {
			t.Fatal(err)
		}
		sum := md5.Sum(rawBytes(low))
		if got := hex.EncodeToString(sum[:]); got != want.MD5 {
			t.Errorf("%s(%d), %d pairs: MD5 is %s, numpy has %s", want.Kind, want.Seed, want.First, got, want.MD5)
		}
	}
}

// TestVectors has the examples of the specifications: RandomState's first draws and shuffles,
// PCG64's shuffles, orders of OLMo-core.
func TestVectors(t *testing.T) {
	arange := func(n int) []int {
		a := make([]int, n)
		for i := range a {
			a[i] = i
		}
		return a
	}
	r := NewRandomState(1234)
	for i, want := range []uint32{822569775, 2137449171, 2671936806, 3512589365, 1880026316} {
		if got := r.Uint32(); got != want {
			t.Errorf("RandomState(1234): draw %d is %d, want %d", i, got, want)
		}
	}
	if got, want := NewRandomState(1234).Uint64(), uint64(822569775)<<32|2137449171; got != want {
		t.Errorf("RandomState(1234): 64 bits are %d, want %d: the first draw is the high half", got, want)
	}
	sources := map[string]Source{
		"RandomState(0)": NewRandomState(0), "RandomState(1234)": NewRandomState(1234),
		"PCG64(34522)": NewGenerator(34522),
		"PCG64(6198)":  NewGenerator(6198), "PCG64(6199)": NewGenerator(6199), "PCG64(0)": NewGenerator(0),
	}
	for _, c := range []struct {
		source string
		want   []int
	}{
		{"RandomState(0)", []int{2, 8, 4, 9, 1, 6, 7, 3, 0, 5}},
		{"RandomState(0)", []int{3, 1, 2, 6, 5, 0, 4}},
		{"RandomState(1234)", []int{7, 2, 9, 1, 0, 8, 4, 5, 6, 3}},
		{"RandomState(1234)", []int{6, 4, 0, 5, 3, 2, 1}},
		{"PCG64(34522)", []int{5, 9, 8, 4, 0, 6, 1, 2, 7, 3}},
		{"PCG64(6198)", []int{17, 4, 14, 3, 5, 12, 6, 15, 18, 13, 10, 11, 2, 19, 0, 16, 7, 9, 8, 1}},
		{"PCG64(6199)", []int{19, 8, 9, 11, 4, 5, 17, 6, 15, 14, 2, 12, 16, 1, 18, 3, 10, 13, 0, 7}},
		{"PCG64(0)", []int{4, 19, 6, 2, 13, 16, 3, 11, 10, 8, 0, 12, 7, 5, 18, 17, 14, 9, 1, 15}},
	} {
		a := arange(len(c.want))
		Shuffle(sources[c.source], a)
		if diff := cmp.Diff(c.want, a); diff != "" {
			t.Errorf("%s: shuffle differs (-want +got):\n%s", c.source, diff)
		}
	}
	for _, c := range []struct {
		n           int
		seed, epoch uint64
		chunk       uint32
		md5         string
	}{
		{1000, 34521, 1, 1, "26a248a3e4d964f9ed666214fd9c27c5"},
		{1000, 34521, 2, 1, "270d3b44800f80c0caf75e8023f5d5be"},
		{1000, 7, 3, 4, "ca0256320532041e54f395b0f93d894b"},
	} {
		groups := ascending[uint32](t, c.n/int(c.chunk))
		var s Shuffler
		if err := s.Uint32(context.Background(), NewGenerator(c.seed+c.epoch), groups); err != nil {
			t.Fatal(err)
		}
		var order []byte
		for _, g := range groups {
			for k := range c.chunk {
				order = binary.LittleEndian.AppendUint32(order, g*c.chunk+k)
			}
		}
		sum := md5.Sum(order)
		if got := hex.EncodeToString(sum[:]); got != c.md5 {
			t.Errorf("OLMo-core's order of %d, seed %d, epoch %d, chunk %d: MD5 is %s, want %s", c.n, c.seed, c.epoch,
				c.chunk, got, c.md5)
		}
	}
}
