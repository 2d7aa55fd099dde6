package tokenize

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"runtime"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"

	"mula/tokenize/documents"

	"golang.org/x/sync/errgroup"
)

const (
	// maxDistinctBytes bounds the distinct words of training, and with them its memory.
	maxDistinctBytes = 1 << 27
	// workerWords and workerBytes bound the number of distinct words, and their bytes, that a
	// worker counts before it adds them to the common count.
	workerWords = 1 << 16
	workerBytes = 1 << 22
	// countBatch is the approximate number of bytes of text per batch.
	countBatch = 1 << 20
)

// A countedWord is a word of the split pattern and how often it occurs.
type countedWord struct {
	word  string
	count int64
}

// wordCounts is shared by the workers.
type wordCounts struct {
	mu    sync.Mutex
	count map[string]int64
	bytes int64
}

func (c *wordCounts) add(index map[string]int32, counts []int64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for w, i := range index {
		n, ok := c.count[w]
		if !ok {
			if c.bytes += int64(len(w)); c.bytes > maxDistinctBytes {
				return fmt.Errorf("the text has more than %d MiB of different words, too many to train on; limit the "+
					"text with MaxBytes", maxDistinctBytes>>20)
			}
		}
		c.count[w] = n + counts[i]
	}
	return nil
}

// countWords counts the words of the documents, in the order of their bytes.
func countWords(ctx context.Context, docs iter.Seq2[documents.Document, error], opts TrainOptions,
	progress func(docs, bytes int64)) ([]countedWord, error) {
	workers := opts.Workers
	if workers == 0 {
		workers = runtime.GOMAXPROCS(0)
	}
	common := &wordCounts{count: map[string]int64{}}
	batches := make(chan [][]byte, 1)
	g, ctx := errgroup.WithContext(ctx)
	for range workers {
		g.Go(func() error {
			index, counts := map[string]int32{}, []int64(nil)
			held := 0 // bytes of the words in index
			scan, classes := opts.Pattern.scanner(), pinnedClasses()
			for batch := range batches {
				for _, text := range batch {
					for len(text) > 0 {
						n := scan(classes, text)
						if i, ok := index[string(text[:n])]; ok {
							counts[i]++
						} else {
							index[string(text[:n])] = int32(len(counts))
							counts = append(counts, 1)
							held += n
						}
						text = text[n:]
						if len(counts) < workerWords && held < workerBytes {
							continue
						}
						if err := common.add(index, counts); err != nil {
							return err
						}
						clear(index)
						counts, held = counts[:0], 0
						if ctx.Err() != nil {
							return ctx.Err()
						}
					}
				}
			}
			return common.add(index, counts)
		})
	}
	g.Go(func() error {
		defer close(batches)
		return sendTexts(ctx, docs, opts.MaxBytes, batches, progress)
	})
	if err := g.Wait(); err != nil {
		return nil, err
	}
	words := make([]countedWord, 0, len(common.count))
	for w, n := range common.count {
		words = append(words, countedWord{w, n})
	}
	// The merges do not depend on the order of the words. Sorting makes everything else
	// deterministic too.
	slices.SortFunc(words, func(a, b countedWord) int { return strings.Compare(a.word, b.word) })
	return words, nil
}

// sendTexts sends the texts of the documents in batches, until maxBytes are reached. 0 means no
// limit.
func sendTexts(ctx context.Context, docs iter.Seq2[documents.Document, error], maxBytes int64, batches chan<- [][]byte,
	progress func(docs, bytes int64)) error {
	var batch [][]byte
	size := 0
	var count, total int64
	send := func() error {
		select {
		case batches <- batch:
			batch, size = nil, 0
			progress(count, total)
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	for d, err := range docs {
		if err != nil {
			return err
		}
		if !utf8.Valid(d.Text) {
			return fmt.Errorf("%s:%d: invalid UTF-8 at byte %d of the text", d.File, d.Line,
				documents.InvalidUTF8(d.Text))
		}
		batch = append(batch, d.Text)
		size += len(d.Text)
		count++
		total += int64(len(d.Text))
		if size >= countBatch {
			if err := send(); err != nil {
				return err
			}
		}
		if maxBytes > 0 && total >= maxBytes {
			break
		}
	}
	if total == 0 {
		return errors.New("the inputs have no text for training")
	}
	return send()
}
