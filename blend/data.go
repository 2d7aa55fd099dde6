package blend

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"
	"unsafe"

	"mula/blend/fingerprint"
	"mula/shards"
	"mula/shards/facts"
	"mula/shards/pool"
	"mula/shards/verifier"
)

// Data is a plan with its open shards. It is safe for concurrent use until Close.
//
// A shard is mapped into memory when it is first used. If a shard is truncated while it is open,
// reads of its samples fail, and reads of other shards continue. A restored shard is opened again.
// Its counts and manifest hashes must be unchanged, and its blocks are compared with their sums. A
// restored shard without sums is trusted, or not read again if complete files are verified. If an
// undamaged file is replaced, Data continues to read the file that it opened. At most about 16,000
// shards are open at a time; beyond that, shards without recent reads are closed.
type Data struct {
	*Plan
	facts       [][]facts.Facts // by source and shard; nil if the shards were not surveyed
	firsts      []int           // by source: number of its first shard in the pool
	pool        *pool.Pool
	verifier    *verifier.Verifier    // of index files, then shards; nil if complete files are not verified
	indexFiles  int                   // number of index files
	verifyFirst bool                  // [verifier.Options.First]
	completion  *backgroundCompletion // nil without [verifier.Options.Complete]
	reverify    time.Duration
	hashed      bool // hashFiles has set the hashes of the plan that is being built
	packs       bool // the plan that is being built is packed
}

// DefaultReverify is the default of [OpenOptions.Reverify].
const DefaultReverify = 10 * time.Minute

// OpenOptions are the options of [Open].
type OpenOptions struct {
	Base string // directory for the plan's relative paths; "": the plan's own directory
	// skip the comparison of sample tokens; for [Data.Check], which reads everything and reports
	// more about each problem
	Unread bool

	// Unsurveyed makes Open look at no shard. A shard is compared with the plan when a sample first
	// needs it, and the 16 samples are not read. It is for all processes of a job except one, which
	// opens the plan without Unsurveyed.
	Unsurveyed bool

	// Reverify is the time after which a block of a shard with sums is compared again when it is
	// read ([shards.Shard.Reverify]). 0 is [DefaultReverify]; a negative time disables the
	// comparison.
	Reverify time.Duration

	// Verify, if not nil, verifies complete files while samples are read, until [Data.Close]. If it
	// is nil, only the comparisons of [Open] are made. A file that changes in place is verified
	// again within about Reverify. If a file is damaged, the next record of a stream (package
	// [mula/blend/stream]), and [Data.Tokens] for the damaged shard, return an error that names
	// file, bytes and documents.
	//
	// With Complete, and without Base, Open also completes a provisional plan in the background, as
	// [Complete] does. It shares the work with other processes, and replaces the plan's file when
	// all shards are hashed. If it fails, the next record of a stream returns the error.
	Verify *verifier.Options

	// Waiting, if not nil, makes Open wait while another process builds missing index files of the
	// cache that the plan's order is read from. Waiting is called with a message, again for each
	// process that Open waits for. Open does not wait for other files of the cache.
	Waiting func(message string)
}

// Open opens the shards of a plan and verifies that they match the plan: file sizes, element types,
// counts, the hashes in their manifests, and the tokens of 16 samples. Only [Data.Check] verifies
// every byte.
//
// Open stores its findings about a shard in the user's cache directory, and reuses them while size,
// modification time and inode of the shard's files are unchanged. A second Open of a plan with
// thousands of shards therefore opens only the shards of the 16 samples.
//
// A shard in an object store is compared with the plan when it is first read, because thousands of
// requests would delay the first batch by seconds. If the plan has such a shard, this holds for its
// other shards, too. [Data.Check] looks at all of them.
func Open(ctx context.Context, p *Plan, opts OpenOptions) (*Data, error) {
	opened := *p
	if opts.Base != "" {
		opened.base, opened.file = realDir(opts.Base), "" // its file has other paths
	}
	var err error
	if opened.order, err = p.order.open(ctx, &opened, opts.Waiting); err != nil {
		return nil, err
	}
	var d *Data
	if opts.Unsurveyed || opened.Remote() {
		d = newData(&opened, opts.Verify != nil)
	} else if d, err = surveyShards(ctx, &opened, opts.Verify != nil); err != nil {
		opened.order.close()
		return nil, err
	}
	d.reverify = max(cmp.Or(opts.Reverify, DefaultReverify), 0)
	if opts.Verify != nil {
		if err = d.startVerifier(*opts.Verify); err != nil {
			d.Close()
			return nil, err
		}
	}
	if !opts.Unsurveyed {
		if err := d.verify(ctx, opts.Unread); err != nil {
			d.Close()
			return nil, err
		}
	}
	return d, nil
}

