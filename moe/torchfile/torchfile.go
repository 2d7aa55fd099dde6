// Package torchfile reads and writes the files of torch.save: a zip archive with a pickle, whose
// tensors refer to other members of the archive. Tensors are read and written in chunks. The
// package runs no code of a pickle; see [mula/internal/pickle].
//
// The form is defined by torch/serialization.py and torch/_utils.py of PyTorch 2.15. The tar form
// of torch 1.5 and older is not read.
package torchfile

import (
	"archive/zip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"

	"mula/internal/pickle"
	"mula/moe/safetensors"
)

// storages has the element types of torch's classes of storages.
var storages = map[pickle.Global]safetensors.DType{
	"torch.FloatStorage": safetensors.F32, "torch.BFloat16Storage": safetensors.BF16,
	"torch.HalfStorage": safetensors.F16, "torch.DoubleStorage": "F64", "torch.LongStorage": "I64",
	"torch.IntStorage": "I32", "torch.ShortStorage": "I16", "torch.CharStorage": "I8", "torch.ByteStorage": "U8",
	"torch.BoolStorage": "BOOL", "torch.storage.UntypedStorage": "U8", "torch.UInt16Storage": "U16",
	"torch.UInt32Storage": "U32", "torch.UInt64Storage": "U64",
}

// Functions that torch's pickles call to make tensors.
const (
	rebuildTensor    pickle.Global = "torch._utils._rebuild_tensor_v2"
	rebuildParameter pickle.Global = "torch._utils._rebuild_parameter"
	rebuildFromType  pickle.Global = "torch._tensor._rebuild_from_type_v2"
	sizeGlobal       pickle.Global = "torch.Size"
)

// tensorGlobals are the globals that torch's pickles of tensors have, besides storages.
var tensorGlobals = map[pickle.Global]bool{rebuildTensor: true, rebuildParameter: true, rebuildFromType: true,
	sizeGlobal: true, "torch.Tensor": true, "torch.nn.parameter.Parameter": true}

// A Tensor is a tensor of a file.
type Tensor struct {
	DType safetensors.DType
	Shape []int

	file  *File
	first int64 // byte of its first element in the file
}

// Elements returns the number of elements.
func (t *Tensor) Elements() int64 {
	n := int64(1)
	for _, d := range t.Shape {
		n *= int64(d)
	}
	return n
}

// A storage is a member of the archive with elements.
type storage struct {
	dtype safetensors.DType
	at    int64 // first byte in the file
	bytes int64
}

// A File is an open file. Its tensors can be read as long as its reader can.
type File struct {
	Root pickle.Value // tensors are *[Tensor], and values of torch.Size are [pickle.Tuple]

	name    string
	r       io.ReaderAt
	members map[string]*zip.File // without the folder of the archive
}

// Open reads the pickle of the file at path. The file is open only while it is read, so that a
// process may use the tensors of many files. allowed reports which globals the pickle may have,
// besides tensors; nil: none.
func Open(path string, allowed func(pickle.Global) bool) (*File, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	return parse(closedFile(path), info.Size(), path, allowed)
}

// OpenSection is [Open] for a file of torch.save in n bytes of the file at path, from byte first
// on.
func OpenSection(path string, first, n int64, allowed func(pickle.Global) bool) (*File, error) {
	name := fmt.Sprintf("%s, from byte %d", path, first)
	return parse(io.NewSectionReader(closedFile(path), first, n), n, name, allowed)
}

// A closedFile is the path of a file that is opened for each read.
type closedFile string

func (f closedFile) ReadAt(p []byte, off int64) (int, error) {
	file, err := os.Open(string(f))
	if err != nil {
		return 0, err
	}
	defer file.Close()
	return file.ReadAt(p, off)
}

// parse reads the pickle of a file of size bytes. name is the file's name in errors. allowed
// reports which globals the pickle may have, besides tensors; nil: none.
func parse(r io.ReaderAt, size int64, name string, allowed func(pickle.Global) bool) (*File, error) {
	f := &File{name: name, r: r, members: map[string]*zip.File{}}
	if err := f.read(size, allowed); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return f, nil
}

const maxPickle = 256 << 20 // bytes

