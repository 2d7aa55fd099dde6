package report

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"mula/internal/page"
	"mula/train/record"
)

const (
	headLine     = `{"run":{"format":1,"mula":"v1","model":{"num_experts":4},"parameters":10,"active_parameters":6,"plan":"ab","sources":["go","docs"],"weights":{"go":0.75,"docs":0.25},"sequence_length":8,"batch_size":4,"steps":3,"device":"cpu","started":"2026-09-01T08:00:00Z"}}` + "\n"
	step0        = `{"step":0,"first":0,"samples":4,"tokens":32,"loss":5.5,"aux_loss":1.5,"z_loss":0.25,"grad_norm":2,"learning_rate":0.001,"seconds":0.5,"tokens_per_second":64,"time":"2026-09-01T08:00:01Z","source_loss":{"go":5,"docs":7},"source_samples":{"go":3,"docs":1},"expert_tokens":[[16,16,16,16],[64,0,0,0],[32,32,0,0]]}` + "\n"
	step1        = `{"step":1,"first":4,"samples":0,"tokens":0,"loss":0,"grad_norm":0,"learning_rate":0.001,"seconds":0.1,"tokens_per_second":0,"source_loss":{},"source_samples":{},"expert_tokens":[[0,0,0,0],[0,0,0,0],[0,0,0,0]]}` + "\n"
	step2        = `{"step":2,"first":8,"samples":4,"tokens":32,"loss":4.5,"grad_norm":1,"learning_rate":0.002,"seconds":0.5,"tokens_per_second":64,"source_loss":{"go":4.5},"source_samples":{"go":4},"expert_tokens":[[4,8,16,36],[64,0,0,0],[0,0,32,32]]}` + "\n"
	skippedStep2 = `{"step":2,"first":8,"samples":4,"tokens":32,"loss":9.5,"grad_norm":7,"mfu":0.25,"source_loss":{"go":9.5},"source_samples":{"go":4},"expert_tokens":[[4,8,16,36],[64,0,0,0],[0,0,32,32]],"router_entropy":[1,0.5,1.25],"skipped":{"what":"loss","value":9.5,"mean":5,"deviation":0.25,"limit":6.5}}` + "\n"
	lostStep2    = `{"step":2,"first":8,"samples":4,"tokens":32,"loss":0,"grad_norm":0,"source_loss":{},"source_samples":{},"skipped":{"what":"loss","not_finite":true}}` + "\n"
	backLine     = `{"step":1,"rollback":{"step":2,"spike":{"what":"grad_norm","not_finite":true},"left_out":{"from":4,"to":12}}}` + "\n"
	evalLine     = `{"step":2,"eval":{"loss":5,"source_loss":{"docs":6},"source_targets":{"docs":80}}}` + "\n"
	resumeLine   = `{"step":2,"resumed":{"checkpoint":"step-00000002","time":"2026-09-01T09:00:00Z","refused":[{"checkpoint":"step-00000003","error":"hash"}]}}` + "\n"
)

// stepsOf returns the steps of a short run.
func stepsOf(run *Run) (steps []Step) {
	for _, s := range run.Spans {
		steps = append(steps, s.Step)
	}
	return steps
}

// balances returns balances with the given loads and entropies, one after the other.
func balances(numbers ...float64) (all []record.Balance) {
	for pair := range slices.Chunk(numbers, 2) {
		all = append(all, record.Balance{MaxOverMean: pair[0], Entropy: pair[1]})
	}
	return all
}

