package flight

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"io"
	"math/big"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"mula/blend"
	"mula/blend/plantest"
	"mula/internal/testwait"
	"mula/serve"
	"mula/shards"
)

func TestMain(m *testing.M) { plantest.Main(m) }

const positions = 400

// openPlan seals a plan over one shard, whose token k is k modulo 9000, and opens it.
func openPlan(t testing.TB) *blend.Data {
	t.Helper()
	dir := t.TempDir()
	documents := make([][]uint32, 200)
	for i := range documents {
		for k := range 40 {
			documents[i] = append(documents[i], uint32(40*i+k)%9000)
		}
	}
	plantest.Shard(t, filepath.Join(dir, "a"), shards.UInt16, 9000, documents)
	return plantest.Open(t, plantest.Seal(t, dir, "plan.json", "sequence_length: 16\nseed: 5\nsamples: "+
		"400\nsources: [{name: a, shards: [a], weight: 1}]\nskips: [{from: 5, to: 7}]"))
}

// A served plan, and a client of it.
type served struct {
	data    *blend.Data
	service *serve.Service
	address string
	client  flight.Client
	stop    func() // as SIGTERM would; returns when all has ended
}

func start(t testing.TB, o serve.Options, a serve.Access, dial ...grpc.DialOption) *served {
	t.Helper()
	data := openPlan(t)
	service, err := serve.New(context.Background(), data, o)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- Serve(ctx, service, l, a) }()
	if len(dial) == 0 {
		dial = []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
	}
	client, err := flight.NewClientWithMiddleware(l.Addr().String(), nil, nil, dial...)
	if err != nil {
		t.Fatal(err)
	}
	s := &served{data: data, service: service, address: l.Addr().String(), client: client}
	s.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		service.Close()
	})
	t.Cleanup(func() {
		client.Close()
		s.stop()
		data.Close()
	})
	return s
}

// read reads a stream to its end, and gives the tokens of each position.
func (s *served) read(ctx context.Context, t testing.TB, ticket string) (rows map[int64][]uint16, records int,
	err error) {
	t.Helper()
	in, err := s.client.DoGet(ctx, &flight.Ticket{Ticket: []byte(ticket)})
	if err != nil {
		return nil, 0, err
	}
	r, err := flight.NewRecordReader(in, ipc.WithBodySizeLimit(1<<30), ipc.WithMetadataSizeLimit(1<<20))
	if err != nil {
		return nil, 0, err
	}
	defer r.Release()
	rows = make(map[int64][]uint16)
	for ; r.Next(); records++ {
		record := r.RecordBatch()
		position := record.Column(record.Schema().FieldIndices("position")[0]).(*array.Int64)
		lists := record.Column(record.Schema().FieldIndices("tokens")[0]).(*array.FixedSizeList)
		tokens := lists.ListValues().(*array.Uint16).Values()
		for i := range position.Len() {
			rows[position.Value(i)] = append([]uint16(nil), tokens[i*17:(i+1)*17]...)
		}
	}
	return rows, records, r.Err()
}

// The ranks of a stream get each sample of the plan, with its own tokens.
func TestDoGet(t *testing.T) {
	s := start(t, serve.Options{}, serve.Access{})
	got := make(map[int64][]uint16)
	for _, rank := range []string{"0", "1", "2", "3"} {
		rows, records, err := s.read(context.Background(), t,
			`{"batch_size": 32, "world": 4, "micro_batch": 4, "rank": `+rank+`}`)
		if err != nil || records != 2*13 {
			t.Fatalf("rank %s: %d records, want 26; %v", rank, records, err)
		}
		for position, tokens := range rows {
			if got[position] != nil {
				t.Errorf("position %d came twice", position)
			}
			got[position] = tokens
		}
	}
	for position := range int64(positions) {
		sample, err := s.data.Locate(position)
		if err != nil {
			t.Fatal(err)
		}
		tokens, came := got[position]
		if came == sample.Skipped {
			t.Errorf("position %d came: %v", position, came)
		}
		for i, id := range tokens {
			if int64(id) != (sample.Token+int64(i))%9000 {
				t.Fatalf("position %d: token %d is %d, at %d of the shard", position, i, id, sample.Token)
			}
		}
	}
}

func TestGetFlightInfo(t *testing.T) {
	s := start(t, serve.Options{}, serve.Access{})
	command := []byte(`{"batch_size": 96, "world": 2, "rank": 1, "step": 1, "columns": ["tokens", "position"]}`)
	info, err := s.client.GetFlightInfo(context.Background(), &flight.FlightDescriptor{Type: flight.DescriptorCMD,
		Cmd: command})
	if err != nil {
		t.Fatal(err)
	}
	schema, err := flight.DeserializeSchema(info.GetSchema(), memory.DefaultAllocator)
	if err != nil {
		t.Fatal(err)
	}
	if plan, _ := schema.Metadata().GetValue("mula.plan"); plan != s.data.Fingerprint() || schema.NumFields() != 2 ||
		schema.Field(0).Name != "tokens" {
		t.Errorf("schema %s", schema)
	}
	// Of steps 1 to 3 a rank has half each; the last has 16 positions, which are rank 0's.
	if info.TotalRecords != 3*48 || len(info.Endpoint) != 1 {
		t.Errorf("%d samples at %d places, want 144 at one", info.TotalRecords, len(info.Endpoint))
	}
	rows, _, err := s.read(context.Background(), t, string(info.Endpoint[0].Ticket.Ticket))
	if err != nil || len(rows) != 3*48 {
		t.Errorf("%d samples, %v", len(rows), err)
	}
	result, err := s.client.GetSchema(context.Background(), &flight.FlightDescriptor{Type: flight.DescriptorCMD,
		Cmd: command})
	if err != nil || string(result.GetSchema()) != string(info.GetSchema()) {
		t.Errorf("GetSchema gives something else than GetFlightInfo: %v", err)
	}
	if _, err := s.client.GetSchema(context.Background(), &flight.FlightDescriptor{Type: flight.DescriptorPATH,
		Path: []string{"x"}}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a path: %v", err)
	}
}

