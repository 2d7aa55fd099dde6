package tokenize_test

import (
	"context"
	"fmt"
	"log"

	"mula/tokenize"
	"mula/tokenize/documents"
)

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
