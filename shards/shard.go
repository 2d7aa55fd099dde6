// Package shards keeps token ids on disk: it reads and writes the token files of Megatron-LM
// (MMIDIDX), x.bin with the ids and x.idx with the lengths, and beside them files of mula's own:
// x.docs.arrow that says where each document came from, x.sums with a sum of every 16 KiB of x.bin,
// and the manifest x.json with the SHA-256 of the others. docs/formats/shard.md has every byte.
//
//	x.bin   ids of all sequences, back to back, little-endian uint16 or int32
//	x.idx    0  "MMIDIDX" and two zero bytes
//	         9  u64  version, 1
//	        17  u8   element type: 4 int32, 8 uint16
//	        18  u64  ns, number of sequences
//	        26  u64  nd, number of documents + 1
//	        34  i32  × ns  length of each sequence in tokens
//	            i64  × ns  byte offset of each sequence in x.bin
//	            i64  × nd  0, then for each document the number of the sequence one past its end
//
// Files are mapped into memory and searched where they lie, so an open shard costs no memory of its
// own, and opening it no time, however many documents it has. What a file says is therefore doubted
// where it is used: content that contradicts itself gives an error. Shards are replaced by
// renaming, never rewritten in place, but a foreign program may cut a file short while it is
// mapped: [Shard.Guard] makes an error of that.
package shards

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"os"
	"strings"
	"sync"
	"time"

	"mula/internal/mapping"
)

// ErrCorrupt is wrapped by errors about a file whose content contradicts itself or the files beside
// it: a truncated .bin, offsets that do not follow from the lengths, a hash that is not the
// manifest's.
var ErrCorrupt = errors.New("corrupt shard")

// Endings of a shard's files.
const (
	binExt      = ".bin"
	idxExt      = ".idx"
	docsExt     = ".docs.arrow"
	sumsExt     = ".sums"
	manifestExt = ".json"
)

// Files lists the files that the shard with the given prefix may have.
func Files(prefix string) []string {
	return []string{prefix + binExt, prefix + idxExt, prefix + docsExt, prefix + sumsExt, prefix + manifestExt}
}

// A Shard is an open pair of x.bin and x.idx. It is safe for concurrent use until [Shard.Close].
type Shard struct {
	prefix string
	index  *Index
	bin    mapping.File

	manifest *Manifest
	sums     *blockSums // nil where there are none

	mu      sync.Mutex // guards origins
	origins *Documents
}

// Open opens the shard with the given prefix; the name of its .bin or .idx file does as well.
// However large the shard is, it looks at a few bytes only: at the header and the first and last
// entries of .idx, which must agree with the sizes of both files, and at the manifest if there is
// one, which must agree with all of that. The entries between are looked at when they are used, and
// by [Shard.Check]; the tokens when [Shard.Read] first comes to them, and by [Shard.Verify].
func Open(prefix string) (*Shard, error) {
	s := &Shard{prefix: strings.TrimSuffix(strings.TrimSuffix(prefix, idxExt), binExt)}
	if err := mapping.Guard(s.open); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

func (s *Shard) open() (err error) {
	prefix := s.prefix
	if s.index, err = OpenIndex(prefix + idxExt); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			if _, binErr := os.Stat(prefix + binExt); binErr == nil {
				return fmt.Errorf("%s stands without %s, which is written last: the shard was never finished, write "+
					"it again: %w",
					prefix+binExt, prefix+idxExt, err)
			}
		}
		return err
	}
	if s.bin, err = mapping.Open(prefix + binExt); err != nil {
		return fmt.Errorf("opening shard: %w", err)
	}
	if err := s.index.holdsTokens(int64(len(s.bin.Data)), prefix+binExt); err != nil {
		return err
	}
	if s.manifest, err = ReadManifest(prefix + manifestExt); err != nil {
		return err
	}
	if s.manifest != nil && s.manifest.Files["sums"].SHA256 != "" {
		// one that the manifest does not list is of an older shard
		sums, err := openSums(prefix+sumsExt, int64(len(s.bin.Data)))
		if err != nil {
			return err
		}
		if len(sums) > 0 {
			s.sums = sums[0]
		}
	}
	// A writer removes x.idx before it replaces the others: while the one that was opened stands,
	// they are its own.
	if now, err := os.Stat(prefix + idxExt); err != nil || !os.SameFile(now, s.index.file.Info) {
		return fmt.Errorf("opening shard: %s was replaced in the meantime; try again when its writer has finished",
			prefix)
	}
	if s.manifest != nil {
		if err := s.checkManifest(); err != nil {
			return err
		}
	}
	return nil
}

