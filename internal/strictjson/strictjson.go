// Package strictjson decodes files of one JSON value. Its errors name the byte offset and do not
// mention Go types.
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

// Decode decodes data, which must contain exactly one JSON value, into v. It returns an error for
// unknown fields (names are case-sensitive), duplicate fields, strings that are not UTF-8, and data
// after the value. These checks do not apply to values that an UnmarshalJSON method reads.
func Decode(data []byte, v any) error { return decode(data, v, true) }

// DecodeLoosely is like Decode, but ignores unknown fields.
func DecodeLoosely(data []byte, v any) error { return decode(data, v, false) }

func decode(data []byte, v any, strict bool) error {
	d := json.NewDecoder(bytes.NewReader(data))
	if strict {
		d.DisallowUnknownFields()
	}
	err := d.Decode(v)
	if err == nil {
		if _, err := d.Token(); !errors.Is(err, io.EOF) {
			return fmt.Errorf("byte %d: unexpected data after the JSON value", d.InputOffset())
		}
		if strict {
			m := members{*NewCursor(data)}
			return m.value(reflect.TypeOf(v))
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
		return fmt.Errorf("byte %d: unexpected end of file", len(data))
	}
	// an unknown field, or the error of an UnmarshalJSON method
	return errors.New(strings.TrimPrefix(err.Error(), "json: "))
}

// Value decodes one JSON value into v, such as a field that was kept as a [json.RawMessage]. If the
// value has the wrong type, the error names the type that v needs.
func Value(raw json.RawMessage, v any) error {
	err := json.Unmarshal(raw, v)
	var mismatch *json.UnmarshalTypeError
	if errors.As(err, &mismatch) {
		return errors.New("want " + want(mismatch))
	}
	return err
}

// words describes a type mismatch.
func words(e *json.UnmarshalTypeError) string {
	if e.Field == "" {
		return fmt.Sprintf("want %s, found %s", want(e), e.Value)
	}
	return fmt.Sprintf("%s: want %s, found %s", e.Field, want(e), e.Value)
}

// want describes the type of value that was expected.
func want(e *json.UnmarshalTypeError) string {
	want := "an object"
	number, isNumber := strings.CutPrefix(e.Value, "number ")
	whole := isNumber && !strings.ContainsAny(number, ".eE")
	bits := 0
	if k := e.Type.Kind(); k >= reflect.Int && k <= reflect.Float64 {
		bits = e.Type.Bits()
	}
	switch k := e.Type.Kind(); {
	case k >= reflect.Int && k <= reflect.Int64 && whole:
		want = fmt.Sprintf("a whole number from %d to %d", -(int64(1) << (bits - 1)), int64(1)<<(bits-1)-1)
	case k >= reflect.Int && k <= reflect.Int64:
		want = "a whole number"
	case k >= reflect.Uint && k <= reflect.Uint64 && whole && number[0] != '-':
		want = fmt.Sprintf("a whole number from 0 to %d", ^uint64(0)>>(64-bits))
	case k >= reflect.Uint && k <= reflect.Uint64:
		want = "a whole number of 0 or more"
	case k == reflect.Float64 && isNumber:
		want = "a number of at most 1.8e308"
	case k == reflect.Float32 && isNumber:
		want = "a number of at most 3.4e38"
	case k == reflect.Float32 || k == reflect.Float64:
		want = "a number"
	case k == reflect.String:
		want = "a string"
	case k == reflect.Bool:
		want = "true or false"
	case k == reflect.Slice || k == reflect.Array:
		want = "an array"
	}
	return want
}
