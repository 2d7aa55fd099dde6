// Encodeloop encodes documents with only mula's encoder, for benchmarks/encoding.py, which compares
// it with other libraries:
//
//	encodeloop -tokenizer tokenizer.json -workers N -rounds R < documents
//
// Each document has its length as a little-endian uint32 before its bytes. All documents are in
// memory before the timing starts. Special tokens are matched. Every worker encodes the next
// document when it has finished one, like the workers of a job. Encodeloop prints the seconds of
// each round, then the number of ids. With -hash it also prints the SHA-256 of the ids of all
// documents, in order, as little-endian uint32. The first round starts with empty caches.
package main

import (
	"crypto/sha256"
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
	workers := flag.Int("workers", 1, "number of goroutines")
	rounds := flag.Int("rounds", 1, "number of passes over all documents")
	hash := flag.Bool("hash", false, "print the SHA-256 of the ids")
	profile := flag.String("cpuprofile", "", "write a CPU profile to this file")
	flag.Parse()
	if err := run(os.Stdin, os.Stdout, *file, *workers, *rounds, *hash, *profile); err != nil {
		fmt.Fprintf(os.Stderr, "encodeloop: %v\n", err)
		os.Exit(1)
	}
}

func run(in io.Reader, out io.Writer, file string, workers, rounds int, hash bool, profile string) error {
	if workers < 1 || rounds < 0 {
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
	var total int64
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
		if _, err := fmt.Fprintf(out, "%.6f\n", time.Since(began).Seconds()); err != nil {
			return err
		}
		total = count.Load()
	}
	if !hash {
		_, err := fmt.Fprintln(out, total)
		return err
	}
	digest := sha256.New()
	var raw []byte
	for i, document := range documents { // not timed, and in the order of the documents
		if ids[0], err = encoders[0].Append(ids[0][:0], document); err != nil {
			return fmt.Errorf("document %d: %w", i, err)
		}
		raw = raw[:0]
		for _, id := range ids[0] {
			raw = binary.LittleEndian.AppendUint32(raw, id)
		}
		digest.Write(raw)
	}
	_, err = fmt.Fprintf(out, "%d %x\n", total, digest.Sum(nil))
	return err
}
