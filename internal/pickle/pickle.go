// Package pickle reads and writes Python's pickles of plain data: numbers, texts, bytes, lists,
// tuples, sets, dicts, and objects of classes that the caller names. Reading runs no code of a
// pickle. A pickle with any other global is refused, and the error names the global.
//
// https://docs.python.org/3.14/library/pickletools.html defines the opcodes. The reader knows the
// opcodes that protocols 2 to 5 write, without buffers outside the pickle.
package pickle

import (
	"errors"
	"fmt"
)

// A Value is a value of a pickle: nil, bool, int64, [*math/big.Int] outside the range of int64,
// float64, string, []byte, [Tuple], *[List], *[Dict], [Global], *[Object], or a result of
// [Options.Persistent] or [Options.Call]. A value may contain itself.
type Value any

// A Tuple is a tuple of Python.
type Tuple []Value

// A List is a list, a set or a frozenset of Python.
type List struct{ Items []Value }

// A Pair is an entry of a [Dict].
type Pair struct{ Key, Value Value }

// A Dict is a dict, an OrderedDict or a defaultdict of Python. A key may occur in several pairs.
// Then the last one counts.
type Dict struct {
	Pairs []Pair

	texts map[string]int // numbers of the pairs whose key is a text, of the first pairs
	seen  int            // pairs in texts
}

// Get returns the value of a key that is a text.
func (d *Dict) Get(key string) (Value, bool) {
	if d.texts == nil {
		d.texts = map[string]int{}
	}
	for ; d.seen < len(d.Pairs); d.seen++ {
		if text, ok := d.Pairs[d.seen].Key.(string); ok {
			d.texts[text] = d.seen
		}
	}
	i, ok := d.texts[key]
	if !ok {
		return nil, false
	}
	return d.Pairs[i].Value, true
}

// A Global is a class or a function by its name: its module, a dot, and its name in the module.
type Global string

// An Object is the result of a call of a global, which is not called.
type Object struct {
	Class Global
	Args  Tuple // of the call
	New   bool  // the call is of the class's __new__, as for most objects
	State Value // of __setstate__, or the attributes; nil for none
	Items *List // appended to the object; nil for none
	Pairs *Dict // set in the object; nil for none
}

// Attribute returns an attribute of the object's state.
func (o *Object) Attribute(name string) (Value, bool) {
	state := o.State
	if pair, ok := state.(Tuple); ok && len(pair) == 2 { // attributes, and values of slots
		if d, ok := pair[1].(*Dict); ok {
			if v, ok := d.Get(name); ok {
				return v, true
			}
		}
		state = pair[0]
	}
	if d, ok := state.(*Dict); ok {
		return d.Get(name)
	}
	return nil, false
}

// errCorrupt is wrapped by every error about bytes that are not a pickle.
var errCorrupt = errors.New("corrupt pickle")

// A ForbiddenError is the error about a pickle with a global that the reader does not allow.
type ForbiddenError struct{ Global Global }

func (e *ForbiddenError) Error() string {
	return fmt.Sprintf("the pickle contains %s, which is not plain data; mula reads only tensors and plain data, "+
		"because any other global of a pickle may run code in Python; save the file again without this object",
		string(e.Global))
}

// Options are the options of [Read].
type Options struct {
	Allowed func(Global) bool // the globals that the pickle may have; nil: none
	// Call returns the result of a call of an allowed global, or false for an [Object]; nil:
	// objects.
	Call       func(g Global, args Tuple) (Value, bool, error)
	Persistent func(Value) (Value, error) // returns the value of a persistent id; nil: there are none
}

// Limits of a pickle, besides its bytes, which the caller limits.
const (
	maxValues = 32 << 20 // all values, entries of lists and memos
	maxDepth  = 1000     // nested lists, tuples and dicts
)
