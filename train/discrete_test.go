package train

import (
	"context"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"mula/blend"
	"mula/internal/longtest"
	"mula/moe"
	"mula/train/collective"
	"mula/train/devices"
	"mula/train/estimate"
	"mula/train/evaluate"
	"mula/train/optimizer"
	"mula/train/record"
	"mula/train/votes"
	"mula/xpu"
	"mula/xpu/cpu"
	"mula/xpu/discrete"
)

// onDiscrete makes a run use devices whose memory has two sides. A read of the host's side without
// a copy returns wrong numbers. made, unless nil, is called with the device of each rank.
func onDiscrete(o Options, made func(rank int, d *discrete.Device)) Options {
	o.newDevice = func(rank, threads int, precision xpu.Precision) (xpu.Device, error) {
		d := discrete.New(cpu.New(threads, precision))
		if made != nil {
			made(rank, d)
		}
		return d, nil
	}
	return o
}

// What a run leaves is the same, byte for byte, on a device with memory of its own: with every
// optimizer, on one rank and on several, in all that looks at weights, moments, gradients and
// activations on the host.
func TestRunApart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	plan := makePlan(t, dir, "plan.json", "")
	uneven := makePlan(t, dir, "uneven.json", unevenSkips)
	spiky := spikyPlan(t, t.TempDir(), "plan.json", nil, 20, 33)
	const often = "steps: 6\nevaluate: {every: 3, samples: 3}\ncheckpoint: {every: 3}\nlog: {update_ratio_every: 2}\n"
	cases := map[string]struct{ plan, config string }{
		"adamw": {plan, often},
		"adamw bf16": {plan,
			often + "precision: bf16\nmicro_batch_size: 3\nrecompute: layers\noptimizer: {decay: optimus}\n"},
		"groups": {plan, crashConfig + often +
			"optimizer: {groups: [{match: [norms, embedding], weight_decay: 0}, {match: [experts], " +
			"learning_rate_scale: 0.5}]}\nlayout: {expert_dp: 2, ep: 2}\n"},
		"check replicas": {plan, crashConfig + often +
			"layout: {expert_dp: 4, check_replicas_every: 1, optimizer: unsharded}\n"},
		"shared experts": {plan, crashConfig + often +
			"layout: {expert_dp: 1, ep: 2, dispatch: allgather}\nmicro_batch_size: 2\n"},
		"stages": {uneven, pipelineModel + often + "layout: {expert_dp: 1, pp: 3}\nmicro_batch_size: 2\n"},
		"stages and experts": {uneven, pipelineModel + often + "layout: {expert_dp: 1, pp: 2, ep: " +
			"2}\nmicro_batch_size: 2\n"},
		"skip":     {spiky, spikyConfig + spikesYAML("skip")},
		"rollback": {spiky, spikyConfig + spikesYAML("rollback")},
		"rollback to 0": {spiky, strings.Replace(spikyConfig, "{every: 5}", "{every: 0}", 1) +
			spikesYAML("rollback")},
		"rollback, 4 ranks": {spiky, spikyConfig + spikesYAML("rollback") + "layout: {expert_dp: 2, ep: 2}\n"},
	}
	precision := func(p xpu.Precision) string { return fmt.Sprintf("precision: %s\n", p) }
	cases["stages and experts mixed"] = struct{ plan, config string }{uneven, pipelineModel + often +
		precision(xpu.BF16Mixed) + "layout: {expert_dp: 2, pp: 2, virtual_stages: 2, ep: 2, " +
		"check_replicas_every: 1}\n" +
		"micro_batch_size: 2\nbatch_size: 8\n"}
	for i, name := range optimizer.Names() {
		name := optimizer.Name(name)
		yaml := optimizerYAML(name)
		cases[string(name)+" alone"] = struct{ plan, config string }{plan, crashConfig + often + yaml}
		cases[string(name)+" mixed"] = struct{ plan, config string }{plan, crashConfig + often +
			precision(xpu.BF16Mixed) + yaml +
			fmt.Sprintf("layout: {expert_dp: 2, ep: 2, optimizer: %s}\n", schemes[i%len(schemes)])}
		if !name.NeedsWholeTensors() {
			cases[string(name)+" compact"] = struct{ plan, config string }{plan, crashConfig + often +
				precision(xpu.BF16Compact) + yaml + "layout: {expert_dp: 2, ep: 2}\n"}
		}
		for _, scheme := range schemes {
			if name != optimizer.AdamW && scheme != estimate.EPSO {
				continue
			}
			cases[fmt.Sprintf("%s %s", name, scheme)] = struct{ plan, config string }{plan, crashConfig + often + yaml +
				fmt.Sprintf("layout: {expert_dp: 2, ep: 2, optimizer: %s}\n", scheme)}
		}
	}
	for name, test := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := testConfig(t, test.plan, test.config)
			want := mustRun(t, c, Options{})
			other := c
			other.Output = filepath.Join(t.TempDir(), "run")
			if got := mustRun(t, other, onDiscrete(Options{}, nil)); got.Weights != want.Weights ||
				got.LastLoss != want.LastLoss {
				t.Errorf("%+v, want %+v", got, want)
			}
			sameRun(t, name, c.Output, other.Output)
		})
	}
}

