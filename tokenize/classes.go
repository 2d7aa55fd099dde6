package tokenize

import (
	_ "embed"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"
)

// tablesVersion names the data in tables/: the release of Hugging Face tokenizers that was probed.
const tablesVersion = "tokenizers-0.23.3"

// ClassTable names the pinned Unicode tables (character classes, letter cases, normal forms) that
// tokenization uses. Equal tokenizer files and equal tables produce equal ids. The tables are in
// the package, so a Go release cannot change them.
func ClassTable() string { return tablesVersion }

// A runeTable maps each code point to a small value. It has pages of 64, the range of the last byte
// of UTF-8, and stores equal pages once.
type runeTable[T comparable] struct {
	page [(utf8.MaxRune + 1) >> 6]uint16
	data []T
}

func newRuneTable[T comparable](of func(rune) T) *runeTable[T] {
	t := &runeTable[T]{}
	stored := map[[64]T]uint16{}
	for p := range t.page {
		var page [64]T
		for i := range page {
			page[i] = of(rune(p<<6 | i))
		}
		k, ok := stored[page]
		if !ok {
			k = uint16(len(t.data) >> 6)
			stored[page] = k
			t.data = append(t.data, page[:]...)
		}
		t.page[p] = k
	}
	return t
}

// at returns the value of r, a code point.
func (t *runeTable[T]) at(r rune) T { return t.data[int(t.page[r>>6])<<6|int(r&0x3f)] }

// A runeRange is the code points from lo to hi, both included.
type runeRange struct{ lo, hi rune }

// A runeSet is ranges in ascending order that do not touch.
type runeSet []runeRange

func (s runeSet) has(r rune) bool {
	_, ok := slices.BinarySearchFunc(s, r, func(x runeRange, r rune) int {
		switch {
		case x.hi < r:
			return -1
		case x.lo > r:
			return 1
		}
		return 0
	})
	return ok
}

// normalized sorts ranges and joins ranges that touch.
func (s runeSet) normalized() runeSet {
	slices.SortFunc(s, func(a, b runeRange) int { return int(a.lo) - int(b.lo) })
	out := s[:0]
	for _, x := range s {
		if n := len(out); n > 0 && x.lo <= out[n-1].hi+1 {
			out[n-1].hi = max(out[n-1].hi, x.hi)
		} else {
			out = append(out, x)
		}
	}
	return out
}

// complement returns all other code points.
func (s runeSet) complement() runeSet {
	var out runeSet
	next := rune(0)
	for _, x := range s {
		if x.lo > next {
			out = append(out, runeRange{next, x.lo - 1})
		}
		next = x.hi + 1
	}
	if next <= utf8.MaxRune {
		out = append(out, runeRange{next, utf8.MaxRune})
	}
	return out
}

// intersect returns the code points that are in both sets.
func (s runeSet) intersect(o runeSet) runeSet {
	var out runeSet
	for i, j := 0, 0; i < len(s) && j < len(o); {
		if lo, hi := max(s[i].lo, o[j].lo), min(s[i].hi, o[j].hi); lo <= hi {
			out = append(out, runeRange{lo, hi})
		}
		if s[i].hi < o[j].hi {
			i++
		} else {
			j++
		}
	}
	return out
}

// tableLine is a line of a table: a name and its code points.
type tableLine struct {
	name   string
	ranges runeSet // the first field, as ranges
	points []rune  // the fields after it, one code point each
}

// parseTable reads a table whose lines are a name, a tab, code points or ranges separated by
// spaces, and perhaps another tab and more code points, all hexadecimal.
func parseTable(table string) ([]tableLine, error) {
	var out []tableLine
	for line := range strings.Lines(table) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		name, rest, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "\t")
		if !ok || name == "" {
			return nil, fmt.Errorf("%q: want a name, a tab and code points", line)
		}
		first, second, _ := strings.Cut(rest, "\t")
		l := tableLine{name: name}
		for f := range strings.FieldsSeq(first) {
			lo, hi, isRange := strings.Cut(f, "-")
			if !isRange {
				hi = lo
			}
			a, err1 := parsePoint(lo)
			b, err2 := parsePoint(hi)
			if err1 != nil || err2 != nil || a > b {
				return nil, fmt.Errorf("%q: %q is neither a code point nor a range", line, f)
			}
			l.ranges = append(l.ranges, runeRange{a, b})
		}
		for f := range strings.FieldsSeq(second) {
			r, err := parsePoint(f)
			if err != nil {
				return nil, fmt.Errorf("%q: %q is not a code point", line, f)
			}
			l.points = append(l.points, r)
		}
		if l.ranges == nil {
			return nil, fmt.Errorf("%q: no code points", line)
		}
		out = append(out, l)
	}
	return out, nil
}

