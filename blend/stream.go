package blend

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"sync"
	"unsafe"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"golang.org/x/sync/errgroup"

	"mula/shards"
)

// StreamOptions say which part of the order to read, and how.
type StreamOptions struct {
	From, To  int64 // positions [From, To); From is where a step begins, a multiple of BatchSize; To 0 is the end of the plan
	BatchSize int   // positions of a step, over all ranks
	Rank      int   // this rank takes positions [first + Rank·B/World, first + (Rank+1)·B/World) of each step
	World     int   // number of ranks, which must divide BatchSize; 0 is 1
	Prefetch  int   // records that are read ahead, at most, up to 4096; 0 reads each when it is asked for

	Allocator memory.Allocator // of the records; nil for Go's memory
}

// workers bounds the goroutines of a stream. They copy from mapped files; a few keep several reads of a disk in flight.
const workers = 4

// maxWorkers bounds what a caller may ask to be done at a time. A number beyond it is a mistake, which would end in a lack of memory.
const maxWorkers = 4096

// A Stream gives one record for each step: this rank's share of it. The last step may be shorter, and skipped positions leave a step
// short or empty; every rank gets the same number of records. Each sample is a row:
//
//	position         int64                            in the order
//	source           dictionary<int32, utf8>          index and name of the source
//	epoch            int32                            of the source
//	window           int64                            among the source's windows
//	tokens           fixed_size_list<uint16>[L+1]     int32 unless every shard is uint16
//	document_starts  list<int32>                      offsets in the window at which documents begin
//	lengths          int32                            of a packed plan only: tokens that are not padding
//
// A row of a packed plan is made of pieces: whole documents, and parts of those that are longer than a row. document_starts then has where each piece
// begins, the first at 0, and the metadata mula.padding the id behind the last.
//
// No column has nulls. The metadata of the schema names the plan's fingerprint, L, and the options: mula.plan, mula.sequence_length,
// mula.batch_size, mula.from, mula.to, mula.rank and mula.world. [NewBatch] gives a typed view on a record.
//
// A Stream is used by one goroutine. It must be closed, whether or not it was read to its end.
type Stream struct {
	d       *Data
	o       StreamOptions
	schema  *arrow.Schema
	names   arrow.Array // the dictionary of sources
	width   int         // bytes of a token
	next    int64       // first position of the step that is to be read next
	err     error       // what Next gives from now on
	ctx     context.Context
	cancel  context.CancelFunc
	queue   chan chan built // records in order, each when it is ready; nil without prefetch
	room    chan struct{}   // holds one element for each record that is read ahead
	group   *errgroup.Group
	scratch []uint32
}

type built struct {
	record arrow.RecordBatch
	err    error
}

// Stream starts to read. The context ends it early: Next then gives the context's error.
func (d *Data) Stream(ctx context.Context, o StreamOptions) (*Stream, error) {
	if err := d.complete(&o); err != nil {
		return nil, err
	}
	s := &Stream{d: d, o: o, schema: d.schema(o), width: d.tokenWidth(), next: o.From}
	s.names = sourceNames(d.Plan, o.Allocator)
	s.ctx, s.cancel = context.WithCancel(ctx)
	if o.Prefetch > 0 {
		s.queue = make(chan chan built, o.Prefetch)
		s.room = make(chan struct{}, o.Prefetch)
		s.group = new(errgroup.Group)
		s.group.Go(s.produce)
	}
	return s, nil
}

