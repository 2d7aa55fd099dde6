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

	"mula/internal/filesystem"
	"mula/train/record"
)

// RecordFile is the name of the record of attempts in a run directory.
const RecordFile = "launch.jsonl"

// An Attempt is a line of launch.jsonl.
type Attempt struct {
	Number  int       `json:"attempt"` // from 1, over all launchers of the run
	With    string    `json:"with"`    // what started the ranks
	Hosts   []string  `json:"hosts"`   // of each rank at the start
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

	Replaced []Replacement `json:"replaced,omitempty"` // in the attempt, by hot spares

	unreachable bool   // a host did not answer
	genuine     string // remedy for a repeated failure; "" for a failure that a host may have caused
}

// openRecord opens launch.jsonl for appending and returns the number of its last attempt. It cuts
// off an incomplete last line.
func openRecord(fsys filesystem.FS, path string) (f filesystem.File, last int, err error) {
	if f, err = fsys.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644); err != nil {
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
func appendRecord(f filesystem.File, a Attempt) error {
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

// blamed returns the failures for which hosts are out of use, from all failures of the run. It
// skips failures before a moment, failures that were forgiven, and failures that happened on two
// hosts at the same step, which are the run's own.
func blamed(failures []record.Failure, since time.Time) []record.Failure {
	var found []record.Failure
	for _, f := range failures {
		if f.Kind == record.FailureForgiven {
			found = slices.DeleteFunc(found, func(b record.Failure) bool { return f.Host == "" || f.Host == b.Host })
		}
		if at, err := time.Parse(time.RFC3339, f.Time); f.WrongValues() && (err != nil || !at.Before(since)) {
			found = append(found, f)
		}
	}
	return slices.DeleteFunc(slices.Clone(found), func(f record.Failure) bool {
		return slices.ContainsFunc(found, func(other record.Failure) bool {
			return f.Repeats(other) && f.Host != other.Host
		})
	})
}

// forgive appends to failures.jsonl that a host is used again, or all hosts for "".
func forgive(fsys filesystem.FS, path, host, why string) error {
	return record.AppendFailure(fsys, path, record.Failure{Time: record.Timestamp(time.Now()), Host: host, Rank: -1,
		Kind: record.FailureForgiven, Error: why})
}

// A failureLog reads the lines that ranks append to failures.jsonl.
type failureLog struct {
	fsys filesystem.FS
	path string
	old  []record.Failure // before this launch
	at   int64            // bytes that have been read
}

func openFailures(fsys filesystem.FS, path string) (*failureLog, error) {
	l := &failureLog{fsys: fsys, path: path}
	var err error
	l.old, err = l.next()
	return l, err
}

// read returns the failures since the last call. It skips lines that cannot be read: the exits of
// the ranks are enough.
func (l *failureLog) read() []record.Failure {
	failures, _ := l.next()
	return failures
}

func (l *failureLog) next() (failures []record.Failure, err error) {
	f, err := filesystem.Open(l.fsys, l.path)
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
		var failure record.Failure
		if json.Unmarshal(line, &failure) == nil {
			// else a rank was killed while it wrote, and another rank continued its line
			failures = append(failures, failure)
		}
		return nil
	})
	l.at += whole
	return failures, err
}
