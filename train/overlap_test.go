package train

import (
	"context"
	"fmt"
	"path/filepath"
	"sync"
	"testing"

	"mula/internal/longtest"
	"mula/internal/testwait"
	"mula/moe"
	"mula/train/estimate"
	"mula/xpu"
	"mula/xpu/comm"
	"mula/xpu/comm/local"
	"mula/xpu/cpu"
	"mula/xpu/discrete"
	"mula/xpu/gpu"
	"mula/xpu/opencl"
)

// The model of these tests has three layers, so that buckets 1 and 2 have the gradients of the last
// layer. The exchange of bucket 2 meets the backward pass of the first layer.
const (
	overlapConfig = "model: {preset: mula-nano, num_hidden_layers: 3}\nsteps: 2\nevaluate: {every: 0}\n"
	overlapLayers = 3
	overlapBucket = 2
	overlapSteps  = 2
)

// overlapRanks are the ranks of a run in which the exchange of a bucket's gradients and the
// backward pass of another layer wait for each other in each step.
type overlapRanks struct {
	ctx  context.Context
	hold bool // the device's commands wait, not the goroutine that enqueues them

	mu    sync.Mutex
	ranks [2]overlapRank
}

type overlapRank struct {
	summed    int // buckets, in all steps
	attention int // backward passes of an attention, in all steps
	steps     [overlapSteps]overlapStep
}

// An overlapStep has channels that are closed when something has happened in a step.
type overlapStep struct {
	passed    chan struct{} // the commands of the backward pass are enqueued
	exchanged chan struct{} // the exchange of the bucket has begun
	reached   chan struct{} // the backward pass has reached the first layer
}

func newOverlapRanks(t *testing.T, hold bool) *overlapRanks {
	o := &overlapRanks{ctx: testwait.Context(t), hold: hold}
	for i := range o.ranks {
		for j := range o.ranks[i].steps {
			o.ranks[i].steps[j] = overlapStep{make(chan struct{}), make(chan struct{}), make(chan struct{})}
		}
	}
	return o
}

// await returns an error if c is not closed before the deadline of the test.
func (o *overlapRanks) await(c <-chan struct{}, what string) error {
	select {
	case <-c:
		return nil
	case <-o.ctx.Done():
		return fmt.Errorf("not before the deadline of the test: %s", what)
	}
}

// beforeSum is called in the order of the buckets, before a bucket's gradients are read.
func (o *overlapRanks) beforeSum(rank int, step int64, _ moe.Bucket) error {
	o.mu.Lock()
	o.ranks[rank].summed++
	o.mu.Unlock()
	if !o.hold {
		return nil
	}
	return o.await(o.ranks[rank].steps[step].passed, "the commands of the pass are enqueued")
}

// exchange is called before every exchange of a rank. Ranks exchange nothing but gradients during a
// pass.
func (o *overlapRanks) exchange(rank int) error {
	const buckets = 2*overlapLayers + 2
	r := &o.ranks[rank]
	o.mu.Lock()
	summed := r.summed
	o.mu.Unlock()
	bucket, step := (summed-1)%buckets, (summed-1)/buckets
	if summed == 0 || bucket != overlapBucket {
		return nil
	}
	s := &r.steps[step]
	select {
	case <-s.exchanged: // a later part of the bucket
		return nil
	default:
	}
	close(s.exchanged)
	return o.await(s.reached, "the backward pass reaches the first layer during an exchange")
}

// overlapTransport calls exchange before every exchange.
type overlapTransport struct {
	comm.Transport
	exchange func() error
}

func (t overlapTransport) AllToAll(ctx context.Context, send, recv [][]byte) error {
	if err := t.exchange(); err != nil {
		return err
	}
	return t.Transport.AllToAll(ctx, send, recv)
}

func (t overlapTransport) Split(ctx context.Context, color, key int) (comm.Transport, error) {
	part, err := t.Transport.Split(ctx, color, key)
	if part == nil || err != nil {
		return part, err
	}
	return overlapTransport{part, t.exchange}, nil
}

// overlapDevice calls attention before every backward pass of an attention.
type overlapDevice struct {
	xpu.Device
	attention func(xpu.Device)
}

func (d overlapDevice) AttendGrad(a xpu.Attention, dcontext, dqkv, dk, dv xpu.Tensor) {
	d.attention(d.Device)
	d.Device.AttendGrad(a, dcontext, dqkv, dk, dv)
}

