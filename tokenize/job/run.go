package job

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"

	"mula/shards"
	"mula/tokenize"
	"mula/tokenize/documents"
)

// OnError is what [Run] does with a document that cannot be used.
type OnError uint8

const (
	// Fail ends the run at the first one in the order of the inputs.
	Fail OnError = iota
	// Skip leaves it out, counts it and lists it in the rejects file.
	Skip
)

// Options are the choices for [Run].
type Options struct {
	Tokenizer *tokenize.Tokenizer
	Specials  tokenize.Specials
	AppendEOD bool   // end each document with EOD
	EOD       uint32 // an id of the vocabulary

	Inputs []string // as for [documents.ReadDocuments], each file once
	Read   documents.ReadOptions
	Output string // prefix of the shard's files; their directory must exist

	OnError OnError
	Rejects string // with Skip, the file that lists what was skipped; "" for none

	Workers int   // goroutines that encode, up to 4096; 0 means GOMAXPROCS
	Memory  int64 // bound on the bytes of texts and ids in flight, beside the largest document; 0 means 256 MiB

	// Progress, if not nil, is called four times a second at most, and once at the end, always from one goroutine at a time.
	Progress func(Progress)
}

// Progress is how far [Run] has come. Documents are counted when they are written.
type Progress struct {
	Documents int64
	Skipped   int64
	Tokens    int64
	TextBytes int64 // UTF-8 bytes of the documents
	InputRead int64 // bytes read from the inputs, as they are compressed
	InputSize int64 // of all inputs, or -1 if one of them is not a regular file
}

// Summary is what [Run] has done.
type Summary struct {
	Output    string                     `json:"output"`
	Documents int64                      `json:"documents"`
	Tokens    int64                      `json:"tokens"`
	TextBytes int64                      `json:"text_bytes"`
	Skipped   map[documents.Kind]int64   `json:"skipped"`
	Seconds   float64                    `json:"seconds"`
	DType     string                     `json:"dtype"`
	Files     map[string]shards.FileInfo `json:"files"` // as in [shards.Manifest]
}

// Sizes of the pipeline: a batch is closed at either of the first two.
const (
	batchBytes     = 256 << 10 // of text
	batchDocuments = 1024
	defaultMemory  = 256 << 20
	// What a byte of text takes on its way: itself and, at worst, an id of four bytes.
	bytesInFlight = 1 + 4
)

const progressInterval = 250 * time.Millisecond

// batch is a run of documents on its way from the reader through a worker to the writer.
type batch struct {
	documents []encoded
	tokens    []uint32
	bytes     int           // of text
	weight    int64         // of the memory it has been granted
	done      chan struct{} // closed by the worker
}

// encoded is a document of a batch, or the error in its place.
type encoded struct {
	documents.Document
	err error
	end int // of its ids in batch.tokens
}

// Run tokenizes documents into one shard. The bytes it writes depend on the inputs, the tokenizer and the options that have to do with ids,
// never on Workers, Memory or timing.
//
// One goroutine reads, Workers encode, one writes in the order of the inputs; they are bound by Memory and by a number of batches, so that a
// slow one holds up the others instead of piling up work. Until Run has succeeded no file stands under its final name; an older
// shard of the same name stays until then.
func Run(ctx context.Context, opts Options) (Summary, error) {
	start := time.Now()
	if err := tokenize.CheckWorkers(opts.Workers); err != nil {
		return Summary{}, err
	}
	if opts.Workers == 0 {
		opts.Workers = runtime.GOMAXPROCS(0)
	}
	if opts.Memory <= 0 {
		opts.Memory = defaultMemory
	}
	size, err := opts.check()
	if err != nil {
		return Summary{}, err
	}
	info := shards.TokenizerInfo{
		SHA256: opts.Tokenizer.SHA256(), VocabSize: opts.Tokenizer.VocabSize(), EOD: -1, ClassTable: tokenize.ClassTable(), Specials: opts.Specials.String(),
	}
	if opts.AppendEOD {
		info.EOD = int64(opts.EOD)
	}
	w := &writer{opts: &opts, progress: Progress{InputSize: size}, skipped: make(map[documents.Kind]int64), shown: start}
	if w.shard, err = shards.Create(opts.Output, shards.DTypeFor(info.VocabSize), info); err != nil {
		return Summary{}, err
	}
	defer w.shard.Abort()
	if opts.Rejects != "" {
		if w.rejects, err = createRejects(opts.Rejects); err != nil {
			return Summary{}, err
		}
		defer w.rejects.file.Abort()
	}
	if err := pipeline(ctx, &opts, w); err != nil {
		return Summary{}, err
	}
	return w.finish(ctx, start)
}