func (f *File) read(size int64, allowed func(pickle.Global) bool) error {
	archive, err := zip.NewReader(f.r, size)
	if errors.Is(err, zip.ErrFormat) {
		return fmt.Errorf("cut short, or not a file of torch.save (%w); copy the file again, or save it with PyTorch "+
			"1.6 or newer", err)
	} else if err != nil {
		return err
	}
	for _, m := range archive.File {
		_, name, inside := strings.Cut(m.Name, "/")
		if !inside {
			continue
		}
		if _, twice := f.members[name]; twice {
			return fmt.Errorf("the archive has two members named %q", name)
		}
		f.members[name] = m
	}
	if f.members["byteorder"] != nil { // older versions of torch have none
		order, err := f.content("byteorder", 16)
		if err == nil && string(order) != "little" {
			err = fmt.Errorf("the byte order is %q; only little is supported", order)
		}
		if err != nil {
			return err
		}
	}
	data, err := f.content("data.pkl", maxPickle)
	if err != nil {
		return err
	}
	f.Root, err = pickle.Read(data, pickle.Options{
		Allowed: func(g pickle.Global) bool {
			_, isStorage := storages[g]
			return isStorage || tensorGlobals[g] || allowed != nil && allowed(g)
		},
		Persistent: f.storage,
		Call:       f.call,
	})
	return err
}

// content reads a member of at most most bytes.
func (f *File) content(name string, most int64) ([]byte, error) {
	at, n, err := f.locate(name)
	if err != nil {
		return nil, err
	}
	if n > most {
		return nil, fmt.Errorf("%s has %d bytes; the maximum is %d", name, n, most)
	}
	b := make([]byte, n)
	if err := f.readAt(b, at); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return b, nil
}

// locate returns the first byte and the size of a member.
func (f *File) locate(name string) (at, n int64, err error) {
	m := f.members[name]
	if m == nil {
		return 0, 0, fmt.Errorf("the archive has no member %s; it is not a file of torch.save", name)
	}
	if m.Method != zip.Store || m.CompressedSize64 != m.UncompressedSize64 || m.UncompressedSize64 > math.MaxInt64 {
		return 0, 0, fmt.Errorf("member %s is compressed; torch.save does not compress", name)
	}
	if at, err = m.DataOffset(); err != nil {
		return 0, 0, fmt.Errorf("member %s: %w", name, err)
	}
	return at, int64(m.UncompressedSize64), nil
}

