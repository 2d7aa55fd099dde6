package flight

import (
	"encoding/binary"
	"sync/atomic"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
)

// Tags of the fields of FlightData (Flight.proto of Apache Arrow) in protobuf's wire format: field
// number and the wire type of length-delimited data.
const (
	fieldHeader = 2<<3 | 2    // data_header: the metadata of an Arrow message
	fieldBody   = 1000<<3 | 2 // data_body: its body
)

// A writer sends the records of a stream as FlightData. The messages have the bytes of arrow-go's
// flight.Writer, but without its two copies of the columns: the encoded message refers to the
// memory of the columns.
type writer struct {
	ipc *ipc.Writer
	to  sender
}

func newWriter(out grpc.ServerStream, schema *arrow.Schema) *writer {
	w := &writer{to: sender{out: out}}
	// The garbage collector frees what the writer allocates, so the transport may read it at any
	// time.
	w.ipc = ipc.NewWriterWithPayloadWriter(&w.to, ipc.WithSchema(schema))
	return w
}

// Write sends a record. The record is retained until the transport has sent it.
func (w *writer) Write(record arrow.RecordBatch) error {
	w.to.record = record
	defer func() { w.to.record = nil }()
	return w.ipc.Write(record)
}

// Close sends the schema if no record was written. It does not end the call.
func (w *writer) Close() error { return w.ipc.Close() }

// A sender receives the messages of an [ipc.Writer].
type sender struct {
	out    grpc.ServerStream
	record arrow.RecordBatch // the record of the messages, nil for a schema
}

func (s *sender) Start() error { return nil }
func (s *sender) Close() error { return nil }

// WritePayload sends one message.
func (s *sender) WritePayload(p ipc.Payload) error {
	var parts body
	if err := p.SerializeBody(&parts); err != nil {
		return err
	}
	header := p.Meta()
	defer header.Release()
	small := binary.AppendUvarint(nil, fieldHeader)
	small = binary.AppendUvarint(small, uint64(header.Len()))
	small = append(small, header.Bytes()...)
	if parts.size > 0 {
		small = binary.AppendUvarint(small, fieldBody)
		small = binary.AppendUvarint(small, uint64(parts.size))
	}
	return s.out.SendMsg(&message{join(small, parts.list, s.record)})
}

// body collects the memory of a message's body without copying it. It is the memory of columns, or
// of buffers that are no longer written.
type body struct {
	list [][]byte
	size int
}

func (b *body) Write(p []byte) (int, error) {
	b.list = append(b.list, p)
	b.size += len(p)
	return len(p), nil
}

// join returns the encoded message: its start, then the parts of its body. Small parts are copied,
// which is faster than to count their references. The other parts are memory of the record.
func join(small []byte, parts [][]byte, record arrow.RecordBatch) mem.BufferSlice {
	var out mem.BufferSlice
	var held *hold
	for _, p := range parts {
		if record == nil || mem.IsBelowBufferPoolingThreshold(len(p)) {
			small = append(small, p...)
			continue
		}
		if held == nil {
			held = newHold(record)
		}
		if len(small) > 0 {
			out, small = append(out, mem.SliceBuffer(small)), nil
		}
		out = append(out, held.buffer(p))
	}
	if len(small) > 0 {
		out = append(out, mem.SliceBuffer(small))
	}
	if held != nil {
		held.Put(nil)
	}
	return out
}

// A hold keeps a record until gRPC has freed all of its buffers. It is their pool.
type hold struct {
	record arrow.RecordBatch
	users  atomic.Int64
}

// newHold retains a record, and counts as its first user.
func newHold(record arrow.RecordBatch) *hold {
	record.Retain()
	h := &hold{record: record}
	h.users.Store(1)
	return h
}

func (h *hold) buffer(p []byte) mem.Buffer {
	h.users.Add(1)
	p = p[:len(p):len(p)]
	return mem.NewBuffer(&p, h)
}

// Get is not called, because gRPC allocates no memory here.
func (h *hold) Get(n int) *[]byte {
	b := make([]byte, n)
	return &b
}

// Put ends one use.
func (h *hold) Put(*[]byte) {
	if h.users.Add(-1) == 0 {
		h.record.Release()
	}
}

// A message is already encoded. gRPC frees it after sending.
type message struct{ encoded mem.BufferSlice }

// codec is gRPC's codec for protobuf. It passes encoded messages on unchanged.
type codec struct{ encoding.CodecV2 }

func newCodec() codec { return codec{encoding.GetCodecV2(proto.Name)} }

// Marshal encodes a message.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	if m, ok := v.(*message); ok {
		return m.encoded, nil
	}
	return c.CodecV2.Marshal(v)
}
