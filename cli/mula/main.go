// Command mula blends token corpora into one deterministic order of samples and trains
// mixture-of-experts language models on it.
package main

import (
	"os"

	"mula/cli"
)

func main() {
	os.Exit(cli.Main(os.Args, os.Stdin, os.Stdout, os.Stderr))
}
