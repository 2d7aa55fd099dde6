package tokenize

import (
	_ "embed"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"
)

// tablesVersion names the data in tables/: the release of Hugging Face tokenizers that it was probed from.
const tablesVersion = "tokenizers-0.23.3"

// ClassTable names the pinned Unicode tables (character classes and canonical composition) that tokenization rests on.
// Ids made with equal tokenizer files and equal tables are equal. The tables are in the package: no Go release moves them.
func ClassTable() string { return tablesVersion }

// classesTSV holds the ranges of letters (\p{L}), numbers (\p{N}) and white space (\s); tables/probe.py writes it.
//
//go:embed tables/classes.tsv
var classesTSV string

// class is what the split patterns tell characters apart by.
type class uint8

const (
	other class = iota
	letter
	number
	space
)

// classTable gives the class of every code point: pages of 256, equal pages stored once.
type classTable struct {
	ascii [256]class // the upper half is never asked for; 256 entries spare the bounds check
	page  [(utf8.MaxRune + 1) >> 8]uint16
	data  []class
}

var pinnedClasses = sync.OnceValue(func() *classTable {
	flat, err := parseClasses(classesTSV)
	if err != nil {
		panic("tokenize: tables/classes.tsv: " + err.Error()) // embedded: only a broken build gets here
	}
	return newClassTable(func(r rune) class { return flat[r] })
})

// parseClasses reads lines of first code point, last code point (both hexadecimal) and class.
func parseClasses(table string) ([]class, error) {
	flat := make([]class, utf8.MaxRune+1)
	for line := range strings.Lines(table) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		f := strings.Fields(line)
		if len(f) != 3 {
			return nil, fmt.Errorf("%q: want three fields", line)
		}
		first, err1 := strconv.ParseUint(f[0], 16, 32)
		last, err2 := strconv.ParseUint(f[1], 16, 32)
		k, err3 := strconv.ParseUint(f[2], 10, 8)
		if err1 != nil || err2 != nil || err3 != nil || first > last || last > utf8.MaxRune || k < uint64(letter) || k > uint64(space) {
			return nil, fmt.Errorf("%q: not a range of code points with a class", line)
		}
		for r := first; r <= last; r++ {
			flat[r] = class(k)
		}
	}
	return flat, nil
}

func newClassTable(of func(rune) class) *classTable {
	t := &classTable{}
	stored := map[[256]class]uint16{}
	for p := range t.page {
		var page [256]class
		for i := range page {
			page[i] = of(rune(p<<8 | i))
		}
		k, ok := stored[page]
		if !ok {
			k = uint16(len(t.data) >> 8)
			stored[page] = k
			t.data = append(t.data, page[:]...)
		}
		t.page[p] = k
	}
	copy(t.ascii[:utf8.RuneSelf], t.data)
	return t
}

// of returns the class of the first character of s, which is not empty, and its length in bytes.
func (t *classTable) of(s []byte) (class, int) {
	if s[0] < utf8.RuneSelf {
		return t.ascii[s[0]], 1
	}
	r, n := utf8.DecodeRune(s)
	return t.data[int(t.page[r>>8])<<8|int(r&0xff)], n
}

// run returns where the run of characters of class k that goes on at s[i:] ends.
func (t *classTable) run(s []byte, i int, k class) int {
	for i < len(s) {
		if c := s[i]; c < utf8.RuneSelf {
			if t.ascii[c] != k {
				return i
			}
			i++
			continue
		}
		kk, n := t.of(s[i:])
		if kk != k {
			return i
		}
		i += n
	}
	return i
}
