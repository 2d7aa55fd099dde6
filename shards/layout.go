package shards

import (
	"context"
	"iter"
)

// A Layout identifies the layout of a shard's files in its manifest. Blends need shards in mula's
// own layout, Megatron. The other layouts are written for, and read from, other frameworks. Each
// has a package below shards, and shards/formats lists them all.
type Layout string

// Megatron is the layout x.bin, x.idx: Megatron-LM, NeMo, BlendCorpus.
const Megatron Layout = ""

// A DocumentWriter writes one shard of any layout. Documents are appended in order. No file has its
// final name before Close has succeeded. It is not safe for concurrent use.
type DocumentWriter interface {
	// Append adds a document. If the layout cannot hold the document, Append returns an error and
	// the shard is unchanged. After any other error, the writer can only be aborted. Append does
	// not retain tokens.
	Append(tokens []uint32, origin DocumentOrigin) error
	// Close finishes and publishes the shard with its manifest. The file that marks the shard as
	// complete is published last.
	Close() error
	// Abort discards the shard and removes its files. It does nothing after Close.
	Abort()
	// Manifest returns the manifest after Close has succeeded, and nil before.
	Manifest() *Manifest
}

// A TokenDocument is one document of a shard.
type TokenDocument struct {
	Tokens []uint32
	Origin DocumentOrigin // zero if the layout has no origins
}

// A DocumentReader reads one shard of any layout.
type DocumentReader interface {
	// Manifest returns the shard's manifest, or nil if it has none.
	Manifest() *Manifest
	// Documents returns the number of documents, -1 if it is known only after iteration. Tokens
	// does the same for tokens.
	Documents() int64
	Tokens() int64
	// DType returns the element type of the ids on disk, "" if it is known only after iteration.
	DType() DType
	// All yields the documents in order. Tokens are valid until the next iteration. An error ends
	// the iteration.
	All(ctx context.Context) iter.Seq2[TokenDocument, error]
	Close() error
}
