package train

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"mula/internal/atomicfile"
	"mula/internal/objects"
	"mula/train/checkpoint"
	"mula/train/collective"
	"mula/train/record"
)

// copies copies the checkpoints of a run to an object store, in the background. Only rank 0 has it.
// One checkpoint is copied at a time, and one more waits. If a newer checkpoint is saved meanwhile,
// the waiting one is not copied.
type copies struct {
	passive
	run   *run
	store checkpoint.Store

	running *copying           // nil if there is none
	next    *checkpoint.Upload // nil if none waits
	failed  error              // of the checkpoint that was copied last
}

// A copying is a copy in progress.
type copying struct {
	cancel context.CancelFunc
	result chan copyResult
	reads  atomic.Int64 // number of reads of files, which shows that the copy makes progress
}

// A copyResult has the error of a copy, and of the removal of older ones.
type copyResult struct{ err, pruning error }

// checkCopies validates checkpoint.copies.
func checkCopies(url string) error {
	switch {
	case url == "":
		return nil
	case !objects.IsURL(url):
		return fmt.Errorf("checkpoint.copies is %q; it must be the URL of a folder in an object store, such as "+
			"s3://bucket/run", url)
	}
	if err := objects.Check(url); err != nil {
		return fmt.Errorf("checkpoint.copies: %w", err)
	}
	return nil
}

// newCopies returns the copies of a run, or nil if the run has none.
func newCopies(r *run) (*copies, error) {
	if r.config.Checkpoint.Copies == "" {
		return nil, nil
	}
	store, err := checkpoint.OpenStore(r.config.Checkpoint.Copies)
	return &copies{run: r, store: store}, err
}

// restored implements observer: a run that went back must not resume from a later copy.
func (c *copies) restored(_ *checkpoint.Checkpoint, rollback bool) error {
	if !rollback {
		return nil
	}
	c.close()
	ctx := context.Background() // objects have their own time limits
	if err := c.store.RemoveAfter(ctx, c.run.state.Step); err != nil {
		return fmt.Errorf("removing the copies of later checkpoints from %s: %w", c.run.config.Checkpoint.Copies, err)
	}
	return nil
}

// start begins to copy the checkpoint in dir. An error does not end the run: the checkpoint is on
// the local disk, and the next one is copied again.
func (c *copies) start(ctx context.Context, dir string) {
	entries, err := c.run.dir.FS.ReadDir(c.run.dir.Path)
	var records []string
	for _, e := range entries {
		if filepath.Ext(e.Name()) == ".jsonl" {
			records = append(records, c.run.dir.Join(e.Name()))
		}
	}
	var u *checkpoint.Upload
	if err == nil {
		u, err = c.store.Prepare(c.run.dir.FS, dir, records)
	}
	if err != nil {
		c.ended(copyResult{err: fmt.Errorf("%s: %w", filepath.Base(dir), err)})
		return
	}
	if c.next != nil {
		c.run.warn("checkpoint %s is not copied to %s, because an older one is still being copied; set "+
			"checkpoint.every higher", c.next.Name(), c.run.config.Checkpoint.Copies)
		c.next.Close()
	}
	c.next = u
	c.advance(ctx)
}

// stepped implements observer: it starts the next copy.
func (c *copies) stepped(ctx context.Context, _ *Progress) error {
	if c.running != nil {
		select {
		case result := <-c.running.result:
			c.running = nil
			c.ended(result)
		default:
		}
	}
	c.advance(ctx)
	return nil
}

// ended records the result of a copy.
func (c *copies) ended(result copyResult) {
	if c.failed = result.err; c.failed != nil {
		c.run.warn("checkpoints: copying to %s: %v", c.run.config.Checkpoint.Copies, c.failed)
	}
	if result.pruning != nil {
		c.run.warn("checkpoints: older copies could not be removed from %s: %v", c.run.config.Checkpoint.Copies,
			result.pruning)
	}
}

// advance starts to copy the waiting checkpoint if none is being copied.
func (c *copies) advance(ctx context.Context) {
	if c.running != nil || c.next == nil {
		return
	}
	u := c.next
	keep := checkpoint.Kept{Newest: c.run.config.Checkpoint.KeepCopies, ModelEvery: c.run.config.Checkpoint.KeepEvery}
	ctx, cancel := context.WithCancel(ctx)
	job := &copying{cancel: cancel, result: make(chan copyResult, 1)}
	c.next, c.running = nil, job
	go func() {
		defer u.Close()
		var result copyResult
		if result.err = u.Run(ctx, func() { job.reads.Add(1) }); result.err == nil {
			result.pruning = c.store.Prune(ctx, keep)
		}
		job.result <- result
	}()
}

