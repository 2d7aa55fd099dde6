package discrete_test

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"mula/xpu"
	"mula/xpu/cpu"
	"mula/xpu/devicetest"
	"mula/xpu/discrete"
)

func device(t *testing.T, precision xpu.Precision) *discrete.Device {
	d := discrete.New(cpu.New(2, precision))
	t.Cleanup(d.Close)
	return d
}

func floats(t *testing.T, d xpu.Device, x ...float32) xpu.Tensor {
	t.Helper()
	y, err := d.New(xpu.Float32, len(x))
	if err != nil {
		t.Fatal(err)
	}
	d.Write(y, x)
	return y
}

func TestDevice(t *testing.T) { devicetest.Run(t, device(t, xpu.FP32), 1e-5, devicetest.Common) }

// TestSameBits: what is computed on the other side has the bits of the device inside.
func TestSameBits(t *testing.T) {
	for _, precision := range []xpu.Precision{xpu.FP32, xpu.BF16} {
		inner := cpu.New(1, precision)
		defer inner.Close()
		devicetest.SameBits(t, inner, device(t, precision))
	}
}

// TestNoView checks that the host cannot see the memory, nor parts of it.
func TestNoView(t *testing.T) {
	d := device(t, xpu.FP32)
	x := floats(t, d, 1, 2, 3, 4)
	for _, view := range []xpu.Tensor{x, x.Rows(1, 3), x.Reshape(2, 2).T(), x.Reshape(2, 2).Index(1)} {
		if view.Host() != nil {
			t.Errorf("the host sees a tensor of shape %v", view.Shape())
		}
	}
	var buffer []float32
	got, err := xpu.Numbers(t.Context(), d, x.Rows(1, 3), &buffer)
	if err != nil || !slices.Equal(got, []float32{2, 3}) || &got[0] != &buffer[0] {
		t.Errorf("Numbers returns %v, %v", got, err)
	}
}

// TestMistakes checks that memory of the host is refused, and that released memory is overwritten.
func TestMistakes(t *testing.T) {
	d := device(t, xpu.FP32)
	x, host := floats(t, d, 1, 2), xpu.Of(make([]float32, 2), 2)
	for name, f := range map[string]func(){
		"an operand":    func() { d.Add(x, x, host) },
		"the result":    func() { d.Zero(host) },
		"Write":         func() { d.Write(host, []float32{3, 4}) },
		"Read":          func() { d.Read(t.Context(), make([]float32, 2), host) },
		"Release":       func() { d.Release(host) },
		"whole numbers": func() { d.WriteInts(xpu.OfInts(make([]int32, 1), 1), []int32{1}) },
	} {
		func() {
			defer func() {
				if r, _ := recover().(string); !strings.HasPrefix(r, "discrete: ") {
					t.Errorf("%s: panicked with %q", name, r)
				}
			}()
			f()
		}()
	}
	d.Release(x)
	if v := x.Floats(); v[0] == v[0] || v[1] == v[1] {
		t.Errorf("released memory is still %v", v)
	}
}

// TestNoJoin checks that memory that transfers have written is refused until their Join, and that
// other memory is not.
func TestNoJoin(t *testing.T) {
	d := device(t, xpu.FP32)
	x := floats(t, d, 1, 2, 3, 4)
	copies := d.Transfers()
	copies.Write(x.Rows(1, 3), []float32{5, 6})
	d.Zero(x.Rows(0, 1))
	d.Zero(x.Rows(3, 4))
	func() {
		defer func() {
			if r, _ := recover().(string); !strings.Contains(r, "without Join") {
				t.Errorf("panicked with %q", r)
			}
		}()
		d.Zero(x.Rows(2, 4))
	}()
	copies.Join()
	d.Zero(x.Rows(2, 4))
}

// TestHostResults: they are not there before Wait.
func TestHostResults(t *testing.T) {
	d := device(t, xpu.FP32)
	sums := []float64{1}
	d.SumSquares([]xpu.Tensor{floats(t, d, 3, 4)}, sums)
	if !math.IsNaN(sums[0]) {
		t.Errorf("before Wait the sum is %v", sums)
	}
	if err := d.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if sums[0] != 25 {
		t.Errorf("the sum is %v", sums)
	}
}

