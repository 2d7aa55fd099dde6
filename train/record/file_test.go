package record

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
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
		{"from the beginning", run + step0 + step1, 0, run, true, -1},
		{"zeros that a crash of the machine left", run + step0 + "\x00\x00\x00\x00", 5, run + step0, true, 0},
		{"zeros with an end of line", run + step0 + "\x00\x00\x00\n\x00", 5, run + step0, true, 0},
	} {
		path := filepath.Join(t.TempDir(), "metrics.jsonl")
		if err := os.WriteFile(path, []byte(test.content), 0o644); err != nil {
			t.Fatal(err)
		}
		header, last, err := Cut(path, test.stepsDone)
		got, _ := os.ReadFile(path)
		if err != nil || header != test.header || last != test.last || string(got) != test.want {
			t.Errorf("%s: header %v, last %d, error %v, content\n%swant header %v, last %d, content\n%s",
				test.name, header, last, err, got, test.header, test.last, test.want)
		}
	}
	if header, last, err := Cut(filepath.Join(t.TempDir(), "none"), 5); header || last != -1 || err != nil {
		t.Errorf("no file: %v, %v, %v", header, last, err)
	}
	// Damage in the middle is not ours to throw away.
	path := filepath.Join(t.TempDir(), "metrics.jsonl")
	content := run + step0 + "garbage\n" + step1
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Cut(path, 2); err == nil || !strings.Contains(err.Error(), path+":3:") {
		t.Errorf("garbage: %v", err)
	}
	if got, _ := os.ReadFile(path); string(got) != content {
		t.Errorf("garbage: the file is now\n%s", got)
	}
}

// The rest of any file is its start, in complete lines, and a second cut changes nothing.
func FuzzCutRecords(f *testing.F) {
	f.Add([]byte("{\"run\":{}}\n{\"step\":0}\n{\"step\":1,\"eval\":{}}\n{\"step\":1}\n{\"st"), int64(1))
	f.Add([]byte("{\"step\":5}\n\x00\x00"), int64(9))
	f.Add([]byte("[1]\n"), int64(0))
	f.Fuzz(func(t *testing.T, content []byte, stepsDone int64) {
		path := filepath.Join(t.TempDir(), "metrics.jsonl")
		if err := os.WriteFile(path, content, 0o644); err != nil {
			t.Fatal(err)
		}
		header, last, err := Cut(path, stepsDone)
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
			last >= stepsDone && last != -1 {
			t.Errorf("%q cut at %d is %q, last step %d", content, stepsDone, got, last)
		}
		header2, last2, err := Cut(path, stepsDone)
		again, _ := os.ReadFile(path)
		if header2 != header || last2 != last || err != nil || string(again) != string(got) {
			t.Errorf("%q cut twice at %d: %q, %v", content, stepsDone, again, err)
		}
	})
}
