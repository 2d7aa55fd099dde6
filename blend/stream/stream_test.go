package stream

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"pgregory.net/rapid"

	"mula/blend"
	"mula/blend/plantest"
	"mula/internal/testwait"
	"mula/shards"
	"mula/shards/shardtest"
	"mula/shards/verifier"
)

func TestMain(m *testing.M) { plantest.Main(m) }

// A corpus is a directory with shards of made-up documents, for one blend.
type corpus struct {
	t   testing.TB
	dir string
}

func newCorpus(t testing.TB) corpus { return corpus{t, t.TempDir()} }

// shard writes a shard of documents with these lengths.
func (c corpus) shard(name string, dtype shards.DType, lengths ...int) {
	c.t.Helper()
	shardtest.Write(c.t, c.dir, name, dtype, lengths...)
}

// plan builds the plan of a blend.yaml, writes it and reads it again.
func (c corpus) plan(text string) *blend.Plan {
	c.t.Helper()
	p, err := blend.ReadPlan(plantest.Seal(c.t, c.dir, "plan.json", text))
	if err != nil {
		c.t.Fatal(err)
	}
	return p
}

// open opens the plan of a blend.yaml.
func (c corpus) open(text string) *blend.Data {
	c.t.Helper()
	return c.openPlan(c.plan(text), blend.OpenOptions{})
}

// openPlan opens a plan until the test ends.
func (c corpus) openPlan(p *blend.Plan, o blend.OpenOptions) *blend.Data {
	c.t.Helper()
	d, err := blend.Open(context.Background(), p, o)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		if err := d.Close(); err != nil {
			c.t.Error(err)
		}
	})
	return d
}

// mixed returns a corpus of three sources, and a blend of them with stages, weights, skips, a limit
// of epochs and validation.
func mixed(t testing.TB) (corpus, string) {
	t.Helper()
	text, err := os.ReadFile("../testdata/mixed.yaml")
	if err != nil {
		t.Fatal(err)
	}
	c := newCorpus(t)
	shardtest.WriteMixed(t, c.dir)
	return c, string(text)
}

// documentStart returns the first token of a document.
func documentStart(t testing.TB, s *shards.Shard, document int64) int64 {
	t.Helper()
	start, err := s.DocumentStart(document)
	if err != nil {
		t.Fatal(err)
	}
	return start
}

// A row is one sample of a stream.
type row struct {
	position, epoch, window int64
	source                  int
	name                    string
	tokens                  []uint32
	starts                  []int32
}

// text is a row as bytes, for hashing.
func (r row) text() []byte { return fmt.Appendf(nil, "%+v\n", r) }

// expected reads the positions one by one, without a stream.
func expected(t testing.TB, d *blend.Data, from, to int64) (rows []row) {
	t.Helper()
	opened := map[string]*shards.Shard{}
	for position := from; position < to; position++ {
		s, err := d.Locate(position)
		if err != nil {
			t.Fatal(err)
		}
		if s.Skipped {
			continue
		}
		r := row{position: position, epoch: s.Epoch, window: s.Window, source: s.Source, name: d.Sources[s.Source].Name,
			tokens: make([]uint32, d.SequenceLength+1)}
		if err := d.Tokens(r.tokens, s); err != nil {
			t.Fatal(err)
		}
		// Find the starts by a walk over all documents.
		prefix := d.ShardPath(s.Source, s.Shard)
		if opened[prefix] == nil {
			shard, err := shards.Open(prefix)
			if err != nil {
				t.Fatal(err)
			}
			defer shard.Close()
			opened[prefix] = shard
		}
		shard := opened[prefix]
		for doc := range shard.Documents() {
			start, end := documentStart(t, shard, doc), documentStart(t, shard, doc+1)
			if start >= s.Token && start < s.Token+int64(len(r.tokens)) && end > start {
				r.starts = append(r.starts, int32(start-s.Token))
			}
		}
		rows = append(rows, r)
	}
	return rows
}

// rowsOf reads a record.
func rowsOf(t testing.TB, record arrow.RecordBatch) (rows []row) {
	t.Helper()
	b, err := NewBatch(record)
	if err != nil {
		t.Fatal(err)
	}
	for i := range b.Rows() {
		rows = append(rows, row{b.Position(i), b.Epoch(i), b.Window(i), b.Source(i), b.SourceName(i),
			b.AppendTokens(nil, i), slices.Clone(b.DocumentStarts(i))})
	}
	return rows
}

