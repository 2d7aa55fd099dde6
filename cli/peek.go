package cli

import (
	"fmt"
	"io"
	"strings"

	"github.com/urfave/cli/v2"

	"mula/blend"
	"mula/internal/quantity"
	"mula/tokenize"
)

func peekCommand() *cli.Command {
	return &cli.Command{
		Name:  "peek",
		Usage: "show the sample at a position of a plan, or all samples of a step",
		Description: "Shows the source, shard and window, and the documents in the window with their origins. " +
			"--tokenizer adds the text.\n\n" +
			"Example: mula peek --plan plan.json --step 120 --batch-size 32 --tokenizer tokenizer.json",
		Flags: []cli.Flag{
			planFlag, shardsFlag,
			&cli.Int64Flag{Name: "position", Usage: "show the sample at position `P`", DefaultText: "none"},
			&cli.Int64Flag{Name: "step", Usage: "show all samples of step `N`; requires --batch-size",
				DefaultText: "none"},
			batchSizeFlag, rankFlag, worldFlag,
			&cli.StringFlag{Name: "tokenizer", Usage: "decode text with the tokenizer.json in `FILE`"},
			&cli.IntFlag{Name: "characters", Usage: "show at most `N` characters of text per sample; 0: " +
				"all", Value: 300},
			jsonFlag,
		},
		Action: runPeek,
	}
}

// peeked is one sample as `mula peek --json` prints it.
type peeked struct {
	Position  int64            `json:"position"`
	Skipped   bool             `json:"skipped"`
	Source    string           `json:"source"`
	Epoch     int64            `json:"epoch"`
	Window    int64            `json:"window"`
	Shard     string           `json:"shard"`
	Token     int64            `json:"token"`
	Documents []peekedDocument `json:"documents"`
	Padding   *int             `json:"padding,omitempty"` // number of padding tokens after the documents, in a packed plan
	Text      *string          `json:"text,omitempty"`
}

type peekedDocument struct {
	Number int64  `json:"number"` // in the shard, from 0
	ID     string `json:"id"`
	File   string `json:"file"`
	Line   int64  `json:"line"`
	From   int    `json:"from"` // tokens [from, to) of the window
	To     int    `json:"to"`
	Shard  string `json:"shard,omitempty"` // in a packed plan, may differ from the sample's shard
}

func runPeek(c *cli.Context) error {
	if err := noOperands(c); err != nil {
		return err
	}
	switch {
	case c.IsSet("position") && c.IsSet("step"):
		return usagef("--position and --step exclude each other")
	case !c.IsSet("position") && !c.IsSet("step"):
		return usagef("--position or --step is required: see `%s --help`", c.Command.HelpName)
	}
	if err := atMost(c, maxNumber, "characters"); err != nil {
		return err
	}
	from, to := c.Int64("position"), c.Int64("position")+1
	if c.IsSet("step") {
		batchSize, rank, world, err := ranks(c)
		if err != nil {
			return err
		}
		share := int64(batchSize / world)
		from = c.Int64("step")*int64(batchSize) + int64(rank)*share
		to = from + share
	}
	data, err := openPlan(c)
	if err != nil {
		return err
	}
	defer data.Close()
	if c.IsSet("step") {
		if from < 0 || c.Int64("step") >= data.Steps(c.Int("batch-size")) {
			return fmt.Errorf("step is out of range: the plan has steps 0 to %d at batch size %d, got %d",
				data.Steps(c.Int("batch-size"))-1, c.Int("batch-size"), c.Int64("step"))
		}
		to = min(to, data.Length())
	}
	var tokenizer *tokenize.Tokenizer
	if path := c.String("tokenizer"); path != "" {
		if tokenizer, err = tokenize.LoadWith(path,
			tokenize.LoadOptions{IgnoreTruncationAndPadding: true}); err != nil {
			return err
		}
		if data.Tokenizer != nil && data.Tokenizer.SHA256 != tokenizer.SHA256() {
			return fmt.Errorf("%s is not the tokenizer of the plan's shards: it has SHA-256 %s, the plan has %s",
				path, tokenizer.SHA256(), data.Tokenizer.SHA256)
		}
	}
	var samples []peeked
	tokens := make([]uint32, data.SampleTokens())
	for position := from; position < to; position++ {
		sample, parts, err := data.Peek(c.Context, position)
		if err != nil {
			return err
		}
		s := peeked{Position: position, Skipped: sample.Skipped, Source: data.Sources[sample.Source].Name,
			Epoch:  sample.Epoch,
			Window: sample.Window, Shard: data.ShardPath(sample.Source, sample.Shard), Token: sample.Token}
		for _, p := range parts {
			d := peekedDocument{Number: p.Number, ID: p.ID, File: p.File, Line: p.Line, From: p.From, To: p.To}
			if data.Traits().Padded {
				d.Shard = data.ShardPath(p.Source, p.Shard)
			}
			s.Documents = append(s.Documents, d)
		}
		padding := 0
		if data.Traits().Padded {
			padding = data.SampleTokens() - parts[len(parts)-1].To // no sample is empty
			s.Padding = &padding
		}
		if tokenizer != nil {
			if err := data.Tokens(tokens, sample); err != nil {
				return err
			}
			text, err := tokenizer.Decode(nil, tokens[:len(tokens)-padding])
			if err != nil {
				return fmt.Errorf("position %d: %w", position, err)
			}
			s.Text = shortened(string(text), c.Int("characters"))
		}
		if c.Bool("json") {
			samples = append(samples, s)
			continue
		}
		if position > from {
			fmt.Fprintln(c.App.Writer)
		}
		printPeeked(c.App.Writer, s, data)
	}
	if c.Bool("json") {
		return printJSON(c.App.Writer, samples)
	}
	return nil
}

