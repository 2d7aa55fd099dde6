package job

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"mula/internal/atomicfile"
	"mula/internal/locks"
	"mula/internal/longtest"
	"mula/internal/objects"
	"mula/internal/objects/objectstest"
)

// quickLeases are timings for jobs in a store: a process that does not answer for a short time is
// dead.
var quickLeases = tuning{timing: locks.Timing{Beat: 20 * time.Millisecond, Stale: 150 * time.Millisecond},
	poll: time.Millisecond, maxPoll: 20 * time.Millisecond, segment: 4000}

// withoutJob removes the files of the complete job x, and checks that there are no others.
func withoutJob(t *testing.T, found map[string]string) map[string]string {
	t.Helper()
	for name := range found {
		if file, ok := strings.CutPrefix(name, "x.job/"); ok {
			if file != descriptionName && file != doneName && !strings.HasSuffix(file, locks.Suffix) {
				t.Errorf("the complete job has the file %s", file)
			}
			delete(found, name)
		}
	}
	return found
}

// variants are settings of jobs in a store.
func variants(t *testing.T, c corpusOf) map[string]Options {
	base := Options{Tokenizer: bytesTokenizer(t, ""), AppendEOD: true, EOD: 256, Inputs: c.inputs, Workers: 2,
		PieceBytes: 4000, OnError: Skip, tuning: quickLeases}
	sharded, shuffled, limited, mds := base, base, base, base
	sharded.ShardTokens = 3000
	shuffled.Shuffle, shuffled.ShuffleSeed, shuffled.ShardTokens = true, 5, 5000
	shuffled.tuning.memory = 60_000
	limited.MaxDocuments, limited.ShardTokens, limited.Sample = 90, 2000, 0.7
	mds.Layout, mds.ShardTokens = "mds", 6000
	return map[string]Options{"sharded": sharded, "shuffled": shuffled, "limited": limited, "mds": mds}
}

