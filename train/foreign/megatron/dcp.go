package megatron

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"mula/internal/pickle"
	"mula/moe/torchfile"
)

// Modules and classes of torch.distributed.checkpoint in .metadata. All are plain data. The
// definitions are torch/distributed/checkpoint/metadata.py, planner.py and filesystem.py of
// PyTorch 2.15.
const (
	metadataModule = "torch.distributed.checkpoint.metadata."

	metadataClass     pickle.Global = metadataModule + "Metadata"
	indexClass        pickle.Global = metadataModule + "MetadataIndex"
	tensorClass       pickle.Global = metadataModule + "TensorStorageMetadata"
	bytesClass        pickle.Global = metadataModule + "BytesStorageMetadata"
	chunkClass        pickle.Global = metadataModule + "ChunkStorageMetadata"
	propertiesClass   pickle.Global = metadataModule + "TensorProperties"
	memoryFormatClass pickle.Global = metadataModule + "_MEM_FORMAT_ENCODING"
	layoutFunction    pickle.Global = "torch.serialization._get_layout"
	storageInfoClass  pickle.Global = "torch.distributed.checkpoint.filesystem._StorageInfo"
	sizeClass         pickle.Global = "torch.Size"
)

var metadataClasses = map[pickle.Global]bool{metadataClass: true, indexClass: true, tensorClass: true,
	bytesClass: true, chunkClass: true, storageInfoClass: true, sizeClass: true,
	propertiesClass: true, memoryFormatClass: true, layoutFunction: true,
	metadataModule + "StorageMeta":                                    true,
	"torch.distributed.checkpoint.filesystem._StoragePrefix":          true,
	"torch.distributed.checkpoint.planner.SavePlan":                   true,
	"torch.distributed.checkpoint.planner.WriteItem":                  true,
	"torch.distributed.checkpoint.planner.WriteItemType":              true,
	"torch.distributed.checkpoint.planner.TensorWriteData":            true,
	"torch.distributed.checkpoint.planner.BytesIOWriteData":           true,
	"megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan": true, "pathlib.PosixPath": true,
}

// dtypes are torch's types of elements, which pickles name.
var dtypes = map[pickle.Global]bool{"torch.float32": true, "torch.bfloat16": true, "torch.float16": true,
	"torch.float64": true, "torch.int64": true, "torch.int32": true, "torch.int16": true, "torch.int8": true,
	"torch.uint8": true, "torch.bool": true, "torch.float8_e4m3fn": true, "torch.float8_e5m2": true}

// A chunk is a block of a tensor: sizes elements from offsets on, along each axis. It is a file of
// torch.save in bytes of a file.
type chunk struct {
	offsets, sizes []int
	file           string // its name in the checkpoint
	first, bytes   int64
}

// A tensor is a tensor that is divided into chunks.
type tensor struct {
	name   string
	shape  []int
	chunks []*chunk

	// The chunks that have elements of a matrix or vector, by its place along the other axes,
	// which are lead axes; nil: not computed.
	lead   int
	places map[int][]*chunk
}

// Limits of metadata.
const (
	maxAxes        = 8
	maxMetadata    = 1 << 30 // bytes of .metadata
	maxPlaceChunks = 1 << 22 // entries of tensor.places
)

