// Package sample computes the sample of a shard: a hash of some blocks of its .bin and .idx file. A
// plan has it instead of the SHA-256 of the files until all bytes have been read.
// docs/formats/plan.md defines the sample.
package sample

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sync/errgroup"

	"mula/internal/objects"
)

const (
	// BlockSize is the size of a block in bytes. The last block of a file may be shorter.
	BlockSize = 1 << 14

	// blocks is the number of blocks of a file that are in the sample, if it has that many.
	blocks = 16

	// Small is the total size of .bin and .idx up to which a shard needs no sample, because hashing
	// all its bytes is not slower.
	Small = 1 << 20

	// prefix starts the text that keys are computed from, and the text of the sample.
	prefix = "mula sample 1"

	// named is the number of bytes of a block's hash in Sample.Blocks.
	named = 4
)

// The suffixes of the sampled files, in the order of the sample.
var suffixes = [2]string{".bin", ".idx"}

// A Sample is the sample of a shard.
type Sample struct {
	Hash string // SHA-256, in hexadecimal

	// Blocks has the size of .idx in 16 hexadecimal digits, and the first 8 digits of the SHA-256
	// of each block in the sample. It serves only to name a block that differs.
	Blocks string
}

// Blocks lists the numbers of the blocks in the sample of a file, in ascending order. size is the
// size of the file in bytes.
func Blocks(size int64) []int64 {
	n := (size + BlockSize - 1) / BlockSize
	if n <= blocks {
		list := make([]int64, n)
		for i := range list {
			list[i] = int64(i)
		}
		return list
	}
	key := sha256.Sum256(binary.LittleEndian.AppendUint64([]byte(prefix), uint64(size)))
	state := binary.LittleEndian.Uint64(key[:])
	list := []int64{0, n - 1}
	for len(list) < blocks {
		// splitmix64
		state += 0x9e3779b97f4a7c15
		z := state
		z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>27) * 0x94d049bb133111eb
		z ^= z >> 31
		if block := 1 + int64(z%uint64(n-2)); !slices.Contains(list, block) {
			list = append(list, block)
		}
	}
	slices.Sort(list)
	return list
}

// A Collector computes a sample from blocks that are read in any order, also concurrently.
type Collector struct {
	sizes  [2]int64
	blocks [2][]int64
	hashes [2][][sha256.Size]byte
}

// NewCollector returns a Collector for a shard whose .bin and .idx have the given sizes in bytes.
func NewCollector(bin, idx int64) *Collector {
	c := &Collector{sizes: [2]int64{bin, idx}}
	for i, size := range c.sizes {
		c.blocks[i] = Blocks(size)
		c.hashes[i] = make([][sha256.Size]byte, len(c.blocks[i]))
	}
	return c
}

// Add adds a block of the file with the given suffix, if it is in the sample.
func (c *Collector) Add(suffix string, block int64, data []byte) {
	file := slices.Index(suffixes[:], suffix)
	if i, ok := slices.BinarySearch(c.blocks[file], block); ok {
		c.hashes[file][i] = sha256.Sum256(data)
	}
}

// Sample returns the sample. All its blocks must have been added.
func (c *Collector) Sample() Sample {
	h := sha256.New()
	names := binary.BigEndian.AppendUint64(nil, uint64(c.sizes[1]))
	text := []byte(prefix)
	for _, size := range c.sizes {
		text = binary.LittleEndian.AppendUint64(text, uint64(size))
	}
	h.Write(text)
	for _, list := range c.hashes {
		for _, sum := range list {
			h.Write(sum[:])
			names = append(names, sum[:named]...)
		}
	}
	return Sample{hex.EncodeToString(h.Sum(nil)), hex.EncodeToString(names)}
}

// Differs describes the difference between the sample and the sample that a plan has. It returns ""
// if they are equal.
func (c *Collector) Differs(want Sample) string {
	is := c.Sample()
	if is.Hash == want.Hash {
		return ""
	}
	at := 2 * 8 // in the names
	size, err := strconv.ParseInt(want.Blocks[:min(at, len(want.Blocks))], 16, 64)
	if err == nil && size != c.sizes[1] {
		return fmt.Sprintf("its .idx file has %d bytes, previously %d", c.sizes[1], size)
	}
	if len(is.Blocks) == len(want.Blocks) {
		for i, list := range c.blocks {
			for _, block := range list {
				if is.Blocks[at:at+2*named] != want.Blocks[at:at+2*named] {
					return fmt.Sprintf("block %d of its %s file, bytes %d to %d, has changed", block, suffixes[i],
						block*BlockSize, min((block+1)*BlockSize, c.sizes[i])-1)
				}
				at += 2 * named
			}
		}
	}
	return fmt.Sprintf("its sample is %.16s…, was %.16s…: a sampled block has changed", is.Hash, want.Hash)
}

// Read reads the blocks of a shard's sample. path is the prefix of the shard's files, which may be
// a URL.
func Read(ctx context.Context, path string) (*Collector, error) {
	var read [2]func(ctx context.Context, p []byte, off int64) error
	var sizes [2]int64
	parallel := 1
	for i, suffix := range suffixes {
		if objects.IsURL(path) {
			object, err := objects.Open(ctx, path+suffix)
			if err != nil {
				return nil, err
			}
			read[i], sizes[i], parallel = object.ReadAt, object.Info().Size, 2*blocks
			continue
		}
		f, err := os.Open(path + suffix)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		info, err := f.Stat()
		if err != nil {
			return nil, err
		}
		sizes[i] = info.Size()
		read[i] = func(_ context.Context, p []byte, off int64) error { _, err := f.ReadAt(p, off); return err }
	}
	c := NewCollector(sizes[0], sizes[1])
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(parallel)
	for i, suffix := range suffixes {
		for _, block := range c.blocks[i] {
			g.Go(func() error {
				if ctx.Err() != nil {
					return fmt.Errorf("reading %s: %w", path+suffix, context.Cause(ctx))
				}
				first := block * BlockSize
				data := make([]byte, min(BlockSize, sizes[i]-first))
				if err := read[i](ctx, data, first); err != nil {
					return fmt.Errorf("reading block %d of %s: %w", block, path+suffix, err)
				}
				c.Add(suffix, block, data)
				return nil
			})
		}
	}
	return c, g.Wait()
}

// Valid reports whether the text of [Sample.Blocks] is well-formed.
func Valid(blockNames string) bool {
	return len(blockNames) <= 2*(8+2*named*blocks) && len(blockNames)%(2*named) == 0 &&
		strings.Trim(blockNames, "0123456789abcdef") == ""
}
