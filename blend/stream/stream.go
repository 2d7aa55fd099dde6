// Package stream reads the samples of a plan as a stream of Arrow record batches.
//
// [New] starts a [Stream]: the records of one rank, step by step, from any position of the plan. A
// stream reads ahead in bounded memory. [NewBatch] is a typed view of a record. [WriteIPC] writes a
// stream in Arrow's IPC format. [Hash] computes the fingerprints of steps.
package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"unsafe"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"golang.org/x/sync/errgroup"

	"mula/blend"
	"mula/blend/ahead"
	"mula/internal/blockcache"
)

// Options select the positions and columns of a [Stream].
type Options struct {
	From, To  int64 // positions [From, To), see [mula/blend.Grid.Check]; To 0: the end of the plan
	BatchSize int   // positions of a step, over all ranks
	Rank      int   // this rank reads positions [first + Rank·B/World, first + (Rank+1)·B/World) of each step
	World     int   // number of ranks, which must divide BatchSize; 0: 1
	// number of machines on which the ranks run, if it is known; 0: one for each rank. A machine
	// that reads a large part of the samples fetches larger pieces from an object store
	Hosts    int
	Prefetch int // maximum number of records that are read ahead, up to 4096; 0: none

	// maximum number of rows of a record; must divide B/World. 0: B/World, which is one record a
	// step
	MicroBatch int
	Columns    []string // of the records, in this order, from [Columns]; nil: the default columns of [Stream]

	Allocator memory.Allocator // for the records; nil: Go's memory
}

// workers limits the goroutines of a stream. They copy from mapped files; several of them keep
// several reads of a disk in progress.
const workers = 4

// maxPrefetch limits [Options.Prefetch]. A larger number is a mistake that would exhaust the
// memory.
const maxPrefetch = 4096

// A Stream yields one record for each step, with this rank's samples, or several records of
// [Options.MicroBatch] rows. The last step may be shorter. Skipped positions make a record
// shorter or empty. Every rank gets the same number of records. Each sample is a row:
//
//	position         int64                            in the plan
//	source           dictionary<int32, utf8>          index and name of the source
//	epoch            int32                            of the source
//	window           int64                            number among the source's windows
//	tokens           fixed_size_list<uint16>[L+1]     int32 unless every shard is uint16
//	document_starts  list<int32>                      offsets in the window of document starts
//	lengths          int32                            packed plans only: tokens before the padding
//
// These columns are present only if [Options.Columns] names them:
//
//	shard            int32                            number of the shard in its source
//	offset           int64                            first token of the window in the shard
//
// A row of a packed plan consists of pieces: whole documents, and parts of documents that are
// longer than a row. document_starts then has the start of each piece, the first at 0. The metadata
// mula.padding is the padding id.
//
// No column has nulls. The metadata of the schema has the plan's fingerprint, L, and the options:
// mula.plan, mula.sequence_length, mula.batch_size, mula.from, mula.to, mula.rank and mula.world.
// [NewBatch] returns a typed view of a record.
//
// A Stream must be used by one goroutine at a time. It must be closed, even after its end.
type Stream struct {
	d       *blend.Data
	o       Options
	schema  *arrow.Schema
	columns []int       // by field of the schema: its column
	names   arrow.Array // the dictionary of sources
	width   int         // bytes of a token
	next    place       // of the next record to read
	err     error       // result of all later calls of Next
	ctx     context.Context
	cancel  context.CancelFunc
	queue   chan chan built // records in order; nil without prefetch
	room    chan struct{}   // one element for each record that is read ahead
	group   *errgroup.Group // of produce and fetchAhead
	taken   chan struct{}   // has an element after a record was taken; nil for local shards
	begun   chan struct{}   // closed when the first record is built; nil for local shards
	cache   int64           // limit of the cache of remote files
	blocks  bool            // complete blocks of windows are fetched, except for the first record
	count   atomic.Int64    // number of records taken
}

// place identifies a record: the first position of its step, and its number in the step.
type place struct {
	first int64
	part  int
}

type built struct {
	record arrow.RecordBatch
	err    error
}

