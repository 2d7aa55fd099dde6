package tokenize

import (
	_ "embed"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"unicode/utf8"
)

// charsmap is the Precompiled normalizer: SentencePiece's map from texts to texts. Its file is a
// double-array trie (Aoe 1989, in the layout of the library darts-clone), followed by the texts
// that the trie's values refer to, each ended by a zero byte.
type charsmap struct {
	units []uint32
	texts []byte
	// ascii holds the replacement of each character below 0x80, so that ordinary text needs no
	// look-ups; nil: unchanged.
	ascii [utf8.RuneSelf][]byte
	known [utf8.RuneSelf]bool // the map has a text for the single character
	data  graphemeTable
}

// parseCharsmap reads precompiled_charsmap, decoded from base64.
func parseCharsmap(b []byte) (*charsmap, error) {
	if len(b) < 4 {
		return nil, errors.New("the map is too short")
	}
	size := int64(binary.LittleEndian.Uint32(b))
	b = b[4:]
	if size > int64(len(b)) {
		return nil, fmt.Errorf("the trie has %d bytes, but the file has %d", size, len(b))
	}
	m := &charsmap{texts: b[size/4*4:], data: pinnedGraphemes()}
	for i := range size / 4 {
		m.units = append(m.units, binary.LittleEndian.Uint32(b[4*i:]))
	}
	if len(m.units) == 0 {
		return nil, errors.New("the trie is empty")
	}
	if !utf8.Valid(m.texts) {
		return nil, errors.New("the texts are not valid UTF-8")
	}
	if err := m.check(); err != nil {
		return nil, err
	}
	for c := range m.ascii {
		m.ascii[c], m.known[c] = m.get([]byte{byte(c)})
	}
	return m, nil
}

// A unit of the trie: bits 0–7 are the byte that leads to it, bit 8 is set if it has a value, bits
// 10–30 are the offset (by exclusive or) of its children, shifted by 8 bits if bit 9 is set. A
// value is a unit with bit 31 set.

func (m *charsmap) children(unit uint32, at uint64) uint64 {
	return at ^ uint64(unit>>10)<<((unit&(1<<9))>>6)
}

// check ensures that no look-up leaves the texts: the library fails if one does. It checks the
// values, which are few. Steps are checked against the trie when they are taken.
func (m *charsmap) check() error {
	for i, unit := range m.units {
		if unit>>31 == 1 || unit>>8&1 == 0 {
			continue
		}
		at := m.children(unit, uint64(i))
		if at >= uint64(len(m.units)) {
			continue // not a unit of the trie, or unreachable
		}
		if value := m.units[at] & (1<<31 - 1); int64(value) > int64(len(m.texts)) || int(value) < len(m.texts) &&
			!utf8.RuneStart(m.texts[value]) {
			return fmt.Errorf("unit %d has a value that is outside the texts", i)
		}
	}
	return nil
}

// get returns the text for the shortest prefix of s in the map.
func (m *charsmap) get(s []byte) (text []byte, ok bool) {
	at := m.children(m.units[0], 0)
	for _, c := range s {
		if c == 0 {
			break
		}
		if at ^= uint64(c); at >= uint64(len(m.units)) {
			break
		}
		unit := m.units[at]
		if unit&(1<<31|0xff) != uint32(c) {
			break
		}
		at = m.children(unit, at)
		if unit>>8&1 == 1 && at < uint64(len(m.units)) {
			value := int(m.units[at] & (1<<31 - 1))
			end := value
			for end < len(m.texts) && m.texts[end] != 0 {
				end++
			}
			return m.texts[min(value, end):end], true
		}
	}
	return nil, false
}

// longCluster is the length in bytes from which a grapheme cluster is not looked up as a whole.
const longCluster = 6

func (m *charsmap) normalize(b *normalizing) {
	out := b.next()
	t := transformation{old: b.origin}
	for s := b.text; len(s) > 0; {
		if c := s[0]; c < utf8.RuneSelf && (len(s) == 1 || s[1] < utf8.RuneSelf) && c != '\r' {
			// The next character is ASCII and does not join: a cluster of one character.
			if m.known[c] {
				out = append(out, m.ascii[c]...)
				t.replace(s[:1], m.ascii[c])
			} else {
				out = append(out, c)
				t.keep(s[:1])
			}
			s = s[1:]
			continue
		}
		n := m.data.cluster(s)
		if n < longCluster {
			if text, ok := m.get(s[:n]); ok {
				out = append(out, text...)
				t.replace(s[:n], text)
				s = s[n:]
				continue
			}
		}
		for cluster := s[:n]; len(cluster) > 0; {
			_, size := utf8.DecodeRune(cluster)
			if text, ok := m.get(cluster[:size]); ok {
				out = append(out, text...)
				t.replace(cluster[:size], text)
			} else {
				out = append(out, cluster[:size]...)
				t.keep(cluster[:size])
			}
			cluster = cluster[size:]
		}
		s = s[n:]
	}
	b.set(out, t.finish())
}

// transformation tracks which bytes of the new text originate from the first old bytes of the text,
// according to the library. A replacement consumes as many characters of the old text as it has
// itself, and its last characters absorb the difference. If the replacement is empty, the library
// assigns missing characters to the previous character, and ignores them at the start of the text.
type transformation struct {
	old    int // bytes of the old text to track
	passed int // consumed bytes of the old text
	size   int // bytes of the new text that originate from them
	done   bool
}

