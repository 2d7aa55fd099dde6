package blendcorpus

import (
	"fmt"
	"path/filepath"
)

// The classes of an [Entry], named as in the originals.
const (
	ClassDataset = "GPTDataset"
	ClassCorpus  = "CorpusDataset"
	ClassBlend   = "BlendableDataset"
)

// An Entry is one dataset, corpus or blend of a configuration: what the program will look for, and
// where.
type Entry struct {
	Class    string
	Name     string   // for people
	Splits   []Split  // several, if splits of the same size share it
	Prefixes []string // of its token files; of a blend of corpora, these
	Samples  int64    // asked for: N of a dataset, the size of a blend
	Hash     string

	// Dir is the directory that the files belong in. It is empty for a blend where no cache
	// directory is configured: the program then computes the blend at every start and keeps
	// nothing.
	Dir         string
	Description string   // the name of the file with Text
	Files       []string // the names of the others
	Text        string   // the description

	Length int64   // samples that there are
	Sizes  []int64 // of Files in bytes, in that order

	// Shadow is a directory other than Dir that has files of this name, in which the program looks
	// before Dir: it will take those, right or not. Empty if there is none.
	Shadow string
}

// Describe lists all blends, corpora and datasets of the configuration, blends first, each once.
func (x *Index) Describe() []Entry {
	c := &x.config
	entries := make([]Entry, 0, len(x.blends)+len(x.datasets))
	for i := len(x.blends) - 1; i >= 0; i-- {
		b := x.blends[i]
		e := Entry{
			Class: ClassCorpus, Name: b.title(), Splits: b.splits, Samples: b.size, Hash: b.hash(), Dir: c.Cache,
			Description: b.hash() + descriptionEnd, Files: b.files(), Text: b.text, Length: b.size, Sizes: b.sizes(),
		}
		if b.name == "blend" {
			e.Class = ClassBlend
		}
		for _, p := range b.parts {
			e.Prefixes = append(e.Prefixes, p.name)
		}
		entries = append(entries, e)
	}
	for _, d := range x.datasets {
		e := Entry{
			Class: ClassDataset, Name: d.title(), Splits: []Split{d.split}, Prefixes: []string{d.prefix},
			Samples: d.samples, Hash: d.hash, Dir: c.Cache,
			Description: d.hash + descriptionEnd, Files: d.files(), Text: d.text(d.epochs), Length: d.layout.Samples,
			Sizes: d.sizes(),
		}
		if beside := d.besides(c.Root); c.Cache == "" {
			e.Dir = beside
		} else if filepath.Clean(beside) != filepath.Clean(c.Cache) && d.shadowed(c.Root) {
			e.Shadow = beside
		}
		entries = append(entries, e)
	}
	return entries
}

// title names a dataset in messages and progress.
func (d *dataset) title() string {
	return fmt.Sprintf("%s %s for %d samples", d.split, filepath.Base(d.prefix), d.samples)
}
