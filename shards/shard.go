// Package shards stores token ids on disk. It reads and writes the token files of Megatron-LM
// (MMIDIDX): x.bin has the ids and x.idx the lengths. mula adds three files: x.docs.arrow has the
// origin of each document, x.sums has a checksum of every 16 KiB of x.bin, and the manifest x.json
// has the SHA-256 of the other files. docs/formats/shard.md describes every byte.
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
// Files are mapped into memory and searched in place. An open shard therefore needs no heap memory,
// and Open takes constant time for any number of documents. Values of a file are checked when they
// are used: contradictory content is an error. Shards are replaced by renaming, never rewritten in
// place. Another program may truncate a file while it is mapped; [Shard.Guard] turns this into an
// error.
package shards

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"os"
	"strings"
	"sync"
	"time"

	"mula/internal/mapping"
	"mula/internal/objects"
)

// ErrCorrupt is wrapped by errors about a file whose content is inconsistent in itself or with the
// shard's other files: a truncated .bin, offsets that do not follow from the lengths, a hash that
// differs from the manifest.
var ErrCorrupt = errors.New("corrupt shard")

// Suffixes of a shard's files.
const (
	binExt      = ".bin"
	idxExt      = ".idx"
	docsExt     = ".docs.arrow"
	sumsExt     = ".sums"
	manifestExt = ".json"
)

// Files lists all files that the shard with the given prefix may have.
func Files(prefix string) []string {
	return []string{prefix + binExt, prefix + idxExt, prefix + docsExt, prefix + sumsExt, prefix + manifestExt}
}

// A Shard is an open pair of x.bin and x.idx. It is safe for concurrent use until [Shard.Close].
type Shard struct {
	prefix            string
	sidecar           string // prefix of the manifest and of the sums
	dtype             DType
	tokens, documents int64
	idxBytes          int64 // size of .idx

	index  *Index       // nil for a shard in an object store: see openIndex
	bin    mapping.File // has no bytes for a shard in an object store
	remote *remote      // nil for a local shard

	manifest *Manifest
	sums     *blockSums // nil if the shard has no sums

	mu      sync.Mutex // guards origins
	origins *Documents
}

// Open opens the shard with the given prefix. It also accepts the name of the .bin or .idx file.
// Open takes constant time. It checks that the header and the first and last entries of .idx match
// the sizes of both files and the manifest, if there is one. The other entries are checked when
// they are used, and by [Shard.Check]. Tokens are checked when [Shard.Read] first reads them, and
// by [Shard.Verify].
//
// The prefix may be a URL of an object store. Then the size of .idx is compared with the manifest,
// and its entries are checked when they are first used. Tokens are read through the cache of remote
// files ([blockcache.Default]).
func Open(prefix string) (*Shard, error) { return OpenContext(context.Background(), prefix) }

// OpenContext does what [Open] does. ctx cancels requests to an object store.
func OpenContext(ctx context.Context, prefix string) (*Shard, error) {
	return OpenFrom(ctx, prefix, "")
}

// OpenFrom is [OpenContext] for a shard whose manifest and sums may be in another folder
// ([WriteSidecar]): sidecar.json and sidecar.sums. They are used if the shard has no manifest next
// to it. "" means no other folder.
func OpenFrom(ctx context.Context, prefix, sidecar string) (*Shard, error) {
	s := &Shard{prefix: strings.TrimSuffix(strings.TrimSuffix(prefix, idxExt), binExt), sidecar: sidecar}
	open := s.openLocal
	if objects.IsURL(prefix) {
		open = func() error { return s.openRemote(ctx) }
	}
	if err := mapping.Guard(open); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

func (s *Shard) openLocal() (err error) {
	prefix := s.prefix
	if s.index, err = OpenIndex(prefix + idxExt); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			if _, binErr := os.Stat(prefix + binExt); binErr == nil {
				return neverFinished(prefix, err)
			}
		}
		return err
	}
	s.dtype, s.tokens, s.documents = s.index.dtype, s.index.elements, s.index.documents
	s.idxBytes = s.index.Size()
	if s.bin, err = mapping.Open(prefix + binExt); err != nil {
		return fmt.Errorf("opening shard: %w", err)
	}
	if err := s.index.holdsTokens(int64(len(s.bin.Data)), prefix+binExt); err != nil {
		return err
	}
	if s.manifest, err = ReadManifest(prefix + manifestExt); err != nil {
		return err
	}
	if s.manifest != nil || s.sidecar == "" {
		s.sidecar = prefix
	} else if s.manifest, err = ReadManifest(s.sidecar + manifestExt); err != nil {
		return err
	} else if s.manifest == nil {
		s.sidecar = prefix
	}
	if s.manifest != nil && s.manifest.Files["sums"].SHA256 != "" {
		// sums that the manifest does not list belong to an older shard
		sums, err := openSums(s.sidecar+sumsExt, int64(len(s.bin.Data)))
		if err != nil {
			return err
		}
		if len(sums) > 0 {
			s.sums = sums[0]
		}
	}
	// A writer removes x.idx before it replaces the other files. So if x.idx is still the opened
	// file, the other files belong to it.
	if now, err := os.Stat(prefix + idxExt); err != nil || !os.SameFile(now, s.index.file.Info) {
		return fmt.Errorf("opening shard: %s was replaced while it was opened; try again when its writer has finished",
			prefix)
	}
	if s.manifest != nil {
		if err := s.checkManifest(); err != nil {
			return err
		}
	}
	return nil
}

