// Package batches encodes and decodes for a client process on the same machine, such as the
// mula.Tokenizer of the Python client. Texts and ids are in files that both processes have open,
// usually memory without a name (memfd). A unix socket carries small messages and the descriptors
// of the files.
//
// # Messages
//
// Numbers in messages are little-endian. A request is a header of 32 bytes:
//
//	uint32 kind, uint32 slot, uint64 count, uint64 bytes, uint64 total
//
// The first request has kind 0, and the descriptors of the slots. A slot is a file with a part of
// the texts of a batch. The answer has the JSON of a [Greeting].
//
// Kind 1 starts a batch of total texts with its first part, and has the descriptor of the batch's
// result file. Kind 2 is a further part. Slot number `slot` has the part: count+1 offsets of texts
// (int64, from 0), then the texts. The offsets have the byte order of the machine. The client may
// send further parts before the answer, each in another slot. An answer, in the order of the parts,
// returns the slot to the client.
//
// Kind 3 decodes. count ids (uint32) follow the header. The answer has the bytes of the text.
//
// An answer is a header of 16 bytes, and then a payload:
//
//	uint32 status, uint32 bytes of the payload, int64 number
//
// Status 0 is success. For a part, the number counts all ids of the batch up to and including the
// part. Status 1 is a failure of a text or of the result file. The payload is the message, and the
// number is the index of the text in the batch, or -1. The batch has failed then, and so do its
// further parts. Wrong requests end the connection.
//
// # Result file
//
// The file has total+1 offsets (int64, from 0), padding up to a multiple of 64 bytes, then the ids
// (uint32). The ids of text i are ids[offsets[i]:offsets[i+1]]. The byte order is the machine's.
package batches

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sync/errgroup"

	"mula/internal/mapping"
	"mula/tokenize"
)

// Kinds of requests.
const (
	kindSlots = iota
	kindBatch
	kindPart
	kindDecode
)

// protocol is the version of the messages.
const protocol = 1

// A Greeting is the answer to the first request.
type Greeting struct {
	Protocol  int    `json:"protocol"`
	VocabSize int    `json:"vocab_size"`
	SHA256    string `json:"sha256"` // of the tokenizer.json
}

const (
	requestBytes = 32
	answerBytes  = 16
	maxSlots     = 64
	maxTexts     = 1 << 40 // of a batch, so that sizes of files do not overflow
	maxBytes     = 1 << 50 // of the texts of a part, likewise
	maxIDs       = 1 << 26 // of a request to decode
)

// Options are the options of [Serve].
type Options struct {
	Encode  tokenize.EncodeOptions
	Workers int // goroutines that encode; 0: all cores
}

// A request is the header of a message of the client.
type request struct {
	Kind, Slot          uint32
	Count, Bytes, Total uint64
}

// Serve answers requests until the client closes the connection, which is not an error, or until
// ctx ends. It closes the connection.
func Serve(ctx context.Context, c *net.UnixConn, t *tokenize.Tokenizer, o Options) error {
	if o.Workers == 0 {
		o.Workers = runtime.GOMAXPROCS(0)
	}
	defer c.Close()
	group, ctx := errgroup.WithContext(ctx)
	defer context.AfterFunc(ctx, func() { c.Close() })()
	s := &server{c: c, t: t, chunks: make(chan *chunk, o.Workers)}
	group.Go(func() error {
		defer close(s.chunks)
		return s.receive(ctx)
	})
	for range o.Workers {
		group.Go(func() error {
			e := t.NewEncoder(o.Encode)
			for c := range s.chunks {
				c.encode(e)
				if err := c.batch.finish(c); err != nil {
					return err
				}
			}
			return nil
		})
	}
	err := group.Wait()
	for _, slot := range s.slots {
		slot.file.Close()
		slot.mapped.Close()
	}
	if s.batch != nil {
		s.batch.result.Close()
	}
	return err
}

// server is a connection with its files.
type server struct {
	c      *net.UnixConn
	t      *tokenize.Tokenizer
	slots  []*slot
	chunks chan *chunk
	batch  *batch // the current or the last batch
}

// receive reads requests until the connection ends.
func (s *server) receive(ctx context.Context) error {
	for {
		r, files, err := s.request()
		if err != nil {
			if errors.Is(err, io.EOF) || ctx.Err() != nil {
				return ctx.Err()
			}
			return err
		}
		if (r.Kind == kindSlots) != (s.slots == nil) {
			err = errors.New("the first request, and only the first, must have the slots")
		} else {
			switch r.Kind {
			case kindSlots:
				err = s.greet(files)
			case kindBatch:
				err = s.start(ctx, r, files)
			case kindPart:
				err = s.part(ctx, r)
			case kindDecode:
				err = s.decode(r)
			default:
				err = fmt.Errorf("unknown kind of request %d", r.Kind)
			}
		}
		if err != nil {
			return fmt.Errorf("answering a client: %w; use a client of the same version as the program", err)
		}
	}
}