// shortened makes text valid UTF-8 (a window may start or end inside a character) and cuts it to n
// characters.
func shortened(text string, n int) *string {
	runes := []rune(strings.ToValidUTF8(text, "\ufffd"))
	if n > 0 && len(runes) > n {
		runes = append(runes[:n:n], '…')
	}
	short := string(runes)
	return &short
}

func printPeeked(w io.Writer, s peeked, data *blend.Data) {
	skipped := ""
	if s.Skipped {
		skipped = ", skipped by the plan"
	}
	if data.Traits().Padded {
		fmt.Fprintf(w, "position %s%s: source %s, epoch %d, packed sample %s\n", quantity.Grouped(s.Position), skipped,
			s.Source, s.Epoch, quantity.Grouped(s.Window))
	} else if !data.Traits().Scheduled { // no epochs, and documents from all over the shard
		fmt.Fprintf(w, "position %s%s: source %s, sample %s\n", quantity.Grouped(s.Position), skipped, s.Source,
			quantity.Grouped(s.Window))
		fmt.Fprintf(w, "  shard %s, from token %s\n", s.Shard, quantity.Grouped(s.Token))
	} else {
		fmt.Fprintf(w, "position %s%s: source %s, epoch %d, window %s\n", quantity.Grouped(s.Position), skipped,
			s.Source, s.Epoch, quantity.Grouped(s.Window))
		fmt.Fprintf(w, "  shard %s, tokens %s to %s\n", s.Shard, quantity.Grouped(s.Token),
			quantity.Grouped(s.Token+int64(data.SequenceLength)))
	}
	for _, d := range s.Documents {
		origin := "origin unknown: the shard has no .docs.arrow"
		if d.File != "" {
			origin = fmt.Sprintf("%s  %s:%d", oneLine(d.ID), oneLine(d.File), d.Line)
		}
		of := ""
		if d.Shard != "" {
			of = " of shard " + d.Shard
		}
		fmt.Fprintf(w, "  tokens %4d to %4d  document %s%s  %s\n", d.From, d.To-1, quantity.Grouped(d.Number), of,
			origin)
	}
	if s.Padding != nil && *s.Padding > 0 {
		fmt.Fprintf(w, "  tokens %4d to %4d  padding\n", data.SampleTokens()-*s.Padding, data.SequenceLength)
	}
	if s.Text != nil {
		for _, line := range strings.Split(*s.Text, "\n") {
			fmt.Fprintf(w, "  | %s\n", printable(line))
		}
	}
}

// oneLine escapes text for a terminal, including line breaks.
func oneLine(text string) string { return strings.ReplaceAll(printable(text), "\n", `\n`) }
