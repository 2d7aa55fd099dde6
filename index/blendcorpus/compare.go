package blendcorpus

import (
	"io"
	"path/filepath"

	"mula/index/cache"
	"mula/internal/mapping"
)

// A Difference is the first byte at which a file is not what it should be.
type Difference struct {
	File   string // its name in the directory
	Offset int64  // where a file that is cut off ends, or one that goes on too long should
}

// A comparison takes what should be in files and looks for differences, in place of writing.
type comparison []*compared

// A compared file.
type compared struct {
	cache.Comparer
	name string
	want int64
	file mapping.File
}

// compare opens the files of the given names and of the sizes that they should have.
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

// cut is the error about a file that was cut short while it was compared.
func (c comparison) cut() error {
	for _, f := range c {
		if err := f.file.Cut(); err != nil {
			return err
		}
	}
	return nil
}

// writers are the files as something to write to.
func (c comparison) writers() []io.WriterAt {
	w := make([]io.WriterAt, len(c))
	for i, f := range c {
		w[i] = f
	}
	return w
}

// difference is the first difference in the first file that has one, nil if all are as they should
// be.
func (c comparison) difference() *Difference {
	for _, f := range c {
		f.End(f.want)
		if at, differs := f.First(); differs {
			return &Difference{f.name, at}
		}
	}
	return nil
}
