// Package sugarme encodes with mula behind the interfaces of github.com/sugarme/tokenizer. The ids
// equal the ids of Hugging Face tokenizers for every tokenizer.json that mula loads.
//
// [New] returns a [Model]. [Model.Encode] and [Model.Decode] are enough for most programs.
// [Model.Tokenizer] returns sugarme's own Tokenizer, which can truncate and pad encodings.
//
// Three methods of sugarme's interfaces cannot return errors. [PostProcessor.Process] returns nil
// if special tokens are requested for a pair of texts, which mula does not support.
// [Decoder.Decode] and [Decoder.DecodeChain] return nothing if a token is unknown. In addition,
// sugarme's EncodeBatch ends the process at an error. Model's own methods return all errors.
package sugarme

import (
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/sugarme/tokenizer"

	"mula/tokenize"
)

// A Model is a tokenizer of mula as a [tokenizer.Model]. The texts of tokens are spelled as in
// [tokenize.Tokenizer.ID]: " the", not "Ġthe". A Model is immutable and safe for concurrent use.
type Model struct {
	t             *tokenize.Tokenizer
	encoders      sync.Pool // of *tokenize.Encoder
	tokens        []token   // by id
	ids           map[string]int
	before, after []uint32 // special tokens around a text
}

type token struct {
	text            string
	special, exists bool
}

// New returns the model of t. specials defines the ids of special tokens that occur in a text.
func New(t *tokenize.Tokenizer, specials tokenize.Specials) *Model {
	m := &Model{t: t, tokens: make([]token, t.VocabSize()), ids: make(map[string]int)}
	m.encoders.New = func() any { return t.NewEncoder(tokenize.EncodeOptions{Specials: specials}) }
	m.before, m.after = t.SpecialTokens()
	for id := range m.tokens {
		text, special, ok := t.Token(uint32(id))
		if !ok {
			continue
		}
		m.tokens[id] = token{text, special, true}
		if _, ok := m.ids[text]; !ok {
			m.ids[text] = id
		} else if first, ok := t.ID(text); ok { // the search is slow, and such tokens are rare
			m.ids[text] = int(first)
		}
	}
	return m
}

// encode returns the ids of a text without the special tokens around it.
func (m *Model) encode(text string) ([]uint32, error) {
	e := m.encoders.Get().(*tokenize.Encoder)
	defer m.encoders.Put(e)
	return e.Append(nil, []byte(text))
}

// offsets returns the byte range of each token in the text. ok is false if the text is not the
// concatenation of its tokens, for example because it was normalized.
func (m *Model) offsets(text string, ids []uint32) (offsets [][]int, ok bool) {
	offsets = make([][]int, len(ids))
	at := 0
	for i, id := range ids {
		token := m.tokens[id].text
		if !strings.HasPrefix(text[at:], token) {
			return nil, false
		}
		offsets[i] = []int{at, at + len(token)}
		at += len(token)
	}
	return offsets, at == len(text)
}

// Encode returns the encoding of a text. Offsets are byte ranges of the text, [0, 0] for special
// tokens around it. A token may start or end inside a character. Offsets is nil if the text is not
// the concatenation of its tokens, for example because it was normalized. Words is nil: mula does
// not number words. Encode fails if the text is not valid UTF-8, or cannot be tokenized.
func (m *Model) Encode(text string, addSpecialTokens bool) (*tokenizer.Encoding, error) {
	ids, err := m.encode(text)
	if err != nil {
		return nil, fmt.Errorf("sugarme: %w", err)
	}
	offsets, ok := m.offsets(text, ids)
	if !ok {
		offsets = nil
	}
	e := tokenizer.DefaultEncoding()
	e.Offsets = offsets
	for _, id := range ids {
		m.appendToken(e, id, 0)
	}
	if addSpecialTokens {
		e = m.surround(e)
	}
	return e, nil
}

// appendToken appends everything but the offsets.
func (m *Model) appendToken(e *tokenizer.Encoding, id uint32, special int) {
	e.Ids = append(e.Ids, int(id))
	e.TypeIds = append(e.TypeIds, 0)
	e.Tokens = append(e.Tokens, m.tokens[id].text)
	e.SpecialTokenMask = append(e.SpecialTokenMask, special)
	e.AttentionMask = append(e.AttentionMask, 1)
}

// surround returns the encoding of a text with the special tokens around it.
func (m *Model) surround(text *tokenizer.Encoding) *tokenizer.Encoding {
	if len(m.before)+len(m.after) == 0 {
		return text
	}
	hasOffsets := text.Offsets != nil
	before, after := tokenizer.DefaultEncoding(), tokenizer.DefaultEncoding()
	for _, side := range []struct {
		e   *tokenizer.Encoding
		ids []uint32
	}{{before, m.before}, {after, m.after}} {
		for _, id := range side.ids {
			m.appendToken(side.e, id, 1)
			if hasOffsets {
				side.e.Offsets = append(side.e.Offsets, []int{0, 0})
			}
			if text.Words != nil {
				side.e.Words = append(side.e.Words, -1)
			}
		}
	}
	out := tokenizer.DefaultEncoding()
	for _, e := range []*tokenizer.Encoding{before, text, after} {
		out.Ids = append(out.Ids, e.Ids...)
		out.TypeIds = append(out.TypeIds, e.TypeIds...)
		out.Tokens = append(out.Tokens, e.Tokens...)
		out.Offsets = append(out.Offsets, e.Offsets...)
		out.SpecialTokenMask = append(out.SpecialTokenMask, e.SpecialTokenMask...)
		out.AttentionMask = append(out.AttentionMask, e.AttentionMask...)
		out.Words = append(out.Words, e.Words...)
	}
	if !hasOffsets {
		out.Offsets = nil
	}
	for _, e := range text.Overflowing {
		out.Overflowing = append(out.Overflowing, *m.surround(&e))
	}
	return out
}

