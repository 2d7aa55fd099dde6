package safetensors

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"maps"
)

// A Writer writes a file from front to back.
type Writer struct {
	w       io.Writer
	tensors []Tensor
	next    int   // tensor that is being written
	done    int64 // elements of that tensor that are written
	buffer  []byte
}

// NewWriter writes the header of a file that will hold the given tensors, in that order. metadata
// is added to the "format": "pt" that transformers requires; it may be nil.
func NewWriter(w io.Writer, tensors []Tensor, metadata map[string]string) (*Writer, error) {
	header, err := header(tensors, metadata)
	if err != nil {
		return nil, err
	}
	if _, err := w.Write(header); err != nil {
		return nil, fmt.Errorf("writing the header: %w", err)
	}
	return &Writer{w: w, tensors: tensors}, nil
}

func header(tensors []Tensor, metadata map[string]string) ([]byte, error) {
	all := map[string]string{"format": "pt"}
	maps.Copy(all, metadata)
	text, err := json.Marshal(all)
	if err != nil {
		return nil, err
	}
	b := append(make([]byte, 8), `{"__metadata__":`...)
	b = append(b, text...)
	at := int64(0)
	seen := make(map[string]bool, len(tensors))
	for _, t := range tensors {
		if seen[t.Name] || t.Name == "__metadata__" {
			return nil, fmt.Errorf("duplicate tensor name %q", t.Name)
		}
		seen[t.Name] = true
		if t.DType != F32 && t.DType != F16 && t.DType != BF16 {
			return nil, fmt.Errorf("tensor %q: element type %q is not supported; use F32, F16 or BF16", t.Name,
				t.DType)
		}
		n, err := t.bytes()
		if err != nil {
			return nil, err
		}
		shape := t.Shape
		if shape == nil {
			shape = []int{}
		}
		name, err := json.Marshal(t.Name)
		if err != nil {
			return nil, err
		}
		entry, err := json.Marshal(struct {
			DType   DType    `json:"dtype"`
			Shape   []int    `json:"shape"`
			Offsets [2]int64 `json:"data_offsets"`
		}{t.DType, shape, [2]int64{at, at + n}})
		if err != nil {
			return nil, err
		}
		b = append(append(append(append(b, ','), name...), ':'), entry...)
		at += n
	}
	b = append(b, '}')
	for len(b)%8 != 0 { // the data starts 8-byte aligned
		b = append(b, ' ')
	}
	if len(b)-8 > maxHeader {
		return nil, fmt.Errorf("header of %d bytes; at most %d are allowed", len(b)-8, maxHeader)
	}
	binary.LittleEndian.PutUint64(b, uint64(len(b)-8))
	return b, nil
}

// Float32 writes the next elements of the named tensor, converted to its element type (to nearest,
// ties to even). Tensors must be written in the order given to NewWriter. A tensor may be written
// in several consecutive calls. A finite number beyond the range of the element type is an error
// that names the tensor and the element.
func (w *Writer) Float32(name string, data []float32) error {
	if w.next == len(w.tensors) {
		return fmt.Errorf("tensor %q follows the last tensor of the header", name)
	}
	t := w.tensors[w.next]
	if t.Name != name || int64(len(data)) > t.Elements()-w.done {
		return fmt.Errorf("tensor %q: %d elements, but the header expects %d of tensor %q next", name, len(data),
			t.Elements()-w.done, t.Name)
	}
	size := t.DType.Size()
	if n := min(len(data)*size, 1<<20); len(w.buffer) < n { // small files need no large buffer
		w.buffer = make([]byte, n)
	}
	for len(data) > 0 {
		n := min(len(data), len(w.buffer)/size)
		if i := beyond(data[:n], t.DType); i >= 0 {
			return fmt.Errorf("tensor %q: element %d is %g, beyond the range of %s; choose another element type", name,
				w.done+int64(i), data[i], t.DType)
		}
		Encode(w.buffer[:n*size], data[:n], t.DType)
		if _, err := w.w.Write(w.buffer[:n*size]); err != nil {
			return fmt.Errorf("writing tensor %q: %w", name, err)
		}
		data, w.done = data[n:], w.done+int64(n)
	}
	if w.done == t.Elements() {
		w.next, w.done = w.next+1, 0
	}
	return nil
}

// Close returns an error unless all tensors are complete. It does not close the underlying writer.
func (w *Writer) Close() error {
	if w.next < len(w.tensors) {
		return fmt.Errorf("tensor %q is missing or incomplete", w.tensors[w.next].Name)
	}
	return nil
}
