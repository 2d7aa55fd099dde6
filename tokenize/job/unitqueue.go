package job

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"mula/internal/locks"
	"mula/tokenize/documents"
)

// A unitQueue has the state of all units, as this process knows it.
type unitQueue struct {
	f     *workDir
	limit int64 // requested number of documents, 0: all

	mu      sync.Mutex
	changes chan struct{} // closed and replaced when a field below changes
	units   []unitState
	prefix  int   // units before it are complete
	counted int64 // documents of these
	// for each unit below prefix, and for prefix: lines of the unit's first input in the units
	// before it
	before    []int64
	lines     [][]int64 // of each part of the units that have been complete
	until     int       // units from here on are not needed
	failed    *failure
	over      bool // the output is complete: no unit will be encoded again
	holder    string
	reencoded map[int]int
}

type unitState struct {
	stage  stage
	record *unitRecord        // when complete
	sum    totals             // of the record
	cancel context.CancelFunc // when ours
}

type stage uint8

const (
	open   stage = iota
	ours         // this process encodes the unit
	theirs       // another process holds the unit
	complete
)

// A failure is an unusable document, or the end of a broken file, that ends the job.
type failure struct {
	unit    int
	ordinal int64 // documents of the unit before it
	part    int
	lines   int64 // of the input in the parts of the unit before this one
	err     error // a DocumentError has its line in the part
}

func newUnitQueue(f *workDir) *unitQueue {
	return &unitQueue{
		f: f, limit: f.d.Settings.MaxDocuments, changes: make(chan struct{}), units: make([]unitState, len(f.d.Units)),
		before: make([]int64, 1, len(f.d.Units)+1), lines: make([][]int64, len(f.d.Units)), until: len(f.d.Units),
		reencoded: make(map[int]int),
	}
}

// changed wakes all waiting goroutines. The caller holds mu.
func (b *unitQueue) changed() {
	close(b.changes)
	b.changes = make(chan struct{})
}

// findComplete finds the complete units by listing the folder once.
func (b *unitQueue) findComplete() error {
	entries, err := b.f.files.FS().ReadDir(b.f.dir)
	if err != nil {
		return err
	}
	there := make(map[string]bool, len(entries))
	for _, e := range entries {
		there[e.Name()] = true
	}
	group := b.f.group()
	for u := range b.units {
		if there[filepath.Base(b.f.unitPath(u))] {
			group.Go(func() error {
				_, err := b.check(u)
				return err
			})
		}
	}
	return group.Wait()
}

// check reports whether a unit is complete, by its record.
func (b *unitQueue) check(u int) (bool, error) {
	b.mu.Lock()
	known := b.units[u].stage == complete
	b.mu.Unlock()
	if known {
		return true, nil
	}
	record, err := b.f.readUnit(u)
	if err != nil || record == nil {
		return false, err
	}
	b.complete(u, record)
	return true, nil
}

// complete marks a unit as complete.
func (b *unitQueue) complete(u int, record *unitRecord) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.units[u].stage == complete {
		return
	}
	b.units[u] = unitState{stage: complete, record: record, sum: record.sum()}
	if b.lines[u] == nil {
		for _, part := range record.Parts {
			b.lines[u] = append(b.lines[u], part.Lines)
		}
	}
	b.advance()
	b.changed()
}

// advance moves prefix forward. The caller holds mu.
func (b *unitQueue) advance() {
	for b.prefix < b.until && b.units[b.prefix].stage == complete {
		u := b.prefix
		r := b.units[u].record
		b.counted += b.units[u].sum.Documents
		b.prefix++
		if x := b.failed; x != nil && x.unit == b.prefix && b.limit > 0 && b.counted+x.ordinal >= b.limit {
			// the requested documents of the unit are before its failure
			b.failed, b.until = nil, b.prefix+1
		}
		if b.prefix < len(b.units) && len(b.before) == b.prefix {
			b.before = append(b.before, b.linesBefore(u, len(r.Parts), b.f.d.Units[b.prefix][0].Input))
		}
		if b.limit > 0 && b.counted >= b.limit {
			b.stopAt(b.prefix)
		}
	}
}