func TestParse(t *testing.T) {
	run, err := parse(strings.NewReader(headLine+step0+step1+evalLine+resumeLine+step2), "m")
	if err != nil {
		t.Fatal(err)
	}
	nan := math.NaN()
	want := []Step{
		{Step: 0, Samples: 4, Tokens: 32, Loss: 5.5, AuxLoss: 1.5, ZLoss: 0.25, GradNorm: 2, LearningRate: 0.001,
			Seconds: 0.5, TokensPerSecond: 64,
			SourceLoss: []float64{5, 7}, SourceSamples: []int64{3, 1}, Balance: balances(1, 1, 4, 0, 2, 0.5)},
		{Step: 1, Loss: nan, LearningRate: 0.001, Seconds: 0.1, SourceLoss: []float64{nan, nan},
			SourceSamples: []int64{0, 0}, Balance: balances(nan, nan, nan, nan, nan, nan)},
		{Step: 2, Samples: 4, Tokens: 32, Loss: 4.5, GradNorm: 1, LearningRate: 0.002, Seconds: 0.5,
			TokensPerSecond: 64,
			// −Σ p·log₄ p for p = 1/16, 1/8, 1/4, 9/16: 1/8 + 3/16 + 1/4 + 9/16·(2 − log₂3)
			SourceLoss: []float64{4.5, nan}, SourceSamples: []int64{4, 0}, Balance: balances(2.25,
				0.5625+0.5625*(2-math.Log2(3)), 4, 0, 2, 0.5)},
	}
	close := cmp.Options{cmpopts.EquateNaNs(), cmpopts.EquateApprox(0, 1e-12)}
	if diff := cmp.Diff(want, stepsOf(run), close); diff != "" {
		t.Errorf("steps (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]Evaluation{{2, 5, []float64{nan, 6}, []int64{0, 80}}}, run.Evaluations, close); diff != "" {
		t.Errorf("evaluations (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]Resume{{Step: 2, Checkpoint: "step-00000002", Time: epoch.Add(3600e9),
		Refused: []string{"step-00000003"}}}, run.Resumes); diff != "" {
		t.Errorf("resumes (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([][]int64{{20, 24, 32, 52}, {128, 0, 0, 0}, {32, 32, 32, 32}}, run.ExpertLoad); diff != "" {
		t.Errorf("expert load (-want +got):\n%s", diff)
	}
	if run.LoadSteps != 3 || run.Torn != "" || run.Info.Plan != "ab" || run.Info.Weights["go"] != 0.75 ||
		!run.Info.Started.Equal(epoch) {
		t.Errorf("got %+v", run)
	}
}

// The times of ranks are added over the steps, and the slowest ranks are counted.
func TestParseRanks(t *testing.T) {
	rank := func(number int, host, own string) string {
		return `{"rank":` + strconv.Itoa(number) + `,"host":"` + host + `","median":2,"reading":0,"compute":` + own +
			`,"waiting":9,"update":1,"saving":0,"slow":` +
			strconv.FormatBool(number == 0) + `}`
	}
	times := func(step, ranks string) string {
		return strings.Replace(step, `"grad_norm"`,
			`"rank_seconds":{"reading":1,"compute":5,"waiting":2.5,"update":0.5,"saving":1},"slowest_ranks":[`+ranks+
				`],"grad_norm"`, 1)
	}
	run, err := parse(strings.NewReader(headLine+times(step0, rank(3, "b", "2")+","+rank(0, "a", "1"))+
		times(step1, rank(0, "a", "3"))+times(step2, rank(3, "c", "4"))), "m")
	if err != nil {
		t.Fatal(err)
	}
	want := []SlowRank{{Host: "a", Steps: 1, Excess: 2, Slow: 2}, {Rank: 3, Host: "c", Steps: 2, Excess: 2}}
	if diff := cmp.Diff(want, run.Slowest); diff != "" {
		t.Errorf("slowest ranks (-want +got):\n%s", diff)
	}
	rows := map[string]string{}
	for _, row := range summarise([]string{"r"}, []*Run{run}).Rows {
		rows[row.Name] = row.Cells[0].Text
	}
	if got, want := rows["time of ranks"], "compute 50.0 %, waiting for other ranks 25.0 %, reading 10.0 %, "+
		"update 5.0 %, saving 10.0 %"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got, want := rows["slowest ranks"], "rank 0 on a: 1 times, its own work 2 times the median, slow in 2 steps; "+
		"rank 3 on c: 2 times, its own work 2 times the median"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// A step that was skipped keeps what it computed, but nothing was trained on; what is not finite is
// no value.
func TestParseSpikes(t *testing.T) {
	run, err := parse(strings.NewReader(headLine+step0+strings.Replace(step1, `"grad_norm"`,
		`"update_ratio":{"head":0.5},"grad_norm"`, 1)+skippedStep2), "m")
	if err != nil {
		t.Fatal(err)
	}
	s := run.Spans[2]
	if s.Loss != 9.5 || s.Tokens != 0 || s.SourceSamples[0] != 0 || s.Samples != 4 ||
		s.Skipped.String() != "loss 9.500 beyond 6.500" || s.MFU != 0.25 || len(s.RouterEntropy) != 3 {
		t.Errorf("skipped: %+v", s)
	}
	if run.Spans[1].UpdateRatio["head"] != 0.5 {
		t.Errorf("update ratio: %+v", run.Spans[1])
	}
	run, err = parse(strings.NewReader(headLine+step0+backLine+step1+lostStep2), "m")
	if err != nil {
		t.Fatal(err)
	}
	if s := run.Spans[2]; !math.IsNaN(s.Loss) || !math.IsNaN(s.GradNorm) || s.Tokens != 0 ||
		s.Skipped.String() != "loss not finite" || s.Balance != nil {
		t.Errorf("lost: %+v", s)
	}
	if diff := cmp.Diff([]Rollback{{Step: 1, Spiked: 2, Spike: Spike{What: "grad_norm", NotFinite: true}, From: 4,
		To: 12}}, run.Rollbacks); diff != "" {
		t.Errorf("rollbacks (-want +got):\n%s", diff)
	}
	got := make(map[string]string)
	for _, row := range summarise([]string{"r"}, []*Run{run}).Rows {
		got[row.Name] = row.Cells[0].Text
	}
	if got["steps skipped"] != "1" || got["rollbacks"] != "1 (8 samples skipped)" || got["tokens seen"] != "32" {
		t.Errorf("summary %v", got)
	}
	page := render(t, run)
	for _, want := range []string{"<title>step 2 skipped: loss not finite</title>",
		"<title>the data of steps 1 to 2 is skipped: gradient norm not finite at step 2</title>", ">skipped</text>"} {
		if !strings.Contains(page, want) {
			t.Errorf("the page does not contain %s", want)
		}
	}
}

// A run is finished when the steps that its configuration asks for are done, or without one those
// that it began with.
func TestFinished(t *testing.T) {
	run, err := parse(strings.NewReader(headLine+step0+step1), "m")
	if err != nil {
		t.Fatal(err)
	}
	for steps, want := range map[string]bool{"": false, "2": true, "3": false, "1": true, "0": false} {
		if run.Config = map[string]string{"steps": steps}; run.Finished() != want {
			t.Errorf("2 steps of %q: %v", steps, !want)
		}
	}
}

// The load covers only the last steps, for any number of steps.
func TestLoadWindow(t *testing.T) {
	var b strings.Builder
	b.WriteString(headLine)
	steps := 2*loadWindow + 17
	for i := range steps {
		n := strconv.Itoa(i)
		b.WriteString(`{"step":` + n + `,"samples":1,"loss":1,"source_samples":{"go":1},"expert_tokens":[[` + n +
			`,1]]}` + "\n")
	}
	run, err := parse(strings.NewReader(b.String()), "m")
	if err != nil {
		t.Fatal(err)
	}
	var want int64
	for i := steps - loadWindow; i < steps; i++ {
		want += int64(i)
	}
	if diff := cmp.Diff([][]int64{{want, loadWindow}}, run.ExpertLoad); diff != "" || run.LoadSteps != loadWindow {
		t.Errorf("over %d steps (-want +got):\n%s", run.LoadSteps, diff)
	}
}

// Between steps with counts, a run has the balance alone. The load is of the steps with counts, and
// of the last such step, however old it is.
func TestParseSummaries(t *testing.T) {
	summary := func(step int64, load string) string {
		return fmt.Sprintf(`{"step":%d,"samples":1,"loss":1,"source_samples":{"go":1},"expert_load":%s}`+"\n", step, load)
	}
	text := headLine + step0
	for step := int64(1); step <= loadWindow; step++ {
		text += summary(step, `{"max_over_mean":[1.5,2,3],"entropy":[0.9,0.8,0.7]}`)
	}
	run, err := parse(strings.NewReader(text), "m")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(balances(1.5, 0.9, 2, 0.8, 3, 0.7), run.Spans[7].Balance); diff != "" {
		t.Errorf("balance (-want +got):\n%s", diff)
	}
	if run.LoadSteps != 1 || run.LoadLast != 0 || run.ExpertLoad[1][0] != 64 || run.Layers != 3 {
		t.Errorf("load of %d steps up to %d: %v", run.LoadSteps, run.LoadLast, run.ExpertLoad)
	}
	if page := render(t, run); !strings.Contains(page, "Tokens routed to each expert in step 0,") {
		t.Error("the page does not name the step of the load")
	}
	// Without any counts, only the map of the load is missing.
	never, err := parse(strings.NewReader(headLine+summary(0, `{"max_over_mean":[1.5],"entropy":[0.9]}`)+
		summary(1, `{"max_over_mean":[1.25],"entropy":[0.9]}`)), "m")
	if err != nil {
		t.Fatal(err)
	}
	page := render(t, never)
	if strings.Contains(page, "Load by layer and expert") || !strings.Contains(page, "Imbalance by layer over time") ||
		!strings.Contains(page, "Busiest expert ÷ mean") {
		t.Error("the page of a run without counts has other figures")
	}
	for load, want := range map[string]string{
		`{"max_over_mean":[1.5],"entropy":[0.9]}`:         ":3: step 1: expert_load: 1 layers, but the first step has 3",
		`{"max_over_mean":[1.5,2,3],"entropy":[0.9,0.8]}`: ":3: step 1: expert_load: 3 layers have a load, and 2 an entropy",
	} {
		if _, err := parse(strings.NewReader(headLine+step0+summary(1, load)), "m"); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", load, err)
		}
	}
}

// The losses of multi-token prediction are means over the steps that predict tokens and were not
// skipped.
func TestPredictionLosses(t *testing.T) {
	with := func(step, losses string) string {
		return strings.Replace(step, `"grad_norm"`, `"prediction_loss":`+losses+`,"grad_norm"`, 1)
	}
	text := headLine + with(step0, "[6,8]") + with(step1, "[0,0]") + with(step2, "[5,0]") +
		with(strings.Replace(skippedStep2, `"step":2`, `"step":3`, 1), "[9,9]")
	run, err := parse(strings.NewReader(text), "m")
	if err != nil {
		t.Fatal(err)
	}
	var all Span
	for i := range run.Spans {
		all.merge(&run.Spans[i])
	}
	if len(all.predictions) != 2 || all.predictions[0] != (mean{5.5, 2}) || all.predictions[1] != (mean{8, 1}) {
		t.Errorf("means %v", all.predictions)
	}
	if page := render(t, run); !strings.Contains(page, "Loss of multi-token prediction") ||
		!strings.Contains(page, "2 tokens ahead") || !strings.Contains(page, "3 tokens ahead") {
		t.Error("the page does not show the losses")
	}
	if run, err = parse(strings.NewReader(headLine+step0), "m"); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(render(t, run), "ulti-token prediction") {
		t.Error("the page of a run without predictions shows them")
	}
}

// Steps whose positions are all skipped route nothing and have no record, also at the start of a
// run.
func TestParseEmptySteps(t *testing.T) {
	empty := strings.Replace(step1, `,"expert_tokens":[[0,0,0,0],[0,0,0,0],[0,0,0,0]]`, "", 1)
	first := strings.Replace(empty, `"step":1`, `"step":0`, 1)
	second := strings.Replace(step0, `"step":0`, `"step":1`, 1)
	third := strings.Replace(empty, `"step":1`, `"step":2`, 1)
	run, err := parse(strings.NewReader(headLine+first+second+third), "m")
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range [][]record.Balance{nil, balances(1, 1, 4, 0, 2, 0.5), nil} {
		if diff := cmp.Diff(want, run.Spans[i].Balance, cmpopts.EquateApprox(0, 1e-12)); diff != "" {
			t.Errorf("step %d: balance (-want +got):\n%s", i, diff)
		}
	}
	if diff := cmp.Diff([][]int64{{16, 16, 16, 16}, {64, 0, 0, 0}, {32, 32, 0, 0}}, run.ExpertLoad); diff != "" ||
		run.LoadSteps != 1 {
		t.Errorf("load over %d steps (-want +got):\n%s", run.LoadSteps, diff)
	}
	if err := Write(io.Discard, Options{}, run); err != nil {
		t.Error(err)
	}
	if _, err := parse(strings.NewReader(headLine+first), "m"); err != nil {
		t.Error(err)
	}
	if _, err := parse(strings.NewReader(headLine+second+strings.Replace(step2,
		`,"expert_tokens":[[4,8,16,36],[64,0,0,0],[0,0,32,32]]`, "", 1)), "m"); err == nil {
		t.Error("a step with samples that lost its experts is accepted")
	}
}

// A run that resumed with another plan may draw sources that it did not start with. Any other
// unknown source is damage.
func TestParsePlanChange(t *testing.T) {
	resumed := strings.Replace(resumeLine, `"refused"`, `"old_plan":"cd","refused"`, 1)
	step := strings.NewReplacer(`"source_loss":{"go":4.5}`, `"source_loss":{"new":4.5}`, `"source_samples":{"go":4}`,
		`"source_samples":{"new":3,"go":1}`).Replace(step2)
	run, err := parse(strings.NewReader(headLine+step0+step1+resumed+step), "m")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"go", "docs", "new"}, run.Info.Sources); diff != "" {
		t.Errorf("sources (-want +got):\n%s", diff)
	}
	for i, want := range [][]int64{{3, 1}, {0, 0}, {1, 0, 3}} {
		if diff := cmp.Diff(want, run.Spans[i].SourceSamples); diff != "" || len(run.Spans[i].SourceLoss) != len(want) {
			t.Errorf("step %d (-want +got):\n%s", i, diff)
		}
	}
	if run.Resumes[0].OldPlan != "cd" {
		t.Errorf("resume %+v", run.Resumes[0])
	}
	if err := Write(io.Discard, Options{}, run); err != nil {
		t.Error(err)
	}
}

