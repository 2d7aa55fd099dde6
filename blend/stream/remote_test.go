package stream

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"mula/blend"
	"mula/internal/objects/objectstest"
	"mula/shards"
	"mula/shards/shardtest"
)

// remoteConfig is a blend.yaml over the shards of [shardtest.WriteMixed] at a place.
func remoteConfig(place string) string {
	return strings.ReplaceAll(`
sequence_length: 16
seed: 5
validation: 0.05
sources:
  - {name: web, shards: ["PLACE/web/part-0", "PLACE/web/part-1.bin", "PLACE/web/part-2"], weight: 3}
  - {name: wiki, shards: ["PLACE/wiki/a"], weight: 1}
  - {name: code, shards: ["PLACE/code/x.idx"], weight: 1}
`, "PLACE", place)
}

// ipcOf returns the stream of a plan as bytes.
func ipcOf(t *testing.T, data *blend.Data, o Options) []byte {
	t.Helper()
	var out bytes.Buffer
	if err := WriteIPC(t.Context(), &out, data, o); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// A plan over objects has the fingerprint and the samples of the plan over the same local files,
// although the server fails now and then.
func TestRemoteStreamEqualsLocalStream(t *testing.T) {
	c, _ := mixed(t)
	server := shardtest.Serve(t, c.dir)
	proxy := objectstest.NewProxy(t, server.URL)
	proxy.Disturb(objectstest.Repeat(20, map[int64]objectstest.Fault{
		3: {Status: http.StatusServiceUnavailable}, 7: {Cut: 5}, 11: {Range: true}, 15: {Drop: true}}))
	local := c.open(remoteConfig("."))
	remote := c.open(remoteConfig(proxy.URL))
	if local.Fingerprint() != remote.Fingerprint() || local.Remote() || !remote.Remote() {
		t.Fatalf("the local plan is %s, the remote plan is %s", local.Fingerprint(), remote.Fingerprint())
	}
	for _, o := range []Options{
		{BatchSize: 4, Prefetch: 3},
		{BatchSize: 8, Rank: 1, World: 2, MicroBatch: 2, Prefetch: 1},
		{BatchSize: 6, Columns: []string{"position", "tokens"}},
		{BatchSize: 2, From: 40},
	} {
		if want, got := ipcOf(t, local, o), ipcOf(t, remote, o); !bytes.Equal(want, got) {
			t.Errorf("%+v: %d bytes from the store, want %d equal ones", o, len(got), len(want))
		}
	}
}

// Samples are fetched ahead, so a stream does not wait for each of them, and no byte is fetched
// twice.
func TestRemoteStreamFetchesAhead(t *testing.T) {
	c, _ := mixed(t)
	server := shardtest.Serve(t, c.dir)
	proxy := objectstest.NewProxy(t, server.URL)
	data := c.open(remoteConfig(proxy.URL))
	const delay = 40 * time.Millisecond
	proxy.Disturb(func(*http.Request) objectstest.Fault { return objectstest.Fault{Delay: delay} })
	before := server.Bytes.Load()
	start := time.Now()
	ipcOf(t, data, Options{BatchSize: 1, Prefetch: 1})
	if samples, took := data.Length(), time.Since(start); took > time.Duration(samples)*delay/4 {
		t.Errorf("%d samples took %v with %v for each request", samples, took, delay)
	}
	files, err := filepath.Glob(filepath.Join(c.dir, "*", "*"))
	var all int64
	for _, file := range files {
		info, statErr := os.Stat(file)
		err = errors.Join(err, statErr)
		all += info.Size()
	}
	if err != nil {
		t.Fatal(err)
	}
	if fetched := server.Bytes.Load() - before; fetched > all {
		t.Errorf("%d bytes were fetched; the files have %d", fetched, all)
	}
}

// A stream of a store that does not answer ends with its context.
func TestRemoteStreamIsCancelled(t *testing.T) {
	c := newCorpus(t)
	c.shard("big", shards.UInt16, shardtest.Lengths(5000, 60)...)
	server := shardtest.Serve(t, c.dir)
	proxy := objectstest.NewProxy(t, server.URL)
	data := c.open("sequence_length: 16\nsources: [{name: x, shards: [\"" + proxy.URL + "/big\"]}]\n")
	ctx, cancel := context.WithCancel(t.Context())
	proxy.Disturb(func(*http.Request) objectstest.Fault {
		cancel()
		return objectstest.Fault{Status: http.StatusServiceUnavailable}
	})
	s, err := New(ctx, data, Options{BatchSize: 4, Prefetch: 2, From: 48})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for err == nil {
		_, err = s.Next()
	}
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}
