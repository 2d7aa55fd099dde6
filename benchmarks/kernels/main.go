// Kernels measures every command of mula's device at the sizes of mula-mini, alternately on the
// processor and on an OpenCL device:
//
//	go run ./benchmarks/kernels [-rows N] [-rounds N] [-precision fp32|bf16] [-device NAME] [-only WORDS]
//		[-step PRESET] [-table FILE]
//
// It compares each time with a floor. The floor is the time of the same device, in the same round,
// for a copy of the bytes that the command has to read and write, or for products of 1024 × 1024
// matrices with the command's number of multiplications, whichever is longer. With -table it
// replaces the tables between two marks in the file. With -step it measures the forward and
// backward pass of a model on the OpenCL device alone, and lists its kernels by their time.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"math"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"mula/internal/atomicfile"
	"mula/xpu"
	"mula/xpu/cpu"
	"mula/xpu/gpu"
	"mula/xpu/opencl"
	"mula/xpu/workload"
)

const (
	tableBegin = "<!-- make bench-kernels writes this -->\n"
	tableEnd   = "<!-- up to here -->\n"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("kernels: ")
	rows := flag.Int("rows", 2, "rows of 512 tokens, or 1,024 with -step")
	rounds := flag.Int("rounds", 9, "rounds of each command; the tables show the minimum")
	precision := flag.String("precision", "fp32", "fp32 or bf16")
	name := flag.String("device", "", "part of the OpenCL device's name; empty for the fastest type")
	step := flag.String("step", "", "measure the kernels of the forward and backward pass of this preset instead")
	only := flag.String("only", "", "measure only commands whose names contain these words")
	table := flag.String("table", "", "file whose tables to replace")
	flag.Parse()
	if flag.NArg() > 0 {
		log.Fatalf("unexpected argument %q; see -help", flag.Arg(0))
	}
	if *step != "" && (*only != "" || *table != "") {
		log.Fatal("-step prints its own table; use it without -only and -table")
	}
	ctx := context.Background()
	chosen, err := choose(*name)
	if err != nil {
		log.Fatal(err)
	}
	var text string
	if *step != "" {
		text, err = measureStep(ctx, xpu.Precision(*precision), chosen, *step, *rows, *rounds)
	} else {
		text, err = measure(ctx, xpu.Precision(*precision), chosen, *rows, *rounds, *only)
	}
	if err == nil && *table != "" {
		err = atomicfile.ReplaceBetween(*table, tableBegin, tableEnd, text)
	}
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(text)
}

// A side is a device with the commands on it.
type side struct {
	device   xpu.Device
	clock    func() time.Duration // time of all kernels so far by the device's clock; nil if it has none
	commands []workload.Command
	from, to xpu.Tensor // of the copies for a floor
	a, b, c  xpu.Tensor // of the product for a floor
}

// Sizes of the copies and products for floors.
const (
	copyElements = 16 << 20 // at most; larger copies take the same time for each element
	productSide  = 1024
)

