package record

import (
	"encoding/json"
	"fmt"
	"os"
	"time"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
)

// A File is a file of JSON lines that grows with the run. Every line is one write call.
type File struct {
	f filesystem.File
}

// Open opens a file for appending and creates it if necessary.
func Open(fsys filesystem.FS, path string) (*File, error) {
	f, err := fsys.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
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

// Timestamp formats a time for the records: RFC 3339, in UTC.
func Timestamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }
