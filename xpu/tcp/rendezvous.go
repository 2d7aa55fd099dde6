package tcp

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"time"
)

// How ranks find each other. Every rank but 0 dials rank 0, and says where it listens itself. When all have come, rank 0 sends each the list
// of these addresses, and each rank dials those between 0 and itself. On every connection the two sides greet first:
//
//	acceptor → dialer: magic, version, nonce
//	dialer → acceptor: magic, version, rank, size, port, run, nonce, proof
//	acceptor → dialer: accepted, run, proof; or refused and why
//
// A rank that has all its connections says so to rank 0, which lets all go when it has heard all: if one dies before that, nobody waits for it.
//
// A proof is an HMAC-SHA256, keyed by the secret, of the other side's nonce and of what this side says.
const (
	magic   = "mula/tcp"
	version = 1

	greetingBytes = 8 + 4 + 32
	helloBytes    = 8 + 4 + 4 + 4 + 4 + 16 + 32 + 32
	answerBytes   = 2 + 16 + 32 // length of the reason for a refusal, or 0; run; proof
	maxText       = 512         // of reasons and addresses

	greetTime = time.Minute // within which the other side must answer a greeting
)

type hello struct {
	rank, size uint32
	port       uint32 // at which the dialer listens
	run        [16]byte
}

// errSilent is the error of a greeting when the other side has said nothing: it may be about to end, and its successor not yet there.
var errSilent = errors.New("nobody answers")

func proof(secret, side string, parts ...[]byte) []byte {
	mac := hmac.New(sha256.New, []byte(secret))
	mac.Write([]byte(side))
	for _, p := range parts {
		mac.Write(p)
	}
	return mac.Sum(nil)
}