// request reads the header of a request and the descriptors of its files.
func (s *server) request() (r request, files []*os.File, err error) {
	var head [requestBytes]byte
	control := make([]byte, controlBytes)
	n, controls, _, _, err := s.c.ReadMsgUnix(head[:], control)
	if err != nil {
		return r, nil, err
	}
	if n == 0 {
		return r, nil, io.EOF
	}
	if controls > 0 {
		if files, err = filesOf(control[:controls]); err != nil {
			return r, nil, err
		}
	}
	if _, err := io.ReadFull(s.c, head[n:]); err != nil {
		return r, nil, fmt.Errorf("the connection ended within a request: %w", io.ErrUnexpectedEOF)
	}
	_, err = binary.Decode(head[:], binary.LittleEndian, &r)
	return r, files, err
}

// greet keeps the slots and answers with the greeting.
func (s *server) greet(files []*os.File) error {
	if len(files) == 0 {
		return errors.New("no slots")
	}
	for _, f := range files {
		s.slots = append(s.slots, &slot{file: f})
	}
	text, err := json.Marshal(Greeting{Protocol: protocol, VocabSize: s.t.VocabSize(), SHA256: s.t.SHA256()})
	if err != nil {
		return err
	}
	return answer(s.c, 0, 0, text)
}

// start starts a batch.
func (s *server) start(ctx context.Context, r request, files []*os.File) error {
	if len(files) != 1 || r.Total > maxTexts {
		return fmt.Errorf("a batch of %d texts with %d result files", r.Total, len(files))
	}
	if s.batch != nil {
		if !s.batch.idle() {
			return errors.New("a batch starts before the parts of the last one have answers")
		}
		s.batch.result.Close()
	}
	s.batch = newBatch(s.c, files[0], int64(r.Total))
	return s.part(ctx, r)
}

// part divides the texts of a part into chunks for the workers.
func (s *server) part(ctx context.Context, r request) error {
	b := s.batch
	switch {
	case b == nil || r.Count == 0 || r.Count > uint64(b.total-b.texts):
		return fmt.Errorf("a part of %d texts is not in a batch", r.Count)
	case r.Slot >= uint32(len(s.slots)):
		return fmt.Errorf("unknown slot %d", r.Slot)
	}
	if r.Bytes > maxBytes {
		return fmt.Errorf("a part of %d bytes", r.Bytes)
	}
	size := 8 * (r.Count + 1)
	data, err := s.slots[r.Slot].data(size + r.Bytes)
	if err != nil {
		return err
	}
	offsets := make([]int64, r.Count+1)
	if err := mapping.Guard(func() error { copy(bytesOf(offsets), data); return nil }); err != nil {
		return err
	}
	if err := checkOffsets(offsets, int64(r.Bytes)); err != nil {
		return err
	}
	for _, c := range b.divide(data[size:], offsets) {
		select {
		case s.chunks <- c:
		case <-ctx.Done():
			return nil // receive returns the reason
		}
	}
	return nil
}

// checkOffsets returns an error unless offsets divide size bytes.
func checkOffsets(offsets []int64, size int64) error {
	last := int64(0)
	for i, o := range offsets {
		if o < last || i == 0 && o != 0 {
			return fmt.Errorf("offset %d of a part is %d, after %d", i, o, last)
		}
		last = o
	}
	if last != size {
		return fmt.Errorf("a part of %d bytes has texts of %d bytes", size, last)
	}
	return nil
}

// decode answers with the text of ids.
func (s *server) decode(r request) error {
	if r.Count > maxIDs {
		return fmt.Errorf("%d ids to decode; the limit is %d", r.Count, maxIDs)
	}
	raw := make([]byte, 4*r.Count)
	if _, err := io.ReadFull(s.c, raw); err != nil {
		return err
	}
	ids := make([]uint32, r.Count)
	for i := range ids {
		ids[i] = binary.LittleEndian.Uint32(raw[4*i:])
	}
	text, err := s.t.Decode(nil, ids)
	switch {
	case err != nil:
		return answer(s.c, 1, -1, []byte(err.Error()))
	case len(text) > math.MaxUint32:
		return answer(s.c, 1, -1, []byte("the text is larger than 4 GiB; decode fewer ids at once"))
	}
	return answer(s.c, 0, 0, text)
}

// answer writes an answer.
func answer(w io.Writer, status uint32, number int64, payload []byte) error {
	b := make([]byte, 0, answerBytes+len(payload))
	b = binary.LittleEndian.AppendUint32(b, status)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(payload)))
	b = binary.LittleEndian.AppendUint64(b, uint64(number))
	_, err := w.Write(append(b, payload...))
	return err
}

// A slot is a file of the client.
type slot struct {
	file   *os.File
	mapped mapping.File
}

// data returns the first bytes of the slot. No chunk may refer to the slot.
func (s *slot) data(size uint64) ([]byte, error) {
	if size > uint64(len(s.mapped.Data)) {
		if err := s.mapped.Close(); err != nil {
			return nil, err
		}
		var err error
		if s.mapped, err = mapping.Of(s.file); err != nil {
			return nil, err
		}
	}
	if size > uint64(len(s.mapped.Data)) {
		return nil, fmt.Errorf("a slot of %d bytes is too small for a part of %d bytes", len(s.mapped.Data), size)
	}
	return s.mapped.Data[:size], nil
}

// bytesOf returns the memory of numbers.
func bytesOf[N uint32 | int64](x []N) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), len(x)*int(unsafe.Sizeof(*new(N))))
}
