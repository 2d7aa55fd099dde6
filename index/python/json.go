// Package python formats and parses text exactly like Python, for the descriptions whose hashes
// name the index files of Megatron-LM and related programs: floats like repr, and JSON like
// json.dumps(indent=4).
package python

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// A Value is a JSON value: [Null], [Bool], [Int], [Number], [String], [List] or [Object].
type Value interface {
	// dump appends the value in the format of json.dumps(indent=4) at a nesting depth.
	dump(text []byte, depth int) []byte
}

// Null is Python's None.
type Null struct{}

// Bool is True or False.
type Bool bool

// Int is an integer, written without a point: 1.
type Int int64

// Number is a float, always written with a point or an exponent: 1.0.
type Number float64

// String is text. Bytes that are not UTF-8 are encoded like Python's surrogateescape, as in file
// names: 0xff is \udcff. A lone surrogate, which JSON can represent and UTF-8 cannot, is stored in
// the three bytes of its generalized UTF-8 encoding.
type String string

// List is a list or a tuple.
type List []Value

// Object is a dict, in insertion order.
type Object []Member

// A Member is one entry of an [Object].
type Member struct {
	Key   string
	Value Value
}

// Get returns the value of a key, or nil if the key does not exist.
func (o Object) Get(key string) Value {
	for _, m := range o {
		if m.Key == key {
			return m.Value
		}
	}
	return nil
}

// Dumps formats a value like Python's json.dumps(v, indent=4): each member on its own line, ASCII
// only, no newline at the end. A nil Value is null.
func Dumps(v Value) string { return string(dump(nil, v, 0)) }

func dump(text []byte, v Value, depth int) []byte {
	if v == nil {
		v = Null{}
	}
	return v.dump(text, depth)
}

func (Null) dump(text []byte, _ int) []byte { return append(text, "null"...) }

func (b Bool) dump(text []byte, _ int) []byte { return strconv.AppendBool(text, bool(b)) }

func (i Int) dump(text []byte, _ int) []byte { return strconv.AppendInt(text, int64(i), 10) }

func (f Number) dump(text []byte, _ int) []byte {
	switch v := float64(f); {
	case math.IsNaN(v):
		return append(text, "NaN"...)
	case math.IsInf(v, 1):
		return append(text, "Infinity"...)
	case math.IsInf(v, -1):
		return append(text, "-Infinity"...)
	default:
		return append(text, Float(v)...)
	}
}

func (s String) dump(text []byte, _ int) []byte { return quote(text, string(s)) }

func (l List) dump(text []byte, depth int) []byte {
	if len(l) == 0 {
		return append(text, "[]"...)
	}
	text = append(text, '[')
	for i, v := range l {
		text = newLine(text, i, depth+1)
		text = dump(text, v, depth+1)
	}
	return append(newLine(text, 0, depth), ']')
}

func (o Object) dump(text []byte, depth int) []byte {
	if len(o) == 0 {
		return append(text, "{}"...)
	}
	text = append(text, '{')
	for i, m := range o {
		text = newLine(text, i, depth+1)
		text = append(quote(text, m.Key), ": "...)
		text = dump(text, m.Value, depth+1)
	}
	return append(newLine(text, 0, depth), '}')
}

// newLine starts the line of the i-th member, after a comma if it is not the first.
func newLine(text []byte, i, depth int) []byte {
	if i > 0 {
		text = append(text, ',')
	}
	text = append(text, '\n')
	for range depth {
		text = append(text, "    "...)
	}
	return text
}

// quote appends a string and escapes everything outside printable ASCII, like
// json.dumps(ensure_ascii=True).
func quote(text []byte, s string) []byte {
	text = append(text, '"')
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		if r == utf8.RuneError && n == 1 {
			if u, ok := surrogate(s[i:]); ok {
				r, n = u, 3
			} else {
				r = 0xdc00 + rune(s[i])
			}
		}
		i += n
		switch {
		case r == '"' || r == '\\':
			text = append(text, '\\', byte(r))
		case r == '\n':
			text = append(text, `\n`...)
		case r == '\r':
			text = append(text, `\r`...)
		case r == '\t':
			text = append(text, `\t`...)
		case r == '\b':
			text = append(text, `\b`...)
		case r == '\f':
			text = append(text, `\f`...)
		case ' ' <= r && r <= '~':
			text = append(text, byte(r))
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			text = fmt.Appendf(text, `\u%04x\u%04x`, high, low)
		default:
			text = fmt.Appendf(text, `\u%04x`, r)
		}
	}
	return append(text, '"')
}

