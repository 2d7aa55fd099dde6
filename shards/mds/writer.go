package mds

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/klauspost/compress/zstd"

	"mula/internal/filesystem"
	"mula/shards"
	"mula/shards/layout"
)

const (
	defaultSizeLimit = 1 << 26
	maxSizeLimit     = 1 << 31 // offsets have 32 bits; only a single sample can exceed the limit

	// maxFiles is the maximum number of files of a folder. It keeps the manifest within the limit
	// of [shards.ReadManifest].
	maxFiles = 6000
)

// Compressions lists the compressions of files. "" is also valid and means no compression.
func Compressions() []string { return []string{"zstd"} }

// Layout is the layout of MosaicML Streaming: a shard is a folder.
var Layout = layout.Layout{
	ID: id, Name: "mds", Users: "MosaicML Streaming, llm-foundry",
	Shape:  "PREFIX/index.json, PREFIX/shard.00000.mds, …",
	Folder: true, Marker: "/" + indexName, Own: []string{"/" + manifestName}, Manifest: "/" + manifestName,
	Sums: "/" + sumsName, Origins: "/" + originsName,
	IDs: "/shard.*", Parts: regexp.MustCompile(`^/shard\.\d{5,}\.mds.*$`), PartSuffix: ".mds",
	Types: []shards.DType{shards.UInt16, shards.UInt32}, NoEmpty: "MosaicML's arrays have at least one element",
	Create: create,
	Open:   func(folder string, h layout.Hints) (shards.DocumentReader, error) { return open(folder, h) },
}

const id shards.Layout = "mds"

// create creates the folder, which may exist. A sample has two columns: id with the encoding str,
// and tokens with the encoding ndarray:uint16 or ndarray:uint32, which StreamingDataset returns as
// an array. In addition to index.json and shard.*.mds, the folder has mula.json, mula.docs.arrow
// and mula.sums. Hashes are SHA-256.
func create(l *layout.Layout, s layout.Settings) (shards.DocumentWriter, error) {
	folder := filepath.Clean(s.Prefix)
	if folder == "." || folder == ".." {
		return nil, errors.New("creating shard: no folder; name one")
	}
	s.Prefix = folder
	if s.SizeLimit == 0 {
		s.SizeLimit = defaultSizeLimit
	}
	switch {
	case s.SizeLimit < 1<<10 || s.SizeLimit > maxSizeLimit:
		return nil, fmt.Errorf("creating shard %s: the size limit of %d bytes must be from %d to %d", folder,
			s.SizeLimit, 1<<10, maxSizeLimit)
	case s.Compression != "" && !slices.Contains(Compressions(), s.Compression):
		return nil, fmt.Errorf("creating shard %s: unknown compression %q; allowed: %s", folder,
			s.Compression, strings.Join(Compressions(), ", "))
	}
	if err := replaceable(folder); err != nil {
		return nil, err
	}
	e := &encoder{dtype: s.DType, config: config{
		ColumnEncodings: []string{"str", "ndarray:" + string(s.DType)}, ColumnNames: []string{idColumn, tokensColumn},
		ColumnSizes: []*int{nil, nil}, Format: "mds", Hashes: []string{"sha256"}, SizeLimit: &s.SizeLimit, Version: 2,
	}}
	if s.Compression != "" {
		e.config.Compression = &s.Compression
		var err error
		if e.zstd, err = zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1)); err != nil {
			return nil, err
		}
	}
	e.samples.config = e.config.text()
	stale := func() ([]string, error) { return stale(filesystem.Default(s.FS), folder, e) }
	return l.NewWriter(s, stale, func(files *shards.FileSet) (shards.Encoder, error) {
		e.files = files
		return e, nil
	})
}

// replaceable returns an error if the folder has a data set that another program wrote.
func replaceable(folder string) error {
	if _, err := os.Lstat(filepath.Join(folder, indexName)); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	m, err := shards.ReadManifest(filepath.Join(folder, manifestName))
	if err == nil && m == nil {
		err = fmt.Errorf("%s has a data set that another program wrote; choose another folder, or remove it", folder)
	}
	if err != nil {
		return fmt.Errorf("creating shard: %w", err)
	}
	return nil
}

