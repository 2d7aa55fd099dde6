package blend

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"mula/shards"
	"mula/shards/shardtest"
)

func TestParseConfig(t *testing.T) {
	c, err := ParseConfig([]byte(`
sequence_length: 4096
seed: 18446744073709551615
validation: 0.001
samples: 5
sources:
  - name: dclm
    shards: [dclm/part-*.idx, "x"]
    weight: 0.948
  - name: wiki
    shards:
      - wiki/part-*.idx
    weight: "1/3"
    max_epochs: 3
stages:
  - samples: 1000000
  - samples: rest
    weights: {dclm: 0.8, wiki: 2}
skips:
  - {from: 3, to: 5}
`), "blend.yaml", ".")
	if err != nil {
		t.Fatal(err)
	}
	if c.Seed != 1<<64-1 || c.SequenceLength != 4096 || c.Validation.String() != "0.001" || *c.Samples != 5 {
		t.Errorf("%+v", c)
	}
	if diff := cmp.Diff([]string{"0.948", "", "1/3", "3"}, []string{c.Sources[0].Weight.String(),
		c.Sources[0].MaxEpochs.String(),
		c.Sources[1].Weight.String(), c.Sources[1].MaxEpochs.String()}); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]StageLength{{Count: 1000000}, {Rest: true}}, []StageLength{c.Stages[0].Samples,
		c.Stages[1].Samples}); diff != "" {
		t.Error(diff)
	}
	if c.Stages[0].Weights != nil || c.Stages[1].Weights["wiki"].String() != "2" {
		t.Errorf("weights of stages: %v", c.Stages)
	}
	if diff := cmp.Diff([]Range{{3, 5}}, c.Skips); diff != "" {
		t.Error(diff)
	}
}

