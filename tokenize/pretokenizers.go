package tokenize

import (
	"bytes"
	"encoding/json"
	"fmt"
	"unicode/utf8"
)

// A preTokenizeStep splits normalized text into words, or previous words into smaller ones.
type preTokenizeStep interface{ cut(c *cutting) }

// A part is a piece of cutting.text. Its first origin bytes originate from the first character of
// the document.
type part struct{ start, end, origin int }

// cutting is a text that passes through the pre-tokenizers, with the memory of one goroutine.
type cutting struct {
	text   []byte // never written to
	pieces []part
	inside bool // text is before this one, so Metaspace inserts nothing

	// The current step writes pieces to cut, and text to out[turn] if it also changes text.
	cut       []part
	lists     [2][]part // pieces and cut, alternating
	list      int       // the index of pieces
	out       [2][]byte
	turn      int
	rewritten bool
	scratch   []byte
}

func (c *cutting) begin(s []byte, origin int, inside bool) {
	c.text, c.inside, c.turn, c.list = s, inside, 0, 0
	c.pieces = append(c.lists[0][:0], part{0, len(s), min(max(origin, 0), len(s))})
	c.lists[0], c.cut = c.pieces, c.lists[1][:0]
}

// add adds a part of the text, unless it is empty. p is the piece that it is cut from.
func (c *cutting) add(p part, start, end int) {
	if start < end {
		c.cut = append(c.cut, part{start, end, min(max(p.start+p.origin-start, 0), end-start)})
	}
}

// rewrite returns the empty buffer for the text of a step that changes it.
func (c *cutting) rewrite() []byte {
	c.turn ^= 1
	c.rewritten = true
	return c.out[c.turn][:0]
}

// finish makes the output of a step the pieces for the next step.
func (c *cutting) finish() {
	c.lists[c.list] = c.pieces
	c.list ^= 1
	c.lists[c.list] = c.cut
	c.pieces, c.cut = c.cut, c.pieces[:0]
	if c.rewritten {
		c.text, c.rewritten = c.out[c.turn], false
	}
}

// release frees memory that an unusually long text needed.
func (c *cutting) release() {
	c.text, c.pieces, c.cut = nil, nil, nil
	for i := range c.out {
		if cap(c.out[i]) > keptScratch {
			c.out[i] = nil
		}
		if cap(c.lists[i]) > keptScratch/8 {
			c.lists[i] = nil
		}
	}
}

// A behavior defines how the matches are treated at which a text is cut.
type behavior uint8

const (
	isolated behavior = iota
	removed
	mergedWithPrevious
	mergedWithNext
	contiguous
)

func parseBehavior(s, name string) (behavior, error) {
	for i, b := range []string{"Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"} {
		if s == b {
			return behavior(i), nil
		}
	}
	return 0, fmt.Errorf("%s.behavior is %q; use Isolated, Removed, MergedWithPrevious, MergedWithNext, Contiguous",
		name, s)
}

// delimiting processes the matches of a piece and the ranges between them, from left to right, and
// adds pieces according to the behavior.
type delimiting struct {
	c        *cutting
	p        part
	behavior behavior
	invert   bool

	done       int  // everything up to here has been processed
	held       bool // start to end has not been added yet
	start, end int
	match      bool // the last range was a match
}

func (d *delimiting) begin(c *cutting, p part, b behavior, invert bool) {
	*d = delimiting{c: c, p: p, behavior: b, invert: invert, done: p.start}
}

// take processes a match and the range before it.
func (d *delimiting) take(start, end int) {
	if d.done != start {
		d.part(d.done, start, d.invert)
	}
	d.part(start, end, !d.invert)
	d.done = end
}

func (d *delimiting) finish() {
	if d.done != d.p.end {
		d.part(d.done, d.p.end, d.invert)
	}
	if d.held {
		d.c.add(d.p, d.start, d.end)
	}
}

func (d *delimiting) part(start, end int, match bool) {
	before := d.match
	d.match = match
	switch d.behavior {
	case isolated:
		d.c.add(d.p, start, end)
		return
	case removed:
		if !match {
			d.c.add(d.p, start, end)
		}
		return
	}
	join := false
	switch d.behavior {
	case mergedWithPrevious:
		join = match && !before
	case mergedWithNext:
		join = before && !match
	case contiguous:
		join = match == before
	}
	if join && d.held {
		d.end = end
		return
	}
	if d.held {
		d.c.add(d.p, d.start, d.end)
	}
	d.held, d.start, d.end = true, start, end
}

