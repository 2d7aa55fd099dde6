//go:build linux

package blockcache

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
)

// The variables of a process of these tests: the URL of the file, its size, the seed of the order
// of reading, and the patience of the process.
const (
	urlVariable      = "MULA_TEST_URL"
	sizeVariable     = "MULA_TEST_SIZE"
	seedVariable     = "MULA_TEST_SEED"
	patienceVariable = "MULA_TEST_PATIENCE"
)

func TestMain(m *testing.M) {
	if os.Getenv(urlVariable) == "" {
		os.Exit(m.Run())
	}
	if err := readAll(os.Getenv(urlVariable)); err != nil {
		log.Fatal(err)
	}
}

// A web source reads a file by HTTP.
type web string

func (w web) ReadAt(ctx context.Context, p []byte, off int64) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, string(w), nil)
	if err != nil {
		return err
	}
	r.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", off, off+int64(len(p))-1))
	r.Header.Set("Process", os.Getenv(seedVariable))
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	_, err = io.ReadFull(response.Body, p)
	return err
}

// readAll reads all blocks of a file, and the complete file, in a random order.
func readAll(url string) error {
	size, err := strconv.ParseInt(os.Getenv(sizeVariable), 10, 64)
	if err != nil {
		return err
	}
	seed, err := strconv.ParseUint(os.Getenv(seedVariable), 10, 64)
	if err != nil {
		return err
	}
	c, err := Default()
	if err != nil {
		return err
	}
	if c.patience, err = time.ParseDuration(os.Getenv(patienceVariable)); err != nil {
		return err
	}
	f := c.File("x", size, web(url))
	defer f.Close()
	var g errgroup.Group
	g.SetLimit(8)
	random := rand.New(rand.NewPCG(seed, 0))
	for _, first := range random.Perm(int(f.blocks())) {
		g.Go(func() error { return f.Fetch(context.Background(), int64(first)*Block, int64(first+3)*Block) })
	}
	g.Go(func() error {
		_, err := c.Whole(context.Background(), "w", size, web(url), nil)
		return err
	})
	if err := g.Wait(); err != nil {
		return err
	}
	p := make([]byte, size)
	if err := f.ReadBlocks(context.Background(), p, 0); err != nil {
		return err
	}
	if want := newRemote(int(size)).data; !bytes.Equal(p, want) {
		return fmt.Errorf("wrong bytes")
	}
	return nil
}

// A webFile serves a file to processes and counts the bytes.
type webFile struct {
	*httptest.Server
	data  []byte
	bytes atomic.Int64
	stall func(process string) bool // whether a request gets no answer; nil: no request
	asked chan string
}

func serve(t *testing.T, size int, stall func(process string) bool) *webFile {
	w := &webFile{data: newRemote(size).data, asked: make(chan string, 10000), stall: stall}
	w.Server = httptest.NewServer(http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		process := r.Header.Get("Process")
		w.asked <- process
		if w.stall != nil && w.stall(process) {
			<-r.Context().Done()
			return
		}
		time.Sleep(10 * time.Millisecond)
		http.ServeContent(counting{out, &w.bytes}, r, "", time.Time{}, bytes.NewReader(w.data))
	}))
	t.Cleanup(w.Close)
	return w
}

type counting struct {
	http.ResponseWriter
	bytes *atomic.Int64
}

func (c counting) Write(p []byte) (int, error) {
	c.bytes.Add(int64(len(p)))
	return c.ResponseWriter.Write(p)
}

// start starts a process that reads the file through the cache in a folder.
func (w *webFile) start(t *testing.T, folder string, seed int, patience string) *exec.Cmd {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), urlVariable+"="+w.URL, fmt.Sprintf("%s=%d", sizeVariable, len(w.data)),
		fmt.Sprintf("%s=%d", seedVariable, seed), FolderVariable+"="+folder, patienceVariable+"="+patience)
	cmd.Stderr = new(strings.Builder)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd
}

// Processes that need the same blocks at the same time fetch each of them once.
func TestProcessesFetchBlocksOnce(t *testing.T) {
	w := serve(t, 60*Block+17, nil)
	folder := t.TempDir()
	var g sync.WaitGroup
	for seed := range 3 {
		cmd := w.start(t, folder, seed, "1h")
		g.Go(func() {
			if err := cmd.Wait(); err != nil {
				t.Errorf("%v: %s", err, cmd.Stderr)
			}
		})
	}
	g.Wait()
	if got, want := w.bytes.Load(), int64(2*len(w.data)); got != want { // as blocks, and as a complete file
		t.Errorf("%d bytes were sent, want %d", got, want)
	}
}

// Other processes do not wait for a process that is killed while it fetches, and not long for a
// process whose request gets no answer.
func TestHoldersThatDoNotFinish(t *testing.T) {
	for patience, kill := range map[string]bool{"1h": true, "300ms": false} {
		w := serve(t, 5*Block, func(process string) bool { return process == "0" })
		folder := t.TempDir()
		stuck := w.start(t, folder, 0, patience)
		<-w.asked
		if kill {
			if err := stuck.Process.Kill(); err != nil {
				t.Fatal(err)
			}
		}
		cmd := w.start(t, folder, 1, patience)
		if err := cmd.Wait(); err != nil {
			t.Errorf("killed: %v: %v: %s", kill, err, cmd.Stderr)
		}
		if !kill {
			if err := stuck.Process.Kill(); err != nil {
				t.Fatal(err)
			}
		}
		_ = stuck.Wait()
		if got, want := w.bytes.Load(), int64(2*len(w.data)); got != want {
			t.Errorf("killed: %v: %d bytes were sent, want %d", kill, got, want)
		}
	}
}
