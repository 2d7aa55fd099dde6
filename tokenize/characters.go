package tokenize

import (
	_ "embed"
	"fmt"
	"sync"
	"unicode/utf8"
)

// Character classes for the normalizers and pre-tokenizers of Hugging Face tokenizers that do not
// use Oniguruma. They follow Rust's standard library and the crates in use, each with its own
// release of Unicode. tables/probe.py queried the library for each. Oniguruma's classes are in
// classes.go.

// rustTSV holds the sets of code points, lower cases and scripts; tables/probe.py writes it.
//
//go:embed tables/rust.tsv
var rustTSV string

// The kinds of characters, as bits.
const (
	// char::is_whitespace: for WhitespaceSplit, Whitespace, BertPreTokenizer, Strip, and added
	// tokens with lstrip or rstrip
	whiteSpace uint16 = 1 << iota
	// \w of Rust's regex crate: in the Whitespace pre-tokenizer, and next to added tokens with
	// single_word
	wordCharacter
	numeric // char::is_numeric, where the Digits pre-tokenizer cuts
	// where the Punctuation and BertPreTokenizer pre-tokenizers cut: approximately Unicode 9's
	// punctuation, and all of ASCII's
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

// is returns a function that reports whether a character is of a kind.
func (d *rustData) is(kind uint16) func(r rune) bool {
	return func(r rune) bool { return d.kinds.at(r)&kind != 0 }
}

// appendLower appends the lower case of s to dst like the normalizers Lowercase and BertNormalizer:
// each character separately, so a sigma at the end of a word is not special. s is valid UTF-8.
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

// script is a script of the UnicodeScripts pre-tokenizer. The numbers are arbitrary, except
// anyScript.
type script uint8

// anyScript is the script of characters at which UnicodeScripts never cuts.
const anyScript script = 0
