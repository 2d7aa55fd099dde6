package cli

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/internal/longtest"
	"mula/moe"
	"mula/shards/formats"
)

// completions are calls up to the cursor, and candidates that there must and must not be.
var completions = []struct {
	words []string
	want  []string
	not   string
}{
	{[]string{"tr"}, []string{"train"}, "blend"},
	{[]string{"plan", ""}, []string{"show", "diff"}, "blend"},
	{[]string{"blend", "--dry"}, []string{"--dry-run"}, "--output"},
	{[]string{"convert", "--to", ""}, formats.Names(), "notes.txt"},
	{[]string{"convert", "--to", "meg"}, []string{"megatron"}, "mds"},
	{[]string{"estimate", "--model", ""}, moe.Presets(), "notes.txt"},
	{[]string{"train", "--config", "no"}, []string{"notes.txt"}, "train"},
	{[]string{"check", "no"}, []string{"notes.txt"}, "check"},
	{[]string{"help", "exp"}, []string{"export"}, "notes.txt"},
	{[]string{"launch", "--", "train", "--conf"}, []string{"--config"}, "--ranks"},
}

// The program names the candidates.
func TestComplete(t *testing.T) {
	for _, c := range completions {
		code, stdout, stderr := call(t, append([]string{completeWord}, c.words...)...)
		lines := strings.Split(strings.TrimSpace(stdout), "\n")
		var got []string
		for _, line := range lines[1:] {
			word, _, _ := strings.Cut(line, "\t")
			got = append(got, word)
		}
		for _, want := range c.want {
			if want == "notes.txt" && lines[0] == "files" {
				continue
			}
			if code != exitDone || stderr != "" || !slices.Contains(got, want) {
				t.Errorf("%q: exit %d, no %q in %q%s", c.words, code, want, stdout, stderr)
			}
		}
		if slices.Contains(got, c.not) {
			t.Errorf("%q: %q in %q", c.words, c.not, got)
		}
	}
	if _, stdout, _ := call(t, completeWord, "train", "--set",
		"layout.e"); stdout != "words\nlayout.expert_dp=\t\nlayout.ep=\t\n" {
		t.Errorf("%q", stdout)
	}
	if _, stdout, _ := call(t, completeWord, "convert", "--to=me"); stdout != "words\n--to=megatron\t\n" {
		t.Errorf("%q", stdout)
	}
}

// Real shells offer the candidates.
func TestCompletionInShells(t *testing.T) {
	longtest.SkipIfShort(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	bin, dir := t.TempDir(), t.TempDir()
	if err := os.Symlink(self, filepath.Join(bin, "mula")); err != nil {
		t.Skipf("no symbolic links here: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "notes.txt"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	// Each program prints the candidates of "$@", one a line.
	for shell, program := range map[string]string{
		"bash": `source <(mula completion bash)
COMP_WORDS=(mula "$@"); COMP_CWORD=$#; _mula; printf '%s\n' "${COMPREPLY[@]}"`,
		"zsh": `autoload -Uz compinit; compinit -u -D
_describe() { local c; for c in "${(@P)2}"; do print -r -- "${c%%:*}"; done }
_files() { print -rl -- "${words[CURRENT]}"*(N) }
compset() { : }
source <(mula completion zsh)
[[ $_comps[mula] == _mula ]] || print -r -- "not registered"
words=(mula "$@"); CURRENT=$#words; _mula`,
		"fish": `mula completion fish | source
complete -C "mula "(string join ' ' -- $argv) | string split -f1 \t`,
	} {
		t.Run(shell, func(t *testing.T) {
			path, err := exec.LookPath(shell)
			if err != nil {
				t.Skipf("no %s on this machine (apt-get install %s)", shell, shell)
			}
			for _, c := range completions {
				args := map[string][]string{"bash": {"--norc", "-c", program, "bash"}, "zsh": {"-f", "-c", program,
					"zsh"},
					"fish": {"--no-config", "-c", program}}[shell]
				if shell == "fish" {
					args = append(args, "--")
				}
				run := exec.Command(path, append(args, c.words...)...)
				run.Dir = dir
				run.Env = append(os.Environ(), "PATH="+bin+string(os.PathListSeparator)+os.Getenv("PATH"), "HOME="+dir)
				out, err := run.Output()
				got := strings.Split(strings.TrimSpace(string(out)), "\n")
				for _, want := range c.want {
					if !slices.Contains(got, want) {
						t.Errorf("%q: no %q in %q: %v", c.words, want, got, err)
					}
				}
				if slices.Contains(got, c.not) {
					t.Errorf("%q: %q in %q", c.words, c.not, got)
				}
			}
		})
	}
}

// Every shell has a script that asks the program. No test can run PowerShell, so only the brackets
// of its script are checked.
func TestCompletionScripts(t *testing.T) {
	for _, shell := range completionShells {
		code, stdout, stderr := call(t, "completion", shell)
		if code != exitDone || stderr != "" || !strings.Contains(stdout, completeWord) {
			t.Errorf("%s: exit %d, %s%s", shell, code, stdout, stderr)
		}
		if shell != "powershell" {
			continue
		}
		var open []rune
		for _, r := range stdout {
			switch r {
			case '(', '[', '{':
				open = append(open, r)
			case ')', ']', '}':
				if len(open) == 0 || strings.ContainsRune("()[]{}", r) && open[len(open)-1] != map[rune]rune{')': '(',
					']': '[',
					'}': '{'}[r] {
					t.Fatalf("powershell: unexpected %c", r)
				}
				open = open[:len(open)-1]
			}
		}
		if len(open) > 0 || !strings.Contains(stdout, "Register-ArgumentCompleter -Native -CommandName mula") {
			t.Errorf("powershell: %q open in %s", open, stdout)
		}
	}
	if code, _, stderr := call(t, "completion", "fis"); code != exitUsage || !strings.Contains(stderr, "did you mean") {
		t.Errorf("exit %d, %s", code, stderr)
	}
}
