package checkpoint

import (
	"context"
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

// verify compares every file of a checkpoint with the manifest and returns the state.
// Errors name the file. All ranks of world call it. Each rank reads some of the files, and all get
// the same result.
func verify(ctx context.Context, world *comm.Comm, dir string) (State, error) {
	var m manifest
	if err := fromFirst(ctx, world, &m, func() error { return readManifest(filesystem.OS{}, dir, &m) }); err != nil {
		return State{}, err
	}
	if err := allJudge(ctx, world, verifyFiles(ctx, dir, m, world.Rank(), world.Size())); err != nil {
		return State{}, err
	}
	var s State
	err := fromFirst(ctx, world, &s, func() error { return readState(filesystem.OS{}, dir, &m, &s) })
	return s, err
}

// readState reads the state of the checkpoint with manifest m.
func readState(fsys filesystem.FS, dir string, m *manifest, s *State) error {
	path := objects.Join(dir, stateFile)
	if err := decodeFile(fsys, path, s, strictjson.Decode); err != nil {
		return err
	}
	switch {
	case s.Format != m.Format:
		return fmt.Errorf("%s has format %d, but its manifest has format %d", path, s.Format, m.Format)
	case s.Step != m.Step || s.Step < 0 || s.Updates < 0 || s.Updates > s.Step:
		return fmt.Errorf("%s is of step %d with %d updates, but its manifest is of step %d", path, s.Step, s.Updates,
			m.Step)
	}
	return nil
}

// readManifest reads the manifest of a checkpoint and checks the sizes of the files in it. It finds
// a truncated large file without reading the file.
func readManifest(fsys filesystem.FS, dir string, m *manifest) error {
	path := objects.Join(dir, manifestFile)
	var version struct {
		Format int `json:"format"`
	}
	if err := decodeFile(fsys, path, &version, strictjson.DecodeLoosely); err != nil {
		return err
	}
	if version.Format > format {
		return fmt.Errorf("%s has format %d, %w; this version reads 1 to %d", path, version.Format, errNewer,
			format)
	}
	if err := decodeFile(fsys, path, m, strictjson.Decode); err != nil {
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
			return fmt.Errorf("%s has %d bytes, but %s says %d; one of the two files was changed", file, info.Size(),
				manifestFile, want.Bytes)
		}
	}
	return nil
}

// verifyFiles compares the hashes of this rank's files of a checkpoint with the manifest. The sizes
// were checked before.
func verifyFiles(ctx context.Context, dir string, m manifest, rank, size int) error {
	names := slices.Sorted(maps.Keys(m.Files))
	bytes, ranks := make([]int64, len(names)), make([]int, size)
	for i, name := range names {
		bytes[i] = m.Files[name].Bytes
	}
	for r := range ranks {
		ranks[r] = r
	}
	for i, owner := range distribute(bytes, ranks, make([]int64, size)) {
		if owner != rank {
			continue
		}
		path, want := objects.Join(dir, names[i]), m.Files[names[i]]
		hash, size, err := shards.HashFile(ctx, path, nil)
		switch {
		case ctx.Err() != nil && errors.Is(err, ctx.Err()):
			return unjudged{err}
		case rank != 0 && errors.Is(err, fs.ErrNotExist):
			return unjudged{fmt.Errorf("cannot see %s, which rank 0 sees; %s", path, needShared)}
		case err != nil:
			return err
		case size != want.Bytes || hash != want.SHA256:
			return fmt.Errorf("%s has SHA-256 %s, but %s says %s; one of the two files was changed", path, hash,
				manifestFile, want.SHA256)
		}
	}
	return nil
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
	var own *T
	if world.Rank() == 0 {
		err, own = read(), value
	}
	values, gatherErr := collective.Gather(ctx, world, own)
	if gatherErr != nil {
		return unjudged{gatherErr}
	}
	*value = *values[0]
	return allJudge(ctx, world, err)
}

// A missingFile is the error about a checkpoint that lacks a file.
type missingFile struct{ path, listed string }

func (e *missingFile) Error() string { return e.path + " is missing" + e.listed }
func (e *missingFile) Unwrap() error { return fs.ErrNotExist }

// readJSON reads a small JSON file. It refuses unknown and repeated fields.
func readJSON(path string, value any) error {
	return decodeFile(filesystem.OS{}, path, value, strictjson.Decode)
}

// decodeFile reads a small JSON file with a function of package strictjson.
func decodeFile(fsys filesystem.FS, path string, value any, decode func([]byte, any) error) error {
	info, err := fsys.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return &missingFile{path, ""}
	}
	if err != nil {
		return err
	}
	if info.Size() > maxStateFile {
		return fmt.Errorf("%s has %d bytes; the maximum is %d", path, info.Size(), maxStateFile)
	}
	data, err := filesystem.ReadFile(fsys, path)
	if err != nil {
		return err
	}
	if err := decode(data, value); err != nil {
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
