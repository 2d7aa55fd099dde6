package tokenize

import (
	_ "embed"
	"encoding/binary"
	"fmt"
	"strings"
	"sync"
	"unicode/utf8"
)

// Normal forms according to Unicode Standard Annex 15, with the data of Unicode 9 that Hugging Face
// tokenizers uses, and without a limit on runs of marks. golang.org/x/text has later data, which
// changes between releases, and splits long runs.

// normalFormsTSV holds combining classes, decompositions and composing pairs; tables/probe.py
// writes it.
//
//go:embed tables/normalforms.tsv
var normalFormsTSV string

// form is one of the four normal forms; formNames are the names in tokenizer.json.
type form uint8

const (
	nfc form = iota
	nfd
	nfkc
	nfkd
	formCount
)

var formNames = [formCount]string{"NFC", "NFD", "NFKC", "NFKD"}

func (f form) composes() bool   { return f == nfc || f == nfkc }
func (f form) compatible() bool { return f == nfkc || f == nfkd }

// Hangul syllables are composed by arithmetic: section 3.12 of the Unicode Standard.
const (
	hangulL, hangulLs = 0x1100, 19
	hangulV, hangulVs = 0x1161, 21
	hangulT, hangulTs = 0x11a7, 28 // T counts "no final consonant"
	hangulS, hangulSs = 0xac00, hangulLs * hangulVs * hangulTs
)

// The quick check of a normal form returns 0 for a character that is a boundary: it is unchanged
// and not reordered, and does not compose with the previous character. Marks that only need to be
// in order return their combining class. The other values are:
const (
	// unchanged unless it composes with the previous characters; its class is in normalData.class
	joins     = 254
	unsettled = 255 // the surrounding text must be normalized
)

// normalData is the parsed table.
type normalData struct {
	class *runeTable[uint8]
	check [formCount]*runeTable[uint8]
	// canonical and compatibility decompositions: indices of parts, or 0
	split [2]*runeTable[uint16]
	parts [][]rune
	join  map[uint64]rune // composites by their halves, as pairKey gives them
}

func pairKey(a, b rune) uint64 { return uint64(a)<<32 | uint64(b) }

var pinnedNormalForms = sync.OnceValue(func() *normalData {
	d, err := parseNormalForms(normalFormsTSV)
	if err != nil {
		panic("tokenize: tables/normalforms.tsv: " + err.Error()) // embedded: only a broken build gets here
	}
	return d
})

func parseNormalForms(table string) (*normalData, error) {
	d := &normalData{parts: [][]rune{nil}, join: map[uint64]rune{}}
	// By code point.
	class := make([]uint8, utf8.MaxRune+1)
	splits := [2][]uint16{make([]uint16, utf8.MaxRune+1), make([]uint16, utf8.MaxRune+1)}
	composite, second := make([]bool, utf8.MaxRune+1), make([]bool, utf8.MaxRune+1)
	for line := range strings.Lines(table) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		f := strings.Fields(line)
		if len(f) < 3 {
			return nil, fmt.Errorf("%q: too few fields", line)
		}
		var points []rune
		for _, s := range f[1:] {
			r, err := parsePoint(s)
			if err != nil {
				return nil, fmt.Errorf("%q: %q is not a code point", line, s)
			}
			points = append(points, r)
		}
		switch {
		case f[0] == "class" && len(points) == 3 && points[0] <= points[1] && 0 < points[2] && points[2] < joins:
			for r := points[0]; r <= points[1]; r++ {
				class[r] = uint8(points[2])
			}
		case f[0] == "decomposition":
			splits[0][points[0]] = uint16(len(d.parts))
			if splits[1][points[0]] == 0 {
				splits[1][points[0]] = uint16(len(d.parts))
			}
			d.parts = append(d.parts, points[1:])
		case f[0] == "compatible":
			splits[1][points[0]] = uint16(len(d.parts))
			d.parts = append(d.parts, points[1:])
		case f[0] == "pair" && len(points) == 3:
			d.join[pairKey(points[0], points[1])] = points[2]
		default:
			return nil, fmt.Errorf("%q: not a class, a decomposition or a pair", line)
		}
	}
	d.class = newRuneTable(func(r rune) uint8 { return class[r] })
	for i := range d.split {
		d.split[i] = newRuneTable(func(r rune) uint16 { return splits[i][r] })
	}
	for pair, r := range d.join {
		composite[r] = true
		second[rune(uint32(pair))] = true
	}
	for r := rune(hangulV); r < hangulV+hangulVs; r++ {
		second[r] = true
	}
	for r := rune(hangulT + 1); r < hangulT+hangulTs; r++ {
		second[r] = true
	}
	for f := range formCount {
		d.check[f] = newRuneTable(func(r rune) uint8 {
			split := splits[0][r]
			if f.compatible() {
				split = splits[1][r]
			}
			hangul := hangulS <= r && r < hangulS+hangulSs
			switch {
			case !f.composes() && (split != 0 || hangul):
				return unsettled
			case f.composes() && split != 0 && (split != splits[0][r] || !composite[r]):
				return unsettled // never unchanged
			case f.composes() && second[r]:
				return joins
			}
			return class[r]
		})
	}
	return d, nil
}

// normalizer is the state of one goroutine: it owns the scratch memory.
type normalizer struct {
	data  *normalData
	out   []byte
	runes []rune
	order []rune
}

func newNormalizer() *normalizer { return &normalizer{data: pinnedNormalForms()} }

