package blendcorpus

import (
	"fmt"
	"path/filepath"

	"mula/index/rebuild"
)

// The classes of an [Entry], with the names of the original programs.
const (
	ClassDataset = "GPTDataset"
	ClassCorpus  = "CorpusDataset"
	ClassBlend   = "BlendableDataset"
)

// An Entry is one dataset, corpus or blend of a configuration: the files that the program will look
// for, and where.
type Entry struct {
	Class    string
	Name     string          // for people
	Splits   []rebuild.Split // several if splits of the same size share the entry
	Prefixes []string        // of the token files; of a blend of corpora, the names of the corpora
	Samples  int64           // requested: N of a dataset, the size of a blend
	Hash     string

	// Dir is the directory of the files. It is empty for a blend if no cache directory is
	// configured: the program then computes the blend at every start and does not store it.
	Dir         string
	Description string   // the name of the file that holds Text
	Files       []string // the names of the data files
	Text        string   // the description

	Length int64   // number of samples
	Sizes  []int64 // sizes of Files in bytes, in that order

	// Shadow is a directory other than Dir that has files with these names and that the program
	// searches before Dir. The program uses those files whether or not they are correct. Empty if
	// there is no such directory.
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
			Class: ClassDataset, Name: d.title(), Splits: []rebuild.Split{d.split}, Prefixes: []string{d.prefix},
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

// title returns the name of a dataset in messages and progress.
func (d *dataset) title() string {
	return fmt.Sprintf("%s %s for %d samples", d.split, filepath.Base(d.prefix), d.samples)
}
