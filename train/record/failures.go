package record

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"mula/internal/filesystem"
)

// FailuresFile is the file of a run directory with failures and their hosts.
const FailuresFile = "failures.jsonl"

// The kinds of failures. Ranks write all of them but FailureForgiven, which mula launch writes.
const (
	FailureNotFinite = "not_finite"      // a loss or gradient of this rank alone was not finite
	FailureReplica   = "replica_differs" // its weights differed from its replicas
	FailureDiverged  = "diverged"        // values that are not finite ended the run, and no single host computed them
	FailureError     = "error"           // any other error that ended the run
	// the launcher uses the host again, or all hosts if Host is ""; failures before this line do
	// not count
	FailureForgiven = "forgiven"
)

// Failure is a line of failures.jsonl.
type Failure struct {
	Time  string `json:"time"` // RFC 3339
	Host  string `json:"host"` // "" for a failure of the whole run
	Rank  int    `json:"rank"` // -1 for a failure of the whole run
	Step  int64  `json:"step"` // steps done before it
	Kind  string `json:"kind"`
	Error string `json:"error"`
}

// WrongValues reports whether a host computed wrong values.
func (f Failure) WrongValues() bool { return f.Kind == FailureNotFinite || f.Kind == FailureReplica }

// Repeats reports whether a failure is the same as an earlier one, perhaps on another host.
func (f Failure) Repeats(earlier Failure) bool {
	return f.Kind == earlier.Kind && f.Step == earlier.Step
}

func (f Failure) String() string {
	who := fmt.Sprintf("rank %d on %s", f.Rank, f.Host)
	if f.Rank < 0 {
		who = "the run"
	}
	switch f.Kind {
	case FailureNotFinite:
		return fmt.Sprintf("%s had NaN or Inf values at step %d", who, f.Step)
	case FailureReplica:
		return fmt.Sprintf("%s had weights that differ from the weights of its replicas at step %d", who, f.Step)
	case FailureDiverged:
		return fmt.Sprintf("%s diverged at step %d: values are not finite, and no single host is their source", who,
			f.Step)
	}
	return fmt.Sprintf("%s failed: %s at step %d", who, f.Error, f.Step)
}

// AppendFailure appends a line to failures.jsonl, whose path is given.
func AppendFailure(fsys filesystem.FS, path string, failure Failure) error {
	line, err := json.Marshal(failure)
	if err != nil {
		return err
	}
	f, err := fsys.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(append(line, '\n')) // one write: another rank may append, too
	return errors.Join(err, f.Close())
}
