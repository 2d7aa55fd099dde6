package shards_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"mula/shards"
)

func Example() {
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	prefix := filepath.Join(dir, "wiki-0000")

	w, err := shards.Create(prefix, shards.DTypeFor(50280), shards.TokenizerInfo{VocabSize: 50280, EOD: 0})
	if err != nil {
		log.Fatal(err)
	}
	defer w.Abort()
	for line, tokens := range [][]uint32{{14, 15, 0}, {16, 17, 18, 0}} {
		if err := w.Append(tokens, shards.DocumentOrigin{ID: fmt.Sprint("Q", line), File: "wiki.jsonl",
			Line: int64(line) + 1}); err != nil {
			log.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		log.Fatal(err)
	}

	s, err := shards.Open(prefix)
	if err != nil {
		log.Fatal(err)
	}
	defer s.Close()
	window := make([]uint32, 4)
	if err := s.Read(window, 2); err != nil {
		log.Fatal(err)
	}
	documents, err := s.DocumentIDs(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	document, err := s.DocumentAt(5)
	if err != nil {
		log.Fatal(err)
	}
	origin, err := documents.Origin(document)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(s.Tokens(), "tokens, a window", window, "token 5 from", origin.ID, "line", origin.Line)
	// Output: 7 tokens, a window [0 16 17 18] token 5 from Q1 line 2
}
