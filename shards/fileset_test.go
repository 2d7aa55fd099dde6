package shards

import (
	"bufio"
	"bytes"
	"hash/crc32"
	"testing"

	"pgregory.net/rapid"
)

// Ids and other bytes in any order, also ids in two blocks, are written as they are, and each block
// of 16 KiB has its CRC-32C.
func TestIDFile(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var written bytes.Buffer
		f := &IDFile{out: bufio.NewWriter(&written), block: make([]byte, 0, sumsBlock)}
		var want []byte
		for range rapid.IntRange(0, 12).Draw(t, "pieces") {
			n := rapid.IntRange(0, sumsBlock).Draw(t, "length")
			if rapid.Bool().Draw(t, "ids") {
				dtype := rapid.SampledFrom(idTypes).Draw(t, "dtype")
				ids := make([]uint32, n)
				for i := range ids {
					ids[i] = uint32(int64(i*7919) % dtype.IDs())
				}
				want = dtype.AppendEncoded(want, ids)
				if err := f.Append(ids, dtype); err != nil {
					t.Fatal(err)
				}
				continue
			}
			piece := bytes.Repeat([]byte{byte(n), 1, 2}, n)
			want = append(want, piece...)
			if k, err := f.Write(piece); k != len(piece) || err != nil {
				t.Fatalf("wrote %d of %d bytes, %v", k, len(piece), err)
			}
		}
		got, err := f.finish()
		if err != nil {
			t.Fatal(err)
		}
		if err := f.out.Flush(); err != nil || !bytes.Equal(written.Bytes(), want) {
			t.Fatalf("wrote %d bytes, %v; want %d other bytes", written.Len(), err, len(want))
		}
		var sums []uint32
		for at := 0; at < len(want); at += sumsBlock {
			sums = append(sums, crc32.Checksum(want[at:min(at+sumsBlock, len(want))], castagnoli))
		}
		if !bytes.Equal(got, encodeSums(int64(len(want)), sums)) {
			t.Fatalf("the sums of %d bytes are %x", len(want), got)
		}
	})
}
