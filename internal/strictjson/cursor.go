package strictjson

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// A Cursor walks through JSON text that [encoding/json] has accepted, such as the argument of an
// UnmarshalJSON method. It reads large objects and arrays several times as fast as encoding/json.
// Its methods need the kind of value that they name.
type Cursor struct {
	text string
	at   int
}

// NewCursor returns a cursor at the value that text consists of.
func NewCursor(text []byte) *Cursor { return &Cursor{text: string(text)} }

// Peek skips white space, and returns the first byte of the value at the cursor.
func (c *Cursor) Peek() byte {
	for {
		switch b := c.text[c.at]; b {
		case ' ', '\t', '\r', '\n':
			c.at++
		default:
			return b
		}
	}
}

// Elements calls do at each element of the array, or at each member of the object, at the cursor.
// do must move past it.
func (c *Cursor) Elements(do func() error) error {
	c.Peek()
	c.at++
	for b := c.Peek(); b != ']' && b != '}'; b = c.Peek() {
		if b == ',' {
			c.at++
		}
		if err := do(); err != nil {
			return err
		}
	}
	c.at++
	return nil
}

// Name reads the name of a member of an object, and moves to its value.
func (c *Cursor) Name() (string, error) {
	name, err := c.String()
	c.Peek()
	c.at++ // the colon
	return name, err
}

// String reads a string. A string that is not UTF-8 is an error.
func (c *Cursor) String() (string, error) {
	c.Peek()
	start := c.at
	escaped := c.skipString()
	text := c.text[start:c.at]
	if !utf8.ValidString(text) {
		return "", fmt.Errorf("the string is not valid UTF-8: %s", strconv.QuoteToASCII(text[:min(len(text), 40)]))
	}
	if !escaped {
		return text[1 : len(text)-1], nil
	}
	var s string
	err := json.Unmarshal([]byte(text), &s)
	return s, err
}

// skipString moves past a string, and reports whether it has escapes.
func (c *Cursor) skipString() (escaped bool) {
	for c.at++; c.text[c.at] != '"'; c.at++ {
		if c.text[c.at] == '\\' {
			escaped = true
			c.at++
		}
	}
	c.at++
	return escaped
}

// Skip moves past the value at the cursor, of any kind, and returns its text.
func (c *Cursor) Skip() string {
	c.Peek()
	start, depth := c.at, 0
	for c.at < len(c.text) {
		switch c.text[c.at] {
		case '"':
			c.skipString()
		case '{', '[':
			depth++
			c.at++
		case '}', ']':
			depth--
			c.at++
		case ',', ':', ' ', '\t', '\r', '\n':
			c.at++
		default:
			c.skipWord()
		}
		if depth == 0 {
			break
		}
	}
	return c.text[start:c.at]
}

// skipWord moves past a number, true, false or null.
func (c *Cursor) skipWord() {
	for c.at < len(c.text) && !strings.ContainsRune(",]} \t\r\n", rune(c.text[c.at])) {
		c.at++
	}
}
