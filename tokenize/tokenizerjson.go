package tokenize

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"mula/internal/strictjson"
)

// The structure of tokenizer.json, as Hugging Face tokenizers 0.23 writes it. Parts of several
// kinds are kept raw, so that an error can quote the file.
//
// Unknown fields are treated like in Hugging Face tokenizers. It rejects them at the top of the
// file, in a pattern and in a piece of a template. It ignores them everywhere else: in the model,
// where the fields of other models are also unknown, in added tokens, in normalizers,
// pre-tokenizers, decoders and post-processors, in the contents of a piece of a template, and in
// its special tokens. However, it distinguishes post-processors by their fields, see
// [stepJSON.checkKind].

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

// modelJSON has the fields of all models; each model rejects the fields of the others.
type modelJSON struct {
	Type                    string          `json:"type"`
	Dropout                 json.RawMessage `json:"dropout"`
	UnkToken                *string         `json:"unk_token"`
	ContinuingSubwordPrefix *string         `json:"continuing_subword_prefix"`
	EndOfWordSuffix         *string         `json:"end_of_word_suffix"`
	FuseUnk                 *bool           `json:"fuse_unk"`
	ByteFallback            *bool           `json:"byte_fallback"`
	IgnoreMerges            *bool           `json:"ignore_merges"`
	MaxInputCharsPerWord    *int            `json:"max_input_chars_per_word"`
	UnkID                   *uint32         `json:"unk_id"`
	Vocab                   vocabJSON       `json:"vocab"`
	Merges                  mergesJSON      `json:"merges"`
}

// vocabJSON is a model's vocabulary: an object of tokens and ids, or in a Unigram a list of tokens
// and scores, whose indices are the ids.
type vocabJSON struct {
	ids    map[string]uint32
	scored []scoredToken
}

func (v *vocabJSON) UnmarshalJSON(b []byte) error {
	if b[0] == '[' {
		v.scored = []scoredToken{}
		return json.Unmarshal(b, &v.scored)
	}
	if b[0] != '{' {
		return json.Unmarshal(b, &v.ids) // an error, or null
	}
	v.ids = map[string]uint32{}
	c := strictjson.NewCursor(b)
	return c.Elements(func() error {
		token, err := c.Name()
		if err != nil {
			return fmt.Errorf("model.vocab: %w", err)
		}
		var id uint32
		number := c.Skip()
		if n, err := strconv.ParseUint(number, 10, 32); err == nil {
			id = uint32(n)
		} else if err := strictjson.Value(json.RawMessage(number), &id); err != nil {
			return fmt.Errorf("model.vocab: the id of %q is %.40s: %w", token, number, err)
		}
		v.ids[token] = id
		return nil
	})
}

func isTrue(b *bool) bool { return b != nil && *b }

func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// mergeJSON is one merge: "a b" in old files, ["a", "b"] in new ones.
type mergeJSON struct {
	left, right string
	comment     bool // "#version: 0.2", which old files copy from merges.txt and the library skips
}

// mergesJSON is the list of merges.
type mergesJSON []mergeJSON

func (m *mergesJSON) UnmarshalJSON(b []byte) error {
	if b[0] != '[' {
		var none []string
		return json.Unmarshal(b, &none) // an error, or null
	}
	*m = make(mergesJSON, 0, len(b)/16)
	c := strictjson.NewCursor(b)
	text := func() (string, error) {
		if c.Peek() == '"' {
			return c.String()
		}
		var s string
		err := strictjson.Value(json.RawMessage(c.Skip()), &s)
		return s, err
	}
	err := c.Elements(func() error {
		var parts []string
		if c.Peek() == '[' {
			pair := [2]string{}
			parts = pair[:0]
			if err := c.Elements(func() error {
				s, err := text()
				parts = append(parts, s)
				return err
			}); err != nil {
				return err
			}
			if len(parts) != 2 {
				return fmt.Errorf("%q does not have two parts", parts)
			}
		} else {
			s, err := text()
			if err != nil {
				return err
			}
			if strings.HasPrefix(s, "#version") {
				*m = append(*m, mergeJSON{comment: true})
				return nil
			}
			if parts = strings.Split(s, " "); len(parts) != 2 {
				return fmt.Errorf("%q does not have two parts with one space between them", s)
			}
		}
		*m = append(*m, mergeJSON{left: parts[0], right: parts[1]})
		return nil
	})
	if err != nil {
		return fmt.Errorf("model.merges[%d]: %w", len(*m), err)
	}
	return nil
}