// linesBefore counts the lines of an input in the parts of unit u before the given part, and in the
// units before u. The caller holds mu.
func (b *unitQueue) linesBefore(u, part, input int) (lines int64) {
	parts := b.f.d.Units[u]
	for p := part - 1; p >= 0; p-- {
		if parts[p].Input != input {
			return lines
		}
		lines += b.lines[u][p]
	}
	if parts[0].Input == input {
		lines += b.before[u]
	}
	return lines
}

// base returns how many lines the input of a part has before the part. The unit and all units
// before it have been complete. They may be incomplete again, because a damaged segment is encoded
// again.
func (b *unitQueue) base(u, part int) int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.linesBefore(u, part, b.f.d.Units[u][part].Input)
}

// stopAt marks the units from u on as not needed. The caller holds mu.
func (b *unitQueue) stopAt(u int) {
	b.until = min(b.until, u)
	for i := b.until; i < len(b.units); i++ {
		if b.units[i].cancel != nil {
			b.units[i].cancel()
		}
	}
	b.changed()
}

// fail records a failure. The job continues with the units before it, because one of them may fail
// too, or supply all requested documents. The result of a job therefore does not depend on which
// units are faster.
func (b *unitQueue) fail(x *failure) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.units[x.unit].stage == ours {
		b.units[x.unit] = unitState{}
	}
	if x.unit >= b.until {
		return
	}
	b.failed = x
	b.stopAt(x.unit)
	if b.prefix == x.unit && b.limit > 0 && b.counted+x.ordinal >= b.limit {
		b.failed, b.until = nil, x.unit+1
	}
}

// wanted returns the maximum number of documents requested from a unit, 0: all.
func (b *unitQueue) wanted(u int) int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.limit > 0 && b.prefix == u {
		return b.limit - b.counted
	}
	return b.limit
}

// claim takes the first free unit for this process. It waits while no unit is free, and returns -1
// when no unit will be. The returned context ends when the unit is no longer needed.
func (b *unitQueue) claim(ctx context.Context) (u int, l *locks.Lock, unitCtx context.Context, err error) {
	for {
		u, over, changes := b.next()
		if over {
			return -1, nil, nil, nil
		}
		if u < 0 {
			select {
			case <-ctx.Done():
				return -1, nil, nil, context.Cause(ctx)
			case <-changes:
			}
			continue
		}
		l, holder, err := b.f.locks.Acquire(b.f.unitLock(u))
		if err != nil {
			return -1, nil, nil, err
		}
		// The holder writes the record before it releases the lock.
		done, err := b.check(u)
		if err != nil || done {
			if l != nil {
				l.Release()
			}
			if err != nil {
				return -1, nil, nil, err
			}
			continue
		}
		if l == nil {
			b.mu.Lock()
			b.units[u].stage, b.holder = theirs, holder
			b.mu.Unlock()
			continue
		}
		// The process that ends the job removes the records.
		if err := b.f.unlessDone(); err != nil {
			l.Release()
			return -1, nil, nil, err
		}
		b.mu.Lock()
		unitCtx, cancel := context.WithCancel(ctx)
		b.units[u].cancel = cancel
		if u >= b.until || b.over {
			cancel()
		}
		b.mu.Unlock()
		return u, l, unitCtx, nil
	}
}

// next takes the first open unit and marks it ours, or returns -1 if no unit is open now. over
// means that no unit will be open again.
func (b *unitQueue) next() (u int, over bool, changes chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.over {
		return -1, true, nil
	}
	for u := b.prefix; u < b.until; u++ {
		if b.units[u].stage == open {
			b.units[u].stage = ours
			return u, false, nil
		}
	}
	return -1, false, b.changes
}

// end declares that no more units will be encoded, and cancels the work in progress: another
// process has completed it.
func (b *unitQueue) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.over = true
	for _, u := range b.units {
		if u.cancel != nil {
			u.cancel()
		}
	}
	b.changed()
}

// release releases a unit that was not completed.
func (b *unitQueue) release(u int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c := b.units[u].cancel; c != nil {
		c()
	}
	if b.units[u].stage == ours {
		b.units[u] = unitState{}
		b.changed()
	}
}

