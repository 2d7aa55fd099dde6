package blendcorpus

import (
	"fmt"
	"path/filepath"

	"mula/index/rebuild"
)

// The classes of a [rebuild.Entry], with the names of the original programs.
const (
	classDataset = rebuild.DatasetClass
	classCorpus  = "CorpusDataset"
	classBlend   = "BlendableDataset"
)

// Describe lists all blends, corpora and datasets of the configuration, blends first, each once.
func (x *Index) Describe() []rebuild.Entry {
	c := &x.config
	entries := make([]rebuild.Entry, 0, len(x.blends)+len(x.datasets))
	for i := len(x.blends) - 1; i >= 0; i-- {
		b := x.blends[i]
		e := rebuild.Entry{
			Class: classCorpus, Name: b.title(), Splits: b.splits, Samples: b.size, Hash: b.hash(), Dir: c.Cache,
			Description: b.hash() + descriptionEnd, Files: b.files(), Text: b.text, Length: b.size, Sizes: b.sizes(),
		}
		if b.name == "blend" {
			e.Class = classBlend
		}
		for _, p := range b.parts {
			e.Prefixes = append(e.Prefixes, p.name)
		}
		entries = append(entries, e)
	}
	for _, d := range x.datasets {
		e := rebuild.Entry{
			Class: classDataset, Name: d.title(), Splits: []rebuild.Split{d.split}, Prefixes: []string{d.prefix},
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
