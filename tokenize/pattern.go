package tokenize

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"
)

// A pattern is a regular expression of Split or Replace in Hugging Face tokenizers: in the language
// of Oniguruma with Ruby's syntax, and with its Unicode classes. It is immutable after compilation
// and safe for concurrent use.
type pattern struct {
	program []instruction
	first   *runeBits // first characters of a match; nil if it may be empty
	slots   int       // states that finders remember
	finders sync.Pool
}

// compilePattern compiles a regular expression. Constructs that it does not match exactly like
// Oniguruma are errors that name the byte.
func compilePattern(regex string) (*pattern, error) {
	p := &patternParser{text: regex, data: pinnedOniguruma()}
	tree, err := p.alternatives()
	if err == nil && p.at < len(regex) {
		err = p.refused(p.at, "a ) without a (")
	}
	if err == nil {
		_, err = p.checkFolds(tree, nil)
	}
	if err != nil {
		return nil, err
	}
	c := &patternCompiler{p: &pattern{}, bits: map[string]*runeBits{}, ofNode: map[*node]*runeBits{}}
	if err := c.emit(tree); err != nil {
		return nil, fmt.Errorf("regular expression %q: %w", regex, err)
	}
	c.add(instruction{op: opMatch})
	if set, empty := tree.starts(); !empty {
		c.p.first = c.bitsOf(set.normalized())
	}
	c.p.finders.New = func() any { return &finder{p: c.p} }
	return c.p, nil
}

// finder returns a finder for the matches in s, which must be valid UTF-8 and unchanged until the
// finder is released.
func (p *pattern) finder(s []byte) *finder {
	f := p.finders.Get().(*finder)
	f.s = s
	return f
}

// node is a part of a parsed regular expression.
type node struct {
	kind     nodeKind
	set      runeSet // oneOf
	nodes    []*node // sequence, choice; the one inside repeat, look and atomic
	min, max int     // repeat; max is unbounded or a number; min of back
	lazy     bool    // repeat
	folded   bool    // oneOf: a character that is matched case-insensitively
	at       int     // of folded: its byte offset
	negative bool    // look
	anchor   anchor  // atAnchor
}

type nodeKind uint8

const (
	sequence nodeKind = iota // of none: empty
	choice
	oneOf
	repeat
	look
	atomic
	atAnchor
	back // min characters
)

const unbounded = -1

// maxRepeat bounds a count in braces, maxProgram the instructions of a pattern, and maxDepth the
// nesting.
const (
	maxRepeat  = 1000
	maxProgram = 20000
	maxDepth   = 100
)

type anchor uint8

const (
	lineStart     anchor = iota // ^
	lineEnd                     // $
	textStart                   // \A
	textEnd                     // \z
	textEndOrLine               // \Z
	wordEdge                    // \b
	noWordEdge                  // \B
)

// patternParser reads a regular expression.
type patternParser struct {
	text   string
	at     int
	depth  int
	data   *onigurumaData
	fold   bool // (?i)
	dotAll bool // (?m), which other dialects call s
}

// refused returns an error for the construct that starts at that byte.
func (p *patternParser) refused(at int, format string, args ...any) error {
	return fmt.Errorf("regular expression %q, byte %d: %s is not supported", p.text, at, fmt.Sprintf(format, args...))
}

func (p *patternParser) more() bool { return p.at < len(p.text) }

func (p *patternParser) peek(s string) bool { return strings.HasPrefix(p.text[p.at:], s) }

func (p *patternParser) take(s string) bool {
	if !p.peek(s) {
		return false
	}
	p.at += len(s)
	return true
}

func (p *patternParser) rune() rune {
	r, n := utf8.DecodeRuneInString(p.text[p.at:])
	p.at += n
	return r
}

// alternatives parses up to the end of the text or the ) of the group.
func (p *patternParser) alternatives() (*node, error) {
	if p.depth++; p.depth > maxDepth {
		return nil, p.refused(p.at, "nesting more than %d deep", maxDepth)
	}
	defer func() { p.depth-- }()
	out := &node{kind: choice}
	for {
		branch, err := p.branch()
		if err != nil {
			return nil, err
		}
		out.nodes = append(out.nodes, branch)
		if !p.take("|") {
			break
		}
	}
	if len(out.nodes) == 1 {
		return out.nodes[0], nil
	}
	return out, nil
}

