package gpt

import "encoding/binary"

// lengthAt returns element i of an array of little-endian int32.
func lengthAt(lengths []byte, i int64) int32 {
	return int32(binary.LittleEndian.Uint32(lengths[4*i:]))
}

// sumLengthsGo adds up little-endian int32, and reports whether one of them is negative.
func sumLengthsGo(lengths []byte) (sum int64, negative bool) {
	var signs uint32
	for ; len(lengths) >= 4; lengths = lengths[4:] {
		v := binary.LittleEndian.Uint32(lengths)
		sum += int64(v)
		signs |= v
	}
	return sum, signs>>31 != 0
}

// fillPairsGo sets dst[i] to first+i | length<<32, and adds up the lengths like sumLengthsGo.
func fillPairsGo(dst []uint64, lengths []byte, first uint32) (sum int64, negative bool) {
	var signs uint32
	for i := range dst {
		v := binary.LittleEndian.Uint32(lengths[4*i:])
		dst[i] = uint64(first+uint32(i)) | uint64(v)<<32
		sum += int64(v)
		signs |= v
	}
	return sum, signs>>31 != 0
}

// narrowGo sets dst[i] to the low half of src[i].
func narrowGo(dst []uint32, src []uint64) {
	for i, v := range src {
		dst[i] = uint32(v)
	}
}
