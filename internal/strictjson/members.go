package strictjson

import (
	"encoding"
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"unicode/utf8"
)

// A members checks JSON text that [encoding/json] has decoded for errors that it accepts: duplicate
// members of an object, names that differ from a field's name only in case, and strings that are
// not UTF-8.
type members struct {
	text []byte
	at   int
}

var (
	jsonUnmarshaler = reflect.TypeFor[json.Unmarshaler]()
	textUnmarshaler = reflect.TypeFor[encoding.TextUnmarshaler]()
)

// value checks the value that starts at m.at, of the Go type t, and moves m.at past it. If t is nil
// or has an UnmarshalJSON method, which has its own rules for names, only strings are checked.
func (m *members) value(t reflect.Type) error {
	for t != nil && t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t != nil && reflect.PointerTo(t).Implements(jsonUnmarshaler) {
		t = nil
	}
	m.space()
	switch m.text[m.at] {
	case '{':
		return m.object(t)
	case '[':
		if t != nil {
			if k := t.Kind(); k == reflect.Slice || k == reflect.Array {
				t = t.Elem()
			} else {
				t = nil
			}
		}
		return m.list(']', func() error { return m.value(t) })
	case '"':
		_, err := m.string()
		return err
	}
	for m.at < len(m.text) && !strings.ContainsRune(",]} \t\r\n", rune(m.text[m.at])) {
		m.at++
	}
	return nil
}

// object checks an object.
func (m *members) object(t reflect.Type) error {
	var fields map[string]reflect.Type // of a struct
	var element reflect.Type           // of a map
	unique := t != nil
	if t != nil && t.Kind() == reflect.Struct {
		fields = fieldsOf(t)
	} else if t != nil && t.Kind() == reflect.Map {
		element = t.Elem()
		unique = !reflect.PointerTo(t.Key()).Implements(textUnmarshaler)
	}
	seen := map[string]bool{}
	return m.list('}', func() error {
		m.space()
		start := m.at
		name, err := m.string()
		if err != nil {
			return err
		}
		if seen[name] && unique {
			return fmt.Errorf("byte %d: duplicate field %q", start, name)
		}
		seen[name] = true
		of := element
		if fields != nil {
			known := false
			if of, known = fields[name]; !known { // the decoder ignores case
				return fmt.Errorf("byte %d: unknown field %q", start, name)
			}
		}
		m.space()
		m.at++ // the colon
		return m.value(of)
	})
}

// list calls do for each element up to the closing bracket.
func (m *members) list(end byte, do func() error) error {
	m.at++
	for m.space(); m.text[m.at] != end; m.space() {
		if m.text[m.at] == ',' {
			m.at++
		}
		if err := do(); err != nil {
			return err
		}
	}
	m.at++
	return nil
}

// string reads a string.
func (m *members) string() (string, error) {
	start, escaped := m.at, false
	for m.at++; m.text[m.at] != '"'; m.at++ {
		if m.text[m.at] == '\\' {
			escaped = true
			m.at++
		}
	}
	m.at++
	text := m.text[start:m.at]
	if !utf8.Valid(text) {
		return "", fmt.Errorf("byte %d: the string is not valid UTF-8: %s", start,
			strconv.QuoteToASCII(string(text[:min(len(text), 40)])))
	}
	if !escaped {
		return string(text[1 : len(text)-1]), nil
	}
	var s string
	err := json.Unmarshal(text, &s)
	return s, err
}

func (m *members) space() {
	for strings.IndexByte(" \t\r\n", m.text[m.at]) >= 0 {
		m.at++
	}
}

// fieldsOf returns the types of a struct's fields by JSON name.
func fieldsOf(t reflect.Type) map[string]reflect.Type {
	fields := map[string]reflect.Type{}
	for _, f := range reflect.VisibleFields(t) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case !f.IsExported() || f.Tag.Get("json") == "-" || f.Anonymous && name == "":
			// the fields of an embedded struct are visible themselves
		case name == "":
			fields[f.Name] = f.Type
		default:
			fields[name] = f.Type
		}
	}
	return fields
}
