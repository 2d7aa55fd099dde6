package job

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"mula/shards"
	"mula/shards/formats"
	"mula/tokenize/documents"
)

// A shardQueue has the state of the shards, as this process knows it.
type shardQueue struct {
	p *process

	mu      sync.Mutex
	changes chan struct{} // closed and replaced when a field below changes
	starts  []cut         // of the known shards
	ended   bool          // starts is complete
	stages  []stage       // of the shards
	holder  string
}

// plan finds the start of each shard, as soon as the units that determine it are complete.
func (r *shardQueue) plan(ctx context.Context) error {
	start := cut{}
	for k := 0; ; k++ {
		r.add(start)
		end := cut{End: true}
		if r.p.f.d.Settings.ShardTokens > 0 {
			var err error
			if end, err = r.end(ctx, k, start); err != nil {
				return err
			}
		}
		if end.End {
			r.close()
			return nil
		}
		start = end
	}
}

// end returns the end of shard k.
func (r *shardQueue) end(ctx context.Context, k int, start cut) (cut, error) {
	for {
		record, err := r.p.f.readShard(k)
		if err != nil {
			return cut{}, err
		}
		if record != nil {
			return record.End, nil
		}
		end, err := shardEnd(ctx, r.p.order, start, r.p.f.d.Settings.ShardTokens)
		if again, err := r.p.again(k, err); !again {
			return end, err
		}
	}
}

// again reports whether to retry, and repairs the cause of a read error of shard k.
func (p *process) again(k int, err error) (bool, error) {
	var m *missing
	if !errors.As(err, &m) {
		return false, err
	}
	if record, e := p.f.readShard(k); e != nil || record != nil {
		// another process has written the shard and removed files that it no longer needed
		return e == nil, e
	}
	if err := p.f.unlessDone(); err != nil {
		return false, err
	}
	if err := p.unitQueue.reencode(m.unit, m.segment, err); err != nil {
		return false, err
	}
	if s, ok := p.order.(*shuffle); ok {
		s.forget()
	}
	return true, nil
}

// errDone means that another process has completed the job.
var errDone = errors.New("the job is complete")

// unlessDone returns errDone if another process has completed the job, or why that is not known.
func (f *workDir) unlessDone() error {
	done, err := readRecord[finished](f.files, f.path(doneName))
	if err == nil && done != nil {
		return errDone
	}
	return err
}

func (r *shardQueue) changed() {
	close(r.changes)
	r.changes = make(chan struct{})
}

func (r *shardQueue) add(start cut) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.starts, r.stages = append(r.starts, start), append(r.stages, open)
	r.changed()
}

func (r *shardQueue) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended = true
	r.changed()
}

func (r *shardQueue) set(k int, s stage, holder string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stages[k], r.holder = s, holder
	r.changed()
}

// next takes the first open shard, or returns -1 if no shard is open now. all reports whether all
// shards are complete.
func (r *shardQueue) next() (k int, start cut, all bool, changes chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	all = r.ended
	for k, s := range r.stages {
		if s == open {
			r.stages[k] = ours
			return k, r.starts[k], false, nil
		}
		all = all && s == complete
	}
	return -1, cut{}, all, r.changes
}

// write writes one shard after the other, until all are complete.
func (r *shardQueue) write(ctx context.Context) error {
	pause := r.p.o.tuning.poll
	for {
		k, start, all, changes := r.next()
		if all {
			return nil
		}
		if k < 0 {
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-changes:
				pause = r.p.o.tuning.poll
			case <-time.After(pause):
				pause = min(pause*3/2, r.p.o.tuning.maxPoll)
			}
			r.retryOthers()
			continue
		}
		if err := r.try(ctx, k, start); err != nil {
			return err
		}
	}
}

// retryOthers makes the shards of other processes open again, so that they are retried.
func (r *shardQueue) retryOthers() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for k, s := range r.stages {
		if s == theirs {
			r.stages[k] = open
		}
	}
}

// try writes a shard unless it is complete, or another process has it.
func (r *shardQueue) try(ctx context.Context, k int, start cut) error {
	f := r.p.f
	for {
		l, holder, err := f.locks.Acquire(f.shardLock(k))
		if err != nil {
			return err
		}
		record, err := f.readShard(k)
		if err != nil || record != nil || l == nil {
			if l != nil {
				l.Release()
			}
			if err != nil {
				return err
			}
			if record != nil {
				r.set(k, complete, "")
				return nil
			}
			if err := f.unlessDone(); err != nil {
				return err
			}
			r.mu.Lock() // no notification: waiting goroutines would retry at once
			r.stages[k], r.holder = theirs, holder
			r.mu.Unlock()
			return nil
		}
		f.writing.Store(f.prefix(k), l)
		record, err = r.p.writeShard(ctx, k, start, l.Ours)
		f.writing.Delete(f.prefix(k))
		l.Release()
		if again, err := r.p.again(k, err); again {
			continue
		} else if errors.Is(err, errLost) {
			r.mu.Lock()
			r.stages[k] = theirs
			r.mu.Unlock()
			return nil
		} else if err != nil {
			return err
		}
		r.set(k, complete, "")
		if record == nil {
			return nil
		}
		return r.p.sweep(k, record)
	}
}

