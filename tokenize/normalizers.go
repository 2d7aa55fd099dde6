package tokenize

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"unicode/utf8"
)

// A normalizeStep changes text before it is split into words.
type normalizeStep interface{ normalize(b *normalizing) }

// normalizing is a text that passes through the normalizers, with the memory of one goroutine.
type normalizing struct {
	text []byte // never written to: it may be the document itself
	// bytes at the start of text that originate from the first character of the document, for
	// Metaspace
	origin int
	forms  []*normalizer

	out  [2][]byte // used alternately: a step reads one and writes the other
	turn int
}

// newNormalizing returns the memory for the normalizers of p.
func newNormalizing(p *pipeline) *normalizing {
	b := &normalizing{}
	for range p.forms {
		b.forms = append(b.forms, newNormalizer())
	}
	return b
}

// run normalizes s, whose first origin bytes originate from the first character of the document.
func (b *normalizing) run(p *pipeline, s []byte, origin int) {
	b.begin(s, origin)
	for _, n := range p.normalizers {
		n.normalize(b)
	}
}

func (b *normalizing) begin(s []byte, origin int) { b.text, b.origin, b.turn = s, origin, 0 }

// next returns the empty buffer for the new text.
func (b *normalizing) next() []byte {
	b.turn ^= 1
	return b.out[b.turn][:0]
}

// set makes out, which grew from next, the text.
func (b *normalizing) set(out []byte, origin int) {
	b.out[b.turn] = out
	b.text, b.origin = out, origin
}

// rewrite replaces the text by the output of f, which must depend on single characters only.
func (b *normalizing) rewrite(f func(dst, s []byte) []byte) {
	out := f(b.next(), b.text[:b.origin])
	origin := len(out)
	b.set(f(out, b.text[b.origin:]), origin)
}

// release frees memory that an unusually long text needed.
func (b *normalizing) release() {
	b.text = nil
	for i := range b.out {
		if cap(b.out[i]) > keptScratch {
			b.out[i] = nil
		}
	}
}

// parseNormalizers appends the steps of the normalizer to p.
func (p *pipeline) parseNormalizers(b json.RawMessage) error {
	steps, err := stepsOf(b, "normalizer", "normalizers")
	if err != nil {
		return err
	}
	for _, s := range steps {
		if err := p.addNormalizer(s); err != nil {
			return err
		}
	}
	return nil
}

// addNormalizer appends a normalizer to p. After an error, p is unusable.
func (p *pipeline) addNormalizer(s stepJSON) (err error) {
	add := func(steps ...normalizeStep) { p.normalizers = append(p.normalizers, steps...) }
	switch s.kind {
	case formNames[nfc], formNames[nfd], formNames[nfkc], formNames[nfkd]:
		add(p.normalForm(form(slices.Index(formNames[:], s.kind))))
	case "Lowercase":
		add(lowercase{})
	case "StripAccents":
		add(remove(pinnedRust().is(combiningMark)))
	case "Nmt":
		add(replaceRunes(nmt))
	case "ByteLevel":
		add(spellBytes{})
	case "Strip":
		var f struct {
			Type  string `json:"type"`
			Left  bool   `json:"strip_left"`
			Right bool   `json:"strip_right"`
		}
		err = s.read(&f)
		add(strip{f.Left, f.Right})
	case "Prepend":
		var f struct {
			Type    string `json:"type"`
			Prepend string `json:"prepend"`
		}
		if err = s.read(&f); err == nil && f.Prepend == "" {
			err = s.refuse()
		}
		add(prepend(f.Prepend))
	case "Replace":
		var f replaceJSON
		var m matcher
		if m, err = f.read(s); err == nil && m.matchesEmpty() {
			err = fmt.Errorf("%s: the pattern matches the empty text, which is not supported because Hugging Face "+
				"tokenizers does not handle it well", s.name)
		}
		add(replace{m, deref(f.Pattern.Regex), []byte(f.Content)})
	case "Precompiled":
		var f struct {
			Type     string `json:"type"`
			Charsmap []byte `json:"precompiled_charsmap"`
		}
		if err = s.read(&f); err != nil {
			return err
		}
		m, err := parseCharsmap(f.Charsmap)
		if err != nil {
			return fmt.Errorf("%s.precompiled_charsmap: %w", s.name, err)
		}
		add(m)
	case "BertNormalizer":
		var f struct {
			Type         string `json:"type"`
			Clean        bool   `json:"clean_text"`
			Chinese      bool   `json:"handle_chinese_chars"`
			StripAccents *bool  `json:"strip_accents"`
			Lowercase    bool   `json:"lowercase"`
		}
		err = s.read(&f)
		if f.Clean {
			add(bertClean(pinnedRust()))
		}
		if f.Chinese {
			add(spaceChinese{pinnedRust()})
		}
		if f.StripAccents == nil && f.Lowercase || isTrue(f.StripAccents) {
			add(p.normalForm(nfd), remove(pinnedRust().is(nonspacingMark)))
		}
		if f.Lowercase {
			add(lowercase{})
		}
	default:
		err = s.refuse()
	}
	return err
}