// complete fills in the defaults of the options and checks them.
func (d *Data) complete(o *StreamOptions) error {
	if o.World == 0 {
		o.World = 1
	}
	if o.To == 0 {
		o.To = d.length
	}
	if o.Allocator == nil {
		o.Allocator = memory.DefaultAllocator
	}
	switch {
	case o.BatchSize < 1:
		return fmt.Errorf("blend: batch size %d: must be at least 1", o.BatchSize)
	case o.World < 0 || o.Rank < 0 || o.Rank >= o.World:
		return fmt.Errorf("blend: rank %d of %d: ranks count from 0", o.Rank, o.World)
	case o.BatchSize%o.World != 0:
		return fmt.Errorf("blend: batch size %d cannot be divided among %d ranks: choose a multiple", o.BatchSize, o.World)
	case o.From < 0 || o.To < o.From || o.To > d.length:
		return fmt.Errorf("blend: positions [%d, %d) are not all in the plan, which has %d", o.From, o.To, d.length)
	case o.From%int64(o.BatchSize) != 0:
		return d.noStepStart(o.From, int64(o.BatchSize))
	case o.Prefetch < 0 || o.Prefetch > maxWorkers:
		return fmt.Errorf("blend: prefetch %d is not between 0 and %d", o.Prefetch, maxWorkers)
	case int64(o.BatchSize) > maxLength:
		return fmt.Errorf("blend: batch size %d: a plan has at most 2^60 positions", o.BatchSize)
	case o.BatchSize/o.World > math.MaxInt32/(d.SequenceLength+1):
		return fmt.Errorf("blend: %d samples of %d tokens are more than the 2^31 tokens that a record can hold: use more ranks or a smaller batch",
			o.BatchSize/o.World, d.SequenceLength+1)
	}
	return nil
}

// noStepStart is the error about a position at which no step begins, which names those that it may have been meant for.
func (d *Data) noStepStart(position, batch int64) error {
	before := position - position%batch
	near := fmt.Sprint("the nearest begins at ", before)
	if before < d.length-batch {
		near = fmt.Sprintf("the nearest begin at %d and %d", before, before+batch)
	}
	return fmt.Errorf("blend: no step of %d positions begins at %d: %s", batch, position, near)
}

// The columns of a stream.
const (
	columnPosition = iota
	columnSource
	columnEpoch
	columnWindow
	columnTokens
	columnDocumentStarts
	columnLengths // only of a packed plan
)

// schema is the schema of a stream with complete options.
func (d *Data) schema(o StreamOptions) *arrow.Schema {
	var element arrow.DataType = arrow.PrimitiveTypes.Int32
	if d.tokenWidth() == 2 {
		element = arrow.PrimitiveTypes.Uint16
	}
	said := map[string]string{
		"mula.plan":            d.fingerprint,
		"mula.sequence_length": strconv.Itoa(d.SequenceLength),
		"mula.batch_size":      strconv.Itoa(o.BatchSize),
		"mula.from":            strconv.FormatInt(o.From, 10),
		"mula.to":              strconv.FormatInt(o.To, 10),
		"mula.rank":            strconv.Itoa(o.Rank),
		"mula.world":           strconv.Itoa(o.World),
	}
	fields := []arrow.Field{
		{Name: "position", Type: arrow.PrimitiveTypes.Int64},
		{Name: "source", Type: sourceType},
		{Name: "epoch", Type: arrow.PrimitiveTypes.Int32},
		{Name: "window", Type: arrow.PrimitiveTypes.Int64},
		{Name: "tokens", Type: arrow.FixedSizeListOfNonNullable(int32(d.SequenceLength+1), element)},
		{Name: "document_starts", Type: arrow.ListOfNonNullable(arrow.PrimitiveTypes.Int32)},
	}
	if d.Packing != nil {
		fields = append(fields, arrow.Field{Name: "lengths", Type: arrow.PrimitiveTypes.Int32})
		said["mula.padding"] = strconv.FormatUint(uint64(d.Packing.Padding), 10)
	}
	metadata := arrow.MetadataFrom(said)
	return arrow.NewSchema(fields, &metadata)
}

var sourceType = &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: arrow.BinaryTypes.String}

// tokenWidth is the number of bytes of a token in the stream: 2 if every shard of the plan is uint16, else 4.
func (d *Data) tokenWidth() int {
	for _, s := range d.Sources {
		for _, sh := range s.Shards {
			if sh.DType != shards.UInt16.String() {
				return 4
			}
		}
	}
	return 2
}

