package shards

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"

	"mula/internal/atomicfile"
	"mula/internal/objects"
	"mula/internal/strictjson"
)

// manifestFormat is the version of the manifest that this package writes. It also reads version 1,
// which has no checksum.
const manifestFormat = 2

// foreignFormat is the version of the manifest of a shard that another program wrote: see
// [WriteSidecar]. Its tokenizer and the origins of its documents are unknown, and a document may
// have any number of sequences.
const foreignFormat = 3

// maxManifest is the maximum size of a manifest in bytes. A manifest that mula writes has less than
// a thousand.
const maxManifest = 1 << 20

// Manifest is the content of x.json, a file of the shard: its contents, its tokenizer, and the
// hashes of its files.
type Manifest struct {
	Format int    `json:"format"`           // 2, 1 in older files, 3 if another program wrote the shard
	Layout Layout `json:"layout,omitempty"` // omitted for Megatron
	// type of the ids on disk: "uint16" or "int32", in layouts other than Megatron's also "uint32"
	DType     DType         `json:"dtype"`
	Tokens    int64         `json:"tokens"`
	Documents int64         `json:"documents"`
	Tokenizer TokenizerInfo `json:"tokenizer"`
	// keys "bin", "idx", "docs" and "sums"; other layouts have other keys
	Files    map[string]FileInfo `json:"files"`
	Checksum string              `json:"checksum,omitempty"` // of the manifest itself, see [sumOf]; absent in format 1
}

// TokenizerInfo identifies how text was converted to the ids of a shard. Two shards may be blended
// if their TokenizerInfo is equal.
type TokenizerInfo struct {
	SHA256     string `json:"sha256"`      // of tokenizer.json
	VocabSize  int    `json:"vocab_size"`  // every id of the shard is smaller
	EOD        int64  `json:"eod"`         // the id after each document, -1 for no such id
	ClassTable string `json:"class_table"` // the Unicode tables that were used to split text
	Specials   string `json:"specials"`    // how special tokens in the text were encoded: as "text" or as "tokens"

	// AddSpecialTokens reports that the ids that the tokenizer's post-processor adds, such as a
	// start token, surround each document.
	AddSpecialTokens bool `json:"add_special_tokens,omitempty"`

	// TruncationAndPaddingIgnored reports that the tokenizer.json sets truncation or padding, but
	// documents were neither truncated nor padded.
	TruncationAndPaddingIgnored bool `json:"truncation_and_padding_ignored,omitempty"`
}

// FileInfo is a file's size and hash.
type FileInfo struct {
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"` // in hexadecimal
}

type manifestFile struct {
	name, ext string
	optional  bool
}

// manifestFiles lists the names in Manifest.Files and the suffixes of the files, in the order in
// which they are verified. Older shards have no "sums".
var manifestFiles = []manifestFile{{"idx", idxExt, false}, {"bin", binExt, false}, {"sums", sumsExt, true},
	{"docs", docsExt, false}}

