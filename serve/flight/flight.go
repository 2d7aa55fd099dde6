// Package flight serves the streams of package serve over Arrow Flight. It is a separate package,
// so that only programs with Flight link gRPC.
//
// The ticket of DoGet, and the command of the descriptor of GetFlightInfo and GetSchema, are a JSON
// object of the parameters of a stream ([serve.Service.ParseJSON]). Flight holds several records in
// transit, so fewer streams fit into the memory than over HTTP.
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

// copies is the number of records held at a time: the current one, and the two before it, which the
// transport may not have sent completely.
const copies = 3

// Limits of client messages. Clients send no Arrow data.
const (
	maxMessage     = 64 << 10 // bytes
	maxHeaders     = 16 << 10
	maxCalls       = 256 // concurrent calls of one connection
	connectTime    = 10 * time.Second
	keepaliveTime  = 30 * time.Second // of silence before the server pings a client
	keepaliveReply = 20 * time.Second // to answer the ping
)

// Serve answers Flight calls on a listener until ctx is cancelled. Then the service stops, streams
// have [serve.Options.Grace] to end, and the remaining connections are closed. Serve closes the
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
		// it failed just before ctx was cancelled
		return fmt.Errorf("serving Flight at %s: %w", l.Addr(), err)
	}
	return nil
}

// guard checks the token.
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
		"a token is required: send the header \"authorization: Bearer TOKEN\"")
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

// calls implements the supported Flight calls. The embedded server refuses other calls as not
// implemented.
type calls struct {
	flight.BaseFlightServer
	service *serve.Service
}

// GetFlightInfo describes the stream that a descriptor's command selects: its schema, its number of
// samples, and its ticket.
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

// GetSchema returns the schema of the stream that a descriptor's command selects.
func (c *calls) GetSchema(ctx context.Context, d *flight.FlightDescriptor) (*flight.SchemaResult, error) {
	schema, _, err := c.describe(d)
	if err != nil {
		return nil, toStatus(ctx, err)
	}
	return &flight.SchemaResult{Schema: schema}, nil
}

func (c *calls) describe(d *flight.FlightDescriptor) (schema []byte, samples int64, err error) {
	if d.GetType() != flight.DescriptorCMD {
		return nil, 0, &serve.Error{Status: http.StatusBadRequest, Text: "the descriptor is not a command; send a " +
			"command such as {\"batch_size\": 512}"}
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

// DoGet sends the stream that a ticket selects.
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

// toStatus converts an error to a gRPC status.
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