// New starts a stream of the samples of d. If ctx is cancelled, Next returns the context's
// error.
func New(ctx context.Context, d *blend.Data, o Options) (*Stream, error) {
	if err := o.complete(d.Plan); err != nil {
		return nil, err
	}
	s := &Stream{d: d, o: o, width: d.TokenBytes(), next: place{first: o.From}}
	var err error
	if s.schema, s.columns, err = schemaOf(d.Plan, o); err != nil {
		return nil, err
	}
	if d.Remote() {
		if s.cache, err = blockcache.Limit(); err != nil {
			return nil, err
		}
		s.blocks = ahead.Blocks(d.Plan, s.hosts(), s.cache)
	}
	s.names = sourceNames(d.Plan, o.Allocator)
	s.ctx, s.cancel = context.WithCancel(ctx)
	s.group = new(errgroup.Group)
	if d.Remote() {
		s.taken, s.begun = make(chan struct{}, 1), make(chan struct{})
	}
	if o.Prefetch > 0 {
		s.queue = make(chan chan built, o.Prefetch)
		s.room = make(chan struct{}, o.Prefetch)
		s.group.Go(s.produce)
	}
	if s.taken != nil {
		at := s.next
		s.group.Go(func() error { return s.fetchAhead(at) })
	}
	return s, nil
}

// complete sets the defaults of the options and validates them.
func (o *Options) complete(p *blend.Plan) error {
	if o.World == 0 {
		o.World = 1
	}
	if o.To == 0 {
		o.To = p.Length()
	}
	if o.Allocator == nil {
		o.Allocator = memory.DefaultAllocator
	}
	grid, err := p.Grid(o.BatchSize)
	if err != nil {
		return err
	}
	if err := grid.Check(o.From, o.To); err != nil {
		return err
	}
	if o.MicroBatch, err = blend.RecordRows(o.BatchSize, o.Rank, o.World, o.MicroBatch); err != nil {
		return err
	}
	if o.Prefetch < 0 || o.Prefetch > maxPrefetch {
		return fmt.Errorf("prefetch %d is not between 0 and %d", o.Prefetch, maxPrefetch)
	}
	if o.MicroBatch > math.MaxInt32/(p.SampleTokens()) {
		return fmt.Errorf("%d samples of %d tokens exceed the limit of 2^31 tokens in a record; use more ranks or a "+
			"smaller batch",
			o.MicroBatch, p.SampleTokens())
	}
	return nil
}

// The columns of a stream.
const (
	columnPosition = iota
	columnSource
	columnEpoch
	columnWindow
	columnTokens
	columnDocumentStarts
	columnLengths // only in a packed plan
	columnShard   // columnShard and columnOffset are optional
	columnOffset
	columns // number of columns
)

// fields returns the fields of all columns, by column number.
func fields(p *blend.Plan) [columns]arrow.Field {
	var element arrow.DataType = arrow.PrimitiveTypes.Int32
	if p.TokenBytes() == 2 {
		element = arrow.PrimitiveTypes.Uint16
	}
	return [columns]arrow.Field{
		columnPosition: {Name: "position", Type: arrow.PrimitiveTypes.Int64},
		columnSource:   {Name: "source", Type: sourceType},
		columnEpoch:    {Name: "epoch", Type: arrow.PrimitiveTypes.Int32},
		columnWindow:   {Name: "window", Type: arrow.PrimitiveTypes.Int64},
		columnTokens: {Name: "tokens", Type: arrow.FixedSizeListOfNonNullable(int32(p.SampleTokens()),
			element)},
		columnDocumentStarts: {Name: "document_starts", Type: arrow.ListOfNonNullable(arrow.PrimitiveTypes.Int32)},
		columnLengths:        {Name: "lengths", Type: arrow.PrimitiveTypes.Int32},
		columnShard:          {Name: "shard", Type: arrow.PrimitiveTypes.Int32},
		columnOffset:         {Name: "offset", Type: arrow.PrimitiveTypes.Int64},
	}
}

// Columns names the columns that a stream of the plan can have. A stream without
// [Options.Columns] has all except the last two, shard and offset.
func Columns(p *blend.Plan) (names []string) {
	for i, f := range fields(p) {
		if i != columnLengths || p.Traits().Padded {
			names = append(names, f.Name)
		}
	}
	return names
}