// waiting is a device whose sums of squares take until they are let go on.
type waiting struct {
	xpu.Device
	begun, goOn chan struct{}
}

func (w waiting) SumSquares(stretches []xpu.Tensor, sums []float64) {
	close(w.begun)
	<-w.goOn
	w.Device.SumSquares(stretches, sums)
}

// TestWaitDuringCommand: a goroutine that waits while another's command is under way takes nothing
// of its results, which are whole after its own wait.
func TestWaitDuringCommand(t *testing.T) {
	inner := waiting{cpu.New(1, xpu.FP32), make(chan struct{}), make(chan struct{})}
	d := discrete.New(inner)
	defer d.Close()
	x, sums, done := floats(t, d, 3, 4), make([]float64, 1), make(chan struct{})
	go func() {
		defer close(done)
		d.SumSquares([]xpu.Tensor{x}, sums)
	}()
	<-inner.begun
	if err := d.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	close(inner.goOn)
	<-done
	if err := d.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if sums[0] != 25 {
		t.Errorf("the sum is %g, want 25", sums[0])
	}
}

// TestFail: a device that has failed does nothing more, and returns its error at every Wait.
func TestFail(t *testing.T) {
	d := device(t, xpu.FP32)
	x := floats(t, d, 1, 2)
	lost := errors.New("the device is lost")
	d.Fail(lost)
	d.Fail(errors.New("another"))
	d.Add(x, x, x)
	for range 2 {
		if err := errors.Join(d.Wait(t.Context()), d.Read(t.Context(), make([]float32, 2), x)); !errors.Is(err,
			lost) || strings.Contains(err.Error(), "another") {
			t.Errorf("the error is %v", err)
		}
	}
	if _, err := d.New(xpu.Float32, 1); !errors.Is(err, lost) {
		t.Errorf("New returns %v", err)
	}
	d.Release(x)
}

func TestCapacity(t *testing.T) {
	d := device(t, xpu.FP32)
	d.SetCapacity(64)
	x := floats(t, d, make([]float32, 10)...)
	if _, err := d.New(xpu.Int32, 7); err == nil {
		t.Error("68 of 64 bytes were given")
	}
	if n, err := d.New(xpu.Int32, 6); err != nil || d.InUse() != 64 || d.Capacity() != 64 {
		t.Errorf("of 64 bytes %d are in use: %v", d.InUse(), err)
	} else {
		d.Release(n)
	}
	if d.Release(x); d.InUse() != 0 {
		t.Errorf("%d bytes are in use", d.InUse())
	}
}

// TestOperands checks that only products, and rows of other operands, may read what was written for
// products alone, until it is written again.
func TestOperands(t *testing.T) {
	d := device(t, xpu.BF16)
	x, y, z := floats(t, d, 1, 2, 3, 4).Reshape(2, 2), floats(t, d, 5, 6, 7, 8).Reshape(2, 2),
		floats(t, d, 0, 0, 0, 0).Reshape(2, 2)
	ids, err := d.New(xpu.Int32, 2)
	if err != nil {
		t.Fatal(err)
	}
	d.Add(x.AsOperand(), y, y)
	for name, f := range map[string]func(){
		"Add":            func() { d.Add(z, x, y) },
		"Read":           func() { _ = d.Read(t.Context(), make([]float32, 2), x.Index(1)) },
		"rows for all":   func() { d.GatherRows(z, x, ids) },
		"sum of blocks":  func() { d.SumSquares([]xpu.Tensor{x.Flat()}, make([]float64, 1)) },
		"sums to add to": func() { d.MatMul(x, y, y, xpu.MatMulOptions{Accumulate: true}) },
		"Transfers.Copy": func() { d.Transfers().Copy(z, x) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s was not refused", name)
				}
			}()
			f()
		}()
	}
	d.MatMul(z, x.T(), y, xpu.MatMulOptions{})
	d.GatherRows(z.AsOperand(), x, ids)
	d.Add(x, y, y)
	d.Copy(z, x)
	got := make([]float32, 4)
	if err := d.Read(t.Context(), got, z); err != nil || !slices.Equal(got, []float32{10, 12, 14, 16}) {
		t.Errorf("the numbers are %v, %v", got, err)
	}
}

