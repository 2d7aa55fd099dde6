package machine

import (
	"os"
	"runtime"
	"strconv"
	"strings"
)

// OnlineCores returns the number of the machine's cores, including cores that this process may not
// use.
func OnlineCores() int {
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
