package stream_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"path/filepath"

	"mula/blend"
	"mula/blend/fingerprint"
	"mula/blend/stream"
	"mula/shards"
)

// Build a plan, open the plan, stream its batches, resume from a cursor, and hash the steps.
func Example() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)

	w, err := shards.Create(filepath.Join(dir, "web"), shards.UInt16, shards.TokenizerInfo{VocabSize: 1000, EOD: 0})
	if err != nil {
		log.Fatal(err)
	}
	defer w.Abort()
	for d := range uint32(20) {
		if err := w.Append([]uint32{d + 1, d + 2, d + 3, 0}, shards.DocumentOrigin{ID: fmt.Sprint(d)}); err != nil {
			log.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		log.Fatal(err)
	}

	config, err := blend.ParseConfig([]byte("sequence_length: 4\nsources:\n  - {name: web, shards: [web.idx], "+
		"weight: 1}\n"+
		"samples: 12\n"), "blend.yaml", dir)
	if err != nil {
		log.Fatal(err)
	}
	plan, err := blend.Seal(ctx, config, blend.SealOptions{})
	if err != nil {
		log.Fatal(err)
	}
	if err := plan.Write(filepath.Join(dir, "plan.json")); err != nil {
		log.Fatal(err)
	}
	if plan, err = blend.ReadPlan(filepath.Join(dir, "plan.json")); err != nil {
		log.Fatal(err)
	}
	data, err := blend.Open(ctx, plan, blend.OpenOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer data.Close()

	// A run that stops after two steps keeps a cursor. The next run starts there.
	cursor := blend.Cursor{Plan: plan.Fingerprint(), Position: 8}
	if err := cursor.Check(plan); err != nil {
		log.Fatal(err)
	}
	records, err := stream.New(ctx, data, stream.Options{From: cursor.Position, BatchSize: 4})
	if err != nil {
		log.Fatal(err)
	}
	defer records.Close()
	for {
		record, err := records.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			log.Fatal(err)
		}
		batch, err := stream.NewBatch(record)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println("position", batch.Position(0), "has", len(batch.AppendTokens(nil, 0)), "tokens")
		record.Release()
	}
	err = stream.Hash(ctx, data, stream.HashOptions{BatchSize: 4}, func(h fingerprint.StepHash) error {
		fmt.Println("step", h.Step, "has", h.Samples, "samples, and a fingerprint:", h.Order != nil)
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output:
	// position 8 has 5 tokens
	// step 0 has 4 samples, and a fingerprint: true
	// step 1 has 4 samples, and a fingerprint: true
	// step 2 has 4 samples, and a fingerprint: true
}
