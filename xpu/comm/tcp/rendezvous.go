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

// How ranks connect. Every rank but 0 dials rank 0, and sends the address at which it listens. When
// all ranks have connected, rank 0 sends the list of these addresses to each rank, and each rank
// dials the ranks between 0 and itself. On every connection the two sides first exchange greetings:
//
//	acceptor → dialer: magic, version, nonce
//	dialer → acceptor: magic, version, rank, size, port, run, nonce, length of host, host, proof
//	acceptor → dialer: accepted, run, proof; or refused and the reason
//
// A rank that has all its connections notifies rank 0, which releases all ranks when all are ready.
// If a rank dies before that, no rank waits for it.
//
// A proof is an HMAC-SHA256, keyed by the secret, of the other side's nonce and this side's
// message.
const (
	magic   = "mula/tcp"
	version = 2

	greetingBytes = 8 + 4 + 32
	helloBytes    = 8 + 4 + 4 + 4 + 4 + 16 + 32 + 2 // bytes before the host
	proofBytes    = sha256.Size
	answerBytes   = 2 + 16 + 32 // length of the reason for a refusal, or 0; run; proof
	maxHost       = 255         // maximum bytes of the host in a hello
	maxText       = 512         // maximum bytes of reasons and addresses

	greetTime = time.Minute // time limit for the answer to a greeting
)

type hello struct {
	rank, size uint32
	port       uint32 // port at which other ranks reach the dialer
	run        [16]byte
	host       string // host at which other ranks reach the dialer; "" is the host that the acceptor sees
}

// errSilent is the error of a greeting if the other side has sent nothing: the process may be
// exiting, and its successor has not started yet.
var errSilent = errors.New("no answer")

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
	b = append(b, nonce...)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(h.host)))
	return append(b, h.host...)
}

// greet runs the dialer's side; it returns the run's id.
func greet(conn net.Conn, secret string, h hello) ([16]byte, error) {
	var run [16]byte
	greeting := make([]byte, greetingBytes)
	if _, err := io.ReadFull(conn, greeting[:12]); err != nil {
		return run, fmt.Errorf("%w: %w", errSilent, err)
	}
	if string(greeting[:8]) != magic {
		return run, errors.New("the program that answers there is not mula")
	}
	if v := binary.LittleEndian.Uint32(greeting[8:]); v != version {
		return run, fmt.Errorf("it uses version %d of the protocol between ranks, this program version %d; start "+
			"the same version of mula on all hosts", v, version)
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
		return run, fmt.Errorf("its secret differs from this rank's; set the same %s on all ranks", SecretVariable)
	}
	return run, nil
}

// admit runs the acceptor's side. check returns the reason to refuse the dialer, or "".
func admit(conn net.Conn, secret string, run [16]byte, check func(hello) string) (hello, error) {
	var h hello
	nonce := make([]byte, 32)
	rand.Read(nonce)
	greeting := binary.LittleEndian.AppendUint32([]byte(magic), version)
	if _, err := conn.Write(append(greeting, nonce...)); err != nil {
		return h, err
	}
	said := make([]byte, helloBytes, helloBytes+maxHost+proofBytes)
	if _, err := io.ReadFull(conn, said[:12]); err != nil {
		return h, err
	}
	refuse := func(reason string) (hello, error) {
		conn.Write(append(binary.LittleEndian.AppendUint16(nil, uint16(len(reason))), reason...))
		return h, errors.New(reason)
	}
	if string(said[:8]) != magic {
		return h, errors.New("the dialer is not mula")
	}
	if v := binary.LittleEndian.Uint32(said[8:]); v != version {
		return refuse(fmt.Sprintf("it uses version %d of the protocol between ranks, the other side version %d; "+
			"start the same version of mula on all hosts", v, version))
	}
	if _, err := io.ReadFull(conn, said[12:]); err != nil {
		return h, err
	}
	length := int(binary.LittleEndian.Uint16(said[helloBytes-2:]))
	if length > maxHost {
		return refuse(fmt.Sprintf("its host name has %d bytes; the limit is %d", length, maxHost))
	}
	said = said[:helloBytes+length+proofBytes]
	if _, err := io.ReadFull(conn, said[helloBytes:]); err != nil {
		return h, err
	}
	body := said[:helloBytes+length]
	if !hmac.Equal(said[len(body):], proof(secret, "dialer", nonce, body)) {
		return refuse(fmt.Sprintf("its secret differs; set the same %s on all ranks", SecretVariable))
	}
	h.rank, h.size, h.port = binary.LittleEndian.Uint32(said[12:]), binary.LittleEndian.Uint32(said[16:]),
		binary.LittleEndian.Uint32(said[20:])
	copy(h.run[:], said[24:40])
	h.host = string(body[helloBytes:])
	if reason := check(h); reason != "" {
		return refuse(reason)
	}
	answer := append(make([]byte, 2), run[:]...)
	_, err := conn.Write(append(answer, proof(secret, "acceptor", body[40:72], run[:])...))
	return h, err
}

