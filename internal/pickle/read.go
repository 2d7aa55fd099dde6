package pickle

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/big"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Opcodes.
const (
	opMark            = '('
	opStop            = '.'
	opPop             = '0'
	opPopMark         = '1'
	opDup             = '2'
	opBinFloat        = 'G'
	opInt             = 'I'
	opBinInt          = 'J'
	opBinInt1         = 'K'
	opLong            = 'L'
	opBinInt2         = 'M'
	opNone            = 'N'
	opBinPersID       = 'Q'
	opReduce          = 'R'
	opBinString       = 'T'
	opShortBinString  = 'U'
	opBinUnicode      = 'X'
	opAppend          = 'a'
	opBuild           = 'b'
	opGlobal          = 'c'
	opDict            = 'd'
	opAppends         = 'e'
	opBinGet          = 'h'
	opLongBinGet      = 'j'
	opList            = 'l'
	opBinPut          = 'q'
	opLongBinPut      = 'r'
	opSetItem         = 's'
	opTuple           = 't'
	opSetItems        = 'u'
	opEmptyDict       = '}'
	opEmptyList       = ']'
	opEmptyTuple      = ')'
	opBinBytes        = 'B'
	opShortBinBytes   = 'C'
	opProto           = 0x80
	opNewObj          = 0x81
	opTuple1          = 0x85
	opTuple2          = 0x86
	opTuple3          = 0x87
	opNewTrue         = 0x88
	opNewFalse        = 0x89
	opLong1           = 0x8a
	opLong4           = 0x8b
	opShortBinUnicode = 0x8c
	opBinUnicode8     = 0x8d
	opBinBytes8       = 0x8e
	opEmptySet        = 0x8f
	opAddItems        = 0x90
	opFrozenSet       = 0x91
	opNewObjEx        = 0x92
	opStackGlobal     = 0x93
	opMemoize         = 0x94
	opFrame           = 0x95
	opByteArray8      = 0x96
)

// maxLong limits the bytes of an integer.
const maxLong = 4096

// Read reads a pickle, which ends at the last byte of data.
func Read(data []byte, o Options) (Value, error) { return read(data, o, maxValues) }

func read(data []byte, o Options, values int) (Value, error) {
	r := &reader{data: data, options: o, values: values}
	v, err := r.run()
	if errors.Is(err, errCorrupt) {
		err = fmt.Errorf("%w; copy the file again", err)
	}
	if err != nil {
		return nil, fmt.Errorf("pickle at byte %d: %w", r.opcode, err)
	}
	return v, nil
}

// A reader is the machine that the opcodes describe.
type reader struct {
	data    []byte
	at      int // the next byte
	opcode  int // the first byte of the current instruction
	options Options
	values  int // that may still be made

	stack []Value
	marks []int // lengths of the stack
	memo  []Value
}

func corrupt(format string, args ...any) error {
	return fmt.Errorf("%w: %s", errCorrupt, fmt.Sprintf(format, args...))
}

func (r *reader) run() (Value, error) {
	for {
		r.opcode = r.at
		op, err := r.bytes(1)
		if err != nil {
			return nil, err
		}
		if op[0] == opStop {
			if len(r.stack) != 1 || len(r.marks) != 0 {
				return nil, corrupt("%d values remain at the end instead of one", len(r.stack))
			}
			if r.at != len(r.data) {
				return nil, corrupt("%d bytes follow the end", len(r.data)-r.at)
			}
			return r.stack[0], nil
		}
		if err := r.step(op[0]); err != nil {
			return nil, err
		}
		if len(r.marks) > maxDepth {
			return nil, fmt.Errorf("more than %d nested lists, tuples or dicts", maxDepth)
		}
	}
}

// step executes an instruction.
func (r *reader) step(op byte) error {
	switch op {
	case opProto:
		b, err := r.bytes(1)
		if err == nil && (b[0] < 2 || b[0] > 5) {
			err = fmt.Errorf("protocol %d is not supported; only 2 to 5 are", b[0])
		}
		return err
	case opFrame:
		_, err := r.bytes(8)
		return err
	case opMark:
		r.marks = append(r.marks, len(r.stack))
		return r.count(1)
	case opPop:
		if n := len(r.marks); n > 0 && r.marks[n-1] == len(r.stack) {
			r.marks = r.marks[:n-1]
			return nil
		}
		_, err := r.pop()
		return err
	case opPopMark:
		_, err := r.popMark()
		return err
	case opDup:
		v, err := r.top()
		if err != nil {
			return err
		}
		return r.push(v)
	case opBinPut, opLongBinPut, opMemoize, opBinGet, opLongBinGet:
		return r.remember(op)
	case opGlobal, opStackGlobal:
		return r.global(op)
	case opReduce, opNewObj, opNewObjEx, opBuild, opBinPersID:
		return r.object(op)
	case opEmptyList, opEmptyDict, opEmptySet, opEmptyTuple, opList, opDict, opFrozenSet, opTuple, opTuple1, opTuple2,
		opTuple3, opAppend, opAppends, opSetItem, opSetItems, opAddItems:
		return r.container(op)
	}
	v, err := r.scalar(op)
	if err != nil {
		return err
	}
	return r.push(v)
}

// scalar reads a number, a text or bytes.
func (r *reader) scalar(op byte) (Value, error) {
	switch op {
	case opNone:
		return nil, nil
	case opNewTrue:
		return true, nil
	case opNewFalse:
		return false, nil
	case opBinInt, opBinInt1, opBinInt2:
		n := map[byte]int{opBinInt: 4, opBinInt1: 1, opBinInt2: 2}[op]
		b, err := r.bytes(n)
		if err != nil {
			return nil, err
		}
		if op == opBinInt {
			return int64(int32(binary.LittleEndian.Uint32(b))), nil
		}
		return int64(b[0]) | int64(b[n-1])<<8*int64(n-1), nil
	case opInt, opLong:
		line, err := r.line()
		if err != nil {
			return nil, err
		}
		if op == opInt && (line == "00" || line == "01") {
			return line == "01", nil
		}
		v, ok := new(big.Int).SetString(strings.TrimSuffix(line, "L"), 10)
		if !ok || len(line) > maxLong {
			return nil, corrupt("invalid integer")
		}
		return shortest(v), nil
	case opLong1, opLong4:
		b, err := r.sized(map[byte]int{opLong1: 1, opLong4: 4}[op])
		if err != nil {
			return nil, err
		}
		if len(b) > maxLong {
			return nil, fmt.Errorf("an integer of %d bytes; the maximum is %d", len(b), maxLong)
		}
		return long(b), nil
	case opBinFloat:
		b, err := r.bytes(8)
		if err != nil {
			return nil, err
		}
		return math.Float64frombits(binary.BigEndian.Uint64(b)), nil
	case opBinUnicode, opShortBinUnicode, opBinUnicode8:
		b, err := r.sized(map[byte]int{opShortBinUnicode: 1, opBinUnicode: 4, opBinUnicode8: 8}[op])
		if err != nil {
			return nil, err
		}
		if !utf8.Valid(b) {
			return nil, corrupt("a text is not UTF-8")
		}
		return string(b), nil
	case opBinBytes, opShortBinBytes, opBinBytes8, opByteArray8, opBinString, opShortBinString:
		b, err := r.sized(map[byte]int{opShortBinBytes: 1, opBinBytes: 4, opBinBytes8: 8, opByteArray8: 8,
			opShortBinString: 1, opBinString: 4}[op])
		if err != nil {
			return nil, err
		}
		return slices.Clone(b), nil
	}
	return nil, fmt.Errorf("opcode %#x is not supported", op)
}

// long reads a two's complement integer.
func long(b []byte) Value {
	big1 := make([]byte, len(b)) // the most significant byte first
	for i, x := range b {
		big1[len(b)-1-i] = x
	}
	v := new(big.Int).SetBytes(big1)
	if len(b) > 0 && b[len(b)-1]&0x80 != 0 {
		v.Sub(v, new(big.Int).Lsh(big.NewInt(1), uint(8*len(b))))
	}
	return shortest(v)
}

// shortest returns an integer as int64 if possible.
func shortest(v *big.Int) Value {
	if v.IsInt64() {
		return v.Int64()
	}
	return v
}

// remember executes an instruction on the memo.
func (r *reader) remember(op byte) error {
	var index uint32
	switch op {
	case opMemoize:
		index = uint32(len(r.memo))
	case opBinPut, opBinGet:
		b, err := r.bytes(1)
		if err != nil {
			return err
		}
		index = uint32(b[0])
	default:
		b, err := r.bytes(4)
		if err != nil {
			return err
		}
		index = binary.LittleEndian.Uint32(b)
	}
	if op == opBinGet || op == opLongBinGet {
		if int64(index) >= int64(len(r.memo)) {
			return corrupt("memo %d is not set", index)
		}
		return r.push(r.memo[index])
	}
	v, err := r.top()
	if err != nil {
		return err
	}
	// Python's pickler numbers memos without gaps; gaps of other writers are small.
	const gap = 1 << 10
	if int64(index) > int64(len(r.memo)+gap) {
		return fmt.Errorf("memo %d is set after %d others", index, len(r.memo))
	}
	for int(index) >= len(r.memo) {
		if err := r.count(1); err != nil {
			return err
		}
		r.memo = append(r.memo, nil)
	}
	r.memo[index] = v
	return nil
}

