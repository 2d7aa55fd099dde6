package fingerprint

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// writeClientLogs writes the logs of the Python client for a start: steps [from, to) of each rank.
func writeClientLogs(t *testing.T, run testRun, folder string, batch, world int, from, to int64) {
	t.Helper()
	for rank := range world {
		var text bytes.Buffer
		header := Header{Plan: run.plan, SequenceLength: 16, BatchSize: batch}
		if world > 1 {
			header.Rank, header.World = rank, world
		}
		log, err := NewWriter(&text, header)
		if err != nil {
			t.Fatal(err)
		}
		if to > from {
			if err := run.hash(part{from: from, to: to, batch: batch, rank: rank, world: world},
				log.Write); err != nil {
				t.Fatal(err)
			}
		}
		writeTo(t, clientPath(folder, from*int64(batch), batch, rank, world), text.String())
	}
}

func clientPath(folder string, first int64, batch, rank, world int) string {
	return filepath.Join(folder, fmt.Sprintf("%016d-batch%d-rank%dof%d.jsonl", first, batch, rank, world))
}

func writeTo(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
		t.Fatal(err)
	}
}

// edit changes the text of a file.
func edit(t *testing.T, path string, change func(text string) string) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	writeTo(t, path, change(string(text)))
}

// The logs of all starts and ranks of a run with the Python client are one log, which is compared
// with the plan's.
func TestClientLog(t *testing.T) {
	run := testRun{"plan"} // 600 positions: 50 steps of 12
	const batch = 12
	expected := logOf(t, run, part{batch: batch})
	for _, v := range []struct {
		name  string
		make  func(folder string)
		equal int64  // steps
		want  string // of an error or difference; "" for none
	}{
		{"one start", func(f string) { writeClientLogs(t, run, f, batch, 1, 0, 50) }, 50, ""},
		{"starts of 3, 1 and 2 ranks", func(f string) {
			writeClientLogs(t, run, f, batch, 3, 0, 20)
			writeClientLogs(t, run, f, batch, 1, 20, 25)
			writeClientLogs(t, run, f, batch, 2, 25, 50)
		}, 50, ""},
		{"a kill leaves ranks at different steps, and half a line", func(f string) {
			writeClientLogs(t, run, f, batch, 2, 0, 20)
			edit(t, clientPath(f, 0, batch, 1, 2), func(s string) string {
				lines := strings.SplitAfter(s, "\n")
				return strings.Join(lines[:11], "") + lines[11][:40]
			})
		}, 10, ""},
		{"a start that was killed before its first step", func(f string) {
			writeClientLogs(t, run, f, batch, 1, 0, 20)
			writeClientLogs(t, run, f, batch, 2, 20, 20)
			edit(t, clientPath(f, 240, batch, 1, 2), func(string) string { return "" })
		}, 20, ""},
		{"a rank without a log", func(f string) {
			writeClientLogs(t, run, f, batch, 3, 0, 20)
			os.Remove(clientPath(f, 0, batch, 1, 3))
		}, 0, "only 2 of the 3 ranks that started at position 0 have a log"},
		{"samples between two starts that nobody was given", func(f string) {
			writeClientLogs(t, run, f, batch, 1, 0, 20)
			writeClientLogs(t, run, f, batch, 1, 21, 50)
		}, 0, "the logs end at position 240, but the next start is at 252"},
		{"samples that came twice", func(f string) {
			writeClientLogs(t, run, f, batch, 1, 0, 20)
			writeClientLogs(t, run, f, batch, 1, 19, 50)
		}, 0, "the logs end at position 240, but the next start is at 228"},
		{"other batch sizes", func(f string) {
			writeClientLogs(t, run, f, batch, 1, 0, 20)
			writeClientLogs(t, run, f, 24, 1, 10, 20)
		}, 0, "mula.verify of the Python client"},
		{"other samples", func(f string) {
			writeClientLogs(t, run, f, batch, 2, 0, 20)
			edit(t, clientPath(f, 0, batch, 1, 2), func(s string) string {
				i := strings.LastIndex(s, `"set":"`) + len(`"set":"`)
				return s[:i] + strings.Repeat("5", 32) + s[i+32:]
			})
		}, 19, "the samples differ"},
		{"a step that is missing", func(f string) {
			writeClientLogs(t, run, f, batch, 1, 0, 20)
			edit(t, clientPath(f, 0, batch, 0, 1), func(s string) string {
				lines := strings.SplitAfter(s, "\n")
				return strings.Join(append(lines[:5:5], lines[6:]...), "")
			})
		}, 0, "want 48"},
		{"nothing", func(f string) {
			writeTo(t, clientPath(f, 0, batch, 0, 1), "")
		}, 0, "all logs are empty"},
		{"another header than the name says", func(f string) {
			writeClientLogs(t, run, f, batch, 1, 0, 20)
			os.Rename(clientPath(f, 0, batch, 0, 1), clientPath(f, 0, batch+1, 0, 1))
		}, 0, "the file name has other values"},
	} {
		folder := t.TempDir()
		v.make(folder)
		writeTo(t, filepath.Join(folder, "notes.txt"), "x")
		r, err := func() (Comparison, error) {
			log, header, err := OpenClientLog(folder)
			if err != nil {
				return Comparison{}, err
			}
			defer log.Close()
			a, err := NewReader(strings.NewReader(expected), "expected.jsonl")
			if err != nil {
				t.Fatal(err)
			}
			if fmt.Sprint(log.Plans) != fmt.Sprint([]string{run.plan}) {
				t.Errorf("%s: plans %v", v.name, log.Plans)
			}
			return Compare(a, log, a.Header, header)
		}()
		if err == nil && r.Kind != NoDifference {
			err = fmt.Errorf("%s", r.Kind)
		}
		if (err == nil) != (v.want == "") || err != nil && !strings.Contains(err.Error(), v.want) || v.equal > 0 &&
			r.Equal != v.equal {
			t.Errorf("%s: %d equal steps, %v; want %d, %q", v.name, r.Equal, err, v.equal, v.want)
		}
	}
	if log, _, err := OpenClientLog(t.TempDir()); log != nil || err != nil {
		t.Errorf("an empty folder: %v, %v", log, err)
	}
}