// Every mistake is an error that has the location and the cause.
func TestConfigErrors(t *testing.T) {
	const head = "sequence_length: 16\nseed: 1\nsources:\n"
	const a = "  - name: a\n    shards: [a]\n"
	for name, v := range map[string]struct{ text, want string }{
		"empty":  {"", "blend.yaml: the file is empty"},
		"syntax": {"sequence_length: [1\n", "blend.yaml:1: "},
		"unknown": {"sequence_lenght: 16\n",
			`blend.yaml:1: unknown field "sequence_lenght"; did you mean "sequence_length"?`},
		"unknown in source": {head + a + "    max_epoch: 3\n",
			`blend.yaml:6: unknown field "max_epoch"; did you mean "max_epochs"?`},
		"weights in source": {head + a + "    weights: 3\n",
			`blend.yaml:6: unknown field "weights"; did you mean "weight"?`},
		"unknown in stage": {head + a + "stages:\n  - sample: 3\n",
			`blend.yaml:7: unknown field "sample"; did you mean "samples"?`},
		"unknown in skip": {head + a + "skips:\n  - until: 3\n",
			`blend.yaml:7: unknown field "until"; known are from, to`},
		"far off": {"zzzzzzzzzz: 16\n",
			"known are sequence_length, seed, validation, samples, tokens, sources, stages, skips"},
		"duplicate key": {"seed: 1\nseed: 2\n", `blend.yaml:2: `},
		"type":          {"seed: x\n", "blend.yaml:1: "},
		"negative seed": {"seed: -1\n", "blend.yaml:1: "},
		"no length":     {"seed: 1\n", "blend.yaml: sequence_length is missing"},
		"null length":   {"sequence_length:\nseed: 1\n", "blend.yaml:1: sequence_length is missing"},
		"length":        {"seed: 1\nsequence_length: 0\n", "blend.yaml:2: sequence_length is 0"},
		"long":          {"sequence_length: 999999999999\n", "blend.yaml:1: sequence_length is 999999999999"},
		"no sources":    {"sequence_length: 16\n", "no sources"},
		"no name":       {head + "  - shards: [a]\n", "blend.yaml:4: source 1: the name is empty"},
		"bad name":      {head + "  - name: \"a\\nb\"\n    shards: [a]\n", "control character"},
		"same name":     {head + a + a, `blend.yaml:6: sources 1 and 2 are both called "a"`},
		"no shards":     {head + "  - name: a\n", `blend.yaml:4: source "a" has no shards`},
		"zero weight": {head + a + "    weight: 0\n",
			`blend.yaml:6: the weight of "a" is zero; remove the source`},
		"zero weight 2":   {head + a + "    weight: 0.000\n", "is zero"},
		"negative weight": {head + a + "    weight: -0.5\n", `blend.yaml:6: sources[0].weight: "-0.5" is negative`},
		"nan": {head + a + "    weight: .nan\n",
			"blend.yaml:6: sources[0].weight: .nan is not a finite number"},
		"inf": {head + a + "    weight: .inf\n",
			"blend.yaml:6: sources[0].weight: .inf is not a finite number"},
		"word": {head + a + "    weight: much\n",
			`blend.yaml:6: sources[0].weight: "much" is not a number`},
		"list": {head + a + "    weight: [1]\n", `blend.yaml:6: sources[0].weight: want a number`},
		"stage null": {head + a + "stages:\n  - samples: 3\n    weights: {a: }\n",
			`blend.yaml:8: stage 1: the weight of "a" is missing`},
		"exponent":   {head + a + "    weight: 1e999\n", "blend.yaml:6: sources[0].weight: the exponent"},
		"max_epochs": {head + a + "    max_epochs: 0\n", "blend.yaml:6: max_epochs"},
		"some weights": {head + a + "    weight: 1\n  - name: b\n    shards: [b]\n",
			`blend.yaml:7: source "b" has no weight, but others have`},
		"validation": {head + a + "validation: 1\n", "blend.yaml:6: validation is 1; it must be below 1"},
		"samples":    {head + a + "samples: 0\n", "blend.yaml:6: samples is 0"},
		"rest": {head + a + "stages:\n  - samples: rest\n  - samples: 3\n",
			`blend.yaml:7: stage 1: only the last stage can have "samples: rest"`},
		"stage samples": {head + a + "stages:\n  - samples: -3\n",
			"blend.yaml:7: stages[0].samples: want a positive number of samples"},
		"stage word": {head + a + "stages:\n  - samples: all\n",
			`blend.yaml:7: stages[0].samples: want a positive number of samples such as 20000 or 20k, or the word "rest"`},
		"stage nothing": {head + a + "stages:\n  - weights: {a: 1}\n", "blend.yaml:7: stage 1 has no samples"},
		"stage source": {head + a + "stages:\n  - samples: 3\n    weights: {a: 1, aa: 2}\n",
			`blend.yaml:8: stage 1 has a weight for "aa", which is not a source; did you mean "a"?`},
		"stage zero": {head + a + "stages:\n  - samples: 3\n    weights: {a: 0}\n",
			`blend.yaml:8: stage 1: the weight of "a" is zero; to pause a source, omit it from the stage`},
		"stage empty": {head + a + "stages:\n  - samples: 3\n    weights: {}\n",
			"blend.yaml:7: stage 1: no source has a weight"},
		"skip": {head + a + "skips:\n  - {from: 5, to: 5}\n",
			"blend.yaml:7: skip 1: [5, 5) is not a range"},
		"shards": {"sequence_length: 16\nsources:\n  - name: a\n    shards: {a: b}\n",
			`blend.yaml:4: sources[0].shards is a mapping; it must be a list: […, …]`},
		"sources": {"sequence_length: 16\nsources:\n  code: {weight: 1}\n",
			`blend.yaml:3: sources is a mapping; it must be a list: - {name: …, shards: […], weight: …, max_epochs: …}`},
		"percent": {head + a + "    weight: 50%\n",
			`blend.yaml:6: sources[0].weight: "50%" is a percentage; write 0.5`},
		"percent 2": {head + a + "    weight: 12.5 %\n", `"12.5 %" is a percentage; write 0.125`},
		"octal weight": {head + a + "    weight: 010\n",
			`blend.yaml:6: sources[0].weight: 010 starts with 0, which may mean an octal number; write 10`},
		"octal fraction":    {head + a + "    weight: 1/010\n", `sources[0].weight: 010 starts with 0`},
		"underscore weight": {head + a + "    weight: 1_0\n", `sources[0].weight: 1_0 has underscores; write 10`},
		"hex weight": {head + a + "    weight: 0x10\n",
			`sources[0].weight: 0x10 is not written in decimal; write 16`},
		"octal samples": {head + a + "samples: 010\n", `blend.yaml:6: samples: 010 starts with 0`},
		"octal stage": {head + a + "stages:\n  - samples: 010\n",
			`blend.yaml:7: stages[0].samples: 010 starts with 0, which may mean an octal number; write 10`},
		"stage underscore": {head + a + "stages:\n  - samples: 1_0\n",
			`blend.yaml:7: stages[0].samples: 1_0 has underscores; write 10`},
		"seed": {"seed: 18446744073709551616\n",
			`blend.yaml:1: seed is 18446744073709551616; it must be between 0 and 18446744073709551615`},
		"samples word": {head + a + "samples: 20x\n",
			`blend.yaml:6: samples is "20x"; it must be a whole number, which may end with k, M, G, B or T`},
		"samples part": {head + a + "samples: 1.2345k\n", `blend.yaml:6: samples: 1.2345k is not a whole number`},
		"samples, tokens": {head + a + "samples: 5\ntokens: 80\n",
			`blend.yaml:7: samples and tokens are both set; remove one`},
		"no tokens": {head + a + "tokens: 0\n",
			`blend.yaml:6: tokens is 0; a plan has between 1 and 2^60 tokens`},
		"stage both": {head + a + "stages:\n  - {samples: 3, tokens: 48}\n",
			`blend.yaml:7: stage 1 has both samples and tokens; remove one`},
		"stage no tokens": {head + a + "stages:\n  - {tokens: 0}\n",
			`blend.yaml:7: tokens of stage 1 is 0; it must be at least 1`},
		"two documents": {head + a + "---\nseed: 3\n", "second YAML document"},
	} {
		_, err := ParseConfig([]byte(v.text), "blend.yaml", ".")
		if err == nil || !strings.Contains(err.Error(), v.want) {
			t.Errorf("%s:\n got  %v\n want %s", name, err, v.want)
		}
	}
}