func (p *patternParser) branch() (*node, error) {
	out := &node{kind: sequence}
	for p.more() && !p.peek("|") && !p.peek(")") {
		at := p.at
		if p.take("(?") {
			// Options without a group apply to the rest of the group, alternatives included.
			if rest, ok, err := p.options(); err != nil || ok {
				if err == nil {
					out.nodes = append(out.nodes, rest)
				}
				return out, err
			}
			p.at = at
		}
		n, err := p.atom()
		if err != nil {
			return nil, err
		}
		if n, err = p.quantified(n); err != nil {
			return nil, err
		}
		out.nodes = append(out.nodes, n)
	}
	if len(out.nodes) == 1 {
		return out.nodes[0], nil
	}
	return out, nil
}

// checkFolds rejects successive characters that match one character case-insensitively, as ss
// matches ß, even if they are in different groups. run is the characters before the node; the
// returned characters precede the node's successor.
func (p *patternParser) checkFolds(n *node, run []*node) ([]*node, error) {
	switch {
	case n.folded:
		run = append(run, n)
		for _, c := range slices.Sorted(maps.Keys(p.data.many)) {
			several := p.data.many[c]
			same := len(run) >= len(several)
			for i := len(several) - 1; same && i >= 0; i-- {
				written := run[len(run)-len(several)+i].set[0].lo
				same = written == several[i] || slices.Contains(p.data.folds[several[i]], written)
			}
			if same {
				return nil, p.refused(n.at, "(?i) with the end of %q, which also matches %q,", string(several),
					string(c))
			}
		}
		return run, nil
	case n.kind == sequence:
		var err error
		for _, m := range n.nodes {
			if run, err = p.checkFolds(m, run); err != nil {
				return nil, err
			}
		}
		return run, nil
	}
	for _, m := range n.nodes {
		if _, err := p.checkFolds(m, nil); err != nil {
			return nil, err
		}
	}
	return nil, nil
}

// options parses options after "(?" without their own group, and the expression that they apply to.
// ok is false if there are no such options.
func (p *patternParser) options() (rest *node, ok bool, err error) {
	fold, dotAll, known := p.flags()
	if !known || !p.take(")") {
		return nil, false, nil
	}
	oldFold, oldDotAll := p.fold, p.dotAll
	p.fold, p.dotAll = fold, dotAll
	rest, err = p.alternatives()
	p.fold, p.dotAll = oldFold, oldDotAll
	return rest, true, err
}

// flags parses the letters of options.
func (p *patternParser) flags() (fold, dotAll, known bool) {
	fold, dotAll = p.fold, p.dotAll
	on := true
	start := p.at
	for {
		switch {
		case p.take("i"):
			fold = on
		case p.take("m"):
			dotAll = on
		case on && p.take("-"):
			on = false
		default:
			return fold, dotAll, p.at > start
		}
	}
}

// atom parses an expression that a quantifier can follow.
func (p *patternParser) atom() (*node, error) {
	at := p.at
	switch r := p.rune(); r {
	case '(':
		return p.group(at)
	case '[':
		set, err := p.class(at)
		return &node{kind: oneOf, set: set}, err
	case '.':
		if p.dotAll {
			return &node{kind: oneOf, set: p.data.properties["any"]}, nil
		}
		return &node{kind: oneOf, set: runeSet{{'\n', '\n'}}.complement()}, nil
	case '^':
		return &node{kind: atAnchor, anchor: lineStart}, nil
	case '$':
		return &node{kind: atAnchor, anchor: lineEnd}, nil
	case '*', '+', '?':
		return nil, p.refused(at, "%c without an operand", r)
	case '\\':
		if p.more() {
			if i := strings.IndexByte("AzZbB", p.text[p.at]); i >= 0 {
				p.at++
				return &node{kind: atAnchor, anchor: [...]anchor{textStart, textEnd, textEndOrLine, wordEdge,
					noWordEdge}[i]}, nil
			}
		}
		set, r, err := p.escape(at, false)
		if err != nil {
			return nil, err
		}
		if set != nil {
			return &node{kind: oneOf, set: set}, nil
		}
		return p.character(at, r)
	case '{':
		p.at = at
		if _, _, ok := p.interval(); ok {
			return nil, p.refused(at, "a count in braces without an operand")
		}
		p.at = at + 1
		return p.character(at, r)
	case utf8.RuneError:
		return nil, p.refused(at, "U+FFFD or invalid UTF-8")
	default:
		return p.character(at, r)
	}
}

// character returns the node of a character. Until it is compiled, its set starts with the written
// character.
func (p *patternParser) character(at int, r rune) (*node, error) {
	out := &node{kind: oneOf, set: runeSet{{r, r}}, folded: p.fold, at: at}
	if p.fold {
		if several, ok := p.data.many[r]; ok {
			return nil, p.refused(at, "(?i) with %q, which also matches %q,", string(r), string(several))
		}
		for _, a := range p.data.folds[r] {
			if a != r {
				out.set = append(out.set, runeRange{a, a})
			}
		}
	}
	return out, nil
}