// neverFinished returns the error about a shard without .idx.
func neverFinished(prefix string, err error) error {
	return fmt.Errorf("%s has no %s, which is written last: the shard was never finished; write it again: %w",
		prefix+binExt, prefix+idxExt, err)
}

// Guard calls read and returns its error. read may use methods of the shard, and tokens from
// [Shard.Encoded], but only on the calling goroutine. If another program has truncated a mapped
// file, or the disk fails, Guard returns an error that names the file and the reason. Without Guard
// the process would end. Guard also returns an error if the file was truncated elsewhere and read
// used only bytes that are left. A call costs tens of nanoseconds: guard a sample, not a token.
func (s *Shard) Guard(read func() error) error {
	return mapping.Guard(func() error {
		err := read()
		if err == nil {
			s.bin.Probe()
			if s.index != nil {
				s.index.file.Probe()
			}
		}
		return err
	})
}

// holdsTokens returns an error unless the index is for token ids and fits a .bin file of binSize
// bytes.
func (x *Index) holdsTokens(binSize int64, bin string) error {
	if !x.dtype.megatron() {
		return fmt.Errorf("%s: tokens have type %s (byte 17); want uint16 or int32; convert the shard first", x.path,
			x.dtype)
	}
	if x.Multimodal() {
		return fmt.Errorf("%s: multimodal dataset (with a mode for each sequence); mula reads only text",
			x.path)
	}
	if want := x.elements * int64(x.dtype.Size()); want != binSize {
		what := "it was cut short"
		if binSize > want {
			what = "it belongs to another .idx"
		}
		return fmt.Errorf("%s: expected %d bytes according to %s, found %d: %s: %w", bin, want, x.path, binSize, what,
			ErrCorrupt)
	}
	return nil
}

// Check reads the whole .idx file and checks that it is consistent, as [Index.Check] does. A file
// that passes is valid for every document.
func (s *Shard) Check(ctx context.Context) error {
	x, err := s.openIndex(ctx)
	if err != nil {
		return err
	}
	return x.Check(ctx)
}

// Summed reports whether the shard has block sums. With sums, [Shard.Read] never returns damaged
// tokens.
func (s *Shard) Summed() bool { return s.sums != nil || s.remote != nil && s.remote.summed(s) }

// Reverify sets the time after which a block is compared with its sum again when it is read, so
// that damage after the first read is found. 0, the default, means never; a negative time means at
// every read. Call Reverify before the first read.
//
// A read of n bytes costs at most ⌈n/16384⌉+1 comparisons of 16 KiB in each period.
func (s *Shard) Reverify(after time.Duration) {
	if s.sums != nil {
		s.sums.again = after
	}
}

