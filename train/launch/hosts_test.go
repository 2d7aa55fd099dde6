package launch

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func hostsText(hosts []Host) string {
	var parts []string
	for _, h := range hosts {
		parts = append(parts, fmt.Sprintf("%s:%d", h.Name, h.Slots))
	}
	return strings.Join(parts, " ")
}

func TestReadingHosts(t *testing.T) {
	file := func(text string) ([]Host, error) {
		path := filepath.Join(t.TempDir(), "hosts")
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return ReadHosts(path)
	}
	for _, test := range []struct {
		read       func(string) ([]Host, error)
		text, want string
	}{
		{ParseHosts, "a,b:4, c.example.org", "a:0 b:4 c.example.org:0"},
		{ParseHosts, "a,b,a,a", "a:3 b:0"},
		{ParseHosts, "user@a:2", "user@a:2"},
		{ParseHosts, "a,,b", `"" is not the name of a host`},
		{ParseHosts, "-oProxyCommand=x", "is not the name of a host"},
		{ParseHosts, "a;rm", "is not the name of a host"},
		{ParseHosts, "a:0", "must be a number of ranks"},
		{file, "# nodes\nn1\n\nn2:3 # three\nn3 slots=4 max_slots=8\n", "n1:0 n2:3 n3:4"},
		{file, "x1\nx1\nx2\nx2\n", "x1:2 x2:2"},
		{file, "a\nb slots=many\n", `:2: "many" is not a number of ranks`},
		{file, "a\n$b\n", ":2: "},
		{file, "output: run\n", `:1: "" is not a number of ranks`}, // not a file of hosts
		{file, "# none\n", "names no host"},
		{ParseNodeList, "nid[001-003,007],login1", "nid001:0 nid002:0 nid003:0 nid007:0 login1:0"},
		{ParseNodeList, "r[1-2]n[09-10]", "r1n09:0 r1n10:0 r2n09:0 r2n10:0"},
		{ParseNodeList, "a,b", "a:0 b:0"},
		{ParseNodeList, "a[1-", "unclosed bracket"},
		{ParseNodeList, "a[5-1]", "is not a range"},
		{ParseNodeList, "a[0-99999999]", "is not a range"},
	} {
		hosts, err := test.read(test.text)
		got := hostsText(hosts)
		if err != nil {
			got = err.Error()
		}
		if err == nil && got != test.want || err != nil && !strings.Contains(got, test.want) {
			t.Errorf("%q gives %q, want %q", test.text, got, test.want)
		}
	}
}

func TestDistribute(t *testing.T) {
	for _, test := range []struct {
		hosts         string
		spares, ranks int
		want          string
	}{
		{"a,b,c", 1, 0, "2 on a:1 b:1 c:1"},
		{"a,b,c", 1, 4, "4 on a:2 b:2 c:2"},
		{"a,b,c", 0, 4, "4 on a:2 b:2 c:2"},
		{"a:4,b:4,c:4", 1, 0, "8 on a:4 b:4 c:4"},
		{"a:4,b:4,c:4", 0, 6, "6 on a:4 b:4 c:4"},
		{"a:4,b,c", 1, 6, "6 on a:4 b:2 c:2"},
		{"a:4,b:4,c:4", 1, 9, "9 ranks do not fit on 2 hosts with 8 slots and 1 spares"},
		{"a,b", 2, 0, "2 of 2 hosts are spares"},
	} {
		hosts, err := ParseHosts(test.hosts)
		if err != nil {
			t.Fatal(err)
		}
		hosts, ranks, err := Distribute(hosts, test.spares, test.ranks)
		got := fmt.Sprintf("%d on %s", ranks, hostsText(hosts))
		if err != nil {
			got = err.Error()
		}
		if !strings.HasPrefix(got, test.want) {
			t.Errorf("%s, %d spares, %d ranks: %q, want %q", test.hosts, test.spares, test.ranks, got, test.want)
		}
	}
}

// program puts a script before all others of its name.
func program(t *testing.T, name, script string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+string(filepath.ListSeparator)+os.Getenv("PATH"))
}

