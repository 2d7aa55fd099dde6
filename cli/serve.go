package cli

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"syscall"

	"github.com/urfave/cli/v2"
	"golang.org/x/sync/errgroup"

	"mula/internal/quantity"
	"mula/serve"
	"mula/serve/flight"
)

func serveCommand() *cli.Command {
	return &cli.Command{
		Name:  "serve",
		Usage: "serve the samples of a plan over HTTP, a unix socket and Arrow Flight",
		Description: "Prints one line of JSON when it is ready, and runs until stopped. Any Arrow library can read " +
			"its streams:\n" +
			"GET /v1/stream?batch_size=512&rank=0&world=8&from=0. docs/guides/serve.md is a tour, " +
			"docs/formats/serve.md names every request.\n\n" +
			"Example: mula serve --plan plan.json --listen 127.0.0.1:8080 --socket /run/user/1000/mula.sock",
		Flags: []cli.Flag{
			planFlag, shardsFlag,
			&cli.StringFlag{Name: "listen",
				Usage: "serve HTTP at `HOST:PORT`; port 0 chooses a free port, \"\" disables HTTP (default: " +
					"127.0.0.1:0, disabled with --socket or --flight)"},
			&cli.StringFlag{Name: "socket",
				Usage: "serve HTTP at the unix socket `PATH`, for this user only"},
			&cli.StringFlag{Name: "flight", Usage: "serve Arrow Flight at `HOST:PORT`"},
			&cli.StringFlag{Name: "token-file",
				Usage: "require the bearer token in `FILE` (mode 0600), except at the unix socket"},
			&cli.StringFlag{Name: "tls-cert", Usage: "encrypt with the certificate in `FILE` (PEM); requires " +
				"--tls-key"},
			&cli.StringFlag{Name: "tls-key", Usage: "private key of the certificate, in `FILE` (PEM)"},
			&cli.BoolFlag{Name: "insecure",
				Usage: "allow other machines to connect without a token or encryption"},
			&cli.IntFlag{Name: "max-streams", Usage: "serve at most `N` streams at once", Value: 4096},
			&cli.StringFlag{Name: "memory",
				Usage: "limit the records of all streams to `BYTES`, such as 512M or 4Gi", Value: "1Gi"},
			verifyFlag, reverifyFlag,
		},
		Action: runServe,
	}
}

// maxToken is far above the length of usual tokens.
const maxToken = 4096

// leastMemory is enough for a record of a usual size and for records read ahead.
const leastMemory = 1 << 20

func runServe(c *cli.Context) error {
	if err := noOperands(c); err != nil {
		return err
	}
	if n := c.Int("max-streams"); n < 1 || n > 1<<20 {
		return usagef("--max-streams is %d; it must be from 1 to %s", n, quantity.Grouped(1<<20))
	}
	// An unset variable in a script becomes an empty value. Ignoring such a flag could remove a
	// protection.
	for _, flag := range []string{"socket", "flight", "token-file", "tls-cert", "tls-key", "memory"} {
		if c.IsSet(flag) && c.String(flag) == "" {
			return usagef("--%s is empty; set a value, or remove the flag", flag)
		}
	}
	memory, err := amount(c, "memory")
	if err != nil {
		return err
	}
	if memory < leastMemory || memory > 1<<50 {
		return usagef("--memory is %s; it must be from %s to %s bytes", c.String("memory"),
			quantity.Grouped(leastMemory), quantity.Grouped(1<<50))
	}
	at := addresses{listen: c.String("listen"), socket: c.String("socket"), flight: c.String("flight")}
	if at == (addresses{}) {
		if c.IsSet("listen") {
			return usagef("no address to listen at; use --listen, --socket or --flight")
		}
		at.listen = "127.0.0.1:0"
	}
	options, err := verification(c)
	if err != nil {
		return err
	}
	access, err := readAccess(c)
	if err != nil {
		return err
	}
	if err := guarded(c, "listen", at.listen, access); err != nil {
		return err
	}
	if err := guarded(c, "flight", at.flight, access); err != nil {
		return err
	}
	data, err := openPlanWith(c, options)
	if err != nil {
		return err
	}
	defer data.Close()
	service, err := serve.New(c.Context, data, serve.Options{MaxStreams: c.Int("max-streams"), Memory: memory,
		Report: func(text string) {
			fmt.Fprintf(c.App.ErrWriter, "warning: %s\n", text)
		}})
	if err != nil {
		return err
	}
	defer service.Close()
	debug.SetMemoryLimit(memory + baseMemory)
	return listen(c, service, at, access)
}

// addresses are the addresses to listen at, "" for none.
type addresses struct{ listen, socket, flight string }

// baseMemory is added to the memory of records for the soft limit of Go's garbage collector.
const baseMemory = 256 << 20

