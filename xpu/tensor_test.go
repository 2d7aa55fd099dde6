package xpu

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"pgregory.net/rapid"
)

// count returns 0, 1, … n-1.
func count(n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(i)
	}
	return x
}

// at returns an element of a tensor of host memory.
func at(t Tensor, index ...int) float32 {
	offset := 0
	for i, n := range index {
		offset += n * t.strides[i]
	}
	return t.Floats()[offset]
}

func TestViews(t *testing.T) {
	x := Of(count(2*3*4), 2, 3, 4)
	for _, test := range []struct {
		name       string
		view       Tensor
		shape      []int
		first      float32
		index      []int
		want       float32
		contiguous bool
	}{
		{"all", x, []int{2, 3, 4}, 0, []int{1, 2, 3}, 23, true},
		{"rows", x.Rows(1, 2), []int{1, 3, 4}, 12, []int{0, 2, 3}, 23, true},
		{"no rows", x.Rows(2, 2), []int{0, 3, 4}, 0, nil, 0, true},
		{"one of the first dimension", x.Index(1), []int{3, 4}, 12, []int{2, 1}, 21, true},
		{"columns", x.Slice(2, 1, 3), []int{2, 3, 2}, 1, []int{1, 2, 1}, 22, false},
		{"transpose", x.T(), []int{2, 4, 3}, 0, []int{1, 3, 2}, 23, false},
		{"transpose twice", x.T().T(), []int{2, 3, 4}, 0, []int{1, 2, 3}, 23, true},
		{"another shape", x.Reshape(6, 4), []int{6, 4}, 0, []int{5, 3}, 23, true},
		{"flat", x.Flat(), []int{24}, 0, []int{23}, 23, true},
		{"strided", x.Flat().Strided(3, 2, 9), []int{3, 2}, 0, []int{2, 1}, 19, false},
		{"a transposed row", x.Reshape(24, 1).T(), []int{1, 24}, 0, []int{0, 23}, 23, true},
	} {
		v := test.view
		if !slices.Equal(v.Shape(), test.shape) || v.Contiguous() != test.contiguous {
			t.Errorf("%s: shape %v, contiguous %v; want %v, %v", test.name, v.Shape(), v.Contiguous(), test.shape,
				test.contiguous)
		}
		if n := v.Elements(); n > 0 && (at(v, make([]int, v.Rank())...) != test.first ||
			at(v, test.index...) != test.want) {
			t.Errorf("%s: elements %v and %v, want %v and %v", test.name, at(v, make([]int, v.Rank())...),
				at(v, test.index...), test.first, test.want)
		}
	}
}

func TestWrongViews(t *testing.T) {
	x, ints := Of(count(24), 2, 3, 4), OfInts(make([]int32, 3), 3)
	for name, f := range map[string]func(){
		"too few elements":       func() { Of(count(23), 2, 3, 4) },
		"negative":               func() { Of(count(4), -1, 4) },
		"overflow":               func() { Of(nil, 1<<32, 1<<32, 0) },
		"no dimension":           func() { Of(count(4)) },
		"five dimensions":        func() { Of(count(4), 1, 1, 1, 1, 4) },
		"rows beyond":            func() { x.Rows(1, 3) },
		"rows backwards":         func() { x.Rows(2, 1) },
		"another size":           func() { x.Reshape(5, 5) },
		"reshape with gaps":      func() { x.Slice(2, 0, 2).Reshape(12) },
		"transpose of a vector":  func() { x.Flat().T() },
		"rows that overlap":      func() { x.Strided(2, 4, 3) },
		"strided beyond":         func() { x.Strided(3, 4, 11) },
		"strided, overflow":      func() { x.Strided(1<<32, 4, 1<<32) },
		"memory of a device":     func() { InBuffer(1, Float32, 3).Rows(1, 2).Floats() },
		"numbers of an int":      func() { ints.Floats() },
		"whole numbers of float": func() { x.Ints() },
	} {
		func() {
			defer func() {
				if r := fmt.Sprint(recover()); !strings.HasPrefix(r, "xpu: ") {
					t.Errorf("%s: panicked with %q", name, r)
				}
			}()
			f()
		}()
	}
}

// Stored describes the memory of every matrix and every transpose: the elements are where it says.
func TestStored(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rows, columns := rapid.IntRange(0, 4).Draw(t, "rows"), rapid.IntRange(0, 4).Draw(t, "columns")
		stride := columns + rapid.IntRange(0, 3).Draw(t, "gap")
		m := Of(count(64), 64).Strided(rows, columns, stride)
		if rapid.Bool().Draw(t, "transpose") {
			m = m.T()
		}
		stride, transposed, ok := m.Stored()
		if !ok || stride < m.Dim(1) && !transposed || stride < m.Dim(0) && transposed {
			t.Fatalf("%+v: stride %d, transposed %v, %v", m, stride, transposed, ok)
		}
		for i := range m.Dim(0) {
			for j := range m.Dim(1) {
				place := i*stride + j
				if transposed {
					place = j*stride + i
				}
				if at(m, i, j) != m.Floats()[place] {
					t.Fatalf("%+v: element %d, %d is not at %d", m, i, j, place)
				}
			}
		}
	})
}

func TestTensorIsSmall(t *testing.T) {
	if size := unsafe.Sizeof(Tensor{}); size > 128 {
		t.Errorf("a tensor has %d bytes", size)
	}
	x := count(24)
	if n := testing.AllocsPerRun(100, func() {
		Of(x, 2, 3, 4).Rows(1, 2).Index(0).T().T().Reshape(12).Strided(2, 3, 5)
	}); n > 0 {
		t.Errorf("%v allocations for a view", n)
	}
}