// parsePreTokenizers appends the steps of the pre-tokenizer to p.
func (p *pipeline) parsePreTokenizers(b json.RawMessage) error {
	steps, err := stepsOf(b, "pre_tokenizer", "pretokenizers")
	if err != nil {
		return err
	}
	for _, s := range steps {
		if err := p.addPreTokenizer(s); err != nil {
			return err
		}
	}
	return nil
}

// addPreTokenizer appends a pre-tokenizer to p. After an error, p is unusable.
func (p *pipeline) addPreTokenizer(s stepJSON) (err error) {
	add := func(steps ...preTokenizeStep) { p.preTokenizers = append(p.preTokenizers, steps...) }
	cutAt := func(kind uint16, b behavior) { add(splitRunes{pinnedRust().kinds, kind, b}) }
	switch s.kind {
	case "ByteLevel":
		var f byteLevelJSON
		err = s.read(&f)
		add(byteLevel{prefix: f.AddPrefixSpace == nil || *f.AddPrefixSpace, regex: f.UseRegex == nil ||
			*f.UseRegex, classes: pinnedClasses()})
	case "Split":
		var f splitJSON
		if err = s.read(&f); err != nil {
			return err
		}
		m, err := f.Pattern.compile(s.name)
		if err != nil {
			return err
		}
		how, err := parseBehavior(f.Behavior, s.name)
		if err != nil {
			return err
		}
		// Gemma's files cut at spaces that the normalizer has replaced.
		if m.regex == nil && how != removed && p.replacesAll(m.literal) {
			break
		}
		add(split{m, deref(f.Pattern.Regex), how, f.Invert})
	case "Whitespace":
		add(wordsAndSymbols{pinnedRust()})
	case "WhitespaceSplit":
		cutAt(whiteSpace, removed)
	case "BertPreTokenizer":
		cutAt(whiteSpace, removed)
		cutAt(punctuationMark, isolated)
	case "Punctuation":
		var f struct {
			Type     string  `json:"type"`
			Behavior *string `json:"behavior"`
		}
		how := isolated
		if err = s.read(&f); err == nil && f.Behavior != nil {
			how, err = parseBehavior(*f.Behavior, s.name)
		}
		cutAt(punctuationMark, how)
	case "Digits":
		var f struct {
			Type       string `json:"type"`
			Individual bool   `json:"individual_digits"`
		}
		err = s.read(&f)
		how := contiguous
		if f.Individual {
			how = isolated
		}
		cutAt(numeric, how)
	case "Metaspace":
		var m metaspace
		m, err = parseMetaspace(s)
		p.usesOrigin = p.usesOrigin || m.first
		add(m)
	case "CharDelimiterSplit":
		var f struct {
			Type      string `json:"type"`
			Delimiter string `json:"delimiter"`
		}
		if err = s.read(&f); err != nil {
			return err
		}
		if _, err := oneRune(f.Delimiter, s.name+".delimiter"); err != nil {
			return err
		}
		add(split{matcher: matcher{literal: []byte(f.Delimiter)}, behavior: removed})
	case "UnicodeScripts":
		add(splitScripts{pinnedRust()})
	case "FixedLength":
		var f struct {
			Type   string `json:"type"`
			Length *int   `json:"length"`
		}
		err = s.read(&f)
		length := 5
		if f.Length != nil {
			length = *f.Length
		}
		if err == nil && length < 1 {
			err = s.refuse()
		}
		add(fixedLength(length))
	default:
		err = s.refuse()
	}
	return err
}

// replacesAll reports whether the last normalizer leaves no occurrence of a literal of one byte,
// and no pre-tokenizer changes the text.
func (p *pipeline) replacesAll(literal []byte) bool {
	if len(p.normalizers) == 0 || len(p.preTokenizers) > 0 || len(literal) != 1 {
		return false
	}
	last, ok := p.normalizers[len(p.normalizers)-1].(replace)
	return ok && bytes.Equal(last.literal, literal) && !bytes.Contains(last.content, literal)
}