// Guard calls read, which uses methods of the shard, or tokens that [Shard.Encoded] gave it, on the
// calling goroutine and on no other, and gives its error. Without it the process ends where read
// comes to bytes of a mapped file that are not there any more, because another program has cut the
// file short, or that its disk does not give; with it there is an error, which names the file and
// says why. It also gives one where read has seen only bytes that are left: a file that was cut
// short at any place fails. It costs some ten nanoseconds: guard a sample, not a token.
func (s *Shard) Guard(read func() error) error {
	return mapping.Guard(func() error {
		err := read()
		if err == nil {
			s.bin.Probe()
			s.index.file.Probe()
		}
		return err
	})
}

// holdsTokens says whether the index is that of a shard of tokens whose .bin file has binSize
// bytes.
func (x *Index) holdsTokens(binSize int64, bin string) error {
	if !x.dtype.valid() {
		return fmt.Errorf("%s: tokens are %s (byte 17); only uint16 and int32 are token ids here, convert the shard "+
			"first", x.path, x.dtype)
	}
	if x.Multimodal() {
		return fmt.Errorf("%s: it has a mode for each sequence, so it is a multimodal dataset; only text is read",
			x.path)
	}
	if want := x.elements * int64(x.dtype.Size()); want != binSize {
		what := "it was cut short"
		if binSize > want {
			what = "it belongs to another .idx"
		}
		return fmt.Errorf("%s: expected %d bytes by %s, found %d: %s: %w", bin, want, x.path, binSize, what, ErrCorrupt)
	}
	return nil
}

// Check reads the whole .idx file and compares it with itself; see [Index.Check]. What passes is
// right for every document.
func (s *Shard) Check(ctx context.Context) error { return s.index.Check(ctx) }

// Summed says whether the shard has sums of blocks, so that [Shard.Read] gives out no damaged
// token.
func (s *Shard) Summed() bool { return s.sums != nil }

// Reverify sets when a block that was compared with its sum is compared again: when it is read and
// the comparison is older than the given time, so that damage after the first read is found. 0,
// which a new Shard has, is never, and a negative time is always. It must be called before anything
// is read.
//
// A read of n bytes then costs at most ⌈n/16384⌉+1 comparisons of 16 KiB in each period, as it does
// when it comes to blocks for the first time.
func (s *Shard) Reverify(after time.Duration) {
	if s.sums != nil {
		s.sums.again = after
	}
}

// Recheck compares the blocks that hold the tokens [from, to) with their sums, whatever was
// compared before. A shard without sums passes.
func (s *Shard) Recheck(ctx context.Context, from, to int64) error {
	if from < 0 || to < from || to > s.Tokens() {
		return fmt.Errorf("%s: tokens %d to %d were asked for, it has %d", s.prefix+binExt, from, to, s.Tokens())
	}
	if s.sums == nil {
		return nil
	}
	return s.Guard(func() error {
		size := int64(s.DType().Size())
		for b := from * size / s.sums.block; b*s.sums.block < to*size; b++ {
			if !s.sums.right(s.bin.Data, b) {
				return s.damage(ctx, "", []int64{b})
			}
		}
		return nil
	})
}

// Prefix is the path of the shard's files without their endings.
func (s *Shard) Prefix() string { return s.prefix }

// Replaced says whether the name of the shard stands for other files by now than those that are
// open.
func (s *Shard) Replaced() bool {
	return s.bin.Replaced() || s.index.file.Replaced() || s.sums != nil && s.sums.file.Replaced()
}

// DType is the element type of the .bin file.
func (s *Shard) DType() DType { return s.index.dtype }

