package suggest

import "testing"

func TestNearest(t *testing.T) {
	known := []string{"batch_size", "micro_batch_size", "steps", "seed", "plan"}
	for name, want := range map[string]string{
		"batchsize":  "batch_size",
		"batch_sise": "batch_size",
		"step":       "steps",
		"sead":       "seed",
		"plan":       "plan",
		"zzzzzz":     "",
		"zz":         "",
		"x":          "",
		"optimizer":  "",
	} {
		if got := Nearest(name, known); got != want {
			t.Errorf("Nearest(%q) = %q, want %q", name, got, want)
		}
	}
}

func TestEditDistance(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"", "abc", 3}, {"abc", "", 3}, {"kitten", "sitting", 3}, {"flaw", "lawn", 2}, {"same", "same", 0}} {
		if got := editDistance(c.a, c.b); got != c.want {
			t.Errorf("editDistance(%q, %q) = %d, want %d", c.a, c.b, got, c.want)
		}
	}
}