func TestParseDamage(t *testing.T) {
	replace := func(s, old, new string) string {
		if !strings.Contains(s, old) {
			t.Fatalf("%s does not contain %s", s, old)
		}
		return strings.Replace(s, old, new, 1)
	}
	for _, test := range []struct {
		name, text, want string
	}{
		{"empty", "", "is empty"},
		{"torn head", headLine[:40], ":1 is cut off after 40 bytes"},
		{"no head", step0, ":1: the first line must have \"run\""},
		{"blank line", headLine + "\n" + step0, ":2: not a line of metrics"},
		{"other format", replace(headLine, `"format":1`, `"format":2`), ":1: metrics format 2"},
		{"doubled source", replace(headLine, `["go","docs"]`, `["go","go"]`), `:1: source "go" is listed twice`},
		{"weight without source", replace(headLine, `{"go":0.75`, `{"tests":0.75`), `:1: the weights name "tests"`},
		{"two heads", headLine + step0 + headLine, ":3: a second run"},
		{"missing step", headLine + step0 + step2, ":3: step 2 follows step 0"},
		{"doubled step", headLine + step0 + step0, ":3: step 0 follows step 0"},
		{"garbage", headLine + step0 + "\x00\x00\x00\n" + step1, ":3: not a line of metrics"},
		{"torn in the middle", headLine + step0[:50] + "\n" + step1, ":2: not a line of metrics"},
		{"whole line of half an object", headLine + step0[:50] + "\n", ":2: not a line of metrics"},
		{"wrong type", headLine + replace(step0, `"tokens":32`, `"tokens":"32"`), ":2: not a line of metrics"},
		{"wrong type in the last line without end", headLine + strings.TrimSpace(replace(step0, `"tokens":32`,
			`"tokens":"32"`)), ":2: not a line of metrics"},
		{"too large", headLine + replace(step0, `"loss":5.5`, `"loss":1e999`), ":2: not a line of metrics"},
		{"no step", headLine + `{"samples":1}` + "\n", `:2: the line has no "step"`},
		{"negative step", headLine + `{"step":-1,"samples":1}` + "\n", `:2: the line has no "step"`},
		{"no kind", headLine + `{"step":0}` + "\n", ":2: the line is neither"},
		{"no loss", headLine + replace(step0, `"loss":5.5,`, ""), ":2: step 0 has samples but no loss"},
		{"evaluation without loss", headLine + replace(evalLine, `"loss":5,`, ""), ":2: the evaluation has no loss"},
		{"unknown source", headLine + replace(step0, `{"go":5`, `{"tests":5`),
			`:2: step 0: source_loss: "tests" is not a source`},
		{"unknown source evaluated", headLine + replace(evalLine, `{"docs":80}`, `{"tests":80}`),
			`source_targets: "tests" is not a source`},
		{"samples do not add up", headLine + replace(step0, `"go":3`, `"go":2`),
			":2: step 0: the samples of the sources add up to 3, but the step has 4"},
		{"more samples than the step", headLine + replace(step0, `"go":3`, `"go":9`),
			`:2: step 0: 9 samples of source "go" in a step of 4`},
		{"negative samples", headLine + replace(step0, `"samples":4`, `"samples":-4`), ":2: step 0: negative"},
		{"negative load", headLine + replace(step0, `[64,0`, `[64,-1`),
			":2: step 0: expert_tokens: layer 1, expert 1: -1 tokens"},
		{"layer lost", headLine + step0 + replace(step1, `[[0,0,0,0],`, `[`),
			":3: step 1: expert_tokens: 2 layers, but the first step has 3"},
		{"expert lost", headLine + step0 + replace(step1, `[[0,0,0,0],`, `[[0,0,0],`),
			":3: step 1: expert_tokens: layer 0 has 3 experts, but 4 in the first step"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := parse(strings.NewReader(test.text), "metrics.jsonl")
			if err == nil || !strings.Contains(err.Error(), "metrics.jsonl") ||
				!strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v; want %q", err, test.want)
			}
		})
	}
}

