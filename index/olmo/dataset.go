package olmo

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sync/errgroup"

	"mula/shards"
)

// dtypes are the element types that OLMo-core supports.
var dtypes = []shards.DType{shards.UInt8, shards.UInt16, shards.UInt32, shards.UInt64}

// DTypes lists the names of the element types that OLMo-core supports.
func DTypes() (names []string) {
	for _, t := range dtypes {
		names = append(names, string(t))
	}
	return names
}

// File is a token file: concatenated elements, without a header.
type File struct {
	Path  string
	Bytes int64
}

// statters is how many files are checked for their size at once.
const statters = 16

// Stat returns the files with their sizes.
func Stat(ctx context.Context, paths []string) ([]File, error) {
	files := make([]File, len(paths))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(statters)
	for i, path := range paths {
		g.Go(func() error {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			info, err := os.Stat(path)
			if err != nil {
				return err
			}
			if !info.Mode().IsRegular() {
				return fmt.Errorf("%s is not a regular file", path)
			}
			files[i] = File{path, info.Size()}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	return files, nil
}

// Dataset is OLMo-core's NumpyFSLDataset: instances of SequenceLength consecutive tokens of one
// file. The remainder of each file is dropped.
type Dataset struct {
	// in the order of OLMo-core's paths, after [Permute] if source_permutation_seed is set
	Files          []File
	DType          shards.DType
	SequenceLength int64

	// MaxTargetSequenceLength is a multiple of SequenceLength, or 0. If it is not 0, files are cut
	// as if instances had this length, so that the order of the tokens stays the same while
	// SequenceLength grows up to it.
	MaxTargetSequenceLength int64
}

// Check returns an error if the data set is invalid.
func (d *Dataset) Check() error {
	if !slices.Contains(dtypes, d.DType) {
		return fmt.Errorf("unknown element type %q; OLMo-core supports %s", d.DType, strings.Join(DTypes(), ", "))
	}
	if d.SequenceLength < 1 {
		return fmt.Errorf("invalid sequence length %d", d.SequenceLength)
	}
	if m := d.MaxTargetSequenceLength; m < 0 || m%d.SequenceLength != 0 {
		return fmt.Errorf("the maximum target sequence length %d is not a multiple of the sequence length, %d", m,
			d.SequenceLength)
	}
	for _, f := range d.Files {
		if f.Bytes < 0 || f.Bytes%int64(d.DType.Size()) != 0 {
			return fmt.Errorf("%s has %d bytes, which is not a whole number of %s tokens; was it written with "+
				"another element type?", f.Path, f.Bytes, d.DType)
		}
	}
	return nil
}

// chunk returns how many instances stay together.
func (d *Dataset) chunk() int64 {
	return max(d.MaxTargetSequenceLength, d.SequenceLength) / d.SequenceLength
}

// FileInstances returns the number of instances of file i.
func (d *Dataset) FileInstances(i int) int64 {
	tokens := d.Files[i].Bytes / int64(d.DType.Size())
	return tokens / (d.SequenceLength * d.chunk()) * d.chunk()
}

// Order returns the shuffled order of an epoch. The data set must pass [Dataset.Check].
func (d *Dataset) Order(seed, epoch int64) Order {
	o := Order{Chunk: d.chunk(), Shuffle: true, Seed: seed, Epoch: epoch}
	for i := range d.Files {
		o.Instances += d.FileInstances(i)
	}
	return o
}

// Vocabulary holds the token ids of OLMo-core's tokenizer configuration; a nil id is Python's None
// value.
type Vocabulary struct {
	Size, Pad, EOS int64
	BOS            *int64
}

// Fingerprint returns OLMo-core's dataset_fingerprint, version v2.0: the SHA-256 of the class, its
// settings, and the base name and size of each file. It does not cover the directories and contents
// of the files, or the sequence length.
func (d *Dataset) Fingerprint(v Vocabulary) string {
	none := func(n int64, ok bool) string {
		if !ok {
			return "None"
		}
		return strconv.FormatInt(n, 10)
	}
	h := sha256.New()
	fmt.Fprintf(h, "class=NumpyFSLDataset")
	fmt.Fprintf(h, "vocab_size=%d,pad_token_id=%d,eos_token_id=%d,dtype=<class 'numpy.%s'>,", v.Size, v.Pad, v.EOS,
		d.DType)
	var bos int64
	if v.BOS != nil {
		bos = *v.BOS
	}
	fmt.Fprintf(h, "max_target_sequence_length=%s,bos_token_id=%s,", none(d.MaxTargetSequenceLength,
		d.MaxTargetSequenceLength != 0), none(bos, v.BOS != nil))
	for _, f := range d.Files {
		fmt.Fprintf(h, "path=%s,size=%d,", filepath.Base(f.Path), f.Bytes)
	}
	return hex.EncodeToString(h.Sum(nil))
}
