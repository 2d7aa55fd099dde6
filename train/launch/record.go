package launch

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"
)

// RecordFile is the name of the record of attempts in a run directory.
const RecordFile = "launch.jsonl"

// failuresFile is the name of the file in a run directory to which a rank that finds its values wrong appends a line before it leaves.
const failuresFile = "failures.jsonl"

// An Attempt is a line of launch.jsonl.
type Attempt struct {
	Number  int       `json:"attempt"` // from 1, over all launchers of the run
	With    string    `json:"with"`    // what started the ranks
	Hosts   []string  `json:"hosts"`   // of each rank
	Start   time.Time `json:"start"`
	End     time.Time `json:"end"`
	Outcome Outcome   `json:"outcome"`
	Reason  string    `json:"reason"`
	Blamed  string    `json:"blamed,omitempty"` // host
	Rank    *int      `json:"rank,omitempty"`   // that failed first; -1 if it is not known which
	From    int64     `json:"from"`             // steps done when the attempt began
	Step    int64     `json:"step"`             // steps done when it ended, those lost with it among them
	Steps   int64     `json:"steps"`            // done in between
	Setup   float64   `json:"setup_seconds"`    // from the start of rank 0 to its first step; 0 if it never came there

	unreachable bool // a host did not answer
	genuine     bool // failed the same way on two hosts
}

// openRecord opens launch.jsonl for more attempts and returns the number of the last one in it. A last line that is not whole is cut off.
func openRecord(path string) (f *os.File, last int, err error) {
	if f, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644); err != nil {
		return nil, 0, err
	}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	whole, err := readLines(f, path, func(line []byte) error {
		var a Attempt
		if err := json.Unmarshal(line, &a); err != nil {
			return err
		}
		last = max(last, a.Number)
		return nil
	})
	if err != nil {
		return nil, 0, err
	}
	if err := f.Truncate(whole); err != nil {
		return nil, 0, err
	}
	_, err = f.Seek(whole, io.SeekStart)
	return f, last, err
}

// appendRecord writes an attempt, and brings it to disk.
func appendRecord(f *os.File, a Attempt) error {
	line, err := json.Marshal(a)
	if err != nil {
		return err
	}
	if _, err := f.Write(append(line, '\n')); err != nil {
		return err
	}
	return f.Sync()
}

// readLines gives each whole line to take, and returns the number of bytes in them.
func readLines(r io.Reader, path string, take func(line []byte) error) (int64, error) {
	in, whole := bufio.NewReader(r), int64(0)
	for number := 1; ; number++ {
		line, err := in.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return whole, nil
		}
		if err != nil {
			return whole, fmt.Errorf("%s: %w", path, err)
		}
		if text := bytes.TrimSpace(line); len(text) > 0 {
			if err := take(text); err != nil {
				return whole, fmt.Errorf("%s, line %d: %w", path, number, err)
			}
		}
		whole += int64(len(line))
	}
}

// A Failure is a line of failures.jsonl.
type Failure struct {
	Time  string `json:"time"`
	Host  string `json:"host"`
	Rank  int    `json:"rank"`
	Step  int64  `json:"step"`
	Kind  string `json:"kind"` // not_finite, replica_differs, error
	Error string `json:"error"`
}

// damning reports whether a failure speaks against its host: it computed something wrong.
func (f Failure) damning() bool { return f.Kind == "not_finite" || f.Kind == "replica_differs" }

func (f Failure) String() string {
	what := map[string]string{"not_finite": "had values that are not finite", "replica_differs": "had weights that differ from those of its replicas"}[f.Kind]
	if what == "" {
		what = "failed: " + f.Error
	}
	return fmt.Sprintf("rank %d on %s %s at step %d", f.Rank, f.Host, what, f.Step)
}

// A failureLog reads what ranks append to failures.jsonl.
type failureLog struct {
	path string
	old  []Failure // that were there before
	at   int64     // what has been read
}

func openFailures(path string) (*failureLog, error) {
	l := &failureLog{path: path}
	var err error
	l.old, err = l.next()
	return l, err
}

// read returns the failures since the last call. One that cannot be read is none: the ranks' exits say enough.
func (l *failureLog) read() []Failure {
	failures, _ := l.next()
	return failures
}

func (l *failureLog) next() (failures []Failure, err error) {
	f, err := os.Open(l.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if _, err := f.Seek(l.at, io.SeekStart); err != nil {
		return nil, err
	}
	whole, err := readLines(f, l.path, func(line []byte) error {
		var failure Failure
		if json.Unmarshal(line, &failure) == nil { // else a rank was killed while it wrote, and another went on in its line
			failures = append(failures, failure)
		}
		return nil
	})
	l.at += whole
	return failures, err
}
