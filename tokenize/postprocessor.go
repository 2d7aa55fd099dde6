package tokenize

import (
	"encoding/json"
	"fmt"
)

// A post-processor adds special tokens to the ids of a text. Its result for a single text is
// computed when the file is loaded: a list of ids, with a mark for the ids of the text.

// postItem is an id, or the ids of the text.
type postItem struct {
	id   uint32
	text bool
}

// postStep is the effect of one post-processor on the parts from the previous one. The initial part
// is the text. A part is a run of items.
type postStep func(parts [][]postItem) ([][]postItem, error)

// parsePostProcessor fills t.post, which is nil if no tokens are added. It also checks that the
// post-processor leaves the text unchanged if special tokens are not requested.
func (t *Tokenizer) parsePostProcessor(b json.RawMessage) error {
	const name = "post_processor"
	steps, err := stepsOf(b, name, "processors")
	if err != nil {
		return err
	}
	var with, without []postStep // with and without special tokens
	for _, s := range steps {
		if err := addPostSteps(s, &with, &without); err != nil {
			return err
		}
	}
	alone, err := runPost(without)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if len(alone) != 1 || !alone[0].text {
		return refuse(name, b)
	}
	if t.post, err = runPost(with); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if len(t.post) == 1 && t.post[0].text {
		t.post = nil
	}
	for _, item := range t.post {
		if !item.text && (int64(item.id) >= int64(len(t.tokens)) || t.tokens[item.id].end == 0) {
			return fmt.Errorf("%s: it adds id %d, which no token has", name, item.id)
		}
	}
	return nil
}

func runPost(steps []postStep) ([]postItem, error) {
	parts := [][]postItem{{{text: true}}}
	var err error
	for _, s := range steps {
		if parts, err = s(parts); err != nil {
			return nil, err
		}
	}
	var all []postItem
	for _, p := range parts {
		all = append(all, p...)
	}
	if len(all) > maxPostItems {
		return nil, fmt.Errorf("more than %d tokens are added", maxPostItems)
	}
	return all, nil
}

// maxPostItems bounds what a post-processor adds.
const maxPostItems = 1 << 12

// tokenAndID is ["[SEP]", 102].
type tokenAndID struct{ id uint32 }

func (t *tokenAndID) UnmarshalJSON(b []byte) error {
	var pair []json.RawMessage
	if err := json.Unmarshal(b, &pair); err != nil {
		return err
	}
	if len(pair) != 2 {
		return fmt.Errorf("%s is not a token and its id", b)
	}
	var token string
	if err := json.Unmarshal(pair[0], &token); err != nil {
		return err
	}
	return json.Unmarshal(pair[1], &t.id)
}

// addPostSteps appends the effect of a post-processor with special tokens and without.
func addPostSteps(s stepJSON, with, without *[]postStep) error {
	switch s.kind {
	case "ByteLevel": // changes only offsets
		return s.read(&byteLevelJSON{})
	case "BertProcessing", "RobertaProcessing":
		var f struct {
			Type           string      `json:"type"`
			Sep            *tokenAndID `json:"sep"`
			Cls            *tokenAndID `json:"cls"`
			TrimOffsets    *bool       `json:"trim_offsets"`
			AddPrefixSpace *bool       `json:"add_prefix_space"`
		}
		if err := s.read(&f); err != nil {
			return err
		}
		if f.Sep == nil || f.Cls == nil {
			return s.refuse()
		}
		// The library distinguishes the two by their fields.
		*with = append(*with, surround(f.Cls.id, f.Sep.id, f.TrimOffsets != nil && f.AddPrefixSpace != nil))
		return nil
	case "TemplateProcessing":
		var f templateJSON
		if err := s.read(&f); err != nil {
			return err
		}
		if err := f.check(); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		*with = append(*with, f.step(true))
		*without = append(*without, f.step(false))
		return nil
	}
	return s.refuse()
}

