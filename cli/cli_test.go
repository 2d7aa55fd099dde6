package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/rogpeppe/go-internal/testscript"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/filesystem/faultfs"
	"mula/internal/quantity"
	"mula/internal/version"
)

// The tests run the command itself: the test binary runs as mula when it is started under that
// name.
func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"mula": func() {
			trainFault = hostFaults
			atomicfile.SkipSync = true // a killed process loses nothing without it
			os.Exit(run(faultfs.New(nil), os.Args, os.Stdin, os.Stdout, os.Stderr))
		},
	})
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Setup: func(env *testscript.Env) error {
			// what commands keep there is the script's own
			env.Setenv("XDG_CACHE_HOME", filepath.Join(env.WorkDir, ".cache"))
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			// corpus FILE DOCUMENTS SEED writes a file of documents, plain or .zst by its name.
			"corpus": func(ts *testscript.TestScript, _ bool, args []string) {
				if len(args) != 3 {
					ts.Fatalf("usage: corpus FILE DOCUMENTS SEED")
				}
				var documents int
				var seed uint64
				if _, err := fmt.Sscan(args[1]+" "+args[2], &documents, &seed); err != nil {
					ts.Fatalf("corpus: %v", err)
				}
				ts.Check(writeCorpus(ts.MkAbs(args[0]), documents, seed))
			},
			// damage FILE truncate N | flip N | half 0: cuts N bytes off the end, changes byte N,
			// or cuts off the second half.
			"damage": func(ts *testscript.TestScript, _ bool, args []string) {
				if len(args) != 3 {
					ts.Fatalf("usage: damage FILE truncate|flip|half N")
				}
				path := ts.MkAbs(args[0])
				data, err := os.ReadFile(path)
				ts.Check(err)
				var n int
				if _, err := fmt.Sscan(args[2], &n); err != nil {
					ts.Fatalf("damage: %v", err)
				}
				switch args[1] {
				case "truncate":
					data = data[:len(data)-n]
				case "half":
					data = data[:len(data)/2]
				case "flip":
					data[n] ^= 1
				default:
					ts.Fatalf("damage: %q", args[1])
				}
				ts.Check(os.WriteFile(path, data, 0o644))
			},
			// only DIR NAME...: the folder holds exactly these entries.
			"only": func(ts *testscript.TestScript, _ bool, args []string) {
				entries, err := os.ReadDir(ts.MkAbs(args[0]))
				ts.Check(err)
				var names []string
				for _, e := range entries {
					names = append(names, e.Name())
				}
				want := slices.Sorted(slices.Values(args[1:]))
				if !slices.Equal(names, want) {
					ts.Fatalf("%s holds %q, want %q", args[0], names, want)
				}
			},
		},
	})
}

var words = strings.Fields(`the of and to in a is that it was for on are as with his they at be this from have or by one had not but what all were when
	we there can an your which their said if do will each about how up out them then she many some so these would other into has more her two like
	him see time could no make than first been its who now people my made over did down only way find use may water long little very after words`)

