//go:build !purego

package numpy

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

// vectors reports whether this machine can run the assembly.
var vectors = cpu.X86.HasAVX512F && cpu.X86.HasBMI1 && cpu.X86.HasBMI2 && cpu.X86.HasPOPCNT

func twist(state *[blockWords + 16]uint32, block *[blockWords]uint32) {
	if vectors {
		twistAVX512(&state[0], &block[0])
	} else {
		twistGo(state, block)
	}
}

func accept(words, dst []uint32, mask, i uint32) int {
	if vectors {
		return acceptAVX512(&words[0], len(words), &dst[:len(words)][0], mask, i)
	}
	return acceptGo(words, dst, mask, i)
}

func swap[T element](a []T, i int, partners []uint32, ahead int) {
	n := len(partners) - ahead
	switch {
	case !vectors || n <= 0:
		swapGo(a, i, partners[:max(n, 0)])
	case unsafe.Sizeof(a[0]) == 4:
		swap32AVX512((*uint32)(unsafe.Pointer(&a[0])), i, &partners[0], n, ahead)
	default:
		swap64AVX512((*uint64)(unsafe.Pointer(&a[0])), i, &partners[0], n, ahead)
	}
}

func send[T element](q *queues[T], a []T, i int, partners []uint32, block int, shift uint) {
	switch {
	case !vectors || len(partners) == 0:
		sendGo(q, a, i, partners, block, shift)
	case unsafe.Sizeof(a[0]) == 4:
		send32AVX512((*uint32)(unsafe.Pointer(&a[0])), i, &partners[0], len(partners), block, int(shift),
			unsafe.Pointer(&q.staging[0]), &q.tail[0], unsafe.Pointer(&q.groups[0]), &q.fresh, &q.link[0])
	default:
		send64AVX512((*uint64)(unsafe.Pointer(&a[0])), i, &partners[0], len(partners), block, int(shift),
			unsafe.Pointer(&q.staging[0]), &q.tail[0], unsafe.Pointer(&q.groups[0]), &q.fresh, &q.link[0])
	}
}

func deliver[T element](block []T, groups []group[T], count int) {
	switch {
	case !vectors || count == 0:
		deliverGo(block, groups, count)
	case unsafe.Sizeof(block[0]) == 4:
		deliver32AVX512((*uint32)(unsafe.Pointer(&block[0])), unsafe.Pointer(&groups[0]), count)
	default:
		deliver64AVX512((*uint64)(unsafe.Pointer(&block[0])), unsafe.Pointer(&groups[0]), count)
	}
}

func fetch[T element](q *queues[T], head []uint64, a []T) {
	switch n := len(a); {
	case !vectors || n == 0:
		fetchGo(q, head, a)
	case unsafe.Sizeof(a[0]) == 4:
		fetch32AVX512((*uint32)(unsafe.Pointer(&a[n-1])), n, &head[0], unsafe.Pointer(&q.groups[0]), &q.link[0])
	default:
		fetch64AVX512((*uint64)(unsafe.Pointer(&a[n-1])), n, &head[0], unsafe.Pointer(&q.groups[0]), &q.link[0])
	}
}

//go:noescape
func twistAVX512(state, block *uint32)

//go:noescape
func acceptAVX512(words *uint32, count int, dst *uint32, mask, i uint32) (accepted int)

//go:noescape
func swap32AVX512(a *uint32, i int, partners *uint32, count, ahead int)

//go:noescape
func swap64AVX512(a *uint64, i int, partners *uint32, count, ahead int)

//go:noescape
func send32AVX512(a *uint32, i int, partners *uint32, count, block, shift int, staging unsafe.Pointer, tail *uint64,
	groups unsafe.Pointer, fresh *uint64, link *uint32)

//go:noescape
func send64AVX512(a *uint64, i int, partners *uint32, count, block, shift int, staging unsafe.Pointer, tail *uint64,
	groups unsafe.Pointer, fresh *uint64, link *uint32)

//go:noescape
func deliver32AVX512(block *uint32, groups unsafe.Pointer, count int)

//go:noescape
func deliver64AVX512(block *uint64, groups unsafe.Pointer, count int)

//go:noescape
func fetch32AVX512(last *uint32, count int, head *uint64, groups unsafe.Pointer, link *uint32)

//go:noescape
func fetch64AVX512(last *uint64, count int, head *uint64, groups unsafe.Pointer, link *uint32)
