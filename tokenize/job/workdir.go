package job

import (
	"context"
	cryptorand "crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"math/rand/v2"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/filesystem/objectfs"
	"mula/internal/locks"
	"mula/internal/objects"
	"mula/internal/strictjson"
	"mula/shards"
	"mula/shards/formats"
	"mula/tokenize/documents"
)

// FolderSuffix is the suffix of a job's folder name. The rest of the name is the prefix of the
// output.
const FolderSuffix = ".job"

// Files of the folder, in addition to segments and locks. A record is written after the files that
// it describes are on disk.
//
//	job.json          the description
//	unit-00012.json   the unit is encoded: all its segments exist, unless complete shards contain
//	                  all of their documents
//	shard-00003.json  the shard is complete
//	done.json         the output is complete; of the other files only job.json is needed
const (
	descriptionName = "job.json"
	doneName        = "done.json"
)

// A unitRecord is the record of an encoded unit.
type unitRecord struct {
	Parts    []totals        `json:"parts"`
	Segments []segmentRecord `json:"segments"`
	// the unit has the last requested document, and was not read further
	Cut bool   `json:"cut,omitempty"`
	Job string `json:"job,omitempty"` // as in the description
}

type segmentRecord struct {
	Documents int64 `json:"documents"`
	Tokens    int64 `json:"tokens"`
	footerRejects
}

// sum adds up the parts.
func (u *unitRecord) sum() (t totals) {
	for _, p := range u.Parts {
		t.Documents += p.Documents
		t.Tokens += p.Tokens
		t.TextBytes += p.TextBytes
	}
	return t
}

// A shardRecord is the record of a complete shard.
type shardRecord struct {
	Job   string    `json:"job,omitempty"` // as in the description
	Start cut       `json:"start"`
	End   cut       `json:"end"`
	Shard ShardFile `json:"shard"`
}

// ShardFile is one shard of the output.
type ShardFile struct {
	Prefix    string                     `json:"prefix"`
	Documents int64                      `json:"documents"`
	Tokens    int64                      `json:"tokens"`
	TextBytes int64                      `json:"text_bytes"`
	DType     shards.DType               `json:"dtype"`
	Files     map[string]shards.FileInfo `json:"files"` // as in [shards.Manifest]
}

// A workDir is the folder of a job in which this process takes part.
type workDir struct {
	dir       string
	o         *Options
	d         *description
	files     atomicfile.Files
	locks     *locks.Set
	presence  *locks.Lock
	presentAt string // path of the file that shows that this process takes part
	stopBeat  func()
	described bool // the description exists: this process has read or written it
	worthless bool // the job has no result

	store   *objectfs.FS // nil: the folder is local
	version atomic.Value // a string: the version of the description in the store, when it was last read
	writing sync.Map     // the *locks.Lock of each shard that this process writes, by prefix
}

func (f *workDir) path(name string) string { return objects.Join(f.dir, name) }

func (f *workDir) unitPath(u int) string  { return f.path(fmt.Sprintf("unit-%05d.json", u)) }
func (f *workDir) shardPath(k int) string { return f.path(fmt.Sprintf("shard-%05d.json", k)) }

func (f *workDir) unitLock(u int) string { return f.path(fmt.Sprintf("unit-%05d%s", u, locks.Suffix)) }
func (f *workDir) shardLock(k int) string {
	return f.path(fmt.Sprintf("shard-%05d%s", k, locks.Suffix))
}

// prefix returns the path prefix of shard k.
func (f *workDir) prefix(k int) string {
	if f.d.Settings.ShardTokens == 0 {
		return f.o.Output
	}
	return fmt.Sprintf("%s-%05d", f.o.Output, k)
}

