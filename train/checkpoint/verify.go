package checkpoint

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"syscall"

	"mula/internal/filesystem"
	"mula/internal/objects"
	"mula/internal/strictjson"
	"mula/shards"
	"mula/train/collective"
	"mula/xpu/comm"
)

// verify compares the files of a checkpoint with the manifest, and reads the manifest and the
// state. Without all, it does not read the files that [Shard.Load] reads. Errors name the file. All
// ranks of world call it. Each rank reads some of the files, and all get the same result.
func verify(ctx context.Context, world *comm.Comm, fsys filesystem.FS, dir string, all bool) (*Checkpoint, error) {
	c := &Checkpoint{Dir: dir, fsys: fsys}
	m := &c.manifest
	if err := fromFirst(ctx, world, m, func() error { return readManifest(fsys, dir, m) }); err != nil {
		return nil, err
	}
	files := maps.Clone(m.Files)
	if !all {
		maps.DeleteFunc(files, func(name string, _ shards.FileInfo) bool { return m.loads(name) })
	}
	err := verifyFiles(ctx, fsys, dir, files, world.Rank(), world.Size())
	if err := allJudge(ctx, world, err); err != nil {
		return nil, err
	}
	return c, fromFirst(ctx, world, &c.State, func() error { return readState(fsys, dir, m, &c.State) })
}

// readState reads the state of the checkpoint with manifest m.
func readState(fsys filesystem.FS, dir string, m *manifest, s *State) error {
	if err := m.read(fsys, dir, stateFile, s); err != nil {
		return err
	}
	path := objects.Join(dir, stateFile)
	switch {
	case s.Format != m.Format:
		return fmt.Errorf("%s has format %d, but its manifest has format %d", path, s.Format, m.Format)
	case s.Step != m.Step || s.Step < 0 || s.Updates < 0 || s.Updates > s.Step:
		return fmt.Errorf("%s is of step %d with %d updates, but its manifest is of step %d", path, s.Step, s.Updates,
			m.Step)
	}
	return nil
}

// read reads a JSON file that the manifest lists, and compares its hash.
func (m *manifest) read(fsys filesystem.FS, dir, name string, value any) error {
	path := objects.Join(dir, name)
	text, err := readSmall(fsys, path)
	if err != nil {
		return err
	}
	found := shards.FileInfo{Bytes: int64(len(text)), SHA256: fmt.Sprintf("%x", sha256.Sum256(text))}
	if err := compareFile(path, found, m.Files[name]); err != nil {
		return err
	}
	return decode(path, text, value)
}