// wait waits until the newest checkpoint is copied, and returns the error if it could not be.
func (c *copies) wait(ctx context.Context) error {
	seen := int64(-1)
	for c.running != nil || c.next != nil {
		c.advance(ctx)
		select {
		case result := <-c.running.result:
			c.running = nil
			c.ended(result)
		case <-time.After(time.Second):
			if now := c.running.reads.Load(); now != seen { // a copy that makes progress is not a hang
				seen = now
				c.run.history.heartbeat.Beat(record.SectionCheckpoint, c.run.state.Step)
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	if c.failed != nil {
		return fmt.Errorf("the last checkpoint is complete, but not its copy in %s: %w; run the same command to copy "+
			"it", c.run.config.Checkpoint.Copies, c.failed)
	}
	return nil
}

// copyFinished copies the last checkpoint of a run that was finished before, unless it was copied
// then.
func (r *run) copyFinished(ctx context.Context, saved *checkpoint.Checkpoint) error {
	var err error
	if r.leads() {
		err = r.copyUnlessCopied(ctx, saved)
	}
	return collective.Agree(ctx, r.ranks.World(), err)
}

func (r *run) copyUnlessCopied(ctx context.Context, saved *checkpoint.Checkpoint) error {
	c, err := newCopies(r)
	if c == nil || err != nil {
		return err
	}
	if step, err := c.store.Newest(ctx); err != nil || step >= saved.State.Step {
		return err
	}
	defer c.close()
	c.start(ctx, saved.Dir)
	return c.wait(ctx)
}

// close ends a copy in progress. An incomplete copy has no manifest.
func (c *copies) close() {
	if c.running != nil {
		c.running.cancel()
		<-c.running.result
		c.running = nil
	}
	if c.next != nil {
		c.next.Close()
		c.next = nil
	}
}

// newestSaved returns the newest checkpoint of the run that is not refused, or nil. If the object
// store has a newer one, it is fetched first. Damaged checkpoints are refused. The files of the
// result that the run will load are not yet verified.
func (r *run) newestSaved(ctx context.Context) (*checkpoint.Checkpoint, error) {
	saved, err := r.newestLocal(ctx)
	if r.config.Checkpoint.Copies == "" || err != nil && !errors.Is(err, checkpoint.ErrAllDamaged) {
		return saved, err // a copy must not replace a checkpoint that may be good
	}
	world := r.ranks.World()
	step := int64(-1) // of the copy to fetch
	var fetchErr error
	if r.leads() {
		step, fetchErr = r.fetchCopy(ctx, r.dir.Join(checkpoint.DirName), saved)
	}
	if err := collective.Agree(ctx, world, fetchErr); err != nil {
		return nil, err
	}
	if err := collective.Broadcast(ctx, world, &step); err != nil {
		return nil, err
	}
	if step < 0 {
		return saved, err
	}
	r.accept(step)
	return r.newestLocal(ctx)
}

// newestLocal is newestSaved without the object store. It verifies all files of a checkpoint that
// the run will not load.
func (r *run) newestLocal(ctx context.Context) (*checkpoint.Checkpoint, error) {
	world, dir := r.ranks.World(), r.dir.Join(checkpoint.DirName)
	saved, refused, err := checkpoint.Candidate(ctx, world, r.options.files, dir, r.history.refused)
	if err == nil && saved != nil && (r.options.DryRun || saved.State.Step >= r.config.Steps) {
		saved, refused, err = checkpoint.Newest(ctx, world, r.options.files, dir)
	}
	r.refuse(refused...)
	if err != nil || saved == nil || r.options.DryRun {
		return saved, err
	}
	// A run that was killed may not have synced the name of its last checkpoint.
	if world.Rank() == 0 {
		err = atomicfile.On(r.options.files).SyncDir(dir)
	}
	return saved, collective.Agree(ctx, world, err)
}

// accept ends the refusal of a step's checkpoint, which was replaced.
func (r *run) accept(step int64) {
	r.history.refused = slices.DeleteFunc(r.history.refused,
		func(c checkpoint.Refused) bool { return c.Checkpoint == checkpoint.Name(step) })
}

// fetchCopy fetches the newest copy if it is newer than saved, which may be nil, and returns its
// step. Otherwise it returns -1.
func (r *run) fetchCopy(ctx context.Context, dir string, saved *checkpoint.Checkpoint) (step int64, err error) {
	store, err := checkpoint.OpenStore(r.config.Checkpoint.Copies)
	if err != nil {
		return -1, err
	}
	step, err = store.Newest(ctx)
	if err != nil || step < 0 || saved != nil && saved.State.Step >= step {
		return -1, err
	}
	if r.options.DryRun {
		return -1, errors.New("a newer checkpoint is in " + r.config.Checkpoint.Copies + ", and a dry run does not " +
			"fetch it; run without --dry-run, or without checkpoint.copies")
	}
	r.warn("fetching checkpoint %s from %s, which is newer than the checkpoints in %s", checkpoint.Name(step),
		r.config.Checkpoint.Copies, dir)
	return step, store.Download(ctx, r.dir.FS, step, dir, r.dir.Path)
}