func TestDeadlineOfScheduler(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	squeue := func(says string) string {
		return `[ "$*" = "--noheader --jobs=12 --format=%L" ] || exit 1; ` + says
	}
	for _, test := range []struct {
		environment string
		squeue      string // script; "" for none
		want        int64  // seconds since 1970; −1 for an error, 0 for none
		warning     string
	}{
		{"", "", 0, ""},
		{"SLURM_JOB_END_TIME=1003600 SLURM_JOB_ID=12", "", 1_003_600, ""},
		{"PBS_WALLTIME=7200", "", 1_007_200, ""},
		{"SLURM_JOB_END_TIME=soon", "", -1, ""},
		{"PBS_WALLTIME=-1", "", -1, ""},
		{"SLURM_JOB_ID=12", squeue("echo 3:05"), 1_000_185, ""},
		{"SLURM_JOB_ID=12", squeue("echo 2:00:01"), 1_007_201, ""},
		{"SLURM_JOB_ID=12", squeue("echo 1-00:00:10"), 1_086_410, ""},
		{"SLURM_JOB_ID=12", squeue("echo UNLIMITED"), 0, ""},
		{"SLURM_JOB_ID=12", squeue("echo INVALID"), 0, `squeue printed "INVALID"`},
		{"SLURM_JOB_ID=12", squeue("echo no connection >&2; exit 1"), 0, "set --walltime"},
		{"SLURM_JOB_ID=12", "", 0, "set --walltime"},
		{"PBS_JOBID=3", "", 0, "set --walltime"},
		{"PBS_JOBID=3.aurora PBS_WALLTIME=7200", "", 1_007_200, ""},
	} {
		t.Run(test.environment+" "+test.squeue, func(t *testing.T) {
			t.Setenv("PATH", t.TempDir()) // a machine may have a squeue of its own
			if test.squeue != "" {
				program(t, "squeue", test.squeue)
			}
			at, warning, err := Deadline(t.Context(), variables(test.environment), now)
			got := int64(0)
			if err != nil {
				got = -1
			} else if !at.IsZero() {
				got = at.Unix()
			}
			if got != test.want || (warning == "") != (test.warning == "") || !strings.Contains(warning, test.warning) {
				t.Errorf("%d, %q; want %d, %q", got, warning, test.want, test.warning)
			}
		})
	}
}

// The end of a job of PBS comes from qstat.
func TestDeadlineOfPBS(t *testing.T) {
	now := time.Date(2026, 11, 27, 12, 0, 0, 0, time.Local)
	const job = "Job Id: 3.aurora\n    Job_Name = train\n    job_state = R\n"
	for _, test := range []struct {
		said    string
		want    time.Time
		warning string
	}{
		{job + "    Resource_List.walltime = 01:30:00\n    stime = Fri Nov 27 11:45:10 2026\n",
			now.Add(75*time.Minute + 10*time.Second), ""},
		{job + "    Resource_List.walltime = 48:00:00\n    stime = Tue Dec  1 11:45:10 2026\n",
			time.Date(2026, 12, 3, 11, 45, 10, 0, time.Local), ""},
		{job + "    Walltime.Remaining = 90\n", now.Add(90 * time.Second), ""}, // Torque
		{job, time.Time{}, ""}, // no limit
		{job + "    Resource_List.walltime = soon\n", time.Time{}, `Resource_List.walltime "soon"`},
		{job + "    Resource_List.walltime = 01:30:00\n", time.Time{}, `stime = ""`},
		{"", time.Time{}, `Resource_List.walltime ""`},
	} {
		t.Setenv("PATH", t.TempDir())
		program(t, "qstat", `[ "$*" = "-f 3.aurora" ] || exit 1; printf '%s' '`+test.said+`'`)
		at, warning, err := Deadline(t.Context(), variables("PBS_JOBID=3.aurora"), now)
		if err != nil || !at.Equal(test.want) || (warning == "") != (test.warning == "") ||
			!strings.Contains(warning, test.warning) {
			t.Errorf("%q: %v, %q, %v; want %v, %q", test.said, at, warning, err, test.want, test.warning)
		}
	}
}

// variables is an environment.
func variables(text string) func(name string) string {
	return func(name string) string {
		for _, v := range strings.Fields(text) {
			if value, ok := strings.CutPrefix(v, name+"="); ok {
				return value
			}
		}
		return ""
	}
}

// The type of MPI comes from the options, the environment, or Slurm's default.
func TestSlurmMPI(t *testing.T) {
	for _, test := range []struct{ srun, environment, scontrol, want string }{
		{"srun --mpi=pmix -c 4", "SLURM_MPI_TYPE=pmi2", "echo 'MpiDefault = none'", "pmix"},
		{"srun --mpi pmi2", "", "", "pmi2"},
		{"srun", "SLURM_MPI_TYPE=pmi2", "echo 'MpiDefault = none'", "pmi2"},
		{"srun", "", "echo 'Configuration data'; echo 'MpiDefault              = pmix'", "pmix"},
		{"srun", "", "echo 'MpiDefault              = none'", "none"},
		{"srun", "", "exit 1", "none"},
	} {
		program(t, "scontrol", test.scontrol)
		if got := SlurmMPI(t.Context(), strings.Fields(test.srun), variables(test.environment)); got != test.want {
			t.Errorf("%q, %q: %q, want %q", test.srun, test.environment, got, test.want)
		}
	}
}
