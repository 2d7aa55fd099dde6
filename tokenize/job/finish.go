package job

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"time"

	"mula/internal/atomicfile"
	"mula/internal/locks"
	"mula/shards/formats"
	"mula/tokenize/documents"
)

// finished is done.json.
type finished struct {
	Format int `json:"format"` // 1
	Summary
	Inputs []inputSummary `json:"inputs"`
}

const finishedFormat = 1

// An inputSummary describes a processed input.
type inputSummary struct {
	Path      string         `json:"path"`
	Bytes     int64          `json:"bytes"` // on disk, -1 if it was not a regular file
	Documents int64          `json:"documents"`
	Tokens    int64          `json:"tokens"`
	TextBytes int64          `json:"text_bytes"`
	Pieces    []pieceSummary `json:"pieces"`
}

// A pieceSummary is a part of an input ([documents.Piece]) and its hash, "" if it was not read
// completely.
type pieceSummary struct {
	Start  int64  `json:"start"`
	End    int64  `json:"end"`
	SHA256 string `json:"sha256"`
}

// finish completes the job once all shards are complete: it publishes the list of skipped
// documents, writes done.json, and removes files that are no longer needed. One process does this,
// the others wait.
func (p *process) finish(ctx context.Context) (*finished, error) {
	pause := p.o.tuning.poll
	for {
		l, holder, err := p.f.locks.Acquire(p.f.path("finish" + locks.Suffix))
		if err != nil {
			return nil, err
		}
		done, err := readRecord[finished](p.f.files, p.f.path(doneName))
		if l != nil {
			if err == nil && done == nil {
				done, err = p.complete(ctx, l)
			}
			l.Release()
		}
		if err != nil && !errors.Is(err, errLost) {
			return nil, err
		}
		if done != nil {
			return done, p.f.removeLeftovers()
		}
		p.progress.wait(holder)
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(pause):
		}
		pause = min(pause*3/2, p.o.tuning.maxPoll)
	}
}

// removeLeftovers removes files that a complete job does not need.
func (f *workDir) removeLeftovers() error {
	if err := f.clear(false); err != nil {
		return err
	}
	return f.clean()
}

// complete does the work of finish.
func (p *process) complete(ctx context.Context, l *locks.Lock) (*finished, error) {
	done := &finished{Format: finishedFormat, Summary: Summary{Output: p.o.Output,
		Skipped: make(map[documents.Kind]int64), Shards: []ShardFile{}}}
	for k := 0; ; k++ {
		// a damaged record does not mean that there are no more shards
		r, err := readSealed[shardRecord](p.f.files, p.f.shardPath(k))
		if err != nil {
			return nil, fmt.Errorf("%w; repeat the command to write the shard again", err)
		}
		if r != nil && r.Job != p.f.d.ID && k < len(p.shardQueue.starts) {
			return nil, fmt.Errorf("%s: %w; repeat the command to write the shard again", p.f.shardPath(k), errOtherJob)
		}
		if r == nil || r.Job != p.f.d.ID {
			break
		}
		done.Shards = append(done.Shards, r.Shard)
		done.Documents += r.Shard.Documents
		done.Tokens += r.Shard.Tokens
		done.TextBytes += r.Shard.TextBytes
	}
	if err := p.f.waitForWriters(ctx); err != nil {
		return nil, err
	}
	if err := p.f.unchanged(done.Shards); err != nil {
		return nil, err
	}
	rejects, err := p.skipped(ctx, done)
	if err != nil {
		return nil, err
	}
	if rejects != nil {
		defer rejects.Abort()
	}
	p.inputs(done)
	done.Seconds = time.Since(p.start).Seconds()
	if !l.Ours() {
		return nil, errLost
	}
	if rejects != nil {
		if err := rejects.Publish(); err != nil {
			return nil, err
		}
		done.Rejects = p.o.Rejects
	}
	if l := formats.Of(p.f.d.Settings.Layout); l.Published != nil {
		if _, err := l.Published(ctx, p.o.FS, p.o.Output); err != nil {
			return nil, err
		}
	}
	if err := p.f.replace(done); err != nil {
		return nil, err
	}
	return done, p.f.write(p.f.path(doneName), done)
}

