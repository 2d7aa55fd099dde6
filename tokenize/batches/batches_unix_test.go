//go:build unix

package batches_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"mula/tokenize"
	"mula/tokenize/batches"
)

const tokenizerFile = "../testdata/olmo.json"

// client is the other side of [batches.Serve].
type client struct {
	t     *testing.T
	c     *net.UnixConn
	slots []*os.File
	stop  context.CancelFunc
	ended chan error
}

// connect starts a service and sends its slots, unless there are none.
func connect(t *testing.T, slots, workers int) *client {
	t.Helper()
	tokenizer, err := tokenize.Load(tokenizerFile)
	if err != nil {
		t.Fatal(err)
	}
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	var sides [2]*net.UnixConn
	for i, d := range ends {
		f := os.NewFile(uintptr(d), "socket")
		c, err := net.FileConn(f)
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
		sides[i] = c.(*net.UnixConn)
	}
	ctx, stop := context.WithCancel(t.Context())
	c := &client{t: t, c: sides[0], stop: stop, ended: make(chan error, 1)}
	go func() { c.ended <- batches.Serve(ctx, sides[1], tokenizer, batches.Options{Workers: workers}) }()
	t.Cleanup(func() { sides[0].Close(); stop() })
	for range slots {
		c.slots = append(c.slots, c.file())
	}
	if slots == 0 {
		return c
	}
	c.request(0, 0, 0, 0, 0, c.slots...)
	status, _, text := c.answer()
	var g batches.Greeting
	if err := json.Unmarshal(text, &g); err != nil || status != 0 || g != (batches.Greeting{Protocol: 1,
		VocabSize: tokenizer.VocabSize(), SHA256: tokenizer.SHA256()}) {
		t.Fatalf("%d %q: %v", status, text, err)
	}
	return c
}

func (c *client) file() *os.File {
	f, err := os.Create(filepath.Join(c.t.TempDir(), "file"))
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { f.Close() })
	return f
}

func (c *client) request(kind, slot uint32, count, bytes, total int, files ...*os.File) {
	head := binary.LittleEndian.AppendUint32(nil, kind)
	head = binary.LittleEndian.AppendUint32(head, slot)
	for _, n := range []int{count, bytes, total} {
		head = binary.LittleEndian.AppendUint64(head, uint64(n))
	}
	var control []byte
	if len(files) > 0 {
		var descriptors []int
		for _, f := range files {
			descriptors = append(descriptors, int(f.Fd()))
		}
		control = unix.UnixRights(descriptors...)
	}
	if _, _, err := c.c.WriteMsgUnix(head, control, nil); err != nil {
		c.t.Fatal(err)
	}
}

func (c *client) answer() (status uint32, number int64, payload []byte) {
	c.t.Helper()
	head := make([]byte, 16)
	if _, err := io.ReadFull(c.c, head); err != nil {
		c.t.Fatalf("no answer: %v, %v", err, <-c.ended)
	}
	payload = make([]byte, binary.LittleEndian.Uint32(head[4:]))
	if _, err := io.ReadFull(c.c, payload); err != nil {
		c.t.Fatal(err)
	}
	return binary.LittleEndian.Uint32(head), int64(binary.LittleEndian.Uint64(head[8:])), payload
}

// fill writes texts to a slot and returns their number of bytes.
func (c *client) fill(slot int, texts []string) int {
	at := 0
	offsets := binary.NativeEndian.AppendUint64(nil, 0)
	for _, text := range texts {
		at += len(text)
		offsets = binary.NativeEndian.AppendUint64(offsets, uint64(at))
	}
	if _, err := c.slots[slot].WriteAt([]byte(string(offsets)+strings.Join(texts, "")), 0); err != nil {
		c.t.Fatal(err)
	}
	return at
}

// encode encodes a batch in parts of at most size texts. It returns the answers of its parts.
func (c *client) encode(result *os.File, texts []string, size int) (failed map[int64]string, ids int64) {
	failed = make(map[int64]string)
	sent, answered := 0, 0
	answer := func() {
		answered++
		status, number, payload := c.answer()
		if status == 0 {
			ids = number
		} else {
			failed[number] = string(payload)
		}
	}
	for part := range slices.Chunk(texts, size) {
		if sent-answered == len(c.slots) {
			answer()
		}
		slot := sent % len(c.slots)
		bytes := c.fill(slot, part)
		if sent == 0 {
			c.request(1, uint32(slot), len(part), bytes, len(texts), result)
		} else {
			c.request(2, uint32(slot), len(part), bytes, 0)
		}
		sent++
	}
	for answered < sent {
		answer()
	}
	return failed, ids
}

