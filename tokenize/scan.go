package tokenize

// A scanner returns the length of the first match of its pattern at the start of s, which is not empty and valid UTF-8.
// The patterns match every text from end to end without gaps, so that scanning from match to match splits it.
type scanner func(t *classTable, s []byte) int

// A Pattern names a rule for cutting text into the words that are tokenized one by one.
type Pattern uint8

const (
	// GPT2 is the pattern of GPT-2, GPT-NeoX and OLMo: a word takes the one space before it, digits stay together.
	GPT2 Pattern = iota
	// CL100K is the pattern of OpenAI's cl100k_base and OLMo 2's dolma2: numbers in groups of up to three digits,
	// punctuation together with the line breaks after it.
	CL100K
)

// The patterns as tokenizer.json spells them.
const (
	gpt2Regex   = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
	cl100kRegex = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
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

// scanGPT2 is gpt2Regex by hand.
func scanGPT2(t *classTable, s []byte) int {
	c := s[0]
	if c == '\'' {
		if n := contraction(s); n > 0 {
			return n
		}
	}
	if c == ' ' && len(s) > 1 {
		// Only U+0020 leads a word.
		if k, n := t.of(s[1:]); k != space {
			return t.run(s, 1+n, k)
		}
	}
	k, n := t.of(s)
	if k != space {
		return t.run(s, n, k)
	}
	return t.spaces(s, n)
}

// scanCL100K is cl100kRegex by hand.
func scanCL100K(t *classTable, s []byte) int {
	if s[0] == '\'' {
		if n := foldedContraction(s); n > 0 {
			return n
		}
	}
	k, n := t.of(s)
	switch k {
	case letter:
		return t.run(s, n, letter)
	case number:
		for range 2 {
			if n == len(s) {
				break
			}
			k, m := t.of(s[n:])
			if k != number {
				break
			}
			n += m
		}
		return n
	}
	next, m := other, 0
	if n < len(s) {
		next, m = t.of(s[n:])
	}
	if m > 0 && next == letter && s[0] != '\r' && s[0] != '\n' {
		return t.run(s, n+m, letter)
	}
	switch {
	case k == other:
		return lineBreaks(s, t.run(s, n, other))
	case s[0] == ' ' && m > 0 && next == other:
		return lineBreaks(s, t.run(s, n+m, other))
	}
	// White space: up to its last line break if there is one.
	end, broken := n, 0
	if isLineBreak(s[0]) {
		broken = n
	}
	for end < len(s) {
		k, m := t.of(s[end:])
		if k != space {
			break
		}
		if isLineBreak(s[end]) {
			broken = end + 1
		}
		end += m
	}
	if broken > 0 {
		return broken
	}
	return t.spaces(s, n)
}

func isLineBreak(c byte) bool { return c == '\r' || c == '\n' }

func lineBreaks(s []byte, i int) int {
	for i < len(s) && isLineBreak(s[i]) {
		i++
	}
	return i
}

// spaces matches \s+(?!\S)|\s+ at s, whose first character is white space and n bytes long: the whole run at the end of
// the text, else the run without its last character, unless that is all there is.
func (t *classTable) spaces(s []byte, n int) int {
	last, i := 0, n
	for i < len(s) {
		k, m := t.of(s[i:])
		if k != space {
			break
		}
		last = i
		i += m
	}
	if i == len(s) || last == 0 {
		return i
	}
	return last
}

// contraction returns the length of 's, 't, 'm, 'd, 're, 've or 'll at the start of s, which starts with an apostrophe.
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

// foldedContraction is contraction without regard to case. Of the characters beyond ASCII only U+017F, the long s, folds
// to a letter of a contraction.
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
