package tcp

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"mula/xpu/comm"
)

func listen(t *testing.T) net.Listener {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	return listener
}

func wants(t *testing.T, who string, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("%s: no error", who)
		return
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%s: %q does not say %q", who, err, part)
		}
	}
}

// Ranks that do not belong to the world are told why, and rank 0 says who it has refused; the right
// ones still come in.
func TestRefused(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*Options)
		says   string
	}{
		{"secret", func(o *Options) { o.Secret = "other" }, SecretVariable},
		{"size", func(o *Options) { o.Size = 3 }, "a world of 3"},
		{"rank 0", func(o *Options) { o.Rank = 2; o.Size = 3 }, "a world of 3"},
	} {
		t.Run(c.name, func(t *testing.T) {
			listener := listen(t)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			right := Options{Address: listener.Addr().String(), Size: 2, Secret: "s3cret"}
			var zero error
			var running sync.WaitGroup
			running.Go(func() { _, zero = join(ctx, right, listener) })
			wrong := right
			wrong.Rank = 1
			c.change(&wrong)
			_, err := Join(t.Context(), wrong)
			wants(t, "the wrong rank", err, "refuses", c.says)
			cancel()
			running.Wait()
			wants(t, "rank 0", zero, "waits for rank 1", "has refused", c.says)
			if !errors.Is(zero, context.Canceled) {
				t.Errorf("rank 0: %v", zero)
			}
		})
	}
}

// Rank 0 listens at the socket of its first group again. A rank of the new group that comes while
// rank 0 still waits in the group before is refused, dials again, and joins.
func TestNextGroup(t *testing.T) {
	l := listen(t)
	f, err := l.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	fd := int(f.Fd())
	keptFiles.byNumber[fd] = f // a second file of the descriptor would close it twice
	t.Cleanup(func() {
		delete(keptFiles.byNumber, fd)
		f.Close()
	})
	before := Options{Address: l.Addr().String(), Size: 2, Secret: "before", ListenFD: fd, KeepFD: true,
		interval: time.Millisecond}
	waiting, until := told()
	before.Waiting = waiting
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var running sync.WaitGroup
	running.Go(func() {
		_, err := Join(ctx, before)
		wants(t, "rank 0 of the group before", err, "waits for rank 1", "has refused")
	})
	after := before
	after.Secret, after.Generation, after.Waiting = "after", 1, nil
	errs, links := make([]error, 2), make([]comm.Transport, 2)
	join := func(rank int) {
		o := after
		o.Rank = rank
		links[rank], errs[rank] = Join(t.Context(), o)
	}
	var group sync.WaitGroup
	group.Go(func() { join(1) })
	until("has refused")
	cancel()
	running.Wait()
	group.Go(func() { join(0) })
	group.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		group.Go(func() { link.Close() })
	}
	group.Wait()
}

