package serve

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"
	"unsafe"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"golang.org/x/sys/unix"

	"mula/blend"
	"mula/shards"
)

// A sharer is a client in shared memory, written from docs/formats/serve.md alone.
type sharer struct {
	t          testing.TB
	c          *net.UnixConn
	in         *bufio.Reader
	answer     *http.Response
	descriptor int
	memory     []byte
	slots, one int // number of slots, bytes of each
	schema     *arrow.Schema
	names      arrow.Array
}

// share requests a stream in shared memory; shared reports whether the server granted it.
func (s *served) share(query string) (c *sharer, shared bool) {
	s.t.Helper()
	conn, err := net.Dial("unix", s.socket)
	if err != nil {
		s.t.Fatal(err)
	}
	c = &sharer{t: s.t, c: conn.(*net.UnixConn), descriptor: -1}
	s.t.Cleanup(c.close)
	c.c.SetDeadline(time.Now().Add(patience))
	fmt.Fprintf(c.c, "GET /v1/stream?%s HTTP/1.0\r\nMula-Memory: shared\r\n\r\n", query)
	head, rights := make([]byte, 1<<16), make([]byte, unix.CmsgSpace(4))
	n, m, _, _, err := c.c.ReadMsgUnix(head, rights)
	if err != nil {
		s.t.Fatal(err)
	}
	c.in = bufio.NewReader(io.MultiReader(bytes.NewReader(head[:n]), c.c))
	if c.answer, err = http.ReadResponse(c.in, nil); err != nil {
		s.t.Fatal(err)
	}
	if c.answer.Header.Get("Mula-Memory") != "shared" {
		return c, false
	}
	messages, err := unix.ParseSocketControlMessage(rights[:m])
	if err != nil || len(messages) != 1 {
		s.t.Fatalf("%d control messages, %v", len(messages), err)
	}
	descriptors, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(descriptors) != 1 {
		s.t.Fatalf("%d descriptors, %v", len(descriptors), err)
	}
	c.descriptor = descriptors[0]
	c.slots, _ = strconv.Atoi(c.answer.Header.Get("Mula-Slots"))
	c.one, _ = strconv.Atoi(c.answer.Header.Get("Mula-Slot-Bytes"))
	if c.memory, err = unix.Mmap(c.descriptor, 0, c.slots*c.one, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED); err != nil {
		s.t.Fatal(err)
	}
	body := c.answer.Body // the bytes after the header, from all buffers
	prefix, err := ipc.NewReader(body, ipc.WithDelayReadSchema(false))
	if err != nil {
		s.t.Fatal(err)
	}
	defer prefix.Release()
	c.schema = prefix.Schema()
	for prefix.Next() {
		if prefix.RecordBatch().NumRows() != 0 {
			s.t.Fatal("the Arrow stream before the frames has rows")
		}
		for _, column := range prefix.RecordBatch().Columns() {
			if d, ok := column.(*array.Dictionary); ok {
				c.names = d.Dictionary()
				c.names.Retain()
			}
		}
	}
	if err := prefix.Err(); err != nil {
		s.t.Fatal(err)
	}
	c.in = bufio.NewReader(body)
	return c, true
}

func (c *sharer) close() {
	c.c.Close()
	if c.memory != nil {
		unix.Munmap(c.memory)
		c.memory = nil
	}
	if c.descriptor >= 0 {
		unix.Close(c.descriptor)
		c.descriptor = -1
	}
}