// sampleFile matches the writer's names of files of samples.
var sampleFile = regexp.MustCompile(`^shard\.[0-9]{5}\.mds(\.zstd)?$`)

// stale returns the files of samples in the folder that e does not replace.
func stale(fsys filesystem.FS, folder string, e *encoder) ([]string, error) {
	entries, err := fsys.ReadDir(folder)
	if err != nil {
		return nil, err
	}
	written := make(map[string]bool)
	for i := range e.list {
		written[e.list[i].written().Basename] = true
	}
	var out []string
	for _, entry := range entries {
		if name := entry.Name(); sampleFile.MatchString(name) && !written[name] {
			out = append(out, filepath.Join(folder, name))
		}
	}
	return out, nil
}

// written returns the file that the writer leaves on disk.
func (f *file) written() *contents {
	if f.ZipData != nil {
		return f.ZipData
	}
	return &f.RawData
}

type encoder struct {
	files   *shards.FileSet
	dtype   shards.DType
	config  config
	zstd    *zstd.Encoder // nil without compression
	samples samples
	list    []file // finished
}

func (e *encoder) Append(tokens []uint32, origin shards.DocumentOrigin) error {
	var head [5]byte
	array := appendArrayHead(head[:0], len(tokens))
	value := len(array) + len(tokens)*e.dtype.Size()
	size := int64(8 + len(origin.ID) + value)
	s := &e.samples
	if len(s.ends) > 0 && s.size(size) > *e.config.SizeLimit {
		if err := e.flush(); err != nil {
			return err
		}
	}
	if s.size(size) > math.MaxUint32 {
		return fmt.Errorf("a document of %d tokens does not fit a file of 4 GiB", len(tokens))
	}
	s.data = binary.LittleEndian.AppendUint32(s.data, uint32(len(origin.ID)))
	s.data = binary.LittleEndian.AppendUint32(s.data, uint32(value))
	s.data = append(s.data, origin.ID...)
	s.data = append(s.data, array...)
	s.data = e.dtype.AppendEncoded(s.data, tokens)
	s.ends = append(s.ends, uint32(len(s.data)))
	return nil
}

// flush writes the samples as a file.
func (e *encoder) flush() error {
	s := &e.samples
	if len(e.list) == maxFiles {
		return fmt.Errorf("more than %d files in a folder; increase the size limit, or divide the data into "+
			"several folders",
			maxFiles)
	}
	f := file{config: e.config, RawData: contents{Basename: fmt.Sprintf("shard.%05d.mds", len(e.list))},
		Samples: int64(len(s.ends))}
	head := s.head()
	f.RawData.Bytes = int64(len(head) + len(s.data))
	parts, name := [][]byte{head, s.data}, f.RawData.Basename
	if e.zstd != nil {
		raw := append(head, s.data...)
		sum := sha256.Sum256(raw)
		f.RawData.Hashes = map[string]string{"sha256": hex.EncodeToString(sum[:])}
		name += ".zstd"
		parts = [][]byte{e.zstd.EncodeAll(raw, nil)}
	}
	out, err := e.files.CreateIDs(name)
	if err != nil {
		return err
	}
	for _, part := range parts {
		if _, err := out.Write(part); err != nil {
			return err
		}
	}
	info, err := e.files.Finish(name)
	if err != nil {
		return err
	}
	hashes := map[string]string{"sha256": info.SHA256}
	if e.zstd != nil {
		f.ZipData = &contents{Basename: name, Bytes: info.Bytes, Hashes: hashes}
	} else {
		f.RawData.Hashes = hashes
	}
	e.list = append(e.list, f)
	s.ends, s.data = s.ends[:0], s.data[:0]
	return nil
}

func (e *encoder) Finish() error {
	if len(e.samples.ends) > 0 {
		if err := e.flush(); err != nil {
			return err
		}
	}
	out, err := e.files.Create(indexName)
	if err != nil {
		return err
	}
	separator := `{"shards": [`
	if len(e.list) == 0 {
		out.Buffer.WriteString(separator)
	}
	for _, f := range e.list {
		out.Buffer.WriteString(separator + f.text())
		separator = ", "
	}
	_, err = out.Buffer.WriteString(`], "version": 2}`) // the buffer keeps the error of an earlier write
	return err
}
