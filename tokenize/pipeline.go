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
	chunks        *chunking
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
	cache       textCache
	chunks      *chunkEncoder // nil if the text cannot be divided into chunks
	first       bool          // the document starts with the last text of normalize
}

func newPipelineEncoder(t *Tokenizer) *pipelineEncoder {
	e := &pipelineEncoder{p: t.general, normalizing: newNormalizing(t.general), cache: newTextCache(12, 20)}
	if t.general.chunks != nil {
		e.chunks = &chunkEncoder{chunking: t.general.chunks, cache: newTextCache(15, 23)}
	}
	return e
}

// normalize returns the normalized text of a piece of a document, between added tokens that are
// matched before normalization. It is valid until the next call. first means that the document
// starts with the piece. If the text is divided into chunks, normalize returns it unchanged.
func (e *pipelineEncoder) normalize(s []byte, first bool) []byte {
	e.first = first
	if e.chunks != nil {
		return s
	}
	e.normalizeWhole(s, first)
	return e.normalizing.text
}

func (e *pipelineEncoder) normalizeWhole(s []byte, first bool) {
	origin := 0
	if first && e.p.usesOrigin {
		_, origin = utf8.DecodeRune(s)
	}
	e.normalizing.release()
	e.normalizing.run(e.p, s, origin)
}

// appendWords appends the ids of a part without added tokens, at the given position of the last
// text that normalize returned.
func (e *pipelineEncoder) appendWords(dst []uint32, s []byte, at int) ([]uint32, error) {
	if e.chunks != nil {
		return e.appendChunks(dst, s, e.first)
	}
	return e.appendNormalized(dst, s, e.normalizing.origin-at, false)
}

// appendWhole appends the ids of a piece of a document without dividing it into chunks.
func (e *pipelineEncoder) appendWhole(dst []uint32, s []byte, first bool) ([]uint32, error) {
	e.normalizeWhole(s, first)
	return e.appendNormalized(dst, e.normalizing.text, e.normalizing.origin, false)
}

// appendNormalized appends the ids of normalized text without added tokens. Its first origin bytes
// originate from the first character of the document. inside means that text is before it.
func (e *pipelineEncoder) appendNormalized(dst []uint32, s []byte, origin int, inside bool) ([]uint32, error) {
	if len(s) == 0 {
		return dst, nil
	}
	c := &e.cutting
	c.begin(s, origin, inside)
	for _, p := range e.p.preTokenizers {
		p.cut(c)
		c.finish()
	}
	var err error
	for _, p := range c.pieces {
		if dst, err = e.appendWord(dst, c.text[p.start:], p.end-p.start); err != nil {
			return dst, err
		}
	}
	c.release()
	return dst, nil
}

// appendWord appends the ids of the word s[:n], from the cache if possible.
func (e *pipelineEncoder) appendWord(dst []uint32, s []byte, n int) ([]uint32, error) {
	dst, known := e.cache.appendIDs(dst, s, n, 0)
	if known {
		return dst, nil
	}
	start := len(dst)
	dst, err := e.p.model.appendWord(&e.scratch, dst, s[:n])
	if err == nil {
		e.cache.remember(s, n, 0, dst[start:])
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
