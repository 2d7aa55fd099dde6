package tcp

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"testing"

	"mula/xpu/comm"
	"mula/xpu/comm/pairwise"
)

// reading returns a transport of two ranks, without goroutines, and the connection to its peer.
func reading(t testing.TB) (*transport, *peer) {
	here, there := net.Pipe()
	t.Cleanup(func() { here.Close(); there.Close() })
	p := newPeer(1, here)
	return open(worldChannel, 0, []*peer{nil, p}), p
}

func frame(id uint64, kind uint8, payload string) []byte {
	return append(appendFrame(nil, id, kind, len(payload)), payload...)
}

func messageOf(op pairwise.Operation, data string) string {
	head := make([]byte, messageBytes)
	head[0] = byte(op)
	binary.LittleEndian.PutUint64(head[8:], uint64(len(data)))
	return string(head) + data
}

// What a peer may not send ends the connection.
func TestBreaches(t *testing.T) {
	header := func(id uint64, kind uint8, length int) []byte { return appendFrame(nil, id, kind, length) }
	full := strings.Repeat("x", chunk)
	var unknown []byte
	for id := range uint64(maxUnopened + 2) {
		unknown = append(unknown, frame(id, frameCredit, "")...)
	}
	for _, c := range []struct {
		name string
		sent []byte
		says string
	}{
		{"kind", header(0, frames, 0), "kind 5"},
		{"length of data", header(0, frameData, chunk+1), "length"},
		{"length of data, four billion", header(0, frameData, 1<<32-1), "length"},
		{"length of a reason", header(0, frameFailure, maxText+1), "length"},
		{"length of a leave", header(0, frameLeave, 1), "length"},
		{"credit", header(0, frameCredit, 1), "credit"},
		{"ahead", bytes.Repeat(frame(0, frameData, full), window/chunk+1), "ahead"},
		{"channels", unknown, "unknown channels"},
		{"two leaves", append(frame(7, frameLeave, ""), frame(7, frameLeave, "")...), "second"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, p := reading(t)
			err := p.read(bufio.NewReaderSize(bytes.NewReader(c.sent), chunk))
			var breach frameError
			if !errors.As(err, &breach) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("error %v, not %q", err, c.says)
			}
		})
	}
}

// A message is received in any division into pieces. An unexpected message ends the group.
func TestMessages(t *testing.T) {
	for _, c := range []struct {
		name string
		sent string
		says string // of the group's error; empty if there is none
	}{
		{"whole", messageOf(pairwise.Send, "hello"), ""},
		{"other operation", messageOf(pairwise.AllToAll, "hello"), "an all-to-all, but this rank runs a send"},
		{"shorter", messageOf(pairwise.Send, "hell"), "4 bytes in a send, but this rank expects 5"},
		{"enormous", messageOf(pairwise.Send, "hello")[:8] + strings.Repeat("\xff", 8), "18446744073709551615 bytes"},
		{"unknown operation", messageOf(99, "hello"), "operation 99"},
	} {
		for cut := range c.sent {
			l, p := reading(t)
			var sent []byte
			if cut > 0 {
				sent = frame(worldChannel, frameData, c.sent[:cut])
			}
			sent = append(sent, frame(worldChannel, frameData, c.sent[cut:])...)
			dst := make([]byte, 5)
			if err := l.Begin(t.Context()); err != nil {
				t.Fatal(err)
			}
			if cut%2 == 0 { // wanted before it comes, or afterwards
				l.Pull(1, pairwise.Send, dst)
			}
			if err := p.read(bufio.NewReaderSize(bytes.NewReader(sent), chunk)); err != io.EOF {
				t.Fatalf("%s, cut at %d: %v", c.name, cut, err)
			}
			if cut%2 == 1 {
				l.Pull(1, pairwise.Send, dst)
			}
			err := l.Wait(t.Context())
			if c.says == "" && (err != nil || string(dst) != "hello") {
				t.Errorf("%s, cut at %d: %q, %v", c.name, cut, dst, err)
			}
			if c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)) {
				t.Errorf("%s, cut at %d: error %v, not %q", c.name, cut, err, c.says)
			}
		}
	}
}

// Whatever a peer sends, nothing crashes, and no stream holds more than its window.
func FuzzPeer(f *testing.F) {
	f.Add(append(frame(0, frameData, messageOf(pairwise.Send, "hello")), frame(0, frameLeave, "")...))
	f.Add(append(frame(5, frameData, "early"), frame(0, frameFailure, "no memory")...))
	f.Add(append(frame(0, frameFarewell, ""), frame(0, frameData, messageOf(pairwise.Barrier, ""))...))
	f.Add(appendFrame(nil, 0, frameData, 1<<32-1))
	f.Fuzz(func(t *testing.T, sent []byte) {
		l, p := reading(t)
		dst := make([]byte, 5)
		if err := l.Begin(t.Context()); err != nil {
			t.Fatal(err)
		}
		l.Pull(1, pairwise.Send, dst)
		err := p.read(bufio.NewReaderSize(bytes.NewReader(sent), chunk))
		if err == nil {
			t.Fatal("reading ends without an error")
		}
		for id, s := range p.streams {
			if len(s.buffer)-s.from > window {
				t.Errorf("channel %d holds %d bytes", id, len(s.buffer))
			}
		}
		p.lost(err)
		if err := l.Wait(t.Context()); err != nil && !errors.Is(err, comm.ErrPeerLost) && !strings.Contains(err.Error(),
			"but this rank") {
			t.Errorf("the group's error: %v", err)
		}
		if err := l.Barrier(t.Context()); err == nil {
			t.Error("the group is still of use")
		}
	})
}
