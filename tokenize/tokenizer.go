// Package tokenize converts text to token ids and back, with the same ids as Hugging Face
// tokenizers. [Train] makes a new byte-level BPE. Package tokenize/documents reads documents, and
// package tokenize/job writes their ids to shards.
//
// # Encode and decode
//
// [Load] reads a tokenizer.json. [Tokenizer.NewEncoder] makes an [Encoder], whose method Append
// appends the ids of a text to a slice. [Tokenizer.Decode] is the inverse.
//
//	t, err := tokenize.Load("tokenizer.json")
//	e := t.NewEncoder(tokenize.EncodeOptions{})
//	ids, err = e.Append(ids[:0], text)
//	text, err = t.Decode(text[:0], ids)
//
// The zero value of [EncodeOptions] has the defaults of `mula tokenize`: special tokens in a text
// are plain text, and no token is added. With [SpecialsAsTokens] and AddSpecialTokens, the ids
// equal the ids of Hugging Face's encode.
//
// A [Tokenizer] is immutable, and any number of goroutines may use it. An Encoder belongs to one
// goroutine. It remembers words, so make one for each goroutine and keep it for all texts. An
// encoder allocates nothing if the slice has enough capacity and its buffers have the size of the
// texts. The example of [Tokenizer] encodes a batch with several goroutines.
//
// # Errors
//
// Load fails if the file has a setting that affects ids and that this package does not compute
// exactly. Append fails if the text is not valid UTF-8, or has a byte without a token in the
// vocabulary. The encoder stays usable.
//
// # How the ids are determined
//
// These steps determine the ids, in order:
//
//  1. The text is cut at added tokens that are not "normalized": at the leftmost token, and at the
//     longest of several.
//  2. The normalizers change each piece between them separately.
//  3. Each piece is cut at the added tokens that are "normalized", whose own text is normalized
//     too.
//  4. The pre-tokenizers split the rest into words. For them, the text ends at the end of a piece.
//  5. The model converts each word to ids: BPE, WordPiece, Unigram or WordLevel.
//  6. If requested, the post-processor adds special tokens to the ids.
//
// Byte-level BPEs with the patterns of well-known vocabularies take a fast path, all others a
// general path (pipeline). Character classes and the data of NFC are pinned in the package;
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

// A Tokenizer is a loaded tokenizer.json. It is immutable and safe for concurrent use.
type Tokenizer struct {
	sha256 string
	tokens []span // by id
	text   []byte // the text that the spans refer to

	split     splitter
	normalize bool  // NFC
	raw       *trie // added tokens that are matched before normalization
	composed  *trie // added tokens that are matched after it
	added     []addedText

	bytes [256]uint32 // id of each byte, or noToken
	pairs pairTable
	tree  prefixTree // of the vocabulary
	words wordTable
	// ignoreMerges means that a word in the vocabulary always gets its own id, even if merging
	// results in other ids.
	ignoreMerges bool
	greedy       *greedy // nil if the merges are not ordered
	classes      *classTable

	// for a tokenizer other than a byte-level BPE with one splitter; split, normalize, bytes, tree
	// and greedy are then unused
	general *pipeline
	post    []postItem // special tokens around a text; nil for none
	decode  *decoding  // nil: the bytes of the tokens are concatenated

	ignoredTruncationOrPadding bool
}

// An addedText is an added token in the spelling of the file.
type addedText struct {
	content string
	id      uint32
	special bool
}

// span is the range of a token's text. end is 0 for an id without a token.
type span struct{ start, end uint32 }

// maxVocabulary bounds the ids of a file, and with them the memory for loading. The largest
// published vocabularies have several hundred thousand tokens.
const maxVocabulary = 1 << 22

// maxText bounds the total text of all tokens, in the spelling of the file: the trees that find
// tokens need 8 to 20 bytes per byte of text. The largest published vocabularies, of a million
// tokens, have about 10 MB of text.
const maxText = 64 << 20

// maxFile bounds the size of a tokenizer.json. The file of the largest published vocabulary has
// about 30 MB.
const maxFile = 512 << 20

// LoadOptions are the options of [LoadWith]. The zero value has the defaults.
type LoadOptions struct {
	// IgnoreTruncationAndPadding ignores the settings for truncation or padding in a file. The ids
	// equal the ids of Hugging Face tokenizers after no_truncation() and no_padding(). By default,
	// such a file is an error.
	IgnoreTruncationAndPadding bool
}

