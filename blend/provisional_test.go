package blend

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sync/errgroup"

	"mula/internal/objects"
	"mula/internal/objects/objectstest"
	"mula/internal/testwait"
	"mula/shards"
	"mula/shards/sample"
	"mula/shards/shardtest"
	"mula/shards/verifier"
)

// foreign makes a corpus of four shards without manifests, one of them small, and of one shard with
// a manifest. It returns the configuration and the total size of the three large shards.
func foreign(t testing.TB) (corpus, *Config, int64) {
	t.Helper()
	c := newCorpus(t)
	var size int64
	for i, name := range []string{"web/a", "web/b", "wiki/a", "wiki/small"} {
		n := 9000 + 1000*i
		if name == "wiki/small" {
			n = 1000
		}
		c.shard(name, shards.UInt16, shardtest.Lengths(n, 160)...)
		for _, ending := range []string{".json", ".sums", ".docs.arrow"} {
			if err := os.Remove(filepath.Join(c.dir, name+ending)); err != nil {
				t.Fatal(err)
			}
		}
		if name == "wiki/small" {
			continue
		}
		for _, ending := range []string{".bin", ".idx"} {
			info, err := os.Stat(filepath.Join(c.dir, name+ending))
			if err != nil {
				t.Fatal(err)
			}
			size += info.Size()
		}
	}
	c.shard("code/own", shards.UInt16, shardtest.Lengths(900, 160)...)
	config := c.config("sequence_length: 64\nseed: 7\nvalidation: 0.01\nsources:\n" +
		"  - {name: web, shards: [web/*]}\n  - {name: wiki, shards: [wiki/*]}\n  - {name: code, shards: [code/*]}\n")
	return c, config, size
}

// sealSampled builds and writes a provisional plan.
func sealSampled(t testing.TB, c *Config, path, sums string) *Plan {
	t.Helper()
	p, err := Seal(t.Context(), c, SealOptions{Sample: true, Sums: sums})
	if err == nil {
		err = p.Write(path)
	}
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// meaning returns the `plan` object of a plan's file.
func meaning(t testing.TB, path string) string {
	t.Helper()
	var f struct {
		Plan json.RawMessage `json:"plan"`
	}
	data, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(data, &f)
	}
	var compact bytes.Buffer
	if err == nil {
		err = json.Compact(&compact, f.Plan)
	}
	if err != nil {
		t.Fatal(err)
	}
	return compact.String()
}

