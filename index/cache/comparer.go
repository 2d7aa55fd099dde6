package cache

import (
	"bytes"
	"errors"
	"sync"

	"mula/internal/mapping"
)

// ErrDiffers is the error of a [Comparer] that was told to stop.
var ErrDiffers = errors.New("the files differ")

// A Comparer stands for a file in [Unit.Build] and compares what is written to it with the file
// that is there. It is not copied after the first write.
type Comparer struct {
	Data  []byte // the bytes of the file, which may be mapped
	Row   int    // bytes that belong together in it, counted from its beginning; 0 for 1
	Stop  bool   // fail with [ErrDiffers] at the first difference met, which need not be the first in the file
	Count bool   // count all bytes that differ, also behind the first

	mu        sync.Mutex
	met       bool
	first     int64
	different int64
	row       []byte
	rowAt     int64
}

// WriteAt compares p with the bytes at off. Bytes behind the end of the file differ. It fails where
// a mapped file was cut short ([mapping.Guard]).
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

// compare says whether p is what the file has at off. Without Count it may say so too where an
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

// End says that the file should have size bytes; what it has behind them differs.
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

// First is the first byte that differs, of those that were compared; met is false if none does.
func (c *Comparer) First() (at int64, met bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.first, c.met
}

// Different is how many bytes differ, with Count.
func (c *Comparer) Different() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.different
}

// Want is what was written for the row of the first difference, from byte at of the file on.
func (c *Comparer) Want() (row []byte, at int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.row, c.rowAt
}
