package record

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"pgregory.net/rapid"
)

func TestCutRecords(t *testing.T) {
	const (
		run   = `{"run":{"format":1}}` + "\n"
		step0 = `{"step":0,"loss":1}` + "\n"
		step1 = `{"step":1,"loss":1}` + "\n"
		eval2 = `{"step":2,"eval":{"loss":1}}` + "\n"
		step2 = `{"step":2,"loss":1}` + "\n"
		again = `{"step":2,"resumed":{"checkpoint":"step-00000002"}}` + "\n"
		step3 = `{"step":3,"loss":1}` + "\n"
		snap1 = `{"step":1,"snapshot":{"bytes":9}}` + "\n"
		back2 = `{"step":2,"rollback":{"step":5}}` + "\n"
	)
	for _, test := range []struct {
		name      string
		content   string
		stepsDone int64
		want      string
		header    bool
		last      int64
	}{
		{"nothing after the checkpoint", run + step0 + step1, 2, run + step0 + step1, true, 1},
		{"steps after it", run + step0 + step1 + step2 + step3, 2, run + step0 + step1, true, 1},
		{"an evaluation of the checkpoint's step was before it", run + step0 + step1 + eval2 + step2, 2,
			run + step0 + step1 + eval2, true, 1},
		{"and is after an earlier one", run + step0 + step1 + eval2 + step2, 1, run + step0, true, 0},
		{"a second resume from the same checkpoint replaces the first", run + step0 + step1 + eval2 + again + step2, 2,
			run + step0 + step1 + eval2, true, 1},
		{"a resume from an earlier one stays", run + step0 + step1 + again + step2 + step3, 3, run + step0 + step1 +
			again + step2, true, 2},
		{"a rollback belongs to the step after it", run + step0 + step1 + back2 + step2 + step3, 3,
			run + step0 + step1 + back2 + step2, true, 2},
		{"and goes with it", run + step0 + step1 + back2 + step2, 2, run + step0 + step1, true, 1},
		{"and is no step", run + step0 + back2, 3, run + step0 + back2, true, 0},
		{"an unfinished line", run + step0 + step1[:8], 2, run + step0, true, 0},
		{"an unfinished line that would be whole but for its end", run + step0 + strings.TrimSuffix(step1, "\n"), 2,
			run + step0, true, 0},
		{"an unfinished header", run[:5], 0, "", false, -1},
		{"nothing", "", 0, "", false, -1},
		{"a snapshot of the checkpoint's step was before it", run + step0 + snap1 + step1, 1,
			run + step0 + snap1, true, 0},
		{"and is no step", run + step0 + snap1, 0, run, true, -1},
		{"from the beginning", run + step0 + step1, 0, run, true, -1},
		{"zeros that a crash of the machine left", run + step0 + "\x00\x00\x00\x00", 5, run + step0, true, 0},
		{"zeros with an end of line", run + step0 + "\x00\x00\x00\n\x00", 5, run + step0, true, 0},
	} {
		path := filepath.Join(t.TempDir(), "metrics.jsonl")
		if err := os.WriteFile(path, []byte(test.content), 0o644); err != nil {
			t.Fatal(err)
		}
		header, last, err := Cut(filesystem.OS{}, path, test.stepsDone)
		got, _ := os.ReadFile(path)
		if err != nil || header != test.header || last != test.last || string(got) != test.want {
			t.Errorf("%s: header %v, last %d, error %v, content\n%swant header %v, last %d, content\n%s",
				test.name, header, last, err, got, test.header, test.last, test.want)
		}
	}
	header, last, err := Cut(filesystem.OS{}, filepath.Join(t.TempDir(), "none"), 5)
	if header || last != -1 || err != nil {
		t.Errorf("no file: %v, %v, %v", header, last, err)
	}
	// A damaged line that the search reads is an error.
	path := filepath.Join(t.TempDir(), "metrics.jsonl")
	content := run + step0 + "garbage\n"
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Cut(filesystem.OS{}, path, 2); err == nil || !strings.Contains(err.Error(), path+":3:") {
		t.Errorf("garbage: %v", err)
	}
	if got, _ := os.ReadFile(path); string(got) != content {
		t.Errorf("garbage: the file is now\n%s", got)
	}
}

