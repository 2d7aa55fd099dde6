package job

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"mula/internal/atomicfile"
	"mula/internal/locks"
	"mula/internal/strictjson"
	"mula/shards"
	"mula/shards/formats"
	"mula/tokenize/documents"
)

// FolderSuffix ends the name of a job's folder, which begins with the prefix of the output.
const FolderSuffix = ".job"

// What lies in the folder, beside segments and locks. What a record says is there was on disk
// before it.
//
//	job.json          the description
//	unit-00012.json   the unit was encoded: all its segments are there, unless shards that are complete took all of their documents
//	shard-00003.json  the shard is complete
//	done.json         so is the output; nothing else but job.json is needed
const (
	descriptionName = "job.json"
	doneName        = "done.json"
)

// A unitRecord says that a unit was encoded.
type unitRecord struct {
	Parts    []totals        `json:"parts"`
	Segments []segmentRecord `json:"segments"`
	// it has as many documents as are wanted in all, and was not read further
	Cut bool `json:"cut,omitempty"`
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

// A shardRecord says that a shard is complete.
type shardRecord struct {
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
	DType     string                     `json:"dtype"`
	Files     map[string]shards.FileInfo `json:"files"` // as in [shards.Manifest]
}

// A folder is the folder of a job that this process takes part in.
type folder struct {
	dir       string
	o         *Options
	d         *description
	locks     *locks.Set
	presence  *locks.Lock
	presentAt string // where presence lies
	stopBeat  func()
	worthless bool // what was done has come to nothing
}

func (f *folder) path(name string) string { return filepath.Join(f.dir, name) }

func (f *folder) unitPath(u int) string  { return f.path(fmt.Sprintf("unit-%05d.json", u)) }
func (f *folder) shardPath(k int) string { return f.path(fmt.Sprintf("shard-%05d.json", k)) }

func (f *folder) unitLock(u int) string  { return f.path(fmt.Sprintf("unit-%05d%s", u, locks.Suffix)) }
func (f *folder) shardLock(k int) string { return f.path(fmt.Sprintf("shard-%05d%s", k, locks.Suffix)) }

// prefix is that of shard k.
func (f *folder) prefix(k int) string {
	if f.d.Settings.ShardTokens == 0 {
		return f.o.Output
	}
	return fmt.Sprintf("%s-%05d", f.o.Output, k)
}

// openFolder joins the job that the options ask for, or begins it. done is its end if it has come
// to one.
func openFolder(ctx context.Context, o *Options) (f *folder, done *finished, err error) {
	want, err := describe(o)
	if err != nil {
		return nil, nil, err
	}
	f = &folder{dir: o.Output + FolderSuffix, o: o}
	for try := 0; ; try++ {
		if err := os.MkdirAll(f.dir, 0o777); err != nil {
			return nil, nil, fmt.Errorf("making the job's folder: %w", err)
		}
		if f.locks, err = locks.Open(f.dir, o.tuning.timing); err == nil {
			break
		}
		// A process that gives its job up removes the folder.
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
	err = f.alone(ctx, func() error {
		done, err = f.join(ctx, want)
		return err
	})
	if err != nil {
		f.close()
		return nil, nil, err
	}
	return f, done, nil
}

// close ends taking part. A folder without any work in it is removed.
func (f *folder) close() {
	if f.presence != nil {
		f.presence.Release()
	}
	if f.locks == nil {
		return
	}
	_ = f.alone(context.Background(), func() error { // no matter: what stays is harmless
		if holder, err := f.others(); err != nil || holder != "" || f.worked() && !f.worthless || f.d == nil ||
			len(f.d.Replaces) > 0 {
			return err
		}
		return f.clear(true)
	})
	f.stopBeat()
	f.locks.Close()
	os.Remove(f.dir) // if it is empty
}

// alone runs do while no other process that runs alone does.
func (f *folder) alone(ctx context.Context, do func() error) error {
	l, err := f.locks.Wait(ctx, f.path("job"+locks.Suffix), f.o.tuning.poll)
	if err != nil {
		return fmt.Errorf("opening the job %s: %w", f.dir, err)
	}
	defer l.Release()
	return do()
}

// others names a process that takes part in the job, if there is another one.
func (f *folder) others() (holder string, err error) {
	names, err := filepath.Glob(f.path("process-*" + locks.Suffix))
	if err != nil {
		return "", err
	}
	for _, name := range names {
		if name == f.presentAt {
			continue
		}
		l, holder, err := f.locks.Acquire(name)
		if err != nil || l == nil {
			return holder, err
		}
		l.Release()
	}
	return "", nil
}

// worked reports whether the folder has something that would be lost with it.
func (f *folder) worked() bool {
	entries, err := os.ReadDir(f.dir)
	return err != nil || slices.ContainsFunc(entries, func(e fs.DirEntry) bool {
		name := e.Name()
		return name == doneName || spoolName.MatchString(name)
	})
}

// spoolName are the names of what a job leaves to be done away with.
var spoolName = regexp.MustCompile(`^(unit-\d{5,}(\.\d{4,}\.(segment|rejects)|\.json)|shard-\d{5,}\.json)$`)

// clear removes what lies in the folder, but no locks. Without all, job.json and done.json stay.
func (f *folder) clear(all bool) error {
	entries, err := os.ReadDir(f.dir)
	if err != nil {
		return err
	}
	remove := func(name string) error { return atomicfile.Remove(f.path(name)) }
	if all {
		// First what says that something is there.
		for _, name := range []string{doneName, descriptionName} {
			if err := remove(name); err != nil {
				return err
			}
		}
		if err := atomicfile.SyncDir(f.dir); err != nil {
			return err
		}
	}
	for _, records := range []bool{true, false} {
		for _, e := range entries {
			if name := e.Name(); spoolName.MatchString(name) && strings.HasSuffix(name, ".json") == records {
				if err := remove(name); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// join decides what becomes of what lies in the folder. It runs alone.
func (f *folder) join(ctx context.Context, want *description) (*finished, error) {
	if err := locks.Clean(f.dir); err != nil {
		return nil, err
	}
	for _, dir := range []string{f.dir, filepath.Dir(f.o.Output)} {
		if _, err := atomicfile.Clean(dir); err != nil {
			return nil, err
		}
	}
	old, err := readRecord[description](f.path(descriptionName))
	if err == nil && old != nil {
		if old.Format < 1 || old.Format > descriptionFormat {
			err = fmt.Errorf("%s is of format %d, this program knows formats up to %d", f.path(descriptionName),
				old.Format, descriptionFormat)
		} else {
			err = old.valid()
		}
	}
	if err != nil && !f.o.Overwrite {
		return nil, anew(err)
	}
	why := f.refuses(ctx, old, want)
	if old != nil && why == nil {
		f.d = old
		f.o.Read.KeepMark = old.Format == 1
		done, err := readRecord[finished](f.path(doneName))
		if err != nil {
			return nil, anew(err)
		}
		if done != nil {
			return done, f.unchanged(done.Shards)
		}
		written, _, err := f.written()
		if err == nil {
			err = f.unchanged(written)
		}
		if err != nil {
			return nil, err
		}
		return nil, f.enter()
	}
	if holder, err := f.others(); err != nil {
		return nil, err
	} else if holder != "" {
		if errors.Is(why, errAnew) {
			why = errors.New("it cannot start anew meanwhile")
			if old.Private || want.Private {
				why = errors.New("a job that reads standard input or a pipe cannot be shared")
			}
		}
		return nil, fmt.Errorf("%s works on the job %s: %w; wait for its end, stop it, or name another output", holder,
			f.dir, why)
	}
	if why != nil && !errors.Is(why, errAnew) && f.worked() {
		return nil, anew(why)
	}
	f.d = want
	want.SegmentBytes = f.o.segmentBytes()
	var all bool
	want.Replaces, all = f.outputs(old)
	// What can fail, or takes long, comes before the older job is done away with.
	if err := want.cut(ctx, f.o, f.o.PieceBytes); err != nil {
		return nil, err
	}
	if !all {
		if err := f.foreign(); err != nil {
			return nil, err
		}
	}
	if old != nil && old.Settings.Layout != want.Settings.Layout { // one prefix cannot have shards of both
		if err := remove(want.Replaces); err != nil {
			return nil, err
		}
		want.Replaces = nil
	}
	if w, err := create(want.Settings, f.prefix(0)); err != nil {
		// refuses what can be no shard before the work, not after it
		return nil, err
	} else {
		w.Abort()
	}
	if err := f.clear(true); err != nil {
		return nil, err
	}
	if err := atomicfile.SyncDir(filepath.Dir(f.dir)); err != nil { // the folder itself
		return nil, err
	}
	if err := f.write(f.path(descriptionName), want); err != nil {
		return nil, err
	}
	return nil, f.enter()
}

// anew adds to an error what helps against it.
func anew(err error) error {
	return fmt.Errorf("%w; start the job anew with --overwrite, or name another output", err)
}

// errAnew is why a job that may not go on may start anew without a word.
var errAnew = errors.New("starts anew")

// refuses says why the job that old describes is not the one that is wanted.
func (f *folder) refuses(ctx context.Context, old, want *description) error {
	if old == nil || f.o.Overwrite {
		return errAnew
	}
	if d := want.difference(old); d != "" {
		return fmt.Errorf("%s is the folder of a job with other settings: %s", f.dir, d)
	}
	if old.Private || want.Private {
		return errAnew
	}
	return f.reconcile(ctx, old, want)
}

// enter makes it known that this process takes part.
func (f *folder) enter() error {
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

// reconcile looks at inputs whose size or time is not what it was. If what was read of them is
// still there, the job goes on with what is there now.
func (f *folder) reconcile(ctx context.Context, old, want *description) error {
	changed := want.changed(old)
	if len(changed) == 0 {
		return nil
	}
	if done, err := readRecord[finished](f.path(doneName)); err != nil {
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
	var redo []int // units that were begun
	for n, u := range old.Units {
		if !slices.ContainsFunc(u, func(p part) bool { return differs[p.Input] }) {
			continue
		}
		record, err := readSealed[unitRecord](f.unitPath(n))
		if err != nil {
			return fmt.Errorf("the input %s has changed since the job began, and whether it was read is not known: %w",
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
				return fmt.Errorf("the input %s has changed since the job began: it had %d bytes and has %d", now.Path,
					was.Size, now.Size)
			}
			if record == nil {
				continue
			}
			sum := ""
			if record.Parts[i].SHA256 != "" {
				if sum, err = hashPart(ctx, f.o, old.Inputs, p); err != nil {
					return err
				}
			}
			if sum == "" || sum != record.Parts[i].SHA256 {
				return fmt.Errorf("the input %s has changed since the job began, which has read it: it was last "+
					"modified at %s, and is now of %s",
					now.Path, stamp(was), stamp(now))
			}
		}
	}
	if holder, err := f.others(); err != nil {
		return err
	} else if holder != "" && len(redo) > 0 {
		return fmt.Errorf("the input %s has changed since the job began", want.Inputs[changed[0]].Path)
	}
	for _, n := range redo {
		if err := f.removeSegments(n); err != nil {
			return err
		}
	}
	old.Inputs = want.Inputs
	return f.write(f.path(descriptionName), old)
}

// reconcileDone is [folder.reconcile] for a job that is done: done.json has the hashes, the records
// of units are gone.
func (f *folder) reconcileDone(ctx context.Context, old, want *description, done *finished) error {
	if len(done.Inputs) != len(old.Inputs) {
		return fmt.Errorf("%s is damaged: it has %d inputs, the job %d", f.path(doneName), len(done.Inputs),
			len(old.Inputs))
	}
	for _, i := range want.changed(old) {
		was, now := old.Inputs[i], want.Inputs[i]
		for _, p := range done.Inputs[i].Pieces {
			if p.SHA256 == "" && done.Inputs[i].Documents == 0 {
				continue // behind the last document that was wanted
			}
			sum := ""
			if p.SHA256 != "" && was.Size == now.Size {
				var err error
				if sum, err = hashPart(ctx, f.o, old.Inputs, part{i, p.Start, p.End}); err != nil {
					return err
				}
			}
			if sum == "" || sum != p.SHA256 {
				return fmt.Errorf("the input %s has changed since the job has read it: it had %d bytes, last "+
					"modified at %s, and has %d of %s",
					now.Path, was.Size, stamp(was), now.Size, stamp(now))
			}
		}
	}
	old.Inputs = want.Inputs
	return f.write(f.path(descriptionName), old)
}

func stamp(in input) string { return time.Unix(0, in.Modified).UTC().Format(time.RFC3339Nano) }

// hashPart gives the SHA-256 of a part's bytes on disk by reading it.
func hashPart(ctx context.Context, o *Options, inputs []input, p part) (string, error) {
	r, err := documents.Open(ctx, documents.Piece{File: inputs[p.Input].Path, Start: p.Start, End: p.End}, o.Read)
	var bad *documents.DocumentError
	if errors.As(err, &bad) {
		return "", nil // broken: not what it was
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

// removeSegments removes what was begun of a unit.
func (f *folder) removeSegments(u int) error {
	for _, kind := range []string{"segment", "rejects"} {
		names, err := filepath.Glob(f.path(fmt.Sprintf("unit-%05d.*.%s", u, kind)))
		if err != nil {
			return err
		}
		for _, name := range names {
			if err := atomicfile.Remove(name); err != nil {
				return err
			}
		}
	}
	return nil
}

// outputs are the files of shards that a job has made or wanted to replace, by base name or below
// it. all is false if there may be more of them.
func (f *folder) outputs(d *description) (files []string, all bool) {
	if d == nil {
		return nil, false
	}
	files = slices.Clone(d.Replaces)
	note := func(s ShardFile) {
		for path := range s.paths(d.Settings.Layout) {
			files = append(files, path)
		}
	}
	done, err := readRecord[finished](f.path(doneName))
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

// written are the shards that are complete by their records. all is false if there are records that
// are damaged.
func (f *folder) written() (written []ShardFile, all bool, err error) {
	names, err := filepath.Glob(f.path("shard-*.json"))
	if err != nil {
		return nil, false, err
	}
	all = true
	for _, name := range names {
		r, err := undamaged(readSealed[shardRecord](name))
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

// paths are the files of a shard, with their sizes; that of the manifest is not known and -1.
func (s *ShardFile) paths(l shards.Layout) map[string]int64 {
	paths := map[string]int64{s.Prefix + ".json": -1}
	if l == shards.MDS {
		paths = map[string]int64{filepath.Join(s.Prefix, "mula.json"): -1}
	}
	for name, file := range s.Files {
		paths[formats.FilePath(l, s.Prefix, name)] = file.Bytes
	}
	return paths
}

// foreign refuses an output that would take the place of a shard, or come to stand among numbered
// ones, of which this job knows nothing. With Overwrite they are to be replaced.
func (f *folder) foreign() error {
	if f.o.ShardTokens == 0 {
		if l, _, err := formats.Detect(f.o.Output); err == nil && l == f.o.Layout && !f.o.Overwrite {
			// one of another layout is refused by [create]
			return fmt.Errorf("a shard %s is there, and is not known to come from this job: replace it with "+
				"--overwrite, move it away, or name another output", f.o.Output)
		}
		return nil
	}
	entries, err := os.ReadDir(filepath.Dir(f.o.Output))
	if err != nil {
		return fmt.Errorf("looking for older shards: %w", err)
	}
	numbered := regexp.MustCompile("^" + regexp.QuoteMeta(filepath.Base(f.o.Output)) + `-\d{5,}(\.|$)`)
	for _, e := range entries {
		if !numbered.MatchString(e.Name()) {
			continue
		}
		path, advice := filepath.Join(filepath.Dir(f.o.Output), e.Name()), ""
		if shardFile.MatchString(strings.TrimPrefix(e.Name(), filepath.Base(f.o.Output))) && e.Type().IsRegular() {
			if f.o.Overwrite {
				f.d.Replaces = append(f.d.Replaces, path)
				continue
			}
			advice = "replace it with --overwrite, "
		}
		return fmt.Errorf("%s stands where the shards of this job are to be, and is not known to come from it: "+
			"%smove it away, or name another output", path, advice)
	}
	return nil
}

// remove removes files of shards.
func remove(paths []string) error {
	for _, path := range paths {
		if err := atomicfile.Remove(path); err != nil {
			return fmt.Errorf("removing what the output replaces: %w", err)
		}
		os.Remove(filepath.Dir(path)) // of a layout with a folder a shard, if it is empty
	}
	return nil
}

// unchanged makes sure that shards that were written are still there.
func (f *folder) unchanged(written []ShardFile) error {
	for _, s := range written {
		for path, size := range s.paths(f.d.Settings.Layout) {
			info, err := os.Stat(path)
			if err == nil && (size < 0 || info.Size() == size) {
				continue
			}
			if err == nil {
				err = fmt.Errorf("%s has %d bytes, not %d", path, info.Size(), size)
			}
			return fmt.Errorf("the job %s has written the shard %s, but it is not what it was: %w; restore it, or "+
				"make all anew with --overwrite", f.dir, s.Prefix, err)
		}
	}
	return nil
}

// write makes v the content of a record.
func (f *folder) write(path string, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return atomicfile.WriteFile(path, append(text, '\n'))
}

// readRecord reads a record, nil if there is none.
func readRecord[T any](path string) (*T, error) {
	text, err := os.ReadFile(path)
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

// A sealedRecord is a record of a unit or a shard with its sum. What it says can be found out
// again, so that one that is damaged counts as one that is not there.
type sealedRecord struct {
	Record json.RawMessage `json:"record"`
	CRC32C uint32          `json:"crc32c"`
}

// writeSealed makes v the content of a sealed record.
func (f *folder) writeSealed(path string, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return f.write(path, sealedRecord{text, crc32.Checksum(text, castagnoli)})
}

// readSealed reads a sealed record, nil if there is none. An error about its content wraps
// errDamaged.
func readSealed[T any](path string) (*T, error) {
	sealed, err := readRecord[sealedRecord](path)
	if err != nil || sealed == nil {
		return nil, err
	}
	v := new(T)
	if crc32.Checksum(sealed.Record, castagnoli) != sealed.CRC32C {
		err = errors.New("its sum is another")
	} else {
		err = strictjson.Decode(sealed.Record, v)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %w", path, errDamaged, err)
	}
	return v, nil
}

// undamaged is r, or nil if it was found damaged.
func undamaged[T any](r *T, err error) (*T, error) {
	if errors.Is(err, errDamaged) {
		return nil, nil
	}
	return r, err
}

// readUnit reads the record of a unit, nil if there is none or it is damaged: the unit is then
// encoded again, as far as its segments are not there.
func (f *folder) readUnit(u int) (*unitRecord, error) {
	r, err := undamaged(readSealed[unitRecord](f.unitPath(u)))
	if r != nil && (len(r.Parts) != len(f.d.Units[u]) && !r.Cut || len(r.Parts) > len(f.d.Units[u])) {
		return nil, nil // it is of another job
	}
	return r, err
}

// readShard reads the record of a shard, nil if there is none or it is damaged: the shard is then
// written again.
func (f *folder) readShard(k int) (*shardRecord, error) {
	return undamaged(readSealed[shardRecord](f.shardPath(k)))
}
