package gpt

import "math"

// rows is a position in the sample index, which is filled from its end to its beginning while
// documents are processed from the last to the first.
//
// Row k ≥ 1 belongs to the document that holds token k·S of the concatenated documents, or token
// k·S-1 if x = 0. With end and start the numbers of tokens up to and before a document, both cases
// are start-x < k·S ≤ end-x; the row is (position, k·S-start).
type rows struct {
	position int64   // of the next document, in the document index
	bound    int64   // the tokens up to its end, minus x
	row      int64   // k, the next row
	target   int64   // k·S
	sequence int64   // S
	extra    int64   // x
	inverse  float64 // the float64 after the one nearest to 1/S
}

func newRows(sequence, extra int64) rows {
	return rows{sequence: sequence, extra: extra, inverse: math.Nextafter(1/float64(sequence), 2)}
}

// fill32Go writes the rows of documents, given as id | length<<32 and processed from the last to
// the first, into dst, whose element i is row low+i: position | offset<<32. It stops before a
// document that has a row below low, and returns how many documents are left.
func (r *rows) fill32Go(dst []uint64, low int64, documents []uint64) int {
	for i := len(documents) - 1; i >= 0; i-- {
		before := r.bound - int64(documents[i]>>32)
		for r.target > before {
			if r.row < low {
				return i + 1
			}
			dst[r.row-low] = uint64(uint32(r.position)) | uint64(r.target-before-r.extra)<<32
			r.row--
			r.target -= r.sequence
		}
		r.bound = before
		r.position--
	}
	return 0
}

// fill64Go is fill32Go for rows of two int64.
func (r *rows) fill64Go(dst [][2]int64, low int64, documents []uint64) int {
	for i := len(documents) - 1; i >= 0; i-- {
		before := r.bound - int64(documents[i]>>32)
		for r.target > before {
			if r.row < low {
				return i + 1
			}
			dst[r.row-low] = [2]int64{r.position, r.target - before - r.extra}
			r.row--
			r.target -= r.sequence
		}
		r.bound = before
		r.position--
	}
	return 0
}

// Kernels returns the instruction set of the package's kernels on this machine: "avx512" or "go".
func Kernels() string {
	if haveAVX512 {
		return "avx512"
	}
	return "go"
}
