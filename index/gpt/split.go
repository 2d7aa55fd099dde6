package gpt

import "mula/index/python"

// SplitEdges divides the documents of a file into train, valid and test by rounded widths, like
// Megatron-LM up to core 0.4 and programs derived from it: split k has the documents from edge k to
// edge k+1. Each width is rounded half to even, and the excess or deficit of the widths is
// subtracted from all edges except the first. Edges can therefore be below 0, and a split can have
// no documents.
func SplitEdges(fractions [3]float64, documents int64) [4]int64 {
	var edges [4]int64
	for i, f := range fractions {
		edges[i+1] = edges[i] + python.RoundHalfEven(f*float64(documents))
	}
	surplus := edges[3] - documents
	for i := 1; i < len(edges); i++ {
		edges[i] -= surplus
	}
	return edges
}
