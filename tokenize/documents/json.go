package documents

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"unicode/utf16"
	"unicode/utf8"

	"mula/shards"
)

// maxNesting is the maximum nesting of the objects and arrays of a line; it is encoding/json's
// limit.
const maxNesting = 10000

// A lineError is an error in a line, with its position.
type lineError struct {
	kind Kind
	at   int // byte of the line
	err  error
}

func badJSON(at int, format string, args ...any) *lineError {
	return &lineError{BadJSON, at, fmt.Errorf("malformed JSON: "+format, args...)}
}

// A lineScanner finds the id and the text of documents in lines of JSON (RFC 8259). It validates
// the whole line but decodes only these two fields. If a field occurs twice, the last one counts,
// as in Python. It reuses its memory for later lines.
//
// Unlike encoding/json, it rejects bytes that are not UTF-8 anywhere in the line, and half a
// surrogate pair escaped in an id or a text. encoding/json replaces both by U+FFFD.
type lineScanner struct {
	names   [2]string   // the fields of the text and the id, as given by the caller
	paths   [2][]string // the member names on the paths to them
	longest int         // longest name in paths, in bytes

	line   []byte
	at     int         // the next byte to examine
	open   []container // every open object and array
	fields [2]field
	high   uint64 // has high bits if a string has bytes beyond ASCII
	name   []byte // memory of names with escapes
}

// The fields of a scanner.
const (
	textField = iota
	idField
)

// field is the position of a field's value in the line, quotes included; it is empty if the field
// is missing.
type field struct {
	start, end int
	escaped    bool // a string with escapes
}

// A container is an open object or array of the line. Bits 0 and 1 are set for the fields whose
// path leads through it, bits 2 and 3 for the fields whose value is the current member, and bit 4
// for an object.
type container uint8

const (
	leads  container = 1
	value  container = 4
	object container = 16
)

// close returns the byte that ends the container.
func (c container) close() byte {
	if c&object != 0 {
		return '}'
	}
	return ']'
}

// find sets the fields of the text and the id.
func (s *lineScanner) find(text, id string) error {
	s.names, s.longest = [2]string{text, id}, 0
	for i, name := range s.names {
		var err error
		if s.paths[i], err = splitPath(name); err != nil {
			return err
		}
		for _, part := range s.paths[i] {
			s.longest = max(s.longest, len(part))
		}
	}
	return nil
}

// splitPath cuts a dotted path into names.
func splitPath(path string) ([]string, error) {
	parts := []string{""}
	for i := 0; i < len(path); i++ {
		last := &parts[len(parts)-1]
		switch c := path[i]; {
		case c == '.':
			parts = append(parts, "")
		case c != '\\':
			*last += path[i : i+1]
		case i+1 < len(path) && (path[i+1] == '.' || path[i+1] == '\\'):
			i++
			*last += path[i : i+1]
		default:
			return nil,
				fmt.Errorf("the field %q has a backslash that escapes neither a dot nor a backslash; write \\\\ "+
					"for a backslash in a name", path)
		}
	}
	if slices.Contains(parts, "") {
		return nil,
			fmt.Errorf("the field %q has an empty name next to a dot; write \\. for a dot in a name", path)
	}
	return parts, nil
}

// scan returns the id and the text of a line. Both are slices of the line, which decoding changes.
// The id is empty if there is none. If the text is invalid, scan still returns the id.
func (s *lineScanner) scan(line []byte) (id, text []byte, bad *lineError) {
	s.line, s.at, s.open, s.fields, s.high = line, 0, s.open[:0], [2]field{}, 0
	bad = s.parse()
	// Outside of strings, bytes beyond ASCII are not JSON. So a valid line has none there, and
	// s.high shows those in strings.
	if (bad != nil || s.high&highs != 0) && !utf8.Valid(line) {
		return nil, nil, &lineError{BadUTF8, InvalidUTF8(line), errors.New("the line is not UTF-8")}
	}
	if bad != nil {
		return nil, nil, bad
	}
	if id, bad = s.decodeID(); bad != nil {
		return nil, nil, bad
	}
	text, bad = s.decodeText()
	return id, text, bad
}

func (s *lineScanner) decodeID() (id []byte, bad *lineError) {
	f := s.fields[idField]
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
		return nil, &lineError{BadID, f.start, fmt.Errorf("%q is neither a string nor a number", s.names[idField])}
	}
	if err := checkID(s.names[idField], id); err != nil {
		return nil, &lineError{BadID, f.start, err}
	}
	return id, nil
}

