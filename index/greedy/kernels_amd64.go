//go:build !purego

package greedy

import "golang.org/x/sys/cpu"

// vectors reports whether this processor runs the assembly of this package.
var vectors = cpu.X86.HasAVX512F && cpu.X86.HasAVX512DQ && cpu.X86.HasAVX512VL && cpu.X86.HasAVX512BW &&
	cpu.X86.HasBMI1 && cpu.X86.HasPOPCNT

// mask has bit 0 set if apart.
func mask(apart bool) uint64 {
	if apart {
		return 1
	}
	return 0
}

func race(heats *[lanes]heat, fused, apart, turns bool) {
	switch {
	case !vectors:
		raceGo(heats, fused, apart, turns)
	case fused && turns:
		raceFusedTurns(heats, mask(apart))
	case fused:
		raceFused(heats, mask(apart))
	case turns:
		raceSeparateTurns(heats)
	default:
		raceSeparate(heats)
	}
}

func sift(toW, toC []float64, place []int32, room int, w, c []float64, x, tau float64, fused, apart bool) int {
	if !vectors {
		return siftGo(toW, toC, place, room, w, c, x, tau, fused, apart)
	}
	// The kernel writes a vector past room.
	_, _, _ = toW[room+spare-1], toC[room+spare-1], place[room+spare-1]
	if fused {
		return int(siftFused(&toW[0], &toC[0], &place[0], int64(room), &w[0], &c[0], int64(len(w)), x, tau,
			mask(apart)))
	}
	return int(siftSeparate(&toW[0], &toC[0], &place[0], int64(room), &w[0], &c[0], int64(len(w)), x, tau))
}

func argmax(w, c []float64, x float64, fused bool) (best float64, at, equal int) {
	if !vectors {
		return argmaxGo(w, c, x, fused)
	}
	var a, e int64
	if fused {
		best, a, e = argmaxFused(&w[0], &c[0], int64(len(w)), x)
	} else {
		best, a, e = argmaxSeparate(&w[0], &c[0], int64(len(w)), x)
	}
	return best, int(a), int(e)
}

func descend(v *vertical, dataset []int16, sample []int64, stride, rows int, fused, apart bool) {
	// The kernel writes rows·8 elements from the start of each column.
	last := (columns-1)*stride + rows*rowSteps - 1
	_, _ = dataset[last], sample[last]
	switch {
	case !vectors:
		descendGo(v, dataset, sample, stride, rows, fused, apart)
	case fused:
		descendFused(v, &dataset[0], &sample[0], int64(stride), int64(rows), mask(apart))
	default:
		descendSeparate(v, &dataset[0], &sample[0], int64(stride), int64(rows))
	}
}

//go:noescape
func raceSeparate(heats *[lanes]heat)

//go:noescape
func raceSeparateTurns(heats *[lanes]heat)

//go:noescape
func raceFusedTurns(heats *[lanes]heat, apart uint64)

//go:noescape
func raceFused(heats *[lanes]heat, apart uint64)

//go:noescape
func siftSeparate(toW, toC *float64, place *int32, room int64, w, c *float64, n int64, x, tau float64) int64

//go:noescape
func siftFused(toW, toC *float64, place *int32, room int64, w, c *float64, n int64, x, tau float64, apart uint64) int64

//go:noescape
func argmaxSeparate(w, c *float64, n int64, x float64) (best float64, at, equal int64)

//go:noescape
func argmaxFused(w, c *float64, n int64, x float64) (best float64, at, equal int64)

//go:noescape
func descendSeparate(v *vertical, dataset *int16, sample *int64, stride, rows int64)

//go:noescape
func descendFused(v *vertical, dataset *int16, sample *int64, stride, rows int64, apart uint64)
