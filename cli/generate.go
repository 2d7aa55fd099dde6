package cli

import (
	"fmt"
	"slices"
	"unicode/utf8"

	"github.com/urfave/cli/v2"

	"mula/moe"
	"mula/tokenize"
)

func generateCommand() *cli.Command {
	return &cli.Command{
		Name:      "generate",
		Usage:     "continue a text with a model",
		ArgsUsage: "[PROMPT]",
		Description: "Without a prompt the text begins as a document does: after the end-of-document token.\n\n" +
			"Example: mula generate --model runs/base --max-tokens 100 --temperature 0.8 \"func main() {\"",
		Flags: []cli.Flag{
			modelFlag,
			&cli.StringFlag{Name: "tokenizer", Usage: "use the tokenizer.json in `FILE` instead of the model's own"},
			&cli.IntFlag{Name: "max-tokens", Usage: "make at most so many tokens", Value: 100},
			&cli.Float64Flag{Name: "temperature", Usage: "divides the logits; 0 always takes the likeliest token", Value: 0.8},
			&cli.IntFlag{Name: "top-k", Usage: "choose among so many of the likeliest tokens only (0: all)", Value: 50},
			&cli.Float64Flag{Name: "top-p", Usage: "choose among the fewest tokens whose probabilities reach this sum (0: all)"},
			&cli.Uint64Flag{Name: "seed", Usage: "of the random choices: the same seed gives the same text"},
			threadsFlag, jsonFlag,
		},
		Action: runGenerate,
	}
}

func runGenerate(c *cli.Context) error {
	if err := needFlags(c, "model"); err != nil {
		return err
	}
	if err := atMost(c, maxThreads, "threads"); err != nil {
		return err
	}
	if c.NArg() > 1 {
		return usagef("one prompt at most: put it in quotes")
	}
	if c.Int("max-tokens") < 1 {
		return usagef("--max-tokens is %d; it must be at least 1", c.Int("max-tokens"))
	}
	options := moe.GenerateOptions{MaxTokens: c.Int("max-tokens"), Temperature: c.Float64("temperature"), TopK: c.Int("top-k"),
		TopP: c.Float64("top-p"), Seed: c.Uint64("seed")}
	if err := options.Validate(); err != nil {
		return &usageError{err.Error()}
	}
	m, device, found, err := openModel(c)
	if err != nil {
		return err
	}
	defer device.Close()
	tokenizer, err := loadTokenizer(c, found)
	if err != nil {
		return err
	}
	if have, want := tokenizer.VocabSize(), m.Config().VocabSize; have > want {
		return fmt.Errorf("the tokenizer has %s ids and the model %s: they do not belong together", count(int64(have)), count(int64(want)))
	}
	eod := m.Config().EOSTokenID
	if eod != moe.NoToken {
		options.Stop = []uint32{uint32(eod)}
	}
	text := c.Args().First()
	prompt, err := tokenizer.NewEncoder(tokenize.EncodeOptions{}).Append(nil, []byte(text))
	if err != nil {
		return fmt.Errorf("prompt: %w", err)
	}
	if len(prompt) == 0 {
		if eod == moe.NoToken {
			return usagef("the model has no end-of-document token to begin with; give a prompt")
		}
		prompt = []uint32{uint32(eod)}
	}
	w := c.App.Writer
	// What a token stands for may depend on those before it, so that the text is always that of all of them.
	ids := slices.Clone(prompt)
	spelled, err := tokenizer.Decode(nil, ids)
	if err != nil {
		return fmt.Errorf("prompt: %w", err)
	}
	begin, shown := len(spelled), len(spelled)
	var failed error
	err = m.Generate(c.Context, prompt, options, func(id uint32) bool {
		if len(ids) == len(prompt) && !c.Bool("json") {
			_, failed = fmt.Fprint(w, text)
		}
		ids = append(ids, id)
		if eod != moe.NoToken && id == uint32(eod) {
			return true
		}
		if spelled, failed = tokenizer.Decode(spelled[:0], ids); failed != nil || c.Bool("json") {
			return failed == nil
		}
		// A character may be spread over several tokens: it is shown when it is whole.
		if n := wholeCharacters(spelled); n > shown {
			_, failed = w.Write(spelled[shown:n])
			shown = n
		}
		return failed == nil
	})
	if err == nil {
		err = failed
	}
	if err != nil {
		return fmt.Errorf("generating: %w", err)
	}
	if c.Bool("json") {
		return printJSON(w, map[string]any{"prompt": text, "text": string(spelled[begin:]), "tokens": ids[len(prompt):]})
	}
	_, err = fmt.Fprintf(w, "%s\n", spelled[shown:])
	return err
}

// wholeCharacters is the length of b without a UTF-8 character at its end that is not complete.
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
