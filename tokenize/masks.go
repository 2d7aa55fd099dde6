package tokenize

import (
	"encoding/binary"
	"math/bits"
	"unicode/utf8"
)

// The starts of words are computed for 64 bytes of text at a time. Each class of characters is a
// mask: bit i is set if byte i belongs to a character of the class. All bytes of a character have
// its class. Vector instructions find the masks of ASCII; a table has the other characters.

// maskedBytes is how many bytes of text a mask has.
const maskedBytes = 64

// masks are the classes of 64 bytes.
type masks struct {
	letters  uint64
	capitals uint64 // letters that are Lu or Lt
	smalls   uint64 // letters that are Ll
	numbers  uint64
	spaces   uint64 // white space
	breaks   uint64 // \r and \n
	blanks   uint64 // U+0020
	quotes   uint64 // U+0027, the apostrophe
	slashes  uint64
	beyond   uint64 // bytes of characters that are not ASCII

	// undefined if beyond is 0
	continued uint64 // bytes of a character after its first
	caseless  uint64 // first bytes of three-byte characters that are all of \p{Lo}: Chinese and Korean
	cyrillic  uint64 // first bytes of two-byte characters that are all letters

	marks uint64 // defined if the pattern has cases
}

// maskedTextBytes is the size of the text whose masks are computed together. It fits in the first
// level of the processor's cache with its masks.
const maskedTextBytes = 4096

// A maskedText is a part of a text with its masks.
type maskedText struct {
	// text is followed by zeros, so that keys can be read beyond its end
	text   [maskedTextBytes + maskedBytes + 16]byte
	masks  [maskedTextBytes/maskedBytes + 2]masks
	n      int    // bytes of text
	beyond uint64 // not 0 if some byte is not ASCII
}

// fill copies the start of s, which is valid UTF-8, and computes its masks. cases states whether
// the masks for patterns with cases are needed.
func (c *maskedText) fill(t *classTable, s []byte, cases bool) {
	c.n = copy(c.text[:maskedTextBytes], s)
	if c.n < len(s) {
		for s[c.n]&0xc0 == 0x80 { // do not cut a character
			c.n--
		}
	}
	clear(c.text[c.n : c.n+maskedBytes])
	blocks := (c.n + maskedBytes - 1) / maskedBytes
	c.beyond = maskASCII(c.masks[:blocks], c.text[:])
	c.masks[blocks], c.masks[blocks+1] = masks{}, masks{}
	if c.beyond != 0 {
		c.maskBeyond(t, blocks, cases)
	}
}

// A classLine has the classes of a character that is not ASCII, each all zeros or all ones.
type classLine struct{ letters, capitals, smalls, marks, numbers, spaces uint64 }

var classLines = func() (lines [32]classLine) {
	all := func(k class, set classes) uint64 {
		if k.in(set) {
			return ^uint64(0)
		}
		return 0
	}
	for i := range lines {
		k := class(i)
		lines[k] = classLine{
			all(k, letter), all(k, 1<<lu|1<<lt), all(k, 1<<ll), all(k, mark), all(k, number), all(k, space),
		}
	}
	return lines
}()

// maskBeyond adds the characters that are not ASCII.
func (c *maskedText) maskBeyond(t *classTable, blocks int, cases bool) {
	// the rest of the last character of the block before, if it reaches into the next
	var cut *classLine
	var cutBytes uint64
	for b := range blocks {
		m := &c.masks[b]
		m.marks = 0
		if m.beyond == 0 {
			m.continued = 0
			continue
		}
		m.letters |= m.beyond // as most characters are
		if cutBytes != 0 {
			m.set(cutBytes, cut)
			cutBytes = 0
		}
		firsts := m.beyond &^ m.continued
		text := (*[maskedBytes + utf8.UTFMax]byte)(c.text[b*maskedBytes:])
		if last := lastOf(firsts); firsts != 0 && last > maskedBytes-utf8.UTFMax {
			k, n := t.ofMany(text[last : last+utf8.UTFMax])
			if last+n > maskedBytes {
				cut, cutBytes = &classLines[k&31], (uint64(1)<<(n&63)-1)>>((maskedBytes-last)&63)
			}
		}
		firsts &^= m.caseless
		if cases {
			m.setClasses(t, firsts, text)
			continue
		}
		firsts &^= m.cyrillic
		letters, kinds := t.removeNotLetters(m.letters, firsts, text)
		if kinds&numberOrSpace != 0 { // rare
			m.setClasses(t, firsts, text)
		} else {
			m.letters = letters
		}
	}
}

// removeNotLetters removes from letters the bytes of characters that are not letters. firsts has
// their first bytes. It returns the kinds of all the characters.
func (t *classTable) removeNotLetters(letters, firsts uint64, text *[maskedBytes + utf8.UTFMax]byte) (uint64, uint8) {
	page, data := &t.kinds.page, t.kinds.data
	kinds := uint8(0)
	for ; firsts != 0; firsts &= firsts - 1 {
		i := bits.TrailingZeros64(firsts) & 63
		var at int
		var bytes uint64
		switch c := text[i]; { // as in ofMany, which would be a call
		case c < 0xe0:
			at, bytes = int(page[c&0x1f])<<6|int(text[i+1]&0x3f), 1<<2-1
		case c < 0xf0:
			at, bytes = int(page[int(c&0xf)<<6|int(text[i+1]&0x3f)])<<6|int(text[i+2]&0x3f), 1<<3-1
		default:
			at = int(page[int(c&7)<<12|int(text[i+1]&0x3f)<<6|int(text[i+2]&0x3f)])<<6 | int(text[i+3]&0x3f)
			bytes = 1<<4 - 1
		}
		kind := data[at]
		kinds |= kind
		letters &^= bytes << i & -uint64(kind&notLetter)
	}
	return letters, kinds
}

