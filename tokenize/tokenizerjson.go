package tokenize

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"mula/internal/strictjson"
)

// The shape of tokenizer.json, as Hugging Face tokenizers 0.23 writes it. Unknown fields are refused: they could mean
// anything. Fields that have to hold one value are kept raw, so that an error can show what the file says.

type fileJSON struct {
	Version       string          `json:"version"`
	Truncation    json.RawMessage `json:"truncation"`
	Padding       json.RawMessage `json:"padding"`
	AddedTokens   []addedJSON     `json:"added_tokens"`
	Normalizer    json.RawMessage `json:"normalizer"`
	PreTokenizer  json.RawMessage `json:"pre_tokenizer"`
	PostProcessor json.RawMessage `json:"post_processor"`
	Decoder       json.RawMessage `json:"decoder"`
	Model         *modelJSON      `json:"model"`
}

type addedJSON struct {
	ID         uint32 `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized bool   `json:"normalized"`
	Special    bool   `json:"special"`
}

type modelJSON struct {
	Type                    string            `json:"type"`
	Dropout                 json.RawMessage   `json:"dropout"`
	UnkToken                json.RawMessage   `json:"unk_token"`
	ContinuingSubwordPrefix json.RawMessage   `json:"continuing_subword_prefix"`
	EndOfWordSuffix         json.RawMessage   `json:"end_of_word_suffix"`
	FuseUnk                 json.RawMessage   `json:"fuse_unk"`
	ByteFallback            json.RawMessage   `json:"byte_fallback"`
	IgnoreMerges            json.RawMessage   `json:"ignore_merges"`
	Vocab                   map[string]uint32 `json:"vocab"`
	Merges                  []mergeJSON       `json:"merges"`
}

// mergeJSON is one merge: "a b" in old files, ["a", "b"] in new ones.
type mergeJSON struct {
	left, right string
	comment     bool // "#version: 0.2", which old files carry along from merges.txt and the library skips
}

func (m *mergeJSON) UnmarshalJSON(b []byte) error {
	if b[0] == '[' {
		var pair []string
		if err := json.Unmarshal(b, &pair); err != nil {
			return err
		}
		if len(pair) != 2 {
			return fmt.Errorf("model.merges: %s has not two parts", b)
		}
		m.left, m.right = pair[0], pair[1]
		return nil
	}
	var s string
	if err := json.Unmarshal(b, &s); err != nil {
		return err
	}
	if strings.HasPrefix(s, "#version") {
		m.comment = true
		return nil
	}
	var ok bool
	m.left, m.right, ok = strings.Cut(s, " ")
	if !ok || strings.Contains(m.right, " ") {
		return fmt.Errorf("model.merges: %q has not two parts with one space between them", s)
	}
	return nil
}

// stepJSON is a normalizer, pre-tokenizer, post-processor or decoder.
type stepJSON struct {
	Type           string            `json:"type"`
	Normalizers    []json.RawMessage `json:"normalizers"`
	Pretokenizers  []json.RawMessage `json:"pretokenizers"`
	AddPrefixSpace *bool             `json:"add_prefix_space"`
	TrimOffsets    *bool             `json:"trim_offsets"`
	UseRegex       *bool             `json:"use_regex"`
	Pattern        *struct {
		Regex  *string `json:"Regex"`
		String *string `json:"String"`
	} `json:"pattern"`
	Behavior string `json:"behavior"`
	Invert   bool   `json:"invert"`
}

func parse(b []byte) (*Tokenizer, error) {
	var file fileJSON
	if err := strictjson.Decode(b, &file); err != nil {
		return nil, err
	}
	if file.Version != "1.0" {
		return nil, fmt.Errorf("version is %q: only \"1.0\" is known; is this a tokenizer.json of Hugging Face tokenizers?", file.Version)
	}
	m := file.Model
	if m == nil {
		return nil, errors.New("there is no model")
	}
	if m.Type != "" && m.Type != "BPE" {
		return nil, fmt.Errorf("model.type is %q: only byte-level BPE is supported", m.Type)
	}
	for _, f := range []struct {
		name    string
		value   json.RawMessage
		allowed string
	}{
		{"truncation", file.Truncation, "null"},
		{"padding", file.Padding, "null"},
		{"model.dropout", m.Dropout, "null"},
		{"model.unk_token", m.UnkToken, "null"},
		{"model.continuing_subword_prefix", m.ContinuingSubwordPrefix, `null ""`},
		{"model.end_of_word_suffix", m.EndOfWordSuffix, `null ""`},
		{"model.fuse_unk", m.FuseUnk, "null false"},
		{"model.byte_fallback", m.ByteFallback, "null false"},
		{"model.ignore_merges", m.IgnoreMerges, "null false"},
	} {
		if err := allow(f.name, f.value, f.allowed); err != nil {
			return nil, err
		}
	}
	t := &Tokenizer{classes: pinnedClasses()}
	var err error
	if t.normalize, err = parseNormalizer(file.Normalizer); err != nil {
		return nil, err
	}
	pattern, err := parsePreTokenizer(file.PreTokenizer)
	if err != nil {
		return nil, err
	}
	t.scan = pattern.scanner()
	if err := checkPostProcessor(file.PostProcessor); err != nil {
		return nil, err
	}
	if err := checkDecoder(file.Decoder); err != nil {
		return nil, err
	}
	if err := t.addVocabulary(m.Vocab, file.AddedTokens); err != nil {
		return nil, err
	}
	if err := t.addMerges(m.Vocab, m.Merges); err != nil {
		return nil, err
	}
	if err := t.addTokens(m.Vocab, file.AddedTokens); err != nil {
		return nil, err
	}
	t.fillWords(len(m.Vocab))
	return t, nil
}

// allow refuses a value that is present and not among the allowed ones, which are separated by spaces.
func allow(name string, value json.RawMessage, allowed string) error {
	if len(value) == 0 {
		return nil
	}
	for v := range strings.FieldsSeq(allowed) {
		if string(value) == v {
			return nil
		}
	}
	return refuse(name, value)
}

func refuse(name string, value json.RawMessage) error {
	var b bytes.Buffer
	if json.Compact(&b, value) != nil {
		b.Write(value)
	}
	s := b.String()
	if len(s) > 200 {
		s = strings.ToValidUTF8(s[:200], "") + "…"
	}
	return fmt.Errorf("%s is %s: not supported, because ids would differ from those of Hugging Face tokenizers", name, s)
}

func isNull(b json.RawMessage) bool { return len(b) == 0 || string(b) == "null" }

func parseStep(b json.RawMessage, name string) (*stepJSON, error) {
	s := &stepJSON{}
	if err := strictjson.Decode(b, s); err != nil {
		return nil, fmt.Errorf("%w (%w)", refuse(name, b), err)
	}
	return s, nil
}

// parseNormalizer reports whether the normalizer is NFC.
func parseNormalizer(b json.RawMessage) (bool, error) {
	const name = "normalizer"
	if isNull(b) {
		return false, nil
	}
	s, err := parseStep(b, name)
	if err != nil {
		return false, err
	}
	switch s.Type {
	case "NFC":
		return true, nil
	case "Sequence":
		normalize := false
		for i, n := range s.Normalizers {
			inner := fmt.Sprintf("%s.normalizers[%d]", name, i)
			step, err := parseStep(n, inner)
			if err != nil {
				return false, err
			}
			if step.Type != "NFC" {
				return false, refuse(inner, n)
			}
			normalize = true
		}
		return normalize, nil
	}
	return false, refuse(name, b)
}

// parsePreTokenizer knows two shapes: ByteLevel with its own pattern, and a Split by a known pattern followed by
// ByteLevel without one.
func parsePreTokenizer(b json.RawMessage) (Pattern, error) {
	const name = "pre_tokenizer"
	if isNull(b) {
		return 0, errors.New("pre_tokenizer is null: only byte-level pre-tokenizers are supported")
	}
	s, err := parseStep(b, name)
	if err != nil {
		return 0, err
	}
	if s.Type == "Sequence" && len(s.Pretokenizers) == 1 {
		b = s.Pretokenizers[0]
		if s, err = parseStep(b, name+".pretokenizers[0]"); err != nil {
			return 0, err
		}
	}
	if s.Type == "ByteLevel" {
		return GPT2, checkByteLevel(s, b, name, true)
	}
	if s.Type != "Sequence" || len(s.Pretokenizers) != 2 {
		return 0, refuse(name, b)
	}
	split, err := parseStep(s.Pretokenizers[0], name+".pretokenizers[0]")
	if err != nil {
		return 0, err
	}
	level, err := parseStep(s.Pretokenizers[1], name+".pretokenizers[1]")
	if err != nil {
		return 0, err
	}
	// The patterns match everything, so that keeping the matches (Removed, inverted) and cutting at them (Isolated) are one.
	kept := split.Behavior == "Removed" && split.Invert || split.Behavior == "Isolated"
	if split.Type != "Split" || !kept || split.Pattern == nil || split.Pattern.Regex == nil {
		return 0, refuse(name+".pretokenizers[0]", s.Pretokenizers[0])
	}
	if level.Type != "ByteLevel" {
		return 0, refuse(name+".pretokenizers[1]", s.Pretokenizers[1])
	}
	if err := checkByteLevel(level, s.Pretokenizers[1], name+".pretokenizers[1]", false); err != nil {
		return 0, err
	}
	switch *split.Pattern.Regex {
	case gpt2Regex:
		return GPT2, nil
	case cl100kRegex:
		return CL100K, nil
	}
	return 0, fmt.Errorf("pre_tokenizer.pretokenizers[0].pattern.Regex is not one of the supported patterns (GPT-2's and cl100k's): %s", *split.Pattern.Regex)
}

// checkByteLevel refuses a ByteLevel pre-tokenizer that adds a space in front, or whose own pattern is not used as wanted.
func checkByteLevel(s *stepJSON, b json.RawMessage, name string, useRegex bool) error {
	if s.AddPrefixSpace == nil || *s.AddPrefixSpace {
		return refuse(name+" with add_prefix_space", b)
	}
	if (s.UseRegex == nil || *s.UseRegex) != useRegex {
		return refuse(name+" with this use_regex", b)
	}
	return nil
}

// checkPostProcessor accepts what leaves ids alone: ByteLevel, which moves offsets only, templates of the text alone, and
// sequences of these.
func checkPostProcessor(b json.RawMessage) error {
	const name = "post_processor"
	if isNull(b) {
		return nil
	}
	var sequence struct {
		Type       string            `json:"type"`
		Processors []json.RawMessage `json:"processors"`
	}
	if err := json.Unmarshal(b, &sequence); err != nil || sequence.Type != "Sequence" {
		return checkProcessor(b, name)
	}
	for i, p := range sequence.Processors {
		if err := checkProcessor(p, fmt.Sprintf("%s.processors[%d]", name, i)); err != nil {
			return err
		}
	}
	return nil
}

func checkProcessor(b json.RawMessage, name string) error {
	var p struct {
		Type   string `json:"type"`
		Single []struct {
			Sequence *struct {
				ID string `json:"id"`
			} `json:"Sequence"`
		} `json:"single"`
	}
	if err := json.Unmarshal(b, &p); err != nil {
		return refuse(name, b)
	}
	onlyText := len(p.Single) == 1 && p.Single[0].Sequence != nil && p.Single[0].Sequence.ID == "A"
	if p.Type == "ByteLevel" || p.Type == "TemplateProcessing" && onlyText {
		return nil
	}
	return refuse(name, b)
}

// checkDecoder accepts ByteLevel, which is what [Tokenizer.Decode] does, and no decoder.
func checkDecoder(b json.RawMessage) error {
	if isNull(b) {
		return nil
	}
	s, err := parseStep(b, "decoder")
	if err != nil {
		return err
	}
	if s.Type != "ByteLevel" {
		return refuse("decoder", b)
	}
	return nil
}

// addVocabulary fills tokens, text and bytes.
func (t *Tokenizer) addVocabulary(vocab map[string]uint32, added []addedJSON) error {
	size := 0
	for token, id := range vocab {
		if id >= maxVocabulary {
			return fmt.Errorf("model.vocab: %q has id %d: ids from %d on are not supported", token, id, maxVocabulary)
		}
		size = max(size, int(id)+1)
	}
	for _, a := range added {
		if a.ID >= maxVocabulary {
			return fmt.Errorf("added_tokens: %q has id %d: ids from %d on are not supported", a.Content, a.ID, maxVocabulary)
		}
		size = max(size, int(a.ID)+1)
	}
	t.tokens = make([]span, size)
	t.text = []byte{0} // so that no span ends at 0
	for token, id := range vocab {
		if t.tokens[id].end != 0 {
			return fmt.Errorf("model.vocab: two tokens have id %d; one is %q", id, token)
		}
		start := len(t.text)
		text, ok := unspell(t.text, token)
		if !ok {
			text = append(t.text, token...) // not made of bytes: an added token that is listed here too
		}
		t.text = text
		t.tokens[id] = span{uint32(start), uint32(len(t.text))}
	}
	for c := range t.bytes {
		id, ok := vocab[string(byteRunes[c])]
		if !ok {
			id = noToken
		}
		t.bytes[c] = id
	}
	return nil
}

func (t *Tokenizer) addMerges(vocab map[string]uint32, merges []mergeJSON) error {
	t.pairs = newPairTable(len(merges))
	rank := uint32(0)
	var joined []byte
	for i, m := range merges {
		if m.comment {
			continue
		}
		left, ok1 := vocab[m.left]
		right, ok2 := vocab[m.right]
		joined = append(append(joined[:0], m.left...), m.right...)
		id, ok3 := vocab[string(joined)]
		if !ok1 || !ok2 || !ok3 {
			return fmt.Errorf("model.merges[%d]: %q and %q: a part or the whole is not in model.vocab", i, m.left, m.right)
		}
		t.pairs.put(left, right, merge{rank, id})
		rank++
	}
	return nil
}

// addTokens fills raw, composed and added. The library numbers added tokens that are not in the vocabulary by itself,
// whatever the file says, so a file that says otherwise is refused.
func (t *Tokenizer) addTokens(vocab map[string]uint32, added []addedJSON) error {
	raw, composed := &trie{}, &trie{}
	seen := map[string]bool{}
	next := uint32(len(vocab))
	var z *normalizer
	if t.normalize {
		z = newNormalizer()
	}
	for _, a := range added {
		switch {
		case a.Content == "":
			return fmt.Errorf("added_tokens: id %d has no content", a.ID)
		case seen[a.Content]:
			return fmt.Errorf("added_tokens: %q is listed twice", a.Content)
		case a.SingleWord:
			return fmt.Errorf("added_tokens: %q has single_word true: not supported", a.Content)
		case a.LStrip:
			return fmt.Errorf("added_tokens: %q has lstrip true: not supported", a.Content)
		case a.RStrip:
			return fmt.Errorf("added_tokens: %q has rstrip true: not supported", a.Content)
		}
		seen[a.Content] = true
		id, ok := vocab[a.Content]
		if !ok {
			id = next
			next++
		}
		if id != a.ID {
			return fmt.Errorf("added_tokens: %q has id %d here, but Hugging Face tokenizers would give it %d: correct the file", a.Content, a.ID, id)
		}
		if text, spelt := unspell(nil, a.Content); ok && spelt && string(text) != a.Content && t.mergesTo(id) {
			return fmt.Errorf("added_tokens: %q is in model.vocab and stands for %q there: one id for two texts is not supported", a.Content, text)
		}
		start := len(t.text)
		t.text = append(t.text, a.Content...)
		t.tokens[id] = span{uint32(start), uint32(len(t.text))}
		token := addedToken{id, a.Special}
		t.added = append(t.added, token)
		if !a.Normalized {
			raw.add([]byte(a.Content), token)
			continue
		}
		text := []byte(a.Content)
		if t.normalize {
			text = z.nfc(text)
		}
		if !composed.add(text, token) {
			return fmt.Errorf("added_tokens: %q normalizes to the same text as another: not supported", a.Content)
		}
	}
	if len(raw.nodes) > 0 {
		t.raw = raw
	}
	if len(composed.nodes) > 0 {
		t.composed = composed
	}
	return nil
}

// mergesTo reports whether the id is that of a byte or what a merge gives.
func (t *Tokenizer) mergesTo(id uint32) bool {
	if slices.Contains(t.bytes[:], id) {
		return true
	}
	return slices.ContainsFunc(t.pairs.slots, func(s pairSlot) bool { return s.key != 0 && s.id == id })
}