// waiting describes for the user what a rank waits for.
type waiting struct {
	mu   sync.Mutex
	text func() string // called with mu held
}

func newWaiting(o Options) *waiting {
	return &waiting{text: func() string {
		return fmt.Sprintf("rank %d of %d waits for the other ranks", o.Rank,
			o.Size)
	}}
}

func (w *waiting) set(text func() string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.text = text
}

func (w *waiting) now() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.text()
}

// report passes the description to o.Waiting now and then, until the returned function is called.
func (w *waiting) report(o Options) (stop func()) {
	if o.Waiting == nil {
		return func() {}
	}
	interval := o.interval
	if interval == 0 {
		interval = waitingInterval
	}
	ended, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		begin := time.Now()
		for ; ; interval = min(2*interval, max(interval, time.Minute)) {
			select {
			case <-ended:
				return
			case <-time.After(interval):
			}
			limit := ""
			if o.Limit > 0 {
				limit = fmt.Sprintf(", at most %v", o.Limit)
			}
			o.Waiting(fmt.Sprintf("%s (for %v%s)", w.now(), time.Since(begin).Round(time.Second), limit))
		}
	}()
	return func() { close(ended); <-done }
}

// missing names the ranks above low that have no connection, with their addresses if list is not
// nil.
func missing(conns []net.Conn, low int, list []string) string {
	var names []string
	for r := low + 1; r < len(conns); r++ {
		if conns[r] != nil {
			continue
		}
		name := fmt.Sprint(r)
		if list != nil {
			name += " (" + list[r] + ")"
		}
		names = append(names, name)
	}
	return someRanks(names)
}

// someRanks formats names as "rank 1", or "ranks 1, 2 and 5 more".
func someRanks(names []string) string {
	if len(names) == 1 {
		return "rank " + names[0]
	}
	more := ""
	if len(names) > 10 {
		more = fmt.Sprintf(" and %d more", len(names)-10)
		names = names[:10]
	}
	return "ranks " + strings.Join(names, ", ") + more
}

// rendezvous sets the connections to all other ranks. After an error some may be open.
func rendezvous(ctx context.Context, o Options, w *waiting, listener net.Listener, conns []net.Conn) error {
	defer listener.Close()
	if o.Rank == 0 {
		var run [16]byte
		rand.Read(run[:])
		hosts, err := accept(ctx, o, w, listener, run, conns, nil)
		if err != nil {
			return err
		}
		if err := sendList(ctx, conns, hosts); err != nil {
			return err
		}
		return release(ctx, o, w, conns)
	}
	// The other ranks reach this rank at the address that it announces, or at the address that rank
	// 0 sees.
	bound := listener.Addr().(*net.TCPAddr)
	announced, port, err := o.announced(uint32(bound.Port))
	if err != nil {
		return err
	}
	if announced == "" && o.Listen != "" && !bound.IP.IsUnspecified() {
		announced = bound.IP.String()
	}
	h := hello{rank: uint32(o.Rank), size: uint32(o.Size), port: port, host: announced}
	at := fmt.Sprintf("rank 0 at %s (%s)", o.Address, AddressVariable)
	conn, run, err := dial(ctx, o, w, at, o.Address, h)
	if err != nil {
		return fmt.Errorf("tcp: rank %d of %d cannot reach %s: %w", o.Rank, o.Size, at, err)
	}
	conns[0] = conn
	others := fmt.Sprintf("rank %d of %d has reached %s and waits for the other ranks; see the message of rank "+
		"0", o.Rank,
		o.Size, at)
	w.set(func() string { return others })
	list, err := within(ctx, conn, 0, func() ([]string, error) { return readList(conn, o.Size) })
	if err != nil {
		return fmt.Errorf("tcp: %s: %w", others, err)
	}
	host, _, _ := net.SplitHostPort(o.Address)
	for r, address := range list {
		if at, port, _ := net.SplitHostPort(address); r > 0 && at == "" {
			list[r] = net.JoinHostPort(host, port)
		}
	}
	// Rank 0 releases this rank, or closes the connection if some rank will not connect.
	ctx, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	released := make(chan error, 1)
	go func() {
		_, err := within(ctx, conn, 0, func() (int, error) { return io.ReadFull(conn, make([]byte, 1)) })
		if err != nil {
			err = fmt.Errorf("tcp: rank %d of %d waits at %s until all ranks are connected to each other: %w", o.Rank,
				o.Size, at, err)
			giveUp(err)
		}
		released <- err
	}()
	err = meet(ctx, o, w, listener, h, run, list, conns)
	if err == nil {
		w.set(func() string {
			return fmt.Sprintf("rank %d of %d waits until all ranks are connected to each other; see the message "+
				"of rank 0", o.Rank, o.Size)
		})
		_, err = conn.Write([]byte{1})
	}
	if err != nil {
		giveUp(err)
		<-released
		return err
	}
	return <-released
}

