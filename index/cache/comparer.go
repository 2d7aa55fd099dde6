package cache

import (
	"bytes"
	"errors"
	"sync"

	"mula/internal/mapping"
)

// ErrDiffers is the error of a [Comparer] with Stop that found a difference.
var ErrDiffers = errors.New("the files differ")

// A Comparer replaces a file in [Unit.Build]: it compares the written bytes with the existing file.
// It must not be copied after the first write.
type Comparer struct {
	Data []byte // the bytes of the file, which may be mapped
	Row  int    // bytes per row, counted from the start of the file; 0 means 1
	// fail with [ErrDiffers] at the first difference found, which need not be the first in the file
	Stop  bool
	Count bool // count all bytes that differ, also after the first difference

	mu        sync.Mutex
	met       bool
	first     int64
	different int64
	row       []byte
	rowAt     int64
}

// WriteAt compares p with the bytes at off. Bytes after the end of the file differ. It fails if a
// mapped file was truncated ([mapping.Guard]).
func (c *Comparer) WriteAt(p []byte, off int64) (int, error) {
	same := false
	err := mapping.Guard(func() error {
		same = c.compare(p, off)
		return nil
	})
	if err == nil && !same && c.Stop {
		err = ErrDiffers
	}
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

// compare reports whether p equals the file at off. Without Count, it may also return true if an
// earlier byte is known to differ.
func (c *Comparer) compare(p []byte, off int64) bool {
	if at, met := c.First(); met && at <= off && !c.Count && !c.Stop {
		return true
	}
	there := c.Data[min(off, int64(len(c.Data))):]
	there = there[:min(len(there), len(p))]
	if bytes.Equal(there, p) {
		return true
	}
	n := 0
	for n < len(there) && there[n] == p[n] {
		n++
	}
	different := int64(len(p) - len(there))
	if c.Count {
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
		row := int64(max(1, c.Row))
		begin := max(0, at-at%row-off)
		c.rowAt = off + begin
		c.row = append(c.row[:0], p[begin:min(int64(len(p)), begin+row)]...)
	}
	return false
}

// End declares that the file should have size bytes; any bytes after them differ.
func (c *Comparer) End(size int64) {
	surplus := int64(len(c.Data)) - size
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

// Different returns the number of differing bytes, if Count is set.
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
	return c.row, c.rowAt
}
