package cli

import (
	"strings"
	"testing"
)

// What no simulation can be asked for is a wrong call, and said in one line.
func TestSimulateWrongUsage(t *testing.T) {
	for _, c := range []struct{ args, says string }{
		{"--nodes 0", "--nodes is 0"},
		{"--nodes 3000000 --ranks-per-node 3000000", "the ranks at most"},
		{"--nodes 3 --batch-size 8", "must be a multiple of the 3 ranks"},
		{"--batch-size 0", "--batch-size is 0"},
		{"--samples 0", "--samples is 0"},
		{"--step-time 1 --tokens-per-second 1", "exclude each other"},
		{"--step-time 0", "--step-time is 0"},
		{"--tokens-per-second -1", "--tokens-per-second is -1"},
		{"--step-time x", "must be a number"},
		{"--storage local-nvm", `did you mean "local-nvme"`},
		{"--plan-only --shards x", "remove --shards"},
		{"extra", `unexpected "extra"`},
	} {
		code, stdout, stderr := call(t, append([]string{"simulate"}, strings.Fields(c.args)...)...)
		if code != exitUsage || !strings.Contains(stderr, c.says) || stdout != "" || strings.Count(stderr, "\n") != 1 {
			t.Errorf("mula simulate %s: exit %d, %q, %q; want exit 2 and %q", c.args, code, stdout, stderr, c.says)
		}
	}
}
