// Blendloop runs only mula's blend loop, for benchmarks/index.py, which compares it with Megatron
// core's:
//
//	blendloop -samples N -threads T < weights
//
// The input has one normalized weight on each line. As in Megatron core, the result is an array of
// int16 and an array of int64 in memory. Blendloop prints the seconds of the loop, the seconds to
// fill two arrays of the same size with zeros, and the SHA-256 of both arrays.
package main

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"golang.org/x/sync/semaphore"

	"mula/index/greedy"
)

func main() {
	samples := flag.Int64("samples", 0, "number of samples to draw")
	threads := flag.Int("threads", 1, "number of goroutines")
	flag.Parse()
	if err := run(os.Stdin, os.Stdout, *samples, *threads); err != nil {
		fmt.Fprintf(os.Stderr, "blendloop: %v\n", err)
		os.Exit(1)
	}
}

func run(in io.Reader, out io.Writer, samples int64, threads int) error {
	if samples < 0 || threads < 1 {
		return fmt.Errorf("%d samples on %d threads", samples, threads)
	}
	var weights []float64
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		w, err := strconv.ParseFloat(lines.Text(), 64)
		if err != nil {
			return err
		}
		weights = append(weights, w)
	}
	if err := lines.Err(); err != nil {
		return err
	}
	floor := fill(samples)
	datasets, numbers := make([]int16, samples), make([]int64, samples)
	began := time.Now()
	_, err := greedy.Weighted(context.Background(), greedy.Rule{Weights: weights}, samples,
		semaphore.NewWeighted(int64(threads)), threads,
		func(first int64, dataset []int16, sample []int64) error {
			copy(datasets[first:], dataset)
			copy(numbers[first:], sample)
			return nil
		})
	seconds := time.Since(began).Seconds()
	if err != nil {
		return err
	}
	hash := sha256.New()
	for _, array := range []any{datasets, numbers} {
		if err := binary.Write(hash, binary.LittleEndian, array); err != nil {
			return err
		}
	}
	_, err = fmt.Fprintf(out, "%.6f %.6f %x\n", seconds, floor, hash.Sum(nil))
	return err
}

// fill returns the seconds to write new arrays of the result's size once, in chunks like the loop.
func fill(samples int64) float64 {
	datasets, numbers := make([]int16, samples), make([]int64, samples)
	var chunk [1 << 12]int64
	var small [1 << 12]int16
	began := time.Now()
	for first := int64(0); first < samples; first += int64(len(chunk)) {
		copy(datasets[first:], small[:])
		copy(numbers[first:], chunk[:])
	}
	return time.Since(began).Seconds()
}
