package tokenize

import "math/bits"

// A splitter cuts text into the words of a pattern.
type splitter struct {
	first scanner
	// starts finds the starts of words in up to 64 bytes; nil if only first cuts them
	starts func(v *view) uint64
	cases  bool // starts needs the masks of cases
}

// A view is a range of a text that starts where a word starts.
type view struct {
	masks
	text   []byte // from the start of the view, to the end of the masked text
	inside uint64 // the bytes that belong to the text
	last   bool   // the text ends within the view or at its end
	// unsure is the first byte whose words only the scanner can cut, otherwise 64
	unsure int
}

// tailOf returns the run of set that ends at the highest bit.
func tailOf(set uint64) uint64 { return ^(^uint64(0) >> bits.LeadingZeros64(^set)) }

// firstsOf returns the first byte of each run.
func firstsOf(set uint64) uint64 { return set &^ (set << 1) }

// after returns the positions after the runs of set that start at starts.
func after(set, starts uint64) uint64 { return (set + starts) &^ set }

// lastSpaces returns the starts of words before a character that is not white space, for patterns
// that end with \s+(?!\S)|\s+: the last character of each run of white space. tail is the run at
// the end of the view, which has none.
func (v *view) lastSpaces(tail uint64) uint64 {
	s := v.spaces &^ (v.spaces >> 1) &^ tail // last bytes
	if v.continued == 0 {
		return s
	}
	c := v.continued
	first := s &^ c
	for s &= c; s != 0; s &= c {
		s >>= 1
		first |= s &^ c
	}
	return first
}

// certain removes starts from the spaces at the end of a view that is not at the end of the text:
// what follows decides on them, except on the first.
func (v *view) certain(starts, tail uint64) uint64 {
	if v.last {
		return starts & v.inside
	}
	in := starts & tail
	return starts&^tail | in&-in
}

// startsGPT2 implements gpt2Regex.
func startsGPT2(v *view) uint64 {
	others := v.inside &^ (v.letters | v.numbers | v.spaces)
	tail := tailOf(v.spaces | ^v.inside)
	words := (firstsOf(v.letters) | firstsOf(v.numbers) | firstsOf(others)) &^ (v.blanks << 1)
	for q := words & v.quotes; q != 0; q &= q - 1 {
		i := bits.TrailingZeros64(q)
		if n := contraction(v.text[i:]); n > 0 {
			words = words&^(2<<i) | 1<<(i+n)&v.letters
		}
	}
	return v.certain(words|firstsOf(v.spaces)|v.lastSpaces(tail), tail)
}

// startsCL100K implements cl100kRegex.
func startsCL100K(v *view) uint64 { return v.cl100k(3) }

// startsQwen2 implements qwen2Regex.
func startsQwen2(v *view) uint64 { return v.cl100k(1) }

func (v *view) cl100k(digits int) uint64 {
	others := v.inside &^ (v.letters | v.numbers | v.spaces)
	tail := tailOf(v.spaces | ^v.inside)

	// A character before letters belongs to their word, if a word starts with that character: white
	// space other than a line break always, another character if it is alone and no U+0020 precedes
	// it.
	groups, alone := v.groups(others)
	words := firstsOf(v.letters) &^ ((v.spaces&^v.breaks | alone) << 1)
	for q := groups & v.quotes; q != 0; q &= q - 1 {
		i := bits.TrailingZeros64(q)
		if n := foldedContraction(v.text[i:]); n > 0 {
			words |= 1 << (i + n) & v.letters
		}
	}
	return v.certain(words|groups|v.digits(digits)|v.brokenSpaces(others, tail), tail)
}

// startsO200K implements o200kRegex.
func startsO200K(v *view) uint64 { return v.o200k(3, true) }

// startsTekken implements tekkenRegex.
func startsTekken(v *view) uint64 { return v.o200k(1, false) }

// o200k is cl100k for words that end before a capital, and that a contraction may end.
func (v *view) o200k(digits int, contractions bool) uint64 {
	letters := v.letters | v.marks // a mark after a letter is like one
	others := v.inside &^ (letters | v.numbers | v.spaces)
	tail := tailOf(v.spaces | ^v.inside)

	// The scanner handles other marks, capitals after letters without case, and slashes after line
	// breaks that belong to the punctuation before them.
	caseless := letters &^ (v.capitals | v.smalls)
	unsure := v.marks&^(letters<<1) | v.capitals&^v.continued&(caseless<<1)
	if v.breaks != 0 {
		taken := v.breaks & (others << 1)
		unsure |= after(v.breaks, taken) & v.slashes
	}
	if unsure != 0 {
		v.unsure = bits.TrailingZeros64(unsure)
	}

	groups, alone := v.groups(others)
	starts := groups | firstsOf(letters)&^((v.spaces&^v.breaks|alone)<<1) | v.capitals&^v.continued&(v.smalls<<1)
	if contractions {
		end := 0
		for q := v.quotes & (letters << 1); q != 0; q &= q - 1 {
			i := bits.TrailingZeros64(q)
			if n := foldedContraction(v.text[i:]); n > 0 && i > end {
				end = i + n
				starts = starts&^((1<<n-1)<<i) | 1<<end&letters
			}
		}
	}
	return v.certain(starts|v.digits(digits)|v.brokenSpaces(others, tail), tail)
}

