package launch

import (
	"os"
	"strings"
	"testing"
)

// The text about a hang names silent ranks and ranks in no exchange, the former first.
func TestDescribeHang(t *testing.T) {
	const (
		run    = "mula/train.(*run).step(_)\n\tmula/train/loop.go:490\nmula/train.Run({_, _})\n\tmula/train/loop.go:1"
		idle   = "\n\ngoroutine 5 [select]:\nmula/blend/stream.read()\n\tmula/blend/stream/stream.go:9"
		begun  = "step 3\n" + StacksBegin + "goroutine 1 [chan receive]:\n"
		waits  = begun + "mula/xpu/comm.(*Pending).Wait(0x1)\n\tmula/xpu/comm/comm.go:413\n" + run + idle + StacksEnd
		reads  = begun + "os.(*File).Read()\n\tos/file.go:1\n" + run + idle + StacksEnd
		killed = begun + "mula/xpu/comm.(*Pending).Wait(0x1)\n" // while writing
		before = waits + "goes on\n" + killed                   // the second answer counts
	)
	for _, test := range []struct {
		outputs []string
		want    string
		first   int
	}{
		{[]string{"", "-", killed}, "", -1}, // "-": no file
		{[]string{waits, waits + "more\n", waits}, "; waiting in an exchange: 3 ranks", -1},
		{[]string{waits, "", waits}, "; rank 1 on b (wrote no stacks: stopped, or blocked in the kernel or in a " +
			"library); waiting in an exchange: 2 ranks", 1},
		{[]string{reads, waits, before}, "; rank 2 on c (wrote no stacks: stopped, or blocked in the kernel or in a " +
			"library); rank 0 on a (not in an exchange with other ranks); waiting in an exchange: 1 rank", 2},
		{[]string{waits, reads, reads, reads, reads, reads, reads}, "; rank 1 on b, rank 2 on c, rank 3, rank 4, " +
			"2 more (not in an exchange with other ranks); waiting in an exchange: 1 rank", 1},
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
		text, first := describeHang(dir, len(test.outputs), strings.Split("abc", ""))
		if text != test.want || first != test.first {
			t.Errorf("got %q and rank %d, want %q and %d", text, first, test.want, test.first)
		}
	}
}