// meet sets the connections to the ranks above 0, which listen at the addresses in list.
func meet(ctx context.Context, o Options, w *waiting, listener net.Listener, h hello, run [16]byte, list []string,
	conns []net.Conn) error {
	accepted := make(chan error, 1)
	above := make([]net.Conn, o.Size)
	dialed := newWaiting(o) // shown when this rank has finished dialing
	go func() {
		_, err := accept(ctx, o, dialed, listener, run, above, list)
		accepted <- err
	}()
	h.run = run
	var err error
	for r := 1; r < o.Rank && err == nil; r++ {
		at := fmt.Sprintf("rank %d at %s", r, list[r])
		if conns[r], _, err = dial(ctx, o, w, at, list[r], h); err != nil {
			err = fmt.Errorf("tcp: rank %d of %d cannot reach %s: %w", o.Rank, o.Size, at, err)
		}
	}
	w.set(dialed.now)
	if err != nil {
		listener.Close()
		<-accepted
	} else {
		err = <-accepted
	}
	copy(conns[o.Rank+1:], above[o.Rank+1:])
	return err
}

// release waits until all ranks have their connections, and notifies them.
func release(ctx context.Context, o Options, w *waiting, conns []net.Conn) error {
	ctx, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	ready := make([]net.Conn, len(conns)) // connections to ranks that have all their connections
	list := make([]string, len(conns))
	for r, conn := range conns[1:] {
		list[r+1] = conn.RemoteAddr().String()
	}
	w.set(func() string {
		return fmt.Sprintf("all %d ranks have reached rank 0; rank 0 waits for %s to connect to the others", o.Size,
			missing(ready, 0, list))
	})
	errs := make(chan error)
	for r, conn := range conns[1:] {
		go func() {
			_, err := within(ctx, conn, 0, func() (int, error) { return io.ReadFull(conn, make([]byte, 1)) })
			if err != nil {
				err = fmt.Errorf("tcp: rank %d (%s) is not connected to all others: %w", r+1, conn.RemoteAddr(), err)
			} else {
				w.mu.Lock()
				ready[r+1] = conn
				w.mu.Unlock()
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
			return fmt.Errorf("tcp: rank 0 cannot release rank %d (%s): %w", r+1, conn.RemoteAddr(), err)
		}
	}
	return nil
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "" || host == "localhost" || ip != nil && ip.IsLoopback()
}

// within runs f, which uses the connection, until f returns, ctx is done, or the limit, if not 0,
// has passed. An error of f itself is returned even if ctx ends at the same moment.
func within[T any](ctx context.Context, conn net.Conn, limit time.Duration, f func() (T, error)) (T, error) {
	if limit > 0 {
		conn.SetDeadline(time.Now().Add(limit))
	}
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	v, err := f()
	ended := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
	if !stop() {
		// The deadline is set, so the connection is unusable, and its error has no new information.
		var network net.Error
		if err == nil || ended || errors.As(err, &network) {
			err = context.Cause(ctx)
		}
		return v, err
	}
	conn.SetDeadline(time.Time{})
	if ended && !errors.Is(err, errSilent) {
		err = errors.New("it closed the connection; see its own messages")
	}
	return v, err
}

// dial connects and greets. It retries while there is no answer, until ctx is done. After the first
// group of ranks it also retries when it is refused. at describes the dialed rank.
func dial(ctx context.Context, o Options, w *waiting, at, address string, h hello) (net.Conn, [16]byte, error) {
	var last error // error of the last attempt that ctx did not end
	w.set(func() string {
		why := ""
		if last != nil {
			why = fmt.Sprintf(" (%v)", last)
		}
		return fmt.Sprintf("rank %d of %d waits for %s%s", o.Rank, o.Size, at, why)
	})
	for wait := 20 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
		var run [16]byte
		if err == nil {
			if run, err = within(ctx, conn, greetTime,
				func() ([16]byte, error) { return greet(conn, o.Secret, h) }); err == nil {
				return conn, run, nil
			}
			conn.Close()
			again := errors.Is(err, errSilent) || o.Generation > 0
			if cause := context.Cause(ctx); !again && (cause == nil || !errors.Is(err, cause)) {
				return nil, run, err
			}
		}
		if ctx.Err() == nil {
			w.mu.Lock()
			last = err
			w.mu.Unlock()
		}
		select {
		case <-ctx.Done():
			if last == nil {
				return nil, run, context.Cause(ctx)
			}
			return nil, run, fmt.Errorf("%w; %w", context.Cause(ctx), last)
		case <-time.After(wait):
		}
	}
}

