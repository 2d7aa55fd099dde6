package serve

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"pgregory.net/rapid"

	"mula/blend"
	"mula/blend/fingerprint"
	"mula/blend/plantest"
	"mula/blend/stream"
	"mula/internal/testwait"
	"mula/shards"
)

// patience is how long a test waits for what must come.
const patience = 10 * time.Minute

func TestMain(m *testing.M) { plantest.Main(m) }

const (
	sequenceLength = 16
	positions      = 600
)

// sealed are the folders of plans that tests share, by element type.
var sealed = make(map[shards.DType]string)

// openPlan opens a plan that makePlan made.
func openPlan(t testing.TB, dtype shards.DType) *blend.Data {
	t.Helper()
	if sealed[dtype] == "" {
		dir := filepath.Join(os.Getenv("XDG_CACHE_HOME"), string(dtype)) // removed after all tests
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		makePlan(t, dir, dtype, 3000)
		sealed[dtype] = dir
	}
	return openFolder(t, sealed[dtype])
}

func openFolder(t testing.TB, dir string) *blend.Data {
	t.Helper()
	return plantest.Open(t, filepath.Join(dir, "plan.json"))
}

// makePlan builds a plan over shards of generated documents, with stages, skips and held-out
// windows. Each shard has the given number of tokens.
func makePlan(t testing.TB, dir string, dtype shards.DType, tokens int) {
	t.Helper()
	for i, name := range []string{"web-0", "web-1", "code"} {
		rng := rand.New(rand.NewPCG(7, uint64(i)))
		var documents [][]uint32
		for left := tokens; left > 0; {
			document := make([]uint32, 1+rng.IntN(60))
			for k := range document[:len(document)-1] {
				document[k] = 1 + rng.Uint32N(999)
			}
			left -= len(document)
			documents = append(documents, document)
		}
		plantest.Shard(t, filepath.Join(dir, name), dtype, 1000, documents)
	}
	plantest.Seal(t, dir, "plan.json", fmt.Sprintf(`
sequence_length: %d
seed: 5
validation: 0.05
samples: %d
sources:
- {name: web, shards: [web-0, web-1], weight: 0.7}
- {name: code, shards: [code], weight: 0.3}
stages:
- samples: 250
- {samples: rest, weights: {web: 0.5, code: 0.5}}
skips:
- {from: 37, to: 41}
- {from: 310, to: 345}
`, sequenceLength, positions))
}

// A served plan.
type served struct {
	t       testing.TB
	data    *blend.Data
	service *Service
	socket  string
	client  *http.Client
	ctx     context.Context // of serving
	stop    func()          // ends it, as SIGTERM would
	ended   chan error
}

// serve opens a plan and answers at a unix socket until the test ends.
func serve(t testing.TB, dtype shards.DType, o Options) *served {
	t.Helper()
	return serveData(t, openPlan(t, dtype), o)
}

// socketFolder is a folder whose path is short enough for a socket in it.
func socketFolder(t testing.TB) string {
	t.Helper()
	folder, err := os.MkdirTemp("", "mula")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(folder) })
	return folder
}

func serveData(t testing.TB, data *blend.Data, o Options) *served {
	t.Helper()
	service, err := New(context.Background(), data, o)
	if err != nil {
		t.Fatal(err)
	}
	s := &served{t: t, data: data, service: service, socket: filepath.Join(socketFolder(t), "s"),
		ended: make(chan error, 1)}
	l, err := ListenUnix(s.socket)
	if err != nil {
		t.Fatal(err)
	}
	s.ctx, s.stop = context.WithCancel(context.Background())
	go func() { s.ended <- service.Serve(s.ctx, l, Access{}) }()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", s.socket)
	}}
	s.client = &http.Client{Transport: transport}
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		s.stop()
		if err := <-s.ended; err != nil {
			t.Error(err)
		}
		service.Close()
		if err := data.Close(); err != nil {
			t.Error(err)
		}
		s.nothingHeld()
	})
	return s
}

