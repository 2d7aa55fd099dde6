package serve

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/ipc"
)

// memoryHeader is the header with which a client requests records in shared memory, and with which
// the answer confirms it.
const memoryHeader = "Mula-Memory"

// sharedType is the content type of an answer with records in shared memory; docs/formats/serve.md
// specifies it.
const sharedType = "application/vnd.mula.slots"

// frameDelay is how long a record may wait, to be announced together with later records.
const frameDelay = 50 * time.Microsecond

// connectionKey is the key of a request's connection in its context.
type connectionKey struct{}

// unixOf returns the unencrypted unix connection of a request, nil for other connections.
func unixOf(ctx context.Context) *net.UnixConn {
	limited, ok := ctx.Value(connectionKey{}).(*limitedConn)
	if !ok {
		return nil
	}
	c, _ := limited.Conn.(*net.UnixConn)
	return c
}

// serveShared answers with records in shared memory. If the connection is not a unix socket, or if
// there is no memory, shared is false and nothing has been written.
func (s *Service) serveShared(w http.ResponseWriter, r *http.Request, request Request) (shared bool, err error) {
	c := unixOf(r.Context())
	if c == nil {
		return false, nil
	}
	slot := new(slot)
	st, err := s.open(r.Context(), &Stream{service: s, request: request, slot: slot})
	if errors.Is(err, errNoRoom) {
		return false, nil
	}
	if err != nil {
		return true, err
	}
	defer st.Close()
	count := int(st.copies)
	rows, length, width := int64(st.request.MicroBatch), int64(s.data.SampleTokens()), int64(s.tokens.Bytes())
	area, err := newArea(count, int(laidOut(rows*(length*(width+4)+64)))) // a document may start at every token
	if err != nil {
		return false, nil
	}
	defer area.close()
	sh := &sharing{st: st, slot: slot, area: area, c: c, free: make(chan int, count), gone: make(chan struct{}),
		lent: make([]atomic.Bool, count)}
	// The first record is read before the answer starts, so that its errors have an HTTP status.
	first, err := sh.next(0)
	if err != nil && !errors.Is(err, io.EOF) {
		return true, err
	}
	head, err := sh.head(first)
	if err != nil {
		return true, err
	}
	s.sharing.Add(1) // during a use of the plan; Stop refuses new uses before sharing.Wait is called
	defer s.sharing.Done()
	hijacked, rest, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return true, err
	}
	defer hijacked.Close()
	// the server closes the connection after the grace period
	defer context.AfterFunc(r.Context(), func() { hijacked.Close() })()
	if rest.Reader.Buffered() > 0 {
		return true, nil // the client has sent data before the answer
	}
	n, _, err := c.WriteMsgUnix(head, area.rights(), nil)
	if err == nil && n < len(head) {
		_, err = c.Write(head[n:])
	}
	if err == nil {
		sh.send(first != nil)
	}
	return true, nil
}

// sharing is a stream with records in shared memory.
type sharing struct {
	st     *Stream
	slot   *slot
	area   *area
	c      *net.UnixConn
	free   chan int      // slots that the client does not use
	gone   chan struct{} // closed when the client has disconnected
	lent   []atomic.Bool // by slot: the client uses it
	frames []byte        // not yet sent
	since  time.Time     // start of the first of frames
}

// next reads the next record into a slot, and appends its frame.
func (sh *sharing) next(number int) (arrow.RecordBatch, error) {
	if len(sh.frames) == 0 {
		sh.since = time.Now()
	}
	sh.slot.use(sh.area, number)
	record, err := sh.st.Next()
	if err != nil {
		return nil, err
	}
	frame := binary.LittleEndian.AppendUint64(sh.frames, uint64(number))
	frame = binary.LittleEndian.AppendUint64(frame, uint64(record.NumRows()))
	if frame, err = sh.slot.place(frame, record); err != nil {
		sh.st.service.failed(err)
		return nil, err
	}
	sh.frames = frame
	sh.lent[number].Store(true)
	return record, nil
}

// head returns the answer before the first frame: the HTTP header, and an Arrow stream without
// rows, which has the schema and the names of the sources.
func (sh *sharing) head(first arrow.RecordBatch) ([]byte, error) {
	var b bytes.Buffer
	fmt.Fprintf(&b, "HTTP/1.0 200 OK\r\nContent-Type: %s\r\nMula-Plan: %s\r\n%s: shared\r\nMula-Slots: "+
		"%d\r\nMula-Slot-Bytes: %d\r\n\r\n",
		sharedType, sh.st.service.Fingerprint(), memoryHeader, len(sh.lent), sh.area.size)
	out := ipc.NewWriter(&b, ipc.WithSchema(sh.st.Schema()))
	if first != nil {
		empty := first.NewSlice(0, 0)
		defer empty.Release()
		if err := out.Write(empty); err != nil {
			return nil, err
		}
	}
	err := out.Close()
	return b.Bytes(), err
}

// send sends the frames of all records and waits until the client disconnects. read tells whether
// the first record has been read.
func (sh *sharing) send(read bool) {
	go sh.receive()
	from := 0
	if read {
		from = 1
	}
	for number := from; number < len(sh.lent); number++ {
		sh.free <- number
	}
	ended := sh.records(read)
	if ended {
		_ = sh.c.CloseWrite()
	} else {
		_ = sh.c.Close()
	}
	<-sh.gone // at the latest, when the server closes the connection
	if sh.st.service.stopping.Err() == nil {
		sh.area.empty() // even if the client keeps the area mapped: clients copy their data before they disconnect
	}
}

// records sends frames until there are no more records or the server stops. ended is false after an
// error of the client.
func (sh *sharing) records(read bool) (ended bool) {
	if read && !sh.flush() {
		return false
	}
	for {
		var number int
		select {
		case number = <-sh.free:
		default:
			if !sh.flush() {
				return false
			}
			select {
			case number = <-sh.free:
			case <-sh.gone:
				return false
			case <-sh.st.service.stopping.Done():
				return true
			}
		}
		if _, err := sh.next(number); err != nil {
			return sh.flush()
		}
		if time.Since(sh.since) > frameDelay && !sh.flush() {
			return false
		}
	}
}

// flush sends the waiting frames.
func (sh *sharing) flush() bool {
	_, err := sh.c.Write(sh.frames)
	sh.frames = sh.frames[:0]
	return err == nil
}

// receive receives the slots that the client returns, one byte each, until the client disconnects
// or returns a slot that it does not have.
func (sh *sharing) receive() {
	defer close(sh.gone)
	var given [mostSlots]byte
	for {
		n, err := sh.c.Read(given[:])
		for _, number := range given[:n] {
			if int(number) >= len(sh.lent) || !sh.lent[number].CompareAndSwap(true, false) {
				sh.st.cancel()
				return
			}
			sh.free <- int(number) // never blocks
		}
		if err != nil {
			sh.st.cancel() // the client has disconnected; cancel any wait
			return
		}
	}
}
