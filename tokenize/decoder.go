package tokenize

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

// decoding is the decoder of a tokenizer.json that does more than concatenating the bytes of
// tokens. It transforms the list of the tokens' texts, like the library.
type decoding struct {
	steps []decodeStep
	joint string // separator of the decoded tokens: a space if the file has no decoder
}

// A decodeStep changes the list of tokens. It may change the list in place.
type decodeStep func(tokens []string) ([]string, error)

func (d *decoding) append(dst []byte, tokens []string) ([]byte, error) {
	var err error
	for _, s := range d.steps {
		if tokens, err = s(tokens); err != nil {
			return dst, err
		}
	}
	for i, t := range tokens {
		if i > 0 {
			dst = append(dst, d.joint...)
		}
		dst = append(dst, t...)
	}
	return dst, nil
}

// parseDecoder returns nil for ByteLevel alone, which only concatenates bytes.
func parseDecoder(b json.RawMessage) (*decoding, error) {
	const name = "decoder"
	if isNull(b) {
		return &decoding{joint: " "}, nil
	}
	steps, err := stepsOf(b, name, "decoders")
	if err != nil {
		return nil, err
	}
	d := &decoding{}
	for _, s := range steps {
		step, err := parseDecodeStep(s)
		if err != nil {
			return nil, err
		}
		if s.kind == "ByteLevel" && s.name == name { // not in a Sequence
			return nil, nil
		}
		d.steps = append(d.steps, step)
	}
	return d, nil
}

// parseDecodeStep parses a decoder.
func parseDecodeStep(s stepJSON) (decodeStep, error) {
	switch s.kind {
	case "ByteLevel":
		return decodeByteLevel, s.read(&byteLevelJSON{})
	case "ByteFallback":
		return decodeByteFallback, nil
	case "Fuse":
		return func(tokens []string) ([]string, error) { return []string{strings.Join(tokens, "")}, nil }, nil
	case "Metaspace":
		m, err := parseMetaspace(s)
		return m.decode, err
	case "Replace":
		var f replaceJSON
		m, err := f.read(s)
		return eachToken(func(t string) string { return m.replaceAll(t, f.Content) }), err
	case "WordPiece":
		var f struct {
			Type    string `json:"type"`
			Prefix  string `json:"prefix"`
			Cleanup bool   `json:"cleanup"`
		}
		err := s.read(&f)
		return func(tokens []string) ([]string, error) {
			for i, t := range tokens {
				if i > 0 {
					var inner bool
					if t, inner = strings.CutPrefix(t, f.Prefix); !inner {
						t = " " + t
					}
				}
				if f.Cleanup {
					t = cleanUp(t)
				}
				tokens[i] = t
			}
			return tokens, nil
		}, err
	case "BPEDecoder":
		var f struct {
			Type   string `json:"type"`
			Suffix string `json:"suffix"`
		}
		err := s.read(&f)
		return func(tokens []string) ([]string, error) {
			for i, t := range tokens {
				joint := " "
				if i == len(tokens)-1 {
					joint = ""
				}
				tokens[i] = strings.ReplaceAll(t, f.Suffix, joint)
			}
			return tokens, nil
		}, err
	case "Strip":
		var f struct {
			Type    string `json:"type"`
			Content string `json:"content"`
			Start   int    `json:"start"`
			Stop    int    `json:"stop"`
		}
		if err := s.read(&f); err != nil {
			return nil, err
		}
		content, err := oneRune(f.Content, s.name+".content")
		if err == nil && (f.Start < 0 || f.Stop < 0 || f.Start > math.MaxInt32 || f.Stop > math.MaxInt32) {
			err = s.refuse()
		}
		return func(tokens []string) (_ []string, err error) {
			for i, t := range tokens {
				if tokens[i], err = stripToken(t, content, f.Start, f.Stop); err != nil {
					return nil, err
				}
			}
			return tokens, nil
		}, err
	case "CTC":
		var f struct {
			Type      string `json:"type"`
			Pad       string `json:"pad_token"`
			Delimiter string `json:"word_delimiter_token"`
			Cleanup   bool   `json:"cleanup"`
		}
		err := s.read(&f)
		return func(tokens []string) ([]string, error) {
			kept := tokens[:0]
			last := ""
			for i, t := range tokens {
				if i > 0 && t == last {
					continue
				}
				last = t
				t = strings.ReplaceAll(t, f.Pad, "")
				if f.Cleanup {
					t = strings.ReplaceAll(cleanUp(t), f.Delimiter, " ")
				}
				if t != "" {
					kept = append(kept, t)
				}
			}
			return kept, nil
		}, err
	}
	return nil, s.refuse()
}

func eachToken(f func(string) string) decodeStep {
	return func(tokens []string) ([]string, error) {
		for i, t := range tokens {
			tokens[i] = f(t)
		}
		return tokens, nil
	}
}

