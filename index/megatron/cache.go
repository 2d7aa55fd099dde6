package megatron

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"mula/index/cache"
	"mula/index/gpt"
	"mula/index/numpy"
	"mula/index/rebuild"
	"mula/internal/filesystem"
	"mula/internal/mapping"
	"mula/internal/objects"
	"mula/shards"
)

// ErrCorrupt is wrapped by errors about a cache that contradicts itself or its token files.
var ErrCorrupt = errors.New("corrupt index cache")

// A Cache is an open dataset or blend of a cache directory: the order in which Megatron would train
// on it. Its files are mapped, so it needs little memory. Every value from the files is checked
// before it is used. A Cache is safe for concurrent use until [Cache.Close].
type Cache struct {
	split          rebuild.Split
	sequenceLength int64
	extra          bool
	length         int64

	datasets  []*readDataset
	which     column // of a blend: int16, the dataset of each sample
	whichOne  column // of a blend: int64, the number of each sample in its dataset
	unmap     []func() error
	blendFile string // for messages
}

// A readDataset is one GPT dataset of an open cache.
type readDataset struct {
	source    Source
	file      *shards.Index
	documents column // int32
	rows      column // pairs
	shuffle   column
	base      string // path without the suffix of the name, for messages
}

// A Source is one GPT dataset of an open cache: the token file that it reads.
type Source struct {
	Prefix  string // the prefix in the description
	Path    string // the prefix on this machine
	Samples int64  // number of samples, which may be more than are drawn
}

// A Segment is a range of tokens of one sequence of a token file. Megatron calls a sequence a
// document.
type Segment struct {
	Document       int64 // the sequence's number in the file
	Offset, Length int64 // in tokens
}

// A column is the data of a mapped .npy file.
type column struct {
	file  *mapping.File
	data  []byte
	width int // bytes of a number: 2 (int16), 4 or 8
	uint  bool
	n     int64 // numbers
}

// at returns number i, which must exist.
func (c *column) at(i int64) int64 {
	p := c.data[i*int64(c.width):]
	switch {
	case c.width == 2:
		return int64(int16(binary.LittleEndian.Uint16(p)))
	case c.width == 8:
		return int64(binary.LittleEndian.Uint64(p))
	case c.uint:
		return int64(binary.LittleEndian.Uint32(p))
	}
	return int64(int32(binary.LittleEndian.Uint32(p)))
}

// intact calls [mapping.File.Intact] for the numbers up to i.
func (c *column) intact(i int64) error {
	return c.file.Intact(c.data[i*int64(c.width):][:c.width])
}

// OpenCache opens a dataset or a blend of the cache directory dir. name is the hash in its files'
// names, or the name of one of its files. root is the base directory of relative prefixes. The .npy
// files must have the types that Megatron uses, and consistent lengths. OpenCache does not read
// tokens, and .bin files are not needed.
func OpenCache(dir, name, root string) (_ *Cache, err error) {
	d, bare, err := findDescription(filesystem.OS{}, dir, name)
	if err != nil {
		return nil, err
	}
	c := &Cache{split: d.split, sequenceLength: d.sequenceLength}
	defer func() {
		if err != nil {
			c.Close()
		}
	}()
	members := []*description{d}
	if d.class == blendClass {
		members, c.sequenceLength = d.members, d.members[0].sequenceLength
		if err := c.openBlend(dir, d, bare); err != nil {
			return nil, err
		}
	}

	if err := c.openDatasets(dir, members, bare, root); err != nil {
		return nil, err
	}
	if d.class == gptClass {
		c.length = c.datasets[0].source.Samples
	}
	err = mapping.Guard(func() (err error) {
		c.extra, err = c.findExtra()
		return err
	})
	if err != nil {
		return nil, err
	}
	return c, nil
}

// maxMapped is how many different datasets can be open at once. Each needs four mappings, and Linux
// allows 65,530 per process, which Go's memory allocator needs too.
const maxMapped = 12000

