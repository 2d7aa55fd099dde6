// Package objectfs is a file system in which URLs are objects of a store. Other paths are local
// files.
//
// A new file is written to a local folder, and uploaded when it gets its final name, as package
// atomicfile does. An object therefore appears completely or not at all, also after a kill. There
// are no folders: every folder exists, and may be empty.
package objectfs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sync/semaphore"

	"mula/internal/filesystem"
	"mula/internal/objects"
)

// An FS is a file system with URLs. It implements [filesystem.FS].
type FS struct {
	ctx       context.Context // of requests
	local     filesystem.FS
	scratch   string // folder of files without their final names
	uploading *semaphore.Weighted

	// Guard, if not nil, is called with the URL before an object appears or is removed. An error
	// keeps it from that.
	Guard func(url string) error
}

// uploads is how many objects are uploaded at a time. Each needs up to 80 MB of memory.
const uploads = 3

// New returns a file system whose requests to stores end with ctx. scratch is a local folder for
// new files. local is the file system of other paths; nil is the machine's.
func New(ctx context.Context, local filesystem.FS, scratch string) *FS {
	return &FS{ctx: ctx, local: filesystem.Default(local), scratch: scratch, uploading: semaphore.NewWeighted(uploads)}
}

// address returns the URL that a path means. [filepath.Join] and similar functions have removed one
// of its slashes.
func address(name string) (url string, ok bool) {
	scheme, rest, ok := strings.Cut(filepath.ToSlash(name), ":/")
	if !ok || len(scheme) < 2 { // the drive of a Windows path has one letter
		return name, false
	}
	url = scheme + "://" + strings.TrimPrefix(rest, "/")
	return url, objects.IsURL(url)
}

// OpenFile implements [filesystem.FS]. A new file with a URL has a local name.
func (f *FS) OpenFile(name string, flag int, perm fs.FileMode) (filesystem.File, error) {
	url, ok := address(name)
	switch {
	case !ok:
		return f.local.OpenFile(name, flag, perm)
	case flag&os.O_CREATE != 0:
		file, err := f.local.OpenFile(filepath.Join(f.scratch, path.Base(url)), flag, perm)
		if err != nil {
			return nil, err
		}
		return unsynced{file}, nil
	case flag != os.O_RDONLY:
		return nil, fmt.Errorf("%s: changing an object: %w", url, errors.ErrUnsupported)
	}
	o, err := objects.Open(f.ctx, url)
	if err != nil {
		return nil, err
	}
	return &file{ctx: f.ctx, url: url, o: o}, nil
}

// unsynced is a file that needs not survive a crash of the machine, because it is uploaded.
type unsynced struct{ filesystem.File }

func (unsynced) Sync() error { return nil }

// maxFile is far above the size of a file that is read at once.
const maxFile = 4 << 30

// ReadFile returns the contents of a file, of an object with a single request.
func (f *FS) ReadFile(name string) ([]byte, error) {
	url, ok := address(name)
	if !ok {
		return filesystem.ReadFile(f.local, name)
	}
	text, _, err := objects.ReadFile(f.ctx, url, maxFile)
	return text, err
}

// Mkdir implements [filesystem.FS].
func (f *FS) Mkdir(name string, perm fs.FileMode) error {
	if _, ok := address(name); ok {
		return nil
	}
	return f.local.Mkdir(name, perm)
}

// Rename implements [filesystem.FS]. It uploads a local file if the new name is a URL.
func (f *FS) Rename(from, to string) error {
	url, ok := address(to)
	if !ok {
		return f.local.Rename(from, to)
	}
	if err := f.upload(from, url); err != nil {
		return err
	}
	_ = f.local.Remove(from) // the object exists
	return nil
}

// Link implements [filesystem.FS] for local files. Objects have no links.
func (f *FS) Link(from, to string) error {
	if url, ok := address(to); ok {
		return fmt.Errorf("%s: linking an object: %w", url, errors.ErrUnsupported)
	}
	return f.local.Link(from, to)
}

// Chtimes implements [filesystem.FS] for local files. The time of an object is the time of its
// upload.
func (f *FS) Chtimes(name string, accessed, modified time.Time) error {
	if url, ok := address(name); ok {
		return fmt.Errorf("%s: changing the time of an object: %w", url, errors.ErrUnsupported)
	}
	return f.local.Chtimes(name, accessed, modified)
}

func (f *FS) upload(from, url string) error {
	if err := f.uploading.Acquire(f.ctx, 1); err != nil {
		return err
	}
	defer f.uploading.Release(1)
	file, err := filesystem.Open(f.local, from)
	if err != nil {
		return err
	}
	defer file.Close()
	return objects.Upload(f.ctx, url, file, func() error { return f.guard(url) })
}

func (f *FS) guard(url string) error {
	if f.Guard == nil {
		return nil
	}
	return f.Guard(url)
}

// Remove implements [filesystem.FS]. The removal of an object that does not exist is no error.
func (f *FS) Remove(name string) error {
	url, ok := address(name)
	if !ok {
		return f.local.Remove(name)
	}
	if err := f.guard(url); err != nil {
		return err
	}
	return objects.Remove(f.ctx, url)
}

// Stat implements [filesystem.FS].
func (f *FS) Stat(name string) (fs.FileInfo, error) {
	url, ok := address(name)
	if !ok {
		return f.local.Stat(name)
	}
	i, err := objects.Stat(f.ctx, url)
	if err != nil {
		return nil, err
	}
	return info{path.Base(url), i}, nil
}

// ReadDir implements [filesystem.FS]. The result for a store has no folders.
func (f *FS) ReadDir(name string) (entries []fs.DirEntry, err error) {
	url, ok := address(name)
	if !ok {
		return f.local.ReadDir(name)
	}
	for e, err := range objects.ListFolder(f.ctx, url) {
		if err != nil {
			return nil, err
		}
		entries = append(entries, fs.FileInfoToDirEntry(info{path.Base(e.URL), e.Info}))
	}
	return entries, nil
}

// SyncDir implements [filesystem.FS].
func (f *FS) SyncDir(name string) error {
	if _, ok := address(name); ok {
		return nil
	}
	return f.local.SyncDir(name)
}

// info is the [fs.FileInfo] of an object.
type info struct {
	name string
	i    objects.Info
}

func (i info) Name() string       { return i.name }
func (i info) Size() int64        { return i.i.Size }
func (i info) Mode() fs.FileMode  { return 0o444 }
func (i info) ModTime() time.Time { return i.i.Modified }
func (i info) IsDir() bool        { return false }
func (i info) Sys() any           { return i.i }