// A run resumes from a checkpoint on either device with the same results.
func TestResumeApart(t *testing.T) {
	longtest.SkipIfShort(t)
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for _, name := range optimizer.Names() {
		name := optimizer.Name(name)
		for _, layout := range []string{"", "layout: {expert_dp: 2, ep: 2}\n"} {
			c := testConfig(t, plan, crashConfig+optimizerYAML(name)+layout)
			mustRun(t, c, Options{})
			other := c
			other.Output = filepath.Join(t.TempDir(), "run")
			mustRun(t, other, onDiscrete(stopAfter(2), nil))
			mustRun(t, other, stopAfter(4))
			warn := func(text string) { t.Errorf("%s: warning %q", name, text) }
			mustRun(t, other, onDiscrete(Options{Warn: warn}, nil))
			sameRun(t, string(name), c.Output, other.Output)
		}
	}
}

// A run can start with an imported model, and export its model with the same loss, on such a
// device, too.
func TestInitializeApart(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	first := testConfig(t, plan, crashConfig+"steps: 2\n")
	mustRun(t, first, Options{})
	c := testConfig(t, plan, crashConfig+"steps: 2\nspikes: {action: rollback}\n")
	c.InitializeFrom = first.Output
	want := mustRun(t, c, Options{})
	other := c
	other.Output = filepath.Join(t.TempDir(), "run")
	mustRun(t, other, onDiscrete(Options{}, nil))
	sameRun(t, "initialize_from", c.Output, other.Output)

	data, err := blend.Open(t.Context(), mustPlan(t, plan), blend.OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	var evaluations []record.Evaluation
	for _, d := range []xpu.Device{device(t, 1), discrete.New(device(t, 1))} {
		m, err := moe.Open(want.Checkpoint, d)
		if err != nil {
			t.Fatal(err)
		}
		e, err := evaluate.Model(t.Context(), m, data, evaluate.Options{Samples: 5})
		if err != nil {
			t.Fatal(err)
		}
		evaluations = append(evaluations, e)
	}
	if diff := cmp.Diff(evaluations[0], evaluations[1]); diff != "" {
		t.Errorf("evaluations differ:\n%s", diff)
	}
}

// The tensor whose gradient is not finite is named.
func TestNotFiniteApart(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for _, layout := range []string{"", "layout: {expert_dp: 2}\n"} {
		var errs []string
		for _, o := range []Options{{}, onDiscrete(Options{}, nil)} {
			c := testConfig(t, plan, "z_loss: {coefficient: 1e300}\nspikes: {action: none}\n"+layout)
			_, err := Run(context.Background(), c, o)
			if !errors.Is(err, moe.ErrNotFinite) || !strings.Contains(err.Error(),
				"the gradient is NaN or Inf in model.") {
				t.Fatal(err)
			}
			errs = append(errs, err.Error())
		}
		if errs[0] != errs[1] {
			t.Errorf("%s\non a device with memory of its own:\n%s", errs[0], errs[1])
		}
	}
	data, err := blend.Open(t.Context(), mustPlan(t, plan), blend.OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	d := discrete.New(device(t, 1))
	m, err := moe.New(defaultConfig().Model.Config, d)
	if err != nil {
		t.Fatal(err)
	}
	m.ZeroGradients()
	bad := m.Parameters()[5]
	bad.Grad.Floats()[3] = float32(math.Inf(1))
	o := mustOptimizer(t, defaultOptimizer(optimizer.AdamW), 1, d, m.Parameters())
	r := &run{ranks: oneRank(t), device: d, data: data, trainer: trainer{model: m, optimizer: o}}
	r.votes = votes.New(r.ranks, m.Config(), 1, 1, 1)
	r.votes.Rows = []votes.Row{{}}
	if err := r.votes.Exchange(t.Context(), &record.StepMetrics{Tokens: 1}, votes.Own{Tensor: -1}); err != nil {
		t.Fatal(err)
	}
	if err := r.badGradient(t.Context()); !errors.Is(err, moe.ErrNotFinite) ||
		!strings.Contains(err.Error(), "the gradient is NaN or Inf in "+bad.Name+",") {
		t.Error(err)
	}
}

// A run that does not fit in the device's memory is refused before it starts, with the memory that
// it needs. A run that needs more than estimated names the failed allocation. A device that fails
// ends the run with its error, and the run resumes from its checkpoint on another device.
func TestApartFails(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := testConfig(t, plan, "checkpoint: {every: 2}\n")
	var need estimate.Memory
	want := mustRun(t, c, Options{Report: func(s Summary) { need = s.Memory }})
	if need.HostOnly != 0 {
		t.Errorf("of adamw on one rank %d bytes are the host's alone", need.HostOnly)
	}
	c.Output = filepath.Join(t.TempDir(), "run")
	_, err := Run(context.Background(), c,
		onDiscrete(Options{}, func(_ int, d *discrete.Device) { d.SetCapacity(need.Total() - 1) }))
	if err == nil || !strings.Contains(err.Error(), "a rank needs ") ||
		!strings.Contains(err.Error(), "of its device's memory") || !strings.Contains(err.Error(), "discrete cpu") {
		t.Errorf("too small a device: %v", err)
	}
	_, err = Run(context.Background(), testConfig(t, plan, "steps: 2\nlayout: {expert_dp: 2}\n"),
		onDiscrete(Options{}, func(_ int, d *discrete.Device) { d.SetCapacity(need.Total() * 5 / 4) }))
	if err == nil || !strings.Contains(err.Error(), "for 2 ranks") || !collective.Shared(err) {
		t.Errorf("too small a device for two ranks: %v", err)
	}

	lost := errors.New("the driver has lost it")
	var d *discrete.Device
	_, err = Run(context.Background(), c, onDiscrete(Options{Progress: func(p Progress) {
		if p.Step == 4 {
			d.Fail(lost)
		}
	}}, func(_ int, made *discrete.Device) { d = made }))
	if !errors.Is(err, lost) || !strings.Contains(err.Error(), "step 5") {
		t.Errorf("the device is lost: %v", err)
	}
	if got := mustRun(t, c, Options{}); got.Resumed != "step-00000004" || got.Weights != want.Weights {
		t.Errorf("went on as %+v, want %+v", got, want)
	}
}

// A device of one of several ranks that fails ends them all.
func TestApartFailsOnRank(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for _, layout := range []string{"layout: {expert_dp: 2, ep: 2}\n", "layout: {expert_dp: 2, pp: 2}\n"} {
		c := testConfig(t, plan, "model: {preset: mula-nano, num_hidden_layers: 2}\nmicro_batch_size: 1\n"+layout)
		lost := errors.New("the driver has lost it")
		var found [4]*discrete.Device
		o := onDiscrete(Options{}, func(rank int, d *discrete.Device) { found[rank] = d })
		o.BeforeSum = func(rank int, step int64, _ moe.Bucket) error {
			if rank == 2 && step == 3 {
				found[rank].Fail(lost)
			}
			return nil
		}
		if _, err := Run(context.Background(), c, o); !errors.Is(err, lost) {
			t.Errorf("%s%v", layout, err)
		}
	}
}

// A rank whose sums fail does not close its device while later sums may use it: on a GPU that ends
// the process.
func TestApartClosesLast(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	c := testConfig(t, plan, "model: {preset: mula-nano, num_hidden_layers: 2}\nmicro_batch_size: 1\nlayout: "+
		"{expert_dp: 2}\n")
	var found [2]*discrete.Device
	o := onDiscrete(Options{}, func(rank int, d *discrete.Device) { found[rank] = d })
	failed, sums := errors.New("no sum"), 0
	o.BeforeSum = func(rank int, step int64, _ moe.Bucket) error {
		if rank == 0 {
			return nil
		}
		if sums++; sums == 1 {
			return failed
		}
		closed := false
		for begin := time.Now(); sums == 2 && time.Since(begin) < time.Second/2 &&
			!closed; time.Sleep(time.Millisecond) {
			closed = isClosed(found[rank])
		}
		if closed {
			t.Error("the device was closed while sums were under way")
		}
		return failed
	}
	if _, err := Run(context.Background(), c, o); !errors.Is(err, failed) {
		t.Error(err)
	}
}

// isClosed reports whether a device cannot be used any more.
func isClosed(d xpu.Device) (closed bool) {
	defer func() { closed = recover() != nil }()
	d.Zero(xpu.Of(nil, 0))
	return
}

// What a run takes of a device does not grow: not with steps, evaluations and checkpoints, and not
// when it goes back to its beginning. The measurement of the peak leaves nothing behind.
func TestApartMemory(t *testing.T) {
	plan := spikyPlan(t, t.TempDir(), "plan.json", nil, 20)
	for _, optimizer := range []string{"adamw", "muon", "lion"} {
		c := testConfig(t, plan, strings.NewReplacer("{every: 5}", "{every: 0}", "steps: 40",
			"steps: 30").Replace(spikyConfig)+spikesYAML("rollback")+"optimizer: {name: "+optimizer+"}\n")
		var d *discrete.Device
		var need int64
		var used, steps []int64
		mustRun(t, c, onDiscrete(Options{
			Report:   func(s Summary) { need = s.Memory.Total() - s.Memory.HostOnly },
			Progress: func(p Progress) { used, steps = append(used, d.InUse()), append(steps, p.Step) },
		}, func(_ int, made *discrete.Device) { d = made }))
		if len(steps) != 20+30 || steps[20] != 0 {
			t.Fatalf("%s: steps %v", optimizer, steps)
		}
		if slices.Max(used) != used[0] || slices.Min(used) != used[0] {
			t.Errorf("%s: bytes in use after each step: %v", optimizer, used)
		}
		if used[0] > need || used[0] < need*95/100 {
			t.Errorf("%s: %d bytes in use, the summary says %d", optimizer, used[0], need)
		}
	}
	d := discrete.New(device(t, 1))
	if _, err := devices.MeasurePeak(t.Context(), d, 1e12); err != nil || d.InUse() != 0 {
		t.Errorf("measuring the peak left %d bytes, %v", d.InUse(), err)
	}
}