// StepsDone counts the complete lines of steps, and does not change the file.
func TestStepsDone(t *testing.T) {
	const run, step0, step1 = `{"run":{"format":1}}` + "\n", `{"step":0,"loss":1}` + "\n", `{"step":1,"loss":1}` + "\n"
	for content, want := range map[string]int64{
		"": 0, run: 0, run[:4]: 0, run + step0: 1, run + step0 + step1: 2,
		run + step0 + step1[:9]:                                  1,
		run + step0 + `{"step":1,"snapshot":{"bytes":9}}` + "\n": 1,
		run + step0 + "\x00\x00":                                 1,
	} {
		path := filepath.Join(t.TempDir(), "metrics.jsonl")
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		got, err := StepsDone(filesystem.OS{}, path)
		after, _ := os.ReadFile(path)
		if err != nil || got != want || string(after) != content {
			t.Errorf("%q has %d steps, want %d; %v; the file is now %q", content, got, want, err, after)
		}
	}
	if got, err := StepsDone(filesystem.OS{}, filepath.Join(t.TempDir(), "none")); got != 0 || err != nil {
		t.Errorf("no file has %d steps, %v", got, err)
	}
}

// drawRecords returns the lines of a run with evaluations, resumes and rollbacks, some of them
// as long as the lines of large models.
func drawRecords(t *rapid.T) []string {
	lines := []string{`{"run":{"format":1}}` + "\n"}
	step := rapid.Int64Range(0, 3).Draw(t, "first step")
	for range rapid.IntRange(0, 20).Draw(t, "steps") {
		pad := rapid.SampledFrom([]int{0, 10, 50, 3000, 17_000, 70_000}).Draw(t, "padding")
		add := func(format string) { lines = append(lines, fmt.Sprintf(format, step)+"\n") }
		if rapid.IntRange(0, 5).Draw(t, "resume") == 0 {
			add(`{"step":%d,"resumed":{"checkpoint":"step"}}`)
		}
		if rapid.IntRange(0, 8).Draw(t, "rollback") == 0 {
			add(`{"step":%d,"rollback":{"step":5}}`)
		}
		add(`{"step":%d,"loss":1,"padding":"` + strings.Repeat("x", pad) + `"}`)
		step += rapid.Int64Range(1, 2).Draw(t, "lost steps") // files that a user has removed leave gaps
		if rapid.IntRange(0, 3).Draw(t, "evaluation") == 0 {
			add(`{"step":%d,"eval":{"loss":1}}`)
		}
	}
	return lines
}

// The search keeps exactly the lines that a look at every line keeps, whatever follows the last
// complete line.
func TestCutEqualsScan(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		all := drawRecords(t)
		done := rapid.Int64Range(0, 45).Draw(t, "steps done")
		want, wantLast := "", int64(-1)
		for _, line := range all {
			var p recordPosition
			if err := json.Unmarshal([]byte(line), &p); err != nil {
				t.Fatal(err)
			}
			if !p.before(done) {
				break
			}
			want += line
			if p.isStep() {
				wantLast = *p.Step
			}
		}
		torn := rapid.SampledFrom([]string{"", `{"step":900`, "\x00\x00", `{"step":900` + strings.Repeat("\x00", 40_000),
			"\x00\n\x00\n", strings.Repeat("\x00", 40_000)}).Draw(t, "rest")
		path := filepath.Join(dir, "metrics.jsonl")
		if err := os.WriteFile(path, []byte(strings.Join(all, "")+torn), 0o644); err != nil {
			t.Fatal(err)
		}
		header, last, err := Cut(filesystem.OS{}, path, done)
		got, _ := os.ReadFile(path)
		if err != nil || !header || last != wantLast || string(got) != want {
			t.Fatalf("%d lines at %d: header %v, last %d, error %v, %d bytes; want last %d, %d bytes", len(all), done,
				header, last, err, len(got), wantLast, len(want))
		}
	})
}

