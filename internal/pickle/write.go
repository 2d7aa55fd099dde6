package pickle

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"
)

// A PersistentID is a value to write that the reader gets from its [Options.Persistent].
type PersistentID struct{ ID Value }

// DictOf returns a dict of keys and values, which alternate.
func DictOf(items ...Value) *Dict {
	d := &Dict{}
	for i := 0; i+1 < len(items); i += 2 {
		d.Pairs = append(d.Pairs, Pair{items[i], items[i+1]})
	}
	return d
}

// Write returns a pickle of protocol 2. It writes the values that [Read] returns, except for
// integers outside the range of int64, and also int and [PersistentID]. replace returns the value
// to write for a value of any other type; nil: there are none. A value must not contain itself.
func Write(v Value, replace func(Value) (Value, error)) ([]byte, error) {
	w := &writer{data: []byte{opProto, 2}, replace: replace}
	if err := w.value(v); err != nil {
		return nil, err
	}
	return append(w.data, opStop), nil
}

// A writer appends instructions to data.
type writer struct {
	data    []byte
	replace func(Value) (Value, error)
	depth   int
}

func (w *writer) value(v Value) error {
	if w.depth++; w.depth > maxDepth {
		return fmt.Errorf("more than %d nested values", maxDepth)
	}
	defer func() { w.depth-- }()
	switch v := v.(type) {
	case nil:
		w.data = append(w.data, opNone)
	case bool:
		if v {
			w.data = append(w.data, opNewTrue)
		} else {
			w.data = append(w.data, opNewFalse)
		}
	case int:
		w.integer(int64(v))
	case int64:
		w.integer(v)
	case float64:
		w.data = binary.BigEndian.AppendUint64(append(w.data, opBinFloat), math.Float64bits(v))
	case string:
		return w.sized(opBinUnicode, v)
	case []byte: // protocol 2 has no bytes
		var text strings.Builder
		for _, b := range v {
			text.WriteRune(rune(b))
		}
		return w.value(&Object{Class: "_codecs.encode", Args: Tuple{text.String(), "latin1"}})
	case Tuple:
		return w.between("(", "t", v...)
	case *List:
		return w.between("](", "e", v.Items...)
	case *Dict:
		w.data = append(w.data, opEmptyDict)
		return w.pairs(v)
	case Global:
		i := strings.LastIndexByte(string(v), '.')
		if i < 0 || strings.ContainsAny(string(v), "\r\n") {
			return fmt.Errorf("%q is not a name of a global", string(v))
		}
		w.data = fmt.Appendf(w.data, "c%s\n%s\n", v[:i], v[i+1:])
	case *Object:
		return w.object(v)
	case PersistentID:
		return w.between("", string(rune(opBinPersID)), v.ID)
	default:
		if w.replace == nil {
			return fmt.Errorf("a pickle of a %T is not supported", v)
		}
		other, err := w.replace(v)
		if err != nil {
			return err
		}
		return w.value(other)
	}
	return nil
}

func (w *writer) integer(n int64) {
	switch {
	case n >= 0 && n < 1<<8:
		w.data = append(w.data, opBinInt1, byte(n))
	case n == int64(int32(n)):
		w.data = binary.LittleEndian.AppendUint32(append(w.data, opBinInt), uint32(n))
	default:
		w.data = binary.LittleEndian.AppendUint64(append(w.data, opLong1, 8), uint64(n))
	}
}

// sized writes a text after its number of bytes.
func (w *writer) sized(op byte, text string) error {
	if len(text) > math.MaxInt32 {
		return fmt.Errorf("a text has %d bytes; the maximum is %d", len(text), math.MaxInt32)
	}
	w.data = binary.LittleEndian.AppendUint32(append(w.data, op), uint32(len(text)))
	w.data = append(w.data, text...)
	return nil
}

// between writes values between instructions.
func (w *writer) between(before, after string, values ...Value) error {
	w.data = append(w.data, before...)
	for _, v := range values {
		if err := w.value(v); err != nil {
			return err
		}
	}
	w.data = append(w.data, after...)
	return nil
}

// pairs sets the entries of a dict.
func (w *writer) pairs(d *Dict) error {
	w.data = append(w.data, opMark)
	for _, pair := range d.Pairs {
		if err := w.between("", "", pair.Key, pair.Value); err != nil {
			return err
		}
	}
	w.data = append(w.data, opSetItems)
	return nil
}

func (w *writer) object(o *Object) error {
	args := o.Args
	if args == nil {
		args = Tuple{}
	}
	call := byte(opReduce)
	if o.New {
		call = opNewObj
	}
	if err := w.between("", "", o.Class, args); err != nil {
		return err
	}
	w.data = append(w.data, call)
	if o.Items != nil {
		if err := w.between("(", "e", o.Items.Items...); err != nil {
			return err
		}
	}
	if o.Pairs != nil {
		if err := w.pairs(o.Pairs); err != nil {
			return err
		}
	}
	if o.State != nil {
		return w.between("", "b", o.State)
	}
	return nil
}
