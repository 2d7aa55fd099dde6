package devicetest

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"mula/xpu"
)

func memoryFamily(t *testing.T, d xpu.Device, _ float64) {
	t.Run("zero at first", func(t *testing.T) { zeroAtFirst(t, d) })
	t.Run("parts", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) { parts(t, d) })
	})
	t.Run("combined", func(t *testing.T) {
		rapid.Check(t, func(t *rapid.T) { combined(t, d) })
	})
	t.Run("whole numbers", func(t *testing.T) { wholeNumbers(t, d) })
	t.Run("goroutines", func(t *testing.T) { goroutines(t, d) })
	t.Run("transfers", func(t *testing.T) { transfers(t, d) })
	t.Run("freed", func(t *testing.T) { freed(t, d) })
	t.Run("done context", func(t *testing.T) { doneContext(t, d) })
	t.Run("room", func(t *testing.T) { room(t, d) })
}

// Transfers copy numbers of the preceding commands, and commands after Join use their copies.
func transfers(t *testing.T, d xpu.Device) {
	x, y := upload(t, d, []float32{1, 2, 3, 4}), upload(t, d, make([]float32, 4))
	ints, err := d.New(xpu.Int32, 2)
	if err != nil {
		t.Fatal(err)
	}
	d.Add(x, x, x)
	first, second, unused := d.Transfers(), d.Transfers(), d.Transfers()
	d.Zero(y)
	got := make([]float32, 3)
	if err := first.Read(t.Context(), got, x.Rows(1, 4)); err != nil || !slices.Equal(got, []float32{4, 6, 8}) {
		t.Errorf("read %v, %v", got, err)
	}
	first.Write(x.Rows(0, 2), []float32{5, 6})
	second.Copy(x.Rows(2, 4), x.Rows(0, 2))
	second.WriteInts(ints, []int32{-1, 7})
	numbers := make([]int32, 2)
	if err := second.ReadInts(t.Context(), numbers, ints); err != nil || !slices.Equal(numbers, []int32{-1, 7}) {
		t.Errorf("read %v, %v", numbers, err)
	}
	if err := first.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	for _, copies := range []xpu.Transfers{first, second, unused} {
		copies.Join()
	}
	d.Add(y, x, x)
	if got := read(t, d, y); !slices.Equal(got, []float32{10, 12, 10, 12}) {
		t.Errorf("after Join: %v", got)
	}
	d.Release(ints)
}

func zeroAtFirst(t *testing.T, d xpu.Device) {
	for _, n := range []int{0, 1, 1000} {
		floats, err1 := d.New(xpu.Float32, n, 2)
		ints, err2 := d.New(xpu.Int32, 2, n)
		if err := errors.Join(err1, err2); err != nil || !slices.Equal(floats.Shape(), []int{n, 2}) ||
			!slices.Equal(ints.Shape(), []int{2, n}) {
			t.Fatalf("shapes %v and %v; %v", floats.Shape(), ints.Shape(), err)
		}
		if !slices.Equal(read(t, d, floats), make([]float32, 2*n)) ||
			!slices.Equal(readInts(t, d, ints), make([]int32, 2*n)) {
			t.Errorf("%d elements are not zero", 2*n)
		}
		d.Release(floats)
		d.Release(ints)
	}
	for _, shape := range [][]int{{}, {-1}, {1, 1, 1, 1, 1}, {1 << 40, 1 << 40}} {
		if _, err := d.New(xpu.Float32, shape...); err == nil {
			t.Errorf("New with shape %v does not fail", shape)
		}
	}
}

// Commands on parts of memory, in any order, have the same results as in Go; memory that neither
// side wrote is unchanged.
func parts(t *rapid.T, d xpu.Device) {
	memory, model := make([]xpu.Tensor, 3), make([][]float32, 3)
	for i := range memory {
		n := rapid.IntRange(1, 200).Draw(t, "n")
		memory[i], model[i] = upload(t, d, make([]float32, n)), make([]float32, n)
	}
	part := func(name string, n int) (i, at int) {
		i = rapid.IntRange(0, len(memory)-1).Draw(t, name)
		return i, rapid.IntRange(0, max(0, len(model[i])-n)).Draw(t, name+" at")
	}
	next := float32(1)
	for range rapid.IntRange(1, 20).Draw(t, "commands") {
		n := rapid.IntRange(0, 200).Draw(t, "elements")
		for i := range memory {
			n = min(n, len(model[i]))
		}
		i, at := part("to", n)
		dst, want := memory[i].Rows(at, at+n), model[i][at:at+n]
		switch command := rapid.SampledFrom([]string{"Write", "Read", "Zero", "Copy", "Add",
			"Add to itself"}).Draw(t, "command"); command {
		case "Write":
			for j := range want {
				want[j] = next
				next++
			}
			numbers := slices.Clone(want)
			d.Write(dst, numbers)
			clear(numbers) // the host may overwrite it, as the device has the numbers
		case "Read":
			if got := read(t, d, dst); !slices.Equal(got, want) {
				t.Fatalf("elements %d to %d of %d are %v, want %v", at, at+n, len(model[i]), got, want)
			}
		case "Zero":
			d.Zero(dst)
			clear(want)
		default:
			x, xAt := part("from", n)
			y, yAt := part("and", n)
			if x == i || y == i { // a result must not overlap an operand, but may equal it
				continue
			}
			switch command {
			case "Copy":
				d.Copy(dst, memory[x].Rows(xAt, xAt+n))
				copy(want, model[x][xAt:])
			case "Add":
				d.Add(dst, memory[x].Rows(xAt, xAt+n), memory[y].Rows(yAt, yAt+n))
				for j := range want {
					want[j] = model[x][xAt+j] + model[y][yAt+j]
				}
			default:
				d.Add(dst, dst, memory[y].Rows(yAt, yAt+n))
				for j := range want {
					want[j] += model[y][yAt+j]
				}
			}
		}
	}
	for i := range memory {
		if got := read(t, d, memory[i]); !slices.Equal(got, model[i]) {
			t.Fatalf("memory %d is %v, want %v", i, got, model[i])
		}
	}
}