// group parses a group after its "(".
func (p *patternParser) group(at int) (*node, error) {
	fold, dotAll := p.fold, p.dotAll
	defer func() { p.fold, p.dotAll = fold, dotAll }()
	out, behind := &node{kind: sequence}, false
	switch {
	case !p.take("?"):
	case p.take(":"):
	case p.take("="):
		out.kind = look
	case p.take("!"):
		out.kind, out.negative = look, true
	case p.take("<="):
		out.kind, behind = look, true
	case p.take("<!"):
		out.kind, behind, out.negative = look, true, true
	case p.take(">"):
		out.kind = atomic
	default:
		var known bool
		if p.fold, p.dotAll, known = p.flags(); !known || !p.take(":") {
			return nil, p.refused(at, "a group that starts with %q", p.text[at:min(at+3, len(p.text))])
		}
	}
	inner, err := p.alternatives()
	if err != nil {
		return nil, err
	}
	if !p.take(")") {
		return nil, p.refused(at, "a ( without a )")
	}
	out.nodes = []*node{inner}
	if !behind {
		return out, nil
	}
	// Each alternative of a lookbehind has its own width.
	branches := []*node{inner}
	if inner.kind == choice {
		branches = inner.nodes
	}
	choices := &node{kind: choice}
	for _, b := range branches {
		w, ok := b.width()
		if !ok {
			return nil, p.refused(at, "a lookbehind of variable length")
		}
		choices.nodes = append(choices.nodes, &node{kind: sequence, nodes: []*node{{kind: back, min: w}, b}})
	}
	out.nodes = []*node{choices}
	return out, nil
}

// escape parses an escape after the backslash: a set, or a character if the set is nil.
func (p *patternParser) escape(at int, inClass bool) (runeSet, rune, error) {
	if !p.more() {
		return nil, 0, p.refused(at, "a \\ at the end")
	}
	property := func(name string, not bool) (runeSet, rune, error) {
		set, ok := p.data.properties[propertyName(name)]
		if !ok {
			return nil, 0, p.refused(at, "the property %q", name)
		}
		if inClass && propertyName(name) == "word" {
			set = set.intersect(p.data.properties["wordbutnotinbrackets"].complement())
		}
		if not {
			set = set.complement()
		}
		return set, 0, nil
	}
	switch r := p.rune(); r {
	case 't':
		return nil, '\t', nil
	case 'n':
		return nil, '\n', nil
	case 'r':
		return nil, '\r', nil
	case 'f':
		return nil, '\f', nil
	case 'v':
		return nil, '\v', nil
	case 'a':
		return nil, '\a', nil
	case 'e':
		return nil, 0x1b, nil
	case 's', 'S':
		return property("White_Space", r == 'S')
	case 'd', 'D':
		return property("Nd", r == 'D')
	case 'w', 'W':
		return property("Word", r == 'W')
	case 'h', 'H':
		set := runeSet{{'0', '9'}, {'A', 'F'}, {'a', 'f'}}
		if r == 'H' {
			set = set.complement()
		}
		return set, 0, nil
	case 'p', 'P':
		if !p.take("{") {
			return nil, 0, p.refused(at, "\\%c without {", r)
		}
		not := r == 'P'
		if p.take("^") {
			not = !not
		}
		name, _, ok := strings.Cut(p.text[p.at:], "}")
		if !ok {
			return nil, 0, p.refused(at, "\\%c{ without a }", r)
		}
		p.at += len(name) + 1
		return property(name, not)
	case 'x', 'u':
		digits, limit := "", 2
		switch {
		case r == 'u':
			limit = 4
			digits = p.text[p.at:min(p.at+4, len(p.text))]
			p.at += len(digits)
			if len(digits) < 4 {
				digits = ""
			}
		case p.take("{"):
			limit = 8
			digits, _, _ = strings.Cut(p.text[p.at:], "}")
			p.at = min(p.at+len(digits)+1, len(p.text))
		default:
			for len(digits) < limit && p.more() && strings.IndexByte("0123456789ABCDEFabcdef", p.text[p.at]) >= 0 {
				digits += p.text[p.at : p.at+1]
				p.at++
			}
		}
		v, err := strconv.ParseUint(digits, 16, 32)
		if err != nil || len(digits) > limit || v > utf8.MaxRune || !utf8.ValidRune(rune(v)) || limit == 2 &&
			v >= utf8.RuneSelf {
			return nil, 0, p.refused(at, "%q as a code point", p.text[at:p.at])
		}
		return nil, rune(v), nil
	default:
		if r == utf8.RuneError || '0' <= r && r <= '9' || r < utf8.RuneSelf && r|0x20 >= 'a' && r|0x20 <= 'z' {
			return nil, 0, p.refused(at, "\\%c", r)
		}
		return nil, r, nil
	}
}