// unread lists the tensors that commands get but do not read, or only read as operands of products.
// A number is an argument.
var unread = []string{
	"AddSinks 0.Begin", "AddSinks 0.K", "AddSinks 0.Q", "AddSinks 0.V", "GroupedMatMul 1", "GroupedMatMul 2",
	"GroupedWeightGrad 1", "GroupedWeightGrad 2", "JoinHeads 0.K", "JoinHeads 0.Q", "JoinHeads 0.V", "JoinLatent 0.K",
	"JoinLatent 0.Q", "JoinLatent 0.V", "MatMul 1", "MatMul 2", "Route 0.RowOf", "Route 0.TokenOf", "Route 0.Weight",
	"RouteGrad 0.Counts", "RouteGrad 0.RouterKind.Bias", "RouteGrad 0.TokenOf", "RouteGrad 0.Weight",
	"SinksGrad 0.Begin", "SinksGrad 0.K", "SinksGrad 0.Q", "SinksGrad 0.V", "SortRows 0.LSE",
	"SortRows 0.RouterKind.Bias", "SplitHeads 0.Means", "SumHeads 1.K", "SumHeads 1.Means", "SumHeads 1.Q",
	"SumHeads 1.V",
}

// TestEveryTensor tests each tensor of each command, one after the other. Memory of the host is
// refused. A matrix that was written for products alone is refused or overwritten, except for the
// tensors of unread.
func TestEveryTensor(t *testing.T) {
	d := device(t, xpu.FP32)
	own, host := floats(t, d, 1), xpu.Of(make([]float32, 1), 1)
	d.Fail(errors.New("commands are checked and not executed"))
	refused := func(f func()) (is bool) {
		defer func() { is = recover() != nil }()
		f()
		return
	}
	var kept []string
	for _, commands := range []reflect.Type{reflect.TypeFor[xpu.Products](), reflect.TypeFor[xpu.Layers]()} {
		for i := range commands.NumMethod() {
			command := commands.Method(i)
			arguments, tensors := argumentsOf(command.Type)
			call := func() { reflect.ValueOf(d).MethodByName(command.Name).Call(arguments) }
			for place, x := range tensors {
				name := command.Name + " " + place
				*x = host
				if !refused(call) {
					t.Errorf("%s: memory of the host was not refused", name)
				}
				*x = own
				d.Zero(own.AsOperand())
				if !refused(call) && refused(func() { d.Copy(xpu.Tensor{}, own) }) {
					kept = append(kept, name)
				}
				*x = xpu.Tensor{}
				if refused(call) {
					t.Errorf("%s: the command was refused without tensors", name)
				}
			}
		}
	}
	slices.Sort(kept)
	if !slices.Equal(kept, unread) {
		t.Errorf("matrices for products alone remain after\n%q, want\n%q", kept, unread)
	}
}

// argumentsOf returns zero arguments for a command, with slices of one element, and all tensors in
// them by number of the argument and name of the field.
func argumentsOf(command reflect.Type) (arguments []reflect.Value, tensors map[string]*xpu.Tensor) {
	tensors = map[string]*xpu.Tensor{}
	var visit func(name string, v reflect.Value)
	visit = func(name string, v reflect.Value) {
		if x, ok := v.Addr().Interface().(*xpu.Tensor); ok {
			tensors[name] = x
			return
		}
		switch v.Kind() {
		case reflect.Pointer:
			v.Set(reflect.New(v.Type().Elem()))
			visit(name, v.Elem())
		case reflect.Slice:
			v.Set(reflect.MakeSlice(v.Type(), 1, 1))
			visit(name, v.Index(0))
		case reflect.Struct:
			for i := range v.NumField() {
				visit(name+"."+v.Type().Field(i).Name, v.Field(i))
			}
		}
	}
	for i := range command.NumIn() {
		v := reflect.New(command.In(i)).Elem()
		visit(fmt.Sprint(i), v)
		arguments = append(arguments, v)
	}
	return arguments, tensors
}