// normalForm is NFC, NFD, NFKC or NFKD.
type normalForm struct {
	index int // in normalizing.forms
	form  form
}

func (p *pipeline) normalForm(f form) normalForm {
	p.forms++
	return normalForm{p.forms - 1, f}
}

func (n normalForm) normalize(b *normalizing) {
	z := b.forms[n.index]
	if b.origin == 0 {
		b.text = z.normalize(n.form, b.text)
		return
	}
	// The first character becomes one or more characters, and later characters may compose with the
	// last of them.
	runes := runeCount(z.normalize(n.form, b.text[:b.origin]))
	b.text = z.normalize(n.form, b.text)
	b.origin = 0
	for range runes {
		_, size := utf8.DecodeRune(b.text[b.origin:])
		b.origin += size
	}
}

// lowercase maps each character separately, independent of its neighbours.
type lowercase struct{}

func (lowercase) normalize(b *normalizing) { b.rewrite(appendLower) }

// replaceRunes maps each character to another, or removes it if the function returns -1.
type replaceRunes func(r rune) rune

func (f replaceRunes) normalize(b *normalizing) {
	b.rewrite(func(dst, s []byte) []byte {
		for len(s) > 0 {
			r, n := utf8.DecodeRune(s)
			if r = f(r); r >= 0 {
				dst = utf8.AppendRune(dst, r)
			}
			s = s[n:]
		}
		return dst
	})
}

// remove removes the characters for which f is true.
func remove(f func(r rune) bool) replaceRunes {
	return func(r rune) rune {
		if f(r) {
			return -1
		}
		return r
	}
}

// nmt is the Nmt normalizer, after the rules of SentencePiece's nmt_nfkc.
func nmt(r rune) rune {
	switch {
	case r >= 0x01 && r <= 0x08, r == 0x0b, r >= 0x0e && r <= 0x1f, r == 0x7f, r == 0x8f, r == 0x9f:
		return -1
	case r == '\t', r == '\n', r == '\f', r == '\r', r == 0x1680, r >= 0x200b &&
		r <= 0x200f, r == 0x2028, r == 0x2029, r == 0x2581, r == 0xfeff, r == 0xfffd:
		return ' '
	}
	return r
}

// bertClean is clean_text of BertNormalizer.
func bertClean(d *rustData) replaceRunes {
	return func(r rune) rune {
		switch kind := d.kinds.at(r); {
		case r == 0, r == 0xfffd, kind&bertControl != 0:
			return -1
		case kind&bertSpace != 0:
			return ' '
		}
		return r
	}
}

// spaceChinese is handle_chinese_chars of BertNormalizer: a space before and after each.
type spaceChinese struct{ data *rustData }

func (c spaceChinese) normalize(b *normalizing) {
	b.rewrite(func(dst, s []byte) []byte {
		for len(s) > 0 {
			r, n := utf8.DecodeRune(s)
			if c.data.kinds.at(r)&bertChinese != 0 {
				dst = append(append(append(dst, ' '), s[:n]...), ' ')
			} else {
				dst = append(dst, s[:n]...)
			}
			s = s[n:]
		}
		return dst
	})
}

// spellBytes is the ByteLevel normalizer: each byte becomes a character of the byte alphabet.
type spellBytes struct{}

func (spellBytes) normalize(b *normalizing) { b.rewrite(spell) }

// strip removes the white space at the ends.
type strip struct{ left, right bool }

func (s strip) normalize(b *normalizing) {
	if s.left {
		n := leadingWhiteSpace(b.text)
		b.text, b.origin = b.text[n:], max(0, b.origin-n)
	}
	if s.right {
		b.text = b.text[:len(b.text)-trailingWhiteSpace(b.text)]
		b.origin = min(b.origin, len(b.text))
	}
}

