package megatron

import (
	"context"
	"fmt"
	"path/filepath"

	"mula/index/numpy"
	"mula/index/rebuild"
)

// Describe lists all datasets and blends of the configuration, blends first, each once. With
// counted it also returns the number of samples and the file sizes of each, and reads the lengths
// of all token files for that.
func (x *Index) Describe(ctx context.Context, counted bool) ([]rebuild.Entry, error) {
	if counted {
		if err := measure(ctx, x.datasets, x.config.Threads); err != nil {
			return nil, err
		}
	}
	entries := make([]rebuild.Entry, 0, len(x.blends)+len(x.datasets))
	for _, b := range x.blends {
		base := x.config.Profile.blendName(b.hash, b.split)
		e := rebuild.Entry{
			Class: blendClass, Name: b.title(), Splits: []rebuild.Split{b.split}, Samples: b.size.count(),
			Hash: b.hash, Dir: x.config.Cache,
			Description: base + descriptionEnd, Text: b.text, Length: b.length(),
		}
		for _, d := range b.members {
			e.Prefixes = append(e.Prefixes, d.prefix)
		}
		for _, end := range blendEnds {
			e.Files = append(e.Files, base+end)
		}
		if counted {
			e.Sizes = b.sizes()
		}
		entries = append(entries, e)
	}
	for _, d := range x.datasets {
		base := x.config.Profile.gptName(d.hash, d.split)
		e := rebuild.Entry{
			Class: gptClass, Name: d.title(), Splits: []rebuild.Split{d.split}, Prefixes: []string{d.prefix},
			Samples: d.samples.count(), Hash: d.hash,
			Dir:         x.directory(d),
			Description: base + descriptionEnd, Text: d.text, Length: -1,
		}
		for _, end := range gptEnds {
			e.Files = append(e.Files, base+end)
		}
		if counted {
			l, err := d.measured()
			if err != nil {
				return nil, err
			}
			e.Length, e.Sizes = l.Samples, l.Sizes()
		}
		entries = append(entries, e)
	}
	return entries, nil
}

// length returns the number of samples of the blend.
func (b *blend) length() int64 {
	if b.size.Given {
		return b.size.N
	}
	var n int64
	for _, count := range b.counts {
		n += count
	}
	return n
}

// sizes returns the sizes of the blend's files: int16 and int64.
func (b *blend) sizes() []int64 {
	return []int64{numpy.HeaderSize + 2*b.length(), numpy.HeaderSize + 8*b.length()}
}

// title returns the name of a blend in messages and progress.
func (b *blend) title() string { return fmt.Sprintf("%s blend of %d", b.split, len(b.members)) }

// title returns the name of a dataset in messages and progress.
func (d *dataset) title() string {
	if d.samples.Given {
		return fmt.Sprintf("%s %s for %d samples", d.split, filepath.Base(d.prefix), d.samples.N)
	}
	return fmt.Sprintf("%s %s", d.split, filepath.Base(d.prefix))
}