// next receives a frame.
func (c *sharer) next() (number int, record arrow.RecordBatch, err error) {
	word := func() int {
		var b [8]byte
		if err == nil {
			_, err = io.ReadFull(c.in, b[:])
		}
		return int(binary.LittleEndian.Uint64(b[:]))
	}
	number = word()
	rows := word()
	if err != nil {
		return 0, nil, err
	}
	part := func() *memory.Buffer {
		offset, length := word(), word()
		return memory.NewBufferBytes(c.memory[number*c.one:][:c.one][offset:][:length])
	}
	columns := make([]arrow.Array, c.schema.NumFields())
	for i, f := range c.schema.Fields() {
		var d *array.Data
		switch t := f.Type.(type) {
		case *arrow.DictionaryType:
			d = array.NewDataWithDictionary(t, rows, []*memory.Buffer{nil, part()}, 0, 0, c.names.Data().(*array.Data))
		case *arrow.FixedSizeListType:
			d = array.NewData(t, rows, []*memory.Buffer{nil},
				[]arrow.ArrayData{array.NewData(t.Elem(), rows*int(t.Len()), []*memory.Buffer{nil, part()}, nil, 0, 0)},
				0, 0)
		case *arrow.ListType:
			offsets, values := part(), part()
			d = array.NewData(t, rows, []*memory.Buffer{nil, offsets},
				[]arrow.ArrayData{array.NewData(t.Elem(), values.Len()/4, []*memory.Buffer{nil, values}, nil, 0, 0)}, 0,
				0)
		default:
			d = array.NewData(t, rows, []*memory.Buffer{nil, part()}, nil, 0, 0)
		}
		columns[i] = array.MakeFromData(d)
	}
	return number, array.NewRecordBatch(c.schema, columns, int64(rows)), err
}

// back gives slots back.
func (c *sharer) back(numbers ...byte) { c.c.Write(numbers) }

// A stream in shared memory has the schema and the records of the one over the socket, however it
// is asked for and whatever is held meanwhile.
func TestSharedIsTheStream(t *testing.T) {
	for _, dtype := range []shards.DType{shards.UInt16, shards.Int32} {
		s := serve(t, dtype, Options{})
		for _, query := range []string{"batch_size=8", "batch_size=600", "batch_size=30&micro_batch=1&rank=1&world=3",
			"batch_size=20&micro_batch=5&from=300&to=400&columns=source,offset",
			"batch_size=100&columns=tokens,position", "batch_size=7&to=595", "batch_size=64&from=600"} {
			plain, body := s.open(query)
			c, shared := s.share(query)
			if !shared {
				t.Fatalf("%s: %s", query, c.answer.Header)
			}
			if !plain.Schema().Equal(c.schema) || !plain.Schema().Metadata().Equal(c.schema.Metadata()) ||
				c.one%os.Getpagesize() != 0 {
				t.Errorf("%s: schema %s, want %s; slots of %d bytes", query, c.schema, plain.Schema(), c.one)
			}
			var held []byte
			for n := 0; plain.Next(); n++ {
				number, record, err := c.next()
				if err != nil {
					t.Fatalf("%s: record %d: %v", query, n, err)
				}
				if !array.RecordEqual(plain.RecordBatch(), record) {
					t.Fatalf("%s: record %d: %v, want %v", query, n, record, plain.RecordBatch())
				}
				for _, column := range record.Columns() {
					for _, b := range column.Data().Buffers() {
						if b != nil && b.Len() > 0 && uintptr(unsafe.Pointer(unsafe.SliceData(b.Bytes())))%64 != 0 {
							t.Fatalf("%s: a buffer of %s is not aligned", query, column.DataType())
						}
					}
				}
				if held = append(held, byte(number)); len(held) == c.slots {
					slices.Reverse(held)
					c.back(held...)
					held = held[:0]
				}
			}
			if err := plain.Err(); err != nil {
				t.Fatal(err)
			}
			if _, _, err := c.next(); !errors.Is(err, io.EOF) {
				t.Errorf("%s: after the last record: %v", query, err)
			}
			plain.Release()
			body.Close()
			c.close()
		}
		s.waitFor("the end of streams whose clients have gone",
			func() bool { return s.service.counts.streams.Load() == 0 })
	}
}

