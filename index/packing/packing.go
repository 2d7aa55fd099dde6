// Package packing packs the documents of a source into samples of a fixed number of tokens without
// cutting them, by best fit. It writes an index file that gives direct access to every sample.
// docs/formats/packing.md specifies the algorithm and the file.
package packing

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"iter"
)

// Limits of the algorithm. They determine the result: other values would be another version of the
// algorithm.
const (
	maxOpen   = 1 << 10 // samples that are open at the same time
	maxPieces = 1 << 18 // pieces in open samples
)

// maxCapacity is the largest number of tokens of a sample.
const maxCapacity = 1<<28 + 1

// A Source is the input of a packing.
type Source struct {
	Capacity int // tokens of a sample: L+1
	// the source's token at which the first validation document starts; all later documents are in
	// the validation split too. Without a validation split, the number of tokens.
	HeldOut int64
	Shards  []Shard

	// Documents iterates over the number of tokens of every document of all shards, in order,
	// including empty documents. It is iterated more than once.
	Documents iter.Seq2[int64, error]
}

// A Shard holds the properties of a shard that a packing depends on.
type Shard struct {
	Tokens int64
	Index  string // SHA-256 of the .idx file, in hexadecimal
}

// A Piece is a document in a sample, or a range of a document that is longer than a sample. Its
// tokens start at Token, counted over the concatenated shards of the source.
type Piece struct {
	Token  int64
	Length int32
}

// Statistics describe the result of a packing.
type Statistics struct {
	Samples   int64 `json:"samples"`            // all samples, including validation samples
	HeldOut   int64 `json:"validation_samples"` // held-out samples, which are the last ones
	Documents int64 `json:"documents"`          // documents that have tokens
	Cut       int64 `json:"cut_documents"`      // documents longer than a sample
	Pieces    int64 `json:"pieces"`
	Tokens    int64 `json:"tokens"`
}

// Padding returns the number of padding tokens in all samples, for the given capacity.
func (s Statistics) Padding(capacity int) int64 { return s.Samples*int64(capacity) - s.Tokens }

// Valid reports whether the statistics are possible for a packing of the given capacity.
func (s Statistics) Valid(capacity int) bool {
	return s.Samples >= 0 && s.HeldOut >= 0 && s.HeldOut <= s.Samples && s.Cut >= 0 && s.Cut <= s.Documents &&
		s.Documents <= s.Pieces &&
		s.Pieces <= s.Tokens && s.Samples <= s.Pieces && s.Tokens <= maxTokens &&
		s.Samples >= (s.Tokens+int64(capacity)-1)/int64(capacity)
}

// maxTokens bounds a source, so that no sum of tokens and no offset in a file overflows.
const maxTokens = 1 << 56

// key identifies a packing by all its inputs.
func (s *Source) key() [32]byte {
	b := []byte("mula packing 1")
	for _, v := range []int64{int64(s.Capacity) - 1, s.HeldOut, int64(len(s.Shards))} {
		b = binary.LittleEndian.AppendUint64(b, uint64(v))
	}
	for _, shard := range s.Shards {
		b = binary.LittleEndian.AppendUint64(b, uint64(shard.Tokens))
		b = append(b, shard.Index...)
	}
	return sha256.Sum256(b)
}

// Name returns the name of the source's index file. It depends on the contents of the .idx files
// and the settings, but not on paths.
func (s *Source) Name() string {
	key := s.key()
	return hex.EncodeToString(key[:16]) + ".packing"
}

// Count packs the source and returns the statistics without writing a file.
func Count(ctx context.Context, s *Source) (Statistics, error) {
	return s.pack(ctx, func(int64, []Piece) error { return nil })
}

// pack packs the source and calls emit with the number and the pieces of each sample. The pieces
// are valid until emit returns.
func (s *Source) pack(ctx context.Context, emit func(sample int64, pieces []Piece) error) (Statistics, error) {
	if s.Capacity < 2 || s.Capacity > maxCapacity {
		return Statistics{}, fmt.Errorf("packing: invalid sample length of %d tokens; use 2 to 2^28 + 1", s.Capacity)
	}
	total := int64(0)
	for _, shard := range s.Shards {
		if shard.Tokens < 0 || shard.Tokens > maxTokens-total {
			return Statistics{}, errors.New("packing: the shards have more than 2^56 tokens")
		}
		total += shard.Tokens
	}
	p := &packer{capacity: int64(s.Capacity), free: none}
	p.emit = func(pieces []Piece) error {
		if p.Samples%(1<<12) == 0 && ctx.Err() != nil {
			return context.Cause(ctx)
		}
		p.Samples++
		p.Pieces += int64(len(pieces))
		return emit(p.Samples-1, pieces)
	}
	training := int64(-1) // number of training samples, or -1 until known
	documents := 0
	for n, err := range s.Documents {
		if documents++; err == nil && documents%(1<<12) == 0 && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			return Statistics{}, err
		}
		if n < 0 || n > total-p.Tokens {
			return Statistics{}, fmt.Errorf("packing: the documents have more than the %d tokens of their shards",
				total)
		}
		if training < 0 && p.Tokens >= s.HeldOut {
			if err := p.closeAll(); err != nil {
				return Statistics{}, err
			}
			training = p.Samples
		}
		if err := p.add(n); err != nil {
			return Statistics{}, err
		}
	}
	if err := p.closeAll(); err != nil {
		return Statistics{}, err
	}
	if p.Tokens != total {
		return Statistics{}, fmt.Errorf("packing: the documents have %d tokens, but their shards have %d", p.Tokens,
			total)
	}
	if training >= 0 {
		p.HeldOut = p.Samples - training
	}
	return p.Statistics, nil
}

