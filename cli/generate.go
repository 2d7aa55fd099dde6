package cli

import (
	"context"
	"fmt"
	"io"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/urfave/cli/v2"

	"mula/internal/quantity"
	"mula/moe"
	"mula/shards"
	"mula/tokenize"
	"mula/train/checkpoint"
)

func generateCommand() *cli.Command {
	return &cli.Command{
		Name:      "generate",
		Usage:     "generate text that continues a prompt",
		ArgsUsage: "[PROMPT]",
		Description: "The prompt - means standard input, unchanged, up to its end. Without a prompt the text starts " +
			"like a\n" +
			"document: after the end-of-document token. Generation also stops at that token. Temperature is\n" +
			"applied before top-k, and top-k before top-p, as in transformers. Text i of several, from 0, uses\n" +
			"the seed --seed + i.\n\n" +
			"Ids at or above the tokenizer's size are never generated. A model's vocabulary is often larger than\n" +
			"the tokenizer, because its size is rounded up, and transformers may generate such ids. Bytes that are\n" +
			"not UTF-8 are printed as U+FFFD, one for each cut-off character.\n\n" +
			"Example: mula generate --model runs/base --max-tokens 100 --temperature 0.8 \"func main() {\"",
		Flags: []cli.Flag{
			modelFlag,
			&cli.StringFlag{Name: "tokenizer", Usage: "use the tokenizer.json in `FILE` instead of the model's own"},
			&cli.IntFlag{Name: "max-tokens", Usage: "generate at most `N` tokens", Value: 100},
			&cli.Float64Flag{Name: "temperature",
				Usage: "divide the logits by this number; 0 always chooses the most likely token",
				Value: 0.8},
			&cli.IntFlag{Name: "top-k", Usage: "choose among the `N` most likely tokens only (0: all)", Value: 50},
			&cli.Float64Flag{Name: "top-p",
				Usage: "choose among the fewest tokens whose probabilities add up to this sum (0: all)"},
			&cli.Uint64Flag{Name: "seed", Usage: "seed of the random choices; the same seed gives the same text"},
			&cli.IntFlag{Name: "texts", Usage: "generate `N` texts", Value: 1},
			deviceFlag, precisionFlag, threadsFlag, jsonFlag,
		},
		Action: runGenerate,
	}
}

// maxPrompt is the maximum number of bytes read from standard input.
const maxPrompt = 64 << 20

func runGenerate(c *cli.Context) error {
	if err := needFlags(c, "model"); err != nil {
		return err
	}
	if err := checkComputing(c); err != nil {
		return err
	}
	if c.NArg() > 1 {
		return usagef("more than one prompt; put the prompt in quotes")
	}
	if c.Int("max-tokens") < 1 {
		return usagef("--max-tokens: must be at least 1, got %d", c.Int("max-tokens"))
	}
	if c.Int("texts") < 1 {
		return usagef("--texts: must be at least 1, got %d", c.Int("texts"))
	}
	options := moe.GenerateOptions{MaxTokens: c.Int("max-tokens"), Temperature: c.Float64("temperature"),
		TopK: c.Int("top-k"),
		TopP: c.Float64("top-p"), Seed: c.Uint64("seed")}
	if err := options.Validate(); err != nil {
		return &usageError{err.Error()}
	}
	text := c.Args().First()
	if text == "-" {
		read, err := io.ReadAll(io.LimitReader(c.App.Reader, maxPrompt+1))
		if err != nil {
			return fmt.Errorf("reading the prompt from standard input: %w", err)
		}
		if len(read) > maxPrompt {
			return fmt.Errorf("the prompt on standard input is larger than %s; shorten it", quantity.Bytes(maxPrompt))
		}
		text = string(read)
	}
	dir, err := findModel(c)
	if err != nil {
		return err
	}
	tokenizer, err := loadTokenizer(c, dir)
	if err != nil {
		return err
	}
	if path := c.String("tokenizer"); path != "" {
		if err := warnOtherTokenizer(c, dir, path); err != nil {
			return err
		}
	}
	m, device, err := openModel(c, dir)
	if err != nil {
		return err
	}
	defer device.Close()
	if have, want := tokenizer.VocabSize(), m.Config().VocabSize; have > want {
		return fmt.Errorf("the tokenizer has %s ids, but the model has %s; name the tokenizer that the model was "+
			"trained with",
			quantity.Grouped(int64(have)), quantity.Grouped(int64(want)))
	}
	options.Vocabulary = tokenizer.VocabSize() // the other rows are padding of the model's vocabulary
	if have, all := tokenizer.VocabSize(), m.Config().VocabSize; have < all {
		fmt.Fprintf(c.App.ErrWriter,
			"note: the tokenizer has %s ids and the model %s; ids from %d are never generated\n",
			quantity.Grouped(int64(have)), quantity.Grouped(int64(all)), have)
	}
	eod := m.Config().EOSTokenID
	if eod != moe.NoToken {
		options.Stop = []uint32{uint32(eod)}
	}
	prompt, err := tokenizer.NewEncoder(tokenize.EncodeOptions{}).Append(nil, []byte(text))
	if err != nil {
		return fmt.Errorf("prompt: %w", err)
	}
	if len(prompt) == 0 {
		if eod == moe.NoToken {
			return usagef("the model has no end-of-document token to start from; add a prompt")
		}
		prompt = []uint32{uint32(eod)}
	}
	w := c.App.Writer
	if c.Bool("json") {
		w = io.Discard
	}
	samples := make([]generated, c.Int("texts"))
	tokens, start := 0, time.Now()
	for i := range samples {
		if len(samples) > 1 {
			fmt.Fprintf(w, "%s=== text %d, seed %d\n", map[bool]string{true: "\n"}[i > 0], i, options.Seed)
		}
		if samples[i], err = generate(c.Context, w, m, tokenizer, text, prompt, options); err != nil {
			return fmt.Errorf("generating: %w", err)
		}
		tokens += len(samples[i].Tokens)
		options.Seed++
	}
	seconds := time.Since(start).Seconds()
	fmt.Fprintf(c.App.ErrWriter, "%s after %s, in %.2f s: %.1f tokens/s; %s of keys and values\n",
		quantity.Plural(int64(tokens), "token"), quantity.Plural(int64(len(prompt)), "token"), seconds,
		float64(tokens)/seconds, quantity.Bytes(m.Config().CacheMemory(len(prompt)+options.MaxTokens)))
	if c.Bool("json") {
		return printJSON(c.App.Writer, map[string]any{"prompt": text, "samples": samples})
	}
	return nil
}

