package blend

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
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
	From, To  int64 // positions [From, To), as [Grid.Check] allows them; To 0 is the end of the plan
	BatchSize int   // positions of a step, over all ranks
	Rank      int   // this rank takes positions [first + Rank·B/World, first + (Rank+1)·B/World) of each step
	World     int   // number of ranks, which must divide BatchSize; 0 is 1
	Prefetch  int   // records that are read ahead, at most, up to 4096; 0 reads each when it is asked for

	// rows of a record, at most; divides B/World, which is what 0 stands for: more of them are more
	// records a step
	MicroBatch int
	Columns    []string // of the records, in this order, of [Data.Columns]; nil for those that [Stream] lists

	Allocator memory.Allocator // of the records; nil for Go's memory
}

// workers bounds the goroutines of a stream. They copy from mapped files; a few keep several reads
// of a disk in flight.
const workers = 4

// maxWorkers bounds what a caller may ask to be done at a time. A number beyond it is a mistake,
// which would end in a lack of memory.
const maxWorkers = 4096

// A Stream gives one record for each step, this rank's share of it, or several of
// [StreamOptions.MicroBatch] rows. The last step may be shorter, and skipped positions leave a
// record short or empty; every rank gets the same number of records. Each sample is a row:
//
//	position         int64                            in the order
//	source           dictionary<int32, utf8>          index and name of the source
//	epoch            int32                            of the source
//	window           int64                            among the source's windows
//	tokens           fixed_size_list<uint16>[L+1]     int32 unless every shard is uint16
//	document_starts  list<int32>                      offsets in the window at which documents begin
//	lengths          int32                            of a packed plan only: tokens that are not padding
//
// Only where they are named in the options, there are also
//
//	shard            int32                            number of the shard in its source
//	offset           int64                            token of the shard at which the window begins
//
// A row of a packed plan is made of pieces: whole documents, and parts of those that are longer
// than a row. document_starts then has where each piece begins, the first at 0, and the metadata
// mula.padding the id behind the last.
//
// No column has nulls. The metadata of the schema names the plan's fingerprint, L, and the options:
// mula.plan, mula.sequence_length, mula.batch_size, mula.from, mula.to, mula.rank and mula.world.
// [NewBatch] gives a typed view on a record.
//
// A Stream is used by one goroutine. It must be closed, whether or not it was read to its end.
type Stream struct {
	d       *Data
	o       StreamOptions
	schema  *arrow.Schema
	columns []int       // which column each field of the schema is
	names   arrow.Array // the dictionary of sources
	width   int         // bytes of a token
	next    place       // of the record that is to be read next
	err     error       // what Next gives from now on
	ctx     context.Context
	cancel  context.CancelFunc
	queue   chan chan built // records in order, each when it is ready; nil without prefetch
	room    chan struct{}   // holds one element for each record that is read ahead
	group   *errgroup.Group
}

