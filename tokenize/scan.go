package tokenize

import (
	"encoding/binary"
	"math/bits"
	"strings"
	"unicode/utf8"
)

// A scanner returns the length of the first match of its pattern at the start of s, which is not
// empty and valid UTF-8. The patterns match every text from end to end without gaps, so that
// scanning from match to match splits it. Text between the matches of a pattern is returned like a
// match.
type scanner func(t *classTable, s []byte) int

// A Pattern is a rule for splitting text into the words that are tokenized separately.
type Pattern uint8

const (
	// GPT2 is the pattern of GPT-2, GPT-NeoX and OLMo: a word includes one space before it, and
	// digits stay together.
	GPT2 Pattern = iota
	// CL100K is the pattern of OpenAI's cl100k_base, Llama 3 and OLMo 2's dolma2: numbers in groups
	// of up to three digits, punctuation together with the line breaks after it.
	CL100K
)

// The patterns in the spelling of tokenizer.json.
const (
	gpt2Regex   = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
	cl100kRegex = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	// Qwen 2, 2.5 and 3.
	qwen2Regex = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	// OpenAI's o200k_base: GPT-4o, gpt-oss, Llama 4.
	o200kRegex = `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|` +
		`[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|` +
		`\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	// Mistral's tekken.
	tekkenRegex = `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|` +
		`[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|` +
		`\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	// The three patterns of DeepSeek-V3 and R1, applied one after the other.
	deepSeekNumbers = `\p{N}{1,3}`
	deepSeekCJK     = `[一-龥぀-ゟ゠-ヿ]+`
	deepSeekRegex   = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+" +
		`|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
)

func (p Pattern) String() string {
	switch p {
	case GPT2:
		return "gpt2"
	case CL100K:
		return "cl100k"
	}
	return "unknown pattern"
}

func (p Pattern) scanner() scanner {
	if p == CL100K {
		return scanCL100K
	}
	return scanGPT2
}

// splitterOf returns the hand-written splitter for consecutive Split pre-tokenizers with these
// regexes and behavior Isolated, if there is one. (For all but DeepSeek's, Removed with invert is
// equivalent.)
func splitterOf(regexes ...string) (splitter, bool) {
	// Some files have line breaks instead of \r and \n; both are equivalent.
	switch strings.NewReplacer("\r", `\r`, "\n", `\n`).Replace(strings.Join(regexes, "\x00")) {
	case gpt2Regex:
		return splitter{first: scanGPT2, starts: startsGPT2}, true
	case cl100kRegex:
		return splitter{first: scanCL100K, starts: startsCL100K}, true
	case qwen2Regex:
		return splitter{first: scanQwen2, starts: startsQwen2}, true
	case o200kRegex:
		return splitter{first: scanO200K, starts: startsO200K, cases: true}, true
	case tekkenRegex:
		return splitter{first: scanTekken, starts: startsTekken, cases: true}, true
	case deepSeekNumbers + "\x00" + deepSeekCJK + "\x00" + deepSeekRegex:
		return splitter{first: scanDeepSeek}, true
	}
	return splitter{}, false
}

// scanGPT2 implements gpt2Regex.
func scanGPT2(t *classTable, s []byte) int {
	i := 0
	switch s[0] {
	case '\'':
		if n := contraction(s); n > 0 {
			return n
		}
	case ' ': // only U+0020 leads a word
		if len(s) > 1 {
			i = 1
		}
	}
	k, n := t.of(s[i:])
	switch {
	case k.in(letter):
		return t.letters(s, i+n)
	case k.in(number):
		return t.run(s, i+n, number)
	case !k.in(space):
		return t.run(s, i+n, other)
	}
	return t.spaces(s)
}

// scanCL100K implements cl100kRegex.
func scanCL100K(t *classTable, s []byte) int { return t.cl100k(s, 3) }

// scanQwen2 implements qwen2Regex.
func scanQwen2(t *classTable, s []byte) int { return t.cl100k(s, 1) }

// cl100k implements cl100kRegex with numbers in groups of up to the given number of digits.
func (t *classTable) cl100k(s []byte, digits int) int {
	if s[0] == ' ' && len(s) > 1 && s[1]|0x20-'a' < 26 { // most English words
		return t.letters(s, 2)
	}
	if s[0] == '\'' {
		if n := foldedContraction(s); n > 0 {
			return n
		}
	}
	k, n := t.of(s)
	switch {
	case k.in(letter):
		return t.letters(s, n)
	case k.in(number):
		return t.upTo(s, n, digits-1, number)
	}
	if n < len(s) && !isLineBreak(s[0]) {
		if next, m := t.of(s[n:]); next.in(letter) {
			return t.letters(s, n+m)
		}
	}
	if end := t.punctuated(s, k, n, other); end > 0 {
		return lineBreaks(s, end)
	}
	return t.brokenSpaces(s)
}

// scanO200K implements o200kRegex.
func scanO200K(t *classTable, s []byte) int { return t.o200k(s, 3, true) }

// scanTekken implements tekkenRegex.
func scanTekken(t *classTable, s []byte) int { return t.o200k(s, 1, false) }

// o200k implements o200kRegex with numbers in groups of up to the given number of digits, and with
// or without contractions.
func (t *classTable) o200k(s []byte, digits int, contractions bool) int {
	k, n := t.of(s)
	if k.in(number) {
		return t.upTo(s, n, digits-1, number)
	}
	end := 0
	// most English words; the code below finds the same
	if s[0] == ' ' && len(s) > 1 && s[1]-'a' < 26 {
		end = t.lower(s, 2)
	}
	// The first alternative after any one character, then without it; then the second in the same
	// way. That character is not a letter, so without it a word can start here only at a letter or
	// a mark.
	leads := !k.in(letter) && !isLineBreak(s[0])
	starts := k.in(letter | mark)
	if end == 0 && leads {
		end = t.lowerWord(s, n)
	}
	if end == 0 && starts {
		end = t.lowerWord(s, 0)
	}
	if end == 0 && leads {
		if i := t.run(s, n, upperLike); i > n {
			end = i
		}
	}
	if end == 0 && starts {
		end = t.run(s, 0, upperLike)
	}
	if end > 0 {
		if contractions && end < len(s) && s[end] == '\'' {
			end += foldedContraction(s[end:])
		}
		return end
	}
	if end := t.punctuated(s, k, n, other); end > 0 {
		for end < len(s) && (isLineBreak(s[end]) || s[end] == '/') {
			end++
		}
		return end
	}
	return t.brokenSpaces(s)
}

// lowerWord returns the end of U*L+ at s[i:], where U is upperLike and L is lowerLike, or 0 if it
// does not match.
func (t *classTable) lowerWord(s []byte, i int) int {
	both := 0 // the end of the last character that is in both
	for i < len(s) {
		k, n := class(0), 1
		if c := s[i]; c < 0x80 {
			if k = t.ascii[c]; k == ll {
				return t.lower(s, i+1)
			}
		} else {
			k, n = t.ofMany(s[i:])
		}
		if !k.in(upperLike) {
			if k == ll {
				return t.lower(s, i+n)
			}
			break
		}
		i += n
		if k.in(lowerLike) {
			both = i
		}
	}
	return both
}

// lower returns the end of the run of lowerLike at s[i:].
func (t *classTable) lower(s []byte, i int) int {
	return t.run(s, asciiLower(s, i), lowerLike)
}

// scanDeepSeek implements deepSeekNumbers, deepSeekCJK and deepSeekRegex, one after the other. The
// first two cut the text into pieces, and the third sees the end of a piece as the end of the text.
// Text between the matches of the third is a word too.
func scanDeepSeek(t *classTable, s []byte) int {
	cjk := isDeepSeekCJK(s)
	k, n := t.of(s)
	if !cjk && k.in(number) {
		return t.upTo(s, n, 2, number)
	}
	if end := t.deepSeek(s, cjk); end > 0 {
		return end
	}
	for n < len(s) {
		k, m := t.ofPiece(s[n:], cjk)
		if k.in(number) || t.deepSeek(s[n:], cjk) > 0 {
			break
		}
		n += m
	}
	return n
}

// isDeepSeekCJK reports whether s starts with a character of deepSeekCJK: U+3040 to U+30FF, U+4E00
// to U+9FA5.
func isDeepSeekCJK(s []byte) bool {
	if s[0] < 0xe3 || s[0] > 0xe9 {
		return false
	}
	switch p := uint32(s[0])<<16 | uint32(s[1])<<8 | uint32(s[2]); {
	case s[0] == 0xe3:
		return 0xe38180 <= p && p <= 0xe383bf
	default:
		return 0xe4b880 <= p && p <= 0xe9bea5
	}
}

// ofPiece is of for text in a piece that has only characters of deepSeekCJK, or none: the end of
// the piece is returned as a number, which the third pattern does not match. s may be empty.
func (t *classTable) ofPiece(s []byte, cjk bool) (class, int) {
	switch {
	case len(s) == 0:
		return nd, 0
	case s[0] < utf8.RuneSelf && !cjk:
		return t.ascii[s[0]], 1
	case isDeepSeekCJK(s) != cjk:
		return nd, 0
	}
	return t.of(s)
}

// runPiece is run for ofPiece.
func (t *classTable) runPiece(s []byte, i int, set classes, cjk bool) int {
	for {
		k, n := t.ofPiece(s[i:], cjk)
		if !k.in(set) {
			return i
		}
		i += n
	}
}

// deepSeek is deepSeekRegex at the start of s, in a piece. It returns 0 if there is no match.
func (t *classTable) deepSeek(s []byte, cjk bool) int {
	k, n := t.ofPiece(s, cjk)
	if s[0] < 0x80 && k.in(punctuation|symbols) {
		if end := asciiLetters(s, 1); end > 1 {
			return end
		}
	}
	if k.in(letter | mark) {
		if !cjk {
			n = asciiLetters(s, n)
		}
		return t.runPiece(s, n, letter|mark, cjk)
	}
	next, m := t.ofPiece(s[n:], cjk)
	if next.in(letter|mark) && !k.in(punctuation|symbols) && !isLineBreak(s[0]) {
		end := n + m
		if !cjk {
			end = asciiLetters(s, end)
		}
		return t.runPiece(s, end, letter|mark, cjk)
	}
	if s[0] == ' ' && next.in(punctuation|symbols) {
		k, n = next, n+m
	}
	switch {
	case k.in(punctuation | symbols):
		if n = t.runPiece(s, n, punctuation|symbols, cjk); !cjk {
			n = lineBreaks(s, n)
		}
		return n
	case !k.in(space):
		return 0
	}
	// As in brokenSpaces.
	end, last, broken := 0, 0, 0
	for {
		k, n := t.ofPiece(s[end:], cjk)
		if !k.in(space) {
			break
		}
		last = end
		if end += n; isLineBreak(s[last]) {
			broken = end
		}
	}
	if broken > 0 {
		return broken
	}
	if k, _ := t.ofPiece(s[end:], cjk); k.in(number) || last == 0 {
		return end
	}
	return last
}

// punctuated matches " ?[set]+" at s, whose first character has class k and is n bytes long; 0 if
// it does not match.
func (t *classTable) punctuated(s []byte, k class, n int, set classes) int {
	if k.in(set) {
		return t.run(s, n, set)
	}
	if s[0] == ' ' && len(s) > 1 {
		if next, m := t.of(s[1:]); next.in(set) {
			return t.run(s, 1+m, set)
		}
	}
	return 0
}

// upTo returns the end of the run of at most n characters of the set at s[i:].
func (t *classTable) upTo(s []byte, i, n int, set classes) int {
	for ; n > 0 && i < len(s); n-- {
		k, m := t.of(s[i:])
		if !k.in(set) {
			break
		}
		i += m
	}
	return i
}

func isLineBreak(c byte) bool { return c == '\r' || c == '\n' }

func lineBreaks(s []byte, i int) int {
	for i < len(s) && isLineBreak(s[i]) {
		i++
	}
	return i
}

// brokenSpaces matches \s*[\r\n]+|\s+(?!\S)|\s+ at s, which starts with white space: the run up to
// its last line break if there is one.
func (t *classTable) brokenSpaces(s []byte) int {
	end, last, broken := 0, 0, 0
	for end < len(s) {
		k, n := t.of(s[end:])
		if !k.in(space) {
			break
		}
		last = end
		if end += n; isLineBreak(s[last]) {
			broken = end
		}
	}
	switch {
	case broken > 0:
		return broken
	case end == len(s) || last == 0:
		return end
	}
	return last
}

// spaces matches \s+(?!\S)|\s+ at s, which starts with white space: the whole run at the end of the
// text, otherwise the run without its last character, unless it has only one.
func (t *classTable) spaces(s []byte) int {
	end, last := 0, 0
	for end < len(s) {
		k, n := t.of(s[end:])
		if !k.in(space) {
			break
		}
		last = end
		end += n
	}
	if end == len(s) || last == 0 {
		return end
	}
	return last
}

const (
	eachByte = 0x0101010101010101
	highBits = 0x80 * eachByte
)

// asciiLetters returns the end of the run of A-Z and a-z at s[i:]. It processes eight bytes at a
// time: an addition to bytes below 0x80 carries into the high bit of the bytes that reach a bound.
func asciiLetters(s []byte, i int) int {
	for ; i+8 <= len(s); i += 8 {
		x := binary.LittleEndian.Uint64(s[i:])
		low := (x | 0x20*eachByte) &^ highBits
		if not := ^(low + (0x80-'a')*eachByte) | (low + (0x80-'z'-1)*eachByte) | x; not&highBits != 0 {
			return i + bits.TrailingZeros64(not&highBits)>>3
		}
	}
	for i < len(s) && s[i]|0x20-'a' < 26 {
		i++
	}
	return i
}

// asciiLower returns the end of the run of a-z at s[i:].
func asciiLower(s []byte, i int) int {
	for ; i+8 <= len(s); i += 8 {
		x := binary.LittleEndian.Uint64(s[i:])
		low := x &^ highBits
		if not := ^(low + (0x80-'a')*eachByte) | (low + (0x80-'z'-1)*eachByte) | x; not&highBits != 0 {
			return i + bits.TrailingZeros64(not&highBits)>>3
		}
	}
	for i < len(s) && s[i]-'a' < 26 {
		i++
	}
	return i
}

// contraction returns the length of 's, 't, 'm, 'd, 're, 've or 'll at the start of s, which starts
// with an apostrophe.
func contraction(s []byte) int {
	if len(s) < 2 {
		return 0
	}
	switch s[1] {
	case 's', 't', 'm', 'd':
		return 2
	case 'r', 'v':
		if len(s) > 2 && s[2] == 'e' {
			return 3
		}
	case 'l':
		if len(s) > 2 && s[2] == 'l' {
			return 3
		}
	}
	return 0
}

// foldedContraction is the case-insensitive contraction. Beyond ASCII, only U+017F, the long s,
// folds to a letter of a contraction.
func foldedContraction(s []byte) int {
	if len(s) < 2 {
		return 0
	}
	var second byte
	if len(s) > 2 {
		second = s[2] | 0x20
	}
	switch s[1] | 0x20 {
	case 's', 't', 'm', 'd':
		return 2
	case 'r', 'v':
		if second == 'e' {
			return 3
		}
	case 'l':
		if second == 'l' {
			return 3
		}
	}
	if len(s) > 2 && s[1] == 0xc5 && s[2] == 0xbf {
		return 3
	}
	return 0
}

// foldedBytes is how many bytes after an apostrophe decide on a contraction, at most.
const foldedBytes = 3
