// Productloop multiplies matrices on mula's device cpu, or on the device in its argument, as in
// train.yaml. benchmarks/products.py compares it with other libraries.
//
// A request is a line of standard input, and the answer is a line of standard output:
//
//	PRECISION THREADS FORM ROWS N K SECONDS
//	GFLOP/S-BEST GFLOP/CPU-S PRODUCTS
//
// FORM is NN, NT or TN. ROWS is the number of rows of the result (in form TN, where the result is
// K×N, the number of terms). A comma-separated list has a group of rows for each matrix. The
// product is repeated for SECONDS. The answer has the rate of the fastest product by wall time, and
// the rate of all products by the processor time of the process, times the threads. The second rate
// does not apply to discrete devices.
package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"mula/train/devices"
	"mula/xpu"
)

func main() {
	kind := "cpu"
	if len(os.Args) > 1 {
		kind = os.Args[1]
	}
	if err := serve(context.Background(), os.Stdin, os.Stdout, kind); err != nil {
		fmt.Fprintf(os.Stderr, "productloop: %v\n", err)
		os.Exit(1)
	}
}

func serve(ctx context.Context, in io.Reader, out io.Writer, kind string) error {
	opened := map[string]xpu.Device{}
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		var precision, form, groups string
		var threads, n, k int
		var seconds float64
		if _, err := fmt.Sscan(lines.Text(), &precision, &threads, &form, &groups, &n, &k, &seconds); err != nil {
			return fmt.Errorf("request %q: %w", lines.Text(), err)
		}
		if form != "NN" && form != "NT" && form != "TN" {
			return fmt.Errorf("request %q: unknown form %q; want NN, NT or TN", lines.Text(), form)
		}
		var counts []int32
		for text := range strings.SplitSeq(groups, ",") {
			count, err := strconv.ParseInt(text, 10, 32)
			if err != nil {
				return fmt.Errorf("request %q: rows: %w", lines.Text(), err)
			}
			counts = append(counts, int32(count))
		}
		key := fmt.Sprint(precision, threads)
		if opened[key] == nil {
			d, _, err := devices.New(ctx, kind, devices.Options{Threads: threads,
				Precision: xpu.Precision(precision)})
			if err != nil {
				return err
			}
			defer d.Close()
			opened[key] = d
		}
		best, rate, products, err := measure(ctx, opened[key], form, counts, n, k, seconds)
		if err != nil {
			return fmt.Errorf("request %q: %w", lines.Text(), err)
		}
		if _, err := fmt.Fprintf(out, "%.3f %.3f %d\n", best, rate, products); err != nil {
			return err
		}
	}
	return lines.Err()
}

func measure(ctx context.Context, d xpu.Device, form string, counts []int32, n, k int, seconds float64) (best,
	rate float64, products int, err error) {
	rows := 0
	for _, c := range counts {
		rows += int(c)
	}
	shapes := [3][]int{{rows, k}, {rows, n}, {len(counts), k, n}}
	if form == "NT" {
		shapes[2] = []int{len(counts), n, k}
	}
	var x [3]xpu.Tensor
	for i, shape := range shapes {
		if x[i], err = d.New(xpu.Float32, shape...); err != nil {
			return 0, 0, 0, err
		}
		defer d.Release(x[i])
		host := make([]float32, x[i].Elements())
		for j := range host {
			host[j] = rand.Float32() - .5
		}
		d.Write(x[i], host)
	}
	groups, err := d.New(xpu.Int32, len(counts))
	if err != nil {
		return 0, 0, 0, err
	}
	defer d.Release(groups)
	d.WriteInts(groups, counts)

	terms, results, matrices := x[0], x[1], x[2]
	if form == "NT" {
		matrices = matrices.T()
	}
	product := func() error {
		switch {
		case form == "TN": // a weight gradient: the terms are the rows
			d.GroupedWeightGrad(matrices, terms, results, groups, xpu.MatMulOptions{})
		case len(counts) > 1:
			d.GroupedMatMul(results, terms, matrices, groups, xpu.MatMulOptions{})
		default:
			d.MatMul(results, terms, matrices.Index(0), xpu.MatMulOptions{})
		}
		return d.Wait(ctx)
	}
	if err := product(); err != nil {
		return 0, 0, 0, err
	}
	flops := 2 * float64(rows) * float64(n) * float64(k)
	began, used, fastest := time.Now(), cpuSeconds(), time.Hour
	for products == 0 || time.Since(began).Seconds() < seconds {
		start := time.Now()
		if err := product(); err != nil {
			return 0, 0, 0, err
		}
		fastest = min(fastest, time.Since(start))
		products++
	}
	used = (cpuSeconds() - used) / float64(products*d.Threads())
	return flops / fastest.Seconds() / 1e9, flops / used / 1e9, products, nil
}

// cpuSeconds is the processor time of this process.
func cpuSeconds() float64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &t); err != nil {
		panic(err)
	}
	return float64(t.Sec) + float64(t.Nsec)/1e9
}
