package tokenize

import "unicode/utf8"

// A byte-level vocabulary spells bytes as printable characters, the alphabet of GPT-2: bytes that
// are printable in Latin-1 are spelled as themselves, the others as U+0100 and up in order.

var (
	byteRunes = func() (runes [256]rune) {
		next := rune(256)
		for c := range runes {
			if c >= '!' && c <= '~' || c >= 0xa1 && c <= 0xac || c >= 0xae {
				runes[c] = rune(c)
			} else {
				runes[c] = next
				next++
			}
		}
		return runes
	}()

	// runeBytes has a byte plus one for each character up to the last of the alphabet, or 0.
	runeBytes = func() (bytes [256 + 68]uint16) {
		for c, r := range byteRunes {
			bytes[r] = uint16(c) + 1
		}
		return bytes
	}()
)

// unspell appends the bytes that s spells to dst; ok is false if s has a character that is not in
// the alphabet.
func unspell(dst []byte, s string) (b []byte, ok bool) {
	start := len(dst)
	for _, r := range s {
		if int(r) >= len(runeBytes) || runeBytes[r] == 0 {
			return dst[:start], false
		}
		dst = append(dst, byte(runeBytes[r]-1))
	}
	return dst, true
}

// spell appends the spelling of the bytes to dst.
func spell(dst, bytes []byte) []byte {
	for _, c := range bytes {
		dst = utf8.AppendRune(dst, byteRunes[c])
	}
	return dst
}
