package documents

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"unicode/utf16"
	"unicode/utf8"

	"mula/shards"
)

// maxNesting is how deep the objects and arrays of a line may lie in each other; it is encoding/json's limit.
const maxNesting = 10000

// A lineError is what is wrong with a line, and where in it.
type lineError struct {
	kind Kind
	at   int // byte of the line
	err  error
}

func badJSON(at int, format string, args ...any) *lineError {
	return &lineError{BadJSON, at, fmt.Errorf("malformed JSON: "+format, args...)}
}

// A lineScanner finds the id and the text of documents in lines of JSON (RFC 8259). It checks the whole line and decodes only these two
// fields of the outermost object; where a field stands twice, the last counts, as in Python. It keeps its memory from line to line.
//
// It differs from encoding/json in what it refuses: bytes that are not UTF-8 anywhere in the line, and half a surrogate pair escaped in an id
// or a text, both of which encoding/json replaces by U+FFFD.
type lineScanner struct {
	line     []byte
	at       int    // the next byte to look at
	open     []byte // '{' or '[' of every object and array that is not yet closed
	id, text field
	decoded  []byte // the id, if it had to be decoded, and the text
}

// field is where the value of a field stands in the line, quotes included; it is empty if there is none.
type field struct {
	start, end int
	escaped    bool // a string with escapes
}

// scan gives the id and the text of a line. Both lie in the line or in memory of the scanner, until the next scan. The id is empty if there
// is none. On an error of the text the id is still given.
func (s *lineScanner) scan(line []byte) (id, text []byte, bad *lineError) {
	if !utf8.Valid(line) {
		return nil, nil, &lineError{BadUTF8, InvalidUTF8(line), errors.New("the line is not UTF-8; convert the file to UTF-8")}
	}
	s.line, s.at, s.open, s.id, s.text, s.decoded = line, 0, s.open[:0], field{}, field{}, s.decoded[:0]
	if bad := s.parse(); bad != nil {
		return nil, nil, bad
	}
	if id, bad = s.decodeID(); bad != nil {
		return nil, nil, bad
	}
	text, bad = s.decodeText()
	return id, text, bad
}

func (s *lineScanner) decodeID() (id []byte, bad *lineError) {
	f := s.id
	if f.end == 0 {
		return nil, nil
	}
	switch c := s.line[f.start]; {
	case c == 'n':
		return nil, nil
	case c == '"':
		if id, bad = s.decodeString(f); bad != nil {
			return nil, bad
		}
	case c == '-' || '0' <= c && c <= '9':
		id = s.line[f.start:f.end]
	default:
		return nil, &lineError{BadID, f.start, errors.New(`"id" is neither a string nor a number`)}
	}
	if len(id) > shards.MaxOriginLength {
		return nil, &lineError{BadID, f.start, fmt.Errorf(`"id" has %d bytes, at most %d can be kept`, len(id), shards.MaxOriginLength)}
	}
	return id, nil
}

func (s *lineScanner) decodeText() (text []byte, bad *lineError) {
	f := s.text
	if f.end == 0 {
		return nil, &lineError{NoText, 0, errors.New(`the object has no field "text"`)}
	}
	if s.line[f.start] != '"' {
		return nil, &lineError{BadText, f.start, errors.New(`"text" is not a string`)}
	}
	if text, bad = s.decodeString(f); bad != nil {
		return nil, bad
	}
	if len(text) == 0 {
		return nil, &lineError{Empty, f.start, errors.New(`"text" is empty`)}
	}
	return text, nil
}