// setClasses sets the classes of the characters whose first bytes are in firsts, and whose bytes
// are letters so far.
func (m *masks) setClasses(t *classTable, firsts uint64, text *[maskedBytes + utf8.UTFMax]byte) {
	for ; firsts != 0; firsts &= firsts - 1 {
		i := bits.TrailingZeros64(firsts)
		k, n := t.ofMany(text[i : i+utf8.UTFMax])
		m.set((1<<n-1)<<i, &classLines[k&31])
	}
}

// set sets the classes of a character that is not ASCII, whose bytes are letters so far.
func (m *masks) set(bytes uint64, line *classLine) {
	m.letters &^= bytes &^ line.letters
	m.capitals |= bytes & line.capitals
	m.smalls |= bytes & line.smalls
	m.marks |= bytes & line.marks
	m.numbers |= bytes & line.numbers
	m.spaces |= bytes & line.spaces
}

// window sets w to the masks of the 64 bytes from at, without the masks of windowCases.
func (c *maskedText) window(w *masks, at int) {
	b, k := at/maskedBytes, uint(at%maskedBytes)
	x, y := &c.masks[b], &c.masks[b+1]
	w.letters = join(x.letters, y.letters, k)
	w.numbers = join(x.numbers, y.numbers, k)
	w.spaces = join(x.spaces, y.spaces, k)
	w.breaks = join(x.breaks, y.breaks, k)
	w.blanks = join(x.blanks, y.blanks, k)
	w.quotes = join(x.quotes, y.quotes, k)
	w.beyond, w.continued = 0, 0
	if c.beyond != 0 {
		w.beyond = join(x.beyond, y.beyond, k)
		w.continued = join(x.continued, y.continued, k)
	}
}

// windowCases sets the masks that only patterns with cases need.
func (c *maskedText) windowCases(w *masks, at int) {
	b, k := at/maskedBytes, uint(at%maskedBytes)
	x, y := &c.masks[b], &c.masks[b+1]
	w.capitals = join(x.capitals, y.capitals, k)
	w.smalls = join(x.smalls, y.smalls, k)
	w.slashes = join(x.slashes, y.slashes, k)
	w.marks = 0
	if c.beyond != 0 {
		w.marks = join(x.marks, y.marks, k)
	}
}

// join returns the 64 bits from bit k of two masks.
func join(x, y uint64, k uint) uint64 { return x>>(k&63) | y<<1<<((63-k)&63) }

// maskASCIIGo computes the masks of consecutive blocks of text, with ASCII's classes only, and
// returns a value that is not 0 if some byte is not ASCII. It processes eight bytes at a time: an
// addition to bytes below 0x80 carries into the high bit of the bytes that reach a bound.
func maskASCIIGo(to []masks, text []byte) (beyond uint64) {
	for i := range to {
		var m masks
		block := text[i*maskedBytes : i*maskedBytes+maskedBytes]
		for k := 0; k < maskedBytes; k += 8 {
			x := binary.LittleEndian.Uint64(block[k:])
			low, ascii := x&^highBits, ^x&highBits
			put := func(mask *uint64, high uint64) { *mask |= gatherHigh(high) << k }
			capitals := from(low, 'A') &^ from(low, 'Z'+1) & ascii
			smalls := from(low, 'a') &^ from(low, 'z'+1) & ascii
			put(&m.letters, capitals|smalls)
			put(&m.capitals, capitals)
			put(&m.smalls, smalls)
			put(&m.numbers, from(low, '0')&^from(low, '9'+1)&ascii)
			blanks := equal(low, ' ') & ascii
			put(&m.spaces, (from(low, '\t')&^from(low, '\r'+1)|blanks)&ascii)
			put(&m.breaks, (equal(low, '\n')|equal(low, '\r'))&ascii)
			put(&m.blanks, blanks)
			put(&m.quotes, equal(low, '\'')&ascii)
			put(&m.slashes, equal(low, '/')&ascii)
			put(&m.beyond, x&highBits)
			put(&m.continued, x&highBits&^(x<<1))
			between := func(lo, hi byte) uint64 { return from(low, lo&0x7f) &^ from(low, hi&0x7f+1) &^ ascii }
			put(&m.caseless, between(0xe5, 0xe8)|between(0xeb, 0xec))
			put(&m.cyrillic, between(0xd0, 0xd1))
		}
		beyond |= m.beyond
		to[i] = m
	}
	return beyond
}

// from returns the high bits of the bytes of low, which are below 0x80, that are at least bound.
func from(low uint64, bound byte) uint64 { return (low + uint64(0x80-bound)*eachByte) & highBits }

// equal returns the high bits of the bytes of low, which are below 0x80, that are equal to c.
func equal(low uint64, c byte) uint64 { return from(low, c) &^ from(low, c+1) }

// gatherHigh returns the high bits of the bytes of x as the lower eight bits. The other bits of x
// are zero.
func gatherHigh(high uint64) uint64 { return high >> 7 * 0x0102040810204080 >> 56 }
