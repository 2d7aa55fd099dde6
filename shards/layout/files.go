package layout

import (
	"fmt"
	"io"
	"path/filepath"

	"mula/internal/atomicfile"
	"mula/shards"
)

// Files are the unpublished files of one shard. All are in one folder.
type Files struct {
	disk     atomicfile.Files
	path     func(name string) string // path of a file by its name in the manifest
	list     []*pendingFile
	sumsName string             // name of the file of sums
	sums     shards.SumsWriter  // sums of the current file of ids
	to       *atomicfile.Hashed // the file of sums, nil before the first file of ids
}

type pendingFile struct {
	name string
	open *atomicfile.Hashed // nil once the file is finished
	file *atomicfile.File
	info shards.FileInfo
}

// Create creates the file with the given name.
func (f *Files) Create(name string) (*atomicfile.Hashed, error) {
	h, err := f.disk.CreateHashed(f.path(name))
	if err != nil {
		return nil, err
	}
	f.list = append(f.list, &pendingFile{name: name, open: h, file: h.File})
	return h, nil
}

// CreateIDs creates the file with the given name for ids, whose sums are added to the file of sums.
// It completes the previous file of ids. The file of sums has the sums of the files of ids in the
// order of their creation.
func (f *Files) CreateIDs(name string) (io.Writer, error) {
	h, err := f.Create(name)
	if err != nil {
		return nil, err
	}
	if f.to != nil {
		err = f.finishSums()
	} else {
		f.to, err = f.Create(f.sumsName)
	}
	if err != nil {
		return nil, err
	}
	return io.MultiWriter(h.Buffer, &f.sums), nil
}

// finishSums writes the sums of a completed file of ids.
func (f *Files) finishSums() error {
	if f.to == nil {
		return nil
	}
	_, err := f.to.Buffer.Write(f.sums.File())
	return err
}

// Finish syncs a file to disk under its temporary name.
func (f *Files) Finish(name string) (shards.FileInfo, error) {
	for _, p := range f.list {
		if p.name == name {
			err := p.finish()
			return p.info, err
		}
	}
	return shards.FileInfo{}, fmt.Errorf("finishing %s, which was never created", f.path(name))
}

func (p *pendingFile) finish() error {
	if p.open == nil {
		return nil
	}
	sum, err := p.open.Finish()
	if err != nil {
		return err
	}
	p.info = shards.FileInfo{Bytes: p.open.Bytes(), SHA256: sum}
	p.open = nil // free its buffer
	return nil
}

// publish renames the files to their final names. It removes an older marker and the stale files of
// the older shard, then renames the files and the manifest, and renames the new marker last. If
// publish fails after the first removal, there is no marker. This also holds after a power failure:
// the removal of the old marker is synced before other files change, and all other files are synced
// before the new marker appears.
func (f *Files) publish(marker string, stale []string, manifest *atomicfile.File) (err error) {
	dir := filepath.Dir(f.path(marker))
	if err := f.disk.Remove(f.path(marker)); err != nil {
		return fmt.Errorf("replacing shard: %w", err)
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
	defer func() {
		if err != nil {
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
	return last.Publish()
}

func (f *Files) abort() {
	for _, p := range f.list {
		p.file.Abort()
	}
	f.list = nil
}