func TestStrangers(t *testing.T) {
	listener := listen(t)
	o := Options{Address: listener.Addr().String(), Size: 2, Secret: "s3cret"}
	transports := make([]comm.Transport, 2)
	errs := make([]error, 2)
	var running sync.WaitGroup
	running.Go(func() { transports[0], errs[0] = join(t.Context(), o, listener) })

	dial := func() net.Conn {
		conn, err := net.Dial("tcp", o.Address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	dial() // sends nothing, and stays
	dial().Close()
	for _, says := range []string{"GET / HTTP/1.1\r\nHost: rank0\r\n\r\n" + strings.Repeat("x", helloBytes),
		magic + strings.Repeat("\x01", 4), magic + "\x02\x00\x00\x00" + strings.Repeat("\xff", 1000)} {
		conn := dial()
		if _, err := conn.Write([]byte(says)); err != nil {
			t.Fatal(err)
		}
		answer, _ := io.ReadAll(conn) // until it is closed
		if len(answer) < greetingBytes {
			t.Errorf("%q gets %q", says[:8], answer)
		}
		if strings.HasPrefix(says, magic+"\x01\x01") && !strings.Contains(string(answer), "version") {
			t.Errorf("another version gets %q", answer)
		}
	}

	one := o
	one.Rank = 1
	transports[1], errs[1] = Join(t.Context(), one)
	running.Wait()
	for r, err := range errs {
		if err != nil {
			t.Fatalf("rank %d: %v", r, err)
		}
	}
	for _, transport := range transports {
		running.Go(func() { transport.Close() })
	}
	running.Wait()
}

// What answers at the address is not mula, is an older one, or does not know the secret.
func TestWrongServers(t *testing.T) {
	for _, c := range []struct{ name, answer, says string }{
		{"another protocol", "HTTP/1.1 400 Bad Request\r\n\r\n" + strings.Repeat("x", 1000), "not mula"},
		{"another version", magic + "\x09\x00\x00\x00" + strings.Repeat("n", 32), "version 9"},
		{"no secret", magic + "\x02\x00\x00\x00" + strings.Repeat("n", 32) + "\x00\x00" + strings.Repeat("n",
			answerBytes-2), SecretVariable},
	} {
		t.Run(c.name, func(t *testing.T) {
			listener := listen(t)
			go func() {
				conn, err := listener.Accept()
				if err != nil {
					return
				}
				defer conn.Close()
				conn.Write([]byte(c.answer))
				io.Copy(io.Discard, conn)
			}()
			_, err := Join(t.Context(), Options{Address: listener.Addr().String(), Rank: 1, Size: 2, Secret: "s3cret"})
			wants(t, "rank 1", err, c.says)
		})
	}
}

func TestTwoOfOneRank(t *testing.T) {
	listener := listen(t)
	o := Options{Address: listener.Addr().String(), Size: 3, Secret: "s3cret"}
	errs := make([]error, 3)
	var running sync.WaitGroup
	running.Go(func() { _, errs[0] = join(t.Context(), o, listener) })
	for i := 1; i < 3; i++ {
		running.Go(func() {
			one := o
			one.Rank = 1
			_, errs[i] = Join(t.Context(), one)
		})
	}
	running.Wait()
	wants(t, "rank 0", errs[0], "two processes", "rank 1")
	wants(t, "a rank 1", errs[1], "closed the connection")
	wants(t, "a rank 1", errs[2], "closed the connection")
}

// A rank that starts before rank 0 waits for it, also if another process has just used the address.
func TestRankZeroComesLate(t *testing.T) {
	first := listen(t)
	address := first.Addr().String()
	o := Options{Address: address, Rank: 1, Size: 2, Secret: "s3cret"}
	transports := make([]comm.Transport, 2)
	errs := make([]error, 2)
	var running sync.WaitGroup
	running.Go(func() { transports[1], errs[1] = Join(t.Context(), o) })
	conn, err := first.Accept() // an earlier run that is about to end
	if err != nil {
		t.Fatal(err)
	}
	first.Close()
	conn.Close()
	zero := o
	zero.Rank = 0
	transports[0], errs[0] = Join(t.Context(), zero)
	running.Wait()
	for r, err := range errs {
		if err != nil {
			t.Fatalf("rank %d: %v", r, err)
		}
		running.Go(func() { transports[r].Close() })
	}
	running.Wait()
}

func TestNobodyThere(t *testing.T) {
	listener := listen(t)
	address := listener.Addr().String()
	listener.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := Join(ctx, Options{Address: address, Rank: 1, Size: 2, Secret: "s3cret"})
	wants(t, "rank 1", err, address, AddressVariable)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
}

func TestFromEnvironment(t *testing.T) {
	names := []string{RankVariable, SizeVariable, AddressVariable, SecretVariable, ListenVariable, AnnounceVariable,
		JoinTimeoutVariable}
	for _, c := range []struct {
		values []string
		says   string // the error, or nothing
	}{
		{[]string{"1", "4", "node-1:29400", "x"}, ""},
		{[]string{"one", "4", "node-1:29400", "x"}, RankVariable},
		{[]string{"", "4", "node-1:29400", "x"}, RankVariable},
		{[]string{"1", "", "node-1:29400", "x"}, SizeVariable},
		{[]string{"1", "0", "node-1:29400", "x"}, SizeVariable},
		{[]string{"1", "99999999", "node-1:29400", "x"}, SizeVariable},
		{[]string{"4", "4", "node-1:29400", "x"}, "from 0 to 3"},
		{[]string{"-1", "4", "node-1:29400", "x"}, RankVariable},
		{[]string{"1", "4", "node-1", "x"}, AddressVariable},
		{[]string{"1", "4", "node-1:29400", ""}, SecretVariable},
		{[]string{"0", "1", "", ""}, ""},
		{[]string{"1", "4", "node-1:29400", "x", "0.0.0.0:29400", "10.0.0.7", "90s"}, ""},
		{[]string{"1", "4", "node-1:29400", "x", "0.0.0.0"}, ListenVariable},
		{[]string{"1", "4", "node-1:29400", "x", "", "10.0.0.7:x"}, AnnounceVariable},
		{[]string{"1", "4", "node-1:29400", "x", "", "", "90"}, JoinTimeoutVariable},
		{[]string{"1", "4", "node-1:29400", "x", "", "", "-1s"}, JoinTimeoutVariable},
	} {
		c.values = append(c.values, make([]string, len(names)-len(c.values))...)
		limit := defaultLimit
		for i, name := range names {
			t.Setenv(name, c.values[i])
		}
		if c.values[6] == "90s" {
			limit = 90 * time.Second
		}
		o, is, err := FromEnvironment()
		if !is {
			t.Errorf("%q is no rank", c.values)
		}
		if c.says != "" {
			wants(t, strings.Join(c.values, " "), err, c.says)
		} else if err != nil || o.Secret != c.values[3] || o.Address != c.values[2] || o.Listen != c.values[4] ||
			o.Announce != c.values[5] || o.Limit != limit {
			t.Errorf("%q: %+v, %v", c.values, o, err)
		}
	}
}

func TestList(t *testing.T) {
	if list, err := readList(strings.NewReader("\x00\x00\x03\x00a:1"), 2); err != nil ||
		!slices.Equal(list, []string{"", "a:1"}) {
		t.Errorf("%q, %v", list, err)
	}
	_, err := readList(strings.NewReader("\xff\xff"+strings.Repeat("x", 70000)), 2)
	wants(t, "a long address", err, "65535 bytes")
	if _, err := readList(strings.NewReader("\x03\x00a"), 1); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a short list: %v", err)
	}
}

// An error that is known is returned although the context ends at the same moment; an error of the
// connection is not, because the end of the context may have caused it.
func TestWithinKeepsKnownErrors(t *testing.T) {
	refused := errors.New("it refuses this rank")
	read := func(conn net.Conn) error { _, err := io.ReadFull(conn, make([]byte, 1)); return err }
	for _, c := range []struct {
		name string
		f    func(conn net.Conn, cancel func()) error
		want error
	}{
		{"refusal", func(_ net.Conn, cancel func()) error { cancel(); return refused }, refused},
		{"success", func(_ net.Conn, cancel func()) error { cancel(); return nil }, context.Canceled},
		{"read", func(conn net.Conn, cancel func()) error { cancel(); return read(conn) }, context.Canceled},
		{"end of the connection", func(_ net.Conn, cancel func()) error { cancel(); return io.ErrUnexpectedEOF },
			context.Canceled},
		{"refusal before", func(net.Conn, func()) error { return refused }, refused},
	} {
		t.Run(c.name, func(t *testing.T) {
			here, there := net.Pipe()
			defer here.Close()
			defer there.Close()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			_, err := within(ctx, here, 0, func() (struct{}, error) { return struct{}{}, c.f(here, cancel) })
			if !errors.Is(err, c.want) {
				t.Errorf("error %v, not %v", err, c.want)
			}
		})
	}
}

// told returns a function for Options.Waiting, and a function that waits until a text has all
// parts.
func told() (waiting func(string), until func(parts ...string)) {
	texts := make(chan string, 1)
	waiting = func(text string) {
		select {
		case texts <- text:
		default: // there will be another
		}
	}
	until = func(parts ...string) {
		for text := range texts {
			if !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(text, part) }) {
				return
			}
		}
	}
	return waiting, until
}

