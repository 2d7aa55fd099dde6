package serve

import (
	"context"
	"errors"
	"io"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"mula/blend/stream"
)

// The columns that every stream has, with their names in package blend.
const (
	columnPosition = "position"
	columnTokens   = "tokens"
)

// A Stream yields the records that a [Request] selects, one after the other. It must be used, and
// closed, by one goroutine.
//
// It reserves memory for the record that Next returned last. The next call of Next releases this
// record. If the service has memory, the following record is read ahead.
type Stream struct {
	service *Service
	ctx     context.Context
	cancel  context.CancelFunc
	request Request
	schema  *arrow.Schema
	columns []string
	source  *stream.Stream // nil if there is nothing to read
	alloc   *recycler      // allocator of the records, unless they are written to slots
	slot    *slot          // nil unless records are written to slots
	done    []func()       // called by Close, last first

	left   int64 // number of records that Next has not returned
	size   int64 // bytes reserved for a record, times copies
	held   int64 // bytes reserved for the record in transit
	last   arrow.RecordBatch
	ahead  chan read // the record that is read ahead, or nil
	saved  int64     // bytes reserved for the record that is read ahead
	copies int64     // number of records that the transport holds at a time
}

// read is a record, or the error of reading it.
type read struct {
	record arrow.RecordBatch
	err    error
}

// Open starts a stream, and waits if the memory is in use. copies is the number of records that the
// transport holds at a time, including the current one. The error is an [*Error] if the request is
// invalid or the service is busy.
func (s *Service) Open(ctx context.Context, r Request, copies int) (*Stream, error) {
	return s.open(ctx, &Stream{service: s, request: r, copies: int64(copies),
		alloc: &recycler{fresh: memory.NewGoAllocator()}})
}

// open starts a stream. If its records are written to slots, the error is errNoRoom if there is
// currently no memory for slots.
func (s *Service) open(ctx context.Context, st *Stream) (_ *Stream, err error) {
	defer func() {
		if err != nil {
			if !errors.Is(err, errNoRoom) {
				s.counts.refused.Add(1)
			}
			st.Close()
		}
	}()
	if err := st.check(); err != nil {
		return nil, err
	}
	done, err := s.use()
	if err != nil {
		return nil, err
	}
	st.done = append(st.done, done)
	if !s.streams.TryAcquire(1) {
		return nil, s.tooMany()
	}
	s.counts.streams.Add(1)
	st.done = append(st.done, func() { s.streams.Release(1); s.counts.streams.Add(-1) })
	st.ctx, st.cancel = context.WithCancel(ctx)
	st.done = append(st.done, st.cancel)
	if err := st.reserve(st.size + overhead); err != nil {
		return nil, err
	}
	if r := st.request; r.From < r.To {
		o := stream.Options{From: r.From, To: r.To, BatchSize: r.BatchSize, Rank: r.Rank, World: r.World, Hosts: 1,
			MicroBatch: r.MicroBatch, Columns: st.columns}
		if o.Allocator = st.alloc; st.slot != nil {
			o.Allocator = st.slot
		}
		if st.source, err = stream.New(st.ctx, s.data, o); err != nil {
			return nil, err
		}
	}
	s.counts.opened.Add(1)
	return st, nil
}

// Look validates a request without starting its stream. It returns the stream's schema and its
// number of samples, including skipped positions.
func (s *Service) Look(r Request, copies int) (schema *arrow.Schema, samples int64, err error) {
	st := &Stream{service: s, request: r, copies: int64(copies)}
	if err := st.check(); err != nil {
		return nil, 0, err
	}
	share, batch := int64(r.BatchSize/r.World), int64(r.BatchSize)
	whole := (st.request.To - r.From) / batch
	rest := st.request.To - r.From - whole*batch // positions of a short last step
	return st.schema, whole*share + min(max(rest-int64(r.Rank)*share, 0), share), nil
}