// Tokens is the number of tokens.
func (s *Shard) Tokens() int64 { return s.index.elements }

// Documents is the number of documents. Where the file counts sequences and documents apart, as
// foreign files may, a document is a run of sequences.
func (s *Shard) Documents() int64 { return s.index.documents }

// Index is the shard's .idx file, which [Shard.Close] closes.
func (s *Shard) Index() *Index { return s.index }

// Manifest is what x.json says, or nil for a shard without one. It is not to be changed.
func (s *Shard) Manifest() *Manifest { return s.manifest }

// DocumentStart is the first token of document d, from 0; d may be [Shard.Documents], which gives
// [Shard.Tokens]. The error wraps [ErrCorrupt] where the .idx file has a value that cannot be.
func (s *Shard) DocumentStart(d int64) (int64, error) { return s.index.documentStart(d) }

// DocumentAt is the document that holds the given token: the only d with DocumentStart(d) ≤ token <
// DocumentStart(d+1), so never an empty one. For a token that the shard does not have it is -1. The
// error wraps [ErrCorrupt] where the .idx file does not tell.
func (s *Shard) DocumentAt(token int64) (int64, error) {
	if token < 0 || token >= s.Tokens() {
		return -1, nil
	}
	low, high := int64(0), s.index.documents // the start of low is at or before the token, that of high behind it
	first, end := int64(0), s.Tokens()       // these starts
	// Of a million documents a guess by the tokens around is some hundreds off, the next some ten:
	// a few places are looked at in place of twenty. If lengths are not alike, halving ends the
	// search.
	const guesses = 7
	for turn := 0; high-low > 1; turn++ {
		middle := low + (high-low)/2
		if turn < guesses {
			guess := low + int64(float64(token-first)/float64(end-first)*float64(high-low))
			middle = min(max(guess, low+1), high-1)
		}
		start, err := s.index.documentStart(middle)
		if err != nil {
			return -1, err
		}
		if start <= token {
			low, first = middle, start
		} else {
			high, end = middle, start
		}
	}
	return low, nil
}

// A Span is the tokens [First, End) of a shard that are one document.
type Span struct {
	Document   int64
	First, End int64
}

// Span gives the tokens of document d. They may be none, in which case First equals End. The error
// wraps [ErrCorrupt] where they run backwards, or where starts, lengths and documents of the .idx
// file contradict one another there.
func (s *Shard) Span(d int64) (Span, error) {
	first, end, err := s.index.document(d)
	if err == nil && s.manifest != nil && s.index.end(d) != d { // with a manifest each document is one sequence
		err = s.index.corrupt("entry %d of the document array is %d, not %d", d, s.index.end(d), d)
	}
	return Span{d, first, end}, err
}

// Spans gives the documents that hold tokens of [from, to), in order, without the empty ones. The
// first may begin before from and the last end behind to. An error, which wraps [ErrCorrupt], ends
// it.
func (s *Shard) Spans(from, to int64) iter.Seq2[Span, error] {
	return func(yield func(Span, error) bool) {
		to = min(to, s.Tokens())
		d := int64(-1)
		for at := max(0, from); at < to; {
			span, err := s.spanAt(at, d+1)
			if !yield(span, err) || err != nil {
				return
			}
			d, at = span.Document, span.End // which is more than at, whatever the file says
		}
	}
}

// spanAt is the document that holds a token; it may be the one of number guess.
func (s *Shard) spanAt(token, guess int64) (Span, error) {
	if guess > 0 && guess < s.index.documents {
		if span, err := s.Span(guess); err != nil || span.First <= token && token < span.End {
			return span, err
		}
	}
	d, err := s.DocumentAt(token)
	if err != nil {
		return Span{}, err
	}
	span, err := s.Span(d)
	if err == nil && (token < span.First || token >= span.End) {
		err = s.index.corrupt("token %d is in no document: by the search in number %d, which has the tokens %d to %d",
			token, d, span.First, span.End)
	}
	return span, err
}

