package safetensors

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"

	"mula/internal/filesystem"
	"mula/internal/objects"
)

// Names of the weight files that transformers looks for.
const (
	SingleName = "model.safetensors"
	IndexName  = "model.safetensors.index.json"
)

// ShardName returns the name of weight file k of n, counted from 1.
func ShardName(k, n int) string { return fmt.Sprintf("model-%05d-of-%05d.safetensors", k, n) }

// An Index is the content of model.safetensors.index.json: the file of each tensor.
type Index struct {
	Metadata  map[string]any    `json:"metadata"`
	WeightMap map[string]string `json:"weight_map"`
}

// maxIndex is the maximum size of the index file: it has less text per tensor than a header.
const maxIndex = maxHeader

// A Directory is the weights of a model directory, in one file or several.
type Directory struct {
	files []*File
	where map[string]*File
}

// OpenDirectory opens model.safetensors in dir, or the files named by model.safetensors.index.json.
// Like transformers, it prefers the single file. dir is a folder of fsys, or its URL.
func OpenDirectory(fsys filesystem.FS, dir string) (*Directory, error) {
	d := &Directory{where: map[string]*File{}}
	file, err := open(fsys, objects.Join(dir, SingleName))
	if err == nil {
		d.add(file)
		return d, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	index, err := readIndex(fsys, objects.Join(dir, IndexName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: holds neither %s nor %s: %w", dir, SingleName, IndexName, fs.ErrNotExist)
	}
	if err != nil {
		return nil, err
	}
	if err := d.openAll(fsys, dir, index); err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

func readIndex(fsys filesystem.FS, path string) (Index, error) {
	f, err := filesystem.Open(fsys, path)
	if err != nil {
		return Index{}, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxIndex+1))
	if err != nil {
		return Index{}, fmt.Errorf("%s: %w", path, err)
	}
	if len(text) > maxIndex {
		return Index{}, fmt.Errorf("%s: %w: more than %d bytes", path, errCorrupt, maxIndex)
	}
	index, err := parseIndex(text)
	if err != nil {
		return Index{}, fmt.Errorf("%s: %w", path, err)
	}
	return index, nil
}

// parseIndex reads an index and refuses names that are not plain file names.
func parseIndex(text []byte) (Index, error) {
	var index Index
	if err := json.Unmarshal(text, &index); err != nil {
		return Index{}, corrupt("%v", err)
	}
	if len(index.WeightMap) == 0 {
		return Index{}, corrupt("weight_map is empty")
	}
	for tensor, name := range index.WeightMap {
		if name == "" || name == "." || name == ".." || filepath.Base(name) != name {
			return Index{}, corrupt("tensor %q: %q is not the name of a file in this directory", tensor, name)
		}
	}
	return index, nil
}

func (d *Directory) openAll(fsys filesystem.FS, dir string, index Index) error {
	names := slices.Compact(slices.Sorted(maps.Values(index.WeightMap)))
	for _, name := range names {
		file, err := open(fsys, objects.Join(dir, name))
		if err != nil {
			return err
		}
		d.files = append(d.files, file)
		for _, t := range file.tensors {
			if want, ok := index.WeightMap[t.Name]; !ok || want != name {
				return fmt.Errorf("%s: %w: contains tensor %q, which %s does not place there", file.name, errCorrupt,
					t.Name, IndexName)
			}
			d.where[t.Name] = file
		}
	}
	for _, tensor := range slices.Sorted(maps.Keys(index.WeightMap)) {
		if d.where[tensor] == nil {
			return fmt.Errorf("%s: %w: tensor %q is missing, which %s places there",
				objects.Join(dir, index.WeightMap[tensor]), errCorrupt, tensor, IndexName)
		}
	}
	return nil
}

func (d *Directory) add(f *File) {
	d.files = append(d.files, f)
	for _, t := range f.tensors {
		d.where[t.Name] = f
	}
}

// Tensors lists the tensors of all files, file by file.
func (d *Directory) Tensors() []Tensor {
	var all []Tensor
	for _, f := range d.files {
		all = append(all, f.tensors...)
	}
	return all
}

// Float32 reads elements of a tensor like [File.Float32].
func (d *Directory) Float32(dst []float32, name string, first int64) error {
	f := d.where[name]
	if f == nil {
		return fmt.Errorf("no tensor is named %q", name)
	}
	return f.Float32(dst, name, first)
}

// Bytes reads elements of a tensor like [File.Bytes].
func (d *Directory) Bytes(dst []byte, name string, first int64) error {
	f := d.where[name]
	if f == nil {
		return fmt.Errorf("no tensor is named %q", name)
	}
	return f.Bytes(dst, name, first)
}

// Close closes all files.
func (d *Directory) Close() error {
	var errs []error
	for _, f := range d.files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}
