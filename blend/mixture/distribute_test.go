package mixture

import (
	"testing"

	"pgregory.net/rapid"
)

// Distribute gives every position of a range the source and the number that At gives it. Ranges of
// other trees before it change nothing.
func TestDistribute(t *testing.T) {
	var d Distributor
	rapid.Check(t, func(t *rapid.T) {
		tree, err := NewTree(weightsGen(t))
		if err != nil {
			t.Fatal(err)
		}
		first := rapid.Int64Range(0, 1<<60).Draw(t, "first")
		n := rapid.IntRange(0, 3000).Draw(t, "n")
		distributed := 0
		d.Distribute(tree, first, n, func(source int, k int64, indices []uint16) {
			for i, index := range indices {
				wantSource, want := tree.At(first + int64(index))
				if source != wantSource || k+int64(i) != want {
					t.Fatalf("position %d is number %d of source %d, want number %d of source %d",
						first+int64(index), k+int64(i), source, want, wantSource)
				}
			}
			distributed += len(indices)
		})
		if distributed != n {
			t.Errorf("%d of %d positions were distributed", distributed, n)
		}
	})
}
