// Package job tokenizes documents into shards. Any number of processes can work on a job together,
// and the job survives the end of any of them.
//
// A job has a folder next to its output, PREFIX.job, which may be in an object store. Its inputs
// are divided into units. Processes claim units with locks (internal/locks), encode them, and write
// segments to the folder: files with the ids and origins of documents, which are created
// atomically. As soon as the segments of a shard are complete, a process claims and writes the
// shard. Records in the folder show which work is complete, so a killed process loses only its
// current segments and shard.
//
// The bytes of the output depend only on the inputs and on the settings that affect ids and order.
// They do not depend on the workers, memory, processes, the division into units and segments, or
// time. docs/formats/job.md describes the folder.
package job

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unicode/utf8"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"

	"mula/internal/filesystem"
	"mula/internal/filesystem/objectfs"
	"mula/internal/locks"
	"mula/internal/objects"
	"mula/internal/quantity"
	"mula/shards"
	"mula/shards/formats"
	"mula/tokenize"
	"mula/tokenize/documents"
)

// OnError defines how [Run] handles a document that cannot be used.
type OnError uint8

const (
	// Fail ends the job at the first such document in input order.
	Fail OnError = iota
	// Skip skips the document, counts it and lists it in the rejects file.
	Skip
)

// Options are the options of [Run]. The options up to MaxDocuments determine the bytes of the
// output. A job in the folder with other values of them is not resumed.
type Options struct {
	Tokenizer *tokenize.Tokenizer
	Specials  tokenize.Specials
	// AddSpecialTokens adds the tokens of the tokenizer's post-processor to each document, such as
	// a beginning-of-text id.
	AddSpecialTokens bool
	// end each document with EOD, unless the post-processor already added it
	AppendEOD bool
	EOD       uint32 // an id of the vocabulary

	Inputs []string // files, or "-" for standard input; each once
	// names of the inputs, for the ids of documents without ids, as returned by [documents.Find];
	// nil: [documents.BaseNames]
	Names []string
	Read  documents.Options

	// prefix of the shards' files, whose directory must exist, or the prefix of URLs of a store
	Output string
	// Work is a local folder for files that are being written, if Output is a URL.
	Work   string
	Layout shards.Layout

	// ShardTokens is the maximum number of tokens of a shard. A shard ends before the first
	// document that would exceed it, and the shards are named PREFIX-00000, PREFIX-00001 and so on.
	// Documents are never split: a longer document has its own shard. 0 means a single shard, named
	// PREFIX.
	ShardTokens int64
	// Shuffle puts the documents into an order that depends on ShuffleSeed, the number of each
	// document's input, and its offset there.
	Shuffle     bool
	ShuffleSeed uint64
	// Sample is the fraction of documents that are kept, from 0 to 1. The selection compares a
	// number drawn from input and offset with Sample, so a smaller sample is a subset of a larger
	// one. 0 means all. Unreadable documents are reported regardless of Sample.
	Sample float64
	// MaxDocuments is the maximum number of documents; the rest of the inputs is ignored. 0 means
	// all.
	MaxDocuments int64

	OnError OnError
	Rejects string // with Skip, the file that lists the skipped documents; "" for no file
	// MaxRejects is how many documents may be skipped; nil: any number. If more are skipped, the
	// job fails before it writes a shard. That is known only when all inputs are encoded.
	MaxRejects *RejectLimit

	// Overwrite restarts the job regardless of the folder's contents, unless another process works
	// there. Shards of the older job are kept until they are replaced. The rest of them are removed
	// at the end.
	Overwrite bool

	// approximate bytes of the inputs, on disk, that a process claims at a time; 0: 8 to 256 MiB.
	// The process that starts the job decides
	PieceBytes int64
	Workers    int // goroutines that encode, up to 4096; 0 means GOMAXPROCS
	// Memory bounds the bytes of texts and ids in flight, in addition to the largest document; 0
	// means 256 MiB. A shuffled output is gathered in portions of that size, with one read for each
	// segment of an eighth of the size: T bytes of ids need about 16 (T / Memory)^2 reads.
	Memory int64

	FS filesystem.FS // the file system of the folder and the output; nil = the machine's

	// Progress, if not nil, is called at most four times a second, and once at the end. Calls do
	// not overlap.
	Progress func(Progress)

	tuning tuning
}