// read reads a stream to its end, a slice of rows for each step. It checks that nothing is left in
// the allocator.
func read(t testing.TB, d *blend.Data, o Options) (steps [][]row) {
	t.Helper()
	alloc := memory.NewCheckedAllocator(memory.NewGoAllocator())
	defer alloc.AssertSize(t, 0)
	o.Allocator = alloc
	s, err := New(context.Background(), d, o)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for {
		record, err := s.Next()
		if errors.Is(err, io.EOF) {
			if _, again := s.Next(); !errors.Is(again, io.EOF) {
				t.Errorf("after the end: %v", again)
			}
			return steps
		}
		if err != nil {
			t.Fatal(err)
		}
		steps = append(steps, rowsOf(t, record))
		record.Release()
	}
}

// The metamorphic test: one plan, many ways to read it, one hash of everything that was read.
func TestOneOrderHoweverRead(t *testing.T) {
	c, text := mixed(t)
	readEveryWay(t, c.open(text))
}

// readEveryWay reads a plan of about 600 positions with many options and compares the results.
func readEveryWay(t *testing.T, d *blend.Data) {
	t.Helper()
	const batch = 24
	want := sha256.New()
	for _, r := range expected(t, d, 0, d.Length()) {
		want.Write(r.text())
	}
	check := func(how string, rows []row) {
		t.Helper()
		got := sha256.New()
		for _, r := range rows {
			got.Write(r.text())
		}
		if !bytes.Equal(got.Sum(nil), want.Sum(nil)) {
			t.Errorf("%s: read something else", how)
		}
	}
	for world := 1; world <= 4; world++ {
		for _, prefetch := range []int{0, 1, 2, 8} {
			var ranks [][][]row
			for rank := range world {
				ranks = append(ranks, read(t, d, Options{BatchSize: batch, Rank: rank, World: world,
					Prefetch: prefetch}))
			}
			var rows []row
			for step := range ranks[0] {
				for rank := range ranks {
					if len(ranks[rank]) != len(ranks[0]) {
						t.Fatalf("rank %d has %d steps, rank 0 has %d", rank, len(ranks[rank]), len(ranks[0]))
					}
					first := int64(step*batch + rank*batch/world)
					for _, r := range ranks[rank][step] {
						if r.position < first || r.position >= first+int64(batch/world) {
							t.Fatalf("step %d of rank %d of %d has position %d", step, rank, world, r.position)
						}
					}
					rows = append(rows, ranks[rank][step]...)
				}
			}
			check(fmt.Sprintf("%d ranks, prefetch %d", world, prefetch), rows)
		}
	}
	// Stopped at any step, and gone on with another number of ranks, of the remaining positions
	// alone.
	for _, at := range []int64{batch, 5 * batch, 17 * batch, d.Length()} {
		var rows []row
		for _, step := range read(t, d, Options{To: at, BatchSize: batch, Prefetch: 3}) {
			rows = append(rows, step...)
		}
		if at < d.Length() {
			first := read(t, d, Options{From: at, BatchSize: batch, Rank: 0, World: 2, Prefetch: 1})
			second := read(t, d, Options{From: at, BatchSize: batch, Rank: 1, World: 2})
			for step := range first {
				rows = append(append(rows, first[step]...), second[step]...)
			}
		}
		check(fmt.Sprintf("restarted at %d", at), rows)
	}
	// By other batch sizes, and through Arrow's stream format.
	for _, size := range []int{1, 7, 600, 1000} {
		var rows []row
		for _, step := range read(t, d, Options{BatchSize: size, Prefetch: 2}) {
			rows = append(rows, step...)
		}
		check(fmt.Sprintf("batches of %d", size), rows)
	}
	check("as an IPC stream", readIPC(t, d, Options{BatchSize: batch, Prefetch: 2}))
}

