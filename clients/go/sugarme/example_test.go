package sugarme_test

import (
	"fmt"
	"log"

	"mula/clients/go/sugarme"
	"mula/tokenize"
)

func Example() {
	loaded, err := tokenize.Load("../../../tokenize/testdata/olmo.json")
	if err != nil {
		log.Fatal(err)
	}
	model := sugarme.New(loaded, tokenize.SpecialsAsText)
	encoding, err := model.Encode("It's a text", true)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%d\n%q\n%d\n", encoding.Ids, encoding.Tokens, encoding.Offsets)
	text, err := model.Decode(encoding.Ids, true)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(text)
	// Output:
	// [42 85 379 222 66 300 70 89 85]
	// ["I" "t" "'s" " " "a" " t" "e" "x" "t"]
	// [[0 1] [1 2] [2 4] [4 5] [5 6] [6 8] [8 9] [9 10] [10 11]]
	// It's a text
}

// sugarme's own Tokenizer, with mula's encoder inside.
func ExampleModel_Tokenizer() {
	loaded, err := tokenize.Load("../../../tokenize/testdata/olmo.json")
	if err != nil {
		log.Fatal(err)
	}
	model := sugarme.New(loaded, tokenize.SpecialsAsText)
	encoding, err := model.Tokenizer().EncodeSingle("It's a text")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(encoding.Ids)
	// Output: [42 85 379 222 66 300 70 89 85]
}
