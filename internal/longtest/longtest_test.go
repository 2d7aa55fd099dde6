package longtest

import (
	"testing"

	"pgregory.net/rapid"
)

func TestCounts(t *testing.T) {
	for variable, want := range map[string]struct{ rounds, checks int }{"": {3, 7}, "1": {50, 100}} {
		t.Setenv(Variable, variable)
		if got := Rounds(3, 50); got != want.rounds {
			t.Errorf("%q: %d rounds, want %d", variable, got, want.rounds)
		}
		n := 0
		Check(t, 7, func(*rapid.T) { n++ })
		if n != want.checks {
			t.Errorf("%q: %d cases, want %d", variable, n, want.checks)
		}
	}
}