// listen opens the addresses, prints them, and serves until it is stopped.
func listen(c *cli.Context, service *serve.Service, at addresses, access serve.Access) error {
	var said struct {
		HTTP   string `json:"http,omitempty"`
		Socket string `json:"socket,omitempty"`
		Flight string `json:"flight,omitempty"`
		Plan   string `json:"plan"`
	}
	said.Plan = service.Fingerprint()
	var open []net.Listener
	defer func() {
		for _, l := range open {
			l.Close()
		}
	}()
	group, ctx := errgroup.WithContext(c.Context)
	var begin []func() error
	if address := at.listen; address != "" {
		l, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
		if err != nil {
			return fmt.Errorf("--listen: %w", err)
		}
		open = append(open, l)
		said.HTTP = "http://" + reached(address, l)
		if access.TLS != nil {
			said.HTTP = "https://" + reached(address, l)
		}
		begin = append(begin, func() error { return service.Serve(ctx, l, access) })
	}
	if path := at.socket; path != "" {
		l, err := serve.ListenUnix(path)
		if err != nil {
			return fmt.Errorf("--%w", err)
		}
		open = append(open, l)
		if said.Socket, err = filepath.Abs(path); err != nil {
			return fmt.Errorf("--socket: %w", err)
		}
		begin = append(begin, func() error { return service.Serve(ctx, l, serve.Access{}) })
	}
	if address := at.flight; address != "" {
		l, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
		if err != nil {
			return fmt.Errorf("--flight: %w", err)
		}
		open = append(open, l)
		said.Flight = "grpc://" + reached(address, l)
		if access.TLS != nil {
			said.Flight = "grpc+tls://" + reached(address, l)
		}
		begin = append(begin, func() error { return flight.Serve(ctx, service, l, access) })
	}
	line, err := json.Marshal(said)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(c.App.Writer, "%s\n", line); err != nil {
		return fmt.Errorf("writing to standard output: %w", err)
	}
	for _, f := range begin {
		group.Go(f)
	}
	return group.Wait()
}

// reached returns the address at which a client on this machine reaches a listener: the given host,
// or the loopback address if the host means all addresses of the machine.
func reached(address string, l net.Listener) string {
	host, _, err := net.SplitHostPort(address)
	tcp, ok := l.Addr().(*net.TCPAddr)
	if err != nil || !ok {
		return l.Addr().String()
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
		if ip != nil && ip.To4() == nil {
			host = "::1"
		}
	}
	return net.JoinHostPort(host, strconv.Itoa(tcp.Port))
}

// readAccess reads the token and the certificate.
func readAccess(c *cli.Context) (a serve.Access, err error) {
	if path := c.String("token-file"); path != "" {
		text, err := readSecret(path)
		if err != nil {
			return a, fmt.Errorf("--token-file: %w", err)
		}
		text = bytes.TrimSpace(text)
		if len(text) == 0 || len(text) > maxToken || bytes.ContainsFunc(text, func(r rune) bool {
			return r <= ' ' ||
				r > '~'
		}) {
			return a, fmt.Errorf("--token-file: %s must contain one word of at most %d visible ASCII characters", path,
				maxToken)
		}
		a.Token = string(text)
	}
	cert, key := c.String("tls-cert"), c.String("tls-key")
	if (cert == "") != (key == "") {
		return a, usagef("--tls-cert and --tls-key require each other")
	}
	if cert != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return a, fmt.Errorf("--tls-cert, --tls-key: %w", err)
		}
		a.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
	}
	return a, nil
}

// readSecret reads a file that other users must not be able to read. The group may read a file of
// another user, because this user is in the group or cannot read the file.
func readSecret(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	others := fs.FileMode(0o077)
	if s, ok := info.Sys().(*syscall.Stat_t); ok && int(s.Uid) != os.Getuid() {
		others = 0o007
	}
	if info.Mode().Perm()&others != 0 {
		return nil, fmt.Errorf("%s is accessible to other users (mode %04o); run `chmod 600 %s`, "+
			"and replace the token if it may have leaked",
			path, info.Mode().Perm(), path)
	}
	return io.ReadAll(io.LimitReader(f, 2*maxToken))
}

// guarded returns an error if other machines can reach an address without a token. It warns if the
// token is sent unencrypted.
func guarded(c *cli.Context, flag, address string, a serve.Access) error {
	if address == "" || a.TLS != nil && a.Token != "" || c.Bool("insecure") {
		return nil
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return usagef("--%s is %q; it must be HOST:PORT, such as 127.0.0.1:8080", flag, address)
	}
	if host != "" {
		found, err := net.DefaultResolver.LookupIPAddr(c.Context, host)
		if err != nil {
			return fmt.Errorf("--%s: %w", flag, err)
		}
		outside := false
		for _, ip := range found {
			outside = outside || !ip.IP.IsLoopback()
		}
		if !outside {
			return nil
		}
	}
	if a.Token != "" {
		fmt.Fprintf(c.App.ErrWriter, "warning: the token for --%s %s is sent unencrypted; "+
			"use --tls-cert and --tls-key\n", flag, address)
		return nil
	}
	return usagef("other machines could read the data at --%s %s without a token; use --token-file, "+
		"or allow it with --insecure", flag, address)
}
