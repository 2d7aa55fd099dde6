// Package blend makes one order of samples out of many sources, and reads along it.
//
// A [Config] (blend.yaml) names sources, weights and stages. [Seal] turns it into a [Plan]
// (plan.json), which fixes every batch of a run: which window of which source stands at which
// position, computed in either direction without any index file. [Open] adds the shards and gives
// [Data], from which samples are located, looked into ([Data.Peek]), searched for ([Data.Where]),
// streamed as Arrow record batches ([Data.Stream]) and hashed ([Data.Hash]). Two runs that log the
// hashes of their steps can be compared with [Compare].
//
// The order is a function of the plan alone: never of the number of ranks, of goroutines, or of
// where a reader starts.
//
// docs/formats/plan.md specifies the plan and the order, docs/formats/fingerprints.md the hashes.
// The package runs on little-endian machines, as does all of mula.
package blend
