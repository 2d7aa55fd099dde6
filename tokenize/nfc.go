package tokenize

import (
	_ "embed"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"
)

// Canonical composition (NFC) after Unicode Standard Annex 15, with the data of Unicode 9 that Hugging Face tokenizers
// is built with, and without a limit on runs of marks. golang.org/x/text has later data, which moves, and breaks long runs.

// nfcTSV holds combining classes, decompositions and composing pairs; tables/probe.py writes it.
//
//go:embed tables/nfc.tsv
var nfcTSV string

// Hangul syllables are composed by arithmetic: section 3.12 of the Unicode Standard.
const (
	hangulL, hangulLs = 0x1100, 19
	hangulV, hangulVs = 0x1161, 21
	hangulT, hangulTs = 0x11a7, 28 // T counts "no final consonant"
	hangulS, hangulSs = 0xac00, hangulLs * hangulVs * hangulTs
)

// unsettled marks characters in the quick check that the text around them has to be normalized for. The others have their
// combining class there: with 0 a character starts anew, which is to say that it neither changes, nor moves, nor joins the
// one before it; from 1 on it is a mark that only has to stand in order.
const unsettled = 255

// nfcData is the parsed table. The checks are pages of 256 code points, equal pages stored once.
type nfcData struct {
	page  [(utf8.MaxRune + 1) >> 8]uint16
	check []uint8
	class map[rune]uint8
	split map[rune][]rune
	join  map[[2]rune]rune
}

var pinnedNFC = sync.OnceValue(func() *nfcData {
	d, err := parseNFC(nfcTSV)
	if err != nil {
		panic("tokenize: tables/nfc.tsv: " + err.Error()) // embedded: only a broken build gets here
	}
	return d
})

func parseNFC(table string) (*nfcData, error) {
	d := &nfcData{class: map[rune]uint8{}, split: map[rune][]rune{}, join: map[[2]rune]rune{}}
	for line := range strings.Lines(table) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		f := strings.Fields(line)
		if len(f) < 3 {
			return nil, fmt.Errorf("%q: too few fields", line)
		}
		var points []rune
		for i, s := range f[1:] {
			base := 16
			if f[0] == "class" && i == 2 {
				base = 10
			}
			v, err := strconv.ParseUint(s, base, 32)
			if err != nil || v > utf8.MaxRune {
				return nil, fmt.Errorf("%q: %q is no code point", line, s)
			}
			points = append(points, rune(v))
		}
		switch {
		case f[0] == "class" && len(points) == 3 && points[0] <= points[1] && 0 < points[2] && points[2] < unsettled:
			for r := points[0]; r <= points[1]; r++ {
				d.class[r] = uint8(points[2])
			}
		case f[0] == "decomposition":
			d.split[points[0]] = points[1:]
		case f[0] == "pair" && len(points) == 3:
			d.join[[2]rune{points[0], points[1]}] = points[2]
		default:
			return nil, fmt.Errorf("%q: not a class, a decomposition or a pair", line)
		}
	}
	d.fillChecks()
	return d, nil
}

func (d *nfcData) fillChecks() {
	flat := make([]uint8, utf8.MaxRune+1)
	for r, k := range d.class {
		flat[r] = k
	}
	composite := map[rune]bool{}
	for pair, r := range d.join {
		composite[r] = true
		flat[pair[1]] = unsettled // may join what stands before it
	}
	for r := range d.split {
		if !composite[r] {
			flat[r] = unsettled // never stays as it is
		}
	}
	for i := range rune(hangulVs) {
		flat[hangulV+i] = unsettled
	}
	for i := range rune(hangulTs - 1) {
		flat[hangulT+1+i] = unsettled
	}
	stored := map[[256]uint8]uint16{}
	for p := range d.page {
		page := [256]uint8(flat[p<<8:])
		k, ok := stored[page]
		if !ok {
			k = uint16(len(d.check) >> 8)
			stored[page] = k
			d.check = append(d.check, page[:]...)
		}
		d.page[p] = k
	}
}

// normalizer does the work for one goroutine: it owns the scratch.
type normalizer struct {
	data  *nfcData
	out   []byte
	runes []rune
	order []rune
}

