package tokenize

import (
	"encoding/binary"
	"fmt"
	"slices"
	"unsafe"

	"mula/tokenize/documents"
)

// Specials defines how the encoder treats a special token such as "<|endoftext|>" that occurs
// literally in a text.
type Specials uint8

const (
	// SpecialsAsText tokenizes the token's text like any other text, so that a document cannot
	// forge the end of a document. Added tokens that are not special are still matched. Hugging
	// Face tokenizers does this if encode_special_tokens is set.
	SpecialsAsText Specials = iota
	// SpecialsAsTokens produces the special id. Hugging Face tokenizers does this by default.
	SpecialsAsTokens
)

// String returns the name that manifests use: "text" or "tokens".
func (s Specials) String() string {
	if s == SpecialsAsTokens {
		return "tokens"
	}
	return "text"
}

// EncodeOptions are a user's options that change ids.
type EncodeOptions struct {
	Specials Specials
	// AddSpecialTokens adds to every text the tokens of the tokenizer.json's post_processor, such
	// as <s> or [CLS] and [SEP]. Hugging Face tokenizers calls this option add_special_tokens and
	// sets it by default.
	AddSpecialTokens bool
}

// An Encoder turns texts into ids for one goroutine. For a byte-level BPE it holds 28 MB of cached
// words, whatever the texts and the size of the vocabulary; for another model, up to 20 MB. Once
// its buffers have grown to the size of the texts, it allocates nothing.
type Encoder struct {
	t          *Tokenizer
	asText     bool // special tokens are text
	normalizer *normalizer
	merger     merger
	around     bool             // special tokens are added to texts
	general    *pipelineEncoder // nil for a tokenizer with the fast path; then the following are unused
	cut        *cutter
	cache      *wordCache
	lookups    [2]lookup
	missed     bool  // the last view had a word that was not in the cache
	err        error // of the current text; nothing is cached after an error
}

// NewEncoder returns an encoder.
func (t *Tokenizer) NewEncoder(opts EncodeOptions) *Encoder {
	e := &Encoder{t: t, asText: opts.Specials == SpecialsAsText, around: opts.AddSpecialTokens}
	if t.general != nil {
		e.general = newPipelineEncoder(t)
		return e
	}
	if t.normalize {
		e.normalizer = newNormalizer()
	}
	e.cut, e.cache = newCutter(t.classes, t.split), newWordCache(t.VocabSize())
	for i := range e.lookups {
		e.lookups[i].sets, e.lookups[i].packing = &e.cache.narrow[0], e.cache.packing
	}
	return e
}

// Append appends the ids of text to dst. It adds nothing at the start or the end of the text except
// the tokens of AddSpecialTokens. If the text is not valid UTF-8, or has a byte without a token in
// the vocabulary, Append fails and returns dst unchanged. It overwrites the memory of dst beyond
// its length.
func (e *Encoder) Append(dst []uint32, text []byte) ([]uint32, error) {
	if !validUTF8(text) {
		return dst, fmt.Errorf("invalid UTF-8 at byte %d", documents.InvalidUTF8(text))
	}
	start := len(dst)
	e.err = nil
	dst = e.split(dst, text, e.t.raw, e.appendPiece)
	if e.err != nil {
		return dst[:start], e.err
	}
	if e.around {
		dst = e.t.appendPost(dst, start)
	}
	return dst, nil
}

// split appends the ids of s, cut at the tokens in added. It calls between for the ranges between
// them, with their position in s. A special token that is text is skipped as a whole: no other
// token is matched inside.
func (e *Encoder) split(dst []uint32, s []byte, added *trie, between func(dst []uint32, s []byte,
	at int) []uint32) []uint32 {
	if added == nil {
		return between(dst, s, 0)
	}
	done := 0
	var run blankRun
	for from := 0; ; {
		start, end, token := added.find(s, from)
		if end == 0 {
			return between(dst, s[done:], done)
		}
		from = end
		if token.special && e.asText {
			continue
		}
		if token.trims() {
			var ok bool
			if start, end, ok = token.trim(s, start, end, done, &run); !ok {
				continue
			}
		}
		if start > done {
			dst = between(dst, s[done:start], done)
		}
		if start < end { // otherwise the previous token covers everything
			dst = append(dst, token.id)
		}
		done = end
	}
}

// appendPiece appends the ids of a piece between added tokens that are matched before
// normalization.
func (e *Encoder) appendPiece(dst []uint32, s []byte, at int) []uint32 {
	if e.general != nil {
		return e.split(dst, e.general.normalize(s, at == 0), e.t.composed, e.appendGeneral)
	}
	if e.normalizer != nil {
		s = e.normalizer.normalize(nfc, s)
	}
	return e.split(dst, s, e.t.composed, e.appendWords)
}

// appendGeneral is appendWords with a pipeline. s starts at byte at of the normalized text.
func (e *Encoder) appendGeneral(dst []uint32, s []byte, at int) []uint32 {
	dst, err := e.general.appendWords(dst, s, at)
	if e.err == nil {
		e.err = err
	}
	return dst
}

// appendWords appends the ids of text without added tokens. Looking up the words of a view starts
// one view ahead, so that the cache's entries are there when they are read.
func (e *Encoder) appendWords(dst []uint32, s []byte, _ int) []uint32 {
	next, last := &e.lookups[0], &e.lookups[1]
	last.count, last.word = 0, nil
	c := e.cut
	for c.begin(s); c.more(); {
		if c.mustFill() { // this overwrites the text of the last view
			dst = e.finish(dst, last)
		}
		at, ends, word := c.next()
		e.start(next, at, ends, word)
		dst = e.finish(dst, last)
		next, last = last, next
	}
	return e.finish(dst, last)
}