func sourceNames(p *Plan, alloc memory.Allocator) arrow.Array {
	b := array.NewStringBuilder(alloc)
	defer b.Release()
	for _, s := range p.Sources {
		b.Append(s.Name)
	}
	return b.NewArray()
}

// Next gives the record of the next step, which the caller must release, or io.EOF after the last.
func (s *Stream) Next() (arrow.RecordBatch, error) {
	if s.err != nil {
		return nil, s.err
	}
	record, err := s.take()
	if err == nil {
		if err = s.d.damage(); err != nil {
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
		if s.next >= s.o.To {
			return nil, io.EOF
		}
		if s.scratch == nil {
			s.scratch = make([]uint32, s.d.SequenceLength+1)
		}
		record, err := s.build(s.ctx, s.next, s.scratch)
		s.next = s.after(s.next)
		return record, err
	}
	select {
	case slot, ok := <-s.queue:
		if !ok {
			if err := context.Cause(s.ctx); err != nil { // the producer gave up
				return nil, err
			}
			return nil, io.EOF
		}
		b := <-slot // comes soon: a worker that is cancelled gives an error
		<-s.room
		return b.record, b.err
	case <-s.ctx.Done():
		return nil, context.Cause(s.ctx)
	}
}

// after is the first position of the step after the one that begins at first.
func (s *Stream) after(first int64) int64 {
	return first + min(int64(s.o.BatchSize), s.o.To-first)
}

// Close ends the stream and gives back what was read ahead.
func (s *Stream) Close() {
	s.cancel()
	if s.err == nil {
		s.err = errors.New("blend: the stream is closed")
	}
	if s.queue != nil {
		for slot := range s.queue { // closed by the producer, which notices the cancellation
			if b := <-slot; b.record != nil {
				b.record.Release()
			}
			<-s.room
		}
		s.group.Wait()
		s.queue = nil
	}
	if s.names != nil {
		s.names.Release()
		s.names = nil
	}
}

// produce reads ahead: it puts a slot for each record into the queue, in order, and has workers fill them. An element of room stands for a
// record from before it is read until it is taken, so that there are never more than Prefetch of them.
func (s *Stream) produce() error {
	defer close(s.queue)
	var fill errgroup.Group
	fill.SetLimit(min(workers, s.o.Prefetch))
	buffers := sync.Pool{New: func() any { b := make([]uint32, s.d.SequenceLength+1); return &b }}
	for first := s.o.From; first < s.o.To; first = s.after(first) {
		select {
		case s.room <- struct{}{}:
		case <-s.ctx.Done():
			fill.Wait()
			return nil
		}
		slot := make(chan built, 1)
		s.queue <- slot // never blocks: it has as much room as room
		fill.Go(func() error {
			scratch := buffers.Get().(*[]uint32)
			defer buffers.Put(scratch)
			record, err := s.build(s.ctx, first, *scratch)
			slot <- built{record, err}
			return nil
		})
	}
	fill.Wait()
	return nil
}

// build reads this rank's share of the step that begins at first.
func (s *Stream) build(ctx context.Context, first int64, scratch []uint32) (arrow.RecordBatch, error) {
	share := int64(s.o.BatchSize / s.o.World)
	// From here on positions may exceed the end of the part, so the sums stay in range: both are below 2^61.
	from := min(first+int64(s.o.Rank)*share, s.o.To)
	to := min(from+share, s.o.To)
	samples := make([]Sample, 0, to-from)
	for position := from; position < to; position++ {
		sample, err := s.d.Locate(position)
		if err != nil {
			return nil, err
		}
		if !sample.Skipped {
			samples = append(samples, sample)
		}
	}
	b := newRecordBuilder(s.o.Allocator, len(samples), s.d.SequenceLength+1, s.width)
	if s.d.Packing != nil {
		b.addLengths()
	}
	defer b.release()
	for row, sample := range samples {
		if err := ctx.Err(); err != nil {
			return nil, context.Cause(ctx)
		}
		if err := b.add(ctx, s, row, sample, scratch); err != nil {
			return nil, err
		}
	}
	return b.record(s.schema, s.names), nil
}

// A recordBuilder lays the columns of a record out in buffers of their final size; only that of the document starts is not known before.
type recordBuilder struct {
	alloc               memory.Allocator
	rows, length, width int // samples; tokens of a sample; bytes of a token
	buffers             []*memory.Buffer

	positions, sources, epochs, windows, tokens, offsets *memory.Buffer
	lengths                                              *memory.Buffer // nil unless the plan is packed

	// The same buffers as numbers; of the tokens one of the two.
	position, window      []int64
	source, epoch, offset []int32
	filled                []int32 // the lengths
	tokens2               []uint16
	tokens4               []int32

	starts []int32
}

func newRecordBuilder(alloc memory.Allocator, rows, length, width int) *recordBuilder {
	b := &recordBuilder{alloc: alloc, rows: rows, length: length, width: width}
	b.positions, b.windows = b.buffer(8*rows), b.buffer(8*rows)
	b.sources, b.epochs = b.buffer(4*rows), b.buffer(4*rows)
	b.tokens, b.offsets = b.buffer(width*rows*length), b.buffer(4*(rows+1))
	b.position, b.window = view[int64](b.positions), view[int64](b.windows)
	b.source, b.epoch, b.offset = view[int32](b.sources), view[int32](b.epochs), view[int32](b.offsets)
	b.offset[0] = 0
	if width == 2 {
		b.tokens2 = view[uint16](b.tokens)
	} else {
		b.tokens4 = view[int32](b.tokens)
	}
	return b
}

// addLengths adds the column of lengths.
func (b *recordBuilder) addLengths() {
	b.lengths = b.buffer(4 * b.rows)
	b.filled = view[int32](b.lengths)
}

func (b *recordBuilder) buffer(bytes int) *memory.Buffer {
	m := memory.NewResizableBuffer(b.alloc)
	m.Resize(bytes)
	b.buffers = append(b.buffers, m)
	return m
}

// view is a buffer as a slice of numbers.
func view[T int64 | int32 | uint16](b *memory.Buffer) []T {
	bytes := b.Bytes()
	var element T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(bytes))), len(bytes)/int(unsafe.Sizeof(element)))
}

