package tokenize

import (
	_ "embed"
	"fmt"
	"sync"
	"unicode/utf8"
)

// Characters as the normalizers and pre-tokenizers of Hugging Face tokenizers see them that do not
// use Oniguruma: as Rust's standard library and the crates behind them do, each with its own
// release of Unicode. tables/probe.py asked the library for each. What Oniguruma sees is in
// classes.go.

// rustTSV holds the sets of code points, lower cases and scripts; tables/probe.py writes it.
//
//go:embed tables/rust.tsv
var rustTSV string

// The kinds of characters, as bits.
const (
	// char::is_whitespace: of WhitespaceSplit, Whitespace, BertPreTokenizer, Strip, and of added
	// tokens that take it along
	whiteSpace uint16 = 1 << iota
	// \w of Rust's regex crate: in the Whitespace pre-tokenizer, and beside added tokens with
	// single_word
	wordCharacter
	numeric // char::is_numeric, what the Digits pre-tokenizer cuts at
	// what the Punctuation and BertPreTokenizer pre-tokenizers cut at: that of Unicode 9 or so, and
	// all of ASCII's
	punctuationMark
	bertControl    // what BertNormalizer's clean_text removes
	bertSpace      // what BertNormalizer's clean_text replaces by U+0020
	bertChinese    // what BertNormalizer's handle_chinese_chars puts spaces around
	combiningMark  // what StripAccents removes: marks of all three categories
	nonspacingMark // what BertNormalizer's strip_accents removes after NFD
	hasLower       // rustData.lower has it
)

var kindNames = map[string]uint16{
	"white_space": whiteSpace, "word": wordCharacter, "numeric": numeric, "punctuation": punctuationMark,
	"bert_control": bertControl,
	"bert_space":   bertSpace, "bert_chinese": bertChinese, "mark": combiningMark, "bert_mark": nonspacingMark,
}

// rustData is the parsed table.
type rustData struct {
	kinds   *runeTable[uint16]
	scripts *runeTable[script]
	lower   map[rune]string
}

var pinnedRust = sync.OnceValue(func() *rustData {
	d, err := parseRust(rustTSV)
	if err != nil {
		panic("tokenize: tables/rust.tsv: " + err.Error()) // embedded: only a broken build gets here
	}
	return d
})

func parseRust(table string) (*rustData, error) {
	lines, err := parseTable(table)
	if err != nil {
		return nil, err
	}
	kinds, scripts := make([]uint16, utf8.MaxRune+1), make([]script, utf8.MaxRune+1)
	d := &rustData{lower: map[rune]string{}}
	for _, l := range lines {
		if l.name == "lower" {
			d.lower[l.ranges[0].lo] = string(l.points)
			kinds[l.ranges[0].lo] |= hasLower
			continue
		}
		kind := kindNames[l.name]
		var number script
		if kind == 0 {
			if _, err := fmt.Sscanf(l.name, "script%d", &number); err != nil {
				return nil, fmt.Errorf("unknown kind of characters %q", l.name)
			}
		}
		for _, x := range l.ranges {
			for r := x.lo; r <= x.hi; r++ {
				kinds[r] |= kind
				scripts[r] |= number
			}
		}
	}
	d.kinds = newRuneTable(func(r rune) uint16 { return kinds[r] })
	d.scripts = newRuneTable(func(r rune) script { return scripts[r] })
	return d, nil
}

// is gives the function that tells whether a character is of a kind.
func (d *rustData) is(kind uint16) func(r rune) bool {
	return func(r rune) bool { return d.kinds.at(r)&kind != 0 }
}

// appendLower appends the lower case of s to dst, as the normalizers Lowercase and BertNormalizer
// give it: each character by itself, so that a sigma at the end of a word is like any other. s is
// valid UTF-8.
func appendLower(dst, s []byte) []byte {
	d := pinnedRust()
	for i := 0; i < len(s); {
		c := s[i]
		if c < utf8.RuneSelf {
			if c-'A' < 26 {
				c += 'a' - 'A'
			}
			dst = append(dst, c)
			i++
			continue
		}
		r, n := utf8.DecodeRune(s[i:])
		if d.kinds.at(r)&hasLower != 0 {
			dst = append(dst, d.lower[r]...)
		} else {
			dst = append(dst, s[i:i+n]...)
		}
		i += n
	}
	return dst
}

// script is a script as the UnicodeScripts pre-tokenizer tells them apart. The numbers mean nothing
// but anyScript.
type script uint8

// anyScript is that of characters at which UnicodeScripts never cuts.
const anyScript script = 0