// watch polls the units of other processes until ctx ends: they become complete, or are taken over.
func (b *unitQueue) watch(ctx context.Context) error {
	pause := b.f.o.tuning.poll
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		b.mu.Lock()
		var waits []int
		for u := b.prefix; u < b.until; u++ {
			if b.units[u].stage == theirs {
				waits = append(waits, u)
			}
		}
		idle := len(waits) == 0
		b.mu.Unlock()
		progress := false
		for _, u := range waits {
			done, err := b.check(u)
			if err != nil {
				return err
			}
			progress = progress || done
			if !done {
				b.mu.Lock()
				if b.units[u].stage == theirs {
					b.units[u].stage = open // to be tried again
					b.changed()
				}
				b.mu.Unlock()
			}
		}
		if progress || idle {
			pause = b.f.o.tuning.poll
		} else {
			pause = min(pause*3/2, b.f.o.tuning.maxPoll)
		}
	}
}

// unit returns the record of a unit once it and all units before it are complete, and nil if the
// unit is not needed.
func (b *unitQueue) unit(ctx context.Context, u int) (*unitRecord, error) {
	for {
		b.mu.Lock()
		changes := b.changes
		var record *unitRecord
		if u < b.prefix {
			record = b.units[u].record
		}
		settled := b.prefix == b.until
		var err error
		if settled && b.failed != nil && b.failed.unit == b.until {
			err = b.located(b.failed)
		}
		b.mu.Unlock()
		if record != nil || settled {
			if record != nil {
				err = nil
			}
			return record, err
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-changes:
		}
	}
}

// documents returns the number of documents in the output. All needed units must be complete.
func (b *unitQueue) documents() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.limit > 0 {
		return min(b.limit, b.counted)
	}
	return b.counted
}

// waitComplete waits until all needed units are known to be complete.
func (b *unitQueue) waitComplete(ctx context.Context) error {
	if err := b.findComplete(); err != nil {
		return err
	}
	for u := range b.units {
		if record, err := b.unit(ctx, u); err != nil || record == nil {
			return err
		}
	}
	return nil
}

// located returns the error of a failure with lines counted from the start of the file. All units
// before it must be complete; the caller holds mu.
func (b *unitQueue) located(x *failure) error {
	var bad *documents.DocumentError
	if !errors.As(x.err, &bad) {
		return x.err
	}
	at := *bad
	if bad.Line == 0 { // the fault concerns the whole file
		return bad
	}
	at.Line += x.lines
	if parts := b.f.d.Units[x.unit]; parts[0].Input == parts[x.part].Input {
		at.Line += b.before[x.unit]
	}
	return &at
}

// reencode makes a unit with a damaged or missing segment open again, unless another process has
// repaired it.
func (b *unitQueue) reencode(u, number int, cause error) error {
	l, holder, err := b.f.locks.Acquire(b.f.unitLock(u))
	if err != nil {
		return err
	}
	stage := theirs
	if l != nil {
		defer l.Release()
		if record, err := b.f.readUnit(u); err == nil && record != nil && b.f.verifySegment(u, number, record) == nil {
			return nil
		}
		b.mu.Lock()
		b.reencoded[u]++
		often := b.reencoded[u] > maxReencoded
		b.mu.Unlock()
		if often {
			// the unit is not reencoded again
			return fmt.Errorf("the unit was encoded %d times and is damaged again: %v; check the disk, then repeat "+
				"the command", maxReencoded, cause)
		}
		if err := b.f.files.Remove(b.f.unitPath(u)); err != nil {
			return err
		}
		if err := b.f.removeSegments(u); err != nil {
			return err
		}
		stage = open
	}
	b.reopen(u, stage, holder)
	return nil
}

// reopen marks a unit as incomplete. Its line counts are kept: the unit will be encoded to the same
// bytes, and writers of later shards use the counts meanwhile.
func (b *unitQueue) reopen(u int, stage stage, holder string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.units[u], b.holder = unitState{stage: stage}, holder
	if u < b.prefix {
		b.prefix, b.counted = u, 0
		for _, s := range b.units[:u] {
			b.counted += s.sum.Documents
		}
	}
	b.changed()
}

// maxReencoded is how often a unit is encoded again before the disk is assumed to be broken.
const maxReencoded = 3
