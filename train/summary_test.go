package train

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"mula/moe"
	"mula/train/estimate"
)

// What a refused run is told would fit does, and nothing larger of its kind would: every
// micro-batch and level is tried here.
func TestWouldFit(t *testing.T) {
	plan := mustPlan(t, makePlan(t, t.TempDir(), "plan.json", ""))
	option := regexp.MustCompile(`(?:recompute: (\w+))?(?: with )?(?:micro_batch_size: ([0-9]+))? \(([0-9.e+-]+) GB`)
	kinds := map[string]int{}
	for _, layout := range []string{"{}", "{expert_dp: 2, ep: 2}", "{pp: 2}"} {
		for _, level := range []moe.Recompute{moe.RecomputeNone, moe.RecomputeExperts, moe.RecomputeLayers} {
			c := testConfig(t, "plan.json",
				"batch_size: 32\nsteps: 8\nmicro_batch_size: 12\nlayout: "+layout+"\nrecompute: "+string(level)+"\n")
			c, err := c.resolve(plan)
			if err != nil {
				t.Fatal(err)
			}
			s := summarize(c, plan, nil)
			rows := c.rankRows()
			now := min(12, rows)
			needs := func(level moe.Recompute, micro int) int64 {
				c := c
				c.Recompute, c.MicroBatchSize = level, micro
				return summarize(c, plan, nil).Memory.Total()
			}
			levels := []moe.Recompute{moe.RecomputeNone, moe.RecomputeExperts, moe.RecomputeLayers}
			for share := 0.02; share < 1; share += 0.02 {
				most := int64(float64(s.Memory.Total()) * share)
				advice := s.wouldFit(most, estimate.Memory.Total)
				fits := 0 // combinations of level and micro-batch that fit
				for _, l := range levels[slices.Index(levels, level):] {
					for micro := 1; micro <= now; micro++ {
						if needs(l, micro) <= most {
							fits++
						}
					}
				}
				found := option.FindAllStringSubmatch(advice, -1)
				if strings.Contains(advice, "still needs") {
					kinds["nothing"]++
					if strongest := levels[2]; fits > 0 || needs(strongest, 1) <= most ||
						!strings.Contains(advice, fmt.Sprintf("%.4g GB", float64(needs(strongest, 1))/1e9)) {
						t.Errorf("%s, %s, %.0f %%: %q, but %d combinations fit", layout, level, 100*share, advice, fits)
					}
					continue
				}
				if len(found) == 0 {
					t.Fatalf("%q", advice)
				}
				for _, f := range found {
					l, micro := level, now
					if f[1] != "" {
						l = moe.Recompute(f[1])
					}
					if f[2] != "" {
						micro, _ = strconv.Atoi(f[2])
						if micro < now-1 && needs(l, micro+1) <= most {
							t.Errorf("%s, %s, %.0f %%: %q, but %d would do", layout, level, 100*share, advice, micro+1)
						}
					}
					kinds[fmt.Sprint(f[1] != "", " ", f[2] != "")]++
					if n := needs(l, micro); n > most || f[3] != fmt.Sprintf("%.4g", float64(n)/1e9) {
						t.Errorf("%s, %s, %.0f %%: %q, but that needs %d of %d bytes", layout, level, 100*share, advice,
							n, most)
					}
				}
			}
		}
	}
	if len(kinds) != 4 {
		t.Errorf("kinds of advice: %v", kinds)
	}
}