// Read fills dst with the ids from the given token on. Windows may cross documents. It fails if the
// shard does not have that many tokens there, or if an id of an int32 shard is negative.
//
// Where the shard has sums, each block of 16 KiB of x.bin is compared with its own the first time
// that something of it is read through this Shard, and again as [Shard.Reverify] says. One that
// differs gives a [DamageError], every time. A shard without x.sums is read as it is.
func (s *Shard) Read(dst []uint32, token int64) error {
	return s.Guard(func() error { return s.read(dst, token) })
}

func (s *Shard) read(dst []uint32, token int64) error {
	src, err := s.Encoded(token, token+int64(len(dst)))
	if err != nil {
		return err
	}
	if decode(dst, src, s.DType())>>31 == 0 {
		return nil
	}
	for i, id := range dst {
		if id>>31 != 0 {
			at := token + int64(i)
			return fmt.Errorf("%s: token %d (byte %d) is %d, ids are not negative: %w", s.prefix+binExt, at, 4*at,
				int32(id), ErrCorrupt)
		}
	}
	return nil
}

// lastPage is the number of bytes at the end of a file that may share a page of memory: where a
// file is cut short in its last page, zeros are read in place of the rest.
var lastPage = os.Getpagesize()

// Encoded gives the tokens [from, to) as they are in x.bin: little-endian elements of the shard's
// type, whose values are not checked, but whose sums are. They may be read until Close, and never
// written to. Reading them is to be guarded, see [Shard.Guard].
func (s *Shard) Encoded(from, to int64) ([]byte, error) {
	if from < 0 || to < from || to > s.Tokens() {
		return nil, fmt.Errorf("%s: tokens %d to %d were asked for, it has %d", s.prefix+binExt, from, to, s.Tokens())
	}
	size := int64(s.DType().Size())
	if to*size > int64(len(s.bin.Data)-lastPage) { // where no fault tells of a cut
		if err := s.bin.Cut(); err != nil {
			return nil, err
		}
	}
	if s.sums != nil {
		if block := s.sums.check(s.bin.Data, from*size, to*size); block >= 0 {
			// Reading takes no context; naming the documents may take as long as hashing
			// x.docs.arrow, once.
			return nil, s.damage(context.Background(), "", []int64{block})
		}
	}
	return s.bin.Data[from*size : to*size : to*size], nil
}

// decode reads len(dst) ids of x.bin and gives their bits, combined by or. src has that many.
func decode(dst []uint32, src []byte, dtype DType) (bits uint32) {
	le := binary.LittleEndian
	if dtype == UInt16 {
		src = src[:2*len(dst)]
		for ; len(dst) >= 4 && len(src) >= 8; dst, src = dst[4:], src[8:] { // four at a time, in one load
			four := le.Uint64(src)
			dst[0], dst[1], dst[2], dst[3] = uint32(uint16(four)), uint32(uint16(four>>16)), uint32(uint16(four>>32)),
				uint32(four>>48)
		}
		for i := range dst {
			dst[i] = uint32(le.Uint16(src[2*i:]))
		}
		return 1<<16 - 1
	}
	src = src[:4*len(dst)]
	var all uint64
	for ; len(dst) >= 4 && len(src) >= 16; dst, src = dst[4:], src[16:] {
		a, b := le.Uint64(src), le.Uint64(src[8:])
		dst[0], dst[1], dst[2], dst[3] = uint32(a), uint32(a>>32), uint32(b), uint32(b>>32)
		all |= a | b
	}
	for i := range dst {
		dst[i] = le.Uint32(src[4*i:])
		all |= uint64(dst[i])
	}
	return uint32(all | all>>32)
}

// Close ends the mapping of the files. No method of the shard, nor of its [Documents], may be
// running or be called afterwards.
func (s *Shard) Close() error {
	s.mu.Lock()
	origins := s.origins
	s.origins = nil
	s.mu.Unlock()
	var err error
	if origins != nil {
		err = origins.Close()
	}
	if s.index != nil {
		err = errors.Join(err, s.index.Close())
	}
	if s.sums != nil {
		err = errors.Join(err, s.sums.close())
	}
	return errors.Join(err, s.bin.Close())
}
