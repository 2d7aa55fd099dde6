package shards

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
)

// A FileSet has the unpublished files of one shard. All are in one folder.
type FileSet struct {
	disk     atomicfile.Files
	path     func(name string) string // path of a file by its name in the manifest
	list     []*pendingFile
	sumsName string             // name of the file of sums
	sums     *atomicfile.Hashed // the file of sums, nil before the first file of ids is finished
}

type pendingFile struct {
	name string
	open *atomicfile.Hashed // nil once the file is finished
	file *atomicfile.File
	ids  *IDFile // nil for a file without ids, and once the file is finished
	info FileInfo
}

// Create creates the file with the given name.
func (f *FileSet) Create(name string) (*atomicfile.Hashed, error) {
	h, err := f.disk.CreateHashed(f.path(name))
	if err != nil {
		return nil, err
	}
	f.list = append(f.list, &pendingFile{name: name, open: h, file: h.File})
	return h, nil
}

// CreateIDs creates the file with the given name for ids. The file of sums has the sums of the
// files of ids in the order in which they are finished.
func (f *FileSet) CreateIDs(name string) (*IDFile, error) {
	h, err := f.Create(name)
	if err != nil {
		return nil, err
	}
	ids := &IDFile{out: h.Buffer, block: make([]byte, 0, sumsBlock)}
	f.list[len(f.list)-1].ids = ids
	return ids, nil
}

// Finish syncs a file to disk under its temporary name.
func (f *FileSet) Finish(name string) (FileInfo, error) {
	for _, p := range f.list {
		if p.name == name {
			err := f.finish(p)
			return p.info, err
		}
	}
	return FileInfo{}, fmt.Errorf("finishing %s, which was never created", f.path(name))
}

func (f *FileSet) finish(p *pendingFile) error {
	if p.open == nil {
		return nil
	}
	if err := f.finishIDs(p); err != nil {
		return err
	}
	sum, err := p.open.Finish()
	if err != nil {
		return err
	}
	p.info = FileInfo{Bytes: p.open.Bytes(), SHA256: sum}
	p.open = nil // free its buffer
	return nil
}

// finishIDs writes the last block of a file of ids, and the sums of its blocks.
func (f *FileSet) finishIDs(p *pendingFile) error {
	if p.ids == nil {
		return nil
	}
	sums, err := p.ids.finish()
	p.ids = nil
	if err == nil && f.sums == nil {
		f.sums, err = f.Create(f.sumsName)
	}
	if err == nil {
		_, err = f.sums.Buffer.Write(sums)
	}
	return err
}

// finishAll finishes all files and lists them. The files of ids are the first, because they have
// sums.
func (f *FileSet) finishAll() (map[string]FileInfo, error) {
	for _, p := range slices.Clone(f.list) {
		if err := f.finishIDs(p); err != nil {
			return nil, err
		}
	}
	files := make(map[string]FileInfo, len(f.list))
	for _, p := range f.list {
		if err := f.finish(p); err != nil {
			return nil, err
		}
		files[p.name] = p.info
	}
	return files, nil
}

// publish renames the files to their final names. It removes an older marker and the stale files of
// the older shard, unless that is equal, then renames the files and the manifest, and renames the
// new marker last. text is the content of the manifest. If publish fails after the first removal,
// there is no marker. This also holds after a power failure: the removal of the old marker is
// synced before other files change, and all other files are synced before the new marker appears.
func (f *FileSet) publish(marker string, stale []string, manifest *atomicfile.File, text []byte) (err error) {
	dir := filepath.Dir(f.path(marker))
	older, err := f.older(marker, manifest.Path(), text)
	if err != nil {
		return fmt.Errorf("replacing shard: %w", err)
	}
	if older == otherShard {
		if err := f.disk.Remove(f.path(marker)); err != nil {
			return fmt.Errorf("replacing shard: %w", err)
		}
	}
	// Sync even if no marker was removed: a process that was killed before this sync may have
	// removed it.
	if err := f.disk.SyncDir(dir); err != nil {
		return err
	}
	for _, path := range stale {
		if err := f.disk.Remove(path); err != nil {
			return fmt.Errorf("replacing shard: %w", err)
		}
	}
	var renamed []string
	marking := false
	defer func() {
		if err != nil && !marking { // another process may have completed an equal shard meanwhile
			if now, lookErr := f.older(marker, manifest.Path(), text); lookErr == nil {
				older = now
			}
		}
		if err != nil && older != equalShard {
			// The files are useless without the marker. The marker may have its final name already
			// if syncing its folder failed.
			_ = f.disk.FS().Remove(f.path(marker))
			for _, path := range renamed {
				_ = f.disk.FS().Remove(path)
			}
		}
	}()
	var last *atomicfile.File
	for _, p := range f.list {
		if p.name == marker {
			last = p.file
			continue
		}
		if err := p.file.Rename(); err != nil {
			return err
		}
		renamed = append(renamed, p.file.Path())
	}
	if err := manifest.Rename(); err != nil {
		return err
	}
	renamed = append(renamed, manifest.Path())
	if err := f.disk.SyncDir(dir); err != nil {
		return err
	}
	marking = true
	return last.Publish()
}

func (f *FileSet) abort() {
	for _, p := range f.list {
		p.file.Abort()
	}
	f.list = nil
}

// An olderShard is the shard that a new one replaces.
type olderShard int

const (
	noShard olderShard = iota
	// equalShard has the files of the new one: another process wrote it, too. It stays complete
	// while its files are replaced.
	equalShard
	otherShard
)

// older looks for an older shard. text is the new manifest, which will be at path.
func (f *FileSet) older(marker, path string, text []byte) (olderShard, error) {
	m, err := filesystem.Open(f.disk.FS(), f.path(marker))
	if errors.Is(err, fs.ErrNotExist) {
		return noShard, nil
	}
	if err != nil {
		return otherShard, err
	}
	m.Close() // it was not read
	old, err := filesystem.ReadFile(f.disk.FS(), path)
	if err == nil && bytes.Equal(old, text) {
		return equalShard, nil
	}
	return otherShard, nil // removing an unreadable manifest's marker is safe
}