// openDatasets opens the members of a blend, each once even if it is listed several times.
func (c *Cache) openDatasets(dir string, members []*description, bare bool, root string) error {
	number := map[string]int{}
	var different []*description
	for _, m := range members {
		if _, known := number[m.text]; !known {
			number[m.text] = len(different)
			different = append(different, m)
		}
	}
	if len(different) > maxMapped {
		return fmt.Errorf("%s: the blend has %d datasets, and at most %d can be mapped into memory at once; merge "+
			"some of them", dir,
			len(different), maxMapped)
	}
	opened := make([]*readDataset, len(different))
	unmap := make([][]func() error, len(different))
	var g errgroup.Group
	g.SetLimit(runtime.GOMAXPROCS(0))
	for i, m := range different {
		g.Go(func() (err error) {
			opened[i], unmap[i], err = openDataset(dir, m, bare, root)
			return err
		})
	}
	err := g.Wait()
	c.unmap = append(c.unmap, slices.Concat(unmap...)...)
	for _, m := range members {
		c.datasets = append(c.datasets, opened[number[m.text]])
	}
	return err
}

// findDescription reads the description that a name in a cache directory refers to. bare means that
// its files are named without a split.
func findDescription(fsys filesystem.FS, dir, name string) (d *description, bare bool, err error) {
	hash, _, _ := strings.Cut(filepath.Base(name), "-")
	if len(hash) != 32 || strings.Trim(hash, "0123456789abcdef") != "" {
		return nil, false, fmt.Errorf("%q is not a name in an index cache; give the 32 digits at the start of the "+
			"name of a description.txt", name)
	}
	base := filepath.Base(name)
	if !strings.HasSuffix(base, descriptionEnd) {
		if base, err = descriptionOf(fsys, dir, base, hash); err != nil {
			return nil, false, err
		}
	}
	path := objects.Join(dir, base)
	text, err := readDescription(fsys, path)
	if err != nil {
		return nil, false, err
	}
	if d, err = parseDescription(text); err != nil {
		return nil, false, fmt.Errorf("%s: %w", path, err)
	}
	if sum := hashed(string(text)); sum != hash {
		return nil, false, fmt.Errorf("%s: its text has the hash %s, which differs from the hash in its name; it was "+
			"changed or truncated: %w", path, sum, ErrCorrupt)
	}
	for _, bare := range []bool{true, false} {
		if base == (Profile{bareNames: bare}).fileName(hash, d.class, d.split)+descriptionEnd {
			return d, bare, nil
		}
	}
	return nil, false, fmt.Errorf("%s describes a %s of the split %s, which does not match its name: %w", path,
		d.class, d.split, ErrCorrupt)
}

// descriptionOf returns the name of the description for a file name or a hash.
func descriptionOf(fsys filesystem.FS, dir, name, hash string) (string, error) {
	entries, err := fsys.ReadDir(dir)
	if err != nil {
		return "", fmt.Errorf("opening index cache: %w", err)
	}
	found, longest := "", -1
	// a directory used by both a release before 0.7 and a later release has two
	for _, e := range entries {
		stem, ok := strings.CutSuffix(e.Name(), descriptionEnd)
		if !ok || !strings.HasPrefix(stem, hash+"-") {
			continue
		}
		length := 0
		if strings.HasPrefix(name, stem) {
			length = len(stem)
		}
		if length > longest {
			found, longest = e.Name(), length
		}
	}
	if found == "" {
		return "", fmt.Errorf("%s has no description of %s: %w", dir, hash, fs.ErrNotExist)
	}
	return found, nil
}

// maxDescription bounds the size of a description: a blend of 32,766 datasets has about 50 MB.
const maxDescription = 1 << 28

// readDescription reads a description file.
func readDescription(fsys filesystem.FS, path string) ([]byte, error) {
	info, err := fsys.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("reading description: %w", err)
	}
	if !info.Mode().IsRegular() || info.Size() > maxDescription {
		return nil, fmt.Errorf("%s is not a description: it is not a regular file, or has more than %d bytes", path,
			maxDescription)
	}
	text, err := filesystem.ReadFile(fsys, path)
	if err != nil {
		return nil, fmt.Errorf("reading description: %w", err)
	}
	return text, nil
}