// attention stops the backward pass of the first layer until the exchange of the bucket has begun.
func (o *overlapRanks) attention(t *testing.T, rank int, d xpu.Device) {
	r := &o.ranks[rank]
	layer, step := overlapLayers-1-r.attention%overlapLayers, r.attention/overlapLayers
	r.attention++
	if layer > 0 {
		return
	}
	s := &r.steps[step]
	const what = "an exchange begins during the backward pass"
	if !o.hold {
		close(s.reached)
		if err := o.await(s.exchanged, what); err != nil {
			t.Error(err)
		}
		return
	}
	proceed, err := d.(*gpu.Device).Hold()
	if err != nil {
		t.Error(err)
		return
	}
	close(s.reached)
	go func() {
		if err := o.await(s.exchanged, what); err != nil {
			t.Error(err)
		}
		if err := proceed(); err != nil {
			t.Error(err)
		}
	}()
}

// run runs two ranks on such devices.
func (o *overlapRanks) run(t *testing.T, c Config, device func(threads int) (xpu.Device, error)) Result {
	t.Helper()
	options := Options{BeforeSum: o.beforeSum, ranksHere: len(o.ranks),
		passed: func(r *run) { close(o.ranks[r.ranks.Rank()].steps[r.state.Step].passed) },
		newDevice: func(rank, threads int, _ xpu.Precision) (xpu.Device, error) {
			d, err := device(threads)
			return overlapDevice{d, func(d xpu.Device) { o.attention(t, rank, d) }}, err
		}}
	var results [2]Result
	var errs [2]error
	var ranks sync.WaitGroup
	for rank, link := range local.New(len(o.ranks)) {
		ranks.Go(func() {
			own := options
			own.World = comm.New(overlapTransport{link, func() error { return o.exchange(rank) }})
			defer own.World.Close()
			results[rank], errs[rank] = Run(context.Background(), c, own)
			if errs[rank] == nil {
				errs[rank] = own.World.Barrier(context.Background())
			}
		})
	}
	ranks.Wait()
	if err := firstCause(errs[:]); err != nil {
		t.Fatal(err)
	}
	return results[0]
}

// The gradients of a layer are exchanged while the device computes the backward pass of a layer
// below: each waits for the other, so a run that exchanges them after the pass would not end. The
// bits equal the bits of such a run.
func TestOverlapOnProcessor(t *testing.T) {
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for name, device := range map[string]func(threads int) (xpu.Device, error){
		"processor": func(threads int) (xpu.Device, error) { return cpu.New(threads, xpu.FP32), nil },
		"discrete":  func(threads int) (xpu.Device, error) { return discrete.New(cpu.New(threads, xpu.FP32)), nil },
	} {
		for _, scheme := range schemes {
			c := ranksConfig(t, plan, LayoutConfig{DP: 2, EP: 1, Optimizer: scheme}, overlapConfig)
			c.MicroBatchSize = c.BatchSize / 2
			got := newOverlapRanks(t, false).run(t, c, device)
			c.Output = filepath.Join(t.TempDir(), "run")
			if want := mustRun(t, c, Options{late: true}); got.Weights != want.Weights {
				t.Errorf("%s, %s: other weights than of a run that exchanges gradients after the pass", name, scheme)
			}
		}
	}
}

// The same holds for OpenCL, whose queue holds the commands of the backward pass. The host begins
// to read gradients after it has enqueued all commands.
func TestOverlapOnOpenCL(t *testing.T) {
	longtest.SkipIfShort(t)
	best, err := opencl.Choose(useOpenCL(t), opencl.Choice{})
	if err != nil {
		t.Fatal(err)
	}
	cache, err := opencl.UserCache()
	if err != nil {
		t.Fatal(err)
	}
	device := func(threads int) (xpu.Device, error) {
		return gpu.New(context.Background(), best, gpu.Options{Threads: threads, Cache: cache})
	}
	plain := Options{newDevice: func(_, threads int, _ xpu.Precision) (xpu.Device, error) { return device(threads) }}
	late := plain
	late.late = true
	before := opencl.Live()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	for _, scheme := range schemes {
		c := ranksConfig(t, plan, LayoutConfig{DP: 2, EP: 1, Optimizer: scheme}, overlapConfig)
		c.MicroBatchSize = c.BatchSize / 2
		got := newOverlapRanks(t, true).run(t, c, device)
		c.Output = filepath.Join(t.TempDir(), "run")
		if want := mustRun(t, c, late); got.Weights != want.Weights {
			t.Errorf("%s: other weights than of a run that exchanges gradients after the pass", scheme)
		}
	}
	for _, l := range []LayoutConfig{{DP: 2, PP: 2, EP: 1}, {DP: 2, EP: 2, Optimizer: estimate.SO}} {
		c := ranksConfig(t, plan, l, overlapConfig)
		got := mustRun(t, c, plain)
		c.Output = filepath.Join(t.TempDir(), "run")
		if want := mustRun(t, c, late); got.Weights != want.Weights {
			t.Errorf("%+v: other weights than of a run that exchanges gradients after the pass", l)
		}
	}
	if after := opencl.Live(); after != before {
		t.Errorf("left behind: %+v, before: %+v", after, before)
	}
}