// want returns a result file's content.
func want(t *testing.T, texts []string) []byte {
	tokenizer, err := tokenize.Load(tokenizerFile)
	if err != nil {
		t.Fatal(err)
	}
	e := tokenizer.NewEncoder(tokenize.EncodeOptions{})
	out := binary.NativeEndian.AppendUint64(nil, 0)
	var ids []uint32
	for _, text := range texts {
		if ids, err = e.Append(ids, []byte(text)); err != nil {
			t.Fatal(err)
		}
		out = binary.NativeEndian.AppendUint64(out, uint64(len(ids)))
	}
	if len(ids) > 0 {
		out = append(out, make([]byte, -len(out)&63)...)
	}
	for _, id := range ids {
		out = binary.NativeEndian.AppendUint32(out, id)
	}
	return out
}

// The ids equal the ids of one encoder, for any sizes of texts, parts and any number of workers,
// and a result file can be used again.
func TestBatchesEqualOneEncoder(t *testing.T) {
	draw := rand.New(rand.NewPCG(1, 2))
	raw, err := os.ReadFile("../testdata/text.txt")
	if err != nil {
		t.Fatal(err)
	}
	source := []rune(string(raw))
	for _, workers := range []int{1, 3} {
		c := connect(t, 3, workers)
		result := c.file()
		for range 12 {
			texts := make([]string, 1+draw.IntN(300))
			for i := range texts {
				switch draw.IntN(10) {
				case 0: // empty
				case 1: // larger than a chunk
					texts[i] = strings.Repeat(string(source[draw.IntN(5000):][:1000]), draw.IntN(200))
				default:
					at := draw.IntN(len(source))
					texts[i] = string(source[at:min(len(source), at+draw.IntN(500))])
				}
			}
			if err := result.Truncate(int64(draw.IntN(1 << 16))); err != nil {
				t.Fatal(err)
			}
			failed, ids := c.encode(result, texts, 1+draw.IntN(100))
			expected := want(t, texts)
			got := make([]byte, len(expected))
			if _, err := result.ReadAt(got, 0); err != nil || len(failed) > 0 {
				t.Fatal(err, failed)
			}
			for i := 8 * (len(texts) + 1); i < len(got) && i%64 != 0; i++ {
				got[i] = 0 // padding
			}
			if string(got) != string(expected) {
				t.Errorf("%d workers: the result of %d texts differs", workers, len(texts))
			}
			if last := int64(binary.NativeEndian.Uint64(expected[8*len(texts):])); ids != last {
				t.Errorf("%d ids; want %d", ids, last)
			}
		}
		c.c.Close()
		if err := <-c.ended; err != nil {
			t.Error(err)
		}
	}
}

// A batch fails with the first text that fails, and the next batch is encoded.
func TestFailedTextIsNamed(t *testing.T) {
	c := connect(t, 2, 4)
	for range 20 {
		texts := slices.Repeat([]string{strings.Repeat("It's a text. ", 2000)}, 50)
		texts[11], texts[12], texts[40] = "a\xff", "\xff", "\xff"
		failed, _ := c.encode(c.file(), texts, 10)
		if failed[11] != "invalid UTF-8 at byte 1" || len(failed) != 1 {
			t.Fatal(failed)
		}
		result := c.file()
		if failed, ids := c.encode(result, []string{"It's a text"}, 1); len(failed) > 0 || ids != 9 {
			t.Fatal("the next batch:", failed, ids)
		}
	}
	readOnly, err := os.Open(tokenizerFile)
	if err != nil {
		t.Fatal(err)
	}
	defer readOnly.Close()
	failed, _ := c.encode(readOnly, []string{"text"}, 1)
	if !strings.Contains(failed[-1], "bad file descriptor") {
		t.Error("a result that cannot be written:", failed)
	}
}

