package flight

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"

	"mula/blend/stream"
)

// taken is a call's stream that keeps what is sent, as the transport does until it has written it.
type taken struct {
	grpc.ServerStream
	codec
	messages []mem.BufferSlice
}

func (s *taken) SendMsg(m any) error {
	data, err := s.Marshal(m)
	s.messages = append(s.messages, data)
	return err
}

// plain records the messages of arrow-go's writer.
type plain struct{ taken }

func (s *plain) Send(m *flight.FlightData) error { return s.SendMsg(m) }

// Messages have the bytes of arrow-go's writer. Records are held until all of their messages are
// freed, and no longer.
func TestMessages(t *testing.T) {
	data := openPlan(t)
	defer data.Close()
	for _, batch := range []int{1, 7, 100, positions} {
		checked := memory.NewCheckedAllocator(memory.NewGoAllocator())
		batches, err := stream.New(context.Background(), data, stream.Options{BatchSize: batch, Allocator: checked})
		if err != nil {
			t.Fatal(err)
		}
		got, want := &taken{codec: newCodec()}, &plain{taken{codec: newCodec()}}
		w, arrows := newWriter(got, batches.Schema()), flight.NewRecordWriter(want, ipc.WithSchema(batches.Schema()))
		for {
			record, err := batches.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err == nil {
				err = errors.Join(w.Write(record), arrows.Write(record))
			}
			if err != nil {
				t.Fatal(err)
			}
			record.Release()
		}
		if err := errors.Join(w.Close(), arrows.Close()); err != nil {
			t.Fatal(err)
		}
		batches.Close()
		if len(got.messages) != len(want.messages) || len(got.messages) < 2+positions/batch {
			t.Fatalf("%d messages, want %d", len(got.messages), len(want.messages))
		}
		for i := range want.messages {
			if a, b := got.messages[i].Materialize(), want.messages[i].Materialize(); !bytes.Equal(a, b) {
				t.Errorf("batches of %d: message %d of %d bytes is not that of arrow-go, of %d", batch, i, len(a),
					len(b))
			}
		}
		large := batch*17*2 > 1024 // then the tokens are not copied
		if held := checked.CurrentAlloc() > 0; held != large {
			t.Errorf("batches of %d: %d bytes are held", batch, checked.CurrentAlloc())
		}
		for _, m := range got.messages {
			m.Free()
		}
		checked.AssertSize(t, 0)
	}
}

// A stream without records is its schema.
func TestMessageOfSchema(t *testing.T) {
	schema := arrow.NewSchema([]arrow.Field{{Name: "x", Type: arrow.PrimitiveTypes.Int64}}, nil)
	got, want := &taken{codec: newCodec()}, &plain{taken{codec: newCodec()}}
	if err := errors.Join(newWriter(got, schema).Close(), flight.NewRecordWriter(want,
		ipc.WithSchema(schema)).Close()); err != nil {
		t.Fatal(err)
	}
	if len(got.messages) != 1 || !bytes.Equal(got.messages[0].Materialize(), want.messages[0].Materialize()) {
		t.Errorf("%d messages, or another one", len(got.messages))
	}
}

// A slice of a record has the bytes of the slice alone, also in columns that the encoder copies.
func TestMessageOfSlice(t *testing.T) {
	b := array.NewRecordBuilder(memory.NewGoAllocator(), arrow.NewSchema([]arrow.Field{
		{Name: "text", Type: arrow.BinaryTypes.String, Nullable: true}, {Name: "n",
			Type: arrow.PrimitiveTypes.Int64}}, nil))
	defer b.Release()
	for i := range 9000 {
		b.Field(0).(*array.StringBuilder).Append(fmt.Sprint("row ", i))
		b.Field(1).(*array.Int64Builder).Append(int64(i))
	}
	whole := b.NewRecordBatch()
	defer whole.Release()
	got, want := &taken{codec: newCodec()}, &plain{taken{codec: newCodec()}}
	w, arrows := newWriter(got, whole.Schema()), flight.NewRecordWriter(want, ipc.WithSchema(whole.Schema()))
	for from := int64(0); from < 9000; from += 1000 {
		slice := whole.NewSlice(from, from+1000)
		if err := errors.Join(w.Write(slice), arrows.Write(slice)); err != nil {
			t.Fatal(err)
		}
		slice.Release()
	}
	for i := range want.messages {
		if !bytes.Equal(got.messages[i].Materialize(), want.messages[i].Materialize()) {
			t.Errorf("message %d is not that of arrow-go", i)
		}
	}
}
