package blend

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"time"
	"unsafe"

	"mula/internal/mapping"
	"mula/shards"
)

// Data is a plan with its shards, open for reading. It is safe for concurrent use until Close.
//
// A shard is mapped into memory when it is first used. If one is cut short while it is open, what
// reads samples of it fails; the rest goes on. Once it has been restored it is read again, as far
// as [Open] would: its counts and the hashes in its manifest must be those that were found, and its
// blocks are compared with their sums. One without sums is then believed, or, where whole files are
// verified, not read again. A file that takes the name of a sound one is not looked at: what was
// opened is read. However many a plan has, they are never all open: beyond some 16,000 those that
// were not used lately are closed again.
type Data struct {
	*Plan
	facts    [][]facts // by source and shard
	shelf    *shelf
	verifier *verifier // nil if whole files are not verified
	reverify time.Duration
}

// DefaultReverify is [OpenOptions.Reverify] unless it is given.
const DefaultReverify = 10 * time.Minute

// OpenOptions are the options of [Open].
type OpenOptions struct {
	Base string // directory that the plan's relative paths start from, instead of the plan's own; "" for that
	// do not compare the tokens of samples: for [Data.Check], which reads all and says more of what
	// is wrong
	Unread bool

	// Reverify is the time after which a block of a shard with sums is compared again when it is
	// read ([shards.Shard.Reverify]): 0 is [DefaultReverify], a negative time is never.
	Reverify time.Duration

	// Verify, if not nil, has whole files verified while samples are read; without it Open compares
	// what is said above, and nothing else is.
	Verify *VerifyOptions

	// Waiting, if not nil, lets Open wait while another process builds index files of the cache
	// that the plan's order is read from and that are not there yet. It is called with a message,
	// again when there is another process to wait for. Other files of that cache are not waited
	// for.
	Waiting func(message string)
}

