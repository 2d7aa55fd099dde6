package votes

import (
	"context"
	"errors"
	"math"
	"slices"
	"testing"

	"mula/moe"
	"mula/train/group"
	"mula/train/optimizer/optimizertest"
	"mula/train/record"
	"mula/xpu/comm"
)

// All ranks have the rows of the last stages in the order of their positions, and find the same
// rank at fault: the first stage with a non-finite value, or none if several hosts have one.
func TestExchange(t *testing.T) {
	shape := comm.NewShape(map[comm.Axes]int{comm.ExpertDP: 2, comm.PP: 2}) // ranks 0 and 1 are one pipeline
	for _, bad := range [][]int{nil, {2}, {0, 2}} {
		optimizertest.Together(t, 4, func(world *comm.Comm) error {
			g, err := group.New(context.Background(), world, shape, group.Options{})
			if err != nil {
				return err
			}
			defer g.Close()
			g.Hosts = []string{"a", "a", "b", "b"}
			v := New(g, moe.Config{}, 4)
			m := record.StepMetrics{Step: 2, First: 8, AuxLoss: 1}
			own := Own{Tensor: -1, NonFinite: slices.Contains(bad, g.Rank())}
			if slices.Contains(bad, g.Rank()-1) { // the last stage has the loss
				own.Tensor, m.ZLoss = 7, math.NaN()
			}
			if g.Rank()%2 == 1 { // position 10 is skipped
				at := int64(8 + g.Rank())
				v.Rows = []Row{{at, g.Rank(), 5, 0.5, [16]byte{0: 1, 15: byte(at)}}}
			}
			rows := []Row{{9, 1, 5, 0.5, [16]byte{0: 1, 15: 9}}, {11, 3, 5, 0.5, [16]byte{0: 1, 15: 11}}}
			err = v.Exchange(context.Background(), &m, own)
			if err != nil || m.AuxLoss != 4 || !slices.Equal(v.Rows, rows) {
				t.Errorf("rank %d: %v, %+v, %+v", g.Rank(), err, m, v.Rows)
			}
			want, tensor := -1, -1
			if bad != nil {
				want, tensor = bad[0], 7
			}
			rank, number := v.BadGradient()
			if rank != want || number != tensor || v.BadRouterLoss() != want || v.Diverged() != (len(bad) != 1) ||
				bad != nil && v.BadLoss(11) != 2 || !slices.Equal(v.RowsOf(2), rows[1:]) {
				t.Errorf("rank %d of %v: %d, tensor %d, router %d, diverged %v, rows %v", g.Rank(), bad, rank, number,
					v.BadRouterLoss(), v.Diverged(), v.RowsOf(2))
			}
			if g.Rank() == 3 {
				own.Err = errors.New("out of memory")
			}
			if err := v.Exchange(context.Background(), &m, own); err == nil {
				t.Error("the error of a rank is lost")
			}
			return nil
		})
	}
}