// parse checks the line and notes where the last id and the last text stand.
func (s *lineScanner) parse() *lineError {
	switch s.space(); {
	case s.at == len(s.line):
		return badJSON(s.at, "the line is empty")
	case s.line[s.at] == '[':
		return badJSON(s.at, "the line begins with an array; documents are objects, one a line (jq -c '.[]' makes such lines of an array)")
	case s.line[s.at] != '{':
		return badJSON(s.at, "the line begins with %s, not with an object", s.found())
	}
	var wanted *field // whose value is being read: &s.id, &s.text or nil
	var start int     // of that value
	member := func() *lineError {
		name, bad := s.key()
		if len(s.open) == 1 {
			wanted = name
		}
		return bad
	}
value:
	for {
		if len(s.open) == 1 {
			start = s.at
		}
		escaped := false
		var bad *lineError
		switch c := s.peek(); {
		case c == '{' || c == '[':
			if len(s.open) == maxNesting {
				return badJSON(s.at, "more than %d objects and arrays lie in each other", maxNesting)
			}
			s.open = append(s.open, c)
			s.at++
			s.space()
			if s.peek() == c+2 { // '}' is '{'+2, ']' is '['+2
				break
			}
			if c == '{' {
				if bad := member(); bad != nil {
					return bad
				}
			}
			continue value
		case c == '"':
			escaped, bad = s.skipString()
		case c == '-' || '0' <= c && c <= '9':
			bad = s.skipNumber()
		default:
			bad = s.skipLiteral()
		}
		if bad != nil {
			return bad
		}
		// After a value: the ends of the containers that it is the last of, then a comma.
		for {
			if len(s.open) == 1 && wanted != nil {
				*wanted = field{start, s.at, escaped}
			}
			s.space()
			in := s.open[len(s.open)-1]
			switch s.peek() {
			case ',':
				s.at++
				s.space()
				if in == '{' {
					if bad := member(); bad != nil {
						return bad
					}
				}
				continue value
			case in + 2:
				s.at++
				s.open = s.open[:len(s.open)-1]
			default:
				return badJSON(s.at, "%s where a comma or %q should be", s.found(), in+2)
			}
			if len(s.open) == 0 {
				if s.space(); s.at < len(s.line) {
					return badJSON(s.at, "%s after the object; there must be one object a line", s.found())
				}
				return nil
			}
		}
	}
}

// key reads the name of a member and the colon, and gives the field of that name if it is one of the two.
func (s *lineScanner) key() (*field, *lineError) {
	start := s.at
	if s.peek() != '"' {
		return nil, badJSON(s.at, "%s where the name of a field should be", s.found())
	}
	escaped, bad := s.skipString()
	if bad != nil {
		return nil, bad
	}
	name := s.line[start+1 : s.at-1]
	if escaped {
		var buf [4 * len(`\u0000`)]byte // the wanted names are not longer, however they are spelt
		if len(name) <= len(buf) {
			name, _ = unescape(buf[:0], name)
		}
	}
	if s.space(); s.peek() != ':' {
		return nil, badJSON(s.at, "%s where a colon should be", s.found())
	}
	s.at++
	s.space()
	switch string(name) {
	case "id":
		return &s.id, nil
	case "text":
		return &s.text, nil
	}
	return nil, nil
}

func (s *lineScanner) space() {
	for s.at < len(s.line) {
		switch s.line[s.at] {
		case ' ', '\t', '\r', '\n':
			s.at++
		default:
			return
		}
	}
}

// peek is the next byte, or 0 at the end of the line.
func (s *lineScanner) peek() byte {
	if s.at < len(s.line) {
		return s.line[s.at]
	}
	return 0
}

// found describes what stands at the next byte, for messages.
func (s *lineScanner) found() string {
	if s.at >= len(s.line) {
		return "the end of the line"
	}
	r, _ := utf8.DecodeRune(s.line[s.at:])
	if r == '\ufeff' {
		return "a byte order mark"
	}
	return fmt.Sprintf("%q", r)
}

// skipString passes over the string that begins at the next byte.
func (s *lineScanner) skipString() (escaped bool, bad *lineError) {
	start := s.at
	at := start + 1
	for {
		if at < len(s.line) && s.line[at] != '\\' { // in many scripts escapes come one after the other
			at += indexSpecial(s.line[at:])
		}
		if at == len(s.line) {
			return false, badJSON(start, "the line ends inside the string that begins here")
		}
		switch c := s.line[at]; c {
		case '"':
			s.at = at + 1
			return escaped, nil
		case '\\':
			escaped = true
			n := escapeLength(s.line[at:])
			if n == 0 {
				return false, badJSON(at, "%q is no escape sequence", s.line[at:min(at+6, len(s.line))])
			}
			at += n
		default:
			return false, badJSON(at, "the control character 0x%02x must be escaped in a string", c)
		}
	}
}

// escapeLength is the length of the escape sequence at the start of b, which has a backslash there, or 0 if it is none.
func escapeLength(b []byte) int {
	if len(b) < 2 {
		return 0
	}
	switch b[1] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return 2
	case 'u':
		if _, ok := hex4(b); ok {
			return 6
		}
	}
	return 0
}

// hex4 is the code unit of the sequence \uXXXX at the start of b.
func hex4(b []byte) (r rune, ok bool) {
	if len(b) < 6 || b[0] != '\\' || b[1] != 'u' {
		return 0, false
	}
	h3, h2, h1, h0 := hexDigit[b[2]], hexDigit[b[3]], hexDigit[b[4]], hexDigit[b[5]]
	return rune(h3)<<12 | rune(h2)<<8 | rune(h1)<<4 | rune(h0), h3|h2|h1|h0 < 16
}

