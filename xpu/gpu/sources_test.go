package gpu

import (
	"regexp"
	"strings"
	"testing"
)

// An inline function that is not static has no code where a compiler does not inline it, by the
// rules of C99: AMD's fails with an undefined symbol. The kernels for Ponte Vecchio are for Intel's
// alone, which inlines all of them.
func TestInlineIsStatic(t *testing.T) {
	entries, err := texts.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	functions, inline := 0, regexp.MustCompile(`\binline\b`)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "pvc") || e.Name() == "dpas.cl" {
			continue
		}
		text, err := texts.ReadFile(e.Name())
		if err != nil {
			t.Fatal(err)
		}
		for i, line := range strings.Split(string(text), "\n") {
			code, _, _ := strings.Cut(line, "//")
			if !inline.MatchString(code) {
				continue
			}
			functions++
			if !strings.Contains(code, "static inline") {
				t.Errorf("%s:%d: %s", e.Name(), i+1, line)
			}
		}
	}
	if functions == 0 {
		t.Error("no inline function; is the pattern right?")
	}
}
