package devicetest

import (
	"context"
	"errors"
	"math"
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
	t.Run("whole numbers", func(t *testing.T) { wholeNumbers(t, d) })
	t.Run("goroutines", func(t *testing.T) { goroutines(t, d) })
	t.Run("freed", func(t *testing.T) { freed(t, d) })
	t.Run("done context", func(t *testing.T) { doneContext(t, d) })
	t.Run("room", func(t *testing.T) { room(t, d) })
}

func zeroAtFirst(t *testing.T, d xpu.Device) {
	for _, n := range []int{0, 1, 1000} {
		floats, err1 := d.Floats(n)
		ints, err2 := d.Ints(n)
		if err := errors.Join(err1, err2); err != nil || len(floats) != n || len(ints) != n {
			t.Fatalf("%d and %d elements, want %d; %v", len(floats), len(ints), n, err)
		}
		for _, side := range []string{"host", "device"} {
			if slices.Max(append(floats, 0)) != 0 || slices.Min(append(floats, 0)) != 0 ||
				slices.Max(append(ints, 0)) != 0 || slices.Min(append(ints, 0)) != 0 {
				t.Errorf("%d elements are not zero on the side of the %s", n, side)
			}
			download(t, d, floats)
			downloadInts(t, d, ints)
		}
		d.Free(floats)
		d.FreeInts(ints)
	}
}

// Commands on parts of memory, in any order, have the same results as in Go; memory that neither
// side wrote is unchanged.
func parts(t *rapid.T, d xpu.Device) {
	memory, model := make([][]float32, 3), make([][]float32, 3)
	for i := range memory {
		n := rapid.IntRange(1, 200).Draw(t, "n")
		memory[i], model[i] = upload(t, d, make([]float32, n)), make([]float32, n)
	}
	part := func(name string, n int) (i, at int) {
		i = rapid.IntRange(0, len(memory)-1).Draw(t, name)
		return i, rapid.IntRange(0, max(0, len(memory[i])-n)).Draw(t, name+" at")
	}
	next := float32(1)
	for range rapid.IntRange(1, 20).Draw(t, "commands") {
		n := rapid.IntRange(0, 200).Draw(t, "elements")
		for i := range memory {
			n = min(n, len(memory[i]))
		}
		i, at := part("to", n)
		dst, want := memory[i][at:at+n], model[i][at:at+n]
		switch command := rapid.SampledFrom([]string{"ToDevice", "ToHost", "Zero", "Copy", "Add",
			"Add to itself"}).Draw(t, "command"); command {
		case "ToDevice":
			for j := range dst {
				dst[j], want[j] = next, next
				next++
			}
			d.ToDevice(dst)
			clear(dst) // the host may overwrite it, as the device has the numbers
			if d.Capacity() == 0 {
				copy(dst, want)
			}
		case "ToHost":
			download(t, d, dst)
			if !slices.Equal(dst, want) {
				t.Fatalf("elements %d to %d of %d are %v, want %v", at, at+n, len(memory[i]), dst, want)
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
				d.Copy(dst, memory[x][xAt:xAt+n])
				copy(want, model[x][xAt:])
			case "Add":
				d.Add(dst, memory[x][xAt:xAt+n], memory[y][yAt:yAt+n])
				for j := range want {
					want[j] = model[x][xAt+j] + model[y][yAt+j]
				}
			default:
				d.Add(dst, dst, memory[y][yAt:yAt+n])
				for j := range want {
					want[j] += model[y][yAt+j]
				}
			}
		}
	}
	download(t, d, memory...)
	for i := range memory {
		if !slices.Equal(memory[i], model[i]) {
			t.Fatalf("memory %d is %v, want %v", i, memory[i], model[i])
		}
	}
}

func wholeNumbers(t *testing.T, d xpu.Device) {
	want := []int32{0, 1, -1, math.MaxInt32, math.MinInt32, 0x7f800001, 1 << 23, 0x7fc00000}
	x := uploadInts(t, d, want)
	clear(x)
	if d.Capacity() == 0 {
		copy(x, want)
	}
	downloadInts(t, d, x[:3], x[5:])
	if !slices.Equal(x[:3], want[:3]) || !slices.Equal(x[5:], want[5:]) {
		t.Errorf("%v, want %v", x, want)
	}
}

// Several goroutines use a device at once, each with its own memory.
func goroutines(t *testing.T, d xpu.Device) {
	const n, rounds = 500, 20
	errs := make([]error, 4)
	var all sync.WaitGroup
	for g := range errs {
		all.Go(func() {
			x, err := d.Floats(n)
			if err != nil {
				errs[g] = err
				return
			}
			defer d.Free(x)
			for i := range x {
				x[i] = float32(g)
			}
			d.ToDevice(x)
			for round := range rounds {
				other, err := d.Floats(n)
				if err != nil {
					errs[g] = err
					return
				}
				d.Copy(other, x)
				d.Add(x, x, other) // doubles each time, up to 2^20
				d.Free(other)      // while the command may be running
				if round%5 == 4 {
					if errs[g] = d.ToHost(context.Background(), x); errs[g] != nil {
						return
					}
				}
			}
			for i, v := range x {
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
	x, err1 := d.Floats(10)
	y, err2 := d.Ints(10)
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	for name, f := range map[string]func(){
		"part":            func() { d.Free(x[:5]) },
		"later part":      func() { d.Free(x[5:]) },
		"foreign memory":  func() { d.Free(make([]float32, 10)) },
		"foreign numbers": func() { d.FreeInts(make([]int32, 10)) },
	} {
		if !panics(f) {
			t.Errorf("Free of %s does not panic", name)
		}
	}
	d.Free(x)
	d.FreeInts(y)
	if !panics(func() { d.Free(x) }) || !panics(func() { d.FreeInts(y) }) {
		t.Error("a second Free does not panic")
	}
}

// A done context is an error; the commands and their results are not lost.
func doneContext(t *testing.T, d xpu.Device) {
	x := upload(t, d, []float32{3, 4})
	var sums [1]float64
	d.SumSquares([][]float32{x}, sums[:])
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
		if _, err := d.Floats(int(capacity/4) + 1); err == nil {
			t.Fatalf("memory beyond the capacity of %d bytes", capacity)
		}
	}
	x := upload(t, d, []float32{1})
	d.Add(x, x, x)
	if download(t, d, x); x[0] != 2 {
		t.Errorf("1 + 1 = %v", x[0])
	}
}
