package record

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"mula/internal/atomicfile"
)

// A File is a file of JSON lines that grows with the run. Every line is one write call.
type File struct {
	f *os.File
}

// Open opens a file for appending and creates it if necessary.
func Open(path string) (*File, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	return &File{f}, nil
}

// Append writes a value as a line of JSON.
func (r *File) Append(value any) error {
	line, err := json.Marshal(value)
	if err != nil {
		return fmt.Errorf("writing %s: %w", r.f.Name(), err)
	}
	_, err = r.Write(append(line, '\n'))
	return err
}

// Write appends bytes unchanged.
func (r *File) Write(p []byte) (int, error) {
	if err := atomicfile.Injected(atomicfile.OpWrite, r.f.Name()); err != nil {
		return 0, err
	}
	n, err := r.f.Write(p)
	if err != nil {
		return n, fmt.Errorf("writing %s: %w", r.f.Name(), err)
	}
	return n, nil
}

// Sync writes all lines to disk. A checkpoint is published after sync, so no checkpoint is ahead of
// its records.
func (r *File) Sync() error {
	if err := atomicfile.Injected(atomicfile.OpSync, r.f.Name()); err != nil {
		return err
	}
	if err := r.f.Sync(); err != nil {
		return fmt.Errorf("writing %s: %w", r.f.Name(), err)
	}
	return nil
}

// Close closes the file. It does not sync it.
func (r *File) Close() error { return r.f.Close() }

// recordPosition is the position in time of a line of metrics.jsonl or fingerprints.jsonl.
type recordPosition struct {
	Step     *int64          `json:"step"`
	Eval     json.RawMessage `json:"eval"`
	Resumed  json.RawMessage `json:"resumed"`
	Rollback json.RawMessage `json:"rollback"`
}

// before reports whether the line was written before the checkpoint of stepsDone steps. The line of
// an evaluation has the number of steps done, and is before the checkpoint of that number. Every
// other line has the number of its step.
func (p recordPosition) before(stepsDone int64) bool {
	switch {
	case p.Step == nil: // the first line
		return true
	case p.Eval != nil:
		return *p.Step <= stepsDone
	}
	return *p.Step < stepsDone
}

// Cut removes lines after the checkpoint of stepsDone steps from a file of JSON lines, and
// an incomplete last line. header reports whether the file has its first line. last is the step of
// the last remaining line, -1 if there is none. A missing file counts as empty.
func Cut(path string, stepsDone int64) (header bool, last int64, err error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, -1, nil
	}
	if err != nil {
		return false, -1, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return false, -1, err
	}
	last = -1
	var kept int64 // bytes; lines are in order of time, so the start of the file remains
	for r, number := bufio.NewReader(f), 1; ; number++ {
		line, err := r.ReadBytes('\n')
		if err == io.EOF {
			break // the line is incomplete or empty
		}
		if err != nil {
			return false, -1, fmt.Errorf("reading %s: %w", path, err)
		}
		var p recordPosition
		if err := json.Unmarshal(line, &p); err != nil {
			// After a crash of the machine, the file may end in zeros instead of bytes that did not
			// reach the disk.
			if rest, _ := io.ReadAll(r); len(bytes.Trim(append(line, rest...), "\x00\n")) == 0 {
				break
			}
			return false, -1, fmt.Errorf("%s:%d: not a line of JSON: %w; move the file away to resume without it", path,
				number, err)
		}
		if !p.before(stepsDone) {
			break
		}
		kept += int64(len(line))
		if p.Step == nil {
			header = true
		} else if p.Eval == nil && p.Resumed == nil && p.Rollback == nil {
			last = *p.Step
		}
	}
	if kept == info.Size() {
		return header, last, nil
	}
	out, err := atomicfile.Create(path)
	if err != nil {
		return false, -1, err
	}
	defer out.Abort()
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return false, -1, err
	}
	if _, err := io.CopyN(out, f, kept); err != nil {
		return false, -1, fmt.Errorf("truncating %s: %w", path, err)
	}
	return header, last, out.Publish()
}

// Timestamp formats a time for the records: RFC 3339, in UTC.
func Timestamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }
