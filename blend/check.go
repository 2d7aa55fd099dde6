package blend

import (
	"context"
	"fmt"
	"path/filepath"
	"runtime"
	"sync"

	"golang.org/x/sync/errgroup"

	"mula/shards"
)

// LongDocument is the number of tokens from which [Data.Check] reports a document: such texts are mostly logs, dumps or whole archives.
const LongDocument = 1 << 20

// CheckOptions are the options of [Data.Check].
type CheckOptions struct {
	Progress func(HashProgress) // called from one goroutine at a time; may be nil. Every byte counts twice: hashed, and looked at
	Workers  int                // shards that are read at a time, up to 4096; 0 for the number of processors
}

// A CheckReport is what [Data.Check] found.
type CheckReport struct {
	Shards   []ShardReport `json:"shards"`
	Findings []Finding     `json:"findings"` // in the order of the plan
}

// Failed says whether any finding is an error.
func (r *CheckReport) Failed() bool {
	for _, f := range r.Findings {
		if f.Error {
			return true
		}
	}
	return false
}

// A ShardReport is what one shard is made of.
type ShardReport struct {
	Source         string `json:"source"`
	Path           string `json:"path"`
	Tokens         int64  `json:"tokens"`
	Windows        int64  `json:"windows"`
	Tail           int64  `json:"tail_tokens"` // at the end, in no window
	Documents      int64  `json:"documents"`
	EmptyDocuments int64  `json:"empty_documents"` // without a token other than the end-of-document id
	LongDocuments  int64  `json:"long_documents"`  // of LongDocument tokens or more
	Longest        int64  `json:"longest_document"`
	LongestNumber  int64  `json:"longest_document_number"`
	BadIDs         int64  `json:"bad_ids"` // beyond the vocabulary
	MaxID          uint32 `json:"max_id"`
	Verified       bool   `json:"verified"` // every byte is what the plan was sealed with
}

// A Finding is something to look at.
type Finding struct {
	Error   bool   `json:"error"` // the plan cannot be used as it is; else it is a remark
	Source  string `json:"source"`
	Path    string `json:"path"`
	Message string `json:"message"`
}

// Check reads every byte of every shard: it compares the files with the hashes in the plan and in the manifests, and looks for ids beyond
// the vocabulary, empty and very long documents, shards without a window, and shards with the same content. What is wrong with the data is
// in the report; the error is about what kept Check from looking.
func (d *Data) Check(ctx context.Context, o CheckOptions) (*CheckReport, error) {
	if o.Workers < 0 || o.Workers > maxWorkers {
		return nil, fmt.Errorf("blend: %d workers: must be between 0, for the number of processors, and %d", o.Workers, maxWorkers)
	}
	if o.Workers == 0 {
		o.Workers = runtime.GOMAXPROCS(0)
	}
	var total int64
	for _, s := range d.Sources {
		for _, sh := range s.Shards {
			total += 2 * sh.Tokens * tokenBytes(sh.DType)
		}
	}
	shardBytes := total
	if d.Megatron != nil {
		for _, f := range d.Megatron.Files {
			total += f.Bytes
		}
	}
	var mu sync.Mutex
	var done int64
	reports := make([][]ShardReport, len(d.Sources))
	findings := make([][][]Finding, len(d.Sources))
	g, reading := errgroup.WithContext(ctx)
	g.SetLimit(o.Workers)
	for i := range d.Sources {
		reports[i] = make([]ShardReport, len(d.Sources[i].Shards))
		findings[i] = make([][]Finding, len(d.Sources[i].Shards))
		for k := range d.Sources[i].Shards {
			g.Go(func() (err error) {
				progress := func(n int64) {
					if o.Progress == nil {
						return
					}
					mu.Lock()
					defer mu.Unlock()
					done = min(done+n, shardBytes) // the few bytes of indices are not in the total
					o.Progress(HashProgress{d.ShardPath(i, k), done, total})
				}
				reports[i][k], findings[i][k], err = d.checkShard(reading, i, k, progress)
				return err
			})
		}
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	done = shardBytes
	r := &CheckReport{}
	if m := d.Megatron; m != nil {
		for _, f := range m.Files {
			path := filepath.Join(d.path(m.directory), f.Name)
			hash, _, err := shards.HashFile(ctx, path, func(n int64) {
				if o.Progress != nil {
					done += n
					o.Progress(HashProgress{path, done, total})
				}
			})
			if err != nil {
				return nil, err
			}
			if hash != f.SHA256 {
				r.Findings = append(r.Findings, Finding{true, "", path, fmt.Sprintf("it has SHA-256 %s, but the plan was sealed with %s: restore the file, or blend again", hash, f.SHA256)})
			}
		}
	}
	same := map[string]string{} // hash → the shard that had it first
	for i, s := range d.Sources {
		for k, sh := range s.Shards {
			r.Shards = append(r.Shards, reports[i][k])
			r.Findings = append(r.Findings, findings[i][k]...)
			path := d.ShardPath(i, k)
			if other, ok := same[sh.Bin]; ok && sh.Tokens > 0 {
				r.Findings = append(r.Findings, Finding{false, s.Name, path, "its tokens are those of " + other + ": the data is in the plan twice"})
			} else {
				same[sh.Bin] = path
			}
		}
	}
	return r, nil
}

func tokenBytes(dtype string) int64 {
	if dtype == shards.UInt16.String() {
		return 2
	}
	return 4
}

// checkShard checks one shard.
func (d *Data) checkShard(ctx context.Context, source, shard int, progress func(int64)) (r ShardReport, findings []Finding, err error) {
	src := &d.Sources[source]
	// Opened anew, so that a shard that is read for an hour is not one of those that the shelf can give up.
	path := d.ShardPath(source, shard)
	r = ShardReport{Source: src.Name, Path: path, Tokens: src.Shards[shard].Tokens, Windows: src.shardWindows(shard),
		Documents: src.Shards[shard].Documents, LongestNumber: -1}
	find := func(isError bool, format string, args ...any) {
		findings = append(findings, Finding{isError, src.Name, path, fmt.Sprintf(format, args...)})
	}
	s, err := d.open(source, shard)
	if err != nil {
		find(true, "%v", err)
		return r, findings, nil
	}
	defer s.Close()

	// The hashes. A manifest was found to agree with the plan when the shard was opened, and covers the documents' origins as well.
	r.Verified = true
	want := src.Shards[shard]
	if s.Manifest() != nil {
		if err := s.Verify(ctx, progress); err != nil {
			if ctx.Err() != nil {
				return r, nil, context.Cause(ctx)
			}
			r.Verified = false
			find(true, "%v", err)
		}
	} else {
		for _, f := range []struct{ name, hash string }{{"bin", want.Bin}, {"idx", want.Index}} {
			got, _, err := shards.HashFile(ctx, s.Prefix()+"."+f.name, progress)
			if err != nil {
				return r, nil, err
			}
			if got != f.hash {
				r.Verified = false
				find(true, ".%s has SHA-256 %s, but the plan was sealed with %s: restore the file, or blend again", f.name, got, f.hash)
			}
		}
		if err := s.Check(ctx); err != nil {
			if ctx.Err() != nil {
				return r, nil, context.Cause(ctx)
			}
			find(true, "%v", err)
		}
		find(false, "it has no manifest, so what made it and where its documents come from is not known")
	}

	if err := d.lintTokens(ctx, s, source, shard, &r, progress, find); err != nil {
		return r, nil, err
	}
	if err := d.lintDocuments(ctx, s, &r, find); err != nil {
		return r, nil, err
	}
	r.Tail = r.Tokens
	if d.Megatron != nil { // whose samples are not cut from the shard one after the other
		r.Tail = 0
	} else if r.Windows > 0 {
		r.Tail = r.Tokens - (r.Windows*int64(d.SequenceLength) + 1)
	} else {
		find(false, "its %d tokens are too few for a window of %d: it is never read", r.Tokens, d.SequenceLength+1)
	}
	if r.BadIDs > 0 {
		find(true, "%d tokens have ids that the tokenizer does not (it has %d; the largest found is %d): it is damaged, or another tokenizer made it",
			r.BadIDs, d.idLimit(), r.MaxID)
	}
	if r.EmptyDocuments > 0 {
		find(false, "%d of %d documents are empty", r.EmptyDocuments, r.Documents)
	}
	if r.LongDocuments > 0 {
		find(false, "%d documents have %d tokens or more; the longest is number %d with %d", r.LongDocuments, LongDocument, r.LongestNumber, r.Longest)
	}
	return r, findings, nil
}

// lintTokens looks at every id.
func (d *Data) lintTokens(ctx context.Context, s *shards.Shard, source, shard int, r *ShardReport, progress func(int64), find func(bool, string, ...any)) error {
	limit := d.idLimit()
	ids := make([]uint32, 1<<16)
	for token := int64(0); token < s.Tokens(); token += int64(len(ids)) {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		ids = ids[:min(int64(len(ids)), s.Tokens()-token)]
		if err := s.Read(ids, token); err != nil {
			find(true, "%v", err)
			return nil
		}
		for i, id := range ids {
			if id >= limit {
				if r.BadIDs++; r.BadIDs == 1 {
					find(true, "%v", d.idError(source, shard, token+int64(i), id))
				}
			}
			r.MaxID = max(r.MaxID, id)
		}
		progress(int64(len(ids) * s.DType().Size()))
	}
	return nil
}

// lintDocuments looks at the length of every document.
func (d *Data) lintDocuments(ctx context.Context, s *shards.Shard, r *ShardReport, find func(bool, string, ...any)) error {
	ending := int64(0) // tokens of a document that has no text
	if d.Tokenizer != nil && d.Tokenizer.EOD >= 0 {
		ending = 1
	}
	one := make([]uint32, 1)
	for doc := range s.Documents() {
		if doc%(1<<16) == 0 && ctx.Err() != nil {
			return context.Cause(ctx)
		}
		span, err := s.Span(doc)
		if err != nil {
			find(true, "%v", err)
			return nil
		}
		n := span.End - span.First
		switch {
		case n == 0:
			r.EmptyDocuments++
		case n == ending:
			if s.Read(one, span.First) == nil && int64(one[0]) == d.Tokenizer.EOD {
				r.EmptyDocuments++
			}
		case n >= LongDocument:
			r.LongDocuments++
		}
		if n > r.Longest {
			r.Longest, r.LongestNumber = n, doc
		}
	}
	return nil
}