// cleanUp removes the spaces before punctuation and English contractions that tokenizing inserted.
func cleanUp(s string) string {
	for _, pair := range [...][2]string{{" .", "."}, {" ?", "?"}, {" !", "!"}, {" ,", ","}, {" ' ", "'"},
		{" n't", "n't"}, {" 'm", "'m"},
		{" do not", " don't"}, {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"}} {
		s = strings.ReplaceAll(s, pair[0], pair[1])
	}
	return s
}

func (m matcher) replaceAll(s, content string) string {
	b := []byte(s)
	var out []byte
	done := 0
	for it := m.all(b); it.next(); done = it.end {
		out = append(append(out, b[done:it.start]...), content...)
	}
	return string(append(out, b[done:]...))
}

func (m metaspace) decode(tokens []string) ([]string, error) {
	for i, t := range tokens {
		space := " "
		if i == 0 && (m.always || m.first) {
			space = ""
		}
		tokens[i] = strings.ReplaceAll(t, m.replacement, space)
	}
	return tokens, nil
}

// stripToken removes up to start leading and up to stop trailing occurrences of c.
func stripToken(t string, c rune, start, stop int) (string, error) {
	runes := []rune(t)
	from, to := 0, len(runes)
	for from < min(start, len(runes)) && runes[from] == c {
		from++
	}
	for i := range stop {
		at := len(runes) - i - 1
		if at < 0 {
			return "", fmt.Errorf("decoder Strip: the token %q has fewer than %d characters, and Hugging Face "+
				"tokenizers fails on it", t, stop)
		}
		if runes[at] != c {
			break
		}
		to = at
	}
	if from > to {
		return "", fmt.Errorf("decoder Strip: the token %q is stripped from both sides past its middle, and Hugging "+
			"Face tokenizers fails on it", t)
	}
	return string(runes[from:to]), nil
}

// decodeByteLevel concatenates the bytes that tokens represent, and replaces invalid bytes by
// U+FFFD.
func decodeByteLevel(tokens []string) ([]string, error) {
	var b []byte
	for _, t := range tokens {
		spelled, ok := unspell(b, t)
		if !ok {
			spelled = append(b, t...)
		}
		b = spelled
	}
	return []string{string(AppendText(nil, b))}, nil
}

// AppendText appends b to dst as valid UTF-8, decoded like Hugging Face tokenizers: each longest
// run of bytes that could start a character becomes one U+FFFD, as in Rust and the WHATWG encoding
// standard.
func AppendText(dst, b []byte) []byte {
	for len(b) > 0 {
		r, n := utf8.DecodeRune(b)
		if r != utf8.RuneError || n > 1 {
			dst = append(dst, b[:n]...)
			b = b[n:]
			continue
		}
		dst = utf8.AppendRune(dst, utf8.RuneError)
		b = b[invalidRun(b):]
	}
	return dst
}

// invalidRun returns how many bytes at the start of b, which does not start with a character, are
// the start of an incomplete character.
func invalidRun(b []byte) int {
	want, low, high := 0, byte(0x80), byte(0xbf)
	switch c := b[0]; {
	case c >= 0xc2 && c <= 0xdf:
		want = 1
	case c >= 0xe0 && c <= 0xef:
		want = 2
		if c == 0xe0 {
			low = 0xa0
		} else if c == 0xed {
			high = 0x9f
		}
	case c >= 0xf0 && c <= 0xf4:
		want = 3
		if c == 0xf0 {
			low = 0x90
		} else if c == 0xf4 {
			high = 0x8f
		}
	}
	n := 1
	for ; n <= want && n < len(b) && b[n] >= low && b[n] <= high; n++ {
		low, high = 0x80, 0xbf
	}
	return n
}

// decodeByteFallback joins tokens such as <0xE2> to characters. If they are not a character, each
// byte becomes U+FFFD.
func decodeByteFallback(tokens []string) ([]string, error) {
	var out []string
	var pending []byte
	flush := func() {
		if utf8.Valid(pending) {
			if len(pending) > 0 {
				out = append(out, string(pending))
			}
		} else {
			for range pending {
				out = append(out, string(utf8.RuneError))
			}
		}
		pending = pending[:0]
	}
	for _, t := range tokens {
		if c, ok := fallbackByte(t); ok {
			pending = append(pending, c)
			continue
		}
		flush()
		out = append(out, t)
	}
	flush()
	return out, nil
}

// fallbackByte returns the byte that a token such as <0x0A> represents.
func fallbackByte(t string) (byte, bool) {
	if len(t) != 6 || !strings.HasPrefix(t, "<0x") || t[5] != '>' {
		return 0, false
	}
	digits := strings.TrimPrefix(t[3:5], "+") // Rust's number parser takes a sign
	c, err := strconv.ParseUint(digits, 16, 8)
	return byte(c), err == nil
}
