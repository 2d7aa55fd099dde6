package train

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"mula/moe"
	"mula/xpu"
	"mula/xpu/comm"
	"mula/xpu/comm/local"
	"mula/xpu/cpu"
	"mula/xpu/discrete"
)

// Ranks die one after the other, in the exchange of gradients, and spares join the others. The
// others keep plan and device, and the run has the results of an unbroken one.
func TestKept(t *testing.T) {
	t.Parallel()
	plan := makePlan(t, t.TempDir(), "plan.json", "")
	type testCase struct {
		layout LayoutConfig
		more   string
		dead   []int // a rank of each group
	}
	cases := map[string]testCase{"experts": {LayoutConfig{DP: 2, EP: 2}, "", []int{2, 0}}}
	if !testing.Short() {
		cases["unsharded"] = testCase{LayoutConfig{DP: 4, EP: 1, Optimizer: "unsharded"}, "precision: bf16_mixed\n",
			[]int{0, 0, 3, 1}}
		cases["stages"] = testCase{LayoutConfig{DP: 1, PP: 2, EP: 2}, "micro_batch_size: 2\n", []int{3, 1, 0}}
	}
	for name, test := range cases {
		t.Run(name, func(t *testing.T) {
			c := snapshotsConfig(t, plan, test.layout, test.more)
			if c.Layout.PP > 1 {
				c.Model.Layers = 5
			}
			c.Checkpoint.SnapshotEvery, c.Checkpoint.Background = 1, true
			unbroken := c
			unbroken.Output, unbroken.Checkpoint.SnapshotEvery = filepath.Join(t.TempDir(), "run"), 0
			want := mustRun(t, unbroken, Options{})
			n := c.Layout.Ranks()
			kept, opened := make([]*Kept, n), make([]int, n)
			for rank := range kept {
				kept[rank] = &Kept{}
			}
			for group, dead := range append(test.dead, -1) {
				step := int64(2 + 2*group)
				results, errs := keptGroup(t.Context(), c, kept, opened, dead, step)
				for rank, err := range errs {
					switch {
					case dead < 0 && err != nil:
						t.Fatalf("rank %d: %v", rank, err)
					case dead >= 0 && rank != dead && !errors.Is(err, comm.ErrPeerLost):
						t.Fatalf("rank %d has the error %v, but rank %d is lost", rank, err, dead)
					}
				}
				if dead >= 0 {
					kept[dead].Close() // as at the end of a process
					kept[dead] = &Kept{}
					continue
				}
				if results[0].Weights != want.Weights || !strings.HasPrefix(results[0].Resumed, "snapshot-") {
					t.Errorf("resumed from %s, with weights %.16s…, want %.16s…", results[0].Resumed,
						results[0].Weights, want.Weights)
				}
			}
			sameRun(t, name, unbroken.Output, c.Output)
			for rank, count := range opened {
				deaths := 0
				for _, dead := range test.dead {
					if dead == rank {
						deaths++
					}
				}
				if count != 1+deaths {
					t.Errorf("rank %d has opened %d devices, and died %d times", rank, count, deaths)
				}
			}
			for rank := range kept {
				kept[rank].Close()
			}
		})
	}
}

// keptGroup runs the ranks of a group until a rank dies at a step, or to the end if dead is
// negative. opened counts the devices.
func keptGroup(ctx context.Context, c Config, kept []*Kept, opened []int, dead int, step int64) ([]Result, []error) {
	n := len(kept)
	results, errs := make([]Result, n), make([]error, n)
	var ranks sync.WaitGroup
	for rank, link := range local.New(n) {
		rankCtx, die := context.WithCancel(ctx)
		o := Options{World: comm.New(link), ranksHere: n, Kept: kept[rank],
			hosts: comm.NewHosts(slices.Repeat([]string{"a"}, n)),
			newDevice: func(_, threads int, precision xpu.Precision) (xpu.Device, error) {
				opened[rank]++
				return discrete.New(cpu.New(threads, precision)), nil
			},
			BeforeSum: func(_ int, at int64, _ moe.Bucket) error {
				if rank == dead && at == step {
					die()
				}
				return nil
			}}
		ranks.Go(func() {
			defer die()
			results[rank], errs[rank] = Run(rankCtx, c, o)
			if errs[rank] == nil {
				errs[rank] = o.World.Barrier(ctx)
			}
			o.World.Close()
		})
	}
	ranks.Wait()
	return results, errs
}