// byteLevelJSON is ByteLevel, which is a pre-tokenizer, post-processor and decoder; the latter two
// ignore the fields.
type byteLevelJSON struct {
	Type           string `json:"type"`
	AddPrefixSpace *bool  `json:"add_prefix_space"`
	TrimOffsets    *bool  `json:"trim_offsets"`
	UseRegex       *bool  `json:"use_regex"`
}

// byteLevel cuts by the pattern of GPT-2 and spells the bytes.
type byteLevel struct {
	prefix, regex bool
	classes       *classTable
}

func (l byteLevel) cut(c *cutting) {
	out := c.rewrite()
	for _, p := range c.pieces {
		s, origin := c.text[p.start:p.end], p.origin
		if l.prefix && s[0] != ' ' {
			c.scratch = append(append(c.scratch[:0], ' '), s...)
			s = c.scratch
			if origin > 0 {
				origin++
			}
		}
		for len(s) > 0 {
			n := len(s)
			if l.regex {
				n = scanGPT2(l.classes, s)
			}
			start, spelled := len(out), min(max(origin, 0), n)
			out = spell(out, s[:spelled])
			middle := len(out)
			out = spell(out, s[spelled:n])
			c.cut = append(c.cut, part{start, len(out), middle - start})
			s, origin = s[n:], origin-n
		}
	}
	c.out[c.turn] = out
}

// splitJSON is Split.
type splitJSON struct {
	Type     string      `json:"type"`
	Pattern  patternJSON `json:"pattern"`
	Behavior string      `json:"behavior"`
	Invert   bool        `json:"invert"`
}

// split cuts at the matches of a pattern.
type split struct {
	matcher
	source   string // the regular expression
	behavior behavior
	invert   bool
}

func (s split) cut(c *cutting) {
	var d delimiting
	for _, p := range c.pieces {
		d.begin(c, p, s.behavior, s.invert)
		for it := s.all(c.text[p.start:p.end]); it.next(); {
			d.take(p.start+it.start, p.start+it.end)
		}
		d.finish()
	}
}

// splitRunes cuts at the characters of a kind.
type splitRunes struct {
	kinds    *runeTable[uint16]
	kind     uint16
	behavior behavior
}

func (s splitRunes) cut(c *cutting) {
	var d delimiting
	for _, p := range c.pieces {
		if s.behavior != isolated && s.behavior != removed {
			d.begin(c, p, s.behavior, false)
		}
		start := p.start
		for i := p.start; i < p.end; {
			r, n := rune(c.text[i]), 1
			if r >= utf8.RuneSelf {
				r, n = utf8.DecodeRune(c.text[i:p.end])
			}
			if s.kinds.at(r)&s.kind != 0 {
				switch s.behavior {
				case isolated:
					c.add(p, start, i)
					c.add(p, i, i+n)
				case removed:
					c.add(p, start, i)
				default:
					d.take(i, i+n)
				}
				start = i + n
			}
			i += n
		}
		if s.behavior != isolated && s.behavior != removed {
			d.finish()
		} else {
			c.add(p, start, p.end)
		}
	}
}

// wordsAndSymbols is the Whitespace pre-tokenizer: the matches of \w+|[^\w\s]+.
type wordsAndSymbols struct{ data *rustData }

func (w wordsAndSymbols) cut(c *cutting) {
	const blank, symbol, word = 0, 1, 2
	for _, p := range c.pieces {
		start, kind := p.start, blank
		for i := p.start; i < p.end; {
			r, n := utf8.DecodeRune(c.text[i:p.end])
			k := symbol
			switch is := w.data.kinds.at(r); {
			case is&wordCharacter != 0:
				k = word
			case is&whiteSpace != 0:
				k = blank
			}
			if k != kind {
				if kind != blank {
					c.add(p, start, i)
				}
				start, kind = i, k
			}
			i += n
		}
		if kind != blank {
			c.add(p, start, p.end)
		}
	}
}

// metaspace replaces spaces by a visible character and cuts before it. It is a pre-tokenizer and a
// decoder.
type metaspace struct {
	replacement string // one character
	first       bool   // insert it before the piece that starts the document
	always      bool   // insert it before every piece
	split       bool
}

