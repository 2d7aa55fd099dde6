package layout

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

	"mula/internal/atomicfile"
	"mula/shards"
)

// Files are the files of one shard on their way to their names, all in one folder.
type Files struct {
	path     func(name string) string // of a file by its name in the manifest
	list     []*pendingFile
	sumsName string             // of the file of sums
	sums     shards.SumsWriter  // of the file of ids that is written
	to       *atomicfile.Hashed // the file of sums, nil before the first file of ids
}

// SumsName is the name in the manifest of the file of sums, unless [Description.Sums] is another.
const SumsName = "sums"

type pendingFile struct {
	name string
	open *atomicfile.Hashed // nil once the file is finished
	file *atomicfile.File
	info shards.FileInfo
}

// Create starts the file with the given name.
func (f *Files) Create(name string) (*atomicfile.Hashed, error) {
	h, err := atomicfile.CreateHashed(f.path(name))
	if err != nil {
		return nil, err
	}
	f.list = append(f.list, &pendingFile{name: name, open: h, file: h.File})
	return h, nil
}

// CreateIDs starts the file with the given name for ids, whose sums go to the file of sums. A file
// of ids that was started before is complete: the file of sums has what is said about the one
// behind what is said about the other.
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

// finishSums writes the sums of a file of ids that is complete.
func (f *Files) finishSums() error {
	if f.to == nil {
		return nil
	}
	_, err := f.to.Buffer.Write(f.sums.File())
	return err
}

// Finish brings a file to disk, under its temporary name.
func (f *Files) Finish(name string) (shards.FileInfo, error) {
	for _, p := range f.list {
		if p.name == name {
			err := p.finish()
			return p.info, err
		}
	}
	return shards.FileInfo{}, fmt.Errorf("finishing %s, which was never begun", f.path(name))
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
	p.open = nil // and its buffer
	return nil
}

// publish gives the files their names: an older marker is removed, then what the new shard does not
// replace, the files and the manifest are renamed, and the marker last. If that fails, there is no
// marker, unless nothing was touched. That holds for a machine that loses power too: the removal of
// the marker is on disk before anything else is touched, and everything else before the new marker.
func (f *Files) publish(marker string, stale []string, manifest *atomicfile.File) (err error) {
	dir := filepath.Dir(f.path(marker))
	if err := atomicfile.Remove(f.path(marker)); err != nil {
		return fmt.Errorf("replacing shard: %w", err)
	}
	// Even if there was none: a killed process may have removed it without coming to this.
	if err := atomicfile.SyncDir(dir); err != nil {
		return err
	}
	for _, path := range stale {
		if err := atomicfile.Remove(path); err != nil {
			return fmt.Errorf("replacing shard: %w", err)
		}
	}
	var renamed []string
	defer func() {
		if err != nil {
			// of no use to anybody without the marker, which may have got its name before its
			// folder could not be synced
			os.Remove(f.path(marker))
			for _, path := range renamed {
				os.Remove(path)
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
	if err := atomicfile.SyncDir(dir); err != nil {
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
