// Package tokenize turns documents into token ids: it reads documents, tokenizes them as Hugging
// Face tokenizers does, to the id, and writes them as a shard, in parallel and with the same bytes
// whatever the number of workers.
//
// A [Tokenizer] is read from a tokenizer.json. What decides ids, in this order:
//
//  1. The text is cut at added tokens that are not "normalized": the leftmost, and of those the longest.
//  2. The normalizers change each piece in between by itself.
//  3. Each piece is cut at the added tokens that are "normalized", whose own text has been normalized.
//  4. The pre-tokenizers cut what remains into words; the end of a piece is the end of the text for them.
//  5. The model turns each word into ids: BPE, WordPiece, Unigram or WordLevel.
//  6. If asked for, the post-processor puts special tokens around the ids.
//
// Byte-level BPEs with the patterns of well-known vocabularies take a fast path, all others a
// general one (pipeline). Classes of characters and the data of NFC are pinned in the package;
// [ClassTable] names them.
package tokenize

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"regexp"
	"strings"
)

// A Tokenizer is the content of a tokenizer.json. It does not change after loading, and goroutines
// share it.
type Tokenizer struct {
	sha256 string
	tokens []span // by id
	text   []byte // what the spans point into

	scan      scanner
	normalize bool  // NFC
	raw       *trie // added tokens that are matched before normalization
	composed  *trie // added tokens that are matched after it
	added     []addedText

	bytes [256]uint32 // id of each byte, or noToken
	pairs pairTable
	tree  prefixTree // of the vocabulary
	words wordTable
	// ignoreMerges gives a word that is in the vocabulary as a whole its id, whatever merging
	// gives.
	ignoreMerges bool
	greedy       *greedy // nil if the merges are not ordered
	classes      *classTable

	// of a tokenizer that is more than a byte-level BPE with one scanner; scan, normalize, bytes,
	// tree and greedy are unused then
	general *pipeline
	post    []postItem // what special tokens are put around a text; nil for none
	decode  *decoding  // nil: the bytes of the tokens are joined

	ignoredTruncationOrPadding bool
}

// An addedText is an added token as the file spells it.
type addedText struct {
	content string
	id      uint32
}

// span is where the text of a token lies. end is 0 for an id that no token has.
type span struct{ start, end uint32 }

// maxVocabulary bounds the ids a file may use, and with them the memory that loading takes. The
// largest published vocabularies have some hundred thousand.
const maxVocabulary = 1 << 22

// maxText bounds the texts of all tokens together, as the file spells them: the trees that find
// tokens take 8 to 20 bytes for each of theirs. Those of the largest published vocabularies, of a
// million tokens, have some 10 MB.
const maxText = 64 << 20

// maxFile bounds the tokenizer.json that is read. That of the largest published vocabulary has some
// 30 MB.
const maxFile = 512 << 20

// LoadOptions are the choices for [LoadWith]; the zero value is good.
type LoadOptions struct {
	// IgnoreTruncationAndPadding reads a file that sets truncation or padding as if it did not. Ids
	// are those that Hugging Face tokenizers gives after no_truncation() and no_padding().
	// Otherwise such a file is refused.
	IgnoreTruncationAndPadding bool
}

// Load is [LoadWith] without options.
func Load(path string) (*Tokenizer, error) { return LoadWith(path, LoadOptions{}) }

// LoadWith reads the tokenizer.json at path, of at most 512 MiB. It refuses, by name, whatever in
// the file would change ids in a way that this package does not do exactly.
func LoadWith(path string, o LoadOptions) (*Tokenizer, error) {
	b, err := readFile(path, maxFile)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) && hubName.MatchString(path) && !strings.HasSuffix(path, ".json") {
			return nil, fmt.Errorf("reading tokenizer: %w; names of the Hugging Face hub are not looked up: "+
				"download the tokenizer.json of %s and name the file", err, path)
		}
		return nil, fmt.Errorf("reading tokenizer: %w", err)
	}
	return ParseWith(b, path, o)
}

