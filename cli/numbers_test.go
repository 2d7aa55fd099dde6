package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// refusedCall runs a command that must not succeed, and returns its message.
func refusedCall(t *testing.T, args ...string) string {
	t.Helper()
	code, stdout, stderr := call(t, args...)
	if code == exitDone {
		t.Errorf("%v: exit code 0\n%s", args, stdout)
	}
	return stderr
}

// Numbers of flags are decimal and in their range. The library would take 010 for 8 and 1_0 for 10.
func TestNumbersOfFlags(t *testing.T) {
	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{"stream", "--batch-size", "010"},
			"--batch-size: 010 starts with 0, which may mean an octal number; write 10"},
		{[]string{"stream", "--batch-size=0o10"}, "--batch-size: 0o10 is not written in decimal; write 8"},
		{[]string{"stream", "-B", "0x10"}, "--B: 0x10 is not written in decimal; write 16"},
		{[]string{"stream", "--from", "1_0"}, "--from: 1_0 has underscores; write 10"},
		{[]string{"generate", "--seed", "18446744073709551616"},
			`--seed is "18446744073709551616"; it must be a whole number from 0 to 2^64-1`},
		{[]string{"generate", "--seed", "010"}, "--seed: 010 starts with 0"},
		{[]string{"generate", "--temperature", "inf"}, `--temperature is "inf"; it must be a finite number in decimal`},
		{[]string{"generate", "--temperature", "0x1p3"},
			`--temperature is "0x1p3"; it must be a finite number in decimal`},
		{[]string{"generate", "--temperature", "1e400"}, `--temperature`},
		{[]string{"stream", "--batch-size", "9223372036854775808"},
			`--batch-size is "9223372036854775808"; it must be a whole number`},
		{[]string{"tokenize", "--tokenizer", "t", "--output", "o", "--shard-tokens", "010", "numbers_test.go"},
			"--shard-tokens: 010 starts with 0"},
		{[]string{"tokenize", "--tokenizer", "t", "--output", "o", "--shard-tokens", "1_0K", "numbers_test.go"},
			"--shard-tokens: 1_0 has underscores; write 10"},
		{[]string{"tokenize", "--tokenizer", "t", "--output", "o", "--shard-tokens", "10000000T", "numbers_test.go"},
			"--shard-tokens: 10000000T is out of range"},
		{[]string{"tokenize", "--tokenizer", "t", "--output", "o", "--shard-tokens", "0", "numbers_test.go"},
			`--shard-tokens is "0"; it must be a number above 0`},
	} {
		if got := refusedCall(t, test.args...); !strings.Contains(got, test.want) {
			t.Errorf("%v: %s\nwant %s", test.args, got, test.want)
		}
	}
}

// What a user types into a train.yaml and gets wrong is reported with file, line, field and what to
// write instead.
func TestTrainMessages(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "train.yaml")
	for _, test := range []struct{ yaml, want string }{
		{"plan: nothere.json\n", "train.yaml:1: plan is " + filepath.Join(dir, "nothere.json") +
			", which does not exist; write the path of a plan.json of mula blend, relative to the directory of " +
			"train.yaml"},
		{"steps: 3\nplan: .\n", "train.yaml:2: plan is " + dir +
			", which is a directory; write the path of a plan.json"},
		{"seed: 18446744073709551616\n",
			"train.yaml:1: seed is 18446744073709551616; it must be between 0 and 18446744073709551615"},
		{"steps: 010\nmodel: mula-nano\n",
			"train.yaml:1: steps: 010 starts with 0, which may mean an octal number; write 10\n" + path +
				":2: model is \"mula-nano\"; it must be a mapping, such as model: {preset: mula-nano}"},
	} {
		if err := os.WriteFile(path, []byte(test.yaml), 0o644); err != nil {
			t.Fatal(err)
		}
		if got := refusedCall(t, "train", "--config", path); !strings.Contains(got, test.want) {
			t.Errorf("%s: %s\nwant %s", test.yaml, got, test.want)
		}
	}
}
