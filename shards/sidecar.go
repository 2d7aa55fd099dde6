package shards

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"hash/maphash"
	"math"
	"os"

	"mula/internal/atomicfile"
	"mula/internal/objects"
)

// WriteSidecar reads both files of a shard that another program wrote, each byte once, and writes
// their hashes to a manifest and the sums of the blocks of .bin to a file of sums: sidecar.json and
// sidecar.sums. sidecar may be the prefix of the shard, or a prefix in another folder, which must
// exist: see [OpenFrom].
//
// It also checks that .idx is consistent, as [Index.Check] does. block is called with each block of
// 16 KiB of .idx and then of .bin, in order. data is valid until it returns. accept is called after
// the last block; if it returns an error, nothing is written. progress is as in [Shard.Verify].
func WriteSidecar(ctx context.Context, prefix, sidecar string, block func(suffix string, number int64, data []byte),
	accept func() error, progress func(bytes int64)) (*Manifest, error) {
	s, err := OpenContext(ctx, prefix)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	var out *atomicfile.File // created first, so that a folder without write permission costs no read
	if !objects.IsURL(sidecar) {
		if out, err = atomicfile.Create(sidecar + sumsExt); err != nil {
			return nil, err
		}
		defer out.Abort()
	}
	x := s.index
	if s.remote != nil {
		x = s.remote.header
	}
	scan := newIndexScan(x, s.idxBytes)
	r := sidecarReader{ctx: ctx, block: block, progress: progress}
	idx, err := r.read(prefix, idxExt, s.idxBytes, scan.add)
	if err == nil {
		err = scan.finish(ctx)
	}
	if err != nil {
		return nil, err
	}
	var sums []uint32
	bin, err := r.read(prefix, binExt, s.binBytes(), func(data []byte) error {
		for first := 0; first < len(data); first += sumsBlock {
			sums = append(sums, crc32.Checksum(data[first:min(first+sumsBlock, len(data))], castagnoli))
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if err := accept(); err != nil {
		return nil, err
	}
	text := encodeSums(bin.Bytes, sums)
	sum := sha256.Sum256(text)
	m := &Manifest{Format: foreignFormat, DType: x.dtype, Tokens: x.elements, Documents: x.documents,
		Tokenizer: TokenizerInfo{EOD: -1}, Files: map[string]FileInfo{"bin": bin, "idx": idx,
			"sums": {int64(len(text)), hex.EncodeToString(sum[:])}}}
	return m, m.publish(ctx, sidecar, out, text)
}

// publish writes the sums and then the manifest. out is the local file of the sums, or nil if the
// sidecar is in an object store.
func (m *Manifest) publish(ctx context.Context, sidecar string, out *atomicfile.File, sums []byte) error {
	if out == nil {
		data, err := m.encode(sidecar + manifestExt)
		if err == nil {
			err = objects.WriteFile(ctx, sidecar+sumsExt, sums)
		}
		if err == nil {
			err = objects.WriteFile(ctx, sidecar+manifestExt, data)
		}
		return err
	}
	if _, err := out.Write(sums); err != nil {
		return err
	}
	if err := out.Seal(); err != nil {
		return err
	}
	sealed, err := m.Seal(atomicfile.Files{}, sidecar+manifestExt)
	if err != nil {
		return err
	}
	defer sealed.Abort()
	if err := out.Publish(); err != nil {
		return err
	}
	return sealed.Publish()
}

// A sidecarReader reads the files of a shard for WriteSidecar.
type sidecarReader struct {
	ctx      context.Context
	block    func(suffix string, number int64, data []byte)
	progress func(bytes int64)
}

// read reads a file, which must have the given size, and passes its bytes to add in pieces that
// start at multiples of sumsBlock.
func (r *sidecarReader) read(prefix, suffix string, size int64, add func(data []byte) error) (FileInfo, error) {
	path := prefix + suffix
	before, err := versionOf(r.ctx, path)
	if err != nil {
		return FileInfo{}, err
	}
	f, err := openFile(r.ctx, path)
	if err != nil {
		return FileInfo{}, err
	}
	defer f.Close()
	at := int64(0)
	info, err := hashFile(r.ctx, f, path, func(data []byte) error {
		if err := add(data); err != nil {
			return err
		}
		for first := 0; first < len(data); first += sumsBlock {
			r.block(suffix, (at+int64(first))/sumsBlock, data[first:min(first+sumsBlock, len(data))])
		}
		at += int64(len(data))
		return nil
	}, r.progress)
	if err != nil {
		return FileInfo{}, err
	}
	after, err := versionOf(r.ctx, path)
	if err != nil {
		return FileInfo{}, err
	}
	if info.Bytes != size || after != before {
		return FileInfo{}, fmt.Errorf("%s: the file changed while it was read: it has %d bytes, want %d; wait "+
			"until its writer has finished, or restore it: %w", path, info.Bytes, size, ErrCorrupt)
	}
	return info, nil
}

// versionOf describes a file or an object: it changes when the content does.
func versionOf(ctx context.Context, path string) (string, error) {
	if objects.IsURL(path) {
		info, err := objects.Stat(ctx, path)
		return identity(path, info), err
	}
	info, err := os.Stat(path)
	if err != nil {
		return "", err
	}
	return fmt.Sprint(info.Size(), info.ModTime().UnixNano()), nil
}

// An indexScan checks an .idx file in one pass, as [Index.Check] does. The starts follow the
// lengths in the file, so it compares a hash of the starts that the lengths imply with a hash of
// the starts in the file.
type indexScan struct {
	x       *Index
	size    int64  // of the file
	at      int64  // position in the file
	partial []byte // the first bytes of the entry at this position

	implied, found maphash.Hash // of the starts
	next           int64        // the start of the next sequence, implied by the lengths
	last           int64        // entry of the document array
	starts         []byte       // starts that have not been added to implied yet
}

func newIndexScan(x *Index, size int64) *indexScan {
	s := &indexScan{x: x, size: size}
	s.found.SetSeed(s.implied.Seed())
	return s
}

// add checks the next bytes of the file.
func (s *indexScan) add(data []byte) error {
	x := s.x
	lengths := int64(idxHeaderSize)
	starts := lengths + 4*x.sequences
	ends := starts + 8*x.sequences
	for len(data) > 0 {
		var until, width int64 // of the array at this position
		var check func(entries []byte) error
		switch {
		case s.at < lengths:
			until, width, check = lengths, 1, func([]byte) error { return nil }
		case s.at < starts:
			until, width, check = starts, 4, s.addLengths
		case s.at < ends:
			until, width, check = ends, 8, s.addStarts
		default:
			until, width, check = s.size, 8, s.addEnds
		}
		part := data[:min(int64(len(data)), until-s.at-int64(len(s.partial)))]
		if len(part) == 0 {
			return x.corrupt("%d bytes follow the document array", len(data))
		}
		data = data[len(part):]
		if len(s.partial) > 0 {
			n := min(int(width)-len(s.partial), len(part))
			s.partial = append(s.partial, part[:n]...)
			part = part[n:]
			if len(s.partial) < int(width) {
				continue
			}
			if err := check(s.partial); err != nil {
				return err
			}
			s.at += width
			s.partial = s.partial[:0]
		}
		n := int64(len(part)) / width * width
		if err := check(part[:n]); err != nil {
			return err
		}
		s.at += n
		s.partial = append(s.partial, part[n:]...)
	}
	return nil
}

func (s *indexScan) addLengths(entries []byte) error {
	size := int64(s.x.dtype.Size())
	for ; len(entries) > 0; entries = entries[4:] {
		length := int64(int32(binary.LittleEndian.Uint32(entries)))
		if length < 0 || length > (math.MaxInt64-s.next)/size {
			return s.x.corrupt("a length is %d, or the lengths add up to more than 2^63 bytes", length)
		}
		s.starts = binary.LittleEndian.AppendUint64(s.starts, uint64(s.next))
		s.next += length * size
		if len(s.starts) == 1<<12 {
			s.implied.Write(s.starts)
			s.starts = s.starts[:0]
		}
	}
	return nil
}

func (s *indexScan) addStarts(entries []byte) error {
	s.found.Write(entries)
	return nil
}

func (s *indexScan) addEnds(entries []byte) error {
	for ; len(entries) > 0; entries = entries[8:] {
		end := int64(binary.LittleEndian.Uint64(entries))
		if end < s.last || end > s.x.sequences {
			return s.x.corrupt("an entry of the document array is %d, after %d", end, s.last)
		}
		s.last = end
	}
	return nil
}

// finish returns the error about starts that do not follow from the lengths.
func (s *indexScan) finish(ctx context.Context) error {
	s.implied.Write(s.starts)
	if s.implied.Sum64() == s.found.Sum64() {
		return nil
	}
	err := s.x.corrupt("the starts of the sequences do not follow from their lengths")
	if s.x.starts != nil {
		err = errors.Join(s.x.Check(ctx), err) // names the entry
	}
	return err
}
