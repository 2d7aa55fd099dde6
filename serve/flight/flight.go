// Package flight gives the streams of package serve over Arrow Flight. It is a package of its own
// so that only those who want Flight link gRPC.
//
// The ticket of DoGet, and the command of the descriptor of GetFlightInfo and GetSchema, are a JSON
// object of the parameters of a stream ([serve.Service.ParseJSON]). Flight holds several records on
// their way, so that less of them fit into the memory than over HTTP.
package flight

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"mula/serve"
)

// copies is how many records are held at a time: the one that was given last, and the two before
// it, of which the transport may have some 64 KiB, or all but that, to send yet.
const copies = 3

// Limits of what clients send. Nothing they send is Arrow data.
const (
	maxMessage     = 64 << 10 // bytes
	maxHeaders     = 16 << 10
	maxCalls       = 256 // at a time, of one connection
	connectTime    = 10 * time.Second
	keepaliveTime  = 30 * time.Second // without a sign of a client before it is asked for one
	keepaliveReply = 20 * time.Second // for its answer
)

// Serve answers Flight calls that come to a listener, until the context ends. Then the service
// stops, streams have [serve.Options.Grace] to end, and connections are cut. It closes the
// listener.
func Serve(ctx context.Context, service *serve.Service, l net.Listener, a serve.Access) error {
	guard := guard{token: a.Token}
	options := []grpc.ServerOption{
		grpc.MaxRecvMsgSize(maxMessage), grpc.MaxHeaderListSize(maxHeaders), grpc.MaxConcurrentStreams(maxCalls),
		grpc.ConnectionTimeout(connectTime),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: keepaliveTime, Timeout: keepaliveReply}),
		grpc.ChainUnaryInterceptor(guard.unary), grpc.ChainStreamInterceptor(guard.stream),
		grpc.ForceServerCodecV2(newCodec()), grpc.WaitForHandlers(true),
	}
	if a.TLS != nil {
		options = append(options, grpc.Creds(credentials.NewTLS(a.TLS)))
	}
	server := grpc.NewServer(options...)
	flight.RegisterFlightServiceServer(server, &calls{service: service})
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(service.Limit(l)) }()
	select {
	case err := <-ended:
		server.Stop()
		return fmt.Errorf("serving Flight at %s: %w", l.Addr(), err)
	case <-ctx.Done():
	}
	service.Stop()
	cut := time.AfterFunc(service.Grace(), server.Stop)
	defer cut.Stop()
	server.GracefulStop()
	if err := <-ended; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		// it failed at the moment at which the context ended
		return fmt.Errorf("serving Flight at %s: %w", l.Addr(), err)
	}
	return nil
}

// guard asks for the token.
type guard struct{ token string }

func (g guard) admit(ctx context.Context) error {
	if g.token == "" {
		return nil
	}
	headers, _ := metadata.FromIncomingContext(ctx)
	for _, value := range headers.Get("authorization") {
		if serve.Bears(value, g.token) {
			return nil
		}
	}
	return status.Error(codes.Unauthenticated,
		"this server wants its token: send the header \"authorization: Bearer TOKEN\"")
}

func (g guard) unary(ctx context.Context, request any, _ *grpc.UnaryServerInfo, call grpc.UnaryHandler) (any, error) {
	if err := g.admit(ctx); err != nil {
		return nil, err
	}
	return call(ctx, request)
}

func (g guard) stream(srv any, s grpc.ServerStream, _ *grpc.StreamServerInfo, call grpc.StreamHandler) error {
	if err := g.admit(s.Context()); err != nil {
		return err
	}
	return call(srv, s)
}

// calls are what Flight knows here; the calls of the embedded server are refused as not
// implemented.
type calls struct {
	flight.BaseFlightServer
	service *serve.Service
}

// GetFlightInfo describes the stream that a descriptor's command asks for: its schema, its number
// of samples, and the ticket for it.
func (c *calls) GetFlightInfo(ctx context.Context, d *flight.FlightDescriptor) (*flight.FlightInfo, error) {
	schema, samples, err := c.describe(d)
	if err != nil {
		return nil, toStatus(ctx, err)
	}
	return &flight.FlightInfo{
		Schema:           schema,
		FlightDescriptor: d,
		Endpoint:         []*flight.FlightEndpoint{{Ticket: &flight.Ticket{Ticket: d.Cmd}}},
		TotalRecords:     samples,
		TotalBytes:       -1,
		Ordered:          true,
	}, nil
}

// GetSchema gives the schema of the stream that a descriptor's command asks for.
func (c *calls) GetSchema(ctx context.Context, d *flight.FlightDescriptor) (*flight.SchemaResult, error) {
	schema, _, err := c.describe(d)
	if err != nil {
		return nil, toStatus(ctx, err)
	}
	return &flight.SchemaResult{Schema: schema}, nil
}

func (c *calls) describe(d *flight.FlightDescriptor) (schema []byte, samples int64, err error) {
	if d.GetType() != flight.DescriptorCMD {
		return nil, 0, &serve.Error{Status: http.StatusBadRequest, Text: "the descriptor is no command: send one as " +
			"{\"batch_size\": 512}"}
	}
	request, err := c.service.ParseJSON(d.GetCmd())
	if err != nil {
		return nil, 0, err
	}
	s, samples, err := c.service.Look(request, copies)
	if err != nil {
		return nil, 0, err
	}
	return flight.SerializeSchema(s, memory.DefaultAllocator), samples, nil
}

// DoGet streams what a ticket asks for.
func (c *calls) DoGet(ticket *flight.Ticket, out flight.FlightService_DoGetServer) error {
	ctx := out.Context()
	return toStatus(ctx, c.get(ctx, ticket, out))
}

func (c *calls) get(ctx context.Context, ticket *flight.Ticket, out flight.FlightService_DoGetServer) error {
	request, err := c.service.ParseJSON(ticket.GetTicket())
	if err != nil {
		return err
	}
	st, err := c.service.Open(ctx, request, copies)
	if err != nil {
		return err
	}
	defer st.Close()
	w := newWriter(out, st.Schema())
	for {
		record, err := st.Next()
		if errors.Is(err, io.EOF) {
			return w.Close()
		}
		if err != nil {
			return err
		}
		if err := w.Write(record); err != nil {
			return err
		}
	}
}

// toStatus is an error in gRPC's terms.
func toStatus(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if ctx.Err() != nil && (errors.Is(err, ctx.Err()) || errors.Is(err, context.Cause(ctx))) {
		return status.FromContextError(ctx.Err()).Err()
	}
	if s, ok := status.FromError(err); ok { // one of gRPC's own
		return s.Err()
	}
	code := codes.Internal
	switch serve.StatusOf(err) {
	case http.StatusBadRequest:
		code = codes.InvalidArgument
	case http.StatusTooManyRequests:
		code = codes.ResourceExhausted
	case http.StatusServiceUnavailable:
		code = codes.Unavailable
	}
	return status.Error(code, err.Error())
}
