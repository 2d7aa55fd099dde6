package job

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"mula/internal/atomicfile"
	"mula/internal/filesystem/faultfs"
	"mula/internal/locks"
	"mula/internal/longtest"
	"mula/internal/testwait"
	"mula/shards"
	"mula/tokenize/documents"
)

// quick are timings for tests: what another process holds is looked at often.
var quick = tuning{timing: locks.Timing{Beat: 50 * time.Millisecond, Stale: time.Minute}, poll: time.Millisecond,
	maxPoll: 5 * time.Millisecond}

// A known document of a test corpus.
type known struct {
	input  int
	file   string
	offset int64
	line   int64
	id     string // as it is in the output
	text   string
	bad    bool // a line without a document
}

// A corpusOf files: plain, gzip and zstd by turns, with blank and bad lines, documents with and
// without ids, and some large ones.
type corpusOf struct {
	inputs []string
	lines  []known
}

func makeCorpus(t testing.TB, seed uint64, files, perFile int, bad bool) corpusOf {
	t.Helper()
	random := rand.New(rand.NewPCG(seed, 7))
	dir := t.TempDir()
	var c corpusOf
	for f := range files {
		name := filepath.Join(dir, fmt.Sprintf("part-%02d.jsonl%s", f, []string{"", ".gz", ".zst"}[f%3]))
		c.inputs = append(c.inputs, name)
		var content strings.Builder
		for line := int64(1); line <= int64(perFile); line++ {
			offset := int64(content.Len())
			k := known{input: f, file: name, offset: offset, line: line}
			switch n := random.IntN(20); {
			case n == 0:
				content.WriteString("  \n")
				continue
			case n == 1 && bad:
				k.bad = true
				content.WriteString(`{"id":"e","text":""}` + "\n")
			default:
				k.text = strings.Repeat(fmt.Sprintf("w%d ", random.IntN(1000)), 1+random.IntN(30))
				if n == 2 {
					k.text = strings.Repeat(k.text, 20)
				}
				k.id = fmt.Sprintf("%s:%d", filepath.Base(name), line)
				object := map[string]any{"text": k.text, "more": []int{1, 2}}
				if n%2 == 0 {
					k.id = fmt.Sprintf("id-%d-%d", f, line)
					object["id"] = k.id
				}
				text, err := json.Marshal(object)
				if err != nil {
					t.Fatal(err)
				}
				content.Write(append(text, '\n'))
			}
			c.lines = append(c.lines, k)
		}
		data := content.String()
		switch f % 3 {
		case 1:
			data = gzipped(data)
		case 2:
			data = zstded(data)
		}
		if err := os.WriteFile(name, []byte(data), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

// expect writes what the output is to be into dir, by a plain loop over the documents in memory.
// The rejects are its last result.
func (c corpusOf) expect(t testing.TB, dir string, o Options) (rejects []string) {
	t.Helper()
	var docs []known
	for _, k := range c.lines {
		if o.MaxDocuments > 0 && int64(len(docs)) == o.MaxDocuments {
			break
		}
		if k.bad {
			rejects = append(rejects, fmt.Sprintf("%s:%d", k.file, k.line))
		} else if o.Sample == 0 || float64(draw(sampleSeed, k.input, k.offset)) < o.Sample*(1<<64) {
			docs = append(docs, k)
		}
	}
	if o.Shuffle {
		slices.SortStableFunc(docs, func(a, b known) int {
			return cmp.Compare(draw(o.ShuffleSeed, a.input, a.offset), draw(o.ShuffleSeed, b.input, b.offset))
		})
	}
	info := shards.TokenizerInfo{SHA256: o.Tokenizer.SHA256(), VocabSize: 257, EOD: 256, ClassTable: classTable(t, o),
		Specials: "text"}
	var w *shards.Writer
	tokens := int64(0)
	shut := func() {
		if w != nil {
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
		}
		w, tokens = nil, 0
	}
	number := 0
	for _, k := range docs {
		ids := make([]uint32, 0, len(k.text)+1)
		for _, b := range []byte(k.text) {
			ids = append(ids, uint32(b))
		}
		ids = append(ids, 256)
		if o.ShardTokens > 0 && tokens+int64(len(ids)) > o.ShardTokens {
			shut()
		}
		if w == nil {
			prefix := filepath.Join(dir, "x")
			if o.ShardTokens > 0 {
				prefix += fmt.Sprintf("-%05d", number)
				number++
			}
			var err error
			if w, err = shards.Create(prefix, shards.UInt16, info); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Append(ids, shards.DocumentOrigin{ID: k.id, File: k.file, Line: k.line}); err != nil {
			t.Fatal(err)
		}
		tokens += int64(len(ids))
	}
	shut()
	return rejects
}

func classTable(t testing.TB, o Options) string {
	t.Helper()
	d, err := describe(t.Context(), &o)
	if err != nil {
		t.Fatal(err)
	}
	return d.Settings.Tokenizer.ClassTable
}

// outputs reads the files of shards in dir.
func outputs(t testing.TB, dir string) map[string]string {
	t.Helper()
	files := make(map[string]string)
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.IsDir() || strings.HasPrefix(e.Name(), "rejects") {
			continue
		}
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		files[e.Name()] = string(data)
	}
	return files
}

// sameOutputs compares an output with the expected output.
func sameOutputs(t testing.TB, got, want map[string]string) {
	t.Helper()
	for name := range want {
		if got[name] != want[name] {
			t.Errorf("%s differs: %d bytes, want %d", name, len(got[name]), len(want[name]))
		}
	}
	for name := range got {
		if _, ok := want[name]; !ok {
			t.Errorf("%s should not be there", name)
		}
	}
}

// sameRejects compares the places in a rejects file.
func sameRejects(t testing.TB, path string, want []string) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for line := range bytes.Lines(data) {
		var r struct {
			File string
			Line int64
		}
		if err := json.Unmarshal(line, &r); err != nil {
			t.Fatal(err)
		}
		got = append(got, fmt.Sprintf("%s:%d", r.File, r.Line))
	}
	if !slices.Equal(got, want) {
		t.Errorf("rejects %v, want %v", got, want)
	}
}

// onlyDone makes sure that the job's folder has nothing that is not needed any more.
func onlyDone(t testing.TB, dir string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(dir, "x"+FolderSuffix))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if !slices.Equal(names, []string{doneName, descriptionName}) {
		t.Errorf("the job's folder has %v", names)
	}
}

// The output equals the output of a plain loop over the documents, for all sizes of pieces,
// segments and memory, and for all numbers of processes and workers.
func TestOutput(t *testing.T) {
	defer goleak.VerifyNone(t)
	tok := bytesTokenizer(t, "")
	corpora := []corpusOf{makeCorpus(t, 1, 5, 16, true), makeCorpus(t, 2, 1, 50, true), makeCorpus(t, 3, 3, 1, false)}
	rapid.Check(t, func(r *rapid.T) {
		dir, err := os.MkdirTemp(t.TempDir(), "")
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(dir)
		c := corpora[rapid.IntRange(0, len(corpora)-1).Draw(r, "corpus")]
		o := Options{
			Tokenizer: tok, AppendEOD: true, EOD: 256, Inputs: c.inputs, OnError: Skip,
			ShardTokens:  rapid.SampledFrom([]int64{0, 0, 1000, 6000, 1 << 40}).Draw(r, "shard tokens"),
			Shuffle:      rapid.Bool().Draw(r, "shuffle"),
			Sample:       rapid.SampledFrom([]float64{0, 0, 0.3, 0.9}).Draw(r, "sample"),
			MaxDocuments: rapid.SampledFrom([]int64{0, 0, 1, 7, 30, 1000}).Draw(r, "documents"),
		}
		if o.Shuffle {
			o.ShuffleSeed = rapid.Uint64().Draw(r, "seed")
		}
		want := filepath.Join(dir, "want")
		if err := os.Mkdir(want, 0o777); err != nil {
			t.Fatal(err)
		}
		rejects := c.expect(t, want, o)
		expected := outputs(t, want)
		got := filepath.Join(dir, "got")
		if err := os.Mkdir(got, 0o777); err != nil {
			t.Fatal(err)
		}
		o.Output, o.Rejects = filepath.Join(got, "x"), filepath.Join(got, "rejects")
		processes := rapid.IntRange(1, 3).Draw(r, "processes")
		var group sync.WaitGroup
		errs := make([]error, processes)
		for p := range processes {
			o := o
			o.Workers = rapid.IntRange(1, 8).Draw(r, "workers")
			o.Memory = rapid.SampledFrom([]int64{0, 1, 10_000}).Draw(r, "memory")
			o.PieceBytes = rapid.SampledFrom([]int64{0, 500, 3000}).Draw(r, "piece")
			o.tuning = quick
			o.tuning.segment = rapid.SampledFrom([]int64{0, 2000, 20_000}).Draw(r, "segment")
			o.tuning.memory = rapid.SampledFrom([]int64{0, 1, 30_000, 100_000}).Draw(r, "gathering")
			group.Go(func() { _, errs[p] = Run(t.Context(), o) })
		}
		group.Wait()
		for _, err := range errs {
			if len(expected) == 0 {
				if err == nil || !strings.Contains(err.Error(), "nothing to write") {
					r.Fatalf("no documents: %v", err)
				}
			} else if err != nil {
				r.Fatal(err)
			}
		}
		if len(expected) == 0 {
			return
		}
		sameOutputs(t, outputs(t, got), expected)
		sameRejects(t, o.Rejects, rejects)
		onlyDone(t, got)
		if t.Failed() {
			r.FailNow()
		}
	})
}

// Whatever operation fails, and with it all that follow, as on a disk that is full or a process
// that is killed: the same command again makes what an unbroken one makes.
func TestResume(t *testing.T) {
	t.Parallel()
	tok := bytesTokenizer(t, "")
	c := makeCorpus(t, 5, 4, 40, true)
	for name, o := range map[string]Options{
		"one shard": {},
		"shards":    {ShardTokens: 3000},
		"shuffled":  {ShardTokens: 8000, Shuffle: true, ShuffleSeed: 3, MaxDocuments: 120},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o.Tokenizer, o.AppendEOD, o.EOD, o.Inputs, o.OnError, o.tuning = tok, true, 256, c.inputs, Skip, quick
			o.Workers, o.PieceBytes = 2, 3000
			o.tuning.segment, o.tuning.memory = 12_000, 50_000
			want := t.TempDir()
			rejects := c.expect(t, want, o)
			expected := outputs(t, want)
			random := rand.New(rand.NewPCG(1, 1))
			for k := int64(1); ; k += 1 + k/6 + random.Int64N(3) {
				dir := t.TempDir()
				o.Output, o.Rejects = filepath.Join(dir, "x"), filepath.Join(dir, "rejects")
				broken := k
				for tries := 0; ; tries++ {
					nth := &faultfs.Nth{K: broken, Err: syscall.ENOSPC, After: true}
					o.FS = faultfs.New(nth.Fault)
					_, err := Run(t.Context(), o)
					if nth.Failed() == "" {
						if err != nil {
							t.Fatalf("after %d tries: %v", tries, err)
						}
						break
					}
					if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "the job resumes from here") {
						t.Fatalf("operation %d: %v", broken, err)
					}
					broken = broken*2 + 20 // then it goes on, and breaks again
				}
				sameOutputs(t, outputs(t, dir), expected)
				sameRejects(t, o.Rejects, rejects)
				onlyDone(t, dir)
				if t.Failed() {
					t.Fatalf("broken at operation %d", k)
				}
				if broken == k {
					if k < 60 {
						t.Errorf("only %d operations", k)
					}
					return
				}
			}
		})
	}
}