// release gives back the builder's references; a record has its own.
func (b *recordBuilder) release() {
	for _, m := range b.buffers {
		m.Release()
	}
}

// add fills in one row.
func (b *recordBuilder) add(ctx context.Context, s *Stream, row int, sample Sample, scratch []uint32) error {
	if sample.Epoch > math.MaxInt32 {
		return fmt.Errorf("blend: position %d is in epoch %d of source %q, more than a stream can say: set max_epochs", sample.Position, sample.Epoch,
			s.d.Sources[sample.Source].Name)
	}
	b.position[row], b.source[row] = sample.Position, int32(sample.Source)
	b.epoch[row], b.window[row] = int32(sample.Epoch), sample.Window
	if b.width == 2 {
		if err := s.d.tokens2(ctx, b.tokens2[row*b.length:][:b.length], sample); err != nil {
			return fmt.Errorf("position %d: %w", sample.Position, err)
		}
	} else {
		if err := s.d.tokens(ctx, scratch, sample); err != nil {
			return fmt.Errorf("position %d: %w", sample.Position, err)
		}
		dst := b.tokens4[row*b.length:][:b.length]
		for i, id := range scratch {
			dst[i] = int32(id)
		}
	}
	var err error
	var filled int
	if b.starts, filled, err = s.d.DocumentStarts(b.starts, sample); err != nil {
		return fmt.Errorf("position %d: %w", sample.Position, err)
	}
	if b.lengths != nil {
		b.filled[row] = int32(filled)
	}
	if len(b.starts) > math.MaxInt32 {
		return errors.New("blend: a record would have more than 2^31 document starts: use a smaller batch")
	}
	b.offset[row+1] = int32(len(b.starts))
	return nil
}

