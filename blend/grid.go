package blend

import "fmt"

// A Grid divides the positions of a plan into steps of one batch size: step s has the positions
// [s·B, (s+1)·B). The last step may be shorter.
type Grid struct {
	length, batch int64
}

// Grid returns the steps of the plan at a batch size. It fails if the batch size is not from 1 to
// 2^60.
func (p *Plan) Grid(batchSize int) (Grid, error) {
	switch {
	case batchSize < 1:
		return Grid{}, fmt.Errorf("batch size %d: must be at least 1", batchSize)
	case int64(batchSize) > maxLength:
		return Grid{}, fmt.Errorf("batch size %d: a plan has at most 2^60 positions", batchSize)
	}
	return Grid{p.length, int64(batchSize)}, nil
}

// Check verifies the positions [from, to) of a stream. This is the rule of every reader of a plan:
//
//   - from is a multiple of the batch size, or the plan's end, which is the state of a finished
//     run.
//   - to is a multiple of the batch size, or the plan's end, so that only the plan's last step
//     may be short.
func (g Grid) Check(from, to int64) error {
	switch {
	case from < 0 || from > g.length || to > g.length:
		return fmt.Errorf("positions [%d, %d) are not all in the plan, which has %d positions", from, to, g.length)
	case to < from:
		return fmt.Errorf("the end %d is before the start %d", to, from)
	case from%g.batch != 0 && from != g.length:
		return fmt.Errorf("position %d is not the start of a step of %d samples; use %s. To change the batch size "+
			"of a run, stop the run at a multiple of both batch sizes",
			from, g.batch, g.around(from, 0, g.length-1))
	case to%g.batch != 0 && to != g.length:
		return fmt.Errorf("position %d is not the end of a step of %d samples; use %s", to, g.batch,
			g.around(to, 1, g.length))
	}
	return nil
}

// around names the multiples of the batch size next to a position, or the plan's end, within
// [least, most].
func (g Grid) around(position, least, most int64) string {
	before := position - position%g.batch
	after := min(before+g.batch, g.length)
	switch {
	case before < least:
		return fmt.Sprint(after)
	case after > most:
		return fmt.Sprint(before)
	}
	return fmt.Sprintf("%d or %d", before, after)
}

// Steps returns the number of steps of the plan. batchSize must be at least 1. The last step may be
// shorter.
func (p *Plan) Steps(batchSize int) int64 {
	b := int64(batchSize)
	return (p.length-1)/b + 1
}

// RecordRows returns the number of rows in each record of a rank: microBatch, or the rank's whole
// part of a step if microBatch is 0. It fails if world does not divide the batch size, or if
// microBatch does not divide the rank's part.
func RecordRows(batchSize, rank, world, microBatch int) (int, error) {
	switch {
	case batchSize < 1:
		return 0, fmt.Errorf("batch size %d: must be at least 1", batchSize)
	case world < 1:
		return 0, fmt.Errorf("number of ranks %d: must be at least 1", world)
	case rank < 0 || rank >= world:
		return 0, fmt.Errorf("rank %d of %d: must be from 0 to %d", rank, world, world-1)
	case batchSize%world != 0:
		return 0, fmt.Errorf("batch size %d cannot be divided among %d ranks; use a multiple", batchSize, world)
	case microBatch < 0 || microBatch > 0 && batchSize/world%microBatch != 0:
		return 0, fmt.Errorf("micro-batch %d does not divide the %d samples that a rank has of each step", microBatch,
			batchSize/world)
	case microBatch == 0:
		return batchSize / world, nil
	}
	return microBatch, nil
}
