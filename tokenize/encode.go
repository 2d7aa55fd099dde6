package tokenize

import (
	"fmt"
	"slices"
	"unicode/utf8"

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

// An Encoder turns texts into ids for one goroutine. It holds about 3 MB of buffers and cached
// words. Once they have grown to the size of the texts, it allocates nothing.
type Encoder struct {
	t          *Tokenizer
	asText     bool // special tokens are text
	normalizer *normalizer
	merger     merger
	cache      *wordCache
	around     bool             // special tokens are added to texts
	general    *pipelineEncoder // nil for a tokenizer with the fast path
	err        error            // of the current text; nothing is cached after an error
}

// NewEncoder returns an encoder.
func (t *Tokenizer) NewEncoder(opts EncodeOptions) *Encoder {
	e := &Encoder{t: t, asText: opts.Specials == SpecialsAsText, around: opts.AddSpecialTokens, cache: &wordCache{}}
	if t.normalize {
		e.normalizer = newNormalizer()
	}
	if t.general != nil {
		e.general, e.cache = newPipelineEncoder(t), nil
	}
	return e
}

// Append appends the ids of text to dst. It adds nothing at the start or the end of the text except
// the tokens of AddSpecialTokens. If the text is not valid UTF-8, or has a byte without a token in
// the vocabulary, Append fails and returns dst unchanged. It overwrites the memory of dst beyond
// its length.
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

// appendWords appends the ids of text without added tokens.
func (e *Encoder) appendWords(dst []uint32, s []byte, _ int) []uint32 {
	t := e.t
	for len(s) > 0 {
		n := t.scan(t.classes, s)
		w := s[:n]
		switch {
		case n <= narrowWord:
			key := narrowKeyOf(s, n)
			hash := key.hash()
			set := e.cache.narrowSet(hash)
			if known := set.find(key); known != nil {
				dst = known.appendTo(dst)
				break
			}
			at := len(dst)
			if id := t.words.get(key, hash); id != noToken {
				dst = append(dst, id)
			} else {
				dst = e.appendWord(dst, w)
			}
			if e.err == nil {
				set.remember(key, dst[at:])
			}
		case n <= wideWord:
			key := wideKeyOf(s, n)
			set := e.cache.wideSet(key.hash())
			if known := set.find(key); known != nil {
				dst = known.appendTo(dst)
				break
			}
			at := len(dst)
			if dst = e.appendWord(dst, w); e.err == nil {
				set.remember(key, dst[at:])
			}
		default:
			dst = e.appendWord(dst, w)
		}
		s = s[n:]
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
