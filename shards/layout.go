package shards

import (
	"context"
	"iter"
)

// Layout names whose files a shard consists of. Megatron's is mula's own: blends are made of such
// shards; the others are written for, and read from, other frameworks. The packages below shards
// implement them, shards/formats chooses.
type Layout string

// The layouts.
const (
	Megatron  Layout = ""          // x.bin, x.idx: Megatron-LM, NeMo, BlendCorpus
	Dolma     Layout = "dolma"     // x.npy, x.csv.gz: dolma, OLMo, OLMo-core
	Datatrove Layout = "datatrove" // x.ds, x.ds.index, x.ds.metadata: datatrove, nanotron
	MDS       Layout = "mds"       // a folder with index.json and shard.00000.mds, …: MosaicML Streaming
	FMS       Layout = "fms"       // x.arrow, a record batch a document: fms-fsdp
)

// A DocumentWriter makes one shard of any layout from documents in their order. Until Close has
// succeeded nothing stands under a final name. It is not safe for use by several goroutines.
type DocumentWriter interface {
	// Append adds a document. A document that the layout cannot hold is refused, and the shard is
	// as it was before; after any other error it can only be aborted. It keeps nothing of tokens.
	Append(tokens []uint32, origin DocumentOrigin) error
	// Close finishes and publishes the shard, its manifest included, and whatever makes readers
	// take it for complete last.
	Close() error
	// Abort gives the shard up and removes what was written. After Close it does nothing.
	Abort()
	// Manifest is the manifest after Close has succeeded, and nil before.
	Manifest() *Manifest
}

// A TokenDocument is a document as a shard holds it.
type TokenDocument struct {
	Tokens []uint32
	Origin DocumentOrigin // zero where the layout keeps none
}

// A DocumentReader reads one shard of any layout.
type DocumentReader interface {
	// Manifest is what stands beside the files, or nil.
	Manifest() *Manifest
	// Documents is how many there are, -1 if that is known only at the end; Tokens likewise.
	Documents() int64
	Tokens() int64
	// DType is the element type of the ids on disk, by its name in numpy; "" if it is known only at
	// the end.
	DType() string
	// All yields the documents in order. Tokens are valid until the next iteration. After an error
	// iteration ends.
	All(ctx context.Context) iter.Seq2[TokenDocument, error]
	Close() error
}