// Open verifies that the shards of a plan are the ones it was sealed with: sizes, element types,
// counts, the hashes in their manifests, and the tokens of 16 samples. Whether every byte is the
// same only [Data.Check] can tell.
//
// What was found out about a shard is kept in the user's cache directory and used again while size,
// time of change and inode of its files are the same, so that opening a plan over thousands of
// shards a second time opens those of the 16 samples alone.
func Open(ctx context.Context, p *Plan, opts OpenOptions) (*Data, error) {
	if opts.Base != "" {
		moved := *p
		moved.base = realDir(opts.Base)
		p = &moved
	}
	if !p.Windowed() {
		opened := *p
		p = &opened
	}
	if p.Megatron != nil {
		var err error
		if p.order, err = awaitOrder(ctx, p, opts.Waiting); err != nil {
			return nil, err
		}
		if err = p.order.bind(); err == nil {
			err = p.order.verifyCache()
		}
		if err != nil {
			p.order.close()
			return nil, err
		}
	}
	if p.Packing != nil {
		var err error
		if p.packings, err = openPackings(p); err != nil {
			return nil, err
		}
	}
	l := openLedger()
	defer l.close()
	d, err := newData(ctx, p, l)
	if err != nil {
		p.closeOrder()
		return nil, err
	}
	d.reverify = max(cmp.Or(opts.Reverify, DefaultReverify), 0)
	if opts.Verify != nil {
		if d.verifier, err = startVerifier(d, *opts.Verify); err != nil {
			d.Close()
			return nil, err
		}
	}
	if err := d.verify(ctx, opts.Unread); err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

// newData finds the shards of a plan.
func newData(ctx context.Context, p *Plan, l *ledger) (*Data, error) {
	found, err := l.survey(ctx, p)
	if err != nil {
		return nil, err
	}
	d := &Data{Plan: p, facts: found}
	d.shelf = newShelf(p, d.open)
	return d, nil
}

// open opens a shard, which must still be the one that was found at first.
func (d *Data) open(source, shard int) (*shards.Shard, error) {
	s, err := shards.Open(d.ShardPath(source, shard))
	if err != nil {
		return nil, fmt.Errorf("source %q: %w", d.Sources[source].Name, err)
	}
	was, is := d.facts[source][shard], factsOf(s)
	if !is.manifest { // then nobody has read it again
		is.bin, is.index = was.bin, was.index
	}
	s.Reverify(d.reverify)
	if is != was {
		s.Close()
		return nil, fmt.Errorf("source %q: shard %s was replaced since the plan was opened: start again, and it is "+
			"compared with the plan",
			d.Sources[source].Name, d.ShardPath(source, shard))
	}
	return s, nil
}

// Files lists the files that samples of the plan are read from, those of its shards that may be
// missing included, and of its order. None is looked at.
func (p *Plan) Files() (paths []string) {
	for i := range p.Sources {
		for k := range p.Sources[i].Shards {
			paths = append(paths, shards.Files(p.ShardPath(i, k))...)
		}
	}
	for _, f := range p.orderFiles() {
		paths = append(paths, f.path)
	}
	return paths
}

// Close closes the shards. Nothing may be reading from them.
func (d *Data) Close() error {
	if d.verifier != nil {
		d.verifier.stop()
	}
	return errors.Join(d.shelf.close(), d.closeOrder())
}

// closeOrder closes the files that the order of an open plan is read from.
func (p *Plan) closeOrder() error {
	err := closePackings(p.packings)
	p.packings = nil
	if p.order != nil {
		err = errors.Join(err, p.order.close())
	}
	return err
}

// changed is the error about a shard that is not the one that the plan was sealed with.
func (d *Data) changed(source, shard int, format string, args ...any) error {
	return fmt.Errorf("shard %s of source %q has changed since the plan was sealed: %s; restore it, or blend again",
		d.ShardPath(source, shard), d.Sources[source].Name, fmt.Sprintf(format, args...))
}

// verify compares the shards with the plan, and unless told not to, the tokens of some samples.
func (d *Data) verify(ctx context.Context, unread bool) error {
	for i := range d.Sources {
		for k, is := range d.facts[i] {
			want := d.Sources[i].Shards[k]
			switch {
			case is.dtype.String() != want.DType:
				return d.changed(i, k, "its elements are %s, were %s", is.dtype, want.DType)
			case is.tokens != want.Tokens: // with the element type that is the size of .bin
				return d.changed(i, k, "it has %d tokens, had %d", is.tokens, want.Tokens)
			case is.documents != want.Documents:
				return d.changed(i, k, "it has %d documents, had %d", is.documents, want.Documents)
			case is.manifest && is.bin != want.Bin:
				return d.changed(i, k, "by its manifest the .bin file has SHA-256 %.16s…, had %.16s…", is.bin, want.Bin)
			case is.manifest && is.index != want.Index:
				return d.changed(i, k, "by its manifest the .idx file has SHA-256 %.16s…, had %.16s…", is.index,
					want.Index)
			}
		}
	}
	if d.Megatron != nil { // of the native order ReadPlan has compared them
		if err := d.verifyPairs(); err != nil {
			return err
		}
	}
	if unread {
		return nil
	}
	tokens := make([]uint32, d.SequenceLength+1)
	for _, c := range d.Checks {
		s, err := d.Locate(c.Position)
		if err != nil {
			return err
		}
		if err := d.tokens(ctx, tokens, s); err != nil {
			return err
		}
		if h := SampleHash(tokens); hex.EncodeToString(h[:]) != c.Hash {
			return d.changed(s.Source, s.Shard,
				"the sample at position %d (window %d, tokens %d to %d of the shard) has hash %x, had %s",
				c.Position, s.Window, s.Token, s.Token+int64(d.SequenceLength), h, c.Hash)
		}
	}
	return nil
}

// Tokens reads the tokens of a sample into dst, which must have L+1 elements. It fails if one is
// not an id of the plan's tokenizer.
func (d *Data) Tokens(dst []uint32, s Sample) error { return d.tokens(context.Background(), dst, s) }

// Reread is [Data.Tokens], but compares the blocks of the sample that have sums with these first,
// whenever that was last done.
func (d *Data) Reread(ctx context.Context, dst []uint32, s Sample) error {
	_, err := d.stretches(ctx, len(dst), s, func(shard *shards.Shard, _ int, g segment) error {
		if err := shard.Recheck(ctx, g.token, g.token+g.length); err != nil {
			return fmt.Errorf("source %q: %w", d.Sources[s.Source].Name, err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return d.tokens(ctx, dst, s)
}

// tokens is Tokens, where ctx ends a wait for the verification of the shard.
func (d *Data) tokens(ctx context.Context, dst []uint32, s Sample) error {
	n, err := d.stretches(ctx, len(dst), s, func(shard *shards.Shard, at int, g segment) error {
		return d.read4(dst[at:][:g.length], s.Source, shard, g)
	})
	if n < len(dst) && err == nil {
		pad(dst[n:], d.Packing.Padding)
	}
	return err
}

// pad fills the places behind the last document of a sample.
func pad[T uint16 | uint32](dst []T, id uint32) {
	for i := range dst {
		dst[i] = T(id)
	}
}

// read4 reads the tokens of a stretch of a shard of a source.
func (d *Data) read4(dst []uint32, source int, shard *shards.Shard, g segment) error {
	if err := shard.Read(dst, g.token); err != nil {
		return fmt.Errorf("source %q: %w", d.Sources[source].Name, err)
	}
	limit := d.idLimit()
	for i, id := range dst {
		if id >= limit {
			return d.idError(source, g.shard, g.token+int64(i), id)
		}
	}
	return nil
}

// read2 is read4 of a shard whose elements are uint16, without taking them apart.
func (d *Data) read2(dst []uint16, source int, shard *shards.Shard, g segment) error {
	encoded, err := shard.Encoded(g.token, g.token+g.length)
	if err != nil {
		return fmt.Errorf("source %q: %w", d.Sources[source].Name, err)
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(dst))), 2*len(dst)), encoded) // both are little-endian
	if limit := d.idLimit(); limit <= math.MaxUint16 && reaches(encoded, limit) {
		for i := range len(encoded) / 2 {
			if id := uint32(binary.LittleEndian.Uint16(encoded[2*i:])); id >= limit {
				return d.idError(source, g.shard, g.token+int64(i), id)
			}
		}
	}
	return nil
}

// reaches says whether one of these little-endian uint16 is limit, from 1 to 2^16-1, or above. It
// looks at four at a time: with K = 2^15 - limit modulo 2^15, the low 15 bits of an id and K add up
// to 2^15 or more where they are those of limit or above; the highest bits decide the rest.
func reaches(ids []byte, limit uint32) bool {
	const lanes, high = 0x0001000100010001, 0x8000800080008000
	k := uint64(1<<15-limit&(1<<15-1)) * lanes
	var low, found uint64 // a limit above 2^15 wants both the highest bit and the sum's, one below it either of them
	if limit < 1<<15 {
		low = high
	}
	for ; len(ids) >= 8; ids = ids[8:] {
		x := binary.LittleEndian.Uint64(ids)
		sum := x&^uint64(high) + k
		found |= x&sum | low&(x|sum)
	}
	for ; len(ids) >= 2; ids = ids[2:] {
		if uint32(binary.LittleEndian.Uint16(ids)) >= limit {
			return true
		}
	}
	return found&high != 0
}

// stretches calls read with the shard and the stretches of a sample of length tokens, each with its
// place in the sample. It gives the number of tokens that they have: length, unless the sample is
// padded.
func (d *Data) stretches(ctx context.Context, length int, s Sample, read func(shard *shards.Shard, at int,
	g segment) error) (n int, err error) {
	if length != d.SequenceLength+1 {
		return 0, fmt.Errorf("a sample has %d tokens, room for %d was given", d.SequenceLength+1, length)
	}
	var buffer [16]segment
	segments, err := d.segments(buffer[:0], s)
	if err != nil {
		return 0, err
	}
	if n := lengthOf(segments); n != int64(length) && d.Packing == nil {
		return 0, fmt.Errorf("source %q: sample %d has %d tokens of %d: the last of a validation set may be short, "+
			"and Megatron then fills it up",
			d.Sources[s.Source].Name, s.Window, n, length)
	}
	err = d.over(s.Source, segments, func(shard *shards.Shard, g segment) error {
		if d.verifier != nil {
			if err := d.verifier.admit(ctx, s.Source, g.shard, shard.Summed()); err != nil {
				return err
			}
		}
		at := n
		n += int(g.length)
		return read(shard, at, g)
	})
	return n, err
}

// over calls f with each of a source's segments, and its shard.
func (d *Data) over(source int, segments []segment, f func(shard *shards.Shard, g segment) error) error {
	for len(segments) > 0 {
		k := segments[0].shard
		shard, err := d.shelf.take(source, k)
		if err != nil {
			return err
		}
		err = shard.Guard(func() (err error) {
			for err == nil && len(segments) > 0 && segments[0].shard == k {
				err = f(shard, segments[0])
				segments = segments[1:]
			}
			return err
		})
		if d.outlived(shard, err) {
			d.shelf.renew(source, k, shard, err)
		}
		d.shelf.put(source, k)
		if err != nil {
			return err
		}
	}
	return nil
}

// outlived says whether a shard is of no use any more, after a read of it that ended with err,
// while the one that has its name now may be: bytes of its files are gone, or they are damaged and
// others have taken their place. One without sums whose files are verified whole is used to its
// end: what was verified is not what has its name now.
func (d *Data) outlived(shard *shards.Shard, err error) bool {
	if err == nil || d.verifier != nil && !shard.Summed() {
		return false
	}
	return errors.Is(err, mapping.ErrUnreadable) || errors.Is(err, shards.ErrCorrupt) && shard.Replaced()
}

// Probe says why a shard cannot be read: its files are not there, are others than those that were
// sealed, or have lost bytes at their ends. It reads a few bytes. One that could not be read, and
// was restored, is open again afterwards.
func (d *Data) Probe(source, shard int) error {
	at := segment{shard: shard}
	return d.over(source, []segment{at}, func(*shards.Shard, segment) error { return nil })
}

// segments appends the stretches of the source's shards that are a sample.
func (d *Data) segments(dst []segment, s Sample) ([]segment, error) {
	switch {
	case d.order != nil:
		return d.order.segments(dst, s)
	case d.Packing != nil:
		return d.pieces(dst, &s)
	}
	return append(dst, segment{shard: s.Shard, token: s.Token, length: int64(d.SequenceLength) + 1}), nil
}

// idLimit is above every id that may occur: the vocabulary where it is known, else what the
// stream's int32 can hold.
func (d *Data) idLimit() uint32 {
	if d.Tokenizer == nil || d.Tokenizer.Vocabulary == 0 || d.Tokenizer.Vocabulary > math.MaxInt32 {
		return math.MaxInt32 + 1
	}
	return uint32(d.Tokenizer.Vocabulary)
}

func (d *Data) idError(source, shard int, token int64, id uint32) error {
	return fmt.Errorf("source %q: %s.bin: token %d (byte %d) has id %d, but the tokenizer has ids below %d: the "+
		"shard is damaged, or another tokenizer made it",
		d.Sources[source].Name, d.ShardPath(source,
			shard), token, token*tokenBytes(d.Sources[source].Shards[shard].DType), id, d.idLimit())
}
