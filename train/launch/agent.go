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

// An agentOrder is the first line that an agent reads: the command to run. The environment contains
// the run's secret, so it is not on a command line, which all users of the host can read. Later
// lines are numbers of signals, and with Assigned also assignments, and releaseOrder.
type agentOrder struct {
	Dir         string   `json:"dir"`
	Command     []string `json:"command"`
	Environment []string `json:"environment"`
	Assigned    bool     `json:"assigned,omitempty"` // the process reads assignments
}

// releaseOrder ends the assignments of a process.
const releaseOrder = "release"

// Agent runs a rank for a launcher on another host, which starts the agent with a remote shell and
// writes to orders. Agent returns the rank's exit code, or 128 plus the number of the signal that
// ended the rank. At the end of orders, the launcher or the connection is lost, and Agent kills the
// rank.
func Agent(orders io.Reader, stdout, stderr io.Writer) (int, error) {
	in := bufio.NewReader(orders)
	line, err := in.ReadBytes('\n')
	if err != nil {
		return ExitFailed, fmt.Errorf("reading the launcher's order: %w", err)
	}
	var order agentOrder
	if err := json.Unmarshal(line, &order); err != nil || len(order.Command) == 0 {
		return ExitFailed,
			errors.New("the launcher's order cannot be read; install the same version of mula on all hosts")
	}
	cmd := exec.Command(order.Command[0], order.Command[1:]...)
	cmd.Dir, cmd.Env = order.Dir, append(os.Environ(), order.Environment...)
	cmd.Stdout, cmd.Stderr = stdout, stderr
	leadGroup(cmd)
	var assignments *os.File
	if order.Assigned {
		read, write, err := os.Pipe()
		if err != nil {
			return ExitFailed, err
		}
		defer read.Close()
		defer write.Close()
		cmd.ExtraFiles, assignments = []*os.File{read}, write
		cmd.Env = append(cmd.Env, assignVariable+"=3") // the first of ExtraFiles
	}
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
			switch {
			case assignments == nil:
			case strings.HasPrefix(line, "{"):
				_, _ = assignments.WriteString(line) // without it the process does not join its group
				continue
			case strings.TrimSpace(line) == releaseOrder:
				assignments.Close()
				continue
			}
			if number, err := strconv.Atoi(strings.TrimSpace(line)); err == nil {
				signalGroup(cmd.Process.Pid, syscall.Signal(number))
			}
		}
	}()
	_ = cmd.Wait() // the state has the error
	e := exitOf(Exit{}, cmd.ProcessState, false)
	if e.Signal != 0 {
		return 128 + int(e.Signal), nil
	}
	return min(e.Code, remoteShellFailed-1), nil
}