// start starts looking up the words of a view: the first starts at byte at of the masked text, and
// each ends where the next starts. ends are relative to at. Another word follows them, which may be
// empty.
func (e *Encoder) start(l *lookup, at int, ends uint64, word []byte) {
	l.word, l.next, l.count, l.ends = word, 0, 0, ends
	if ends == 0 {
		return
	}
	l.text = &e.cut.masked.text[at]
	hashWords(l)
	if !l.hasWide() {
		return
	}
	text := e.cut.masked.text[at : at+maskedBytes]
	for i := range l.words[:l.count] {
		if w := &l.words[i]; w.length() > narrowWord {
			w.hash = hashWide(text[w.end-w.length() : w.end])
			prefetch(unsafe.Pointer(&e.cache.wide[w.hash>>(64-wideBits)]))
		}
	}
}

// finish appends the ids of the words of l, and empties it.
func (e *Encoder) finish(dst []uint32, l *lookup) []uint32 {
	if e.missed || l.hasWide() {
		e.prefetchMore(l, e.missed)
		e.missed, l.lengths = false, 0
	}
	// Every token has one byte or more. An entry may write more ids than the word has.
	dst = slices.Grow(dst, maskedBytes+narrowIDs)
	for l.next < l.count {
		l.ids, l.n = &dst[:1][0], len(dst)
		addKnown(l)
		dst = dst[:l.n]
		if l.next == l.count {
			break
		}
		w := &l.words[l.next&(maskedBytes-1)]
		if n := w.length(); n > narrowWord {
			text := unsafe.Slice(l.text, maskedBytes)
			dst = e.appendWide(dst, text[w.end-n:w.end], w.hash)
		} else {
			dst = e.appendNarrow(dst, w.key, w.hash)
		}
		l.next++
	}
	l.count = 0
	if len(l.word) > 0 {
		dst = e.appendCached(dst, l.word)
		l.word = nil
	}
	return dst
}

// prefetchMore prefetches the entries that are read for words whose sets have been prefetched: the
// record of a wide word, and for a word that is not in its first set, the second and the entry of
// e.t.words.
func (e *Encoder) prefetchMore(l *lookup, narrow bool) {
	for i := range l.words[:l.count] {
		w := &l.words[i]
		if w.length() > narrowWord {
			e.cache.prefetchWide(w.hash)
			continue
		}
		if !narrow {
			continue
		}
		if sets := e.cache.sets(w.hash); sets[0][0].key != w.key && sets[0][1].key != w.key {
			prefetch(unsafe.Pointer(sets[1]))
			prefetch(unsafe.Pointer(e.t.words.first(w.hash)))
		}
	}
}

// appendCached appends the ids of a word, from the cache if possible.
func (e *Encoder) appendCached(dst []uint32, w []byte) []uint32 {
	if len(w) > narrowWord {
		if len(w) > cachedWord {
			return e.appendWord(dst, w)
		}
		return e.appendWide(dst, w, hashWide(w))
	}
	key := narrowKeyOf(w, len(w))
	return e.appendNarrow(dst, key, key.hash())
}

// appendNarrow is appendCached for a word of at most narrowWord bytes.
func (e *Encoder) appendNarrow(dst []uint32, key narrowKey, hash uint64) []uint32 {
	if with, ok := e.cache.appendNarrow(dst, key, hash); ok {
		return with
	}
	e.missed = true
	start := len(dst)
	if id := e.t.words.get(key, hash); id != noToken {
		dst = append(dst, id)
	} else {
		var w [16]byte
		binary.LittleEndian.PutUint64(w[:], key[0])
		binary.LittleEndian.PutUint64(w[8:], key[1])
		dst = e.appendWord(dst, w[:w[15]])
	}
	if e.err == nil {
		e.cache.addNarrow(key, hash, dst[start:])
	}
	return dst
}

// appendWide is appendCached for a word of more than narrowWord bytes.
func (e *Encoder) appendWide(dst []uint32, w []byte, hash uint64) []uint32 {
	if ids := e.cache.findWide(w, hash); ids != nil {
		return append(dst, ids...)
	}
	start := len(dst)
	if dst = e.appendWord(dst, w); e.err == nil {
		e.cache.addWide(w, hash, dst[start:])
	}
	return dst
}

// appendWord appends the ids of a word from the vocabulary and the merges. On failure it sets
// e.err.
func (e *Encoder) appendWord(dst []uint32, w []byte) []uint32 {
	t := e.t
	if t.ignoreMerges {
		if id, ok := t.tree.whole(w); ok {
			return append(dst, id)
		}
	}
	var ok bool
	if t.greedy != nil {
		dst, ok = e.merger.greedy(t.greedy, dst, w)
	} else {
		dst, ok = e.merger.merge(t, dst, w)
	}
	if !ok && e.err == nil {
		// A word cannot be spelled only if a byte has no token.
		i := max(0, slices.IndexFunc(w, func(c byte) bool { return t.bytes[c] == noToken }))
		e.err = cannotSpell(fmt.Sprintf("byte 0x%02x", w[i]), w)
	}
	return dst
}
