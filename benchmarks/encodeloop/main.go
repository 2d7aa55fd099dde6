// Encodeloop encodes documents by mula's encoder alone, for benchmarks/encoding.py, which runs other libraries beside it:
//
//	encodeloop -tokenizer tokenizer.json -workers N -rounds R < documents
//
// Documents are a little-endian uint32 before the bytes of each. All are in memory before the clock starts. Special tokens are matched. Every worker
// takes the next document when it is done with one, as the workers of a job do. It prints a line a round: the seconds that took, and the ids. The
// first round begins with empty caches.
package main

import (
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime/pprof"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"mula/tokenize"
)

func main() {
	file := flag.String("tokenizer", "", "the tokenizer.json")
	workers := flag.Int("workers", 1, "how many goroutines encode at once")
	rounds := flag.Int("rounds", 1, "how often to encode everything")
	profile := flag.String("cpuprofile", "", "write a CPU profile to this file")
	flag.Parse()
	if err := run(os.Stdin, os.Stdout, *file, *workers, *rounds, *profile); err != nil {
		fmt.Fprintf(os.Stderr, "encodeloop: %v\n", err)
		os.Exit(1)
	}
}

func run(in io.Reader, out io.Writer, file string, workers, rounds int, profile string) error {
	if workers < 1 || rounds < 1 {
		return fmt.Errorf("%d workers, %d rounds", workers, rounds)
	}
	t, err := tokenize.Load(file)
	if err != nil {
		return err
	}
	all, err := io.ReadAll(in)
	if err != nil {
		return err
	}
	var documents [][]byte
	for len(all) > 0 {
		if len(all) < 4 || len(all)-4 < int(binary.LittleEndian.Uint32(all)) {
			return fmt.Errorf("document %d is cut off", len(documents))
		}
		n := int(binary.LittleEndian.Uint32(all))
		documents = append(documents, all[4:4+n])
		all = all[4+n:]
	}
	encoders, ids := make([]*tokenize.Encoder, workers), make([][]uint32, workers)
	for w := range encoders {
		encoders[w] = t.NewEncoder(tokenize.EncodeOptions{Specials: tokenize.SpecialsAsTokens})
	}
	if profile != "" {
		f, err := os.Create(profile)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := pprof.StartCPUProfile(f); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	for range rounds {
		var next, count atomic.Int64
		var g errgroup.Group
		began := time.Now()
		for w := range workers {
			g.Go(func() error {
				for {
					i := next.Add(1) - 1
					if i >= int64(len(documents)) {
						return nil
					}
					var err error
					if ids[w], err = encoders[w].Append(ids[w][:0], documents[i]); err != nil {
						return fmt.Errorf("document %d: %w", i, err)
					}
					count.Add(int64(len(ids[w])))
				}
			})
		}
		if err := g.Wait(); err != nil {
			return err
		}
		if _, err := fmt.Fprintf(out, "%.6f %d\n", time.Since(began).Seconds(), count.Load()); err != nil {
			return err
		}
	}
	return nil
}