// none is no node.
const none = -1

// A packer implements bounded best fit. Its memory is bounded by maxOpen and maxPieces, independent
// of the number of documents.
type packer struct {
	Statistics
	capacity int64
	emit     func(pieces []Piece) error

	open   []openSample // by free capacity, oldest first for equal capacity
	opened int64
	nodes  []node // the pieces of open samples
	used   int    // nodes in use
	free   int32  // the first free node
	pieces []Piece
}

// An openSample can receive more pieces.
type openSample struct {
	room        int32 // free capacity in tokens
	first, last int32 // nodes
	number      int64 // in the order of opening, from 0
}

// A node is a piece of an open sample.
type node struct {
	Piece
	next int32 // the node of the next piece; none after the last
}

// add packs the next document, which has n tokens.
func (p *packer) add(n int64) error {
	if n == 0 {
		return nil
	}
	p.Documents++
	if n > p.capacity {
		p.Cut++
	}
	for ; n >= p.capacity; n -= p.capacity {
		p.pieces = append(p.pieces[:0], Piece{p.Tokens, int32(p.capacity)})
		p.Tokens += p.capacity
		if err := p.emit(p.pieces); err != nil {
			return err
		}
	}
	if n == 0 {
		return nil
	}
	piece := Piece{p.Tokens, int32(n)}
	p.Tokens += n
	return p.put(piece)
}

// put adds a piece that is shorter than a sample.
func (p *packer) put(piece Piece) error {
	at := p.search(piece.Length, -1) // the least capacity that the piece fits into, oldest first
	if at == len(p.open) {
		p.open = append(p.open, openSample{int32(p.capacity), none, none, p.opened})
		p.opened++
	}
	s := p.open[at]
	s.room -= piece.Length
	i := p.keep(piece)
	if s.first == none {
		s.first = i
	} else {
		p.nodes[s.last].next = i
	}
	s.last = i
	to := p.search(s.room, s.number) // not after at, as there is less capacity now
	copy(p.open[to+1:at+1], p.open[to:at])
	p.open[to] = s
	if s.room == 0 || len(p.open) > maxOpen || p.used > maxPieces {
		return p.close(0) // the sample with the least capacity, which may be full
	}
	return nil
}

// search returns the index in open of the first sample with more than this capacity, or with equal
// capacity and at least this number.
func (p *packer) search(room int32, number int64) int {
	low, high := 0, len(p.open)
	for low < high {
		middle := (low + high) / 2
		if s := &p.open[middle]; s.room < room || s.room == room && s.number < number {
			low = middle + 1
		} else {
			high = middle
		}
	}
	return low
}

// keep stores a piece in a node.
func (p *packer) keep(piece Piece) int32 {
	p.used++
	i := p.free
	if i == none {
		p.nodes = append(p.nodes, node{piece, none})
		return int32(len(p.nodes) - 1)
	}
	p.free = p.nodes[i].next
	p.nodes[i] = node{piece, none}
	return i
}

// close emits and removes the open sample at an index.
func (p *packer) close(at int) error {
	s := p.open[at]
	p.pieces = p.pieces[:0]
	for i := s.first; i != none; i = p.nodes[i].next {
		p.pieces = append(p.pieces, p.nodes[i].Piece)
	}
	p.nodes[s.last].next = p.free
	p.free = s.first
	p.used -= len(p.pieces)
	p.open = append(p.open[:at], p.open[at+1:]...)
	return p.emit(p.pieces)
}

// closeAll emits all open samples, oldest first.
func (p *packer) closeAll() error {
	for len(p.open) > 0 {
		oldest := 0
		for i := range p.open {
			if p.open[i].number < p.open[oldest].number {
				oldest = i
			}
		}
		if err := p.close(oldest); err != nil {
			return err
		}
	}
	return nil
}
