package xpu

import "fmt"

// The functions below are for implementations of [Device]: they panic on what the caller of a method did wrong, with a message that names the
// method and the operand.

// CheckMatMul panics unless the arguments of [Device.MatMul] are right.
func CheckMatMul(transA, transB bool, m, n, k int, a []float32, lda int, b []float32, ldb int, c []float32, ldc int) {
	if m < 0 || n < 0 || k < 0 {
		panic(fmt.Sprintf("xpu: MatMul: m=%d n=%d k=%d: a size is negative", m, n, k))
	}
	checkMatrix("MatMul: a", a, m, k, lda, transA)
	checkMatrix("MatMul: b", b, k, n, ldb, transB)
	checkMatrix("MatMul: c", c, m, n, ldc, false)
}

// CheckGroupedMatMul panics unless the arguments of [Device.GroupedMatMul] are right.
func CheckGroupedMatMul(counts []int, transB bool, n, k int, a []float32, b [][]float32, c []float32) {
	rows := checkGroups("GroupedMatMul", counts, n, k, len(b))
	checkMatrix("GroupedMatMul: a", a, rows, k, k, false)
	checkMatrix("GroupedMatMul: c", c, rows, n, n, false)
	ldb := n
	if transB {
		ldb = k
	}
	for g, m := range counts {
		if m > 0 {
			checkMatrix("GroupedMatMul: an element of b", b[g], k, n, ldb, transB)
		}
	}
}

// CheckGroupedWeightGrad panics unless the arguments of [Device.GroupedWeightGrad] are right.
func CheckGroupedWeightGrad(counts []int, m, n int, a, dc []float32, db [][]float32, accumulate bool) {
	rows := checkGroups("GroupedWeightGrad", counts, m, n, len(db))
	checkMatrix("GroupedWeightGrad: a", a, rows, m, m, false)
	checkMatrix("GroupedWeightGrad: dc", dc, rows, n, n, false)
	for g, k := range counts {
		if k > 0 || !accumulate {
			checkMatrix("GroupedWeightGrad: an element of db", db[g], m, n, n, false)
		}
	}
}

// checkMatrix panics unless x holds a rows × columns matrix (its transpose with trans).
func checkMatrix(name string, x []float32, rows, columns, ld int, trans bool) {
	if trans {
		rows, columns = columns, rows
	}
	if ld < columns {
		panic(fmt.Sprintf("xpu: %s: leading dimension %d of rows of %d", name, ld, columns))
	}
	if rows == 0 || columns == 0 {
		return
	}
	// (rows-1)·ld + columns ≤ len(x), written so that nothing overflows
	if columns > len(x) || rows-1 > (len(x)-columns)/ld {
		panic(fmt.Sprintf("xpu: %s: a slice of %d elements cannot hold %d rows of %d with leading dimension %d",
			name, len(x), rows, columns, ld))
	}
}

// checkGroups panics unless there is a matrix for each group, and returns the sum of counts.
func checkGroups(name string, counts []int, n, k, matrices int) (rows int) {
	if n < 0 || k < 0 {
		panic(fmt.Sprintf("xpu: %s: matrices of %d×%d", name, k, n))
	}
	if matrices != len(counts) {
		panic(fmt.Sprintf("xpu: %s: %d groups, but %d matrices", name, len(counts), matrices))
	}
	for g, c := range counts {
		if rows += c; c < 0 || rows < 0 {
			panic(fmt.Sprintf("xpu: %s: group %d has %d rows", name, g, c))
		}
	}
	return rows
}
