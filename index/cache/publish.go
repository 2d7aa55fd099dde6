package cache

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"sync"

	"mula/internal/atomicfile"
	"mula/internal/locks"
)

// How a unit gets its names, and what a kill leaves.
//
// A reader goes by the marker, and a later run of this package by marker, record (settings and
// sizes) and data files. They keep two promises at every moment, also when the machine loses power
// between two system calls:
//
//	A. If the marker is there, each data file is there and whole, and all were built with the same settings.
//	B. If the record is there, each data file that is there was built with the settings of the record, and is whole.
//
// From B it follows that a run that finds the record of its own settings may keep any data file of
// the right size; from A and B, that it may keep the unit if there is a marker besides. Without a
// record the data files say nothing about how they were made, so they are built anew, unless there
// is a marker (then another program vouches for them).
//
// The order that keeps them, each step on disk before the next is taken (in brackets what is found
// after a kill behind it, and what the next run does):
//
// The parts of a unit of several are published one after the other, under the unit's lock, each by
// the steps below as what the part before has left asks for: the first writes the record, and the
// one that finds all other files there the marker.
//
//  1. All files, record and marker are written under temporary names and synced. [The unit as it was before; temporary files, which are
//     removed as soon as their process is known to be gone, or are a day old.]
//  2. If there is a marker, it is removed. [B holds: the run with the old settings keeps the data files, one with new settings goes on.]
//  3. If data files cannot be kept, they are removed. [Record of the old settings, some data files of the old settings.]
//  4. The record gets its name, unless the right one is there. [Record of the new settings, no data file, or only those kept. If the
//     record came after the data files instead, a kill between them would leave data files without a record, and in step 3's case the
//     old record with new data files, against B. If it came before step 3, the new record with old data files.]
//  5. The data files get their names. [Record, some data files: the next run builds the others, and does not touch these.]
//  6. The marker gets its name. [Complete.]
//
// Steps 2 and 3 apply only when something is built anew; readers that look between 2 and 6 find no
// unit, and those that had opened the old files go on reading them.

// errLost says that another process has taken the unit over, believing this one dead.
var errLost = errors.New("another process has taken the unit over")

// A job is a unit that was built and is to be published.
type job struct {
	*unit
	findings
	lock   *locks.Lock         // of the part
	images []*atomicfile.Image // nil: the file is there
}

// abort ends the job: it removes the temporary files that were not renamed and gives back the lock.
func (j *job) abort() {
	j.jobs.Add(-1)
	for _, m := range j.images {
		if m != nil {
			m.Abort()
		}
	}
	j.lock.Release()
}

// publish carries out the steps above, and says whether the unit is complete.
func (r *run) publish(ctx context.Context, j *job) (complete bool, err error) {
	for _, m := range j.images {
		if m == nil {
			continue
		}
		if err := m.Seal(); err != nil {
			return false, err
		}
	}
	held := []*locks.Lock{j.lock}
	ours := func() bool { return !slices.ContainsFunc(held, func(l *locks.Lock) bool { return !l.Ours() }) }
	if len(j.Parts) > 1 {
		l, err := r.locks.Wait(ctx, filepath.Join(r.state, j.Marker+locks.Suffix), r.timing.poll)
		if err != nil {
			return false, err
		}
		defer l.Release()
		held = append(held, l)
		sizes := j.sizes
		if j.findings, err = r.inspect(ctx, j.unit); err != nil {
			return false, err
		}
		if j.findings.complete {
			return false, errLost
		}
		j.sizes = sizes
	}
	var record *atomicfile.File
	if !j.recorded {
		text, err := recordText(j.unit, j.sizes)
		if err != nil {
			return false, err
		}
		if record, err = sealed(r.recordPath(j.unit), text); err != nil {
			return false, err
		}
		defer record.Abort()
	}
	marker, err := sealed(filepath.Join(r.dir, j.Marker), j.MarkerText)
	if err != nil {
		return false, err
	}
	defer marker.Abort()

	if err := ctx.Err(); err != nil {
		return false, context.Cause(ctx)
	}
	if !ours() {
		return false, errLost
	}
	if j.findings.marker {
		if err := atomicfile.Remove(filepath.Join(r.dir, j.Marker)); err != nil {
			return false, err
		}
		if err := r.dirSync.sync(); err != nil {
			return false, err
		}
	}
	if j.stale {
		for _, name := range j.Files {
			if err := atomicfile.Remove(filepath.Join(r.dir, name)); err != nil {
				return false, err
			}
		}
		if err := r.dirSync.sync(); err != nil {
			return false, err
		}
	}
	if record != nil {
		if err := record.Rename(); err != nil {
			return false, err
		}
		if err := r.stateSync.sync(); err != nil {
			return false, err
		}
	}
	complete = true
	for i, m := range j.images {
		if m == nil {
			complete = complete && j.have[i]
			continue
		}
		if err := m.Rename(); err != nil {
			return false, err
		}
	}
	if err := r.dirSync.sync(); err != nil {
		return false, err
	}
	if !ours() {
		return false, errLost
	}
	if !complete {
		return false, nil
	}
	if err := marker.Rename(); err != nil {
		return false, err
	}
	return true, r.dirSync.sync()
}

// sealed writes a small file up to its renaming.
func sealed(path string, text []byte) (*atomicfile.File, error) {
	f, err := atomicfile.Create(path)
	if err != nil {
		return nil, err
	}
	if _, err = f.Write(text); err == nil {
		err = f.Seal()
	}
	if err != nil {
		f.Abort()
		return nil, err
	}
	return f, nil
}

// A syncer brings the entries of a directory to disk for many goroutines with few calls: all that
// ask while one call runs are served by the next.
type syncer struct {
	dir string

	mu            sync.Mutex
	turn          *sync.Cond
	begun, served int64 // calls
	running       bool
	err           error // the first; the run ends with it
}

// sync returns when a call that began after sync was called has ended.
func (s *syncer) sync() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.turn == nil {
		s.turn = sync.NewCond(&s.mu)
	}
	for want := s.begun + 1; s.served < want; {
		if s.running {
			s.turn.Wait()
			continue
		}
		s.running = true
		s.begun++
		n := s.begun
		s.mu.Unlock()
		err := atomicfile.SyncDir(s.dir)
		s.mu.Lock()
		s.running, s.served = false, n
		if s.err == nil {
			s.err = err
		}
		s.turn.Broadcast()
	}
	return s.err
}
