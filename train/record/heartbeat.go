package record

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"slices"
	"strconv"
	"time"

	"mula/internal/filesystem"
)

// HeartbeatVariable is the environment variable that names the file in which rank 0 records its
// progress. Without the variable, no file is written.
const HeartbeatVariable = "MULA_HEARTBEAT"

// A Section is an activity of a run. A watchdog has a time limit for each section, since a save may
// take longer than many steps.
type Section string

// The sections of a run.
const (
	SectionSetup      Section = "setup"      // from the start of the process to the first step
	SectionStep       Section = "step"       // a step
	SectionEvaluate   Section = "evaluate"   // evaluation on the validation split
	SectionCheckpoint Section = "checkpoint" // writing a checkpoint, or restoring one
)

// Sections lists all sections, in the order in which a run reaches them.
var Sections = []Section{SectionSetup, SectionStep, SectionEvaluate, SectionCheckpoint}

// A Heartbeat is the content of the heartbeat file: the current section, and the time spent in each
// section. docs/formats/run.md describes the file.
type Heartbeat struct {
	PID     int               `json:"pid"` // process id of rank 0
	Section Section           `json:"section"`
	Step    int64             `json:"step"` // steps done; also the number of the current or next step
	From    int64             `json:"from"` // steps done when this process started its first step
	Time    time.Time         `json:"time"` // when the section began, by the clock of rank 0's host
	Ended   Ended             `json:"ended"`
	Slow    *int              `json:"slow,omitempty"` // the slowest of the slow ranks of the last step; nil: none
	Spent   map[Section]Spent `json:"spent"`
	// of the group of ranks: the number of times that hot spares have replaced ranks of the attempt
	Generation int `json:"generation,omitempty"`
}

// Ended is the reason for the end of a run. The exit code of mpiexec is less precise.
type Ended string

// The ends of a run that did not fail.
const (
	NotEnded        Ended = ""
	EndedDone       Ended = "done"       // all steps are done
	EndedStopped    Ended = "stopped"    // stopped after a checkpoint
	EndedTerminated Ended = "terminated" // stopped after a checkpoint by a SIGTERM that only ranks received
)

// Spent is the time that one process has spent in a section.
type Spent struct {
	Times   int64   `json:"times"` // number of finished visits to the section
	Seconds float64 `json:"seconds"`
	Longest float64 `json:"longest"` // seconds of the longest visit
}

const heartbeatSum = `,"sum":` // at the end of a heartbeat, with the CRC-32 of the preceding bytes

// heartbeatBytes is the constant length of the heartbeat file, so that a write replaces the
// complete file.
const heartbeatBytes = 640

// ReadHeartbeat reads a heartbeat file. It fails if the file does not exist or is being written. In
// the latter case the next call succeeds.
func ReadHeartbeat(fsys filesystem.FS, path string) (Heartbeat, error) {
	f, err := filesystem.Open(fsys, path)
	if err != nil {
		return Heartbeat{}, err
	}
	defer f.Close()
	text := make([]byte, heartbeatBytes)
	if _, err := io.ReadFull(f, text); err != nil {
		return Heartbeat{}, fmt.Errorf("%s: %w", path, err)
	}
	var h struct {
		Heartbeat
		Sum uint32 `json:"sum"`
	}
	if err := json.Unmarshal(text, &h); err != nil {
		return Heartbeat{}, fmt.Errorf("%s: %w", path, err)
	}
	if end := bytes.LastIndex(text, []byte(heartbeatSum)); end < 0 || crc32.ChecksumIEEE(text[:end]) != h.Sum {
		return Heartbeat{}, fmt.Errorf("%s is incomplete", path)
	}
	return h.Heartbeat, nil
}

// A HeartbeatWriter writes the heartbeat file of a run. A nil heartbeat writes nothing.
type HeartbeatWriter struct {
	fsys  filesystem.FS
	path  string
	now   func() time.Time
	began time.Time // of the section, monotonic
	last  Heartbeat
	spent [4]Spent // by place in Sections
	text  [heartbeatBytes]byte
}

