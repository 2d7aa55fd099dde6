//go:build !purego

package numpy

import (
	"slices"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// fence is memory before a page that is not accessible.
type fence struct{ memory []byte }

func newFence(t *testing.T, bytes int) fence {
	page := unix.Getpagesize()
	size := (bytes + page - 1) / page * page
	memory, err := unix.Mmap(-1, 0, size+page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(memory) })
	if err := unix.Mprotect(memory[size:], unix.PROT_NONE); err != nil {
		t.Fatal(err)
	}
	return fence{memory[:size]}
}

// last returns the address of the last bytes before the fence.
func (f fence) last(bytes int) unsafe.Pointer {
	return unsafe.Add(unsafe.Pointer(&f.memory[0]), len(f.memory)-bytes)
}

// TestKernels compares assembly and Go, function by function, in memory between fences.
func TestKernels(t *testing.T) {
	if !setVectors(true) {
		t.Skip("this machine cannot run the assembly")
	}
	kernels[uint32](t)
	kernels[uint64](t)
	state := newFence(t, 4*(blockWords+16))
	block := newFence(t, 4*blockWords)
	rapid.Check(t, func(t *rapid.T) {
		r := NewRandomState(rapid.Uint32().Draw(t, "seed"))
		s, b := (*[blockWords + 16]uint32)(state.last(4*(blockWords+16))),
			(*[blockWords]uint32)(block.last(4*blockWords))
		*s = r.state
		for range rapid.IntRange(1, 4).Draw(t, "passes") {
			twistGo(&r.state, &r.block)
			twistAVX512(&s[0], &b[0])
			if *s != r.state || *b != r.block {
				t.Fatal("twist: assembly and Go differ")
			}
		}
	})
	words, dst := newFence(t, 4*blockWords), newFence(t, 4*blockWords)
	rapid.Check(t, func(t *rapid.T) {
		n := 16 * rapid.IntRange(1, blockWords/16).Draw(t, "vectors")
		shift := rapid.IntRange(0, 20).Draw(t, "shift")
		mask := ^uint32(0) >> shift
		least := max(mask>>1+1, uint32(n))
		i := least + uint32(n) + rapid.Uint32Range(0, min(mask-least, mask-least-uint32(n))).Draw(t, "i")
		w := unsafe.Slice((*uint32)(words.last(4*n)), n)
		g := NewGenerator(rapid.Uint64().Draw(t, "seed"))
		near := rapid.Bool().Draw(t, "near")
		for k := range w {
			w[k] = g.Uint32()
			if near { // around i, where every word is doubtful
				w[k] = i - uint32(n) + g.Uint32()%uint32(n+20)
			}
		}
		got, want := unsafe.Slice((*uint32)(dst.last(4*n)), n), make([]uint32, n)
		k := acceptGo(w, want, mask, i)
		if d := acceptAVX512(&w[0], n, &got[0], mask, i); d != k || !slices.Equal(got[:k], want[:k]) {
			t.Fatalf("accept: assembly has %d, Go %d", d, k)
		}
	})
}

func kernels[T element](t *testing.T) {
	const largest, shift, blocks = 1 << 12, 7, 32
	size := int(unsafe.Sizeof(T(0)))
	array, drawn := newFence(t, size*largest), newFence(t, 4*partnerBatch)
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, largest).Draw(t, "n")
		count := rapid.IntRange(0, min(n, partnerBatch)).Draw(t, "count")
		g := NewGenerator(rapid.Uint64().Draw(t, "seed"))
		a, want := unsafe.Slice((*T)(array.last(size*n)), n), content[T](n)
		copy(a, want)
		js := unsafe.Slice((*uint32)(drawn.last(4*count)), count)
		for k := range js {
			js[k] = uint32(g.Interval(uint64(n - 1 - k)))
		}
		ahead := rapid.IntRange(0, min(count, swapAhead)).Draw(t, "ahead")
		swap(a, n-1, js, ahead)
		swapGo(want, n-1, js[:count-ahead])
		if !slices.Equal(a, want) {
			t.Fatal("swap: assembly and Go differ")
		}

		// Messages of one block to all below, sent several times, then delivered to one of them,
		// then fetched.
		var memory [2]scratch
		var q [2]*queues[T]
		for k := range q {
			made := newQueues[T](&memory[k], blocks, 2*blocks+1)
			q[k] = &made
			q[k].clear(blocks)
		}
		block := (n - 1) >> shift
		copy(want, a)
		for i := n - 1; i >= block<<shift && i > 0; {
			part := js[:0]
			for range rapid.IntRange(1, i-block<<shift+1).Draw(t, "part") {
				part = append(part[:len(part):len(part)], uint32(g.Interval(uint64(i-len(part)))))
			}
			send(q[0], a, i, part, block, shift)
			sendGo(q[1], want, i, part, block, shift)
			i -= len(part)
		}
		if !slices.Equal(a, want) {
			t.Fatal("send: assembly and Go differ")
		}
		for b := range blocks {
			q[0].store(b)
			q[1].store(b)
			if q[0].tail[b] != q[1].tail[b] {
				t.Fatalf("send: the queue of block %d ends at %d in assembly, %d in Go", b, q[0].tail[b], q[1].tail[b])
			}
			if b == block || b<<shift >= n {
				continue
			}
			sent := int(q[0].tail[b]) - b*chunkMessages
			of := func(q *queues[T]) []group[T] { return q.groups[b*chunkGroups : (b+1)*chunkGroups] }
			deliver(a[b<<shift:], of(q[0]), sent)
			deliverGo(want[b<<shift:], of(q[1]), sent)
		}
		if !slices.Equal(a, want) {
			t.Fatal("deliver: assembly and Go differ")
		}
		if low := max(block<<shift, 1); low < n {
			head := make([]uint64, blocks)
			for b := range head {
				head[b] = uint64(b) * chunkMessages
			}
			fetch(q[0], slices.Clone(head), a[low:])
			fetchGo(q[1], head, want[low:])
		}
		if !slices.Equal(a, want) {
			t.Fatal("fetch: assembly and Go differ")
		}
		for _, m := range memory {
			m.free()
		}
	})
}
