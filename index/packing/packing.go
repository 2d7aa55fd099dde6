// Package packing puts the documents of a source into samples of a fixed number of tokens without
// cutting them, best fit first, and keeps what it did in an index file, in which every sample is
// found at once. docs/formats/packing.md has the algorithm and the file to the letter.
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

// Limits of the algorithm, which are part of what a packing is: another number would be another
// version of it.
const (
	maxOpen   = 1 << 10 // samples that are open at a time
	maxPieces = 1 << 18 // pieces in them
)

// MaxCapacity is the largest number of tokens of a sample.
const MaxCapacity = 1<<28 + 1

// A Source is what is to be packed.
type Source struct {
	Capacity int // tokens of a sample: L+1
	// the token of the source at which a document begins that is held out, as all after it are; the
	// number of tokens if none is
	HeldOut int64
	Shards  []Shard

	// Documents gives the number of tokens of every document of all shards, in order, empty ones
	// included. It is gone through more than once.
	Documents iter.Seq2[int64, error]
}

// A Shard is what a packing knows of a shard.
type Shard struct {
	Tokens int64
	Index  string // SHA-256 of the .idx file, in hexadecimal
}

// A Piece is a document in a sample, or a part of one that is longer than a sample. Its tokens are
// those from Token on of all shards of the source, one shard after the other.
type Piece struct {
	Token  int64
	Length int32
}

// Statistics are what came of a packing.
type Statistics struct {
	Samples   int64 `json:"samples"`            // all, held-out ones included
	HeldOut   int64 `json:"validation_samples"` // the last ones
	Documents int64 `json:"documents"`          // that have tokens
	Cut       int64 `json:"cut_documents"`      // longer than a sample
	Pieces    int64 `json:"pieces"`
	Tokens    int64 `json:"tokens"`
}

// Padding is the number of places in all samples, each of this capacity, that no token fills.
func (s Statistics) Padding(capacity int) int64 { return s.Samples*int64(capacity) - s.Tokens }

// Valid says whether these can be the statistics of a packing of that capacity.
func (s Statistics) Valid(capacity int) bool {
	return s.Samples >= 0 && s.HeldOut >= 0 && s.HeldOut <= s.Samples && s.Cut >= 0 && s.Cut <= s.Documents &&
		s.Documents <= s.Pieces &&
		s.Pieces <= s.Tokens && s.Samples <= s.Pieces && s.Tokens <= maxTokens &&
		s.Samples >= (s.Tokens+int64(capacity)-1)/int64(capacity)
}

// maxTokens bounds a source, so that no sum of tokens and no offset in a file overflows.
const maxTokens = 1 << 56

// key identifies a packing by all that decides it.
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

// Name is the name of the source's index file. It depends on the content of the .idx files and the
// settings, not on where they lie.
func (s *Source) Name() string {
	key := s.key()
	return hex.EncodeToString(key[:16]) + ".packing"
}

// Count packs the source and says what came of it, but keeps nothing.
func Count(ctx context.Context, s *Source) (Statistics, error) {
	return s.pack(ctx, func(int64, []Piece) error { return nil })
}

// pack packs the source and gives emit the pieces of each sample, with its number. They are good
// until emit returns.
func (s *Source) pack(ctx context.Context, emit func(sample int64, pieces []Piece) error) (Statistics, error) {
	if s.Capacity < 2 || s.Capacity > MaxCapacity {
		return Statistics{}, fmt.Errorf("packing: samples of %d tokens; they have between 2 and 2^28 + 1", s.Capacity)
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
	training := int64(-1) // samples that are not held out, once they are known
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
		return Statistics{}, fmt.Errorf("packing: the documents have %d tokens, their shards %d", p.Tokens, total)
	}
	if training >= 0 {
		p.HeldOut = p.Samples - training
	}
	return p.Statistics, nil
}

// none is no node.
const none = -1

// A packer is the bounded best fit. What it keeps is bounded by maxOpen and maxPieces, whatever the
// number of documents.
type packer struct {
	Statistics
	capacity int64
	emit     func(pieces []Piece) error

	open   []openSample // by room, and of equal room the oldest first
	opened int64
	nodes  []node // the pieces of open samples
	used   int    // nodes that hold one
	free   int32  // the first node that holds none
	pieces []Piece
}

// An openSample may still get pieces.
type openSample struct {
	room        int32 // tokens that fit in
	first, last int32 // nodes
	number      int64 // as it was opened, from 0
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

// put finds a place for a piece that is shorter than a sample.
func (p *packer) put(piece Piece) error {
	at := p.search(piece.Length, -1) // the least room that the piece fits into, of equal ones the oldest
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
	to := p.search(s.room, s.number) // not behind at, as there is less room now
	copy(p.open[to+1:at+1], p.open[to:at])
	p.open[to] = s
	if s.room == 0 || len(p.open) > maxOpen || p.used > maxPieces {
		return p.close(0) // that of least room, which a full one is
	}
	return nil
}

// search gives the place in open of the first sample that has more than this room, or as much and a
// number of at least this.
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

// keep puts a piece into a node.
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

// close gives away the open sample at a place.
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

// closeAll gives away all open samples, the oldest first.
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
