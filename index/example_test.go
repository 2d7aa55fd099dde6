package index_test

import (
	"fmt"
	"log"

	"mula/index"
)

// Read the first four samples of a source with two shards, in the order of the seed.
func Example() {
	windows, err := index.NewWindows(4, []int64{41, 30}) // two shards, in tokens
	if err != nil {
		log.Fatal(err)
	}
	order := index.NewOrder(1, "web", windows.Count())
	for k := range int64(4) {
		epoch, window := order.At(k)
		shard, token := windows.Locate(window)
		fmt.Printf("sample %d is window %d of epoch %d: tokens %d to %d of shard %d\n", k, window, epoch, token,
			token+5, shard)
	}
	fmt.Println("window 3 of epoch 0 is sample", order.Inverse(0, 3))
	// Output:
	// sample 0 is window 14 of epoch 0: tokens 16 to 21 of shard 1
	// sample 1 is window 0 of epoch 0: tokens 0 to 5 of shard 0
	// sample 2 is window 10 of epoch 0: tokens 0 to 5 of shard 1
	// sample 3 is window 8 of epoch 0: tokens 32 to 37 of shard 0
	// window 3 of epoch 0 is sample 14
}
