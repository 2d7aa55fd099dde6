package record

import "testing"

// Names that a user chose keep the format.
func TestScrapeText(t *testing.T) {
	text := &scrapeText{}
	text.head("mula_x", "gauge", "A test.")
	text.value("mula_x", 1.5, "source", "a\"b\\c\nd", "layer", "0")
	want := "# HELP mula_x A test.\n# TYPE mula_x gauge\nmula_x{source=\"a\\\"b\\\\c\\nd\",layer=\"0\"} 1.5\n"
	if text.String() != want {
		t.Errorf("got %q", text.String())
	}
}