// Wherever the last line breaks off, the lines before it count and the tear is reported; a whole
// last line needs no line end.
func TestParseTorn(t *testing.T) {
	before := headLine + step0
	for cut := 1; cut < len(step1); cut++ {
		run, err := parse(strings.NewReader(before+step1[:cut]), "m")
		if err != nil {
			t.Fatalf("cut after %d bytes: %v", cut, err)
		}
		whole := cut == len(step1)-1
		if whole != (run.Torn == "") || whole != (run.Done == 2) {
			t.Fatalf("cut after %d of %d bytes: %d steps, torn %q", cut, len(step1), run.Done, run.Torn)
		}
		if !whole && run.Torn != "m:3 is cut off after "+strconv.Itoa(cut)+" bytes" {
			t.Fatalf("cut after %d bytes: torn %q", cut, run.Torn)
		}
	}
}

func TestParseLongLine(t *testing.T) {
	long := io.MultiReader(strings.NewReader(headLine+`{"step":0,"x":"`),
		bytes.NewReader(bytes.Repeat([]byte{'x'}, maxLine)))
	_, err := parse(long, "m")
	if err == nil || !strings.Contains(err.Error(), "m:2: the line has more than 16 MiB") {
		t.Errorf("got %v", err)
	}
}

func TestParseReadError(t *testing.T) {
	broken := errors.New("input/output error")
	_, err := parse(io.MultiReader(strings.NewReader(headLine+step0[:30]), iotestErr{broken}), "m")
	if !errors.Is(err, broken) || !strings.Contains(err.Error(), "m:2: ") {
		t.Errorf("got %v", err)
	}
}