// newData returns the data of a plan whose shards are not open. verified is the argument of
// [pool.New].
func newData(p *Plan, verified bool) *Data {
	d := &Data{Plan: p}
	var sources, numbers []int // by shard of the plan
	for i := range p.Sources {
		d.firsts = append(d.firsts, len(sources))
		for k := range p.Sources[i].Shards {
			sources, numbers = append(sources, i), append(numbers, k)
		}
	}
	d.pool = pool.New(len(sources), verified, func(i int) (*shards.Shard, error) {
		return d.open(sources[i], numbers[i])
	})
	return d
}

// surveyShards is newData, and looks up the facts of all shards.
func surveyShards(ctx context.Context, p *Plan, verified bool) (*Data, error) {
	l := facts.Open()
	defer l.Close()
	d := newData(p, verified)
	return d, d.survey(ctx, l)
}

// survey looks up the facts of all shards.
func (d *Data) survey(ctx context.Context, l *facts.Cache) error {
	var sources []int // by shard of the plan
	for i := range d.Sources {
		sources = append(sources, slices.Repeat([]int{i}, len(d.Sources[i].Shards))...)
	}
	found, failed, err := l.Survey(ctx, len(sources), func(i int) (string, error) {
		return absolutePath(d.ShardPath(sources[i], i-d.firsts[sources[i]]))
	})
	if err != nil && failed >= 0 {
		err = fmt.Errorf("source %q: %w", d.Sources[sources[failed]].Name, err)
	}
	if err != nil {
		return err
	}
	for i := range d.Sources {
		n := len(d.Sources[i].Shards)
		d.facts = append(d.facts, found[:n:n])
		found = found[n:]
	}
	return nil
}