// tuning holds parameters that tests change.
type tuning struct {
	timing locks.Timing
	// between checks of units that other processes hold: initial and maximum
	poll, maxPoll time.Duration
	segment       int64         // weight of a segment
	memory        int64         // for gathering shuffled documents
	lockFS        filesystem.FS // of locks in a folder; nil = the machine's
}

// Summary describes the result of the job, over all of its processes.
type Summary struct {
	Output    string                   `json:"output"`
	Documents int64                    `json:"documents"`
	Tokens    int64                    `json:"tokens"`
	TextBytes int64                    `json:"text_bytes"`
	Skipped   map[documents.Kind]int64 `json:"skipped"`
	// the file that lists the skipped documents
	Rejects string `json:"rejects,omitempty"`
	// of the process that ended the job
	Seconds float64     `json:"seconds"`
	Shards  []ShardFile `json:"shards"`
	Before  bool        `json:"complete_before,omitempty"` // the job was complete before this call
}

const (
	defaultMemory = 256 << 20
	minGathering  = 4 << 10 // for shuffled documents
)

// Run tokenizes documents into shards. It starts, joins or resumes the job of the output, and
// returns when the job is complete, even if another process completes it. If the job is already
// complete, Run returns at once. A job that reads standard input, or another input that is not a
// regular file, cannot be shared and restarts each time.
//
// The files of a shard get their final names when the shard is complete. An older shard of the same
// name is kept until then.
func Run(ctx context.Context, opts Options) (Summary, error) {
	start := time.Now()
	o := &opts
	if err := o.check(); err != nil {
		return Summary{}, err
	}
	if objects.IsURL(o.Output) {
		o.FS = objectfs.New(ctx, o.FS, o.Work)
	}
	f, done, err := openWorkDir(ctx, o)
	if err != nil {
		return Summary{}, full(err, nil)
	}
	defer f.close(ctx)
	if done != nil {
		done.Before = true
		if err := o.exceeded(&done.Summary); err != nil {
			return Summary{}, err
		}
		return done.Summary, f.removeLeftovers()
	}
	var p *process
	for reencoded := make(map[int]int); ; {
		p = newProcess(f, start)
		p.unitQueue.reencoded = reencoded
		done, err = p.run(ctx)
		var m *missing // rejects that were damaged at the end
		if !errors.As(err, &m) {
			break
		}
		if err = p.unitQueue.reencode(m.unit, m.segment, err); err != nil {
			break
		}
	}
	if errors.Is(err, errDone) { // another process completed the job during this process's work
		done, err = readRecord[finished](f.files, f.path(doneName))
		if err == nil && done != nil {
			err = f.removeLeftovers()
		} else if err == nil {
			err = fmt.Errorf("the job %s was complete, but its folder is gone; another process may have restarted it",
				f.dir)
		}
	}
	if err != nil {
		return Summary{}, full(err, p)
	}
	// another process ended the job, and may allow more skipped documents
	if err := o.exceeded(&done.Summary); err != nil {
		return Summary{}, err
	}
	return done.Summary, nil
}

