// Package job turns documents into shards: a job, whose work any number of processes share and
// which survives any of them.
//
// A job has a folder beside its output, PREFIX.job. Its inputs are cut into units, which processes
// claim by locks (internal/locks), encode, and put down there as segments: ids and origins of
// documents, in files that appear whole or not at all. As soon as the segments of a shard are
// complete, a process claims and writes it. What is done is told by records in the folder, so that
// a process that is killed costs the segments and the shard in its work, and nothing else.
//
// The bytes of the output depend on the inputs and on the settings that have to do with ids and
// order: never on workers, memory, processes, the cut into units and segments, or time.
// docs/formats/job.md describes the folder.
package job

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unicode/utf8"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"

	"mula/internal/locks"
	"mula/internal/quantity"
	"mula/shards"
	"mula/tokenize"
	"mula/tokenize/documents"
)

// OnError is what [Run] does with a document that cannot be used.
type OnError uint8

const (
	// Fail ends the job at the first one in the order of the inputs.
	Fail OnError = iota
	// Skip leaves it out, counts it and lists it in the rejects file.
	Skip
)

// Options are the choices for [Run]. Those up to MaxDocuments decide the bytes of the output; a job
// in the folder that has others of them is refused.
type Options struct {
	Tokenizer *tokenize.Tokenizer
	Specials  tokenize.Specials
	// AddSpecialTokens puts around each document what the tokenizer's post-processor adds, such as
	// an id for its beginning.
	AddSpecialTokens bool
	AppendEOD        bool   // end each document with EOD, unless the post-processor already has
	EOD              uint32 // an id of the vocabulary

	Inputs []string // files, or "-" for standard input; each once
	// of the inputs, for the ids of documents that have none, as [documents.Find] gives them; nil:
	// [documents.BaseNames]
	Names []string
	Read  documents.Options

	Output string // prefix of the shards' files; their directory must exist
	Layout shards.Layout

	// ShardTokens is the greatest number of tokens of a shard: it is closed before the document
	// that would bring it above, and the shards are named PREFIX-00000, PREFIX-00001 and so on. A
	// document is never split; one of more tokens has a shard of its own. 0 means one shard, named
	// PREFIX.
	ShardTokens int64
	// Shuffle puts the documents into an order that depends on ShuffleSeed, the number of each
	// one's input and its offset there.
	Shuffle     bool
	ShuffleSeed uint64
	// Sample is the share of documents that are kept, from 0 to 1: those for which a number drawn
	// by input and offset is small enough, so that a smaller sample is part of a larger one. 0
	// means all. Documents that cannot be read are reported all the same.
	Sample float64
	// MaxDocuments is the number of documents after which the inputs are taken to end; 0 means all.
	MaxDocuments int64

	OnError OnError
	Rejects string // with Skip, the file that lists what was skipped; "" for none
	// MaxRejects is how many documents may be skipped; nil: any number. If there are more, the job
	// fails before it writes a shard. Whether there are more is known when all inputs are encoded.
	MaxRejects *RejectLimit

	// Overwrite starts the job anew whatever the folder holds, unless another process works there.
	// Shards of the older job stay until they are replaced; what is left of them at the end is
	// removed.
	Overwrite bool

	// about how much of the inputs, on disk, a process claims at a time; 0: 8 to 256 MiB. The first
	// process decides
	PieceBytes int64
	Workers    int // goroutines that encode, up to 4096; 0 means GOMAXPROCS
	// Memory bounds the bytes of texts and ids in flight, beside the largest document; 0 means 256
	// MiB. A shuffled output is gathered in that much at a time, with one read for each segment of
	// an eighth of it: T bytes of ids take about 16 (T / Memory)^2 reads.
	Memory int64

	// Progress, if not nil, is called four times a second at most, and once at the end, always from
	// one goroutine at a time.
	Progress func(Progress)

	tuning tuning
}

// tuning is what tests change.
type tuning struct {
	timing        locks.Timing
	poll, maxPoll time.Duration // between looks at what others have in hand: at first, at most
	segment       int64         // weight of a segment
	memory        int64         // with which shuffled documents are gathered
}

// Summary is what the job has done, all of its processes together.
type Summary struct {
	Output    string                   `json:"output"`
	Documents int64                    `json:"documents"`
	Tokens    int64                    `json:"tokens"`
	TextBytes int64                    `json:"text_bytes"`
	Skipped   map[documents.Kind]int64 `json:"skipped"`
	Rejects   string                   `json:"rejects,omitempty"` // the file that lists what was skipped
	Seconds   float64                  `json:"seconds"`           // of the process that ended the job
	Shards    []ShardFile              `json:"shards"`
	Before    bool                     `json:"complete_before,omitempty"` // the job was complete before this call
}