// Recheck compares the blocks of the tokens [from, to) with their sums, even if they were compared
// before. It returns nil for a shard without sums.
func (s *Shard) Recheck(ctx context.Context, from, to int64) error {
	if from < 0 || to < from || to > s.Tokens() {
		return fmt.Errorf("%s: token range [%d, %d) exceeds its %d tokens", s.prefix+binExt, from, to, s.Tokens())
	}
	if !s.Summed() {
		return nil
	}
	return s.Guard(func() error {
		size := int64(s.DType().Size())
		if s.remote != nil {
			_, err := s.remote.read(ctx, s, from*size, to*size) // compares every block
			return err
		}
		for b := from * size / s.sums.block; b*s.sums.block < to*size; b++ {
			if !s.sums.right(s.bin.Data, b) {
				return s.damage(ctx, "", []int64{b})
			}
		}
		return nil
	})
}

// Prefix returns the path of the shard's files without their suffixes.
func (s *Shard) Prefix() string { return s.prefix }

// Replaced reports whether the shard's path now names other files than the open ones.
func (s *Shard) Replaced() bool {
	if s.remote != nil {
		return s.remote.replaced(s.prefix)
	}
	return s.bin.Replaced() || s.index.file.Replaced() || s.sums != nil && s.sums.file.Replaced()
}

// ManifestPath returns the path of the shard's manifest.
func (s *Shard) ManifestPath() string { return s.sidecar + manifestExt }

// DType returns the element type of the .bin file.
func (s *Shard) DType() DType { return s.dtype }

// Tokens returns the number of tokens.
func (s *Shard) Tokens() int64 { return s.tokens }

// Documents returns the number of documents. A document is a run of one or more sequences; files
// that mula did not write may have several sequences in a document.
func (s *Shard) Documents() int64 { return s.documents }

// openIndex returns the shard's .idx file, which [Shard.Close] closes. If the shard is in an object
// store, the first call fetches the complete file.
func (s *Shard) openIndex(ctx context.Context) (*Index, error) {
	if s.remote != nil {
		return s.remote.openIndex(ctx, s)
	}
	return s.index, nil
}

// DocumentLengths yields the number of tokens of every document, as [Index.DocumentLengths] does.
func (s *Shard) DocumentLengths() iter.Seq2[int64, error] {
	return func(yield func(int64, error) bool) {
		x, err := s.openIndex(context.Background())
		if err != nil {
			yield(0, err)
			return
		}
		x.DocumentLengths()(yield)
	}
}

// binBytes returns the size of .bin.
func (s *Shard) binBytes() int64 { return s.tokens * int64(s.dtype.Size()) }

// Manifest returns the content of x.json, or nil for a shard without a manifest. The caller must
// not modify it.
func (s *Shard) Manifest() *Manifest { return s.manifest }

// DocumentStart returns the first token of document d, counted from 0. If d is [Shard.Documents],
// it returns [Shard.Tokens]. The error wraps [ErrCorrupt] if the .idx file has an impossible value.
func (s *Shard) DocumentStart(d int64) (int64, error) {
	x, err := s.openIndex(context.Background())
	if err != nil {
		return 0, err
	}
	return x.documentStart(d)
}

