package blend

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"mula/index/cache"
	"mula/internal/filesystem"
	"mula/internal/objects"
	"mula/shards"
	"mula/shards/facts"
	"mula/shards/sample"
	"mula/shards/verifier"
)

// CompleteOptions are the options of [Complete].
type CompleteOptions struct {
	// Sums is the folder for the manifests and block sums. "" is the folder that was set when the
	// plan was built, else they are written beside the shards.
	Sums    string
	Threads int // number of shards that are read at once; at least 1

	// Together means that this process is one of a group, such as the ranks of a job. If one
	// process fails, all stop.
	Together bool

	Progress func(CompleteProgress) // calls do not overlap; may be nil

	// FS is the file system of the plan; nil is the machine's.
	FS filesystem.FS
}

// CompleteProgress is the progress of all processes that complete a plan.
type CompleteProgress struct {
	Shards, OfShards int   // complete, and all to complete
	Bytes, Total     int64 // of the complete shards and of the shards that this process reads; of all
	Read             int64 // bytes read by this process
	Path             string
	Waiting          string // another process, if this process waits for the shard at Path
}

// A Completion is the result of [Complete].
type Completion struct {
	Plan   *Plan // the complete plan
	Shards int   // number of shards that this process read
	Bytes  int64 // number of bytes of shards that this process read
}

// Complete reads the shards of a provisional plan completely, and replaces the file output, which
// is normally the plan's own file, by the complete plan. The complete plan equals a plan that was
// built without samples; it also has the samples, so that it is known to continue the provisional
// plan.
//
// Any number of processes may complete one plan at the same time. They divide the shards, and each
// byte is read once. A killed process loses the shards that it was reading. Complete compares the
// sampled blocks with the plan while it reads them, checks that .idx is consistent, and writes a
// manifest and block sums for each shard: see [shards.WriteSidecar]. If output is already complete,
// Complete does nothing.
func Complete(ctx context.Context, path, output string, o CompleteOptions) (*Completion, error) {
	j, err := newCompletionJob(path, output, o)
	if err != nil {
		return nil, err
	}
	if done := j.complete(); done != nil {
		return &Completion{Plan: done}, nil
	}
	if !j.plan.Provisional() {
		return &Completion{Plan: j.plan}, j.plan.WriteOn(o.FS, output)
	}
	if err := j.list(ctx); err != nil {
		return nil, err
	}
	if err := j.run(ctx, j.units); err != nil {
		return nil, err
	}
	p, err := j.finish()
	return &Completion{Plan: p, Shards: j.built, Bytes: j.read}, err
}

// newCompletionJob reads the plan at path.
func newCompletionJob(path, output string, o CompleteOptions) (*completionJob, error) {
	if objects.IsURL(output) {
		return nil, fmt.Errorf("%s is a URL, but the processes share a folder next to the complete plan; name a "+
			"file", output)
	}
	before, _ := os.Stat(output) // before the plan is read, so that no replacement is missed
	p, err := ReadPlan(path)
	if err != nil {
		return nil, err
	}
	return &completionJob{plan: p, output: output, before: before, o: o}, nil
}

// finish writes the complete plan, unless another process has written it.
func (j *completionJob) finish() (p *Plan, err error) {
	if p = j.complete(); p == nil {
		p, err = j.write()
	}
	if err == nil {
		err = j.clean()
	}
	return p, err
}

// A completionJob is one call of Complete.
type completionJob struct {
	plan   *Plan
	output string
	before os.FileInfo // of the output at the start; nil if it did not exist
	o      CompleteOptions
	state  string // folder of the locks and of the hashes of complete shards
	shards []completedShard
	units  []cache.Unit

	// of a completion in the background: counts bytes, and waits to limit the rate; else nil
	pace func(bytes int64)

	mu    sync.Mutex // guards what follows and calls of Progress
	done  []int64    // bytes, by shard
	read  int64
	total int64
	ended int // number of complete shards
	built int
}

// A completedShard is a shard to complete.
type completedShard struct {
	shardNumber
	name    string // for messages
	sidecar string // prefix of its manifest and sums
	bytes   int64
}

// errComplete ends the work because another process has written the complete plan.
var errComplete = errors.New("another process has completed the plan")

// complete returns the plan in the output if it is the complete plan, else nil.
func (j *completionJob) complete() *Plan {
	p, err := ReadPlan(j.output)
	if err != nil || p.Provisional() || !p.Has(j.plan.fingerprint) {
		return nil
	}
	return p
}

// overtaken reports whether another process has written the complete plan since the start. It does
// not read a file that has not been replaced.
func (j *completionJob) overtaken() bool {
	info, err := os.Stat(j.output)
	return err == nil && (j.before == nil || !os.SameFile(info, j.before)) && j.complete() != nil
}