func parse(b []byte, o LoadOptions) (*Tokenizer, error) {
	var file fileJSON
	if err := strictjson.DecodeLoosely(b, &file); err != nil {
		return nil, err
	}
	known := fieldNames(&file)
	c := strictjson.NewCursor(b)
	if err := c.Elements(func() error {
		name, err := c.Name()
		if err == nil && !slices.Contains(known, name) {
			err = fmt.Errorf("unknown field %q", name)
		}
		c.Skip()
		return err
	}); err != nil {
		return nil, err
	}
	if file.Version != "1.0" {
		return nil, fmt.Errorf("unknown version %q; use \"1.0\"; is this a tokenizer.json of Hugging Face tokenizers?",
			file.Version)
	}
	if file.Model == nil {
		return nil, errors.New("the model is missing")
	}
	ignored := false
	for _, part := range []struct {
		name, never string
		value       json.RawMessage
	}{{"truncation", "cuts", file.Truncation}, {"padding", "pads", file.Padding}} {
		if isNull(part.value) {
			continue
		}
		if !o.IgnoreTruncationAndPadding {
			return nil,
				fmt.Errorf("%w; mula never %s documents; set it to null, or use --ignore-truncation-and-padding",
					refuse(part.name, part.value), part.never)
		}
		ignored = true
	}
	t := &Tokenizer{classes: pinnedClasses(), ignoredTruncationOrPadding: ignored}
	p := &pipeline{}
	if err := p.parseNormalizers(file.Normalizer); err != nil {
		return nil, err
	}
	if err := p.parsePreTokenizers(file.PreTokenizer); err != nil {
		return nil, err
	}
	var err error
	if t.decode, err = parseDecoder(file.Decoder); err != nil {
		return nil, err
	}
	m := file.Model
	if err := m.check(); err != nil {
		return nil, err
	}
	if split, ok := p.fastSplitter(); ok && m.isByteLevel() && (t.decode == nil || isNull(file.Decoder)) {
		t.split, t.normalize, t.ignoreMerges = split, len(p.normalizers) > 0, isTrue(m.IgnoreMerges)
		t.decode = nil
	} else {
		t.general = p
	}
	if err := t.addVocabulary(m, file.AddedTokens); err != nil {
		return nil, err
	}
	if m.Type == "BPE" {
		if err := t.addMerges(m); err != nil {
			return nil, err
		}
	}
	if err := t.addTokens(p, m, file.AddedTokens); err != nil {
		return nil, err
	}
	if err := t.parsePostProcessor(file.PostProcessor); err != nil {
		return nil, err
	}
	if t.general == nil {
		t.prepare(m.Vocab.ids)
		return t, nil
	}
	switch m.Type {
	case "BPE":
		b := newCharBPE(t, m)
		if pairs := b.newCharPairs(m.Merges); pairs != nil {
			p.preTokenizers = append(p.preTokenizers, cutPairs{pairs})
		}
		p.model = b
	case "WordPiece":
		p.model = newWordPiece(m.Vocab.ids, *m.UnkToken, *m.ContinuingSubwordPrefix, *m.MaxInputCharsPerWord)
	case "WordLevel":
		p.model = newWordLevel(m.Vocab.ids, *m.UnkToken)
	case "Unigram":
		p.model = newUnigram(m)
	}
	p.chunks = p.newChunking(t)
	return t, nil
}