func TestDecode(t *testing.T) {
	c := connect(t, 1, 1)
	for _, test := range []struct {
		ids    []uint32
		status uint32
		text   string
	}{
		{[]uint32{42, 85, 379, 222, 66, 662, 85, 70, 89, 85}, 0, "It's a  text"},
		{nil, 0, ""},
		{[]uint32{42, 5000}, 1, "id 5000 at index 1 is not in the vocabulary of 667 tokens"},
	} {
		c.request(3, 0, len(test.ids), 0, 0)
		if err := binary.Write(c.c, binary.LittleEndian, test.ids); err != nil {
			t.Fatal(err)
		}
		if status, _, text := c.answer(); status != test.status || string(text) != test.text {
			t.Errorf("%d: %d %q", test.ids, status, text)
		}
	}
}

// A wrong request ends the connection with an error.
func TestWrongRequests(t *testing.T) {
	for _, test := range []struct {
		says string
		send func(c *client)
	}{
		{"unknown kind of request 9", func(c *client) { c.request(9, 0, 0, 0, 0) }},
		{"only the first, must have the slots", func(c *client) { c.request(0, 0, 0, 0, 0, c.file()) }},
		{"a part of 1 texts is not in a batch", func(c *client) { c.request(2, 0, 1, 0, 0) }},
		{"a part of 2 texts is not in a batch", func(c *client) { c.request(1, 0, 2, 0, 1, c.file()) }},
		{"a part of 0 texts is not in a batch", func(c *client) { c.request(1, 0, 0, 0, 1, c.file()) }},
		{"a batch of 1 texts with 0 result files", func(c *client) { c.request(1, 0, 1, 0, 1) }},
		{"unknown slot 7", func(c *client) { c.request(1, 7, 1, 0, 1, c.file()) }},
		{"a slot of 0 bytes is too small for a part of 115 bytes",
			func(c *client) { c.request(1, 0, 1, 99, 1, c.file()) }},
		{"a slot of 0 bytes is too small", func(c *client) { c.request(1, 0, 1<<40, 0, 1<<40, c.file()) }},
		{"a part of 18446744073709551615 bytes", func(c *client) { c.request(1, 0, 1, -1, 1, c.file()) }},
		{"a batch of 18446744073709551615 texts", func(c *client) { c.request(1, 0, 1, 0, -1, c.file()) }},
		{"a part of 1 bytes has texts of 4 bytes", func(c *client) {
			c.fill(0, []string{"text"})
			c.request(1, 0, 1, 1, 1, c.file())
		}},
		{"offset 2 of a part is 2, after 3", func(c *client) {
			offsets := binary.NativeEndian.AppendUint64(make([]byte, 8), 3)
			offsets = append(binary.NativeEndian.AppendUint64(offsets, 2), "te"...)
			if _, err := c.slots[0].WriteAt(offsets, 0); err != nil {
				c.t.Fatal(err)
			}
			c.request(1, 0, 2, 2, 2, c.file())
		}},
		{"a batch starts before the parts of the last one have answers", func(c *client) {
			n := c.fill(0, []string{strings.Repeat("It's a text. ", 1<<20)})
			c.request(1, 0, 1, n, 1, c.file())
			c.request(1, 0, 1, n, 1, c.file())
		}},
		{"the file was cut short while in use", func(c *client) {
			c.encode(c.file(), []string{"It's a text."}, 1)
			if err := c.slots[0].Truncate(0); err != nil {
				c.t.Fatal(err)
			}
			c.request(1, 0, 1, 0, 1, c.file())
		}},
		{"67108865 ids to decode", func(c *client) { c.request(3, 0, 1<<26+1, 0, 0) }},
	} {
		c := connect(t, 1, 1)
		test.send(c)
		if err := <-c.ended; err == nil || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%v; want %q", err, test.says)
		}
	}
	c := connect(t, 0, 1)
	c.request(3, 0, 0, 0, 0)
	if err := <-c.ended; err == nil || !strings.Contains(err.Error(), "must have the slots") {
		t.Error(err)
	}
}

// The service ends when the client disconnects during a batch, and when it is stopped.
func TestEnds(t *testing.T) {
	c := connect(t, 1, 2)
	n := c.fill(0, slices.Repeat([]string{strings.Repeat("It's a text. ", 1000)}, 100))
	c.request(1, 0, 100, n, 200, c.file())
	c.c.Close()
	if err := <-c.ended; err != nil && !errors.Is(err, unix.EPIPE) {
		t.Error(err)
	}
	c = connect(t, 1, 2)
	c.stop()
	if err := <-c.ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	c = connect(t, 0, 2)
	fmt.Fprint(c.c, "half a header")
	c.c.Close()
	if err := <-c.ended; !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Error(err)
	}
}