// nothingHeld checks that no stream holds anything.
func (s *served) nothingHeld() {
	s.t.Helper()
	c := &s.service.counts
	if a, b, d, e := c.streams.Load(), c.waiting.Load(), c.sendingBytes.Load(), c.aheadBytes.Load(); a != 0 || b != 0 ||
		d != 0 || e != 0 {
		s.t.Errorf("held after all streams have ended: %d streams, %d of them in line, %d and %d bytes", a, b, d, e)
	}
	if !s.service.streams.TryAcquire(int64(s.service.o.MaxStreams)) ||
		!s.service.sending.TryAcquire(s.service.o.Memory-s.service.o.Memory/4) ||
		!s.service.ahead.TryAcquire(s.service.o.Memory/4) ||
		!s.service.slots.TryAcquire((s.service.o.Memory-s.service.o.Memory/4)/2) {
		s.t.Error("room of streams that have ended was not given back")
	}
}

// get asks, and gives the status and what a JSON answer says.
func (s *served) get(path string) (status int, answer map[string]any) {
	s.t.Helper()
	r, err := s.client.Get("http://localhost" + path)
	if err != nil {
		s.t.Fatal(err)
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		s.t.Fatalf("%s: %s: %v", path, body, err)
	}
	return r.StatusCode, answer
}

// open asks for a stream and reads its schema.
func (s *served) open(query string) (*ipc.Reader, io.Closer) {
	s.t.Helper()
	r, err := s.client.Get("http://localhost/v1/stream?" + query)
	if err != nil {
		s.t.Fatal(err)
	}
	if r.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(r.Body)
		r.Body.Close()
		s.t.Fatalf("%s: %s: %s", query, r.Status, body)
	}
	records, err := ipc.NewReader(r.Body, ipc.WithBodySizeLimit(1<<30), ipc.WithMetadataSizeLimit(1<<20))
	if err != nil {
		r.Body.Close()
		s.t.Fatal(err)
	}
	return records, r.Body
}

// A row is a sample of a stream.
type row struct {
	position, epoch, window, shard, offset int64
	source                                 string
	tokens                                 []uint32
	starts                                 []int32
}

// rowsOf reads a record with all columns.
func rowsOf(record arrow.RecordBatch) (rows []row) {
	column := func(name string) arrow.Array { return record.Column(record.Schema().FieldIndices(name)[0]) }
	source, tokens, starts := column("source").(*array.Dictionary), column("tokens").(*array.FixedSizeList),
		column("document_starts").(*array.List)
	for i := range int(record.NumRows()) {
		r := row{position: column("position").(*array.Int64).Value(i),
			epoch:  int64(column("epoch").(*array.Int32).Value(i)),
			window: column("window").(*array.Int64).Value(i), shard: int64(column("shard").(*array.Int32).Value(i)),
			offset: column("offset").(*array.Int64).Value(i),
			source: source.Dictionary().(*array.String).Value(source.GetValueIndex(i))}
		for k := i * (sequenceLength + 1); k < (i+1)*(sequenceLength+1); k++ {
			switch values := tokens.ListValues().(type) {
			case *array.Uint16:
				r.tokens = append(r.tokens, uint32(values.Value(k)))
			case *array.Int32:
				r.tokens = append(r.tokens, uint32(values.Value(k)))
			}
		}
		from, to := starts.ValueOffsets(i)
		r.starts = slices.Clone(starts.ListValues().(*array.Int32).Values()[from:to])
		rows = append(rows, r)
	}
	return rows
}

// expected reads a position without a stream; ok is false if the plan skips it.
func expected(t testing.TB, d *blend.Data, position int64) (r row, ok bool) {
	t.Helper()
	sample, parts, err := d.Peek(context.Background(), position)
	if err != nil {
		t.Fatal(err)
	}
	tokens := make([]uint32, sequenceLength+1)
	if err := d.Tokens(tokens, sample); err != nil {
		t.Fatal(err)
	}
	r = row{position, sample.Epoch, sample.Window, int64(sample.Shard), sample.Token, d.Sources[sample.Source].Name,
		tokens, nil}
	for _, p := range parts {
		if p.First == sample.Token+int64(p.From) {
			r.starts = append(r.starts, int32(p.From))
		}
	}
	return r, !sample.Skipped
}

