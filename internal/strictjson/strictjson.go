// Package strictjson reads files of one JSON value, with messages that name the byte and need no knowledge of Go.
package strictjson

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
)

// Decode reads the one JSON value that data holds into v. Fields that v does not have, and anything after the value, are errors.
func Decode(data []byte, v any) error { return decode(data, v, true) }

// DecodeLoosely is Decode, but passes over fields that v does not have.
func DecodeLoosely(data []byte, v any) error { return decode(data, v, false) }

func decode(data []byte, v any, strict bool) error {
	d := json.NewDecoder(bytes.NewReader(data))
	if strict {
		d.DisallowUnknownFields()
	}
	err := d.Decode(v)
	if err == nil {
		if _, err := d.Token(); !errors.Is(err, io.EOF) {
			return fmt.Errorf("byte %d: something follows the end of the JSON value", d.InputOffset())
		}
		return nil
	}
	var syntax *json.SyntaxError
	var mismatch *json.UnmarshalTypeError
	switch {
	case errors.As(err, &syntax):
		return fmt.Errorf("byte %d: %w", syntax.Offset, err)
	case errors.As(err, &mismatch):
		return fmt.Errorf("byte %d: %s", mismatch.Offset, words(mismatch))
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("byte %d: the file ends before the JSON value does", len(data))
	}
	return errors.New(strings.TrimPrefix(err.Error(), "json: ")) // an unknown field, or the error of an UnmarshalJSON method
}

// words says what is of another type than it must be.
func words(e *json.UnmarshalTypeError) string {
	want := "an object"
	switch k := e.Type.Kind(); {
	case k >= reflect.Int && k <= reflect.Int64:
		want = "a whole number"
	case k >= reflect.Uint && k <= reflect.Uint64:
		want = "a whole number of 0 or more"
	case k == reflect.Float32 || k == reflect.Float64:
		want = "a number"
	case k == reflect.String:
		want = "a string"
	case k == reflect.Bool:
		want = "true or false"
	case k == reflect.Slice || k == reflect.Array:
		want = "an array"
	}
	if e.Field == "" {
		return fmt.Sprintf("want %s, found %s", want, e.Value)
	}
	return fmt.Sprintf("%s: want %s, found %s", e.Field, want, e.Value)
}