// If done.json cannot be read, it is not known whether another process has completed the job. Run
// returns the error of that read, or writes what it writes without the fault.
func TestDoneReadFault(t *testing.T) {
	t.Parallel()
	c := makeCorpus(t, 5, 3, 30, true)
	o := Options{Tokenizer: bytesTokenizer(t, ""), AppendEOD: true, EOD: 256, Inputs: c.inputs, OnError: Skip,
		tuning: quick, Workers: 2, PieceBytes: 3000, ShardTokens: 3000}
	o.tuning.segment = 12_000
	want := t.TempDir()
	c.expect(t, want, o)
	expected := outputs(t, want)
	for k := int64(1); ; k++ {
		o.Output = filepath.Join(t.TempDir(), "x")
		nth := &faultfs.Nth{K: k, Err: syscall.EIO, Counts: func(op faultfs.Op, path string) bool {
			return op.Reads() && filepath.Base(path) == doneName
		}}
		o.FS = faultfs.New(nth.Fault)
		_, err := Run(t.Context(), o)
		if nth.Failed() == "" {
			if k < 5 {
				t.Errorf("only %d reads of %s", k-1, doneName)
			}
			return
		}
		if err == nil {
			sameOutputs(t, outputs(t, filepath.Dir(o.Output)), expected)
		} else if !errors.Is(err, syscall.EIO) {
			t.Fatalf("read %d of %s failed: got %v, want EIO", k, doneName, err)
		}
	}
}

