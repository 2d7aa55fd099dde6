package strictjson

import (
	"encoding/json"
	"strings"
	"testing"
)

type value struct {
	Seed  uint64          `json:"seed"`
	Name  string          `json:"name"`
	List  []int           `json:"list"`
	Share float64         `json:"share"`
	Inner inner           `json:"inner"`
	All   []*inner        `json:"all"`
	By    map[string]int  `json:"by"`
	Raw   json.RawMessage `json:"raw"`
	embedded
}

type inner struct {
	On bool `json:"on"`
}

type embedded struct {
	Deep int `json:"deep"`
}

func TestDecode(t *testing.T) {
	var v value
	if err := Decode([]byte(` {"seed": 7, "list": [1], "inner": {"on": true}} `), &v); err != nil || v.Seed != 7 ||
		!v.Inner.On {
		t.Errorf("%+v, %v", v, err)
	}
	for text, want := range map[string]string{
		``:                                `byte 0: unexpected end of file`,
		`{"seed": 7`:                      `byte 10: unexpected end of file`,
		`{"seed": 7} x`:                   `byte 12: `,
		`{"seed": 7} {}`:                  `unexpected data after the JSON value`,
		`{"seed" 7}`:                      `byte 9: `,
		`{"seed": -1}`:                    `byte 11: seed: want a whole number of 0 or more, found number -1`,
		`{"seed": 18446744073709551616}`:  `seed: want a whole number from 0 to 18446744073709551615, found number 18446744073709551616`,
		`{"seed": 1.0}`:                   `seed: want a whole number of 0 or more, found number 1.0`,
		`{"seed": 1e3}`:                   `seed: want a whole number of 0 or more, found number 1e3`,
		`{"seed": 010}`:                   `byte 11: invalid character '1' after`,
		`{"seed": 1_0}`:                   `byte 11: invalid character '_' after`,
		`{"seed": 0x10}`:                  `byte 11: invalid character 'x' after`,
		`{"list": [9223372036854775808]}`: `list: want a whole number from -9223372036854775808 to 9223372036854775807, found number 9223372036854775808`,
		`{"share": 1e400}`:                `share: want a number of at most 1.8e308, found number 1e400`,
		`{"share": NaN}`:                  `byte 11: invalid character 'N'`,
		`{"seed": "x"}`:                   `seed: want a whole number of 0 or more, found string`,
		`{"list": [1.5]}`:                 `list: want a whole number, found number 1.5`,
		`{"list": 3}`:                     `list: want an array, found number`,
		`{"name": 3}`:                     `name: want a string, found number`,
		`{"share": "1"}`:                  `share: want a number, found string`,
		`{"inner": {"on": "yes"}}`:        `inner.on: want true or false, found string`,
		`[]`:                              `want an object, found array`,
		`{"sed": 1}`:                      `unknown field "sed"`,
		`{"Seed": 1}`:                     `byte 1: unknown field "Seed"`,
		`{"seed": 1, "seed": 1}`:          `byte 12: duplicate field "seed"`,
		`{"seed":1,"s\u0065ed":2}`:        `byte 10: duplicate field "seed"`,
		"{\"name\": \"a\xff\"}":           `byte 9: the string is not valid UTF-8: "\"a\xff\""`,
		"{\"na\xffme\": \"a\"}":           `unknown field "na`,
		`{"inner": {"ON": true}}`:         `byte 11: unknown field "ON"`,
		`{"all": [{"on": true}, {"on": true, "on": true}]}`: `byte 36: duplicate field "on"`,
		`{"by": {"a": 1, "b": 2, "a": 3}}`:                  `byte 24: duplicate field "a"`,
	} {
		if err := Decode([]byte(text), &value{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
	if err := Decode([]byte(`{"raw": {"a": 1, "a": [{}, -1.5e3, "\"]", null]}, "by": {}, "all": [], "deep": 2, "name": "\u00e9\\"}`), &v); err != nil || v.Deep != 2 {
		t.Errorf("%+v, %v", v, err)
	}
	if err := DecodeLoosely([]byte(`{"sed": 1, "seed": 2}`), &v); err != nil || v.Seed != 2 {
		t.Errorf("loosely: %+v, %v", v, err)
	}
}

func TestValue(t *testing.T) {
	var n int
	if err := Value([]byte("7"), &n); err != nil || n != 7 {
		t.Errorf("%d, %v", n, err)
	}
	for text, want := range map[string]string{
		`"7"`:                 "want a whole number",
		`7.0`:                 "want a whole number",
		`9223372036854775808`: "want a whole number from -9223372036854775808 to 9223372036854775807",
	} {
		if err := Value([]byte(text), &n); err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}
