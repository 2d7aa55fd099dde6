package blendcorpus

import (
	"io"
	"path/filepath"

	"mula/index/cache"
	"mula/internal/mapping"
)

// A Difference is the first byte at which a file differs from the expected contents.
type Difference struct {
	File   string // its name in the directory
	Offset int64  // where a truncated file ends, or where a too long file should end
}

// A comparison receives the expected contents of files and looks for differences instead of
// writing.
type comparison []*compared

// A compared file.
type compared struct {
	cache.Comparer
	name string
	want int64
	file mapping.File
}

// compare opens the files with the given names and expected sizes.
func compare(dir string, names []string, sizes []int64) (comparison, error) {
	var c comparison
	for i, name := range names {
		file, err := mapping.Open(filepath.Join(dir, name))
		if err != nil {
			c.close()
			return nil, err
		}
		c = append(c, &compared{Comparer: cache.Comparer{Data: file.Data}, name: name, want: sizes[i], file: file})
	}
	return c, nil
}

func (c comparison) close() {
	for _, f := range c {
		f.file.Close()
	}
}

// cut returns an error if a file was truncated during the comparison.
func (c comparison) cut() error {
	for _, f := range c {
		if err := f.file.Cut(); err != nil {
			return err
		}
	}
	return nil
}

// writers returns the files as writers.
func (c comparison) writers() []io.WriterAt {
	w := make([]io.WriterAt, len(c))
	for i, f := range c {
		w[i] = f
	}
	return w
}

// difference returns the first difference in the first file that has one, nil if there is no
// difference.
func (c comparison) difference() *Difference {
	for _, f := range c {
		f.End(f.want)
		if at, differs := f.First(); differs {
			return &Difference{f.name, at}
		}
	}
	return nil
}
