// Package tcp links ranks that are processes, on one machine or on many, by a connection between
// each two of them.
package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"mula/xpu"
)

// Options say which rank this process is, and where the others are found.
type Options struct {
	Address string // host:port under which the other ranks reach rank 0; the host is known to all ranks by this name
	Rank    int
	Size    int // ranks in all
	// the same on all ranks; who does not know it may not join. It is never sent. What ranks send
	// is not encrypted.
	Secret string

	// host:port that this rank binds; "" is Address for rank 0, and a free port of all interfaces
	// for the others
	Listen string
	// host or host:port under which others reach this rank; "" is the address that rank 0 sees.
	// Rank 0 has Address instead.
	Announce string

	Limit time.Duration // how long Join waits for the other ranks; 0 is without limit
	// if not nil, Join calls it now and then with a text that names the ranks that are missing
	Waiting func(text string)

	interval time.Duration // between calls of Waiting; 0 is waitingInterval. For tests.
}

// DefaultLimit is how long a rank waits for the others unless JoinTimeoutVariable has another time.
const DefaultLimit = 10 * time.Minute

// waitingInterval is the time before the first call of Options.Waiting. It doubles with every call,
// up to a minute.
const waitingInterval = 10 * time.Second

// The environment of a rank, as mula launch sets it.
const (
	RankVariable    = "MULA_RANK"
	SizeVariable    = "MULA_WORLD"
	AddressVariable = "MULA_ADDRESS"
	SecretVariable  = "MULA_SECRET"

	// These may be set by the user.
	ListenVariable      = "MULA_LISTEN"
	AnnounceVariable    = "MULA_ANNOUNCE"
	JoinTimeoutVariable = "MULA_JOIN_TIMEOUT"
)

// maxSize limits the number of ranks: each holds a connection to every other.
const maxSize = 1 << 14

// FromEnvironment reads the options from the environment. It is false if MULA_RANK is not set: this
// process is no rank.
func FromEnvironment() (Options, bool, error) {
	if _, ok := os.LookupEnv(RankVariable); !ok {
		return Options{}, false, nil
	}
	o := Options{Address: os.Getenv(AddressVariable), Secret: os.Getenv(SecretVariable),
		Listen: os.Getenv(ListenVariable), Announce: os.Getenv(AnnounceVariable), Limit: DefaultLimit}
	for _, number := range []struct {
		name  string
		value *int
	}{{RankVariable, &o.Rank}, {SizeVariable, &o.Size}} {
		text := os.Getenv(number.name)
		var err error
		if *number.value, err = strconv.Atoi(text); err != nil {
			return Options{}, true, fmt.Errorf("tcp: environment variable %s is %q; it must be a number", number.name,
				text)
		}
	}
	if text := os.Getenv(JoinTimeoutVariable); text != "" {
		var err error
		if o.Limit, err = time.ParseDuration(text); err != nil || o.Limit < 0 {
			return Options{}, true, fmt.Errorf("tcp: environment variable %s is %q; it must be a time such as 90s "+
				"or 10m, or 0 for no limit", JoinTimeoutVariable, text)
		}
	}
	return o, true, o.check()
}

func (o Options) check() error {
	if o.Size < 1 || o.Size > maxSize {
		return fmt.Errorf("tcp: a world of %d ranks (%s); it may have 1 to %d", o.Size, SizeVariable, maxSize)
	}
	if o.Rank < 0 || o.Rank >= o.Size {
		return fmt.Errorf("tcp: rank %d (%s) of a world of %d (%s); ranks go from 0 to %d", o.Rank, RankVariable,
			o.Size, SizeVariable, o.Size-1)
	}
	if o.Size == 1 {
		return nil
	}
	if _, _, err := net.SplitHostPort(o.Address); err != nil {
		return fmt.Errorf("tcp: the address of rank 0 (%s) is %q; it must be host:port", AddressVariable, o.Address)
	}
	if o.Listen != "" {
		if _, _, err := net.SplitHostPort(o.Listen); err != nil {
			return fmt.Errorf("tcp: the address to listen at (%s) is %q; it must be host:port, such as 0.0.0.0:29500",
				ListenVariable, o.Listen)
		}
	}
	if _, _, err := o.announced(0); err != nil {
		return err
	}
	if o.Secret == "" {
		return fmt.Errorf("tcp: no secret (%s); give all ranks the same random text", SecretVariable)
	}
	return nil
}

// announced returns the host and port under which the others reach this rank, which listens at a
// port. The host is "" if rank 0 is to take the one that it sees.
func (o Options) announced(port uint32) (string, uint32, error) {
	if o.Announce == "" {
		return "", port, nil
	}
	host, text, err := net.SplitHostPort(o.Announce)
	if err != nil { // a host alone
		if host = strings.Trim(o.Announce, "[]"); strings.ContainsAny(host, "[] ") || strings.Contains(host, ":") &&
			net.ParseIP(host) == nil {
			host = ""
		}
	} else if n, err := strconv.ParseUint(text, 10, 16); err != nil || n == 0 {
		host = ""
	} else {
		port = uint32(n)
	}
	if host == "" || len(host) > maxHost {
		return "", 0, fmt.Errorf("tcp: the address to announce (%s) is %q; it must be host or host:port, as the "+
			"other ranks reach this one", AnnounceVariable, o.Announce)
	}
	return host, port, nil
}

// Join returns the link of this rank in the world when all ranks have come. Rank 0 listens; the
// others dial it until it is there. A wait for a rank that does not come ends with ctx or after
// Options.Limit, with an error that names the rank.
func Join(ctx context.Context, o Options) (xpu.Link, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	if o.Size == 1 {
		return newWorld(0, make([]net.Conn, 1)), nil
	}
	listener, err := o.listen(ctx)
	if err != nil {
		return nil, err
	}
	return join(ctx, o, listener)
}

// listen binds the port at which this rank waits for others.
func (o Options) listen(ctx context.Context) (net.Listener, error) {
	address, variable := o.Listen, ListenVariable
	if address == "" && o.Rank == 0 {
		address, variable = o.Address, AddressVariable
	} else if address == "" {
		// If rank 0 is on this machine, the others may reach this rank on this machine only.
		host, _, _ := net.SplitHostPort(o.Address)
		if !isLoopback(host) {
			host = ""
		}
		address = net.JoinHostPort(host, "0")
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err == nil {
		return listener, nil
	}
	hint := ""
	switch {
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		hint = fmt.Sprintf("; if this is the address of a service or a gateway, set %s to an address of this "+
			"machine, such as 0.0.0.0:29500", ListenVariable)
	case errors.Is(err, syscall.EADDRINUSE):
		hint = "; choose another port, a different one for each rank of a machine"
	}
	return nil, fmt.Errorf("tcp: rank %d cannot listen at %s (%s): %w%s", o.Rank, address, variable, err, hint)
}

// join is Join with this rank's listener, which it closes.
func join(ctx context.Context, o Options, listener net.Listener) (xpu.Link, error) {
	if o.Limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, o.Limit, fmt.Errorf("not all ranks have come within %v (%s)",
			o.Limit, JoinTimeoutVariable))
		defer cancel()
	}
	w := newWaiting(o)
	defer w.report(o)()
	conns := make([]net.Conn, o.Size)
	if err := rendezvous(ctx, o, w, listener, conns); err != nil {
		for _, conn := range conns {
			if conn != nil {
				conn.Close()
			}
		}
		return nil, err
	}
	return newWorld(o.Rank, conns), nil
}