// writeShard writes shard k and its record. If the shard has no documents, it writes nothing.
func (p *process) writeShard(ctx context.Context, k int, start cut, ours func() bool) (*shardRecord, error) {
	prefix := p.f.prefix(k)
	record := &shardRecord{Job: p.f.d.ID, Start: start, Shard: ShardFile{Prefix: prefix}}
	s := &record.Shard
	var w shards.DocumentWriter
	defer func() {
		if w != nil {
			w.Abort()
		}
	}()
	for d, err := range p.order.from(ctx, start, nil) {
		if err != nil {
			return nil, err
		}
		if !fits(s.Tokens, s.Documents, d.meta.tokens, p.f.d.Settings.ShardTokens) {
			record.End = d.at
			break
		}
		if w == nil {
			made, err := p.f.create(p.f.d.Settings, prefix)
			if err != nil {
				return nil, err
			}
			w = made
		}
		in := p.f.d.Units[d.unit][d.meta.part].Input
		origin := shards.DocumentOrigin{ID: string(d.meta.id), File: p.f.d.Inputs[in].Path,
			Line: d.meta.line + p.unitQueue.base(d.unit, d.meta.part)}
		if origin.ID == "" {
			origin.ID = documents.DefaultID(p.f.d.name(in), origin.Line)
		}
		if err := w.Append(d.tokens, origin); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", origin.File, origin.Line, err)
		}
		s.Documents++
		s.Tokens += d.meta.tokens
		s.TextBytes += d.meta.text
	}
	if w == nil {
		return nil, nil
	}
	if record.End == (cut{}) {
		record.End = cut{Documents: start.Documents + s.Documents, End: true}
	}
	if !ours() {
		return nil, errLost
	}
	// Close first removes files, so a complete shard is left alone.
	if written, err := p.f.readShard(k); err != nil || written != nil {
		return written, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	s.DType, s.Files = w.Manifest().DType, w.Manifest().Files
	if !ours() { // the process that has the shard now may be replacing its files
		return nil, errLost
	}
	if err := p.f.writeSealed(p.f.shardPath(k), record); err != nil {
		return nil, err
	}
	return record, nil
}

// create starts a shard.
func (f *workDir) create(s settings, prefix string) (shards.DocumentWriter, error) {
	return formats.Create(formats.Of(s.Layout), prefix, s.Tokenizer, formats.Options{FS: f.o.FS})
}

// sweep removes the segments that only complete shards need, after shard k became complete. In a
// shuffled output every shard needs all segments, and they are kept to the end.
func (p *process) sweep(k int, record *shardRecord) error {
	if p.f.d.Settings.Shuffle {
		return nil
	}
	// The range of complete shards around k, within the segments that k shares with them.
	start, end := record.Start, record.End
	for n := k - 1; n >= 0 && start.Document > 0; n-- {
		r, err := p.f.readShard(n)
		if err != nil {
			return err
		}
		if r == nil {
			break
		}
		if r.Start.Unit != start.Unit || r.Start.Segment != start.Segment {
			start.Document = 0
			break
		}
		start = r.Start
	}
	for n := k + 1; !end.End; n++ {
		r, err := p.f.readShard(n)
		if err != nil {
			return err
		}
		if r == nil {
			break
		}
		first := end.Unit == r.End.Unit && end.Segment == r.End.Segment
		end = r.End
		if !first { // the segment in which k ends also ends in shard n
			break
		}
	}
	group := p.f.group()
	defer group.Wait() // after an error of a unit's record
	for u := start.Unit; u < len(p.f.d.Units) && (end.End || u <= end.Unit); u++ {
		record, err := p.f.readUnit(u)
		if err != nil {
			return err
		}
		if record == nil {
			break // not needed, or being encoded again
		}
		for n := range record.Segments {
			before := u == start.Unit && (n < start.Segment || n == start.Segment && start.Document > 0)
			after := !end.End && u == end.Unit && n >= end.Segment
			if before || after {
				continue
			}
			group.Go(func() error { return p.f.files.Remove(segmentName(p.f.dir, u, n)) })
		}
	}
	return group.Wait()
}
