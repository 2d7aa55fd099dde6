package tokenize

import (
	"fmt"
	"unicode/utf8"

	"mula/tokenize/documents"
)

// Specials says what becomes of a special token such as "<|endoftext|>" that stands literally in a text.
type Specials uint8

const (
	// SpecialsAsText tokenizes it like any other text, so that a document cannot forge the end of a document. Added tokens
	// that are not special are still matched. This is what Hugging Face tokenizers does with encode_special_tokens set.
	SpecialsAsText Specials = iota
	// SpecialsAsTokens gives the special id. This is what Hugging Face tokenizers does by default.
	SpecialsAsTokens
)

// String is the name that manifests use: "text" or "tokens".
func (s Specials) String() string {
	if s == SpecialsAsTokens {
		return "tokens"
	}
	return "text"
}

// EncodeOptions are the choices of a user that change ids.
type EncodeOptions struct {
	Specials Specials
}

// An Encoder turns texts into ids for one goroutine. It holds about 2 MB of scratch and remembered words, and allocates
// nothing once that has grown to the texts.
type Encoder struct {
	t          *Tokenizer
	asText     bool // special tokens are text
	normalizer *normalizer
	merger     merger
	cache      *wordCache
	err        error // of the text at hand; nothing is remembered once there is one
}

// NewEncoder returns an encoder.
func (t *Tokenizer) NewEncoder(opts EncodeOptions) *Encoder {
	e := &Encoder{t: t, asText: opts.Specials == SpecialsAsText, cache: &wordCache{}}
	if t.normalize {
		e.normalizer = newNormalizer()
	}
	return e
}

// Append appends the ids of text to dst. Nothing is added at the start or the end of the text. It is an error, and dst is
// returned as it was, if the text is not valid UTF-8 or has a byte that the vocabulary has no token for.
func (e *Encoder) Append(dst []uint32, text []byte) ([]uint32, error) {
	if !utf8.Valid(text) {
		return dst, fmt.Errorf("invalid UTF-8 at byte %d", documents.InvalidUTF8(text))
	}
	start := len(dst)
	e.err = nil
	dst = e.split(dst, text, e.t.raw, e.appendPiece)
	if e.err != nil {
		return dst[:start], e.err
	}
	return dst, nil
}

// split appends the ids of s, cut at the tokens in added, with between for what lies between them. A special token that
// is to be text is passed over as a whole: no other token is found inside.
func (e *Encoder) split(dst []uint32, s []byte, added *trie, between func([]uint32, []byte) []uint32) []uint32 {
	if added == nil {
		return between(dst, s)
	}
	done := 0
	for from := 0; ; {
		start, end, token := added.find(s, from)
		if end == 0 {
			return between(dst, s[done:])
		}
		from = end
		if token.special && e.asText {
			continue
		}
		dst = append(between(dst, s[done:start]), token.id)
		done = end
	}
}

// appendPiece appends the ids of a piece between added tokens that are matched before normalization.
func (e *Encoder) appendPiece(dst []uint32, s []byte) []uint32 {
	if e.normalizer != nil {
		s = e.normalizer.nfc(s)
	}
	return e.split(dst, s, e.t.composed, e.appendWords)
}

// appendWords appends the ids of text without added tokens.
func (e *Encoder) appendWords(dst []uint32, s []byte) []uint32 {
	t := e.t
	for len(s) > 0 {
		n := t.scan(t.classes, s)
		switch {
		case n <= inlineWord:
			key := keyOf(s, n)
			hash := key.hash(n)
			entry := e.cache.shortEntry(hash)
			if entry.holds(key, n) {
				dst = append(dst, entry.ids[:entry.k]...)
				break
			}
			at := len(dst)
			if id, ok := t.words.get(key, n, hash); ok {
				dst = append(dst, id)
			} else {
				dst = e.appendMerged(dst, s[:n])
			}
			if e.err == nil {
				entry.set(key, n, dst[at:])
			}
		case n <= cachedWord:
			hash := hashLong(s[:n])
			entry := e.cache.longEntry(hash)
			if entry.holds(hash, s[:n]) {
				dst = append(dst, entry.ids[:entry.k]...)
				break
			}
			at := len(dst)
			dst = e.appendMerged(dst, s[:n])
			if e.err == nil {
				entry.set(hash, s[:n], dst[at:])
			}
		default:
			dst = e.appendMerged(dst, s[:n])
		}
		s = s[n:]
	}
	return dst
}

// appendMerged appends the ids of a word by merging its bytes. It sets e.err if it cannot.
func (e *Encoder) appendMerged(dst []uint32, w []byte) []uint32 {
	dst, ok := e.merger.merge(e.t, dst, w)
	if !ok && e.err == nil {
		for _, c := range w {
			if e.t.bytes[c] == noToken {
				e.err = fmt.Errorf("byte 0x%02x of %q has no token in the vocabulary: the tokenizer cannot spell this text", c, w[:min(len(w), 60)])
				break
			}
		}
	}
	return dst
}
