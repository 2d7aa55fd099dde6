package checkpoint

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/filesystem/objectfs"
	"mula/internal/objects"
	"mula/shards"
)

// A Store keeps copies of checkpoints in an object store. A copy of step-00000100 has the same
// files under URL/step-00000100/, and the records of the run at that step under records/. Its
// manifest.json is written last and removed first, so a copy with a manifest is complete.
//
// A copy whose model is kept has [modelManifest], and no other file that only resuming needs.
type Store struct{ url string }

// modelManifest lists the files of a copy that has become a model, in the form of the manifest. It
// is written before other files are removed, and removed before a checkpoint of the step is copied
// again.
const modelManifest = "model.json"

// recordsDir is the folder of the records in a copy.
const recordsDir = "records"

// transfers is the number of files that are copied at the same time.
const transfers = 4

// OpenStore returns the store at a URL. It sends no request.
func OpenStore(url string) (Store, error) {
	return Store{strings.TrimRight(url, "/")}, objects.Check(url)
}

// An Upload is a checkpoint that is about to be copied. It holds its files open, so they may be
// removed.
type Upload struct {
	store Store
	name  string
	files map[string]filesystem.File // by name in the copy
}

// Prepare opens the files of the checkpoint in dir, and files of records.
func (s Store) Prepare(fsys filesystem.FS, dir string, records []string) (_ *Upload, err error) {
	var m manifest
	if err := readManifest(fsys, dir, &m); err != nil {
		return nil, err
	}
	u := &Upload{store: s, name: filepath.Base(dir), files: map[string]filesystem.File{}}
	defer func() {
		if err != nil {
			u.Close()
		}
	}()
	open := func(name, path string) {
		f, openErr := filesystem.Open(fsys, path)
		if err = errors.Join(err, openErr); openErr == nil {
			u.files[name] = f
		}
	}
	open(manifestFile, filepath.Join(dir, manifestFile))
	for name := range m.Files {
		open(name, filepath.Join(dir, name))
	}
	for _, path := range records {
		open(recordsDir+"/"+filepath.Base(path), path)
	}
	return u, err
}

// Name is the name of the checkpoint.
func (u *Upload) Name() string { return u.name }

// Close closes the files.
func (u *Upload) Close() {
	for _, f := range u.files {
		f.Close() // it was only read
	}
}

// Run writes the copy. A record is copied up to its size when Run reads it. progress, which may be
// nil, is called now and then from several goroutines.
func (u *Upload) Run(ctx context.Context, progress func()) error {
	// The step has a model only if a run went back. Removing a missing object needs the permission
	// to remove, and leaves a marker in a bucket with versions.
	_, err := objects.Stat(ctx, u.url(modelManifest))
	if err == nil {
		err = objects.Remove(ctx, u.url(modelManifest))
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("copying checkpoint %s: %w", u.name, err)
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(transfers)
	for name, f := range u.files {
		if name != manifestFile {
			g.Go(func() error { return objects.Upload(gctx, u.url(name), reporting{f, progress}, nil) })
		}
	}
	err = g.Wait()
	if err == nil {
		err = objects.Upload(ctx, u.url(manifestFile), reporting{u.files[manifestFile], progress}, nil)
	}
	if err != nil {
		return fmt.Errorf("copying checkpoint %s: %w", u.name, err)
	}
	return nil
}

// url returns the URL of a file in the copy.
func (u *Upload) url(name string) string { return objects.Join(u.store.url, u.name+"/"+name) }

// reporting calls progress after each read.
type reporting struct {
	io.Reader
	progress func()
}

func (r reporting) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if r.progress != nil {
		r.progress()
	}
	return n, err
}

// A storedCopy is a complete or incomplete copy of a checkpoint, or the model of a copy.
type storedCopy struct {
	step     int64
	complete bool     // has a manifest
	model    bool     // has a modelManifest, so it is no copy any more
	names    []string // of its objects, relative to the copy
}

// copies lists the copies in the store, newest first.
func (s Store) copies(ctx context.Context) ([]*storedCopy, error) {
	byStep := map[int64]*storedCopy{}
	prefix := s.url + "/"
	for e, err := range objects.List(ctx, prefix+"step-") {
		if err != nil {
			return nil, fmt.Errorf("looking for checkpoints in %s: %w", s.url, err)
		}
		name, file, _ := strings.Cut(strings.TrimPrefix(e.URL, prefix), "/")
		step, ok := stepOf(name)
		if !ok {
			continue
		}
		c := byStep[step]
		if c == nil {
			c = &storedCopy{step: step}
			byStep[step] = c
		}
		c.names = append(c.names, file)
		c.complete = c.complete || file == manifestFile
		c.model = c.model || file == modelManifest
	}
	newestFirst := func(a, b *storedCopy) int { return cmp.Compare(b.step, a.step) }
	return slices.SortedFunc(maps.Values(byStep), newestFirst), nil
}

