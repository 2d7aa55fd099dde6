package cli

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"mula/fixtures/vectors"
	"mula/internal/longtest"
)

// rank starts the command as a rank of a job.
func rank(dir string, rank, world int, args ...string) (*exec.Cmd, *bytes.Buffer) {
	c := mula(dir, args...)
	c.Env = append(os.Environ(), fmt.Sprint("MULA_RANK=", rank), fmt.Sprint("MULA_WORLD=", world))
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	return c, &out
}

// Of the ranks of a job one may be killed at any moment: the others do its work and end well, and
// the first alone speaks.
func TestIndexRanks(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	const world = 3
	dir := t.TempDir()
	words := tokenFiles(t, dir, 12, 6000)
	k := newKiller(6, func() { mustRun(t, dir, indexArguments(words, "whole")...) })
	whole := indexFiles(t, filepath.Join(dir, "whole"))
	for round := range 6 {
		var commands [world]*exec.Cmd
		var outs [world]*bytes.Buffer
		for r := range world {
			commands[r], outs[r] = rank(dir, r, world, indexArguments(words, "shared")...)
			if err := commands[r].Start(); err != nil {
				t.Fatal(err)
			}
		}
		victim := rand.IntN(world+1) - 1 // or none
		if victim >= 0 {
			time.Sleep(time.Duration(k.random.Float64() * float64(k.span)))
			commands[victim].Process.Kill()
		}
		for r, c := range commands {
			err := c.Wait()
			if r == victim {
				continue
			}
			if err != nil {
				t.Errorf("round %d, rank %d, killed was %d: %v\n%s", round, r, victim, err, outs[r])
			}
			if spoke := strings.Contains(outs[r].String(), "The framework finds the files"); spoke != (r == 0) ||
				r > 0 && outs[r].Len() > 0 {
				t.Errorf("round %d: rank %d says %q", round, r, outs[r])
			}
		}
		sameFiles(t, indexFiles(t, filepath.Join(dir, "shared")), whole)
		if t.Failed() {
			t.FailNow()
		}
		if err := os.RemoveAll(filepath.Join(dir, "shared")); err != nil {
			t.Fatal(err)
		}
	}
}

// An error of one rank ends them all with the same status.
func TestIndexRanksFail(t *testing.T) {
	t.Parallel()
	const world = 3
	dir := t.TempDir()
	words := tokenFiles(t, dir, 6, 2000)
	broken := vectors.Index([]int32{5, 6, 7, 8, 9, 10, 11, 12, 13, 14})
	binary.LittleEndian.PutUint32(broken[34+4*4:], 1<<31|5) // the length of sequence 4
	if err := os.WriteFile(filepath.Join(dir, "f3.idx"), broken, 0o644); err != nil {
		t.Fatal(err)
	}
	var commands [world]*exec.Cmd
	var outs [world]*bytes.Buffer
	for r := range world {
		commands[r], outs[r] = rank(dir, r, world, indexArguments(words, "cache")...)
		if err := commands[r].Start(); err != nil {
			t.Fatal(err)
		}
	}
	said := 0
	for r, c := range commands {
		var exit *exec.ExitError
		if err := c.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 1 {
			t.Errorf("rank %d: %v", r, err)
		}
		if strings.Contains(outs[r].String(), "sequence 4 has length -") {
			said++
		}
	}
	if said == 0 || !strings.Contains(outs[0].String(), "sequence 4") {
		t.Errorf("%d ranks say what is wrong; the first says %q", said, outs[0])
	}
}

// Ranks that mpiexec starts on an empty cache share the work, whichever MPI it is of.
func TestIndexUnderMPI(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	dir := t.TempDir()
	words := tokenFiles(t, dir, 6, 2000)
	mustRun(t, dir, indexArguments(words, "whole")...)
	whole := indexFiles(t, filepath.Join(dir, "whole"))
	for _, launcher := range []string{"mpiexec.openmpi --allow-run-as-root --oversubscribe -n", "mpiexec.mpich -n"} {
		words, ranks := words, strings.Fields(launcher)
		if _, err := exec.LookPath(ranks[0]); err != nil {
			t.Logf("%s is not installed", ranks[0])
			continue
		}
		for _, n := range []string{"2", "4"} {
			c := exec.Command(ranks[0], append(append(ranks[1:len(ranks):len(ranks)], n, "mula"),
				indexArguments(words, "shared")...)...)
			c.Dir = dir
			out, err := c.CombinedOutput()
			if err != nil {
				t.Fatalf("%s %s: %v\n%s", launcher, n, err, out)
			}
			if times := strings.Count(string(out), "The framework finds the files"); times != 1 {
				t.Errorf("%s %s: %d ranks speak: %s", launcher, n, times, out)
			}
			sameFiles(t, indexFiles(t, filepath.Join(dir, "shared")), whole)
			if err := os.RemoveAll(filepath.Join(dir, "shared")); err != nil {
				t.Fatal(err)
			}
		}
	}
}
