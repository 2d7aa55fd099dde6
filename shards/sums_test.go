package shards

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"mula/internal/atomicfile"
)

// crc32c is the sum by its definition, bit by bit: polynomial 0x1EDC6F41 reflected, ones before and
// after (RFC 3720, section 12.1).
func crc32c(data []byte) uint32 {
	crc := ^uint32(0)
	for _, b := range data {
		crc ^= uint32(b)
		for range 8 {
			crc = crc>>1 ^ 0x82F63B78*(crc&1)
		}
	}
	return ^crc
}

// writeLengths makes a shard of documents of the given lengths and gives its prefix.
func writeLengths(t testing.TB, dir string, dtype DType, lengths []int) string {
	t.Helper()
	prefix := filepath.Join(dir, "x")
	w, err := Create(prefix, dtype, testInfo)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Abort()
	next := uint32(1)
	for d, n := range lengths {
		tokens := make([]uint32, n)
		for i := range tokens {
			tokens[i] = next % 50279
			next = next*1664525 + 1013904223
		}
		if err := w.Append(tokens, origin(int64(d))); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return prefix
}

// x.sums has the bytes that the format page describes, for files of no, one, several and partial
// blocks.
func TestSumsFile(t *testing.T) {
	if crc32c([]byte("123456789")) != 0xE3069283 { // the check value of RFC 3720's polynomial
		t.Fatal("the sum of the test is wrong")
	}
	for _, tokens := range []int{0, 1, 8191, 8192, 8193, 20000, 3 * 8192} {
		prefix := writeLengths(t, t.TempDir(), UInt16, []int{tokens / 3, tokens - tokens/3})
		bin, sums := readFile(t, prefix+".bin"), readFile(t, prefix+".sums")
		le := binary.LittleEndian
		want := le.AppendUint32([]byte("MULASUMS"), 1)
		want = le.AppendUint64(le.AppendUint32(want, 16384), uint64(2*tokens))
		for block := range slices.Chunk(bin, 16384) {
			want = le.AppendUint32(want, crc32c(block))
		}
		want = le.AppendUint32(want, crc32c(want))
		if !slices.Equal(sums, want) {
			t.Errorf("%d tokens: x.sums is %x, want %x", tokens, sums, want)
		}
		s := open(t, prefix)
		if err := s.Verify(t.Context(), nil); err != nil {
			t.Error(err)
		}
		if err := s.Read(make([]uint32, tokens), 0); err != nil {
			t.Error(err)
		}
	}
}

// Whichever bit of x.bin is flipped, Verify and every read of the block find it. Both name the
// block and exactly the documents with tokens in it. Windows that do not touch the block are read
// as usual, and the damage is found however much was read before.
func TestEveryBitIsFound(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(rt *rapid.T) {
		dtype := rapid.SampledFrom([]DType{UInt16, Int32}).Draw(rt, "dtype")
		size := dtype.Size()
		lengths := rapid.SliceOfN(rapid.OneOf(rapid.IntRange(0, 3), rapid.IntRange(0, 2000), rapid.IntRange(0, 9000)),
			1, 40).Draw(rt, "lengths")
		prefix := writeLengths(t, dir, dtype, lengths)
		bin := readFile(t, prefix+".bin")
		if len(bin) == 0 {
			return
		}
		at := rapid.IntRange(0, len(bin)-1).Draw(rt, "byte")
		bin[at] ^= 1 << rapid.IntRange(0, 7).Draw(rt, "bit")
		if err := os.WriteFile(prefix+".bin", bin, 0o644); err != nil {
			rt.Fatal(err)
		}
		block := at / 16384
		first, end := block*16384, min((block+1)*16384, len(bin))
		var want []int64
		start := 0
		for d, n := range lengths {
			if n > 0 && start*size < end && (start+n)*size > first {
				want = append(want, int64(d))
			}
			start += n
		}
		s, err := Open(prefix)
		if err != nil {
			rt.Fatal(err)
		}
		defer s.Close()
		hit := func(what string, err error) {
			var e *DamageError
			if !errors.As(err, &e) || !errors.Is(err, ErrCorrupt) {
				rt.Fatalf("%s: %v", what, err)
			}
			if e.Path != prefix+".bin" || !slices.Equal(e.Blocks, []ByteSpan{{int64(first), int64(end)}}) ||
				!slices.Equal(e.Documents, want) || e.More != 0 {
				rt.Fatalf("%s: %+v, want documents %v of bytes %d to %d", what, e, want, first, end)
			}
			if o := origin(want[0]); !strings.Contains(err.Error(),
				fmt.Sprintf("bytes %d to %d are damaged, in document", first, end-1)) ||
				!strings.Contains(err.Error(), fmt.Sprintf(" %d (%q, %s:%d)", want[0], o.ID, o.File, o.Line)) {
				rt.Fatalf("%s: %v", what, err)
			}
		}
		whole := make([]uint32, s.Tokens())
		if before := first / size; before > 0 {
			if err := s.Read(whole[:before], 0); err != nil {
				rt.Fatalf("tokens before the damage: %v", err)
			}
		}
		if after := end / size; after < len(whole) {
			if err := s.Read(whole[after:], int64(after)); err != nil {
				rt.Fatalf("tokens behind the damage: %v", err)
			}
		}
		from := rapid.IntRange(0, at/size).Draw(rt, "from")
		to := rapid.IntRange(at/size+1, len(whole)).Draw(rt, "to")
		hit("reading", s.Read(whole[from:to], int64(from)))
		hit("reading again", s.Read(whole[at/size:at/size+1], int64(at/size)))
		hit("verifying", s.Verify(t.Context(), nil))
	})
}

