package strictjson

import (
	"encoding"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
)

// A members checks JSON text that [encoding/json] has decoded for errors that it accepts: duplicate
// members of an object, names that differ from a field's name only in case, and strings that are
// not UTF-8.
type members struct{ Cursor }

var (
	jsonUnmarshaler = reflect.TypeFor[json.Unmarshaler]()
	textUnmarshaler = reflect.TypeFor[encoding.TextUnmarshaler]()
)

// value checks the value at the cursor, of the Go type t, and moves past it. If t is nil or has an
// UnmarshalJSON method, which has its own rules for names, only strings are checked.
func (m *members) value(t reflect.Type) error {
	for t != nil && t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t != nil && reflect.PointerTo(t).Implements(jsonUnmarshaler) {
		t = nil
	}
	switch m.Peek() {
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
		return m.Elements(func() error { return m.value(t) })
	case '"':
		start := m.at
		_, err := m.String()
		return at(start, err)
	}
	m.skipWord()
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
	return m.Elements(func() error {
		m.Peek()
		start := m.at
		name, err := m.Name()
		if err != nil {
			return at(start, err)
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
		return m.value(of)
	})
}

// at adds the offset of a string to an error of reading it.
func at(start int, err error) error {
	if err != nil {
		return fmt.Errorf("byte %d: %w", start, err)
	}
	return nil
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