// check validates the request for this plan, and sets its defaults.
func (st *Stream) check() error {
	r, d := &st.request, st.service.data
	if err := r.complete(); err != nil {
		return err
	}
	if r.To == 0 {
		r.To = d.Length()
	}
	grid, err := d.Grid(r.BatchSize)
	if err == nil {
		err = grid.Check(r.From, r.To)
	}
	if err != nil {
		return refusef(http.StatusBadRequest, "%v", err)
	}
	if err := st.choose(); err != nil {
		return err
	}
	batch := int64(r.BatchSize)
	st.left = (r.To - r.From + batch - 1) / batch * int64(r.BatchSize/r.World/r.MicroBatch)
	length := int64(d.SampleTokens())
	if int64(r.MicroBatch) > math.MaxInt32/length {
		return refusef(http.StatusBadRequest,
			"%d samples of %d tokens exceed the limit of 2^31 tokens in a record; set micro_batch",
			r.MicroBatch, length)
	}
	st.size = int64(r.MicroBatch) * (length*int64(st.service.tokens.Bytes()) + 64)
	if st.slot != nil {
		st.size = laidOut(st.size)
		st.copies = slotsOf(st.size)
	}
	st.size *= st.copies
	if most := st.service.o.Memory / 4; st.size+overhead > most {
		if st.slot != nil {
			return errNoRoom
		}
		return refusef(http.StatusBadRequest,
			"a record of %d samples needs %d bytes, but a stream may use at most %d, a quarter of --memory; "+
				"set micro_batch, or use more ranks", r.MicroBatch, st.size+overhead, most)
	}
	return nil
}

// choose sets the columns and the schema.
func (st *Stream) choose() error {
	r, s := &st.request, st.service
	names := r.Columns
	if names == nil {
		for _, f := range s.fields {
			names = append(names, f.Name)
		}
	}
	for _, always := range []string{columnTokens, columnPosition} {
		if !slices.Contains(names, always) {
			names = append([]string{always}, names...)
		}
	}
	st.columns = names
	fields := make([]arrow.Field, len(names))
	for i, name := range names {
		k := slices.IndexFunc(s.fields, func(f arrow.Field) bool { return f.Name == name })
		if k < 0 {
			known := make([]string, len(s.fields))
			for i, f := range s.fields {
				known[i] = f.Name
			}
			if name == "" {
				return refusef(http.StatusBadRequest,
					"columns has an empty name; omit columns for all, or list some of %s",
					strings.Join(known, ", "))
			}
			return refusef(http.StatusBadRequest, "unknown column %.*q; known are %s", maxQuotedValue, name,
				strings.Join(known, ", "))
		}
		if slices.Contains(names[:i], name) {
			return refusef(http.StatusBadRequest, "column %s is listed twice; remove one", name)
		}
		fields[i] = s.fields[k]
	}
	metadata := make(map[string]string, len(s.base)+6)
	for key, value := range s.base {
		metadata[key] = value
	}
	for key, value := range map[string]int64{"batch_size": int64(r.BatchSize), "rank": int64(r.Rank),
		"world": int64(r.World), "from": r.From, "to": r.To,
		"micro_batch": int64(r.MicroBatch)} {
		metadata["mula."+key] = strconv.FormatInt(value, 10)
	}
	m := arrow.MetadataFrom(metadata)
	st.schema = arrow.NewSchema(fields, &m)
	return nil
}

// reserve reserves memory for the record in transit. It waits, except for slots.
func (st *Stream) reserve(bytes int64) error {
	s := st.service
	if st.slot != nil && st.held == 0 {
		if !s.slots.TryAcquire(bytes) {
			return errNoRoom
		}
		st.done = append(st.done, func() { s.slots.Release(bytes) })
		if !s.sending.TryAcquire(bytes) {
			return errNoRoom
		}
		st.held = bytes
		s.counts.sendingBytes.Add(bytes)
		return nil
	}
	s.counts.waiting.Add(1)
	defer s.counts.waiting.Add(-1)
	ctx, cancel := context.WithTimeout(st.ctx, s.o.Wait)
	defer cancel()
	defer context.AfterFunc(s.stopping, cancel)()
	if err := s.sending.Acquire(ctx, bytes); err != nil {
		switch {
		case st.ctx.Err() != nil:
			return context.Cause(st.ctx)
		case s.stopping.Err() != nil:
			return errStopping
		}
		return refusef(http.StatusServiceUnavailable,
			"all %d bytes of memory are in use by other streams (--memory), and none became free in %v; try again "+
				"later",
			s.o.Memory, s.o.Wait)
	}
	st.held += bytes
	s.counts.sendingBytes.Add(bytes)
	return nil
}

