package datatrove

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"strconv"
	"strings"

	"mula/shards"
	"mula/shards/layout"
)

// maxMetadata is the maximum size of x.ds.metadata in bytes.
const maxMetadata = 1 << 16

// A reader reads one shard. It implements [shards.DocumentReader].
type reader struct {
	prefix    string
	ds        *layout.Marked
	index     *os.File // nil if the shard has no index
	manifest  *shards.Manifest
	dtype     shards.DType
	tokens    int64
	documents int64
	eod       int64
}

// open opens the shard with the given prefix. The element type is determined by the manifest, by
// x.ds.metadata, or by the hints ([layout.Hints.TypeOf]). Without x.ds.index, documents end with
// the end-of-document id of the manifest or the hints, and ids after the last end form a document.
// A shard with x.ds.loss is an error: the file masks tokens in training, and mula would lose that
// mask.
func open(prefix string, h layout.Hints) (_ *reader, err error) {
	r := &reader{prefix: prefix, documents: -1, eod: h.EOD}
	if r.ds, err = layout.OpenMarked(prefix + dsExt); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			r.Close()
		}
	}()
	if _, err := os.Lstat(prefix + lossExt); err == nil {
		return nil, fmt.Errorf("%s is a loss mask, which mula does not support; move the file away to read all "+
			"tokens", prefix+lossExt)
	}
	if r.index, err = os.Open(prefix + indexExt); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("opening shard: %w", err)
	}
	if r.manifest, err = layout.ReadManifest(prefix+manifestExt, id); err != nil {
		return nil, err
	}
	noted, count, err := readMetadata(prefix + metadataExt)
	if err != nil {
		return nil, err
	}
	sumsErr := r.ds.OpenSums(prefix+sumsExt, r.manifest)
	if err := r.ds.Unchanged(); err != nil {
		return nil, err
	}
	end, err := r.measureIndex()
	if err != nil {
		return nil, err
	}
	if err := r.measure(noted, end, count, h); err != nil {
		return nil, err
	}
	if m := r.manifest; m != nil {
		if m.Tokenizer.EOD >= 0 {
			r.eod = m.Tokenizer.EOD
		}
		if r.tokens != m.Tokens {
			return nil, layout.Differs(prefix+manifestExt, "tokens", m.Tokens, r.tokens)
		}
		if r.index != nil && r.documents != m.Documents {
			return nil, layout.Differs(prefix+manifestExt, "documents", m.Documents, r.documents)
		}
		r.documents = m.Documents
	}
	if sumsErr != nil { // reported last: errors about the ids are more helpful
		return nil, sumsErr
	}
	if r.index == nil && r.eod < 0 && r.tokens > 0 {
		return nil, fmt.Errorf("%s has no %s with the ends of its documents; restore it, or give the "+
			"end-of-document id", r.ds.Name(), prefix+indexExt)
	}
	return r, nil
}

// measureIndex counts the documents of x.ds.index and returns the end of the last document, in
// tokens; -1 without the file.
func (r *reader) measureIndex() (int64, error) {
	if r.index == nil {
		return -1, nil
	}
	info, err := r.index.Stat()
	if err != nil {
		return 0, fmt.Errorf("opening shard: %w", err)
	}
	if info.Size()%8 != 0 {
		return 0, r.corrupt("%d bytes are not a multiple of 8", info.Size())
	}
	r.documents = info.Size() / 8
	if r.documents == 0 {
		return 0, nil
	}
	var last [8]byte
	if _, err := r.index.ReadAt(last[:], info.Size()-8); err != nil {
		return 0, fmt.Errorf("opening shard: %w", err)
	}
	end := binary.LittleEndian.Uint64(last[:])
	if end > uint64(r.ds.Size) {
		return 0, r.corrupt("the last document (byte %d) ends at token %d, but %s has %d bytes", info.Size()-8, end,
			r.ds.Name(), r.ds.Size)
	}
	return int64(end), nil
}

// measure determines the element type and the number of ids. noted and count are the type and the
// number of ids from x.ds.metadata, or "" and -1. end is the end from the index, or -1.
func (r *reader) measure(noted shards.DType, end, count int64, h layout.Hints) (err error) {
	switch {
	case r.manifest != nil:
		if r.dtype, err = shards.ParseDType(string(r.manifest.DType)); err != nil {
			return fmt.Errorf("%s: %w: %w", r.prefix+manifestExt, err, shards.ErrCorrupt)
		}
		if noted != "" && noted != r.dtype {
			return layout.Differs(r.prefix+manifestExt, "dtype", r.dtype, noted)
		}
	case noted != "":
		r.dtype = noted
	default:
		if r.dtype, err = h.TypeOf(r.ds.Name(), r.ds.Size, max(end, count), types); err != nil {
			return err
		}
	}
	if r.manifest == nil && int64(h.VocabSize) > r.dtype.IDs() {
		return fmt.Errorf("%s: ids have %[3]d bytes according to %[2]s, too few for a vocabulary of %[4]d ids; "+
			"correct --vocab-size", r.ds.Name(), r.prefix+metadataExt, r.dtype.Size(), h.VocabSize)
	}
	if r.dtype == shards.UInt8 || r.ds.Size%int64(r.dtype.Size()) != 0 {
		return fmt.Errorf("%s has %d bytes, not a multiple of the size of %s: it was cut short, or has another "+
			"type: %w",
			r.ds.Name(), r.ds.Size, r.dtype, shards.ErrCorrupt)
	}
	r.tokens = r.ds.Size / int64(r.dtype.Size())
	if end >= 0 && end != r.tokens {
		return r.corrupt("the last document ends at token %d, but %s has %d of type %s", end, r.ds.Name(), r.tokens,
			r.dtype)
	}
	if count >= 0 && count != r.tokens {
		return layout.Differs(r.prefix+metadataExt, "tokens", count, r.tokens)
	}
	return nil
}

