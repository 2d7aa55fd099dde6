package cli

import (
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"mula/internal/launchers"
)

// A standing is the rank of this process in its job. Ranks share a build of index files through the
// folder of the cache, so they need no messages.
type standing struct {
	rank, size int
	local      int // ranks on this machine
}

// standingIn reads the standing from the variables of the launcher. A process without a launcher is
// rank 0 of 1.
func standingIn(getenv func(string) string) standing {
	if p, ok := launchers.FindIn(getenv); ok && p.Size > 0 {
		return standing{rank: p.Rank, size: p.Size, local: p.Here}
	}
	return standing{size: 1, local: 1}
}

// threadsOf returns --threads. If it is 0, threadsOf returns the number of cores for this rank: the
// cores to which the launcher bound it, or else its share of the machine's cores.
func threadsOf(c *cli.Context, j standing) int {
	n := threads(c)
	if c.Int("threads") == 0 && n >= onlineCores() {
		n = max(1, n/j.local)
	}
	return n
}

// onlineCores returns the number of the machine's cores, including cores that this process may not
// use.
func onlineCores() int {
	text, err := os.ReadFile("/sys/devices/system/cpu/online") // such as 0-63, or 0-31,64-95
	if err != nil {
		return runtime.NumCPU()
	}
	n := 0
	for part := range strings.SplitSeq(strings.TrimSpace(string(text)), ",") {
		first, last, isRange := strings.Cut(part, "-")
		from, err := strconv.Atoi(first)
		if err != nil {
			return runtime.NumCPU()
		}
		to := from
		if isRange {
			if to, err = strconv.Atoi(last); err != nil {
				return runtime.NumCPU()
			}
		}
		n += to - from + 1
	}
	return n
}

// quiet discards the output of all ranks but the first.
func (j standing) quiet(c *cli.Context) {
	if j.rank > 0 {
		c.App.Writer, c.App.ErrWriter = io.Discard, io.Discard
	}
}
