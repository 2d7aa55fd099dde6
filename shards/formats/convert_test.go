package formats

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"

	"strings"
	"syscall"
	"testing"

	"mula/internal/filesystem"
	"mula/internal/filesystem/faultfs"
	"mula/shards"
	"mula/shards/datatrove"
	"mula/shards/dolma"
	"mula/shards/fms"
	"mula/shards/layout"
	"mula/shards/mds"
)

// files are the files below a folder with their content.
func files(t testing.TB, dir string) map[string][]byte {
	t.Helper()
	out := make(map[string][]byte)
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := os.ReadFile(path)
		out[strings.TrimPrefix(path, dir)] = data
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func corpus(n, longest int, vocabulary uint32) (docs []document) {
	random := rand.New(rand.NewPCG(1, uint64(n)))
	for d := range n {
		tokens := make([]uint32, 1+random.IntN(longest))
		for i := range tokens {
			tokens[i] = random.Uint32N(vocabulary)
		}
		docs = append(docs, document{tokens, shards.DocumentOrigin{ID: fmt.Sprint("d", d), File: "f",
			Line: int64(d) + 1}})
	}
	return docs
}

// Several shards into several: no document is divided, all are there, in order; and the same bytes
// when it is killed and run again.
func TestConversion(t *testing.T) {
	t.Parallel()
	docs := corpus(50, 30, 50280)
	for _, to := range all {
		dir := t.TempDir()
		var inputs []string
		for i, part := range [][]document{docs[:20], docs[20:20], docs[20:]} {
			inputs = append(inputs, filepath.Join(dir, fmt.Sprint("in", i)))
			if _, err := write(all[i], inputs[i], testInfo, Options{}, part); err != nil {
				t.Fatal(err)
			}
		}
		run := func(fsys filesystem.FS, out string) (*Converted, error) {
			if err := os.MkdirAll(filepath.Join(dir, out), 0o755); err != nil {
				t.Fatal(err)
			}
			c := Conversion{Inputs: inputs, Hints: Hints{EOD: -1}, Layout: to, Output: filepath.Join(dir, out, "x"),
				ShardTokens: 100, Options: Options{FS: fsys}}
			return c.Run(t.Context())
		}
		done, err := run(nil, "whole/set")
		if err != nil {
			t.Fatal(err)
		}
		var got []document
		for i, s := range done.Shards {
			part, err := read(s.Prefix)
			if err != nil {
				t.Fatal(err)
			}
			tokens := int64(0)
			for _, d := range part {
				tokens += int64(len(d.Tokens))
			}
			if tokens != s.Tokens || tokens > 100 || int64(len(part)) != s.Documents {
				t.Errorf("%s: shard %d has %d tokens in %d documents: %+v", to.Name, i, tokens, len(part), s)
			}
			if i > 0 && done.Shards[i-1].Tokens+int64(len(part[0].Tokens)) <= 100 {
				t.Errorf("%s: the first document of shard %d had room in the one before", to.Name, i)
			}
			got = append(got, part...)
		}
		if !same(got, docs) || len(done.Shards) < 5 || done.Documents != 50 {
			t.Errorf("%s: %d shards with %d documents", to.Name, len(done.Shards), len(got))
		}
		// Killed at several moments, then run again.
		for _, k := range []int64{3, 17, 40, 90} {
			nth := &faultfs.Nth{K: k, Err: syscall.EIO, After: true}
			if _, err := run(faultfs.New(nth.Fault), "again/set"); !errors.Is(err, syscall.EIO) {
				t.Errorf("%s: got %v, want EIO", to.Name, err)
			}
		}
		if _, err := run(nil, "again/set"); err != nil {
			t.Fatal(err)
		}
		whole, again := files(t, filepath.Join(dir, "whole")), files(t, filepath.Join(dir, "again"))
		if len(whole) != len(again) {
			t.Errorf("%s: %d files, %d when it was killed in between", to.Name, len(whole), len(again))
		}
		for name, data := range whole {
			if !bytes.Equal(data, again[name]) {
				t.Errorf("%s: %s is another when it was killed in between", to.Name, name)
			}
		}
	}
}

func TestConversionRefuses(t *testing.T) {
	dir := t.TempDir()
	docs := corpus(3, 9, 70000)
	docs[1].Tokens[0] = 69999
	info := testInfo
	info.VocabSize = 70000
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	if _, err := write(&datatrove.Layout, a, info, Options{}, docs); err != nil {
		t.Fatal(err)
	}
	if _, err := write(&dolma.Layout, b, testInfo, Options{}, corpus(2, 9, 100)); err != nil {
		t.Fatal(err)
	}
	empty := filepath.Join(dir, "empty")
	if _, err := write(&fms.Layout, empty, testInfo, Options{}, []document{
		{[]uint32{1}, shards.DocumentOrigin{ID: "x"}}, {nil, shards.DocumentOrigin{ID: "y"}}}); err != nil {
		t.Fatal(err)
	}
	bare := filepath.Join(dir, "bare")
	data, err := os.ReadFile(a + ".ds")
	if err := errors.Join(err, os.WriteFile(bare+".npy", data, 0o644)); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(dir, "out")
	sized := Hints{DType: "uint32", VocabSize: 50280, EOD: 69999}
	for want, c := range map[string]Conversion{
		"no input":             {Layout: &dolma.Layout, Output: out},
		"different tokenizers": {Inputs: []string{a, b}, Layout: &dolma.Layout, Output: out},
		"would be replaced": {Inputs: []string{b}, Layout: &dolma.Layout, Output: dir + "/../" +
			filepath.Base(dir) + "/b"},
		"below 50280; nothing was wr": {Inputs: []string{bare}, Hints: sized, Layout: &dolma.Layout, Output: out},
		"has no tokens":               {Inputs: []string{empty}, Layout: &mds.Layout, Output: out},
		"looked for": {Inputs: []string{a, filepath.Join(dir, "c")}, Layout: &dolma.Layout,
			Output: out},
	} {
		if _, err := c.Run(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v does not say %q", err, want)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := (&Conversion{Inputs: []string{a}, Layout: &dolma.Layout, Output: out}).Run(ctx); !errors.Is(err,
		context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if left, _ := filepath.Glob(out + "*"); len(left) > 0 {
		t.Errorf("left behind %v", left)
	}
	done, err := (&Conversion{Inputs: []string{empty}, Layout: &mds.Layout, Output: out,
		DropEmpty: true}).Run(t.Context())
	if err != nil || done.Dropped != 1 || done.Documents != 1 {
		t.Errorf("without empty documents: %+v, %v", done, err)
	}
}

// If the size of the vocabulary is unknown, ids keep their width. If an input has no origins, its
// documents are named after it.
func TestConversionOfBareArrays(t *testing.T) {
	for _, to := range all {
		dir := t.TempDir()
		input := filepath.Join(dir, "in.npy")
		if err := os.WriteFile(input, []byte{1, 0, 2, 0, 9, 0, 3, 0, 9, 0}, 0o644); err != nil {
			t.Fatal(err)
		}
		c := Conversion{Inputs: []string{input}, Hints: Hints{DType: "uint16", EOD: 9}, Layout: to,
			Output: filepath.Join(dir, "x")}
		done, err := c.Run(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		dtype := to.Widen(2)
		if done.Shards[0].DType != dtype {
			t.Errorf("%s: ids are %s, want %s", to.Name, done.Shards[0].DType, dtype)
		}
		docs, err := read(c.Output)
		want := []document{{[]uint32{1, 2, 9}, shards.DocumentOrigin{ID: input + ":1", File: input, Line: 1}},
			{[]uint32{3, 9}, shards.DocumentOrigin{ID: input + ":2", File: input, Line: 2}}}
		if err != nil || !same(docs, want) {
			t.Errorf("%s: %v, %v", to.Name, docs, err)
		}
	}
}

// Two hundred thousand documents go through in the memory of one batch of their origins.
func TestMemoryIsFlat(t *testing.T) {
	const n = 200_000
	dir := t.TempDir()
	tokens := make([]uint32, 12)
	for _, l := range all {
		prefix := filepath.Join(dir, "x"+l.Name)
		w, err := Create(l, prefix, testInfo, Options{SizeLimit: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Abort()
		origin := shards.DocumentOrigin{ID: "document", File: "part-0001.jsonl.zst"}
		heap := func() uint64 {
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			return m.HeapAlloc
		}
		add := func(from, to int64) {
			for i := from; i < to; i++ {
				for k := range tokens {
					tokens[k] = uint32(i+int64(k)*7919) % 50280
				}
				origin.Line = i
				if err := w.Append(tokens, origin); err != nil {
					t.Fatal(err)
				}
			}
		}
		add(0, n/2)
		before := heap()
		add(n/2, n)
		if grown := int64(heap()) - int64(before); grown > 4<<20 {
			t.Errorf("%s: writing %d documents took %d bytes more", l.Name, n/2, grown)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		r, err := Open(prefix, layout.NoHints)
		if err != nil {
			t.Fatal(err)
		}
		count, most := 0, int64(0)
		before = heap()
		for d, err := range r.All(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			if d.Origin.Line != int64(count) || d.Tokens[1] != uint32(count+7919)%50280 {
				t.Fatalf("%s: document %d is %v", l.Name, count, d)
			}
			if count++; count == n/2 || count == n-1 {
				most = max(most, int64(heap())-int64(before))
			}
		}
		if count != n || most > 16<<20 {
			t.Errorf("%s: %d documents were read with %d bytes more", l.Name, count, most)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
}