func newSide(ctx context.Context, d xpu.Device, rows int) (*side, error) {
	s := &side{device: d}
	var err error
	if s.commands, err = workload.Commands(ctx, d, rows); err != nil {
		return nil, err
	}
	for _, x := range []*xpu.Tensor{&s.from, &s.to} {
		if *x, err = d.New(xpu.Float32, copyElements); err != nil {
			return nil, err
		}
	}
	for _, x := range []*xpu.Tensor{&s.a, &s.b, &s.c} {
		if *x, err = d.New(xpu.Float32, productSide, productSide); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// times are the seconds of a command: wall time, processor time of this process, and time by the
// device's clock.
type times struct{ wall, processor, device float64 }

func (t times) over(n float64) times { return times{t.wall / n, t.processor / n, t.device / n} }

func (t times) least(u times) times {
	return times{min(t.wall, u.wall), min(t.processor, u.processor), min(t.device, u.device)}
}

var never = times{math.Inf(1), math.Inf(1), math.Inf(1)}

// roundTime is the seconds for which a round repeats a command.
const roundTime = 0.02

// run submits a command n times, waits at the end, and returns the time of one.
func (s *side) run(ctx context.Context, n int, give func()) (times, error) {
	var device time.Duration
	if s.clock != nil {
		device = s.clock()
	}
	processor, began := processorSeconds(), time.Now()
	for range n {
		give()
	}
	err := s.device.Wait(ctx)
	t := times{time.Since(began).Seconds(), processorSeconds() - processor, 0}
	if s.clock != nil {
		t.device = (s.clock() - device).Seconds()
	}
	return t.over(float64(n)), err
}

// repetitions returns the number of times that a round submits a command.
func (s *side) repetitions(ctx context.Context, give func()) (int, error) {
	if _, err := s.run(ctx, 1, give); err != nil { // the kernels may not be compiled
		return 0, err
	}
	t, err := s.run(ctx, 2, give)
	return int(min(1000, max(1, roundTime/t.wall))), err
}

// floors returns the commands that bound c from below, and the factors of their times.
func (s *side) floors(c workload.Command) (copying func(), copyFactor float64, product func(), productFactor float64) {
	half := max(1, c.Elements/2)
	n := min(half, copyElements)
	copying = func() { s.device.Copy(s.to.Rows(0, n), s.from.Rows(0, n)) }
	if c.FLOPs > 0 {
		product = func() { s.device.MatMul(s.c, s.a, s.b.T(), xpu.MatMulOptions{}) }
	}
	return copying, float64(half) / float64(n), product,
		float64(c.FLOPs) / (2 * productSide * productSide * productSide)
}

// A result is a command on a device.
type result struct{ least, floor times }

// round measures a command and its floor once.
func (s *side) round(ctx context.Context, c workload.Command, n int) (t, floor times, err error) {
	if t, err = s.run(ctx, n, c.Give); err != nil {
		return t, floor, err
	}
	copying, factor, product, productFactor := s.floors(c)
	if floor, err = s.run(ctx, n, copying); err != nil {
		return t, floor, err
	}
	floor = floor.over(1 / factor)
	if product != nil {
		u, err := s.run(ctx, max(1, int(float64(n)*productFactor)), product)
		if err != nil {
			return t, floor, err
		}
		u = u.over(1 / productFactor)
		floor = times{max(floor.wall, u.wall), max(floor.processor, u.processor), max(floor.device, u.device)}
	}
	return t, floor, nil
}

// compare measures commands first to last and their floors, alternately on both sides, and returns
// the results of each side.
func compare(ctx context.Context, sides [2]*side, first, last, rounds int) (results [2][]result, err error) {
	var n [2][]int
	for k, s := range sides {
		for _, c := range s.commands[first:last] {
			times, err := s.repetitions(ctx, c.Give)
			if err != nil {
				return results, err
			}
			n[k], results[k] = append(n[k], times), append(results[k], result{never, never})
		}
	}
	for range rounds {
		for j := range last - first {
			for k, s := range sides {
				t, floor, err := s.round(ctx, s.commands[first+j], n[k][j])
				if err != nil {
					return results, err
				}
				r := &results[k][j]
				r.least, r.floor = r.least.least(t), r.floor.least(floor)
			}
		}
	}
	return results, nil
}

// choose returns the OpenCL device of that name.
func choose(name string) (*opencl.Device, error) {
	devices, err := opencl.Devices()
	if err != nil {
		return nil, err
	}
	return opencl.Choose(devices, opencl.Choice{Name: name})
}

func measure(ctx context.Context, precision xpu.Precision, chosen *opencl.Device, rows, rounds int,
	only string) (string, error) {
	apart, err := gpu.New(ctx, chosen, gpu.Options{Precision: precision, Profile: true})
	if err != nil {
		return "", err
	}
	defer apart.Close()
	host := cpu.New(0, precision)
	defer host.Close()
	var sides [2]*side
	for i, d := range []xpu.Device{host, apart} {
		if sides[i], err = newSide(ctx, d, rows); err != nil {
			return "", err
		}
	}
	sides[1].clock = func() (all time.Duration) {
		for _, k := range apart.Profile() {
			all += k.Time
		}
		return all
	}

	var launch [2]times
	for k, s := range sides {
		launch[k] = never
		for range rounds {
			t, err := s.run(ctx, 200, func() { s.device.Zero(s.to.Rows(0, 1)) })
			if err != nil {
				return "", err
			}
			launch[k] = launch[k].least(t)
		}
	}

	// Other programs share the processors, but not a GPU.
	clock := func(t times) float64 { return t.wall }
	if chosen.Type == opencl.CPU {
		clock = func(t times) float64 { return t.processor }
	}
	var b strings.Builder
	fmt.Fprintf(&b, "\n%s, %s. %d tokens, %s, minimum of %d rounds.\n\n- %s\n- %s; OpenCL driver %s\n\n"+
		"A minimal command, Zero of one number, takes %.4f ms and %.4f CPU-ms on the processor,\n"+
		"%.4f and %.4f on OpenCL.\n\n",
		time.Now().Format(time.DateOnly), runtime.GOARCH, rows*512, precision, rounds, host.Name(),
		apart.Name(), chosen.DriverVersion,
		1e3*launch[0].wall, 1e3*launch[0].processor, 1e3*launch[1].wall, 1e3*launch[1].processor)
	b.WriteString("| command | MB | GFLOP | cpu: ms | CPU-ms | of floor | OpenCL: ms | device clock | CPU-ms | GB/s " +
		"| GFLOP/s | of floor | OpenCL/cpu: wall | CPU time |\n")
	b.WriteString("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n")
	var grouped strings.Builder
	commands := sides[0].commands
	for i := 0; i < len(commands); {
		// A grouped product is measured together with the separate products of its groups.
		first, c := i, commands[i]
		for i++; i < len(commands) && commands[i].Grouped == c.Name; i++ {
		}
		if !strings.Contains(c.Name, only) {
			continue
		}
		r, err := compare(ctx, sides, first, i, rounds)
		if err != nil {
			return "", fmt.Errorf("%s: %w", c.Name, err)
		}
		h, o := r[0][0], r[1][0]
		fmt.Fprintf(&b, "| %s | %.3g | %s | %.3f | %.3f | %.2f | %.3f | %s | %.3f | %.1f | %s | %.2f | %.2f | %.2f |\n",
			c.Name, 4e-6*float64(c.Elements), some(1e-9*float64(c.FLOPs)),
			1e3*h.least.wall, 1e3*h.least.processor, h.floor.processor/h.least.processor, 1e3*o.least.wall,
			some(1e3*o.least.device), 1e3*o.least.processor,
			4e-9*float64(c.Elements)/o.least.wall, some(1e-9*float64(c.FLOPs)/o.least.wall),
			clock(o.floor)/clock(o.least),
			o.least.wall/h.least.wall, o.least.processor/h.least.processor)
		if i == first+1 {
			continue
		}
		hostOne, apartOne := r[0][1].least, r[1][1].least
		fmt.Fprintf(&grouped, "| %s | %.1f | %.1f | %.2f | %.1f | %.1f | %.2f | %.2f |\n", c.Name,
			1e3*h.least.processor, 1e3*hostOne.processor, hostOne.processor/h.least.processor,
			1e3*clock(o.least), 1e3*clock(apartOne), clock(apartOne)/clock(o.least), apartOne.wall/o.least.wall)
	}
	if grouped.Len() > 0 {
		fmt.Fprintf(&b, "\nGrouped products of %d groups, compared with a separate product for each "+
			"group:\n\n", workload.Experts)
		b.WriteString("| product | cpu: CPU-ms grouped | separate | factor | OpenCL: ms grouped | separate | " +
			"factor | wall factor |\n|---|---|---|---|---|---|---|---|\n")
		b.WriteString(grouped.String())
	}
	b.WriteString("\n")
	return b.String(), nil
}

// some formats x, or returns an empty text if it is 0.
func some(x float64) string {
	if x == 0 {
		return ""
	}
	return fmt.Sprintf("%.3g", x)
}

// processorSeconds returns the processor time of this process, with the threads of a CPU driver.
func processorSeconds() float64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &t); err != nil {
		panic(err)
	}
	return float64(t.Sec) + float64(t.Nsec)/1e9
}