func appendHello(b []byte, h hello, nonce []byte) []byte {
	b = append(b, magic...)
	for _, v := range []uint32{version, h.rank, h.size, h.port} {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	b = append(b, h.run[:]...)
	return append(b, nonce...)
}

// greet is the dialer's side; it returns the run's id.
func greet(conn net.Conn, secret string, h hello) ([16]byte, error) {
	var run [16]byte
	greeting := make([]byte, greetingBytes)
	if _, err := io.ReadFull(conn, greeting[:12]); err != nil {
		return run, fmt.Errorf("%w: %w", errSilent, err)
	}
	if string(greeting[:8]) != magic {
		return run, errors.New("what answers there is not mula")
	}
	if v := binary.LittleEndian.Uint32(greeting[8:]); v != version {
		return run, fmt.Errorf("it speaks version %d of the protocol between ranks, this program version %d: start the same mula everywhere", v, version)
	}
	if _, err := io.ReadFull(conn, greeting[12:]); err != nil {
		return run, err
	}
	nonce := make([]byte, 32)
	rand.Read(nonce)
	said := appendHello(nil, h, nonce)
	said = append(said, proof(secret, "dialer", greeting[12:], said)...)
	if _, err := conn.Write(said); err != nil {
		return run, err
	}
	answer := make([]byte, answerBytes)
	if _, err := io.ReadFull(conn, answer[:2]); err != nil {
		return run, err
	}
	if n := int(binary.LittleEndian.Uint16(answer)); n > 0 {
		reason := make([]byte, min(n, maxText))
		if _, err := io.ReadFull(conn, reason); err != nil {
			return run, err
		}
		return run, fmt.Errorf("it refuses this rank: %s", reason)
	}
	if _, err := io.ReadFull(conn, answer[2:]); err != nil {
		return run, err
	}
	copy(run[:], answer[2:18])
	if !hmac.Equal(answer[18:], proof(secret, "acceptor", nonce, run[:])) {
		return run, fmt.Errorf("it does not know this rank's secret (%s)", SecretVariable)
	}
	return run, nil
}

// admit is the acceptor's side. check says why the dialer cannot be taken, or nothing.
func admit(conn net.Conn, secret string, run [16]byte, check func(hello) string) (hello, error) {
	var h hello
	nonce := make([]byte, 32)
	rand.Read(nonce)
	greeting := binary.LittleEndian.AppendUint32([]byte(magic), version)
	if _, err := conn.Write(append(greeting, nonce...)); err != nil {
		return h, err
	}
	said := make([]byte, helloBytes)
	if _, err := io.ReadFull(conn, said[:12]); err != nil {
		return h, err
	}
	refuse := func(reason string) (hello, error) {
		conn.Write(append(binary.LittleEndian.AppendUint16(nil, uint16(len(reason))), reason...))
		return h, errors.New(reason)
	}
	if string(said[:8]) != magic {
		return h, errors.New("it is not mula")
	}
	if v := binary.LittleEndian.Uint32(said[8:]); v != version {
		return refuse(fmt.Sprintf("it speaks version %d of the protocol between ranks, the other side version %d: start the same mula everywhere", v, version))
	}
	if _, err := io.ReadFull(conn, said[12:]); err != nil {
		return h, err
	}
	body := said[:helloBytes-32]
	if !hmac.Equal(said[len(body):], proof(secret, "dialer", nonce, body)) {
		return refuse(fmt.Sprintf("its secret (%s) is another one", SecretVariable))
	}
	h.rank, h.size, h.port = binary.LittleEndian.Uint32(said[12:]), binary.LittleEndian.Uint32(said[16:]), binary.LittleEndian.Uint32(said[20:])
	copy(h.run[:], said[24:40])
	if reason := check(h); reason != "" {
		return refuse(reason)
	}
	answer := append(make([]byte, 2), run[:]...)
	_, err := conn.Write(append(answer, proof(secret, "acceptor", body[40:72], run[:])...))
	return h, err
}

// rendezvous fills in the connections to all other ranks. On an error some may be open.
func rendezvous(ctx context.Context, o Options, listener net.Listener, conns []net.Conn) error {
	host, _, err := net.SplitHostPort(o.Address)
	if err != nil {
		return err
	}
	if o.Rank == 0 {
		var run [16]byte
		rand.Read(run[:])
		ports, err := accept(ctx, o, listener, run, conns)
		if err != nil {
			return err
		}
		if err := sendList(ctx, conns, ports); err != nil {
			return err
		}
		return release(ctx, conns)
	}
	// The others reach this rank under the address by which rank 0 sees it. If rank 0 is on this machine, that may be one that is good on this
	// machine only, and they use the name of rank 0.
	here := ""
	if isLoopback(host) {
		here = host
	}
	listener, err = (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(here, "0"))
	if err != nil {
		return fmt.Errorf("tcp: rank %d cannot listen for others: %w", o.Rank, err)
	}
	defer listener.Close()
	h := hello{rank: uint32(o.Rank), size: uint32(o.Size), port: uint32(listener.Addr().(*net.TCPAddr).Port)}
	conn, run, err := dial(ctx, o.Address, o.Secret, h)
	if err != nil {
		return fmt.Errorf("tcp: rank %d at rank 0, %s (%s): %w", o.Rank, o.Address, AddressVariable, err)
	}
	conns[0] = conn
	list, err := within(ctx, conn, 0, func() ([]string, error) { return readList(conn, o.Size) })
	if err != nil {
		return fmt.Errorf("tcp: rank %d waits at rank 0, %s, for the others: %w", o.Rank, o.Address, err)
	}
	// Rank 0 lets this rank go, or its end says that somebody will never come.
	ctx, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	released := make(chan error, 1)
	go func() {
		_, err := within(ctx, conn, 0, func() (int, error) { return io.ReadFull(conn, make([]byte, 1)) })
		if err != nil {
			err = fmt.Errorf("tcp: rank %d waits at rank 0, %s, until all have found each other: %w", o.Rank, o.Address, err)
			giveUp(err)
		}
		released <- err
	}()
	err = meet(ctx, o, listener, h, run, host, list, conns)
	if err == nil {
		_, err = conn.Write([]byte{1})
	}
	if err != nil {
		giveUp(err)
		<-released
		return err
	}
	return <-released
}

// meet fills in the connections to the ranks above 0.
func meet(ctx context.Context, o Options, listener net.Listener, h hello, run [16]byte, host string, list []string, conns []net.Conn) error {
	accepted := make(chan error, 1)
	above := make([]net.Conn, o.Size)
	go func() {
		_, err := accept(ctx, o, listener, run, above)
		accepted <- err
	}()
	h.run = run
	var err error
	for r := 1; r < o.Rank && err == nil; r++ {
		address := list[r]
		if at, port, _ := net.SplitHostPort(address); isLoopback(at) {
			address = net.JoinHostPort(host, port)
		}
		if conns[r], _, err = dial(ctx, address, o.Secret, h); err != nil {
			err = fmt.Errorf("tcp: rank %d at rank %d, %s: %w", o.Rank, r, address, err)
		}
	}
	if err != nil {
		listener.Close()
		<-accepted
	} else {
		err = <-accepted
	}
	copy(conns[o.Rank+1:], above[o.Rank+1:])
	return err
}

// release waits until all ranks have their connections, and tells them so.
func release(ctx context.Context, conns []net.Conn) error {
	ctx, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	errs := make(chan error)
	for r, conn := range conns[1:] {
		go func() {
			_, err := within(ctx, conn, 0, func() (int, error) { return io.ReadFull(conn, make([]byte, 1)) })
			if err != nil {
				err = fmt.Errorf("tcp: rank %d (%s) is gone before all ranks have found each other: %w", r+1, conn.RemoteAddr(), err)
			}
			errs <- err
		}()
	}
	var first error
	for range conns[1:] {
		if err := <-errs; err != nil && first == nil {
			first = err
			giveUp(err)
		}
	}
	if first != nil {
		return first
	}
	for r, conn := range conns[1:] {
		if _, err := conn.Write([]byte{1}); err != nil {
			return fmt.Errorf("tcp: rank 0 lets rank %d (%s) go: %w", r+1, conn.RemoteAddr(), err)
		}
	}
	return nil
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "" || host == "localhost" || ip != nil && ip.IsLoopback()
}

// within runs f, which uses the connection, until it ends, ctx is done or the time is over, if it is not 0.
func within[T any](ctx context.Context, conn net.Conn, limit time.Duration, f func() (T, error)) (T, error) {
	if limit > 0 {
		conn.SetDeadline(time.Now().Add(limit))
	}
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	v, err := f()
	if !stop() {
		return v, context.Cause(ctx)
	}
	conn.SetDeadline(time.Time{})
	if !errors.Is(err, errSilent) && (errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)) {
		err = errors.New("it closed the connection; its own messages say why")
	}
	return v, err
}

