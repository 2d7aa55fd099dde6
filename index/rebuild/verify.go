package rebuild

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"mula/internal/filesystem"
	"mula/internal/mapping"
	"mula/internal/objects"
)

// VerifyOptions are the options of the packages' Verify functions.
type VerifyOptions struct {
	Root    string        // the base directory of relative prefixes; "" is the working directory
	Threads int           // number of goroutines that compute; at least 1
	FS      filesystem.FS // of the directory, which may be a URL; nil is the machine's
	// receives each description when it is done, if not nil; calls do not overlap
	Progress func(finished, all int, description string)
}

// A Report compares a cache directory with its descriptions.
type Report struct {
	Verdicts []Verdict // one for each description, sorted by name
	Notes    []string
	Writers  []string // programs that could have written the equal files
}

// A Verdict is the result for one description.
type Verdict struct {
	Description string   `json:"description"` // the file name
	Kind        string   `json:"kind"`        // the class of the dataset or blend, "" if unknown
	Split       string   `json:"split,omitempty"`
	Prefixes    []string `json:"prefixes"`
	Equal       bool     `json:"equal"`
	Differs     bool     `json:"differs"`            // if neither Equal nor Differs, it could not be computed
	Settings    string   `json:"settings,omitempty"` // of equal files: settings that are not in the description
	Problem     string   `json:"problem,omitempty"`  // error or difference
}

// Files are the existing files of a unit, to be compared with their expected contents.
type Files []File

// A File is a file of a directory. Local files are mapped. Objects of a store are read range by
// range.
type File struct {
	Name    string // in the directory
	Missing bool
	Size    int64
	mapped  mapping.File
	object  filesystem.File // nil for a local file
}

// OpenFiles opens the files with the given names in a directory of fsys. A file may be missing.
func OpenFiles(fsys filesystem.FS, dir string, names []string) (Files, error) {
	var f Files
	for _, name := range names {
		file, err := openFile(filesystem.Default(fsys), objects.Join(dir, name))
		file.Name, file.Missing = name, errors.Is(err, fs.ErrNotExist)
		if err != nil && !file.Missing {
			f.Close()
			return nil, err
		}
		f = append(f, file)
	}
	return f, nil
}

func openFile(fsys filesystem.FS, path string) (f File, err error) {
	opened, err := filesystem.Open(fsys, path)
	if err != nil {
		return f, err
	}
	if local, ok := opened.(*os.File); ok {
		defer local.Close() // the mapping does not need it
		f.mapped, err = mapping.Of(local)
		f.Size = int64(len(f.mapped.Data))
		return f, err
	}
	info, err := opened.Stat()
	if err != nil {
		opened.Close()
		return f, err
	}
	f.object, f.Size = opened, info.Size()
	return f, nil
}

// unreadable is an error of reading an object. Like an error of a mapped file, it is
// [mapping.ErrUnreadable].
type unreadable struct{ error }

func (u unreadable) Unwrap() error      { return u.error }
func (unreadable) Is(target error) bool { return target == mapping.ErrUnreadable }

// Range returns up to n bytes from off, less at the end of the file. They may be mapped: the caller
// must use [mapping.Guard].
func (f *File) Range(off, n int64) ([]byte, error) {
	off = min(off, f.Size)
	n = min(n, f.Size-off)
	if f.object == nil {
		return f.mapped.Data[off:][:n], nil
	}
	p := make([]byte, n)
	if m, err := f.object.ReadAt(p, off); int64(m) < n {
		return nil, unreadable{fmt.Errorf("reading index files: %w", err)}
	}
	return p, nil
}

// Close releases the files.
func (f Files) Close() {
	for i := range f {
		f[i].mapped.Close()
		if f[i].object != nil {
			f[i].object.Close()
		}
	}
}

// Cut returns an error if a file has been truncated since it was opened. The bytes of a truncated
// file may have been read as zeros.
func (f Files) Cut() error {
	for i := range f {
		if err := f[i].mapped.Cut(); err != nil {
			return err
		}
	}
	return nil
}

// Bytes returns the total size of the files.
func (f Files) Bytes() (n int64) {
	for i := range f {
		n += f[i].Size
	}
	return n
}

// Plausible reports whether expected files of the given total size can belong to the existing
// files. If they are far larger, the description does not belong to the files, and building could
// need more time and memory than the machine has.
func (f Files) Plausible(expected int64) bool {
	return expected/4 <= 1<<28+f.Bytes() // near 2^63 bytes, four times a size would overflow
}

// A Search selects the differences that [Files.Compare] finds.
type Search uint8

// The searches.
const (
	First Search = iota // the first difference of each file
	Count               // the first difference of each file, and the number of bytes that differ
	Any                 // a difference of any file, which need not be the first; nothing after it is compared
)

// Compare calls build with writers that compare the bytes with the existing files, nil for missing
// files. sizes are the expected sizes. rows are the bytes of a row of each file; nil is one byte.
func (f Files) Compare(search Search, sizes []int64, rows []int, build func(to []io.WriterAt) error) (
	[]*Comparer, error) {
	comparers, to := make([]*Comparer, len(f)), make([]io.WriterAt, len(f))
	for i := range f {
		comparers[i] = &Comparer{file: &f[i], stop: search == Any, count: search == Count}
		if rows != nil {
			comparers[i].row = rows[i]
		}
		if !f[i].Missing {
			to[i] = comparers[i]
		}
	}
	if err := build(to); err != nil && !errors.Is(err, errDiffers) {
		return nil, err
	}
	for i, size := range sizes {
		comparers[i].end(size)
	}
	return comparers, nil
}

// A Difference is the first byte at which a file differs from the expected contents.
type Difference struct {
	File   string // its name in the directory
	Offset int64  // where a truncated file ends, or where a too long file should end
}

// Difference compares like [Files.Compare] and returns the first difference in the first file that
// has one, nil if there is no difference.
func (f Files) Difference(sizes []int64, build func(to []io.WriterAt) error) (*Difference, error) {
	comparers, err := f.Compare(First, sizes, nil, build)
	if err == nil {
		err = f.Cut()
	}
	if err != nil {
		return nil, err
	}
	for i, c := range comparers {
		if at, differs := c.First(); differs {
			return &Difference{f[i].Name, at}, nil
		}
	}
	return nil, nil
}
