package testwait

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// hang is set in the environment of the process whose condition never holds.
const hang = "MULA_TESTWAIT_HANG"

func TestUntil(t *testing.T) {
	if os.Getenv(hang) != "" {
		<-Context(t).Done()
		Until(t, "the moon is made of cheese", func() bool { return false })
	}
	n := 0
	Until(t, "three calls", func() bool { n++; return n == 3 })
	if n != 3 {
		t.Errorf("%d calls", n)
	}
	if err := Context(t).Err(); err != nil {
		t.Error(err)
	}
	// The reserve is longer than the time limit of this process, so waits end at once.
	c := exec.Command(os.Args[0], "-test.run=^TestUntil$", "-test.timeout=15s")
	c.Env = append(os.Environ(), hang+"=1")
	out, err := c.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "not before the deadline of the test: the moon") {
		t.Errorf("%v: %s", err, out)
	}
}
