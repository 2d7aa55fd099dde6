package train

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"

	"mula/internal/chart"
	"mula/internal/quantity"
	"mula/moe"
	"mula/train/estimate"
	"mula/xpu"
	"mula/xpu/comm"
	"mula/xpu/comm/simulated"
	"mula/xpu/cpu"
)

// simulatedMachine is Aurora without the groups of its network, and with ranks that compute equally
// fast.
func simulatedMachine() estimate.Machine {
	m := estimate.Aurora
	m.NodesPerGroup.Value, m.Variation.Value = 0, 0
	return m
}

// simulatedNetwork returns the network on which a message lasts as long as mula estimate assumes.
func simulatedNetwork(m estimate.Machine, hosts []string) simulated.Network {
	return simulated.Network{Hosts: hosts,
		Inside: simulated.Link{Message: m.Latency.Value, Rate: m.NodeLink.Value * m.NodeEfficiency.Value},
		Between: simulated.Link{Message: m.Latency.Value,
			Rate: m.Network.Value * m.NetworkEfficiency.Value / m.RanksPerNode.Value}}
}

// simulatedHosts returns the host of each rank, on hosts with the given numbers of ranks.
func simulatedHosts(ranks ...int) (hosts []string) {
	for host, n := range ranks {
		hosts = append(hosts, slices.Repeat([]string{fmt.Sprint("host-", host)}, n)...)
	}
	return hosts
}

// simulatedConfig is a run of a model of a few parameters, with one sample of each rank in a step.
func simulatedConfig(t testing.TB, plan string, ranks int, steps int64, scheme estimate.Scheme) Config {
	t.Helper()
	return testConfig(t, plan, fmt.Sprintf("model: {preset: mula-nano, hidden_size: 16, num_attention_heads: 2, "+
		"num_key_value_heads: 2, num_hidden_layers: 1, num_experts: 12, intermediate_size: 8}\n"+
		"batch_size: %d\nmicro_batch_size: 1\nsteps: %d\ncheckpoint: {every: 0}\nevaluate: {every: 0}\n"+
		"layout: {expert_dp: %d, ep: 12, optimizer: %s, norm: reduce, check_replicas_every: 0, "+
		"uniform_routing: true}\nlog: {update_ratio_every: 0}\n"+
		"schedule: {learning_rate: 3e-3, warmup_steps: 1, decay_steps: 3}\n", ranks, steps, ranks/12, scheme))
}

// A simulatedStep has the figures of the first step of a simulated run.
type simulatedStep struct {
	Ranks           int
	Seconds         float64
	Estimated       estimate.Time
	Messages        int64   // sent by the rank that sends most
	Mean            float64 // messages sent by a rank
	Inside, Between float64 // bytes sent by a rank, the mean
	Memory          int64   // bytes that the process has from the system after the run

	// Of a save before the second step: bytes received by a rank, by the median rank and by the
	// rank that receives most after rank 0, and the messages that rank 0 receives.
	SaveFirst, SaveMedian, SaveMost, SaveMessages int64
}

// sharedDevice is a device that its users do not close.
type sharedDevice struct{ xpu.Device }

func (sharedDevice) Close() {}

// backwardSeconds divides the time of a pass of a model whose layers have experts: the backward
// passes of the head and of a layer.
func backwardSeconds(c moe.Config, length int, pass float64) (head, layer float64) {
	ofHead := 6 * float64(c.VocabSize) * float64(c.HiddenSize)
	backward := pass * 2 / 3
	head = backward * ofHead / c.FLOPsPerToken(length)
	return head, (backward - head) / float64(c.Layers)
}

