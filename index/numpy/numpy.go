// Package numpy implements the parts of numpy that determine the contents of index files: its
// random generators, its shuffles, its sum of floating-point numbers, its text of arrays, and the
// headers of its files. All results are bit-identical to numpy's.
//
// The shuffles are faster than numpy's. RandomState and Generator draw in bulk, with AVX-512 if
// available. A [Shuffler] chooses between two algorithms that hide memory latency: the first
// prefetches elements several swaps ahead, and the second cuts large arrays into blocks that fit
// the cache and sends values between them.
package numpy

// Kernels returns the instruction set of the package's kernels on this machine: "avx512" or "go".
func Kernels() string {
	if vectors {
		return "avx512"
	}
	return "go"
}
