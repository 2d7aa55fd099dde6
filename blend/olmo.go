package blend

import (
	"context"
	"errors"
	"fmt"

	"mula/index/olmo"
)

// An OLMoOrder is a plan in the terms of OLMo-core: the shards are its token files, in the sequence
// of the plan, and every window is the instance of the same tokens, of which OLMo-core reads the
// first SequenceLength. So OLMo-core trains on the plan's samples, with the plan's proportions and
// repeats, when it is given the plan's order as the order of its instances.
type OLMoOrder struct {
	Dataset olmo.Dataset

	plan  *Plan
	first [][]int64 // of each source and shard: the number of its first instance
}

// NewOLMoOrder puts a plan in the terms of OLMo-core. It refuses plans that skip positions, since
// OLMo-core has a sample at every position, plans of another order than mula's, and shards of
// several types.
func NewOLMoOrder(p *Plan) (*OLMoOrder, error) {
	switch {
	case p.Megatron != nil:
		return nil, errors.New("the plan's order is Megatron-LM's, whose samples are not windows of the shards; " +
			"OLMo-core cannot read it")
	case p.Packing != nil:
		return nil, errors.New("the plan's samples are packed documents, not windows of the shards: OLMo-core " +
			"cannot read its order")
	case len(p.Skips) > 0:
		return nil, fmt.Errorf("the plan skips positions, the first from %d on; OLMo-core has a sample at every "+
			"position: seal the plan without skips", p.Skips[0].From)
	}
	o := &OLMoOrder{plan: p, Dataset: olmo.Dataset{SequenceLength: int64(p.SequenceLength)}}
	next := int64(0)
	for i := range p.Sources {
		first := make([]int64, len(p.Sources[i].Shards))
		for j, s := range p.Sources[i].Shards {
			dtype := olmo.Uint16
			if s.DType == "int32" { // ids are not negative, so the bytes are the same
				dtype = olmo.Uint32
			}
			if o.Dataset.DType != "" && o.Dataset.DType != dtype {
				return nil, fmt.Errorf("%s holds %s and shards before it %s tokens: OLMo-core reads files of one type",
					p.ShardPath(i, j), dtype, o.Dataset.DType)
			}
			o.Dataset.DType = dtype
			first[j] = next
			o.Dataset.Files = append(o.Dataset.Files, olmo.File{Path: p.ShardPath(i, j) + ".bin",
				Bytes: s.Tokens * dtype.Size()})
			next += s.Tokens / int64(p.SequenceLength)
		}
		o.first = append(o.first, first)
	}
	return o, o.Dataset.Check()
}

// Fill sets ids to the instances at the positions first, first+1, … of the plan. It is safe for
// concurrent use.
func (o *OLMoOrder) Fill(ctx context.Context, first int64, ids []uint32) error {
	for block, err := range o.plan.Positions(ctx, first, first+int64(len(ids))) {
		if err != nil {
			return err
		}
		out := ids[block.First-first:]
		for k, source := range block.Sources {
			shard, token := o.plan.Sources[source].windows.Locate(block.Windows[k])
			out[k] = uint32(o.first[source][shard] + token/o.Dataset.SequenceLength)
		}
	}
	return nil
}