// dial connects and greets. It tries again while nobody answers, until ctx is done.
func dial(ctx context.Context, address, secret string, h hello) (net.Conn, [16]byte, error) {
	for wait := 20 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
		var run [16]byte
		if err == nil {
			if run, err = within(ctx, conn, greetTime, func() ([16]byte, error) { return greet(conn, secret, h) }); err == nil {
				return conn, run, nil
			}
			conn.Close()
			if !errors.Is(err, errSilent) {
				return nil, run, err
			}
		}
		select {
		case <-ctx.Done():
			return nil, run, fmt.Errorf("%w: %w", context.Cause(ctx), err)
		case <-time.After(wait):
		}
	}
}

// accept fills in the connections to all higher ranks, and returns the ports at which they listen. It closes the listener.
func accept(ctx context.Context, o Options, listener net.Listener, run [16]byte, conns []net.Conn) ([]uint32, error) {
	type guest struct {
		conn net.Conn
		h    hello
		err  error
	}
	guests := make(chan guest)
	done := make(chan struct{})
	defer close(done)
	defer listener.Close()
	check := func(h hello) string {
		switch {
		case h.size != uint32(o.Size):
			return fmt.Sprintf("it is of a world of %d ranks, rank %d of one of %d (%s)", h.size, o.Rank, o.Size, SizeVariable)
		case h.rank >= h.size || int(h.rank) <= o.Rank:
			return fmt.Sprintf("rank %d has no business with rank %d", h.rank, o.Rank)
		case o.Rank > 0 && h.run != run:
			return "it is of another run"
		case h.port > 65535:
			return fmt.Sprintf("it listens at port %d", h.port)
		}
		return ""
	}
	var busy sync.WaitGroup // goroutines that may have a guest to show
	busy.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				select {
				case guests <- guest{err: err}:
				case <-done:
				}
				return
			}
			busy.Go(func() {
				h, err := within(ctx, conn, greetTime, func() (hello, error) { return admit(conn, o.Secret, run, check) })
				select {
				case guests <- guest{conn, h, err}:
				case <-done:
					conn.Close()
				}
			})
		}
	})
	ports := make([]uint32, o.Size)
	var refused string // the last one
	for missing := o.Size - 1 - o.Rank; missing > 0; {
		select {
		case <-ctx.Done():
			listener.Close()
			go func() { busy.Wait(); close(guests) }()
			for g := range guests {
				if g.conn != nil {
					if g.err != nil && !errors.Is(g.err, context.Cause(ctx)) {
						refused = fmt.Sprintf("%s: %v", g.conn.RemoteAddr(), g.err)
					}
					g.conn.Close()
				}
			}
			var names []string
			for r := o.Rank + 1; r < o.Size; r++ {
				if conns[r] == nil {
					names = append(names, fmt.Sprint(r))
				}
			}
			if len(names) > 10 {
				names = append(names[:10], fmt.Sprintf("%d more", len(names)-10))
			}
			ended := fmt.Errorf("tcp: rank %d of %d, at %s, waits for ranks %s: %w", o.Rank, o.Size, listener.Addr(), strings.Join(names, ", "), context.Cause(ctx))
			if refused != "" {
				ended = fmt.Errorf("%w; it has refused %s", ended, refused)
			}
			return nil, ended
		case g := <-guests:
			switch {
			case g.conn == nil:
				return nil, fmt.Errorf("tcp: rank %d listens at %s: %w", o.Rank, listener.Addr(), g.err)
			case g.err != nil:
				refused = fmt.Sprintf("%s: %v", g.conn.RemoteAddr(), g.err)
				g.conn.Close()
			case conns[g.h.rank] != nil:
				// It has been let in, and finds the connection closed. Which of the two is right cannot be known here.
				g.conn.Close()
				return nil, fmt.Errorf("tcp: two processes, at %s and %s, say that they are rank %d (%s)", conns[g.h.rank].RemoteAddr(), g.conn.RemoteAddr(), g.h.rank, RankVariable)
			default:
				conns[g.h.rank], ports[g.h.rank] = g.conn, g.h.port
				missing--
			}
		}
	}
	return ports, nil
}