// open opens a shard, and compares it with the plan and with the facts of the survey.
func (d *Data) open(source, shard int) (*shards.Shard, error) {
	s, err := shards.OpenFrom(context.Background(), d.ShardPath(source, shard), d.sidecar(source, shard))
	if err != nil {
		return nil, fmt.Errorf("source %q: %w", d.Sources[source].Name, err)
	}
	s.Reverify(d.reverify)
	err = d.compareShard(source, shard, facts.Of(s))
	if err == nil && d.Sources[source].Shards[shard].Sample != "" {
		err = d.readSample(context.Background(), source, shard)
	}
	if err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// compareShard compares a shard that was opened with the facts of the survey, or with the plan if
// there was no survey.
func (d *Data) compareShard(source, shard int, is facts.Facts) error {
	if d.facts == nil {
		return d.compareFacts(source, shard, is)
	}
	was := d.facts[source][shard]
	if !is.Manifest { // hashes are known only from reading the files
		is.Bin, is.Index = was.Bin, was.Index
	} else if !was.Manifest && is.Tokens == was.Tokens && is.Documents == was.Documents && is.DType == was.DType {
		// another process has hashed the shard since
		if err := d.compareFacts(source, shard, is); err != nil {
			return err
		}
		is = was
	}
	if is != was {
		return fmt.Errorf("source %q: shard %s was replaced since the plan was opened; restart the program, "+
			"so that the new file is compared with the plan",
			d.Sources[source].Name, d.ShardPath(source, shard))
	}
	return nil
}

// Files lists the files that samples of the plan are read from: the files of its shards, including
// optional files that may not exist, and of its order. Files does not access the file system.
func (p *Plan) Files() (paths []string) {
	for i := range p.Sources {
		for k := range p.Sources[i].Shards {
			paths = append(paths, shards.Files(p.ShardPath(i, k))...)
		}
	}
	for _, f := range p.order.files() {
		paths = append(paths, f.path)
	}
	return paths
}

// Close closes the shards. No read may be in progress.
func (d *Data) Close() error {
	if d.verifier != nil {
		d.verifier.Stop()
	}
	return errors.Join(d.pool.Close(), d.order.close())
}

// changed returns the error about a shard that differs from the plan.
func (p *Plan) changed(source, shard int, format string, args ...any) error {
	return fmt.Errorf("shard %s of source %q has changed since the plan was built: %s; restore it, or build a new plan",
		p.ShardPath(source, shard), p.Sources[source].Name, fmt.Sprintf(format, args...))
}

// verify compares the shards with the plan, and, unless unread is set, the tokens of some samples.
func (d *Data) verify(ctx context.Context, unread bool) error {
	for i, list := range d.facts { // empty without a survey
		for k, is := range list {
			if err := d.compareFacts(i, k, is); err != nil {
				return err
			}
		}
	}
	if !d.Traits().Scheduled { // ReadPlan has compared the pairs of other orders
		if err := d.verifyPairs(); err != nil {
			return err
		}
	}
	if unread {
		return nil
	}
	if err := d.fetchChecks(ctx); err != nil {
		return err
	}
	tokens := make([]uint32, d.SampleTokens())
	for _, c := range d.Checks {
		s, err := d.Locate(c.Position)
		if err != nil {
			return err
		}
		if err := d.tokens(ctx, tokens, s); err != nil {
			return err
		}
		if h := fingerprint.SampleHash(tokens); hex.EncodeToString(h[:]) != c.Hash {
			return d.changed(s.Source, s.Shard,
				"the sample at position %d (window %d, tokens %d to %d of the shard) has hash %x, was %s",
				c.Position, s.Window, s.Token, s.Token+int64(d.SequenceLength), h, c.Hash)
		}
	}
	return nil
}

// Tokens reads the tokens of a sample into dst, which must have L+1 elements. It fails if a token
// is not an id of the plan's tokenizer.
func (d *Data) Tokens(dst []uint32, s Sample) error { return d.tokens(context.Background(), dst, s) }

// Reread does what [Data.Tokens] does, but first compares the sample's blocks with their sums, even
// if they were compared recently.
func (d *Data) Reread(ctx context.Context, dst []uint32, s Sample) error {
	if err := d.checkLength(len(dst)); err != nil {
		return err
	}
	_, err := d.stretches(ctx, s, func(shard *shards.Shard, _ int, g segment) error {
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

// tokens implements Tokens. ctx cancels a wait for the verification of the shard.
func (d *Data) tokens(ctx context.Context, dst []uint32, s Sample) error {
	if err := d.checkLength(len(dst)); err != nil {
		return err
	}
	_, err := ReadSample(ctx, d, s, dst, nil)
	return err
}

// DocumentStarts appends the offsets in a sample at which non-empty documents start, in ascending
// order. It returns the number of the sample's tokens that are not padding: L+1 unless the plan is
// packed.
func (d *Data) DocumentStarts(dst []int32, s Sample) (starts []int32, length int, err error) {
	length, err = ReadSample[uint32](context.Background(), d, s, nil, &dst)
	return dst, length, err
}

// ReadSample reads the tokens and the document starts of a sample, as [Data.Tokens] and
// [Data.DocumentStarts] do, in one pass over its shards. If dst is nil, it reads no tokens.
// Otherwise dst has L+1 elements, and its type must hold the tokens of every shard of the sample:
// uint32, or uint16 if all these shards are uint16. If starts is nil, ReadSample reads no document
// starts. It returns the number of tokens that are not padding. ctx cancels a wait for the
// verification of a shard, and requests to an object store.
func ReadSample[T uint16 | uint32](ctx context.Context, d *Data, s Sample, dst []T, starts *[]int32) (length int,
	err error) {
	if dst != nil {
		if err := d.checkLength(len(dst)); err != nil {
			return 0, err
		}
	}
	length, err = d.stretches(ctx, s, func(shard *shards.Shard, at int, g segment) (err error) {
		if dst != nil {
			switch part := any(dst[at:][:g.length]).(type) {
			case []uint16:
				err = d.read2(ctx, part, s.Source, shard, g)
			case []uint32:
				err = d.read4(ctx, part, s.Source, shard, g)
			}
		}
		if err == nil && starts != nil {
			if err := shard.Fetch(ctx, g.token, g.token, true); err != nil {
				return fmt.Errorf("source %q: %w", d.Sources[s.Source].Name, err)
			}
			*starts, err = d.appendStarts(*starts, s.Source, shard, at, g)
		}
		return err
	})
	if err == nil && dst != nil {
		for i := length; i < len(dst); i++ {
			dst[i] = T(d.Traits().Padding)
		}
	}
	return length, err
}

// checkLength verifies the length of a buffer for the tokens of a sample.
func (d *Data) checkLength(n int) error {
	if n != d.SampleTokens() {
		return fmt.Errorf("a sample has %d tokens, but the buffer has %d elements", d.SampleTokens(), n)
	}
	return nil
}

// read4 reads the tokens of a segment.
func (d *Data) read4(ctx context.Context, dst []uint32, source int, shard *shards.Shard, g segment) error {
	if err := shard.ReadContext(ctx, dst, g.token); err != nil {
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

// read2 does what read4 does for a shard of uint16 elements, by copying its bytes.
func (d *Data) read2(ctx context.Context, dst []uint16, source int, shard *shards.Shard, g segment) error {
	if t := shard.DType(); t != shards.UInt16 {
		return fmt.Errorf("source %q: %s.bin has elements of type %s; read its tokens as uint32",
			d.Sources[source].Name, shard.Prefix(), t)
	}
	encoded, err := shard.Encoded(ctx, g.token, g.token+g.length)
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

// appendStarts appends the offsets in a sample at which non-empty documents start within one
// segment.
func (d *Data) appendStarts(dst []int32, source int, shard *shards.Shard, at int, g segment) ([]int32, error) {
	if g.begins {
		dst = append(dst, int32(at))
		if d.order.traits().Padded { // each segment is part of one document
			return dst, nil
		}
	}
	for span, err := range shard.Spans(g.token, g.token+g.length) {
		if err != nil {
			return dst, fmt.Errorf("source %q: %w", d.Sources[source].Name, err)
		}
		if span.First > g.token || span.First == g.token && !g.begins {
			dst = append(dst, int32(int64(at)+span.First-g.token))
		}
	}
	return dst, nil
}

// reaches reports whether any of the little-endian uint16 ids is at least limit, which is 1 to
// 2^16-1. It tests four at a time: with K = 2^15 - limit modulo 2^15, the low 15 bits of an id and
// K add up to 2^15 or more if they are at least the low bits of limit. The highest bits decide the
// rest.
func reaches(ids []byte, limit uint32) bool {
	const lanes, high = 0x0001000100010001, 0x8000800080008000
	k := uint64(1<<15-limit&(1<<15-1)) * lanes
	var low, found uint64 // limit ≥ 2^15: both the id's highest bit and the sum's must be set; below: either
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

// segmentLists holds lists of segments for reuse. An order is an interface, so a list that is
// passed to it would otherwise be allocated for each sample.
var segmentLists = sync.Pool{New: func() any { return new([]segment) }}

// stretches calls read with each segment of a sample, its shard, and its offset in the sample. It
// returns the number of tokens of the segments: L+1, unless the sample is padded.
func (d *Data) stretches(ctx context.Context, s Sample, read func(shard *shards.Shard, at int,
	g segment) error) (n int, err error) {
	buffer := segmentLists.Get().(*[]segment)
	defer segmentLists.Put(buffer)
	segments, err := d.order.segments((*buffer)[:0], s)
	if err != nil {
		return 0, err
	}
	*buffer = segments
	if n := lengthOf(segments); n != int64(d.SampleTokens()) && !d.Traits().Padded {
		return 0, fmt.Errorf("source %q: sample %d has only %d of %d tokens; mula cannot read the last, short sample "+
			"of a validation set, which Megatron pads",
			d.Sources[s.Source].Name, s.Window, n, d.SampleTokens())
	}
	err = d.over(s.Source, segments, func(shard *shards.Shard, g segment) error {
		if err := d.admit(ctx, s.Source, g.shard, shard.Summed()); err != nil {
			return err
		}
		at := n
		n += int(g.length)
		return read(shard, at, g)
	})
	return n, err
}

// over calls f with each of a source's segments and its shard.
func (d *Data) over(source int, segments []segment, f func(shard *shards.Shard, g segment) error) error {
	for len(segments) > 0 {
		k := segments[0].shard
		err := d.pool.Read(d.firsts[source]+k, func(shard *shards.Shard) (err error) {
			for err == nil && len(segments) > 0 && segments[0].shard == k {
				err = f(shard, segments[0])
				segments = segments[1:]
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// Probe reports why a shard cannot be read: its files are missing, do not match the plan, or were
// truncated. It reads a few bytes. If the shard was restored, Probe opens it again.
func (d *Data) Probe(source, shard int) error {
	at := segment{shard: shard}
	return d.over(source, []segment{at}, func(*shards.Shard, segment) error { return nil })
}

// idLimit returns the vocabulary size if it is known, else the number of ids that the stream's
// int32 can represent.
func (p *Plan) idLimit() uint32 {
	if p.Tokenizer == nil || p.Tokenizer.Vocabulary == 0 || p.Tokenizer.Vocabulary > math.MaxInt32 {
		return math.MaxInt32 + 1
	}
	return uint32(p.Tokenizer.Vocabulary)
}

func (d *Data) idError(source, shard int, token int64, id uint32) error {
	return fmt.Errorf("source %q: %s.bin: token %d (byte %d) has id %d, but the tokenizer has ids below %d; restore "+
		"the shard, or tokenize again with the plan's tokenizer",
		d.Sources[source].Name, d.ShardPath(source,
			shard), token, token*int64(d.Sources[source].Shards[shard].DType.Size()), id, d.idLimit())
}