func (t *transformation) keep(s []byte) { t.replace(s, s) }

func (t *transformation) replace(old, text []byte) {
	if t.passed >= t.old || t.done {
		t.done = true
		return
	}
	if len(text) == 0 && t.size == 0 {
		return // the next character replaces it
	}
	t.size += len(text)
	t.passed += len(old)
}

func (t *transformation) finish() int { return t.size }

// The properties that determine grapheme cluster boundaries: Unicode Standard Annex 29, in the
// version of the library.
const (
	graphemeControl uint8 = 1 << iota
	graphemeExtend
	graphemeSpacing // and U+200D: like extend, but not in emoji sequences
	graphemePrepend
	graphemePictographic
	graphemeConsonant
	graphemeLinker
	graphemeConjunct // may occur between a consonant and a linker
)

//go:generate python3 tables/graphemes.py

// graphemesTSV holds their ranges; tables/graphemes.py writes it.
//
//go:embed tables/graphemes.tsv
var graphemesTSV string

// graphemeTable maps every code point to its properties.
type graphemeTable struct{ *runeTable[uint8] }

var pinnedGraphemes = sync.OnceValue(func() graphemeTable {
	t, err := parseGraphemes(graphemesTSV)
	if err != nil {
		panic("tokenize: tables/graphemes.tsv: " + err.Error()) // embedded: only a broken build gets here
	}
	return t
})

func parseGraphemes(table string) (graphemeTable, error) {
	lines, err := parseTable(table)
	if err != nil {
		return graphemeTable{}, err
	}
	flat := make([]uint8, utf8.MaxRune+1)
	flat[0] = graphemeControl // the charsmap never looks it up
	for _, l := range lines {
		i := slices.Index([]string{"control", "extend", "spacing", "prepend", "pictographic", "consonant", "linker",
			"conjunct"}, l.name)
		if i < 0 {
			return graphemeTable{}, fmt.Errorf("%q is not a grapheme property", l.name)
		}
		for _, x := range l.ranges {
			for r := x.lo; r <= x.hi; r++ {
				flat[r] |= 1 << i
			}
		}
	}
	return graphemeTable{newRuneTable(func(r rune) uint8 { return flat[r] })}, nil
}

// hangulKind distinguishes the parts of Hangul syllables.
type hangulKind uint8

const (
	noHangul hangulKind = iota
	leading
	vowel
	trailing
	leadingVowel
	leadingVowelTrailing
)

func hangulKindOf(r rune) hangulKind {
	switch {
	case r < 0x1100:
	case r <= 0x115f, r >= 0xa960 && r <= 0xa97c:
		return leading
	case r <= 0x11a7, r >= 0xd7b0 && r <= 0xd7c6:
		return vowel
	case r <= 0x11ff, r >= 0xd7cb && r <= 0xd7fb:
		return trailing
	case r >= hangulS && r < hangulS+hangulSs:
		if (r-hangulS)%hangulTs == 0 {
			return leadingVowel
		}
		return leadingVowelTrailing
	}
	return noHangul
}

// cluster returns the length of the grapheme cluster at the start of s, which is not empty. Flags
// (pairs of regional indicators) are not joined: all their clusters are too long to matter.
func (t graphemeTable) cluster(s []byte) int {
	const zwj = '\u200d'
	last, n := utf8.DecodeRune(s)
	before, hangul := t.at(last), hangulKindOf(last)
	emoji := 0 // 1: a pictograph with extenders, 2: then U+200D
	if before&graphemePictographic != 0 {
		emoji = 1
	}
	conjunct := 0 // 1: a consonant and its possible successors, 2: with a linker among these
	if before&graphemeConsonant != 0 {
		conjunct = 1
	}
	for n < len(s) {
		r, size := utf8.DecodeRune(s[n:])
		after, next := t.at(r), hangulKindOf(r)
		switch {
		case last == '\r' && r == '\n':
		case (before|after)&graphemeControl != 0:
			return n
		case after&(graphemeExtend|graphemeSpacing) != 0, before&graphemePrepend != 0:
		case hangul == leading && (next == leading || next == vowel || next == leadingVowel ||
			next == leadingVowelTrailing):
		case (hangul == leadingVowel || hangul == vowel) && (next == vowel || next == trailing):
		case (hangul == leadingVowelTrailing || hangul == trailing) && next == trailing:
		case conjunct == 2 && after&graphemeConsonant != 0:
		case emoji == 2 && after&graphemePictographic != 0:
		default:
			return n
		}
		switch {
		case after&graphemePictographic != 0:
			emoji = 1
		case emoji == 1 && r == zwj:
			emoji = 2
		case emoji == 1 && after&graphemeExtend != 0:
		default:
			emoji = 0
		}
		switch {
		case after&graphemeConsonant != 0:
			conjunct = 1
		case conjunct > 0 && after&graphemeLinker != 0:
			conjunct = 2
		case conjunct > 0 && after&graphemeConjunct != 0:
		default:
			conjunct = 0
		}
		last, before, hangul = r, after, next
		n += size
	}
	return n
}