// hubName matches the names of models in the Hugging Face hub, such as gpt2 and
// allenai/dolma2-tokenizer.
var hubName = regexp.MustCompile(`^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$`)

// readFile is os.ReadFile for a file of at most limit bytes.
func readFile(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	size := info.Size() // 0 of what is no regular file
	if size <= limit {
		b.Grow(int(size) + bytes.MinRead)
		if size, err = b.ReadFrom(io.LimitReader(f, limit+1)); err != nil {
			return nil, err
		}
	}
	if size > limit {
		return nil, fmt.Errorf("%s is larger than %d MiB, which no tokenizer.json is", path, limit>>20)
	}
	return b.Bytes(), nil
}

// Parse is [Load] for the file's bytes; name stands for it in errors.
func Parse(json []byte, name string) (*Tokenizer, error) {
	return ParseWith(json, name, LoadOptions{})
}

// ParseWith is [LoadWith] for the file's bytes; name stands for it in errors.
func ParseWith(json []byte, name string, o LoadOptions) (*Tokenizer, error) {
	t, err := parse(json, o)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	sum := sha256.Sum256(json)
	t.sha256 = hex.EncodeToString(sum[:])
	return t, nil
}

// SHA256 is the hash of the tokenizer.json's bytes, in hexadecimal.
func (t *Tokenizer) SHA256() string { return t.sha256 }

// IgnoredTruncationOrPadding reports whether the file sets truncation or padding, which
// [LoadOptions] had ignored.
func (t *Tokenizer) IgnoredTruncationOrPadding() bool { return t.ignoredTruncationOrPadding }

// VocabSize is the highest id plus one: no id that an [Encoder] gives reaches it.
func (t *Tokenizer) VocabSize() int { return len(t.tokens) }

// ID returns the id of the token that has exactly this text: of an added token such as
// "<|endoftext|>" if there is one, else of a vocabulary entry. In a byte-level vocabulary the text
// is the plain one, " the", not the file's spelling in the byte alphabet, "Ġthe"; in others it is
// what the file says: "▁the", "##ing", "<0x0A>".
func (t *Tokenizer) ID(token string) (uint32, bool) {
	for _, a := range t.added {
		if a.content == token {
			return a.id, true
		}
	}
	for id := range t.tokens {
		if t.spelled(uint32(id), token) {
			return uint32(id), true
		}
	}
	return 0, false
}

func (t *Tokenizer) spelled(id uint32, token string) bool {
	s := t.tokens[id]
	return s.end != 0 && string(t.text[s.start:s.end]) == token
}

// Decode appends the text that the ids stand for to dst. An id that no token has is an error, where
// Hugging Face tokenizers leaves it out.
//
// With a byte-level decoder the text is the bytes of the tokens, which need not be valid UTF-8: a
// character may be cut between two tokens. An added token stands for its own text. Hugging Face
// tokenizers differs in that it puts U+FFFD in the place of what is no character. With any other
// decoder, or none, the text is what Hugging Face tokenizers gives with skip_special_tokens=False,
// which may depend on a token's neighbours and its place: decode ids that belong together in one
// call.
func (t *Tokenizer) Decode(dst []byte, ids []uint32) ([]byte, error) {
	start := len(dst)
	var tokens []string
	for i, id := range ids {
		if int64(id) >= int64(len(t.tokens)) || t.tokens[id].end == 0 {
			return dst[:start], fmt.Errorf("id %d at place %d is not in the vocabulary of %d tokens", id, i,
				len(t.tokens))
		}
		s := t.tokens[id]
		if t.decode == nil {
			dst = append(dst, t.text[s.start:s.end]...)
		} else {
			tokens = append(tokens, string(t.text[s.start:s.end]))
		}
	}
	if t.decode == nil {
		return dst, nil
	}
	return t.decode.append(dst, tokens)
}