func readIPC(t testing.TB, d *blend.Data, o Options) (rows []row) {
	t.Helper()
	alloc := memory.NewCheckedAllocator(memory.NewGoAllocator())
	defer alloc.AssertSize(t, 0)
	o.Allocator = alloc
	var b bytes.Buffer
	if err := WriteIPC(context.Background(), &b, d, o); err != nil {
		t.Fatal(err)
	}
	r, err := ipc.NewReader(&b, ipc.WithAllocator(alloc))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Release()
	for r.Next() {
		rows = append(rows, rowsOf(t, r.RecordBatch())...)
	}
	if err := r.Err(); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	if got, _ := r.Schema().Metadata().GetValue("mula.plan"); got != d.Fingerprint() {
		t.Errorf("the schema names plan %q", got)
	}
	return rows
}

// Any part of any stream agrees with the positions read one by one.
func TestStreamParts(t *testing.T) {
	c, text := mixed(t)
	d := c.open(text)
	all := expected(t, d, 0, d.Length())
	rapid.Check(t, func(rt *rapid.T) {
		world := rapid.IntRange(1, 5).Draw(rt, "world")
		o := Options{
			BatchSize: world * rapid.IntRange(1, 30).Draw(rt, "share"),
			Rank:      rapid.IntRange(0, world-1).Draw(rt, "rank"),
			World:     world,
			Prefetch:  rapid.IntRange(0, 3).Draw(rt, "prefetch"),
		}
		o.From = int64(o.BatchSize) * rapid.Int64Range(0, 600/int64(o.BatchSize)).Draw(rt, "first step")
		o.To = min(600, o.From+int64(o.BatchSize)*rapid.Int64Range(1, 600/int64(o.BatchSize)+1).Draw(rt, "steps"))
		steps := read(t, d, o)
		if want := int((o.To - o.From + int64(o.BatchSize) - 1) / int64(o.BatchSize)); len(steps) != want {
			rt.Fatalf("%d steps, want %d", len(steps), want)
		}
		var got []row
		for _, s := range steps {
			got = append(got, s...)
		}
		var want []row
		for _, r := range all {
			if share := int64(o.BatchSize / world); r.position >= o.From && r.position < o.To &&
				(r.position-o.From)%int64(o.BatchSize)/share == int64(o.Rank) {
				want = append(want, r)
			}
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			rt.Fatalf("got %v\nwant %v", got, want)
		}
	})
}

// Shards of both widths: the tokens are int32, and equal.
func TestMixedWidths(t *testing.T) {
	c := newCorpus(t)
	c.shard("a", shards.UInt16, 100, 60)
	c.shard("b", shards.Int32, 100, 3, 30)
	d := c.open("sequence_length: 16\nsources:\n  - {name: a, shards: [a]}\n  - {name: b, shards: [b]}\n")
	rows := readIPC(t, d, Options{BatchSize: 4})
	if fmt.Sprint(rows) != fmt.Sprint(expected(t, d, 0, d.Length())) {
		t.Error("read something else")
	}
	if d.TokenBytes() != 4 {
		t.Errorf("tokens of %d bytes", d.TokenBytes())
	}
}

func TestStreamRefuses(t *testing.T) {
	c, text := mixed(t)
	d := c.open(text)
	for name, v := range map[string]struct {
		o    Options
		want string
	}{
		"batch":    {Options{}, "batch size 0"},
		"rank":     {Options{BatchSize: 4, Rank: 2, World: 2}, "rank 2 of 2"},
		"world":    {Options{BatchSize: 4, World: 3}, "cannot be divided among 3 ranks"},
		"from":     {Options{BatchSize: 4, From: -1}, "[-1, 600)"},
		"to":       {Options{BatchSize: 4, To: 601}, "[0, 601)"},
		"order":    {Options{BatchSize: 4, From: 8, To: 4}, "the end 4 is before the start 8"},
		"prefetch": {Options{BatchSize: 4, Prefetch: -1}, "prefetch -1"},
		"ahead":    {Options{BatchSize: 4, Prefetch: 4097}, "prefetch 4097 is not between 0 and 4096"},
		"large":    {Options{BatchSize: 1 << 30}, "2^31 tokens"},
		// times the 17 tokens of a sample: 16 beyond 2^64
		"larger":  {Options{BatchSize: 1<<64/17 + 1}, "2^31 tokens"},
		"largest": {Options{BatchSize: 1<<63 - 1}, "2^60 positions"},
	} {
		s, err := New(context.Background(), d, v.o)
		if err == nil || !strings.Contains(err.Error(), v.want) {
			t.Errorf("%s: %v, want %q", name, err, v.want)
		}
		if s != nil {
			s.Close()
		}
	}
}

