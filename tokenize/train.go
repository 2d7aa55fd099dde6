package tokenize

import (
	"bytes"
	"container/heap"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"time"
	"unicode/utf8"

	"mula/tokenize/documents"
)

// TrainOptions are the options of [Train].
type TrainOptions struct {
	// VocabSize is the number of ids, including special tokens and the 256 bytes. The result is
	// smaller if the text has too few pairs of tokens.
	VocabSize int
	// SpecialTokens get the first ids, in this order.
	SpecialTokens []string
	// Pattern splits the text into words; tokens do not cross word boundaries.
	Pattern Pattern
	// MinFrequency is how often a pair must occur to become a token; 0 and 1 are equivalent.
	MinFrequency int
	// Workers is the number of goroutines that count words, up to 4096; 0 means one per processor.
	// The result does not depend on it.
	Workers int
	// MaxBytes limits the text that is read; 0 means no limit.
	MaxBytes int64
	// Progress, if not nil, is called occasionally. Calls do not overlap.
	Progress func(TrainProgress)
}

// TrainProgress is the progress of [Train]. Merges are 0 until all the text is read.
type TrainProgress struct {
	Documents, Bytes    int64 // read so far
	Merges, TotalMerges int   // so far, and requested
}

// Train trains a byte-level BPE tokenizer on the documents and returns it as a tokenizer.json for
// Hugging Face tokenizers and [Parse]. It equals the result of Hugging Face's BpeTrainer for the
// same text with the alphabet of all bytes, merge for merge: the pair with the highest count is
// merged first, and for equal counts the pair with the lower ids. The file does not depend on the
// number of workers.
//
// Train stops at the first error from docs and returns it unchanged.
//
// Memory depends on the distinct words of the text: about 100 bytes per word and 25 per byte of the
// words. Train fails if there are more than 128 MiB of distinct words, which need 5 GB of memory.
// It holds about 1 MiB of the text per worker.
func Train(ctx context.Context, docs iter.Seq2[documents.Document, error], opts TrainOptions) (tokenizerJSON []byte,
	err error) {
	if opts.Pattern > CL100K {
		return nil, fmt.Errorf("training a tokenizer: %s %d", opts.Pattern, opts.Pattern)
	}
	if err := CheckWorkers(opts.Workers); err != nil {
		return nil, fmt.Errorf("training a tokenizer: %w", err)
	}
	tr, err := newTrainer(opts)
	if err != nil {
		return nil, fmt.Errorf("training a tokenizer: %w", err)
	}
	words, err := countWords(ctx, docs, opts, func(docs, bytes int64) {
		tr.progress.Documents, tr.progress.Bytes = docs, bytes
		tr.report(false)
	})
	if err != nil {
		return nil, fmt.Errorf("training a tokenizer: %w", err)
	}
	tr.addWords(words)
	if err := tr.run(ctx); err != nil {
		return nil, fmt.Errorf("training a tokenizer: %w", err)
	}
	return tr.tokenizerJSON()
}

// A trainer holds all words as one array of symbols, linked within each word, and for each pair of
// adjacent tokens its count and its positions. A merge visits only the positions of its pair, and
// changes the counts of neighbouring pairs.
type trainer struct {
	opts     TrainOptions
	vocab    []string // in the byte alphabet, by id
	ids      map[string]uint32
	merges   []idPair
	symbols  []trainSymbol
	counts   []int64 // of words
	pairs    map[idPair]*pairUse
	queue    pairQueue
	progress TrainProgress
	reported time.Time
}

type trainSymbol struct {
	id         uint32 // noToken once it is merged into the previous symbol
	word       uint32
	prev, next int32 // -1 at the ends of the word
}

// idPair is left<<32 | right, so that it compares as the pair does.
type idPair uint64

func (p idPair) left() uint32  { return uint32(p >> 32) }
func (p idPair) right() uint32 { return uint32(p) }

// pairUse is how often a pair occurs, in all words, and the symbols at its recorded positions.
type pairUse struct {
	count  int64
	places []int32
	noted  bool // in trainer.fresh
}

func newTrainer(opts TrainOptions) (*trainer, error) {
	tr := &trainer{opts: opts, ids: map[string]uint32{}, pairs: map[idPair]*pairUse{}}
	for _, s := range opts.SpecialTokens {
		if s == "" {
			return nil, errors.New("a special token is empty")
		}
		if _, ok := tr.ids[s]; ok {
			return nil, fmt.Errorf("the special token %q is listed twice", s)
		}
		if !utf8.ValidString(s) {
			return nil, fmt.Errorf("the special token %q is not valid UTF-8", s)
		}
		if bytes, ok := unspell(nil, s); ok && string(bytes) != s {
			return nil, fmt.Errorf("the special token %q is the vocabulary's spelling of the bytes %q; use ASCII, "+
				"like <|name|>", s, bytes)
		}
		if opts.Pattern.scanner()(pinnedClasses(), []byte(s)) == len(s) {
			return nil, fmt.Errorf("the special token %q is a single word for the %s pattern, so ordinary text could "+
				"become it; use a token like <|name|>", s, opts.Pattern)
		}
		tr.id(s)
	}
	alphabet := byteRunes
	slices.Sort(alphabet[:])
	for _, r := range alphabet {
		tr.id(string(r))
	}
	if opts.VocabSize < len(tr.vocab) || opts.VocabSize > maxVocabulary {
		return nil, fmt.Errorf("a vocabulary of %d is not possible; it needs %d special tokens and 256 bytes, and at "+
			"most %d tokens",
			opts.VocabSize, len(opts.SpecialTokens), maxVocabulary)
	}
	tr.progress.TotalMerges = opts.VocabSize - len(tr.vocab)
	return tr, nil
}