// check sets the type of a model without a type, such as BPEs in old files, and rejects fields that
// a model of its type does not have.
func (m *modelJSON) check() error {
	if m.Type == "" && m.Merges != nil {
		m.Type = "BPE"
	}
	var wanted []string
	switch m.Type {
	case "BPE":
		wanted = []string{"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
			"byte_fallback", "ignore_merges", "merges"}
	case "WordPiece":
		wanted = []string{"unk_token", "continuing_subword_prefix", "max_input_chars_per_word"}
	case "WordLevel":
		wanted = []string{"unk_token"}
	case "Unigram":
		wanted = []string{"unk_id", "byte_fallback"}
	default:
		return fmt.Errorf("model.type is %q; use BPE, WordPiece, WordLevel or Unigram", m.Type)
	}
	m.dropOthers(wanted)
	required := m.Type == "WordPiece" || m.Type == "WordLevel"
	for _, f := range []struct {
		name  string
		given bool
	}{
		{"dropout", !isNull(m.Dropout)}, {"unk_token", m.UnkToken != nil}, {"continuing_subword_prefix",
			m.ContinuingSubwordPrefix != nil},
		{"end_of_word_suffix", m.EndOfWordSuffix != nil}, {"fuse_unk", m.FuseUnk != nil}, {"byte_fallback",
			m.ByteFallback != nil},
		{"ignore_merges", m.IgnoreMerges != nil}, {"max_input_chars_per_word", m.MaxInputCharsPerWord != nil},
		{"unk_id", m.UnkID != nil},
		{"merges", m.Merges != nil},
	} {
		if !f.given && slices.Contains(wanted, f.name) && required {
			return fmt.Errorf("model.%s is missing", f.name)
		}
	}
	if m.Type == "BPE" && m.Merges == nil {
		return errors.New("model.merges is missing")
	}
	if m.Type == "Unigram" && m.Vocab.scored == nil || m.Type != "Unigram" && m.Vocab.ids == nil {
		return fmt.Errorf("model.vocab is missing, or has another structure than for a %s", m.Type)
	}
	if m.Type == "Unigram" {
		if len(m.Vocab.scored) > maxVocabulary {
			return fmt.Errorf("model.vocab: ids from %d on are not supported", maxVocabulary)
		}
		if m.UnkID != nil && int64(*m.UnkID) >= int64(len(m.Vocab.scored)) {
			return fmt.Errorf("model.unk_id is %d, but the vocabulary has %d tokens", *m.UnkID, len(m.Vocab.scored))
		}
	}
	if !isNull(m.Dropout) {
		if p, err := strconv.ParseFloat(string(m.Dropout), 64); err != nil || p != 0 {
			return fmt.Errorf("%w; dropout makes ids random; set it to null", refuse("model.dropout", m.Dropout))
		}
	}
	if m.MaxInputCharsPerWord != nil && *m.MaxInputCharsPerWord < 0 {
		return fmt.Errorf("model.max_input_chars_per_word is %d: want 0 or more", *m.MaxInputCharsPerWord)
	}
	return nil
}

// dropOthers clears the fields that a model of this type does not have.
func (m *modelJSON) dropOthers(wanted []string) {
	v := reflect.ValueOf(m).Elem()
	for i, name := range fieldNames(m) {
		if name != "type" && name != "vocab" && !slices.Contains(wanted, name) {
			v.Field(i).SetZero()
		}
	}
}

// isByteLevel reports whether the model is a BPE whose input is always bytes with tokens, so that
// unknown tokens and fallbacks do not matter.
func (m *modelJSON) isByteLevel() bool {
	if m.Type != "BPE" || deref(m.ContinuingSubwordPrefix) != "" || deref(m.EndOfWordSuffix) != "" {
		return false
	}
	if m.UnkToken == nil && !isTrue(m.ByteFallback) {
		return true // a byte without token is an error
	}
	for c, r := range byteRunes {
		if _, ok := m.Vocab.ids[string(r)]; !ok && c != 0xc0 && c != 0xc1 && c < 0xf5 {
			return false
		}
	}
	return true
}