// place is that of a record: the first position of its step, and its number in it.
type place struct {
	first int64
	part  int
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
	s := &Stream{d: d, o: o, width: d.tokenWidth(), next: place{first: o.From}}
	var err error
	if s.schema, s.columns, err = d.schema(o); err != nil {
		return nil, err
	}
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
	grid, err := d.Grid(o.BatchSize)
	if err != nil {
		return err
	}
	if err := grid.Check(o.From, o.To); err != nil {
		return err
	}
	if o.MicroBatch, err = RecordRows(o.BatchSize, o.Rank, o.World, o.MicroBatch); err != nil {
		return err
	}
	if o.Prefetch < 0 || o.Prefetch > maxWorkers {
		return fmt.Errorf("prefetch %d is not between 0 and %d", o.Prefetch, maxWorkers)
	}
	if o.MicroBatch > math.MaxInt32/(d.SequenceLength+1) {
		return fmt.Errorf("%d samples of %d tokens are more than the 2^31 tokens that a record can hold: use more "+
			"ranks or a smaller batch",
			o.MicroBatch, d.SequenceLength+1)
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
	columnLengths // only of a packed plan
	columnShard   // this and the next where they are named
	columnOffset
	columns // their number
)

// fields are the columns, by number.
func (d *Data) fields() [columns]arrow.Field {
	var element arrow.DataType = arrow.PrimitiveTypes.Int32
	if d.tokenWidth() == 2 {
		element = arrow.PrimitiveTypes.Uint16
	}
	return [columns]arrow.Field{
		columnPosition: {Name: "position", Type: arrow.PrimitiveTypes.Int64},
		columnSource:   {Name: "source", Type: sourceType},
		columnEpoch:    {Name: "epoch", Type: arrow.PrimitiveTypes.Int32},
		columnWindow:   {Name: "window", Type: arrow.PrimitiveTypes.Int64},
		columnTokens: {Name: "tokens", Type: arrow.FixedSizeListOfNonNullable(int32(d.SequenceLength+1),
			element)},
		columnDocumentStarts: {Name: "document_starts", Type: arrow.ListOfNonNullable(arrow.PrimitiveTypes.Int32)},
		columnLengths:        {Name: "lengths", Type: arrow.PrimitiveTypes.Int32},
		columnShard:          {Name: "shard", Type: arrow.PrimitiveTypes.Int32},
		columnOffset:         {Name: "offset", Type: arrow.PrimitiveTypes.Int64},
	}
}

// Columns names the columns that a stream of the plan may have. Those of one without
// [StreamOptions.Columns] are the first of them.
func (d *Data) Columns() (names []string) {
	for i, f := range d.fields() {
		if i != columnLengths || d.Packing != nil {
			names = append(names, f.Name)
		}
	}
	return names
}

// schema is the schema of a stream with complete options, and which column each of its fields is.
func (d *Data) schema(o StreamOptions) (*arrow.Schema, []int, error) {
	said := map[string]string{
		"mula.plan":            d.fingerprint,
		"mula.sequence_length": strconv.Itoa(d.SequenceLength),
		"mula.batch_size":      strconv.Itoa(o.BatchSize),
		"mula.from":            strconv.FormatInt(o.From, 10),
		"mula.to":              strconv.FormatInt(o.To, 10),
		"mula.rank":            strconv.Itoa(o.Rank),
		"mula.world":           strconv.Itoa(o.World),
	}
	if d.Packing != nil {
		said["mula.padding"] = strconv.FormatUint(uint64(d.Packing.Padding), 10)
	}
	known := d.Columns()
	if o.Columns == nil {
		o.Columns = known[:len(known)-(columns-columnShard)]
	}
	all := d.fields()
	var fields []arrow.Field
	var list []int
	for _, name := range o.Columns {
		i := slices.IndexFunc(all[:], func(f arrow.Field) bool { return f.Name == name })
		if i < 0 || !slices.Contains(known, name) || slices.Contains(list, i) {
			return nil, nil, fmt.Errorf("columns %s: each is to be named once, and to be one of %s",
				strings.Join(o.Columns, ", "), strings.Join(known, ", "))
		}
		fields, list = append(fields, all[i]), append(list, i)
	}
	metadata := arrow.MetadataFrom(said)
	return arrow.NewSchema(fields, &metadata), list, nil
}

var sourceType = &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: arrow.BinaryTypes.String}

// tokenWidth is the number of bytes of a token in the stream: 2 if every shard of the plan is
// uint16, else 4.
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

// Schema is that of the records.
func (s *Stream) Schema() *arrow.Schema { return s.schema }

// Next gives the next record, which the caller must release, or io.EOF after the last.
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
		if s.next.first >= s.o.To {
			return nil, io.EOF
		}
		record, err := s.build(s.ctx, s.next)
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

// after is the place of the record after the one at p.
func (s *Stream) after(p place) place {
	if p.part++; p.part < s.o.BatchSize/s.o.World/s.o.MicroBatch {
		return p
	}
	return place{first: p.first + min(int64(s.o.BatchSize), s.o.To-p.first)}
}

// Close ends the stream and gives back what was read ahead.
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
		s.group.Wait()
		s.queue = nil
	}
	if s.names != nil {
		s.names.Release()
		s.names = nil
	}
}

// produce reads ahead: it puts a slot for each record into the queue, in order, and has workers
// fill them. An element of room stands for a record from before it is read until it is taken, so
// that there are never more than Prefetch of them.
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
		s.queue <- slot // never blocks: it has as much room as room
		fill.Go(func() error {
			record, err := s.build(s.ctx, at)
			slot <- built{record, err}
			return nil
		})
	}
	fill.Wait()
	return nil
}

