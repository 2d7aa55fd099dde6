package launch

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"mula/internal/filesystem"
	"mula/internal/launchers"
	"mula/train/collective"
	"mula/train/record"
)

// stallVariable names the environment variable with the time without progress after which a rank
// looks for the launcher's question. Ranks that make progress read and write no file for it.
const stallVariable = "MULA_STALL"

const (
	// askFile is a file in the folder of an attempt. It is empty until the launcher asks for
	// stacks.
	askFile = "ask"
	// answersPrefix and the name of a host is a file with the answers of the host's ranks.
	answersPrefix = "answers-"

	longestStall = 30 * time.Second
	asksPerStall = 3               // how often a rank looks for the question in the time of a stall
	answerTime   = 5 * time.Second // for the answers of ranks that have seen the question
)

// stall returns the time without progress after which ranks look for a question. It is shorter than
// every limit.
func (l Limits) stall() time.Duration {
	stall := longestStall
	for _, floor := range l.Floor {
		stall = min(stall, floor/4)
	}
	return max(stall, 50*time.Millisecond)
}

// Answers answers the launcher's question in a run that hangs, under every program that starts
// ranks. A nil Answers does nothing.
type Answers struct {
	folder   string // of the attempt
	stall    time.Duration
	progress atomic.Int64 // time of the last step, in nanoseconds
	stop     chan struct{}
	done     chan struct{}
}

// NewAnswers starts to watch this rank. It returns nil without a launcher.
func NewAnswers() *Answers {
	beats := os.Getenv(record.HeartbeatVariable)
	stall, err := time.ParseDuration(os.Getenv(stallVariable))
	if beats == "" || err != nil || stall < asksPerStall {
		return nil
	}
	a := &Answers{folder: filepath.Dir(beats), stall: stall, stop: make(chan struct{}), done: make(chan struct{})}
	a.Progressed()
	go a.watch()
	return a
}

// Progressed records that this rank has completed a step.
func (a *Answers) Progressed() {
	if a != nil {
		a.progress.Store(time.Now().UnixNano())
	}
}

// Close ends the watch.
func (a *Answers) Close() {
	if a != nil {
		close(a.stop)
		<-a.done
	}
}

// watch answers one question. The ranks of a run look for it at different times.
func (a *Answers) watch() {
	defer close(a.done)
	interval := a.stall / asksPerStall
	wait := time.NewTimer(rand.N(interval))
	defer wait.Stop()
	for {
		select {
		case <-a.stop:
			return
		case <-wait.C:
		}
		wait.Reset(interval)
		if time.Since(time.Unix(0, a.progress.Load())) < a.stall {
			continue
		}
		if question, err := os.ReadFile(filepath.Join(a.folder, askFile)); err != nil || len(question) == 0 {
			continue
		}
		_ = a.answer() // without an answer the launcher names this rank
		return
	}
}

// answer appends the stacks of this rank to the file of its host. One write has all of them,
// because other ranks of the host write, too.
func (a *Answers) answer() error {
	rank := 0
	if process, ok := launchers.Find(); ok {
		rank = process.Rank
	}
	host := collective.Hostname()
	stacks := allStacks()
	state, exchange := stateIn(stacks)
	text := "not in an exchange"
	if state == waiting {
		text = "waiting in " + exchange
	}
	f, err := os.OpenFile(filepath.Join(a.folder, answersPrefix+filepath.Base(host)),
		os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = fmt.Fprintf(f, "rank %d on %s, process %d: %s\n%s%s%s", rank, host, os.Getpid(), text, stacksBegin, stacks,
		StacksEnd)
	return err
}

// askRanks asks the ranks of an attempt for their stacks.
func askRanks(fsys filesystem.FS, folder string) error {
	return filesystem.WriteFile(fsys, filepath.Join(folder, askFile), []byte("stacks\n"), 0o644)
}

// A rankAnswer is the first line of a rank's answer.
type rankAnswer struct {
	host     string
	state    rankState
	exchange string
}

var answerLine = regexp.MustCompile(`^rank (\d+) on (\S+), process \d+: (?:not in an exchange|waiting in (.*))$`)

// readAnswers returns the answers of ranks. It skips files that cannot be read: their ranks count
// as silent.
func readAnswers(fsys filesystem.FS, folder string) map[int]rankAnswer {
	answers := map[int]rankAnswer{}
	entries, _ := fsys.ReadDir(folder)
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), answersPrefix) {
			continue
		}
		f, err := filesystem.Open(fsys, filepath.Join(folder, e.Name()))
		if err != nil {
			continue
		}
		for in := bufio.NewReader(f); ; {
			line, err := in.ReadString('\n')
			if found := answerLine.FindStringSubmatch(strings.TrimSuffix(line, "\n")); found != nil {
				a := rankAnswer{host: found[2], state: busy}
				if found[3] != "" {
					a.state, a.exchange = waiting, found[3]
				}
				if rank, err := strconv.Atoi(found[1]); err == nil {
					answers[rank] = a
				}
			}
			if err != nil {
				break
			}
		}
		f.Close()
	}
	return answers
}
