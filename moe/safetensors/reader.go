package safetensors

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"slices"

	"mula/internal/filesystem"
)

// maxHeader is the longest header that the reference implementation reads, in bytes.
const maxHeader = 100_000_000

// A File is an open safetensors file. Its methods, except Close, may be called concurrently.
type File struct {
	name     string
	r        io.ReaderAt
	close    func() error
	data     int64    // offset of the first byte of data
	tensors  []Tensor // in the order of their data
	byName   map[string]int
	metadata map[string]string
}

// Open opens a file and checks its header against the file size.
func Open(path string) (*File, error) { return open(filesystem.OS{}, path) }

func open(fsys filesystem.FS, path string) (*File, error) {
	f, err := filesystem.Open(fsys, path)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, err
	}
	file, err := Read(f, info.Size(), path)
	if err != nil {
		f.Close()
		return nil, err
	}
	file.close = f.Close
	return file, nil
}

// Read reads the header of a file of size bytes; name is the file name in errors. r must stay
// readable as long as the File is used.
func Read(r io.ReaderAt, size int64, name string) (*File, error) {
	f := &File{name: name, r: r, close: func() error { return nil }}
	if err := f.readHeader(size); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return f, nil
}

func corrupt(format string, args ...any) error {
	return fmt.Errorf("%w: %s", errCorrupt, fmt.Sprintf(format, args...))
}

func (f *File) readHeader(size int64) error {
	var length [8]byte
	if size < int64(len(length)) {
		return corrupt("%d bytes are too few for a header", size)
	}
	if err := f.readAt(length[:], 0); err != nil {
		return fmt.Errorf("reading the header's length: %w", err)
	}
	n := binary.LittleEndian.Uint64(length[:])
	if n > maxHeader {
		return corrupt("header of %d bytes; at most %d are allowed", n, maxHeader)
	}
	if int64(n) > size-8 {
		return corrupt("header of %d bytes in a file of %d: the file is cut short or not a safetensors file", n, size)
	}
	header := make([]byte, n)
	if err := f.readAt(header, 8); err != nil {
		return fmt.Errorf("reading the header: %w", err)
	}
	f.data = 8 + int64(n)
	if err := f.parseHeader(header); err != nil {
		return err
	}
	return f.checkOffsets(size - f.data)
}

// readAt fills p. An io.ReaderAt may return io.EOF together with the last bytes of the file.
func (f *File) readAt(p []byte, off int64) error {
	n, err := f.r.ReadAt(p, off)
	if n == len(p) {
		return nil
	}
	return err
}

// parseHeader reads the JSON entry by entry, because a map would keep only one of two tensors with
// the same name.
func (f *File) parseHeader(header []byte) error {
	if len(header) == 0 || header[0] != '{' {
		return corrupt("header does not start with {")
	}
	d := json.NewDecoder(bytes.NewReader(header))
	at := func() int64 { return 8 + d.InputOffset() }
	if _, err := d.Token(); err != nil {
		return corrupt("header at byte %d: %v", at(), err)
	}
	f.byName = make(map[string]int)
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return corrupt("header at byte %d: %v", at(), err)
		}
		name, _ := key.(string) // a key of an object is a string, or Token fails
		if name == "__metadata__" {
			if f.metadata != nil {
				return corrupt("header at byte %d: __metadata__ occurs twice", at())
			}
			f.metadata = map[string]string{}
			if err := d.Decode(&f.metadata); err != nil {
				return corrupt("header at byte %d: __metadata__: %v", at(), err)
			}
			continue
		}
		var entry struct {
			DType   *DType   `json:"dtype"`
			Shape   *[]int   `json:"shape"`
			Offsets *[]int64 `json:"data_offsets"`
		}
		if err := d.Decode(&entry); err != nil {
			return corrupt("header at byte %d: tensor %q: %v", at(), name, err)
		}
		if entry.DType == nil || entry.Shape == nil || entry.Offsets == nil || len(*entry.Offsets) != 2 {
			return corrupt("tensor %q: its entry needs dtype, shape and two data_offsets", name)
		}
		if _, ok := f.byName[name]; ok {
			return corrupt("tensor %q occurs twice", name)
		}
		t := Tensor{Name: name, DType: *entry.DType, Shape: *entry.Shape, begin: (*entry.Offsets)[0],
			end: (*entry.Offsets)[1]}
		f.byName[name] = len(f.tensors)
		f.tensors = append(f.tensors, t)
	}
	if _, err := d.Token(); err != nil {
		return corrupt("header at byte %d: %v", at(), err)
	}
	if rest := bytes.TrimRight(header[d.InputOffset():], " \t\r\n"); len(rest) > 0 {
		return corrupt("header at byte %d: text after the end of the object", at())
	}
	return nil
}

