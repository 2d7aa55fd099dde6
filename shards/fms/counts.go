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

	"mula/internal/atomicfile"
	"mula/internal/locks"
	"mula/shards"
)

// countsName is the file of counts that is made where there is none. fms-fsdp takes the one file in
// the folder meta that has "counts" and "csv" in its name.
const countsName = "combined_counts.csv"

var countsHeader = []string{"dataset/filename", "documents", "tokens"}

// WriteCounts brings the file of counts up to date by which fms-fsdp knows how many documents each
// file of a data set has: for the folder root/wiki that is root/meta/combined_counts.csv, or the
// file of counts that meta has already. It has a line for each .arrow file in the folder and those
// below it, "/wiki/x.arrow,documents,tokens", in the order of their names; lines about other
// folders stay. It gives the path of the file. Whoever has published a shard calls it. Of several
// processes that do so at the same time, for any folders of one root, one waits for the other.
func WriteCounts(ctx context.Context, folder string) (path string, err error) {
	if folder, err = filepath.Abs(folder); err == nil {
		err = alone(ctx, filepath.Join(filepath.Dir(folder), "meta"), func() error {
			path, err = writeCounts(ctx, folder)
			return err
		})
	}
	if err != nil {
		return "", fmt.Errorf("counting documents: %w", err)
	}
	return path, nil
}

// alone makes the folder meta and runs do in it while no other process runs alone there. No name
// that it uses is one that fms-fsdp, or [findCounts], would take for a file of counts.
func alone(ctx context.Context, meta string, do func() error) error {
	if err := os.MkdirAll(meta, 0o777); err != nil {
		return err
	}
	if err := atomicfile.SyncDir(filepath.Dir(meta)); err != nil {
		return err
	}
	if _, err := atomicfile.Clean(meta); err != nil { // what a killed process left
		return err
	}
	all, err := locks.Open(meta, locks.DefaultTiming)
	if err != nil {
		return err
	}
	defer all.Close()
	l, err := all.Wait(ctx, filepath.Join(meta, "mula"+locks.Suffix), 20*time.Millisecond)
	if err != nil {
		return err
	}
	defer l.Release()
	ctx, stop := context.WithCancel(ctx)
	var beating sync.WaitGroup
	beating.Go(func() { all.Beat(ctx) })
	defer beating.Wait()
	defer stop()
	return do()
}

// writeCounts does the work of WriteCounts.
func writeCounts(ctx context.Context, folder string) (path string, err error) {
	root := filepath.Dir(folder)
	if path, err = findCounts(filepath.Join(root, "meta")); err != nil {
		return "", err
	}
	counts, err := readCounts(path)
	if err != nil {
		return "", err
	}
	own := "/" + filepath.Base(folder) + "/"
	maps.DeleteFunc(counts, func(name string, _ [2]int64) bool { return strings.HasPrefix(name, own) })
	err = filepath.WalkDir(folder, func(file string, d fs.DirEntry, err error) error {
		if err != nil || ctx.Err() != nil {
			return errors.Join(err, ctx.Err())
		}
		name, _ := filepath.Rel(root, file)
		hidden := strings.HasPrefix(d.Name(), ".") && file != folder
		switch {
		case d.IsDir() && hidden:
			return fs.SkipDir
		case d.IsDir() || hidden || !strings.HasSuffix(name, arrowExt):
			return nil
		case strings.HasSuffix(name, ".docs"+arrowExt):
			return fmt.Errorf("%s has the origins of the documents of another shard, and fms-fsdp would take it for "+
				"one of tokens: give the data set a folder of its own", file)
		}
		documents, tokens, err := count(ctx, strings.TrimSuffix(file, arrowExt))
		if err != nil {
			return fmt.Errorf("%w (fms-fsdp takes every .arrow file in the folder for one of tokens: give it a "+
				"folder of its own)", err)
		}
		counts["/"+filepath.ToSlash(name)] = [2]int64{documents, tokens}
		return nil
	})
	if err != nil {
		return "", err
	}
	f, err := atomicfile.CreateAs(path, "mula")
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
	return path, f.Publish()
}

// findCounts gives the path of the file of counts in the folder meta.
func findCounts(meta string) (string, error) {
	entries, err := os.ReadDir(meta)
	if err != nil {
		return "", err
	}
	path := filepath.Join(meta, countsName)
	var found []string
	for _, e := range entries {
		if name := e.Name(); !strings.HasPrefix(name, ".") && strings.Contains(name, "counts") &&
			strings.Contains(name, "csv") {
			path = filepath.Join(meta, name)
			found = append(found, name)
		}
	}
	if len(found) > 1 {
		return "", fmt.Errorf("%s has several files of counts (%s), of which fms-fsdp would take any one: leave one",
			meta, strings.Join(found, ", "))
	}
	return path, nil
}

// readCounts reads a file of counts: documents and tokens by "/dataset/filename". Without the file
// it is empty.
func readCounts(path string) (map[string][2]int64, error) {
	counts := make(map[string][2]int64)
	f, err := os.Open(path)
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
			return nil, fmt.Errorf("%s:%d: %q are no counts, with the heading %q", path, line, record, countsHeader)
		}
		counts["/"+strings.TrimPrefix(record[0], "/")] = [2]int64{documents, tokens}
	}
}

// count gives the numbers of documents and tokens of a shard.
func count(ctx context.Context, prefix string) (documents, tokens int64, err error) {
	r, err := Open(prefix)
	if err != nil {
		return 0, 0, err
	}
	defer r.Close()
	if r.Tokens() >= 0 {
		return r.Documents(), r.Tokens(), nil
	}
	err = r.all(ctx, func(doc shards.TokenDocument) bool { // All would compare them with the counts of before
		tokens += int64(len(doc.Tokens))
		return true
	})
	return r.Documents(), tokens, err
}

// compareCounts compares the numbers of documents and tokens of a shard with what the file of
// counts beside its data set says of it. Where there is no such file, several, or one without the
// shard, there is nothing to compare.
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
	path, err := findCounts(filepath.Join(root, "meta"))
	if err != nil {
		return nil
	}
	counts, err := readCounts(path)
	if err != nil { // a file of another kind has such a name
		return nil
	}
	if want, ok := counts["/"+filepath.ToSlash(name)]; ok && want != [2]int64{documents, tokens} {
		return fmt.Errorf("%s: by %s it has %d documents and %d tokens, found %d and %d: restore the shard, or "+
			"correct the counts: %w",
			prefix+arrowExt, path, want[0], want[1], documents, tokens, shards.ErrCorrupt)
	}
	return nil
}
