package shards_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"mula/internal/objects"
	"mula/shards"
	"mula/shards/shardtest"
)

// openBoth opens a shard of a folder as local files and through a server.
func openBoth(t *testing.T, dir, name string) (local, remote *shards.Shard, server *shardtest.Server) {
	t.Helper()
	server = shardtest.Serve(t, dir)
	local, err := shards.Open(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { local.Close() })
	remote, err = shards.Open(server.URL + "/" + name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { remote.Close() })
	return local, remote, server
}

// contents counts the shards of TestRemoteShardEqualsLocalShard. Each must differ from all others,
// because files with a known hash are taken from the cache.
var contents int

// A shard in an object store has the content of the same files on the local disk, with a manifest
// and without. Reading all tokens twice fetches every byte once.
func TestRemoteShardEqualsLocalShard(t *testing.T) {
	for _, manifest := range []bool{true, false} {
		for _, dtype := range []shards.DType{shards.UInt16, shards.Int32} {
			dir := t.TempDir()
			contents++
			lengths := shardtest.Lengths(3000+contents, 40)
			shardtest.Write(t, dir, "s", dtype, lengths...)
			if !manifest {
				for _, ending := range []string{".json", ".sums", ".docs.arrow"} {
					if err := os.Remove(filepath.Join(dir, "s"+ending)); err != nil {
						t.Fatal(err)
					}
				}
			}
			local, remote, server := openBoth(t, dir, "s")
			if local.Tokens() != remote.Tokens() || local.Documents() != remote.Documents() ||
				local.DType() != remote.DType() || local.Summed() != remote.Summed() ||
				(remote.Manifest() != nil) != manifest || !remote.Remote() {
				t.Fatalf("%d and %d tokens, %d and %d documents", local.Tokens(), remote.Tokens(), local.Documents(),
					remote.Documents())
			}
			before := server.Bytes.Load()
			want, got := make([]uint32, local.Tokens()), make([]uint32, local.Tokens())
			for range 2 {
				const step = 1777
				for at := int64(0); at < local.Tokens(); at += step {
					end := min(at+step, local.Tokens())
					if err := errors.Join(local.Read(want[at:end], at), remote.Read(got[at:end], at)); err != nil {
						t.Fatal(err)
					}
				}
				if !slices.Equal(want, got) {
					t.Fatal("tokens differ")
				}
			}
			all := local.Tokens() * int64(dtype.Size())
			if sums, err := os.Stat(filepath.Join(dir, "s.sums")); err == nil {
				all += sums.Size()
			}
			if fetched := server.Bytes.Load() - before; fetched != all {
				t.Errorf("%d bytes were fetched for %d bytes of tokens and sums", fetched, all)
			}
			for d := range local.Documents() {
				a, err1 := local.Span(d)
				b, err2 := remote.Span(d)
				if a != b || err1 != nil || err2 != nil {
					t.Fatalf("document %d: %v %v, %v %v", d, a, err1, b, err2)
				}
			}
			d := int64(0)
			for n, err := range remote.DocumentLengths() {
				if err != nil || n != int64(lengths[d]) {
					t.Fatalf("document %d has %d tokens, want %d; %v", d, n, lengths[d], err)
				}
				d++
			}
			localSum, err1 := local.VerifyTokens(t.Context(), nil, nil)
			remoteSum, err2 := remote.VerifyTokens(t.Context(), nil, nil)
			if localSum != remoteSum || err1 != nil || err2 != nil {
				t.Errorf("%s %v, %s %v", localSum, err1, remoteSum, err2)
			}
			if !manifest {
				continue
			}
			if err := remote.Verify(t.Context(), nil); err != nil {
				t.Error(err)
			}
			origins, err := remote.DocumentIDs(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if o, err := origins.Origin(2999); o.ID != "s/2999" || err != nil {
				t.Errorf("origin %v, %v", o, err)
			}
		}
	}
}

// flip changes a bit of a file.
func flip(t *testing.T, path string, at int) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	data[at] ^= 1
	if err := os.WriteFile(path, data, 0o666); err != nil {
		t.Fatal(err)
	}
}

