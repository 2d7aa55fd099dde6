//go:build !purego

package tokenize

//go:generate go run ./gen

import (
	"unicode/utf8"
	"unsafe"

	"golang.org/x/sys/cpu"
)

// The instruction sets that this processor has.
var (
	hasAVX2   = cpu.X86.HasAVX2
	hasBMI2   = hasAVX2 && cpu.X86.HasBMI1 && cpu.X86.HasBMI2
	hasAVX512 = hasAVX2 && cpu.X86.HasAVX512F && cpu.X86.HasAVX512BW
)

// maskASCII is maskASCIIGo.
func maskASCII(to []masks, text []byte) (beyond uint64) {
	if len(to) == 0 {
		return 0
	}
	_ = text[len(to)*maskedBytes-1]
	switch {
	case hasAVX512:
		return maskAVX512(&to[0], &text[0], len(to))
	case hasAVX2:
		return maskAVX2(&to[0], &text[0], len(to))
	}
	return maskASCIIGo(to, text)
}

// findPairs returns the position of the first block of pairs in s in which the tables find a pair,
// and a bit for each pair they find. found is 0 if there is none: what follows at, less than a
// block, was not searched. s has more than a block of bytes.
func findPairs(s []byte, p *pairTables) (at int, found uint32) {
	if !hasAVX2 {
		return 0, 0
	}
	return pairAVX2(&s[0], (len(s)-1)/pairBlock, p)
}

//go:noescape
func maskAVX2(to *masks, text *byte, blocks int) (beyond uint64)

//go:noescape
func maskAVX512(to *masks, text *byte, blocks int) (beyond uint64)

//go:noescape
func pairAVX2(text *byte, blocks int, tables *pairTables) (at int, found uint32)

// hashWords is hashWordsGo.
func hashWords(l *lookup) {
	if hasBMI2 {
		hashBMI2(l)
		return
	}
	hashWordsGo(l)
}

// addKnown is addKnownGo.
func addKnown(l *lookup) {
	if hasBMI2 {
		addKnownBMI2(l)
		return
	}
	addKnownGo(l)
}

//go:noescape
func addKnownBMI2(l *lookup)

//go:noescape
func hashBMI2(l *lookup)

// validUTF8 is utf8.Valid.
func validUTF8(s []byte) bool {
	blocks := len(s) / 32
	if !hasAVX2 || blocks == 0 {
		return utf8.Valid(s)
	}
	if !utf8AVX2(&s[0], blocks) {
		return false
	}
	// The last character of the blocks may reach beyond them.
	last := 32*blocks - 1
	for s[last]&0xc0 == 0x80 {
		last--
	}
	return utf8.Valid(s[last:])
}

// utf8AVX2 reports whether blocks of 32 bytes are valid UTF-8, except that the last character may
// be cut.
//
//go:noescape
func utf8AVX2(s *byte, blocks int) bool

// prefetch loads a cache line before it is read.
//
//go:noescape
func prefetch(p unsafe.Pointer)
