package documents

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"

	"mula/internal/alloctest"
)

func newScanner(text, id string) *lineScanner {
	s := new(lineScanner)
	if err := s.find(text, id); err != nil {
		panic(err)
	}
	return s
}

func TestScanDocument(t *testing.T) {
	deep := func(n int) string {
		return `{"a":` + strings.Repeat("[", n) + strings.Repeat("]", n) + `,"text":"x"}`
	}
	tests := []struct {
		line, id, text string
		kind           Kind
		at             int // of the fault
	}{
		{line: `{"id":"a","text":"b"}`, id: "a", text: "b"},
		{line: " \t{ \"text\" : \"b\" , \"id\" : \"a\" } \r", id: "a", text: "b"},
		{line: `{"text":"b"}`, text: "b"},
		{line: `{"text":"b","id":null}`, text: "b"},
		{line: `{"text":"b","id":""}`, text: "b"},
		{line: `{"text":"b","id":12}`, id: "12", text: "b"},
		{line: `{"text":"b","id":-1.50E+03}`, id: "-1.50E+03", text: "b"},
		{line: `{"text":"a","text":"b"}`, text: "b"},
		{line: `{"text":1,"id":[],"text":"b","id":"i"}`, id: "i", text: "b"},
		{line: `{"Text":"no","metadata":{"text":"no","id":"no"},"list":[{"text":"no"},[],{}],"text":"b"}`, text: "b"},
		{line: `{"t\u0065xt":"b","\u0069\u0064":"i"}`, id: "i", text: "b"},
		{line: `{"\u0074\u0065\u0078\u0074":"b"}`, text: "b"},
		{line: `{"\u0074\u0065\u0078\u0074ual":"no","text":"b"}`, text: "b"},
		{line: `{"\ud83d":"no","text":"b"}`, text: "b"},
		{line: `{"text":"\"\\\/\b\f\n\r\t\u00e9\u20AC\u0000"}`, text: "\"\\/\b\f\n\r\té€\x00"},
		{line: `{"text":"\uD83D\uDE00\ud83d\ude00"}`, text: "😀😀"},
		{line: `{"text":"\ufffd"}`, text: "\ufffd"},
		{line: `{"text":"日本 😀` + "\u2028\x7f" + `","id":"\u65e5"}`, id: "日", text: "日本 😀\u2028\x7f"},
		{line: `{"x":[1,-0,0.5,1e9,2E-7,true,false,null,"\ud800 elsewhere"],"text":"b"}`, text: "b"},
		{line: deep(maxNesting - 1), text: "x"},

		{line: `{"id":"a"}`, id: "a", kind: NoText},
		{line: `{}`, kind: NoText},
		{line: `{"id":"a","text":""}`, id: "a", kind: Empty, at: 17},
		{line: `{"text":null}`, kind: BadText, at: 8},
		{line: `{"text":["b"]}`, kind: BadText, at: 8},
		{line: `{"text":"b","text":7,"id":"a"}`, id: "a", kind: BadText, at: 19},
		{line: `{"id":true,"text":"b"}`, kind: BadID, at: 6},
		{line: `{"id":{"$oid":"x"},"text":"b"}`, kind: BadID, at: 6},
		{line: `{"id":"` + strings.Repeat("x", 4097) + `","text":"b"}`, kind: BadID, at: 6},
		{line: `{"id":"a","text":"x\ud83dx"}`, id: "a", kind: BadUTF8, at: 19},
		{line: `{"text":"\ude00\ud83d"}`, kind: BadUTF8, at: 9},
		{line: `{"text":"\ud83d\n"}`, kind: BadUTF8, at: 9},
		{line: `{"text":"\ud83d"}`, kind: BadUTF8, at: 9},
		{line: `{"text":"\ud83d\ud83d\ude00"}`, kind: BadUTF8, at: 9},
		{line: `{"id":"\udfff","text":"b"}`, kind: BadUTF8, at: 7},
		{line: "{\"text\":\"b\",\"other\":\"\xff\"}", kind: BadUTF8, at: 21},
		{line: "{\"text\":\"ab\xed\xa0\x80\"}", kind: BadUTF8, at: 11},

		{line: ``, kind: BadJSON},
		{line: `[{"text":"b"}]`, kind: BadJSON},
		{line: `"text"`, kind: BadJSON},
		{line: "\ufeff{\"text\":\"b\"}", kind: BadJSON},
		{line: `{"text":"b"`, kind: BadJSON, at: 11},
		{line: `{"text":"b`, kind: BadJSON, at: 8},
		{line: `{"text":"b\`, kind: BadJSON, at: 10},
		{line: `{"text":"b\u12`, kind: BadJSON, at: 10},
		{line: `{"text":"b\x"}`, kind: BadJSON, at: 10},
		{line: `{"text":"b\u00g0"}`, kind: BadJSON, at: 10},
		{line: "{\"text\":\"0123456789\tb\"}", kind: BadJSON, at: 19},
		{line: "{\"text\":\"0123456789b\x00\"}", kind: BadJSON, at: 20},
		{line: `{"text":"b"}{"text":"c"}`, kind: BadJSON, at: 12},
		{line: `{"text":"b"},`, kind: BadJSON, at: 12},
		{line: `{"text":"b",}`, kind: BadJSON, at: 12},
		{line: `{,"text":"b"}`, kind: BadJSON, at: 1},
		{line: `{"text" "b"}`, kind: BadJSON, at: 8},
		{line: `{"text":}`, kind: BadJSON, at: 8},
		{line: `{text:"b"}`, kind: BadJSON, at: 1},
		{line: `{'text':'b'}`, kind: BadJSON, at: 1},
		{line: `{"text":"b","x":[1,]}`, kind: BadJSON, at: 19},
		{line: `{"text":"b","x":[1}}`, kind: BadJSON, at: 18},
		{line: `{"text":"b","x":{"y":1]}`, kind: BadJSON, at: 22},
		{line: `{"text":"b","x":NaN}`, kind: BadJSON, at: 16},
		{line: `{"text":"b","x":01}`, kind: BadJSON, at: 17},
		{line: `{"text":"b","x":1.}`, kind: BadJSON, at: 18},
		{line: `{"text":"b","x":.1}`, kind: BadJSON, at: 16},
		{line: `{"text":"b","x":+1}`, kind: BadJSON, at: 16},
		{line: `{"text":"b","x":1e}`, kind: BadJSON, at: 18},
		{line: `{"text":"b","x":-}`, kind: BadJSON, at: 17},
		{line: `{"text":"b","x":nul}`, kind: BadJSON, at: 16},
		{line: `{"text":"b","x":truefalse}`, kind: BadJSON, at: 20},
		{line: deep(maxNesting), kind: BadJSON, at: maxNesting - 1 + 5},
	}
	s := newScanner("text", "id")
	for _, test := range tests {
		id, text, bad := s.scan([]byte(test.line))
		if string(id) != test.id || string(text) != test.text {
			t.Errorf("%.60s: id %q, text %q, want %q, %q", test.line, id, text, test.id, test.text)
		}
		if bad == nil {
			bad = new(lineError)
		}
		if bad.kind != test.kind || bad.at != test.at {
			t.Errorf("%.60s: %v at %d (%v), want %v at %d", test.line, bad.kind, bad.at, bad.err, test.kind, test.at)
		}
	}
}

// reference reads a line with encoding/json, by the rules that lineScanner states. Kinds are told
// apart as far as encoding/json can.
func reference(line []byte) (id, text string, kind Kind) {
	if !utf8.Valid(line) { // encoding/json repairs it
		return "", "", BadUTF8
	}
	var object map[string]json.RawMessage
	if err := json.Unmarshal(line, &object); err != nil || object == nil { // nil of "null"
		return "", "", BadJSON
	}
	str := func(raw json.RawMessage) (string, Kind) {
		var s string
		if err := json.Unmarshal(raw, &s); err != nil {
			return "", BadJSON
		}
		if strings.Count(s, "\ufffd") != strings.Count(string(raw),
			"\ufffd")+strings.Count(strings.ToLower(strings.ReplaceAll(string(raw), `\\`, "")), `\ufffd`) {
			return "", BadUTF8 // encoding/json put it for half a surrogate pair
		}
		return s, 0
	}
	if raw, ok := object["id"]; ok {
		switch raw[0] {
		case 'n':
		case '"':
			if id, kind = str(raw); kind != 0 {
				return "", "", kind
			}
		case '[', '{', 't', 'f':
			return "", "", BadID
		default:
			id = string(raw)
		}
		if len(id) > 4096 {
			return "", "", BadID
		}
	}
	raw, ok := object["text"]
	if !ok {
		return id, "", NoText
	}
	if raw[0] != '"' {
		return id, "", BadText
	}
	if text, kind = str(raw); kind == 0 && text == "" {
		kind = Empty
	}
	return id, text, kind
}

func sameAsReference(t interface{ Fatalf(string, ...any) }, s *lineScanner, line []byte) {
	wantID, wantText, wantKind := reference(line)
	id, text, bad := s.scan(slices.Clone(line))
	kind := Kind(0)
	if bad != nil {
		kind = bad.kind
		if bad.at < 0 || bad.at > len(line) || bad.err == nil {
			t.Fatalf("%q: fault at byte %d of %d: %v", line, bad.at, len(line), bad.err)
		}
	}
	if string(id) != wantID || string(text) != wantText || kind != wantKind {
		t.Fatalf("%q: id %q, text %q, %v; encoding/json: %q, %q, %v", line, id, text, bad, wantID, wantText, wantKind)
	}
	if !utf8.Valid(id) || !utf8.Valid(text) {
		t.Fatalf("%q: id %q or text %q is not UTF-8", line, id, text)
	}
}

// FuzzScanDocument compares with encoding/json: the same id and text, or both refuse, for the same
// reason. The intended differences are in reference: encoding/json repairs invalid UTF-8 and half
// surrogate pairs, and takes empty texts.
func FuzzScanDocument(f *testing.F) {
	for _, line := range []string{
		`{"id":"a","text":"b"}`, `{"text":"\ud83d\ude00\n\\ud800","id":-1.5e3,"x":[{"text":null}]}`,
		`{"text":"\ud800"}`, `[`, `null`, `{"te\u0078t":"é","text":""}`,
		"{\"text\":\"\xff\"}", `{"text":"\\ufffd\ufffd\\\uFFFD"}`, `{"id":0,"text":"0123456789abcdef\t"}`,
	} {
		f.Add([]byte(line))
	}
	f.Fuzz(func(t *testing.T, line []byte) { sameAsReference(t, newScanner("text", "id"), line) })
}

// Lines put together from pieces of JSON reach further into the grammar than bytes at random.
func TestScanAgreesWithEncodingJSON(t *testing.T) {
	pieces := []string{
		`{`, `}`, `[`, `]`, `,`, `:`, `"`, `"text"`, `"id"`, `"text":`, `"id":`, `"x":`, `"b"`, `\`, `\n`, `\u0041`,
		`\ud83d`, `\ude00`, `\\`, `\"`, `"\ud83d\ude00é"`, "é", "\xff", "\x01",
		"1", "-", "0", ".5", "e+1", "true", "null", " ", "\n", "0123456789", `{"text":"b"`, `{"a":[{},[1,2]],`,
		`"te\u0078t":`, `"😀"`,
	}
	s := newScanner("text", "id")
	rapid.Check(t, func(t *rapid.T) {
		sameAsReference(t, s, []byte(strings.Join(rapid.SliceOfN(rapid.SampledFrom(pieces), 0, 16).Draw(t, "pieces"),
			"")))
	})
	// Whole lines, as encoding/json writes them, and with a byte changed.
	rapid.Check(t, func(t *rapid.T) {
		line, err := json.Marshal(map[string]any{
			"id": rapid.StringN(0, 10, -1).Draw(t, "id"), "text": rapid.String().Draw(t, "text"),
			"metadata": rapid.MapOfN(rapid.String(), rapid.SliceOf(rapid.Float64()), 0, 3).Draw(t, "metadata"),
		})
		if err != nil {
			t.Fatal(err)
		}
		sameAsReference(t, s, line)
		line[rapid.IntRange(0, len(line)-1).Draw(t, "at")] = rapid.Byte().Draw(t, "byte")
		sameAsReference(t, s, line)
	})
}

func TestIndexSpecial(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		alphabet := "\x00\x1f !\"#[\\]\x7f\x80\xff" + strings.Repeat("a", 55)
		b := rapid.SliceOf(rapid.SampledFrom([]byte(alphabet))).Draw(t, "b")
		want := strings.IndexFunc(string(b), func(r rune) bool { return r < ' ' || r == '"' || r == '\\' })
		if want < 0 {
			want = len(b)
		}
		if got := indexSpecial(b); got != want {
			t.Fatalf("%q: %d, want %d", b, got, want)
		}
	})
}

func TestScanAllocatesNothing(t *testing.T) {
	line := []byte(`{"id":"dok-\u00e9","text":"` + strings.Repeat(`a line\n\u20ac 😀`, 100) +
		`","m":{"t\u0065xt":[1,2,{}]}}`)
	s := newScanner("text", "id")
	again := make([]byte, len(line)) // scanning changes it
	if n := alloctest.Least(func() { copy(again, line); s.scan(again) }); n != 0 {
		t.Errorf("%v allocations a line", n)
	}
}

func BenchmarkScanDocument(b *testing.B) {
	english := strings.Repeat("It is a truth universally acknowledged, that a single man in possession of a good "+
		"fortune,\n", 100)
	for name, line := range map[string]string{
		"plain":   `{"id":"a","text":"` + strings.ReplaceAll(english, "\n", `\n`) + `"}`,
		"escaped": `{"id":"a","text":"` + strings.Repeat(`\u65e5\u672c\u8a9e`, 500) + `"}`,
	} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(line)))
			s := newScanner("text", "id")
			for b.Loop() {
				if _, _, bad := s.scan([]byte(line)); bad != nil {
					b.Fatal(bad.err)
				}
			}
		})
	}
}