// All mistakes of a file are reported in one run, each with its line, and nothing that only follows
// from another.
func TestConfigReportsAllProblems(t *testing.T) {
	_, err := ParseConfig([]byte(`seq_len: 4096
seed: 18446744073709551616
sources:
  - name: code
    shards: shards/code
    weight: 50%
  - name: text
    weight: 0.5
stages:
  - samples: all
    weights: {code: 1, texts: 1}
  - tokens: 5X
validation: 2
`), "blend.yaml", ".")
	want := `blend.yaml:1: unknown field "seq_len"; known are sequence_length, seed, validation, samples, tokens, sources, stages, skips, order, megatron, shuffle, packing, pad
blend.yaml:2: seed is 18446744073709551616; it must be between 0 and 18446744073709551615
blend.yaml:6: sources[0].weight: "50%" is a percentage; write 0.5
blend.yaml:7: source "text" has no shards
blend.yaml:10: stages[0].samples: want a positive number of samples such as 20000 or 20k, or the word "rest"
blend.yaml:12: stages[1].tokens is "5X"; it must be a whole number, which may end with k, M, G, B or T
blend.yaml:13: validation is 2; it must be below 1, as a fraction of each source
blend.yaml: sequence_length is missing; give the number of training tokens per sample, such as 4096`
	if err == nil || err.Error() != want {
		t.Errorf("%v\nwant\n%s", err, want)
	}
}