// openColumn maps a .npy file of numbers, cols to a row (0: one-dimensional).
func openColumn(path string, cols int64, types ...string) (column, func() error, error) {
	file, err := mapping.Open(path)
	if err != nil {
		return column{}, nil, fmt.Errorf("opening index cache: %w", err)
	}
	var c column
	err = mapping.Guard(func() (err error) {
		c, err = readColumn(file.Data, cols, types)
		return err
	})
	if err != nil {
		file.Close()
		return column{}, nil, fmt.Errorf("%s: %w", path, err)
	}
	c.file = &file
	return c, file.Close, nil
}

// readColumn finds the numbers in a .npy file.
func readColumn(data []byte, cols int64, types []string) (column, error) {
	header, err := numpy.ReadHeader(bytes.NewReader(data), int64(len(data)))
	if err != nil {
		return column{}, err
	}
	if !slices.Contains(types, header.Descr) {
		return column{}, fmt.Errorf("its type is %q, want one of %q: %w", header.Descr, types, ErrCorrupt)
	}
	c := column{width: int(header.Item()), uint: header.Descr == "<u4"}
	switch {
	case cols == 0 && len(header.Shape) == 1:
		c.n = header.Shape[0]
	case cols != 0 && len(header.Shape) == 2 && header.Shape[1] == cols && header.Shape[0] > 0:
		c.n = header.Shape[0] * cols
	default:
		return column{}, fmt.Errorf("its shape is %v: %w", header.Shape, ErrCorrupt)
	}
	// complete, or ReadHeader would have failed
	c.data = data[header.Offset : header.Offset+c.n*int64(c.width)]
	return c, nil
}

// openBlend maps the files of a blend.
func (c *Cache) openBlend(dir string, d *description, bare bool) error {
	hash := hashed(d.text)
	c.blendFile = filepath.Join(dir, Profile{bareNames: bare}.blendName(hash, d.split))
	for i, col := range []*column{&c.which, &c.whichOne} {
		opened, unmap, err := openColumn(c.blendFile+blendEnds[i], 0, [...]string{"<i2", "<i8"}[i])
		if err != nil {
			return err
		}
		*col, c.unmap = opened, append(c.unmap, unmap)
	}
	want := d.size.N
	if !d.size.Given {
		for _, n := range d.counts {
			want += n
		}
	}
	if c.which.n != want || c.whichOne.n != want {
		return fmt.Errorf("%s*: the description has %d samples, the files have %d and %d: %w", c.blendFile, want,
			c.which.n, c.whichOne.n, ErrCorrupt)
	}
	c.length = want
	return nil
}

// openDataset maps the files of a GPT dataset, and its token file's index.
func openDataset(dir string, m *description, bare bool, root string) (_ *readDataset, unmap []func() error, err error) {
	hash := hashed(m.text)
	r := &readDataset{base: filepath.Join(dir, Profile{bareNames: bare}.gptName(hash, m.split))}
	r.source = Source{Prefix: m.prefix, Path: gpt.Locate(root, m.prefix)}
	if r.file, err = openIndex(root, m.prefix); err != nil {
		return nil, nil, err
	}
	unmap = append(unmap, r.file.Close)
	for i, open := range []struct {
		to    *column
		cols  int64
		types []string
	}{
		{&r.documents, 0, []string{"<i4"}},
		{&r.rows, 2, []string{"<i4", "<i8"}},
		{&r.shuffle, 0, []string{"<u4", "<i8"}},
	} {
		opened, u, err := openColumn(r.base+gptEnds[i], open.cols, open.types...)
		if err != nil {
			return nil, unmap, err
		}
		*open.to, unmap = opened, append(unmap, u)
	}
	if r.rows.n/2 != r.shuffle.n+1 {
		return nil, unmap, fmt.Errorf("%s*: the sample index has %d rows, but needs one row more than the shuffle "+
			"index, which has %d: %w",
			r.base, r.rows.n/2, r.shuffle.n, ErrCorrupt)
	}
	first, end, err := m.documents(r.file.Sequences())
	if err != nil {
		return nil, unmap, fmt.Errorf("%s: %w", r.base, err)
	}
	if first < 0 || end > r.file.Sequences() || first >= end || r.documents.n%(end-first) != 0 {
		return nil, unmap, fmt.Errorf("%s*: the document index has %d entries, which is not a multiple of the %d "+
			"sequences that %s has for the split; the token file may have been replaced: %w",
			r.base, r.documents.n, max(0, end-first), r.file.Path(), ErrCorrupt)
	}
	r.source.Samples = r.shuffle.n
	return r, unmap, nil
}