// openWorkDir joins the job that the options specify, or starts it. done is not nil if the job is
// complete.
func openWorkDir(ctx context.Context, o *Options) (f *workDir, done *finished, err error) {
	want, err := describe(ctx, o)
	if err != nil {
		return nil, nil, err
	}
	f = &workDir{dir: o.Output + FolderSuffix, o: o, files: atomicfile.On(o.FS)}
	local := f.dir
	if store, ok := o.FS.(*objectfs.FS); ok {
		f.store, local = store, o.Work
	}
	for try := 0; ; try++ {
		if err := f.makeFolder(local); err != nil {
			return nil, nil, fmt.Errorf("creating the job's folder: %w", err)
		}
		if f.locks, err = locks.Open(ctx, o.tuning.lockFS, f.dir, o.tuning.timing); err == nil {
			break
		}
		// A process that abandons its job removes the folder.
		if !errors.Is(err, fs.ErrNotExist) || try == 100 {
			return nil, nil, err
		}
	}
	beating, stop := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		f.locks.Beat(beating)
	}()
	f.stopBeat = func() {
		stop()
		<-ended
	}
	for first := true; first || errors.Is(err, errLost); first = false {
		if !first { // join has changed it
			if want, err = describe(ctx, o); err != nil {
				break
			}
		}
		err = f.locked(ctx, func(l *locks.Lock) error {
			done, err = f.join(ctx, want, l)
			if err != nil && ctx.Err() == nil && !l.Ours() {
				return errLost // the cause may be what another process has done meanwhile
			}
			return err
		})
	}
	if err != nil {
		f.close(ctx)
		return nil, nil, err
	}
	return f, done, nil
}

// makeFolder creates the job's folder, or the local folder of a job in a store. A folder without a
// description may be new, and would be lost with its locks if the machine that created it crashed
// before its name is on disk.
func (f *workDir) makeFolder(local string) error {
	if f.store == nil {
		if _, err := f.files.FS().Stat(f.path(descriptionName)); err == nil {
			return nil
		}
	}
	if err := filesystem.MkdirAll(f.files.FS(), local, 0o777); err != nil || f.store != nil {
		return err
	}
	return f.files.SyncDir(filepath.Dir(local))
}

// closeTime is how long close waits at most for a lock, whose process may have ended on another
// machine.
const closeTime = 10 * time.Second

// close ends the participation, also after the end of ctx. It removes a folder without any work in
// it.
func (f *workDir) close(ctx context.Context) {
	if f.presence != nil {
		f.presence.Release()
	}
	if f.store != nil {
		f.store.Guard = nil // clear removes the description first
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTime)
	defer cancel()
	_ = f.locked(ctx, func(*locks.Lock) error { // ignored: remaining files are harmless
		holder, err := f.others(ctx, false)
		if err != nil || holder != "" || f.worked() && !f.worthless || !f.described || len(f.d.Replaces) > 0 {
			return err
		}
		return f.clear(true)
	})
	f.stopBeat()
	f.locks.Close()
	if f.store == nil {
		// Nothing is tried in the folder of a complete job, which has files.
		if entries, err := f.files.FS().ReadDir(f.dir); err == nil && len(entries) == 0 {
			_ = f.files.FS().Remove(f.dir) // another process may have created a file there
		}
	}
}

// locked runs do under the lock that all such functions use.
func (f *workDir) locked(ctx context.Context, do func(l *locks.Lock) error) error {
	l, err := f.locks.Wait(ctx, f.path("job"+locks.Suffix), f.o.tuning.poll)
	if err != nil {
		return fmt.Errorf("opening the job %s: %w", f.dir, err)
	}
	defer l.Release()
	return do(l)
}

// others returns the name of another process that takes part in the job, "" if there is none. If
// wait is set, it waits until it knows whether a process on another machine is alive.
func (f *workDir) others(ctx context.Context, wait bool) (holder string, err error) {
	names, err := f.named("process-*" + locks.Suffix)
	if err != nil {
		return "", err
	}
	for _, name := range names {
		if name == f.presentAt {
			continue
		}
		if wait {
			if holder, err := f.locks.Holder(ctx, name, f.o.tuning.poll); err != nil || holder != "" {
				return holder, err
			}
		}
		l, holder, err := f.locks.Acquire(name)
		if err != nil || l == nil {
			return holder, err
		}
		l.Release()
	}
	return "", nil
}

// named returns the paths of the files in the folder whose names match a pattern.
func (f *workDir) named(pattern string) (paths []string, err error) {
	entries, err := f.files.FS().ReadDir(f.dir)
	for _, e := range entries {
		if ok, _ := path.Match(pattern, e.Name()); ok {
			paths = append(paths, f.path(e.Name()))
		}
	}
	return paths, err
}