// ReadManifest reads the manifest of a shard of any layout. If the file does not exist, it returns
// nil and no error.
func ReadManifest(path string) (*Manifest, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("opening shard: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxManifest+1))
	if err != nil {
		return nil, fmt.Errorf("reading manifest: %w", err)
	}
	return decodeManifest(path, data)
}

// decodeManifest returns the content of a manifest with the bytes data.
func decodeManifest(path string, data []byte) (*Manifest, error) {
	m, err := parseManifest(data)
	if errors.Is(err, ErrCorrupt) {
		return nil, fmt.Errorf("%s: %w; restore it or write the shard again", path, err)
	}
	if err != nil {
		return nil, fmt.Errorf("%s is not the manifest of a shard; if it belongs to other data, move it or the "+
			"shard: %w", path, err)
	}
	return m, nil
}

// parseManifest parses a manifest. The error about a damaged manifest wraps [ErrCorrupt].
func parseManifest(data []byte) (*Manifest, error) {
	if len(data) > maxManifest {
		return nil, fmt.Errorf("the file has more than %d bytes", maxManifest)
	}
	var version struct {
		Format int `json:"format"`
	}
	if err := strictjson.DecodeLoosely(data, &version); err != nil {
		return nil, err
	}
	if version.Format < 1 || version.Format > foreignFormat {
		return nil, fmt.Errorf("format %d is not supported; want 1 to %d", version.Format, foreignFormat)
	}
	m := new(Manifest)
	err := strictjson.Decode(data, m)
	if err == nil {
		err = complete(data)
	}
	if err == nil {
		err = m.check()
	}
	if err == nil && m.Format > 1 {
		err = checkSum(data, m.Checksum)
	}
	if err != nil {
		return nil, fmt.Errorf("the manifest is damaged: %w: %w", err, ErrCorrupt)
	}
	return m, nil
}

// complete returns an error about fields that are missing in the text of a manifest. The decoder
// would set them to zero.
func complete(data []byte) error {
	var m struct {
		DType, Tokens, Documents any
		Tokenizer, Files         map[string]any
	}
	if err := strictjson.DecodeLoosely(data, &m); err != nil {
		return err
	}
	for name, value := range map[string]any{"dtype": m.DType, "tokens": m.Tokens, "documents": m.Documents} {
		if value == nil {
			return fmt.Errorf("missing field %q", name)
		}
	}
	for _, name := range []string{"sha256", "vocab_size", "eod", "class_table", "specials"} {
		if m.Tokenizer[name] == nil {
			return fmt.Errorf("missing field tokenizer.%s", name)
		}
	}
	for name, value := range m.Files {
		if file, ok := value.(map[string]any); !ok || file["bytes"] == nil || file["sha256"] == nil {
			return fmt.Errorf("files.%s: missing field bytes or sha256", name)
		}
	}
	return nil
}

// check returns an error about a field whose value is out of range.
func (m *Manifest) check() error {
	ids, t := m.DType.IDs(), &m.Tokenizer
	switch {
	case m.Foreign() && (m.Layout != Megatron || *t != TokenizerInfo{EOD: -1}):
		return fmt.Errorf("format %d has no layout and no tokenizer", m.Format)
	case !layoutName.MatchString(string(m.Layout)):
		return fmt.Errorf("layout: %.80q is not the name of a layout", m.Layout)
	case !slices.Contains(idTypes, m.DType):
		return fmt.Errorf("dtype: %q is not a type of ids", m.DType)
	case m.Tokens < 0 || m.Documents < 0:
		return fmt.Errorf("tokens and documents: %d and %d must not be negative", m.Tokens, m.Documents)
	case t.SHA256 != "" && !isSHA256(t.SHA256):
		return fmt.Errorf("tokenizer.sha256: %.80q is not 64 hexadecimal digits", t.SHA256)
	case t.VocabSize < 0 || int64(t.VocabSize) > ids:
		return fmt.Errorf("tokenizer.vocab_size: %d must be from 0 to %d, for ids of type %s", t.VocabSize, ids,
			m.DType)
	case t.EOD < -1 || t.EOD > math.MaxUint32:
		return fmt.Errorf("tokenizer.eod: %d is neither an id nor -1", t.EOD)
	case t.Specials != "" && t.Specials != "text" && t.Specials != "tokens":
		return fmt.Errorf("tokenizer.specials: %.80q must be \"text\" or \"tokens\"", t.Specials)
	case m.Format == 1 && m.Checksum != "":
		return errors.New("checksum: not allowed in format 1")
	case m.Format > 1 && !isSHA256(m.Checksum):
		return fmt.Errorf("checksum: %.80q is not 64 hexadecimal digits", m.Checksum)
	}
	for _, name := range slices.Sorted(maps.Keys(m.Files)) {
		f := m.Files[name]
		switch {
		case !filepath.IsLocal(filepath.FromSlash(name)) || m.Layout == Megatron && !slices.ContainsFunc(manifestFiles,
			func(f manifestFile) bool { return f.name == name }):
			return fmt.Errorf("files: %.80q is not a file of a shard", name)
		case f.Bytes < 0:
			return fmt.Errorf("files.%s.bytes: %d must not be negative", name, f.Bytes)
		case !isSHA256(f.SHA256):
			return fmt.Errorf("files.%s.sha256: %.80q is not 64 hexadecimal digits", name, f.SHA256)
		}
	}
	return nil
}

// layoutName matches the names of layouts. Readers compare the name with their own.
var layoutName = regexp.MustCompile(`^[a-z0-9]*$`)

// isSHA256 reports whether a text is a SHA-256 as this package writes it.
func isSHA256(text string) bool {
	sum, err := hex.DecodeString(text)
	return err == nil && len(sum) == sha256.Size && hex.EncodeToString(sum) == text
}

// noSum replaces the checksum in the bytes of a manifest when they are hashed.
var noSum = strings.Repeat("0", hex.EncodedLen(sha256.Size))

// lastMember is the end of a manifest: the checksum is the last member of the object.
var lastMember = regexp.MustCompile(`"checksum"\s*:\s*"([0-9a-f]{64})"\s*\}\s*$`)

// sumOf returns the checksum of a manifest: the SHA-256 of the file's bytes, with the 64 digits of
// the checksum, which start at byte at, replaced by zeros.
func sumOf(data []byte, at int) string {
	h := sha256.New()
	h.Write(data[:at])
	h.Write([]byte(noSum))
	h.Write(data[at+len(noSum):])
	return hex.EncodeToString(h.Sum(nil))
}

// checkSum compares a manifest with its checksum.
func checkSum(data []byte, sum string) error {
	at := lastMember.FindSubmatchIndex(data)
	if at == nil {
		return errors.New("the checksum must be the last field")
	}
	if found := sumOf(data, at[2]); found != sum {
		return fmt.Errorf("the checksum is %s, but the SHA-256 of its bytes is %s: it was changed after it was written",
			sum,
			found)
	}
	return nil
}

// Foreign reports whether another program wrote the shard, so that its tokenizer is unknown.
func (m *Manifest) Foreign() bool { return m.Format == foreignFormat }

// Seal writes the manifest, in the format version of this package, under a temporary name. The
// caller publishes it. Seal returns an error if [ReadManifest] could not read the manifest.
func (m *Manifest) Seal(files atomicfile.Files, path string) (*atomicfile.File, error) {
	data, err := m.encode(path)
	if err != nil {
		return nil, err
	}
	f, err := files.Create(path)
	if err != nil {
		return nil, err
	}
	if _, err = f.Write(data); err == nil {
		err = f.Seal()
	}
	if err != nil {
		f.Abort()
		return nil, err
	}
	return f, nil
}

// encode returns the bytes of the manifest, which will be written to path.
func (m *Manifest) encode(path string) ([]byte, error) {
	if !m.Foreign() {
		m.Format = manifestFormat
	}
	m.Checksum = noSum
	if err := m.check(); err != nil {
		return nil, fmt.Errorf("writing %s: %w", path, err)
	}
	data, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return nil, err
	}
	data = append(data, '\n')
	at := bytes.LastIndex(data, []byte(noSum))
	m.Checksum = sumOf(data, at)
	copy(data[at:], m.Checksum)
	if len(data) > maxManifest {
		return nil, fmt.Errorf("writing %s: a manifest of %d files has %d bytes, more than %d; divide the data "+
			"into several shards",
			path, len(m.Files), len(data), maxManifest)
	}
	return data, nil
}