// surround implements BertProcessing and RobertaProcessing: [CLS] A [SEP], and B [SEP], or </s> B
// </s>, for every further part.
func surround(cls, sep uint32, both bool) postStep {
	return func(parts [][]postItem) ([][]postItem, error) {
		var out [][]postItem
		for i, p := range parts {
			var items []postItem
			switch {
			case i == 0:
				items = append(items, postItem{id: cls})
			case both:
				items = append(items, postItem{id: sep})
			}
			out = append(out, append(append(items, p...), postItem{id: sep}))
		}
		return out, nil
	}
}

// templateJSON is TemplateProcessing. Its template for pairs is not used.
type templateJSON struct {
	Type          string                       `json:"type"`
	Single        []templatePiece              `json:"single"`
	Pair          json.RawMessage              `json:"pair"`
	SpecialTokens map[string]*templateSpecials `json:"special_tokens"`
}

type templatePiece struct {
	Sequence     *templateName `json:"Sequence"`
	SpecialToken *templateName `json:"SpecialToken"`
}

type templateName struct {
	ID     string `json:"id"`
	TypeID uint32 `json:"type_id"`
}

// UnmarshalJSON ignores unknown fields.
func (t *templateName) UnmarshalJSON(b []byte) error {
	type plain templateName
	known, err := knownFields(b, t)
	if err != nil {
		return err
	}
	return json.Unmarshal(known, (*plain)(t))
}

type templateSpecials struct {
	ID     string   `json:"id"`
	IDs    []uint32 `json:"ids"`
	Tokens []string `json:"tokens"`
}

// UnmarshalJSON ignores unknown fields.
func (t *templateSpecials) UnmarshalJSON(b []byte) error {
	type plain templateSpecials
	known, err := knownFields(b, t)
	if err != nil {
		return err
	}
	return json.Unmarshal(known, (*plain)(t))
}

// check returns an error if step cannot process a piece.
func (t *templateJSON) check() error {
	for _, p := range t.Single {
		switch {
		case p.Sequence != nil && p.SpecialToken == nil:
			if p.Sequence.ID != "A" {
				return fmt.Errorf("the template for single texts has sequence %q; only A is possible", p.Sequence.ID)
			}
		case p.SpecialToken != nil && p.Sequence == nil:
			if t.SpecialTokens[p.SpecialToken.ID] == nil {
				return fmt.Errorf("the template has special token %q, which is not in special_tokens",
					p.SpecialToken.ID)
			}
		default:
			return fmt.Errorf("a piece of the template is neither a Sequence nor a SpecialToken")
		}
	}
	return nil
}

// step returns the effect of the template on a text. Without special tokens, it omits them.
func (t *templateJSON) step(special bool) postStep {
	return func(parts [][]postItem) ([][]postItem, error) {
		if len(parts) != 1 {
			return nil, fmt.Errorf("a TemplateProcessing after a post-processor that adds tokens is not supported")
		}
		var out [][]postItem
		for _, p := range t.Single {
			if p.Sequence != nil {
				out = append(out, parts[0])
				continue
			}
			if special {
				var items []postItem
				for _, id := range t.SpecialTokens[p.SpecialToken.ID].IDs {
					items = append(items, postItem{id: id})
				}
				out = append(out, items)
			}
		}
		return out, nil
	}
}

// appendPost applies the post-processor to dst[start:], the ids of a text.
func (t *Tokenizer) appendPost(dst []uint32, start int) []uint32 {
	if t.post == nil {
		return dst
	}
	// Move the ids of the text to their first position, then copy them to further positions.
	before := 0
	for before < len(t.post) && !t.post[before].text {
		before++
	}
	n := len(dst) - start
	for range before {
		dst = append(dst, 0)
	}
	copy(dst[start+before:], dst[start:start+n])
	for i := range before {
		dst[start+i] = t.post[i].id
	}
	if before == len(t.post) {
		return dst[:start+before]
	}
	for _, item := range t.post[before+1:] {
		if item.text {
			dst = append(dst, dst[start+before:start+before+n]...)
		} else {
			dst = append(dst, item.id)
		}
	}
	return dst
}