func sameRow(a, b row) bool {
	return a.position == b.position && a.epoch == b.epoch && a.window == b.window && a.shard == b.shard &&
		a.offset == b.offset && a.source == b.source &&
		slices.Equal(a.tokens, b.tokens) && slices.Equal(a.starts, b.starts)
}

// However a plan is asked for, its ranks together get each of its samples once, at its place, in as
// many records as is promised.
func TestStreamsAreThePlan(t *testing.T) {
	for _, dtype := range []shards.DType{shards.UInt16, shards.Int32} {
		t.Run(string(dtype), func(t *testing.T) {
			s := serve(t, dtype, Options{})
			plan := make([]row, positions)
			skipped := make([]bool, positions)
			for position := range plan {
				there := false
				plan[position], there = expected(t, s.data, int64(position))
				skipped[position] = !there
			}
			rapid.Check(t, func(rt *rapid.T) {
				micro := rapid.IntRange(1, 9).Draw(rt, "micro_batch")
				parts := rapid.IntRange(1, 5).Draw(rt, "records of a step")
				world := rapid.IntRange(1, 4).Draw(rt, "world")
				batch := micro * parts * world
				from := rapid.Int64Range(0, (positions-1)/int64(batch)).Draw(rt, "first step") * int64(batch)
				to := min(positions, from+rapid.Int64Range(0, (positions-from)/int64(batch)+1).Draw(rt,
					"steps")*int64(batch))
				at := fmt.Sprintf("from=%d", from)
				if rapid.Bool().Draw(rt, "by step") {
					at = fmt.Sprintf("step=%d", from/int64(batch))
				}
				if to > 0 {
					at += fmt.Sprintf("&to=%d", to)
				} else {
					to = positions
				}
				got := make(map[int64]row)
				for rank := range world {
					records, body := s.open(fmt.Sprintf("batch_size=%d&rank=%d&world=%d&micro_batch=%d&%s", batch, rank,
						world, micro, at))
					n := 0
					for ; records.Next(); n++ {
						step, part := n/parts, n%parts
						first := from + int64(step*batch+rank*micro*parts+part*micro)
						for _, r := range rowsOf(records.RecordBatch()) {
							if r.position < first || r.position >= first+int64(micro) {
								rt.Fatalf("record %d of rank %d has position %d; it is of [%d, %d)", n, rank,
									r.position, first, first+int64(micro))
							}
							if _, twice := got[r.position]; twice {
								rt.Fatalf("position %d came twice", r.position)
							}
							got[r.position] = r
						}
					}
					if err := records.Err(); err != nil {
						rt.Fatal(err)
					}
					if want := (int(to-from) + batch - 1) / batch * parts; n != want {
						rt.Fatalf("rank %d of %d: %d records, want %d", rank, world, n, want)
					}
					records.Release()
					body.Close()
				}
				for position := from; position < to; position++ {
					r, came := got[position]
					if came == skipped[position] || came && !sameRow(r, plan[position]) {
						rt.Fatalf("position %d: %v %+v, want %v %+v", position, came, r, !skipped[position],
							plan[position])
					}
				}
			})
		})
	}
}

// A stream may be asked for from where the plan ends: there is nothing to be read there, and
// nothing to be refused.
func TestStreamAtTheEnd(t *testing.T) {
	s := serve(t, shards.UInt16, Options{})
	records, body := s.open(fmt.Sprintf("batch_size=64&from=%d", positions))
	defer body.Close()
	if records.Next() || records.Err() != nil {
		t.Errorf("a record, or an error: %v", records.Err())
	}
	records.Release()
}