func (f *File) readAt(p []byte, off int64) error {
	n, err := f.r.ReadAt(p, off)
	if n == len(p) {
		return nil
	}
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// storage finds the storage of a persistent id, ("storage", class, key, device, elements).
func (f *File) storage(id pickle.Value) (pickle.Value, error) {
	t, ok := id.(pickle.Tuple)
	if !ok || len(t) != 5 || t[0] != "storage" {
		return nil, errors.New("unsupported persistent id")
	}
	class, isClass := t[1].(pickle.Global)
	key, isKey := t[2].(string)
	n, isNumber := t[4].(int64)
	dtype, known := storages[class]
	if !isClass || !isKey || !isNumber || !known {
		return nil, errors.New("unsupported persistent id")
	}
	at, bytes, err := f.locate("data/" + key)
	if err != nil {
		return nil, err
	}
	if n < 0 || n > bytes/int64(dtype.Size()) {
		return nil, fmt.Errorf("storage %s has %d bytes, fewer than its %d elements of type %s", key, bytes, n, dtype)
	}
	return &storage{dtype, at, n * int64(dtype.Size())}, nil
}

// call evaluates the functions that make tensors.
func (f *File) call(g pickle.Global, args pickle.Tuple) (pickle.Value, bool, error) {
	wrong := fmt.Errorf("unsupported arguments of %s", g)
	switch g {
	case sizeGlobal:
		if len(args) == 1 {
			if t, ok := args[0].(pickle.Tuple); ok {
				return t, true, nil
			}
		}
		return nil, true, wrong
	case rebuildParameter:
		if len(args) > 0 {
			if t, ok := args[0].(*Tensor); ok {
				return t, true, nil
			}
		}
		return nil, true, wrong
	case rebuildFromType: // a tensor with attributes: function, class, arguments, attributes
		if len(args) == 4 {
			function, isGlobal := args[0].(pickle.Global)
			inner, isTuple := args[2].(pickle.Tuple)
			if isGlobal && isTuple && function == rebuildTensor {
				return f.call(function, inner)
			}
		}
		return nil, true, wrong
	case rebuildTensor:
		if len(args) < 4 {
			return nil, true, wrong
		}
		s, ok := args[0].(*storage)
		first, isNumber := args[1].(int64)
		shape, isShape := Ints(args[2])
		strides, isStrides := Ints(args[3])
		if !ok || !isNumber || !isShape || !isStrides || len(shape) != len(strides) {
			return nil, true, wrong
		}
		t, err := f.tensor(s, first, shape, strides)
		return t, true, err
	}
	return nil, false, nil
}

// tensor returns a tensor whose elements are consecutive in a storage.
func (f *File) tensor(s *storage, first int64, shape, strides []int) (*Tensor, error) {
	n := int64(1)
	for i, d := range slices.Backward(shape) {
		if d < 0 || d > 0 && n > math.MaxInt64/16/int64(d) {
			return nil, fmt.Errorf("a tensor has shape %v", shape)
		}
		if d > 1 && int64(strides[i]) != n {
			return nil, fmt.Errorf("a tensor of shape %v has strides %v; only row-major tensors are supported", shape,
				strides)
		}
		n *= int64(d)
	}
	bytes := int64(s.dtype.Size())
	if first < 0 || first > s.bytes/bytes || n > s.bytes/bytes-first {
		return nil, fmt.Errorf("a tensor of shape %v, from element %d, exceeds its storage of %d elements", shape,
			first, s.bytes/bytes)
	}
	return &Tensor{DType: s.dtype, Shape: shape, file: f, first: s.at + first*bytes}, nil
}

// Ints returns the integers of a tuple or list.
func Ints(v pickle.Value) ([]int, bool) {
	var items []pickle.Value
	switch v := v.(type) {
	case pickle.Tuple:
		items = v
	case *pickle.List:
		items = v.Items
	default:
		return nil, false
	}
	ints := make([]int, len(items))
	for i, item := range items {
		n, ok := item.(int64)
		if !ok || n != int64(int(n)) {
			return nil, false
		}
		ints[i] = int(n)
	}
	return ints, true
}

// Float32 reads len(dst) elements from element first on, of type F32, F16 or BF16.
func (t *Tensor) Float32(dst []float32, first int64) error {
	if t.DType != safetensors.F32 && t.DType != safetensors.BF16 && t.DType != safetensors.F16 {
		return fmt.Errorf("%s: a tensor has elements of type %s; only F32, F16 and BF16 are supported",
			t.file.name, t.DType)
	}
	if n := t.Elements(); first < 0 || first > n || int64(len(dst)) > n-first {
		return fmt.Errorf("%s: a tensor has %d elements, not %d from %d", t.file.name, n, len(dst), first)
	}
	bytes := int64(t.DType.Size())
	at := t.first + first*bytes
	buffer := make([]byte, min(len(dst)*int(bytes), 1<<20))
	for len(dst) > 0 {
		n := min(len(dst), len(buffer)/int(bytes))
		part := buffer[:n*int(bytes)]
		if err := t.file.readAt(part, at); err != nil {
			return fmt.Errorf("%s: at byte %d: %w", t.file.name, at, err)
		}
		safetensors.Decode(dst[:n], part, t.DType)
		dst, at = dst[n:], at+int64(len(part))
	}
	return nil
}

// Number returns the only element of a tensor of one element.
func (t *Tensor) Number() (float64, error) {
	if t.Elements() != 1 {
		return 0, fmt.Errorf("%s: a number is a tensor of shape %v", t.file.name, t.Shape)
	}
	b := make([]byte, 8)
	if err := t.file.readAt(b[:int64(t.DType.Size())], t.first); err != nil {
		return 0, fmt.Errorf("%s: at byte %d: %w", t.file.name, t.first, err)
	}
	switch t.DType {
	case "I64":
		return float64(int64(binary.LittleEndian.Uint64(b))), nil
	case "I32":
		return float64(int32(binary.LittleEndian.Uint32(b))), nil
	case "F64":
		return math.Float64frombits(binary.LittleEndian.Uint64(b)), nil
	}
	var x [1]float32
	err := t.Float32(x[:], 0)
	return float64(x[0]), err
}
