package blend

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"mula/shards"
)

// Data is a plan with its shards, open for reading. It is safe for concurrent use until Close.
type Data struct {
	*Plan
	shards [][]*shards.Shard // by source
}

// OpenOptions are the options of [Open].
type OpenOptions struct {
	Base string // directory that the plan's relative paths start from, instead of the plan's own; "" for that
}

// Open opens the shards of a plan and verifies that they are the ones it was sealed with: sizes, element types, counts, the hashes in
// their manifests, and the tokens of 16 samples. Whether every byte is the same only [Data.Check] can tell.
func Open(ctx context.Context, p *Plan, opts OpenOptions) (*Data, error) {
	if opts.Base != "" {
		moved := *p
		moved.base = realDir(opts.Base)
		p = &moved
	}
	d := &Data{Plan: p}
	if err := d.openShards(ctx); err != nil {
		return nil, err
	}
	if err := d.verify(); err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

// openShards opens all shards, several at a time, as each reads its index. Of several that cannot be opened the error is about the first
// in the order of the plan.
func (d *Data) openShards(ctx context.Context) error {
	d.shards = make([][]*shards.Shard, len(d.Sources))
	errs := make([][]error, len(d.Sources))
	var failed atomic.Bool // then no further one is begun; all before it have been
	var g errgroup.Group
	g.SetLimit(2 * runtime.GOMAXPROCS(0)) // some wait for the disk
	for i := range d.Sources {
		n := len(d.Sources[i].Shards)
		d.shards[i], errs[i] = make([]*shards.Shard, n), make([]error, n)
		for k := 0; k < n && !failed.Load() && ctx.Err() == nil; k++ {
			g.Go(func() error {
				if d.shards[i][k], errs[i][k] = shards.Open(d.ShardPath(i, k)); errs[i][k] != nil {
					failed.Store(true)
				}
				return nil
			})
		}
	}
	g.Wait()
	err := context.Cause(ctx)
	for i := range errs {
		for _, e := range errs[i] {
			if e != nil && err == nil {
				err = fmt.Errorf("source %q: %w", d.Sources[i].Name, e)
			}
		}
	}
	if err != nil {
		d.Close()
	}
	return err
}

// Close closes the shards. Nothing may be reading from them.
func (d *Data) Close() error {
	var errs []error
	for _, list := range d.shards {
		for _, s := range list {
			if s != nil {
				errs = append(errs, s.Close())
			}
		}
	}
	d.shards = nil
	return errors.Join(errs...)
}

// changed is the error about a shard that is not the one that the plan was sealed with.
func (d *Data) changed(source, shard int, format string, args ...any) error {
	return fmt.Errorf("shard %s of source %q has changed since the plan was sealed: %s; restore it, or blend again",
		d.ShardPath(source, shard), d.Sources[source].Name, fmt.Sprintf(format, args...))
}

// verify compares the open shards with the plan.
func (d *Data) verify() error {
	for i := range d.Sources {
		for k, s := range d.shards[i] {
			want := d.Sources[i].Shards[k]
			switch m := s.Manifest(); {
			case s.DType().String() != want.DType:
				return d.changed(i, k, "its elements are %s, were %s", s.DType(), want.DType)
			case s.Tokens() != want.Tokens: // with the element type that is the size of .bin
				return d.changed(i, k, "it has %d tokens, had %d", s.Tokens(), want.Tokens)
			case s.Documents() != want.Documents:
				return d.changed(i, k, "it has %d documents, had %d", s.Documents(), want.Documents)
			case m != nil && m.Files["bin"].SHA256 != want.Bin:
				return d.changed(i, k, "by its manifest the .bin file has SHA-256 %.16s…, had %.16s…", m.Files["bin"].SHA256, want.Bin)
			case m != nil && m.Files["idx"].SHA256 != want.Index:
				return d.changed(i, k, "by its manifest the .idx file has SHA-256 %.16s…, had %.16s…", m.Files["idx"].SHA256, want.Index)
			}
		}
	}
	tokens := make([]uint32, d.SequenceLength+1)
	for _, c := range d.Checks {
		s, err := d.Locate(c.Position)
		if err != nil {
			return err
		}
		if err := d.Tokens(tokens, s); err != nil {
			return err
		}
		if h := SampleHash(tokens); hex.EncodeToString(h[:]) != c.Hash {
			return d.changed(s.Source, s.Shard, "the sample at position %d (window %d, tokens %d to %d of the shard) has hash %x, had %s",
				c.Position, s.Window, s.Token, s.Token+int64(d.SequenceLength), h, c.Hash)
		}
	}
	return nil
}

// Tokens reads the tokens of a sample into dst, which must have L+1 elements. It fails if one is not an id of the plan's tokenizer.
func (d *Data) Tokens(dst []uint32, s Sample) error {
	if len(dst) != d.SequenceLength+1 {
		return fmt.Errorf("blend: a sample has %d tokens, room for %d was given", d.SequenceLength+1, len(dst))
	}
	shard := d.shards[s.Source][s.Shard]
	if err := shard.Read(dst, s.Token); err != nil {
		return fmt.Errorf("source %q: %w", d.Sources[s.Source].Name, err)
	}
	limit := d.idLimit()
	for i, id := range dst {
		if id >= limit {
			return d.idError(s.Source, s.Shard, s.Token+int64(i), id)
		}
	}
	return nil
}

// idLimit is above every id that may occur: the vocabulary where it is known, else what the stream's int32 can hold.
func (d *Data) idLimit() uint32 {
	if d.Tokenizer == nil || d.Tokenizer.Vocabulary == 0 || d.Tokenizer.Vocabulary > math.MaxInt32 {
		return math.MaxInt32 + 1
	}
	return uint32(d.Tokenizer.Vocabulary)
}

func (d *Data) idError(source, shard int, token int64, id uint32) error {
	s := d.shards[source][shard]
	return fmt.Errorf("source %q: %s.bin: token %d (byte %d) has id %d, but the tokenizer has ids below %d: the shard is damaged, or another tokenizer made it",
		d.Sources[source].Name, s.Prefix(), token, token*int64(s.DType().Size()), id, d.idLimit())
}
