package pickle

import (
	"encoding/hex"
	"errors"
	"fmt"
	"math/big"
	"reflect"
	"strings"
	"testing"
)

// pickles has pickles that Python 3.11.7 wrote with pickle.dumps(value, protocol).
var pickles = []struct {
	name      string
	protocols []byte // the second byte of the pickle; the other bytes are equal
	hex       string
}{
	{"numbers", []byte{2, 3},
		"80025d7100284b004b014bff4d00014dffff4a000001004affffffff4affffff7f4a000000808a060000000000018a08" +
			"00000000000000808a090000000000000080008a090000000000000000c0473ff800000000000088894e652e"},
	{"numbers", []byte{4, 5},
		"80049559000000000000005d94284b004b014bff4d00014dffff4a000001004affffffff4affffff7f4a000000808a06" +
			"0000000000018a0800000000000000808a090000000000000080008a090000000000000000c0473ff800000000000088" +
			"894e652e"},
	{"texts", []byte{2},
		"800228580000000071005802000000c3a97101582c010000" +
			strings.Repeat("78", 300) +
			"7102635f636f646563730a656e636f64650a710358020000006162710458060000006c6174696e317105867106527107" +
			"6803582c010000" +
			strings.Repeat("7a", 300) +
			"7108680586710952710a74710b2e"},
	{"texts", []byte{3},
		"800328580000000071005802000000c3a97101582c010000" +
			strings.Repeat("78", 300) +
			"7102430261627103422c010000" +
			strings.Repeat("7a", 300) +
			"71047471052e"},
	{"texts", []byte{4, 5},
		"8004957502000000000000288c00948c02c3a994582c010000" +
			strings.Repeat("78", 300) +
			"944302616294422c010000" +
			strings.Repeat("7a", 300) +
			"9474942e"},
	{"dicts", []byte{2, 3},
		"800263636f6c6c656374696f6e730a4f726465726564446963740a7100295271012858010000006171027d7103580100" +
			"00006271045d71054b0161735801000000637106284b014b024b034b04747107752e"},
	{"dicts", []byte{4, 5},
		"80049543000000000000008c0b636f6c6c656374696f6e73948c0b4f72646572656444696374949394295294288c0161" +
			"947d948c0162945d944b0161738c016394284b014b024b034b047494752e"},
	{"shared", []byte{2, 3},
		"80027d71002858010000007871015d71024b076158010000007971036802752e"},
	{"shared", []byte{4, 5},
		"80049514000000000000007d94288c0178945d944b07618c0179946802752e"},
	{"sets", []byte{2},
		"8002635f5f6275696c74696e5f5f0a7365740a71005d71014b03618571025271032e"},
	{"sets", []byte{3},
		"8003636275696c74696e730a7365740a71005d71014b03618571025271032e"},
	{"sets", []byte{4, 5},
		"80049507000000000000008f94284b03902e"},
}

// Pickles whose loading in Python runs os.system.
const (
	hostile2 = "800263706f7369780a73797374656d0a710058040000007472756571018571025271032e"
	hostile4 = "80049525000000000000005d94284b018c05706f736978948c0673797374656d9493948c04747275659485945294652e"
)

func decoded(t testing.TB, text string) []byte {
	t.Helper()
	data, err := hex.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestRead(t *testing.T) {
	power := func(bits uint, sign int64) *big.Int {
		return new(big.Int).Mul(new(big.Int).Lsh(big.NewInt(1), bits), big.NewInt(sign))
	}
	check := map[string]func(v Value) bool{
		"numbers": func(v Value) bool {
			return reflect.DeepEqual(v, &List{[]Value{int64(0), int64(1), int64(255), int64(256), int64(65535),
				int64(65536), int64(-1), int64(1<<31 - 1), int64(-1 << 31), int64(1 << 40), int64(-1 << 63),
				power(63, 1), power(70, -1), 1.5, true, false, nil}})
		},
		"texts": func(v Value) bool {
			return reflect.DeepEqual(v, Tuple{"", "é", strings.Repeat("x", 300), []byte("ab"),
				[]byte(strings.Repeat("z", 300))})
		},
		"dicts": func(v Value) bool {
			a, _ := v.(*Dict).Get("a")
			b, _ := a.(*Dict).Get("b")
			c, _ := v.(*Dict).Get("c")
			return reflect.DeepEqual(b, &List{[]Value{int64(1)}}) &&
				reflect.DeepEqual(c, Tuple{int64(1), int64(2), int64(3), int64(4)})
		},
		"shared": func(v Value) bool {
			x, _ := v.(*Dict).Get("x")
			y, _ := v.(*Dict).Get("y")
			return x == y && reflect.DeepEqual(x, &List{[]Value{int64(7)}})
		},
		"sets": func(v Value) bool { return reflect.DeepEqual(v, &List{[]Value{int64(3)}}) },
	}
	for _, p := range pickles {
		for _, protocol := range p.protocols {
			t.Run(fmt.Sprintf("%s/%d", p.name, protocol), func(t *testing.T) {
				data := decoded(t, p.hex)
				data[1] = protocol
				v, err := Read(data, Options{})
				if err != nil || !check[p.name](v) {
					t.Fatalf("%#v, %v", v, err)
				}
				for n := range data { // every cut is an error
					if _, err := Read(data[:n], Options{}); !errors.Is(err, errCorrupt) {
						t.Fatalf("the first %d bytes: %v", n, err)
					}
				}
			})
		}
	}
}

func TestHostile(t *testing.T) {
	for _, text := range []string{hostile2, hostile4} {
		_, err := Read(decoded(t, text), Options{})
		var forbidden *ForbiddenError
		if !errors.As(err, &forbidden) || forbidden.Global != "posix.system" ||
			!strings.Contains(err.Error(), "posix.system") {
			t.Errorf("%v", err)
		}
	}
	call := "\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R."
	if _, err := Read([]byte(call), Options{}); !errors.As(err, new(*ForbiddenError)) {
		t.Errorf("%v", err)
	}
	if v, err := Read([]byte(call), Options{Allowed: func(Global) bool { return true }}); err != nil ||
		!reflect.DeepEqual(v, &Object{Class: "builtins.eval", Args: Tuple{"1"}}) { // not called
		t.Errorf("%#v, %v", v, err)
	}
}

func TestLimits(t *testing.T) {
	for _, test := range []struct {
		name, data, want string
	}{
		{"marks", "\x80\x02" + strings.Repeat("(", 1001) + ".", "more than 1000 nested"},
		{"memo", "\x80\x02Nr\xff\xff\xff\x7f.", "memo 2147483647 is set after 0 others"},
		{"unset memo", "\x80\x02h\x05.", "memo 5 is not set"},
		{"text", "\x80\x02X\xff\xff\xff\x7fa.", "cut short"},
		{"long text", "\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xffa.", "cut short"},
		{"integer", "\x80\x02\x8b\x00\x20\x00\x00" + strings.Repeat("\xff", 0x2000) + ".",
			"the maximum is 4096"},
		{"extension", "\x80\x02\x82\x01.", "opcode 0x82 is not supported"},
		{"instance", "(iposix\nsystem\n.", "opcode 0x69 is not supported"},
		{"protocol", "\x80\x06N.", "protocol 6"},
		{"rest", "\x80\x02N.N.", "2 bytes follow"},
		{"below a mark", "\x80\x02N(\x85.", "too few values"},
		{"no container", "\x80\x02K\x01K\x02a.", "no container"},
		{"odd", "\x80\x02}(K\x01u.", "a key without a value"},
		{"persistent", "\x80\x02K\x01Q.", "unexpected persistent id"},
	} {
		if _, err := Read([]byte(test.data), Options{}); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", test.name, err, test.want)
		}
	}
	data := []byte("\x80\x02]q\x00(h\x00h\x00h\x00h\x00e.") // a list, a memo, a mark, four values, four entries
	for values := range 12 {
		if _, err := read(data, Options{}, values); (err == nil) != (values == 11) {
			t.Errorf("at most %d values: %v", values, err)
		}
	}
	// A list that contains itself.
	if v, err := Read([]byte("\x80\x02]q\x00h\x00a."), Options{}); err != nil || v.(*List).Items[0] != v {
		t.Errorf("%v", err)
	}
}

func FuzzRead(f *testing.F) {
	for _, p := range pickles {
		f.Add(decoded(f, p.hex))
	}
	f.Add(decoded(f, hostile2))
	f.Add(decoded(f, hostile4))
	f.Fuzz(func(t *testing.T, data []byte) {
		allowed := map[Global]bool{"torch.Size": true}
		v, err := Read(data, Options{
			Allowed:    func(g Global) bool { return allowed[g] },
			Persistent: func(id Value) (Value, error) { return id, nil },
		})
		if err == nil {
			if d, ok := v.(*Dict); ok {
				d.Get("x")
			}
		}
	})
}