// A job that resumes while one read fails returns that error, or writes what an unbroken job
// writes. Without the fault, the same command then writes it.
func TestResumeReadFault(t *testing.T) {
	t.Parallel()
	tok := bytesTokenizer(t, "")
	c := makeCorpus(t, 5, 3, 30, true)
	o := Options{Tokenizer: tok, AppendEOD: true, EOD: 256, Inputs: c.inputs, OnError: Skip, tuning: quick,
		Workers: 2, PieceBytes: 3000, ShardTokens: 3000}
	o.tuning.segment = 12_000
	want := t.TempDir()
	c.expect(t, want, o)
	expected, returned := outputs(t, want), 0
	for k := int64(1); ; k += 1 + k/int64(longtest.ShortRounds(3, 8)) {
		dir := t.TempDir()
		o.Output, o.FS = filepath.Join(dir, "x"), nil
		interrupted(t, o)
		nth := &faultfs.Nth{K: k, Err: syscall.EIO, Counts: func(op faultfs.Op, _ string) bool { return op.Reads() }}
		o.FS = faultfs.New(nth.Fault)
		if _, err := Run(t.Context(), o); err != nil {
			if returned++; !errors.Is(err, syscall.EIO) {
				t.Fatalf("%s failed: got %v, want EIO", nth.Failed(), err)
			}
			o.FS = nil
			if _, err := Run(t.Context(), o); err != nil {
				t.Fatalf("after %s failed: %v", nth.Failed(), err)
			}
		}
		sameOutputs(t, outputs(t, dir), expected)
		onlyDone(t, dir)
		if t.Failed() {
			t.Fatalf("after %s failed", nth.Failed())
		}
		if nth.Failed() == "" {
			break
		}
	}
	if returned < 5 {
		t.Errorf("%d faults were returned, want at least 5", returned)
	}
}

