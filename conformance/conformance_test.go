// Package conformance compares the files of `mula index` with the files that the frameworks write
// themselves. This test needs no Python: it runs the command on small cases and compares with the
// MD5s in golden, which golden.py made with the frameworks' own code. `make conformance` compares
// the frameworks and mula on many more cases.
package conformance

import (
	"bytes"
	"context"
	"crypto/md5"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"mula/cli"
)

// TestMain makes the test binary run as mula when it is started as the command, so that the
// compiled code is tested.
func TestMain(m *testing.M) {
	if os.Getenv(commandVariable) != "" {
		os.Exit(cli.Main(os.Args, os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

// commandVariable is set in the environment of a test binary that is to be the command.
const commandVariable = "MULA_CONFORMANCE_COMMAND"

// mula is the command with these arguments.
func mula(ctx context.Context, args ...string) *exec.Cmd {
	c := exec.CommandContext(ctx, os.Args[0], args...)
	c.Env = append(os.Environ(), commandVariable+"=1")
	return c
}

// A shape says by formula how long the documents of a token file are; see cases.py.
type shape struct {
	Documents int
	Number    int
	Modulus   int
	Divisor   int
	Zero      []int
	Type      byte
	Sequences int
	Lengths   []int32
}

func (s shape) lengths() []int32 {
	if s.Lengths != nil {
		return s.Lengths
	}
	out := make([]int32, s.Documents)
	for d := range out {
		if s.Zero == nil || d%s.Zero[0] != s.Zero[1] {
			out[d] = int32(7919 * (d + 1) * (s.Number + 3) % s.Modulus / s.Divisor)
		}
	}
	return out
}

// index is the .idx file of a shape: Megatron-LM's MMIDIDX format, version 1.
func (s shape) index() []byte {
	lengths := s.lengths()
	n := len(lengths)
	var documents []int64
	for i := 0; i < n; i += max(s.Sequences, 1) {
		documents = append(documents, int64(i))
	}
	documents = append(documents, int64(n))
	out := []byte("MMIDIDX\x00\x00")
	out = binary.LittleEndian.AppendUint64(out, 1)
	out = append(out, s.Type)
	out = binary.LittleEndian.AppendUint64(out, uint64(n))
	out = binary.LittleEndian.AppendUint64(out, uint64(len(documents)))
	var offset int64
	var offsets []byte
	for _, l := range lengths {
		out = binary.LittleEndian.AppendUint32(out, uint32(l))
		offsets = binary.LittleEndian.AppendUint64(offsets, uint64(offset))
		offset += int64(l) * [...]int64{0, 1, 1, 2, 4, 8, 8, 4, 2}[s.Type]
	}
	out = append(out, offsets...)
	for _, d := range documents {
		out = binary.LittleEndian.AppendUint64(out, uint64(d))
	}
	return out
}

// A megatronCase is a configuration; see cases.py.
type megatronCase struct {
	Name           string
	Files          map[string]shape
	DataPath       []string   `json:"data_path"`
	PerSplit       [][]string `json:"per_split"`
	Split          *string
	Sizes          [3]*int64
	SequenceLength int64 `json:"sequence_length"`
	Seed           int64
	ExtraToken     bool `json:"extra_token"`
	KeepPartial    bool `json:"keep_partial"`
	Surplus        float64
	Renormalize    bool
	Tokenizer      json.RawMessage
}

// arguments returns the arguments of `mula index` for the case's files below root.
func (c *megatronCase) arguments(t *testing.T, profile, arithmetic, root, cache string) []string {
	args := []string{"index", "--for", "megatron", "--profile", profile, "--arithmetic", arithmetic, "--cache", cache,
		"--root", root, "--threads", "2",
		"--seq-length", strconv.FormatInt(c.SequenceLength, 10), fmt.Sprintf("--seed=%d", c.Seed)}
	for i, split := range []string{"train", "valid", "test"} {
		size := "none"
		if c.Sizes[i] != nil {
			size = strconv.FormatInt(*c.Sizes[i], 10)
		}
		args = append(args, "--"+split+"-samples", size)
		if c.PerSplit != nil && c.PerSplit[i] != nil {
			args = append(args, "--"+split+"-data-path", strings.Join(c.PerSplit[i], " "))
		}
	}
	if c.DataPath != nil {
		args = append(args, "--data-path", strings.Join(c.DataPath, " "), "--split", *c.Split)
	}
	if !c.ExtraToken {
		args = append(args, "--extra-token=false")
	}
	if c.KeepPartial {
		args = append(args, "--keep-partial-validation")
	}
	if c.Surplus != 0.005 {
		args = append(args, "--surplus", strconv.FormatFloat(c.Surplus, 'g', -1, 64))
	}
	if c.Renormalize {
		args = append(args, "--renormalize-blend-weights")
	}
	if profile != "core-0.4" { // which knows no tokenizer
		file := filepath.Join(root, "tokenizer-object.json")
		if err := os.WriteFile(file, c.Tokenizer, 0o666); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--tokenizer-json", file)
	}
	return args
}

// run runs mula and returns its exit code and what it wrote to the error output.
func run(t *testing.T, args ...string) (int, string) {
	t.Helper()
	var stderr bytes.Buffer
	c := mula(t.Context(), args...)
	c.Stderr = &stderr
	err := c.Run()
	if err != nil && c.ProcessState == nil {
		t.Fatal(err)
	}
	if code := c.ProcessState.ExitCode(); code < 0 || strings.Contains(stderr.String(), "goroutine ") {
		t.Fatalf("mula %q crashed: %s", args, &stderr)
	}
	return c.ProcessState.ExitCode(), stderr.String()
}

// digests returns the MD5s of a cache's data files by the start of their names, in the order of
// their names. The hash of the description must equal the hash in its name.
func digests(t *testing.T, cache string) map[string][]string {
	t.Helper()
	entries, err := os.ReadDir(cache)
	if err != nil {
		t.Fatal(err)
	}
	out := make(map[string][]string)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			continue
		}
		text, err := os.ReadFile(filepath.Join(cache, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		sum := md5.Sum(text)
		digest := hex.EncodeToString(sum[:])
		last := strings.LastIndexByte(e.Name(), '-')
		if last < 0 {
			t.Fatalf("%s is no name of an index file", e.Name())
		}
		beginning, kind := e.Name()[:last], e.Name()[last+1:]
		if kind != "description.txt" {
			out[beginning] = append(out[beginning], digest)
		} else if !strings.HasPrefix(e.Name(), digest+"-") {
			t.Errorf("%s: its text hashes to %s", e.Name(), digest)
		}
	}
	return out
}

func readGolden(t *testing.T, path string, into any) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, into); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}

// Every release of Megatron core that could be run wrote these files, under these names; and where
// it refused or never ended, mula refuses.
func TestMegatron(t *testing.T) {
	paths, err := filepath.Glob("golden/megatron-*.json")
	if err != nil || len(paths) < 8 {
		t.Fatalf("%d golden files: %v", len(paths), err)
	}
	for _, path := range paths {
		var golden struct {
			Profile, Arithmetic string

			Cases []struct {
				Case  megatronCase
				Files map[string][]string
			}
		}
		readGolden(t, path, &golden)
		written := 0
		for i, c := range golden.Cases {
			if c.Files != nil {
				written++
			}
			if testing.Short() && i%8 != 0 { // one of eight cases is enough while the code changes
				continue
			}
			t.Run(fmt.Sprintf("%s/%s/%d", golden.Profile, golden.Arithmetic, i), func(t *testing.T) {
				t.Parallel()
				root, cache := t.TempDir(), filepath.Join(t.TempDir(), "cache")
				for prefix, shape := range c.Case.Files {
					path := filepath.Join(root, prefix+".idx")
					if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
						t.Fatal(err)
					}
					if err := os.WriteFile(path, shape.index(), 0o666); err != nil {
						t.Fatal(err)
					}
				}
				code, message := run(t, c.Case.arguments(t, golden.Profile, golden.Arithmetic, root, cache)...)
				if c.Files == nil {
					if code == 0 {
						t.Errorf("%s: mula wrote what the original refuses", c.Case.Name)
					}
					return
				}
				if code != 0 {
					t.Fatalf("%s: %s", c.Case.Name, message)
				}
				got := digests(t, cache)
				for beginning, want := range c.Files {
					if !slices.Equal(got[beginning], want) {
						t.Errorf("%s: %s: MD5s %v, want %v", c.Case.Name, beginning, got[beginning], want)
					}
				}
				if len(got) != len(c.Files) {
					t.Errorf("%s: %d datasets and blends, want %d", c.Case.Name, len(got), len(c.Files))
				}
				if code, message := run(t, "index", "verify", "--root", root, cache); code != 0 {
					t.Errorf("%s: verify: %s", c.Case.Name, message)
				}
			})
		}
		if written == 0 {
			t.Errorf("%s: the original wrote nothing", path)
		}
	}
}

// BlendCorpus (argonne-lcf/blendcorpus at ac485ec, x86-64, numpy 1.24.2) wrote these: vectors H, I
// and J of the description of its format, which give the MD5 of md5sum's list of all files, sorted
// by name.
func TestBlendCorpus(t *testing.T) {
	root := t.TempDir()
	for i, documents := range []int{40, 25, 60} {
		s := shape{Documents: documents, Number: i, Modulus: 997, Divisor: 4, Zero: []int{7, 3}, Type: 8}
		if err := os.WriteFile(filepath.Join(root, fmt.Sprintf("f%d.idx", i)), s.index(), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	list := filepath.Join(root, "list")
	if err := os.WriteFile(list, []byte("2 f0 web\n1 f1 wiki\n3.5 f2 web\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct{ flags, want string }{
		{"", "e9d689bdcab49866a956b79285286dee"},
		{"--blend-sample-in-corpus=false", "463aa2031c6184308414f6caa76c79c6"},
		{"--shuffle-sample-in-corpus", "e52d873e0e21d491457fdc5929e597d9"},
	} {
		cache := filepath.Join(t.TempDir(), "cache")
		args := append([]string{"index", "--for", "blendcorpus", "--file-list", list, "--root", root, "--cache", cache,
			"--split", "70, 20, 10", "--seq-length", "64",
			"--seed", "1234", "--global-batch-size", "8", "--train-iters", "40", "--eval-iters",
			"2"}, strings.Fields(test.flags)...)
		if code, message := run(t, args...); code != 0 {
			t.Fatalf("%q: %s", test.flags, message)
		}
		manifest, files := md5.New(), 0
		entries, err := os.ReadDir(cache)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if strings.HasPrefix(e.Name(), ".") {
				continue
			}
			text, err := os.ReadFile(filepath.Join(cache, e.Name()))
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(manifest, "%x  %s\n", md5.Sum(text), e.Name())
			files++
		}
		if got := hex.EncodeToString(manifest.Sum(nil)); files != 54 || got != test.want {
			t.Errorf("%q: %d files, manifest %s; want 54, %s", test.flags, files, got, test.want)
		}
		if code, message := run(t, "index", "verify", "--root", root, cache); code != 0 {
			t.Errorf("%q: verify: %s", test.flags, message)
		}
	}
}

// OLMo-core's own loader gave its order file these names and contents.
func TestOLMo(t *testing.T) {
	var golden struct {
		Cases []struct {
			Case struct {
				Tokens  []int64
				Length  int64
				Longest *int64
				DType   string
				Seed    int64
				Epoch   int64
			}
			Name, MD5 string
		}
	}
	readGolden(t, "golden/olmo.json", &golden)
	if len(golden.Cases) == 0 {
		t.Fatal("no cases")
	}
	for i, c := range golden.Cases {
		t.Run(strconv.Itoa(i), func(t *testing.T) {
			t.Parallel()
			root, cache := t.TempDir(), t.TempDir()
			args := []string{"index", "--for", "olmo", "--dtype", c.Case.DType, "--cache", cache,
				"--seq-length", fmt.Sprint(c.Case.Length), "--seed", fmt.Sprint(c.Case.Seed), "--epoch",
				fmt.Sprint(c.Case.Epoch)}
			if c.Case.Longest != nil {
				args = append(args, "--max-target-sequence-length", fmt.Sprint(*c.Case.Longest))
			}
			for f, tokens := range c.Case.Tokens {
				path := filepath.Join(root, fmt.Sprintf("part-%d.npy", f))
				size := tokens * 2
				if c.Case.DType == "uint32" {
					size *= 2
				}
				if err := os.WriteFile(path, make([]byte, size), 0o666); err != nil {
					t.Fatal(err)
				}
				args = append(args, "--paths", path)
			}
			if code, message := run(t, args...); code != 0 {
				t.Fatal(message)
			}
			text, err := os.ReadFile(filepath.Join(cache, c.Name))
			if err != nil {
				t.Fatal(err)
			}
			if sum := md5.Sum(text); hex.EncodeToString(sum[:]) != c.MD5 {
				t.Errorf("%s: MD5 %x, want %s", c.Name, sum, c.MD5)
			}
		})
	}
}