func TestRemoteShardReportsDamage(t *testing.T) {
	dir := t.TempDir()
	shardtest.Write(t, dir, "s", shards.UInt16, shardtest.Lengths(3000, 40)...)
	flip(t, filepath.Join(dir, "s.bin"), 40_000)
	_, remote, server := openBoth(t, dir, "s")
	var damage *shards.DamageError
	if err := remote.Read(make([]uint32, 100), 19_990); !errors.As(err, &damage) ||
		damage.Path != server.URL+"/s.bin" || damage.Blocks[0] != (shards.ByteSpan{32768, 49152}) ||
		len(damage.Documents) == 0 || !strings.Contains(err.Error(), `s.jsonl:`) {
		t.Errorf("error %v", err)
	}
	if err := remote.Read(make([]uint32, 100), 0); err != nil {
		t.Errorf("a block that is not damaged: %v", err)
	}
	if err := remote.Verify(t.Context(), nil); !errors.As(err, &damage) {
		t.Errorf("Verify: %v", err)
	}
	for i, ending := range []string{".sums", ".idx", ".docs.arrow"} {
		dir := t.TempDir()
		// A cached file with the right hash would be used, so the shards differ.
		shardtest.Write(t, dir, "s", shards.UInt16, shardtest.Lengths(31+i, 40)...)
		flip(t, filepath.Join(dir, "s"+ending), 30)
		server := shardtest.Serve(t, dir)
		s, err := shards.Open(server.URL + "/s")
		if err == nil {
			_, spanErr := s.Span(0)
			_, originErr := s.DocumentIDs(t.Context())
			err = errors.Join(s.Read(make([]uint32, 1), 0), spanErr, originErr)
			s.Close()
		}
		if !errors.Is(err, shards.ErrCorrupt) || !strings.Contains(err.Error(), server.URL+"/s"+ending) {
			t.Errorf("damaged %s: %v", ending, err)
		}
	}
}

// An object that changes while it is read is an error that names it.
func TestRemoteShardThatChanges(t *testing.T) {
	dir := t.TempDir()
	shardtest.Write(t, dir, "s", shards.UInt16, shardtest.Lengths(3000, 40)...)
	_, remote, server := openBoth(t, dir, "s")
	if err := remote.Read(make([]uint32, 10), 0); err != nil {
		t.Fatal(err)
	}
	if remote.Replaced() {
		t.Error("replaced, before anything changed")
	}
	flip(t, filepath.Join(dir, "s.bin"), 0)
	if err := remote.Read(make([]uint32, 10), remote.Tokens()-10); !errors.Is(err, objects.ErrChanged) ||
		!strings.Contains(err.Error(), server.URL+"/s.bin") {
		t.Errorf("error %v", err)
	}
	if !remote.Replaced() {
		t.Error("not replaced")
	}
}

func TestRemoteShardThatIsIncomplete(t *testing.T) {
	dir := t.TempDir()
	shardtest.Write(t, dir, "s", shards.UInt16, 3, 4)
	server := shardtest.Serve(t, dir)
	if _, err := shards.Open(server.URL + "/other"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no shard: %v", err)
	}
	if err := os.Remove(filepath.Join(dir, "s.idx")); err != nil {
		t.Fatal(err)
	}
	if _, err := shards.Open(server.URL + "/s"); !errors.Is(err, fs.ErrNotExist) ||
		!strings.Contains(err.Error(), "never finished") {
		t.Errorf("without .idx: %v", err)
	}
	shardtest.Write(t, dir, "s", shards.UInt16, 3, 4)
	if err := os.Truncate(filepath.Join(dir, "s.bin"), 12); err != nil {
		t.Fatal(err)
	}
	if _, err := shards.Open(server.URL + "/s"); !errors.Is(err, shards.ErrCorrupt) {
		t.Errorf("short .bin: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := shards.OpenContext(ctx, server.URL+"/s"); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// FetchIndex asks for the version of .idx once, and fetches a version once. It needs no other file.
func TestFetchIndex(t *testing.T) {
	dir := t.TempDir()
	shardtest.Write(t, dir, "s", shards.UInt16, 5, 9, 3)
	if err := os.Remove(filepath.Join(dir, "s.bin")); err != nil {
		t.Fatal(err)
	}
	local, err := shards.OpenIndex(filepath.Join(dir, "s.idx"))
	if err != nil {
		t.Fatal(err)
	}
	defer local.Close()
	server := shardtest.Serve(t, dir)
	for _, requests := range []int64{2, 3} {
		x, err := shards.FetchIndex(t.Context(), server.URL+"/s")
		if err != nil {
			t.Fatal(err)
		}
		defer x.Close()
		if got := server.Requests.Load(); got != requests {
			t.Errorf("%d requests, want %d", got, requests)
		}
		if x.Elements() != local.Elements() || x.Documents() != local.Documents() ||
			!x.ModTime().Equal(local.ModTime().Truncate(time.Second)) {
			t.Errorf("%d tokens in %d documents, modified at %v; want %d in %d, %v", x.Elements(), x.Documents(),
				x.ModTime(), local.Elements(), local.Documents(), local.ModTime())
		}
	}
}