// A job goes on inside a file that cannot be cut, and does not tokenize again what is there.
func TestResumeWithinPiece(t *testing.T) {
	t.Parallel()
	c := makeCorpus(t, 8, 2, 400, true)
	// the gzip file
	c.inputs, c.lines = c.inputs[1:], slices.DeleteFunc(c.lines, func(k known) bool { return k.input == 0 })
	for i := range c.lines {
		c.lines[i].input = 0
	}
	dir, want := t.TempDir(), t.TempDir()
	o := Options{Tokenizer: bytesTokenizer(t, ""), AppendEOD: true, EOD: 256, Inputs: c.inputs,
		Output: filepath.Join(dir, "x"), OnError: Skip, tuning: quick, Workers: 2}
	o.tuning.segment = 10_000
	c.expect(t, want, o)
	o.FS = faultfs.FailOn(faultfs.Rename, ".0003.segment", syscall.EIO)
	if _, err := Run(t.Context(), o); !errors.Is(err, syscall.EIO) {
		t.Fatal(err)
	}
	var made []string
	o.FS = faultfs.New(func(op faultfs.Op, path string) error {
		if op == faultfs.Create && strings.HasSuffix(path, ".segment") {
			made = append(made, filepath.Base(path))
		}
		return nil
	})
	if _, err := Run(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	if len(made) < 3 || made[0] != "unit-00000.0003.segment" {
		t.Errorf("the second run made %v", made)
	}
	sameOutputs(t, outputs(t, dir), outputs(t, want))
	done, err := readRecord[finished](atomicfile.Files{}, filepath.Join(dir, "x"+FolderSuffix, doneName))
	if err != nil || len(done.Inputs) != 1 || len(done.Inputs[0].Pieces) != 1 {
		t.Fatal(done, err)
	}
	sum, _, err := shards.HashFile(t.Context(), c.inputs[0], nil)
	if err != nil || done.Inputs[0].Pieces[0].SHA256 != sum {
		t.Errorf("the hash of the input is %s, want %s, %v", done.Inputs[0].Pieces[0].SHA256, sum, err)
	}
}

// interrupted starts a job and breaks it when it has its segments but no shard.
func interrupted(t *testing.T, o Options) {
	t.Helper()
	o.FS = faultfs.FailOn(faultfs.Rename, ".idx", syscall.EIO)
	_, err := Run(t.Context(), o)
	o.FS = nil
	if !errors.Is(err, syscall.EIO) {
		t.Fatal(err)
	}
}

// Segments, rejects and records of units that are damaged in any way, or gone, are made again.
func TestDamagedSegments(t *testing.T) {
	t.Parallel()
	c := makeCorpus(t, 9, 3, 60, true)
	random := rand.New(rand.NewPCG(9, 9))
	for i := range longtest.ShortRounds(18, 48) { // 18 have each kind of damage to each kind of file
		pattern := []string{"*.segment", "*.rejects", "unit-*.json"}[i/6%3]
		dir, want := t.TempDir(), t.TempDir()
		o := Options{Tokenizer: bytesTokenizer(t, ""), AppendEOD: true, EOD: 256, Inputs: c.inputs,
			Output: filepath.Join(dir, "x"), OnError: Skip, tuning: quick, Workers: 2,
			PieceBytes: 3000, Shuffle: i%2 == 1, Rejects: filepath.Join(dir, "rejects")}
		o.tuning.segment = 10_000
		rejects := c.expect(t, want, o)
		interrupted(t, o)
		names, err := filepath.Glob(filepath.Join(dir, "x.job", pattern))
		if err != nil || len(names) < 3 {
			t.Fatal(names, err)
		}
		name := names[random.IntN(len(names))]
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		switch i % 3 {
		case 0:
			data[random.IntN(len(data))] ^= 1 << random.IntN(8)
		case 1:
			data = data[:random.IntN(len(data))]
		case 2:
			data = nil
		}
		if err := os.Remove(name); err != nil {
			t.Fatal(err)
		}
		if data != nil {
			if err := os.WriteFile(name, data, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := Run(t.Context(), o); err != nil {
			t.Fatal(name, err)
		}
		sameOutputs(t, outputs(t, dir), outputs(t, want))
		sameRejects(t, o.Rejects, rejects)
	}
}

// Where a job ended when all shards were complete, records and rejects that are damaged are found
// out again, though segments are gone.
func TestDamagedRecords(t *testing.T) {
	t.Parallel()
	c := makeCorpus(t, 10, 3, 60, true)
	random := rand.New(rand.NewPCG(10, 10))
	for i := range longtest.ShortRounds(8, 24) { // 8 have each set of files
		dir, want := t.TempDir(), t.TempDir()
		o := Options{Tokenizer: bytesTokenizer(t, ""), AppendEOD: true, EOD: 256, Inputs: c.inputs,
			Output: filepath.Join(dir, "x"), OnError: Skip, tuning: quick, Workers: 2,
			PieceBytes: 3000, Shuffle: i%2 == 1, Rejects: filepath.Join(dir, "rejects"), ShardTokens: 4000}
		o.tuning.segment = 10_000
		rejects := c.expect(t, want, o)
		o.FS = faultfs.FailOn(faultfs.Rename, doneName, syscall.EIO)
		_, err := Run(t.Context(), o)
		o.FS = nil
		if !errors.Is(err, syscall.EIO) {
			t.Fatal(err)
		}
		var damaged []string
		for _, pattern := range [][]string{{"shard-*.json"}, {"*.rejects"}, {"unit-*.json"},
			{"shard-*.json", "*.rejects", "unit-*.json"}}[i/2%4] {
			names, err := filepath.Glob(filepath.Join(dir, "x.job", pattern))
			if err != nil || len(names) < 3 {
				t.Fatal(pattern, names, err)
			}
			name := names[random.IntN(len(names))]
			data, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			if i%3 == 0 {
				data = data[:random.IntN(len(data))]
			} else {
				// not the line break at the end, which does not matter
				data[random.IntN(len(data)-1)] ^= 1 << random.IntN(8)
			}
			if err := os.WriteFile(name, data, 0o644); err != nil {
				t.Fatal(err)
			}
			damaged = append(damaged, name)
		}
		if _, err := Run(t.Context(), o); err != nil {
			t.Fatal(damaged, err)
		}
		sameOutputs(t, outputs(t, dir), outputs(t, want))
		sameRejects(t, o.Rejects, rejects)
	}
}

// Whether an input that has changed was read is not found out again.
func TestDamagedRecordOfChangedInput(t *testing.T) {
	c := makeCorpus(t, 11, 2, 40, false)
	dir := t.TempDir()
	o := Options{Tokenizer: bytesTokenizer(t, ""), AppendEOD: true, EOD: 256, Inputs: c.inputs,
		Output: filepath.Join(dir, "x"), tuning: quick}
	interrupted(t, o)
	names, err := filepath.Glob(filepath.Join(dir, "x.job", "unit-*.json"))
	if err != nil || len(names) == 0 {
		t.Fatal(names, err)
	}
	for _, name := range names {
		if err := os.Truncate(name, 5); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chtimes(c.inputs[0], time.Time{}, time.Unix(1e9, 0)); err != nil {
		t.Fatal(err)
	}
	if _, err := Run(t.Context(), o); err == nil ||
		!strings.Contains(err.Error(), c.inputs[0]+" changed after the job started, and it is unknown "+
			"whether it was read: "+names[0]+": the file is damaged") || !strings.Contains(err.Error(),
		"restart the job with --overwrite") {
		t.Error(err)
	}
}

// A complete job reports that it is complete and writes nothing. A job with other settings, or with
// another output on disk, is refused unless --overwrite is set.
func TestJoining(t *testing.T) {
	t.Parallel()
	c := makeCorpus(t, 4, 3, 30, false)
	dir := t.TempDir()
	tok := bytesTokenizer(t, "")
	base := Options{Tokenizer: tok, AppendEOD: true, EOD: 256, Inputs: c.inputs, Output: filepath.Join(dir, "x"),
		ShardTokens: 3000, tuning: quick}
	first, err := Run(t.Context(), base)
	if err != nil || first.Before || len(first.Shards) < 2 {
		t.Fatal(first, err)
	}
	before := outputs(t, dir)
	var wrote atomic.Int64
	base.FS = faultfs.New(func(op faultfs.Op, _ string) error {
		if !op.Reads() {
			wrote.Add(1)
		}
		return nil
	})
	again, err := Run(t.Context(), base)
	base.FS = nil
	if err != nil || !again.Before || wrote.Load() != 0 {
		t.Errorf("the second run gave %+v, %v, and %d operations", again, err, wrote.Load())
	}
	again.Before = false
	if fmt.Sprint(again) != fmt.Sprint(first) {
		t.Errorf("the second run's summary is %+v, the first's %+v", again, first)
	}
	for name, change := range map[string]func(*Options){
		"the tokens of a shard (0: one shard) is 4000, but was 3000": func(o *Options) { o.ShardTokens = 4000 },
		"shuffling is true, but was false":                           func(o *Options) { o.Shuffle = true },
		"the end-of-document id (-1: none) is 3, but was 256":        func(o *Options) { o.EOD = 3 },
		"the number of inputs is 2, but was 3":                       func(o *Options) { o.Inputs = o.Inputs[:2] },
		"input 1 is " +
			c.inputs[1]: func(o *Options) { o.Inputs = []string{c.inputs[1], c.inputs[0], c.inputs[2]} },
		"the fraction (0: all) is 0.5, but was 0":                           func(o *Options) { o.Sample = 0.5 },
		"the maximum number of documents (0: all) is 5, but was 0":          func(o *Options) { o.MaxDocuments = 5 },
		"the text field is content, but was ":                               func(o *Options) { o.Read.Text = "content" },
		"the treatment of special tokens in a text is tokens, but was text": func(o *Options) { o.Specials = 1 },
		"the tokenizer's SHA-256 is " + bytesTokenizer(t,
			"Q").SHA256()[:60]: func(o *Options) { o.Tokenizer = bytesTokenizer(t, "Q") },
	} {
		o := base
		change(&o)
		if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), name) ||
			!strings.Contains(err.Error(), "--overwrite") {
			t.Errorf("error %v does not say %q", err, name)
		}
	}
	sameOutputs(t, outputs(t, dir), before)

	// Overwrite with larger shards: the remaining older shards are removed.
	anew := base
	anew.ShardTokens, anew.Overwrite = 9000, true
	if _, err := Run(t.Context(), anew); err != nil {
		t.Fatal(err)
	}
	want := t.TempDir()
	c.expect(t, want, anew)
	sameOutputs(t, outputs(t, dir), outputs(t, want))

	// What keeps a job from beginning leaves the one before it as it was.
	failing := anew
	failing.ShardTokens = 500
	failing.FS = faultfs.FailOn(faultfs.Create, "x-00000.bin", syscall.ENOSPC)
	_, err = Run(t.Context(), failing)
	if !errors.Is(err, syscall.ENOSPC) {
		t.Error(err)
	}
	sameOutputs(t, outputs(t, dir), outputs(t, want))
	anew.Overwrite = false
	if done, err := Run(t.Context(), anew); err != nil || !done.Before {
		t.Errorf("%+v, %v", done, err)
	}

	// The output is not what it was.
	if err := os.Truncate(filepath.Join(dir, "x-00000.bin"), 7); err != nil {
		t.Fatal(err)
	}
	if _, err := Run(t.Context(), anew); err == nil || !strings.Contains(err.Error(), "x-00000.bin has 7 bytes") {
		t.Error(err)
	}
	anew.Overwrite = true
	if _, err := Run(t.Context(), anew); err != nil {
		t.Fatal(err)
	}
	sameOutputs(t, outputs(t, dir), outputs(t, want))

	// Shards that belong to no job.
	if err := os.RemoveAll(filepath.Join(dir, "x.job")); err != nil {
		t.Fatal(err)
	}
	if _, err := Run(t.Context(), base); err == nil || !strings.Contains(err.Error(), "does not belong to this job") {
		t.Error(err)
	}
}

// A process that finds all shards written, and has seen no record of the units, completes the job:
// another process was killed before it wrote the record.
func TestFinishesForAnother(t *testing.T) {
	t.Parallel()
	c := makeCorpus(t, 6, 3, 30, true)
	dir := t.TempDir()
	o := Options{Tokenizer: bytesTokenizer(t, ""), AppendEOD: true, EOD: 256, Inputs: c.inputs,
		Output: filepath.Join(dir, "x"), OnError: Skip,
		Rejects: filepath.Join(dir, "rejects"), PieceBytes: 2000, tuning: quick}
	o.FS = faultfs.FailOn(faultfs.Create, doneName, syscall.EIO)
	_, err := Run(t.Context(), o)
	o.FS = nil
	if !errors.Is(err, syscall.EIO) {
		t.Fatal(err)
	}
	if err := o.check(); err != nil {
		t.Fatal(err)
	}
	f, done, err := openWorkDir(t.Context(), &o)
	if err != nil || done != nil {
		t.Fatal(done, err)
	}
	defer f.close(t.Context())
	p := newProcess(f, time.Now())
	ctx := testwait.Context(t)
	if err := p.unitQueue.waitComplete(ctx); err != nil {
		t.Fatal(err)
	}
	if done, err = p.finish(ctx); err != nil || done.Documents == 0 {
		t.Fatal(done, err)
	}
	want := t.TempDir()
	rejects := c.expect(t, want, o)
	sameRejects(t, o.Rejects, rejects)
	os.Remove(o.Rejects)
	sameOutputs(t, outputs(t, dir), outputs(t, want))
}

// No process overwrites a job while another process works on it. A description that cannot be read
// belongs to no job.
func TestOthers(t *testing.T) {
	c := makeCorpus(t, 4, 1, 30, false)
	dir := t.TempDir()
	o := Options{Tokenizer: bytesTokenizer(t, ""), AppendEOD: true, EOD: 256, Inputs: c.inputs,
		Output: filepath.Join(dir, "x"), tuning: quick}
	if err := o.check(); err != nil {
		t.Fatal(err)
	}
	f, _, err := openWorkDir(t.Context(), &o)
	if err != nil {
		t.Fatal(err)
	}
	anew, other := o, o
	anew.Overwrite, other.AppendEOD = true, false
	for _, o := range []Options{anew, other} {
		if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), "works on the job") {
			t.Error(err)
		}
	}
	f.close(t.Context())
	if _, err := os.Stat(f.dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a job without any work left its folder: %v", err)
	}
	if err := os.Mkdir(f.dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(f.path(descriptionName), []byte(`{"format":1,"settings":{},"units":[[[5,0,-1]]]`),
		0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), "job.json: the file is damaged") {
		t.Error(err)
	}
	if _, err := Run(t.Context(), anew); err != nil {
		t.Error(err)
	}
}