// TestStreamGrid checks that [mula/blend.Grid] and a stream accept the same starts and ends of
// steps, in a plan of 600 positions. A test of the Python client reads the same table.
func TestStreamGrid(t *testing.T) {
	c, text := mixed(t)
	d := c.open(text)
	data, err := os.ReadFile("../testdata/grid.json")
	if err != nil {
		t.Fatal(err)
	}
	var table []struct {
		BatchSize int `json:"batch_size"`
		From, To  int64
		Valid     bool
	}
	if err := json.Unmarshal(data, &table); err != nil || len(table) == 0 {
		t.Fatalf("%d rows, %v", len(table), err)
	}
	for _, row := range table {
		grid, err := d.Grid(row.BatchSize)
		if err == nil {
			err = grid.Check(row.From, row.To)
		}
		if (err == nil) != row.Valid {
			t.Errorf("%+v: %v", row, err)
		}
		s, err := New(t.Context(), d, Options{BatchSize: row.BatchSize, From: row.From, To: row.To})
		if (err == nil) != row.Valid {
			t.Errorf("%+v: a stream: %v", row, err)
		}
		if s != nil {
			s.Close()
		}
	}
}

// A stream can be left at any moment: cancelled, closed early, or given up after an error. Nothing
// stays behind (goleak, the allocator).
func TestStreamLeftEarly(t *testing.T) {
	c, text := mixed(t)
	d := c.open(text)
	for _, prefetch := range []int{0, 1, 4, 100} {
		for reads := range 4 {
			alloc := memory.NewCheckedAllocator(memory.NewGoAllocator())
			ctx, cancel := context.WithCancel(context.Background())
			s, err := New(ctx, d, Options{BatchSize: 8, Prefetch: prefetch, Allocator: alloc})
			if err != nil {
				t.Fatal(err)
			}
			for range reads {
				record, err := s.Next()
				if err != nil {
					t.Fatal(err)
				}
				record.Release()
			}
			if reads%2 == 1 {
				cancel()
				for range 2 { // what was ready before may still come, but then the error stays
					if _, err = s.Next(); err != nil {
						break
					}
				}
				if !errors.Is(err, context.Canceled) {
					t.Errorf("after cancelling: %v", err)
				}
			}
			s.Close()
			if _, err := s.Next(); err == nil {
				t.Error("a closed stream gave a record")
			}
			cancel()
			alloc.AssertSize(t, 0)
		}
	}
}

// As many records are read ahead as are asked for, and no more.
func TestPrefetchIsBounded(t *testing.T) {
	c, text := mixed(t)
	d := c.open(text)
	// held returns the memory of records: the records that are read ahead after the first has been
	// taken, or the same number of records after the first without reading ahead.
	held := func(records int, ahead bool) (bytes int) {
		synctest.Test(t, func(t *testing.T) {
			alloc := memory.NewCheckedAllocator(memory.NewGoAllocator())
			o := Options{BatchSize: 8, Allocator: alloc}
			if ahead {
				o.Prefetch = records
			}
			s, err := New(context.Background(), d, o)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			next := func() arrow.RecordBatch {
				record, err := s.Next()
				if err != nil {
					t.Fatal(err)
				}
				return record
			}
			next().Release()
			for range records {
				if !ahead {
					defer next().Release()
				}
			}
			synctest.Wait() // until all that reads ahead waits for room
			bytes = alloc.CurrentAlloc()
		})
		return bytes
	}
	for _, records := range []int{1, 3, 7} {
		if got, want := held(records, true), held(records, false); got != want {
			t.Errorf("prefetch %d: %d bytes were read ahead, the next records take %d", records, got, want)
		}
	}
}