// A countedReader counts the bytes that are read.
type countedReader struct {
	io.ReaderAt
	bytes int64
}

func (r *countedReader) ReadAt(p []byte, at int64) (int, error) {
	n, err := r.ReaderAt.ReadAt(p, at)
	r.bytes += int64(n)
	return n, err
}

// The bytes that a resume reads do not depend on the length of the run.
func TestCutReads(t *testing.T) {
	var reads []int64
	for _, steps := range []int{500, 50_000} {
		var b strings.Builder
		b.WriteString(`{"run":{"format":1}}` + "\n")
		kept := 0
		for step := range steps {
			if step == steps-200 {
				kept = b.Len()
			}
			fmt.Fprintf(&b, "{\"step\":%8d,\"loss\":%.500f}\n", step, 1.0)
		}
		r := &countedReader{ReaderAt: strings.NewReader(b.String())}
		l := lines{r, "m"}
		got, err := l.search(int64(b.Len()), int64(steps-200))
		if err != nil || got != int64(kept) {
			t.Fatalf("%d steps: %d, %v; want %d", steps, got, err, kept)
		}
		if header, last, err := l.describe(got); !header || last != int64(steps-201) || err != nil {
			t.Fatalf("%d steps: %v, %d, %v", steps, header, last, err)
		}
		reads = append(reads, r.bytes)
	}
	t.Logf("bytes read: %d", reads)
	if reads[1] > reads[0]+10*readSize {
		t.Errorf("%d bytes are read of a short run, and %d of a long one", reads[0], reads[1])
	}
}

// A failed write leaves the file as it was, and the next cut succeeds.
func TestCutFault(t *testing.T) {
	path := filepath.Join(t.TempDir(), "metrics.jsonl")
	content := "{\"run\":{}}\n{\"step\":0}\n{\"step\":1}\n"
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	broken := errors.New("input/output error")
	atomicfile.Fault = func(op atomicfile.Op, name string) error {
		if op == atomicfile.OpWrite && name == path {
			return broken
		}
		return nil
	}
	_, _, err := Cut(filesystem.OS{}, path, 1)
	atomicfile.Fault = nil
	if got, _ := os.ReadFile(path); !errors.Is(err, broken) || string(got) != content {
		t.Errorf("error %v, content\n%s", err, got)
	}
	if _, last, err := Cut(filesystem.OS{}, path, 1); last != 0 || err != nil {
		t.Errorf("last %d, error %v", last, err)
	}
}

// The rest of any file is its start, in complete lines.
func FuzzCutRecords(f *testing.F) {
	f.Add([]byte("{\"run\":{}}\n{\"step\":0}\n{\"step\":1,\"eval\":{}}\n{\"step\":1}\n{\"st"), int64(1))
	f.Add([]byte("{\"step\":5}\n\x00\x00"), int64(9))
	f.Add([]byte("[1]\n"), int64(0))
	f.Fuzz(func(t *testing.T, content []byte, stepsDone int64) {
		path := filepath.Join(t.TempDir(), "metrics.jsonl")
		if err := os.WriteFile(path, content, 0o644); err != nil {
			t.Fatal(err)
		}
		header, last, err := Cut(filesystem.OS{}, path, stepsDone)
		got, rerr := os.ReadFile(path)
		if rerr != nil {
			t.Fatal(rerr)
		}
		if err != nil {
			if string(got) != string(content) {
				t.Error("a file that cannot be read was changed")
			}
			return
		}
		if !strings.HasPrefix(string(content), string(got)) || len(got) > 0 && got[len(got)-1] != '\n' ||
			header && len(got) == 0 || last < -1 && len(got) == 0 {
			t.Errorf("%q cut at %d is %q, last step %d", content, stepsDone, got, last)
		}
	})
}
