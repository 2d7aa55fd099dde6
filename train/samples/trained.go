package samples

import (
	"context"
	"fmt"

	"mula/blend"
	"mula/blend/fingerprint"
)

// maxTrained is the largest number of samples that each rank reads again at a checkpoint.
const maxTrained = 8

// Trained are some samples that this rank has trained on since the last checkpoint, from
// evenly spaced steps. Before a checkpoint they are read again, from blocks whose checksums are
// verified again. The run ends before it saves its weights if ids were damaged after the first
// read, or if ids differ from an intact shard, for example after a memory error. The cost is a
// SHA-256 of one sample in each of these steps, and of maxTrained samples at a checkpoint.
type Trained struct {
	list  []trainedSample
	every int64 // steps between two of them
	next  int64 // next step to record
}

type trainedSample struct {
	step, position int64
	hash           [16]byte
}

// Note records a sample of a step if the step is due.
func (t *Trained) Note(step, position int64, ids []uint32) {
	if len(t.list) == 0 {
		t.every = 1
	} else if step < t.next {
		return
	}
	if len(t.list) == maxTrained { // drop every second sample and double the distance
		for i := range maxTrained / 2 {
			t.list[i] = t.list[2*i]
		}
		t.list = t.list[:maxTrained/2]
		t.every *= 2
	}
	t.list = append(t.list, trainedSample{step, position, fingerprint.SampleHash(ids)})
	t.next = step + t.every
}

// Compare reads the samples again and forgets them.
func (t *Trained) Compare(ctx context.Context, d *blend.Data) error {
	list := t.list
	t.list = t.list[:0]
	ids := make([]uint32, d.SampleTokens())
	for _, was := range list {
		s, err := d.Locate(was.position)
		if err != nil {
			return fmt.Errorf("comparing the sample at position %d: %w", was.position, err)
		}
		if err := d.Reread(ctx, ids, s); err != nil {
			return fmt.Errorf("reading the sample at position %d of step %d again: %w", was.position, was.step, err)
		}
		if hash := fingerprint.SampleHash(ids); hash != was.hash {
			return fmt.Errorf("step %d trained on a sample at position %d with hash %x, but shard %s has the hash "+
				"%x for its tokens %d to %d: the file was changed during the run, or memory is damaged; check the "+
				"file with `mula check`, and restart from the last checkpoint",
				was.step, was.position, was.hash, d.ShardPath(s.Source, s.Shard), hash, s.Token,
				s.Token+int64(d.SequenceLength))
		}
	}
	return nil
}