// Several processes complete a provisional plan. They read each byte once, and write the plan that
// a process without samples builds. Blocks are then compared with their sums.
func TestComplete(t *testing.T) {
	for _, folder := range []string{"", "sums"} {
		t.Run(folder, func(t *testing.T) {
			c, config, size := foreign(t)
			path := filepath.Join(c.dir, "plan.json")
			sums := ""
			if folder != "" {
				sums = filepath.Join(c.dir, folder)
			}
			full, err := Seal(t.Context(), config, SealOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if err := full.Write(path); err != nil {
				t.Fatal(err)
			}
			want := meaning(t, path)
			provisional := sealSampled(t, config, path, "")
			if !provisional.Provisional() || full.Provisional() || full.Fingerprint() == provisional.Fingerprint() {
				t.Fatalf("provisional: %v, with all hashes: %v", provisional.Provisional(), full.Provisional())
			}
			if p, err := ReadPlan(path); err != nil || p.Fingerprint() != provisional.Fingerprint() ||
				p.ProvisionalFingerprint() != p.Fingerprint() {
				t.Fatalf("the plan that was read: %v", err)
			}
			running := c.openPlan(path) // a run that continues while the plan is completed
			var g errgroup.Group
			var mu sync.Mutex
			var read int64
			count := 0
			for range 4 {
				g.Go(func() error {
					done, err := Complete(t.Context(), path, path, CompleteOptions{Sums: sums, Threads: 1})
					if err != nil {
						return err
					}
					mu.Lock()
					defer mu.Unlock()
					read, count = read+done.Bytes, count+done.Shards
					if done.Plan.Fingerprint() != full.Fingerprint() {
						return errors.New("another fingerprint")
					}
					return nil
				})
			}
			if err := g.Wait(); err != nil {
				t.Fatal(err)
			}
			if read != size || count != 3 {
				t.Errorf("%d bytes of %d shards were read, want %d of 3", read, count, size)
			}
			if got := meaning(t, path); got != want {
				t.Errorf("the plan is\n%s\nwant\n%s", got, want)
			}
			if left, err := filepath.Glob(filepath.Join(c.dir, "*.complete")); err != nil || left != nil {
				t.Errorf("%q are left, %v", left, err)
			}
			p, err := ReadPlan(path)
			if err != nil {
				t.Fatal(err)
			}
			if p.ProvisionalFingerprint() != provisional.Fingerprint() {
				t.Errorf("its provisional fingerprint is %s, was %s", p.ProvisionalFingerprint(),
					provisional.Fingerprint())
			}
			if n, ok := p.Shared(provisional.Fingerprint()); !ok || n != p.Length() {
				t.Errorf("it shares %d samples with the provisional plan, %v", n, ok)
			}
			if d := Diff(provisional, p); d.Relation != SamePlan || len(d.Changes) > 0 {
				t.Errorf("differences to the provisional plan: %+v", d)
			}
			d := c.openPlan(path)
			for i, n := range []int{2, 1} {
				for k := range n {
					if !shardOf(t, d, i, k).Summed() {
						t.Errorf("shard %d of source %d has no sums", k, i)
					}
				}
			}
			last := shardOf(t, d, 0, 1).Tokens() - 1
			at := d.Sources[0].windows.Count() - 1 // the last window of web/b
			tokens := make([]uint32, d.SampleTokens())
			s := Sample{Source: 0, Window: at, Shard: 1, Token: (last/64 - 1) * 64}
			if err := errors.Join(d.Tokens(tokens, s), running.Tokens(tokens, s)); err != nil {
				t.Error(err)
			}
			flip(t, filepath.Join(c.dir, "web/b.bin"), int(2*s.Token))
			var damage *shards.DamageError
			if err := c.openPlan(path).Tokens(tokens, s); !errors.As(err, &damage) {
				t.Errorf("a damaged block: %v", err)
			}
		})
	}
}

// openPlan opens the plan in a file until the end of the test.
func (c corpus) openPlan(path string) *Data {
	c.t.Helper()
	p, err := ReadPlan(path)
	if err != nil {
		c.t.Fatal(err)
	}
	d, err := Open(c.t.Context(), p, OpenOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { d.Close() })
	return d
}

// A sampled block that has changed is named when the shard is read, and when the plan is completed.
func TestChangedSample(t *testing.T) {
	c, config, _ := foreign(t)
	path := filepath.Join(c.dir, "plan.json")
	sealSampled(t, config, path, "")
	bin := filepath.Join(c.dir, "web/b.bin")
	info, err := os.Stat(bin)
	if err != nil {
		t.Fatal(err)
	}
	blocks := sample.Blocks(info.Size())
	flip(t, bin, int(blocks[7])*sample.BlockSize+11)
	want := fmt.Sprintf("web/b of source \"web\" has changed since the plan was built: block %d of its .bin file",
		blocks[7])
	_, err = Complete(t.Context(), path, path, CompleteOptions{})
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v; want %s", err, want)
	}
	if p, err := ReadPlan(path); err != nil || !p.Provisional() {
		t.Errorf("the plan was replaced, or %v", err)
	}
	d := &Data{}
	if p, err := ReadPlan(path); err != nil {
		t.Fatal(err)
	} else if d, err = Open(t.Context(), p, OpenOptions{Unread: true}); err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if err := d.Probe(0, 1); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("reading: %v; want %s", err, want)
	}
	flip(t, bin, int(blocks[7])*sample.BlockSize+11)
	if _, err := Complete(t.Context(), path, path, CompleteOptions{}); err != nil {
		t.Errorf("restored: %v", err)
	}
	p, err := ReadPlan(path)
	if err != nil || p.Provisional() {
		t.Fatalf("the complete plan: %v", err)
	}
	again, err := Complete(t.Context(), path, path, CompleteOptions{})
	if err != nil || again.Bytes != 0 || again.Plan.Fingerprint() != p.Fingerprint() {
		t.Errorf("completing again: %+v, %v", again, err)
	}
}