// simulateRun runs the trainer on the network of a machine. Passes and updates advance the clock of
// a rank by their estimated times. If last is not negative, the run is cancelled when all ranks
// have begun that step. A run of several steps also saves a checkpoint before the second one.
func simulateRun(t testing.TB, c Config, m estimate.Machine, network simulated.Network, last int,
	late bool) (Result, simulatedStep) {
	t.Helper()
	n := len(network.Hosts)
	p, err := c.ReadPlan()
	if err != nil {
		t.Fatal(err)
	}
	in, err := c.EstimateInput(p, m)
	if err != nil {
		t.Fatal(err)
	}
	estimated, err := estimate.Compute(in)
	if err != nil {
		t.Fatal(err)
	}
	// During the backward pass of the last micro-batch, if sums are not late.
	head, layer := backwardSeconds(in.Config, in.Layout.SequenceLength,
		estimated.Time.Compute/float64(in.Layout.MicroBatches()))
	before := estimated.Time.Compute + estimated.Time.Update
	if !late {
		before -= head + float64(in.Config.Layers)*layer
	}
	w, hosts := simulated.New(network), comm.NewHosts(network.Hosts)
	device := sharedDevice{cpu.New(1, xpu.FP32)}
	defer device.Device.Close()
	cancelled, cancel := context.WithCancel(t.Context())
	defer cancel()
	var mu sync.Mutex
	began := map[int]int{} // ranks that have begun a step
	times, counts := make([][2]float64, n), make([][2]simulated.Counts, n)
	results, errs := make([]Result, n), make([]error, n)
	saves, saveErrs := make([][2]simulated.Counts, n), make([]error, n) // before and after
	var ranks sync.WaitGroup
	for rank := range n {
		ranks.Go(func() {
			ctx, world, step := w.Context(cancelled, rank), comm.New(w.Transport(rank)), 0
			defer world.Close()
			var buckets []moe.Bucket
			results[rank], errs[rank] = Run(ctx, c, Options{World: world, ranksHere: n, hosts: hosts, late: late,
				newDevice: func(int, int, xpu.Precision) (xpu.Device, error) { return device, nil },
				atStep: func(r *run) {
					if step < 2 {
						times[rank][step], counts[rank][step] = w.Time(rank), w.Counts(rank)
					}
					if step == 1 {
						saves[rank][0] = w.Counts(rank)
						_, saveErrs[rank] = r.save(ctx, false)
						saves[rank][1] = w.Counts(rank)
					}
					mu.Lock()
					if began[step]++; began[step] == n && step == last {
						cancel()
					}
					mu.Unlock()
					step++
					buckets = r.model.Buckets()
					simulated.Compute(ctx, before)
				},
				reducing: func(bucket int) {
					switch {
					case late:
					case bucket == 0:
						simulated.Compute(ctx, head)
					case buckets[bucket].Divided: // the first of a layer
						simulated.Compute(ctx, layer)
					}
				}})
			if errs[rank] == nil {
				errs[rank] = world.Barrier(ctx)
			}
		})
	}
	ranks.Wait()
	if err := firstCause(errs); err != nil && cancelled.Err() == nil {
		t.Fatal(err)
	}
	if err := firstCause(saveErrs); err != nil {
		t.Fatal(err)
	}
	s := simulatedStep{Ranks: n, Estimated: estimated.Time}
	var first, second float64
	for rank := range n {
		first, second = max(first, times[rank][0]), max(second, times[rank][1])
		a, b := counts[rank][0], counts[rank][1]
		sent := b.MessagesInside + b.MessagesBetween - a.MessagesInside - a.MessagesBetween
		s.Messages, s.Mean = max(s.Messages, sent), s.Mean+float64(sent)/float64(n)
		s.Inside += float64(b.BytesInside-a.BytesInside) / float64(n)
		s.Between += float64(b.BytesBetween-a.BytesBetween) / float64(n)
	}
	s.Seconds = second - first
	var received []int64
	for rank := range n {
		received = append(received, saves[rank][1].ReceivedBytes-saves[rank][0].ReceivedBytes)
	}
	s.SaveFirst, s.SaveMessages = received[0], saves[0][1].Received-saves[0][0].Received
	slices.Sort(received[1:])
	s.SaveMedian, s.SaveMost = received[1:][(n-1)/2], received[n-1]
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	s.Memory = int64(memory.Sys - memory.HeapReleased)
	return results[0], s
}

