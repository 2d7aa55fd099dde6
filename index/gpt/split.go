package gpt

import "mula/index/python"

// SplitEdges divides the documents of a file between train, valid and test by rounded widths, as
// Megatron-LM did up to core 0.4 and what was made of it since then does: split k has the documents
// from edge k up to edge k+1. Each width is rounded, half to even, and what the widths have too
// much, or too little, is taken off all edges but the first. So an edge may be below 0, and a split
// may have no documents.
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