// DocumentAt returns the document that contains the given token: the only d with DocumentStart(d) ≤
// token < DocumentStart(d+1), which is never empty. It returns -1 for a token that the shard does
// not have. The error wraps [ErrCorrupt] if the .idx file is inconsistent.
func (s *Shard) DocumentAt(token int64) (int64, error) {
	if token < 0 || token >= s.Tokens() {
		return -1, nil
	}
	x, err := s.openIndex(context.Background())
	if err != nil {
		return -1, err
	}
	low, high := int64(0), x.documents // low starts at or before the token, high after it
	first, end := int64(0), s.Tokens() // the starts of low and high
	// Interpolation finds one of a million documents in a few guesses, where a binary search needs
	// twenty steps. If lengths are uneven, bisection ends the search.
	const guesses = 7
	for turn := 0; high-low > 1; turn++ {
		middle := low + (high-low)/2
		if turn < guesses {
			guess := low + int64(float64(token-first)/float64(end-first)*float64(high-low))
			middle = min(max(guess, low+1), high-1)
		}
		start, err := x.documentStart(middle)
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

// A Span is the token range [First, End) of a document in a shard.
type Span struct {
	Document   int64
	First, End int64
}

// Span returns the tokens of document d. First equals End if the document is empty. The error wraps
// [ErrCorrupt] if the range is negative, or if starts, lengths and documents of the .idx file
// contradict each other.
func (s *Shard) Span(d int64) (Span, error) {
	x, err := s.openIndex(context.Background())
	if err != nil {
		return Span{}, err
	}
	first, end, err := x.document(d)
	if err == nil && s.manifest != nil && !s.manifest.Foreign() && x.end(d) != d { // each is one sequence
		err = x.corrupt("entry %d of the document array is %d, not %d", d, x.end(d), d)
	}
	return Span{d, first, end}, err
}

// Spans yields the non-empty documents that overlap [from, to), in order. The first document may
// start before from and the last may end after to. An error ends the iteration and wraps
// [ErrCorrupt].
func (s *Shard) Spans(from, to int64) iter.Seq2[Span, error] {
	return func(yield func(Span, error) bool) {
		to = min(to, s.Tokens())
		d := int64(-1)
		for at := max(0, from); at < to; {
			span, err := s.spanAt(at, d+1)
			if !yield(span, err) || err != nil {
				return
			}
			d, at = span.Document, span.End // always greater than at, also in a damaged file
		}
	}
}

// spanAt returns the document that contains token. It tries document number guess first.
func (s *Shard) spanAt(token, guess int64) (Span, error) {
	if guess > 0 && guess < s.documents {
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
		err = fmt.Errorf("%s: token %d is in no document: the search found document %d, which has the tokens "+
			"[%d, %d): %w",
			s.prefix+idxExt, token, d, span.First, span.End, ErrCorrupt)
	}
	return span, err
}

// Read fills dst with the ids that start at the given token. A range may cross documents. Read
// returns an error if the shard has fewer tokens, or if an id of an int32 shard is negative.
//
// If the shard has sums, Read compares each block of 16 KiB of x.bin with its sum when the block is
// first read through this Shard, and again as [Shard.Reverify] requires. Reading a damaged block
// always returns a [DamageError]. The tokens of a shard without x.sums are not checked.
func (s *Shard) Read(dst []uint32, token int64) error {
	return s.ReadContext(context.Background(), dst, token)
}

// ReadContext does what [Shard.Read] does. ctx cancels requests to an object store.
func (s *Shard) ReadContext(ctx context.Context, dst []uint32, token int64) error {
	return s.Guard(func() error { return s.read(ctx, dst, token) })
}

func (s *Shard) read(ctx context.Context, dst []uint32, token int64) error {
	src, err := s.Encoded(ctx, token, token+int64(len(dst)))
	if err != nil {
		return err
	}
	if s.DType().decode(dst, src)>>31 == 0 {
		return nil
	}
	for i, id := range dst {
		if id>>31 != 0 {
			at := token + int64(i)
			return fmt.Errorf("%s: token %d (byte %d) is %d; ids are not negative: %w", s.prefix+binExt, at, 4*at,
				int32(id), ErrCorrupt)
		}
	}
	return nil
}

// Encoded returns the tokens [from, to) as stored in x.bin: little-endian elements of the shard's
// type. Values are not checked, but sums are. The slice is read-only and valid until Close. Read it
// inside [Shard.Guard]. ctx cancels requests to an object store.
func (s *Shard) Encoded(ctx context.Context, from, to int64) ([]byte, error) {
	if from < 0 || to < from || to > s.Tokens() {
		return nil, fmt.Errorf("%s: token range [%d, %d) exceeds its %d tokens", s.prefix+binExt, from, to, s.Tokens())
	}
	size := int64(s.DType().Size())
	if s.remote != nil {
		return s.remote.read(ctx, s, from*size, to*size)
	}
	if err := s.bin.CutBefore(to * size); err != nil {
		return nil, err
	}
	if s.sums != nil {
		if block := s.sums.check(s.bin.Data, from*size, to*size); block >= 0 {
			return nil, s.damage(ctx, "", []int64{block})
		}
	}
	return s.bin.Data[from*size : to*size : to*size], nil
}

// Close unmaps the files. No method of the shard or of its [Documents] may run during or after
// Close.
func (s *Shard) Close() error {
	s.mu.Lock()
	origins := s.origins
	s.origins = nil
	s.mu.Unlock()
	var err error
	if origins != nil {
		err = origins.Close()
	}
	if s.remote != nil {
		err = errors.Join(err, s.remote.close())
	}
	if s.index != nil {
		err = errors.Join(err, s.index.Close())
	}
	if s.sums != nil {
		err = errors.Join(err, s.sums.close())
	}
	return errors.Join(err, s.bin.Close())
}
