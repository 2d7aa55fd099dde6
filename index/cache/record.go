package cache

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"mula/internal/filesystem"
	"mula/internal/objects"
)

// A record describes a unit that this package built. It is stored as <marker>.json in the state
// directory.
type record struct {
	Format   int             `json:"format"` // 1
	Settings json.RawMessage `json:"settings"`
	Files    []recordFile    `json:"files"`
}

type recordFile struct {
	Name string `json:"name"`
	Size int64  `json:"size"`
}

const (
	recordFormat = 1
	maxRecord    = 16 << 20 // far above the size of a record
)

func (r *run) recordPath(u *unit) string { return objects.Join(r.state, u.Marker+".json") }

// recordText returns the record of a unit with files of these sizes.
func recordText(u *unit, sizes []int64) ([]byte, error) {
	rec := record{Format: recordFormat, Settings: u.Settings}
	for i, name := range u.Files {
		rec.Files = append(rec.Files, recordFile{name, sizes[i]})
	}
	text, err := json.Marshal(rec)
	return append(text, '\n'), err
}

// findings describes the existing files of a unit.
type findings struct {
	complete bool
	foreign  bool    // complete, without a record
	stale    bool    // existing data files must not be kept
	sizes    []int64 // of the data files; nil if not known yet
	have     []bool  // data files that are complete
	recorded bool    // the record exists and matches
	marker   bool    // a marker exists, right or wrong
}

// has reports whether these data files are complete.
func (f *findings) has(files []int) bool {
	return !slices.ContainsFunc(files, func(i int) bool { return !f.have[i] })
}

// inspect finds the existing files of a unit.
func (r *run) inspect(ctx context.Context, u *unit) (findings, error) {
	f := findings{have: make([]bool, len(u.Files))}
	text, err := r.readFile(objects.Join(r.dir, u.Marker), int64(len(u.MarkerText)))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return f, err
	}
	f.marker = err == nil
	marked := f.marker && bytes.Equal(text, u.MarkerText)

	rec, info, err := r.readRecord(u)
	if err != nil {
		return f, err
	}
	fresh := r.o.Resume || info != nil && !unchanged(info, u.before)
	switch {
	case rec == nil && info == nil: // no record
		// A marker without a record: the unit is another program's, if it is complete. Without a
		// marker, the origin of the files is unknown.
		if !marked || !fresh {
			f.stale = true
			return f, nil
		}
		f.foreign = true
		if f.sizes, err = r.sizes(ctx, u); err != nil {
			return f, err
		}
	case rec == nil || !fresh || !rec.of(u):
		f.stale = true
		return f, nil
	default:
		f.recorded = true
		for _, file := range rec.Files {
			f.sizes = append(f.sizes, file.Size)
		}
	}
	f.complete = marked
	for i, name := range u.Files {
		info, err := r.files.FS().Stat(objects.Join(r.dir, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return f, err
		}
		f.have[i] = err == nil && info.Mode().IsRegular() && info.Size() == f.sizes[i]
		f.complete = f.complete && f.have[i]
	}
	if f.foreign && !f.complete {
		f.foreign, f.stale = false, true
		clear(f.have)
	}
	return f, nil
}

// unchanged reports whether now is the same version of a file as before, which is nil if the file
// did not exist.
func unchanged(now, before os.FileInfo) bool {
	if before == nil {
		return false
	}
	if object, ok := now.Sys().(objects.Info); ok {
		was, _ := before.Sys().(objects.Info)
		return object.Version == was.Version
	}
	return os.SameFile(now, before) && now.ModTime().Equal(before.ModTime())
}

// of reports whether the record describes the unit.
func (rec *record) of(u *unit) bool {
	settings, err := compact(rec.Settings)
	if err != nil || rec.Format != recordFormat || !bytes.Equal(settings, u.Settings) ||
		len(rec.Files) != len(u.Files) {
		return false
	}
	for i, file := range rec.Files {
		if file.Name != u.Files[i] || file.Size < 0 {
			return false
		}
	}
	return true
}

// readRecord reads the record of a unit. info is nil if the record does not exist, rec is nil if it
// is not valid.
func (r *run) readRecord(u *unit) (rec *record, info os.FileInfo, err error) {
	path := r.recordPath(u)
	info, err = r.files.FS().Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	text, err := r.readFile(path, maxRecord)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	rec = new(record)
	if json.Unmarshal(text, rec) != nil {
		rec = nil
	}
	return rec, info, nil
}

// readFile reads a file, or nothing if the file is longer than limit.
func (r *run) readFile(path string, limit int64) ([]byte, error) {
	info, err := r.files.FS().Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file; remove it", path)
	}
	if info.Size() > limit {
		return nil, nil
	}
	return filesystem.ReadFile(r.files.FS(), path)
}
