package pickle

import (
	"math"
	"reflect"
	"strings"
	"testing"
)

// Values that are written are read again.
func TestWrite(t *testing.T) {
	object := &Object{Class: "a.b.C", New: true, Args: Tuple{}, State: DictOf("x", int64(1), "y", nil)}
	called := &Object{Class: "a.f", Args: Tuple{int64(1)}, Items: &List{[]Value{"item"}}, Pairs: DictOf("k", "v")}
	v := &List{[]Value{nil, true, false, int64(0), int64(255), int64(256), int64(-1), int64(1 << 40),
		int64(math.MinInt64), 0.1, math.Inf(-1), "text ü", []byte{0, 128, 255}, Tuple{}, Tuple{int64(1), "b"},
		&List{}, DictOf("a", Tuple{int64(1)}, int64(2), DictOf()), Global("a.b.C"), object, called}}
	data, err := Write(v, nil)
	if err != nil {
		t.Fatal(err)
	}
	allowed := func(g Global) bool { return g == "a.b.C" || g == "a.f" }
	got, err := Read(data, Options{Allowed: allowed})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range v.Items {
		item := got.(*List).Items[i]
		switch want := want.(type) {
		case *Dict:
			if !reflect.DeepEqual(item.(*Dict).Pairs, want.Pairs) && len(want.Pairs) > 0 {
				t.Errorf("value %d is %+v, want %+v", i, item, want)
			}
		default:
			if !reflect.DeepEqual(item, want) {
				t.Errorf("value %d is %+v, want %+v", i, item, want)
			}
		}
	}

	type other struct{ n int }
	replace := func(v Value) (Value, error) { return PersistentID{Tuple{v.(other).n, "id"}}, nil }
	if data, err = Write(&List{[]Value{other{7}}}, replace); err != nil {
		t.Fatal(err)
	}
	got, err = Read(data, Options{Persistent: func(id Value) (Value, error) { return id.(Tuple)[0], nil }})
	if err != nil || !reflect.DeepEqual(got, &List{[]Value{int64(7)}}) {
		t.Errorf("%v, %v", got, err)
	}
}

func TestWriteRefuses(t *testing.T) {
	loop := &List{}
	loop.Items = []Value{loop}
	for want, v := range map[string]Value{"a pickle of a struct {}": struct{}{}, "nested": loop,
		`"f" is not a name of a global`: Global("f")} {
		if _, err := Write(v, nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
