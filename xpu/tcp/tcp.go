// Package tcp links ranks that are processes, on one machine or on many, by a connection between each two of them.
package tcp

import (
	"context"
	"fmt"
	"net"
	"os"
	"strconv"

	"mula/xpu"
)

// Options say which rank this process is, and where the others are found.
type Options struct {
	Address string // host:port at which rank 0 listens; the host is known to all ranks by this name
	Rank    int
	Size    int    // ranks in all
	Secret  string // the same on all ranks; who does not know it may not join. It is never sent. What ranks send is not encrypted.
}

// The environment of a rank, as mula launch sets it.
const (
	RankVariable    = "MULA_RANK"
	SizeVariable    = "MULA_WORLD"
	AddressVariable = "MULA_ADDRESS"
	SecretVariable  = "MULA_SECRET"
)

// maxSize limits the number of ranks: each holds a connection to every other.
const maxSize = 1 << 14

// FromEnvironment reads the options from the environment. It is false if MULA_RANK is not set: this process is no rank.
func FromEnvironment() (Options, bool, error) {
	if _, ok := os.LookupEnv(RankVariable); !ok {
		return Options{}, false, nil
	}
	o := Options{Address: os.Getenv(AddressVariable), Secret: os.Getenv(SecretVariable)}
	for _, number := range []struct {
		name  string
		value *int
	}{{RankVariable, &o.Rank}, {SizeVariable, &o.Size}} {
		text := os.Getenv(number.name)
		var err error
		if *number.value, err = strconv.Atoi(text); err != nil {
			return Options{}, true, fmt.Errorf("tcp: environment variable %s is %q; it must be a number", number.name, text)
		}
	}
	return o, true, o.check()
}

func (o Options) check() error {
	if o.Size < 1 || o.Size > maxSize {
		return fmt.Errorf("tcp: a world of %d ranks (%s); it may have 1 to %d", o.Size, SizeVariable, maxSize)
	}
	if o.Rank < 0 || o.Rank >= o.Size {
		return fmt.Errorf("tcp: rank %d (%s) of a world of %d (%s); ranks go from 0 to %d", o.Rank, RankVariable, o.Size, SizeVariable, o.Size-1)
	}
	if o.Size == 1 {
		return nil
	}
	if _, _, err := net.SplitHostPort(o.Address); err != nil {
		return fmt.Errorf("tcp: the address of rank 0 (%s) is %q; it must be host:port", AddressVariable, o.Address)
	}
	if o.Secret == "" {
		return fmt.Errorf("tcp: no secret (%s); give all ranks the same random text", SecretVariable)
	}
	return nil
}

// Join returns the link of this rank in the world when all ranks have come. Rank 0 listens at the address; the others dial it until it is
// there. A wait for a rank that does not come ends with ctx; give it a deadline.
func Join(ctx context.Context, o Options) (xpu.Link, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	if o.Size == 1 {
		return newWorld(0, make([]net.Conn, 1)), nil
	}
	if o.Rank > 0 {
		return join(ctx, o, nil)
	}
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", o.Address)
	if err != nil {
		return nil, fmt.Errorf("tcp: rank 0 cannot listen at %s (%s): %w", o.Address, AddressVariable, err)
	}
	return join(ctx, o, listener)
}

// join is Join with the listener of rank 0, which it closes.
func join(ctx context.Context, o Options, listener net.Listener) (xpu.Link, error) {
	conns := make([]net.Conn, o.Size)
	if err := rendezvous(ctx, o, listener, conns); err != nil {
		for _, conn := range conns {
			if conn != nil {
				conn.Close()
			}
		}
		return nil, err
	}
	return newWorld(o.Rank, conns), nil
}
