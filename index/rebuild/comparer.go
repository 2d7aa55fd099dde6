package rebuild

import (
	"bytes"
	"errors"
	"sync"

	"mula/internal/mapping"
)

// errDiffers is the error of a [Comparer] that stops at a difference.
var errDiffers = errors.New("the files differ")

// A Comparer replaces a file in [cache.Unit.Build]: it compares the written bytes with the existing
// file. It must not be copied after the first write.
type Comparer struct {
	file  *File
	row   int  // bytes per row, counted from the start of the file; 0 means 1
	stop  bool // fail with errDiffers at the first difference found, which need not be the first in the file
	count bool // count all bytes that differ, also after the first difference

	mu        sync.Mutex
	met       bool
	first     int64
	different int64
	want      []byte
	wantAt    int64
}

// WriteAt compares p with the bytes at off. Bytes after the end of the file differ. It fails if the
// file cannot be read, for instance because a mapped file was truncated ([mapping.Guard]).
func (c *Comparer) WriteAt(p []byte, off int64) (int, error) {
	same := false
	err := mapping.Guard(func() (err error) {
		same, err = c.compare(p, off)
		return err
	})
	if err == nil && !same && c.stop {
		err = errDiffers
	}
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

// compare reports whether p equals the file at off. Without count, it may also return true if an
// earlier byte is known to differ.
func (c *Comparer) compare(p []byte, off int64) (bool, error) {
	if at, met := c.First(); met && at <= off && !c.count && !c.stop {
		return true, nil
	}
	there, err := c.file.Range(off, int64(len(p)))
	if err != nil || bytes.Equal(there, p) {
		return err == nil, err
	}
	n := 0
	for n < len(there) && there[n] == p[n] {
		n++
	}
	different := int64(len(p) - len(there))
	if c.count {
		for i, b := range there {
			if b != p[i] {
				different++
			}
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.different += different
	if at := off + int64(n); !c.met || at < c.first {
		c.met, c.first = true, at
		row := int64(max(1, c.row))
		begin := max(0, at-at%row-off)
		c.wantAt = off + begin
		c.want = append(c.want[:0], p[begin:min(int64(len(p)), begin+row)]...)
	}
	return false, nil
}

// end declares that the file should have size bytes; any bytes after them differ.
func (c *Comparer) end(size int64) {
	surplus := c.file.Size - size
	if surplus <= 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.different += surplus
	if !c.met || size < c.first {
		c.met, c.first = true, size
	}
}

// First returns the offset of the first differing byte among the compared bytes; met is false if no
// byte differs.
func (c *Comparer) First() (at int64, met bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.first, c.met
}

// Different returns the number of differing bytes, if it counts them.
func (c *Comparer) Different() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.different
}

// Want returns the bytes that were written for the row of the first difference, which starts at
// byte at of the file.
func (c *Comparer) Want() (row []byte, at int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.want, c.wantAt
}
