package launch

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
)

// An agentOrder is what an agent is told first, on a line of its own: what it runs. The environment
// has the run's secret, which is why it comes this way and not on a command line that everybody on
// the host can read. Later lines are numbers of signals.
type agentOrder struct {
	Dir         string   `json:"dir"`
	Command     []string `json:"command"`
	Environment []string `json:"environment"`
}

// Agent runs a rank for a launcher on another host, which has started it by a remote shell and
// speaks to it on orders. It returns the rank's exit code, or 128 and the number of the signal that
// ended it. When orders ends, the launcher or the way to it is gone, and the rank is killed.
func Agent(orders io.Reader, stdout, stderr io.Writer) (int, error) {
	in := bufio.NewReader(orders)
	line, err := in.ReadBytes('\n')
	if err != nil {
		return ExitFailed, fmt.Errorf("reading the launcher's order: %w", err)
	}
	var order agentOrder
	if err := json.Unmarshal(line, &order); err != nil || len(order.Command) == 0 {
		return ExitFailed, errors.New("the launcher's order is not one: is mula the same version on all hosts?")
	}
	cmd := exec.Command(order.Command[0], order.Command[1:]...)
	cmd.Dir, cmd.Env = order.Dir, append(os.Environ(), order.Environment...)
	cmd.Stdout, cmd.Stderr = stdout, stderr
	leadGroup(cmd)
	if err := cmd.Start(); err != nil {
		return ExitFailed, err
	}
	go func() {
		for {
			line, err := in.ReadString('\n')
			if err != nil {
				signalGroup(cmd.Process.Pid, syscall.SIGKILL)
				return
			}
			if number, err := strconv.Atoi(strings.TrimSpace(line)); err == nil {
				signalGroup(cmd.Process.Pid, syscall.Signal(number))
			}
		}
	}()
	_ = cmd.Wait() // its error is in the state
	e := exitOf(Exit{}, cmd.ProcessState, false)
	if e.Signal != 0 {
		return 128 + int(e.Signal), nil
	}
	return min(e.Code, remoteShellFailed-1), nil
}