// warnOtherTokenizer warns if a tokenizer.json differs from the tokenizer that the model was
// trained with.
func warnOtherTokenizer(c *cli.Context, dir checkpoint.ModelDir, path string) error {
	trained, err := dir.TokenizerHash(c.Context)
	if err != nil {
		return err
	}
	given, _, err := shards.HashFile(c.Context, path, nil)
	if err != nil {
		return err
	}
	if trained != "" && given != trained {
		fmt.Fprintf(c.App.ErrWriter,
			"warning: %s has SHA-256 %.16s…, but the model's tokenizer has %.16s…; "+
				"the same ids may mean different text\n",
			path, given, trained)
	}
	return nil
}

// A generated is a text generated by a model.
type generated struct {
	Seed   uint64   `json:"seed"`
	Text   string   `json:"text"`
	Tokens []uint32 `json:"tokens"` // including the token that ended the text
}

// generate continues a prompt. It writes the prompt and the new text to w as tokens are generated.
func generate(ctx context.Context, w io.Writer, m *moe.Model, tokenizer *tokenize.Tokenizer, text string,
	prompt []uint32,
	o moe.GenerateOptions) (generated, error) {
	// The text of a token may depend on earlier tokens, so all tokens are decoded together.
	ids := slices.Clone(prompt)
	spelled, err := tokenizer.Decode(nil, ids)
	if err != nil {
		return generated{}, fmt.Errorf("prompt: %w", err)
	}
	begin, shown := len(spelled), len(spelled)
	var failed error
	err = m.Generate(ctx, prompt, o, func(id uint32) bool {
		if len(ids) == len(prompt) {
			_, failed = fmt.Fprint(w, text)
		}
		ids = append(ids, id)
		if slices.Contains(o.Stop, id) {
			return true
		}
		if spelled, failed = tokenizer.Decode(spelled[:0], ids); failed != nil {
			return false
		}
		// A character may consist of several tokens. It is written when it is complete.
		if n := wholeCharacters(spelled); n > shown {
			_, failed = w.Write(tokenize.AppendText(nil, spelled[shown:n]))
			shown = n
		}
		return failed == nil
	})
	if err == nil {
		err = failed
	}
	if err != nil {
		return generated{}, err
	}
	fmt.Fprintf(w, "%s\n", tokenize.AppendText(nil, spelled[min(shown, len(spelled)):]))
	return generated{Seed: o.Seed, Text: string(tokenize.AppendText(nil, spelled[begin:])), Tokens: ids[len(prompt):]},
		nil
}

// wholeCharacters returns the length of b without an incomplete UTF-8 character at its end.
func wholeCharacters(b []byte) int {
	for n := 1; n <= min(utf8.UTFMax, len(b)); n++ {
		if c := b[len(b)-n]; utf8.RuneStart(c) {
			if !utf8.FullRune(b[len(b)-n:]) {
				return len(b) - n
			}
			break
		}
	}
	return len(b)
}