// What a client does with memory, descriptor and connection harms itself alone, and nothing is held
// when it has gone.
func TestSharedLies(t *testing.T) {
	s := serve(t, shards.UInt16, Options{})
	for name, lie := range map[string]func(c *sharer){
		"slots that there are not":    func(c *sharer) { c.back(200) },
		"slots that it does not have": func(c *sharer) { c.back(0, 0) },
		"a flood":                     func(c *sharer) { c.back(bytes.Repeat([]byte{1}, 1<<20)...) },
		"it hangs up":                 func(c *sharer) {},
		"it says no more":             func(c *sharer) { c.c.CloseWrite() },
		"the memory is made smaller":  func(c *sharer) { lieRefused(c, unix.Ftruncate(c.descriptor, 0)) },
		"the memory is made larger":   func(c *sharer) { lieRefused(c, unix.Ftruncate(c.descriptor, 1<<40)) },
		"the seals are changed": func(c *sharer) {
			_, err := unix.FcntlInt(uintptr(c.descriptor), unix.F_ADD_SEALS, unix.F_SEAL_WRITE)
			lieRefused(c, err)
		},
		"it writes everywhere": func(c *sharer) { fill(c.memory, 0xFF) },
		"it takes the memory away": func(c *sharer) {
			unix.Fallocate(c.descriptor, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, int64(len(c.memory)))
		},
		"it gives back without a look": func(c *sharer) {
			go func() {
				for n := 0; ; n++ {
					if _, err := c.c.Write([]byte{byte(n % c.slots)}); err != nil {
						return
					}
				}
			}()
		},
	} {
		c, shared := s.share("batch_size=600&micro_batch=1")
		if !shared {
			t.Fatal(c.answer.Header)
		}
		number, _, err := c.next()
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		lie(c)
		c.back(byte(number))
		other, good := s.share("batch_size=8&to=8") // the next client is served
		if !good {
			t.Fatalf("%s: %v", name, other.answer.Header)
		}
		if _, record, err := other.next(); err != nil || !sameRow(rowsOf(record)[0], first(t, s.data)) {
			t.Errorf("%s: another client: %v", name, err)
		}
		other.close()
		c.c.Close()
		s.waitFor("the end of a stream: "+name, func() bool { return s.service.counts.streams.Load() == 0 })
		if c.memory[number*c.one] != 0 || bytes.ContainsFunc(c.memory, func(r rune) bool { return r != 0 }) {
			t.Errorf("%s: the memory still takes room after the connection's end", name)
		}
		c.close()
	}
}

func first(t testing.TB, d *blend.Data) row {
	r, _ := expected(t, d, 0)
	return r
}

func fill(b []byte, with byte) {
	for i := range b {
		b[i] = with
	}
}

func lieRefused(c *sharer, err error) {
	if !errors.Is(err, unix.EPERM) {
		c.t.Errorf("sealed memory: %v", err)
	}
}

// Clients that do not read hold their slots, within the memory limit, and delay no other client.
func TestSharedSlowReaders(t *testing.T) {
	s := serve(t, shards.UInt16, Options{Memory: 8 << 20, Wait: 100 * time.Millisecond})
	var stuck []*sharer
	refused := 0
	for range 12 {
		c, shared := s.share("batch_size=600&micro_batch=10")
		if shared {
			stuck = append(stuck, c)
		} else {
			if c.answer.StatusCode != http.StatusOK || c.answer.Header.Get("Mula-Memory") != "none" {
				t.Errorf("without memory for slots: %s %v", c.answer.Status, c.answer.Header)
			}
			refused++
			c.close()
		}
	}
	if len(stuck) == 0 || refused == 0 {
		t.Errorf("%d in shared memory, %d not: want some of each", len(stuck), refused)
	}
	if taken := s.service.counts.sendingBytes.Load(); taken > 6<<20 {
		t.Errorf("%d bytes are reserved of 6 MiB", taken)
	}
	records, body := s.open("batch_size=100")
	n := 0
	for ; records.Next(); n++ {
	}
	if records.Err() != nil || n != 6 {
		t.Errorf("another client: %d records, %v", n, records.Err())
	}
	records.Release()
	body.Close()
	for _, c := range stuck {
		c.close()
	}
	s.waitFor("the end of streams that are cut", func() bool { return s.service.counts.streams.Load() == 0 })
}