// prepend inserts a text at the start, unless the text is empty.
type prepend string

func (p prepend) normalize(b *normalizing) {
	if len(b.text) == 0 {
		return
	}
	out := append(b.next(), p...)
	origin := b.origin
	if origin > 0 {
		origin += len(p)
	}
	b.set(append(out, b.text...), origin)
}

// replaceJSON is Replace, which is a normalizer and a decoder.
type replaceJSON struct {
	Type    string      `json:"type"`
	Pattern patternJSON `json:"pattern"`
	Content string      `json:"content"`
}

// read reads the fields of the step and compiles its pattern.
func (f *replaceJSON) read(s stepJSON) (matcher, error) {
	if err := s.read(f); err != nil {
		return matcher{}, err
	}
	return f.Pattern.compile(s.name)
}

// replace replaces each match by content.
type replace struct {
	matcher
	source  string // the regular expression
	content []byte
}

func (r replace) normalize(b *normalizing) {
	out := b.next()
	done, origin := 0, 0
	for it := r.all(b.text); it.next(); done = it.end {
		if done < b.origin {
			origin = len(out) + min(it.start, b.origin) - done
		}
		out = append(append(out, b.text[done:it.start]...), r.content...)
		if it.end <= b.origin {
			// the replacement of a match originates from the match's last character
			origin = len(out)
		}
	}
	if done < b.origin {
		origin = len(out) + b.origin - done
	}
	b.set(append(out, b.text[done:]...), origin)
}

// patternJSON is the pattern of Split and Replace.
type patternJSON struct {
	Regex  *string `json:"Regex"`
	String *string `json:"String"`
}

func (p patternJSON) compile(name string) (matcher, error) {
	switch {
	case p.String != nil && p.Regex == nil:
		return matcher{literal: []byte(*p.String)}, nil
	case p.Regex != nil && p.String == nil:
		regex, err := compilePattern(*p.Regex)
		if err != nil {
			return matcher{}, fmt.Errorf("%s.pattern.Regex: %w", name, err)
		}
		return matcher{regex: regex}, nil
	}
	return matcher{}, fmt.Errorf("%s.pattern: want one of Regex and String", name)
}

// A matcher finds a literal text or the matches of a regular expression.
type matcher struct {
	literal []byte
	regex   *pattern
}

// matchesEmpty reports whether the pattern matches the empty text at some position of a few sample
// texts.
func (m matcher) matchesEmpty() bool {
	if m.regex == nil {
		return len(m.literal) == 0
	}
	return slices.ContainsFunc([]string{"", "a", " ", "a b", "\u2581", "1.", "\n", "\u00e9"}, func(s string) bool {
		f := m.regex.finder([]byte(s))
		defer f.release()
		for from := 0; from <= len(s); from++ {
			if !utf8.RuneStart((s + "a")[from]) {
				continue
			}
			if start, end, ok := f.find(from); ok && start == end {
				return true
			}
		}
		return false
	})
}

// all returns an iterator over the matches in s, which must be used to the end. An empty match is
// skipped where the previous match ends.
func (m matcher) all(s []byte) matches {
	it := matches{literal: m.literal, s: s, last: -1}
	if m.regex != nil {
		it.finder = m.regex.finder(s)
	}
	return it
}

type matches struct {
	literal    []byte
	finder     *finder // nil for a literal, and after the last match
	s          []byte
	start, end int
	from, last int
}

// next advances to the next match, from start to end.
func (it *matches) next() bool {
	for it.from <= len(it.s) && len(it.s) > 0 {
		start, end, ok := it.find()
		if !ok {
			break
		}
		if start == end && end == it.last {
			_, n := utf8.DecodeRune(it.s[it.from:])
			it.from += max(n, 1)
			continue
		}
		it.start, it.end, it.from, it.last = start, end, end, end
		return true
	}
	it.from = len(it.s) + 1
	if it.finder != nil {
		it.finder.release()
		it.finder = nil
	}
	return false
}

// find returns the leftmost match at or after from.
func (it *matches) find() (start, end int, ok bool) {
	if it.finder != nil {
		return it.finder.find(it.from)
	}
	if i := bytes.Index(it.s[it.from:], it.literal); i >= 0 {
		return it.from + i, it.from + i + len(it.literal), true
	}
	return 0, 0, false
}
