package cli

import (
	"regexp"
	"strings"
	"testing"
)

// What no layout, machine or scaling can be is a wrong call, and said in one line.
func TestEstimateWrongUsage(t *testing.T) {
	for _, c := range []struct{ args, says string }{
		{"--model mula-2b", "mula-7b-a1b"},
		{"--model mula-tiny --machine auror", `did you mean "aurora"`},
		{"--model mula-tiny --machine polaris", `allowed: "aurora", "local"`},
		{"--model mula-tiny --layout expert_dp=2,dp=4", "each axis at most once"},
		{"--model mula-tiny --plot step.png", "use a name that ends in .svg"},
		{"--model mula-tiny --layout ep=5", "possible: 1, 2, 4, 8, 16"},
		{"--model mula-1b --layout ep=2", "no experts to divide"},
		{"--model mula-tiny --layout expert_dp=4 --batch-size 6", "multiple of 4"},
		{"--model mula-tiny --layout expert_dp=4,cp=3", "cp is 3; it must divide the 4 data ranks"},
		{"--model mula-tiny --layout expert_dp=4,cp=2 --sequence-length 1023", "it must divide the sequence length"},
		{"--model mula-tiny --layout expert_dp=4,cp=2 --trainer optimus", "cp=2 needs --trainer mula"},
		{"--model mula-tiny --layout ep=4 --scaling 2:8", "multiples of ep·pp = 4"},
		{"--model mula-tiny --batch-size -1", "--batch-size is -1"},
		{"--model mula-tiny --sequence-length 100000", "max_position_embeddings, 4096"},
		{"--model mula-tiny --precision fp8", "allowed: fp32, bf16"},
		{"--model mula-tiny --collectives ring", "allowed: two-level, flat"},
		{"--model mula-tiny --collectives flat --trainer optimus", "needs --trainer mula"},
		{"--model mula-tiny extra", `unexpected "extra"`},
	} {
		code, stdout, stderr := call(t, append([]string{"estimate"}, strings.Fields(c.args)...)...)
		if code != exitUsage || !strings.Contains(stderr, c.says) || stdout != "" || strings.Count(stderr, "\n") != 1 {
			t.Errorf("mula estimate %s: exit %d, %q, %q; want exit 2 and %q", c.args, code, stdout, stderr, c.says)
		}
	}
}

// The output for mula names what its estimate does not include, and counts norm and votes.
func TestEstimateSaysWhatIsMissing(t *testing.T) {
	const missing = "Not included: on a GPU"
	for _, c := range []struct {
		args    string
		missing bool
		votes   string
	}{
		{"--layout expert_dp=128,ep=12,pp=8", true, "26.9 MB"},
		{"--layout expert_dp=128,ep=12,pp=8 --collectives flat", true, "26.9 MB"},
		{"--layout expert_dp=128,ep=12,pp=8 --norm reduce", true, "16.2 kB"},
		{"--layout expert_dp=128,ep=12,pp=8 --trainer optimus", false, "0 B"},
		{"", false, "0 B"}, // one rank
	} {
		code, stdout, stderr := call(t, append([]string{"estimate", "--model", "mula-220b-a10b"},
			strings.Fields(c.args)...)...)
		votes := ""
		for line := range strings.Lines(stdout) {
			if rest, ok := strings.CutPrefix(line, "sent per step: votes"); ok {
				votes = strings.TrimSpace(rest)
			}
		}
		if code != exitDone || strings.Contains(stdout, missing) != c.missing || votes != c.votes {
			t.Errorf("mula estimate %s: exit %d, %s, votes %q; want %q; %q: %v", c.args, code, stderr, votes, c.votes,
				missing, strings.Contains(stdout, missing))
		}
	}
}

// With context parallelism, ranks that share sequences need one of them, also at other numbers of
// ranks.
func TestEstimateSequences(t *testing.T) {
	code, stdout, stderr := call(t, strings.Fields("estimate --model mula-tiny --layout expert_dp=8,cp=4 "+
		"--sequence-length 1024 --scaling 8:16")...)
	for _, want := range []string{"4 data ranks share each sequence\n", "step: 2 sequences of 1,024 tokens",
		"sequences per data rank: 1,", "sequences  all-to-all", "   16  *16 +4 "} {
		if found, err := regexp.MatchString(want, stdout); err != nil || !found || code != exitDone {
			t.Errorf("exit %d, %q; want %q\n%s", code, stderr, want, stdout)
		}
	}

	code, stdout, stderr = call(t, strings.Fields("estimate --model mula-tiny --layout expert_dp=8,cp=8 "+
		"--sequence-length 1024")...) // 4 heads of keys
	const want = "8 data ranks share each sequence; 2 parts of its queries, heads divided among 4 ranks\n"
	if code != exitDone || !strings.Contains(stdout, want) {
		t.Errorf("exit %d, %q; want %q\n%s", code, stderr, want, stdout)
	}
}