// Ids outside the vocabulary are an error with their location, whether the stream or Tokens finds
// them.
func TestForeignIDs(t *testing.T) {
	c := newCorpus(t)
	c.shard("a", shards.UInt16, 400)
	const text = "sequence_length: 16\nsources:\n  - {name: src, shards: [a]}\n"
	p := c.plan(text)
	// The file is changed in place, where no check value looks: the plan opens, the stream finds
	// it. Without sums, which would find it before.
	if err := os.Remove(filepath.Join(c.dir, "a.sums")); err != nil {
		t.Fatal(err)
	}
	checked := map[int64]bool{}
	for _, k := range p.Checks {
		checked[k.Window] = true
	}
	var bad blend.Sample
	for position := range p.Length() {
		s, err := p.Locate(position)
		if err != nil {
			t.Fatal(err)
		}
		if !checked[s.Window] && !checked[s.Window-1] && !checked[s.Window+1] {
			bad = s
		}
	}
	f, err := os.OpenFile(filepath.Join(c.dir, "a.bin"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	token := bad.Token + 5
	if _, err := f.WriteAt(binary.LittleEndian.AppendUint16(nil, shardtest.Vocabulary+7), 2*token); err != nil {
		t.Fatal(err)
	}
	f.Close()
	d := c.openPlan(p, blend.OpenOptions{})
	for _, prefetch := range []int{0, 2} {
		err := WriteIPC(context.Background(), io.Discard, d, Options{BatchSize: 4, Prefetch: prefetch})
		if err == nil {
			t.Fatal("no error")
		}
		for _, want := range []string{`source "src"`, "a.bin", fmt.Sprintf("token %d (byte %d)", token, 2*token),
			"id 1007", "below 1000", fmt.Sprintf("position %d", bad.Position)} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%v; want %q in it", err, want)
			}
		}
	}
	report, err := d.Check(context.Background(), blend.CheckOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if !report.Failed() || report.Shards[0].BadIDs != 1 || report.Shards[0].MaxID != 1007 || report.Shards[0].Verified {
		t.Errorf("%+v", report)
	}
	if all := fmt.Sprint(report.Findings); !strings.Contains(all, "a.bin") ||
		!strings.Contains(all, fmt.Sprintf("token %d", token)) {
		t.Errorf("findings: %s", all)
	}
}

// failing is a pipe whose reader went away.
type failing struct{ after int }

func (f *failing) Write(p []byte) (int, error) {
	if f.after -= len(p); f.after < 0 {
		return 0, io.ErrClosedPipe
	}
	return len(p), nil
}

func TestWriteIPCFails(t *testing.T) {
	c, text := mixed(t)
	d := c.open(text)
	for _, after := range []int{0, 500, 5000, 20000} {
		alloc := memory.NewCheckedAllocator(memory.NewGoAllocator())
		if err := WriteIPC(context.Background(), &failing{after}, d, Options{BatchSize: 8, Prefetch: 2,
			Allocator: alloc}); !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("after %d bytes: %v", after, err)
		}
		alloc.AssertSize(t, 0)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(errors.New("enough"))
	if err := WriteIPC(ctx, io.Discard, d, Options{BatchSize: 8}); err == nil || err.Error() != "enough" {
		t.Errorf("after cancelling: %v", err)
	}
}

func BenchmarkStream(b *testing.B) {
	c := newCorpus(b)
	c.shard("a", shards.UInt16, shardtest.Lengths(2000, 3000)...)
	d := c.open("sequence_length: 2048\nsources:\n  - {name: a, shards: [a]}\n")
	for _, prefetch := range []int{0, 2} {
		b.Run(fmt.Sprint("prefetch", prefetch), func(b *testing.B) {
			b.SetBytes(2 * 2049 * d.Length())
			for range b.N {
				s, err := New(context.Background(), d, Options{BatchSize: 32, Prefetch: prefetch})
				if err != nil {
					b.Fatal(err)
				}
				for {
					record, err := s.Next()
					if err != nil {
						break
					}
					record.Release()
				}
				s.Close()
			}
		})
	}
}

// Shards that no manifest describes are hashed, blended and streamed all the same; nothing is known
// of their tokenizer.
func TestForeignShards(t *testing.T) {
	c := newCorpus(t)
	c.shard("a", shards.UInt16, 100, 60)
	c.shard("b", shards.UInt16, 100, 60)
	for _, name := range []string{"a", "b"} {
		for _, ending := range []string{".docs.arrow", ".json"} {
			if err := os.Remove(filepath.Join(c.dir, name+ending)); err != nil {
				t.Fatal(err)
			}
		}
	}
	d := c.open("sequence_length: 16\nsources:\n  - {name: a, shards: [a, b]}\n")
	if d.Tokenizer != nil {
		t.Errorf("the tokenizer is %+v", d.Tokenizer)
	}
	for k, name := range []string{"a", "b"} {
		for ending, got := range map[string]string{".bin": d.Sources[0].Shards[k].Bin,
			".idx": d.Sources[0].Shards[k].Index} {
			data, err := os.ReadFile(filepath.Join(c.dir, name+ending))
			if err != nil {
				t.Fatal(err)
			}
			if want := fmt.Sprintf("%x", sha256.Sum256(data)); got != want {
				t.Errorf("%s%s has hash %s in the plan, want %s", name, ending, got, want)
			}
		}
	}
	if fmt.Sprint(readIPC(t, d, Options{BatchSize: 4})) != fmt.Sprint(expected(t, d, 0, d.Length())) {
		t.Error("read something else")
	}
}

// A stream from the plan's end, the state of a finished run, has no records.
func TestStreamOfFinishedRun(t *testing.T) {
	c, text := mixed(t)
	d := c.open(text)
	for _, prefetch := range []int{0, 4} {
		s, err := New(t.Context(), d, Options{BatchSize: 7, From: d.Length(), Prefetch: prefetch})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Next(); !errors.Is(err, io.EOF) {
			t.Errorf("prefetch %d: %v, want io.EOF", prefetch, err)
		}
		s.Close()
	}
}

// A plan that amends another has one order, too, however it is read.
func TestOneOrderHoweverAmended(t *testing.T) {
	c := newCorpus(t)
	for i := range 6 {
		c.shard(fmt.Sprintf("part-%d", i), shards.UInt16, shardtest.Lengths(10+7*i, 50)...)
	}
	p := c.plan(`
sequence_length: 16
seed: 6198
validation: 0.05
samples: 400
sources:
  - {name: web, shards: [part-0, part-1], weight: 3, max_epochs: 20}
  - {name: wiki, shards: [part-2], weight: 2}
skips:
  - {from: 37, to: 41}
`)
	amend := func(at int64, text string, skips ...blend.Range) {
		t.Helper()
		config, err := blend.ParseAmendment([]byte(text), "amend.yaml", c.dir)
		if err != nil {
			t.Fatal(err)
		}
		config.At, config.Skips = at, skips
		if p, err = blend.Amend(t.Context(), p, config, blend.SealOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	amend(150, "samples: 640\nsources: [{name: web, shards: [part-3]}, {name: code, shards: [part-5]}]\n"+
		"weights: {web: 2, wiki: 1, code: 1}")
	amend(160, "sources: [{name: web, shards: [part-4]}]", blend.Range{From: 300, To: 331})
	readEveryWay(t, c.openPlan(p, blend.OpenOptions{}))
}

// A stream ends with an error when the verification of complete files finds damage, even in a shard
// that the stream has not read yet.
func TestStreamReportsDamage(t *testing.T) {
	c := newCorpus(t)
	c.shard("a", shards.UInt16, slices.Repeat([]int{50}, 2000)...)
	for _, ending := range []string{".sums", ".json"} {
		if err := os.Remove(filepath.Join(c.dir, "a"+ending)); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(c.dir, "a.bin")
	old := time.Now().Add(-2 * time.Hour) // older than blend.Settled
	for _, ending := range []string{".bin", ".idx"} {
		if err := os.Chtimes(filepath.Join(c.dir, "a"+ending), old, old); err != nil {
			t.Fatal(err)
		}
	}
	p := c.plan("sequence_length: 16\nsources: [{name: a, shards: [a]}]\n")
	d := c.openPlan(p, blend.OpenOptions{Verify: &verifier.Options{Rate: -1}, Reverify: time.Millisecond})
	testwait.Until(t, "the shard is verified", func() bool {
		v := d.Verification()
		return v.OfFiles == 1 && v.Files == 1
	})
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte{0xff, 0xff}, 2*99_000); err != nil {
		t.Fatal(err)
	}
	changed := old.Add(time.Hour)
	if err := os.Chtimes(path, changed, changed); err != nil {
		t.Fatal(err)
	}
	testwait.Until(t, "the damage is found", func() bool { return d.Verification().Err != nil })
	for _, prefetch := range []int{0, 2} {
		s, err := New(t.Context(), d, Options{BatchSize: 4, To: 4, Prefetch: prefetch})
		if err != nil {
			t.Fatal(err)
		}
		if _, err = s.Next(); err == nil || !strings.Contains(err.Error(), "SHA-256 of its .bin") {
			t.Errorf("prefetch %d: %v", prefetch, err)
		}
		s.Close()
	}
}