// When the server stops, a stream ends after a record, and what the client holds stays as it is; a
// client that goes on holding the connection is cut.
func TestSharedStop(t *testing.T) {
	s := serve(t, shards.UInt16, Options{Grace: 100 * time.Millisecond})
	c, shared := s.share("batch_size=600&micro_batch=1")
	if !shared {
		t.Fatal(c.answer.Header)
	}
	_, record, err := c.next()
	if err != nil {
		t.Fatal(err)
	}
	s.stop()
	if err := <-s.ended; err != nil {
		t.Error(err)
	}
	s.ended <- nil // for the end of the test
	n := 1
	for err == nil {
		_, _, err = c.next()
		n++
	}
	if n >= positions || !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("%d records, then %v", n, err)
	}
	if !sameRow(rowsOf(record)[0], first(t, s.data)) {
		t.Error("a record that the client holds was changed by the server's end")
	}
}

// Errors of the request have their status, and other connections than unix sockets are answered
// with a plain stream.
func TestSharedIsAskedForOnly(t *testing.T) {
	s := serve(t, shards.UInt16, Options{})
	if c, shared := s.share("batch_size=8&rank=9"); shared || c.answer.StatusCode != http.StatusBadRequest {
		t.Errorf("a wrong request: %s", c.answer.Status)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.service.Serve(ctx, l, Access{}) }()
	r, err := http.NewRequest("GET", "http://"+l.Addr().String()+"/v1/stream?batch_size=100", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Mula-Memory", "shared")
	transport := new(http.Transport)
	answer, err := (&http.Client{Transport: transport}).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	records, err := ipc.NewReader(answer.Body)
	if err != nil || answer.Header.Get("Mula-Memory") != "none" || answer.Header.Get("Content-Type") != contentType {
		t.Fatalf("over TCP: %v, %v", answer.Header, err)
	}
	for records.Next() {
	}
	if records.Err() != nil {
		t.Error(records.Err())
	}
	records.Release()
	answer.Body.Close()
	transport.CloseIdleConnections()
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// BenchmarkShared measures a sample in shared memory, with a client that reads only frames. One op
// is a sample of 4,097 tokens.
func BenchmarkShared(b *testing.B) {
	const length, micro = 4096, 64
	data := benchData(b, length)
	s := serveData(b, data, Options{})
	for _, columns := range []string{"", "&columns=tokens,position"} {
		b.Run(columns, func(b *testing.B) {
			c, shared := s.share(fmt.Sprintf("batch_size=%d%s", micro, columns))
			if !shared {
				b.Fatal(c.answer.Header)
			}
			defer c.close()
			c.c.SetDeadline(time.Time{})
			b.SetBytes(2 * (length + 1))
			left := 0
			for b.Loop() {
				if left == 0 {
					number, record, err := c.next()
					if err != nil {
						b.Fatal(err)
					}
					left = int(record.NumRows())
					c.back(byte(number))
				}
				left--
			}
		})
	}
}

// benchData is a plan of 40 MB of tokens.
func benchData(b *testing.B, length int) *blend.Data {
	b.Helper()
	dir := b.TempDir()
	w, err := shards.Create(dir+"/a", shards.UInt16, shards.TokenizerInfo{SHA256: fmt.Sprintf("%064d", 0),
		VocabSize: 50000, EOD: 0, ClassTable: "test", Specials: "text"})
	if err != nil {
		b.Fatal(err)
	}
	defer w.Abort()
	document := make([]uint32, 1300)
	for n := range 16_000 {
		for i := range document {
			document[i] = uint32(n*31+i*7) % 50000
		}
		if err := w.Append(document[:1+n%len(document)], shards.DocumentOrigin{ID: "x", File: "x",
			Line: 1}); err != nil {
			b.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		b.Fatal(err)
	}
	c, err := blend.ParseConfig(fmt.Appendf(nil,
		"sequence_length: %d\nseed: 1\nsamples: 100000000\nsources: [{name: a, shards: [a], weight: 1}]",
		length), "blend.yaml", dir)
	if err != nil {
		b.Fatal(err)
	}
	plan, err := blend.Seal(context.Background(), c, blend.SealOptions{})
	if err != nil {
		b.Fatal(err)
	}
	data, err := blend.Open(context.Background(), plan, blend.OpenOptions{})
	if err != nil {
		b.Fatal(err)
	}
	return data
}