// surrogate decodes a surrogate in its generalized three-byte UTF-8 encoding.
func surrogate(s string) (rune, bool) {
	if len(s) < 3 || s[0] != 0xed || s[1] < 0xa0 || s[1] > 0xbf || s[2]&0xc0 != 0x80 {
		return 0, false
	}
	return 0xd000 | rune(s[1]&0x3f)<<6 | rune(s[2]&0x3f), true
}

// maxDepth bounds the nesting that Parse accepts; Python's parser has a similar limit.
const maxDepth = 900

// Parse parses one JSON value like Python's json.loads. NaN, Infinity and -Infinity are numbers.
// Lone surrogates are allowed. A number without point and exponent is an [Int], and any other
// number is a [Number]. For duplicate member names, the last value is kept at the position of the
// first. Integers beyond 64 bits are an error. Errors name the byte, from 1. If [Dumps] produced
// the text, Dumps(Parse(text)) returns it unchanged.
func Parse(text []byte) (Value, error) {
	if !utf8.Valid(text) {
		return nil, errors.New("the JSON text is not UTF-8")
	}
	p := parser{text: text}
	v, err := p.value(0)
	if err == nil {
		p.blanks()
		if p.at < len(text) {
			err = errors.New("text after the end of the JSON value")
		}
	}
	if err != nil {
		return nil, fmt.Errorf("byte %d: %w", p.at+1, err)
	}
	return v, nil
}

// A parser parses text from byte at. After an error, at is the byte for the message.
type parser struct {
	text []byte
	at   int
}

func (p *parser) blanks() {
	for p.at < len(p.text) {
		switch p.text[p.at] {
		case ' ', '\t', '\n', '\r':
			p.at++
		default:
			return
		}
	}
}

// peek returns the next byte, 0 at the end; a 0 in the text is an error wherever peek is used.
func (p *parser) peek() byte {
	if p.at < len(p.text) {
		return p.text[p.at]
	}
	return 0
}

func (p *parser) literal(s string) bool {
	if !bytes.HasPrefix(p.text[p.at:], []byte(s)) {
		return false
	}
	p.at += len(s)
	return true
}

func (p *parser) value(depth int) (Value, error) {
	p.blanks()
	if depth > maxDepth {
		return nil, fmt.Errorf("nested more than %d levels deep", maxDepth)
	}
	switch c := p.peek(); {
	case p.at == len(p.text):
		return nil, errors.New("the text ends where a value should start")
	case c == '{':
		return p.object(depth)
	case c == '[':
		return p.list(depth)
	case c == '"':
		s, err := p.str()
		return String(s), err
	case p.literal("null"):
		return Null{}, nil
	case p.literal("true"):
		return Bool(true), nil
	case p.literal("false"):
		return Bool(false), nil
	case p.literal("NaN"):
		return Number(math.NaN()), nil
	case p.literal("Infinity"):
		return Number(math.Inf(1)), nil
	case p.literal("-Infinity"):
		return Number(math.Inf(-1)), nil
	case c == '-' || digit(c):
		return p.number()
	}
	return nil, errors.New("want a value: an object, a list, a string, a number, true, false or null")
}

func (p *parser) list(depth int) (Value, error) {
	p.at++
	l := List{}
	p.blanks()
	if p.literal("]") {
		return l, nil
	}
	for {
		v, err := p.value(depth + 1)
		if err != nil {
			return nil, err
		}
		l = append(l, v)
		p.blanks()
		if p.literal("]") {
			return l, nil
		}
		if !p.literal(",") {
			return nil, errors.New("want , or ] after an element of a list")
		}
	}
}

