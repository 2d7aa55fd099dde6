package tokenize_test

import (
	"fmt"
	"log"

	"mula/tokenize"
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