// id returns the id of a token, adding the token if necessary.
func (tr *trainer) id(token string) uint32 {
	id, ok := tr.ids[token]
	if !ok {
		id = uint32(len(tr.vocab))
		tr.ids[token] = id
		tr.vocab = append(tr.vocab, token)
	}
	return id
}

func (tr *trainer) addWords(words []countedWord) {
	n := 0
	for _, w := range words {
		n += len(w.word)
	}
	tr.symbols = make([]trainSymbol, 0, n)
	tr.counts = make([]int64, len(words))
	var byteIDs [256]uint32
	for c, r := range byteRunes {
		byteIDs[c] = tr.ids[string(r)]
	}
	for i, w := range words {
		tr.counts[i] = w.count
		first := len(tr.symbols)
		for k := range len(w.word) {
			at := int32(len(tr.symbols))
			tr.symbols = append(tr.symbols, trainSymbol{byteIDs[w.word[k]], uint32(i), at - 1, at + 1})
		}
		tr.symbols[first].prev = -1
		tr.symbols[len(tr.symbols)-1].next = -1
	}
	for i, s := range tr.symbols {
		if s.next >= 0 {
			use := tr.use(s.id, tr.symbols[s.next].id)
			use.count += tr.counts[s.word]
			use.places = append(use.places, int32(i))
		}
	}
	for p, use := range tr.pairs {
		tr.queue = append(tr.queue, queuedPair{use.count, p})
	}
	heap.Init(&tr.queue)
}

func (tr *trainer) use(left, right uint32) *pairUse {
	p := idPair(left)<<32 | idPair(right)
	use, ok := tr.pairs[p]
	if !ok {
		use = &pairUse{}
		tr.pairs[p] = use
	}
	return use
}

// run merges pairs until the vocabulary is full or no pair is frequent enough.
func (tr *trainer) run(ctx context.Context) error {
	var fresh []idPair // new pairs of the current merge
	for len(tr.vocab) < tr.opts.VocabSize && len(tr.queue) > 0 {
		top := &tr.queue[0]
		use, ok := tr.pairs[top.pair]
		if !ok || len(use.places) == 0 { // merged, or consumed by other merges
			heap.Pop(&tr.queue)
			continue
		}
		if top.count != use.count {
			top.count = use.count
			heap.Fix(&tr.queue, 0)
			continue
		}
		if top.count < max(1, int64(tr.opts.MinFrequency)) {
			break
		}
		pair := top.pair
		heap.Pop(&tr.queue)
		tr.merges = append(tr.merges, pair)
		fresh = tr.merge(pair, use.places, fresh[:0])
		delete(tr.pairs, pair)
		for _, p := range fresh {
			use := tr.pairs[p]
			use.noted = false
			if use.count > 0 {
				heap.Push(&tr.queue, queuedPair{use.count, p})
			} else {
				use.places = nil
			}
		}
		if len(tr.merges)%64 == 0 {
			if err := ctx.Err(); err != nil {
				return err
			}
			tr.progress.Merges = len(tr.merges)
			tr.report(false)
		}
	}
	tr.progress.Merges = len(tr.merges)
	tr.report(true)
	return nil
}

// merge replaces the pair by one token everywhere and returns fresh with the new pairs. places
// holds every position of the pair, and some former positions.
func (tr *trainer) merge(pair idPair, places []int32, fresh []idPair) []idPair {
	left, right := pair.left(), pair.right()
	id := tr.id(tr.vocab[left] + tr.vocab[right])
	if left == right {
		slices.Sort(places) // in a run of one token the pairs overlap, and the leftmost is merged
	}
	s := tr.symbols
	gain := func(l, r uint32, n int64, at int32) {
		use := tr.use(l, r)
		use.count += n
		use.places = append(use.places, at)
		if !use.noted {
			use.noted = true
			fresh = append(fresh, idPair(l)<<32|idPair(r))
		}
	}
	for _, i := range places {
		j := s[i].next
		if s[i].id != left || j < 0 || s[j].id != right {
			continue // merged with a neighbour since
		}
		n := tr.counts[s[i].word]
		if p := s[i].prev; p >= 0 {
			tr.use(s[p].id, left).count -= n
			gain(s[p].id, id, n, p)
		}
		k := s[j].next
		if k >= 0 {
			tr.use(right, s[k].id).count -= n
			gain(id, s[k].id, n, i)
			s[k].prev = i
		}
		s[i].id, s[i].next = id, k
		s[j].id = noToken
	}
	return fresh
}

