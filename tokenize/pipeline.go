package tokenize

import (
	"fmt"
	"unicode/utf8"
)

// A pipeline is everything between added tokens and ids in any tokenizer.json: normalizers,
// pre-tokenizers and a model, in the order and with the semantics of Hugging Face tokenizers
// 0.23.3. It is immutable after loading and safe for concurrent use.
//
// A byte-level BPE with a single scanner does not need it: see [Encoder.Append].
type pipeline struct {
	normalizers   []normalizeStep
	preTokenizers []preTokenizeStep
	model         model
	forms         int  // number of normalizers that need a [normalizer]
	usesOrigin    bool // a step depends on which piece starts the document
}

// A model converts the words from the pre-tokenizers to ids.
type model interface {
	// appendWord appends the ids of a word, which is not empty. They depend only on the word.
	appendWord(z *modelScratch, dst []uint32, word []byte) ([]uint32, error)
}

// modelScratch is the memory that the models of one goroutine work in.
type modelScratch struct {
	merger merger
	ids    []uint32
	paths  []pathNode
	bytes  []byte
}

// pipelineEncoder runs a pipeline for one goroutine.
type pipelineEncoder struct {
	p           *pipeline
	normalizing *normalizing
	cutting     cutting
	scratch     modelScratch
	cache       pieceCache
}

func newPipelineEncoder(t *Tokenizer) *pipelineEncoder {
	return &pipelineEncoder{p: t.general, normalizing: newNormalizing(t.general)}
}

// normalize returns the normalized text of a piece of a document, between added tokens that are
// matched before normalization. It is valid until the next call. first means that the document
// starts with the piece.
func (e *pipelineEncoder) normalize(s []byte, first bool) []byte {
	origin := 0
	if first && e.p.usesOrigin {
		_, origin = utf8.DecodeRune(s)
	}
	e.normalizing.release()
	e.normalizing.run(e.p, s, origin)
	return e.normalizing.text
}

// appendWords appends the ids of a part without added tokens, at the given position of the last
// normalized text.
func (e *pipelineEncoder) appendWords(dst []uint32, s []byte, at int) ([]uint32, error) {
	if len(s) == 0 {
		return dst, nil
	}
	c := &e.cutting
	c.begin(s, e.normalizing.origin-at)
	for _, p := range e.p.preTokenizers {
		p.cut(c)
		c.finish()
	}
	var err error
	for _, p := range c.pieces {
		if dst, err = e.appendWord(dst, c.text[p.start:p.end]); err != nil {
			return dst, err
		}
	}
	c.release()
	return dst, nil
}

// appendWord appends the ids of a word, from the cache if possible.
func (e *pipelineEncoder) appendWord(dst []uint32, word []byte) ([]uint32, error) {
	if len(word) > cachedPiece {
		return e.p.model.appendWord(&e.scratch, dst, word)
	}
	entry := e.cache.entry(word)
	if entry.holds(word) {
		return append(dst, entry.ids[:entry.k]...), nil
	}
	start := len(dst)
	dst, err := e.p.model.appendWord(&e.scratch, dst, word)
	if err == nil {
		entry.set(word, dst[start:])
	}
	return dst, err
}

// keptScratch is the maximum scratch memory, in bytes (of text) or pieces, that is kept for the
// next document.
const keptScratch = 8 << 20

// cannotSpell is the error for a text that the vocabulary cannot represent, where the library would
// drop characters or fail.
func cannotSpell(what string, word []byte) error {
	return fmt.Errorf("%s in %q has no token in the vocabulary, and there is no unknown token: the tokenizer cannot "+
		"spell this text", what, clipped(word))
}

// clipped returns the start of a word for a message.
func clipped(word []byte) []byte {
	if len(word) <= 60 {
		return word
	}
	n := 60
	for !utf8.RuneStart(word[n]) {
		n--
	}
	return word[:n]
}

// pieceCache caches the ids of words. It is direct-mapped: a word replaces another.
type pieceCache [1 << 13]pieceEntry

const cachedPiece = 32 // bytes of the longest cached word

type pieceEntry struct {
	n, k uint8 // bytes and ids; n 0 is an empty entry
	word [cachedPiece]byte
	ids  [14]uint32
}

func (c *pieceCache) entry(word []byte) *pieceEntry {
	h := uint64(len(word))
	for _, b := range word {
		h = (h ^ uint64(b)) * 0x9e3779b97f4a7c15
	}
	return &c[h>>(64-13)]
}

func (e *pieceEntry) holds(word []byte) bool {
	return int(e.n) == len(word) && string(e.word[:e.n]) == string(word)
}

func (e *pieceEntry) set(word []byte, ids []uint32) {
	if len(ids) > len(e.ids) {
		return
	}
	e.n, e.k = uint8(len(word)), uint8(len(ids))
	copy(e.word[:], word)
	copy(e.ids[:], ids)
}
