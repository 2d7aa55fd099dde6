package launch

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"mula/internal/filesystem"
	"mula/internal/testwait"
	"mula/train/record"
)

// The text about a hang names silent ranks and ranks in no exchange, the former first.
func TestDescribeHang(t *testing.T) {
	const (
		run    = "mula/train.(*run).step(_)\n\tmula/train/loop.go:490\nmula/train.Run({_, _})\n\tmula/train/loop.go:1"
		idle   = "\n\ngoroutine 5 [select]:\nmula/blend/stream.read()\n\tmula/blend/stream/stream.go:9"
		begun  = "step 3\n" + stacksBegin + "goroutine 1 [chan receive]:\n"
		waits  = begun + "mula/xpu/comm.(*Pending).Wait(0x1)\n\tmula/xpu/comm/comm.go:413\n" + run + idle + StacksEnd
		reads  = begun + "os.(*File).Read()\n\tos/file.go:1\n" + run + idle + StacksEnd
		killed = begun + "mula/xpu/comm.(*Pending).Wait(0x1)\n" // while writing
		before = waits + "goes on\n" + killed                   // the second answer counts
	)
	for _, test := range []struct {
		outputs []string
		want    string
		first   int
		host    string
	}{
		{[]string{"", "-", killed}, "", -1, ""}, // "-": no file
		{[]string{waits, waits + "more\n", waits}, "; waiting in an exchange: 3 ranks (Wait in " +
			"train.(*run).step: 3)", -1, ""},
		{[]string{waits, "", waits}, "; rank 1 on b (wrote no stacks: stopped, or blocked in the kernel or in a " +
			"library); waiting in an exchange: 2 ranks (Wait in train.(*run).step: 2)", 1, "b"},
		{[]string{reads, waits, before}, "; rank 2 on c (wrote no stacks: stopped, or blocked in the kernel or in a " +
			"library); rank 0 on a (not in an exchange with other ranks); waiting in an exchange: 1 rank (Wait in " +
			"train.(*run).step: 1)", 2, ""},
		{[]string{waits, reads}, "; rank 1 on b (not in an exchange with other ranks); waiting in an exchange: " +
			"1 rank (Wait in train.(*run).step: 1)", 1, "b"},
		{[]string{reads, ""}, "; rank 1 on b (wrote no stacks: stopped, or blocked in the kernel or in a library); " +
			"rank 0 on a (not in an exchange with other ranks); waiting in an exchange: 0 ranks", 1, ""},
		{[]string{waits, reads, reads, reads, reads, reads, reads}, "; rank 1 on b, rank 2 on c, rank 3, rank 4, " +
			"2 more (not in an exchange with other ranks); waiting in an exchange: 1 rank (Wait in " +
			"train.(*run).step: 1)", 1, ""},
	} {
		dir := t.TempDir()
		for rank, output := range test.outputs {
			if output == "-" {
				continue
			}
			if err := os.WriteFile(rankLog(dir, rank), []byte(output), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		got := describeHang(filesystem.OS{}, dir, len(test.outputs), strings.Split("abc", ""))
		if want := (hangReport{test.want, test.first, test.host}); got != want {
			t.Errorf("got %+v, want %+v", got, want)
		}
	}
}

// Ranks without a log of their own answer in the files of their hosts, and count like the others.
func TestAnswers(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"a": "rank 2 on a, process 7: waiting in AllReduce in train/votes.(*Votes).sumCounts\n" + stacksBegin +
			"goroutine 1\nrank 1 on\n" + StacksEnd + "rank 0 on a, process 6: not in an exchange\n" + stacksBegin +
			StacksEnd,
		"b": "rank 3 on b, process 7: waiting in AllReduce in train/votes.(*Votes).sumCounts\n" + stacksBegin,
	} {
		if err := os.WriteFile(filepath.Join(dir, answersPrefix+name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want := "; rank 1 (wrote no stacks: stopped, or blocked in the kernel or in a library); rank 0 on a (not in an " +
		"exchange with other ranks); waiting in an exchange: 2 ranks (AllReduce in train/votes.(*Votes).sumCounts: 2)"
	if got := describeHang(filesystem.OS{}, dir, 4, nil); got != (hangReport{text: want, first: 1}) {
		t.Errorf("got %+v, want %q and rank 1", got, want)
	}
}

// A rank answers a question only if it makes no progress, and only once.
func TestAnswer(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(record.HeartbeatVariable, filepath.Join(dir, "heartbeat"))
	t.Setenv(stallVariable, "30ms")
	t.Setenv("MULA_RANK", "3")
	t.Setenv("MULA_WORLD", "4")
	t.Setenv(hostVariable, "a")
	if err := askRanks(filesystem.OS{}, dir); err != nil {
		t.Fatal(err)
	}
	a := NewAnswers()
	testwait.Until(t, "the rank answers", func() bool { return len(readAnswers(filesystem.OS{}, dir)) == 1 })
	a.Progressed()
	a.Close()
	if got := readAnswers(filesystem.OS{}, dir)[3]; got.host != "a" || got.state != waiting ||
		got.exchange != "the setup" {
		t.Errorf("the answer is %+v", got)
	}
	text, err := os.ReadFile(filepath.Join(dir, answersPrefix+"a"))
	if err != nil || strings.Count(string(text), stacksBegin) != 1 || !strings.Contains(string(text), "TestAnswer") {
		t.Errorf("%v; the answer is\n%s", err, text)
	}
	t.Setenv(stallVariable, "")
	if NewAnswers() != nil {
		t.Error("a rank without a launcher waits for questions")
	}
	NewAnswers().Progressed()
	NewAnswers().Close()
}

// A rank that makes progress looks at no file.
func TestNoAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		if err := askRanks(filesystem.OS{}, dir); err != nil {
			t.Fatal(err)
		}
		a := &Answers{folder: dir, stall: longestStall, stop: make(chan struct{}), done: make(chan struct{})}
		a.Progressed()
		go a.watch()
		for range 100 {
			time.Sleep(longestStall - time.Second)
			a.Progressed()
		}
		a.Close()
		if got := readAnswers(filesystem.OS{}, dir); len(got) > 0 {
			t.Errorf("answers %+v", got)
		}
	})
}