// DocumentStarts appends the offsets in a sample at which documents that are not empty begin, in order, and gives the number of its tokens that are not
// padding, L+1 unless the plan is packed.
func (d *Data) DocumentStarts(dst []int32, s Sample) (starts []int32, length int, err error) {
	if d.Packing != nil {
		return d.packedStarts(dst, &s)
	}
	starts, err = d.documentStarts(dst, s)
	return starts, d.SequenceLength + 1, err
}

// documentStarts appends the offsets in a sample's window at which documents that are not empty begin.
func (d *Data) documentStarts(dst []int32, s Sample) ([]int32, error) {
	var buffer [16]segment
	segments, err := d.segments(buffer[:0], s)
	if err != nil {
		return dst, err
	}
	at := int64(0) // in the sample
	err = d.over(s.Source, segments, func(shard *shards.Shard, g segment) error {
		if g.begins {
			dst = append(dst, int32(at))
		}
		for span, err := range shard.Spans(g.token, g.token+g.length) {
			if err != nil {
				return fmt.Errorf("source %q: %w", d.Sources[s.Source].Name, err)
			}
			if span.First > g.token || span.First == g.token && !g.begins {
				dst = append(dst, int32(at+span.First-g.token))
			}
		}
		at += g.length
		return nil
	})
	return dst, err
}

// record makes the record. The builder is not to be used again but for release.
func (b *recordBuilder) record(schema *arrow.Schema, names arrow.Array) arrow.RecordBatch {
	starts := memory.NewResizableBuffer(b.alloc)
	starts.Resize(4 * len(b.starts))
	copy(view[int32](starts), b.starts)
	b.buffers = append(b.buffers, starts)

	field := func(i int) arrow.DataType { return schema.Field(i).Type }
	var data []arrow.ArrayData
	flat := func(t arrow.DataType, n int, buffers ...*memory.Buffer) arrow.ArrayData {
		a := array.NewData(t, n, buffers, nil, 0, 0)
		data = append(data, a)
		return a
	}
	nested := func(t arrow.DataType, child arrow.ArrayData, buffers ...*memory.Buffer) arrow.ArrayData {
		a := array.NewData(t, b.rows, buffers, []arrow.ArrayData{child}, 0, 0)
		data = append(data, a)
		return a
	}
	tokensType := field(columnTokens).(*arrow.FixedSizeListType)
	startsType := field(columnDocumentStarts).(*arrow.ListType)
	source := array.NewDataWithDictionary(sourceType, b.rows, []*memory.Buffer{nil, b.sources}, 0, 0, names.Data().(*array.Data))
	data = append(data, source)
	columns := []arrow.ArrayData{
		columnPosition: flat(field(columnPosition), b.rows, nil, b.positions),
		columnSource:   source,
		columnEpoch:    flat(field(columnEpoch), b.rows, nil, b.epochs),
		columnWindow:   flat(field(columnWindow), b.rows, nil, b.windows),
		columnTokens:   nested(tokensType, flat(tokensType.Elem(), b.rows*b.length, nil, b.tokens), nil),
		columnDocumentStarts: nested(startsType, flat(startsType.Elem(), len(b.starts), nil, starts),
			nil, b.offsets),
	}
	if b.lengths != nil {
		columns = append(columns, flat(field(columnLengths), b.rows, nil, b.lengths))
	}
	arrays := make([]arrow.Array, len(columns))
	for i, c := range columns {
		arrays[i] = array.MakeFromData(c)
	}
	record := array.NewRecordBatch(schema, arrays, int64(b.rows))
	for _, a := range arrays {
		a.Release()
	}
	for _, d := range data {
		d.Release()
	}
	return record
}

// WriteIPC writes a stream in Arrow's IPC streaming format, for any Arrow library to read.
func (d *Data) WriteIPC(ctx context.Context, w io.Writer, o StreamOptions) (err error) {
	s, err := d.Stream(ctx, o)
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
		if err != nil {
			return fmt.Errorf("writing the stream: %w", err)
		}
	}
}