// Decode returns the text of the ids. Invalid UTF-8 becomes U+FFFD, as in Hugging Face tokenizers.
// If skipSpecialTokens is set, special tokens are skipped. An id without a token is an error.
func (m *Model) Decode(ids []int, skipSpecialTokens bool) (string, error) {
	kept := make([]uint32, 0, len(ids))
	for i, id := range ids {
		if _, ok := m.IdToToken(id); !ok {
			return "", fmt.Errorf("sugarme: id %d at index %d is not in the vocabulary of %d tokens", id, i,
				len(m.tokens))
		}
		if !skipSpecialTokens || !m.tokens[id].special {
			kept = append(kept, uint32(id))
		}
	}
	text, err := m.t.Decode(nil, kept)
	if err != nil {
		return "", fmt.Errorf("sugarme: %w", err)
	}
	return string(tokenize.AppendText(nil, text)), nil
}

// Tokenize returns the tokens of a text, without special tokens around it. It fails if the text is
// not the concatenation of its tokens, because sugarme's pipeline needs their offsets. Use
// [Model.Encode] for such a tokenizer.
func (m *Model) Tokenize(text string) ([]tokenizer.Token, error) {
	ids, err := m.encode(text)
	if err != nil {
		return nil, fmt.Errorf("sugarme: %w", err)
	}
	offsets, ok := m.offsets(text, ids)
	if !ok {
		return nil, fmt.Errorf("sugarme: %q is not the concatenation of its tokens, so they have no offsets; "+
			"use Model.Encode", excerpt(text))
	}
	tokens := make([]tokenizer.Token, len(ids))
	for i, id := range ids {
		tokens[i] = tokenizer.NewToken(int(id), m.tokens[id].text, offsets[i])
	}
	return tokens, nil
}

// excerpt returns the start of a text for a message.
func excerpt(text string) string {
	runes := 0
	for i := range text {
		if runes == 40 {
			return text[:i] + "…"
		}
		runes++
	}
	return text
}

// TokenToId returns the id of the token with this text.
func (m *Model) TokenToId(token string) (id int, ok bool) {
	id, ok = m.ids[token]
	return id, ok
}

// IdToToken returns the text of the token with this id.
func (m *Model) IdToToken(id int) (token string, ok bool) {
	if id < 0 || id >= len(m.tokens) {
		return "", false
	}
	return m.tokens[id].text, m.tokens[id].exists
}

// GetVocab returns a new map of all tokens, with the added ones, and their ids.
func (m *Model) GetVocab() map[string]int {
	vocab := make(map[string]int, len(m.ids))
	for token, id := range m.ids {
		vocab[token] = id
	}
	return vocab
}

// GetVocabSize returns the highest id plus one.
func (m *Model) GetVocabSize() int { return len(m.tokens) }

// Save fails: copy the tokenizer.json instead.
func (m *Model) Save(string, ...string) error {
	return errors.New("sugarme: mula does not write models; copy the tokenizer.json")
}

// Tokenizer returns sugarme's Tokenizer with the model, its [PostProcessor] and its [Decoder]. Do
// not add tokens, a normalizer or a pre-tokenizer to it: the model already applies the tokens and
// steps of the tokenizer.json.
func (m *Model) Tokenizer() *tokenizer.Tokenizer {
	t := tokenizer.NewTokenizer(m)
	t.WithPostProcessor(PostProcessor{m})
	t.WithDecoder(Decoder{m})
	return t
}

// A PostProcessor adds a model's special tokens. It is a [tokenizer.PostProcessor].
type PostProcessor struct{ model *Model }

// AddedTokens returns how many tokens Process adds to a text.
func (p PostProcessor) AddedTokens(bool) int { return len(p.model.before) + len(p.model.after) }

// Process returns the encoding with the special tokens around it. A pair without special tokens is
// concatenated. Process returns nil for a pair with special tokens: mula does not implement the
// template for pairs.
func (p PostProcessor) Process(encoding, pair *tokenizer.Encoding, addSpecialTokens bool) *tokenizer.Encoding {
	if !addSpecialTokens || p.AddedTokens(pair != nil) == 0 {
		return tokenizer.DefaultProcess(encoding, pair, addSpecialTokens)
	}
	if pair != nil {
		return nil
	}
	return p.model.surround(encoding)
}

// A Decoder turns the texts of tokens into a text, as [Model.Decode] does with ids. It is a
// [tokenizer.Decoder].
type Decoder struct{ model *Model }

// Decode returns the text of the tokens, or nothing if a token is unknown.
func (d Decoder) Decode(tokens []string) string {
	ids := make([]int, len(tokens))
	for i, token := range tokens {
		id, ok := d.model.TokenToId(token)
		if !ok {
			return ""
		}
		ids[i] = id
	}
	text, err := d.model.Decode(ids, false)
	if err != nil {
		return ""
	}
	return text
}

// DecodeChain returns the text of Decode as the only element, or nil if a token is unknown.
func (d Decoder) DecodeChain(tokens []string) []string {
	if text := d.Decode(tokens); text != "" {
		return []string{text}
	}
	return nil
}

var (
	_ tokenizer.Model         = (*Model)(nil)
	_ tokenizer.PostProcessor = PostProcessor{}
	_ tokenizer.Decoder       = Decoder{}
)
