package tensors_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"path/filepath"

	"mula/blend"
	"mula/blend/stream"
	"mula/clients/go/tensors"
	"mula/shards"
)

// Stream a plan as tensors. Each record batch is released after its tensors were used.
func Example() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	plan, err := buildPlan(ctx, dir)
	if err != nil {
		log.Fatal(err)
	}
	data, err := blend.Open(ctx, plan, blend.OpenOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer data.Close()
	batches, err := stream.New(ctx, data, stream.Options{BatchSize: 4})
	if err != nil {
		log.Fatal(err)
	}
	defer batches.Close()
	for {
		record, err := batches.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			log.Fatal(err)
		}
		tokens, err := tensors.Column(record, "tokens")
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(tokens.Shape(), tokens.Dtype())
		record.Release()
	}
	// Output:
	// (4, 5) uint16
	// (4, 5) uint16
}

// buildPlan writes a shard and the plan of eight samples of four tokens.
func buildPlan(ctx context.Context, dir string) (*blend.Plan, error) {
	w, err := shards.Create(filepath.Join(dir, "web"), shards.UInt16, shards.TokenizerInfo{VocabSize: 1000})
	if err != nil {
		return nil, err
	}
	defer w.Abort()
	for d := range uint32(20) {
		if err := w.Append([]uint32{d + 1, d + 2, d + 3, 0}, shards.DocumentOrigin{ID: fmt.Sprint(d)}); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	config, err := blend.ParseConfig([]byte("sequence_length: 4\nsources:\n"+
		"  - {name: web, shards: [web.idx], weight: 1}\nsamples: 8\n"), "blend.yaml", dir)
	if err != nil {
		return nil, err
	}
	return blend.Seal(ctx, config, blend.SealOptions{})
}