// A list of documents in a message ends, however many are hit, and blocks side by side are one
// place.
func TestDamageOfMany(t *testing.T) {
	prefix := writeLengths(t, t.TempDir(), UInt16, slices.Repeat([]int{2}, 20000))
	bin := readFile(t, prefix+".bin")
	for _, at := range []int{20000, 40000, 70000} {
		bin[at] ^= 4
	}
	if err := os.WriteFile(prefix+".bin", bin, 0o644); err != nil {
		t.Fatal(err)
	}
	err := open(t, prefix).Verify(t.Context(), nil)
	var e *DamageError
	if !errors.As(err, &e) {
		t.Fatal(err)
	}
	// Blocks of 4096 documents: 1, 2 and 4; block 4 has 3616.
	if !slices.Equal(e.Blocks, []ByteSpan{{16384, 49152}, {65536, 80000}}) || len(e.Documents) != 1000 ||
		e.Documents[999] != 5095 || e.More != 4096*2+3616-1000 {
		t.Errorf("blocks %v, documents up to %d and %d more", e.Blocks, e.Documents[len(e.Documents)-1], e.More)
	}
	for _, want := range []string{"the SHA-256 differs from the manifest; bytes 16384 to 49151, 65536 to 79999 are " +
		"damaged",
		`in documents 4096 ("dok-4096-`, ", 11800 more"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not say %q", err, want)
		}
	}
}

// A document that spans a block's border is named once where both blocks are damaged.
func TestDamageAcrossBlocks(t *testing.T) {
	prefix := writeLengths(t, t.TempDir(), UInt16, []int{100, 60000, 5})
	bin := readFile(t, prefix+".bin")
	for at := 1000; at < len(bin); at += 40000 {
		bin[at] ^= 1
	}
	if err := os.WriteFile(prefix+".bin", bin, 0o644); err != nil {
		t.Fatal(err)
	}
	var e *DamageError
	if err := open(t, prefix).Verify(t.Context(), nil); !errors.As(err, &e) ||
		!slices.Equal(e.Documents, []int64{0, 1}) || len(e.Blocks) != 3 {
		t.Errorf("%v: %+v", err, e)
	}
}

// Sums that are damaged themselves are not taken for damage of the tokens; without the file, or
// where no manifest lists it, tokens are read as they are.
func TestDamagedSums(t *testing.T) {
	prefix := writeLengths(t, t.TempDir(), UInt16, []int{9000, 9000})
	whole, bin := readFile(t, prefix+".sums"), readFile(t, prefix+".bin")
	read := func() error {
		s, err := Open(prefix)
		if err != nil {
			return err
		}
		defer s.Close()
		return s.Read(make([]uint32, 18000), 0)
	}
	set := func(ext string, data []byte) {
		t.Helper()
		if err := os.WriteFile(prefix+ext, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for at := range whole {
		damaged := slices.Clone(whole)
		damaged[at] ^= 0x20
		set(".sums", damaged)
		err := read()
		if own := at >= len(whole)-4; (err == nil) != own { // the sum of the file is needed only when another differs
			t.Fatalf("byte %d of x.sums changed: %v", at, err)
		}
		var e *DamageError
		if err != nil && (errors.As(err, &e) || !errors.Is(err, ErrCorrupt) ||
			!strings.Contains(err.Error(), prefix+".sums")) {
			t.Fatalf("byte %d of x.sums changed: %v", at, err)
		}
	}
	set(".sums", whole[:len(whole)-1])
	if err := read(); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(),
		"file has 39 bytes, but 40 are needed") {
		t.Errorf("cut: %v", err)
	}
	set(".sums", encodeSums(int64(len(bin)), []uint32{1, 2, 3}))
	if err := read(); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), "x.sums has SHA-256") {
		t.Errorf("sums of another shard: %v", err)
	}
	set(".sums", whole)
	bin[3] ^= 1
	set(".bin", bin)
	var e *DamageError
	if err := read(); !errors.As(err, &e) {
		t.Errorf("a damaged .bin: %v", err)
	}
	// Without the origins the documents still have numbers.
	if err := os.Remove(prefix + ".docs.arrow"); err != nil {
		t.Fatal(err)
	}
	if err := read(); err == nil || !strings.Contains(err.Error(), "in document 0; restore") {
		t.Errorf("without origins: %v", err)
	}
	if err := os.Remove(prefix + ".sums"); err != nil {
		t.Fatal(err)
	}
	if err := read(); err != nil {
		t.Errorf("without x.sums: %v", err)
	}
	if err := open(t, prefix).Verify(t.Context(), nil); !errors.Is(err, ErrCorrupt) ||
		!strings.Contains(err.Error(), prefix+".bin: expected") {
		t.Errorf("verified without x.sums: %v", err)
	}
	set(".sums", whole)
	if err := os.Remove(prefix + ".json"); err != nil {
		t.Fatal(err)
	}
	if err := read(); err != nil {
		t.Errorf("x.sums without a manifest: %v", err)
	}
}

