// Package longtest defines the tiers of tests. `make test` runs the short tests, `go test ./...`
// all tests, and `make test-long` all tests with more rounds.
package longtest

import (
	"flag"
	"os"
	"strconv"
	"testing"

	"pgregory.net/rapid"
)

// switchName is set in the environment by `make test-long`.
const switchName = "MULA_TEST_LONG"

// Rounds returns how many rounds a test makes: usual, or long in a long test.
func Rounds(usual, long int) int {
	if os.Getenv(switchName) != "" {
		return long
	}
	return usual
}

// ShortRounds returns how many rounds a test makes: short when go test has the flag -short, or
// usual.
func ShortRounds(short, usual int) int {
	if testing.Short() {
		return short
	}
	return usual
}

// SkipIfShort skips a test that takes longer than about two seconds when go test has the flag
// -short, as in `make test`.
func SkipIfShort(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("a long test: run make test-long, or go test without -short")
	}
}

// Check is [rapid.Check] with at most usual cases, unless the test is a long one. It must not be
// used by parallel tests, because the number of cases is a flag.
func Check(t *testing.T, usual int, property func(*rapid.T)) {
	t.Helper()
	checks := flag.Lookup("rapid.checks").Value
	given := checks.String()
	if n, err := strconv.Atoi(given); err != nil {
		t.Fatal(err)
	} else if n > usual && Rounds(0, 1) == 0 {
		if err := checks.Set(strconv.Itoa(usual)); err != nil {
			t.Fatal(err)
		}
		defer checks.Set(given)
	}
	rapid.Check(t, property)
}
