package blendcorpus

import (
	"crypto/md5"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"mula/index/gpt"
	"mula/index/rebuild"
	"mula/shards"
)

// The suffixes of file names.
const descriptionEnd = ".dsc"

var (
	datasetEnds = [...]string{"_doc_idx.npy", "_sample_idx.npy", "_shuffle_idx.npy"}
	blendEnds   = [...]string{"_index.npy", "_sample_index.npy"}
)

// A dataset is one split of one token file, with the samples it is built for.
type dataset struct {
	request
	file   *shards.Index
	gpt    gpt.Dataset
	layout gpt.Layout

	hash   string
	epochs int64
}

// A request is the contents of the description of a dataset, except the number of epochs.
type request struct {
	prefix         string
	split          rebuild.Split
	samples        int64
	sequenceLength int64
	seed           uint32
	splitText      string
}

// text returns the description.
func (r *request) text(epochs int64) string {
	return fmt.Sprintf("GPT Dataset\n\nData prefix %s\nDataset name %s\nNumber of samples %d\nNumber of epochs "+
		"%d\nSequence length %d\nRandom seed %d\nSplit %s\n",
		r.prefix, r.split, r.samples, epochs, r.sequenceLength, r.seed, r.splitText)
}

// over returns the request as a dataset of package gpt: sequences first to end-1 of a file.
func (r *request) over(file *shards.Index, first, end, epochs int64) gpt.Dataset {
	return gpt.Dataset{
		Lengths: file.Lengths(), Guard: file.Guard, First: first, End: end,
		SequenceLength: r.sequenceLength, ExtraToken: true,
		Samples: r.samples, Epochs: epochs, Seed: r.seed, SampleType: gpt.Int64,
	}
}

// measure counts the tokens. The name depends on the count through the number of epochs.
func (d *dataset) measure() (err error) {
	d.file.ReadAhead()
	if d.layout, err = d.gpt.Layout(); err != nil {
		return fmt.Errorf("%s, %s split: %w", d.file.Path(), d.split, err)
	}
	d.epochs = d.layout.Epochs
	d.hash = hash(d.text(d.epochs))
	return nil
}

// files returns the names of the data files.
func (d *dataset) files() []string { return named(d.hash, datasetEnds[:]) }

// sizes returns the sizes of the data files in bytes.
func (d *dataset) sizes() []int64 { return d.layout.Sizes() }

// settings returns the settings that affect the contents but are not in the description: the token
// file.
func (d *dataset) settings() (json.RawMessage, error) {
	return json.Marshal(gpt.SourceOf(d.file))
}

// besides returns the directory next to the token file, where the programs look before they look in
// the cache directory.
func (d *dataset) besides(root string) string {
	return filepath.Join(filepath.Dir(gpt.Locate(root, d.prefix)), "index-cache")
}

// shadowed reports whether the programs would use the files next to the token file. They do if the
// description and all data files are there.
func (d *dataset) shadowed(root string) bool {
	dir := d.besides(root)
	for _, name := range append(d.files(), d.hash+descriptionEnd) {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || !info.Mode().IsRegular() {
			return false
		}
	}
	return true
}

// hash returns the MD5 of a description, which is the stem of its file names.
func hash(text string) string {
	sum := md5.Sum([]byte(text))
	return hex.EncodeToString(sum[:])
}

func named(hash string, ends []string) []string {
	names := make([]string, len(ends))
	for i, end := range ends {
		names[i] = hash + end
	}
	return names
}