// worked reports whether deleting the folder would lose work.
func (f *workDir) worked() bool {
	entries, err := f.files.FS().ReadDir(f.dir)
	return err != nil || slices.ContainsFunc(entries, func(e fs.DirEntry) bool {
		name := e.Name()
		return name == doneName || spoolName.MatchString(name)
	})
}

// spoolName matches the names of a job's files that may be removed.
var spoolName = regexp.MustCompile(`^(unit-\d{5,}(\.\d{4,}\.(segment|rejects)|\.json)|shard-\d{5,}\.json)$`)

// clear removes the contents of the folder except locks. Without all, job.json and done.json are
// kept.
func (f *workDir) clear(all bool) error {
	remove := func(name string) error { return f.files.Remove(f.path(name)) }
	if all {
		// Remove records before the files that they describe. In a store, a removal may arrive
		// late, when another process has written the file, so files that do not exist are not
		// removed. On a shared file system, Stat may return an old state.
		for _, name := range []string{doneName, descriptionName} {
			if f.store != nil {
				_, err := f.files.FS().Stat(f.path(name))
				if errors.Is(err, fs.ErrNotExist) {
					continue
				}
				if err != nil {
					return err
				}
			}
			if err := remove(name); err != nil {
				return err
			}
		}
		if err := f.files.SyncDir(f.dir); err != nil {
			return err
		}
	}
	entries, err := f.files.FS().ReadDir(f.dir)
	if err != nil {
		return err
	}
	for _, records := range []bool{true, false} {
		group := f.group()
		for _, e := range entries {
			if name := e.Name(); spoolName.MatchString(name) && strings.HasSuffix(name, ".json") == records {
				group.Go(func() error { return remove(name) })
			}
		}
		if err := group.Wait(); err != nil {
			return err
		}
	}
	return nil
}

// requests is how many short requests are sent to a store at a time.
const requests = 32

// group returns a group for operations on many files: one after the other on a local disk, and many
// at a time in a store.
func (f *workDir) group() *errgroup.Group {
	group := new(errgroup.Group)
	group.SetLimit(1)
	if f.store != nil {
		group.SetLimit(requests)
	}
	return group
}

// clean removes files of killed processes.
func (f *workDir) clean() error {
	dirs := []string{f.dir, filepath.Dir(f.o.Output)}
	if f.store != nil {
		dirs = []string{f.o.Work}
	}
	for _, dir := range dirs {
		if _, err := f.files.Clean(dir); err != nil {
			return err
		}
	}
	return nil
}

// errRestarted means that this process must not write files of the job any more.
var errRestarted = errors.New("another process has removed the job or started it again meanwhile")

