package cache

import (
	"context"
	"errors"
	"slices"
	"sync"

	"mula/internal/atomicfile"
	"mula/internal/locks"
	"mula/internal/objects"
)

// How a unit is published, and what remains after a kill.
//
// Readers use the marker. Later runs of this package use the marker, the record (settings and
// sizes) and the data files. These keep two invariants at every moment, even if the machine loses
// power between two system calls:
//
//	A. If the marker exists, every data file exists and is complete, and all were built with
//	   the same settings.
//	B. If the record exists, every existing data file is complete and was built with the
//	   record's settings.
//
// By B, a run that finds a record with its own settings may keep any data file of the right size.
// By A and B, it may keep the whole unit if there is also a marker. Without a record, the origin of
// the data files is unknown and they are rebuilt, unless there is a marker. Then another program
// built the unit.
//
// A unit of several parts is published one part after the other, under the unit's lock. Each part
// executes the steps below that are still needed: the first part writes the record, and
// the part that finds all other files complete writes the marker.
//
// Each step is on disk before the next begins. In brackets: the state after a kill following the
// step, and what the next run does.
//
// 1. All files, record and marker are written under temporary names and synced. [The unit is
//    unchanged. Temporary files are removed once their process is known to be dead, or after
//    a day.]
// 2. An existing marker is removed. [B holds: a run with the old settings keeps the data
//    files, a run with new settings continues.]
// 3. Data files that cannot be kept are removed. [The record of the old settings, and some
//    data files of the old settings.]
// 4. The record is renamed into place, unless the right record exists. [The record of the new
//    settings, and no data files except kept ones. If the record followed the data files
//    instead, a kill between them would leave data files without a record, and after step 3
//    the old record with new data files, which violates B. If it preceded step 3, the new
//    record would exist with old data files.]
// 5. The data files are renamed into place. [The record and some data files: the next run
//    builds the others and does not touch these.]
// 6. The marker is renamed into place. [Complete.]
//
// Steps 2 and 3 happen only when something is rebuilt. Readers that look between steps 2 and 6 find
// no unit. Readers that opened the old files before can continue to read them.

// errLost means that another process assumed that this process was dead and took the unit over.
var errLost = errors.New("another process has taken the unit over")

// A job is a built unit that is being published.
type job struct {
	*unit
	findings
	lock   *locks.Lock         // of the part
	images []*atomicfile.Image // nil: the file exists already
}

// abort ends the job: it removes the temporary files that were not renamed and releases the lock.
func (j *job) abort() {
	j.jobs.Add(-1)
	for _, m := range j.images {
		if m != nil {
			m.Abort()
		}
	}
	j.lock.Release()
}

// publish carries out the steps above, and reports whether the unit is complete.
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
		l, err := r.locks.Wait(ctx, objects.Join(r.state, j.Marker+locks.Suffix), r.timing.poll)
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
		if record, err = r.sealed(r.recordPath(j.unit), text); err != nil {
			return false, err
		}
		defer record.Abort()
	}
	marker, err := r.sealed(objects.Join(r.dir, j.Marker), j.MarkerText)
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
		if err := r.files.Remove(objects.Join(r.dir, j.Marker)); err != nil {
			return false, err
		}
		if err := r.dirSync.sync(); err != nil {
			return false, err
		}
	}
	if j.stale {
		for _, name := range j.Files {
			if err := r.files.Remove(objects.Join(r.dir, name)); err != nil {
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
func (r *run) sealed(path string, text []byte) (*atomicfile.File, error) {
	f, err := r.files.Create(path)
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

// A syncer syncs the entries of a directory for many goroutines with few calls: the next call
// serves all requests that arrive while one call runs.
type syncer struct {
	files atomicfile.Files
	dir   string

	mu            sync.Mutex
	turn          *sync.Cond
	begun, served int64 // calls
	running       bool
	err           error // the first error; the run ends with it
}

// sync returns when a call that started after sync was called has ended.
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
		err := s.files.SyncDir(s.dir)
		s.mu.Lock()
		s.running, s.served = false, n
		if s.err == nil {
			s.err = err
		}
		s.turn.Broadcast()
	}
	return s.err
}
