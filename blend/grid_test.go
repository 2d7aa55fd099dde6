package blend

import (
	"strings"
	"testing"
)

// TestGridCheck has the rule for starts and ends that blend, serve and the commands share. The plan
// has 600 positions.
func TestGridCheck(t *testing.T) {
	c, text := mixed(t)
	d := c.open(text)
	for _, v := range []struct {
		batch    int
		from, to int64
		want     string // of the error; "" for none
	}{
		{8, 0, 600, ""},
		{8, 16, 24, ""},
		{8, 592, 600, ""},
		{8, 600, 600, ""},
		{7, 595, 600, ""}, // the plan's last step is short
		{7, 600, 600, ""}, // the state of a finished run
		{700, 0, 600, ""},
		{8, 21, 600,
			"position 21 is not the start of a step of 8 samples; use 16 or 24. To change the batch size of a run, " +
				"stop the run at a multiple of both batch sizes"},
		{8, 598, 600, "use 592. To change"},
		{7, 599, 600, "use 595. To change"},
		{700, 5, 600, "use 0. To change"},
		{7, 600, 599, "the end 599 is before the start 600"},
		{8, 0, 21, "position 21 is not the end of a step of 8 samples; use 16 or 24"},
		{8, 0, 598, "use 592 or 600"},
		{7, 0, 599, "use 595 or 600"},
		{8, 0, 3, "position 3 is not the end of a step of 8 samples; use 8"},
		{700, 0, 5, "use 600"},
		{8, 601, 601, "[601, 601) are not all in the plan, which has 600"},
		{8, -8, 600, "[-8, 600) are not all in the plan"},
		{0, 0, 600, "batch size 0"},
		{-1, 0, 600, "batch size -1"},
	} {
		grid, err := d.Grid(v.batch)
		if err == nil {
			err = grid.Check(v.from, v.to)
		}
		if (err == nil) != (v.want == "") || err != nil && !strings.Contains(err.Error(), v.want) {
			t.Errorf("batch size %d, positions [%d, %d): %v, want %q", v.batch, v.from, v.to, err, v.want)
		}
	}
}
