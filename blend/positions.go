package blend

import (
	"context"
	"fmt"
	"iter"
)

// A Block has the samples at consecutive positions. Its slices are valid until the next Block.
type Block struct {
	First   int64   // first position
	Sources []int32 // by position: index in Plan.Sources
	Windows []int64 // by position: number among all windows of the source
}

// blockLength is the maximum number of positions in a Block. The arrays of a Block fit in the
// second-level cache, and each of 2,000 sources still has several positions.
const blockLength = 1 << 16

// Positions lists the samples at positions [from, to) in blocks. It includes skipped positions;
// Plan.Skips lists them. The samples are the same as from [Plan.Locate], at a fraction of the cost:
// the tree distributes a whole block at once, and each source computes its windows in one call. It
// ends with an error if the positions are not in the plan, or if ctx is cancelled.
func (p *Plan) Positions(ctx context.Context, from, to int64) iter.Seq2[Block, error] {
	return func(yield func(Block, error) bool) {
		if from < 0 || to < from || to > p.length {
			yield(Block{}, fmt.Errorf("positions [%d, %d) are not all in the plan, which has %d positions", from, to,
				p.length))
			return
		}
		p.order.positions(ctx, from, to, yield)
	}
}
