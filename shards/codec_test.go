package shards

import (
	"bytes"
	"encoding/binary"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// encode and decode are inverse for every type of ids, and write the bytes of encoding/binary.
func TestCodec(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		dtype := rapid.SampledFrom(idTypes).Draw(t, "dtype")
		ids := rapid.SliceOf(rapid.Uint32Max(uint32(dtype.IDs()-1))).Draw(t, "ids")
		var want []byte
		for _, id := range ids {
			var b [4]byte
			binary.LittleEndian.PutUint32(b[:], id)
			want = append(want, b[:dtype.Size()]...)
		}
		before := []byte{7}
		got := dtype.AppendEncoded(before, ids)
		if !bytes.Equal(got, append(before, want...)) {
			t.Fatalf("%s: %v is % x, want % x", dtype, ids, got[1:], want)
		}
		var all uint32
		for _, id := range ids {
			all |= id
		}
		read := make([]uint32, len(ids))
		if bits := dtype.decode(read, want); !slices.Equal(read, ids) || bits&all != all {
			t.Fatalf("%s: % x is %v with the bits %b, want %v", dtype, want, read, bits, ids)
		}
		if read, err := dtype.AppendChecked([]uint32{7}, want); err != nil || !slices.Equal(read[1:], ids) {
			t.Fatalf("%s: % x is %v, %v; want %v", dtype, want, read, err, ids)
		}
	})
}

// AppendChecked keeps the ids before the first number that is not an id.
func TestAppendChecked(t *testing.T) {
	ones := bytes.Repeat([]byte{255}, 8)
	for _, test := range []struct {
		dtype DType
		src   []byte
		want  []uint32
		valid bool
	}{
		{Int8, []byte{1, 127, 128, 3}, []uint32{1, 127}, false},
		{Int16, []byte{1, 0, 255, 127, 0, 128}, []uint32{1, 1<<15 - 1}, false},
		{Int32, slices.Concat([]byte{9, 0, 0, 0}, ones[:4]), []uint32{9}, false},
		{Int64, slices.Concat([]byte{9, 0, 0, 0, 0, 0, 0, 0}, ones), []uint32{9}, false},
		{UInt64, slices.Concat(ones[:4], []byte{0, 0, 0, 0}), []uint32{1<<32 - 1}, true},
		{UInt64, []byte{0, 0, 0, 0, 1, 0, 0, 0}, nil, false},
	} {
		got, err := test.dtype.AppendChecked(nil, test.src)
		if !slices.Equal(got, test.want) || (err == nil) != test.valid {
			t.Errorf("%s: % x is %v, %v; want %v, valid: %t", test.dtype, test.src, got, err, test.want, test.valid)
		}
	}
}

func TestSmallestDType(t *testing.T) {
	// numpy.min_scalar_type(n - 1), by numpy 2.1.3
	for n, want := range map[int]DType{0: UInt32, 1: UInt8, 256: UInt8, 257: UInt16, 50280: UInt16, 65536: UInt16,
		65537: UInt32, 100278: UInt32} {
		if got := SmallestDType(n, UInt8, UInt16, UInt32); got != want {
			t.Errorf("%d ids are %s, want %s", n, got, want)
		}
		if want == UInt8 {
			want = UInt16
		}
		if got := SmallestDType(n, UInt16, UInt32); got != want {
			t.Errorf("%d ids of 2 bytes or more are %s, want %s", n, got, want)
		}
	}
}
