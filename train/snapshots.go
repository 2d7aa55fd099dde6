package train

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"mula/blend/fingerprint"
	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/strictjson"
	"mula/internal/strictyaml"
	"mula/train/checkpoint"
	"mula/train/collective"
	"mula/train/record"
	"mula/train/rundir"
	"mula/xpu/comm"
)

// memoryFolder is the folder of snapshots without checkpoint.snapshot_dir.
const memoryFolder = "/dev/shm"

// checkSnapshotDir validates checkpoint.snapshot_dir.
func checkSnapshotDir(dir string) error {
	if dir == "" || filepath.IsAbs(dir) {
		return nil
	}
	return strictyaml.Invalid("checkpoint.snapshot_dir", "is %q; it must be an absolute path, such as %s", dir,
		memoryFolder)
}

// snapshots writes the snapshots of a run at the steps of the configuration. Every rank has it.
type snapshots struct {
	passive
	run     *run
	records *records // nil on other ranks than the first
	failed  bool     // the last snapshot failed, and a warning has the reason
}

// restored implements observer. It removes what earlier processes have left.
func (o *snapshots) restored(*checkpoint.Checkpoint, bool) error {
	s := o.run.history.snapshots
	if err := o.run.recordAttempt(s); err != nil {
		return err
	}
	if err := errors.Join(s.RemoveTemporary(), s.RemoveUntil(o.run.history.saved)); err != nil {
		o.run.warn("old snapshots could not be removed: %v", err)
	}
	return nil
}

// stepped implements observer. An error does not end the run, except an error of the weights or of
// the group: the older snapshot stays.
func (o *snapshots) stepped(ctx context.Context, _ *Progress) error {
	r := o.run
	step := r.state.Step
	if step%r.config.Checkpoint.SnapshotEvery != 0 || step == r.config.Steps || step == r.history.saved {
		return nil
	}
	start := time.Now()
	defer r.clock.begin(r.clock.begin(saving))
	if err := r.checkState(ctx); err != nil {
		return err
	}
	if err := r.optimizer.Average(ctx, true); err != nil {
		return err
	}
	defer r.optimizer.Average(ctx, false)
	size, err := r.history.snapshots.Save(ctx, r.ranks.World(), r.state, checkpoint.NewShard(r.model, r.optimizer),
		r.history.saved)
	if err != nil && (ctx.Err() != nil || errors.Is(err, comm.ErrPeerLost)) {
		return err
	}
	if err != nil && !o.failed {
		r.warn("%v; the run continues, but a restart may lose more steps; make %s larger, or set "+
			"checkpoint.snapshot_every to 0", err, r.snapshotFolder())
	}
	if o.failed = err != nil; o.failed || o.records == nil {
		return nil
	}
	return o.records.metrics.Append(metricsLine{Step: &step, Snapshot: &record.Snapshot{Bytes: size,
		Seconds: record.Seconds(time.Since(start).Seconds())}})
}

// snapshotsRecord is snapshots.json in the run directory.
type snapshotsRecord struct {
	// ID names the snapshots that the run may resume from. A run that goes back has a new one, so
	// that it does not resume from a snapshot of later steps on any host.
	ID string `json:"id"`
	// Attempts have written the steps in the records, the oldest first.
	Attempts []checkpoint.SnapshotAttempt `json:"attempts,omitempty"`
}

// openSnapshots prepares the snapshots of the run, if it has some.
func (r *run) openSnapshots(ctx context.Context) error {
	if r.config.Checkpoint.SnapshotEvery == 0 {
		return nil
	}
	var saved snapshotsRecord
	var err error
	if r.leads() {
		saved, err = r.readSnapshots()
	}
	if r.config.Checkpoint.SnapshotDir == "" && r.options.memory == nil && err == nil {
		if info, statErr := os.Stat(memoryFolder); statErr != nil || !info.IsDir() {
			err = strictyaml.Invalid("checkpoint.snapshot_dir", "must be set, because this machine has no folder %s; "+
				"write a folder in memory, or set checkpoint.snapshot_every to 0", memoryFolder)
		}
	}
	if err := collective.Agree(ctx, r.ranks.World(), err); err != nil {
		return err
	}
	return r.setSnapshots(ctx, saved)
}

// readSnapshots reads snapshots.json. It creates a missing one, except in a dry run, which gets the
// ID "".
func (r *run) readSnapshots() (snapshotsRecord, error) {
	path := r.dir.Join(rundir.SnapshotsFile)
	text, err := filesystem.ReadFile(r.dir.FS, path)
	switch {
	case errors.Is(err, fs.ErrNotExist) && r.options.DryRun:
		return snapshotsRecord{}, nil
	case errors.Is(err, fs.ErrNotExist):
		saved := snapshotsRecord{ID: randomHex()}
		return saved, r.writeSnapshots(saved)
	case err != nil:
		return snapshotsRecord{}, err
	}
	var saved snapshotsRecord
	if err := strictjson.Decode(text, &saved); err != nil {
		return saved, fmt.Errorf("%s: %w", path, err)
	}
	if _, err := hex.DecodeString(saved.ID); err != nil || saved.ID == "" {
		return saved, fmt.Errorf("%s: the id %q is not hexadecimal; remove the file to ignore older snapshots", path,
			saved.ID)
	}
	return saved, nil
}

