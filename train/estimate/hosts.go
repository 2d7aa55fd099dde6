package estimate

import (
	"slices"

	"mula/xpu/comm"
)

// inHost returns the number of ranks of a group on one host, if ranks fill hosts of perHost ranks
// one after the other.
func (l Layout) inHost(g comm.Axes, perHost int) int {
	if g == comm.World {
		return min(l.Size(g), perHost)
	}
	n, ranks := 1, 1 // of the group on one host; consecutive ranks with different coordinates so far
	axes := comm.AllAxes()
	for _, axis := range slices.Backward(axes) {
		if size := l.Size(axis); g&axis != 0 {
			n *= min(size, max(1, perHost/ranks))
		}
		ranks *= l.Size(axis)
	}
	return n
}

// partialSum returns the number of ranks whose sum a host with a ranks of a group sends: the
// largest stage of the order of sums that fits into the host.
func (l Layout) partialSum(g comm.Axes, a int) int {
	sum := 1
	if g&comm.ExpertDP == 0 || g&comm.PP != 0 {
		return sum
	}
	inner := l.Size(g &^ comm.ExpertDP)
	for _, stage := range []int{inner, inner * l.SumReplicas} {
		if stage > 0 && a%stage == 0 {
			sum = stage
		}
	}
	return sum
}

// twoLevelBytes returns the bytes that all ranks of a group send in an exchange of mula, inside
// hosts and between them. hosts has the number of ranks of each host; they are consecutive.
//
//   - In a reduction or a gather, parts has the bytes of each rank's part. partial is the number of
//     ranks in a partial sum, 0 for all ranks of a host.
//   - In an all-to-all, parts has the bytes that each rank gets from each other rank.
//   - In a broadcast, parts has one part, the data.
//
// [mula/xpu/comm.Comm] has the algorithms: a rank of each host relays for a rank, and the n ranks
// of the group divide equally among the relays of a host.
func twoLevelBytes(o comm.Operation, hosts []int, partial int, parts []int64) (inside, between int64) {
	n, sums := 0, 0 // ranks, and partial sums of all hosts
	sumsOf := func(a int) int {
		if partial == 0 {
			return 1
		}
		return a / partial
	}
	for _, a := range hosts {
		n, sums = n+a, sums+sumsOf(a)
	}
	b, all := int64(len(hosts)), int64(0)
	for _, part := range parts {
		all += part
	}
	if o == comm.OpBroadcast {
		return all * (int64(n) - b), all * (b - 1)
	}
	relays := 1 < b && b < int64(n)
	rank := 0
	for _, ranks := range hosts {
		a, own := int64(ranks), int64(sumsOf(ranks))
		if relays && (o == comm.OpReduceScatter || o == comm.OpAllGather || o == comm.OpAllReduce) {
			inside += (a - 1) * all // to the relays, or from them
			if o == comm.OpAllReduce {
				inside += (a - 1) * all
			}
		}
		if relays && o == comm.OpAllToAll {
			inside += (a - 1) * (all + 8*int64(n)) // and the lengths
		}
		for i := range ranks {
			part, others := parts[rank], int64(n)-a
			ownRelay := rank*ranks/n == i
			rank++
			switch {
			case !relays:
				if o == comm.OpAllReduce {
					part *= 2
				}
				inside, between = inside+part*(a-1), between+part*others
			case o == comm.OpAllToAll:
				between += part * others
				if !ownRelay {
					inside += part * (a - 2) // from the relay; the rank sends nothing for itself
				}
			default:
				if o != comm.OpAllGather {
					between += part * (int64(sums) - own)
				}
				if o != comm.OpReduceScatter {
					between += part * (b - 1)
				}
				if !ownRelay && o != comm.OpAllGather {
					inside += part * own
				}
				if !ownRelay && o != comm.OpReduceScatter {
					inside += part
				}
			}
		}
	}
	return inside, between
}
