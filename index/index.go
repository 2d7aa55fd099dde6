// Package index computes the tokens of sample i of a dataset, without a file that lists the
// samples.
//
// It implements mula's native order, version 1, for one source: how its shards are cut into windows
// ([Windows]), how the windows of an epoch are shuffled ([Permutation]), and how the epochs of a
// source follow each other ([Order]). Everything is a pure function with random access in both
// directions: from a sample's number to its tokens, and back.
//
// docs/formats/plan.md specifies the order, so that it can be implemented in other languages. The
// order of a given seed never changes: a change needs a new order version.
package index
