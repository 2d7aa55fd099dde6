package checkpointtest

import (
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"
	"sync"

	"mula/internal/filesystem"
)

// A Counter is a file system that counts how often each file below a directory is opened, and how
// often each of its bytes is read. It does not count files that are created.
type Counter struct {
	filesystem.FS
	dir   string
	mu    sync.Mutex
	opens map[string]int   // by the name of the file
	reads map[string][]int // of each byte
}

// NewCounter returns a counter of the files below dir.
func NewCounter(fsys filesystem.FS, dir string) *Counter {
	return &Counter{FS: fsys, dir: dir, opens: map[string]int{}, reads: map[string][]int{}}
}

// OpenFile implements [filesystem.FS].
func (c *Counter) OpenFile(name string, flag int, perm fs.FileMode) (filesystem.File, error) {
	f, err := c.FS.OpenFile(name, flag, perm)
	if err != nil || flag&os.O_CREATE != 0 || !strings.HasPrefix(name, c.dir) {
		return f, err
	}
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	name = path.Base(name)
	if c.opens[name]++; c.reads[name] == nil {
		c.reads[name] = make([]int, info.Size())
	}
	return &countedFile{File: f, fs: c, reads: c.reads[name]}, nil
}

type countedFile struct {
	filesystem.File
	fs    *Counter
	reads []int
	at    int // of Read
}

func (f *countedFile) count(at, n int) {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	for i := range n {
		f.reads[at+i]++
	}
}

func (f *countedFile) ReadAt(p []byte, off int64) (int, error) {
	n, err := f.File.ReadAt(p, off)
	f.count(int(off), n)
	return n, err
}

func (f *countedFile) Read(p []byte) (int, error) {
	n, err := f.File.Read(p)
	f.count(f.at, n)
	f.at += n
	return n, err
}

// Check returns an error if one of the files was not opened once, or one of its bytes was not read
// once.
func (c *Counter) Check(names []string) error {
	for _, name := range names {
		if c.opens[name] != 1 {
			return fmt.Errorf("%s was opened %d times", name, c.opens[name])
		}
		for i, n := range c.reads[name] {
			if n != 1 {
				return fmt.Errorf("byte %d of %s was read %d times", i, name, n)
			}
		}
	}
	if len(c.opens) != len(names) {
		return fmt.Errorf("%d files were opened, want %d", len(c.opens), len(names))
	}
	return nil
}

// Reads returns how often each byte of a file was read.
func (c *Counter) Reads(name string) []int { return c.reads[name] }