// accept sets the connections to all higher ranks, and returns the addresses at which they listen,
// without a host if it is the host of rank 0. It closes the listener. list has the addresses of all
// ranks, or is nil if they are not known.
func accept(ctx context.Context, o Options, w *waiting, listener net.Listener, run [16]byte, conns []net.Conn,
	list []string) ([]string, error) {
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
			return fmt.Sprintf("it belongs to a world of %d ranks, rank %d to a world of %d (%s)", h.size, o.Rank,
				o.Size,
				SizeVariable)
		case h.rank >= h.size || int(h.rank) <= o.Rank:
			return fmt.Sprintf("rank %d must not dial rank %d", h.rank, o.Rank)
		case o.Rank > 0 && h.run != run:
			return "it belongs to another run"
		case h.port > 65535:
			return fmt.Sprintf("it listens at invalid port %d", h.port)
		}
		return ""
	}
	var busy sync.WaitGroup // goroutines that may send a guest
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
				h, err := within(ctx, conn, greetTime, func() (hello, error) {
					return admit(conn, o.Secret, run,
						check)
				})
				select {
				case guests <- guest{conn, h, err}:
				case <-done:
					conn.Close()
				}
			})
		}
	})
	addresses := make([]string, o.Size)
	var refused string // the last refusal
	text := func() string {
		text := fmt.Sprintf("rank %d of %d, which listens at %s, waits for %s", o.Rank, o.Size, listener.Addr(),
			missing(conns, o.Rank, list))
		if refused != "" {
			text += "; it has refused " + refused
		}
		return text
	}
	w.set(text)
	refuse := func(g guest) {
		w.mu.Lock()
		refused = fmt.Sprintf("%s: %v", g.conn.RemoteAddr(), g.err)
		w.mu.Unlock()
		g.conn.Close()
	}
	for missing := o.Size - 1 - o.Rank; missing > 0; {
		select {
		case <-ctx.Done():
			listener.Close()
			go func() { busy.Wait(); close(guests) }()
			for g := range guests {
				switch {
				case g.conn == nil:
				case g.err != nil && !errors.Is(g.err, context.Cause(ctx)):
					refuse(g)
				default:
					g.conn.Close()
				}
			}
			return nil, fmt.Errorf("tcp: %s: %w", text(), context.Cause(ctx))
		case g := <-guests:
			switch {
			case g.conn == nil:
				return nil, fmt.Errorf("tcp: rank %d listens at %s: %w", o.Rank, listener.Addr(), g.err)
			case g.err != nil:
				refuse(g)
			case conns[g.h.rank] != nil:
				// The new process was accepted and finds the connection closed. Which of the two is
				// right cannot be determined here.
				g.conn.Close()
				return nil, fmt.Errorf("tcp: two processes, at %s and %s, both have rank %d (%s)",
					conns[g.h.rank].RemoteAddr(), g.conn.RemoteAddr(), g.h.rank, RankVariable)
			default:
				address, err := g.h.address(g.conn)
				if err != nil {
					g.conn.Close()
					return nil, err
				}
				w.mu.Lock()
				conns[g.h.rank], addresses[g.h.rank] = g.conn, address
				w.mu.Unlock()
				missing--
			}
		}
	}
	return addresses, nil
}

// address returns the address at which other ranks reach the rank that sent hello over the
// connection. It has no host if the rank is on this machine and did not name one. The other ranks
// then use the name of rank 0, because the address seen here may be valid on this machine only.
func (h hello) address(conn net.Conn) (string, error) {
	host := h.host
	if host == "" {
		seen, _, err := net.SplitHostPort(conn.RemoteAddr().String())
		if err != nil {
			return "", fmt.Errorf("tcp: address of rank %d: %w", h.rank, err)
		}
		if host = seen; isLoopback(seen) {
			host = ""
		}
	}
	return net.JoinHostPort(host, fmt.Sprint(h.port)), nil
}

// sendList sends the list of addresses to all ranks.
func sendList(ctx context.Context, conns []net.Conn, addresses []string) error {
	var list []byte
	for _, address := range addresses {
		list = binary.LittleEndian.AppendUint16(list, uint16(len(address)))
		list = append(list, address...)
	}
	for r, conn := range conns[1:] {
		if _, err := within(ctx, conn, greetTime, func() (int, error) { return conn.Write(list) }); err != nil {
			return fmt.Errorf("tcp: rank 0 cannot send the addresses to rank %d (%s): %w", r+1, conn.RemoteAddr(), err)
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
			return nil, fmt.Errorf("it sent an address of %d bytes; the limit is %d", n, maxText)
		}
		if _, err := io.ReadFull(r, b[:n]); err != nil {
			return nil, err
		}
		list = append(list, string(b[:n]))
	}
	return slices.Clip(list), nil
}
