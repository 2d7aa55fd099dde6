package fingerprint

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// LogFile is the name of the fingerprint log in the directory of a run (docs/formats/run.md).
const LogFile = "fingerprints.jsonl"

// OlderLogFile returns the name of a run's log of an earlier plan. With "*" in place of the
// plan's fingerprint it is a pattern for all such logs.
func OlderLogFile(plan string) string { return fmt.Sprintf("fingerprints-%.16s.jsonl", plan) }

// A Header is the first line of a fingerprint log. Rank and World describe the process whose
// samples are in the log. Both are 0 in a log of complete steps.
type Header struct {
	Plan           string `json:"plan"` // fingerprint
	SequenceLength int    `json:"sequence_length"`
	BatchSize      int    `json:"batch_size"` // of the step, over all ranks
	Rank           int    `json:"rank,omitempty"`
	World          int    `json:"world,omitempty"`
}

// A Writer writes a fingerprint log: JSON lines, first the header, then one line for each step
// (docs/formats/fingerprints.md).
type Writer struct {
	w    io.Writer
	last int64 // number of the last written step, -1 if none
}

// NewWriter starts a log with its header.
func NewWriter(w io.Writer, header Header) (*Writer, error) {
	l := ResumeWriter(w)
	return l, l.line(header)
}

// ResumeWriter continues a log that already has its header.
func ResumeWriter(w io.Writer) *Writer { return &Writer{w, -1} }

// Write appends a step. Steps must be in ascending order.
func (l *Writer) Write(s StepHash) error {
	if s.Step <= l.last {
		return fmt.Errorf("fingerprint log: step %d after step %d", s.Step, l.last)
	}
	l.last = s.Step
	return l.line(s)
}

// line writes one line with one Write call, so that a log that lost its last lines still ends with
// a complete line.
func (l *Writer) line(v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if _, err := l.w.Write(append(text, '\n')); err != nil {
		return fmt.Errorf("writing the fingerprint log: %w", err)
	}
	return nil
}

// maxLogLine limits the length of a line. mula's own lines have fewer than 300 bytes.
const maxLogLine = 1 << 20

// A Reader reads a fingerprint log. An incomplete line, including the last line, is an error
// that names the line.
type Reader struct {
	Header Header
	name   string
	r      *bufio.Reader
	number int // of the last line read, from 1
	last   int64
}

// NewReader reads the header of a log. Messages use name as the file's name.
func NewReader(r io.Reader, name string) (*Reader, error) {
	l := &Reader{name: name, r: bufio.NewReader(r), last: -1}
	line, err := l.line()
	if errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: the file is empty, so it is not a fingerprint log", name)
	}
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(line, &l.Header); err != nil {
		return nil, l.errorf("not the first line of a fingerprint log: %w", err)
	}
	if h := l.Header; h.SequenceLength < 1 || h.BatchSize < 1 || h.World < 0 || h.Rank < 0 ||
		h.Rank > max(0, h.World-1) {
		return nil, l.errorf("not the first line of a fingerprint log, which has plan, sequence_length and batch_size")
	}
	return l, nil
}

// Next returns the next step, or io.EOF after the last.
func (l *Reader) Next() (StepHash, error) {
	text, err := l.line()
	if err != nil {
		return StepHash{}, err
	}
	step, err := parseStep(text)
	if err != nil {
		return StepHash{}, l.errorf("%w", err)
	}
	switch {
	case step.Step <= l.last:
		return StepHash{}, l.errorf("step %d comes after step %d", step.Step, l.last)
	case step.First < 0 || step.Samples < 0 || step.Samples > int64(l.Header.BatchSize):
		return StepHash{}, l.errorf("%d samples from position %d, with batch size %d", step.Samples, step.First,
			l.Header.BatchSize)
	}
	l.last = step.Step
	return step, nil
}

// parseStep parses a line after the header.
func parseStep(text []byte) (StepHash, error) {
	var s struct {
		StepHash
		Step    *int64   `json:"step"`
		First   *int64   `json:"first"`
		Samples *int64   `json:"samples"`
		Set     *SetHash `json:"set"`
	}
	if err := json.Unmarshal(text, &s); err != nil {
		return StepHash{}, fmt.Errorf("not a line of a fingerprint log: %w", err)
	}
	if s.Step == nil || s.First == nil || s.Samples == nil || s.Set == nil {
		return StepHash{}, errors.New("not a line of a fingerprint log, which has step, first, samples and set")
	}
	return StepHash{*s.Step, *s.First, *s.Samples, s.Order, *s.Set}, nil
}

// line reads one line, without its newline.
func (l *Reader) line() ([]byte, error) {
	l.number++
	var line []byte
	for {
		part, err := l.r.ReadSlice('\n')
		line = append(line, part...)
		switch {
		case err == nil:
			return bytes.TrimSuffix(line, []byte("\n")), nil
		case errors.Is(err, io.EOF) && len(line) == 0:
			return nil, io.EOF
		case errors.Is(err, io.EOF):
			return nil, l.errorf("the line is incomplete, because the writer was stopped; remove the line to " +
				"compare the others")
		case !errors.Is(err, bufio.ErrBufferFull):
			return nil, l.errorf("%w", err)
		case len(line) > maxLogLine:
			return nil, l.errorf("the line has more than %d bytes, so this is not a fingerprint log", maxLogLine)
		}
	}
}

func (l *Reader) errorf(format string, args ...any) error {
	return fmt.Errorf("%s:%d: %w", l.name, l.number, fmt.Errorf(format, args...))
}
