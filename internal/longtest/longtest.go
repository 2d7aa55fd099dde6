// Package longtest says how often random tests repeat themselves: a few times in `make test`, more
// often in `make test-long`.
package longtest

import (
	"flag"
	"os"
	"strconv"
	"testing"

	"pgregory.net/rapid"
)

// Variable is set in the environment by `make test-long`.
const Variable = "MULA_TEST_LONG"

// Rounds returns how many rounds a test makes: usual, or long in a long test.
func Rounds(usual, long int) int {
	if os.Getenv(Variable) != "" {
		return long
	}
	return usual
}

// Check is [rapid.Check] with fewer cases than rapid's 100, unless the test is a long one or
// -rapid.checks says otherwise. It must not be used by parallel tests, because the number of cases
// is a flag.
func Check(t *testing.T, usual int, property func(*rapid.T)) {
	t.Helper()
	if f := flag.Lookup("rapid.checks"); f.Value.String() == f.DefValue && Rounds(0, 1) == 0 {
		if err := f.Value.Set(strconv.Itoa(usual)); err != nil {
			t.Fatal(err)
		}
		defer f.Value.Set(f.DefValue)
	}
	rapid.Check(t, property)
}