// NewHeartbeat starts with the section setup. path is the value of [HeartbeatVariable]. If it
// is "", NewHeartbeat returns nil. generation is the group's. Rank 0 calls it before anything else.
func NewHeartbeat(fsys filesystem.FS, path string, generation int) (*HeartbeatWriter, error) {
	if path == "" {
		return nil, nil
	}
	h := &HeartbeatWriter{fsys: fsys, path: path, now: time.Now,
		last: Heartbeat{PID: os.Getpid(), From: -1, Generation: generation}}
	if err := h.write(SectionSetup, 0); err != nil {
		return nil, fmt.Errorf("%s: %w", HeartbeatVariable, err)
	}
	return h, nil
}

// Beat records the start of a section after step steps. It takes microseconds and does not wait for
// the disk. A failed write does not end the run: the watchdog sees a run without progress.
func (h *HeartbeatWriter) Beat(section Section, step int64) {
	if h == nil {
		return
	}
	_ = h.write(section, step)
}

// End records the end of the run after step steps, after all its files are on disk.
func (h *HeartbeatWriter) End(ended Ended, step int64) {
	if h == nil {
		return
	}
	h.last.Ended = ended
	_ = h.write(h.last.Section, step)
}

// Slow sets the slow rank of the next beats, or -1 for none.
func (h *HeartbeatWriter) Slow(rank int) {
	if h == nil {
		return
	}
	h.last.Slow = nil
	if rank >= 0 {
		h.last.Slow = &rank
	}
}

// write replaces the file's content in one write. It opens and closes the file each time, because a
// network file system shows changes to other machines after the close.
func (h *HeartbeatWriter) write(section Section, step int64) error {
	now := h.now()
	if h.last.Section != "" {
		spent, seconds := &h.spent[slices.Index(Sections, h.last.Section)], now.Sub(h.began).Seconds()
		spent.Times++
		spent.Seconds += seconds
		spent.Longest = max(spent.Longest, seconds)
	}
	h.began = now
	h.last.Section, h.last.Step, h.last.Time = section, step, now
	if section != SectionSetup && h.last.From < 0 {
		h.last.From = step
	}
	f, err := h.fsys.OpenFile(h.path, os.O_WRONLY|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(h.encode(), 0)
	return errors.Join(err, f.Close())
}

// encode returns the content of the file: a JSON object padded with spaces, and a line feed.
func (h *HeartbeatWriter) encode() []byte {
	b := h.text[:0]
	b = append(b, `{"pid":`...)
	b = strconv.AppendInt(b, int64(h.last.PID), 10)
	b = append(b, `,"section":"`...)
	b = append(b, h.last.Section...)
	b = append(b, `","step":`...)
	b = strconv.AppendInt(b, h.last.Step, 10)
	b = append(b, `,"from":`...)
	b = strconv.AppendInt(b, max(h.last.From, 0), 10)
	b = append(b, `,"time":"`...)
	b = h.last.Time.AppendFormat(b, time.RFC3339Nano)
	b = append(b, `","ended":"`...)
	b = append(b, h.last.Ended...)
	b = append(b, '"')
	if h.last.Slow != nil {
		b = append(b, `,"slow":`...)
		b = strconv.AppendInt(b, int64(*h.last.Slow), 10)
	}
	if h.last.Generation > 0 {
		b = append(b, `,"generation":`...)
		b = strconv.AppendInt(b, int64(h.last.Generation), 10)
	}
	b = append(b, `,"spent":{`...)
	for i, section := range Sections {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, '"')
		b = append(b, section...)
		b = append(b, `":{"times":`...)
		b = strconv.AppendInt(b, h.spent[i].Times, 10)
		b = append(b, `,"seconds":`...)
		b = strconv.AppendFloat(b, h.spent[i].Seconds, 'f', 6, 64)
		b = append(b, `,"longest":`...)
		b = strconv.AppendFloat(b, h.spent[i].Longest, 'f', 6, 64)
		b = append(b, '}')
	}
	b = append(b, '}')
	sum := crc32.ChecksumIEEE(b)
	b = append(b, heartbeatSum...)
	b = strconv.AppendUint(b, uint64(sum), 10)
	b = append(b, '}')
	for len(b) < heartbeatBytes-1 {
		b = append(b, ' ')
	}
	return append(b, '\n')
}
