// Package serve streams the samples of a plan to other programs: as Arrow IPC streams over HTTP, on
// TCP and unix sockets, and, in its sub-package flight, over Arrow Flight.
//
// A [Service] is one open plan. All its clients share the plan and the mappings of its shards. Each
// client only needs memory for its records in transit. A client sends a [Request] and gets a
// [Stream]: the records of [stream.New], with the columns shard and offset added. The memory
// of all streams is limited by [Options.Memory], for any number of clients at any speed.
//
// docs/formats/serve.md specifies requests and answers.
package serve

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"golang.org/x/sync/semaphore"

	"mula/blend"
	"mula/blend/stream"
)

// Options are the limits of a [Service].
type Options struct {
	MaxStreams int           // maximum number of streams, including streams that wait for memory; 0: 4096
	Memory     int64         // maximum memory for the records of all streams, in bytes; 0: 1 GiB
	Wait       time.Duration // maximum time that a stream waits for memory; 0: 10 seconds
	// when the service stops, streams have this time to send their current record before they are
	// closed; 0: 3 seconds
	Grace time.Duration

	// Report, if not nil, is called with one line when a shard is first found to be damaged,
	// missing or replaced. It must be safe for concurrent use.
	Report func(text string)
}

// Defaults of [Options].
const (
	defaultStreams = 4096
	defaultMemory  = 1 << 30
	defaultWait    = 10 * time.Second
	defaultGrace   = 3 * time.Second
)

// overhead is the memory that is counted for each stream in addition to its records: stacks, and
// buffers of the connection, the encoder and the request.
const overhead = 128 << 10

// A Service is an open plan that clients can stream. It is safe for concurrent use.
type Service struct {
	data   *blend.Data
	o      Options
	fields []arrow.Field     // of a stream with all columns
	base   map[string]string // metadata that does not depend on the request
	tokens arrow.FixedWidthDataType
	began  time.Time

	streams *semaphore.Weighted // one for each stream
	sending *semaphore.Weighted // bytes of records in transit: three quarters of the memory
	ahead   *semaphore.Weighted // bytes of records that are read ahead: the rest
	// bytes of sending that are in slots: half of sending, so that memory remains for streams that
	// hold one record each
	slots  *semaphore.Weighted
	counts counts

	failures failures

	stopping context.Context // done when no stream may send another record
	stop     context.CancelFunc
	mu       sync.Mutex     // held to start a use, and to stop
	uses     sync.WaitGroup // of data
	sharing  sync.WaitGroup // streams in shared memory, whose connections the HTTP server no longer tracks
}

// counts are the values of the metrics.
type counts struct {
	streams, waiting, sendingBytes, aheadBytes                  atomic.Int64 // current values
	opened, completed, refused, records, samples, bytes, errors atomic.Int64 // since the start
	reading                                                     atomic.Int64 // nanoseconds, since the start
}

// New returns the service of an open plan, which must stay open until [Service.Close] has returned.
func New(ctx context.Context, data *blend.Data, o Options) (*Service, error) {
	if o.MaxStreams == 0 {
		o.MaxStreams = defaultStreams
	}
	if o.Memory == 0 {
		o.Memory = defaultMemory
	}
	if o.Wait == 0 {
		o.Wait = defaultWait
	}
	if o.Grace == 0 {
		o.Grace = defaultGrace
	}
	if o.MaxStreams < 1 || o.Memory < 4*overhead {
		return nil, fmt.Errorf("%d streams with %d bytes of memory: use at least 1 stream and %d bytes",
			o.MaxStreams, o.Memory, 4*overhead)
	}
	s := &Service{data: data, o: o, began: time.Now(),
		streams: semaphore.NewWeighted(int64(o.MaxStreams)), sending: semaphore.NewWeighted(o.Memory - o.Memory/4),
		ahead: semaphore.NewWeighted(o.Memory / 4),
		slots: semaphore.NewWeighted((o.Memory - o.Memory/4) / 2)}
	s.stopping, s.stop = context.WithCancel(context.Background())
	// Package blend defines the columns and the metadata.
	all, err := stream.New(ctx, data, stream.Options{BatchSize: 1, To: 1, Columns: stream.Columns(data.Plan)})
	if err != nil {
		return nil, err
	}
	defer all.Close()
	schema := all.Schema()
	s.base = schema.Metadata().ToMap()
	s.base["mula.order_version"] = data.OrderVersion()
	tokens, ok := schema.FieldsByName(columnTokens)
	if ok {
		var list *arrow.FixedSizeListType
		if list, ok = tokens[0].Type.(*arrow.FixedSizeListType); ok {
			s.tokens, ok = list.Elem().(arrow.FixedWidthDataType)
		}
	}
	if !ok {
		return nil, fmt.Errorf("the stream has no column of tokens: %s", schema)
	}
	s.fields = schema.Fields()
	return s, nil
}

// Grace returns [Options.Grace].
func (s *Service) Grace() time.Duration { return s.o.Grace }

// Fingerprint returns the plan's fingerprint.
func (s *Service) Fingerprint() string { return s.data.Fingerprint() }

// Stop ends each stream after the record that it is sending, and refuses new streams. It does not
// wait.
func (s *Service) Stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stop()
}

// Close calls Stop, and waits until no request reads from the plan. The caller must close the
// connections of clients that do not read.
func (s *Service) Close() {
	s.Stop()
	s.uses.Wait()
}

// use starts a use of the plan; the caller must call done at its end.
func (s *Service) use() (done func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopping.Err() != nil {
		return nil, errStopping
	}
	s.uses.Add(1)
	return s.uses.Done, nil
}

// An Error refuses a request. Status is the HTTP status of this kind of refusal.
type Error struct {
	Status int
	Text   string
}

func (e *Error) Error() string { return e.Text }

// refusef returns an [Error].
func refusef(status int, format string, args ...any) error {
	return &Error{status, fmt.Sprintf(format, args...)}
}

// errStopping ends streams and refuses new streams while the service stops.
var errStopping error = &Error{http.StatusServiceUnavailable,
	"the server is stopping; try again after it has restarted"}

// StatusOf returns the HTTP status of an error: the status of an [Error], else 500.
func StatusOf(err error) int {
	var refused *Error
	if errors.As(err, &refused) {
		return refused.Status
	}
	return http.StatusInternalServerError
}

// tooMany returns the error of a request beyond the maximum number of streams.
func (s *Service) tooMany() error {
	return refusef(http.StatusTooManyRequests,
		"the server already has %d streams, which is its limit (--max-streams); try again later", s.o.MaxStreams)
}
