package fms

import (
	"bufio"
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/locks"
	"mula/internal/objects"
	"mula/shards"
)

// countsName is the name of a new file of counts. fms-fsdp reads the only file in the folder meta
// with "counts" and "csv" in its name.
const countsName = "combined_counts.csv"

var countsHeader = []string{"dataset/filename", "documents", "tokens"}

// writeCounts updates the file of counts, from which fms-fsdp reads the number of documents of each
// file of a data set, and returns its path. For the folder root/wiki the file is
// root/meta/combined_counts.csv, or the existing file of counts in meta. It has a line
// "/wiki/x.arrow,documents,tokens" for each .arrow file in the folder and its subfolders, sorted by
// name. Lines about other folders are kept. Call writeCounts after publishing a shard. Processes
// that call it at the same time, for any folders of one root, wait for each other. folder may be a
// URL if fsys has URLs.
func writeCounts(ctx context.Context, fsys filesystem.FS, folder string) (path string, err error) {
	if !objects.IsURL(folder) {
		folder, err = filepath.Abs(folder)
	}
	if err == nil {
		files := atomicfile.On(fsys)
		err = alone(ctx, files, objects.Join(objects.Dir(folder), "meta"), func(l *locks.Lock) error {
			path, err = updateCounts(ctx, files, folder, l)
			return err
		})
	}
	if err != nil {
		return "", fmt.Errorf("counting documents: %w", err)
	}
	return path, nil
}

// alone creates the folder meta and runs do while no other process runs alone there. fms-fsdp and
// [findCounts] ignore the names of alone's files.
func alone(ctx context.Context, files atomicfile.Files, meta string, do func(*locks.Lock) error) error {
	poll := 20 * time.Millisecond
	if objects.IsURL(meta) {
		poll = time.Second // a look is a request, and there are no folders to create
	} else if err := os.MkdirAll(meta, 0o777); err != nil {
		return err
	} else if err := files.SyncDir(filepath.Dir(meta)); err != nil {
		return err
	}
	if _, err := files.Clean(meta); err != nil { // remove files of a killed process
		return err
	}
	all, err := locks.Open(ctx, nil, meta, locks.DefaultTiming)
	if err != nil {
		return err
	}
	defer all.Close()
	l, err := all.Wait(ctx, objects.Join(meta, "mula"+locks.Suffix), poll)
	if err != nil {
		return err
	}
	defer l.Release()
	ctx, stop := context.WithCancel(ctx)
	var beating sync.WaitGroup
	beating.Go(func() { all.Beat(ctx) })
	defer beating.Wait()
	defer stop()
	return do(l)
}

// updateCounts does the work of writeCounts. l is the lock of the folder meta.
func updateCounts(ctx context.Context, files atomicfile.Files, folder string, l *locks.Lock) (path string, err error) {
	if path, err = findCounts(files.FS(), objects.Join(objects.Dir(folder), "meta")); err != nil {
		return "", err
	}
	counts, err := readCounts(files.FS(), path)
	if err != nil {
		return "", err
	}
	own := "/" + filepath.Base(folder) + "/"
	maps.DeleteFunc(counts, func(name string, _ [2]int64) bool { return strings.HasPrefix(name, own) })
	var mu sync.Mutex // of counts
	add := func(name, file string, size int64) error {
		if strings.HasSuffix(name, ".docs"+arrowExt) {
			return fmt.Errorf("%s describes the documents of another shard, and fms-fsdp would read it as a "+
				"shard; write fms shards into a separate folder", file)
		}
		documents, tokens, err := count(ctx, file, size)
		if err != nil {
			return fmt.Errorf("%w (fms-fsdp reads every .arrow file in the folder as a shard; write fms "+
				"shards into a separate folder)", err)
		}
		mu.Lock()
		defer mu.Unlock()
		counts[own+name] = [2]int64{documents, tokens}
		return nil
	}
	if objects.IsURL(folder) {
		err = eachStored(ctx, folder, add)
	} else {
		err = eachLocal(ctx, folder, add)
	}
	if err != nil {
		return "", err
	}
	f, err := files.CreateAs(path, "mula")
	if err != nil {
		return "", err
	}
	defer f.Abort()
	buffer := bufio.NewWriter(f)
	w := csv.NewWriter(buffer)
	w.Write(countsHeader)
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		w.Write([]string{name, strconv.FormatInt(counts[name][0], 10), strconv.FormatInt(counts[name][1], 10)})
	}
	w.Flush()
	if err := errors.Join(w.Error(), buffer.Flush()); err != nil {
		return "", err
	}
	if !l.Ours() {
		return "", fmt.Errorf("another process took over the lock of %s, because this one did not respond for a "+
			"minute; repeat the command", path)
	}
	return path, f.Publish()
}