// Newest returns the step of the newest complete copy, or -1.
func (s Store) Newest(ctx context.Context) (int64, error) {
	list, err := s.copies(ctx)
	for _, c := range list {
		if c.complete && !c.model {
			return c.step, nil
		}
	}
	return -1, err
}

// findStored is [FindModel] for a URL. An incomplete copy of a checkpoint is an error.
func findStored(ctx context.Context, url string) (ModelDir, error) {
	s, err := OpenStore(url)
	if err != nil {
		return ModelDir{}, err
	}
	m := ModelDir{Dir: s.url, fsys: objectfs.New(ctx, nil, "")}
	has := func(name string) bool {
		_, statErr := m.fsys.Stat(m.path(name))
		if !errors.Is(statErr, fs.ErrNotExist) {
			err = errors.Join(err, statErr)
		}
		return statErr == nil
	}
	kept, copied, model, state := has(modelManifest), has(manifestFile), has(modelConfig), has(stateFile)
	_, named := stepOf(path.Base(s.url))
	switch {
	case err != nil:
		return ModelDir{}, err
	case kept && named:
		return m, verifyKept(ctx, m.fsys, m.Dir)
	case copied:
	case state, named:
		return ModelDir{}, fmt.Errorf("%s is an incomplete checkpoint: it has no %s; name another", s.url, manifestFile)
	case model:
		return m, nil
	case has(folderLock):
		return ModelDir{}, fmt.Errorf("%s: %w: mula export or import writes this folder, or was killed there; wait "+
			"for it, or repeat it", s.url, ErrNone)
	default:
		step, err := s.Newest(ctx)
		if err == nil && step < 0 {
			err = fmt.Errorf("%s: %w, and no %s of a Hugging Face model; name a model, a copy of a checkpoint, or the "+
				"folder of checkpoint.copies", s.url, ErrNone, modelConfig)
		}
		if err != nil {
			return ModelDir{}, err
		}
		m.Dir = objects.Join(s.url, Name(step))
	}
	m.Checkpoint, err = verifyModel(ctx, m.fsys, m.Dir)
	return m, err
}

// verifyKept compares the files of a copy that has become a model with its list.
func verifyKept(ctx context.Context, fsys filesystem.FS, dir string) error {
	var m manifest
	path := objects.Join(dir, modelManifest)
	text, err := readSmall(fsys, path)
	if err == nil {
		err = decode(path, text, &m)
	}
	if err == nil {
		err = verifyFiles(ctx, fsys, dir, m.Files, 0, 1)
	}
	if err != nil {
		return fmt.Errorf("model %s cannot be used: %w", dir, err)
	}
	return nil
}

// verifyModel compares the files of a copy with its manifest, except the optimizer's state, which
// only training needs.
func verifyModel(ctx context.Context, fsys filesystem.FS, dir string) (*Checkpoint, error) {
	c := &Checkpoint{Dir: dir, fsys: fsys}
	err := readManifest(fsys, dir, &c.manifest)
	files := maps.Clone(c.manifest.Files)
	maps.DeleteFunc(files, func(name string, _ shards.FileInfo) bool { return strings.HasPrefix(name, "optimizer") })
	if err == nil {
		err = verifyFiles(ctx, fsys, dir, files, 0, 1)
	}
	if err == nil {
		err = readState(fsys, dir, &c.manifest, &c.State)
	}
	if err != nil {
		return nil, fmt.Errorf("checkpoint %s cannot be used: %w", dir, err)
	}
	return c, nil
}

// remove removes a copy.
func (s Store) remove(ctx context.Context, c *storedCopy) error {
	base := s.url + "/" + Name(c.step) + "/"
	if c.complete {
		if err := objects.Remove(ctx, base+manifestFile); err != nil {
			return err
		}
	}
	var errs []error
	for _, name := range c.names {
		if name != manifestFile {
			errs = append(errs, objects.Remove(ctx, base+name))
		}
	}
	return errors.Join(errs...)
}

// keepModel makes a complete copy a model. It can be repeated after it was interrupted.
func (s Store) keepModel(ctx context.Context, c *storedCopy) error {
	base := s.url + "/" + Name(c.step) + "/"
	if !c.model {
		m, _, err := fetchManifest(ctx, base)
		if err != nil {
			return err
		}
		maps.DeleteFunc(m.Files, func(name string, _ shards.FileInfo) bool { return onlyResumes(name) })
		text, err := jsonText(m)
		if err == nil {
			err = objects.WriteFile(ctx, base+modelManifest, text)
		}
		if err != nil {
			return err
		}
	}
	var errs []error
	for _, name := range c.names {
		if onlyResumes(name) {
			errs = append(errs, objects.Remove(ctx, base+name))
		}
	}
	return errors.Join(errs...)
}