// writeCorpus writes documents of common words in the Dolma form.
func writeCorpus(path string, documents int, seed uint64) error {
	random := rand.New(rand.NewPCG(seed, 1))
	var text bytes.Buffer
	for i := range documents {
		sentence := make([]string, 40+random.IntN(100))
		for j := range sentence {
			// Small numbers are more likely, and follow on each other, so that there is something
			// to learn.
			sentence[j] = words[(random.IntN(8)*random.IntN(8)+3*j)%len(words)]
		}
		line, err := json.Marshal(map[string]any{"id": fmt.Sprintf("doc-%d-%d", seed, i), "text": strings.Join(sentence,
			" ") + ".\n",
			"source": "test", "metadata": map[string]any{"n": i}})
		if err != nil {
			return err
		}
		text.Write(append(line, '\n'))
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if strings.HasSuffix(path, ".zst") {
		encoder, err := zstd.NewWriter(nil)
		if err != nil {
			return err
		}
		return os.WriteFile(path, encoder.EncodeAll(text.Bytes(), nil), 0o644)
	}
	return os.WriteFile(path, text.Bytes(), 0o644)
}

// call runs mula inside the test process.
func call(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	return callOn(t, faultfs.New(nil), args...)
}

// callOn is call with outputs on a file system.
func callOn(t *testing.T, fsys filesystem.FS, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = run(fsys, append([]string{"mula"}, args...), strings.NewReader(""), &out, &errs)
	return code, out.String(), errs.String()
}

func TestFlagsFirst(t *testing.T) {
	app := newApp(nil, io.Discard, io.Discard)
	for _, c := range []struct{ in, want string }{
		{"mula", "mula"},
		{"mula --version", "mula --version"},
		{"mula tokenize a.jsonl --output x b.jsonl", "mula tokenize --output x -- a.jsonl b.jsonl"},
		{"mula tokenize --output=x a.jsonl --json", "mula tokenize --output=x --json -- a.jsonl"},
		{"mula tokenize -o x -", "mula tokenize -o x -- -"},
		{"mula tokenize -o x -- --strange", "mula tokenize -o x -- --strange"},
		{"mula tokenizer train in --vocab-size 9", "mula tokenizer train --vocab-size 9 -- in"},
		{"mula verify a b --json", "mula verify --json -- a b"},
		{"mula nosuch --x y", "mula nosuch --x y"},
	} {
		got, err := flagsFirst(app.Commands, strings.Fields(c.in))
		if err != nil || strings.Join(got, " ") != c.want {
			t.Errorf("flagsFirst(%q) = %q, %v; want %q", c.in, got, err, c.want)
		}
	}
	if _, err := flagsFirst(app.Commands, []string{"mula", "blend", "--config"}); err == nil {
		t.Error("a flag without its value was accepted")
	}
}

func TestWrongUsage(t *testing.T) {
	for _, c := range []struct{ args, says string }{
		{"trian", "did you mean `mula train`?"},
		{"xyzzy", "`mula --help` lists them"},
		{"tokenizer trian", "did you mean `mula tokenizer train`?"},
		{"blend --confg x", "not defined: --confg"},
		{"blend extra", `unexpected "extra"`},
		{"blend --config", "--config needs a value"},
		{"peek --position ten", "--position"},
		{"peek", "--position or --step is required"},
		{"hash", "--batch-size is required"},
		{"hash --batch-size 8 --world 3", "--world: batch size 8 cannot be divided among 3 ranks"},
		{"hash --batch-size 8 --world 4 --rank 4", "from 0 to 3"},
		{"hash --batch-size 8 --steps 5", "A:B"},
		{"hash --batch-size 8 --steps 5:2", "A:B"},
		{"verify one", "two logs"},
		{"tokenize x.jsonl", "--tokenizer is required"},
		{"tokenize --tokenizer t.json --output o", "no input"},
		{"where", "--document is required"},
		{"eval", "--model is required"},
		{"generate --model m a b", "one prompt"},
		{"generate --model m --top-p 2", "top-p"},
		{"report", "no run"},
		{"peek --position 1 --step 2 --batch-size 4", "exclude each other"},
		{"peek --position 1 --characters -1", "--characters is -1"},
		{"where --document x --limit -1", "--limit is -1"},
		{"generate --model m --threads -1", "--threads is -1; it must be from 0 to 4,096"},
		{"eval --model m --threads 99999999", "--threads is 99999999"},
		{"eval --model m --batch-size 100000000", "--batch-size"},
		{"check --workers -1", "--workers is -1"},
		{"stream --batch-size 4 --prefetch 999999999999", "--prefetch is 999999999999"},
		{"hash --batch-size 4 --output -", "--output -"},
		{"tokenizer train --max-bytes -1 cli_test.go", "--max-bytes is -1"},
		{"tokenizer train --output cli_test.go cli_test.go", "is an input of the command"},
		{"tokenizer serve", "--tokenizer is required"},
		{"tokenizer serve --tokenizer t.json", "standard input is not a unix socket; use mula.Tokenizer"},
		{"tokenizer serve --tokenizer t.json --workers -1", "--workers is -1"},
		{"tokenize --tokenizer t --output o --workers -3 cli_test.go", "--workers is -3"},
		{"tokenize --tokenizer t --output o --eod x --no-eod cli_test.go", "contradict each other"},
		{"blend --config cli_test.go --output ./cli_test.go", "cli_test.go"},
		{"blend --at 5", "requires --amend"},
		{"index --for megatron --cache c --work w", "--work requires a URL as --cache"},
		{"index --for megatron --cache s3://b/c", "name a local folder for files that are being written with --work"},
		{"index --for megatron --cache https://h/c --work w", "mula only reads"},
		{"index --for megatron --config c.yaml --cache s3://b/c --work w", "not supported with --config"},
		{"index --for megatron --cache c --data-path unknown://b/x", "unknown scheme"},
		{"index --for megatron --seq-length 8 --tokenizer-path t --train-samples 1 --valid-samples 0 " +
			"--test-samples 0 --data-path s3://b/x",
			"--cache is required, because token files are in an object store"},
		{"blend --amend p.json --skip 1:2", "--output is required with --amend"},
		{"blend --amend p.json --dry-run", "nothing to amend"},
		{"blend --amend p.json --output q.json", "nothing to amend"},
		{"blend --amend p.json --output q.json --skip 5", "must be FROM:TO"},
		{"blend --amend p.json --output q.json --skip 5:5", "must be FROM:TO"},
		{"blend --amend p.json --output q.json --config a.yaml", "--at is required"},
		{"blend --amend p.json --output q.json --skip 1:2 --at -1", "--at is -1"},
		{"plan diff a.json", "two plans are required"},
		{"plan show a.json b.json", `unexpected "b.json"`},
		{"plan show --plan a.json b.json", "--plan already names the plan"},
	} {
		code, stdout, stderr := call(t, strings.Fields(c.args)...)
		if code != exitUsage || !strings.Contains(stderr, c.says) {
			t.Errorf("mula %s: exit %d, %q; want exit 2 and %q", c.args, code, stderr, c.says)
		}
		if stdout != "" || strings.Count(stderr, "\n") != 1 {
			t.Errorf("mula %s prints more than one line: %q%q", c.args, stdout, stderr)
		}
	}
}

// Every command has help with an example that names the command.
func TestHelp(t *testing.T) {
	for _, c := range newApp(nil, io.Discard, io.Discard).Commands {
		args, name := []string{c.Name, "--help"}, "mula "+c.Name
		if len(c.Subcommands) > 0 {
			args, name = []string{c.Name, c.Subcommands[0].Name, "--help"}, name+" "+c.Subcommands[0].Name
		}
		if c.Name == "help" { // whose --help is the help of mula
			continue
		}
		code, stdout, stderr := call(t, args...)
		if code != exitDone || stderr != "" || !strings.Contains(stdout, "Example: "+name+" ") {
			t.Errorf("mula %s: exit %d, %q, %q", strings.Join(args, " "), code, stdout, stderr)
		}
	}
	if code, stdout, _ := call(t, "--version"); code != exitDone || !strings.Contains(stdout, version.String()) {
		t.Errorf("mula --version: exit %d, %q", code, stdout)
	}
}

func TestWholeCharacters(t *testing.T) {
	for text, want := range map[string]int{"": 0, "a": 1, "a\xc3": 1, "a\xc3\xa9": 3, "\xe2\x82": 0, "\xe2\x82\xac": 3,
		"\xf0\x9f\x98": 0, "\xff": 1, "x\x80\x80\x80\x80": 5} {
		if got := wholeCharacters([]byte(text)); got != want {
			t.Errorf("wholeCharacters(%q) = %d, want %d", text, got, want)
		}
	}
}

func TestPrintable(t *testing.T) {
	for text, want := range map[string]string{
		"plain\n\ttext é 日本": "plain\n\ttext é 日本",
		"\x1b[31mred":        `\x1b[31mred`,
		"bell\a, cr\r":       `bell\a, cr\r`,
		"bad \xff\xfe":       `bad \xff\xfe`,
		"\ufffd":             "\ufffd",
	} {
		if got := printable(text); got != want {
			t.Errorf("printable(%q) = %q, want %q", text, got, want)
		}
	}
}

// Output that cannot be written is not a success.
func TestLostOutput(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skipf("this system has no /dev/full: %v", err)
	}
	defer full.Close()
	var errs bytes.Buffer
	if code := Main([]string{"mula", "--help"}, strings.NewReader(""), full, &errs); code != exitFailed ||
		!strings.Contains(errs.String(), "no space left") {
		t.Errorf("exit %d, %q", code, errs.String())
	}
}

func TestPlural(t *testing.T) {
	for n, want := range map[int64]string{0: "0 steps", 1: "1 step", 2: "2 steps", 1234: "1,234 steps"} {
		if got := quantity.Plural(n, "step"); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
