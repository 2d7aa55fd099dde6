package numpy

import (
	"context"
	"errors"
	"math"
	"slices"
	"testing"
	"unsafe"

	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

// plainTwister and plainPCG implement the generators as their specifications describe them, one
// draw at a time.
type plainTwister struct {
	mt   [624]uint32
	used int
}

func newPlainTwister(seed uint32) *plainTwister {
	p := &plainTwister{used: 624}
	p.mt[0] = seed
	for i := 1; i < 624; i++ {
		p.mt[i] = 1812433253*(p.mt[i-1]^(p.mt[i-1]>>30)) + uint32(i)
	}
	return p
}

func (p *plainTwister) draw32() uint32 {
	if p.used == 624 {
		for k := range 624 {
			y := p.mt[k]&0x80000000 | p.mt[(k+1)%624]&0x7fffffff
			p.mt[k] = p.mt[(k+397)%624] ^ y>>1
			if y%2 != 0 {
				p.mt[k] ^= 0x9908b0df
			}
		}
		p.used = 0
	}
	y := p.mt[p.used]
	p.used++
	y ^= y >> 11
	y ^= (y << 7) & 0x9d2c5680
	y ^= (y << 15) & 0xefc60000
	return y ^ y>>18
}

func (p *plainTwister) draw64() uint64 {
	high := uint64(p.draw32())
	return high<<32 | uint64(p.draw32())
}

type plainPCG struct {
	state, increment uint128
	buffered         []uint32
}

func newPlainPCG(seed uint64) *plainPCG {
	w := SeedSequence(seed, 4)
	p := &plainPCG{increment: uint128{w[2], w[3]}.plus(uint128{w[2], w[3]}).plus(uint128{0, 1})}
	p.step()
	p.state = p.state.plus(uint128{w[0], w[1]})
	p.step()
	return p
}

func (p *plainPCG) step() {
	p.state = p.state.times(uint128{0x2360ed051fc65da4, 0x4385df649fccf645}).plus(p.increment)
}

func (p *plainPCG) draw64() uint64 {
	p.step()
	x, r := p.state.high^p.state.low, p.state.high>>58
	return x>>r | x<<(-r&63)
}

func (p *plainPCG) draw32() uint32 {
	if len(p.buffered) == 0 {
		v := p.draw64()
		p.buffered = []uint32{uint32(v), uint32(v >> 32)}
	}
	v := p.buffered[0]
	p.buffered = p.buffered[1:]
	return v
}

// plain is either of them.
type plain interface {
	draw32() uint32
	draw64() uint64
}

func plainInterval(p plain, limit uint64) uint64 {
	var mask uint64
	for mask < limit {
		mask = mask<<1 | 1
	}
	for {
		v := uint64(0)
		if limit == 0 {
			return 0
		} else if limit <= 0xffffffff {
			v = uint64(p.draw32()) & mask
		} else {
			v = p.draw64() & mask
		}
		if v <= limit {
			return v
		}
	}
}

func plainShuffle[T any](p plain, a []T) {
	for i := len(a) - 1; i >= 1; i-- {
		j := plainInterval(p, uint64(i))
		a[i], a[j] = a[j], a[i]
	}
}

// pair draws a generator and its plain twin, at the same place of some sequence.
func pair(t *rapid.T) (Source, plain) {
	seed := rapid.Uint64().Draw(t, "seed")
	var src Source = NewGenerator(seed)
	var twin plain = newPlainPCG(seed)
	if rapid.Bool().Draw(t, "twister") {
		src, twin = NewRandomState(uint32(seed)), newPlainTwister(uint32(seed))
	}
	for range rapid.IntRange(0, 700).Draw(t, "draws of 32 bits") {
		if src.Uint32() != twin.draw32() {
			t.Fatal("a draw of 32 bits differs")
		}
	}
	for range rapid.IntRange(0, 3).Draw(t, "draws of 64 bits") {
		if src.Uint64() != twin.draw64() {
			t.Fatal("a draw of 64 bits differs")
		}
	}
	return src, twin
}

// same fails unless the next draws agree, whatever their width.
func same(t *rapid.T, src Source, twin plain) {
	t.Helper()
	for range 3 {
		if src.Uint32() != twin.draw32() || src.Uint64() != twin.draw64() {
			t.Fatal("the generator was left at another place")
		}
	}
}

// sizes favours those around powers of two, where the mask changes, and around the size of a batch.
func sizes(largest int) *rapid.Generator[int] {
	return rapid.OneOf(
		rapid.IntRange(0, 100), rapid.IntRange(0, largest),
		rapid.Map(rapid.IntRange(0, 40), func(i int) int { return min(1<<(i/3)+i%3-1, largest) }),
		rapid.IntRange(partnerBatch-20, partnerBatch+swapAhead+20),
	)
}

func withAndWithoutVectors(t *testing.T, f func(t *testing.T)) {
	if setVectors(true) {
		t.Run("avx512", f)
	}
	setVectors(false)
	defer setVectors(true)
	t.Run("go", f)
}

func TestInterval(t *testing.T) {
	withAndWithoutVectors(t, func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) {
			src, twin := pair(t)
			for range 50 {
				limit := rapid.Uint64().Draw(t, "limit") >> rapid.IntRange(0, 64).Draw(t, "shift")
				if got, want := src.Interval(limit), plainInterval(twin, limit); got != want {
					t.Fatalf("Interval(%d) is %d, want %d", limit, got, want)
				}
			}
			same(t, src, twin)
		})
	})
}

