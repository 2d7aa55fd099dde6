package mixture_test

import (
	"fmt"

	"mula/blend/mixture"
)

// Positions are shared out by weight, evenly over any stretch, and can be asked for in any order.
func ExampleTree() {
	tree, err := mixture.NewTree([]uint64{5, 2, 1})
	if err != nil {
		panic(err)
	}
	for y := range int64(8) {
		source, k := tree.At(y)
		back, _ := tree.Inverse(source, k)
		fmt.Printf("position %d: sample %d of source %d (back at %d)\n", y, k, source, back)
	}
	fmt.Println("of the first million:", tree.Counts(1_000_000))
	// Output:
	// position 0: sample 0 of source 2 (back at 0)
	// position 1: sample 0 of source 0 (back at 1)
	// position 2: sample 0 of source 1 (back at 2)
	// position 3: sample 1 of source 0 (back at 3)
	// position 4: sample 2 of source 0 (back at 4)
	// position 5: sample 1 of source 1 (back at 5)
	// position 6: sample 3 of source 0 (back at 6)
	// position 7: sample 4 of source 0 (back at 7)
	// of the first million: [625000 250000 125000]
}
