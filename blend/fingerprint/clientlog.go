package fingerprint

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
)

// clientLogName matches the name of a log of the Python client: first position, batch size, rank
// and number of ranks (docs/formats/fingerprints.md).
var clientLogName = regexp.MustCompile(`^(\d{1,18})-batch(\d{1,18})-rank(\d{1,9})of(\d{1,9})\.jsonl$`)

// A clientStart is one start of a run. Each of its ranks has a log.
type clientStart struct {
	first int64 // position
	batch int64
	world int
	files []string // sorted by name, not by rank
}

// A ClientLog is all logs that the Python client wrote to a folder, over all starts of a run, as
// one log. It implements [Steps].
//
// From each start, it uses the steps that all ranks have, because the ranks of a killed run end at
// different steps. It fails if the log of a rank is missing, or if a start is not at the position
// where the previous start ended. Only starts with one rank have order hashes.
type ClientLog struct {
	Plans []string // fingerprints that the logs name, in order of the starts

	folder string
	starts []clientStart // still to be read, by position
	at     int64         // next position
	last   int64         // position of the last step that all ranks of the current start have, -1 if none
	steps  Steps         // of the current start, nil before the first start
	files  []*os.File    // of the current start
}

// OpenClientLog opens the logs of the Python client in a folder. It returns nil if the folder has
// none. All logs must have the same batch size.
func OpenClientLog(folder string) (*ClientLog, Header, error) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil, Header{}, err
	}
	l := &ClientLog{folder: folder}
	for _, e := range entries {
		m := clientLogName.FindStringSubmatch(e.Name())
		if m == nil {
			continue
		}
		var n [4]int64
		for i := range n {
			n[i], _ = strconv.ParseInt(m[i+1], 10, 64) // at most 18 digits, so this cannot fail
		}
		i := slices.IndexFunc(l.starts, func(s clientStart) bool {
			return s.first == n[0] && s.batch == n[1] &&
				int64(s.world) == n[3]
		})
		if i < 0 {
			i, l.starts = len(l.starts), append(l.starts, clientStart{first: n[0], batch: n[1], world: int(n[3])})
		}
		l.starts[i].files = append(l.starts[i].files, filepath.Join(folder, e.Name()))
	}
	if len(l.starts) == 0 {
		return nil, Header{}, nil
	}
	slices.SortFunc(l.starts, func(a, b clientStart) int {
		return cmp.Or(cmp.Compare(a.first, b.first), cmp.Compare(a.batch, b.batch), cmp.Compare(a.world, b.world))
	})
	l.at = l.starts[0].first
	var header Header
	for _, s := range l.starts {
		if s.batch != l.starts[0].batch {
			return nil, header,
				fmt.Errorf("%s: the batch size changed from %d (at position %d) to %d (at position %d); "+
					"verify the run with mula.verify of the Python client",
					folder, l.starts[0].batch, l.starts[0].first,
					s.batch, s.first)
		}
		for _, path := range s.files {
			h, err := clientHeader(path)
			if err != nil {
				return nil, header, err
			}
			if h.BatchSize == 0 { // the rank was killed before it wrote its first line
				continue
			}
			if h.Rank, h.World = 0, 0; header.BatchSize == 0 {
				header = h
			}
			if !slices.Contains(l.Plans, h.Plan) {
				l.Plans = append(l.Plans, h.Plan)
			}
		}
	}
	if header.BatchSize == 0 {
		return nil, header, fmt.Errorf("%s: all logs are empty: no rank received a sample", folder)
	}
	return l, header, nil
}

// clientHeader reads the first line of a log. It returns zero if the log has no complete line.
func clientHeader(path string) (Header, error) {
	f, err := os.Open(path)
	if err != nil {
		return Header{}, err
	}
	defer f.Close()
	size, _, err := completeLines(f)
	if size == 0 || err != nil {
		return Header{}, err
	}
	r, err := NewReader(f, path)
	if err != nil {
		return Header{}, err
	}
	return r.Header, nil
}

// Next returns the next step, or io.EOF after the last.
func (l *ClientLog) Next() (StepHash, error) {
	for l.steps == nil || l.at > l.last { // the current start has no more steps
		if l.steps != nil {
			l.starts, l.steps = l.starts[1:], nil
			l.closeFiles()
		}
		if len(l.starts) == 0 {
			return StepHash{}, io.EOF
		}
		if err := l.open(l.starts[0]); err != nil {
			return StepHash{}, err
		}
	}
	step, err := l.steps.Next()
	if err != nil {
		return StepHash{}, err
	}
	if step.First != l.at {
		return StepHash{}, fmt.Errorf("%s: a step starts at position %d, want %d", l.folder,
			step.First, l.at)
	}
	l.at += l.starts[0].batch
	return step, nil
}

// open opens the logs of a start, up to the last step that all of its ranks have.
func (l *ClientLog) open(s clientStart) error {
	if len(s.files) != s.world {
		return fmt.Errorf("%s: only %d of the %d ranks that started at position %d have a log; copy the logs of all "+
			"ranks to this folder", l.folder, len(s.files), s.world, s.first)
	}
	if s.first != l.at {
		return fmt.Errorf("%s: the logs end at position %d, but the next start is at %d", l.folder, l.at, s.first)
	}
	var readers []*Reader
	for i, path := range s.files {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		l.files = append(l.files, f)
		size, last, err := completeLines(f)
		if err != nil {
			return err
		}
		if i == 0 || last < l.last {
			l.last = last
		}
		if size == 0 {
			continue // l.last is -1, so no step is read
		}
		r, err := NewReader(io.NewSectionReader(f, 0, size), path)
		if err != nil {
			return err
		}
		if r.Header.BatchSize != int(s.batch) || max(1, r.Header.World) != s.world {
			return fmt.Errorf("%s: the first line has batch size %d and %d ranks, but the file name has other values",
				path, r.Header.BatchSize, max(1, r.Header.World))
		}
		readers = append(readers, r)
	}
	if l.last < 0 {
		l.steps = exhausted{}
		return nil
	}
	var err error
	l.steps, _, err = Combine(readers)
	return err
}

// exhausted is the steps of a start in which some rank has none.
type exhausted struct{}

func (exhausted) Next() (StepHash, error) { return StepHash{}, io.EOF }

// completeLines returns the size of a log's complete lines, because a kill may cut off the last
// line. It also returns the position of the last step, -1 if there is none.
func completeLines(f *os.File) (size, last int64, err error) {
	info, err := f.Stat()
	if err != nil {
		return 0, 0, err
	}
	const longest = 1 << 16 // length of two lines
	from := max(0, info.Size()-longest)
	tail := make([]byte, info.Size()-from)
	if _, err := f.ReadAt(tail, from); err != nil {
		return 0, 0, err
	}
	end := bytes.LastIndexByte(tail, '\n') + 1
	if end == 0 {
		return 0, -1, nil
	}
	begin := bytes.LastIndexByte(tail[:end-1], '\n') + 1
	if begin == 0 {
		return from + int64(end), -1, nil // only the header
	}
	step, err := parseStep(tail[begin : end-1])
	if err != nil {
		return 0, 0, fmt.Errorf("%s: the last complete line: %w", f.Name(), err)
	}
	return from + int64(end), step.First, nil
}

func (l *ClientLog) closeFiles() {
	for _, f := range l.files {
		f.Close()
	}
	l.files = nil
}

// Close closes the open files.
func (l *ClientLog) Close() error {
	l.closeFiles()
	return nil
}