func parsePoint(s string) (rune, error) {
	v, err := strconv.ParseUint(s, 16, 32)
	if err == nil && v > utf8.MaxRune {
		err = strconv.ErrRange
	}
	return rune(v), err
}

//go:generate python3 tables/probe.py

// onigurumaTSV has the character classes of Oniguruma, the regular expression library behind Split;
// tables/probe.py writes it.
//
//go:embed tables/oniguruma.tsv
var onigurumaTSV string

// onigurumaData is the parsed table.
type onigurumaData struct {
	// by name as propertyName gives it: categories, their groups, other properties, scripts
	properties map[string]runeSet
	// characters that match case-insensitively, including itself; absent if there is no other
	folds  map[rune][]rune
	many   map[rune][]rune // several characters that match one case-insensitively
	folded []rune          // the keys of folds, ascending
}

var pinnedOniguruma = sync.OnceValue(func() *onigurumaData {
	d, err := parseOniguruma(onigurumaTSV)
	if err != nil {
		panic("tokenize: tables/oniguruma.tsv: " + err.Error()) // embedded: only a broken build gets here
	}
	return d
})

// Names of general categories. A class is an index of the list.
var categoryNames = [...]string{
	"Cn", "Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po",
	"Sm", "Sc", "Sk", "So",
	"Zs", "Zl", "Zp", "Cc", "Cf", "Co",
}

// propertyAliases are other names of properties, which tables/probe.py compares.
var propertyAliases = map[string]string{
	"Letter": "L", "Mark": "M", "Number": "N", "Punctuation": "P", "Symbol": "S", "Separator": "Z",
	"Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Titlecase_Letter": "Lt", "Modifier_Letter": "Lm",
	"Other_Letter":   "Lo",
	"Decimal_Number": "Nd", "Alpha": "Alphabetic", "Lower": "Lowercase", "Upper": "Uppercase", "Space": "White_Space",
	"Digit": "Nd", "Punct": "P", "Cntrl": "Cc",
}

var separators = strings.NewReplacer(" ", "", "-", "", "_", "")

// propertyName is a property's name as Oniguruma compares it: without regard to case, spaces, - and
// _.
func propertyName(s string) string { return strings.ToLower(separators.Replace(s)) }

func parseOniguruma(table string) (*onigurumaData, error) {
	lines, err := parseTable(table)
	if err != nil {
		return nil, err
	}
	d := &onigurumaData{properties: map[string]runeSet{}, folds: map[rune][]rune{}, many: map[rune][]rune{}}
	var assigned runeSet
	for _, l := range lines {
		switch l.name {
		case "fold":
			var alike []rune
			for _, x := range l.ranges {
				alike = append(alike, x.lo)
			}
			for _, r := range alike {
				d.folds[r] = alike
				d.folded = append(d.folded, r)
			}
		case "many":
			d.many[l.ranges[0].lo] = l.points
		default:
			if slices.Contains(categoryNames[1:], l.name) {
				group := propertyName(l.name[:1])
				d.properties[group] = append(d.properties[group], l.ranges...)
				assigned = append(assigned, l.ranges...)
			}
			name := propertyName(l.name)
			d.properties[name] = append(d.properties[name], l.ranges...)
		}
	}
	slices.Sort(d.folded)
	unassigned := assigned.normalized().complement()
	unassigned = unassigned.intersect(runeSet{{0xd800, 0xdfff}}.complement()) // text has no surrogates
	d.properties["cn"] = unassigned
	delete(d.properties, "c") // lacks the surrogates, and is not needed
	for name, set := range d.properties {
		d.properties[name] = set.normalized()
	}
	for alias, name := range propertyAliases {
		set, ok := d.properties[propertyName(name)]
		if !ok {
			return nil, fmt.Errorf("%s is missing", name)
		}
		d.properties[propertyName(alias)] = set
	}
	d.properties["any"] = runeSet{{0, utf8.MaxRune}}
	d.properties["ascii"] = runeSet{{0, utf8.RuneSelf - 1}}
	return d, nil
}

// class is the distinction that scanners make: the general category, and whether a control
// character is white space.
type class uint8

