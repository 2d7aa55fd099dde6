package strictjson

import (
	"strings"
	"testing"
)

type value struct {
	Seed  uint64  `json:"seed"`
	Name  string  `json:"name"`
	List  []int   `json:"list"`
	Share float64 `json:"share"`
	Inner struct {
		On bool `json:"on"`
	} `json:"inner"`
}

func TestDecode(t *testing.T) {
	var v value
	if err := Decode([]byte(` {"seed": 7, "list": [1], "inner": {"on": true}} `), &v); err != nil || v.Seed != 7 || !v.Inner.On {
		t.Errorf("%+v, %v", v, err)
	}
	for text, want := range map[string]string{
		``:                         `byte 0: the file ends before`,
		`{"seed": 7`:               `byte 10: the file ends before`,
		`{"seed": 7} x`:            `byte 12: `,
		`{"seed": 7} {}`:           `something follows the end`,
		`{"seed" 7}`:               `byte 9: `,
		`{"seed": -1}`:             `byte 11: seed: want a whole number of 0 or more, found number -1`,
		`{"seed": "x"}`:            `seed: want a whole number of 0 or more, found string`,
		`{"list": [1.5]}`:          `list: want a whole number, found number 1.5`,
		`{"list": 3}`:              `list: want an array, found number`,
		`{"name": 3}`:              `name: want a string, found number`,
		`{"share": "1"}`:           `share: want a number, found string`,
		`{"inner": {"on": "yes"}}`: `inner.on: want true or false, found string`,
		`[]`:                       `want an object, found array`,
		`{"sed": 1}`:               `unknown field "sed"`,
	} {
		if err := Decode([]byte(text), &value{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
	if err := DecodeLoosely([]byte(`{"sed": 1, "seed": 2}`), &v); err != nil || v.Seed != 2 {
		t.Errorf("loosely: %+v, %v", v, err)
	}
}
