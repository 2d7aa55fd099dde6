// Package alloctest counts the allocations of a function, for tests.
package alloctest

import "testing"

// tries is how often Least measures a function.
const tries = 20

// Least returns the number of allocations that every run of f makes. [testing.AllocsPerRun] counts
// the allocations of the whole process, so a single run may include allocations of other
// goroutines, of the runtime, or of a pool that has just been emptied. Least therefore returns the
// smallest count of several runs.
func Least(f func()) float64 {
	least := testing.AllocsPerRun(1, f)
	for i := 1; i < tries && least > 0; i++ {
		least = min(least, testing.AllocsPerRun(1, f))
	}
	return least
}
