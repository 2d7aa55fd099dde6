// Package rundir creates, checks and locks the directory of a run, and names the files in it.
package rundir

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"syscall"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/locks"
	"mula/internal/strictyaml"
	"mula/train/checkpoint"
)

// Names in a run directory.
const (
	ConfigFile     = "train.yaml"
	MetricsFile    = "metrics.jsonl"
	SkipsFile      = "skips.yaml"
	TensorBoardDir = "tensorboard"
	SnapshotsFile  = "snapshots.json" // names the snapshots of the run
	lockFile       = ".lock"
)

// ConfigComment is the first line of every train.yaml that mula train writes.
const ConfigComment = "# The configuration of this run with every default written out, by mula train.\n"

// A Dir is a run directory to which only this process writes.
type Dir struct {
	Path string
	FS   filesystem.FS // on which the directory is; nil: the machine's
	lock *locks.File   // nil on all ranks but one
}

// Open creates the directory if necessary, locks it, and removes temporary files of killed
// processes. The lock ends with the process; its file remains. Open refuses a directory whose
// train.yaml was not written by a run, because a run would overwrite the file. After Open, this
// host sees the files and checkpoints that other hosts have written until then.
func Open(fsys filesystem.FS, path string) (*Dir, error) {
	fsys = filesystem.Default(fsys)
	if err := checkRunDir(fsys, path); err != nil {
		return nil, err
	}
	err := filesystem.MkdirAll(fsys, filepath.Join(path, checkpoint.DirName), 0o755)
	if errors.Is(err, syscall.ENOTDIR) {
		return nil, &strictyaml.FieldError{Field: "output",
			Message: fmt.Sprintf(" is %s, but %s is a file; write the path of a directory for the run", path,
				notDirectory(err, path)), Cause: err}
	} else if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return nil, &strictyaml.FieldError{Field: "output",
			Message: fmt.Sprintf(" is %s, which cannot be created (%s); write the path of a writable directory",
				path, err), Cause: err}
	} else if err != nil {
		return nil, fmt.Errorf("creating the run directory %s: %w", path, err)
	}
	lock, err := locks.HoldOn(fsys, filepath.Join(path, lockFile))
	if errors.Is(err, locks.ErrHeld) {
		return nil, fmt.Errorf("another process is training in %s; wait for it, stop it, or choose another output",
			path)
	}
	if err != nil {
		return nil, err
	}
	d := &Dir{path, fsys, lock}
	checkpoints := d.Join(checkpoint.DirName)
	if err := errors.Join(lookAgain(fsys, path), lookAgain(fsys, checkpoints), checkpoint.RemoveTemporary(fsys, path),
		checkpoint.FinishModels(fsys, checkpoints), checkpoint.RemoveTemporary(fsys, checkpoints)); err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

// lookAgain makes this host see the names in a directory as they are. On a network file system such
// as NFS, a host may remember for up to a minute which names a directory has, and which it lacks,
// but not after it has changed the directory.
func lookAgain(fsys filesystem.FS, dir string) error {
	f, err := atomicfile.On(fsys).Create(filepath.Join(dir, "look"))
	if err != nil {
		return err
	}
	f.Abort()
	return nil
}

// checkRunDir refuses a directory whose train.yaml was not written by a run.
func checkRunDir(fsys filesystem.FS, path string) error {
	if own := filepath.Join(path, ConfigFile); !writtenByTrain(fsys, own) {
		return fmt.Errorf("output %s: mula writes the run's configuration to %s, but that file exists and is "+
			"not from a run; choose another output", path, own)
	}
	return nil
}

// Inspect checks a run directory, or the folder in which it would be created, and changes
// nothing.
func Inspect(fsys filesystem.FS, path string) (*Dir, error) {
	fsys = filesystem.Default(fsys)
	if err := checkRunDir(fsys, path); err != nil {
		return nil, err
	}
	for at := filepath.Clean(path); ; at = filepath.Dir(at) {
		info, err := fsys.Stat(at)
		switch {
		case err == nil && !info.IsDir():
			return nil, &strictyaml.FieldError{Field: "output",
				Message: fmt.Sprintf(" is %s, but %s is a file; write the path of a directory for the run", path, at),
				Cause:   syscall.ENOTDIR}
		case err == nil:
			return &Dir{Path: path, FS: fsys}, nil
		case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) || at == filepath.Dir(at):
			return nil, fmt.Errorf("reading the run directory %s: %w", path, err)
		}
	}
}

// notDirectory is the file in the way of a directory, from the error of MkdirAll.
func notDirectory(err error, path string) string {
	var where *fs.PathError
	if errors.As(err, &where) {
		return where.Path
	}
	return path
}

// writtenByTrain reports whether a train.yaml can be replaced: a run has written it, or it does not
// exist.
func writtenByTrain(fsys filesystem.FS, path string) bool {
	f, err := filesystem.Open(fsys, path)
	if err != nil {
		return true // for other reasons than a missing file, writing it will fail
	}
	defer f.Close()
	head := make([]byte, len(ConfigComment))
	n, _ := io.ReadFull(f, head)
	return string(head[:n]) == ConfigComment
}

// Join returns the path of a name in the directory.
func (d *Dir) Join(name string) string { return filepath.Join(d.Path, name) }

// Close releases the lock. Only one rank has the lock.
func (d *Dir) Close() error {
	if d.lock == nil {
		return nil
	}
	return d.lock.Close()
}
