//go:build !amd64 || purego

package tokenize

import (
	"unicode/utf8"
	"unsafe"
)

func maskASCII(to []masks, text []byte) (beyond uint64) { return maskASCIIGo(to, text) }

func findPairs([]byte, *pairTables) (at int, found uint32) { return 0, 0 }

func addKnown(l *lookup) { addKnownGo(l) }

func hashWords(l *lookup) { hashWordsGo(l) }

func validUTF8(s []byte) bool { return utf8.Valid(s) }

func prefetch(unsafe.Pointer) {}