// fastSplitter returns the splitter that replaces all pre-tokenizers, if there is one and the
// normalizers are NFC or none.
func (p *pipeline) fastSplitter() (splitter, bool) {
	for _, n := range p.normalizers {
		if f, ok := n.(normalForm); !ok || f.form != nfc {
			return splitter{}, false
		}
	}
	last := len(p.preTokenizers) - 1
	if last < 0 {
		return splitter{}, false
	}
	level, ok := p.preTokenizers[last].(byteLevel)
	if !ok || level.prefix || level.regex && last > 0 {
		return splitter{}, false
	}
	if level.regex {
		return splitter{first: scanGPT2, starts: startsGPT2}, true
	}
	var regexes []string
	for _, s := range p.preTokenizers[:last] {
		s, ok := s.(split)
		// The patterns match everything, so keeping the matches (Removed, inverted) and cutting at
		// them (Isolated) are equivalent.
		if !ok || s.source == "" || s.behavior != isolated && !(s.behavior == removed && s.invert && last == 1) {
			return splitter{}, false
		}
		regexes = append(regexes, s.source)
	}
	return splitterOf(regexes...)
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
	return fmt.Errorf("%s is %s, which is not supported, because ids would differ from those in Hugging Face "+
		"tokenizers", name,
		s)
}

func isNull(b json.RawMessage) bool { return len(b) == 0 || string(b) == "null" }

// A stepJSON is a normalizer, pre-tokenizer, post-processor or decoder in the file.
type stepJSON struct {
	kind string // its type
	name string // its location in the file
	raw  json.RawMessage
}

// stepsOf returns the steps of a part of the file: none for null, the step itself, or the steps of
// a Sequence, which are in the given list.
func stepsOf(b json.RawMessage, name, list string) ([]stepJSON, error) {
	if isNull(b) {
		return nil, nil
	}
	s := stepJSON{name: name, raw: b}
	var typed struct {
		Type string `json:"type"`
	}
	if err := s.read(&typed); err != nil {
		return nil, err
	}
	s.kind = typed.Type
	if list == "processors" {
		if err := s.checkKind(); err != nil {
			return nil, err
		}
	}
	if s.kind != "Sequence" {
		return []stepJSON{s}, nil
	}
	fields, err := s.fields()
	if err != nil {
		return nil, err
	}
	value, ok := fields[list]
	if !ok {
		return nil, fmt.Errorf("%w (the field %q is missing)", s.refuse(), list)
	}
	var inner []json.RawMessage
	if err := strictjson.Decode(value, &inner); err != nil {
		return nil, fmt.Errorf("%w (%s: %w)", s.refuse(), list, err)
	}
	var steps []stepJSON
	for i, b := range inner {
		if isNull(b) {
			return nil, s.refuse()
		}
		more, err := stepsOf(b, fmt.Sprintf("%s.%s[%d]", name, list, i), list)
		if err != nil {
			return nil, err
		}
		steps = append(steps, more...)
	}
	return steps, nil
}

// fields returns the fields of the step by name.
func (s stepJSON) fields() (fields map[string]json.RawMessage, err error) {
	if err := strictjson.DecodeLoosely(s.raw, &fields); err != nil {
		return nil, fmt.Errorf("%w (%w)", s.refuse(), err)
	}
	return fields, nil
}

// checkKind rejects a post-processor whose fields make it another one: Hugging Face tokenizers
// tries RobertaProcessing, BertProcessing, ByteLevel, TemplateProcessing and Sequence in this
// order, and uses the first whose fields are all present. It checks the type of only some of them.
func (s stepJSON) checkKind() error {
	fields, err := s.fields()
	if err != nil {
		return err
	}
	var others []string
	switch s.kind {
	case "BertProcessing", "RobertaProcessing":
	case "Sequence":
		others = []string{"sep", "cls", "single", "pair", "special_tokens"}
	default:
		others = []string{"sep", "cls"}
	}
	for _, name := range others {
		if _, ok := fields[name]; ok {
			return fmt.Errorf("%w (a %s has no field %q)", s.refuse(), s.kind, name)
		}
	}
	return nil
}

