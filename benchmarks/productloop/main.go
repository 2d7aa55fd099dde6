// Productloop multiplies matrices on mula's device cpu, or on the one that its argument names, for benchmarks/products.py, which runs other
// libraries beside it.
//
// A request is a line of standard input, the answer a line of standard output:
//
//	PRECISION THREADS FORM ROWS N K SECONDS
//	GFLOP/S-BEST GFLOP/CPU-S PRODUCTS
//
// FORM is NN, NT or TN. ROWS is the number of rows of the result (of the terms in form TN, where the result is K×N), or several with commas
// between: groups of rows with a matrix each. The product is repeated for SECONDS. The answer is the rate of the fastest one by the clock, and that
// of all by the processor time of the process, times the threads.
package main

import (
	"bufio"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"mula/xpu"
	"mula/xpu/cpu"
	"mula/xpu/onednn"
)

func main() {
	kind := "cpu"
	if len(os.Args) > 1 {
		kind = os.Args[1]
	}
	if err := serve(os.Stdin, os.Stdout, kind); err != nil {
		fmt.Fprintf(os.Stderr, "productloop: %v\n", err)
		os.Exit(1)
	}
}

// device makes a device of a kind, and what ends its threads.
func device(kind string, threads int, precision xpu.Precision) (xpu.Device, func(), error) {
	switch kind {
	case "cpu":
		d := cpu.New(threads, precision)
		return d, d.Close, nil
	case "onednn":
		d, err := onednn.New(threads, precision)
		if err != nil {
			return nil, nil, err
		}
		return d, d.Close, nil
	}
	return nil, nil, fmt.Errorf("device %q is unknown; known are cpu and onednn", kind)
}

func serve(in io.Reader, out io.Writer, kind string) error {
	devices := map[string]xpu.Device{}
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		var precision, form, groups string
		var threads, n, k int
		var seconds float64
		if _, err := fmt.Sscan(lines.Text(), &precision, &threads, &form, &groups, &n, &k, &seconds); err != nil {
			return fmt.Errorf("request %q: %w", lines.Text(), err)
		}
		if form != "NN" && form != "NT" && form != "TN" {
			return fmt.Errorf("request %q: form %q is unknown; known are NN, NT and TN", lines.Text(), form)
		}
		var counts []int
		for text := range strings.SplitSeq(groups, ",") {
			count, err := strconv.Atoi(text)
			if err != nil {
				return fmt.Errorf("request %q: rows: %w", lines.Text(), err)
			}
			counts = append(counts, count)
		}
		key := fmt.Sprint(precision, threads)
		if devices[key] == nil {
			d, end, err := device(kind, threads, xpu.Precision(precision))
			if err != nil {
				return err
			}
			defer end()
			devices[key] = d
		}
		best, rate, products := measure(devices[key], form, counts, n, k, seconds)
		if _, err := fmt.Fprintf(out, "%.3f %.3f %d\n", best, rate, products); err != nil {
			return err
		}
	}
	return lines.Err()
}

func measure(d xpu.Device, form string, counts []int, n, k int, seconds float64) (best, rate float64, products int) {
	rows := 0
	for _, c := range counts {
		rows += c
	}
	random := func(size int) []float32 {
		x := make([]float32, size)
		for i := range x {
			x[i] = rand.Float32() - .5
		}
		return x
	}
	flops := 2 * float64(rows) * float64(n) * float64(k)
	transB := form == "NT"
	var product func()
	switch a := random(rows * k); {
	case form == "TN": // a weight gradient: the terms are the rows
		b := random(rows * n)
		db := make([][]float32, len(counts))
		for g := range db {
			db[g] = make([]float32, k*n)
		}
		product = func() { d.GroupedWeightGrad(counts, k, n, a, b, db, false) }
	case len(counts) > 1:
		b := make([][]float32, len(counts))
		for g := range b {
			b[g] = random(k * n)
		}
		c := make([]float32, rows*n)
		product = func() { d.GroupedMatMul(counts, transB, n, k, a, b, c, false) }
	default:
		b, c := random(k*n), make([]float32, rows*n)
		ldb := n
		if transB {
			ldb = k
		}
		product = func() { d.MatMul(false, transB, rows, n, k, a, k, b, ldb, c, n, false) }
	}
	product()
	began, used, fastest := time.Now(), cpuSeconds(), time.Hour
	for products == 0 || time.Since(began).Seconds() < seconds {
		start := time.Now()
		product()
		fastest = min(fastest, time.Since(start))
		products++
	}
	used = (cpuSeconds() - used) / float64(products*d.Threads())
	return flops / fastest.Seconds() / 1e9, flops / used / 1e9, products
}

// cpuSeconds is the processor time of this process.
func cpuSeconds() float64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &t); err != nil {
		panic(err)
	}
	return float64(t.Sec) + float64(t.Nsec)/1e9
}