// eachLocal calls add for each .arrow file in a folder and its subfolders, with its name in the
// folder, its path and its size.
func eachLocal(ctx context.Context, folder string, add func(name, file string, size int64) error) error {
	return filepath.WalkDir(folder, func(file string, d fs.DirEntry, err error) error {
		if err != nil || ctx.Err() != nil {
			return errors.Join(err, ctx.Err())
		}
		hidden := strings.HasPrefix(d.Name(), ".") && file != folder
		switch {
		case d.IsDir() && hidden:
			return fs.SkipDir
		case d.IsDir() || hidden || !strings.HasSuffix(file, arrowExt):
			return nil
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		name, _ := filepath.Rel(folder, file)
		return add(filepath.ToSlash(name), file, info.Size())
	})
}

// fetches is how many manifests are fetched at a time.
const fetches = 16

// eachStored is eachLocal for a URL. It calls add from several goroutines.
func eachStored(ctx context.Context, folder string, add func(name, file string, size int64) error) error {
	g := new(errgroup.Group)
	g.SetLimit(fetches)
	for e, err := range objects.List(ctx, folder+"/") {
		if err != nil {
			return errors.Join(err, g.Wait())
		}
		name := strings.TrimPrefix(e.URL, folder+"/")
		if strings.HasPrefix(name, ".") || strings.Contains(name, "/.") || !strings.HasSuffix(name, arrowExt) {
			continue
		}
		g.Go(func() error { return add(name, e.URL, e.Size) })
	}
	return g.Wait()
}

// findCounts returns the path of the file of counts in the folder meta.
func findCounts(fsys filesystem.FS, meta string) (string, error) {
	entries, err := fsys.ReadDir(meta)
	if err != nil {
		return "", err
	}
	path := objects.Join(meta, countsName)
	var found []string
	for _, e := range entries {
		if name := e.Name(); !strings.HasPrefix(name, ".") && strings.Contains(name, "counts") &&
			strings.Contains(name, "csv") {
			path = objects.Join(meta, name)
			found = append(found, name)
		}
	}
	if len(found) > 1 {
		return "", fmt.Errorf("%s has several files of counts (%s), and fms-fsdp would read any of them; keep only one",
			meta, strings.Join(found, ", "))
	}
	return path, nil
}

// readCounts reads a file of counts: documents and tokens by "/dataset/filename". It returns an
// empty map if the file does not exist.
func readCounts(fsys filesystem.FS, path string) (map[string][2]int64, error) {
	counts := make(map[string][2]int64)
	f, err := filesystem.Open(fsys, path)
	if errors.Is(err, fs.ErrNotExist) {
		return counts, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	r := csv.NewReader(f)
	r.FieldsPerRecord = len(countsHeader)
	for n := 0; ; n++ {
		record, err := r.Read()
		if err == io.EOF {
			return counts, nil
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		if n == 0 && slices.Equal(record, countsHeader) {
			continue
		}
		documents, err1 := strconv.ParseInt(record[1], 10, 64)
		tokens, err2 := strconv.ParseInt(record[2], 10, 64)
		if n == 0 || err1 != nil || err2 != nil {
			line, _ := r.FieldPos(0)
			return nil, fmt.Errorf("%s:%d: invalid counts %q for the heading %q", path, line, record, countsHeader)
		}
		counts["/"+strings.TrimPrefix(record[0], "/")] = [2]int64{documents, tokens}
	}
}

// count returns the numbers of documents and tokens of the shard with an .arrow file of size bytes.
// In a store only shards with a manifest are counted.
func count(ctx context.Context, file string, size int64) (documents, tokens int64, err error) {
	prefix := strings.TrimSuffix(file, arrowExt)
	if objects.IsURL(file) {
		m, err := shards.FetchManifest(ctx, prefix+manifestExt)
		switch {
		case err != nil:
			return 0, 0, err
		case m == nil || m.Layout != id:
			return 0, 0, fmt.Errorf("%s has no manifest of layout fms, %s, from which mula counts its documents", file,
				prefix+manifestExt)
		case m.Files[arrowExt[1:]].Bytes != size:
			return 0, 0, fmt.Errorf("%s has %d bytes, but %s has %d: %w", file, size, prefix+manifestExt,
				m.Files[arrowExt[1:]].Bytes, shards.ErrCorrupt)
		}
		return m.Documents, m.Tokens, nil
	}
	r, err := open(prefix)
	if err != nil {
		return 0, 0, err
	}
	defer r.Close()
	if r.Tokens() >= 0 {
		return r.Documents(), r.Tokens(), nil
	}
	err = r.all(ctx, func(doc shards.TokenDocument) bool { // All would compare them with the old counts
		tokens += int64(len(doc.Tokens))
		return true
	})
	return r.Documents(), tokens, err
}

// compareCounts compares the numbers of documents and tokens of a shard with the file of counts of
// its data set. It returns nil if that file does not exist, if there are several, or if it does not
// list the shard.
func compareCounts(prefix string, documents, tokens int64) error {
	file, err := filepath.Abs(prefix + arrowExt)
	if err != nil {
		return err
	}
	root := filepath.Dir(filepath.Dir(file))
	name, err := filepath.Rel(root, file)
	if err != nil {
		return err
	}
	path, err := findCounts(filesystem.OS{}, filepath.Join(root, "meta"))
	if err != nil {
		return nil
	}
	counts, err := readCounts(filesystem.OS{}, path)
	if err != nil { // a file of another kind with such a name
		return nil
	}
	if want, ok := counts["/"+filepath.ToSlash(name)]; ok && want != [2]int64{documents, tokens} {
		return fmt.Errorf("%s: %s lists %d documents and %d tokens, but found %d and %d; restore the shard, or "+
			"correct the counts: %w",
			prefix+arrowExt, path, want[0], want[1], documents, tokens, shards.ErrCorrupt)
	}
	return nil
}