// skipped counts the skipped documents and lists them in an unpublished file, which is nil if no
// list is requested.
func (p *process) skipped(ctx context.Context, done *finished) (_ *atomicfile.File, err error) {
	var file *atomicfile.File
	var out *bufio.Writer
	if p.o.Rejects != "" {
		if file, err = p.f.files.Create(p.o.Rejects); err != nil {
			return nil, err
		}
		defer func() {
			if err != nil {
				file.Abort()
			}
		}()
		out = bufio.NewWriter(file)
	}
	var first error
	var total int64
	left := p.unitQueue.limit
	for u := range p.unitQueue.units {
		record, err := p.unitQueue.unit(ctx, u)
		if err != nil {
			return nil, err
		}
		if record == nil {
			break
		}
		for n, s := range record.Segments {
			err := readRejects(p.f.files, rejectName(p.f.dir, u, n), s.footerRejects, func(bad *rejected) error {
				if p.unitQueue.limit > 0 && bad.Ordinal >= left {
					return nil // it is after the last requested document
				}
				if bad.Part < 0 || bad.Part >= len(p.f.d.Units[u]) {
					return fmt.Errorf("%s: %w: the unit has no part %d", rejectName(p.f.dir, u, n), errDamaged,
						bad.Part)
				}
				d := &documents.DocumentError{File: p.f.d.Inputs[p.f.d.Units[u][bad.Part].Input].Path,
					Line: bad.Line + p.unitQueue.base(u, bad.Part), Offset: bad.Byte,
					ID: bad.ID, Kind: bad.Kind, Err: errors.New(bad.Error)}
				if first == nil {
					first = d
				}
				total++
				done.Skipped[bad.Kind]++
				if out == nil {
					return nil
				}
				line, err := json.Marshal(d)
				if err == nil {
					_, err = out.Write(append(line, '\n'))
				}
				return err
			})
			if errors.Is(err, errDamaged) {
				err = &missing{u, n, err}
			}
			if err != nil {
				return nil, err
			}
		}
		left -= record.sum().Documents
	}
	switch {
	case first != nil && p.o.OnError == Fail:
		return nil, first // another process was started with Skip
	case done.Documents == 0 && p.f.d.Settings.Sample > 0:
		p.f.worthless = true
		return nil, fmt.Errorf("the fraction %v keeps no document of %s; raise --fraction, "+
			"or remove it", p.f.d.Settings.Sample, p.f.d.names())
	case first != nil && done.Documents == 0:
		p.f.worthless = true
		return nil, fmt.Errorf("all %d documents were bad, so there is nothing to write; the first: %w", total, first)
	case done.Documents == 0:
		p.f.worthless = true
		return nil, fmt.Errorf("%s has no documents, so there is nothing to write", p.f.d.names())
	}
	if file == nil {
		return nil, nil
	}
	if err := out.Flush(); err != nil {
		return nil, err
	}
	return file, file.Seal()
}

// inputs sums up the results of the inputs. If MaxDocuments cuts an input off, its count is the
// total minus the counts of the other inputs.
func (p *process) inputs(done *finished) {
	for _, in := range p.f.d.Inputs {
		done.Inputs = append(done.Inputs, inputSummary{Path: in.Path, Bytes: in.Size, Pieces: []pieceSummary{}})
	}
	rest := totals{Documents: done.Documents, Tokens: done.Tokens, TextBytes: done.TextBytes}
	for u, parts := range p.f.d.Units {
		var record *unitRecord
		if u < p.unitQueue.prefix {
			record = p.unitQueue.units[u].record
		}
		for n, part := range parts {
			s := &done.Inputs[part.Input]
			piece := pieceSummary{Start: part.Start, End: part.End}
			if record != nil && n < len(record.Parts) {
				t := record.Parts[n]
				piece.SHA256 = t.SHA256
				if t.Documents >= rest.Documents {
					t = rest
				}
				rest.Documents, rest.Tokens, rest.TextBytes = rest.Documents-t.Documents, rest.Tokens-t.Tokens,
					rest.TextBytes-t.TextBytes
				s.Documents, s.Tokens, s.TextBytes = s.Documents+t.Documents, s.Tokens+t.Tokens, s.TextBytes+t.TextBytes
			}
			s.Pieces = append(s.Pieces, piece)
		}
	}
}

// replace removes the shard files of an earlier job that this job has not written.
func (f *workDir) replace(done *finished) error {
	if len(f.d.Replaces) == 0 {
		return nil
	}
	written := make(map[string]int64)
	for _, s := range done.Shards {
		maps.Copy(written, s.paths(f.d.Settings.Layout))
	}
	stale := slices.DeleteFunc(slices.Clone(f.d.Replaces), func(path string) bool { _, ok := written[path]; return ok })
	if err := f.remove(stale); err != nil {
		return err
	}
	// before done.json, which does not list them
	return f.files.SyncDir(filepath.Dir(f.o.Output))
}
