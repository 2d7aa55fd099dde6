package strictjson

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
)

// walk reads a value with a cursor as [json.Unmarshal] reads it into an any.
func walk(t *testing.T, c *Cursor) any {
	t.Helper()
	switch c.Peek() {
	case '{':
		object := map[string]any{}
		if err := c.Elements(func() error {
			name, err := c.Name()
			object[name] = walk(t, c)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return object
	case '[':
		list := []any{}
		if err := c.Elements(func() error {
			list = append(list, walk(t, c))
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return list
	case '"':
		s, err := c.String()
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	var v any
	if err := json.Unmarshal([]byte(c.Skip()), &v); err != nil {
		t.Fatal(err)
	}
	return v
}

var cursorTexts = []string{
	` {"a": [1, -2.5e+3 ,true,null], "b\"\\": {"": "x\u00e9\n]"}, "a": [[],{} , [ ]]} `,
	`[{"{": "}"}, "]", "\\", "\\\"", 0,[[[7]]]]`,
	`"only a string"`, ` 12 `, `{}`, `[ ]`, "[\n1\t,\r2]",
}

func FuzzCursor(f *testing.F) {
	for _, text := range cursorTexts {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var want any
		if strings.ToValidUTF8(text, "") != text || json.Unmarshal([]byte(text), &want) != nil {
			t.Skip()
		}
		c := NewCursor([]byte(text))
		if got := walk(t, c); !reflect.DeepEqual(got, want) {
			t.Errorf("%q: read %v, want %v", text, got, want)
		}
		if rest := text[c.at:]; strings.TrimSpace(rest) != "" {
			t.Errorf("%q: the cursor is before %q, not at the end", text, rest)
		}
		skipping := NewCursor([]byte(text))
		if got := skipping.Skip(); got != strings.Trim(text, " \t\r\n") {
			t.Errorf("%q: skipped %q", text, got)
		}
	})
}

func TestCursorInvalidUTF8(t *testing.T) {
	if _, err := NewCursor([]byte("\"a\xff\"")).String(); err == nil || !strings.Contains(err.Error(), `a\xff`) {
		t.Errorf("error %v, want an error that quotes the string", err)
	}
}