// findExtra determines whether samples have an extra token, which descriptions do not contain. If
// mula built the cache, its record has the setting. In a cache that Megatron built, a sample whose
// first token starts a document shows it: with the extra token, the sample has offset 0; without
// it, the sample starts at the end of the previous document. If there is no such sample, both
// settings result in the same files, and Megatron's default is assumed.
func (c *Cache) findExtra() (bool, error) {
	for _, d := range c.datasets {
		if s, ok := recordedSettings(d.base + descriptionEnd); ok {
			return s.ExtraToken, nil
		}
	}
	left := int64(1 << 20) // rows to check
	for _, d := range c.datasets {
		for k := int64(1); k < d.rows.n/2 && left > 0; k++ {
			left--
			at, offset := d.rows.at(2*k), d.rows.at(2*k+1)
			length, err := d.lengthAt(at)
			if err != nil {
				return false, err
			}
			switch {
			case offset == 0:
				return true, nil
			case offset == length:
				return false, nil
			}
		}
	}
	return true, nil
}

// recordedSettings returns the settings that mula recorded when it built the dataset with this
// description.
func recordedSettings(description string) (s datasetSettings, ok bool) {
	dir, name := filepath.Split(description)
	text, err := os.ReadFile(filepath.Join(dir, cache.StateDir, name+".json"))
	if err != nil {
		return s, false
	}
	var record struct{ Settings *datasetSettings }
	if json.Unmarshal(text, &record) != nil || record.Settings == nil {
		return s, false
	}
	return *record.Settings, true
}

// lengthAt returns the length of the document at a position of the document index.
func (d *readDataset) lengthAt(at int64) (int64, error) {
	if at < 0 || at >= d.documents.n {
		return 0, fmt.Errorf("%s: position %d in a document index of %d entries: %w", d.base+gptEnds[1], at,
			d.documents.n, ErrCorrupt)
	}
	document := d.documents.at(at)
	if document < 0 || document >= d.file.Sequences() {
		return 0, fmt.Errorf("%s: entry %d is document %d, but %s has %d: %w", d.base+gptEnds[0], at, document,
			d.file.Path(), d.file.Sequences(), ErrCorrupt)
	}
	length, err := d.file.SequenceLength(document)
	if errors.Is(err, shards.ErrCorrupt) {
		err = fmt.Errorf("%w: %w", err, ErrCorrupt)
	}
	return length, err
}

// Split returns the split of the cache.
func (c *Cache) Split() rebuild.Split { return c.split }

// SequenceLength returns the number of tokens of a sample, without the extra token.
func (c *Cache) SequenceLength() int64 { return c.sequenceLength }

// ExtraToken reports whether samples have one token more than the sequence length, which is
// Megatron's default. The setting is known if mula built the cache, or if a sample starts at the
// start of a document. Otherwise the default is assumed.
func (c *Cache) ExtraToken() bool { return c.extra }

// Len returns the number of samples.
func (c *Cache) Len() int64 { return c.length }

// Datasets returns the GPT datasets of the cache, in the order of the blend.
func (c *Cache) Datasets() []Source {
	sources := make([]Source, len(c.datasets))
	for i, d := range c.datasets {
		sources[i] = d.source
	}
	return sources
}

// Files returns the paths of the files that the order depends on: the description, and the index
// files of the blend and of its datasets. The datasets' descriptions are not included, because the
// blend's description contains them.
func (c *Cache) Files() []string {
	var paths []string
	for _, d := range c.datasets {
		for _, end := range gptEnds {
			paths = append(paths, d.base+end)
		}
	}
	if c.blendFile == "" {
		paths = append(paths, c.datasets[0].base+descriptionEnd)
	} else {
		paths = append(paths, c.blendFile+descriptionEnd)
		for _, end := range blendEnds {
			paths = append(paths, c.blendFile+end)
		}
	}
	for i, path := range paths {
		paths[i] = filepath.Base(path)
	}
	slices.Sort(paths)
	return slices.Compact(paths) // a blend may list a dataset twice
}

