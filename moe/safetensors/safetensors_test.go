package safetensors

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"mula/internal/filesystem"
)

// file is a safetensors file with the given header and size of data.
func file(header string, data int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	b = append(b, header...)
	for i := range data {
		b = append(b, byte(i))
	}
	return b
}

func read(b []byte) (*File, error) { return Read(bytes.NewReader(b), int64(len(b)), "x.safetensors") }

// What the writer writes the reader reads, and both see the layout that the format prescribes.
func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		names := rapid.SliceOfNDistinct(rapid.StringN(0, 12, -1), 0, 6, rapid.ID).Draw(t, "names")
		var tensors []Tensor
		var values [][]float32
		for _, name := range names {
			if name == "__metadata__" || strings.ToValidUTF8(name, "") != name {
				continue
			}
			x := Tensor{
				Name: name, DType: rapid.SampledFrom([]DType{F32, F16, BF16}).Draw(t, "dtype"),
				Shape: rapid.SliceOfN(rapid.IntRange(0, 5), 0, 4).Draw(t, "shape"),
			}
			v := make([]float32, x.Elements())
			for i := range v {
				v[i] = float32(rapid.IntRange(-128, 128).Draw(t, "v")) / 4 // exact in all three types
			}
			tensors, values = append(tensors, x), append(values, v)
		}
		metadata := rapid.MapOfN(rapid.StringMatching("[a-z]{1,5}"), rapid.String(), 0, 3).Draw(t, "metadata")
		var b bytes.Buffer
		w, err := NewWriter(&b, tensors, metadata)
		if err != nil {
			t.Fatal(err)
		}
		for i, x := range tensors {
			if err := w.Float32(x.Name, values[i]); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if n := binary.LittleEndian.Uint64(b.Bytes()); n%8 != 0 {
			t.Fatalf("header of %d bytes: the data is not aligned", n)
		}
		f, err := read(b.Bytes())
		if err != nil {
			t.Fatal(err)
		}
		if f.Metadata()["format"] == "" || len(f.Tensors()) != len(tensors) {
			t.Fatalf("metadata %v, %d tensors of %d", f.Metadata(), len(f.Tensors()), len(tensors))
		}
		for i, x := range tensors {
			got, ok := f.Tensor(x.Name)
			if !ok || got.DType != x.DType || !slices.Equal(got.Shape, x.Shape) {
				t.Fatalf("tensor %+v, want %+v", got, x)
			}
			first := 0
			if len(values[i]) > 0 {
				first = rapid.IntRange(0, len(values[i])-1).Draw(t, "first")
			}
			v := make([]float32, len(values[i])-first)
			if err := f.Float32(v, x.Name, int64(first)); err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(v, values[i][first:]) {
				t.Fatalf("%s from %d: %v, want %v", x.Name, first, v, values[i][first:])
			}
		}
	})
}

