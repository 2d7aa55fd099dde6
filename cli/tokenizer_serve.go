package cli

import (
	"net"
	"os"

	"github.com/urfave/cli/v2"

	"mula/tokenize"
	"mula/tokenize/batches"
)

// tokenizerServeCommand returns the command that the Python client starts.
func tokenizerServeCommand() *cli.Command {
	return &cli.Command{
		Name:  "serve",
		Usage: "encode and decode texts for the process that started this command",
		Description: "mula.Tokenizer of the Python client starts this command and is the usual way to use it. " +
			"Standard input is a unix socket.\n" +
			"`go doc mula/tokenize/batches` has the messages. The command ends when the socket is closed.\n\n" +
			"Example: mula tokenizer serve --tokenizer tokenizer.json --workers 8",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "tokenizer", Usage: "use the Hugging Face tokenizer.json in `FILE` (required)"},
			&cli.StringFlag{Name: "specials",
				Usage: "encode special tokens that occur in texts as plain text (text), or as special ids (tokens, " +
					"the default of Hugging Face)", Value: "text"},
			&cli.BoolFlag{Name: "add-special-tokens",
				Usage: "add the tokens of the tokenizer's post-processor, such as a begin token"},
			&cli.BoolFlag{Name: "ignore-truncation-and-padding",
				Usage: "ignore the tokenizer's truncation and padding settings; texts are never cut or padded"},
			workersFlag,
		},
		Action: tokenizerServe,
	}
}

func tokenizerServe(c *cli.Context) error {
	if err := needFlags(c, "tokenizer"); err != nil {
		return err
	}
	if err := noOperands(c); err != nil {
		return err
	}
	if err := atMost(c, maxThreads, "workers"); err != nil {
		return err
	}
	var socket *net.UnixConn
	if f, ok := c.App.Reader.(*os.File); ok {
		if conn, err := net.FileConn(f); err == nil {
			socket, _ = conn.(*net.UnixConn)
		}
	}
	if socket == nil {
		return usagef("standard input is not a unix socket; use mula.Tokenizer of the Python client, which starts " +
			"this command, or `mula tokenize`")
	}
	load := tokenize.LoadOptions{IgnoreTruncationAndPadding: c.Bool("ignore-truncation-and-padding")}
	t, err := tokenize.LoadWith(c.String("tokenizer"), load)
	if err != nil {
		return err
	}
	return batches.Serve(c.Context, socket, t, batches.Options{Workers: c.Int("workers"),
		Encode: tokenize.EncodeOptions{Specials: specials.value(c.String("specials")),
			AddSpecialTokens: c.Bool("add-special-tokens")}})
}
