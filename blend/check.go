package blend

import (
	"context"
	"fmt"

	"mula/shards"
	"mula/shards/audit"
)

// CheckOptions are the options of [Data.Check].
type CheckOptions struct {
	Progress func(HashProgress) // called from one goroutine at a time; may be nil
	Workers  int                // shards that are read at a time, up to 4096; 0 for the number of processors
	Huge     int64              // tokens from which a document is reported as huge; 0: audit.HugeDocument
}

// Check reads every byte of every shard of the plan, and of the index files that its order is read
// from: it compares them with the hashes in the plan and in the manifests, and looks at the tokens
// as [audit.Run] does. What is wrong with the data is in the report, its sources those of the plan;
// the error is about what kept Check from looking.
func (d *Data) Check(ctx context.Context, o CheckOptions) (*audit.Report, error) {
	var inputs []audit.Input
	var windows []int64
	for i := range d.Sources {
		src := &d.Sources[i]
		for k, sh := range src.Shards {
			inputs = append(inputs, audit.Input{Source: src.Name, Path: d.ShardPath(i, k),
				// Opened anew, so that a shard that is read for an hour is not one of those that
				// the shelf can give up.
				Open:  func() (*shards.Shard, error) { return d.open(i, k) },
				Check: func(bin string) string { return d.checkHashes(ctx, i, k, sh, bin) },
			})
			windows = append(windows, src.shardWindows(k))
		}
	}
	settings := audit.Options{Huge: o.Huge, Workers: o.Workers}
	if d.Tokenizer != nil {
		settings.EOD = &d.Tokenizer.EOD
	}
	settings.Vocabulary = int64(d.idLimit())
	if d.Windowed() { // other samples are not cut from the shard one after the other
		settings.SequenceLength = d.SequenceLength
	}
	total := int64(0)
	for _, f := range d.orderFiles() {
		total += f.bytes
	}
	ofShards := int64(0)
	if o.Progress != nil {
		settings.Progress = func(p audit.Progress) {
			ofShards = p.Total
			o.Progress(HashProgress{p.Path, p.Bytes, p.Total + total})
		}
	}
	r, err := audit.Run(ctx, inputs, settings)
	if err != nil {
		return nil, err
	}
	if d.Packing == nil { // there are no windows in a packed plan
		r.SequenceLength = d.SequenceLength
	}
	if d.Megatron != nil {
		for i := range r.Shards {
			r.Shards[i].Windows = windows[i]
		}
	}
	if total > 0 {
		findings, err := d.checkOrder(ctx, func(path string, done int64) {
			if o.Progress != nil {
				o.Progress(HashProgress{path, ofShards + done, ofShards + total})
			}
		})
		if err != nil {
			return nil, err
		}
		r.Findings = append(findings, r.Findings...)
	}
	return r, nil
}

// checkHashes compares a shard without a manifest with the plan; it gives what is wrong, or "".
func (d *Data) checkHashes(ctx context.Context, source, shard int, want Shard, bin string) string {
	if bin != want.Bin {
		return fmt.Sprintf(".bin has SHA-256 %s, but the plan was sealed with %s: restore the file, or blend again",
			bin, want.Bin)
	}
	idx, _, err := shards.HashFile(ctx, d.ShardPath(source, shard)+".idx", nil)
	if err != nil {
		return err.Error()
	}
	if idx != want.Index {
		return fmt.Sprintf(".idx has SHA-256 %s, but the plan was sealed with %s: restore the file, or blend again",
			idx, want.Index)
	}
	return ""
}

// checkOrder compares the index files that the order is read from with the plan.
func (d *Data) checkOrder(ctx context.Context, progress func(path string, done int64)) (findings []audit.Finding,
	err error) {
	done := int64(0)
	for _, f := range d.orderFiles() {
		hash, _, err := shards.HashFile(ctx, f.path, func(n int64) {
			done += n
			progress(f.path, done)
		})
		if err != nil {
			return nil, err
		}
		if hash != f.sha256 {
			findings = append(findings, audit.Finding{Level: audit.Error, Kind: "hash", Path: f.path, Document: -1,
				Byte: -1,
				Message: fmt.Sprintf("it has SHA-256 %s, but the plan was sealed with %s: restore the file, or "+
					"blend again", hash, f.sha256)})
		}
	}
	return findings, nil
}

func tokenBytes(dtype string) int64 {
	if dtype == shards.UInt16.String() {
		return 2
	}
	return 4
}