// check refuses options that cannot work before anything is written. It gives the size of all inputs, or -1.
func (o *Options) check() (size int64, err error) {
	switch vocabulary := o.Tokenizer.VocabSize(); {
	case o.AppendEOD && int64(o.EOD) >= int64(vocabulary):
		return 0, fmt.Errorf("the end-of-document id %d is beyond the vocabulary of %d ids", o.EOD, vocabulary)
	case len(o.Inputs) == 0:
		return 0, errors.New("there are no inputs to tokenize")
	case o.Rejects != "" && o.OnError != Skip:
		return 0, errors.New("a rejects file needs documents to be skipped on errors; now the first bad document ends the run")
	}
	// Files that the run would write over.
	type target struct {
		path string
		info os.FileInfo
	}
	var targets []target // those that exist
	for _, path := range []string{o.Output + ".bin", o.Output + ".idx", o.Output + ".json", o.Output + ".docs.arrow", o.Rejects} {
		info, err := os.Stat(path)
		for _, t := range targets {
			if path == o.Rejects && err == nil && os.SameFile(t.info, info) {
				return 0, fmt.Errorf("the rejects file %s is also a file of the shard; give it another name", o.Rejects)
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
		info  os.FileInfo
	}
	files := make(map[stamp][]listed)
	stdin := false
	for _, input := range o.Inputs {
		if !utf8.ValidString(input) {
			return 0, fmt.Errorf("the name %q is not UTF-8, so a shard cannot refer to it; rename the file", input)
		}
		if len(input) > shards.MaxOriginLength {
			return 0, fmt.Errorf("the name %.40q… has %d bytes, a shard keeps at most %d", input, len(input), shards.MaxOriginLength)
		}
		if input == "-" {
			if stdin {
				return 0, errors.New("standard input, \"-\", is listed twice; it can be read once")
			}
			stdin, size = true, -1
			continue
		}
		info, err := os.Stat(input)
		if err != nil {
			return 0, fmt.Errorf("tokenizing: %w", err)
		}
		for _, t := range targets {
			if os.SameFile(t.info, info) {
				return 0, fmt.Errorf("the output %s would replace the input %s; choose another prefix for the output", t.path, input)
			}
		}
		at := stamp{info.Size(), info.ModTime().UnixNano()}
		for _, f := range files[at] {
			if os.SameFile(f.info, info) {
				if f.input == input {
					return 0, fmt.Errorf("the input %s is listed twice; leave it out once, or its documents would be there twice", input)
				}
				return 0, fmt.Errorf("the inputs %s and %s are the same file; leave one out, or its documents would be there twice", f.input, input)
			}
		}
		files[at] = append(files[at], listed{input, info})
		if !info.Mode().IsRegular() {
			size = -1
		} else if size >= 0 {
			size += info.Size()
		}
	}
	return size, nil
}

// pipeline reads, encodes and writes all documents. It ends when all its goroutines have, with the error of the one that failed first.
func pipeline(ctx context.Context, opts *Options, w *writer) error {
	group, ctx := errgroup.WithContext(ctx)
	// A batch goes into both queues: the workers take it from one as they are free, the writer from the other in order.
	toEncode := make(chan *batch)
	toWrite := make(chan *batch, 4*opts.Workers)
	memory := semaphore.NewWeighted(opts.Memory)

	group.Go(func() error {
		defer close(toWrite)
		defer close(toEncode)
		send := func(b *batch) error {
			// A document larger than all memory goes alone.
			b.weight = min(int64(b.bytes)*bytesInFlight, opts.Memory)
			if err := memory.Acquire(ctx, b.weight); err != nil {
				return err
			}
			for _, queue := range []chan *batch{toWrite, toEncode} {
				select {
				case queue <- b:
				case <-ctx.Done():
					return ctx.Err()
				}
			}
			return nil
		}
		read := opts.Read
		read.OnRead = func(n int64) {
			w.inputRead.Add(n)
			if opts.Read.OnRead != nil {
				opts.Read.OnRead(n)
			}
		}
		b := newBatch()
		for doc, err := range documents.ReadDocuments(ctx, opts.Inputs, read) {
			b.documents = append(b.documents, encoded{Document: doc, err: err})
			b.bytes += len(doc.Text)
			if err != nil && opts.OnError == Fail {
				break // the writer will fail here, or at a document before it that cannot be encoded
			}
			if b.bytes >= batchBytes || len(b.documents) == batchDocuments {
				if err := send(b); err != nil {
					return err
				}
				b = newBatch()
			}
		}
		return send(b)
	})
	for range opts.Workers {
		group.Go(func() error {
			encoder := opts.Tokenizer.NewEncoder(tokenize.EncodeOptions{Specials: opts.Specials})
			for b := range toEncode {
				if err := ctx.Err(); err != nil {
					return err
				}
				b.encode(encoder, opts)
			}
			return nil
		})
	}
	group.Go(func() error {
		for b := range toWrite {
			select {
			case <-b.done:
			case <-ctx.Done():
				return ctx.Err()
			}
			if err := w.write(b); err != nil {
				return err
			}
			memory.Release(b.weight)
			b.recycle()
		}
		return nil
	})
	return group.Wait()
}

// batches keeps the memory of batches that have been written.
var batches = sync.Pool{New: func() any { return new(batch) }}

func newBatch() *batch {
	b := batches.Get().(*batch)
	b.done = make(chan struct{})
	return b
}

func (b *batch) recycle() {
	clear(b.documents)
	b.documents, b.tokens, b.bytes = b.documents[:0], b.tokens[:0], 0
	if cap(b.tokens) <= 2*batchBytes { // not the one of a giant document
		batches.Put(b)
	}
}

// encode makes ids of the documents of b.
func (b *batch) encode(encoder *tokenize.Encoder, opts *Options) {
	defer close(b.done)
	for i := range b.documents {
		d := &b.documents[i]
		if d.err == nil {
			var err error
			if b.tokens, err = encoder.Append(b.tokens, d.Text); err != nil {
				d.err = &documents.DocumentError{File: d.File, Line: d.Line, Offset: d.Offset, ID: d.ID, Kind: documents.Unencodable, Err: err}
			} else if opts.AppendEOD {
				b.tokens = append(b.tokens, opts.EOD)
			}
		}
		d.end = len(b.tokens)
	}
}

// writer is the end of the pipeline: it writes what is good and skips, or fails at, what is not.
type writer struct {
	opts      *Options
	shard     *shards.Writer
	rejects   *rejects
	inputRead atomic.Int64 // by the reader
	progress  Progress
	shown     time.Time // when Progress was called last
	skipped   map[documents.Kind]int64
	first     *documents.DocumentError // of those skipped
}

// write writes a batch.
func (w *writer) write(b *batch) error {
	start := 0
	for i := range b.documents {
		d := &b.documents[i]
		ids := b.tokens[start:d.end]
		start = d.end
		if d.err != nil {
			if err := w.skip(d.err); err != nil {
				return err
			}
			continue
		}
		if err := w.shard.Append(ids, shards.DocumentOrigin{ID: d.ID, File: d.File, Line: d.Line}); err != nil {
			return err
		}
		w.progress.Documents++
		w.progress.Tokens += int64(len(ids))
		w.progress.TextBytes += int64(len(d.Text))
	}
	if now := time.Now(); now.Sub(w.shown) >= progressInterval {
		w.shown = now
		w.show()
	}
	return nil
}

func (w *writer) show() {
	if w.opts.Progress != nil {
		w.progress.InputRead = w.inputRead.Load()
		w.opts.Progress(w.progress)
	}
}

// skip leaves a bad document out, if the run may; otherwise it gives the error back.
func (w *writer) skip(err error) error {
	var bad *documents.DocumentError
	if w.opts.OnError == Fail || !errors.As(err, &bad) || bad.Kind == documents.BadStream {
		return err
	}
	if w.first == nil {
		w.first = bad
	}
	w.skipped[bad.Kind]++
	w.progress.Skipped++
	if w.rejects != nil {
		return w.rejects.append(bad)
	}
	return nil
}

// finish publishes the files.
func (w *writer) finish(ctx context.Context, start time.Time) (Summary, error) {
	if w.progress.Documents == 0 {
		if w.first != nil {
			return Summary{}, fmt.Errorf("all %d documents were bad, so there is nothing to write; the first: %w", w.progress.Skipped, w.first)
		}
		return Summary{}, fmt.Errorf("there is no document in %s, so there is nothing to write", strings.Join(w.opts.Inputs, ", "))
	}
	if err := ctx.Err(); err != nil {
		return Summary{}, err
	}
	// First what was left out, then what is there: a shard never stands without the list of what it lacks.
	if w.rejects != nil {
		if err := w.rejects.publish(); err != nil {
			return Summary{}, err
		}
	}
	if err := w.shard.Close(); err != nil {
		if w.rejects != nil {
			os.Remove(w.opts.Rejects)
		}
		return Summary{}, err
	}
	w.show()
	m := w.shard.Manifest()
	return Summary{
		Output: w.opts.Output, Documents: m.Documents, Tokens: m.Tokens, TextBytes: w.progress.TextBytes, Skipped: w.skipped,
		Seconds: time.Since(start).Seconds(), DType: m.DType, Files: m.Files,
	}, nil
}