// checkID rejects an id that is too long for a shard.
func checkID(name string, id []byte) error {
	if len(id) > shards.MaxOriginLength {
		return fmt.Errorf("%q has %d bytes, and the limit is %d", name, len(id), shards.MaxOriginLength)
	}
	return nil
}

func (s *lineScanner) decodeText() (text []byte, bad *lineError) {
	f, name := s.fields[textField], s.names[textField]
	if f.end == 0 {
		return nil, &lineError{NoText, 0, fmt.Errorf("the object has no field %q", name)}
	}
	if s.line[f.start] != '"' {
		return nil, &lineError{BadText, f.start, fmt.Errorf("%q is not a string", name)}
	}
	if text, bad = s.decodeString(f); bad != nil {
		return nil, bad
	}
	if len(text) == 0 {
		return nil, &lineError{Empty, f.start, fmt.Errorf("%q is empty", name)}
	}
	return text, nil
}

// parse validates the line and records the positions of the last id and the last text.
func (s *lineScanner) parse() *lineError {
	switch s.space(); {
	case s.at == len(s.line):
		return badJSON(s.at, "the line is empty")
	case s.line[s.at] == '[':
		return badJSON(s.at, "the line starts with an array; each line must be an object (the format json reads "+
			"arrays, and jq -c '.[]' makes lines of them)")
	case s.line[s.at] != '{':
		return badJSON(s.at, "the line starts with %s instead of an object", s.found())
	}
	through := 3 * leads // fields whose path leads through the next value
next:
	for {
		escaped := false
		var bad *lineError
		switch c := s.peek(); {
		case c == '{' || c == '[':
			if len(s.open) == maxNesting {
				return badJSON(s.at, "objects and arrays are nested more than %d deep", maxNesting)
			}
			s.at++
			s.space()
			if c == '{' {
				s.open = append(s.open, object|through)
			} else {
				s.open = append(s.open, 0)
			}
			through = 0
			if s.peek() == c+2 { // '}' is '{'+2, ']' is '['+2
				break
			}
			if c == '{' {
				if through, bad = s.key(); bad != nil {
					return bad
				}
			}
			continue next
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
		// After a value: the ends of the containers that it completes, then a comma.
		for {
			in := &s.open[len(s.open)-1]
			if *in&(3*value) != 0 {
				s.note(in, escaped)
			}
			s.space()
			switch end := in.close(); s.peek() {
			case ',':
				s.at++
				s.space()
				through = 0
				if *in&object != 0 {
					if through, bad = s.key(); bad != nil {
						return bad
					}
				}
				continue next
			case end:
				s.at++
				s.open = s.open[:len(s.open)-1]
			default:
				return badJSON(s.at, "found %s, expected a comma or %q", s.found(), end)
			}
			if len(s.open) == 0 {
				if s.space(); s.at < len(s.line) {
					return badJSON(s.at, "found %s after the object; write one object per line", s.found())
				}
				return nil
			}
		}
	}
}

// note ends the values of fields that are members of the container.
func (s *lineScanner) note(in *container, escaped bool) {
	for i := range s.fields {
		if *in&(value<<i) != 0 {
			s.fields[i].end, s.fields[i].escaped = s.at, escaped
		}
	}
	*in &^= 3 * value
}

// key parses the name of a member and the colon. It records the start of a field, and returns the
// fields whose path leads through the value.
func (s *lineScanner) key() (through container, bad *lineError) {
	start := s.at
	if s.peek() != '"' {
		return 0, badJSON(s.at, "found %s, expected the name of a field", s.found())
	}
	escaped, bad := s.skipString()
	if bad != nil {
		return 0, bad
	}
	name := s.line[start+1 : s.at-1]
	if s.space(); s.peek() != ':' {
		return 0, badJSON(s.at, "found %s, expected a colon", s.found())
	}
	s.at++
	s.space()
	depth := len(s.open)
	in := &s.open[depth-1]
	if *in&(3*leads) == 0 {
		return 0, nil
	}
	if escaped && len(name) <= s.longest*len(`\u0000`) {
		s.name = append(s.name[:0], name...)
		name, _ = unescape(s.name)
	}
	for i, path := range s.paths {
		if *in&(leads<<i) == 0 || string(name) != path[depth-1] {
			continue
		}
		s.fields[i] = field{}
		if depth < len(path) {
			through |= leads << i
		} else {
			s.fields[i].start = s.at
			*in |= value << i
		}
	}
	return through, nil
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

// peek returns the next byte, or 0 at the end of the line.
func (s *lineScanner) peek() byte {
	if s.at < len(s.line) {
		return s.line[s.at]
	}
	return 0
}

// found describes the next byte for messages.
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

// skipString skips the string that starts at the next byte. It finds quotes and backslashes with
// the vector instructions of bytes.IndexByte, and control characters and bytes beyond ASCII eight
// bytes at a time.
func (s *lineScanner) skipString() (escaped bool, bad *lineError) {
	start := s.at
	at, quote := start+1, start
	for {
		if quote < at {
			n := bytes.IndexByte(s.line[at:], '"')
			if n < 0 {
				quote = len(s.line)
			} else {
				quote = at + n
			}
		}
		if at == quote || s.line[at] != '\\' { // in many scripts, escapes are consecutive
			n := bytes.IndexByte(s.line[at:quote], '\\')
			if n < 0 {
				break
			}
			at += n
		}
		escaped = true
		n := escapeLength(s.line[at:])
		if n == 0 {
			if bad := s.controls(start+1, at); bad != nil {
				return false, bad
			}
			return false, badJSON(at, "%q is not an escape sequence", s.line[at:min(at+6, len(s.line))])
		}
		at += n
	}
	if quote == len(s.line) {
		return false, badJSON(start, "the line ends inside the string that starts here")
	}
	s.at = quote + 1
	return escaped, s.controls(start+1, quote)
}

// controls rejects control characters in a range of the line. It records bytes beyond ASCII in
// s.high.
func (s *lineScanner) controls(from, to int) *lineError {
	b := s.line[from:to]
	// high bits: of a byte below 32, and above the first such byte also by a borrow; of a byte from
	// 128 on
	var low, high uint64
	for len(b) >= 32 {
		w, x, y, z := binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:]),
			binary.LittleEndian.Uint64(b[16:]), binary.LittleEndian.Uint64(b[24:])
		low |= (w-ones*32)&^w | (x-ones*32)&^x | (y-ones*32)&^y | (z-ones*32)&^z
		high |= w | x | y | z
		b = b[32:]
	}
	for len(b) >= 8 {
		w := binary.LittleEndian.Uint64(b)
		low |= (w - ones*32) &^ w
		high |= w
		b = b[8:]
	}
	for _, c := range b {
		if c < ' ' {
			low = highs
		}
		high |= uint64(c)
	}
	s.high |= high
	if low&highs == 0 {
		return nil
	}
	at := from
	for s.line[at] >= ' ' {
		at++
	}
	return badJSON(at, "the control character 0x%02x must be escaped in a string", s.line[at])
}

