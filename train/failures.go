package train

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
)

// failuresFile is the file of a run directory with failures and their hosts.
const failuresFile = "failures.jsonl"

// The kinds of failures.
const (
	failureNotFinite = "not_finite"      // a loss or gradient of this rank alone was not finite
	failureReplica   = "replica_differs" // its weights differed from its replicas
	failureDiverged  = "diverged"        // values that are not finite ended the run, and no single host computed them
	failureError     = "error"           // any other error that ended the run
)

// failureRecord is a line of failures.jsonl.
type failureRecord struct {
	Time  string `json:"time"` // RFC 3339
	Host  string `json:"host"` // "" for a failure of the whole run
	Rank  int    `json:"rank"` // -1 for a failure of the whole run
	Step  int64  `json:"step"` // steps done before it
	Kind  string `json:"kind"`
	Error string `json:"error"`
}

// appendFailure appends a line to the failures.jsonl of a run directory.
func appendFailure(dir string, failure failureRecord) error {
	line, err := json.Marshal(failure)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(dir, failuresFile), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(append(line, '\n')) // one write: another rank may append, too
	return errors.Join(err, f.Close())
}