// list lists the shards and the units of work.
func (j *completionJob) list(ctx context.Context) (err error) {
	j.state = strings.TrimSuffix(j.output, ".json") + ".complete"
	folder := j.o.Sums
	if folder != "" {
		if folder, err = absolutePath(folder); err != nil {
			return err
		}
	}
	p := j.plan
	for i := range p.Sources {
		for k := range p.Sources[i].Shards {
			sh := &p.Sources[i].Shards[k]
			if sh.Sample == "" {
				continue
			}
			path := p.ShardPath(i, k)
			c := completedShard{shardNumber: shardNumber{i, k}, sidecar: path,
				name:  fmt.Sprintf("shard %d of source %s, %s", k+1, p.Sources[i].Name, filepath.Base(path)),
				bytes: sh.Tokens * int64(sh.DType.Size())}
			if folder != "" {
				sh.sums = sidecarIn(folder, path, sh.Sample)
			}
			if sh.sums != "" {
				c.sidecar = p.sidecar(i, k)
			}
			size, err := sizeOf(ctx, path+".idx")
			if err != nil {
				return fmt.Errorf("source %q: %w", p.Sources[i].Name, err)
			}
			c.bytes += size
			settings, err := json.Marshal(map[string]string{"sample": sh.Sample, "sums": sh.sums})
			if err != nil {
				return err
			}
			n := len(j.shards)
			name := fmt.Sprintf("%04d-%05d", i, k)
			j.units = append(j.units, cache.Unit{Name: c.name, Files: []string{name + ".hashes"},
				Marker: name + ".done", MarkerText: []byte("done\n"), Settings: settings, Expect: hashesLength,
				Sizes: func(context.Context) ([]int64, error) { return []int64{hashesLength}, nil },
				Build: func(ctx context.Context, files []io.WriterAt) error { return j.build(ctx, n, files[0]) }})
			j.shards = append(j.shards, c)
			j.total += c.bytes
		}
	}
	j.done = make([]int64, len(j.shards))
	return nil
}

// run completes the shards of units, together with other processes.
func (j *completionJob) run(ctx context.Context, units []cache.Unit) error {
	byName := make(map[string]int, len(j.shards))
	for n := range j.shards {
		byName[j.shards[n].name] = n
	}
	_, err := cache.Run(ctx, j.state, units, cache.Options{Threads: max(j.o.Threads, 1), Resume: true,
		Together: j.o.Together, Progress: func(e cache.Event) { j.event(byName[e.Unit], e) }})
	if err != nil && ctx.Err() == nil && j.complete() != nil {
		return nil // another process has finished all shards and removed the folder
	}
	return err
}

// event counts complete shards.
func (j *completionJob) event(n int, e cache.Event) {
	j.mu.Lock()
	defer j.mu.Unlock()
	waiting := ""
	switch e.Stage {
	case cache.Done, cache.Kept, cache.Foreign:
		j.done[n] = j.shards[n].bytes
		j.ended++
	case cache.Waiting:
		waiting = e.Holder
	}
	j.tell(n, waiting)
}

// tell calls Progress. The job must be locked.
func (j *completionJob) tell(n int, waiting string) {
	if j.o.Progress == nil {
		return
	}
	p := CompleteProgress{Shards: j.ended, OfShards: len(j.shards), Total: j.total, Read: j.read,
		Path: j.shards[n].name, Waiting: waiting}
	for _, bytes := range j.done {
		p.Bytes += bytes
	}
	j.o.Progress(p)
}

// hashesLength is the length of a shard's file in the folder of the state: the SHA-256 of .bin and
// of .idx, each in a line.
const hashesLength = 2 * (64 + 1)

// build completes a shard and writes its hashes.
func (j *completionJob) build(ctx context.Context, n int, file io.WriterAt) error {
	if j.overtaken() {
		return errComplete
	}
	if j.pace != nil {
		verifier.LowestPriority()
	}
	bin, index, err := j.hash(ctx, n)
	if err != nil {
		return err
	}
	_, err = file.WriteAt([]byte(bin+"\n"+index+"\n"), 0)
	return err
}