// escapeLength returns the length of the escape sequence at the start of b, which starts with a
// backslash, or 0 if it is invalid.
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

// hex4 returns the code unit of the sequence \uXXXX at the start of b.
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
		return badJSON(s.at, "found %s in the number that starts at byte %d of the line", s.found(), start)
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
	return badJSON(s.at, "found %s, expected a value", s.found())
}

// decodeString returns the content of a string, decoded in place in the line.
func (s *lineScanner) decodeString(f field) ([]byte, *lineError) {
	raw := s.line[f.start+1 : f.end-1]
	if !f.escaped {
		return raw, nil
	}
	decoded, at := unescape(raw)
	if decoded == nil {
		return nil, &lineError{BadUTF8, f.start + 1 + at,
			fmt.Errorf("%s escapes half of a surrogate pair, which is not "+
				"a character", raw[at:at+6])}
	}
	return decoded, nil
}

// unescape decodes the content of a string, which skipString has validated, in place: every escape
// is at least as long as its character. If there is half a surrogate pair, the result is nil and
// its offset in raw.
func unescape(raw []byte) ([]byte, int) {
	dst := raw[:0]
	for at := 0; ; {
		if at < len(raw) && raw[at] != '\\' { // in many scripts, escapes are consecutive
			n := bytes.IndexByte(raw[at:], '\\')
			if n < 0 {
				n = len(raw) - at
			}
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
		default: // a quote, a backslash or a slash represents itself
			dst = append(dst, c)
		}
		at += 2
	}
}

// For eight bytes at a time.
const ones, highs = 0x0101010101010101, 0x8080808080808080

// indexSpecial returns the index of the first quote, backslash or control character in b, or the
// length of b. It processes eight bytes at a time, by the arithmetic that finds zero bytes in a
// word.
func indexSpecial(b []byte) int {
	at := 0
	for ; at+8 <= len(b); at += 8 {
		x := binary.LittleEndian.Uint64(b[at:])
		quote, backslash := x^ones*'"', x^ones*'\\'
		// A byte's high bit is set here if the byte is 0 (quote, backslash) or below 32 (x); above
		// the first such byte also by a borrow.
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

// InvalidUTF8 returns the offset of the first byte of text that is not valid UTF-8, or the length
// of text if it is valid.
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
