// Package serve gives the order of a plan to other programs: as Arrow IPC streams over HTTP, on TCP
// and unix sockets, and, in its sub-package flight, over Arrow Flight.
//
// A [Service] is one open plan. All its clients share the plan and the mappings of its shards; a
// client costs the record that is on its way to it. What they may ask for is a [Request]; what they
// get is a [Stream]: the records of [blend.Data.Stream], with the columns shard and offset added.
// However many clients there are and however slowly they read, what streams hold stays within
// [Options.Memory].
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
)

// Options are the limits of a [Service].
type Options struct {
	MaxStreams int           // at a time, those in line included; 0 is 4096
	Memory     int64         // bytes that the records of all streams may take; 0 is 1 GiB
	Wait       time.Duration // how long a stream waits in line for memory; 0 is 10 seconds
	// how long streams have to end after their record when the service stops, before they are cut;
	// 0 is 3 seconds
	Grace time.Duration

	// Report, if it is set, is told what could not be read, in one line, when a shard is first
	// found to be damaged, gone or replaced. It must be safe for concurrent use.
	Report func(text string)
}

// Defaults of [Options].
const (
	defaultStreams = 4096
	defaultMemory  = 1 << 30
	defaultWait    = 10 * time.Second
	defaultGrace   = 3 * time.Second
)

// overhead is counted for each stream beside its records: stacks, buffers of the connection, of the
// encoder, of the request.
const overhead = 128 << 10

// A Service is an open plan that clients read along. It is safe for concurrent use.
type Service struct {
	data   *blend.Data
	o      Options
	fields []arrow.Field     // of a stream with all columns
	base   map[string]string // metadata that does not depend on the request
	tokens arrow.FixedWidthDataType
	began  time.Time

	streams *semaphore.Weighted // one for each stream
	sending *semaphore.Weighted // bytes of the records that are being sent: three quarters of the memory
	ahead   *semaphore.Weighted // bytes of the records that are read ahead: the rest
	// those of sending that are in slots: half of it, so that there is room for streams which hold
	// a record each
	slots  *semaphore.Weighted
	counts counts

	failures failures

	stopping context.Context // ends when no stream is to give another record
	stop     context.CancelFunc
	mu       sync.Mutex     // no use begins while or after stop is called
	uses     sync.WaitGroup // of data
	sharing  sync.WaitGroup // streams in shared memory, whose connections the HTTP server does not know any more
}

// counts are what the metrics tell.
type counts struct {
	streams, waiting, sendingBytes, aheadBytes                  atomic.Int64 // as it is now
	opened, completed, refused, records, samples, bytes, errors atomic.Int64 // since the start
	reading                                                     atomic.Int64 // nanoseconds, since the start
}

// New makes the service of an open plan, which must stay open until [Service.Close] has returned.
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
		return nil, fmt.Errorf("%d streams in %d bytes of memory: there must be room for one, and %d bytes",
			o.MaxStreams, o.Memory, 4*overhead)
	}
	s := &Service{data: data, o: o, began: time.Now(),
		streams: semaphore.NewWeighted(int64(o.MaxStreams)), sending: semaphore.NewWeighted(o.Memory - o.Memory/4),
		ahead: semaphore.NewWeighted(o.Memory / 4),
		slots: semaphore.NewWeighted((o.Memory - o.Memory/4) / 2)}
	s.stopping, s.stop = context.WithCancel(context.Background())
	// What columns there are, and what the metadata say, is for blend to decide.
	all, err := data.Stream(ctx, blend.StreamOptions{BatchSize: 1, To: 1, Columns: data.Columns()})
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
		return nil, fmt.Errorf("the stream's columns are not known: %s", schema)
	}
	s.fields = schema.Fields()
	return s, nil
}

// Grace is [Options.Grace].
func (s *Service) Grace() time.Duration { return s.o.Grace }

// Fingerprint is that of the plan.
func (s *Service) Fingerprint() string { return s.data.Fingerprint() }

// Stop lets streams end after the record that they are sending, and refuses new ones. It does not
// wait.
func (s *Service) Stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stop()
}

// Close stops, and waits until nothing reads from the plan any more. Whoever serves it has to cut
// off clients that do not read.
func (s *Service) Close() {
	s.Stop()
	s.uses.Wait()
}

// use begins a use of the plan; the caller ends it with done.
func (s *Service) use() (done func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopping.Err() != nil {
		return nil, errStopping
	}
	s.uses.Add(1)
	return s.uses.Done, nil
}

// An Error is why a request is refused, with the HTTP status that says of which kind it is.
type Error struct {
	Status int
	Text   string
}

func (e *Error) Error() string { return e.Text }

// refusef makes an [Error].
func refusef(status int, format string, args ...any) error {
	return &Error{status, fmt.Sprintf(format, args...)}
}

// errStopping ends streams, and refuses new ones, when the service stops.
var errStopping error = &Error{http.StatusServiceUnavailable,
	"the server is stopping: ask again when it has been started again"}

// StatusOf is the HTTP status that stands for an error: that of an [Error], else 500.
func StatusOf(err error) int {
	var refused *Error
	if errors.As(err, &refused) {
		return refused.Status
	}
	return http.StatusInternalServerError
}

// tooMany is the error of a request that would be one too many.
func (s *Service) tooMany() error {
	return refusef(http.StatusTooManyRequests,
		"there are %d streams, which is all this server allows at a time (--max-streams)", s.o.MaxStreams)
}
