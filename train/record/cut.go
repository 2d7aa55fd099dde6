package record

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
)

// recordPosition is the position in time of a line of metrics.jsonl or fingerprints.jsonl.
type recordPosition struct {
	Step     *int64          `json:"step"`
	Eval     json.RawMessage `json:"eval"`
	Resumed  json.RawMessage `json:"resumed"`
	Rollback json.RawMessage `json:"rollback"`
	Snapshot json.RawMessage `json:"snapshot"`
}

// before reports whether the line was written before the checkpoint of stepsDone steps. The lines
// of evaluations and snapshots have the number of steps done, and are before the checkpoint of that
// number. Every other line has the number of its step.
func (p recordPosition) before(stepsDone int64) bool {
	switch {
	case p.Step == nil: // the first line
		return true
	case p.Eval != nil || p.Snapshot != nil:
		return *p.Step <= stepsDone
	}
	return *p.Step < stepsDone
}

// isStep reports whether the line is of a step.
func (p recordPosition) isStep() bool {
	return p.Step != nil && p.Eval == nil && p.Resumed == nil && p.Rollback == nil &&
		p.Snapshot == nil
}

// Cut removes lines after the checkpoint of stepsDone steps from a file of JSON lines, and
// an incomplete last line. header reports whether the file has its first line. last is the step of
// the last remaining line, -1 if there is none. A missing file counts as empty.
//
// Lines are in order of time, so Cut searches for the first removed line, from the end of the file.
// It reads a few lines, however long the file is.
func Cut(fsys filesystem.FS, path string, stepsDone int64) (header bool, last int64, err error) {
	f, err := fsys.OpenFile(path, os.O_RDWR, 0)
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
	l := lines{f, path}
	kept, err := l.search(info.Size(), stepsDone)
	if err != nil {
		return false, -1, err
	}
	if header, last, err = l.describe(kept); err != nil || kept == info.Size() {
		return header, last, err
	}
	if err := atomicfile.Injected(atomicfile.OpWrite, path); err != nil {
		return false, -1, err
	}
	// A kill leaves the old or the new size, and a resume after it removes the same lines.
	if err := f.Truncate(kept); err != nil {
		return false, -1, fmt.Errorf("truncating %s: %w", path, err)
	}
	if err := f.Sync(); err != nil {
		return false, -1, fmt.Errorf("truncating %s: %w", path, err)
	}
	return header, last, nil
}

// StepsDone returns the number of the step after the last step in a file of JSON lines: 0 if the
// file is missing or has no step. It does not change the file.
func StepsDone(fsys filesystem.FS, path string) (int64, error) {
	f, err := filesystem.Open(fsys, path)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer f.Close() // it was only read
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	l := lines{f, path}
	end, err := l.complete(info.Size())
	if err != nil {
		return 0, err
	}
	_, last, err := l.describe(end)
	return last + 1, err
}

// lines reads single lines of a file.
type lines struct {
	in   io.ReaderAt
	path string
}

const (
	readSize   = 16 << 10  // of one read
	firstProbe = 64 << 10  // bytes between the end of the file and the first probe
	mostLine   = 256 << 20 // bytes of the longest line
)

// search returns the number of bytes before the first line after the checkpoint of stepsDone steps.
func (l lines) search(size, stepsDone int64) (int64, error) {
	end, err := l.complete(size)
	if err != nil {
		return 0, err
	}
	// Lines before from remain, and lines at and after to do not. The first loop moves from.
	from, to := int64(0), end
	for back := int64(firstProbe); back < end; back *= 2 {
		start, next, p, err := l.at(end - back)
		if err != nil {
			return 0, err
		}
		if p.before(stepsDone) {
			from = next
			break
		}
		to = start
	}
	for from < to {
		start, next, p, err := l.at(from + (to-from)/2)
		if err != nil {
			return 0, err
		}
		if p.before(stepsDone) {
			from = next
		} else {
			to = start
		}
	}
	return from, nil
}

// describe returns the results of [Cut] for a file whose lines before kept remain.
func (l lines) describe(kept int64) (header bool, last int64, err error) {
	if kept == 0 {
		return false, -1, nil
	}
	_, _, first, err := l.at(0)
	if err != nil {
		return false, -1, err
	}
	for at := kept; at > 0; {
		start, _, p, err := l.at(at - 1)
		if err != nil {
			return false, -1, err
		}
		if p.isStep() {
			return first.Step == nil, *p.Step, nil
		}
		at = start
	}
	return first.Step == nil, -1, nil
}

// complete returns the end of the last complete line in the first size bytes of the file. After a
// crash of the machine, the file may end in zeros instead of bytes that did not reach the disk.
func (l lines) complete(size int64) (int64, error) {
	end := size // of the bytes that are neither zeros nor ends of lines
	for end > 0 {
		block, err := l.read(max(0, end-readSize), end)
		if err != nil {
			return 0, err
		}
		text := bytes.TrimRight(block, "\x00\n")
		end -= int64(len(block) - len(text))
		if len(text) > 0 {
			break
		}
	}
	if end == 0 {
		return 0, nil
	}
	after, err := l.read(end, min(end+1, size))
	if err != nil {
		return 0, err
	}
	if string(after) == "\n" {
		return end + 1, nil
	}
	return l.start(end - 1)
}

// at returns the line that has the byte at an offset: its first byte, the first byte of the next
// line, and its position in time.
func (l lines) at(offset int64) (start, next int64, p recordPosition, err error) {
	if start, err = l.start(offset); err != nil {
		return 0, 0, p, err
	}
	var text []byte
	for end := -1; end < 0; {
		block, err := l.read(start+int64(len(text)), start+int64(len(text))+readSize)
		if err != nil {
			return 0, 0, p, err
		}
		if end = bytes.IndexByte(block, '\n'); end >= 0 {
			block = block[:end+1]
		}
		if text = append(text, block...); len(text) > mostLine {
			return 0, 0, p, l.damaged(start, fmt.Errorf("the line has more than %d MiB", mostLine>>20))
		}
	}
	if err := json.Unmarshal(text, &p); err != nil {
		return 0, 0, p, l.damaged(start, err)
	}
	return start, start + int64(len(text)), p, nil
}

// start returns the first byte of the line that has the byte at an offset.
func (l lines) start(offset int64) (int64, error) {
	for end := offset; end > 0; {
		from := max(0, end-readSize)
		block, err := l.read(from, end)
		if err != nil {
			return 0, err
		}
		if i := bytes.LastIndexByte(block, '\n'); i >= 0 {
			return from + int64(i) + 1, nil
		}
		end = from
	}
	return 0, nil
}

// read returns the bytes in a range of the file. At the end of the file it returns fewer.
func (l lines) read(from, to int64) ([]byte, error) {
	b := make([]byte, to-from)
	n, err := l.in.ReadAt(b, from)
	if err != nil && err != io.EOF || n == 0 && to > from {
		return nil, fmt.Errorf("reading %s: %w", l.path, err)
	}
	return b[:n], nil
}

// damaged returns the error for a line that starts at an offset.
func (l lines) damaged(start int64, err error) error {
	number := int64(1)
	for at := int64(0); at < start; at += readSize {
		block, readErr := l.read(at, min(start, at+readSize))
		if readErr != nil {
			return readErr
		}
		number += int64(bytes.Count(block, []byte("\n")))
	}
	return fmt.Errorf("%s:%d: not a line of JSON: %w; move the file away to resume without it", l.path, number, err)
}