func TestColumns(t *testing.T) {
	s := serve(t, shards.UInt16, Options{})
	for query, want := range map[string]string{
		"":                         "position source epoch window tokens document_starts shard offset",
		"&columns=tokens,position": "tokens position",
		"&columns=offset":          "position tokens offset",
		"&columns=shard,position":  "tokens shard position",
		"&columns=source,tokens":   "position source tokens",
		"&columns=document_starts,epoch,window,shard,offset,source,tokens,position": "document_starts epoch window " +
			"shard offset source tokens position",
	} {
		records, body := s.open("batch_size=8&to=40" + query)
		var names []string
		for _, f := range records.Schema().Fields() {
			names = append(names, f.Name)
		}
		if got := strings.Join(names, " "); got != want {
			t.Errorf("%s: columns %s, want %s", query, got, want)
		}
		position := int64(0)
		for records.Next() {
			record := records.RecordBatch()
			for i := range int(record.NumRows()) {
				column := record.Column(records.Schema().FieldIndices("position")[0]).(*array.Int64)
				if r, _ := expected(t, s.data, position); column.Value(i) != r.position {
					t.Errorf("%s: position %d came in another place", query, position)
				}
				position++
			}
		}
		if position != 37 { // [37, 40) is skipped
			t.Errorf("%s: %d samples, want 37", query, position)
		}
		if err := records.Err(); err != nil {
			t.Error(err)
		}
		records.Release()
		body.Close()
	}
}

func TestMetadata(t *testing.T) {
	s := serve(t, shards.UInt16, Options{})
	records, body := s.open("batch_size=8&rank=1&world=2&step=3&to=504&micro_batch=2")
	defer body.Close()
	defer records.Release()
	got := records.Schema().Metadata()
	for key, want := range map[string]string{"mula.plan": s.data.Fingerprint(), "mula.sequence_length": "16",
		"mula.batch_size": "8", "mula.rank": "1", "mula.world": "2",
		"mula.from": "24", "mula.to": "504", "mula.micro_batch": "2", "mula.order_version": "1"} {
		if value, ok := got.GetValue(key); !ok || value != want {
			t.Errorf("%s is %q, want %q", key, value, want)
		}
	}
}

func TestPlan(t *testing.T) {
	s := serve(t, shards.Int32, Options{})
	r, err := s.client.Get("http://localhost/v1/plan")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	var got PlanDescription
	d := json.NewDecoder(r.Body)
	d.DisallowUnknownFields()
	if err := d.Decode(&got); err != nil {
		t.Fatal(err)
	}
	if got.Fingerprint != s.data.Fingerprint() || got.OrderVersion != "1" || got.SequenceLength != 16 ||
		got.Positions != 600 || got.TokenType != "int32" {
		t.Errorf("plan: %+v", got)
	}
	if len(got.Sources) != 2 || got.Sources[0] != (SourceDescription{"web", s.data.Sources[0].Windows()}) ||
		got.Sources[1].Name != "code" {
		t.Errorf("sources: %+v", got.Sources)
	}
	if !slices.Equal(got.Stages, []StageDescription{{0, 250}, {250, 600}}) ||
		!slices.Equal(got.Skips, [][2]int64{{37, 41}, {310, 345}}) {
		t.Errorf("stages %v, skips %v", got.Stages, got.Skips)
	}
}

// An amended plan names its parent, so that a client can resume with the state of the parent.
func TestParents(t *testing.T) {
	parent := openPlan(t, shards.Int32)
	defer parent.Close()
	child, err := blend.Amend(t.Context(), parent.Plan,
		&blend.Amendment{At: 400, Skips: []blend.Range{{From: 410, To: 420}}, Reason: "a spike"}, blend.SealOptions{})
	if err != nil {
		t.Fatal(err)
	}
	data, err := blend.Open(t.Context(), child, blend.OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	s, err := New(t.Context(), data, Options{})
	if err != nil {
		t.Fatal(err)
	}
	want := []blend.Parent{{Fingerprint: parent.Fingerprint(), At: 400, Reason: "a spike"}}
	if got := s.Describe(); !slices.Equal(got.Parents, want) || got.OrderVersion != "2" {
		t.Errorf("order %s, parents %+v; want order 2 and %+v", got.OrderVersion, got.Parents, want)
	}
}

// The old path is answered like the current one, with a warning.
func TestOldPeekPath(t *testing.T) {
	s := serve(t, shards.UInt16, Options{})
	for path, want := range map[string]string{"/v1/peek": "", "/v1/where": "/v1/where is now called /v1/peek"} {
		response, err := s.client.Get("http://mula" + path + "?position=1")
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		if got := response.Header.Get("Mula-Warning"); response.StatusCode != http.StatusOK || got != want {
			t.Errorf("%s: status %d, warning %q, want %q", path, response.StatusCode, got, want)
		}
	}
}

func TestPeek(t *testing.T) {
	s := serve(t, shards.UInt16, Options{})
	for _, position := range []int64{0, 38, 599} {
		status, got := s.get(fmt.Sprint("/v1/peek?position=", position))
		want, there := expected(t, s.data, position)
		if status != http.StatusOK || got["source"] != want.source || got["epoch"] != float64(want.epoch) ||
			got["window"] != float64(want.window) ||
			got["shard"] != float64(want.shard) || got["offset"] != float64(want.offset) || got["skipped"] != !there {
			t.Errorf("position %d: %d %v, want %+v", position, status, got, want)
		}
		to := 0.0
		for _, d := range got["documents"].([]any) {
			d := d.(map[string]any)
			if d["from"] != to || !strings.Contains(d["id"].(string), "/") {
				t.Errorf("position %d: document %v", position, d)
			}
			to = d["to"].(float64)
		}
		if to != sequenceLength+1 {
			t.Errorf("position %d: documents up to token %v", position, to)
		}
	}
}

// The hash of a step is the one of the fingerprint log.
func TestHash(t *testing.T) {
	s := serve(t, shards.UInt16, Options{})
	for _, batch := range []int{1, 7, 64, 600} {
		err := stream.Hash(context.Background(), s.data, stream.HashOptions{BatchSize: batch}, func(
			want fingerprint.StepHash) error {
			if want.Step%13 != 0 && want.Step != s.data.Steps(batch)-1 {
				return nil
			}
			r, err := s.client.Get(fmt.Sprintf("http://localhost/v1/hash?step=%d&batch_size=%d", want.Step, batch))
			if err != nil {
				return err
			}
			defer r.Body.Close()
			got, err := io.ReadAll(r.Body)
			if err != nil {
				return err
			}
			if line, err := json.Marshal(want); err != nil || !bytes.Equal(bytes.TrimSpace(got), line) {
				t.Errorf("batch size %d: %s, want %s (%v)", batch, got, line, err)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// The metrics are of Prometheus' text format, and count what went by.
func TestMetrics(t *testing.T) {
	s := serve(t, shards.UInt16, Options{})
	records, body := s.open("batch_size=60")
	for records.Next() {
	}
	records.Release()
	body.Close()
	s.get("/v1/stream?batch_size=0")
	s.waitFor("no streams", func() bool { return s.service.counts.streams.Load() == 0 })
	r, err := s.client.Get("http://localhost/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	values := make(map[string]float64)
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if values[name], err = strconv.ParseFloat(value, 64); err != nil || !strings.HasPrefix(name, "mula_") {
			t.Errorf("%q: %v", line, err)
		}
	}
	for name, want := range map[string]float64{"mula_records_total": 10, "mula_samples_total": positions - 4 - 35,
		"mula_streams": 0, "mula_streams_opened_total": 1,
		"mula_streams_completed_total": 1, "mula_streams_refused_total": 1, "mula_memory_sending_bytes": 0,
		"mula_memory_limit_bytes": 1 << 30} {
		if got, ok := values[name]; !ok || got != want {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
	if _, ok := values[fmt.Sprintf("mula_plan_info{fingerprint=%q,order_version=\"1\"}", s.data.Fingerprint())]; !ok {
		t.Errorf("the plan is not named: %s", text)
	}
}

// waitFor waits for what must come.
func (s *served) waitFor(what string, ok func() bool) {
	s.t.Helper()
	testwait.Until(s.t, what, ok)
}

// A damaged block ends a stream early. A request that starts there gets the reason.
func TestDamage(t *testing.T) {
	dir := t.TempDir()
	makePlan(t, dir, shards.UInt16, 400000)
	data := openFolder(t, dir)
	var mu sync.Mutex
	var reports []string
	s := serveData(t, data, Options{Report: func(text string) {
		mu.Lock()
		defer mu.Unlock()
		reports = append(reports, text)
	}})
	if status, answer := s.get("/healthz"); status != http.StatusOK || len(answer) != 1 || answer["status"] != "ok" {
		t.Errorf("before the damage: %d %v", status, answer)
	}
	// The first block of 16 KiB that neither the check values nor the first steps read.
	type block struct {
		source, shard int
		number        int64
	}
	blocks := func(position int64) (list []block) {
		r, err := data.Locate(position) // which reads nothing
		if err != nil {
			t.Fatal(err)
		}
		for _, token := range []int64{r.Token, r.Token + sequenceLength} {
			list = append(list, block{r.Source, r.Shard, 2 * token / (16 << 10)})
		}
		return list
	}
	was := make(map[block]bool)
	for _, c := range data.Checks {
		for _, b := range blocks(c.Position) {
			was[b] = true
		}
	}
	hit := int64(8)
	for ; was[blocks(hit)[0]] || was[blocks(hit)[1]] || hit == 38; hit++ {
		for _, b := range blocks(hit) {
			was[b] = true
		}
	}
	sample, err := data.Locate(hit)
	if err != nil {
		t.Fatal(err)
	}
	path := data.ShardPath(sample.Source, sample.Shard) + ".bin"
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var b [1]byte
	if _, err := f.ReadAt(b[:], 2*sample.Token); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 1
	if _, err := f.WriteAt(b[:], 2*sample.Token); err != nil {
		t.Fatal(err)
	}
	records, body := s.open("batch_size=4")
	good := int64(0)
	for records.Next() {
		good++
	}
	if err := records.Err(); !errors.Is(err, io.ErrUnexpectedEOF) || good != hit/4 {
		t.Errorf("%d records, then %v; want an unexpected end after %d", good, err, hit/4)
	}
	records.Release()
	body.Close()
	status, answer := s.get(fmt.Sprintf("/v1/stream?batch_size=4&step=%d", good))
	if text, _ := answer["error"].(string); status != http.StatusInternalServerError ||
		!strings.Contains(text, filepath.Base(path)) {
		t.Errorf("asked again from step %d: %d %q", good, status, text)
	}
	s.get(fmt.Sprintf("/v1/hash?batch_size=4&step=%d", good))

	// All clients see that there is damage. Clients with the token, and the operator's log, see
	// where it is, once.
	if status, answer := s.get("/healthz"); status != http.StatusInternalServerError || len(answer) != 1 ||
		answer["status"] != "damaged" {
		t.Errorf("/healthz: %d %v", status, answer)
	}
	status, answer = s.get("/v1/health")
	damage, _ := answer["damage"].([]any)
	if status != http.StatusInternalServerError || answer["status"] != "damaged" ||
		answer["plan"] != data.Fingerprint() || len(damage) != 1 {
		t.Fatalf("/v1/health: %d %v", status, answer)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(reports) != 1 || reports[0] != damage[0] || !strings.Contains(reports[0], path) {
		t.Errorf("reported: %q, want %q once", reports, damage)
	}
	r, err := s.client.Get("http://localhost/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil || !strings.Contains(string(text), "\nmula_errors_total 3\n") {
		t.Errorf("two streams and a fingerprint failed: %s, %v", text, err)
	}
}

// Each shard is reported once, for any number of errors. Refusals and disconnected clients are not
// errors of the data.
func TestFailures(t *testing.T) {
	data := openPlan(t, shards.UInt16)
	defer data.Close()
	var reports []string
	service, err := New(context.Background(), data,
		Options{Report: func(text string) { reports = append(reports, text) }})
	if err != nil {
		t.Fatal(err)
	}
	defer service.Close()
	for _, err := range []error{
		fmt.Errorf("%s.bin: token 5", data.ShardPath(0, 0)), fmt.Errorf("%s.bin: token 6", data.ShardPath(0, 0)),
		fmt.Errorf("%s.idx: is gone", data.ShardPath(0, 0)),
		fmt.Errorf("%s.bin: token 5", data.ShardPath(1, 0)), errors.New("two\nlines"), errors.New("two\nlines"),
		fmt.Errorf("read: %w", context.Canceled), errStopping, service.tooMany(), nil} {
		service.failed(err)
	}
	want := []string{data.ShardPath(0, 0) + ".bin: token 5", data.ShardPath(1, 0) + ".bin: token 5", "two lines"}
	if !slices.Equal(reports, want) || service.counts.errors.Load() != 6 {
		t.Errorf("%d errors, reported %q; want 6 and %q", service.counts.errors.Load(), reports, want)
	}
}