const (
	defaultMemory = 256 << 20
	minGathering  = 4 << 10 // for shuffled documents
)

// Run tokenizes documents into shards, joining or resuming the job of that output if there is one;
// if it is complete, Run says so at once. It returns when the job is complete, whoever did the last
// of it. A job that reads standard input, or another input that is no regular file, cannot be
// shared and starts anew each time.
//
// Until a shard is complete none of its files stands under its final name; an older shard of the
// same name stays until then.
func Run(ctx context.Context, opts Options) (Summary, error) {
	start := time.Now()
	o := &opts
	if err := o.check(); err != nil {
		return Summary{}, err
	}
	f, done, err := openFolder(ctx, o)
	if err != nil {
		return Summary{}, full(err, nil)
	}
	defer f.close()
	if done != nil {
		done.Before = true
		if err := o.exceeded(&done.Summary); err != nil {
			return Summary{}, err
		}
		return done.Summary, f.tidy()
	}
	var p *process
	for remade := make(map[int]int); ; {
		p = newProcess(f, start)
		p.board.remade = remade
		done, err = p.run(ctx)
		var m *missing // rejects that were damaged when all was done
		if !errors.As(err, &m) {
			break
		}
		if err = p.board.remake(m.unit, m.segment, err); err != nil {
			break
		}
	}
	if errors.Is(err, errDone) { // in the middle of what this process did
		done, err = readRecord[finished](f.path(doneName))
		if err == nil && done != nil {
			err = f.tidy()
		} else if err == nil {
			err = fmt.Errorf("the job %s was done and is gone: has another process started it anew?", f.dir)
		}
	}
	if err != nil {
		return Summary{}, full(err, p)
	}
	if err := o.exceeded(&done.Summary); err != nil { // another process has ended the job, and may skip more
		return Summary{}, err
	}
	return done.Summary, nil
}

// check completes the options and refuses those that cannot work before anything is written.
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
	}
	if t.memory == 0 {
		t.memory = o.Memory / 2
	}
	switch vocabulary := o.Tokenizer.VocabSize(); {
	case o.AppendEOD && int64(o.EOD) >= int64(vocabulary):
		return fmt.Errorf("the end-of-document id %d is beyond the vocabulary of %d ids", o.EOD, vocabulary)
	case o.Names != nil && len(o.Names) != len(o.Inputs):
		return fmt.Errorf("there are %d inputs and %d names of inputs", len(o.Inputs), len(o.Names))
	case len(o.Inputs) == 0:
		return errors.New("there are no inputs to tokenize")
	case o.Rejects != "" && o.OnError != Skip:
		return errors.New("a rejects file needs documents to be skipped on errors; now the first bad document ends " +
			"the run")
	case o.ShardTokens < 0:
		return fmt.Errorf("shards of %d tokens are not possible", o.ShardTokens)
	case o.MaxDocuments < 0:
		return fmt.Errorf("at most %d documents are not possible", o.MaxDocuments)
	case math.IsNaN(o.Sample) || o.Sample < 0 || o.Sample > 1:
		return fmt.Errorf("a sample of %v of the documents is not possible; it must be between 0 and 1", o.Sample)
	}
	if base := filepath.Base(o.Output); o.Output == "" || base == "." || base == ".." ||
		os.IsPathSeparator(o.Output[len(o.Output)-1]) {
		return fmt.Errorf("%q is not a prefix for the names of files", o.Output)
	}
	if info, err := os.Stat(filepath.Dir(o.Output)); err != nil {
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

// shardFile are the endings behind the prefix of the output that files of shards have, those of any
// layout.
var shardFile = regexp.MustCompile(`^(-\d{5,})?\.(bin|idx|json|sums|docs\.arrow|npy|csv\.gz|ds|ds\.index|ds\.metadata|arrow|docs\.feather)$`)

// checkInputs refuses inputs that are there twice or would be written over.
func (o *Options) checkInputs() error {
	// Files that the run would write over.
	type target struct {
		path string
		info fs.FileInfo
	}
	var targets []target // those that exist
	if rest, ok := strings.CutPrefix(filepath.Clean(o.Rejects), filepath.Clean(o.Output)); ok &&
		shardFile.MatchString(rest) {
		return fmt.Errorf("the rejects file %s has the name of a file of a shard; give it another", o.Rejects)
	}
	for _, path := range []string{o.Output + ".bin", o.Output + ".idx", o.Output + ".json", o.Output + ".docs.arrow",
		o.Output + ".sums", o.Output + ".npy",
		o.Output + ".csv.gz", o.Output + ".ds", o.Output + ".ds.index", o.Output + ".ds.metadata", o.Output +
			".arrow", o.Output + ".docs.feather", o.Rejects} {
		info, err := os.Stat(path)
		for _, t := range targets {
			if path == o.Rejects && err == nil && os.SameFile(t.info, info) {
				return fmt.Errorf("the rejects file %s is also a file of the shard; give it another name", o.Rejects)
			}
		}
		if err == nil {
			targets = append(targets, target{path, info})
		}
	}
	// One file has one size and one time, whatever leads to it, so that few pairs are compared.
	type stamp struct{ size, modified int64 }
	type listed struct {
		input string
		info  fs.FileInfo
	}
	files := make(map[stamp][]listed)
	stdin := false
	for _, input := range o.Inputs {
		if !utf8.ValidString(input) {
			return fmt.Errorf("the name %q is not UTF-8, so a shard cannot refer to it; rename the file", input)
		}
		if len(input) > shards.MaxOriginLength {
			return fmt.Errorf("the name %.40q… has %d bytes, a shard keeps at most %d", input, len(input),
				shards.MaxOriginLength)
		}
		if input == "-" {
			if stdin {
				return errors.New("standard input, \"-\", is listed twice; it can be read once")
			}
			stdin = true
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
					return fmt.Errorf("the input %s is listed twice; leave it out once, or its documents would be "+
						"there twice", input)
				}
				return fmt.Errorf("the inputs %s and %s are the same file; leave one out, or its documents would be "+
					"there twice", f.input, input)
			}
		}
		files[at] = append(files[at], listed{input, info})
	}
	return nil
}

