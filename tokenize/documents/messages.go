package documents

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"mula/internal/flatbuffer"
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
	message, err := flatbuffer.Root(meta)
	if err != nil {
		return 0, 0, errArrowMeta
	}
	number, err1 := message.Number(1, 1, 0)
	header, ok, err2 := message.Child(2)
	length, err3 := message.Number(3, 8, 0)
	if errors.Join(err1, err2, err3) != nil || number == 0 || !ok || !isVector(message, 4, 4) {
		return 0, 0, errArrowMeta
	}
	kind, body = byte(number), int64(length)
	if body < 0 || body > maxArrowBody {
		return 0, 0, advise("a record batch has %d bytes, and the limit is %d MiB; write smaller record batches", body,
			maxArrowBody>>20)
	}
	switch kind {
	case messageSchema:
		left := maxArrowFields
		ok = isVector(header, 2, 4) && checkFields(header, 1, &left, 0)
	case messageDictionary:
		if header, ok, err = header.Child(1); ok && err == nil {
			ok = checkBatch(header, body)
		}
	case messageBatch:
		ok = checkBatch(header, body)
	}
	if !ok || err != nil {
		return 0, 0, errArrowMeta
	}
	return kind, body, nil
}

// checkFields checks a list of fields, including nested fields. left is how many there may be.
func checkFields(t flatbuffer.Table, n uint32, left *int, depth int) bool {
	vector, err := t.Vector(n, 4)
	if err != nil || depth > maxArrowDepth {
		return false
	}
	for k := range vector.Len() {
		field, err := vector.Table(k)
		if *left--; err != nil || *left < 0 || !isVector(field, 6, 4) || !checkFields(field, 5, left, depth+1) {
			return false
		}
		kind, err := field.Number(2, 1, 0)
		if err != nil {
			return false
		}
		if kind == typeUnion {
			if of, ok, err := field.Child(3); !ok || err != nil || !isVector(of, 1, 4) {
				return false
			}
		}
	}
	return true
}

// isVector reports whether field n is absent, or a vector of elements of size bytes within the
// buffer.
func isVector(t flatbuffer.Table, n, size uint32) bool {
	_, err := t.Vector(n, size)
	return err == nil
}

// checkBatch checks the lists of a record batch: its fields, and its buffers, which must be within
// the body.
func checkBatch(t flatbuffer.Table, body int64) bool {
	buffers, err1 := t.Vector(2, 16)
	views, err2 := t.Vector(4, 8) // the number of buffers of each column of views
	rows, err3 := t.Number(0, 8, 0)
	if errors.Join(err1, err2, err3) != nil || !isVector(t, 1, 16) || int64(rows) < 0 {
		return false
	}
	for i := range views.Len() {
		if count := binary.LittleEndian.Uint64(views.Bytes()[8*i:]); count > uint64(buffers.Len()) {
			return false
		}
	}
	for i := range buffers.Len() {
		b := buffers.Bytes()[16*i:]
		offset, length := int64(binary.LittleEndian.Uint64(b)), int64(binary.LittleEndian.Uint64(b[8:]))
		if offset < 0 || length < 0 || offset > body || length > body-offset {
			return false
		}
	}
	return true
}