func (p *parser) object(depth int) (Value, error) {
	p.at++
	o := Object{}
	place := make(map[string]int)
	p.blanks()
	if p.literal("}") {
		return o, nil
	}
	for {
		p.blanks()
		if p.peek() != '"' {
			return nil, errors.New("want the name of a member in quotes")
		}
		key, err := p.str()
		if err != nil {
			return nil, err
		}
		p.blanks()
		if !p.literal(":") {
			return nil, errors.New("want : after the name of a member")
		}
		v, err := p.value(depth + 1)
		if err != nil {
			return nil, err
		}
		if i, ok := place[key]; ok {
			o[i].Value = v
		} else {
			place[key] = len(o)
			o = append(o, Member{key, v})
		}
		p.blanks()
		if p.literal("}") {
			return o, nil
		}
		if !p.literal(",") {
			return nil, errors.New("want , or } after a member of an object")
		}
	}
}

func (p *parser) number() (Value, error) {
	start := p.at
	if p.peek() == '-' {
		p.at++
	}
	digits := func() bool {
		from := p.at
		for digit(p.peek()) {
			p.at++
		}
		return p.at > from
	}
	if !p.literal("0") && !digits() {
		return nil, errors.New("want a digit after -")
	}
	whole := true
	if p.peek() == '.' {
		whole = false
		p.at++
		if !digits() {
			return nil, errors.New("want a digit after the point")
		}
	}
	if c := p.peek(); c == 'e' || c == 'E' {
		whole = false
		p.at++
		if c := p.peek(); c == '+' || c == '-' {
			p.at++
		}
		if !digits() {
			return nil, errors.New("want a digit in the exponent")
		}
	}
	text := string(p.text[start:p.at])
	if whole {
		i, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			p.at = start
			return nil, errors.New("the integer does not fit 64 bits")
		}
		return Int(i), nil
	}
	// the syntax is valid; out of range is ±Inf or 0, as in Python
	v, _ := strconv.ParseFloat(text, 64)
	return Number(v), nil
}

// str parses a string from its opening quote.
func (p *parser) str() (string, error) {
	p.at++
	var s []byte
	var high rune // a high surrogate that may be followed by its low surrogate; otherwise 0
	flush := func() {
		if high != 0 {
			s = appendSurrogate(s, high)
			high = 0
		}
	}
	for {
		if p.at == len(p.text) {
			return "", errors.New("the text ends inside a string")
		}
		c := p.text[p.at]
		switch {
		case c == '"':
			flush()
			p.at++
			return string(s), nil
		case c < 0x20:
			return "", fmt.Errorf("byte 0x%02x must be escaped in a string", c)
		case c != '\\':
			flush()
			s = append(s, c)
			p.at++
			continue
		}
		r, err := p.escape()
		if err != nil {
			return "", err
		}
		if high != 0 && r >= 0xdc00 && r < 0xe000 {
			s = utf8.AppendRune(s, utf16.DecodeRune(high, r))
			high = 0
			continue
		}
		flush()
		switch {
		case r >= 0xd800 && r < 0xdc00:
			high = r
		case r >= 0xdc00 && r < 0xe000:
			s = appendSurrogate(s, r)
		default:
			s = utf8.AppendRune(s, r)
		}
	}
}

// escape parses an escape sequence from its backslash.
func (p *parser) escape() (rune, error) {
	p.at++
	const plain, means = `"\/bfnrt`, "\"\\/\b\f\n\r\t"
	c := p.peek()
	if i := bytes.IndexByte([]byte(plain), c); i >= 0 {
		p.at++
		return rune(means[i]), nil
	}
	if c != 'u' {
		return 0, errors.New(`unknown escape; want one of \" \\ \/ \b \f \n \r \t \uXXXX`)
	}
	p.at++
	var r rune
	for range 4 {
		c := p.peek()
		switch {
		case digit(c):
			c -= '0'
		case 'a' <= c && c <= 'f':
			c -= 'a' - 10
		case 'A' <= c && c <= 'F':
			c -= 'A' - 10
		default:
			return 0, errors.New(`want four hexadecimal digits after \u`)
		}
		r = r<<4 | rune(c)
		p.at++
	}
	return r, nil
}

func appendSurrogate(s []byte, r rune) []byte {
	return append(s, 0xe0|byte(r>>12), 0x80|byte(r>>6)&0xbf, 0x80|byte(r)&0x3f)
}