// global reads the name of a global, and refuses a global that is not allowed.
func (r *reader) global(op byte) error {
	var module, name string
	if op == opGlobal {
		var err error
		if module, err = r.line(); err != nil {
			return err
		}
		if name, err = r.line(); err != nil {
			return err
		}
	} else {
		b, err := r.pop()
		if err != nil {
			return err
		}
		a, err := r.pop()
		if err != nil {
			return err
		}
		var ok [2]bool
		module, ok[0] = a.(string)
		name, ok[1] = b.(string)
		if !ok[0] || !ok[1] {
			return corrupt("the name of a global is not a text")
		}
	}
	g := Global(module + "." + name)
	if !plain[g] && (r.options.Allowed == nil || !r.options.Allowed(g)) {
		return &ForbiddenError{g}
	}
	return r.push(g)
}

// plain has the globals that the reader evaluates itself.
var plain = map[Global]bool{
	"collections.OrderedDict": true, "collections.defaultdict": true, "builtins.set": true, "builtins.frozenset": true,
	"_codecs.encode": true, "builtins.dict": true, "builtins.list": true, "builtins.int": true, "builtins.float": true,
	"builtins.bytearray": true, "__builtin__.set": true, "builtins.str": true,
}

// object executes an instruction on objects.
func (r *reader) object(op byte) error {
	arg, err := r.pop()
	if err != nil {
		return err
	}
	if op == opBinPersID {
		if r.options.Persistent == nil {
			return corrupt("unexpected persistent id")
		}
		v, err := r.options.Persistent(arg)
		if err != nil {
			return err
		}
		return r.push(v)
	}
	if op == opNewObjEx {
		return fmt.Errorf("an object with keyword arguments is not supported")
	}
	if op == opBuild {
		v, err := r.top()
		if err != nil {
			return err
		}
		switch v := v.(type) {
		case *Object:
			v.State = arg
			return nil
		case *Dict: // attributes of an OrderedDict, which are no entries
			return nil
		}
		return corrupt("the state of a value that is no object")
	}
	class, err := r.pop()
	if err != nil {
		return err
	}
	g, isGlobal := class.(Global)
	args, isTuple := arg.(Tuple)
	if !isGlobal || !isTuple {
		return corrupt("a call of a value that is no global")
	}
	v, err := r.call(g, args)
	if err != nil {
		return err
	}
	if o, ok := v.(*Object); ok {
		o.New = op == opNewObj
	}
	return r.push(v)
}

// call returns the result of a call of a global.
func (r *reader) call(g Global, args Tuple) (Value, error) {
	wrong := func() (Value, error) {
		return nil, fmt.Errorf("unsupported arguments of %s", string(g))
	}
	switch g {
	case "collections.OrderedDict", "builtins.dict":
		items, ok := entries(args)
		if !ok {
			return wrong()
		}
		d := &Dict{}
		for _, item := range items {
			var pair []Value
			switch item := item.(type) {
			case Tuple:
				pair = item
			case *List:
				pair = item.Items
			}
			if len(pair) != 2 {
				return wrong()
			}
			d.Pairs = append(d.Pairs, Pair{pair[0], pair[1]})
		}
		return d, r.count(len(items))
	case "collections.defaultdict":
		return &Dict{}, nil // the argument is the default
	case "builtins.set", "builtins.frozenset", "__builtin__.set":
		items, ok := entries(args)
		if !ok {
			return wrong()
		}
		return &List{slices.Clone(items)}, r.count(len(items))
	case "_codecs.encode":
		if len(args) != 2 {
			return wrong()
		}
		text, ok := args[0].(string)
		if !ok || args[1] != "latin1" {
			return wrong()
		}
		var b []byte
		for _, c := range text {
			if c > 0xff {
				return wrong()
			}
			b = append(b, byte(c))
		}
		return b, nil
	case "builtins.bytearray", "builtins.list", "builtins.int", "builtins.float", "builtins.str":
		return wrong()
	}
	if r.options.Call != nil {
		if v, done, err := r.options.Call(g, args); done || err != nil {
			return v, err
		}
	}
	return &Object{Class: g, Args: args}, nil
}

// entries returns the entries of a new container: of the list that is the only argument, or none
// without arguments.
func entries(args Tuple) ([]Value, bool) {
	if len(args) == 0 {
		return nil, true
	}
	list, ok := args[0].(*List)
	if !ok || len(args) != 1 {
		return nil, false
	}
	return list.Items, true
}

