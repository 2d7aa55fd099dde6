package launch

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"mula/internal/quantity"
)

// At a SIGQUIT, a rank writes the stacks of its goroutines between these lines.
const (
	StacksBegin = "stacks of all goroutines, for a SIGQUIT:\n"
	StacksEnd   = "\nend of the stacks\n"
)

// longestStacks is the number of bytes at the end of a rank's output that are searched for stacks.
const longestStacks = 4 << 20

// rankLog returns the file with the output of a rank of an attempt.
func rankLog(dir string, rank int) string {
	return filepath.Join(dir, fmt.Sprintf("rank-%05d.log", rank))
}

// A rankState is the state of a rank in a run that hangs, by its stacks.
type rankState int

const (
	silent  rankState = iota // it has written no stacks
	busy                     // it was in no exchange with other ranks
	waiting                  // it was in an exchange
)

// exchangeFrame is a function of package comm in a stack. All functions that wait for other ranks
// are there.
var exchangeFrame = regexp.MustCompile(`(?m)^mula/xpu/comm\.`)

// stateOf returns the state of the rank with the given output.
func stateOf(output []byte) rankState {
	begin := bytes.LastIndex(output, []byte(StacksBegin))
	if begin < 0 {
		return silent
	}
	stacks, _, complete := strings.Cut(string(output[begin+len(StacksBegin):]), StacksEnd)
	if !complete {
		return silent
	}
	for stack := range strings.SplitSeq(stacks, "\n\n") { // of a goroutine each
		if strings.Contains(stack, "\nmula/train.Run(") && !exchangeFrame.MatchString(stack) {
			return busy
		}
	}
	return waiting
}

// shownRanks is the number of ranks that a text about a hang names.
const shownRanks = 4

// describeHang describes the ranks for which the others wait, by the output of all ranks in a
// folder: ranks without stacks, and ranks that are in no exchange. hosts has the host of each rank.
// The text is empty if no rank has written stacks, for example because they run under an mpiexec.
// first is the first rank of the text, or -1.
func describeHang(dir string, ranks int, hosts []string) (text string, first int) {
	var of [waiting + 1][]int
	for rank := range ranks {
		output, _ := readTail(rankLog(dir, rank)) // without a file, the rank is silent
		state := stateOf(output)
		of[state] = append(of[state], rank)
	}
	if len(of[silent]) == ranks {
		return "", -1
	}
	first = -1
	for state, why := range []string{silent: "wrote no stacks: stopped, or blocked in the kernel or in a library",
		busy: "not in an exchange with other ranks"} {
		if len(of[state]) == 0 {
			continue
		}
		if first < 0 {
			first = of[state][0]
		}
		var names []string
		for i, rank := range of[state] {
			if i == shownRanks {
				names = append(names, fmt.Sprintf("%d more", len(of[state])-i))
				break
			}
			name := fmt.Sprintf("rank %d", rank)
			if rank < len(hosts) {
				name += " on " + hosts[rank]
			}
			names = append(names, name)
		}
		text += fmt.Sprintf("; %s (%s)", strings.Join(names, ", "), why)
	}
	return text + "; waiting in an exchange: " + quantity.Plural(int64(len(of[waiting])), "rank"), first
}

// readTail reads the last bytes of a file.
func readTail(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	return io.ReadAll(io.NewSectionReader(f, max(0, info.Size()-longestStacks), longestStacks))
}