// local runs the job with local files and returns its output.
func local(t *testing.T, o Options) map[string]string {
	t.Helper()
	dir := t.TempDir()
	o.Output, o.Rejects = filepath.Join(dir, "x"), filepath.Join(dir, "x.rejects.jsonl")
	if _, err := Run(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	want := make(map[string]string)
	err := fs.WalkDir(os.DirFS(dir), ".", func(name string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() || strings.HasPrefix(name, "x.job") {
			return err
		}
		data, err := os.ReadFile(filepath.Join(dir, name))
		want[name] = string(data)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return want
}

// Several processes that share nothing but a store that fails now and then write the files of a
// local job.
func TestStoreJob(t *testing.T) {
	c := makeCorpus(t, 41, 4, 50, true)
	longtest.SkipIfShort(t)
	for _, name := range []string{"shuffled", "mds", "limited"}[:longtest.Rounds(2, 3)] {
		o := variants(t, c)[name]
		t.Run(name, func(t *testing.T) {
			want := local(t, o)
			store := objectstest.S3(t)
			o.Output, o.Rejects = store.URL+"tokens/x", store.URL+"tokens/x.rejects.jsonl"
			random, mutex := rand.New(rand.NewPCG(4, uint64(len(name)))), sync.Mutex{}
			store.Proxy.Disturb(func(*http.Request) objectstest.Fault {
				mutex.Lock()
				defer mutex.Unlock()
				switch random.IntN(40) {
				case 0:
					return objectstest.Fault{Status: 503}
				case 1:
					return objectstest.Fault{Lose: true}
				case 2:
					return objectstest.Fault{Cut: 10}
				}
				return objectstest.Fault{}
			})
			ctx := objects.WithPatience(t.Context(), 10*time.Second)
			var group sync.WaitGroup
			for range 2 {
				mine := o
				mine.Work = filepath.Join(t.TempDir(), "work")
				group.Go(func() {
					if _, err := Run(ctx, mine); err != nil {
						t.Error(err)
					}
				})
			}
			group.Wait()
			store.Proxy.Disturb(nil)
			sameOutputs(t, withoutJob(t, objectstest.Contents(t, store.URL+"tokens/")), want)
			o.Work = t.TempDir()
			before := objects.Count().BytesWritten
			s, err := Run(t.Context(), o)
			if err != nil || !s.Before {
				t.Errorf("a complete job: %+v, %v", s, err)
			}
			if n := objects.Count().BytesWritten - before; n > 10_000 {
				t.Errorf("a complete job wrote %d bytes", n)
			}
			leaves, err := filepath.Glob(filepath.Join(o.Work, "*"))
			if err != nil || len(leaves) > 0 {
				t.Errorf("left in the local folder: %q, %v", leaves, err)
			}
		})
	}
}

// A process that is cut off from the store at any request loses only its work in progress.
func TestStoreKills(t *testing.T) {
	c := makeCorpus(t, 43, 4, 40, true)
	o := variants(t, c)["sharded"]
	want := local(t, o)
	store := objectstest.S3(t)
	longtest.SkipIfShort(t)
	for k := range longtest.Rounds(2, 3) {
		o.Work = t.TempDir()
		o.Output = fmt.Sprintf("%sjob%d/x", store.URL, k)
		o.Rejects = o.Output + ".rejects.jsonl"
		// The last request that arrives is one of these, each after the one before.
		last := []string{".segment", "x-00001.bin", descriptionName}[k]
		var cut atomic.Bool
		store.Proxy.Disturb(func(r *http.Request) objectstest.Fault {
			drop := cut.Load()
			if r.Method == http.MethodPut && strings.HasSuffix(r.URL.Path, last) {
				cut.Store(true)
			}
			return objectstest.Fault{Drop: drop}
		})
		if _, err := Run(objects.WithPatience(t.Context(), 60*time.Millisecond), o); err == nil {
			t.Errorf("a job succeeded without its store after %s", last)
		}
		store.Proxy.Disturb(nil)
		if _, err := Run(t.Context(), o); err != nil {
			t.Fatalf("after %s: %v", last, err)
		}
		sameOutputs(t, withoutJob(t, objectstest.Contents(t, strings.TrimSuffix(o.Output, "x"))), want)
	}
}

// A process that was stopped while the job was started again with other settings writes nothing
// more, and its files in the folder are not taken as files of the new job.
func TestStoreRestarted(t *testing.T) {
	longtest.SkipIfShort(t)
	c := makeCorpus(t, 47, 4, 60, false)
	store := objectstest.S3(t)
	old := variants(t, c)["sharded"]
	old.Output, old.Rejects, old.Work = store.URL+"tokens/x", store.URL+"tokens/x.rejects.jsonl", t.TempDir()
	fresh := old
	fresh.AppendEOD, fresh.Work = false, t.TempDir()
	want := local(t, fresh)

	// The process of the old job stops when it has uploaded a shard's first file except for the
	// last request.
	stopped, goOn := make(chan struct{}), make(chan struct{})
	var writing, others atomic.Bool
	var once sync.Once
	store.Proxy.Disturb(func(r *http.Request) objectstest.Fault {
		writing.CompareAndSwap(false, strings.HasSuffix(r.URL.Path, "x-00001.bin"))
		if writing.Load() && !others.Load() && strings.HasSuffix(r.URL.Path, descriptionName) {
			once.Do(func() { close(stopped) })
			<-goOn
		}
		return objectstest.Fault{}
	})
	ended := make(chan error)
	go func() {
		o := old
		o.tuning.timing.Beat = time.Hour
		_, err := Run(t.Context(), o)
		ended <- err
	}()
	<-stopped
	others.Store(true)
	files := objectstest.Contents(t, old.Output+FolderSuffix+"/")
	presence := slices.IndexFunc(slices.Collect(maps.Keys(files)), func(name string) bool {
		return strings.HasPrefix(name, "process-")
	})
	if presence < 0 {
		t.Fatalf("the old process does not show that it takes part: %q", slices.Collect(maps.Keys(files)))
	}
	fresh.Overwrite = true
	if _, err := Run(t.Context(), fresh); err == nil || !strings.Contains(err.Error(), "works on the job") {
		t.Errorf("a job that a process of this machine works on was restarted: %v", err)
	}
	for name, data := range files {
		if strings.HasSuffix(name, locks.Suffix) { // as if the process were on another machine
			data = strings.Replace(data, atomicfile.Self().Machine, "0123456789abcdef", 1)
			if err := objects.WriteFile(t.Context(), old.Output+FolderSuffix+"/"+name, []byte(data)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := Run(t.Context(), fresh); err != nil {
		t.Fatal(err)
	}
	close(goOn)
	if err := <-ended; !errors.Is(err, errRestarted) {
		t.Errorf("the old process: %v", err)
	}
	sameOutputs(t, withoutJob(t, objectstest.Contents(t, store.URL+"tokens/")), want)

	// Files of the old job appear in the folder while the new job is in progress.
	fresh.Output, fresh.Rejects, fresh.Overwrite = store.URL+"again/x", store.URL+"again/x.rejects.jsonl", false
	var described atomic.Bool
	store.Proxy.Disturb(func(r *http.Request) objectstest.Fault {
		if r.Method == http.MethodPut && strings.HasSuffix(r.URL.Path, descriptionName) {
			described.Store(true)
			return objectstest.Fault{}
		}
		return objectstest.Fault{Drop: described.Load()}
	})
	if _, err := Run(objects.WithPatience(t.Context(), 20*time.Millisecond), fresh); err == nil {
		t.Fatal("a job succeeded without its store")
	}
	store.Proxy.Disturb(nil)
	segments := 0
	for name, data := range files {
		if strings.HasPrefix(name, "unit-") && !strings.HasSuffix(name, locks.Suffix) {
			segments++
			if err := objects.WriteFile(t.Context(), fresh.Output+FolderSuffix+"/"+name, []byte(data)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if segments < 4 {
		t.Fatalf("the old job has the files %q", slices.Collect(maps.Keys(files)))
	}
	if _, err := Run(t.Context(), fresh); err != nil {
		t.Fatal(err)
	}
	sameOutputs(t, withoutJob(t, objectstest.Contents(t, store.URL+"again/")), want)
}

// A process that was stopped while another one took its shard over leaves the shard alone, and ends
// without an error.
func TestStoreTakenOver(t *testing.T) {
	longtest.SkipIfShort(t)
	c := makeCorpus(t, 49, 4, 60, false)
	store := objectstest.S3(t)
	o := variants(t, c)["sharded"]
	o.Output, o.Rejects = store.URL+"tokens/x", store.URL+"tokens/x.rejects.jsonl"
	want := local(t, o)

	// The first process stops before it removes the old .idx of the shard. The request at which it
	// stops belongs to no other shard, and the second process starts after it. The second one does
	// not end before the first one has read the record of the shard, changed the shard, or ended.
	stopped, goOn, looked := make(chan struct{}), make(chan struct{}), make(chan struct{})
	var second, resumed atomic.Bool
	var onceLooked sync.Once
	var changes atomic.Int64
	store.Proxy.Disturb(func(r *http.Request) objectstest.Fault {
		name := path.Base(r.URL.Path)
		switch {
		case resumed.Load() && strings.HasPrefix(name, "x-00001.") && r.Method != http.MethodGet:
			if r.Method != http.MethodHead {
				changes.Add(1)
				onceLooked.Do(func() { close(looked) })
			}
		case resumed.Load() && name == "shard-00001.json":
			onceLooked.Do(func() { close(looked) })
		case name == "x-00001.json" && second.CompareAndSwap(false, true):
			close(stopped)
			<-goOn
		case name == doneName && r.Method == http.MethodPut:
			if resumed.CompareAndSwap(false, true) {
				close(goOn)
			}
			<-looked
		}
		return objectstest.Fault{}
	})
	first := make(chan error)
	go func() {
		o := o
		o.Work, o.tuning.timing.Beat = t.TempDir(), time.Hour
		_, err := Run(t.Context(), o)
		onceLooked.Do(func() { close(looked) })
		first <- err
	}()
	<-stopped
	o.Work = t.TempDir()
	if _, err := Run(t.Context(), o); err != nil {
		t.Error(err)
	}
	if err := <-first; err != nil {
		t.Errorf("the first process: %v", err)
	}
	store.Proxy.Disturb(nil)
	if n := changes.Load(); n > 0 {
		t.Errorf("the first process has sent %d changes of the shard", n)
	}
	sameOutputs(t, withoutJob(t, objectstest.Contents(t, store.URL+"tokens/")), want)
}

// A process that took a shard over from a stopped one replaces the files of the shard, while the
// stopped one goes on and ends the job. The job ends after the files are complete again.
func TestStoreWrittenTwice(t *testing.T) {
	c := makeCorpus(t, 49, 4, 60, false)
	store := objectstest.S3(t)
	o := variants(t, c)["sharded"]
	o.Output, o.Rejects = store.URL+"tokens/x", store.URL+"tokens/x.rejects.jsonl"
	want := local(t, o)

	// The first process stops while it sends the record of the shard. It goes on when the second
	// one replaces a file of the shard. The second one goes on a while after the first one has
	// begun to end the job.
	stopped, replaced, ending := make(chan struct{}), make(chan struct{}), make(chan struct{})
	var recorded, replaces atomic.Bool
	var ends sync.Once
	store.Proxy.Disturb(func(r *http.Request) objectstest.Fault {
		name := path.Base(r.URL.Path)
		switch {
		case name == "shard-00001.json" && r.Method == http.MethodPut && recorded.CompareAndSwap(false, true):
			close(stopped)
			<-replaced
		case recorded.Load() && strings.HasPrefix(name, "x-00001.") && r.Method == http.MethodPut:
			if replaces.CompareAndSwap(false, true) {
				close(replaced)
			}
			<-ending
		case recorded.Load() && strings.HasPrefix(name, "x-00001.") && r.Method == http.MethodDelete:
			t.Error("a process has removed a file of a complete shard")
		case replaces.Load() && name == "finish"+locks.Suffix && r.Method == http.MethodPut:
			ends.Do(func() { time.AfterFunc(200*time.Millisecond, func() { close(ending) }) })
		}
		return objectstest.Fault{}
	})
	first := make(chan error)
	go func() {
		o := o
		o.Work, o.tuning.timing.Beat = t.TempDir(), time.Hour
		_, err := Run(t.Context(), o)
		first <- err
	}()
	<-stopped
	second := make(chan error)
	go func() {
		o := o
		o.Work = t.TempDir()
		_, err := Run(t.Context(), o)
		second <- err
	}()
	if err := <-first; err != nil {
		t.Errorf("the first process: %v", err)
		ends.Do(func() { close(ending) })
	}
	if err := <-second; err != nil {
		t.Errorf("the second process: %v", err)
	}
	store.Proxy.Disturb(nil)
	sameOutputs(t, withoutJob(t, objectstest.Contents(t, store.URL+"tokens/")), want)
}

// Shards of layout fms in a store, and the file of their counts, have the bytes of local files.
func TestStoreFMS(t *testing.T) {
	c := makeCorpus(t, 49, 2, 20, false)
	store := objectstest.S3(t)
	store.Proxy.Disturb(objectstest.Repeat(31, map[int64]objectstest.Fault{
		7: {Status: http.StatusServiceUnavailable}, 17: {Cut: 100}, 27: {Lose: true}}))
	o := Options{Tokenizer: bytesTokenizer(t, ""), Inputs: c.inputs, Layout: "fms", ShardTokens: 3000,
		tuning: quickLeases}
	root := t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "tokens"), 0o755); err != nil {
		t.Fatal(err)
	}
	o.Output = filepath.Join(root, "tokens", "x")
	if _, err := Run(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	for range 2 {
		group.Go(func() {
			o := o
			o.Output, o.Work = store.URL+"tokens/x", t.TempDir()
			if _, err := Run(t.Context(), o); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	for _, folder := range []string{"tokens", "meta"} {
		want := map[string]string{}
		paths, err := filepath.Glob(filepath.Join(root, folder, "*"))
		if err != nil || len(paths) == 0 {
			t.Fatal(paths, err)
		}
		for _, path := range paths {
			if data, err := os.ReadFile(path); err == nil { // not the folder of the job
				want[filepath.Base(path)] = string(data)
			}
		}
		sameOutputs(t, withoutJob(t, objectstest.Contents(t, store.URL+folder+"/")), want)
	}
}

// An output that cannot be in a store is refused before anything is written.
func TestStoreRefused(t *testing.T) {
	c := makeCorpus(t, 48, 1, 20, false)
	store := objectstest.S3(t)
	if err := objects.WriteFile(t.Context(), store.URL+"other/x.bin", []byte("not mula's")); err != nil {
		t.Fatal(err)
	}
	if err := objects.WriteFile(t.Context(), store.URL+"other/y-00000.idx", []byte("not mula's")); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct{ output, want string }{
		{"https://127.0.0.1:1/a/x", "only reads"},
		{"s3://bucket", "must have a bucket and a prefix"},
		{store.URL + "a//x", "without empty parts"},
		{store.URL + "other/x", "other/x.bin exists and does not belong to this job"},
		{store.URL + "other/y", "other/y-00000.idx exists and does not belong to this job"},
	} {
		o := Options{Tokenizer: bytesTokenizer(t, ""), Inputs: c.inputs, Output: test.output, Work: t.TempDir(),
			tuning: quickLeases}
		if strings.HasSuffix(test.output, "/y") {
			o.ShardTokens = 1000
		}
		before := objectstest.Contents(t, store.URL)
		if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v; want %q", test.output, err, test.want)
		}
		sameOutputs(t, objectstest.Contents(t, store.URL), before)
	}
}

// Blocks of a segment in a store that are side by side are read with one request, though the
// segment has several. The output equals a local job's, also if only some blocks of each segment
// are read at a time and the store fails now and then.
func TestStoreShuffledRequests(t *testing.T) {
	c := makeCorpus(t, 47, 2, 2500, false)
	o := Options{Tokenizer: bytesTokenizer(t, ""), AppendEOD: true, EOD: 256, Inputs: c.inputs,
		PieceBytes: 250_000, Shuffle: true, ShuffleSeed: 5, OnError: Skip, tuning: quick}
	o.tuning.segment = 4 << 20
	want := local(t, o)
	store := objectstest.S3(t)
	var mutex sync.Mutex
	reads := make(map[string]int) // by segment
	store.Proxy.Disturb(func(r *http.Request) objectstest.Fault {
		if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, ".segment") {
			mutex.Lock()
			defer mutex.Unlock()
			reads[r.URL.Path]++
		}
		return objectstest.Fault{}
	})
	o.Output, o.Work = store.URL+"one/x", t.TempDir()
	o.Rejects = o.Output + ".rejects.jsonl"
	if _, err := Run(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	sameOutputs(t, withoutJob(t, objectstest.Contents(t, store.URL+"one/")), want)
	for segment, n := range reads {
		if n != 3+1 {
			t.Errorf("%d reads of %s; want 3 for its footer, and 1 for its blocks", n, segment)
		}
	}
	if len(reads) < 2 {
		t.Errorf("reads of %d segments only", len(reads))
	}

	o.ShardTokens, o.tuning.memory = 200_000, 400_000
	want = local(t, o)
	store.Proxy.Disturb(objectstest.Repeat(61, map[int64]objectstest.Fault{
		5: {Status: http.StatusServiceUnavailable}, 17: {Cut: 5000}, 29: {Drop: true}}))
	o.Output, o.Work = store.URL+"several/x", t.TempDir()
	o.Rejects = o.Output + ".rejects.jsonl"
	if _, err := Run(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	store.Proxy.Disturb(nil)
	sameOutputs(t, withoutJob(t, objectstest.Contents(t, store.URL+"several/")), want)
}