func TestShuffle(t *testing.T) {
	withAndWithoutVectors(t, func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) {
			src, twin := pair(t)
			for range rapid.IntRange(1, 3).Draw(t, "arrays") {
				n := sizes(20000).Draw(t, "n")
				switch rapid.IntRange(0, 2).Draw(t, "way") {
				case 0:
					got, want := make([]string, n), make([]string, n)
					for i := range got {
						got[i] = string(rune(i))
						want[i] = got[i]
					}
					Shuffle(src, got)
					plainShuffle(twin, want)
					if !slices.Equal(got, want) {
						t.Fatal("Shuffle differs from the plain rule")
					}
				case 1:
					skip := src.(interface{ Skip(int64) })
					skip.Skip(int64(n))
					plainShuffle(twin, make([]struct{}, n))
				default:
					shufflesAlike[uint32](t, src, twin, n)
				}
			}
			same(t, src, twin)
		})
	})
}

// content is an array of any values, with all bits in use.
func content[T element](n int) []T {
	a := make([]T, n)
	for i := range a {
		a[i] = T(uint64(i+1) * 0x9e3779b97f4a7c15)
		if unsafe.Sizeof(a[0]) == 4 {
			a[i] = T(uint32(i+1) * 0x9e3779b1)
		}
	}
	return a
}

func shufflesAlike[T element](t *rapid.T, src Source, twin plain, n int) {
	got, want := content[T](n), content[T](n)
	if err := shuffleAhead(context.Background(), src, got); err != nil {
		t.Fatal(err)
	}
	plainShuffle(twin, want)
	if !slices.Equal(got, want) {
		t.Fatal("shuffleAhead differs from the plain rule")
	}
}