func TestLies(t *testing.T) {
	s := start(t, serve.Options{Memory: 4 << 20}, serve.Access{})
	for _, ticket := range []string{"", "x", "[]", `{"batch_size": 8, "rank": 1}`, `{"batch_size": 8, "from": 3}`,
		`{"batch_size": 8, "to": 401}`, `{"batch_size": 1048576}`,
		`{"batch_size": 8, "columns": ["x"]}`, strings.Repeat(" ", 20<<10) + `{"batch_size": 8}`} {
		if _, _, err := s.read(context.Background(), t, ticket); status.Code(err) != codes.InvalidArgument ||
			strings.Contains(err.Error(), "\n") {
			t.Errorf("%.40s: %v", ticket, err)
		}
		if _, err := s.client.GetFlightInfo(context.Background(), &flight.FlightDescriptor{Type: flight.DescriptorCMD,
			Cmd: []byte(ticket)}); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%.40s: %v", ticket, err)
		}
	}
	if _, _, err := s.read(context.Background(), t,
		strings.Repeat(" ", 1<<20)); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a ticket of 1 MiB: %v", err)
	}
	put, err := s.client.DoPut(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := put.Recv(); status.Code(err) != codes.Unimplemented {
		t.Errorf("DoPut: %v", err)
	}
	// Bytes that are not HTTP/2.
	c, err := net.Dial("tcp", s.address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(10 * time.Minute))
	io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"+strings.Repeat("\xff", 4096))
	io.Copy(io.Discard, c) // the server hangs up
	if rows, _, err := s.read(context.Background(), t, `{"batch_size": 8}`); err != nil || len(rows) != positions-2 {
		t.Errorf("afterwards: %d samples, %v", len(rows), err)
	}
}

func TestToken(t *testing.T) {
	s := start(t, serve.Options{}, serve.Access{Token: "word"})
	for value, want := range map[string]codes.Code{"": codes.Unauthenticated, "Bearer": codes.Unauthenticated,
		"Bearer wor": codes.Unauthenticated, "Bearer word": codes.OK, "bearer word": codes.OK} {
		ctx := context.Background()
		if value != "" {
			ctx = metadata.AppendToOutgoingContext(ctx, "authorization", value)
		}
		if _, _, err := s.read(ctx, t, `{"batch_size": 400}`); status.Code(err) != want {
			t.Errorf("%q: DoGet: %v", value, err)
		}
		if _, err := s.client.GetFlightInfo(ctx, &flight.FlightDescriptor{Type: flight.DescriptorCMD,
			Cmd: []byte(`{"batch_size": 400}`)}); status.Code(err) != want {
			t.Errorf("%q: GetFlightInfo: %v", value, err)
		}
	}
}

func TestTLS(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "mula"},
		NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(certificate)
	s := start(t, serve.Options{},
		serve.Access{TLS: &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
			MinVersion: tls.VersionTLS12}},
		grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: roots})))
	if rows, _, err := s.read(context.Background(), t, `{"batch_size": 8}`); err != nil || len(rows) != positions-2 {
		t.Errorf("%d samples, %v", len(rows), err)
	}
}

// A cancelled call leaves nothing. When the service stops, a call without a reader is cut, and a
// call with a reader ends with an error.
func TestCutAndStop(t *testing.T) {
	s := start(t, serve.Options{Grace: 100 * time.Millisecond, MaxStreams: 4}, serve.Access{})
	begin := func() (flight.FlightService_DoGetClient, func()) {
		ctx, cancel := context.WithCancel(context.Background())
		in, err := s.client.DoGet(ctx, &flight.Ticket{Ticket: []byte(`{"batch_size": 1}`)})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := in.Recv(); err != nil {
			t.Fatal(err)
		}
		return in, cancel
	}
	for range 20 {
		_, cancel := begin() // 20 of them are too many if streams are left
		cancel()
		testwait.Until(t, "the cancelled stream has ended", func() bool {
			_, _, err := s.read(context.Background(), t, `{"batch_size": 400}`)
			if err != nil && status.Code(err) != codes.ResourceExhausted {
				t.Fatal(err)
			}
			return err == nil
		})
	}
	_, cancel := begin()
	defer cancel()
	in, cancel := begin()
	defer cancel()
	s.stop()
	n := 0
	var err error
	for ; err == nil; n++ {
		_, err = in.Recv()
	}
	if errors.Is(err, io.EOF) || status.Code(err) != codes.Unavailable || n >= positions {
		t.Errorf("%d messages, then %v; want that the server is not available", n, err)
	}
}