// While ranks are missing, the waiting ranks print their names. When the missing ranks come, all
// continue.
func TestMissingRanksAreNamed(t *testing.T) {
	listener := listen(t)
	const size = 5
	transports := make([]comm.Transport, size)
	errs := make([]error, size)
	var running sync.WaitGroup
	start := func(rank int, waiting func(string)) {
		o := Options{Address: listener.Addr().String(), Rank: rank, Size: size, Secret: "s3cret", Limit: time.Hour,
			Waiting: waiting, interval: time.Millisecond}
		running.Go(func() {
			if rank == 0 {
				transports[0], errs[0] = join(t.Context(), o, listener)
			} else {
				transports[rank], errs[rank] = Join(t.Context(), o)
			}
		})
	}
	zero, untilZero := told()
	start(0, zero)
	untilZero("rank 0 of 5", listener.Addr().String(), "waits for ranks 1, 2, 3, 4 ", "at most 1h")
	two, untilTwo := told()
	start(2, two)
	untilTwo("rank 2 of 5", "has reached rank 0", AddressVariable, "see the message of rank 0")
	untilZero("waits for ranks 1, 3, 4 ")
	for _, rank := range []int{1, 3, 4} {
		start(rank, nil)
	}
	running.Wait()
	for r, err := range errs {
		if err != nil {
			t.Fatalf("rank %d: %v", r, err)
		}
		running.Go(func() { transports[r].Close() })
	}
	running.Wait()
}

// A rank that has waited for the time limit names the missing ranks, and the variable that sets the
// limit.
func TestJoinTimeLimit(t *testing.T) {
	listener := listen(t)
	o := Options{Address: listener.Addr().String(), Size: 3, Secret: "s3cret", Limit: time.Millisecond}
	_, err := join(t.Context(), o, listener)
	wants(t, "rank 0", err, "rank 0 of 3", "waits for ranks 1, 2:", "within 1ms", JoinTimeoutVariable)
	o.Rank = 2
	_, err = Join(t.Context(), o)
	wants(t, "rank 2", err, "rank 2 of 3", "rank 0 at "+o.Address, AddressVariable, "within 1ms", JoinTimeoutVariable)
}

