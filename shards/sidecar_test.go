package shards

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
)

// writeForeign writes a shard as another program may write it, with documents of several sequences.
// documents has the lengths of the sequences of each document.
func writeForeign(t testing.TB, prefix string, documents [][]int32) (tokens int64) {
	t.Helper()
	le := binary.LittleEndian
	var lengths, starts, ends, bin []byte
	sequences := uint64(0)
	ends = le.AppendUint64(ends, 0)
	for _, document := range documents {
		for _, n := range document {
			lengths = le.AppendUint32(lengths, uint32(n))
			starts = le.AppendUint64(starts, uint64(2*tokens))
			for range n {
				bin = le.AppendUint16(bin, uint16(tokens*7919))
				tokens++
			}
			sequences++
		}
		ends = le.AppendUint64(ends, sequences)
	}
	idx := append([]byte(idxMagic), 1, 0, 0, 0, 0, 0, 0, 0, 8)
	idx = le.AppendUint64(le.AppendUint64(idx, sequences), uint64(len(documents))+1)
	idx = slices.Concat(idx, lengths, starts, ends)
	err := errors.Join(os.WriteFile(prefix+".bin", bin, 0o644), os.WriteFile(prefix+".idx", idx, 0o644))
	if err != nil {
		t.Fatal(err)
	}
	return tokens
}

// describe writes the sidecar of a shard, and returns the number of bytes that were read and the
// number of blocks that were passed.
func describe(t testing.TB, prefix, sidecar string) (m *Manifest, bytes, blocks int64, err error) {
	t.Helper()
	m, err = WriteSidecar(t.Context(), prefix, sidecar, func(string, int64, []byte) { blocks++ },
		func() error { return nil }, func(n int64) { bytes += n })
	return m, bytes, blocks, err
}

// A shard of another program gets a manifest and sums, next to it or in another folder, after each
// of its bytes was read once. Its blocks are then checked.
func TestSidecar(t *testing.T) {
	var documents [][]int32
	for i := range int32(9000) {
		documents = append(documents, slices.Repeat([]int32{i % 13}, int(i%4)))
	}
	for _, folder := range []string{"", "sums"} {
		dir := t.TempDir()
		prefix := filepath.Join(dir, "x")
		tokens := writeForeign(t, prefix, documents)
		sidecar := filepath.Join(dir, folder, "x")
		if folder != "" {
			if err := os.Mkdir(filepath.Join(dir, folder), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		m, read, blocks, err := describe(t, prefix, sidecar)
		if err != nil {
			t.Fatal(err)
		}
		if !m.Foreign() || m.Tokens != tokens || m.Documents != 9000 ||
			read != m.Files["bin"].Bytes+m.Files["idx"].Bytes || blocks < read/sumsBlock {
			t.Errorf("%+v, %d bytes read, %d blocks", m, read, blocks)
		}
		s, err := OpenFrom(t.Context(), prefix, sidecar)
		if err != nil {
			t.Fatal(err)
		}
		if !s.Summed() || s.ManifestPath() != sidecar+".json" {
			t.Errorf("sums: %v, manifest %s", s.Summed(), s.ManifestPath())
		}
		if err := s.Verify(t.Context(), nil); err != nil {
			t.Error(err)
		}
		if span, err := s.Span(7); err != nil || span.End-span.First != 3*7 {
			t.Errorf("document 7: %+v, %v", span, err)
		}
		if _, err := s.DocumentIDs(t.Context()); !errors.Is(err, ErrNoDocuments) {
			t.Errorf("origins: %v", err)
		}
		s.Close()

		data, err := os.ReadFile(prefix + ".bin")
		if err != nil {
			t.Fatal(err)
		}
		data[70000] ^= 4
		if err := os.WriteFile(prefix+".bin", data, 0o644); err != nil {
			t.Fatal(err)
		}
		if s, err = OpenFrom(t.Context(), prefix, sidecar); err != nil {
			t.Fatal(err)
		}
		var damage *DamageError
		if err := s.Read(make([]uint32, 100), 35000); !errors.As(err, &damage) || damage.Blocks[0].First != 65536 {
			t.Errorf("a damaged block: %v", err)
		}
		if err := s.Verify(t.Context(), nil); !errors.As(err, &damage) {
			t.Errorf("a damaged shard: %v", err)
		}
		s.Close()
	}
}

// Every damage of an .idx file that Check finds is found in one pass, and no sidecar is written.
func TestSidecarOfDamagedIndex(t *testing.T) {
	prefix := filepath.Join(t.TempDir(), "x")
	writeForeign(t, prefix, slices.Repeat([][]int32{{5, 3}, {}, {9}}, 60))
	idx, err := os.ReadFile(prefix + ".idx")
	if err != nil {
		t.Fatal(err)
	}
	for at := idxHeaderSize; at < len(idx); at += 53 {
		damaged := slices.Clone(idx)
		damaged[at] ^= 1
		if err := os.WriteFile(prefix+".idx", damaged, 0o644); err != nil {
			t.Fatal(err)
		}
		x, err := OpenIndex(prefix)
		if err == nil {
			err = x.Check(context.Background())
			x.Close()
		}
		_, _, _, found := describe(t, prefix, prefix)
		if (err == nil) != (found == nil) || found != nil && !errors.Is(found, ErrCorrupt) {
			t.Errorf("byte %d: Check says %v, WriteSidecar %v", at, err, found)
		}
		if err != nil && fileExists(prefix+".json") {
			t.Fatalf("byte %d: the sidecar of a damaged shard was written", at)
		}
		os.Remove(prefix + ".json")
		os.Remove(prefix + ".sums")
	}
	if err := os.WriteFile(prefix+".idx", idx, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, read, _, err := describe(t, prefix, filepath.Join(prefix+".missing", "x")); err == nil || read > 0 {
		t.Errorf("a folder that does not exist: %v, after %d bytes", err, read)
	}
	refused := errors.New("refused")
	_, err = WriteSidecar(t.Context(), prefix, prefix, func(string, int64, []byte) {},
		func() error { return refused }, nil)
	if err != refused || fileExists(prefix+".json") || fileExists(prefix+".sums") {
		t.Errorf("a refused shard: %v", err)
	}
	if err := os.Truncate(prefix+".bin", 100); err != nil {
		t.Fatal(err)
	}
	if _, _, _, err := describe(t, prefix, prefix); err == nil || !strings.Contains(err.Error(), "cut short") {
		t.Errorf("a .bin that was cut short: %v", err)
	}
}

// A connection that ends early is an error, not the end of the file.
func TestHashOfCutStream(t *testing.T) {
	cut := io.MultiReader(strings.NewReader("abc"), iotest.ErrReader(io.ErrUnexpectedEOF))
	if info, err := hashFile(t.Context(), cut, "x", nil, nil); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("%+v, %v", info, err)
	}
}

func fileExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