type iotestErr struct{ err error }

func (e iotestErr) Read([]byte) (int, error) { return 0, e.err }

func TestRead(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "first-try")
	if err := os.Mkdir(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(dir); !errors.Is(err, fs.ErrNotExist) ||
		!strings.Contains(err.Error(), "first-try is not a run directory") {
		t.Errorf("got %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "metrics.jsonl"), []byte(headLine+step0), 0o666); err != nil {
		t.Fatal(err)
	}
	t.Chdir(dir)
	run, err := Read(".")
	if err != nil || run.Name != "first-try" || run.Done != 1 {
		t.Errorf("got %+v, %v", run, err)
	}
}

// Whatever a file holds: it is refused with its name, or makes a report whose drawings have numbers
// only.
func FuzzRead(f *testing.F) {
	f.Add([]byte(headLine + step0 + step1 + evalLine + resumeLine + step2))
	f.Add([]byte(headLine + step0 + step1[:90]))
	f.Add([]byte(headLine + step0 + backLine + step1 + skippedStep2))
	f.Add([]byte(headLine + step0 + step1 + lostStep2))
	f.Add([]byte(headLine + strings.Replace(step0, "5.5", "1e308", 1) + strings.Replace(step1, `"samples":0`,
		`"samples":9`, 1)))
	f.Add([]byte(headLine + strings.Replace(step0, "[16,16,16,16]", "[]", 1)))
	f.Add([]byte(headLine + strings.Replace(evalLine, `"step":2`, `"step":9000000000000000000`, 1)))
	f.Add([]byte(strings.ReplaceAll(headLine+step0+step2, `"go"`, `"<b>"`)))
	f.Fuzz(func(t *testing.T, data []byte) {
		run, err := parse(bytes.NewReader(data), "metrics.jsonl")
		if err != nil {
			if !strings.HasPrefix(err.Error(), "metrics.jsonl") {
				t.Fatalf("error without a place: %v", err)
			}
			return
		}
		var out bytes.Buffer
		if err := Write(&out, Options{}, run); err != nil {
			t.Fatal(err)
		}
		checkDrawings(t, out.String())
	})
}

// The lists of a run whose model has layers without experts are about the layers with experts, and
// the report names them by their numbers.
func TestExpertLayers(t *testing.T) {
	first := strings.Replace(headLine, `"sources":`, `"expert_layers":[2,5,6],"sources":`, 1)
	run, err := parse(strings.NewReader(first+step0+step1+step2), "m")
	if err != nil {
		t.Fatal(err)
	}
	for _, figure := range []page.Figure{loadFigure(run), imbalanceFigure(run)} {
		if !strings.Contains(string(figure.Chart), ">5</text>") {
			t.Errorf("%s does not name layer 5", figure.Title)
		}
	}
	if _, err := parse(strings.NewReader(strings.Replace(first, "[2,5,6]", "[2]", 1)+step0), "m"); err == nil ||
		!strings.Contains(err.Error(), "3 layers, but expert_layers in the first line has 1") {
		t.Errorf("more layers than expert_layers: %v", err)
	}
}
