package mds

import (
	"context"
	"crypto/md5"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha3"
	"crypto/sha512"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"maps"
	"math/bits"
	"os"
	"slices"
	"strings"

	"github.com/cespare/xxhash/v2"
	"github.com/zeebo/xxh3"

	"mula/shards"
)

// newHash returns the hash with a name of streaming, which are the names of Python's modules
// hashlib and xxhash. It returns nil for an unknown name; of the names that streaming offers, only
// blake2b and blake2s are unknown.
func newHash(name string) hash.Hash {
	switch name {
	case "md5":
		return md5.New()
	case "sha1":
		return sha1.New()
	case "sha224":
		return sha256.New224()
	case "sha256":
		return sha256.New()
	case "sha384":
		return sha512.New384()
	case "sha512":
		return sha512.New()
	case "sha3_224":
		return sha3.New224()
	case "sha3_256":
		return sha3.New256()
	case "sha3_384":
		return sha3.New384()
	case "sha3_512":
		return sha3.New512()
	case "xxh32":
		return new(xxh32)
	case "xxh64":
		return xxhash.New()
	case "xxh3_64":
		return xxh3.New()
	case "xxh128", "xxh3_128":
		return xxh3128{xxh3.New()}
	}
	return nil
}

// xxh3128 is XXH3 with 128 bits.
type xxh3128 struct{ *xxh3.Hasher }

func (h xxh3128) Sum(b []byte) []byte {
	sum := h.Sum128().Bytes()
	return append(b, sum[:]...)
}

// verify compares a file of samples with all its hashes in index.json that mula can compute. A file
// without hashes passes. verify reads the whole file and seeks back to its start.
func (r *reader) verify(ctx context.Context, data *os.File, want *contents) error {
	hashes := map[string]hash.Hash{}
	var all []io.Writer
	for name := range want.Hashes {
		if h := newHash(name); h != nil {
			hashes[name] = h
			all = append(all, h)
		}
	}
	if len(all) == 0 && len(want.Hashes) > 0 {
		return fmt.Errorf("%s has only unknown hashes of %s: %s; write the data set with one of sha256, "+
			"sha1, xxh64, or remove these hashes",
			r.mark.Name(), want.Basename, strings.Join(slices.Sorted(maps.Keys(want.Hashes)), ", "))
	}
	if len(all) == 0 {
		return nil
	}
	if _, err := io.CopyBuffer(struct{ io.Writer }{io.MultiWriter(all...)}, untilDone{ctx, data},
		make([]byte, 1<<18)); err != nil {
		return fmt.Errorf("reading %s: %w", data.Name(), err)
	}
	for _, name := range slices.Sorted(maps.Keys(hashes)) {
		if found := hex.EncodeToString(hashes[name].Sum(nil)); found != want.Hashes[name] {
			return fmt.Errorf("%s: expected %s %s according to %s, found %s; restore it or write the data set "+
				"again: %w",
				data.Name(), name, want.Hashes[name], r.mark.Name(), found, shards.ErrCorrupt)
		}
	}
	_, err := data.Seek(0, io.SeekStart)
	return err
}

// untilDone is a reader that stops when ctx is done.
type untilDone struct {
	ctx context.Context
	io.Reader
}

func (u untilDone) Read(p []byte) (int, error) {
	if u.ctx.Err() != nil {
		return 0, context.Cause(u.ctx)
	}
	return u.Reader.Read(p)
}

// xxh32 is xxHash with 32 bits and the seed 0.
type xxh32 struct {
	lanes [4]uint32
	total uint64
	left  []byte // fewer than a block of 16 bytes
}

const prime1, prime2, prime3, prime4, prime5 uint32 = 2654435761, 2246822519, 3266489917, 668265263, 374761393

func (x *xxh32) Write(p []byte) (int, error) {
	if x.total == 0 {
		p1 := prime1
		x.lanes = [4]uint32{p1 + prime2, prime2, 0, -p1}
	}
	x.total += uint64(len(p))
	rest := p
	if len(x.left) > 0 {
		n := min(16-len(x.left), len(rest))
		x.left, rest = append(x.left, rest[:n]...), rest[n:]
		if len(x.left) < 16 {
			return len(p), nil
		}
		x.block(x.left)
		x.left = x.left[:0]
	}
	for ; len(rest) >= 16; rest = rest[16:] {
		x.block(rest)
	}
	x.left = append(x.left, rest...)
	return len(p), nil
}

func (x *xxh32) block(b []byte) {
	for i := range x.lanes {
		x.lanes[i] = bits.RotateLeft32(x.lanes[i]+binary.LittleEndian.Uint32(b[4*i:])*prime2, 13) * prime1
	}
}

func (x *xxh32) Sum(b []byte) []byte {
	sum := prime5
	if x.total >= 16 {
		sum = 0
		for i, turn := range []int{1, 7, 12, 18} {
			sum += bits.RotateLeft32(x.lanes[i], turn)
		}
	}
	sum += uint32(x.total)
	rest := x.left
	for ; len(rest) >= 4; rest = rest[4:] {
		sum = bits.RotateLeft32(sum+binary.LittleEndian.Uint32(rest)*prime3, 17) * prime4
	}
	for _, c := range rest {
		sum = bits.RotateLeft32(sum+uint32(c)*prime5, 11) * prime1
	}
	sum = (sum ^ sum>>15) * prime2
	sum = (sum ^ sum>>13) * prime3
	return binary.BigEndian.AppendUint32(b, sum^sum>>16)
}

func (x *xxh32) Reset()         { *x = xxh32{} }
func (x *xxh32) Size() int      { return 4 }
func (x *xxh32) BlockSize() int { return 16 }
