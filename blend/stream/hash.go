package stream

import (
	"context"
	"errors"
	"fmt"
	"io"

	"mula/blend"
	"mula/blend/fingerprint"
)

// HashOptions are the options of [Hash]: which steps to hash, as a half-open range [From, To)
// of steps of BatchSize samples, counted from position 0.
type HashOptions struct {
	From, To    int64 // steps; To 0: the end of the plan
	BatchSize   int
	Rank, World int // hash only this rank's part of each step; World 0: the whole step
	Prefetch    int // see [Options]
}

// Hash hashes steps of d as a run would read them, and calls yield for each, in order, until yield
// fails.
func Hash(ctx context.Context, d *blend.Data, o HashOptions, yield func(fingerprint.StepHash) error) error {
	if _, err := d.Grid(o.BatchSize); err != nil {
		return err
	}
	steps := d.Steps(o.BatchSize)
	if o.To == 0 {
		o.To = steps
	}
	if o.From < 0 || o.From >= o.To || o.To > steps {
		return fmt.Errorf("steps [%d, %d) are not all in the plan, which has %d steps of %d samples", o.From, o.To,
			steps, o.BatchSize)
	}
	b := int64(o.BatchSize)
	s, err := New(ctx, d, Options{From: o.From * b, To: min(o.To*b, d.Length()), BatchSize: o.BatchSize,
		Rank: o.Rank, World: o.World, Prefetch: o.Prefetch})
	if err != nil {
		return err
	}
	defer s.Close()
	var hasher fingerprint.Hasher
	tokens := make([]uint32, 0, d.SampleTokens())
	for step := o.From; ; step++ {
		record, err := s.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		err = func() error {
			defer record.Release()
			batch, err := NewBatch(record)
			if err != nil {
				return err
			}
			for row := range batch.Rows() {
				hasher.Add(batch.AppendTokens(tokens, row))
			}
			return yield(hasher.Step(step, step*b))
		}()
		if err != nil {
			return err
		}
	}
}