// What a rank has found out about rank 0 is part of the error when the wait is ended.
func TestStoppedWhileDialing(t *testing.T) {
	listener := listen(t)
	address := listener.Addr().String()
	listener.Close()
	waiting, until := told()
	ctx, cancel := context.WithCancel(t.Context())
	var err error
	var running sync.WaitGroup
	running.Go(func() {
		_, err = Join(ctx, Options{Address: address, Rank: 1, Size: 2, Secret: "s3cret", Waiting: waiting,
			interval: time.Millisecond})
	})
	until("rank 1 of 2", address, "refused")
	cancel()
	running.Wait()
	wants(t, "rank 1", err, address, AddressVariable, "refused")
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}

// forward is a service in front of a listener, as Kubernetes has them: it has an address of its
// own, and its clients are not seen behind it.
func forward(t *testing.T, to string) string {
	t.Helper()
	service := listen(t)
	go func() {
		for {
			in, err := service.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				in.Close()
				continue
			}
			for _, pair := range [][2]net.Conn{{in, out}, {out, in}} {
				go func() {
					io.Copy(pair[0], pair[1])
					pair[0].(*net.TCPConn).CloseWrite()
				}()
			}
		}
	}()
	return service.Addr().String()
}

// Rank 0 listens at its own address if MULA_ADDRESS is the address of a service; the others
// announce their addresses.
func TestBehindService(t *testing.T) {
	const size = 4
	zero := Options{Size: size, Secret: "s3cret", Address: "192.0.2.1:1", Listen: "127.0.0.1:0"}
	listener, err := zero.listen(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	service := forward(t, listener.Addr().String())
	transports := make([]comm.Transport, size)
	errs := make([]error, size)
	var running sync.WaitGroup
	for r := range size {
		running.Go(func() {
			o := Options{Rank: r, Size: size, Secret: "s3cret", Address: service}
			switch r {
			case 0:
				o.Listen = "127.0.0.1:0"
				transports[0], errs[0] = join(t.Context(), o, listener)
				return
			case 1:
				o.Listen = "127.0.0.1:0" // others reach it there
			case 2:
				one, err := Options{Rank: 2, Listen: "127.0.0.1:0"}.listen(t.Context())
				if err != nil {
					errs[r] = err
					return
				}
				o.Announce = forward(t, one.Addr().String())
				transports[r], errs[r] = join(t.Context(), o, one)
				return
			case 3:
				o.Announce = "127.0.0.1" // at the port that the system gives
			}
			transports[r], errs[r] = Join(t.Context(), o)
		})
	}
	running.Wait()
	for r, err := range errs {
		if err != nil {
			t.Fatalf("rank %d: %v", r, err)
		}
	}
	for _, transport := range transports {
		running.Go(func() {
			if err := transport.Barrier(t.Context()); err != nil {
				t.Errorf("rank %d: %v", transport.Rank(), err)
			}
			transport.Close()
		})
	}
	running.Wait()
}

// An address that cannot be bound: the error names the variable that helps.
func TestCannotListen(t *testing.T) {
	_, err := Join(t.Context(), Options{Address: "192.0.2.1:29500", Size: 2, Secret: "s3cret"})
	wants(t, "another machine's address", err, "192.0.2.1:29500", AddressVariable, "set "+ListenVariable)
	listener := listen(t)
	_, err = Join(t.Context(), Options{Address: "192.0.2.1:29500", Listen: listener.Addr().String(), Size: 2,
		Secret: "s3cret"})
	wants(t, "a port in use", err, listener.Addr().String(), ListenVariable, "another port")
}

func TestAnnounced(t *testing.T) {
	for _, c := range []struct {
		text, host string
		port       uint32
	}{
		{"", "", 7}, {"node3", "node3", 7}, {"node3:29501", "node3", 29501}, {"10.0.0.7", "10.0.0.7", 7}, {"fd00::7",
			"fd00::7", 7},
		{"[fd00::7]:9", "fd00::7", 9}, {"[fd00::7]", "fd00::7", 7},
		{"node3:", "", 0}, {"node3:0", "", 0}, {"node3:65536", "", 0}, {":9", "", 0}, {"a:b:c", "", 0}, {"two words",
			"", 0}, {strings.Repeat("x", maxHost+1), "", 0},
	} {
		host, port, err := Options{Announce: c.text}.announced(7)
		if c.port == 0 {
			wants(t, c.text, err, AnnounceVariable)
		} else if err != nil || host != c.host || port != c.port {
			t.Errorf("%q: %q, %d, %v", c.text, host, port, err)
		}
	}
}