// container executes an instruction on lists, tuples, dicts and sets.
func (r *reader) container(op byte) error {
	switch op {
	case opEmptyList:
		return r.push(&List{})
	case opEmptyDict:
		return r.push(&Dict{})
	case opEmptySet:
		return r.push(&List{})
	case opEmptyTuple:
		return r.push(Tuple{})
	case opTuple1, opTuple2, opTuple3:
		n := int(op-opTuple1) + 1
		if len(r.stack)-r.floor() < n {
			return corrupt("too few values for a tuple")
		}
		t := Tuple(slices.Clone(r.stack[len(r.stack)-n:]))
		r.stack = r.stack[:len(r.stack)-n]
		return r.push(t)
	case opTuple, opList, opFrozenSet, opDict:
		items, err := r.popMark()
		if err != nil {
			return err
		}
		items = slices.Clone(items)
		var v Value
		switch op {
		case opTuple:
			v = Tuple(items)
		case opList, opFrozenSet:
			v = &List{items}
		default:
			d := &Dict{}
			if err := d.add(items); err != nil {
				return err
			}
			v = d
		}
		return r.push(v)
	}
	// The others add entries to a container.
	var items []Value
	switch op {
	case opAppend, opSetItem:
		n := 1
		if op == opSetItem {
			n = 2
		}
		if len(r.stack)-r.floor() < n+1 {
			return corrupt("too few values")
		}
		items = r.stack[len(r.stack)-n:]
		r.stack = r.stack[:len(r.stack)-n]
	default:
		var err error
		if items, err = r.popMark(); err != nil {
			return err
		}
	}
	v, err := r.top()
	if err != nil {
		return err
	}
	if err := r.count(len(items)); err != nil {
		return err
	}
	switch to := v.(type) {
	case *List:
		if op == opAppend || op == opAppends || op == opAddItems {
			to.Items = append(to.Items, items...)
			return nil
		}
	case *Dict:
		if op == opSetItem || op == opSetItems {
			return to.add(items)
		}
	case *Object:
		switch op {
		case opAppend, opAppends:
			if to.Items == nil {
				to.Items = &List{}
			}
			to.Items.Items = append(to.Items.Items, items...)
			return nil
		case opSetItem, opSetItems:
			if to.Pairs == nil {
				to.Pairs = &Dict{}
			}
			return to.Pairs.add(items)
		}
	}
	return corrupt("entries of a value that is no container")
}

// add adds keys and values, alternately.
func (d *Dict) add(items []Value) error {
	if len(items)%2 != 0 {
		return corrupt("a key without a value")
	}
	for pair := range slices.Chunk(items, 2) {
		d.Pairs = append(d.Pairs, Pair{pair[0], pair[1]})
	}
	return nil
}

// bytes returns the next n bytes.
func (r *reader) bytes(n int) ([]byte, error) {
	if n > len(r.data)-r.at {
		return nil, corrupt("the pickle is cut short")
	}
	b := r.data[r.at : r.at+n]
	r.at += n
	return b, nil
}

// sized returns bytes after their number, which has width bytes.
func (r *reader) sized(width int) ([]byte, error) {
	b, err := r.bytes(width)
	if err != nil {
		return nil, err
	}
	var long [8]byte
	copy(long[:], b)
	n := binary.LittleEndian.Uint64(long[:])
	if n > uint64(len(r.data)-r.at) {
		return nil, corrupt("the pickle is cut short")
	}
	return r.bytes(int(n))
}

// line returns the text up to the next line feed.
func (r *reader) line() (string, error) {
	const most = 1 << 10
	rest := r.data[r.at:min(len(r.data), r.at+most)]
	n := slices.Index(rest, '\n')
	if n < 0 {
		return "", corrupt("a line of more than %s bytes", strconv.Itoa(most))
	}
	r.at += n + 1
	return string(rest[:n]), nil
}

func (r *reader) count(n int) error {
	if r.values -= n; r.values < 0 {
		return fmt.Errorf("more values than the maximum")
	}
	return nil
}

func (r *reader) push(v Value) error {
	r.stack = append(r.stack, v)
	return r.count(1)
}

// floor is the length of the stack below the last mark.
func (r *reader) floor() int {
	if n := len(r.marks); n > 0 {
		return r.marks[n-1]
	}
	return 0
}

func (r *reader) top() (Value, error) {
	if len(r.stack) <= r.floor() {
		return nil, corrupt("the stack is empty")
	}
	return r.stack[len(r.stack)-1], nil
}

func (r *reader) pop() (Value, error) {
	v, err := r.top()
	if err == nil {
		r.stack = r.stack[:len(r.stack)-1]
	}
	return v, err
}

// popMark returns the values after the last mark. They are valid until the next push.
func (r *reader) popMark() ([]Value, error) {
	if len(r.marks) == 0 {
		return nil, corrupt("no mark")
	}
	at := r.floor()
	items := r.stack[at:]
	r.stack, r.marks = r.stack[:at], r.marks[:len(r.marks)-1]
	return items, nil
}
