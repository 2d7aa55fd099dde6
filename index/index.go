// Package index says which tokens make sample i of one dataset, without a file that lists them.
//
// It holds the arithmetic of mula's native order, version 1, for one source: how its shards are cut
// into windows ([Windows]), how the windows of an epoch are shuffled ([Permutation]), and how the
// epochs of a source follow each other ([Order]). Everything is a pure function with random access
// in both directions: from a sample's number to its tokens, and back.
//
// The page docs/formats/plan.md specifies the order so that it can be written again in another
// language. What a given seed means never changes: a change needs a new order version.
package index
