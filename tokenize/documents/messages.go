package documents

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

// The kinds of messages (MessageHeader in format/Message.fbs) and of types (Type in
// format/Schema.fbs) that are checked.
const (
	messageSchema     = 1
	messageDictionary = 2
	messageBatch      = 3
	typeUnion         = 14
)

// maxArrowFields is the maximum number of fields of a schema, including nested fields.
const maxArrowFields = 100_000

// maxArrowDepth is the maximum nesting of fields.
const maxArrowDepth = 64

var errArrowMeta = errors.New("the metadata of a message is damaged")

// arrowMessages passes the messages of a stream, or the required messages of a file, to the
// library. It checks them first: the library allocates the number of fields and metadata pairs that
// a file declares.
type arrowMessages struct {
	stream io.Reader   // one message after the other
	from   []io.Reader // the first message of each
	body   []byte      // memory of record batches
}

func (m *arrowMessages) Retain()  {}
func (m *arrowMessages) Release() {}

// Message returns the next message, and io.EOF after the last.
func (m *arrowMessages) Message() (*ipc.Message, error) {
	r := m.stream
	if r == nil {
		if len(m.from) == 0 {
			return nil, io.EOF
		}
		r, m.from = m.from[0], m.from[1:]
	}
	meta, err := readArrowMeta(r)
	if err == io.EOF && m.stream == nil {
		return nil, io.ErrUnexpectedEOF
	} else if err != nil {
		return nil, err
	}
	kind, length, err := checkMessage(meta)
	if err != nil {
		return nil, err
	}
	var body []byte
	if kind == messageBatch && int64(cap(m.body)) >= length {
		body = m.body[:length]
	} else {
		body = make([]byte, length)
	}
	if kind == messageBatch {
		m.body = body
	}
	if _, err := io.ReadFull(r, body); err != nil {
		return nil, noEOF(err)
	}
	return ipc.NewMessage(memory.NewBufferBytes(meta), memory.NewBufferBytes(body)), nil
}

// noEOF converts io.EOF in the middle of a structure to io.ErrUnexpectedEOF.
func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// readArrowMeta reads the metadata of a message; io.EOF is the end of the stream.
func readArrowMeta(r io.Reader) ([]byte, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	length := binary.LittleEndian.Uint32(head[:])
	if length == 1<<32-1 { // since 0.15: a marker before the length
		if _, err := io.ReadFull(r, head[:]); err != nil {
			return nil, noEOF(err)
		}
		length = binary.LittleEndian.Uint32(head[:])
	}
	switch {
	case length == 0:
		return nil, io.EOF
	case length < 8 || length > maxArrowMeta:
		return nil, fmt.Errorf("the metadata of a message has %d bytes", length)
	}
	meta := make([]byte, length)
	if _, err := io.ReadFull(r, meta); err != nil {
		return nil, noEOF(err)
	}
	return meta, nil
}

// checkMessage checks the metadata of a message and returns its kind and the length of its body.
func checkMessage(meta []byte) (kind byte, body int64, err error) {
	message := flatTable{meta, flatRoot(meta)}
	at := message.field(1, 1)
	header, ok := message.table(2)
	if at < 0 || !ok || !message.pairs(4) {
		return 0, 0, errArrowMeta
	}
	kind, body = meta[at], message.int64(3)
	if body < 0 || body > maxArrowBody {
		return 0, 0, advise("a record batch has %d bytes, and the limit is %d MiB; write smaller record batches", body,
			maxArrowBody>>20)
	}
	switch kind {
	case messageSchema:
		left := maxArrowFields
		ok = header.pairs(2) && header.fields(1, &left, 0)
	case messageDictionary:
		if header, ok = header.table(1); ok {
			ok = header.batch(body)
		}
	case messageBatch:
		ok = header.batch(body)
	}
	if !ok {
		return 0, 0, errArrowMeta
	}
	return kind, body, nil
}

// fields checks a list of fields, including nested fields. left is how many there may be.
func (t flatTable) fields(i int, left *int, depth int) bool {
	vector, n, ok := t.vector(i, 4)
	if !ok || depth > maxArrowDepth {
		return false
	}
	for k := range n {
		field, ok := t.element(vector, k)
		if *left--; !ok || *left < 0 || !field.pairs(6) || !field.fields(5, left, depth+1) {
			return false
		}
		if at := field.field(2, 1); at >= 0 && field.b[at] == typeUnion {
			if kind, ok := field.table(3); !ok || !kind.vectorOK(1, 4) {
				return false
			}
		}
	}
	return true
}

// element returns a table of a vector of tables.
func (t flatTable) element(vector []byte, k int) (flatTable, bool) {
	at := len(t.b) - len(vector) + 4*k
	at = flatAt(t.b, int64(at)+int64(binary.LittleEndian.Uint32(t.b[at:])), 4)
	return flatTable{t.b, at}, at >= 0
}

// pairs checks a list of pairs of metadata.
func (t flatTable) pairs(i int) bool { return t.vectorOK(i, 4) }

func (t flatTable) vectorOK(i, size int) bool {
	_, _, ok := t.vector(i, size)
	return ok
}

// batch checks the lists of a record batch: its fields, and its buffers, which must be within the
// body.
func (t flatTable) batch(body int64) bool {
	buffers, n, ok := t.vector(2, 16)
	if !ok || !t.vectorOK(1, 16) || t.int64(0) < 0 {
		return false
	}
	views, columns, ok := t.vector(4, 8) // the number of buffers of each column of views
	if !ok {
		return false
	}
	for i := range columns {
		if count := binary.LittleEndian.Uint64(views[8*i:]); count > uint64(n) {
			return false
		}
	}
	for i := range n {
		offset, length := int64(binary.LittleEndian.Uint64(buffers[16*i:])),
			int64(binary.LittleEndian.Uint64(buffers[16*i+8:]))
		if offset < 0 || length < 0 || offset > body || length > body-offset {
			return false
		}
	}
	return true
}