// build reads the record at p.
func (s *Stream) build(ctx context.Context, p place) (arrow.RecordBatch, error) {
	share, rows := int64(s.o.BatchSize/s.o.World), int64(s.o.MicroBatch)
	// From here on positions may exceed the end of the part, so the sums stay in range: both are
	// below 2^61.
	from := min(p.first+int64(s.o.Rank)*share+int64(p.part)*rows, s.o.To)
	to := min(from+rows, s.o.To)
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

// A recordBuilder lays the columns of a record out in buffers of their final size; only that of the
// document starts is not known before.
type recordBuilder struct {
	ctx    context.Context
	s      *Stream
	rows   int
	length int // tokens of a sample
	// by column, nil for one that is not wanted; of the document starts these are the offsets
	buffers [columns]*memory.Buffer
	values  *memory.Buffer // of the document starts

	// The same buffers as numbers; of the tokens one of the two.
	position, window, offset              []int64
	source, epoch, starts, lengths, shard []int32
	tokens2                               []uint16
	tokens4                               []uint32

	row    int     // that is being read
	sample *Sample // of the row
	begun  []int32 // the document starts of the rows so far
	read   func(*shards.Shard, int, segment) error
}

func newRecordBuilder(ctx context.Context, s *Stream, rows int) *recordBuilder {
	b := &recordBuilder{ctx: ctx, s: s, rows: rows, length: s.d.SequenceLength + 1}
	b.read = b.readStretch
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

// view is a buffer as a slice of numbers; nil where there is none.
func view[T int64 | int32 | uint32 | uint16](b *memory.Buffer) []T {
	if b == nil {
		return nil
	}
	bytes := b.Bytes()
	var element T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(bytes))), len(bytes)/int(unsafe.Sizeof(element)))
}

// release gives back the builder's references; a record has its own.
func (b *recordBuilder) release() {
	for _, m := range append(b.buffers[:], b.values) {
		if m != nil {
			m.Release()
		}
	}
}

// add fills in one row.
func (b *recordBuilder) add(row int, sample *Sample) error {
	if sample.Epoch > math.MaxInt32 {
		return fmt.Errorf("epoch %d of source %q is more than a stream can say: set max_epochs", sample.Epoch,
			b.s.d.Sources[sample.Source].Name)
	}
	put(b.position, row, sample.Position)
	put(b.source, row, int32(sample.Source))
	put(b.epoch, row, int32(sample.Epoch))
	put(b.window, row, sample.Window)
	put(b.shard, row, int32(sample.Shard))
	put(b.offset, row, sample.Token)
	b.row, b.sample = row, sample
	n, err := b.s.d.stretches(b.ctx, b.length, *sample, b.read)
	if err != nil {
		return err
	}
	if n < b.length {
		if b.tokens2 != nil {
			pad(b.tokens2[row*b.length:][n:b.length], b.s.d.Packing.Padding)
		} else if b.tokens4 != nil {
			pad(b.tokens4[row*b.length:][n:b.length], b.s.d.Packing.Padding)
		}
	}
	put(b.lengths, row, int32(n))
	if len(b.begun) > math.MaxInt32 {
		return errors.New("a record would have more than 2^31 document starts: use a smaller batch")
	}
	put(b.starts, row+1, int32(len(b.begun)))
	return nil
}

// put sets a number of a column that is wanted.
func put[T int64 | int32](column []T, row int, value T) {
	if column != nil {
		column[row] = value
	}
}

// readStretch reads a stretch of the row that is being read, at its place in it.
func (b *recordBuilder) readStretch(shard *shards.Shard, at int, g segment) (err error) {
	from := b.row*b.length + at
	switch {
	case b.tokens2 != nil:
		err = b.s.d.read2(b.tokens2[from:][:g.length], b.sample.Source, shard, g)
	case b.tokens4 != nil:
		err = b.s.d.read4(b.tokens4[from:][:g.length], b.sample.Source, shard, g)
	}
	if err == nil && b.starts != nil {
		b.begun, err = b.s.d.appendStarts(b.begun, b.sample.Source, shard, at, g)
	}
	return err
}

// DocumentStarts appends the offsets in a sample at which documents that are not empty begin, in
// order, and gives the number of its tokens that are not padding, L+1 unless the plan is packed.
func (d *Data) DocumentStarts(dst []int32, s Sample) (starts []int32, length int, err error) {
	length, err = d.stretches(context.Background(), d.SequenceLength+1, s, func(shard *shards.Shard, at int,
		g segment) (err error) {
		dst, err = d.appendStarts(dst, s.Source, shard, at, g)
		return err
	})
	return dst, length, err
}

// appendStarts appends the offsets in a sample at which documents that are not empty begin in a
// stretch of it.
func (d *Data) appendStarts(dst []int32, source int, shard *shards.Shard, at int, g segment) ([]int32, error) {
	if g.begins {
		dst = append(dst, int32(at))
	}
	if d.Packing != nil { // a stretch is of one document
		return dst, nil
	}
	for span, err := range shard.Spans(g.token, g.token+g.length) {
		if err != nil {
			return dst, fmt.Errorf("source %q: %w", d.Sources[source].Name, err)
		}
		if span.First > g.token || span.First == g.token && !g.begins {
			dst = append(dst, int32(int64(at)+span.First-g.token))
		}
	}
	return dst, nil
}

// record makes the record. The builder is not to be used again but for release.
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
