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
	headerTime  = 10 * time.Second // to receive a request
	idleTime    = 2 * time.Minute  // between the requests of a connection
	headerBytes = 2 * maxRequest
	spare       = 64 // connections in addition to the connections of streams
)

// ListenUnix listens on a unix socket that only this user may use. It replaces a stale socket of a
// stopped server, but not a socket that any program still has open. Closing the listener removes
// the socket, unless it has been replaced.
func ListenUnix(path string) (net.Listener, error) {
	if len(path) > maxSocketPath {
		return nil, fmt.Errorf("socket: %s has %d bytes, but the path of a unix socket can have only %d; use a "+
			"shorter path, such as a relative path",
			path, len(path), maxSocketPath)
	}
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, fmt.Errorf("socket: %w", err)
	case info.Mode()&fs.ModeSocket == 0:
		return nil, fmt.Errorf("socket: %s exists and is not a socket; use another path", path)
	default:
		c, err := net.Dial("unix", path)
		if err == nil {
			c.Close()
			return nil, fmt.Errorf("socket: another program listens at %s; use another path, or stop the program", path)
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			// stale sockets give ECONNREFUSED; an open datagram socket gives EPROTOTYPE
			return nil, fmt.Errorf("socket: %s may be in use by another program; use another path, or remove it: %w",
				path, err)
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

// maxSocketPath is the maximum length of the path of a unix socket in bytes: 107 on Linux, 103 on
// macOS.
const maxSocketPath = len(syscall.RawSockaddrUnix{}.Path) - 1

// unixListener removes its own socket when it is closed.
type unixListener struct {
	net.Listener
	path string
	made os.FileInfo
	once sync.Once
}

func (l *unixListener) Close() error {
	l.once.Do(func() { // while the socket is open, no other file can have its inode
		if there, err := os.Lstat(l.path); err == nil && os.SameFile(there, l.made) {
			os.Remove(l.path)
		}
	})
	return l.Listener.Close()
}

// Access configures authentication and encryption.
type Access struct {
	Token string      // bearer token that clients must send; "": no authentication
	TLS   *tls.Config // nil: no encryption
}

// Serve answers HTTP requests on a listener until ctx is cancelled. Then the service stops, streams
// have [Options.Grace] to end, and the remaining connections are closed. Serve closes the listener.
func (s *Service) Serve(ctx context.Context, l net.Listener, a Access) error {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true) // one stream per connection, so that the connection's back-pressure applies to the stream
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
	if err := <-ended; !errors.Is(err, http.ErrServerClosed) { // it failed just before ctx was cancelled
		return fmt.Errorf("serving at %s: %w", l.Addr(), err)
	}
	return nil
}

// Limit limits the number of open connections of a listener to [Options.MaxStreams] and a few more
// for other requests. Further connections wait to be accepted.
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

// limitedConn frees its place under the limit when it is closed.
type limitedConn struct {
	net.Conn
	once sync.Once
	done func()
}

func (c *limitedConn) Close() error {
	defer c.once.Do(c.done)
	return c.Conn.Close()
}