// check completes the options and rejects invalid options before anything is written.
func (o *Options) check() error {
	if err := tokenize.CheckWorkers(o.Workers); err != nil {
		return err
	}
	if o.Workers == 0 {
		o.Workers = runtime.GOMAXPROCS(0)
	}
	if o.Memory <= 0 {
		o.Memory = defaultMemory
	}
	t := &o.tuning
	if t.timing == (locks.Timing{}) {
		t.timing = locks.DefaultTiming
	}
	if t.poll == 0 {
		t.poll, t.maxPoll = 50*time.Millisecond, 2*time.Second
		if objects.IsURL(o.Output) { // every look is a request
			t.poll, t.maxPoll = time.Second, 10*time.Second
		}
	}
	if t.memory == 0 {
		t.memory = o.Memory / 2
	}
	switch vocabulary := o.Tokenizer.VocabSize(); {
	case o.AppendEOD && int64(o.EOD) >= int64(vocabulary):
		return fmt.Errorf("the end-of-document id %d is outside the vocabulary of %d ids", o.EOD, vocabulary)
	case o.Names != nil && len(o.Names) != len(o.Inputs):
		return fmt.Errorf("there are %d inputs and %d names of inputs", len(o.Inputs), len(o.Names))
	case formats.Of(o.Layout) == nil:
		return fmt.Errorf("unknown layout %q", string(o.Layout))
	case len(o.Inputs) == 0:
		return errors.New("there are no inputs to tokenize")
	case o.Rejects != "" && o.OnError != Skip:
		return errors.New("a rejects file requires that bad documents are skipped, but the first bad document ends " +
			"the run")
	case o.ShardTokens < 0:
		return fmt.Errorf("invalid shard size of %d tokens; use 0 or more", o.ShardTokens)
	case o.MaxDocuments < 0:
		return fmt.Errorf("invalid maximum of %d documents; use 0 or more", o.MaxDocuments)
	case math.IsNaN(o.Sample) || o.Sample < 0 || o.Sample > 1:
		return fmt.Errorf("invalid fraction %v; it must be between 0 and 1", o.Sample)
	}
	files := filesystem.Default(o.FS)
	if base := filepath.Base(o.Output); o.Output == "" || base == "." || base == ".." ||
		os.IsPathSeparator(o.Output[len(o.Output)-1]) {
		return fmt.Errorf("%q is not a prefix for file names; append a name to the folder", o.Output)
	}
	if objects.IsURL(o.Output) {
		if err := o.checkURL(); err != nil {
			return err
		}
	} else if info, err := files.Stat(filepath.Dir(o.Output)); err != nil {
		return fmt.Errorf("the folder of the output %s: %w", o.Output, err)
	} else if !info.IsDir() {
		return fmt.Errorf("%s, the folder of the output, is a file", filepath.Dir(o.Output))
	}
	if o.Sample == 1 {
		o.Sample = 0
	}
	if !o.Shuffle {
		o.ShuffleSeed = 0
	}
	return o.checkInputs()
}

// checkURL checks an output in a store.
func (o *Options) checkURL() error {
	if err := objects.CheckWritable(o.Output); err != nil {
		return fmt.Errorf("output: %w", err)
	}
	_, key, _ := strings.Cut(o.Output, "://")
	if bucket, rest, ok := strings.Cut(key, "/"); !ok || rest == "" || path.Clean(rest) != rest || bucket == "" {
		return fmt.Errorf("the output %s must have a bucket and a prefix without empty parts, such as "+
			"s3://bucket/folder/name", o.Output)
	}
	if o.Work == "" {
		return fmt.Errorf("the output %s is a URL, which requires a local folder for files that are being written",
			o.Output)
	}
	return nil
}

// endings returns the endings of the files of shards of all layouts without folders.
func endings() (list []string) {
	for _, l := range formats.All() {
		if !l.Folder {
			list = append(list, slices.DeleteFunc(l.Endings(), func(ending string) bool { return ending == "" })...)
		}
	}
	return list
}

// isShardFile reports whether rest, which follows the prefix of the output, is the end of the name
// of a file of a shard, in any layout.
func isShardFile(rest string) bool {
	number := numberOfShard.FindString(rest)
	return slices.Contains(endings(), rest[len(number):])
}

var numberOfShard = regexp.MustCompile(`^(-\d{5,})?`)

