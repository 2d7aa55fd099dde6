package serve

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"syscall"
	"time"
)

// Limits of connections.
const (
	headerTime  = 10 * time.Second // for the request to come
	idleTime    = 2 * time.Minute  // between the requests of a connection
	headerBytes = 2 * maxRequest
	spare       = 64 // connections beside those of streams
)

// ListenUnix listens on a unix socket that only this user may use. A socket that a server has left
// behind is replaced; one that a program still has open, of whatever kind, is not. The listener
// removes the socket when it is closed, unless another one is there by then.
func ListenUnix(path string) (net.Listener, error) {
	if len(path) > maxSocketPath {
		return nil, fmt.Errorf("socket: %s has %d bytes, and the path of a unix socket may have %d: name a shorter "+
			"one, or one from the current folder",
			path, len(path), maxSocketPath)
	}
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, fmt.Errorf("socket: %w", err)
	case info.Mode()&fs.ModeSocket == 0:
		return nil, fmt.Errorf("socket: %s is there and is no socket; name another path", path)
	default:
		c, err := net.Dial("unix", path)
		if err == nil {
			c.Close()
			return nil, fmt.Errorf("socket: another program listens at %s; name another path, or stop it", path)
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			// as it is where nobody has it open; one of datagrams that is open gives EPROTOTYPE
			return nil, fmt.Errorf("socket: %s may be another program's: name another path, or remove it: %w", path,
				err)
		}
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("socket: %w", err)
		}
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, fmt.Errorf("socket: %w", err)
	}
	made, err := os.Lstat(path)
	if err != nil {
		l.Close()
		return nil, fmt.Errorf("socket: %w", err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	return &unixListener{Listener: l, path: path, made: made}, nil
}

// maxSocketPath is how many bytes the path of a unix socket may have: 107 with Linux, 103 with
// macOS.
const maxSocketPath = len(syscall.RawSockaddrUnix{}.Path) - 1

// unixListener removes its socket, and no other.
type unixListener struct {
	net.Listener
	path string
	made os.FileInfo
	once sync.Once
}

func (l *unixListener) Close() error {
	l.once.Do(func() { // while the socket is open, no other file has its number
		if there, err := os.Lstat(l.path); err == nil && os.SameFile(there, l.made) {
			os.Remove(l.path)
		}
	})
	return l.Listener.Close()
}

// Access says who is answered, and how.
type Access struct {
	Token string      // what clients must name; "" asks for none
	TLS   *tls.Config // nil for connections that are not encrypted
}

// Serve answers HTTP requests that come to a listener, until the context ends. Then the service
// stops, streams have [Options.Grace] to end, and connections are cut. It closes the listener.
func (s *Service) Serve(ctx context.Context, l net.Listener, a Access) error {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true) // with a connection a stream, its back-pressure is the connection's
	cutting, cut := context.WithCancel(context.WithoutCancel(ctx))
	defer cut()
	server := &http.Server{Handler: s.Handler(a.Token), Protocols: protocols, ReadHeaderTimeout: headerTime,
		IdleTimeout: idleTime, MaxHeaderBytes: headerBytes,
		ErrorLog:    slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
		BaseContext: func(net.Listener) context.Context { return cutting },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connectionKey{}, c)
		}}
	l = s.Limit(l)
	if a.TLS != nil {
		l = tls.NewListener(l, a.TLS)
	}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(l) }()
	select {
	case err := <-ended:
		server.Close()
		return fmt.Errorf("serving at %s: %w", l.Addr(), err)
	case <-ctx.Done():
	}
	s.Stop()
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.o.Grace)
	defer cancel()
	if err := server.Shutdown(last); err != nil {
		server.Close()
	}
	shared := make(chan struct{})
	go func() { s.sharing.Wait(); close(shared) }()
	select {
	case <-shared:
	case <-last.Done():
		cut()
		<-shared
	}
	if err := <-ended; !errors.Is(err, http.ErrServerClosed) { // it failed at the moment at which the context ended
		return fmt.Errorf("serving at %s: %w", l.Addr(), err)
	}
	return nil
}

// Limit makes a listener accept as many connections at a time as the service's streams, and a few
// other requests, need. Who comes beyond them waits to be accepted.
func (s *Service) Limit(l net.Listener) net.Listener {
	return &limited{Listener: l, room: make(chan struct{}, s.o.MaxStreams+spare), closed: make(chan struct{})}
}

type limited struct {
	net.Listener
	room   chan struct{}
	closed chan struct{}
	once   sync.Once
}

func (l *limited) Accept() (net.Conn, error) {
	select {
	case l.room <- struct{}{}:
	case <-l.closed:
		return nil, net.ErrClosed
	}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.room
		return nil, err
	}
	return &limitedConn{Conn: c, done: func() { <-l.room }}, nil
}

func (l *limited) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

// limitedConn makes room when it is closed.
type limitedConn struct {
	net.Conn
	once sync.Once
	done func()
}

func (c *limitedConn) Close() error {
	defer c.once.Do(c.done)
	return c.Conn.Close()
}
