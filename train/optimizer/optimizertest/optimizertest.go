// Package optimizertest has parameters and ranks for tests of optimizers.
package optimizertest

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"

	"mula/moe"
	"mula/xpu"
	"mula/xpu/comm"
	"mula/xpu/comm/local"
)

// Parameters returns tensors of all kinds of names that Muon distinguishes, of sizes that are cut
// into blocks in every way.
func Parameters(seed uint64) []*moe.Parameter {
	rng := rand.New(rand.NewPCG(seed, 4))
	var parameters []*moe.Parameter
	for _, p := range []moe.Parameter{
		{Name: "model.embed_tokens.weight", Shape: []int{17, 9}},
		{Name: "model.layers.0.self_attn.q_proj.weight", Shape: []int{260, 256}},
		{Name: "model.layers.0.self_attn.o_proj.weight", Shape: []int{64, 1030}},
		{Name: "model.layers.0.mlp.gate.weight", Shape: []int{4, 9}},
		{Name: "model.layers.0.mlp.experts.0.up_proj.weight", Shape: []int{70, 30}},
		{Name: "model.layers.0.mlp.experts.1.down_proj.weight", Shape: []int{30, 70}},
		{Name: "model.norm.weight", Shape: []int{1<<12 + 1}},
		{Name: "lm_head.weight", Shape: []int{2, xpu.BlockSize}},
	} {
		n := 1
		for _, d := range p.Shape {
			n *= d
		}
		p.Weight, p.Grad = xpu.Of(make([]float32, n), n), xpu.Of(make([]float32, n), n)
		for i := range p.Weight.Floats() {
			p.Weight.Floats()[i] = float32(rng.NormFloat64())
		}
		parameters = append(parameters, &p)
	}
	return parameters
}

// Together runs f as every rank of a group of goroutines, and fails the test at the error of one.
func Together(t testing.TB, size int, f func(world *comm.Comm) error) {
	t.Helper()
	errs := make([]error, size)
	var group sync.WaitGroup
	for rank, link := range local.New(size) {
		group.Go(func() {
			world := comm.New(link)
			defer world.Close()
			if errs[rank] = f(world); errs[rank] == nil {
				errs[rank] = world.Barrier(context.Background())
			}
		})
	}
	group.Wait()
	for rank, err := range errs {
		if err != nil {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
	if t.Failed() {
		t.FailNow()
	}
}