// class parses a class in brackets, after its "[", with all characters that match
// case-insensitively.
func (p *patternParser) class(at int) (runeSet, error) {
	set, not, err := p.classSet(at)
	if err != nil {
		return nil, err
	}
	if p.fold {
		var more runeSet
		for _, r := range p.data.folded {
			if set.has(r) {
				for _, a := range p.data.folds[r] {
					more = append(more, runeRange{a, a})
				}
			}
		}
		for _, c := range slices.Sorted(maps.Keys(p.data.many)) {
			several := p.data.many[c]
			if !not && set.has(c) {
				return nil, p.refused(at, "(?i) with a class that has %q, which also matches %q,", string(c),
					string(several))
			}
		}
		set = append(slices.Clone(set), more...).normalized()
	}
	if not {
		set = set.complement()
	}
	return set, nil
}

// classSet parses a class after its "[". not means that the result is its complement.
func (p *patternParser) classSet(at int) (set runeSet, not bool, err error) {
	if p.depth++; p.depth > maxDepth {
		return nil, false, p.refused(p.at, "nesting more than %d deep", maxDepth)
	}
	defer func() { p.depth-- }()
	not = p.take("^")
	var both []runeSet // operands of && before this one
	if p.peek("]") {
		return nil, false, p.refused(p.at, "an empty class, or a class that starts with ],")
	}
	set = runeSet{}
	for begins := true; ; begins = false {
		here := p.at
		if !p.more() {
			return nil, false, p.refused(at, "a [ without a ]")
		}
		switch {
		case p.take("]"):
			set = set.normalized()
			for _, o := range both {
				set = set.intersect(o)
			}
			return set, not, nil
		case p.take("&&"):
			if begins || p.peek("]") || p.peek("&") {
				return nil, false, p.refused(here, "&& without two operands")
			}
			both = append(both, set.normalized())
			set = runeSet{}
			if p.peek("-") {
				return nil, false, p.refused(p.at, "- after &&")
			}
			continue
		case p.take("[:"):
			not := p.take("^")
			name, _, ok := strings.Cut(p.text[p.at:], ":]")
			properties := map[string]string{
				"alpha": "alphabetic", "alnum": "alnum", "space": "whitespace", "punct": "posixpunct",
				"lower": "lowercase", "upper": "uppercase",
				"digit": "nd", "cntrl": "cc",
			}
			inner, known := p.data.properties[properties[name]]
			if !ok || !known {
				return nil, false, p.refused(here,
					"a class that starts with [: but is not a known POSIX class")
			}
			p.at += len(name) + 2
			if not {
				inner = inner.complement()
			}
			set = append(set, inner...)
			continue
		case p.take("["):
			inner, not, err := p.classSet(here)
			if err != nil {
				return nil, false, err
			}
			if not {
				inner = inner.complement()
			}
			set = append(set, inner...)
			continue
		}
		inner, lo, err := p.classCharacter()
		if err != nil {
			return nil, false, err
		}
		if inner != nil {
			if p.peek("-") && !p.peek("-]") {
				return nil, false, p.refused(here, "a range that starts with a class")
			}
			set = append(set, inner...)
			continue
		}
		if lo == '-' && p.text[here] == '-' && !begins && !p.peek("]") {
			return nil, false, p.refused(here,
				"- that is neither first nor last in a class, nor between two characters,")
		}
		hi := lo
		if p.peek("-") && !p.peek("-]") {
			p.at++
			if p.peek("[") || p.peek("&&") {
				return nil, false, p.refused(here, "a range that ends with a class")
			}
			inner, r, err := p.classCharacter()
			if err != nil {
				return nil, false, err
			}
			if inner != nil || r < lo {
				return nil, false, p.refused(here, "a range that ends with a class or before its start")
			}
			hi = r
		}
		set = append(set, runeRange{lo, hi})
	}
}

// classCharacter parses a character of a class, or a class in an escape.
func (p *patternParser) classCharacter() (runeSet, rune, error) {
	at := p.at
	if !p.more() {
		return nil, 0, p.refused(at, "a class without a ]")
	}
	r := p.rune()
	if r == utf8.RuneError {
		return nil, 0, p.refused(at, "U+FFFD or invalid UTF-8")
	}
	if r != '\\' {
		return nil, r, nil
	}
	if p.take("b") {
		return nil, '\b', nil
	}
	return p.escape(at, true)
}

