package longtest

import (
	"flag"
	"strconv"
	"testing"

	"pgregory.net/rapid"
)

func TestCounts(t *testing.T) {
	// rapid draws a fifth of the cases with -short.
	short := flag.Lookup("test.short").Value
	defer short.Set(short.String())
	if err := short.Set("false"); err != nil {
		t.Fatal(err)
	}
	usual, err := strconv.Atoi(flag.Lookup("rapid.checks").DefValue)
	if err != nil {
		t.Fatal(err)
	}
	for variable, want := range map[string]struct{ rounds, checks int }{"": {3, 7}, "1": {50, usual}} {
		t.Setenv(switchName, variable)
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

func TestSkipIfShort(t *testing.T) {
	short := flag.Lookup("test.short").Value
	old := short.String()
	defer short.Set(old)
	for value, want := range map[string]bool{"true": true, "false": false} {
		if err := short.Set(value); err != nil {
			t.Fatal(err)
		}
		skipped := false
		t.Run(value, func(t *testing.T) {
			defer func() { skipped = t.Skipped() }()
			SkipIfShort(t)
		})
		if skipped != want {
			t.Errorf("-short=%s: skipped is %t, want %t", value, skipped, want)
		}
	}
}
