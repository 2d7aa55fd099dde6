package blend

import (
	"context"
	"fmt"

	"mula/index/olmo"
	"mula/shards"
)

// An OLMoOrder maps a plan to OLMo-core's terms. The shards are its token files, in the plan's
// order. Each window is the instance with the same tokens; OLMo-core reads its first SequenceLength
// tokens. OLMo-core trains on the plan's samples, with the plan's proportions and repetitions, if
// its instances are ordered as Fill says.
type OLMoOrder struct {
	Dataset olmo.Dataset

	plan  *Plan
	first [][]int64 // number of the first instance, by source and shard
}

// NewOLMoOrder maps a plan to OLMo-core's terms. It fails if the plan skips positions, because
// OLMo-core has a sample at every position, if the plan's order is not mula's native order, or if
// the shards have different element types.
func NewOLMoOrder(p *Plan) (*OLMoOrder, error) {
	switch t := p.Traits(); {
	case !t.Windows:
		return nil, fmt.Errorf("OLMo-core cannot read %s, because its samples are not windows of the shards; %s",
			t.name, t.instead)
	case len(p.Skips) > 0:
		return nil, fmt.Errorf("the plan skips positions from %d on, but OLMo-core has a sample at every position; "+
			"build the plan without skips", p.Skips[0].From)
	}
	o := &OLMoOrder{plan: p, Dataset: olmo.Dataset{SequenceLength: int64(p.SequenceLength)}}
	next := int64(0)
	for i := range p.Sources {
		first := make([]int64, len(p.Sources[i].Shards))
		for j, s := range p.Sources[i].Shards {
			dtype := shards.UInt16
			if s.DType == shards.Int32 { // ids are not negative, so the bytes are the same
				dtype = shards.UInt32
			}
			if o.Dataset.DType != "" && o.Dataset.DType != dtype {
				return nil, fmt.Errorf("%s has %s tokens, but earlier shards have %s; OLMo-core needs one type",
					p.ShardPath(i, j), dtype, o.Dataset.DType)
			}
			o.Dataset.DType = dtype
			first[j] = next
			o.Dataset.Files = append(o.Dataset.Files, olmo.File{Path: p.ShardPath(i, j) + ".bin",
				Bytes: s.Tokens * int64(dtype.Size())})
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
