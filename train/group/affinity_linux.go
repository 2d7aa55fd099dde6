package group

import (
	"os"
	"strings"
)

// processors names the processors on which this process may run, "" if unknown. mpiexec may assign
// processors to each rank.
func processors() string {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return ""
	}
	_, list, _ := strings.Cut(string(status), "\nCpus_allowed_list:")
	list, _, _ = strings.Cut(list, "\n")
	return strings.TrimSpace(list)
}
