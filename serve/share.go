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

// memoryHeader is the header by which a client asks for records in shared memory, and by which the
// answer says whether they come there.
const memoryHeader = "Mula-Memory"

// sharedType is the content type of an answer whose records lie in shared memory;
// docs/formats/serve.md has its bytes.
const sharedType = "application/vnd.mula.slots"

// frameDelay is how long a record may wait for the next ones, to be announced together with them.
const frameDelay = 50 * time.Microsecond

// connectionKey is the key of a request's connection in its context.
type connectionKey struct{}

// unixOf is the connection of a request that came over a unix socket, in clear, else nil.
func unixOf(ctx context.Context) *net.UnixConn {
	limited, ok := ctx.Value(connectionKey{}).(*limitedConn)
	if !ok {
		return nil
	}
	c, _ := limited.Conn.(*net.UnixConn)
	return c
}

// serveShared answers with records in shared memory. shared is false where that cannot be: the
// connection is no unix socket, or there is no memory for it now. Nothing has been answered then.
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
	rows, length, width := int64(st.request.MicroBatch), int64(s.data.SequenceLength+1), int64(s.tokens.Bytes())
	area, err := newArea(count, int(laidOut(rows*(length*(width+4)+64)))) // a document may begin at every token
	if err != nil {
		return false, nil
	}
	defer area.close()
	sh := &sharing{st: st, slot: slot, area: area, c: c, free: make(chan int, count), gone: make(chan struct{}),
		lent: make([]atomic.Bool, count)}
	// The first record is read before the answer begins, so that what is wrong with it has a
	// status.
	first, err := sh.next(0)
	if err != nil && !errors.Is(err, io.EOF) {
		return true, err
	}
	head, err := sh.head(first)
	if err != nil {
		return true, err
	}
	s.sharing.Add(1) // within a use of the plan, of which none begins any more when they are waited for
	defer s.sharing.Done()
	hijacked, rest, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return true, err
	}
	defer hijacked.Close()
	// it ends when the server cuts what goes on too long
	defer context.AfterFunc(r.Context(), func() { hijacked.Close() })()
	if rest.Reader.Buffered() > 0 {
		return true, nil // it speaks before it is spoken to
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

// sharing is a stream whose records lie in shared memory.
type sharing struct {
	st     *Stream
	slot   *slot
	area   *area
	c      *net.UnixConn
	free   chan int      // slots that the client does not have
	gone   chan struct{} // closed when nothing more comes from the client
	lent   []atomic.Bool // by slot: the client has it
	frames []byte        // that have not been sent
	since  time.Time     // when the first of them was begun
}

// next reads the next record into a slot, and makes a frame of it.
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

// head is the answer up to the first frame: the HTTP header, and an Arrow stream of no rows, which
// has the schema and the names of the sources.
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

// send sends the frames of all records, the first of which may have been read, and waits until the
// client has hung up.
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
	<-sh.gone // the connection is cut when the server does not wait any longer
	if sh.st.service.stopping.Err() == nil {
		sh.area.empty() // also of a client that keeps the area mapped: one that hangs up has copied what it holds
	}
}

// records sends frames until there are no more records, or the server is stopping; ended is false
// if the client is at fault.
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

// flush sends the frames that wait.
func (sh *sharing) flush() bool {
	_, err := sh.c.Write(sh.frames)
	sh.frames = sh.frames[:0]
	return err == nil
}

// receive takes the slots that the client gives back, a byte each, until it hangs up, or gives back
// what it does not have.
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
			sh.free <- int(number) // there is room for all
		}
		if err != nil {
			sh.st.cancel() // nobody is there any more, whatever is being waited for
			return
		}
	}
}