// A run on a simulated network has the bits of a run of goroutines without one, also if it resumes
// on other ranks and uneven hosts. A step lasts about as long as mula estimate says: on few hosts,
// small all-reduces that follow each other overlap more than on many.
func TestSimulatedRun(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "samples: 200\n")
	c := simulatedConfig(t, plan, 48, 2, estimate.Unsharded)
	want := mustRun(t, c, Options{})
	c.Output = t.TempDir()
	m := simulatedMachine()
	got, step := simulateRun(t, c, m, simulatedNetwork(m, simulatedHosts(12, 12, 12, 12)), -1, false)
	if got.Weights != want.Weights || got.LastLoss != want.LastLoss {
		t.Errorf("weights %.16s… and loss %v on a simulated network, %.16s… and %v without", got.Weights, got.LastLoss,
			want.Weights, want.LastLoss)
	}
	if off := math.Abs(step.Seconds/step.Estimated.Step() - 1); off > 0.15 {
		t.Errorf("a step lasts %g s, and the estimate is %g s", step.Seconds, step.Estimated.Step())
	}

	// A rank receives little in a save: all-reduces, and a few hundred bytes.
	if step.SaveMedian > 2000 || step.SaveMost > 20_000 || step.SaveFirst > 100_000 {
		t.Errorf("in a save, rank 0 receives %d bytes, half of the others %d, one %d", step.SaveFirst, step.SaveMedian,
			step.SaveMost)
	}

	resumed := simulatedConfig(t, plan, 24, 3, estimate.Unsharded)
	resumed.BatchSize, resumed.Output = c.BatchSize, c.Output
	network := simulatedNetwork(m, simulatedHosts(12, 7, 5))
	network.Noise = 0.1
	got, _ = simulateRun(t, resumed, m, network, -1, false)
	resumed.Output = want.Checkpoint[:strings.LastIndex(want.Checkpoint, "/checkpoints")]
	want = mustRun(t, resumed, Options{})
	if got.Resumed == "" || got.Steps != 3 || got.Weights != want.Weights {
		t.Errorf("a run that resumes from %q has weights %.16s…, want %.16s…", got.Resumed, got.Weights, want.Weights)
	}
}

// If passes take as long as messages, a step is shorter if gradients are summed during the backward
// pass: at least by the time that mula estimate counts as hidden. It assumes that no gradients are
// sent while the pass sends tokens; on the simulated network, they are.
func TestSimulatedOverlap(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "samples: 96\n")
	for _, scheme := range []estimate.Scheme{estimate.Unsharded, estimate.EPSO} {
		c := simulatedConfig(t, plan, 48, 2, scheme)
		c.Model.Layers = 4
		m := simulatedMachine()
		m.ComputeEfficiency.Value = 3e-5
		run := func(late bool) simulatedStep {
			c.Output = t.TempDir()
			_, step := simulateRun(t, c, m, simulatedNetwork(m, simulatedHosts(12, 12, 12, 12)), 1, late)
			return step
		}
		early, late := run(false), run(true)
		step, hidden := early.Estimated.Step(), early.Estimated.Hidden
		if hidden < step/20 {
			t.Errorf("%s: the estimate has %g s hidden in a step of %g s", scheme, hidden, step)
		}
		if math.Abs(late.Seconds/(step+hidden)-1) > 0.1 || math.Abs(early.Seconds/step-1) > 0.1 {
			t.Errorf("%s: a step lasts %g s, and %g s with sums after the pass; the estimates are %g s and %g s",
				scheme, early.Seconds, late.Seconds, step, step+hidden)
		}
		if saved := late.Seconds - early.Seconds; saved < 0.95*hidden {
			t.Errorf("%s: sums during the pass save %g s of a step, and the estimate is %g s", scheme, saved, hidden)
		}
	}
}

// simulateVariable has the path of the table that make simulate-ranks writes, without its
// extension.
const simulateVariable = "MULA_SIMULATE_RANKS"