// hexDigit is the value of each hexadecimal digit, and 255 of every other byte.
var hexDigit = func() (table [256]uint8) {
	for c := range table {
		switch {
		case '0' <= c && c <= '9':
			table[c] = uint8(c - '0')
		case 'a' <= c && c <= 'f':
			table[c] = uint8(c - 'a' + 10)
		case 'A' <= c && c <= 'F':
			table[c] = uint8(c - 'A' + 10)
		default:
			table[c] = 255
		}
	}
	return table
}()

func (s *lineScanner) skipNumber() *lineError {
	start := s.at
	digits := func() bool {
		first := s.at
		for '0' <= s.peek() && s.peek() <= '9' {
			s.at++
		}
		return s.at > first
	}
	if s.peek() == '-' {
		s.at++
	}
	ok := true
	if s.peek() == '0' {
		s.at++
	} else {
		ok = digits()
	}
	if ok && s.peek() == '.' {
		s.at++
		ok = digits()
	}
	if ok && (s.peek() == 'e' || s.peek() == 'E') {
		s.at++
		if s.peek() == '+' || s.peek() == '-' {
			s.at++
		}
		ok = digits()
	}
	if !ok {
		return badJSON(s.at, "%s in the number that begins at byte %d of the line", s.found(), start)
	}
	return nil
}

func (s *lineScanner) skipLiteral() *lineError {
	for _, literal := range []string{"true", "false", "null"} {
		if end := s.at + len(literal); end <= len(s.line) && string(s.line[s.at:end]) == literal {
			s.at = end
			return nil
		}
	}
	return badJSON(s.at, "%s where a value should be", s.found())
}

// decodeString gives the content of a string, which lies in the line if it has no escapes, and else at the end of s.decoded.
func (s *lineScanner) decodeString(f field) ([]byte, *lineError) {
	raw := s.line[f.start+1 : f.end-1]
	if !f.escaped {
		return raw, nil
	}
	start := len(s.decoded)
	decoded, at := unescape(s.decoded, raw)
	if decoded == nil {
		return nil, &lineError{BadUTF8, f.start + 1 + at, fmt.Errorf("%s escapes half of a surrogate pair, which is no character", raw[at:at+6])}
	}
	s.decoded = decoded
	return decoded[start:], nil
}

// unescape appends the content of a string, which has passed skipString, to dst. If it has half a surrogate pair, the result is nil and the
// place in raw.
func unescape(dst, raw []byte) ([]byte, int) {
	for at := 0; ; {
		if at < len(raw) && raw[at] != '\\' { // in many scripts escapes come one after the other
			n := indexSpecial(raw[at:])
			dst = append(dst, raw[at:at+n]...)
			at += n
		}
		if at == len(raw) {
			return dst, at
		}
		switch c := raw[at+1]; c {
		case 'b':
			dst = append(dst, '\b')
		case 'f':
			dst = append(dst, '\f')
		case 'n':
			dst = append(dst, '\n')
		case 'r':
			dst = append(dst, '\r')
		case 't':
			dst = append(dst, '\t')
		case 'u':
			r, _ := hex4(raw[at:])
			if utf16.IsSurrogate(r) {
				low, _ := hex4(raw[at+6:])
				if r = utf16.DecodeRune(r, low); r == utf8.RuneError {
					return nil, at
				}
				at += 6
			}
			dst = utf8.AppendRune(dst, r)
			at += 4
		default: // a quote, a backslash or a slash stands for itself
			dst = append(dst, c)
		}
		at += 2
	}
}

// indexSpecial is the place of the first quote, backslash or control character in b, or its length: of eight bytes at a time, by the
// arithmetic that finds zero bytes in a word.
func indexSpecial(b []byte) int {
	const ones, highs = 0x0101010101010101, 0x8080808080808080
	at := 0
	for ; at+8 <= len(b); at += 8 {
		x := binary.LittleEndian.Uint64(b[at:])
		quote, backslash := x^ones*'"', x^ones*'\\'
		// A byte's high bit is set here if the byte is 0 (quote, backslash) or below 32 (x); above the first such byte also by a borrow.
		if found := ((quote-ones)&^quote | (backslash-ones)&^backslash | (x-ones*32)&^x) & highs; found != 0 {
			return at + bits.TrailingZeros64(found)/8
		}
	}
	for ; at < len(b); at++ {
		if c := b[at]; c == '"' || c == '\\' || c < ' ' {
			break
		}
	}
	return at
}

// InvalidUTF8 is the first byte of text that is not valid UTF-8, or its length if there is none.
func InvalidUTF8(text []byte) int {
	at := 0
	for at < len(text) {
		r, n := utf8.DecodeRune(text[at:])
		if r == utf8.RuneError && n == 1 {
			break
		}
		at += n
	}
	return at
}
