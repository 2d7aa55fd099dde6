package tokenize_test

import (
	"context"
	"fmt"
	"log"
	"sync"
	"sync/atomic"

	"mula/tokenize"
	"mula/tokenize/documents"
)

// Encode a batch of texts with several goroutines. They share the tokenizer, and each has an
// encoder of its own. Each encodes the next text when it has finished one.
func ExampleTokenizer() {
	tokenizer, err := tokenize.Load("testdata/olmo.json")
	if err != nil {
		log.Fatal(err)
	}
	texts := [][]byte{[]byte("It's a  text"), []byte("the text"), []byte("\xff"), []byte("")}
	ids := make([][]uint32, len(texts))
	errs := make([]error, len(texts))
	var next atomic.Int64
	var workers sync.WaitGroup
	for range 2 {
		workers.Go(func() {
			encoder := tokenizer.NewEncoder(tokenize.EncodeOptions{})
			for i := next.Add(1) - 1; i < int64(len(texts)); i = next.Add(1) - 1 {
				ids[i], errs[i] = encoder.Append(nil, texts[i])
			}
		})
	}
	workers.Wait()
	for i := range texts {
		fmt.Println(ids[i], errs[i])
	}
	// Output:
	// [42 85 379 222 66 662 85 70 89 85] <nil>
	// [271 70 300 70 89 85] <nil>
	// [] invalid UTF-8 at byte 0
	// [] <nil>
}

// Two texts share one slice of ids, with the end of each. No memory is allocated for each text.
func ExampleTokenizer_NewEncoder() {
	tokenizer, err := tokenize.Load("testdata/olmo.json")
	if err != nil {
		log.Fatal(err)
	}
	// As Hugging Face tokenizers encode by default.
	encoder := tokenizer.NewEncoder(tokenize.EncodeOptions{
		Specials: tokenize.SpecialsAsTokens, AddSpecialTokens: true})
	var ids []uint32
	var ends []int
	for _, text := range []string{"the text", "It's a  text<|endoftext|>"} {
		if ids, err = encoder.Append(ids, []byte(text)); err != nil {
			log.Fatal(err)
		}
		ends = append(ends, len(ids))
	}
	fmt.Println(ids, ends)
	// Output: [271 70 300 70 89 85 42 85 379 222 66 662 85 70 89 85 0] [6 17]
}

func ExampleEncoder_Append() {
	tokenizer, err := tokenize.Load("testdata/olmo.json")
	if err != nil {
		log.Fatal(err)
	}
	encoder := tokenizer.NewEncoder(tokenize.EncodeOptions{})
	ids, err := encoder.Append(nil, []byte("It's a  text"))
	if err != nil {
		log.Fatal(err)
	}
	text, err := tokenizer.Decode(nil, ids)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%d %s\n", ids, text)
	// Output: [42 85 379 222 66 662 85 70 89 85] It's a  text
}

// Look up single tokens.
func ExampleTokenizer_ID() {
	tokenizer, err := tokenize.Load("testdata/olmo.json")
	if err != nil {
		log.Fatal(err)
	}
	id, ok := tokenizer.ID("<|endoftext|>")
	text, special, _ := tokenizer.Token(id)
	fmt.Println(id, ok, text, special, tokenizer.VocabSize())
	// Output: 0 true <|endoftext|> true 667
}

// Train a vocabulary of 300 tokens on two documents, and use it.
func ExampleTrain() {
	texts := []string{"the cat sat on the mat, and the dog sat on the cat", "the mat is flat, and that is that"}
	corpus := func(yield func(documents.Document, error) bool) {
		for _, text := range texts {
			if !yield(documents.Document{Text: []byte(text)}, nil) {
				return
			}
		}
	}
	file, err := tokenize.Train(context.Background(), corpus, tokenize.TrainOptions{
		VocabSize: 300, SpecialTokens: []string{"<|endoftext|>"}})
	if err != nil {
		log.Fatal(err)
	}
	tokenizer, err := tokenize.Parse(file, "tokenizer.json")
	if err != nil {
		log.Fatal(err)
	}
	ids, err := tokenizer.NewEncoder(tokenize.EncodeOptions{}).Append(nil, []byte("the cat is that"))
	if err != nil {
		log.Fatal(err)
	}
	for _, id := range ids {
		text, _, _ := tokenizer.Token(id)
		fmt.Printf("%q ", text)
	}
	fmt.Println(len(ids), "ids of", tokenizer.VocabSize())
	// Output: "the" " cat" " is" " that" 4 ids of 282
}