// A shard that was written before sums existed, whose manifest lists none, is read and verified as
// usual, also next to the sums of another shard.
func TestShardWithoutSums(t *testing.T) {
	prefix := writeLengths(t, t.TempDir(), UInt16, []int{9000, 9000})
	m, err := ReadManifest(prefix + ".json")
	if err != nil {
		t.Fatal(err)
	}
	delete(m.Files, "sums")
	f, err := m.Seal(atomicfile.Files{}, prefix+".json")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Publish(), os.WriteFile(prefix+".sums", []byte("of another shard"), 0o644)); err != nil {
		t.Fatal(err)
	}
	s := open(t, prefix)
	if err := errors.Join(s.Verify(t.Context(), nil), s.Read(make([]uint32, 18000), 0)); err != nil {
		t.Error(err)
	}
}

// Many readers of the same blocks agree. A reader that has the shard open when it is replaced
// continues with its own sums.
func TestSumsWithManyReaders(t *testing.T) {
	dir := t.TempDir()
	prefix := writeLengths(t, dir, Int32, []int{50000, 50000})
	s := open(t, prefix)
	writeLengths(t, dir, Int32, []int{30000, 70000, 1})
	var g sync.WaitGroup
	for r := range 4 {
		g.Go(func() {
			window := make([]uint32, 5000)
			for i := range int64(95) {
				if err := s.Read(window, (i*int64(r+1)*1000)%95000); err != nil {
					t.Error(err)
				}
			}
		})
	}
	g.Wait()
}

// FuzzSums: no file of sums makes reading panic, and none but the right sums lets a read pass.
func FuzzSums(f *testing.F) {
	bin := make([]byte, 40000)
	for i := range bin {
		bin[i] = byte(i * i >> 3)
	}
	var sums []uint32
	for block := range slices.Chunk(bin, sumsBlock) {
		sums = append(sums, crc32c(block))
	}
	whole := encodeSums(int64(len(bin)), sums)
	f.Add(whole)
	for _, at := range []int{0, 8, 12, 13, 14, 16, 22, 24, 33} {
		other := slices.Clone(whole)
		other[at] ^= 0x41
		f.Add(other)
	}
	f.Add(whole[:20])
	f.Add([]byte{})
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, data []byte) {
		path := filepath.Join(dir, "x.sums")
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
		all, err := openSums(path, int64(len(bin)))
		if err != nil {
			if !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), path) {
				t.Fatal(err)
			}
			return
		}
		c := all[0]
		defer c.close()
		block := int(binary.LittleEndian.Uint32(data[12:]))
		bad := int64(-1)
		for b := len(bin)/block + 1; b >= 0; b-- {
			if b*block < len(bin) &&
				crc32c(bin[b*block:min((b+1)*block, len(bin))]) != binary.LittleEndian.Uint32(data[24+4*b:]) {
				bad = int64(b)
			}
		}
		for range 2 {
			if got := c.check(bin, 0, int64(len(bin))); got != bad {
				t.Fatalf("the first bad block is %d, found %d", bad, got)
			}
		}
		c.doubt(FileInfo{})
	})
}

func BenchmarkReadFirst(b *testing.B) {
	lengths := slices.Repeat([]int{1000}, 20000)
	prefix := writeLengths(b, b.TempDir(), UInt16, lengths)
	for _, with := range []bool{true, false} {
		b.Run(map[bool]string{true: "sums", false: "without"}[with], func(b *testing.B) {
			window := make([]uint32, 4097)
			b.SetBytes(40_000_000)
			for b.Loop() {
				s, err := Open(prefix)
				if err != nil {
					b.Fatal(err)
				}
				if !with {
					s.sums.close()
					s.sums = nil
				}
				for token := int64(0); token+4097 <= s.Tokens(); token += 4096 {
					if err := s.Read(window, token*4099%(s.Tokens()-4097)); err != nil {
						b.Fatal(err)
					}
				}
				s.Close()
			}
		})
	}
}