// checkOffsets checks that the tensors cover the data without gap or overlap, and that each tensor
// has the size of its shape.
func (f *File) checkOffsets(size int64) error {
	slices.SortFunc(f.tensors, func(a, b Tensor) int {
		return cmp.Or(cmp.Compare(a.begin, b.begin), cmp.Compare(a.end, b.end), cmp.Compare(a.Name, b.Name))
	})
	at := int64(0)
	for i, t := range f.tensors {
		f.byName[t.Name] = i
		want, err := t.bytes()
		if err != nil {
			return corrupt("%v", err)
		}
		if t.begin != at {
			return corrupt("tensor %q starts at byte %d of the data, where %d is expected: gap or overlap", t.Name,
				t.begin, at)
		}
		if t.end < t.begin || t.end > size {
			return corrupt("tensor %q ends at byte %d of %d bytes of data: the file is cut short or its header is "+
				"damaged",
				t.Name, t.end, size)
		}
		if t.end-t.begin != want {
			return corrupt("tensor %q of type %s and shape %v has %d bytes, want %d", t.Name, t.DType, t.Shape,
				t.end-t.begin, want)
		}
		at = t.end
	}
	if at != size {
		return corrupt("%d bytes follow the last tensor", size-at)
	}
	return nil
}

// Name returns the name that the file was opened under.
func (f *File) Name() string { return f.name }

// Tensors lists the tensors in the order of their data.
func (f *File) Tensors() []Tensor { return slices.Clone(f.tensors) }

// Tensor returns the header entry of the named tensor.
func (f *File) Tensor(name string) (Tensor, bool) {
	i, ok := f.byName[name]
	if !ok {
		return Tensor{}, false
	}
	return f.tensors[i], true
}

// Metadata returns the strings of __metadata__; do not modify the map.
func (f *File) Metadata() map[string]string { return f.metadata }

// Float32 reads len(dst) elements of a tensor of type F32, F16 or BF16, starting at element first.
func (f *File) Float32(dst []float32, name string, first int64) error {
	t, err := f.elements(name, first, len(dst), F32, F16, BF16)
	if err != nil {
		return err
	}
	size := t.DType.Size()
	at := f.data + t.begin + first*int64(size)
	buffer := make([]byte, min(len(dst)*size, 1<<20))
	for len(dst) > 0 {
		n := min(len(dst), len(buffer)/size)
		if err := f.readAt(buffer[:n*size], at); err != nil {
			return fmt.Errorf("%s: tensor %q at byte %d: %w", f.name, name, at, err)
		}
		Decode(dst[:n], buffer[:n*size], t.DType)
		dst, at = dst[n:], at+int64(n*size)
	}
	return nil
}

// Bytes reads len(dst) elements of a tensor of type U8, starting at element first.
func (f *File) Bytes(dst []byte, name string, first int64) error {
	t, err := f.elements(name, first, len(dst), U8)
	if err != nil {
		return err
	}
	at := f.data + t.begin + first
	if err := f.readAt(dst, at); err != nil {
		return fmt.Errorf("%s: tensor %q at byte %d: %w", f.name, name, at, err)
	}
	return nil
}

// elements returns a tensor. It fails if the tensor has none of the types, or not n elements from
// element first on.
func (f *File) elements(name string, first int64, n int, types ...DType) (Tensor, error) {
	t, ok := f.Tensor(name)
	if !ok {
		return t, fmt.Errorf("%s: no tensor is named %q", f.name, name)
	}
	if !slices.Contains(types, t.DType) {
		return t, fmt.Errorf("%s: tensor %q has elements of type %s; supported are %v", f.name, name, t.DType,
			types)
	}
	if all := t.Elements(); first < 0 || first > all || int64(n) > all-first {
		return t, fmt.Errorf("%s: tensor %q has %d elements, not %d from %d", f.name, name, all, n, first)
	}
	return t, nil
}

// Close closes the file.
func (f *File) Close() error { return f.close() }