// interval parses a count in braces. It returns false, and may have advanced, if there is no count.
func (p *patternParser) interval() (lo, hi int, ok bool) {
	if !p.take("{") {
		return 0, 0, false
	}
	inner, _, ok := strings.Cut(p.text[p.at:], "}")
	if !ok {
		return 0, 0, false
	}
	p.at += len(inner) + 1
	number := func(s string) int {
		for _, c := range []byte(s) {
			if c < '0' || c > '9' {
				return -2
			}
		}
		v, err := strconv.Atoi(s)
		if err != nil {
			return -2
		}
		return v
	}
	first, second, two := strings.Cut(inner, ",")
	lo = number(first)
	switch {
	case !two:
		hi = lo
	case second == "":
		hi = unbounded
	default:
		hi = number(second)
		if first == "" {
			lo = 0
		}
	}
	return lo, hi, lo >= 0 && hi >= unbounded
}

// quantified parses a quantifier if one follows the node.
func (p *patternParser) quantified(n *node) (*node, error) {
	at := p.at
	out := &node{kind: repeat, nodes: []*node{n}, max: unbounded}
	possessive, braces := false, false
	switch {
	case p.take("*"):
	case p.take("+"):
		out.min = 1
	case p.take("?"):
		out.max = 1
	case p.peek("{"):
		lo, hi, ok := p.interval()
		if !ok {
			p.at = at // a literal brace
			return n, nil
		}
		if hi != unbounded && hi < lo || lo > maxRepeat || hi > maxRepeat {
			return nil, p.refused(at, "the count %s", p.text[at:p.at])
		}
		out.min, out.max = lo, hi
		braces = true
	default:
		return n, nil
	}
	switch {
	case n.kind == atAnchor || n.kind == look:
		return nil, p.refused(at, "repetition of an empty expression")
	case p.take("?"):
		if braces && out.min == out.max {
			// Ruby has no lazy form of a fixed count: this is an optional repetition.
			out = &node{kind: repeat, nodes: []*node{out}, max: 1}
		} else {
			out.lazy = true
		}
	case p.take("+"):
		possessive = !braces
		if braces {
			// Ruby has no possessive form of a count: this repeats it.
			out = &node{kind: repeat, nodes: []*node{out}, min: 1, max: unbounded}
		}
	}
	for m := out; m.kind == repeat; m = m.nodes[0] {
		if _, empty := m.nodes[0].starts(); empty && m.max == unbounded {
			return nil, p.refused(at, "unlimited repetition of an expression that may be empty")
		}
	}
	if p.more() && strings.IndexByte("*+?", p.text[p.at]) >= 0 {
		return nil, p.refused(p.at, "repetition of a repetition")
	}
	if here := p.at; p.peek("{") {
		if _, _, ok := p.interval(); ok {
			return nil, p.refused(here, "repetition of a repetition")
		}
		p.at = here
	}
	if possessive {
		out = &node{kind: atomic, nodes: []*node{out}}
	}
	return out, nil
}

// starts returns the possible first characters of a match of the node, and whether the match may be
// empty.
func (n *node) starts() (set runeSet, empty bool) {
	switch n.kind {
	case oneOf:
		return n.set, false
	case choice:
		for _, m := range n.nodes {
			s, e := m.starts()
			set = append(set, s...)
			empty = empty || e
		}
		return set, empty
	case repeat:
		set, empty = n.nodes[0].starts()
		return set, empty || n.min == 0
	case look, atAnchor, back:
		return nil, true
	}
	for _, m := range n.nodes {
		s, e := m.starts()
		set = append(set, s...)
		if !e {
			return set, false
		}
	}
	return set, true
}

// width returns the number of characters in every match of the node, if it is fixed.
func (n *node) width() (int, bool) {
	switch n.kind {
	case oneOf:
		return 1, true
	case look, atAnchor, back:
		return 0, true
	case repeat:
		w, ok := n.nodes[0].width()
		return w * n.min, ok && n.min == n.max
	case choice:
		w, ok := n.nodes[0].width()
		for _, m := range n.nodes[1:] {
			v, ok2 := m.width()
			ok = ok && ok2 && v == w
		}
		return w, ok
	}
	sum := 0
	for _, m := range n.nodes {
		w, ok := m.width()
		if !ok {
			return 0, false
		}
		sum += w
	}
	return sum, true
}