// A plan file whose samples were changed is refused.
func TestDamagedSamples(t *testing.T) {
	c, config, _ := foreign(t)
	path := filepath.Join(c.dir, "plan.json")
	p := sealSampled(t, config, path, "")
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	damage := func(old, new string) error {
		t.Helper()
		changed := bytes.Replace(whole, []byte(old), []byte(new), 1)
		if bytes.Equal(changed, whole) {
			t.Fatalf("the plan does not have %s", old)
		}
		_, err := parsePlan(changed)
		return err
	}
	sh := p.Sources[0].Shards[0]
	for _, change := range [][2]string{{`"format": 2`, `"format": 1`}, {sh.Sample, strings.Repeat("0", 64)},
		{`"sample": "` + sh.Sample, `"sample": "x`}, {`"blocks": [`, `"blocks": ["",`}, {sh.blocks, "x"}} {
		if err := damage(change[0], change[1]); err == nil {
			t.Errorf("%.60s was not noticed", change[1])
		}
	}
	if _, err := Complete(t.Context(), path, path, CompleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if whole, err = os.ReadFile(path); err != nil {
		t.Fatal(err)
	}
	if err := damage(sh.Sample, strings.Repeat("0", 64)); err == nil ||
		!strings.Contains(err.Error(), "samples of its shards were changed") {
		t.Errorf("a changed sample of a complete plan: %v", err)
	}
}

// An amended plan keeps the samples of its parent and can be completed.
func TestAmendProvisional(t *testing.T) {
	c, config, _ := foreign(t)
	path := filepath.Join(c.dir, "plan.json")
	parent := sealSampled(t, config, path, "")
	p, err := Amend(t.Context(), parent, &Amendment{At: 640, Skips: []Range{{700, 710}}}, SealOptions{Sample: true})
	if err != nil {
		t.Fatal(err)
	}
	if !p.Provisional() || p.Sources[0].Shards[0].Sample != parent.Sources[0].Shards[0].Sample {
		t.Error("the amended plan has other samples")
	}
	amended := filepath.Join(c.dir, "plan-2.json")
	if err := p.Write(amended); err != nil {
		t.Fatal(err)
	}
	done, err := Complete(t.Context(), amended, amended, CompleteOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, fingerprint := range []string{p.Fingerprint(), done.Plan.Fingerprint()} {
		if n, ok := done.Plan.Shared(fingerprint); !ok || n != p.Length() {
			t.Errorf("%s: %d, %v", fingerprint, n, ok)
		}
	}
	if n, ok := done.Plan.Shared(parent.Fingerprint()); !ok || n != 640 {
		t.Errorf("the parent: %d, %v", n, ok)
	}
	// The shards of a complete plan have no samples in the plan that amends it.
	next, err := Amend(t.Context(), done.Plan, &Amendment{At: 640, Skips: []Range{{800, 810}}},
		SealOptions{Sample: true})
	if err != nil || next.Provisional() || next.ProvisionalFingerprint() != "" {
		t.Errorf("amending the complete plan: %v", err)
	}
}

// A packed plan can be provisional. Its index files do not depend on the samples.
func TestCompletePacked(t *testing.T) {
	c, _, _ := foreign(t)
	config := c.config("sequence_length: 64\nseed: 7\npacking: best_fit\nsources:\n" +
		"  - {name: web, shards: [web/*]}\n  - {name: code, shards: [code/*]}\n")
	path := filepath.Join(c.dir, "plan.json")
	full, err := Seal(t.Context(), config, SealOptions{})
	if err != nil {
		t.Fatal(err)
	}
	sealSampled(t, config, path, "")
	done, err := Complete(t.Context(), path, path, CompleteOptions{})
	if err != nil || done.Plan.Fingerprint() != full.Fingerprint() {
		t.Fatalf("%v, %v", done, err)
	}
	c.openPlan(path)
}

// Check of a provisional plan reads all bytes and compares the samples.
func TestCheckProvisional(t *testing.T) {
	c, config, _ := foreign(t)
	path := filepath.Join(c.dir, "plan.json")
	sealSampled(t, config, path, "")
	check := func() (compared []bool, failed bool) {
		t.Helper()
		r, err := c.openPlan(path).Check(t.Context(), CheckOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range r.Shards {
			compared = append(compared, s.Compared)
		}
		return compared, r.Failed()
	}
	if compared, failed := check(); failed || !slices.Equal(compared, []bool{false, false, false, true, true}) {
		t.Errorf("provisional: failed: %v, compared: %v", failed, compared)
	}
	if _, err := Complete(t.Context(), path, path, CompleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if compared, failed := check(); failed || slices.Contains(compared, false) {
		t.Errorf("complete: failed: %v, compared: %v", failed, compared)
	}
}

// Shards on a web server have the samples of the local files. They are completed with manifests and
// sums in a local folder.
func TestCompleteRemote(t *testing.T) {
	c, config, size := foreign(t)
	server := shardtest.Serve(t, c.dir)
	path, sums := filepath.Join(c.dir, "plan.json"), filepath.Join(c.dir, "sums")
	local := sealSampled(t, config, path, "")
	text := "sequence_length: 64\nseed: 7\nvalidation: 0.01\nsources:\n"
	for _, s := range local.Sources {
		text += fmt.Sprintf("  - name: %s\n    shards:\n", s.Name)
		for _, sh := range s.Shards {
			text += fmt.Sprintf("      - %s/%s/%s\n", server.URL, s.Name, filepath.Base(sh.Path))
		}
	}
	if p := sealSampled(t, c.config(text), path, ""); p.Fingerprint() != local.Fingerprint() {
		t.Error("the provisional plan of remote shards differs from the plan of local files")
	}
	done, err := Complete(t.Context(), path, path, CompleteOptions{Sums: sums, Threads: 2})
	if err != nil {
		t.Fatal(err)
	}
	full, err := Seal(t.Context(), config, SealOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if done.Bytes != size || done.Plan.Fingerprint() != full.Fingerprint() {
		t.Errorf("%d bytes were read, want %d; fingerprint %s, want %s", done.Bytes, size, done.Plan.Fingerprint(),
			full.Fingerprint())
	}
	d := c.openPlan(path)
	if s := shardOf(t, d, 0, 0); !s.Summed() || !s.Remote() {
		t.Errorf("sums: %v, remote: %v", s.Summed(), s.Remote())
	}
	if err := d.Tokens(make([]uint32, d.SampleTokens()), Sample{}); err != nil {
		t.Error(err)
	}
}

// The processes of a run complete a plan while they read its samples. They read each byte once.
func TestCompleteInTheBackground(t *testing.T) {
	c, config, _ := foreign(t)
	path := filepath.Join(c.dir, "plan.json")
	full, err := Seal(t.Context(), config, SealOptions{})
	if err != nil {
		t.Fatal(err)
	}
	sealSampled(t, config, path, "")
	p, err := ReadPlan(path)
	if err != nil {
		t.Fatal(err)
	}
	var size int64
	for i := range p.Sources {
		for k := range p.Sources[i].Shards {
			for _, ending := range []string{".bin", ".idx"} {
				info, err := os.Stat(p.ShardPath(i, k) + ending)
				if err != nil {
					t.Fatal(err)
				}
				size += info.Size()
			}
		}
	}
	var ranks []*Data
	for rank := range 2 {
		d, err := Open(t.Context(), p, OpenOptions{Unsurveyed: rank > 0,
			Verify: &verifier.Options{Complete: true, Rank: rank, World: 2, Rate: -1}})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		ranks = append(ranks, d)
	}
	testwait.Until(t, "the complete plan is written", func() bool {
		now, err := ReadPlan(path)
		return err == nil && !now.Provisional() || errors.Join(ranks[0].Verification().Err,
			ranks[1].Verification().Err) != nil
	})
	testwait.Until(t, "all files are verified", func() bool {
		a, b := ranks[0].Verification(), ranks[1].Verification()
		return a.Files == a.OfFiles && b.Files == b.OfFiles
	})
	var read int64
	for _, d := range ranks {
		v := d.Verification()
		if v.Err != nil {
			t.Error(v.Err)
		}
		read += v.Bytes
		if err := d.Tokens(make([]uint32, d.SampleTokens()), Sample{}); err != nil {
			t.Error(err)
		}
	}
	if now, err := ReadPlan(path); err != nil || now.Fingerprint() != full.Fingerprint() || read != size {
		t.Errorf("%v; %d bytes were read, want %d; the plan is not the complete one", err, read, size)
	}
	if _, err := os.Stat(filepath.Join(c.dir, "plan.complete")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the folder of the work: %v", err)
	}
	d := c.openPlan(path)
	if s := shardOf(t, d, 0, 0); !s.Summed() {
		t.Error("a shard has no sums")
	}
	for _, o := range []OpenOptions{{Base: c.dir}, {}} {
		q := *p
		if o.Base == "" {
			q.file = "s3://bucket/plan.json"
		}
		o.Verify = &verifier.Options{Complete: true}
		if d, err := Open(t.Context(), &q, o); err == nil {
			t.Errorf("%+v: no error", o)
			d.Close()
		}
	}
}

// Manifests and sums are written beside shards in a store, the manifest after the sums.
func TestCompleteInAStore(t *testing.T) {
	c, config, _ := foreign(t)
	place := objectstest.S3(t)
	path := filepath.Join(c.dir, "plan.json")
	local := sealSampled(t, config, path, "")
	text := "sequence_length: 64\nseed: 7\nvalidation: 0.01\nsources:\n"
	for i, s := range local.Sources {
		text += fmt.Sprintf("  - name: %s\n    shards:\n", s.Name)
		for k := range s.Shards {
			url := place.URL + s.Name + "/" + filepath.Base(local.ShardPath(i, k))
			text += "      - " + url + "\n"
			for _, file := range shards.Files(local.ShardPath(i, k)) {
				data, err := os.ReadFile(file)
				if errors.Is(err, fs.ErrNotExist) {
					continue
				}
				if err == nil {
					err = objects.WriteFile(t.Context(), url+filepath.Ext(file), data)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	p := sealSampled(t, c.config(text), path, "")
	var mu sync.Mutex
	var written []string
	place.Proxy.Disturb(func(r *http.Request) (none objectstest.Fault) {
		mu.Lock()
		defer mu.Unlock()
		if r.Method == http.MethodPut {
			written = append(written, r.URL.Path)
		}
		return none
	})
	done, err := Complete(t.Context(), path, path, CompleteOptions{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	url := p.ShardPath(0, 0)
	key := strings.TrimPrefix(url, "s3:/")
	sums, manifest := slices.Index(written, key+".sums"), slices.Index(written, key+".json")
	if sums < 0 || manifest != sums+1 || done.Plan.Fingerprint() == p.Fingerprint() {
		t.Errorf("written: %v", written)
	}
	d := c.openPlan(path)
	if s := shardOf(t, d, 0, 0); !s.Summed() || !s.Remote() {
		t.Errorf("sums: %v, remote: %v", s.Summed(), s.Remote())
	}
	if err := d.Tokens(make([]uint32, d.SampleTokens()), Sample{}); err != nil {
		t.Error(err)
	}
}