// optional reports whether the manifest need not have the file.
func (m *Manifest) optional(f manifestFile) bool {
	return f.optional || m.Foreign() && f.name == "docs"
}

// checkManifest compares the manifest with the files without hashing them.
func (s *Shard) checkManifest() error {
	m := s.manifest
	differs := func(what string, manifest, found any) error {
		return fmt.Errorf("%s has %s %v, but %s has %v; they belong to different shards: %w",
			s.ManifestPath(), what, manifest, s.prefix, found, ErrCorrupt)
	}
	for _, f := range manifestFiles {
		if _, ok := m.Files[f.name]; !ok && !m.optional(f) {
			return fmt.Errorf("%s has no SHA-256 of %s; restore it or write the shard again: %w", s.ManifestPath(),
				s.prefix+f.ext, ErrCorrupt)
		}
	}
	switch bin, idx := m.Files["bin"], m.Files["idx"]; {
	case m.Layout != Megatron:
		return fmt.Errorf("%s belongs to a shard of another layout; move one of the two away: %w", s.ManifestPath(),
			ErrCorrupt)
	case m.DType != s.DType():
		return differs("dtype", m.DType, s.DType())
	case m.Tokens != s.Tokens():
		return differs("tokens", m.Tokens, s.Tokens())
	case m.Documents != s.Documents():
		return differs("documents", m.Documents, s.Documents())
	case s.index != nil && !m.Foreign() && m.Documents != s.index.sequences: // [Writer] makes each one sequence
		return differs("documents of one sequence each", m.Documents, s.index.sequences)
	case bin.Bytes != s.binBytes():
		return differs("bytes of .bin", bin.Bytes, s.binBytes())
	case idx.Bytes != s.idxBytes:
		return differs("bytes of .idx", idx.Bytes, s.idxBytes)
	}
	return nil
}