// schemaOf returns the schema of a stream with complete options, and the column of each field.
func schemaOf(p *blend.Plan, o Options) (*arrow.Schema, []int, error) {
	said := map[string]string{
		"mula.plan":            p.Fingerprint(),
		"mula.sequence_length": strconv.Itoa(p.SequenceLength),
		"mula.batch_size":      strconv.Itoa(o.BatchSize),
		"mula.from":            strconv.FormatInt(o.From, 10),
		"mula.to":              strconv.FormatInt(o.To, 10),
		"mula.rank":            strconv.Itoa(o.Rank),
		"mula.world":           strconv.Itoa(o.World),
	}
	if t := p.Traits(); t.Padded {
		said["mula.padding"] = strconv.FormatUint(uint64(t.Padding), 10)
	}
	known := Columns(p)
	if o.Columns == nil {
		o.Columns = known[:len(known)-(columns-columnShard)]
	}
	all := fields(p)
	var fields []arrow.Field
	var list []int
	for _, name := range o.Columns {
		i := slices.IndexFunc(all[:], func(f arrow.Field) bool { return f.Name == name })
		if i < 0 || !slices.Contains(known, name) || slices.Contains(list, i) {
			return nil, nil, fmt.Errorf("columns %s: unknown or duplicate name; available are %s",
				strings.Join(o.Columns, ", "), strings.Join(known, ", "))
		}
		fields, list = append(fields, all[i]), append(list, i)
	}
	metadata := arrow.MetadataFrom(said)
	return arrow.NewSchema(fields, &metadata), list, nil
}

var sourceType = &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: arrow.BinaryTypes.String}

func sourceNames(p *blend.Plan, alloc memory.Allocator) arrow.Array {
	b := array.NewStringBuilder(alloc)
	defer b.Release()
	for _, s := range p.Sources {
		b.Append(s.Name)
	}
	return b.NewArray()
}

// Schema returns the schema of the records.
func (s *Stream) Schema() *arrow.Schema { return s.schema }

// Next returns the next record, which the caller must release, or io.EOF after the last.
func (s *Stream) Next() (arrow.RecordBatch, error) {
	if s.err != nil {
		return nil, s.err
	}
	record, err := s.take()
	if err == nil {
		if err = s.d.Verification().Err; err != nil {
			record.Release()
			record = nil
		}
	}
	if err != nil {
		s.err = err
		s.cancel()
	}
	return record, err
}

func (s *Stream) take() (arrow.RecordBatch, error) {
	if err := context.Cause(s.ctx); err != nil {
		return nil, err
	}
	if s.queue == nil {
		if s.next.first >= s.o.To {
			return nil, io.EOF
		}
		record, err := s.build(s.ctx, s.next)
		s.next = s.after(s.next)
		s.advance()
		return record, err
	}
	select {
	case slot, ok := <-s.queue:
		if !ok {
			if err := context.Cause(s.ctx); err != nil { // the producer was cancelled
				return nil, err
			}
			return nil, io.EOF
		}
		b := <-slot // does not block long: a cancelled worker returns an error
		<-s.room
		s.advance()
		return b.record, b.err
	case <-s.ctx.Done():
		return nil, context.Cause(s.ctx)
	}
}

// after returns the place of the record after p.
func (s *Stream) after(p place) place {
	if p.part++; p.part < s.o.BatchSize/s.o.World/s.o.MicroBatch {
		return p
	}
	return place{first: p.first + min(int64(s.o.BatchSize), s.o.To-p.first)}
}

// Close ends the stream and releases records that were read ahead.
func (s *Stream) Close() {
	s.cancel()
	if s.err == nil {
		s.err = errors.New("the stream is closed")
	}
	if s.queue != nil {
		for slot := range s.queue { // closed by the producer, which notices the cancellation
			if b := <-slot; b.record != nil {
				b.record.Release()
			}
			<-s.room
		}
		s.queue = nil
	}
	s.group.Wait()
	if s.names != nil {
		s.names.Release()
		s.names = nil
	}
}

// produce reads ahead. It puts a slot for each record into the queue, in order, and starts workers
// that fill the slots. room has an element for each record from the start of its read until Next
// returns it, so there are at most Prefetch of them.
func (s *Stream) produce() error {
	defer close(s.queue)
	var fill errgroup.Group
	fill.SetLimit(min(workers, s.o.Prefetch))
	for at := s.next; at.first < s.o.To; at = s.after(at) {
		select {
		case s.room <- struct{}{}:
		case <-s.ctx.Done():
			fill.Wait()
			return nil
		}
		slot := make(chan built, 1)
		s.queue <- slot // never blocks: queue and room have the same capacity
		fill.Go(func() error {
			record, err := s.build(s.ctx, at)
			slot <- built{record, err}
			return nil
		})
	}
	fill.Wait()
	return nil
}