// read reads the fields of the step that v, a pointer to a struct, has.
func (s stepJSON) read(v any) error {
	known, err := knownFields(s.raw, v)
	if err == nil {
		err = strictjson.Decode(known, v)
	}
	if err != nil {
		return fmt.Errorf("%w (%w)", s.refuse(), err)
	}
	return nil
}

// fieldNames returns the JSON names of the fields of v, a pointer to a struct.
func fieldNames(v any) (names []string) {
	of := reflect.TypeOf(v).Elem()
	for i := range of.NumField() {
		name, _, _ := strings.Cut(of.Field(i).Tag.Get("json"), ",")
		names = append(names, name)
	}
	return names
}

// knownFields returns the JSON object without the fields that v, a pointer to a struct, does not
// have. Names are compared exactly, unlike in encoding/json.
func knownFields(object json.RawMessage, v any) (json.RawMessage, error) {
	var fields map[string]json.RawMessage
	if err := strictjson.DecodeLoosely(object, &fields); err != nil {
		return nil, err
	}
	names, all := fieldNames(v), len(fields)
	maps.DeleteFunc(fields, func(name string, _ json.RawMessage) bool { return !slices.Contains(names, name) })
	if len(fields) == all {
		return object, nil
	}
	return json.Marshal(fields)
}

func (s stepJSON) refuse() error { return refuse(s.name, s.raw) }