// An input that has changed: with the same bytes the job goes on; where its documents were read,
// others are refused; where they were not, they are read now.
func TestChangedInput(t *testing.T) {
	t.Parallel()
	touch := func(path string) {
		if err := os.Chtimes(path, time.Time{}, time.Unix(1e9, 0)); err != nil {
			t.Fatal(err)
		}
	}
	tok := bytesTokenizer(t, "")
	c := makeCorpus(t, 12, 3, 50, false)
	dir := t.TempDir()
	o := Options{Tokenizer: tok, AppendEOD: true, EOD: 256, Inputs: c.inputs, Output: filepath.Join(dir, "x"),
		PieceBytes: 1500, tuning: quick}
	interrupted(t, o)
	touch(c.inputs[0])
	touch(c.inputs[1])
	if err := os.Rename(c.inputs[0], c.inputs[0]+".away"); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(c.inputs[0] + ".away")
	if err != nil {
		t.Fatal(err)
	}
	other := bytes.Replace(data, []byte("text"), []byte("tixt"), 1)
	if err := os.WriteFile(c.inputs[0], other, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Run(t.Context(), o); err == nil ||
		!strings.Contains(err.Error(), c.inputs[0]+" changed after the job read it") {
		t.Fatal(err)
	}
	if err := os.WriteFile(c.inputs[0], append(data, ' '), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Run(t.Context(), o); err == nil ||
		!strings.Contains(err.Error(), c.inputs[0]+" changed after the job started: it had") {
		t.Fatal(err)
	}
	if err := os.WriteFile(c.inputs[0], data, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Run(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	want := t.TempDir()
	c.expect(t, want, o)
	sameOutputs(t, outputs(t, dir), outputs(t, want))
	touch(c.inputs[0])
	if s, err := Run(t.Context(), o); err != nil || !s.Before {
		t.Errorf("a touched input of a complete job: %+v, %v", s, err)
	}

	// A file that was truncated is fetched again: what there is of the others is kept.
	o.Output = filepath.Join(t.TempDir(), "x")
	whole, err := os.ReadFile(c.inputs[2])
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(c.inputs[2], whole[:len(whole)/2], 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), "truncated") ||
		!strings.Contains(err.Error(), c.inputs[2]+":") {
		t.Fatal(err)
	}
	if err := os.WriteFile(c.inputs[2], whole, 0o644); err != nil {
		t.Fatal(err)
	}
	var units []string
	o.FS = faultfs.New(func(op faultfs.Op, path string) error {
		if op == faultfs.Create && strings.HasSuffix(path, ".segment") {
			units = append(units, filepath.Base(path)[:10])
		}
		return nil
	})
	o.Workers = 1
	if _, err := Run(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	o.FS = nil
	if slices.Contains(units, "unit-00000") || len(units) == 0 {
		t.Errorf("units %v were read again", units)
	}
	sameOutputs(t, outputs(t, filepath.Dir(o.Output)), outputs(t, want))
}

// With failures the job ends at the first bad document of the inputs, whichever unit is faster,
// unless all documents that are wanted come before it.
func TestFirstFailure(t *testing.T) {
	defer goleak.VerifyNone(t)
	c := makeCorpus(t, 21, 5, 80, true)
	var first *known
	good := int64(0)
	for i := range c.lines {
		if c.lines[i].bad {
			first = &c.lines[i]
			break
		}
		good++
	}
	for _, piece := range []int64{0, 50, 2000} {
		for workers := 1; workers <= 9; workers += longtest.ShortRounds(8, 4) {
			for _, wanted := range []int64{0, good, good + 1} {
				dir := t.TempDir()
				o := Options{Tokenizer: bytesTokenizer(t, ""), AppendEOD: true, EOD: 256, Inputs: c.inputs,
					Output: filepath.Join(dir, "x"), Workers: workers, PieceBytes: piece,
					MaxDocuments: wanted, tuning: quick}
				o.tuning.segment = 1 << 20
				s, err := Run(t.Context(), o)
				if wanted == good {
					if err != nil || s.Documents != good {
						t.Errorf("%d documents, %v; want %d", s.Documents, err, good)
					}
					continue
				}
				var bad *documents.DocumentError
				if !errors.As(err, &bad) || bad.File != first.file || bad.Line != first.line ||
					bad.Offset < first.offset || bad.Offset > first.offset+20 {
					t.Errorf("pieces of %d, %d workers: %v, want %s:%d", piece, workers, err, first.file, first.line)
				}
			}
		}
	}
}

// If one of two processes skips and the other fails, the process that fails returns an error.
func TestFailAfterSkip(t *testing.T) {
	t.Parallel()
	c := makeCorpus(t, 21, 2, 80, true)
	o := Options{Tokenizer: bytesTokenizer(t, ""), AppendEOD: true, EOD: 256, Inputs: c.inputs,
		Output: filepath.Join(t.TempDir(), "x"), OnError: Skip, tuning: quick}
	interrupted(t, o)
	o.OnError = Fail
	var bad *documents.DocumentError
	if _, err := Run(t.Context(), o); !errors.As(err, &bad) || bad.Kind != documents.Empty {
		t.Error(err)
	}
	o.OnError = Skip
	if s, err := Run(t.Context(), o); err != nil || s.Skipped[documents.Empty] == 0 {
		t.Error(s, err)
	}
}

// Standard input cannot be resumed: the job restarts, and no other process joins it.
func TestStdin(t *testing.T) {
	defer goleak.VerifyNone(t)
	text := `{"text":"one"}` + "\n" + `{"text":"two"}` + "\n"
	dir := t.TempDir()
	o := Options{Tokenizer: bytesTokenizer(t, ""), Inputs: []string{"-"}, Output: filepath.Join(dir, "x"),
		tuning: quick}
	run := func() (Summary, error) {
		o.Read.Stdin = strings.NewReader(text)
		return Run(t.Context(), o)
	}
	o.FS = faultfs.FailOn(faultfs.Rename, ".idx", syscall.EIO)
	if _, err := run(); !errors.Is(err, syscall.EIO) {
		t.Fatal(err)
	}
	o.FS = nil
	for range 2 {
		if s, err := run(); err != nil || s.Tokens != 6 || s.Before {
			t.Fatal(s, err)
		}
	}
	onlyDone(t, dir)
	if s, err := shards.Open(o.Output); err != nil || s.Documents() != 2 {
		t.Error(err)
	} else {
		if d, err := s.DocumentIDs(t.Context()); err != nil {
			t.Error(err)
		} else if origin, err := d.Origin(1); err != nil || origin != (shards.DocumentOrigin{ID: "-:2", File: "-",
			Line: 2}) {
			t.Error(origin, err)
		}
		s.Close()
	}
	in, out := io.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	first := o
	first.Read.Stdin = in
	ended := make(chan error)
	go func() {
		_, err := Run(ctx, first)
		ended <- err
	}()
	if _, err := io.WriteString(out, text); err != nil {
		t.Fatal(err)
	}
	if _, err := run(); err == nil || !strings.Contains(err.Error(), "standard input or a pipe cannot be shared") {
		t.Error(err)
	}
	cancel()
	out.Close()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// What is drawn for a document is part of the format: values of the description in
// docs/formats/job.md, computed by Python.
func TestDraw(t *testing.T) {
	for _, v := range []struct {
		seed   uint64
		input  int
		offset int64
		want   uint64
	}{
		{0, 0, 0, 0x238275bc38fcbe91},
		{1, 0, 0, 0xb18a02f46d8d86c3},
		{0, 1, 0, 0x94926c2e801cb6f9},
		{0, 0, 1, 0x421daf3033e887a3},
		{6198, 2902, 3600000000, 0x4fc7ad4c1e20213},
		{126862285106277, 17, 4096, 0xf1e120b9fc7ca35},
		{18446744073709551615, 0, 4611686018427387904, 0xf844d4d2cab39ccd},
	} {
		if got := draw(v.seed, v.input, v.offset); got != v.want {
			t.Errorf("draw(%d, %d, %d) is %#x, want %#x", v.seed, v.input, v.offset, got, v.want)
		}
	}
	for share, want := range map[float64]uint64{0: 0, 1: 0, 0.5: 1 << 63, 0.25: 1 << 62} {
		if got := sampleLimit(share); got != want {
			t.Errorf("sampleLimit(%v) is %#x", share, got)
		}
	}
}

func gzipped(parts ...string) string {
	var b bytes.Buffer
	for _, p := range parts {
		w := gzip.NewWriter(&b)
		io.WriteString(w, p)
		w.Close()
	}
	return b.String()
}

func zstded(parts ...string) string {
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	if err != nil {
		panic(err)
	}
	defer enc.Close()
	var b []byte
	for _, p := range parts {
		b = enc.EncodeAll([]byte(p), b)
	}
	return string(b)
}

// An input that changes after the job is done is noticed by its hash, where it was read.
func TestChangedAfterDone(t *testing.T) {
	c := makeCorpus(t, 31, 3, 30, false)
	o := Options{Tokenizer: bytesTokenizer(t, ""), AppendEOD: true, EOD: 256, Inputs: c.inputs,
		Output: filepath.Join(t.TempDir(), "x"), PieceBytes: 1500, tuning: quick}
	limited := o
	limited.Output, limited.MaxDocuments = filepath.Join(t.TempDir(), "x"), 5
	for _, o := range []Options{o, limited} {
		if _, err := Run(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	last := len(c.inputs) - 1
	data, err := os.ReadFile(c.inputs[last])
	if err != nil {
		t.Fatal(err)
	}
	run := func(data []byte, o Options) (Summary, error) {
		t.Helper()
		if err := os.WriteFile(c.inputs[last], data, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(c.inputs[last], time.Time{}, time.Unix(int64(len(data))+1e9, 0)); err != nil {
			t.Fatal(err)
		}
		return Run(t.Context(), o)
	}
	other := slices.Clone(data)
	other[len(other)/2] ^= 1
	for _, changed := range [][]byte{other, append(slices.Clone(data), '\n'), data[:len(data)-1]} {
		if s, err := run(changed, o); err == nil ||
			!strings.Contains(err.Error(), c.inputs[last]+" changed after the job read it") ||
			!strings.Contains(err.Error(), "--overwrite") {
			t.Errorf("%+v, %v", s, err)
		}
		if s, err := run(changed, limited); err != nil || !s.Before {
			t.Errorf("an input of which nothing was wanted: %+v, %v", s, err)
		}
	}
	if s, err := run(data, o); err != nil || !s.Before {
		t.Errorf("the same bytes at another time: %+v, %v", s, err)
	}
}

// A shard that is lost or cut while the job is not done is noticed before the job says that it is
// complete.
func TestLostShard(t *testing.T) {
	t.Parallel()
	c := makeCorpus(t, 32, 2, 60, false)
	dir := t.TempDir()
	o := Options{Tokenizer: bytesTokenizer(t, ""), AppendEOD: true, EOD: 256, Inputs: c.inputs,
		Output: filepath.Join(dir, "x"), ShardTokens: 2000, tuning: quick}
	o.FS = faultfs.FailOn(faultfs.Rename, doneName, syscall.EIO)
	if _, err := Run(t.Context(), o); !errors.Is(err, syscall.EIO) {
		t.Fatal(err)
	}
	idx := filepath.Join(dir, "x-00001.idx")
	data, err := os.ReadFile(idx)
	if err != nil {
		t.Fatal(err)
	}
	o.FS = faultfs.New(func(op faultfs.Op, path string) error { // once the job is joined
		if op == faultfs.Create && strings.HasPrefix(filepath.Base(path), "process-") ||
			op == faultfs.Rename && filepath.Base(path) == doneName {
			t.Errorf("the job continued: %v %s", op, path)
		}
		return nil
	})
	for _, damage := range []func() error{func() error { return os.Remove(idx) },
		func() error { return os.WriteFile(idx, data[:7], 0o644) }} {
		if err := damage(); err != nil {
			t.Fatal(err)
		}
		if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), "x-00001.idx") ||
			!strings.Contains(err.Error(), "--overwrite") {
			t.Error(err)
		}
	}
	o.FS = nil
	if err := os.WriteFile(idx, data, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Run(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	want := t.TempDir()
	c.expect(t, want, o)
	sameOutputs(t, outputs(t, dir), outputs(t, want))
}

// If the job's folder is missing or its description is damaged, --overwrite replaces the shards on
// disk, and removes shards that the new job does not have.
func TestOverwriteUnknownShards(t *testing.T) {
	c := makeCorpus(t, 33, 2, 60, false)
	dir := t.TempDir()
	o := Options{Tokenizer: bytesTokenizer(t, ""), AppendEOD: true, EOD: 256, Inputs: c.inputs,
		Output: filepath.Join(dir, "x"), ShardTokens: 1000, tuning: quick}
	if s, err := Run(t.Context(), o); err != nil || len(s.Shards) < 5 {
		t.Fatal(s, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "x.job", descriptionName), []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	kept := filepath.Join(dir, "x-00000.txt")
	o.ShardTokens = 3000
	for range 3 {
		_, err := Run(t.Context(), o)
		if err == nil || !strings.Contains(err.Error(), "with --overwrite, ") {
			t.Error(err)
		}
		o.Overwrite = true
		if s, err := Run(t.Context(), o); err != nil || s.Before {
			t.Fatal(s, err)
		}
		want := t.TempDir()
		c.expect(t, want, o)
		sameOutputs(t, outputs(t, dir), outputs(t, want))
		if o.ShardTokens == 3000 { // then the record of its outputs
			err = os.WriteFile(filepath.Join(dir, "x.job", doneName), []byte(`{"format":1,`), 0o644)
		} else { // and then all
			err = os.RemoveAll(filepath.Join(dir, "x.job"))
		}
		if err != nil {
			t.Fatal(err)
		}
		o.Overwrite, o.ShardTokens = false, o.ShardTokens+2500
	}
	if err := os.WriteFile(kept, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	one := o // shard of a job whose folder was removed
	one.Output, one.ShardTokens = filepath.Join(t.TempDir(), "y"), 0
	for range 2 {
		if s, err := Run(t.Context(), one); err != nil || s.Before {
			t.Fatal(s, err)
		}
		if err := os.RemoveAll(one.Output + FolderSuffix); err != nil {
			t.Fatal(err)
		}
		one.Overwrite = false
		if _, err := Run(t.Context(), one); err == nil || !strings.Contains(err.Error(),
			"y exists and does not belong to this job; replace it with --overwrite") {
			t.Error(err)
		}
		one.Overwrite = true
	}
	o.Overwrite = true
	if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), "x-00000.txt exists") ||
		strings.Contains(err.Error(), "with --overwrite, ") {
		t.Error(err)
	}
}

// Documents without ids are named by the path of their file relative to the input. A job of format
// 1, which an older program started, resumes unchanged: with base names, and with byte order marks.
func TestNamesOfInputs(t *testing.T) {
	root := t.TempDir()
	var inputs []string
	for _, name := range []string{"a/README.txt", "b/README.txt"} {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("\xef\xbb\xbftext of "+name), 0o644); err != nil {
			t.Fatal(err)
		}
		inputs = append(inputs, path)
	}
	o := Options{Tokenizer: bytesTokenizer(t, ""), AppendEOD: true, EOD: 256, Inputs: inputs,
		Names: []string{"a/README.txt", "b/README.txt"}, tuning: quick}
	begin := func() { o.Output = filepath.Join(t.TempDir(), "x") }
	expect := func(ids []string, mark string) {
		t.Helper()
		if _, err := Run(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		s, err := shards.Open(o.Output)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		origins, err := s.DocumentIDs(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer origins.Close()
		tokens := make([]uint32, s.Tokens())
		if err := s.Read(tokens, 0); err != nil {
			t.Fatal(err)
		}
		var text []byte
		for _, id := range tokens {
			text = append(text, byte(id)) // 0 for the end of a document
		}
		for i, id := range ids {
			if origin, err := origins.Origin(int64(i)); err != nil || origin.ID != id {
				t.Errorf("document %d is %+v, %v; want the id %q", i, origin, err, id)
			}
		}
		if want := mark + "text of a/README.txt\x00" + mark + "text of b/README.txt\x00"; string(text) != want {
			t.Errorf("%q, want %q", text, want)
		}
	}
	begin()
	expect([]string{"a/README.txt:1", "b/README.txt:1"}, "")

	description, err := os.ReadFile(filepath.Join(o.Output+FolderSuffix, descriptionName))
	if err != nil {
		t.Fatal(err)
	}
	with := func(changes ...string) { // begins a job with another job.json
		begin()
		text := strings.NewReplacer(changes...).Replace(string(description))
		if err := errors.Join(os.Mkdir(o.Output+FolderSuffix, 0o755),
			os.WriteFile(filepath.Join(o.Output+FolderSuffix, descriptionName), []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	older := []string{`"format":2`, `"format":1`, `"names":["a/README.txt","b/README.txt"],`, "", `"id_field":""`,
		`"id_field":"id"`}
	with(older...)
	expect([]string{"README.txt:1", "README.txt:1"}, "\xef\xbb\xbf")
	expect([]string{"README.txt:1", "README.txt:1"}, "\xef\xbb\xbf") // again, when it is done

	with(`"format":2`, `"format":3`)
	if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(),
		"has format 3, but this program supports formats up to 2") {
		t.Error(err)
	}
	with(`"names":["a/README.txt","b/README.txt"],`, "")
	if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), "2 inputs and 0 names") {
		t.Error(err)
	}
	begin()
	expect([]string{"a/README.txt:1", "b/README.txt:1"}, "")
	o.Names = nil
	if _, err := Run(t.Context(), o); err == nil ||
		!strings.Contains(err.Error(),
			"without ids would have ids "+filepath.ToSlash(inputs[0])+":LINE, but had a/README.txt:LINE") {
		t.Error(err)
	}
}
