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
	"slices"
	"time"
)

// RecordFile is the name of the record of attempts in a run directory.
const RecordFile = "launch.jsonl"

// failuresFile is the name of the file in a run directory to which a rank with wrong values appends
// a line before it exits.
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
	Rank    *int      `json:"rank,omitempty"`   // that failed first; -1 if unknown
	From    int64     `json:"from"`             // steps done at the start
	Step    int64     `json:"step"`             // steps done at the end, including steps after the last checkpoint
	Steps   int64     `json:"steps"`            // done in between
	Setup   float64   `json:"setup_seconds"`    // from the start of rank 0 to its first step; 0 if it did no step

	unreachable bool   // a host did not answer
	genuine     string // remedy for a repeated failure; "" for a failure that a host may have caused
}

// openRecord opens launch.jsonl for appending and returns the number of its last attempt. It cuts
// off an incomplete last line.
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

// appendRecord writes an attempt and syncs the file.
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

// readLines calls take with each complete line, and returns the number of bytes in these lines.
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
				return whole, fmt.Errorf("%s:%d: %w", path, number, err)
			}
		}
		whole += int64(len(line))
	}
}

// A Failure is a line of failures.jsonl.
type Failure struct {
	Time  string `json:"time"`
	Host  string `json:"host"` // "" for the whole run
	Rank  int    `json:"rank"` // -1 for the whole run
	Step  int64  `json:"step"`
	Kind  string `json:"kind"`
	Error string `json:"error"`
}

// The kinds of failures. Ranks write all of them but kindForgiven.
const (
	kindNotFinite = "not_finite"
	kindReplica   = "replica_differs"
	kindDiverged  = "diverged"
	// the launcher uses the host again, or all hosts if Host is ""; failures before this line do
	// not count
	kindForgiven = "forgiven"
)

// damning reports whether a host computed wrong values.
func (f Failure) damning() bool { return f.Kind == kindNotFinite || f.Kind == kindReplica }

// repeats reports whether a failure is the same as an earlier one, perhaps on another host.
func (f Failure) repeats(earlier Failure) bool {
	return f.Kind == earlier.Kind && f.Step == earlier.Step
}

func (f Failure) String() string {
	who := fmt.Sprintf("rank %d on %s", f.Rank, f.Host)
	if f.Rank < 0 {
		who = "the run"
	}
	switch f.Kind {
	case kindNotFinite:
		return fmt.Sprintf("%s had NaN or Inf values at step %d", who, f.Step)
	case kindReplica:
		return fmt.Sprintf("%s had weights that differ from the weights of its replicas at step %d", who, f.Step)
	case kindDiverged:
		return fmt.Sprintf("%s diverged at step %d: values are not finite, and no single host is their source", who,
			f.Step)
	}
	return fmt.Sprintf("%s failed: %s at step %d", who, f.Error, f.Step)
}

// blamed returns the failures for which hosts are out of use, from all failures of the run. It
// skips failures before a moment, failures that were forgiven, and failures that happened on two
// hosts at the same step, which are the run's own.
func blamed(failures []Failure, since time.Time) []Failure {
	var found []Failure
	for _, f := range failures {
		if f.Kind == kindForgiven {
			found = slices.DeleteFunc(found, func(b Failure) bool { return f.Host == "" || f.Host == b.Host })
		}
		if at, err := time.Parse(time.RFC3339, f.Time); f.damning() && (err != nil || !at.Before(since)) {
			found = append(found, f)
		}
	}
	return slices.DeleteFunc(slices.Clone(found), func(f Failure) bool {
		return slices.ContainsFunc(found, func(other Failure) bool { return f.repeats(other) && f.Host != other.Host })
	})
}

// forgive appends to failures.jsonl that a host is used again, or all hosts for "".
func forgive(path, host, why string) error {
	line, err := json.Marshal(Failure{Time: time.Now().UTC().Format(time.RFC3339), Host: host, Rank: -1,
		Kind: kindForgiven, Error: why})
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(append(line, '\n'))
	return errors.Join(err, f.Close())
}

// A failureLog reads the lines that ranks append to failures.jsonl.
type failureLog struct {
	path string
	old  []Failure // before this launch
	at   int64     // bytes that have been read
}

func openFailures(path string) (*failureLog, error) {
	l := &failureLog{path: path}
	var err error
	l.old, err = l.next()
	return l, err
}

// read returns the failures since the last call. It skips lines that cannot be read: the exits of
// the ranks are enough.
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
		if json.Unmarshal(line, &failure) == nil {
			// else a rank was killed while it wrote, and another rank continued its line
			failures = append(failures, failure)
		}
		return nil
	})
	l.at += whole
	return failures, err
}
