package machine

import (
	"os"
	"path/filepath"
	"testing"
)

// tree writes files below a folder that takes the place of the root folder.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestGroups(t *testing.T) {
	want := func(change func(*Limits)) Limits {
		l := unlimited()
		change(&l)
		return l
	}
	const mount2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
	for name, test := range map[string]struct {
		files map[string]string
		want  Limits
	}{
		"none": {nil, unlimited()},
		"version 2, the parent's limit is smaller": {map[string]string{
			"proc/self/cgroup":                    "0::/job/task\n",
			"proc/self/mountinfo":                 "22 1 0:21 / /proc rw - proc proc rw\n" + mount2,
			"sys/fs/cgroup/job/task/memory.max":   "max\n",
			"sys/fs/cgroup/job/memory.max":        "4000\n",
			"sys/fs/cgroup/job/memory.current":    "3000\n",
			"sys/fs/cgroup/job/memory.stat":       "active_file 7\ninactive_file 500\n",
			"sys/fs/cgroup/job/task/cpu.max":      "150000 100000\n",
			"sys/fs/cgroup/job/cpu.max":           "max 100000\n",
			"sys/fs/cgroup/job/task/pids.max":     "100\n",
			"sys/fs/cgroup/job/task/pids.current": "40\n",
		}, want(func(l *Limits) {
			l.GroupMemory, l.GroupFree, l.GroupCPUs, l.GroupThreads = 4000, 1500, 1.5, 60
		})},
		"version 1": {map[string]string{
			"proc/self/cgroup": "4:memory:/a\n3:cpu,cpuacct:/b\n2:pids:/\n1:name=systemd:/\n",
			"proc/self/mountinfo": "31 30 0:27 / /cg/memory rw - cgroup cgroup rw,memory\n" +
				"32 30 0:28 / /cg/cpu rw - cgroup cgroup rw,cpu,cpuacct\n33 30 0:29 / /cg/pids rw - cgroup cgroup " +
				"rw,pids\n",
			"cg/memory/memory.limit_in_bytes":   "9223372036854771712\n",
			"cg/memory/a/memory.limit_in_bytes": "1000\n",
			"cg/memory/a/memory.usage_in_bytes": "1200\n",
			"cg/cpu/cpu.cfs_quota_us":           "-1\n",
			"cg/cpu/cpu.cfs_period_us":          "100000\n",
			"cg/cpu/b/cpu.cfs_quota_us":         "50000\n",
			"cg/cpu/b/cpu.cfs_period_us":        "100000\n",
			"cg/pids/pids.max":                  "max\n",
		}, want(func(l *Limits) { l.GroupMemory, l.GroupFree, l.GroupCPUs = 1000, 0, 0.5 })},
		"a container that sees its own group only": {map[string]string{
			"proc/self/cgroup":         "0::/docker/abc\n",
			"proc/self/mountinfo":      "30 23 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
			"sys/fs/cgroup/memory.max": "77\n",
		}, want(func(l *Limits) { l.GroupMemory = 77 })},
		"a path outside the mount": {map[string]string{
			"proc/self/cgroup":         "0::/../other\n",
			"proc/self/mountinfo":      mount2,
			"sys/fs/cgroup/memory.max": "78\n",
		}, want(func(l *Limits) { l.GroupMemory = 78 })},
	} {
		got := unlimited()
		got.readGroups(tree(t, test.files))
		if got != test.want {
			t.Errorf("%s: %+v, want %+v", name, got, test.want)
		}
	}
}

func TestMemory(t *testing.T) {
	total, available := TotalMemory(), AvailableMemory()
	if total < 1<<20 || available <= 0 || available > total {
		t.Errorf("%d bytes of memory, %d available", total, available)
	}
	if l := ReadLimits(); l.OpenFiles < 3 || l.Mappings < 100 {
		t.Errorf("%+v", l)
	}
}