// Sample returns the sample at position k of the order, 0 <= k < Len: its dataset, and its number
// in the dataset. Callers must use [mapping.Guard].
func (c *Cache) Sample(k int64) (dataset int, sample int64, err error) {
	if k < 0 || k >= c.length {
		return 0, 0, fmt.Errorf("position %d is outside an order of %d samples", k, c.length)
	}
	if c.blendFile == "" {
		return 0, k, nil
	}
	which, sample := c.which.at(k), c.whichOne.at(k)
	if err = c.which.intact(k); err == nil {
		err = c.whichOne.intact(k)
	}
	if err != nil {
		return 0, 0, err
	}
	if which < 0 || which >= int64(len(c.datasets)) {
		return 0, 0, fmt.Errorf("%s: entry %d is dataset %d of %d: %w", c.blendFile+blendEnds[0], k, which,
			len(c.datasets), ErrCorrupt)
	}
	if n := c.datasets[which].source.Samples; sample < 0 || sample >= n {
		return 0, 0, fmt.Errorf("%s: entry %d is sample %d of %d of dataset %d: %w", c.blendFile+blendEnds[1], k,
			sample, n, which, ErrCorrupt)
	}
	return int(which), sample, nil
}

// Segments appends the token ranges of a dataset's sample to dst, in order and without empty
// ranges. Together they have SequenceLength tokens, plus the extra token if there is one. Only the
// partial sample at the end of a validation set has fewer, and Megatron pads it. Callers must use
// [mapping.Guard].
func (c *Cache) Segments(dst []Segment, dataset int, sample int64) ([]Segment, error) {
	if dataset < 0 || dataset >= len(c.datasets) {
		return dst, fmt.Errorf("dataset %d is outside a cache of %d datasets", dataset, len(c.datasets))
	}
	d := c.datasets[dataset]
	if sample < 0 || sample >= d.shuffle.n {
		return dst, fmt.Errorf("%s: sample %d is outside a dataset of %d samples", d.source.Prefix, sample, d.shuffle.n)
	}
	j := d.shuffle.at(sample)
	if err := d.shuffle.intact(sample); err != nil {
		return dst, err
	}
	if j < 0 || j >= d.shuffle.n {
		return dst, fmt.Errorf("%s: entry %d is sample %d of %d: %w", d.base+gptEnds[2], sample, j, d.shuffle.n,
			ErrCorrupt)
	}
	first, offset := d.rows.at(2*j), d.rows.at(2*j+1)
	last, stop := d.rows.at(2*j+2), d.rows.at(2*j+3)
	if err := d.rows.intact(2*j + 3); err != nil {
		return dst, err
	}
	most := c.sequenceLength
	if c.extra {
		stop++
		most++
	}
	begin, total := len(dst), int64(0)
	wrong := func(what string) ([]Segment, error) {
		return dst[:begin], fmt.Errorf("%s: rows %d and %d, (%d, %d) to (%d, %d), %s: %w", d.base+gptEnds[1], j, j+1,
			first, offset, last, d.rows.at(2*j+3), what, ErrCorrupt)
	}
	if first > last || offset < 0 {
		return wrong("run backwards")
	}
	for at := first; at <= last; at++ {
		length, err := d.lengthAt(at)
		if err != nil {
			return dst[:begin], err
		}
		end := length
		if at == last {
			end = stop
		}
		if offset > end || end > length {
			return wrong(fmt.Sprintf("are outside a document of %d tokens", length))
		}
		if total += end - offset; total > most {
			return wrong(fmt.Sprintf("are more than %d tokens apart", most))
		}
		if end > offset {
			dst = append(dst, Segment{Document: d.documents.at(at), Offset: offset, Length: end - offset})
		}
		offset = 0
	}
	if err := d.documents.intact(last); err != nil {
		return dst[:begin], err
	}
	return dst, nil
}

// Close unmaps the files.
func (c *Cache) Close() error {
	var errs []error
	for _, unmap := range c.unmap {
		errs = append(errs, unmap())
	}
	c.unmap = nil
	return errors.Join(errs...)
}
