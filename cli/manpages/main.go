// Command manpages writes the man pages of mula; see `make man`.
package main

import (
	"flag"
	"fmt"
	"os"

	"mula/cli"
)

func main() {
	output := flag.String("output", "dist/man", "write the pages to the folder `DIR`")
	date := flag.String("date", "", "put the date `YYYY-MM-DD` into the pages")
	flag.Parse()
	if err := cli.WriteManPages(*output, *date); err != nil {
		fmt.Fprintln(os.Stderr, "manpages:", err)
		os.Exit(1)
	}
}
