package pickle

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"
)

// A Persistent is a value that is written as a persistent id.
type Persistent struct{ ID Value }

// Append appends a pickle of protocol 2 to data. Values are nil, bool, int64, float64, string,
// [Tuple], *[List], *[Dict], [Global], [Persistent] and *[Object]. An object is written as a call,
// then its state if it has one.
func Append(data []byte, v Value) ([]byte, error) {
	w := &writer{data: append(data, opProto, 2)}
	if err := w.value(v, 0); err != nil {
		return nil, err
	}
	return append(w.data, opStop), nil
}

type writer struct{ data []byte }

func (w *writer) value(v Value, depth int) error {
	if depth > 100 {
		return fmt.Errorf("pickle: values are nested too deeply")
	}
	all := func(values ...Value) error {
		for _, x := range values {
			if err := w.value(x, depth+1); err != nil {
				return err
			}
		}
		return nil
	}
	switch v := v.(type) {
	case nil:
		w.data = append(w.data, opNone)
	case bool:
		if v {
			w.data = append(w.data, opNewTrue)
		} else {
			w.data = append(w.data, opNewFalse)
		}
	case int64:
		if v == int64(int32(v)) {
			w.data = binary.LittleEndian.AppendUint32(append(w.data, opBinInt), uint32(v))
		} else {
			w.data = binary.LittleEndian.AppendUint64(append(w.data, opLong1, 8), uint64(v))
		}
	case float64:
		w.data = binary.BigEndian.AppendUint64(append(w.data, opBinFloat), math.Float64bits(v))
	case string:
		w.data = binary.LittleEndian.AppendUint32(append(w.data, opBinUnicode), uint32(len(v)))
		w.data = append(w.data, v...)
	case Global:
		i := strings.LastIndexByte(string(v), '.')
		w.data = append(w.data, opGlobal)
		w.data = append(w.data, v[:max(i, 0)]...)
		w.data = append(append(append(w.data, '\n'), v[i+1:]...), '\n')
	case Persistent:
		if err := all(v.ID); err != nil {
			return err
		}
		w.data = append(w.data, opBinPersID)
	case Tuple:
		w.data = append(w.data, opMark)
		if err := all(v...); err != nil {
			return err
		}
		w.data = append(w.data, opTuple)
	case *List:
		w.data = append(w.data, opEmptyList, opMark)
		if err := all(v.Items...); err != nil {
			return err
		}
		w.data = append(w.data, opAppends)
	case *Dict:
		w.data = append(w.data, opEmptyDict, opMark)
		for _, pair := range v.Pairs {
			if err := all(pair.Key, pair.Value); err != nil {
				return err
			}
		}
		w.data = append(w.data, opSetItems)
	case *Object:
		if err := all(v.Class, v.Args); err != nil {
			return err
		}
		w.data = append(w.data, opReduce)
		if v.State != nil {
			if err := all(v.State); err != nil {
				return err
			}
			w.data = append(w.data, opBuild)
		}
	default:
		return fmt.Errorf("pickle: cannot write a %T", v)
	}
	return nil
}