// normalize returns the normal form f of s, which is valid UTF-8: s itself if it is normal,
// otherwise bytes that the next call overwrites.
func (z *normalizer) normalize(f form, s []byte) []byte {
	at := z.data.settled(f, s)
	if at == len(s) {
		return s
	}
	check := z.data.check[f]
	z.out = z.out[:0]
	for {
		// s[:at] ends with a boundary character (or is empty), and possibly others: the text before
		// it is done.
		start := at
		for start > 0 {
			r, n := utf8.DecodeLastRune(s[:start])
			start -= n
			if check.at(r) == 0 {
				break
			}
		}
		end := at
		for end < len(s) {
			r, n := utf8.DecodeRune(s[end:])
			if end > at && check.at(r) == 0 {
				break
			}
			end += n
		}
		z.out = append(z.out, s[:start]...)
		z.rewrite(f, s[start:end])
		s = s[end:]
		if at = z.data.settled(f, s); at == len(s) {
			z.out = append(z.out, s...)
			return z.out
		}
	}
}

// settled returns the length of a prefix of s that is known to be normal, whatever follows its last
// boundary character. It is len(s) if s is normal.
func (d *normalData) settled(f form, s []byte) int {
	check := d.check[f]
	last := uint8(0) // combining class of the character before
	for i := 0; i < len(s); {
		c := s[i]
		if c < utf8.RuneSelf {
			last = 0
			i++
			for i+8 <= len(s) && binary.LittleEndian.Uint64(s[i:])&highBits == 0 {
				i += 8
			}
			continue
		}
		page, n := uint16(0), 2
		switch {
		case c < 0xe0:
			page = check.page[c&0x1f]
		case c < 0xf0:
			page, n = check.page[int(c&0xf)<<6|int(s[i+1]&0x3f)], 3
		default:
			page, n = check.page[int(c&7)<<12|int(s[i+1]&0x3f)<<6|int(s[i+2]&0x3f)], 4
		}
		if page == 0 { // the page of U+0000, which has only boundaries
			last = 0
			i += n
			continue
		}
		k := check.data[int(page)<<6|int(s[i+n-1]&0x3f)]
		if k == joins {
			r, _ := utf8.DecodeRune(s[i:])
			if i > 0 {
				before, _ := utf8.DecodeLastRune(s[:i])
				// A composite may absorb the mark between its parts.
				if _, ok := d.pair(before, r); ok || last != 0 || d.split[0].at(before) != 0 {
					return i
				}
			}
			k = d.class.at(r)
		}
		if k != 0 && (k == unsettled || k < last) {
			return i
		}
		last = k
		i += n
	}
	return len(s)
}

// rewrite appends the normal form of s to z.out.
func (z *normalizer) rewrite(f form, s []byte) {
	d := z.data
	split := d.split[0]
	if f.compatible() {
		split = d.split[1]
	}
	rs := z.runes[:0]
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRune(s[i:])
		i += n
		if r >= hangulS && r < hangulS+hangulSs {
			v := r - hangulS
			rs = append(rs, hangulL+v/(hangulVs*hangulTs), hangulV+v%(hangulVs*hangulTs)/hangulTs)
			if t := v % hangulTs; t != 0 {
				rs = append(rs, hangulT+t)
			}
		} else if k := split.at(r); k != 0 {
			rs = append(rs, d.parts[k]...)
		} else {
			rs = append(rs, r)
		}
	}
	z.runes = rs
	for i := 0; i < len(rs); {
		if d.class.at(rs[i]) == 0 {
			i++
			continue
		}
		j := i + 1
		for j < len(rs) && d.class.at(rs[j]) != 0 {
			j++
		}
		z.sortMarks(rs[i:j])
		i = j
	}
	if f.composes() {
		rs = d.compose(rs)
	}
	for _, r := range rs {
		z.out = utf8.AppendRune(z.out, r)
	}
}

// compose composes characters in place.
func (d *normalData) compose(rs []rune) []rune {
	// starter is the index of the last character of class 0. last is the class of the last
	// character kept after it, or -1.
	n, starter, last := 0, -1, -1
	for _, r := range rs {
		k := int(d.class.at(r))
		if starter >= 0 && last < k {
			if c, ok := d.pair(rs[starter], r); ok {
				rs[starter] = c
				continue
			}
		}
		if k == 0 {
			starter, last = n, -1
		} else {
			last = k
		}
		rs[n] = r
		n++
	}
	return rs[:n]
}

// sortMarks sorts a run of marks stably by class. Long runs use a counting sort, so that text made
// of marks takes linear time.
func (z *normalizer) sortMarks(marks []rune) {
	d := z.data
	if len(marks) <= 32 {
		for i := 1; i < len(marks); i++ {
			r, k := marks[i], d.class.at(marks[i])
			j := i
			for ; j > 0 && d.class.at(marks[j-1]) > k; j-- {
				marks[j] = marks[j-1]
			}
			marks[j] = r
		}
		return
	}
	var place [256]int
	for _, r := range marks {
		place[d.class.at(r)]++
	}
	sum := 0
	for k, n := range place {
		place[k] = sum
		sum += n
	}
	z.order = append(z.order[:0], marks...)
	for _, r := range z.order {
		k := d.class.at(r)
		marks[place[k]] = r
		place[k]++
	}
}

// pair returns the character that a and b compose to.
func (d *normalData) pair(a, b rune) (rune, bool) {
	if a >= hangulL && a < hangulL+hangulLs && b >= hangulV && b < hangulV+hangulVs {
		return hangulS + ((a-hangulL)*hangulVs+b-hangulV)*hangulTs, true
	}
	if a >= hangulS && a < hangulS+hangulSs && (a-hangulS)%hangulTs == 0 && b > hangulT && b < hangulT+hangulTs {
		return a + b - hangulT, true
	}
	r, ok := d.join[pairKey(a, b)]
	return r, ok
}