// Verify reads every file of the shard and compares it with the manifest. It also checks that .idx
// is consistent. The error names each wrong file with the expected and the found value. If x.bin
// has sums, the error contains a [DamageError] that names the documents. progress, which may be
// nil, is called with the number of bytes read since its last call.
func (s *Shard) Verify(ctx context.Context, progress func(bytes int64)) error {
	if s.manifest == nil {
		return fmt.Errorf("cannot verify %s: it has no manifest %s", s.prefix, s.ManifestPath())
	}
	_, err := s.VerifyTokens(ctx, progress, nil)
	return errors.Join(err, s.VerifyRest(ctx, progress))
}

// VerifyIndex reads x.idx and compares it with the manifest. Without a manifest it only checks that
// x.idx is consistent. progress is as in [Shard.Verify].
func (s *Shard) VerifyIndex(ctx context.Context, progress func(bytes int64)) error {
	if s.manifest == nil {
		return s.Check(ctx)
	}
	err := s.verifyFile(ctx, idxExt, s.manifest.Files["idx"], progress)
	if err != nil && ctx.Err() == nil {
		err = errors.Join(err, s.Check(ctx)) // names the position
	}
	return err
}

// verifyFile compares the file with the given suffix with its entry in the manifest.
func (s *Shard) verifyFile(ctx context.Context, ext string, want FileInfo, progress func(bytes int64)) error {
	prefix := s.prefix
	if ext == sumsExt {
		prefix = s.sidecar
	}
	file, err := openFile(ctx, prefix+ext)
	if err != nil {
		return fmt.Errorf("verifying shard: %w", err)
	}
	defer file.Close()
	return verifyFile(ctx, file, s.prefix+ext, want, progress)
}

// VerifyRest verifies all files except x.bin as [Shard.Verify] does. Without a manifest it only
// checks that .idx is consistent.
func (s *Shard) VerifyRest(ctx context.Context, progress func(bytes int64)) error {
	var errs []error
	for _, f := range manifestFiles {
		if f.name == "bin" || s.manifest == nil {
			continue
		}
		want, ok := s.manifest.Files[f.name]
		if !ok && s.manifest.optional(f) {
			continue
		}
		errs = append(errs, s.verifyFile(ctx, f.ext, want, progress))
		if ctx.Err() != nil {
			return errors.Join(errs...)
		}
	}
	return errors.Join(append(errs, s.Check(ctx))...)
}

// readAtOnce is the maximum number of tokens in a call of visit in VerifyTokens.
const readAtOnce = 1 << 16

// VerifyTokens reads x.bin once from start to end, passes its ids to visit in order, and returns
// its SHA-256 in hexadecimal. If the shard has a manifest, VerifyTokens compares the hash with it
// after the last visit. Ids are not checked; negative ids have the highest bit set. The slice ids
// is valid until visit returns. visit may be nil. An error of visit ends the read. progress is as
// in [Shard.Verify].
func (s *Shard) VerifyTokens(ctx context.Context, progress func(bytes int64),
	visit func(ids []uint32) error) (sha256hex string, err error) {
	err = s.Guard(func() (err error) {
		sha256hex, err = s.verifyTokens(ctx, progress, visit)
		return err
	})
	return sha256hex, err
}

func (s *Shard) verifyTokens(ctx context.Context, progress func(bytes int64),
	visit func(ids []uint32) error) (sha256hex string, err error) {
	size := s.DType().Size()
	hash := sha256.New()
	ids := make([]uint32, min(readAtOnce, s.Tokens()))
	next := func(at, end int64) ([]byte, error) { return s.bin.Data[at:end], nil }
	if s.remote != nil {
		in, err := openFile(ctx, s.prefix+binExt)
		if err != nil {
			return "", err
		}
		defer in.Close()
		part := make([]byte, readAtOnce*size)
		next = func(at, end int64) ([]byte, error) {
			n, err := io.ReadFull(in, part[:end-at])
			return part[:n], err
		}
	}
	s.bin.InSequence(s.bin.Data)
	defer s.bin.Usual()
	for at := int64(0); at < s.binBytes(); {
		if ctx.Err() != nil {
			return "", fmt.Errorf("verifying %s: %w", s.prefix+binExt, context.Cause(ctx))
		}
		part, err := next(at, min(s.binBytes(), at+int64(readAtOnce*size)))
		if err != nil {
			return "", fmt.Errorf("verifying %s: %w", s.prefix+binExt, err)
		}
		at += int64(len(part))
		hash.Write(part)
		if visit != nil {
			ids = ids[:len(part)/size]
			s.DType().decode(ids, part)
			if err := visit(ids); err != nil {
				return "", err
			}
		}
		if progress != nil {
			progress(int64(len(part)))
		}
	}
	if err := s.bin.Cut(); err != nil { // the end of a truncated file may have been read as zeros
		return "", err
	}
	sum := hex.EncodeToString(hash.Sum(nil))
	if s.manifest == nil {
		return sum, nil
	}
	if want := s.manifest.Files["bin"]; sum != want.SHA256 {
		err = fmt.Errorf("%s: expected %d bytes with SHA-256 %s, found %d bytes with %s; restore it or write the "+
			"shard again: %w",
			s.prefix+binExt, want.Bytes, want.SHA256, s.binBytes(), sum, ErrCorrupt)
		return sum, s.locateDamage(ctx, err)
	}
	return sum, nil
}