// A length may be given with a suffix or in tokens, and a single shard without a list. The plan is
// the same.
func TestLengths(t *testing.T) {
	c := newCorpus(t)
	c.shard("a", shards.UInt16, 5000, 3000)
	fingerprint := func(length, stages string) string {
		t.Helper()
		config, err := ParseConfig([]byte("sequence_length: 16\nsources:\n  - {name: a, shards: a.idx, weight: "+
			"1}\n"+length+stages), "blend.yaml", c.dir)
		if err != nil {
			t.Fatalf("%s%s: %v", length, stages, err)
		}
		p, err := Seal(t.Context(), config, SealOptions{})
		if err != nil {
			t.Fatalf("%s%s: %v", length, stages, err)
		}
		return p.Fingerprint()
	}
	want := fingerprint("samples: 2000\n", "")
	for _, length := range []string{"samples: 2k\n", "samples: 0.002M\n", "samples: 2e3\n", "tokens: 32000\n",
		"tokens: 32k\n", "tokens: 31985\n"} {
		if got := fingerprint(length, ""); got != want {
			t.Errorf("%s: another plan", length)
		}
	}
	if fingerprint("tokens: 32001\n", "") != fingerprint("samples: 2001\n", "") {
		t.Error("tokens are not rounded up to samples")
	}
	want = fingerprint("samples: 3000\n", "stages:\n  - samples: 1000\n  - samples: rest\n")
	for _, stages := range []string{"  - samples: 1k\n  - samples: rest\n", "  - tokens: 16k\n  - samples: rest\n",
		"  - tokens: 16k\n  - tokens: 32k\n"} {
		if got := fingerprint("tokens: 48k\n", "stages:\n"+stages); got != want {
			t.Errorf("%s: another plan", stages)
		}
	}
	config, err := ParseConfig([]byte("sequence_length: 16\nsources: [{name: a, shards: a}]\ntokens: 64k\nstages: "+
		"[{tokens: 32k}]\n"), "blend.yaml", c.dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Seal(t.Context(), config, SealOptions{}); err == nil ||
		!strings.Contains(err.Error(),
			"blend.yaml:3: tokens is 64000, which is 4000 samples, but the stages add up to 2000") {
		t.Errorf("%v", err)
	}
}

// What needs the shards to be noticed.
func TestSealErrors(t *testing.T) {
	c := newCorpus(t)
	c.shard("a/0", shards.UInt16, 100, 50)
	c.shard("a/1", shards.UInt16, 100)
	c.shard("tiny", shards.UInt16, 5)
	c.shard("parts/go-00000", shards.UInt16, 100)
	other, noEOD := shardtest.Tokenizer(), shardtest.Tokenizer()
	other.SHA256, noEOD.EOD = strings.Repeat("cd", 32), -1
	shardtest.WriteWith(t, c.dir, "other", shards.UInt16, other, 100)
	shardtest.WriteWith(t, c.dir, "noeod", shards.UInt16, noEOD, 100)
	c.shard("torn", shards.UInt16, 100)
	if err := os.Truncate(filepath.Join(c.dir, "torn.bin"), 190); err != nil {
		t.Fatal(err)
	}
	c.shard("unfinished/x", shards.UInt16, 100)
	if err := os.Remove(filepath.Join(c.dir, "unfinished/x.idx")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(c.dir, "a/0.bin"), filepath.Join(c.dir, "link.bin")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(c.dir, "a/0.idx"), filepath.Join(c.dir, "link.idx")); err != nil {
		t.Fatal(err)
	}
	const head = "sequence_length: 16\nsources:\n"
	const a = "  - name: a\n    shards: [a/*]\n"
	for name, v := range map[string]struct{ text, want string }{
		"no match": {head + "  - name: a\n    shards: [b/*]\n", `blend.yaml:4: source "a": "b/*" matches no shard`},
		"missing": {head + "  - name: a\n    shards: [a/0, a/7.idx]\n",
			`blend.yaml:4: source "a": "a/7.idx" matches no shard`},
		"folder":  {head + "  - name: a\n    shards: [a/]\n", `.idx and .bin); did you mean "a/*"?`},
		"parts":   {head + "  - name: a\n    shards: [parts/go.idx]\n", `.idx and .bin); did you mean "parts/go-*"?`},
		"pattern": {head + "  - name: a\n    shards: ['a/[']\n", "malformed"},
		"twice":   {head + "  - name: a\n    shards: [a/*, a/1.bin]\n", "blend.yaml:4: shard "},
		"in two": {head + a + "  - name: b\n    shards: [a/1]\n",
			`is listed twice, in source "a" and in source "b"`},
		"by a link": {head + a + "  - name: b\n    shards: [link]\n", `is listed twice`},
		"too short": {head + "  - name: a\n    shards: [tiny]\n",
			`blend.yaml:3: source "a": no shard has the 17 tokens of a window`},
		"all held out": {head + "  - name: a\n    shards: [a/1]\nvalidation: 0.99\n", `all 6 windows are in the validation split`},
		"tokenizers":   {head + a + "  - name: b\n    shards: [other]\n", "different tokenizers"},
		"eod":          {head + a + "  - name: b\n    shards: [noeod]\n", "different end-of-document ids"},
		"torn":         {head + "  - name: a\n    shards: [torn]\n", "torn.bin"},
		"unfinished":   {head + "  - name: a\n    shards: [unfinished/*]\n", "x.idx"},
		"nothing left": {head + a + "stages:\n  - samples: 15\n  - samples: rest\n",
			`blend.yaml:7: no samples remain for stage 2: earlier stages have 15 samples, the plan has 15`},
		"sum": {head + a + "samples: 10\nstages:\n  - samples: 15\n",
			`blend.yaml:5: samples is 10, but the stages add up to 15`},
		"skip": {head + a + "skips:\n  - {from: 3, to: 16}\n",
			`blend.yaml:6: skip 1: [3, 16) extends beyond the plan's 15 positions`},
		"all skipped": {head + a + "skips:\n  - {from: 3, to: 15}\n  - {from: 0, to: 4}\n",
			`blend.yaml:6: the skips cover all 15 positions of the plan`},
		"never used": {head +
			"  - name: b\n    shards: [a/0]\n  - name: a\n    shards: [a/1]\nstages:\n  - samples: 3\n    weights: " +
			"{a: 1}\n",
			`blend.yaml:3: source "b" has a weight in no stage`},
		"digits": {head +
			"  - name: b\n    shards: [a/0]\n    weight: 1e20\n  - name: a\n    shards: [a/1]\n    weight: 1\n",
			"fewer digits"},
	} {
		cfg, err := ParseConfig([]byte(v.text), "blend.yaml", c.dir)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		_, sealErr := Seal(context.Background(), cfg, SealOptions{})
		if sealErr == nil || !strings.Contains(sealErr.Error(), v.want) {
			t.Errorf("%s:\n got  %v\n want %s", name, sealErr, v.want)
		}
		if _, err := Survey(context.Background(), cfg); err == nil || err.Error() != sealErr.Error() {
			t.Errorf("%s: Survey says %v", name, err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Seal(ctx, c.config(head+a), SealOptions{}); !errors.Is(err, context.Canceled) {
		t.Errorf("after cancelling: %v", err)
	}
}

func TestMaxEpochs(t *testing.T) {
	c := newCorpus(t)
	c.shard("a", shards.UInt16, 16*100+1)
	c.shard("b", shards.UInt16, 16*10+1)
	const text = `
sequence_length: 16
samples: 200
sources:
  - {name: a, shards: [a], weight: 0.75, max_epochs: 2}
  - {name: b, shards: [b], weight: 0.25, max_epochs: 3.55}
`
	_, err := Seal(context.Background(), c.config(text), SealOptions{})
	var e *EpochsError
	if !errors.As(err, &e) {
		t.Fatalf("got %v, want an EpochsError", err)
	}
	want := []EpochsRow{
		{Source: "a", Windows: 100, Samples: 150, Epochs: 1.5, Limit: "2"},
		{Source: "b", Windows: 10, Samples: 50, Epochs: 5, Limit: "3.55", Excess: 15},
	}
	if diff := cmp.Diff(want, e.Rows); diff != "" {
		t.Error(diff)
	}
	wantText := `blend.yaml:6: the plan repeats sources more often than max_epochs allows:
  source  windows  samples  epochs  max_epochs  excess samples
       a      100      150   1.500           2               0
       b       10       50   5.000        3.55              15
a plan of 140 samples would fit; or lower the weights of these sources, raise max_epochs, or add data`
	if err.Error() != wantText {
		t.Errorf("got\n%s\nwant\n%s", err, wantText)
	}
	// The largest plan that fits does, and one more sample does not.
	for samples, fits := range map[string]bool{"140": true, "141": false} {
		_, err := Seal(context.Background(), c.config(strings.Replace(text, "200", samples, 1)), SealOptions{})
		if (err == nil) != fits {
			t.Errorf("%s samples: %v", samples, err)
		}
	}
}

// A configuration that no file was read for seals, or is refused in the same words without a line.
func TestConfigWithoutFile(t *testing.T) {
	c := newCorpus(t)
	c.shard("a", shards.UInt16, 16*10+1)
	number := func(text string) Number {
		n, err := ParseNumber(text)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	samples := int64(20)
	source := SourceConfig{Name: "a", Shards: []string{filepath.Join(c.dir, "a")}}
	limited := source
	limited.MaxEpochs = number("1.5")
	for _, v := range []struct {
		config Config
		want   string
	}{
		{Config{SequenceLength: 16, Sources: []SourceConfig{source}}, ""},
		{Config{}, "sequence_length is missing"},
		{Config{SequenceLength: 16}, "no sources"},
		{Config{SequenceLength: 16, Sources: []SourceConfig{source, source}}, "both called"},
		{Config{SequenceLength: 16, Sources: []SourceConfig{source}, Validation: number("3")}, "must be below 1"},
		{Config{SequenceLength: 16, Sources: []SourceConfig{{Name: "a", Shards: []string{filepath.Join(c.dir, "b")}}}},
			"matches no shard"},
		{Config{SequenceLength: 16, Sources: []SourceConfig{source}, Skips: []Range{{5, 11}}},
			"extends beyond the plan's 10"},
		{Config{SequenceLength: 16, Sources: []SourceConfig{limited}, Samples: &samples}, "the plan repeats sources"},
	} {
		p, err := Seal(context.Background(), &v.config, SealOptions{})
		if (err == nil) != (v.want == "") || err != nil && (!strings.Contains(err.Error(), v.want) ||
			strings.Contains(err.Error(), "yaml")) {
			t.Errorf("%+v: %v, want %q", v.config, err, v.want)
		}
		if err == nil && p.Length() != 10 {
			t.Errorf("%d positions, want 10", p.Length())
		}
	}
}

// Without weights every source is drawn in proportion to its windows, and the plan is one epoch
// long.
func TestDefaults(t *testing.T) {
	c := newCorpus(t)
	c.shard("a", shards.UInt16, 16*100+1)
	c.shard("b", shards.UInt16, 16*10+1)
	p := c.seal("sequence_length: 16\nsources:\n  - {name: a, shards: [a]}\n  - {name: b, shards: [b]}\n")
	if diff := cmp.Diff([]Stage{{Samples: 110, Weights: []uint64{10, 1}, Written: []string{"100", "10"}}},
		p.Stages); diff != "" {
		t.Error(diff)
	}
	s := p.Summary()
	for i, source := range s.Sources {
		if source.Epochs != 1 || source.Repeats != 0 || source.Stages[0].Share != []float64{10. / 11, 1. / 11}[i] {
			t.Errorf("%+v", source)
		}
	}
}

func TestSummary(t *testing.T) {
	c, text := mixed(t)
	p := c.seal(text)
	s := p.Summary()
	survey, err := Survey(context.Background(), c.config(text))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(s, survey); diff != "" {
		t.Errorf("the survey differs from the plan's summary (-plan +survey):\n%s", diff)
	}
	// Against a count by hand.
	type key struct {
		source int
		window int64
	}
	drawn := map[key]bool{}
	samples, repeats := make([][3]int64, 3), make([][3]int64, 3)
	for position := range p.Length() {
		at, err := p.Locate(position)
		if err != nil {
			t.Fatal(err)
		}
		stage := map[bool]int{position >= 200: 1}[true] + map[bool]int{position >= 300: 1}[true]
		samples[at.Source][stage]++
		if k := (key{at.Source, at.Window}); drawn[k] {
			repeats[at.Source][stage]++
		} else {
			drawn[k] = true
		}
	}
	for i, source := range s.Sources {
		var total int64
		for j, st := range source.Stages {
			total += st.Samples
			if st.Samples != samples[i][j] || st.Repeats != repeats[i][j] {
				t.Errorf("source %d, stage %d: %d samples, %d repeats; counted %d and %d", i, j, st.Samples, st.Repeats,
					samples[i][j], repeats[i][j])
			}
		}
		if total != source.Samples {
			t.Errorf("source %d: %d samples, its stages have %d", i, source.Samples, total)
		}
	}
	if s.Skipped != 24 || s.Sources[0].Empty != 1 || s.Sources[0].Shards != 3 {
		t.Errorf("skipped %d, source 0 has %d shards without windows of %d", s.Skipped, s.Sources[0].Empty,
			s.Sources[0].Shards)
	}
}

func FuzzParseConfig(f *testing.F) {
	c, text := mixed(f)
	f.Add([]byte(text))
	f.Add([]byte("sources: &a [*a]\n"))
	f.Add([]byte("stages:\n  - samples: rest\n    weights: {a: 1/3}\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		cfg, err := ParseConfig(data, "blend.yaml", c.dir)
		if err == nil && (len(cfg.Sources) == 0 || cfg.SequenceLength < 1) {
			t.Fatal("a configuration without sources was accepted")
		}
		if err != nil && !strings.HasPrefix(err.Error(), "blend.yaml") {
			t.Fatalf("the error does not name the file: %v", err)
		}
	})
}

// A configuration is read from its file, and shards are found relative to it, whatever the
// characters of the directory's name.
func TestLoadConfig(t *testing.T) {
	c := newCorpus(t)
	c.dir = filepath.Join(c.dir, "a[b]*c")
	c.shard("x/0", shards.UInt16, 100)
	path := filepath.Join(c.dir, "blend.yaml")
	if err := os.WriteFile(path, []byte("\ufeffsequence_length: 16\nsources:\n  - {name: a, shards: [x/*]}\n"),
		0o644); err != nil {
		t.Fatal(err)
	}
	cfg, err := LoadConfig(path)
	if err != nil {
		t.Fatal(err)
	}
	p, err := Seal(context.Background(), cfg, SealOptions{})
	if err != nil || p.ShardPath(0, 0) != filepath.Join(c.dir, "x/0") || p.Tokenizer.EOD != shardtest.EOD {
		t.Errorf("%+v, %v", p, err)
	}
	if _, err := LoadConfig(filepath.Join(c.dir, "none.yaml")); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	if err := os.Truncate(path, 64<<20+1); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadConfig(path); err == nil || !strings.Contains(err.Error(), path+": larger than 64 MiB") {
		t.Errorf("a file without end: %v", err)
	}
}