func newNormalizer() *normalizer { return &normalizer{data: pinnedNFC()} }

// nfc returns the normal form of s, which is valid UTF-8: s itself when it is normal, else bytes that the next call overwrites.
func (z *normalizer) nfc(s []byte) []byte {
	at := z.data.settled(s)
	if at == len(s) {
		return s
	}
	z.out = z.out[:0]
	for {
		// s[:at] ends with a character that starts anew (or is empty): what comes before it is done.
		start := at
		for start > 0 {
			r, n := utf8.DecodeLastRune(s[:start])
			start -= n
			if z.data.checkOf(r) == 0 {
				break
			}
		}
		end := at
		for end < len(s) {
			r, n := utf8.DecodeRune(s[end:])
			if end > at && z.data.checkOf(r) == 0 {
				break
			}
			end += n
		}
		z.out = append(z.out, s[:start]...)
		z.compose(s[start:end])
		s = s[end:]
		if at = z.data.settled(s); at == len(s) {
			z.out = append(z.out, s...)
			return z.out
		}
	}
}

func (d *nfcData) checkOf(r rune) uint8 { return d.check[int(d.page[r>>8])<<8|int(r&0xff)] }

// settled returns the length of a prefix of s that is known to be normal, whatever follows the last character in it
// that starts anew. It is len(s) if all of s is.
func (d *nfcData) settled(s []byte) int {
	last := uint8(0)
	for i := 0; i < len(s); {
		if s[i] < 0xcc { // U+0300 is the first character that is not plainly normal
			// One byte of ASCII or the first of two: a second byte is below 0xc0 and passes here too.
			last = 0
			i++
			continue
		}
		r, n := utf8.DecodeRune(s[i:])
		k := d.checkOf(r)
		if k != 0 && (k == unsettled || k < last) {
			return i
		}
		last = k
		i += n
	}
	return len(s)
}

// compose appends the normal form of s to z.out.
func (z *normalizer) compose(s []byte) {
	d := z.data
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
		} else if parts, ok := d.split[r]; ok {
			rs = append(rs, parts...)
		} else {
			rs = append(rs, r)
		}
	}
	z.runes = rs
	for i := 0; i < len(rs); {
		if d.class[rs[i]] == 0 {
			i++
			continue
		}
		j := i + 1
		for j < len(rs) && d.class[rs[j]] != 0 {
			j++
		}
		z.sortMarks(rs[i:j])
		i = j
	}

	// starter is the index of the last character of class 0; last the class of what was kept after it, -1 if nothing was.
	n, starter, last := 0, -1, -1
	for _, r := range rs {
		k := int(d.class[r])
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
	for _, r := range rs[:n] {
		z.out = utf8.AppendRune(z.out, r)
	}
}

// sortMarks puts a run of marks into the order of their classes; equals keep theirs. Long runs are counted, so that
// text made of marks takes time in proportion to its length.
func (z *normalizer) sortMarks(marks []rune) {
	d := z.data
	if len(marks) <= 32 {
		for i := 1; i < len(marks); i++ {
			r, k := marks[i], d.class[marks[i]]
			j := i
			for ; j > 0 && d.class[marks[j-1]] > k; j-- {
				marks[j] = marks[j-1]
			}
			marks[j] = r
		}
		return
	}
	var place [256]int
	for _, r := range marks {
		place[d.class[r]]++
	}
	sum := 0
	for k, n := range place {
		place[k] = sum
		sum += n
	}
	z.order = append(z.order[:0], marks...)
	for _, r := range z.order {
		k := d.class[r]
		marks[place[k]] = r
		place[k]++
	}
}

// pair returns the character that a and b compose to.
func (d *nfcData) pair(a, b rune) (rune, bool) {
	if a >= hangulL && a < hangulL+hangulLs && b >= hangulV && b < hangulV+hangulVs {
		return hangulS + ((a-hangulL)*hangulVs+b-hangulV)*hangulTs, true
	}
	if a >= hangulS && a < hangulS+hangulSs && (a-hangulS)%hangulTs == 0 && b > hangulT && b < hangulT+hangulTs {
		return a + b - hangulT, true
	}
	r, ok := d.join[[2]rune{a, b}]
	return r, ok
}