// locateDamage adds blocks and documents to an error that x.bin does not match the manifest.
func (s *Shard) locateDamage(ctx context.Context, err error) error {
	sums, sumsErr := s.blockSums(ctx)
	if sums == nil {
		return errors.Join(err, sumsErr)
	}
	var blocks []int64
	for b := range sums.blocks(s.binBytes()) {
		if b%1024 == 0 && ctx.Err() != nil {
			return fmt.Errorf("verifying shard: %w", context.Cause(ctx))
		}
		right, readErr := s.rightBlock(ctx, sums, b)
		if readErr != nil {
			return errors.Join(err, readErr)
		}
		if !right {
			blocks = append(blocks, b)
		}
	}
	if len(blocks) == 0 { // the file was replaced, or the sums are wrong, too
		return err
	}
	return s.damage(ctx, "the SHA-256 differs from the manifest; ", blocks)
}

// verifyFile hashes a file from its start and compares it with want.
func verifyFile(ctx context.Context, f io.Reader, path string, want FileInfo, progress func(bytes int64)) error {
	found, err := hashFile(ctx, f, path, nil, progress)
	if err == nil && found != want {
		err = wrongFile(path, want, found)
	}
	return err
}

// wrongFile returns the error about a file that differs from the manifest.
func wrongFile(path string, want, found FileInfo) error {
	return fmt.Errorf("%s: expected %d bytes with SHA-256 %s, found %d bytes with %s; restore it or write the shard "+
		"again: %w",
		path, want.Bytes, want.SHA256, found.Bytes, found.SHA256, ErrCorrupt)
}

// openFile opens a local file or an object for reading from its start.
func openFile(ctx context.Context, path string) (io.ReadCloser, error) {
	if !objects.IsURL(path) {
		return os.Open(path)
	}
	o, err := objects.Open(ctx, path)
	if err != nil {
		return nil, err
	}
	return o.Reader(ctx), nil
}

// HashFile returns the SHA-256 of a file or an object in hexadecimal, and its size. progress is as
// in [Shard.Verify].
func HashFile(ctx context.Context, path string, progress func(bytes int64)) (sha256hex string, bytes int64, err error) {
	f, err := openFile(ctx, path)
	if err != nil {
		return "", 0, err
	}
	defer f.Close()
	info, err := hashFile(ctx, f, path, nil, progress)
	return info.SHA256, info.Bytes, err
}

// hashBuffers has the buffers of hashFile: thousands of small files must not clear a buffer each.
var hashBuffers = sync.Pool{New: func() any { return new([1 << 20]byte) }}

// hashFile hashes a file from its start. visit, if not nil, is called with all bytes of the file in
// order, in pieces of 1 MiB. The last piece may be shorter.
func hashFile(ctx context.Context, f io.Reader, path string, visit func(data []byte) error,
	progress func(bytes int64)) (info FileInfo, err error) {
	h := sha256.New()
	buffer := hashBuffers.Get().(*[1 << 20]byte)
	defer hashBuffers.Put(buffer)
	for {
		if ctx.Err() != nil {
			return FileInfo{}, fmt.Errorf("hashing %s: %w", path, context.Cause(ctx))
		}
		// Unlike io.ReadFull, this does not take io.ErrUnexpectedEOF of a connection for the end.
		n, err := 0, error(nil)
		for n < len(buffer) && err == nil {
			var more int
			more, err = f.Read(buffer[n:])
			n += more
		}
		data := buffer[:n]
		h.Write(data)
		info.Bytes += int64(n)
		if visit != nil {
			if err := visit(data); err != nil {
				return FileInfo{}, err
			}
		}
		if progress != nil && n > 0 {
			progress(int64(n))
		}
		if err == io.EOF {
			info.SHA256 = hex.EncodeToString(h.Sum(nil))
			return info, nil
		}
		if err != nil {
			return FileInfo{}, fmt.Errorf("hashing: %w", err)
		}
	}
}