// writeSnapshots writes snapshots.json.
func (r *run) writeSnapshots(saved snapshotsRecord) error {
	text, err := json.Marshal(saved)
	if err != nil {
		return err
	}
	out, path := atomicfile.On(r.dir.FS), r.dir.Join(rundir.SnapshotsFile)
	if err := out.WriteFile(path, append(text, '\n')); err != nil {
		return err
	}
	return out.SyncDir(r.dir.Path)
}

// recordAttempt adds this start to snapshots.json, before it does a step. Newer snapshots of
// earlier attempts than the state from which the run resumes are not used any more: the records of
// their steps will be replaced.
func (r *run) recordAttempt(s *checkpoint.Snapshots) error {
	if !r.leads() {
		return nil
	}
	earlier := s.Attempts
	if len(earlier) == 0 {
		earlier = []checkpoint.SnapshotAttempt{{}} // of an older version
	}
	var attempts []checkpoint.SnapshotAttempt
	for _, a := range earlier {
		if a.Until == 0 || a.Until > r.state.Step {
			a.Until = r.state.Step
		}
		if a.Name != s.Attempt() && a.Until > max(r.history.saved, 0) { // else the checkpoint is newer
			attempts = append(attempts, a)
		}
	}
	s.Attempts = append(attempts, checkpoint.SnapshotAttempt{Name: s.Attempt()})
	return r.writeSnapshots(snapshotsRecord{s.Run(), s.Attempts})
}

func randomHex() string {
	b := make([]byte, 8)
	rand.Read(b)
	return hex.EncodeToString(b)
}

// snapshotFolder returns the folder of each host for snapshots.
func (r *run) snapshotFolder() string { return cmp.Or(r.config.Checkpoint.SnapshotDir, memoryFolder) }

// setSnapshots sets the snapshots of the run. saved is snapshots.json on rank 0. The run has none
// if the ID is "".
func (r *run) setSnapshots(ctx context.Context, saved snapshotsRecord) error {
	names := struct {
		Saved   snapshotsRecord
		Attempt string
	}{saved, randomHex()}
	if err := collective.Broadcast(ctx, r.ranks.World(), &names); err != nil {
		return err
	}
	if names.Saved.ID == "" {
		return nil
	}
	r.history.snapshots = checkpoint.NewSnapshots(r.options.memory, r.snapshotFolder(), names.Saved.ID, names.Attempt,
		r.ranks.Hosts, r.ranks.Rank())
	r.history.snapshots.Attempts = names.Saved.Attempts
	return nil
}

// renameSnapshots gives the snapshots of the run a new name, so that the run never resumes from the
// snapshots of before, and removes these.
func (r *run) renameSnapshots(ctx context.Context) error {
	old := r.history.snapshots
	if old == nil {
		return nil
	}
	saved := snapshotsRecord{ID: randomHex()}
	var err error
	if r.leads() {
		err = r.writeSnapshots(saved)
	}
	if err := collective.Agree(ctx, r.ranks.World(), err); err != nil {
		return err
	}
	if err := old.Remove(); err != nil {
		r.warn("old snapshots could not be removed: %v", err)
	}
	return r.setSnapshots(ctx, saved)
}

// removeSnapshots removes the snapshots of the run on this rank's host, when the run has a
// checkpoint of its last step.
func (r *run) removeSnapshots() {
	if s := r.history.snapshots; s != nil {
		if err := s.Remove(); err != nil {
			r.warn("the snapshots could not be removed: %v", err)
		}
	}
}

// recordedSteps returns the number of steps in the records of the run. The records of a snapshot
// are on disk before the snapshot is complete. They lack a snapshot's steps if the run has since
// resumed from an older state, on other hosts.
func (r *run) recordedSteps() (int64, error) {
	done, err := record.StepsDone(r.dir.FS, r.dir.Join(rundir.MetricsFile))
	if err != nil {
		return 0, err
	}
	prints, err := record.StepsDone(r.dir.FS, r.dir.Join(fingerprint.LogFile))
	return min(done, prints), err
}

// newest returns the state to resume from: the newest checkpoint of the run that is not refused, or
// a newer snapshot, or nil. If all checkpoints are damaged, it returns a snapshot or an error. The
// files of the result that the run will load are not yet verified.
func (r *run) newest(ctx context.Context) (*checkpoint.Checkpoint, error) {
	saved, err := r.newestSaved(ctx)
	if r.history.snapshots == nil || err != nil && !errors.Is(err, checkpoint.ErrAllDamaged) {
		return saved, err
	}
	allDamaged := err
	until := int64(-1) // the newest snapshot that can be used
	if err = nil; r.leads() {
		until, err = r.recordedSteps()
	}
	if err := collective.Agree(ctx, r.ranks.World(), err); err != nil {
		return nil, err
	}
	if err := collective.Broadcast(ctx, r.ranks.World(), &until); err != nil {
		return nil, err
	}
	found, refused, err := r.history.snapshots.Find(ctx, r.ranks.World(), saved, r.history.refused,
		min(until, r.config.Steps-1))
	r.refuse(refused...)
	if err != nil || found == nil {
		return saved, cmp.Or(err, allDamaged)
	}
	if r.history.saved = -1; saved != nil {
		r.history.saved = saved.State.Step
	}
	return found, nil
}
