// Package machine reports the memory of this machine and the limits that the system sets for this
// process: rlimits, control groups and kernel settings.
package machine

import (
	"math"
)

// Unlimited is the value of a limit that does not exist or is not known.
const Unlimited = math.MaxInt64

// Limits are the limits of this process. A field is [Unlimited] if there is no limit.
type Limits struct {
	AddressSpace int64   `json:"address_space"`  // bytes (ulimit -v)
	LockedMemory int64   `json:"locked_memory"`  // bytes (ulimit -l)
	OpenFiles    int64   `json:"open_files"`     // of this process (ulimit -n)
	Processes    int64   `json:"processes"`      // processes and threads of the user (ulimit -u), or of the control group
	Mappings     int64   `json:"mappings"`       // mapped files and memory areas of a process (vm.max_map_count)
	GroupMemory  int64   `json:"cgroup_memory"`  // bytes that all processes of the control group may use together
	GroupFree    int64   `json:"cgroup_free"`    // bytes of GroupMemory that are not used, or used by files that can be dropped
	GroupCPUs    float64 `json:"cgroup_cpus"`    // processors, 0 for no limit
	GroupThreads int64   `json:"cgroup_threads"` // processes and threads that the control group may still start
}

func unlimited() Limits {
	return Limits{AddressSpace: Unlimited, LockedMemory: Unlimited, OpenFiles: Unlimited, Processes: Unlimited,
		Mappings: Unlimited, GroupMemory: Unlimited, GroupFree: Unlimited, GroupThreads: Unlimited}
}
