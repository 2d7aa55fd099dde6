//go:build !purego

package gpt

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

// haveAVX512 reports whether the machine can run the kernels of this file.
var haveAVX512 = cpu.X86.HasAVX512F && cpu.X86.HasAVX512BW && cpu.X86.HasAVX512DQ && cpu.X86.HasBMI2

// atOnce is how many lengths a kernel processes in one call, which cannot be interrupted.
const atOnce = 1 << 20

// sumLengths adds up little-endian int32, and reports whether one of them is negative.
func sumLengths(lengths []byte) (sum int64, negative bool) {
	for haveAVX512 && len(lengths) >= 64 {
		n := min(len(lengths)/64*16, atOnce)
		s, signs := sumLengthsAVX512(&lengths[0], n)
		sum += s
		negative = negative || signs>>31 != 0
		lengths = lengths[4*n:]
	}
	s, neg := sumLengthsGo(lengths)
	return sum + s, negative || neg
}

// fillPairs sets dst[i] to first+i | length<<32, with non-temporal stores if past is set, and adds
// up the lengths like sumLengths.
func fillPairs(dst []uint64, lengths []byte, first uint32, past bool) (sum int64, negative bool) {
	lengths = lengths[:4*len(dst)]
	for haveAVX512 && len(dst) >= 8 {
		n := min(len(dst)&^7, atOnce)
		flag := uint64(0)
		if past && uintptr(unsafe.Pointer(&dst[0]))%64 == 0 {
			flag = 1
		}
		s, signs := fillPairsAVX512(&dst[0], &lengths[0], n, uint64(first), flag)
		sum += s
		negative = negative || signs>>31 != 0
		dst, lengths, first = dst[n:], lengths[4*n:], first+uint32(n)
	}
	s, neg := fillPairsGo(dst, lengths, first)
	return sum + s, negative || neg
}

// narrow sets dst[i] to the low half of src[i].
func narrow(dst []uint32, src []uint64) {
	dst = dst[:len(src)]
	if n := len(src) &^ 7; haveAVX512 && n > 0 {
		narrowAVX512(&dst[0], &src[0], n)
		dst, src = dst[n:], src[n:]
	}
	narrowGo(dst, src)
}

// fill32 writes rows as fill32Go does, eight documents at a time.
//
// Of such a group it finds the bound below each document by adding up lengths, and the row there,
// floor(bound/S), by multiplication with a double just above 1/S, which is exact up to 2⁵⁰. The
// rows of the group are those between the lowest and the highest of them, and the document of row k
// is the number of bounds below k·S: a comparison of all with all, in bytes.
func (r *rows) fill32(dst []uint64, low int64, documents []uint64) (left int) {
	for haveAVX512 && len(documents) >= 8 {
		if r.inGroups(low) {
			_ = dst[r.row-low]
			n := rows32AVX512(r, &documents[0], len(documents), &dst[0], low)
			r.passed(len(documents) - n)
			documents = documents[:n]
		}
		// a group with too many rows, with a row below low, or above the last row of all
		if n := len(documents); n >= 8 {
			if left := r.fill32Go(dst, low, documents[n-8:]); left > 0 {
				return n - 8 + left
			}
			documents = documents[:n-8]
		}
	}
	return r.fill32Go(dst, low, documents)
}

// fill64 is fill32 for rows of two int64.
func (r *rows) fill64(dst [][2]int64, low int64, documents []uint64) (left int) {
	for haveAVX512 && len(documents) >= 8 {
		if r.inGroups(low) {
			_ = dst[r.row-low]
			n := rows64AVX512(r, &documents[0], len(documents), &dst[0], low)
			r.passed(len(documents) - n)
			documents = documents[:n]
		}
		if n := len(documents); n >= 8 {
			if left := r.fill64Go(dst, low, documents[n-8:]); left > 0 {
				return n - 8 + left
			}
			documents = documents[:n-8]
		}
	}
	return r.fill64Go(dst, low, documents)
}

// inGroups reports whether the next documents can be processed in groups.
func (r *rows) inGroups(low int64) bool { return r.row >= low && r.bound < 1<<50 }

// passed updates the state that the kernels leave unchanged, after the given number of documents.
func (r *rows) passed(documents int) {
	r.position -= int64(documents)
	r.target = r.row * r.sequence
}

//go:noescape
func sumLengthsAVX512(lengths *byte, n int) (sum int64, signs uint64)

//go:noescape
func fillPairsAVX512(dst *uint64, lengths *byte, n int, first, past uint64) (sum int64, signs uint64)

//go:noescape
func narrowAVX512(dst *uint32, src *uint64, n int)

//go:noescape
func rows32AVX512(r *rows, documents *uint64, n int, dst *uint64, low int64) (left int)

//go:noescape
func rows64AVX512(r *rows, documents *uint64, n int, dst *[2]int64, low int64) (left int)
