package launch

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"

	"mula/internal/filesystem"
	"mula/internal/quantity"
)

// A rank writes the stacks of its goroutines between these lines, at a SIGQUIT or as an answer to
// the launcher.
const (
	stacksBegin = "stacks of all goroutines:\n"
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
var exchangeFrame = regexp.MustCompile(`^mula/xpu/comm\.(?:\(\*?\w+\)\.)?(\w+)`)

// stateOf returns the state of the rank with the given output, and the exchange in which it waits.
func stateOf(output []byte) (state rankState, exchange string) {
	begin := bytes.LastIndex(output, []byte(stacksBegin))
	if begin < 0 {
		return silent, ""
	}
	stacks, _, complete := strings.Cut(string(output[begin+len(stacksBegin):]), StacksEnd)
	if !complete {
		return silent, ""
	}
	return stateIn(stacks)
}

// stateIn returns the state of the rank with the given stacks.
func stateIn(stacks string) (state rankState, exchange string) {
	for stack := range strings.SplitSeq(stacks, "\n\n") { // of a goroutine each
		if !strings.Contains(stack, "\nmula/train.Run(") {
			continue
		}
		lines := strings.Split(stack, "\n") // two for each frame, the innermost first
		for i, line := range slices.Backward(lines) {
			if found := exchangeFrame.FindStringSubmatch(line); found != nil {
				if i+2 < len(lines) {
					caller := strings.TrimPrefix(lines[i+2], "mula/")
					found[1] += " in " + caller[:max(0, strings.LastIndexByte(caller, '('))]
				}
				return waiting, found[1]
			}
		}
		return busy, ""
	}
	return waiting, "the setup"
}

// allStacks returns the stacks of all goroutines.
func allStacks() string {
	text := make([]byte, 64<<10)
	n := runtime.Stack(text, true)
	for n == len(text) && n < 64<<20 { // there may be more
		text = make([]byte, 2*n)
		n = runtime.Stack(text, true)
	}
	return string(text[:n])
}

// WriteStacks writes the stacks of all goroutines in one call.
func WriteStacks(w io.Writer) error {
	_, err := fmt.Fprintf(w, "%s%s%s", stacksBegin, allStacks(), StacksEnd)
	return err
}

// shownRanks is the number of ranks that a text about a hang names.
const shownRanks = 4

// shownExchanges is the number of exchanges that a text about a hang names.
const shownExchanges = 3

// A hangReport describes the ranks for which the others wait: ranks without stacks, and ranks that
// are in no exchange.
type hangReport struct {
	text  string // empty if no rank has written stacks
	first int    // the first of these ranks, or -1
	host  string // of all these ranks; empty if it is unknown, or if they are on several hosts
}

// describeHang returns the report about a hang. A folder has the output of the ranks and their
// answers. hosts has the host of each rank.
func describeHang(fsys filesystem.FS, dir string, ranks int, hosts []string) hangReport {
	var of [waiting + 1][]int
	exchanges := map[string]int{} // numbers of waiting ranks
	answers := readAnswers(fsys, dir)
	for rank := range ranks {
		a, ok := answers[rank]
		if !ok {
			output, _ := readTail(fsys, rankLog(dir, rank)) // without a file, the rank is silent
			a.state, a.exchange = stateOf(output)
		}
		of[a.state] = append(of[a.state], rank)
		if a.state == waiting {
			exchanges[a.exchange]++
		}
	}
	if len(of[silent]) == ranks {
		return hangReport{first: -1}
	}
	text, first := "", -1
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
			} else if host := answers[rank].host; host != "" {
				name += " on " + host
			}
			names = append(names, name)
		}
		text += fmt.Sprintf("; %s (%s)", strings.Join(names, ", "), why)
	}
	text += "; waiting in an exchange: " + quantity.Plural(int64(len(of[waiting])), "rank")
	names := slices.SortedFunc(maps.Keys(exchanges), func(a, b string) int {
		return cmp.Or(cmp.Compare(exchanges[b], exchanges[a]), cmp.Compare(a, b))
	})
	for i, name := range names[:min(len(names), shownExchanges)] {
		names[i] = fmt.Sprintf("%s: %d", name, exchanges[name])
	}
	if len(names) > 0 {
		text += " (" + strings.Join(names[:min(len(names), shownExchanges)], ", ") + ")"
	}
	report := hangReport{text: text, first: first}
	if awaited := slices.Concat(of[silent], of[busy]); len(of[waiting]) > 0 && first >= 0 && first < len(hosts) &&
		!slices.ContainsFunc(awaited, func(rank int) bool { return hosts[rank] != hosts[first] }) {
		report.host = hosts[first]
	}
	return report
}

// readTail reads the last bytes of a file.
func readTail(fsys filesystem.FS, path string) ([]byte, error) {
	f, err := filesystem.Open(fsys, path)
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
