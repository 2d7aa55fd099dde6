package train

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"mula/blend"
	"mula/blend/plantest"
	"mula/shards"
)

// Of four ranks, only the first looks at all shards. A shard that no sample needs is opened once.
func TestOneRankSurveys(t *testing.T) {
	const files = 60
	dir := t.TempDir()
	document := make([]uint32, 40)
	for k := range files {
		for i := range document {
			document[i] = uint32(1 + (k*7+i*i)%300)
		}
		plantest.Shard(t, filepath.Join(dir, fmt.Sprintf("part-%02d", k)), shards.UInt16, 512, [][]uint32{document})
	}
	path := plantest.Seal(t, dir, "plan.json", "sequence_length: 16\nsources: [{name: a, shards: [part-*]}]\n")
	plan, err := blend.ReadPlan(path)
	if err != nil {
		t.Fatal(err)
	}
	needed := map[string]bool{} // shards of the checks, and of the step
	use := func(position int64) {
		s, err := plan.Locate(position)
		if err != nil {
			t.Fatal(err)
		}
		needed[filepath.Base(plan.ShardPath(0, s.Shard))] = true
	}
	for _, c := range plan.Checks {
		use(c.Position)
	}
	for position := range int64(4) {
		use(position)
	}
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := unix.InotifyAddWatch(fd, dir, unix.IN_OPEN); err != nil {
		t.Fatal(err)
	}
	t.Setenv("XDG_CACHE_HOME", t.TempDir()) // which has no facts of the shards
	c := ranksConfig(t, path, LayoutConfig{DP: 4, EP: 1}, "steps: 1\nbatch_size: 4\nmicro_batch_size: 1\n"+
		"evaluate: {every: 0}\nschedule: {learning_rate: 3e-3, warmup_steps: 0}\n")
	mustRun(t, c, Options{})
	opened := map[string]int{}
	buffer := make([]byte, 1<<20)
	for {
		n, err := unix.Read(fd, buffer)
		if err == unix.EAGAIN {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		for at := 0; at < n; {
			event := (*unix.InotifyEvent)(unsafe.Pointer(&buffer[at]))
			at += unix.SizeofInotifyEvent
			name := strings.TrimRight(string(buffer[at:at+int(event.Len)]), "\x00")
			if shard, ok := strings.CutSuffix(name, ".idx"); ok {
				opened[shard]++
			}
			at += int(event.Len)
		}
	}
	unneeded := 0
	for k := range files {
		name := fmt.Sprintf("part-%02d", k)
		if needed[name] {
			continue
		}
		if unneeded++; opened[name] != 1 {
			t.Errorf("%s, which no sample needs, was opened %d times, want once", name, opened[name])
		}
	}
	if unneeded < files/2 {
		t.Fatalf("only %d shards are not needed", unneeded)
	}
	// A rank that needs a missing shard names it; the first rank reports it before the first step.
	if err := os.Remove(filepath.Join(dir, "part-07.idx")); err != nil {
		t.Fatal(err)
	}
	c.Output = filepath.Join(t.TempDir(), "again")
	if _, err := Run(t.Context(), c, Options{}); err == nil || !strings.Contains(err.Error(), "part-07") {
		t.Errorf("a missing shard: %v", err)
	}
}
