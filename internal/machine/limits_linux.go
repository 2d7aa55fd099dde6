package machine

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// ReadLimits returns the limits of this process.
func ReadLimits() Limits {
	l := unlimited()
	l.readResourceLimits()
	if n, ok := number("/proc/sys/vm/max_map_count"); ok {
		l.Mappings = n
	}
	l.readGroups("/")
	return l
}

// readGroups sets the limits of the control groups of this process, of version 1 and 2. A group's
// limit also holds for the groups in it, so the smallest limit on the path to the process counts.
// root is "/" outside tests.
func (l *Limits) readGroups(root string) {
	read := func(dir, name string) (int64, bool) { return number(filepath.Join(dir, name)) }
	memory := func(dir, limit, used, dropped string) {
		most, ok := read(dir, limit)
		if !ok || most >= noLimit {
			return
		}
		l.GroupMemory = min(l.GroupMemory, most)
		if n, ok := read(dir, used); ok {
			l.GroupFree = min(l.GroupFree, max(0, most-n+field(filepath.Join(dir, "memory.stat"), dropped)))
		}
	}
	threads := func(dir string) {
		most, ok := read(dir, "pids.max")
		used, _ := read(dir, "pids.current")
		if ok {
			l.GroupThreads = min(l.GroupThreads, max(0, most-used))
		}
	}
	processors := func(quota, period int64) {
		if n := float64(quota) / float64(period); quota > 0 && period > 0 && (l.GroupCPUs == 0 || n < l.GroupCPUs) {
			l.GroupCPUs = n
		}
	}
	all := groups(root)
	for _, dir := range all["memory"] {
		memory(dir, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
	}
	for _, dir := range all["cpu"] {
		quota, _ := read(dir, "cpu.cfs_quota_us")
		period, _ := read(dir, "cpu.cfs_period_us")
		processors(quota, period)
	}
	for _, dir := range all["pids"] {
		threads(dir)
	}
	for _, dir := range all[""] { // version 2
		memory(dir, "memory.max", "memory.current", "inactive_file")
		threads(dir)
		text, _ := os.ReadFile(filepath.Join(dir, "cpu.max"))
		if words := strings.Fields(string(text)); len(words) == 2 {
			quota, _ := strconv.ParseInt(words[0], 10, 64) // "max" is 0
			period, _ := strconv.ParseInt(words[1], 10, 64)
			processors(quota, period)
		}
	}
}

// noLimit is the smallest number that version 1 of control groups means as no limit of memory. The
// kernel writes the largest multiple of the page size.
const noLimit = 1 << 60

// groups returns the folders of this process's control groups by controller, from the process's own
// group up to the root of the mount. The key of version 2 is "".
func groups(root string) map[string][]string {
	paths := map[string]string{}
	text, _ := os.ReadFile(filepath.Join(root, "proc/self/cgroup"))
	for line := range strings.Lines(string(text)) { // 4:memory:/a/b, or 0::/a/b in version 2
		if fields := strings.SplitN(strings.TrimSpace(line), ":", 3); len(fields) == 3 {
			for _, controller := range strings.Split(fields[1], ",") {
				paths[controller] = fields[2]
			}
		}
	}
	found := map[string][]string{}
	text, _ = os.ReadFile(filepath.Join(root, "proc/self/mountinfo"))
	for line := range strings.Lines(string(text)) { // 36 35 0:30 ROOT MOUNTPOINT … - TYPE SOURCE OPTIONS
		fields := strings.Fields(line)
		dash := slices.Index(fields, "-")
		if dash < 5 || len(fields) < dash+4 {
			continue
		}
		var controllers []string
		switch fields[dash+1] {
		case "cgroup2":
			controllers = []string{""}
		case "cgroup":
			controllers = strings.Split(fields[dash+3], ",")
		default:
			continue
		}
		for _, controller := range controllers {
			path, ok := paths[controller]
			if !ok || found[controller] != nil {
				continue
			}
			mount := filepath.Join(root, fields[4])
			// In a container, the mount may show a part of the tree only.
			inside, err := filepath.Rel(fields[3], path)
			if err != nil || inside == ".." || strings.HasPrefix(inside, "../") {
				inside = "."
			}
			for ; inside != "."; inside = filepath.Dir(inside) {
				found[controller] = append(found[controller], filepath.Join(mount, inside))
			}
			found[controller] = append(found[controller], mount)
		}
	}
	return found
}

// number reads a file that has one number. ok is false for other files, such as one with "max".
func number(path string) (n int64, ok bool) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	n, err = strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	return n, err == nil
}
