package pipeline

import (
	"context"
	"fmt"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"

	"mula/moe"
	"mula/train/checkpoint/checkpointtest"
	"mula/train/optimizer/optimizertest"
	"mula/xpu/comm"
)

// A stage that cannot read the windows of an evaluation, or cannot compute them, does not stop the
// others before they receive its error. Later passes work as usual.
func TestPipelineLoss(t *testing.T) {
	c, err := moe.Preset("mula-nano")
	if err != nil {
		t.Fatal(err)
	}
	c.Layers = 4 // two groups of each stage
	whole, err := moe.New(c, checkpointtest.Device(t, 1))
	if err != nil {
		t.Fatal(err)
	}
	whole.Init(1)
	good := moe.Batch{Tokens: []uint32{1, 2, 3, 4, 5, 6}, Rows: 2, SequenceLength: 2}
	wrong := moe.Batch{Tokens: []uint32{1, 2, 3, 4, 5, 1 << 20}, Rows: 2, SequenceLength: 2}
	want, err := whole.Forward(context.Background(), good)
	if err != nil {
		t.Fatal(err)
	}
	const stages = 2
	for _, test := range []struct{ ep, virtual int }{{1, 1}, {2, 1}, {1, 2}, {2, 2}} {
		ep := test.ep
		optimizertest.Together(t, stages*ep, func(world *comm.Comm) error {
			ctx := context.Background()
			mesh, err := comm.NewMesh(ctx, world, comm.NewShape(map[comm.Axes]int{comm.PP: stages, comm.EP: ep}))
			if err != nil {
				return err
			}
			defer mesh.Close()
			d := checkpointtest.Device(t, 1)
			m, err := moe.NewParallel(c, d, moe.Parallel{Mesh: mesh, Dispatch: moe.AllToAll,
				VirtualStages: test.virtual})
			if err != nil {
				return err
			}
			m.Init(1)
			back, err := mesh.Split(ctx, comm.PP)
			if err != nil {
				return err
			}
			p, err := New(mesh, back, nil, m, good.SequenceLength)
			if err != nil {
				return err
			}
			for stage := range stages {
				for _, bad := range []moe.Batch{{SequenceLength: good.SequenceLength}, wrong} {
					// not read; not of the model
					batch := good
					if stage == p.group.Rank() {
						batch = bad
					}
					if _, err := p.Loss(ctx, batch, good.Rows); (err != nil) != (stage == p.group.Rank() &&
						batch.Rows > 0) {
						return fmt.Errorf("a batch of %d rows: %w", batch.Rows, err)
					}
				}
				stats, err := p.Loss(ctx, good, good.Rows)
				if err != nil {
					return err
				}
				if p.Last() && math.Abs(stats.Loss/want.Loss-1) > 1e-6 {
					return fmt.Errorf("loss %v, want %v", stats.Loss, want.Loss)
				}
			}
			return nil
		})
	}
}

// Every tensor of a model belongs to one stage.
func TestStageTensors(t *testing.T) {
	c, err := moe.Preset("mula-tiny")
	if err != nil {
		t.Fatal(err)
	}
	c.Layers = 5
	for _, test := range []struct{ stages, virtual int }{{1, 1}, {2, 1}, {3, 1}, {4, 1}, {5, 1}, {2, 2}} {
		stages := test.stages
		var all []string
		meshes := make([]*comm.Mesh, stages)
		optimizertest.Together(t, stages, func(world *comm.Comm) (err error) {
			meshes[world.Rank()], err = comm.NewMesh(t.Context(), world,
				comm.NewShape(map[comm.Axes]int{comm.PP: stages}))
			return err
		})
		for stage := range stages {
			m, err := moe.NewParallel(c, checkpointtest.Device(t, 1), moe.Parallel{Mesh: meshes[stage],
				VirtualStages: test.virtual})
			if err != nil {
				t.Fatal(err)
			}
			var held, want []string
			for _, tensor := range c.StageTensors(stage, stages, test.virtual) {
				held = append(held, tensor.Name)
			}
			for _, p := range m.Parameters() {
				want = append(want, p.Name)
			}
			if diff := cmp.Diff(want, held); diff != "" {
				t.Errorf("stage %d of %+v:\n%s", stage, test, diff)
			}
			all = append(all, held...)
		}
		if len(all) != len(c.Tensors()) {
			t.Errorf("%+v have %d tensors of %d", test, len(all), len(c.Tensors()))
		}
	}
}