// readMetadata returns the tensors that .metadata of the checkpoint dir describes, by name. It
// checks that their files are complete.
func readMetadata(dir string) (map[string]*tensor, error) {
	path := filepath.Join(dir, metadataFile)
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if info.Size() > maxMetadata {
		return nil, fmt.Errorf("%s has %d bytes; the maximum is %d", path, info.Size(), maxMetadata)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	tensors, err := parseMetadata(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	ends := map[string]int64{}
	for _, t := range tensors {
		for _, c := range t.chunks {
			ends[c.file] = max(ends[c.file], c.first+c.bytes)
		}
	}
	for name, end := range ends {
		file := filepath.Join(dir, name)
		info, err := os.Stat(file)
		if err != nil {
			return nil, fmt.Errorf("%w; copy all files of the checkpoint", err)
		}
		if info.Size() < end {
			return nil, fmt.Errorf("%s is cut short: it has %d bytes, but %s describes tensors up to byte %d; copy "+
				"the file again", file, info.Size(), path, end)
		}
	}
	return tensors, nil
}

// parseMetadata reads the content of .metadata, a pickle of Metadata.
func parseMetadata(data []byte) (map[string]*tensor, error) {
	root, err := pickle.Read(data, pickle.Options{
		Allowed: func(g pickle.Global) bool { return metadataClasses[g] || dtypes[g] },
		Call: func(g pickle.Global, args pickle.Tuple) (pickle.Value, bool, error) {
			if g == sizeClass && len(args) == 1 {
				return args[0], true, nil
			}
			return nil, false, nil
		},
	})
	if err != nil {
		return nil, err
	}
	top, ok := root.(*pickle.Object)
	if !ok || top.Class != metadataClass {
		return nil, errors.New("not the metadata of torch.distributed.checkpoint")
	}
	entries, err := dictAttribute(top, "state_dict_metadata")
	if err != nil {
		return nil, err
	}
	storage, err := dictAttribute(top, "storage_data")
	if err != nil {
		return nil, err
	}
	tensors := map[string]*tensor{}
	chunks := map[string]*chunk{} // by name of the tensor and offsets
	for _, pair := range entries.Pairs {
		name, isText := pair.Key.(string)
		object, isObject := pair.Value.(*pickle.Object)
		if !isText || !isObject {
			return nil, errors.New("state_dict_metadata is not a dict of descriptions of tensors")
		}
		if object.Class == bytesClass {
			continue
		}
		t := &tensor{name: name}
		if err := t.read(object); err != nil {
			return nil, err
		}
		if tensors[name] != nil {
			return nil, fmt.Errorf("%s is described twice", name)
		}
		tensors[name] = t
		for _, c := range t.chunks {
			key := chunkKey(name, c.offsets)
			if chunks[key] != nil {
				return nil, fmt.Errorf("%s has two chunks at %v", name, c.offsets)
			}
			chunks[key] = c
		}
	}
	for _, pair := range storage.Pairs {
		if err := placeChunk(chunks, pair); err != nil {
			return nil, err
		}
	}
	for _, t := range tensors {
		for _, c := range t.chunks {
			if c.file == "" {
				return nil, fmt.Errorf("%s: storage_data has no file for the chunk at %v", t.name, c.offsets)
			}
		}
	}
	return tensors, nil
}

func chunkKey(name string, offsets []int) string { return fmt.Sprint(offsets, name) }

func dictAttribute(o *pickle.Object, name string) (*pickle.Dict, error) {
	v, _ := o.Attribute(name)
	d, ok := v.(*pickle.Dict)
	if !ok {
		return nil, fmt.Errorf("%s is missing or not a dict", name)
	}
	return d, nil
}

// attributeInts returns an attribute that is a shape or an offset.
func attributeInts(o *pickle.Object, name string) ([]int, bool) {
	v, _ := o.Attribute(name)
	ints, ok := torchfile.Ints(v)
	outside := func(n int) bool { return n < 0 || n > 1<<31 }
	return ints, ok && len(ints) <= maxAxes && !slices.ContainsFunc(ints, outside)
}

// read reads the description of a tensor, a TensorStorageMetadata.
func (t *tensor) read(o *pickle.Object) error {
	var ok bool
	if t.shape, ok = attributeInts(o, "size"); !ok || o.Class != tensorClass {
		return fmt.Errorf("%s: not the description of a tensor", t.name)
	}
	total := int64(1)
	for _, d := range t.shape {
		if total *= int64(d); total > 1<<48 {
			return fmt.Errorf("%s has shape %v", t.name, t.shape)
		}
	}
	v, _ := o.Attribute("chunks")
	list, ok := v.(*pickle.List)
	if !ok {
		return fmt.Errorf("%s: chunks is missing or not a list", t.name)
	}
	covered := int64(0)
	for _, item := range list.Items {
		object, ok := item.(*pickle.Object)
		if !ok || object.Class != chunkClass {
			return fmt.Errorf("%s: not the description of a chunk", t.name)
		}
		c := &chunk{}
		var sized bool
		c.offsets, ok = attributeInts(object, "offsets")
		c.sizes, sized = attributeInts(object, "sizes")
		if !ok || !sized || len(c.offsets) != len(t.shape) || len(c.sizes) != len(t.shape) {
			return fmt.Errorf("%s: not the description of a chunk", t.name)
		}
		n := int64(1)
		for i, size := range c.sizes {
			if size == 0 || c.offsets[i] > t.shape[i]-size {
				return fmt.Errorf("%s of shape %v has a chunk of %v at %v", t.name, t.shape, c.sizes, c.offsets)
			}
			n *= int64(size)
		}
		covered += n
		t.chunks = append(t.chunks, c)
	}
	if covered != total {
		return fmt.Errorf("%s of shape %v has chunks of %d elements in total", t.name, t.shape, covered)
	}
	return nil
}

// placeChunk reads an entry of storage_data: a MetadataIndex and a _StorageInfo. It ignores entries
// of objects that are not tensors.
func placeChunk(chunks map[string]*chunk, pair pickle.Pair) error {
	index, isIndex := pair.Key.(*pickle.Object)
	info, isInfo := pair.Value.(*pickle.Object)
	if !isIndex || !isInfo || index.Class != indexClass || info.Class != storageInfoClass {
		return errors.New("storage_data is not a dict of positions in files")
	}
	v, _ := index.Attribute("fqn")
	name, _ := v.(string)
	offsets, ok := attributeInts(index, "offset")
	if !ok {
		return nil
	}
	c := chunks[chunkKey(name, offsets)]
	if c == nil {
		return nil
	}
	v, _ = info.Attribute("relative_path")
	file, _ := v.(string)
	if file == "" || filepath.Base(file) != file || file == ".." || file == "." || strings.ContainsAny(file, "/\\:") {
		return fmt.Errorf("%s is in the file %q; only files in the folder of .metadata are supported", name, file)
	}
	v, _ = info.Attribute("offset")
	first, isFirst := v.(int64)
	v, _ = info.Attribute("length")
	bytes, isBytes := v.(int64)
	if !isFirst || !isBytes || first < 0 || bytes < 0 || first > 1<<50 || bytes > 1<<50 {
		return fmt.Errorf("%s: the position in %s is invalid", name, file)
	}
	if v, _ := info.Attribute("transform_descriptors"); v != nil {
		return fmt.Errorf("%s is compressed or transformed in %s; save the checkpoint without transformations", name,
			file)
	}
	c.file, c.first, c.bytes = file, first, bytes
	return nil
}

// index computes places for a number of lead axes.
func (t *tensor) index(lead int) error {
	if t.places != nil && t.lead == lead {
		return nil
	}
	t.lead, t.places = lead, map[int][]*chunk{}
	entries := 0
	for _, c := range t.chunks {
		at := slices.Clone(c.offsets[:lead])
		for more := true; more; {
			if entries++; entries > maxPlaceChunks {
				return fmt.Errorf("%s has too many chunks", t.name)
			}
			place := t.place(at)
			t.places[place] = append(t.places[place], c)
			more = false
			for axis := lead - 1; axis >= 0 && !more; axis-- {
				at[axis]++
				if more = at[axis] < c.offsets[axis]+c.sizes[axis]; !more {
					at[axis] = c.offsets[axis]
				}
			}
		}
	}
	return nil
}

// place is the index in places of coordinates along the lead axes.
func (t *tensor) place(at []int) int {
	place := 0
	for axis, i := range at {
		place = place*t.shape[axis] + i
	}
	return place
}

// A files reads chunks. It has few open descriptions of chunks at a time. It is not for concurrent
// use.
type files struct {
	dir  string
	open map[*chunk]*torchfile.Tensor
}

// chunk returns the tensor of a chunk.
func (f *files) chunk(t *tensor, c *chunk) (*torchfile.Tensor, error) {
	if opened := f.open[c]; opened != nil {
		return opened, nil
	}
	file, err := torchfile.OpenSection(filepath.Join(f.dir, c.file), c.first, c.bytes, nil)
	if err != nil {
		return nil, err
	}
	opened, ok := file.Root.(*torchfile.Tensor)
	if !ok || !slices.Equal(opened.Shape, c.sizes) {
		return nil, fmt.Errorf("%s, from byte %d: not a tensor of shape %v, a chunk of %s; the file belongs to "+
			"another .metadata", filepath.Join(f.dir, c.file), c.first, c.sizes, t.name)
	}
	const most = 64
	if len(f.open) >= most {
		clear(f.open)
	}
	f.open[c] = opened
	return opened, nil
}

// rows reads elements of the matrix of t at the coordinates lead, from an element of a row on. A
// vector is a matrix of one column.
func (f *files) rows(dst []float32, t *tensor, lead []int, row, column int) error {
	if err := t.index(len(lead)); err != nil {
		return err
	}
	place := t.places[t.place(lead)]
	columns := 1
	if axes := len(t.shape) - len(lead); axes == 2 {
		columns = t.shape[len(t.shape)-1]
	}
	for len(dst) > 0 {
		var found *chunk
		var firstRow, lastRow, firstColumn, lastColumn int
		for _, c := range place {
			firstRow, lastRow = c.offsets[len(lead)], c.offsets[len(lead)]+c.sizes[len(lead)]
			firstColumn, lastColumn = 0, 1
			if len(t.shape)-len(lead) == 2 {
				firstColumn = c.offsets[len(lead)+1]
				lastColumn = firstColumn + c.sizes[len(lead)+1]
			}
			if row >= firstRow && row < lastRow && column >= firstColumn && column < lastColumn {
				found = c
				break
			}
		}
		if found == nil {
			return fmt.Errorf("%s: %s has no chunk with row %d, column %d of %v", filepath.Join(f.dir, metadataFile),
				t.name, row, column, lead)
		}
		opened, err := f.chunk(t, found)
		if err != nil {
			return err
		}
		at := int64(0) // of the matrix in the chunk
		for axis, i := range lead {
			at = at*int64(found.sizes[axis]) + int64(i-found.offsets[axis])
		}
		width := lastColumn - firstColumn
		at = (at*int64(lastRow-firstRow)+int64(row-firstRow))*int64(width) + int64(column-firstColumn)
		n := lastColumn - column
		if width == columns {
			n += (lastRow - row - 1) * columns
		}
		n = min(n, len(dst))
		if err := opened.Float32(dst[:n], at); err != nil {
			return err
		}
		dst = dst[n:]
		column += n
		row, column = row+column/columns, column%columns
	}
	return nil
}
