package python

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestDumpsOfPython(t *testing.T) {
	for _, c := range readGolden(t).Values {
		v, err := Parse([]byte(*c.given))
		if err != nil {
			t.Errorf("%s: %v", *c.given, err)
			continue
		}
		if got := Dumps(v); got != *c.want {
			t.Errorf("%s:\n%s\nPython writes\n%s", *c.given, got, *c.want)
		}
	}
}

func TestParseLikePython(t *testing.T) {
	for _, c := range readGolden(t).Texts {
		v, err := Parse([]byte(*c.given))
		switch {
		case c.want == nil && err == nil:
			t.Errorf("%q: Python refuses it, read as %s", *c.given, Dumps(v))
		case c.want == nil && !strings.HasPrefix(err.Error(), "byte "):
			t.Errorf("%q: %v does not name the byte", *c.given, err)
		case c.want != nil && err != nil:
			t.Errorf("%q: %v; Python reads it", *c.given, err)
		case c.want != nil && Dumps(v) != *c.want:
			t.Errorf("%q:\n%s\nPython writes\n%s", *c.given, Dumps(v), *c.want)
		}
	}
}

func TestParseErrors(t *testing.T) {
	for _, test := range []struct{ text, want string }{
		{"[1, 2,]", "byte 7: want a value"},
		{"{\"a\": 1,\n 'b'}", "byte 11: want the name of a member in quotes"},
		{"[9223372036854775808]", "byte 2: the integer does not fit 64 bits"},
		{"\"\xff\"", "not UTF-8"},
		{"{} {}", "byte 4: text after the end"},
		{strings.Repeat("[", 100000), "nested more than"},
	} {
		if _, err := Parse([]byte(test.text)); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%.40q: %v, want %q", test.text, err, test.want)
		}
	}
}

// Values made in Go that JSON text cannot contain: file names that are not UTF-8, and nil.
func TestDumps(t *testing.T) {
	v := Object{
		{"path", String("a\xffb\xed\xa0")},
		{"nothing", nil},
		{"list", List{nil, Int(0), Number(0), Bool(true), List{}, Object{}}},
	}
	want := `{
    "path": "a\udcffb\udced\udca0",
    "nothing": null,
    "list": [
        null,
        0,
        0.0,
        true,
        [],
        {}
    ]
}`
	if got := Dumps(v); got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	if got := Dumps(nil); got != "null" {
		t.Errorf("nil: %s", got)
	}
	if v.Get("list") == nil || v.Get("none") != nil {
		t.Error("Get does not find a member, or finds one that is not there")
	}
}

// values generates values of bounded depth.
func values(depth int) *rapid.Generator[Value] {
	return rapid.Custom(func(t *rapid.T) Value {
		kinds := 7
		if depth == 0 {
			kinds = 5
		}
		switch rapid.IntRange(0, kinds-1).Draw(t, "kind") {
		case 0:
			return Null{}
		case 1:
			return Bool(rapid.Bool().Draw(t, "bool"))
		case 2:
			return Int(rapid.Int64().Draw(t, "int"))
		case 3:
			return Number(rapid.Float64().Draw(t, "number"))
		case 4:
			return String(rapid.String().Draw(t, "string"))
		case 5:
			return List(rapid.SliceOfN(values(depth-1), 0, 4).Draw(t, "list"))
		default:
			o := Object{}
			for _, key := range rapid.SliceOfNDistinct(rapid.String(), 0, 4, func(s string) string { return s }).Draw(t,
				"keys") {
				o = append(o, Member{key, values(depth-1).Draw(t, "value")})
			}
			return o
		}
	})
}

func TestParseReadsWhatDumpsWrites(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := values(3).Draw(t, "value")
		text := Dumps(v)
		back, err := Parse([]byte(text))
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		if diff := cmp.Diff(v, back); diff != "" {
			t.Error(diff)
		}
	})
}

func FuzzParse(f *testing.F) {
	g := readGolden(f)
	for _, c := range append(g.Values, g.Texts...) {
		f.Add([]byte(*c.given))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		v, err := Parse(text)
		if err != nil {
			return
		}
		once := Dumps(v)
		again, err := Parse([]byte(once))
		if err != nil {
			t.Fatalf("%q becomes %s: %v", text, once, err)
		}
		if twice := Dumps(again); twice != once {
			t.Errorf("%s\nbecomes\n%s", once, twice)
		}
	})
}

// Strings of any bytes are written as something that Parse reads and Dumps writes again.
func FuzzString(f *testing.F) {
	for _, s := range []string{"", "a\xff", "\xed\xa0\xbd\xed\xb8\x80", "\xed\xa0", "\u007f\u0080", "\U0001f600"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		once := Dumps(String(s))
		v, err := Parse([]byte(once))
		if err != nil {
			t.Fatalf("%q becomes %s: %v", s, once, err)
		}
		if twice := Dumps(v); twice != once {
			t.Errorf("%q: %s becomes %s", s, once, twice)
		}
	})
}