// guard keeps this process from changing files in the store after another process has started the
// job again, and from changing a shard that another process has taken over, or after the end of the
// job. This process may have been stopped for any time before it writes.
func (f *workDir) guard(url string) error {
	info, err := f.files.FS().Stat(f.path(descriptionName))
	if err == nil && f.version.Load() != info.Sys().(objects.Info).Version {
		var now *description
		now, err = readRecord[description](f.files, f.path(descriptionName))
		if err == nil && (now == nil || now.ID != f.d.ID) {
			err = fs.ErrNotExist
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s: %w", f.dir, errRestarted)
	}
	if err != nil {
		return err
	}
	f.version.Store(info.Sys().(objects.Info).Version)
	if strings.HasPrefix(url, f.dir+"/") {
		return nil
	}
	for prefix, lock := range f.writing.Range {
		rest, ok := strings.CutPrefix(url, prefix.(string))
		if ok && strings.IndexAny(rest, "./") == 0 && !lock.(*locks.Lock).Ours() {
			return errLost
		}
	}
	return f.unlessDone()
}

// join decides whether to resume the job in the folder or to start a job. It runs alone, with the
// lock l. It returns errLost if this process was stopped, and another process has taken the lock
// over: that process may have started the job.
func (f *workDir) join(ctx context.Context, want *description, l *locks.Lock) (*finished, error) {
	if err := locks.Clean(ctx, f.o.tuning.lockFS, f.dir); err != nil {
		return nil, err
	}
	if err := f.clean(); err != nil {
		return nil, err
	}
	old, err := readRecord[description](f.files, f.path(descriptionName))
	if err == nil && old != nil {
		if old.Format < 1 || old.Format > descriptionFormat {
			err = fmt.Errorf("%s has format %d, but this program supports formats up to %d; use a newer program",
				f.path(descriptionName),
				old.Format, descriptionFormat)
		} else {
			err = old.valid()
		}
	}
	if err != nil && !f.o.Overwrite {
		return nil, withRestartHint(err)
	}
	why := f.refuses(ctx, old, want)
	if old != nil && why == nil {
		f.d, f.described = old, true
		f.o.Read.KeepMark = old.Format == 1
		done, err := readRecord[finished](f.files, f.path(doneName))
		if err != nil {
			return nil, withRestartHint(err)
		}
		if done != nil {
			return done, f.unchanged(done.Shards)
		}
		written, _, err := f.written()
		if err != nil {
			return nil, err
		}
		if f.unchanged(written) != nil {
			if err := f.waitForWriters(ctx); err != nil {
				return nil, err
			}
			if err := f.unchanged(written); err != nil {
				return nil, err
			}
		}
		return nil, f.announce()
	}
	if holder, err := f.others(ctx, true); err != nil {
		return nil, err
	} else if holder != "" {
		if errors.Is(why, errRestart) {
			why = errors.New("it cannot be restarted meanwhile")
			if old != nil && old.Private || want.Private {
				why = errors.New("a job that reads standard input or a pipe cannot be shared")
			}
		}
		return nil, fmt.Errorf("%s works on the job %s: %w; wait for its end, stop it, or name another output", holder,
			f.dir, why)
	}
	if why != nil && !errors.Is(why, errRestart) && f.worked() {
		return nil, withRestartHint(why)
	}
	f.d = want
	want.SegmentBytes = f.o.segmentBytes()
	if f.store != nil {
		want.ID = cryptorand.Text()
	}
	var all bool
	want.Replaces, all = f.outputs(old)
	// Steps that can fail or take long come before the older job is removed.
	if err := want.cut(ctx, f.o, f.o.PieceBytes); err != nil {
		return nil, err
	}
	if !all {
		if err := f.foreign(); err != nil {
			return nil, err
		}
	}
	// a prefix cannot have shards of both layouts
	if old != nil && old.Settings.Layout != want.Settings.Layout {
		if err := f.remove(want.Replaces); err != nil {
			return nil, err
		}
		want.Replaces = nil
	}
	if w, err := f.create(want.Settings, f.prefix(0)); err != nil {
		// fails before the work if the settings do not allow a shard
		return nil, err
	} else {
		w.Abort()
	}
	if !l.Ours() { // again after steps that take long
		return nil, errLost
	}
	if err := f.clear(true); err != nil {
		return nil, err
	}
	if err := f.files.SyncDir(filepath.Dir(f.dir)); err != nil { // syncs the folder's own entry
		return nil, err
	}
	if err := f.write(f.path(descriptionName), want); err != nil {
		return nil, err
	}
	f.described = true
	return nil, f.announce()
}

// withRestartHint adds the remedy to an error.
func withRestartHint(err error) error {
	return fmt.Errorf("%w; restart the job with --overwrite, or name another output", err)
}

// errRestart is the reason for a silent restart of a job that cannot be resumed.
var errRestart = errors.New("the job must restart")

// refuses returns why the job that old describes cannot be resumed as the job want.
func (f *workDir) refuses(ctx context.Context, old, want *description) error {
	if old == nil || f.o.Overwrite {
		return errRestart
	}
	if d := want.difference(old); d != "" {
		return fmt.Errorf("%s is the folder of a job with other settings: %s", f.dir, d)
	}
	if old.Private || want.Private {
		return errRestart
	}
	return f.reconcile(ctx, old, want)
}

// announce announces to other processes that this process takes part.
func (f *workDir) announce() error {
	if f.store != nil {
		f.store.Guard = f.guard
	}
	for {
		path := f.path(fmt.Sprintf("process-%016x%s", rand.Uint64(), locks.Suffix))
		l, _, err := f.locks.Acquire(path)
		if err != nil {
			return err
		}
		if l != nil {
			f.presence, f.presentAt = l, path
			return nil
		}
	}
}

// reconcile checks inputs whose size or time has changed. If the part that was read is unchanged,
// the job continues with the new input.
func (f *workDir) reconcile(ctx context.Context, old, want *description) error {
	changed := want.changed(old)
	if len(changed) == 0 {
		return nil
	}
	if done, err := readRecord[finished](f.files, f.path(doneName)); err != nil {
		return err
	} else if done != nil {
		return f.reconcileDone(ctx, old, want, done)
	}
	differs := make(map[int]bool)
	pieces := make(map[int]int)
	for _, i := range changed {
		differs[i] = true
	}
	for _, u := range old.Units {
		for _, p := range u {
			pieces[p.Input]++
		}
	}
	var redo []int // units that were started
	for n, u := range old.Units {
		if !slices.ContainsFunc(u, func(p part) bool { return differs[p.Input] }) {
			continue
		}
		record, err := readSealed[unitRecord](f.files, f.unitPath(n))
		if err != nil {
			return fmt.Errorf("the input %s changed after the job started, and it is unknown whether it was read: %w",
				want.Inputs[changed[0]].Path, err)
		}
		if record == nil {
			redo = append(redo, n)
		}
		for i, p := range u {
			if !differs[p.Input] {
				continue
			}
			was, now := old.Inputs[p.Input], want.Inputs[p.Input]
			if pieces[p.Input] > 1 && was.Size != now.Size {
				return fmt.Errorf("the input %s changed after the job started: it had %d bytes and has %d", now.Path,
					was.Size, now.Size)
			}
			if record == nil {
				continue
			}
			sum := ""
			if record.Parts[i].SHA256 != "" {
				if sum, err = hashPart(ctx, f.o, p); err != nil {
					return err
				}
			}
			if sum == "" || sum != record.Parts[i].SHA256 {
				return fmt.Errorf("the input %s changed after the job read it: it was last modified at %s, and is "+
					"now from %s",
					now.Path, stamp(was), stamp(now))
			}
		}
	}
	if len(redo) > 0 { // another process may have read a part of the old input
		if holder, err := f.others(ctx, true); err != nil {
			return err
		} else if holder != "" {
			return fmt.Errorf("the input %s changed after the job started", want.Inputs[changed[0]].Path)
		}
	}
	for _, n := range redo {
		if err := f.removeSegments(n); err != nil {
			return err
		}
	}
	old.Inputs = want.Inputs
	return f.write(f.path(descriptionName), old)
}

// reconcileDone is [folder.reconcile] for a complete job: done.json has the hashes, and the records
// of units are gone.
func (f *workDir) reconcileDone(ctx context.Context, old, want *description, done *finished) error {
	if len(done.Inputs) != len(old.Inputs) {
		return fmt.Errorf("%s is damaged: it has %d inputs, the job has %d", f.path(doneName), len(done.Inputs),
			len(old.Inputs))
	}
	for _, i := range want.changed(old) {
		was, now := old.Inputs[i], want.Inputs[i]
		for _, p := range done.Inputs[i].Pieces {
			if p.SHA256 == "" && done.Inputs[i].Documents == 0 {
				continue // after the last requested document
			}
			sum := ""
			if p.SHA256 != "" && was.Size == now.Size {
				var err error
				if sum, err = hashPart(ctx, f.o, part{i, p.Start, p.End}); err != nil {
					return err
				}
			}
			if sum == "" || sum != p.SHA256 {
				return fmt.Errorf("the input %s changed after the job read it: it had %d bytes, last modified at %s, "+
					"and has %d, modified at %s",
					now.Path, was.Size, stamp(was), now.Size, stamp(now))
			}
		}
	}
	old.Inputs = want.Inputs
	return f.write(f.path(descriptionName), old)
}

func stamp(in input) string { return time.Unix(0, in.Modified).UTC().Format(time.RFC3339Nano) }

// hashPart returns the SHA-256 of a part's bytes on disk.
func hashPart(ctx context.Context, o *Options, p part) (string, error) {
	r, err := documents.Open(ctx, documents.Piece{File: o.Inputs[p.Input], Start: p.Start, End: p.End}, o.Read)
	var bad *documents.DocumentError
	if errors.As(err, &bad) {
		return "", nil // broken: it has changed
	} else if err != nil {
		return "", err
	}
	defer r.Close()
	for {
		_, err := r.Next()
		bad = nil
		switch {
		case err == nil, errors.As(err, &bad) && bad.Kind != documents.BadStream:
		case bad != nil:
			return "", nil
		case err == io.EOF:
			return r.SHA256(), nil
		default:
			return "", err
		}
	}
}

// removeSegments removes the segments of a unit.
func (f *workDir) removeSegments(u int) error {
	for _, kind := range []string{"segment", "rejects"} {
		names, err := f.named(fmt.Sprintf("unit-%05d.*.%s", u, kind))
		if err != nil {
			return err
		}
		for _, name := range names {
			if err := f.files.Remove(name); err != nil {
				return err
			}
		}
	}
	return nil
}

// outputs returns the files of shards that a job has written or wanted to replace, by base name or
// below it. all is false if there may be more files.
func (f *workDir) outputs(d *description) (files []string, all bool) {
	if d == nil {
		return nil, false
	}
	files = slices.Clone(d.Replaces)
	note := func(s ShardFile) {
		for path := range s.paths(d.Settings.Layout) {
			files = append(files, path)
		}
	}
	done, err := readRecord[finished](f.files, f.path(doneName))
	if err == nil && done != nil {
		for _, s := range done.Shards {
			note(s)
		}
		all = true
	} else if written, whole, writtenErr := f.written(); writtenErr == nil {
		for _, s := range written {
			note(s)
		}
		all = whole && err == nil
	}
	slices.Sort(files)
	return slices.Compact(files), all
}

// written returns the complete shards according to their records. all is false if some records are
// damaged.
func (f *workDir) written() (written []ShardFile, all bool, err error) {
	names, err := f.named("shard-*.json")
	if err != nil {
		return nil, false, err
	}
	all = true
	for _, name := range names {
		r, err := undamaged(readSealed[shardRecord](f.files, name))
		if err != nil {
			return nil, false, err
		}
		if r == nil {
			all = false
			continue
		}
		written = append(written, r.Shard)
	}
	return written, all, nil
}

// paths returns the files of a shard with their sizes. The manifest's size is unknown, -1.
func (s *ShardFile) paths(l shards.Layout) map[string]int64 {
	of := formats.Of(l)
	paths := map[string]int64{of.At(s.Prefix, of.Manifest): -1}
	for name, file := range s.Files {
		paths[of.FilePath(s.Prefix, name)] = file.Bytes
	}
	return paths
}

// foreign returns an error if the output would overwrite a shard of another origin, or be mixed
// with such numbered shards. With Overwrite, they are replaced.
func (f *workDir) foreign() error {
	if f.o.ShardTokens == 0 && f.store == nil {
		if l, _, err := formats.Detect(f.o.Output); err == nil && l.ID == f.o.Layout && !f.o.Overwrite {
			// create rejects a shard of another layout
			return fmt.Errorf("the shard %s exists and does not belong to this job; replace it with --overwrite, "+
				"move it, or name another output", f.o.Output)
		}
		return nil
	}
	entries, err := f.files.FS().ReadDir(filepath.Dir(f.o.Output))
	if err != nil {
		return fmt.Errorf("looking for older shards: %w", err)
	}
	numbered := regexp.MustCompile("^" + regexp.QuoteMeta(filepath.Base(f.o.Output)) + `-\d{5,}(\.|$)`)
	for _, e := range entries {
		rest, ok := strings.CutPrefix(e.Name(), filepath.Base(f.o.Output))
		if f.o.ShardTokens == 0 { // the files of a single shard
			ok = ok && slices.Contains(endings(), rest)
		} else {
			ok = numbered.MatchString(e.Name())
		}
		if !ok {
			continue
		}
		path, advice := strings.TrimSuffix(f.o.Output, filepath.Base(f.o.Output))+e.Name(), ""
		if isShardFile(rest) && e.Type().IsRegular() {
			if f.o.Overwrite {
				f.d.Replaces = append(f.d.Replaces, path)
				continue
			}
			advice = "replace it with --overwrite, "
		}
		return fmt.Errorf("%s exists and does not belong to this job: %smove it, or name another output", path, advice)
	}
	return nil
}

// remove removes files of shards.
func (f *workDir) remove(paths []string) error {
	for _, path := range paths {
		if err := f.files.Remove(path); err != nil {
			return fmt.Errorf("removing files that the output replaces: %w", err)
		}
		// for a layout with one folder per shard; fails if the folder is not empty
		_ = f.files.FS().Remove(filepath.Dir(path))
	}
	return nil
}

// waitForWriters waits until no other process writes a shard. Such a process may replace the files
// of a complete shard by equal files: it took the shard over from a process that was stopped, and
// that process continued and completed the shard.
func (f *workDir) waitForWriters(ctx context.Context) error {
	names, err := f.named("shard-*" + locks.Suffix)
	if err != nil {
		return err
	}
	for _, name := range names {
		l, err := f.locks.Wait(ctx, name, f.o.tuning.poll)
		if err != nil {
			return err
		}
		l.Release()
	}
	return nil
}

// unchanged returns an error if a written shard is missing or changed.
func (f *workDir) unchanged(written []ShardFile) error {
	group := f.group()
	for _, s := range written {
		for path, size := range s.paths(f.d.Settings.Layout) {
			group.Go(func() error {
				info, err := f.files.FS().Stat(path)
				if err == nil && (size < 0 || info.Size() == size) {
					return nil
				}
				if err == nil {
					err = fmt.Errorf("%s has %d bytes, not %d", path, info.Size(), size)
				}
				return fmt.Errorf("the job %s wrote the shard %s, which has changed since: %w; restore it, or rebuild "+
					"everything with --overwrite", f.dir, s.Prefix, err)
			})
		}
	}
	return group.Wait()
}

// write writes v as a record.
func (f *workDir) write(path string, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return f.files.WriteFile(path, append(text, '\n'))
}

// readRecord reads a record. The result is nil if the record does not exist.
func readRecord[T any](files atomicfile.Files, path string) (*T, error) {
	text, err := filesystem.ReadFile(files.FS(), path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the job: %w", err)
	}
	v := new(T)
	if err := strictjson.Decode(text, v); err != nil {
		return nil, fmt.Errorf("%s: %w: %w", path, errDamaged, err)
	}
	return v, nil
}

// A sealedRecord is the record of a unit or a shard with its checksum. Its contents can be
// recomputed, so a damaged record is treated like a missing one.
type sealedRecord struct {
	Record json.RawMessage `json:"record"`
	CRC32C uint32          `json:"crc32c"`
}

// writeSealed writes v as a sealed record.
func (f *workDir) writeSealed(path string, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return f.write(path, sealedRecord{text, crc32.Checksum(text, castagnoli)})
}

// readSealed reads a sealed record. The result is nil if the record does not exist. Errors about
// its contents wrap errDamaged.
func readSealed[T any](files atomicfile.Files, path string) (*T, error) {
	sealed, err := readRecord[sealedRecord](files, path)
	if err != nil || sealed == nil {
		return nil, err
	}
	v := new(T)
	if crc32.Checksum(sealed.Record, castagnoli) != sealed.CRC32C {
		err = errors.New("its checksum is wrong")
	} else {
		err = strictjson.Decode(sealed.Record, v)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %w", path, errDamaged, err)
	}
	return v, nil
}

// undamaged returns r, or nil if r is damaged.
func undamaged[T any](r *T, err error) (*T, error) {
	if errors.Is(err, errDamaged) {
		return nil, nil
	}
	return r, err
}

// readUnit reads the record of a unit, nil if it is missing or damaged. The unit's missing segments
// are then encoded again.
func (f *workDir) readUnit(u int) (*unitRecord, error) {
	r, err := undamaged(readSealed[unitRecord](f.files, f.unitPath(u)))
	if r != nil && (r.Job != f.d.ID || len(r.Parts) != len(f.d.Units[u]) && !r.Cut ||
		len(r.Parts) > len(f.d.Units[u])) {
		return nil, nil // it belongs to another job
	}
	return r, err
}

// readShard reads the record of a shard, nil if it is missing or damaged. The shard is then written
// again.
func (f *workDir) readShard(k int) (*shardRecord, error) {
	r, err := undamaged(readSealed[shardRecord](f.files, f.shardPath(k)))
	if r != nil && r.Job != f.d.ID {
		return nil, nil
	}
	return r, err
}