// blockedAlike compares the blocked shuffle with the plain rule, for a plan and a size. src and
// twin are at the same place.
func blockedAlike[T element](t *rapid.T, src Source, shuffle func(a []T), n int, p plan, memory *scratch) {
	got, want := content[T](n), content[T](n)
	end := n // end of the numbers that are not yet emitted
	out := make([]T, n)
	if rapid.Bool().Draw(t, "in place") {
		if err := shuffleBlocked(context.Background(), src, got, p, memory, nil); err != nil {
			t.Fatal(err)
		}
		if shuffle(want); !slices.Equal(got, want) {
			t.Fatal("the blocked shuffle, in place, differs from the plain rule")
		}
		return
	}
	err := shuffleBlocked(context.Background(), src, got, p, memory, func(first int, block []T) error {
		if first+len(block) != end || len(block) == 0 {
			t.Fatalf("block [%d, %d) follows %d", first, first+len(block), end)
		}
		end = first
		copy(out[first:], block)
		clear(block) // it is ours
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if end != 0 {
		t.Fatalf("elements below %d are missing", end)
	}
	shuffle(want)
	if !slices.Equal(out, want) {
		t.Fatal("the blocked shuffle differs from the plain rule")
	}
}

func drawPlan(t *rapid.T) plan {
	return plan{
		shift:   uint(rapid.IntRange(4, 12).Draw(t, "shift")),
		window:  rapid.OneOf(rapid.IntRange(1, 5), rapid.Just(1<<20)).Draw(t, "window"),
		threads: rapid.IntRange(1, 3).Draw(t, "threads"),
	}
}

func blockedProperty(memory *scratch) func(t *rapid.T) {
	return func(t *rapid.T) {
		src, twin := pair(t)
		p := drawPlan(t)
		n := max(1, min(sizes(60000).Draw(t, "n"), 1000<<p.shift))
		if rapid.Bool().Draw(t, "pairs") {
			blockedAlike(t, src, func(a []uint64) { plainShuffle(twin, a) }, n, p, memory)
		} else {
			blockedAlike(t, src, func(a []uint32) { plainShuffle(twin, a) }, n, p, memory)
		}
		same(t, src, twin)
	}
}

func TestBlocked(t *testing.T) {
	withAndWithoutVectors(t, func(t *testing.T) {
		var memory scratch
		defer memory.free()
		rapid.Check(t, blockedProperty(&memory))
	})
}

func FuzzBlocked(f *testing.F) {
	var memory scratch
	f.Cleanup(memory.free)
	f.Fuzz(rapid.MakeFuzz(blockedProperty(&memory)))
}

// biased is a source whose partners are chosen by a rule: what no generator would draw, but the
// queues must hold.
type biased struct {
	Source
	rule func(i uint32) uint32
}

func (b biased) partners(dst []uint32, i uint32) int {
	n := min(len(dst), int(i))
	for k := range n {
		dst[k] = b.rule(i - uint32(k))
	}
	return n
}

// TestBlockedFull: queues hold every message, even if all go to one of them.
func TestBlockedFull(t *testing.T) {
	withAndWithoutVectors(t, func(t *testing.T) {
		var memory scratch
		defer memory.free()
		rapid.Check(t, func(t *rapid.T) {
			p := drawPlan(t)
			n := rapid.OneOf(rapid.IntRange(1, 300<<4), rapid.IntRange(1, 40000)).Draw(t, "n")
			n = min(n, 1000<<p.shift)
			memory.free() // exactly the requested size, not the memory of a larger shuffle
			fixed := uint32(rapid.IntRange(0, n-1).Draw(t, "fixed"))
			rule := rapid.SampledFrom([]func(i uint32) uint32{
				func(i uint32) uint32 { return 0 },
				func(i uint32) uint32 { return i },
				func(i uint32) uint32 { return i - 1 },
				func(i uint32) uint32 { return min(i, fixed) },
				func(i uint32) uint32 { return i >> p.shift << p.shift },
				func(i uint32) uint32 { return max(i>>p.shift, 1)<<p.shift - 1<<p.shift },
				func(i uint32) uint32 { return i / 2 },
			}).Draw(t, "rule")
			src := biased{rule: rule}
			blockedAlike(t, src, func(a []uint32) {
				for i := len(a) - 1; i >= 1; i-- {
					j := rule(uint32(i))
					a[i], a[j] = a[j], a[i]
				}
			}, n, p, &memory)
		})
	})
}

// TestAbove32Bits: positions above 2³²-1 are drawn one by one, with 64 bits, before the others.
func TestAbove32Bits(t *testing.T) {
	const n = 1<<32 + 3
	type drawn struct{ positions []uint64 }
	for name, shuffle := range map[string]func(src Source){
		"Shuffle": func(src Source) { Shuffle(src, make([]struct{}, n)) },
		"skip":    func(src Source) { skip(src, n) },
	} {
		var got drawn
		func() {
			defer func() {
				if r := recover(); r != errStop {
					panic(r)
				}
			}()
			shuffle(&recording{positions: &got.positions})
		}()
		if want := []uint64{1<<32 + 2, 1<<32 + 1, 1 << 32, math.MaxUint32}; !slices.Equal(got.positions, want) {
			t.Errorf("%s draws for positions %d, want %d", name, got.positions, want)
		}
	}
}

var errStop = errors.New("partners asked for")

// recording records the draws, and stops when partners are drawn.
type recording struct {
	Source
	positions *[]uint64
}

func (r *recording) Interval(max uint64) uint64 {
	*r.positions = append(*r.positions, max)
	return 0
}

func (r *recording) partners(dst []uint32, i uint32) int {
	*r.positions = append(*r.positions, uint64(i))
	panic(errStop)
}

func TestShufflerStops(t *testing.T) {
	defer goleak.VerifyNone(t)
	broken := errors.New("no room")
	canceled, cancel := context.WithCancel(context.Background())
	cancel()
	for _, threads := range []int{1, 2} {
		for _, n := range []int{1000, 100000} {
			p := plan{shift: 12, window: 3, threads: threads}
			var memory scratch
			emitted := 0
			err := shuffleBlocked(context.Background(), NewRandomState(1), content[uint64](n), p, &memory,
				func(int, []uint64) error {
					if emitted++; emitted == 2 || n == 1000 {
						return broken
					}
					return nil
				})
			if !errors.Is(err, broken) || emitted > 2 {
				t.Errorf("%d elements, %d threads: error of emit: %v after %d blocks", n, threads, err, emitted)
			}
			ctx, cancel := context.WithCancel(context.Background())
			emitted = 0
			err = shuffleBlocked(ctx, NewRandomState(1), content[uint64](n), p, &memory, func(int, []uint64) error {
				emitted++
				cancel()
				return nil
			})
			cancel()
			if emitted != 1 || (n > 4096 && !errors.Is(err, context.Canceled)) {
				t.Errorf("%d elements, %d threads: canceled in the first block: %v after %d blocks", n, threads, err,
					emitted)
			}
			memory.free()

			s := Shuffler{Threads: threads}
			emit := func(int, []uint64) error {
				t.Errorf("%d elements, %d threads: emitted after the context was done", n, threads)
				return nil
			}
			if err := s.Pairs(canceled, NewRandomState(1), content[uint64](n), emit); !errors.Is(err,
				context.Canceled) {
				t.Errorf("%d elements, %d threads: Pairs: %v", n, threads, err)
			}
			if err := s.Uint32(canceled, NewRandomState(1), content[uint32](n)); !errors.Is(err, context.Canceled) {
				t.Errorf("%d elements, %d threads: Uint32: %v", n, threads, err)
			}
			if err := shuffleBlocked(canceled, NewRandomState(1), content[uint64](n), p, &memory, emit); !errors.Is(err,
				context.Canceled) {
				t.Errorf("%d elements, %d threads: blocked: %v", n, threads, err)
			}
			if err := s.Pairs(context.Background(), NewRandomState(1), content[uint64](n),
				func(int, []uint64) error { return broken }); !errors.Is(err, broken) {
				t.Errorf("%d elements, %d threads: error of emit, in one block: %v", n, threads, err)
			}
			memory.free()
		}
	}
}

func TestAligned(t *testing.T) {
	for _, n := range []int{0, 1, 4096, 5000, 2 << 20, 3<<20 + 1} {
		m, release := Aligned(n)
		if len(m) != n || uintptr(unsafe.Pointer(unsafe.SliceData(m)))%4096 != 0 {
			t.Errorf("Aligned(%d): %d bytes at %p", n, len(m), unsafe.SliceData(m))
		}
		for i, v := range m {
			if v != 0 {
				t.Fatalf("Aligned(%d): byte %d is not zero", n, i)
			}
			m[i] = 1
		}
		release()
		release()
	}
}