// sendList tells all ranks where the others listen.
func sendList(ctx context.Context, conns []net.Conn, ports []uint32) error {
	var list []byte
	for r, conn := range conns {
		address := ""
		if r > 0 {
			host, _, err := net.SplitHostPort(conn.RemoteAddr().String())
			if err != nil {
				return fmt.Errorf("tcp: address of rank %d: %w", r, err)
			}
			address = net.JoinHostPort(host, fmt.Sprint(ports[r]))
		}
		list = binary.LittleEndian.AppendUint16(list, uint16(len(address)))
		list = append(list, address...)
	}
	for r, conn := range conns[1:] {
		if _, err := within(ctx, conn, greetTime, func() (int, error) { return conn.Write(list) }); err != nil {
			return fmt.Errorf("tcp: rank 0 tells rank %d, %s, where the others are: %w", r+1, conn.RemoteAddr(), err)
		}
	}
	return nil
}

func readList(r io.Reader, size int) ([]string, error) {
	list := make([]string, 0, size)
	var b [maxText]byte
	for range size {
		if _, err := io.ReadFull(r, b[:2]); err != nil {
			return nil, err
		}
		n := int(binary.LittleEndian.Uint16(b[:]))
		if n > maxText {
			return nil, fmt.Errorf("it sends an address of %d bytes; mula's have at most %d", n, maxText)
		}
		if _, err := io.ReadFull(r, b[:n]); err != nil {
			return nil, err
		}
		list = append(list, string(b[:n]))
	}
	return slices.Clip(list), nil
}
