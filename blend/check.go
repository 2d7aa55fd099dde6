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
	Workers  int                // shards that are read in parallel, up to 4096; 0: the number of processors
	Huge     int64              // token count from which a document is reported as huge; 0: audit.HugeDocument
}

// Check reads every byte of every shard of the plan, and of the index files that define its order.
// It compares them with the hashes in the plan and in the manifests, and audits the tokens as
// [audit.Run] does. The report lists the problems of the data by the plan's sources. The error
// reports why the check could not finish.
func (d *Data) Check(ctx context.Context, o CheckOptions) (*audit.Report, error) {
	var inputs []audit.Input
	var windows []int64
	for i := range d.Sources {
		src := &d.Sources[i]
		for k, sh := range src.Shards {
			input := audit.Input{Source: src.Name, Path: d.ShardPath(i, k),
				// Opened again, so that the shard cache cannot close a shard that is read for an
				// hour.
				Open: func() (*shards.Shard, error) {
					if sh.sampled != "" {
						if err := d.readSample(ctx, i, k); err != nil {
							return nil, err
						}
					}
					return d.open(i, k)
				},
			}
			if sh.Sample == "" { // else there is no hash; the sample is compared when the shard is opened
				input.Check = func(bin string) string { return d.checkHashes(ctx, i, k, sh, bin) }
			}
			inputs = append(inputs, input)
			windows = append(windows, src.shardWindows(k))
		}
	}
	settings := audit.Options{Huge: o.Huge, Workers: o.Workers}
	if d.Tokenizer != nil {
		settings.EOD = &d.Tokenizer.EOD
	}
	settings.Vocabulary = int64(d.idLimit())
	traits := d.Traits()
	if traits.Windows { // other orders do not cut a shard into consecutive windows
		settings.SequenceLength = d.SequenceLength
	}
	total := int64(0)
	for _, f := range d.order.files() {
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
	if !traits.Padded { // a packed plan has no windows
		r.SequenceLength = d.SequenceLength
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

// checkHashes compares a shard without a manifest with the plan. It returns the problem, or "".
func (d *Data) checkHashes(ctx context.Context, source, shard int, want Shard, bin string) string {
	if bin != want.Bin {
		return fmt.Sprintf(".bin has SHA-256 %s, but the plan was built with %s; restore the file, or build a new plan",
			bin, want.Bin)
	}
	idx, _, err := shards.HashFile(ctx, d.ShardPath(source, shard)+".idx", nil)
	if err != nil {
		return err.Error()
	}
	if idx != want.Index {
		return fmt.Sprintf(".idx has SHA-256 %s, but the plan was built with %s; restore the file, or build a new plan",
			idx, want.Index)
	}
	return ""
}

// checkOrder compares the index files that define the order with the plan.
func (d *Data) checkOrder(ctx context.Context, progress func(path string, done int64)) (findings []audit.Finding,
	err error) {
	done := int64(0)
	for _, f := range d.order.files() {
		hash, _, err := shards.HashFile(ctx, f.path, func(n int64) {
			done += n
			progress(f.path, done)
		})
		if err != nil {
			return nil, err
		}
		if hash != *f.sha256 {
			findings = append(findings, audit.Finding{Level: audit.Error, Kind: "hash", Path: f.path, Document: -1,
				Byte: -1,
				Message: fmt.Sprintf("SHA-256 is %s, but the plan was built with %s; restore the file, or build a new "+
					"plan", hash, *f.sha256)})
		}
	}
	return findings, nil
}