const (
	cn class = iota // as in categoryNames
	lu
	ll
	lt
	lm
	lo
	mn
	mc
	me
	nd
	nl
	no
	pc
	pd
	ps
	pe
	pi
	pf
	po
	sm
	sc
	sk
	so
	zs
	zl
	zp
	cc
	cf
	co
	spaceControl
)

// classes is a set of classes.
type classes uint32

const (
	letter      classes = 1<<lu | 1<<ll | 1<<lt | 1<<lm | 1<<lo
	mark        classes = 1<<mn | 1<<mc | 1<<me
	number      classes = 1<<nd | 1<<nl | 1<<no
	punctuation classes = 1<<pc | 1<<pd | 1<<ps | 1<<pe | 1<<pi | 1<<pf | 1<<po
	symbols     classes = 1<<sm | 1<<sc | 1<<sk | 1<<so
	space       classes = 1<<zs | 1<<zl | 1<<zp | 1<<spaceControl
	other               = ^(letter | number | space)
	upperLike           = letter&^(1<<ll) | mark // the first characters of a word in o200k
	lowerLike           = letter&^(1<<lu|1<<lt) | mark
)

func (k class) in(set classes) bool { return set>>(k&31)&1 != 0 }

// classTable gives the class of every code point.
type classTable struct {
	ascii  [256]class // the upper half is unused; 256 entries avoid the bounds check
	beyond *runeTable[class]
	kinds  *runeTable[uint8] // the bits below; 0 for letters
}

const (
	notLetter     = 1
	numberOrSpace = 2
)

var pinnedClasses = sync.OnceValue(func() *classTable {
	d := pinnedOniguruma()
	flat := make([]class, utf8.MaxRune+1)
	for k, name := range categoryNames {
		for _, x := range d.properties[propertyName(name)] {
			for r := x.lo; r <= x.hi; r++ {
				flat[r] = class(k)
			}
		}
	}
	for _, x := range d.properties["whitespace"] {
		for r := x.lo; r <= x.hi; r++ {
			if flat[r] == cc {
				flat[r] = spaceControl
			}
		}
	}
	return newClassTable(func(r rune) class { return flat[r] })
})

func newClassTable(of func(rune) class) *classTable {
	t := &classTable{beyond: newRuneTable(of)}
	t.kinds = newRuneTable(func(r rune) (kind uint8) {
		k := of(r)
		if !k.in(letter) {
			kind |= notLetter
		}
		if k.in(number | space) {
			kind |= numberOrSpace
		}
		return kind
	})
	for c := range rune(utf8.RuneSelf) {
		t.ascii[c] = of(c)
	}
	return t
}

// of returns the class of the first character of s, which is not empty, and the character's length
// in bytes.
func (t *classTable) of(s []byte) (class, int) {
	if s[0] < utf8.RuneSelf {
		return t.ascii[s[0]], 1
	}
	return t.ofMany(s)
}

// ofMany is of for a character of several bytes.
func (t *classTable) ofMany(s []byte) (class, int) {
	b := t.beyond
	switch c := s[0]; {
	case c < 0xe0:
		return b.data[int(b.page[c&0x1f])<<6|int(s[1]&0x3f)], 2
	case c < 0xf0:
		_ = s[2]
		return b.data[int(b.page[int(c&0xf)<<6|int(s[1]&0x3f)])<<6|int(s[2]&0x3f)], 3
	default:
		_ = s[3]
		return b.data[int(b.page[int(c&7)<<12|int(s[1]&0x3f)<<6|int(s[2]&0x3f)])<<6|int(s[3]&0x3f)], 4
	}
}

// run returns the end of the run of characters of the set at s[i:].
func (t *classTable) run(s []byte, i int, set classes) int {
	for i < len(s) {
		if c := s[i]; c < utf8.RuneSelf {
			if !t.ascii[c].in(set) {
				return i
			}
			i++
			continue
		}
		k, n := t.ofMany(s[i:])
		if !k.in(set) {
			return i
		}
		i += n
	}
	return i
}

// letters is run for the set letter.
func (t *classTable) letters(s []byte, i int) int {
	i = asciiLetters(s, i)
	for i < len(s) {
		if s[i] < utf8.RuneSelf {
			if !t.ascii[s[i]].in(letter) {
				return i
			}
			i = asciiLetters(s, i+1)
			continue
		}
		k, n := t.ofMany(s[i:])
		if !k.in(letter) {
			return i
		}
		i += n
	}
	return i
}