// checkInputs rejects inputs that are listed twice or would be overwritten.
func (o *Options) checkInputs() error {
	// Files that the run would overwrite.
	type target struct {
		path string
		info fs.FileInfo
	}
	var targets []target // existing targets
	if rest, ok := strings.CutPrefix(filepath.Clean(o.Rejects), filepath.Clean(o.Output)); ok &&
		isShardFile(rest) {
		return fmt.Errorf("the rejects file %s has the name of a shard file; choose another name", o.Rejects)
	}
	var paths []string
	for _, ending := range endings() {
		paths = append(paths, o.Output+ending)
	}
	for _, path := range append(paths, o.Rejects) {
		info, err := filesystem.Default(o.FS).Stat(path)
		for _, t := range targets {
			if path == o.Rejects && err == nil && os.SameFile(t.info, info) {
				return fmt.Errorf("the rejects file %s is also a file of the shard; choose another name", o.Rejects)
			}
		}
		if err == nil {
			targets = append(targets, target{path, info})
		}
	}
	// Different paths of a file have the same size and time, so few pairs are compared.
	type stamp struct{ size, modified int64 }
	type listed struct {
		input string
		info  fs.FileInfo
	}
	files := make(map[stamp][]listed)
	stdin, urls := false, make(map[string]bool)
	for _, input := range o.Inputs {
		if !utf8.ValidString(input) {
			return fmt.Errorf("the name %q is not UTF-8, so a shard cannot refer to it; rename the file", input)
		}
		if len(input) > shards.MaxOriginLength {
			return fmt.Errorf("the name %.40q… has %d bytes, but a shard stores at most %d; rename the file", input,
				len(input),
				shards.MaxOriginLength)
		}
		if input == "-" {
			if stdin {
				return errors.New("standard input, \"-\", is listed twice; list it once")
			}
			stdin = true
			continue
		}
		if objects.IsURL(input) {
			name := objects.Clean(input)
			if urls[name] {
				return fmt.Errorf("the input %s is listed twice; remove one, or its documents would be duplicated",
					name)
			}
			urls[name] = true
			if rest, ok := strings.CutPrefix(name, o.Output); ok && isShardFile(rest) {
				return fmt.Errorf("the output would replace the input %s; choose another prefix for the output", name)
			}
			continue
		}
		info, err := os.Stat(input)
		if err != nil {
			return fmt.Errorf("tokenizing: %w", err)
		}
		for _, t := range targets {
			if os.SameFile(t.info, info) {
				return fmt.Errorf("the output %s would replace the input %s; choose another prefix for the output",
					t.path, input)
			}
		}
		at := stamp{info.Size(), info.ModTime().UnixNano()}
		for _, f := range files[at] {
			if os.SameFile(f.info, info) {
				if f.input == input {
					return fmt.Errorf("the input %s is listed twice; remove one, or its documents would be duplicated",
						input)
				}
				return fmt.Errorf("the inputs %s and %s are the same file; remove one, or its documents would be "+
					"duplicated", f.input, input)
			}
		}
		files[at] = append(files[at], listed{input, info})
	}
	return nil
}

// segmentBytes returns the weight of a segment for jobs with these options. With shuffling, a
// segment is sorted in memory.
func (o *Options) segmentBytes() int64 {
	switch {
	case o.tuning.segment > 0:
		return o.tuning.segment
	case o.Shuffle:
		return max(o.Memory/8, 1<<20)
	}
	return segmentBytes
}

// A process is this process's participation in a job.
type process struct {
	o     *Options
	f     *workDir
	start time.Time

	unitQueue  *unitQueue
	shardQueue *shardQueue
	order      order
	toEncode   chan *batch
	memory     *semaphore.Weighted // of texts and ids in flight
	inFlight   int64               // total of memory
	readers    int
	writers    int

	live     live
	skips    atomic.Int64
	shares   [][]int64 // of the inputs' bytes, by unit and part
	progress *meter
}

