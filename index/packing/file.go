package packing

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"iter"
	"path/filepath"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/mapping"
	"mula/shards"
)

// The layout of an index file.
const (
	magic      = "mula packing 1\n\x00"
	rowSize    = 12 // per piece, in bytes
	entrySize  = 16 // per sample, in bytes
	footerSize = 92
)

// ErrDamaged is wrapped by errors about an index file whose contents are inconsistent.
var ErrDamaged = errors.New("damaged packing index")

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// A File is an index file that was built or found.
type File struct {
	Name   string // its file name
	Bytes  int64
	SHA256 string // in hexadecimal
	Statistics
}

// Build creates the index file of a source in dir, unless it exists. A nil fsys is the file system
// of the machine. An existing file is read
// completely, and rebuilt if it is damaged. Build packs twice, once for the pieces and once for the
// table of samples after them, so that it keeps neither in memory. The file is created atomically.
func Build(ctx context.Context, fsys filesystem.FS, dir string, s *Source) (*File, error) {
	path := filepath.Join(dir, s.Name())
	if f, err := find(ctx, path, s); err == nil || ctx.Err() != nil {
		return f, err
	}
	h, err := atomicfile.On(fsys).CreateHashed(path)
	if err != nil {
		return nil, err
	}
	defer h.File.Abort()
	h.Buffer.WriteString(magic) // errors of a bufio.Writer persist until Finish
	var row [rowSize]byte
	first, err := s.pack(ctx, func(_ int64, pieces []Piece) error {
		for _, piece := range pieces {
			putRow(row[:], piece)
			if _, err := h.Buffer.Write(row[:]); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	var entry [entrySize]byte
	var rows []byte
	at := int64(0)
	second, err := s.pack(ctx, func(sample int64, pieces []Piece) error {
		rows = rows[:0]
		for _, piece := range pieces {
			putRow(row[:], piece)
			rows = append(rows, row[:]...)
		}
		binary.LittleEndian.PutUint64(entry[:], uint64(at))
		binary.LittleEndian.PutUint32(entry[8:], uint32(len(pieces)))
		binary.LittleEndian.PutUint32(entry[12:], checksum(sample, entry[:12], rows))
		at += int64(len(pieces))
		_, err := h.Buffer.Write(entry[:])
		return err
	})
	if err == nil && first != second {
		err = fmt.Errorf("building %s: the shards were changed meanwhile; try again when their writer has finished",
			path)
	}
	if err != nil {
		return nil, err
	}
	h.Buffer.Write(footer(s.Capacity, first, s.key()))
	sum, err := h.Finish()
	if err != nil {
		return nil, err
	}
	if err := h.File.Publish(); err != nil {
		return nil, err
	}
	return &File{s.Name(), h.Bytes(), sum, first}, nil
}

// find returns the existing file, if it is complete and belongs to this source.
func find(ctx context.Context, path string, s *Source) (*File, error) {
	x, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer x.Close()
	if key := s.key(); x.capacity != int64(s.Capacity) || !bytes.Equal(x.key, key[:]) {
		return nil, fmt.Errorf("%s is the packing of another source", path)
	}
	if err := x.Check(ctx); err != nil {
		return nil, err
	}
	sum, n, err := shards.HashFile(ctx, path, nil)
	if err != nil {
		return nil, err
	}
	return &File{s.Name(), n, sum, x.Statistics}, nil
}

func putRow(to []byte, p Piece) {
	binary.LittleEndian.PutUint64(to, uint64(p.Token))
	binary.LittleEndian.PutUint32(to[8:], uint32(p.Length))
}

// checksum returns a sample's checksum: of its number, the start of its entry in the table, and its
// rows.
func checksum(sample int64, entry, rows []byte) uint32 {
	var number [8]byte
	binary.LittleEndian.PutUint64(number[:], uint64(sample))
	sum := crc32.Checksum(number[:], castagnoli)
	sum = crc32.Update(sum, castagnoli, entry)
	return crc32.Update(sum, castagnoli, rows)
}

// footer returns the end of the file.
func footer(capacity int, s Statistics, key [32]byte) []byte {
	b := make([]byte, 0, footerSize)
	for _, v := range []int64{int64(capacity) - 1, s.Samples, s.HeldOut, s.Documents, s.Cut, s.Pieces, s.Tokens} {
		b = binary.LittleEndian.AppendUint64(b, uint64(v))
	}
	b = append(b, key[:]...)
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

// An Index is an open index file, mapped into memory. It is safe for concurrent use until Close.
type Index struct {
	Statistics
	path        string
	file        mapping.File
	capacity    int64
	key         []byte
	rows, table []byte
}

// Open opens an index file. It checks only the start and the end. Each sample is verified against
// its checksum when it is read.
func Open(path string) (_ *Index, err error) {
	x := &Index{path: path}
	if x.file, err = mapping.Open(path); err != nil {
		return nil, fmt.Errorf("opening the packing index: %w", err)
	}
	x.file.Scattered()
	if err := mapping.Guard(x.parse); err != nil {
		x.Close()
		return nil, err
	}
	return x, nil
}

func (x *Index) damaged(format string, args ...any) error {
	return fmt.Errorf("%s: %s: %w", x.path, fmt.Sprintf(format, args...), ErrDamaged)
}

func (x *Index) parse() error {
	b := x.file.Data
	if len(b) < len(magic) || string(b[:len(magic)]) != magic {
		return x.damaged("it does not start like version 1")
	}
	if len(b) < len(magic)+footerSize {
		return x.damaged("it has %d bytes and is truncated", len(b))
	}
	end := b[len(b)-footerSize:]
	if crc32.Checksum(end[:footerSize-4], castagnoli) != binary.LittleEndian.Uint32(end[footerSize-4:]) {
		return x.damaged("its last %d bytes do not match their checksum; it is truncated or was changed", footerSize)
	}
	var v [7]int64
	for i := range v {
		v[i] = int64(binary.LittleEndian.Uint64(end[8*i:]))
	}
	x.capacity = v[0] + 1
	x.Statistics = Statistics{Samples: v[1], HeldOut: v[2], Documents: v[3], Cut: v[4], Pieces: v[5], Tokens: v[6]}
	x.key = bytes.Clone(end[56:88])
	if v[0] < 1 || x.capacity > maxCapacity || !x.Statistics.Valid(int(x.capacity)) {
		return x.damaged("its counts are invalid")
	}
	body := b[len(magic) : len(b)-footerSize]
	if int64(len(body)) != x.Pieces*rowSize+x.Samples*entrySize { // both factors are at most 2^56
		return x.damaged("%d samples of %d pieces do not match its %d bytes", x.Samples, x.Pieces, len(b))
	}
	x.rows, x.table = body[:x.Pieces*rowSize], body[x.Pieces*rowSize:]
	return nil
}

// Capacity returns the number of tokens of a sample, padding included.
func (x *Index) Capacity() int { return int(x.capacity) }

// Sample appends the pieces of a sample, in token order. The error wraps [ErrDamaged] if the file
// was changed, and is the error of [mapping.Guard] if it was truncated.
func (x *Index) Sample(dst []Piece, sample int64) ([]Piece, error) {
	if sample < 0 || sample >= x.Samples {
		return dst, fmt.Errorf("%s: sample %d does not exist; the file has %d", x.path, sample, x.Samples)
	}
	err := mapping.Guard(func() (err error) {
		dst, err = x.sample(dst, sample)
		return err
	})
	return dst, err
}

// sample is Sample without the range check.
func (x *Index) sample(dst []Piece, sample int64) ([]Piece, error) {
	entry := x.table[sample*entrySize:][:entrySize]
	first, n := binary.LittleEndian.Uint64(entry), uint64(binary.LittleEndian.Uint32(entry[8:]))
	if n == 0 || n > uint64(x.Pieces) || first > uint64(x.Pieces)-n {
		return dst, x.damaged("sample %d has rows from %d on, %d of them", sample, first, n)
	}
	rows := x.rows[first*rowSize:][:n*rowSize]
	if checksum(sample, entry[:12], rows) != binary.LittleEndian.Uint32(entry[12:]) {
		return dst, x.damaged("sample %d does not match its checksum", sample)
	}
	room := x.capacity
	for ; len(rows) > 0; rows = rows[rowSize:] {
		p := Piece{int64(binary.LittleEndian.Uint64(rows)), int32(binary.LittleEndian.Uint32(rows[8:]))}
		if p.Length < 1 || int64(p.Length) > room || p.Token < 0 || p.Token > x.Tokens-int64(p.Length) {
			return dst, x.damaged("sample %d has %d tokens from %d on", sample, p.Length, p.Token)
		}
		room -= int64(p.Length)
		dst = append(dst, p)
	}
	return dst, nil
}

// All iterates over the pieces of every sample. The pieces are valid until the next iteration. An
// error, from the file or ctx, ends the iteration.
func (x *Index) All(ctx context.Context) iter.Seq2[[]Piece, error] {
	return func(yield func([]Piece, error) bool) {
		var pieces []Piece
		for sample := range x.Samples {
			err := error(nil)
			if sample%(1<<12) == 0 {
				err = context.Cause(ctx)
			}
			if err == nil {
				pieces, err = x.Sample(pieces[:0], sample)
			}
			if !yield(pieces, err) || err != nil {
				return
			}
		}
	}
}

// Check reads the whole file and compares it with its checksums and counts.
func (x *Index) Check(ctx context.Context) error {
	x.file.InSequence(x.file.Data)
	defer x.file.Scattered()
	var pieces, tokens int64
	for list, err := range x.All(ctx) {
		if err != nil {
			return err
		}
		pieces += int64(len(list))
		for _, p := range list {
			tokens += int64(p.Length)
		}
	}
	if pieces != x.Pieces || tokens != x.Tokens {
		return x.damaged("its samples have %d pieces and %d tokens, but its footer has %d and %d", pieces, tokens,
			x.Pieces,
			x.Tokens)
	}
	return nil
}

// Close unmaps the file. No other call may be in progress.
func (x *Index) Close() error { return x.file.Close() }

// Size returns the size of the file in bytes.
func (x *Index) Size() int64 { return int64(len(x.file.Data)) }