// Load loads the tokenizer.json at path with default options.
func Load(path string) (*Tokenizer, error) { return LoadWith(path, LoadOptions{}) }

// LoadWith loads the tokenizer.json at path, of at most 512 MiB. If the file has a setting that
// affects ids and that this package does not implement exactly, LoadWith fails and names the
// setting.
func LoadWith(path string, o LoadOptions) (*Tokenizer, error) {
	b, err := readFile(path, maxFile)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) && hubName.MatchString(path) && !strings.HasSuffix(path, ".json") {
			return nil, fmt.Errorf("reading tokenizer: %w; names in the Hugging Face hub are not supported; download "+
				"the tokenizer.json of %s and name the file", err, path)
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
	size := info.Size() // 0 if it is not a regular file
	if size <= limit {
		b.Grow(int(size) + bytes.MinRead)
		if size, err = b.ReadFrom(io.LimitReader(f, limit+1)); err != nil {
			return nil, err
		}
	}
	if size > limit {
		return nil, fmt.Errorf("%s is larger than %d MiB, so it is not a tokenizer.json", path, limit>>20)
	}
	return b.Bytes(), nil
}

// Parse parses the bytes of a tokenizer.json with default options. Errors contain name.
func Parse(json []byte, name string) (*Tokenizer, error) {
	return ParseWith(json, name, LoadOptions{})
}

// ParseWith parses the bytes of a tokenizer.json like [LoadWith]. Errors contain name.
func ParseWith(json []byte, name string, o LoadOptions) (*Tokenizer, error) {
	t, err := parse(json, o)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	sum := sha256.Sum256(json)
	t.sha256 = hex.EncodeToString(sum[:])
	return t, nil
}

// SHA256 returns the hash of the tokenizer.json's bytes, in hexadecimal.
func (t *Tokenizer) SHA256() string { return t.sha256 }

// IgnoredTruncationOrPadding reports whether the file sets truncation or padding, and [LoadOptions]
// ignored the setting.
func (t *Tokenizer) IgnoredTruncationOrPadding() bool { return t.ignoredTruncationOrPadding }

// VocabSize returns the highest id plus one. All ids of an [Encoder] are below it.
func (t *Tokenizer) VocabSize() int { return len(t.tokens) }

// ID returns the id of the token with this text: an added token such as "<|endoftext|>", or
// otherwise a vocabulary entry. In a byte-level vocabulary the text is plain, " the", and not the
// file's spelling in the byte alphabet, "Ġthe". In other vocabularies it is the file's spelling:
// "▁the", "##ing", "<0x0A>".
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

// Token returns the text of the token with this id, in the spelling of [Tokenizer.ID]. special
// reports whether it is a special token, such as "<|endoftext|>". ok is false for an id without a
// token.
func (t *Tokenizer) Token(id uint32) (text string, special, ok bool) {
	for _, a := range t.added {
		if a.id == id {
			return a.content, a.special, true
		}
	}
	if int64(id) >= int64(len(t.tokens)) || t.tokens[id].end == 0 {
		return "", false, false
	}
	s := t.tokens[id]
	return string(t.text[s.start:s.end]), false, true
}

// SpecialTokens returns the ids that AddSpecialTokens of [EncodeOptions] adds before and after a
// text.
func (t *Tokenizer) SpecialTokens() (before, after []uint32) {
	isAfter := false
	for _, item := range t.post {
		switch {
		case item.text:
			isAfter = true
		case isAfter:
			after = append(after, item.id)
		default:
			before = append(before, item.id)
		}
	}
	return before, after
}

// Decode appends the text of the ids to dst. An id without a token is an error, where Hugging Face
// tokenizers skips the id.
//
// With a byte-level decoder the text is the concatenated bytes of the tokens, which need not be
// valid UTF-8, because two tokens may share a character. Added tokens decode to their own text.
// Hugging Face tokenizers instead replaces invalid bytes by U+FFFD. With any other decoder, or
// none, the text equals that from Hugging Face tokenizers with skip_special_tokens=False. It may
// depend on a token's neighbours and position, so decode ids that belong together in one call.
func (t *Tokenizer) Decode(dst []byte, ids []uint32) ([]byte, error) {
	start := len(dst)
	var tokens []string
	for i, id := range ids {
		if int64(id) >= int64(len(t.tokens)) || t.tokens[id].end == 0 {
			return dst[:start], fmt.Errorf("id %d at index %d is not in the vocabulary of %d tokens", id, i,
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