func newProcess(f *workDir, start time.Time) *process {
	o := f.o
	p := &process{o: o, f: f, start: start, unitQueue: newUnitQueue(f), toEncode: make(chan *batch), inFlight: o.Memory,
		shares: share(f.d)}
	p.shardQueue = &shardQueue{p: p, changes: make(chan struct{})}
	p.progress = &meter{p: p}
	p.readers = min(1+(o.Workers+workersPerReader-1)/workersPerReader, maxReaders)
	// A reader or writer of objects mostly waits.
	if slices.ContainsFunc(append([]string{o.Output}, o.Inputs...), objects.IsURL) {
		p.readers = max(p.readers, minObjectReaders)
	}
	p.writers = max(1, min(o.Workers/2, maxReaders))
	p.order = sequence{p.unitQueue}
	if f.d.Settings.Shuffle {
		// Half of the memory is for segments that are being sorted, and later for gathered
		// documents.
		p.inFlight = max(o.Memory/4, 1)
		p.readers = int(min(int64(p.readers), max(1, o.Memory/2/f.d.SegmentBytes)))
		p.writers = min(p.writers, 4)
		p.order = &shuffle{b: p.unitQueue, memory: max(o.tuning.memory/int64(p.writers), minGathering),
			turn: make(chan struct{}, 1)}
	}
	p.memory = semaphore.NewWeighted(p.inFlight)
	return p
}

// run takes part until the job is complete.
func (p *process) run(ctx context.Context) (*finished, error) {
	if err := p.unitQueue.findComplete(); err != nil {
		return nil, err
	}
	p.progress.kept = p.reckon().InputRead
	background, stop := context.WithCancel(ctx)
	var side sync.WaitGroup
	side.Go(func() { p.progress.run(background) })
	defer func() {
		stop()
		side.Wait()
	}()

	group, groupCtx := errgroup.WithContext(ctx)
	working, rest := context.WithCancel(groupCtx) // until all shards are complete
	defer rest()
	for range p.o.Workers {
		group.Go(func() error { p.work(working); return nil })
	}
	for range p.readers {
		group.Go(func() error { return p.encodeUnits(groupCtx) })
	}
	group.Go(func() error { return p.unitQueue.watch(working) })
	group.Go(func() error {
		if err := p.checkRejects(groupCtx); err != nil {
			return err
		}
		shardsGroup, ctx := errgroup.WithContext(groupCtx)
		shardsGroup.Go(func() error { return p.shardQueue.plan(ctx) })
		for range p.writers {
			shardsGroup.Go(func() error { return p.shardQueue.write(ctx) })
		}
		if err := shardsGroup.Wait(); err != nil {
			return err
		}
		// Another process may have written the last shard from units whose records this process has
		// not seen. finish needs the records, after all polling has stopped.
		if err := p.unitQueue.waitComplete(groupCtx); err != nil {
			return err
		}
		p.unitQueue.end()
		rest()
		return nil
	})
	if err := group.Wait(); err != nil {
		return nil, err
	}
	done, err := p.finish(ctx)
	if err != nil {
		return nil, err
	}
	stop()
	side.Wait()
	p.progress.show()
	return done, nil
}

// full adds the space requirement of the job to an error of a full disk. p may be nil.
func full(err error, p *process) error {
	if !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EDQUOT) {
		return err
	}
	need := "the ids and origins of all documents"
	if p != nil {
		if s := p.reckon(); s.InputRead > 0 && s.InputSize > 0 && s.Tokens > 0 {
			now := float64(s.Tokens)*float64(p.f.d.width()) + float64(s.Documents)*besideIDs
			need += fmt.Sprintf(", about %s", quantity.Bytes(int64(now*float64(s.InputSize)/float64(s.InputRead))))
		}
	}
	return fmt.Errorf("%w; the job needs disk space for %s, and up to as much again in its folder until the shards "+
		"are complete; free space and repeat the command: the job resumes from here", err, need)
}

// besideIDs is the approximate number of file bytes per document in addition to its ids: 20 in
// x.idx, the others, compressed, in x.docs.arrow.
const besideIDs = 32