// readManifest reads the manifest of a checkpoint and checks the sizes of the files in it. It finds
// a truncated large file without reading the file.
func readManifest(fsys filesystem.FS, dir string, m *manifest) error {
	path := objects.Join(dir, manifestFile)
	var version struct {
		Format int `json:"format"`
	}
	text, err := readSmall(fsys, path)
	if err != nil {
		return err
	}
	if err := strictjson.DecodeLoosely(text, &version); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if version.Format > format {
		return fmt.Errorf("%s has format %d, %w; this version reads 1 to %d", path, version.Format, errNewer,
			format)
	}
	if err := decode(path, text, m); err != nil {
		return err
	}
	if m.Format < 1 {
		return fmt.Errorf("%s has format %d; this version reads 1 to %d", path, m.Format, format)
	}
	if step, ok := stepOf(filepath.Base(dir)); ok && step != m.Step {
		return fmt.Errorf("%s is of step %d", path, m.Step)
	}
	if _, ok := m.Files[stateFile]; !ok {
		return fmt.Errorf("%s does not list %s", path, stateFile)
	}
	for _, names := range [][2]string{{modelFile, modelIndexFile}, {optimizerFile, optimizerIndexFile}} {
		_, single := m.Files[names[0]]
		_, index := m.Files[names[1]]
		switch {
		case m.Format == 1 && !single:
			return fmt.Errorf("%s does not list %s", path, names[0])
		case !single && !index:
			return fmt.Errorf("%s lists neither %s nor %s", path, names[0], names[1])
		case !single:
			// It would be read instead of the files that the index names.
			if _, err := fsys.Stat(objects.Join(dir, names[0])); err == nil {
				return fmt.Errorf("%s does not list the existing file %s, which belongs to another checkpoint", path,
					names[0])
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(m.Files)) {
		if name != filepath.Base(name) || name == manifestFile {
			return fmt.Errorf("%s lists %q, which is not the name of a checkpoint file", path, name)
		}
		file := objects.Join(dir, name)
		if info, err := fsys.Stat(file); errors.Is(err, fs.ErrNotExist) {
			return &missingFile{file, ", and " + manifestFile + " lists the file"}
		} else if err != nil {
			return err
		} else if want := m.Files[name]; info.Size() != want.Bytes {
			return wrongSize(file, info.Size(), want.Bytes)
		}
	}
	return nil
}

// verifyFiles compares the hashes of this rank's part of the files with the manifest, except for
// state.json. The sizes were checked before.
func verifyFiles(ctx context.Context, fsys filesystem.FS, dir string, files map[string]shards.FileInfo,
	rank, size int) error {
	var names []string
	var bytes []int64
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if name != stateFile { // readState compares it
			names, bytes = append(names, name), append(bytes, files[name].Bytes)
		}
	}
	ranks := make([]int, size)
	for r := range ranks {
		ranks[r] = r
	}
	for i, owner := range distribute(bytes, ranks, make([]int64, size)) {
		if owner != rank {
			continue
		}
		f, err := hashFile(ctx, fsys, objects.Join(dir, names[i]), files[names[i]])
		if err != nil {
			return fileError(rank, err)
		}
		if err := f.compare(); err != nil {
			return err
		}
	}
	return nil
}

// hashFile reads a file of the manifest, and returns it with its hash.
func hashFile(ctx context.Context, fsys filesystem.FS, path string, want shards.FileInfo) (*hashedFile, error) {
	f, err := openHashed(fsys, path, want)
	if err != nil {
		return nil, err
	}
	defer f.Close() // it was only read
	return f, f.finish(ctx)
}

// needShared is the remedy if ranks do not see the same run directory.
const needShared = "set output to a directory on a file system that all ranks share"

// An unjudged error leaves open whether a checkpoint is complete.
type unjudged struct{ error }

func (e unjudged) Unwrap() error { return e.error }

// A judgement is the result of one rank's verification of a checkpoint.
type judgement struct {
	collective.Failure
	Unjudged bool `json:"unjudged,omitempty"`
}

// allJudge combines the errors of all ranks about a checkpoint to an error that is the same on all
// ranks. The checkpoint is damaged if one rank has found damage.
func allJudge(ctx context.Context, world *comm.Comm, err error) error {
	if world.Size() == 1 {
		return err
	}
	failed, lost := collective.AnyFailed(ctx, world, err)
	if lost != nil {
		return unjudged{lost}
	}
	if !failed {
		return nil
	}
	all, gatherErr := collective.Gather(ctx, world, judgement{collective.FailureOf(err), err != nil && !damaged(err)})
	if gatherErr != nil {
		return unjudged{gatherErr}
	}
	var failures []collective.Failure
	decided := false
	for _, j := range all {
		failures = append(failures, j.Failure)
		decided = decided || j.Error != "" && !j.Unjudged
	}
	joined := collective.JoinFailures(failures, -1, nil)
	if joined != nil && !decided {
		return unjudged{joined}
	}
	return joined
}

// fromFirst calls read on rank 0 to fill value, and sends the value or the error to all ranks.
func fromFirst[T any](ctx context.Context, world *comm.Comm, value *T, read func() error) error {
	if world.Size() == 1 {
		return read()
	}
	var err error
	if world.Rank() == 0 {
		err = read()
	}
	if lost := collective.Broadcast(ctx, world, value); lost != nil {
		return unjudged{lost}
	}
	return allJudge(ctx, world, err)
}

// A missingFile is the error about a checkpoint that lacks a file.
type missingFile struct{ path, listed string }

func (e *missingFile) Error() string { return e.path + " is missing" + e.listed }
func (e *missingFile) Unwrap() error { return fs.ErrNotExist }

// readSmall reads a small file.
func readSmall(fsys filesystem.FS, path string) ([]byte, error) {
	info, err := fsys.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, &missingFile{path, ""}
	}
	if err != nil {
		return nil, err
	}
	if info.Size() > maxStateFile {
		return nil, fmt.Errorf("%s has %d bytes; the maximum is %d", path, info.Size(), maxStateFile)
	}
	return filesystem.ReadFile(fsys, path)
}

// decode decodes the text of a JSON file. It refuses unknown and repeated fields.
func decode(path string, text []byte, value any) error {
	if err := strictjson.Decode(text, value); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// damaged reports whether an error of verify means that the checkpoint is damaged: its
// content is wrong, or files are missing. Other errors may be temporary, such as a file server that
// does not answer, or concern a format of a newer version.
func damaged(err error) bool {
	if errors.Is(err, errNewer) || errors.As(err, new(unjudged)) {
		return false
	}
	var failed *fs.PathError
	return !errors.As(err, &failed) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR)
}