// segmentBytes is the weight of a segment of a job that these options begin. With shuffling a
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

// A process is the part that this one takes in a job.
type process struct {
	o     *Options
	f     *folder
	start time.Time

	board    *board
	roll     *roll
	order    order
	toEncode chan *batch
	memory   *semaphore.Weighted // of texts and ids in flight
	inFlight int64               // what memory has in all
	readers  int
	writers  int

	live     live
	skips    atomic.Int64
	shares   [][]int64 // of the inputs' bytes, by unit and part
	progress *meter
}

func newProcess(f *folder, start time.Time) *process {
	o := f.o
	p := &process{o: o, f: f, start: start, board: newBoard(f), toEncode: make(chan *batch), inFlight: o.Memory,
		shares: share(f.d)}
	p.roll = &roll{p: p, news: make(chan struct{})}
	p.progress = &meter{p: p}
	p.readers = min(1+(o.Workers+workersPerReader-1)/workersPerReader, maxReaders)
	p.writers = max(1, min(o.Workers/2, maxReaders))
	p.order = sequence{p.board}
	if f.d.Settings.Shuffle {
		// Half of the memory is for segments that are being sorted, later for the documents that
		// are gathered.
		p.inFlight = max(o.Memory/4, 1)
		p.readers = int(min(int64(p.readers), max(1, o.Memory/2/f.d.SegmentBytes)))
		p.writers = min(p.writers, 4)
		p.order = &shuffle{b: p.board, memory: max(o.tuning.memory/int64(p.writers), minGathering)}
	}
	p.memory = semaphore.NewWeighted(p.inFlight)
	return p
}

// run takes part until the job is complete.
func (p *process) run(ctx context.Context) (*finished, error) {
	if err := p.board.survey(); err != nil {
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
	group.Go(func() error { return p.board.watch(working) })
	group.Go(func() error {
		if err := p.checkRejects(groupCtx); err != nil {
			return err
		}
		shardsGroup, ctx := errgroup.WithContext(groupCtx)
		shardsGroup.Go(func() error { return p.roll.plan(ctx) })
		for range p.writers {
			shardsGroup.Go(func() error { return p.roll.write(ctx) })
		}
		if err := shardsGroup.Wait(); err != nil {
			return err
		}
		// Another process may have written the last shard with units whose records were not seen
		// here: finish needs them, when nobody looks any more.
		if err := p.board.settle(groupCtx); err != nil {
			return err
		}
		p.board.end()
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

// full says of an error of a full disk how much the job takes. p may be nil.
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
	return fmt.Errorf("%w; the job needs room for %s, and up to as much again in its folder until the shards are "+
		"complete. Make room and give the same command again: "+
		"it goes on from here", err, need)
}

// besideIDs is about how many bytes of files a document takes beside its ids: 20 in x.idx, the
// others, compressed, in x.docs.arrow.
const besideIDs = 32