// addVocabulary fills tokens, text and bytes.
func (t *Tokenizer) addVocabulary(m *modelJSON, added []addedJSON) error {
	if m.Type == "Unigram" {
		// The id of the last of equal tokens is used, and every index keeps its token.
		m.Vocab.ids = make(map[string]uint32, len(m.Vocab.scored))
		for id, s := range m.Vocab.scored {
			m.Vocab.ids[s.token] = uint32(id)
		}
	}
	vocab := m.Vocab.ids
	size, length := len(m.Vocab.scored), 0
	for token, id := range vocab {
		length += len(token)
		if id >= maxVocabulary {
			return fmt.Errorf("model.vocab: %q has id %d: ids from %d on are not supported", token, id, maxVocabulary)
		}
		size = max(size, int(id)+1)
	}
	for _, a := range added {
		length += len(a.Content)
		if a.ID >= maxVocabulary {
			return fmt.Errorf("added_tokens: %q has id %d: ids from %d on are not supported", a.Content, a.ID,
				maxVocabulary)
		}
		if a.Content != "" {
			size = max(size, int(a.ID)+1)
		}
	}
	if length > maxText {
		return fmt.Errorf("the texts of the tokens have %d bytes in total; at most %d MiB are supported", length,
			maxText>>20)
	}
	t.tokens = make([]span, size)
	t.text = []byte{0} // so that no span ends at 0
	add := func(id uint32, token string) {
		start := len(t.text)
		text, ok := t.text, false
		if t.decode == nil {
			text, ok = unspell(t.text, token)
		}
		if !ok {
			// not spelled in the byte alphabet: an added token that is listed here too, or not a
			// byte-level vocabulary
			text = append(t.text, token...)
		}
		t.text = text
		t.tokens[id] = span{uint32(start), uint32(len(t.text))}
	}
	for id, s := range m.Vocab.scored {
		add(uint32(id), s.token)
	}
	if m.Type == "Unigram" {
		return nil
	}
	for token, id := range vocab {
		if t.tokens[id].end != 0 {
			return fmt.Errorf("model.vocab: two tokens have id %d; one is %q", id, token)
		}
		add(id, token)
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

func (t *Tokenizer) addMerges(m *modelJSON) error {
	vocab, prefix := m.Vocab.ids, len(deref(m.ContinuingSubwordPrefix))
	t.pairs = newPairTable(len(m.Merges))
	rank := uint32(0)
	var joined []byte
	for i, m := range m.Merges {
		if m.comment {
			continue
		}
		left, ok1 := vocab[m.left]
		right, ok2 := vocab[m.right]
		if len(m.right) < prefix {
			return fmt.Errorf("model.merges[%d]: %q is shorter than continuing_subword_prefix", i, m.right)
		}
		joined = append(append(joined[:0], m.left...), m.right[prefix:]...)
		id, ok3 := vocab[string(joined)]
		if !ok1 || !ok2 || !ok3 {
			return fmt.Errorf("model.merges[%d]: %q and %q: a part or the whole is not in model.vocab", i, m.left,
				m.right)
		}
		t.pairs.put(left, right, merge{rank, id})
		rank++
	}
	return nil
}

// addTokens fills raw, composed and added. The library numbers added tokens that are not in the
// vocabulary itself and ignores their ids in the file, so a file with other ids is an error. Of
// tokens with equal content the library uses the last, and it skips tokens without content.
func (t *Tokenizer) addTokens(p *pipeline, m *modelJSON, added []addedJSON) error {
	vocab := m.Vocab.ids
	next := uint32(len(vocab))
	if m.Type == "Unigram" {
		next = uint32(len(m.Vocab.scored))
	}
	last := map[string]int{}
	special := map[string]bool{} // special if any of equal tokens is
	ids := map[string]uint32{}
	for i, a := range added {
		if a.Content == "" {
			continue
		}
		if _, ok := ids[a.Content]; !ok {
			id, ok := vocab[a.Content]
			if !ok {
				id = next
				next++
			}
			ids[a.Content] = id
		}
		if id := ids[a.Content]; id != a.ID {
			return fmt.Errorf("added_tokens: %q has id %d here, but Hugging Face tokenizers would assign %d; "+
				"correct the file", a.Content, a.ID, id)
		}
		last[a.Content] = i
		special[a.Content] = special[a.Content] || a.Special
	}
	normalizing := newNormalizing(p)
	raw, composed := &trie{}, &trie{}
	for i, a := range added {
		if a.Content == "" || last[a.Content] != i {
			continue
		}
		id := ids[a.Content]
		if _, ok := vocab[a.Content]; ok && t.decode == nil {
			if text, spelt := unspell(nil, a.Content); spelt && string(text) != a.Content && (t.general != nil ||
				t.ignoreMerges || t.mergesTo(id)) {
				return fmt.Errorf("added_tokens: %q is in model.vocab, where it represents %q; one id for two texts "+
					"is not supported", a.Content, text)
			}
		}
		text := []byte(a.Content)
		if a.Normalized {
			normalizing.run(p, text, 0)
			text = bytes.Clone(normalizing.text)
			if len(text) == 0 {
				return fmt.Errorf("added_tokens: %q normalizes to the empty text, which is not supported", a.Content)
			}
		}
		t.added = append(t.added, addedText{a.Content, id, special[a.Content]})
		start := len(t.text)
		if t.decode == nil {
			t.text = append(t.text, a.Content...)
		} else {
			t.text = append(t.text, text...)
		}
		t.tokens[id] = span{uint32(start), uint32(len(t.text))}
		token := addedToken{id: id, special: special[a.Content], singleWord: a.SingleWord, lstrip: a.LStrip,
			rstrip: a.RStrip}
		if !a.Normalized {
			raw.add(text, token)
		} else if !composed.add(text, token) {
			return fmt.Errorf("added_tokens: %q normalizes to the same text as another token, which is not supported",
				a.Content)
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

// mergesTo reports whether the id is the id of a byte or the result of a merge.
func (t *Tokenizer) mergesTo(id uint32) bool {
	if slices.Contains(t.bytes[:], id) {
		return true
	}
	return slices.ContainsFunc(t.pairs.slots, func(s pairSlot) bool { return s.key != 0 && s.id == id })
}