// samplesAt returns the samples of the record at place p.
func (s *Stream) samplesAt(p place) ([]blend.Sample, error) {
	share, rows := int64(s.o.BatchSize/s.o.World), int64(s.o.MicroBatch)
	// Positions may exceed the end of the range here. The sums cannot overflow, because both terms
	// are below 2^61.
	from := min(p.first+int64(s.o.Rank)*share+int64(p.part)*rows, s.o.To)
	to := min(from+rows, s.o.To)
	samples := make([]blend.Sample, 0, to-from)
	for position := from; position < to; position++ {
		sample, err := s.d.Locate(position)
		if err != nil {
			return nil, err
		}
		if !sample.Skipped {
			samples = append(samples, sample)
		}
	}
	return samples, nil
}

// build reads the record at place p.
func (s *Stream) build(ctx context.Context, p place) (arrow.RecordBatch, error) {
	samples, err := s.samplesAt(p)
	if err != nil {
		return nil, err
	}
	if s.taken != nil {
		if p == (place{first: s.o.From}) {
			defer close(s.begun)
		} else if !s.afterFirst(ctx) {
			return nil, context.Cause(ctx)
		}
		if err := s.d.Fetch(ctx, samples, s.fetchOptions(p)); err != nil {
			return nil, err
		}
	}
	b := newRecordBuilder(ctx, s, len(samples))
	defer b.release()
	for row := range samples {
		if err := ctx.Err(); err != nil {
			return nil, context.Cause(ctx)
		}
		if err := b.add(row, &samples[row]); err != nil {
			return nil, fmt.Errorf("position %d: %w", samples[row].Position, err)
		}
	}
	return b.record(), nil
}

// A recordBuilder writes the columns of a record into buffers of their final size. Only the size of
// the document starts is not known in advance.
type recordBuilder struct {
	ctx    context.Context
	s      *Stream
	rows   int
	length int // tokens of a sample
	// by column, nil for a column that is not requested; for document starts, the offsets
	buffers [columns]*memory.Buffer
	values  *memory.Buffer // of the document starts

	// The same buffers as numbers. Only one of tokens2 and tokens4 is set.
	position, window, offset              []int64
	source, epoch, starts, lengths, shard []int32
	tokens2                               []uint16
	tokens4                               []uint32

	begun []int32 // the document starts of all rows so far
}

func newRecordBuilder(ctx context.Context, s *Stream, rows int) *recordBuilder {
	b := &recordBuilder{ctx: ctx, s: s, rows: rows, length: s.d.SampleTokens()}
	for _, column := range s.columns {
		bytes := 4 * rows
		switch column {
		case columnPosition, columnWindow, columnOffset:
			bytes = 8 * rows
		case columnTokens:
			bytes = s.width * rows * b.length
		case columnDocumentStarts:
			bytes = 4 * (rows + 1)
		}
		b.buffers[column] = b.buffer(bytes)
	}
	b.position, b.window, b.offset = view[int64](b.buffers[columnPosition]), view[int64](b.buffers[columnWindow]),
		view[int64](b.buffers[columnOffset])
	b.source, b.epoch, b.shard = view[int32](b.buffers[columnSource]), view[int32](b.buffers[columnEpoch]),
		view[int32](b.buffers[columnShard])
	b.starts, b.lengths = view[int32](b.buffers[columnDocumentStarts]), view[int32](b.buffers[columnLengths])
	if b.starts != nil {
		b.starts[0] = 0
	}
	if s.width == 2 {
		b.tokens2 = view[uint16](b.buffers[columnTokens])
	} else {
		b.tokens4 = view[uint32](b.buffers[columnTokens])
	}
	return b
}

func (b *recordBuilder) buffer(bytes int) *memory.Buffer {
	m := memory.NewResizableBuffer(b.s.o.Allocator)
	m.Resize(bytes)
	return m
}

// view returns a buffer as a slice of numbers, nil if b is nil.
func view[T int64 | int32 | uint32 | uint16](b *memory.Buffer) []T {
	if b == nil {
		return nil
	}
	bytes := b.Bytes()
	var element T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(bytes))), len(bytes)/int(unsafe.Sizeof(element)))
}

// release releases the builder's references; a record has its own.
func (b *recordBuilder) release() {
	for _, m := range append(b.buffers[:], b.values) {
		if m != nil {
			m.Release()
		}
	}
}