// report calls Progress, at most ten times a second except for the last call.
func (tr *trainer) report(last bool) {
	if tr.opts.Progress == nil || !last && time.Since(tr.reported) < 100*time.Millisecond {
		return
	}
	tr.reported = time.Now()
	tr.opts.Progress(tr.progress)
}

// pairQueue is a heap: highest count first, then lowest pair. Counts may be outdated. They only
// decrease without a new entry, and are corrected when they reach the top.
type pairQueue []queuedPair

type queuedPair struct {
	count int64
	pair  idPair
}

func (q pairQueue) Len() int { return len(q) }
func (q pairQueue) Less(i, j int) bool {
	return q[i].count > q[j].count || q[i].count == q[j].count && q[i].pair < q[j].pair
}
func (q pairQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *pairQueue) Push(x any)   { *q = append(*q, x.(queuedPair)) }
func (q *pairQueue) Pop() any {
	old := *q
	last := old[len(old)-1]
	*q = old[:len(old)-1]
	return last
}

// tokenizerJSON writes the result byte for byte like Hugging Face tokenizers 0.23.
func (tr *trainer) tokenizerJSON() ([]byte, error) {
	split, err := quote(cl100kRegex)
	if err != nil {
		return nil, err
	}
	null := json.RawMessage("null")
	file := outputJSON{
		Version:    "1.0",
		Truncation: null, Padding: null,
		AddedTokens: []addedJSON{},
		Normalizer:  null,
		PreTokenizer: map[Pattern]json.RawMessage{
			GPT2: json.RawMessage(`{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}`),
			CL100K: json.RawMessage(`{"type": "Sequence", "pretokenizers": [
				{"type": "Split", "pattern": {"Regex": ` + string(split) + `}, "behavior": "Isolated", "invert": false},
				{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]}`),
		}[tr.opts.Pattern],
		PostProcessor: null,
		Decoder:       json.RawMessage(`{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}`),
		Model: outputModelJSON{
			Type:    "BPE",
			Dropout: null, UnkToken: null, ContinuingSubwordPrefix: null, EndOfWordSuffix: null,
			Vocab:  tr.vocab,
			Merges: [][2]string{},
		},
	}
	for id, s := range tr.opts.SpecialTokens {
		file.AddedTokens = append(file.AddedTokens, addedJSON{ID: uint32(id), Content: s, Special: true})
	}
	for _, p := range tr.merges {
		file.Model.Merges = append(file.Model.Merges, [2]string{tr.vocab[p.left()], tr.vocab[p.right()]})
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(file); err != nil {
		return nil, fmt.Errorf("writing tokenizer.json: %w", err)
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// outputJSON has the fields of fileJSON, in the order of the file.
type outputJSON struct {
	Version       string          `json:"version"`
	Truncation    json.RawMessage `json:"truncation"`
	Padding       json.RawMessage `json:"padding"`
	AddedTokens   []addedJSON     `json:"added_tokens"`
	Normalizer    json.RawMessage `json:"normalizer"`
	PreTokenizer  json.RawMessage `json:"pre_tokenizer"`
	PostProcessor json.RawMessage `json:"post_processor"`
	Decoder       json.RawMessage `json:"decoder"`
	Model         outputModelJSON `json:"model"`
}

type outputModelJSON struct {
	Type                    string          `json:"type"`
	Dropout                 json.RawMessage `json:"dropout"`
	UnkToken                json.RawMessage `json:"unk_token"`
	ContinuingSubwordPrefix json.RawMessage `json:"continuing_subword_prefix"`
	EndOfWordSuffix         json.RawMessage `json:"end_of_word_suffix"`
	FuseUnk                 bool            `json:"fuse_unk"`
	ByteFallback            bool            `json:"byte_fallback"`
	IgnoreMerges            bool            `json:"ignore_merges"`
	Vocab                   orderedVocab    `json:"vocab"`
	Merges                  [][2]string     `json:"merges"`
}

// orderedVocab is written as an object from token to id, in the order of ids.
type orderedVocab []string

func (v orderedVocab) MarshalJSON() ([]byte, error) {
	b := []byte{'{'}
	for id, token := range v {
		if id > 0 {
			b = append(b, ',')
		}
		name, err := quote(token)
		if err != nil {
			return nil, err
		}
		b = append(append(b, name...), ':')
		b = strconv.AppendInt(b, int64(id), 10)
	}
	return append(b, '}'), nil
}

// quote is json.Marshal without HTML escapes.
func quote(s string) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(s)
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), err
}

// maxWorkers bounds the goroutines that a caller may request. A larger number is a mistake that
// would exhaust memory.
const maxWorkers = 4096

// CheckWorkers returns an error if the number of goroutines n is negative or above 4096. 0 means
// one per processor.
func CheckWorkers(n int) error {
	if n < 0 || n > maxWorkers {
		return fmt.Errorf("invalid number of workers %d; it must be between 0, for the number of processors, and %d", n,
			maxWorkers)
	}
	return nil
}