// groups returns the starts of groups of others: a U+0020 before a group belongs to its word. alone
// has the last byte of the first character of each group. If a letter follows that byte, the group
// has no other character.
func (v *view) groups(others uint64) (starts, alone uint64) {
	starts = firstsOf(others) &^ (v.blanks << 1)
	alone = starts
	if c := v.continued; c != 0 {
		for g := starts << 1 & c; g != 0; g = g << 1 & c {
			alone |= g
		}
		alone &^= c >> 1
	}
	return starts, alone
}

// digits returns the starts of groups of up to most digits, which is 1 or 3.
func (v *view) digits(most int) uint64 {
	if most == 1 {
		return v.numbers &^ v.continued
	}
	starts := firstsOf(v.numbers)
	if long := v.numbers & v.beyond; long != 0 {
		v.unsure = min(v.unsure, bits.TrailingZeros64(long))
	}
	// by is set where the start of a group may move by 3: four digits in a row
	by := v.numbers & (v.numbers << 1)
	if by &= by << 2; by != 0 {
		starts |= starts << 3 & by
		by &= by << 3
		starts |= starts << 6 & by
		by &= by << 6
		starts |= starts << 12 & by
		by &= by << 12
		starts |= starts << 24 & by
		by &= by << 24
		starts |= starts << 48 & by
	}
	return starts
}

// brokenSpaces returns the starts of words in white space for patterns with
// [others]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+.
func (v *view) brokenSpaces(others, tail uint64) uint64 {
	starts := firstsOf(v.spaces)
	if v.breaks == 0 {
		return starts | v.lastSpaces(tail)
	}
	// Line breaks after other characters belong to their word.
	taken := starts & v.breaks & (others << 1)
	starts = starts&^taken | after(v.breaks, taken)&v.spaces
	// What follows the last line break is as if nothing preceded it.
	plain := v.spaces &^ v.breaks
	rests := plain & (v.breaks << 1)
	for e := after(plain, rests) & v.breaks; e != 0; e &= e - 1 { // another line break follows
		before := rests & (e&-e - 1)
		if before != 0 {
			rests &^= 1 << (63 - bits.LeadingZeros64(before))
		}
	}
	return starts | rests | v.lastSpaces(tail)&^v.breaks
}

// A cutter cuts a text into words, for one goroutine.
type cutter struct {
	classes *classTable
	split   splitter
	view    view
	masked  maskedText
	s       []byte // the rest of the text, from the start of the masked part
	at      int    // where the next word starts in s
	until   int    // words that start at or before this byte of s are cut by split.first
}

func newCutter(classes *classTable, split splitter) *cutter {
	return &cutter{classes: classes, split: split}
}

// begin prepares cutting s, which is valid UTF-8.
func (c *cutter) begin(s []byte) *cutter {
	c.s, c.at, c.until = s, 0, -1
	c.masked.n = 0
	if c.split.starts == nil {
		c.until = len(s)
	}
	return c
}

// more reports whether words are left.
func (c *cutter) more() bool { return c.at < len(c.s) }

// mustFill reports whether next will overwrite the masked text.
func (c *cutter) mustFill() bool {
	n := c.masked.n - c.at
	return c.at > c.until && (n <= 0 || n < maskedBytes+foldedBytes && c.masked.n < len(c.s))
}

// next returns the next words. The first words start at byte at of the masked text, and end where
// bits of ends are set, relative to at. One word follows them, unless it is empty.
func (c *cutter) next() (at int, ends uint64, word []byte) {
	if c.at <= c.until {
		return 0, 0, c.scan()
	}
	if c.mustFill() {
		c.s = c.s[c.at:]
		c.at = 0
		c.until = -1
		c.masked.fill(c.classes, c.s, c.split.cases)
	}
	last := c.masked.n == len(c.s)
	at = c.at
	n := c.masked.n - at
	v := &c.view
	v.text, v.inside, v.last, v.unsure = c.masked.text[at:c.masked.n], ^uint64(0), false, maskedBytes
	if last && n <= maskedBytes {
		v.last = true
		v.inside >>= maskedBytes - n
	}
	c.masked.window(&v.masks, at)
	if c.split.cases {
		c.masked.windowCases(&v.masks, at)
	}
	ends = c.split.starts(v) &^ 1
	switch {
	case v.unsure < maskedBytes:
		c.until = at + v.unsure
		ends &= 1<<v.unsure - 1
	case v.last:
		c.at += n
		return at, ends, c.s[at+lastOf(ends) : c.at]
	case ends == 0: // a word that reaches beyond the view
		c.until = at
	}
	c.at += lastOf(ends)
	if c.at <= c.until {
		word = c.scan()
	}
	return at, ends, word
}

// scan returns the next word.
func (c *cutter) scan() []byte {
	s := c.s[c.at:]
	n := c.split.first(c.classes, s)
	c.at += n
	return s[:n]
}

// lastOf returns the position of the highest bit, or 0.
func lastOf(set uint64) int { return max(0, bits.Len64(set)-1) }
