//go:build unix

package cli

import (
	"encoding/binary"
	"encoding/json"
	"io"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"mula/tokenize/batches"
)

// The command answers on the socket that is its standard input, and ends when it is closed.
func TestTokenizerServe(t *testing.T) {
	for _, test := range []struct{ file, says string }{
		{"../tokenize/testdata/olmo.json", ""},
		{"absent.json", "mula: reading tokenizer: open absent.json: no such file or directory\n"},
	} {
		ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
		if err != nil {
			t.Fatal(err)
		}
		ours, theirs := os.NewFile(uintptr(ends[0]), "socket"), os.NewFile(uintptr(ends[1]), "socket")
		code := make(chan int)
		var stdout, stderr strings.Builder
		go func() {
			defer theirs.Close()
			code <- Main([]string{"mula", "tokenizer", "serve", "--tokenizer", test.file}, theirs, &stdout, &stderr)
		}()
		want := exitFailed
		if test.says == "" {
			want = exitDone
			slot, err := os.Create(t.TempDir() + "/slot")
			if err != nil {
				t.Fatal(err)
			}
			defer slot.Close()
			if err := unix.Sendmsg(ends[0], make([]byte, 32), unix.UnixRights(int(slot.Fd())), nil, 0); err != nil {
				t.Fatal(err)
			}
			head := make([]byte, 16)
			if _, err := io.ReadFull(ours, head); err != nil {
				t.Fatal(err)
			}
			var g batches.Greeting
			err = json.NewDecoder(io.LimitReader(ours, int64(binary.LittleEndian.Uint32(head[4:])))).Decode(&g)
			if err != nil || g.VocabSize != 667 {
				t.Errorf("%v, %v", g, err)
			}
			ours.Close()
		}
		if got := <-code; got != want || stdout.String() != "" || stderr.String() != test.says {
			t.Errorf("exit %d, %q, %q", got, stdout.String(), stderr.String())
		}
		if test.says != "" {
			ours.Close()
		}
	}
}