// add writes one row.
func (b *recordBuilder) add(row int, sample *blend.Sample) error {
	if sample.Epoch > math.MaxInt32 {
		return fmt.Errorf("epoch %d of source %q exceeds the limit of 2^31-1; set max_epochs", sample.Epoch,
			b.s.d.Sources[sample.Source].Name)
	}
	put(b.position, row, sample.Position)
	put(b.source, row, int32(sample.Source))
	put(b.epoch, row, int32(sample.Epoch))
	put(b.window, row, sample.Window)
	put(b.shard, row, int32(sample.Shard))
	put(b.offset, row, sample.Token)
	n, err := b.readSample(row, sample)
	if err != nil {
		return err
	}
	put(b.lengths, row, int32(n))
	if len(b.begun) > math.MaxInt32 {
		return errors.New("a record would have more than 2^31 document starts; use a smaller batch")
	}
	put(b.starts, row+1, int32(len(b.begun)))
	return nil
}

// put sets a value of a column, if the column is requested.
func put[T int64 | int32](column []T, row int, value T) {
	if column != nil {
		column[row] = value
	}
}

// readSample reads the tokens and the document starts of a row, if they are requested.
func (b *recordBuilder) readSample(row int, sample *blend.Sample) (length int, err error) {
	starts := &b.begun
	if b.starts == nil {
		starts = nil
	}
	from, to := row*b.length, (row+1)*b.length
	switch {
	case b.tokens2 != nil:
		return blend.ReadSample(b.ctx, b.s.d, *sample, b.tokens2[from:to], starts)
	case b.tokens4 != nil:
		return blend.ReadSample(b.ctx, b.s.d, *sample, b.tokens4[from:to], starts)
	}
	return blend.ReadSample[uint32](b.ctx, b.s.d, *sample, nil, starts)
}

// record returns the record. After that, only release may be called.
func (b *recordBuilder) record() arrow.RecordBatch {
	var data []arrow.ArrayData
	made := func(t arrow.DataType, n int, buffers []*memory.Buffer, children ...arrow.ArrayData) arrow.ArrayData {
		a := array.NewData(t, n, buffers, children, 0, 0)
		data = append(data, a)
		return a
	}
	arrays := make([]arrow.Array, len(b.s.columns))
	for i, column := range b.s.columns {
		t, numbers := b.s.schema.Field(i).Type, []*memory.Buffer{nil, b.buffers[column]}
		switch column {
		case columnSource:
			source := array.NewDataWithDictionary(t, b.rows, numbers, 0, 0, b.s.names.Data().(*array.Data))
			data = append(data, source)
			arrays[i] = array.MakeFromData(source)
		case columnTokens:
			arrays[i] = array.MakeFromData(made(t, b.rows, []*memory.Buffer{nil},
				made(t.(*arrow.FixedSizeListType).Elem(), b.rows*b.length, numbers)))
		case columnDocumentStarts:
			b.values = b.buffer(4 * len(b.begun))
			copy(view[int32](b.values), b.begun)
			arrays[i] = array.MakeFromData(made(t, b.rows, numbers, made(t.(*arrow.ListType).Elem(), len(b.begun),
				[]*memory.Buffer{nil, b.values})))
		default:
			arrays[i] = array.MakeFromData(made(t, b.rows, numbers))
		}
	}
	record := array.NewRecordBatch(b.s.schema, arrays, int64(b.rows))
	for _, a := range arrays {
		a.Release()
	}
	for _, d := range data {
		d.Release()
	}
	return record
}

// WriteIPC writes a stream in Arrow's IPC streaming format, which any Arrow library can read. If w
// has a method Flush, like [bufio.Writer], WriteIPC calls it after each record.
func WriteIPC(ctx context.Context, w io.Writer, d *blend.Data, o Options) (err error) {
	s, err := New(ctx, d, o)
	if err != nil {
		return err
	}
	defer s.Close()
	out := ipc.NewWriter(w, ipc.WithSchema(s.schema), ipc.WithAllocator(s.o.Allocator))
	defer func() {
		if cerr := out.Close(); err == nil {
			err = cerr
		}
	}()
	for {
		record, err := s.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		err = out.Write(record)
		record.Release()
		if f, ok := w.(interface{ Flush() error }); ok && err == nil {
			err = f.Flush() // a reader gets a record as soon as it is there
		}
		if err != nil {
			return fmt.Errorf("writing the stream: %w", err)
		}
	}
}
