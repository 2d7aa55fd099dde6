package blend

import (
	"context"
	"errors"
	"iter"
	"path/filepath"

	"mula/index"
)

// Traits are the properties of a plan's order that readers of its samples depend on.
type Traits struct {
	Version string // in plan.json; see docs/formats/plan.md

	// Windows: each sample is a window, L+1 consecutive tokens of a shard, and the plan alone
	// locates it. Otherwise index files locate the tokens, so the plan must be open.
	Windows bool

	// Scheduled: the stages distribute the positions among the sources, and each source is drawn
	// epoch by epoch. Otherwise the whole order is read from index files: only an open plan locates
	// samples, and Sample.Epoch is -1.
	Scheduled bool

	// Padded: a sample consists of pieces of documents and may be shorter than L+1 tokens. Token id
	// Padding fills the rest.
	Padded  bool
	Padding uint32

	// Locality of the windows of a source; zero if all windows of an epoch are shuffled.
	Locality index.Locality

	Amendable bool // [Amend] accepts the plan

	name, instead string // for messages: the order, and what to use for windows instead
}

// Traits returns the properties of the plan's order.
func (p *Plan) Traits() Traits {
	t := p.order.traits()
	_, t.Amendable = p.order.(amendable)
	return t
}

// An order computes the samples of a plan. Each kind of order is a type. The order of a plan that
// is not open may be unable to locate samples; open returns an order that can.
type order interface {
	traits() Traits

	// compileSource validates a source, and prepares the order within it. compile does the same for
	// the rest of the plan.
	compileSource(s *Source) error
	compile() error

	// sealed returns the meaning of the plan, for plan.json. writeFiles sets the locations of index
	// files. resolve makes these locations absolute after the plan was read.
	sealed() any
	writeFiles(w *writtenPlan, relative func(path string) (string, error)) error
	resolve()

	files() []orderFile // index files
	// open opens the index files, for a plan that is a copy of the order's plan. If waiting is not
	// nil, open waits for files that another process is building.
	open(ctx context.Context, p *Plan, waiting func(string)) (order, error)
	close() error
	// closed returns the order of the plan when it is not open.
	closed() order

	// locate returns the sample at a position of the plan.
	locate(position int64) (Sample, error)
	// segments appends the segments of a sample.
	segments(dst []segment, s Sample) ([]segment, error)
	// position is the inverse of locate, as [Plan.Position] describes.
	position(source int, epoch, window int64) (int64, bool)
	// positions lists the samples of a range of the plan's positions.
	positions(ctx context.Context, from, to int64, yield func(Block, error) bool)
	// validation lists the validation samples of a source.
	validation(source int) iter.Seq[Sample]
	// occurrences lists the samples that hold a document.
	occurrences(ctx context.Context, doc Document) iter.Seq2[Occurrence, error]
}

// A segment is a range of consecutive tokens of a sample within a shard. A window is one segment. A
// Megatron sample or a packed sample has a segment for each document.
type segment struct {
	token, length int64
	// a document starts here, even if the shard's index has none here; true for all segments of
	// padded samples
	begins bool
	shard  int
}

func lengthOf(segments []segment) (n int64) {
	for _, g := range segments {
		n += g.length
	}
	return n
}

// An orderFile is an index file of a plan's order.
type orderFile struct {
	path   string
	of     string // the cache or packing that the file belongs to, for messages
	bytes  int64
	sha256 *string
}

// same reports whether two index files have the same content and name.
func (f orderFile) same(g orderFile) bool {
	return filepath.Base(f.path) == filepath.Base(g.path) && f.bytes == g.bytes && *f.sha256 == *g.sha256
}

// An amendable order continues in a plan that amends the order's plan.
type amendable interface {
	order
	// amend returns the order of p, whose parent is the order's plan.
	amend(p *Plan) order
	// extend returns the number of validation windows of the shards of s from number first on: the
	// fraction held of their windows, rounded up. It fails if no training window is left. source is
	// the index of s. If samples are packed, extend packs the shards with b.
	extend(ctx context.Context, b *packer, s *Source, source, first int, held Number) (out int64, err error)
}

// errNotOpen reports a read of tokens through a plan whose index files are not open.
var errNotOpen = errors.New("the samples are located by index files; open the plan to read them")
