// Package numpy has the parts of numpy that decide what index files hold: its random generators,
// its shuffles, its sum of floating-point numbers, its text of arrays, and the headers of its
// files. All give numpy's bits.
//
// Shuffles are numpy's too, but not its way of doing them. RandomState and Generator draw in bulk,
// with AVX-512 where the machine has it, and a [Shuffler] chooses between two ways that never wait
// for memory as the plain loop does: one touches elements some swaps ahead of moving them, the
// other cuts large arrays into blocks that fit the cache and sends values between them.
package numpy

// Kernels returns the instruction set of the package's kernels on this machine: "avx512" or "go".
func Kernels() string {
	if vectors {
		return "avx512"
	}
	return "go"
}
