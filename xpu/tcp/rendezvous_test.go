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

	"mula/xpu"
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

// Ranks that do not belong to the world are told why, and rank 0 says who it has refused; the right ones still come in.
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
			wants(t, "rank 0", zero, "waits for ranks 1", "has refused", c.says)
			if !errors.Is(zero, context.Canceled) {
				t.Errorf("rank 0: %v", zero)
			}
		})
	}
}

func TestStrangers(t *testing.T) {
	listener := listen(t)
	o := Options{Address: listener.Addr().String(), Size: 2, Secret: "s3cret"}
	links := make([]xpu.Link, 2)
	errs := make([]error, 2)
	var running sync.WaitGroup
	running.Go(func() { links[0], errs[0] = join(t.Context(), o, listener) })

	dial := func() net.Conn {
		conn, err := net.Dial("tcp", o.Address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	dial() // says nothing, and stays
	dial().Close()
	for _, says := range []string{"GET / HTTP/1.1\r\nHost: rank0\r\n\r\n" + strings.Repeat("x", helloBytes), magic + strings.Repeat("\x01", 4), magic + "\x01\x00\x00\x00" + strings.Repeat("\xff", 1000)} {
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
	links[1], errs[1] = Join(t.Context(), one)
	running.Wait()
	for r, err := range errs {
		if err != nil {
			t.Fatalf("rank %d: %v", r, err)
		}
	}
	for _, link := range links {
		running.Go(func() { link.Close() })
	}
	running.Wait()
}

// What answers at the address is not mula, is an older one, or does not know the secret.
func TestWrongServers(t *testing.T) {
	for _, c := range []struct{ name, answer, says string }{
		{"another protocol", "HTTP/1.1 400 Bad Request\r\n\r\n" + strings.Repeat("x", 1000), "not mula"},
		{"another version", magic + "\x09\x00\x00\x00" + strings.Repeat("n", 32), "version 9"},
		{"no secret", magic + "\x01\x00\x00\x00" + strings.Repeat("n", 32) + "\x00\x00" + strings.Repeat("n", answerBytes-2), SecretVariable},
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

// A rank that is there before rank 0 waits for it, also when somebody else has just had the address.
func TestRankZeroComesLate(t *testing.T) {
	first := listen(t)
	address := first.Addr().String()
	o := Options{Address: address, Rank: 1, Size: 2, Secret: "s3cret"}
	links := make([]xpu.Link, 2)
	errs := make([]error, 2)
	var running sync.WaitGroup
	running.Go(func() { links[1], errs[1] = Join(t.Context(), o) })
	conn, err := first.Accept() // an earlier run that is about to end
	if err != nil {
		t.Fatal(err)
	}
	first.Close()
	conn.Close()
	zero := o
	zero.Rank = 0
	links[0], errs[0] = Join(t.Context(), zero)
	running.Wait()
	for r, err := range errs {
		if err != nil {
			t.Fatalf("rank %d: %v", r, err)
		}
		running.Go(func() { links[r].Close() })
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
	names := []string{RankVariable, SizeVariable, AddressVariable, SecretVariable}
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
	} {
		for i, name := range names {
			t.Setenv(name, c.values[i])
		}
		o, is, err := FromEnvironment()
		if !is {
			t.Errorf("%q is no rank", c.values)
		}
		if c.says != "" {
			wants(t, strings.Join(c.values, " "), err, c.says)
		} else if err != nil || o.Secret != c.values[3] || o.Address != c.values[2] {
			t.Errorf("%q: %+v, %v", c.values, o, err)
		}
	}
}

func TestList(t *testing.T) {
	if list, err := readList(strings.NewReader("\x00\x00\x03\x00a:1"), 2); err != nil || !slices.Equal(list, []string{"", "a:1"}) {
		t.Errorf("%q, %v", list, err)
	}
	_, err := readList(strings.NewReader("\xff\xff"+strings.Repeat("x", 70000)), 2)
	wants(t, "a long address", err, "65535 bytes")
	if _, err := readList(strings.NewReader("\x03\x00a"), 1); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a short list: %v", err)
	}
}
