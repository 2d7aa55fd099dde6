package tokenize

import "unicode/utf8"

// plainRunes normalizes most chunks in one pass, without the normalizers: it has the characters
// whose normalization does not depend on their neighbours and results in one known character.
type plainRunes struct {
	// ascii has the result for each character below 0x80, except the blank that starts a chunk. It
	// is 0 if the result is not one such character.
	ascii [utf8.RuneSelf]byte
	// same has the other characters that remain unchanged.
	same *runeTable[bool]
	// blanks are the texts that blanks at the start of a chunk become, by their index in
	// [chunking.blanks].
	blanks [2][]byte
}

// plainLimit is the first code point that plainRunes does not look at. Few texts have characters
// above it.
const plainLimit = 0x20000

// newPlainRunes returns the plain characters of the normalizers of k, whose blanks are known.
func newPlainRunes(k *chunking) *plainRunes {
	p := &plainRunes{}
	for c := range rune(utf8.RuneSelf) {
		if r := k.becomes(c); r > 0 && r < utf8.RuneSelf {
			p.ascii[c] = byte(r)
		}
	}
	p.same = newRuneTable(func(r rune) bool { return r >= utf8.RuneSelf && r < plainLimit && k.becomes(r) == r })
	z := newNormalizing(k.p)
	for i, blank := range k.blanks {
		k.normalizeSteps(z, []byte{blank, 'a'}, 0, insideText)
		p.blanks[i] = append([]byte(nil), z.text[:len(z.text)-1]...)
	}
	return p
}

// becomes returns the character that r, which is not a blank at the start of a chunk, becomes if
// its neighbours are characters for which becomes does not return a negative number. It returns a
// negative number if that depends on other neighbours, or if the result is not one character.
func (k *chunking) becomes(r rune) rune {
	original := r
	kinds := pinnedRust().kinds
	spaces := false // steps depend on white space that is not at the start of a chunk
	for _, n := range k.p.normalizers {
		switch n := n.(type) {
		case normalForm:
			// The characters of class 0 do not change and do not combine with others.
			if pinnedNormalForms().check[n.form].at(r) != 0 {
				return -1
			}
		case lowercase:
			if kinds.at(r)&hasLower != 0 {
				return -1
			}
			if r-'A' < 26 && r >= 'A' {
				r += 'a' - 'A'
			}
		case replaceRunes:
			r = n(r)
		case spaceChinese:
			if kinds.at(r)&bertChinese != 0 {
				return -1
			}
		case *charsmap:
			_, known := n.get(utf8.AppendRune(nil, r))
			if known || r == '\r' || n.data.at(r) != 0 || hangulKindOf(r) != noHangul {
				return -1
			}
		case strip:
			spaces = true
		case replace:
			first, size := rune(' '), 1
			if n.regex == nil {
				first, size = utf8.DecodeRune(n.literal)
			} else {
				spaces = true
			}
			if r == first && n.regex == nil {
				content, all := utf8.DecodeRune(n.content)
				if len(n.literal) != size || len(n.content) != all || all == 0 {
					return -1
				}
				r = content
			}
		}
		if r < 0 {
			return -1
		}
	}
	if spaces && (kinds.at(original)|kinds.at(r))&whiteSpace != 0 {
		return -1
	}
	return r
}

// normalize normalizes a chunk inside a text. It returns false if a character is not plain.
func (p *plainRunes) normalize(z *normalizing, s []byte, blanks [2]byte) bool {
	if len(s) < 2 {
		return false // Strip treats a single blank in another way
	}
	out := z.next()
	switch s[0] {
	case blanks[0]:
		out = append(out, p.blanks[0]...)
	case blanks[1]:
		out = append(out, p.blanks[1]...)
	default:
		return false
	}
	for i := 1; i < len(s); {
		c := s[i]
		if c < utf8.RuneSelf {
			if c = p.ascii[c]; c == 0 {
				return false
			}
			out = append(out, c)
			i++
			continue
		}
		r, n := decodeMany(s[i:])
		if !p.same.at(r) {
			return false
		}
		out = append(out, s[i:i+n]...)
		i += n
	}
	z.set(out, 0)
	return true
}

// decodeMany is utf8.DecodeRune for valid UTF-8 that starts with a character from U+0080 on.
func decodeMany(s []byte) (r rune, n int) {
	switch c := s[0]; {
	case c < 0xe0:
		return rune(c&0x1f)<<6 | rune(s[1]&0x3f), 2
	case c < 0xf0:
		return rune(c&0xf)<<12 | rune(s[1]&0x3f)<<6 | rune(s[2]&0x3f), 3
	}
	return rune(s[0]&7)<<18 | rune(s[1]&0x3f)<<12 | rune(s[2]&0x3f)<<6 | rune(s[3]&0x3f), 4
}
