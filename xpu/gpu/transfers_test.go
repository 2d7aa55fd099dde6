package gpu

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"mula/xpu"
	"mula/xpu/opencl"
)

// Copies of the second queue end while all later commands of the device are held, and so does a
// Write of the host. Commands after Join wait for the copies, and copies wait for the commands
// before them. The sizes need the memory of copies several times.
func TestTransfers(t *testing.T) {
	d := newTest(t, xpu.FP32, processorShape)
	const n = 5*stagePiece/4 + 3
	tensors := make([]xpu.Tensor, 3)
	for i := range tensors {
		var err error
		if tensors[i], err = d.New(xpu.Float32, n); err != nil {
			t.Fatal(err)
		}
	}
	x, y, z := tensors[0], tensors[1], tensors[2]
	numbers := func(first float32) []float32 {
		all := make([]float32, n)
		for i := range all {
			all[i] = first + float32(i)
		}
		return all
	}
	d.Write(x, numbers(1))
	before := d.Transfers()
	proceed, err := d.Hold()
	if err != nil {
		t.Fatal(err)
	}
	d.Zero(x)
	few := numbers(7)[:100]
	for range 2 * stageSpans / 3 {
		d.Write(x.Rows(1, 101), few) // returns, although nothing reaches the device
	}
	clear(few)
	after := d.Transfers()
	got := make([]float32, n)
	if err := before.Read(t.Context(), got, x); err != nil || !slices.Equal(got, numbers(1)) {
		t.Errorf("a read beside held commands: other numbers, or %v", err)
	}
	before.Write(y, numbers(5))
	before.Copy(z, y)
	if err := before.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	before.Join()
	d.Add(z, z, y)
	d.Zero(y)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := after.Read(ctx, got, x); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a read after held commands: %v", err)
	}
	if err := proceed(); err != nil {
		t.Fatal(err)
	}
	want := make([]float32, n)
	copy(want[1:101], numbers(7))
	if err := after.Read(t.Context(), got, x); err != nil || !slices.Equal(got, want) {
		t.Errorf("a read after the held commands: other numbers, or %v", err)
	}
	after.Join()
	for i, v := range numbers(5) {
		want[i] = v + v
	}
	if !slices.Equal(numbersOf(t, d, z), want) {
		t.Error("a command after Join computed other numbers")
	}
}

// Without Join, transfers leave nothing behind. After an error of the device they do nothing, and
// return it.
func TestTransfersOfBrokenDevice(t *testing.T) {
	before := opencl.Live()
	for _, name := range []string{"Transfers", "copies"} {
		d, err := newDevice(t.Context(), someDevice(t), Options{Threads: 1}, processorShape)
		if err != nil {
			t.Fatal(err)
		}
		x, err := d.New(xpu.Float32, 8)
		if err != nil {
			t.Fatal(err)
		}
		d.Transfers() // without copies and without Join
		working := d.Transfers()
		lost := &d.queue
		if name == "copies" {
			lost = &d.second.queue
		}
		queue := *lost
		*lost, err = d.context.NewQueue(false)
		if err != nil {
			t.Fatal(err)
		}
		(*lost).Release() // every call fails now
		broken := d.Transfers()
		working.Write(x, make([]float32, 8))
		*lost = queue
		first := d.Wait(t.Context())
		if !errors.Is(first, opencl.ErrReleased) {
			t.Errorf("%s: Wait: %v", name, first)
		}
		for _, copies := range []xpu.Transfers{broken, working} {
			copies.Copy(x, x)
			if err := copies.Read(t.Context(), make([]float32, 8), x); err != first {
				t.Errorf("%s: Read: %v, want %v", name, err, first)
			}
			if err := copies.Wait(t.Context()); err != first {
				t.Errorf("%s: Wait: %v, want %v", name, err, first)
			}
			copies.Join()
		}
		d.Close()
	}
	if after := opencl.Live(); after != before {
		t.Errorf("left behind: %+v, before: %+v", after, before)
	}
}