// Schema returns the schema of the records.
func (st *Stream) Schema() *arrow.Schema { return st.schema }

// Next returns the next record, which is valid until the next call of Next or Close, or io.EOF
// after the last. While the service stops, it returns an error.
func (st *Stream) Next() (arrow.RecordBatch, error) {
	st.drop()
	s := st.service
	if s.stopping.Err() != nil {
		return nil, errStopping
	}
	if st.left == 0 {
		s.counts.completed.Add(1)
		return nil, io.EOF
	}
	var got read
	if st.ahead != nil {
		got = st.await()
	} else {
		got = st.read()
	}
	if got.err != nil {
		return nil, got.err
	}
	st.last = got.record
	bytes := sizeOf(got.record)
	if st.slot != nil {
		bytes = st.slot.taken()
	}
	if held := bytes * st.copies; held > st.size { // more document starts than size allows for
		if err := st.reserve(held - st.size); err != nil {
			return nil, err
		}
		st.size = held
	}
	st.left--
	if st.slot == nil { // slots serve as the read-ahead
		st.readAhead()
	}
	s.counts.records.Add(1)
	s.counts.samples.Add(got.record.NumRows())
	s.counts.bytes.Add(bytes)
	return got.record, nil
}

// readAhead starts to read the next record, if there is one and enough memory.
func (st *Stream) readAhead() {
	s := st.service
	if st.left == 0 {
		return
	}
	if !s.ahead.TryAcquire(st.size) {
		st.alloc.forget()
		return
	}
	s.counts.aheadBytes.Add(st.size)
	st.saved, st.ahead = st.size, make(chan read, 1)
	go func(to chan<- read) { to <- st.read() }(st.ahead)
}

// await returns the record that is read ahead. It does not wait long, even after ctx is cancelled.
func (st *Stream) await() read {
	got := <-st.ahead
	st.ahead = nil
	st.service.ahead.Release(st.saved)
	st.service.counts.aheadBytes.Add(-st.saved)
	return got
}

// drop releases the record that Next returned last.
func (st *Stream) drop() {
	if st.last != nil {
		st.last.Release()
		st.last = nil
	}
}

// Close ends the stream and releases its memory.
func (st *Stream) Close() {
	st.drop()
	if st.cancel != nil {
		st.cancel()
	}
	if st.ahead != nil {
		if got := st.await(); got.record != nil {
			got.record.Release()
		}
	}
	if st.held > 0 {
		st.service.sending.Release(st.held)
		st.service.counts.sendingBytes.Add(-st.held)
		st.held = 0
	}
	if st.source != nil {
		st.source.Close()
	}
	for _, done := range slices.Backward(st.done) {
		done()
	}
	st.done = nil
}

// read reads the next record.
func (st *Stream) read() (got read) {
	began := time.Now()
	defer func() {
		st.service.counts.reading.Add(int64(time.Since(began)))
		st.service.failed(got.err)
	}()
	record, err := st.source.Next()
	if err != nil {
		return read{nil, err}
	}
	defer record.Release()
	// the stream's schema has more metadata than blend's
	return read{array.NewRecordBatch(st.schema, record.Columns(), record.NumRows()), nil}
}

// sizeOf returns the number of bytes of a record's columns.
func sizeOf(record arrow.RecordBatch) (bytes int64) {
	for _, c := range record.Columns() {
		bytes += dataSize(c.Data())
	}
	return bytes
}

func dataSize(d arrow.ArrayData) (bytes int64) {
	for _, b := range d.Buffers() {
		if b != nil {
			bytes += int64(b.Len())
		}
	}
	for _, child := range d.Children() {
		bytes += dataSize(child)
	}
	return bytes
}
