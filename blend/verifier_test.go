package blend

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"mula/index/cache"
	"mula/internal/testwait"
	"mula/shards"
	"mula/shards/facts"
	"mula/shards/shardtest"
	"mula/shards/verifier"
)

// settle waits until all files of the process's share are verified, or one is found damaged.
func settle(t testing.TB, d *Data) verifier.Progress {
	t.Helper()
	var p verifier.Progress
	testwait.Until(t, "all files are verified, or one is damaged", func() bool {
		p = d.Verification()
		return p.Err != nil || p.Files == p.OfFiles
	})
	return p
}

// shardCount returns the number of shards of a plan.
func shardCount(p *Plan) (n int) {
	for i := range p.Sources {
		n += len(p.Sources[i].Shards)
	}
	return n
}

// begun waits until the verifier knows its share, by having it settle a file that it need not read
// or by its first count.
func begun(t testing.TB, d *Data, files int) {
	t.Helper()
	testwait.Until(t, "the verifier has counted its files", func() bool { return d.Verification().OfFiles >= files })
}

// damagedCorpus is a corpus of two sources of one large shard each, with sums or without, and a
// plan over it whose samples do not touch, at the places that Open compares, the last block of the
// second shard, which is damaged.
func damagedCorpus(t *testing.T, sums bool) (*Plan, string) {
	t.Helper()
	shardtest.UserCache(t)
	c := newCorpus(t)
	for _, name := range []string{"a", "b"} {
		c.shard(name, shards.UInt16, slices.Repeat([]int{50}, 2000)...)
		if !sums {
			for _, ending := range []string{".json", ".sums", ".docs.arrow"} {
				if err := os.Remove(filepath.Join(c.dir, name+ending)); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	shardtest.Age(t, c.dir)
	for seed := range 50 {
		p := c.seal(fmt.Sprintf("sequence_length: 16\nseed: %d\nsources: [{name: a, shards: [a]}, {name: b, shards: "+
			"[b]}]\n", seed))
		touched := false
		for _, check := range p.Checks {
			s, err := p.Locate(check.Position)
			if err != nil {
				t.Fatal(err)
			}
			touched = touched || s.Source == 1 && s.Token > 80000
		}
		if !touched {
			flip(t, filepath.Join(c.dir, "b.bin"), 2*99000)
			shardtest.Age(t, c.dir)
			return p, filepath.Join(c.dir, "b.bin")
		}
	}
	t.Fatal("every plan looks at the last block")
	return nil, ""
}

// The verifier finds damage before a reader reaches it. Reads of the damaged shard then fail
// with an error that names the file.
func TestVerifyBehind(t *testing.T) {
	for _, sums := range []bool{true, false} {
		p, path := damagedCorpus(t, sums)
		// slow, so that it mostly ends behind Open
		d, err := Open(t.Context(), p, OpenOptions{Verify: &verifier.Options{Rate: 1 << 20}})
		if err != nil {
			if !strings.Contains(err.Error(), strings.TrimSuffix(path, ".bin")) {
				t.Error(err)
			}
			continue
		}
		begun(t, d, 2)
		progress := settle(t, d)
		if progress.Err == nil || !strings.Contains(progress.Err.Error(), strings.TrimSuffix(path, ".bin")) {
			t.Errorf("sums %v: %+v", sums, progress)
		}
		var damage *shards.DamageError
		if sums && (!errors.As(progress.Err, &damage) || damage.Path != path) {
			t.Errorf("blocks and documents are not named: %v", progress.Err)
		}
		tokens := make([]uint32, 17)
		for source, want := range []error{nil, progress.Err} {
			if err := d.Tokens(tokens, Sample{Source: source, Token: 0}); !errors.Is(err, want) {
				t.Errorf("source %d: %v, want %v", source, err, want)
			}
		}
		d.Close()
	}
}

// A shard without sums that is changed in place after it was verified is verified again, and
// reported.
func TestVerifyChangedInPlace(t *testing.T) {
	shardtest.UserCache(t)
	c := newCorpus(t)
	c.shard("a", shards.UInt16, 500, 500)
	for _, ending := range []string{".json", ".sums", ".docs.arrow"} {
		if err := os.Remove(filepath.Join(c.dir, "a"+ending)); err != nil {
			t.Fatal(err)
		}
	}
	shardtest.Age(t, c.dir)
	p := c.seal("sequence_length: 16\nseed: 1\nsources: [{name: a, shards: [a]}]\n")
	d, err := Open(t.Context(), p, OpenOptions{Verify: &verifier.Options{Rate: -1}, Reverify: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if err := settle(t, d).Err; err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(c.dir, "a.bin")
	touched := time.Now().Add(-time.Hour) // another time of change, long ago, is believed at once
	flip(t, path, 700)
	if err := os.Chtimes(path, touched, touched); err != nil {
		t.Fatal(err)
	}
	testwait.Until(t, "the damage is found", func() bool { return d.Verification().Err != nil })
	s, err := d.Locate(0)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Tokens(make([]uint32, 17), s); err == nil || !strings.Contains(err.Error(),
		"has changed since the plan was built: SHA-256 of its .bin file is") {
		t.Errorf("%v", err)
	}
}

// A file without sums gives nothing before it is verified, if that is asked for; one with sums
// gives what is right.
func TestVerifyFirst(t *testing.T) {
	for _, sums := range []bool{true, false} {
		p, path := damagedCorpus(t, sums)
		tokens := make([]uint32, 17)
		d, err := Open(t.Context(), p, OpenOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Tokens(tokens, Sample{Source: 1, Token: 98990}); (err != nil) != sums {
			t.Errorf("without verification, sums %v: %v", sums, err)
		}
		d.Close()
		// The other share: what a reader waits for is verified by whom it waits in.
		d, err = Open(t.Context(), p, OpenOptions{Verify: &verifier.Options{First: true, Rank: 2, World: 3}})
		if !sums {
			// Some of the 16 samples are of the damaged shard.
			if err == nil || !strings.Contains(err.Error(), strings.TrimSuffix(path, ".bin")) {
				t.Errorf("opened with %v", err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Tokens(tokens, Sample{Source: 1, Token: 0}); err != nil {
			t.Error(err)
		}
		d.Close()
	}
}

// A reader that waits for a verification stops waiting when it is told to, and when the data are
// closed.
func TestVerifyWaitEnds(t *testing.T) {
	p, _ := damagedCorpus(t, false)
	d, err := Open(t.Context(), p, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if err = d.startVerifier(verifier.Options{First: true, Rate: 1}); err != nil {
		// a byte a second: it will never end
		t.Fatal(err)
	}
	begun(t, d, 2)
	ctx, cancel := context.WithCancelCause(t.Context())
	enough := errors.New("enough")
	time.AfterFunc(10*time.Millisecond, func() { cancel(enough) })
	tokens := make([]uint32, 17)
	if err := d.tokens(ctx, tokens, Sample{Source: 1}); !errors.Is(err, enough) {
		t.Errorf("told to stop: %v", err)
	}
	waits := make(chan error)
	go func() { waits <- d.await(t.Context(), 1) }()
	d.verifier.Stop()
	if err := <-waits; !errors.Is(err, errClosed) {
		t.Errorf("closed: %v", err)
	}
}

// The index files of an order that is read are verified too.
func TestVerifyOrder(t *testing.T) {
	for _, first := range []bool{false, true} {
		shardtest.UserCache(t)
		c, golden, _ := megatronCache(t, "blend")
		p := c.seal(golden.config())
		name := golden.TrainHash + "-BlendedDataset-train-dataset_sample_index.npy"
		// Two draws of one dataset change places: nothing but the hash tells.
		path := filepath.Join(c.dir, "cache", name)
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		flipped := slices.Clone(data)
		at := len(data) - 8*17
		copy(flipped[at:], data[at+8:at+16])
		copy(flipped[at+8:at+16], data[at:at+8])
		if err := os.WriteFile(path, flipped, 0o644); err != nil {
			t.Fatal(err)
		}
		d, err := Open(t.Context(), p, OpenOptions{Verify: &verifier.Options{First: first}})
		if !first && err == nil {
			begun(t, d, len(p.order.files())+3)
			err = settle(t, d).Err
		}
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("first %v: %v", first, err)
		}
		if d != nil {
			d.Close()
		}
	}
}

// Open and Seal wait for the files of an order while another process builds them, and only for
// these files.
func TestOpenWaits(t *testing.T) {
	shardtest.UserCache(t)
	c, golden, _ := megatronCache(t, "blend")
	p := c.seal(golden.config())
	dir := filepath.Join(c.dir, "cache")
	away := filepath.Join(c.dir, "away")
	for _, how := range []string{"open", "seal", "seal the only one"} {
		if err := os.Rename(dir, away); err != nil {
			t.Fatal(err)
		}
		// A builder that works on something else in the same folder, from before until after.
		built, stop := make(chan struct{}), make(chan struct{})
		ended := startBuilder(t, dir, built, stop)
		<-built
		told := make(chan string, 1)
		result := make(chan error, 1)
		waiting := func(m string) { told <- m }
		go func() {
			if how == "open" {
				d, err := Open(t.Context(), p, OpenOptions{Waiting: waiting})
				if err == nil {
					d.Close()
				}
				result <- err
				return
			}
			text := golden.config()
			if how == "seal the only one" {
				text = "order: megatron\nmegatron: {cache: cache}\n"
			}
			sealed, err := Seal(t.Context(), c.config(text), SealOptions{Waiting: waiting})
			if err == nil && sealed.Length() != p.Length() {
				err = fmt.Errorf("%d samples, want %d", sealed.Length(), p.Length())
			}
			result <- err
		}()
		if m := <-told; !strings.Contains(m, "waiting for process") || !strings.Contains(m, dir) {
			t.Errorf("%s: %q", how, m)
		}
		entries, err := os.ReadDir(away)
		if err != nil {
			t.Fatal(err)
		}
		slices.SortFunc(entries, func(a, b os.DirEntry) int { // blends last, descriptions after data
			key := func(e os.DirEntry) string {
				return fmt.Sprint(strings.Contains(e.Name(), "Blended"), strings.HasSuffix(e.Name(), ".txt"), e.Name())
			}
			return strings.Compare(key(a), key(b))
		})
		for _, e := range entries {
			if !e.IsDir() {
				if err := os.Rename(filepath.Join(away, e.Name()), filepath.Join(dir, e.Name())); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := <-result; err != nil {
			t.Errorf("%s: %v", how, err)
		}
		close(stop)
		<-ended
		os.RemoveAll(away)
	}
	if err := os.Rename(dir, away); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), p, OpenOptions{Waiting: func(m string) { t.Error(m) }}); !errors.Is(err,
		os.ErrNotExist) {
		t.Errorf("nobody builds: %v", err)
	}
}

// startBuilder is a process of index/cache that has begun when built is closed, and goes on until
// stop is.
func startBuilder(t *testing.T, dir string, built chan<- struct{}, stop <-chan struct{}) (ended <-chan struct{}) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := buildOther(t.Context(), dir, built, stop); err != nil {
			t.Error(err)
		}
	}()
	return done
}

// The environment that makes the test binary a rank that opens a plan and verifies its share.
const (
	rankPlan  = "MULA_BLEND_TEST_PLAN"
	rankRank  = "MULA_BLEND_TEST_RANK"
	rankWorld = "MULA_BLEND_TEST_WORLD"
)

// rankOf opens the plan as a rank of a training would, reads its share of the first steps, and
// verifies its share of the files.
func rankOf(path string) error {
	rank, err := strconv.Atoi(os.Getenv(rankRank))
	world, err2 := strconv.Atoi(os.Getenv(rankWorld))
	if err := errors.Join(err, err2); err != nil {
		return err
	}
	p, err := ReadPlan(path)
	if err != nil {
		return err
	}
	d, err := Open(context.Background(), p, OpenOptions{Verify: &verifier.Options{Rank: rank, World: world}})
	if err != nil {
		return err
	}
	defer d.Close()
	if err := readAll(context.Background(), d, int64(20*rank), int64(20*(rank+1))); err != nil {
		return err
	}
	for i := rank; i < shardCount(p); i += world {
		if err := d.verifier.Await(context.Background(), i); err != nil {
			return err
		}
	}
	return nil
}

// Ranks that start together on an empty user's cache each keep what they found out: afterwards it
// is whole, and nothing has to be found out again.
func TestRanksShareFacts(t *testing.T) {
	const world = 4
	rounds := 10
	if testing.Short() {
		rounds = 3
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c, text := mixed(t)
	p := c.seal(text)
	shardtest.Age(t, c.dir)
	for round := range rounds {
		root := shardtest.UserCache(t)
		var ranks []*exec.Cmd
		for rank := range world {
			cmd := exec.Command(exe)
			cmd.Env = append(os.Environ(), rankPlan+"="+filepath.Join(c.dir, "plan.json"),
				fmt.Sprintf("%s=%d", rankRank, rank), fmt.Sprintf("%s=%d", rankWorld, world))
			cmd.Stderr = new(strings.Builder)
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			ranks = append(ranks, cmd)
		}
		for rank, cmd := range ranks {
			if err := cmd.Wait(); err != nil {
				t.Errorf("round %d, rank %d: %v: %s", round, rank, err, cmd.Stderr)
			}
		}
		l := facts.Open()
		for i := range p.Sources {
			for k := range p.Sources[i].Shards {
				prefix, err := absolutePath(p.ShardPath(i, k))
				if err != nil {
					t.Fatal(err)
				}
				if _, s, ok := l.Find(prefix); !ok || !l.VerifiedAt(prefix, s) {
					t.Errorf("round %d: %s: in the cache %v, and not verified", round, prefix, ok)
				}
			}
		}
		left, err := filepath.Glob(filepath.Join(root, ".*"))
		if err != nil || len(left) > 0 {
			t.Errorf("left behind: %v, %v", left, err)
		}
		if t.Failed() {
			return
		}
	}
}

// buildOther builds a unit that no plan needs.
func buildOther(ctx context.Context, dir string, built chan<- struct{}, stop <-chan struct{}) error {
	_, err := cache.Run(ctx, dir, []cache.Unit{{
		Name: "other", Files: []string{"other.npy"}, Marker: "other.txt", MarkerText: []byte("other"),
		Sizes: func(context.Context) ([]int64, error) { return []int64{1}, nil },
		Build: func(_ context.Context, files []io.WriterAt) error {
			close(built)
			<-stop
			_, err := files[0].WriteAt([]byte{0}, 0)
			return err
		},
	}}, cache.Options{Threads: 1, Resume: true})
	return err
}

// BenchmarkFirstBatch is the time from a plan's file to the first 512 samples, over 3,000
// shards of 256 KiB: with and without what was noted of the shards before, and with the
// verification of all of them behind it.
func BenchmarkFirstBatch(b *testing.B) {
	root := shardtest.UserCache(b)
	c := newCorpus(b)
	documents := slices.Repeat([]int{512}, 256)
	c.shard("web/00000", shards.UInt16, documents...)
	for i := 1; i < 3000; i++ { // copied: nothing waits for the disk
		for _, ending := range []string{".bin", ".idx", ".json", ".sums", ".docs.arrow"} {
			if err := copyFile(filepath.Join(c.dir, "web/00000"+ending),
				filepath.Join(c.dir, fmt.Sprintf("web/%05d%s", i, ending))); err != nil {
				b.Fatal(err)
			}
		}
	}
	shardtest.Age(b, c.dir)
	c.seal("sequence_length: 1024\nseed: 1\nsources: [{name: web, shards: [web/*.idx]}]\n")
	first := func(b *testing.B, verify *verifier.Options) *Data {
		p, err := ReadPlan(filepath.Join(c.dir, "plan.json"))
		if err != nil {
			b.Fatal(err)
		}
		d, err := Open(b.Context(), p, OpenOptions{Verify: verify})
		if err != nil {
			b.Fatal(err)
		}
		if err := readAll(b.Context(), d, 0, 512); err != nil {
			b.Fatal(err)
		}
		return d
	}
	noted := map[string][]byte{}
	for _, page := range pagesOf(b, root) {
		data, err := os.ReadFile(page)
		if err != nil {
			b.Fatal(err)
		}
		noted[page] = data
	}
	for _, test := range []struct {
		name   string
		forget bool
		verify *verifier.Options
	}{
		{"noted", false, nil}, {"noted, verified behind", false, &verifier.Options{Rate: -1}},
		{"unknown", true, nil}, {"unknown, verified behind", true, &verifier.Options{Rate: -1}},
	} {
		b.Run(test.name, func(b *testing.B) {
			verified := int64(0)
			defer processTime(b)()
			for b.Loop() {
				b.StopTimer()
				for page, data := range noted {
					os.Remove(page)
					if !test.forget {
						if err := os.WriteFile(page, data, 0o600); err != nil {
							b.Fatal(err)
						}
					}
				}
				b.StartTimer()
				d := first(b, test.verify)
				b.StopTimer()
				p := d.Verification()
				if p.Err != nil {
					b.Fatal(p.Err)
				}
				verified += p.Bytes
				if err := d.Close(); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
			b.ReportMetric(float64(verified)/float64(b.N)/1e6, "MB-verified")
		})
	}
}