// combined compares Combine with its formula, for matrices of all forms.
func combined(t *rapid.T, d xpu.Device) {
	m := rapid.IntRange(1, 300).Draw(t, "m")
	n := rapid.SampledFrom([]int{m, rapid.IntRange(1, 300).Draw(t, "n")}).Draw(t, "width")
	source := rand.New(rand.NewPCG(43, rapid.Uint64().Draw(t, "seed")))
	x, y := random(source, m*n), random(source, m*n)
	a, b, c := float32(source.NormFloat64()), float32(source.NormFloat64()), float32(0)
	if m == n && rapid.Bool().Draw(t, "diagonal") {
		c = 1.75
	}
	left, right := upload(t, d, x, m, n), xpu.Tensor{}
	if rapid.Bool().Draw(t, "both") {
		right = upload(t, d, y, m, n)
	}
	want, size := make([]float64, m*n), make([]float64, m*n)
	for i := range want {
		want[i] = float64(a) * float64(x[i])
		size[i] = math.Abs(want[i])
		if right.Present() {
			want[i] += float64(b) * float64(y[i])
			size[i] += math.Abs(float64(b) * float64(y[i]))
		}
		if i/n == i%n {
			want[i] += float64(c)
			size[i] += math.Abs(float64(c))
		}
	}
	dst := left
	if !rapid.Bool().Draw(t, "in place") {
		dst = upload(t, d, random(source, m*n), m, n)
	}
	d.Combine(dst, left, right, a, b, c)
	compare(t, "the combined matrix", read(t, d, dst), want, size, 1e-6)
	if dst != left && !slices.Equal(read(t, d, left), x) || right.Present() && !slices.Equal(read(t, d, right), y) {
		t.Fatal("Combine has changed an operand")
	}
}

func wholeNumbers(t *testing.T, d xpu.Device) {
	want := []int32{0, 1, -1, math.MaxInt32, math.MinInt32, 0x7f800001, 1 << 23, 0x7fc00000}
	x := uploadInts(t, d, want)
	if got := readInts(t, d, x.Rows(1, 7)); !slices.Equal(got, want[1:7]) {
		t.Errorf("%v, want %v", got, want[1:7])
	}
}

// Several goroutines use a device at once, each with its own memory.
func goroutines(t *testing.T, d xpu.Device) {
	const n, rounds = 500, 20
	errs := make([]error, 4)
	var all sync.WaitGroup
	for g := range errs {
		all.Go(func() {
			x, err := d.New(xpu.Float32, n)
			if err != nil {
				errs[g] = err
				return
			}
			defer d.Release(x)
			host := slices.Repeat([]float32{float32(g)}, n)
			d.Write(x, host)
			for round := range rounds {
				other, err := d.New(xpu.Float32, n)
				if err != nil {
					errs[g] = err
					return
				}
				d.Copy(other, x)
				d.Add(x, x, other) // doubles each time, up to 2^20
				d.Release(other)   // while the command may be running
				if round%5 == 4 {
					if errs[g] = d.Read(context.Background(), host, x); errs[g] != nil {
						return
					}
				}
			}
			for i, v := range host {
				if v != float32(g)*(1<<rounds) {
					t.Errorf("goroutine %d: element %d is %v", g, i, v)
					return
				}
			}
		})
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
}

// panics reports whether f panics.
func panics(f func()) (did bool) {
	defer func() { did = recover() != nil }()
	f()
	return
}

func freed(t *testing.T, d xpu.Device) {
	x, err1 := d.New(xpu.Float32, 10)
	y, err2 := d.New(xpu.Int32, 10)
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	for name, f := range map[string]func(){
		"part":            func() { d.Release(x.Rows(0, 5)) },
		"later part":      func() { d.Release(x.Rows(5, 10)) },
		"foreign memory":  func() { d.Release(xpu.Of(make([]float32, 10), 10)) },
		"foreign numbers": func() { d.Release(xpu.OfInts(make([]int32, 10), 10)) },
	} {
		if !panics(f) {
			t.Errorf("Release of %s does not panic", name)
		}
	}
	d.Release(x)
	d.Release(y)
	if !panics(func() { d.Release(x) }) || !panics(func() { d.Release(y) }) {
		t.Error("a second Release does not panic")
	}
}

// A done context is an error; the commands and their results are not lost.
func doneContext(t *testing.T, d xpu.Device) {
	x := upload(t, d, []float32{3, 4})
	var sums [1]float64
	d.SumSquares([]xpu.Tensor{x}, sums[:])
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if d.Capacity() > 0 {
		if err := d.Wait(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("Wait with a done context: %v", err)
		}
	}
	if err := d.Wait(t.Context()); err != nil || sums[0] != 25 {
		t.Errorf("after that: %v, sum of squares %v", err, sums[0])
	}
}

// Running out of memory is an error, and does not affect the device.
func room(t *testing.T, d xpu.Device) {
	capacity := d.Capacity()
	if capacity == 0 || capacity > 1<<50 {
		t.Skip("the device takes what the host has")
	}
	for range 3 {
		if _, err := d.New(xpu.Float32, int(capacity/4)+1); err == nil {
			t.Fatalf("memory beyond the capacity of %d bytes", capacity)
		}
	}
	x := upload(t, d, []float32{1})
	d.Add(x, x, x)
	if got := read(t, d, x); got[0] != 2 {
		t.Errorf("1 + 1 = %v", got[0])
	}
}
