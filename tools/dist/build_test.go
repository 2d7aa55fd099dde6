package main

import (
	"testing"
	"time"
)

func TestNewContact(t *testing.T) {
	for _, test := range []struct {
		maintainer, homepage string
		ok                   bool
	}{
		{"", "", true},
		{"A. Person <person@example.org>", "https://example.org/mula", true},
		{"person@example.org", "", false},
		{"A. Person", "", false},
		{"A. Person\n <person@example.org>", "", false},
		{"", "example.org", false},
		{"", "https://", false},
		{"", "https://example.org/\nDepends: x", false},
	} {
		got, err := newContact(test.maintainer, test.homepage)
		if want := (contact{test.maintainer, test.homepage}); (err == nil) != test.ok || test.ok && got != want {
			t.Errorf("%q, %q: got %+v, %v; ok %t", test.maintainer, test.homepage, got, err, test.ok)
		}
	}
}

func TestYears(t *testing.T) {
	year := func(n int) time.Time { return time.Date(n, 6, 1, 0, 0, 0, 0, time.UTC) }
	if got := (source{first: year(2026), time: year(2026)}).years(); got != "2026" {
		t.Errorf("one year: %q", got)
	}
	if got := (source{first: year(2026), time: year(2028)}).years(); got != "2026-2028" {
		t.Errorf("three years: %q", got)
	}
}