// Prune removes copies by the rule of [Prune] for checkpoints: it keeps the newest keep.Newest
// complete copies, or all of them if it is 0, and the models of the steps that are multiples of
// keep.ModelEvery. It does not use keep.BackTo. It also removes incomplete copies that are older
// than the newest complete one.
func (s Store) Prune(ctx context.Context, keep Kept) error {
	list, err := s.copies(ctx)
	if err != nil {
		return err
	}
	var errs []error
	complete := 0
	for _, c := range list {
		if c.complete && !c.model {
			complete++
		}
		switch {
		case c.model:
			errs = append(errs, s.keepModel(ctx, c)) // if a process was killed there
		case !c.complete && complete > 0:
			errs = append(errs, s.remove(ctx, c))
		case !c.complete || keep.Newest == 0 || complete <= keep.Newest:
		case keep.ModelEvery > 0 && c.step%keep.ModelEvery == 0:
			errs = append(errs, s.keepModel(ctx, c))
		default:
			errs = append(errs, s.remove(ctx, c))
		}
	}
	return errors.Join(errs...)
}

// RemoveAfter removes the copies of later steps, so that a run that went back does not resume from
// them. Models stay until the step is copied again.
func (s Store) RemoveAfter(ctx context.Context, step int64) error {
	list, err := s.copies(ctx)
	if err != nil {
		return err
	}
	for _, c := range list { // newest first: a copy never becomes the newest by the removal of an older one
		if c.step > step && !c.model {
			if err := s.remove(ctx, c); err != nil {
				return err
			}
		}
	}
	return nil
}

// Download writes the copy of a step as a checkpoint into dir, whose files have the hashes of the
// manifest. It replaces a checkpoint of that step. Records of the copy are written into runDir,
// except records that exist there.
func (s Store) Download(ctx context.Context, fsys filesystem.FS, step int64, dir, runDir string) (err error) {
	name := Name(step)
	base := s.url + "/" + name + "/"
	defer func() {
		if err != nil {
			err = fmt.Errorf("fetching checkpoint %s from %s: %w", name, s.url, err)
		}
	}()
	m, text, err := fetchManifest(ctx, base)
	if err != nil {
		return err
	}
	temp := filepath.Join(dir, "."+name+atomicfile.TempSuffix)
	if err := errors.Join(filesystem.MkdirAll(fsys, dir, 0o755), filesystem.RemoveAll(fsys, temp),
		fsys.Mkdir(temp, 0o755)); err != nil {
		return err
	}
	defer filesystem.RemoveAll(fsys, temp) // no effect after the rename
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(transfers)
	files := atomicfile.On(fsys)
	for file, want := range m.Files {
		if !filepath.IsLocal(file) || strings.ContainsAny(file, `/\`) {
			return fmt.Errorf("%s lists the file %q, which is not in the checkpoint", base+manifestFile, file)
		}
		g.Go(func() error { return fetch(gctx, files, base+file, filepath.Join(temp, file), want) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	if err := files.WriteFile(filepath.Join(temp, manifestFile), text); err != nil {
		return err
	}
	for e, err := range objects.List(ctx, base+recordsDir+"/") {
		if err != nil {
			return err
		}
		path := filepath.Join(runDir, filepath.Base(filepath.FromSlash(strings.TrimPrefix(e.URL, base))))
		if _, err := fsys.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := fetch(ctx, files, e.URL, path, shards.FileInfo{}); err != nil {
			return err
		}
	}
	if err := files.SyncDir(runDir); err != nil { // a run that is complete does not sync it again
		return err
	}
	return publish(fsys, temp, filepath.Join(dir, name))
}

// fetchManifest returns the manifest of the copy with the prefix base, and its text.
func fetchManifest(ctx context.Context, base string) (m manifest, text []byte, err error) {
	text, _, err = objects.ReadFile(ctx, base+manifestFile, maxStateFile)
	if err == nil {
		err = decode(base+manifestFile, text, &m)
	}
	return m, text, err
}

// fetch writes an object to a file, which must have the size and hash of want, unless want is zero.
func fetch(ctx context.Context, files atomicfile.Files, url, path string, want shards.FileInfo) error {
	o, err := objects.Open(ctx, url)
	if err != nil {
		return err
	}
	in := o.Reader(ctx)
	defer in.Close()
	out, err := files.Create(path)
	if err != nil {
		return err
	}
	defer out.Abort()
	h := &hashingWriter{out, sha256.New(), 0}
	if _, err := io.Copy(h, in); err != nil {
		return err
	}
	found := shards.FileInfo{Bytes: h.bytes, SHA256: hex.EncodeToString(h.hash.Sum(nil))}
	if want != (shards.FileInfo{}) && found != want {
		return fmt.Errorf("%s: expected %d bytes with SHA-256 %s, found %d bytes with %s; remove the copy, or its "+
			"manifest.json, to use an older one", url, want.Bytes, want.SHA256, found.Bytes, found.SHA256)
	}
	return out.Rename()
}