// hash reads a shard and writes its manifest and sums. If the manifest exists, from an earlier
// completion, it compares only the sampled blocks.
func (j *completionJob) hash(ctx context.Context, n int) (bin, index string, err error) {
	p, c := j.plan, &j.shards[n]
	path := p.ShardPath(c.source, c.shard)
	s, err := shards.OpenFrom(ctx, path, c.sidecar)
	if err != nil {
		return "", "", fmt.Errorf("source %q: %w", p.Sources[c.source].Name, err)
	}
	m, is := s.Manifest(), facts.Of(s)
	size := is.Tokens * int64(is.DType.Size()) // of .bin
	blocks := sample.NewCollector(size, c.bytes-size)
	if err := errors.Join(p.compareFacts(c.source, c.shard, is), s.Close()); err != nil {
		return "", "", err
	}
	if m != nil {
		if err := p.readSample(ctx, c.source, c.shard); err != nil {
			return "", "", err
		}
		return m.Files["bin"].SHA256, m.Files["idx"].SHA256, nil
	}
	if !objects.IsURL(c.sidecar) {
		if err := os.MkdirAll(filepath.Dir(c.sidecar), 0o777); err != nil {
			return "", "", err
		}
	}
	m, err = shards.WriteSidecar(ctx, path, c.sidecar, blocks.Add,
		func() error { return p.compareSample(c.source, c.shard, blocks) },
		func(bytes int64) {
			j.mu.Lock()
			j.read += bytes
			j.done[n] += bytes
			j.tell(n, "")
			j.mu.Unlock()
			if j.pace != nil {
				j.pace(bytes)
			}
		})
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) {
		err = fmt.Errorf("%w; name another folder for manifests and block sums with --sums", err)
	}
	if err != nil {
		return "", "", fmt.Errorf("source %q: %w", p.Sources[c.source].Name, err)
	}
	j.mu.Lock()
	j.built++
	j.mu.Unlock()
	return m.Files["bin"].SHA256, m.Files["idx"].SHA256, nil
}

// write writes the complete plan from the hashes of all shards.
func (j *completionJob) write() (*Plan, error) {
	p, before := j.plan, j.plan.fingerprint
	for n := range j.shards {
		c := &j.shards[n]
		path := filepath.Join(j.state, j.units[n].Files[0])
		text, err := os.ReadFile(path)
		if err != nil {
			if done := j.complete(); done != nil { // another process was faster
				return done, nil
			}
			return nil, err
		}
		lines := bytes.Split(text, []byte("\n"))
		if len(lines) != 3 {
			return nil, fmt.Errorf("%s has %d lines, want 2; remove the folder %s, and complete the plan again", path,
				len(lines)-1, j.state)
		}
		sh := &p.Sources[c.source].Shards[c.shard]
		index := string(lines[1])
		if sh.Index != "" && sh.Index != index {
			return nil, p.changed(c.source, c.shard, "SHA-256 of .idx is %.16s…, was %.16s…", index, sh.Index)
		}
		sh.Bin, sh.Index, sh.sampled, sh.Sample, sh.blocks = string(lines[0]), index, sh.Sample, "", ""
		if !sh.sealed() {
			return nil, fmt.Errorf("%s has no SHA-256; remove the folder %s, and complete the plan again", path,
				j.state)
		}
	}
	if err := p.seal(); err != nil {
		return nil, err
	}
	if p.provisional != before {
		return nil, fmt.Errorf("the complete plan has the provisional fingerprint %s, want %s", p.provisional, before)
	}
	return p, p.WriteOn(j.o.FS, j.output)
}

// clean removes the folder of the state, unless another process uses it.
func (j *completionJob) clean() error {
	if others, err := cache.Builders(j.state); err != nil || len(others) > 0 {
		return nil // the last process removes it
	}
	return os.RemoveAll(j.state)
}

// A backgroundCompletion completes a plan while its samples are read. The verifier of a process
// calls shard for the process's part of the shards.
type backgroundCompletion struct {
	plan *Plan
	job  *completionJob // nil before the first shard
}

// shard completes a shard. If it is the last, shard writes the complete plan. pace is called with
// the number of bytes after each read.
func (b *backgroundCompletion) shard(ctx context.Context, source, shard int, pace func(bytes int64)) error {
	if b.job == nil {
		job, err := newCompletionJob(b.plan.file, b.plan.file, CompleteOptions{})
		if err == nil {
			err = job.list(ctx)
		}
		if err != nil {
			return err
		}
		b.job = job
	}
	j := b.job
	if j.overtaken() {
		return nil
	}
	j.pace = pace
	for n := range j.shards {
		if j.shards[n].shardNumber == (shardNumber{source, shard}) {
			if err := j.run(ctx, j.units[n:n+1]); err != nil {
				return err
			}
		}
	}
	for n := range j.units {
		if _, err := os.Stat(filepath.Join(j.state, j.units[n].Marker)); err != nil {
			return nil // another process hashes this shard, or this process will
		}
	}
	_, err := j.finish()
	return err
}
