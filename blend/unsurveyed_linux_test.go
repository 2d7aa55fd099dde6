package blend

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"mula/shards"
	"mula/shards/shardtest"
)

// opens counts the opens of the files below some directories.
type opens struct {
	t  testing.TB
	fd int
}

func watchOpens(t testing.TB, dirs ...string) *opens {
	t.Helper()
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	for _, dir := range dirs {
		if _, err := unix.InotifyAddWatch(fd, dir, unix.IN_OPEN); err != nil {
			t.Fatal(err)
		}
	}
	return &opens{t, fd}
}

// take returns the names of the files that were opened since the last call, each once.
func (o *opens) take() map[string]bool {
	o.t.Helper()
	names := map[string]bool{}
	buffer := make([]byte, 1<<16)
	for {
		n, err := unix.Read(o.fd, buffer)
		if err == unix.EAGAIN || n == 0 {
			return names
		}
		if err != nil {
			o.t.Fatal(err)
		}
		for at := 0; at < n; {
			event := (*unix.InotifyEvent)(unsafe.Pointer(&buffer[at]))
			at += unix.SizeofInotifyEvent
			name := strings.TrimRight(string(buffer[at:at+int(event.Len)]), "\x00")
			at += int(event.Len)
			if event.Mask&unix.IN_Q_OVERFLOW != 0 {
				o.t.Fatal("events were lost")
			}
			if name != "" {
				names[name] = true
			}
		}
	}
}

// bytesRead returns the number of bytes that the process has read by system calls.
func bytesRead(t testing.TB) (n int64) {
	t.Helper()
	data, err := os.ReadFile("/proc/self/io")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscanf(string(data), "rchar: %d", &n); err != nil {
		t.Fatal(err)
	}
	return n
}

// Of 64 ranks that read a plan over 3,000 shards, one looks at all shards. The other ranks open the
// shards of their samples and no others: all other shards may be missing, so no rank has looked at
// them. A rank that needs a missing or a changed shard names it.
func TestUnsurveyed(t *testing.T) {
	shardtest.UserCache(t)
	const files, ranks, batch = 3000, 64, 128
	root := t.TempDir()
	dir := filepath.Join(root, "shards")
	shardtest.Write(t, dir, "part-00000", shards.UInt16, 30, 40)
	link := func(from, to string) {
		t.Helper()
		for _, ending := range []string{".bin", ".idx"} {
			if err := os.Link(from+ending, to+ending); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, ending := range []string{".json", ".sums", ".docs.arrow"} {
		if err := os.Remove(filepath.Join(dir, "part-00000"+ending)); err != nil {
			t.Fatal(err)
		}
	}
	for k := 1; k < files; k++ { // all have the content of the first
		link(filepath.Join(dir, "part-00000"), filepath.Join(dir, fmt.Sprintf("part-%05d", k)))
	}
	shardtest.Age(t, dir)
	c, err := ParseConfig([]byte("sequence_length: 16\nsources: [{name: a, shards: [part-*]}]\n"), "blend.yaml", dir)
	if err != nil {
		t.Fatal(err)
	}
	p, err := Seal(t.Context(), c, SealOptions{})
	if err != nil {
		t.Fatal(err)
	}
	needed := map[string]bool{} // shards of the first step
	samples := make([]Sample, batch)
	for i := range samples {
		if samples[i], err = p.Locate(int64(i)); err != nil {
			t.Fatal(err)
		}
		needed[filepath.Base(p.ShardPath(0, samples[i].Shard))] = true
	}
	first, err := Open(t.Context(), p, OpenOptions{}) // rank 0
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	away := filepath.Join(root, "away")
	if err := errors.Join(os.Rename(dir, away), os.Mkdir(dir, 0o755)); err != nil {
		t.Fatal(err)
	}
	missing := ""
	for k := range files {
		if name := filepath.Base(p.ShardPath(0, k)); needed[name] {
			link(filepath.Join(away, name), filepath.Join(dir, name))
		} else {
			missing = name
		}
	}
	if _, err := Open(t.Context(), p, OpenOptions{}); err == nil {
		t.Error("rank 0 does not notice missing shards")
	}
	watch := watchOpens(t, dir)
	tokens, read := make([]uint32, p.SampleTokens()), 0
	for rank := range ranks {
		watch.take()
		before := bytesRead(t)
		d, err := Open(t.Context(), p, OpenOptions{Unsurveyed: true})
		if err != nil {
			t.Fatal(err)
		}
		if opened := watch.take(); len(opened) > 0 {
			t.Errorf("rank %d opened %v before its first sample", rank, opened)
		}
		if n := bytesRead(t) - before; n > 1<<10 { // of the counter itself
			t.Errorf("rank %d read %d bytes before its first sample", rank, n)
		}
		mine := map[string]bool{}
		for _, s := range samples[rank*batch/ranks : (rank+1)*batch/ranks] {
			if err := d.Tokens(tokens, s); err != nil {
				t.Fatal(err)
			}
			mine[filepath.Base(p.ShardPath(0, s.Shard))] = true
			read++
		}
		opened := watch.take()
		for name := range opened {
			if shard, _, _ := strings.Cut(name, "."); !mine[shard] {
				t.Errorf("rank %d opened %s", rank, name)
			}
		}
		if want := 2 * len(mine); len(opened) != want { // .idx and .bin
			t.Errorf("rank %d opened %d files, want %d", rank, len(opened), want)
		}
		if rank == ranks-1 {
			last := files - 1
			for filepath.Base(p.ShardPath(0, last)) != missing {
				last--
			}
			if err := d.Probe(0, last); err == nil || !strings.Contains(err.Error(), missing) {
				t.Errorf("a missing shard: %v; want %s", err, missing)
			}
			shardtest.Write(t, dir, missing, shards.UInt16, 30, 41)
			if err := d.Probe(0, last); err == nil || !strings.Contains(err.Error(), missing+
				" of source \"a\" has changed since the plan was built: it has 71 tokens, previously 70") {
				t.Errorf("a changed shard: %v", err)
			}
		}
		d.Close()
	}
	if read != batch {
		t.Errorf("%d samples, want %d", read, batch)
	}
}