// readMetadata returns the type of ids from the first line of x.ds.metadata, "name|2", or "" if the
// line has none, and the number of ids from the second line, or -1.
func readMetadata(path string) (dtype shards.DType, tokens int64, err error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", -1, nil
	}
	if err != nil {
		return "", -1, fmt.Errorf("opening shard: %w", err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxMetadata))
	if err != nil {
		return "", -1, fmt.Errorf("opening shard: %w", err)
	}
	lines := strings.Split(string(text), "\n")
	tokens = -1
	if len(lines) > 1 && strings.TrimSpace(lines[1]) != "" {
		if tokens, err = strconv.ParseInt(strings.TrimSpace(lines[1]), 10, 64); err != nil || tokens < 0 {
			return "", -1, fmt.Errorf("%s:2: invalid number of tokens %.40q: %w", path, lines[1], shards.ErrCorrupt)
		}
	}
	bar := strings.LastIndexByte(lines[0], '|')
	switch size := strings.TrimSpace(lines[0][bar+1:]); {
	case bar < 0: // written by a version without the size
		return "", tokens, nil
	case size == "2":
		return shards.UInt16, tokens, nil
	case size == "4":
		return shards.UInt32, tokens, nil
	default:
		return "", -1, fmt.Errorf("%s:1: ids of %q bytes; want 2 or 4: %w", path, size, shards.ErrCorrupt)
	}
}

// Manifest returns the content of x.json, or nil.
func (r *reader) Manifest() *shards.Manifest { return r.manifest }

// Summed reports whether ids are checked with sums when they are read.
func (r *reader) Summed() bool { return r.ds.Summed() }

// DType returns the element type of x.ds.
func (r *reader) DType() shards.DType { return r.dtype }

// Documents returns the number of documents, -1 without x.ds.index and manifest.
func (r *reader) Documents() int64 { return r.documents }

// Tokens returns the number of ids in x.ds.
func (r *reader) Tokens() int64 { return r.tokens }

// Close closes the files.
func (r *reader) Close() error {
	err := r.ds.Close()
	if r.index != nil {
		err = errors.Join(err, r.index.Close())
	}
	return err
}

// All implements [shards.DocumentReader].
func (r *reader) All(ctx context.Context) iter.Seq2[shards.TokenDocument, error] {
	return func(yield func(shards.TokenDocument, error) bool) {
		if err := r.all(ctx, func(doc shards.TokenDocument) bool { return yield(doc, nil) }); err != nil {
			yield(shards.TokenDocument{}, err)
		}
	}
}

// all passes documents to yield until it returns false.
func (r *reader) all(ctx context.Context, yield func(shards.TokenDocument) bool) (err error) {
	origins, err := layout.OpenOrigins(ctx, r.prefix+docsExt, "docs.arrow", r.manifest)
	if err != nil {
		return err
	}
	defer origins.Close()
	var index *bufio.Reader
	if r.index != nil {
		index = bufio.NewReaderSize(io.NewSectionReader(r.index, 0, 8*r.documents), 1<<16)
	}
	ids := layout.NewIDs(r.ds, r.dtype, r.tokens)
	var doc shards.TokenDocument
	for n := int64(0); index == nil && ids.Left() > 0 || index != nil && n < r.documents; n++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		if index == nil {
			doc.Tokens, err = ids.AppendUntil(doc.Tokens[:0], r.eod)
		} else {
			var end [8]byte
			if _, err := io.ReadFull(index, end[:]); err != nil {
				return fmt.Errorf("reading %s at byte %d: %w", r.index.Name(), 8*n, err)
			}
			to := binary.LittleEndian.Uint64(end[:])
			if to < uint64(ids.Next()) || to > uint64(r.tokens) {
				return r.corrupt("document %d (byte %d) ends at token %d, but the previous document ends at %d, "+
					"and %s has %d", n, 8*n,
					to, ids.Next(), r.ds.Name(), r.tokens)
			}
			doc.Tokens, err = ids.Append(doc.Tokens[:0], int64(to)-ids.Next())
		}
		if err != nil {
			return r.damaged(ctx, err, origins)
		}
		if doc.Origin, err = origins.Next(); err != nil {
			return err
		}
		if !yield(doc) {
			return nil
		}
	}
	if ids.Left() > 0 {
		return r.corrupt("documents end at token %d, but %s has %d", ids.Next(), r.ds.Name(), r.tokens)
	}
	return nil
}

// damaged adds the names of documents to an error about damaged ids.
func (r *reader) damaged(ctx context.Context, err error, origins *layout.Origins) error {
	return r.ds.Damage(ctx, err, r.dtype, func(yield func(int64, error) bool) {
		if r.index == nil {
			yield(0, fmt.Errorf("%s does not exist", r.prefix+indexExt))
			return
		}
		index := bufio.NewReaderSize(io.NewSectionReader(r.index, 0, 8*r.documents), 1<<16)
		for range r.documents {
			var end [8]byte
			_, err := io.ReadFull(index, end[:])
			if !yield(int64(binary.LittleEndian.Uint64(end[:])), err) {
				return
			}
		}
	}, origins.Of)
}

func (r *reader) corrupt(format string, args ...any) error {
	return fmt.Errorf("%s: %w: %w", r.prefix+indexExt, fmt.Errorf(format, args...), shards.ErrCorrupt)
}
