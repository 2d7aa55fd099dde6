//go:build !amd64 || purego

package gpt

// haveAVX512 reports whether there are kernels other than the Go ones.
const haveAVX512 = false

func sumLengths(lengths []byte) (sum int64, negative bool) { return sumLengthsGo(lengths) }

func fillPairs(dst []uint64, lengths []byte, first uint32, _ bool) (sum int64, negative bool) {
	return fillPairsGo(dst, lengths, first)
}

func narrow(dst []uint32, src []uint64) { narrowGo(dst[:len(src)], src) }

func (r *rows) fill32(dst []uint64, low int64, documents []uint64) (left int) {
	return r.fill32Go(dst, low, documents)
}

func (r *rows) fill64(dst [][2]int64, low int64, documents []uint64) (left int) {
	return r.fill64Go(dst, low, documents)
}
