//go:build !amd64 || purego

package numpy

// vectors reports whether this processor runs the assembly of this package.
const vectors = false

func twist(state *[blockWords + 16]uint32, block *[blockWords]uint32) { twistGo(state, block) }

func accept(words, dst []uint32, mask, i uint32) int { return acceptGo(words, dst, mask, i) }

func swap[T element](a []T, i int, partners []uint32, ahead int) {
	swapGo(a, i, partners[:len(partners)-ahead])
}

func send[T element](q *queues[T], a []T, i int, partners []uint32, block int, shift uint) {
	sendGo(q, a, i, partners, block, shift)
}

func deliver[T element](block []T, groups []group[T], count int) { deliverGo(block, groups, count) }

func fetch[T element](q *queues[T], head []uint64, a []T) { fetchGo(q, head, a) }