// TestSimulateRanks writes a table and a chart of the steps of many ranks: see make simulate-ranks.
func TestSimulateRanks(t *testing.T) {
	path := os.Getenv(simulateVariable)
	if path == "" {
		t.Skip("set " + simulateVariable + ", or run make simulate-ranks")
	}
	dir := t.TempDir()
	var steps []simulatedStep
	var table, saves bytes.Buffer
	fmt.Fprint(&saves, "\n## A save\n\nBytes that a rank receives when a checkpoint is saved\n"+
		"([ranks.md](../docs/reference/ranks.md#checkpoints)).\n\n"+
		"| ranks | rank 0 | messages to rank 0 | median rank | most of the other ranks |\n|---|---|---|---|---|\n")
	fmt.Fprint(&table, "# Steps of simulated ranks\n\n`make simulate-ranks` writes this page and its chart.\n"+
		"[ranks.md](../docs/reference/ranks.md#simulated-ranks) describes the simulation. Messages and\nbytes are "+
		"sent by a rank in a step.\n\n![simulated and estimated times of a step]("+filepath.Base(path)+".svg)\n\n"+
		"| ranks | simulated | estimated | difference | messages, most | mean | bytes inside hosts | "+
		"between hosts | memory of the process |\n|---|---|---|---|---|---|---|---|---|\n")
	for ranks := 384; ranks <= 12288; ranks *= 2 {
		plan := makePlan(t, dir, fmt.Sprintf("plan%d.json", ranks), fmt.Sprintf("samples: %d\n", 2*ranks))
		m := simulatedMachine()
		network := simulatedNetwork(m, simulatedHosts(slices.Repeat([]int{12}, ranks/12)...))
		_, s := simulateRun(t, simulatedConfig(t, plan, ranks, 2, estimate.Unsharded), m, network, 1, false)
		steps = append(steps, s)
		estimated := s.Estimated.Step()
		line := fmt.Sprintf("| %s | %.2f ms | %.2f ms | %+.1f %% | %s | %s | %.0f kB | %.0f kB | %.1f GB |\n",
			quantity.Grouped(ranks), 1e3*s.Seconds, 1e3*estimated, 100*(s.Seconds/estimated-1),
			quantity.Grouped(s.Messages), quantity.Grouped(int(math.Round(s.Mean))), s.Inside/1e3, s.Between/1e3,
			float64(s.Memory)/1e9)
		table.WriteString(line)
		save := fmt.Sprintf("| %s | %.0f kB | %s | %s | %.1f kB |\n", quantity.Grouped(ranks), float64(s.SaveFirst)/1e3,
			quantity.Grouped(s.SaveMessages), quantity.Grouped(s.SaveMedian), float64(s.SaveMost)/1e3)
		saves.WriteString(save)
		t.Log(line, save)
		debug.FreeOSMemory()
		if err := os.WriteFile(path+".md", slices.Concat(table.Bytes(), saves.Bytes()), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path+".svg", simulatedChart(steps), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// simulatedChart draws the simulated and the estimated times of steps.
func simulatedChart(steps []simulatedStep) []byte {
	const left, right, top, bottom = 70.0, 560.0, 50.0, 330.0
	last, longest := steps[len(steps)-1], 0.0
	for _, s := range steps {
		longest = max(longest, s.Seconds, s.Estimated.Step())
	}
	x := &chart.Axis{Lo: float64(steps[0].Ranks), Hi: float64(max(2*steps[0].Ranks, last.Ranks)), From: left, To: right,
		Log: true}
	y := chart.NewAxis(0, 1e3*longest, bottom, top, 6, false)
	d := chart.Drawing{Width: 700, Height: 380}
	d.Add("<style>text{font:12px sans-serif;fill:#222}.title{font-size:16px;font-weight:bold}.grid{stroke:#ddd}" +
		".base{stroke:#888}polyline{fill:none}</style>")
	d.Add(`<rect width="%s" height="%s" fill="#fff"/>`, 700.0, 380.0)
	d.Text("title", 14, 24, chart.Start, "Milliseconds of a step, simulated and estimated")
	for i, tick := range y.Ticks {
		d.Line("grid", left, y.At(tick), right, y.At(tick))
		d.Text("", left-8, y.At(tick)+4, chart.End, y.Labels[i])
	}
	d.Line("base", left, bottom, right, bottom)
	for _, s := range steps {
		d.Text("", x.At(float64(s.Ranks)), bottom+18, chart.Middle, quantity.Grouped(s.Ranks))
	}
	d.Text("", (left+right)/2, bottom+38, chart.Middle, "ranks")
	for _, curve := range []struct {
		name, colour, dash string
		of                 func(simulatedStep) float64
	}{
		{"estimated", "#d55e00", "7 4", func(s simulatedStep) float64 { return s.Estimated.Step() }},
		{"simulated", "#0072b2", "", func(s simulatedStep) float64 { return s.Seconds }},
	} {
		var points []string
		for _, s := range steps {
			points = append(points, chart.Number(x.At(float64(s.Ranks)))+","+chart.Number(y.At(1e3*curve.of(s))))
		}
		d.Add(`<polyline points="%s" stroke="%s" stroke-width="2" stroke-dasharray="%s"/>`, strings.Join(points, " "),
			curve.colour, curve.dash)
		d.Text("", right+10, y.At(1e3*curve.of(last))+4, chart.Start, curve.name)
	}
	return []byte(d.Image("step times of simulated ranks",
		` xmlns="http://www.w3.org/2000/svg" width="700" height="380"`) + "\n")
}
