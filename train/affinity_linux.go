package train

import (
	"os"
	"strings"
)

// processors names those that this process may run on, "" if it is not known. An mpiexec may give
// each rank its own.
func processors() string {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return ""
	}
	_, list, _ := strings.Cut(string(status), "\nCpus_allowed_list:")
	list, _, _ = strings.Cut(list, "\n")
	return strings.TrimSpace(list)
}