// Tensors larger than the conversion buffers.
func TestLargeTensor(t *testing.T) {
	for _, d := range []DType{F32, BF16} {
		v := make([]float32, 1_200_001)
		for i := range v {
			v[i] = float32(i % 251)
		}
		var b bytes.Buffer
		w, err := NewWriter(&b, []Tensor{{Name: "w", DType: d, Shape: []int{len(v)}}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := w.Float32("w", v); err != nil {
			t.Fatal(err)
		}
		f, err := read(b.Bytes())
		if err != nil {
			t.Fatal(err)
		}
		got := make([]float32, len(v)-5)
		if err := f.Float32(got, "w", 5); err != nil || !slices.Equal(got, v[5:]) {
			t.Errorf("%s: %v, or other values", d, err)
		}
	}
}

func TestCorruptFiles(t *testing.T) {
	const a = `"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}`
	for _, test := range []struct {
		name string
		file []byte
		want string
	}{
		{"empty", nil, "0 bytes are too few"},
		{"no header", []byte{1, 2, 3}, "3 bytes are too few"},
		{"huge header", append([]byte{0, 0, 0, 0, 1, 0, 0, 0}, make([]byte, 100)...),
			"header of 4294967296 bytes; at most"},
		{"negative header", slices.Repeat([]byte{0xff}, 16), "at most 100000000"},
		{"cut header", file("{"+a+"}", 8)[:20], "the file is cut short"},
		{"no object", file(`[1]`, 0), "does not start with {"},
		{"empty header", file("", 0), "does not start with {"},
		{"leading space", file(" {}", 0), "does not start with {"},
		{"open object", file("{"+a, 8), "header at byte"},
		{"two objects", file("{"+a+"}{}", 8), "text after the end"},
		{"no JSON", file("{a}", 0), "header at byte"},
		{"twice", file("{"+a+","+a+"}", 8), `tensor "a" occurs twice`},
		{"two metadata", file(`{"__metadata__":{},"__metadata__":{},`+a+"}", 8), "__metadata__ occurs twice"},
		{"metadata of numbers", file(`{"__metadata__":{"a":1},`+a+"}", 8), "__metadata__"},
		{"cut data", file("{"+a+"}", 7), "ends at byte 8 of 7"},
		{"data left over", file("{"+a+"}", 9), "1 bytes follow the last tensor"},
		{"gap", file(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}`, 12), "starts at byte 4"},
		{"overlap", file("{"+a+`,"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}`, 8),
			`"b" starts at byte 4 of the data, where 8`},
		{"turned round", file(`{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,-1]}}`, 8), "ends at byte -1"},
		{"wrong size", file(`{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}`, 8), "has 8 bytes, want 12"},
		{"overflow", file(`{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]}}`, 8),
			"too large"},
		{"overflow to zero", file(`{"a":{"dtype":"U8","shape":[9223372036854775807,2],"data_offsets":[0,8]}}`, 8),
			"too large"},
		{"negative shape", file(`{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}`, 8), "negative size"},
		{"fraction", file(`{"a":{"dtype":"F32","shape":[2.5],"data_offsets":[0,8]}}`, 8), `tensor "a"`},
		{"unknown type", file(`{"a":{"dtype":"F128","shape":[1],"data_offsets":[0,8]}}`, 8),
			`unknown element type "F128"`},
		{"one offset", file(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[8]}}`, 8), "two data_offsets"},
		{"no shape", file(`{"a":{"dtype":"F32","data_offsets":[0,8]}}`, 8), "needs dtype, shape"},
	} {
		_, err := read(test.file)
		if !errors.Is(err, errCorrupt) || !strings.Contains(err.Error(), test.want) ||
			!strings.HasPrefix(err.Error(), "x.safetensors: ") {
			t.Errorf("%s: error %v, want one with %q", test.name, err, test.want)
		}
	}
}

func TestFloat32Refuses(t *testing.T) {
	f, err := read(file(`{"a":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}`, 16))
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name     string
		n, first int
		want     string
	}{{"a", 1, 0, "type I64"}, {"c", 1, 0, "no tensor"}, {"b", 3, 0, "2 elements"}, {"b", 2, 1, "2 elements"},
		{"b", 0, 3, "2 elements"}, {"b", 1, -1, "2 elements"}} {
		if err := f.Float32(make([]float32, test.n), test.name, int64(test.first)); err == nil ||
			!strings.Contains(err.Error(), test.want) {
			t.Errorf("%d of %s from %d: error %v, want one with %q", test.n, test.name, test.first, err, test.want)
		}
	}
	if err := f.Float32(nil, "b", 2); err != nil {
		t.Errorf("nothing from the end: %v", err)
	}
}

func TestWriterRefuses(t *testing.T) {
	for _, tensors := range [][]Tensor{
		{{Name: "a", DType: F32}, {Name: "a", DType: F32}}, {{Name: "__metadata__", DType: F32}},
		{{Name: "a", DType: "I64"}}, {{Name: "a", DType: F32, Shape: []int{-1}}},
		{{Name: "a", DType: F32, Shape: []int{math.MaxInt, 2}}},
	} {
		if _, err := NewWriter(io.Discard, tensors, nil); err == nil {
			t.Errorf("%+v is accepted", tensors)
		}
	}
	w, err := NewWriter(io.Discard, []Tensor{{Name: "a", DType: F32, Shape: []int{2}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if w.Float32("b", make([]float32, 2)) == nil || w.Float32("a", make([]float32, 3)) == nil {
		t.Error("another tensor than announced is accepted")
	}
	if err := w.Close(); err == nil {
		t.Error("a tensor is missing, Close says nothing")
	}
	if err := w.Float32("a", make([]float32, 2)); err != nil {
		t.Error(err)
	}
	if w.Float32("a", make([]float32, 2)) == nil {
		t.Error("a tensor beyond the last is accepted")
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
}

// A writer that fails, at any byte, fails the write.
func TestWriterPassesErrorsOn(t *testing.T) {
	full := errors.New("disk full")
	for room := range 130 {
		left := room
		w, err := NewWriter(writerFunc(func(p []byte) (int, error) {
			if left -= len(p); left < 0 {
				return 0, full
			}
			return len(p), nil
		}), []Tensor{{Name: "a", DType: F32, Shape: []int{2}}}, nil)
		if err == nil {
			err = w.Float32("a", make([]float32, 2))
		}
		if left < 0 != errors.Is(err, full) {
			t.Errorf("room for %d bytes: error %v", room, err)
		}
	}
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func writeTensors(t *testing.T, path string, names ...string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var tensors []Tensor
	for _, name := range names {
		tensors = append(tensors, Tensor{Name: name, DType: F32, Shape: []int{1}})
	}
	w, err := NewWriter(f, tensors, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i, name := range names {
		if err := w.Float32(name, []float32{float32(i + 1)}); err != nil {
			t.Fatal(err)
		}
	}
}

func TestDirectory(t *testing.T) {
	for _, test := range []struct {
		name, index string
		files       map[string][]string
		want        string // error
		is          error
	}{
		{name: "several files", index: `{"weight_map":{"a":"1.safetensors","b":"2.safetensors","c":"1.safetensors"}}`,
			files: map[string][]string{"1.safetensors": {"a", "c"}, "2.safetensors": {"b"}}},
		{name: "one file", files: map[string][]string{SingleName: {"a", "b", "c"}}},
		{name: "one file goes first", index: `broken`, files: map[string][]string{SingleName: {"a", "b", "c"}}},
		{name: "nothing", want: "holds neither", is: fs.ErrNotExist},
		{name: "file missing", index: `{"weight_map":{"a":"1.safetensors"}}`, want: "1.safetensors",
			is: fs.ErrNotExist},
		{name: "tensor missing", index: `{"weight_map":{"a":"1.safetensors","b":"1.safetensors"}}`,
			files: map[string][]string{"1.safetensors": {"a"}}, want: `tensor "b" is missing`, is: errCorrupt},
		{name: "tensor elsewhere", index: `{"weight_map":{"a":"1.safetensors","b":"2.safetensors"}}`,
			files: map[string][]string{"1.safetensors": {"a", "b"}, "2.safetensors": {"b"}},
			want:  `does not place there`, is: errCorrupt},
		{name: "tensor not in index", index: `{"weight_map":{"a":"1.safetensors"}}`,
			files: map[string][]string{"1.safetensors": {"a", "b"}}, want: `does not place there`, is: errCorrupt},
		{name: "path upwards", index: `{"weight_map":{"a":"../1.safetensors"}}`, want: "not the name of a file",
			is: errCorrupt},
		{name: "absolute path", index: `{"weight_map":{"a":"/etc/passwd"}}`, want: "not the name of a file",
			is: errCorrupt},
		{name: "empty index", index: `{}`, want: "weight_map is empty", is: errCorrupt},
		{name: "no JSON", index: `weights`, want: "invalid character", is: errCorrupt},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			for name, tensors := range test.files {
				writeTensors(t, filepath.Join(dir, name), tensors...)
			}
			if test.index != "" {
				if err := os.WriteFile(filepath.Join(dir, IndexName), []byte(test.index), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			d, err := OpenDirectory(filesystem.OS{}, dir)
			if test.want != "" {
				if err == nil || !strings.Contains(err.Error(), test.want) || !errors.Is(err, test.is) {
					t.Fatalf("error %v, want one with %q that is %v", err, test.want, test.is)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			if len(d.Tensors()) != 3 {
				t.Errorf("tensors %v", d.Tensors())
			}
			for file, tensors := range maps.All(test.files) {
				for i, name := range tensors {
					var v [1]float32
					if err := d.Float32(v[:], name, 0); err != nil || v[0] != float32(i+1) {
						t.Errorf("%s in %s is %v, %v", name, file, v, err)
					}
				}
			}
			if d.Float32(nil, "d", 0) == nil {
				t.Error("a tensor that is not there is read")
			}
		})
	}
}

// Bytes of any kind give an error or a file whose tensors all can be read.
func FuzzRead(f *testing.F) {
	f.Add(file(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}`, 8))
	f.Add(file(`{"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2,1],"data_offsets":[8,12]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  `, 12))
	f.Add(file(`{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"b":{"dtype":"F16","shape":[0],"data_offsets":[1,1]}}`, 1))
	f.Fuzz(func(t *testing.T, b []byte) {
		file, err := read(b)
		if err != nil {
			if !errors.Is(err, errCorrupt) {
				t.Fatalf("error %v is not errCorrupt", err)
			}
			return
		}
		total := int64(0)
		for _, x := range file.Tensors() {
			n := x.Elements()
			total += n * int64(x.DType.Size())
			if n > int64(len(b)) {
				t.Fatalf("%+v in %d bytes", x, len(b))
			}
			err := file.Float32(make([]float32, n), x.Name, 0)
			if known := x.DType == F32 || x.DType == F16 || x.DType == BF16; known != (err == nil) {
				t.Fatalf("%+v: %v", x, err)
			}
		}
		if total > int64(len(b)) {
			t.Fatalf("tensors of %d bytes in %d", total, len(b))
		}
	})
}

func FuzzParseIndex(f *testing.F) {
	f.Add([]byte(`{"metadata":{"total_size":4},"weight_map":{"a":"model-00001-of-00002.safetensors"}}`))
	f.Add([]byte(`{"weight_map":{"a":"../x"}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		index, err := parseIndex(text)
		if err != nil {
			return
		}
		for tensor, name := range index.WeightMap {
			if filepath.Dir(filepath.Join("dir", name)) != "dir" {
				t.Fatalf("tensor %q leads to %q, out of the directory", tensor, name)
			}
		}
	})
}

// A tensor may be written in pieces; a number that its element type cannot hold is refused by name.
func TestWritePieces(t *testing.T) {
	tensors := []Tensor{{Name: "a", DType: F16, Shape: []int{5}}, {Name: "empty", DType: F32, Shape: []int{0}},
		{Name: "b", DType: BF16, Shape: []int{2}}}
	data := []float32{1, 2, 3, 4, 65519}
	var whole, pieces bytes.Buffer
	for _, out := range []*bytes.Buffer{&whole, &pieces} {
		w, err := NewWriter(out, tensors, nil)
		if err != nil {
			t.Fatal(err)
		}
		if out == &whole {
			err = w.Float32("a", data)
		} else {
			for _, n := range [][2]int{{0, 2}, {2, 2}, {2, 4}, {4, 5}} {
				err = errors.Join(err, w.Float32("a", data[n[0]:n[1]]))
			}
		}
		if err := errors.Join(err, w.Float32("empty", nil),
			w.Float32("b", []float32{0x1.fep+127, float32(math.Inf(1))}), w.Close()); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(whole.Bytes(), pieces.Bytes()) {
		t.Error("pieces give other bytes")
	}
	w, err := NewWriter(&whole, tensors, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Float32("a", []float32{1, 2}); err != nil {
		t.Fatal(err)
	}
	if w.Float32("empty", nil) == nil || w.Float32("a", make([]float32, 4)) == nil || w.Close() == nil {
		t.Error("a tensor that is not whole, or longer than announced, is accepted")
	}
	for _, x := range []float32{65520, -65520, 1e10} {
		if err := w.Float32("a", []float32{7, x}); err == nil || !strings.Contains(err.Error(), "element 3 is") {
			t.Errorf("%v in F16: %v", x, err)
		}
	}
	if i := beyond([]float32{0x1.fefp+127, 0x1.ffp+127}, BF16); i != 1 {
		t.Errorf("element %d is beyond BF16", i)
	}
}