func parseMetaspace(s stepJSON) (metaspace, error) {
	var f struct {
		Type           string  `json:"type"`
		Replacement    string  `json:"replacement"`
		AddPrefixSpace *bool   `json:"add_prefix_space"`
		PrependScheme  *string `json:"prepend_scheme"`
		Split          *bool   `json:"split"`
		StrRep         *string `json:"str_rep"` // in old files; the library ignores it
	}
	if err := s.read(&f); err != nil {
		return metaspace{}, err
	}
	if _, err := oneRune(f.Replacement, s.name+".replacement"); err != nil {
		return metaspace{}, err
	}
	m := metaspace{replacement: f.Replacement, split: f.Split == nil || *f.Split}
	scheme := "always"
	if f.PrependScheme != nil {
		scheme = *f.PrependScheme
	}
	switch scheme {
	case "always":
		m.always = true
	case "first":
		m.first = true
	case "never":
	default:
		return m, fmt.Errorf("%s.prepend_scheme is %q; use always, first or never", s.name, scheme)
	}
	if f.AddPrefixSpace != nil && !*f.AddPrefixSpace && scheme != "never" {
		return m, fmt.Errorf("%s: add_prefix_space is false and prepend_scheme is not \"never\", which Hugging Face "+
			"tokenizers does not load either", s.name)
	}
	return m, nil
}

func oneRune(s, name string) (rune, error) {
	r, n := utf8.DecodeRuneInString(s)
	if n == 0 || n != len(s) {
		return 0, fmt.Errorf("%s is %q: want one character", name, s)
	}
	return r, nil
}

func (m metaspace) cut(c *cutting) {
	out := c.rewrite()
	for _, p := range c.pieces {
		s := c.text[p.start:p.end]
		start, origin := len(out), 0
		if (m.always || m.first && p.origin > 0) && !(c.inside && p.start == 0) && s[0] != ' ' &&
			!bytes.HasPrefix(s, []byte(m.replacement)) {
			out = append(out, m.replacement...)
			origin = len(m.replacement)
		}
		if p.origin == 0 {
			origin = 0
		}
		for i, b := range s {
			if b == ' ' {
				out = append(out, m.replacement...)
			} else {
				out = append(out, b)
			}
			if i < p.origin {
				origin = len(out) - start
			}
		}
		whole := part{start, len(out), origin}
		if !m.split {
			c.cut = append(c.cut, whole)
			continue
		}
		from := start
		for at := start; ; {
			i := bytes.Index(out[at:], []byte(m.replacement))
			if i < 0 {
				break
			}
			c.add(whole, from, at+i)
			from, at = at+i, at+i+len(m.replacement)
		}
		c.add(whole, from, len(out))
	}
	c.out[c.turn] = out
}

// splitScripts cuts where the script changes. Spaces belong to any script, but spaces at the start
// of a piece are lost, as in the library.
type splitScripts struct{ data *rustData }

func (s splitScripts) cut(c *cutting) {
	for _, p := range c.pieces {
		start, last := -1, anyScript
		for i := p.start; i < p.end; {
			r, n := utf8.DecodeRune(c.text[i:p.end])
			if k := s.scriptOf(r); k != anyScript && k != last {
				if start >= 0 {
					c.add(p, start, i)
				}
				start, last = i, k
			}
			i += n
		}
		if start >= 0 {
			c.add(p, start, p.end)
		}
	}
}

// scriptOf returns the script of a character in UnicodeScripts, where Hiragana, Katakana and U+30FC
// are Han.
func (s splitScripts) scriptOf(r rune) script {
	if r == ' ' {
		return anyScript
	}
	return s.data.scripts.at(r)
}

// fixedLength cuts into pieces of a number of characters.
type fixedLength int

func (f fixedLength) cut(c *cutting) {
	for _, p := range c.pieces {
		start, count := p.start, 0
		for i := p.start; i < p.end; {
			if count == int(f) {
				c.add(p, start, i)
				start, count = i, 0
			}
			_, n := utf8.DecodeRune(c.text[i:p.end])
			i += n
			count++
		}
		c.add(p, start, p.end)
	}
}
