// Package tcp connects ranks that are processes, on one or more machines, with a connection
// between each two of them.
package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"mula/xpu/comm"
)

// Options describe this process's rank, and how to find the other ranks.
type Options struct {
	Address string // host:port at which the other ranks reach rank 0; all ranks must resolve this host name
	Rank    int
	Size    int // total number of ranks
	// must be the same on all ranks; a rank with another secret cannot join. The secret is never
	// sent. The traffic between ranks is not encrypted.
	Secret string

	// host:port that this rank binds; "" is Address for rank 0, and a free port on all interfaces
	// for the other ranks
	Listen string
	// rank 0: file descriptor of a socket that already listens at Address; 0: not set. Join closes
	// it, unless KeepFD is set: the process may listen there again, for a later group
	ListenFD int
	KeepFD   bool
	// number of groups before this one whose ranks had the same processes. If it is not 0, a rank
	// that refuses this rank is dialed again, because it may still be joining the group before
	Generation int
	// host or host:port at which the other ranks reach this rank; "" is the address that rank 0
	// sees. Not used by rank 0, which has Address.
	Announce string

	Limit time.Duration // time limit for Join; 0 is no limit
	// if not nil, Join calls it now and then with a text that names the missing ranks
	Waiting func(text string)

	interval time.Duration // between calls of Waiting; 0 is waitingInterval. For tests.
}

// defaultLimit is the time limit for joining unless JoinTimeoutVariable is set.
const defaultLimit = 10 * time.Minute

// waitingInterval is the time before the first call of Options.Waiting. It doubles with every call,
// up to a minute.
const waitingInterval = 10 * time.Second

// The environment variables of a rank, which mula launch sets.
const (
	RankVariable    = "MULA_RANK"
	SizeVariable    = "MULA_WORLD"
	AddressVariable = "MULA_ADDRESS"
	SecretVariable  = "MULA_SECRET"
	// of rank 0 alone, if mula launch runs on its machine; with hot spares of all ranks there
	ListenFDVariable = "MULA_LISTEN_FD"
	KeepVariable     = "MULA_LISTEN_KEEP" // 1 sets KeepFD
	// of ranks of a later group; "" is the first group
	GenerationVariable = "MULA_GENERATION"

	// The user may set these.
	ListenVariable      = "MULA_LISTEN"
	AnnounceVariable    = "MULA_ANNOUNCE"
	JoinTimeoutVariable = "MULA_JOIN_TIMEOUT"
)

// maxSize limits the number of ranks: each rank has a connection to every other rank.
const maxSize = 1 << 14

// FromEnvironment reads the options from the environment. It returns false if MULA_RANK is not set:
// this process is not a rank.
func FromEnvironment() (Options, bool, error) {
	if _, ok := os.LookupEnv(RankVariable); !ok {
		return Options{}, false, nil
	}
	o := Options{Address: os.Getenv(AddressVariable), Secret: os.Getenv(SecretVariable),
		Listen: os.Getenv(ListenVariable), Announce: os.Getenv(AnnounceVariable), Limit: defaultLimit}
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
	if text := os.Getenv(ListenFDVariable); text != "" {
		var err error
		if o.ListenFD, err = strconv.Atoi(text); err != nil || o.ListenFD < 3 {
			return Options{}, true, fmt.Errorf("tcp: environment variable %s is %q; it must be the number of a file "+
				"descriptor from 3", ListenFDVariable, text)
		}
	}
	o.KeepFD = os.Getenv(KeepVariable) == "1"
	if text := os.Getenv(GenerationVariable); text != "" {
		var err error
		if o.Generation, err = strconv.Atoi(text); err != nil || o.Generation < 0 {
			return Options{}, true, fmt.Errorf("tcp: environment variable %s is %q; it must be a number from 0",
				GenerationVariable, text)
		}
	}
	if text := os.Getenv(JoinTimeoutVariable); text != "" {
		var err error
		if o.Limit, err = time.ParseDuration(text); err != nil || o.Limit < 0 {
			return Options{}, true, fmt.Errorf("tcp: environment variable %s is %q; it must be a duration such as 90s "+
				"or 10m, or 0 for no limit", JoinTimeoutVariable, text)
		}
	}
	return o, true, o.check()
}

func (o Options) check() error {
	if o.Size < 1 || o.Size > maxSize {
		return fmt.Errorf("tcp: invalid number of ranks %d (%s); it must be from 1 to %d", o.Size, SizeVariable,
			maxSize)
	}
	if o.Rank < 0 || o.Rank >= o.Size {
		return fmt.Errorf("tcp: invalid rank %d (%s) of %d (%s); ranks are numbered from 0 to %d", o.Rank, RankVariable,
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

// announced returns the host and port at which the other ranks reach this rank, which listens at
// port. The host is "" if rank 0 is to use the host that it sees.
func (o Options) announced(port uint32) (string, uint32, error) {
	if o.Announce == "" {
		return "", port, nil
	}
	host, text, err := net.SplitHostPort(o.Announce)
	if err != nil { // a host without a port
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
		return "", 0, fmt.Errorf("tcp: the address to announce (%s) is %q; it must be the host or host:port at which "+
			"the other ranks reach this rank", AnnounceVariable, o.Announce)
	}
	return host, port, nil
}

// Join returns this rank's transport in the world when all ranks have joined. Rank 0 listens; the
// other ranks dial it until it answers. If a rank does not join, Join fails when ctx ends or after
// Options.Limit, with an error that names the rank.
func Join(ctx context.Context, o Options) (comm.Transport, error) {
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

// listen binds the port at which this rank waits for other ranks.
func (o Options) listen(ctx context.Context) (net.Listener, error) {
	if o.ListenFD != 0 && o.Rank == 0 {
		f := o.inherited()
		listener, err := net.FileListener(f)
		if err != nil {
			return nil, fmt.Errorf("tcp: file descriptor %d (%s) is no listening socket: %w", o.ListenFD,
				ListenFDVariable,
				err)
		}
		if !o.KeepFD {
			f.Close() // listener has a duplicate
		}
		return listener, nil
	}
	address, variable := o.Listen, ListenVariable
	if address == "" && o.Rank == 0 {
		address, variable = o.Address, AddressVariable
	} else if address == "" {
		// If rank 0 is on this machine, the other ranks may be able to reach this rank on this
		// machine only.
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

// inherited returns the file of ListenFD.
func (o Options) inherited() *os.File {
	if !o.KeepFD {
		return os.NewFile(uintptr(o.ListenFD), ListenFDVariable)
	}
	keptFiles.Lock()
	defer keptFiles.Unlock()
	f := keptFiles.byNumber[o.ListenFD]
	if f == nil {
		f = os.NewFile(uintptr(o.ListenFD), ListenFDVariable)
		keptFiles.byNumber[o.ListenFD] = f
	}
	return f
}

// keptFiles are the files of ListenFD with KeepFD. A file without a reference would be closed.
var keptFiles = struct {
	sync.Mutex
	byNumber map[int]*os.File
}{byNumber: map[int]*os.File{}}

// join is Join with this rank's listener, which it closes.
func join(ctx context.Context, o Options, listener net.Listener) (comm.Transport, error) {
	if o.Limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, o.Limit, fmt.Errorf("not all ranks joined within %v (%s)",
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
